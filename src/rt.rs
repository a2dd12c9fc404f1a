//! The only file that names the runtime: everything above it sees shards, sockets, timers and
//! [`Instant`]s, so that the runtime can be replaced by editing this file alone.
//!
//! monoio 0.2.4 on io_uring, or on epoll where io_uring is denied. What it demands is kept here:
//!
//! - A pending read owns its buffer and is never dropped while its bytes matter: each socket has
//!   one read in flight at most ([`Socket::arm`]), kept beside the socket and polled from
//!   wherever the connection is being served.
//! - Accepting waits for readiness and then calls `accept4` itself. A cancelled io_uring accept
//!   would leak the descriptor it was about to return; a cancelled poll leaks nothing.
//! - A panic in a task would unwind the whole shard: [`spawn`] contains it.
//! - Connecting takes a socket address. A name would resolve in line and block the shard.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use monoio::buf::{IoBuf, IoBufMut};
use monoio::io::{AsyncReadRent, AsyncWriteRent, OwnedReadHalf, OwnedWriteHalf, Splitable};
use monoio::net::TcpStream;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType,
    sockopt,
};

use crate::pure::units::Instant;

/// How a shard talks to the kernel. Ordered from the cheapest to the most widely permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// io_uring with `SINGLE_ISSUER | DEFER_TASKRUN` (Linux 6.1): completions run only when the
    /// shard asks for them, so they never interrupt it.
    UringDefer,
    /// io_uring without flags (Linux 5.11).
    Uring,
    /// epoll, for containers whose seccomp profile denies io_uring.
    Epoll,
}

impl Driver {
    pub const ALL: [Driver; 3] = [Driver::UringDefer, Driver::Uring, Driver::Epoll];

    pub const fn name(self) -> &'static str {
        match self {
            Driver::UringDefer => "io_uring-defer",
            Driver::Uring => "io_uring",
            Driver::Epoll => "epoll",
        }
    }

    /// Whether this kernel and this process's seccomp profile allow it, and if not, why.
    pub fn probe(self) -> io::Result<()> {
        match self.ring() {
            Some(ring) => ring.build(8).map(drop),
            None => Ok(()),
        }
    }

    /// The first driver that works, and for each one passed over the reason.
    pub fn choose() -> (Driver, Vec<(Driver, io::Error)>) {
        let mut refused = Vec::new();
        for driver in Driver::ALL {
            match driver.probe() {
                Ok(()) => return (driver, refused),
                Err(error) => refused.push((driver, error)),
            }
        }
        (Driver::Epoll, refused)
    }

    fn ring(self) -> Option<io_uring::Builder> {
        let mut ring = io_uring::IoUring::builder();
        // A burst of completions must not overflow into the kernel's slow backlog.
        ring.setup_cqsize(RING_COMPLETIONS);
        match self {
            Driver::UringDefer => {
                ring.setup_single_issuer().setup_defer_taskrun();
                Some(ring)
            }
            Driver::Uring => Some(ring),
            Driver::Epoll => None,
        }
    }
}

const RING_ENTRIES: u32 = 1024;
const RING_COMPLETIONS: u32 = 8 * RING_ENTRIES;

/// Runs `main` on this thread until it ends, with timers and sockets of `driver`.
///
/// # Errors
/// The driver cannot be set up on this kernel.
pub fn block_on<F: Future>(driver: Driver, main: F) -> io::Result<F::Output> {
    Ok(match driver.ring() {
        Some(ring) => monoio::RuntimeBuilder::<monoio::IoUringDriver>::new()
            .uring_builder(ring)
            .with_entries(RING_ENTRIES)
            .enable_timer()
            .build()?
            .block_on(main),
        None => monoio::RuntimeBuilder::<monoio::LegacyDriver>::new()
            .enable_timer()
            .build()?
            .block_on(main),
    })
}

/// `CLOCK_MONOTONIC`: the same clock for every process of the machine. About 25 ns, no syscall.
pub fn now() -> Instant {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Monotonic time starts at boot: both fields are non-negative and 584 years fit in 64 bits.
    Instant::from_nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Panics contained since the process started. Each one is a bug that cost one connection.
pub static PANICS: AtomicU64 = AtomicU64::new(0);

/// Runs `task` on this shard. A panic in it ends that task alone.
pub fn spawn(task: impl Future<Output = ()> + 'static) {
    drop(monoio::spawn(Contained(Some(Box::pin(task)))));
}

struct Contained<F>(Option<Pin<Box<F>>>);

impl<F: Future<Output = ()>> Future for Contained<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Some(task) = self.0.as_mut() else {
            return Poll::Ready(());
        };
        match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx))) {
            Ok(poll) => poll,
            Err(_) => {
                PANICS.fetch_add(1, Ordering::Relaxed);
                // Dropping what is left of the task may panic as well: contain that, too.
                let rest = self.0.take();
                let _ = catch_unwind(AssertUnwindSafe(|| drop(rest)));
                Poll::Ready(())
            }
        }
    }
}

