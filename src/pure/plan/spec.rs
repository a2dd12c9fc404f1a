//! The file, area by area, as it was written: names are still names. The order is that of the
//! file in the design; the code that reads an area is its schema.

use std::time::Duration;

use super::problem::Severity;
use super::read::{Fields, Item, Named, Reader, shown};
use super::terms::{
    Admission, Breaker, Conditions, Engine, Gpu, Headroom, Health, Kv, Limits, Priority, Promote,
    Queue, Reserve, Scrape, Sleep, Sync, UnitSpec, Window,
};
use super::tree::{Node, Pos, Value};
use super::value::{self, Target};
use super::{
    Admin, AdminListen, Bounds, Dialect, HalfClose, Listen, Match, Pattern, Price, Retry, Secret,
    Server, Shards, Strategy, Timeouts,
};
use crate::pure::units::NanoUsd;

pub(super) struct Spec {
    pub server: ServerSpec,
    pub admin: AdminSpec,
    pub state_dir: Option<String>,
    pub state_sync: Sync,
    pub fleet: Option<(Secret, String)>,
    pub pools: Vec<PoolSpec>,
    pub models: Vec<ModelSpec>,
    pub routes: Vec<RouteSpec>,
    pub tiers: Vec<TierSpec>,
    pub tenants: Vec<TenantSpec>,
    pub keys: Vec<KeySpec>,
    pub global: Option<Limits>,
}

pub(super) struct ServerSpec {
    pub server: Server,
    /// Where each of `server.listen` stands.
    pub places: Vec<Named>,
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
    pub timeouts: Timeouts,
    pub idle: usize,
    pub idle_for: Duration,
    pub max: usize,
    pub wait: Duration,
    pub forward: Vec<Box<str>>,
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
    pub tokenizer: Option<String>,
    pub kv: Option<Kv>,
    pub fallback: Vec<(Named, String)>,
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
    pub models: Vec<(Pattern, Named)>,
    pub regions: Vec<Box<str>>,
    pub reserve: Reserve,
    pub budget: Option<BudgetSpec>,
}

pub(super) struct BudgetSpec {
    pub limit: NanoUsd,
    pub per: Window,
    pub over: Over,
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
}

/// The whole file. `None`, or parts left out, only with problems noted.
pub(super) fn read<'a>(r: &mut Reader<'a>, root: &'a Node) -> Option<Spec> {
    r.fields(&Item::root(root), |r, f| {
        let server = f.need(r, "server", "at least `server: { listen: \"0.0.0.0:8080\" }`", server);
        let admin = f.get(r, "admin", admin).unwrap_or_default();
        let (state_dir, state_sync) = f.get(r, "state", state).unwrap_or_default();
        let fleet = f.get(r, "fleet", fleet);
        let pools = f.need(r, "pools", "name at least one pool of backends", |r, item| {
            let named = r.named(item);
            if named.is_empty() {
                r.wrong(item, "there is no pool here".to_owned(), None);
            }
            Some(each(r, "pool", named, pool))
        });
        let models = f.get(r, "models", |r, item| {
            let named = r.named(item);
            Some(each(r, "model", named, model))
        });
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
                Some(items.iter().filter_map(|item| route(r, item)).collect::<Vec<_>>())
            });
        let tiers = f.get(r, "tiers", |r, item| {
            let named = r.named(item);
            Some(each(r, "tier", named, tier))
        });
        let tenants = f.get(r, "tenants", |r, item| {
            let named = r.named(item);
            Some(each(r, "tenant", named, tenant))
        });
        let keys = f.get(r, "keys", |r, item| {
            let items = r.list(item);
            Some(items.iter().filter_map(|item| key(r, item)).collect::<Vec<_>>())
        });
        let global = f.get(r, "global", limits);
        let server = server?;
        listeners_differ(r, &server, &admin);
        Some(Spec {
            server,
            admin,
            state_dir,
            state_sync,
            fleet,
            pools: pools?,
            models: models.unwrap_or_default(),
            routes: routes?,
            tiers: tiers.unwrap_or_default(),
            tenants: tenants.unwrap_or_default(),
            keys: keys.unwrap_or_default(),
            global,
        })
    })
}

