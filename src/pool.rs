//! A shard's backend connections: taken, given back, closed.
//!
//! An idle connection is watched. A backend that closes it (uvicorn does after 5 s) makes it
//! readable, so a dead connection is seen before it is used and costs no extra syscall; only a
//! close that is still on its way can hit a request, and that one is sent again (see
//! `shard::attempt`).

use std::collections::{HashMap, VecDeque};
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::task::{Context, Waker};
use std::time::Duration;

use crate::pure::h1;
use crate::pure::plan::{Backend, Host, Pool as PoolPlan};
use crate::pure::units::Instant;
use crate::rt::Socket;

/// What control resolved: addresses of the backends that are given by name.
pub type Addresses = HashMap<Box<str>, Vec<IpAddr>>;

/// Room for the head of an answer to begin with: as a rule all of a small answer.
const HEAD_READ: usize = 2 * 1024;
/// An answer behind its head is read in pieces of at most this size.
pub const READ: usize = 64 * 1024;

/// How long a connection rests whose backend may be about to close it against its promise.
const REST: Duration = Duration::from_millis(10);
/// A close this soon behind an answer is no idle limit.
const HASTE: Duration = Duration::from_secs(1);

/// One connection to a backend. On the heap from its making to its end: it passes from hand to hand
/// with every request.
pub struct Conn {
    pub socket: Socket,
    /// The head of the answer, and what came along with it.
    pub buf: Vec<u8>,
    /// The head of the answer, when it has been read.
    pub head: h1::Response,
    /// It has served a request before: the backend may have closed it meanwhile.
    pub reused: bool,
    /// It must not serve another request: bytes are missing or too many were there.
    pub spoiled: bool,
    /// Its last answer was a stream or an error, behind which llama.cpp closes although it promises
    /// to keep alive. Where that was seen, such a connection rests before it is used again.
    pub rests: bool,
    /// Bytes sent before the current request, each of them acknowledged: it was answered.
    sent_before: u64,
    /// Bytes sent.
    sent: u64,
    /// What the kernel calls no byte acknowledged.
    acked_none: Option<u64>,
}

impl Conn {
    /// Connects to `backend` within `limit`, over all of its addresses.
    ///
    /// # Errors
    /// As [`Socket::connect`]; `NotFound` when its name has not been resolved.
    pub async fn open(
        backend: &Backend,
        addresses: &Addresses,
        limit: Duration,
    ) -> io::Result<Box<Conn>> {
        let socket = match &backend.host {
            Host::Ip(ip) => Socket::connect(SocketAddr::new(*ip, backend.port), limit).await?,
            Host::Name(name) => {
                let list = addresses.get(name).map(Vec::as_slice).unwrap_or_default();
                let share = limit / u32::try_from(list.len().max(1)).unwrap_or(1);
                let mut last = Err(io::ErrorKind::NotFound.into());
                for &ip in list {
                    last = Socket::connect(SocketAddr::new(ip, backend.port), share).await;
                    if last.is_ok() {
                        break;
                    }
                }
                last?
            }
        };
        let acked_none = socket.acked();
        Ok(Box::new(Conn {
            socket,
            buf: Vec::new(),
            head: h1::Response::default(),
            reused: false,
            spoiled: false,
            rests: false,
            sent_before: 0,
            sent: 0,
            acked_none,
        }))
    }

