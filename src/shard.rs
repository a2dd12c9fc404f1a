//! The data path, top to bottom: accept → serve → answer → attempt → relay.
//!
//! One shard is one thread with its own ring, listeners, connections, backend pool and meter. It
//! takes no lock, opens no file, resolves no name and waits for no other thread. What it shares is
//! the plan (loaded once per request), the board's atomics (through policy) and the phase.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::client::{self, Client, NoBody, NoRequest};
use crate::meter::{Ending, Failure, Meter};
use crate::pool::{Addresses, Conn, Pool, READ};
use crate::pure::answer::{self, Refusal};
use crate::pure::board::{Hold, Totals};
use crate::pure::body;
use crate::pure::dialect::{self, Endpoint};
use crate::pure::fields::Known;
use crate::pure::h1::{self, Decoder, Framing, Method, Parse};
use crate::pure::jwt::KeySets;
use crate::pure::limit::{Accounts, History, Windows};
use crate::pure::multipart;
use crate::pure::plan::{Plan, Timeouts};
use crate::pure::policy::{Policy, Ticket, Verdict};
use crate::pure::relay::{Broken, End};
use crate::pure::tokens::{self, Factors};
use crate::pure::units::{BackendId, Instant, ModelId, Rng, RouteId, ShardId, TenantId, Tokens};
use crate::rt::{self, Bell, Driver, Listener, Timer};

mod bearer;
mod commits;
mod flow;
mod limits;
mod trip;
mod wires;

use bearer::Bearers;
pub use commits::Commits;
use flow::Flow;
use limits::Who;
use trip::{Ids, Ruin, Trip};
use wires::{Seat, Upload, Wake, Wakers, Wires, flush};

/// What the process is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    Running,
    /// No new connections or requests; what runs may end.
    Draining,
    /// Everything ends now.
    Stopping,
}

/// What all shards and control share.
pub struct Shared {
    pub plan: ArcSwap<Plan>,
    pub totals: Arc<Totals>,
    phase: AtomicU8,
    pub addresses: ArcSwap<Addresses>,
    /// The day, week and month that it is; control follows the wall clock.
    pub windows: ArcSwap<Windows>,
    /// What of it is on disk.
    pub commits: Commits,
    /// The public keys of all issuers of tokens; control keeps them fresh.
    pub keysets: ArcSwap<KeySets>,
    /// A token was signed by a key that is not among them.
    pub keys_wanted: AtomicBool,
}

impl Shared {
    pub fn new(
        plan: Arc<Plan>,
        totals: Arc<Totals>,
        addresses: Addresses,
        commits: Commits,
    ) -> Shared {
        Shared {
            plan: ArcSwap::new(plan),
            totals,
            phase: AtomicU8::new(Phase::Running as u8),
            addresses: ArcSwap::from_pointee(addresses),
            windows: ArcSwap::default(),
            commits,
            keysets: ArcSwap::default(),
            keys_wanted: AtomicBool::new(false),
        }
    }

    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Running,
            1 => Phase::Draining,
            _ => Phase::Stopping,
        }
    }

    /// Shards follow within one tick.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Release);
    }
}

/// One shard, before it runs.
pub struct Setup {
    pub id: ShardId,
    pub shards: u32,
    /// To be pinned to; `None` floats.
    pub cpu: Option<usize>,
    pub driver: Driver,
    /// Bound and listening, one for each address.
    pub listeners: Vec<OwnedFd>,
    pub shared: Arc<Shared>,
    pub meter: Meter,
}

/// The plan as one request holds it. The inner count is shared by all shards and touched at reloads
/// alone; the outer one is this shard's own, so that requests do not fight over a cache line.
type PlanRef = Rc<Arc<Plan>>;

/// How often a shard reports, closes idle connections and looks at the phase.
const TICK: Duration = Duration::from_millis(20);

/// Runs a shard on this thread until it has drained or is told to stop.
///
/// # Errors
/// The thread cannot be pinned, or the driver or a listener cannot be set up.
pub fn run(setup: Setup) -> io::Result<()> {
    let Setup { id, shards, cpu, driver, listeners, shared, meter } = setup;
    if let Some(cpu) = cpu
        && !core_affinity::set_for_current(core_affinity::CoreId { id: cpu })
    {
        return Err(io::Error::other(format!("cannot pin shard {} to CPU {cpu}", id.0)));
    }
    rt::block_on(driver, async move {
        let shard = Rc::new(Shard::new(id, shards, shared, meter));
        let listeners = listeners
            .into_iter()
            .map(|listener| Listener::new(listener).map(Rc::new))
            .collect::<io::Result<Vec<_>>>()?;
        for listener in &listeners {
            rt::spawn(accept(shard.clone(), listener.clone()));
        }
        // Shards are few.
        if let Some(bell) = shard.shared.commits.bell(id.0 as usize) {
            rt::spawn(hear(shard.clone(), Bell::of(bell)?));
        }
        shard.tick(listeners).await;
        Ok(())
    })?
}

struct Shard {
    shards: usize,
    shared: Arc<Shared>,
    plan: RefCell<PlanRef>,
    policy: RefCell<Policy>,
    pool: RefCell<Pool>,
    /// What it holds of limits that all shards share.
    accounts: RefCell<Accounts>,
    /// How long answers have been.
    history: RefCell<History>,
    /// How prompts that backends have counted compare to their estimates.
    factors: RefCell<Factors>,
    /// Tokens that were checked.
    bearers: RefCell<Bearers>,
    meter: RefCell<Meter>,
    ids: Ids,
    /// Bytes being put together to be sent at once; empty between two uses.
    scratch: RefCell<Vec<u8>>,
    /// What a backend has just sent, until it is passed on; empty between two uses.
    incoming: RefCell<Vec<u8>>,
    draining: Cell<bool>,
    stopping: Cell<bool>,
    /// A waker for each connection's task, to tell idle ones that we drain.
    connections: RefCell<Wakers>,
    /// Requests that wait for a slot, the first to come first.
    parked: RefCell<VecDeque<Waker>>,
    /// Requests that wait for the store.
    committing: RefCell<Vec<Waker>>,
}

