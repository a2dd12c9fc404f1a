//! What may be drawn, exactly, from any number of shards at once.
//!
//! A [`Reservoir`] is GCRA, the virtual scheduling form of the leaky bucket (ITU-T I.371), in one
//! atomic word: the moment at which all that was drawn will have flowed in again. Drawing is one
//! CAS loop; there is no lock and no round trip. Over any span it gives at most `burst` plus what
//! flows in during that span.
//!
//! A [`Ring`] is for who must never see more than the limit in any window: it remembers what was
//! drawn in each sixtieth of the window, and forgets a part only once all of it is older than the
//! window. A [`Calendar`] counts within days or months, and keeps the one before.

use std::sync::OnceLock;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use super::lease::Lease;
use crate::pure::atomic::{AtomicU64, Ordering};
use crate::pure::units::Instant;

/// Time is kept in sixteenths of a nanosecond, so that a token of a large limit, which takes less
/// than a nanosecond to flow in, is not rounded away. 64 bits of them are 36 years of uptime.
const FINE: u64 = 16;

/// How fast a reservoir fills, and how much it holds. It belongs to the plan; the word that it
/// governs is on the board and outlives plans: as that word is a time, a changed limit keeps the
/// share that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    limit: u64,
    /// In sixteenths of a nanosecond.
    window: u64,
    burst: u64,
    /// How far ahead of now a reservoir's word may be.
    depth: u64,
    /// What all shards together may lease of it; zero where that would be a good part of the burst.
    leased: u64,
    strict: bool,
}

/// What a shard leases is used within a tick, or goes back.
const TICK: u64 = 20_000_000 * FINE;
/// Of the last drops nobody leases: what one shard laid by, another would miss.
const PLENTY: u64 = 4 * TICK;
/// A lease is worth its while if it serves so many requests.
const LEASE_LEAST: u64 = 4;

impl Rate {
    /// `limit` for each `window`, of which `burst` may come at once (the whole limit where absent).
    /// `strict` is for [`Ring`]s, which know no burst.
    pub fn new(limit: u64, window: Duration, burst: Option<u64>, strict: bool) -> Rate {
        let window = u64::try_from(window.as_nanos()).unwrap_or(u64::MAX).max(1);
        let window = window.saturating_mul(FINE);
        let burst = if strict { limit } else { burst.unwrap_or(limit) };
        let rate = Rate { limit, window, burst, depth: 0, leased: 0, strict };
        // Each draw rounds up; what a full burst of single draws loses by that is given on top, and
        // never as much as one more would take.
        let (whole, one) = (rate.span(burst), rate.span(1));
        let lost = burst.saturating_mul(one).saturating_sub(whole);
        let leased = if strict || whole < PLENTY { 0 } else { rate.amount(TICK) };
        Rate { depth: whole.saturating_add(lost.min(one - 1)), leased, ..rate }
    }

    /// What one of so many shards may lease for requests that take `amount` each; zero if it may not.
    pub fn lease(&self, amount: u64, shards: u64) -> u64 {
        match amount.saturating_mul(LEASE_LEAST).saturating_mul(shards) <= self.leased {
            true => self.leased / shards,
            false => 0,
        }
    }

    /// How long `amount` takes to flow in.
    pub fn fills(&self, amount: u64) -> Duration {
        coarse(self.span(amount))
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The most that can ever be drawn at once.
    pub fn most(&self) -> u64 {
        if self.limit == 0 { 0 } else { self.burst }
    }

    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// This share of it, at least one.
    pub fn share(&self, share: f64) -> Rate {
        // Limits are below 2^50, so nothing is lost that matters.
        let part = |amount: u64| ((amount as f64 * share) as u64).max(1);
        let window = Duration::from_nanos(self.window / FINE);
        Rate::new(part(self.limit), window, Some(part(self.burst)), false)
    }

    pub fn window(&self) -> Duration {
        Duration::from_nanos(self.window / FINE)
    }

    /// How long `amount` takes to flow in, rounded up.
    fn span(&self, amount: u64) -> u64 {
        // What a request is as a rule: a tenth of the time.
        if let Some(small) = amount.checked_mul(self.window) {
            return small.div_ceil(self.limit.max(1));
        }
        let exact = u128::from(amount) * u128::from(self.window);
        u64::try_from(exact.div_ceil(u128::from(self.limit.max(1)))).unwrap_or(u64::MAX)
    }

    /// How much flows in within `span`, rounded down.
    fn amount(&self, span: u64) -> u64 {
        if let Some(small) = span.checked_mul(self.limit) {
            return small / self.window;
        }
        let exact = u128::from(span) * u128::from(self.limit) / u128::from(self.window);
        u64::try_from(exact).unwrap_or(u64::MAX)
    }
}

/// Why nothing was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dry {
    /// Enough will be there in so long, if nobody else draws.
    For(Duration),
    /// It is more than the reservoir can ever hold.
    Never,
    /// Not here; the fleet is being asked, and answers within milliseconds.
    Asked,
}

