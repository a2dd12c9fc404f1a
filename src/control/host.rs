//! What control asks of the machine: sockets, limits, the lock on the state folder, systemd.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use rustix::process::{Resource, Rlimit};

use crate::pure::plan::Listen;
use crate::rt;

/// Why the process cannot start.
#[derive(Debug)]
pub enum Obstacle {
    /// Another process listens there.
    Taken {
        address: SocketAddr,
        by: Option<String>,
    },
    Bind {
        address: SocketAddr,
        error: io::Error,
    },
    /// `fd:NAME` and no socket of that name was handed over.
    NotHandedOver {
        name: String,
    },
    State {
        folder: PathBuf,
        error: io::Error,
    },
    /// Another gateway uses the same state.
    Locked {
        folder: PathBuf,
        by: Option<String>,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = |by: &Option<String>| by.clone().unwrap_or_else(|| "another process".to_owned());
        match self {
            Obstacle::Taken { address, by: who } => write!(
                f,
                "{} listens on {address} already; stop it, or change server.listen",
                by(who)
            ),
            Obstacle::Bind { address, error } => {
                write!(f, "cannot listen on {address}: {error}")?;
                match error.kind() {
                    io::ErrorKind::PermissionDenied => {
                        f.write_str("; ports below 1024 need CAP_NET_BIND_SERVICE or a socket unit")
                    }
                    io::ErrorKind::AddrNotAvailable => {
                        f.write_str("; no interface of this machine has that address")
                    }
                    _ => Ok(()),
                }
            }
            Obstacle::NotHandedOver { name } => write!(
                f,
                "server.listen names fd:{name}, but no socket with FileDescriptorName={name} was \
                 handed over (LISTEN_FDS)"
            ),
            Obstacle::State { folder, error } => {
                write!(f, "cannot use state.dir {}: {error}", folder.display())
            }
            Obstacle::Locked { folder, by: who } => write!(
                f,
                "{} uses state.dir {} already; two gateways need two folders",
                by(who),
                folder.display()
            ),
        }
    }
}

/// Listening sockets for each shard, in the order of `listen`: one socket per shard and address,
/// so that the kernel spreads connections. All are bound before any shard runs.
///
/// # Errors
/// The first address that cannot be had. `SO_REUSEPORT` would let us share a port with another
/// process silently, so each address is tried alone first.
pub fn listeners(
    listen: &[Listen],
    shards: usize,
    mut handed: HandedOver,
) -> Result<Vec<Vec<OwnedFd>>, Obstacle> {
    let mut all: Vec<Vec<OwnedFd>> = (0..shards).map(|_| Vec::new()).collect();
    for listen in listen {
        match listen {
            Listen::Tcp(address) => {
                let mut address = *address;
                probe(address)?;
                for of_shard in &mut all {
                    let socket =
                        rt::bind(address).map_err(|error| Obstacle::Bind { address, error })?;
                    // Port 0 is any port, but the same one for all shards.
                    if let Ok(Ok(bound)) =
                        rustix::net::getsockname(&socket).map(SocketAddr::try_from)
                    {
                        address = bound;
                    }
                    of_shard.push(socket);
                }
            }
            Listen::Fd(name) => {
                let sockets = handed.take(name);
                let failed = |_| Obstacle::NotHandedOver { name: name.clone() };
                if sockets.is_empty() {
                    return Err(failed(io::ErrorKind::NotFound.into()));
                }
                for (shard, of_shard) in all.iter_mut().enumerate() {
                    let socket = &sockets[shard % sockets.len()];
                    of_shard.push(socket.try_clone().map_err(failed)?);
                }
            }
        }
    }
    Ok(all)
}

/// Binds alone, without `SO_REUSEPORT`: fails if any other socket listens there. One that belongs to
/// no process any more is waited for: the kernel takes an io_uring apart some time after the process
/// has ended, and a restart would otherwise trip over the listener of its predecessor.
fn probe(address: SocketAddr) -> Result<(), Obstacle> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let attempt = || -> rustix::io::Result<()> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        // Connections of a former process in TIME_WAIT are in nobody's way.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if address.is_ipv6() {
            sockopt::set_ipv6_v6only(&socket, true)?;
        }
        rustix::net::bind(&socket, &address)
    };
    let began = Instant::now();
    loop {
        match attempt() {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::ADDRINUSE) => {
                let by = who_listens(address.port());
                if by.is_some() || began.elapsed() > REMNANT {
                    return Err(Obstacle::Taken { address, by });
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => return Err(Obstacle::Bind { address, error: error.into() }),
        }
    }
}

/// How long a listener that nobody holds may take to disappear; 20 ms have been seen.
const REMNANT: Duration = Duration::from_secs(2);

