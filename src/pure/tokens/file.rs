//! Vocabularies from a `tokenizer.json`: byte-level BPE, as Qwen, Llama 3, GPT, DeepSeek and Mistral
//! (since Tekken) have it. Others (SentencePiece, WordPiece, Unigram) are refused with a reason.

use std::collections::{HashMap, HashSet};

use foldhash::fast::FixedState;
use regex::Regex;
use serde::Deserialize;
use serde_json::Value;

/// A byte-level BPE by its list of merges.
pub(super) struct FileVocabulary {
    /// Applied one after the other: each splits what the one before has left.
    splits: Vec<Split>,
    /// The token of each single byte.
    bytes: [u32; 256],
    /// What two neighbours become: the merge's rank, and the token.
    merges: HashMap<(u32, u32), (u32, u32), FixedState>,
    /// Texts that are one token: a shortcut for those that merges lead to, and the rule for those
    /// that they do not, where the file says `ignore_merges`.
    whole: HashSet<Box<[u8]>, FixedState>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    #[serde(default)]
    vocab: Value,
    #[serde(default)]
    merges: Vec<Merge>,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(default)]
    byte_fallback: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    /// As older files write it, with a blank between.
    Text(String),
}

/// Longest piece that is put together as a whole: the work grows with its square.
const PIECE_BYTES_MAX: usize = 256;

impl FileVocabulary {
    pub(super) fn parse(text: &str) -> Result<FileVocabulary, String> {
        let file: File = serde_json::from_str(text)
            .map_err(|error| format!("it is no tokenizer.json: {error}"))?;
        let File { normalizer, pre_tokenizer, model } = file;
        let kind = model.kind.as_deref().unwrap_or("BPE");
        if kind != "BPE" || model.byte_fallback {
            let kind = if model.byte_fallback { "SentencePiece BPE" } else { kind };
            return Err(format!("its model is {kind}; only byte-level BPE is counted here"));
        }
        match &normalizer["type"] {
            Value::Null => {}
            // Text that is not in this form is rare, and one token more or less where it is.
            Value::String(kind) if kind == "NFC" => {}
            other => return Err(format!("its normalizer {other} is not done here")),
        }
        let mut splits = Vec::new();
        let mut byte_level = false;
        Split::read(&pre_tokenizer, &mut splits, &mut byte_level)?;
        if !byte_level {
            return Err("its pre_tokenizer has no `ByteLevel`".to_owned());
        }
        let vocab: HashMap<String, u32, FixedState> = serde_json::from_value(model.vocab)
            .map_err(|error| format!("its model.vocab is no map to numbers: {error}"))?;
        let mut vocabulary = FileVocabulary {
            splits,
            bytes: [0; 256],
            merges: HashMap::with_capacity_and_hasher(model.merges.len(), FixedState::default()),
            whole: HashSet::default(),
        };
        let letters = letters();
        for (token, letter) in vocabulary.bytes.iter_mut().zip(letters) {
            let id = vocab.get(letter.encode_utf8(&mut [0; 4]) as &str);
            *token =
                *id.ok_or_else(|| format!("its vocabulary lacks `{letter}`, a single byte"))?;
        }
        for (rank, merge) in (0..).zip(&model.merges) {
            let (left, right) = match merge {
                Merge::Pair(left, right) => (left.as_str(), right.as_str()),
                Merge::Text(text) => text.split_once(' ').unwrap_or((text, "")),
            };
            let id = |text: &str| {
                vocab.get(text).copied().ok_or_else(|| {
                    format!("merge {rank} names `{text}`, which its vocabulary lacks")
                })
            };
            let pair = (id(left)?, id(right)?);
            vocabulary.merges.entry(pair).or_insert((rank, id(&format!("{left}{right}"))?));
        }
        let by_letter: HashMap<char, u8, FixedState> = letters.into_iter().zip(0..=255).collect();
        for text in vocab.keys() {
            // Others are special tokens, which no text becomes.
            let bytes: Option<Vec<u8>> = text.chars().map(|c| by_letter.get(&c).copied()).collect();
            if let Some(bytes) = bytes
                && (model.ignore_merges || vocabulary.merged(&bytes) == 1)
            {
                vocabulary.whole.insert(bytes.into_boxed_slice());
            }
        }
        Ok(vocabulary)
    }

    pub(super) fn count(&self, text: &str) -> usize {
        self.count_from(0, text)
    }

