//! The command line: `run`, `check`, `keys`, `usage`, `demo`, `mock`.

mod ask;

use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use sha2::{Digest, Sha256};

use crate::control::{self, Loaded, Options, Source, contents};
use crate::mock::{self, Mock, MockArgs, Script};
use crate::pure::board::Registry;
use crate::pure::plan::MadeKeys;
use crate::rt::Driver;

/// Parses the process's arguments and does what they say.
pub fn main() -> ExitCode {
    match Cli::parse().command {
        Command::Run(args) => {
            let source = Source::File(args.config);
            control::run(source, args.tuning.options())
        }
        Command::Check(args) => check(args.config),
        Command::Keys(args) => keys(&args),
        Command::Usage(args) => usage(&args),
        Command::Demo(args) => demo(&args),
        Command::Mock(args) => match mock::run(&args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tell(&format!("error: {error}\n"));
                ExitCode::FAILURE
            }
        },
    }
}

/// An LLM inference gateway: OpenAI's API in front of your own GPUs.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, about, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the gateway until SIGTERM. SIGHUP reads the file again.
    Run(RunArgs),
    /// Read a configuration, name every problem in it, and bind nothing.
    Check(CheckArgs),
    /// List, make, rotate and revoke keys of a gateway that runs, by its admin port.
    Keys(KeysArgs),
    /// What was used: by each tenant since the gateway started, or by days and more (`--by`).
    Usage(UsageArgs),
    /// Run a gateway with two built-in backends on this machine, to try it.
    Demo(DemoArgs),
    /// Run a scripted backend that speaks OpenAI's API, without a GPU.
    Mock(Box<MockArgs>),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The configuration, YAML or JSON.
    #[arg(long, short, value_name = "FILE")]
    config: PathBuf,
    #[command(flatten)]
    tuning: Tuning,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// The configuration, YAML or JSON.
    #[arg(long, short, value_name = "FILE")]
    config: PathBuf,
}

#[derive(Debug, Args)]
struct DemoArgs {
    /// Where the gateway listens on 127.0.0.1; 0 takes a free port.
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    #[command(flatten)]
    tuning: Tuning,
}

