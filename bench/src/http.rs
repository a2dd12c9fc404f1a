//! The little HTTP/1.1 that the generator and the mock need: where a head ends, how its body is
//! framed, and the payload of that body piece by piece.
//!
//! It is strict where a gateway could go wrong (chunk sizes, line ends, lengths) because the
//! generator's verdict on framing rests on it.

/// Longest head either side accepts.
pub const HEAD_MAX: usize = 16 * 1024;
/// Most header fields either side accepts.
pub const FIELDS_MAX: usize = 64;

/// How long a body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// This many bytes.
    Length(u64),
    /// Chunked transfer coding.
    Chunked,
    /// Until the peer closes; responses only.
    UntilClose,
}

/// What broke the framing rules.
pub type Fault = &'static str;

/// What the fields of a head say about its body and its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// `None` when neither a length nor a coding was named.
    pub framing: Option<Framing>,
    /// `Connection: close` was sent.
    pub close: bool,
}

/// Reads framing and connection intent from header fields.
///
/// # Errors
/// A length that is no number, more than one framing, or a coding other than `chunked`.
pub fn shape(fields: &[httparse::Header<'_>]) -> Result<Shape, Fault> {
    let mut shape = Shape { framing: None, close: false };
    for field in fields {
        if field.name.eq_ignore_ascii_case("content-length") {
            let length =
                crate::wire::read_decimal(field.value).ok_or("content-length is no number")?;
            if shape.framing.replace(Framing::Length(length)).is_some() {
                return Err("two framings in one head");
            }
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            if !field.value.eq_ignore_ascii_case(b"chunked") {
                return Err("unknown transfer coding");
            }
            if shape.framing.replace(Framing::Chunked).is_some() {
                return Err("two framings in one head");
            }
        } else if field.name.eq_ignore_ascii_case("connection") {
            shape.close |= field.value.eq_ignore_ascii_case(b"close");
        }
    }
    Ok(shape)
}

/// Takes the framing off a body that arrives in pieces.
#[derive(Debug, Clone)]
pub struct Decoder {
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// So many bytes of a counted body are still to come.
    Counted(u64),
    UntilClose,
    /// Inside a size line; the value so far and the digits seen.
    Size {
        value: u64,
        digits: u8,
    },
    SizeEnd(u64),
    Data(u64),
    DataCr,
    DataLf,
    /// At the start of a trailer line, inside one, or after its CR.
    TrailerStart,
    Trailer,
    TrailerLf,
    EndLf,
    Done,
}

impl Decoder {
    /// A decoder at the start of a body.
    pub fn new(framing: Framing) -> Decoder {
        let state = match framing {
            Framing::Length(0) => State::Done,
            Framing::Length(length) => State::Counted(length),
            Framing::Chunked => State::Size { value: 0, digits: 0 },
            Framing::UntilClose => State::UntilClose,
        };
        Decoder { state }
    }

    /// The body has ended by its own framing.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// The body may end here because the peer closed.
    pub fn may_close(&self) -> bool {
        matches!(self.state, State::Done | State::UntilClose)
    }

    /// Passes over framing at the front of `input`; gives how many bytes that was and the payload
    /// that follows them, which is empty when more input is needed or the body [is
    /// done](Decoder::is_done). Nothing is copied. Say with [`Decoder::take`] how much of the payload
    /// was used, and call again with what is left.
    ///
    /// # Errors
    /// The first byte that breaks the chunked coding.
    pub fn next<'a>(&mut self, input: &'a [u8]) -> Result<(usize, &'a [u8]), Fault> {
        let mut at = 0;
        while at < input.len() {
            let byte = input[at];
            match self.state {
                State::Counted(left) | State::Data(left) => {
                    let rest = &input[at..];
                    let most = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    return Ok((at, &rest[..most]));
                }
                State::UntilClose => return Ok((at, &input[at..])),
                State::Done => return Ok((at, &[])),
                State::Size { value, digits } => self.state = size_digit(byte, value, digits)?,
                State::SizeEnd(size) => {
                    expect(byte, b'\n', "no LF after a chunk size")?;
                    self.state = if size == 0 { State::TrailerStart } else { State::Data(size) };
                }
                State::DataCr => {
                    expect(byte, b'\r', "no CR after chunk data")?;
                    self.state = State::DataLf;
                }
                State::DataLf => {
                    expect(byte, b'\n', "no LF after chunk data")?;
                    self.state = State::Size { value: 0, digits: 0 };
                }
                State::TrailerStart if byte == b'\r' => self.state = State::EndLf,
                State::TrailerStart => self.state = State::Trailer,
                State::Trailer if byte == b'\r' => self.state = State::TrailerLf,
                State::Trailer => {}
                State::TrailerLf => {
                    expect(byte, b'\n', "no LF after a trailer")?;
                    self.state = State::TrailerStart;
                }
                State::EndLf => {
                    expect(byte, b'\n', "no LF at the end of a chunked body")?;
                    self.state = State::Done;
                }
            }
            at += 1;
        }
        Ok((at, &[]))
    }

    /// The first `used` bytes of the payload that [`Decoder::next`] gave are done with.
    pub fn take(&mut self, used: usize) {
        let used = used as u64;
        self.state = match self.state {
            State::Counted(left) if left <= used => State::Done,
            State::Counted(left) => State::Counted(left - used),
            State::Data(left) if left <= used => State::DataCr,
            State::Data(left) => State::Data(left - used),
            other => other,
        };
    }
}

