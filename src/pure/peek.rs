//! Fast reading of a small JSON text that lies in memory whole: what an event of a stream is read
//! with.
//!
//! A [`Cursor`] moves over tokens and hands out slices; it allocates nothing and stops at the first
//! thing that does not fit. It checks brackets, quotes, commas and colons, but not what it passes
//! over: inside of a skipped value only brackets and quotes are looked at, and words, numbers,
//! escapes and UTF-8 are taken as they come. That is enough to never mistake the inside of a string
//! for anything else. What a client sends needs [`crate::pure::json`] instead, which checks every
//! byte.

use crate::pure::json;
use crate::pure::lanes::{ONES, TOPS, below, equals, place};

/// What is left of a JSON text that lies in memory whole.
///
/// What is long or rare stands in functions of its own that take slices and give numbers: a cursor
/// whose address nobody takes stays in registers.
#[derive(Clone, Copy)]
pub(crate) struct Cursor<'a> {
    pub rest: &'a [u8],
}

/// A string as written, without its quotes.
#[derive(Clone, Copy)]
pub(crate) struct Text<'a> {
    pub raw: &'a [u8],
    pub escaped: bool,
}

impl Text<'_> {
    /// Hands on the text itself; allocates only where it has escapes.
    #[inline(always)]
    pub fn with<R>(self, then: impl FnOnce(&[u8]) -> R) -> R {
        // One call of `then`, which may be large, for both.
        let plain;
        then(if self.escaped {
            plain = json::unescape(self.raw);
            &plain
        } else {
            self.raw
        })
    }

    pub fn measure(self) -> (u64, u64) {
        measure(self.raw, self.escaped)
    }
}

impl<'a> Cursor<'a> {
    pub const fn new(rest: &'a [u8]) -> Cursor<'a> {
        Cursor { rest }
    }

    /// The next byte; zero, which no JSON text has between its tokens, at the end.
    #[inline(always)]
    pub fn byte(&self) -> u8 {
        self.rest.first().copied().unwrap_or(0)
    }

    #[inline(always)]
    pub fn step(&mut self) {
        self.rest = self.rest.get(1..).unwrap_or_default();
    }

    #[inline(always)]
    pub fn space(&mut self) {
        // Engines write none, so this is one comparison.
        if self.byte() <= b' ' {
            self.rest = behind_space(self.rest);
        }
    }

    #[inline(always)]
    pub fn expect(&mut self, byte: u8) -> Option<()> {
        let (&first, behind) = self.rest.split_first()?;
        self.rest = behind;
        (first == byte).then_some(())
    }

    /// Moves past what separates members or elements. `false`: the container ends here. White space
    /// may follow.
    #[inline(always)]
    pub fn next(&mut self, fresh: bool, close: u8) -> Option<bool> {
        self.space();
        let (&byte, behind) = self.rest.split_first()?;
        let comma = byte == b',' && !fresh;
        if comma || byte == close {
            self.rest = behind;
            Some(comma)
        } else {
            fresh.then_some(true)
        }
    }

    /// Moves to the value of the member that stands here and gives its name.
    #[inline(always)]
    pub fn name(&mut self) -> Option<Text<'a>> {
        if self.byte() != b'"' {
            self.space();
        }
        self.expect(b'"')?;
        let (len, escaped) = string_len(self.rest);
        let (raw, behind) = self.rest.split_at_checked(len)?;
        if let [_, b':', next, ..] = behind
            && *next > b' '
        {
            self.rest = &behind[2..];
        } else {
            self.rest = behind.get(1..)?;
            self.space();
            self.expect(b':')?;
            self.space();
        }
        Some(Text { raw, escaped })
    }

