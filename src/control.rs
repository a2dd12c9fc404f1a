//! The control loop: everything that is not a request.
//!
//! It reads the configuration, claims what the process needs before anything runs (state folder,
//! CPUs, driver, every listening socket), starts the shards, and then reacts: it folds what they
//! report, resolves names, reloads, answers the admin port, drains and stops. It decides nothing
//! about a request, and the shards run without it for as long as it is away.
//!
//! Nothing blocks its thread: files are read, plans built and names resolved on threads of their
//! own.

use std::cell::RefCell;
use std::fmt;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use crate::admin::{self, Books, Desk, Order, Reloaded, Reloads};
use crate::export::clickhouse::ClickHouse;
use crate::export::{Exports, Sinks, UsageFile};
use crate::fleet::Fleet;
use crate::meter::events::{self, Level, say};
use crate::meter::usage::Pending;
use crate::meter::{Catalog, Meter, unix_ns};
use crate::pure::board::Registry;
use crate::pure::limit::Windows;
use crate::pure::plan::{AdminListen, MadeKeys, Plan, Severity};
use crate::pure::units::ShardId;
use crate::rt::Driver;
use crate::shard::{self, Commits, Phase, Setup, Shared};
use crate::store::{Store, Unusable};

mod alarms;
mod cpus;
mod host;
mod keysets;
mod names;
mod source;

pub use source::{Loaded, NoPlan, Source};

use alarms::Alarms;
use host::{HandedOver, Obstacle};
use keysets::Keys;
use names::Names;

/// What the command line says beside the file.
#[derive(Default)]
pub struct Options {
    /// `None` takes the first that works.
    pub driver: Option<Driver>,
    /// Shards float over the CPUs instead of being pinned.
    pub unpinned: bool,
    /// `None` is standard output.
    pub access_log: Option<PathBuf>,
    pub serving: Option<Serving>,
}

/// Called once when the gateway serves, with its addresses.
pub type Serving = Box<dyn FnOnce(&[SocketAddr])>;

/// Runs the gateway until it is told to stop. The exit status is 0 after SIGTERM or SIGINT, and 1
/// when it could not start or a shard has died; why is on standard error.
pub fn run(source: Source, options: Options) -> ExitCode {
    let level = std::env::var("RUST_LOG").map_or(Level::default(), |text| Level::of(&text));
    host::survive_size_limits();
    // Before anything is opened.
    let handed = HandedOver::adopt();
    report_panics();
    let mut registry = Registry::new();
    let load = |made: &MadeKeys, registry: &mut Registry| match source.load(made, registry) {
        Ok(loaded) => Some(loaded),
        Err(no_plan) => {
            tell(&no_plan.report(&source.name()));
            None
        }
    };
    let Some(Loaded { plan, .. }) = load(&MadeKeys::default(), &mut registry) else {
        return ExitCode::FAILURE;
    };
    let claims = match Claims::take(&source, &plan, &mut registry, &options, handed) {
        Ok(claims) => claims,
        Err(refusal) => {
            tell(&format!("error: {refusal}\n"));
            return ExitCode::FAILURE;
        }
    };
    // Where the keys of the store are is only known from the file.
    let made = match admin::keys::made(claims.store.as_deref()) {
        Ok(made) => made,
        Err(why) => {
            tell(&format!("error: the keys in state.dir cannot be read: {why}\n"));
            return ExitCode::FAILURE;
        }
    };
    let Some(loaded) = load(&made, &mut registry) else { return ExitCode::FAILURE };
    // Its vocabularies are this one's as well; kept longer they would outlive a reload.
    drop(plan);
    let plan = &loaded.plan;
    tell(&claims.banner(&source, plan));
    events::start(level);
    let ended = serve(source, loaded, registry, claims, options, level);
    let code = match ended {
        Ok(code) => code,
        Err(error) => {
            say(Level::Error, "not_started", &[("error", &error)]);
            ExitCode::FAILURE
        }
    };
    events::flush(Duration::from_secs(1));
    code
}

/// For people, before anything runs.
fn tell(text: &str) {
    // A closed standard error is no reason not to start.
    let _ = io::stderr().write_all(text.as_bytes());
}

