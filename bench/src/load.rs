//! The load generator: one thread, one epoll, every answer checked.
//!
//! It costs about as much as `wrk` so that it does not take from what it measures. *Closed loop*
//! keeps a number of connections busy; *open loop* starts requests on a schedule and times each
//! from when it *should* have left, so that a stalled target cannot hide its stall by delaying the
//! next question (coordinated omission). Requests wait for a free connection in that case, and the
//! wait counts.
//!
//! Only what falls inside the window is counted; everything that was started is checked.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use hdrhistogram::Histogram;
use rustix::event::epoll::{self, EventFlags};
use rustix::time::{ClockId, clock_gettime};

use crate::answer::{Answer, Expect, Step};
use crate::wire::{MODEL, NONCE_KEY, NONCE_LEN, Script, now};

const READ_LEN: usize = 64 * 1024;
/// Requests that may wait for a connection in open loop; past that they are dropped and counted as
/// failed, so that an overload run ends.
const WAITING_MAX: usize = 100_000;
const SECOND: u64 = 1_000_000_000;

/// When requests start.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pace {
    /// Each of the connections asks again as soon as it has its answer.
    Closed,
    /// Each of the connections asks once, before the window; the answers must outlast it.
    Once,
    /// This many requests a second, evenly spaced or by a Poisson process.
    Open {
        /// Requests per second.
        rate: f64,
        /// Exponential gaps instead of even ones, from a fixed seed.
        poisson: bool,
    },
}

/// One run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where to.
    pub addr: SocketAddr,
    /// The request's target.
    pub path: String,
    /// Sent as a bearer token.
    pub key: Option<String>,
    /// Ask for a stream.
    pub stream: bool,
    /// Ask for the usage chunk.
    pub include_usage: bool,
    /// What the mock shall answer.
    pub script: Script,
    /// Bytes of padding in the prompt.
    pub prompt: usize,
    /// When requests start.
    pub pace: Pace,
    /// Connections: all of them in closed loop, at most so many in open loop.
    pub connections: usize,
    /// A new connection for every request.
    pub fresh: bool,
    /// From the first request (`Pace::Once`: from the last first chunk) to the window.
    pub warmup: Duration,
    /// Length of the window.
    pub window: Duration,
    /// Longest that one answer may take.
    pub timeout: Duration,
}

/// The ends of the window, told to the caller so that it reads other counters at the same moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// The window opens.
    Open,
    /// The window has closed.
    Closed,
}

/// Percentiles of one kind of sample, in microseconds.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Spread {
    /// Samples.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p999: f64,
    /// Largest.
    pub max: f64,
}

/// What was seen inside the window, and every fault of the whole run.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Report {
    /// Seconds the window really took.
    pub window_s: f64,
    /// Answers that ended inside the window.
    pub requests: u64,
    /// Content chunks that arrived inside the window.
    pub chunks: u64,
    /// Body bytes inside the window.
    pub bytes: u64,
    /// Events that arrived in one read together with an earlier event of their stream.
    pub joined: u64,
    /// Answers of the whole run that were whole and right.
    pub right: u64,
    /// Answers of the whole run that were not.
    pub wrong: u64,
    /// What was wrong, the first few.
    pub faults: Vec<String>,
    /// Connections made in the whole run.
    pub connects: u64,
    /// From when the request should have left to its first content.
    pub ttft_us: Spread,
    /// From when the request should have left to the end of its answer.
    pub total_us: Spread,
    /// From the mock's write of a chunk (or plain answer) to our read of it.
    pub transit_us: Spread,
    /// Between two chunks of a stream.
    pub gap_us: Spread,
    /// How late requests left in open loop, waiting for a connection or for this thread.
    pub lag_us: Spread,
    /// The generator's own CPU per second of the window, 1 = one core busy.
    pub generator_cores: f64,
}

