//! The plan: the configuration file as an immutable, validated value with dense ids.
//!
//! A file is read whole and refused whole: [`Plan::build`] reports every problem at once, each
//! with line, column, field and, where one can be guessed, the word that was probably meant. What
//! comes out cannot be wrong: durations are durations, names are ids, patterns are compiled, and
//! nothing on the path of a request parses a string. One request sees one plan.

mod check;
mod problem;
mod read;
mod spec;
mod terms;
mod tree;
mod value;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::FixedState;

pub use problem::{Notice, Problem, Severity, summary};
pub use terms::*;

use crate::pure::board::{BackendRow, Registry, TenantRow};
use crate::pure::fields::Forward;
use crate::pure::h1::BasePath;
use crate::pure::jwt::Verified;
use crate::pure::limit::{Scope, Scopes};
use crate::pure::tokens::{Tokenizer, Vocabulary};
use crate::pure::units::{BackendId, KeyId, ModelId, NanoUsd, PoolId, RouteId, Series, TenantId};

/// Fields that are read and checked and then not acted on by this version. Whoever builds one of
/// them deletes its row.
const NOT_YET: &[NotYet] = &[
    NotYet::ignored("server.gpu_cpu", &["auto"]),
    NotYet::ignored("pools.*.dialect", &["openai"]),
    NotYet::ignored("pools.*.breaker", &[]),
    NotYet::ignored("pools.*.health", &[]),
    NotYet::ignored("pools.*.metrics.scrape", &[]),
    NotYet::ignored("pools.*.metrics.kind", &["none"]),
    NotYet::ignored("pools.*.sleep", &[]),
    NotYet::ignored("pools.*.backends[].gpu", &[]),
    NotYet::ignored("pools.*.backends[].http", &["1"]),
    NotYet::ignored("models.*.context", &[]),
    NotYet::ignored("models.*.kv", &[]),
    NotYet::ignored("models.*.fallback", &[]),
    NotYet::ignored("routes[].match.tier", &[]),
    NotYet::ignored("routes[].match.profile", &[]),
    NotYet::ignored("routes[].match.compliance", &[]),
    NotYet::ignored("routes[].match.prompt_tokens", &[]),
    NotYet {
        shape: "routes[].strategy",
        except: &[
            "weighted-round-robin",
            "weighted_round_robin",
            "least-requests",
            "least_requests",
            "weighted-split",
            "weighted_split",
            "cost",
            "cost_optimized",
        ],
        severity: Severity::Ignored,
        message: "not one that this version has; it picks by least-requests instead",
    },
    NotYet::ignored("routes[].queue", &[]),
    NotYet::ignored("routes[].canary", &[]),
    NotYet::ignored("routes[].shadow", &[]),
    NotYet::ignored("routes[].units", &[]),
    NotYet::limit("routes[].admission"),
    NotYet::ignored("tiers.*.priority", &["normal"]),
    NotYet::ignored("tenants.*.regions", &[]),
];

/// A row of [`NOT_YET`].
struct NotYet {
    /// The field, `*` for names and `[]` for numbers.
    shape: &'static str,
    /// Values that ask for nothing.
    except: &'static [&'static str],
    severity: Severity,
    message: &'static str,
}