/// A panic becomes an event with its place. Its message may quote what was being handled, so it
/// is left out unless it is a literal of ours.
fn report_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        let literal = panic.payload().downcast_ref::<&'static str>().copied().unwrap_or("");
        let thread = std::thread::current();
        say(
            Level::Error,
            "panic",
            &[
                ("thread", &thread.name().unwrap_or("unnamed")),
                ("place", &place),
                ("message", &literal),
            ],
        );
    }));
}

/// What the process holds before it starts: all of it, or nothing and a reason.
struct Claims {
    /// Held for life.
    _state: Option<std::fs::File>,
    store: Option<Arc<Store>>,
    cpus: Vec<Option<usize>>,
    driver: Driver,
    passed_over: Vec<(Driver, io::Error)>,
    /// By shard.
    listeners: Vec<Vec<OwnedFd>>,
    admin: Option<admin::Bound>,
    open_files: u64,
}

/// Why the process does not start, apart from the configuration.
#[derive(Debug)]
enum Refusal {
    Obstacle(Obstacle),
    Store(Unusable),
    Cpus(cpus::NotAllowed),
    Driver { driver: Driver, error: io::Error },
    Admin { listen: String, error: io::Error },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Obstacle(obstacle) => obstacle.fmt(f),
            Refusal::Store(unusable) => unusable.fmt(f),
            Refusal::Cpus(not_allowed) => not_allowed.fmt(f),
            Refusal::Driver { driver, error } => {
                write!(f, "the driver {} was asked for and does not work here: ", driver.name())?;
                error.fmt(f)
            }
            Refusal::Admin { listen, error } => {
                write!(f, "cannot listen on {listen} for admin.listen: {error}")
            }
        }
    }
}

impl From<Obstacle> for Refusal {
    fn from(obstacle: Obstacle) -> Refusal {
        Refusal::Obstacle(obstacle)
    }
}

impl Claims {
    fn take(
        source: &Source,
        plan: &Plan,
        registry: &mut Registry,
        options: &Options,
        handed: HandedOver,
    ) -> Result<Claims, Refusal> {
        let open_files = host::raise_open_files();
        let state = plan.state_dir.as_deref().map(|folder| source.beside(folder));
        let (mut lock, mut store) = (None, None);
        if let Some(folder) = state {
            lock = Some(host::lock_state(&folder)?);
            let opened = Store::open(&folder).map_err(Refusal::Store)?;
            // Seconds since 1970 are positive and whole enough.
            let windows = Windows::at(unix_seconds() as u64, crate::rt::now());
            opened.restore(registry, &windows).map_err(Refusal::Store)?;
            store = Some(Arc::new(opened));
        }
        let server = &plan.server;
        let allowed = cpus::Allowed::here();
        let cpus = cpus::layout(&server.shards, server.gpu_cpu, &allowed, !options.unpinned)
            .map_err(Refusal::Cpus)?;
        let (driver, passed_over) = match options.driver {
            Some(driver) => match driver.probe() {
                Ok(()) => (driver, Vec::new()),
                Err(error) => return Err(Refusal::Driver { driver, error }),
            },
            None => Driver::choose(),
        };
        let listeners = host::listeners(&server.listen, cpus.len(), handed)?;
        let admin = plan.admin.listen.as_ref().map(|listen| match listen {
            AdminListen::Unix(path) => {
                let path = source.beside(path).to_string_lossy().into_owned();
                let listen = format!("unix:{path}");
                admin::Bound::new(&AdminListen::Unix(path)).map_err(|error| (listen, error))
            }
            AdminListen::Tcp(address) => {
                admin::Bound::new(listen).map_err(|error| (address.to_string(), error))
            }
        });
        let admin =
            admin.transpose().map_err(|(listen, error)| Refusal::Admin { listen, error })?;
        Ok(Claims { _state: lock, store, cpus, driver, passed_over, listeners, admin, open_files })
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        let sockets = self.listeners.first().map(Vec::as_slice).unwrap_or_default();
        sockets
            .iter()
            .filter_map(|socket| rustix::net::getsockname(socket).ok()?.try_into().ok())
            .collect()
    }

