//! Forebay beside nginx, HAProxy and a plain hyper proxy, on one mock, in one run.
//!
//! Rounds are interleaved (A B C, B C A, …), so that a machine that speeds up or slows down does so
//! for all; every figure is the median over rounds with the smallest and largest beside it, and
//! ratios are taken within a round. A measurement that others on the machine disturbed is taken
//! again, at most twice, and says how much was left.

mod report;
mod scenario;
mod target;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use crate::process;
use report::{Results, Row};
use scenario::{Length, Numbers, Scenario, Unit};
use target::{Kind, Running, Target};

/// More CPU than this used by others in a window, in cores, and the window is measured again.
const FOREIGN_MAX: f64 = 0.12;
const RETRIES_MAX: usize = 2;
/// After so many measurements that trying again did not help, trying again stops.
const VAIN_MAX: usize = 8;

/// The command line of `compare`.
#[derive(Args, Debug)]
pub struct Compare {
    /// A Forebay binary, as PATH or NAME=PATH; may be repeated to compare builds.
    #[arg(long)]
    forebay: Vec<String>,
    /// Forebay's drivers.
    #[arg(long, value_delimiter = ',', default_value = "uring,epoll")]
    drivers: Vec<String>,
    /// Only these peers.
    #[arg(long, value_delimiter = ',', default_value = "direct,nginx,haproxy,hyper,floor")]
    peers: Vec<String>,
    /// Only these scenarios.
    #[arg(long, value_delimiter = ',')]
    scenarios: Vec<String>,
    /// About two minutes instead of ten.
    #[arg(long)]
    quick: bool,
    /// Rounds.
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of one measurement.
    #[arg(long)]
    window: Option<f64>,
    /// Take disturbed measurements as they are; for a machine that is never quiet.
    #[arg(long)]
    noisy: bool,
    /// Seconds, all together, that may be spent waiting for others on the machine to be quiet
    /// before a disturbed measurement is taken again.
    #[arg(long, default_value_t = 0.0)]
    patience: f64,
    /// Where the result files go; `-` writes none.
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/results"))]
    out: PathBuf,
}

/// Runs the comparison and writes its results; gives whether every target did its part.
///
/// # Errors
/// The mock does not start, or a result file cannot be written.
pub fn run(args: &Compare) -> io::Result<bool> {
    let begun = Instant::now();
    let (rounds, window, deadline) = if args.quick { (3, 0.8, 200) } else { (5, 2.5, 780) };
    let rounds = args.rounds.unwrap_or(rounds);
    let window = Duration::from_secs_f64(args.window.unwrap_or(window));
    let length = Length { warmup: (window / 3).max(Duration::from_millis(300)), window };
    let patience = Duration::from_secs_f64(args.patience);
    let deadline = begun + Duration::from_secs(deadline) + patience;
    let targets = targets(args)?;
    let scenarios: Vec<Scenario> = scenario::all()
        .into_iter()
        .filter(|scenario| {
            if args.scenarios.is_empty() {
                !(args.quick && scenario.full_only)
            } else {
                args.scenarios.iter().any(|name| name == scenario.name)
            }
        })
        .collect();
    let mock = Running::mock()?;
    let mut run =
        Run { args, mock, rows: Vec::new(), failures: Vec::new(), starts: 0, patience, vain: 0 };

    let mut running: Vec<Option<Running>> =
        targets.iter().map(|target| run.start(target)).collect();
    let timed: Vec<&Scenario> =
        scenarios.iter().filter(|scenario| scenario.unit != Unit::Stream).collect();
    for scenario in timed.iter().filter(|scenario| scenario.syscalls) {
        for (target, running) in targets.iter().zip(&running) {
            if let Some(running) = running.as_ref().filter(|running| !running.pids.is_empty()) {
                let numbers = scenario.count_syscalls(running);
                run.keep(scenario, target, 0, numbers);
            }
        }
    }
    let mut cut_short = false;
    'rounds: for round in 0..rounds {
        for scenario in &timed {
            for turn in 0..targets.len() {
                // Who goes first changes from round to round.
                let at = (turn + round) % targets.len();
                let (target, Some(running)) = (&targets[at], &running[at]) else { continue };
                if Instant::now() > deadline {
                    cut_short = true;
                    break 'rounds;
                }
                progress(round, rounds, scenario, target);
                let numbers = run.measure(scenario, running, length, deadline);
                run.keep(scenario, target, round, numbers);
            }
        }
    }
    running.clear();
    let memory_rounds = if args.quick { 1 } else { 3 };
    for scenario in scenarios.iter().filter(|scenario| scenario.unit == Unit::Stream) {
        for round in 0..memory_rounds {
            for target in targets.iter().filter(|target| target.kind != Kind::Direct) {
                progress(round, memory_rounds, scenario, target);
                let Some(running) = run.start(target) else { continue };
                // Let it finish what it does at its start.
                std::thread::sleep(Duration::from_millis(300));
                let numbers = scenario.measure_memory(&running);
                run.keep(scenario, target, round, numbers);
            }
        }
    }
    eprintln!("done in {:.0} s", begun.elapsed().as_secs_f64());
    let results =
        Results::new(&targets, &scenarios, run.rows, run.failures.clone(), length, cut_short);
    let text = results.markdown();
    println!("{text}");
    if args.out.as_os_str() != "-" {
        results.write(&args.out, &text, args.quick)?;
    }
    Ok(run.failures.is_empty())
}

