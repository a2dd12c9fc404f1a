//! The tokens of a prompt by a model's own vocabulary: what the model is given to read, and what
//! holds it together.

use super::{Census, Factor, INLINE_TOKENS, Vocabulary, Work};
use crate::pure::body::{Part, PartKind};
use crate::pure::json;
use crate::pure::peek::{Cursor, Text, starts_scalar};
use crate::pure::units::Tokens;
use memchr::memmem;

/// What a message takes beside its text, what begins the answer, and what a name adds: OpenAI's
/// rule, as its cookbook has it ("How to count tokens with tiktoken").
const MESSAGE_TOKENS: u64 = 3;
const ANSWER_TOKENS: u64 = 3;
const NAME_TOKENS: u64 = 1;

/// Deeper content is no prompt that an engine takes; it counts as the text it is.
const DEPTH_MAX: usize = 16;

/// Counts a prompt's parts, as an inspected `body` has them: roles, names, texts, tool calls and
/// the JSON of tools as it is written. Pictures, sound and files count for what an estimate gives
/// them, and so does a part that is nested too deeply to be read.
///
/// At most 32 KiB are counted (less of what takes long: see [`Work`]); the rest is taken to have as
/// many tokens, compared to its estimate, as what was counted. Costs up to a millisecond and one
/// buffer for texts with escapes.
pub fn exact(vocabulary: &Vocabulary, parts: &[Part], body: &[u8]) -> Tokens {
    let mut counter = Counter::new(vocabulary);
    for part in parts {
        let raw = part.span.of(body);
        let before = counter.sums;
        let mut cursor = Cursor::new(raw);
        let read = match part.kind {
            PartKind::Form => {
                counter.text(Text { raw, escaped: false });
                Some(())
            }
            PartKind::Tools => {
                counter.json(raw);
                Some(())
            }
            PartKind::Text => counter.content(&mut cursor, 0),
            PartKind::Messages => counter.messages(&mut cursor),
        };
        if read.is_none() {
            counter.sums = before;
            counter.sums.rest.push(raw);
        }
    }
    counter.tokens()
}

struct Counter<'v> {
    vocabulary: &'v Vocabulary,
    work: Work,
    sums: Sums,
    plain: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Of the text that was counted.
    tokens: u64,
    counted: Census,
    /// Text that was not.
    rest: Census,
    /// What is no text.
    more: u64,
}

