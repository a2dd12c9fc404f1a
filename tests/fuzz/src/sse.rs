//! Event streams: events do not depend on cuts and are those of a slow reading of the standard; a
//! relay passes them all in the call that brings them, hides usage events and nothing else, frames
//! what it sends, and keeps little. Oracles: a splitter of lines, `serde_json`, a whole scan.

use std::fmt;
use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use serde::de::{MapAccess, Visitor};
use serde_json::Value;

use crate::pure::h1::{Decoder, Framing, LAST_CHUNK, append_chunk};
use crate::pure::relay::{Broken, End, Relay, Watch};
use crate::pure::sse::{Ending, Event, HELD_BYTES_MAX, Kind, Scanner, Tally};
use crate::pure::units::Rng;
use crate::{cuts, live_bytes, pick, steer};

/// Mode, by bits: 1 a relay, else the scanner alone; 2 the document is the wire in chunked coding,
/// else the body; 4 hides usage; 8 makes some event long.
pub fn run(input: &[u8]) {
    let Some((mode, mut rng, document)) = steer(input) else { return };
    let mut stream = document.to_vec();
    if mode & 8 != 0 {
        let at = pick(&mut rng, stream.len() + 1);
        let filler: &[u8] = [&b"a"[..], b" ", b"\\u20ac", b"\n: x"][pick(&mut rng, 4)];
        let filler = filler.repeat(1 + (HELD_BYTES_MAX + pick(&mut rng, 4096)) / filler.len());
        stream.splice(at..at, filler);
    }
    if mode & 1 == 0 {
        scanner(&mut rng, &stream);
    } else {
        relay(&mut rng, &stream, mode & 2 != 0, mode & 4 != 0);
    }
}

// ---- the scanner

/// Where an event stands in the stream, and the event without its place in a push.
type Placed = (usize, usize, Event);

fn scan(stream: &[u8], ends: &[usize]) -> (Vec<Placed>, Tally) {
    let mut scanner = Scanner::new();
    let mut events: Vec<Placed> = Vec::new();
    let mut from = 0;
    let place = |base: usize, event: Event| {
        let start = usize::try_from(base as i64 + event.start).expect("no event begins before 0");
        (start, base + event.end, Event { start: 0, end: 0, ..event })
    };
    let room = |events: &Vec<Placed>| (events.capacity() * size_of::<Placed>()) as isize;
    let before = live_bytes();
    for &end in ends {
        let earlier = events.len();
        scanner.push(&stream[from..end], |event| events.push(place(from, event)));
        // An LF that came later belongs to the event before it.
        if let Some((_, end, _)) = events[..earlier].last_mut() {
            *end += scanner.tail();
        } else {
            assert_eq!(scanner.tail(), 0);
        }
        from = end;
        // Held, joined, a shape, and a reader of long events.
        assert!(live_bytes() - before - room(&events) <= 2 * HELD_BYTES_MAX as isize + 8192);
        assert!(scanner.open_bytes() <= end as u64);
    }
    if let Some(event) = scanner.finish() {
        events.push(place(from, event));
    }
    assert_eq!(scanner.open_bytes(), 0);
    (events, *scanner.tally())
}

fn scan_whole(stream: &[u8]) -> (Vec<Placed>, Tally) {
    scan(stream, &[stream.len()])
}

fn scanner(rng: &mut Rng, stream: &[u8]) {
    let whole = scan_whole(stream);
    check_events(stream, &whole.0);
    for _ in 0..2 {
        let ends = cuts(rng, stream.len());
        assert_eq!(scan(stream, &ends), whole, "cut at {ends:?}");
    }
    let tally = &whole.1;
    let content = whole.0.iter().filter(|(.., event)| event.kind == Kind::Content).count();
    assert_eq!(tally.content_events, content as u64);
    let ended = whole.0.iter().any(|(.., event)| event.last);
    assert_eq!(tally.ending() == Ending::Done, ended);
    assert!(tally.fresh.bytes <= tally.text.bytes && tally.text.bytes <= stream.len() as u64);
    assert!(tally.text.chars <= tally.text.bytes);
}

