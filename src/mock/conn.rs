//! One connection of a mock: read a request, play its act, watch the client meanwhile.

use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use super::say::{self, Answer, Asked, Body, Ground, Parsed, Probe, Route};
use super::script::{Act, Health, Metrics, Script};
use super::tally::{BODY_KEPT_MAX, Outcome, Seen, Truth};
use super::{Floor, page};
use crate::pure::h1::{self, Decoder, Framing, Limits, Method, Parse, Version};
use crate::pure::units::Instant;
use crate::rt::{self, Socket, Timer};

/// Serves a connection until either side is done with it.
pub async fn serve(socket: Socket, floor: Rc<Floor>, number: u64) {
    floor.bell.enter(number);
    floor.counters.change(|totals| {
        totals.connections += 1;
        totals.connections_open += 1;
    });
    // Also when a request panics: a count that stays up would hang the next test's wait.
    let _left = Left { floor: floor.clone(), number };
    let mut conn = Conn {
        socket,
        floor,
        number,
        served: 0,
        inbox: Vec::new(),
        gone: None,
        timer: Timer::new(),
        out: Vec::new(),
    };
    let mut head = h1::Request::default();
    loop {
        match conn.request(&mut head).await {
            Then::Keep => {}
            Then::Drop => break,
            Then::Finish => {
                conn.socket.finish();
                // A close with unread input would be a reset, which can overtake the answer.
                let _ = conn.drain().await;
                break;
            }
            Then::Reset => {
                conn.socket.reset();
                return;
            }
        }
    }
    conn.socket.abort();
}

struct Left {
    floor: Rc<Floor>,
    number: u64,
}

impl Drop for Left {
    fn drop(&mut self) {
        self.floor.bell.leave(self.number);
        self.floor.counters.change(|totals| totals.connections_open -= 1);
    }
}

/// What becomes of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Keep,
    /// Say that no more is coming, and close when the client has.
    Finish,
    Reset,
    Drop,
}

/// Why the client's side is over.
#[derive(Clone, Copy, Debug)]
pub enum Gone {
    Client(Instant),
    Stopped,
}

pub struct Conn {
    socket: Socket,
    pub floor: Rc<Floor>,
    number: u64,
    served: u64,
    /// Received and not yet used.
    inbox: Vec<u8>,
    gone: Option<Gone>,
    timer: Timer,
    /// What is being written, reused.
    pub out: Vec<u8>,
}

/// What of a head outlives the inbox.
pub struct Head {
    pub bytes: Vec<u8>,
    pub method: String,
    pub target: String,
    pub content_type: String,
    pub request_id: Option<String>,
    pub mock: Vec<String>,
    pub authorized: bool,
    pub version: Version,
    pub keep_alive: bool,
    pub framing: Framing,
    pub expects: bool,
    pub is_head: bool,
}

/// How a request ended, and its connection.
pub struct End {
    pub outcome: Outcome,
    pub then: Then,
    pub at: Instant,
}

impl End {
    pub fn now(outcome: Outcome, then: Then) -> End {
        End { outcome, then, at: rt::now() }
    }
}

impl From<Gone> for End {
    fn from(gone: Gone) -> End {
        match gone {
            Gone::Client(at) => End { outcome: Outcome::ClientGone, then: Then::Drop, at },
            Gone::Stopped => End::now(Outcome::Stopped, Then::Drop),
        }
    }
}

const LIMITS: Limits = Limits { head_bytes: 256 * 1024, target_bytes: 64 * 1024, fields: 256 };
/// More is a 413.
const BODY_MAX: u64 = 256 << 20;
/// Requests sent ahead of their turn; beyond it the client is not read.
const AHEAD_MAX: usize = 256 * 1024;
/// A body may pause so long.
const BODY_PAUSE_MAX: Duration = Duration::from_mins(1);
/// How long a closed connection may be kept open by its client.
const DRAIN_MAX: Duration = Duration::from_secs(1);

