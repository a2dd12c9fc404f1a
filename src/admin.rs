//! The admin port: metrics, usage, health, the plan in force, and the order to reload.
//!
//! It runs on control's own runtime and never on a shard. It is not for clients: by default it
//! listens on loopback or on a Unix socket of mode 0600, and `admin.token` guards it elsewhere.
//! Nothing with an effect is a GET. Because a browser on the same machine can reach loopback,
//! requests that a foreign page could have caused are refused: by `Origin` where something would
//! change, and by `Host` where no token is asked for (DNS rebinding).
//!
//! Everything is bounded: connections, how long a connection may be idle, and the bodies that keys
//! are made from.

pub mod keys;
mod usage;

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Instant, Sleep};

use crate::export::{self, UNWRITTEN, clickhouse, webhook};
use crate::meter::events;
use crate::meter::text::{Facts, Process, render};
use crate::meter::usage::Pending;
use crate::meter::{Catalog, Ledger, Link};
use crate::pure::jwt::{self, KeySets};
use crate::pure::limit::Windows;
use crate::pure::plan::{AdminListen, Issuer, Plan, Problem};
use crate::pure::units::ShardId;
use crate::shard::{Phase, Shared};
use crate::store::Store;
use crate::{fleet, rt, store};

/// What the admin port looks at and whom it tells.
pub struct Desk {
    pub shared: Arc<Shared>,
    pub catalog: Arc<ArcSwap<Catalog>>,
    pub books: Books,
    /// Usage by day that the store has not taken yet.
    pub usage: Arc<Pending>,
    /// Each shard and its driver's name.
    pub shards: Vec<(ShardId, &'static str)>,
    /// Orders to control, who answers each.
    pub reload: mpsc::Sender<Order>,
    /// Where keys are kept that are made at run time.
    pub store: Option<Arc<Store>>,
    pub reloads: Reloads,
    /// Unix seconds at which the process started.
    pub started: f64,
}

/// Control's sums and where they come from.
pub struct Books {
    links: Vec<Arc<Link>>,
    /// Taken by control's thread alone, for microseconds, and never across an await.
    ledger: Mutex<Ledger>,
}

impl Books {
    pub fn new(links: Vec<Arc<Link>>) -> Books {
        Books { links, ledger: Mutex::default() }
    }

    /// Shards that have not ticked for `limit`, though they have not ended: one of their tasks
    /// never yields, or the machine gives them no time.
    pub fn stalled(&self, now: crate::pure::units::Instant, limit: Duration) -> Vec<ShardId> {
        let stalls = |link: &&Arc<Link>| {
            !link.closed() && link.beat().is_some_and(|beat| now.since(beat) > limit)
        };
        self.links.iter().filter(stalls).map(|link| link.shard()).collect()
    }

    /// Folds what the shards have sent, then looks at the sums.
    pub fn read<T>(&self, look: impl FnOnce(&Ledger) -> T) -> T {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.fold(&self.links);
        look(&ledger)
    }

