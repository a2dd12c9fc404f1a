//! Seeded worlds of requests against limits, on a clock of their own: shards whose clocks differ a
//! little, answers longer and shorter than was thought, clients that leave, reloads, days that end,
//! wall clocks that are set back, processes that are killed and start again from what was written.
//! After every event the laws of limits are checked against a book that forgets nothing.
//!
//! `FOREBAY_SIM_SEEDS` says how many worlds; a failing one names its seed.

#[path = "sim/fleet.rs"]
mod fleet;

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use forebay::pure::board::{LimitRow, Rate, ScopeKind};
use forebay::pure::limit::{Accounts, Amount, Cap, Grant, Per, Scope, Scopes, Windows, per_of};
use forebay::pure::units::{Instant, Rng};

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: u64 = 1_000_000_000;
const KINDS: [ScopeKind; 4] =
    [ScopeKind::Key, ScopeKind::Tenant, ScopeKind::Route, ScopeKind::Global];

/// GCRA as the books say it: what has not flowed in yet, in units times the window, exact.
#[derive(Clone, Copy)]
struct Bucket {
    limit: u128,
    burst: u128,
    level: u128,
    seen: u64,
}

const WINDOW: u128 = 60_000_000_000;

impl Bucket {
    fn flow(&mut self, now: u64) {
        let now = now.max(self.seen);
        self.level = self.level.saturating_sub(u128::from(now - self.seen) * self.limit);
        self.seen = now;
    }

    /// How far `amount` is from fitting: at most zero if it does, in units times the window.
    fn lacks(&self, amount: u64) -> i128 {
        (self.level + u128::from(amount) * WINDOW) as i128 - (self.burst * WINDOW) as i128
    }

    fn replace(&mut self, reserved: u64, actual: u64) {
        let deepest = 2 * self.burst.max(self.limit) * WINDOW + self.burst * WINDOW;
        let next = self.level + u128::from(actual) * WINDOW;
        self.level =
            next.saturating_sub(u128::from(reserved) * WINDOW).min(deepest.max(self.level));
    }
}

/// What the book knows of a request that was admitted.
struct Entry {
    grant: Grant,
    shard: usize,
    ask: Amount,
    at: u64,
    windows: Windows,
}

/// A request that has ended, as the calendars must show it.
struct Past {
    at: u64,
    used: Amount,
    windows: Windows,
}

