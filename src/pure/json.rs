//! A resumable, strict JSON walker: it checks every byte, builds nothing, and tells a watcher where
//! chosen values begin and end.
//!
//! Bytes are pushed as they arrive and may be cut anywhere, inside an escape or a UTF-8 sequence
//! too; what the watcher sees does not depend on the cuts. No byte is looked at twice, so a body
//! that comes in 64 KiB reads costs one read's worth of work per read. Memory is a few hundred
//! bytes however long the document is.
//!
//! ```
//! use forebay::pure::json::{Kind, Span, Walker, Watch};
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
//! let (mut walker, mut model) = (Walker::default(), Model::default());
//! for piece in body.chunks(7) {
//!     walker.push(piece, &mut model).unwrap();
//! }
//! walker.finish(&mut model).unwrap();
//! assert_eq!(model.found.unwrap().of(body), br#""yes""#);
//! ```
//!
//! Not for small documents that lie in memory whole and are wanted as values: use `serde_json`.

use std::fmt;

use crate::pure::lanes::{ONES, TOPS};

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

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Token(Token),
    InString,
    InEscape,
    /// So many hexadecimal digits of an escape are still to come.
    InHex(u8),
    InNumber(Number),
    /// So many bytes of the word have come.
    InWord(Word, u8),
}

/// Which token may come next. White space always may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    Nothing,
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
}

impl Word {
    const fn text(self) -> &'static [u8] {
        match self {
            Word::True => b"true",
            Word::False => b"false",
            Word::Null => b"null",
        }
    }

    const fn kind(self) -> Kind {
        match self {
            Word::True => Kind::True,
            Word::False => Kind::False,
            Word::Null => Kind::Null,
        }
    }
}

impl Default for Walker {
    fn default() -> Walker {
        Walker {
            next: Next::Token(Token::Value),
            base: 0,
            depth: 0,
            objects: [0; DEPTH_MAX / 64],
            starts: [0; WATCH_DEPTH_MAX + 1],
            token: 0,
            naming: false,
            escaped: false,
            name: Vec::new(),
            utf8: Utf8::default(),
            fault: None,
        }
    }
}

impl Walker {
    /// How many bytes have been pushed: the offset that the next push starts at.
    pub const fn offset(&self) -> usize {
        self.base
    }

    /// Walks over the next bytes of the document and tells `watch` what lies in them. The first
    /// fault is final: it is given again by every later call. Allocates only for a watched name
    /// that is cut or escaped.
    pub fn push<W: Watch>(&mut self, bytes: &[u8], watch: &mut W) -> Result<(), Fault> {
        const { assert!(W::DEPTH <= WATCH_DEPTH_MAX) };
        if self.fault.is_none() && !bytes.is_empty() {
            match self.utf8.push(bytes, self.base) {
                Ok(()) => self.walk(bytes, watch).unwrap_or_default(),
                Err(fault) => self.fault = Some(fault),
            }
            self.base += bytes.len();
        }
        self.fault.map_or(Ok(()), Err)
    }

    /// Says that no more bytes come. A fault if the document is not complete.
    pub fn finish<W: Watch>(&mut self, watch: &mut W) -> Result<(), Fault> {
        if let Next::InNumber(number) = self.next
            && number.may_end()
            && self.depth == 0
            && self.fault.is_none()
        {
            self.end(Kind::Number, self.token, self.base, watch);
            self.next = Next::Token(Token::Nothing);
        }
        if self.fault.is_none() && self.next != Next::Token(Token::Nothing) {
            let nothing_came = self.next == Next::Token(Token::Value) && self.depth == 0;
            let cause = if nothing_came { Cause::Empty } else { Cause::Cut };
            self.fault = Some(Fault { at: self.base, cause });
        }
        self.fault.map_or(Ok(()), Err)
    }

