//! What leaves the process by itself: the access log, records of usage, alerts.
//!
//! One thread drains the shards' rings and makes one JSON line of each request, for the access log
//! (standard output or a file), a file of usage records that it rotates itself, and ClickHouse. If
//! nobody reads, it waits alone: the rings fill, further records are dropped and counted, and no shard
//! notices. A line holds names from the plan, numbers, and one short string of a client's, its request
//! id, reduced to visible ASCII. Never a prompt, never a key.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::meter::events::{Level, say};
use crate::meter::text::{dollars, json_string, time_string};
use crate::meter::{Catalog, Record, Records, name_in};
use crate::pure::board::OTHER;

pub mod clickhouse;
pub mod webhook;

use clickhouse::ClickHouse;

/// Where records go.
#[derive(Debug, Default)]
pub struct Sinks {
    /// A file, or, with nothing in it, standard output.
    pub access_log: Option<Option<PathBuf>>,
    pub usage_file: Option<UsageFile>,
    pub clickhouse: Option<ClickHouse>,
}

/// A file that is followed by the next one when it is large.
#[derive(Debug)]
pub struct UsageFile {
    pub path: PathBuf,
    pub bytes_max: u64,
    /// How many full ones stay, as `path.1` (the newest) and so on.
    pub keep: u32,
}

/// The thread that writes.
#[derive(Debug)]
pub struct Exports {
    writer: JoinHandle<()>,
    rings: mpsc::Sender<rtrb::Consumer<Record>>,
    flags: Arc<Flags>,
}

#[derive(Debug, Default)]
struct Flags {
    reopen: AtomicBool,
    finish: AtomicBool,
}

impl Exports {
    /// Starts writing to `sinks`; `None` if there are none. `catalog` turns numbers into names.
    ///
    /// # Errors
    /// A file cannot be opened, a certificate is none, or no thread can be started.
    pub fn start(sinks: Sinks, catalog: Arc<ArcSwap<Catalog>>) -> io::Result<Option<Exports>> {
        let mut outs = Vec::new();
        if let Some(path) = sinks.access_log {
            outs.push(Out::open("access_log", path, None, &UNWRITTEN)?);
        }
        if let Some(UsageFile { path, bytes_max, keep }) = sinks.usage_file {
            let rotation = Rotation { bytes_max, keep, bytes: 0 };
            outs.push(Out::open("usage_file", Some(path), Some(rotation), &USAGE_UNWRITTEN)?);
        }
        let clickhouse = sinks.clickhouse.map(ClickHouse::start).transpose()?;
        if outs.is_empty() && clickhouse.is_none() {
            return Ok(None);
        }
        let (rings, new_rings) = mpsc::channel();
        let flags = Arc::new(Flags::default());
        let (flags_of, none) = (Arc::clone(&flags), Vec::new());
        let writer = Writer { outs, clickhouse, rings: none, new_rings, flags: flags_of, catalog };
        let writer = std::thread::Builder::new().name("export".into()).spawn(|| writer.run())?;
        Ok(Some(Exports { writer, rings, flags }))
    }

    /// A shard's end of a new ring.
    pub fn records(&self) -> Records {
        let (records, ring) = Records::to(self.writer.thread().clone());
        // Without a receiver the writer has died; then the ring fills and drops are counted.
        let _ = self.rings.send(ring);
        records
    }

    /// Opens files anew, for log rotation.
    pub fn reopen(&self) {
        self.flags.reopen.store(true, Ordering::Release);
        self.writer.thread().unpark();
    }

    /// Writes what is left and ends, within `limit`: a reader that stalls must not keep the
    /// process. True if everything was written.
    pub fn finish(self, limit: Duration) -> bool {
        self.flags.finish.store(true, Ordering::Release);
        self.writer.thread().unpark();
        let pause = Duration::from_millis(2);
        let mut waited = Duration::ZERO;
        while !self.writer.is_finished() && waited < limit {
            std::thread::sleep(pause);
            waited += pause;
        }
        self.writer.is_finished()
    }
}

