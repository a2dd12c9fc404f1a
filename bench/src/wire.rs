//! What the generator and the mock agree on: the settings that travel in a prompt, the stamp that
//! travels in a chunk, and the clock both read.
//!
//! Settings ride in the request's body because that is the one thing every gateway must pass on
//! unchanged; one mock then serves every scenario of a comparison.

use rustix::time::{ClockId, clock_gettime};

/// The model every request names.
pub const MODEL: &str = "bench";

/// Digits of a request's nonce. It comes back in the `id` of every chunk, so that bytes of one
/// stream that turn up in another are seen.
pub const NONCE_LEN: usize = 8;

/// A stamp is `sssss:nnnnnnnnnnnnnnnn:`, the chunk's number within its stream and the
/// `CLOCK_MONOTONIC` nanoseconds at which the mock wrote it, in fixed-width decimals.
pub const SEQ_LEN: usize = 5;
/// Sixteen digits last for 115 days of uptime.
pub const TIME_LEN: usize = 16;
/// Both numbers and both colons.
pub const STAMP_LEN: usize = SEQ_LEN + 1 + TIME_LEN + 1;

/// What precedes the nonce in a request's body.
pub const NONCE_KEY: &[u8] = b"\"user\":\"";
/// What precedes the nonce in a chunk's or an answer's `id`.
pub const ID_KEY: &[u8] = b"\"id\":\"chatcmpl-";
/// What precedes the stamp.
pub const CONTENT_KEY: &[u8] = b"\"content\":\"";

/// Nanoseconds of `CLOCK_MONOTONIC`, the same in every process of the machine.
pub fn now() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    // The clock starts at boot and never goes below zero.
    t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned()
}

/// Writes `value` as decimal digits over the whole of `out`, zero-padded on the left.
/// Digits that do not fit are lost; callers choose widths that hold their largest value.
pub fn put_decimal(out: &mut [u8], mut value: u64) {
    for digit in out.iter_mut().rev() {
        *digit = b'0' + (value % 10) as u8;
        value /= 10;
    }
}

/// Reads decimal digits only. `None` for an empty slice, any other byte, or more than a `u64`.
pub fn read_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |sum, &digit| {
        let value = digit.wrapping_sub(b'0');
        if value > 9 {
            return None;
        }
        sum.checked_mul(10)?.checked_add(u64::from(value))
    })
}

/// A chunk's number and the time it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Counts from 0 within a stream.
    pub seq: u64,
    /// `CLOCK_MONOTONIC` nanoseconds.
    pub sent: u64,
}

impl Stamp {
    /// Reads a stamp from the start of a chunk's content.
    pub fn read(content: &[u8]) -> Option<Stamp> {
        let stamp = content.get(..STAMP_LEN)?;
        if stamp[SEQ_LEN] != b':' || stamp[STAMP_LEN - 1] != b':' {
            return None;
        }
        Some(Stamp {
            seq: read_decimal(&stamp[..SEQ_LEN])?,
            sent: read_decimal(&stamp[SEQ_LEN + 1..STAMP_LEN - 1])?,
        })
    }

    /// Writes the stamp over the first [`STAMP_LEN`] bytes of `out`.
    pub fn put(self, out: &mut [u8]) {
        put_decimal(&mut out[..SEQ_LEN], self.seq);
        out[SEQ_LEN] = b':';
        put_decimal(&mut out[SEQ_LEN + 1..STAMP_LEN - 1], self.sent);
        out[STAMP_LEN - 1] = b':';
    }
}

/// How the mock shall answer one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// Content chunks of a stream.
    pub tokens: u32,
    /// Bytes of one event, `data: ` and the blank line counted, chunk framing not; of the whole
    /// body for a plain answer.
    pub size: u32,
    /// Microseconds between two chunks of a stream.
    pub interval_us: u32,
    /// Microseconds from the request to the first chunk, or to the plain answer.
    pub first_us: u32,
    /// A stream falls silent after this many chunks …
    pub hold_at: u32,
    /// … for this many microseconds.
    pub hold_us: u32,
}

impl Default for Script {
    fn default() -> Script {
        Script { tokens: 16, size: 200, interval_us: 10_000, first_us: 0, hold_at: 0, hold_us: 0 }
    }
}

impl Script {
    /// Marks the settings inside a prompt.
    const MARK: &'static [u8] = b"bench:";
    const KEYS: [u8; 6] = *b"nsifah";

    fn fields(&mut self) -> [&mut u32; 6] {
        [
            &mut self.tokens,
            &mut self.size,
            &mut self.interval_us,
            &mut self.first_us,
            &mut self.hold_at,
            &mut self.hold_us,
        ]
    }

    /// The text that goes into the prompt: `bench:n16,s200,i10000,f0,a0,h0;`.
    pub fn text(mut self) -> String {
        let mut text = String::from("bench:");
        for (key, value) in Self::KEYS.into_iter().zip(self.fields()) {
            text.push(char::from(key));
            text.push_str(&value.to_string());
            text.push(',');
        }
        text.pop();
        text.push(';');
        text
    }

    /// Reads the settings out of a request body; what the body does not say stays as in `self`.
    pub fn overridden_by(mut self, body: &[u8]) -> Script {
        let Some(at) = memchr::memmem::find(body, Self::MARK) else { return self };
        let text = &body[at + Self::MARK.len()..];
        let Some(end) = memchr::memchr(b';', &text[..text.len().min(120)]) else { return self };
        for setting in text[..end].split(|&byte| byte == b',') {
            let Some((key, digits)) = setting.split_first() else { continue };
            let Some(value) = read_decimal(digits).and_then(|value| u32::try_from(value).ok())
            else {
                continue;
            };
            if let Some(field) = Self::KEYS.iter().position(|known| known == key) {
                *self.fields()[field] = value;
            }
        }
        self
    }
}

#[cfg(test)]
mod tests {
    //! What is written is read back, and nothing else is.
    use super::{STAMP_LEN, Script, Stamp, read_decimal};

    #[test]
    fn stamps_survive_the_round_trip_and_reject_damage() {
        let stamp = Stamp { seq: 99_999, sent: 9_876_543_210_123_456 };
        let mut text = [0_u8; STAMP_LEN];
        stamp.put(&mut text);
        assert_eq!(&text, b"99999:9876543210123456:");
        assert_eq!(Stamp::read(&text), Some(stamp));
        for at in 0..STAMP_LEN {
            let mut damaged = text;
            damaged[at] = b'x';
            assert_eq!(Stamp::read(&damaged), None);
            assert_eq!(Stamp::read(&text[..at]), None);
        }
    }

    #[test]
    fn decimals_are_digits_that_fit() {
        assert_eq!(read_decimal(b"18446744073709551615"), Some(u64::MAX));
        for text in ["", "18446744073709551616", "1x", "-1", " 1"] {
            assert_eq!(read_decimal(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn scripts_survive_the_round_trip() {
        let script = Script {
            tokens: 5,
            size: 300,
            interval_us: 1,
            first_us: 7,
            hold_at: 3,
            hold_us: 4_000_000,
        };
        let body = format!("{{\"messages\":[{{\"content\":\"{} hello\"}}]}}", script.text());
        assert_eq!(Script::default().overridden_by(body.as_bytes()), script);
        assert_eq!(
            Script::default().overridden_by(b"{\"content\":\"bench:n3\"}"),
            Script::default()
        );
        assert_eq!(Script::default().overridden_by(b"bench:n3;").tokens, 3);
        assert_eq!(
            Script::default().overridden_by(b"bench:n99999999999,q1,,s;"),
            Script::default()
        );
    }
}