/// One limit's word. What it means is said by a [`Rate`], which each caller brings along.
#[derive(Debug, Default)]
pub struct Reservoir {
    /// When everything drawn will have flowed in again, in sixteenths of a nanosecond.
    full_at: CachePadded<AtomicU64>,
}

impl Reservoir {
    /// Draws as much as there is, at least `least` and at most `most`. One CAS loop.
    ///
    /// # Errors
    /// [`Dry`]; then nothing has changed.
    pub fn take(&self, rate: &Rate, now: Instant, least: u64, most: u64) -> Result<u64, Dry> {
        let now = fine(now);
        let mut seen = self.full_at.load(Ordering::Relaxed);
        loop {
            let (drawn, span) = fits(rate, now, seen, least, most)?;
            let next = seen.max(now).saturating_add(span);
            match self.full_at.compare_exchange_weak(
                seen,
                next,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(drawn),
                Err(other) => seen = other,
            }
        }
    }

    /// Gives back what was drawn and not used. Rounded down, so that giving creates nothing.
    pub fn give(&self, rate: &Rate, amount: u64) {
        let limit = rate.limit.max(1);
        let span = match amount.checked_mul(rate.window) {
            Some(small) => small / limit,
            None => {
                let exact = u128::from(amount) * u128::from(rate.window) / u128::from(limit);
                u64::try_from(exact).unwrap_or(u64::MAX)
            }
        };
        self.lower(span);
    }

    /// Gives back all that one draw of `amount` has drawn, to the last bit.
    pub fn undo(&self, rate: &Rate, amount: u64) {
        self.lower(rate.span(amount));
    }

    fn lower(&self, span: u64) {
        // The closure never gives `None`, so the result says nothing.
        let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            Some(full_at.saturating_sub(span))
        });
    }

    /// Draws `amount` whether it is there or not: what was used beyond what was reserved becomes a
    /// debt that later requests wait out, at most one window long.
    pub fn charge(&self, rate: &Rate, now: Instant, amount: u64) {
        let now = fine(now);
        let deepest = now.saturating_add(rate.depth).saturating_add(rate.window);
        let span = rate.span(amount);
        let _ = self.full_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |full_at| {
            // A debt that is deeper already, by another plan's rate, is nobody's to forgive.
            Some(full_at.max(now).saturating_add(span).min(deepest.max(full_at)))
        });
    }

    /// What could be drawn now.
    pub fn left(&self, rate: &Rate, now: Instant) -> u64 {
        rate.amount(self.room(rate, now)).min(rate.most())
    }

    fn room(&self, rate: &Rate, now: Instant) -> u64 {
        rate.depth.saturating_sub(self.full_at.load(Ordering::Relaxed).saturating_sub(fine(now)))
    }

    /// The share of the most that could be drawn now, 0 to 1: cheaper than [`Reservoir::left`].
    pub fn share_left(&self, rate: &Rate, now: Instant) -> f64 {
        // A share needs no more bits than these.
        self.room(rate, now) as f64 / rate.depth.max(1) as f64
    }

    /// Until it is full again.
    pub fn refills_in(&self, now: Instant) -> Duration {
        coarse(self.full_at.load(Ordering::Relaxed).saturating_sub(fine(now)))
    }
}

/// What can be drawn, and how long that takes to flow in.
fn fits(rate: &Rate, now: u64, full_at: u64, least: u64, most: u64) -> Result<(u64, u64), Dry> {
    if least > rate.most() {
        return Err(Dry::Never);
    }
    let room = rate.depth.saturating_sub(full_at.saturating_sub(now));
    let span = rate.span(least);
    if span > room {
        // What is ahead of now beyond the depth (a debt) has to pass as well.
        let debt = full_at.saturating_sub(now).saturating_sub(rate.depth);
        return Err(Dry::For(coarse((span - room).saturating_add(debt))));
    }
    if least == most {
        return Ok((least, span));
    }
    let drawn = rate.amount(room).min(rate.burst).min(most).max(least);
    Ok((drawn, rate.span(drawn)))
}

fn fine(now: Instant) -> u64 {
    now.nanos().saturating_mul(FINE)
}