/// `nginx (process 812)`, as far as /proc shows it to us.
fn who_listens(port: u16) -> Option<String> {
    let socket = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| {
        let table = std::fs::read_to_string(table).ok()?;
        listening_inode(&table, port)
    })?;
    let wanted = PathBuf::from(format!("socket:[{socket}]"));
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let pid = process.file_name().to_string_lossy().into_owned();
        if !pid.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let Ok(fds) = std::fs::read_dir(process.path().join("fd")) else { continue };
        if fds.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == wanted)) {
            return Some(called(&pid));
        }
    }
    None
}

fn called(pid: &str) -> String {
    match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("{} (process {pid})", name.trim()),
        Err(_) => format!("process {pid}"),
    }
}

/// The inode of a socket in state LISTEN on `port`, from the kernel's table.
fn listening_inode(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let local = fields.nth(1)?;
        let state = fields.nth(1)?;
        let inode = fields.nth(5)?;
        let (_, local_port) = local.rsplit_once(':')?;
        let ours = u16::from_str_radix(local_port, 16) == Ok(port) && state == "0A";
        if ours { inode.parse().ok() } else { None }
    })
}

/// Listening sockets that the service manager opened for us, with their names
/// (sd_listen_fds(3)).
#[derive(Debug, Default)]
pub struct HandedOver(Vec<(String, OwnedFd)>);

impl HandedOver {
    /// Takes them over. To be called once, before the process opens anything: a manager that
    /// announces more than it hands over would otherwise make us adopt a descriptor of our own.
    pub fn adopt() -> HandedOver {
        let variable = |name| std::env::var(name).ok();
        let ours = variable("LISTEN_PID").is_some_and(|pid| pid == std::process::id().to_string());
        let count = variable("LISTEN_FDS").and_then(|count| count.parse::<i32>().ok());
        let Some(count) = count.filter(|count| ours && (1..=HANDED_OVER_MAX).contains(count))
        else {
            return HandedOver::default();
        };
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let adopt_one = |fd| {
            let name = names.next().filter(|name| !name.is_empty()).unwrap_or("unknown");
            if !listens(fd) {
                return None;
            }
            // SAFETY: the descriptor is open, and by the protocol those from 3 on are this
            // process's to own; nothing here has opened or taken any before.
            let socket = unsafe { OwnedFd::from_raw_fd(fd) };
            rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC).ok()?;
            Some((name.to_owned(), socket))
        };
        let fds = FIRST_HANDED_OVER..FIRST_HANDED_OVER + count;
        HandedOver(fds.filter_map(adopt_one).collect())
    }

    fn take(&mut self, wanted: &str) -> Vec<OwnedFd> {
        self.0.extract_if(.., |(name, _)| name == wanted).map(|(_, socket)| socket).collect()
    }
}

/// Whether this number is an open socket in state LISTEN.
fn listens(fd: i32) -> bool {
    // SAFETY: the borrow ends with this function; a number that is not open gives an error.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    sockopt::socket_acceptconn(fd).unwrap_or(false)
}

const FIRST_HANDED_OVER: i32 = 3;
const HANDED_OVER_MAX: i32 = 1024;

/// Holds the state folder for this process alone, for as long as it lives.
///
/// # Errors
/// Another gateway holds it, or it cannot be made or written.
pub fn lock_state(folder: &Path) -> Result<File, Obstacle> {
    let failed = |error| Obstacle::State { folder: folder.to_owned(), error };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(folder.join("forebay.lock"))
        .map_err(failed)?;
    match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            let by = (&file).take(16).read_to_string(&mut pid);
            let by = by.ok().filter(|&read| read > 0).map(|_| called(pid.trim()));
            return Err(Obstacle::Locked { folder: folder.to_owned(), by });
        }
        Err(error) => return Err(failed(error.into())),
    }
    // For whoever is refused; the lock itself is the kernel's.
    let note = |file: &mut File| -> io::Result<()> {
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    };
    note(&mut file).map_err(failed)?;
    Ok(file)
}

