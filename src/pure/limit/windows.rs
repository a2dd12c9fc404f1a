//! Days, weeks and months, by the wall clock that control follows.

use std::time::Duration;

use crate::pure::units::Instant;

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
        let (year, month) = civil(day);
        let month = year * 12 + month - 1;
        let month_end = days_before(month / 12 + u64::from(month % 12 == 11), (month + 1) % 12 + 1);
        let end = |day: u64| now + Duration::from_secs((day * DAY).saturating_sub(unix));
        Windows {
            numbers: [day, week, month],
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

/// Year and month (1 to 12) of a day since 1970-01-01 (after Howard Hinnant's `civil_from_days`).
fn civil(day: u64) -> (u64, u64) {
    let shifted = day + 719_468;
    let era = shifted / 146_097;
    let of_era = shifted % 146_097;
    let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (year + era * 400 + u64::from(month <= 2), month)
}

/// The day since 1970-01-01 on which this month begins.
fn days_before(year: u64, month: u64) -> u64 {
    let year = year - u64::from(month <= 2);
    let era = year / 400;
    let of_era = year % 400;
    let shifted = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * shifted + 2) / 5;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}