    /// Names what was used since the last time.
    pub fn name_usage(&self, pending: &Pending, catalog: &Catalog) {
        let mut ledger = self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
        ledger.fold(&self.links);
        for (whose, spend) in ledger.spends() {
            pending.name(whose, &spend, catalog);
        }
    }
}

/// Reloads since start.
#[derive(Debug, Default)]
pub struct Reloads {
    pub in_force: AtomicU64,
    pub refused: AtomicU64,
}

/// What control is asked to do; it answers when it is done.
#[derive(Debug)]
pub enum Order {
    /// Read the file again.
    Reload(oneshot::Sender<Reloaded>),
    /// Put the keys of the store in force, with the file as it was read last.
    Keys(oneshot::Sender<Reloaded>),
}

/// What became of an order.
#[derive(Debug)]
pub enum Reloaded {
    InForce {
        digest: u64,
        /// What the file asks for and this version does not do.
        notices: Vec<String>,
        /// Fields whose change needs a restart.
        restart: Vec<&'static str>,
        /// Backend host names without an address.
        unresolved: Vec<String>,
    },
    /// The old plan stays.
    Refused(Vec<Problem>),
    /// The file cannot be read; the old plan stays.
    Unreadable(String),
}

/// The service, for one listener after another.
pub fn router(desk: Arc<Desk>, place: Place) -> axum::Router {
    axum::Router::new()
        .route("/metrics", get(metrics))
        .route("/usage", get(usage::usage))
        .route("/plan", get(plan))
        .route("/reload", post(reload))
        .route("/keys", get(keys::list).post(keys::make))
        .route("/keys/{id}", delete(keys::revoke))
        .route("/keys/{id}/rotate", post(keys::rotate))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .fallback(async || refuse(StatusCode::NOT_FOUND, "there is no such page"))
        .method_not_allowed_fallback(async || {
            refuse(StatusCode::METHOD_NOT_ALLOWED, "this page takes another method")
        })
        .layer(middleware::from_fn_with_state((Arc::clone(&desk), place), guard))
        .with_state(desk)
}

fn budgets(plan: &Plan, windows: &Windows) -> Vec<(Arc<str>, f64)> {
    let spent = |tenant: &crate::pure::plan::Tenant| {
        let share = tenant.limits.as_ref()?.spent(windows)?;
        Some((Arc::clone(&tenant.name), share))
    };
    plan.tenants.iter().filter_map(spent).collect()
}

/// Of what a key is made from.
const BODY_MAX: usize = 64 * 1024;

async fn metrics(State(desk): State<Arc<Desk>>) -> Response {
    let catalog = desk.catalog.load();
    let plan = desk.shared.plan.load();
    let page = desk.books.read(|ledger| {
        render(&Facts {
            ledger,
            catalog: &catalog,
            totals: &desk.shared.totals,
            shards: &desk.shards,
            ready: desk.shared.phase() == Phase::Running,
            plan_digest: plan.digest,
            reloads_in_force: desk.reloads.in_force.load(Ordering::Relaxed),
            reloads_refused: desk.reloads.refused.load(Ordering::Relaxed),
            panics: rt::PANICS.load(Ordering::Relaxed),
            fleet: plan.fleet.as_ref().map(|_| {
                let leases = fleet::LEASES.load(Ordering::Relaxed);
                (fleet::UP.load(Ordering::Relaxed), leases)
            }),
            issuers: issuers(&plan, &desk.shared.keysets.load()),
            budgets: budgets(&plan, &desk.shared.windows.load()),
            state_commits: store::COMMITS.load(Ordering::Relaxed),
            state_failures: store::FAILURES.load(Ordering::Relaxed),
            records_unwritten: UNWRITTEN.load(Ordering::Relaxed),
            exported: exported(),
            events_lost: events::LOST.load(Ordering::Relaxed),
            process: process(desk.started),
        })
    });
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

/// What left the process, or could not: counts by sink and result.
fn exported() -> [(&'static str, &'static str, u64); 5] {
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    [
        ("usage_file", "dropped", count(&export::USAGE_UNWRITTEN)),
        ("clickhouse", "sent", count(&clickhouse::SENT)),
        ("clickhouse", "dropped", count(&clickhouse::DROPPED)),
        ("webhook", "sent", count(&webhook::SENT)),
        ("webhook", "dropped", count(&webhook::DROPPED)),
    ]
}

/// Each issuer of tokens, and what is known of its keys.
fn issuers(plan: &Plan, sets: &KeySets) -> Vec<(Arc<str>, jwt::Known)> {
    let known = |issuer: &Issuer| sets.of.get(issuer.keys.place()).cloned().unwrap_or_default();
    plan.issuers.iter().map(|issuer| (Arc::clone(&issuer.name), known(issuer))).collect()
}

async fn readyz(State(desk): State<Arc<Desk>>) -> Response {
    match desk.shared.phase() {
        Phase::Running => "ready\n".into_response(),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response(),
    }
}

async fn reload(State(desk): State<Arc<Desk>>) -> Response {
    let (answer, answered) = oneshot::channel();
    let gone = || refuse(StatusCode::SERVICE_UNAVAILABLE, "the gateway is stopping");
    if desk.reload.send(Order::Reload(answer)).await.is_err() {
        return gone();
    }
    match answered.await {
        Ok(reloaded) => reload_answer(&reloaded),
        Err(_) => gone(),
    }
}

fn reload_answer(reloaded: &Reloaded) -> Response {
    match reloaded {
        Reloaded::InForce { digest, notices, restart, unresolved } => answer(
            StatusCode::OK,
            &json!({
                "status": "in force",
                "digest": format!("{digest:016x}"),
                "notices": notices,
                "restart_needed_for": restart,
                "unresolved": unresolved,
            }),
        ),
        Reloaded::Refused(problems) => answer(
            StatusCode::UNPROCESSABLE_ENTITY,
            &json!({
                "status": "refused",
                "problems": problems.iter().map(problem).collect::<Vec<_>>(),
            }),
        ),
        Reloaded::Unreadable(why) => answer(
            StatusCode::UNPROCESSABLE_ENTITY,
            &json!({ "status": "refused", "problems": [{ "message": why }] }),
        ),
    }
}

fn problem(problem: &Problem) -> Value {
    json!({
        "line": problem.line,
        "column": problem.column,
        "field": problem.field,
        "message": problem.message,
        "hint": problem.hint,
        "owner": problem.owner.as_ref().map(|(kind, name)| json!({ "kind": kind, "name": name })),
    })
}

/// What is in force, without a secret: how traffic is cut up and what runs where now.
async fn plan(State(desk): State<Arc<Desk>>) -> Response {
    let plan = desk.shared.plan.load();
    answer(StatusCode::OK, &summary(&plan))
}

fn summary(plan: &Plan) -> Value {
    let backend = |id: &crate::pure::units::BackendId| {
        let backend = &plan.backends[id.index()];
        let mut address = backend.host_header.as_bytes().to_vec();
        // This path is one that can be joined.
        let _ = backend.base_path.join(b"/v1", b"").map(|target| target.write(&mut address));
        json!({
            "name": &*backend.name,
            "address": String::from_utf8_lossy(&address),
            "weight": backend.weight,
            "version": backend.version.as_deref(),
            "region": backend.region.as_deref(),
            "slots": backend.slots,
            "in_flight": backend.row.in_flight(),
            "ready": backend.row.ready() && !backend.row.draining(),
        })
    };
    let pools = plan.pools.iter().map(|pool| {
        let backends: Vec<_> = pool.backends.iter().map(backend).collect();
        json!({ "name": &*pool.name, "backends": backends })
    });
    let routes = plan.routes.iter().map(|route| {
        let models: Vec<_> = route.matches.models.iter().map(|model| model.as_str()).collect();
        let paths: Vec<_> = route.matches.paths.iter().map(|path| path.as_str()).collect();
        let headers: Vec<_> = route.matches.headers.iter().map(|(name, _)| &**name).collect();
        json!({
            "name": &*route.name,
            "models": models,
            "paths": paths,
            "headers": headers,
            "pool": &*plan.pools[route.pool.index()].name,
            "strategy": format!("{:?}", route.strategy),
        })
    });
    let models = plan.models.iter().map(|model| {
        json!({ "name": &*model.name, "aliases": model.aliases.iter().collect::<Vec<_>>() })
    });
    let tenants = plan
        .tenants
        .iter()
        .map(|tenant| json!({ "name": &*tenant.name, "running": tenant.row.concurrency.now() }));
    json!({
        "digest": format!("{:016x}", plan.digest),
        "open": plan.open(),
        "keys": plan.keys.len(),
        "pools": pools.collect::<Vec<_>>(),
        "routes": routes.collect::<Vec<_>>(),
        "models": models.collect::<Vec<_>>(),
        "tenants": tenants.collect::<Vec<_>>(),
        "notices": plan.notices.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn answer(status: StatusCode, body: &Value) -> Response {
    json_text(status, format!("{body:#}\n"))
}

fn json_text(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn refuse(status: StatusCode, why: &str) -> Response {
    answer(status, &json!({ "error": { "message": why } }))
}

/// Where a listener can be reached from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Protected by the file's mode.
    Unix,
    Loopback,
    Network,
}

async fn guard(
    State((desk, place)): State<(Arc<Desk>, Place)>,
    request: Request,
    next: Next,
) -> Response {
    let verdict = {
        let plan = desk.shared.plan.load();
        let token = plan.admin.token.as_ref().map(|token| token.expose());
        admit(request.method(), request.uri().path(), request.headers(), token, place)
    };
    match verdict {
        Ok(()) => next.run(request).await,
        Err((status, why)) => {
            let mut response = refuse(status, why);
            if status == StatusCode::UNAUTHORIZED {
                let scheme = header::HeaderValue::from_static("Bearer");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
            }
            response
        }
    }
}

fn admit(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    token: Option<&str>,
    place: Place,
) -> Result<(), (StatusCode, &'static str)> {
    // Probes come from a supervisor that knows no token, and learn one word.
    if matches!(path, "/healthz" | "/readyz") {
        return Ok(());
    }
    let field =
        |name| headers.get(name).and_then(|value: &header::HeaderValue| value.to_str().ok());
    let host = field(header::HOST);
    if method != Method::GET
        && method != Method::HEAD
        && let Some(origin) = headers.get(header::ORIGIN)
    {
        let own = host.is_some_and(|host| {
            let authority = origin.as_bytes().splitn(2, |&byte| byte == b'/').nth(1);
            authority.is_some_and(|rest| rest.strip_prefix(b"/") == Some(host.as_bytes()))
        });
        if !own {
            return Err((StatusCode::FORBIDDEN, "a page of another origin asked for this"));
        }
    }
    match token {
        Some(token) => {
            let given = field(header::AUTHORIZATION).and_then(|value| {
                let (scheme, given) = value.split_once(' ')?;
                scheme.eq_ignore_ascii_case("bearer").then_some(given.trim())
            });
            if !given.is_some_and(|given| same(given, token)) {
                return Err((StatusCode::UNAUTHORIZED, "the admin port wants its token"));
            }
        }
        None if place == Place::Loopback && !host.is_none_or(names_this_machine) => {
            return Err((StatusCode::FORBIDDEN, "this Host is not how loopback is called"));
        }
        None => {}
    }
    Ok(())
}

/// In a time that depends on no byte of either: digests are compared whole.
fn same(given: &str, expected: &str) -> bool {
    let (given, expected) = (Sha256::digest(given), Sha256::digest(expected));
    let differing = given.iter().zip(&expected).fold(0, |differing, (a, b)| differing | (a ^ b));
    std::hint::black_box(differing) == 0
}

/// An address, or `localhost`: what no foreign page's name can be.
fn names_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    bare.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

/// A bound admin listener, before it serves.
#[derive(Debug)]
pub enum Bound {
    Tcp(std::net::TcpListener),
    Unix(std::os::unix::net::UnixListener, std::path::PathBuf),
}

impl Bound {
    /// Binds; a Unix socket that a dead process left behind is replaced.
    ///
    /// # Errors
    /// The address is in use, not ours or not permitted.
    pub fn new(listen: &AdminListen) -> io::Result<Bound> {
        match listen {
            AdminListen::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Bound::Tcp(listener))
            }
            AdminListen::Unix(path) => {
                let path = std::path::PathBuf::from(path);
                remove_stale(&path)?;
                // Never reachable for others, not even between bind and chmod.
                let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
                let listener = std::os::unix::net::UnixListener::bind(&path);
                rustix::process::umask(before);
                let listener = listener?;
                listener.set_nonblocking(true)?;
                Ok(Bound::Unix(listener, path))
            }
        }
    }

    pub fn place(&self) -> Place {
        match self {
            Bound::Unix(..) => Place::Unix,
            Bound::Tcp(listener) => match listener.local_addr() {
                Ok(address) if address.ip().to_canonical().is_loopback() => Place::Loopback,
                _ => Place::Network,
            },
        }
    }

    /// Serves for as long as the runtime lives.
    ///
    /// # Errors
    /// The listener cannot be handed to the runtime.
    pub async fn serve(self, desk: Arc<Desk>) -> io::Result<()> {
        let router = router(desk, self.place());
        let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        match self {
            Bound::Tcp(listener) => {
                let listener = TcpListener::from_std(listener)?;
                axum::serve(Door { listener, room }, router).await
            }
            Bound::Unix(listener, path) => {
                let listener = UnixListener::from_std(listener)?;
                let _unlink = Unlink(path);
                axum::serve(Door { listener, room }, router).await
            }
        }
    }
}

impl std::fmt::Display for Bound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bound::Tcp(listener) => match listener.local_addr() {
                Ok(address) => write!(f, "http://{address}"),
                Err(_) => f.write_str("http"),
            },
            Bound::Unix(_, path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Removes the socket at the end, so that the next start finds nothing stale.
struct Unlink(std::path::PathBuf);

impl Drop for Unlink {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn remove_stale(path: &std::path::Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if !found.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "there is a file of another kind at this path",
        )),
        Ok(_) => match std::os::unix::net::UnixStream::connect(path) {
            Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)
            }
            Err(error) => Err(error),
        },
    }
}

