//! What each endpoint answers: request in, [`Answer`] out, without a socket or a clock.
//!
//! Shapes, names and error texts follow what vLLM 0.32 was recorded to send, OpenAI's API where
//! vLLM has no such endpoint.

use std::fmt::Write as _;

use memchr::memmem;
use serde_json::{Value, json};

use super::script::{Act, ErrorBody, Script, UsageSay};
use super::stream::{Bill, Dialect, Quoted, Stream};
use super::tally::Truth;
use super::text::{self, Said};

/// What the path and the method ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Rerank,
    Tokenize,
    Moderations,
    Images,
    Speech,
    Transcriptions,
    ImageEdits,
    Files,
    Batches,
    /// Things that only have an id: `GET`, `DELETE` or `POST …/cancel`.
    Stored(&'static str),
}

/// What a gateway or a scraper asks of a backend by itself, and the mock's own page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    Health,
    Metrics,
    Models,
    Version,
    Load,
    IsSleeping,
    Sleep,
    WakeUp,
    Mock,
    SetMock,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    Model(Endpoint),
    Probe(Probe),
    NotFound,
    /// The methods that would do.
    NotAllowed(&'static str),
}

pub fn route(method: &str, path: &str) -> Route {
    let (asked, allow) = match path {
        "/v1/chat/completions" => (Route::Model(Endpoint::Chat), "POST"),
        "/v1/completions" => (Route::Model(Endpoint::Completions), "POST"),
        "/v1/responses" => (Route::Model(Endpoint::Responses), "POST"),
        "/v1/messages" => (Route::Model(Endpoint::Messages), "POST"),
        "/v1/messages/count_tokens" => (Route::Model(Endpoint::CountTokens), "POST"),
        "/v1/embeddings" => (Route::Model(Endpoint::Embeddings), "POST"),
        "/v1/rerank" | "/v2/rerank" | "/rerank" => (Route::Model(Endpoint::Rerank), "POST"),
        "/tokenize" => (Route::Model(Endpoint::Tokenize), "POST"),
        "/v1/moderations" => (Route::Model(Endpoint::Moderations), "POST"),
        "/v1/images/generations" => (Route::Model(Endpoint::Images), "POST"),
        "/v1/images/edits" | "/v1/images/variations" => {
            (Route::Model(Endpoint::ImageEdits), "POST")
        }
        "/v1/audio/speech" => (Route::Model(Endpoint::Speech), "POST"),
        "/v1/audio/transcriptions" | "/v1/audio/translations" => {
            (Route::Model(Endpoint::Transcriptions), "POST")
        }
        "/v1/files" if method == "GET" => return Route::Model(Endpoint::Stored("list")),
        "/v1/batches" if method == "GET" => return Route::Model(Endpoint::Stored("list")),
        "/v1/files" => (Route::Model(Endpoint::Files), "POST"),
        "/v1/batches" => (Route::Model(Endpoint::Batches), "POST"),
        "/health" | "/healthz" | "/ping" => (Route::Probe(Probe::Health), "GET"),
        "/metrics" => (Route::Probe(Probe::Metrics), "GET"),
        "/v1/models" => (Route::Probe(Probe::Models), "GET"),
        "/version" => (Route::Probe(Probe::Version), "GET"),
        "/load" => (Route::Probe(Probe::Load), "GET"),
        "/is_sleeping" => (Route::Probe(Probe::IsSleeping), "GET"),
        "/sleep" => (Route::Probe(Probe::Sleep), "POST"),
        "/wake_up" => (Route::Probe(Probe::WakeUp), "POST"),
        "/mock" if method == "PUT" => return Route::Probe(Probe::SetMock),
        "/mock" => (Route::Probe(Probe::Mock), "GET"),
        _ => {
            let kinds =
                [("/v1/files/", "file"), ("/v1/batches/", "batch"), ("/v1/responses/", "response")];
            match kinds.iter().find(|(start, _)| path.starts_with(start)) {
                Some((_, kind)) => return Route::Model(Endpoint::Stored(kind)),
                None => return Route::NotFound,
            }
        }
    };
    if method == allow { asked } else { Route::NotAllowed(allow) }
}

/// An answer that is ready to be paced and framed.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub content_type: &'static str,
    pub extra: Vec<(&'static str, String)>,
    pub body: Body,
    /// Whether the body took an engine's time: then it comes at the script's pace.
    pub worked: bool,
    /// What the answer holds when it is sent whole.
    pub truth: Truth,
    pub model: String,
}

#[derive(Debug)]
pub enum Body {
    Whole(Vec<u8>),
    Events(Box<Stream>),
}

impl Answer {
    pub fn json(status: u16, body: impl Into<Vec<u8>>) -> Answer {
        Answer {
            status,
            content_type: "application/json",
            extra: Vec::new(),
            body: Body::Whole(body.into()),
            worked: false,
            truth: Truth::default(),
            model: String::new(),
        }
    }

