//! The processes of a comparison: the mock and everything that stands before it. Each is started
//! on free loopback ports with a folder of its own, and ended when dropped; nothing else is touched.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::process;

/// The key that every target is sent, and that Forebay checks.
pub const KEY: &str = "sk-forebay-bench";
const KEY_SHA256: &str = "8591ceec1e986e4e79bc3b5ce7ff21d6052271fa850db9ff2e925ef76c13a0bb";

const NGINX: &str = include_str!("../../peers/nginx.conf");
const HAPROXY: &str = include_str!("../../peers/haproxy.cfg");
const FOREBAY: &str = include_str!("../../peers/forebay.yaml");

/// Longest that a target may take to answer its first request, and to end when told to.
const START_MAX: Duration = Duration::from_secs(10);
const STOP_MAX: Duration = Duration::from_secs(3);

/// What stands between the generator and the mock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Nothing.
    Direct,
    /// nginx, two workers.
    Nginx,
    /// HAProxy, two threads.
    Haproxy,
    /// The plain hyper proxy of this program, two workers.
    Hyper,
    /// The blind relay of this program, two workers.
    Floor,
    /// A Forebay binary, two shards.
    Forebay {
        /// The binary.
        binary: PathBuf,
        /// `uring` or `epoll`.
        driver: String,
    },
}

/// A target as the report names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its name in tables.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// A target that runs.
pub struct Running {
    /// Where it listens.
    pub addr: SocketAddr,
    /// Its processes; empty for [`Kind::Direct`].
    pub pids: Vec<u32>,
    /// Held for its end.
    _guard: Option<Guard>,
}

impl Running {
    /// Starts the target before `backend` and waits until it passes a request. `index` keeps
    /// the folders of several starts apart.
    ///
    /// # Errors
    /// The program is missing, ends at once, or does not answer; with the tail of its log.
    pub fn start(target: &Target, backend: SocketAddr, index: usize) -> io::Result<Running> {
        let listen = SocketAddr::from(([127, 0, 0, 1], crate::net::free_port()?));
        let dir = Folder::new(&format!("{}-{index}", target.name))?;
        let fill = |template: &str| -> io::Result<String> {
            let admin = SocketAddr::from(([127, 0, 0, 1], crate::net::free_port()?));
            let user = if rustix::process::getuid().is_root() { "user root;" } else { "" };
            Ok(template
                .replace("@LISTEN@", &listen.to_string())
                .replace("@BACKEND@", &backend.to_string())
                .replace("@ADMIN@", &admin.to_string())
                .replace("@DIR@", &dir.path.to_string_lossy())
                .replace("@SHA256@", KEY_SHA256)
                .replace("@USER@", user))
        };
        let config = |name: &str, template: &str| -> io::Result<PathBuf> {
            let path = dir.path.join(name);
            fs::write(&path, fill(template)?)?;
            Ok(path)
        };
        let command = match &target.kind {
            Kind::Direct => return Ok(Running { addr: backend, pids: Vec::new(), _guard: None }),
            Kind::Nginx => {
                let path = config("nginx.conf", NGINX)?;
                let prefix = dir.path.as_os_str();
                guarded("nginx", &["-p".as_ref(), prefix, "-c".as_ref(), path.as_os_str()])?
            }
            Kind::Haproxy => {
                let path = config("haproxy.cfg", HAPROXY)?;
                guarded("haproxy", &["-db".as_ref(), "-f".as_ref(), path.as_os_str()])?
            }
            Kind::Hyper => {
                let (listen, backend) = (listen.to_string(), backend.to_string());
                let this = std::env::current_exe()?;
                guarded(this, &["hyper-proxy".as_ref(), listen.as_ref(), backend.as_ref()])?
            }
            Kind::Floor => {
                let (listen, backend) = (listen.to_string(), backend.to_string());
                let this = std::env::current_exe()?;
                guarded(this, &["floor".as_ref(), listen.as_ref(), backend.as_ref()])?
            }
            Kind::Forebay { binary, driver } => {
                fs::create_dir_all(dir.path.join("state"))?;
                let path = config("forebay.yaml", FOREBAY)?;
                let path = path.as_os_str();
                let arguments = [
                    "run".as_ref(),
                    "--config".as_ref(),
                    path,
                    "--driver".as_ref(),
                    driver.as_ref(),
                ];
                let mut command = guarded(binary, &arguments)?;
                // The peers write no access log either.
                command.env("RUST_LOG", "warn");
                command
            }
        };
        Running::launch(command, listen, dir)
    }

