//! Event streams: where each event of a response ends, what it is, and what it says of usage.
//!
//! A [`Scanner`] is shown the bytes of a stream as they arrive, cut anywhere, and never changes or
//! delays one. Lines and events are those of the WHATWG standard (HTML, section 9.2.6): lines end
//! in LF, CR or CRLF, a byte order mark may stand at the start, one space behind the colon is
//! optional, several `data` lines make one text. Unlike a browser the scanner also reads an event
//! that the end of the stream cuts off from its blank line, because some servers end that way.
//!
//! Offsets let a relay hide usage-only chunks from a client that did not ask for them: it holds back
//! the bytes of an event whose end has not arrived ([`Scanner::open_bytes`]), at most
//! [`HELD_BYTES_MAX`], and drops them if the event proves to be [`Kind::Usage`].

use crate::pure::peek;
use crate::pure::usage::{self, Gist, PlainScanner, Type, Usage};

/// Longest event that is kept whole while its end has not arrived, and read whole. A longer one is
/// followed by the resumable reader instead, with the same result and a few hundred bytes of
/// state, and is never worth hiding.
pub const HELD_BYTES_MAX: usize = 16 << 10;

/// What an idle scanner keeps of its buffers.
const SPARE_BYTES_MAX: usize = 4 << 10;

/// The longest event whose shape is remembered.
const SHAPE_BYTES_MAX: usize = 1 << 10;

const DATA: &[u8] = b"data:";
const LF: u8 = b'\n';
const CR: u8 = b'\r';
const BOM: &[u8] = "\u{FEFF}".as_bytes();

/// What an event is to a gateway. The first that applies, in this order: `Comment`, `Error`,
/// `Content`, `Done`, `Usage`, `Other`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A comment line or a blank line between events: nothing that a client acts on. Each such line
    /// is reported by itself.
    Comment,
    /// The backend failed: a top-level `error`, `object: "error"`, `event: error`,
    /// `response.failed`.
    Error,
    /// Carries something generated: text, reasoning, refusal, tool call, audio. This is what
    /// commits a response and what the first-token and chunk timers wait for.
    Content,
    /// The last event: `[DONE]`, Anthropic's `message_stop`, `response.completed` and its like, a
    /// native endpoint's end.
    Done,
    /// OpenAI's extra chunk: a top-level `usage` object while `choices` is empty or absent, and no
    /// other dialect's `type`. The one kind that may be hidden.
    Usage,
    /// Everything else: role and finish chunks, `null`, keep-alive events, what is not JSON.
    Other,
}

/// One event. `Copy`, and holds no bytes of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Offset of its first byte in this push; negative if it began in an earlier one.
    pub start: i64,
    /// Offset in this push just behind the line end of its blank line.
    pub end: usize,
    pub kind: Kind,
    /// The usage that it reports, in whatever kind of event.
    pub usage: Option<Usage>,
    /// Unescaped UTF-8 bytes of generated text in it, and characters.
    pub text_bytes: u32,
    pub text_chars: u32,
    /// How many tokens it seems to carry: as many as the engine lists, else one for each choice
    /// with content. Engines usually send one token an event but may pack several, which only
    /// [`Tally::fresh`] together with the text's length can tell.
    pub tokens: u32,
    /// Nothing that matters follows: every [`Kind::Done`], and a last event that has content or
    /// says that the response failed.
    pub last: bool,
}

/// What a stream has shown up to now. Events behind the last one are not counted.
// What each event changes comes first, in one cache line: see `Scanner`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tally {
    /// Events of kind [`Kind::Content`].
    pub content_events: u64,
    /// Generated text of the whole stream.
    pub text: Text,
    /// Generated text since the last event that reported completion tokens (itself not included):
    /// what an estimate must add to the reported count if the stream ends here.
    pub fresh: Text,
    /// Some event had kind [`Kind::Error`].
    pub error: bool,
    done: bool,
    /// The latest running totals; see [`Usage::absorb`].
    pub usage: Option<Usage>,
    /// Choices by index modulo 128, and those that gave a reason for their end.
    seen: u128,
    finished: u128,
}

/// An amount of generated text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Text {
    /// Sum of [`Event::tokens`].
    pub tokens: u64,
    pub bytes: u64,
    pub chars: u64,
}