    /// What an operator wants to read once.
    fn banner(&self, source: &Source, plan: &Plan) -> String {
        let mut lines = Vec::new();
        let pinned: Vec<String> = self.cpus.iter().flatten().map(ToString::to_string).collect();
        let place = match pinned.is_empty() {
            true => "unpinned".to_owned(),
            false => format!("on CPU {}", pinned.join(", ")),
        };
        let shards = counted(self.cpus.len(), "shard");
        let version = env!("CARGO_PKG_VERSION");
        lines.push(format!("forebay {version}: {shards} {place}, {}", self.driver.name()));
        for (driver, error) in &self.passed_over {
            lines.push(format!("  {} does not work here: {error}", driver.name()));
        }
        for address in self.addresses() {
            lines.push(format!("  serves   http://{address}"));
        }
        match &self.admin {
            Some(admin) => lines.push(format!("  admin    {admin}")),
            None => lines.push("  admin    off".to_owned()),
        }
        lines.push(format!("  plan     {}: {}", source.name(), contents(plan)));
        for notice in &plan.notices {
            lines.push(format!("  {}: {notice}", notice.severity.word()));
        }
        let needed = plan.server.bounds.connections.saturating_mul(2);
        if self.open_files < needed {
            lines.push(format!(
                "  open files: the limit of {} is below twice server.bounds.connections; raise \
                 LimitNOFILE or lower the bound",
                self.open_files
            ));
        }
        let in_the_open = self.admin.as_ref().is_some_and(|a| a.place() == admin::Place::Network);
        if in_the_open && plan.admin.token.is_none() {
            lines.push(
                "  OPEN ADMIN PORT: it can be reached from the network and has no token".into(),
            );
        }
        if self.store.is_none() && plan.counts_windows() {
            lines.push(
                "  NOT KEPT: daily limits and budgets begin anew with each start; set state.dir"
                    .to_owned(),
            );
        }
        if plan.open() {
            lines.push(
                "  OPEN: no keys are configured: anybody who can reach this port may spend your GPUs"
                    .to_owned(),
            );
        }
        lines.push(String::new());
        lines.join("\n")
    }
}

/// How much there is of what in a plan: `1 route, 2 pools, …`.
pub fn contents(plan: &Plan) -> String {
    let issuers = match plan.issuers.len() {
        0 => String::new(),
        count => format!(", {}", counted(count, "issuer")),
    };
    let counts = [
        counted(plan.routes.len(), "route"),
        counted(plan.pools.len(), "pool"),
        counted(plan.backends.len(), "backend"),
        counted(plan.models.len(), "model"),
        counted(plan.tenants.len(), "tenant"),
        counted(plan.keys.len(), "key"),
    ];
    counts.join(", ") + &issuers
}

/// `1 route`, `2 routes`.
pub fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// How often shards' reports are folded, and what else is looked at: each time wakes a sleeping core,
/// which costs more than the looking. Whoever asks for the numbers folds what has come by then.
const FOLD_EVERY: Duration = Duration::from_millis(100);
/// How often backend names are looked up.
const RESOLVE_EVERY: Duration = Duration::from_secs(30);
/// How long a start or a reload waits for names.
const RESOLVE_LIMIT: Duration = Duration::from_secs(2);
/// How long a start or a reload waits for the keys of issuers.
const KEYS_LIMIT: Duration = Duration::from_secs(2);
/// How often shards are looked at, and after how long without a tick one counts as stalled.
const WATCH_EVERY: Duration = Duration::from_secs(1);
const STALL_MAX: Duration = Duration::from_secs(2);
/// For shards to say their last words when told to stop.
const STOP_LIMIT: Duration = Duration::from_secs(3);
/// For the access log's reader and for ClickHouse to take what is left.
const EXPORT_LIMIT: Duration = Duration::from_secs(3);

fn serve(
    source: Source,
    loaded: Loaded,
    registry: Registry,
    claims: Claims,
    options: Options,
    level: Level,
) -> io::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // Lookups and files; each is bounded where it is started.
        .max_blocking_threads(64)
        .build()?;
    let local = tokio::task::LocalSet::new();
    let code = local.block_on(&runtime, control(source, loaded, registry, claims, options, level));
    // A lookup that hangs must not keep the process.
    runtime.shutdown_background();
    code
}

