//! Seeded worlds of gateways that share limits, on a clock of their own. The members are the product's,
//! and so are the limits that requests meet; the memory that they share does what the scripts of
//! `src/fleet.rs` do, in the same arithmetic. Requests and answers to it get lost, it is away, comes
//! back empty, has its clock set; members are slow, and are killed with leases in hand. After every
//! event the laws are checked against books that forget nothing, and at the end, when all is calm,
//! that the memory knows exactly what was given and that everybody is served again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use forebay::pure::board::{LimitRow, Rate, ScopeKind};
use forebay::pure::limit::{Accounts, Amount, Grant, Per, Scope, Scopes, Windows};
use forebay::pure::member::{Allowed, Claim, Common, Leased, Member, Turn};
use forebay::pure::units::{Instant, Rng};

const SECOND: u64 = 1_000_000_000;
const MINUTE_US: f64 = 60_000_000.0;
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

/// Redis with the scripts of `src/fleet.rs`, and books of what it did.
struct Redis {
    /// Its clock, which may be set.
    now_us: f64,
    /// Until what was drawn has flowed in, and when the key goes.
    rate: Option<(f64, f64)>,
    windows: HashMap<String, Window>,
    up: bool,
    /// Each restart closes all connections.
    life: u32,
    /// Of a hundred calls, how many are lost before and after they were carried out.
    lost: [u64; 2],
    rng: Rng,
    // ---- the books
    /// Of the rate, as the books say it: what has not flowed in yet, in units.
    level: f64,
    /// Charged for what was taken while it was away; and of that, in answers that were lost.
    owed: u64,
    owed_unheard: u64,
    /// Granted of windows since a restart until all members had spoken.
    unwary: HashMap<String, u64>,
    silent: HashSet<&'static str>,
}

#[derive(Default)]
struct Window {
    sum: u64,
    parts: HashMap<&'static str, (u32, u64)>,
    /// What processes that are gone were allowed and their successors do not know of.
    left_behind: u64,
}

/// One member's way to it.
struct Link<'w> {
    redis: &'w mut Redis,
    life: &'w mut u32,
    name: &'static str,
    process: u32,
    heard: &'w mut Heard,
    seed: u64,
}

/// What one process has heard of and sent back, of the rate.
#[derive(Clone, Copy, Default)]
struct Heard {
    granted: u64,
    returned: u64,
}

struct Lost;

impl Link<'_> {
    /// Carries `work` out, unless the call is lost; its answer may be lost as well.
    fn call<T>(&mut self, work: impl FnOnce(&mut Link) -> T) -> Result<(T, bool), Lost> {
        let broken = !self.redis.up || *self.life != self.redis.life;
        *self.life = self.redis.life;
        let draw = self.redis.rng.below(100);
        let [request, answer] = self.redis.lost;
        if broken || draw < request {
            return Err(Lost);
        }
        let done = work(self);
        Ok((done, draw >= request + answer))
    }
}

