//! The public keys of issuers of tokens, kept fresh.
//!
//! Files are looked at and URLs asked on threads that may block, each source once at a time. The last
//! good set stays until there is a better one: an issuer that is down locks nobody out, and one that
//! answers rubbish does not either. A key that leaves the set opens nothing from the next request on.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::source::{self, Source};
use crate::fetch::{Bounds, Fetcher};
use crate::meter::events::{Level, say};
use crate::pure::jwt::{KeySet, KeySets};
use crate::pure::plan::{Issuer, KeySource, Plan};

/// Lives on control's thread.
pub struct Keys {
    sets: RefCell<KeySets>,
    /// By place, as [`KeySource::place`] has it.
    sources: RefCell<BTreeMap<Box<str>, State>>,
    /// A token came whose key is in no set.
    wanted: Cell<bool>,
    changed: Cell<bool>,
    answered: Notify,
}

#[derive(Default)]
struct State {
    asking: bool,
    /// When it was asked last.
    asked: Option<Instant>,
    /// Why it failed then, if it did.
    failing: Option<String>,
    /// Which file it was.
    seen: Option<Stamp>,
}

/// What tells two versions of a file apart.
type Stamp = (Option<SystemTime>, u64);

/// How often a file is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How soon a URL that failed is asked again, or one whose set lacks a key that a token names: as
/// strangers can make up names, not sooner.
const AGAIN: Duration = Duration::from_secs(10);

const BOUNDS: Bounds = Bounds {
    connect: Duration::from_secs(5),
    total: Duration::from_secs(10),
    // Entra's set with its chains of certificates has 20 KB.
    body_bytes_max: KEYS_BYTES_MAX as usize,
};
const KEYS_BYTES_MAX: u64 = 256 * 1024;

impl Keys {
    pub fn new() -> Rc<Keys> {
        Rc::new(Keys {
            sets: RefCell::default(),
            sources: RefCell::default(),
            wanted: Cell::new(false),
            changed: Cell::new(false),
            answered: Notify::new(),
        })
    }

    /// Takes the keys of files from `plan`, asks every URL that was not asked before, and waits for the
    /// answers, `limit` at most. What `plan` does not name is forgotten. Gives the issuers without keys.
    pub async fn follow(
        self: &Rc<Keys>,
        plan: &Plan,
        from: &Arc<Source>,
        limit: Duration,
    ) -> Vec<Arc<str>> {
        let wanted = |place: &str| plan.issuers.iter().any(|issuer| issuer.keys.place() == place);
        self.sources.borrow_mut().retain(|place, _| wanted(place));
        let mut forgotten = false;
        self.sets.borrow_mut().of.retain(|place, _| {
            forgotten |= !wanted(place);
            wanted(place)
        });
        self.changed.set(self.changed.get() || forgotten);
        for issuer in &plan.issuers {
            match &issuer.keys {
                KeySource::File { path, set } => {
                    self.keep(path, Arc::clone(set));
                }
                KeySource::Url { .. } => {
                    // So that metrics show it from the start.
                    self.sets.borrow_mut().of.entry(issuer.keys.place().into()).or_default();
                    if self.set_of(issuer).is_none() {
                        self.ask(issuer, from);
                    }
                }
            }
        }
        let asking = || self.sources.borrow().values().any(|state| state.asking);
        let waiting = async {
            loop {
                let answered = self.answered.notified();
                if !asking() {
                    return;
                }
                answered.await;
            }
        };
        let _ = tokio::time::timeout(limit, waiting).await;
        let without = plan.issuers.iter().filter(|issuer| self.set_of(issuer).is_none());
        without.map(|issuer| Arc::clone(&issuer.name)).collect()
    }

    fn set_of(&self, issuer: &Issuer) -> Option<Arc<KeySet>> {
        self.sets.borrow().of.get(issuer.keys.place())?.set.clone()
    }

    /// Asks every source whose time has come; `wanted` is whether a key was missed since the last call.
    pub fn tick(self: &Rc<Keys>, plan: &Plan, from: &Arc<Source>, wanted: bool) {
        if plan.issuers.is_empty() {
            return;
        }
        self.wanted.set(self.wanted.get() || wanted);
        let now = Instant::now();
        let mut satisfied = true;
        for issuer in &plan.issuers {
            let due = {
                let sources = self.sources.borrow();
                let state = sources.get(issuer.keys.place());
                if state.is_some_and(|state| state.asking) {
                    continue;
                }
                let since = state.and_then(|state| state.asked).map(|asked| now - asked);
                let failing = state.is_some_and(|state| state.failing.is_some());
                match &issuer.keys {
                    KeySource::File { .. } => since.is_none_or(|since| since >= LOOK_EVERY),
                    KeySource::Url { every, .. } => {
                        let soon = failing || self.wanted.get();
                        let wait = if soon { AGAIN.min(*every) } else { *every };
                        satisfied &= !soon || since.is_none_or(|since| since >= wait);
                        since.is_none_or(|since| since >= wait)
                    }
                }
            };
            if due {
                self.ask(issuer, from);
            }
        }
        if satisfied {
            self.wanted.set(false);
        }
    }