/// Scrapers, dashboards and people; more wait in the backlog.
const CONNECTIONS_MAX: usize = 64;

/// A client that neither sends nor takes anything for so long is cut, so that it cannot keep a
/// place for ever. Scrapers that come less often connect anew.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// A listener that lets a bounded number in and watches that they move.
struct Door<L> {
    listener: L,
    room: Arc<Semaphore>,
}

impl<L: axum::serve::Listener> axum::serve::Listener for Door<L> {
    type Io = Visit<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Visit<L::Io>, L::Addr) {
        // Closed never; without a permit the visitor would be let in unbounded, so none comes in.
        let permit = match Arc::clone(&self.room).acquire_owned().await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await,
        };
        let (io, address) = self.listener.accept().await;
        let patience = Box::pin(tokio::time::sleep(IDLE_MAX));
        (Visit { io, patience, _permit: permit }, address)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// One admin connection.
struct Visit<Io> {
    io: Io,
    patience: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl<Io> Visit<Io> {
    /// Passes `poll` on; progress renews the patience, and without it the connection ends.
    fn watch<T>(&mut self, cx: &mut Context<'_>, poll: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.patience.as_mut().reset(Instant::now() + IDLE_MAX);
            return poll;
        }
        match self.patience.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Visit<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.io).poll_read(cx, buf);
        self.watch(cx, poll)
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Visit<Io> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.watch(cx, poll)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// From /proc: a few small reads, no directory of 100,000 descriptors where the kernel counts
/// them itself (Linux 6.2).
fn process(started: f64) -> Process {
    let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let resident_kib = std::fs::read_to_string("/proc/self/status").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let counted = std::fs::metadata("/proc/self/fd").map_or(0, |fd| fd.len());
    let open_fds = match counted {
        0 => std::fs::read_dir("/proc/self/fd").map_or(0, |fds| fds.count() as u64),
        counted => counted,
    };
    Process {
        cpu_seconds: cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9,
        resident_bytes: resident_kib.unwrap_or(0) * 1024,
        open_fds,
        max_fds: rustix::process::getrlimit(rustix::process::Resource::Nofile)
            .current
            .unwrap_or(u64::MAX),
        start_unix_seconds: started,
    }
}

#[cfg(test)]
mod tests {
    //! Rules as tables; the rest over real sockets, with a stand-in for control.

    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::meter::{Booked, Done, Ending, Meter, RequestId};
    use crate::pure::board::Registry;
    use crate::pure::dialect::Endpoint;

