//! Limits that several gateways share, through Redis.
//!
//! Redis holds each limit whole: rates as GCRA in one number, windows as sums. This thread leases
//! from it in blocks and puts them on the board; requests spend what is there and never wait for
//! Redis, but for the first of a scope that nobody used for a while. Blocks follow use: a twentieth
//! of a second of it, between a thirty-second and an eighth of what a rate may give at once. What is
//! not used for some seconds goes back.
//!
//! While Redis cannot be reached a gateway spends what it holds, and of its own a share of each limit
//! (`fleet.share`); what it took that way is charged to Redis when that is back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use redis::{Connection, RedisError, Script};

use crate::meter::events::{Level, say};
use crate::pure::board::{LimitRow, Rate};
use crate::pure::limit::Scope;
use crate::pure::plan::{self, Plan};
use crate::rt;
use crate::shard::Shared;

/// How often the thread looks at what is held.
const TURN: Duration = Duration::from_millis(4);
/// Credit that was not touched for so long goes back.
const IDLE: Duration = Duration::from_secs(10);
/// How long Redis may take to answer, and how often a lost one is tried again.
const PATIENCE: Duration = Duration::from_millis(500);
const AGAIN: Duration = Duration::from_millis(500);
/// How often it is asked whether it is there.
const HEAR: Duration = Duration::from_secs(1);

/// Whether Redis answers, and leases taken from it since start.
pub static UP: AtomicBool = AtomicBool::new(false);
pub static LEASES: AtomicU64 = AtomicU64::new(0);

/// KEYS: the rate's key. ARGV: limit, window in us, burst, most, and what to charge whatever there is.
/// Gives what was granted, what is left, and us until one would be there.
const LEASE: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local most, owed = tonumber(ARGV[4]), tonumber(ARGV[5])
local full = tonumber(redis.call('GET', KEYS[1]) or '0')
if full < now then full = now end
full = full + owed * window / limit
local room = burst * window / limit - (full - now)
local units = math.floor(room * limit / window + 0.000001)
if units < 0 then units = 0 end
local granted = math.min(most, units)
full = math.ceil(full + granted * window / limit)
if full > now then
  redis.call('SET', KEYS[1], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1000)
end
local wait = 0
if units == 0 then wait = math.ceil(window / limit - room) end
return { granted, units - granted, wait }
";

/// KEYS: the rate's key. ARGV: limit, window in us, what comes back.
const RETURN: &str = r"
local full = tonumber(redis.call('GET', KEYS[1]) or '0')
local back = math.floor(tonumber(ARGV[3]) * tonumber(ARGV[2]) / tonumber(ARGV[1]))
if full > 0 then redis.call('SET', KEYS[1], string.format('%.0f', full - back), 'KEEPTTL') end
return 0
";

/// KEYS: the window's key. ARGV: limit, least, most, what to count whatever there is, seconds to keep
/// it. Gives what was granted and what is left.
const ALLOW: &str = r"
local limit, least, most, owed = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local used = tonumber(redis.call('GET', KEYS[1]) or '0') + owed
local left = limit - used
if left < 0 then left = 0 end
local granted = math.min(most, left)
if granted < least then granted = 0 end
redis.call('SET', KEYS[1], string.format('%.0f', used + granted), 'EX', ARGV[5])
return { granted, left - granted }
";

/// Windows are kept so long after their last use: a month and the next.
const KEPT_SECONDS: u64 = 63 * 86_400;