impl NotYet {
    const fn ignored(shape: &'static str, except: &'static [&'static str]) -> NotYet {
        let message = "read but not acted on by this version";
        NotYet { shape, except, severity: Severity::Ignored, message }
    }

    const fn limit(shape: &'static str) -> NotYet {
        let message = "read but NOT ENFORCED by this version: nothing is limited by it";
        NotYet { shape, except: &[], severity: Severity::UnenforcedLimit, message }
    }
}

/// The whole configuration in force. `Send + Sync`; shared as `Arc<Plan>` and replaced whole.
#[derive(Debug)]
pub struct Plan {
    pub server: Server,
    pub admin: Admin,
    pub state_dir: Option<String>,
    pub state_sync: Sync,
    /// What happens to requests that are counted while the state cannot be written.
    pub unwritten: Unwritten,
    pub usage: Usage,
    pub alerts: Option<Alerts>,
    pub fleet: Option<Fleet>,
    pub pools: Vec<Pool>,
    pub backends: Vec<Backend>,
    /// Those of `models`, in file order, then those that only routes name.
    pub models: Vec<Model>,
    pub routes: Vec<Route>,
    pub tiers: Vec<Tier>,
    pub tenants: Vec<Tenant>,
    pub keys: Vec<Key>,
    /// Whose tokens are taken as keys; each `iss` once.
    pub issuers: Vec<Issuer>,
    /// Keys were made at run time, even if all of them have been revoked.
    made_keys: bool,
    pub global: Option<Scope>,
    /// What the file asks for and this version does not do, and advice. Say them loudly.
    pub notices: Vec<Notice>,
    /// Of the text the plan was built from (FNV-1a): equal texts, equal digests, on any machine.
    /// Variables and secret files are not part of it.
    pub digest: u64,
    lookup: Lookup,
}

/// Names to ids. Seeds are fixed: the keys come from the operator's file, so that no stranger can
/// make them collide.
#[derive(Debug, Default)]
struct Lookup {
    /// First eight bytes of the digest and the key, sorted.
    keys: Vec<(u64, KeyId)>,
    models: HashMap<Box<str>, ModelId, FixedState>,
    tenants: HashMap<Box<str>, TenantId, FixedState>,
    /// Routes that ask for exact names only, by each of those; ascending.
    by_model: HashMap<Box<str>, Vec<RouteId>, FixedState>,
    /// All other routes but `default`; ascending.
    general: Vec<RouteId>,
    default: Option<RouteId>,
    /// Names and aliases that some route may serve, in file order.
    visible: Vec<(Box<str>, ModelId)>,
}

impl Plan {
    /// Text (YAML, hence JSON too) to plan, or every problem found, in file order.
    ///
    /// `env` answers `${VAR}`; `files` reads a secret or a tokenizer by path (relative to the
    /// configuration's folder: the caller's matter). Names get their numbers and rows from `registry`, which a
    /// refused text leaves as it was. Allocates freely: for control, never for a shard.
    ///
    /// # Errors
    /// Every problem, never none.
    pub fn build(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
        files: &dyn Fn(&str) -> Result<String, String>,
        registry: &mut Registry,
    ) -> Result<Plan, Vec<Problem>> {
        Plan::build_with(text, &MadeKeys::default(), env, files, registry)
    }

    /// The same with keys that were made at run time. One that the file makes impossible (its id or
    /// digest is taken, its tenant is gone) is left out and said.
    ///
    /// # Errors
    /// Every problem of the text, never none.
    pub fn build_with(
        text: &str,
        made: &MadeKeys,
        env: &dyn Fn(&str) -> Option<String>,
        files: &dyn Fn(&str) -> Result<String, String>,
        registry: &mut Registry,
    ) -> Result<Plan, Vec<Problem>> {
        let mut problems = Vec::new();
        let root = tree::parse(text, &mut problems);
        let mut reader = read::Reader::new(env, files, NOT_YET, problems);
        let plan = root
            .as_ref()
            .and_then(|root| spec::read(&mut reader, root))
            .map(|mut spec| {
                made.add_to(&mut spec, &mut reader);
                spec
            })
            .and_then(|spec| check::plan(&mut reader, spec, digest(text), registry));
        let mut problems = reader.problems;
        problems.sort_by_key(|problem| (problem.line, problem.column));
        match plan {
            Some(plan) if problems.is_empty() => Ok(Plan { made_keys: made.ever, ..plan }),
            _ => Err(problems),
        }
    }

    /// The key whose SHA-256 this is: a search for its first bytes, then a comparison of the whole
    /// in constant time.
    pub fn key(&self, digest: &[u8; 32]) -> Option<KeyId> {
        let prefix = prefix(digest);
        let from = self.lookup.keys.partition_point(|&(other, _)| other < prefix);
        self.lookup.keys[from..]
            .iter()
            .take_while(|&&(other, _)| other == prefix)
            .map(|&(_, id)| id)
            .find(|&id| same(&self.keys[id.index()].sha256, digest))
    }

