//! Goal: shards that lease give nobody more than the limit and keep nobody from it; what they hold
//! comes back.
//! Method: seeded worlds of shards on one virtual clock, beside a book of every draw.

use std::time::Duration;

use super::super::{Amount, Grant, Scope, Scopes, Windows};
use super::*;
use crate::pure::board::ScopeKind;
use crate::pure::units::Rng;

const MINUTE: Duration = Duration::from_secs(60);
const TICK: u64 = 20_000_000;

fn at(nanos: u64) -> Instant {
    Instant::from_nanos(5_000_000_000_000 + nanos)
}

fn rate(limit: u64, burst: Option<u64>) -> Option<Rate> {
    Some(Rate::new(limit, MINUTE, burst, false))
}

fn scope(kind: ScopeKind, requests: Option<Rate>, tokens: Option<Rate>) -> Scope {
    Scope { requests, tokens, ..Scope::unlimited(Arc::new(LimitRow::new(kind, ""))) }
}

fn tokens(output: u64) -> Amount {
    Amount { input: 0, output, nano: 0 }
}

fn shards(count: usize) -> Vec<Accounts> {
    (0..count).map(|_| Accounts::new(count)).collect()
}

/// What all of these shards hold of a resource.
fn leased(shards: &[Accounts], scope: &Scope, what: What, rate: &Rate) -> u64 {
    shards.iter().map(|accounts| accounts.held(&scope.row, what, rate)).sum()
}

fn two<'p>(wide: &'p Scope, narrow: &'p Scope) -> Scopes<'p> {
    let mut list = [None; 7];
    (list[0], list[1]) = (Some(wide), Some(narrow));
    Scopes::new(list)
}

/// The law, at one moment, so that nothing flows in: what is gone from the board was used, is held by
/// a request that runs, or lies in an account.
#[test]
fn what_is_drawn_is_spent_held_leased_or_returned() {
    for seed in 0..200 {
        let mut rng = Rng::seeded(seed);
        let count = 1 + rng.below(8) as usize;
        let mut shards = shards(count);
        // A narrow one behind it refuses now and then: what was taken by then comes back.
        let wide = scope(ScopeKind::Key, rate(60_000_000, None), rate(60_000_000_000, None));
        let narrow = scope(ScopeKind::Tenant, rate(20 + rng.below(50), None), None);
        let scopes = two(&wide, &narrow);
        let (now, windows) = (at(0), Windows::default());
        let mut open: Vec<(usize, Grant)> = Vec::new();
        let (mut spent, mut served, mut refused, mut most_leased) = (0, 0, 0, 0);
        for _ in 0..400 {
            let shard = rng.below(count as u64) as usize;
            match rng.below(20) {
                // Some take more than a lease is worth its while for.
                0..9 => {
                    let most = [900, 400_000][rng.below(2) as usize];
                    let ask = tokens(1 + rng.below(most));
                    match scopes.take(ask, now, &windows, &mut shards[shard]) {
                        Ok(grant) => open.push((shard, grant)),
                        Err(denied) => {
                            assert_eq!(denied.whose, ScopeKind::Tenant, "seed {seed}");
                            refused += 1;
                        }
                    }
                }
                9..17 if !open.is_empty() => {
                    let index = rng.below(open.len() as u64) as usize;
                    let (shard, grant) = open.swap_remove(index);
                    if rng.below(4) == 0 {
                        scopes.cancel(&grant, now, &mut shards[shard]);
                        continue;
                    }
                    let used = rng.below(grant.reserved.output * 2);
                    scopes.settle(&grant, tokens(used), now, &mut shards[shard]);
                    (spent, served) = (spent + used, served + 1);
                }
                17 => shards[shard].give_back(),
                18 => shards[shard] = Accounts::new(count),
                _ => shards[shard].tick(),
            }
            for (what, rate, resource) in wide.rates() {
                let (used, held) = match what {
                    What::Requests => (served, open.len() as u64),
                    _ => (spent, open.iter().map(|(_, grant)| grant.reserved.output).sum()),
                };
                let leased = leased(&shards, &wide, what, rate);
                let drawn = rate.limit() - resource.left(rate, now);
                assert!(drawn.abs_diff(used + held + leased) <= 1, "seed {seed}: {what:?}");
                // 20 ms of the rate.
                assert!(leased <= rate.limit() / 3_000, "seed {seed}: {leased}");
                most_leased = most_leased.max(leased);
            }
            assert_eq!(leased(&shards, &narrow, What::Requests, &rate(1, None).unwrap()), 0);
        }
        assert!(served > 0 && refused > 0 && most_leased > 0, "seed {seed}");
        let running = open.len() as u64;
        shards.iter_mut().for_each(Accounts::give_back);
        assert_eq!([&wide, &narrow].map(|scope| scope.row.concurrency.now()), [running; 2]);
        for (shard, grant) in open.drain(..) {
            scopes.settle(&grant, grant.reserved, now, &mut shards[shard]);
            (spent, served) = (spent + grant.reserved.output, served + 1);
        }
        // They end, and so does what they held.
        drop(shards);
        assert_eq!([&wide, &narrow].map(|scope| scope.row.concurrency.now()), [0; 2]);
        for (what, rate, resource) in wide.rates() {
            let used = if what == What::Requests { served } else { spent };
            let drawn = rate.limit() - resource.left(rate, now);
            assert!(drawn.abs_diff(used) <= 1, "seed {seed}: {what:?}: {drawn} for {used}");
        }
    }
}