/// The thread that asks. Dropping it does not stop the thread: [`Fleet::finish`] does.
#[derive(Debug)]
pub struct Fleet {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Fleet {
    /// Begins to share the limits of the plan in force, whichever that is at the time. Does nothing
    /// while the plan has no `fleet`.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(shared: Arc<Shared>) -> std::io::Result<Fleet> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("fleet".into()).spawn(move || {
            let mut member = Member::default();
            while !told.load(Ordering::Acquire) {
                member.turn(&shared);
                std::thread::park_timeout(TURN);
            }
            member.leave(&shared);
        })?;
        Ok(Fleet { stop, thread: Some(thread) })
    }

    /// Gives back what is held and ends.
    pub fn finish(mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

#[derive(Default)]
struct Member {
    link: Option<Connection>,
    lost_at: Option<Instant>,
    /// When Redis last showed that it is there, asked for nothing else.
    heard: Option<Instant>,
    /// Of each lease: its use so far, how much that was in the last moments, and when it last was.
    uses: HashMap<String, Use>,
    /// Taken of our own share while Redis was away, to be charged.
    owed: HashMap<String, u64>,
    /// Rows that were shared under the last plan.
    shared: Vec<Arc<LimitRow>>,
    plan: Option<Arc<Plan>>,
}

struct Use {
    spent: u64,
    pace: f64,
    last: Instant,
    looked: Instant,
}

impl Member {
    fn turn(&mut self, shared: &Shared) {
        let plan = shared.plan.load_full();
        self.follow(&plan);
        let Some(fleet) = &plan.fleet else { return };
        let mut link = match self.link.take() {
            Some(link) => Some(link),
            None if self.lost_at.is_some_and(|at| at.elapsed() < AGAIN) => None,
            None => self.connect(fleet),
        };
        if let Some(redis) = &mut link
            && self.heard.is_none_or(|heard| heard.elapsed() >= HEAR)
        {
            self.heard = Some(Instant::now());
            if let Err(error) = redis::cmd("PING").query::<String>(redis) {
                link = self.lose(&error);
            }
        }
        for scope in plan.all_scopes() {
            let result = self.rates(&mut link, scope, fleet.share);
            let result = result.and_then(|()| self.windows(&mut link, scope, shared, fleet.share));
            if let Err(error) = result {
                link = self.lose(&error);
            }
        }
        self.link = link;
    }

    fn lose(&mut self, error: &RedisError) -> Option<Connection> {
        if UP.swap(false, Ordering::Relaxed) || self.lost_at.is_none() {
            say(Level::Error, "fleet_lost", &[("error", error)]);
        }
        self.lost_at = Some(Instant::now());
        None
    }

    /// Shares what the plan limits, and no longer what it does not.
    fn follow(&mut self, plan: &Arc<Plan>) {
        if self.plan.as_ref().is_some_and(|known| Arc::ptr_eq(known, plan)) {
            return;
        }
        self.plan = Some(Arc::clone(plan));
        let on = plan.fleet.is_some();
        let fresh: Vec<Arc<LimitRow>> =
            plan.all_scopes().map(|scope| Arc::clone(&scope.row)).collect();
        let kept: HashSet<_> = fresh.iter().map(Arc::as_ptr).collect();
        for row in self.shared.drain(..) {
            if !on || !kept.contains(&Arc::as_ptr(&row)) {
                set(&row, false);
            }
        }
        if on {
            fresh.iter().for_each(|row| set(row, true));
            self.shared = fresh;
        }
    }

    fn connect(&mut self, fleet: &plan::Fleet) -> Option<Connection> {
        let open = || -> Result<Connection, RedisError> {
            let redis = redis::Client::open(fleet.redis.expose())?;
            let mut link = redis.get_connection_with_timeout(PATIENCE)?;
            link.set_read_timeout(Some(PATIENCE))?;
            link.set_write_timeout(Some(PATIENCE))?;
            // Who looks at Redis sees who is there.
            let name = format!("forebay-{}", fleet.name);
            redis::cmd("CLIENT").arg("SETNAME").arg(name).exec(&mut link)?;
            Ok(link)
        };
        match open() {
            Ok(link) => {
                if !UP.swap(true, Ordering::Relaxed) {
                    say(Level::Info, "fleet_joined", &[]);
                }
                self.lost_at = None;
                Some(link)
            }
            Err(error) => self.lose(&error),
        }
    }

    fn rates(
        &mut self,
        link: &mut Option<Connection>,
        scope: &Scope,
        share: f64,
    ) -> Result<(), RedisError> {
        for (what, rate, resource) in scope.rates() {
            let lease = &resource.lease;
            if !lease.stirs() && self.owed.is_empty() {
                continue;
            }
            let key = key(scope, &format!("{what:?}"));
            let wanted = lease.wanted();
            let (block, idle) = self.pace(&key, lease.spent(), rate.most(), wanted);
            let credit = lease.credit();
            let held = u64::try_from(credit).unwrap_or(0);
            let debt = u64::try_from(-credit).unwrap_or(0);
            let Some(redis) = link.as_mut() else {
                // Alone: of our own share, in place of the fleet's.
                if wanted > held || debt > 0 {
                    let now = rt::now();
                    let own = rate.share(share);
                    let granted = resource.take_share(&own, now, wanted.max(block) + debt);
                    *self.owed.entry(key).or_default() += granted;
                    let dry = (granted == 0).then(|| now + Duration::from_millis(200));
                    lease.given(granted, 0, dry);
                }
                continue;
            };
            let owed = self.owed.remove(&key).unwrap_or(0);
            if idle && held > 0 {
                let back = lease.recall(held);
                Script::new(RETURN)
                    .key(&key)
                    .arg(rate.limit())
                    .arg(micros(&rate))
                    .arg(back)
                    .invoke::<i64>(redis)?;
                continue;
            }
            let low = if idle { 0 } else { block };
            if wanted <= held && held >= low.div_ceil(2) && debt == 0 && owed == 0 {
                continue;
            }
            let most = (wanted + low + debt).saturating_sub(held);
            let asked = rt::now();
            let answer = Script::new(LEASE)
                .key(&key)
                .arg(rate.limit())
                .arg(micros(&rate))
                .arg(rate.most())
                .arg(most)
                .arg(owed)
                .invoke::<(u64, u64, u64)>(redis);
            let (granted, left, wait) = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    *self.owed.entry(key).or_default() += owed;
                    return Err(error);
                }
            };
            LEASES.fetch_add(1, Ordering::Relaxed);
            let dry = (wait > 0).then(|| asked + Duration::from_micros(wait));
            lease.given(granted, left, dry);
        }
        Ok(())
    }

    /// How large a block should be, and whether nobody has used the lease for a while.
    fn pace(&mut self, key: &str, spent: u64, burst: u64, wanted: u64) -> (u64, bool) {
        let now = Instant::now();
        let known = self.uses.entry(key.to_owned()).or_insert(Use {
            spent,
            pace: 0.0,
            last: now - IDLE,
            looked: now,
        });
        let used = spent.saturating_sub(known.spent);
        if used > 0 || wanted > 0 {
            known.last = now;
        }
        let span = now.duration_since(known.looked).as_secs_f64().max(0.001);
        // Smoothed over a twentieth of a second or so.
        known.pace = known.pace * 0.9 + used as f64 / span * 0.1;
        known.spent = spent;
        known.looked = now;
        // No member may lie on what the others need.
        let block = ((known.pace / 20.0) as u64).clamp(burst / 32, burst / 8).max(1);
        (block, known.last.elapsed() >= IDLE)
    }

    fn windows(
        &mut self,
        link: &mut Option<Connection>,
        scope: &Scope,
        shared: &Shared,
        share: f64,
    ) -> Result<(), RedisError> {
        let windows = **shared.windows.load();
        for (number, per, limit) in scope.calendars() {
            let window = windows.number(per);
            let allowance = &scope.row.allowances[number];
            let used = scope.row.calendars[number].used(window);
            // What was counted here before was the fleet's to count when it was.
            allowance.begin(window, used);
            let wanted = allowance.wanted();
            let most = allowance.most(window);
            let held = most.saturating_sub(used);
            // A debt: settled beyond what was allowed, or counted without a limit.
            let debt = used.saturating_sub(most);
            if wanted <= held && debt == 0 && self.owed.is_empty() {
                continue;
            }
            let key = format!("{}:{window}", key(scope, &number.to_string()));
            let Some(redis) = link.as_mut() else {
                let own = (limit as f64 * share) as u64;
                let taken = self.owed.get(&key).copied().unwrap_or(0);
                if wanted > held {
                    let granted = own.saturating_sub(taken).min(wanted - held + limit / 64);
                    *self.owed.entry(key).or_default() += granted;
                    allowance.given(window, granted, (granted == 0).then_some(1));
                }
                continue;
            };
            let owed = self.owed.remove(&key).unwrap_or(0);
            if wanted <= held && debt == 0 && owed == 0 {
                continue;
            }
            let least = wanted.saturating_sub(held);
            let ask = if wanted > 0 { least.max(limit / 64) } else { 0 };
            let answer = Script::new(ALLOW)
                .key(&key)
                .arg(limit)
                .arg(least)
                .arg(ask)
                .arg(owed + debt)
                .arg(KEPT_SECONDS)
                .invoke::<(u64, u64)>(redis);
            let (granted, left) = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    *self.owed.entry(key).or_default() += owed;
                    return Err(error);
                }
            };
            LEASES.fetch_add(1, Ordering::Relaxed);
            // What it has left it gives to who wants no more than that.
            let short = (granted < least || left == 0 && granted == 0).then_some(left + 1);
            allowance.given(window, granted + debt, short);
        }
        Ok(())
    }

    /// Gives everything back: others may use it.
    fn leave(&mut self, shared: &Shared) {
        let plan = shared.plan.load_full();
        let Some(redis) = &mut self.link else { return };
        for scope in plan.all_scopes() {
            for (what, rate, resource) in scope.rates() {
                let held = u64::try_from(resource.lease.credit()).unwrap_or(0);
                let back = resource.lease.recall(held);
                if back > 0 {
                    let _ = Script::new(RETURN)
                        .key(key(scope, &format!("{what:?}")))
                        .arg(rate.limit())
                        .arg(micros(&rate))
                        .arg(back)
                        .invoke::<i64>(redis);
                }
            }
            let windows = **shared.windows.load();
            for (number, per, _) in scope.calendars() {
                let window = windows.number(per);
                let allowance = &scope.row.allowances[number];
                let used = scope.row.calendars[number].used(window);
                let back = allowance.most(window).saturating_sub(used);
                if back > 0 {
                    let key = format!("{}:{window}", key(scope, &number.to_string()));
                    let _ = redis::cmd("DECRBY").arg(key).arg(back).query::<i64>(redis);
                }
            }
        }
    }
}

fn set(row: &LimitRow, on: bool) {
    for resource in [&row.requests, &row.tokens, &row.input, &row.output] {
        resource.lease.set(on);
    }
    row.allowances.iter().for_each(|allowance| allowance.set(on));
}

/// All keys of one scope lie in one slot of a cluster.
fn key(scope: &Scope, what: &str) -> String {
    format!("forebay:{{{:?}:{}}}:{what}", scope.kind, scope.row.name.replace('\0', "/"))
}

fn micros(rate: &Rate) -> u64 {
    u64::try_from(rate.window().as_micros()).unwrap_or(u64::MAX)
}
