//! Against models that remember every draw, with seeded histories, and over real threads.

use std::num::NonZeroU32;
use std::sync::atomic::AtomicU64;
use std::thread;

use governor::clock::{Clock as _, FakeRelativeClock};
use governor::{Quota, RateLimiter};

use super::*;
use crate::pure::units::Rng;

const MINUTE: Duration = Duration::from_secs(60);

fn at(nanos: u64) -> Instant {
    // Any start: the clock of a machine that has been up for a while.
    Instant::from_nanos(77_000_000_000_000 + nanos)
}

fn per_minute(limit: u64) -> Rate {
    Rate::new(limit, MINUTE, None, false)
}

fn would_fit(reservoir: &Reservoir, rate: &Rate, nanos: u64, amount: u64) -> bool {
    let full_at = reservoir.full_at.load(Ordering::Relaxed);
    fits(rate, fine(at(nanos)), full_at, amount, amount).is_ok()
}

#[test]
fn a_burst_gets_the_limit_and_never_one_more() {
    for limit in (1..=300).chain([999, 1_000, 6_007, 99_991, 100_000, 1_000_003]) {
        let (reservoir, rate) = (Reservoir::default(), per_minute(limit));
        for _ in 0..limit {
            assert_eq!(reservoir.take(&rate, at(0), 1, 1), Ok(1), "{limit}");
        }
        assert!(reservoir.take(&rate, at(0), 1, 1).is_err(), "{limit}");
        assert_eq!(reservoir.left(&rate, at(0)), 0);
        // One more when one has flowed in, and not a nanosecond before.
        let one = 60_000_000_000_u64.div_ceil(limit);
        assert!(reservoir.take(&rate, at(one - 1), 1, 1).is_err(), "{limit}");
        assert_eq!(reservoir.take(&rate, at(one + 1), 1, 1), Ok(1), "{limit}");
    }
}