    // In what follows, `i` is an index into the push, and a function that reads a token gives the
    // index behind it, or nothing if it cannot: then either the push ends inside the token and
    // `next` says how to go on, or `fault` is set.

    fn walk<W: Watch>(&mut self, bytes: &[u8], watch: &mut W) -> Option<()> {
        let (mut i, mut next) = self.resume(bytes, watch)?;
        let mut object = self.in_object();
        loop {
            let Some(&byte) = bytes.get(i) else {
                self.next = Next::Token(next);
                return None;
            };
            if byte <= b' ' && matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                i += 1;
                continue;
            }
            match next {
                Token::CommaOrEnd => match byte {
                    b',' => {
                        i += 1;
                        next = if object { Token::Key } else { Token::Value };
                    }
                    b'}' if object => {
                        (i, next) = self.close(Kind::Object, i, watch);
                        object = self.in_object();
                    }
                    b']' if !object => {
                        (i, next) = self.close(Kind::Array, i, watch);
                        object = self.in_object();
                    }
                    _ => return self.fail(i, Cause::Unexpected),
                },
                Token::Key | Token::KeyOrEnd => match byte {
                    b'"' => {
                        let quote = plain_end(bytes, i + 1);
                        i = if bytes.get(quote) == Some(&b'"') {
                            if self.depth <= W::DEPTH {
                                let name = bytes.get(i + 1..quote).unwrap_or_default();
                                let name = (name.len() <= KEY_BYTES_MAX).then_some(name);
                                watch.key(self.depth, name, self.span(i, quote + 1));
                            }
                            quote + 1
                        } else {
                            self.string_begin(i, true);
                            self.string(bytes, i + 1, quote, watch)?
                        };
                        next = Token::Colon;
                        if bytes.get(i) == Some(&b':') {
                            i += 1;
                            next = Token::Value;
                        }
                    }
                    b'}' if next == Token::KeyOrEnd => {
                        (i, next) = self.close(Kind::Object, i, watch);
                        object = self.in_object();
                    }
                    _ => return self.fail(i, Cause::Unexpected),
                },
                Token::Colon => {
                    if byte != b':' {
                        return self.fail(i, Cause::Unexpected);
                    }
                    i += 1;
                    next = Token::Value;
                }
                Token::Value | Token::ValueOrEnd => match byte {
                    b'"' => {
                        self.begin(Kind::String, i, watch);
                        let quote = plain_end(bytes, i + 1);
                        i = if bytes.get(quote) == Some(&b'"') {
                            self.text(self.span(i, quote + 1), watch);
                            quote + 1
                        } else {
                            self.string_begin(i, false);
                            self.string(bytes, i + 1, quote, watch)?
                        };
                        (i, next) = self.behind_value(bytes, i, object);
                    }
                    b'{' | b'[' => {
                        object = byte == b'{';
                        self.open(object, i, watch)?;
                        i += 1;
                        next = if object { Token::KeyOrEnd } else { Token::ValueOrEnd };
                    }
                    b'-' | b'0'..=b'9' => {
                        self.begin(Kind::Number, i, watch);
                        self.token = self.base + i;
                        i = self.number_begin(bytes, i, byte, watch)?;
                        (i, next) = self.behind_value(bytes, i, object);
                    }
                    b']' if next == Token::ValueOrEnd => {
                        (i, next) = self.close(Kind::Array, i, watch);
                        object = self.in_object();
                    }
                    _ => {
                        i = self.word_begin(bytes, i, byte, watch)?;
                        (i, next) = self.behind_value(bytes, i, object);
                    }
                },
                Token::Nothing => return self.fail(i, Cause::Trailing),
            }
        }
    }

    /// Finishes the token that the last push cut, and says which may follow.
    fn resume<W: Watch>(&mut self, bytes: &[u8], watch: &mut W) -> Option<(usize, Token)> {
        let i = match self.next {
            Next::InString => self.string(bytes, 0, 0, watch),
            Next::InEscape => {
                let i = match bytes.first() {
                    Some(b'u') => self.hex(bytes, 0, 1, 4)?,
                    Some(b'n' | b'"' | b'\\' | b'/' | b't' | b'r' | b'b' | b'f') => 1,
                    _ => return self.fail(0, Cause::Escape),
                };
                self.string(bytes, 0, i, watch)
            }
            Next::InHex(left) => {
                let i = self.hex(bytes, 0, 0, left)?;
                self.string(bytes, 0, i, watch)
            }
            Next::InNumber(number) => self.number(bytes, 0, number, watch),
            Next::InWord(word, had) => self.word(bytes, 0, word, had, watch),
            Next::Token(token) => return Some((0, token)),
        }?;
        let named = self.naming && !matches!(self.next, Next::InNumber(_) | Next::InWord(..));
        Some((i, if named { Token::Colon } else { self.after_value() }))
    }

    fn word_begin<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        byte: u8,
        watch: &mut W,
    ) -> Option<usize> {
        let word = match byte {
            b't' => Word::True,
            b'f' => Word::False,
            b'n' => Word::Null,
            0xEF if self.base + i == 0 => return self.fail(i, Cause::ByteOrderMark),
            _ => return self.fail(i, Cause::Unexpected),
        };
        self.begin(word.kind(), i, watch);
        self.token = self.base + i;
        self.word(bytes, i + 1, word, 1, watch)
    }

    fn open<W: Watch>(&mut self, object: bool, i: usize, watch: &mut W) -> Option<()> {
        self.begin(if object { Kind::Object } else { Kind::Array }, i, watch);
        if let Some(start) = self.starts.get_mut(self.depth) {
            *start = self.base + i;
        }
        let bit = 1 << (self.depth % 64);
        let Some(word) = self.objects.get_mut(self.depth / 64) else {
            return self.fail(i, Cause::Depth);
        };
        *word = if object { *word | bit } else { *word & !bit };
        self.depth += 1;
        Some(())
    }

    /// Some container of this kind is open.
    fn close<W: Watch>(&mut self, kind: Kind, i: usize, watch: &mut W) -> (usize, Token) {
        self.depth -= 1;
        if self.depth <= W::DEPTH {
            self.end(kind, self.starts[self.depth], self.base + i + 1, watch);
        }
        (i + 1, self.after_value())
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

    fn end<W: Watch>(&self, kind: Kind, start: usize, end: usize, watch: &mut W) {
        if self.depth <= W::DEPTH {
            watch.end(self.depth, kind, Span { start, end });
        }
    }

    /// Takes the comma that in compact JSON follows at once: a turn of the loop less, which on lists
    /// of numbers is a third of the time.
    fn behind_value(&self, bytes: &[u8], i: usize, object: bool) -> (usize, Token) {
        match (self.after_value(), bytes.get(i)) {
            (Token::CommaOrEnd, Some(b',')) if object => (i + 1, Token::Key),
            (Token::CommaOrEnd, Some(b',')) => (i + 1, Token::Value),
            (next, _) => (i, next),
        }
    }

    const fn after_value(&self) -> Token {
        if self.depth == 0 { Token::Nothing } else { Token::CommaOrEnd }
    }

    fn string_begin(&mut self, i: usize, naming: bool) {
        self.token = self.base + i;
        self.naming = naming;
        self.escaped = false;
        self.name.clear();
    }

    const fn span(&self, from: usize, to: usize) -> Span {
        Span { start: self.base + from, end: self.base + to }
    }

    /// A string value is complete.
    #[inline]
    fn text<W: Watch>(&self, span: Span, watch: &mut W) {
        if W::TEXT {
            watch.text(span);
        }
        self.end(Kind::String, span.start, span.end, watch);
    }

    /// Reads on in a string from `i`; what this push has of it begins at `from`. The way of strings
    /// that are long, escaped or cut.
    #[inline(never)]
    fn string<W: Watch>(
        &mut self,
        bytes: &[u8],
        from: usize,
        i: usize,
        watch: &mut W,
    ) -> Option<usize> {
        let i = self.string_end(bytes, from, i)?;
        let span = Span { start: self.token, end: self.base + i + 1 };
        if self.naming {
            if self.depth <= W::DEPTH {
                self.report_name(bytes.get(from..i).unwrap_or_default(), span, watch);
            }
        } else {
            self.text(span, watch);
        }
        Some(i + 1)
    }

    /// Index of the quote that ends the string which `i` lies in.
    fn string_end(&mut self, bytes: &[u8], from: usize, i: usize) -> Option<usize> {
        let mut i = i;
        while let Some(lanes) = bytes.get(i..).and_then(|rest| rest.first_chunk()) {
            let mut hits = specials_of_32(lanes);
            let mut step = 32;
            while hits != 0 {
                let at = hits.trailing_zeros() as usize;
                match lanes.get(at) {
                    Some(b'"') => return Some(i + at),
                    Some(b'\\') => {
                        step = at;
                        // Escapes come in runs: blank lines, and text in `\u` escapes.
                        while bytes.get(i + step) == Some(&b'\\') {
                            step += self.escape_len(bytes, from, i + step)?;
                        }
                        if step >= 32 {
                            break;
                        }
                        hits &= u32::MAX << step;
                        step = 32;
                    }
                    _ => return self.fail(i + at, Cause::Control),
                }
            }
            i += step;
        }
        loop {
            i = plain_end(bytes, i);
            match bytes.get(i) {
                Some(b'"') => return Some(i),
                Some(b'\\') => i += self.escape_len(bytes, from, i)?,
                Some(0..0x20) => return self.fail(i, Cause::Control),
                Some(_) => i += 1,
                None => return self.cut_string(bytes, from, Next::InString),
            }
        }
    }

    /// Length of the escape whose backslash stands at `i`.
    #[inline]
    fn escape_len(&mut self, bytes: &[u8], from: usize, i: usize) -> Option<usize> {
        self.escaped = true;
        match bytes.get(i + 1) {
            Some(b'n' | b'"' | b'\\' | b'/' | b't' | b'r' | b'b' | b'f') => Some(2),
            Some(b'u') => self.hex(bytes, from, i + 2, 4).map(|_| 6),
            Some(_) => self.fail(i + 1, Cause::Escape),
            None => self.cut_string(bytes, from, Next::InEscape),
        }
    }

    /// Index behind the hexadecimal digits of an escape.
    fn hex(&mut self, bytes: &[u8], from: usize, i: usize, left: u8) -> Option<usize> {
        if let Some(digits) = bytes.get(i..i + usize::from(left))
            && digits.iter().fold(true, |all, &byte| all & HEX[usize::from(byte)])
        {
            return Some(i + digits.len());
        }
        for had in 0..left {
            match bytes.get(i + usize::from(had)) {
                Some(digit) if digit.is_ascii_hexdigit() => {}
                Some(_) => return self.fail(i + usize::from(had), Cause::Escape),
                None => return self.cut_string(bytes, from, Next::InHex(left - had)),
            }
        }
        None
    }

    /// The push ends inside a string: keeps a name's bytes, as far as they can matter.
    fn cut_string(&mut self, bytes: &[u8], from: usize, next: Next) -> Option<usize> {
        if self.naming {
            let room = (KEY_RAW_BYTES_MAX + 1).saturating_sub(self.name.len());
            let part = bytes.get(from..).unwrap_or_default();
            self.name.extend_from_slice(&part[..part.len().min(room)]);
        }
        self.next = next;
        None
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

    fn number_begin<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        byte: u8,
        watch: &mut W,
    ) -> Option<usize> {
        let (mut i, mut number) = match byte {
            b'-' => return self.number(bytes, i + 1, Number::Minus, watch),
            b'0' => (i + 1, Number::Zero),
            // Prompts of token ids are long lists of these.
            _ => (skip_digits(bytes, i + 1), Number::Whole),
        };
        if let Some([b'.', b'0'..=b'9']) = bytes.get(i..i + 2) {
            (i, number) = (skip_digits(bytes, i + 2), Number::Fraction);
        }
        if let Some(b',' | b']' | b'}') = bytes.get(i) {
            self.end(Kind::Number, self.token, self.base + i, watch);
            return Some(i);
        }
        self.number(bytes, i, number, watch)
    }

    fn number<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        number: Number,
        watch: &mut W,
    ) -> Option<usize> {
        use Number::{E, ESign, Exponent, Fraction, Minus, Point, Whole, Zero};
        let (mut i, mut number) = (i, number);
        while let Some(&byte) = bytes.get(i) {
            number = match (number, byte) {
                (Whole, b'0'..=b'9') => {
                    i = skip_digits(bytes, i + 1);
                    continue;
                }
                (Minus, b'0') => Zero,
                (Minus, b'1'..=b'9') => Whole,
                (Zero | Whole, b'.') => Point,
                (Point | Fraction, b'0'..=b'9') => {
                    i = skip_digits(bytes, i + 1);
                    number = Fraction;
                    continue;
                }
                (Zero | Whole | Fraction, b'e' | b'E') => E,
                (E, b'+' | b'-') => ESign,
                (E | ESign | Exponent, b'0'..=b'9') => Exponent,
                (Zero | Whole | Fraction | Exponent, _) => {
                    self.end(Kind::Number, self.token, self.base + i, watch);
                    return Some(i);
                }
                _ => return self.fail(i, Cause::Number),
            };
            i += 1;
        }
        self.next = Next::InNumber(number);
        None
    }

    fn word<W: Watch>(
        &mut self,
        bytes: &[u8],
        i: usize,
        word: Word,
        had: u8,
        watch: &mut W,
    ) -> Option<usize> {
        let mut i = i;
        for (n, &letter) in (0..).zip(word.text()).skip(usize::from(had)) {
            match bytes.get(i) {
                Some(&byte) if byte == letter => i += 1,
                Some(_) => return self.fail(i, Cause::Unexpected),
                None => {
                    self.next = Next::InWord(word, n);
                    return None;
                }
            }
        }
        self.end(word.kind(), self.token, self.base + i, watch);
        Some(i)
    }

    #[cold]
    fn fail<T>(&mut self, i: usize, cause: Cause) -> Option<T> {
        self.fault = Some(Fault { at: self.base + i, cause });
        None
    }
}

