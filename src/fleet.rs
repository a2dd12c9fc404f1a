//! Limits that several gateways share, through Redis.
//!
//! Redis holds each limit whole: rates as GCRA in one number, windows as sums and as what each member
//! may count of them. What is asked for and when is [`Member`]'s to say; here is the thread that asks,
//! and the scripts that answer.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use redis::{Connection, RedisError, Script};

use crate::meter::events::{Level, say};
use crate::pure::board::{LimitRow, Rate};
use crate::pure::member::{Allowed, Claim, Common, Leased, Member, Turn};
use crate::pure::plan::{self, Plan};
use crate::rt;
use crate::shard::Shared;

/// How often the thread looks at what is held.
const TURN: Duration = Duration::from_millis(4);
/// How long Redis may take to answer, and how often a lost one is tried again.
const PATIENCE: Duration = Duration::from_millis(500);
const AGAIN: Duration = Duration::from_millis(500);
/// How often it is asked whether it is there.
const HEAR: Duration = Duration::from_secs(1);

/// Whether Redis answers, and leases taken from it since start.
pub static UP: AtomicBool = AtomicBool::new(false);
pub static LEASES: AtomicU64 = AtomicU64::new(0);

/// KEYS: the rate's key. ARGV: limit, window in us, burst, most, and what to charge whatever there is.
/// Gives what was granted, what is left, and us until one would be there. A debt is at most a window
/// deep, and so is what stands there from before its clock was set back.
const LEASE: &str = r"
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local most, owed = tonumber(ARGV[4]), tonumber(ARGV[5])
local full = tonumber(redis.call('GET', KEYS[1]) or '0')
if full < now then full = now end
full = full + owed * window / limit
local deepest = now + burst * window / limit + window
if full > deepest then full = deepest end
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

/// KEYS: the window's key. ARGV: limit, least, most, the member's name, its process, what it may count,
/// and seconds to keep it. Gives what was granted, what is left, and whether the last word in this name
/// was another process's. The hash holds the sum, and of each member its process and its part. A part
/// that another process left is charged for good: whether that still runs nobody knows.
const ALLOW: &str = r"
local limit, least, most, mine = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[6])
local sum = tonumber(redis.call('HGET', KEYS[1], 'sum') or '0')
local said = redis.call('HGET', KEYS[1], 'of ' .. ARGV[4])
local known, other = 0, 0
if said then
  local who, amount = string.match(said, '^(%S+) (%S+)$')
  known = tonumber(amount)
  if who ~= ARGV[5] then other = 1 end
end
if other == 0 or mine > known then sum = sum + mine - known end
local left = limit - sum
if left < 0 then left = 0 end
local granted = math.min(most, left)
if granted < least then granted = 0 end
redis.call('HSET', KEYS[1], 'sum', string.format('%.0f', sum + granted),
  'of ' .. ARGV[4], ARGV[5] .. ' ' .. string.format('%.0f', mine + granted))
redis.call('EXPIRE', KEYS[1], ARGV[7])
return { granted, left - granted, other }
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
            let mut asker = Asker::new();
            while !told.load(Ordering::Acquire) {
                asker.turn(&shared);
                std::thread::park_timeout(TURN);
            }
            asker.leave(&shared);
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

struct Asker {
    link: Option<Link>,
    lost_at: Option<Instant>,
    /// When Redis last showed that it is there, asked for nothing else.
    heard: Option<Instant>,
    /// What no other process has, of whatever name.
    process: String,
    member: Member,
    /// Rows that were shared under the last plan.
    shared: Vec<Arc<LimitRow>>,
    plan: Option<Arc<Plan>>,
}