/// Ends at the first of "`span` has passed" and never early; millisecond resolution.
pub async fn sleep(span: Duration) {
    monoio::time::sleep(span).await;
}

/// A deadline that is cheap to move later: one timer that is armed again only when it fires.
///
/// A stream pushes its deadline forward with every chunk; moving a real timer each time would
/// cost more than forwarding the chunk.
pub struct Timer {
    deadline: Option<Instant>,
    armed: Option<(Instant, Pin<Box<monoio::time::Sleep>>)>,
}

impl Timer {
    pub const fn new() -> Timer {
        Timer { deadline: None, armed: None }
    }

    /// Sets or moves the deadline; `None` turns it off.
    pub fn set(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// Ready once the deadline has passed, and again at each poll until it is moved.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.deadline else {
            return Poll::Pending;
        };
        loop {
            match &mut self.armed {
                // Armed for an earlier moment: let it fire, then look again.
                Some((at, sleep)) if *at <= deadline => {
                    std::task::ready!(sleep.as_mut().poll(cx));
                    let now = now();
                    if now >= deadline {
                        return Poll::Ready(());
                    }
                    *at = deadline;
                    let later = monoio::time::Instant::now() + deadline.since(now);
                    sleep.as_mut().reset(later);
                }
                Some((at, sleep)) => {
                    *at = deadline;
                    let later = monoio::time::Instant::now() + deadline.since(now());
                    sleep.as_mut().reset(later);
                }
                None => {
                    let sleep = Box::pin(monoio::time::sleep(deadline.since(now())));
                    self.armed = Some((deadline, sleep));
                }
            }
        }
    }
}

impl Default for Timer {
    fn default() -> Timer {
        Timer::new()
    }
}

/// A listening socket of one shard. Every shard binds the same address with `SO_REUSEPORT`, and
/// the kernel spreads new connections over them.
pub struct Listener {
    /// Only asked for readiness; a stream type because that is what the runtime lets us poll.
    readiness: TcpStream,
    local: SocketAddr,
    closed: Cell<bool>,
    /// Of the task that waits in [`Listener::accept`].
    waiting: Cell<Option<Waker>>,
}

impl Listener {
    /// Takes over a bound, listening socket.
    ///
    /// # Errors
    /// The descriptor is no socket or cannot be made non-blocking.
    pub fn new(listening: OwnedFd) -> io::Result<Listener> {
        rustix::io::ioctl_fionbio(&listening, true)?;
        let local = rustix::net::getsockname(&listening)?.try_into()?;
        let readiness = TcpStream::from_std(std::net::TcpStream::from(listening))?;
        Ok(Listener { readiness, local, closed: Cell::new(false), waiting: Cell::new(None) })
    }

    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// The next connection, with `CLOEXEC` and `TCP_NODELAY` set.
    ///
    /// Out of descriptors it waits 50 ms and tries again, so that running streams live and the
    /// core does not spin; connections stay in the kernel's backlog meanwhile.
    ///
    /// # Errors
    /// [`Listener::close`] was called.
    pub async fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        loop {
            if self.closed.get() {
                return Err(io::ErrorKind::NotConnected.into());
            }
            match rustix::net::acceptfrom_with(self.fd(), accept_flags()) {
                Ok((socket, Some(peer))) => {
                    let peer = peer.try_into()?;
                    if let Ok(socket) = Socket::new(socket) {
                        return Ok((socket, peer));
                    }
                }
                // The peer was gone before we looked.
                Ok((_, None)) => {}
                Err(Errno::AGAIN) => self.readable().await.or_else(again)?,
                Err(Errno::INVAL | Errno::BADF) => {
                    return Err(io::ErrorKind::NotConnected.into());
                }
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    sleep(ACCEPT_BACK_OFF).await
                }
                // Faults of one connection that never was (RFC 1122's network errors, seen here).
                Err(_) => {}
            }
        }
    }

    /// Accepts no more: a pending [`Listener::accept`] ends. The socket itself listens until all of
    /// its owners have closed it; one that a service manager handed over outlives us.
    pub fn close(&self) {
        self.closed.set(true);
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
    }

    async fn readable(&self) -> io::Result<()> {
        let mut readable = std::pin::pin!(self.readiness.readable(false));
        std::future::poll_fn(|cx| {
            if self.closed.get() {
                return Poll::Ready(Ok(()));
            }
            self.waiting.set(Some(cx.waker().clone()));
            readable.as_mut().poll(cx)
        })
        .await
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `readiness` owns the descriptor and lives as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.readiness.as_raw_fd()) }
    }
}