/// How far a stream came, for judging the end of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// An answer is still open: a body that ends here was cut short.
    Open,
    /// Every choice that appeared gave a reason for its end, but no last event came. A body may end
    /// here; whether all `n` choices appeared is [`Tally::choices_finished`].
    Finished,
    /// The last event came. What follows changes no bill.
    Done,
}

impl Tally {
    pub const fn ending(&self) -> Ending {
        if self.done {
            Ending::Done
        } else if self.seen != 0 && self.seen & !self.finished == 0 {
            Ending::Finished
        } else {
            Ending::Open
        }
    }

    /// Choices that gave a reason for their end.
    pub const fn choices_finished(&self) -> u32 {
        self.finished.count_ones()
    }

    fn note(&mut self, event: &Event, gist: &Gist) {
        self.error |= event.kind == Kind::Error;
        self.done |= event.last;
        self.seen |= gist.seen;
        self.finished |= gist.finished;
        self.count(event);
        if let Some(usage) = &event.usage {
            if usage.completion.is_some() {
                self.fresh = Text::default();
            }
            self.usage.get_or_insert_default().absorb(usage);
        }
    }

    #[inline]
    fn count(&mut self, event: &Event) {
        self.content_events += u64::from(event.kind == Kind::Content);
        self.text.add(event);
        self.fresh.add(event);
    }
}

impl Text {
    #[inline]
    fn add(&mut self, event: &Event) {
        // No stream has the 2^32 events that a sum would need to overflow.
        self.tokens += u64::from(event.tokens);
        self.bytes += u64::from(event.text_bytes);
        self.chars += u64::from(event.text_chars);
    }
}

/// Finds and reads the events of one stream.
///
/// Memory: the bytes of an event that is not complete, at most [`HELD_BYTES_MAX`]; nothing is
/// allocated while events arrive whole. Cost: about two passes over the bytes of an event.
///
/// Of thousands of streams each is cold when its next event comes, so what such an event touches
/// lies in the first two cache lines: how to read it in one, the sums in the other.
#[derive(Clone, Debug, Default)]
#[repr(C, align(64))]
pub struct Scanner {
    shape: Shape,
    /// Bytes of the open event that came in earlier pushes, held or not.
    before: u64,
    /// Bytes at the start of the last push that belong to the event before it.
    tail: usize,
    lines: Lines,
    tally: Tally,
    /// An event has ended, so no byte order mark can follow.
    begun: bool,
    /// The bytes of the open event, unless it is long.
    held: Vec<u8>,
    /// Reads the open event once it is long.
    long: Option<Box<Long>>,
    /// The text of an event with several `data` lines.
    joined: Vec<u8>,
}

// As the doc says.
const _: () = assert!(std::mem::offset_of!(Scanner, tally) == 64);

/// Where in an event the next byte falls.
#[derive(Clone, Copy, Debug, Default)]
struct Lines {
    /// How much of a byte order mark the stream has begun with; its length once that is settled.
    bom: usize,
    line: Line,
    /// The open event has had a line that is not a comment.
    fields: bool,
    /// The last byte was a CR, so that an LF would belong to it.
    after_cr: bool,
}

/// What the line that is being read has been so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Empty,
    Comment,
    Field,
}

impl Scanner {
    pub fn new() -> Scanner {
        Scanner::default()
    }

    /// Takes the next bytes of the stream and reports each event that ends in them, in order.
    /// Reports do not depend on how the stream was cut, but for offsets.
    pub fn push(&mut self, bytes: &[u8], mut on_event: impl FnMut(Event)) {
        self.tail = 0;
        // Where the open event starts in this push, and up to where its lines are known.
        let (mut from, mut at) = (0, 0);
        if self.lines.after_cr
            && let Some(&first) = bytes.first()
        {
            self.lines.after_cr = false;
            if first == LF {
                at = 1;
                if self.before == 0 {
                    self.tail = 1;
                    from = 1;
                }
            }
        }
        while at < bytes.len() {
            // Two calls of `on_event`, because most of what the first has to tell is known.
            if self.before == 0
                && let Some(event) = self.same_event(&bytes[from..], from)
            {
                (from, at) = (event.end, event.end);
                on_event(event);
                continue;
            }
            let Some(event) = self.new_event(bytes, from, at) else { break };
            (from, at) = (event.end, event.end);
            on_event(event);
        }
        if from < bytes.len() {
            self.hold(&bytes[from..]);
        }
    }

