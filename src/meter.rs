//! The meter: what a shard tells of its work, and how control adds it up.
//!
//! A shard counts in a sheet of its own: plain integers, no lock, no atomic. Once a tick the sheet
//! is exchanged for an empty one through two bounded queues; control folds it into the [`Ledger`]
//! and sends it back. While control is away the shard goes on in the same sheet, so nothing is
//! lost and nothing grows but numbers. One record per request goes to the access log through a
//! ring, which is the one thing here that may be dropped, and is counted when it is.
//!
//! Rows are indexed by [`Series`], the number that a name keeps for the life of the process;
//! [`Series`] 0 is `other`. Clients cannot make a row, a label or a log field longer.
//!
//! [`events`] is the diagnostic log; [`text`] names every metric and its unit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;
use hdrhistogram::{Counter, Histogram};

use crate::pure::board::{BackendRow, Kind, LimitRow, Registry, TenantRow};
use crate::pure::dialect::Endpoint;
use crate::pure::units::{Instant, Series, ShardId};

pub mod events;
#[cfg(test)]
mod tests;
pub mod text;
pub mod usage;

use usage::{Spend, Spends, Whose};

/// A shard's pen. Methods cost a few array writes each; a row allocates when its name is first
/// used, and never again.
#[derive(Debug)]
pub struct Meter {
    sheet: Box<Sheet>,
    dirty: bool,
    link: Arc<Link>,
    records: Option<Records>,
    wall: WallClock,
}