/// Runs one load, blocking; `mark` is called as the window opens and closes.
///
/// # Errors
/// The target refused every connection at the start, or epoll failed. Wrong answers are no error
/// here; they are in the report.
pub fn run(options: &Options, mark: &mut dyn FnMut(Mark)) -> io::Result<Report> {
    rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1))?;
    let mut load = Load::new(options)?;
    load.open_all()?;
    load.warm_up()?;
    let opened = now();
    load.window = Some((opened, u64::MAX));
    let cpu = thread_cpu();
    mark(Mark::Open);
    load.turn_until(now() + nanos(options.window))?;
    mark(Mark::Closed);
    let closed = now();
    load.window = Some((opened, closed));
    load.seen.cpu_ns = thread_cpu() - cpu;
    load.drain()?;
    Ok(load.report(closed - opened))
}

struct Load<'a> {
    options: &'a Options,
    poll: rustix::fd::OwnedFd,
    conns: Vec<Conn>,
    /// Connections with nothing to do; the most recently used is last and is used first.
    idle: Vec<usize>,
    /// Open loop: when requests that wait for a connection should have left.
    waiting: VecDeque<u64>,
    next_due: u64,
    /// Requests are still started.
    asking: bool,
    request: Request,
    asked: u64,
    busy: usize,
    first_seen: usize,
    window: Option<(u64, u64)>,
    seen: Seen,
    random: u64,
    input: Box<[u8]>,
}

struct Conn {
    sock: Option<TcpStream>,
    /// When the request should have left; `None` while idle.
    due: Option<u64>,
    answer: Answer,
    unsent: Vec<u8>,
    arrived: u64,
}

struct Seen {
    requests: u64,
    chunks: u64,
    bytes: u64,
    joined: u64,
    right: u64,
    wrong: u64,
    faults: Vec<String>,
    connects: u64,
    cpu_ns: u64,
    ttft: Histogram<u64>,
    total: Histogram<u64>,
    transit: Histogram<u64>,
    gap: Histogram<u64>,
    lag: Histogram<u64>,
}