/// The events against those of a slow reading.
fn check_events(stream: &[u8], events: &[Placed]) {
    let blocks = blocks(stream);
    assert_eq!(events.len(), blocks.len());
    let (mut at, mut last) = (0, false);
    for ((start, end, event), block) in events.iter().zip(&blocks) {
        assert_eq!((*start, *end), (at, block.end), "events cover the stream");
        assert_eq!(event.kind == Kind::Comment, !block.fields);
        if last {
            assert!(matches!(event.kind, Kind::Comment | Kind::Done | Kind::Other));
            assert_eq!((event.usage, event.text_bytes), (None, 0));
        }
        let long = end - start > HELD_BYTES_MAX;
        if block.data.trim_ascii() == b"[DONE]" && !last && !long {
            assert!(event.last && matches!(event.kind, Kind::Done | Kind::Error));
        }
        if event.kind == Kind::Usage {
            assert!(event.usage.is_some() && !event.last);
            if let Ok(Members(members)) = serde_json::from_slice(&block.data) {
                check_usage(&members);
            }
        }
        last |= event.last;
        at = *end;
    }
    assert_eq!(at, stream.len());
}

/// What may be hidden has usage and no choice, and is not of another dialect.
fn check_usage(members: &[(String, Value)]) {
    let all = |name: &'static str| members.iter().filter(move |member| member.0 == name);
    assert!(all("usage").any(|member| member.1.is_object()), "{members:?}");
    assert!(all("choices").all(|(_, value)| value.as_array().is_none_or(Vec::is_empty)));
    assert!(all("error").all(|(_, value)| !value.is_object() || value == &serde_json::json!({})));
    assert!(
        all("type").next_back().is_none_or(|(_, value)| value.as_str().is_none_or(str::is_empty))
    );
}

/// The members of a JSON object in their order, with those that come twice.
struct Members(Vec<(String, Value)>);

impl<'de> serde::Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Members, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(Object)
    }
}

/// An event as the standard has it, or a comment or blank line by itself.
struct Block {
    end: usize,
    fields: bool,
    data: Vec<u8>,
}

fn blocks(stream: &[u8]) -> Vec<Block> {
    let mut found = Vec::new();
    let mut block = Block { end: 0, fields: false, data: Vec::new() };
    let mut lines = 0;
    let mut at = if stream.starts_with("\u{FEFF}".as_bytes()) { 3 } else { 0 };
    while at < stream.len() {
        let stop = stream[at..].iter().position(|byte| matches!(byte, b'\r' | b'\n'));
        let (line, ended) = match stop {
            Some(stop) => (&stream[at..at + stop], true),
            None => (&stream[at..], false),
        };
        at += line.len();
        at += match &stream[at..] {
            [b'\r', b'\n', ..] => 2,
            [b'\r' | b'\n', ..] => 1,
            _ => 0,
        };
        let comment = line.first() == Some(&b':');
        if !line.is_empty() && !comment {
            block.fields = true;
            let data = match line.strip_prefix(b"data") {
                Some([]) => Some(&b""[..]),
                Some([b':', b' ', value @ ..] | [b':', value @ ..]) => Some(value),
                _ => None,
            };
            if let Some(data) = data {
                if lines > 0 {
                    block.data.push(b'\n');
                }
                block.data.extend_from_slice(data);
                lines += 1;
            }
        }
        if ended && (line.is_empty() || comment && !block.fields) {
            block.end = at;
            let empty = Block { end: 0, fields: false, data: Vec::new() };
            found.push(std::mem::replace(&mut block, empty));
            lines = 0;
        }
    }
    if found.last().map_or(0, |block| block.end) < stream.len() {
        block.end = stream.len();
        found.push(block);
    }
    found
}

// ---- the relay

/// A backend's answer: what is on the wire, and the stream that it means.
struct Sent {
    framing: Framing,
    wire: Vec<u8>,
    stream: Vec<u8>,
    gzip: bool,
    /// Where the answer ends on the wire, if it does.
    end: Option<usize>,
}