    /// Moves to the value of the next member of an object and gives its name, or moves past the end
    /// of the object. `fresh`: no member has been read yet.
    #[inline(always)]
    pub fn member(&mut self, fresh: bool) -> Option<Option<Text<'a>>> {
        if self.next(fresh, b'}')? { self.name().map(Some) } else { Some(None) }
    }

    /// Moves to the next element of an array, or past the end of the array: `false`.
    #[inline]
    pub fn element(&mut self, fresh: bool) -> Option<bool> {
        let more = self.next(fresh, b']')?;
        self.space();
        Some(more)
    }

    #[inline(always)]
    pub fn string(&mut self) -> Option<Text<'a>> {
        self.expect(b'"')?;
        let (len, escaped) = string_len(self.rest);
        let (raw, behind) = self.rest.split_at_checked(len)?;
        self.rest = behind.get(1..)?;
        Some(Text { raw, escaped })
    }

    /// Moves past a string.
    #[inline(always)]
    pub fn skip_string(&mut self) -> Option<()> {
        let len = string_len(self.rest.get(1..)?).0.checked_add(2)?;
        self.rest = self.rest.get(len..)?;
        Some(())
    }

    /// Moves past any value and gives it as written.
    #[inline(always)]
    pub fn value(&mut self) -> Option<&'a [u8]> {
        let len = match self.byte() {
            b'"' => string_len(self.rest.get(1..)?).0.checked_add(2)?,
            b'{' | b'[' => brackets_len(self.rest)?,
            byte if starts_scalar(byte) => scalar_len(self.rest),
            _ => return None,
        };
        let (value, behind) = self.rest.split_at_checked(len)?;
        self.rest = behind;
        Some(value)
    }
}

#[inline(never)]
fn behind_space(bytes: &[u8]) -> &[u8] {
    let mut rest = bytes;
    while let [b' ' | b'\t' | b'\n' | b'\r', behind @ ..] = rest {
        rest = behind;
    }
    rest
}

/// Length of the string whose opening quote stands right before, and whether it has escapes. Its
/// closing quote stands behind it; the length is the greatest there is if none does.
#[inline(always)]
fn string_len(bytes: &[u8]) -> (usize, bool) {
    // Names and most values are short.
    if let Some(lanes) = bytes.first_chunk::<16>() {
        let (low, high) = halves(lanes);
        let hits = stops(low);
        let len = if hits == 0 { 8 + place(stops(high)) } else { place(hits) };
        if lanes.get(len) == Some(&b'"') {
            return (len, false);
        }
        return long_string_len(bytes, len);
    }
    long_string_len(bytes, 0)
}

/// The same, from a place on before which neither a quote nor a backslash stands.
#[inline(never)]
fn long_string_len(bytes: &[u8], from: usize) -> (usize, bool) {
    let (mut at, mut escaped) = (from, false);
    while let Some(step) = bytes.get(at..).and_then(quote_or_backslash) {
        at += step;
        if bytes.get(at) == Some(&b'"') {
            return (at, escaped);
        }
        escaped = true;
        at += 2;
    }
    (usize::MAX, escaped)
}

/// Length of the container that starts here.
#[inline(never)]
fn brackets_len(bytes: &[u8]) -> Option<usize> {
    let mut brackets = Brackets::default();
    let mut cursor = Cursor::new(bytes);
    loop {
        cursor.rest = cursor.rest.get(bracket_or_quote(cursor.rest)?..)?;
        let byte = cursor.byte();
        if byte == b'"' {
            cursor.string()?;
            continue;
        }
        cursor.step();
        if brackets.turn(byte)? {
            return Some(bytes.len() - cursor.rest.len());
        }
    }
}

/// The open brackets within a value that is passed over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Brackets {
    /// One bit for each, set for an object; the innermost is the lowest.
    objects: u128,
    depth: u32,
}

impl Brackets {
    /// Takes a bracket. `true`: it closes the first one. `None`: it closes none, or they are nested
    /// deeper than in any response; a fault is better than a wrong reading.
    #[inline]
    pub fn turn(&mut self, bracket: u8) -> Option<bool> {
        if matches!(bracket, b'{' | b'[') {
            if self.depth == u128::BITS {
                return None;
            }
            self.objects = self.objects << 1 | u128::from(bracket == b'{');
            self.depth += 1;
        } else {
            if self.depth == 0 || (self.objects & 1 == 1) != (bracket == b'}') {
                return None;
            }
            self.objects >>= 1;
            self.depth -= 1;
        }
        Some(self.depth == 0)
    }
}