    /// Sends a request whole: what the kernel does not take at once is queued. True if nothing had
    /// to be.
    ///
    /// # Errors
    /// The connection is broken.
    pub fn request(&mut self, pieces: &[IoSlice<'_>]) -> io::Result<bool> {
        self.sent_before = self.sent;
        // A usize fits a u64 on the 64-bit targets we build for.
        self.sent += pieces.iter().map(|piece| piece.len() as u64).sum::<u64>();
        self.socket.send_pieces(pieces)
    }

    /// Whether the backend's kernel has taken bytes of the current request, so that the backend
    /// may have read them. True where that cannot be known. One syscall, also after a reset.
    pub fn was_heard(&self) -> bool {
        match (self.acked_none, self.socket.acked()) {
            (Some(none), Some(acked)) => acked > none + self.sent_before,
            _ => true,
        }
    }

    /// More of an answer's head, once the socket is readable: bytes appended to `buf`, 0 at the
    /// end, `None` if there is nothing after all.
    pub fn read_head(&mut self) -> Option<io::Result<usize>> {
        let most = self.buf.len().max(HEAD_READ);
        self.socket.recv(&mut self.buf, most)
    }

    /// Whether nothing has come, neither bytes nor a close. Afterwards the kernel watches for it.
    fn is_quiet(&mut self) -> bool {
        self.socket.poll_readable(&mut Context::from_waker(Waker::noop())).is_pending()
    }
}

/// Idle connections of one shard.
#[derive(Default)]
pub struct Pool {
    /// By backend series, which outlives reloads.
    lanes: Vec<Lane>,
}

/// Idle connections to one backend, the longest idle first.
#[derive(Default)]
struct Lane {
    /// Where they lead. A reload may point the same name elsewhere.
    to: Option<(Host, u16)>,
    idle: VecDeque<(Instant, Box<Conn>)>,
    idle_for: Duration,
    /// It has closed connections right behind an answer, although it had promised not to.
    hasty: bool,
}

impl Pool {
    /// The connection to `backend` that was used last, if one is idle and still open. No syscall,
    /// except behind a stream or an error.
    pub fn take(&mut self, backend: &Backend, now: Instant) -> Option<Box<Conn>> {
        let lane = self.lanes.get_mut(backend.series.index())?;
        if !lane.leads_to(backend) {
            lane.idle.clear();
            return None;
        }
        let hasty = lane.hasty;
        let rested = |(since, conn): &(Instant, Box<Conn>)| {
            !hasty || !conn.rests || now.since(*since) >= REST
        };
        while let Some(index) = lane.idle.iter().rposition(rested) {
            let (since, mut conn) = lane.idle.remove(index)?;
            let fresh = now.since(since) < lane.idle_for;
            // What stirs is a close, or bytes that nobody asked for. A close that came in this very
            // turn of the shard is not reported yet: where one is likely, the kernel is asked.
            let quiet = conn.is_quiet() && !(conn.rests && conn.socket.has_stirred());
            if fresh && quiet {
                conn.reused = true;
                return Some(conn);
            }
            lane.hasty |= !quiet && now.since(since) < HASTE;
        }
        None
    }

    /// Keeps `conn` for later. The caller has read one whole answer from it and nothing beyond,
    /// and both sides want to go on. `share` is how many this shard may keep for the backend;
    /// with that many idle the oldest is closed.
    pub fn put(
        &mut self,
        backend: &Backend,
        pool: &PoolPlan,
        share: usize,
        mut conn: Box<Conn>,
        now: Instant,
    ) {
        if share == 0 || pool.idle_for.is_zero() {
            return;
        }
        let series = backend.series.index();
        if self.lanes.len() <= series {
            self.lanes.resize_with(series + 1, Lane::default);
        }
        let lane = &mut self.lanes[series];
        if !lane.leads_to(backend) {
            lane.idle.clear();
            lane.to = Some((backend.host.clone(), backend.port));
        }
        lane.idle_for = pool.idle_for;
        while lane.idle.len() >= share {
            lane.idle.pop_front();
        }
        if conn.buf.capacity() > 2 * HEAD_READ {
            conn.buf = Vec::new();
        }
        conn.buf.clear();
        if conn.is_quiet() {
            lane.idle.push_back((now, conn));
        }
    }

    /// Closes what has been idle for too long and what the backend has closed. Called every tick;
    /// costs one poll for each idle connection.
    pub fn reap(&mut self, now: Instant) {
        for lane in &mut self.lanes {
            let idle_for = lane.idle_for;
            let hasty = &mut lane.hasty;
            lane.idle.retain_mut(|(since, conn)| {
                let quiet = conn.is_quiet();
                *hasty |= !quiet && now.since(*since) < HASTE;
                quiet && now.since(*since) < idle_for
            });
        }
    }

    /// Idle connections now.
    pub fn idle(&self) -> usize {
        self.lanes.iter().map(|lane| lane.idle.len()).sum()
    }
}

impl Lane {
    fn leads_to(&self, backend: &Backend) -> bool {
        self.to.as_ref().is_some_and(|(host, port)| *host == backend.host && *port == backend.port)
    }
}