/// What was admitted and what is leased together never pass burst and what flows in, over any span
/// from any moment: a bucket that is told of both never overflows.
#[test]
fn with_what_is_leased_no_more_is_drawn_than_burst_and_what_flows_in() {
    for seed in 0..20 {
        let mut rng = Rng::seeded(seed);
        let count = [1, 2, 8, 32][rng.below(4) as usize];
        let mut shards = shards(count);
        let limit = 6_000_000 + rng.below(6_000_000);
        let burst = limit / [100, 400, 700][rng.below(3) as usize];
        let only = scope(ScopeKind::Key, rate(limit, Some(burst)), None);
        let (scopes, windows) = (Scopes::of(&only), Windows::default());
        let rate = only.requests.expect("just made");
        let (mut now, mut admitted, mut drawn_before, mut refused) = (0_u64, 0_u64, 0_u64, 0);
        // In requests times the window in nanoseconds.
        let mut level = 0_i128;
        let window = MINUTE.as_nanos() as i128;
        for _ in 0..1_500 {
            let longest = [3_000, 200, 40_000_000][(rng.below(100) / 49) as usize];
            let pause = rng.below(longest);
            now += pause;
            level = (level - i128::from(pause) * i128::from(limit)).max(0);
            let shard = rng.below(count as u64) as usize;
            match rng.below(40) {
                0 => shards[shard].tick(),
                1 => shards[shard].give_back(),
                // Many at once.
                2..8 => {
                    for _ in 0..4_000 {
                        match scopes.take(tokens(1), at(now), &windows, &mut shards[shard]) {
                            Ok(_) => admitted += 1,
                            Err(_) => {
                                refused += 1;
                                break;
                            }
                        }
                    }
                }
                _ => {
                    admitted += u64::from(
                        scopes.take(tokens(1), at(now), &windows, &mut shards[shard]).is_ok(),
                    )
                }
            }
            let drawn = admitted + leased(&shards, &only, What::Requests, &rate);
            let more = i128::from(drawn) - i128::from(drawn_before);
            drawn_before = drawn;
            level = (level + more * window).max(0);
            let over = level - i128::from(burst) * window;
            assert!(over <= window, "seed {seed}: {} too many", over / window);
        }
        assert!(admitted > 0 && refused > 0, "seed {seed}");
    }
}

#[test]
fn a_legal_steady_load_is_never_refused_however_it_falls_on_shards() {
    // 100,000 a second, which 32 shards lease still, and the smallest burst that is leased of.
    let (limit, burst) = (6_000_000, 8_000);
    for count in [1, 2, 8, 32] {
        for pattern in 0..4 {
            let mut rng = Rng::seeded(pattern);
            let mut shards = shards(count);
            let key = scope(ScopeKind::Key, rate(limit, Some(burst)), rate(limit * 200, None));
            let all = scope(ScopeKind::Global, rate(limit, Some(burst)), None);
            let (scopes, windows) = (two(&key, &all), Windows::default());
            let mut next_tick: Vec<u64> = (0..count as u64).map(|n| n * TICK / 32).collect();
            let mut leases = false;
            for request in 0..12_000_u64 {
                let now = request * 60_000_000_000 / (limit * 95 / 100);
                for (accounts, next) in shards.iter_mut().zip(&mut next_tick) {
                    if now >= *next {
                        accounts.tick();
                        *next += TICK;
                    }
                }
                let shard = match pattern {
                    0 => 0,
                    1 => rng.below(count as u64) as usize,
                    2 => request as usize % count,
                    // One after the other, each for as long as a tick or so.
                    _ => (request / 2_500) as usize % count,
                };
                let taken = scopes.take(tokens(200), at(now), &windows, &mut shards[shard]);
                let grant = taken.unwrap_or_else(|denied| {
                    panic!("{count} shards, pattern {pattern}, {request}: {denied:?}")
                });
                scopes.settle(&grant, tokens(1 + rng.below(199)), at(now), &mut shards[shard]);
                leases |= shards[shard].held(&all.row, What::Requests, &all.requests.unwrap()) > 0;
            }
            assert!(leases, "{count} shards, pattern {pattern}");
        }
    }
}