    /// vLLM's error.
    pub fn error(status: u16, kind: &str, param: Option<&str>, message: &str) -> Answer {
        let param = param.map_or("null".into(), |param| Quoted(param).to_string());
        let (message, kind) = (Quoted(message), Quoted(kind));
        Answer::json(
            status,
            format!(
                r#"{{"error":{{"message":{message},"type":{kind},"param":{param},"code":{status}}}}}"#
            ),
        )
    }

    pub fn detail(status: u16, text: &str) -> Answer {
        Answer::json(status, format!(r#"{{"detail":{}}}"#, Quoted(text)))
    }

    fn worked(mut self, model: &str, truth: Truth) -> Answer {
        self.worked = true;
        self.model = model.to_owned();
        self.truth = truth;
        self
    }
}

/// vLLM's validation error (pydantic): `type` is not a class name and `param` a path.
fn invalid(what: &str, at: &str, why: &str) -> Answer {
    Answer::error(
        400,
        "Bad Request",
        Some(at),
        &format!("1 validation error:\n  {{'type': '{what}', 'loc': '{at}', 'msg': '{why}'}}"),
    )
}

fn missing(field: &str) -> Answer {
    invalid("missing", &format!("body.{field}"), "Field required")
}

fn bad(param: Option<&str>, message: &str) -> Answer {
    Answer::error(400, "BadRequestError", param, message)
}

/// The answer that a `status` of the act demands.
pub fn failure(status: u16, act: &Act) -> Answer {
    let message = format!("mock: asked to answer {status}");
    let message = Quoted(&message);
    let mut answer = Answer::json(status, Vec::new());
    let body = match act.error_body {
        ErrorBody::Vllm => format!(
            r#"{{"error":{{"message":{message},"type":"{}","param":null,"code":{status}}}}}"#,
            reason(status).replace(' ', "") + "Error"
        ),
        ErrorBody::OpenAi => format!(
            r#"{{"error":{{"message":{message},"type":"{}","param":null,"code":{}}}}}"#,
            match status {
                429 => "rate_limit_error",
                401 | 403 => "authentication_error",
                500.. => "server_error",
                _ => "invalid_request_error",
            },
            if status == 429 { r#""rate_limit_exceeded""# } else { "null" },
        ),
        ErrorBody::Flat => format!(
            r#"{{"object":"error","message":{message},"type":"{}","param":null,"code":{status}}}"#,
            reason(status).replace(' ', "") + "Error"
        ),
        ErrorBody::Tgi => format!(r#"{{"error":{message},"error_type":"overloaded"}}"#),
        ErrorBody::Ollama => format!(r#"{{"error":{message}}}"#),
        ErrorBody::Html => {
            answer.content_type = "text/html";
            format!(
                "<html>\r\n<head><title>{status} {0}</title></head>\r\n<body>\r\n<center><h1>{status} \
                 {0}</h1></center>\r\n</body>\r\n</html>\r\n",
                reason(status)
            )
        }
        ErrorBody::Empty => String::new(),
    };
    answer.body = Body::Whole(if matches!(status, 204 | 304) { Vec::new() } else { body.into() });
    answer.extra.extend(act.retry_after.clone().map(|after| ("retry-after", after)));
    answer
}

pub fn reason(status: u16) -> &'static str {
    match status {
        100 => "Continue",
        102 => "Processing",
        103 => "Early Hints",
        200 => "OK",
        201 => "Created",
        204 => "No Content",
        304 => "Not Modified",
        307 => "Temporary Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        529 => "Site Is Overloaded",
        _ => "Status",
    }
}

/// What the request says about itself, beside its body.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub endpoint: Endpoint,
    pub path: &'a str,
    pub method: &'a str,
    pub content_type: &'a str,
    /// vLLM makes its ids of this.
    pub request_id: Option<&'a str>,
    pub body: &'a [u8],
}

/// The circumstances of an answer: all that is neither request nor act.
#[derive(Clone, Copy, Debug)]
pub struct Ground<'a> {
    pub script: &'a Script,
    /// The number of the request at this mock, for ids.
    pub number: u64,
    /// Unix time in seconds.
    pub created: u64,
}

/// The parsed body, as far as one is expected.
#[derive(Debug)]
pub enum Parsed {
    Json(Value),
    Form(Vec<Part>),
    None,
}

impl Parsed {
    /// What the body's own member `mock` demands.
    pub fn act(&self) -> Option<&str> {
        match self {
            Parsed::Json(body) => body["mock"].as_str(),
            Parsed::Form(parts) => part(parts, "mock"),
            Parsed::None => None,
        }
    }
}

/// Reads the body as its endpoint demands.
///
/// # Errors
/// The 400 to send.
pub fn parse(asked: &Asked) -> Result<Parsed, Answer> {
    match asked.endpoint {
        Endpoint::Stored(_) => Ok(Parsed::None),
        Endpoint::Transcriptions | Endpoint::ImageEdits | Endpoint::Files => {
            let boundary = boundary(asked.content_type).ok_or_else(|| {
                bad(None, "a multipart/form-data body with a boundary is expected")
            })?;
            let parts = form(asked.body, &boundary)
                .ok_or_else(|| bad(None, "there was an error parsing the body"))?;
            Ok(Parsed::Form(parts))
        }
        _ => {
            let media = asked.content_type.split(';').next().unwrap_or_default().trim();
            if !media.eq_ignore_ascii_case("application/json") {
                let why = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed";
                return Err(Answer::error(400, "Bad Request", None, why));
            }
            if asked.body.is_empty() {
                return Err(invalid("missing", "body", "Field required"));
            }
            let body: Value = serde_json::from_slice(asked.body).map_err(|error| {
                let at = format!("body.{}", error.column());
                invalid("json_invalid", &at, &format!("JSON decode error: {error}"))
            })?;
            match body {
                Value::Object(_) => Ok(Parsed::Json(body)),
                _ => Err(invalid(
                    "model_attributes_type",
                    "body",
                    "Input should be a valid dictionary",
                )),
            }
        }
    }
}

/// The answer to a request whose body was read.
pub fn answer(asked: &Asked, parsed: &Parsed, act: &Act, ground: &Ground) -> Answer {
    let result = match (asked.endpoint, parsed) {
        (Endpoint::Chat, Parsed::Json(body)) => chat(asked, body, act, ground),
        (Endpoint::Completions, Parsed::Json(body)) => completions(asked, body, act, ground),
        (Endpoint::Responses, Parsed::Json(body)) => responses(asked, body, act, ground),
        (Endpoint::Messages, Parsed::Json(body)) => messages(asked, body, act, ground),
        (Endpoint::CountTokens, Parsed::Json(body)) => count_tokens(body, ground),
        (Endpoint::Embeddings, Parsed::Json(body)) => embeddings(asked, body, act, ground),
        (Endpoint::Rerank, Parsed::Json(body)) => rerank(asked, body, act, ground),
        (Endpoint::Tokenize, Parsed::Json(body)) => tokenize(body, ground),
        (Endpoint::Moderations, Parsed::Json(body)) => moderations(asked, body, ground),
        (Endpoint::Images, Parsed::Json(body)) => {
            images(body["model"].as_str(), &body["n"], ground)
        }
        (Endpoint::Speech, Parsed::Json(body)) => speech(body, ground),
        (Endpoint::Batches, Parsed::Json(body)) => Ok(batch(body, ground)),
        (Endpoint::Transcriptions, Parsed::Form(parts)) => transcription(parts, ground),
        (Endpoint::ImageEdits, Parsed::Form(parts)) => {
            images(part(parts, "model"), &Value::Null, ground)
        }
        (Endpoint::Files, Parsed::Form(parts)) => file(parts, ground),
        (Endpoint::Stored(kind), _) => Ok(stored(asked, kind)),
        // `parse` gives what the endpoint expects.
        _ => Err(bad(None, "the body is of another kind than expected")),
    };
    let mut answer = result.unwrap_or_else(|error| error);
    if let (Some(status @ 200..=299), true) = (act.status, answer.status == 200) {
        answer.status = status;
    }
    answer
}

// ---- text -------------------------------------------------------------------------------------

fn chat(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let messages = match &body["messages"] {
        Value::Array(messages) => messages,
        Value::Null => return Err(missing("messages")),
        _ => return Err(invalid("list_type", "body.messages", "Input should be a valid list")),
    };
    if messages.is_empty() {
        return Err(bad(
            None,
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
        ));
    }
    for (index, message) in messages.iter().enumerate() {
        if !message["role"].is_string() {
            return Err(missing(&format!("messages.{index}.role")));
        }
    }
    let tools: Vec<(&str, &Value)> = body["tools"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|tool| {
            Some((tool["function"]["name"].as_str()?, &tool["function"]["parameters"]))
        })
        .collect();
    let choice = &body["tool_choice"];
    let named = choice["function"]["name"].as_str();
    let answered = messages.last().is_some_and(|last| last["role"] == "tool");
    let prompt =
        prompt_of(messages) + if tools.is_empty() { 0 } else { json_tokens(&body["tools"]) };
    generate(
        asked,
        body,
        act,
        ground,
        Want {
            model,
            dialect: Dialect::Chat,
            heard: &heard(messages),
            prompt,
            prompts: 1,
            call: call(&tools, choice.as_str(), named, answered)?,
            limit: match integer(body, "max_completion_tokens", 1)? {
                None => integer(body, "max_tokens", 1)?,
                limit => limit,
            },
            n: integer(body, "n", 1)?.unwrap_or(1),
        },
    )
}

fn completions(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let prompts = inputs(&body["prompt"], "prompt")?;
    generate(
        asked,
        body,
        act,
        ground,
        Want {
            model,
            dialect: Dialect::Completions,
            heard: &prompts.last().map(|prompt| prompt.text.clone()).unwrap_or_default(),
            prompt: prompts.iter().map(|prompt| prompt.tokens).sum(),
            prompts: prompts.len() as u64,
            call: None,
            limit: integer(body, "max_tokens", 1)?,
            n: integer(body, "n", 1)?.unwrap_or(1),
        },
    )
}

fn responses(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let (heard, mut prompt, answered) = match &body["input"] {
        Value::String(input) => (input.clone(), text::count(input) + 8, false),
        Value::Array(items) => {
            let answered = items.last().is_some_and(|last| last["type"] == "function_call_output");
            (heard(items), prompt_of(items), answered)
        }
        Value::Null => return Err(missing("input")),
        _ => return Err(invalid("string_type", "body.input", "Input should be a valid string")),
    };
    prompt += content_tokens(&body["instructions"]);
    let tools: Vec<(&str, &Value)> = body["tools"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|tool| tool["type"] == "function")
        .filter_map(|tool| Some((tool["name"].as_str()?, &tool["parameters"])))
        .collect();
    let choice = &body["tool_choice"];
    generate(
        asked,
        body,
        act,
        ground,
        Want {
            model,
            dialect: Dialect::Responses,
            heard: &heard,
            prompt: prompt + if tools.is_empty() { 0 } else { json_tokens(&body["tools"]) },
            prompts: 1,
            call: call(&tools, choice.as_str(), choice["name"].as_str(), answered)?,
            limit: integer(body, "max_output_tokens", 1)?,
            n: 1,
        },
    )
}

fn messages(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let Value::Array(messages) = &body["messages"] else { return Err(missing("messages")) };
    let limit = integer(body, "max_tokens", 1)?.ok_or_else(|| missing("max_tokens"))?;
    let tools: Vec<(&str, &Value)> = body["tools"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|tool| Some((tool["name"].as_str()?, &tool["input_schema"])))
        .collect();
    let choice = &body["tool_choice"];
    let kind = match choice["type"].as_str() {
        Some("any") => Some("required"),
        kind => kind,
    };
    let answered = messages.last().is_some_and(|last| {
        last["content"]
            .as_array()
            .is_some_and(|parts| parts.iter().any(|part| part["type"] == "tool_result"))
    });
    generate(
        asked,
        body,
        act,
        ground,
        Want {
            model,
            dialect: Dialect::Messages,
            heard: &heard(messages),
            prompt: anthropic_prompt(body),
            prompts: 1,
            call: call(&tools, kind, choice["name"].as_str(), answered)?,
            limit: Some(limit),
            n: 1,
        },
    )
}

fn anthropic_prompt(body: &Value) -> u64 {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let tools = if body["tools"].is_array() { json_tokens(&body["tools"]) } else { 0 };
    prompt_of(messages) + content_tokens(&body["system"]) + tools
}

/// What a text endpoint wants generated.
struct Want<'a> {
    model: String,
    dialect: Dialect,
    heard: &'a str,
    prompt: u64,
    prompts: u64,
    call: Option<(String, Value)>,
    limit: Option<u64>,
    n: u64,
}

/// More choices are a mistake; vLLM would take 1,000.
const CHOICES_MAX: u64 = 128;

fn generate(
    asked: &Asked,
    body: &Value,
    act: &Act,
    ground: &Ground,
    want: Want,
) -> Result<Answer, Answer> {
    let choices = want.n.saturating_mul(want.prompts);
    if choices > CHOICES_MAX {
        return Err(bad(Some("n"), &format!("n must be at most {CHOICES_MAX}, got {choices}.")));
    }
    let prompt = act.prompt_tokens.unwrap_or(want.prompt);
    if let Some(context) = ground.script.context {
        let asked = prompt.saturating_add(want.limit.unwrap_or(0));
        if asked > context {
            return Err(bad(
                Some("input_tokens"),
                &format!(
                    "This model's maximum context length is {context} tokens. However, you requested \
                     {} output tokens and your prompt contains at least {prompt} input tokens. Please \
                     reduce the length of the input prompt or the number of requested output tokens. \
                     (parameter=input_tokens, value={prompt})",
                    want.limit.unwrap_or(0)
                ),
            ));
        }
    }
    let stream = boolean(body, "stream")?.unwrap_or(false);
    let options = &body["stream_options"];
    if !options.is_null() && !stream {
        return Err(bad(
            Some("stream_options"),
            "Stream options can only be defined when `stream=True`.",
        ));
    }
    let ignore_eos = body["ignore_eos"] == true;
    let limit = want.limit.map(|limit| u32::try_from(limit).unwrap_or(u32::MAX));
    let (wanted, cut_short) = match limit {
        // Bounded like the script's own number.
        Some(limit) if ignore_eos => (limit.min(1 << 20), true),
        Some(limit) if limit < act.tokens => (limit, true),
        _ => (act.tokens, false),
    };
    let stops: Vec<&str> = match &body["stop"] {
        Value::String(stop) => vec![stop],
        Value::Array(stops) => stops.iter().filter_map(Value::as_str).collect(),
        _ => match &body["stop_sequences"] {
            Value::Array(stops) => stops.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        },
    };
    let seed = ground.script.seed ^ text::hash(want.heard.as_bytes());
    let mut finish = if cut_short { "length" } else { "stop" };
    let said: Vec<Said> = match &want.call {
        Some((_, schema)) => {
            finish = "tool_calls";
            vec![Said::verbatim(&text::arguments(schema, want.heard)); choices as usize]
        }
        None => (0..choices)
            .map(|choice| {
                let mut said = Said::compose(want.heard, wanted, act, seed.wrapping_add(choice));
                if want.dialect != Dialect::Chat {
                    said.reasoning = 0;
                }
                if said.stop_at(&stops) {
                    finish = "stop";
                }
                said
            })
            .collect(),
    };
    let finish = match act.finish.as_deref() {
        Some("none") => None,
        Some(other) => Some(other.to_owned()),
        None => Some(finish.to_owned()),
    };
    let usage = match act.usage {
        UsageSay::Right if options["continuous_usage_stats"] == true => UsageSay::Running,
        usage => usage,
    };
    let truth = Truth {
        prompt_tokens: prompt,
        completion_tokens: said.iter().map(|said| said.tokens() as u64).sum(),
        cached_tokens: act.cached.min(prompt),
        reasoning_tokens: said.iter().map(|said| said.reasoning as u64).sum(),
    };
    let id = match asked.request_id {
        Some(id) => id.to_owned(),
        None => format!("{:016x}", text::hash(&ground.number.to_le_bytes()) ^ ground.script.seed),
    };
    let bill = Bill {
        say: usage,
        asked: options["include_usage"] == true || usage == UsageSay::Always,
        prompt,
        cached: act.cached.min(prompt),
    };
    let talk = Stream::new(want.dialect, &id, &want.model, ground.created, said)
        .calling(want.call.map(|(name, _)| name))
        .finishing(finish)
        .billed(bill)
        .limited(want.limit)
        .without_end(act.no_done);
    let mut answer = Answer::json(200, Vec::new()).worked(&want.model, truth);
    answer.body = if stream {
        answer.content_type = "text/event-stream; charset=utf-8";
        Body::Events(Box::new(talk))
    } else {
        Body::Whole(talk.whole())
    };
    Ok(answer)
}

/// The tool that is called, and its schema.
fn call(
    tools: &[(&str, &Value)],
    choice: Option<&str>,
    named: Option<&str>,
    answered: bool,
) -> Result<Option<(String, Value)>, Answer> {
    let found = match (named, choice) {
        (Some(named), _) => {
            let tool = tools.iter().find(|(name, _)| *name == named).ok_or_else(|| {
                bad(Some("tool_choice"), &format!("The tool specified in `tool_choice` does not match any of the specified `tools`: {named}"))
            })?;
            Some(tool)
        }
        (None, Some("none")) => None,
        (None, Some("required")) => tools.first(),
        // The result of a call is there: answer it in words, or an agent would loop for ever.
        _ if answered => None,
        _ => tools.first(),
    };
    Ok(found.map(|(name, schema)| ((*name).to_owned(), (*schema).clone())))
}

/// The last user's words.
fn heard(messages: &[Value]) -> String {
    let user = messages.iter().rev().find(|message| message["role"] == "user");
    user.or(messages.last()).map(|message| words(&message["content"])).unwrap_or_default()
}

/// The text of a message's content: a string, or the text parts of a list.
fn words(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join(" ")
        }
        _ => String::new(),
    }
}

