//! Bodies: where they end, and the chunked coding in both directions.
//!
//! The decoder hands out ranges of its input and never copies, except where one contiguous piece is
//! asked for. It is strict: one spelling of each line end, sizes that cannot wrap, bounded
//! extensions and trailers, which are checked and dropped.

use std::ops::Range;

use crate::pure::fields;

/// How a message says where its body ends (RFC 9112, 6.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Framing {
    /// There is no body.
    #[default]
    None,
    /// This many bytes follow the head.
    Length(u64),
    /// Chunked coding.
    Chunked,
    /// Answers only: the body ends where the connection does.
    UntilClose,
}

/// Why a body cannot be read on. The connection must be closed: nobody knows where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyFault {
    /// The coding is broken; the text says where. A client gets 400, a backend 502.
    Malformed(&'static str),
    /// More bytes than allowed were sent or announced. A client gets 413.
    TooLarge,
    /// The connection ended before the body did.
    Truncated,
}

/// What one call has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Bytes of the input that are done with, framing included.
    pub consumed: usize,
    /// The body bytes among them; may be empty.
    pub data: Range<usize>,
    /// The body is complete. What follows `consumed` belongs to the next message.
    pub end: bool,
}

/// A body being read. Cheap to make, holds no memory.
#[derive(Clone, Debug)]
pub struct Decoder {
    state: State,
    /// Bytes left of the body or of the current chunk.
    left: u64,
    /// Body bytes that may still be announced.
    allowance: u64,
    /// Hex digits of the current chunk size.
    digits: u8,
    /// Bytes that extensions and trailers may still take, over the whole body.
    spare: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Length,
    UntilClose,
    Size,
    Extension,
    SizeLf,
    Data,
    DataCr,
    DataLf,
    TrailerStart,
    TrailerName,
    TrailerValue,
    TrailerLf,
    EndLf,
    Done,
    Failed(BodyFault),
}

/// No client needs extensions or trailers; a stranger could send them for ever.
const SPARE_BYTES: u16 = 16 * 1024;
/// Sixteen hex digits hold any u64; more could only be zeros or a wrap.
const SIZE_DIGITS_MAX: u8 = 16;

impl Decoder {
    /// A decoder of a body of any size.
    pub fn new(framing: Framing) -> Decoder {
        Decoder::bounded(framing, u64::MAX)
    }

    /// A decoder that fails with [`BodyFault::TooLarge`] as soon as more than `bytes_max` body
    /// bytes are announced, by the length, by a chunk's size, or by arriving.
    pub fn bounded(framing: Framing, bytes_max: u64) -> Decoder {
        let (state, left) = match framing {
            Framing::None | Framing::Length(0) => (State::Done, 0),
            Framing::Length(bytes) if bytes > bytes_max => (State::Failed(BodyFault::TooLarge), 0),
            Framing::Length(bytes) => (State::Length, bytes),
            Framing::Chunked => (State::Size, 0),
            Framing::UntilClose => (State::UntilClose, 0),
        };
        Decoder { state, left, allowance: bytes_max, digits: 0, spare: SPARE_BYTES }
    }

    pub const fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Body bytes that are certain to come: of the whole body with a length, of the current chunk
    /// otherwise.
    pub const fn left(&self) -> u64 {
        self.left
    }

