//! One request's state from its head to its settlement: what is known of it, what was written
//! for it, and what it will be booked as. Dropping it books and records it, once, whichever way
//! the request ended; one that nobody ended was ended by a panic.

use std::io::{self, IoSlice};
use std::rc::Rc;
use std::time::Duration;

use super::bearer::Bearer;
use super::commits::{Kept, kept};
use super::limits::{self, QuotaFields, Stand, Who};
use super::{Call, Failed, Fault, NoHead, Phase, PlanRef, Shard, Stop, Then};
use crate::client::Client;
use crate::meter::{Booked, Done, Ending, Failure, RequestId};
use crate::pool::Conn;
use crate::pure::answer::{self, Refusal};
use crate::pure::board::{Held, Hold};
use crate::pure::dialect::Endpoint;
use crate::pure::fields::{self, Known, Name, Own};
use crate::pure::h1::{self, Decoder, Framing, Version};
use crate::pure::plan::{Backend, OverBudget, Sync, Timeouts};
use crate::pure::relay::{Broken, Relay, Seen, Watch};
use crate::pure::tokens;
use crate::pure::units::{BackendId, Instant, ModelId, Rng, Series, TenantId, Tokens};
use crate::rt;

pub struct Trip {
    pub shard: Rc<Shard>,
    pub plan: PlanRef,
    pub began: Instant,
    /// When the request of the current attempt was handed to the kernel.
    pub sent_at: Instant,
    pub done: Done,
    /// The client's connection may carry another request after this one.
    pub keep_alive: bool,
    /// All of the request's body has been received.
    pub body_read: bool,
    /// Status and fields have gone to the client.
    pub head_sent: bool,
    /// The body's share of the buffer budget.
    pub body: Option<Hold>,
    /// Whose request it is.
    pub who: Who,
    /// Tokens that the prompt is taken to have until a backend says how many.
    pub prompt: u64,
    /// The same before it was corrected by what backends have said; zero where what they say of this
    /// prompt teaches nothing.
    pub estimate: Tokens,
    /// What it holds of its limits, until it is settled.
    pub stand: Option<Stand>,
    /// What the client is told of them.
    pub quotas: QuotaFields,
    /// `asked;served;budget`, where a cheaper model serves because the budget is spent.
    pub downgraded: Option<String>,
    _in_flight: Option<Hold>,
    tenant: Option<Held>,
}

impl Trip {
    pub fn begin(shard: &Rc<Shard>, plan: &PlanRef) -> Box<Trip> {
        let began = rt::now();
        let none = Series(0);
        Box::new(Trip {
            began,
            sent_at: began,
            done: Done {
                at: began,
                request_id: shard.ids.next(),
                tenant: none,
                key: none,
                route: none,
                model: none,
                backend: none,
                status: 0,
                streamed: false,
                how: Ending::Panicked,
                path: Endpoint::Other,
                attempts: 0,
                bytes_in: 0,
                bytes_out: 0,
                queue: None,
                ttft: None,
                duration: Duration::ZERO,
                usage: Booked::default(),
            },
            keep_alive: false,
            body_read: false,
            head_sent: false,
            body: None,
            who: Who::default(),
            prompt: 0,
            estimate: Tokens::default(),
            stand: None,
            quotas: QuotaFields::default(),
            downgraded: None,
            _in_flight: shard.shared.totals.requests_in_flight.take(1, u64::MAX),
            tenant: None,
            shard: Rc::clone(shard),
            plan: Rc::clone(plan),
        })
    }

    /// Counts the request for its tenant.
    pub fn admit(&mut self, bearer: &Bearer) {
        self.who = bearer.who;
        self.done.key = bearer.series;
        if let Some(tenant) = bearer.who.tenant {
            let tenant = &self.plan.tenants[tenant.index()];
            self.done.tenant = tenant.series;
            self.tenant = Held::take(&tenant.row, None);
        }
    }

    /// The model that serves a tenant whose budget is spent, where there is one.
    pub fn downgrade(&self, tenant: TenantId) -> Option<ModelId> {
        let tenant = &self.plan.tenants[tenant.index()];
        let OverBudget::Downgrade(to) = tenant.budget.as_ref()?.over else { return None };
        let windows = self.shard.shared.windows.load();
        tenant.limits.as_ref()?.is_spent(&windows).then_some(to)
    }