impl Asker {
    fn new() -> Asker {
        let began = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Asker {
            link: None,
            lost_at: None,
            heard: None,
            process: format!("{}-{}", std::process::id(), began.as_nanos()),
            member: Member::default(),
            shared: Vec::new(),
            plan: None,
        }
    }

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
            if let Err(error) = redis::cmd("PING").query::<String>(&mut redis.connection) {
                link = self.lose(&error);
            }
        }
        let turn = Turn { now: rt::now(), windows: **shared.windows.load(), share: fleet.share };
        if let Some(error) = self.member.turn(plan.all_scopes(), link.as_mut(), &turn) {
            link = self.lose(&error);
        }
        if self.member.has_twin() {
            say(Level::Error, "fleet_name_taken", &[("name", &fleet.name)]);
        }
        self.link = link;
    }

    fn lose(&mut self, error: &RedisError) -> Option<Link> {
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
        self.member.keep(&kept);
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

    fn connect(&mut self, fleet: &plan::Fleet) -> Option<Link> {
        let open = || -> Result<Link, RedisError> {
            let redis = redis::Client::open(fleet.redis.expose())?;
            let mut connection = redis.get_connection_with_timeout(PATIENCE)?;
            connection.set_read_timeout(Some(PATIENCE))?;
            connection.set_write_timeout(Some(PATIENCE))?;
            // Who looks at Redis sees who is there.
            let name = format!("forebay-{}", fleet.name);
            redis::cmd("CLIENT").arg("SETNAME").arg(name).exec(&mut connection)?;
            let (name, process) = (Arc::clone(&fleet.name), self.process.clone());
            Ok(Link { connection, name, process })
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

    /// Gives everything back: others may use it.
    fn leave(&mut self, shared: &Shared) {
        let plan = shared.plan.load_full();
        let windows = **shared.windows.load();
        if let Some(link) = &mut self.link {
            // What it does not hear of any more flows in again, or is counted until the window ends.
            let _ = self.member.leave(plan.all_scopes(), link, &windows);
        }
    }
}

/// Redis, as long as it answers.
struct Link {
    connection: Connection,
    name: Arc<str>,
    process: String,
}

impl Common for Link {
    type Lost = RedisError;

    fn lease(
        &mut self,
        key: &str,
        rate: &Rate,
        most: u64,
        owed: u64,
    ) -> Result<Leased, RedisError> {
        let (granted, left, wait) = Script::new(LEASE)
            .key(key)
            .arg(rate.limit())
            .arg(micros(rate))
            .arg(rate.most())
            .arg(most)
            .arg(owed)
            .invoke::<(u64, u64, u64)>(&mut self.connection)?;
        LEASES.fetch_add(1, Ordering::Relaxed);
        let wait = (wait > 0).then(|| Duration::from_micros(wait));
        Ok(Leased { granted, left, wait })
    }

    fn give(&mut self, key: &str, rate: &Rate, amount: u64) -> Result<(), RedisError> {
        Script::new(RETURN)
            .key(key)
            .arg(rate.limit())
            .arg(micros(rate))
            .arg(amount)
            .invoke::<i64>(&mut self.connection)
            .map(drop)
    }

    fn allow(&mut self, key: &str, claim: Claim) -> Result<Allowed, RedisError> {
        let (granted, left, other) = Script::new(ALLOW)
            .key(key)
            .arg(claim.limit)
            .arg(claim.least)
            .arg(claim.most)
            .arg(&*self.name)
            .arg(&self.process)
            .arg(claim.mine)
            .arg(KEPT_SECONDS)
            .invoke::<(u64, u64, u8)>(&mut self.connection)?;
        LEASES.fetch_add(1, Ordering::Relaxed);
        Ok(Allowed { granted, left, other: other != 0 })
    }
}

fn set(row: &LimitRow, on: bool) {
    for resource in [&row.requests, &row.tokens, &row.input, &row.output] {
        resource.lease.set(on);
    }
    row.allowances.iter().for_each(|allowance| allowance.set(on));
}

fn micros(rate: &Rate) -> u64 {
    u64::try_from(rate.window().as_micros()).unwrap_or(u64::MAX)
}