impl Shard {
    fn new(id: ShardId, shards: u32, shared: Arc<Shared>, meter: Meter) -> Shard {
        let plan = shared.plan.load_full();
        let seed = rt::now().nanos()
            ^ u64::from(id.0).rotate_left(48)
            ^ u64::from(std::process::id()) << 32;
        Shard {
            shards: shards.max(1) as usize,
            plan: RefCell::new(Rc::new(plan)),
            policy: RefCell::new(Policy::new(Rng::seeded(seed))),
            pool: RefCell::default(),
            accounts: RefCell::new(Accounts::new(shards.max(1) as usize)),
            history: RefCell::default(),
            factors: RefCell::default(),
            bearers: RefCell::default(),
            meter: RefCell::new(meter),
            ids: Ids::new(Rng::seeded(seed).next_u64()),
            scratch: RefCell::default(),
            incoming: RefCell::default(),
            draining: Cell::new(false),
            stopping: Cell::new(false),
            connections: RefCell::default(),
            parked: RefCell::default(),
            committing: RefCell::default(),
            shared,
        }
    }

    /// The plan in force. One atomic load.
    fn plan(&self) -> PlanRef {
        let latest = self.shared.plan.load();
        let mut mine = self.plan.borrow_mut();
        if !Arc::ptr_eq(&latest, &mine) {
            *mine = Rc::new(Arc::clone(&latest));
            // Limits may be others now, or gone.
            self.accounts.borrow_mut().give_back();
        }
        Rc::clone(&mine)
    }

    async fn tick(&self, mut listeners: Vec<Rc<Listener>>) {
        loop {
            rt::sleep(TICK).await;
            let now = rt::now();
            self.pool.borrow_mut().reap(now);
            self.meter.borrow_mut().tick(now);
            match self.draining.get() {
                true => self.accounts.borrow_mut().give_back(),
                false => self.accounts.borrow_mut().tick(),
            }
            // Slots may have been freed by other shards.
            self.unpark();
            match self.shared.phase() {
                Phase::Running => {}
                Phase::Draining => {
                    // The listeners' tasks hold the last handles. They need a turn to end in, even
                    // where nothing else does: what is left behind would take connections that
                    // nobody serves.
                    if listeners.is_empty() && self.connections.borrow().is_empty() {
                        break;
                    }
                    self.draining.set(true);
                    listeners.drain(..).for_each(|listener| listener.close());
                    self.connections.borrow().wake_all();
                }
                Phase::Stopping => {
                    self.stopping.set(true);
                    self.draining.set(true);
                    listeners.drain(..).for_each(|listener| listener.close());
                    self.connections.borrow().wake_all();
                    // One more turn for each to say its last words.
                    rt::sleep(TICK).await;
                    break;
                }
            }
        }
        // Tasks that are leaked with the runtime keep both from being dropped.
        self.accounts.borrow_mut().give_back();
        let mut meter = self.meter.borrow_mut();
        meter.tick(rt::now());
        meter.close();
    }