    /// No key and no issuer of tokens is configured, and no key was ever made at run time: everybody
    /// may in.
    pub fn open(&self) -> bool {
        self.keys.is_empty() && self.issuers.is_empty() && !self.made_keys
    }

    /// Whose request it is whose token says this, and the tier that counts, if it is the token's.
    ///
    /// The file's word on a tenant's tier stands: a claim counts for tenants to whom the file gives
    /// none. One that names no tier of the file is refused, because no tier may be no limit.
    ///
    /// # Errors
    /// There is no such tenant, or no such tier.
    pub fn bearer(&self, said: &Verified) -> Result<(TenantId, Option<usize>), Unknown> {
        let tenant = match &said.tenant {
            Some(name) => self.lookup.tenants.get(name).copied(),
            None => self.issuers[said.issuer].default_tenant,
        };
        let tenant = tenant.ok_or(Unknown::Tenant)?;
        let tier = match (&self.tenants[tenant.index()].by_token, &said.tier) {
            (Some(_), Some(name)) => {
                let known = self.tiers.iter().position(|tier| *tier.name == **name);
                Some(known.ok_or(Unknown::Tier)?)
            }
            _ => None,
        };
        Ok((tenant, tier))
    }

    /// A model by its own name or an alias, exactly.
    pub fn model(&self, name: &str) -> Option<ModelId> {
        self.lookup.models.get(name).copied()
    }

    /// The first route in file order that matches; a route named `default` is asked last.
    ///
    /// `canonical` is the model's own name, `asked` what the client called it (an alias, or the
    /// same); a route may name either. Both are `None` for paths without a model, and for a model
    /// that [`Plan::model`] does not know give `asked` alone. `path` is without query. `header`
    /// gives a field's value by lowercase name.
    ///
    /// Costs two hash lookups, then one check per route that names the model or names none
    /// exactly; no allocation.
    pub fn route<'a>(
        &self,
        canonical: Option<&str>,
        asked: Option<&str>,
        path: &str,
        header: &dyn Fn(&str) -> Option<&'a [u8]>,
    ) -> Option<RouteId> {
        let named = |name: Option<&str>| -> &[RouteId] {
            name.and_then(|name| self.lookup.by_model.get(name)).map_or(&[], Vec::as_slice)
        };
        let other = canonical.filter(|&name| asked != Some(name));
        // Three ascending lists, merged: file order decides.
        let mut lists = [named(asked), named(other), &self.lookup.general];
        let mut next = || {
            let least = lists.iter().filter_map(|list| list.first()).min().copied()?;
            for list in &mut lists {
                if list.first() == Some(&least) {
                    *list = &list[1..];
                }
            }
            Some(least)
        };
        let fits =
            |id: &RouteId| self.routes[id.index()].matches.fits(canonical, asked, path, header);
        std::iter::from_fn(&mut next).chain(self.lookup.default).find(fits)
    }

    /// Whether this tenant may use a model under the name it asked for. Lists hold names that
    /// clients use: who may use alias `small` of `big-1` may not ask for `big-1`. What is denied is
    /// so under every name: the one asked for and the model's own.
    pub fn may_use(&self, tenant: TenantId, asked: &str) -> bool {
        let tenant = &self.tenants[tenant.index()];
        self.allows(&tenant.models, &tenant.deny_models, asked)
    }

    /// The same for a key, whose lists narrow its tenant's.
    pub fn key_may_use(&self, key: KeyId, asked: &str) -> bool {
        let key = &self.keys[key.index()];
        self.may_use(key.tenant, asked) && self.allows(&key.models, &key.deny_models, asked)
    }

    fn allows(&self, allow: &[Pattern], deny: &[Pattern], asked: &str) -> bool {
        let one = |patterns: &[Pattern], name: &str| {
            patterns.iter().any(|pattern| pattern.matches(name.as_bytes()))
        };
        let own = match deny {
            [] => None,
            _ => self.model(asked).map(|model| &*self.models[model.index()].name),
        };
        (allow.is_empty() || one(allow, asked))
            && !one(deny, asked)
            && !own.is_some_and(|own| one(deny, own))
    }