fn send(rng: &mut Rng, document: &[u8], is_wire: bool) -> Sent {
    if is_wire {
        let (mut decoder, mut stream, mut at) = (Decoder::new(Framing::Chunked), Vec::new(), 0);
        while at < document.len() && !decoder.is_done() {
            let Ok(piece) = decoder.decode(&document[at..]) else { break };
            stream.extend_from_slice(&document[at..][piece.data]);
            at += piece.consumed;
        }
        let end = decoder.is_done().then_some(at);
        let wire = document.to_vec();
        return Sent { framing: Framing::Chunked, wire, stream, gzip: false, end };
    }
    let gzip = rng.below(8) == 0;
    let body = if gzip { gzipped(document) } else { document.to_vec() };
    let stream = document.to_vec();
    match rng.below(3) {
        0 => {
            let (mut wire, mut from) = (Vec::new(), 0);
            for end in cuts(rng, body.len()) {
                append_chunk(&mut wire, &body[from..end]);
                from = end;
            }
            wire.extend_from_slice(LAST_CHUNK);
            let end = Some(wire.len());
            wire.extend_from_slice(b"HTTP/1.1 200 OK\r\n");
            Sent { framing: Framing::Chunked, wire, stream, gzip, end }
        }
        1 => {
            let end = Some(body.len());
            let framing = Framing::Length(body.len() as u64);
            Sent { framing, wire: body, stream, gzip, end }
        }
        _ => Sent { framing: Framing::UntilClose, wire: body, stream, gzip, end: None },
    }
}

fn gzipped(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain).expect("a vector takes all");
    encoder.finish().expect("a vector takes all")
}

/// What a client has received and understood.
struct Client {
    framing: Framing,
    decoder: Decoder,
    stream: Vec<u8>,
}

impl Client {
    /// Takes what was sent to it, which must be sound, and says whether the answer is complete.
    fn take(&mut self, sent: &[u8]) -> bool {
        let mut at = 0;
        while at < sent.len() {
            let piece = self.decoder.decode(&sent[at..]).expect("framing is sound");
            assert!(piece.consumed > 0, "nothing follows the end of an answer");
            self.stream.extend_from_slice(&sent[at..][piece.data]);
            at += piece.consumed;
        }
        self.decoder.is_done()
    }
}