    /// The stream has ended: reports an event that lacks its blank line, with `end` 0. The scanner
    /// is then as new, but for its tally.
    pub fn finish(&mut self) -> Option<Event> {
        if self.before == 0 {
            return None;
        }
        let read = match self.long.take() {
            Some(long) => long.finish(),
            None => read_block(&self.held, !self.begun, &mut self.joined),
        };
        let event = self.judge(&read, 0, 0);
        self.next_event();
        self.lines = Lines { bom: BOM.len(), ..Lines::default() };
        Some(event)
    }

    /// Whether the last byte taken ended an event or a comment line, so that a line of our own may
    /// stand here. Says no behind a bare CR, whose LF may still come.
    pub const fn at_boundary(&self) -> bool {
        self.before == 0 && !self.lines.after_cr
    }

    /// How many bytes (0 or 1) at the start of the last push belong to the event before it: the LF
    /// of a CRLF that was cut right behind an event. Whoever hides that event hides them too.
    pub const fn tail(&self) -> usize {
        self.tail
    }

    /// How many bytes of an event whose end has not arrived earlier pushes brought.
    pub const fn open_bytes(&self) -> u64 {
        self.before
    }

    pub const fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Takes the event that `bytes`, which lie at `from` in this push, start with, if it is the last
    /// one with another text.
    #[inline(always)]
    fn same_event(&mut self, bytes: &[u8], from: usize) -> Option<Event> {
        if self.tally.done {
            return None;
        }
        // A shape is of an event that has ended, so there is no byte order mark to look for.
        let ((text_bytes, text_chars), len) = self.shape.fit(bytes)?;
        let event = Event {
            // Slices are shorter than 2^63 bytes.
            start: from as i64,
            end: from + len,
            kind: Kind::Content,
            usage: None,
            text_bytes: u32::try_from(text_bytes).unwrap_or(u32::MAX),
            text_chars: u32::try_from(text_chars).unwrap_or(u32::MAX),
            tokens: 1,
            last: false,
        };
        self.tally.count(&event);
        Some(event)
    }

    /// Takes any other event of this push that begins at `from`, or in an earlier one, and whose lines
    /// are known up to `at`, if its end has come.
    #[inline(never)]
    fn new_event(&mut self, bytes: &[u8], from: usize, at: usize) -> Option<Event> {
        if self.before == 0
            && let Some(event) = self.whole_event(&bytes[from..], from)
        {
            return Some(event);
        }
        let end = self.lines.event_end(bytes, at)?;
        let read = self.read_event(&bytes[from..end]);
        let event = self.judge(&read, from, end);
        let block = if self.before == 0 { &bytes[from..end] } else { &self.held };
        self.shape.learn(block, &event, &read);
        self.next_event();
        Some(event)
    }

    /// Reads the event that `bytes`, which lie at `from` in this push, start with, if it is whole and
    /// of a simple form.
    fn whole_event(&mut self, bytes: &[u8], from: usize) -> Option<Event> {
        let (data, len) = simple_event(bytes)?;
        let mut read = read_data(b"", data);
        read.data_at = DATA.len();
        let event = self.judge(&read, from, from + len);
        self.shape.learn(&bytes[..len], &event, &read);
        self.begun = true;
        self.lines.bom = BOM.len();
        Some(event)
    }

    /// Reads the open event, of which `part` is the last piece.
    fn read_event(&mut self, part: &[u8]) -> Read {
        if let Some(mut long) = self.long.take() {
            long.push(part);
            long.finish()
        } else if self.before == 0 {
            read_block(part, !self.begun, &mut self.joined)
        } else if self.held.len() + part.len() > HELD_BYTES_MAX {
            let mut long = Long::new(&self.held, !self.begun);
            long.push(part);
            long.finish()
        } else {
            self.keep(part);
            read_block(&self.held, !self.begun, &mut self.joined)
        }
    }

    /// The push ends within an event.
    fn hold(&mut self, part: &[u8]) {
        if let Some(long) = &mut self.long {
            long.push(part);
        } else if self.held.len() + part.len() > HELD_BYTES_MAX {
            let mut long = Long::new(&self.held, !self.begun);
            long.push(part);
            self.long = Some(Box::new(long));
            self.held = Vec::new();
        } else {
            self.keep(part);
        }
        self.before += part.len() as u64;
    }

