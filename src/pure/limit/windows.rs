//! Days, weeks and months, by the wall clock that control follows.

use std::time::Duration;

use crate::pure::units::{Instant, civil};

/// A calendar window in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Per {
    Day,
    /// From Monday on.
    Week,
    Month,
    /// Since the beginning.
    Total,
}

impl Per {
    pub const ALL: [Per; 4] = [Per::Day, Per::Week, Per::Month, Per::Total];
}

/// The calendar windows that it is now, and when each ends. Numbers never go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Windows {
    numbers: [u64; 3],
    ends: [Instant; 3],
}

impl Windows {
    /// By a wall clock that shows `unix` (seconds since 1970, UTC) at `now`.
    pub fn at(unix: u64, now: Instant) -> Windows {
        const DAY: u64 = 86_400;
        let day = unix / DAY;
        // 1970-01-01 was a Thursday: Mondays are the days d with (d + 3) % 7 == 0.
        let week = (day + 3) / 7;
        let (year, month, _) = civil(day);
        let month_end = (day + 1..).find(|&later| civil(later).1 != month).unwrap_or(day + 1);
        let end = |day: u64| now + Duration::from_secs((day * DAY).saturating_sub(unix));
        Windows {
            numbers: [day, week, year * 12 + month - 1],
            ends: [end(day + 1), end((week + 1) * 7 - 3), end(month_end)],
        }
    }

    /// The number of the window that it is now.
    pub fn number(&self, per: Per) -> u64 {
        match per {
            Per::Day => self.numbers[0],
            Per::Week => self.numbers[1],
            Per::Month => self.numbers[2],
            Per::Total => 0,
        }
    }

    /// Until the window ends; `None` if it never does.
    pub fn left(&self, per: Per, now: Instant) -> Option<Duration> {
        match per {
            Per::Day => Some(self.ends[0].since(now)),
            Per::Week => Some(self.ends[1].since(now)),
            Per::Month => Some(self.ends[2].since(now)),
            Per::Total => None,
        }
    }

    /// Whether another window has begun, or ends at another moment by more than clocks jitter.
    pub fn differ(&self, other: &Windows) -> bool {
        let apart = |(a, b): (&Instant, &Instant)| a.since(*b).max(b.since(*a)).as_secs() >= 2;
        self.numbers != other.numbers || self.ends.iter().zip(&other.ends).any(apart)
    }

    /// The later of both, window by window: a wall clock that is set back repeats no window.
    pub fn not_before(self, earlier: Windows) -> Windows {
        let mut later = self;
        for (index, &number) in earlier.numbers.iter().enumerate() {
            if number > later.numbers[index] {
                later.numbers[index] = number;
                later.ends[index] = earlier.ends[index];
            }
        }
        later
    }
}