impl Meter {
    /// A shard's meter and control's end of it. With `records`, every request also goes to the
    /// access log.
    pub fn linked(shard: ShardId, records: Option<Records>) -> (Meter, Arc<Link>) {
        let link = Arc::new(Link {
            shard,
            full: ArrayQueue::new(SHEETS),
            blank: ArrayQueue::new(SHEETS),
            beat: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        for _ in 1..SHEETS {
            // The queue holds them all.
            let _ = link.blank.push(Box::default());
        }
        let sheet = Box::default();
        let wall = WallClock::default();
        (Meter { sheet, dirty: false, link: Arc::clone(&link), records, wall }, link)
    }

    /// Time to the first content that was written to the client.
    pub fn ttft(&mut self, route: Series, backend: Series, span: Duration) {
        self.dirty = true;
        self.sheet.routes.timed(route).ttft.record(span);
        self.sheet.backends.timed(backend).ttft.record(span);
    }

    /// Between two content chunks of one stream. The only call that is made per chunk.
    #[inline]
    pub fn gap(&mut self, route: Series, span: Duration) {
        self.dirty = true;
        self.sheet.routes.timed(route).gap.record(span);
    }

    /// An attempt that failed by the backend's fault; not 4xx, not 429.
    pub fn upstream_failure(&mut self, backend: Series, why: Failure) {
        self.dirty = true;
        self.sheet.backends.at(backend).failures[why as usize] += 1;
    }

    /// The client left before its answer was whole (leaving right after `[DONE]` is not that).
    pub fn client_abort(&mut self, route: Series) {
        self.dirty = true;
        self.sheet.routes.at(route).aborts += 1;
    }

    /// A try after the first, on another backend where there is one.
    pub fn retry(&mut self, route: Series) {
        self.dirty = true;
        self.sheet.routes.at(route).retries += 1;
    }

    /// A request sent again because the pooled connection had been closed under it.
    pub fn stale_resend(&mut self, backend: Series) {
        self.dirty = true;
        self.sheet.backends.at(backend).stale_resends += 1;
    }

    pub fn connection_opened(&mut self) {
        self.dirty = true;
        self.sheet.shard.opened += 1;
    }

    pub fn connection_closed(&mut self) {
        self.dirty = true;
        self.sheet.shard.closed += 1;
    }

    /// A connection or request that was ended by the rules of the wire: bad head, bad framing.
    pub fn bad_request(&mut self) {
        self.dirty = true;
        self.sheet.shard.bad_requests += 1;
    }

    /// Once for each request, also for refused ones.
    pub fn done(&mut self, done: &Done) {
        self.dirty = true;
        let sheet = &mut *self.sheet;
        let route = sheet.routes.at(done.route);
        route.statuses[status_slot(done.status)] += 1;
        route.booked.add(&done.usage);
        let timed = sheet.routes.timed(done.route);
        timed.duration.record(done.duration);
        sheet.tenants.at(done.tenant).add(&done.usage);
        sheet.models.at(done.model).add(&done.usage);
        sheet.keys.at(done.key).add(&done.usage);
        let unix_ms = self.wall.unix_ms(done.at);
        let whose = Whose {
            // Days fit for eleven million years.
            day: (unix_ms / 86_400_000) as u32,
            tenant: done.tenant,
            key: done.key,
            model: done.model,
            route: done.route,
        };
        sheet.spends.add(whose, &Spend { requests: 1, booked: done.usage });
        sheet.shard.bytes_in += done.bytes_in;
        sheet.shard.bytes_out += done.bytes_out;
        if let Some(records) = &mut self.records
            && !records.push(Record { unix_ms, done: *done })
        {
            sheet.shard.records_dropped += 1;
        }
    }

    /// The wall clock at `at`, in seconds since 1970 (UTC); a clock that is set is followed within a
    /// second.
    pub fn unix(&mut self, at: Instant) -> u64 {
        self.wall.unix_ms(at) / 1_000
    }

    /// Hands what was counted since the last tick to control, if anything was and control has
    /// sent a blank sheet back. Call it every 20 ms or so.
    pub fn tick(&mut self, now: Instant) {
        self.wall.keep(now);
        self.link.beat.store(now.nanos(), Ordering::Relaxed);
        if let Some(records) = &mut self.records {
            records.wake();
        }
        if !self.dirty {
            return;
        }
        if let Some(blank) = self.link.blank.pop() {
            self.send(blank);
            self.dirty = false;
        }
    }

    /// Hands over the last sheet, also when control is behind. Call it when the shard ends; what
    /// is counted later may be lost. Dropping the meter does the same, but a runtime may leak the
    /// tasks that hold it.
    pub fn close(&mut self) {
        if self.link.closed() {
            return;
        }
        self.send(Box::default());
        self.link.closed.store(true, Ordering::Release);
        if let Some(records) = &mut self.records {
            records.wake();
        }
    }

    fn send(&mut self, blank: Box<Sheet>) {
        let sheet = std::mem::replace(&mut self.sheet, blank);
        // The queue has room for every sheet there is.
        let sent = self.link.full.push(sheet);
        debug_assert!(sent.is_ok(), "more sheets than were made");
    }
}

impl Drop for Meter {
    /// Also when a shard's own loop panics.
    fn drop(&mut self) {
        self.close();
    }
}

/// Sheets per shard: one to write on, one that control reads or has just sent back.
const SHEETS: usize = 2;

/// Control's end of one shard's meter.
#[derive(Debug)]
pub struct Link {
    shard: ShardId,
    full: ArrayQueue<Box<Sheet>>,
    blank: ArrayQueue<Box<Sheet>>,
    /// Nanoseconds of the last tick; 0 before the first.
    beat: AtomicU64,
    closed: AtomicBool,
}

impl Link {
    pub fn shard(&self) -> ShardId {
        self.shard
    }

    /// When the shard ticked last; `None` before the first time.
    pub fn beat(&self) -> Option<Instant> {
        match self.beat.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Instant::from_nanos(nanos)),
        }
    }

    /// Whether the shard has ended and said its last.
    pub fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Why an attempt at a backend failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// Its name has no address.
    Resolve,
    /// Refused, unreachable, out of descriptors.
    Connect,
    ConnectTimeout,
    /// No content within `timeouts.first_token`.
    FirstToken,
    /// No plain answer within `timeouts.answer`.
    Answer,
    /// Silent in the middle of a stream for `timeouts.chunk`.
    Chunk,
    /// `timeouts.total` passed.
    Total,
    /// The connection broke before a whole answer.
    Reset,
    /// The answer is no HTTP that we can pass on.
    Protocol,
    /// It answered 5xx.
    Status5xx,
    /// It refused our key.
    Credential,
    /// An error event inside a 200 stream.
    InStreamError,
}