    /// Adds to what is held, which has room for it, without more memory than the bound.
    fn keep(&mut self, part: &[u8]) {
        let need = self.held.len() + part.len();
        if need > self.held.capacity() {
            let room = (2 * self.held.capacity()).clamp(need, HELD_BYTES_MAX.max(need));
            self.held.reserve_exact(room - self.held.len());
        }
        self.held.extend_from_slice(part);
    }

    fn next_event(&mut self) {
        self.before = 0;
        self.begun = true;
        for buffer in [&mut self.held, &mut self.joined] {
            buffer.clear();
            if buffer.capacity() > SPARE_BYTES_MAX {
                buffer.shrink_to(SPARE_BYTES_MAX);
            }
        }
    }

    /// Says what an event is, and counts it.
    fn judge(&mut self, read: &Read, from: usize, end: usize) -> Event {
        let mut event = Event {
            // Pushes and streams are shorter than 2^63 bytes.
            start: from as i64 - self.before as i64,
            end,
            kind: Kind::Other,
            usage: None,
            text_bytes: 0,
            text_chars: 0,
            tokens: 0,
            last: false,
        };
        if !read.fields {
            event.kind = Kind::Comment;
            return event;
        }
        if self.tally.done {
            if read.done {
                event.kind = Kind::Done;
            }
            return event;
        }
        let gist = &read.gist;
        let types = [read.name, gist.event];
        let failed = types.contains(&Type::Failed);
        let last = read.done || gist.stop || failed || types.contains(&Type::Last);
        event.kind = if gist.error || failed || types.contains(&Type::Error) {
            Kind::Error
        } else if gist.said > 0 {
            Kind::Content
        } else if last {
            Kind::Done
        } else if gist.usage_top && gist.choices == 0 && gist.event == Type::None {
            Kind::Usage
        } else {
            Kind::Other
        };
        event.usage = gist.usage;
        event.text_bytes = u32::try_from(gist.text_bytes).unwrap_or(u32::MAX);
        event.text_chars = u32::try_from(gist.text_chars).unwrap_or(u32::MAX);
        event.tokens = if gist.listed > 0 { gist.listed } else { gist.said };
        event.last = last;
        self.tally.note(&event, gist);
        event
    }
}

impl Lines {
    /// Reads on in the open event from `at`; gives the offset behind its end, if that has come.
    fn event_end(&mut self, bytes: &[u8], at: usize) -> Option<usize> {
        let mut at = at;
        while let Some(&mark) = BOM.get(self.bom) {
            if *bytes.get(at)? == mark {
                self.bom += 1;
                at += 1;
            } else {
                if self.bom > 0 {
                    // A part of the mark begins a line like any other bytes.
                    self.line = Line::Field;
                }
                self.bom = BOM.len();
            }
        }
        loop {
            let rest = bytes.get(at..)?;
            let stop = memchr::memchr2(LF, CR, rest);
            if self.line == Line::Empty && stop != Some(0) {
                self.line = match rest.first()? {
                    b':' => Line::Comment,
                    _ => Line::Field,
                };
            }
            let end = at + stop?;
            at = end + 1;
            if bytes[end] == CR {
                match bytes.get(at) {
                    Some(&LF) => at += 1,
                    Some(_) => {}
                    None => self.after_cr = true,
                }
            }
            match std::mem::take(&mut self.line) {
                Line::Field => self.fields = true,
                Line::Comment if self.fields => {}
                Line::Comment | Line::Empty => {
                    self.fields = false;
                    return Some(at);
                }
            }
        }
    }
}

/// What an event was found to be.
#[derive(Default)]
struct Read {
    /// It has a line that is neither blank nor a comment.
    fields: bool,
    /// The type that its `event` line gives.
    name: Type,
    /// Its data is `[DONE]`.
    done: bool,
    /// Where its data starts, if that is one piece of the event and read whole; else 0.
    data_at: usize,
    gist: Gist,
}

/// The event that came last and how its text lay in it.
///
/// The events of one answer differ in little but their text. One that equals the last in every
/// byte outside of that one string is the same event with another text, so it need not be walked:
/// this takes a tenth of the time. An event with usage, an end or several texts is never learnt.
#[derive(Clone, Debug, Default)]
struct Shape {
    /// The event without its text; empty if there is none to compare with.
    frame: Vec<u8>,
    /// Where in it the text stood.
    text_at: usize,
}

