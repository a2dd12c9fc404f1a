//! The file, area by area, as it was written: names are still names. The order is that of the
//! file in the design; the code that reads an area is its schema.

mod exports;
mod issuers;
mod pools;
mod routes;

use std::sync::Arc;
use std::time::Duration;

use super::problem::{Problem, Severity};
use super::read::{Fields, Item, Named, Reader, shown};
use super::terms::{
    Admission, Alerts, Breaker, Gpu, Health, Kv, Limits, Priority, Promote, Queue, Reserve, Scrape,
    Sleep, Sync, UnitSpec, Unwritten, Usage,
};
use super::tree::{self, Node, Pos, Value};
use super::value::{self, Target};
use super::{
    Admin, AdminListen, Bounds, Dialect, HalfClose, Listen, Match, Pattern, Price, Retry, Secret,
    Server, Shards, Strategy, Timeouts,
};
use crate::pure::fields::Forward;
use crate::pure::limit::Per;
use crate::pure::units::NanoUsd;
pub(super) use issuers::IssuerSpec;

pub(super) struct Spec {
    pub server: ServerSpec,
    pub admin: AdminSpec,
    pub state_dir: Option<String>,
    pub state_sync: Sync,
    pub unwritten: Unwritten,
    pub usage: Usage,
    pub alerts: Option<Alerts>,
    pub fleet: Option<(Secret, String, f64)>,
    pub pools: Vec<PoolSpec>,
    pub models: Vec<ModelSpec>,
    pub routes: Vec<RouteSpec>,
    pub tiers: Vec<TierSpec>,
    pub tenants: Vec<TenantSpec>,
    pub keys: Vec<KeySpec>,
    pub issuers: Vec<IssuerSpec>,
    pub global: Option<Limits>,
}

pub(super) struct ServerSpec {
    pub server: Server,
    /// Where each of `server.listen` stands.
    pub places: Vec<Named>,
}

impl Default for ServerSpec {
    fn default() -> ServerSpec {
        let server = Server {
            listen: Vec::new(),
            shards: Shards::Auto,
            gpu_cpu: None,
            bounds: BOUNDS,
            head_timeout: CLIENT_TIMEOUTS.head,
            idle_timeout: CLIENT_TIMEOUTS.idle,
            body_rate: CLIENT_TIMEOUTS.body_rate,
            send_timeout: CLIENT_TIMEOUTS.send,
            half_close: HalfClose::Abort,
            trust_forwarded: Vec::new(),
            grace: Duration::from_mins(10),
        };
        ServerSpec { server, places: Vec::new() }
    }
}

#[derive(Default)]
pub(super) struct AdminSpec {
    pub admin: Admin,
    pub place: Option<Named>,
}

pub(super) struct PoolSpec {
    pub at: Named,
    pub dialect: Dialect,
    pub backends: Vec<BackendSpec>,
    /// Some backends could not be read: what refers to them is not wrong for that.
    pub partial: bool,
    pub timeouts: Timeouts,
    pub idle: usize,
    pub idle_for: Duration,
    pub max: usize,
    pub wait: Duration,
    pub forward: Forward,
    pub breaker: Option<Breaker>,
    pub health: Option<Health>,
    pub scrape: Option<Scrape>,
    pub sleep: Option<Sleep>,
}

pub(super) struct BackendSpec {
    pub at: Named,
    pub target: Target,
    pub weight: u32,
    pub api_key: Option<Secret>,
    pub version: Option<String>,
    pub region: Option<String>,
    pub tags: Vec<Box<str>>,
    pub slots: Option<u32>,
    pub cost: Option<Price>,
    pub gpu: Option<Gpu>,
}

pub(super) struct ModelSpec {
    pub at: Named,
    pub aliases: Vec<Named>,
    pub context: Option<u64>,
    pub max_output: Option<u64>,
    pub price: Option<Price>,
    pub tokenizer: Option<TokenizerSpec>,
    pub kv: Option<Kv>,
    pub rate_limit: Option<Limits>,
    pub fallback: Vec<(Named, String)>,
}

pub(super) enum TokenizerSpec {
    Auto,
    BuiltIn(String),
    /// What is in the file, and where that is named.
    File {
        at: Named,
        json: String,
    },
}

