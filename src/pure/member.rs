//! What a gateway of a fleet asks of the limits that the fleet shares, when, and what it makes of the
//! answers.
//!
//! The fleet's memory ([`Common`]) holds each limit whole. A member leases from it in blocks and puts
//! them on the board; requests spend what is there and never wait for it, but for the first of a scope
//! that nobody used for a while. Blocks follow use: a twentieth of a second of it, between a
//! thirty-second and an eighth of what a rate may give at once. What is not used for some seconds goes
//! back.
//!
//! Any answer may be lost, whether what was asked has been done or not. Of a window a member says each
//! time how much it may count in it, so that whatever was not heard is put right by the next word, and
//! a memory that has been lost is told anew. Of a rate, what was granted unheard flows in again, and
//! what was owed is charged once more: both are forgotten within a window's time.
//!
//! While the memory cannot be reached a member spends what it holds, and of its own a share of each
//! limit; it says so when the memory is back.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;

use crate::pure::board::{LimitRow, Rate, Resource};
use crate::pure::limit::{Scope, Windows};
use crate::pure::units::Instant;

/// Credit that was not touched for so long goes back; what the fleet did not have is asked for again.
const IDLE: Duration = Duration::from_secs(10);
/// Windows that are told in one turn when the memory is back: others want their leases meanwhile.
const TELLS_MAX: u32 = 200;

/// The fleet's memory.
pub trait Common {
    /// Why there was no answer. What was asked may have been done all the same.
    type Lost;

    /// Charges `owed` to a rate whatever there is, and draws up to `most` from it.
    ///
    /// # Errors
    /// No answer.
    fn lease(&mut self, key: &str, rate: &Rate, most: u64, owed: u64)
    -> Result<Leased, Self::Lost>;

    /// Gives back what was leased and not spent.
    ///
    /// # Errors
    /// No answer.
    fn give(&mut self, key: &str, rate: &Rate, amount: u64) -> Result<(), Self::Lost>;

    /// Says what this member may count in a window, and asks for more of it.
    ///
    /// # Errors
    /// No answer.
    fn allow(&mut self, key: &str, claim: Claim) -> Result<Allowed, Self::Lost>;
}

/// What came of a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leased {
    pub granted: u64,
    pub left: u64,
    /// Until there is something again, if there was nothing.
    pub wait: Option<Duration>,
}

/// What a member says of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    pub limit: u64,
    /// How much it may count, what it has counted included: in the place of all that it said before.
    pub mine: u64,
    /// It wants at least so much more, or nothing, and at most so much.
    pub least: u64,
    pub most: u64,
}

/// What came of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowed {
    pub granted: u64,
    pub left: u64,
    /// Another process has spoken for this member since its start.
    pub other: bool,
}

/// What a turn is taken with.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub now: Instant,
    pub windows: Windows,
    /// Of each limit, what may be used while the memory is away; 0 to 1.
    pub share: f64,
}

/// A gateway's part in the fleet.
#[derive(Debug, Default)]
pub struct Member {
    rates: HashMap<Place, Pace, FixedState>,
    windows: HashMap<Place, Said, FixedState>,
    /// Some rate owes something.
    owing: bool,
    /// Counts how often the memory was lost: what it was told before it may have forgotten.
    life: u64,
    /// All that has to be told in this life has been.
    told: bool,
    twin: bool,
}

/// Where a row lies, which is for life, and the number of what it limits.
type Place = (usize, usize);

fn place(scope: &Scope, number: usize) -> Place {
    (Arc::as_ptr(&scope.row).addr(), number)
}

/// How fast a lease is used.
#[derive(Debug)]
struct Pace {
    spent: u64,
    /// Units in a second.
    pace: f64,
    last: Option<Instant>,
    looked: Instant,
    /// Taken of our own share while the memory was away, to be charged.
    owed: u64,
}

/// What was said of a window.
#[derive(Debug, Default)]
struct Said {
    window: u64,
    /// Ever taken of our own share of it.
    alone: u64,
    asked: Option<Instant>,
    /// Something was, and may have been granted unheard.
    spoken: bool,
    /// In which life the memory last heard of it.
    told: Option<u64>,
}

