//! From rows of numbers to medians, ratios, and the two result files.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::scenario::{Length, Numbers, Scenario, Unit, YARDSTICK};
use super::target::{Kind, Target, version};

/// The target without a proxy; delays are counted from its.
const DIRECT: &str = "direct";
/// Whom ratios are against.
const PEERS: [&str; 3] = ["nginx", "haproxy", "hyper"];

/// One measurement.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// Which load.
    pub scenario: String,
    /// Which target.
    pub target: String,
    /// Counts from 0.
    pub round: usize,
    /// What was read.
    pub numbers: Numbers,
}

/// A number over the rounds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Range {
    min: f64,
    median: f64,
    max: f64,
}

impl Range {
    fn of(mut values: Vec<f64>) -> Option<Range> {
        values.retain(|value| value.is_finite());
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len().is_multiple_of(2) {
            f64::midpoint(values[middle - 1], values[middle])
        } else {
            values[middle]
        };
        Some(Range { min, median, max })
    }

    /// `median (min–max)` with digits that fit its size; `scale` divides.
    fn cell(self, scale: f64) -> String {
        let [min, median, max] = [self.min, self.median, self.max].map(|value| value / scale);
        let digits = match median.abs() {
            0.0..10.0 => 2,
            10.0..100.0 => 1,
            _ => 0,
        };
        if min.to_bits() == max.to_bits() {
            return format!("{median:.digits$}");
        }
        format!("{median:.digits$} ({min:.digits$}–{max:.digits$})")
    }
}

#[derive(Debug, Serialize)]
struct Machine {
    cpu: String,
    cpus: usize,
    memory_mib: u64,
    kernel: String,
}

#[derive(Debug, Serialize)]
struct Named {
    name: String,
    what: String,
}

type ByName<T> = BTreeMap<String, T>;

/// All that one comparison found.
#[derive(Debug, Serialize)]
pub struct Results {
    schema: &'static str,
    date: String,
    commit: String,
    command: String,
    machine: Machine,
    warmup_s: f64,
    window_s: f64,
    /// Time ran out before the last round.
    cut_short: bool,
    targets: Vec<Named>,
    scenarios: Vec<Named>,
    failures: Vec<String>,
    /// By scenario, target and number.
    summary: ByName<ByName<ByName<Range>>>,
    /// CPU (or memory) per unit by scenario, target and peer, taken within rounds: below 1 the
    /// target is cheaper.
    ratios: ByName<ByName<ByName<Range>>>,
    /// The same between medians of CPU per yardstick: the steadier number on a machine that is not
    /// ours alone.
    steady_ratios: ByName<ByName<ByName<f64>>>,
    rows: Vec<Row>,
    #[serde(skip)]
    units: Vec<Unit>,
}

impl Results {
    /// Sums up.
    pub fn new(
        targets: &[Target],
        scenarios: &[Scenario],
        rows: Vec<Row>,
        failures: Vec<String>,
        length: Length,
        cut_short: bool,
    ) -> Results {
        let mut summary = BTreeMap::new();
        let (mut ratios, mut steady_ratios) = (BTreeMap::new(), BTreeMap::new());
        for scenario in scenarios {
            let rows: Vec<&Row> = rows.iter().filter(|row| row.scenario == scenario.name).collect();
            let mut ranges: ByName<ByName<Range>> = BTreeMap::new();
            let (mut against, mut steady_against) = (BTreeMap::new(), BTreeMap::new());
            for target in targets {
                ranges.insert(target.name.clone(), ranges_of(&rows, &target.name));
                if target.kind != Kind::Direct {
                    against
                        .insert(target.name.clone(), ratios_of(&rows, &target.name, scenario.unit));
                }
            }
            for target in ranges.keys() {
                let middle = |name: &str| Some(ranges.get(name)?.get(YARDSTICK)?.median);
                let others = PEERS.into_iter().filter(|peer| peer != target);
                let ratio = |peer: &str| Some((peer.to_owned(), middle(target)? / middle(peer)?));
                steady_against.insert(target.clone(), others.filter_map(ratio).collect());
            }
            summary.insert(scenario.name.to_owned(), ranges);
            steady_ratios.insert(scenario.name.to_owned(), steady_against);
            ratios.insert(scenario.name.to_owned(), against);
        }
        let named =
            |target: &Target| Named { name: target.name.clone(), what: version(&target.kind) };
        Results {
            schema: "forebay-bench-compare-1",
            date: today(),
            commit: commit(),
            command: std::env::args()
                .skip(1)
                .fold("forebay-bench".to_owned(), |line, word| line + " " + &word),
            machine: machine(),
            warmup_s: length.warmup.as_secs_f64(),
            window_s: length.window.as_secs_f64(),
            cut_short,
            targets: targets.iter().map(named).collect(),
            scenarios: scenarios
                .iter()
                .map(|scenario| Named {
                    name: scenario.name.to_owned(),
                    what: scenario.what.to_owned(),
                })
                .collect(),
            failures,
            summary,
            ratios,
            steady_ratios,
            rows,
            units: scenarios.iter().map(|scenario| scenario.unit).collect(),
        }
    }

