//! The board: the few numbers that must be true for the whole machine at once.
//!
//! A row is found by name and handed out as a counted handle, so that a plan, a ticket and a
//! scrape all look at the same number and a reload neither loses nor mixes rows: a backend that is
//! removed by one reload and added again by the next keeps its row, with whatever is still in
//! flight on it. Every row and every counter that shards write has cache lines of its own.
//! Nothing here is a lock; a read is one load, a change is one `fetch_add` or CAS.
//!
//! What is taken comes back exactly once: [`Slot`], [`Hold`] and [`Held`] give back on drop, so a
//! panic, an abort and a normal end are the same to the board.

mod lease;
mod reservoir;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use crossbeam_utils::CachePadded;
use foldhash::fast::FixedState;

pub use lease::{Allowance, Lease};
pub use reservoir::{AMOUNT_MAX, Calendar, Dry, Rate, Reservoir, Resource, Ring};

use crate::pure::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::pure::tokens::Vocabularies;
use crate::pure::units::Series;

/// Names per kind that one process will ever know. A name keeps its number for life (metrics are
/// indexed by it), so a file that is rewritten with new names every minute must end somewhere.
pub const NAMES_MAX: usize = 65_536;

/// What is counted in when a name is in no plan. Every kind has it, as [`Series`] 0.
pub const OTHER: &str = "other";

/// One number that many shards change, on cache lines of its own.
#[derive(Debug, Default)]
pub struct Count(CachePadded<AtomicU64>);

impl Count {
    /// The number now: one relaxed load.
    pub fn now(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Stops at zero rather than wrap: a gauge that is wrong by one is better than 2^64.
    pub fn sub(&self, n: u64) {
        // The closure never gives `None`, so the result says nothing.
        let _ = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| Some(now.saturating_sub(n)));
    }

    /// Adds `n` if the sum stays within `limit`; one CAS loop, exact over any number of shards.
    pub fn add_within(&self, n: u64, limit: u64) -> bool {
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                now.checked_add(n).filter(|&sum| sum <= limit)
            })
            .is_ok()
    }
}

/// What the machine knows of one backend, whichever plan names it.
#[derive(Debug)]
pub struct BackendRow {
    pub name: Arc<str>,
    pub series: Series,
    /// Attempts that run now. Written through [`Slot`] only.
    in_flight: Count,
    /// Failures since start: what a breaker counts.
    pub failures: Count,
    ready: AtomicBool,
    draining: AtomicBool,
}

impl BackendRow {
    fn new(name: Arc<str>, series: Series) -> BackendRow {
        BackendRow {
            name,
            series,
            in_flight: Count::default(),
            failures: Count::default(),
            ready: AtomicBool::new(true),
            draining: AtomicBool::new(false),
        }
    }

    pub fn in_flight(&self) -> u64 {
        self.in_flight.now()
    }

    /// True until a probe says otherwise: without probes every backend is taken to be up.
    pub fn ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }

    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Relaxed);
    }

    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub fn set_draining(&self, draining: bool) {
        self.draining.store(draining, Ordering::Relaxed);
    }
}

/// One attempt's place at one backend; given back on drop.
#[derive(Debug)]
pub struct Slot(Arc<BackendRow>);

impl Slot {
    /// Takes a place, or `None` when `limit` attempts already run there. No limit always succeeds.
    pub fn take(row: &Arc<BackendRow>, limit: Option<u32>) -> Option<Slot> {
        let limit = limit.map_or(u64::MAX, u64::from);
        row.in_flight.add_within(1, limit).then(|| Slot(Arc::clone(row)))
    }

    pub fn row(&self) -> &Arc<BackendRow> {
        &self.0
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.in_flight.sub(1);
    }
}

/// What the machine knows of one tenant.
#[derive(Debug)]
pub struct TenantRow {
    pub name: Arc<str>,
    pub series: Series,
    /// Requests of this tenant that run now.
    pub concurrency: Count,
    /// Tokens that open grants hold.
    pub reserved_tokens: Count,
}

impl TenantRow {
    fn new(name: Arc<str>, series: Series) -> TenantRow {
        TenantRow { name, series, concurrency: Count::default(), reserved_tokens: Count::default() }
    }
}

