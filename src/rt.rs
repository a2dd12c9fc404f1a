//! The only file that names the runtime: everything above it sees shards, sockets, timers and
//! [`Instant`]s, so that the runtime can be replaced by editing this file alone.
//!
//! monoio 0.2.4 on io_uring, or on epoll where io_uring is denied. What it demands is kept here:
//!
//! - Only readiness is ever in flight. Reading, writing and accepting wait for it and then call the
//!   kernel themselves: a cancelled poll leaks no descriptor and loses no byte, a stream that waits
//!   holds no buffer, and what arrives lands in memory that the shard has just used.
//! - A panic in a task would unwind the whole shard: [`spawn`] contains it.
//! - Connecting takes a socket address. A name would resolve in line and block the shard.

use std::cell::Cell;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use monoio::net::TcpStream;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, SocketFlags, SocketType,
    sockopt,
};

use crate::pure::units::Instant;

mod timers;

pub use timers::Timer;

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
    let main = async {
        spawn(watch(Bell::of(&timers::begin()?)?));
        Ok(main.await)
    };
    match driver.ring() {
        Some(ring) => monoio::RuntimeBuilder::<monoio::IoUringDriver>::new()
            .uring_builder(ring)
            .with_entries(RING_ENTRIES)
            .build()?
            .block_on(main),
        None => monoio::RuntimeBuilder::<monoio::LegacyDriver>::new().build()?.block_on(main),
    }
}

/// `CLOCK_MONOTONIC`: the same clock for every process of the machine.
///
/// Within one turn of a task, from its being woken to its next wait, it is read once and stands: a
/// request asks ten times, at 25 ns each, and what happens in one turn happens at one time.
pub fn now() -> Instant {
    match TURN.get() {
        Turn::None => clock(),
        Turn::Begun => {
            let now = clock();
            TURN.set(Turn::At(now));
            now
        }
        Turn::At(now) => now,
    }
}

/// What the running task knows of the time.
#[derive(Clone, Copy)]
enum Turn {
    /// No task runs.
    None,
    /// It has not asked yet.
    Begun,
    At(Instant),
}

thread_local! {
    static TURN: Cell<Turn> = const { Cell::new(Turn::None) };
}

/// The same clock, read now: for how long something took that began and ended in one turn.
pub fn clock() -> Instant {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Monotonic time starts at boot: both fields are non-negative and 584 years fit in 64 bits.
    Instant::from_nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Panics contained since the process started. Each one is a bug that cost one connection.
pub static PANICS: AtomicU64 = AtomicU64::new(0);

/// Runs `task` on this shard. A panic in it ends that task alone.
pub fn spawn(task: impl Future<Output = ()> + 'static) {
    drop(monoio::spawn(Contained { task: Some(task) }));
}

pin_project_lite::pin_project! {
    struct Contained<F> {
        #[pin]
        task: Option<F>,
    }
}

impl<F: Future<Output = ()>> Future for Contained<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut contained = self.project().task;
        let Some(task) = contained.as_mut().as_pin_mut() else {
            return Poll::Ready(());
        };
        TURN.set(Turn::Begun);
        let poll = match catch_unwind(AssertUnwindSafe(|| task.poll(cx))) {
            Ok(poll) => poll,
            Err(_) => {
                PANICS.fetch_add(1, Ordering::Relaxed);
                // Dropping what is left of the task may panic as well: contain that, too.
                let _ = catch_unwind(AssertUnwindSafe(|| contained.set(None)));
                Poll::Ready(())
            }
        };
        TURN.set(Turn::None);
        poll
    }
}

/// Ends when `span` has passed, never early.
pub async fn sleep(span: Duration) {
    let mut timer = Timer::new();
    timer.set(Some(now() + span));
    std::future::poll_fn(|cx| timer.poll(cx)).await;
}

