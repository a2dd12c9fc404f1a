//! How an answer goes onto the wire: its head, its framing, its pace, and its faults.

use std::time::Duration;

use super::conn::{Call, Conn, End, Gone, Head, Then};
use super::say::{self, Answer, Body};
use super::script::{Act, Cut, Eol, FramingSay, Garbage};
use super::stream::{Beat, Stream};
use super::tally::{Outcome, Truth};
use crate::pure::h1::{self, Framing, Version};
use crate::rt;

/// An instant answer writes so many events before others get their turn.
const TURN_EVENTS: u32 = 256;

impl Conn {
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
    pub async fn whole(
        &mut self,
        head: &Head,
        act: &Act,
        answer: Answer,
        number: Option<u64>,
    ) -> End {
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
    pub async fn stream(
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
                    self.wait(Duration::from_hours(1), pipe, true).await?;
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
            let end: &[u8] = if pipe.act.trailers { TRAILERS } else { h1::LAST_CHUNK };
            out.extend_from_slice(end);
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

const TRAILERS: &[u8] = b"0\r\nx-mock-trailer: end\r\n\r\n";
/// Neither SSE nor JSON nor UTF-8.
const RUBBISH: &[u8] = b"\x00\xFF\xFE<<<not what you asked for>>>\x80\x81{\"a\":[\"";
/// A TLS alert, as from a port that speaks something else.
const NO_HTTP: &[u8] = b"\x15\x03\x03\x00\x02\x02\x28";
