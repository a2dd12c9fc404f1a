//! One client connection: heads and bodies in, answers out, and the watch for its leaving.
//!
//! The client's socket is always watched, also while it is being answered: that is how Forebay
//! learns within milliseconds that nobody listens any more. What comes meanwhile (pipelined
//! requests) waits in `inbox`, which is bounded.

use std::cell::Cell;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use crate::pure::answer::Refusal;
use crate::pure::board::{Budget, Hold};
use crate::pure::h1::{self, BodyFault, Decoder, Framing, Parse};
use crate::pure::plan::{HalfClose, Server};
use crate::pure::units::Instant;
use crate::rt::{self, Socket, Timer};

/// Room for a request head to begin with, and for what a client sends while it is answered.
const INBOX_MIN: usize = 2 * 1024;
/// A body is read in pieces of at most this size, so that looking into it never stalls a shard.
const PIECE: usize = 64 * 1024;
/// Buffers beyond this size are not kept between requests.
const KEEP_MAX: usize = 32 * 1024;
/// Buffered bytes are taken from the machine's budget in steps of this size.
const HOLD_STEP: u64 = 64 * 1024;
/// How long, and for how many bytes, we listen to a client that we have refused in the middle of
/// its body. Closing at once would reset the connection and the refusal with it.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 16 * 1024 * 1024;

/// Why there is no (further) request.
#[derive(Debug)]
pub enum NoRequest {
    /// The client left, was idle for too long, or we are draining: close without a word.
    Over,
    /// The head is not acceptable: answer, then close.
    Refused(Refusal),
}

/// Why a body was not received.
#[derive(Debug)]
pub enum NoBody {
    /// The client left.
    Gone,
    /// Answer, then close.
    Refused(Refusal),
}

/// What a client does while it is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    Listening,
    /// It has sent FIN: it will ask no more, and may or may not be listening.
    HalfClosed,
    Gone,
}

pub struct Client {
    pub socket: Socket,
    /// Since when what is queued for it waits, if something is.
    pub behind_since: Instant,
    pub peer: IpAddr,
    /// The request being served, as parsed; its spans lie in `request`.
    pub head: h1::Request,
    /// Bytes of that request: the head, then the body, decoded.
    pub request: Vec<u8>,
    /// What is being built to be sent.
    pub out: Vec<u8>,
    /// Always polled through `aside`.
    timer: Timer,
    /// Bytes that have come and are not yet used: a head in part, pipelined requests.
    inbox: Vec<u8>,
    presence: Presence,
    aside: Aside,
    /// Requests served so far.
    pub served: u64,
}

impl Client {
    pub fn new(socket: Socket, peer: SocketAddr) -> Box<Client> {
        Box::new(Client {
            socket,
            behind_since: Instant::default(),
            peer: peer.ip().to_canonical(),
            head: h1::Request::default(),
            request: Vec::new(),
            out: Vec::new(),
            timer: Timer::new(),
            inbox: Vec::new(),
            presence: Presence::Listening,
            aside: Aside::default(),
            served: 0,
        })
    }

    /// Waits for the next request head; afterwards `request` begins with it. `over` is asked at
    /// each wake-up whether to give up between two requests.
    ///
    /// # Errors
    /// See [`NoRequest`].
    pub async fn next_head(
        &mut self,
        server: &Server,
        over: impl Fn() -> bool,
    ) -> Result<(), NoRequest> {
        let limits = h1::Limits {
            head_bytes: server.bounds.head,
            fields: server.bounds.headers,
            ..h1::Limits::default()
        };
        if self.request.capacity() > KEEP_MAX {
            self.request = Vec::new();
        }
        if self.out.capacity() > KEEP_MAX {
            self.out = Vec::new();
        }
        self.request.clear();
        let waiting = rt::now();
        let mut begun = None;
        loop {
            match h1::parse_request(&self.inbox, &limits, &mut self.head) {
                Ok(Parse::Complete) => break,
                Ok(Parse::Partial) if self.presence != Presence::Listening => {
                    return Err(NoRequest::Over);
                }
                Ok(Parse::Partial) => {}
                Err(refusal) => {
                    return Err(NoRequest::Refused(Refusal::invalid(
                        refusal.status,
                        refusal.message,
                    )));
                }
            }
            if begun.is_none() && !self.inbox.is_empty() {
                begun = Some(rt::now());
            }
            self.set_timer(Some(match begun {
                Some(begun) => begun + server.head_timeout,
                None => waiting + server.idle_timeout,
            }));
            let read = std::future::poll_fn(|cx| {
                if let Poll::Ready(read) = self.poll_inbox(server.bounds.head + INBOX_MIN, cx) {
                    return Poll::Ready(Some(read));
                }
                if begun.is_none() && over() {
                    return Poll::Ready(None);
                }
                self.poll_timer(cx).map(|()| None)
            });
            match read.await {
                Some(Ok(1..)) => {}
                Some(Ok(0)) | Some(Err(_)) => return Err(NoRequest::Over),
                None if begun.is_some() => {
                    let refusal = Refusal::invalid(408, "The request head took too long.");
                    return Err(NoRequest::Refused(refusal));
                }
                None => return Err(NoRequest::Over),
            }
        }
        self.served += 1;
        std::mem::swap(&mut self.request, &mut self.inbox);
        self.inbox.clear();
        if self.head.framing == Framing::None {
            // What follows is the next request. Otherwise it begins the body, and `read_body`
            // gives back what does not belong to it.
            self.inbox.extend_from_slice(&self.request[self.head.head_len..]);
            self.request.truncate(self.head.head_len);
        }
        Ok(())
    }