    /// The same for people.
    pub fn markdown(&self) -> String {
        let mut text = format!("# Comparison of {}, commit {}\n\n", self.date, self.commit);
        let Machine { cpu, cpus, memory_mib, kernel } = &self.machine;
        let _ = writeln!(text, "- machine: {cpus} × {cpu}, {memory_mib} MiB; kernel {kernel}");
        let _ = writeln!(text, "- command: `{}`", self.command);
        let _ = writeln!(
            text,
            "- each cell: median (smallest–largest) over rounds of {:.1} s after {:.1} s of warm-up; the generator and the mock share the CPUs with the target",
            self.window_s, self.warmup_s
        );
        for target in &self.targets {
            let _ = writeln!(text, "- {}: {}", target.name, target.what);
        }
        if self.cut_short {
            text += "- **cut short**: time ran out before the last round\n";
        }
        let foreign: Vec<f64> =
            self.rows.iter().filter_map(|row| row.numbers.get("foreign_cores").copied()).collect();
        if let Some(range) = Range::of(foreign).filter(|range| range.median > super::FOREIGN_MAX) {
            let cell = range.cell(1.0);
            let _ = writeln!(
                text,
                "- **disturbed**: others on the machine used {cell} cores meanwhile, so costs and delays are too high and spread out"
            );
        }
        for failure in &self.failures {
            let _ = writeln!(text, "- **failed**: {}", failure.replace('\n', " "));
        }
        self.put_summary(&mut text);
        for (scenario, unit) in self.scenarios.iter().zip(&self.units) {
            let _ = writeln!(text, "\n## {}\n\n{}\n", scenario.name, scenario.what);
            self.table(&mut text, &scenario.name, *unit);
        }
        text
    }

    /// What each Forebay costs as a share of what each peer costs.
    fn put_summary(&self, text: &mut String) {
        let is_peer = |name: &str| name == DIRECT || PEERS.contains(&name);
        let ours: Vec<&str> =
            self.targets.iter().map(|target| &*target.name).filter(|name| !is_peer(name)).collect();
        let peers: Vec<&str> = PEERS
            .into_iter()
            .filter(|peer| self.targets.iter().any(|target| target.name == *peer))
            .collect();
        if ours.is_empty() || peers.is_empty() {
            return;
        }
        *text += "\n## Costs as a share of each peer's\n\nCPU per chunk or request, memory per stream. First the median of the ratios within rounds; then, behind the slash, the ratio of the medians of CPU per yardstick, which is the CPU of mock and generator in the same window: they do the same work for every target, so this one hardly depends on who else uses the machine.\n\n";
        let titles: Vec<String> = ours
            .iter()
            .flat_map(|name| peers.iter().map(move |peer| format!("{name} × {peer}")))
            .collect();
        let _ =
            writeln!(text, "| | {} |\n|---|{}", titles.join(" | "), "---|".repeat(titles.len()));
        for scenario in &self.scenarios {
            let cell = |name: &str, peer: &str| {
                let median = self.ratios.get(&scenario.name)?.get(name)?.get(peer)?.median;
                let steady = self.steady_ratios.get(&scenario.name)?.get(name)?.get(peer);
                let steady = steady.map_or(String::new(), |steady| format!(" / {steady:.2}"));
                Some(format!("{median:.2}{steady}"))
            };
            let cells: Vec<String> = ours
                .iter()
                .flat_map(|name| peers.iter().map(move |peer| cell(name, peer).unwrap_or_default()))
                .collect();
            let _ = writeln!(text, "| {} | {} |", scenario.name, cells.join(" | "));
        }
    }

