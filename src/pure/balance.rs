//! Which of a route's backends gets the next attempt.
//!
//! Pure: in-flight counts come in through a closure, chance through [`Rng`]. Each shard keeps its
//! own [`Turn`] for each route, so that a pick writes nothing that another shard reads.

use crate::pure::plan::{Candidate, Strategy};
use crate::pure::units::{BackendId, Rng};

/// A shard's memory of one route: the running weights of smooth weighted round robin.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// One for each candidate; empty until the first pick, and again after a reload changed them.
    credit: Vec<i64>,
}

/// The candidate to try next, or `None` when none is `usable`. O(candidates), no allocation once
/// `turn` has its size.
///
/// `load` is a backend's attempts in flight, over all shards; `cost` its price, in any unit.
pub fn pick(
    strategy: Strategy,
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    load: impl Fn(BackendId) -> u64,
    cost: impl Fn(BackendId) -> i64,
    turn: &mut Turn,
    rng: &mut Rng,
) -> Option<BackendId> {
    match strategy {
        Strategy::WeightedRoundRobin => round_robin(candidates, usable, turn),
        Strategy::WeightedSplit => split(candidates, usable, rng),
        Strategy::Cost => cheapest(candidates, usable, load, cost, rng),
        // What later strategies refine is fewest requests first.
        _ => least_requests(candidates, usable, load, rng),
    }
}

/// nginx's smooth weighted round robin: each usable candidate gains its weight, the richest is
/// picked and pays the sum. Over any `sum` picks each gets exactly its weight, spread out evenly.
fn round_robin(
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    turn: &mut Turn,
) -> Option<BackendId> {
    if turn.credit.len() != candidates.len() {
        turn.credit.clear();
        turn.credit.resize(candidates.len(), 0);
    }
    let mut best: Option<usize> = None;
    let mut sum = 0;
    for (index, candidate) in candidates.iter().enumerate() {
        if !usable(candidate.backend) {
            continue;
        }
        sum += i64::from(candidate.weight);
        turn.credit[index] += i64::from(candidate.weight);
        if best.is_none_or(|best| turn.credit[index] > turn.credit[best]) {
            best = Some(index);
        }
    }
    let best = best?;
    turn.credit[best] -= sum;
    Some(candidates[best].backend)
}

/// By chance in proportion to the weights: what a canary percentage means.
fn split(
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    rng: &mut Rng,
) -> Option<BackendId> {
    let usable = || candidates.iter().filter(|candidate| usable(candidate.backend));
    let sum: u64 = usable().map(|candidate| u64::from(candidate.weight)).sum();
    let mut point = rng.below(sum);
    for candidate in usable() {
        let weight = u64::from(candidate.weight);
        if point < weight {
            return Some(candidate.backend);
        }
        point -= weight;
    }
    None
}

/// Fewest requests in flight for its weight; among equals by chance, because shards that all took
/// the first would send bursts to one backend.
fn least_requests(
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    load: impl Fn(BackendId) -> u64,
    rng: &mut Rng,
) -> Option<BackendId> {
    let mut best: Option<(u64, Candidate)> = None;
    let mut ties = 0;
    for &candidate in candidates.iter().filter(|candidate| usable(candidate.backend)) {
        // Counting the request that is being placed, so that weights matter on idle backends.
        let load = load(candidate.backend) + 1;
        let order = match best {
            None => std::cmp::Ordering::Less,
            // load / weight < best_load / best_weight, without dividing.
            Some((best_load, kept)) => (u128::from(load) * u128::from(kept.weight))
                .cmp(&(u128::from(best_load) * u128::from(candidate.weight))),
        };
        match order {
            std::cmp::Ordering::Less => {
                best = Some((load, candidate));
                ties = 1;
            }
            std::cmp::Ordering::Equal => {
                ties += 1;
                // Reservoir sampling: each of `ties` equals is kept with the same chance.
                if rng.below(ties) == 0 {
                    best = Some((load, candidate));
                }
            }
            std::cmp::Ordering::Greater => {}
        }
    }
    best.map(|(_, candidate)| candidate.backend)
}

/// The cheapest that is usable; among equals the least busy.
fn cheapest(
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    load: impl Fn(BackendId) -> u64,
    cost: impl Fn(BackendId) -> i64,
    rng: &mut Rng,
) -> Option<BackendId> {
    let costs = candidates.iter().map(|candidate| candidate.backend).filter(|&id| usable(id));
    let least = costs.map(&cost).min()?;
    least_requests(candidates, |id| usable(id) && cost(id) == least, load, rng)
}

