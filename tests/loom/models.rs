//! Goal: what is said of the board's words holds whatever two or three threads do to them at once.
//! Method: loom runs each model in every order of events that the memory model allows; where those
//! are too many, in every order with a few switches between threads that neither asked for.

use std::sync::Arc;
use std::time::Duration;

use forebay_loom::pure::board::{
    Allowance, Budget, Calendar, Dry, Lease, LimitRow, Rate, Registry, Reservoir, Ring, ScopeKind,
    Slot,
};
use forebay_loom::pure::limit::{Accounts, Amount, Per, Scope, Scopes, What, Windows};
use forebay_loom::pure::units::Instant;
use loom::thread;

/// Switches between threads that are forced, in one execution. Three find all that is known to be
/// found with more, and take seconds.
const SWITCHES_MAX: usize = 3;

fn every_order(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(SWITCHES_MAX);
    // A ring walks through its parts one by one.
    builder.max_branches = 20_000;
    builder.check(model);
}

/// Runs both at once, the second on this thread, and gives what they gave.
fn both<A: 'static, B>(one: impl FnOnce() -> A + 'static, two: impl FnOnce() -> B) -> (A, B) {
    let one = thread::spawn(one);
    let two = two();
    (one.join().expect("no panic"), two)
}

/// A window whose parts and units are whole numbers of ticks, so that sums are exact.
fn per_minute(limit: u64) -> Rate {
    Rate::new(limit, Duration::from_secs(60), None, false)
}

/// The moment at which part `part` of a ring's minute begins.
fn part(part: u64) -> Instant {
    Instant::from_nanos(part * 1_000_000_000)
}

const NOW: Instant = Instant::from_nanos(7_000_000_000_000);

// ---- reservoir

#[test]
fn three_at_one_reservoir_get_the_limit_and_never_one_more() {
    every_order(|| {
        let (reservoir, rate) = (Arc::new(Reservoir::default()), per_minute(2));
        let draw = |reservoir: &Arc<Reservoir>| {
            let reservoir = Arc::clone(reservoir);
            move || reservoir.take(&rate, NOW, 1, 1).unwrap_or(0)
        };
        let third = thread::spawn(draw(&reservoir));
        let (one, two) = both(draw(&reservoir), draw(&reservoir));
        assert_eq!(one + two + third.join().expect("no panic"), 2);
        assert_eq!(reservoir.left(&rate, NOW), 0);
    });
}

#[test]
fn what_comes_back_to_a_reservoir_while_others_draw_is_neither_lost_nor_doubled() {
    every_order(|| {
        let (reservoir, rate) = (Arc::new(Reservoir::default()), per_minute(4));
        assert_eq!(reservoir.take(&rate, NOW, 3, 3), Ok(3));
        let (giver, taker) = (Arc::clone(&reservoir), Arc::clone(&reservoir));
        let third = thread::spawn(move || giver.give(&rate, 2));
        let (one, two) = both(
            move || taker.take(&rate, NOW, 2, 2).unwrap_or(0),
            || reservoir.take(&rate, NOW, 1, 3).unwrap_or(0),
        );
        third.join().expect("no panic");
        assert!(one + two <= 3 && one + two > 0);
        assert_eq!(reservoir.left(&rate, NOW), 3 - one - two);
    });
}

#[test]
fn a_debt_made_while_others_draw_is_a_debt() {
    every_order(|| {
        let (reservoir, rate) = (Arc::new(Reservoir::default()), per_minute(4));
        let overrun = Arc::clone(&reservoir);
        let ((), drawn) = both(
            move || overrun.charge(&rate, NOW, 5),
            || reservoir.take(&rate, NOW, 2, 2).unwrap_or(0),
        );
        let used = u32::try_from(5 + drawn).expect("small");
        assert_eq!(reservoir.refills_in(NOW), Duration::from_secs(15) * used);
    });
}

// ---- ring

fn strict(limit: u64) -> Rate {
    Rate::new(limit, Duration::from_secs(60), None, true)
}

/// A ring of which `amount` was drawn in part 1, at the last moment before that is forgotten.
fn ring_with(amount: u64, rate: &Rate) -> Arc<Ring> {
    let ring = Arc::new(Ring::default());
    assert_eq!(ring.take(rate, part(1), amount), Ok(()));
    assert_eq!(ring.left(rate, part(61)), rate.limit() - amount);
    ring
}