pub(super) struct RouteSpec {
    pub at: Named,
    pub matches: Match,
    pub pool: Named,
    pub strategy: Option<(Strategy, Pos)>,
    pub weights: Vec<(Named, u32)>,
    pub sticky: Option<Box<str>>,
    pub retry: Retry,
    pub heartbeat: Option<Duration>,
    pub tokenizer: Option<TokenizerSpec>,
    pub rate_limit: Option<Limits>,
    pub queue: Option<Queue>,
    pub canary: Option<CanarySpec>,
    pub shadow: Option<ShadowSpec>,
    pub units: Vec<UnitSpec>,
    pub admission: Option<Admission>,
}

pub(super) struct CanarySpec {
    pub candidate: Named,
    pub baseline: Named,
    pub steps: Vec<(u32, Option<Duration>)>,
    pub error_rate: Option<f64>,
    pub p99_ratio: Option<f64>,
    pub min_requests: Option<u64>,
}

pub(super) struct ShadowSpec {
    pub pool: Named,
    pub sample: f64,
    pub promote: Option<Promote>,
}

pub(super) struct TierSpec {
    pub at: Named,
    pub limits: Limits,
    pub priority: Priority,
}

pub(super) struct TenantSpec {
    pub at: Named,
    pub tier: Option<Named>,
    pub rate_limit: Option<Limits>,
    pub model_limits: Vec<(Named, Limits)>,
    pub models: Vec<(Pattern, Named)>,
    pub deny_models: Vec<Pattern>,
    pub regions: Vec<Box<str>>,
    pub reserve: Reserve,
    pub budget: Option<BudgetSpec>,
}

pub(super) struct BudgetSpec {
    pub usd: Option<NanoUsd>,
    pub tokens: Option<u64>,
    pub per: Per,
    pub over: Over,
    pub cut: bool,
}

pub(super) enum Over {
    Refuse,
    Downgrade(Named),
    ReadOnly,
}

pub(super) struct KeySpec {
    pub at: Named,
    pub tenant: Named,
    pub sha256: [u8; 32],
    pub rate_limit: Option<Limits>,
    pub models: Vec<Pattern>,
    pub deny_models: Vec<Pattern>,
}

/// A key that was made at run time, as one JSON object.
pub(super) fn made_key(text: &str) -> Result<KeySpec, Vec<Problem>> {
    let mut problems = Vec::new();
    let root = tree::parse(text, &mut problems);
    let no_file = |_: &str| Err("a key names no file".to_owned());
    let mut reader = Reader::new(&|_| None, &no_file, &[], problems);
    let key = root.as_ref().and_then(|root| routes::key(&mut reader, &Item::root(root)));
    match key {
        Some(key) if reader.problems.is_empty() => Ok(key),
        _ => Err(reader.problems),
    }
}

/// The whole file. `None`, or parts left out, only with problems noted.
pub(super) fn read<'a>(r: &mut Reader<'a>, root: &'a Node) -> Option<Spec> {
    r.fields(&Item::root(root), |r, f| {
        let server = f.need(r, "server", "at least `server: { listen: \"0.0.0.0:8080\" }`", server);
        let admin = f.get(r, "admin", admin).unwrap_or_default();
        let (state_dir, state_sync, unwritten) = f.get(r, "state", state).unwrap_or_default();
        let fleet = f.get(r, "fleet", fleet);
        let usage = f.get(r, "usage", exports::usage);
        let alerts = f.get(r, "alerts", exports::alerts);
        let pools = f.need(r, "pools", "name at least one pool of backends", |r, item| {
            if matches!(&item.node.value, Value::Map(entries) if entries.is_empty()) {
                r.wrong(item, "there is no pool here".to_owned(), None);
            }
            Some(area(r, "pool", item, pools::pool))
        });
        let models = f.get(r, "models", |r, item| Some(area(r, "model", item, pools::model)));
        let routes =
            f.need(r, "routes", "list at least one route: its match and its pool", |r, item| {
                let items = r.list(item);
                if items.is_empty() {
                    r.wrong(
                        item,
                        "there is no route here, so nothing would be served".to_owned(),
                        None,
                    );
                }
                Some(items.iter().filter_map(|item| routes::route(r, item)).collect::<Vec<_>>())
            });
        let tiers = f.get(r, "tiers", |r, item| Some(area(r, "tier", item, routes::tier)));
        let tenants = f.get(r, "tenants", |r, item| Some(area(r, "tenant", item, routes::tenant)));
        let keys = f.get(r, "keys", |r, item| {
            let items = r.list(item);
            Some(items.iter().filter_map(|item| routes::key(r, item)).collect::<Vec<_>>())
        });
        let issuers = f.get(r, "jwt", |r, item| Some(r.all(item, issuers::issuer)));
        let global = f.get(r, "global", routes::limits);
        // What is missing was reported; the rest is still checked against each other.
        if pools.is_none() {
            r.failed.push(("pool", EVERY_NAME.to_owned()));
        }
        let server = server.unwrap_or_default();
        listeners_differ(r, &server, &admin);
        Some(Spec {
            server,
            admin,
            state_dir,
            state_sync,
            unwritten,
            fleet,
            usage: usage.unwrap_or_default(),
            alerts,
            pools: pools.unwrap_or_default(),
            models: models.unwrap_or_default(),
            routes: routes.unwrap_or_default(),
            tiers: tiers.unwrap_or_default(),
            tenants: tenants.unwrap_or_default(),
            keys: keys.unwrap_or_default(),
            issuers: issuers.unwrap_or_default(),
            global,
        })
    })
}