    fn unpark(&self) {
        for waker in self.parked.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    /// Keeps a backend connection for the next request.
    fn keep(&self, plan: &Plan, backend: BackendId, conn: Box<Conn>) {
        let backend = &plan.backends[backend.index()];
        let pool = &plan.pools[backend.pool.index()];
        let share = pool.idle.div_ceil(self.shards);
        self.pool.borrow_mut().put(backend, pool, share, conn, rt::now());
    }

    /// Gets the buffer back that was taken from `incoming`.
    fn take_back(&self, mut buf: Vec<u8>) {
        buf.clear();
        let mut mine = self.incoming.borrow_mut();
        if buf.capacity() > mine.capacity() {
            *mine = buf;
        }
    }

    /// Lends the scratch buffer to `fill` and then to `send`.
    fn compose<T>(&self, fill_and_send: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut scratch = self.scratch.take();
        scratch.clear();
        let result = fill_and_send(&mut scratch);
        if scratch.capacity() <= SCRATCH_MAX {
            self.scratch.replace(scratch);
        }
        result
    }
}

const SCRATCH_MAX: usize = 256 * 1024;

async fn accept(shard: Rc<Shard>, listener: Rc<Listener>) {
    while let Ok((socket, peer)) = listener.accept().await {
        let bound = shard.plan.borrow().server.bounds.connections;
        let Some(hold) = shard.shared.totals.connections.take(1, bound) else {
            // At the bound: closing at once costs least, and the client sees it.
            continue;
        };
        if shard.draining.get() {
            continue;
        }
        rt::spawn(serve(shard.clone(), Client::new(socket, peer), hold));
    }
}

/// Wakes who waits for the store, each time that it has written or failed to.
async fn hear(shard: Rc<Shard>, bell: Bell) {
    while bell.rung().await.is_ok() {
        let waiting = shard.committing.take();
        waiting.into_iter().for_each(Waker::wake);
    }
}

/// What happens to a connection after a request.
enum Then {
    Next,
    Close,
    /// Close, but so that the client can read why.
    Linger,
}

/// How far a request has come.
enum Stage<S> {
    Over(Then),
    /// The first content of a stream has gone out; the rest is still to come.
    Begun(S),
}

/// One client connection, request after request.
async fn serve(shard: Rc<Shard>, mut client: Box<Client>, _connection: Hold) {
    let _seat = Seat::take(&shard, &mut client).await;
    loop {
        let plan = shard.plan();
        let next = client.next_head(&plan.server, || shard.draining.get()).await;
        // A reload may have come while we waited: a request sees one plan, the one it began under.
        let plan = shard.plan();
        let then = match next {
            Ok(()) => match request(&shard, &plan, &mut client).await {
                Stage::Over(then) => then,
                Stage::Begun((trip, flow)) => stream(&mut client, trip, flow).await,
            },
            Err(NoRequest::Over) => return,
            Err(NoRequest::Refused(refusal)) => {
                shard.meter.borrow_mut().bad_request();
                let mut trip = Trip::begin(&shard, &plan);
                trip.refuse(&mut client, &refusal, false);
                drop(trip);
                flush(&mut client, plan.server.send_timeout).await;
                Then::Linger
            }
        };
        match then {
            Then::Next => {}
            Then::Close => return,
            Then::Linger => return client.linger().await,
        }
    }
}

/// One request, from its head to the last byte of its answer, or to the first content of a stream.
/// Whatever happens on the way, it is settled and recorded exactly once, when `trip` is dropped.
async fn request(
    shard: &Rc<Shard>,
    plan: &PlanRef,
    client: &mut Client,
) -> Stage<(Box<Trip>, Box<Flow>)> {
    let mut trip = Trip::begin(shard, plan);
    trip.keep_alive = client.head.keep_alive && shard.shared.phase() == Phase::Running;
    match answer(&mut trip, client).await {
        Ok(Stage::Over(then)) => Stage::Over(then),
        Ok(Stage::Begun(flow)) => Stage::Begun((trip, flow)),
        Err(stop) => Stage::Over(end_badly(trip, client, stop).await),
    }
}

/// Ends a request that got no whole answer.
async fn end_badly(mut trip: Box<Trip>, client: &mut Client, stop: Stop) -> Then {
    match stop {
        Stop::Gone => {
            trip.done.how = Ending::ClientGone;
            trip.shard.meter.borrow_mut().client_abort(trip.done.route);
            Then::Close
        }
        Stop::Cut(how) => {
            trip.done.how = how;
            Then::Close
        }
        Stop::Refused(refusal) => {
            // With its body unread the connection cannot carry another request.
            let whole = trip.body_read && client.stays();
            trip.refuse(client, &refusal, whole);
            let keep = trip.keep_alive && whole;
            let send_timeout = trip.plan.server.send_timeout;
            drop(trip);
            flush(client, send_timeout).await;
            if keep { Then::Next } else { Then::Linger }
        }
    }
}

/// Why a request got no whole answer.
enum Stop {
    /// The client left.
    Gone,
    /// The answer had begun; it ends visibly unfinished.
    Cut(Ending),
    /// Nothing was written yet: say this.
    Refused(Refusal),
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Stop {
        Stop::Refused(refusal)
    }
}

impl From<NoBody> for Stop {
    fn from(no_body: NoBody) -> Stop {
        match no_body {
            NoBody::Gone => Stop::Gone,
            NoBody::Refused(refusal) => Stop::Refused(refusal),
        }
    }
}

/// Decides what a request gets, and gives it: health and models from the plan, all else from a
/// backend.
async fn answer(trip: &mut Trip, client: &mut Client) -> Result<Stage<Box<Flow>>, Stop> {
    let plan = trip.plan.clone();
    let path = text(client.head.path(&client.request));
    trip.done.path = Endpoint::of(path);
    if trip.done.path == Endpoint::Health {
        trip.body_read = client.head.framing == Framing::None;
        let ready = trip.shard.shared.phase() == Phase::Running || path != "/readyz";
        let status = if ready { 200 } else { 503 };
        return Ok(Stage::Over(trip.reply(client, status, b"{\"status\":\"ok\"}").await));
    }
    let bearer = bearer::authenticate(&trip.shard, &plan, client)?;
    let tenant = bearer.who.tenant;
    trip.admit(&bearer);
    if trip.done.path == Endpoint::Models {
        let body = models(&plan, &bearer.who, path)?;
        trip.body_read = client.head.framing == Framing::None;
        return Ok(Stage::Over(trip.reply(client, 200, &body).await));
    }
    let call = inspect(trip, client, tenant).await?;
    let route = &plan.routes[call.route.index()];
    trip.done.route = route.series;
    limits::reserve(trip, client, &call).await?;
    trip.may_panic(client, "reserved");
    trip.shard.policy.borrow_mut().request(&plan, call.route, trip.began);

    let mut tried: Vec<BackendId> = Vec::new();
    loop {
        let place = place(trip, client, &call, &tried).await?;
        trip.done.attempts = trip.done.attempts.saturating_add(1);
        let backend = place.ticket.backend;
        trip.done.backend = plan.backends[backend.index()].series;
        let fault = match attempt(trip, client, &call, place).await {
            Ok(stage) => return Ok(stage),
            Err(Failed::Stop(stop)) => return Err(stop),
            Err(Failed::Fault(fault)) => fault,
        };
        tried.push(backend);
        let again = trip.may_try_again(&call)
            && (fault.paid
                || trip.shard.policy.borrow_mut().may_retry(&plan, call.route, rt::now()));
        if !again {
            return Err(fault.refusal.into());
        }
        trip.shard.meter.borrow_mut().retry(route.series);
    }
}

/// What is asked of a backend.
struct Call {
    route: RouteId,
    /// `None` for a path without a model, and for one that only a pattern names.
    model: Option<ModelId>,
    /// The longest answer that the client takes.
    max_tokens: Option<u64>,
    /// How many answers it wants.
    answers: u64,
    /// The client wants a stream.
    stream: bool,
    /// Changes to the body; every other byte goes as it came.
    splices: body::Splices,
    /// We ask for usage on the client's behalf, and hide it from it.
    hide: bool,
    /// What keeps this client on one backend.
    stick: Option<u64>,
    /// The body has not been received: it passes to the backend as it comes, once.
    upload: bool,
}

/// Bodies of unknown length, or longer than this, are not held where nobody looks into them.
const UPLOAD_ABOVE: u64 = 1024 * 1024;

fn is_large(framing: Framing) -> bool {
    match framing {
        Framing::Length(length) => length > UPLOAD_ABOVE,
        Framing::Chunked | Framing::UntilClose => true,
        Framing::None => false,
    }
}

/// `/v1/models` and `/v1/models/{id}`, as far as whoever asks may see.
fn models(plan: &Plan, who: &Who, path: &str) -> Result<Vec<u8>, Refusal> {
    let one = path.strip_prefix("/v1/models/").map(percent_decode);
    let mut out = Vec::new();
    if one.is_none() {
        out.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
    }
    let mut any = false;
    for (name, _) in plan.visible_models(|name| who.may_use(plan, name)) {
        if one.as_ref().is_some_and(|wanted| wanted != name.as_bytes()) {
            continue;
        }
        if std::mem::replace(&mut any, true) {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"id\":");
        answer::push_json(&mut out, name);
        out.extend_from_slice(b",\"object\":\"model\",\"created\":0,\"owned_by\":\"forebay\"}");
        if one.is_some() {
            return Ok(out);
        }
    }
    if one.is_some() {
        return Err(no_such_model());
    }
    out.extend_from_slice(b"]}");
    Ok(out)
}

fn no_such_model() -> Refusal {
    Refusal::invalid(404, "The model does not exist or you do not have access to it.")
        .code("model_not_found")
        .param("model")
}

/// Receives the body, looks into it as far as routing needs, and finds the route.
async fn inspect(
    trip: &mut Trip,
    client: &mut Client,
    tenant: Option<TenantId>,
) -> Result<Call, Stop> {
    let plan = trip.plan.clone();
    let server = &plan.server;
    if let Framing::Length(length) = client.head.framing
        && length > server.bounds.body
    {
        let text = format!("The request body is larger than {} bytes.", server.bounds.body);
        return Err(Refusal::invalid(413, text).code("body_too_large").into());
    }
    // Other methods ask about a path, not a model: they go where the path goes.
    // So does a body that is empty: the backend has its own words for that.
    let names_model = trip.done.path.names_model()
        && client.head.method == Method::Post
        && !matches!(client.head.framing, Framing::None | Framing::Length(0));
    let coding = client.head.field(&client.request, Known::ContentEncoding);
    if names_model && coding.is_some_and(|coding| !coding.eq_ignore_ascii_case(b"identity")) {
        let text = "Content-Encoding is not supported here: send the body as it is.";
        return Err(Refusal::invalid(415, text).code("unsupported_encoding").into());
    }
    let mut inspector = None;
    if names_model {
        let path = text(client.head.path(&client.request));
        let kind = body::BodyKind::of_path(path);
        let coding = client.head.field(&client.request, Known::ContentType).unwrap_or_default();
        inspector = Some(match multipart::boundary(coding) {
            Some(boundary) => body::Inspector::multipart(kind, boundary),
            None => body::Inspector::new(kind),
        });
    }
    if client.head.expect_continue {
        client.socket.send(h1::CONTINUE).await.map_err(|_| Stop::Gone)?;
    }
    // What nobody needs to look into, and is too large to hold for nothing, passes as it comes.
    let upload = inspector.is_none() && is_large(client.head.framing);
    if !upload {
        let buffered = &trip.shard.shared.totals.buffered_bytes;
        trip.body = client
            .read_body(server, buffered, |body| match &mut inspector {
                Some(inspector) => inspector.feed(body).map_err(bad_body),
                None => Ok(()),
            })
            .await?;
        trip.body_read = true;
    }
    let start = client.head.head_len;
    let body = &client.request[start..];
    trip.done.bytes_in = body.len() as u64;

    let head = (&client.head, &client.request);
    let path = text(head.0.path(head.1));
    let header = |name: &str| head.0.named(head.1, name.as_bytes());
    let Some(inspector) = &mut inspector else {
        let route = plan.route(None, None, path, &header).ok_or_else(|| {
            match trip.done.path.names_model() && client.head.method == Method::Post {
                true => Refusal::invalid(400, "A body that names a `model` is needed."),
                false => no_route(),
            }
        })?;
        let stick = dialect::object_id(path).map(|id| hash(id.as_bytes()));
        return Ok(Call {
            route,
            model: None,
            max_tokens: None,
            answers: 1,
            stream: false,
            splices: body::Splices::default(),
            hide: false,
            stick: sticky(&plan, route, &header).or(stick),
            upload,
        });
    };
    let seen = inspector.finish(body).map_err(bad_body)?;
    seen.require_model().map_err(bad_body)?;
    let asked = seen.model_str(body).unwrap_or_default();
    let mut model = plan.model(&asked);
    if !trip.who.may_use(&plan, &asked) {
        let text = "This key may not use this model.";
        return Err(Refusal::invalid(403, text).param("model").code("model_not_allowed").into());
    }
    // Who has spent the budget is served by a cheaper model, where the file says so.
    let downgrade =
        tenant.and_then(|tenant| trip.downgrade(tenant)).filter(|to| model != Some(*to));
    if let Some(to) = downgrade {
        trip.downgraded = Some(format!("{asked};{};budget", plan.models[to.index()].name));
        model = Some(to);
    }
    let canonical = match model {
        Some(model) => {
            trip.done.model = plan.models[model.index()].series;
            &*plan.models[model.index()].name
        }
        None => &*asked,
    };
    let called = if downgrade.is_some() { canonical } else { &*asked };
    let route =
        plan.route(Some(canonical), Some(called), path, &header).ok_or_else(no_such_model)?;
    let stream = seen.stream == Some(true);
    let ask_usage = stream && trip.done.path.reports_usage_on_demand() && !seen.asks_usage();
    // What routes alone name has no place of its own to learn in.
    let factor = model.map(|_| trip.shard.factors.borrow().of(trip.done.model));
    let estimate = tokens::prompt(seen.parts.iter().map(|part| part.span.of(body)));
    let prompt = match plan.vocabulary(model, route) {
        Some(vocabulary) => tokens::exact(vocabulary, &seen.parts, body),
        None => factor.unwrap_or_default().apply(estimate),
    };
    // How many tokens a picture has is not learnt from: it would be taken for a matter of the text.
    let teaches = model.is_some() && seen.media_bytes == 0;
    trip.prompt = prompt.0;
    trip.estimate = if teaches { estimate } else { Tokens(0) };
    let edit = body::Edit { model: (*asked != *canonical).then_some(canonical), ask_usage };
    Ok(Call {
        route,
        model,
        max_tokens: seen.max_tokens,
        answers: seen.n.unwrap_or(1).max(1),
        stream,
        splices: body::splices(&seen, body, &edit),
        hide: ask_usage,
        stick: sticky(&plan, route, &header),
        upload: false,
    })
}

fn sticky<'a>(
    plan: &Plan,
    route: RouteId,
    header: &impl Fn(&str) -> Option<&'a [u8]>,
) -> Option<u64> {
    let name = plan.routes[route.index()].sticky.as_deref()?;
    header(name).map(hash)
}