    // ---- what Forebay itself says

    /// Writes an answer of our own.
    pub async fn reply(&mut self, client: &mut Client, status: u16, body: &[u8]) -> Then {
        let keep = self.keep_alive && self.body_read;
        self.write(client, status, body, b"", keep);
        self.done.how = Ending::Whole;
        super::wires::flush(client, self.plan.server.send_timeout).await;
        match (keep, self.body_read) {
            (true, _) => Then::Next,
            (false, true) => Then::Close,
            (false, false) => Then::Linger,
        }
    }

    /// Writes a refusal, or, inside a stream that has begun, its event.
    pub fn refuse(&mut self, client: &mut Client, refusal: &Refusal, keep: bool) {
        let envelope = self.done.path.envelope();
        self.done.how = Ending::Refused;
        if self.head_sent {
            // Only a heartbeat can have come before: a chunked stream between two events.
            self.keep_alive = false;
            let mut out = Vec::new();
            h1::append_chunk(&mut out, &refusal.event(envelope));
            client.tell(&out);
            return;
        }
        let mut fields = Vec::new();
        answer::push_retry_fields(&mut fields, refusal);
        match refusal.status {
            401 => {
                fields.extend_from_slice(b"www-authenticate: ");
                fields.extend_from_slice(refusal.challenge().as_bytes());
                fields.extend_from_slice(b"\r\n");
            }
            405 => {
                fields.extend_from_slice(b"allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n")
            }
            _ => {}
        }
        let mut own = Own::default();
        self.quotas.say(&mut own);
        fields::copy_own(&mut fields, &own);
        self.write(client, refusal.status, &refusal.body(envelope), &fields, keep);
    }

    fn write(&mut self, client: &mut Client, status: u16, body: &[u8], fields: &[u8], keep: bool) {
        self.done.status = status;
        self.done.bytes_out += body.len() as u64;
        self.keep_alive &= keep;
        self.head_sent = true;
        let reply = answer::Reply {
            status,
            content_type: "application/json",
            body,
            fields,
            request_id: self.done.request_id.as_str(),
            keep_alive: self.keep_alive,
            http10: client.head.version == Version::Http10,
            head_only: client.head.method == h1::Method::Head,
        };
        self.shard.compose(|out| {
            reply.write(out);
            // A client that is gone will be noticed by its connection's next read.
            client.tell(out);
        });
    }

    // ---- towards the backend

    /// A fresh connection; while it is made, the client's leaving is not waited for.
    pub async fn connect(
        &mut self,
        client: &mut Client,
        id: BackendId,
        backend: &Backend,
        timeouts: &Timeouts,
    ) -> Result<Box<Conn>, Failed> {
        let addresses = self.shard.shared.addresses.load_full();
        // On the heap while it lasts: it would make the task of every request a kilobyte larger.
        let mut open = Box::pin(Conn::open(backend, &addresses, timeouts.connect));
        let half_close = self.plan.server.half_close;
        let opened = std::future::poll_fn(|cx| {
            if let std::task::Poll::Ready(opened) = open.as_mut().poll(cx) {
                return std::task::Poll::Ready(Some(opened));
            }
            client.poll_gone(half_close, cx).map(|()| None)
        });
        let error = match opened.await {
            Some(Ok(conn)) => return Ok(conn),
            Some(Err(error)) => error,
            None => return Err(Stop::Gone.into()),
        };
        let (failure, status, code) = match error.kind() {
            io::ErrorKind::NotFound => (Failure::Resolve, 503, "backend_unreachable"),
            io::ErrorKind::TimedOut => (Failure::ConnectTimeout, 504, "connect_timeout"),
            _ => (Failure::Connect, 503, "backend_unreachable"),
        };
        self.failed(id, failure);
        let mut refusal = Refusal::upstream(status, code, "The backend cannot be reached.");
        if status == 503 {
            refusal.retry_after = Some(Duration::from_secs(1));
        }
        Err(Failed::Fault(Fault { refusal, paid: false }))
    }

