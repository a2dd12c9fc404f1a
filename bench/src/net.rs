//! Sockets and epoll, as the generator and the mock use them.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use rustix::event::{Timespec, epoll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

/// A thousand clients may connect at once; `std` listens with a shorter queue.
const BACKLOG: i32 = 4096;

/// A non-blocking listener on `addr`.
///
/// # Errors
/// The address is taken or not this machine's.
pub fn listen(addr: SocketAddr) -> io::Result<TcpListener> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let sock = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&sock, true)?;
    rustix::net::bind(&sock, &addr)?;
    rustix::net::listen(&sock, BACKLOG)?;
    Ok(TcpListener::from(sock))
}

/// Waits for events, at most `wait_ns` nanoseconds; `None` waits for ever. A signal ends the wait
/// early with no event.
///
/// # Errors
/// The kernel has no `epoll_pwait2` (before 5.11).
pub fn wait(
    poll: &OwnedFd,
    events: &mut Vec<epoll::Event>,
    wait_ns: Option<u64>,
) -> io::Result<()> {
    let timeout = wait_ns.map(|ns| {
        Timespec::try_from(Duration::from_nanos(ns)).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
    });
    match epoll::wait(poll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// The index of a connection that was given to epoll as its data.
pub fn index(event: epoll::Event) -> usize {
    // It was a `usize` when it went in.
    usize::try_from(event.data.u64()).unwrap_or(usize::MAX)
}

/// A loopback port that was free a moment ago.
///
/// # Errors
/// No port is left.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}
