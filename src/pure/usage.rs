//! What a response says of itself: the tokens it used, the text it carries, whether it failed.
//!
//! One table ([`Role`], [`Slot`]) says which members of which dialect mean something: chat and text
//! completions, the Responses API, Anthropic messages, embeddings and rerank, and the native
//! endpoints of llama.cpp, TGI, Ollama and DashScope. Two readers use it: [`read`] walks a small
//! document that lies in memory whole, for the events of a stream, and [`PlainScanner`] follows a
//! body of any length as it arrives.
//!
//! Both are lenient where it cannot matter (control characters in strings, bytes that are not
//! UTF-8), because a response is passed on as it is whatever we make of it. Neither looks inside a
//! string, so text that merely looks like a usage report is never read as one.

use crate::pure::json::Span;
use crate::pure::peek::{self, Brackets, Cursor, Measure};

/// More tokens than one response can have; a larger number is a backend's mistake and is not
/// believed. Small enough that sums of billions of responses, and prices, stay within 64 bits.
pub const TOKENS_MAX: u64 = 1_000_000_000;

/// The longest usage object, or other value with an inside, that is kept while it arrives and read.
const KEPT_BYTES_MAX: usize = 4 << 10;

/// How many containers within one another are looked into, beside the document itself: enough for
/// `choices[].delta.tool_calls[].function`.
const OPEN_MAX: usize = 7;

/// Token counts as a backend reported them, with dialects made one: cached tokens are part of
/// `prompt`, reasoning tokens are part of `completion`, and neither is ever larger than that.
///
/// `None` means that nothing was said, not zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt: Option<u64>,
    pub completion: Option<u64>,
    pub total: Option<u64>,
    /// Part of `prompt` that came from a cache.
    pub cached: Option<u64>,
    /// Part of `completion` that was not shown as the answer.
    pub reasoning: Option<u64>,
    /// Some count was negative, fractional, above [`TOKENS_MAX`], of the wrong type, or at odds with
    /// another one. What could not be believed is `None` or clamped.
    pub odd: bool,
}

impl Usage {
    /// Reads a usage object in any dialect. `None` if it is not an object or has no count that we
    /// know. Costs one pass and no allocation.
    ///
    /// Names: OpenAI chat and completions (`prompt_tokens`, …), OpenAI Responses (`input_tokens`,
    /// …), Anthropic (`input_tokens` without the cached ones, `cache_read_input_tokens`,
    /// `cache_creation_input_tokens`), `total_tokens` alone as rerankers send it, and the places
    /// where DeepSeek, Moonshot and SGLang put cached and reasoning tokens.
    pub fn from_json(object: &[u8]) -> Option<Usage> {
        let mut report = Report::default();
        let mut cursor = Cursor::new(object);
        cursor.space();
        cursor = report.read(cursor)?;
        cursor.space();
        if cursor.rest.is_empty() { report.settle() } else { None }
    }

    /// Takes in a later report of the same response. Reports are running totals, so a number
    /// replaces the earlier one and is never added to it; a number that is missing or smaller (a
    /// late `null`, an Anthropic delta that repeats half of the start) leaves the earlier one.
    pub fn absorb(&mut self, later: &Usage) {
        // `None` is smaller than any `Some`.
        self.prompt = self.prompt.max(later.prompt);
        self.completion = self.completion.max(later.completion);
        self.total = self.total.max(later.total);
        self.cached = self.cached.max(later.cached);
        self.reasoning = self.reasoning.max(later.reasoning);
        self.odd |= later.odd;
        self.clamp();
    }

    /// Prompt and completion tokens to charge for, if the report is enough to know both. One that is
    /// missing follows from the total; a total alone, or a prompt without a completion whose total
    /// says that there is none (embeddings, rerank), is all prompt.
    pub fn charge(&self) -> Option<(u64, u64)> {
        match (self.prompt, self.completion, self.total) {
            (Some(prompt), Some(completion), _) => Some((prompt, completion)),
            (Some(prompt), None, Some(total)) => Some((prompt, total.saturating_sub(prompt))),
            (None, Some(completion), Some(total)) => {
                Some((total.saturating_sub(completion), completion))
            }
            (None, None, Some(total)) => Some((total, 0)),
            _ => None,
        }
    }