/// Records that reached the writer and could not be written: disk full, pipe closed.
pub static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
/// The same, of the file of usage.
pub static USAGE_UNWRITTEN: AtomicU64 = AtomicU64::new(0);

struct Writer {
    outs: Vec<Out>,
    clickhouse: Option<clickhouse::Feed>,
    rings: Vec<rtrb::Consumer<Record>>,
    new_rings: mpsc::Receiver<rtrb::Consumer<Record>>,
    flags: Arc<Flags>,
    catalog: Arc<ArcSwap<Catalog>>,
}

impl Writer {
    fn run(mut self) {
        let mut batch = String::with_capacity(2 * BATCH);
        loop {
            // Read before the rings: what was pushed before the end was asked for is written.
            let finish = self.flags.finish.load(Ordering::Acquire);
            if self.flags.reopen.swap(false, Ordering::AcqRel) {
                self.outs.iter_mut().for_each(Out::reopen);
            }
            self.rings.extend(self.new_rings.try_iter());
            let mut lines = 0;
            let catalog = self.catalog.load();
            let mut rings = std::mem::take(&mut self.rings);
            for ring in &mut rings {
                // A bound, so that one busy shard does not keep the others' records waiting.
                for _ in 0..ring.slots() {
                    let Ok(record) = ring.pop() else { break };
                    access_line(&mut batch, &record, &catalog);
                    lines += 1;
                    if batch.len() >= BATCH {
                        self.pass_on(&mut batch, std::mem::take(&mut lines));
                    }
                }
            }
            self.rings = rings;
            drop(catalog);
            let idle = lines == 0 && batch.is_empty();
            self.pass_on(&mut batch, lines);
            if idle && finish {
                // What goes by the network gets what is left of the caller's patience.
                if let Some(feed) = self.clickhouse {
                    feed.finish();
                }
                return;
            }
            if idle {
                // Woken by a shard's tick. The limit covers a wake-up that we were too early for.
                std::thread::park_timeout(Duration::from_secs(1));
            }
        }
    }

    /// Writes `batch`, which holds so many `lines`, everywhere, and empties it.
    fn pass_on(&mut self, batch: &mut String, lines: u64) {
        if batch.is_empty() {
            return;
        }
        for out in &mut self.outs {
            out.write(batch, lines, &self.flags);
        }
        if let Some(feed) = &self.clickhouse {
            feed.offer(batch, lines);
        }
        batch.clear();
    }
}

/// Bytes per write: few syscalls when busy, and one line at a time when not.
const BATCH: usize = 64 * 1024;

struct Out {
    /// As events name it.
    name: &'static str,
    file: File,
    /// `None` for standard output, which cannot be opened anew.
    path: Option<PathBuf>,
    rotation: Option<Rotation>,
    /// The last write stopped in the middle of a line.
    torn: bool,
    /// Writing fails; said once until it works again.
    failing: bool,
    lost: &'static AtomicU64,
}

struct Rotation {
    bytes_max: u64,
    keep: u32,
    /// In the file now.
    bytes: u64,
}

impl Out {
    fn open(
        name: &'static str,
        path: Option<PathBuf>,
        mut rotation: Option<Rotation>,
        lost: &'static AtomicU64,
    ) -> io::Result<Out> {
        let file = match &path {
            Some(path) => append_to(path).map_err(|error| {
                io::Error::new(error.kind(), format!("{}: {error}", path.display()))
            })?,
            // A descriptor of its own, without the standard library's buffer and lock.
            None => File::from(io::stdout().as_fd().try_clone_to_owned()?),
        };
        if let Some(rotation) = &mut rotation {
            rotation.bytes = file.metadata()?.len();
        }
        Ok(Out { name, file, path, rotation, torn: false, failing: false, lost })
    }