struct World {
    seed: u64,
    rng: Rng,
    now: u64,
    unix: u64,
    windows: Windows,
    scopes: Vec<Scope>,
    shards: Vec<RefCell<Accounts>>,
    requests: Vec<Option<Bucket>>,
    tokens: Vec<Option<Bucket>>,
    open: Vec<Entry>,
    past: Vec<Past>,
    /// Reserved by processes that were killed, and in the last commit.
    orphans: Vec<Past>,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng::seeded(seed);
        let now = 40_000_000 * SECOND + rng.below(SECOND);
        let unix = 1_796_083_200 + rng.below(86_400);
        let windows = Windows::at(unix, Instant::from_nanos(now));
        let shards = shards(1 + rng.below(8) as usize);
        let mut world = World {
            seed,
            rng,
            now,
            unix,
            windows,
            scopes: Vec::new(),
            shards,
            requests: Vec::new(),
            tokens: Vec::new(),
            open: Vec::new(),
            past: Vec::new(),
            orphans: Vec::new(),
        };
        for kind in KINDS {
            let row = Arc::new(LimitRow::new(kind, "x"));
            let scope = world.limits(kind, row);
            world.scopes.push(scope);
        }
        world.forget_rates();
        world
    }

    fn limits(&mut self, kind: ScopeKind, row: Arc<LimitRow>) -> Scope {
        let rng = &mut self.rng;
        let strict = rng.below(4) == 0;
        let some = |rng: &mut Rng, least: u64, span: u64| {
            (rng.below(2) == 0).then(|| least + rng.below(span))
        };
        let rate = |limit: u64, burst| Rate::new(limit, MINUTE, burst, strict);
        Scope {
            kind,
            row,
            requests: some(rng, 5, 60).map(|limit| {
                let burst = (rng.below(3) == 0).then(|| 1 + rng.below(limit));
                rate(limit, burst)
            }),
            tokens: some(rng, 1_000, 9_000).map(|limit| rate(limit, None)),
            input: None,
            output: some(rng, 1_000, 9_000).map(|limit| rate(limit, None)),
            concurrency: some(rng, 1, 12).map(|limit| limit as u32),
            day: some(rng, 10_000, 90_000),
            budget: some(rng, 100_000, 900_000).map(|nano| Cap {
                nano: Some(nano),
                tokens: Some(20_000 + nano / 10),
                per: [Per::Day, Per::Week, Per::Month, Per::Total][rng.below(4) as usize],
                soft: rng.below(4) == 0,
                cut: false,
            }),
            wait: Duration::ZERO,
        }
    }

    /// The book's buckets begin with full reservoirs.
    fn forget_rates(&mut self) {
        let bucket = |rate: &Option<Rate>, now| {
            let rate = rate.filter(|rate| !rate.is_strict())?;
            let (limit, burst) = (u128::from(rate.limit()), u128::from(rate.most()));
            Some(Bucket { limit, burst, level: 0, seen: now })
        };
        self.requests = self.scopes.iter().map(|s| bucket(&s.requests, self.now)).collect();
        self.tokens = self.scopes.iter().map(|s| bucket(&s.tokens, self.now)).collect();
    }

    fn list(&self) -> Scopes<'_> {
        let mut list = [None; 7];
        for (place, scope) in list.iter_mut().zip(&self.scopes) {
            *place = Some(scope);
        }
        Scopes::new(list)
    }

    fn flow(&mut self, now: u64) {
        for bucket in self.requests.iter_mut().chain(&mut self.tokens).flatten() {
            bucket.flow(now);
        }
    }

    fn arrive(&mut self) {
        // Shards read the clock a little apart.
        let at = self.now + self.rng.below(1_000);
        self.now = at;
        self.flow(at);
        let ask = Amount {
            input: self.rng.below(400),
            output: self.rng.below(600),
            nano: self.rng.below(20_000),
        };
        let before = self.observed(at);
        let shard = self.rng.below(self.shards.len() as u64) as usize;
        let accounts = &self.shards[shard];
        let now = Instant::from_nanos(at);
        let taken = self.list().take(ask, now, &self.windows, &mut accounts.borrow_mut());
        match taken {
            Ok(grant) => {
                for (buckets, amount) in
                    [(&mut self.requests, 1), (&mut self.tokens, ask.tokens().max(1))]
                {
                    for bucket in buckets.iter_mut().flatten() {
                        // A take rounds up by less than one unit, and so may a full burst of them.
                        let lacks = bucket.lacks(amount);
                        assert!(lacks <= WINDOW as i128, "seed {}: {lacks} too much", self.seed);
                        bucket.replace(0, amount);
                    }
                }
                self.open.push(Entry { grant, shard, ask, at, windows: self.windows });
                for (scope, used) in self.scopes.iter().zip(self.booked()) {
                    let running = self.open.len() as u64;
                    assert!(scope.concurrency.is_none_or(|most| running <= u64::from(most)));
                    assert!(scope.day.is_none_or(|most| used.day <= most), "seed {}", self.seed);
                    if let Some(cap) = scope.budget.filter(|cap| !cap.soft) {
                        assert!(
                            cap.nano.is_none_or(|most| used.nano <= most),
                            "seed {}",
                            self.seed
                        );
                    }
                }
            }
            Err(_) => {
                assert_eq!(before, self.observed(at), "seed {}: a refusal took", self.seed);
                self.refused_for_a_reason(ask);
            }
        }
    }

    /// Where no calendar, no strict limit and no bound on concurrency can have refused, a bucket did.
    fn refused_for_a_reason(&self, ask: Amount) {
        let plain = self.scopes.iter().all(|scope| {
            let strict = |rate: &Option<Rate>| rate.is_some_and(|rate| rate.is_strict());
            scope.day.is_none()
                && scope.budget.is_none()
                && scope.output.is_none()
                && scope.concurrency.is_none_or(|most| self.open.len() < most as usize)
                && !strict(&scope.requests)
                && !strict(&scope.tokens)
        });
        let full = |buckets: &[Option<Bucket>], amount: u64| {
            let slack = WINDOW as i128;
            buckets.iter().flatten().any(|bucket| bucket.lacks(amount) > -slack)
        };
        if plain {
            let reason = full(&self.requests, 1) || full(&self.tokens, ask.tokens().max(1));
            assert!(reason, "seed {}: refused for nothing", self.seed);
        }
    }

    fn end(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let index = self.rng.below(self.open.len() as u64) as usize;
        let entry = self.open.swap_remove(index);
        self.flow(self.now);
        let now = Instant::from_nanos(self.now);
        let never_sent = self.rng.below(8) == 0;
        let used = match self.rng.below(6) {
            _ if never_sent => Amount::default(),
            // Longer than was thought.
            0 => Amount { output: entry.ask.output * 2 + 5, nano: entry.ask.nano * 2, ..entry.ask },
            // Nothing came.
            1 => Amount::default(),
            _ => Amount {
                output: self.rng.below(entry.ask.output + 1),
                nano: self.rng.below(entry.ask.nano + 1),
                ..entry.ask
            },
        };
        let accounts = &mut self.shards[entry.shard].borrow_mut();
        match never_sent {
            true => self.list().cancel(&entry.grant, now, accounts),
            false => self.list().settle(&entry.grant, used, now, accounts),
        }
        let requests = u64::from(!never_sent);
        for (buckets, reserved, actual) in [
            (&mut self.requests, 1, requests),
            (&mut self.tokens, entry.ask.tokens().max(1), used.tokens()),
        ] {
            for bucket in buckets.iter_mut().flatten() {
                bucket.replace(reserved, actual);
            }
        }
        self.past.push(Past { at: entry.at, used, windows: entry.windows });
    }

    fn pass_time(&mut self) {
        let span = match self.rng.below(12) {
            0 => self.rng.below(9 * 3_600) * SECOND,
            1..=4 => self.rng.below(30) * SECOND,
            _ => self.rng.below(SECOND),
        };
        self.now += span;
        self.unix += span / SECOND;
        if self.rng.below(10) == 0 {
            // The wall clock is set; the other one is nobody's to set.
            self.unix = (self.unix + self.rng.below(7_200)).saturating_sub(3_600);
        }
        let next = Windows::at(self.unix, Instant::from_nanos(self.now));
        self.windows = next.not_before(self.windows);
    }

    /// New limits, on fresh rows. What is open is settled under the limits that it was taken under,
    /// so the world waits for it.
    fn reload(&mut self) {
        while !self.open.is_empty() {
            self.end();
        }
        for (index, kind) in KINDS.into_iter().enumerate() {
            let row = Arc::new(LimitRow::new(kind, "x"));
            self.scopes[index] = self.limits(kind, row);
        }
        self.past.clear();
        self.orphans.clear();
        self.forget_rates();
    }

    /// The process is killed and starts again with the calendars of its last commit.
    fn crash(&mut self) {
        let kept: Vec<Vec<(usize, u64, u64)>> = self
            .scopes
            .iter()
            .map(|scope| {
                let all = scope.row.calendars.iter().enumerate().flat_map(|(number, calendar)| {
                    let kept = calendar.kept(self.windows.number(per_of(number)));
                    kept.map(move |(window, amount)| (number, window, amount)).collect::<Vec<_>>()
                });
                all.collect()
            })
            .collect();
        for (scope, kept) in self.scopes.iter_mut().zip(kept) {
            scope.row = Arc::new(LimitRow::new(scope.kind, "x"));
            for (number, window, amount) in kept {
                scope.row.calendars[number].restore(window, amount);
            }
        }
        self.shards = shards(self.shards.len());
        // Nobody settles what was under way: it stays charged with what it had reserved.
        for entry in self.open.drain(..) {
            let Entry { ask, at, windows, .. } = entry;
            self.orphans.push(Past { at, used: ask, windows });
        }
        // Limits by the minute begin anew.
        self.past.iter_mut().chain(&mut self.orphans).for_each(|past| past.at = 0);
        self.now += SECOND;
        self.forget_rates();
    }

    /// What each scope's calendars must hold in the windows that it is.
    fn booked(&self) -> Vec<Booked> {
        let of = |per: Per, of: fn(&Amount) -> u64| {
            let number = self.windows.number(per);
            let ended = self.past.iter().chain(&self.orphans);
            let in_window = |past: &&Past| past.windows.number(per) == number;
            let ended: u64 = ended.filter(in_window).map(|past| of(&past.used)).sum();
            let open = self.open.iter().filter(|entry| entry.windows.number(per) == number);
            ended + open.map(|entry| of(&entry.ask)).sum::<u64>()
        };
        let each = |scope: &Scope| Booked {
            day: of(Per::Day, |amount| amount.tokens()),
            nano: scope.budget.map_or(0, |cap| of(cap.per, |amount| amount.nano)),
        };
        self.scopes.iter().map(each).collect()
    }

    /// The sum of what stands in calendars of these kinds, now.
    fn counted(&self, scope: &Scope, of: fn(Per) -> bool) -> u64 {
        let calendars = scope.row.calendars.iter().enumerate();
        let kinds = calendars.map(|(number, calendar)| (per_of(number), calendar));
        let kinds = kinds.filter(|(per, _)| of(*per));
        kinds.map(|(per, calendar)| calendar.used(self.windows.number(per))).sum()
    }

    /// Everything on the board that a request could change.
    fn observed(&self, at: u64) -> Vec<[u64; 6]> {
        let now = Instant::from_nanos(at);
        let left = |rate: &Option<Rate>, resource: &forebay::pure::board::Resource| {
            rate.as_ref().map_or(0, |rate| resource.left(rate, now))
        };
        let each = |scope: &Scope| {
            let row = &scope.row;
            [
                row.concurrency.now(),
                left(&scope.requests, &row.requests),
                left(&scope.tokens, &row.tokens),
                left(&scope.output, &row.output),
                self.counted(scope, |per| per == Per::Day),
                self.counted(scope, |_| true),
            ]
        };
        self.scopes.iter().map(each).collect()
    }

    fn check(&self) {
        // With a tick of all shards it stands on the board who runs.
        self.shards.iter().for_each(|accounts| accounts.borrow_mut().tick());
        let now = Instant::from_nanos(self.now);
        let booked = self.booked();
        for (index, scope) in self.scopes.iter().enumerate() {
            let (row, seed) = (&scope.row, self.seed);
            assert_eq!(row.concurrency.now(), self.open.len() as u64, "seed {seed}: slots");
            if scope.day.is_some() {
                let used = row.calendars[0].used(self.windows.number(Per::Day));
                assert_eq!(used, booked[index].day, "seed {seed}: the day");
            }
            if let Some(cap) = scope.budget {
                let used = row.calendars[1 + cap.per as usize].used(self.windows.number(cap.per));
                assert_eq!(used, booked[index].nano, "seed {seed}: money");
            }
            // In no minute more than a strict limit, but for what ran over its reservation.
            if let Some(rate) = scope.requests.filter(|rate| rate.is_strict()) {
                let recent = |at: u64| at + 60 * SECOND > self.now;
                let ended = self.past.iter().filter(|past| recent(past.at) && counts(past));
                let open = self.open.iter().filter(|entry| recent(entry.at));
                let sum = (ended.count() + open.count()) as u64;
                assert!(sum <= rate.limit(), "seed {seed}: {sum} of {}", rate.limit());
                assert!(row.requests.left(&rate, now) <= rate.limit() - sum, "seed {seed}");
            }
        }
    }

    fn live(mut self, events: u32) {
        for _ in 0..events {
            match self.rng.below(100) {
                0..50 => self.arrive(),
                50..80 => self.end(),
                80..97 => self.pass_time(),
                97..99 => self.crash(),
                _ => self.reload(),
            }
            self.check();
        }
        while !self.open.is_empty() {
            self.end();
        }
        self.check();
    }
}

fn shards(count: usize) -> Vec<RefCell<Accounts>> {
    (0..count).map(|_| RefCell::new(Accounts::new(count))).collect()
}

/// One that never reached a backend gave its request back.
fn counts(past: &Past) -> bool {
    past.used != Amount::default()
}

struct Booked {
    day: u64,
    nano: u64,
}

#[test]
fn the_laws_of_limits_hold_in_every_world() {
    let seeds = std::env::var("FOREBAY_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(2_000) {
        World::new(seed).live(120);
    }
}