#[test]
fn two_that_forget_the_same_part_forget_it_once() {
    every_order(|| {
        let rate = strict(2);
        let ring = ring_with(1, &rate);
        assert_eq!(ring.take(&rate, part(61), 1), Ok(()));
        // The first is older than the window, the second is not.
        let other = Arc::clone(&ring);
        let draw = move |ring: &Ring| u64::from(ring.take(&rate, part(62), 1).is_ok());
        let (one, two) = both(move || draw(&other), || draw(&ring));
        assert!(one + two <= 1);
        assert_eq!(ring.left(&rate, part(62)), 1 - one - two);
    });
}

#[test]
fn a_draw_that_meets_the_next_part_is_counted_for_a_whole_window() {
    every_order(|| {
        let rate = strict(2);
        let ring = ring_with(2, &rate);
        let other = Arc::clone(&ring);
        let (one, two) = both(
            move || u64::from(other.take(&rate, part(62), 1).is_ok()),
            || u64::from(ring.take(&rate, part(63), 2).is_ok()) * 2,
        );
        assert!(one + two <= 2);
        for later in [63, 122] {
            assert!(ring.left(&rate, part(later)) <= 2 - one - two, "{later}");
        }
        // Counted in a part that was its place once, it is forgotten a round later at most.
        assert_eq!(ring.left(&rate, part(200)), 2);
    });
}

/// One comes back to part 1, whose place part 62 forgets and part 63 has by then.
fn comes_back_beside_a_draw_of(number: u64) {
    every_order(move || {
        let rate = strict(3);
        let ring = ring_with(2, &rate);
        let giver = Arc::clone(&ring);
        let ((), drawn) = both(
            move || giver.give(&rate, part(1), 1),
            || u64::from(ring.take(&rate, part(number), 3).is_ok()) * 3,
        );
        assert_eq!(ring.left(&rate, part(number)), 3 - drawn);
    });
}

#[test]
fn what_comes_back_while_its_part_is_forgotten_is_taken_off_once() {
    comes_back_beside_a_draw_of(62);
}

#[test]
fn what_comes_back_late_is_not_taken_off_who_has_its_place_by_then() {
    comes_back_beside_a_draw_of(63);
}

// ---- calendar

#[test]
fn a_calendar_gives_its_limit_and_an_old_window_never_reaches_a_new_one() {
    every_order(|| {
        let calendar = Arc::new(Calendar::default());
        assert!(calendar.take(4, 5, 10));
        // Windows 4 and 6 share a word.
        let (settles, draws) = (Arc::clone(&calendar), Arc::clone(&calendar));
        let third = thread::spawn(move || settles.settle(4, 5, 9));
        let draw = |calendar: &Calendar| u64::from(calendar.take(6, 6, 10)) * 6;
        let (one, two) = both(move || draw(&draws), || draw(&calendar));
        third.join().expect("no panic");
        assert_eq!((one + two, calendar.used(6), calendar.used(4)), (6, 6, 0));
    });
}

#[test]
fn settling_while_others_draw_loses_neither() {
    every_order(|| {
        let calendar = Arc::new(Calendar::default());
        assert!(calendar.take(4, 5, 10));
        let settles = Arc::clone(&calendar);
        let ((), drawn) =
            both(move || settles.settle(4, 5, 2), || u64::from(calendar.take(4, 7, 10)) * 7);
        assert_eq!(calendar.used(4), 2 + drawn);
    });
}

fn scope(row: &Arc<LimitRow>) -> Scope {
    Scope::unlimited(Arc::clone(row))
}

#[test]
fn what_a_request_has_reserved_is_seen_by_the_next_commit_or_the_one_behind_it() {
    every_order(|| {
        let windows = Windows::at(1_796_083_200, NOW);
        let row = Arc::new(LimitRow::new(ScopeKind::Tenant, "a"));
        let scope = Scope { day: Some(100), ..scope(&row) };
        let ask = Amount { input: 3, output: 4, nano: 0 };
        let day = windows.number(Per::Day);
        let accounts = || Accounts::new(1);
        let take = move || Scopes::of(&scope).take(ask, NOW, &windows, &mut accounts());
        let commit = |row: &LimitRow| row.was_touched().then(|| row.calendars[0].used(day));
        let (taken, written) = both(move || take().is_ok(), || commit(&row));
        assert!(taken);
        let written = commit(&row).or(written);
        assert_eq!(written, Some(7));
    });
}

// ---- accounts