struct Run<'a> {
    args: &'a Compare,
    mock: Running,
    rows: Vec<Row>,
    failures: Vec<String>,
    starts: usize,
    /// What is left for waiting.
    patience: Duration,
    /// Measurements in a row that stayed disturbed however often they were taken.
    vain: usize,
}

impl Run<'_> {
    fn start(&mut self, target: &Target) -> Option<Running> {
        self.starts += 1;
        match Running::start(target, self.mock.addr, self.starts) {
            Ok(running) => Some(running),
            Err(error) => {
                self.failures.push(format!("{}: {error}", target.name));
                None
            }
        }
    }

    /// Again while others disturb, as long as there is time; the quietest try counts.
    fn measure(
        &mut self,
        scenario: &Scenario,
        running: &Running,
        length: Length,
        deadline: Instant,
    ) -> io::Result<Numbers> {
        let foreign = |numbers: &Numbers| numbers.get("foreign_cores").copied().unwrap_or(0.0);
        let mut best = scenario.measure(running, &self.mock, length)?;
        let mut retries = if self.args.noisy || self.vain >= VAIN_MAX { 0 } else { RETRIES_MAX };
        while foreign(&best) > FOREIGN_MAX && Instant::now() < deadline {
            // As long as patience lasts a quiet moment is worth another try.
            if !self.wait_for_quiet() {
                if retries == 0 {
                    break;
                }
                retries -= 1;
            }
            let again = scenario.measure(running, &self.mock, length)?;
            if foreign(&again) < foreign(&best) {
                best = again;
            }
        }
        self.vain = if foreign(&best) <= FOREIGN_MAX { 0 } else { self.vain + 1 };
        Ok(best)
    }

    /// Waits until others leave the machine alone for a moment; `false` when patience has run out.
    fn wait_for_quiet(&mut self) -> bool {
        let look = Duration::from_millis(300);
        while self.patience >= look {
            let before = process::machine_busy();
            std::thread::sleep(look);
            self.patience -= look;
            if (process::machine_busy() - before) / look.as_secs_f64() <= FOREIGN_MAX {
                return true;
            }
        }
        false
    }

    fn keep(
        &mut self,
        scenario: &Scenario,
        target: &Target,
        round: usize,
        numbers: io::Result<Numbers>,
    ) {
        match numbers {
            Ok(numbers) => self.rows.push(Row {
                scenario: scenario.name.to_owned(),
                target: target.name.clone(),
                round,
                numbers,
            }),
            Err(error) => {
                self.failures.push(format!("{} in {}: {error}", target.name, scenario.name));
            }
        }
    }
}

fn progress(round: usize, rounds: usize, scenario: &Scenario, target: &Target) {
    eprintln!("round {} of {rounds}: {:<12} {}", round + 1, scenario.name, target.name);
}

fn targets(args: &Compare) -> io::Result<Vec<Target>> {
    let mut targets = Vec::new();
    for peer in &args.peers {
        let kind = match peer.as_str() {
            "direct" => Kind::Direct,
            "nginx" => Kind::Nginx,
            "haproxy" => Kind::Haproxy,
            "hyper" => Kind::Hyper,
            "floor" => Kind::Floor,
            "none" => continue,
            other => return Err(io::Error::other(format!("no peer is called {other}"))),
        };
        targets.push(Target { name: peer.clone(), kind });
    }
    for binary in &args.forebay {
        let (name, path) = binary.split_once('=').unwrap_or(("forebay", binary));
        for driver in &args.drivers {
            let kind = Kind::Forebay { binary: PathBuf::from(path), driver: driver.clone() };
            targets.push(Target { name: format!("{name}-{driver}"), kind });
        }
    }
    let mut names = BTreeSet::new();
    if let Some(twice) = targets.iter().find(|target| !names.insert(&target.name)) {
        return Err(io::Error::other(format!("two targets are called {}", twice.name)));
    }
    Ok(targets)
}
