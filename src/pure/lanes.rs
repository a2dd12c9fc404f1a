//! Eight bytes at a time: which of a word's bytes have a property, by a mark in the top bit of each.
//!
//! The tests are Mycroft's and Anderson's ("Bit Twiddling Hacks"): a subtraction that borrows may
//! mark a byte above one that is rightly marked, never one below. So the lowest mark is right, and so
//! is that there is none.

/// One in each byte.
pub(crate) const ONES: u64 = 0x0101_0101_0101_0101;
/// The top bit of each byte.
pub(crate) const TOPS: u64 = 0x80 * ONES;

/// Marks bytes below `bound`, which is at most 0x80.
#[inline(always)]
pub(crate) const fn below(word: u64, bound: u8) -> u64 {
    word.wrapping_sub(ONES * bound as u64) & !word & TOPS
}

/// Marks bytes of this value.
#[inline(always)]
pub(crate) const fn equals(word: u64, byte: u8) -> u64 {
    below(word ^ (ONES * byte as u64), 1)
}

/// Marks bytes outside ASCII.
#[inline(always)]
pub(crate) const fn high(word: u64) -> u64 {
    word & TOPS
}

/// Which of the eight is the first that is marked; 8 for none.
#[inline(always)]
pub(crate) const fn place(marks: u64) -> usize {
    // At most 8.
    (marks.trailing_zeros() / 8) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pure::units::Rng;

    #[test]
    fn the_first_mark_is_that_of_the_first_byte_that_has_the_property() {
        let mut rng = Rng::seeded(1);
        for _ in 0..100_000 {
            // Few values, so that they meet.
            let bytes: [u8; 8] = rng
                .next_u64()
                .to_le_bytes()
                .map(|byte| [b'"', 0x7f, b' ', 0x80, 0xff, byte][usize::from(byte % 6)]);
            let word = u64::from_le_bytes(bytes);
            let expected =
                |is: &dyn Fn(u8) -> bool| bytes.iter().position(|&byte| is(byte)).unwrap_or(8);
            for bound in [1, b' ', b'"' + 1, 0x80] {
                assert_eq!(place(below(word, bound)), expected(&|byte| byte < bound), "{bytes:?}");
            }
            for value in [0, b'"', 0x7f, 0x80, 0xff] {
                assert_eq!(
                    place(equals(word, value)),
                    expected(&|byte| byte == value),
                    "{bytes:?}"
                );
            }
            assert_eq!(place(high(word)), expected(&|byte| byte >= 0x80), "{bytes:?}");
        }
    }
}
