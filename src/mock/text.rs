//! The mock's "model": a tokeniser that needs no table, and answers that follow from a seed.
//!
//! Every token of an answer is exactly one token of the tokeniser (unless padded or tricky), so
//! text, stream and usage can be held against each other.

use serde_json::{Map, Value, json};

use super::script::Act;
use crate::pure::units::Rng;

/// Length of the first token of a text that is not empty: a space at most, then up to six ASCII
/// letters or digits, or one other character. Joined, the tokens are the text.
fn token_len(text: &str) -> usize {
    let space = usize::from(text.starts_with(' '));
    let rest = &text[space..];
    let word = rest.bytes().take(WORD_MAX).take_while(u8::is_ascii_alphanumeric).count();
    match rest.chars().next() {
        _ if word > 0 => space + word,
        Some(other) if other != ' ' => space + other.len_utf8(),
        // A space before a space, or at the end, is a token of its own.
        _ => 1,
    }
}

const WORD_MAX: usize = 6;

/// The tokens of a text, in order.
pub fn tokens(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let (token, rest) = text.split_at(token_len(text));
        text = rest;
        Some(token)
    })
}

pub fn count(text: &str) -> u64 {
    // At most as many as bytes.
    tokens(text).count() as u64
}

/// FNV-1a, to derive seeds, ids and vectors from text; nothing depends on its strength.
pub fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// The text of one choice and where its tokens end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    pub text: String,
    ends: Vec<usize>,
    /// So many of the first tokens are reasoning.
    pub reasoning: usize,
}

impl Said {
    pub fn tokens(&self) -> usize {
        self.ends.len()
    }

    /// The token with this index, from 0; empty behind the end.
    pub fn token(&self, index: usize) -> &str {
        let start = self.start(index);
        let end = self.ends.get(index).copied().unwrap_or(start);
        &self.text[start..end]
    }

    /// The text after the reasoning.
    pub fn content(&self) -> &str {
        &self.text[self.start(self.reasoning)..]
    }

    pub fn thought(&self) -> &str {
        &self.text[..self.start(self.reasoning)]
    }

    fn start(&self, index: usize) -> usize {
        match index {
            0 => 0,
            _ => self.ends.get(index - 1).copied().unwrap_or(self.text.len()),
        }
    }

    fn push(&mut self, token: &str) {
        self.text.push_str(token);
        self.ends.push(self.text.len());
    }

    /// A text whose tokens are those of the tokeniser, such as the arguments of a call.
    pub fn verbatim(text: &str) -> Said {
        let mut said = Said::default();
        tokens(text).for_each(|token| said.push(token));
        said
    }

    /// `You said: …` and then words drawn from `seed`, `wanted` tokens in all.
    pub fn compose(heard: &str, wanted: u32, act: &Act, seed: u64) -> Said {
        let mut rng = Rng::seeded(seed);
        let mut said = Said::default();
        let opening = if act.tricky { "" } else { "You said: " };
        let heard = if act.tricky { "" } else { heard };
        // One text, so that the space before the first word stays with it.
        let opening = tokens(opening.trim_end()).map(str::to_owned);
        let mut first = true;
        let mut echo = tokens(heard);
        let mut spoken = opening.chain(std::iter::from_fn(move || {
            let token = echo.next()?;
            let space = std::mem::take(&mut first) && !token.starts_with(' ');
            Some(if space && !token.starts_with(char::is_whitespace) {
                format!(" {token}")
            } else {
                token.to_owned()
            })
        }));
        for index in 0..wanted as usize {
            let token = spoken.next().unwrap_or_else(|| {
                // Tricks in order, so that a short answer has them all. An index below 32 fits.
                let word = if act.tricky {
                    TRICKY[index % TRICKY.len()]
                } else {
                    WORDS[rng.below(WORDS.len() as u64) as usize]
                };
                word.to_owned()
            });
            match act.token_bytes {
                None => said.push(&token),
                Some(bytes) => said.push(&padded(&token, bytes)),
            }
        }
        said.reasoning = (act.reasoning as usize).min(said.tokens());
        said
    }