impl Conn {
    async fn request(&mut self, parsed: &mut h1::Request) -> Then {
        let script = self.floor.remote.script();
        let head = match self.head(parsed, &script).await {
            Ok(head) => head,
            Err(then) => return then,
        };
        self.served += 1;
        let path = head.target.split('?').next().unwrap_or_default().to_owned();
        let mut act = script.act.clone();
        let asked_for = head.mock.iter().try_for_each(|text| act.apply(text));
        match say::route(&head.method, &path) {
            Route::Model(endpoint) => {
                let number = self.begin(&head);
                let mut truth = Truth::default();
                let end = match asked_for {
                    Ok(()) => {
                        let call = Call { head: &head, path: &path, endpoint, number };
                        self.play(&call, act, &script, &mut truth).await
                    }
                    Err(why) => {
                        let answer = Answer::error(400, "BadRequestError", Some("x-mock"), &why);
                        match self.body(&head).await {
                            Ok(_) => self.whole(&head, &Act::instant(), answer, Some(number)).await,
                            Err(end) => end,
                        }
                    }
                };
                self.floor.counters.end(number, end.at, end.outcome, truth);
                end.then
            }
            Route::Probe(probe) => {
                self.floor.counters.change(|totals| totals.probes += 1);
                self.probe(&head, probe, &act, &script).await
            }
            Route::NotFound => self.plain(&head, Answer::detail(404, "Not Found")).await,
            Route::NotAllowed(allow) => {
                let mut answer = Answer::detail(405, "Method Not Allowed");
                answer.extra.push(("allow", allow.to_owned()));
                self.plain(&head, answer).await
            }
        }
    }

    /// Reads a head; what cannot be read is answered and closed.
    async fn head(&mut self, parsed: &mut h1::Request, script: &Script) -> Result<Head, Then> {
        parsed.clear();
        loop {
            match h1::parse_request(&self.inbox, &LIMITS, parsed) {
                Ok(Parse::Complete) => break,
                Ok(Parse::Partial) => {}
                Err(refusal) => {
                    self.floor.counters.change(|totals| totals.refused += 1);
                    let answer = Answer::detail(refusal.status, refusal.message);
                    return Err(self.refuse(&answer).await);
                }
            }
            if self.fill(script.idle, HEAD_READ).await.is_err() {
                if !self.inbox.is_empty() {
                    self.floor.counters.change(|totals| totals.refused += 1);
                }
                return Err(Then::Drop);
            }
        }
        let buf = &self.inbox;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let named = |name: &str| parsed.named(buf, name.as_bytes()).map(text);
        let all = |name: &str| -> Vec<String> {
            let same = |field: &&crate::pure::fields::Field| {
                field.name.of(buf).eq_ignore_ascii_case(name.as_bytes())
            };
            parsed.fields.iter().filter(same).map(|field| text(field.value.of(buf))).collect()
        };
        let authorized = script.key.as_ref().is_none_or(|key| {
            named("authorization").is_some_and(|value| value == format!("Bearer {key}"))
                || named("x-api-key").is_some_and(|value| value == *key)
        });
        let head = Head {
            bytes: buf[..parsed.head_len].to_vec(),
            method: text(parsed.method.name(buf)),
            target: text(parsed.target.of(buf)),
            content_type: named("content-type").unwrap_or_default(),
            request_id: named("x-request-id").filter(|id| is_plain(id)),
            mock: all("x-mock"),
            authorized,
            version: parsed.version,
            keep_alive: parsed.keep_alive,
            framing: parsed.framing,
            expects: parsed.expect_continue,
            is_head: parsed.method == Method::Head,
        };
        self.inbox.drain(..parsed.head_len);
        Ok(head)
    }