impl Member {
    /// Looks at everything that is shared, and asks for what is needed. `None` is a memory that is
    /// away; the rest of a turn in which it is lost goes without it.
    pub fn turn<'p, C: Common>(
        &mut self,
        scopes: impl Iterator<Item = &'p Scope>,
        mut common: Option<&mut C>,
        turn: &Turn,
    ) -> Option<C::Lost> {
        if common.is_none() {
            self.forget_told();
        }
        let (mut lost, mut owing, mut tells) = (None, false, TELLS_MAX);
        for scope in scopes {
            let result = self.rates(&mut common, scope, turn, &mut owing);
            let result = result.and_then(|()| self.windows(&mut common, scope, turn, &mut tells));
            if let Err(error) = result {
                common = None;
                lost = Some(error);
                self.forget_told();
                // Those that this turn did not come to.
                owing = true;
            }
        }
        self.owing = owing;
        self.told |= common.is_some() && tells > 0;
        lost
    }

    fn forget_told(&mut self) {
        self.life += 1;
        self.told = false;
    }

    /// Whether another process turned out to speak in this one's name.
    pub fn has_twin(&mut self) -> bool {
        std::mem::take(&mut self.twin)
    }

    /// Forgets what belongs to none of these rows.
    pub fn keep(&mut self, rows: &HashSet<*const LimitRow>) {
        let rows: HashSet<usize> = rows.iter().map(|row| row.addr()).collect();
        self.rates.retain(|(row, _), _| rows.contains(row));
        self.windows.retain(|(row, _), _| rows.contains(row));
    }

    fn rates<C: Common>(
        &mut self,
        common: &mut Option<&mut C>,
        scope: &Scope,
        turn: &Turn,
        owing: &mut bool,
    ) -> Result<(), C::Lost> {
        for (what, rate, resource) in scope.rates() {
            let lease = &resource.lease;
            let place = place(scope, what as usize);
            let owes = |rates: &HashMap<Place, Pace, _>| {
                rates.get(&place).is_some_and(|pace| pace.owed > 0)
            };
            if !(lease.stirs() || self.owing && owes(&self.rates)) {
                continue;
            }
            let wanted = lease.wanted();
            let spent = lease.spent();
            let pace = self.rates.entry(place).or_insert(Pace {
                spent,
                pace: 0.0,
                last: None,
                looked: turn.now,
                owed: 0,
            });
            let (block, idle) = pace.look(turn.now, spent, rate.most(), wanted);
            let credit = lease.credit();
            let held = u64::try_from(credit).unwrap_or(0);
            let debt = credit.min(0).unsigned_abs();
            let Some(common) = common else {
                if wanted > held || debt > 0 {
                    pace.owed += alone(resource, rate, turn, wanted.max(block) + debt);
                }
                *owing |= pace.owed > 0;
                continue;
            };
            if idle && held > 0 && pace.owed == 0 {
                common.give(&key(scope, &format!("{what:?}")), rate, lease.recall(held))?;
                continue;
            }
            let low = if idle { 0 } else { block };
            if wanted <= held && held >= low.div_ceil(2) && debt == 0 && pace.owed == 0 {
                continue;
            }
            let most = (wanted + low + debt).saturating_sub(held);
            let key = key(scope, &format!("{what:?}"));
            let leased = common.lease(&key, rate, most, pace.owed)?;
            pace.owed = 0;
            lease.given(leased.granted, leased.left, leased.wait.map(|wait| turn.now + wait));
        }
        Ok(())
    }

    fn windows<C: Common>(
        &mut self,
        common: &mut Option<&mut C>,
        scope: &Scope,
        turn: &Turn,
        tells: &mut u32,
    ) -> Result<(), C::Lost> {
        for (number, per, limit) in scope.calendars() {
            let window = turn.windows.number(per);
            let allowance = &scope.row.allowances[number];
            let used = scope.row.calendars[number].used(window);
            // What was counted here before was the fleet's to count when it was.
            allowance.begin(window, used);
            let most = allowance.most(window);
            let held = most.saturating_sub(used);
            let wanted = allowance.wanted();
            let short = allowance.short(window);
            // It may have been settled beyond what was allowed, or counted without a limit.
            let needs = wanted > held || used > most;
            if !needs && self.told && short.is_none() {
                continue;
            }
            let said = self.windows.entry(place(scope, number)).or_default();
            if said.window != window {
                *said = Said { window, ..Said::default() };
            }
            let lacks = wanted.saturating_sub(held);
            let Some(common) = common else {
                if lacks > 0 {
                    let own = (limit as f64 * turn.share) as u64;
                    let left = own.saturating_sub(said.alone);
                    let granted = if lacks <= left { left.min(lacks + limit / 64) } else { 0 };
                    said.alone += granted;
                    said.asked = None;
                    allowance.given(window, granted, (granted < lacks).then_some(left + 1));
                }
                continue;
            };
            let stale =
                short.is_some() && said.asked.is_none_or(|asked| turn.now.since(asked) >= IDLE);
            let known = most > 0 || said.spoken;
            let news = said.told != Some(self.life) && known && *tells > 0;
            if !needs && !stale && !news {
                continue;
            }
            *tells -= u32::from(news);
            said.asked = Some(turn.now);
            said.spoken = true;
            let claim = Claim {
                limit,
                mine: most.max(used),
                least: lacks,
                most: if lacks > 0 { lacks.max(limit / 64) } else { u64::from(stale) },
            };
            let key = format!("{}/{window}", key(scope, &number.to_string()));
            let allowed = common.allow(&key, claim)?;
            self.twin |= allowed.other && said.told.is_some();
            said.told = Some(self.life);
            // What it has left it gives to who wants no more than that.
            let nothing = allowed.granted < lacks || allowed.left == 0 && allowed.granted == 0;
            let short = nothing.then_some(allowed.left + 1);
            allowance.given(window, claim.mine - most + allowed.granted, short);
        }
        Ok(())
    }

    /// Gives everything back: others may use it.
    pub fn leave<'p, C: Common>(
        &mut self,
        scopes: impl Iterator<Item = &'p Scope>,
        common: &mut C,
        windows: &Windows,
    ) -> Result<(), C::Lost> {
        for scope in scopes {
            for (what, rate, resource) in scope.rates() {
                let held = u64::try_from(resource.lease.credit()).unwrap_or(0);
                let back = resource.lease.recall(held);
                if back > 0 {
                    common.give(&key(scope, &format!("{what:?}")), rate, back)?;
                }
            }
            for (number, per, limit) in scope.calendars() {
                let window = windows.number(per);
                let used = scope.row.calendars[number].used(window);
                if scope.row.allowances[number].most(window) != used {
                    let key = format!("{}/{window}", key(scope, &number.to_string()));
                    common.allow(&key, Claim { limit, mine: used, least: 0, most: 0 })?;
                }
            }
        }
        Ok(())
    }
}