    /// Sends head and body; what the kernel does not take at once is queued.
    pub fn send(
        &mut self,
        client: &Client,
        conn: &mut Conn,
        call: &Call,
        backend: &Backend,
    ) -> Result<(), Failed> {
        let (head, bytes) = (&client.head, &client.request);
        let body = &bytes[head.head_len..];
        let target =
            backend.base_path.join(head.path(bytes), head.query(bytes)).map_err(|why| {
                Stop::Refused(Refusal::invalid(400, format!("The path is refused: {why}.")))
            })?;
        let pool = &self.plan.pools[backend.pool.index()];
        let mut id = [0; RequestId::MAX + 4];
        let id = attempt_id(&mut id, self.done.request_id.as_bytes(), self.done.attempts);
        let mut own = Own::default();
        own.say(&X_REQUEST_ID, id);
        if let Some(key) = &backend.api_key {
            own.quote(&AUTHORIZATION, key.expose().as_bytes());
        }
        if let Some(theirs) = head.field(bytes, Known::XRequestId) {
            own.quote(&X_CORRELATION_ID, theirs);
        }
        let length = call.splices.new_len(body.len()) as u64;
        let framing = match head.framing {
            framing if call.upload => framing,
            Framing::None => Framing::None,
            _ => Framing::Length(length),
        };
        let body = if call.upload { &[] } else { body };
        let outgoing = h1::Outgoing {
            method: head.method.name(bytes),
            target,
            host: &backend.host_header,
            framing,
            forward: &pool.forward,
            own: &own,
        };
        self.shard.compose(|out| {
            h1::write_request(out, &outgoing, bytes, &head.fields);
            let mut pieces = [IoSlice::new(&[]); PIECES];
            let mut count = 1;
            let body = call.splices.pieces(body);
            if length <= COPIED_MAX {
                body.for_each(|piece| out.extend_from_slice(piece));
            } else {
                for piece in body {
                    pieces[count] = IoSlice::new(piece);
                    count += 1;
                }
            }
            pieces[0] = IoSlice::new(out);
            // It may have answered before it closed: that is still to be read.
            conn.spoiled |= conn.request(&pieces[..count]).is_err();
        });
        Ok(())
    }

    /// When the first content (of a stream) or the head (of a plain answer) must have come.
    pub fn head_deadline(&self, call: &Call, timeouts: &Timeouts) -> Option<Instant> {
        if !call.stream {
            return timeouts.answer.map(|answer| self.sent_at + answer);
        }
        let slope = timeouts.first_token_per_1k.unwrap_or_default();
        let thousands = u32::try_from(self.prompt.div_ceil(1000)).unwrap_or(u32::MAX);
        timeouts
            .first_token
            .map(|first| self.sent_at + first.saturating_add(slope.saturating_mul(thousands)))
    }

    pub fn heartbeat(&self, call: &Call) -> Option<Duration> {
        self.plan.routes[call.route.index()].heartbeat.filter(|_| call.stream)
    }

    /// Whether another attempt could still follow this one.
    pub fn may_try_again(&self, call: &Call) -> bool {
        !call.upload
            && u32::from(self.done.attempts) <= self.plan.routes[call.route.index()].retry.attempts
    }

    /// Counts a failure that is the backend's.
    pub fn failed(&self, backend: BackendId, why: Failure) {
        let row = &self.plan.backends[backend.index()].row;
        row.failures.add(1);
        self.shard.meter.borrow_mut().upstream_failure(row.series, why);
    }

    /// What it means that no head came.
    pub fn no_head(&self, no_head: NoHead, call: &Call, backend: BackendId) -> Failed {
        let (failure, refusal) = match no_head {
            NoHead::Gone => return Stop::Gone.into(),
            NoHead::Stopped => return Stop::Refused(stopping()).into(),
            NoHead::Closed | NoHead::Reset => (
                Failure::Reset,
                Refusal::upstream(502, "backend_closed", "The backend closed the connection."),
            ),
            NoHead::Rubbish => (Failure::Protocol, rubbish()),
            NoHead::Late if call.stream => (Failure::FirstToken, late()),
            NoHead::Late => (Failure::Answer, late()),
        };
        self.failed(backend, failure);
        Failed::Fault(Fault { refusal, paid: false })
    }

    // ---- towards the client