    /// Takes the next bytes, which must follow those consumed before.
    ///
    /// It stops before a second range of data, at the end of the body, or at a fault; otherwise it
    /// consumes all. Costs a few nanoseconds and never allocates.
    ///
    /// # Errors
    /// A fault behind sound data is reported by the next call, and by each one after it.
    pub fn decode(&mut self, input: &[u8]) -> Result<Piece, BodyFault> {
        let mut at = 0;
        let mut data = 0..0;
        while let Some(&byte) = input.get(at) {
            let next = match self.state {
                State::Data | State::Length | State::UntilClose if !data.is_empty() => break,
                State::Data | State::Length => {
                    let take =
                        usize::try_from(self.left).unwrap_or(usize::MAX).min(input.len() - at);
                    data = at..at + take;
                    at = data.end;
                    // A usize fits a u64 on the 64-bit targets we build for.
                    self.left -= take as u64;
                    self.state = match self.state {
                        state if self.left > 0 => state,
                        State::Data => State::DataCr,
                        _ => State::Done,
                    };
                    continue;
                }
                State::UntilClose => {
                    let take = (input.len() - at) as u64;
                    if take > self.allowance {
                        State::Failed(BodyFault::TooLarge)
                    } else {
                        self.allowance -= take;
                        data = at..input.len();
                        at = data.end;
                        continue;
                    }
                }
                State::Size => match self.whole_size(&input[at..]) {
                    Some(len) => {
                        at += len - 1;
                        State::Data
                    }
                    None => self.size(byte),
                },
                State::Extension => match byte {
                    b'\r' => State::SizeLf,
                    _ => self.spend(byte, State::Extension),
                },
                State::SizeLf if byte == b'\n' => self.sized(),
                State::DataCr if input[at..].starts_with(CHUNK_END) => {
                    at += 1;
                    State::Size
                }
                State::DataCr if byte == b'\r' => State::DataLf,
                State::DataLf if byte == b'\n' => State::Size,
                State::TrailerStart if byte == b'\r' => State::EndLf,
                State::TrailerStart | State::TrailerName => match byte {
                    b':' if self.state == State::TrailerName => State::TrailerValue,
                    _ if fields::is_token_byte(byte) => self.spend(byte, State::TrailerName),
                    _ => malformed("malformed trailer field"),
                },
                State::TrailerValue => match byte {
                    b'\r' => State::TrailerLf,
                    _ => self.spend(byte, State::TrailerValue),
                },
                State::TrailerLf if byte == b'\n' => State::TrailerStart,
                State::EndLf if byte == b'\n' => State::Done,
                State::SizeLf | State::DataCr | State::DataLf | State::TrailerLf | State::EndLf => {
                    malformed("a line of the chunked body does not end in CRLF")
                }
                State::Done | State::Failed(_) => break,
            };
            self.state = next;
            if let State::Failed(_) = next {
                break;
            }
            at += 1;
        }
        match self.state {
            State::Failed(fault) if data.is_empty() => Err(fault),
            state => Ok(Piece { consumed: at, data, end: state == State::Done }),
        }
    }

    /// As [`Decoder::decode`], over all chunks in the buffer: their data is moved together, so that
    /// one range holds it. Costs one move of the bytes behind the first chunk.
    ///
    /// # Errors
    /// As [`Decoder::decode`]'s.
    pub fn decode_joined(&mut self, buf: &mut [u8]) -> Result<Piece, BodyFault> {
        let mut whole = self.decode(buf)?;
        while !whole.end && whole.consumed < buf.len() {
            // A fault here is remembered, and reported by the next call.
            let Ok(piece) = self.decode(buf.get(whole.consumed..).unwrap_or_default()) else {
                break;
            };
            let from = whole.consumed + piece.data.start..whole.consumed + piece.data.end;
            if whole.data.is_empty() {
                whole.data = from;
            } else {
                let gain = from.len();
                buf.copy_within(from, whole.data.end);
                whole.data.end += gain;
            }
            whole.consumed += piece.consumed;
            whole.end = piece.end;
        }
        Ok(whole)
    }

    /// The connection has ended: whether the body may end here.
    ///
    /// # Errors
    /// [`BodyFault::Truncated`], or the fault that was found before.
    pub fn eof(&mut self) -> Result<(), BodyFault> {
        match self.state {
            State::Done => Ok(()),
            State::UntilClose => {
                self.state = State::Done;
                Ok(())
            }
            State::Failed(fault) => Err(fault),
            _ => {
                self.state = State::Failed(BodyFault::Truncated);
                Err(BodyFault::Truncated)
            }
        }
    }

