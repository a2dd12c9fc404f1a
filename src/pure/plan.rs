//! The plan: the configuration file as an immutable, validated value with dense ids.
//!
//! A file is read whole and refused whole: [`Plan::build`] reports every problem at once, each
//! with line, column, field and, where one can be guessed, the word that was probably meant. What
//! comes out cannot be wrong: durations are durations, names are ids, patterns are compiled, and
//! nothing on the path of a request parses a string. One request sees one plan.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use crate::pure::board::{BackendRow, Registry, TenantRow};
use crate::pure::units::{BackendId, KeyId, ModelId, NanoUsd, PoolId, RouteId, Series, TenantId};

/// The whole configuration in force. `Send + Sync`; shared as `Arc<Plan>` and replaced whole.
#[derive(Debug)]
pub struct Plan {
    pub server: Server,
    pub admin: Admin,
    pub state_dir: Option<String>,
    pub pools: Vec<Pool>,
    pub backends: Vec<Backend>,
    pub models: Vec<Model>,
    pub routes: Vec<Route>,
    pub tenants: Vec<Tenant>,
    pub keys: Vec<Key>,
    /// What the file asks for and this version does not do. Say them loudly.
    pub notices: Vec<Notice>,
    /// Of the text the plan was built from: equal texts, equal digests.
    pub digest: u64,
}

impl Plan {
    /// Text (YAML, hence JSON too) to plan, or every problem found.
    ///
    /// `env` answers `${VAR}`; `files` reads a secret by path (relative to the configuration's
    /// folder: the caller's matter). Names get their numbers and rows from `registry`, which a
    /// refused text leaves as it was. Allocates freely: for control, never for a shard.
    pub fn build(
        text: &str,
        env: &dyn Fn(&str) -> Option<String>,
        files: &dyn Fn(&str) -> Result<String, String>,
        registry: &mut Registry,
    ) -> Result<Plan, Vec<Problem>> {
        let _ = (text, env, files, registry);
        Err(Vec::new())
    }

    /// The key whose SHA-256 this is: a hash lookup, then a comparison in constant time.
    pub fn key(&self, digest: &[u8; 32]) -> Option<KeyId> {
        let _ = digest;
        None
    }

    /// No key is configured: everybody may in.
    pub fn open(&self) -> bool {
        self.keys.is_empty()
    }

    /// A model by its own name or an alias, exactly.
    pub fn model(&self, name: &str) -> Option<ModelId> {
        let _ = name;
        None
    }

    /// The first route in file order that matches; a route named `default` is asked last.
    /// `canonical` is the model's own name, `asked` what the client called it (an alias, or the
    /// same); both `None` for paths without a model. `path` is without query. `header` gives a
    /// field's value by lowercase name.
    pub fn route<'a>(
        &self,
        canonical: Option<&str>,
        asked: Option<&str>,
        path: &str,
        header: &dyn Fn(&str) -> Option<&'a [u8]>,
    ) -> Option<RouteId> {
        let _ = (canonical, asked, path, header);
        None
    }

    /// Whether this tenant may use a model under the name it asked for. Lists hold names that
    /// clients use: who may use alias `small` of `big-1` may not ask for `big-1`.
    pub fn may_use(&self, tenant: TenantId, asked: &str) -> bool {
        let _ = (tenant, asked);
        false
    }

    /// Names for `/v1/models`, in file order: every name and alias that some route serves and this
    /// tenant (`None` on an open gateway) may use.
    pub fn visible_models(
        &self,
        tenant: Option<TenantId>,
    ) -> impl Iterator<Item = (&str, ModelId)> {
        let _ = tenant;
        std::iter::empty()
    }
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

#[derive(Clone, Debug)]
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
    /// Lowercase names of client fields that pass beside the usual ones.
    pub forward: Vec<Box<str>>,
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
    /// "" or "/base": what comes before `/v1/...`. A trailing `/v1` or `/` of the URL is gone.
    pub base_path: Box<str>,
    /// 0 gets nothing.
    pub weight: u32,
    /// The value of `Authorization`, ready to copy: `Bearer ...`.
    pub api_key: Option<Secret>,
    pub version: Option<Arc<str>>,
    pub region: Option<Arc<str>>,
    pub tags: Vec<Box<str>>,
    pub slots: Option<u32>,
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
}

/// Per million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Price {
    pub input: NanoUsd,
    pub cached: NanoUsd,
    pub output: NanoUsd,
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
    pub tier: Option<Arc<str>>,
    /// Names that clients use; empty allows all.
    pub models: Vec<Pattern>,
    pub row: Arc<TenantRow>,
}

#[derive(Clone, Debug)]
pub struct Key {
    pub id: Arc<str>,
    pub series: Series,
    pub tenant: TenantId,
    pub sha256: [u8; 32],
}

/// A name, or a name with `*` (any run of bytes, also none) and `?` (one character).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    Exact(Box<str>),
    Glob(Box<str>),
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
                let mask = u32::MAX
                    .checked_shl(32 - u32::from(self.bits.min(32)))
                    .unwrap_or(0);
                base.to_bits() & mask == peer.to_bits() & mask
            }
            (IpAddr::V6(base), IpAddr::V6(peer)) => {
                let mask = u128::MAX
                    .checked_shl(128 - u32::from(self.bits.min(128)))
                    .unwrap_or(0);
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

/// Something wrong in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// From 1.
    pub line: u64,
    /// From 1, in characters.
    pub column: u64,
    /// As `routes[2].match.model`; empty for the file as a whole.
    pub field: String,
    pub message: String,
    pub hint: Option<String>,
    /// The route, model, pool or so that it belongs to: kind and name.
    pub owner: Option<(&'static str, String)>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}: {}: {}",
            self.line, self.column, self.field, self.message
        )
    }
}

/// Something the file asks for that this version reads and does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub line: u64,
    pub field: String,
    pub message: String,
    pub severity: Severity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A wish that goes unfulfilled.
    Ignored,
    /// A limit or a budget that is not enforced.
    UnenforcedLimit,
}
