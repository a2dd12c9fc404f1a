//! Seeded worlds of requests against limits at every level, checked against a book that remembers
//! each of them.

use super::*;
use crate::pure::units::Rng;

const MINUTE: Duration = Duration::from_secs(60);

fn at(nanos: u64) -> Instant {
    Instant::from_nanos(5_000_000_000_000 + nanos)
}

fn scope(kind: ScopeKind) -> Scope {
    Scope::unlimited(Arc::new(LimitRow::new(kind, "")))
}

fn is_limited(scope: &Scope) -> bool {
    scope.requests.is_some()
        || scope.tokens.is_some()
        || scope.output.is_some()
        || scope.concurrency.is_some()
        || scope.day.is_some()
        || scope.budget.is_some()
}

fn rate(limit: u64) -> Option<Rate> {
    Some(Rate::new(limit, MINUTE, None, false))
}

fn tokens(input: u64, output: u64) -> Amount {
    Amount { input, output, nano: 0 }
}

fn windows() -> Windows {
    Windows::at(1_796_083_200, at(0))
}

fn of<'p>(scopes: &[&'p Scope]) -> Scopes<'p> {
    let mut list = [None; SCOPES];
    for (place, scope) in list.iter_mut().zip(scopes) {
        *place = Some(*scope);
    }
    Scopes::new(list)
}

#[test]
fn windows_are_those_of_the_calendar() {
    // Each as `date -u` says: seconds, then seconds to the end of the day, the week, the month.
    for (unix, day, week, month) in [
        (0, 86_400, 4 * 86_400, 31 * 86_400),
        // Sunday 2024-02-25 12:00:00, a leap year.
        (1_708_862_400, 43_200, 43_200, 4 * 86_400 + 43_200),
        // Tuesday 2024-12-31 23:59:59.
        (1_735_689_599, 1, 5 * 86_400 + 1, 1),
        // Monday 2026-11-30 00:00:00.
        (1_795_996_800, 86_400, 7 * 86_400, 86_400),
        // Thursday 2100-02-28 00:00:00, no leap year. (The week ends on Sunday night.)
        (4_107_456_000, 86_400, 86_400, 86_400),
    ] {
        let windows = Windows::at(unix, at(7));
        let left = |per| windows.left(per, at(7)).map(|left| left.as_secs());
        assert_eq!(left(Per::Day), Some(day), "{unix}");
        assert_eq!(left(Per::Week), Some(week), "{unix}");
        assert_eq!(left(Per::Month), Some(month), "{unix}");
        assert_eq!(left(Per::Total), None);
        for (per, span) in [(Per::Day, day), (Per::Week, week), (Per::Month, month)] {
            let before = Windows::at(unix + span - 1, at(0)).number(per);
            let after = Windows::at(unix + span, at(0)).number(per);
            assert_eq!((before, after), (windows.number(per), windows.number(per) + 1), "{unix}");
        }
    }
}

#[test]
fn a_clock_that_is_set_back_repeats_no_window() {
    let today = Windows::at(1_796_083_200, at(0));
    let yesterday = Windows::at(1_796_083_200 - 86_400 * 40, at(1));
    let kept = yesterday.not_before(today);
    for per in [Per::Day, Per::Week, Per::Month] {
        assert_eq!(kept.number(per), today.number(per));
    }
    assert_eq!(today.not_before(yesterday), today);
}

#[test]
fn all_limits_allow_it_or_nothing_is_taken() {
    let key = Scope { requests: rate(5), ..scope(ScopeKind::Key) };
    let tenant = Scope { tokens: rate(100), concurrency: Some(3), ..scope(ScopeKind::Tenant) };
    let global = Scope { requests: rate(1_000), ..scope(ScopeKind::Global) };
    let scopes = of(&[&key, &tenant, &global]);
    let mut accounts = Accounts::new(1);
    let first = scopes.take(tokens(40, 20), at(0), &windows(), &mut accounts).expect("fits");
    let denied = scopes
        .take(tokens(40, 20), at(0), &windows(), &mut accounts)
        .expect_err("60 of 100 are gone");
    assert_eq!((denied.what, denied.whose, denied.limit), (What::Tokens, ScopeKind::Tenant, 100));
    assert!(matches!(denied.dry, Dry::For(wait) if wait == Duration::from_secs(12)));
    let quotas = scopes.quotas(at(0), &accounts);
    assert_eq!(quotas.requests.map(|quota| (quota.limit, quota.left)), Some((5, 4)));
    assert_eq!(quotas.tokens.map(|quota| (quota.limit, quota.left)), Some((100, 40)));
    assert_eq!(tenant.row.concurrency.now(), 1);
    // It used less than it had reserved.
    scopes.settle(&first, tokens(40, 0), at(0), &mut accounts);
    assert_eq!(scopes.quotas(at(0), &accounts).tokens.map(|quota| quota.left), Some(60));
    assert_eq!(tenant.row.concurrency.now(), 0);
    scopes.take(tokens(40, 20), at(0), &windows(), &mut accounts).expect("fits again");
    let never =
        scopes.take(tokens(100, 1), at(0), &windows(), &mut accounts).expect_err("can never fit");
    assert_eq!(never.dry, Dry::Never);
}

