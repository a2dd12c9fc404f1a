//! Records to ClickHouse, by its HTTP interface: `INSERT … FORMAT JSONEachRow`.
//!
//! A thread of its own sends batches of up to a second or a megabyte. One that fails is sent again
//! with the same deduplication token, at growing distances, so that a batch that was taken although its
//! answer got lost is not in the table twice (where the table deduplicates: replicated ones do, others
//! with `non_replicated_deduplication_window`). Meanwhile others wait, up to a bound; what is beyond it
//! is dropped and counted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fetch::{Bounds, Fetcher};
use crate::meter::events::{Level, say};

/// Where to, and as whom.
#[derive(Debug)]
pub struct ClickHouse {
    /// Of the server, as `https://ch.example:8443`.
    pub url: String,
    /// `table` or `database.table`.
    pub table: String,
    pub user: Option<String>,
    pub password: Option<String>,
    /// PEM; without it the machine's roots are trusted.
    pub ca: Option<Arc<str>>,
}

/// Records that are in the table, and records that will never be.
pub static SENT: AtomicU64 = AtomicU64::new(0);
pub static DROPPED: AtomicU64 = AtomicU64::new(0);

const BOUNDS: Bounds = Bounds {
    connect: Duration::from_secs(5),
    total: Duration::from_secs(30),
    // An INSERT that succeeds says nothing.
    body_bytes_max: 64 * 1024,
};
/// Pieces that wait, each at most 128 KiB: what a busy gateway makes in some ten seconds.
const WAITING_MAX: usize = 256;
const BATCH_BYTES: usize = 1024 * 1024;
const BATCH_WITHIN: Duration = Duration::from_secs(1);
/// Between two tries, at first and at last.
const AGAIN: Duration = Duration::from_millis(500);
const AGAIN_MAX: Duration = Duration::from_secs(30);
/// How long one batch is tried: a table that refuses it must not keep the others for ever.
const TRIED_FOR: Duration = Duration::from_mins(10);

/// Some lines.
struct Piece {
    text: String,
    lines: u64,
}

/// The exporting thread's end.
#[derive(Debug)]
pub struct Feed {
    pieces: SyncSender<Piece>,
    ending: Arc<AtomicBool>,
    sender: JoinHandle<()>,
}

impl ClickHouse {
    /// # Errors
    /// `ca` is no certificate, or no thread can be started.
    pub fn start(self) -> io::Result<Feed> {
        let fetcher = Fetcher::new(self.ca.as_deref().map(str::as_bytes), BOUNDS)
            .map_err(|why| io::Error::other(format!("usage.clickhouse.ca: {why}")))?;
        let (pieces, waiting) = sync_channel(WAITING_MAX);
        let ending = Arc::new(AtomicBool::new(false));
        let sender = Sender {
            fetcher,
            target: self,
            waiting,
            ending: Arc::clone(&ending),
            // Other processes', and this one's of earlier, are not to be taken for ours.
            start: crate::rt::now().nanos() ^ u64::from(std::process::id()) << 40,
            batches: 0,
            failing: false,
        };
        let sender =
            std::thread::Builder::new().name("clickhouse".into()).spawn(|| sender.run())?;
        Ok(Feed { pieces, ending, sender })
    }
}