    fn count_from(&self, split: usize, text: &str) -> usize {
        let Some(by) = self.splits.get(split) else { return self.piece(text.as_bytes()) };
        let (mut count, mut at) = (0, 0);
        while at < text.len() {
            let (start, end) = by.find(text, at).unwrap_or((text.len(), text.len()));
            if start > at {
                count += self.count_from(split + 1, &text[at..start]);
            }
            if end > start {
                count += self.count_from(split + 1, &text[start..end]);
            }
            at = end;
        }
        count
    }

    fn piece(&self, piece: &[u8]) -> usize {
        if self.whole.contains(piece) {
            return 1;
        }
        piece.chunks(PIECE_BYTES_MAX).map(|part| self.merged(part)).sum()
    }

    /// How many tokens are left when no two neighbours merge any more; the first merge of the list
    /// goes first, and of equal ones the leftmost.
    fn merged(&self, part: &[u8]) -> usize {
        const NONE: u32 = u32::MAX;
        let rank = |left, right| self.merges.get(&(left, right)).map_or(NONE, |&(rank, _)| rank);
        let mut ids = [0; PIECE_BYTES_MAX];
        // Of each token and the next.
        let mut ranks = [NONE; PIECE_BYTES_MAX];
        let mut len = part.len().min(PIECE_BYTES_MAX);
        for (id, &byte) in ids.iter_mut().zip(part) {
            *id = self.bytes[usize::from(byte)];
        }
        for at in 1..len {
            ranks[at - 1] = rank(ids[at - 1], ids[at]);
        }
        while len > 1 {
            let lowest = ranks[..len - 1].iter().copied().min().unwrap_or(NONE);
            let Some(at) = ranks[..len - 1].iter().position(|&rank| rank == lowest) else { break };
            let Some(&(_, id)) = self.merges.get(&(ids[at], ids[at + 1])) else { break };
            ids[at] = id;
            ids.copy_within(at + 2..len, at + 1);
            ranks.copy_within(at + 1..len, at);
            len -= 1;
            ranks[len - 1] = NONE;
            if at + 1 < len {
                ranks[at] = rank(ids[at], ids[at + 1]);
            }
            if at > 0 {
                ranks[at - 1] = rank(ids[at - 1], ids[at]);
            }
        }
        len
    }
}

/// The letters that byte-level vocabularies write bytes with: visible ones for themselves, the others
/// from U+0100 on (GPT-2's `bytes_to_unicode`).
fn letters() -> [char; 256] {
    let mut letters = ['\0'; 256];
    let mut next = 0x100;
    for (letter, byte) in letters.iter_mut().zip(0..=255) {
        *letter = match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                // Sixty-eight of them, far below the surrogates.
                char::from_u32(next - 1).unwrap_or('\0')
            }
        };
    }
    letters
}

/// A pattern that text is split with.
struct Split {
    pattern: Regex,
    /// Blanks before a word leave it the last one: `\s+(?!\S)`, which the engine does not know.
    leaves_blank: bool,
    /// A rule for line ends comes first, so blanks that end in one are whole.
    newline_first: bool,
}

impl Split {
    /// Reads a `pre_tokenizer`.
    fn read(value: &Value, splits: &mut Vec<Split>, byte_level: &mut bool) -> Result<(), String> {
        const GPT2: &str =
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
        match value["type"].as_str().unwrap_or("nothing") {
            "Sequence" => {
                let list = value["pretokenizers"].as_array().map(Vec::as_slice).unwrap_or_default();
                list.iter().try_for_each(|value| Split::read(value, splits, byte_level))
            }
            "ByteLevel" => {
                *byte_level = true;
                if value["add_prefix_space"] == true {
                    return Err("its `add_prefix_space` is not done here".to_owned());
                }
                if value["use_regex"] != false {
                    splits.push(Split::new(GPT2)?);
                }
                Ok(())
            }
            "Digits" => {
                let one = value["individual_digits"] == true;
                splits.push(Split::new(if one { r"\p{N}" } else { r"\p{N}+" })?);
                Ok(())
            }
            "Split" => {
                let pattern = value["pattern"]["Regex"].as_str();
                let pattern = pattern.ok_or("it splits by something other than a `Regex`")?;
                let inverted = value["invert"] == true;
                match value["behavior"].as_str() {
                    Some("Isolated") if !inverted => {}
                    Some("Removed") if inverted => {}
                    _ => return Err("a `Split` that is not `Isolated` is not done here".to_owned()),
                }
                splits.push(Split::new(pattern)?);
                Ok(())
            }
            other => Err(format!("its pre_tokenizer `{other}` is not done here")),
        }
    }

