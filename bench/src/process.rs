//! What the kernel knows about running processes: CPU, memory, context switches, system calls.

use std::fs;
use std::io;

use perf_event::events::Tracepoint;
use perf_event::{Builder, Counter};

/// A process and all its descendants, as they are now.
pub fn family(root: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| Some((pid, parent(pid)?)))
        .collect();
    let mut family = vec![root];
    let mut at = 0;
    while let Some(&member) = family.get(at) {
        family.extend(parents.iter().filter(|(_, parent)| *parent == member).map(|(pid, _)| pid));
        at += 1;
    }
    family
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name may hold spaces and parentheses; the fields after the last one do not.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// CPU time and switches of some processes since each began.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    /// Nanoseconds on a CPU, user and kernel, from the scheduler; ticks are too coarse.
    pub cpu_ns: u64,
    /// Context switches, voluntary and not.
    pub switches: u64,
}

/// Sums over all threads that live now. Threads that ended are not in it, so compare two readings
/// only of processes whose threads stay.
pub fn spent(pids: &[u32]) -> Spent {
    let mut sum = Spent::default();
    for task in tasks(pids) {
        let schedstat = fs::read_to_string(format!("{task}/schedstat")).unwrap_or_default();
        sum.cpu_ns +=
            schedstat.split_whitespace().next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
        let status = fs::read_to_string(format!("{task}/status")).unwrap_or_default();
        sum.switches += number_after(&status, "voluntary_ctxt_switches:")
            + number_after(&status, "nonvoluntary_ctxt_switches:");
    }
    sum
}

fn tasks(pids: &[u32]) -> Vec<String> {
    let entries = pids
        .iter()
        .flat_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten());
    entries.filter_map(|entry| entry.path().to_str().map(str::to_owned)).collect()
}

fn number_after(text: &str, label: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(label));
    line.and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

/// Memory of some processes in KiB.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub struct Memory {
    /// Resident; pages that processes share are counted in each.
    pub rss_kib: u64,
    /// Resident, shared pages divided among those who share them.
    pub pss_kib: u64,
}

/// Sums over the processes.
pub fn memory(pids: &[u32]) -> Memory {
    let mut sum = Memory::default();
    for pid in pids {
        let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
        sum.rss_kib += number_after(&rollup, "Rss:");
        sum.pss_kib += number_after(&rollup, "Pss:");
    }
    sum
}

/// Seconds that all CPUs together were busy since boot, in steps of a tick (10 ms), steal included.
pub fn machine_busy() -> f64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or("")
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    // user nice system idle iowait irq softirq steal
    let busy: u64 = ticks
        .iter()
        .take(8)
        .enumerate()
        .filter(|(at, _)| *at != 3 && *at != 4)
        .map(|(_, ticks)| ticks)
        .sum();
    busy as f64 / 100.0
}

/// Counts the system calls of processes that run already.
pub struct Syscalls {
    counters: Vec<Counter>,
}

impl Syscalls {
    /// Starts counting in every thread. Each system call costs its maker a little more from now
    /// on, so do not measure CPU meanwhile.
    ///
    /// # Errors
    /// The kernel does not let us: no tracefs, or `perf_event_paranoid` forbids it.
    pub fn count(pids: &[u32]) -> io::Result<Syscalls> {
        // Either place may be mounted.
        let places = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
        let text = places.iter().find_map(|place| {
            fs::read_to_string(format!("{place}/events/raw_syscalls/sys_enter/id")).ok()
        });
        let id = text
            .and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| io::Error::other("tracefs cannot be read"))?;
        let event = Tracepoint::with_id(id);
        let mut counters = Vec::new();
        for task in tasks(pids) {
            let Some(tid) = task.rsplit('/').next().and_then(|tid| tid.parse().ok()) else {
                continue;
            };
            let mut builder = Builder::new(event);
            // A tracepoint of the kernel fires in the kernel.
            let mut counter =
                builder.observe_pid(tid).any_cpu().include_kernel().inherit(true).build()?;
            counter.enable()?;
            counters.push(counter);
        }
        Ok(Syscalls { counters })
    }

    /// Calls so far.
    pub fn total(&mut self) -> u64 {
        self.counters.iter_mut().filter_map(|counter| counter.read().ok()).sum()
    }
}