impl<'a> Load<'a> {
    fn new(options: &'a Options) -> io::Result<Load<'a>> {
        let histogram = |digits| {
            Histogram::new_with_bounds(1, 600 * SECOND, digits).expect("bounds are in order")
        };
        let seen = Seen {
            requests: 0,
            chunks: 0,
            bytes: 0,
            joined: 0,
            right: 0,
            wrong: 0,
            faults: Vec::new(),
            connects: 0,
            cpu_ns: 0,
            ttft: histogram(3),
            total: histogram(3),
            transit: histogram(3),
            // Ten milliseconds with three digits would hide what is added in steps of ten microseconds.
            gap: histogram(4),
            lag: histogram(3),
        };
        Ok(Load {
            options,
            poll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            conns: Vec::new(),
            idle: Vec::new(),
            waiting: VecDeque::new(),
            next_due: 0,
            asking: true,
            request: Request::new(options),
            asked: 0,
            busy: 0,
            first_seen: 0,
            window: None,
            seen,
            random: 0x0f0e_b0a7,
            input: vec![0; READ_LEN].into_boxed_slice(),
        })
    }

    /// Makes the connections that exist from the start and, in closed loop, asks on each.
    fn open_all(&mut self) -> io::Result<()> {
        let open = matches!(self.options.pace, Pace::Open { .. });
        // In open loop more are made when needed.
        let count = if open { self.options.connections.min(16) } else { self.options.connections };
        for _ in 0..count {
            let index = self.add()?;
            if open {
                self.idle.push(index);
            } else {
                self.ask(index, now());
            }
        }
        self.next_due = now();
        Ok(())
    }

    fn add(&mut self) -> io::Result<usize> {
        let index = self.conns.len();
        let expect = Expect {
            stream: self.options.stream,
            usage: self.options.include_usage || !self.options.stream,
            tokens: self.options.script.tokens,
            size: self.options.script.size,
        };
        self.conns.push(Conn {
            sock: None,
            due: None,
            answer: Answer::new(expect),
            unsent: Vec::new(),
            arrived: 0,
        });
        self.connect(index)?;
        Ok(index)
    }

    /// Loopback connects at once or not at all, so this blocks.
    fn connect(&mut self, index: usize) -> io::Result<()> {
        let sock = TcpStream::connect_timeout(&self.options.addr, Duration::from_secs(2))?;
        sock.set_nodelay(true)?;
        sock.set_nonblocking(true)?;
        epoll::add(&self.poll, &sock, epoll::EventData::new_u64(index as u64), EventFlags::IN)?;
        self.seen.connects += 1;
        self.conns[index].sock = Some(sock);
        Ok(())
    }

    fn warm_up(&mut self) -> io::Result<()> {
        if self.options.pace == Pace::Once {
            let deadline = now() + nanos(self.options.timeout);
            while self.first_seen < self.options.connections && self.busy > 0 && now() < deadline {
                self.turn_until(now() + 10_000_000)?;
            }
        }
        self.turn_until(now() + nanos(self.options.warmup))
    }

    /// No new requests; waits for the answers that are due.
    fn drain(&mut self) -> io::Result<()> {
        self.asking = false;
        let deadline = now() + nanos(self.options.timeout);
        while (self.busy > 0 || !self.waiting.is_empty()) && now() < deadline {
            self.turn_until(now() + 20_000_000)?;
        }
        for index in 0..self.conns.len() {
            if self.conns[index].due.is_some() {
                self.fail(index, "no end of the answer in time");
            }
        }
        let unsent = self.waiting.len() as u64;
        if unsent > 0 {
            self.seen.wrong += unsent;
            self.seen.faults.push(format!("{unsent} requests found no connection"));
        }
        Ok(())
    }

    fn turn_until(&mut self, deadline: u64) -> io::Result<()> {
        let mut events = Vec::with_capacity(256);
        loop {
            let time = now();
            if time >= deadline {
                return Ok(());
            }
            self.start_due(time);
            let wake = if self.asking { deadline.min(self.next_wake()) } else { deadline };
            crate::net::wait(&self.poll, &mut events, Some(wake.saturating_sub(now())))?;
            for event in events.drain(..) {
                self.ready(crate::net::index(event), event.flags);
            }
            if self.busy == 0 && !self.asking && self.waiting.is_empty() {
                return Ok(());
            }
        }
    }

    fn next_wake(&self) -> u64 {
        if matches!(self.options.pace, Pace::Open { .. }) { self.next_due } else { u64::MAX }
    }

    /// Open loop: starts what is due, on an idle connection, a new one, or later.
    fn start_due(&mut self, time: u64) {
        let Pace::Open { rate, poisson } = self.options.pace else { return };
        while self.asking && self.next_due <= time {
            if self.waiting.len() == WAITING_MAX {
                self.seen.wrong += 1;
            } else {
                self.waiting.push_back(self.next_due);
            }
            let gap = if poisson { -(1.0 - self.uniform()).ln() } else { 1.0 };
            self.next_due += nanos(Duration::from_secs_f64(gap / rate));
        }
        while let Some(&due) = self.waiting.front() {
            let index = match self.idle.pop() {
                Some(index) => index,
                None if self.conns.len() < self.options.connections => match self.add() {
                    Ok(index) => index,
                    Err(error) => {
                        self.waiting.pop_front();
                        self.note(&format!("connect: {error}"));
                        continue;
                    }
                },
                None => return,
            };
            self.waiting.pop_front();
            self.ask(index, due);
        }
    }

    fn uniform(&mut self) -> f64 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn ask(&mut self, index: usize, due: u64) {
        if self.conns[index].sock.is_none()
            && let Err(error) = self.connect(index)
        {
            self.note(&format!("connect: {error}"));
            // A target that is gone must not make this spin: the connection stays unused.
            return;
        }
        self.asked += 1;
        let conn = &mut self.conns[index];
        self.request.set_nonce(self.asked);
        let bytes = &self.request.bytes;
        conn.answer.begin(self.request.nonce());
        conn.due = Some(due);
        conn.arrived = 0;
        self.busy += 1;
        let lag = now().saturating_sub(due);
        if inside(self.window, due) {
            record(&mut self.seen.lag, lag);
        }
        let Some(sock) = conn.sock.as_mut() else { return };
        match sock.write(bytes) {
            Ok(sent) if sent == bytes.len() => {}
            Ok(sent) => {
                conn.unsent.extend_from_slice(&bytes[sent..]);
                let _ = epoll::modify(
                    &self.poll,
                    &*sock,
                    epoll::EventData::new_u64(index as u64),
                    EventFlags::IN | EventFlags::OUT,
                );
            }
            Err(error) => self.fail(index, &format!("write: {error}")),
        }
    }

    fn ready(&mut self, index: usize, flags: EventFlags) {
        if flags.contains(EventFlags::OUT) {
            self.flush(index);
        }
        if !flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            return;
        }
        let mut input = std::mem::take(&mut self.input);
        while let Some(sock) = self.conns[index].sock.as_mut() {
            match sock.read(&mut input) {
                Ok(0) => {
                    self.closed(index);
                    break;
                }
                Ok(length) => {
                    self.received(index, &input[..length]);
                    if length < input.len() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.lost(index, &format!("read: {error}"));
                    break;
                }
            }
        }
        self.input = input;
    }

