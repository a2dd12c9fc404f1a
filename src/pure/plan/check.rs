//! Names to ids, and what only shows when two parts of the file are held together.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;

use super::problem::{Severity, nearest, suggest};
use super::read::{Named, Reader};
use super::spec::{
    BackendSpec, EVERY_NAME, IssuerSpec, KeySpec, ModelSpec, Over, PoolSpec, RouteSpec, Spec,
    TenantSpec, TokenizerSpec,
};
use super::tree::Pos;
use super::{
    Backend, Budget, ByToken, Canary, Candidate, Fallback, Fleet, Issuer, Key, Limits, Lookup,
    Model, OverBudget, Pattern, Plan, Pool, Route, Shadow, Strategy, Tenant, Tier, prefix,
};
use crate::pure::board::{Full, Kind, Rate, Registry, ScopeKind};
use crate::pure::limit::{Cap, Scope};
use crate::pure::tokens::{Tokenizer, Vocabularies};
use crate::pure::units::{BackendId, KeyId, ModelId, PoolId, RouteId, TenantId};

type Map<K, V> = HashMap<K, V, FixedState>;

/// The plan, or `None` with problems noted. Nothing is taken from the registry unless all is well.
pub(super) fn plan(
    r: &mut Reader<'_>,
    spec: Spec,
    digest: u64,
    registry: &mut Registry,
) -> Option<Plan> {
    let names = Names::of(r, &spec);
    let models = Models::of(r, &spec);
    let mut lookup = Lookup::default();
    index_routes(&mut lookup, &spec);
    index_keys(r, &mut lookup, &spec);
    index_visible(&mut lookup, &spec, &models);

    let links = Links {
        routes: spec.routes.iter().map(|route| route_links(r, &names, &spec, route)).collect(),
        tenants: spec
            .tenants
            .iter()
            .map(|tenant| tenant_links(r, &names, &models, &lookup, &spec, tenant))
            .collect(),
        keys: spec.keys.iter().map(|key| key_tenant(r, &names, key)).collect(),
        issuers: spec.issuers.iter().map(|issuer| issuer_tenant(r, &names, issuer)).collect(),
        fallbacks: spec.models.iter().map(|model| fallbacks(r, &models, model)).collect(),
    };
    fallbacks_end(r, &spec, &models, &links.fallbacks);
    let tokenizers = Tokenizers::of(r, &spec, &mut registry.vocabularies);
    advise(r, &spec, &models, &lookup);
    if spec.tenants.is_empty()
        && let Some(issuer) = spec.issuers.first()
    {
        let message = "the file has no tenant, so no token opens anything".to_owned();
        r.notice(issuer.at.pos, &issuer.at.path, message, Severity::Advice);
    }
    lookup.models = models.by_name;
    let tenants = (0..).map(TenantId).zip(&spec.tenants);
    lookup.tenants = tenants.map(|(id, tenant)| (tenant.at.name.as_str().into(), id)).collect();
    if !r.problems.is_empty() {
        return None;
    }
    let strict = |limits: &Limits| limits.strict == Some(true);
    let tiers = spec.tiers.iter().map(|tier| &tier.limits);
    let tenants = spec.tenants.iter().flat_map(|tenant| {
        tenant.rate_limit.iter().chain(tenant.model_limits.iter().map(|(_, limits)| limits))
    });
    let rest = (spec.keys.iter().filter_map(|key| key.rate_limit.as_ref()))
        .chain(spec.routes.iter().filter_map(|route| route.rate_limit.as_ref()))
        .chain(spec.models.iter().filter_map(|model| model.rate_limit.as_ref()))
        .chain(&spec.global);
    if spec.fleet.is_some() && tiers.chain(tenants).chain(rest).any(strict) {
        let message = "NOT ENFORCED as `strict`: limits that a fleet shares may give a full burst \
                       behind a full minute";
        r.notice(Pos::START, "fleet", message.to_owned(), Severity::UnenforcedLimit);
    }
    let notices = std::mem::take(&mut r.notices);
    let assembled = room(registry, &spec, &models.implicit)
        .and_then(|()| assemble(spec, models.implicit, links, tokenizers, registry));
    match assembled {
        Ok(plan) => Some(Plan { notices, digest, lookup, ..plan }),
        Err(full) => {
            let hint = "restart the gateway: it numbers names for its whole life".to_owned();
            r.problem(Pos::START, "", full.to_string(), Some(hint));
            None
        }
    }
}

/// Everything that has a name, by name.
struct Names<'s> {
    pools: Map<&'s str, usize>,
    tiers: Map<&'s str, usize>,
    tenants: Map<&'s str, usize>,
    /// The first backend of each pool among all backends.
    offsets: Vec<usize>,
}