fn no_route() -> Refusal {
    Refusal::invalid(404, "No route serves this path.").code("not_found")
}

fn bad_body(fault: body::BodyFault) -> Refusal {
    Refusal { param: fault.param, ..Refusal::invalid(400, fault.message.into_owned()) }
        .code("invalid_body")
}

/// A backend and a slot on it, waited for if need be.
async fn place(
    trip: &mut Trip,
    client: &mut Client,
    call: &Call,
    tried: &[BackendId],
) -> Result<Place, Stop> {
    let plan = trip.plan.clone();
    let pool = &plan.pools[plan.routes[call.route.index()].pool.index()];
    // Asked for once there is something to wait for.
    let mut since = None;
    loop {
        let verdict = {
            let mut policy = trip.shard.policy.borrow_mut();
            match policy.decide(&plan, call.route, call.stick, tried) {
                // Each was tried: once more on any of them rather than not at all.
                Verdict::Nobody if !tried.is_empty() => {
                    policy.decide(&plan, call.route, call.stick, &[])
                }
                verdict => verdict,
            }
        };
        match verdict {
            Verdict::Send(ticket) => {
                if let Some(since) = since {
                    trip.done.queue = Some(rt::now().since(since));
                }
                return Ok(Place { ticket, shard: trip.shard.clone() });
            }
            Verdict::Nobody => {
                let text = "No backend for this model can be reached at the moment.";
                return Err(Refusal::busy("no_backend", text, Duration::from_secs(1)).into());
            }
            Verdict::Wait => {}
        }
        let now = rt::now();
        let began = *since.get_or_insert(now);
        trip.done.queue = Some(now.since(began));
        let deadline = began + pool.wait;
        if now >= deadline {
            let text = "Every backend for this model is busy. Try again shortly.";
            return Err(Refusal::busy("overloaded", text, Duration::from_secs(1)).into());
        }
        park(trip, client, deadline).await?;
    }
}