    fn clamp(&mut self) {
        if let (Some(cached), Some(prompt)) = (self.cached, self.prompt)
            && cached > prompt
        {
            self.cached = Some(prompt);
            self.odd = true;
        }
        if let (Some(reasoning), Some(completion)) = (self.reasoning, self.completion)
            && reasoning > completion
        {
            self.reasoning = Some(completion);
            self.odd = true;
        }
    }
}

/// Counts by the name they came under.
#[derive(Default)]
struct Report {
    /// `prompt_tokens`: cached ones included.
    prompt: Option<u64>,
    completion: Option<u64>,
    /// `input_tokens`: OpenAI includes the cached ones, Anthropic does not.
    input: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cached: Option<u64>,
    reasoning: Option<u64>,
    cache_read: Option<u64>,
    cache_creation: Option<u64>,
    odd: bool,
    /// A value that is no count was passed over, and it holds brackets or quotes: whoever looks at
    /// nothing but those may find another end of the object.
    rough: bool,
}

/// Whose details an inner object of a usage report holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Details {
    None,
    Prompt,
    Completion,
}

impl Report {
    fn read<'a>(&mut self, object: Cursor<'a>) -> Option<Cursor<'a>> {
        let mut cursor = object;
        cursor.expect(b'{')?;
        let mut of = Details::None;
        let mut fresh = true;
        while let Some(behind) = self.main_count(cursor.rest, fresh) {
            (cursor.rest, fresh) = (behind, false);
        }
        loop {
            let Some(key) = cursor.member(fresh)? else {
                // Details do not nest, so this goes one level deep.
                if of == Details::None {
                    return Some(cursor);
                }
                (of, fresh) = (Details::None, false);
                continue;
            };
            fresh = false;
            let (inner, mut field) = key.with(|name| self.place(of, name));
            if let Some(inner) = inner
                && cursor.byte() == b'{'
            {
                cursor.step();
                (of, fresh) = (inner, true);
                continue;
            }
            if let Some(field) = &mut field
                && let Some((tokens, behind)) = short_count(cursor.rest)
            {
                **field = Some(tokens);
                cursor.rest = behind;
                continue;
            }
            let value = cursor.value()?;
            match (field, count(value)) {
                (Some(field), Count::Some(tokens)) => *field = Some(tokens),
                (_, Count::Some(_) | Count::Absent) => {}
                (field, Count::Odd) => {
                    self.odd |= field.is_some();
                    self.rough |= value.first() != Some(&b'"')
                        && value.iter().any(|byte| matches!(byte, b'"' | b'{' | b'['));
                }
            }
        }
    }

    /// Takes one of the three counts that OpenAI's dialects begin with, as they are nearly always
    /// written, and gives what stands behind it. A name that is compared with few need not be found
    /// out first.
    #[inline(always)]
    fn main_count<'a>(&mut self, rest: &'a [u8], fresh: bool) -> Option<&'a [u8]> {
        let rest = if fresh { rest } else { rest.strip_prefix(b",")? };
        let (field, value) = if let Some(value) = rest.strip_prefix(b"\"prompt_tokens\":") {
            (&mut self.prompt, value)
        } else if let Some(value) = rest.strip_prefix(b"\"completion_tokens\":") {
            (&mut self.completion, value)
        } else {
            (&mut self.total, rest.strip_prefix(b"\"total_tokens\":")?)
        };
        let (tokens, behind) = short_count(value)?;
        *field = Some(tokens);
        Some(behind)
    }

    /// What a member means: an object of details, or a count.
    fn place(&mut self, of: Details, key: &[u8]) -> (Option<Details>, Option<&mut Option<u64>>) {
        let field = match (of, key) {
            (Details::None, b"prompt_tokens") => &mut self.prompt,
            (Details::None, b"completion_tokens") => &mut self.completion,
            (Details::None, b"input_tokens") => &mut self.input,
            (Details::None, b"output_tokens") => &mut self.output,
            (Details::None, b"total_tokens") => &mut self.total,
            (Details::None, b"cache_read_input_tokens") => &mut self.cache_read,
            (Details::None, b"cache_creation_input_tokens") => &mut self.cache_creation,
            (Details::None | Details::Prompt, b"cached_tokens")
            | (Details::None, b"prompt_cache_hit_tokens") => &mut self.cached,
            (Details::None | Details::Completion, b"reasoning_tokens") => &mut self.reasoning,
            (Details::None, b"prompt_tokens_details" | b"input_tokens_details") => {
                return (Some(Details::Prompt), None);
            }
            (Details::None, b"completion_tokens_details" | b"output_tokens_details") => {
                return (Some(Details::Completion), None);
            }
            _ => return (None, None),
        };
        (None, Some(field))
    }

    fn settle(&self) -> Option<Usage> {
        let mut prompt = self.prompt;
        if prompt.is_none() {
            prompt = self.input.map(|input| {
                let apart = self.cache_read.unwrap_or(0) + self.cache_creation.unwrap_or(0);
                let included = self.total == Some(input + self.output.unwrap_or(0));
                if included { input } else { input + apart }
            });
        }
        let mut completion = self.completion.or(self.output);
        // Some vendors count reasoning beside the completion; only then does the total say so.
        if let (Some(in_), Some(out), Some(reasoning), Some(total)) =
            (prompt, completion, self.reasoning, self.total)
            && reasoning > 0
            && total == in_ + out + reasoning
        {
            completion = Some(out + reasoning);
        }
        let mut usage = Usage {
            prompt,
            completion,
            total: self.total,
            cached: self.cached.or(self.cache_read),
            reasoning: self.reasoning,
            odd: self.odd,
        };
        let parts = usage.prompt.unwrap_or(0) + usage.completion.unwrap_or(0);
        usage.odd |= usage.total.is_some_and(|total| total < parts);
        usage.clamp();
        (usage != Usage::default()).then_some(usage)
    }
}