/// In [`Reader::failed`]: the whole area could not be read, so any of its names may exist.
pub(super) const EVERY_NAME: &str = "*";

/// Every named member of an area by `read`, as its owner.
fn area<'a, T>(
    r: &mut Reader<'a>,
    kind: &'static str,
    item: &Item<'a>,
    read: impl Fn(&mut Reader<'a>, Named, &Item<'a>) -> Option<T>,
) -> Vec<T> {
    if !matches!(item.node.value, Value::Map(_)) {
        r.failed.push((kind, EVERY_NAME.to_owned()));
    }
    let mut members = Vec::new();
    for (at, item) in r.named(item) {
        let name = at.name.clone();
        match r.owned(kind, &name, |r| read(r, at, &item)) {
            Some(member) => members.push(member),
            None => r.failed.push((kind, name)),
        }
    }
    members
}

/// Reads an element of a list as the owner that its member `name` says.
fn by_member<'a, T>(
    r: &mut Reader<'a>,
    kind: &'static str,
    name: &str,
    item: &Item<'a>,
    read: impl FnOnce(&mut Reader<'a>, &Item<'a>) -> Option<T>,
) -> Option<T> {
    let owner = match &item.node.value {
        Value::Map(entries) => {
            entries.iter().find(|entry| entry.key == name).and_then(|entry| entry.node.scalar())
        }
        _ => None,
    };
    match owner {
        Some(owner) => r.owned(kind, owner, |r| read(r, item)),
        None => read(r, item),
    }
}

/// The fields of a member that may be nothing at all (`small: ~`).
fn fields_or_none<'a, T>(
    r: &mut Reader<'a>,
    item: &Item<'a>,
    read: impl FnOnce(&mut Reader<'a>, &mut Fields<'a>) -> Option<T>,
) -> Option<T> {
    static NOTHING: Node = Node { pos: Pos::START, value: Value::Map(Vec::new()) };
    match item.node.value {
        Value::Null => r.fields(&Item::root(&NOTHING), read),
        _ => r.fields(item, read),
    }
}

/// A list of names, or one.
fn words<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Vec<Box<str>>> {
    Some(r.all(item, |r, item| r.name(item).map(String::into_boxed_str)))
}

/// Shares of weights are computed in 64 bits; nobody needs finer ones than a millionth.
const WEIGHT_MAX: u32 = 1_000_000;

/// Far above every context window there is, and far below what overflows a sum.
const TOKENS_MAX: u64 = 1 << 40;

// ---- server, admin, state, fleet

fn server<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ServerSpec> {
    r.fields(item, |r, f| {
        let listen = f.need(r, "listen", "as in `listen: \"0.0.0.0:8080\"`", |r, item| {
            if matches!(&item.node.value, Value::List(list) if list.is_empty()) {
                r.wrong(item, "there is no address to listen on".to_owned(), None);
            }
            Some(r.all(item, |r, item| Some((listen(r, item)?, place(item)))))
        });
        f.get(r, "tls", |r, item| {
            let hint = "leave `tls` out, and end TLS before Forebay";
            r.wrong(item, "TLS is not built into this version".to_owned(), Some(hint.to_owned()));
            r.fields(item, |r, f| {
                f.get(r, "cert", Reader::text);
                f.get(r, "key", Reader::text);
                f.get(r, "client_ca", Reader::text)
            })
        });
        let shards = f.get(r, "shards", shards).unwrap_or(Shards::Auto);
        let gpu_cpu = f.get(r, "gpu_cpu", |r, item| match item.node.scalar() {
            Some("auto") => None,
            _ => r.small(item, 0, 8191).map(|cpu| cpu as usize),
        });
        let bounds = f.get(r, "bounds", bounds).unwrap_or(BOUNDS);
        let timeouts = f.get(r, "timeouts", client_timeouts).unwrap_or(CLIENT_TIMEOUTS);
        let half_close = f.get(r, "half_close", |r, item| {
            r.choice(
                item,
                "meaning of half-close",
                &[("abort", HalfClose::Abort), ("serve", HalfClose::Serve)],
            )
        });
        let trust_forwarded = f.get(r, "trust_forwarded", |r, item| {
            Some(r.all(item, |r, item| r.parsed(item, value::net)))
        });
        let grace = f.get(r, "grace", Reader::duration_or_zero);
        let (listen, places): (Vec<Listen>, Vec<Named>) = listen?.into_iter().unzip();
        let default = ServerSpec::default().server;
        let server = Server {
            listen,
            shards,
            gpu_cpu,
            bounds,
            head_timeout: timeouts.head,
            idle_timeout: timeouts.idle,
            body_rate: timeouts.body_rate,
            send_timeout: timeouts.send,
            half_close: half_close.unwrap_or(default.half_close),
            trust_forwarded: trust_forwarded.unwrap_or_default(),
            grace: grace.unwrap_or(default.grace),
        };
        Some(ServerSpec { server, places })
    })
}

