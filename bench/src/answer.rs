//! Reads one answer as it arrives and checks all of it: status, framing, event order, nonce, number
//! and size of chunks, usage, `[DONE]`.
//!
//! The common case, one whole event in one read, is checked where it lies; only what a read cuts
//! short is copied.

use memchr::memmem;

use crate::http::{Decoder, FIELDS_MAX, Fault, Framing, HEAD_MAX, shape};
use crate::wire::{CONTENT_KEY, ID_KEY, NONCE_LEN, Stamp};

/// Longest event or plain answer that is put together from pieces.
const PIECE_MAX: usize = 1 << 20;

/// What a right answer looks like.
#[derive(Debug, Clone, Copy)]
pub struct Expect {
    /// Server-sent events rather than one JSON document.
    pub stream: bool,
    /// A usage object comes.
    pub usage: bool,
    /// Content chunks.
    pub tokens: u32,
    /// Bytes of each event, or of the plain body.
    pub size: u32,
}

/// What one step found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// All bytes are taken; more must come.
    More,
    /// A content chunk, or the content of a plain answer.
    Chunk(Stamp),
    /// Any other event.
    Event,
    /// The answer is whole and right.
    End {
        /// The server will close the connection.
        close: bool,
    },
}

/// One answer in progress.
#[derive(Debug)]
pub struct Answer {
    expect: Expect,
    nonce: [u8; NONCE_LEN],
    state: State,
    /// The part of the head, of an event or of a plain body that has come so far.
    piece: Vec<u8>,
    close: bool,
    seq: u32,
    finished: bool,
    usage: bool,
    done: bool,
    /// Where the last chunk's content was within its event; the next one's is mostly there too.
    content_at: usize,
}

#[derive(Debug)]
enum State {
    Head,
    Body { decoder: Decoder },
    End,
}

impl Answer {
    /// An answer of which nothing is expected yet; see [`Answer::begin`].
    pub fn new(expect: Expect) -> Answer {
        Answer {
            expect,
            nonce: [0; NONCE_LEN],
            state: State::End,
            piece: Vec::new(),
            close: false,
            seq: 0,
            finished: false,
            usage: false,
            done: false,
            content_at: 0,
        }
    }

    /// Expects the answer to the request with this nonce.
    pub fn begin(&mut self, nonce: [u8; NONCE_LEN]) {
        *self = Answer {
            nonce,
            state: State::Head,
            piece: std::mem::take(&mut self.piece),
            content_at: self.content_at,
            ..Answer::new(self.expect)
        };
        self.piece.clear();
    }

    /// Takes bytes from the front of `rest` up to the next thing worth telling.
    ///
    /// # Errors
    /// The first thing that a right answer would not have.
    pub fn step(&mut self, rest: &mut &[u8]) -> Result<Step, Fault> {
        loop {
            match &mut self.state {
                State::Head => {
                    if !self.head(rest)? {
                        return Ok(Step::More);
                    }
                }
                State::Body { decoder } if decoder.is_done() => {
                    self.state = State::End;
                    return if self.piece.is_empty() {
                        self.end()
                    } else {
                        Err("the body ends inside an event")
                    };
                }
                State::Body { decoder } => {
                    if rest.is_empty() {
                        return Ok(Step::More);
                    }
                    let input = *rest;
                    let (skipped, data) = decoder.next(input)?;
                    if data.is_empty() {
                        *rest = &input[skipped..];
                        continue;
                    }
                    let found =
                        if self.expect.stream { event_end(&self.piece, data) } else { None };
                    let used = found.unwrap_or(data.len());
                    decoder.take(used);
                    *rest = &input[skipped + used..];
                    let data = &data[..used];
                    if !self.expect.stream {
                        if let Some(step) = self.plain(data)? {
                            return Ok(step);
                        }
                    } else if found.is_none() {
                        self.keep(data)?;
                    } else if self.piece.is_empty() {
                        return self.event(data);
                    } else {
                        self.keep(data)?;
                        let mut piece = std::mem::take(&mut self.piece);
                        let step = self.event(&piece);
                        piece.clear();
                        self.piece = piece;
                        return step;
                    }
                }
                State::End => return Ok(Step::More),
            }
        }
    }

    /// The answer has no length of its own and all that was due has come, so a close ends it.
    pub fn ends_by_close(&mut self) -> bool {
        matches!(&self.state, State::Body { decoder } if decoder.may_close())
            && self.piece.is_empty()
            && self.end().is_ok()
    }