/// Each message costs four tokens for its role and its borders, each part that is no text 85 (an
/// image in low detail, as OpenAI counts).
fn prompt_of(messages: &[Value]) -> u64 {
    3 + messages
        .iter()
        .map(|message| {
            let calls = match &message["tool_calls"] {
                Value::Null => 0,
                calls => json_tokens(calls),
            };
            4 + content_tokens(&message["content"]) + calls
        })
        .sum::<u64>()
}

fn content_tokens(content: &Value) -> u64 {
    match content {
        Value::String(text) => text::count(text),
        Value::Array(parts) => {
            parts.iter().map(|part| part["text"].as_str().map_or(85, text::count)).sum()
        }
        _ => 0,
    }
}

fn json_tokens(value: &Value) -> u64 {
    text::count(&value.to_string())
}

// ---- vectors, lists and files -------------------------------------------------------------------

struct Input {
    text: String,
    tokens: u64,
}

/// A string, a list of strings, a list of token ids, or a list of such lists.
fn inputs(value: &Value, field: &str) -> Result<Vec<Input>, Answer> {
    let of_text = |text: &str| Input { text: text.to_owned(), tokens: text::count(text) };
    let of_ids = |ids: &[Value]| {
        let all = ids.iter().all(Value::is_u64);
        (all && !ids.is_empty())
            .then(|| Input { text: Value::from(ids).to_string(), tokens: ids.len() as u64 })
    };
    let unfit =
        || invalid("string_type", &format!("body.{field}"), "Input should be a valid string");
    let found = match value {
        Value::Null => return Err(missing(field)),
        Value::String(text) if text.is_empty() => {
            return Err(bad(None, "The decoder prompt cannot be empty"));
        }
        Value::String(text) => vec![of_text(text)],
        Value::Array(list) => match of_ids(list) {
            Some(ids) => vec![ids],
            None => list
                .iter()
                .map(|one| match one {
                    Value::String(text) => Ok(of_text(text)),
                    Value::Array(ids) => of_ids(ids).ok_or_else(unfit),
                    _ => Err(unfit()),
                })
                .collect::<Result<_, _>>()?,
        },
        _ => return Err(unfit()),
    };
    if found.is_empty() { Err(bad(None, "The decoder prompt cannot be empty")) } else { Ok(found) }
}