/// Rounded up, so that who waits so long has waited long enough.
fn coarse(span: u64) -> Duration {
    Duration::from_nanos(span.div_ceil(FINE))
}

/// Parts that a window is remembered in.
const PARTS: u64 = 60;
/// A part is forgotten when all of it is older than the window: one more lives than the window has.
/// One further slot is for who adds late to a part that has just been forgotten.
const SLOTS: usize = PARTS as usize + 2;

/// Never more than the limit in any window, by a sum of its parts.
#[derive(Debug)]
pub struct Ring {
    /// Drawn in the parts that live; an upper bound at every moment.
    sum: CachePadded<AtomicU64>,
    /// The number of the latest part.
    latest: AtomicU64,
    /// The lowest bits of a part's number and what was drawn in it (see [`word`]), so that what comes
    /// back late is not taken off another part.
    parts: [AtomicU64; SLOTS],
}

impl Default for Ring {
    fn default() -> Ring {
        Ring {
            sum: CachePadded::default(),
            latest: AtomicU64::new(0),
            parts: std::array::from_fn(|_| AtomicU64::default()),
        }
    }
}

impl Ring {
    /// Draws `amount`.
    ///
    /// # Errors
    /// [`Dry`]; then nothing has changed.
    pub fn take(&self, rate: &Rate, now: Instant, amount: u64) -> Result<(), Dry> {
        if amount > rate.limit {
            return Err(Dry::Never);
        }
        self.advance(rate, now);
        let within = |sum: u64| sum.checked_add(amount).filter(|&sum| sum <= rate.limit);
        match self.sum.fetch_update(Ordering::AcqRel, Ordering::Acquire, within) {
            Ok(_) => {
                self.add(part_of(rate, now), amount);
                Ok(())
            }
            Err(_) => Err(Dry::For(self.wait(rate, now, amount))),
        }
    }

    /// Gives back what was drawn at `drawn`, unless that has been forgotten.
    pub fn give(&self, rate: &Rate, drawn: Instant, amount: u64) {
        let part = part_of(rate, drawn);
        if part + PARTS < self.latest.load(Ordering::Acquire) {
            return;
        }
        self.take_off(slot(part), word(part, amount));
    }

    /// Draws whether there is room or not.
    pub fn charge(&self, rate: &Rate, now: Instant, amount: u64) {
        self.advance(rate, now);
        // Beyond the limit there is nothing to be told apart.
        let amount = amount.min(rate.limit);
        self.sum.fetch_add(amount, Ordering::AcqRel);
        self.add(part_of(rate, now), amount);
    }

    pub fn left(&self, rate: &Rate, now: Instant) -> u64 {
        self.advance(rate, now);
        rate.limit.saturating_sub(self.sum.load(Ordering::Acquire))
    }

    /// Until enough of what was drawn is forgotten for `amount` to fit, if nobody else draws.
    pub fn wait(&self, rate: &Rate, now: Instant, amount: u64) -> Duration {
        self.advance(rate, now);
        let latest = part_of(rate, now);
        let mut over =
            self.sum.load(Ordering::Acquire).saturating_add(amount).saturating_sub(rate.limit);
        for part in latest.saturating_sub(PARTS)..=latest {
            if over == 0 {
                break;
            }
            let held = self.parts[slot(part)].load(Ordering::Acquire) & AMOUNT_MAX;
            over = over.saturating_sub(held);
            if over == 0 {
                let forgotten = (part + PARTS + 1).saturating_mul(part_length(rate));
                return Duration::from_nanos(forgotten.saturating_sub(now.nanos()));
            }
        }
        if over == 0 { Duration::ZERO } else { rate.window() }
    }

