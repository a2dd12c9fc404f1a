//! A resumable, strict JSON walker: it checks every byte, builds nothing, and tells a watcher where
//! chosen values begin and end.
//!
//! Bytes are pushed as they arrive and may be cut anywhere, inside an escape or a UTF-8 sequence
//! too; what the watcher sees does not depend on the cuts. No byte is looked at twice, so a body
//! that comes in 64 KiB reads costs one read's worth of work per read. Memory is a few hundred
//! bytes however long the document is.
//!
//! ```
//! use forebay::pure::json::{Kind, Mode, Span, Walker, Watch};
//!
//! /// Finds the top-level `model`.
//! #[derive(Default)]
//! struct Model { here: bool, found: Option<Span> }
//!
//! impl Watch for Model {
//!     const DEPTH: usize = 1;
//!     fn key(&mut self, _depth: usize, key: Option<&[u8]>, _span: Span) {
//!         self.here = key == Some(b"model");
//!     }
//!     fn end(&mut self, depth: usize, kind: Kind, span: Span) {
//!         if depth == 1 && self.here && kind == Kind::String {
//!             self.found = Some(span);
//!         }
//!     }
//! }
//!
//! let body = br#"{"a":{"model":"no"},"mod\u0065l":"yes"}"#;
//! let (mut walker, mut model) = (Walker::new(Mode::Strict), Model::default());
//! for piece in body.chunks(7) {
//!     walker.push(piece, &mut model).unwrap();
//! }
//! walker.finish(&mut model).unwrap();
//! assert_eq!(model.found.unwrap().of(body), br#""yes""#);
//! ```
//!
//! Not for small documents that lie in memory whole and are wanted as values: use `serde_json`.

use std::fmt;

/// Deepest nesting that is accepted. Generated tool schemas reach a few dozen; engines that parse
/// recursively give up near a thousand, so a deeper body would only fail later and worse.
pub const DEPTH_MAX: usize = 512;

/// Longest member name, unescaped, that a watcher is shown.
pub const KEY_BYTES_MAX: usize = 256;

/// Deepest level that a watcher may ask for.
pub const WATCH_DEPTH_MAX: usize = 8;

/// An escape is at most six bytes for one (`\u0061`), so a longer raw name cannot be short.
const KEY_RAW_BYTES_MAX: usize = KEY_BYTES_MAX * 6;

/// Who is told where values lie. `depth` is the number of containers around a value: 0 for the
/// whole document, 1 for the members of a top-level object, and so on.
///
/// For a member the calls are `key`, `begin`, whatever lies inside, `end`; for an array's element
/// and the document itself the same without `key`. All offsets count from the document's first
/// byte, however it was cut, and are the same for every way of cutting it. Nothing is reported for
/// values deeper than [`Watch::DEPTH`], so they cost nothing but their check.
pub trait Watch {
    /// Deepest level to report, at most [`WATCH_DEPTH_MAX`].
    const DEPTH: usize;
    /// Whether [`Watch::text`] is wanted.
    const TEXT: bool = false;

    /// A member's name, unescaped; `None` if it is longer than [`KEY_BYTES_MAX`]. An escaped lone
    /// surrogate appears as the three bytes UTF-8 would give it, so the name need not be UTF-8.
    /// `span` covers the name as written, with its quotes.
    fn key(&mut self, depth: usize, key: Option<&[u8]>, span: Span) {
        let _ = (depth, key, span);
    }

    /// A value starts at `start`; its kind is known by its first byte.
    fn begin(&mut self, depth: usize, kind: Kind, start: usize) {
        let _ = (depth, kind, start);
    }

    /// A value is complete. `span` covers it as written, quotes and brackets included.
    fn end(&mut self, depth: usize, kind: Kind, span: Span) {
        let _ = (depth, kind, span);
    }

    /// A string value at any depth is complete (never a name); comes before its `end`.
    fn text(&mut self, span: Span) {
        let _ = span;
    }
}

