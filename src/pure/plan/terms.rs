//! Terms of the file that this version reads, checks and keeps, for the parts that will act on
//! them. See `NOT_YET` for which those are.

use std::sync::Arc;
use std::time::Duration;

use super::Secret;
use crate::pure::jwt::{KeySet, Rules};
use crate::pure::limit::{Per, Scope};
use crate::pure::units::{ModelId, NanoUsd, PoolId, Series, TenantId};

/// Limits as the file writes them, of a tier, a tenant, a key, a model, a route or the whole
/// gateway; `None` is no limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub rpm: Option<u64>,
    pub tpm: Option<u64>,
    /// Prompt tokens per minute.
    pub itpm: Option<u64>,
    /// Generated tokens per minute.
    pub otpm: Option<u64>,
    pub tpd: Option<u64>,
    pub concurrency: Option<u32>,
    /// How many of a minute's requests may come at once; the whole limit where absent.
    pub burst: Option<u64>,
    /// Never more than the limit in any sixty seconds.
    pub strict: Option<bool>,
    /// How long a request may wait for one that runs to end, where `concurrency` is full.
    pub limit_wait: Option<Duration>,
}

impl Limits {
    /// Whether nothing is limited.
    pub fn is_none(&self) -> bool {
        self.rpm.or(self.tpm).or(self.itpm).or(self.otpm).or(self.tpd).is_none()
            && self.concurrency.is_none()
    }

    /// These, without what `own` limits already.
    pub fn beside(self, own: &Limits) -> Limits {
        fn free<T>(value: Option<T>, own: &Option<T>) -> Option<T> {
            value.filter(|_| own.is_none())
        }
        Limits {
            rpm: free(self.rpm, &own.rpm),
            tpm: free(self.tpm, &own.tpm),
            itpm: free(self.itpm, &own.itpm),
            otpm: free(self.otpm, &own.otpm),
            tpd: free(self.tpd, &own.tpd),
            concurrency: free(self.concurrency, &own.concurrency),
            ..self
        }
    }

    /// These, and those of `other` where these say nothing.
    pub fn or(self, other: &Limits) -> Limits {
        Limits {
            rpm: self.rpm.or(other.rpm),
            tpm: self.tpm.or(other.tpm),
            itpm: self.itpm.or(other.itpm),
            otpm: self.otpm.or(other.otpm),
            tpd: self.tpd.or(other.tpd),
            concurrency: self.concurrency.or(other.concurrency),
            burst: self.burst.or(other.burst),
            strict: self.strict.or(other.strict),
            limit_wait: self.limit_wait.or(other.limit_wait),
        }
    }
}

/// A named set of limits.
#[derive(Clone, Debug)]
pub struct Tier {
    pub name: Arc<str>,
    pub limits: Limits,
    pub priority: Priority,
}

/// What limits a tenant whose tier a token names. Tiers are counted apart, each by its own limits;
/// what the tenant itself is limited by counts them all.
#[derive(Clone, Debug)]
pub struct ByToken {
    /// The tenant's own limits, and its budget.
    pub own: Option<Scope>,
    /// By index into [`super::Plan::tiers`].
    pub tiers: Vec<Option<Scope>>,
}

/// Whose tokens are taken as keys.
#[derive(Clone, Debug)]
pub struct Issuer {
    /// What logs say in the place of a key's id.
    pub name: Arc<str>,
    pub series: Series,
    pub rules: Rules,
    pub keys: KeySource,
    /// Whose the tokens are that name no tenant.
    pub default_tenant: Option<TenantId>,
}

/// Where an issuer's public keys are.
#[derive(Clone, Debug)]
pub enum KeySource {
    /// Looked at again when it changes.
    File {
        path: Box<str>,
        /// As they were when the plan was built.
        set: Arc<KeySet>,
    },
    Url {
        /// May hold a token.
        url: Secret,
        /// PEM: certificates to trust in the place of the machine's.
        ca: Option<Arc<str>>,
        every: Duration,
    },
}