enum Count {
    Some(u64),
    /// `null`.
    Absent,
    Odd,
}

fn count(value: &[u8]) -> Count {
    match whole(value) {
        Some(tokens) if tokens <= TOKENS_MAX => Count::Some(tokens),
        None if value == b"null" => Count::Absent,
        _ => Count::Odd,
    }
}

/// A count as it is nearly always written, and what stands behind it: a few digits (the largest
/// such number is below [`TOKENS_MAX`]) before a comma or the end of the object.
#[inline(always)]
fn short_count(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (mut tokens, mut rest) = (0, bytes);
    for _ in 0..9 {
        let (&byte, behind) = rest.split_first()?;
        let digit = byte.wrapping_sub(b'0');
        if digit >= 10 {
            break;
        }
        tokens = tokens * 10 + u64::from(digit);
        rest = behind;
    }
    (rest.len() < bytes.len() && matches!(rest, [b',' | b'}', ..])).then_some((tokens, rest))
}

/// A non-negative whole number below 10^18, written with digits only.
fn whole(token: &[u8]) -> Option<u64> {
    if token.is_empty() || token.len() > 18 {
        return None;
    }
    token.iter().try_fold(0, |sum: u64, &byte| {
        let digit = byte.wrapping_sub(b'0');
        // At most eighteen digits, so this stays below 2^64.
        (digit < 10).then(|| sum * 10 + u64::from(digit))
    })
}

/// What a response, or one event of it, was found to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gist {
    pub usage: Option<Usage>,
    /// The usage stands at top level, as in OpenAI's extra chunk.
    pub usage_top: bool,
    /// Elements of `choices`.
    pub choices: u32,
    /// Choices by their index, modulo 128, and those of them that say why they ended.
    pub seen: u128,
    pub finished: u128,
    /// Choices, or other deltas, that carry content.
    pub said: u32,
    /// Unescaped UTF-8 bytes and characters of generated text.
    pub text_bytes: u64,
    pub text_chars: u64,
    /// Pieces that the text comes in, and where in the document the last one lies.
    pub texts: u32,
    pub text_span: Span,
    /// Generated tokens, where the engine lists them one by one.
    pub listed: u32,
    pub error: bool,
    /// The member `type`.
    pub event: Type,
    /// A native endpoint says that this is the end.
    pub stop: bool,
    /// Native endpoints give counts as plain members.
    prompt: Option<u64>,
    made: Option<u64>,
    /// State of the choice (or the whole document) that is being read.
    here: bool,
    index: u32,
    finish: bool,
}

/// The `type` of an event in the dialects that have one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Type {
    #[default]
    None,
    Error,
    /// `response.failed`.
    Failed,
    /// The last event of a response.
    Last,
    /// The audio itself, not its transcript: its `delta` is no text.
    Audio,
    Other,
}

impl Type {
    pub fn named(name: &[u8]) -> Type {
        match name {
            b"" => Type::None,
            b"error" => Type::Error,
            b"message_stop"
            | b"response.completed"
            | b"response.incomplete"
            | b"response.cancelled" => Type::Last,
            b"response.failed" => Type::Failed,
            b"response.audio.delta" | b"response.output_audio.delta" => Type::Audio,
            _ => Type::Other,
        }
    }
}