    /// Takes the line before a chunk as servers write it, and gives its length: a few digits and a
    /// line end that have come whole, for some data. Anything else goes byte by byte.
    fn whole_size(&mut self, input: &[u8]) -> Option<usize> {
        if self.digits > 0 {
            return None;
        }
        let (mut size, mut len) = (0, 0);
        while let Some(digit) = input.get(len).and_then(|&byte| char::from(byte).to_digit(16)) {
            size = size << 4 | u64::from(digit);
            len += 1;
            if len > 7 {
                return None;
            }
        }
        if size == 0 || size > self.allowance || !input[len..].starts_with(b"\r\n") {
            return None;
        }
        self.left = size;
        self.allowance -= size;
        Some(len + 2)
    }

    fn size(&mut self, byte: u8) -> State {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            b';' if self.digits > 0 => return State::Extension,
            b'\r' if self.digits > 0 => return State::SizeLf,
            _ => return malformed("malformed chunk size"),
        };
        if self.digits == SIZE_DIGITS_MAX {
            return malformed("chunk size out of range");
        }
        self.digits += 1;
        self.left = self.left << 4 | u64::from(digit);
        State::Size
    }

    fn sized(&mut self) -> State {
        self.digits = 0;
        if self.left > i64::MAX as u64 {
            return malformed("chunk size out of range");
        }
        if self.left > self.allowance {
            return State::Failed(BodyFault::TooLarge);
        }
        self.allowance -= self.left;
        if self.left == 0 { State::TrailerStart } else { State::Data }
    }

    fn spend(&mut self, byte: u8, state: State) -> State {
        if !fields::is_value_byte(byte) {
            return malformed("a control byte in a chunk extension or trailer");
        }
        match self.spare.checked_sub(1) {
            Some(spare) => self.spare = spare,
            None => return malformed("chunk extensions or trailers are too long"),
        }
        state
    }
}

fn malformed(what: &'static str) -> State {
    State::Failed(BodyFault::Malformed(what))
}

/// Ends a chunk's data.
pub const CHUNK_END: &[u8] = b"\r\n";
/// Ends a chunked body, after the last chunk's [`CHUNK_END`].
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// The longest that [`chunk_head`] makes.
pub const CHUNK_HEAD_MAX: usize = 18;

const HEX: &[u8; 16] = b"0123456789abcdef";

/// Writes the line before a chunk of `len` bytes (not 0, which would end the body) at the end of
/// `space`, and gives the offset where it begins: with the data right behind `space`, head and data
/// are one slice. `space` must hold [`CHUNK_HEAD_MAX`] bytes or as many as `len` needs.
pub fn chunk_head(space: &mut [u8], len: usize) -> usize {
    let mut at = space.len();
    let mut put = |byte: u8| {
        if let Some(cell) = at.checked_sub(1).and_then(|before| space.get_mut(before)) {
            *cell = byte;
            at -= 1;
        }
    };
    put(b'\n');
    put(b'\r');
    let mut rest = len;
    loop {
        put(HEX[rest & 15]);
        rest >>= 4;
        if rest == 0 {
            return at;
        }
    }
}

/// Appends one whole chunk; nothing if `data` is empty.
pub fn append_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    // Digit by digit: a copy whose length is not known beforehand is a call.
    let digits = (usize::BITS - data.len().leading_zeros()).div_ceil(4);
    for place in (0..digits).rev() {
        out.push(HEX[data.len() >> (4 * place) & 15]);
    }
    out.extend_from_slice(b"\r\n");
    out.extend_from_slice(data);
    out.extend_from_slice(CHUNK_END);
}