impl<'s> Names<'s> {
    fn of(r: &mut Reader<'_>, spec: &'s Spec) -> Names<'s> {
        // Keys of maps are unique already; names in lists are not.
        fn index<'n>(names: impl Iterator<Item = &'n Named>) -> Map<&'n str, usize> {
            names.enumerate().map(|(index, at)| (at.name.as_str(), index)).collect()
        }
        unique(r, "route", spec.routes.iter().map(|route| &route.at));
        // An issuer's name stands where a key's id stands.
        let keys = spec.keys.iter().map(|key| &key.at);
        unique(r, "key", keys.chain(spec.issuers.iter().map(|issuer| &issuer.at)));
        unique(r, "issuer", spec.issuers.iter().map(|issuer| &issuer.issuer));
        let backends = spec.pools.iter().flat_map(|pool| &pool.backends);
        unique(r, "backend", backends.map(|backend| &backend.at));
        let mut offsets = Vec::with_capacity(spec.pools.len());
        let mut total = 0;
        for pool in &spec.pools {
            offsets.push(total);
            total += pool.backends.len();
        }
        Names {
            pools: index(spec.pools.iter().map(|pool| &pool.at)),
            tiers: index(spec.tiers.iter().map(|tier| &tier.at)),
            tenants: index(spec.tenants.iter().map(|tenant| &tenant.at)),
            offsets,
        }
    }
}

fn unique<'n>(r: &mut Reader<'_>, kind: &'static str, names: impl Iterator<Item = &'n Named>) {
    let mut seen: Map<&str, Pos> = Map::default();
    for at in names {
        if let Some(first) = seen.get(at.name.as_str()) {
            let message =
                format!("{kind} `{}` is here twice; the first is on line {}", at.name, first.line);
            r.owned(kind, &at.name, |r| r.problem(at.pos, &at.path, message, None));
        } else {
            seen.insert(&at.name, at.pos);
        }
    }
}

/// The index of a name that must exist.
fn find(
    r: &mut Reader<'_>,
    kind: &'static str,
    known: &Map<&str, usize>,
    at: &Named,
) -> Option<usize> {
    let found = known.get(at.name.as_str()).copied();
    if found.is_none() && !failed(r, kind, &at.name) {
        let mut names: Vec<&str> = known.keys().copied().collect();
        names.sort_unstable();
        let hint = suggest(&at.name, names)
            .unwrap_or_else(|| format!("the file defines no {kind} at all"));
        r.problem(at.pos, &at.path, format!("there is no {kind} `{}`", at.name), Some(hint));
    }
    found
}

fn failed(r: &Reader<'_>, kind: &'static str, name: &str) -> bool {
    let counts = |failed: &str| failed == name || failed == EVERY_NAME;
    r.failed.iter().any(|(other, failed)| *other == kind && counts(failed))
}

/// Every model by every name that clients may use.
struct Models {
    by_name: Map<Box<str>, ModelId>,
    /// Names that only routes mention: models without price, alias or bound. Their ids follow
    /// those of the declared ones.
    implicit: Vec<Box<str>>,
}

impl Models {
    fn of(r: &mut Reader<'_>, spec: &Spec) -> Models {
        let mut by_name: Map<Box<str>, ModelId> = Map::default();
        for (index, model) in spec.models.iter().enumerate() {
            by_name.insert(model.at.name.as_str().into(), ModelId(id(index)));
        }
        for (index, model) in spec.models.iter().enumerate() {
            for alias in &model.aliases {
                let other = match by_name.get(alias.name.as_str()) {
                    None => {
                        by_name.insert(alias.name.as_str().into(), ModelId(id(index)));
                        continue;
                    }
                    Some(other) if other.index() == index && alias.name == model.at.name => {
                        "the model's own name".to_owned()
                    }
                    Some(other) if spec.models[other.index()].at.name == alias.name => {
                        "a model of its own".to_owned()
                    }
                    Some(other) => {
                        format!(
                            "an alias of model `{}` already",
                            spec.models[other.index()].at.name
                        )
                    }
                };
                let message = format!("alias `{}` is {other}", alias.name);
                r.owned("model", &model.at.name, |r| {
                    r.problem(alias.pos, &alias.path, message, None);
                });
            }
        }
        let mut implicit = Vec::new();
        let exact = spec.routes.iter().flat_map(|route| &route.matches.models).filter_map(exact);
        for name in exact {
            if !by_name.contains_key(name) {
                by_name.insert(name.into(), ModelId(id(spec.models.len() + implicit.len())));
                implicit.push(name.into());
            }
        }
        Models { by_name, implicit }
    }

    /// A model that must exist, by name or alias.
    fn find(&self, r: &mut Reader<'_>, at: &Named) -> Option<ModelId> {
        let found = self.by_name.get(at.name.as_str()).copied();
        if found.is_none() && !failed(r, "model", &at.name) {
            let mut names: Vec<&str> = self.by_name.keys().map(AsRef::as_ref).collect();
            names.sort_unstable();
            let hint = suggest(&at.name, names);
            r.problem(at.pos, &at.path, format!("there is no model `{}`", at.name), hint);
        }
        found
    }
}

fn exact(pattern: &Pattern) -> Option<&str> {
    match pattern {
        Pattern::Exact(name) => Some(name),
        Pattern::Glob(_) => None,
    }
}