    #[test]
    fn who_may_do_what() {
        use Place::{Loopback, Network, Unix};
        let (ok, auth, not) = (StatusCode::OK, StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN);
        let (get, post) = (Method::GET, Method::POST);
        let token = Some("s3cret");
        for (method, path, fields, token, place, expected) in [
            // Without a token: loopback by its own names, everybody elsewhere.
            (&get, "/metrics", &[("host", "127.0.0.1:9900")][..], None, Loopback, ok),
            (&get, "/metrics", &[("host", "localhost")], None, Loopback, ok),
            (&get, "/metrics", &[("host", "[::1]:9900")], None, Loopback, ok),
            (&get, "/metrics", &[], None, Loopback, ok),
            (&get, "/metrics", &[("host", "evil.example:9900")], None, Loopback, not),
            (&get, "/metrics", &[("host", "gw-1:9900")], None, Network, ok),
            (&get, "/metrics", &[("host", "anything")], None, Unix, ok),
            (&get, "/healthz", &[("host", "evil.example")], None, Loopback, ok),
            // A page of another origin changes nothing, whatever it knows.
            (&post, "/reload", &[("host", "127.0.0.1:1")], None, Loopback, ok),
            (
                &post,
                "/reload",
                &[("host", "127.0.0.1:1"), ("origin", "http://evil.example")],
                None,
                Loopback,
                not,
            ),
            (&post, "/reload", &[("host", "127.0.0.1:1"), ("origin", "null")], None, Loopback, not),
            (&post, "/reload", &[("origin", "http://x")], None, Unix, not),
            (
                &post,
                "/reload",
                &[("host", "127.0.0.1:1"), ("origin", "http://127.0.0.1:1")],
                None,
                Loopback,
                ok,
            ),
            // With one: only with it, and then by any name.
            (&get, "/metrics", &[("host", "127.0.0.1")], token, Loopback, auth),
            (&get, "/metrics", &[("authorization", "Bearer wrong")], token, Network, auth),
            (&get, "/metrics", &[("authorization", "Basic s3cret")], token, Network, auth),
            (&get, "/metrics", &[("authorization", "Bearer ")], token, Network, auth),
            (&get, "/metrics", &[("authorization", "Bearer s3cret")], token, Network, ok),
            (
                &post,
                "/reload",
                &[("host", "gw-1"), ("authorization", "bearer s3cret")],
                token,
                Loopback,
                ok,
            ),
            (&get, "/readyz", &[], token, Network, ok),
        ] {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.insert(*name, value.parse().expect("a value"));
            }
            let verdict = admit(method, path, &headers, token, place);
            let status = verdict.map_or_else(|(status, _)| status, |()| StatusCode::OK);
            assert_eq!(status, expected, "{method} {path} {fields:?} {token:?} {place:?}");
        }
    }

