//! What each endpoint answers: request in, [`Answer`] out, without a socket or a clock.
//!
//! Shapes, names and error texts follow what vLLM 0.32 was recorded to send, and OpenAI's API where
//! vLLM has no such endpoint.

use serde_json::Value;

use super::lists::{self, Part, part};
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
        "/v1/files" | "/v1/batches" if method == "GET" => {
            return Route::Model(Endpoint::Stored("list"));
        }
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
    pub model: Box<str>,
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
            model: Box::from(""),
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

    pub fn worked(mut self, model: &str, truth: Truth) -> Answer {
        self.worked = true;
        self.model = model.into();
        self.truth = truth;
        self
    }
}

/// vLLM's validation error (pydantic): `type` is not a class name and `param` a path.
pub fn invalid(what: &str, at: &str, why: &str) -> Answer {
    Answer::error(
        400,
        "Bad Request",
        Some(at),
        &format!("1 validation error:\n  {{'type': '{what}', 'loc': '{at}', 'msg': '{why}'}}"),
    )
}

pub fn missing(field: &str) -> Answer {
    invalid("missing", &format!("body.{field}"), "Field required")
}

pub fn bad(param: Option<&str>, message: &str) -> Answer {
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
            let boundary = lists::boundary(asked.content_type).ok_or_else(|| {
                bad(None, "a multipart/form-data body with a boundary is expected")
            })?;
            let parts = lists::form(asked.body, &boundary)
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
        (Endpoint::CountTokens, Parsed::Json(body)) => lists::count_tokens(body, ground),
        (Endpoint::Embeddings, Parsed::Json(body)) => lists::embeddings(asked, body, act, ground),
        (Endpoint::Rerank, Parsed::Json(body)) => lists::rerank(asked, body, act, ground),
        (Endpoint::Tokenize, Parsed::Json(body)) => lists::tokenize(body, ground),
        (Endpoint::Moderations, Parsed::Json(body)) => lists::moderations(asked, body, ground),
        (Endpoint::Images, Parsed::Json(body)) => {
            lists::images(body["model"].as_str(), &body["n"], ground)
        }
        (Endpoint::Speech, Parsed::Json(body)) => lists::speech(body, ground),
        (Endpoint::Batches, Parsed::Json(body)) => Ok(lists::batch(body, ground)),
        (Endpoint::Transcriptions, Parsed::Form(parts)) => lists::transcription(parts, ground),
        (Endpoint::ImageEdits, Parsed::Form(parts)) => {
            lists::images(part(parts, "model"), &Value::Null, ground)
        }
        (Endpoint::Files, Parsed::Form(parts)) => lists::file(parts, ground),
        (Endpoint::Stored(kind), _) => Ok(lists::stored(asked, kind)),
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
            heard: vec![&heard(messages)],
            prompt,
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
    let prompts = lists::inputs(&body["prompt"], "prompt")?;
    generate(
        asked,
        body,
        act,
        ground,
        Want {
            model,
            dialect: Dialect::Completions,
            heard: prompts.iter().map(|prompt| prompt.text.as_str()).collect(),
            prompt: prompts.iter().map(|prompt| prompt.tokens).sum(),
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
            heard: vec![&heard],
            prompt: prompt + if tools.is_empty() { 0 } else { json_tokens(&body["tools"]) },
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
            heard: vec![&heard(messages)],
            prompt: anthropic_prompt(body),
            call: call(&tools, kind, choice["name"].as_str(), answered)?,
            limit: Some(limit),
            n: 1,
        },
    )
}

pub fn anthropic_prompt(body: &Value) -> u64 {
    let messages = body["messages"].as_array().map_or(&[][..], Vec::as_slice);
    let tools = if body["tools"].is_array() { json_tokens(&body["tools"]) } else { 0 };
    prompt_of(messages) + content_tokens(&body["system"]) + tools
}

/// What a text endpoint wants generated.
struct Want<'a> {
    model: String,
    dialect: Dialect,
    /// What is answered, for each prompt.
    heard: Vec<&'a str>,
    prompt: u64,
    call: Option<(String, Value)>,
    limit: Option<u64>,
    n: u64,
}

/// More choices are a mistake; vLLM would take 1,000.
const CHOICES_MAX: u64 = 128;
/// Of all choices together: the texts are made before they are told.
const TEXT_BYTES_MAX: u64 = 256 << 20;

fn generate(
    asked: &Asked,
    body: &Value,
    act: &Act,
    ground: &Ground,
    want: Want,
) -> Result<Answer, Answer> {
    let choices = want.n.saturating_mul(want.heard.len() as u64);
    if choices > CHOICES_MAX {
        return Err(bad(Some("n"), &format!("n must be at most {CHOICES_MAX}, got {choices}.")));
    }
    let prompt = act.prompt_tokens.unwrap_or(want.prompt);
    fits_context(ground.script.context, prompt, want.limit.unwrap_or(0))?;
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
    let token_bytes = act.token_bytes.unwrap_or(8) as u64 + 8;
    if choices.saturating_mul(u64::from(wanted)).saturating_mul(token_bytes) > TEXT_BYTES_MAX {
        return Err(bad(None, "mock: so long an answer does not fit in memory"));
    }
    let stops: Vec<&str> = match &body["stop"] {
        Value::String(stop) => vec![stop],
        Value::Array(stops) => stops.iter().filter_map(Value::as_str).collect(),
        _ => match &body["stop_sequences"] {
            Value::Array(stops) => stops.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        },
    };
    let mut finish = if cut_short { "length" } else { "stop" };
    let said: Vec<Said> = match &want.call {
        Some((_, schema)) => {
            finish = "tool_calls";
            vec![Said::verbatim(&text::arguments(schema, want.heard[0])); choices as usize]
        }
        None => (0..choices)
            .map(|choice| {
                // Choices are told apart by their seed; as many as fit an index of prompts times n.
                let heard = want.heard[(choice / want.n) as usize];
                let seed = ground.script.seed ^ text::hash(heard.as_bytes());
                let mut said = Said::compose(heard, wanted, act, seed.wrapping_add(choice));
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

fn fits_context(context: Option<u64>, prompt: u64, output: u64) -> Result<(), Answer> {
    match context {
        Some(context) if prompt.saturating_add(output) > context => Err(bad(
            Some("input_tokens"),
            &format!(
                "This model's maximum context length is {context} tokens. However, you requested {output} \
                 output tokens and your prompt contains at least {prompt} input tokens. Please reduce \
                 the length of the input prompt or the number of requested output tokens. \
                 (parameter=input_tokens, value={prompt})"
            ),
        )),
        _ => Ok(()),
    }
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
pub fn words(content: &Value) -> String {
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

// ---- members ------------------------------------------------------------------------------------

/// The model that serves: the one asked for, or the first when none was (as vLLM has it).
pub fn model(name: Option<&str>, raw: &Value, ground: &Ground) -> Result<String, Answer> {
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

pub fn integer(body: &Value, field: &str, least: u64) -> Result<Option<u64>, Answer> {
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