/// Checks only.
impl Watch for () {
    const DEPTH: usize = 0;
}

/// A half-open range of byte offsets from the start of the document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    pub start: usize,
    pub end: usize,
}

impl Span {
    /// The bytes it covers in `document`, which starts at offset 0; empty where it does not fit.
    pub fn of(self, document: &[u8]) -> &[u8] {
        document.get(self.start..self.end).unwrap_or_default()
    }

    pub const fn len(self) -> usize {
        self.end.saturating_sub(self.start)
    }

    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Object,
    Array,
    String,
    Number,
    True,
    False,
    Null,
}

/// How much is forgiven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// RFC 8259 and UTF-8 to the letter: for what clients send.
    Strict,
    /// Also what engines are known to send: raw control characters in strings, `NaN`, `Infinity`
    /// and `-Infinity` (Python's `json.dumps`), and bytes that are not UTF-8.
    Lenient,
}

/// Where and why a document is not JSON. `at` is the offset of the first byte that cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: usize,
    pub cause: Cause,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Nothing but white space.
    Empty,
    /// The document ends before its value does.
    Cut,
    /// A byte order mark stands at the start.
    ByteOrderMark,
    /// A byte that cannot stand here.
    Unexpected,
    /// Something other than white space follows the value.
    Trailing,
    /// A control character stands unescaped in a string.
    Control,
    /// No such escape.
    Escape,
    /// Not a JSON number.
    Number,
    /// Not UTF-8.
    Utf8,
    /// Nested deeper than [`DEPTH_MAX`].
    Depth,
}

impl Cause {
    /// A sentence without subject or full stop, fit for an error message.
    pub const fn text(self) -> &'static str {
        match self {
            Cause::Empty => "it is empty",
            Cause::Cut => "it ends too early",
            Cause::ByteOrderMark => "it starts with a byte order mark",
            Cause::Unexpected => "unexpected character",
            Cause::Trailing => "something follows the end of the value",
            Cause::Control => "a string holds an unescaped control character",
            Cause::Escape => "a string holds an invalid escape",
            Cause::Number => "malformed number",
            Cause::Utf8 => "it is not valid UTF-8",
            Cause::Depth => "it is nested too deeply",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.cause.text(), self.at)
    }
}

/// The walker's state between two pushes.
#[derive(Clone, Debug)]
pub struct Walker {
    mode: Mode,
    next: Next,
    /// Offset of the first byte of the push in progress.
    base: usize,
    /// Open containers.
    depth: usize,
    /// One bit for each open container, set for an object; the innermost is bit `depth - 1`.
    objects: [u64; DEPTH_MAX / 64],
    /// Where the open containers that a watcher may ask for began.
    starts: [usize; WATCH_DEPTH_MAX + 1],
    /// Where the string, number or word that is being read began.
    token: usize,
    /// The string that is being read is a member's name.
    naming: bool,
    /// It holds an escape.
    escaped: bool,
    /// What earlier pushes brought of a name, as written, without the opening quote.
    name: Vec<u8>,
    utf8: Utf8,
    fault: Option<Fault>,
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// White space only.
    Nothing,
    InString,
    InEscape,
    /// So many hexadecimal digits of an escape are still to come.
    InHex(u8),
    InNumber(Number),
    /// So many bytes of the word have come.
    InWord(Word, u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    E,
    ESign,
    Exponent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    True,
    False,
    Null,
    Nan,
    Infinity,
}

impl Word {
    const fn text(self) -> &'static [u8] {
        match self {
            Word::True => b"true",
            Word::False => b"false",
            Word::Null => b"null",
            Word::Nan => b"NaN",
            Word::Infinity => b"Infinity",
        }
    }

    const fn kind(self) -> Kind {
        match self {
            Word::True => Kind::True,
            Word::False => Kind::False,
            Word::Null => Kind::Null,
            Word::Nan | Word::Infinity => Kind::Number,
        }
    }
}