    fn flush(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        let Some(sock) = conn.sock.as_mut() else { return };
        match sock.write(&conn.unsent) {
            Ok(sent) => drop(conn.unsent.drain(..sent)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return self.lost(index, &format!("write: {error}")),
        }
        if conn.unsent.is_empty() {
            let _ = epoll::modify(
                &self.poll,
                &*sock,
                epoll::EventData::new_u64(index as u64),
                EventFlags::IN,
            );
        }
    }

    fn received(&mut self, index: usize, bytes: &[u8]) {
        let time = now();
        let counted = inside(self.window, time);
        let conn = &mut self.conns[index];
        let Some(due) = conn.due else { return self.lost(index, "bytes that nobody asked for") };
        if counted {
            self.seen.bytes += bytes.len() as u64;
        }
        let mut rest = bytes;
        let mut events = 0_u64;
        loop {
            match conn.answer.step(&mut rest) {
                Ok(Step::More) => break,
                Ok(Step::Event) => events += 1,
                Ok(Step::Chunk(stamp)) => {
                    events += 1;
                    if conn.arrived == 0 {
                        self.first_seen += 1;
                        if inside(self.window, due) {
                            record(&mut self.seen.ttft, time.saturating_sub(due));
                        }
                    } else if counted {
                        record(&mut self.seen.gap, time - conn.arrived);
                    }
                    conn.arrived = time;
                    if counted {
                        self.seen.chunks += 1;
                        record(&mut self.seen.transit, time.saturating_sub(stamp.sent));
                    }
                }
                Ok(Step::End { close }) => {
                    if counted {
                        self.seen.joined += events.saturating_sub(1);
                    }
                    return self.finished(index, time, close, rest.is_empty());
                }
                Err(fault) => {
                    let text = format!(
                        "{fault}: {:?}",
                        String::from_utf8_lossy(&bytes[..bytes.len().min(300)])
                    );
                    return self.fail(index, &text);
                }
            }
        }
        if counted {
            self.seen.joined += events.saturating_sub(1);
        }
    }

    fn finished(&mut self, index: usize, time: u64, close: bool, clean: bool) {
        if !clean {
            return self.fail(index, "bytes after the end of the answer");
        }
        let conn = &mut self.conns[index];
        let Some(due) = conn.due.take() else { return };
        self.busy -= 1;
        self.seen.right += 1;
        if inside(self.window, time) {
            self.seen.requests += 1;
        }
        if inside(self.window, due) {
            record(&mut self.seen.total, time.saturating_sub(due));
        }
        if close || self.options.fresh {
            conn.sock = None;
        }
        self.next(index);
    }

    /// The peer closed: the end of an answer that says so, of an idle connection, or a fault.
    fn closed(&mut self, index: usize) {
        let conn = &mut self.conns[index];
        conn.sock = None;
        if conn.due.is_some() {
            if conn.answer.ends_by_close() {
                return self.finished(index, now(), true, true);
            }
            self.fail(index, "closed before the end of the answer");
        }
    }

    fn lost(&mut self, index: usize, why: &str) {
        self.conns[index].sock = None;
        if self.conns[index].due.is_some() {
            self.fail(index, why);
        } else {
            self.note(why);
        }
    }

    /// The answer is wrong: its connection is given up and the next request gets a new one.
    fn fail(&mut self, index: usize, why: &str) {
        self.note(why);
        let conn = &mut self.conns[index];
        conn.sock = None;
        conn.unsent.clear();
        if conn.due.take().is_some() {
            self.busy -= 1;
            // Far fewer retries than the CPU could make: a dead target answers nothing thousands of times a second.
            if self.seen.wrong < 10_000 {
                self.next(index);
            }
        }
    }

    fn note(&mut self, why: &str) {
        self.seen.wrong += 1;
        if self.seen.faults.len() < 5 {
            self.seen.faults.push(why.to_owned());
        }
    }

    fn next(&mut self, index: usize) {
        match self.options.pace {
            Pace::Closed if self.asking => self.ask(index, now()),
            Pace::Open { .. } => self.idle.push(index),
            _ => {}
        }
    }

    fn report(&self, window_ns: u64) -> Report {
        let seen = &self.seen;
        Report {
            window_s: window_ns as f64 / 1e9,
            requests: seen.requests,
            chunks: seen.chunks,
            bytes: seen.bytes,
            joined: seen.joined,
            right: seen.right,
            wrong: seen.wrong,
            faults: seen.faults.clone(),
            connects: seen.connects,
            ttft_us: spread(&seen.ttft),
            total_us: spread(&seen.total),
            transit_us: spread(&seen.transit),
            gap_us: spread(&seen.gap),
            lag_us: spread(&seen.lag),
            generator_cores: seen.cpu_ns as f64 / window_ns as f64,
        }
    }
}

/// The request's bytes, made once; only the nonce changes.
struct Request {
    bytes: Vec<u8>,
    nonce_at: usize,
}

impl Request {
    fn new(options: &Options) -> Request {
        let stream = if options.stream { ",\"stream\":true" } else { "" };
        let usage =
            if options.include_usage { ",\"stream_options\":{\"include_usage\":true}" } else { "" };
        let body = format!(
            "{{\"model\":\"{MODEL}\",\"user\":\"00000000\"{stream}{usage},\"max_tokens\":{},\"temperature\":0.7,\"messages\":[{{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"}},{{\"role\":\"user\",\"content\":\"{} {}\"}}]}}",
            options.script.tokens.max(16),
            options.script.text(),
            prose(options.prompt),
        );
        let key = options
            .key
            .as_ref()
            .map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
        let close = if options.fresh { "connection: close\r\n" } else { "" };
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: {}\r\n{key}{close}content-type: application/json\r\naccept: application/json\r\nuser-agent: forebay-bench\r\ncontent-length: {}\r\n\r\n",
            options.path,
            options.addr,
            body.len(),
        );
        let bytes = (head + &body).into_bytes();
        let nonce_at = memchr::memmem::find(&bytes, NONCE_KEY).map_or(0, |at| at + NONCE_KEY.len());
        Request { bytes, nonce_at }
    }

