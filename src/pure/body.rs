//! One resumable pass over a request body as it arrives, for the few members that policy needs, and
//! the edits that change those members and not one byte else.
//!
//! Two readers of one body must not find two models in it, or the one that was allowed and charged
//! is not the one that answers. So the pass is strict where readers are known to differ: JSON to the
//! letter, no member twice at top level (escaped names count as what they mean), and no look-alike
//! of an inspected name (`Model`), which engines written in Go take for the name itself.

use std::borrow::Cow;
use std::ops::Deref;

use crate::pure::json::{self, Kind, Span, Walker, Watch};
use crate::pure::lanes::{ONES, TOPS};
use crate::pure::multipart;

/// Longest model name, in bytes: twice the longest file name, for models named by a path.
pub const MODEL_BYTES_MAX: usize = 512;

/// Most members of the top-level object. The largest known request has about forty.
pub const MEMBERS_MAX: usize = 512;

/// Which members mean what. One for each family of paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BodyKind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// Anthropic's `/v1/messages`
    Messages,
    /// Whatever else carries a model: embeddings, rerank, audio, images, moderations. Limits and
    /// counts are read where they are well-formed, and nobody's business where they are not.
    Other,
}

impl BodyKind {
    /// By the end of a path without query, so that base paths do not matter.
    pub fn of_path(path: &str) -> BodyKind {
        let path = path.strip_suffix('/').unwrap_or(path);
        if path.ends_with("/chat/completions") {
            BodyKind::Chat
        } else if path.ends_with("/completions") {
            BodyKind::Completions
        } else if path.ends_with("/responses") {
            BodyKind::Responses
        } else if path.ends_with("/messages") {
            BodyKind::Messages
        } else {
            BodyKind::Other
        }
    }

    /// Whether `stream_options.include_usage` means something here.
    const fn has_usage_option(self) -> bool {
        matches!(self, BodyKind::Chat | BodyKind::Completions)
    }
}

/// Why a body is refused with status 400.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyFault {
    /// Whole sentences for the client. Quotes no more of the body than a member's name.
    pub message: Cow<'static, str>,
    /// The member at fault, as OpenAI's error object names it.
    pub param: Option<&'static str>,
    /// Where in the body.
    pub offset: u64,
}

impl BodyFault {
    fn new(message: &'static str, param: Option<&'static str>, at: usize) -> BodyFault {
        // A usize has at most 64 bits.
        BodyFault { message: Cow::Borrowed(message), param, offset: at as u64 }
    }

    #[cold]
    fn count(field: Field, at: usize) -> BodyFault {
        BodyFault {
            message: Cow::Owned(format!(
                "`{}` must be an integer that is not negative and not too large.",
                field.name()
            )),
            param: Some(field.name()),
            offset: at as u64,
        }
    }

    fn json(fault: json::Fault) -> BodyFault {
        BodyFault {
            message: Cow::Owned(format!("The request body is not valid JSON: {fault}.")),
            param: None,
            offset: fault.at as u64,
        }
    }

    fn form(fault: multipart::Fault) -> BodyFault {
        BodyFault {
            message: Cow::Owned(format!(
                "The request body is not a valid form: {} (byte {}).",
                fault.text, fault.at
            )),
            param: None,
            offset: fault.at as u64,
        }
    }
}

/// The pass. Feed it whenever bytes have come, then [`Inspector::finish`].
///
/// Each byte is looked at once, at 2 to 4 bytes per nanosecond for text; beside the body it needs
/// less than 8 KiB, of which it allocates a list of names and what is cut of one.
#[derive(Clone, Debug)]
pub struct Inspector {
    kind: BodyKind,
    form: Form,
}

#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each request, and it stays where it is")]
enum Form {
    Json { walker: Walker, members: Members },
    Multipart(multipart::Scanner),
}

impl Inspector {
    /// For a JSON body.
    pub fn new(kind: BodyKind) -> Inspector {
        let members = Members { kind, ..Members::default() };
        Inspector { kind, form: Form::Json { walker: Walker::default(), members } }
    }