impl Feed {
    /// Never waits: what there is no room for is dropped.
    pub fn offer(&self, text: &str, lines: u64) {
        let piece = Piece { text: text.to_owned(), lines };
        if self.pieces.try_send(piece).is_err() {
            DROPPED.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Sends what waits, each batch tried once, and ends.
    pub fn finish(self) {
        self.ending.store(true, Ordering::Release);
        self.sender.thread().unpark();
        drop(self.pieces);
        // It cannot panic: nothing is left to say if it did.
        let _ = self.sender.join();
    }
}

struct Sender {
    fetcher: Fetcher,
    target: ClickHouse,
    waiting: Receiver<Piece>,
    ending: Arc<AtomicBool>,
    start: u64,
    batches: u64,
    failing: bool,
}

impl Sender {
    fn run(mut self) {
        while let Ok(first) = self.waiting.recv() {
            let mut batch = first;
            let until = Instant::now() + BATCH_WITHIN;
            let open = loop {
                if batch.text.len() >= BATCH_BYTES {
                    break true;
                }
                match self.waiting.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(more) => {
                        batch.text.push_str(&more.text);
                        batch.lines += more.lines;
                    }
                    Err(RecvTimeoutError::Timeout) => break true,
                    Err(RecvTimeoutError::Disconnected) => break false,
                }
            };
            self.send(&batch);
            if !open {
                return;
            }
        }
    }

    fn send(&mut self, batch: &Piece) {
        self.batches += 1;
        let target = &self.target;
        let url = target.insert(&format!("{:016x}-{}", self.start, self.batches));
        let mut fields = vec![("content-type", "application/x-ndjson")];
        fields.extend(target.user.as_deref().map(|user| ("x-clickhouse-user", user)));
        fields.extend(target.password.as_deref().map(|key| ("x-clickhouse-key", key)));
        let began = Instant::now();
        let mut pause = AGAIN;
        loop {
            let error = match self.fetcher.post(&url, &fields, batch.text.as_bytes()) {
                Ok(_) => {
                    SENT.fetch_add(batch.lines, Ordering::Relaxed);
                    if std::mem::take(&mut self.failing) {
                        say(Level::Info, "clickhouse_works_again", &[]);
                    }
                    return;
                }
                Err(error) => error,
            };
            if !std::mem::replace(&mut self.failing, true) {
                say(Level::Error, "clickhouse_fails", &[("error", &error)]);
            }
            let over = began.elapsed() + pause > TRIED_FOR;
            if over || self.ending.load(Ordering::Acquire) {
                DROPPED.fetch_add(batch.lines, Ordering::Relaxed);
                say(Level::Error, "usage_dropped", &[("records", &batch.lines), ("error", &error)]);
                return;
            }
            std::thread::park_timeout(pause);
            pause = (2 * pause).min(AGAIN_MAX);
        }
    }
}

impl ClickHouse {
    /// The URL of an INSERT. Columns that the table lacks are passed over, so that it need not have
    /// all of a record's fields.
    fn insert(&self, token: &str) -> String {
        let url = self.url.trim_end_matches('/');
        // The plan has only let letters, digits and `_.` through.
        let table = &self.table;
        format!(
            "{url}/?query=INSERT%20INTO%20{table}%20FORMAT%20JSONEachRow\
             &insert_deduplication_token={token}&date_time_input_format=best_effort\
             &input_format_skip_unknown_fields=1"
        )
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use super::*;

    /// The head and the body of one request.
    fn request(stream: &mut TcpStream) -> (String, String) {
        let mut all = Vec::new();
        let mut buf = [0; 65_536];
        loop {
            let text = String::from_utf8_lossy(&all).into_owned();
            if let Some((head, body)) = text.split_once("\r\n\r\n") {
                let length = head.to_lowercase();
                let length = length.split("content-length: ").nth(1).expect("a length");
                let length: usize = length.lines().next().expect("a line").parse().expect("digits");
                if body.len() >= length {
                    return (head.to_owned(), body.to_owned());
                }
            }
            let read = stream.read(&mut buf).expect("more");
            assert!(read > 0, "an early end");
            all.extend_from_slice(&buf[..read]);
        }
    }

    fn answer(stream: &mut TcpStream, status: &str) {
        let text = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        stream.write_all(text.as_bytes()).expect("taken");
    }

    fn token(head: &str) -> String {
        let token = head.split("insert_deduplication_token=").nth(1).expect("a token");
        token.split('&').next().expect("its end").to_owned()
    }

    /// A server that breaks off, refuses, and then takes: the same batch under the same token each
    /// time, the next under another.
    #[test]
    fn a_batch_is_sent_until_it_is_taken_and_under_one_token() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let target = ClickHouse {
            url: format!("http://{}/", listener.local_addr().expect("bound")),
            table: "llm.usage".into(),
            user: Some("forebay".into()),
            password: Some("secret".into()),
            ca: None,
        };
        let (sent, dropped) = (SENT.load(Ordering::Relaxed), DROPPED.load(Ordering::Relaxed));
        let feed = target.start().expect("a thread");
        feed.offer("{\"a\":1}\n{\"a\":2}\n", 2);
        let mut seen = Vec::new();
        for status in ["", "500 Internal Server Error", "200 OK"] {
            let (mut stream, _) = listener.accept().expect("a connection");
            let (head, body) = request(&mut stream);
            assert!(head.starts_with("POST /?query=INSERT%20INTO%20llm.usage%20FORMAT%20JSONEach"));
            let fields = head.to_lowercase();
            assert!(fields.contains("x-clickhouse-user: forebay"), "{head}");
            assert!(fields.contains("x-clickhouse-key: secret"), "{head}");
            assert_eq!(body, "{\"a\":1}\n{\"a\":2}\n");
            seen.push(token(&head));
            if !status.is_empty() {
                answer(&mut stream, status);
            }
        }
        assert!(seen.iter().all(|token| *token == seen[0]), "{seen:?}");
        feed.offer("{\"a\":3}\n", 1);
        let ended = std::thread::spawn(|| feed.finish());
        let (mut stream, _) = listener.accept().expect("a connection");
        let (head, _) = request(&mut stream);
        assert_ne!(token(&head), seen[0]);
        answer(&mut stream, "503 Service Unavailable");
        drop(stream);
        ended.join().expect("it ends though nobody takes the last");
        assert!(SENT.load(Ordering::Relaxed) >= sent + 2);
        assert!(DROPPED.load(Ordering::Relaxed) > dropped);
    }

    /// Nobody listens: what waits is bounded, the rest is counted, and the end comes.
    #[test]
    fn a_server_that_is_away_costs_records_and_nothing_else() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        drop(listener);
        let target =
            ClickHouse { url, table: "usage".into(), user: None, password: None, ca: None };
        let dropped = DROPPED.load(Ordering::Relaxed);
        let feed = target.start().expect("a thread");
        let piece = "x".repeat(8 * 1024);
        for _ in 0..2 * WAITING_MAX + 200 {
            feed.offer(&piece, 1);
        }
        feed.finish();
        let lost = DROPPED.load(Ordering::Relaxed) - dropped;
        assert!(lost >= 2 * WAITING_MAX as u64 + 200, "{lost}");
    }
}