/// One unit of a [`Count`] of a row, for as long as this lives.
#[derive(Debug)]
pub struct Held {
    row: Arc<TenantRow>,
}

impl Held {
    /// Counts one running request of this tenant; `None` at the limit.
    pub fn take(row: &Arc<TenantRow>, limit: Option<u32>) -> Option<Held> {
        let limit = limit.map_or(u64::MAX, u64::from);
        row.concurrency.add_within(1, limit).then(|| Held { row: Arc::clone(row) })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.row.concurrency.sub(1);
    }
}

/// Calendars of one scope.
pub const CALENDARS: usize = 9;

/// What is limited of one scope: a key, a tenant, a tenant's use of a model, a route, a model, or
/// the whole gateway. The limits themselves are the plan's.
#[derive(Debug)]
pub struct LimitRow {
    pub kind: ScopeKind,
    pub name: Box<str>,
    pub requests: Resource,
    /// Prompt and completion together.
    pub tokens: Resource,
    pub input: Resource,
    pub output: Resource,
    /// Requests that run now.
    pub concurrency: Count,
    /// What is counted over a day or longer, as `pure::limit` numbers it.
    pub calendars: [Calendar; CALENDARS],
    /// For each calendar what the fleet allows.
    pub allowances: [Allowance; CALENDARS],
    /// A calendar has changed since the store last looked.
    dirty: AtomicBool,
}

impl LimitRow {
    pub fn new(kind: ScopeKind, name: &str) -> LimitRow {
        LimitRow {
            kind,
            name: Box::from(name),
            requests: Resource::default(),
            tokens: Resource::default(),
            input: Resource::default(),
            output: Resource::default(),
            concurrency: Count::default(),
            calendars: Default::default(),
            allowances: Default::default(),
            dirty: AtomicBool::new(false),
        }
    }

    /// What must survive the process has changed.
    pub fn touch(&self) {
        self.dirty.store(true, Ordering::Release);
    }

    /// Whether anything was touched since the last call.
    pub fn was_touched(&self) -> bool {
        self.dirty.load(Ordering::Relaxed) && self.dirty.swap(false, Ordering::Acquire)
    }
}

/// Whose limits a [`LimitRow`] counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ScopeKind {
    Key,
    /// A tenant's use of one model; the name is both, with a NUL between them.
    TenantModel,
    Tenant,
    Route,
    Model,
    Global,
    /// A tenant's use under a tier that its tokens name; the name is both, with a NUL between them.
    TenantTier,
}

/// A machine-wide amount with a limit that the running plan says: buffered bytes, connections.
#[derive(Debug, Default)]
pub struct Budget(Count);

impl Budget {
    /// Takes `amount`, or `None` when the sum would pass `limit`. Give it back by dropping.
    pub fn take(self: &Arc<Self>, amount: u64, limit: u64) -> Option<Hold> {
        self.0.add_within(amount, limit).then(|| Hold { budget: Arc::clone(self), amount })
    }

    pub fn held(&self) -> u64 {
        self.0.now()
    }
}

/// An amount of a [`Budget`], given back on drop.
#[derive(Debug)]
pub struct Hold {
    budget: Arc<Budget>,
    amount: u64,
}

impl Hold {
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Takes `more` on top; false (and nothing changed) when that would pass `limit`.
    pub fn grow(&mut self, more: u64, limit: u64) -> bool {
        let grown = self.budget.0.add_within(more, limit);
        if grown {
            self.amount += more;
        }
        grown
    }

    /// Gives all but `amount` back early.
    pub fn shrink_to(&mut self, amount: u64) {
        let back = self.amount.saturating_sub(amount);
        self.budget.0.sub(back);
        self.amount -= back;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.budget.0.sub(self.amount);
    }
}

/// Process totals.
#[derive(Debug, Default)]
pub struct Totals {
    pub requests_in_flight: Arc<Budget>,
    pub connections: Arc<Budget>,
    pub buffered_bytes: Arc<Budget>,
}

/// What names are numbered for: one number space each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Backend,
    Pool,
    Model,
    Route,
    Tenant,
    Key,
}

/// Too many different names of one kind since the process began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full(pub Kind);

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "more than {NAMES_MAX} different {:?} names since start", self.0)
    }
}

impl std::error::Error for Full {}