    /// Reads the whole body behind the head in `request`, decoded. `look` is shown the body so far
    /// after each piece and may refuse it. Memory grows with what arrives, never with what is
    /// announced, and stays below twice the body.
    ///
    /// # Errors
    /// See [`NoBody`].
    pub async fn read_body(
        &mut self,
        server: &Server,
        budget: &Arc<Budget>,
        mut look: impl FnMut(&[u8]) -> Result<(), Refusal>,
    ) -> Result<Option<Hold>, NoBody> {
        let start = self.head.head_len;
        let mut body = Body::new(self.head.framing, server.bounds.body);
        // What came along with the head: to be decoded first, and given back beyond the body.
        self.inbox.extend_from_slice(&self.request[start..]);
        self.request.truncate(start);
        loop {
            self.decode(&mut body.decoder, server)?;
            let received = &self.request[start..];
            if received.len() as u64 > INBOX_MIN as u64 {
                body.account(received.len() as u64, budget, server.bounds.buffered)?;
            }
            look(received).map_err(NoBody::Refused)?;
            if body.decoder.is_done() {
                return Ok(body.hold);
            }
            body.received = received.len() as u64;
            self.set_timer(body.deadline(server));
            match self.head.framing {
                // The rest is read in place, without a copy.
                Framing::Length(length) => {
                    let at = self.request.len();
                    self.read_rest(start, length).await?;
                    let rest = &self.request[at..];
                    body.decoder.decode(rest).map_err(|fault| refuse(fault, server))?;
                }
                _ => {
                    self.read_more().await?;
                }
            }
        }
    }

    /// Moves body bytes from the inbox to the end of `request`.
    fn decode(&mut self, decoder: &mut Decoder, server: &Server) -> Result<(), NoBody> {
        loop {
            let piece = decoder.decode(&self.inbox).map_err(|fault| refuse(fault, server))?;
            self.request.extend_from_slice(&self.inbox[piece.data.clone()]);
            self.inbox.drain(..piece.consumed);
            if piece.end || piece.consumed == 0 {
                return Ok(());
            }
        }
    }

    /// One read to the end of `request`, never beyond the body's end.
    async fn read_rest(&mut self, start: usize, length: u64) -> Result<usize, NoBody> {
        let whole = start.saturating_add(usize::try_from(length).unwrap_or(usize::MAX));
        let most = (whole - self.request.len()).min(PIECE);
        if self.request.capacity() - self.request.len() < most {
            let doubled = self.request.capacity().saturating_mul(2).min(whole);
            let target = doubled.max(self.request.len() + most);
            self.request.reserve_exact(target - self.request.len());
        }
        let read = std::future::poll_fn(|cx| {
            if let Poll::Ready(read) = self.socket.poll_recv(cx, &mut self.request, most) {
                return Poll::Ready(Some(read));
            }
            self.poll_timer(cx).map(|()| None)
        });
        received(read.await)
    }

    /// One read to the end of the inbox.
    async fn read_more(&mut self) -> Result<usize, NoBody> {
        let read = std::future::poll_fn(|cx| {
            if let Poll::Ready(read) = self.poll_inbox(PIECE, cx) {
                return Poll::Ready(Some(read));
            }
            self.poll_timer(cx).map(|()| None)
        });
        received(read.await)
    }

    /// Begins to pass the body on instead of receiving it whole.
    pub fn upload(&mut self, server: &Server) -> Body {
        // The watch may have brought more since: it stands behind what came along with the head.
        let mut come = self.request.split_off(self.head.head_len);
        come.append(&mut self.inbox);
        self.inbox = come;
        Body::new(self.head.framing, server.bounds.body)
    }