/// Every named member by `read`, as its owner.
fn each<'a, T>(
    r: &mut Reader<'a>,
    kind: &'static str,
    named: Vec<(Named, Item<'a>)>,
    read: impl Fn(&mut Reader<'a>, Named, &Item<'a>) -> Option<T>,
) -> Vec<T> {
    named
        .into_iter()
        .filter_map(|(at, item)| {
            let name = at.name.clone();
            r.owned(kind, &name, |r| read(r, at, &item))
        })
        .collect()
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

// ---- server, admin, state, fleet

fn server<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ServerSpec> {
    r.fields(item, |r, f| {
        let listen = f.need(r, "listen", "as in `listen: \"0.0.0.0:8080\"`", |r, item| {
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
        if listen.is_empty() {
            let message = "there is no address to listen on".to_owned();
            r.wrong(f.item(), message, Some("as in `listen: \"0.0.0.0:8080\"`".to_owned()));
        }
        let server = Server {
            listen,
            shards,
            gpu_cpu,
            bounds,
            head_timeout: timeouts.head,
            idle_timeout: timeouts.idle,
            body_rate: timeouts.body_rate,
            send_timeout: timeouts.send,
            half_close: half_close.unwrap_or(HalfClose::Abort),
            trust_forwarded: trust_forwarded.unwrap_or_default(),
            grace: grace.unwrap_or(Duration::from_secs(600)),
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

fn state<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Option<String>, Sync)> {
    r.fields(item, |r, f| {
        let dir = f.get(r, "dir", Reader::text);
        let sync = f.get(r, "sync", |r, item| {
            r.choice(item, "way to sync", &[("group", Sync::Group), ("always", Sync::Always)])
        });
        Some((dir, sync.unwrap_or_default()))
    })
}

fn fleet<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Secret, String)> {
    r.fields(item, |r, f| {
        let redis = f.need(r, "redis", "as in `redis://10.0.0.5:6379`", Reader::text);
        let name = f.need(r, "name", "what this gateway is called among the others", Reader::name);
        Some((Secret::new(redis?), name?))
    })
}

// ---- pools

fn pool<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<PoolSpec> {
    r.fields(item, |r, f| {
        let dialect = f.get(r, "dialect", |r, item| {
            let dialects = [
                ("openai", Dialect::OpenAi),
                ("anthropic", Dialect::Anthropic),
                ("ollama", Dialect::Ollama),
                ("dashscope", Dialect::DashScope),
            ];
            r.choice(item, "dialect", &dialects)
        });
        let backends =
            f.need(r, "backends", "list at least one `{ url: \"http://...\" }`", |r, item| {
                let items = r.list(item);
                if items.is_empty() && matches!(item.node.value, Value::List(_)) {
                    r.wrong(item, "a pool needs at least one backend".to_owned(), None);
                }
                Some(items.iter().filter_map(|item| backend(r, item)).collect())
            });
        let health = f.get(r, "health", health);
        let breaker = f.get(r, "breaker", breaker);
        let timeouts = f.get(r, "timeouts", timeouts).unwrap_or(TIMEOUTS);
        let connections = f.get(r, "pool", connections).unwrap_or(CONNECTIONS);
        let scrape = f.get(r, "metrics", scrape);
        let sleep = f.get(r, "sleep", sleep);
        let forward = f.get(r, "forward", |r, item| Some(r.all(item, forwarded)));
        Some(PoolSpec {
            at,
            dialect: dialect.unwrap_or(Dialect::OpenAi),
            backends: backends?,
            timeouts,
            idle: connections.idle.min(connections.max),
            idle_for: connections.idle_for,
            max: connections.max,
            wait: connections.wait,
            forward: forward.unwrap_or_default(),
            breaker,
            health,
            scrape,
            sleep,
        })
    })
}

fn backend<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<BackendSpec> {
    r.fields(item, |r, f| {
        let name = f.get(r, "name", Reader::reference);
        let target = f.need(r, "url", "as in `http://10.0.0.12:8000`", |r, item| {
            let target = r.parsed(item, value::url)?;
            if target.tls {
                let hint = "use `http://` within the rack, or a TLS proxy before the backend";
                let message = "TLS to backends is not built into this version".to_owned();
                r.wrong(item, message, Some(hint.to_owned()));
                return None;
            }
            Some(target)
        });
        let weight = f.get(r, "weight", |r, item| r.small(item, 0, WEIGHT_MAX));
        let api_key = f.get(r, "api_key", |r, item| {
            r.secret(item).map(|key| Secret::new(format!("Bearer {key}")))
        });
        let version = f.get(r, "version", Reader::name);
        let region = f.get(r, "region", Reader::name);
        let tags = f.get(r, "tags", words);
        let slots = f.get(r, "slots", |r, item| r.small(item, 1, 1_000_000));
        let cost = f.get(r, "cost", price);
        let gpu = f.get(r, "gpu", gpu);
        f.get(r, "http", |r, item| r.small(item, 1, 2));
        f.get(r, "tls", |r, item| {
            r.fields(item, |r, f| {
                f.get(r, "ca", Reader::text);
                f.get(r, "cert", Reader::text);
                f.get(r, "key", Reader::text);
                f.get(r, "name", Reader::text)
            })
        });
        let target = target?;
        let at = name.unwrap_or_else(|| Named {
            name: target.authority.to_string(),
            pos: f.item().pos(),
            path: f.item().path.clone(),
        });
        Some(BackendSpec {
            at,
            target,
            weight: weight.unwrap_or(1),
            api_key,
            version,
            region,
            tags: tags.unwrap_or_default(),
            slots,
            cost,
            gpu,
        })
    })
}

/// Shares of weights are computed in 64 bits; nobody needs finer ones than a millionth.
const WEIGHT_MAX: u32 = 1_000_000;

/// A client's field that may pass. Those that Forebay sets, or that say who the client is, never.
fn forwarded<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Box<str>> {
    const NEVER: [&str; 17] = [
        "authorization",
        "connection",
        "content-length",
        "cookie",
        "expect",
        "host",
        "keep-alive",
        "openai-organization",
        "openai-project",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-api-key",
        "api-key",
    ];
    let name = r.header_name(item)?;
    if NEVER.contains(&name.as_ref()) {
        r.wrong(item, format!("`{name}` never passes from a client to a backend"), None);
        return None;
    }
    Some(name)
}

fn health<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Health> {
    r.fields(item, |r, f| {
        let every = f.need(r, "every", "as in `every: 2s`", Reader::duration);
        let live = f.get(r, "live", path);
        let ready = f.get(r, "ready", path);
        let kv_below = f.get(r, "deep", |r, item| {
            r.fields(item, |r, f| f.need(r, "kv_below", "as in `kv_below: 0.95`", Reader::ratio))
        });
        let queue_below = f.get(r, "load", |r, item| {
            r.fields(item, |r, f| {
                let read = |r: &mut Reader<'a>, item: &Item<'a>| r.small(item, 1, 1_000_000);
                f.need(r, "queue_below", "as in `queue_below: 64`", read)
            })
        });
        let fall = f.get(r, "fall", |r, item| r.small(item, 1, 1_000));
        let rise = f.get(r, "rise", |r, item| r.small(item, 1, 1_000));
        Some(Health {
            every: every?,
            live,
            ready,
            kv_below,
            queue_below,
            fall: fall.unwrap_or(3),
            rise: rise.unwrap_or(2),
        })
    })
}

fn breaker<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Breaker> {
    r.fields(item, |r, f| {
        let failures = f.get(r, "failures", |r, item| r.small(item, 1, 1_000_000_000));
        let window = f.get(r, "window", Reader::duration);
        let open = f.get(r, "open", Reader::duration);
        let probes = f.get(r, "probes", |r, item| r.small(item, 1, 1_000));
        Some(Breaker {
            failures: failures.unwrap_or(5),
            window: window.unwrap_or(Duration::from_secs(30)),
            open: open.unwrap_or(Duration::from_secs(30)),
            probes: probes.unwrap_or(3),
        })
    })
}

/// Only connecting has a bound of its own accord: the kernel's is two minutes.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    first_token: None,
    first_token_per_1k: None,
    answer: None,
    chunk: None,
    total: None,
};

fn timeouts<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Timeouts> {
    r.fields(item, |r, f| {
        Some(Timeouts {
            connect: f.get(r, "connect", Reader::duration).unwrap_or(TIMEOUTS.connect),
            first_token: f.get(r, "first_token", Reader::duration),
            first_token_per_1k: f.get(r, "first_token_per_1k", Reader::duration),
            answer: f.get(r, "answer", Reader::duration),
            chunk: f.get(r, "chunk", Reader::duration),
            total: f.get(r, "total", Reader::duration),
        })
    })
}

struct Connections {
    idle: usize,
    idle_for: Duration,
    max: usize,
    wait: Duration,
}

/// uvicorn closes idle connections after 5 s, so ours must go before that.
const CONNECTIONS: Connections = Connections {
    idle: 200,
    idle_for: Duration::from_secs(4),
    max: 1_000,
    wait: Duration::from_secs(10),
};

fn connections<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Connections> {
    r.fields(item, |r, f| {
        let idle = f.get(r, "idle", |r, item| r.small(item, 0, 1_000_000));
        let idle_for = f.get(r, "idle_for", Reader::duration);
        let max = f.get(r, "max", |r, item| r.small(item, 1, 1_000_000));
        let wait = f.get(r, "wait", Reader::duration_or_zero);
        Some(Connections {
            idle: idle.map_or(CONNECTIONS.idle, |n| n as usize),
            idle_for: idle_for.unwrap_or(CONNECTIONS.idle_for),
            max: max.map_or(CONNECTIONS.max, |n| n as usize),
            wait: wait.unwrap_or(CONNECTIONS.wait),
        })
    })
}

fn scrape<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Scrape> {
    r.fields(item, |r, f| {
        let path = f.get(r, "scrape", path);
        let every = f.get(r, "every", Reader::duration);
        let kind = f.get(r, "kind", |r, item| {
            let kinds = [
                ("auto", Engine::Auto),
                ("vllm", Engine::Vllm),
                ("sglang", Engine::SgLang),
                ("tgi", Engine::Tgi),
                ("llamacpp", Engine::LlamaCpp),
                ("dcgm", Engine::Dcgm),
                ("none", Engine::None),
            ];
            r.choice(item, "kind of engine", &kinds)
        });
        Some(Scrape {
            path: path.unwrap_or_else(|| "/metrics".into()),
            every: every.unwrap_or(Duration::from_secs(1)),
            kind: kind.unwrap_or(Engine::Auto),
        })
    })
}

fn sleep<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Sleep> {
    r.fields(item, |r, f| {
        let after = f.need(r, "after", "as in `after: 15m`", Reader::duration);
        let sleep = f.need(r, "sleep", "as in `sleep: /sleep?level=1`", path);
        let wake = f.need(r, "wake", "as in `wake: /wake_up`", path);
        Some(Sleep { after: after?, sleep: sleep?, wake: wake? })
    })
}

fn gpu<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Gpu> {
    r.fields(item, |r, f| {
        let kind = f.get(r, "kind", Reader::name).map(String::into_boxed_str);
        let nvml = f.get(r, "nvml", |r, item| Some(r.all(item, |r, item| r.small(item, 0, 255))));
        Some(Gpu { kind, nvml: nvml.unwrap_or_default() })
    })
}

/// US dollars per million tokens.
fn price<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Price> {
    r.fields(item, |r, f| {
        let input = f.need(r, "input", "USD per million tokens, as in `input: 0.50`", Reader::usd);
        let cached = f.get(r, "cached", Reader::usd);
        let output =
            f.need(r, "output", "USD per million tokens, as in `output: 1.50`", Reader::usd);
        Some(Price { input: input?, cached: cached.or(input)?, output: output? })
    })
}

/// A path on a server, a query allowed.
fn path<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Box<str>> {
    let text = r.text(item)?;
    if !text.starts_with('/') || !text.bytes().all(|b| (0x21..=0x7e).contains(&b)) {
        let hint = "as in `/health`".to_owned();
        r.wrong(item, format!("{} is not a path", shown(item)), Some(hint));
        return None;
    }
    Some(text.into())
}

/// A list of names, or one.
fn words<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Vec<Box<str>>> {
    Some(r.all(item, |r, item| r.name(item).map(String::into_boxed_str)))
}

// ---- models

fn model<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<ModelSpec> {
    fields_or_none(r, item, |r, f| {
        let aliases = f.get(r, "aliases", |r, item| Some(r.all(item, Reader::reference)));
        let context = f.get(r, "context", |r, item| r.integer(item, 1, TOKENS_MAX));
        let max_output = f.get(r, "max_output", |r, item| r.integer(item, 1, TOKENS_MAX));
        let price = f.get(r, "price", price);
        let tokenizer = f.get(r, "tokenizer", tokenizer);
        let kv = f.get(r, "kv", kv);
        let fallback = f.get(r, "fallback", |r, item| Some(r.all(item, fallback)));
        Some(ModelSpec {
            at,
            aliases: aliases.unwrap_or_default(),
            context,
            max_output,
            price,
            tokenizer,
            kv,
            fallback: fallback.unwrap_or_default(),
        })
    })
}

/// Far above every context window there is, and far below what overflows a sum.
const TOKENS_MAX: u64 = 1 << 40;

fn tokenizer<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<String> {
    let text = r.text(item)?;
    if matches!(text.as_str(), "auto" | "o200k_base" | "cl100k_base") || text.contains('/') {
        return Some(text);
    }
    let hint = "`auto`, `o200k_base`, `cl100k_base`, or the path of a tokenizer.json".to_owned();
    r.wrong(item, format!("{} is no known tokenizer", shown(item)), Some(hint));
    None
}

fn kv<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Kv> {
    r.fields(item, |r, f| {
        const HINT: &str = "as in `kv: { layers: 80, heads: 8, dim: 128, bytes: 2 }`";
        let number = |r: &mut Reader<'a>, item: &Item<'a>| r.small(item, 1, 1_000_000);
        let layers = f.need(r, "layers", HINT, number);
        let heads = f.need(r, "heads", HINT, number);
        let dim = f.need(r, "dim", HINT, number);
        let bytes = f.need(r, "bytes", HINT, number);
        let hidden = f.get(r, "hidden", number);
        Some(Kv { layers: layers?, heads: heads?, dim: dim?, bytes: bytes?, hidden })
    })
}

fn fallback<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Named, String)> {
    r.fields(item, |r, f| {
        let model = f.need(r, "model", "the model to use instead", Reader::reference);
        let reason = f.get(r, "reason", Reader::name);
        Some((model?, reason.unwrap_or_else(|| "fallback".to_owned())))
    })
}

// ---- routes

fn route<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<RouteSpec> {
    let name = match &item.node.value {
        Value::Map(entries) => {
            entries.iter().find(|entry| entry.key == "name").and_then(|entry| entry.node.scalar())
        }
        _ => None,
    };
    match name {
        Some(name) => r.owned("route", name, |r| r.fields(item, route_fields)),
        None => r.fields(item, route_fields),
    }
}

fn route_fields<'a>(r: &mut Reader<'a>, f: &mut Fields<'a>) -> Option<RouteSpec> {
    let at =
        f.need(r, "name", "routes are told apart by name in logs and metrics", Reader::reference);
    let matches = f.get(r, "match", matching).unwrap_or_default();
    let pool = f.need(r, "pool", "the pool that serves this route", Reader::reference);
    let strategy = f.get(r, "strategy", |r, item| Some((strategy(r, item)?, item.pos())));
    let weights = f.get(r, "weights", |r, item| {
        let named = r.named(item);
        Some(
            named
                .into_iter()
                .filter_map(|(at, item)| Some((at, r.small(&item, 0, WEIGHT_MAX)?)))
                .collect::<Vec<_>>(),
        )
    });
    let sticky = f.get(r, "sticky", |r, item| {
        r.fields(item, |r, f| {
            f.need(r, "header", "as in `header: X-Session-ID`", Reader::header_name)
        })
    });
    let retry = f.get(r, "retry", |r, item| {
        r.fields(item, |r, f| {
            let attempts =
                f.need(r, "attempts", "tries after the first", |r, item| r.small(item, 0, 10));
            let budget = f.get(r, "budget", Reader::ratio);
            Some(Retry { attempts: attempts?, budget: budget.unwrap_or(0.2) })
        })
    });
    let heartbeat = f.get(r, "heartbeat", Reader::duration);
    let rate_limit = f.get(r, "rate_limit", limits);
    let queue = f.get(r, "queue", |r, item| {
        r.fields(item, |r, f| {
            let max = f.need(r, "max", "how many may wait", |r, item| r.small(item, 1, 10_000_000));
            let wait = f.need(r, "wait", "how long each may wait", Reader::duration);
            Some(Queue { max: max?, wait: wait? })
        })
    });
    let canary = f.get(r, "canary", canary);
    let shadow = f.get(r, "shadow", shadow);
    let units = f.get(r, "units", |r, item| Some(r.all(item, unit)));
    let admission = f.get(r, "admission", |r, item| {
        r.fields(item, |r, f| {
            let headroom = f.get(r, "headroom", |r, item| {
                r.choice(item, "headroom", &[("kv", Headroom::Kv), ("nvml", Headroom::Nvml)])
            });
            let reserve = f.get(r, "reserve", Reader::ratio);
            Some(Admission {
                headroom: headroom.unwrap_or(Headroom::Kv),
                reserve: reserve.unwrap_or(0.8),
            })
        })
    });
    Some(RouteSpec {
        at: at?,
        matches,
        pool: pool?,
        strategy,
        weights: weights.unwrap_or_default(),
        sticky,
        retry: retry.unwrap_or_default(),
        heartbeat,
        rate_limit,
        queue,
        canary,
        shadow,
        units: units.unwrap_or_default(),
        admission,
    })
}

fn matching<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Match> {
    r.fields(item, |r, f| {
        let models = f.get(r, "model", |r, item| Some(r.all(item, Reader::pattern)));
        let headers = f.get(r, "header", |r, item| {
            let named = r.named(item);
            Some(named.iter().filter_map(|(at, item)| header_match(r, at, item)).collect())
        });
        let paths = f.get(r, "path", |r, item| {
            Some(r.all(item, |r, item| {
                let pattern = r.pattern(item)?;
                if !pattern.as_str().starts_with(['/', '*']) {
                    let hint = "as in `/v1/files*`".to_owned();
                    r.wrong(item, format!("{} can match no path", shown(item)), Some(hint));
                }
                Some(pattern)
            }))
        });
        let tiers = f.get(r, "tier", words).unwrap_or_default();
        let profiles = f.get(r, "profile", words).unwrap_or_default();
        let compliance = f.get(r, "compliance", words).unwrap_or_default();
        let tokens = f.get(r, "prompt_tokens", |r, item| {
            r.fields(item, |r, f| {
                let min = f.get(r, "min", |r, item| r.integer(item, 0, TOKENS_MAX));
                let max = f.get(r, "max", |r, item| r.integer(item, 0, TOKENS_MAX));
                Some((min, max))
            })
        });
        let (prompt_tokens_min, prompt_tokens_max) = tokens.unwrap_or_default();
        Some(Match {
            models: models.unwrap_or_default(),
            headers: headers.unwrap_or_default(),
            paths: paths.unwrap_or_default(),
            conditions: Conditions {
                tiers,
                profiles,
                compliance,
                prompt_tokens_min,
                prompt_tokens_max,
            },
        })
    })
}

fn placed_pattern<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Pattern, Named)> {
    Some((r.pattern(item)?, place(item)))
}

fn header_match<'a>(
    r: &mut Reader<'a>,
    at: &Named,
    item: &Item<'a>,
) -> Option<(Box<str>, Vec<Pattern>)> {
    let name = match value::header_name(&at.name) {
        Ok(name) => name,
        Err(wrong) => {
            r.problem(at.pos, &at.path, wrong.message_for(&format!("`{}`", at.name)), wrong.hint);
            return None;
        }
    };
    Some((name, r.all(item, Reader::pattern)))
}