    fn say(&self, level: Level, what: &str, error: Option<&io::Error>) {
        let event = format!("{}_{what}", self.name);
        match error {
            Some(error) => say(level, &event, &[("error", error)]),
            None => say(level, &event, &[]),
        }
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match append_to(path) {
            Ok(file) => {
                if let Some(rotation) = &mut self.rotation {
                    rotation.bytes = file.metadata().map_or(0, |known| known.len());
                }
                self.file = file;
                self.torn = false;
            }
            Err(error) => self.say(Level::Error, "not_reopened", Some(&error)),
        }
    }

    /// Puts the full file aside and begins the next.
    fn rotate(&mut self) {
        let (Some(path), Some(rotation)) = (&self.path, &self.rotation) else { return };
        let numbered = |number: u32| {
            let mut name = path.clone().into_os_string();
            name.push(format!(".{number}"));
            PathBuf::from(name)
        };
        let keep = rotation.keep;
        for number in (1..keep).rev() {
            // A gap in the row is no fault.
            let _ = std::fs::rename(numbered(number), numbered(number + 1));
        }
        let aside = match keep {
            0 => std::fs::remove_file(path),
            _ => std::fs::rename(path, numbered(1)),
        };
        if let Err(error) = aside {
            self.say(Level::Error, "not_rotated", Some(&error));
        }
        self.reopen();
    }

    /// Writes `batch`, which holds so many `lines`. What cannot be written is counted and forgotten:
    /// a full disk is no reason to keep records in memory.
    fn write(&mut self, batch: &str, lines: u64, flags: &Flags) {
        if self.rotation.as_ref().is_some_and(|rotation| rotation.bytes >= rotation.bytes_max) {
            self.rotate();
        }
        let torn = if self.torn { "\n" } else { "" };
        let mut rest = [torn.as_bytes(), batch.as_bytes()];
        while let Some(part) = rest.iter_mut().find(|part| !part.is_empty()) {
            let error = match self.file.write(part) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(written) => {
                    self.torn = part[written - 1] != b'\n';
                    *part = &part[written..];
                    if let Some(rotation) = &mut self.rotation {
                        rotation.bytes += written as u64;
                    }
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // Somebody made our output non-blocking, and its reader is behind.
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && !flags.finish.load(Ordering::Acquire) =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Err(error) => error,
            };
            let lost = memchr::memchr_iter(b'\n', rest[1]).count() as u64;
            self.lost.fetch_add(lost.min(lines), Ordering::Relaxed);
            if !std::mem::replace(&mut self.failing, true) {
                self.say(Level::Error, "not_written", Some(&error));
            }
            return;
        }
        if std::mem::take(&mut self.failing) {
            self.say(Level::Info, "works_again", None);
        }
    }
}