/// The candidate that `key` always lands on while it is usable: rendezvous hashing, weighted.
/// A backend that goes takes only its own keys with it. `salt` numbers a backend for life.
pub fn stick(
    candidates: &[Candidate],
    usable: impl Fn(BackendId) -> bool,
    salt: impl Fn(BackendId) -> u64,
    key: u64,
) -> Option<BackendId> {
    let score = |candidate: &Candidate| {
        let hash = Rng::seeded(key ^ Rng::seeded(salt(candidate.backend)).next_u64()).next_u64();
        // 53 bits fill a double exactly; plus one half keeps the logarithm finite.
        let unit = ((hash >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        f64::from(candidate.weight) / -unit.ln()
    };
    candidates
        .iter()
        .filter(|candidate| usable(candidate.backend))
        .max_by(|a, b| score(a).total_cmp(&score(b)))
        .map(|candidate| candidate.backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(weights: &[u32]) -> Vec<Candidate> {
        (0..)
            .map(BackendId)
            .zip(weights)
            .map(|(backend, &weight)| Candidate { backend, weight })
            .collect()
    }

    #[test]
    fn round_robin_gives_each_exactly_its_weight_in_every_round() {
        for weights in [vec![1], vec![1, 1, 1], vec![5, 1, 1], vec![90, 10], vec![3, 2, 7, 1]] {
            let candidates = candidates(&weights);
            let mut turn = Turn::default();
            let sum: u32 = weights.iter().sum();
            for _ in 0..3 {
                let mut got = vec![0; weights.len()];
                for _ in 0..sum {
                    got[round_robin(&candidates, |_| true, &mut turn).unwrap().index()] += 1;
                }
                assert_eq!(got, weights);
            }
        }
    }

    #[test]
    fn round_robin_spreads_a_heavy_weight_instead_of_bunching_it() {
        let candidates = candidates(&[5, 1, 1]);
        let mut turn = Turn::default();
        let order: Vec<u32> =
            (0..7).map(|_| round_robin(&candidates, |_| true, &mut turn).unwrap().0).collect();
        assert_eq!(order, [0, 0, 1, 0, 2, 0, 0]);
    }

    #[test]
    fn nobody_unusable_is_ever_picked_by_any_strategy() {
        let candidates = candidates(&[1, 2, 3, 4]);
        let mut rng = Rng::seeded(3);
        for strategy in [
            Strategy::WeightedRoundRobin,
            Strategy::WeightedSplit,
            Strategy::LeastRequests,
            Strategy::Cost,
        ] {
            let mut turn = Turn::default();
            for mask in 0u32..16 {
                let usable = |backend: BackendId| mask >> backend.0 & 1 == 1;
                for _ in 0..20 {
                    let got = pick(
                        strategy,
                        &candidates,
                        usable,
                        |_| 0,
                        |b| i64::from(b.0 % 2),
                        &mut turn,
                        &mut rng,
                    );
                    assert_eq!(got.is_some(), mask != 0);
                    assert!(got.is_none_or(usable));
                    let stuck = stick(&candidates, usable, |b| u64::from(b.0), rng.next_u64());
                    assert_eq!(stuck.is_some(), mask != 0);
                    assert!(stuck.is_none_or(usable));
                }
            }
        }
    }

    #[test]
    fn least_requests_agrees_with_exact_fractions() {
        let mut rng = Rng::seeded(9);
        for _ in 0..2_000 {
            let weights: Vec<u32> = (0..4).map(|_| rng.below(5) as u32 + 1).collect();
            let loads: Vec<u64> = (0..4).map(|_| rng.below(6)).collect();
            let got =
                least_requests(&candidates(&weights), |_| true, |b| loads[b.index()], &mut rng)
                    .unwrap();
            let ratio = |i: usize| (loads[i] + 1) as f64 / f64::from(weights[i]);
            assert!((0..4).all(|i| ratio(got.index()) <= ratio(i) + 1e-12));
        }
    }

    #[test]
    fn the_cheapest_is_taken_while_it_can_be_and_the_next_one_after_that() {
        let candidates = candidates(&[1, 1, 1, 1]);
        let costs = [7, 3, 3, 9];
        let mut rng = Rng::seeded(4);
        let mut order = Vec::new();
        for _ in 0..4 {
            let open = |id: BackendId| !order.contains(&id);
            order.push(
                cheapest(&candidates, open, |_| 0, |id| costs[id.index()], &mut rng).unwrap(),
            );
        }
        let paid: Vec<i64> = order.iter().map(|id| costs[id.index()]).collect();
        assert_eq!(paid, [3, 3, 7, 9]);
    }

    #[test]
    fn equals_share_by_chance() {
        let candidates = candidates(&[1, 1, 1]);
        let mut rng = Rng::seeded(5);
        let mut got = [0; 3];
        for _ in 0..3_000 {
            got[least_requests(&candidates, |_| true, |_| 0, &mut rng).unwrap().index()] += 1;
        }
        assert!(got.iter().all(|&n| (900..1_100).contains(&n)), "{got:?}");
    }

    #[test]
    fn a_backend_that_leaves_takes_only_its_own_keys_with_it() {
        let candidates = candidates(&[1, 2, 1, 4]);
        let salt = |backend: BackendId| u64::from(backend.0);
        let mut share = [0; 4];
        for key in 0..8_000 {
            let before = stick(&candidates, |_| true, salt, key).unwrap();
            share[before.index()] += 1;
            let after = stick(&candidates, |b| b != BackendId(1), salt, key).unwrap();
            assert!(before == BackendId(1) || before == after);
        }
        for (got, want) in share.iter().zip([1_000, 2_000, 1_000, 4_000]) {
            assert!((want * 9 / 10..want * 11 / 10).contains(got), "{share:?}");
        }
    }
}