impl Failure {
    pub const ALL: [Failure; 12] = [
        Failure::Resolve,
        Failure::Connect,
        Failure::ConnectTimeout,
        Failure::FirstToken,
        Failure::Answer,
        Failure::Chunk,
        Failure::Total,
        Failure::Reset,
        Failure::Protocol,
        Failure::Status5xx,
        Failure::Credential,
        Failure::InStreamError,
    ];

    /// The value of label `reason`.
    pub const fn name(self) -> &'static str {
        match self {
            Failure::Resolve => "resolve",
            Failure::Connect => "connect",
            Failure::ConnectTimeout => "connect_timeout",
            Failure::FirstToken => "first_token_timeout",
            Failure::Answer => "answer_timeout",
            Failure::Chunk => "chunk_timeout",
            Failure::Total => "total_timeout",
            Failure::Reset => "reset",
            Failure::Protocol => "protocol",
            Failure::Status5xx => "status_5xx",
            Failure::Credential => "credential",
            Failure::InStreamError => "in_stream_error",
        }
    }
}

/// One request, at its end. Small, flat and `Copy`: it crosses a ring.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// When it ended.
    pub at: Instant,
    pub request_id: RequestId,
    pub tenant: Series,
    pub key: Series,
    pub route: Series,
    pub model: Series,
    /// Of the last attempt.
    pub backend: Series,
    /// What the client was told; 0 if it left before a status was written.
    pub status: u16,
    pub streamed: bool,
    pub how: Ending,
    pub path: Endpoint,
    /// Attempts at backends; 0 for what was answered or refused here.
    pub attempts: u8,
    /// Body bytes from the client.
    pub bytes_in: u64,
    /// Body bytes to the client.
    pub bytes_out: u64,
    /// Spent waiting for a slot or a connection.
    pub queue: Option<Duration>,
    pub ttft: Option<Duration>,
    pub duration: Duration,
    pub usage: Booked,
}

/// Tokens booked for one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Booked {
    pub prompt: u64,
    pub completion: u64,
    /// Part of `prompt` that the backend had cached.
    pub cached: u64,
    /// Part of `completion`.
    pub reasoning: u64,
    /// Part of `prompt + completion` that no backend reported.
    pub estimated: u64,
    /// What it costs by the plan's prices, in billionths of a dollar.
    pub nano: u64,
}

impl Booked {
    /// Saturates: a backend that reports 2^63 tokens twice must not wrap a bill to nothing.
    fn add(&mut self, more: &Booked) {
        self.prompt = self.prompt.saturating_add(more.prompt);
        self.completion = self.completion.saturating_add(more.completion);
        self.cached = self.cached.saturating_add(more.cached);
        self.reasoning = self.reasoning.saturating_add(more.reasoning);
        self.estimated = self.estimated.saturating_add(more.estimated);
        self.nano = self.nano.saturating_add(more.nano);
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every byte of an answer was written, whatever its status.
    Whole,
    /// We answered with a refusal of our own.
    Refused,
    ClientGone,
    /// The client took nothing for `timeouts.send`, or sent too slowly.
    ClientSlow,
    BackendBroke,
    TimedOut,
    /// Cut when draining took longer than `server.grace`.
    Drained,
    /// Cut because its budget was spent.
    Spent,
    /// A bug of ours.
    Panicked,
}

impl Ending {
    pub const fn name(self) -> &'static str {
        match self {
            Ending::Whole => "whole",
            Ending::Refused => "refused",
            Ending::ClientGone => "client_gone",
            Ending::ClientSlow => "client_slow",
            Ending::BackendBroke => "backend_broke",
            Ending::TimedOut => "timed_out",
            Ending::Drained => "drained",
            Ending::Spent => "spent",
            Ending::Panicked => "panicked",
        }
    }
}

/// A request id, without an allocation: at most 40 visible ASCII characters.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RequestId {
    len: u8,
    bytes: [u8; RequestId::MAX],
}

