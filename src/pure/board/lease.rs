//! What a gateway of a fleet holds of limits that the fleet shares.
//!
//! Requests spend from what is held and never ask anybody; one thread asks the fleet for more, ahead
//! of need where there is a history, and as soon as somebody was refused where there is none.

use super::reservoir::{AMOUNT_MAX, Dry, age, word};
use crate::pure::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use crate::pure::units::Instant;

/// Of a rate: credit, taken from the fleet's reservoir in blocks. Below zero it is a debt.
#[derive(Debug, Default)]
pub struct Lease {
    on: AtomicBool,
    credit: AtomicI64,
    /// Asked for and not there, since the fleet was last asked.
    wanted: AtomicU64,
    /// Ever spent.
    spent: AtomicU64,
    /// The fleet has nothing before this moment (nanoseconds).
    dry_until: AtomicU64,
    /// What the fleet had left when it was last asked.
    left: AtomicU64,
}

impl Lease {
    /// From now on, or no longer, the fleet's.
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::Release);
    }

    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Spends `amount` of what is held.
    ///
    /// # Errors
    /// [`Dry`]: the fleet has nothing for a while, or is being asked.
    pub fn take(&self, now: Instant, amount: u64) -> Result<(), Dry> {
        let amount_signed = signed(amount);
        let enough = |credit: i64| (credit >= amount_signed).then(|| credit - amount_signed);
        match self.credit.fetch_update(Ordering::AcqRel, Ordering::Acquire, enough) {
            Ok(_) => {
                self.spent.fetch_add(amount, Ordering::Relaxed);
                Ok(())
            }
            Err(_) => Err(self.want(now, amount)),
        }
    }

    fn want(&self, now: Instant, amount: u64) -> Dry {
        let dry_until = Instant::from_nanos(self.dry_until.load(Ordering::Relaxed));
        if dry_until > now {
            return Dry::For(dry_until.since(now));
        }
        self.wanted.fetch_max(amount, Ordering::AcqRel);
        Dry::Asked
    }

    /// Replaces what was reserved by what was used.
    pub fn settle(&self, reserved: u64, actual: u64) {
        let back = signed(reserved).saturating_sub(signed(actual));
        self.credit.fetch_add(back, Ordering::AcqRel);
        self.spent.fetch_add(actual.saturating_sub(reserved), Ordering::Relaxed);
    }

    /// What is there for this gateway's requests, as far as it knows.
    pub fn left(&self) -> u64 {
        let held = u64::try_from(self.credit.load(Ordering::Relaxed)).unwrap_or(0);
        held.saturating_add(self.left.load(Ordering::Relaxed))
    }

    // ---- for the thread that asks

    /// Whether there is anything to look after: credit, a debt, or a wish.
    pub fn stirs(&self) -> bool {
        self.credit.load(Ordering::Acquire) != 0 || self.wanted.load(Ordering::Acquire) != 0
    }

    pub fn credit(&self) -> i64 {
        self.credit.load(Ordering::Acquire)
    }

    pub fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// The largest amount that was asked for in vain, once.
    pub fn wanted(&self) -> u64 {
        self.wanted.swap(0, Ordering::AcqRel)
    }

    /// The fleet's answer: what it gave, what it has left, and, if it gave too little, for how long
    /// it has no more.
    pub fn given(&self, amount: u64, left: u64, dry_until: Option<Instant>) {
        self.left.store(left, Ordering::Relaxed);
        let until = dry_until.map_or(0, Instant::nanos);
        self.dry_until.store(until, Ordering::Relaxed);
        self.credit.fetch_add(signed(amount), Ordering::AcqRel);
    }

    /// Takes at most `amount` of the credit back from requests; how much that was.
    pub fn recall(&self, amount: u64) -> u64 {
        let mut taken = 0;
        let _ = self.credit.fetch_update(Ordering::AcqRel, Ordering::Acquire, |credit| {
            taken = credit.clamp(0, signed(amount));
            Some(credit - taken)
        });
        u64::try_from(taken).unwrap_or(0)
    }
}

fn signed(amount: u64) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX >> 1)
}

/// Of a calendar window: how much of it this gateway may count, what it has counted included.
///
/// What is said of a window stands in one word with the lowest bits of its number, so that at the
/// turn of two nobody takes what is said of one for the other.
#[derive(Debug, Default)]
pub struct Allowance {
    on: AtomicBool,
    /// The window that has begun, and how much may be counted in it.
    most: AtomicU64,
    wanted: AtomicU64,
    /// The fleet has not so much left for this gateway, in which window; 0 is not known.
    short: AtomicU64,
    /// The whole number of the window that has begun: of interest to the thread that asks.
    window: AtomicU64,
}

impl Allowance {
    pub fn set(&self, on: bool) {
        self.on.store(on, Ordering::Release);
    }

    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// The limit that holds here: `limit`, or what the fleet allows of it in this window. What has no
    /// limit is counted and needs no allowance.
    pub fn limit(&self, window: u64, limit: u64) -> u64 {
        if limit == u64::MAX || !self.is_on() {
            return limit;
        }
        self.most(window).min(limit)
    }

    /// Why `amount` on top of `used` is refused, which is beyond the allowance: `None` if the fleet has
    /// not so much left, or else it is being asked.
    pub fn want(&self, window: u64, used: u64, amount: u64) -> Option<Dry> {
        let lacks = used.saturating_add(amount).saturating_sub(self.most(window)).max(1);
        if !self.is_on() || self.short(window).is_some_and(|short| lacks >= short) {
            return None;
        }
        self.wanted.fetch_max(amount.max(1), Ordering::AcqRel);
        Some(Dry::Asked)
    }

    /// Whether the fleet has given all of `window` away.
    pub fn is_gone(&self, window: u64) -> bool {
        self.is_on() && self.short(window) == Some(1)
    }

    /// How much may be counted in `window`, what has been counted included.
    pub fn most(&self, window: u64) -> u64 {
        of_window(&self.most, window)
    }

    /// The least amount that the fleet has not left for this gateway, if it has not some amount.
    pub fn short(&self, window: u64) -> Option<u64> {
        Some(of_window(&self.short, window)).filter(|&short| short > 0)
    }

    // ---- for the thread that asks

    pub fn wanted(&self) -> u64 {
        self.wanted.swap(0, Ordering::AcqRel)
    }

    /// Begins a window with what has been counted in it already.
    pub fn begin(&self, window: u64, counted: u64) {
        // The number of the first could be any.
        if self.window.swap(window + 1, Ordering::AcqRel) != window + 1 {
            self.most.store(word(window, counted), Ordering::Release);
        }
    }

    /// The fleet allows `amount` more of `window`, and has not `short` left.
    pub fn given(&self, window: u64, amount: u64, short: Option<u64>) {
        let _ = self.most.fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            let most = (old & AMOUNT_MAX).saturating_add(amount);
            (age(old, window) == 0).then(|| word(window, most))
        });
        self.short.store(word(window, short.unwrap_or(0)), Ordering::Release);
    }
}

/// What is said of `window`, if that is what the word speaks of.
fn of_window(said: &AtomicU64, window: u64) -> u64 {
    let said = said.load(Ordering::Acquire);
    if age(said, window) == 0 { said & AMOUNT_MAX } else { 0 }
}