fn strategy<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Strategy> {
    let strategies = [
        ("weighted-round-robin", Strategy::WeightedRoundRobin),
        ("least-requests", Strategy::LeastRequests),
        ("weighted-split", Strategy::WeightedSplit),
        ("consistent-hash", Strategy::ConsistentHash),
        ("prefix", Strategy::Prefix),
        ("adaptive", Strategy::Adaptive),
        ("least-queued", Strategy::LeastQueued),
        ("least-latency", Strategy::LeastLatency),
        ("most-available", Strategy::MostAvailable),
        ("cost", Strategy::Cost),
        ("cost-optimized", Strategy::Cost),
    ];
    r.choice(item, "strategy", &strategies)
}

fn canary<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<CanarySpec> {
    r.fields(item, |r, f| {
        let candidate = f.need(r, "candidate", "the version that is tried", Reader::reference);
        let baseline = f.need(r, "baseline", "the version it is compared with", Reader::reference);
        let steps = f.need(r, "steps", "as in `steps: [{ weight: 5, for: 5m }]`", |r, item| {
            let steps = r.all(item, |r, item| {
                r.fields(item, |r, f| {
                    let weight = f.need(r, "weight", "per cent of the requests", |r, item| {
                        r.small(item, 0, 100)
                    });
                    let hold = f.get(r, "for", Reader::duration);
                    Some((weight?, hold))
                })
            });
            if steps.is_sorted_by(|a, b| a.0 < b.0) {
                Some(steps)
            } else {
                r.wrong(item, "the weights of the steps must rise".to_owned(), None);
                None
            }
        });
        let rollback = f.get(r, "rollback", |r, item| {
            r.fields(item, |r, f| {
                let error_rate = f.get(r, "error_rate", Reader::ratio);
                let p99_ratio = f.get(r, "p99_ratio", |r, item| r.parsed(item, value::factor));
                let min_requests =
                    f.get(r, "min_requests", |r, item| r.integer(item, 1, 1_000_000_000));
                Some((error_rate, p99_ratio, min_requests))
            })
        });
        let (error_rate, p99_ratio, min_requests) = rollback.unwrap_or_default();
        Some(CanarySpec {
            candidate: candidate?,
            baseline: baseline?,
            steps: steps?,
            error_rate,
            p99_ratio,
            min_requests,
        })
    })
}