    fn new(pattern: &str) -> Result<Split, String> {
        let plain = pattern.replace(r"\s+(?!\S)|\s+", r"\s+");
        let leaves_blank = plain != pattern;
        let newline_first = plain.contains(r"[\r\n]+|\s+");
        let pattern = Regex::new(&plain)
            .map_err(|_| format!("its pattern `{pattern}` is not one that is matched here"))?;
        Ok(Split { pattern, leaves_blank, newline_first })
    }

    /// The next match that is not empty.
    fn find(&self, text: &str, at: usize) -> Option<(usize, usize)> {
        let found = self.pattern.find_at(text, at).filter(|found| !found.is_empty())?;
        let (start, mut end) = (found.start(), found.end());
        let behind = text.as_bytes().get(end).is_some();
        if self.leaves_blank && behind && found.as_str().chars().all(char::is_whitespace) {
            let line_end = found.as_str().ends_with(['\n', '\r']);
            let last = found.as_str().chars().next_back().map_or(0, char::len_utf8);
            if end - last > start && !(self.newline_first && line_end) {
                end -= last;
            }
        }
        Some((start, end))
    }
}

#[cfg(test)]
mod tests {
    //! Goal: counts as tokenizers have them. Method: a `tokenizer.json` made of a vocabulary that is
    //! built in, which is then the oracle; small ones for each way to be refused.

    use super::*;
    use crate::pure::tokens::Vocabulary;
    use crate::pure::tokens::vocabulary::{recorded, whole};
    use serde_json::json;

    /// Text of bytes, as byte-level vocabularies write it.
    fn written(bytes: &[u8], letters: &[char; 256]) -> String {
        bytes.iter().map(|&byte| letters[usize::from(byte)]).collect()
    }

    /// The two tokens that become this one: what merges of lower rank leave of it.
    fn parents(
        token: &[u8],
        ranks: &HashMap<Vec<u8>, u32, FixedState>,
    ) -> Option<(Vec<u8>, Vec<u8>)> {
        let own = ranks[token];
        let mut parts: Vec<Vec<u8>> = token.iter().map(|&byte| vec![byte]).collect();
        while parts.len() > 2 {
            let pairs = parts.windows(2).map(<[_]>::concat).enumerate();
            let ranked = pairs.filter_map(|(at, pair)| Some((*ranks.get(&pair)?, at)));
            let (rank, at) = ranked.min()?;
            if rank >= own {
                return None;
            }
            let right = parts.remove(at + 1);
            parts[at].extend(right);
        }
        let right = parts.pop()?;
        Some((parts.pop()?, right))
    }