/// Whether a number, `true`, `false`, `null`, `NaN` or `Infinity` can start so.
pub(crate) const fn starts_scalar(byte: u8) -> bool {
    matches!(byte, b'-' | b'0'..=b'9' | b't' | b'f' | b'n' | b'N' | b'I')
}

/// Length of a number or word: white space, a comma or a bracket ends it. What it is checked to be
/// is up to its reader.
#[inline(always)]
pub(crate) fn scalar_len(bytes: &[u8]) -> usize {
    let mut rest = bytes;
    while let Some((lanes, behind)) = rest.split_first_chunk::<8>() {
        let word = u64::from_le_bytes(*lanes);
        // `]` differs from `}` in one bit.
        let folded = word | (ONES * 0x20);
        let hits = equals(word, b',') | equals(folded, b'}') | below(word, b' ' + 1);
        if hits != 0 {
            return bytes.len() - rest.len() + place(hits);
        }
        rest = behind;
    }
    let ends = |&byte: &u8| byte <= b' ' || matches!(byte, b',' | b']' | b'}');
    bytes.len() - rest.len() + rest.iter().position(ends).unwrap_or(rest.len())
}

const fn stops(word: u64) -> u64 {
    equals(word, b'"') | equals(word, b'\\')
}

/// Two words of eight bytes each.
const fn halves(lanes: &[u8; 16]) -> (u64, u64) {
    let both = u128::from_le_bytes(*lanes);
    // Each is one half of it.
    (both as u64, (both >> 64) as u64)
}

/// Distance to the first quote or backslash. Most strings in answers are short or very long, so
/// some words come before a call into vector code.
#[inline]
pub(crate) fn quote_or_backslash(bytes: &[u8]) -> Option<usize> {
    const NEAR: usize = 32;
    let (words, tail) = bytes.as_chunks::<8>();
    let mut at = 0;
    for lanes in words {
        let hits = stops(u64::from_le_bytes(*lanes));
        if hits != 0 {
            return Some(at + place(hits));
        }
        at += 8;
        if at == NEAR {
            return Some(at + memchr::memchr2(b'"', b'\\', bytes.get(at..)?)?);
        }
    }
    Some(at + tail.iter().position(|&byte| byte == b'"' || byte == b'\\')?)
}

/// The text that ends at the first quote that no backslash stands before.
pub(crate) struct Line {
    pub len: usize,
    pub escaped: bool,
    /// Some byte of it may not be ASCII.
    pub wide: bool,
}

/// `None` if no quote ends the text, or a control character, as a line end, comes before it.
#[inline(always)]
pub(crate) fn line(bytes: &[u8]) -> Option<Line> {
    let (mut escaped, mut wide) = (false, 0);
    let mut rest = bytes;
    loop {
        let step = match rest.split_first_chunk::<8>() {
            Some((lanes, behind)) => {
                let word = u64::from_le_bytes(*lanes);
                let hits = stops(word) | below(word, b' ');
                // Up to seven bytes behind the text are looked at as well.
                wide |= word;
                if hits == 0 {
                    rest = behind;
                    continue;
                }
                place(hits)
            }
            None => {
                wide = TOPS;
                rest.iter().position(|&byte| byte < b' ' || matches!(byte, b'"' | b'\\'))?
            }
        };
        rest = &rest[step..];
        match rest {
            [b'"', ..] => {
                let len = bytes.len() - rest.len();
                return Some(Line { len, escaped, wide: wide & TOPS != 0 });
            }
            [b'\\', second, behind @ ..] if *second >= b' ' => {
                escaped = true;
                rest = behind;
            }
            _ => return None,
        }
    }
}