/// Rings the shard's timers for as long as it runs.
async fn watch(alarm: Bell) {
    while alarm.rung().await.is_ok() {
        timers::ring();
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
            match rustix::net::acceptfrom_with(self.fd(), ACCEPTED) {
                Ok((socket, Some(peer))) => {
                    let peer = peer.try_into()?;
                    let stream = TcpStream::from_std(std::net::TcpStream::from(socket));
                    if let Ok(socket) = stream.and_then(Socket::new) {
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
                    sleep(BACK_OFF).await
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

/// How long a shard that is out of descriptors waits until it tries again.
const BACK_OFF: Duration = Duration::from_millis(50);

const ACCEPTED: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

fn again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(error),
    }
}

/// What wakes a shard from another thread: [`ring`] rings it, a [`Bell`] on the shard hears it.
///
/// # Errors
/// The process is out of descriptors.
pub fn bell() -> io::Result<OwnedFd> {
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

/// Rings a bell; one that rings already goes on ringing. One syscall, from any thread.
pub fn ring(bell: &OwnedFd) {
    // It fails only where 2^64 rings were not heard.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// A bell, or the kernel's alarm, as its shard hears it.
pub struct Bell {
    /// Only asked for readiness; a stream type because that is what the runtime lets us poll.
    readiness: TcpStream,
}

impl Bell {
    /// # Errors
    /// The process is out of descriptors.
    pub fn of(bell: &OwnedFd) -> io::Result<Bell> {
        let own = std::net::TcpStream::from(bell.try_clone()?);
        Ok(Bell { readiness: TcpStream::from_std(own)? })
    }

    /// Ends when it has been rung since the last time.
    ///
    /// # Errors
    /// The kernel refuses to watch it.
    pub async fn rung(&self) -> io::Result<()> {
        // SAFETY: `readiness` owns the descriptor and lives as long as `self`.
        let fd = unsafe { BorrowedFd::borrow_raw(self.readiness.as_raw_fd()) };
        loop {
            match rustix::io::read(fd, &mut [0; 8]) {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR) => {
                    self.readiness.readable(false).await.or_else(again)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
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

/// One TCP connection. What every read and write needs comes first, so that it lies on one cache line:
/// most connections are cold when it is their turn.
#[repr(C)]
pub struct Socket {
    /// Open as long as `readable` lives.
    fd: RawFd,
    /// Nothing has come since the last read, as far as we know.
    drained: bool,
    /// Something is queued.
    behind: bool,
    /// The peer's window is full, as far as we know.
    stuffed: bool,
    /// A write has failed.
    broken: bool,
    readable: Readiness,
    queued: Vec<u8>,
    /// How much of `queued` has been written.
    written: usize,
    /// Made when the peer falls behind for the first time, of a second descriptor.
    writable: Option<Readiness>,
    /// While there is none to be had.
    pause: Option<Box<Timer>>,
}

impl Socket {
    fn new(stream: TcpStream) -> io::Result<Socket> {
        stream.set_nodelay(true)?;
        let fd = stream.as_raw_fd();
        Ok(Socket {
            fd,
            drained: true,
            behind: false,
            stuffed: false,
            broken: false,
            readable: Readiness::read(stream),
            queued: Vec::new(),
            written: 0,
            writable: None,
            pause: None,
        })
    }

    /// Connects to `addr` within `limit`.
    ///
    /// # Errors
    /// `TimedOut`, or the kernel's word: refused, unreachable, out of descriptors.
    pub async fn connect(addr: SocketAddr, limit: Duration) -> io::Result<Socket> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family(addr), SocketType::STREAM, flags, None)?;
        let connecting = rustix::net::connect(&socket, &addr);
        let stream = TcpStream::from_std(std::net::TcpStream::from(socket))?;
        match connecting {
            Ok(()) => {}
            Err(Errno::INPROGRESS) => {
                let mut timer = Timer::new();
                timer.set(Some(now() + limit));
                let mut writable = std::pin::pin!(stream.writable(false));
                std::future::poll_fn(|cx| {
                    if let Poll::Ready(writable) = writable.as_mut().poll(cx) {
                        return Poll::Ready(Some(writable));
                    }
                    timer.poll(cx).map(|()| None)
                })
                .await
                .ok_or(io::ErrorKind::TimedOut)??;
                // SAFETY: `stream` owns the descriptor and outlives the borrow.
                let fd = unsafe { BorrowedFd::borrow_raw(stream.as_raw_fd()) };
                sockopt::socket_error(fd)??;
            }
            Err(error) => return Err(error.into()),
        }
        Socket::new(stream)
    }

    /// Ready when there is something to read: bytes, the peer's end, or an error. It stays ready
    /// until [`Socket::poll_recv`] has taken what there was.
    pub fn poll_readable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.drained {
            std::task::ready!(self.readable.poll(cx));
            self.drained = false;
        }
        Poll::Ready(())
    }

    /// Appends what has come to `buf`, at most `most` bytes; room is made only then. How many
    /// bytes; 0 = the peer has finished sending. Each read waits for its own turn of the shard, so
    /// that a peer that never pauses starves nobody.
    pub fn poll_recv(
        &mut self,
        cx: &mut Context<'_>,
        buf: &mut Vec<u8>,
        most: usize,
    ) -> Poll<io::Result<usize>> {
        debug_assert!(most > 0, "a read needs room");
        loop {
            std::task::ready!(self.poll_readable(cx));
            if let Some(read) = self.recv(buf, most) {
                return Poll::Ready(read);
            }
        }
    }

    /// [`Socket::poll_recv`] once [`Socket::poll_readable`] was ready; `None` if there is nothing
    /// after all.
    pub fn recv(&mut self, buf: &mut Vec<u8>, most: usize) -> Option<io::Result<usize>> {
        if buf.capacity() - buf.len() < most {
            buf.reserve(most);
        }
        let held = buf.len();
        let spare = &mut buf.spare_capacity_mut()[..most];
        let read = loop {
            match rustix::net::recv(&*self, &mut *spare, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                read => break read,
            }
        };
        self.drained = true;
        match read {
            Ok((_, 0)) => Some(Ok(0)),
            Err(Errno::AGAIN) => None,
            Err(error) => Some(Err(error.into())),
            Ok((_, received)) => {
                // SAFETY: the kernel has written `received` bytes to the room behind `buf`'s end.
                unsafe { buf.set_len(held + received) };
                Some(Ok(received))
            }
        }
    }

    /// Writes what the kernel takes at once: one syscall.
    ///
    /// # Errors
    /// `WouldBlock` when its buffer is full, or the connection is broken.
    pub fn try_send(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)?)
    }

    /// Writes pieces one after the other: in one syscall what the kernel takes at once; a copy of
    /// the rest is queued, behind what is queued already. True if nothing had to be.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn send_pieces(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<bool> {
        if self.behind {
            pieces.iter().for_each(|piece| self.queued.extend_from_slice(piece));
            return Ok(false);
        }
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
            Err(error) => {
                self.broken = true;
                return Err(error.into());
            }
        };
        let mut rest = Vec::with_capacity(whole - sent);
        let mut skip = sent;
        for piece in pieces {
            let from = skip.min(piece.len());
            skip -= from;
            rest.extend_from_slice(&piece[from..]);
        }
        self.queue(rest);
        Ok(false)
    }

    /// Whether the peer has finished sending or sent something, by asking the kernel: one syscall.
    pub fn has_stirred(&self) -> bool {
        let peeked = rustix::net::recv(self, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK);
        !matches!(peeked, Err(Errno::AGAIN))
    }

    /// Hands `buf` over to be written whole; [`Socket::poll_flush`] says when it was. Not while
    /// something is queued.
    pub fn queue(&mut self, buf: Vec<u8>) {
        self.behind = !buf.is_empty();
        self.queued = buf;
        self.written = 0;
        self.stuffed = true;
    }

    /// Whether something is queued: the peer does not take what it is sent.
    pub fn is_behind(&self) -> bool {
        self.behind
    }

    /// Whether a write has failed: the peer will never have what it was sent.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Ready when nothing is queued any more: how the last write ended.
    pub fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.behind {
            return Poll::Ready(Ok(()));
        }
        while self.written < self.queued.len() {
            if self.stuffed {
                match self.writable() {
                    Ok(writable) => std::task::ready!(writable.poll(cx)),
                    // Out of descriptors: streams that run live on, and try without being told.
                    Err(_) => {
                        let pause = self.pause.get_or_insert_with(|| {
                            let mut timer = Box::new(Timer::new());
                            timer.set(Some(now() + BACK_OFF));
                            timer
                        });
                        std::task::ready!(pause.poll(cx));
                        self.pause = None;
                    }
                }
                self.stuffed = false;
            }
            match self.try_send(&self.queued[self.written..]) {
                Ok(sent) => self.written += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.stuffed = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.give_up();
                    return Poll::Ready(Err(error));
                }
            }
        }
        self.behind = false;
        self.queued = Vec::new();
        Poll::Ready(Ok(()))
    }

    fn writable(&mut self) -> io::Result<&mut Readiness> {
        let writable = match self.writable.take() {
            Some(writable) => writable,
            None => {
                let own = std::net::TcpStream::from(self.as_fd().try_clone_to_owned()?);
                Readiness::write(TcpStream::from_std(own)?)
            }
        };
        Ok(self.writable.insert(writable))
    }

    /// What is queued will never be written.
    fn give_up(&mut self) {
        self.broken = true;
        self.behind = false;
        self.queued = Vec::new();
    }

    /// Writes all of `bytes`: directly what the kernel takes, a copy of the rest when it does.
    ///
    /// # Errors
    /// The connection is broken.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send_pieces(&[IoSlice::new(bytes)])?;
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

    /// Ends the connection with a reset, for an answer that must not look whole.
    pub fn reset(&self) {
        let _ = rustix::net::connect_unspec(self);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: `readable` holds the stream that owns the descriptor for as long as `self` lives.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }
}

