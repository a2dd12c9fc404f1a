//! The real process, with a configuration of its own in a folder of its own.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest as _, Sha256};

use super::{Client, KEY_A, KEY_B, PATIENCE, wait_for};

/// A configuration in parts: what most tests change is a field.
#[derive(Default)]
pub struct Setup {
    /// Backends of the pool `main`: `u1`, `u2`, …
    pub urls: Vec<String>,
    /// Further fields of `server`, of each backend, of the pool and of the route, in flow style.
    pub server: &'static str,
    pub backend: &'static str,
    pub pool: &'static str,
    pub route: &'static str,
    /// Arguments for `forebay run` beside those of the environment.
    pub args: Vec<&'static str>,
}

impl Setup {
    pub fn to(url: String) -> Setup {
        Setup { urls: vec![url], ..Setup::default() }
    }

    pub fn text(&self) -> String {
        let backends: Vec<String> = (1..)
            .zip(&self.urls)
            .map(|(number, url)| format!("{{ name: u{number}, url: '{url}', {} }}", self.backend))
            .collect();
        format!(
            "{}pools:\n  main: {{ backends: [ {} ], {} }}\nmodels:\n  m: {{ }}\nroutes:\n\
             \x20 - {{ name: chat, match: {{ model: [m] }}, pool: main, {} }}\n{}",
            server(self.server),
            backends.join(", "),
            self.pool,
            self.route,
            people()
        )
    }

    #[track_caller]
    pub fn start(&self) -> Gateway {
        Gateway::with_args(&self.text(), &self.args)
    }
}

/// `server` and `admin` on free ports.
pub fn server(more: &str) -> String {
    let shards = std::env::var("FOREBAY_TEST_SHARDS").unwrap_or_else(|_| "2".to_owned());
    format!(
        "server: {{ listen: '127.0.0.1:0', shards: {shards}, {more} }}\n\
         admin: {{ listen: '127.0.0.1:0' }}\n"
    )
}

/// Tenants `a` and `b`, and a key for each.
pub fn people() -> String {
    let digest = |key: &str| -> String {
        Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect()
    };
    format!(
        "tenants: {{ a: {{ }}, b: {{ }} }}\nkeys:\n  - {{ id: key-a, tenant: a, sha256: {} }}\n\
         \x20 - {{ id: key-b, tenant: b, sha256: {} }}\n",
        digest(KEY_A),
        digest(KEY_B)
    )
}

/// `forebay` with these arguments.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command.env("FOREBAY_TEST_PANICS", "1");
    command
}

/// A running gateway. Dropping it ends it and removes its folder.
pub struct Gateway {
    child: Child,
    pub address: SocketAddr,
    pub admin: SocketAddr,
    folder: Folder,
    errors: Lines,
    /// The access log.
    pub log: Lines,
}

impl Gateway {
    #[track_caller]
    pub fn run(config: &str) -> Gateway {
        Gateway::with_args(config, &[])
    }

    #[track_caller]
    pub fn with_args(config: &str, args: &[&str]) -> Gateway {
        let folder = Folder::new();
        let file = folder.0.join("forebay.yaml");
        std::fs::write(&file, config).expect("written");
        let mut command = command(&["run", "--no-pin", "--config"]);
        command.arg(&file).args(args);
        // What a test says itself goes before what the environment says.
        if !args.contains(&"--driver") {
            let more = std::env::var("FOREBAY_TEST_ARGS").unwrap_or_default();
            command.args(more.split_whitespace());
        }
        Gateway::spawn(command, folder)
    }