/// Lists have far fewer than 2^32 elements: the text has at most 2^22 bytes.
fn id(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

// ---- what hot lookups need

fn index_routes(lookup: &mut Lookup, spec: &Spec) {
    for (index, route) in spec.routes.iter().enumerate() {
        let route_id = RouteId(id(index));
        let models = &route.matches.models;
        if route.at.name == "default" {
            lookup.default = Some(route_id);
        } else if models.is_empty() || models.iter().any(|model| exact(model).is_none()) {
            lookup.general.push(route_id);
        } else {
            for name in models.iter().filter_map(exact) {
                let routes = lookup.by_model.entry(name.into()).or_default();
                // A name that one route lists twice.
                if routes.last() != Some(&route_id) {
                    routes.push(route_id);
                }
            }
        }
    }
}

fn index_keys(r: &mut Reader<'_>, lookup: &mut Lookup, spec: &Spec) {
    let mut seen: Map<[u8; 32], &str> = Map::default();
    for (index, key) in spec.keys.iter().enumerate() {
        if let Some(first) = seen.get(&key.sha256) {
            let message = format!("key `{}` has the same SHA-256 as key `{first}`", key.at.name);
            r.owned("key", &key.at.name, |r| r.problem(key.at.pos, &key.at.path, message, None));
            continue;
        }
        seen.insert(key.sha256, &key.at.name);
        lookup.keys.push((prefix(&key.sha256), KeyId(id(index))));
    }
    lookup.keys.sort_unstable();
}

/// Whether a route may serve this name, some header and path given.
fn served(lookup: &Lookup, spec: &Spec, name: &str) -> bool {
    let fits = |route: &RouteId| {
        let models = &spec.routes[route.index()].matches.models;
        models.is_empty() || models.iter().any(|model| model.matches(name.as_bytes()))
    };
    lookup.by_model.contains_key(name)
        || lookup.default.iter().any(fits)
        || lookup.general.iter().any(fits)
}

fn index_visible(lookup: &mut Lookup, spec: &Spec, models: &Models) {
    let mut visible: Vec<(Box<str>, ModelId)> = Vec::new();
    for (index, model) in spec.models.iter().enumerate() {
        let own = served(lookup, spec, &model.at.name);
        if own {
            visible.push((model.at.name.as_str().into(), ModelId(id(index))));
        }
        for alias in &model.aliases {
            if own || served(lookup, spec, &alias.name) {
                visible.push((alias.name.as_str().into(), ModelId(id(index))));
            }
        }
    }
    for (index, name) in models.implicit.iter().enumerate() {
        visible.push((name.clone(), ModelId(id(spec.models.len() + index))));
    }
    lookup.visible = visible;
}

// ---- references

/// The ids that names of the file stand for, by the same index as in the [`Spec`].
struct Links {
    routes: Vec<Option<RouteLinks>>,
    tenants: Vec<TenantLinks>,
    keys: Vec<Option<TenantId>>,
    issuers: Vec<Option<TenantId>>,
    fallbacks: Vec<Vec<Fallback>>,
}

struct RouteLinks {
    pool: PoolId,
    strategy: Strategy,
    candidates: Vec<Candidate>,
    shadow_pool: Option<PoolId>,
}

fn route_links(
    r: &mut Reader<'_>,
    names: &Names<'_>,
    spec: &Spec,
    route: &RouteSpec,
) -> Option<RouteLinks> {
    r.owned("route", &route_owner(route), |r| {
        let shadow_pool = route.shadow.as_ref().and_then(|shadow| {
            find(r, "pool", &names.pools, &shadow.pool).map(|pool| PoolId(id(pool)))
        });
        let pool = find(r, "pool", &names.pools, &route.pool)?;
        let strategy = match route.strategy {
            None if route.weights.is_empty() => Strategy::WeightedRoundRobin,
            None => Strategy::WeightedSplit,
            Some((strategy, pos)) => {
                if !route.weights.is_empty() && strategy != Strategy::WeightedSplit {
                    let message = "`weights` by version go with strategy `weighted-split`";
                    let path = format!("{}.strategy", parent(&route.pool.path));
                    r.problem(pos, &path, message.to_owned(), None);
                }
                strategy
            }
        };
        if let Some(canary) = &route.canary {
            for version in [&canary.candidate, &canary.baseline] {
                known_version(r, spec, pool, version);
            }
            if canary.candidate.name == canary.baseline.name {
                let at = &canary.candidate;
                let message = "candidate and baseline are the same version".to_owned();
                r.problem(at.pos, &at.path, message, None);
            }
        }
        let candidates = candidates(r, names.offsets[pool], spec, pool, route);
        Some(RouteLinks { pool: PoolId(id(pool)), strategy, candidates, shadow_pool })
    })
}

/// A route by name and models: the word that an operator looks for may be either.
fn route_owner(route: &RouteSpec) -> String {
    const MODELS_MAX: usize = 3;
    let models = &route.matches.models;
    if models.is_empty() {
        return route.at.name.clone();
    }
    let mut listed: Vec<&str> = models.iter().take(MODELS_MAX).map(Pattern::as_str).collect();
    if models.len() > MODELS_MAX {
        listed.push("...");
    }
    format!("{} of model {}", route.at.name, listed.join(", "))
}

/// `routes[3]` of `routes[3].pool`.
fn parent(path: &str) -> &str {
    path.rsplit_once('.').map_or("", |(parent, _)| parent)
}

fn known_version(r: &mut Reader<'_>, spec: &Spec, pool: usize, at: &Named) -> bool {
    let mut versions: Vec<&str> =
        spec.pools[pool].backends.iter().filter_map(|b| b.version.as_deref()).collect();
    versions.sort_unstable();
    versions.dedup();
    let known = spec.pools[pool].partial || versions.contains(&at.name.as_str());
    if !known {
        let pool = &spec.pools[pool].at.name;
        let message = format!("no backend of pool `{pool}` has version `{}`", at.name);
        let hint = suggest(&at.name, versions)
            .unwrap_or_else(|| "give the backends a `version`".to_owned());
        r.problem(at.pos, &at.path, message, Some(hint));
    }
    known
}

/// Who can be picked for a route, with integer weights.
fn candidates(
    r: &mut Reader<'_>,
    offset: usize,
    spec: &Spec,
    pool: usize,
    route: &RouteSpec,
) -> Vec<Candidate> {
    let backends = &spec.pools[pool].backends;
    let mut all_known = true;
    for (version, _) in &route.weights {
        all_known &= known_version(r, spec, pool, version);
    }
    let weights: Vec<u32> = if route.weights.is_empty() {
        backends.iter().map(|backend| backend.weight).collect()
    } else {
        let version_of = |backend: &BackendSpec| {
            let version = backend.version.as_deref()?;
            route.weights.iter().position(|(at, _)| at.name == version)
        };
        let members: Vec<(Option<usize>, u32)> =
            backends.iter().map(|backend| (version_of(backend), backend.weight)).collect();
        let versions: Vec<u32> = route.weights.iter().map(|&(_, weight)| weight).collect();
        share_out(&versions, &members)
    };
    let candidates: Vec<Candidate> = weights
        .iter()
        .enumerate()
        .filter(|&(_, &weight)| weight > 0)
        .map(|(index, &weight)| Candidate { backend: BackendId(id(offset + index)), weight })
        .collect();
    if candidates.is_empty() && all_known && !backends.is_empty() && !spec.pools[pool].partial {
        let name = &route.pool.name;
        let message = if route.weights.is_empty() {
            format!("every backend of pool `{name}` has weight 0, so nothing could be sent")
        } else {
            format!("the weights leave no backend of pool `{name}` that could be sent anything")
        };
        let hint = "give at least one backend a weight above 0, or remove the route".to_owned();
        r.problem(route.pool.pos, &route.pool.path, message, Some(hint));
    }
    candidates
}

/// The weight of each member: its version's weight, shared out by the members' own weights.
/// Exact (times the least common multiple) where that fits, else to one part in 2^24.
fn share_out(versions: &[u32], members: &[(Option<usize>, u32)]) -> Vec<u32> {
    let sums: Vec<u64> = (0..versions.len())
        .map(|version| {
            let of_version = members.iter().filter(|member| member.0 == Some(version));
            of_version.map(|member| u64::from(member.1)).sum()
        })
        .collect();
    let exact = || -> Option<Vec<u32>> {
        let mut scale: u64 = 1;
        for &sum in sums.iter().filter(|&&sum| sum > 0) {
            scale = (scale / gcd(scale, sum)).checked_mul(sum)?;
        }
        let share = |&(version, weight): &(Option<usize>, u32)| match version {
            Some(version) if sums[version] > 0 => u64::from(versions[version])
                .checked_mul(u64::from(weight))?
                .checked_mul(scale / sums[version]),
            _ => Some(0),
        };
        let shares: Vec<u64> = members.iter().map(share).collect::<Option<_>>()?;
        let common = shares.iter().fold(0, |common, &share| gcd(common, share)).max(1);
        shares.iter().map(|share| u32::try_from(share / common).ok()).collect()
    };
    if let Some(shares) = exact() {
        return shares;
    }
    let used = (0..versions.len()).filter(|&version| sums[version] > 0);
    let whole: u128 = used.map(|version| u128::from(versions[version])).sum();
    members
        .iter()
        .map(|&(version, weight)| match version {
            Some(version) if versions[version] > 0 && weight > 0 => {
                let part = (u128::from(versions[version]) * u128::from(weight)) << 24;
                // At most 2^24, since both factors are parts of their sums.
                let share = part / (u128::from(sums[version]) * whole);
                u32::try_from(share.max(1)).unwrap_or(u32::MAX)
            }
            _ => 0,
        })
        .collect()
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn tenant_links(
    r: &mut Reader<'_>,
    names: &Names<'_>,
    models: &Models,
    lookup: &Lookup,
    spec: &Spec,
    tenant: &TenantSpec,
) -> TenantLinks {
    r.owned("tenant", &tenant.at.name, |r| {
        let tier = match &tenant.tier {
            Some(tier) => find(r, "tier", &names.tiers, tier),
            None => names.tiers.get("default").copied(),
        };
        let downgrade = match tenant.budget.as_ref().map(|budget| &budget.over) {
            Some(Over::Downgrade(to)) => models.find(r, to),
            _ => None,
        };
        for (pattern, at) in &tenant.models {
            let Some(name) = exact(pattern) else { continue };
            if !models.by_name.contains_key(name) && !served(lookup, spec, name) {
                let known = models.by_name.keys().map(AsRef::as_ref);
                let near = nearest(name, known).map(|near| format!("; did you mean `{near}`?"));
                let message = format!("no model has the name `{name}`{}", near.unwrap_or_default());
                r.notice(at.pos, &at.path, message, Severity::Advice);
            }
        }
        let models = tenant.model_limits.iter().map(|(at, _)| models.find(r, at)).collect();
        TenantLinks { tier, downgrade, models }
    })
}

struct TenantLinks {
    tier: Option<usize>,
    /// Where requests go when the budget is spent.
    downgrade: Option<ModelId>,
    /// Those that `model_limits` names, in its order.
    models: Vec<Option<ModelId>>,
}

fn key_tenant(r: &mut Reader<'_>, names: &Names<'_>, key: &KeySpec) -> Option<TenantId> {
    r.owned("key", &key.at.name, |r| {
        find(r, "tenant", &names.tenants, &key.tenant).map(|tenant| TenantId(id(tenant)))
    })
}

fn issuer_tenant(r: &mut Reader<'_>, names: &Names<'_>, issuer: &IssuerSpec) -> Option<TenantId> {
    let tenant = issuer.default_tenant.as_ref()?;
    r.owned("issuer", &issuer.issuer.name, |r| {
        find(r, "tenant", &names.tenants, tenant).map(|tenant| TenantId(id(tenant)))
    })
}

fn fallbacks(r: &mut Reader<'_>, models: &Models, model: &ModelSpec) -> Vec<Fallback> {
    r.owned("model", &model.at.name, |r| {
        let mut chain: Vec<Fallback> = Vec::new();
        for (at, reason) in &model.fallback {
            let Some(target) = models.find(r, at) else { continue };
            if chain.iter().any(|earlier| earlier.model == target) {
                let message = format!("model `{}` is in this chain already", at.name);
                r.problem(at.pos, &at.path, message, None);
                continue;
            }
            chain.push(Fallback { model: target, reason: reason.as_str().into() });
        }
        chain
    })
}

/// No model falls back to itself, neither at once nor by way of others: each request could then
/// go round for as long as everything is down.
fn fallbacks_end(r: &mut Reader<'_>, spec: &Spec, models: &Models, chains: &[Vec<Fallback>]) {
    #[derive(Clone, Copy, PartialEq)]
    enum Mark {
        New,
        Open,
        Done,
    }
    let mut marks = vec![Mark::New; spec.models.len() + models.implicit.len()];
    let mut looping = vec![false; spec.models.len()];
    let targets = |model: usize| chains.get(model).map_or(&[][..], Vec::as_slice);
    for start in 0..spec.models.len() {
        // Depth first, with the way here on a stack of our own: chains may be long.
        let mut way: Vec<(usize, usize)> = Vec::new();
        if marks[start] == Mark::New {
            marks[start] = Mark::Open;
            way.push((start, 0));
        }
        while let Some((model, next)) = way.last_mut() {
            let Some(target) = targets(*model).get(*next) else {
                marks[*model] = Mark::Done;
                way.pop();
                continue;
            };
            *next += 1;
            let target = target.model.index();
            match marks[target] {
                Mark::New => {
                    marks[target] = Mark::Open;
                    way.push((target, 0));
                }
                Mark::Open => {
                    let from = way.iter().position(|&(on_way, _)| on_way == target).unwrap_or(0);
                    let ring: Vec<usize> = way[from..].iter().map(|&(on_way, _)| on_way).collect();
                    report_ring(r, spec, &ring, &mut looping);
                }
                Mark::Done => {}
            }
        }
    }
}

fn report_ring(r: &mut Reader<'_>, spec: &Spec, ring: &[usize], looping: &mut [bool]) {
    const SHOWN_MAX: usize = 8;
    for (place, &model) in ring.iter().enumerate() {
        let model_spec = &spec.models[model];
        if std::mem::replace(&mut looping[model], true) {
            continue;
        }
        let from_here = ring[place..].iter().chain(&ring[..=place]);
        let mut names: Vec<&str> =
            from_here.map(|&model| spec.models[model].at.name.as_str()).collect();
        if names.len() > SHOWN_MAX {
            names.drain(SHOWN_MAX / 2..names.len() - SHOWN_MAX / 2);
        }
        let message =
            format!("the fallback of model `{}` leads back to itself", model_spec.at.name);
        let hint = format!("break the ring {}", names.join(" -> "));
        let at = model_spec.fallback.first().map_or(&model_spec.at, |(at, _)| at);
        r.owned("model", &model_spec.at.name, |r| {
            r.problem(at.pos, &at.path, message, Some(hint));
        });
    }
}

/// What prompts are counted with, by the same index as in the [`Spec`]; `None` where it says nothing.
struct Tokenizers {
    models: Vec<Option<Tokenizer>>,
    routes: Vec<Option<Tokenizer>>,
}

impl Tokenizers {
    fn of(r: &mut Reader<'_>, spec: &Spec, vocabularies: &mut Vocabularies) -> Tokenizers {
        // Before new ones are made: what the plan in force uses stays.
        vocabularies.prune();
        let mut made = |r: &mut Reader<'_>, tokenizer: &TokenizerSpec| match tokenizer {
            TokenizerSpec::Auto => Some(Tokenizer::Auto),
            TokenizerSpec::BuiltIn(name) => vocabularies.built_in(name).map(Tokenizer::Exact),
            TokenizerSpec::File { at, json } => match vocabularies.from_json(json) {
                Ok(vocabulary) => Some(Tokenizer::Exact(vocabulary)),
                Err(why) => {
                    let message = format!("the tokenizer cannot be used: {why}");
                    r.problem(at.pos, &at.path, message, None);
                    None
                }
            },
        };
        let of_model = |model: &ModelSpec| {
            let tokenizer = model.tokenizer.as_ref()?;
            r.owned("model", &model.at.name, |r| made(r, tokenizer))
        };
        let models = spec.models.iter().map(of_model).collect();
        let of_route = |route: &RouteSpec| {
            let tokenizer = route.tokenizer.as_ref()?;
            r.owned("route", &route.at.name, |r| made(r, tokenizer))
        };
        Tokenizers { models, routes: spec.routes.iter().map(of_route).collect() }
    }
}

/// Allowed, and probably not meant.
fn advise(r: &mut Reader<'_>, spec: &Spec, models: &Models, lookup: &Lookup) {
    for model in &spec.models {
        let mut names = std::iter::once(&model.at).chain(&model.aliases);
        if names.any(|at| served(lookup, spec, &at.name)) {
            continue;
        }
        let near = nearest(&model.at.name, models.implicit.iter().map(AsRef::as_ref));
        let near = near.map(|near| format!("; did a route mean it by `{near}`?"));
        let message = format!(
            "no route serves model `{}`, so clients get 404{}",
            model.at.name,
            near.unwrap_or_default()
        );
        r.notice(model.at.pos, &model.at.path, message, Severity::Advice);
    }
    let catch_all = spec
        .routes
        .iter()
        .position(|route| route.matches.catches_all() && route.at.name != "default");
    if let Some(first) = catch_all {
        let late = spec.routes[first + 1..].iter().find(|route| route.at.name != "default");
        if let Some(late) = late {
            let message = format!(
                "route `{}` is never reached: route `{}` above has no `match` and takes everything",
                late.at.name, spec.routes[first].at.name
            );
            r.notice(late.at.pos, &late.at.path, message, Severity::Advice);
        }
    }
    let mut used: HashSet<&str, FixedState> = HashSet::default();
    for route in &spec.routes {
        used.insert(&route.pool.name);
        if let Some(shadow) = &route.shadow {
            used.insert(&shadow.pool.name);
        }
    }
    for pool in spec.pools.iter().filter(|pool| !used.contains(pool.at.name.as_str())) {
        let message = format!("no route uses pool `{}`", pool.at.name);
        r.notice(pool.at.pos, &pool.at.path, message, Severity::Advice);
    }
}

// ---- the plan itself

/// Whether every new name finds a number, before the first takes one.
fn room(registry: &Registry, spec: &Spec, implicit: &[Box<str>]) -> Result<(), Full> {
    let backends = spec.pools.iter().flat_map(|pool| &pool.backends);
    let models = spec.models.iter().map(|model| model.at.name.as_str());
    registry.room(Kind::Pool, spec.pools.iter().map(|pool| pool.at.name.as_str()))?;
    registry.room(Kind::Backend, backends.map(|backend| backend.at.name.as_str()))?;
    registry.room(Kind::Model, models.chain(implicit.iter().map(AsRef::as_ref)))?;
    registry.room(Kind::Route, spec.routes.iter().map(|route| route.at.name.as_str()))?;
    registry.room(Kind::Tenant, spec.tenants.iter().map(|tenant| tenant.at.name.as_str()))?;
    let keys = spec.keys.iter().map(|key| key.at.name.as_str());
    let issuers = spec.issuers.iter().map(|issuer| issuer.at.name.as_str());
    registry.room(Kind::Key, keys.chain(issuers))
}

/// Moves everything into its place. Every reference is known to be good.
fn assemble(
    spec: Spec,
    implicit: Vec<Box<str>>,
    links: Links,
    tokenizers: Tokenizers,
    registry: &mut Registry,
) -> Result<Plan, Full> {
    let (pools, backends) = pools(spec.pools, registry)?;
    let models = models(spec.models, links.fallbacks, tokenizers.models, implicit, registry)?;
    let mut routes = Vec::with_capacity(spec.routes.len());
    let routes_given = spec.routes.into_iter().zip(tokenizers.routes).zip(links.routes);
    for ((route, tokenizer), links) in routes_given {
        // A route without links has left a problem behind, and no plan is made.
        let Some(links) = links else { continue };
        routes.push(Route { tokenizer, ..route_of(route, links, registry)? });
    }
    let tiers: Vec<Tier> = spec
        .tiers
        .into_iter()
        .map(|tier| Tier {
            name: Arc::from(tier.at.name),
            limits: tier.limits,
            priority: tier.priority,
        })
        .collect();
    let claimed = spec.issuers.iter().any(|issuer| issuer.rules.tier.is_some());
    let mut tenants = Vec::with_capacity(spec.tenants.len());
    for (tenant, links) in spec.tenants.into_iter().zip(links.tenants) {
        tenants.push(tenant_of(tenant, links, &tiers, claimed, registry)?);
    }
    let mut keys = Vec::with_capacity(spec.keys.len());
    for (key, tenant) in spec.keys.into_iter().zip(links.keys) {
        let limits = key.rate_limit.unwrap_or_default();
        keys.push(Key {
            limits: scope(registry, ScopeKind::Key, &key.at.name, &limits, None),
            series: registry.series(Kind::Key, &key.at.name)?,
            id: Arc::from(key.at.name),
            tenant: tenant.unwrap_or_default(),
            sha256: key.sha256,
            models: key.models,
            deny_models: key.deny_models,
        });
    }
    let mut issuers = Vec::with_capacity(spec.issuers.len());
    for (issuer, default_tenant) in spec.issuers.into_iter().zip(links.issuers) {
        issuers.push(Issuer {
            series: registry.series(Kind::Key, &issuer.at.name)?,
            name: Arc::from(issuer.at.name),
            rules: issuer.rules,
            keys: issuer.keys,
            default_tenant,
        });
    }
    Ok(Plan {
        server: spec.server.server,
        admin: spec.admin.admin,
        state_dir: spec.state_dir,
        state_sync: spec.state_sync,
        unwritten: spec.unwritten,
        usage: spec.usage,
        alerts: spec.alerts,
        fleet: spec.fleet.map(|(redis, name, share)| Fleet { redis, name: Arc::from(name), share }),
        pools,
        backends,
        models,
        routes,
        tiers,
        tenants,
        keys,
        issuers,
        made_keys: false,
        global: spec
            .global
            .and_then(|limits| scope(registry, ScopeKind::Global, "", &limits, None)),
        notices: Vec::new(),
        digest: 0,
        lookup: Lookup::default(),
    })
}

fn pools(specs: Vec<PoolSpec>, registry: &mut Registry) -> Result<(Vec<Pool>, Vec<Backend>), Full> {
    let mut pools = Vec::with_capacity(specs.len());
    let mut backends = Vec::new();
    for (index, pool) in specs.into_iter().enumerate() {
        let first = backends.len();
        for backend in pool.backends {
            backends.push(backend_of(backend, PoolId(id(index)), registry)?);
        }
        pools.push(Pool {
            series: registry.series(Kind::Pool, &pool.at.name)?,
            name: Arc::from(pool.at.name),
            dialect: pool.dialect,
            backends: (first..backends.len()).map(|backend| BackendId(id(backend))).collect(),
            timeouts: pool.timeouts,
            idle: pool.idle,
            idle_for: pool.idle_for,
            max: pool.max,
            wait: pool.wait,
            forward: pool.forward,
            breaker: pool.breaker,
            health: pool.health,
            scrape: pool.scrape,
            sleep: pool.sleep,
        });
    }
    Ok((pools, backends))
}

fn backend_of(
    backend: BackendSpec,
    pool: PoolId,
    registry: &mut Registry,
) -> Result<Backend, Full> {
    let row = registry.backend(&backend.at.name)?;
    Ok(Backend {
        name: Arc::clone(&row.name),
        series: row.series,
        pool,
        host: backend.target.host,
        port: backend.target.port,
        host_header: backend.target.authority,
        base_path: backend.target.base_path,
        weight: backend.weight,
        api_key: backend.api_key,
        version: backend.version.map(Arc::from),
        region: backend.region.map(Arc::from),
        tags: backend.tags,
        slots: backend.slots,
        cost: backend.cost,
        gpu: backend.gpu,
        row,
    })
}

fn models(
    specs: Vec<ModelSpec>,
    fallbacks: Vec<Vec<Fallback>>,
    tokenizers: Vec<Option<Tokenizer>>,
    implicit: Vec<Box<str>>,
    registry: &mut Registry,
) -> Result<Vec<Model>, Full> {
    let mut models = Vec::with_capacity(specs.len() + implicit.len());
    for ((model, tokenizer), fallback) in specs.into_iter().zip(tokenizers).zip(fallbacks) {
        let limits = model.rate_limit.unwrap_or_default();
        models.push(Model {
            limits: scope(registry, ScopeKind::Model, &model.at.name, &limits, None),
            series: registry.series(Kind::Model, &model.at.name)?,
            name: Arc::from(model.at.name),
            aliases: model.aliases.into_iter().map(|alias| alias.name.into()).collect(),
            context: model.context,
            max_output: model.max_output,
            price: model.price,
            tokenizer: tokenizer.unwrap_or_default(),
            kv: model.kv,
            fallback,
        });
    }
    for name in implicit {
        models.push(Model {
            series: registry.series(Kind::Model, &name)?,
            name: Arc::from(name),
            aliases: Vec::new(),
            context: None,
            max_output: None,
            price: None,
            tokenizer: Tokenizer::Auto,
            kv: None,
            limits: None,
            fallback: Vec::new(),
        });
    }
    Ok(models)
}

/// These limits of this scope, with its words on the board; `None` if nothing is limited.
fn scope(
    registry: &mut Registry,
    kind: ScopeKind,
    name: &str,
    limits: &Limits,
    budget: Option<Cap>,
) -> Option<Scope> {
    if budget.is_none() && limits.is_none() {
        return None;
    }
    let strict = limits.strict.unwrap_or(false);
    let per_minute = |limit: u64, burst| Rate::new(limit, MINUTE, burst, strict);
    let scope = Scope {
        kind,
        requests: limits.rpm.map(|limit| per_minute(limit, limits.burst)),
        tokens: limits.tpm.map(|limit| per_minute(limit, None)),
        input: limits.itpm.map(|limit| per_minute(limit, None)),
        output: limits.otpm.map(|limit| per_minute(limit, None)),
        concurrency: limits.concurrency,
        day: limits.tpd,
        budget,
        wait: match limits.concurrency {
            Some(_) => limits.limit_wait.unwrap_or(LIMIT_WAIT),
            None => Duration::ZERO,
        },
        row: registry.limits(kind, name),
    };
    Some(scope)
}

const MINUTE: Duration = Duration::from_secs(60);
/// How long a request waits for one of its own kind to end, where the file does not say.
const LIMIT_WAIT: Duration = Duration::from_millis(100);

fn tenant_of(
    tenant: TenantSpec,
    links: TenantLinks,
    tiers: &[Tier],
    claimed: bool,
    registry: &mut Registry,
) -> Result<Tenant, Full> {
    let row = registry.tenant(&tenant.at.name)?;
    let budget = tenant.budget.map(|budget| Budget {
        usd: budget.usd,
        tokens: budget.tokens,
        per: budget.per,
        over: match (budget.over, links.downgrade) {
            (Over::Downgrade(_), Some(model)) => OverBudget::Downgrade(model),
            (Over::ReadOnly, _) => OverBudget::ReadOnly,
            _ => OverBudget::Refuse,
        },
        cut: budget.cut,
    });
    let cap = budget.as_ref().map(|budget| Cap {
        nano: budget.usd.map(|usd| usd.0.unsigned_abs()),
        tokens: budget.tokens,
        per: budget.per,
        soft: matches!(budget.over, OverBudget::Downgrade(_)),
        cut: budget.cut,
    });
    let mut limits = tenant.rate_limit.unwrap_or_default();
    let by_token = (claimed && tenant.tier.is_none()).then(|| ByToken {
        own: scope(registry, ScopeKind::Tenant, &tenant.at.name, &limits, cap),
        tiers: tiers
            .iter()
            .map(|tier| {
                let name = format!("{}\0{}", tenant.at.name, tier.name);
                let of_tier = tier.limits.clone().beside(&limits);
                scope(registry, ScopeKind::TenantTier, &name, &of_tier, None)
            })
            .collect(),
    });
    if let Some(tier) = links.tier {
        limits = limits.or(&tiers[tier].limits);
    }
    let model_limits = tenant.model_limits.iter().zip(links.models).filter_map(|(of, model)| {
        let name = format!("{}\0{}", tenant.at.name, of.0.name);
        Some((model?, scope(registry, ScopeKind::TenantModel, &name, &of.1, None)?))
    });
    let model_limits = model_limits.collect();
    Ok(Tenant {
        limits: scope(registry, ScopeKind::Tenant, &tenant.at.name, &limits, cap),
        by_token,
        model_limits,
        name: Arc::clone(&row.name),
        series: row.series,
        tier: links.tier,
        models: tenant.models.into_iter().map(|(pattern, _)| pattern).collect(),
        deny_models: tenant.deny_models,
        regions: tenant.regions,
        reserve: tenant.reserve,
        budget,
        row,
    })
}

fn route_of(route: RouteSpec, links: RouteLinks, registry: &mut Registry) -> Result<Route, Full> {
    let limits = route.rate_limit.unwrap_or_default();
    let limits = scope(registry, ScopeKind::Route, &route.at.name, &limits, None);
    Ok(Route {
        series: registry.series(Kind::Route, &route.at.name)?,
        name: Arc::from(route.at.name),
        matches: route.matches,
        pool: links.pool,
        strategy: links.strategy,
        candidates: links.candidates,
        sticky: route.sticky,
        retry: route.retry,
        heartbeat: route.heartbeat,
        tokenizer: None,
        limits,
        queue: route.queue,
        canary: route.canary.map(|canary| Canary {
            candidate: Arc::from(canary.candidate.name),
            baseline: Arc::from(canary.baseline.name),
            steps: canary.steps,
            error_rate: canary.error_rate,
            p99_ratio: canary.p99_ratio,
            min_requests: canary.min_requests,
        }),
        shadow: route.shadow.zip(links.shadow_pool).map(|(shadow, pool)| Shadow {
            pool,
            sample: shadow.sample,
            promote: shadow.promote,
        }),
        units: route.units,
        admission: route.admission,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_versions_first_and_members_second() {
        let split =
            |versions: &[u32], members: &[(Option<usize>, u32)]| share_out(versions, members);
        assert_eq!(split(&[90, 10], &[(Some(0), 1), (Some(1), 1)]), [9, 1]);
        // Three of v1 share 90, one of v2 has 10: 30, 30, 30, 10.
        let members = [(Some(0), 1), (Some(0), 1), (Some(0), 1), (Some(1), 7)];
        assert_eq!(split(&[90, 10], &members), [3, 3, 3, 1]);
        assert_eq!(split(&[1, 0], &[(Some(0), 2), (Some(1), 5), (None, 9)]), [1, 0, 0]);
        assert_eq!(split(&[1, 1], &[(Some(0), 0), (Some(1), 1)]), [0, 1]);
        assert_eq!(split(&[0], &[(Some(0), 1)]), [0]);
    }

    #[test]
    fn shares_are_right_to_a_millionth_where_they_do_not_come_out_even() {
        let primes = [999_983, 999_979, 999_961, 999_959, 999_953, 999_931];
        let members: Vec<(Option<usize>, u32)> =
            (0..6).flat_map(|v| [(Some(v), primes[v]), (Some(v), 1)]).collect();
        let versions = [1_000_000, 7, 999_999, 3, 500_000, 1];
        let shares = share_out(&versions, &members);
        let sum: u64 = shares.iter().map(|&share| u64::from(share)).sum();
        let whole: u64 = versions.iter().map(|&weight| u64::from(weight)).sum();
        for (version, &weight) in versions.iter().enumerate() {
            let got = f64::from(shares[2 * version]) / sum as f64;
            let want = f64::from(weight) / whole as f64;
            assert!((got - want).abs() < 1e-6, "version {version}: {got} for {want}");
        }
        assert!(shares.iter().all(|&share| share > 0));
    }
}