#[test]
fn who_reserves_nothing_is_refused_while_in_debt() {
    let tenant = Scope { tokens: rate(100), ..scope(ScopeKind::Tenant) };
    let scopes = of(&[&tenant]);
    let mut accounts = Accounts::new(1);
    let grant = scopes.take(tokens(0, 0), at(0), &windows(), &mut accounts).expect("there is some");
    scopes.settle(&grant, tokens(50, 100), at(0), &mut accounts);
    let denied =
        scopes.take(tokens(0, 0), at(0), &windows(), &mut accounts).expect_err("a debt of 50");
    let Dry::For(wait) = denied.dry else { panic!("for a while") };
    assert!((wait.as_secs_f64() - 30.6).abs() < 0.01, "{wait:?}");
    assert!(scopes.take(tokens(0, 0), at(31_000_000_000), &windows(), &mut accounts).is_ok());
}

#[test]
fn a_budget_that_is_spent_refuses_and_a_soft_one_counts_on() {
    let cap = Cap { nano: Some(1_000), tokens: None, per: Per::Day, soft: false, cut: false };
    let hard = Scope { budget: Some(cap), ..scope(ScopeKind::Tenant) };
    let scopes = of(&[&hard]);
    let mut accounts = Accounts::new(1);
    let ask = Amount { input: 10, output: 10, nano: 600 };
    let grant = scopes.take(ask, at(0), &windows(), &mut accounts).expect("fits");
    assert!(!hard.is_spent(&windows()));
    let denied = scopes.take(ask, at(0), &windows(), &mut accounts).expect_err("1,200 of 1,000");
    assert_eq!(denied.what, What::Budget);
    assert_eq!(denied.dry, Dry::For(Duration::from_secs(86_400)));
    // It cost more than anybody thought: charged all the same.
    scopes.settle(&grant, Amount { nano: 1_700, ..ask }, at(0), &mut accounts);
    assert!(hard.is_spent(&windows()));
    assert!(
        scopes.take(Amount::default(), at(0), &windows(), &mut accounts).is_err(),
        "also what is free"
    );
    assert_eq!(hard.row.calendars[money(Per::Day)].used(windows().number(Per::Day)), 1_700);
    let tomorrow = Windows::at(1_796_083_200 + 86_400, at(0));
    assert!(scopes.take(ask, at(0), &tomorrow, &mut accounts).is_ok());

    let soft = Scope { budget: Some(Cap { soft: true, ..cap }), ..hard.clone() };
    assert!(of(&[&soft]).take(ask, at(0), &windows(), &mut accounts).is_ok());
    assert_eq!(hard.row.calendars[money(Per::Day)].used(windows().number(Per::Day)), 2_300);
}

/// Between looking and taking another shard may be faster. What was taken by then must come back, of
/// the scope that refused and of those before it.
#[test]
fn who_loses_a_race_leaves_nothing_behind() {
    let loose = Scope { requests: rate(1_000_000_000), ..scope(ScopeKind::Key) };
    let tight = Scope {
        requests: rate(1_000_000_000),
        tokens: rate(60_000_000_000),
        output: rate(10),
        day: Some(u64::MAX >> 10),
        ..scope(ScopeKind::Tenant)
    };
    let narrow = Scope { concurrency: Some(2), ..scope(ScopeKind::Global) };
    let mut races = 0;
    for _ in 0..20 {
        std::thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    let scopes = of(&[&loose, &tight, &narrow]);
                    let mut accounts = Accounts::new(4);
                    for _ in 0..3_000 {
                        if let Ok(grant) =
                            scopes.take(tokens(5, 10), at(0), &windows(), &mut accounts)
                        {
                            scopes.cancel(&grant, at(0), &mut accounts);
                        }
                    }
                });
            }
        });
        races += 1;
        let left = |resource: &Resource, rate: &Option<Rate>| {
            rate.as_ref().map(|rate| rate.limit() - resource.left(rate, at(0)))
        };
        assert_eq!(left(&loose.row.requests, &loose.requests), Some(0), "after {races}");
        assert_eq!(left(&tight.row.requests, &tight.requests), Some(0), "after {races}");
        assert_eq!(left(&tight.row.tokens, &tight.tokens), Some(0), "after {races}");
        assert_eq!(tight.row.calendars[DAY].used(windows().number(Per::Day)), 0);
        assert_eq!([&loose, &tight, &narrow].map(|scope| scope.row.concurrency.now()), [0; 3]);
    }
}