/// Names and rows for the life of the process. Control owns it and lends it to `Plan::build`.
#[derive(Debug)]
pub struct Registry {
    totals: Arc<Totals>,
    backends: Names,
    backend_rows: Vec<Arc<BackendRow>>,
    tenants: Names,
    tenant_rows: Vec<Arc<TenantRow>>,
    pools: Names,
    models: Names,
    routes: Names,
    keys: Names,
    limits: HashMap<(ScopeKind, Box<str>), Arc<LimitRow>, FixedState>,
    limit_rows: Vec<Arc<LimitRow>>,
    /// Kept over reloads as rows are, for as long as a plan uses them.
    pub vocabularies: Vocabularies,
}

impl Default for Registry {
    fn default() -> Registry {
        Registry::new()
    }
}

impl ScopeKind {
    pub const ALL: [ScopeKind; 7] = [
        ScopeKind::Key,
        ScopeKind::TenantModel,
        ScopeKind::Tenant,
        ScopeKind::Route,
        ScopeKind::Model,
        ScopeKind::Global,
        ScopeKind::TenantTier,
    ];
}

impl Registry {
    pub fn new() -> Registry {
        let other: Arc<str> = Arc::from(OTHER);
        Registry {
            totals: Arc::default(),
            backends: Names::new(&other),
            backend_rows: vec![Arc::new(BackendRow::new(Arc::clone(&other), Series(0)))],
            tenants: Names::new(&other),
            tenant_rows: vec![Arc::new(TenantRow::new(Arc::clone(&other), Series(0)))],
            pools: Names::new(&other),
            models: Names::new(&other),
            routes: Names::new(&other),
            keys: Names::new(&other),
            limits: HashMap::default(),
            limit_rows: Vec::new(),
            vocabularies: Vocabularies::default(),
        }
    }

    /// What is counted for this scope, from the first plan that limits it on. Bounded as names are:
    /// each scope is one of a name that has a number, or of two.
    pub fn limits(&mut self, kind: ScopeKind, name: &str) -> Arc<LimitRow> {
        let rows = &mut self.limit_rows;
        let row = self.limits.entry((kind, Box::from(name))).or_insert_with(|| {
            rows.push(Arc::new(LimitRow::new(kind, name)));
            Arc::clone(&rows[rows.len() - 1])
        });
        Arc::clone(row)
    }

    /// Every scope that any plan has limited since start.
    pub fn limit_rows(&self) -> &[Arc<LimitRow>] {
        &self.limit_rows
    }

    pub fn totals(&self) -> &Arc<Totals> {
        &self.totals
    }

    /// The row of this backend, made at first sight.
    pub fn backend(&mut self, name: &str) -> Result<Arc<BackendRow>, Full> {
        let series = self.backends.series(name).ok_or(Full(Kind::Backend))?;
        if series.index() == self.backend_rows.len() {
            let name = Arc::clone(&self.backends.list[series.index()]);
            self.backend_rows.push(Arc::new(BackendRow::new(name, series)));
        }
        Ok(Arc::clone(&self.backend_rows[series.index()]))
    }

    /// The row of this tenant, made at first sight.
    pub fn tenant(&mut self, name: &str) -> Result<Arc<TenantRow>, Full> {
        let series = self.tenants.series(name).ok_or(Full(Kind::Tenant))?;
        if series.index() == self.tenant_rows.len() {
            let name = Arc::clone(&self.tenants.list[series.index()]);
            self.tenant_rows.push(Arc::new(TenantRow::new(name, series)));
        }
        Ok(Arc::clone(&self.tenant_rows[series.index()]))
    }

    /// The number of any name; for backends and tenants this makes the row too.
    pub fn series(&mut self, kind: Kind, name: &str) -> Result<Series, Full> {
        match kind {
            Kind::Backend => self.backend(name).map(|row| row.series),
            Kind::Tenant => self.tenant(name).map(|row| row.series),
            Kind::Pool => self.pools.series(name).ok_or(Full(kind)),
            Kind::Model => self.models.series(name).ok_or(Full(kind)),
            Kind::Route => self.routes.series(name).ok_or(Full(kind)),
            Kind::Key => self.keys.series(name).ok_or(Full(kind)),
        }
    }