impl Number {
    const fn may_end(self) -> bool {
        matches!(self, Number::Zero | Number::Whole | Number::Fraction | Number::Exponent)
    }
}

/// Index of the first byte at or after `i` that is no digit; the length if there is none.
fn skip_digits(bytes: &[u8], i: usize) -> usize {
    let mut i = i;
    while let Some(word) = bytes.get(i..).and_then(|rest| rest.first_chunk()) {
        let word = u64::from_le_bytes(*word) ^ u64::from_le_bytes([b'0'; 8]);
        // A digit is now 0 to 9, and only those stay below 16 when 6 is added. A carry can spoil
        // bytes above one that is no digit, never below.
        let others =
            (word | word.wrapping_add(u64::from_le_bytes([6; 8]))) & u64::from_le_bytes([0xF0; 8]);
        if others != 0 {
            return i + others.trailing_zeros() as usize / 8;
        }
        i += 8;
    }
    let rest = bytes.get(i..).unwrap_or_default();
    i + rest.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(rest.len())
}

/// Which bytes are hexadecimal digits.
static HEX: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte: u8 = 0;
    while byte < 255 {
        table[byte as usize] = byte.is_ascii_hexdigit();
        byte += 1;
    }
    table
};

/// Index of the first special byte of a string at or after `i`, if it is near: short strings end
/// there, and a vector step would cost them more than it saves. Otherwise of some byte that no
/// special one comes before.
#[inline(always)]
fn plain_end(bytes: &[u8], i: usize) -> usize {
    let Some(lanes) = bytes.get(i..).and_then(|rest| rest.first_chunk::<NEAR>()) else {
        return plain_end_slowly(bytes, i);
    };
    for (at, word) in (i..).step_by(8).zip(lanes.as_chunks().0) {
        let hits = specials(u64::from_le_bytes(*word));
        if hits != 0 {
            return at + hits.trailing_zeros() as usize / 8;
        }
    }
    i + NEAR
}