/// A container whose members mean something. Lists are roles of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Top,
    Choices,
    Choice,
    /// `delta` or `message` of a choice, `delta` of an event, `token` of TGI.
    Delta,
    /// Something generated with inner structure: content parts, tool calls, output items.
    Words,
    WordList,
    /// `response` or `message` of an event, `message` of Ollama.
    Reply,
    /// Anthropic's `content_block`.
    Block,
    /// DashScope's `output`.
    Output,
    Pass,
}

/// What a value means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Pass,
    Choices,
    Choice,
    Delta,
    /// Generated text, or a structure of it.
    Text,
    /// Generated, but not text.
    Mark,
    Finish,
    Index,
    Listed,
    Usage,
    UsageTop,
    Type,
    Object,
    Error,
    Reply,
    Message,
    Block,
    Output,
    Prompt,
    Made,
    Stop,
}

impl Role {
    const fn is_list(self) -> bool {
        matches!(self, Role::Choices | Role::WordList)
    }

    const fn close(self) -> u8 {
        if self.is_list() { b']' } else { b'}' }
    }

    const fn element(self) -> Slot {
        match self {
            Role::Choices => Slot::Choice,
            // A string in a list is a label more often than text.
            Role::WordList => Slot::Text,
            _ => Slot::Pass,
        }
    }

    fn member(self, key: &[u8]) -> Slot {
        match self {
            Role::Top => match key {
                b"choices" => Slot::Choices,
                b"usage" => Slot::UsageTop,
                b"type" => Slot::Type,
                b"object" => Slot::Object,
                b"error" => Slot::Error,
                b"delta" | b"token" => Slot::Delta,
                b"response" => Slot::Reply,
                b"message" => Slot::Message,
                b"content" => Slot::Text,
                b"content_block" => Slot::Block,
                b"output" => Slot::Output,
                b"tokens_evaluated" | b"prompt_eval_count" => Slot::Prompt,
                b"tokens_predicted" | b"eval_count" => Slot::Made,
                b"stop" | b"done" | b"generated_text" => Slot::Stop,
                _ => Slot::Pass,
            },
            Role::Choice => match key {
                b"delta" | b"message" => Slot::Delta,
                b"index" => Slot::Index,
                b"finish_reason" => Slot::Finish,
                b"text" => Slot::Text,
                b"token_ids" => Slot::Listed,
                b"usage" => Slot::Usage,
                _ => Slot::Pass,
            },
            Role::Delta => match key {
                b"content" | b"reasoning_content" | b"reasoning" | b"refusal" | b"tool_calls"
                | b"function_call" | b"text" | b"thinking" | b"partial_json" => Slot::Text,
                b"audio" | b"images" | b"reasoning_details" => Slot::Mark,
                b"stop_reason" => Slot::Finish,
                _ => Slot::Pass,
            },
            Role::Words => match key {
                b"text" | b"arguments" | b"name" | b"content" | b"function" | b"summary"
                | b"thinking" | b"refusal" | b"reasoning" | b"custom" | b"input" => Slot::Text,
                _ => Slot::Pass,
            },
            Role::Reply => match key {
                b"usage" => Slot::Usage,
                b"error" => Slot::Error,
                b"content" | b"thinking" | b"tool_calls" => Slot::Text,
                _ => Slot::Pass,
            },
            Role::Block => match key {
                b"name" | b"text" | b"thinking" => Slot::Text,
                _ => Slot::Pass,
            },
            Role::Output => match key {
                b"choices" => Slot::Choices,
                b"text" => Slot::Text,
                b"finish_reason" => Slot::Finish,
                _ => Slot::Pass,
            },
            Role::Choices | Role::WordList | Role::Pass => Slot::Pass,
        }
    }
}

impl Slot {
    /// The role of a container that stands here; `None` if its inside is of no interest.
    const fn opens(self, object: bool) -> Option<Role> {
        match (self, object) {
            (Slot::Choices, false) => Some(Role::Choices),
            (Slot::Choice, true) => Some(Role::Choice),
            (Slot::Delta, true) => Some(Role::Delta),
            (Slot::Text, true) => Some(Role::Words),
            (Slot::Text | Slot::Output, false) => Some(Role::WordList),
            (Slot::Reply | Slot::Message, true) => Some(Role::Reply),
            (Slot::Block, true) => Some(Role::Block),
            (Slot::Output, true) => Some(Role::Output),
            _ => None,
        }
    }