impl KeySource {
    /// The same for the same place.
    pub fn place(&self) -> &str {
        match self {
            KeySource::File { path, .. } => path,
            KeySource::Url { url, .. } => url.expose(),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    Low,
    #[default]
    Normal,
    High,
}

/// How much of the expected output is reserved before a request is sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reserve {
    P50,
    #[default]
    P95,
    Max,
    None,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Budget {
    pub usd: Option<NanoUsd>,
    pub tokens: Option<u64>,
    pub per: Per,
    pub over: OverBudget,
    /// Streams that run into it are cut.
    pub cut: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverBudget {
    Refuse,
    Downgrade(ModelId),
    ReadOnly,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Breaker {
    pub failures: u32,
    pub window: Duration,
    pub open: Duration,
    pub probes: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    pub every: Duration,
    pub live: Option<Box<str>>,
    pub ready: Option<Box<str>>,
    /// Deep: ready while the engine's KV cache is filled below this share.
    pub kv_below: Option<f64>,
    /// Load: ready while the engine's queue is shorter.
    pub queue_below: Option<u32>,
    /// Failures in a row until down; successes until up.
    pub fall: u32,
    pub rise: u32,
}

/// Where an engine's own metrics are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scrape {
    pub path: Box<str>,
    pub every: Duration,
    pub kind: Engine,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Auto,
    Vllm,
    SgLang,
    Tgi,
    LlamaCpp,
    Dcgm,
    None,
}

/// Hot and cold models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sleep {
    pub after: Duration,
    pub sleep: Box<str>,
    pub wake: Box<str>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gpu {
    pub kind: Option<Box<str>>,
    pub nvml: Vec<u32>,
}

/// What a model's KV cache takes per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kv {
    pub layers: u32,
    pub heads: u32,
    pub dim: u32,
    pub bytes: u32,
    pub hidden: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    pub model: ModelId,
    pub reason: Box<str>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    pub max: u32,
    pub wait: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Canary {
    pub candidate: Arc<str>,
    pub baseline: Arc<str>,
    /// Weight in per cent, and how long it is held; the last may hold for ever.
    pub steps: Vec<(u32, Option<Duration>)>,
    pub error_rate: Option<f64>,
    pub p99_ratio: Option<f64>,
    pub min_requests: Option<u64>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Shadow {
    pub pool: PoolId,
    pub sample: f64,
    pub promote: Option<Promote>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promote {
    pub consecutive: u64,
    pub agree: f64,
    pub within: Duration,
}

/// A capability unit that a route wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnitSpec {
    PromptFilter {
        words: Box<str>,
        when: Vec<(Box<str>, Vec<super::Pattern>)>,
    },
    Redact {
        paths: Vec<Box<str>>,
        kinds: Vec<Box<str>>,
        when: Vec<(Box<str>, Vec<super::Pattern>)>,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Admission {
    pub headroom: Headroom,
    /// The share of the headroom that may be promised.
    pub reserve: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headroom {
    Kv,
    Nvml,
}

/// Several gateways that share limits.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// May hold a password.
    pub redis: Secret,
    pub name: Arc<str>,
    /// Of each limit, what this gateway may use by itself while Redis cannot be reached, 0 to 1.
    pub share: f64,
}

/// What happens to requests under a day's limit or a budget while what they use cannot be written to
/// `state.dir`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unwritten {
    /// They are served and counted in memory.
    #[default]
    Serve,
    /// They are refused once it has lasted for a while.
    Refuse,
}

/// Where a record of each request goes, beside the access log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub file: Option<UsageFile>,
    pub clickhouse: Option<ClickHouse>,
}

/// JSON lines; a file that has `bytes_max` is put aside, and so many of these are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageFile {
    pub path: Box<str>,
    pub bytes_max: u64,
    pub keep: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClickHouse {
    pub url: Box<str>,
    pub table: Box<str>,
    pub user: Option<Box<str>>,
    pub password: Option<Secret>,
    /// PEM.
    pub ca: Option<Arc<str>>,
}

/// Who is told when a budget is nearly spent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alerts {
    pub webhook: Secret,
    /// PEM.
    pub ca: Option<Arc<str>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sync {
    /// fsync every 50 ms.
    #[default]
    Group,
    /// What a request reserves is on disk before a backend is asked, and what it is charged before
    /// the client has the end of its answer.
    Always,
}

/// Conditions on a request beyond model, header and path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    pub tiers: Vec<Box<str>>,
    pub profiles: Vec<Box<str>>,
    pub compliance: Vec<Box<str>>,
    pub prompt_tokens_min: Option<u64>,
    pub prompt_tokens_max: Option<u64>,
}