    /// A desk with one shard's books and a control that answers each order with `reloaded`.
    fn desk(text: &str, reloaded: fn() -> Reloaded) -> (Arc<Desk>, Meter) {
        let mut registry = Registry::new();
        let no_file = |_: &str| Err("no files".to_owned());
        let plan = Plan::build(text, &|_| None, &no_file, &mut registry).expect("a plan");
        let (meter, link) = Meter::linked(ShardId(0), None);
        let (reload, mut orders) = mpsc::channel::<Order>(1);
        tokio::spawn(async move {
            while let Some(Order::Reload(answer) | Order::Keys(answer)) = orders.recv().await {
                let _ = answer.send(reloaded());
            }
        });
        let totals = Arc::clone(registry.totals());
        let desk = Desk {
            shared: Arc::new(Shared::new(
                Arc::new(plan),
                totals,
                Default::default(),
                Default::default(),
            )),
            catalog: Arc::new(ArcSwap::from_pointee(Catalog::of(&registry))),
            books: Books::new(vec![link]),
            usage: Arc::default(),
            shards: vec![(ShardId(0), "epoll")],
            reload,
            store: None,
            reloads: Reloads::default(),
            started: 0.0,
        };
        (Arc::new(desk), meter)
    }

    const PLAN: &str = "server: { listen: '127.0.0.1:0' }
pools: { p: { backends: [ { name: u1, url: 'http://127.0.0.1:9/base', api_key: sk-secret } ] } }
models: { m: {} }
routes: [ { name: r, match: { model: [m] }, pool: p } ]
tenants: { a: {} }
";