    /// Ends the text before the first of `stops` that occurs; gives whether one did.
    pub fn stop_at(&mut self, stops: &[&str]) -> bool {
        let found = stops.iter().filter(|stop| !stop.is_empty());
        let Some(at) = found.filter_map(|stop| self.text.find(stop)).min() else {
            return false;
        };
        self.text.truncate(at);
        self.ends.retain(|&end| end < at);
        if at > self.ends.last().copied().unwrap_or(0) {
            self.ends.push(at);
        }
        self.reasoning = self.reasoning.min(self.ends.len());
        true
    }
}

fn padded(token: &str, bytes: usize) -> String {
    let mut padded = token.to_owned();
    while padded.len() < bytes {
        padded.push('x');
    }
    let mut end = bytes;
    while !padded.is_char_boundary(end) {
        end -= 1;
    }
    padded.truncate(end);
    padded
}

/// Each of them one token.
const WORDS: [&str; 32] = [
    " still", " water", " waits", " above", " the", " gate", " and", " every", " wheel", " takes",
    " what", " it", " can", " turn", " no", " drop", " runs", " past", " unseen", " river",
    " stone", " light", " slow", " rain", " field", " north", " seven", " over", " under", " a",
    " blade", ".",
];

/// What must never be taken for anything but text.
const TRICKY: [&str; 16] = [
    "data: [DONE]\n\n",
    "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2,\"total_tokens\":3}",
    "\r\n\r\n",
    "{\"error\":{\"message\":\"no\"}}",
    "\\",
    "\"",
    "\u{1F600}",
    "é",
    "\u{0}\u{1f}\u{7f}",
    "event: error\ndata: {}\n\n",
    "\u{2028}",
    ": ping\n",
    "},\"choices\":[],\"usage\":{",
    "\u{FEFF}",
    "0\r\n\r\n",
    "HTTP/1.1 500 No\r\n",
];

/// Arguments that fit a tool's JSON schema: each property by its type, strings echo what was
/// heard. Nesting is not followed further than four objects.
pub fn arguments(schema: &Value, heard: &str) -> String {
    value_for(schema, heard, 4).to_string()
}

fn value_for(schema: &Value, heard: &str, depth: u8) -> Value {
    if let Some(first) = schema["enum"].as_array().and_then(|values| values.first()) {
        return first.clone();
    }
    let kind = match &schema["type"] {
        Value::Array(kinds) => kinds.first().and_then(Value::as_str),
        kind => kind.as_str(),
    };
    match kind {
        Some("string") => heard.chars().take(64).collect::<String>().into(),
        Some("integer") => json!(1),
        Some("number") => json!(1.5),
        Some("boolean") => json!(true),
        Some("array") => json!([]),
        Some("null") => Value::Null,
        _ => {
            let properties = schema["properties"].as_object().filter(|_| depth > 0);
            let members = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), value_for(schema, heard, depth - 1)));
            Value::Object(members.collect::<Map<_, _>>())
        }
    }
}