impl Common for Link<'_> {
    type Lost = Lost;

    fn lease(&mut self, _: &str, rate: &Rate, most: u64, owed: u64) -> Result<Leased, Lost> {
        let (limit, burst) = (rate.limit() as f64, rate.most() as f64);
        let (leased, heard) = self.call(|link| {
            let (redis, seed) = (&mut *link.redis, link.seed);
            let now = redis.now_us;
            let kept = redis.rate.filter(|(_, until)| *until > now);
            let mut full = kept.map_or(0.0, |(full, _)| full).max(now);
            full += owed as f64 * MINUTE_US / limit;
            full = full.min(now + burst * MINUTE_US / limit + MINUTE_US);
            let room = burst * MINUTE_US / limit - (full - now);
            let units = (room * limit / MINUTE_US + 0.000001).floor().max(0.0);
            let granted = (most as f64).min(units);
            full = (full + granted * MINUTE_US / limit).ceil();
            if full > now {
                redis.rate = Some((full, now + full - now + 1_000_000.0));
            }
            redis.owed += owed;
            redis.level = (redis.level + owed as f64).min(burst + limit) + granted;
            // Nothing is granted that has not flowed in; a microsecond is rounded away.
            let over = granted > 0.0 && redis.level > burst + limit / MINUTE_US + 0.001;
            assert!(!over, "seed {seed}: {} of {burst}", redis.level);
            let wait = MINUTE_US / limit - room;
            Leased {
                granted: granted as u64,
                left: (units - granted) as u64,
                wait: (units == 0.0).then(|| Duration::from_micros(wait.ceil().max(1.0) as u64)),
            }
        })?;
        if !heard {
            self.redis.owed_unheard += owed;
            return Err(Lost);
        }
        self.heard.granted += leased.granted;
        Ok(leased)
    }

    fn give(&mut self, _: &str, rate: &Rate, amount: u64) -> Result<(), Lost> {
        // It is no longer the member's, whatever comes of it.
        self.heard.returned += amount;
        let limit = rate.limit() as f64;
        let ((), heard) = self.call(|link| {
            let redis = &mut *link.redis;
            let kept = redis.rate.filter(|(_, until)| *until > redis.now_us);
            if let Some((full, until)) = kept {
                let back = (amount as f64 * MINUTE_US / limit).floor();
                redis.rate = Some((full - back, until));
            }
            redis.level = (redis.level - amount as f64).max(0.0);
        })?;
        if heard { Ok(()) } else { Err(Lost) }
    }

    fn allow(&mut self, key: &str, claim: Claim) -> Result<Allowed, Lost> {
        let (allowed, heard) = self.call(|link| {
            let window = link.redis.windows.entry(key.to_owned()).or_default();
            let said = window.parts.get(link.name).copied();
            let (process, known) = said.unwrap_or((link.process, 0));
            let other = process != link.process;
            if !other || claim.mine > known {
                window.sum = window.sum + claim.mine - known;
            } else {
                window.left_behind += known - claim.mine;
            }
            let left = claim.limit.saturating_sub(window.sum);
            let granted = Some(claim.most.min(left)).filter(|&granted| granted >= claim.least);
            let granted = granted.unwrap_or(0);
            window.sum += granted;
            window.parts.insert(link.name, (link.process, claim.mine + granted));
            if !link.redis.silent.is_empty() {
                *link.redis.unwary.entry(key.to_owned()).or_default() += granted;
            }
            link.redis.silent.remove(link.name);
            Allowed { granted, left: left - granted, other }
        })?;
        if heard { Ok(allowed) } else { Err(Lost) }
    }
}

/// One gateway: its board, its part in the fleet, and what runs on it.
struct Gateway {
    name: &'static str,
    process: u32,
    scope: Scope,
    member: Member,
    life: u32,
    asks_at: u64,
    heard: Heard,
    open: Vec<(Grant, u64)>,
    accounts: Accounts,
    /// Charged by requests that have ended, of the rate, in this process.
    charged: u64,
    /// Ever taken of its own share.
    alone: u64,
    /// Its thread does not run before this moment.
    slow_until: u64,
}

impl Gateway {
    /// Of the rate, what was drawn for requests in this process.
    fn drawn(&self) -> u64 {
        self.charged + self.open.iter().map(|(_, reserved)| *reserved).sum::<u64>()
    }
}

