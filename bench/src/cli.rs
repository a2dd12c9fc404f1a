//! The command line.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::compare::Compare;
use crate::load::{self, Mark, Options, Pace, Report, Spread};
use crate::process;
use crate::wire::Script;

/// Load, a scripted backend, and Forebay beside its peers.
#[derive(Parser)]
#[command(name = "forebay-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Put load on a target and check every answer.
    Load(Load),
    /// Run the scripted backend.
    Mock(Mock),
    /// Run the plain hyper proxy.
    HyperProxy {
        /// Where to listen.
        listen: SocketAddr,
        /// Where requests go.
        backend: SocketAddr,
        /// Worker threads.
        #[arg(long, default_value = "2")]
        workers: NonZeroUsize,
    },
    /// Run the floor: bytes relayed on Forebay's runtime, and nothing known of them.
    Floor {
        /// Where to listen.
        listen: SocketAddr,
        /// Where bytes go.
        backend: SocketAddr,
        /// Worker threads, each on a CPU of its own.
        #[arg(long, default_value = "2")]
        workers: NonZeroUsize,
    },
    /// Measure Forebay and its peers side by side.
    Compare(Compare),
    /// Become another program that ends with the one that started it.
    #[command(hide = true)]
    Guard {
        /// The program and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
}

#[derive(Args)]
struct Load {
    /// Where to, as ADDRESS:PORT.
    target: SocketAddr,
    /// The request's target.
    #[arg(long, default_value = "/v1/chat/completions")]
    path: String,
    /// API key, sent as a bearer token.
    #[arg(long)]
    key: Option<String>,
    /// Ask for streams.
    #[arg(long)]
    stream: bool,
    /// Ask for usage in streams.
    #[arg(long)]
    include_usage: bool,
    /// Connections; in open loop the most there may be.
    #[arg(short, long, default_value_t = 50)]
    connections: usize,
    /// Open loop: this many requests a second, timed from when they should have left.
    #[arg(short, long)]
    rate: Option<f64>,
    /// Open loop: a Poisson process instead of even gaps.
    #[arg(long, requires = "rate")]
    poisson: bool,
    /// Each connection asks once; the window opens when all have their first chunk.
    #[arg(long, conflicts_with = "rate")]
    once: bool,
    /// A new connection for every request.
    #[arg(long)]
    fresh: bool,
    /// Seconds before the window.
    #[arg(long, default_value_t = 1.0)]
    warmup: f64,
    /// Seconds that are measured.
    #[arg(short, long, default_value_t = 5.0)]
    duration: f64,
    /// Seconds one answer may take.
    #[arg(long, default_value_t = 30.0)]
    timeout: f64,
    #[command(flatten)]
    script: ScriptArgs,
    /// Bytes of padding in the prompt.
    #[arg(long, default_value_t = 64)]
    prompt: usize,
    /// Also report the CPU of this process and its descendants; may be repeated.
    #[arg(long)]
    watch: Vec<u32>,
    /// Also write the report as JSON to this file; `-` is standard output.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Args)]
struct Mock {
    /// Where to listen.
    #[arg(default_value = "127.0.0.1:18100")]
    listen: SocketAddr,
    #[command(flatten)]
    script: ScriptArgs,
}

/// What a request does not say itself.
#[derive(Args)]
struct ScriptArgs {
    /// Content chunks of a stream.
    #[arg(long, default_value_t = 100)]
    tokens: u32,
    /// Bytes of an event, or of a plain answer's body (at least what the fields need).
    #[arg(long)]
    size: Option<u32>,
    /// Microseconds between chunks.
    #[arg(long, default_value_t = 10_000)]
    interval_us: u32,
    /// Microseconds before the first chunk or the plain answer.
    #[arg(long, default_value_t = 0)]
    first_us: u32,
    /// Fall silent after this many chunks.
    #[arg(long, default_value_t = 0)]
    hold_at: u32,
    /// … for this many microseconds.
    #[arg(long, default_value_t = 0)]
    hold_us: u32,
}

impl ScriptArgs {
    fn script(&self, stream: bool) -> Script {
        Script {
            tokens: self.tokens,
            size: self.size.unwrap_or(if stream { 200 } else { 400 }),
            interval_us: self.interval_us,
            first_us: self.first_us,
            hold_at: self.hold_at,
            hold_us: self.hold_us,
        }
    }
}

/// Runs the command line's command.
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Load(args) => load(&args),
        Command::Mock(args) => {
            crate::mock::serve(args.listen, args.script.script(true)).map(|()| true)
        }
        Command::HyperProxy { listen, backend, workers } => {
            crate::proxy::serve(listen, backend, workers).map(|()| true)
        }
        Command::Floor { listen, backend, workers } => {
            crate::floor::serve(listen, backend, workers).map(|()| true)
        }
        Command::Compare(args) => crate::compare::run(&args),
        Command::Guard { command } => guard(&command).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("forebay-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Only returns if the program cannot be run.
fn guard(command: &[OsString]) -> io::Result<()> {
    let Some((program, arguments)) = command.split_first() else { return Ok(()) };
    // The kernel forgets this on fork but keeps it over exec.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
    let error = std::process::Command::new(program).args(arguments).exec();
    Err(io::Error::new(error.kind(), format!("{}: {error}", program.display())))
}

/// Gives whether every answer was right.
fn load(args: &Load) -> io::Result<bool> {
    let options = Options {
        addr: args.target,
        path: args.path.clone(),
        key: args.key.clone(),
        stream: args.stream,
        include_usage: args.include_usage,
        script: args.script.script(args.stream),
        prompt: args.prompt,
        pace: match args.rate {
            Some(rate) => Pace::Open { rate, poisson: args.poisson },
            None if args.once => Pace::Once,
            None => Pace::Closed,
        },
        connections: args.connections,
        fresh: args.fresh,
        warmup: Duration::from_secs_f64(args.warmup),
        window: Duration::from_secs_f64(args.duration),
        timeout: Duration::from_secs_f64(args.timeout),
    };
    let watched: Vec<u32> = args.watch.iter().flat_map(|&pid| process::family(pid)).collect();
    let mut readings = Vec::new();
    let report = load::run(&options, &mut |_: Mark| readings.push(process::spent(&watched)))?;
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report)?;
        if path.as_os_str() == "-" {
            println!("{json}");
        } else {
            std::fs::write(path, json)?;
        }
    }
    print!("{}", human(&report));
    if let [before, after] = readings[..]
        && !watched.is_empty()
    {
        let cpu_us = (after.cpu_ns - before.cpu_ns) as f64 / 1000.0;
        let switches = (after.switches - before.switches) as f64;
        print!("watched       {:.2} cores", cpu_us / 1e6 / report.window_s);
        // In a plain answer the only chunk is the request.
        let chunks = if args.stream { report.chunks } else { 0 };
        for (unit, count) in [("request", report.requests), ("chunk", chunks)] {
            if count > 0 {
                let count = count as f64;
                print!(
                    "; {:.2} us and {:.2} switches per {unit}",
                    cpu_us / count,
                    switches / count
                );
            }
        }
        println!();
    }
    Ok(report.wrong == 0)
}

fn human(report: &Report) -> String {
    let per_second = |count: u64| count as f64 / report.window_s;
    let mut text = format!(
        "window        {:.2} s, generator {:.2} cores, {} connections made\nrequests      {} ({:.0}/s)\nchunks        {} ({:.0}/s), {} read together with another\nanswers       {} right, {} wrong\n",
        report.window_s,
        report.generator_cores,
        report.connects,
        report.requests,
        per_second(report.requests),
        report.chunks,
        per_second(report.chunks),
        report.joined,
        report.right,
        report.wrong,
    );
    for fault in &report.faults {
        text += &format!("fault         {fault}\n");
    }
    text += "us                    p50        p90        p99      p99.9        max      count\n";
    let rows = [
        ("ttft", &report.ttft_us),
        ("total", &report.total_us),
        ("transit", &report.transit_us),
        ("gap", &report.gap_us),
        ("lag", &report.lag_us),
    ];
    for (name, spread) in rows {
        if spread.count > 0 {
            let Spread { p50, p90, p99, p999, max, count, .. } = spread;
            text += &format!(
                "{name:<14}{p50:>11.1}{p90:>11.1}{p99:>11.1}{p999:>11.1}{max:>11.1}{count:>11}\n"
            );
        }
    }
    text
}