fn shadow<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<ShadowSpec> {
    r.fields(item, |r, f| {
        let pool = f.need(r, "pool", "the pool that gets the copies", Reader::reference);
        let sample = f.get(r, "sample", Reader::ratio);
        let promote = f.get(r, "promote", |r, item| {
            r.fields(item, |r, f| {
                const HINT: &str =
                    "as in `promote: { consecutive: 1000, agree: 99.95%, within: 50ms }`";
                let consecutive =
                    f.need(r, "consecutive", HINT, |r, item| r.integer(item, 1, 1_000_000_000));
                let agree = f.need(r, "agree", HINT, Reader::ratio);
                let within = f.need(r, "within", HINT, Reader::duration);
                Some(Promote { consecutive: consecutive?, agree: agree?, within: within? })
            })
        });
        Some(ShadowSpec { pool: pool?, sample: sample.unwrap_or(1.0), promote })
    })
}

/// `prompt-filter: { words: words.txt }`: a map with the unit's name as its only key.
fn unit<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<UnitSpec> {
    r.fields(item, |r, f| {
        let filter = f.get(r, "prompt-filter", |r, item| {
            r.fields(item, |r, f| {
                let words = f.need(r, "words", "the file with the words", Reader::text);
                let when = f.get(r, "when", when).unwrap_or_default();
                Some(UnitSpec::PromptFilter { words: words?.into(), when })
            })
        });
        let redact = f.get(r, "redact", |r, item| {
            r.fields(item, |r, f| {
                let paths = f.get(r, "paths", |r, item| {
                    Some(r.all(item, |r, item| r.text(item).map(String::into_boxed_str)))
                });
                let kinds = f.need(r, "kinds", "as in `kinds: [phone, email]`", words);
                let when = f.get(r, "when", when).unwrap_or_default();
                Some(UnitSpec::Redact { paths: paths.unwrap_or_default(), kinds: kinds?, when })
            })
        });
        match (filter, redact) {
            (Some(unit), None) | (None, Some(unit)) => Some(unit),
            (Some(_), Some(_)) => {
                let message = "two units in one entry; their order would be unclear".to_owned();
                r.wrong(f.item(), message, Some("write one entry per unit".to_owned()));
                None
            }
            (None, None) => None,
        }
    })
}