    fn table(&self, text: &mut String, scenario: &str, unit: Unit) {
        let columns: &[(&str, &str, f64)] = match unit {
            Unit::Chunk => &[
                ("CPU µs/chunk", "cpu_us_per_chunk", 1.0),
                ("CPU per yardstick", YARDSTICK, 1.0),
                ("syscalls/chunk", "syscalls_per_chunk", 1.0),
                ("switches/chunk", "switches_per_chunk", 1.0),
                ("transit p50 µs", "transit_p50_us", 1.0),
                ("added transit p50 µs", "added_transit_p50_us", 1.0),
                ("added transit p99 µs", "added_transit_p99_us", 1.0),
                ("gap p99 ms", "gap_p99_us", 1000.0),
                ("added gap p99 µs", "added_gap_p99_us", 1.0),
                ("chunks joined", "joined_share", 1.0),
                ("others' cores", "foreign_cores", 1.0),
            ],
            Unit::Request => &[
                ("CPU µs/request", "cpu_us_per_request", 1.0),
                ("CPU per yardstick", YARDSTICK, 1.0),
                ("requests/s/core", "requests_per_core_s", 1.0),
                ("syscalls/request", "syscalls_per_request", 1.0),
                ("switches/request", "switches_per_request", 1.0),
                ("requests/s", "requests_per_s", 1.0),
                ("ttft p50 µs", "ttft_p50_us", 1.0),
                ("added ttft p50 µs", "added_ttft_p50_us", 1.0),
                ("added ttft p99 µs", "added_ttft_p99_us", 1.0),
                ("total p50 µs", "total_p50_us", 1.0),
                ("added total p50 µs", "added_total_p50_us", 1.0),
                ("added total p99 µs", "added_total_p99_us", 1.0),
                ("others' cores", "foreign_cores", 1.0),
            ],
            Unit::Stream => &[
                ("PSS KiB/stream", "pss_kib_per_stream", 1.0),
                ("RSS KiB/stream", "rss_kib_per_stream", 1.0),
                ("PSS at start MiB", "pss_start_kib", 1024.0),
                ("RSS at start MiB", "rss_start_kib", 1024.0),
            ],
        };
        let Some(summary) = self.summary.get(scenario) else { return };
        let seen = |key: &str| summary.values().any(|numbers| numbers.contains_key(key));
        let columns: Vec<_> = columns.iter().filter(|(_, key, _)| seen(key)).collect();
        let peers: Vec<&str> =
            PEERS.into_iter().filter(|peer| summary.contains_key(*peer)).collect();
        let titles = columns.iter().map(|(title, ..)| (*title).to_owned());
        let titles: Vec<String> =
            titles.chain(peers.iter().map(|peer| format!("× {peer}"))).collect();
        let _ =
            writeln!(text, "| | {} |\n|---|{}", titles.join(" | "), "---|".repeat(titles.len()));
        for target in &self.targets {
            let Some(numbers) = summary.get(&target.name).filter(|numbers| !numbers.is_empty())
            else {
                continue;
            };
            let cells = columns.iter().map(|(_, key, scale)| {
                numbers.get(*key).map_or(String::new(), |range| range.cell(*scale))
            });
            let ratios = self.ratios.get(scenario).and_then(|ratios| ratios.get(&target.name));
            let ratio = |peer: &&str| {
                ratios
                    .and_then(|ratios| ratios.get(*peer))
                    .map_or(String::new(), |range| range.cell(1.0))
            };
            let cells: Vec<String> = cells.chain(peers.iter().map(ratio)).collect();
            let _ = writeln!(text, "| {} | {} |", target.name, cells.join(" | "));
        }
    }

    /// Writes `<date>-<commit>[-quick].json` and `.md` into `folder`, never over an older pair.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn write(&self, folder: &Path, markdown: &str, quick: bool) -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let name = format!("{}-{}{}", self.date, self.commit, if quick { "-quick" } else { "" });
        let names =
            std::iter::once(name.clone()).chain((2..).map(|count| format!("{name}-{count}")));
        let Some(name) =
            names.into_iter().find(|name| !folder.join(format!("{name}.json")).exists())
        else {
            return Ok(());
        };
        let json = folder.join(format!("{name}.json"));
        fs::write(&json, serde_json::to_string_pretty(self)? + "\n")?;
        fs::write(folder.join(format!("{name}.md")), markdown)?;
        eprintln!("written to {} and .md", json.display());
        Ok(())
    }
}

/// Every number of a target over the rounds, and what it adds to going direct in the same round.
fn ranges_of(rows: &[&Row], target: &str) -> ByName<Range> {
    let mut values: ByName<Vec<f64>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.target == target) {
        let direct = of_round(rows, DIRECT, row.round).filter(|_| target != DIRECT);
        for (name, value) in &row.numbers {
            values.entry(name.clone()).or_default().push(*value);
            let base = direct.and_then(|direct| direct.get(name)).filter(|_| name.ends_with("_us"));
            if let Some(base) = base {
                values.entry(format!("added_{name}")).or_default().push(value - base);
            }
        }
    }
    values.into_iter().filter_map(|(name, values)| Some((name, Range::of(values)?))).collect()
}

