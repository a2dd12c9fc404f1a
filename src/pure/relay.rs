//! One answer on its way from a backend to a client: framing is taken off and put on again, events
//! are watched, one kind of event may be hidden, everything else passes byte for byte.
//!
//! No I/O: bytes in, bytes out, so that every cut of every stream can be tried. A chunk that
//! comes in goes out in the same call; nothing waits for anything, except that the beginning of
//! an event is held back (at most [`HELD_BYTES_MAX`]) while usage is being hidden, because only its
//! end tells whether the client may see it.

use std::io::Write;

use flate2::write::MultiGzDecoder;

use crate::pure::answer::Refusal;
use crate::pure::dialect::Envelope;
use crate::pure::h1::{BodyFault, Decoder, Framing, LAST_CHUNK, append_chunk};
use crate::pure::sse::{self, HELD_BYTES_MAX, Kind, Scanner};
use crate::pure::tokens;
use crate::pure::usage::{PlainScanner, Usage};

/// What is looked for in a body.
#[derive(Debug)]
pub enum Watch {
    /// An event stream.
    Stream(Box<Scanner>),
    /// A JSON document.
    Plain(Box<PlainScanner>),
    /// Audio, images, files.
    Blind,
}

/// What one piece of an answer brought.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Body bytes in it.
    pub bytes: usize,
    /// Something generated: what commits an answer and what timers wait for.
    pub content: bool,
    /// The backend reported an error inside the stream.
    pub error: bool,
    pub end: Option<End>,
}

/// How an answer ended for the client. Its last byte is in `out` then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The backend's body is over, too.
    Whole,
    /// The stream's last event came; the rest of the backend's body matters to nobody.
    Early,
}

/// Why an answer cannot go on. The client must see that it is not whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The backend's framing is not HTTP.
    Malformed(&'static str),
    /// The backend's connection ended before its answer did.
    Truncated,
}

/// An answer under way.
///
/// Of thousands of streams each is cold when its next chunk comes, so what every chunk touches lies
/// in the first hundred bytes, and what only hiding needs behind it.
#[derive(Debug)]
#[repr(C)]
pub struct Relay {
    decoder: Decoder,
    watch: Watch,
    /// How the client is told where the body ends.
    framing: Framing,
    /// Undoes the coding of a backend that compresses although it was asked not to.
    inflate: Option<Box<MultiGzDecoder<Vec<u8>>>>,
    /// Bytes of the coding have come.
    coded: bool,
    /// The client did not ask for the usage event that we asked for.
    hide: bool,
    /// An event too long to hold is being passed on as it comes.
    long: bool,
    /// The event before this push was hidden: an LF that still belongs to it is, too.
    hid: bool,
    /// Bytes of an event went to the client, its end not yet.
    open: bool,
    /// The last event has been passed on.
    last: bool,
    /// The beginning of an event that may have to be hidden.
    held: Vec<u8>,
    /// Visible bytes of one push, where they are not simply all of it.
    shown: Vec<u8>,
    /// Events that ended in one push: where, and whether they are to be hidden.
    ends: Vec<(usize, bool)>,
}

