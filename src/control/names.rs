//! Backend names to addresses.
//!
//! `getaddrinfo` blocks for as long as the resolver likes, so it runs on threads of its own, each
//! name once at a time, and whoever waits for it waits for a bounded time. The last good answer
//! stays until there is a better one: a name server that is down takes no backend down.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore};

use crate::meter::events::{Level, say};
use crate::pool::Addresses;
use crate::pure::plan::{Host, Plan};

/// Looks names up and keeps what was found. Lives on control's thread.
pub struct Names {
    lookup: Lookup,
    found: RefCell<Addresses>,
    /// Being looked up now.
    pending: RefCell<HashSet<Box<str>>>,
    answered: Notify,
    /// Since [`Names::news`] was asked last.
    changed: Cell<bool>,
    room: Arc<Semaphore>,
}

/// How a name is looked up; a test puts its own in place of the resolver.
pub type Lookup = fn(Box<str>) -> tokio::task::JoinHandle<Vec<IpAddr>>;

/// The system's resolver.
pub fn system(name: Box<str>) -> tokio::task::JoinHandle<Vec<IpAddr>> {
    tokio::spawn(async move {
        let found = tokio::net::lookup_host((&*name, 0)).await;
        found.map(|list| list.map(|address| address.ip()).collect()).unwrap_or_default()
    })
}

/// Lookups at a time; the others wait. A stuck resolver holds this many threads and no more.
const LOOKUPS_MAX: usize = 16;

/// Addresses kept of one name.
const ADDRESSES_MAX: usize = 32;

impl Names {
    pub fn new(lookup: Lookup) -> Rc<Names> {
        Rc::new(Names {
            lookup,
            found: RefCell::default(),
            pending: RefCell::default(),
            answered: Notify::new(),
            changed: Cell::new(false),
            room: Arc::new(Semaphore::new(LOOKUPS_MAX)),
        })
    }

    /// Looks up every name of `plan` and waits for at most `limit`; slower answers are kept when
    /// they come. Gives the names without any address.
    pub async fn refresh(self: &Rc<Names>, plan: &Plan, limit: Duration) -> Vec<Box<str>> {
        let names: BTreeSet<Box<str>> = hosts(plan).map(Into::into).collect();
        self.start(plan);
        let waiting = async {
            loop {
                let answered = self.answered.notified();
                let waits = names.iter().any(|name| self.pending.borrow().contains(name));
                if !waits {
                    return;
                }
                answered.await;
            }
        };
        let _ = tokio::time::timeout(limit, waiting).await;
        let found = self.found.borrow();
        names.into_iter().filter(|name| !found.contains_key(name)).collect()
    }

    /// Starts looking up every name of `plan` that is not being looked up already.
    pub fn start(self: &Rc<Names>, plan: &Plan) {
        for name in hosts(plan) {
            self.start_one(name);
        }
    }

    fn start_one(self: &Rc<Names>, name: &str) {
        if !self.pending.borrow_mut().insert(name.into()) {
            return;
        }
        let names = Rc::clone(self);
        let name: Box<str> = name.into();
        tokio::task::spawn_local(async move {
            let permit = names.room.acquire().await;
            let mut list = (names.lookup)(name.clone()).await.unwrap_or_default();
            drop(permit);
            list.truncate(ADDRESSES_MAX);
            names.keep(&name, list);
            names.pending.borrow_mut().remove(&name);
            names.answered.notify_waiters();
        });
    }

    fn keep(&self, name: &str, list: Vec<IpAddr>) {
        let mut found = self.found.borrow_mut();
        let known = found.get(name);
        if list.is_empty() {
            let kept = known.map_or(0, Vec::len);
            say(Level::Warn, "name_not_resolved", &[("name", &name), ("kept", &kept)]);
            return;
        }
        // The order may turn at each answer; that is no news.
        let set = |list: &[IpAddr]| list.iter().copied().collect::<BTreeSet<_>>();
        if known.is_none_or(|known| set(known) != set(&list)) {
            say(Level::Info, "name_resolved", &[("name", &name), ("addresses", &list.len())]);
        }
        if known != Some(&list) {
            self.changed.set(true);
            found.insert(name.into(), list);
        }
    }