    /// Runs `client` on a thread of its own against a served desk.
    fn against(
        listen: &AdminListen,
        reloaded: fn() -> Reloaded,
        client: impl FnOnce(Arc<Desk>, Meter, SocketAddrOrPath) + Send,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        std::thread::scope(|scope| {
            runtime.block_on(async {
                let (desk, meter) = desk(PLAN, reloaded);
                let bound = Bound::new(listen).expect("bound");
                let at = match &bound {
                    Bound::Tcp(listener) => {
                        SocketAddrOrPath::Address(listener.local_addr().expect("bound"))
                    }
                    Bound::Unix(_, path) => SocketAddrOrPath::Path(path.clone()),
                };
                let served = desk.clone();
                let (ended, end) = oneshot::channel();
                scope.spawn(move || {
                    client(served, meter, at);
                    ended.send(())
                });
                tokio::select! {
                    result = bound.serve(desk) => panic!("{result:?}"),
                    // A client that failed an assertion dropped its end; the scope tells.
                    _ = end => {}
                }
            });
        });
    }

    enum SocketAddrOrPath {
        Address(std::net::SocketAddr),
        Path(std::path::PathBuf),
    }

    fn ask(at: &SocketAddrOrPath, request: &str) -> (u16, String) {
        let text = format!("{request} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let mut answer = String::new();
        match at {
            SocketAddrOrPath::Address(address) => {
                let mut stream = std::net::TcpStream::connect(address).expect("connected");
                stream.write_all(text.as_bytes()).expect("sent");
                stream.read_to_string(&mut answer).expect("read");
            }
            SocketAddrOrPath::Path(path) => {
                let mut stream = std::os::unix::net::UnixStream::connect(path).expect("connected");
                stream.write_all(text.as_bytes()).expect("sent");
                stream.read_to_string(&mut answer).expect("read");
            }
        }
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
        (head[9..12].parse().expect("a status"), body.to_owned())
    }

    fn any_port() -> AdminListen {
        AdminListen::Tcp("127.0.0.1:0".parse().expect("an address"))
    }

    fn in_force() -> Reloaded {
        Reloaded::InForce { digest: 7, notices: vec![], restart: vec![], unresolved: vec![] }
    }

    #[test]
    fn what_a_shard_has_handed_over_is_seen_at_the_next_look() {
        against(&any_port(), in_force, |desk, mut meter, at| {
            let tenant = desk.catalog.load().tenant("a").expect("known");
            let (status, usage) = ask(&at, "GET /usage?tenant=a");
            let usage: Value = serde_json::from_str(&usage).expect("JSON");
            assert_eq!((status, &usage["total_tokens"]), (200, &json!(0)));
            meter.done(&Done {
                at: rt::now(),
                request_id: RequestId::new(b"1"),
                tenant,
                key: Default::default(),
                route: Default::default(),
                model: Default::default(),
                backend: Default::default(),
                status: 200,
                streamed: false,
                how: Ending::Whole,
                path: Endpoint::Chat,
                attempts: 1,
                bytes_in: 0,
                bytes_out: 0,
                queue: None,
                ttft: None,
                duration: Duration::from_millis(1),
                usage: Booked { prompt: 9, completion: 3, estimated: 3, ..Booked::default() },
            });
            meter.tick(rt::now());
            let (_, usage) = ask(&at, "GET /usage?tenant=a");
            let usage: Value = serde_json::from_str(&usage).expect("JSON");
            for (field, count) in [
                ("prompt_tokens", 9),
                ("completion_tokens", 3),
                ("total_tokens", 12),
                ("estimated_tokens", 3),
            ] {
                assert_eq!(usage[field], count, "{field}");
            }
            assert_eq!(usage["tenant"], "a");
            let (status, metrics) = ask(&at, "GET /metrics");
            assert_eq!(status, 200);
            let line = "forebay_tenant_tokens_total{tenant=\"a\",kind=\"estimated\"} 3\n";
            assert!(metrics.contains(line), "{metrics}");
            assert_eq!(ask(&at, "GET /usage?tenant=nobody").0, 404);
            let (_, all) = ask(&at, "GET /usage");
            let all: Value = serde_json::from_str(&all).expect("JSON");
            assert_eq!(all["tenants"][1]["total_tokens"], 12);
        });
    }

    #[test]
    fn the_plan_is_shown_without_its_secrets() {
        against(&any_port(), in_force, |_, _, at| {
            let (status, plan) = ask(&at, "GET /plan");
            assert_eq!(status, 200);
            assert!(!plan.contains("sk-secret"), "{plan}");
            let plan: Value = serde_json::from_str(&plan).expect("JSON");
            assert_eq!(plan["pools"][0]["backends"][0]["address"], "127.0.0.1:9/base/v1");
            assert_eq!(plan["routes"][0]["pool"], "p");
            assert_eq!(plan["open"], true);
        });
    }

    #[test]
    fn a_shard_that_does_not_tick_is_noticed_until_it_ends() {
        let at = crate::pure::units::Instant::from_nanos;
        let (mut meter, link) = Meter::linked(ShardId(3), None);
        let books = Books::new(vec![link]);
        let limit = Duration::from_nanos(10);
        // One that has not begun is not late.
        assert_eq!(books.stalled(at(1_000), limit), []);
        meter.tick(at(5));
        assert_eq!(books.stalled(at(15), limit), []);
        assert_eq!(books.stalled(at(16), limit), [ShardId(3)]);
        drop(meter);
        assert_eq!(books.stalled(at(16), limit), []);
    }

    #[test]
    fn readiness_ends_when_draining_begins() {
        against(&any_port(), in_force, |desk, _, at| {
            assert_eq!(ask(&at, "GET /readyz").0, 200);
            desk.shared.set_phase(Phase::Draining);
            assert_eq!(ask(&at, "GET /readyz").0, 503);
            assert_eq!(ask(&at, "GET /healthz").0, 200);
            assert!(ask(&at, "GET /metrics").1.contains("forebay_ready 0\n"));
        });
    }

    #[test]
    fn only_post_reloads_and_the_answer_is_controls() {
        let refused = || {
            Reloaded::Refused(vec![Problem {
                line: 3,
                column: 5,
                field: "routes[0].pool".to_owned(),
                message: "there is no pool `q`".to_owned(),
                hint: None,
                owner: Some(("route", "chat".to_owned())),
            }])
        };
        against(&any_port(), refused, |_, _, at| {
            assert_eq!(ask(&at, "GET /reload").0, 405);
            let (status, body) = ask(&at, "POST /reload");
            let body: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!((status, &body["status"]), (422, &json!("refused")));
            assert_eq!(body["problems"][0]["line"], 3);
            assert_eq!(body["problems"][0]["owner"]["name"], "chat");
            assert_eq!(ask(&at, "GET /nothing").0, 404);
            assert_eq!(ask(&at, "POST /metrics").0, 405);
        });
        against(&any_port(), in_force, |_, _, at| {
            let (status, body) = ask(&at, "POST /reload");
            let body: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!((status, &body["status"]), (200, &json!("in force")));
        });
    }

    /// As many connections as there is room for, all idle: the next one waits until one leaves.
    #[test]
    fn connections_are_bounded() {
        against(&any_port(), in_force, |_, _, at| {
            let SocketAddrOrPath::Address(address) = at else { return };
            let connect = || std::net::TcpStream::connect(address).expect("connected");
            let get = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";
            let mut idle: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connect()).collect();
            let mut buf = [0; 512];
            for stream in &mut idle {
                stream.write_all(get).expect("sent");
                assert!(stream.read(&mut buf).expect("served") > 0);
            }
            let mut one_more = connect();
            one_more.write_all(get).expect("sent");
            let patience = Duration::from_millis(100);
            one_more.set_read_timeout(Some(patience)).expect("set");
            assert!(one_more.read(&mut buf).is_err());
            idle.pop();
            one_more.set_read_timeout(None).expect("set");
            assert!(one_more.read(&mut buf).expect("served") > 0);
        });
    }

    #[test]
    fn a_unix_socket_is_ours_alone_and_leaves_nothing_behind() {
        let folder = std::env::temp_dir().join(format!("forebay-admin-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.join("admin.sock");
        let listen = AdminListen::Unix(path.to_string_lossy().into_owned());
        // What a killed process leaves.
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
        against(&listen, in_force, |_, _, at| {
            let mode = std::fs::metadata(&path).expect("there").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(ask(&at, "GET /metrics").0, 200);
            // A second gateway does not take it away.
            assert!(Bound::new(&listen).is_err());
            assert_eq!(ask(&at, "GET /metrics").0, 200);
        });
        assert!(!path.exists());
        std::fs::write(&path, "precious").expect("written");
        assert!(Bound::new(&listen).is_err());
        assert_eq!(std::fs::read(&path).expect("kept"), b"precious");
        std::fs::remove_dir_all(folder).expect("removed");
    }
}