    /// Whether a string here is generated text, for its length.
    const fn is_text(self) -> bool {
        matches!(self, Slot::Text | Slot::Delta | Slot::Reply)
    }

    const fn is_usage(self) -> bool {
        matches!(self, Slot::Usage | Slot::UsageTop)
    }

    /// Whether a value here is read once it is complete.
    const fn is_kept(self) -> bool {
        !matches!(self, Slot::Pass | Slot::Choice | Slot::Choices | Slot::Message)
            && !self.is_text()
    }
}

impl Gist {
    /// A value starts in a container of this role.
    fn begin(&mut self, parent: Role) {
        if parent == Role::Choices {
            self.choices = self.choices.saturating_add(1);
        }
    }

    fn enter(&mut self, parent: Role, inner: Role) {
        if inner == Role::Choice {
            self.flush();
            (self.index, self.finish) = (0, false);
        }
        // One part of a list, as a tool call's first piece, is content even before it has text.
        self.here |= parent == Role::WordList;
    }

    fn leave(&mut self, role: Role) {
        if role == Role::Choice {
            let bit = 1 << (self.index % 128);
            self.seen |= bit;
            self.finished |= if self.finish { bit } else { 0 };
            self.finish = false;
            self.flush();
        }
    }

    fn flush(&mut self) {
        self.said = self.said.saturating_add(u32::from(self.here));
        self.here = false;
    }

    fn text(&mut self, (bytes, chars): (u64, u64), span: Span) {
        self.text_bytes = self.text_bytes.saturating_add(bytes);
        self.text_chars = self.text_chars.saturating_add(chars);
        if bytes > 0 {
            self.here = true;
            self.texts = self.texts.saturating_add(1);
            self.text_span = span;
        }
    }

    /// A string that is no text; `raw` is as written, without its quotes.
    fn string(&mut self, slot: Slot, raw: &[u8]) {
        match slot {
            Slot::Finish => self.finish |= !raw.is_empty() && raw != b"null",
            Slot::Type => self.event = Type::named(raw),
            Slot::Object => self.error |= raw == b"error",
            Slot::Error => self.error |= !raw.is_empty(),
            Slot::Stop => self.stop = true,
            _ => {}
        }
    }

    /// Reads a usage object where it stands.
    #[inline]
    fn usage(&mut self, slot: Slot, cursor: &mut Cursor<'_>) -> Option<()> {
        let mut report = Report::default();
        if let Some(behind) = report.read(*cursor)
            && !report.rough
            && cursor.rest.len() - behind.rest.len() <= KEPT_BYTES_MAX
        {
            *cursor = behind;
            self.report(slot, report.settle());
        } else {
            // By its brackets alone it may be sound, or end somewhere else.
            self.container(slot, cursor.value()?);
        }
        Some(())
    }

    fn report(&mut self, slot: Slot, usage: Option<Usage>) {
        if usage.is_some() {
            self.usage = usage;
            self.usage_top = slot == Slot::UsageTop;
        }
    }

    /// A container as written whose inside was not walked.
    fn container(&mut self, slot: Slot, whole: &[u8]) {
        let object = whole.first() == Some(&b'{');
        let inside = whole.get(1..whole.len().saturating_sub(1)).unwrap_or_default().trim_ascii();
        let kept = whole.len() <= KEPT_BYTES_MAX;
        match slot {
            Slot::Usage | Slot::UsageTop if object && kept => {
                self.report(slot, Usage::from_json(whole));
            }
            Slot::Error => self.error |= object && !inside.is_empty(),
            Slot::Mark => self.here |= !inside.is_empty(),
            Slot::Listed if !inside.is_empty() && kept => {
                // There are not more than bytes.
                let commas = inside.iter().filter(|&&byte| byte == b',').count() as u32;
                self.listed = self.listed.saturating_add(commas.saturating_add(1));
            }
            _ => {}
        }
    }

    /// A number, `true`, `false` or `null`.
    fn scalar(&mut self, slot: Slot, token: &[u8]) {
        let number = || whole(token).filter(|&number| number <= TOKENS_MAX);
        match slot {
            // The modulus comes later; an index that is no index counts as zero.
            Slot::Index => self.index = number().unwrap_or(0) as u32,
            Slot::Prompt => self.prompt = number(),
            Slot::Made => self.made = number(),
            Slot::Stop => self.stop |= token == b"true",
            _ => {}
        }
    }