    /// Reads the head; `false` while it is not whole.
    fn head(&mut self, rest: &mut &[u8]) -> Result<bool, Fault> {
        let input = *rest;
        if self.piece.is_empty()
            && let Some(length) = self.read_head(input)?
        {
            *rest = &input[length..];
            return Ok(true);
        }
        let before = self.piece.len();
        if before + input.len() > HEAD_MAX + PIECE_MAX {
            return Err("head too long");
        }
        self.piece.extend_from_slice(input);
        let piece = std::mem::take(&mut self.piece);
        let Some(length) = self.read_head(&piece)? else {
            self.piece = piece;
            *rest = &[];
            return Ok(false);
        };
        *rest = &input[length - before..];
        self.piece = piece;
        self.piece.clear();
        Ok(true)
    }

    fn read_head(&mut self, bytes: &[u8]) -> Result<Option<usize>, Fault> {
        let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
        let mut head = httparse::Response::new(&mut fields);
        let length = match head.parse(bytes) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err("bad head"),
        };
        if head.code != Some(200) {
            return Err("status is not 200");
        }
        let kind: &[u8] =
            if self.expect.stream { b"text/event-stream" } else { b"application/json" };
        let typed = head.headers.iter().any(|field| {
            field.name.eq_ignore_ascii_case("content-type") && field.value.starts_with(kind)
        });
        if !typed {
            return Err("wrong content-type");
        }
        let shape = shape(head.headers)?;
        let framing = shape.framing.unwrap_or(Framing::UntilClose);
        self.close = shape.close || framing == Framing::UntilClose;
        self.state = State::Body { decoder: Decoder::new(framing) };
        Ok(Some(length))
    }

    fn keep(&mut self, data: &[u8]) -> Result<(), Fault> {
        if self.piece.len() + data.len() > PIECE_MAX {
            return Err("event too long");
        }
        self.piece.extend_from_slice(data);
        Ok(())
    }

    fn event(&mut self, mut event: &[u8]) -> Result<Step, Fault> {
        // Heartbeats are comment lines, alone or before an event.
        while event.first() == Some(&b':') {
            let end = memchr::memchr(b'\n', event).ok_or("comment without end")?;
            event = &event[end + 1..];
        }
        if event == b"\n" {
            return Ok(Step::Event);
        }
        if self.done {
            return Err("an event after [DONE]");
        }
        let data = event.strip_prefix(b"data: ").ok_or("an event without data")?;
        if data == b"[DONE]\n\n" {
            self.done = true;
            return Ok(Step::Event);
        }
        self.check_nonce(data)?;
        if let Some(stamp) = self.stamp(event) {
            if stamp.seq != u64::from(self.seq) {
                return Err("chunks out of order");
            }
            if event.len() != self.expect.size as usize {
                return Err("a chunk of the wrong size");
            }
            self.seq += 1;
            return Ok(Step::Chunk(stamp));
        }
        if memmem::find(data, b"\"finish_reason\":\"stop\"").is_some() && !self.finished {
            self.finished = true;
        } else if memmem::find(data, b"\"choices\":[],\"usage\":{").is_some() && !self.usage {
            self.usage = true;
        } else {
            return Err("an event that was not sent");
        }
        Ok(Step::Event)
    }

    /// A plain answer is judged once it is whole.
    fn plain(&mut self, data: &[u8]) -> Result<Option<Step>, Fault> {
        let whole = self.expect.size as usize;
        let piece = std::mem::take(&mut self.piece);
        let body = if piece.is_empty() && data.len() == whole {
            data
        } else {
            self.piece = piece;
            self.keep(data)?;
            if self.piece.len() < whole {
                return Ok(None);
            }
            &std::mem::take(&mut self.piece)
        };
        if body.len() != whole {
            return Err("a plain answer of the wrong size");
        }
        self.check_nonce(body)?;
        let stamp = self.stamp(body).ok_or("a plain answer without content")?;
        self.seq = self.expect.tokens;
        (self.finished, self.done) = (true, true);
        self.usage = memmem::find(body, b"\"usage\":{").is_some();
        Ok(Some(Step::Chunk(stamp)))
    }

    fn check_nonce(&self, json: &[u8]) -> Result<(), Fault> {
        let id = json
            .strip_prefix(b"{")
            .and_then(|json| json.strip_prefix(ID_KEY))
            .ok_or("an answer without id")?;
        if id.starts_with(&self.nonce) { Ok(()) } else { Err("bytes of another request's answer") }
    }

    fn stamp(&mut self, event: &[u8]) -> Option<Stamp> {
        if !event.get(self.content_at..).is_some_and(|rest| rest.starts_with(CONTENT_KEY)) {
            self.content_at = memmem::find(event, CONTENT_KEY)?;
        }
        Stamp::read(&event[self.content_at + CONTENT_KEY.len()..])
    }

    fn end(&mut self) -> Result<Step, Fault> {
        match self {
            Answer { seq, expect, .. } if *seq != expect.tokens => Err("chunks are missing"),
            Answer { finished: false, .. } => Err("no finish reason"),
            Answer { done: false, .. } => Err("no [DONE]"),
            Answer { usage, expect, .. } if *usage != expect.usage => {
                Err(if *usage { "usage that was not asked for" } else { "no usage" })
            }
            _ => Ok(Step::End { close: self.close }),
        }
    }
}