    #[track_caller]
    fn spawn(mut command: Command, folder: Folder) -> Gateway {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary was built");
        let errors = Lines::of(child.stderr.take().expect("piped"));
        let log = Lines::of(child.stdout.take().expect("piped"));
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut gateway = Gateway { child, address: nowhere, admin: nowhere, folder, errors, log };
        let banner = gateway.errors.until("\"serving\"");
        let after = |word: &str| -> Option<SocketAddr> {
            let line = banner.iter().find_map(|line| line.trim().strip_prefix(word))?;
            line.trim().strip_prefix("http://")?.parse().ok()
        };
        gateway.address = after("serves").unwrap_or_else(|| panic!("no address: {banner:#?}"));
        gateway.admin = after("admin").unwrap_or(nowhere);
        gateway
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    #[track_caller]
    pub fn client(&self) -> Client {
        Client::new(self.address)
    }

    /// One request on a connection of its own.
    #[track_caller]
    pub fn ask(&self, request: impl AsRef<[u8]>) -> super::Answer {
        let mut client = self.client();
        client.send(request);
        client.answer()
    }

    /// Replaces the file; it is not read before the next reload.
    pub fn configure(&self, config: &str) {
        // At once, so that a reload that is already under way never sees half of it.
        let fresh = self.folder.0.join("fresh.yaml");
        std::fs::write(&fresh, config).expect("written");
        std::fs::rename(fresh, self.folder.0.join("forebay.yaml")).expect("renamed");
    }

    /// A file beside, of this text, by which the command line finds the admin port.
    pub fn named_in(&self, folder: &Folder, text: &str) -> PathBuf {
        let listen = "admin: { listen: '127.0.0.1:0' }";
        assert!(text.contains(listen), "{text}");
        let own = format!("admin: {{ listen: '{}' }}", self.admin);
        let file = folder.0.join("cli.yaml");
        std::fs::write(&file, text.replace(listen, &own)).expect("written");
        file
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_for("the end of the gateway", || child.try_wait().expect("a child"))
    }

    pub fn running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// What standard error has said so far.
    pub fn errors(&self) -> Vec<String> {
        self.errors.now()
    }

    /// Waits until a line of standard error holds `text`, and gives all lines up to it.
    #[track_caller]
    pub fn said(&self, text: &str) -> Vec<String> {
        self.errors.until(text)
    }

    /// A request to the admin port, such as `GET /metrics`.
    #[track_caller]
    pub fn admin(&self, what: &str) -> (u16, String) {
        self.admin_with(what, "", "")
    }

    /// A POST of JSON to the admin port.
    #[track_caller]
    pub fn admin_post(&self, path: &str, body: &str) -> (u16, String) {
        let fields =
            format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
        self.admin_with(&format!("POST {path}"), &fields, body)
    }

    #[track_caller]
    fn admin_with(&self, what: &str, fields: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.admin).expect("the admin port listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        let request = format!(
            "{what} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{fields}\r\n{body}"
        );
        stream.write_all(request.as_bytes()).expect("taken");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.expect("a status"), body.to_owned())
    }

    #[track_caller]
    pub fn metrics(&self) -> String {
        let (status, text) = self.admin("GET /metrics");
        assert_eq!(status, 200);
        text
    }

    /// The sum over all series of `name` whose labels hold each of `labels` (`key="value"`).
    #[track_caller]
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.metrics();
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| {
                line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                    && labels.iter().all(|label| line.contains(label))
            })
            .collect();
        assert!(!lines.is_empty(), "no {name} {labels:?} in\n{text}");
        lines.iter().filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until the metric has that value.
    #[track_caller]
    pub fn reaches(&self, name: &str, labels: &[&str], value: f64) {
        super::wait_until(|| {
            let last = self.metric(name, labels);
            match (last - value).abs() < 0.5 {
                true => Ok(()),
                false => Err(format!("{name} {labels:?} is {last}, not {value}")),
            }
        });
    }

    /// `GET /usage` of a tenant: prompt, completion and estimated tokens.
    #[track_caller]
    pub fn usage(&self, tenant: &str) -> (u64, u64, u64) {
        let (status, text) = self.admin(&format!("GET /usage?tenant={tenant}"));
        assert_eq!(status, 200, "{text}");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let of = |name: &str| value[name].as_u64().expect("a count");
        assert_eq!(of("total_tokens"), of("prompt_tokens") + of("completion_tokens"));
        (of("prompt_tokens"), of("completion_tokens"), of("estimated_tokens"))
    }

    /// Waits until a tenant's prompt and completion tokens are these, and gives the estimated part.
    #[track_caller]
    pub fn booked(&self, tenant: &str, prompt: u64, completion: u64) -> u64 {
        super::wait_until(|| {
            let last = self.usage(tenant);
            match (last.0, last.1) == (prompt, completion) {
                true => Ok(last.2),
                false => {
                    Err(format!("{last:?} are booked for {tenant}, not {prompt} and {completion}"))
                }
            }
        })
    }

    /// Waits until so many requests have ended and been counted, and nothing runs any more. What
    /// is zero after that stays zero.
    #[track_caller]
    pub fn settled(&self, requests: u32) {
        self.reaches("forebay_requests_total", &[], f64::from(requests));
        self.idle();
    }

    /// Waits until nothing runs any more, on any shard.
    #[track_caller]
    pub fn idle(&self) {
        self.reaches("forebay_requests_in_flight", &[], 0.0);
        self.reaches("forebay_backend_in_flight", &[], 0.0);
    }
}