impl RequestId {
    pub const MAX: usize = 40;

    /// What does not fit is cut off, and what is not visible ASCII becomes `?`.
    pub fn new(text: &[u8]) -> RequestId {
        let len = text.len().min(RequestId::MAX);
        let mut bytes = [0; RequestId::MAX];
        for (slot, &byte) in bytes[..len].iter_mut().zip(text) {
            *slot = if byte.is_ascii_graphic() { byte } else { b'?' };
        }
        // At most 40.
        RequestId { len: len as u8, bytes }
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    pub fn as_str(&self) -> &str {
        // Only ASCII is ever put in.
        std::str::from_utf8(self.as_bytes()).unwrap_or("")
    }
}

impl std::fmt::Debug for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The shard's end of the access log.
#[derive(Debug)]
pub struct Records {
    ring: rtrb::Producer<Record>,
    writer: Thread,
    pushed: bool,
}

/// A request with the wall clock time at its end.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub unix_ms: u64,
    pub done: Done,
}

impl Records {
    /// A ring to the thread `writer`, which is woken at most once a tick.
    pub fn to(writer: Thread) -> (Records, rtrb::Consumer<Record>) {
        let (ring, reader) = rtrb::RingBuffer::new(RECORDS);
        (Records { ring, writer, pushed: false }, reader)
    }

    fn push(&mut self, record: Record) -> bool {
        self.pushed = true;
        self.ring.push(record).is_ok()
    }

    fn wake(&mut self) {
        if std::mem::take(&mut self.pushed) {
            self.writer.unpark();
        }
    }
}

/// Records that wait for the writer, per shard: 1 MiB, 20 ms at 200,000 requests a second. When
/// the log's reader stalls, what does not fit is dropped and counted.
const RECORDS: usize = 4096;

/// Wall time by the monotonic clock: the offset between the two is looked up once a second, so
/// that a request costs no second clock call and a clock step is followed.
#[derive(Debug, Default)]
struct WallClock {
    offset_ns: u64,
    looked_up: Option<Instant>,
}

impl WallClock {
    fn keep(&mut self, now: Instant) {
        let due = self.looked_up.is_none_or(|at| now.since(at) >= Duration::from_secs(1));
        if due {
            self.offset_ns = unix_ns().saturating_sub(now.nanos());
            self.looked_up = Some(now);
        }
    }

    fn unix_ms(&mut self, at: Instant) -> u64 {
        if self.looked_up.is_none() {
            self.keep(at);
        }
        at.nanos().saturating_add(self.offset_ns) / 1_000_000
    }
}

/// Nanoseconds since 1970 by the wall clock.
pub fn unix_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// What one shard counted since control last took a sheet.
#[derive(Debug, Default)]
struct Sheet {
    routes: Rows<RouteRow<u32>>,
    backends: Rows<BackendCounts<u32>>,
    tenants: Rows<TokenRow>,
    models: Rows<TokenRow>,
    keys: Rows<TokenRow>,
    spends: Spends,
    shard: ShardRow,
}

/// What counts for the shard as a whole.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardRow {
    pub opened: u64,
    pub closed: u64,
    pub bad_requests: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub records_dropped: u64,
}

/// Rows by [`Series`], and which of them were touched, so that folding costs what was used.
#[derive(Debug)]
struct Rows<R> {
    rows: Vec<Option<Box<R>>>,
    touched: Vec<Series>,
}

impl<R> Default for Rows<R> {
    fn default() -> Rows<R> {
        Rows { rows: Vec::new(), touched: Vec::new() }
    }
}

impl<R: Row> Rows<R> {
    /// The row of a name.
    fn at(&mut self, series: Series) -> &mut R {
        let index = series.index();
        if index >= self.rows.len() {
            self.rows.resize_with(index + 1, || None);
        }
        let row = self.rows[index].get_or_insert_with(Box::default);
        if !std::mem::replace(row.touched(), true) {
            self.touched.push(series);
        }
        row
    }