/// Where a value stands, and how it is written.
fn place(item: &Item<'_>) -> Named {
    Named { name: shown(item), pos: item.pos(), path: item.path.clone() }
}

fn listen<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Listen> {
    let text = r.text(item)?;
    match text.strip_prefix("fd:") {
        Some("") => {
            r.wrong(item, "`fd:` lacks the name of the socket".to_owned(), None);
            None
        }
        Some(name) => Some(Listen::Fd(name.to_owned())),
        None => r.parsed(item, value::socket).map(Listen::Tcp),
    }
}

/// No two listeners, the admin port among them, may claim one port: `SO_REUSEPORT` would share it
/// silently and send every second connection to the wrong one.
fn listeners_differ(r: &mut Reader<'_>, server: &ServerSpec, admin: &AdminSpec) {
    let mut seen: Vec<&Listen> = Vec::new();
    for (listen, place) in server.server.listen.iter().zip(&server.places) {
        if seen.iter().any(|other| collide(listen, other)) {
            let message = format!("{} is taken by a listener above", place.name);
            r.problem(place.pos, &place.path, message, None);
        }
        seen.push(listen);
    }
    if let (Some(AdminListen::Tcp(address)), Some(place)) = (&admin.admin.listen, &admin.place)
        && seen.iter().any(|other| collide(&Listen::Tcp(*address), other))
    {
        let message = format!("{} is taken by `server.listen`", place.name);
        let hint = "the admin port is a port of its own".to_owned();
        r.problem(place.pos, &place.path, message, Some(hint));
    }
}

fn collide(a: &Listen, b: &Listen) -> bool {
    match (a, b) {
        (Listen::Tcp(a), Listen::Tcp(b)) => {
            let wild = a.ip().is_unspecified() || b.ip().is_unspecified();
            a.port() != 0
                && a.port() == b.port()
                && (a.ip() == b.ip() || (wild && a.is_ipv4() == b.is_ipv4()))
        }
        (Listen::Fd(a), Listen::Fd(b)) => a == b,
        _ => false,
    }
}

fn shards<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Shards> {
    const SHARDS_MAX: u32 = 1024;
    match item.node.scalar() {
        Some("auto") => Some(Shards::Auto),
        Some(text) if text.contains(['-', ',']) => r.parsed(item, value::cpus).map(Shards::Cpus),
        _ => r.small(item, 1, SHARDS_MAX).map(Shards::Count),
    }
}

const BOUNDS: Bounds = Bounds {
    head: 64 << 10,
    headers: 128,
    body: 64 << 20,
    buffered: 2 << 30,
    connections: 100_000,
};

fn bounds<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Bounds> {
    r.fields(item, |r, f| {
        // A head is held whole in one buffer; 1 KiB is what a bare client sends.
        let head = f.get(r, "head", |r, item| r.size(item, 1 << 10, 16 << 20));
        let headers = f.get(r, "headers", |r, item| r.integer(item, 8, 4_096));
        let body = f.get(r, "body", |r, item| r.size(item, 1, 1 << 40));
        let buffered = f.get(r, "buffered", |r, item| r.size(item, 1, 1 << 50));
        let connections = f.get(r, "connections", |r, item| r.integer(item, 1, 100_000_000));
        // Both fit: their bounds are above.
        Some(Bounds {
            head: head.map_or(BOUNDS.head, |n| n as usize),
            headers: headers.map_or(BOUNDS.headers, |n| n as usize),
            body: body.unwrap_or(BOUNDS.body),
            buffered: buffered.unwrap_or(BOUNDS.buffered),
            connections: connections.unwrap_or(BOUNDS.connections),
        })
    })
}

