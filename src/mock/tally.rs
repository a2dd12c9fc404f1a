//! What a mock backend has seen and done, for tests to compare with what the gateway says.
//!
//! One lock, held for nanoseconds, by the mock's thread at the start, the first token and the end
//! of a request, and by whoever asks. This is a test's backend, not a shard.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::pure::units::Instant;

/// The tally of one mock backend: a handle, cheap to clone, usable from any thread, and still
/// readable after the mock has stopped.
#[derive(Clone, Debug)]
pub struct Counters(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    tally: Mutex<Tally>,
    changed: Condvar,
}

/// The numbers at one moment. Requests are those to models; probes are `/health`, `/metrics`,
/// `GET /v1/models` and their like, which a gateway asks for by itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub connections: u64,
    pub connections_open: u64,
    pub requests: u64,
    pub probes: u64,
    /// Head read and neither answered whole, nor left by the client, nor cut by a fault.
    pub in_flight: u64,
    pub in_flight_max: u64,
    /// Of `in_flight`, those that wait for a slot.
    pub waiting: u64,
    pub complete: u64,
    /// Requests whose client left before the end.
    pub aborted: u64,
    /// Requests that a fault of the script cut short.
    pub cut: u64,
    /// What was not HTTP as we accept it.
    pub refused: u64,
    /// Tokens of all requests to models, whatever was claimed in `usage`.
    pub prompt_tokens: u64,
    /// Tokens that were written, also those of answers that were not finished.
    pub completion_tokens: u64,
}

/// One request to a model, as it came and as it went.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Counts from 1, in the order in which heads arrived.
    pub number: u64,
    /// Counts from 1; two requests with the same number came over one connection.
    pub connection: u64,
    /// The head as it was on the wire, empty line included.
    pub head: Vec<u8>,
    pub method: String,
    pub target: String,
    /// Without the chunked coding. Cut off at [`BODY_KEPT_MAX`]; `body_bytes` is the whole size.
    pub body: Vec<u8>,
    pub body_bytes: u64,
    /// The `model` of the request, when it had one.
    pub model: String,
    pub status: u16,
    /// When the head had arrived, when the first content was written, when it was over.
    pub started: Instant,
    pub first_token: Option<Instant>,
    pub ended: Option<Instant>,
    pub outcome: Outcome,
    pub truth: Truth,
}