    /// All that is known, if that has changed since this was asked last.
    pub fn news(&self) -> Option<Addresses> {
        self.changed.take().then(|| self.known())
    }

    pub fn known(&self) -> Addresses {
        self.found.borrow().clone()
    }

    /// Forgets the names that `plan` does not have.
    pub fn forget_all_but(&self, plan: &Plan) {
        let wanted: HashSet<&str> = hosts(plan).collect();
        self.found.borrow_mut().retain(|name, _| wanted.contains(&**name));
    }
}

fn hosts(plan: &Plan) -> impl Iterator<Item = &str> {
    plan.backends.iter().filter_map(|backend| match &backend.host {
        Host::Name(name) => Some(&**name),
        Host::Ip(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::pure::board::Registry;

    fn plan(hosts: &[&str]) -> Plan {
        let backends: Vec<String> = hosts
            .iter()
            .enumerate()
            .map(|(index, host)| format!("{{ name: b{index}, url: 'http://{host}:8000' }}"))
            .collect();
        let text = format!(
            "server: {{ listen: '127.0.0.1:0' }}\npools: {{ p: {{ backends: [ {} ] }} }}\nroutes: [ {{ name: default, pool: p }} ]\n",
            backends.join(", ")
        );
        let no_file = |_: &str| Err("no files".to_owned());
        Plan::build(&text, &|_| None, &no_file, &mut Registry::new()).expect("a plan")
    }

    fn run(test: impl Future<Output = ()>) {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        tokio::task::LocalSet::new().block_on(&runtime, test);
    }

    static TURN: AtomicUsize = AtomicUsize::new(0);

    /// `up` has an address at first and none later; `stuck` never answers; `late` is late.
    fn scripted(name: Box<str>) -> tokio::task::JoinHandle<Vec<IpAddr>> {
        let turn = TURN.load(Ordering::Relaxed);
        tokio::spawn(async move {
            match &*name {
                "up" if turn == 0 => vec![IpAddr::from([10, 0, 0, 1])],
                "late" => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    vec![IpAddr::from([10, 0, 0, 2])]
                }
                "stuck" => std::future::pending().await,
                _ => Vec::new(),
            }
        })
    }

    #[test]
    fn the_last_good_answer_stays_and_nothing_waits_for_ever() {
        run(async {
            let names = Names::new(scripted);
            let both = plan(&["up", "stuck", "late", "127.0.0.1"]);
            let missing = names.refresh(&both, Duration::from_millis(20)).await;
            assert_eq!(missing, [Box::<str>::from("late"), Box::from("stuck")]);
            assert_eq!(names.news().map(|known| known.len()), Some(1));
            assert_eq!(names.news(), None);

            TURN.store(1, Ordering::Relaxed);
            let missing = names.refresh(&both, Duration::from_millis(500)).await;
            assert_eq!(missing, [Box::<str>::from("stuck")]);
            let known = names.known();
            assert_eq!(known["up"], [IpAddr::from([10, 0, 0, 1])]);
            assert_eq!(known["late"], [IpAddr::from([10, 0, 0, 2])]);

            names.forget_all_but(&plan(&["late", "new"]));
            assert_eq!(names.known().len(), 1);
        });
    }

    #[test]
    fn the_system_knows_localhost() {
        run(async {
            let names = Names::new(system);
            let local = plan(&["localhost"]);
            let missing = names.refresh(&local, Duration::from_secs(10)).await;
            assert!(missing.is_empty());
            assert!(names.known()["localhost"].iter().all(IpAddr::is_loopback));
        });
    }
}