#[cfg(test)]
mod tests {
    //! Goal: the decoder reads exactly the grammar, however its input is cut. Method: a naive
    //! reader of whole bodies as the oracle, over all short strings of the bytes that matter and
    //! over seeded changes of good bodies, each cut at every place.
    use super::*;
    use crate::pure::units::Rng;

    /// Reads a whole chunked body the obvious way: body and length, or `None` for broken, or
    /// `Some(None)` for unfinished.
    fn naive(input: &[u8]) -> Option<Option<(Vec<u8>, usize)>> {
        let line = |at: usize| -> Option<Option<(&[u8], usize)>> {
            for (i, &byte) in input[at..].iter().enumerate() {
                match byte {
                    b'\r' => {
                        return match input.get(at + i + 1) {
                            None => Some(None),
                            Some(b'\n') => Some(Some((&input[at..at + i], at + i + 2))),
                            Some(_) => None,
                        };
                    }
                    b'\t' | b' '..=b'~' | 0x80.. => {}
                    _ => return None,
                }
            }
            Some(None)
        };
        let (mut at, mut body) = (0, Vec::new());
        loop {
            let Some((text, next)) = line(at)? else {
                let open = &input[at..];
                let digits = open.iter().take_while(|b| b.is_ascii_hexdigit()).count();
                let sound = digits <= 16
                    && match open.get(digits) {
                        None => true,
                        Some(b';' | b'\r') => digits > 0,
                        Some(_) => false,
                    };
                return if sound { Some(None) } else { None };
            };
            let digits = text.iter().take_while(|b| b.is_ascii_hexdigit()).count();
            if digits == 0 || digits > 16 || text.get(digits).is_some_and(|&b| b != b';') {
                return None;
            }
            let size =
                u64::from_str_radix(std::str::from_utf8(&text[..digits]).unwrap(), 16).unwrap();
            if size > i64::MAX as u64 {
                return None;
            }
            at = next;
            if size == 0 {
                break;
            }
            let have = (input.len() - at) as u64;
            if have < size {
                return Some(None);
            }
            let end = at + size as usize;
            body.extend_from_slice(&input[at..end]);
            match &input[end..] {
                [] | [b'\r'] => return Some(None),
                [b'\r', b'\n', ..] => at = end + 2,
                _ => return None,
            }
        }
        loop {
            let Some((text, next)) = line(at)? else {
                let open = &input[at..];
                let name = open.iter().take_while(|&&b| fields::is_token_byte(b)).count();
                let sound = match open.get(name) {
                    None => true,
                    Some(b':') => name > 0,
                    Some(b'\r') => name == 0,
                    Some(_) => false,
                };
                return if sound { Some(None) } else { None };
            };
            if text.is_empty() {
                return Some(Some((body, next)));
            }
            let colon = text.iter().position(|&b| b == b':')?;
            if !fields::is_token(&text[..colon]) {
                return None;
            }
            at = next;
        }
    }

    /// The decoder's reading in the naive reader's terms, with input in two parts.
    fn read(input: &[u8], cut: usize, joined: bool) -> Option<Option<(Vec<u8>, usize)>> {
        let mut decoder = Decoder::new(Framing::Chunked);
        let (mut body, mut total) = (Vec::new(), 0);
        for part in [&input[..cut], &input[cut..]] {
            let mut part = part.to_vec();
            loop {
                let piece =
                    if joined { decoder.decode_joined(&mut part) } else { decoder.decode(&part) };
                let Ok(piece) = piece else {
                    assert!(decoder.decode(b"0").is_err(), "a fault stays");
                    return None;
                };
                assert!(piece.data.end <= piece.consumed && piece.consumed <= part.len());
                body.extend_from_slice(&part[piece.data.clone()]);
                total += piece.consumed;
                part.drain(..piece.consumed);
                if piece.end {
                    assert!(decoder.is_done() && decoder.eof().is_ok());
                    return Some(Some((body, total)));
                }
                if part.is_empty() {
                    break;
                }
            }
        }
        assert_eq!(decoder.eof(), Err(BodyFault::Truncated));
        Some(None)
    }