/// Asks all of them at once, from `clients` clients each, `times` by `times_each`: so often a client
/// comes anew, and so many chats it asks for then. Gives how many were served; the rest were refused.
pub fn storm(gateways: &[Gateway], clients: u32, times: u32, times_each: u32) -> u32 {
    let served = AtomicU32::new(0);
    let ask = |gateway: &Gateway| {
        for _ in 0..times {
            let mut client = gateway.client();
            for _ in 0..times_each {
                client.send(super::chat());
                let answer = client.answer();
                match answer.status() {
                    200 => served.fetch_add(1, Ordering::Relaxed),
                    429 => 0,
                    other => panic!("{other}: {}", answer.text()),
                };
            }
        }
    };
    std::thread::scope(|scope| {
        for gateway in gateways {
            for _ in 0..clients {
                scope.spawn(|| ask(gateway));
            }
        }
    });
    served.into_inner()
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("the gateway said:");
            for line in self.errors.now() {
                eprintln!("  {line}");
            }
        }
    }
}

/// Lines of a stream, collected as they come.
pub struct Lines {
    shared: Arc<Shared>,
    _reader: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    said: Mutex<Said>,
    more: Condvar,
}

#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// There will be no more.
    over: bool,
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut Said)) {
        change(&mut self.said.lock().expect("no panic"));
        self.more.notify_all();
    }
}

impl Lines {
    pub fn of(stream: impl std::io::Read + Send + 'static) -> Lines {
        let shared = Arc::new(Shared::default());
        let filled = shared.clone();
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                filled.change(|said| said.lines.push(line));
            }
            filled.change(|said| said.over = true);
        });
        Lines { shared, _reader: reader }
    }

    pub fn now(&self) -> Vec<String> {
        self.shared.said.lock().unwrap_or_else(std::sync::PoisonError::into_inner).lines.clone()
    }

    /// Waits until a line holds `text`, and gives all lines up to it.
    #[track_caller]
    pub fn until(&self, text: &str) -> Vec<String> {
        self.count(text, 1)
    }

    /// Waits until so many lines hold `text`, and gives all lines up to the last of them.
    #[track_caller]
    pub fn count(&self, text: &str, times: usize) -> Vec<String> {
        let until = Instant::now() + PATIENCE;
        let mut said = self.shared.said.lock().expect("no panic");
        loop {
            let hits = said.lines.iter().enumerate().filter(|(_, line)| line.contains(text));
            if let Some((at, _)) = hits.take(times).nth(times - 1) {
                return said.lines[..=at].to_vec();
            }
            let left = until.saturating_duration_since(Instant::now());
            let all = said.lines.join("\n");
            assert!(!said.over && !left.is_zero(), "{text:?} was not said:\n{all}");
            said = self.shared.more.wait_timeout(said, left).expect("no panic").0;
        }
    }
}

/// A folder of a test's own, removed at its end.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("forebay-it-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