    /// For a `multipart/form-data` body; `boundary` as [`multipart::boundary`] gives it.
    pub fn multipart(kind: BodyKind, boundary: &[u8]) -> Inspector {
        Inspector { kind, form: Form::Multipart(multipart::Scanner::new(boundary)) }
    }

    /// Looks at what is new. `body_so_far` is everything received so far, from the first byte.
    /// After a fault the inspector is of no more use.
    pub fn feed(&mut self, body_so_far: &[u8]) -> Result<(), BodyFault> {
        match &mut self.form {
            Form::Multipart(scanner) => scanner.feed(body_so_far).map_err(BodyFault::form),
            Form::Json { walker, members } => members.walk(walker, body_so_far),
        }
    }

    /// Says that `body` is all. Gives what was found, or why the body is refused; the inspector is
    /// then of no more use.
    pub fn finish(&mut self, body: &[u8]) -> Result<Inspected, BodyFault> {
        match &mut self.form {
            Form::Multipart(scanner) => {
                let fields = scanner.finish(body).map_err(BodyFault::form)?;
                Inspected::of_form(self.kind, &fields, body)
            }
            Form::Json { walker, members } => {
                // As a rule all of it has been.
                if walker.offset() < body.len() {
                    members.walk(walker, body)?;
                }
                walker.finish(&mut Probe { body, members }).map_err(BodyFault::json)?;
                Inspected::of_members(members, body)
            }
        }
    }
}

/// What policy may know of a body, and what edits need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspected {
    /// The model as written: in JSON with its quotes, in a form the bare text. Always valid, not
    /// empty, without control characters and at most [`MODEL_BYTES_MAX`] long when unescaped.
    pub model: Option<Span>,
    pub stream: Option<bool>,
    pub include_usage: Option<bool>,
    /// The `stream_options` object, or the `null` in its place.
    pub stream_options: Option<Span>,
    /// `max_completion_tokens` or else `max_tokens`; `max_output_tokens` for responses.
    pub max_tokens: Option<u64>,
    pub n: Option<u64>,
    /// The `user` as written, if it is a string.
    pub user: Option<Span>,
    /// The whole value of `messages`, `prompt` or `input`, as written.
    pub prompt: Option<Span>,
    /// Everything that becomes prompt: also `system`, `tools`, `documents` and the like, in the
    /// body's order.
    pub parts: Parts,
    /// Bytes of all of it.
    pub prompt_bytes: u64,
    /// How many of them lie in `data:` URLs: pictures and sound, which are no text.
    pub media_bytes: u64,
    kind: BodyKind,
    edits: Edits,
}

/// A list of parts, which is a slice to its readers. Allocates for more than most requests have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    count: usize,
    few: [Part; Parts::FEW],
    /// All of them, where they are more than a few.
    many: Vec<Part>,
}

impl Parts {
    /// Messages, and tools or a system prompt.
    const FEW: usize = 2;

    fn push(&mut self, part: Part) {
        match self.few.get_mut(self.count) {
            Some(slot) => *slot = part,
            None if self.many.is_empty() => self.many = [&self.few[..], &[part]].concat(),
            None => self.many.push(part),
        }
        self.count += 1;
    }
}

impl Deref for Parts {
    type Target = [Part];

    fn deref(&self) -> &[Part] {
        if self.many.is_empty() { &self.few[..self.count] } else { &self.many }
    }
}

/// A value that becomes prompt, as written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub kind: PartKind,
    pub span: Span,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PartKind {
    /// A conversation: JSON objects with a role and content (or, as `input`, bare text).
    Messages,
    /// JSON objects that say what the model may call.
    Tools,
    /// A JSON string, or several: `prompt`, `system`, `documents`.
    #[default]
    Text,
    /// Text of a form, which is no JSON.
    Form,
}

/// Where edits go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edits {
    Json {
        /// Behind the opening brace of the whole.
        object: usize,
        options: Options,
    },
    Form {
        model_length: Option<Span>,
    },
}

/// What `stream_options` looks like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Options {
    #[default]
    Absent,
    Null(Span),
    /// An object without `include_usage`; `at` is behind its opening brace.
    Without {
        at: usize,
        empty: bool,
    },
    /// An object with this value of `include_usage`.
    With(Span),
}