    /// The document is complete.
    fn close(&mut self) {
        if self.finish {
            // A reason outside of any choice ends the only answer there is.
            self.seen |= 1;
            self.finished |= 1;
        }
        self.flush();
        if self.event == Type::Audio {
            (self.text_bytes, self.text_chars) = (0, 0);
        }
        if self.usage.is_none() && (self.prompt.is_some() || self.made.is_some()) {
            let (prompt, completion) = (self.prompt, self.made);
            self.usage = Some(Usage { prompt, completion, ..Usage::default() });
        }
    }
}

/// Walks a whole document that is an object, into a gist that is as new. `None`, and the gist as it
/// was, if it is no object, is cut, or its brackets, quotes, commas and colons do not fit; the
/// inside of values that mean nothing is checked for brackets and quotes only. One pass, no
/// allocation.
pub(crate) fn read(document: &[u8], gist: &mut Gist) -> Option<()> {
    let sound = walk(document, gist);
    if sound.is_none() {
        *gist = Gist::default();
    }
    sound
}

/// How the choices begin in the answers of most that speak OpenAI's chat dialect: six steps of the
/// walk, taken at once.
const FIRST_CHOICE: &[u8] = b"[{\"index\":0,\"message\":{\"role\":\"assistant\"";

fn walk(document: &[u8], gist: &mut Gist) -> Option<()> {
    let mut cursor = Cursor::new(document);
    cursor.space();
    cursor.expect(b'{')?;
    let mut outer = [Role::Top; OPEN_MAX];
    let mut depth = 0;
    let mut role = Role::Top;
    let mut fresh = true;
    loop {
        let slot = if role.is_list() {
            cursor.element(fresh)?.then(|| {
                gist.begin(role);
                role.element()
            })
        } else {
            cursor.member(fresh)?.map(|key| key.with(|name| role.member(name)))
        };
        fresh = false;
        let Some(slot) = slot else {
            gist.leave(role);
            if depth == 0 {
                break;
            }
            depth -= 1;
            role = outer[depth];
            continue;
        };
        match cursor.byte() {
            b'"' if slot == Slot::Pass => cursor.skip_string()?,
            b'"' => {
                let text = cursor.string()?;
                if slot.is_text() {
                    if role != Role::WordList {
                        let end = document.len() - cursor.rest.len() - 1;
                        gist.text(text.measure(), Span { start: end - text.raw.len(), end });
                    }
                } else {
                    gist.string(slot, text.raw);
                }
            }
            b'[' if slot == Slot::Choices
                && depth == 0
                && let Some(behind) = cursor.rest.strip_prefix(FIRST_CHOICE) =>
            {
                gist.enter(role, Role::Choices);
                gist.begin(Role::Choices);
                gist.enter(Role::Choices, Role::Choice);
                gist.enter(Role::Choice, Role::Delta);
                outer[..3].copy_from_slice(&[Role::Top, Role::Choices, Role::Choice]);
                (depth, role) = (3, Role::Delta);
                cursor.rest = behind;
            }
            open @ (b'{' | b'[') => match slot.opens(open == b'{') {
                Some(inner) if depth < OPEN_MAX => {
                    gist.enter(role, inner);
                    outer[depth] = role;
                    depth += 1;
                    role = inner;
                    fresh = true;
                    cursor.step();
                }
                _ if open == b'{' && slot.is_usage() => gist.usage(slot, &mut cursor)?,
                _ => gist.container(slot, cursor.value()?),
            },
            _ => {
                let token = cursor.value()?;
                gist.scalar(slot, token);
            }
        }
    }
    cursor.space();
    gist.close();
    cursor.rest.is_empty().then_some(())
}