/// For the operator and its group: the log says who asked how much of what.
fn append_to(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// One request as a line of JSON. Fields are always there, in this order; a time that does not
/// apply is null.
fn access_line(out: &mut String, record: &Record, catalog: &Catalog) {
    let done = &record.done;
    let usage = &done.usage;
    let backend = catalog.backends.get(done.backend.index());
    let tenant = catalog.tenants.get(done.tenant.index());
    out.push_str("{\"time\":\"");
    time_string(out, record.unix_ms);
    out.push_str("\",\"level\":\"info\",\"event\":\"request\"");
    for (name, value) in [
        ("request_id", done.request_id.as_str()),
        ("tenant", tenant.map_or(OTHER, |row| &row.name)),
        ("key", name_in(&catalog.keys, done.key)),
        ("route", name_in(&catalog.routes, done.route)),
        ("model", name_in(&catalog.models, done.model)),
        ("backend", backend.map_or(OTHER, |row| &row.name)),
        ("path", done.path.name()),
        ("end", done.how.name()),
    ] {
        // Writing to a string does not fail, here and below.
        let _ = write!(out, ",\"{name}\":");
        json_string(out, value, NAME_MAX);
    }
    let _ = write!(
        out,
        ",\"status\":{},\"stream\":{},\"attempts\":{},\"bytes_in\":{},\"bytes_out\":{}",
        done.status, done.streamed, done.attempts, done.bytes_in, done.bytes_out,
    );
    milliseconds(out, "queue_ms", done.queue);
    milliseconds(out, "ttft_ms", done.ttft);
    milliseconds(out, "duration_ms", Some(done.duration));
    let _ = writeln!(
        out,
        ",\"prompt_tokens\":{},\"completion_tokens\":{},\"cached_tokens\":{},\
         \"reasoning_tokens\":{},\"estimated_tokens\":{},\"cost_usd\":{}}}",
        usage.prompt,
        usage.completion,
        usage.cached,
        usage.reasoning,
        usage.estimated,
        dollars(usage.nano),
    );
}

/// Characters of one name, so that a line stays under 4 KiB whatever the plan is like.
const NAME_MAX: usize = 256;

fn milliseconds(out: &mut String, name: &str, span: Option<Duration>) {
    let _ = match span {
        Some(span) => {
            let us = span.as_micros();
            write!(out, ",\"{name}\":{}.{:03}", us / 1_000, us % 1_000)
        }
        None => write!(out, ",\"{name}\":null"),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meter::{Booked, Done, Ending, Meter, RequestId};
    use crate::pure::board::{Kind, Registry};
    use crate::pure::dialect::Endpoint;
    use crate::pure::units::{Instant, Series, ShardId};

    fn done(id: &[u8]) -> Done {
        Done {
            at: Instant::ZERO,
            request_id: RequestId::new(id),
            tenant: Series(1),
            key: Series(0),
            route: Series(9_999),
            model: Series(1),
            backend: Series(1),
            status: 200,
            streamed: true,
            how: Ending::Whole,
            path: Endpoint::Chat,
            attempts: 1,
            bytes_in: 10,
            bytes_out: 20,
            queue: None,
            ttft: Some(Duration::from_micros(1_234)),
            duration: Duration::from_micros(5_000_007),
            usage: Booked { prompt: 9, completion: 3, ..Booked::default() },
        }
    }

    fn catalog() -> Arc<ArcSwap<Catalog>> {
        let mut registry = Registry::new();
        registry.backend("u\"1").expect("room");
        registry.tenant("a").expect("room");
        registry.series(Kind::Model, "m\n\u{1b}[31m-模型").expect("room");
        Arc::new(ArcSwap::from_pointee(Catalog::of(&registry)))
    }

    fn log_to(path: PathBuf) -> Exports {
        let sinks = Sinks { access_log: Some(Some(path)), ..Sinks::default() };
        Exports::start(sinks, catalog()).expect("a log").expect("a sink")
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[test]
    fn a_line_is_json_with_every_field_whatever_the_names_are() {
        let mut line = String::new();
        let record = Record { unix_ms: 0, done: done(b"r\n\"1") };
        access_line(&mut line, &record, &catalog().load());
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1);
        assert!(!line.trim_end().chars().any(char::is_control));
        let json: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(json["request_id"], "r?\"1");
        assert_eq!(json["backend"], "u\"1");
        assert_eq!(json["model"], "m\n\u{1b}[31m-模型");
        assert_eq!(json["route"], "other");
        assert_eq!(json["ttft_ms"], 1.234);
        assert_eq!(json["duration_ms"], 5_000.007);
        assert_eq!(json["queue_ms"], serde_json::Value::Null);
        assert_eq!(json["prompt_tokens"], 9);
        assert_eq!(json.as_object().map(serde_json::Map::len), Some(25));
    }

    /// Many shards, a rotation in the middle: every record is in one of the two files, whole.
    #[test]
    fn no_record_is_lost_by_rotation_or_at_the_end() {
        let folder = folder("rotation");
        let path = folder.join("access.log");
        let log = log_to(path.clone());
        let mut meters: Vec<_> =
            (0..3).map(|id| Meter::linked(ShardId(id), Some(log.records()))).collect();
        for turn in 0..2_000 {
            for (meter, _) in &mut meters {
                meter.done(&done(format!("r-{turn}").as_bytes()));
                meter.tick(Instant::ZERO);
            }
            if turn == 1_000 {
                std::fs::rename(&path, folder.join("access.log.1")).expect("renamed");
                log.reopen();
            }
        }
        assert!(log.finish(Duration::from_secs(20)));
        let mut lines = 0;
        for name in ["access.log", "access.log.1"] {
            let text = std::fs::read_to_string(folder.join(name)).expect("a log");
            for line in text.lines() {
                serde_json::from_str::<serde_json::Value>(line).expect("JSON");
                lines += 1;
            }
        }
        assert_eq!(lines, 6_000);
        std::fs::remove_dir_all(folder).expect("removed");
    }

    /// Every record is in one of the files that were kept or in one that was to go.
    #[test]
    fn the_file_of_usage_is_followed_by_the_next_when_it_is_large() {
        let folder = folder("usage-file");
        let path = folder.join("usage.jsonl");
        let usage = UsageFile { path: path.clone(), bytes_max: 20_000, keep: 2 };
        let sinks = Sinks { usage_file: Some(usage), ..Sinks::default() };
        let exports = Exports::start(sinks, catalog()).expect("a file").expect("a sink");
        let (mut meter, _link) = Meter::linked(ShardId(0), Some(exports.records()));
        for turn in 0..1_000 {
            meter.done(&done(format!("r-{turn}").as_bytes()));
            meter.tick(Instant::ZERO);
            // Few lines at a time, or all would go to one file.
            while turn % 20 == 0 && std::fs::metadata(&path).map_or(0, |known| known.len()) == 0 {
                std::thread::yield_now();
            }
        }
        assert!(exports.finish(Duration::from_secs(20)));
        let mut newest = Vec::new();
        for name in ["usage.jsonl.2", "usage.jsonl.1", "usage.jsonl"] {
            let text = std::fs::read_to_string(folder.join(name)).expect("a file");
            assert!(text.ends_with('\n') && text.len() < 20_000 + 2 * BATCH, "{name}");
            for line in text.lines() {
                let json: serde_json::Value = serde_json::from_str(line).expect("JSON");
                assert_eq!(json["cost_usd"], 0);
                newest.push(json["request_id"].as_str().expect("an id").to_owned());
            }
        }
        assert!(!folder.join("usage.jsonl.3").exists());
        let expected = (1_000 - newest.len()..1_000).map(|turn| format!("r-{turn}"));
        assert!(newest.into_iter().eq(expected), "in order, up to the last");
        std::fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_full_disk_is_counted_and_said_and_survived() {
        let log = log_to("/dev/full".into());
        let (mut meter, _link) = Meter::linked(ShardId(0), Some(log.records()));
        let before = UNWRITTEN.load(Ordering::Relaxed);
        for _ in 0..100 {
            meter.done(&done(b"r"));
        }
        meter.tick(Instant::ZERO);
        assert!(log.finish(Duration::from_secs(20)));
        assert!(UNWRITTEN.load(Ordering::Relaxed) >= before + 100);
    }

    /// A pipe that nobody reads: shards go on, the end comes within its limit.
    #[test]
    fn a_stalled_reader_stalls_nobody() {
        let folder = folder("stall");
        let path = folder.join("pipe");
        rustix::fs::mkfifoat(
            rustix::fs::CWD,
            &path,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        )
        .expect("a pipe");
        // Opened for reading and never read; a writer can open it then.
        let _reader = OpenOptions::new().read(true).write(true).open(&path).expect("opened");
        let log = log_to(path);
        let (mut meter, link) = Meter::linked(ShardId(0), Some(log.records()));
        for turn in 0..20_000 {
            meter.done(&done(b"r"));
            if turn % 100 == 0 {
                meter.tick(Instant::ZERO);
            }
        }
        drop(meter);
        let mut ledger = crate::meter::Ledger::default();
        ledger.fold(&[link]);
        assert_eq!(ledger.requests(), 20_000);
        assert!(ledger.shards.records_dropped > 10_000);
        assert!(!log.finish(Duration::from_millis(50)));
        std::fs::remove_dir_all(folder).expect("removed");
    }
}