const ACCEPT_BACK_OFF: Duration = Duration::from_millis(50);

/// epoll needs non-blocking sockets; io_uring needs blocking ones, since it answers `EAGAIN` on
/// the others instead of waiting.
fn accept_flags() -> SocketFlags {
    if monoio::utils::is_legacy() {
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
    } else {
        SocketFlags::CLOEXEC
    }
}

fn again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// Binds `addr` with `SO_REUSEPORT` and listens.
///
/// # Errors
/// The address is in use, not ours or not permitted.
pub fn bind(addr: SocketAddr) -> io::Result<OwnedFd> {
    let socket =
        rustix::net::socket_with(family(addr), SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_socket_reuseport(&socket, true)?;
    if addr.is_ipv6() {
        // `[::]` beside `0.0.0.0` in one list must not collide.
        sockopt::set_ipv6_v6only(&socket, true)?;
    }
    rustix::net::bind(&socket, &addr)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// The kernel lowers it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// One TCP connection: at most one read and one write in flight, each owning its buffer.
pub struct Socket {
    inbox: Inbox,
    outbox: Outbox,
    /// Open as long as `inbox` and `outbox` are.
    fd: RawFd,
}

impl Socket {
    fn new(socket: OwnedFd) -> io::Result<Socket> {
        sockopt::set_tcp_nodelay(&socket, true)?;
        let fd = socket.as_raw_fd();
        let (read, write) = TcpStream::from_std(std::net::TcpStream::from(socket))?.into_split();
        Ok(Socket { inbox: Inbox::new(read), outbox: Outbox::Direct(Some(write)), fd })
    }

    /// Connects to `addr` within `limit`.
    ///
    /// # Errors
    /// `TimedOut`, or the kernel's word: refused, unreachable, out of descriptors.
    pub async fn connect(addr: SocketAddr, limit: Duration) -> io::Result<Socket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family(addr), SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &addr) {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                // Waiting for writability can be given up without losing the descriptor.
                let twin = TcpStream::from_std(std::net::TcpStream::from(socket.try_clone()?))?;
                monoio::time::timeout(limit, twin.writable(false))
                    .await
                    .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
                sockopt::socket_error(&socket)??;
            }
            Err(error) => return Err(error.into()),
        }
        if !monoio::utils::is_legacy() {
            rustix::io::ioctl_fionbio(&socket, false)?;
        }
        Socket::new(socket)
    }

    /// Starts a read that appends at most `most` bytes to `buf`, which must have that much room.
    /// The buffer comes back from [`Socket::poll_read`].
    pub fn arm(&mut self, buf: Vec<u8>, most: usize) {
        self.inbox.arm(buf, most);
    }

    /// Whether a read is pending or its result waits to be taken.
    pub fn is_armed(&self) -> bool {
        !matches!(&*self.inbox.post.borrow(), Read::Idle)
    }

    /// The armed read: how many bytes were appended (0 = the peer has finished sending), and the
    /// buffer. Never ready while nothing is armed.
    pub fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<(io::Result<usize>, Vec<u8>)> {
        self.inbox.poll(cx)
    }

    /// Ready when the armed read has ended; [`Socket::poll_read`] then gives its result.
    pub fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.inbox.advance(cx);
        match &*self.inbox.post.borrow() {
            Read::Done(..) => Poll::Ready(()),
            _ => Poll::Pending,
        }
    }

    /// Arms and awaits one read. Dropped before its end, the read stays armed.
    pub async fn read(&mut self, buf: Vec<u8>) -> (io::Result<usize>, Vec<u8>) {
        let room = buf.capacity() - buf.len();
        self.arm(buf, room);
        std::future::poll_fn(|cx| self.poll_read(cx)).await
    }

    /// Writes what the kernel takes at once: one syscall.
    ///
    /// # Errors
    /// `WouldBlock` when its buffer is full, or the connection is broken.
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// Writes pieces one after the other: in one syscall what the kernel takes at once; a copy of
    /// the rest is queued. True if nothing had to be. Not while something is queued.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send_pieces(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<bool> {
        let whole: usize = pieces.iter().map(|piece| piece.len()).sum();
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match pieces {
            [one] => rustix::net::send(&*self, one, flags),
            _ => rustix::net::sendmsg(&*self, pieces, &mut SendAncillaryBuffer::default(), flags),
        };
        let sent = match sent {
            Ok(sent) if sent == whole => return Ok(true),
            Ok(sent) => sent,
            Err(Errno::AGAIN | Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut rest = Vec::with_capacity(whole - sent);
        let mut skip = sent;
        for piece in pieces {
            let from = skip.min(piece.len());
            skip -= from;
            rest.extend_from_slice(&piece[from..]);
        }
        self.queue(rest, 0);
        Ok(false)
    }

    /// Reads what has arrived, without waiting: one syscall. Not while a read is armed.
    ///
    /// # Errors
    /// `WouldBlock` when there is nothing, or the connection is broken.
    pub fn try_recv(&self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::net::recv(self, into, RecvFlags::DONTWAIT)?.0)
    }

    /// Hands `buf[from..]` over to be written whole; [`Socket::poll_flush`] says when it was.
    /// Not while something is queued.
    pub fn queue(&mut self, buf: Vec<u8>, from: usize) {
        self.outbox.queue(buf, from);
    }

    /// Ready when nothing is queued: how the last write ended, and its buffer.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<(io::Result<()>, Vec<u8>)> {
        self.outbox.poll(cx)
    }

    /// Writes all of `buf`: directly what the kernel takes, the rest when it does.
    pub async fn send(&mut self, buf: Vec<u8>) -> (io::Result<()>, Vec<u8>) {
        let sent = match self.try_send(&buf) {
            Ok(sent) if sent == buf.len() => return (Ok(()), buf),
            Ok(sent) => sent,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return (Err(error), buf),
        };
        self.queue(buf, sent);
        std::future::poll_fn(|cx| self.poll_flush(cx)).await
    }

    /// How many sent bytes the peer's kernel has acknowledged since the connection began, also
    /// after it was reset. One syscall; `None` where the kernel does not say (before Linux 4.2).
    pub fn acked(&self) -> Option<u64> {
        // `struct tcp_info` of <linux/tcp.h>: `tcpi_bytes_acked` is the u64 at this offset.
        const BYTES_ACKED: usize = 120;
        let mut info = [0u8; BYTES_ACKED + 8];
        let mut len = libc::socklen_t::try_from(info.len()).ok()?;
        // SAFETY: the kernel writes at most `len` bytes to `info` and the number written to `len`;
        // both live through the call.
        let got = unsafe {
            libc::getsockopt(
                self.fd,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let whole = got == 0 && len as usize == info.len();
        let (_, tail) = info.split_at(BYTES_ACKED);
        whole.then(|| tail.try_into().map(u64::from_ne_bytes).ok()).flatten()
    }

    /// Says that no more will be sent; what was sent is still delivered.
    pub fn finish(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Write);
    }

    /// Ends both directions now: the peer learns of it at once, and a pending read ends.
    pub fn abort(&self) {
        let _ = rustix::net::shutdown(self, Shutdown::Both);
    }

    /// Ends the connection with a reset, for an answer that must not look whole. Lingering for no
    /// time would not do: the runtime says FIN before it closes.
    pub fn reset(&self) {
        let _ = rustix::net::connect_unspec(self);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `inbox` holds the stream that owns the descriptor for as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

/// The pending read of a socket: one long-lived future that reads again each time it is armed,
/// so that no read allocates and none has to be dropped.
struct Inbox {
    post: Rc<RefCell<Read>>,
    reader: Pin<Box<dyn Future<Output = ()>>>,
}

enum Read {
    Idle,
    Armed(Vec<u8>, usize),
    InFlight,
    Done(io::Result<usize>, Vec<u8>),
}

impl Inbox {
    fn new(mut stream: OwnedReadHalf<TcpStream>) -> Inbox {
        let post = Rc::new(RefCell::new(Read::Idle));
        let shared = post.clone();
        let reader = async move {
            loop {
                // Woken by nobody: whoever arms it polls it.
                let (buf, most) = std::future::poll_fn(|_| {
                    let mut post = shared.borrow_mut();
                    match std::mem::replace(&mut *post, Read::InFlight) {
                        Read::Armed(buf, most) => Poll::Ready((buf, most)),
                        other => {
                            *post = other;
                            Poll::Pending
                        }
                    }
                })
                .await;
                let start = buf.len();
                let (result, slice) = stream.read(buf.slice_mut(start..start + most)).await;
                *shared.borrow_mut() = Read::Done(result, slice.into_inner());
            }
        };
        Inbox { post, reader: Box::pin(reader) }
    }

    fn arm(&mut self, buf: Vec<u8>, most: usize) {
        debug_assert!(most > 0 && buf.capacity() - buf.len() >= most, "a read needs room");
        let before = std::mem::replace(&mut *self.post.borrow_mut(), Read::Armed(buf, most));
        debug_assert!(matches!(before, Read::Idle), "one read at a time");
    }

    /// Lets the reader go on, unless it has nothing to do or its last result is still here.
    fn advance(&mut self, cx: &mut Context<'_>) {
        let busy = matches!(&*self.post.borrow(), Read::Armed(..) | Read::InFlight);
        if busy {
            let _ = self.reader.as_mut().poll(cx);
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(io::Result<usize>, Vec<u8>)> {
        self.advance(cx);
        let mut post = self.post.borrow_mut();
        match std::mem::replace(&mut *post, Read::Idle) {
            Read::Done(result, buf) => Poll::Ready((result, buf)),
            other => {
                *post = other;
                Poll::Pending
            }
        }
    }
}

/// The pending write of a socket. Most writes go straight to the kernel and need none; the
/// future is made when the peer falls behind for the first time.
enum Outbox {
    Direct(Option<OwnedWriteHalf<TcpStream>>),
    Queued { post: Rc<RefCell<Write>>, writer: Pin<Box<dyn Future<Output = ()>>> },
}

enum Write {
    Idle,
    Queued(Vec<u8>, usize),
    InFlight,
    Done(io::Result<()>, Vec<u8>),
}

impl Outbox {
    fn queue(&mut self, buf: Vec<u8>, from: usize) {
        match self {
            Outbox::Queued { post, .. } => *post.borrow_mut() = Write::Queued(buf, from),
            Outbox::Direct(stream) => {
                let Some(mut stream) = stream.take() else { return };
                let post = Rc::new(RefCell::new(Write::Queued(buf, from)));
                let shared = post.clone();
                let writer = async move {
                    loop {
                        let (buf, from) = std::future::poll_fn(|_| {
                            let mut post = shared.borrow_mut();
                            match std::mem::replace(&mut *post, Write::InFlight) {
                                Write::Queued(buf, from) => Poll::Ready((buf, from)),
                                other => {
                                    *post = other;
                                    Poll::Pending
                                }
                            }
                        })
                        .await;
                        let (result, buf) = write_from(&mut stream, buf, from).await;
                        *shared.borrow_mut() = Write::Done(result, buf);
                    }
                };
                *self = Outbox::Queued { post, writer: Box::pin(writer) };
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(io::Result<()>, Vec<u8>)> {
        let Outbox::Queued { post, writer } = self else {
            return Poll::Ready((Ok(()), Vec::new()));
        };
        if !matches!(&*post.borrow(), Write::Idle) {
            let _ = writer.as_mut().poll(cx);
        }
        let mut post = post.borrow_mut();
        match std::mem::replace(&mut *post, Write::Idle) {
            Write::Done(result, buf) => Poll::Ready((result, buf)),
            Write::Idle => Poll::Ready((Ok(()), Vec::new())),
            other => {
                *post = other;
                Poll::Pending
            }
        }
    }
}

async fn write_from(
    stream: &mut OwnedWriteHalf<TcpStream>,
    mut buf: Vec<u8>,
    mut from: usize,
) -> (io::Result<()>, Vec<u8>) {
    while from < buf.len() {
        let (result, slice) = stream.write(buf.slice(from..)).await;
        buf = slice.into_inner();
        match result {
            Ok(0) => return (Err(io::ErrorKind::WriteZero.into()), buf),
            Ok(sent) => from += sent,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (Err(error), buf),
        }
    }
    (Ok(()), buf)
}

fn family(addr: SocketAddr) -> AddressFamily {
    if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}