const NEAR: usize = 32;

/// [`plain_end`] near the end of a push.
fn plain_end_slowly(bytes: &[u8], i: usize) -> usize {
    let mut i = i;
    while let Some(word) = bytes.get(i..).and_then(|rest| rest.first_chunk()) {
        let hits = specials(u64::from_le_bytes(*word));
        if hits != 0 {
            return i + hits.trailing_zeros() as usize / 8;
        }
        i += 8;
    }
    i
}

/// Sets the top bit of every byte that is not plain text of a string: a quote, a backslash or a
/// control character. A borrow can set it wrongly in a byte above a special one, never below, so
/// the lowest is right (Mycroft's test for zero bytes).
const fn specials(word: u64) -> u64 {
    // One bit turned, the quote follows the control characters, and those stay among themselves.
    let turned = word ^ (ONES * 0x02);
    let backslash = word ^ (ONES * b'\\' as u64);
    (turned.wrapping_sub(ONES * 0x21) | backslash.wrapping_sub(ONES)) & !word & TOPS
}

/// One bit for each byte, set for the special ones. The loop becomes vector code, and the
/// products gather eight flags of a byte each into the bits of their top byte, because a plain
/// fold into bits is compiled byte by byte.
fn specials_of_32(lanes: &[u8; 32]) -> u32 {
    let mut flags = [0u8; 32];
    for (flag, &byte) in flags.iter_mut().zip(lanes) {
        *flag = u8::from(byte < 0x20) | u8::from(byte == b'"') | u8::from(byte == b'\\');
    }
    let [a, b, c, d] = [0, 8, 16, 24].map(|at| {
        let eight: [u8; 8] = std::array::from_fn(|n| flags[at + n]);
        u64::from_le_bytes(eight)
    });
    if a | b | c | d == 0 {
        return 0;
    }
    u32::from_le_bytes(
        [a, b, c, d].map(|eight| (eight.wrapping_mul(0x0102_0408_1020_4080) >> 56) as u8),
    )
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
#[derive(Clone, Debug, Default)]
struct Utf8 {
    /// The start of a sequence that the last push cut.
    held: [u8; 4],
    len: usize,
}

impl Utf8 {
    /// Up to this length a look whether it is all ASCII costs less than the start of a check.
    const SHORT: usize = 1 << 10;

    /// `base` is the offset of `bytes[0]`, for the fault.
    fn push(&mut self, bytes: &[u8], base: usize) -> Result<(), Fault> {
        if self.len == 0 && bytes.len() <= Utf8::SHORT && is_ascii(bytes) {
            return Ok(());
        }
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

/// As the standard library's, without its loop over the last bytes.
fn is_ascii(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks();
    let any = words.iter().fold(0, |any, word| any | u128::from_le_bytes(*word));
    let last = match bytes.last_chunk() {
        Some(last) => u128::from_le_bytes(*last),
        None => rest.iter().fold(0, |any, &byte| any | u128::from(byte)),
    };
    (any | last) & u128::from_le_bytes([0x80; 16]) == 0
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

#[cfg(test)]
#[path = "json/tests.rs"]
mod tests;