    /// The whole body, without its framing.
    async fn body(&mut self, head: &Head) -> Result<Vec<u8>, End> {
        let mut decoder = Decoder::bounded(head.framing, BODY_MAX);
        let mut body = Vec::new();
        if head.expects && !decoder.is_done() {
            self.put(h1::CONTINUE).await?;
        }
        while !decoder.is_done() {
            if self.inbox.is_empty() {
                match self.fill(BODY_PAUSE_MAX, BODY_READ).await {
                    Ok(()) => {}
                    Err(Over::Gone(gone)) => return Err(gone.into()),
                    Err(Over::Late) => {
                        let answer = Answer::detail(408, "the body stopped coming");
                        let then = self.refuse(&answer).await;
                        return Err(End::now(Outcome::Cut, then));
                    }
                }
            }
            match decoder.decode(&self.inbox) {
                Ok(piece) => {
                    body.extend_from_slice(&self.inbox[piece.data]);
                    self.inbox.drain(..piece.consumed);
                }
                Err(fault) => {
                    self.floor.counters.change(|totals| totals.refused += 1);
                    let (status, why) = match fault {
                        h1::BodyFault::Malformed(why) => (400, why),
                        h1::BodyFault::TooLarge => (413, "the body is too large"),
                        h1::BodyFault::Truncated => (400, "the body ended early"),
                    };
                    let then = self.refuse(&Answer::detail(status, why)).await;
                    return Err(End::now(Outcome::Cut, then));
                }
            }
        }
        Ok(body)
    }

    /// Answers what cannot be served any further on this connection.
    async fn refuse(&mut self, answer: &Answer) -> Then {
        let Body::Whole(body) = &answer.body else { return Then::Drop };
        let mut out = format!(
            "HTTP/1.1 {} {}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.status,
            say::reason(answer.status),
            answer.content_type,
            body.len()
        )
        .into_bytes();
        out.extend_from_slice(body);
        match self.put(&out).await {
            Ok(()) => Then::Finish,
            Err(_) => Then::Drop,
        }
    }

    /// An answer that no script touches.
    async fn plain(&mut self, head: &Head, answer: Answer) -> Then {
        match self.body(head).await {
            Ok(_) => self.whole(head, &Act::instant(), answer, None).await.then,
            Err(end) => end.then,
        }
    }

    fn begin(&self, head: &Head) -> u64 {
        self.floor.counters.begin(Seen {
            number: 0,
            connection: self.number,
            head: head.bytes.clone(),
            method: head.method.clone(),
            target: head.target.clone(),
            body: Vec::new(),
            body_bytes: 0,
            model: String::new(),
            status: 0,
            started: rt::now(),
            first_token: None,
            ended: None,
            outcome: Outcome::Running,
            truth: Truth::default(),
        })
    }

    /// A request to a model, from its body to its end.
    async fn play(&mut self, call: &Call<'_>, act: Act, script: &Script, truth: &mut Truth) -> End {
        match self.try_play(call, act, script, truth).await {
            Ok(end) | Err(end) => end,
        }
    }