    /// Whether all of these (different) names have a number or can still get one.
    pub fn room<'n>(&self, kind: Kind, names: impl Iterator<Item = &'n str>) -> Result<(), Full> {
        let known = match kind {
            Kind::Backend => &self.backends,
            Kind::Pool => &self.pools,
            Kind::Model => &self.models,
            Kind::Route => &self.routes,
            Kind::Tenant => &self.tenants,
            Kind::Key => &self.keys,
        };
        let new = names.filter(|&name| !known.by_name.contains_key(name)).count();
        if known.list.len() + new <= NAMES_MAX { Ok(()) } else { Err(Full(kind)) }
    }

    /// Every name of a kind so far; the index is the [`Series`]. Index 0 is [`OTHER`].
    pub fn names(&self, kind: Kind) -> &[Arc<str>] {
        match kind {
            Kind::Backend => &self.backends.list,
            Kind::Pool => &self.pools.list,
            Kind::Model => &self.models.list,
            Kind::Route => &self.routes.list,
            Kind::Tenant => &self.tenants.list,
            Kind::Key => &self.keys.list,
        }
    }

    /// Rows of every backend that any plan has named since start, [`OTHER`] first.
    pub fn backends(&self) -> &[Arc<BackendRow>] {
        &self.backend_rows
    }

    /// Rows of every tenant that any plan has named since start, [`OTHER`] first.
    pub fn tenants(&self) -> &[Arc<TenantRow>] {
        &self.tenant_rows
    }
}

/// Names in order of appearance, and the way back. The seed is fixed: names come from the
/// operator's file, so that no stranger can make them collide.
#[derive(Debug)]
struct Names {
    list: Vec<Arc<str>>,
    by_name: HashMap<Arc<str>, Series, FixedState>,
}

impl Names {
    fn new(other: &Arc<str>) -> Names {
        let mut names = Names { list: Vec::new(), by_name: HashMap::default() };
        names.push(Arc::clone(other));
        names
    }

    fn series(&mut self, name: &str) -> Option<Series> {
        if let Some(&series) = self.by_name.get(name) {
            return Some(series);
        }
        (self.list.len() < NAMES_MAX).then(|| self.push(Arc::from(name)))
    }