impl Inspected {
    /// The model, unescaped. `body` is the inspected one. Allocates if there is an escape in it.
    pub fn model_str<'a>(&self, body: &'a [u8]) -> Option<Cow<'a, str>> {
        self.model.map(|span| self.text(span, body))
    }

    /// The user, unescaped; lone surrogates become U+FFFD.
    pub fn user_str<'a>(&self, body: &'a [u8]) -> Option<Cow<'a, str>> {
        self.user.map(|span| self.text(span, body))
    }

    /// The fault of a body that needs a model and has none (absent, or `null`).
    pub fn require_model(&self) -> Result<Span, BodyFault> {
        let fault = || BodyFault::new("You must provide a model parameter.", Some("model"), 0);
        self.model.ok_or_else(fault)
    }

    /// Whether an answer would be a stream that ends with a usage chunk anyway.
    pub fn asks_usage(&self) -> bool {
        self.include_usage == Some(true)
    }

    fn text<'a>(&self, span: Span, body: &'a [u8]) -> Cow<'a, str> {
        match self.edits {
            Edits::Form { .. } => String::from_utf8_lossy(span.of(body)),
            Edits::Json { .. } => match plain(span.of(body)) {
                Cow::Borrowed(raw) => match std::str::from_utf8(raw) {
                    Ok(text) => Cow::Borrowed(text),
                    Err(_) => String::from_utf8_lossy(raw),
                },
                Cow::Owned(plain) => Cow::Owned(String::from_utf8_lossy(&plain).into_owned()),
            },
        }
    }

    fn of_members(members: &mut Members, body: &[u8]) -> Result<Inspected, BodyFault> {
        let strict = members.kind != BodyKind::Other;
        let count = |field: Field| members.count(field, body, strict);
        let n_strict = members.kind.has_usage_option();
        let max_tokens = match members.kind {
            BodyKind::Chat => {
                // Both are read, so that a malformed one is refused in any case.
                let older = count(Field::MaxTokens)?;
                count(Field::MaxCompletionTokens)?.or(older)
            }
            BodyKind::Completions | BodyKind::Messages => count(Field::MaxTokens)?,
            BodyKind::Responses => count(Field::MaxOutputTokens)?,
            BodyKind::Other => count(Field::MaxCompletionTokens)?
                .or(count(Field::MaxTokens)?)
                .or(count(Field::MaxOutputTokens)?),
        };
        let model = members.present(Field::Model);
        if let Some(Member { kind, span }) = model {
            if kind != Kind::String {
                return Err(BodyFault::new("`model` must be a string.", Some("model"), span.start));
            }
            if !is_usual_model(span.of(body)) {
                check_model(&plain(span.of(body)), span.start)?;
            }
        }
        let (options, include_usage) = members.options()?;
        Ok(Inspected {
            model: model.map(|member| member.span),
            stream: members.flag(Field::Stream, "`stream` must be a boolean.")?,
            include_usage,
            stream_options: members.fields[Field::StreamOptions as usize].map(|member| member.span),
            max_tokens,
            n: members.count(Field::N, body, n_strict)?,
            user: members
                .present(Field::User)
                .filter(|member| member.kind == Kind::String)
                .map(|member| member.span),
            prompt: members.prompt,
            parts: std::mem::take(&mut members.parts),
            prompt_bytes: members.prompt_bytes as u64,
            media_bytes: members.media_bytes as u64,
            kind: members.kind,
            edits: Edits::Json { object: members.object, options },
        })
    }

    fn of_form(
        kind: BodyKind,
        fields: &multipart::Fields,
        body: &[u8],
    ) -> Result<Inspected, BodyFault> {
        if let Some(model) = fields.model {
            check_model(model.of(body), model.start)?;
        }
        let stream = match fields.stream {
            None => None,
            Some(span) => Some(form_flag(span.of(body)).ok_or_else(|| {
                BodyFault::new("`stream` must be a boolean.", Some("stream"), span.start)
            })?),
        };
        let mut parts = Parts::default();
        if let Some(span) = fields.prompt {
            parts.push(Part { kind: PartKind::Form, span });
        }
        Ok(Inspected {
            model: fields.model,
            stream,
            include_usage: None,
            stream_options: None,
            max_tokens: None,
            n: fields.n.and_then(|span| std::str::from_utf8(span.of(body)).ok()?.parse().ok()),
            user: fields.user,
            prompt: fields.prompt,
            parts,
            prompt_bytes: fields.prompt.map_or(0, |span| span.len() as u64),
            media_bytes: 0,
            kind,
            edits: Edits::Form { model_length: fields.model_length },
        })
    }
}