impl Relay {
    /// `body` is how the backend frames it, `framing` how the client is told.
    pub fn new(body: Framing, framing: Framing, watch: Watch, hide: bool) -> Relay {
        let hide = hide && matches!(watch, Watch::Stream(_));
        Relay {
            decoder: Decoder::new(body),
            framing,
            watch,
            inflate: None,
            coded: false,
            hide,
            held: Vec::new(),
            long: false,
            hid: false,
            open: false,
            last: false,
            shown: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// The body is gzip, which could be neither watched nor edited: the client gets it decoded.
    #[must_use]
    pub fn gunzip(mut self) -> Relay {
        self.inflate = Some(Box::new(MultiGzDecoder::new(Vec::new())));
        self
    }

    /// Takes what the backend sent and appends what the client gets. Uses up all of `input` but
    /// what stands behind the end of the answer, and says how much that was. Bytes of `input` are
    /// moved about. No allocation in steady state.
    ///
    /// # Errors
    /// [`Broken`]; what was sound before the fault is in `out`.
    pub fn push(
        &mut self,
        input: &mut [u8],
        out: &mut Vec<u8>,
    ) -> Result<(Progress, usize), Broken> {
        let mut progress = Progress::default();
        let mut used = 0;
        loop {
            let rest = &mut input[used..];
            let piece = self.decoder.decode_joined(rest).map_err(broken)?;
            let data = &rest[piece.data.clone()];
            match &mut self.inflate {
                _ if data.is_empty() => {}
                None => self.pass(data, out, &mut progress),
                Some(inflate) => {
                    self.coded = true;
                    let plain = gunzip(inflate, data)?;
                    self.pass(&plain, out, &mut progress);
                }
            }
            used += piece.consumed;
            if self.decoder.is_done() {
                self.settle(out, &mut progress)?;
                self.close(out);
                progress.end = Some(End::Whole);
                return Ok((progress, used));
            }
            if self.last && self.framing == Framing::Chunked {
                self.close(out);
                progress.end = Some(End::Early);
                return Ok((progress, used));
            }
            if used == input.len() || piece.consumed == 0 {
                return Ok((progress, used));
            }
        }
    }

    /// The backend has closed its connection.
    ///
    /// # Errors
    /// [`Broken::Truncated`] where the answer was not over.
    pub fn eof(&mut self, out: &mut Vec<u8>) -> Result<Progress, Broken> {
        self.decoder.eof().map_err(broken)?;
        let mut progress = Progress::default();
        self.settle(out, &mut progress)?;
        // A close is how such a body ends, and also how a dying backend looks. A stream in which
        // something was generated and no choice has ended was cut.
        if let Watch::Stream(scanner) = &self.watch
            && scanner.tally().ending() == sse::Ending::Open
            && scanner.tally().content_events > 0
        {
            return Err(Broken::Truncated);
        }
        self.close(out);
        progress.end = Some(End::Whole);
        Ok(progress)
    }

    /// Whether a comment of our own may stand here: not inside an event that the client has begun
    /// to receive.
    pub fn may_interject(&self) -> bool {
        matches!(self.watch, Watch::Stream(_)) && !self.open
    }

    /// Appends an error event to a stream that cannot go on, if it stands between two events.
    /// The body stays unfinished: the caller closes the connection.
    pub fn fail(&self, refusal: &Refusal, envelope: Envelope, out: &mut Vec<u8>) {
        if self.may_interject() && self.framing == Framing::Chunked {
            append_chunk(out, &refusal.event(envelope));
        }
    }

    /// Tokens that a stream has generated so far, as reported or as its events suggest.
    pub fn generated(&self) -> u64 {
        let Watch::Stream(scanner) = &self.watch else { return 0 };
        let tally = scanner.tally();
        let reported = tally.usage.and_then(|usage| usage.completion).unwrap_or(0);
        let fresh = &tally.fresh;
        reported.saturating_add(tokens::generated(fresh.tokens, fresh.bytes, fresh.chars).0)
    }

    /// The last event of the stream has come.
    pub fn is_last_seen(&self) -> bool {
        self.last
    }

    pub fn framing(&self) -> Framing {
        self.framing
    }

    /// What the answer has reported and shown, and how the rest of its body is to be read.
    pub fn finish(self) -> (Seen, Decoder) {
        let over = self.last || self.decoder.is_done();
        let seen = match self.watch {
            Watch::Stream(scanner) => {
                let tally = scanner.tally();
                Seen {
                    usage: tally.usage,
                    // What was generated since the last report.
                    fresh_tokens: tally.fresh.tokens,
                    fresh_bytes: tally.fresh.bytes,
                    fresh_chars: tally.fresh.chars,
                    over: over || tally.ending() != sse::Ending::Open,
                    error: tally.error,
                }
            }
            Watch::Plain(mut scanner) => {
                let plain = scanner.finish();
                Seen {
                    usage: plain.usage,
                    fresh_tokens: 0,
                    fresh_bytes: if plain.usage.is_some() { 0 } else { plain.text_bytes },
                    fresh_chars: if plain.usage.is_some() { 0 } else { plain.text_chars },
                    over,
                    error: plain.error,
                }
            }
            Watch::Blind => Seen { over, ..Seen::default() },
        };
        (seen, self.decoder)
    }

    /// Body bytes from the backend to the client.
    fn pass(&mut self, data: &[u8], out: &mut Vec<u8>, progress: &mut Progress) {
        progress.bytes += data.len();
        match &mut self.watch {
            Watch::Stream(scanner) if self.hide => {
                let (ends, last) = (&mut self.ends, &mut self.last);
                // Where the last event ended: those that are shown need not be told apart.
                let mut ended = 0;
                scanner.push(data, |event| {
                    note(&event, progress, last);
                    if event.kind == Kind::Usage {
                        if ended > 0 {
                            ends.push((ended, false));
                        }
                        ends.push((event.end, true));
                    }
                    ended = event.end;
                });
                let clean = self.held.is_empty() && !self.long && !self.hid;
                if clean && ends.is_empty() && ended == data.len() {
                    // As a rule: whole events, none to hide.
                    self.open = false;
                    return frame(&self.framing, data, out);
                }
                if ends.last().is_none_or(|(end, _)| *end < ended) && ended > 0 {
                    ends.push((ended, false));
                }
                self.shown.clear();
                // The LF of a CRLF that was cut right behind an event shares that event's lot.
                let mut from = scanner.tail();
                if !self.hid {
                    self.shown.extend_from_slice(&data[..from]);
                }
                for (end, usage) in self.ends.drain(..) {
                    self.hid = usage && !self.long;
                    if !self.hid {
                        self.shown.extend_from_slice(&self.held);
                        self.shown.extend_from_slice(&data[from..end]);
                    }
                    self.held.clear();
                    self.long = false;
                    from = end;
                }
                let rest = &data[from..];
                if !rest.is_empty() && (self.long || self.held.len() + rest.len() > HELD_BYTES_MAX)
                {
                    self.shown.append(&mut self.held);
                    self.shown.extend_from_slice(rest);
                    self.long = true;
                } else {
                    self.held.extend_from_slice(rest);
                }
                self.open = self.long;
                frame(&self.framing, &self.shown, out);
            }
            Watch::Stream(scanner) => {
                let last = &mut self.last;
                scanner.push(data, |event| note(&event, progress, last));
                self.open = !scanner.at_boundary();
                frame(&self.framing, data, out);
            }
            Watch::Plain(scanner) => {
                scanner.push(data);
                progress.content = true;
                frame(&self.framing, data, out);
            }
            Watch::Blind => {
                progress.content = true;
                frame(&self.framing, data, out);
            }
        }
    }

    /// The backend's body is over: takes in what waited for more, before the end is judged.
    fn settle(&mut self, out: &mut Vec<u8>, progress: &mut Progress) -> Result<(), Broken> {
        // No byte at all is an empty body, whatever its coding.
        if let Some(inflate) = self.inflate.as_mut().filter(|_| self.coded) {
            // Sound framing around half a gzip body is still half a body.
            inflate.try_finish().map_err(|_| Broken::Truncated)?;
            let plain = std::mem::take(inflate.get_mut());
            self.pass(&plain, out, progress);
        }
        if let Watch::Stream(scanner) = &mut self.watch {
            let event = scanner.finish();
            if let Some(event) = &event {
                note(event, progress, &mut self.last);
            }
            let usage = event.is_some_and(|event| event.kind == Kind::Usage);
            if !(self.hide && usage && !self.long) {
                frame(&self.framing, &self.held, out);
            }
            self.held.clear();
        }
        Ok(())
    }

    /// Ends the body for the client.
    fn close(&self, out: &mut Vec<u8>) {
        if self.framing == Framing::Chunked {
            out.extend_from_slice(LAST_CHUNK);
        }
    }
}

/// One piece of a gzip body, decoded. Allocates: this is no path that a sane backend takes.
fn gunzip(inflate: &mut MultiGzDecoder<Vec<u8>>, data: &[u8]) -> Result<Vec<u8>, Broken> {
    for step in data.chunks(1024) {
        let sound = inflate.write_all(step).and_then(|()| inflate.flush());
        sound.map_err(|_| Broken::Malformed("the body is not the gzip it claims to be"))?;
        if inflate.get_ref().len() > INFLATED_MAX {
            return Err(Broken::Malformed("the body inflates beyond all measure"));
        }
    }
    Ok(std::mem::take(inflate.get_mut()))
}

/// What one read of compressed bytes may become: answers are text, which shrinks tenfold.
const INFLATED_MAX: usize = 4 * 1024 * 1024;

/// What is known of an answer at its end, for the bill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The last running totals that the backend reported.
    pub usage: Option<Usage>,
    /// Generated since that report, or altogether without one: tokens as events suggest them,
    /// bytes and characters of text.
    pub fresh_tokens: u64,
    pub fresh_bytes: u64,
    pub fresh_chars: u64,
    /// The answer said that it was complete.
    pub over: bool,
    pub error: bool,
}

fn note(event: &sse::Event, progress: &mut Progress, last: &mut bool) {
    progress.content |= event.kind == Kind::Content;
    progress.error |= event.kind == Kind::Error;
    *last |= event.last;
}

fn frame(framing: &Framing, data: &[u8], out: &mut Vec<u8>) {
    match framing {
        _ if data.is_empty() => {}
        Framing::Chunked => append_chunk(out, data),
        Framing::None => {}
        Framing::Length(_) | Framing::UntilClose => out.extend_from_slice(data),
    }
}

fn broken(fault: BodyFault) -> Broken {
    match fault {
        BodyFault::Malformed(why) => Broken::Malformed(why),
        BodyFault::TooLarge => Broken::Malformed("too large"),
        BodyFault::Truncated => Broken::Truncated,
    }
}

#[cfg(test)]
mod tests {
    //! Goal: however a backend's bytes are cut, the client's bytes are the same, and what is
    //! hidden is exactly the usage event. Method: every cut of small streams in one and in two
    //! places, against a plain statement of what must come out.
    use super::*;

