//! Diagnostics: one JSON line per event on standard error, with a stable name and fields.
//!
//! For what operators must know once, never for what happens per chunk or per request. Saying
//! something costs a formatted line and a push on a bounded queue; a thread of its own writes it,
//! so that a stalled terminal stalls nobody. Values are escaped and cut; never pass a prompt, a
//! key or anything else that a client chose.

use std::fmt::{Display, Write as _};
use std::io::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;

use super::text::{json_string, time_string};

/// How much is said. `RUST_LOG` sets it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Off,
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl Level {
    /// `RUST_LOG`'s value: a level, or a list of which the last bare level or `forebay=level`
    /// counts. What is not understood leaves `info`.
    pub fn of(text: &str) -> Level {
        let mut level = Level::default();
        for part in text.split(',') {
            let word = match part.split_once('=') {
                Some((target, word)) if target.trim() == "forebay" => word,
                Some(_) => continue,
                None => part,
            };
            level = match word.trim().to_ascii_lowercase().as_str() {
                "off" => Level::Off,
                "error" => Level::Error,
                "warn" | "warning" => Level::Warn,
                "info" => Level::Info,
                "debug" => Level::Debug,
                "trace" => Level::Trace,
                _ => level,
            };
        }
        level
    }

    pub const fn name(self) -> &'static str {
        match self {
            Level::Off => "off",
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

/// Says something, from any thread: `say(Level::Warn, "backend_unresolved", &[("backend", &name)])`.
/// Before [`start`] it goes to standard error directly.
pub fn say(level: Level, event: &str, fields: &[(&str, &dyn Display)]) {
    let log = LOG.get();
    if level > log.map_or(Level::default(), |log| log.level) || level == Level::Off {
        return;
    }
    if !within_rate(event) {
        LOST.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let line = line(super::unix_ns() / 1_000_000, level, event, fields);
    match log {
        Some(log) => {
            if log.queue.push(line).is_err() {
                LOST.fetch_add(1, Ordering::Relaxed);
            }
            log.writer.unpark();
        }
        None => {
            let _ = std::io::stderr().write_all(line.as_bytes());
        }
    }
}

/// Events that were not written: too many of a kind in one second, or nobody reads.
pub static LOST: AtomicU64 = AtomicU64::new(0);

static LOG: OnceLock<Log> = OnceLock::new();

#[derive(Debug)]
struct Log {
    level: Level,
    queue: ArrayQueue<String>,
    writer: Thread,
}

/// Starts the writing thread. Later calls change nothing.
pub fn start(level: Level) {
    let spawned = std::thread::Builder::new().name("events".into()).spawn(|| {
        loop {
            match LOG.get() {
                Some(log) => drain(log),
                None => std::thread::park_timeout(Duration::from_millis(10)),
            }
        }
    });
    // Without a thread, events go out directly, as before the start.
    if let Ok(handle) = spawned {
        let writer = handle.thread().clone();
        let _ = LOG.set(Log { level, queue: ArrayQueue::new(WAITING_MAX), writer });
    }
}

/// Lines that wait for a slow terminal; more are lost and counted.
const WAITING_MAX: usize = 1024;

fn drain(log: &Log) {
    while let Some(line) = log.queue.pop() {
        // Standard error is the last resort: if it is closed there is nobody to tell.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    std::thread::park();
}

/// Waits until what was said has been written, `limit` at most: before the process ends.
pub fn flush(limit: Duration) {
    let Some(log) = LOG.get() else { return };
    let pause = Duration::from_millis(2);
    let mut waited = Duration::ZERO;
    while !log.queue.is_empty() && waited < limit {
        log.writer.unpark();
        std::thread::sleep(pause);
        waited += pause;
    }
    // The last line has left the queue and may still be on its way.
    std::thread::sleep(pause);
}

fn line(unix_ms: u64, level: Level, event: &str, fields: &[(&str, &dyn Display)]) -> String {
    let mut line = String::with_capacity(128);
    line.push_str("{\"time\":\"");
    time_string(&mut line, unix_ms);
    let _ = write!(line, "\",\"level\":\"{}\",\"event\":", level.name());
    json_string(&mut line, event, FIELD_MAX);
    for (name, value) in fields {
        line.push(',');
        json_string(&mut line, name, FIELD_MAX);
        line.push(':');
        json_string(&mut line, &value.to_string(), FIELD_MAX);
    }
    line.push_str("}\n");
    line
}

/// Characters of one value.
const FIELD_MAX: usize = 512;

/// At most [`RATE_MAX`] events of one name in a second. Two names may share a counter by chance;
/// then they share the rate.
fn within_rate(event: &str) -> bool {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    for byte in event.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3);
    }
    // The top six bits: an index below 64.
    let slot = &RATES[(hash >> 58) as usize];
    let second = super::unix_ns() / 1_000_000_000;
    let next = |now: u64| {
        let used = if now >> 16 == second { now & 0xFFFF } else { 0 };
        (used < RATE_MAX).then_some(second << 16 | (used + 1))
    };
    slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
}

const RATE_MAX: u64 = 50;
static RATES: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rust_log_is_understood_as_others_write_it() {
        for (text, level) in [
            ("", Level::Info),
            ("warn", Level::Warn),
            ("OFF", Level::Off),
            ("info,hyper=off", Level::Info),
            ("hyper=debug,forebay=error", Level::Error),
            ("forebay=debug,warn", Level::Warn),
            ("nonsense", Level::Info),
        ] {
            assert_eq!(Level::of(text), level, "{text}");
        }
    }

    #[test]
    fn an_event_is_one_line_of_json_whatever_its_values_hold() {
        let nasty = "a\r\n\u{1b}[31m\"}\u{0}\u{2028}";
        let line = line(0, Level::Warn, "test_event", &[("value", &nasty), ("n", &7)]);
        assert_eq!(line.matches('\n').count(), 1);
        assert!(line.ends_with("}\n"));
        let parsed: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(parsed["value"], nasty);
        assert_eq!(parsed["n"], "7");
        assert_eq!(parsed["time"], "1970-01-01T00:00:00.000Z");
    }

    #[test]
    fn one_event_cannot_flood_the_log() {
        let admitted = (0..10_000).filter(|_| within_rate("flood_test_event")).count();
        // The second may turn once or twice while we count.
        assert!((50..=150).contains(&admitted), "{admitted}");
    }
}