    fn push(&mut self, name: Arc<str>) -> Series {
        // At most NAMES_MAX names, which fits.
        let series = Series(self.list.len() as u32);
        self.list.push(Arc::clone(&name));
        self.by_name.insert(name, series);
        series
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a limit is exact over any number of threads, and what was taken comes back once.
    //! Method: threads that take and give back at random while another reads, compared at the end
    //! (and at every reading) with the law.

    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::pure::units::Rng;

    const THREADS: u64 = 4;
    const ROUNDS: u64 = 20_000;

    #[test]
    fn slots_are_exact_over_threads() {
        const LIMIT: u32 = 3;
        let row = Registry::new().backend("b").unwrap();
        let over = AtomicBool::new(false);
        let taken: u64 = thread::scope(|scope| {
            let work: Vec<_> = (0..THREADS)
                .map(|seed| {
                    let (row, over) = (&row, &over);
                    scope.spawn(move || {
                        let mut rng = Rng::seeded(seed);
                        let mut held = Vec::new();
                        let mut taken = 0;
                        for _ in 0..ROUNDS {
                            if rng.below(2) == 0 {
                                held.pop();
                            } else if let Some(slot) = Slot::take(row, Some(LIMIT)) {
                                taken += 1;
                                held.push(slot);
                            }
                            if row.in_flight() > u64::from(LIMIT)
                                || row.in_flight() < held.len() as u64
                            {
                                over.store(true, Ordering::Relaxed);
                            }
                        }
                        taken
                    })
                })
                .collect();
            work.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert!(!over.load(Ordering::Relaxed), "more than {LIMIT} at once, or fewer than are held");
        assert!(taken > u64::from(LIMIT));
        assert_eq!(row.in_flight(), 0);
        let all: Vec<Slot> = (0..LIMIT).map_while(|_| Slot::take(&row, Some(LIMIT))).collect();
        assert_eq!(all.len(), LIMIT as usize);
        assert!(Slot::take(&row, Some(LIMIT)).is_none());
        assert!(Slot::take(&row, None).is_some(), "no limit always succeeds");
    }

    #[test]
    fn budgets_are_exact_over_threads_whatever_grows_and_shrinks() {
        const LIMIT: u64 = 10_000;
        let budget = Arc::<Budget>::default();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for seed in 0..THREADS {
                let (budget, over) = (&budget, &over);
                scope.spawn(move || {
                    let mut rng = Rng::seeded(seed);
                    let mut held: Vec<Hold> = Vec::new();
                    for _ in 0..ROUNDS {
                        match rng.below(4) {
                            0 => drop(held.pop()),
                            1 => held.extend(budget.take(rng.below(2_000), LIMIT)),
                            2 => {
                                if let Some(hold) = held.last_mut() {
                                    hold.grow(rng.below(500), LIMIT);
                                }
                            }
                            _ => {
                                if let Some(hold) = held.last_mut() {
                                    hold.shrink_to(rng.below(500));
                                }
                            }
                        }
                        let own: u64 = held.iter().map(Hold::amount).sum();
                        if budget.held() > LIMIT || budget.held() < own {
                            over.store(true, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert!(!over.load(Ordering::Relaxed));
        assert_eq!(budget.held(), 0);
        assert!(budget.take(LIMIT + 1, LIMIT).is_none() && budget.take(u64::MAX, LIMIT).is_none());
        let mut hold = budget.take(LIMIT, LIMIT).unwrap();
        assert!(!hold.grow(1, LIMIT) && !hold.grow(u64::MAX, LIMIT));
        hold.shrink_to(u64::MAX);
        assert_eq!((hold.amount(), budget.held()), (LIMIT, LIMIT));
    }

    #[test]
    fn what_a_panic_holds_comes_back() {
        let mut registry = Registry::new();
        let (row, tenant) = (registry.backend("b").unwrap(), registry.tenant("t").unwrap());
        let totals = Arc::clone(registry.totals());
        let (in_thread, of_tenant) = (Arc::clone(&row), Arc::clone(&tenant));
        let thread = thread::spawn(move || {
            let _slot = Slot::take(&in_thread, None);
            let _held = Held::take(&of_tenant, Some(1));
            let _hold = totals.buffered_bytes.take(7, 7);
            std::panic::resume_unwind(Box::new("as a request may"));
        });
        assert!(thread.join().is_err());
        assert_eq!((row.in_flight(), tenant.concurrency.now()), (0, 0));
        assert_eq!(registry.totals().buffered_bytes.held(), 0);
    }

    #[test]
    fn names_keep_their_numbers_and_rows_and_run_out_cleanly() {
        let mut registry = Registry::new();
        assert_eq!(registry.names(Kind::Route).len(), 1);
        assert_eq!(registry.series(Kind::Model, OTHER), Ok(Series(0)));
        let first = registry.backend("x").unwrap();
        assert_eq!(registry.series(Kind::Backend, "x"), Ok(first.series));
        assert!(Arc::ptr_eq(&registry.backend("x").unwrap(), &first));
        assert_eq!(registry.tenant("x").unwrap().series, Series(1), "kinds number apart");
        for name in 0..NAMES_MAX - 2 {
            registry.series(Kind::Backend, &format!("n{name}")).unwrap();
        }
        assert_eq!(registry.backends().len(), NAMES_MAX);
        assert_eq!(registry.backend("one too many").unwrap_err(), Full(Kind::Backend));
        assert!(registry.room(Kind::Backend, ["x", "n7"].into_iter()).is_ok());
        assert!(registry.room(Kind::Backend, ["x", "new"].into_iter()).is_err());
        assert!(registry.backend("x").is_ok(), "known names still have their row");
        for (index, row) in registry.backends().iter().enumerate() {
            assert_eq!(row.series.index(), index);
            assert_eq!(row.name, registry.names(Kind::Backend)[index]);
        }
    }

    #[test]
    fn rows_do_not_share_cache_lines() {
        let registry = Registry::new();
        let tenant = &registry.tenants()[0];
        let at = |count: &Count| std::ptr::from_ref(count).addr();
        assert!(at(&tenant.concurrency).abs_diff(at(&tenant.reserved_tokens)) >= 64);
        assert!(align_of::<Count>() >= 64 && size_of::<Count>() >= 64);
    }
}