#[test]
fn threads_together_get_the_limit_and_never_one_more() {
    for threads in [1, 2, 8] {
        let (reservoir, rate) = (Reservoir::default(), per_minute(100));
        let taken = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    for _ in 0..10_000 / threads {
                        let got = reservoir.take(&rate, at(0), 1, 1).unwrap_or(0);
                        taken.fetch_add(got, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(taken.into_inner(), 100);
    }
}

#[test]
fn over_any_span_no_more_than_burst_and_what_flows_in() {
    for seed in 0..200 {
        let mut rng = Rng::seeded(seed);
        let limit = 1 + rng.below(100_000);
        let burst = (rng.below(3) == 0).then(|| 1 + rng.below(limit));
        let (reservoir, rate) = (Reservoir::default(), Rate::new(limit, MINUTE, burst, false));
        let mut now = 0;
        let mut draws: Vec<(u64, u64)> = Vec::new();
        for _ in 0..400 {
            now += rng.below(2_000_000_000) * rng.below(2);
            let most = 1 + rng.below(rate.most());
            if let Ok(got) = reservoir.take(&rate, at(now), 1 + rng.below(most), most) {
                draws.push((now, got));
            }
        }
        assert!(!draws.is_empty());
        for (first, &(from, _)) in draws.iter().enumerate() {
            let mut sum = 0;
            for &(to, got) in &draws[first..] {
                sum += got;
                let inflow = u128::from(to - from) * u128::from(limit) / 60_000_000_000;
                let bound = u128::from(rate.most()) + inflow + 1;
                assert!(u128::from(sum) <= bound, "seed {seed}: {sum} in {} ns", to - from);
            }
        }
    }
}

#[test]
fn a_legal_steady_load_is_never_refused() {
    for limit in [60, 600, 6_000, 1_000_003] {
        let (reservoir, rate) = (Reservoir::default(), Rate::new(limit, MINUTE, Some(1), false));
        let step = 60_000_000_000 * 100 / (limit * 95) + 1;
        for n in 0..10_000 {
            assert_eq!(reservoir.take(&rate, at(n * step), 1, 1), Ok(1), "{limit}: draw {n}");
        }
    }
}

#[test]
fn what_is_said_to_be_waited_for_is_there_after_the_wait_and_not_before() {
    for seed in 0..500 {
        let mut rng = Rng::seeded(seed);
        let (reservoir, rate) = (Reservoir::default(), per_minute(1 + rng.below(1_000_000)));
        let mut now = 0;
        for _ in 0..50 {
            let amount = 1 + rng.below(rate.limit());
            match reservoir.take(&rate, at(now), amount, amount) {
                Ok(got) => assert_eq!(got, amount),
                Err(Dry::Never | Dry::Asked) => panic!("it fits"),
                Err(Dry::For(wait)) => {
                    assert!(wait <= MINUTE, "never longer than a window: {wait:?}");
                    let wait = wait.as_nanos() as u64;
                    assert!(!would_fit(&reservoir, &rate, now + wait - 1, amount));
                    assert!(would_fit(&reservoir, &rate, now + wait, amount), "seed {seed}");
                    now += wait;
                }
            }
            now += rng.below(1_000_000_000);
        }
        let never = reservoir.take(&rate, at(now), rate.limit() + 1, rate.limit() + 1);
        assert_eq!(never, Err(Dry::Never));
    }
}

#[test]
fn what_comes_back_can_be_drawn_again_and_creates_nothing() {
    for seed in 0..200 {
        let mut rng = Rng::seeded(seed);
        let (reservoir, rate) = (Reservoir::default(), per_minute(1 + rng.below(1_000_000)));
        for _ in 0..200 {
            let amount = 1 + rng.below(rate.limit());
            assert_eq!(reservoir.take(&rate, at(0), amount, amount), Ok(amount));
            reservoir.give(&rate, amount);
        }
        // Rounding has cost at most a sixteenth of a nanosecond for each.
        let left = reservoir.left(&rate, at(0));
        assert!(left <= rate.limit() && left + 1 >= rate.limit(), "{left} of {}", rate.limit());
    }
}

#[test]
fn an_overrun_is_waited_out_and_no_longer_than_a_window_beyond() {
    let (reservoir, rate) = (Reservoir::default(), per_minute(1_000));
    reservoir.charge(&rate, at(0), 1_500);
    assert_eq!(reservoir.left(&rate, at(0)), 0);
    // 500 of debt and one to draw: 30.06 s.
    let Err(Dry::For(wait)) = reservoir.take(&rate, at(0), 1, 1) else { panic!("a debt") };
    assert!((wait.as_secs_f64() - 30.06).abs() < 0.001, "{wait:?}");
    for amount in [u64::MAX, u64::MAX / 2, 1 << 40] {
        reservoir.charge(&rate, at(0), amount);
    }
    let Err(Dry::For(wait)) = reservoir.take(&rate, at(0), 1, 1) else { panic!("a debt") };
    assert!(wait <= MINUTE + Duration::from_millis(61), "{wait:?}");
    assert!(reservoir.take(&rate, at(120_100_000_000), 1, 1).is_ok());
}

#[test]
fn a_changed_limit_keeps_the_share_that_is_used() {
    let (reservoir, small, large) = (Reservoir::default(), per_minute(100), per_minute(10_000));
    assert_eq!(reservoir.take(&small, at(0), 75, 75), Ok(75));
    assert_eq!(reservoir.left(&large, at(0)), 2_500);
    assert_eq!(reservoir.take(&large, at(0), 1, u64::MAX), Ok(2_500));
    assert_eq!(reservoir.left(&small, at(0)), 0);
}

#[test]
fn nothing_and_no_limit_at_all_are_told_apart() {
    let (reservoir, nothing) = (Reservoir::default(), per_minute(0));
    assert_eq!(reservoir.take(&nothing, at(0), 1, 1), Err(Dry::Never));
    assert_eq!(reservoir.left(&nothing, at(0)), 0);
    let huge = per_minute(u64::MAX);
    assert_eq!(reservoir.take(&huge, at(0), 1 << 60, 1 << 60), Ok(1 << 60));
    reservoir.give(&huge, u64::MAX);
    reservoir.charge(&huge, at(0), u64::MAX);
}

// ---- the ring

#[test]
fn a_strict_limit_holds_in_every_window() {
    for seed in 0..300 {
        let mut rng = Rng::seeded(seed);
        let limit = 1 + rng.below(1_000);
        let (ring, rate) = (Ring::default(), Rate::new(limit, MINUTE, None, true));
        let mut now = 0;
        let mut draws: Vec<(u64, u64)> = Vec::new();
        for _ in 0..600 {
            now += match rng.below(20) {
                0 => rng.below(200_000_000_000),
                1..=9 => 0,
                _ => rng.below(1_500_000_000),
            };
            let most = 1 + rng.below(limit);
            let amount = 1 + rng.below(most);
            match ring.take(&rate, at(now), amount) {
                Ok(()) if rng.below(4) == 0 => ring.give(&rate, at(now), amount),
                Ok(()) => draws.push((now, amount)),
                Err(_) if rng.below(50) == 0 && !draws.is_empty() => {
                    // What a long request did not use comes back late.
                    let pick = rng.below(draws.len() as u64) as usize;
                    let (drawn, amount) = draws.swap_remove(pick);
                    ring.give(&rate, at(drawn), amount);
                }
                Err(_) => {}
            }
            let within = |from: &&(u64, u64)| from.0 + 60_000_000_000 > now;
            let sum: u64 = draws.iter().filter(within).map(|draw| draw.1).sum();
            assert!(sum <= limit, "seed {seed}: {sum} of {limit}");
            assert!(ring.left(&rate, at(now)) <= limit - sum);
        }
        // All of it is forgotten one window and one part later.
        assert_eq!(ring.left(&rate, at(now + 61_000_000_000)), limit, "seed {seed}");
    }
}

#[test]
fn a_strict_limit_says_how_long_to_wait() {
    for seed in 0..200 {
        let mut rng = Rng::seeded(seed);
        let limit = 1 + rng.below(100);
        let (ring, rate) = (Ring::default(), Rate::new(limit, MINUTE, None, true));
        let mut now = 0;
        for _ in 0..100 {
            let amount = 1 + rng.below(limit);
            if let Err(dry) = ring.take(&rate, at(now), amount) {
                let Dry::For(wait) = dry else { panic!("it fits") };
                assert!(wait <= MINUTE + Duration::from_secs(1));
                now += wait.as_nanos() as u64;
                assert!(ring.take(&rate, at(now), amount).is_ok(), "seed {seed}");
            }
            now += rng.below(3_000_000_000);
        }
    }
}

/// All begin at once behind a long silence: whoever forgets the old must not forget the new.
#[test]
fn threads_that_wake_up_together_never_pass_a_strict_limit() {
    let rate = Rate::new(40, MINUTE, None, true);
    for round in 0..400 {
        let ring = Ring::default();
        for silence in [0, 500] {
            let taken = AtomicU64::new(0);
            let gate = std::sync::Barrier::new(4);
            thread::scope(|scope| {
                for thread in 0..4 {
                    let (ring, rate, taken, gate) = (&ring, &rate, &taken, &gate);
                    scope.spawn(move || {
                        gate.wait();
                        for n in 0..20 {
                            let now = at(silence * 1_000_000_000 + thread * 700_000 + n);
                            let got = u64::from(ring.take(rate, now, 1).is_ok());
                            taken.fetch_add(got, Ordering::Relaxed);
                        }
                    });
                }
            });
            // Until the old is forgotten some may have been refused; what is left is there now.
            let now = at(silence * 1_000_000_000 + 3_000_000);
            let rest =
                std::iter::repeat_with(|| ring.take(&rate, now, 1)).take_while(Result::is_ok);
            let rest = rest.count() as u64;
            assert_eq!(taken.into_inner() + rest, 40, "round {round} after {silence} s");
        }
    }
}

#[test]
fn threads_together_never_pass_a_strict_limit() {
    let (ring, rate) = (Ring::default(), Rate::new(1_000, MINUTE, None, true));
    let taken = AtomicU64::new(0);
    thread::scope(|scope| {
        for thread in 0..4 {
            let (ring, rate, taken) = (&ring, &rate, &taken);
            scope.spawn(move || {
                // Each thread's clock is a little off, as shards' clocks are.
                for n in 0..5_000_u64 {
                    let now = at(n * 5_000_000 + thread * 700_000);
                    taken.fetch_add(u64::from(ring.take(rate, now, 1).is_ok()), Ordering::Relaxed);
                }
            });
        }
    });
    // 25 seconds: nothing has been forgotten yet.
    assert_eq!(taken.into_inner(), 1_000);
}

// ---- the calendar

#[test]
fn a_window_begins_empty_and_its_predecessor_stays_for_a_while() {
    let calendar = Calendar::default();
    assert!(calendar.take(20_788, 60, 100));
    assert!(!calendar.take(20_788, 41, 100), "beyond the limit");
    assert!(calendar.take(20_789, 100, 100), "tomorrow");
    assert_eq!((calendar.used(20_788), calendar.used(20_789)), (60, 100));
    // A request that was reserved yesterday is settled in yesterday.
    calendar.settle(20_788, 60, 75);
    assert_eq!((calendar.used(20_788), calendar.used(20_789)), (75, 100));
    assert!(calendar.take(20_790, 5, 100));
    assert_eq!((calendar.used(20_788), calendar.used(20_790)), (0, 5));
    // Two days late: its window is gone, and today's is not touched.
    calendar.settle(20_788, 60, 1_000);
    assert_eq!(calendar.used(20_790), 5);
    calendar.restore(20_790, 33);
    assert_eq!(calendar.used(20_790), 33);
    calendar.settle(20_790, 40, u64::MAX);
    assert_eq!(calendar.used(20_790), AMOUNT_MAX);
}

#[test]
fn windows_that_were_never_used_are_empty() {
    for id in [0, 1, 2, 127, 128, 255, 256, 20_788, 1 << 40] {
        let calendar = Calendar::default();
        assert_eq!(calendar.used(id), 0);
        assert!(calendar.take(id, 1, 1));
        assert_eq!(calendar.used(id), 1);
    }
}

/// The same requests to governor's GCRA and to ours, at the same moments, with what each has to say.
fn beside_governor(seed: u64, limit: u32, window: Duration) {
    let mut rng = Rng::seeded(seed);
    let burst = NonZeroU32::new(1 + rng.below(u64::from(limit)) as u32).expect("one and more");
    let quota = Quota::per_minute(NonZeroU32::new(limit).expect("not none")).allow_burst(burst);
    let clock = FakeRelativeClock::default();
    let theirs = RateLimiter::direct_with_clock(quota, clock.clone());
    let burst = u64::from(burst.get());
    let (ours, rate) =
        (Reservoir::default(), Rate::new(u64::from(limit), window, Some(burst), false));
    let one = 60_000_000_000 / u64::from(limit);
    let mut now = 0;
    for _ in 0..400 {
        let span = match rng.below(4) {
            0 => 0,
            // To the moment at which something just fits, or just does not.
            1 => one * (1 + rng.below(3)) - rng.below(2),
            2 => rng.below(one * 2),
            _ => rng.below(one * burst * 2),
        };
        now += span;
        clock.advance(Duration::from_nanos(span));
        // A third is small, so that some are admitted behind a refusal.
        let most = if rng.below(3) == 0 { 1 + burst / 10 } else { burst + 1 };
        let amount = 1 + rng.below(most);
        let units = NonZeroU32::new(amount as u32).expect("one and more");
        let wanted = match theirs.check_n(units) {
            Ok(Ok(())) => Ok(amount),
            Ok(Err(not_until)) => Err(Dry::For(not_until.wait_time_from(clock.now()))),
            Err(_) => Err(Dry::Never),
        };
        let got = ours.take(&rate, at(now), amount, amount);
        assert_eq!(got, wanted, "seed {seed}: {amount} of {burst}, {limit} a minute, at {now} ns");
    }
}

#[test]
fn governor_decides_the_same_and_names_the_same_wait() {
    // Where a unit takes a whole number of nanoseconds nothing is rounded, by either.
    let divides = |limit: &u32| 60_000_000_000 % u64::from(*limit) == 0;
    let limits: Vec<u32> = (1..=2_000).chain([1_000_000, 60_000_000]).filter(divides).collect();
    for (seed, &limit) in (0..).zip(limits.iter().cycle().take(1_000)) {
        beside_governor(seed, limit, MINUTE);
    }
}

#[test]
fn where_a_unit_takes_no_whole_nanoseconds_governors_minute_is_shorter_by_that() {
    // Governor keeps the time that one unit takes in whole nanoseconds, rounded down: of 7 a minute
    // it gives 7 in 59.999999997 s. We round each draw up, in sixteenths, and give 7 in 60 s. By its
    // minute we decide as it does.
    for seed in 0..1_000 {
        let limit = 1 + Rng::seeded(seed).below(1_000_000);
        let minute = Duration::from_nanos(60_000_000_000 / limit * limit);
        beside_governor(seed, limit as u32, minute);
    }
    let reservoir = Reservoir::default();
    assert_eq!(reservoir.take(&per_minute(7), at(0), 7, 7), Ok(7));
    assert!(!would_fit(&reservoir, &per_minute(7), 59_999_999_999, 7));
    assert!(would_fit(&reservoir, &per_minute(7), 60_000_000_000, 7));
}