/// Waits until something may have become free on this shard, a tick at most, or until `deadline`.
async fn park(trip: &Trip, client: &mut Client, deadline: Instant) -> Result<(), Stop> {
    client.set_timer(Some(deadline));
    let mut polled = false;
    let gone = std::future::poll_fn(|cx| {
        if client.poll_gone(trip.plan.server.half_close, cx).is_ready() {
            return Poll::Ready(true);
        }
        if std::mem::replace(&mut polled, true) {
            return Poll::Ready(false);
        }
        let _ = client.poll_timer(cx);
        trip.shard.parked.borrow_mut().push_back(cx.waker().clone());
        Poll::Pending
    });
    if gone.await { Err(Stop::Gone) } else { Ok(()) }
}

/// A slot at a backend; given back when dropped, and offered to the request that waits longest.
struct Place {
    ticket: Ticket,
    shard: Rc<Shard>,
}

impl Drop for Place {
    fn drop(&mut self) {
        // The ticket itself is dropped right after this, before the woken task can run.
        if let Some(waker) = self.shard.parked.borrow_mut().pop_front() {
            waker.wake();
        }
    }
}

/// Why an attempt ended without an answer.
enum Failed {
    Fault(Fault),
    Stop(Stop),
}

/// The backend's side failed, and the client has not been told anything that counts.
struct Fault {
    refusal: Refusal,
    /// The retry budget has paid for another attempt already.
    paid: bool,
}

impl From<Stop> for Failed {
    fn from(stop: Stop) -> Failed {
        Failed::Stop(stop)
    }
}