const DIMENSIONS: u64 = 16;

fn embeddings(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let inputs = inputs(&body["input"], "input")?;
    let dimensions = integer(body, "dimensions", 1)?.unwrap_or(DIMENSIONS).min(4096) as usize;
    let coded = match body["encoding_format"].as_str() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(invalid(
                "literal_error",
                "body.encoding_format",
                "Input should be 'float' or 'base64'",
            ));
        }
    };
    let mut data = String::new();
    for (index, input) in inputs.iter().enumerate() {
        let vector = text::embedding(&input.text, dimensions);
        let vector = if coded {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Quoted(&text::base64(&bytes)).to_string()
        } else {
            Value::from(vector).to_string()
        };
        let comma = if index == 0 { "" } else { "," };
        let _ =
            write!(data, r#"{comma}{{"index":{index},"object":"embedding","embedding":{vector}}}"#);
    }
    let prompt = act.prompt_tokens.unwrap_or_else(|| inputs.iter().map(|input| input.tokens).sum());
    let bill = Bill { say: act.usage, asked: true, prompt, cached: 0 };
    let usage = bill.member(Dialect::Completions, 0, 0);
    let id = asked.request_id.map_or_else(|| format!("{:016x}", ground.number), str::to_owned);
    let body = format!(
        r#"{{"id":{},"object":"list","created":{},"model":{},"data":[{data}]{usage}}}"#,
        Quoted(&format!("embd-{id}")),
        ground.created,
        Quoted(&model)
    );
    let truth = Truth { prompt_tokens: prompt, ..Truth::default() };
    Ok(Answer::json(200, body).worked(&model, truth))
}