/// Follows a JSON response body of any length as it arrives, and never fails: a body that is no
/// JSON yields nothing, and a broken one what it held before it broke. Sees what [`read`] sees and
/// forgives what it forgives, in every cut.
///
/// Costs one pass, a third of a nanosecond a byte where nothing is of interest (embeddings), and no
/// memory beyond some hundred bytes and what is kept of the usage object (4 KiB at most). Not for
/// event streams: see [`crate::pure::sse::Scanner`].
#[derive(Clone, Debug)]
pub struct PlainScanner {
    gist: Gist,
    step: Step,
    /// Roles of the open containers that are looked into, the document's first.
    roles: [Role; OPEN_MAX + 1],
    depth: usize,
    /// Nothing has been read yet in the innermost one.
    fresh: bool,
    /// What the value that is being read means.
    slot: Slot,
    /// What has come of a name, or of a value that is read when it is complete.
    kept: Vec<u8>,
    measure: Measure,
    /// The string that is being read has escapes; the last byte was a backslash.
    escaped: bool,
    backslash: bool,
    brackets: Brackets,
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Start,
    /// A comma, an end, or the first thing in a container.
    Next,
    NameStart,
    Name,
    Colon,
    Value,
    String,
    Scalar,
    /// Within a container that is not looked into, and within a string in it.
    Brackets,
    InnerString,
    End,
    Broken,
}

/// What a plain response was found to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plain {
    pub usage: Option<Usage>,
    /// The body has a top-level `error` that is an object or a text, or says that it is an error.
    pub error: bool,
    /// Unescaped UTF-8 bytes of generated text, and its characters: for estimates.
    pub text_bytes: u64,
    pub text_chars: u64,
    /// The body is one JSON object from end to end.
    pub whole: bool,
}

impl Default for PlainScanner {
    #[inline]
    fn default() -> PlainScanner {
        PlainScanner::new()
    }
}

impl PlainScanner {
    #[inline]
    pub fn new() -> PlainScanner {
        PlainScanner {
            gist: Gist::default(),
            step: Step::Start,
            roles: [Role::Pass; OPEN_MAX + 1],
            depth: 0,
            fresh: true,
            slot: Slot::Pass,
            kept: Vec::new(),
            measure: Measure::default(),
            escaped: false,
            backslash: false,
            brackets: Brackets::default(),
        }
    }

    /// Takes the next bytes of the body.
    pub fn push(&mut self, bytes: &[u8]) {
        // Most bodies come whole, and walking is faster than following.
        if self.step == Step::Start
            && bytes.trim_ascii_end().ends_with(b"}")
            && read(bytes, &mut self.gist).is_some()
        {
            self.step = Step::End;
            return;
        }
        let mut rest = bytes;
        while !rest.is_empty() && self.step != Step::Broken {
            match self.turn(rest) {
                // A turn takes no more than there is.
                Some(used) => rest = rest.get(used..).unwrap_or_default(),
                None => self.step = Step::Broken,
            }
        }
    }

    /// No more bytes come.
    pub fn finish(&mut self) -> Plain {
        self.gist.close();
        let Gist { usage, error, text_bytes, text_chars, .. } = self.gist;
        Plain { usage, error, text_bytes, text_chars, whole: self.step == Step::End }
    }

    /// As [`read`] gives it, but that it does not say where the text lies.
    pub(crate) fn gist(mut self) -> Option<Gist> {
        self.gist.close();
        (self.step == Step::End).then_some(self.gist)
    }

    /// The role of the innermost container that is looked into.
    fn role(&self) -> Role {
        self.depth.checked_sub(1).map_or(Role::Pass, |inner| self.roles[inner])
    }

    /// Reads on from the first of some bytes and says how many it used: at least one, or none and
    /// the next step is another one. `None` if they do not fit.
    fn turn(&mut self, rest: &[u8]) -> Option<usize> {
        let byte = *rest.first()?;
        match self.step {
            Step::Start | Step::Next | Step::NameStart | Step::Colon | Step::Value | Step::End
                if matches!(byte, b' ' | b'\t' | b'\n' | b'\r') =>
            {
                Some(1)
            }
            Step::Start => {
                (byte == b'{').then(|| self.enter(Role::Top))?;
                Some(1)
            }
            Step::Next => self.separator(byte),
            Step::NameStart => {
                self.step = Step::Name;
                (byte == b'"').then(|| self.begin_kept())?;
                Some(1)
            }
            Step::Name => Some(self.name(rest)),
            Step::Colon => {
                self.step = Step::Value;
                (byte == b':').then_some(1)
            }
            Step::Value => self.value(byte),
            Step::String => Some(self.string(rest)),
            Step::Scalar => {
                let len = peek::scalar_len(rest);
                self.keep(&rest[..len]);
                if len < rest.len() {
                    self.gist.scalar(self.slot, &self.kept);
                    self.step = Step::Next;
                }
                Some(len)
            }
            Step::Brackets => self.bracket(rest),
            Step::InnerString => {
                let (len, ended) = self.string_len(rest);
                let used = len + usize::from(ended);
                self.keep_inner(&rest[..used]);
                if ended {
                    self.step = Step::Brackets;
                }
                Some(used)
            }
            Step::End | Step::Broken => None,
        }
    }

