//! Units: what can be confused gets a type, so that a duration is never a token count.
//!
//! Nothing here reads a clock or draws entropy: time and chance come in as arguments.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

/// A point on `CLOCK_MONOTONIC`, in nanoseconds. Simulations start at [`Instant::ZERO`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    pub const ZERO: Instant = Instant(0);

    pub const fn from_nanos(nanos: u64) -> Instant {
        Instant(nanos)
    }

    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// Time since `earlier`; zero if `earlier` is later, so a stale reading never panics.
    pub const fn since(self, earlier: Instant) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    /// Saturates: a deadline past the end of time is simply never reached.
    fn add(self, span: Duration) -> Instant {
        let nanos = u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        Instant(self.0.saturating_add(nanos))
    }
}

/// A number of model tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tokens(pub u64);

impl Add for Tokens {
    type Output = Tokens;

    fn add(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Tokens {
    fn add_assign(&mut self, other: Tokens) {
        *self = *self + other;
    }
}

impl Sub for Tokens {
    type Output = Tokens;

    /// Saturates at zero: counts of what exists are never negative.
    fn sub(self, other: Tokens) -> Tokens {
        Tokens(self.0.saturating_sub(other.0))
    }
}

/// Money in billionths of a US dollar; a signed integer, so that debts are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NanoUsd(pub i64);

impl fmt::Display for NanoUsd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.0 < 0 { "-" } else { "" };
        let nanos = self.0.unsigned_abs();
        write!(f, "{sign}{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
    }
}

macro_rules! dense_ids {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub u32);

        impl $name {
            /// As a slice index. A u32 always fits a usize on the 64-bit targets we build for.
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }
    )+};
}

dense_ids! {
    /// Index into `Plan::routes`.
    RouteId,
    /// Index into `Plan::pools`.
    PoolId,
    /// Index into `Plan::backends`.
    BackendId,
    /// Index into `Plan::models`.
    ModelId,
    /// Index into `Plan::tenants`.
    TenantId,
    /// Index into `Plan::keys`.
    KeyId,
    /// Index of a shard thread, from 0.
    ShardId,
    /// A name that keeps its number for the life of the process, across reloads: what counters
    /// are indexed by. One number space for each kind of name.
    Series,
}

/// Days since 1970-01-01 to year, month, day (Howard Hinnant, "chrono-Compatible Low-Level Date
/// Algorithms", `civil_from_days`, for days that are not negative).
pub fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

/// Seeded pseudo-random numbers: SplitMix64 (Steele, Lea and Flood, 2014). Fast and replayable;
/// not for secrets.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub const fn seeded(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound` (Lemire's multiply-shift; bias below 2^-32 for bounds below 2^32).
    /// A bound of zero gives zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high word of a 64 × 64-bit product is below `bound`, so it fits.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_saturates_in_both_directions() {
        assert_eq!(Instant::ZERO.since(Instant::from_nanos(5)), Duration::ZERO);
        assert_eq!(Instant::from_nanos(7) + Duration::MAX, Instant::from_nanos(u64::MAX));
    }

    #[test]
    fn money_prints_exactly() {
        assert_eq!(NanoUsd(-1_500_000_001).to_string(), "-1.500000001");
        assert_eq!(NanoUsd(7).to_string(), "0.000000007");
    }

    #[test]
    fn below_stays_below_and_reaches_every_value() {
        let mut rng = Rng::seeded(1);
        let mut seen = [false; 7];
        for _ in 0..1_000 {
            seen[rng.below(7) as usize] = true;
        }
        assert!(seen.iter().all(|&hit| hit));
        assert_eq!(rng.below(0), 0);
    }
}
