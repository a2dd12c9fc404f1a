//! Vocabularies: how many tokens a text has for a model, exactly.
//!
//! Byte pair encoding takes most of its time for what is not language: a word that the vocabulary
//! does not have is put together pair by pair, and a run of 32 KiB without a break is one such word.
//! Prompts come from strangers, so a count is paid for in [`Work`], of which unbroken and unusual
//! text takes more, and stops where it is spent.

use std::fmt;
use std::sync::Arc;

use super::file::FileVocabulary;

/// How the tokens of prompts are counted.
#[derive(Clone, Debug, Default)]
pub enum Tokenizer {
    /// Estimated, corrected by what backends report.
    #[default]
    Auto,
    Exact(Arc<Vocabulary>),
}

/// The vocabularies that are built in, by the names that a plan knows them by.
pub const NAMES: [&str; 4] = ["o200k_base", "cl100k_base", "qwen", "llama3"];

/// A model's vocabulary: 28 to 38 MiB (one of a file 65), made once and shared by all shards.
pub struct Vocabulary {
    name: Box<str>,
    engine: Engine,
}

enum Engine {
    BuiltIn(Box<tiktoken::CoreBpe>),
    File(Box<FileVocabulary>),
}

impl Vocabulary {
    /// One of [`NAMES`]; unpacking it takes 50 to 200 ms.
    pub fn built_in(name: &str) -> Option<Vocabulary> {
        use tiktoken::encoding;
        let bpe = match name {
            "o200k_base" => encoding::o200k_base(),
            "cl100k_base" => encoding::cl100k_base(),
            "qwen" => encoding::qwen2(),
            "llama3" => encoding::llama3(),
            _ => return None,
        };
        Some(Vocabulary { name: name.into(), engine: Engine::BuiltIn(Box::new(bpe)) })
    }

    /// What a `tokenizer.json` (of Hugging Face's tokenizers) holds; takes up to a second.
    ///
    /// # Errors
    /// It is none, or of a kind that is not counted here, with the reason in words.
    pub fn from_json(text: &str) -> Result<Vocabulary, String> {
        let file = FileVocabulary::parse(text)?;
        Ok(Vocabulary { name: "tokenizer.json".into(), engine: Engine::File(Box::new(file)) })
    }

    /// Counts the tokens of `text` until it ends or the work is spent; gives them and how many
    /// bytes were counted.
    ///
    /// What stands between two blanks is counted exactly up to [`STRETCH_BYTES`]; anything longer
    /// is cut there, which may make one token more of it for each cut. Ordinary text takes 5 to
    /// 15 ns a byte with a vocabulary that is built in and 30 ns with one of a file; the first call
    /// on a thread allocates a cache of 1.2 MiB.
    pub fn count(&self, text: &str, work: &mut Work) -> (u64, usize) {
        let (mut tokens, mut rest) = (0, text);
        while !rest.is_empty() && work.0 > 0 {
            let (stretch, behind) = rest.split_at(stretch_len(rest, work.0.min(STRETCH_BYTES)));
            let count = match &self.engine {
                Engine::BuiltIn(bpe) => bpe.count(stretch),
                Engine::File(file) => file.count(stretch),
            };
            work.spend(stretch, count);
            tokens += count as u64;
            rest = behind;
        }
        (tokens, text.len() - rest.len())
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vocabulary({})", self.name)
    }
}

/// Vocabularies by what they were made from, so that neither a reload nor a second model makes one
/// again. One that no plan uses any more is let go of by [`Vocabularies::prune`], on the thread that
/// builds plans: to free it takes milliseconds that a shard does not have.
#[derive(Debug, Default)]
pub struct Vocabularies {
    known: Vec<(Origin, Arc<Vocabulary>)>,
}

/// A name, or length and hash of a file's text. The files are the operator's own, so nobody makes
/// two of them collide.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Origin {
    BuiltIn(Box<str>),
    Text(usize, u128),
}

impl Vocabularies {
    /// As [`Vocabulary::built_in`].
    pub fn built_in(&mut self, name: &str) -> Option<Arc<Vocabulary>> {
        let made = self.get(Origin::BuiltIn(name.into()), || Vocabulary::built_in(name).ok_or(()));
        made.ok()
    }

    /// As [`Vocabulary::from_json`].
    ///
    /// # Errors
    /// As there.
    pub fn from_json(&mut self, text: &str) -> Result<Arc<Vocabulary>, String> {
        let origin = Origin::Text(text.len(), xxhash_rust::xxh3::xxh3_128(text.as_bytes()));
        self.get(origin, || Vocabulary::from_json(text))
    }

    /// Frees those that nobody else holds.
    pub fn prune(&mut self) {
        self.known.retain(|(_, vocabulary)| Arc::strong_count(vocabulary) > 1);
    }