fn when<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Vec<(Box<str>, Vec<Pattern>)>> {
    r.fields(item, |r, f| {
        f.need(r, "header", "as in `header: { X-Enable-PII-Scan: \"true\" }`", |r, item| {
            let named = r.named(item);
            Some(named.iter().filter_map(|(at, item)| header_match(r, at, item)).collect())
        })
    })
}

// ---- limits, tiers, tenants, keys

fn limits<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Limits> {
    r.fields(item, |r, f| Some(limit_fields(r, f)))
}

fn limit_fields<'a>(r: &mut Reader<'a>, f: &mut Fields<'a>) -> Limits {
    // Above this a limit is none, and a window times it would leave 128 bits.
    const LIMIT_MAX: u64 = 1 << 50;
    let limit = |r: &mut Reader<'a>, item: &Item<'a>| r.integer(item, 1, LIMIT_MAX);
    Limits {
        rpm: f.get(r, "rpm", limit),
        tpm: f.get(r, "tpm", limit),
        tpd: f.get(r, "tpd", limit),
        concurrency: f.get(r, "concurrency", |r, item| r.small(item, 1, 100_000_000)),
        burst: f.get(r, "burst", limit),
        strict: f.get(r, "strict", Reader::flag).unwrap_or(false),
    }
}

fn tier<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<TierSpec> {
    fields_or_none(r, item, |r, f| {
        let limits = limit_fields(r, f);
        let priority = f.get(r, "priority", |r, item| {
            let priorities =
                [("low", Priority::Low), ("normal", Priority::Normal), ("high", Priority::High)];
            r.choice(item, "priority", &priorities)
        });
        Some(TierSpec { at, limits, priority: priority.unwrap_or_default() })
    })
}

