//! Whose request it is: by a key, or by a token that an issuer signed.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use sha2::{Digest, Sha256};

use super::Shard;
use super::limits::Who;
use crate::client::Client;
use crate::pure::answer::Refusal;
use crate::pure::fields::Known;
use crate::pure::jwt::{self, Bad, Cache};
use crate::pure::plan::{Plan, Unknown};
use crate::pure::units::Series;
use crate::rt;

/// Who asks, and what stands for the key in the access log.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bearer {
    pub who: Who,
    pub series: Series,
}

/// Tokens that this shard has checked, and under what.
#[derive(Debug, Default)]
pub struct Bearers {
    seen: Cache<Bearer>,
    /// Compared, never used: another plan knows other tenants.
    plan: Weak<Plan>,
    generation: u64,
}

/// Whose request it is; nobody's on a gateway without keys. A token that was seen costs what a key
/// costs; another one, the check of a signature on top.
pub fn authenticate(shard: &Shard, plan: &Arc<Plan>, client: &Client) -> Result<Bearer, Refusal> {
    if plan.open() {
        return Ok(Bearer::default());
    }
    let bearer = client.head.field(&client.request, Known::Authorization).and_then(bearer);
    let given = bearer.or_else(|| client.head.field(&client.request, Known::XApiKey));
    let digest: [u8; 32] = Sha256::digest(given.unwrap_or_default()).into();
    if let Some(key) = plan.key(&digest) {
        let key_of = &plan.keys[key.index()];
        let who = Who { key: Some(key), tenant: Some(key_of.tenant), ..Who::default() };
        return Ok(Bearer { who, series: key_of.series });
    }
    let Some(token) = bearer.filter(|_| !plan.issuers.is_empty()) else {
        return Err(Refusal::unauthorized());
    };
    let sets = shard.shared.keysets.load();
    let unix = shard.meter.borrow_mut().unix(rt::now());
    let mut bearers = shard.bearers.borrow_mut();
    if bearers.generation != sets.generation || bearers.plan.as_ptr() != Arc::as_ptr(plan) {
        bearers.seen.clear();
        bearers.generation = sets.generation;
        bearers.plan = Arc::downgrade(plan);
    }
    if let Some(seen) = bearers.seen.get(&digest, unix) {
        return Ok(seen);
    }
    let rules = plan.issuers.iter().map(|issuer| (&issuer.rules, sets.set(issuer.keys.place())));
    let said = jwt::verify(token, rules, unix).map_err(|bad| {
        if bad == Bad::Key {
            // It may be a new one.
            shard.shared.keys_wanted.store(true, Ordering::Relaxed);
        }
        refusal(bad)
    })?;
    let (tenant, tier) = plan.bearer(&said).map_err(unknown)?;
    let who = Who { tenant: Some(tenant), tier, ..Who::default() };
    let bearer = Bearer { who, series: plan.issuers[said.issuer].series };
    bearers.seen.insert(digest, bearer, said.until);
    Ok(bearer)
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| token.trim_ascii())
}

fn refusal(bad: Bad) -> Refusal {
    match bad {
        Bad::NotOne => Refusal::unauthorized(),
        Bad::TenantClaim => unknown(Unknown::Tenant),
        Bad::TierClaim => unknown(Unknown::Tier),
        bad => Refusal::invalid_token(&bad.to_string()),
    }
}

fn unknown(unknown: Unknown) -> Refusal {
    let (code, what) = match unknown {
        Unknown::Tenant => ("tenant_unknown", "tenant"),
        Unknown::Tier => ("tier_unknown", "tier"),
    };
    let text = format!("The token is good, but names no {what} that this gateway knows.");
    Refusal::invalid(403, text).code(code)
}