/// What to change in a body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edit<'a> {
    /// The name to put in the model's place.
    pub model: Option<&'a str>,
    /// Have a stream end with a usage chunk. Does nothing to what is not a stream, because engines
    /// refuse `stream_options` there, nor where the format has no such option.
    pub ask_usage: bool,
}

/// Cut `cut` bytes at `at` and put `insert` there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Splice {
    pub at: usize,
    pub cut: usize,
    pub insert: Cow<'static, [u8]>,
}

/// A few splices of one body, in order and apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Splices {
    list: [Option<Splice>; SPLICES_MAX],
}

/// Two for a model in a form (the text and its length), two in JSON (the model and the options).
const SPLICES_MAX: usize = 2;

/// How `edit` is done to a body that was inspected. None if nothing changes: the same model is no
/// change. Allocates for a model's name only.
pub fn splices(inspected: &Inspected, body: &[u8], edit: &Edit) -> Splices {
    let mut splices = Splices::default();
    let model = edit
        .model
        .zip(inspected.model)
        .filter(|&(name, _)| inspected.model_str(body).as_deref() != Some(name));
    match inspected.edits {
        Edits::Form { model_length } => {
            if let Some((name, span)) = model {
                splices.add(span, Cow::Owned(name.as_bytes().to_vec()));
                if let Some(length) = model_length {
                    splices.add(length, Cow::Owned(name.len().to_string().into_bytes()));
                }
            }
        }
        Edits::Json { object, options } => {
            if let Some((name, span)) = model {
                splices.add(span, Cow::Owned(quote(name)));
            }
            let asks = edit.ask_usage
                && inspected.stream == Some(true)
                && inspected.kind.has_usage_option()
                && !inspected.asks_usage();
            if asks {
                let (span, insert): (Span, &'static [u8]) = match options {
                    // The object is not empty: it has a `stream`.
                    Options::Absent => {
                        (empty_at(object), br#""stream_options":{"include_usage":true},"#)
                    }
                    Options::Null(span) => (span, br#"{"include_usage":true}"#),
                    Options::Without { at, empty: true } => {
                        (empty_at(at), br#""include_usage":true"#)
                    }
                    Options::Without { at, empty: false } => {
                        (empty_at(at), br#""include_usage":true,"#)
                    }
                    Options::With(span) => (span, b"true"),
                };
                splices.add(span, Cow::Borrowed(insert));
            }
        }
    }
    splices
}

impl Splices {
    pub fn is_empty(&self) -> bool {
        self.list[0].is_none()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Splice> {
        self.list.iter().flatten()
    }

    /// The length of a body of `len` bytes once they are done.
    pub fn new_len(&self, len: usize) -> usize {
        // What is cut lies in the body, so the difference cannot go below zero.
        self.iter().fold(len, |len, splice| (len + splice.insert.len()).saturating_sub(splice.cut))
    }

    /// The edited body in pieces, for a vectored write: at most five, none empty.
    pub fn pieces<'a>(&'a self, body: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
        let tail = self.iter().last().map_or(0, |splice| splice.at + splice.cut);
        let mut kept = 0;
        self.iter()
            .flat_map(move |splice| {
                let from = std::mem::replace(&mut kept, splice.at + splice.cut);
                [body.get(from..splice.at).unwrap_or_default(), &splice.insert[..]]
            })
            .chain([body.get(tail..).unwrap_or_default()])
            .filter(|piece| !piece.is_empty())
    }

    /// Keeps the order.
    fn add(&mut self, span: Span, insert: Cow<'static, [u8]>) {
        let mut splice = Splice { at: span.start, cut: span.len(), insert };
        for slot in &mut self.list {
            match slot {
                None => {
                    *slot = Some(splice);
                    return;
                }
                Some(first) if first.at > splice.at => std::mem::swap(first, &mut splice),
                Some(_) => {}
            }
        }
    }
}

/// The edited body as one buffer.
pub fn apply(body: &[u8], splices: &Splices) -> Vec<u8> {
    let mut edited = Vec::with_capacity(splices.new_len(body.len()));
    for piece in splices.pieces(body) {
        edited.extend_from_slice(piece);
    }
    edited
}

/// The members that are read or whose length counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    StreamOptions,
    MaxTokens,
    MaxCompletionTokens,
    MaxOutputTokens,
    N,
    User,
    /// `stream_options.include_usage`
    IncludeUsage,
}

impl Field {
    const COUNT: usize = Field::IncludeUsage as usize + 1;

    const TOP: [Field; 8] = [
        Field::Model,
        Field::Stream,
        Field::StreamOptions,
        Field::MaxTokens,
        Field::MaxCompletionTokens,
        Field::MaxOutputTokens,
        Field::N,
        Field::User,
    ];

    const fn name(self) -> &'static str {
        match self {
            Field::Model => "model",
            Field::Stream => "stream",
            Field::StreamOptions => "stream_options",
            Field::MaxTokens => "max_tokens",
            Field::MaxCompletionTokens => "max_completion_tokens",
            Field::MaxOutputTokens => "max_output_tokens",
            Field::N => "n",
            Field::User => "user",
            Field::IncludeUsage => "stream_options.include_usage",
        }
    }
}

/// What a top-level member is to us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Role {
    Field(Field),
    /// `messages`, `prompt` or `input`.
    Prompt(PartKind),
    /// Becomes prompt too.
    Context(PartKind),
    #[default]
    Else,
}

impl Role {
    fn of(name: &[u8]) -> Role {
        match name {
            b"model" => Role::Field(Field::Model),
            b"stream" => Role::Field(Field::Stream),
            b"stream_options" => Role::Field(Field::StreamOptions),
            b"max_tokens" => Role::Field(Field::MaxTokens),
            b"max_completion_tokens" => Role::Field(Field::MaxCompletionTokens),
            b"max_output_tokens" => Role::Field(Field::MaxOutputTokens),
            b"n" => Role::Field(Field::N),
            b"user" => Role::Field(Field::User),
            b"messages" | b"input" => Role::Prompt(PartKind::Messages),
            b"prompt" => Role::Prompt(PartKind::Text),
            b"tools" | b"functions" => Role::Context(PartKind::Tools),
            b"system" | b"instructions" | b"suffix" | b"query" | b"queries" | b"documents"
            | b"inputs" | b"texts" | b"text_1" | b"text_2" => Role::Context(PartKind::Text),
            _ => Role::Else,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Member {
    kind: Kind,
    span: Span,
}

/// What the walk has found so far.
#[derive(Clone, Debug)]
struct Members {
    kind: BodyKind,
    /// The top-level member that is being walked.
    role: Role,
    /// The member of `stream_options` that is being walked is `include_usage`.
    in_usage: bool,
    fields: [Option<Member>; Field::COUNT],
    /// `stream_options` has some member.
    has_option: bool,
    prompt: Option<Span>,
    /// No more than there are names for them: no member comes twice.
    parts: Parts,
    prompt_bytes: usize,
    media_bytes: usize,
    /// Behind the top-level object's opening brace.
    object: usize,
    names: Names,
    fault: Option<BodyFault>,
}

impl Default for Members {
    fn default() -> Members {
        Members {
            kind: BodyKind::Other,
            role: Role::Else,
            in_usage: false,
            fields: [None; Field::COUNT],
            has_option: false,
            prompt: None,
            parts: Parts::default(),
            prompt_bytes: 0,
            media_bytes: 0,
            object: 0,
            names: Names::default(),
            fault: None,
        }
    }
}

/// Hashes of the top-level names so far. An attacker who makes two names collide has one body
/// refused.
#[derive(Clone, Debug, Default)]
struct Names {
    count: usize,
    /// A bit for each, by its hash's highest: where it is not set, the name is new.
    seen: u64,
    /// As many as requests usually have; the others are in `more`.
    few: [u64; Names::FEW],
    more: Vec<u64>,
}

impl Names {
    const FEW: usize = 16;

    const fn bit(hash: u64) -> u64 {
        1 << (hash >> 58)
    }

    fn has(&self, hash: u64) -> bool {
        self.seen & Names::bit(hash) != 0
            && (self.few.iter().take(self.count).any(|&name| name == hash)
                || self.more.contains(&hash))
    }

    fn add(&mut self, hash: u64) {
        match self.few.get_mut(self.count) {
            Some(slot) => *slot = hash,
            None => self.more.push(hash),
        }
        self.seen |= Names::bit(hash);
        self.count += 1;
    }
}

struct Probe<'a> {
    body: &'a [u8],
    members: &'a mut Members,
}

impl Watch for Probe<'_> {
    const DEPTH: usize = 2;
    const TEXT: bool = true;

    fn key(&mut self, depth: usize, key: Option<&[u8]>, span: Span) {
        let members = &mut *self.members;
        if depth == 1 {
            members.name(key, span);
        } else if members.role == Role::Field(Field::StreamOptions) {
            members.has_option = true;
            members.in_usage = key == Some(b"include_usage");
            if members.in_usage && members.fields[Field::IncludeUsage as usize].is_some() {
                members.refuse(
                    "`stream_options` holds `include_usage` twice.",
                    Some(Field::IncludeUsage.name()),
                    span.start,
                );
            }
        }
    }

    fn begin(&mut self, depth: usize, kind: Kind, start: usize) {
        if depth == 0 {
            self.members.object = start + 1;
            if kind != Kind::Object {
                self.members.refuse("The request body must be a JSON object.", None, start);
            }
        }
    }

    fn end(&mut self, depth: usize, kind: Kind, span: Span) {
        let members = &mut *self.members;
        let member = Member { kind, span };
        match (depth, members.role) {
            (1, Role::Field(field)) => members.fields[field as usize] = Some(member),
            (1, Role::Prompt(part) | Role::Context(part)) => {
                members.prompt_bytes += span.len();
                members.parts.push(Part { kind: part, span });
                if matches!(members.role, Role::Prompt(_)) && members.prompt.is_none() {
                    members.prompt = Some(span);
                }
            }
            (2, Role::Field(Field::StreamOptions)) if members.in_usage => {
                members.fields[Field::IncludeUsage as usize] = Some(member);
                members.in_usage = false;
            }
            _ => {}
        }
    }

    fn text(&mut self, span: Span) {
        if matches!(self.members.role, Role::Prompt(_) | Role::Context(_))
            && span.of(self.body).starts_with(b"\"data:")
        {
            self.members.media_bytes += span.len();
        }
    }
}

impl Members {
    /// Looks at what is new.
    fn walk(&mut self, walker: &mut Walker, body_so_far: &[u8]) -> Result<(), BodyFault> {
        let new = body_so_far.get(walker.offset()..).unwrap_or_default();
        let walked = walker.push(new, &mut Probe { body: body_so_far, members: self });
        // Where both are at fault the member's fault came first.
        self.fault.take().map_or(Ok(()), Err)?;
        walked.map_err(BodyFault::json)
    }

    /// A top-level name.
    fn name(&mut self, key: Option<&[u8]>, span: Span) {
        let Some(key) = key else {
            self.role = Role::Else;
            self.refuse("The request body has a member with too long a name.", None, span.start);
            return;
        };
        self.role = Role::of(key);
        let hash = hash(key);
        if self.names.has(hash) {
            let param = match self.role {
                Role::Field(field) => Some(field.name()),
                _ => None,
            };
            self.refuse("The request body has two members of the same name.", param, span.start);
        } else if self.names.count == MEMBERS_MAX {
            self.refuse("The request body has too many members.", None, span.start);
        } else if self.role == Role::Else
            && let Some(field) = look_alike(key)
        {
            self.refuse(
                "The request body has a member whose name differs from a known one only in case.",
                Some(field.name()),
                span.start,
            );
        }
        self.names.add(hash);
    }

    /// Keeps the first fault.
    #[cold]
    fn refuse(&mut self, message: &'static str, param: Option<&'static str>, at: usize) {
        self.fault.get_or_insert_with(|| BodyFault::new(message, param, at));
    }

    /// `null` counts as absent.
    fn present(&self, field: Field) -> Option<Member> {
        self.fields[field as usize].filter(|member| member.kind != Kind::Null)
    }

    fn flag(&self, field: Field, message: &'static str) -> Result<Option<bool>, BodyFault> {
        match self.present(field) {
            None => Ok(None),
            Some(Member { kind: Kind::True, .. }) => Ok(Some(true)),
            Some(Member { kind: Kind::False, .. }) => Ok(Some(false)),
            Some(member) => Err(BodyFault::new(message, Some(field.name()), member.span.start)),
        }
    }

    /// A count of tokens or answers. What is none is a fault if `strict`, and absent otherwise.
    #[inline]
    fn count(&self, field: Field, body: &[u8], strict: bool) -> Result<Option<u64>, BodyFault> {
        let Some(Member { kind, span }) = self.present(field) else { return Ok(None) };
        match if kind == Kind::Number { whole(span.of(body)) } else { None } {
            None if strict => Err(BodyFault::count(field, span.start)),
            value => Ok(value),
        }
    }

    fn options(&self) -> Result<(Options, Option<bool>), BodyFault> {
        let options = self.fields[Field::StreamOptions as usize];
        let Some(Member { kind, span }) = options.filter(|_| self.kind.has_usage_option()) else {
            return Ok((Options::Absent, None));
        };
        match kind {
            Kind::Null => return Ok((Options::Null(span), None)),
            Kind::Object => {}
            _ => {
                let name = Field::StreamOptions.name();
                return Err(BodyFault::new(
                    "`stream_options` must be an object.",
                    Some(name),
                    span.start,
                ));
            }
        }
        let include_usage =
            self.flag(Field::IncludeUsage, "`stream_options.include_usage` must be a boolean.")?;
        let options = match self.fields[Field::IncludeUsage as usize] {
            Some(member) => Options::With(member.span),
            None => Options::Without { at: span.start + 1, empty: !self.has_option },
        };
        Ok((options, include_usage))
    }
}

/// A JSON number that is a whole one from 0 to 2⁶⁴ − 1. `1e3` and `12.0` are whole, as engines
/// (pydantic) have it; written so, a number above 2⁵³ is not exact and is none.
fn whole(text: &[u8]) -> Option<u64> {
    // Nineteen digits fit 64 bits.
    if text.len() <= 19 && text.iter().all(u8::is_ascii_digit) {
        return Some(text.iter().fold(0, |value, byte| value * 10 + u64::from(byte - b'0')));
    }
    whole_by_value(text)
}

/// [`whole`] of a number that is written otherwise, or is none.
#[cold]
fn whole_by_value(text: &[u8]) -> Option<u64> {
    // 2⁵³
    const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
    let text = std::str::from_utf8(text).ok()?;
    text.parse().ok().or_else(|| {
        let value: f64 = text.parse().ok()?;
        let fits = (0.0..=EXACT_MAX).contains(&value) && value.fract() == 0.0;
        let digits_only = text.bytes().all(|byte| byte.is_ascii_digit());
        // Whole and at most 2^53, so the cast is exact.
        (fits && !digits_only).then_some(value as u64)
    })
}

/// What engines (pydantic) take for a boolean in a form.
fn form_flag(text: &[u8]) -> Option<bool> {
    const TRUE: [&[u8]; 6] = [b"true", b"1", b"on", b"t", b"yes", b"y"];
    const FALSE: [&[u8]; 6] = [b"false", b"0", b"off", b"f", b"no", b"n"];
    let any = |words: [&[u8]; 6]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    if any(TRUE) { Some(true) } else { any(FALSE).then_some(false) }
}

/// Whether a string, with its quotes, is a model's name that [`check_model`] need not look at.
fn is_usual_model(string: &[u8]) -> bool {
    let is_plain = |&byte: &u8| (b' '..=b'~').contains(&byte) && byte != b'\\';
    (3..=MODEL_BYTES_MAX).contains(&string.len()) && string.iter().all(is_plain)
}

#[cold]
fn check_model(plain: &[u8], at: usize) -> Result<(), BodyFault> {
    let message = match std::str::from_utf8(plain) {
        Ok("") => "`model` must not be empty.",
        Ok(name) if name.len() > MODEL_BYTES_MAX => "`model` is too long.",
        Ok(name) if name.chars().any(char::is_control) => {
            "`model` must not hold control characters."
        }
        Ok(_) => return Ok(()),
        Err(_) => "`model` is not valid Unicode.",
    };
    Err(BodyFault::new(message, Some("model"), at))
}

/// The inspected name that `key` becomes when case is folded the way Go's `encoding/json` does.
fn look_alike(key: &[u8]) -> Option<Field> {
    // Sets the top bit of a word that has a capital, and of every byte outside ASCII. Sums of two
    // bytes below 128 do not reach the next.
    let marks = |word: u64| {
        let ascii = word & !TOPS;
        let capitals =
            (ascii + ONES * (0x80 - u64::from(b'A'))) & !(ascii + ONES * (0x7F - u64::from(b'Z')));
        word | capitals
    };
    if words(key).fold(marks(last_word(key)), |any, word| any | marks(word)) & TOPS == 0 {
        return None;
    }
    let key = std::str::from_utf8(key).ok()?;
    // Two letters outside ASCII fold into it: long s and the Kelvin sign.
    let folded = key.chars().map(|c| match c {
        '\u{17F}' => 's',
        '\u{212A}' => 'k',
        _ => c.to_ascii_lowercase(),
    });
    Field::TOP.into_iter().find(|field| folded.clone().eq(field.name().chars()))
}

/// Tells names apart. Eight bytes at a time: multiply and rotate, as in `FxHash`.
fn hash(name: &[u8]) -> u64 {
    let mix =
        |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x517C_C1B7_2722_0A95);
    let hash = words(name).fold(name.len() as u64, mix);
    mix(hash, last_word(name))
}

/// A name, eight bytes at a time, but for what [`last_word`] holds.
fn words(name: &[u8]) -> impl Iterator<Item = u64> {
    name.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word))
}