impl Shape {
    /// Bytes and characters of the text, and the event's length, if `bytes` start with an event of
    /// this shape that has some text.
    #[inline(always)]
    fn fit(&self, bytes: &[u8]) -> Option<((u64, u64), usize)> {
        let (head, tail) = self.frame.split_at_checked(self.text_at)?;
        if tail.is_empty() {
            return None;
        }
        let rest = bytes.strip_prefix(head)?;
        let line = peek::line(rest)?;
        let (text, rest) = rest.split_at_checked(line.len)?;
        if text.is_empty() || !rest.starts_with(tail) {
            return None;
        }
        let measure = if line.escaped || line.wide {
            peek::measure(text, line.escaped)
        } else {
            (text.len() as u64, text.len() as u64)
        };
        (measure.0 > 0).then_some((measure, head.len() + text.len() + tail.len()))
    }

    /// Remembers an event if it is of the kind that comes again.
    fn learn(&mut self, block: &[u8], event: &Event, read: &Read) {
        let gist = &read.gist;
        let plain = event.kind == Kind::Content
            && !event.last
            && event.usage.is_none()
            && (gist.texts, gist.said, gist.listed, gist.finished) == (1, 1, 0, 0)
            && gist.event != Type::Audio
            && read.data_at > 0
            && block.len() <= SHAPE_BYTES_MAX
            // A mark means something only once. Behind a last CR an LF may follow or not.
            && !block.starts_with(BOM)
            && block.ends_with(&[LF]);
        let text = read.data_at + gist.text_span.start..read.data_at + gist.text_span.end;
        if plain && let (Some(head), Some(tail)) = (block.get(..text.start), block.get(text.end..))
        {
            self.frame.clear();
            self.frame.extend_from_slice(head);
            self.frame.extend_from_slice(tail);
            self.text_at = head.len();
        }
    }
}

/// The data of an event that is one whole `data` line and a blank line, with line ends of one kind,
/// and the offset of its end: nearly every event of OpenAI's dialect.
fn simple_event(bytes: &[u8]) -> Option<(&[u8], usize)> {
    let rest = bytes.strip_prefix(DATA)?;
    let stop = memchr::memchr2(LF, CR, rest)?;
    let (data, ends) = rest.split_at(stop);
    let end = DATA.len()
        + stop
        + if ends.starts_with(b"\n\n") {
            2
        } else if ends.starts_with(b"\r\n\r\n") {
            4
        } else {
            return None;
        };
    Some((data, end))
}

/// Reads a whole event. `first`: a byte order mark may stand at its start.
fn read_block(block: &[u8], first: bool, joined: &mut Vec<u8>) -> Read {
    let mut rest = block;
    if first {
        rest = rest.strip_prefix(BOM).unwrap_or(rest);
    }
    let mut fields = false;
    let mut name: &[u8] = &[];
    let mut data: Option<&[u8]> = None;
    let mut data_at = 0;
    joined.clear();
    while !rest.is_empty() {
        // An empty line between CR and LF means nothing.
        let at = block.len() - rest.len();
        let stop = memchr::memchr2(LF, CR, rest).unwrap_or(rest.len());
        let line = &rest[..stop];
        rest = rest.get(stop + 1..).unwrap_or_default();
        if line.is_empty() || line[0] == b':' {
            continue;
        }
        fields = true;
        if let Some(value) = field(line, b"data") {
            data_at = at + line.len() - value.len();
            if let Some(earlier) = data.replace(value) {
                if joined.is_empty() {
                    joined.reserve_exact(block.len());
                    joined.extend_from_slice(earlier);
                }
                joined.push(LF);
                joined.extend_from_slice(value);
            }
        } else if let Some(value) = field(line, b"event") {
            name = value;
        }
    }
    let one = joined.is_empty();
    let data = if one { data.unwrap_or_default() } else { joined };
    Read { fields, data_at: if one { data_at } else { 0 }, ..read_data(name, data) }
}

/// The value of a line if its field has this name.
fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(name)?;
    match rest.split_first() {
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}