/// Distance to the first bracket of any kind or quote.
pub(crate) fn bracket_or_quote(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    while let Some(lanes) = bytes.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
        let word = u64::from_le_bytes(*lanes);
        // `[` and `]` differ from `{` and `}` in one bit.
        let folded = word | (ONES * 0x20);
        let hits = equals(folded, b'{') | equals(folded, b'}') | equals(word, b'"');
        if hits != 0 {
            return Some(at + place(hits));
        }
        at += 8;
    }
    let rest = bytes.get(at..).unwrap_or_default();
    rest.iter().position(|byte| matches!(byte, b'{' | b'}' | b'[' | b']' | b'"')).map(|n| at + n)
}

fn is_ascii(bytes: &[u8]) -> bool {
    let Some(last) = bytes.last_chunk::<8>() else { return bytes.is_ascii() };
    let (words, _) = bytes.as_chunks::<8>();
    let all =
        words.iter().fold(u64::from_le_bytes(*last), |all, lanes| all | u64::from_le_bytes(*lanes));
    all & TOPS == 0
}

/// UTF-8 characters: bytes that do not continue one.
fn chars(bytes: &[u8]) -> u64 {
    // Written so that the compiler makes vector code of it.
    bytes
        .chunks(255)
        .map(|part| {
            let starts = part.iter().fold(0u8, |sum, &byte| sum + u8::from(byte & 0xC0 != 0x80));
            u64::from(starts)
        })
        .sum()
}

/// Bytes and characters of the UTF-8 text that a JSON string stands for, given without its quotes.
#[inline]
pub(crate) fn measure(raw: &[u8], escaped: bool) -> (u64, u64) {
    if !escaped {
        let bytes = raw.len() as u64;
        return (bytes, if is_ascii(raw) { bytes } else { chars(raw) });
    }
    let mut measure = Measure::default();
    measure.push(raw);
    (measure.bytes, measure.chars)
}

/// The same for a string that may come in pieces.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Measure {
    pub bytes: u64,
    pub chars: u64,
    escape: Escape,
}

#[derive(Clone, Copy, Debug, Default)]
enum Escape {
    #[default]
    None,
    Backslash,
    /// So many hexadecimal digits have come; their value.
    Hex(u8, u16),
}

impl Measure {
    pub fn push(&mut self, raw: &[u8]) {
        let mut rest = raw;
        while let Some((&byte, behind)) = rest.split_first() {
            match self.escape {
                Escape::None => {
                    let plain = memchr::memchr(b'\\', rest).unwrap_or(rest.len());
                    let (text, behind) = rest.split_at(plain);
                    self.bytes += text.len() as u64;
                    self.chars += chars(text);
                    if behind.is_empty() {
                        return;
                    }
                    self.escape = Escape::Backslash;
                    rest = &behind[1..];
                }
                Escape::Backslash if byte == b'u' => {
                    self.escape = Escape::Hex(0, 0);
                    rest = behind;
                }
                Escape::Backslash => {
                    self.add(1);
                    rest = behind;
                }
                Escape::Hex(had, value) => match char::from(byte).to_digit(16) {
                    Some(digit) => {
                        // A digit is below sixteen.
                        let value = value << 4 | digit as u16;
                        self.escape = Escape::Hex(had + 1, value);
                        if had == 3 {
                            self.unit(value);
                        }
                        rest = behind;
                    }
                    // Malformed.
                    None => self.unit(value),
                },
            }
        }
    }

    /// A UTF-16 unit by its number. The first half of a pair counts for both.
    fn unit(&mut self, value: u16) {
        match value {
            0..0x80 => self.add(1),
            0x80..0x800 => self.add(2),
            0xD800..0xDC00 => self.add(4),
            0xDC00..0xE000 => self.escape = Escape::None,
            _ => self.add(3),
        }
    }

    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.chars += 1;
        self.escape = Escape::None;
    }
}