    /// Judges the head of an answer and writes what the client gets of it to `client.out`.
    pub fn open(
        &mut self,
        client: &mut Client,
        conn: &mut Conn,
        call: &Call,
        backend: BackendId,
        streamed: bool,
    ) -> Result<Relay, Failed> {
        client.out.clear();
        let status = conn.head.status;
        if status >= 500 {
            self.failed(backend, Failure::Status5xx);
        }
        if matches!(status, 401 | 403) {
            self.failed(backend, Failure::Credential);
            let text = "The backend refused the gateway's credential.";
            let refusal = Refusal::upstream(502, "backend_credential", text);
            return Err(Failed::Fault(Fault { refusal, paid: false }));
        }
        if is_retryable(status)
            && !self.head_sent
            && self.may_try_again(call)
            && self.shard.policy.borrow_mut().may_retry(&self.plan, call.route, rt::now())
        {
            let text = format!("The backend answered with status {status}.");
            let refusal = Refusal::upstream(status, "backend_error", text);
            return Err(Failed::Fault(Fault { refusal, paid: true }));
        }
        let plan = Rc::clone(&self.plan);
        let backend = &plan.backends[backend.index()];
        let hide = call.hide && streamed;
        let kind = conn.head.field(&conn.buf, Known::ContentType).unwrap_or_default();
        let coding = conn.head.field(&conn.buf, Known::ContentEncoding).unwrap_or_default();
        let coded = (streamed || is_json(kind))
            && coding.eq_ignore_ascii_case(b"gzip")
            && !matches!(conn.head.framing, Framing::None | Framing::Length(0));
        let (mut framing, keep_alive) = client.head.reply_framing(conn.head.framing, hide || coded);
        if self.head_sent {
            if status != 200 || !streamed {
                let text = format!("The backend answered with status {status}.");
                let refusal = Refusal::upstream(502, "backend_error", text);
                return Err(Stop::Refused(refusal).into());
            }
            framing = Framing::Chunked;
        } else {
            // Whoever drains says so, also to what began before.
            let running = self.shard.shared.phase() == Phase::Running;
            self.keep_alive &= keep_alive && self.body_read && running;
            self.done.status = status;
            let digits = digits(self.done.attempts);
            let attempts = digits.trim_ascii_start();
            let mut own = Own::default();
            own.say(&X_REQUEST_ID, self.done.request_id.as_bytes());
            own.quote(&X_FOREBAY_ROUTE, plan.routes[call.route.index()].name.as_bytes());
            own.quote(&X_FOREBAY_BACKEND, backend.name.as_bytes());
            own.say(&X_FOREBAY_ATTEMPT, attempts);
            if coded {
                own.say(&CONTENT_ENCODING, b"identity");
            }
            if let Some(downgraded) = &self.downgraded {
                own.quote(&X_FOREBAY_FALLBACK, downgraded.as_bytes());
            }
            self.quotas.say(&mut own);
            if streamed {
                own.say(&CACHE_CONTROL, b"no-cache");
                own.say(&X_ACCEL_BUFFERING, b"no");
            }
            let answer = h1::Answer {
                status,
                version: client.head.version,
                framing,
                keep_alive: self.keep_alive,
                own: &own,
            };
            h1::write_response(&mut client.out, &answer, &conn.buf, &conn.head.fields);
        }
        self.done.streamed = streamed;
        conn.rests = streamed || status >= 400;
        let watch = if streamed {
            Watch::Stream(Box::default())
        } else if is_json(kind) {
            Watch::Plain(Box::default())
        } else {
            Watch::Blind
        };
        conn.buf.drain(..conn.head.head_len);
        let relay = Relay::new(conn.head.framing, framing, watch, hide);
        Ok(if coded { relay.gunzip() } else { relay })
    }

    /// The head of a stream before the backend has said anything, for a heartbeat to follow.
    pub fn early_head(&mut self, client: &mut Client) {
        if self.head_sent || client.head.version == Version::Http10 {
            return;
        }
        self.head_sent = true;
        self.done.status = 200;
        let mut own = Own::default();
        own.say(&CONTENT_TYPE, b"text/event-stream");
        own.say(&X_REQUEST_ID, self.done.request_id.as_bytes());
        own.say(&CACHE_CONTROL, b"no-cache");
        own.say(&X_ACCEL_BUFFERING, b"no");
        self.quotas.say(&mut own);
        let answer = h1::Answer {
            status: 200,
            version: client.head.version,
            framing: Framing::Chunked,
            keep_alive: self.keep_alive,
            own: &own,
        };
        self.shard.compose(|out| {
            h1::write_response(out, &answer, b"", &[]);
            client.tell(out);
        });
    }