    async fn try_play(
        &mut self,
        call: &Call<'_>,
        act: Act,
        script: &Script,
        truth: &mut Truth,
    ) -> Result<End, End> {
        let Call { head, path, endpoint, number } = *call;
        let decided = act.is_faulty();
        let mut act = if decided { self.floor.dealt(act) } else { act };
        if act.stale && self.served > 1 {
            return Ok(End::now(Outcome::Cut, Then::Reset));
        }
        if let (Some(status), true) = (act.status, act.early) {
            let answer = say::failure(status, &act);
            act.close = true;
            return Ok(self.whole(head, &act, answer, Some(number)).await);
        }
        if let Some(delay) = act.read_delay {
            self.hold(delay).await?;
        }
        let body = self.body(head).await?;
        let asked = Asked {
            endpoint,
            path,
            method: &head.method,
            content_type: &head.content_type,
            request_id: head.request_id.as_deref(),
            body: &body,
        };
        let parsed = say::parse(&asked);
        let ground = Ground { script, number, created: unix_seconds() };
        let mut wish = Ok(());
        if let Some(text) = parsed.as_ref().ok().and_then(Parsed::act) {
            wish = act.apply(text);
            if !decided && wish.is_ok() {
                act = self.floor.dealt(act);
            }
        }
        let answer = match (parsed, wish) {
            _ if !head.authorized => Answer::json(401, r#"{"error":"Unauthorized"}"#),
            (Err(error), _) => error,
            (_, Err(why)) => Answer::error(400, "BadRequestError", Some("mock"), &why),
            (Ok(parsed), Ok(())) => match act.status.filter(|status| !(200..=203).contains(status))
            {
                Some(status) => say::failure(status, &act),
                None => say::answer(&asked, &parsed, &act, &ground),
            },
        };
        self.floor.counters.note(number, |seen| {
            seen.body_bytes = body.len() as u64;
            seen.model = String::from(&*answer.model);
            seen.body = body;
            seen.body.truncate(BODY_KEPT_MAX);
        });
        truth.prompt_tokens = answer.truth.prompt_tokens;
        truth.cached_tokens = answer.truth.cached_tokens;
        if act.hangs || self.floor.asleep.get() {
            return Err(self.gone().await.into());
        }
        if answer.status >= 300 || matches!(answer.body, Body::Whole(_)) && !answer.worked {
            return Ok(self.whole(head, &act, answer, Some(number)).await);
        }
        let slots = script.slots;
        let whole_truth = answer.truth;
        match answer.body {
            Body::Events(_) => self.stream(call, &act, answer, slots, truth).await,
            Body::Whole(_) => {
                let _slot = self.slot(slots, number).await?;
                let more = u32::try_from(whole_truth.completion_tokens.saturating_sub(1));
                let rest = self.jittered(&act, act.inter_token);
                let rest = rest.saturating_mul(more.unwrap_or(u32::MAX));
                let span = self.jittered(&act, act.ttft).saturating_add(rest);
                self.hold(span).await?;
                self.floor.counters.note(number, |seen| seen.first_token = Some(rt::now()));
                let end = self.whole(head, &act, answer, Some(number)).await;
                // An engine has generated it all before the first byte leaves.
                *truth = whole_truth;
                Ok(end)
            }
        }
    }

    pub fn jittered(&self, act: &Act, span: Duration) -> Duration {
        act.wait(span, &mut self.floor.rng.borrow_mut())
    }

    /// Waits for a slot of the engine.
    pub async fn slot(&mut self, slots: Option<u32>, number: u64) -> Result<Option<Slot>, Gone> {
        let Some(slots) = slots else { return Ok(None) };
        let floor = self.floor.clone();
        floor.counters.change(|totals| totals.waiting += 1);
        let entered = std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            floor.gate.poll_enter(number, slots, cx).map(Ok)
        })
        .await;
        floor.counters.change(|totals| totals.waiting -= 1);
        match entered {
            Ok(()) => Ok(Some(Slot(floor))),
            Err(gone) => {
                floor.gate.give_up(number);
                Err(gone)
            }
        }
    }

    // ---- probes -----------------------------------------------------------------------------

    async fn probe(&mut self, head: &Head, probe: Probe, act: &Act, script: &Script) -> Then {
        let body = match self.body(head).await {
            Ok(body) => body,
            Err(end) => return end.then,
        };
        let floor = self.floor.clone();
        let answer = match probe {
            Probe::Health => match act.health {
                Some(Health::Hangs) => {
                    self.gone().await;
                    return Then::Drop;
                }
                Some(Health::Status(status)) => say::failure(status, act),
                None => Answer::json(200, ""),
            },
            Probe::Models if !head.authorized => Answer::json(401, r#"{"error":"Unauthorized"}"#),
            Probe::Models => Answer::json(200, page::models(script, unix_seconds())),
            Probe::Metrics if script.metrics == Metrics::None => Answer::detail(404, "Not Found"),
            Probe::Metrics => {
                let mut answer = Answer::json(
                    200,
                    page::metrics(script, &floor.counters.totals(), floor.asleep.get()),
                );
                answer.content_type = "text/plain; version=1.0.0; charset=utf-8";
                answer
            }
            Probe::Version => Answer::json(200, r#"{"version":"0.32.0"}"#),
            Probe::Load => {
                let load = floor.counters.totals().in_flight;
                Answer::json(200, format!(r#"{{"server_load":{load}}}"#))
            }
            Probe::IsSleeping => {
                Answer::json(200, format!(r#"{{"is_sleeping":{}}}"#, floor.asleep.get()))
            }
            Probe::Sleep | Probe::WakeUp => {
                floor.asleep.set(probe == Probe::Sleep);
                Answer::json(200, r#"{"status":"ok"}"#)
            }
            Probe::Mock => Answer::json(200, page::mock(&floor.counters)),
            Probe::SetMock => match std::str::from_utf8(&body).map_err(|error| error.to_string()) {
                Ok(text) => match floor.remote.change(text) {
                    Ok(()) => Answer::json(200, r#"{"status":"ok"}"#),
                    Err(why) => Answer::error(400, "BadRequestError", None, &why),
                },
                Err(why) => Answer::error(400, "BadRequestError", None, &why),
            },
        };
        self.whole(head, &Act::instant(), answer, None).await.then
    }

    // ---- the socket -------------------------------------------------------------------------

    /// One read's worth of input, or why there will be none.
    fn poll_input(&mut self, cx: &mut Context<'_>, size: usize) -> Poll<Result<(), Gone>> {
        if let Some(gone) = self.gone {
            return Poll::Ready(Err(gone));
        }
        if self.floor.bell.poll(self.number, cx).is_ready() {
            self.gone = Some(Gone::Stopped);
            return Poll::Ready(Err(Gone::Stopped));
        }
        let result = ready!(self.socket.poll_recv(cx, &mut self.inbox, size));
        Poll::Ready(match result {
            Ok(1..) => Ok(()),
            // The client's end of sending counts as leaving, as it does for vLLM and llama.cpp.
            Ok(0) | Err(_) => {
                let gone = Gone::Client(rt::now());
                self.gone = Some(gone);
                Err(gone)
            }
        })
    }

    /// Ready when the client has left or the mock stops.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Gone> {
        while self.inbox.len() < AHEAD_MAX {
            if let Err(gone) = ready!(self.poll_input(cx, HEAD_READ)) {
                return Poll::Ready(gone);
            }
        }
        match self.floor.bell.poll(self.number, cx) {
            Poll::Ready(()) => Poll::Ready(Gone::Stopped),
            Poll::Pending => Poll::Pending,
        }
    }

    pub async fn gone(&mut self) -> Gone {
        std::future::poll_fn(|cx| self.poll_gone(cx)).await
    }

    /// Waits, unless the client leaves.
    pub async fn hold(&mut self, span: Duration) -> Result<(), Gone> {
        self.timer.set((!span.is_zero()).then(|| rt::now() + span));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            if span.is_zero() { Poll::Ready(Ok(())) } else { self.timer.poll(cx).map(Ok) }
        })
        .await
    }

    /// Waits for input at most `limit`.
    async fn fill(&mut self, limit: Duration, size: usize) -> Result<(), Over> {
        self.timer.set(Some(rt::now() + limit));
        std::future::poll_fn(|cx| match self.poll_input(cx, size) {
            Poll::Ready(input) => Poll::Ready(input.map_err(Over::Gone)),
            Poll::Pending => self.timer.poll(cx).map(|()| Err(Over::Late)),
        })
        .await
    }

    /// Reads and forgets until the client closes.
    async fn drain(&mut self) -> Result<(), Over> {
        let end = rt::now() + DRAIN_MAX;
        loop {
            self.inbox.clear();
            self.fill(end.since(rt::now()), BODY_READ).await?;
        }
    }

    /// Writes all of it, unless the client leaves.
    pub async fn put(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let sent = match self.socket.try_send(bytes) {
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Ok(sent) => sent,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => 0,
            Err(_) => return Err(self.broken()),
        };
        self.socket.queue(bytes[sent..].to_vec());
        let flushed = std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            self.socket.poll_flush(cx).map(Ok)
        })
        .await?;
        flushed.map_err(|_| self.broken())
    }

    fn broken(&mut self) -> Gone {
        *self.gone.get_or_insert(Gone::Client(rt::now()))
    }
}

const HEAD_READ: usize = 4 * 1024;
const BODY_READ: usize = 64 * 1024;

enum Over {
    Gone(Gone),
    Late,
}

/// A request to a model.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub head: &'a Head,
    pub path: &'a str,
    pub endpoint: say::Endpoint,
    pub number: u64,
}

/// A slot that is held; dropping it lets the next request in.
pub struct Slot(Rc<Floor>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.gate.leave();
    }
}

/// What may stand in an id and in a head as it is.
fn is_plain(id: &str) -> bool {
    (1..=128).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
}

fn unix_seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