    /// What prompts of this model on this route are counted with; `None` estimates them.
    pub fn vocabulary(&self, model: Option<ModelId>, route: RouteId) -> Option<&Vocabulary> {
        let of_model = || model.map(|model| &self.models[model.index()].tokenizer);
        match self.routes[route.index()].tokenizer.as_ref().or_else(of_model)? {
            Tokenizer::Auto => None,
            Tokenizer::Exact(vocabulary) => Some(vocabulary),
        }
    }

    /// The limits that a request stands under. `tier` is one that [`Plan::bearer`] gave.
    pub fn scopes(
        &self,
        key: Option<KeyId>,
        tenant: Option<TenantId>,
        tier: Option<usize>,
        model: Option<ModelId>,
        route: RouteId,
    ) -> Scopes<'_> {
        let tenant = tenant.map(|tenant| &self.tenants[tenant.index()]);
        let by_token = tenant.and_then(|tenant| tenant.by_token.as_ref()).zip(tier);
        Scopes::new([
            key.and_then(|key| self.keys[key.index()].limits.as_ref()),
            tenant.zip(model).and_then(|(tenant, model)| tenant.of_model(model)),
            by_token.and_then(|(by_token, tier)| by_token.tiers.get(tier)?.as_ref()),
            match by_token {
                Some((by_token, _)) => by_token.own.as_ref(),
                None => tenant.and_then(|tenant| tenant.limits.as_ref()),
            },
            self.routes[route.index()].limits.as_ref(),
            model.and_then(|model| self.models[model.index()].limits.as_ref()),
            self.global.as_ref(),
        ])
    }

    /// Every scope that is limited.
    pub fn all_scopes(&self) -> impl Iterator<Item = &Scope> {
        let scopes = (self.keys.iter().map(|key| &key.limits))
            .chain(self.tenants.iter().map(|tenant| &tenant.limits))
            .chain(self.routes.iter().map(|route| &route.limits))
            .chain(self.models.iter().map(|model| &model.limits))
            .chain([&self.global]);
        let by_model = self.tenants.iter().flat_map(|tenant| &tenant.model_limits);
        let by_token = self.tenants.iter().filter_map(|tenant| tenant.by_token.as_ref());
        let by_tier = by_token.flat_map(|by_token| by_token.tiers.iter().flatten());
        scopes.flatten().chain(by_model.map(|(_, scope)| scope)).chain(by_tier)
    }

    /// Whether anything is counted over a day or longer.
    pub fn counts_windows(&self) -> bool {
        self.all_scopes().any(|scope| Scopes::of(scope).count_windows())
    }

    /// Names for `/v1/models`, in file order: every name and alias that some route may serve and
    /// whoever asks may use.
    pub fn visible_models(
        &self,
        may: impl Fn(&str) -> bool,
    ) -> impl Iterator<Item = (&str, ModelId)> {
        let visible = self.lookup.visible.iter();
        visible.map(|(name, id)| (name.as_ref(), *id)).filter(move |(name, _)| may(name))
    }
}

/// What a good token names and the plan does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    Tenant,
    Tier,
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo).
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn prefix(digest: &[u8; 32]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    u64::from_be_bytes(first)
}

/// Looks at every byte whatever the earlier ones were.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    let difference = a.iter().zip(b).fold(0, |sum, (a, b)| black_box(sum | (a ^ b)));
    difference == 0
}

#[derive(Clone, Debug)]
pub struct Server {
    pub listen: Vec<Listen>,
    pub shards: Shards,
    pub gpu_cpu: Option<usize>,
    pub bounds: Bounds,
    /// For a whole request head to arrive.
    pub head_timeout: Duration,
    /// A kept-alive connection without a request.
    pub idle_timeout: Duration,
    /// Slowest request body that is tolerated, in bytes per second; 0 tolerates all.
    pub body_rate: u64,
    /// A client that takes nothing for so long is cut.
    pub send_timeout: Duration,
    pub half_close: HalfClose,
    /// Peers whose `X-Forwarded-For` is believed.
    pub trust_forwarded: Vec<IpNet>,
    /// How long draining waits for live streams.
    pub grace: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    Tcp(SocketAddr),
    /// A socket handed over by systemd, by name.
    Fd(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shards {
    Auto,
    Count(u32),
    /// One shard on each of these CPUs; never empty, no duplicates.
    Cpus(Vec<usize>),
}

/// Nothing that strangers can grow is without one of these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub head: usize,
    pub headers: usize,
    pub body: u64,
    /// All buffered bodies together.
    pub buffered: u64,
    pub connections: u64,
}

/// What a client's FIN after its request means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HalfClose {
    Abort,
    Serve,
}