    /// The answer has begun to count: no other attempt can follow, and what only another attempt
    /// would need is let go of.
    pub fn first_content(&mut self, client: &mut Client, streamed: bool, now: Instant) {
        let ttft = now.since(self.began);
        self.done.ttft = Some(ttft);
        self.shard.meter.borrow_mut().ttft(self.done.route, self.done.backend, ttft);
        if streamed {
            // A stream can stay for minutes, and there are thousands of them.
            self.body = None;
            client.release_body();
        }
    }

    /// Books what the answer cost, and learns from what the backend counted; gives the decoder for
    /// the rest of its body.
    pub fn book(&mut self, relay: Relay) -> Decoder {
        let (seen, rest) = relay.finish();
        if let Some(reported) = seen.usage.and_then(|usage| usage.prompt) {
            let mut factors = self.shard.factors.borrow_mut();
            factors.learn(self.done.model, self.estimate, Tokens(reported));
        }
        self.done.usage = bill(&seen, self.prompt, self.done.status);
        self.done.usage.nano = self.who.cost(&self.plan, &self.done.usage);
        rest
    }

    /// Panics where a test asks for it, to show what a bug of ours costs: by a field that names the
    /// place, in builds with assertions alone, and only where the environment allows it.
    #[cfg(debug_assertions)]
    pub fn may_panic(&self, client: &Client, place: &str) {
        let asked = client.head.named(&client.request, b"x-forebay-panic");
        if asked.is_some_and(|asked| asked == place.as_bytes())
            && std::env::var_os("FOREBAY_TEST_PANICS").is_some()
        {
            panic!("asked for by a test");
        }
    }

    #[cfg(not(debug_assertions))]
    #[inline(always)]
    pub fn may_panic(&self, _: &Client, _: &str) {}

    /// Whether the budget pays for `generated` tokens of the answer; `paid` is how many it is known to.
    pub fn is_paid(&mut self, generated: u64, paid: &mut u64, now: Instant) -> bool {
        if generated > *paid {
            let Some(stand) = &mut self.stand else { return true };
            match stand.pay_on(&self.plan, generated, now) {
                Some(more) => *paid = more,
                None => return false,
            }
        }
        true
    }

    /// Whether what the request takes and is charged must be on disk before it goes on.
    pub fn waits_for_store(&self) -> bool {
        self.plan.state_sync == Sync::Always && self.stand.as_ref().is_some_and(Stand::is_kept)
    }

    /// Charges the request for its whole answer and waits until that is on disk, or cannot be. False
    /// if the client leaves meanwhile.
    pub async fn charged(&mut self, client: &mut Client) -> bool {
        self.done.how = Ending::Whole;
        self.settle(rt::now());
        kept(&self.shard, client, self.plan.server.half_close).await != Kept::Gone
    }

    /// Charges what was used, in the place of what was reserved; once.
    fn settle(&mut self, now: Instant) {
        if let Some(stand) = self.stand.take() {
            stand.settle(self, now);
            // A request of the same limits may have waited for this one.
            if let Some(waker) = self.shard.parked.borrow_mut().pop_front() {
                waker.wake();
            }
        }
    }

    /// What it means that an answer broke off.
    pub fn ruined(
        &mut self,
        ruin: Ruin,
        over: bool,
        held: bool,
        backend: BackendId,
        relay: Relay,
    ) -> Result<Then, Failed> {
        if !over && let Some(failure) = ruin.failure(self.done.ttft.is_some()) {
            self.failed(backend, failure);
        }
        if ruin.is_backends() && (held || !self.head_sent) {
            let refusal = ruin.refusal();
            return Err(Failed::Fault(Fault { refusal, paid: false }));
        }
        self.book(relay);
        if over {
            // The last event had come: that the client hangs up then is its good right.
            self.done.how = Ending::Whole;
            return Ok(Then::Close);
        }
        Err(Failed::Stop(match ruin {
            Ruin::Gone => Stop::Gone,
            Ruin::Slow => Stop::Cut(Ending::ClientSlow),
            Ruin::Stopped => Stop::Cut(Ending::Drained),
            Ruin::Late => Stop::Cut(Ending::TimedOut),
            Ruin::Spent => Stop::Cut(Ending::Spent),
            Ruin::Reported | Ruin::Broken(_) => Stop::Cut(Ending::BackendBroke),
        }))
    }
}

