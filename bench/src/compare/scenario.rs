//! What a comparison measures: each scenario is one kind of load and the numbers read from it.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use super::target::{KEY, Running};
use crate::load::{self, Options, Pace, Report};
use crate::process::{self, Syscalls};
use crate::wire::Script;

/// Numbers of one measurement by name; names end in their unit.
pub type Numbers = BTreeMap<String, f64>;

/// The target's CPU as a share of what the mock and the generator used in the same window. They do
/// the same work for every target, so what makes the whole machine slower for a while (a neighbour,
/// a clock) drops out.
pub const YARDSTICK: &str = "cpu_per_yardstick";

/// What is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Content chunks delivered.
    Chunk,
    /// Requests answered.
    Request,
    /// Streams held open; memory is measured, not time.
    Stream,
}

/// One kind of load.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name in tables and on the command line.
    pub name: &'static str,
    /// What happens, in a sentence.
    pub what: &'static str,
    /// What costs are divided by.
    pub unit: Unit,
    /// Also counted: system calls, in a short run of its own, because counting costs CPU.
    pub syscalls: bool,
    /// Left out of `--quick`.
    pub full_only: bool,
    stream: bool,
    pace: Pace,
    connections: usize,
    prompt: usize,
    script: Script,
}

/// How long each measurement is.
#[derive(Debug, Clone, Copy)]
pub struct Length {
    /// Before the window.
    pub warmup: Duration,
    /// The window.
    pub window: Duration,
}

/// All scenarios, cheap ones first.
pub fn all() -> Vec<Scenario> {
    let script =
        Script { tokens: 1, size: 400, interval_us: 10_000, first_us: 0, hold_at: 0, hold_us: 0 };
    let base = Scenario {
        name: "plain",
        what: "small non-streaming requests, closed loop on 32 connections, 400-byte answers",
        unit: Unit::Request,
        syscalls: true,
        full_only: false,
        stream: false,
        pace: Pace::Closed,
        connections: 32,
        prompt: 64,
        script,
    };
    let chunks = Script { size: 200, ..script };
    vec![
        Scenario {
            name: "chunks-50",
            what: "50 streams, a 200-byte chunk each every 10 ms, spread in phase",
            unit: Unit::Chunk,
            stream: true,
            pace: Pace::Once,
            connections: 50,
            script: chunks,
            ..base.clone()
        },
        Scenario {
            name: "chunks-500",
            what: "500 streams, a 200-byte chunk each every 10 ms, spread in phase",
            unit: Unit::Chunk,
            stream: true,
            pace: Pace::Once,
            connections: 500,
            script: chunks,
            ..base.clone()
        },
        base.clone(),
        Scenario {
            name: "plain-open",
            what: "small non-streaming requests, open loop at 3,000/s (Poisson), timed from when each should have left",
            pace: Pace::Open { rate: 3000.0, poisson: true },
            connections: 256,
            syscalls: false,
            ..base.clone()
        },
        Scenario {
            name: "ttft",
            what: "streams of 8 chunks, open loop at 300/s (Poisson), timed from when each should have left",
            stream: true,
            pace: Pace::Open { rate: 300.0, poisson: true },
            connections: 256,
            syscalls: false,
            script: Script { tokens: 8, ..chunks },
            ..base.clone()
        },
        Scenario {
            name: "prompt-32k",
            what: "non-streaming requests with a 32 KiB prompt, closed loop on 8 connections",
            connections: 8,
            prompt: 32 * 1024,
            syscalls: false,
            full_only: true,
            ..base.clone()
        },
        Scenario {
            name: "idle-1000",
            what: "1,000 streams that sent five chunks and fell silent; a fresh process each time",
            unit: Unit::Stream,
            syscalls: false,
            stream: true,
            pace: Pace::Once,
            connections: 1000,
            script: Script { tokens: 6, hold_at: 5, hold_us: 3_500_000, ..chunks },
            ..base
        },
    ]
}

impl Scenario {
    /// Streams that answer once must outlast the window, so their length follows from it.
    fn options(&self, running: &Running, length: Length) -> Options {
        let mut script = self.script;
        if self.unit == Unit::Chunk {
            let margin = Duration::from_millis(300);
            let span = length.warmup + length.window + margin;
            let chunks = span.as_micros() / u128::from(script.interval_us) + 1;
            script.tokens = u32::try_from(chunks).unwrap_or(u32::MAX);
        }
        Options {
            addr: running.addr,
            path: "/v1/chat/completions".to_owned(),
            key: Some(KEY.to_owned()),
            stream: self.stream,
            include_usage: false,
            script,
            prompt: self.prompt,
            pace: self.pace,
            connections: self.connections,
            fresh: false,
            warmup: length.warmup,
            window: length.window,
            timeout: Duration::from_secs(10),
        }
    }