#[test]
fn what_two_shards_lease_at_once_is_what_they_use_and_give_back() {
    every_order(|| {
        let row = Arc::new(LimitRow::new(ScopeKind::Tenant, "a"));
        let rate = per_minute(6_000_000);
        let (one, two) = (Arc::clone(&row), Arc::clone(&row));
        let shard = move |row: &Arc<LimitRow>| {
            let scope = Scope { requests: Some(rate), ..scope(row) };
            let mut accounts = Accounts::new(2);
            let (ask, windows) = (Amount::default(), Windows::default());
            let taken = Scopes::of(&scope).take(ask, NOW, &windows, &mut accounts);
            // Half of 20 ms, and nothing of it was used but one.
            assert!(taken.is_ok());
            assert_eq!(accounts.held(row, What::Requests, &rate), 1_000);
        };
        both(move || shard(&one), move || shard(&two));
        assert_eq!(row.requests.left(&rate, NOW), rate.limit() - 2);
        assert_eq!(row.concurrency.now(), 2);
    });
}

// ---- slots and holds

#[test]
fn slots_are_never_more_than_the_limit_and_all_come_back() {
    every_order(|| {
        let row = Registry::new().backend("b").expect("room");
        let work = |row: &Arc<_>| {
            let row = Arc::clone(row);
            move || Slot::take(&row, Some(1)).map(|slot| assert_eq!(slot.row().in_flight(), 1))
        };
        let third = thread::spawn(work(&row));
        let (one, two) = both(work(&row), work(&row));
        let third = third.join().expect("no panic");
        assert!(one.or(two).or(third).is_some());
        assert_eq!(row.in_flight(), 0);
    });
}

#[test]
fn holds_that_grow_and_shrink_stay_within_the_limit_and_come_back() {
    every_order(|| {
        let budget = Arc::<Budget>::default();
        let other = Arc::clone(&budget);
        let work = |budget: &Arc<Budget>| {
            let mut hold = budget.take(4, 10)?;
            hold.grow(4, 10);
            assert!(budget.held() <= 10 && budget.held() >= hold.amount());
            hold.shrink_to(3);
            Some(hold.amount())
        };
        let (one, two) = both(move || work(&other), || work(&budget));
        // Both at once are too many while one is at its largest.
        assert!(one.or(two) == Some(3) && budget.held() == 0);
    });
}

// ---- leases

#[test]
fn what_the_fleet_gave_is_spent_held_or_returned() {
    every_order(|| {
        let lease = Arc::new(Lease::default());
        lease.given(3, 0, None);
        let (asks, settles) = (Arc::clone(&lease), Arc::clone(&lease));
        // The thread that asks takes back what lies idle and brings more; two requests spend.
        let third = thread::spawn(move || {
            let back = asks.recall(2);
            asks.given(1, 0, None);
            back
        });
        let (one, two) = both(
            move || match settles.take(NOW, 2) {
                Ok(()) => {
                    settles.settle(2, 1);
                    1
                }
                Err(_) => 0,
            },
            || lease.take(NOW, 2).map_or(0, |()| 2),
        );
        let back = third.join().expect("no panic");
        let held = u64::try_from(lease.credit()).expect("nobody overran");
        assert_eq!(one + two + back + held, 4);
        assert!(one + two <= lease.spent());
    });
}

#[test]
fn who_is_told_that_the_fleet_is_asked_has_been_heard() {
    every_order(|| {
        let lease = Arc::new(Lease::default());
        let asks = Arc::clone(&lease);
        let (wanted, drawn) = both(
            move || {
                let wanted = asks.wanted();
                asks.given(1, 0, None);
                wanted
            },
            || lease.take(NOW, 2),
        );
        assert_eq!(drawn, Err(Dry::Asked));
        assert_eq!(wanted.max(lease.wanted()), 2);
    });
}

#[test]
fn what_is_allowed_of_a_window_is_never_taken_for_the_allowance_of_another() {
    every_order(|| {
        let (calendar, allowance) = (Arc::new(Calendar::default()), Arc::new(Allowance::default()));
        allowance.set(true);
        allowance.begin(4, 0);
        allowance.given(4, 3, None);
        let (counts, allowed) = (Arc::clone(&calendar), Arc::clone(&allowance));
        let (old, ()) = both(
            move || counts.take(4, 9, allowed.limit(4, 100)),
            || {
                allowance.begin(5, calendar.used(5));
                allowance.given(5, 50, None);
            },
        );
        assert!(!old, "9 of 3");
        assert_eq!(allowance.limit(5, 100), 50);
    });
}

#[test]
fn a_window_that_begins_is_not_taken_for_spent_because_the_last_one_was() {
    every_order(|| {
        let allowance = Arc::new(Allowance::default());
        allowance.set(true);
        allowance.begin(4, 0);
        allowance.given(4, 0, Some(1));
        let looks = Arc::clone(&allowance);
        let (gone, ()) = both(move || looks.is_gone(5), || allowance.begin(5, 0));
        assert!(!gone && !allowance.is_gone(5));
    });
}