    const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\"}}]}\n\n";
    const TEXT: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}]}\n\n";
    const STOP: &str =
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    fn chunked(events: &[&str]) -> Vec<u8> {
        let mut out = Vec::new();
        for event in events {
            append_chunk(&mut out, event.as_bytes());
        }
        out.extend_from_slice(LAST_CHUNK);
        out
    }

    /// What a client reads from a chunked body.
    fn unchunk(mut wire: &[u8]) -> String {
        let mut decoder = Decoder::new(Framing::Chunked);
        let mut body = Vec::new();
        loop {
            let piece = decoder.decode(wire).unwrap();
            body.extend_from_slice(&wire[piece.data.clone()]);
            wire = &wire[piece.consumed..];
            if piece.end {
                assert!(wire.is_empty());
                return String::from_utf8(body).unwrap();
            }
            assert!(piece.consumed > 0, "the body has no end");
        }
    }

    /// Feeds `pieces` until the answer is over; what the client got, how it ended, what is known.
    fn run(pieces: &[&[u8]], hide: bool) -> (Vec<u8>, End, Seen) {
        let watch = Watch::Stream(Box::default());
        let mut relay = Relay::new(Framing::Chunked, Framing::Chunked, watch, hide);
        let mut out = Vec::new();
        for piece in pieces {
            let mut piece = piece.to_vec();
            let (progress, _) = relay.push(&mut piece, &mut out).unwrap();
            if let Some(end) = progress.end {
                return (out, end, relay.finish().0);
            }
        }
        panic!("the stream has no end");
    }

    fn every_cut(wire: &[u8], mut check: impl FnMut(&[&[u8]])) {
        for a in 0..=wire.len() {
            check(&[&wire[..a], &wire[a..]]);
            for b in (a..=wire.len()).step_by(7) {
                check(&[&wire[..a], &wire[a..b], &wire[b..]]);
            }
        }
    }

    #[test]
    fn the_usage_event_alone_is_hidden_however_the_stream_is_cut() {
        for ending in ["\n\n", "\r\n\r\n"] {
            let events = [ROLE, TEXT, STOP, USAGE, DONE].map(|event| event.replace("\n\n", ending));
            let events: Vec<&str> = events.iter().map(String::as_str).collect();
            let wire = chunked(&events);
            let shown = [events[0], events[1], events[2], events[4]].concat();
            every_cut(&wire, |pieces| {
                let (out, _, seen) = run(pieces, true);
                // Behind the last event a client may get an LF more or less.
                assert_eq!(unchunk(&out).trim_end(), shown.trim_end());
                assert_eq!(seen.usage.unwrap().charge(), Some((9, 3)));
                assert!(seen.over);
            });
        }
    }

    #[test]
    fn without_hiding_every_byte_passes_up_to_the_last_event() {
        let events = [ROLE, ": comment\n\n", TEXT, "data: null\n\n", STOP, USAGE, DONE];
        let wire = chunked(&events);
        every_cut(&wire, |pieces| {
            let (out, _, seen) = run(pieces, false);
            assert_eq!(unchunk(&out).trim_end(), events.concat().trim_end());
            assert_eq!(seen.usage.unwrap().charge(), Some((9, 3)));
        });
    }

    #[test]
    fn a_chunk_leaves_in_the_call_that_brought_it() {
        let watch = || Watch::Stream(Box::default());
        for hide in [false, true] {
            let mut relay = Relay::new(Framing::Chunked, Framing::Chunked, watch(), hide);
            for event in [ROLE, TEXT, TEXT, STOP] {
                let (mut wire, mut out) = (Vec::new(), Vec::new());
                append_chunk(&mut wire, event.as_bytes());
                let expected = wire.clone();
                relay.push(&mut wire, &mut out).unwrap();
                assert_eq!(out, expected);
            }
        }
    }

    #[test]
    fn an_endless_event_is_passed_on_while_usage_is_hidden_and_memory_stays_bounded() {
        let watch = Watch::Stream(Box::default());
        let mut relay = Relay::new(Framing::UntilClose, Framing::UntilClose, watch, true);
        let mut got = Vec::new();
        let mut sent = b"data: ".to_vec();
        relay.push(&mut b"data: ".to_vec(), &mut got).unwrap();
        for _ in 0..200 {
            let mut piece = vec![b'q'; 4096];
            sent.extend_from_slice(&piece);
            relay.push(&mut piece, &mut got).unwrap();
            assert!(sent.len() - got.len() <= HELD_BYTES_MAX);
            assert!(relay.held.capacity() <= 4 * HELD_BYTES_MAX);
        }
        let rest = ["\n\n", TEXT, STOP, USAGE, DONE].concat();
        sent.extend_from_slice(["\n\n", TEXT, STOP, DONE].concat().as_bytes());
        relay.push(&mut rest.into_bytes(), &mut got).unwrap();
        assert!(got == sent);
        assert_eq!(relay.finish().0.usage.unwrap().charge(), Some((9, 3)));
    }

    #[test]
    fn a_stream_that_breaks_never_gets_an_end() {
        let wire = chunked(&[ROLE, TEXT, STOP, USAGE, DONE]);
        let over = chunked(&[ROLE, TEXT, STOP, USAGE, DONE]).len() - LAST_CHUNK.len();
        for cut in 0..over {
            let watch = Watch::Stream(Box::default());
            let mut relay = Relay::new(Framing::Chunked, Framing::Chunked, watch, true);
            let mut out = Vec::new();
            let (progress, _) = relay.push(&mut wire[..cut].to_vec(), &mut out).unwrap();
            if progress.end.is_none() {
                assert_eq!(relay.eof(&mut out), Err(Broken::Truncated));
                assert!(!out.ends_with(LAST_CHUNK));
            }
        }
    }

    #[test]
    fn a_close_ends_a_stream_only_if_its_choices_have_ended() {
        let closes = |events: &[&str]| {
            let watch = Watch::Stream(Box::default());
            let mut relay = Relay::new(Framing::UntilClose, Framing::Chunked, watch, false);
            let mut out = Vec::new();
            relay.push(&mut events.concat().into_bytes(), &mut out).unwrap();
            relay.eof(&mut out).map(|progress| progress.end)
        };
        assert_eq!(closes(&[ROLE, TEXT]), Err(Broken::Truncated));
        assert_eq!(closes(&[ROLE, TEXT, STOP]), Ok(Some(End::Whole)));
        assert_eq!(closes(&["data: {\"anything\":1}\n\n"]), Ok(Some(End::Whole)));
    }

    #[test]
    fn a_last_event_without_its_blank_line_ends_a_close_delimited_stream() {
        for tail in [STOP.trim_end(), "data: [DONE]", "data: [DONE]\n"] {
            let text = [ROLE, TEXT, tail].concat();
            for hide in [false, true] {
                let watch = Watch::Stream(Box::default());
                let mut relay = Relay::new(Framing::UntilClose, Framing::Chunked, watch, hide);
                let mut out = Vec::new();
                relay.push(&mut text.clone().into_bytes(), &mut out).unwrap();
                if !relay.is_last_seen() {
                    assert_eq!(relay.eof(&mut out).map(|p| p.end), Ok(Some(End::Whole)), "{tail}");
                }
                assert_eq!(unchunk(&out), text);
            }
        }
    }

    #[test]
    fn half_a_gzip_body_is_never_whole_and_two_members_are_one_body() {
        let gzip = |text: &str| {
            let mut coder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            coder.write_all(text.as_bytes()).unwrap();
            coder.finish().unwrap()
        };
        let text = "{\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12}}";
        let (left, right) = text.split_at(20);
        for body in [gzip(text), [gzip(left), gzip(right)].concat()] {
            for cut in 0..=body.len() {
                let mut wire = Vec::new();
                if cut > 0 {
                    append_chunk(&mut wire, &body[..cut]);
                }
                wire.extend_from_slice(LAST_CHUNK);
                let watch = Watch::Plain(Box::default());
                let relay = Relay::new(Framing::Chunked, Framing::Chunked, watch, false);
                let (mut relay, mut out) = (relay.gunzip(), Vec::new());
                let pushed = relay.push(&mut wire, &mut out);
                let between = cut == gzip(left).len() && body != gzip(text);
                if cut == body.len() {
                    assert_eq!(pushed.unwrap().0.end, Some(End::Whole));
                    assert_eq!(unchunk(&out), text);
                } else if cut == 0 {
                    assert_eq!(pushed.unwrap().0.end, Some(End::Whole));
                } else if !between {
                    assert!(pushed.is_err(), "cut at {cut}: {pushed:?}");
                    assert!(!out.ends_with(LAST_CHUNK));
                }
            }
        }
    }

    #[test]
    fn plain_bodies_pass_in_every_framing_and_report_usage() {
        let body = "{\"choices\":[{\"message\":{\"content\":\"hi\"}}],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12}}";
        let length = Framing::Length(body.len() as u64);
        for cut in 0..=body.len() {
            let watch = Watch::Plain(Box::default());
            let mut relay = Relay::new(length, length, watch, true);
            let mut out = Vec::new();
            let mut end = None;
            for piece in [&body[..cut], &body[cut..]] {
                end = end.or(relay.push(&mut piece.as_bytes().to_vec(), &mut out).unwrap().0.end);
            }
            assert_eq!((end, out.as_slice()), (Some(End::Whole), body.as_bytes()));
            assert_eq!(relay.finish().0.usage.unwrap().charge(), Some((9, 3)));
        }
    }

    #[test]
    fn bytes_behind_an_answer_are_left_alone_and_counted() {
        let mut wire = chunked(&[TEXT]);
        let whole = wire.len();
        wire.extend_from_slice(b"HTTP/1.1 200 OK");
        let watch = Watch::Blind;
        let mut relay = Relay::new(Framing::Chunked, Framing::Chunked, watch, false);
        let (progress, used) = relay.push(&mut wire, &mut Vec::new()).unwrap();
        assert_eq!((progress.end, used), (Some(End::Whole), whole));
    }

    #[test]
    fn our_words_stand_only_between_events() {
        let watch = Watch::Stream(Box::default());
        let mut relay = Relay::new(Framing::UntilClose, Framing::Chunked, watch, false);
        assert!(relay.may_interject());
        relay.push(&mut TEXT.as_bytes()[..20].to_vec(), &mut Vec::new()).unwrap();
        assert!(!relay.may_interject());
        relay.push(&mut TEXT.as_bytes()[20..].to_vec(), &mut Vec::new()).unwrap();
        assert!(relay.may_interject());
    }
}