/// Sends the request to one backend and relays what it answers.
async fn attempt(
    trip: &mut Trip,
    client: &mut Client,
    call: &Call,
    place: Place,
) -> Result<Stage<Box<Flow>>, Failed> {
    let plan = trip.plan.clone();
    let backend = &plan.backends[place.ticket.backend.index()];
    let pool = &plan.pools[backend.pool.index()];
    let shard = trip.shard.clone();
    let now = rt::now();
    let idle = shard.pool.borrow_mut().take(backend, now);
    let mut conn = match idle {
        // A body that passes through cannot be sent again, so no connection that may be stale.
        Some(conn) if !call.upload => conn,
        _ => trip.connect(client, place.ticket.backend, backend, &pool.timeouts).await?,
    };
    loop {
        trip.sent_at = rt::now();
        trip.send(client, &mut conn, call, backend)?;
        let mut wires = Wires::new(&shard, client, &mut conn, plan.server.half_close);
        if call.upload {
            upload(trip, &mut wires).await?;
        }
        let no_head = match head(trip, &mut wires, call, &pool.timeouts).await {
            Ok(()) => break,
            Err(no_head) => no_head,
        };
        conn.socket.abort();
        // The backend closed an idle connection while our request was on its way. A close in good
        // order behind bytes that its kernel took means that it read them; a reset, that it did
        // not. (llama.cpp closes after each stream although it promises to keep alive.)
        let unread = match no_head {
            NoHead::Reset => true,
            NoHead::Closed => !conn.was_heard(),
            _ => false,
        };
        let stale = unread
            && conn.reused
            && conn.buf.is_empty()
            && rt::now().since(trip.sent_at) < STALE_WITHIN;
        if !stale {
            return Err(trip.no_head(no_head, call, place.ticket.backend));
        }
        shard.meter.borrow_mut().stale_resend(backend.series);
        conn = trip.connect(client, place.ticket.backend, backend, &pool.timeouts).await?;
    }
    relay(trip, client, call, place, conn).await
}

/// A close this soon after a request was sent on a used connection was decided before the request
/// came. Later, the backend may have worked on it, and a resend could generate twice.
const STALE_WITHIN: Duration = Duration::from_millis(50);

/// Passes a request's body to the backend as it comes from the client, until all of it has passed
/// or the backend answers. While the backend does not take it, the client is not read.
async fn upload(trip: &mut Trip, wires: &mut Wires<'_>) -> Result<(), Failed> {
    let plan = trip.plan.clone();
    let server = &plan.server;
    let mut body = wires.client.upload(server);
    loop {
        if !wires.sending() {
            let passed = trip.shard.compose(|out| {
                let passed = wires.client.pass_body(&mut body, server, out);
                if passed.is_ok() && !out.is_empty() {
                    // What it said before it closed is still to be read.
                    let sent = wires.conn.socket.send_pieces(&[IoSlice::new(out)]);
                    wires.conn.spoiled |= sent.is_err();
                }
                passed
            });
            if let Err(no_body) = passed {
                wires.conn.socket.abort();
                return Err(Stop::from(no_body).into());
            }
        }
        trip.done.bytes_in = body.received();
        trip.body_read = body.is_done();
        if (trip.body_read && !wires.sending()) || wires.conn.spoiled {
            return Ok(());
        }
        match wires.wake_uploading(&body, server).await {
            Upload::Went | Upload::Came => {}
            Upload::Answered => {
                // Before it has read everything: a refusal, as a rule. It is relayed; the
                // connection cannot be used again.
                wires.conn.spoiled = true;
                return Ok(());
            }
            Upload::Gone => {
                wires.conn.socket.abort();
                return Err(Stop::Gone.into());
            }
            Upload::Slow => {
                wires.conn.socket.abort();
                return Err(Stop::from(client::too_slow()).into());
            }
        }
    }
}

/// Why no head of an answer came.
enum NoHead {
    /// The client left.
    Gone,
    /// We stop.
    Stopped,
    /// The backend closed the connection.
    Closed,
    /// It reset it: it had closed before, or bytes of ours lay there that it never read.
    Reset,
    /// It is no HTTP that can be passed on.
    Rubbish,
    /// Not within `first_token` or `answer`.
    Late,
}

/// Waits for the head of the answer. With a heartbeat the client may be told 200 meanwhile.
async fn head(
    trip: &mut Trip,
    wires: &mut Wires<'_>,
    call: &Call,
    timeouts: &Timeouts,
) -> Result<(), NoHead> {
    let limits = h1::Limits::default();
    let total = timeouts.total.map(|total| trip.began + total);
    let deadline = earlier(trip.head_deadline(call, timeouts), total);
    let mut beat = trip.heartbeat(call).map(|every| (every, trip.sent_at + every));
    let mut interim = 0;
    loop {
        let conn = &mut *wires.conn;
        if !conn.buf.is_empty() {
            match h1::parse_response(&conn.buf, &limits, wires.client.head.method, &mut conn.head) {
                Ok(Parse::Complete) if conn.head.is_interim() && interim < INTERIM_MAX => {
                    interim += 1;
                    conn.buf.drain(..conn.head.head_len);
                    continue;
                }
                Ok(Parse::Complete) if conn.head.is_interim() => return Err(NoHead::Rubbish),
                Ok(Parse::Complete) => return Ok(()),
                Ok(Parse::Partial) => {}
                Err(_) => return Err(NoHead::Rubbish),
            }
        }
        wires.client.set_timer(earlier(deadline, beat.map(|(_, at)| at)));
        match wires.wake().await {
            Wake::Backend => match wires.conn.read_head() {
                Some(Ok(0)) => return Err(NoHead::Closed),
                Some(Err(_)) => return Err(NoHead::Reset),
                Some(Ok(_)) | None => {}
            },
            Wake::Sent | Wake::Flushed => {}
            Wake::Gone => return Err(NoHead::Gone),
            Wake::Stop => return Err(NoHead::Stopped),
            Wake::Time => {
                let now = rt::now();
                if deadline.is_some_and(|deadline| now >= deadline) {
                    return Err(NoHead::Late);
                }
                if let Some((every, at)) = &mut beat
                    && now >= *at
                {
                    *at = now + *every;
                    trip.early_head(wires.client);
                    wires.beat();
                }
            }
        }
    }
}

/// No backend has more to say before its answer.
const INTERIM_MAX: usize = 16;