    fn get<E>(
        &mut self,
        origin: Origin,
        make: impl FnOnce() -> Result<Vocabulary, E>,
    ) -> Result<Arc<Vocabulary>, E> {
        if let Some((_, vocabulary)) = self.known.iter().find(|(other, _)| *other == origin) {
            return Ok(Arc::clone(vocabulary));
        }
        let vocabulary = Arc::new(make()?);
        self.known.push((origin, Arc::clone(&vocabulary)));
        Ok(vocabulary)
    }
}

/// What counting may still cost, in bytes of ordinary text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work(usize);

impl Work {
    /// For one prompt: about a millisecond, whatever is in it.
    pub const PROMPT: Work = Work(32 << 10);

    pub fn is_spent(self) -> bool {
        self.0 == 0
    }

    /// Measured with o200k on random text: letters without a break take ten times as long as prose,
    /// short words and characters that no vocabulary knows three to five times.
    fn spend(&mut self, stretch: &str, tokens: usize) {
        const UNBROKEN: usize = 10;
        const DENSE: usize = 24;
        let dense = tokens.saturating_sub(stretch.len() * 2 / 5);
        let cost = stretch.len() + UNBROKEN * unbroken(stretch.as_bytes()) + DENSE * dense;
        self.0 = self.0.saturating_sub(cost);
    }
}

/// As much is counted at a time: enough that cuts do not matter, and little enough that what comes
/// behind it has not been paid for.
const STRETCH_BYTES: usize = 1 << 10;

/// Length of the part at the start of `text` to count by itself, at most `most` bytes (or one
/// character): up to the last place at which every vocabulary breaks, if there is one.
fn stretch_len(text: &str, most: usize) -> usize {
    if text.len() <= most {
        return text.len();
    }
    let bytes = text.as_bytes();
    if let Some(at) = (1..=most).rev().find(|&at| breaks(bytes, at)) {
        return at;
    }
    let cut = (1..=most).rev().find(|&at| text.is_char_boundary(at));
    cut.or_else(|| text.chars().next().map(char::len_utf8)).unwrap_or(text.len())
}

/// Whether a piece certainly ends before `at`, in every pattern that vocabularies split text with:
/// at a blank behind anything else, at a line's end, at a Chinese stop behind a Chinese character.
fn breaks(bytes: &[u8], at: usize) -> bool {
    let (head, tail) = bytes.split_at(at);
    match (head, tail) {
        ([.., last], [b' ', ..]) => !last.is_ascii_whitespace(),
        // A slash may still belong to the marks before the line's end.
        ([.., last, b'\n'], [next, ..]) => {
            !last.is_ascii_whitespace() && !next.is_ascii_whitespace() && *next != b'/'
        }
        ([.., 0xE4..=0xE9, _, _], [0xE3, 0x80, 0x81 | 0x82, ..])
        | ([.., 0xE4..=0xE9, _, _], [0xEF, 0xBC, 0x81 | 0x8C | 0x9A | 0x9B | 0x9F, ..]) => true,
        _ => false,
    }
}

/// Bytes beyond what is usual in runs of one kind: words of more than 32 letters, lines of more than
/// 96 marks or blanks, more than 128 bytes of another script without punctuation.
fn unbroken(text: &[u8]) -> usize {
    let (mut sum, mut run, mut last) = (0, 0, 0);
    for (index, &byte) in text.iter().enumerate() {
        let kind = match byte {
            b'a'..=b'z' | b'A'..=b'Z' => 1,
            b'0'..=b'9' => 2,
            b' ' | b'\t' | b'\n' | b'\r' => 3,
            0xE3 if text.get(index + 1) == Some(&0x80) => 0,
            0xEF if text.get(index + 1) == Some(&0xBC) => 0,
            0x80.. => 5,
            _ => 4,
        };
        run = if kind == last { run + 1 } else { 0 };
        last = kind;
        let usual = match kind {
            1 => 32,
            5 => 128,
            _ => 96,
        };
        sum += usize::from(run >= usual);
    }
    sum
}

#[cfg(test)]
pub(super) use tests::{recorded, whole};

#[cfg(test)]
mod tests {
    //! Goal: exact counts, bounded work. Method: texts with counts by other implementations; the
    //! engine without our cuts as an oracle; the texts that cost most.

    use super::*;
    use crate::pure::units::Rng;

    /// Texts and their counts, see `tests/recorded/README.md`.
    pub(in crate::pure::tokens) fn recorded() -> Vec<(String, serde_json::Value)> {
        let lines = include_str!("../../../tests/recorded/tokens.jsonl").lines();
        let read = |line| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
        lines.map(read).map(|row| (row["text"].as_str().expect("text").to_owned(), row)).collect()
    }

    pub(in crate::pure::tokens) fn whole(vocabulary: &Vocabulary, text: &str) -> u64 {
        let mut work = Work(usize::MAX);
        let (tokens, len) = vocabulary.count(text, &mut work);
        assert_eq!(len, text.len());
        tokens
    }