impl<'v> Counter<'v> {
    fn new(vocabulary: &'v Vocabulary) -> Counter<'v> {
        let (work, sums) = (Work::PROMPT, Sums::default());
        Counter { vocabulary, work, sums, plain: Vec::new() }
    }

    fn tokens(&self) -> Tokens {
        let Sums { tokens, counted, rest, more } = &self.sums;
        let rest = Factor::between(counted.tokens(), Tokens(*tokens)).apply(rest.tokens());
        Tokens(tokens.saturating_add(*more).saturating_add(rest.0))
    }

    /// A list of messages, or one text.
    fn messages(&mut self, cursor: &mut Cursor<'_>) -> Option<()> {
        if cursor.byte() != b'[' {
            return self.content(cursor, 0);
        }
        cursor.step();
        let (mut fresh, mut any) = (true, false);
        while cursor.element(fresh)? {
            fresh = false;
            if cursor.byte() == b'{' {
                any = true;
                self.sums.more += MESSAGE_TOKENS;
            }
            self.content(cursor, 1)?;
        }
        if any {
            self.sums.more += ANSWER_TOKENS;
        }
        Some(())
    }

    /// A text, a list of contents, or an object that holds some: a message, a part of its content,
    /// a document. A number is a token by its id.
    fn content(&mut self, cursor: &mut Cursor<'_>, depth: usize) -> Option<()> {
        match cursor.byte() {
            b'"' => {
                let text = cursor.string()?;
                self.text(text);
            }
            b'[' | b'{' if depth == DEPTH_MAX => {
                let raw = cursor.value()?;
                self.json(raw);
            }
            b'[' => {
                cursor.step();
                let mut fresh = true;
                while cursor.element(fresh)? {
                    fresh = false;
                    self.content(cursor, depth + 1)?;
                }
            }
            b'{' => {
                cursor.step();
                let mut fresh = true;
                while let Some(name) = cursor.member(fresh)? {
                    fresh = false;
                    name.with(|name| self.member(name, cursor, depth + 1))?;
                }
            }
            byte => {
                let number = starts_scalar(byte) && !matches!(byte, b't' | b'f' | b'n');
                self.sums.more += u64::from(number);
                cursor.value()?;
            }
        }
        Some(())
    }

    fn member(&mut self, name: &[u8], cursor: &mut Cursor<'_>, depth: usize) -> Option<()> {
        match name {
            b"name" => {
                self.sums.more += NAME_TOKENS;
                self.content(cursor, depth)
            }
            b"role" | b"content" | b"text" | b"title" | b"refusal" | b"reasoning"
            | b"reasoning_content" | b"thinking" | b"output" => self.content(cursor, depth),
            b"tool_calls" | b"function_call" | b"function" | b"custom" => self.call(cursor, depth),
            // A call of Responses and of Anthropic.
            b"arguments" | b"input" => self.argument(cursor),
            b"image_url" | b"input_audio" | b"audio" | b"image" | b"video" | b"video_url"
            | b"file" | b"source" => {
                cursor.value()?;
                self.sums.more += INLINE_TOKENS;
                Some(())
            }
            // What a model does not see: ids, types, marks for caches.
            _ => cursor.value().map(drop),
        }
    }

    /// Calls of tools, in a list or one, the name and the arguments within `function` or not.
    fn call(&mut self, cursor: &mut Cursor<'_>, depth: usize) -> Option<()> {
        let mut fresh = true;
        match cursor.byte() {
            b'[' if depth < DEPTH_MAX => {
                cursor.step();
                while cursor.element(fresh)? {
                    fresh = false;
                    self.call(cursor, depth + 1)?;
                }
                Some(())
            }
            b'{' if depth < DEPTH_MAX => {
                cursor.step();
                while let Some(name) = cursor.member(fresh)? {
                    fresh = false;
                    name.with(|name| match name {
                        b"name" | b"arguments" | b"input" => self.argument(cursor),
                        b"function" | b"custom" => self.call(cursor, depth + 1),
                        _ => cursor.value().map(drop),
                    })?;
                }
                Some(())
            }
            _ => cursor.value().map(drop),
        }
    }

    /// A text, which as a rule holds JSON, or JSON itself.
    fn argument(&mut self, cursor: &mut Cursor<'_>) -> Option<()> {
        if cursor.byte() == b'"' {
            let text = cursor.string()?;
            self.text(text);
        } else {
            let raw = cursor.value()?;
            self.json(raw);
        }
        Some(())
    }

    /// JSON as it is written; characters that are escaped count for themselves.
    fn json(&mut self, raw: &[u8]) {
        self.text(Text { raw, escaped: memmem::find(raw, b"\\u").is_some() });
    }

    fn text(&mut self, text: Text<'_>) {
        let Text { raw, escaped } = text;
        if self.work.is_spent() {
            self.sums.rest.text(raw);
            return;
        }
        // Not even looked at beyond what could be counted: an escape is no shorter than its text.
        let head = &raw[..cut(raw, escaped, TEXT_BYTES_MAX)];
        let plain = if escaped {
            self.plain = json::unescape(head);
            &self.plain
        } else {
            head
        };
        // Lone surrogates are no text; what engines make of them is one token or two.
        let lossy = String::from_utf8_lossy(plain);
        let (tokens, len) = self.vocabulary.count(&lossy, &mut self.work);
        self.sums.tokens += tokens;
        // The part of the raw text that was counted; with escapes about that.
        let counted = match len == lossy.len() {
            true => head.len(),
            false => head.len() * len / lossy.len(),
        };
        self.sums.counted.text(&raw[..counted]);
        if counted < raw.len() {
            self.sums.rest.text(&raw[counted..]);
        }
    }
}

const TEXT_BYTES_MAX: usize = 32 << 10;

/// Length of the longest part at the start of `raw` of at most `most` bytes that cuts no character
/// and no escape.
fn cut(raw: &[u8], escaped: bool, most: usize) -> usize {
    if raw.len() <= most {
        return raw.len();
    }
    let mut at = most;
    while at > 0 && raw[at] & 0xC0 == 0x80 {
        at -= 1;
    }
    if escaped {
        // Two `\u` of a pair of surrogates may lie around it, and backslashes in a row are pairs.
        const UNIT: usize = 6;
        let near = at.saturating_sub(UNIT);
        if let Some(first) = raw[near..at].iter().position(|&byte| byte == b'\\') {
            let mut from = near + first;
            let second =
                matches!(raw[from..], [_, b'u', b'd' | b'D', b'c'..=b'f' | b'C'..=b'F', ..]);
            if second && from >= UNIT && raw[from - UNIT..].starts_with(b"\\u") {
                from -= UNIT;
            }
            while from > 0 && raw[from - 1] == b'\\' {
                from -= 1;
            }
            at = from;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    //! Goal: what a model is given to read is counted, all of it, once. Method: OpenAI's published
    //! example; bodies against the sum of their texts; long texts against a count without bound.

    use super::*;
    use crate::pure::body::{BodyKind, Inspector};
    use crate::pure::tokens::vocabulary::{recorded, whole};
    use crate::pure::units::Rng;

    fn vocabulary(name: &str) -> Vocabulary {
        Vocabulary::built_in(name).expect("built in")
    }

    fn count(vocabulary: &Vocabulary, kind: BodyKind, body: &str) -> u64 {
        let inspected = Inspector::new(kind).finish(body.as_bytes()).expect("a body");
        exact(vocabulary, &inspected.parts, body.as_bytes()).0
    }

    /// The text as JSON, with everything but letters escaped if so wished.
    fn quoted(text: &str, escaped: bool) -> String {
        if !escaped {
            return serde_json::to_string(text).expect("JSON");
        }
        let escape = |c: char| match c {
            'a'..='z' => c.to_string(),
            _ => c.encode_utf16(&mut [0; 2]).iter().map(|u| format!("\\u{u:04x}")).collect(),
        };
        format!("\"{}\"", text.chars().map(escape).collect::<String>())
    }

    #[test]
    fn messages_count_as_openai_publishes() {
        // From "How to count tokens with tiktoken", with what the API reported for them.
        let messages = r#"[
            {"role":"system","content":"You are a helpful, pattern-following assistant that translates corporate jargon into plain English."},
            {"role":"system","name":"example_user","content":"New synergies will help drive top-line growth."},
            {"role":"system","name":"example_assistant","content":"Things working well together will increase revenue."},
            {"role":"system","name":"example_user","content":"Let's circle back when we have more bandwidth to touch base on opportunities for increased leverage."},
            {"role":"system","name":"example_assistant","content":"Let's talk later when we're less busy about how to do better."},
            {"role":"user","content":"This late pivot means we don't have time to boil the ocean for the client deliverable."}
        ]"#;
        let body = format!(r#"{{"model":"gpt","messages":{messages}}}"#);
        assert_eq!(count(&vocabulary("cl100k_base"), BodyKind::Chat, &body), 129);
        assert_eq!(count(&vocabulary("o200k_base"), BodyKind::Chat, &body), 124);
    }

    #[test]
    fn a_text_counts_alike_however_it_is_written_and_wherever_it_stands() {
        let vocabulary = vocabulary("o200k_base");
        let user = whole(&vocabulary, "user") + MESSAGE_TOKENS + ANSWER_TOKENS;
        for (text, counts) in recorded() {
            let tokens = counts["o200k_base"].as_u64().expect("a count");
            for escaped in [false, true] {
                let text = quoted(&text, escaped);
                for (kind, prompt, more) in [
                    (
                        BodyKind::Chat,
                        format!(r#""messages":[{{"role":"user","content":{text}}}]"#),
                        user,
                    ),
                    (
                        BodyKind::Chat,
                        format!(
                            r#""messages":[{{"role":"user","content":[{{"type":"text","text":{text}}}]}}]"#
                        ),
                        user,
                    ),
                    (BodyKind::Completions, format!(r#""prompt":{text}"#), 0),
                    (BodyKind::Responses, format!(r#""input":{text}"#), 0),
                    (
                        BodyKind::Responses,
                        format!(
                            r#""input":[{{"type":"message","role":"user","content":[{{"type":"input_text","text":{text}}}]}}]"#
                        ),
                        user,
                    ),
                    (
                        BodyKind::Messages,
                        format!(r#""system":[{{"type":"text","text":{text}}}]"#),
                        0,
                    ),
                    (
                        BodyKind::Other,
                        format!(r#""query":{text},"documents":[{text},{{"text":{text}}}]"#),
                        2 * tokens,
                    ),
                ] {
                    let body =
                        format!(r#"{{"model":"m",{prompt},"metadata":{{"content":{text}}}}}"#);
                    assert_eq!(count(&vocabulary, kind, &body), tokens + more, "{body}");
                }
            }
        }
    }

    #[test]
    fn calls_and_schemas_of_tools_count() {
        let vocabulary = vocabulary("qwen");
        let of = |text: &str| whole(&vocabulary, text);
        let tools = r#"[{"type":"function","function":{"name":"get_weather","parameters":{"type":"object","properties":{"city":{"type":"string"}}}}}]"#;
        let arguments = r#"{"city": "Zürich"}"#;
        let raw = quoted(arguments, true);
        let more = MESSAGE_TOKENS + ANSWER_TOKENS;
        for (messages, tokens) in [
            (
                format!(r#"{{"role":"assistant","content":null,"tool_calls":[{{"id":"call_1","type":"function","function":{{"name":"get_weather","arguments":{raw}}}}}]}}"#),
                of("assistant") + of("get_weather") + of(arguments),
            ),
            (
                format!(r#"{{"role":"assistant","function_call":{{"name":"get_weather","arguments":{raw}}}}}"#),
                of("assistant") + of("get_weather") + of(arguments),
            ),
            (
                r#"{"role":"tool","tool_call_id":"call_1","content":"21 degrees"}"#.to_owned(),
                of("tool") + of("21 degrees"),
            ),
            (
                r#"{"role":"assistant","content":[{"type":"tool_use","id":"x","name":"f","input":{"a":[1,2]}}]}"#.to_owned(),
                of("assistant") + of("f") + NAME_TOKENS + of(r#"{"a":[1,2]}"#),
            ),
            (
                r#"{"role":"user","content":[{"type":"tool_result","content":[{"type":"text","text":"done"}]}]}"#.to_owned(),
                of("user") + of("done"),
            ),
        ] {
            let body = format!(r#"{{"model":"m","messages":[{messages}],"tools":{tools}}}"#);
            assert_eq!(count(&vocabulary, BodyKind::Chat, &body), more + tokens + of(tools), "{body}");
        }
        // Bare characters and escaped ones are the same schema.
        let schemas = [r#"[{"name":"Zürich"}]"#, r#"[{"name":"Z\u00fcrich"}]"#];
        let [plain, escaped] = schemas.map(|tools| {
            count(&vocabulary, BodyKind::Chat, &format!(r#"{{"model":"m","tools":{tools}}}"#))
        });
        assert_eq!(plain, escaped);
        let item = format!(
            r#"{{"model":"m","input":[{{"type":"function_call","name":"f","arguments":{raw}}}]}}"#
        );
        assert_eq!(
            count(&vocabulary, BodyKind::Responses, &item),
            more + NAME_TOKENS + of("f") + of(arguments)
        );
    }

    #[test]
    fn pictures_keep_their_estimate_and_ids_are_tokens() {
        let vocabulary = vocabulary("cl100k_base");
        let picture =
            r#"{"type":"image_url","image_url":{"url":"data:image/png;base64,iVBORw0KGgo"}}"#;
        let body = format!(r#"{{"model":"m","messages":[{{"content":[{picture},{picture}]}}]}}"#);
        let more = MESSAGE_TOKENS + ANSWER_TOKENS;
        assert_eq!(count(&vocabulary, BodyKind::Chat, &body), 2 * INLINE_TOKENS + more);
        let ids = r#"{"model":"m","prompt":[[1,22,333],[4]]}"#;
        assert_eq!(count(&vocabulary, BodyKind::Completions, ids), 4);
        // Deeper than a message is: still counted, as the text it is.
        let deep = format!("{}\"hello\"{}", "[".repeat(40), "]".repeat(40));
        let body = format!(r#"{{"model":"m","messages":[{{"content":{deep}}}]}}"#);
        assert!((10..100).contains(&count(&vocabulary, BodyKind::Chat, &body)));
        // Deeper than is read at all: estimated.
        let deep = format!("{}\"hello\"{}", "[".repeat(400), "]".repeat(400));
        let body = format!(r#"{{"model":"m","messages":[{{"content":{deep}}}]}}"#);
        assert!((50..500).contains(&count(&vocabulary, BodyKind::Chat, &body)));
    }

    #[test]
    fn beyond_the_bound_counts_go_on_as_they_began() {
        for name in ["o200k_base", "qwen"] {
            let vocabulary = vocabulary(name);
            for (text, _) in recorded().into_iter().filter(|(text, _)| text.len() > 60) {
                let long = text.repeat(200_000 / text.len());
                let tokens = whole(&vocabulary, &long);
                for escaped in [false, true] {
                    let body = format!(r#"{{"model":"m","prompt":{}}}"#, quoted(&long, escaped));
                    let found = count(&vocabulary, BodyKind::Completions, &body);
                    let apart = found.abs_diff(tokens) * 100 / tokens;
                    assert!(apart <= 3, "{found} for {tokens}: {text}");
                }
            }
        }
    }

    #[test]
    fn a_change_of_script_behind_the_bound_is_followed() {
        let vocabulary = vocabulary("o200k_base");
        let texts = recorded();
        let (english, chinese) = (texts[0].0.repeat(300), texts[4].0.repeat(300));
        let tokens = whole(&vocabulary, &english) + whole(&vocabulary, &chinese);
        let body = format!(
            r#"{{"model":"m","prompt":[{},{}]}}"#,
            quoted(&english, false),
            quoted(&chinese, false)
        );
        let found = count(&vocabulary, BodyKind::Completions, &body);
        assert!(found.abs_diff(tokens) * 100 / tokens <= 25, "{found} for {tokens}");
    }

    #[test]
    fn any_body_can_be_counted() {
        let vocabulary = vocabulary("cl100k_base");
        let seed = br#"{"model":"m","messages":[{"role":"user","name":"n","content":[{"type":"text","text":"a\n\ud83d\ude00\ud83d\\"},{"image_url":{"url":"x"}}]},{"tool_calls":[{"function":{"name":"f","arguments":"{}"}}]}],"tools":[{"a":"\u00fc"}],"prompt":[1,true,null],"input":{"output":"y"}}"#;
        let mut rng = Rng::seeded(8);
        let mut counted = 0;
        for _ in 0..20_000 {
            let mut body = seed.to_vec();
            for _ in 0..rng.below(4) {
                let at = rng.below(body.len() as u64) as usize;
                let from = rng.below(body.len() as u64) as usize;
                body[at] = body[from];
            }
            if let Ok(inspected) = Inspector::new(BodyKind::Other).finish(&body) {
                counted += 1;
                assert!(exact(&vocabulary, &inspected.parts, &body).0 < 3_000);
            }
        }
        assert!(counted > 1_000, "{counted}");
    }

    #[test]
    fn a_cut_leaves_characters_and_escapes_whole() {
        for text in
            [r"aü\u00fcb\ud83d\ude00\\\\n\\", r"\\\\\\\\\\\\\\\\\\\\\\\\\\\\n", "字字字字字字字字"]
        {
            let plain = String::from_utf8(json::unescape(text.as_bytes())).expect("text");
            for most in 0..text.len() + 1 {
                let len = cut(text.as_bytes(), true, most);
                assert!(len <= most);
                let head =
                    String::from_utf8(json::unescape(&text.as_bytes()[..len])).expect("text");
                assert!(plain.starts_with(&head), "{most}: {head}");
            }
        }
    }
}