    /// Puts the load on and reads CPU and latency.
    ///
    /// # Errors
    /// The target cannot be reached, or an answer was wrong.
    pub fn measure(
        &self,
        running: &Running,
        mock: &Running,
        length: Length,
    ) -> io::Result<Numbers> {
        let options = self.options(running, length);
        let mut readings = Vec::new();
        let report = load::run(&options, &mut |_| {
            let mock = process::spent(&mock.pids).cpu_ns;
            readings.push((process::spent(&running.pids), mock, process::machine_busy()));
        })?;
        check(&report)?;
        let [(before, mock_before, busy_before), (after, mock_after, busy_after)] = readings[..]
        else {
            return Err(io::Error::other("the window did not open and close once"));
        };
        let cpu_us = after.cpu_ns.saturating_sub(before.cpu_ns) as f64 / 1000.0;
        let switches = after.switches.saturating_sub(before.switches) as f64;
        let mock_cores = mock_after.saturating_sub(mock_before) as f64 / 1e9 / report.window_s;
        let target_cores = cpu_us / 1e6 / report.window_s;
        let busy = (busy_after - busy_before) / report.window_s;
        let (count, per) = match self.unit {
            Unit::Chunk => (report.chunks, "per_chunk"),
            Unit::Request | Unit::Stream => (report.requests, "per_request"),
        };
        let count = count as f64;
        let mut numbers = Numbers::new();
        let mut put = |name: &str, value: f64| {
            numbers.insert(name.to_owned(), value);
        };
        if !running.pids.is_empty() {
            put(&format!("cpu_us_{per}"), cpu_us / count);
            put(&format!("switches_{per}"), switches / count);
            put("target_cores", target_cores);
            // The mock and the generator do the same work per unit whatever stands between them.
            put(YARDSTICK, target_cores / (mock_cores + report.generator_cores));
            if self.unit == Unit::Request {
                put("requests_per_core_s", 1e6 * count / cpu_us);
            }
        }
        put("requests_per_s", report.requests as f64 / report.window_s);
        put("chunks_per_s", report.chunks as f64 / report.window_s);
        put("joined_share", report.joined as f64 / (report.chunks.max(1)) as f64);
        put("mock_cores", mock_cores);
        put("generator_cores", report.generator_cores);
        put("foreign_cores", (busy - mock_cores - report.generator_cores - target_cores).max(0.0));
        let kinds = [
            ("ttft", &report.ttft_us),
            ("total", &report.total_us),
            ("transit", &report.transit_us),
            ("gap", &report.gap_us),
            ("lag", &report.lag_us),
        ];
        for (name, spread) in kinds {
            // In plain answers the first content is all of it; a window without a sample says nothing.
            if spread.count > 0 && (self.stream || name != "ttft") {
                put(&format!("{name}_p50_us"), spread.p50);
                put(&format!("{name}_p99_us"), spread.p99);
            }
        }
        Ok(numbers)
    }

    /// A short run that counts system calls.
    ///
    /// # Errors
    /// As [`Scenario::measure`]; or the kernel does not let us count.
    pub fn count_syscalls(&self, running: &Running) -> io::Result<Numbers> {
        let length =
            Length { warmup: Duration::from_millis(300), window: Duration::from_millis(600) };
        let options = self.options(running, length);
        let mut counter: Option<io::Result<Syscalls>> = None;
        let mut calls = 0;
        let report = load::run(&options, &mut |_| match &mut counter {
            None => counter = Some(Syscalls::count(&running.pids)),
            Some(Ok(counter)) => calls = counter.total(),
            Some(Err(_)) => {}
        })?;
        check(&report)?;
        if let Some(Err(error)) = counter {
            return Err(error);
        }
        let (count, name) = match self.unit {
            Unit::Chunk => (report.chunks, "syscalls_per_chunk"),
            Unit::Request | Unit::Stream => (report.requests, "syscalls_per_request"),
        };
        Ok(Numbers::from([(name.to_owned(), calls as f64 / count as f64)]))
    }

    /// Memory of a fresh process before and while its streams are open and silent.
    ///
    /// # Errors
    /// As [`Scenario::measure`].
    pub fn measure_memory(&self, running: &Running) -> io::Result<Numbers> {
        let length =
            Length { warmup: Duration::from_millis(1200), window: Duration::from_millis(500) };
        let options = self.options(running, length);
        let before = process::memory(&running.pids);
        let mut during = before;
        let report = load::run(&options, &mut |_| during = process::memory(&running.pids))?;
        check(&report)?;
        let streams = self.connections as f64;
        let per_stream = |after: u64, before: u64| (after as f64 - before as f64) / streams;
        Ok(Numbers::from([
            ("rss_start_kib".to_owned(), before.rss_kib as f64),
            ("pss_start_kib".to_owned(), before.pss_kib as f64),
            ("rss_kib_per_stream".to_owned(), per_stream(during.rss_kib, before.rss_kib)),
            ("pss_kib_per_stream".to_owned(), per_stream(during.pss_kib, before.pss_kib)),
        ]))
    }
}

fn check(report: &Report) -> io::Result<()> {
    if report.wrong == 0 {
        return Ok(());
    }
    let faults = report.faults.join("\n  ");
    Err(io::Error::other(format!("{} answers were wrong:\n  {faults}", report.wrong)))
}
