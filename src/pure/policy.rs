//! Decides: which backend gets the next attempt of a request, whether it has to wait, and whether
//! a failed attempt may be repeated.
//!
//! One [`Policy`] per shard. It touches nothing but the board's counters (through [`Slot`]).

use std::time::Duration;

use crate::pure::balance::{self, Turn};
use crate::pure::board::Slot;
use crate::pure::plan::Plan;
use crate::pure::units::{BackendId, Instant, Rng, RouteId, Series};

/// One attempt at one backend. Dropping it gives the slot back, once, whatever happened.
#[derive(Debug)]
pub struct Ticket {
    pub backend: BackendId,
    _slot: Slot,
}

/// What becomes of an attempt that is asked for.
#[derive(Debug)]
pub enum Verdict {
    Send(Ticket),
    /// Every backend that may serve this is full: wait for a slot.
    Wait,
    /// No backend that may serve this is up, or each was tried.
    Nobody,
}

/// Decisions of one shard.
#[derive(Debug)]
pub struct Policy {
    rng: Rng,
    /// By route series, which a reload keeps.
    routes: Vec<RouteState>,
}

#[derive(Debug, Default)]
struct RouteState {
    turn: Turn,
    retries: RetryBudget,
}

impl Policy {
    pub fn new(rng: Rng) -> Policy {
        Policy { rng, routes: Vec::new() }
    }

    /// Notes a new request of `route`: it earns retry credit.
    pub fn request(&mut self, plan: &Plan, route: RouteId, now: Instant) {
        let spec = &plan.routes[route.index()];
        state(&mut self.routes, spec.series).retries.earn(spec.retry.budget, now);
    }

    /// A backend for the next attempt, none of `tried` while there is another.
    ///
    /// `stick` is the hash of what keeps a client on one backend, if anything does.
    pub fn decide(
        &mut self,
        plan: &Plan,
        route: RouteId,
        stick: Option<u64>,
        tried: &[BackendId],
    ) -> Verdict {
        let spec = &plan.routes[route.index()];
        let pool = &plan.pools[spec.pool.index()];
        let row = |backend: BackendId| &plan.backends[backend.index()].row;
        let limit = |backend: BackendId| {
            let slots = plan.backends[backend.index()].slots.unwrap_or(u32::MAX);
            slots.min(u32::try_from(pool.max).unwrap_or(u32::MAX))
        };
        let up = |backend: BackendId| {
            row(backend).ready() && !row(backend).draining() && !tried.contains(&backend)
        };
        let free = |backend: BackendId| {
            up(backend) && row(backend).in_flight() < u64::from(limit(backend))
        };
        let state = state(&mut self.routes, spec.series);
        // A slot that was free when looked at may be gone when taken; each round one fewer is.
        for _ in 0..=spec.candidates.len() {
            let picked = match stick {
                Some(key) => balance::stick(
                    &spec.candidates,
                    free,
                    |backend| u64::from(row(backend).series.0),
                    key,
                ),
                None => balance::pick(
                    spec.strategy,
                    &spec.candidates,
                    free,
                    |backend| row(backend).in_flight(),
                    |backend| {
                        let price = plan.backends[backend.index()].cost;
                        price.map_or(i64::MAX, |price| price.input.0.saturating_add(price.output.0))
                    },
                    &mut state.turn,
                    &mut self.rng,
                ),
            };
            let Some(backend) = picked else { break };
            if let Some(slot) = Slot::take(row(backend), Some(limit(backend))) {
                return Verdict::Send(Ticket { backend, _slot: slot });
            }
        }
        if spec.candidates.iter().any(|candidate| up(candidate.backend)) {
            Verdict::Wait
        } else {
            Verdict::Nobody
        }
    }

    /// Whether one more retry fits the route's budget, and if so takes it.
    pub fn may_retry(&mut self, plan: &Plan, route: RouteId, now: Instant) -> bool {
        let spec = &plan.routes[route.index()];
        state(&mut self.routes, spec.series).retries.spend(spec.retry.budget, now)
    }
}

fn state(routes: &mut Vec<RouteState>, series: Series) -> &mut RouteState {
    if routes.len() <= series.index() {
        routes.resize_with(series.index() + 1, RouteState::default);
    }
    &mut routes[series.index()]
}

/// Retries as a share of requests, so that an outage is not multiplied by the retries it causes
/// (as linkerd and Envoy budget them): each request earns `budget` of a retry, and a trickle of
/// three per second lets a quiet route retry, too.
#[derive(Clone, Debug, Default)]
struct RetryBudget {
    credit: f64,
    seen: Option<Instant>,
}

impl RetryBudget {
    const TRICKLE_PER_SECOND: f64 = 3.0;
    /// Credit saved up in quiet times never exceeds this.
    const CREDIT_MAX: f64 = 100.0;

    fn earn(&mut self, budget: f64, now: Instant) {
        self.trickle(now);
        self.credit = (self.credit + budget).min(Self::CREDIT_MAX);
    }

    fn spend(&mut self, budget: f64, now: Instant) -> bool {
        self.trickle(now);
        let allowed = self.credit >= 1.0 && budget > 0.0;
        if allowed {
            self.credit -= 1.0;
        }
        allowed
    }

    fn trickle(&mut self, now: Instant) {
        let idle = match self.seen {
            Some(seen) => now.since(seen),
            None => Duration::from_secs(1),
        };
        self.seen = Some(now);
        self.credit =
            (self.credit + idle.as_secs_f64() * Self::TRICKLE_PER_SECOND).min(Self::CREDIT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_stay_within_their_share_of_requests() {
        let mut budget = RetryBudget::default();
        let mut now = Instant::ZERO;
        let mut retried = 0;
        for _ in 0..10_000 {
            now = now + Duration::from_millis(1);
            budget.earn(0.2, now);
            retried += u32::from(budget.spend(0.2, now));
        }
        // 20 % of 10,000, three a second for ten seconds, three to begin with.
        assert!((2_000..=2_033).contains(&retried), "{retried}");
    }

    #[test]
    fn a_quiet_route_may_retry_but_a_budget_of_zero_never() {
        let mut budget = RetryBudget::default();
        budget.earn(0.1, Instant::ZERO);
        assert!(budget.spend(0.1, Instant::ZERO));
        assert!(!RetryBudget::default().spend(0.0, Instant::ZERO));
    }
}