impl Walker {
    pub const fn new(mode: Mode) -> Walker {
        Walker {
            mode,
            next: Next::Value,
            base: 0,
            depth: 0,
            objects: [0; DEPTH_MAX / 64],
            starts: [0; WATCH_DEPTH_MAX + 1],
            token: 0,
            naming: false,
            escaped: false,
            name: Vec::new(),
            utf8: Utf8::new(),
            fault: None,
        }
    }

    /// How many bytes have been pushed: the offset that the next push starts at.
    pub const fn offset(&self) -> usize {
        self.base
    }

    /// The document's value is complete (a number at top level is complete only at the end).
    pub fn is_complete(&self) -> bool {
        self.fault.is_none() && self.next == Next::Nothing
    }

    /// Walks over the next bytes of the document and tells `watch` what lies in them. The first
    /// fault is final: it is given again by every later call. Allocates only for a watched name
    /// that is cut or escaped.
    pub fn push<W: Watch>(&mut self, bytes: &[u8], watch: &mut W) -> Result<(), Fault> {
        const { assert!(W::DEPTH <= WATCH_DEPTH_MAX) };
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        let utf8 = match self.mode {
            Mode::Strict => self.utf8.push(bytes, self.base),
            Mode::Lenient => Ok(()),
        };
        let result = utf8.and_then(|()| self.walk(bytes, watch));
        self.fault = result.err();
        self.base += bytes.len();
        result
    }