    /// Appends what has come of the body to `out`, framed anew.
    ///
    /// # Errors
    /// The framing is broken, or the body too large.
    pub fn pass_body(
        &mut self,
        body: &mut Body,
        server: &Server,
        out: &mut Vec<u8>,
    ) -> Result<(), NoBody> {
        while !body.decoder.is_done() {
            let piece = body.decoder.decode(&self.inbox).map_err(|fault| refuse(fault, server))?;
            let data = &self.inbox[piece.data.clone()];
            body.received += data.len() as u64;
            match self.head.framing {
                Framing::Chunked if !data.is_empty() => h1::append_chunk(out, data),
                _ => out.extend_from_slice(data),
            }
            self.inbox.drain(..piece.consumed);
            if piece.consumed == 0 {
                break;
            }
        }
        if body.decoder.is_done() && self.head.framing == Framing::Chunked {
            out.extend_from_slice(h1::LAST_CHUNK);
        }
        Ok(())
    }

    /// More of the body: bytes that came, 0 if the client has finished before it was whole.
    pub fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.poll_inbox(PIECE, cx)
    }

    /// Ready when the client can be taken to have left, by what its end of sending means here.
    /// Anything it sends meanwhile waits in the inbox.
    pub fn poll_gone(&mut self, half_close: HalfClose, cx: &mut Context<'_>) -> Poll<()> {
        while self.presence == Presence::Listening {
            match std::task::ready!(self.poll_inbox(INBOX_MIN, cx)) {
                Ok(0) => self.presence = Presence::HalfClosed,
                Ok(_) => {}
                Err(_) => self.presence = Presence::Gone,
            }
        }
        match (self.presence, half_close) {
            (Presence::Gone, _) | (Presence::HalfClosed, HalfClose::Abort) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Writes what the socket takes and queues a copy of the rest. Where that fails the socket is
    /// broken, and everything that waits for the client ends.
    pub fn tell(&mut self, bytes: &[u8]) {
        let was_behind = self.socket.is_behind();
        let sent = self.socket.send_pieces(&[IoSlice::new(bytes)]);
        if !was_behind && !matches!(sent, Ok(true)) {
            self.behind_since = rt::now();
        }
    }

    /// Lets go of the request's body; its head stays, and what is still to be said.
    pub fn release_body(&mut self) {
        self.request.truncate(self.head.head_len);
        self.request.shrink_to_fit();
        self.out.shrink_to_fit();
    }

    /// Whether another request may follow on this connection.
    pub fn stays(&self) -> bool {
        self.presence == Presence::Listening
    }

    /// Closes after a refusal in the middle of a request: says that we are done, then swallows what
    /// the client is still sending, for a while, so that it can read why.
    pub async fn linger(&mut self) {
        self.socket.finish();
        self.request = Vec::new();
        let mut left = LINGER_BYTES;
        self.set_timer(Some(rt::now() + LINGER));
        while left > 0 {
            self.inbox.clear();
            let read = std::future::poll_fn(|cx| {
                if let Poll::Ready(read) = self.poll_inbox(PIECE, cx) {
                    return Poll::Ready(read.unwrap_or(0));
                }
                self.poll_timer(cx).map(|()| 0)
            });
            match read.await {
                0 => break,
                n => left = left.saturating_sub(n),
            }
        }
    }

    /// Reads what has come to the end of the inbox, until that holds `most` bytes; never ready
    /// while it does.
    fn poll_inbox(&mut self, most: usize, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let left = most.saturating_sub(self.inbox.len());
        if left == 0 {
            return Poll::Pending;
        }
        // Doubling: a long head costs few reads, and little memory is made ready for a short one.
        let room = left.min(self.inbox.len().max(INBOX_MIN));
        self.socket.poll_recv(cx, &mut self.inbox, room)
    }
}

/// What happens beside a stream: the client stirs, the timer fires. Both wake the connection's task
/// through a waker of their own, so that a chunk, which comes a thousand times as often, need not
/// look at either: that would cost a dozen cache lines of a stream that was cold.
#[derive(Default)]
struct Aside(Option<(Waker, Arc<Raised>)>);

impl Aside {
    fn get(&mut self, cx: &Context<'_>) -> &(Waker, Arc<Raised>) {
        self.0.get_or_insert_with(|| {
            let (flag, task) = (AtomicBool::new(false), cx.waker().clone());
            let raised = Arc::new(Raised { flag, task });
            raised.raise();
            (Waker::from(Arc::clone(&raised)), raised)
        })
    }
}

struct Raised {
    flag: AtomicBool,
    task: Waker,
}

thread_local! {
    /// How many flags are up on this shard: with none, nobody needs to look at its own.
    static FLAGS_UP: Cell<usize> = const { Cell::new(0) };
}

impl Raised {
    fn raise(&self) {
        if !self.flag.swap(true, Ordering::Relaxed) {
            FLAGS_UP.set(FLAGS_UP.get() + 1);
        }
    }

    fn lower(&self) -> bool {
        let up = self.flag.swap(false, Ordering::Relaxed);
        if up {
            FLAGS_UP.set(FLAGS_UP.get() - 1);
        }
        up
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        self.lower();
    }
}

impl Wake for Raised {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    /// On the shard that it belongs to: tasks never move, and nobody else holds their wakers.
    fn wake_by_ref(self: &Arc<Self>) {
        self.raise();
        self.task.wake_by_ref();
    }
}

/// What happened beside a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    Gone,
    Time,
}