    fn enter(&mut self, role: Role) {
        self.roles[self.depth] = role;
        self.depth += 1;
        self.fresh = true;
        self.step = Step::Next;
    }

    fn separator(&mut self, byte: u8) -> Option<usize> {
        let role = self.role();
        if byte == role.close() {
            self.gist.leave(role);
            self.depth -= 1;
            self.fresh = false;
            self.step = if self.depth == 0 { Step::End } else { Step::Next };
            return Some(1);
        }
        let comma = !std::mem::replace(&mut self.fresh, false);
        if comma && byte != b',' {
            return None;
        }
        if role.is_list() {
            self.slot = role.element();
            self.step = Step::Value;
        } else {
            self.step = Step::NameStart;
        }
        Some(usize::from(comma))
    }

    fn name(&mut self, rest: &[u8]) -> usize {
        let (len, ended) = self.string_len(rest);
        let part = &rest[..len];
        if !ended {
            self.keep(part);
            return len;
        }
        let raw = if self.kept.is_empty() {
            part
        } else {
            self.keep(part);
            &self.kept
        };
        let name = peek::Text { raw, escaped: self.escaped };
        self.slot = name.with(|name| self.role().member(name));
        self.step = Step::Colon;
        len + 1
    }

    fn value(&mut self, byte: u8) -> Option<usize> {
        let role = self.role();
        self.gist.begin(role);
        self.begin_kept();
        match byte {
            b'"' => {
                self.measure = Measure::default();
                self.step = Step::String;
                Some(1)
            }
            b'{' | b'[' => match self.slot.opens(byte == b'{') {
                Some(inner) if self.depth <= OPEN_MAX => {
                    self.gist.enter(role, inner);
                    self.enter(inner);
                    Some(1)
                }
                _ => {
                    self.brackets = Brackets::default();
                    self.step = Step::Brackets;
                    Some(0)
                }
            },
            _ => {
                self.step = Step::Scalar;
                peek::starts_scalar(byte).then_some(0)
            }
        }
    }

    fn string(&mut self, rest: &[u8]) -> usize {
        let (len, ended) = self.string_len(rest);
        let part = &rest[..len];
        let is_text = self.slot.is_text();
        if !is_text {
            self.keep_inner(part);
        } else if self.role() != Role::WordList {
            self.measure.push(part);
        }
        if !ended {
            return len;
        }
        if is_text {
            self.gist.text((self.measure.bytes, self.measure.chars), Span::default());
        } else {
            self.gist.string(self.slot, &self.kept);
        }
        self.step = Step::Next;
        len + 1
    }

    /// Length of what `rest` has of the string that is being read, and whether its end follows.
    fn string_len(&mut self, rest: &[u8]) -> (usize, bool) {
        let mut at = usize::from(std::mem::take(&mut self.backslash));
        while let Some(step) = rest.get(at..).and_then(peek::quote_or_backslash) {
            at += step;
            if rest.get(at) == Some(&b'"') {
                return (at, true);
            }
            self.escaped = true;
            self.backslash = at + 1 == rest.len();
            at += 2;
        }
        (rest.len(), false)
    }

    fn bracket(&mut self, rest: &[u8]) -> Option<usize> {
        let Some(len) = peek::bracket_or_quote(rest) else {
            self.keep_inner(rest);
            return Some(rest.len());
        };
        let used = len + 1;
        self.keep_inner(&rest[..used]);
        if rest[len] == b'"' {
            self.step = Step::InnerString;
        } else if self.brackets.turn(rest[len])? {
            self.gist.container(self.slot, &self.kept);
            self.step = Step::Next;
        }
        Some(used)
    }

    fn begin_kept(&mut self) {
        self.kept.clear();
        self.escaped = false;
    }

    fn keep_inner(&mut self, part: &[u8]) {
        if self.slot.is_kept() {
            self.keep(part);
        }
    }

    fn keep(&mut self, part: &[u8]) {
        // One more than is ever used, so that what is longer can be told.
        let room = (KEPT_BYTES_MAX + 1).saturating_sub(self.kept.len());
        self.kept.extend_from_slice(&part[..part.len().min(room)]);
    }
}

#[cfg(test)]
mod tests;