fn tenant<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<TenantSpec> {
    fields_or_none(r, item, |r, f| {
        let tier = f.get(r, "tier", Reader::reference);
        let models = f.get(r, "models", |r, item| {
            let models = r.all(item, placed_pattern);
            if models.is_empty() {
                let hint = "leave `models` out to allow every model".to_owned();
                r.wrong(item, "an empty list would allow no model".to_owned(), Some(hint));
            }
            Some(models)
        });
        let regions = f.get(r, "regions", words);
        let reserve = f.get(r, "reserve", |r, item| {
            let reserves = [
                ("p50", Reserve::P50),
                ("p95", Reserve::P95),
                ("max", Reserve::Max),
                ("none", Reserve::None),
            ];
            r.choice(item, "way to reserve", &reserves)
        });
        let budget = f.get(r, "budget", budget);
        Some(TenantSpec {
            at,
            tier,
            models: models.unwrap_or_default(),
            regions: regions.unwrap_or_default(),
            reserve: reserve.unwrap_or_default(),
            budget,
        })
    })
}

fn budget<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<BudgetSpec> {
    #[derive(Clone, Copy)]
    enum Kind {
        Refuse,
        Downgrade,
        ReadOnly,
    }
    r.fields(item, |r, f| {
        let limit = f.need(r, "usd", "as in `usd: 5000`", Reader::usd);
        let per = f.need(r, "per", "`day` or `month`", |r, item| {
            r.choice(item, "window", &[("day", Window::Day), ("month", Window::Month)])
        });
        let over = f.get(r, "over", |r, item| {
            let kinds = [
                ("refuse", Kind::Refuse),
                ("downgrade", Kind::Downgrade),
                ("read-only", Kind::ReadOnly),
            ];
            r.choice(item, "way to go over budget", &kinds)
        });
        let over = match over.unwrap_or(Kind::Refuse) {
            Kind::Downgrade => {
                let hint = "the model to use when the budget is spent";
                Over::Downgrade(f.need(r, "to", hint, Reader::reference)?)
            }
            kind => {
                if f.has("to") {
                    let message = "`to` goes with `over: downgrade` only".to_owned();
                    f.get(r, "to", |r, item| {
                        r.wrong(item, message, None);
                        None::<()>
                    });
                }
                match kind {
                    Kind::ReadOnly => Over::ReadOnly,
                    Kind::Refuse | Kind::Downgrade => Over::Refuse,
                }
            }
        };
        Some(BudgetSpec { limit: limit?, per: per?, over })
    })
}

fn key<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<KeySpec> {
    r.fields(item, |r, f| {
        let at = f.need(r, "id", "keys are told apart by id in logs", Reader::reference);
        let tenant = f.need(r, "tenant", "the tenant who pays", Reader::reference);
        let sha256 = f.need(r, "sha256", "`printf %s \"$KEY\" | sha256sum`", |r, item| {
            r.parsed(item, value::sha256)
        });
        Some(KeySpec { at: at?, tenant: tenant?, sha256: sha256? })
    })
}