    /// Forgets what is old. What a part holds is read before it is forgotten, and no more than that is
    /// taken off: its slot may serve a new part by the time that this happens.
    fn advance(&self, rate: &Rate, now: Instant) {
        let part = part_of(rate, now);
        let mut latest = self.latest.load(Ordering::Acquire);
        while latest < part {
            // After a long silence all parts are old.
            let all = part - latest > PARTS + 1;
            let next = if all { part } else { latest + 1 };
            let old = match (all, next.checked_sub(PARTS + 1)) {
                (true, _) => 0..SLOTS,
                (false, Some(old)) => slot(old)..slot(old) + 1,
                (false, None) => 0..0,
            };
            let mut held = [0; SLOTS];
            for index in old.clone() {
                held[index] = self.parts[index].load(Ordering::Acquire);
            }
            match self.latest.compare_exchange(latest, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    for index in old {
                        self.take_off(index, held[index]);
                    }
                    latest = next;
                }
                Err(other) => latest = other,
            }
        }
    }

    /// Notes what is in the sum already.
    fn add(&self, part: u64, amount: u64) {
        let mut forgotten = 0;
        let _ = self.parts[slot(part)].fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            let held = old & AMOUNT_MAX;
            forgotten = 0;
            Some(match age(old, part) {
                0 => word(part, held.saturating_add(amount)),
                // This part is gone, and another has its place: counted there, it is counted longer.
                ..0 if held > 0 => word(old >> AMOUNT_BITS, held.saturating_add(amount)),
                // Somebody was late for a part that is gone.
                _ => {
                    forgotten = held;
                    word(part, amount)
                }
            })
        });
        self.lower(forgotten);
    }

    /// Takes at most what `seen` holds off its part, and as much off the sum; nothing if another part
    /// has its place.
    fn take_off(&self, index: usize, seen: u64) {
        let mut taken = 0;
        let _ = self.parts[index].fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
            let of_seen = old >> AMOUNT_BITS == seen >> AMOUNT_BITS;
            taken = if of_seen { (old & AMOUNT_MAX).min(seen & AMOUNT_MAX) } else { 0 };
            Some(old - taken)
        });
        self.lower(taken);
    }

    fn lower(&self, amount: u64) {
        let _ = self.sum.fetch_update(Ordering::AcqRel, Ordering::Acquire, |sum| {
            Some(sum.saturating_sub(amount))
        });
    }
}

/// In nanoseconds.
fn part_length(rate: &Rate) -> u64 {
    (rate.window / FINE / PARTS).max(1)
}

fn part_of(rate: &Rate, at: Instant) -> u64 {
    at.nanos() / part_length(rate)
}

fn slot(part: u64) -> usize {
    // The remainder is below 62.
    (part % SLOTS as u64) as usize
}

/// One limited resource of one scope: a reservoir, a ring for as long as its limit is strict, or a
/// lease for as long as it is shared with a fleet.
#[derive(Debug, Default)]
pub struct Resource {
    reservoir: Reservoir,
    ring: OnceLock<Box<Ring>>,
    pub lease: Lease,
}

impl Resource {
    fn ring(&self) -> &Ring {
        self.ring.get_or_init(Box::default)
    }

    /// Draws `amount`.
    ///
    /// # Errors
    /// [`Dry`]; then nothing has changed.
    pub fn take(&self, rate: &Rate, now: Instant, amount: u64) -> Result<(), Dry> {
        if self.lease.is_on() {
            if amount > rate.most() {
                return Err(Dry::Never);
            }
            return self.lease.take(now, amount);
        }
        if rate.strict {
            return self.ring().take(rate, now, amount);
        }
        self.reservoir.take(rate, now, amount, amount).map(drop)
    }

    /// Draws up to `most` for a lease from this gateway's own reservoir: the share that it may use
    /// while the fleet cannot be asked.
    pub fn take_share(&self, rate: &Rate, now: Instant, most: u64) -> u64 {
        self.reservoir.take(rate, now, 1, most).unwrap_or(0)
    }

    /// Draws `amount`, and `spare` on top if there is plenty; how much that is.
    ///
    /// # Errors
    /// [`Dry`]; then nothing has changed.
    pub fn lease(&self, rate: &Rate, now: Instant, amount: u64, spare: u64) -> Result<u64, Dry> {
        let plenty = || !self.lease.is_on() && self.reservoir.room(rate, now) >= PLENTY;
        if spare > 0 && plenty() {
            return self.reservoir.take(rate, now, amount, amount.saturating_add(spare));
        }
        self.take(rate, now, amount).map(|()| amount)
    }

    /// Gives back what was leased and not used.
    pub fn give(&self, rate: &Rate, amount: u64) {
        self.reservoir.give(rate, amount);
    }

    /// Undoes a [`Resource::take`] of this very moment.
    pub fn undo(&self, rate: &Rate, now: Instant, amount: u64) {
        if self.lease.is_on() || rate.strict {
            return self.settle(rate, now, now, amount, 0);
        }
        self.reservoir.undo(rate, amount);
    }

    /// Replaces `reserved`, which was drawn at `drawn`, by `actual`.
    pub fn settle(&self, rate: &Rate, drawn: Instant, now: Instant, reserved: u64, actual: u64) {
        if self.lease.is_on() {
            return self.lease.settle(reserved, actual);
        }
        let (unused, beyond) = (reserved.saturating_sub(actual), actual.saturating_sub(reserved));
        match (rate.strict, unused, beyond) {
            (_, 0, 0) => {}
            (true, 0, beyond) => self.ring().charge(rate, now, beyond),
            (true, unused, _) => self.ring().give(rate, drawn, unused),
            (false, 0, beyond) => self.reservoir.charge(rate, now, beyond),
            (false, unused, _) => self.reservoir.give(rate, unused),
        }
    }

