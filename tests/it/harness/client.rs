//! The client's side: bytes out, bytes in, and a strict reading of what came.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use super::{PATIENCE, is_gone, reset_on_close};

/// One connection to the gateway.
pub struct Client {
    stream: TcpStream,
    /// Received and not yet looked at.
    buf: Vec<u8>,
    /// The other side has said its last.
    over: bool,
}

/// A response's head.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    /// Names in lower case.
    pub fields: Vec<(String, String)>,
    pub text: String,
}

impl Head {
    pub fn field(&self, name: &str) -> Option<&str> {
        let mut found = self.fields.iter().filter(|(own, _)| own == name);
        let value = found.next().map(|(_, value)| value.as_str());
        assert!(found.next().is_none(), "{name} came twice: {}", self.text);
        value
    }

    pub fn chunked(&self) -> bool {
        self.field("transfer-encoding") == Some("chunked")
    }
}

/// A response as far as it came.
#[derive(Clone, Debug)]
pub struct Answer {
    pub head: Head,
    pub body: Vec<u8>,
    /// Its framing says that it is whole.
    pub whole: bool,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.status
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("UTF-8")
    }

    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        match serde_json::from_slice(&self.body) {
            Ok(value) => value,
            Err(error) => panic!("{error}: {}\n{}", self.head.text, self.text()),
        }
    }

    /// `error.code` of OpenAI's envelope.
    #[track_caller]
    pub fn code(&self) -> String {
        self.json()["error"]["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Client {
    #[track_caller]
    pub fn new(address: SocketAddr) -> Client {
        Client::try_new(address).expect("the gateway listens")
    }

    pub fn try_new(address: SocketAddr) -> std::io::Result<Client> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Client { stream, buf: Vec::new(), over: false })
    }

    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).expect("the gateway takes it");
    }

    /// False if the gateway does not take it any more.
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

    /// Reads more; false at the end, orderly or not.
    #[track_caller]
    fn read(&mut self) -> bool {
        if self.over {
            return false;
        }
        let mut piece = [0; 64 * 1024];
        let read = self.stream.read(&mut piece);
        if is_gone(&read) {
            self.over = true;
            return false;
        }
        match read {
            Ok(count) => self.buf.extend_from_slice(&piece[..count]),
            Err(error) => panic!("{error}; so far: {}", String::from_utf8_lossy(&self.buf)),
        }
        true
    }

    /// The next head that is not an interim one.
    #[track_caller]
    pub fn head(&mut self) -> Head {
        loop {
            let head = self.any_head();
            if head.status >= 200 {
                return head;
            }
        }
    }

    /// The next head, also a 1xx.
    #[track_caller]
    pub fn any_head(&mut self) -> Head {
        let end = loop {
            if let Some(end) = self.buf.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            let more = self.read();
            assert!(more, "no head came, but {:?}", String::from_utf8_lossy(&self.buf));
        };
        let text = String::from_utf8(self.buf.drain(..end).collect()).expect("a head of ASCII");
        let mut lines = text.split("\r\n");
        let line = lines.next().unwrap_or_default();
        let status = line.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|status| status.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let fields = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
            .collect();
        Head { status, fields, text }
    }

    /// The next chunk's data; `None` for the last one, and for an end without it.
    #[track_caller]
    pub fn chunk(&mut self) -> Option<Vec<u8>> {
        let line = self.line()?;
        let size =
            std::str::from_utf8(&line).ok().and_then(|hex| usize::from_str_radix(hex, 16).ok());
        let size = size.unwrap_or_else(|| panic!("no chunk size: {line:?}"));
        let data = self.take(size)?;
        assert_eq!(self.take(2)?, b"\r\n");
        (size > 0).then_some(data)
    }

    /// Waits until the chunks received from here on hold `text`, and gives all of their data.
    #[track_caller]
    pub fn chunks_until(&mut self, text: &str) -> String {
        let mut data = Vec::new();
        while !String::from_utf8_lossy(&data).contains(text) {
            match self.chunk() {
                Some(more) => data.extend(more),
                None => panic!("{text:?} did not come: {:?}", String::from_utf8_lossy(&data)),
            }
        }
        String::from_utf8(data).expect("UTF-8")
    }

    fn line(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some(end) = self.buf.windows(2).position(|two| two == b"\r\n") {
                let line = self.buf.drain(..end).collect();
                self.buf.drain(..2);
                return Some(line);
            }
            if !self.read() {
                return None;
            }
        }
    }

    fn take(&mut self, count: usize) -> Option<Vec<u8>> {
        while self.buf.len() < count {
            if !self.read() {
                return None;
            }
        }
        Some(self.buf.drain(..count).collect())
    }

    /// A whole response, or as much of it as came before the connection ended.
    #[track_caller]
    pub fn answer(&mut self) -> Answer {
        let head = self.head();
        self.rest(head)
    }

    /// The status of a whole answer; `None` if the connection ends before it is whole.
    #[track_caller]
    pub fn try_answer(&mut self) -> Option<u16> {
        while !self.buf.windows(4).any(|four| four == b"\r\n\r\n") {
            if !self.read() {
                return None;
            }
        }
        let answer = self.answer();
        answer.whole.then(|| answer.status())
    }

    /// The same for an answer to HEAD, which has no body.
    #[track_caller]
    pub fn answer_to_head(&mut self) -> Answer {
        Answer { head: self.head(), body: Vec::new(), whole: true }
    }

    /// The body behind a head that was read already.
    #[track_caller]
    pub fn rest(&mut self, head: Head) -> Answer {
        let mut body = Vec::new();
        if matches!(head.status, 204 | 304) {
            return Answer { head, body, whole: true };
        }
        if head.chunked() {
            assert_eq!(head.field("content-length"), None, "framed twice");
            let whole = loop {
                // What came of a chunk that broke off is seen, too.
                let Some(line) = self.line() else { break false };
                let hex = std::str::from_utf8(&line).expect("ASCII");
                let size = usize::from_str_radix(hex, 16).expect("a chunk size");
                while self.buf.len() < size + 2 && self.read() {}
                if self.buf.len() < size + 2 {
                    body.append(&mut self.buf);
                    break false;
                }
                body.extend(self.buf.drain(..size));
                assert_eq!(self.buf.drain(..2).collect::<Vec<_>>(), b"\r\n");
                if size == 0 {
                    break true;
                }
            };
            return Answer { head, body, whole };
        }
        let Some(length) = head.field("content-length") else {
            let mut whole = true;
            while !self.over {
                let mut piece = [0; 64 * 1024];
                match self.stream.read(&mut piece) {
                    Ok(0) => self.over = true,
                    Ok(count) => self.buf.extend_from_slice(&piece[..count]),
                    Err(_) => {
                        // A reset is how such a body says that it is not whole.
                        self.over = true;
                        whole = false;
                    }
                }
            }
            body.append(&mut self.buf);
            return Answer { head, body, whole };
        };
        let length: usize = length.parse().expect("a length");
        while self.buf.len() < length && self.read() {}
        let whole = self.buf.len() >= length;
        body.extend(self.buf.drain(..length.min(self.buf.len())));
        Answer { head, body, whole }
    }

    /// Waits for the end of the connection, and asserts that nothing comes before it.
    #[track_caller]
    pub fn gone(&mut self) {
        while self.read() {}
        assert!(self.buf.is_empty(), "more came: {}", String::from_utf8_lossy(&self.buf));
    }

    /// Asserts that nothing has come that was not asked for.
    #[track_caller]
    pub fn quiet(&self) {
        assert!(self.buf.is_empty(), "more came: {}", String::from_utf8_lossy(&self.buf));
    }

    /// Says that nothing more will be sent.
    pub fn half_close(&self) {
        self.stream.shutdown(Shutdown::Write).expect("open");
    }

    pub fn fin(self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    pub fn rst(self) {
        reset_on_close(&self.stream);
    }
}
