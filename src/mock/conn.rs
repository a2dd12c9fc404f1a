//! One connection of a mock: read a request, play its act, watch the client meanwhile.

use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use super::say::{self, Answer, Asked, Body, Ground, Parsed, Probe, Route};
use super::script::{Act, Cut, Eol, FramingSay, Garbage, Health, Metrics, Script};
use super::stream::{Beat, Stream};
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
        spare: Vec::new(),
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
                // Dissolving the association sends the reset now. A lingering close would not:
                // the runtime's write half says FIN when it is dropped.
                let _ = rustix::net::connect_unspec(&conn.socket);
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
enum Then {
    Keep,
    /// Say that no more is coming, and close when the client has.
    Finish,
    Reset,
    Drop,
}

/// Why the client's side is over.
#[derive(Clone, Copy, Debug)]
enum Gone {
    Client(Instant),
    Stopped,
}

struct Conn {
    socket: Socket,
    floor: Rc<Floor>,
    number: u64,
    served: u64,
    /// Received and not yet used.
    inbox: Vec<u8>,
    /// The read buffer while no read is pending.
    spare: Vec<u8>,
    gone: Option<Gone>,
    timer: Timer,
    /// What is being written, reused.
    out: Vec<u8>,
}

/// What of a head outlives the inbox.
struct Head {
    bytes: Vec<u8>,
    method: String,
    target: String,
    content_type: String,
    request_id: Option<String>,
    mock: Vec<String>,
    authorized: bool,
    version: Version,
    keep_alive: bool,
    framing: Framing,
    expects: bool,
    is_head: bool,
}

/// How a request ended, and its connection.
struct End {
    outcome: Outcome,
    then: Then,
    at: Instant,
}