struct World {
    seed: u64,
    rng: Rng,
    now: u64,
    unix: u64,
    windows: Windows,
    redis: Redis,
    gateways: Vec<Gateway>,
    rate: Option<Rate>,
    day: Option<u64>,
    share: f64,
    processes: u32,
    // ---- the books of the day
    counted: u64,
    /// Settled beyond what was reserved.
    overrun: u64,
    /// Processes that were without Redis on this day.
    lonely: HashSet<u32>,
    /// Taken by members alone and never told, because they were killed.
    untold: u64,
    alone: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng::seeded(seed);
        let now = 40_000_000 * SECOND;
        let unix = 1_796_083_200 + rng.below(86_400);
        let limit = 20 + rng.below(5_000);
        let burst = (rng.below(3) == 0).then(|| 1 + rng.below(limit));
        let rate = Rate::new(limit, Duration::from_secs(60), burst, false);
        let kinds = rng.below(3);
        let redis = Redis {
            now_us: 1e15,
            rate: None,
            windows: HashMap::new(),
            up: true,
            life: 0,
            lost: [0, 0],
            rng: Rng::seeded(seed ^ 0xF1EE7),
            level: 0.0,
            owed: 0,
            owed_unheard: 0,
            unwary: HashMap::new(),
            silent: HashSet::new(),
        };
        let mut world = World {
            seed,
            now,
            unix,
            windows: Windows::at(unix, Instant::from_nanos(now)),
            redis,
            gateways: Vec::new(),
            rate: (kinds != 1).then_some(rate),
            day: (kinds != 0).then(|| 500 + rng.below(20_000)),
            share: [0.0, 0.05, 0.1, 0.5][rng.below(4) as usize],
            rng,
            processes: 0,
            counted: 0,
            overrun: 0,
            lonely: HashSet::new(),
            untold: 0,
            alone: 0,
        };
        for &name in &NAMES[..2 + world.rng.below(3) as usize] {
            let gateway = world.gateway(name);
            world.gateways.push(gateway);
        }
        world
    }

    fn gateway(&mut self, name: &'static str) -> Gateway {
        let row = Arc::new(LimitRow::new(ScopeKind::Tenant, "x"));
        row.tokens.lease.set(true);
        row.allowances.iter().for_each(|allowance| allowance.set(true));
        self.processes += 1;
        Gateway {
            name,
            process: self.processes,
            scope: Scope { tokens: self.rate, day: self.day, ..Scope::unlimited(row) },
            member: Member::default(),
            life: self.redis.life,
            asks_at: 0,
            heard: Heard::default(),
            open: Vec::new(),
            accounts: Accounts::new(1),
            charged: 0,
            alone: 0,
            slow_until: 0,
        }
    }

    fn at(&self) -> Instant {
        Instant::from_nanos(self.now)
    }

    fn any(&mut self) -> usize {
        self.rng.below(self.gateways.len() as u64) as usize
    }

    fn arrive(&mut self, index: usize, amount: u64) -> bool {
        let (now, windows) = (self.at(), self.windows);
        let gateway = &mut self.gateways[index];
        let ask = Amount { input: amount, ..Amount::default() };
        let accounts = &mut gateway.accounts;
        let taken = Scopes::of(&gateway.scope).take(ask, now, &windows, accounts);
        if let Ok(grant) = taken {
            gateway.open.push((grant, amount));
            self.counted += amount;
        }
        taken.is_ok()
    }

    fn end(&mut self, index: usize) {
        let now = self.at();
        let gateway = &mut self.gateways[index];
        if gateway.open.is_empty() {
            return;
        }
        let place = self.rng.below(gateway.open.len() as u64) as usize;
        let (grant, reserved) = gateway.open.swap_remove(place);
        let used = match self.rng.below(8) {
            0 => reserved + self.rng.below(reserved + 2),
            1..4 => self.rng.below(reserved + 1),
            _ => reserved,
        };
        let amount = Amount { input: used, ..Amount::default() };
        Scopes::of(&gateway.scope).settle(&grant, amount, now, &mut gateway.accounts);
        gateway.charged += used;
        self.counted = self.counted + used - reserved;
        self.overrun += used.saturating_sub(reserved);
    }

    fn turn(&mut self, index: usize) {
        let turn = Turn { now: self.at(), windows: self.windows, share: self.share };
        let gateway = &mut self.gateways[index];
        if gateway.slow_until > self.now {
            return;
        }
        let heard = gateway.heard;
        let credit = gateway.scope.row.tokens.lease.credit();
        // It asks every second whether the connection still lives.
        let mut up = self.redis.up;
        if up && self.now >= gateway.asks_at {
            gateway.asks_at = self.now + SECOND;
            up = std::mem::replace(&mut gateway.life, self.redis.life) == self.redis.life;
        }
        let Gateway { name, process, scope, member, life, heard: hears, .. } = gateway;
        let mut link = Link {
            redis: &mut self.redis,
            life,
            name,
            process: *process,
            heard: hears,
            seed: self.seed,
        };
        let scopes = std::iter::once(&*scope);
        let lost = member.turn(scopes, up.then_some(&mut link), &turn).is_some();
        assert!(!member.has_twin(), "seed {}: one process speaks for {name}", self.seed);
        if lost || !up {
            self.lonely.insert(*process);
        }
        // Whatever came to the lease and not from Redis is of its own share.
        let came = scope.row.tokens.lease.credit() - credit
            + (hears.returned - heard.returned) as i64
            - (hears.granted - heard.granted) as i64;
        assert!(came == 0 || came > 0 && (lost || !up), "seed {}: {came} from nowhere", self.seed);
        gateway.alone += came as u64;
        self.alone += came as u64;
    }

    fn pass_time(&mut self, span: u64) {
        self.now += span;
        self.redis.now_us += (span / 1_000) as f64;
        let limit = self.rate.map_or(0, |rate| rate.limit()) as f64;
        self.redis.level = (self.redis.level - (span / 1_000) as f64 * limit / MINUTE_US).max(0.0);
        let before = self.unix;
        self.unix += span / SECOND;
        self.windows = Windows::at(self.unix, self.at()).not_before(self.windows);
        if before / 86_400 != self.unix / 86_400 {
            // What is open belongs to the day that it began on.
            for index in 0..self.gateways.len() {
                while !self.gateways[index].open.is_empty() {
                    self.end(index);
                }
            }
            (self.counted, self.overrun) = (0, 0);
            self.lonely.clear();
        }
    }

    fn set_clock(&mut self) {
        let Some(rate) = self.rate else { return };
        let step = self.rng.below(7_200_000_000) as f64 - 3_600_000_000.0;
        self.redis.now_us += step;
        // Set forward, what would have flowed in by then is there; set back, what was drawn is a debt, if
        // its key was still kept, and no deeper than a debt may be.
        let ahead = self.redis.rate.map_or(0.0, |(full, _)| full - self.redis.now_us).max(0.0);
        let (limit, burst) = (rate.limit() as f64, rate.most() as f64);
        self.redis.level = (ahead * limit / MINUTE_US).min(burst + limit);
    }

    /// The memory is gone, and so is every connection.
    fn restart_redis(&mut self) {
        let redis = &mut self.redis;
        redis.life += 1;
        redis.rate = None;
        redis.windows.clear();
        redis.level = 0.0;
        let window = self.windows.number(Per::Day);
        let knows = |gateway: &&Gateway| gateway.scope.row.allowances[0].most(window) > 0;
        redis.silent = self.gateways.iter().filter(knows).map(|gateway| gateway.name).collect();
    }

    /// Killed with what it held, and started again with the day's sum of its last commit.
    fn kill(&mut self, index: usize) {
        let window = self.windows.number(Per::Day);
        let used = self.gateways[index].scope.row.calendars[0].used(window);
        let name = self.gateways[index].name;
        self.untold += self.gateways[index].alone;
        let fresh = self.gateway(name);
        fresh.scope.row.calendars[0].restore(window, used);
        self.gateways[index] = fresh;
    }

    /// Ends in order, and starts again.
    fn leave(&mut self, index: usize) {
        while !self.gateways[index].open.is_empty() {
            self.end(index);
        }
        let Gateway { name, process, scope, member, life, heard, .. } = &mut self.gateways[index];
        let (redis, process, seed) = (&mut self.redis, *process, self.seed);
        let mut link = Link { redis, life, name, process, heard, seed };
        let _ = member.leave(std::iter::once(&*scope), &mut link, &self.windows);
        self.kill(index);
    }

    fn check(&self) {
        let seed = self.seed;
        for gateway in &self.gateways {
            // What was drawn is spent, held, or returned.
            let lease = &gateway.scope.row.tokens.lease;
            if self.rate.is_some() {
                let got = gateway.heard.granted + gateway.alone;
                let gone = gateway.drawn() + gateway.heard.returned;
                assert_eq!(
                    lease.credit(),
                    got as i64 - gone as i64,
                    "seed {seed}: {}",
                    gateway.name
                );
            }
        }
        // What was taken alone is charged, and twice only where the answer was lost.
        assert!(
            self.redis.owed <= self.alone + self.redis.owed_unheard,
            "seed {seed}: {} charged of {}",
            self.redis.owed,
            self.alone
        );
        if let Some(limit) = self.day {
            let own = (limit as f64 * self.share) as u64 * self.lonely.len() as u64;
            let unwary = self.redis.unwary.get(&self.key()).copied().unwrap_or(0);
            let most = limit + own + self.overrun + unwary;
            assert!(self.counted <= most, "seed {seed}: {} of {most}", self.counted);
        }
    }

    fn key(&self) -> String {
        format!("forebay:{{Tenant:x}}:0/{}", self.windows.number(Per::Day))
    }

    fn live(mut self, events: u32) {
        for _ in 0..events {
            let index = self.any();
            match self.rng.below(100) {
                0..40 => {
                    let (rate, day) = (self.rate.map(|rate| rate.most() / 8), self.day);
                    let most = match self.rng.below(10) {
                        0 => day.unwrap_or(500),
                        1..4 => 1 + rate.or(day).unwrap_or(0) / 8,
                        _ => 1 + rate.unwrap_or(u64::MAX).min(day.map_or(u64::MAX, |day| day / 20)),
                    };
                    let amount = 1 + self.rng.below(most);
                    self.arrive(index, amount);
                    self.turn(index);
                }
                40..60 => self.end(index),
                60..75 => self.turn(index),
                75..88 => {
                    let span = [4_000_000, 50_000_000, SECOND, 20 * SECOND];
                    let most = span[self.rng.below(4) as usize];
                    let span = (1 + self.rng.below(most)) / 1_000 * 1_000;
                    self.pass_time(span);
                }
                88..91 => self.redis.up = !self.redis.up,
                91 => self.restart_redis(),
                92 => self.set_clock(),
                93..95 => self.redis.lost = [self.rng.below(20), self.rng.below(20)],
                95 => self.kill(index),
                96 => self.leave(index),
                97 => {
                    self.gateways[index].slow_until = self.now + self.rng.below(5 * SECOND);
                }
                98 => {
                    let half_days = self.rng.below(2);
                    self.pass_time(half_days * 43_200 * SECOND);
                }
                _ => self.redis.lost = [0, 0],
            }
            self.check();
        }
        self.calm();
    }

    /// No more faults: what was lost is put right, and everybody is served again.
    fn calm(mut self) {
        self.redis.up = true;
        self.redis.lost = [0, 0];
        for index in 0..self.gateways.len() {
            while !self.gateways[index].open.is_empty() {
                self.end(index);
            }
        }
        self.pass_time(6 * SECOND);
        for _ in 0..3 {
            (0..self.gateways.len()).for_each(|index| self.turn(index));
            self.check();
        }
        let seed = self.seed;
        let window = self.windows.number(Per::Day);
        if self.day.is_some()
            && let Some(known) = self.redis.windows.get(&self.key())
        {
            // Who has nothing to say leaves its predecessor's part as it is.
            let part = |gateway: &Gateway| match known.parts.get(gateway.name) {
                Some((process, part)) if *process != gateway.process => *part,
                _ => gateway.scope.row.allowances[0].most(window),
            };
            let parts: u64 = self.gateways.iter().map(part).sum();
            assert_eq!(known.sum, parts + known.left_behind, "seed {seed}: the day");
            assert!(known.sum >= self.counted, "seed {seed}: {} unknown", self.counted);
        }
        if self.rate.is_some() {
            let told = self.redis.owed + self.untold;
            assert!(told >= self.alone, "seed {seed}: {told} of {} is owed", self.alone);
        }
        // What others give back is there for who was told that there is nothing.
        (1..self.gateways.len()).for_each(|index| self.leave(index));
        let room = self.day.is_none_or(|limit| {
            let sum = self.redis.windows.get(&self.key()).map_or(0, |known| known.sum);
            sum + limit / 8 < limit
        });
        if !room {
            return;
        }
        let mut waiting: BTreeSet<usize> = (0..self.gateways.len()).collect();
        // The deepest debts are two windows, and idle members give back after ten seconds.
        for _ in 0..150 {
            waiting.retain(|&index| !self.arrive(index, 1));
            (0..self.gateways.len()).for_each(|index| self.turn(index));
            self.pass_time(SECOND);
            self.check();
        }
        assert!(waiting.is_empty(), "seed {seed}: {waiting:?} get nothing");
    }
}

#[test]
fn the_laws_of_fleets_hold_in_every_world() {
    let seeds = std::env::var("FOREBAY_SIM_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(2_000) {
        World::new(seed).live(150);
    }
}