    fn set_nonce(&mut self, number: u64) {
        crate::wire::put_decimal(&mut self.bytes[self.nonce_at..self.nonce_at + NONCE_LEN], number);
    }

    fn nonce(&self) -> [u8; NONCE_LEN] {
        let mut nonce = [0; NONCE_LEN];
        nonce.copy_from_slice(&self.bytes[self.nonce_at..self.nonce_at + NONCE_LEN]);
        nonce
    }
}

/// `length` bytes of words, with an escape here and there as real prompts have.
fn prose(length: usize) -> String {
    const WORDS: &str = "The quick brown fox jumps over the lazy dog, then says \\\"nothing\\\" and rests by the river.\\n";
    let mut text: String = WORDS.chars().cycle().take(length).collect();
    // A cut inside an escape would leave half of it.
    while text.ends_with('\\') {
        text.pop();
        text.push('.');
    }
    text
}

fn inside(window: Option<(u64, u64)>, time: u64) -> bool {
    window.is_some_and(|(open, close)| open <= time && time < close)
}

fn record(histogram: &mut Histogram<u64>, ns: u64) {
    histogram.saturating_record(ns.max(1));
}

fn spread(histogram: &Histogram<u64>) -> Spread {
    let us = |ns: u64| ns as f64 / 1000.0;
    if histogram.is_empty() {
        return Spread::default();
    }
    Spread {
        count: histogram.len(),
        mean: histogram.mean() / 1000.0,
        p50: us(histogram.value_at_quantile(0.5)),
        p90: us(histogram.value_at_quantile(0.9)),
        p99: us(histogram.value_at_quantile(0.99)),
        p999: us(histogram.value_at_quantile(0.999)),
        max: us(histogram.max()),
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn thread_cpu() -> u64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec.cast_unsigned() * SECOND + t.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    //! The generator against the mock, over sockets: right answers are counted, wrong ones seen.
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpListener};
    use std::time::Duration;

    use super::{Mark, Options, Pace, Report, run};
    use crate::wire::Script;

    fn mock() -> SocketAddr {
        let listener = crate::net::listen(([127, 0, 0, 1], 0).into()).expect("a port");
        let addr = listener.local_addr().expect("bound");
        std::thread::spawn(move || crate::mock::serve_on(listener, Script::default()));
        addr
    }

    fn options(addr: SocketAddr) -> Options {
        Options {
            addr,
            path: "/v1/chat/completions".to_owned(),
            key: Some("k".to_owned()),
            stream: true,
            include_usage: false,
            script: Script { tokens: 5, interval_us: 1000, ..Script::default() },
            prompt: 100,
            pace: Pace::Closed,
            connections: 4,
            fresh: false,
            warmup: Duration::from_millis(20),
            window: Duration::from_millis(100),
            timeout: Duration::from_secs(5),
        }
    }

    fn good(options: &Options) -> Report {
        let mut marks = Vec::new();
        let report = run(options, &mut |mark| marks.push(mark)).expect("it runs");
        assert_eq!(report.faults, Vec::<String>::new());
        assert_eq!((report.wrong, marks), (0, vec![Mark::Open, Mark::Closed]));
        report
    }

    #[test]
    fn every_way_to_ask_gets_right_answers() {
        let options = options(mock());
        let report = good(&options);
        assert!(report.requests > 4 && report.chunks > 4 * report.requests, "{report:?}");
        assert_eq!(report.connects, 4);
        good(&Options { include_usage: true, ..options.clone() });
        good(&Options {
            script: Script { first_us: 500, hold_at: 2, hold_us: 3000, ..options.script },
            ..options.clone()
        });
        let plain = Options {
            stream: false,
            script: Script { size: 400, tokens: 1, ..options.script },
            ..options.clone()
        };
        assert!(good(&plain).requests > 100);
        good(&Options { prompt: 300_000, ..plain.clone() });
        let fresh = good(&Options { fresh: true, ..plain.clone() });
        assert!(fresh.connects >= fresh.right, "{fresh:?}");
        let once = good(&Options {
            pace: Pace::Once,
            script: Script { tokens: 150, ..options.script },
            ..options.clone()
        });
        assert_eq!((once.right, once.requests), (4, 0));
        let open = good(&Options {
            pace: Pace::Open { rate: 1000.0, poisson: true },
            connections: 50,
            ..plain
        });
        assert!(open.total_us.count > 50, "{open:?}");
    }

    #[test]
    fn a_stall_counts_for_every_request_that_should_have_left() {
        let script = Script { size: 400, tokens: 1, first_us: 10_000, ..Script::default() };
        let pace = Pace::Open { rate: 1000.0, poisson: false };
        let window = Duration::from_millis(200);
        // One connection that answers every 10 ms, asked every millisecond: waits add up.
        let options = Options {
            stream: false,
            script,
            pace,
            connections: 1,
            window,
            timeout: Duration::from_secs(15),
            ..options(mock())
        };
        let report = good(&options);
        assert!(report.total_us.count > 150 && report.total_us.p50 > 500_000.0, "{report:?}");
    }

    #[test]
    fn a_wrong_answer_is_a_fault() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        std::thread::spawn(move || {
            for sock in listener.incoming() {
                let mut sock = sock.expect("accepted");
                let _ = sock.read(&mut [0; 4096]);
                let _ = sock.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n");
            }
        });
        let report =
            run(&Options { pace: Pace::Once, ..options(addr) }, &mut |_| {}).expect("it runs");
        assert_eq!((report.right, report.wrong), (0, 4));
        assert!(report.faults[0].starts_with("status is not 200"), "{report:?}");
    }
}