#[derive(Clone, Debug, Default)]
pub struct Admin {
    /// `None`: no admin port.
    pub listen: Option<AdminListen>,
    pub token: Option<Secret>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminListen {
    Tcp(SocketAddr),
    Unix(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
    DashScope,
}

#[derive(Clone, Debug)]
pub struct Pool {
    pub name: Arc<str>,
    pub series: Series,
    pub dialect: Dialect,
    /// Never empty; file order.
    pub backends: Vec<BackendId>,
    pub timeouts: Timeouts,
    /// Idle connections kept per backend, all shards together.
    pub idle: usize,
    pub idle_for: Duration,
    /// Connections per backend, all shards together.
    pub max: usize,
    /// How long a request waits for a connection when `max` are busy.
    pub wait: Duration,
    /// Client fields that pass beside the usual ones.
    pub forward: Forward,
    pub breaker: Option<Breaker>,
    pub health: Option<Health>,
    pub scrape: Option<Scrape>,
    pub sleep: Option<Sleep>,
}

/// `None` is off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub connect: Duration,
    /// Streams: until the first content.
    pub first_token: Option<Duration>,
    /// Added to `first_token` for each started thousand prompt tokens.
    pub first_token_per_1k: Option<Duration>,
    /// Plain replies: until the head.
    pub answer: Option<Duration>,
    /// Streams: between two content events.
    pub chunk: Option<Duration>,
    pub total: Option<Duration>,
}

#[derive(Clone, Debug)]
pub struct Backend {
    pub name: Arc<str>,
    pub series: Series,
    pub pool: PoolId,
    pub host: Host,
    pub port: u16,
    /// The `Host` field: the authority as the URL writes it.
    pub host_header: Box<str>,
    /// What the URL puts before the client's path; `/v1`, `/v1/`, `/` and nothing are the same.
    pub base_path: BasePath,
    /// 0 gets nothing.
    pub weight: u32,
    /// The value of `Authorization`, ready to copy: `Bearer ...`.
    pub api_key: Option<Secret>,
    pub version: Option<Arc<str>>,
    pub region: Option<Arc<str>>,
    pub tags: Vec<Box<str>>,
    /// Attempts at a time.
    pub slots: Option<u32>,
    pub cost: Option<Price>,
    pub gpu: Option<Gpu>,
    pub row: Arc<BackendRow>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    Ip(IpAddr),
    /// Control resolves it.
    Name(Box<str>),
}

#[derive(Clone, Debug)]
pub struct Model {
    /// The name the backend is sent.
    pub name: Arc<str>,
    pub series: Series,
    pub aliases: Vec<Box<str>>,
    pub context: Option<u64>,
    pub max_output: Option<u64>,
    pub price: Option<Price>,
    pub tokenizer: Tokenizer,
    pub kv: Option<Kv>,
    pub limits: Option<Scope>,
    /// Tried in this order; no chain leads back to its start.
    pub fallback: Vec<Fallback>,
}

/// Per million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    pub input: NanoUsd,
    pub cached: NanoUsd,
    pub output: NanoUsd,
}

impl Price {
    /// What so many tokens cost, in billionths of a dollar, rounded up. `cached` are of `input`;
    /// more than that are taken for as many.
    pub fn of(&self, input: u64, cached: u64, output: u64) -> u64 {
        let cached = cached.min(input);
        let part = |tokens: u64, price: NanoUsd| {
            // The file takes no price below zero.
            u128::from(tokens) * u128::from(price.0.unsigned_abs())
        };
        let sum = part(input - cached, self.input)
            .saturating_add(part(cached, self.cached))
            .saturating_add(part(output, self.output));
        u64::try_from(sum.div_ceil(1_000_000)).unwrap_or(u64::MAX)
    }
}