impl Client {
    /// Moves the timer's deadline; `None` turns it off.
    pub fn set_timer(&mut self, deadline: Option<Instant>) {
        if self.timer.set(deadline) {
            self.raise();
        }
    }

    /// Ready once the timer's deadline has passed. Always from the same task.
    pub fn poll_timer(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (waker, _) = self.aside.get(cx);
        self.timer.poll(&mut Context::from_waker(waker))
    }

    /// Binds the connection to its task, whose context this is.
    pub fn begin(&mut self, cx: &Context<'_>) {
        self.aside.get(cx);
    }

    /// Has [`Client::poll_beside`] look, whatever woke the task. Needed after the socket was polled
    /// in another way: it would wake the task and not say so.
    pub fn raise(&mut self) {
        if let Some((_, raised)) = &self.aside.0 {
            raised.raise();
        }
    }

    /// The client's leaving and the timer, looked at only when one of them has stirred since.
    pub fn poll_beside(&mut self, half_close: HalfClose, cx: &mut Context<'_>) -> Poll<Beside> {
        if FLAGS_UP.get() == 0 {
            return Poll::Pending;
        }
        let (waker, raised) = self.aside.get(cx);
        if !raised.lower() {
            return Poll::Pending;
        }
        let waker = waker.clone();
        let cx = &mut Context::from_waker(&waker);
        let beside = if self.poll_gone(half_close, cx).is_ready() {
            Beside::Gone
        } else {
            std::task::ready!(self.timer.poll(cx));
            Beside::Time
        };
        // It stays true until somebody acts on it.
        self.raise();
        Poll::Ready(beside)
    }
}

/// A body on its way in.
pub struct Body {
    began: Instant,
    decoder: Decoder,
    received: u64,
    hold: Option<Hold>,
}

impl Body {
    fn new(framing: Framing, bytes_max: u64) -> Body {
        let decoder = Decoder::bounded(framing, bytes_max);
        Body { began: rt::now(), decoder, received: 0, hold: None }
    }

    pub fn received(&self) -> u64 {
        self.received
    }

    pub fn is_done(&self) -> bool {
        self.decoder.is_done()
    }

    /// Keeps the machine's budget in step with what was received.
    fn account(&mut self, received: u64, budget: &Arc<Budget>, limit: u64) -> Result<(), NoBody> {
        let want = received.next_multiple_of(HOLD_STEP);
        let fits = match &mut self.hold {
            None => {
                self.hold = budget.take(want, limit);
                self.hold.is_some()
            }
            Some(hold) => {
                let more = want.saturating_sub(hold.amount());
                more == 0 || hold.grow(more, limit)
            }
        };
        if fits {
            return Ok(());
        }
        Err(NoBody::Refused(Refusal::busy(
            "buffer_full",
            "The gateway holds as many request bodies as it may. Try again shortly.",
            Duration::from_secs(1),
        )))
    }

    /// When the client must have sent the next byte: the head's time, and then the lowest rate
    /// that is tolerated. `None` without such a rate.
    pub fn deadline(&self, server: &Server) -> Option<Instant> {
        let paid = self.received.saturating_mul(1_000_000_000).checked_div(server.body_rate)?;
        Some(self.began + server.head_timeout + Duration::from_nanos(paid))
    }
}

fn received(read: Option<io::Result<usize>>) -> Result<usize, NoBody> {
    match read {
        Some(Ok(n @ 1..)) => Ok(n),
        Some(Ok(0) | Err(_)) => Err(NoBody::Gone),
        None => Err(too_slow()),
    }
}

pub fn too_slow() -> NoBody {
    NoBody::Refused(Refusal::invalid(408, "The request body came too slowly."))
}

fn refuse(fault: BodyFault, server: &Server) -> NoBody {
    NoBody::Refused(match fault {
        BodyFault::TooLarge => Refusal::invalid(
            413,
            format!("The request body is larger than {} bytes.", server.bounds.body),
        )
        .code("body_too_large"),
        BodyFault::Malformed(why) => {
            Refusal::invalid(400, format!("The request body cannot be read: {why}."))
        }
        BodyFault::Truncated => Refusal::invalid(400, "The request body ended too early."),
    })
}