impl End {
    fn now(outcome: Outcome, then: Then) -> End {
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
const BODY_PAUSE_MAX: Duration = Duration::from_secs(60);
/// How long a closed connection may be kept open by its client.
const DRAIN_MAX: Duration = Duration::from_secs(1);
/// An instant answer writes so many events before others get their turn.
const TURN_EVENTS: u32 = 256;

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
            seen.model.clone_from(&answer.model);
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
                let span = self.jittered(&act, act.ttft)
                    + self.jittered(&act, act.inter_token) * more.unwrap_or(u32::MAX).min(1 << 20);
                self.hold(span).await?;
                self.floor.counters.note(number, |seen| seen.first_token = Some(rt::now()));
                let end = self.whole(head, &act, answer, Some(number)).await;
                // An engine has generated it all before the first byte leaves.
                *truth = whole_truth;
                Ok(end)
            }
        }
    }

    fn jittered(&self, act: &Act, span: Duration) -> Duration {
        act.wait(span, &mut self.floor.rng.borrow_mut())
    }

    /// Waits for a slot of the engine.
    async fn slot(&mut self, slots: Option<u32>, number: u64) -> Result<Option<Slot>, Gone> {
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

    // ---- answers ----------------------------------------------------------------------------

    /// The head of an answer whose body is framed like this.
    fn answer_head(&self, head: &Head, act: &Act, answer: &Answer, framing: Framing) -> Vec<u8> {
        let version = if act.framing == FramingSay::Http10 { "1.0" } else { "1.1" };
        let mut out = format!(
            "HTTP/{version} {} {}\r\nserver: forebay-mock\r\ncontent-type: {}\r\n",
            answer.status,
            say::reason(answer.status),
            answer.content_type
        );
        for (name, value) in &answer.extra {
            out.push_str(&format!("{name}: {value}\r\n"));
        }
        if let Some(id) = &head.request_id {
            out.push_str(&format!("x-request-id: {id}\r\n"));
        }
        match framing {
            Framing::Length(bytes) => out.push_str(&format!("content-length: {bytes}\r\n")),
            Framing::Chunked => out.push_str("transfer-encoding: chunked\r\n"),
            Framing::None | Framing::UntilClose => {}
        }
        if act.close || !head.keep_alive || framing == Framing::UntilClose {
            out.push_str("connection: close\r\n");
        }
        out.push_str("\r\n");
        out.into_bytes()
    }

    /// Whether the connection outlives a whole answer.
    fn after(&self, head: &Head, act: &Act, framing: Framing) -> Then {
        let close = act.close || act.drop_idle || !head.keep_alive;
        if close || framing == Framing::UntilClose { Then::Finish } else { Then::Keep }
    }

    /// Sends an answer in one piece, or what its act makes of it.
    async fn whole(&mut self, head: &Head, act: &Act, answer: Answer, number: Option<u64>) -> End {
        match self.try_whole(head, act, answer, number).await {
            Ok(end) => end,
            Err(gone) => gone.into(),
        }
    }

    async fn try_whole(
        &mut self,
        head: &Head,
        act: &Act,
        mut answer: Answer,
        number: Option<u64>,
    ) -> Result<End, Gone> {
        if let Some(number) = number {
            self.floor.counters.note(number, |seen| seen.status = answer.status);
        }
        let mut body = match std::mem::replace(&mut answer.body, Body::Whole(Vec::new())) {
            Body::Whole(body) => body,
            Body::Events(_) => Vec::new(),
        };
        let good = answer.worked && answer.status < 300;
        if good && act.garbage == Some(Garbage::Body) {
            body = RUBBISH.to_vec();
        }
        let framing = match (act.framing, answer.status) {
            (_, 204 | 304) => Framing::None,
            (FramingSay::Proper, _) => Framing::Length(body.len() as u64),
            _ => Framing::UntilClose,
        };
        let mut bytes = self.answer_head(head, act, &answer, framing);
        if head.is_head {
            body.clear();
        }
        if good && act.garbage == Some(Garbage::Head) {
            self.put(NO_HTTP).await?;
            return Ok(End::now(Outcome::Cut, Then::Finish));
        }
        if good && act.garbage == Some(Garbage::Framing) {
            let line = format!("content-length: {}\r\n\r\n", body.len() + 1);
            bytes.truncate(bytes.len() - 2);
            bytes.extend_from_slice(line.as_bytes());
            bytes.extend_from_slice(&body);
            self.put(&bytes).await?;
            return Ok(End::now(Outcome::Cut, Then::Finish));
        }
        self.interim(act).await?;
        let apart = good
            && (act.slow_head.is_some()
                || act.body_delay.is_some()
                || act.head_only
                || [act.reset_after, act.close_after, act.stall_after].iter().any(Option::is_some));
        if !apart {
            bytes.extend_from_slice(&body);
            self.put_in_pieces(act, &bytes).await?;
            return Ok(End::now(Outcome::Complete, self.after(head, act, framing)));
        }
        self.put_head(act, &bytes).await?;
        if act.head_only {
            return Err(self.gone().await);
        }
        self.hold(act.body_delay.unwrap_or_default()).await?;
        let half = &body[..body.len() / 2];
        if act.reset_after.is_some() {
            self.put(half).await?;
            return Ok(End::now(Outcome::Cut, Then::Reset));
        }
        if act.close_after.is_some() {
            self.put(half).await?;
            return Ok(End::now(Outcome::Cut, Then::Finish));
        }
        if act.stall_after.is_some() {
            self.put(half).await?;
            return Err(self.gone().await);
        }
        self.put_in_pieces(act, &body).await?;
        Ok(End::now(Outcome::Complete, self.after(head, act, framing)))
    }

    /// Sends a stream event by event.
    async fn stream(
        &mut self,
        call: &Call<'_>,
        act: &Act,
        mut answer: Answer,
        slots: Option<u32>,
        truth: &mut Truth,
    ) -> Result<End, End> {
        let Call { head, number, .. } = *call;
        let Body::Events(mut stream) = std::mem::replace(&mut answer.body, Body::Whole(Vec::new()))
        else {
            return Ok(End::now(Outcome::Complete, Then::Drop));
        };
        self.floor.counters.note(number, |seen| seen.status = answer.status);
        let framing = match (act.framing, head.version) {
            (FramingSay::Proper, Version::Http11) => Framing::Chunked,
            _ => Framing::UntilClose,
        };
        let bytes = self.answer_head(head, act, &answer, framing);
        if act.garbage == Some(Garbage::Head) {
            self.put(NO_HTTP).await?;
            return Ok(End::now(Outcome::Cut, Then::Finish));
        }
        self.interim(act).await?;
        let mut waiting_head = Some(bytes);
        if !act.late_head
            && let Some(bytes) = waiting_head.take()
        {
            self.put_head(act, &bytes).await?;
        }
        if act.head_only {
            return Err(self.gone().await.into());
        }
        let _slot = self.slot(slots, number).await?;
        self.hold(act.body_delay.unwrap_or_default()).await?;
        let mut pipe = Pipe::new(act, framing);
        let ended = self.tell(&mut pipe, &mut stream, waiting_head, number).await;
        (truth.completion_tokens, truth.reasoning_tokens) = stream.told();
        match ended? {
            None => Ok(End::now(Outcome::Complete, self.after(head, act, framing))),
            Some(then) => Ok(End::now(Outcome::Cut, then)),
        }
    }

    /// Tells the stream to its end (`None`) or to where a fault cuts it.
    async fn tell(
        &mut self,
        pipe: &mut Pipe<'_>,
        stream: &mut Stream,
        mut waiting_head: Option<Vec<u8>>,
        number: u64,
    ) -> Result<Option<Then>, Gone> {
        let act = pipe.act;
        let mut waited = false;
        let mut content = 0;
        let mut turn = 0;
        loop {
            if let Some(cut) = act.cut(content).filter(|_| pipe.begun) {
                return self.cut(cut, pipe, stream).await;
            }
            pipe.event.clear();
            let Some(beat) = stream.next(&mut pipe.event) else { break };
            match beat {
                Beat::Lead if act.early_role => {}
                _ if !waited => {
                    waited = true;
                    self.wait(self.jittered(act, act.ttft), pipe, waiting_head.is_none()).await?;
                }
                Beat::Token { opens: true } if content > 0 => {
                    self.wait(self.jittered(act, act.inter_token), pipe, true).await?;
                }
                _ => {}
            }
            if let Some(head) = waiting_head.take() {
                self.put_head(act, &head).await?;
            }
            // A role chunk is not content: a cut after 0 lets it pass and stops the first token.
            let is_token = matches!(beat, Beat::Token { .. });
            if is_token && !pipe.begun {
                pipe.begun = true;
                if let Some(cut) = act.cut(0) {
                    return self.cut(cut, pipe, stream).await;
                }
            }
            if act.garbage == Some(Garbage::Framing) && is_token {
                self.put(b"zz\r\nno size\r\n").await?;
                return Ok(Some(Then::Finish));
            }
            if act.garbage == Some(Garbage::Body) {
                pipe.event.clear();
                pipe.event.extend_from_slice(RUBBISH);
                pipe.add_raw();
                self.flush(pipe, true).await?;
                return Ok(Some(if pipe.framing == Framing::Chunked {
                    Then::Keep
                } else {
                    Then::Finish
                }));
            }
            pipe.add();
            if is_token {
                content += 1;
                if act.garbage == Some(Garbage::Event) && content == 1 {
                    pipe.event.clear();
                    pipe.event.extend_from_slice(
                        b"data: {\"choices\":[{\"delta\":{\"content\": oops\n\n",
                    );
                    pipe.add();
                }
            }
            // What says that all was told travels with the end of the body: a client that closes
            // on it has read everything.
            if beat != Beat::End {
                self.flush(pipe, false).await?;
            }
            if content == 1 && is_token {
                let now = rt::now();
                self.floor.counters.note(number, |seen| seen.first_token = Some(now));
            }
            turn += 1;
            if turn % TURN_EVENTS == 0 && act.inter_token.is_zero() {
                self.hold(Duration::from_millis(1)).await?;
            }
        }
        if let Some(head) = waiting_head.take() {
            self.put_head(act, &head).await?;
        }
        self.flush(pipe, true).await?;
        Ok(None)
    }

    async fn cut(
        &mut self,
        cut: Cut,
        pipe: &mut Pipe<'_>,
        stream: &mut Stream,
    ) -> Result<Option<Then>, Gone> {
        match cut {
            Cut::Reset => {
                self.flush_part(pipe).await?;
                Ok(Some(Then::Reset))
            }
            Cut::Close => {
                self.flush_part(pipe).await?;
                Ok(Some(Then::Finish))
            }
            Cut::Stall => {
                self.flush_part(pipe).await?;
                loop {
                    self.wait(Duration::from_secs(3600), pipe, true).await?;
                }
            }
            Cut::Error => {
                pipe.event.clear();
                stream.fail(&mut pipe.event);
                pipe.add();
                self.flush(pipe, true).await?;
                Ok(Some(if pipe.framing == Framing::Chunked { Then::Keep } else { Then::Finish }))
            }
        }
    }

    /// Waits between events; with `ping`, comments are sent meanwhile.
    async fn wait(
        &mut self,
        span: Duration,
        pipe: &mut Pipe<'_>,
        head_sent: bool,
    ) -> Result<(), Gone> {
        let Some(every) = pipe.act.ping.filter(|_| head_sent) else { return self.hold(span).await };
        let end = rt::now() + span;
        loop {
            let left = end.since(rt::now());
            if left <= every {
                return self.hold(left).await;
            }
            self.hold(every).await?;
            pipe.add_comment();
            self.flush_part(pipe).await?;
        }
    }

    /// Sends what has gathered once there is enough of it; `last` also ends the body.
    async fn flush(&mut self, pipe: &mut Pipe<'_>, last: bool) -> Result<(), Gone> {
        if !last && pipe.events < pipe.act.merge {
            return Ok(());
        }
        pipe.events = 0;
        let held = std::mem::take(&mut pipe.held);
        let mut out = std::mem::take(&mut self.out);
        out.clear();
        let mut sent = Ok(());
        let size = pipe.act.chunk_size.unwrap_or(held.len()).max(1);
        for chunk in held.chunks(size) {
            if !out.is_empty() {
                sent = self.put_in_pieces(pipe.act, &out).await;
                out.clear();
                if sent.is_err() {
                    break;
                }
            }
            match pipe.framing {
                Framing::Chunked => h1::append_chunk(&mut out, chunk),
                _ => out.extend_from_slice(chunk),
            }
        }
        if last && pipe.framing == Framing::Chunked {
            match pipe.act.trailers {
                true => out.extend_from_slice(b"0\r\nx-mock-trailer: end\r\n\r\n"),
                false => out.extend_from_slice(h1::LAST_CHUNK),
            }
        }
        if sent.is_ok() && !out.is_empty() {
            sent = self.put_in_pieces(pipe.act, &out).await;
        }
        self.out = out;
        pipe.held = held;
        pipe.held.clear();
        sent
    }

    /// Sends what has gathered, be it little, and leaves the body open.
    async fn flush_part(&mut self, pipe: &mut Pipe<'_>) -> Result<(), Gone> {
        pipe.events = u32::MAX;
        self.flush(pipe, false).await
    }

    async fn interim(&mut self, act: &Act) -> Result<(), Gone> {
        let Some(status) = act.interim else { return Ok(()) };
        let fields = if status == 103 { "link: </style.css>; rel=preload\r\n" } else { "" };
        let head = format!("HTTP/1.1 {status} {}\r\n{fields}\r\n", say::reason(status));
        self.put(head.as_bytes()).await
    }

    async fn put_head(&mut self, act: &Act, bytes: &[u8]) -> Result<(), Gone> {
        let Some(span) = act.slow_head else { return self.put_in_pieces(act, bytes).await };
        // Timers count milliseconds: a piece per millisecond, at most 32 of them.
        let pieces = u32::try_from(span.as_millis()).unwrap_or(u32::MAX).clamp(2, 32);
        for piece in bytes.chunks(bytes.len().div_ceil(pieces as usize).max(1)) {
            self.hold(span / pieces).await?;
            self.put(piece).await?;
        }
        Ok(())
    }

    async fn put_in_pieces(&mut self, act: &Act, bytes: &[u8]) -> Result<(), Gone> {
        let Some(size) = act.write_size else { return self.put(bytes).await };
        for piece in bytes.chunks(size) {
            self.put(piece).await?;
            self.hold(Duration::from_millis(1)).await?;
        }
        Ok(())
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

    /// One read's worth of input, or why there will be none. A read is pending after `Pending`.
    fn poll_input(&mut self, cx: &mut Context<'_>, size: usize) -> Poll<Result<(), Gone>> {
        if let Some(gone) = self.gone {
            return Poll::Ready(Err(gone));
        }
        if self.floor.bell.poll(self.number, cx).is_ready() {
            self.gone = Some(Gone::Stopped);
            return Poll::Ready(Err(Gone::Stopped));
        }
        if !self.socket.is_armed() {
            let mut buf = std::mem::take(&mut self.spare);
            buf.clear();
            buf.reserve(size);
            self.socket.arm(buf, size);
        }
        let (result, buf) = ready!(self.socket.poll_read(cx));
        self.inbox.extend_from_slice(&buf);
        // An idle connection should not hold the buffer of a large body.
        self.spare = if buf.capacity() > BODY_READ { Vec::new() } else { buf };
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

    async fn gone(&mut self) -> Gone {
        std::future::poll_fn(|cx| self.poll_gone(cx)).await
    }

    /// Waits, unless the client leaves.
    async fn hold(&mut self, span: Duration) -> Result<(), Gone> {
        self.timer.set((!span.is_zero()).then(|| rt::now() + span));
        std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            match span.is_zero() {
                true => Poll::Ready(Ok(())),
                false => self.timer.poll(cx).map(Ok),
            }
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
    async fn put(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let sent = match self.socket.try_send(bytes) {
            Ok(sent) if sent == bytes.len() => return Ok(()),
            Ok(sent) => sent,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => 0,
            Err(_) => return Err(self.broken()),
        };
        self.socket.queue(bytes[sent..].to_vec(), 0);
        let flushed = std::future::poll_fn(|cx| {
            if let Poll::Ready(gone) = self.poll_gone(cx) {
                return Poll::Ready(Err(gone));
            }
            self.socket.poll_flush(cx).map(|(result, _)| Ok(result))
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
struct Call<'a> {
    head: &'a Head,
    path: &'a str,
    endpoint: say::Endpoint,
    number: u64,
}

/// A slot that is held; dropping it lets the next request in.
struct Slot(Rc<Floor>);

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.gate.leave();
    }
}

/// A stream on its way: events are gathered, dressed and framed.
struct Pipe<'a> {
    act: &'a Act,
    framing: Framing,
    /// The event being made.
    event: Vec<u8>,
    /// Events that wait to be sent together.
    held: Vec<u8>,
    events: u32,
    /// Whether a byte order mark is due.
    bom: bool,
    /// Whether the first token's turn has come.
    begun: bool,
}

impl<'a> Pipe<'a> {
    fn new(act: &'a Act, framing: Framing) -> Pipe<'a> {
        Pipe {
            act,
            framing,
            event: Vec::new(),
            held: Vec::new(),
            events: 0,
            bom: act.bom,
            begun: false,
        }
    }

    fn add(&mut self) {
        if self.act.comments {
            self.hold(b": mock\n\n");
        }
        let event = std::mem::take(&mut self.event);
        self.hold(&event);
        self.event = event;
        self.events += 1;
    }

    fn add_comment(&mut self) {
        self.hold(b": ping\n\n");
    }

    /// Adds the event's bytes as they are.
    fn add_raw(&mut self) {
        self.held.extend_from_slice(&self.event);
        self.events += 1;
    }

    /// With the line ends of the act. Events are made with LF, and none within a line: JSON
    /// strings have theirs escaped.
    fn hold(&mut self, text: &[u8]) {
        if std::mem::take(&mut self.bom) {
            self.held.extend_from_slice(b"\xEF\xBB\xBF");
        }
        let eol: &[u8] = match self.act.eol {
            Eol::Lf => return self.held.extend_from_slice(text),
            Eol::CrLf => b"\r\n",
            Eol::Cr => b"\r",
        };
        for &byte in text {
            match byte {
                b'\n' => self.held.extend_from_slice(eol),
                _ => self.held.push(byte),
            }
        }
    }
}

/// Neither SSE nor JSON nor UTF-8.
const RUBBISH: &[u8] = b"\x00\xFF\xFE<<<not what you asked for>>>\x80\x81{\"a\":[\"";
/// A TLS alert, as from a port that speaks something else.
const NO_HTTP: &[u8] = b"\x15\x03\x03\x00\x02\x02\x28";

/// What may stand in an id and in a head as it is.
fn is_plain(id: &str) -> bool {
    (1..=128).contains(&id.len())
        && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte))
}

fn unix_seconds() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs())
}
