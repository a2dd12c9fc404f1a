//! The two sockets of a request, waited on together, and the connections of a shard.

use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::Shard;
use crate::client::{Beside, Body, Client};
use crate::pool::Conn;
use crate::pure::h1;
use crate::pure::plan::{HalfClose, Server};
use crate::rt;

/// A client and the backend that answers it.
pub struct Wires<'a> {
    pub client: &'a mut Client,
    pub conn: &'a mut Conn,
    shard: &'a Shard,
    half_close: HalfClose,
}

/// What happened next.
pub enum Wake {
    /// The backend has sent something, or has closed: to be read.
    Backend,
    /// The whole request has been handed to the kernel, or cannot be any more.
    Sent,
    /// The client has taken what was waiting for it.
    Flushed,
    Gone,
    /// The client's timer.
    Time,
    /// The process ends now.
    Stop,
}

impl<'a> Wires<'a> {
    pub fn new(
        shard: &'a Shard,
        client: &'a mut Client,
        conn: &'a mut Conn,
        half_close: HalfClose,
    ) -> Wires<'a> {
        Wires { client, conn, shard, half_close }
    }

    /// Part of the answer waits for the client to take it.
    pub fn flushing(&self) -> bool {
        self.client.socket.is_behind()
    }

    /// Part of the request is still on its way to the backend.
    pub fn sending(&self) -> bool {
        self.conn.socket.is_behind()
    }

    /// Waits for whatever comes first.
    pub async fn wake(&mut self) -> Wake {
        self.client.raise();
        std::future::poll_fn(|cx| self.poll_wake(cx)).await
    }

    /// What comes first.
    pub fn poll_wake(&mut self, cx: &mut Context<'_>) -> Poll<Wake> {
        if self.client.socket.is_broken() {
            return Poll::Ready(Wake::Gone);
        }
        if self.flushing() {
            // Back-pressure: the backend is not read while the client does not take what came.
            if let Poll::Ready(flushed) = self.client.socket.poll_flush(cx) {
                return Poll::Ready(if flushed.is_ok() { Wake::Flushed } else { Wake::Gone });
            }
        } else if self.conn.socket.poll_readable(cx).is_ready() {
            return Poll::Ready(Wake::Backend);
        }
        if self.sending()
            && let Poll::Ready(sent) = self.conn.socket.poll_flush(cx)
        {
            // It may have answered early and closed: what it said is still to be read.
            self.conn.spoiled |= sent.is_err();
            return Poll::Ready(Wake::Sent);
        }
        if self.shard.stopping.get() {
            return Poll::Ready(Wake::Stop);
        }
        self.client.poll_beside(self.half_close, cx).map(|beside| match beside {
            Beside::Gone => Wake::Gone,
            Beside::Time => Wake::Time,
        })
    }

    /// Tells the client that we are still here, in a way that every parser skips.
    pub fn beat(&mut self) {
        if !self.flushing() {
            let mut out = Vec::with_capacity(32);
            h1::append_chunk(&mut out, b": ping\n");
            self.client.tell(&out);
        }
    }

    /// Waits until the client has taken everything; false if it leaves or takes longer than
    /// `limit`.
    pub async fn flushed(&mut self, limit: Duration) -> bool {
        let deadline = self.client.behind_since + limit;
        self.client.set_timer(self.flushing().then_some(deadline));
        !self.client.socket.is_broken()
            && std::future::poll_fn(|cx| {
                if !self.flushing() {
                    return Poll::Ready(true);
                }
                if let Poll::Ready(flushed) = self.client.socket.poll_flush(cx) {
                    return Poll::Ready(flushed.is_ok());
                }
                self.client.poll_timer(cx).map(|()| false)
            })
            .await
    }
}

/// What happened while a body passes from the client to the backend.
pub enum Upload {
    /// The backend has taken what was queued for it.
    Went,
    /// The client has sent more.
    Came,
    /// The backend has begun to answer, or has closed.
    Answered,
    Gone,
    /// The client sends too slowly, or the backend takes too slowly.
    Slow,
}

impl Wires<'_> {
    /// Waits for whatever comes first while a body passes.
    pub async fn wake_uploading(&mut self, body: &Body, server: &Server) -> Upload {
        self.client.set_timer(match self.sending() {
            true => Some(rt::now() + server.send_timeout),
            false => body.deadline(server),
        });
        self.client.raise();
        std::future::poll_fn(|cx| {
            if self.sending() {
                if let Poll::Ready(sent) = self.conn.socket.poll_flush(cx) {
                    self.conn.spoiled |= sent.is_err();
                    return Poll::Ready(Upload::Went);
                }
            } else if let Poll::Ready(read) = self.client.poll_body(cx) {
                return Poll::Ready(match read {
                    Ok(1..) => Upload::Came,
                    _ => Upload::Gone,
                });
            }
            if self.conn.socket.poll_readable(cx).is_ready() {
                return Poll::Ready(Upload::Answered);
            }
            if self.shard.stopping.get() {
                return Poll::Ready(Upload::Gone);
            }
            self.client.poll_timer(cx).map(|()| Upload::Slow)
        })
        .await
    }
}

/// The tasks of a shard's connections, to be woken when the shard drains.
#[derive(Default)]
pub struct Wakers {
    seats: Vec<Option<Waker>>,
    free: Vec<usize>,
}

impl Wakers {
    pub fn wake_all(&self) {
        self.seats.iter().flatten().for_each(Waker::wake_by_ref);
    }

    pub fn is_empty(&self) -> bool {
        self.seats.len() == self.free.len()
    }
}

/// A connection's place among those of its shard, left on drop.
pub struct Seat {
    shard: Rc<Shard>,
    index: usize,
}

impl Seat {
    pub async fn take(shard: &Rc<Shard>, client: &mut Client) -> Seat {
        let waker = std::future::poll_fn(|cx| {
            client.begin(cx);
            Poll::Ready(cx.waker().clone())
        })
        .await;
        shard.meter.borrow_mut().connection_opened();
        let mut wakers = shard.connections.borrow_mut();
        let index = match wakers.free.pop() {
            Some(index) => index,
            None => {
                wakers.seats.push(None);
                wakers.seats.len() - 1
            }
        };
        wakers.seats[index] = Some(waker);
        Seat { shard: Rc::clone(shard), index }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut wakers = self.shard.connections.borrow_mut();
        wakers.seats[self.index] = None;
        wakers.free.push(self.index);
        self.shard.meter.borrow_mut().connection_closed();
    }
}

/// Waits until the client has taken what is queued for it, at most `limit`.
pub async fn flush(client: &mut Client, limit: Duration) {
    client.set_timer(Some(rt::now() + limit));
    std::future::poll_fn(|cx| {
        if client.socket.poll_flush(cx).is_ready() {
            return Poll::Ready(());
        }
        client.poll_timer(cx)
    })
    .await;
}