    /// Says that no more bytes come. A fault if the document is not complete.
    pub fn finish<W: Watch>(&mut self, watch: &mut W) -> Result<(), Fault> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        if let Next::InNumber(number) = self.next
            && number.may_end()
            && self.depth == 0
        {
            self.scalar_end(Kind::Number, self.base, watch);
        }
        let cause = match self.next {
            Next::Nothing => return Ok(()),
            Next::Value if self.depth == 0 => Cause::Empty,
            _ => Cause::Cut,
        };
        let fault = Fault { at: self.base, cause };
        self.fault = Some(fault);
        Err(fault)
    }

    fn walk<W: Watch>(&mut self, bytes: &[u8], watch: &mut W) -> Result<(), Fault> {
        let mut i = 0;
        while let Some(&byte) = bytes.get(i) {
            i = match self.next {
                _ if matches!(byte, b' ' | b'\n' | b'\r' | b'\t') && self.next.is_between() => {
                    i + 1
                }
                Next::CommaOrEnd => match byte {
                    b',' => {
                        self.next = if self.in_object() { Next::Key } else { Next::Value };
                        i + 1
                    }
                    b'}' | b']' => self.close(byte, i, watch)?,
                    _ => return Err(self.fault(i, Cause::Unexpected)),
                },
                Next::Key | Next::KeyOrEnd => match byte {
                    b'"' => {
                        self.string_begin(i, true);
                        self.string(bytes, i + 1, i + 1, watch)?
                    }
                    b'}' if self.next == Next::KeyOrEnd => self.close(byte, i, watch)?,
                    _ => return Err(self.fault(i, Cause::Unexpected)),
                },
                Next::Colon => {
                    if byte != b':' {
                        return Err(self.fault(i, Cause::Unexpected));
                    }
                    self.next = Next::Value;
                    i + 1
                }
                Next::Value | Next::ValueOrEnd => self.value(bytes, i, byte, watch)?,
                Next::Nothing => return Err(self.fault(i, Cause::Trailing)),
                Next::InString => self.string(bytes, i, i, watch)?,
                Next::InEscape => self.escape(bytes, i, i, watch)?,
                Next::InHex(left) => self.hex(bytes, i, i, left, watch)?,
                Next::InNumber(number) => self.number(bytes, i, number, watch)?,
                Next::InWord(word, had) => self.word(bytes, i, word, had, watch)?,
            };
        }
        Ok(())
    }

    fn value<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        byte: u8,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        let lenient = self.mode == Mode::Lenient;
        match byte {
            b'"' => {
                self.begin(Kind::String, i, watch);
                self.string_begin(i, false);
                self.string(bytes, i + 1, i + 1, watch)
            }
            b'{' | b'[' => self.open(byte == b'{', i, watch),
            b']' if self.next == Next::ValueOrEnd => self.close(byte, i, watch),
            b'-' | b'0'..=b'9' => {
                self.begin(Kind::Number, i, watch);
                self.token = self.base + i;
                let number = match byte {
                    b'-' => Number::Minus,
                    b'0' => Number::Zero,
                    _ => Number::Whole,
                };
                self.next = Next::InNumber(number);
                Ok(i + 1)
            }
            b't' => self.word_begin(Word::True, i, watch),
            b'f' => self.word_begin(Word::False, i, watch),
            b'n' => self.word_begin(Word::Null, i, watch),
            b'N' if lenient => self.word_begin(Word::Nan, i, watch),
            b'I' if lenient => self.word_begin(Word::Infinity, i, watch),
            0xEF if self.base + i == 0 => Err(self.fault(i, Cause::ByteOrderMark)),
            _ => Err(self.fault(i, Cause::Unexpected)),
        }
    }

    fn open<W: Watch>(&mut self, object: bool, i: usize, watch: &mut W) -> Result<usize, Fault> {
        if self.depth == DEPTH_MAX {
            return Err(self.fault(i, Cause::Depth));
        }
        self.begin(if object { Kind::Object } else { Kind::Array }, i, watch);
        if let Some(start) = self.starts.get_mut(self.depth) {
            *start = self.base + i;
        }
        let (word, bit) = (self.depth / 64, 1 << (self.depth % 64));
        if object {
            self.objects[word] |= bit;
            self.next = Next::KeyOrEnd;
        } else {
            self.objects[word] &= !bit;
            self.next = Next::ValueOrEnd;
        }
        self.depth += 1;
        Ok(i + 1)
    }

    /// `byte` is a closing bracket and some container is open, but perhaps not one of its kind.
    fn close<W: Watch>(&mut self, byte: u8, i: usize, watch: &mut W) -> Result<usize, Fault> {
        let object = self.in_object();
        if object != (byte == b'}') {
            return Err(self.fault(i, Cause::Unexpected));
        }
        self.depth -= 1;
        if self.depth <= W::DEPTH {
            let span = Span { start: self.starts[self.depth], end: self.base + i + 1 };
            watch.end(self.depth, if object { Kind::Object } else { Kind::Array }, span);
        }
        self.after_value();
        Ok(i + 1)
    }

    fn in_object(&self) -> bool {
        let top = self.depth.wrapping_sub(1);
        self.objects.get(top / 64).is_some_and(|word| word >> (top % 64) & 1 == 1)
    }

    fn begin<W: Watch>(&self, kind: Kind, i: usize, watch: &mut W) {
        if self.depth <= W::DEPTH {
            watch.begin(self.depth, kind, self.base + i);
        }
    }

    /// Ends the scalar that began at `token`.
    fn scalar_end<W: Watch>(&mut self, kind: Kind, end: usize, watch: &mut W) {
        if self.depth <= W::DEPTH {
            watch.end(self.depth, kind, Span { start: self.token, end });
        }
        self.after_value();
    }

    fn after_value(&mut self) {
        self.next = if self.depth == 0 { Next::Nothing } else { Next::CommaOrEnd };
    }

    fn string_begin(&mut self, i: usize, naming: bool) {
        self.token = self.base + i;
        self.naming = naming;
        self.escaped = false;
        self.name.clear();
    }

    /// Reads on in a string from `i`; what this push has of it begins at `from`.
    fn string<W: Watch>(
        &mut self,
        bytes: &[u8],
        from: usize,
        i: usize,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        let mut i = i;
        loop {
            i = skip_plain(bytes, i);
            match bytes.get(i) {
                Some(b'"') => break,
                Some(b'\\') => {
                    self.escaped = true;
                    match bytes.get(i + 1) {
                        Some(b'n' | b'"' | b'\\' | b'/' | b't' | b'r' | b'b' | b'f') => i += 2,
                        Some(b'u') if is_hex4(bytes.get(i + 2..i + 6)) => i += 6,
                        // Cut or wrong.
                        _ => return self.escape(bytes, from, i + 1, watch),
                    }
                }
                Some(_) if self.mode == Mode::Lenient => i += 1,
                Some(_) => return Err(self.fault(i, Cause::Control)),
                None => return Ok(self.cut_string(bytes, from, Next::InString)),
            }
        }
        let span = Span { start: self.token, end: self.base + i + 1 };
        if self.naming {
            if self.depth <= W::DEPTH {
                self.report_name(&bytes[from..i], span, watch);
            }
            self.next = Next::Colon;
        } else {
            if W::TEXT {
                watch.text(span);
            }
            self.scalar_end(Kind::String, span.end, watch);
        }
        Ok(i + 1)
    }

    /// Reads on behind a backslash.
    fn escape<W: Watch>(
        &mut self,
        bytes: &[u8],
        from: usize,
        i: usize,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        match bytes.get(i) {
            Some(b'u') => self.hex(bytes, from, i + 1, 4, watch),
            Some(b'n' | b'"' | b'\\' | b'/' | b't' | b'r' | b'b' | b'f') => {
                self.string(bytes, from, i + 1, watch)
            }
            Some(_) => Err(self.fault(i, Cause::Escape)),
            None => Ok(self.cut_string(bytes, from, Next::InEscape)),
        }
    }

    fn hex<W: Watch>(
        &mut self,
        bytes: &[u8],
        from: usize,
        i: usize,
        left: u8,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        for had in 0..left {
            match bytes.get(i + usize::from(had)) {
                Some(digit) if digit.is_ascii_hexdigit() => {}
                Some(_) => return Err(self.fault(i + usize::from(had), Cause::Escape)),
                None => return Ok(self.cut_string(bytes, from, Next::InHex(left - had))),
            }
        }
        self.string(bytes, from, i + usize::from(left), watch)
    }

    /// The push ends inside a string: keeps a name's bytes, as far as they can matter.
    fn cut_string(&mut self, bytes: &[u8], from: usize, next: Next) -> usize {
        if self.naming {
            let room = (KEY_RAW_BYTES_MAX + 1).saturating_sub(self.name.len());
            let part = bytes.get(from..).unwrap_or_default();
            self.name.extend_from_slice(&part[..part.len().min(room)]);
        }
        self.next = next;
        bytes.len()
    }

    /// A name ends; `part` is what this push has of it.
    fn report_name<W: Watch>(&mut self, part: &[u8], span: Span, watch: &mut W) {
        // Without the quotes.
        let raw_len = span.len() - 2;
        if raw_len > KEY_RAW_BYTES_MAX {
            watch.key(self.depth, None, span);
            return;
        }
        let raw = if part.len() == raw_len {
            part
        } else {
            self.name.extend_from_slice(part);
            &self.name
        };
        if self.escaped {
            let plain = unescape(raw);
            watch.key(self.depth, (plain.len() <= KEY_BYTES_MAX).then_some(&plain), span);
        } else {
            watch.key(self.depth, (raw_len <= KEY_BYTES_MAX).then_some(raw), span);
        }
    }

    fn number<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        number: Number,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        use Number::{E, ESign, Exponent, Fraction, Minus, Point, Whole, Zero};
        let (mut i, mut number) = (i, number);
        while let Some(&byte) = bytes.get(i) {
            number = match (number, byte) {
                (Whole, b'0'..=b'9') => Whole,
                (Minus, b'0') => Zero,
                (Minus, b'1'..=b'9') => Whole,
                (Zero | Whole, b'.') => Point,
                (Point | Fraction, b'0'..=b'9') => Fraction,
                (Zero | Whole | Fraction, b'e' | b'E') => E,
                (E, b'+' | b'-') => ESign,
                (E | ESign | Exponent, b'0'..=b'9') => Exponent,
                (Zero | Whole | Fraction | Exponent, _) => {
                    self.scalar_end(Kind::Number, self.base + i, watch);
                    return Ok(i);
                }
                (Minus, b'I') if self.mode == Mode::Lenient => {
                    return self.word(bytes, i + 1, Word::Infinity, 1, watch);
                }
                _ => return Err(self.fault(i, Cause::Number)),
            };
            i += 1;
        }
        self.next = Next::InNumber(number);
        Ok(i)
    }

    fn word_begin<W: Watch>(
        &mut self,
        word: Word,
        i: usize,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        self.begin(word.kind(), i, watch);
        self.token = self.base + i;
        self.next = Next::InWord(word, 1);
        Ok(i + 1)
    }

    fn word<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        word: Word,
        had: u8,
        watch: &mut W,
    ) -> Result<usize, Fault> {
        let mut i = i;
        for (n, &letter) in word.text().iter().enumerate().skip(usize::from(had)) {
            match bytes.get(i) {
                Some(&byte) if byte == letter => i += 1,
                Some(_) => return Err(self.fault(i, Cause::Unexpected)),
                None => {
                    // The longest word has eight letters.
                    self.next = Next::InWord(word, n as u8);
                    return Ok(i);
                }
            }
        }
        self.scalar_end(word.kind(), self.base + i, watch);
        Ok(i)
    }

    const fn fault(&self, i: usize, cause: Cause) -> Fault {
        Fault { at: self.base + i, cause }
    }
}

