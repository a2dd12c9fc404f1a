//! What every test stands on: the real `forebay` process, a scripted backend, a raw client.
//!
//! The order of events is the test's own: it reads a request from the backend's side, writes a
//! piece of the answer, and looks at what the client got, all on one thread. So "the first chunk
//! is there before the second is sent" is said by the order of two lines, not by a clock. Waiting
//! is always for an event and ends in a panic at [`PATIENCE`].
//!
//! `FOREBAY_TEST_SHARDS` (2) and `FOREBAY_TEST_ARGS` (such as `--driver epoll`) are how the same
//! tests run over one shard, two, and each driver.

mod backend;
mod client;
mod gateway;
mod mock;

use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

pub use backend::{Backend, Listener, Peer};
pub use client::{Answer, Client, Head};
pub use gateway::{Folder, Gateway, Lines, Setup, command, people, server, storm};
pub use mock::Mock;

/// How long anything may take before a test gives up. Nothing is measured by it: a busy machine
/// may use all of it.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The keys of tenants `a` and `b` in [`people`].
pub const KEY_A: &str = "sk-test-a";
pub const KEY_B: &str = "sk-test-b";

/// Asks again and again until there is an answer.
#[track_caller]
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    wait_until(|| ask().ok_or_else(|| what.to_owned()))
}

/// The same; what is missing is said anew each time.
#[track_caller]
pub fn wait_until<T>(mut ask: impl FnMut() -> Result<T, String>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        let missing = match ask() {
            Ok(found) => return found,
            Err(missing) => missing,
        };
        assert!(Instant::now() < until, "{missing}: not within {PATIENCE:?}");
        // Between two looks at another process, which tells nobody when it is ready, so that looking
        // does not starve what is looked for.
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Makes the coming close of `stream` a reset.
fn reset_on_close(stream: &TcpStream) {
    let linger = Some(Duration::ZERO);
    rustix::net::sockopt::set_socket_linger(stream, linger).expect("set");
}

/// Whether reading ended because the other side went away, in whichever way.
fn is_gone(read: &io::Result<usize>) -> bool {
    match read {
        Ok(count) => *count == 0,
        Err(error) => matches!(
            error.kind(),
            io::ErrorKind::ConnectionReset
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::BrokenPipe
        ),
    }
}

/// A POST of `body` to `path` with tenant `a`'s key.
pub fn post(path: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    post_with(path, "", body)
}

/// The same with further field lines, each ending in CRLF.
pub fn post_with(path: &str, fields: &str, body: impl AsRef<[u8]>) -> Vec<u8> {
    let body = body.as_ref();
    let mut out = format!(
        "POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY_A}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n{fields}\r\n",
        body.len()
    )
    .into_bytes();
    out.extend_from_slice(body);
    out
}

pub fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY_A}\r\n\r\n")
        .into_bytes()
}

/// A chat that is answered in one piece.
pub fn chat() -> Vec<u8> {
    post("/v1/chat/completions", r#"{"model":"m","messages":[]}"#)
}

/// A chat that is streamed; the client does not ask for usage.
pub fn stream() -> Vec<u8> {
    post("/v1/chat/completions", r#"{"model":"m","messages":[],"stream":true}"#)
}

/// The same, and the client asks for usage.
pub fn stream_with_usage() -> Vec<u8> {
    let body =
        r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true}}"#;
    post("/v1/chat/completions", body)
}

/// An event with one token of text.
pub fn token(text: &str) -> String {
    let text = serde_json::to_string(text).expect("JSON");
    format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{{\"index\":0,\
         \"delta\":{{\"content\":{text}}},\"finish_reason\":null}}]}}\n\n"
    )
}

pub const ROLE: &str = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n";
pub const FINISH: &str = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
/// Seven prompt tokens, five generated.
pub const USAGE: &str = "data: {\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5,\"total_tokens\":12}}\n\n";
pub const DONE: &str = "data: [DONE]\n\n";

/// The head of a streamed answer in chunks.
pub const STREAM_HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\
                               transfer-encoding: chunked\r\n\r\n";
pub const LAST_CHUNK: &str = "0\r\n\r\n";

/// `data` as one HTTP chunk.
pub fn chunk(data: impl AsRef<[u8]>) -> Vec<u8> {
    let data = data.as_ref();
    let mut out = format!("{:x}\r\n", data.len()).into_bytes();
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
    out
}

/// A JSON answer with its length.
pub fn json(status: u16, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status} Status\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n\
         {body}",
        body.len()
    )
    .into_bytes()
}

/// A chat's plain answer: seven prompt tokens, five generated.
pub const REPLY: &str = r#"{"id":"c","object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}"#;