    /// Starts the mock.
    ///
    /// # Errors
    /// It does not answer.
    pub fn mock() -> io::Result<Running> {
        let listen = SocketAddr::from(([127, 0, 0, 1], crate::net::free_port()?));
        let text = listen.to_string();
        let command = guarded(std::env::current_exe()?, &["mock".as_ref(), text.as_ref()])?;
        Running::launch(command, listen, Folder::new("mock")?)
    }

    fn launch(mut command: Command, addr: SocketAddr, dir: Folder) -> io::Result<Running> {
        let log = fs::File::create(dir.path.join("log"))?;
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let pid = child.id();
        let mut guard = Guard { child, family: vec![pid], dir };
        let start = Instant::now();
        while let Err(error) = ask(addr) {
            let ended = guard.child.try_wait()?.is_some();
            if ended || start.elapsed() > START_MAX {
                let log = fs::read_to_string(guard.dir.path.join("log")).unwrap_or_default();
                let tail: Vec<&str> = log.lines().rev().take(8).collect();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join("\n  ");
                let what = if ended { "ended at once" } else { "does not answer" };
                let program = command.get_args().nth(1).unwrap_or_default().to_string_lossy();
                return Err(io::Error::other(format!("{program} {what} ({error}):\n  {tail}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        guard.family = process::family(pid);
        Ok(Running { addr, pids: guard.family.clone(), _guard: Some(guard) })
    }
}

/// Runs a program so that it ends when this one does, however this one ends.
fn guarded(
    program: impl AsRef<std::ffi::OsStr>,
    arguments: &[&std::ffi::OsStr],
) -> io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("guard").arg(program).args(arguments);
    Ok(command)
}

/// One plain request on a connection of its own; an error unless it is answered with 200.
fn ask(addr: SocketAddr) -> io::Result<()> {
    let mut sock = TcpStream::connect_timeout(&addr, Duration::from_secs(1))?;
    sock.set_read_timeout(Some(Duration::from_secs(2)))?;
    let body =
        "{\"model\":\"bench\",\"messages\":[{\"role\":\"user\",\"content\":\"bench:s400;\"}]}";
    write!(
        sock,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: {addr}\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    // Whatever came before a reset still says what is wrong.
    let _ = sock.read_to_string(&mut answer);
    let status = answer.lines().next().unwrap_or("no answer");
    if status.starts_with("HTTP/1.1 200") {
        return Ok(());
    }
    let body = answer.rsplit("\r\n\r\n").next().unwrap_or("");
    Err(io::Error::other(format!("{status}: {}", body.chars().take(200).collect::<String>())))
}

/// Ends the processes and removes the folder.
struct Guard {
    child: Child,
    family: Vec<u32>,
    dir: Folder,
}

impl Drop for Guard {
    fn drop(&mut self) {
        signal(self.child.id(), Signal::TERM);
        let told = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if told.elapsed() > STOP_MAX {
                // Its children are still its children, so these are the ones we started.
                for pid in process::family(self.child.id()) {
                    signal(pid, Signal::KILL);
                }
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn signal(pid: u32, signal: Signal) {
    // It may have ended by itself.
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let _ = pid.map(|pid| kill_process(pid, signal));
}

/// A folder that is removed when dropped.
struct Folder {
    path: PathBuf,
}

impl Folder {
    fn new(name: &str) -> io::Result<Folder> {
        let path =
            std::env::temp_dir().join(format!("forebay-bench-{}-{name}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Folder { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// What a target calls itself.
pub fn version(kind: &Kind) -> String {
    let said = |program: &Path, argument: &str| -> String {
        let Ok(output) = Command::new(program).arg(argument).output() else {
            return "not found".to_owned();
        };
        let text = [output.stdout, output.stderr].concat();
        String::from_utf8_lossy(&text).lines().next().unwrap_or("").trim().to_owned()
    };
    match kind {
        Kind::Direct => "no proxy".to_owned(),
        Kind::Nginx => said("nginx".as_ref(), "-v"),
        Kind::Haproxy => said("haproxy".as_ref(), "-v"),
        Kind::Hyper => ["hyper", "hyper-util", "tokio"].map(locked).join(", "),
        Kind::Floor => format!("a blind relay on {}", locked("monoio")),
        Kind::Forebay { binary, driver } => {
            format!("{}, --driver {driver}", said(binary, "--version"))
        }
    }
}

/// The version of a crate in the workspace's lock file.
fn locked(name: &str) -> String {
    let lock = concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.lock");
    let lock = fs::read_to_string(lock).unwrap_or_default();
    let entry =
        lock.split("[[package]]").find(|entry| entry.contains(&format!("name = \"{name}\"\n")));
    let version = entry.and_then(|entry| entry.split("version = \"").nth(1)?.split('"').next());
    format!("{name} {}", version.unwrap_or("of unknown version"))
}