async fn control(
    source: Source,
    loaded: Loaded,
    registry: Registry,
    claims: Claims,
    options: Options,
    level: Level,
) -> io::Result<ExitCode> {
    // Before the shards run: a signal that comes now is not lost.
    let mut signals = Signals::new()?;
    let began = Instant::now();
    let totals = Arc::clone(registry.totals());
    let catalog = Arc::new(ArcSwap::from_pointee(Catalog::of(&registry)));
    let addresses = claims.addresses();
    let sinks = sinks(&loaded.plan, &source, options.access_log, level);
    let exports = Exports::start(sinks, Arc::clone(&catalog))?;

    let names = Names::new(names::system);
    let unresolved = names.refresh(&loaded.plan, RESOLVE_LIMIT).await;
    say_unresolved(&unresolved);
    let plan = Arc::new(loaded.plan);
    let commits = Commits::new(if claims.store.is_some() { claims.cpus.len() } else { 0 })?;
    let shared = Arc::new(Shared::new(Arc::clone(&plan), totals, names.known(), commits));
    follow_calendar(&shared);
    let source = Arc::new(source);
    let keys = Keys::new();
    say_without_keys(&keys.follow(&plan, &source, KEYS_LIMIT).await);
    if let Some(sets) = keys.news() {
        shared.keysets.store(Arc::new(sets));
    }
    let mut alarms = Alarms::new(&plan, &shared.windows.load());
    let usage = Arc::new(Pending::default());
    let start = |store: &Arc<Store>| {
        Arc::clone(store).start(Arc::clone(&shared), Arc::clone(&catalog), Arc::clone(&usage))
    };
    let writer = claims.store.as_ref().map(start).transpose()?;
    let fleet = match &plan.fleet {
        Some(_) => Some(Fleet::start(Arc::clone(&shared))?),
        None => None,
    };
    let driver = claims.driver;
    let shards: Vec<_> = (0..).map(ShardId).zip(claims.cpus).zip(claims.listeners).collect();
    let count = shards.len();
    let drivers = shards.iter().map(|((id, _), _)| (*id, driver.name())).collect();
    let (deaths, mut died) = mpsc::unbounded_channel();
    let mut links = Vec::new();
    for ((id, cpu), listeners) in shards {
        let records = exports.as_ref().map(Exports::records);
        let (meter, link) = Meter::linked(id, records);
        links.push(link);
        let shared = Arc::clone(&shared);
        // Fits: there are fewer shards than threads, and fewer threads than 2^22.
        let setup = Setup { id, shards: count as u32, cpu, driver, listeners, shared, meter };
        start_shard(setup, deaths.clone())?;
    }

    let (orders, orders_in) = mpsc::channel(ORDERS_MAX);
    let desk = Arc::new(Desk {
        shared: Arc::clone(&shared),
        catalog: Arc::clone(&catalog),
        books: Books::new(links),
        usage,
        shards: drivers,
        reload: orders.clone(),
        store: claims.store.clone(),
        reloads: Reloads::default(),
        started: unix_seconds(),
    });
    if let Some(admin) = claims.admin {
        let desk = Arc::clone(&desk);
        tokio::spawn(async move {
            if let Err(error) = admin.serve(desk).await {
                say(Level::Error, "admin_port_lost", &[("error", &error)]);
            }
        });
    }
    let reloader = Reloader {
        source: Arc::clone(&source),
        registry: Arc::new(Mutex::new(registry)),
        keys: Rc::clone(&keys),
        text: RefCell::new(loaded.text),
        started_with: plan,
        names: Rc::clone(&names),
        desk: Arc::clone(&desk),
    };
    tokio::task::spawn_local(reloader.run(orders_in));

    say(Level::Info, "serving", &[("shards", &count), ("driver", &driver.name())]);
    host::notify("READY=1");
    if let Some(serving) = options.serving {
        serving(&addresses);
    }

    let mut watch = tokio::time::interval(WATCH_EVERY);
    watch.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut state = State::Running;
    let mut left = count;
    let mut failed = false;
    let mut fold = tokio::time::interval(FOLD_EVERY);
    fold.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut resolve = tokio::time::interval_at(Instant::now() + RESOLVE_EVERY, RESOLVE_EVERY);
    while left > 0 {
        tokio::select! {
            biased;
            Some((id, end)) = died.recv() => {
                left -= 1;
                if let Some(why) = end.complaint(state) {
                    say(Level::Error, "shard_died", &[("shard", &(id as ShardId).0), ("error", &why)]);
                    failed = true;
                    state = state.stop(&shared);
                }
            }
            told = signals.next() => match (told, state) {
                (Told::HangUp, _) => {
                    if let Some(exports) = &exports {
                        exports.reopen();
                    }
                    // If so many wait already, the file will be read again anyway.
                    let _ = orders.try_send(Order::Reload(oneshot::channel().0));
                }
                (Told::Terminate, State::Running) => {
                    let grace = shared.plan.load().server.grace;
                    let running = shared.totals.requests_in_flight.held();
                    say(Level::Info, "draining", &[("requests", &running), ("grace_s", &grace.as_secs())]);
                    host::notify("STOPPING=1");
                    shared.set_phase(Phase::Draining);
                    state = State::Draining { until: Instant::now() + grace };
                }
                (Told::Terminate, State::Draining { .. }) => state = state.stop(&shared),
                (Told::Terminate, State::Stopping { .. }) => break,
            },
            () = state.over() => {
                if matches!(state, State::Stopping { .. }) {
                    say(Level::Error, "shards_do_not_stop", &[("shards", &left)]);
                    failed = true;
                    break;
                }
                let running = shared.totals.requests_in_flight.held();
                say(Level::Warn, "grace_is_over", &[("requests", &running)]);
                state = state.stop(&shared);
            }
            _ = fold.tick() => {
                desk.books.read(|_| ());
                follow_calendar(&shared);
                alarms.look(&shared.plan.load(), &shared.windows.load());
                let wanted = shared.keys_wanted.swap(false, Ordering::Relaxed);
                keys.tick(&shared.plan.load(), &source, wanted);
                if let Some(sets) = keys.news() {
                    shared.keysets.store(Arc::new(sets));
                }
                if let Some(addresses) = names.news() {
                    shared.addresses.store(Arc::new(addresses));
                }
            }
            _ = resolve.tick() => names.start(&shared.plan.load()),
            _ = watch.tick() => {
                desk.books.name_usage(&desk.usage, &catalog.load());
                let stalled = desk.books.stalled(crate::rt::now(), STALL_MAX);
                for shard in &stalled {
                    say(Level::Error, "shard_stalled", &[("shard", &shard.0)]);
                }
                // A service manager that watches us restarts a gateway whose shards hang.
                if stalled.is_empty() {
                    host::notify("WATCHDOG=1");
                }
            }
        }
    }

    if let Some(fleet) = fleet {
        fleet.finish();
    }
    desk.books.name_usage(&desk.usage, &catalog.load());
    if let Some(writer) = writer {
        writer.finish();
    }
    let lost = exports.is_some_and(|exports| !exports.finish(EXPORT_LIMIT));
    desk.books.read(|ledger| {
        say(
            Level::Info,
            "stopped",
            &[
                ("requests", &ledger.requests()),
                ("records_dropped", &ledger.shards.records_dropped),
                ("records_unfinished", &lost),
                ("panics", &crate::rt::PANICS.load(Ordering::Relaxed)),
                ("seconds", &began.elapsed().as_secs()),
            ],
        );
    });
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Where a record of each request goes.
fn sinks(plan: &Plan, source: &Source, log: Option<PathBuf>, level: Level) -> Sinks {
    let usage = &plan.usage;
    Sinks {
        access_log: (!matches!(level, Level::Off | Level::Error | Level::Warn)).then_some(log),
        usage_file: usage.file.as_ref().map(|file| UsageFile {
            path: source.beside(&file.path),
            bytes_max: file.bytes_max,
            keep: file.keep,
        }),
        clickhouse: usage.clickhouse.as_ref().map(|target| ClickHouse {
            url: target.url.to_string(),
            table: target.table.to_string(),
            user: target.user.as_deref().map(str::to_owned),
            password: target.password.as_ref().map(|secret| secret.expose().to_owned()),
            ca: target.ca.clone(),
        }),
    }
}

/// Backends under these names get no traffic until a later lookup succeeds.
fn say_unresolved(names: &[Box<str>]) {
    for name in names {
        say(Level::Warn, "backend_without_address", &[("name", name)]);
    }
}

/// Tokens of these issuers open nothing until their keys are there.
fn say_without_keys(issuers: &[Arc<str>]) {
    for issuer in issuers {
        say(Level::Warn, "issuer_without_keys", &[("issuer", issuer)]);
    }
}

/// Tells the shards when a day, a week or a month has begun, or the wall clock was set.
fn follow_calendar(shared: &Shared) {
    let known = shared.windows.load();
    // Seconds since 1970 are positive and whole enough.
    let next = Windows::at(unix_seconds() as u64, crate::rt::now()).not_before(**known);
    if next.differ(&known) {
        shared.windows.store(Arc::new(next));
    }
}

/// Orders to reload that may wait.
const ORDERS_MAX: usize = 16;

/// A double keeps them to a few hundred nanoseconds.
fn unix_seconds() -> f64 {
    unix_ns() as f64 / 1e9
}

#[derive(Clone, Copy, Debug)]
enum State {
    Running,
    Draining { until: Instant },
    Stopping { until: Instant },
}

impl State {
    /// Ends when this state has lasted long enough.
    async fn over(self) {
        match self {
            State::Running => std::future::pending().await,
            State::Draining { until } | State::Stopping { until } => {
                tokio::time::sleep_until(until).await;
            }
        }
    }

    /// Everything ends now; told twice, the first time counts.
    fn stop(self, shared: &Shared) -> State {
        match self {
            State::Stopping { .. } => self,
            _ => {
                shared.set_phase(Phase::Stopping);
                State::Stopping { until: Instant::now() + STOP_LIMIT }
            }
        }
    }
}

/// How a shard's thread ended.
enum End {
    Returned(io::Result<()>),
    Panicked,
}

impl End {
    /// What is wrong with it, if anything is.
    fn complaint(self, state: State) -> Option<String> {
        match self {
            End::Panicked => Some("it panicked outside of any request".to_owned()),
            End::Returned(Err(error)) => Some(error.to_string()),
            End::Returned(Ok(())) if matches!(state, State::Running) => {
                Some("it ended without being told to".to_owned())
            }
            End::Returned(Ok(())) => None,
        }
    }
}

fn start_shard(setup: Setup, deaths: mpsc::UnboundedSender<(ShardId, End)>) -> io::Result<()> {
    let id = setup.id;
    let body = move || {
        let end = match catch_unwind(AssertUnwindSafe(|| shard::run(setup))) {
            Ok(result) => End::Returned(result),
            Err(_) => End::Panicked,
        };
        // Nobody listens any more when control gave up on us.
        let _ = deaths.send((id, end));
    };
    std::thread::Builder::new().name(format!("shard-{}", id.0)).spawn(body).map(drop)
}

enum Told {
    Terminate,
    HangUp,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Told {
        // Cancelling `recv` loses no signal.
        tokio::select! {
            _ = self.terminate.recv() => Told::Terminate,
            _ = self.interrupt.recv() => Told::Terminate,
            _ = self.hang_up.recv() => Told::HangUp,
        }
    }
}

/// Reads the configuration again, one order after the other.
struct Reloader {
    source: Arc<Source>,
    /// Locked by one build at a time, on a thread that may block.
    registry: Arc<Mutex<Registry>>,
    /// The file as it was when it was last put in force.
    text: RefCell<String>,
    /// What listeners, shards and the state folder were made from.
    started_with: Arc<Plan>,
    names: Rc<Names>,
    keys: Rc<Keys>,
    desk: Arc<Desk>,
}

impl Reloader {
    async fn run(self, mut orders: mpsc::Receiver<Order>) {
        while let Some(order) = orders.recv().await {
            let answer = match order {
                Order::Reload(answer) => answer,
                Order::Keys(answer) => {
                    let changed = self.rekey().await;
                    if !matches!(changed, Reloaded::InForce { .. }) {
                        self.report(&changed);
                    }
                    let _ = answer.send(changed);
                    continue;
                }
            };
            host::notify(&format!(
                "RELOADING=1\nMONOTONIC_USEC={}",
                crate::rt::now().nanos() / 1_000
            ));
            let reloaded = self.reload().await;
            host::notify("READY=1");
            self.report(&reloaded);
            // Whoever asked may have gone.
            let _ = answer.send(reloaded);
        }
    }

    async fn reload(&self) -> Reloaded {
        let (source, registry) = (Arc::clone(&self.source), Arc::clone(&self.registry));
        let store = self.desk.store.clone();
        let built = tokio::task::spawn_blocking(move || {
            let made = admin::keys::made(store.as_deref()).map_err(NoPlan::Unreadable)?;
            let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
            let loaded = source.load(&made, &mut registry)?;
            Ok((loaded, Catalog::of(&registry)))
        });
        let (Loaded { plan, text }, catalog) = match built.await {
            Ok(Ok(built)) => built,
            Ok(Err(NoPlan::Refused { problems, .. })) => return Reloaded::Refused(problems),
            Ok(Err(NoPlan::Unreadable(why))) => return Reloaded::Unreadable(why),
            Err(_) => return Reloaded::Unreadable("reading it panicked".to_owned()),
        };
        self.text.replace(text);
        let unresolved = self.names.refresh(&plan, RESOLVE_LIMIT).await;
        say_unresolved(&unresolved);
        say_without_keys(&self.keys.follow(&plan, &self.source, KEYS_LIMIT).await);
        let plan = Arc::new(plan);
        let shared = &self.desk.shared;
        // Names, addresses and keys first: a request that sees the new plan finds them.
        if let Some(sets) = self.keys.news() {
            shared.keysets.store(Arc::new(sets));
        }
        self.desk.catalog.store(Arc::new(catalog));
        shared.addresses.store(Arc::new(self.names.known()));
        shared.plan.store(Arc::clone(&plan));
        self.names.forget_all_but(&plan);
        Reloaded::InForce {
            digest: plan.digest,
            notices: plan.notices.iter().map(ToString::to_string).collect(),
            restart: restart_needed(&self.started_with, &plan),
            unresolved: unresolved.into_iter().map(String::from).collect(),
        }
    }

    /// Puts the keys of the store in force; nothing else changes.
    async fn rekey(&self) -> Reloaded {
        let (source, registry) = (Arc::clone(&self.source), Arc::clone(&self.registry));
        let (store, text) = (self.desk.store.clone(), self.text.borrow().clone());
        let built = tokio::task::spawn_blocking(move || {
            let made = admin::keys::made(store.as_deref()).map_err(NoPlan::Unreadable)?;
            let mut registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
            let plan = source.build(text, &made, &mut registry)?.plan;
            Ok((plan, Catalog::of(&registry)))
        });
        let (plan, catalog) = match built.await {
            Ok(Ok(built)) => built,
            Ok(Err(NoPlan::Refused { problems, .. })) => return Reloaded::Refused(problems),
            Ok(Err(NoPlan::Unreadable(why))) => return Reloaded::Unreadable(why),
            Err(_) => return Reloaded::Unreadable("building it panicked".to_owned()),
        };
        let digest = plan.digest;
        self.desk.catalog.store(Arc::new(catalog));
        self.desk.shared.plan.store(Arc::new(plan));
        Reloaded::InForce {
            digest,
            notices: Vec::new(),
            restart: Vec::new(),
            unresolved: Vec::new(),
        }
    }

    fn report(&self, reloaded: &Reloaded) {
        let reloads = &self.desk.reloads;
        match reloaded {
            Reloaded::InForce { digest, restart, .. } => {
                reloads.in_force.fetch_add(1, Ordering::Relaxed);
                let digest = format!("{digest:016x}");
                say(Level::Info, "config_in_force", &[("digest", &digest)]);
                for field in restart {
                    say(Level::Warn, "config_needs_restart", &[("field", field)]);
                }
                let plan = self.desk.shared.plan.load();
                let limits = |notice: &&crate::pure::plan::Notice| {
                    notice.severity == Severity::UnenforcedLimit
                };
                for notice in plan.notices.iter().filter(limits) {
                    say(Level::Warn, "config_limit_not_enforced", &[("notice", notice)]);
                }
                if plan.open() {
                    say(Level::Warn, "config_without_keys", &[]);
                }
            }
            Reloaded::Refused(problems) => {
                reloads.refused.fetch_add(1, Ordering::Relaxed);
                for problem in problems.iter().take(20) {
                    say(Level::Error, "config_problem", &[("problem", problem)]);
                }
                let summary = crate::pure::plan::summary(problems);
                say(Level::Error, "config_refused", &[("summary", &summary)]);
            }
            Reloaded::Unreadable(why) => {
                reloads.refused.fetch_add(1, Ordering::Relaxed);
                say(Level::Error, "config_refused", &[("summary", why)]);
            }
        }
    }
}

/// What a running process cannot change.
fn restart_needed(old: &Plan, new: &Plan) -> Vec<&'static str> {
    let changed = [
        ("server.listen", old.server.listen != new.server.listen),
        ("server.shards", old.server.shards != new.server.shards),
        ("server.gpu_cpu", old.server.gpu_cpu != new.server.gpu_cpu),
        ("admin.listen", old.admin.listen != new.admin.listen),
        ("state.dir", old.state_dir != new.state_dir),
        ("usage", old.usage != new.usage),
        ("fleet", old.fleet.is_none() && new.fleet.is_some()),
    ];
    changed.into_iter().filter(|(_, changed)| *changed).map(|(field, _)| field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(listen: &str, route: &str) -> String {
        format!(
            "server: {{ listen: '{listen}' }}\n\
             pools: {{ p: {{ backends: [ {{ name: u1, url: 'http://127.0.0.1:9' }} ] }} }}\n\
             routes: [ {{ name: {route}, pool: p }} ]\n"
        )
    }

    #[test]
    fn a_reload_takes_all_of_a_good_file_and_nothing_of_a_bad_one() {
        let path = std::env::temp_dir().join(format!("forebay-reload-{}", std::process::id()));
        let write = |text: &str| std::fs::write(&path, text).expect("written");
        write(&config("127.0.0.1:0", "one"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let local = tokio::task::LocalSet::new();
        local.block_on(&runtime.expect("a runtime"), async {
            let source = Source::File(path.clone());
            let mut registry = Registry::new();
            let loaded = source.load(&MadeKeys::default(), &mut registry).expect("a plan");
            let plan = Arc::new(loaded.plan);
            let totals = Arc::clone(registry.totals());
            let (reload, _orders) = mpsc::channel(1);
            let desk = Arc::new(Desk {
                shared: Arc::new(Shared::new(
                    Arc::clone(&plan),
                    totals,
                    Default::default(),
                    Default::default(),
                )),
                catalog: Arc::new(ArcSwap::from_pointee(Catalog::of(&registry))),
                books: Books::new(Vec::new()),
                usage: Arc::default(),
                shards: Vec::new(),
                reload,
                store: None,
                reloads: Reloads::default(),
                started: 0.0,
            });
            let reloader = Reloader {
                source: Arc::new(source),
                text: RefCell::default(),
                registry: Arc::new(Mutex::new(registry)),
                started_with: Arc::clone(&plan),
                names: Names::new(names::system),
                keys: Keys::new(),
                desk: Arc::clone(&desk),
            };
            let routes = || {
                let plan = desk.shared.plan.load();
                plan.routes.iter().map(|route| route.name.to_string()).collect::<Vec<_>>()
            };

            for broken in ["", "{ this is not valid", &config("127.0.0.1:0", "''"), "\0"] {
                write(broken);
                let reloaded = reloader.reload().await;
                assert!(matches!(reloaded, Reloaded::Refused(_)), "{broken}: {reloaded:?}");
                assert!(Arc::ptr_eq(&desk.shared.plan.load(), &plan));
            }
            std::fs::remove_file(&path).expect("removed");
            assert!(matches!(reloader.reload().await, Reloaded::Unreadable(_)));
            assert_eq!(routes(), ["one"]);

            write(&config("127.0.0.1:1", "two"));
            match reloader.reload().await {
                Reloaded::InForce { restart, .. } => assert_eq!(restart, ["server.listen"]),
                other => panic!("{other:?}"),
            }
            assert_eq!(routes(), ["two"]);
            // The old name keeps its number: its counts are not the new one's.
            assert_eq!(desk.catalog.load().routes.len(), 3);
            std::fs::remove_file(&path).expect("removed");
        });
    }

    #[test]
    fn a_shard_that_ends_by_itself_is_a_fault_only_while_running() {
        let later = Instant::now();
        for (state, fault) in [
            (State::Running, true),
            (State::Draining { until: later }, false),
            (State::Stopping { until: later }, false),
        ] {
            assert_eq!(End::Returned(Ok(())).complaint(state).is_some(), fault, "{state:?}");
            let failed = End::Returned(Err(io::ErrorKind::Other.into()));
            assert!(failed.complaint(state).is_some());
            assert!(End::Panicked.complaint(state).is_some());
        }
    }
}