#[test]
fn a_small_limit_is_exact_to_the_last_one_over_any_number_of_shards() {
    for count in [1, 2, 8] {
        let mut shards = shards(count);
        let key = scope(ScopeKind::Key, rate(100, None), None);
        let mut rng = Rng::seeded(count as u64);
        let mut take = |now| {
            let accounts = &mut shards[rng.below(count as u64) as usize];
            Scopes::of(&key).take(tokens(1), at(now), &Windows::default(), accounts).is_ok()
        };
        assert_eq!((0..10_000).filter(|_| take(0)).count(), 100, "{count} shards");
        // One flows in each 600 ms.
        assert!(!take(599_999_999) && take(600_000_001) && !take(600_000_001));
    }
}

#[test]
fn what_a_shard_has_leased_is_used_up_before_it_refuses_and_told_to_its_clients() {
    let key = scope(ScopeKind::Key, rate(60_000_000, None), None);
    let (scopes, windows) = (Scopes::of(&key), Windows::default());
    let rate = key.requests.expect("just made");
    let [mut one, mut other] = [Accounts::new(2), Accounts::new(2)];
    let take = |accounts: &mut Accounts| scopes.take(tokens(1), at(0), &windows, accounts);
    take(&mut one).expect("there is plenty");
    let leased = one.held(&key.row, What::Requests, &rate);
    assert_eq!(leased, rate.limit() / 3_000 / 2);
    // Of the last that is left on the board another takes what it needs, and lays nothing by.
    let rest = key.row.requests.left(&rate, at(0));
    key.row.requests.take(&rate, at(0), rest - 3).expect("it is there");
    for _ in 0..3 {
        take(&mut other).expect("three are left");
        assert_eq!(other.held(&key.row, What::Requests, &rate), 0);
    }
    assert!(take(&mut other).is_err());
    let left = |accounts: &Accounts| scopes.quotas(at(0), accounts).requests.expect("limited").left;
    assert_eq!((left(&one), left(&other)), (leased, 0));
    for _ in 0..leased {
        take(&mut one).expect("it was leased");
    }
    assert!(take(&mut one).is_err());
}

#[test]
fn what_lies_idle_for_a_tick_goes_back_and_what_is_used_stays() {
    let key = scope(ScopeKind::Key, rate(60_000_000, None), None);
    let rate = key.requests.expect("just made");
    let mut accounts = Accounts::new(1);
    let take = |accounts: &mut Accounts| {
        Scopes::of(&key).take(tokens(1), at(0), &Windows::default(), accounts).expect("plenty")
    };
    take(&mut accounts);
    accounts.tick();
    assert_eq!(accounts.held(&key.row, What::Requests, &rate), rate.limit() / 3_000);
    take(&mut accounts);
    accounts.tick();
    assert!(accounts.held(&key.row, What::Requests, &rate) > 0);
    accounts.tick();
    assert!(accounts.rows.is_empty());
    assert_eq!(key.row.requests.left(&rate, at(0)), rate.limit() - 2);
    assert_eq!((Arc::strong_count(&key.row), key.row.concurrency.now()), (1, 2));
}

/// Whether a shard hears of the new plan at once or meets its limits first.
#[test]
fn a_changed_limit_keeps_the_share_that_is_used() {
    for heard in [true, false] {
        let mut accounts = Accounts::new(1);
        let key = scope(ScopeKind::Key, rate(6_000_000, None), None);
        let windows = Windows::default();
        let take = |scope: &Scope, accounts: &mut Accounts| {
            Scopes::of(scope).take(tokens(1), at(0), &windows, accounts).expect("there is some")
        };
        let old: Vec<Grant> = (0..60_000).map(|_| take(&key, &mut accounts)).collect();
        let next = Scope { requests: rate(600_000_000, None), ..key.clone() };
        if heard {
            accounts.give_back();
        }
        let rate = next.requests.expect("just made");
        take(&next, &mut accounts);
        // One in a hundred of the old is one in a hundred of the new.
        let gone = |accounts: &Accounts| {
            let held = accounts.held(&next.row, What::Requests, &rate);
            rate.limit() - key.row.requests.left(&rate, at(0)) - held
        };
        assert!(gone(&accounts).abs_diff(6_000_001) <= 1, "{}", gone(&accounts));
        // What was taken under the old comes back as what it was.
        for grant in &old {
            Scopes::of(&key).cancel(grant, at(0), &mut accounts);
        }
        assert!(gone(&accounts).abs_diff(1) <= 1, "{}", gone(&accounts));
    }
}