struct ClientTimeouts {
    head: Duration,
    idle: Duration,
    body_rate: u64,
    send: Duration,
}

const CLIENT_TIMEOUTS: ClientTimeouts = ClientTimeouts {
    head: Duration::from_secs(10),
    idle: Duration::from_secs(75),
    body_rate: 1 << 10,
    send: Duration::from_secs(30),
};

fn client_timeouts<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ClientTimeouts> {
    r.fields(item, |r, f| {
        let head = f.get(r, "head", Reader::duration);
        let idle = f.get(r, "idle", Reader::duration);
        let body_rate = f.get(r, "body_rate", |r, item| r.parsed(item, value::rate));
        let send = f.get(r, "send", Reader::duration);
        Some(ClientTimeouts {
            head: head.unwrap_or(CLIENT_TIMEOUTS.head),
            idle: idle.unwrap_or(CLIENT_TIMEOUTS.idle),
            body_rate: body_rate.unwrap_or(CLIENT_TIMEOUTS.body_rate),
            send: send.unwrap_or(CLIENT_TIMEOUTS.send),
        })
    })
}

fn admin<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<AdminSpec> {
    r.fields(item, |r, f| {
        let listen = f.need(r, "listen", "as in `listen: \"127.0.0.1:9900\"`", |r, item| {
            Some((admin_listen(r, item)?, place(item)))
        });
        let token = f.get(r, "token", Reader::secret).map(Secret::new);
        let (listen, place) = listen?;
        if let AdminListen::Tcp(address) = &listen
            && token.is_none()
            && !address.ip().is_loopback()
        {
            let message = "the admin port is open to other machines and has no `token`".to_owned();
            r.notice(place.pos, &place.path, message, Severity::Advice);
        }
        Some(AdminSpec { admin: Admin { listen: Some(listen), token }, place: Some(place) })
    })
}

fn admin_listen<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<AdminListen> {
    let text = r.text(item)?;
    match text.strip_prefix("unix:") {
        // sun_path holds 108 bytes, the last of them NUL.
        Some(path) if path.starts_with('/') && path.len() <= 107 => {
            Some(AdminListen::Unix(path.to_owned()))
        }
        Some(_) => {
            let message = "a socket's path is absolute and has at most 107 bytes".to_owned();
            r.wrong(item, message, Some("as in `unix:/run/forebay/admin.sock`".to_owned()));
            None
        }
        None => r.parsed(item, value::socket).map(AdminListen::Tcp),
    }
}

fn state<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Option<String>, Sync, Unwritten)> {
    r.fields(item, |r, f| {
        let dir = f.get(r, "dir", Reader::text);
        let unwritten = f.get(r, "unwritten", |r, item| {
            let ways = [("serve", Unwritten::Serve), ("refuse", Unwritten::Refuse)];
            r.choice(item, "way to go on", &ways)
        });
        let sync = f.get(r, "sync", |r, item| {
            r.choice(item, "way to sync", &[("group", Sync::Group), ("always", Sync::Always)])
        });
        if sync == Some(Sync::Always) && dir.is_none() {
            let message = "`sync: always` needs a `dir` to write to".to_owned();
            r.wrong(item, message, Some("as in `dir: /var/lib/forebay`".to_owned()));
        }
        Some((dir, sync.unwrap_or_default(), unwritten.unwrap_or_default()))
    })
}

/// A file of certificates, read now.
fn certificates<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Arc<str>> {
    let path = r.text(item)?;
    match r.file(&path) {
        Ok(pem) if pem.contains("-----BEGIN CERTIFICATE-----") => Some(Arc::from(pem)),
        Ok(_) => {
            let message = format!("{} holds no certificate in PEM form", shown(item));
            r.wrong(item, message, None);
            None
        }
        Err(why) => {
            r.wrong(item, format!("the certificates cannot be read: {why}"), None);
            None
        }
    }
}

fn fleet<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Secret, String, f64)> {
    r.fields(item, |r, f| {
        let redis = f.need(r, "redis", "as in `redis://10.0.0.5:6379`", Reader::text);
        let name = f.need(r, "name", "what this gateway is called among the others", Reader::name);
        let share = f.get(r, "share", Reader::ratio);
        Some((Secret::new(redis?), name?, share.unwrap_or(0.1)))
    })
}