fn read_data(name: &[u8], data: &[u8]) -> Read {
    let mut read = Read {
        fields: true,
        name: Type::named(name),
        done: data.trim_ascii() == Done::WORD,
        ..Read::default()
    };
    usage::read(data, &mut read.gist);
    read
}

/// Reads an event too long to hold, as it arrives.
#[derive(Clone, Debug)]
struct Long {
    data: PlainScanner,
    data_lines: u64,
    done: Done,
    fields: bool,
    /// The value of the last `event` line, as far as a known name can reach.
    name: Vec<u8>,
    part: Part,
}

/// Where in a line the next byte falls.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The field's name; what has come of it, and how much.
    Name([u8; 6], usize),
    /// The start of the value, where one space is dropped.
    Space(Field),
    Value(Field),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Data,
    Event,
    Other,
}

impl Part {
    const START: Part = Part::Name([0; 6], 0);
}

impl Long {
    fn new(held: &[u8], first: bool) -> Long {
        let mut long = Long {
            data: PlainScanner::new(),
            data_lines: 0,
            done: Done(0),
            fields: false,
            name: Vec::new(),
            part: Part::START,
        };
        let held = if first { held.strip_prefix(BOM).unwrap_or(held) } else { held };
        long.push(held);
        long
    }

    fn push(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(stop) = memchr::memchr2(LF, CR, rest) {
            self.piece(&rest[..stop]);
            self.line_end();
            rest = &rest[stop + 1..];
        }
        self.piece(rest);
    }

    /// A piece of one line.
    fn piece(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while let Some((&byte, behind)) = rest.split_first() {
            match &mut self.part {
                Part::Name(name, len) => {
                    rest = behind;
                    if byte == b':' {
                        let field = named(&name[..(*len).min(name.len())]);
                        self.fields |= *len > 0;
                        self.field_begin(field);
                        self.part = Part::Space(field);
                    } else {
                        if let Some(place) = name.get_mut(*len) {
                            *place = byte;
                        }
                        *len += 1;
                    }
                }
                Part::Space(field) => {
                    self.part = Part::Value(*field);
                    if byte == b' ' {
                        rest = behind;
                    }
                }
                Part::Value(Field::Data) => {
                    self.data.push(rest);
                    self.done.push(rest);
                    return;
                }
                Part::Value(Field::Event) => {
                    let room = NAME_BYTES_MAX.saturating_sub(self.name.len());
                    self.name.extend_from_slice(&rest[..rest.len().min(room)]);
                    return;
                }
                Part::Value(Field::Other) => return,
            }
        }
    }

    fn field_begin(&mut self, field: Field) {
        match field {
            Field::Data => {
                if self.data_lines > 0 {
                    self.data.push(b"\n");
                    self.done.push(b"\n");
                }
                self.data_lines += 1;
            }
            Field::Event => self.name.clear(),
            Field::Other => {}
        }
    }

    fn line_end(&mut self) {
        if let Part::Name(name, len @ 1..) = self.part {
            // A line without a colon is a field with an empty value.
            self.fields = true;
            self.field_begin(named(&name[..len.min(name.len())]));
        }
        self.part = Part::START;
    }

    fn finish(mut self) -> Read {
        self.line_end();
        Read {
            fields: self.fields,
            name: Type::named(&self.name),
            done: self.done.is_whole(),
            data_at: 0,
            gist: self.data.gist().unwrap_or_default(),
        }
    }
}

/// Whether data that comes in pieces is `[DONE]`, white space around it aside: how much of the word
/// has come, or one more than its length when it is something else.
#[derive(Clone, Copy, Debug)]
struct Done(usize);

impl Done {
    const WORD: &[u8] = b"[DONE]";

    fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let around = self.0 == 0 || self.0 == Done::WORD.len();
            if Done::WORD.get(self.0) == Some(byte) {
                self.0 += 1;
            } else if !(around && byte.is_ascii_whitespace()) {
                self.0 = Done::WORD.len() + 1;
                return;
            }
        }
    }

    fn is_whole(self) -> bool {
        self.0 == Done::WORD.len()
    }
}

/// More than the longest event name that means anything.
const NAME_BYTES_MAX: usize = 64;

fn named(name: &[u8]) -> Field {
    match name {
        b"data" => Field::Data,
        b"event" => Field::Event,
        _ => Field::Other,
    }
}

#[cfg(test)]
mod tests;