impl Next {
    /// Between two tokens, where white space may stand.
    const fn is_between(self) -> bool {
        matches!(
            self,
            Next::Value
                | Next::ValueOrEnd
                | Next::Key
                | Next::KeyOrEnd
                | Next::Colon
                | Next::CommaOrEnd
                | Next::Nothing
        )
    }
}

impl Number {
    const fn may_end(self) -> bool {
        matches!(self, Number::Zero | Number::Whole | Number::Fraction | Number::Exponent)
    }
}

fn is_hex4(digits: Option<&[u8]>) -> bool {
    digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
}

/// Index of the first byte at or after `i` that is not plain text of a string: a quote, a
/// backslash or a control character; the length if there is none.
fn skip_plain(bytes: &[u8], i: usize) -> usize {
    const LANES: usize = 16;
    const STRIDE: usize = 4 * LANES;
    fn special(byte: u8) -> bool {
        (byte < 0x20) | (byte == b'"') | (byte == b'\\')
    }
    // Both loops are written so that the compiler makes vector code of them.
    fn first(lanes: &[u8; LANES]) -> Option<usize> {
        let hits = u128::from_le_bytes(lanes.map(|byte| u8::from(special(byte))));
        (hits != 0).then(|| hits.trailing_zeros() as usize / 8)
    }
    let mut i = i;
    while let Some(lanes) = bytes.get(i..).and_then(|rest| rest.first_chunk::<LANES>()) {
        if let Some(n) = first(lanes) {
            return i + n;
        }
        i += LANES;
        while let Some(stride) = bytes.get(i..).and_then(|rest| rest.first_chunk::<STRIDE>())
            && !stride.iter().fold(false, |any, &byte| any | special(byte))
        {
            i += STRIDE;
        }
    }
    let rest = bytes.get(i..).unwrap_or_default();
    i + rest.iter().position(|&byte| special(byte)).unwrap_or(rest.len())
}