/// Where the event that began with `piece` ends in `data`.
fn event_end(piece: &[u8], data: &[u8]) -> Option<usize> {
    if piece.last() == Some(&b'\n') && data.first() == Some(&b'\n') {
        return Some(1);
    }
    memmem::find(data, b"\n\n").map(|at| at + 2)
}

#[cfg(test)]
mod tests {
    //! A right answer passes at every cut; every kind of damage is seen.
    use super::{Answer, Expect, Step};
    use crate::http::Fault;

    const HEAD: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

    type Damage = fn(&mut Vec<String>);

    fn chunk(seq: u32) -> String {
        format!(
            "data: {{\"id\":\"chatcmpl-00000007\",\"delta\":{{\"content\":\"{seq:05}:0000000000000042:x\"}}}}\n\n"
        )
    }

    fn answer(events: &[String]) -> Vec<u8> {
        let body: String =
            events.iter().map(|event| format!("{:x}\r\n{event}\r\n", event.len())).collect();
        format!("{HEAD}{body}0\r\n\r\n").into_bytes()
    }

    fn right() -> Vec<String> {
        let finish =
            "data: {\"id\":\"chatcmpl-00000007\",\"finish_reason\":\"stop\"}\n\n".to_owned();
        let usage =
            "data: {\"id\":\"chatcmpl-00000007\",\"choices\":[],\"usage\":{}}\n\n".to_owned();
        vec![
            chunk(0),
            ": ping\n".to_owned() + &chunk(1),
            finish,
            usage,
            "data: [DONE]\n\n".to_owned(),
        ]
    }

    fn read(pieces: &[&[u8]]) -> Result<(usize, bool), Fault> {
        let size = u32::try_from(chunk(0).len()).expect("short");
        let mut answer = Answer::new(Expect { stream: true, usage: true, tokens: 2, size });
        answer.begin(*b"00000007");
        let (mut events, mut ended) = (0, false);
        for piece in pieces {
            let mut rest = *piece;
            while !ended {
                match answer.step(&mut rest)? {
                    Step::More => break,
                    Step::End { .. } => ended = true,
                    Step::Chunk(_) | Step::Event => events += 1,
                }
            }
        }
        Ok((events, ended))
    }

    #[test]
    fn a_right_answer_passes_at_every_cut() {
        let mut events = right();
        // The heartbeat is of the same event; its comment is not part of the chunk's size.
        for coalesced in [false, true] {
            if coalesced {
                events = vec![events.concat()];
            }
            let bytes = answer(&events);
            for cut in 0..bytes.len() {
                assert_eq!(read(&[&bytes[..cut], &bytes[cut..]]), Ok((5, true)), "cut at {cut}");
            }
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(read(&single), Ok((5, true)));
            assert_eq!(read(&[&bytes[..bytes.len() - 1]]), Ok((5, false)));
        }
    }

    #[test]
    fn damage_is_seen() {
        let broken: [(Fault, Damage); 9] = [
            ("chunks are missing", |events| drop(events.remove(1))),
            ("chunks out of order", |events| events.swap(0, 1)),
            ("chunks out of order", |events| events.insert(1, chunk(0))),
            ("no finish reason", |events| drop(events.remove(2))),
            ("no usage", |events| drop(events.remove(3))),
            ("no [DONE]", |events| drop(events.remove(4))),
            ("an event after [DONE]", |events| events.push(chunk(2))),
            ("a chunk of the wrong size", |events| events[0] = events[0].replace(":x", ":xx")),
            ("bytes of another request's answer", |events| {
                events[1] = events[1].replace("00000007", "00000008");
            }),
        ];
        for (fault, damage) in broken {
            let mut events = right();
            damage(&mut events);
            assert_eq!(read(&[&answer(&events)]), Err(fault));
        }
        let whole = answer(&right());
        let text = String::from_utf8(whole).expect("text");
        for (from, to, fault) in [
            ("200 OK", "502 Bad Gateway", "status is not 200"),
            ("text/event-stream", "text/html", "wrong content-type"),
            ("HTTP/1.1", "HTTP", "bad head"),
        ] {
            assert_eq!(read(&[text.replacen(from, to, 1).as_bytes()]), Err(fault));
        }
    }
}