impl Seen {
    /// The value of the first field of this name, in any case.
    pub fn field(&self, name: &str) -> Option<&str> {
        // Line by line: a value of other bytes than UTF-8 must not hide its neighbours.
        self.head.split(|&byte| byte == b'\n').skip(1).find_map(|line| {
            let (field, value) = std::str::from_utf8(line).ok()?.split_once(':')?;
            field.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// The body as JSON, `null` if it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// What was really asked and generated: the numbers a right bill is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Truth {
    pub prompt_tokens: u64,
    /// Of all choices together, reasoning and tool calls included; as far as it was written.
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    pub reasoning_tokens: u64,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Running,
    /// Everything was handed to the kernel.
    Complete,
    /// The client closed or reset before the end; noticed at `ended`.
    ClientGone,
    /// A fault of the script ended it.
    Cut,
    /// The mock was stopped.
    Stopped,
}

#[derive(Debug)]
struct Tally {
    totals: Totals,
    seen: VecDeque<Seen>,
    /// Bytes of all heads and bodies in `seen`.
    bytes: usize,
    requests_max: usize,
    bytes_max: usize,
    /// Changes so far, for those who wait.
    version: u64,
}

/// More of one body is not remembered.
pub const BODY_KEPT_MAX: usize = 16 << 20;

impl Counters {
    pub(super) fn new(requests_max: usize, bytes_max: usize) -> Counters {
        let tally = Tally {
            totals: Totals::default(),
            seen: VecDeque::new(),
            bytes: 0,
            requests_max,
            bytes_max,
            version: 0,
        };
        Counters(Arc::new(Shared { tally: Mutex::new(tally), changed: Condvar::new() }))
    }

    pub fn totals(&self) -> Totals {
        self.lock().totals.clone()
    }

    /// The last requests that are still remembered, oldest first. The newest go on being
    /// remembered while older ones are dropped for [`super::Script::kept_requests`] and
    /// [`super::Script::kept_bytes`].
    pub fn seen(&self) -> Vec<Seen> {
        self.lock().seen.iter().cloned().collect()
    }

    /// The newest request.
    pub fn last(&self) -> Option<Seen> {
        self.lock().seen.back().cloned()
    }

    /// Waits until `holds` of the totals, at most `limit`; gives whether it did. It looks again
    /// at each change, so that a test needs no sleep. `holds` may ask these counters for more.
    pub fn wait(&self, limit: Duration, mut holds: impl FnMut(&Totals) -> bool) -> bool {
        let end = std::time::Instant::now() + limit;
        loop {
            let tally = self.lock();
            let (totals, version) = (tally.totals.clone(), tally.version);
            drop(tally);
            // Without the lock, or a question inside would wait for itself.
            if holds(&totals) {
                return true;
            }
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return false;
            }
            let unchanged = |tally: &mut Tally| tally.version == version;
            let waited = self.0.changed.wait_timeout_while(self.lock(), left, unchanged);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Waits until no request runs and no connection is open, at most `limit`.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        self.wait(limit, |totals| totals.in_flight == 0 && totals.connections_open == 0)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Totals)) {
        self.with(|tally| change(&mut tally.totals));
    }

    fn with<T>(&self, change: impl FnOnce(&mut Tally) -> T) -> T {
        let mut tally = self.lock();
        let result = change(&mut tally);
        tally.version += 1;
        drop(tally);
        self.0.changed.notify_all();
        result
    }

    /// Notes a request to a model and gives its number.
    pub(super) fn begin(&self, mut seen: Seen) -> u64 {
        self.with(|tally| {
            let totals = &mut tally.totals;
            totals.requests += 1;
            totals.in_flight += 1;
            totals.in_flight_max = totals.in_flight_max.max(totals.in_flight);
            seen.number = totals.requests;
            tally.bytes += seen.head.len();
            tally.seen.push_back(seen);
            tally.trim();
            tally.totals.requests
        })
    }

    /// Changes what is remembered of a request, if it still is.
    pub(super) fn note(&self, number: u64, change: impl FnOnce(&mut Seen)) {
        self.with(|tally| {
            let Some(seen) = tally.find(number) else { return };
            let before = seen.body.len();
            change(seen);
            let after = seen.body.len();
            tally.bytes = tally.bytes - before + after;
            tally.trim();
        });
    }

    /// Notes the end of a request.
    pub(super) fn end(&self, number: u64, at: Instant, outcome: Outcome, truth: Truth) {
        self.with(|tally| {
            let totals = &mut tally.totals;
            totals.in_flight -= 1;
            totals.prompt_tokens += truth.prompt_tokens;
            totals.completion_tokens += truth.completion_tokens;
            match outcome {
                Outcome::Complete => totals.complete += 1,
                Outcome::ClientGone => totals.aborted += 1,
                Outcome::Cut => totals.cut += 1,
                Outcome::Running | Outcome::Stopped => {}
            }
            if let Some(seen) = tally.find(number) {
                seen.ended = Some(at);
                seen.outcome = outcome;
                seen.truth = truth;
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, Tally> {
        // A test that panicked inside `wait` has changed nothing here.
        self.0.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Tally {
    fn find(&mut self, number: u64) -> Option<&mut Seen> {
        let first = self.seen.front()?.number;
        self.seen.get_mut(usize::try_from(number.checked_sub(first)?).ok()?)
    }

    fn trim(&mut self) {
        while self.seen.len() > self.requests_max || self.bytes > self.bytes_max {
            let Some(oldest) = self.seen.pop_front() else { return };
            self.bytes -= oldest.head.len() + oldest.body.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(head: usize) -> Seen {
        Seen {
            number: 0,
            connection: 1,
            head: vec![b'x'; head],
            method: "POST".into(),
            target: "/".into(),
            body: Vec::new(),
            body_bytes: 0,
            model: String::new(),
            status: 0,
            started: Instant::ZERO,
            first_token: None,
            ended: None,
            outcome: Outcome::Running,
            truth: Truth::default(),
        }
    }

    fn numbers(counters: &Counters) -> Vec<u64> {
        counters.seen().iter().map(|seen| seen.number).collect()
    }

    #[test]
    fn memory_is_bounded_by_number_and_by_bytes_and_the_newest_stay() {
        let counters = Counters::new(3, 100);
        for _ in 0..5 {
            counters.begin(seen(10));
        }
        assert_eq!(numbers(&counters), [3, 4, 5]);
        counters.note(4, |seen| seen.body = vec![b'y'; 75]);
        assert_eq!(numbers(&counters), [4, 5]);
        // Long forgotten: no effect, no panic.
        counters.note(1, |seen| seen.status = 200);
        counters.note(5, |seen| seen.body = vec![b'y'; 20]);
        assert_eq!(numbers(&counters), [5]);
        // Even the newest goes when it alone is too large.
        counters.note(5, |seen| seen.body.extend([b'y'; 100]));
        assert_eq!(numbers(&counters), [0; 0]);
        counters.end(5, Instant::ZERO, Outcome::Complete, Truth::default());
        assert_eq!((counters.totals().in_flight, counters.totals().in_flight_max), (4, 5));
    }

    #[test]
    fn waiting_ends_with_the_change_or_with_the_limit() {
        let counters = Counters::new(1, 1);
        assert!(!counters.wait(Duration::from_millis(1), |totals| totals.probes == 1));
        let other = counters.clone();
        let changer = std::thread::spawn(move || other.change(|totals| totals.probes += 1));
        assert!(counters.wait(Duration::from_secs(10), |totals| totals.probes == 1));
        changer.join().unwrap();
    }

    #[test]
    fn fields_are_found_in_any_case_and_never_in_the_request_line() {
        let mut request = seen(0);
        request.head = b"POST /a:b HTTP/1.1\r\nHost: h:1\r\nX-Mock:  a=b \r\n\r\n".to_vec();
        assert_eq!(request.field("host"), Some("h:1"));
        assert_eq!(request.field("x-mock"), Some("a=b"));
        assert_eq!(request.field("POST /a"), None);
    }
}