    #[test]
    fn counts_are_those_of_other_implementations() {
        for name in NAMES {
            let vocabulary = Vocabulary::built_in(name).expect("built in");
            for (text, counts) in recorded() {
                assert_eq!(
                    Some(whole(&vocabulary, &text)),
                    counts[name].as_u64(),
                    "{name}: {text}"
                );
            }
        }
        assert!(Vocabulary::built_in("gpt-4").is_none());
    }

    #[test]
    fn cuts_at_breaks_change_no_count() {
        let recorded = recorded();
        let all: Vec<&str> = recorded.iter().map(|(text, _)| text.as_str()).collect();
        let mut rng = Rng::seeded(5);
        for name in ["o200k_base", "qwen"] {
            let vocabulary = Vocabulary::built_in(name).expect("built in");
            let Engine::BuiltIn(bpe) = &vocabulary.engine else { panic!("built in") };
            for round in 0..200 {
                // Pieces of all of them, cut where a character ends.
                let mut text = String::new();
                for _ in 0..20 + round % 20 {
                    let chars: Vec<char> =
                        all[rng.below(all.len() as u64) as usize].chars().collect();
                    let start = rng.below(chars.len() as u64 + 1) as usize;
                    text.extend(&chars[start..(start + 40).min(chars.len())]);
                }
                let whole = bpe.count(&text);
                let parts: Vec<&str> = {
                    let (mut parts, mut rest) = (Vec::new(), text.as_str());
                    while !rest.is_empty() {
                        let most = 300.min(rest.len());
                        let break_at = (1..most).rev().find(|&at| breaks(rest.as_bytes(), at));
                        let (part, behind) = rest.split_at(break_at.unwrap_or(rest.len()));
                        parts.push(part);
                        rest = behind;
                    }
                    parts
                };
                assert_eq!(
                    parts.iter().map(|part| bpe.count(part)).sum::<usize>(),
                    whole,
                    "{parts:?}"
                );
            }
        }
    }

    #[test]
    fn hostile_text_is_cut_and_paid_for() {
        let vocabulary = Vocabulary::built_in("cl100k_base").expect("built in");
        let mut rng = Rng::seeded(6);
        let letters: String =
            (0..32 << 10).map(|_| char::from(b'a' + rng.below(26) as u8)).collect();
        for (text, bytes_max) in [
            (letters.as_str(), 4 << 10),
            (&"a".repeat(32 << 10), 4 << 10),
            (&" ".repeat(32 << 10), 4 << 10),
            (&"=".repeat(32 << 10), 4 << 10),
            (&"\n".repeat(32 << 10), 4 << 10),
            (&"😀".repeat(8 << 10), 4 << 10),
            (&"\u{301}".repeat(16 << 10), 4 << 10),
        ] {
            let mut work = Work::PROMPT;
            let (tokens, len) = vocabulary.count(text, &mut work);
            assert!(work.is_spent() && len <= bytes_max, "{len} of {:?}", &text[..8]);
            // No fewer than without cuts.
            let Engine::BuiltIn(bpe) = &vocabulary.engine else { panic!("built in") };
            assert!(tokens as usize >= bpe.count(&text[..len]), "{:?}", &text[..8]);
        }
        // Prose is counted to its end.
        let prose = &recorded()[0].0.repeat(400)[..32 << 10];
        let (_, len) = vocabulary.count(prose, &mut { Work::PROMPT });
        assert_eq!(len, prose.len());
    }

    #[test]
    fn any_text_ends() {
        let vocabulary = Vocabulary::built_in("o200k_base").expect("built in");
        let mut rng = Rng::seeded(7);
        for _ in 0..300 {
            let chars: String = (0..rng.below(3_000))
                .map(|_| {
                    ['a', ' ', '\n', '/', '字', '。', '，', '😀', '\u{301}', '7', '\u{3000}']
                        [rng.below(11) as usize]
                })
                .collect();
            let mut work = Work(rng.below(4_000) as usize);
            let (tokens, len) = vocabulary.count(&chars, &mut work);
            assert!(chars.is_char_boundary(len) && tokens <= len as u64);
            assert!(len == chars.len() || work.is_spent());
        }
    }

    #[test]
    fn a_vocabulary_is_made_once_and_freed_when_nobody_has_it() {
        let mut vocabularies = Vocabularies::default();
        let first = vocabularies.built_in("cl100k_base").expect("built in");
        vocabularies.prune();
        assert!(Arc::ptr_eq(&first, &vocabularies.built_in("cl100k_base").expect("built in")));
        assert!(vocabularies.built_in("gpt-4").is_none());
        assert!(vocabularies.from_json("{}").is_err());
        let held = Arc::downgrade(&first);
        drop(first);
        vocabularies.prune();
        assert!(held.upgrade().is_none() && vocabularies.known.is_empty());
    }
}