/// Relays what a backend answers: to its end, or, in a stream, until its first content has gone out.
/// No other attempt can follow then, and the rest is left to [`stream`].
async fn relay(
    trip: &mut Trip,
    client: &mut Client,
    call: &Call,
    place: Place,
    conn: Box<Conn>,
) -> Result<Stage<Box<Flow>>, Failed> {
    let mut flow = Flow::open(trip, client, call, place, conn)?;
    client.raise();
    let end = std::future::poll_fn(|cx| pass(trip, client, &mut flow, Until::Content, cx)).await;
    match end {
        None => Ok(Stage::Begun(flow)),
        Some(end) => conclude(trip, client, flow, end).await.map(Stage::Over),
    }
}

/// The rest of a stream whose first content has gone out.
///
/// Here connections spend their lives, thousands at a time, each of them cold when its next chunk
/// comes: all that led here has returned, and what a chunk needs lies in `flow`, side by side.
async fn stream(client: &mut Client, mut trip: Box<Trip>, mut flow: Box<Flow>) -> Then {
    client.raise();
    let end = std::future::poll_fn(|cx| pass(&mut trip, client, &mut flow, Until::End, cx)).await;
    // It has no other end than the stream's.
    let end = end.unwrap_or(Err(Ruin::Stopped));
    let stop = match conclude(&mut trip, client, flow, end).await {
        Ok(then) => return then,
        Err(Failed::Stop(stop)) => stop,
        Err(Failed::Fault(fault)) => fault.refusal.into(),
    };
    end_badly(trip, client, stop).await
}

/// How far [`pass`] goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Until {
    /// To the first content of a stream.
    Content,
    End,
}

/// Passes the answer on, piece by piece, until it or one of the two sides ends; `None` where it
/// came as far as it was to go.
///
/// The loop runs once per chunk: one read, one scan, one write, and the question for more; no lock,
/// no allocation, no log line. It is polled, not awaited, so that nothing of it lies anywhere but
/// in `flow`.
fn pass(
    trip: &mut Trip,
    client: &mut Client,
    flow: &mut Flow,
    until: Until,
    cx: &mut Context<'_>,
) -> Poll<Option<Result<End, Ruin>>> {
    let Flow { shard, plan, conn, relay, .. } = flow;
    let mut wires = Wires::new(shard, client, conn, plan.server.half_close);
    // What came along with the head is passed on first, even if that is nothing.
    let mut came = !std::mem::replace(&mut flow.opened, true);
    let mut incoming = if came { std::mem::take(&mut wires.conn.buf) } else { Vec::new() };
    let end = loop {
        if std::mem::take(&mut came) {
            let now = rt::now();
            let pushed = shard.compose(|out| {
                if !flow.told {
                    out.append(&mut wires.client.out);
                }
                let pushed = relay.push(&mut incoming, out);
                let hold = match &pushed {
                    _ if flow.told => false,
                    Ok((progress, _)) => {
                        flow.held
                            && !progress.content
                            && progress.end.is_none()
                            && out.len() <= HELD_MAX
                    }
                    Err(_) => !trip.head_sent,
                };
                if !hold && !flow.told {
                    flow.told = true;
                    flow.held = false;
                    trip.head_sent = true;
                }
                let last = pushed.as_ref().is_ok_and(|(progress, _)| progress.end.is_some());
                if hold || (last && trip.waits_for_store()) {
                    wires.client.out.extend_from_slice(out);
                } else {
                    wires.client.tell(out);
                }
                pushed
            });
            let length = incoming.len();
            shard.take_back(std::mem::take(&mut incoming));
            let (progress, used) = match pushed {
                Ok(pushed) => pushed,
                Err(broken) => break Err(Ruin::Broken(broken)),
            };
            wires.conn.spoiled |= used < length;
            flow.bytes += progress.bytes as u64;
            if progress.error {
                trip.failed(flow.backend, Failure::InStreamError);
                if flow.held {
                    break Err(Ruin::Reported);
                }
            }
            if progress.content {
                if !std::mem::replace(&mut flow.begun, true) {
                    trip.may_panic(wires.client, "relay");
                    trip.first_content(wires.client, flow.streamed, now);
                    // What was waited for until now may have had more time than what comes.
                    flow.armed = false;
                } else if flow.streamed {
                    shard.meter.borrow_mut().gap(flow.route, now.since(flow.last));
                }
                flow.last = now;
            }
            if let Some(end) = progress.end {
                break Ok(end);
            }
            if flow.attended {
                if let Some(paid) = &mut flow.paid
                    && !trip.is_paid(relay.generated(), paid, now)
                {
                    break Err(Ruin::Spent);
                }
                if let Some((every, at)) = &mut flow.clocks.beat {
                    *at = now + *every;
                }
            }
            let is_stream = flow.begun && flow.streamed;
            if until == Until::Content && is_stream && !wires.flushing() && !wires.sending() {
                return Poll::Ready(None);
            }
        }
        // Deadlines only move later, and the timer is left as it is meanwhile: moving it would cost
        // each chunk more than waking once in vain. Only a client that falls behind has one of its
        // own, which may be earlier.
        if !flow.armed || wires.flushing() {
            flow.armed = true;
            wires.client.set_timer(match wires.flushing() {
                true => Some(wires.client.behind_since + plan.server.send_timeout),
                false => flow.clocks.next(flow.begun.then_some(flow.last)),
            });
        }
        match std::task::ready!(wires.poll_wake(cx)) {
            Wake::Backend => {
                incoming = shard.incoming.take();
                match wires.conn.socket.recv(&mut incoming, READ) {
                    Some(Ok(1..)) => came = true,
                    Some(Ok(0)) => {
                        wires.conn.spoiled = true;
                        let end = shard.compose(|out| {
                            out.append(&mut wires.client.out);
                            let end = relay.eof(out);
                            if end.is_ok() {
                                trip.head_sent = true;
                                match trip.waits_for_store() {
                                    true => wires.client.out.extend_from_slice(out),
                                    false => wires.client.tell(out),
                                }
                            }
                            end
                        });
                        break end.map(|_| End::Whole).map_err(Ruin::Broken);
                    }
                    Some(Err(_)) => break Err(Ruin::Broken(Broken::Truncated)),
                    None => shard.take_back(std::mem::take(&mut incoming)),
                }
            }
            Wake::Sent => {}
            Wake::Flushed => {
                // The backend was not read meanwhile: its silence only starts now.
                let waited = rt::now().since(wires.client.behind_since);
                flow.clocks.first = flow.clocks.first.map(|first| first + waited);
                flow.last = flow.last + waited;
                flow.armed = false;
            }
            Wake::Gone => break Err(Ruin::Gone),
            Wake::Stop => break Err(Ruin::Stopped),
            Wake::Time if wires.flushing() => break Err(Ruin::Slow),
            Wake::Time => {
                let now = rt::now();
                flow.armed = false;
                let deadline = flow.clocks.deadline(flow.begun.then_some(flow.last));
                if deadline.is_some_and(|deadline| now >= deadline) {
                    break Err(Ruin::Late);
                }
                if let Some((every, at)) = &mut flow.clocks.beat
                    && now >= *at
                {
                    *at = now + *every;
                    if flow.held && flow.head_len > 0 {
                        // A heartbeat fixes status and fields, and commits to nothing else.
                        let head: Vec<u8> = wires.client.out.drain(..flow.head_len).collect();
                        flow.head_len = 0;
                        trip.head_sent = true;
                        wires.client.tell(&head);
                    }
                    if relay.may_interject() {
                        wires.beat();
                    }
                }
            }
        }
    };
    Poll::Ready(Some(end))
}

