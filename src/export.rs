//! What leaves the process by itself: the access log.
//!
//! One thread drains the shards' rings and writes one JSON line per request to standard output or
//! a file. If nobody reads, it waits alone: the rings fill, further records are dropped and
//! counted, and no shard notices. A line holds names from the plan, numbers, and one short string
//! of a client's, its request id, reduced to visible ASCII. Never a prompt, never a key.

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
use crate::meter::text::{json_string, time_string};
use crate::meter::{Catalog, Record, Records, name_in};
use crate::pure::board::OTHER;

/// The thread that writes the access log.
#[derive(Debug)]
pub struct AccessLog {
    writer: JoinHandle<()>,
    rings: mpsc::Sender<rtrb::Consumer<Record>>,
    flags: Arc<Flags>,
}

#[derive(Debug, Default)]
struct Flags {
    reopen: AtomicBool,
    finish: AtomicBool,
}

impl AccessLog {
    /// Starts writing to `path`, or to standard output. `catalog` turns numbers into names.
    ///
    /// # Errors
    /// The file cannot be opened or no thread can be started.
    pub fn start(path: Option<PathBuf>, catalog: Arc<ArcSwap<Catalog>>) -> io::Result<AccessLog> {
        let (rings, new_rings) = mpsc::channel();
        let flags = Arc::new(Flags::default());
        let out = Out::open(path)?;
        let writer = Writer { out, rings: Vec::new(), new_rings, flags: flags.clone(), catalog };
        let writer =
            std::thread::Builder::new().name("access-log".into()).spawn(|| writer.run())?;
        Ok(AccessLog { writer, rings, flags })
    }

    /// A shard's end of a new ring.
    pub fn records(&self) -> Records {
        let (records, ring) = Records::to(self.writer.thread().clone());
        // Without a receiver the writer has died; then the ring fills and drops are counted.
        let _ = self.rings.send(ring);
        records
    }

    /// Opens the file anew, for log rotation.
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

struct Writer {
    out: Out,
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
                self.out.reopen();
            }
            self.rings.extend(self.new_rings.try_iter());
            let mut lines = 0;
            let catalog = self.catalog.load();
            for ring in &mut self.rings {
                // A bound, so that one busy shard does not keep the others' records waiting.
                for _ in 0..ring.slots() {
                    let Ok(record) = ring.pop() else { break };
                    access_line(&mut batch, &record, &catalog);
                    lines += 1;
                    if batch.len() >= BATCH {
                        self.out.write(&mut batch, std::mem::take(&mut lines), &self.flags);
                    }
                }
            }
            drop(catalog);
            let idle = lines == 0 && batch.is_empty();
            self.out.write(&mut batch, lines, &self.flags);
            if idle && finish {
                return;
            }
            if idle {
                // Woken by a shard's tick. The limit covers a wake-up that we were too early for.
                std::thread::park_timeout(Duration::from_secs(1));
            }
        }
    }
}

/// Bytes per write: few syscalls when busy, and one line at a time when not.
const BATCH: usize = 64 * 1024;

struct Out {
    file: File,
    /// `None` for standard output, which cannot be opened anew.
    path: Option<PathBuf>,
    /// The last write stopped in the middle of a line.
    torn: bool,
    /// Writing fails; said once until it works again.
    failing: bool,
}

impl Out {
    fn open(path: Option<PathBuf>) -> io::Result<Out> {
        let file = match &path {
            Some(path) => append_to(path)?,
            // A descriptor of its own, without the standard library's buffer and lock.
            None => File::from(io::stdout().as_fd().try_clone_to_owned()?),
        };
        Ok(Out { file, path, torn: false, failing: false })
    }

    fn reopen(&mut self) {
        let Some(path) = &self.path else { return };
        match append_to(path) {
            Ok(file) => {
                self.file = file;
                self.torn = false;
            }
            Err(error) => {
                say(Level::Error, "access_log_not_reopened", &[("error", &error)]);
            }
        }
    }

    /// Writes `batch`, which holds so many `lines`, and empties it. What cannot be written is
    /// counted and forgotten: a full disk is no reason to keep records in memory.
    fn write(&mut self, batch: &mut String, lines: u64, flags: &Flags) {
        if batch.is_empty() {
            return;
        }
        if self.torn {
            batch.insert(0, '\n');
        }
        let mut rest = batch.as_bytes();
        while !rest.is_empty() {
            let error = match self.file.write(rest) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(written) => {
                    self.torn = rest[written - 1] != b'\n';
                    rest = &rest[written..];
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
            let lost = memchr::memchr_iter(b'\n', rest).count() as u64;
            UNWRITTEN.fetch_add(lost.min(lines), Ordering::Relaxed);
            if !std::mem::replace(&mut self.failing, true) {
                say(Level::Error, "access_log_not_written", &[("error", &error)]);
            }
            break;
        }
        if rest.is_empty() && std::mem::take(&mut self.failing) {
            say(Level::Info, "access_log_works_again", &[]);
        }
        batch.clear();
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
         \"reasoning_tokens\":{},\"estimated_tokens\":{}}}",
        usage.prompt, usage.completion, usage.cached, usage.reasoning, usage.estimated,
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
        assert_eq!(json.as_object().map(serde_json::Map::len), Some(24));
    }

    /// Many shards, a rotation in the middle: every record is in one of the two files, whole.
    #[test]
    fn no_record_is_lost_by_rotation_or_at_the_end() {
        let folder = folder("rotation");
        let path = folder.join("access.log");
        let log = AccessLog::start(Some(path.clone()), catalog()).expect("a log");
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

    #[test]
    fn a_full_disk_is_counted_and_said_and_survived() {
        let log = AccessLog::start(Some("/dev/full".into()), catalog()).expect("a log");
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
        let log = AccessLog::start(Some(path), catalog()).expect("a log");
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
