//! The backend's side: sockets that a test plays by hand, or that answer by a rule.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::{PATIENCE, is_gone, reset_on_close};

/// A listening backend whose connections the test takes one by one.
pub struct Listener {
    pub address: SocketAddr,
    accepted: Receiver<TcpStream>,
    /// Connections so far, taken or not.
    count: Arc<AtomicUsize>,
    taken: Cell<usize>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    pub fn start() -> Listener {
        Listener::on("127.0.0.1:0").expect("a port on loopback")
    }

    /// `None` if the address is not to be had, as `[::1]:0` where IPv6 is off.
    pub fn on(address: &str) -> Option<Listener> {
        let listener = TcpListener::bind(address).ok()?;
        let address = listener.local_addr().expect("bound");
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, accepted) = channel();
        let count = Arc::new(AtomicUsize::new(0));
        let (stopped, counted) = (stop.clone(), count.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::Acquire) || sender.send(stream).is_err() {
                    return;
                }
                counted.fetch_add(1, Ordering::AcqRel);
            }
        });
        Some(Listener { address, accepted, count, taken: Cell::new(0), stop, thread: Some(thread) })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next connection.
    #[track_caller]
    pub fn accept(&self) -> Peer {
        match self.accepted.recv_timeout(PATIENCE) {
            Ok(stream) => {
                self.taken.set(self.taken.get() + 1);
                Peer::new(stream)
            }
            Err(error) => panic!("no connection came to the backend: {error}"),
        }
    }

    /// The next connection, its first request read.
    #[track_caller]
    pub fn request(&self) -> (Peer, Request) {
        let mut peer = self.accept();
        let request = peer.request();
        (peer, request)
    }

    /// Whether a connection has come that was not taken yet.
    pub fn waiting(&self) -> bool {
        self.count.load(Ordering::Acquire) > self.taken.get()
    }

    /// Asserts that nobody has connected whom we did not take.
    #[track_caller]
    pub fn nobody(&self) {
        assert!(!self.waiting(), "a connection came that should not have");
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // Wakes the accept.
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// One connection from the gateway.
pub struct Peer {
    stream: TcpStream,
    buf: Vec<u8>,
}

/// A request as the backend got it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub line: String,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut found = self.fields.iter().filter(|(own, _)| own == name);
        let value = found.next().map(|(_, value)| value.as_str());
        assert!(found.next().is_none(), "{name} came twice");
        value
    }

    pub fn target(&self) -> &str {
        self.line.split(' ').nth(1).unwrap_or_default()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }
}

impl Peer {
    fn new(stream: TcpStream) -> Peer {
        stream.set_read_timeout(Some(PATIENCE)).expect("set");
        stream.set_write_timeout(Some(PATIENCE)).expect("set");
        stream.set_nodelay(true).expect("set");
        Peer { stream, buf: Vec::new() }
    }

    /// The next request, whole.
    #[track_caller]
    pub fn request(&mut self) -> Request {
        self.next_request().expect("a request, and not the end of the connection")
    }

    /// The next request, or `None` at an orderly end of the connection.
    #[track_caller]
    pub fn next_request(&mut self) -> Option<Request> {
        let mut request = self.next_head()?;
        assert_eq!(request.field("transfer-encoding"), None, "its length is known by then");
        let length = request.field("content-length").map_or(0, |n| n.parse().expect("a length"));
        while self.buf.len() < length {
            assert!(self.read(), "a body broke off at {} of {length}", self.buf.len());
        }
        request.body = self.buf.drain(..length).collect();
        Some(request)
    }

    /// The next request's head; its body stays unread.
    #[track_caller]
    pub fn next_head(&mut self) -> Option<Request> {
        let head = loop {
            if let Some(end) = self.buf.windows(4).position(|four| four == b"\r\n\r\n") {
                break self.buf.drain(..end + 4).collect::<Vec<u8>>();
            }
            if !self.read() {
                assert!(self.buf.is_empty(), "a request broke off: {:?}", self.buf);
                return None;
            }
        };
        let head = String::from_utf8(head).expect("a head of ASCII");
        let mut lines = head.split("\r\n");
        let line = lines.next().unwrap_or_default().to_owned();
        let fields: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Some(Request { line, fields, body: Vec::new() })
    }

    /// The next bytes of a body that is still coming.
    #[track_caller]
    pub fn take(&mut self, count: usize) -> Vec<u8> {
        while self.buf.len() < count {
            assert!(self.read(), "it ended at {} of {count}", self.buf.len());
        }
        self.buf.drain(..count).collect()
    }

