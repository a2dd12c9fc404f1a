//! What a gateway of a fleet holds of limits that the fleet shares.
//!
//! Requests spend from what is held and never ask anybody; one thread asks the fleet for more, ahead
//! of need where there is a history, and as soon as somebody was refused where there is none.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use super::reservoir::Dry;
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

    /// Whether [`Lease::take`] would succeed; if not, the fleet is asked.
    ///
    /// # Errors
    /// [`Dry`].
    pub fn peek(&self, now: Instant, amount: u64) -> Result<(), Dry> {
        if self.credit.load(Ordering::Acquire) >= signed(amount) {
            return Ok(());
        }
        Err(self.want(now, amount))
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
#[derive(Debug, Default)]
pub struct Allowance {
    on: AtomicBool,
    /// The window that `most` is for.
    window: AtomicU64,
    most: AtomicU64,
    wanted: AtomicU64,
    /// The fleet has given all of this window away.
    gone: AtomicBool,
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
        if limit == u64::MAX {
            return limit;
        }
        match (self.is_on(), self.window.load(Ordering::Acquire) == window) {
            (false, _) => limit,
            (true, true) => self.most.load(Ordering::Acquire).min(limit),
            (true, false) => 0,
        }
    }

    /// Why `amount` beyond the allowance is refused: `None` if it is the limit itself that is
    /// reached, or the fleet is being asked.
    pub fn want(&self, amount: u64) -> Option<Dry> {
        if !self.is_on() || self.gone.load(Ordering::Relaxed) {
            return None;
        }
        self.wanted.fetch_max(amount.max(1), Ordering::AcqRel);
        Some(Dry::Asked)
    }

    /// The window that the allowance is for.
    pub fn window(&self) -> u64 {
        self.window.load(Ordering::Acquire)
    }

    /// Whether the fleet has given all of `window` away.
    pub fn is_gone(&self, window: u64) -> bool {
        self.is_on()
            && self.gone.load(Ordering::Relaxed)
            && self.window.load(Ordering::Acquire) == window
    }

    // ---- for the thread that asks

    pub fn wanted(&self) -> u64 {
        self.wanted.swap(0, Ordering::AcqRel)
    }

    /// Begins a window with what has been counted in it already.
    pub fn begin(&self, window: u64, counted: u64) {
        if self.window.load(Ordering::Acquire) != window || !self.is_on() {
            self.most.store(counted, Ordering::Release);
            self.window.store(window, Ordering::Release);
            self.gone.store(false, Ordering::Relaxed);
        }
    }

    pub fn most(&self) -> u64 {
        self.most.load(Ordering::Acquire)
    }

    /// The fleet allows `amount` more; `gone` if that was the last.
    pub fn given(&self, amount: u64, gone: bool) {
        self.most.fetch_add(amount, Ordering::AcqRel);
        self.gone.store(gone, Ordering::Relaxed);
    }
}