fn rerank(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let query = body["query"].as_str().ok_or_else(|| missing("query"))?;
    let Value::Array(documents) = &body["documents"] else { return Err(missing("documents")) };
    let texts: Vec<&str> = documents
        .iter()
        .map(|document| document.as_str().or(document["text"].as_str()).unwrap_or_default())
        .collect();
    let words: Vec<&str> = text::tokens(query).map(str::trim).collect();
    let mut scored: Vec<(usize, f64)> = texts
        .iter()
        .enumerate()
        .map(|(index, document)| {
            let tokens: Vec<&str> = text::tokens(document).map(str::trim).collect();
            let shared = words.iter().filter(|word| tokens.contains(word)).count();
            // Counts of words in a request: far below 2^52.
            (index, (shared as f64 + 0.5) / (words.len() as f64 + 1.0))
        })
        .collect();
    scored.sort_by(|a, b| b.1.total_cmp(&a.1));
    let top = integer(body, "top_n", 0)?.filter(|&top| top > 0).unwrap_or(u64::MAX);
    scored.truncate(usize::try_from(top).unwrap_or(usize::MAX));
    let results: Vec<Value> = scored
        .iter()
        .map(|&(index, score)| {
            json!({"index": index, "document": {"text": texts[index]}, "relevance_score": score})
        })
        .collect();
    let prompt = act.prompt_tokens.unwrap_or_else(|| {
        texts.iter().map(|document| text::count(document) + text::count(query)).sum()
    });
    let usage = Bill { say: act.usage, asked: true, prompt, cached: 0 };
    let usage = match usage.number(prompt) {
        Some(number) => format!(r#""usage":{{"prompt_tokens":{number},"total_tokens":{number}}},"#),
        None => String::new(),
    };
    let id = asked.request_id.map_or_else(|| format!("{:016x}", ground.number), str::to_owned);
    let body = format!(
        r#"{{"id":{},"model":{},{usage}"results":{}}}"#,
        Quoted(&format!("rerank-{id}")),
        Quoted(&model),
        Value::from(results)
    );
    let truth = Truth { prompt_tokens: prompt, ..Truth::default() };
    Ok(Answer::json(200, body).worked(&model, truth))
}

fn count_tokens(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    if !body["messages"].is_array() {
        return Err(missing("messages"));
    }
    let tokens = anthropic_prompt(body);
    let mut answer = Answer::json(200, format!(r#"{{"input_tokens":{tokens}}}"#));
    answer.model = model;
    Ok(answer)
}

fn tokenize(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let said = match (&body["prompt"], &body["messages"]) {
        (Value::String(prompt), _) => prompt.clone(),
        (_, Value::Array(messages)) => {
            messages.iter().map(|message| words(&message["content"])).collect::<Vec<_>>().join("\n")
        }
        _ => return Err(missing("prompt")),
    };
    let ids: Vec<u64> =
        text::tokens(&said).map(|token| text::hash(token.as_bytes()) % 32_000).collect();
    let context = ground.script.context.unwrap_or(CONTEXT_SHOWN);
    let body = format!(
        r#"{{"count":{},"max_model_len":{context},"tokens":{},"token_strs":null}}"#,
        ids.len(),
        Value::from(ids)
    );
    let mut answer = Answer::json(200, body);
    answer.model = model;
    Ok(answer)
}

/// What a mock without a bound shows where a length must be shown.
pub const CONTEXT_SHOWN: u64 = 131_072;

fn moderations(asked: &Asked, body: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let texts: Vec<String> = match &body["input"] {
        Value::Null => return Err(missing("input")),
        Value::String(text) => vec![text.clone()],
        Value::Array(list) => list
            .iter()
            .map(|one| one.as_str().or(one["text"].as_str()).unwrap_or_default().to_owned())
            .collect(),
        _ => return Err(invalid("string_type", "body.input", "Input should be a valid string")),
    };
    let results: Vec<Value> = texts
        .iter()
        .map(|text| {
            let flagged = text.contains("violence");
            json!({"flagged": flagged, "categories": {"violence": flagged},
                "category_scores": {"violence": if flagged { 0.9 } else { 0.1 }}})
        })
        .collect();
    let id = asked.request_id.map_or_else(|| format!("{:016x}", ground.number), str::to_owned);
    let body = json!({"id": format!("modr-{id}"), "model": model, "results": results});
    Ok(Answer::json(200, body.to_string()).worked(&model, Truth::default()))
}

/// A PNG of one transparent pixel.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";

fn images(name: Option<&str>, n: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(name, &Value::Null, ground)?;
    let n = n.as_u64().unwrap_or(1).clamp(1, 10) as usize;
    let body = json!({"created": ground.created, "data": vec![json!({"b64_json": PNG}); n]});
    Ok(Answer::json(200, body.to_string()).worked(&model, Truth::default()))
}

fn speech(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    let input = body["input"].as_str().ok_or_else(|| missing("input"))?;
    // Bytes of every value, so that a gateway that reads text in them is caught.
    let seed = text::hash(input.as_bytes());
    let mut rng = crate::pure::units::Rng::seeded(seed);
    let sound: Vec<u8> = (0..512).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    let mut answer = Answer::json(200, sound).worked(&model, Truth::default());
    answer.content_type = "audio/mpeg";
    Ok(answer)
}

fn transcription(parts: &[Part], ground: &Ground) -> Result<Answer, Answer> {
    let model = model(part(parts, "model"), &Value::Null, ground)?;
    let file = parts.iter().find(|part| part.name == "file").ok_or_else(|| missing("file"))?;
    let said = format!("You sent {} bytes of sound.", file.data.len());
    let mut answer = if part(parts, "response_format") == Some("text") {
        let mut answer = Answer::json(200, said);
        answer.content_type = "text/plain; charset=utf-8";
        answer
    } else {
        // 16 kHz mono, 16 bits: 32,000 bytes are a second.
        let seconds = file.data.len().div_ceil(32_000);
        Answer::json(
            200,
            format!(
                r#"{{"text":{},"usage":{{"type":"duration","seconds":{seconds}}}}}"#,
                Quoted(&said)
            ),
        )
    };
    answer = answer.worked(&model, Truth::default());
    Ok(answer)
}

fn file(parts: &[Part], ground: &Ground) -> Result<Answer, Answer> {
    let file = parts.iter().find(|part| part.name == "file").ok_or_else(|| missing("file"))?;
    let body = json!({
        "id": format!("file-{:016x}", text::hash(&file.data)), "object": "file",
        "bytes": file.data.len(), "created_at": ground.created, "filename": file.file_name,
        "purpose": part(parts, "purpose"), "status": "processed",
    });
    Ok(Answer::json(200, body.to_string()))
}

fn batch(body: &Value, ground: &Ground) -> Answer {
    let body = json!({
        "id": format!("batch_{:016x}", text::hash(body.to_string().as_bytes())), "object": "batch",
        "endpoint": body["endpoint"], "input_file_id": body["input_file_id"], "status": "validating",
        "completion_window": body["completion_window"], "created_at": ground.created, "errors": null,
    });
    Answer::json(200, body.to_string())
}

/// Nothing is stored: every id exists, and an answer names it back.
fn stored(asked: &Asked, kind: &str) -> Answer {
    if kind == "list" {
        return Answer::json(200, r#"{"object":"list","data":[],"has_more":false}"#);
    }
    let mut rest = asked.path.split('/').skip(3);
    let id = rest.next().unwrap_or_default();
    let body = match (asked.method, rest.next()) {
        ("DELETE", None) => json!({"id": id, "object": kind, "deleted": true}),
        ("GET", None) => json!({"id": id, "object": kind, "status": "completed"}),
        ("POST", Some("cancel")) => json!({"id": id, "object": kind, "status": "cancelled"}),
        ("GET", Some("content")) => {
            let mut answer = Answer::json(200, format!("content of {id}\n"));
            answer.content_type = "application/octet-stream";
            return answer;
        }
        _ => return Answer::detail(404, "Not Found"),
    };
    Answer::json(200, body.to_string())
}

// ---- members ------------------------------------------------------------------------------------

/// The model that serves: the one asked for, or the first when none was (as vLLM has it).
fn model(name: Option<&str>, raw: &Value, ground: &Ground) -> Result<String, Answer> {
    let models = &ground.script.models;
    let first = || models.first().cloned().unwrap_or_else(|| DEFAULT_MODEL.to_owned());
    match (name, raw) {
        (Some(name), _) if models.is_empty() || models.iter().any(|known| known == name) => {
            Ok(name.to_owned())
        }
        (Some(name), _) => Err(Answer::error(
            404,
            "NotFoundError",
            Some("model"),
            &format!("The model `{name}` does not exist. Valid aliases: {}.", models.join(", ")),
        )),
        (None, Value::Null) => Ok(first()),
        (None, _) => Err(invalid("string_type", "body.model", "Input should be a valid string")),
    }
}

pub const DEFAULT_MODEL: &str = "mock";

fn integer(body: &Value, field: &str, least: u64) -> Result<Option<u64>, Answer> {
    match &body[field] {
        Value::Null => Ok(None),
        Value::Number(number) => match number.as_u64() {
            Some(value) if value >= least => Ok(Some(value)),
            _ if number.is_i64() || number.is_u64() => Err(bad(
                Some(field),
                &format!(
                    "{field} must be at least {least}, got {number}. (parameter={field}, value={number})"
                ),
            )),
            _ => Err(invalid(
                "int_from_float",
                &format!("body.{field}"),
                "Input should be a valid integer",
            )),
        },
        _ => {
            Err(invalid("int_parsing", &format!("body.{field}"), "Input should be a valid integer"))
        }
    }
}

fn boolean(body: &Value, field: &str) -> Result<Option<bool>, Answer> {
    match &body[field] {
        Value::Null => Ok(None),
        Value::Bool(value) => Ok(Some(*value)),
        _ => Err(invalid(
            "bool_parsing",
            &format!("body.{field}"),
            "Input should be a valid boolean",
        )),
    }
}

/// One part of a multipart form.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub file_name: Option<String>,
    pub data: Vec<u8>,
}

fn part<'a>(parts: &'a [Part], name: &str) -> Option<&'a str> {
    let part = parts.iter().find(|part| part.name == name)?;
    std::str::from_utf8(&part.data).ok()
}

fn boundary(content_type: &str) -> Option<String> {
    let (media, parameters) = content_type.split_once(';')?;
    if !media.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameters.split(';').find_map(|parameter| {
        let (name, value) = parameter.trim().split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then(|| value.trim_matches('"').to_owned())
    })?;
    (1..=70).contains(&boundary.len()).then_some(boundary)
}

/// RFC 7578. `None` for what does not follow it.
fn form(body: &[u8], boundary: &str) -> Option<Vec<Part>> {
    let first = format!("--{boundary}");
    let between = format!("\r\n--{boundary}");
    let mut rest = body.strip_prefix(first.as_bytes())?;
    let mut parts = Vec::new();
    loop {
        if rest.starts_with(b"--") {
            return Some(parts);
        }
        rest = rest.strip_prefix(b"\r\n")?;
        let end = memmem::find(rest, between.as_bytes())?;
        let (one, behind) = (&rest[..end], &rest[end + between.len()..]);
        rest = behind;
        let head_end = memmem::find(one, b"\r\n\r\n")?;
        let head = std::str::from_utf8(&one[..head_end]).ok()?;
        let disposition = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-disposition").then_some(value)
        })?;
        let parameter = |wanted: &str| {
            disposition.split(';').find_map(|parameter| {
                let (name, value) = parameter.trim().split_once('=')?;
                (name == wanted).then(|| value.trim_matches('"').to_owned())
            })
        };
        parts.push(Part {
            name: parameter("name")?,
            file_name: parameter("filename"),
            data: one[head_end + 4..].to_vec(),
        });
    }
}