/// A write beyond a limit on the size of files is an error to be handled, as a full disk is; without
/// this it would end the process.
pub fn survive_size_limits() {
    // SAFETY: ignoring a signal runs no code of ours.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Raises the soft limit on open files to the hard one, and gives it.
pub fn raise_open_files() -> u64 {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let now = match rustix::process::setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    now.unwrap_or(u64::MAX)
}

/// Tells the service manager how things are (sd_notify(3)); silently nothing without one.
pub fn notify(state: &str) {
    use std::os::linux::net::SocketAddrExt as _;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let text = path.to_string_lossy();
    let address = match text.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name.as_bytes()),
        None => SocketAddr::from_pathname(&path),
    };
    if let (Ok(address), Ok(socket)) = (address, UnixDatagram::unbound()) {
        // A manager that does not listen has no use for the news.
        let _ = socket.set_nonblocking(true);
        let _ = socket.send_to_addr(state.as_bytes(), &address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn any_port() -> Listen {
        Listen::Tcp("127.0.0.1:0".parse().expect("an address"))
    }

    fn port_of(socket: &OwnedFd) -> u16 {
        let address = rustix::net::getsockname(socket).expect("bound");
        SocketAddr::try_from(address).expect("an internet address").port()
    }

    fn bound(listen: &[Listen], shards: usize) -> Result<Vec<Vec<OwnedFd>>, Obstacle> {
        listeners(listen, shards, HandedOver::default())
    }

    #[test]
    fn what_was_handed_over_is_shared_out_by_name() {
        let web = TcpListener::bind("127.0.0.1:0").expect("bound");
        let port = web.local_addr().expect("bound").port();
        assert!(listens(std::os::fd::AsRawFd::as_raw_fd(&web)));
        let handed = HandedOver(vec![("web".into(), web.into())]);
        let all = listeners(&[Listen::Fd("web".into())], 2, handed).expect("handed over");
        assert_eq!(all.iter().map(|of_shard| port_of(&of_shard[0])).collect::<Vec<_>>(), [port; 2]);
        let file = File::open("/dev/null").expect("opened");
        assert!(!listens(std::os::fd::AsRawFd::as_raw_fd(&file)));
    }

    #[test]
    fn every_shard_gets_a_socket_on_the_same_port() {
        let all = bound(&[any_port(), any_port()], 3).expect("bound");
        assert_eq!(all.len(), 3);
        for index in 0..2 {
            let ports: Vec<_> = all.iter().map(|of_shard| port_of(&of_shard[index])).collect();
            assert!(ports[0] != 0 && ports.iter().all(|&port| port == ports[0]));
        }
        assert_ne!(port_of(&all[0][0]), port_of(&all[0][1]));
    }

    #[test]
    fn a_port_that_somebody_listens_on_is_refused_by_name() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = taken.local_addr().expect("bound");
        let refused = bound(&[Listen::Tcp(address)], 2).expect_err("taken");
        let message = refused.to_string();
        assert!(message.contains(&std::process::id().to_string()), "{message}");
        assert!(message.contains(&address.to_string()), "{message}");
    }

    /// Another gateway shares its port among its shards; we must not join in.
    #[test]
    fn a_shared_port_is_refused_too() {
        let theirs = bound(&[any_port()], 2).expect("bound");
        let port = port_of(&theirs[0][0]);
        let same = Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], port)));
        assert!(matches!(bound(&[same], 2), Err(Obstacle::Taken { .. })));
    }

    #[test]
    fn an_address_of_another_machine_is_refused_with_a_reason() {
        let foreign = Listen::Tcp("192.0.2.1:8080".parse().expect("an address"));
        let refused = bound(&[foreign], 1).expect_err("not ours");
        assert!(refused.to_string().contains("no interface"), "{refused}");
        let absent = bound(&[Listen::Fd("web".into())], 1).expect_err("nobody hands over");
        assert!(absent.to_string().contains("FileDescriptorName=web"), "{absent}");
    }

    #[test]
    fn the_kernels_table_is_read_by_port_and_state() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 111 1 0\n\
            1: 00000000:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 222 1 0\n";
        assert_eq!(listening_inode(table, 8080), Some(222));
        assert_eq!(listening_inode(table, 8081), None);
        assert_eq!(listening_inode("garbage\n1 2\n", 1), None);
    }

    #[test]
    fn a_state_folder_serves_one_process() {
        let folder = std::env::temp_dir().join(format!("forebay-state-{}/a/b", std::process::id()));
        let held = lock_state(&folder).expect("free");
        let refused = lock_state(&folder).expect_err("held");
        let message = refused.to_string();
        assert!(message.contains(&format!("process {}", std::process::id())), "{message}");
        drop(held);
        lock_state(&folder).expect("free again");
        std::fs::remove_dir_all(folder).expect("removed");
        assert!(matches!(lock_state(Path::new("/proc/nothing")), Err(Obstacle::State { .. })));
    }

    #[test]
    fn the_open_file_limit_is_raised_to_the_hard_one() {
        let limit = raise_open_files();
        let now = rustix::process::getrlimit(Resource::Nofile);
        assert_eq!(now.current, now.maximum);
        assert_eq!(now.current.unwrap_or(u64::MAX), limit);
    }
}