/// A vector of length 1 that follows from the text.
pub fn embedding(text: &str, dimensions: usize) -> Vec<f32> {
    let mut rng = Rng::seeded(hash(text.as_bytes()));
    // 24 bits fit an f32 exactly.
    let raw: Vec<f32> =
        (0..dimensions).map(|_| (rng.next_u64() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect();
    let norm = raw.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    raw.into_iter().map(|x| x / norm).collect()
}

/// Base64 with padding (RFC 4648, section 4).
pub fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let mut word = 0u32;
        for at in 0..3 {
            word = word << 8 | u32::from(group.get(at).copied().unwrap_or(0));
        }
        for digit in 0..4 {
            let value = (word >> (18 - 6 * digit)) & 63;
            let digit_is_there = digit <= group.len();
            text.push(if digit_is_there { char::from(DIGITS[value as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: no text is lost or counted twice. Method: all strings of up to five characters over
    /// an alphabet of the cases that differ.
    #[test]
    fn tokens_joined_are_the_text() {
        let alphabet = [' ', 'a', '7', '.', 'é', '\n', '\u{1F600}'];
        let mut texts = vec![String::new()];
        for _ in 0..5 {
            texts = texts
                .iter()
                .flat_map(|text| alphabet.iter().map(move |c| format!("{text}{c}")))
                .collect();
            for text in &texts {
                assert_eq!(tokens(text).collect::<String>(), *text);
                assert!(tokens(text).all(|token| !token.is_empty()));
            }
        }
        assert_eq!(
            tokens("Hello, world  again").collect::<Vec<_>>(),
            ["Hello", ",", " world", " ", " again"]
        );
        assert_eq!(count("abcdefghijklm"), 3);
    }

    #[test]
    fn an_answer_has_as_many_tokens_as_were_wanted_and_they_are_the_tokenisers() {
        for wanted in [0, 1, 2, 3, 5, 40, 500] {
            for heard in ["", "hi", "What is  it?", " é\n x"] {
                let said = Said::compose(heard, wanted, &Act::default(), 3);
                assert_eq!(said.tokens(), wanted as usize);
                assert_eq!(count(&said.text), u64::from(wanted), "{:?}", said.text);
                let joined: String = (0..said.tokens()).map(|index| said.token(index)).collect();
                assert_eq!(joined, said.text);
            }
        }
        let said = Said::compose("hello there", 8, &Act::default(), 3);
        assert!(said.text.starts_with("You said: hello there"), "{}", said.text);
        assert_eq!(said, Said::compose("hello there", 8, &Act::default(), 3));
        assert_ne!(said, Said::compose("hello there", 8, &Act::default(), 4));
    }

    #[test]
    fn padding_and_tricks_change_the_text_and_not_the_number() {
        let mut act = Act { token_bytes: Some(50), ..Act::default() };
        let said = Said::compose("héllo \u{1F600}", 9, &act, 1);
        assert_eq!(said.tokens(), 9);
        assert!((0..9).all(|index| (47..=50).contains(&said.token(index).len())));
        act = Act { tricky: true, reasoning: 2, ..Act::default() };
        let said = Said::compose("x", 16, &act, 1);
        assert!(TRICKY.iter().all(|trick| said.text.contains(trick)));
        assert_eq!(said.thought(), [TRICKY[0], TRICKY[1]].concat());
        assert_eq!(said.content(), TRICKY[2..].concat());
    }

    #[test]
    fn a_stop_ends_the_text_before_it() {
        let mut said = Said::verbatim("one two three");
        assert!(!said.clone().stop_at(&["", "four"]));
        assert!(said.stop_at(&["three", "wo"]));
        assert_eq!((said.text.as_str(), said.tokens()), ("one t", 2));
        assert_eq!(said.token(1), " t");
        assert!(said.stop_at(&["one"]));
        assert_eq!((said.text.as_str(), said.tokens()), ("", 0));
    }

    #[test]
    fn arguments_fit_the_schema() {
        let schema = json!({"type": "object", "properties": {
            "city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]},
            "near": {"type": ["object", "null"], "properties": {"far": {"type": "boolean"}}},
        }});
        let given: Value = serde_json::from_str(&arguments(&schema, "Paris \"x\"")).unwrap();
        let wanted = json!({"city": "Paris \"x\"", "days": 1, "unit": "c", "near": {"far": true}});
        assert_eq!(given, wanted);
        assert_eq!(arguments(&Value::Null, ""), "{}");
    }

    #[test]
    fn base64_matches_the_vectors_of_rfc_4648() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(base64(plain.as_bytes()), coded);
        }
        assert_eq!(base64(&[0xFB, 0xFF, 0xFE]), "+//+");
    }

    #[test]
    fn embeddings_have_length_one_and_follow_from_the_text() {
        let vector = embedding("hello", 16);
        let norm: f32 = vector.iter().map(|x| x * x).sum();
        assert!((norm - 1.0).abs() < 1e-5);
        assert_eq!(vector, embedding("hello", 16));
        assert_ne!(vector, embedding("hullo", 16));
    }
}