/// The law: what is drawn is what was used by those that have ended plus what those hold that have
/// not, in every scope, after every step.
#[test]
fn what_is_drawn_is_what_was_used_and_what_is_held() {
    for seed in 0..300 {
        let mut rng = Rng::seeded(seed);
        let strict = rng.below(3) == 0;
        let make = |kind, rng: &mut Rng| Scope {
            requests: (rng.below(2) == 0)
                .then(|| Rate::new(20 + rng.below(50), MINUTE, None, strict)),
            tokens: (rng.below(2) == 0)
                .then(|| Rate::new(2_000 + rng.below(5_000), MINUTE, None, strict)),
            output: (rng.below(3) == 0)
                .then(|| Rate::new(1_000 + rng.below(3_000), MINUTE, None, strict)),
            concurrency: (rng.below(2) == 0).then(|| 1 + rng.below(8) as u32),
            day: (rng.below(2) == 0).then(|| 3_000 + rng.below(9_000)),
            budget: (rng.below(2) == 0)
                .then(|| Cap {
                    nano: Some(10_000 + rng.below(90_000)),
                    tokens: None,
                    per: Per::Month,
                    soft: false,
                    cut: rng.below(2) == 0,
                })
                .map(|cap| Cap { soft: !cap.cut && rng.below(3) == 0, ..cap }),
            ..scope(kind)
        };
        let all = [ScopeKind::Key, ScopeKind::Tenant, ScopeKind::Route, ScopeKind::Global]
            .map(|kind| make(kind, &mut rng));
        let scopes = of(&all.each_ref());
        let mut accounts = Accounts::new(1);
        let mut open: Vec<Grant> = Vec::new();
        let (mut used, mut served) = (Amount::default(), 0);
        let (mut refused, windows) = (0, windows());
        // At one moment, so that nothing flows in and the book is exact.
        let now = at(0);
        for _ in 0..200 {
            if rng.below(5) < 3 {
                let ask = Amount {
                    input: rng.below(300),
                    output: rng.below(300),
                    nano: rng.below(3_000),
                };
                match scopes.take(ask, now, &windows, &mut accounts) {
                    Ok(grant) => open.push(grant),
                    Err(_) => refused += 1,
                }
            } else if !open.is_empty() {
                let grant = open.swap_remove(rng.below(open.len() as u64) as usize);
                // Never beyond what was reserved: a debt is deeper than the book can say.
                let share = |amount: u64, rng: &mut Rng| amount * rng.below(101) / 100;
                let spent = Amount {
                    input: share(grant.reserved.input, &mut rng),
                    output: share(grant.reserved.output, &mut rng),
                    nano: share(grant.reserved.nano, &mut rng),
                };
                scopes.settle(&grant, spent, now, &mut accounts);
                used.input += spent.input;
                used.output += spent.output;
                used.nano += spent.nano;
                served += 1;
            }
            if rng.below(2) == 0 && !open.is_empty() {
                let long = rng.below(open.len() as u64) as usize;
                let more = Amount { nano: rng.below(2_000), output: rng.below(50), input: 0 };
                scopes.extend(&mut open[long], more, now);
            }
            // Who runs is on the board with each tick.
            accounts.tick();
            let extra = open.iter().map(|grant| grant.extra.nano).sum::<u64>();
            let held = |of: fn(&Amount) -> u64| open.iter().map(|g| of(&g.reserved)).sum::<u64>();
            let requests = served + open.len() as u64;
            // Who reserves nothing holds one, to be told from who may not.
            let least = open.iter().filter(|grant| grant.reserved.tokens() == 0).count() as u64;
            for scope in &all {
                let row = &scope.row;
                assert_eq!(row.concurrency.now(), open.len() as u64, "seed {seed}");
                if let Some(rate) = &scope.requests {
                    let left = row.requests.left(rate, now);
                    assert!(left.abs_diff(rate.limit() - requests) <= 1, "seed {seed}");
                }
                if let Some(rate) = &scope.tokens {
                    let drawn = used.tokens() + held(|a| a.tokens()) + least;
                    let left = row.tokens.left(rate, now);
                    assert!(left.abs_diff(rate.limit() - drawn) <= 1, "seed {seed}");
                }
                if scope.day.is_some() {
                    let booked = row.calendars[DAY].used(windows.number(Per::Day));
                    assert_eq!(booked, used.tokens() + held(|a| a.tokens()), "seed {seed}");
                    assert!(booked <= scope.day.unwrap_or(0), "seed {seed}");
                }
                if let Some(cap) = scope.budget {
                    let booked = row.calendars[money(Per::Month)].used(windows.number(Per::Month));
                    let extra = if cap.cut { extra } else { 0 };
                    assert_eq!(booked, used.nano + held(|a| a.nano) + extra, "seed {seed}");
                    assert!(cap.soft || booked <= cap.nano.unwrap_or(0), "seed {seed}");
                }
            }
        }
        let limited = all.iter().any(is_limited);
        assert!(served > 0 && (refused > 0 || !limited || open.len() < 100), "seed {seed}");
    }
}