    /// The next chunk of a body in chunks; empty for the last one.
    #[track_caller]
    pub fn take_chunk(&mut self) -> Vec<u8> {
        let end = loop {
            match self.buf.windows(2).position(|two| two == b"\r\n") {
                Some(end) => break end,
                None => assert!(self.read(), "it ended in a chunk's size"),
            }
        };
        let line = String::from_utf8(self.take(end + 2)).expect("ASCII");
        let size = usize::from_str_radix(line.trim_end(), 16).expect("a chunk size");
        let data = self.take(size);
        assert_eq!(self.take(2), b"\r\n");
        data
    }

    /// Waits until the gateway closes this connection, and gives what still came before.
    #[track_caller]
    pub fn rest(&mut self) -> Vec<u8> {
        while self.read() {}
        std::mem::take(&mut self.buf)
    }

    /// False at the end.
    #[track_caller]
    fn read(&mut self) -> bool {
        let mut piece = [0; 64 * 1024];
        let read = self.stream.read(&mut piece);
        if is_gone(&read) {
            return false;
        }
        let count = read.expect("the gateway says something in time");
        self.buf.extend_from_slice(&piece[..count]);
        true
    }

    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).expect("the gateway takes it");
    }

    /// False if the gateway has gone.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.stream.write_all(bytes.as_ref()).is_ok()
    }

    /// Sends as much of `bytes` as the gateway takes without `pause` between two pieces.
    pub fn send_until_stalled(&mut self, bytes: &[u8], pause: Duration) -> usize {
        self.stream.set_write_timeout(Some(pause)).expect("set");
        let mut sent = 0;
        while sent < bytes.len() {
            match self.stream.write(&bytes[sent..]) {
                Ok(count) => sent += count,
                Err(_) => break,
            }
        }
        self.stream.set_write_timeout(Some(PATIENCE)).expect("set");
        sent
    }

    /// Whether the gateway has sent something, or closed, since the last look.
    pub fn has_more(&self) -> bool {
        self.stream.set_nonblocking(true).expect("set");
        let more = self.stream.peek(&mut [0]).is_ok();
        self.stream.set_nonblocking(false).expect("set");
        more
    }

    /// Waits until the gateway closes this connection; what it says before that is a fault.
    #[track_caller]
    pub fn gone(&mut self) {
        if self.read() {
            panic!("the gateway goes on: {:?}", String::from_utf8_lossy(&self.buf));
        }
    }

    /// Sends no more, and still reads.
    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).expect("open");
    }

    /// Closes it orderly, in both directions.
    pub fn fin(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub fn rst(self) {
        reset_on_close(&self.stream);
    }
}

/// A backend that answers each request by a rule, and remembers them all.
pub struct Backend {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Request>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Backend {
    /// Every connection is kept, every request gets what `answer` says.
    pub fn answering(answer: impl Fn(&Request) -> Vec<u8> + Send + Sync + 'static) -> Backend {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port on loopback");
        let address = listener.local_addr().expect("bound");
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (stopped, book, answer) = (stop.clone(), seen.clone(), Arc::new(answer));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                let (book, answer) = (book.clone(), answer.clone());
                // Ends with its connection, which the gateway closes when the test is over.
                std::thread::spawn(move || {
                    let mut peer = Peer::new(stream);
                    while let Some(request) = peer.next_request() {
                        let answer = answer(&request);
                        book.lock().expect("no panic").push(request);
                        if !peer.try_send(answer) {
                            return;
                        }
                    }
                });
            }
        });
        Backend { address, seen, stop, thread: Some(thread) }
    }

    /// Answers everything with [`super::REPLY`], streams with one token, usage if asked, and
    /// `[DONE]`.
    pub fn kind() -> Backend {
        Backend::answering(|request| {
            let asked: serde_json::Value =
                serde_json::from_slice(&request.body).unwrap_or_default();
            if asked["stream"] != true {
                return super::json(200, super::REPLY);
            }
            let usage = asked["stream_options"]["include_usage"] == true;
            let usage = if usage { super::USAGE } else { "" };
            let events =
                [super::ROLE, &super::token("Hello"), super::FINISH, usage, super::DONE].concat();
            let mut out = super::STREAM_HEAD.as_bytes().to_vec();
            out.extend(super::chunk(events));
            out.extend_from_slice(super::LAST_CHUNK.as_bytes());
            out
        })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn requests(&self) -> Vec<Request> {
        self.seen.lock().expect("no panic").clone()
    }

    pub fn count(&self) -> usize {
        self.seen.lock().expect("no panic").len()
    }

    pub fn last(&self) -> Request {
        self.requests().pop().expect("a request came")
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