fn relay(rng: &mut Rng, document: &[u8], is_wire: bool, hide: bool) {
    let sent = send(rng, document, is_wire);
    let (events, tally) = scan_whole(&sent.stream);
    // Too long to be held back, and hidden only if it comes in one piece.
    let hidden = |(start, end, event): &Placed| hide && event.kind == Kind::Usage && end > start;
    if events.iter().any(|event| hidden(event) && event.1 - event.0 > HELD_BYTES_MAX) {
        return;
    }
    let shown: Vec<&Placed> = events.iter().filter(|event| !hidden(event)).collect();
    let visible: Vec<u8> =
        shown.iter().flat_map(|(start, end, _)| &sent.stream[*start..*end]).copied().collect();
    // How much must be visible once `bytes` of the stream have come. An event that lacks its blank
    // line has not come before the end.
    let mut pushed = Scanner::new();
    pushed.push(&sent.stream, |_| {});
    let whole = sent.stream.len() - usize::try_from(pushed.open_bytes()).expect("it is a part");
    let mut sum = 0;
    let sums: Vec<(usize, usize)> = shown
        .iter()
        .filter(|event| event.1 <= whole)
        .map(|(start, end, _)| {
            sum += end - start;
            (*end, sum)
        })
        .collect();
    let due = |bytes: usize| -> usize {
        let whole = sums.partition_point(|&(end, _)| end <= bytes);
        whole.checked_sub(1).map_or(0, |last| sums[last].1)
    };

    let framing = match rng.below(2) {
        0 => Framing::UntilClose,
        _ if !hide && !sent.gzip && matches!(sent.framing, Framing::Length(1..)) => sent.framing,
        _ => Framing::Chunked,
    };
    let mut client = Client { framing, decoder: Decoder::new(framing), stream: Vec::new() };
    let mut relay = Relay::new(sent.framing, framing, Watch::Stream(Box::default()), hide);
    if sent.gzip {
        relay = relay.gunzip();
    }
    let mut out = Vec::with_capacity(4 * sent.stream.len() + 4096);
    // Where a comment of our own may stand in what the client gets.
    let mut gaps = vec![0];
    let (mut at, mut came, mut kept) = (0, 0, 0);
    let mut ended = None;
    let ends = cuts(rng, sent.wire.len());
    let largest = ends.windows(2).map(|two| two[1] - two[0]).max().unwrap_or(0).max(ends[0]);
    for end in ends {
        let mut piece = sent.wire[at..end].to_vec();
        out.clear();
        let room = out.capacity();
        let before = live_bytes();
        let pushed = relay.push(&mut piece, &mut out);
        kept += live_bytes() - before;
        assert_eq!(out.capacity(), room, "what goes out is no more than a few times what came");
        // An inflater, what is held twice, and a place for each event of one piece.
        assert!(kept <= 160 * 1024 + 40 * largest as isize, "{kept} bytes kept");
        let complete = client.take(&out);
        let (progress, used) = match pushed {
            Ok(pushed) => pushed,
            Err(Broken::Malformed(_)) => {
                assert!(sent.end.is_none() && is_wire, "a sound answer is broken");
                assert!(!complete && visible.starts_with(&client.stream));
                return;
            }
            Err(Broken::Truncated) => panic!("nothing was cut"),
        };
        assert_eq!(piece[used..], sent.wire[at + used..end], "what is not used is not touched");
        at += used;
        came += progress.bytes;
        assert!(visible.starts_with(&client.stream));
        if relay.may_interject() {
            gaps.push(client.stream.len());
        }
        ended = progress.end;
        if ended.is_some() {
            assert!(complete || framing == Framing::UntilClose);
            break;
        }
        assert_eq!(at, end, "all is used");
        assert!(!complete || matches!(framing, Framing::Length(_)));
        // Nothing waits but the beginning of an event.
        assert!(client.stream.len() >= due(came), "an event is late");
        assert!(hide || client.stream.len() == came, "a byte is late");
    }

    let last = events.iter().find(|event| event.2.last).map(|event| event.1);
    match ended {
        Some(End::Whole) => {
            assert_eq!(Some(at), sent.end, "the answer ends where it ends");
            assert_eq!(client.stream.len(), visible.len(), "all of it came");
        }
        Some(End::Early) => {
            // All up to the last event, or to the CR of its CRLF.
            let last = due(last.expect("a last event was seen").min(whole));
            let cut = usize::from(visible[..last].ends_with(b"\r\n"));
            assert!(client.stream.len() + cut >= last);
        }
        None => {
            assert!(sent.end.is_none(), "the answer has an end");
            out.clear();
            let closed = relay.eof(&mut out);
            let complete = client.take(&out);
            assert!(visible.starts_with(&client.stream));
            if closed.is_ok() {
                assert!(sent.framing == Framing::UntilClose);
                assert_eq!(client.stream.len(), visible.len(), "all of it came");
                assert!(complete || framing == Framing::UntilClose);
                ended = Some(End::Whole);
            } else {
                assert!(!complete, "what broke off looks finished");
                pushed.finish();
                let tally = pushed.tally();
                let cut = tally.ending() == Ending::Open && tally.content_events > 0;
                assert!(sent.framing == Framing::Chunked || cut, "a whole answer is refused");
            }
        }
    }
    assert!(client.framing == framing);
    interject(rng, &client.stream, &gaps);
    if ended.is_some() {
        let (seen, _) = relay.finish();
        assert_eq!((seen.usage, seen.error), (tally.usage, tally.error));
        let fresh = (tally.fresh.tokens, tally.fresh.bytes, tally.fresh.chars);
        assert_eq!((seen.fresh_tokens, seen.fresh_bytes, seen.fresh_chars), fresh);
    }
}

/// Comments of our own, where they may stand, change no event.
fn interject(rng: &mut Rng, stream: &[u8], gaps: &[usize]) {
    // A byte order mark counts at the very start alone.
    if stream.starts_with(&[0xEF]) {
        return;
    }
    let (mut with, mut from) = (Vec::new(), 0);
    for _ in 0..4 {
        let Some(&gap) = gaps.get(pick(rng, gaps.len())).filter(|&&gap| gap >= from) else { break };
        with.extend_from_slice(&stream[from..gap]);
        with.extend_from_slice(b": still here\n\n");
        from = gap;
    }
    with.extend_from_slice(&stream[from..]);
    let events = |stream: &[u8]| -> Vec<Event> {
        let events = scan_whole(stream).0.into_iter().map(|(.., event)| event);
        events.filter(|event| event.kind != Kind::Comment).collect()
    };
    assert_eq!(events(&with), events(stream));
}