    /// The row whose histograms take this name's times: its own, or `other` for late names.
    #[inline]
    fn timed(&mut self, series: Series) -> &mut R {
        self.at(timed_as(series))
    }

    fn fold(&mut self, total: &mut Totalled<R::Total>) {
        for series in self.touched.drain(..) {
            if let Some(row) = self.rows[series.index()].as_deref_mut() {
                *row.touched() = false;
                row.fold(total.at(series));
            }
        }
    }
}

/// Names with histograms of their own, per kind; the times of later ones count as `other`. One
/// route's three histograms are 36 KiB on each of a shard's two sheets.
pub const TIMED_NAMES_MAX: usize = 512;

fn timed_as(series: Series) -> Series {
    if series.index() < TIMED_NAMES_MAX { series } else { Series(0) }
}

/// A row of a sheet: adds itself to its total and is blank after.
trait Row: Default {
    type Total: Default;
    fn touched(&mut self) -> &mut bool;
    fn fold(&mut self, total: &mut Self::Total);
}

/// Control's rows, by [`Series`].
#[derive(Debug)]
pub struct Totalled<T>(Vec<Option<Box<T>>>);

impl<T> Default for Totalled<T> {
    fn default() -> Totalled<T> {
        Totalled(Vec::new())
    }
}

impl<T: Default> Totalled<T> {
    fn at(&mut self, series: Series) -> &mut T {
        let index = series.index();
        if index >= self.0.len() {
            self.0.resize_with(index + 1, || None);
        }
        self.0[index].get_or_insert_with(Box::default)
    }

    /// `None` if nothing was ever counted there.
    pub fn of(&self, series: Series) -> Option<&T> {
        self.0.get(series.index())?.as_deref()
    }

    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(Option::as_deref)
    }
}

/// One route. `C` is `u32` on a sheet, which lives for milliseconds, and `u64` in the ledger.
#[derive(Debug)]
pub struct RouteRow<C: Counter> {
    touched: bool,
    /// By [`status_slot`].
    pub statuses: [u64; STATUS_SLOTS],
    pub aborts: u64,
    pub retries: u64,
    pub booked: Booked,
    pub ttft: Times<C>,
    pub gap: Times<C>,
    pub duration: Times<C>,
}

impl<C: Counter> Default for RouteRow<C> {
    fn default() -> RouteRow<C> {
        RouteRow {
            touched: false,
            statuses: [0; STATUS_SLOTS],
            aborts: 0,
            retries: 0,
            booked: Booked::default(),
            ttft: Times::default(),
            gap: Times::default(),
            duration: Times::default(),
        }
    }
}

impl Row for RouteRow<u32> {
    type Total = RouteRow<u64>;

    fn touched(&mut self) -> &mut bool {
        &mut self.touched
    }

    fn fold(&mut self, total: &mut RouteRow<u64>) {
        fold_all(&mut self.statuses, &mut total.statuses);
        total.aborts += std::mem::take(&mut self.aborts);
        total.retries += std::mem::take(&mut self.retries);
        total.booked.add(&std::mem::take(&mut self.booked));
        self.ttft.fold(&mut total.ttft);
        self.gap.fold(&mut total.gap);
        self.duration.fold(&mut total.duration);
    }
}

/// One backend.
#[derive(Debug)]
pub struct BackendCounts<C: Counter> {
    touched: bool,
    /// By [`Failure`].
    pub failures: [u64; Failure::ALL.len()],
    pub stale_resends: u64,
    pub ttft: Times<C>,
}

impl<C: Counter> Default for BackendCounts<C> {
    fn default() -> BackendCounts<C> {
        BackendCounts {
            touched: false,
            failures: [0; Failure::ALL.len()],
            stale_resends: 0,
            ttft: Times::default(),
        }
    }
}

impl Row for BackendCounts<u32> {
    type Total = BackendCounts<u64>;

    fn touched(&mut self) -> &mut bool {
        &mut self.touched
    }

    fn fold(&mut self, total: &mut BackendCounts<u64>) {
        fold_all(&mut self.failures, &mut total.failures);
        total.stale_resends += std::mem::take(&mut self.stale_resends);
        self.ttft.fold(&mut total.ttft);
    }
}