#[derive(Clone, Debug)]
pub struct Route {
    pub name: Arc<str>,
    pub series: Series,
    pub matches: Match,
    pub pool: PoolId,
    pub strategy: Strategy,
    /// Who can be picked, in the pool's order, none with weight 0; never empty. Under
    /// `weighted-split` the weights are those of the versions, shared out among their backends.
    pub candidates: Vec<Candidate>,
    /// Lowercase name of the field whose value keeps a client on one backend.
    pub sticky: Option<Box<str>>,
    pub retry: Retry,
    pub heartbeat: Option<Duration>,
    /// In place of the model's.
    pub tokenizer: Option<Tokenizer>,
    pub limits: Option<Scope>,
    pub queue: Option<Queue>,
    pub canary: Option<Canary>,
    pub shadow: Option<Shadow>,
    pub units: Vec<UnitSpec>,
    pub admission: Option<Admission>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub backend: BackendId,
    pub weight: u32,
}

/// All that are given must hold; none given matches everything.
#[derive(Clone, Debug, Default)]
pub struct Match {
    pub models: Vec<Pattern>,
    /// Lowercase name; the value must fit one of the patterns.
    pub headers: Vec<(Box<str>, Vec<Pattern>)>,
    pub paths: Vec<Pattern>,
    /// Not looked at by this version.
    pub conditions: Conditions,
}

impl Match {
    fn fits<'a>(
        &self,
        canonical: Option<&str>,
        asked: Option<&str>,
        path: &str,
        header: &dyn Fn(&str) -> Option<&'a [u8]>,
    ) -> bool {
        let one = |patterns: &[Pattern], value: &[u8]| {
            patterns.iter().any(|pattern| pattern.matches(value))
        };
        let model =
            || [asked, canonical].iter().flatten().any(|name| one(&self.models, name.as_bytes()));
        (self.models.is_empty() || model())
            && (self.paths.is_empty() || one(&self.paths, path.as_bytes()))
            && self
                .headers
                .iter()
                .all(|(name, patterns)| header(name).is_some_and(|value| one(patterns, value)))
    }

    /// No condition at all: whatever comes is served here.
    fn catches_all(&self) -> bool {
        self.models.is_empty()
            && self.headers.is_empty()
            && self.paths.is_empty()
            && self.conditions == Conditions::default()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    WeightedRoundRobin,
    LeastRequests,
    WeightedSplit,
    ConsistentHash,
    Prefix,
    Adaptive,
    LeastQueued,
    LeastLatency,
    MostAvailable,
    Cost,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Retry {
    /// Tries after the first.
    pub attempts: u32,
    /// Retries as a share of requests, 0 to 1.
    pub budget: f64,
}

#[derive(Clone, Debug)]
pub struct Tenant {
    pub name: Arc<str>,
    pub series: Series,
    /// Index into [`Plan::tiers`]; the tier named `default` where the file says none.
    pub tier: Option<usize>,
    /// Names that clients use; empty allows all.
    pub models: Vec<Pattern>,
    pub deny_models: Vec<Pattern>,
    pub regions: Vec<Box<str>>,
    pub reserve: Reserve,
    pub budget: Option<Budget>,
    /// Those of its tier, with its own in their place, and its budget.
    pub limits: Option<Scope>,
    /// In the place of those, where a token names the tier; `None` where none may.
    pub by_token: Option<ByToken>,
    /// Beside those, for its use of single models.
    pub model_limits: Vec<(ModelId, Scope)>,
    pub row: Arc<TenantRow>,
}

impl Tenant {
    fn of_model(&self, model: ModelId) -> Option<&Scope> {
        self.model_limits.iter().find(|(of, _)| *of == model).map(|(_, scope)| scope)
    }
}

#[derive(Clone, Debug)]
pub struct Key {
    pub id: Arc<str>,
    pub series: Series,
    pub tenant: TenantId,
    pub sha256: [u8; 32],
    /// These narrow the tenant's; empty allows what that allows.
    pub models: Vec<Pattern>,
    pub deny_models: Vec<Pattern>,
    pub limits: Option<Scope>,
}

/// Keys that were made at run time.
#[derive(Clone, Debug, Default)]
pub struct MadeKeys {
    /// Those that live: one JSON object each, with the fields of an element of `keys`.
    pub keys: Vec<String>,
    /// Some were made, even if none lives: the gateway is not open.
    pub ever: bool,
}

impl MadeKeys {
    /// What is wrong with a key, as `keys` would say it.
    ///
    /// # Errors
    /// Every problem.
    pub fn check(key: &str) -> Result<(), Vec<Problem>> {
        spec::made_key(key).map(drop)
    }

    fn add_to(&self, spec: &mut spec::Spec, reader: &mut read::Reader<'_>) {
        for text in &self.keys {
            let Ok(key) = spec::made_key(text) else { continue };
            let taken =
                |other: &spec::KeySpec| other.at.name == key.at.name || other.sha256 == key.sha256;
            let why = if spec.keys.iter().any(taken) {
                "its id or its digest is that of a key in the file"
            } else if !spec.tenants.iter().any(|tenant| tenant.at.name == key.tenant.name) {
                "the file has no such tenant any more"
            } else {
                spec.keys.push(key);
                continue;
            };
            let message = format!("key `{}`, made at run time, opens nothing: {why}", key.at.name);
            reader.notice(key.at.pos, "keys", message, Severity::Advice);
        }
    }
}

/// A name, or a name with `*` (any run of bytes, also none) and `?` (one character).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    Exact(Box<str>),
    Glob(Box<str>),
}