impl Drop for Trip {
    fn drop(&mut self) {
        // What was refused began in this very turn.
        let now = rt::clock();
        self.done.at = now;
        self.done.duration = now.since(self.began);
        self.settle(now);
        self.shard.meter.borrow_mut().done(&self.done);
    }
}

static AUTHORIZATION: Name = Name::new("authorization");
static CACHE_CONTROL: Name = Name::new("cache-control");
static CONTENT_ENCODING: Name = Name::new("content-encoding");
static CONTENT_TYPE: Name = Name::new("content-type");
static X_ACCEL_BUFFERING: Name = Name::new("x-accel-buffering");
static X_CORRELATION_ID: Name = Name::new("x-correlation-id");
static X_FOREBAY_ATTEMPT: Name = Name::new("x-forebay-attempt");
static X_FOREBAY_BACKEND: Name = Name::new("x-forebay-backend");
static X_FOREBAY_FALLBACK: Name = Name::new("x-forebay-fallback");
static X_FOREBAY_ROUTE: Name = Name::new("x-forebay-route");
static X_REQUEST_ID: Name = Name::new("x-request-id");

/// A body up to this length is copied behind its head: for the kernel, one piece costs less than two.
const COPIED_MAX: u64 = 2 * 1024;
/// Pieces of a request that are sent in one go: its head, and the body around three splices.
const PIECES: usize = 8;

/// How an answer under way was ruined.
#[derive(Clone, Copy, Debug)]
pub enum Ruin {
    /// The client left.
    Gone,
    /// The client took nothing for too long.
    Slow,
    /// We stop.
    Stopped,
    /// The backend was silent for too long.
    Late,
    /// The backend reported an error before anything counted.
    Reported,
    /// The budget is spent, and cuts.
    Spent,
    Broken(Broken),
}

impl Ruin {
    pub fn is_backends(self) -> bool {
        matches!(self, Ruin::Late | Ruin::Reported | Ruin::Broken(_))
    }

    /// Whether the client is told why its answer ends here.
    pub fn is_told(self) -> bool {
        self.is_backends() || matches!(self, Ruin::Spent)
    }

    /// What to count; an error event has been counted when it was seen.
    fn failure(self, begun: bool) -> Option<Failure> {
        match self {
            Ruin::Gone | Ruin::Slow | Ruin::Stopped | Ruin::Reported | Ruin::Spent => None,
            Ruin::Late if begun => Some(Failure::Chunk),
            Ruin::Late => Some(Failure::FirstToken),
            Ruin::Broken(Broken::Malformed(_)) => Some(Failure::Protocol),
            Ruin::Broken(Broken::Truncated) => Some(Failure::Reset),
        }
    }

    pub fn refusal(self) -> Refusal {
        match self {
            Ruin::Late => late(),
            Ruin::Spent => limits::spent(),
            Ruin::Broken(Broken::Malformed(_)) => rubbish(),
            _ => {
                let text = "The backend broke off in the middle of its answer.";
                Refusal::upstream(502, "backend_broke", text)
            }
        }
    }
}

fn late() -> Refusal {
    Refusal::upstream(504, "backend_timeout", "The backend did not answer in time.")
}

fn rubbish() -> Refusal {
    Refusal::upstream(502, "backend_protocol", "The backend's answer is not valid HTTP.")
}

fn stopping() -> Refusal {
    Refusal::busy("stopping", "The gateway is stopping.", Duration::from_secs(1))
}

/// Statuses after which another backend may do better.
fn is_retryable(status: u16) -> bool {
    matches!(status, 408 | 429 | 500 | 502..=504)
}

fn is_json(kind: &[u8]) -> bool {
    let kind = kind.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    kind.eq_ignore_ascii_case(b"application/json")
        || kind.len() > 5 && kind[kind.len() - 5..].eq_ignore_ascii_case(b"+json")
}