/// The text of a valid JSON string, given without its quotes. A lone surrogate becomes the three
/// bytes that UTF-8 would give it; malformed escapes, which a walked string cannot hold, are
/// dropped.
pub fn unescape(raw: &[u8]) -> Vec<u8> {
    fn unit(digits: Option<&[u8]>) -> Option<u32> {
        u32::from_str_radix(std::str::from_utf8(digits?).ok()?, 16).ok()
    }
    let mut plain = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let Some(n) = rest.iter().position(|&byte| byte == b'\\') {
        plain.extend_from_slice(&rest[..n]);
        let mut used = 2;
        match rest.get(n + 1) {
            Some(b'n') => plain.push(b'\n'),
            Some(b't') => plain.push(b'\t'),
            Some(b'r') => plain.push(b'\r'),
            Some(b'b') => plain.push(0x08),
            Some(b'f') => plain.push(0x0C),
            Some(b'u') => {
                used = 6;
                let mut code = unit(rest.get(n + 2..n + 6)).unwrap_or(0xFFFD);
                if (0xD800..0xDC00).contains(&code)
                    && rest.get(n + 6..n + 8) == Some(b"\\u")
                    && let Some(low @ 0xDC00..0xE000) = unit(rest.get(n + 8..n + 12))
                {
                    used = 12;
                    code = 0x1_0000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                }
                match char::from_u32(code) {
                    Some(c) => plain.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    // Six bits at a time, so each fits its byte.
                    None => plain.extend_from_slice(&[
                        0xE0 | (code >> 12) as u8,
                        0x80 | (code >> 6 & 0x3F) as u8,
                        0x80 | (code & 0x3F) as u8,
                    ]),
                }
            }
            Some(&other) => plain.push(other),
            None => {}
        }
        rest = rest.get(n + used..).unwrap_or_default();
    }
    plain.extend_from_slice(rest);
    plain
}