fn size_digit(byte: u8, value: u64, digits: u8) -> Result<State, Fault> {
    let digit = match byte {
        b'0'..=b'9' => byte - b'0',
        b'a'..=b'f' => byte - b'a' + 10,
        b'A'..=b'F' => byte - b'A' + 10,
        b'\r' if digits > 0 => return Ok(State::SizeEnd(value)),
        _ => return Err("chunk size is not hexadecimal"),
    };
    if digits == 15 {
        return Err("chunk size is too long");
    }
    Ok(State::Size { value: value << 4 | u64::from(digit), digits: digits + 1 })
}

fn expect(byte: u8, wanted: u8, fault: Fault) -> Result<(), Fault> {
    if byte == wanted { Ok(()) } else { Err(fault) }
}

#[cfg(test)]
mod tests {
    //! The decoder gives the same payload however its input is cut, and refuses bad framing.
    use super::{Decoder, Framing};

    fn decode(framing: Framing, pieces: &[&[u8]]) -> Result<(Vec<u8>, usize, bool), &'static str> {
        let mut decoder = Decoder::new(framing);
        let (mut payload, mut consumed) = (Vec::new(), 0);
        for piece in pieces {
            let mut rest = *piece;
            while !rest.is_empty() && !decoder.is_done() {
                let (skipped, data) = decoder.next(rest)?;
                decoder.take(data.len());
                payload.extend_from_slice(data);
                consumed += skipped + data.len();
                rest = &rest[skipped + data.len()..];
            }
        }
        Ok((payload, consumed, decoder.is_done()))
    }

    #[test]
    fn chunked_bodies_decode_the_same_at_every_cut() {
        let body = b"5\r\nhello\r\nA\r\n, wide wor\r\n2\r\nld\r\n0\r\nx: y\r\n\r\nNEXT";
        let whole = body.len() - 4;
        for one in 0..body.len() {
            for two in one..body.len() {
                let pieces = [&body[..one], &body[one..two], &body[two..]];
                let expected = (b"hello, wide world".to_vec(), whole, true);
                assert_eq!(decode(Framing::Chunked, &pieces), Ok(expected));
            }
        }
    }

    #[test]
    fn broken_chunking_is_refused() {
        for body in [
            "\r\n",
            "g\r\n",
            "5 \r\nhello",
            "5;x\r\n",
            "5\nhello",
            "5\r\nhello!",
            "5\r\nhello\r5",
            "-1\r\n",
            "1234567812345678\r\n",
        ] {
            assert!(decode(Framing::Chunked, &[body.as_bytes()]).is_err(), "{body:?}");
        }
    }

    #[test]
    fn counted_bodies_stop_at_their_length() {
        assert_eq!(decode(Framing::Length(3), &[b"ab", b"cd"]), Ok((b"abc".to_vec(), 3, true)));
        assert_eq!(decode(Framing::Length(0), &[b"ab"]), Ok((Vec::new(), 0, true)));
        assert_eq!(decode(Framing::UntilClose, &[b"ab"]), Ok((b"ab".to_vec(), 2, false)));
    }
}