/// Draws of our own share, in the fleet's place; how much that was.
fn alone(resource: &Resource, rate: &Rate, turn: &Turn, most: u64) -> u64 {
    let granted = resource.take_share(&rate.share(turn.share), turn.now, most);
    let dry = (granted == 0).then(|| turn.now + Duration::from_millis(200));
    resource.lease.given(granted, 0, dry);
    granted
}

impl Pace {
    /// How large a block should be, and whether nobody has used the lease for a while.
    fn look(&mut self, now: Instant, spent: u64, burst: u64, wanted: u64) -> (u64, bool) {
        let used = spent.saturating_sub(self.spent);
        if used > 0 || wanted > 0 {
            self.last = Some(now);
        }
        let span = now.since(self.looked).as_secs_f64().max(0.001);
        // Smoothed over a twentieth of a second or so.
        self.pace = self.pace * 0.9 + used as f64 / span * 0.1;
        self.spent = spent;
        self.looked = now;
        // No member may lie on what the others need.
        let block = ((self.pace / 20.0) as u64).clamp(burst / 32, burst / 8).max(1);
        (block, self.last.is_none_or(|last| now.since(last) >= IDLE))
    }
}

/// All keys of one scope lie in one slot of a cluster.
fn key(scope: &Scope, what: &str) -> String {
    format!("forebay:{{{:?}:{}}}:{what}", scope.kind, scope.row.name.replace('\0', "/"))
}