    fn check(input: &[u8]) {
        let wanted = naive(input);
        for cut in 0..=input.len() {
            for joined in [false, true] {
                assert_eq!(
                    read(input, cut, joined),
                    wanted,
                    "{:?} cut at {cut}",
                    input.escape_ascii().to_string()
                );
            }
        }
    }

    #[test]
    fn all_short_bodies_are_read_as_the_grammar_says() {
        const BYTES: &[u8] = b"02\r\n;:a\n ";
        // After the prefixes, so that the later states are reached within a few bytes.
        for prefix in [&b""[..], b"1\r\nx", b"0\r\n", b"0\r\nA", b"1;a", b"0\r\nA:b"] {
            for len in 0..=4u32 {
                for number in 0..BYTES.len().pow(len) {
                    let mut input = prefix.to_vec();
                    let mut rest = number;
                    for _ in 0..len {
                        input.push(BYTES[rest % BYTES.len()]);
                        rest /= BYTES.len();
                    }
                    check(&input);
                }
            }
        }
    }

    #[test]
    fn changed_bodies_are_read_as_the_grammar_says() {
        let seeds: [&[u8]; 5] = [
            b"5\r\nhello\r\n0\r\n\r\n",
            b"1\r\nh\r\n004\r\nello\r\n0\r\nX: a\r\nY:\r\n\r\nGET /",
            b"A;a=\"b;c\"\r\n0123456789\r\n0;z\r\n\r\n",
            b"7fffffffffffffff\r\nhello",
            b"0000000000000005\r\nhello\r\n00\r\n\r\n",
        ];
        let bits: [&[u8]; 12] = [
            b"\r\n",
            b"\n",
            b"\r",
            b"\0",
            b" ",
            b"\t",
            b":",
            b";",
            b"0",
            b"f",
            b"\xff",
            b"0\r\n\r\n",
        ];
        let mut rng = Rng::seeded(7);
        for _ in 0..4_000 {
            let mut input = seeds[rng.below(5) as usize].to_vec();
            for _ in 0..=rng.below(3) {
                let at = rng.below(input.len() as u64) as usize;
                match rng.below(3) {
                    0 => drop(input.splice(at..at, bits[rng.below(12) as usize].iter().copied())),
                    1 => drop(input.remove(at)),
                    _ => input[at] = rng.below(256) as u8,
                }
                if input.is_empty() {
                    break;
                }
            }
            check(&input);
        }
    }

    #[test]
    fn sizes_do_not_wrap_and_bounds_hold() {
        let fault = |text: &str, max: u64| {
            let mut decoder = Decoder::bounded(Framing::Chunked, max);
            loop {
                match decoder.decode(text.as_bytes()) {
                    Ok(piece) if piece.consumed == text.len() => return None,
                    Ok(_) => {}
                    Err(fault) => return Some(fault),
                }
            }
        };
        for size in
            ["10000000000000005", "FFFFFFFFFFFFFFFFF", "FFFFFFFFFFFFFFFB", "8000000000000000"]
        {
            assert!(
                matches!(fault(&format!("{size}\r\n"), u64::MAX), Some(BodyFault::Malformed(_))),
                "{size}"
            );
        }
        assert_eq!(fault("100000005\r\n", 64 << 20), Some(BodyFault::TooLarge));
        assert_eq!(fault("5\r\nhello\r\n", 5), None);
        let mut decoder = Decoder::bounded(Framing::Chunked, 5);
        assert_eq!(decoder.decode(b"5\r\nhello\r\n1\r\n").unwrap().data, 3..8);
        assert_eq!(decoder.decode(b"\n"), Err(BodyFault::TooLarge));
        let long = "a".repeat(usize::from(SPARE_BYTES) - 1);
        assert_eq!(fault(&format!("0;{long}x\r\n\r\n"), 9), None);
        assert!(matches!(fault(&format!("0;{long}xx\r\n\r\n"), 9), Some(BodyFault::Malformed(_))));
        assert!(matches!(
            fault(&format!("0;{long}\r\nX: 1\r\n\r\n"), 9),
            Some(BodyFault::Malformed(_))
        ));
    }