/// Books an answer that has ended, says so where it ended badly, and keeps or ends the connections.
async fn conclude(
    trip: &mut Trip,
    client: &mut Client,
    flow: Box<Flow>,
    end: Result<End, Ruin>,
) -> Result<Then, Failed> {
    let Flow { shard, plan, mut conn, relay, place, backend, held, bytes, .. } = *flow;
    trip.done.bytes_out += bytes;
    let mut wires = Wires::new(&shard, client, &mut conn, plan.server.half_close);
    match end {
        Ok(end) => {
            drop(place);
            let rest = trip.book(relay);
            // The last bytes say that all is well: they wait until the charge is on disk.
            let there = !trip.waits_for_store() || trip.charged(wires.client).await;
            if there {
                let last = std::mem::take(&mut wires.client.out);
                if !last.is_empty() {
                    wires.client.tell(&last);
                }
            }
            let flushed = there && wires.flushed(plan.server.send_timeout).await;
            let reusable = !wires.conn.spoiled && !wires.sending() && wires.conn.head.keep_alive;
            match end {
                End::Whole if reusable => shard.keep(&plan, backend, conn),
                End::Early if reusable => rt::spawn(drain(shard, plan, backend, conn, rest)),
                _ => {}
            }
            trip.done.how = if flushed { Ending::Whole } else { Ending::ClientGone };
            Ok(match flushed && trip.keep_alive && client.stays() {
                true => Then::Next,
                // It answered before it had read everything.
                false if flushed && !trip.body_read => Then::Linger,
                false => Then::Close,
            })
        }
        Err(ruin) => {
            // Whoever left or broke, the GPU must not work for nobody.
            wires.conn.socket.abort();
            let over = relay.is_last_seen();
            if ruin.is_told() && trip.head_sent && !held && !over {
                let refusal = ruin.refusal();
                shard.compose(|out| {
                    relay.fail(&refusal, trip.done.path.envelope(), out);
                    wires.client.tell(out);
                });
                wires.flushed(LAST_WORDS).await;
                if matches!(relay.framing(), Framing::UntilClose) {
                    // An orderly close would look like the end of the answer.
                    wires.client.socket.reset();
                }
            }
            drop(place);
            trip.ruined(ruin, over, held, backend, relay)
        }
    }
}

/// Events before the first content are few; more than this is passed on, retry or not.
const HELD_MAX: usize = 64 * 1024;
/// How long a client has to take the error event of a stream that broke.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Reads what a backend still sends behind the last event of a stream (as a rule the last chunk,
/// a packet later), so that its connection can be used again. Bounded: some never end.
async fn drain(
    shard: Rc<Shard>,
    plan: PlanRef,
    backend: BackendId,
    mut conn: Box<Conn>,
    mut rest: Decoder,
) {
    let mut timer = Timer::new();
    timer.set(Some(rt::now() + DRAIN_WITHIN));
    loop {
        let read = std::future::poll_fn(|cx| {
            if let Poll::Ready(read) = conn.socket.poll_recv(cx, &mut conn.buf, DRAIN_READ) {
                return Poll::Ready(Some(read));
            }
            timer.poll(cx).map(|()| None)
        });
        let Some(Ok(1..)) = read.await else { return };
        match rest.decode_joined(&mut conn.buf) {
            Ok(piece) if piece.end && piece.consumed == conn.buf.len() => {
                return shard.keep(&plan, backend, conn);
            }
            Ok(piece) if !piece.end && piece.consumed == conn.buf.len() => conn.buf.clear(),
            _ => return,
        }
    }
}

const DRAIN_WITHIN: Duration = Duration::from_secs(1);
const DRAIN_READ: usize = 2 * 1024;

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// `%XX` undone; anything else stays.
fn percent_decode(text: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| byte == b'%');
        let escaped = hex
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        out.push(escaped.unwrap_or(byte));
        rest = if escaped.is_some() { &after[2..] } else { after };
    }
    out
}

/// Request targets are visible ASCII.
fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default()
}

fn hash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}