/// A UTF-8 check over cuts.
#[derive(Clone, Debug)]
struct Utf8 {
    /// The start of a sequence that the last push cut.
    held: [u8; 4],
    len: usize,
}

impl Utf8 {
    const fn new() -> Utf8 {
        Utf8 { held: [0; 4], len: 0 }
    }

    /// `base` is the offset of `bytes[0]`, for the fault.
    fn push(&mut self, bytes: &[u8], base: usize) -> Result<(), Fault> {
        let mut rest = bytes;
        if self.len > 0 {
            let need = sequence_len(self.held[0]).saturating_sub(self.len).min(rest.len());
            let (head, tail) = rest.split_at(need);
            let start = base - self.len;
            for (n, &byte) in head.iter().enumerate() {
                if byte & 0xC0 != 0x80 {
                    return Err(Fault { at: base + n, cause: Cause::Utf8 });
                }
                self.held[self.len] = byte;
                self.len += 1;
            }
            rest = tail;
            if self.len < sequence_len(self.held[0]) {
                return Ok(());
            }
            check(&self.held[..self.len], start)?;
            self.len = 0;
        }
        let whole = rest.len() - cut_len(rest);
        let (whole, cut) = rest.split_at(whole);
        check(whole, base + bytes.len() - rest.len())?;
        self.held[..cut.len()].copy_from_slice(cut);
        self.len = cut.len();
        Ok(())
    }
}

fn check(bytes: &[u8], base: usize) -> Result<(), Fault> {
    if simdutf8::basic::from_utf8(bytes).is_ok() {
        return Ok(());
    }
    // Only now is it worth a slower pass that says where.
    let valid = std::str::from_utf8(bytes).map_or_else(|error| error.valid_up_to(), str::len);
    Err(Fault { at: base + valid, cause: Cause::Utf8 })
}

/// Length of the sequence that `lead` starts; 1 for a byte that starts none.
const fn sequence_len(lead: u8) -> usize {
    match lead {
        0xC2..=0xDF => 2,
        0xE0..=0xEF => 3,
        0xF0..=0xF4 => 4,
        _ => 1,
    }
}

/// How many bytes at the end start a sequence that `bytes` does not finish.
fn cut_len(bytes: &[u8]) -> usize {
    let mut back = bytes.iter().rev().take(3).enumerate();
    match back.find(|&(_, &byte)| byte & 0xC0 != 0x80) {
        Some((n, &lead)) if sequence_len(lead) > n + 1 => n + 1,
        _ => 0,
    }
}
