//! What is known of an answer while it passes.

use std::rc::Rc;
use std::time::Duration;

use super::limits::Stand;
use super::trip::Trip;
use super::{Call, Failed, Place, PlanRef, Shard, earlier};
use crate::client::Client;
use crate::pool::Conn;
use crate::pure::fields::Known;
use crate::pure::relay::Relay;
use crate::pure::units::{BackendId, Instant, Series};
use crate::rt;

/// An answer on its way. The first line of the cache is what each chunk needs beside the relay, which
/// has its own such part first; the rest is for what is rare.
#[repr(C, align(64))]
pub struct Flow {
    pub shard: Rc<Shard>,
    pub plan: PlanRef,
    pub conn: Box<Conn>,
    /// When the last content came; while the client did not take it, time stood still.
    pub last: Instant,
    /// Body bytes so far.
    pub bytes: u64,
    pub route: Series,
    pub backend: BackendId,
    pub streamed: bool,
    /// What came along with the head has been passed on.
    pub opened: bool,
    /// Something generated has come.
    pub begun: bool,
    /// Until something counts, a route with retries can still turn to another backend: what the
    /// client would see is held in `client.out`, its first `head_len` bytes being the head.
    pub held: bool,
    /// The client has been told what was held.
    pub told: bool,
    /// The client's timer is set to the earliest of what is waited for, or earlier.
    pub armed: bool,
    /// Each chunk pays for itself, or puts a heartbeat off.
    pub attended: bool,
    pub relay: Relay,
    pub clocks: Clocks,
    /// How many tokens of it the budget is known to pay for, where it cuts.
    pub paid: Option<u64>,
    pub head_len: usize,
    pub place: Place,
}

/// What an answer is waited for.
pub struct Clocks {
    /// When the first content must have come.
    pub first: Option<Instant>,
    /// How long the backend may be silent then.
    pub chunk: Option<Duration>,
    /// When all of it must have come.
    pub total: Option<Instant>,
    /// How often and when next a silent stream is kept awake.
    pub beat: Option<(Duration, Instant)>,
}

impl Clocks {
    /// When the backend must have gone on, whose last content came at `last`.
    pub fn deadline(&self, last: Option<Instant>) -> Option<Instant> {
        let next = match last {
            Some(last) => self.chunk.map(|chunk| last + chunk),
            None => self.first,
        };
        earlier(next, self.total)
    }

    /// When there is something to do although nothing has come.
    pub fn next(&self, last: Option<Instant>) -> Option<Instant> {
        earlier(self.deadline(last), self.beat.map(|(_, at)| at))
    }
}

impl Flow {
    /// Begins to relay, by the head of the answer.
    pub fn open(
        trip: &mut Trip,
        client: &mut Client,
        call: &Call,
        place: Place,
        mut conn: Box<Conn>,
    ) -> Result<Box<Flow>, Failed> {
        let backend = place.ticket.backend;
        let streamed = is_event_stream(&conn);
        let relay = trip.open(client, &mut conn, call, backend, streamed)?;
        let now = rt::now();
        let timeouts = &trip.plan.pools[trip.plan.backends[backend.index()].pool.index()].timeouts;
        let beat = trip.heartbeat(call).filter(|_| streamed).map(|every| (every, now + every));
        let paid = trip.stand.as_ref().and_then(Stand::paid).filter(|_| streamed);
        Ok(Box::new(Flow {
            shard: trip.shard.clone(),
            plan: trip.plan.clone(),
            conn,
            last: now,
            bytes: 0,
            route: trip.done.route,
            backend,
            streamed,
            opened: false,
            begun: false,
            held: streamed && trip.may_try_again(call),
            told: false,
            armed: false,
            attended: beat.is_some() || paid.is_some(),
            relay,
            clocks: Clocks {
                first: match streamed {
                    true => trip.head_deadline(call, timeouts),
                    false => timeouts.chunk.map(|chunk| now + chunk),
                },
                chunk: timeouts.chunk,
                total: timeouts.total.map(|total| trip.began + total),
                beat,
            },
            paid,
            head_len: client.out.len(),
            place,
        }))
    }
}

fn is_event_stream(conn: &Conn) -> bool {
    let kind = conn.head.field(&conn.buf, Known::ContentType).unwrap_or_default();
    kind.get(..17).is_some_and(|kind| kind.eq_ignore_ascii_case(b"text/event-stream"))
}