/// The question whether a socket can be read or written: one long-lived future that owns the
/// runtime's handle and asks again each time it was answered, so that asking allocates nothing.
struct Readiness(Pin<Box<dyn Future<Output = ()>>>);

thread_local! {
    /// What the readiness that has just been polled found.
    static STIRRED: Cell<bool> = const { Cell::new(false) };
}

impl Readiness {
    fn read(stream: TcpStream) -> Readiness {
        Readiness(Box::pin(async move {
            loop {
                // An error shows when the socket is read.
                let _ = stream.readable(false).await;
                STIRRED.set(true);
                breathe().await;
            }
        }))
    }

    fn write(stream: TcpStream) -> Readiness {
        Readiness(Box::pin(async move {
            loop {
                let _ = stream.writable(false).await;
                STIRRED.set(true);
                breathe().await;
            }
        }))
    }

    /// Ready once for each answer; the next poll asks again.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let _ = self.0.as_mut().poll(cx);
        if STIRRED.take() { Poll::Ready(()) } else { Poll::Pending }
    }
}

/// Pending once, woken by nobody.
async fn breathe() {
    let mut first = true;
    std::future::poll_fn(|_| match std::mem::take(&mut first) {
        true => Poll::Pending,
        false => Poll::Ready(()),
    })
    .await;
}

fn family(addr: SocketAddr) -> AddressFamily {
    if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}