/// Tokens of one tenant, key, model or route.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenRow {
    touched: bool,
    pub requests: u64,
    pub booked: Booked,
}

impl TokenRow {
    fn add(&mut self, more: &Booked) {
        self.requests += 1;
        self.booked.add(more);
    }
}

impl Row for TokenRow {
    type Total = TokenRow;

    fn touched(&mut self) -> &mut bool {
        &mut self.touched
    }

    fn fold(&mut self, total: &mut TokenRow) {
        total.requests += self.requests;
        total.booked.add(&self.booked);
        *self = TokenRow::default();
    }
}

fn fold_all<const N: usize>(from: &mut [u64; N], total: &mut [u64; N]) {
    for (count, total) in from.iter_mut().zip(total) {
        *total += std::mem::take(count);
    }
}

/// Times of one kind: a histogram from 1 µs to 600 s with two significant digits (0.8 %; 12 KiB
/// of `u32`), made at first use, and the exact sum.
#[derive(Debug)]
pub struct Times<C: Counter> {
    histogram: Option<Box<Histogram<C>>>,
    sum_us: u64,
}

impl<C: Counter> Default for Times<C> {
    fn default() -> Times<C> {
        Times { histogram: None, sum_us: 0 }
    }
}

impl<C: Counter> Times<C> {
    const LONGEST_US: u64 = 600_000_000;

    #[inline]
    fn record(&mut self, span: Duration) {
        let us = span.as_secs().saturating_mul(1_000_000) + u64::from(span.subsec_micros());
        self.sum_us = self.sum_us.saturating_add(us);
        if let Some(histogram) = self.histogram() {
            histogram.saturating_record(us);
        }
    }

    fn histogram(&mut self) -> Option<&mut Histogram<C>> {
        if self.histogram.is_none() {
            // These bounds are valid, so this is never `None` for long.
            let fresh = Histogram::new_with_bounds(1, Self::LONGEST_US, 2);
            self.histogram = fresh.ok().map(Box::new);
        }
        self.histogram.as_deref_mut()
    }

    pub fn count(&self) -> u64 {
        self.histogram.as_ref().map_or(0, |histogram| histogram.len())
    }

    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_us)
    }

    /// The time that `quantile` (0 to 1) of the recorded ones do not exceed; `None` without any.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let histogram = self.histogram.as_ref().filter(|histogram| !histogram.is_empty())?;
        Some(Duration::from_micros(histogram.value_at_quantile(quantile)))
    }

    /// How many lie at or below each of `bounds_us` (rising), as Prometheus wants them.
    fn cumulative(&self, bounds_us: &[u64], out: &mut Vec<u64>) {
        out.clear();
        out.resize(bounds_us.len(), 0);
        let Some(histogram) = &self.histogram else { return };
        for step in histogram.iter_recorded() {
            // The step stands for values up to 0.8 % apart; its lowest decides.
            let value = histogram.lowest_equivalent(step.value_iterated_to());
            let first = bounds_us.partition_point(|&bound| bound < value);
            if let Some(slot) = out.get_mut(first) {
                *slot += step.count_at_value().as_u64();
            }
        }
        let mut sum = 0;
        for slot in out {
            sum += *slot;
            *slot = sum;
        }
    }
}

impl Times<u32> {
    fn fold(&mut self, total: &mut Times<u64>) {
        total.sum_us = total.sum_us.saturating_add(std::mem::take(&mut self.sum_us));
        let Some(from) = self.histogram.as_deref_mut().filter(|from| !from.is_empty()) else {
            return;
        };
        if let Some(total) = total.histogram() {
            for step in from.iter_recorded() {
                let count = u64::from(step.count_at_value());
                total.saturating_record_n(step.value_iterated_to(), count);
            }
        }
        from.reset();
    }
}