    fn ask(self: &Rc<Keys>, issuer: &Issuer, from: &Arc<Source>) {
        let place: Box<str> = issuer.keys.place().into();
        let seen = {
            let mut sources = self.sources.borrow_mut();
            let state = sources.entry(place.clone()).or_default();
            if state.asking {
                return;
            }
            state.asking = true;
            state.asked = Some(Instant::now());
            state.seen
        };
        let (keys, from, name) = (Rc::clone(self), Arc::clone(from), Arc::clone(&issuer.name));
        let of = issuer.keys.clone();
        tokio::task::spawn_local(async move {
            let asked = tokio::task::spawn_blocking(move || match of {
                KeySource::File { path, .. } => file(&from.beside(&path), seen),
                KeySource::Url { url, ca, .. } => fetch(url.expose(), ca.as_deref()).map(Some),
            });
            let asked = asked.await.unwrap_or_else(|_| Err("asking panicked".to_owned()));
            keys.answer(&place, &name, asked);
            keys.answered.notify_waiters();
        });
    }

    /// `None` is a file that has not changed.
    fn answer(&self, place: &str, name: &str, asked: Result<Option<Fresh>, String>) {
        let mut sources = self.sources.borrow_mut();
        // A reload may have dropped it meanwhile.
        let Some(state) = sources.get_mut(place) else { return };
        state.asking = false;
        match asked {
            Ok(None) => {}
            Ok(Some(fresh)) => {
                // The first look at a file finds what the plan was built with.
                let first = state.seen.is_none() && fresh.stamp.is_some();
                state.seen = fresh.stamp;
                if !first {
                    self.count(place, |known| known.refreshed += 1);
                }
                let count = fresh.set.len();
                let failed = state.failing.take().is_some();
                if self.keep(place, Arc::new(fresh.set)) || failed {
                    say(Level::Info, "jwks_refreshed", &[("issuer", &name), ("keys", &count)]);
                }
            }
            Err(why) => {
                self.count(place, |known| known.failed += 1);
                // Once, not every time: it is asked again soon.
                if state.failing.as_ref() != Some(&why) {
                    let kept = self.sets.borrow().set(place).map_or(0, KeySet::len);
                    let fields: [(&str, &dyn std::fmt::Display); 3] =
                        [("issuer", &name), ("error", &why), ("kept", &kept)];
                    say(Level::Warn, "jwks_refresh_failed", &fields);
                }
                state.failing = Some(why);
            }
        }
    }

    fn count(&self, place: &str, change: impl FnOnce(&mut crate::pure::jwt::Known)) {
        change(self.sets.borrow_mut().of.entry(place.into()).or_default());
        self.changed.set(true);
    }

    /// Whether it is another set than before.
    fn keep(&self, place: &str, set: Arc<KeySet>) -> bool {
        let mut sets = self.sets.borrow_mut();
        let known = sets.of.entry(place.into()).or_default();
        if known.set.as_ref() == Some(&set) {
            return false;
        }
        known.set = Some(set);
        sets.generation += 1;
        self.changed.set(true);
        true
    }

    /// All that is known, if that has changed since this was asked last.
    pub fn news(&self) -> Option<KeySets> {
        self.changed.take().then(|| self.sets.borrow().clone())
    }
}

/// A set of keys, and for a file which version it is.
struct Fresh {
    set: KeySet,
    stamp: Option<Stamp>,
}

fn file(path: &Path, seen: Option<Stamp>) -> Result<Option<Fresh>, String> {
    let path: PathBuf = path.to_owned();
    let said = |why: String| format!("{}: {why}", path.display());
    let status = std::fs::metadata(&path).map_err(|error| said(error.to_string()))?;
    let stamp = (status.modified().ok(), status.len());
    if seen == Some(stamp) {
        return Ok(None);
    }
    let text = source::read(&path, KEYS_BYTES_MAX).map_err(said)?;
    let set = KeySet::parse(&text).map_err(|why| said(why.to_string()))?;
    Ok(Some(Fresh { set, stamp: Some(stamp) }))
}

fn fetch(url: &str, ca: Option<&str>) -> Result<Fresh, String> {
    let fetcher = Fetcher::new(ca.map(str::as_bytes), BOUNDS).map_err(|why| why.to_string())?;
    let answer = fetcher.get(url, &[("accept", "application/json")]);
    let body = answer.map_err(|fault| fault.to_string())?.body;
    let text = String::from_utf8(body).map_err(|_| "the answer is not UTF-8".to_owned())?;
    let set = KeySet::parse(&text).map_err(|why| why.to_string())?;
    Ok(Fresh { set, stamp: None })
}