/// What does not belong in the file, because it is a matter of the machine.
#[derive(Debug, Args)]
struct Tuning {
    /// How shards talk to the kernel; `auto` takes the first that works.
    #[arg(long, value_enum, default_value_t = DriverChoice::Auto)]
    driver: DriverChoice,
    /// Let shards float over the CPUs instead of pinning each to one.
    #[arg(long)]
    no_pin: bool,
    /// Write the access log to this file, opened again on SIGHUP, instead of standard output.
    #[arg(long, value_name = "FILE", env = "FOREBAY_ACCESS_LOG")]
    access_log: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DriverChoice {
    Auto,
    /// io_uring with SINGLE_ISSUER and DEFER_TASKRUN (Linux 6.1)
    Uring,
    /// io_uring without flags (Linux 5.11)
    UringPlain,
    /// epoll, where io_uring is denied
    Epoll,
}

impl Tuning {
    fn options(&self) -> Options {
        Options {
            driver: match self.driver {
                DriverChoice::Auto => None,
                DriverChoice::Uring => Some(Driver::UringDefer),
                DriverChoice::UringPlain => Some(Driver::Uring),
                DriverChoice::Epoll => Some(Driver::Epoll),
            },
            unpinned: self.no_pin,
            access_log: self.access_log.clone().filter(|path| !path.as_os_str().is_empty()),
            serving: None,
        }
    }
}

#[derive(Debug, Args)]
struct KeysArgs {
    /// The gateway's configuration: it says where the admin port is, and its token.
    #[arg(long, short, value_name = "FILE", global = true, default_value = "forebay.yaml")]
    config: PathBuf,
    #[command(subcommand)]
    what: KeysCommand,
}

#[derive(Debug, Subcommand)]
enum KeysCommand {
    /// Every key, from the file and made at run time.
    List,
    /// Make a key. It is printed once and kept as a digest.
    Create {
        /// What the key is called in logs and limits.
        id: String,
        /// The tenant who pays.
        #[arg(long)]
        tenant: String,
        /// Limits of its own, as the file would say them: '{"rpm": 60}'.
        #[arg(long, value_name = "JSON")]
        rate_limit: Option<String>,
        /// Models that it may use, of those that its tenant may.
        #[arg(long, value_delimiter = ',')]
        models: Vec<String>,
        /// Models that it may not use.
        #[arg(long, value_delimiter = ',')]
        deny_models: Vec<String>,
    },
    /// Replace a key by a new one; the old one ends at once.
    Rotate { id: String },
    /// End a key.
    Revoke { id: String },
}

#[derive(Debug, Args)]
struct UsageArgs {
    /// The gateway's configuration.
    #[arg(long, short, value_name = "FILE", default_value = "forebay.yaml")]
    config: PathBuf,
    /// Of this tenant alone.
    #[arg(long)]
    tenant: Option<String>,
    /// Tells usage apart by some of `day,tenant,key,model,route`, over restarts where `state.dir` is
    /// set.
    #[arg(long, value_name = "NAMES")]
    by: Option<String>,
    /// From this day on (UTC), with `--by`.
    #[arg(long, value_name = "YYYY-MM-DD", requires = "by")]
    from: Option<String>,
    /// Up to this day.
    #[arg(long, value_name = "YYYY-MM-DD", requires = "by")]
    to: Option<String>,
    /// JSON instead of CSV.
    #[arg(long)]
    json: bool,
}

fn keys(args: &KeysArgs) -> ExitCode {
    let id = |id: &str| ask::escape(id);
    let (method, path, body) = match &args.what {
        KeysCommand::List => ("GET", "/keys".to_owned(), None),
        KeysCommand::Rotate { id: key } => ("POST", format!("/keys/{}/rotate", id(key)), None),
        KeysCommand::Revoke { id: key } => ("DELETE", format!("/keys/{}", id(key)), None),
        KeysCommand::Create { id, tenant, rate_limit, models, deny_models } => {
            let mut key = serde_json::json!({ "id": id, "tenant": tenant });
            if let Some(limits) = rate_limit {
                match serde_json::from_str::<serde_json::Value>(limits) {
                    Ok(limits) => key["rate_limit"] = limits,
                    Err(error) => {
                        tell(&format!("error: --rate-limit is no JSON: {error}\n"));
                        return ExitCode::FAILURE;
                    }
                }
            }
            for (name, list) in [("models", models), ("deny_models", deny_models)] {
                if !list.is_empty() {
                    key[name] = serde_json::json!(list);
                }
            }
            ("POST", "/keys".to_owned(), Some(key.to_string()))
        }
    };
    show(ask::ask(&args.config, method, &path, body.as_deref()))
}

fn usage(args: &UsageArgs) -> ExitCode {
    let mut path = format!("/usage?format={}", if args.json { "json" } else { "csv" });
    let UsageArgs { tenant, by, from, to, .. } = args;
    for (name, value) in [("tenant", tenant), ("by", by), ("from", from), ("to", to)] {
        if let Some(value) = value {
            path.push_str(&format!("&{name}={}", ask::escape(value)));
        }
    }
    show(ask::ask(&args.config, "GET", &path, None))
}

/// Prints what the admin port said: to standard output if it did what was asked.
fn show(answer: Result<ask::Answer, String>) -> ExitCode {
    match answer {
        Ok(answer) if answer.status < 300 => {
            let _ = io::stdout().write_all(answer.body.as_bytes());
            ExitCode::SUCCESS
        }
        Ok(answer) => {
            tell(&format!("error: the gateway answers {}: {}", answer.status, answer.body));
            ExitCode::FAILURE
        }
        Err(why) => {
            tell(&format!("error: {why}\n"));
            ExitCode::FAILURE
        }
    }
}

fn tell(text: &str) {
    // Nobody to tell is no reason to fail.
    let _ = io::stderr().write_all(text.as_bytes());
}

fn check(path: PathBuf) -> ExitCode {
    let source = Source::File(path);
    match source.load(&MadeKeys::default(), &mut Registry::new()) {
        Ok(Loaded { plan, .. }) => {
            let mut text = String::new();
            for notice in &plan.notices {
                text.push_str(&format!("{}: {notice}\n", notice.severity.word()));
            }
            if plan.open() {
                text.push_str("open: no keys are configured, so anybody may use this gateway\n");
            }
            text.push_str(&format!("{}: fine; {}\n", source.name(), contents(&plan)));
            tell(&text);
            ExitCode::SUCCESS
        }
        Err(no_plan) => {
            tell(&no_plan.report(&source.name()));
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &DemoArgs) -> ExitCode {
    let backends: io::Result<Vec<Mock>> = (0..2).map(|_| mock::start(Script::default())).collect();
    let backends = match backends {
        Ok(backends) => backends,
        Err(error) => {
            tell(&format!("error: the demo's backends do not start: {error}\n"));
            return ExitCode::FAILURE;
        }
    };
    let urls: Vec<String> = backends.iter().map(Mock::url).collect();
    let source = Source::Text(demo_config(args.port, &urls));
    let serving = Box::new(|addresses: &[SocketAddr]| {
        if let Some(address) = addresses.first() {
            tell(&invitation(*address));
        }
    });
    // The backends live until the gateway has ended.
    control::run(source, Options { serving: Some(serving), ..args.tuning.options() })
}

/// What the demo runs on, readable as an example.
fn demo_config(port: u16, backends: &[String]) -> String {
    let backends: Vec<String> = backends
        .iter()
        .enumerate()
        .map(|(index, url)| format!("      - {{ name: demo-{}, url: \"{url}\" }}", index + 1))
        .collect();
    let digest: String =
        Sha256::digest(DEMO_KEY).iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "server: {{ listen: \"127.0.0.1:{port}\", shards: 2 }}
admin: {{ listen: \"127.0.0.1:0\" }}
pools:
  demo:
    backends:
{}
models:
  {DEMO_MODEL}: {{ aliases: [gpt-demo] }}
routes:
  - name: demo
    match: {{ model: [{DEMO_MODEL}] }}
    pool: demo
    strategy: least-requests
    retry: {{ attempts: 1, budget: 20% }}
tenants:
  demo: {{}}
keys:
  - {{ id: demo, tenant: demo, sha256: {digest} }}
",
        backends.join("\n")
    )
}

const DEMO_KEY: &str = "demo";
const DEMO_MODEL: &str = "demo-model";

fn invitation(address: SocketAddr) -> String {
    format!(
        "
Try it (Ctrl-C ends the demo):

  curl -N http://{address}/v1/chat/completions \\
    -H 'Authorization: Bearer {DEMO_KEY}' -H 'Content-Type: application/json' \\
    -d '{{\"model\":\"{DEMO_MODEL}\",\"stream\":true,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'

  python3 -c \"from openai import OpenAI; c = OpenAI(base_url='http://{address}/v1', \
         api_key='{DEMO_KEY}'); [print(e.choices[0].delta.content or '', end='', flush=True) for e in \
         c.chat.completions.create(model='{DEMO_MODEL}', stream=True, \
         messages=[{{'role': 'user', 'content': 'Hello'}}]) if e.choices]\"

"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn tuning_is_what_the_flags_say() {
        let parse = |args: &[&str]| {
            let all = ["forebay", "run", "--config", "f.yaml"].iter().chain(args);
            match Cli::try_parse_from(all).map(|cli| cli.command) {
                Ok(Command::Run(args)) => args.tuning.options(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(parse(&[]).driver, None);
        assert_eq!(parse(&["--driver", "uring"]).driver, Some(Driver::UringDefer));
        assert_eq!(parse(&["--driver", "uring-plain"]).driver, Some(Driver::Uring));
        assert_eq!(parse(&["--driver", "epoll"]).driver, Some(Driver::Epoll));
        assert!(parse(&["--no-pin"]).unpinned && !parse(&[]).unpinned);
        assert_eq!(parse(&["--access-log", "/x"]).access_log, Some("/x".into()));
    }

    #[test]
    fn the_demos_configuration_is_accepted_without_a_notice() {
        let urls = ["http://127.0.0.1:9001".to_owned(), "http://127.0.0.1:9002".to_owned()];
        let source = Source::Text(demo_config(0, &urls));
        let plan =
            source.load(&MadeKeys::default(), &mut Registry::new()).expect("the demo's plan").plan;
        assert_eq!(plan.notices, []);
        assert_eq!(plan.backends.len(), 2);
        assert!(!plan.open());
        assert!(plan.key(&Sha256::digest(DEMO_KEY).into()).is_some());
    }

    #[test]
    fn the_invitation_holds_a_body_that_is_json() {
        let text = invitation("127.0.0.1:8080".parse().expect("an address"));
        let from = text.find("-d '").expect("a body") + 4;
        let body = &text[from..from + text[from..].find('\'').expect("its end")];
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["stream"], true);
    }
}