/// The last eight bytes of a name, or the whole of a shorter one, some of it twice. Nothing but
/// zeros and what is in the name.
fn last_word(name: &[u8]) -> u64 {
    if let Some(word) = name.last_chunk() {
        return u64::from_le_bytes(*word);
    }
    match (name.first_chunk(), name.last_chunk()) {
        (Some(first), Some(last)) => {
            u64::from(u32::from_le_bytes(*first)) << 32 | u64::from(u32::from_le_bytes(*last))
        }
        _ => name.iter().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

const fn empty_at(at: usize) -> Span {
    Span { start: at, end: at }
}

/// The text of a JSON string, which need not be UTF-8 (lone surrogates). Allocates if there is an
/// escape in it.
fn plain(string: &[u8]) -> Cow<'_, [u8]> {
    let raw = string.get(1..string.len().saturating_sub(1)).unwrap_or_default();
    // Names are so short that a call into vector code costs more than it saves.
    if raw.contains(&b'\\') { Cow::Owned(json::unescape(raw)) } else { Cow::Borrowed(raw) }
}

/// `text` as a JSON string.
fn quote(text: &str) -> Vec<u8> {
    let mut quoted = Vec::with_capacity(text.len() + 2);
    quoted.push(b'"');
    for &byte in text.as_bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend_from_slice(&[b'\\', byte]),
            0..0x20 => quoted.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => quoted.push(byte),
        }
    }
    quoted.push(b'"');
    quoted
}

#[cfg(test)]
#[path = "body/tests.rs"]
mod tests;