/// Statuses with a label of their own; the rest count as `other`, so that a backend cannot make
/// series either.
pub const STATUSES: [u16; STATUS_SLOTS - 1] = [
    200, 201, 202, 204, 206, 301, 302, 303, 304, 307, 308, 400, 401, 402, 403, 404, 405, 406, 408,
    409, 410, 411, 413, 414, 415, 416, 417, 421, 422, 424, 425, 426, 429, 431, 451, 499, 500, 501,
    502, 503, 504, 505, 507, 508, 524, 529,
];

pub const STATUS_SLOTS: usize = 47;

/// Index into [`RouteRow::statuses`]; the last one is `other`.
pub fn status_slot(status: u16) -> usize {
    STATUSES.binary_search(&status).unwrap_or(STATUS_SLOTS - 1)
}

/// Everything since the process started, all shards together.
#[derive(Debug, Default)]
pub struct Ledger {
    pub routes: Totalled<RouteRow<u64>>,
    pub backends: Totalled<BackendCounts<u64>>,
    pub tenants: Totalled<TokenRow>,
    pub models: Totalled<TokenRow>,
    pub keys: Totalled<TokenRow>,
    /// Since [`Ledger::spends`] was called last.
    spends: Spends,
    pub shards: ShardRow,
}

impl Ledger {
    /// Adds every sheet that waits in `links` and sends it back blank. Never waits; costs a few
    /// µs per route with traffic.
    pub fn fold(&mut self, links: &[Arc<Link>]) {
        for link in links {
            // At most as many as there are: a busy shard must not keep control here.
            for _ in 0..SHEETS {
                let Some(mut sheet) = link.full.pop() else { break };
                self.add(&mut sheet);
                // Full only after the shard has ended; then nobody wants it.
                let _ = link.blank.push(sheet);
            }
        }
    }

    fn add(&mut self, sheet: &mut Sheet) {
        sheet.routes.fold(&mut self.routes);
        sheet.backends.fold(&mut self.backends);
        sheet.tenants.fold(&mut self.tenants);
        sheet.models.fold(&mut self.models);
        sheet.keys.fold(&mut self.keys);
        for (whose, spend) in sheet.spends.drain() {
            self.spends.add(whose, &spend);
        }
        let from = std::mem::take(&mut sheet.shard);
        let total = &mut self.shards;
        total.opened += from.opened;
        total.closed += from.closed;
        total.bad_requests += from.bad_requests;
        total.bytes_in += from.bytes_in;
        total.bytes_out += from.bytes_out;
        total.records_dropped += from.records_dropped;
    }

    /// Usage by day and by who, each of it once.
    pub fn spends(&mut self) -> impl Iterator<Item = (Whose, Spend)> + '_ {
        self.spends.drain()
    }

    pub fn requests(&self) -> u64 {
        self.routes.iter().flat_map(|row| row.statuses).sum()
    }
}

/// Every name since the process started and the rows of the board, as of the last reload: what
/// turns a [`Series`] back into a label.
#[derive(Debug, Default)]
pub struct Catalog {
    pub backends: Vec<Arc<BackendRow>>,
    pub tenants: Vec<Arc<TenantRow>>,
    pub models: Vec<Arc<str>>,
    pub routes: Vec<Arc<str>>,
    pub keys: Vec<Arc<str>>,
    pub limits: Vec<Arc<LimitRow>>,
}

impl Catalog {
    pub fn of(registry: &Registry) -> Catalog {
        Catalog {
            backends: registry.backends().to_vec(),
            tenants: registry.tenants().to_vec(),
            models: registry.names(Kind::Model).to_vec(),
            routes: registry.names(Kind::Route).to_vec(),
            keys: registry.names(Kind::Key).to_vec(),
            limits: registry.limit_rows().to_vec(),
        }
    }

    /// The number of a tenant, by its name.
    pub fn tenant(&self, name: &str) -> Option<Series> {
        self.tenants.iter().find(|row| &*row.name == name).map(|row| row.series)
    }
}

/// `name` of a [`Series`] in one of a catalog's lists; `other` for one that is newer than it.
pub fn name_in(list: &[Arc<str>], series: Series) -> &str {
    list.get(series.index()).map_or(crate::pure::board::OTHER, |name| name)
}