    #[test]
    fn lengths_and_closes_end_bodies() {
        let mut decoder = Decoder::new(Framing::Length(5));
        assert_eq!(decoder.decode(b"hel").unwrap(), Piece { consumed: 3, data: 0..3, end: false });
        assert_eq!(decoder.left(), 2);
        assert_eq!(decoder.decode(b"").unwrap(), Piece::default());
        assert_eq!(
            decoder.decode(b"loGET /").unwrap(),
            Piece { consumed: 2, data: 0..2, end: true }
        );
        assert_eq!(decoder.decode(b"GET /").unwrap(), Piece { consumed: 0, data: 0..0, end: true });

        let mut decoder = Decoder::new(Framing::Length(5));
        assert_eq!(decoder.eof(), Err(BodyFault::Truncated));
        assert_eq!(Decoder::bounded(Framing::Length(6), 5).decode(b"x"), Err(BodyFault::TooLarge));
        assert_eq!(Decoder::bounded(Framing::Length(6), 5).eof(), Err(BodyFault::TooLarge));

        let mut decoder = Decoder::bounded(Framing::UntilClose, 5);
        assert_eq!(
            decoder.decode(b"hello").unwrap(),
            Piece { consumed: 5, data: 0..5, end: false }
        );
        assert!(!decoder.is_done() && decoder.clone().eof().is_ok());
        assert_eq!(decoder.decode(b"x"), Err(BodyFault::TooLarge));
        for framing in [Framing::None, Framing::Length(0)] {
            assert!(Decoder::new(framing).is_done());
        }
    }

    #[test]
    fn one_read_with_a_whole_body_is_one_call() {
        let mut buf = *b"5\r\nhello\r\n0\r\n\r\nX";
        let piece = Decoder::new(Framing::Chunked).decode(&buf).unwrap();
        assert_eq!(piece, Piece { consumed: 15, data: 3..8, end: true });
        let mut many = *b"2\r\nhe\r\n1\r\nl\r\n2\r\nlo\r\n0\r\n\r\nX";
        let piece = Decoder::new(Framing::Chunked).decode_joined(&mut many).unwrap();
        assert_eq!((&many[piece.data], piece.consumed, piece.end), (&b"hello"[..], 25, true));
        let piece = Decoder::new(Framing::Chunked).decode_joined(&mut buf).unwrap();
        assert_eq!(piece.data, 3..8);
        let mut broken = *b"2\r\nhe\r\n1\r\nlX";
        let mut decoder = Decoder::new(Framing::Chunked);
        let piece = decoder.decode_joined(&mut broken).unwrap();
        assert_eq!((&broken[piece.data], piece.end), (&b"hel"[..], false));
        assert!(decoder.decode_joined(&mut broken).is_err());
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for len in (0..300).chain([4_095, 4_096, 65_535, 65_536]) {
            let data = vec![b'x'; len];
            let mut out = Vec::new();
            append_chunk(&mut out, &data);
            out.extend_from_slice(LAST_CHUNK);
            let piece = Decoder::new(Framing::Chunked).decode(&out).unwrap();
            assert_eq!((&out[piece.data], piece.consumed, piece.end), (&data[..], out.len(), true));
        }
        let mut space = [0; CHUNK_HEAD_MAX];
        assert_eq!(chunk_head(&mut space, usize::MAX), 0);
        assert_eq!(&space, b"ffffffffffffffff\r\n");
        assert_eq!(chunk_head(&mut [0; 1], 5), 0, "too small a space is no panic");
    }
}