    /// What could be drawn now.
    pub fn left(&self, rate: &Rate, now: Instant) -> u64 {
        match (self.lease.is_on(), rate.strict) {
            (true, _) => self.lease.left().min(rate.most()),
            (false, true) => self.ring().left(rate, now),
            (false, false) => self.reservoir.left(rate, now),
        }
    }

    /// The share of the most that could be drawn now, 0 to 1.
    pub fn share_left(&self, rate: &Rate, now: Instant) -> f64 {
        if !self.lease.is_on() && !rate.strict {
            return self.reservoir.share_left(rate, now);
        }
        self.left(rate, now) as f64 / rate.most().max(1) as f64
    }

    /// Until all of it could be drawn again, if nobody draws.
    pub fn refills_in(&self, rate: &Rate, now: Instant) -> Duration {
        if self.lease.is_on() {
            return coarse(rate.span(rate.most() - self.left(rate, now)));
        }
        if rate.strict {
            return self.ring().wait(rate, now, rate.limit);
        }
        self.reservoir.refills_in(now)
    }
}

/// An amount within a calendar window, and the one within the window before. One word each: the
/// lowest bits of the window's number and the amount, so that a new window begins with the first
/// draw in it and no draw of an old one can fall into it.
#[derive(Debug, Default)]
pub struct Calendar {
    words: CachePadded<[AtomicU64; 2]>,
}

const AMOUNT_BITS: u32 = 56;
/// 72 million dollars in billionths; seventy quadrillion tokens.
pub const AMOUNT_MAX: u64 = (1 << AMOUNT_BITS) - 1;

impl Calendar {
    /// Adds `amount` to window `id` if the sum stays within `limit`.
    pub fn take(&self, id: u64, amount: u64, limit: u64) -> bool {
        self.change(id, |held| held.checked_add(amount).filter(|&sum| sum <= limit))
    }

    /// Replaces `reserved` by `actual` in the window that it was reserved in, if that is still kept.
    pub fn settle(&self, id: u64, reserved: u64, actual: u64) {
        self.change(id, |held| Some(held.saturating_sub(reserved).saturating_add(actual)));
    }

    /// What window `id` holds; nothing if it is not kept.
    pub fn used(&self, id: u64) -> u64 {
        let word = self.words[side(id)].load(Ordering::Relaxed);
        if age(word, id) == 0 { word & AMOUNT_MAX } else { 0 }
    }

    /// Sets window `id`, at the start of the process.
    pub fn restore(&self, id: u64, amount: u64) {
        self.words[side(id)].store(word(id, amount), Ordering::Relaxed);
    }

    /// The windows that are kept and not empty, with their amounts, when the window is `now`.
    pub fn kept(&self, now: u64) -> impl Iterator<Item = (u64, u64)> {
        let kept = |word: &AtomicU64| {
            let word = word.load(Ordering::Relaxed);
            let id = now.checked_add_signed(-i64::from(age(word, now)))?;
            (word & AMOUNT_MAX > 0).then_some((id, word & AMOUNT_MAX))
        };
        self.words.iter().filter_map(kept).collect::<Vec<_>>().into_iter()
    }

    fn change(&self, id: u64, change: impl Fn(u64) -> Option<u64>) -> bool {
        self.words[side(id)]
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
                let held = old & AMOUNT_MAX;
                let held = match age(old, id) {
                    0 => held,
                    // Of a window long gone.
                    1.. => 0,
                    // Never used.
                    _ if held == 0 => 0,
                    // Ours is long gone.
                    _ => return None,
                };
                change(held).map(|amount| word(id, amount))
            })
            .is_ok()
    }
}

fn side(id: u64) -> usize {
    // One bit.
    (id & 1) as usize
}

/// A number's lowest eight bits and an amount.
pub(super) fn word(id: u64, amount: u64) -> u64 {
    id << AMOUNT_BITS | amount.min(AMOUNT_MAX)
}

/// How many windows (or parts of one) `word` is older than `id`, from the eight bits that it keeps.
pub(super) fn age(word: u64, id: u64) -> i8 {
    // Eight bits, read as a signed distance on their circle.
    (id as u8).wrapping_sub((word >> AMOUNT_BITS) as u8) as i8
}

#[cfg(test)]
mod tests;