impl Pattern {
    /// Whether the whole of `text` fits. At worst the product of the two lengths; no allocation.
    pub fn matches(&self, text: &[u8]) -> bool {
        match self {
            Pattern::Exact(name) => name.as_bytes() == text,
            Pattern::Glob(glob) => fits(glob.as_bytes(), text),
        }
    }

    /// As the file writes it (`**` reads as `*`).
    pub fn as_str(&self) -> &str {
        match self {
            Pattern::Exact(text) | Pattern::Glob(text) => text,
        }
    }
}

/// Glob matching that goes back to the last star only: never exponential.
fn fits(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    // After the last star, and the end of what it has swallowed.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match glob.get(g) {
            Some(b'*') => {
                g += 1;
                star = Some((g, t));
            }
            Some(b'?') => {
                g += 1;
                t += char_bytes(&text[t..]);
            }
            Some(&byte) if byte == text[t] => {
                g += 1;
                t += 1;
            }
            _ => match &mut star {
                Some((after, swallowed)) => {
                    *swallowed += 1;
                    (g, t) = (*after, *swallowed);
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&byte| byte == b'*')
}

/// Bytes of the character that begins here; one where the text is no UTF-8 (a header's value).
fn char_bytes(text: &[u8]) -> usize {
    let more = text[1..].iter().take(3).take_while(|&&byte| byte & 0xc0 == 0x80).count();
    match text[0] {
        0xc2..=0xdf if more >= 1 => 2,
        0xe0..=0xef if more >= 2 => 3,
        0xf0..=0xf4 if more >= 3 => 4,
        _ => 1,
    }
}

/// An address range such as `10.0.0.0/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpNet {
    pub base: IpAddr,
    pub bits: u8,
}

impl IpNet {
    /// IPv4 peers on an IPv6 socket (`::ffff:10.0.0.1`) count as the IPv4 address they are.
    pub fn contains(&self, peer: IpAddr) -> bool {
        match (self.base, peer.to_canonical()) {
            (IpAddr::V4(base), IpAddr::V4(peer)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.bits.min(32))).unwrap_or(0);
                base.to_bits() & mask == peer.to_bits() & mask
            }
            (IpAddr::V6(base), IpAddr::V6(peer)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.bits.min(128))).unwrap_or(0);
                base.to_bits() & mask == peer.to_bits() & mask
            }
            _ => false,
        }
    }
}

/// A value that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<str>);

impl Secret {
    pub fn new(value: impl Into<Box<str>>) -> Secret {
        Secret(value.into())
    }

    /// The value itself, for the one place that writes it to a socket or compares it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}