/// Tokens to book, not priced yet: what the backend reported; what it did not report is estimated, and said to be.
fn bill(seen: &Seen, prompt: u64, status: u16) -> Booked {
    let Tokens(fresh) = tokens::generated(seen.fresh_tokens, seen.fresh_bytes, seen.fresh_chars);
    let usage = seen.usage.unwrap_or_default();
    if let Some((prompt, completion)) = usage.charge().filter(|_| seen.over) {
        return Booked {
            prompt,
            completion,
            cached: usage.cached.unwrap_or(0).min(prompt),
            reasoning: usage.reasoning.unwrap_or(0).min(completion),
            ..Booked::default()
        };
    }
    // An error costs nothing, unless the backend says that it did.
    let failed = status >= 400 || (seen.error && fresh == 0);
    if failed && seen.usage.is_none() {
        return Booked::default();
    }
    // Running totals, and what was generated since the last of them.
    let guessed = if usage.prompt.is_none() { prompt } else { 0 };
    let prompt = usage.prompt.unwrap_or(prompt);
    let completion = usage.completion.unwrap_or(0).saturating_add(fresh);
    Booked {
        prompt,
        completion,
        cached: usage.cached.unwrap_or(0).min(prompt),
        reasoning: usage.reasoning.unwrap_or(0).min(completion),
        estimated: guessed.saturating_add(fresh),
        nano: 0,
    }
}

/// The id of one attempt: engines that take it for their own refuse to see one twice.
fn attempt_id<'a>(room: &'a mut [u8], request: &'a [u8], attempt: u8) -> &'a [u8] {
    if attempt <= 1 {
        return request;
    }
    let (id, rest) = room.split_at_mut(request.len());
    id.copy_from_slice(request);
    rest[..3].copy_from_slice(&[b'-', b'0' + attempt / 10 % 10, b'0' + attempt % 10]);
    &room[..request.len() + 3]
}

/// A number with blanks before it.
fn digits(number: u8) -> [u8; 3] {
    let digit = |unit| if number >= unit { b'0' + number / unit % 10 } else { b' ' };
    [digit(100), digit(10), b'0' + number % 10]
}

/// Makes request ids: a random start for each shard and process, then a count.
pub struct Ids {
    /// `req_` and twelve digits.
    start: [u8; 16],
    count: std::cell::Cell<u64>,
}

impl Ids {
    /// Of `start` the lower 48 bits tell.
    pub fn new(start: u64) -> Ids {
        let mut text = hex(start);
        text[..4].copy_from_slice(b"req_");
        Ids { start: text, count: std::cell::Cell::new(0) }
    }

    pub fn next(&self) -> RequestId {
        let count = self.count.get();
        self.count.set(count + 1);
        let mut text = [0; 32];
        text[..16].copy_from_slice(&self.start);
        // Mixing hides how many requests others send; a mixer is a bijection, so no id repeats.
        text[16..].copy_from_slice(&hex(Rng::seeded(count).next_u64()));
        RequestId::new(&text)
    }
}

/// Sixteen hexadecimal digits, the highest first; eight at once.
fn hex(number: u64) -> [u8; 16] {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let eight = |half: u64| {
        // One digit in each byte.
        let pairs = (half & 0xffff_0000) << 16 | (half & 0xffff);
        let bytes = (pairs & 0x0000_ff00_0000_ff00) << 8 | (pairs & 0x0000_00ff_0000_00ff);
        let digits = (bytes & 0x00f0_00f0_00f0_00f0) << 4 | (bytes & 0x000f_000f_000f_000f);
        // A digit above nine carries into the upper half of its byte when six are added.
        let letters = (digits + 6 * ONES) >> 4 & ONES;
        (digits + u64::from(b'0') * ONES + letters * u64::from(b'a' - b'0' - 10)).to_be_bytes()
    };
    let mut text = [0; 16];
    text[..8].copy_from_slice(&eight(number >> 32));
    text[8..].copy_from_slice(&eight(number & 0xffff_ffff));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_are_hexadecimal_and_attempts_tell_themselves_apart() {
        for number in [0, 1, u64::MAX, 0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210] {
            assert_eq!(hex(number), *format!("{number:016x}").as_bytes());
        }
        let ids = Ids::new(0xffff_0123_4567_89ab);
        for count in 0..1_000 {
            let mixed = Rng::seeded(count).next_u64();
            assert_eq!(ids.next().as_str(), format!("req_0123456789ab{mixed:016x}"));
        }
        let mut room = [0; 10];
        assert_eq!(attempt_id(&mut room, b"req_1", 1), b"req_1");
        assert_eq!(attempt_id(&mut room, b"req_1", 12), b"req_1-12");
        for number in 0..=u8::MAX {
            assert_eq!(digits(number).trim_ascii_start(), number.to_string().as_bytes());
        }
    }
}