/// The number that ratios are of.
fn cost(unit: Unit) -> &'static str {
    match unit {
        Unit::Chunk => "cpu_us_per_chunk",
        Unit::Request => "cpu_us_per_request",
        Unit::Stream => "pss_kib_per_stream",
    }
}

fn ratios_of(rows: &[&Row], target: &str, unit: Unit) -> ByName<Range> {
    let key = cost(unit);
    let ratio = |peer: &str| {
        let mine = rows.iter().filter(|row| row.target == target);
        let ratios = mine.filter_map(|row| {
            Some(row.numbers.get(key)? / of_round(rows, peer, row.round)?.get(key)?)
        });
        Range::of(ratios.collect())
    };
    PEERS
        .into_iter()
        .filter(|peer| *peer != target)
        .filter_map(|peer| Some((peer.to_owned(), ratio(peer)?)))
        .collect()
}

/// The numbers of a target's main measurement in a round.
fn of_round<'a>(rows: &[&'a Row], target: &str, round: usize) -> Option<&'a Numbers> {
    let mut of_target = rows.iter().filter(|row| row.target == target && row.round == round);
    // The count of system calls is a row of its own.
    of_target.find(|row| row.numbers.len() > 1).map(|row| &row.numbers)
}

fn machine() -> Machine {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, label: &str| {
        let line = text.lines().find(|line| line.starts_with(label));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned())).unwrap_or_default()
    };
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    Machine {
        cpu: field(&read("/proc/cpuinfo"), "model name"),
        cpus: std::thread::available_parallelism().map_or(0, usize::from),
        memory_mib: memory
            .split_whitespace()
            .next()
            .and_then(|kib| kib.parse().ok())
            .unwrap_or(0_u64)
            / 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
    }
}

/// The commit that is checked out, marked when tracked files differ from it.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output =
            Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(arguments).output();
        output
            .ok()
            .filter(|output| output.status.success())
            .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else { return "unknown".to_owned() };
    let clean = git(&["status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|changes| changes.is_empty());
    if clean { commit } else { commit + "-dirty" }
}

/// UTC, as `2026-01-31`.
fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (year, month, day) = civil(seconds / 86_400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Year, month and day of a number of days since 1970-01-01, by counting in eras of 400 years that
/// begin in March (Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    (era * 400 + year, month, day)
}

#[cfg(test)]
mod tests {
    //! Medians, ratios within rounds, and dates.
    use super::{Range, Row, Unit, civil, ranges_of, ratios_of};
    use std::collections::BTreeMap;

    fn row(target: &str, round: usize, cpu: f64, gap: f64) -> Row {
        let numbers =
            BTreeMap::from([("cpu_us_per_chunk".to_owned(), cpu), ("gap_p99_us".to_owned(), gap)]);
        Row { scenario: String::new(), target: target.to_owned(), round, numbers }
    }

    #[test]
    fn a_range_is_its_median_and_its_ends() {
        assert_eq!(
            Range::of(vec![3.0, 1.0, f64::NAN, 2.0]),
            Some(Range { min: 1.0, median: 2.0, max: 3.0 })
        );
        assert_eq!(Range::of(vec![4.0, 1.0]), Some(Range { min: 1.0, median: 2.5, max: 4.0 }));
        assert_eq!(Range::of(vec![f64::INFINITY]), None);
    }

    #[test]
    fn ratios_and_additions_are_taken_within_a_round() {
        let rows = [
            row("direct", 0, 0.0, 100.0),
            row("direct", 1, 0.0, 200.0),
            row("nginx", 0, 10.0, 150.0),
            row("nginx", 1, 20.0, 210.0),
            row("x", 0, 5.0, 1.0),
            row("x", 1, 16.0, 1.0),
        ];
        let rows: Vec<&Row> = rows.iter().collect();
        let ratios = ratios_of(&rows, "x", Unit::Chunk);
        assert_eq!(ratios["nginx"], Range { min: 0.5, median: 0.65, max: 0.8 });
        assert_eq!(
            ranges_of(&rows, "nginx")["added_gap_p99_us"],
            Range { min: 10.0, median: 30.0, max: 50.0 }
        );
    }

    #[test]
    fn days_become_dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(20_514), (2026, 3, 2));
    }
}