    /// The first tokens of `cl100k_base`, as a file.
    fn file(tokens: u32) -> serde_json::Value {
        let (bpe, letters) = (tiktoken::encoding::cl100k_base(), letters());
        let all: Vec<Vec<u8>> = (0..tokens).map(|id| bpe.decode(&[id])).collect();
        let ranks: HashMap<Vec<u8>, u32, FixedState> = all.iter().cloned().zip(0..).collect();
        let merges: Vec<[String; 2]> = all
            .iter()
            .filter(|token| token.len() > 1)
            .map(|token| parents(token, &ranks).expect("every token is a merge of two"))
            .map(|(left, right)| [written(&left, &letters), written(&right, &letters)])
            .collect();
        let vocab: serde_json::Map<String, Value> = all
            .iter()
            .zip(0u32..)
            .map(|(token, id)| (written(token, &letters), json!(id)))
            .collect();
        const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        json!({
            "version": "1.0",
            "added_tokens": [],
            "normalizer": { "type": "NFC" },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": PATTERN }, "behavior": "Isolated", "invert": false },
                { "type": "ByteLevel", "add_prefix_space": false, "use_regex": false },
            ] },
            "model": { "type": "BPE", "vocab": vocab, "merges": merges },
        })
    }

    #[test]
    fn a_file_counts_as_the_vocabulary_that_it_was_made_of() {
        let mut file = file(100_256);
        let vocabulary = Vocabulary::from_json(&file.to_string()).expect("a tokenizer.json");
        let mut texts: Vec<String> = recorded().into_iter().map(|(text, _)| text).collect();
        let oracle = Vocabulary::built_in("cl100k_base").expect("built in");
        texts.push(texts.concat());
        for text in &texts {
            assert_eq!(whole(&vocabulary, text), whole(&oracle, text), "{text}");
        }
        // Older files write a merge as one text.
        let merges = file["model"]["merges"].as_array_mut().expect("a list");
        for merge in merges {
            *merge =
                json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
        }
        let older = Vocabulary::from_json(&file.to_string()).expect("a tokenizer.json");
        let text = texts.last().expect("some");
        assert_eq!(whole(&older, text), whole(&oracle, text));
    }

    /// Bytes, and the merges that are given.
    fn small(merges: &[[&str; 2]]) -> Value {
        let tokens = letters().map(String::from).into_iter();
        let tokens = tokens.chain(merges.iter().map(|merge| merge.concat()));
        let vocab: serde_json::Map<String, Value> =
            tokens.zip(0u32..).map(|(token, id)| (token, json!(id))).collect();
        json!({
            "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false },
            "model": { "type": "BPE", "vocab": vocab, "merges": merges },
        })
    }

    fn count(file: &Value, text: &str) -> usize {
        FileVocabulary::parse(&file.to_string()).expect("a tokenizer.json").count(text)
    }

    #[test]
    fn the_first_merge_goes_first_and_the_leftmost_of_equals() {
        let file = small(&[["a", "b"], ["b", "c"], ["ab", "c"], ["a", "a"]]);
        for (text, tokens) in
            [("", 0), ("abc", 1), ("bc", 1), ("abbc", 2), ("aaa", 2), ("aaaa", 2), ("aab", 2)]
        {
            assert_eq!(count(&file, text), tokens, "{text}");
        }
        // Longer than is put together as a whole.
        assert_eq!(count(&file, &"a".repeat(1_001)), 501);
        // What merges do not lead to is a token only where the file says so.
        let mut file = small(&[["a", "b"]]);
        file["model"]["vocab"]["xyz"] = json!(999);
        assert_eq!(count(&file, "xyz"), 3);
        file["model"]["ignore_merges"] = json!(true);
        assert_eq!(count(&file, "xyz"), 1);
    }

    #[test]
    fn pre_tokenizers_split_as_they_say() {
        let blank = "\u{120}";
        let mut file = small(&[[blank, blank], ["1", "2"], [blank, "a"]]);
        // `\s+(?!\S)`: the last blank goes with the word.
        for (text, tokens) in [("  a", 2), ("   a", 2), ("  ", 1), ("a  ", 2), ("12", 1)] {
            assert_eq!(count(&file, text), tokens, "{text:?}");
        }
        file["pre_tokenizer"] = json!({ "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false },
        ] });
        assert_eq!(count(&file, "12"), 2);
    }

    #[test]
    fn what_cannot_be_counted_is_refused_with_a_reason() {
        let change = |pointer: &str, value: Value| {
            let mut file = small(&[["a", "b"]]);
            let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
            file.pointer_mut(parent).expect("a parent")[name] = value;
            FileVocabulary::parse(&file.to_string()).err().unwrap_or_default()
        };
        for (pointer, value, reason) in [
            ("/model/type", json!("Unigram"), "its model is Unigram"),
            ("/model/byte_fallback", json!(true), "SentencePiece"),
            ("/model/vocab", json!({ "a": 1 }), "a single byte"),
            ("/model/vocab", json!([]), "model.vocab"),
            ("/model/merges", json!([["a", "zz"]]), "merge 0 names `zz`"),
            ("/model/merges", json!([["b", "a"]]), "merge 0 names `ba`"),
            ("/normalizer", json!({ "type": "Replace" }), "normalizer"),
            ("/pre_tokenizer", json!({ "type": "Metaspace" }), "Metaspace"),
            ("/pre_tokenizer", json!(null), "nothing"),
            ("/pre_tokenizer/add_prefix_space", json!(true), "add_prefix_space"),
            (
                "/pre_tokenizer",
                json!({ "type": "Split", "pattern": { "Regex": "(?=a)" }, "behavior": "Isolated" }),
                "its pattern `(?=a)`",
            ),
            (
                "/pre_tokenizer",
                json!({ "type": "Split", "pattern": { "Regex": "a" }, "behavior": "Removed" }),
                "Isolated",
            ),
        ] {
            let why = change(pointer, value);
            assert!(why.contains(reason), "{pointer}: {why}");
        }
        let why = FileVocabulary::parse("a: b").err().unwrap_or_default();
        assert!(why.contains("no tokenizer.json"), "{why}");
    }
}
