//! A generated text in the four wire formats, whole or event by event.
//!
//! [`Stream`] makes one event at a time and says what kind of beat it is; when it is sent is not
//! its business.

use std::fmt;
use std::fmt::Write as _;

use super::script::UsageSay;
use super::text::Said;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    Chat,
    Completions,
    Responses,
    Messages,
}

/// A text as a JSON string.
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self.0).map_err(|_| fmt::Error)?)
    }
}

/// How usage is reported.
#[derive(Clone, Copy, Debug)]
pub struct Bill {
    pub say: UsageSay,
    /// Streams of the OpenAI kind send usage only when it was.
    pub asked: bool,
    pub prompt: u64,
    pub cached: u64,
}

impl Bill {
    /// A number as it is reported; `None` when no usage is.
    pub fn number(&self, truth: u64) -> Option<String> {
        Some(match self.say {
            UsageSay::Missing => return None,
            UsageSay::Wrong => (truth * 2 + 7).to_string(),
            UsageSay::Negative => format!("-{}", truth + 1),
            UsageSay::Huge => format!("9{truth:023}"),
            UsageSay::Float => format!("{truth}.5"),
            UsageSay::Text => format!("\"{truth}\""),
            UsageSay::Null
            | UsageSay::Right
            | UsageSay::OnLastChunk
            | UsageSay::Running
            | UsageSay::Always => truth.to_string(),
        })
    }

    /// `,"usage":…`, or nothing.
    pub fn member(&self, dialect: Dialect, completion: u64, reasoning: u64) -> String {
        match self.object(dialect, completion, reasoning) {
            Some(usage) => format!(r#","usage":{usage}"#),
            None => String::new(),
        }
    }

    fn object(&self, dialect: Dialect, completion: u64, reasoning: u64) -> Option<String> {
        if self.say == UsageSay::Null {
            return Some("null".to_owned());
        }
        let prompt = self.number(self.prompt)?;
        let output = self.number(completion)?;
        let total = self.number(self.prompt.saturating_add(completion))?;
        let cached = self.cached;
        Some(match dialect {
            Dialect::Chat | Dialect::Completions => {
                let details = match reasoning {
                    0 => "null".to_owned(),
                    _ => format!(r#"{{"reasoning_tokens":{reasoning}}}"#),
                };
                format!(
                    r#"{{"prompt_tokens":{prompt},"total_tokens":{total},"completion_tokens":{output},"prompt_tokens_details":{{"cached_tokens":{cached}}},"completion_tokens_details":{details}}}"#
                )
            }
            Dialect::Responses => format!(
                r#"{{"input_tokens":{prompt},"input_tokens_details":{{"cached_tokens":{cached}}},"output_tokens":{output},"output_tokens_details":{{"reasoning_tokens":{reasoning}}},"total_tokens":{total}}}"#
            ),
            // Anthropic counts what came from its cache apart from the input.
            Dialect::Messages => format!(
                r#"{{"input_tokens":{},"output_tokens":{output},"cache_creation_input_tokens":0,"cache_read_input_tokens":{cached}}}"#,
                self.number(self.prompt - cached)?
            ),
        })
    }
}

/// What an event is to the pace and to the faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Before the first content.
    Lead,
    /// A token. `opens` a round: the next token of every choice comes in the same step.
    Token { opens: bool },
    /// After the last content.
    Tail,
    /// Says that this is all.
    End,
}

/// A generated answer and how far it has been told.
#[derive(Debug)]
pub struct Stream {
    dialect: Dialect,
    /// With its prefix, as a JSON string.
    id: String,
    /// The id of the one output item, of the one call, or of both.
    item: String,
    model: String,
    created: u64,
    said: Vec<Said>,
    call: Option<String>,
    finish: Option<String>,
    bill: Bill,
    limit: Option<u64>,
    endless: bool,
    at: At,
    told: u64,
    told_reasoning: u64,
    sequence: u32,
}

#[derive(Clone, Copy, Debug)]
enum At {
    Lead(usize),
    Token { round: usize, choice: usize },
    Tail(usize),
}

/// What a step after the last token has brought.
enum Step {
    Said(Beat),
    Silent,
    Over,
}

impl Stream {
    pub fn new(dialect: Dialect, id: &str, model: &str, created: u64, said: Vec<Said>) -> Stream {
        let prefix = match dialect {
            Dialect::Chat => "chatcmpl-",
            Dialect::Completions => "cmpl-",
            Dialect::Responses => "resp_",
            Dialect::Messages => "msg_",
        };
        Stream {
            dialect,
            id: Quoted(&format!("{prefix}{id}")).to_string(),
            item: id.to_owned(),
            model: Quoted(model).to_string(),
            created,
            said,
            call: None,
            finish: None,
            bill: Bill { say: UsageSay::Right, asked: false, prompt: 0, cached: 0 },
            limit: None,
            endless: false,
            at: At::Lead(0),
            told: 0,
            told_reasoning: 0,
            sequence: 0,
        }
    }

    /// The text is the arguments of a call of this tool.
    pub fn calling(mut self, tool: Option<String>) -> Stream {
        self.call = tool;
        self
    }

    /// Why it ends, in the words of chat completions.
    pub fn finishing(mut self, reason: Option<String>) -> Stream {
        self.finish = reason;
        self
    }

    pub fn billed(mut self, bill: Bill) -> Stream {
        self.bill = bill;
        self
    }

    /// What the request allowed, to be named back.
    pub fn limited(mut self, limit: Option<u64>) -> Stream {
        self.limit = limit;
        self
    }

    /// Leaves out the event that says that this is all.
    pub fn without_end(mut self, endless: bool) -> Stream {
        self.endless = endless;
        self
    }

    /// Tokens told so far, and the reasoning among them.
    pub fn told(&self) -> (u64, u64) {
        (self.told, self.told_reasoning)
    }

    /// Appends the next event to `out`; `None` when all was told.
    pub fn next(&mut self, out: &mut Vec<u8>) -> Option<Beat> {
        let mut text = String::new();
        let beat = loop {
            match self.at {
                At::Lead(step) => {
                    if self.lead(step, &mut text) {
                        self.at = At::Lead(step + 1);
                        break Beat::Lead;
                    }
                    self.at = At::Token { round: 0, choice: 0 };
                }
                At::Token { round, choice } => {
                    let Some(said) = self.said.get(choice) else {
                        self.at = At::Token { round: round + 1, choice: 0 };
                        continue;
                    };
                    if round >= self.said.iter().map(Said::tokens).max().unwrap_or(0) {
                        self.at = At::Tail(0);
                        continue;
                    }
                    self.at = At::Token { round, choice: choice + 1 };
                    if round < said.tokens() {
                        self.token(round, choice, &mut text);
                        // Stopped choices drop out; the first that still speaks opens the round.
                        let opens = self.said[..choice].iter().all(|said| said.tokens() <= round);
                        break Beat::Token { opens };
                    }
                }
                At::Tail(step) => {
                    self.at = At::Tail(step + 1);
                    match self.tail(step, &mut text) {
                        Step::Said(beat) => break beat,
                        Step::Silent => {}
                        Step::Over => return None,
                    }
                }
            }
        };
        out.extend_from_slice(text.as_bytes());
        Some(beat)
    }

    fn lead(&mut self, step: usize, out: &mut String) -> bool {
        match (self.dialect, step) {
            (Dialect::Chat, choice) if choice < self.said.len() => {
                let usage = self.running();
                self.chunk(out, choice, r#"{"role":"assistant","content":""}"#, "null", &usage);
            }
            (Dialect::Messages, 0) => {
                let usage = self.bill.member(Dialect::Messages, 0, 0);
                let (id, model) = (&self.id, &self.model);
                event(
                    out,
                    "message_start",
                    &format!(
                        r#""message":{{"id":{id},"type":"message","role":"assistant","content":[],"model":{model},"stop_reason":null,"stop_sequence":null{usage}}}"#
                    ),
                );
            }
            (Dialect::Messages, 1) => {
                let block = match &self.call {
                    Some(tool) => format!(
                        r#"{{"type":"tool_use","id":"toolu_{}","name":{},"input":{{}}}}"#,
                        self.item,
                        Quoted(tool)
                    ),
                    None => r#"{"type":"text","text":""}"#.to_owned(),
                };
                event(out, "content_block_start", &format!(r#""index":0,"content_block":{block}"#));
            }
            (Dialect::Responses, 0 | 1) => {
                let name = ["response.created", "response.in_progress"][step];
                let response = self.response("in_progress", "[]", r#","usage":null"#);
                self.numbered(out, name, &format!(r#""response":{response}"#));
            }
            (Dialect::Responses, 2) => {
                let item = self.item("in_progress", false);
                self.numbered(
                    out,
                    "response.output_item.added",
                    &format!(r#""output_index":0,"item":{item}"#),
                );
            }
            (Dialect::Responses, 3) if self.call.is_none() => {
                let place = self.place();
                self.numbered(out, "response.content_part.added", &format!(
                    r#"{place},"part":{{"type":"output_text","annotations":[],"logprobs":[],"text":""}}"#
                ));
            }
            _ => return false,
        }
        true
    }

    fn token(&mut self, round: usize, choice: usize, out: &mut String) {
        self.told += 1;
        let said = &self.said[choice];
        let thinks = round < said.reasoning;
        self.told_reasoning += u64::from(thinks);
        let token = Quoted(said.token(round)).to_string();
        match (self.dialect, &self.call) {
            (Dialect::Chat, Some(tool)) => {
                // The first event names the call, as vLLM's and OpenAI's do.
                let head = match round {
                    0 => format!(r#""id":"{}","type":"function","#, self.call_id(choice)),
                    _ => String::new(),
                };
                let name = match round {
                    0 => format!(r#""name":{},"#, Quoted(tool)),
                    _ => String::new(),
                };
                let delta = format!(
                    r#"{{"tool_calls":[{{{head}"index":0,"function":{{{name}"arguments":{token}}}}}]}}"#
                );
                let usage = self.running();
                self.chunk(out, choice, &delta, "null", &usage);
            }
            (Dialect::Chat, None) => {
                let member = if thinks { "reasoning_content" } else { "content" };
                let usage = self.running();
                self.chunk(out, choice, &format!(r#"{{"{member}":{token}}}"#), "null", &usage);
            }
            (Dialect::Completions, _) => {
                let usage = self.running();
                self.text_chunk(out, choice, &token, "null", &usage);
            }
            (Dialect::Messages, call) => {
                let delta = match call {
                    Some(_) => format!(r#"{{"type":"input_json_delta","partial_json":{token}}}"#),
                    None => format!(r#"{{"type":"text_delta","text":{token}}}"#),
                };
                event(out, "content_block_delta", &format!(r#""index":0,"delta":{delta}"#));
            }
            (Dialect::Responses, call) => {
                let (name, place) = match call {
                    Some(_) => ("response.function_call_arguments.delta", self.item_place()),
                    None => ("response.output_text.delta", self.place()),
                };
                self.numbered(out, name, &format!(r#"{place},"delta":{token}"#));
            }
        }
    }

    fn tail(&mut self, step: usize, out: &mut String) -> Step {
        let choices = self.said.len();
        let finish = self.finish();
        match self.dialect {
            Dialect::Chat | Dialect::Completions if step < choices => {
                let last = step + 1 == choices;
                let usage = match self.bill.say {
                    UsageSay::OnLastChunk if last && self.bill.asked => self.total(),
                    _ => self.running(),
                };
                if self.dialect == Dialect::Chat {
                    self.chunk(out, step, "{}", &finish, &usage);
                } else {
                    self.text_chunk(out, step, "\"\"", &finish, &usage);
                }
                Step::Said(Beat::Tail)
            }
            Dialect::Chat | Dialect::Completions if step == choices => {
                if !self.bill.asked
                    || matches!(self.bill.say, UsageSay::Missing | UsageSay::OnLastChunk)
                {
                    return Step::Silent;
                }
                let usage = self.total();
                let object = self.chunk_object();
                let (id, created, model) = (&self.id, self.created, &self.model);
                let _ = write!(
                    out,
                    "data: {{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\"model\":{model},\"choices\":[]{usage}}}\n\n"
                );
                Step::Said(Beat::Tail)
            }
            Dialect::Chat | Dialect::Completions => {
                if step > choices + 1 || self.endless {
                    return Step::Over;
                }
                out.push_str("data: [DONE]\n\n");
                Step::Said(Beat::End)
            }
            Dialect::Messages => {
                match step {
                    0 => event(out, "content_block_stop", r#""index":0"#),
                    1 => {
                        let usage = self.total();
                        event(
                            out,
                            "message_delta",
                            &format!(
                                r#""delta":{{"stop_reason":{finish},"stop_sequence":null}}{usage}"#
                            ),
                        );
                    }
                    2 if !self.endless => event(out, "message_stop", ""),
                    _ => return Step::Over,
                }
                Step::Said(if step == 2 { Beat::End } else { Beat::Tail })
            }
            Dialect::Responses => {
                let whole = Quoted(&self.said[0].text).to_string();
                match (step, self.call.is_some()) {
                    (0, true) => {
                        let place = self.item_place();
                        let name = "response.function_call_arguments.done";
                        self.numbered(out, name, &format!(r#"{place},"arguments":{whole}"#));
                    }
                    (0, false) => {
                        let place = self.place();
                        self.numbered(
                            out,
                            "response.output_text.done",
                            &format!(r#"{place},"text":{whole}"#),
                        );
                    }
                    (1, true) => return Step::Silent,
                    (1, false) => {
                        let place = self.place();
                        self.numbered(out, "response.content_part.done", &format!(
                            r#"{place},"part":{{"type":"output_text","annotations":[],"logprobs":[],"text":{whole}}}"#
                        ));
                    }
                    (2, _) => {
                        let item = self.item("completed", true);
                        self.numbered(
                            out,
                            "response.output_item.done",
                            &format!(r#""output_index":0,"item":{item}"#),
                        );
                    }
                    (3, _) if !self.endless => {
                        let response = self.whole_response();
                        let name = match self.finish.as_deref() {
                            Some("length") => "response.incomplete",
                            _ => "response.completed",
                        };
                        self.numbered(out, name, &format!(r#""response":{response}"#));
                    }
                    _ => return Step::Over,
                }
                Step::Said(if step == 3 { Beat::End } else { Beat::Tail })
            }
        }
    }

    /// The error event of an engine that fails in mid-stream, and what follows it.
    pub fn fail(&mut self, out: &mut Vec<u8>) {
        let mut text = String::new();
        let message = "mock: the engine died";
        match self.dialect {
            Dialect::Chat | Dialect::Completions => {
                let _ = write!(
                    text,
                    "data: {{\"error\":{{\"message\":\"{message}\",\"type\":\"InternalServerError\",\"param\":null,\"code\":500}}}}\n\ndata: [DONE]\n\n"
                );
            }
            Dialect::Messages => event(
                &mut text,
                "error",
                &format!(r#""error":{{"type":"api_error","message":"{message}"}}"#),
            ),
            Dialect::Responses => self.numbered(
                &mut text,
                "error",
                &format!(r#""code":"server_error","message":"{message}","param":null"#),
            ),
        }
        out.extend_from_slice(text.as_bytes());
    }

    /// The answer in one piece, as JSON.
    pub fn whole(mut self) -> Vec<u8> {
        self.told = self.said.iter().map(|said| said.tokens() as u64).sum();
        self.told_reasoning = self.said.iter().map(|said| said.reasoning as u64).sum();
        let usage = self.total();
        let finish = self.finish();
        let (id, model, created) = (&self.id, &self.model, self.created);
        let choices = |one: &dyn Fn(usize, &Said) -> String| {
            let choices: Vec<String> =
                self.said.iter().enumerate().map(|(index, said)| one(index, said)).collect();
            choices.join(",")
        };
        let body = match self.dialect {
            Dialect::Chat => {
                let choices = choices(&|index, said| {
                    let message = match &self.call {
                        Some(tool) => format!(
                            r#""content":null,"tool_calls":[{{"id":"{}","type":"function","function":{{"name":{},"arguments":{}}}}}]"#,
                            self.call_id(index),
                            Quoted(tool),
                            Quoted(&said.text)
                        ),
                        None if said.reasoning > 0 => format!(
                            r#""content":{},"reasoning_content":{}"#,
                            Quoted(said.content()),
                            Quoted(said.thought())
                        ),
                        None => format!(r#""content":{}"#, Quoted(&said.text)),
                    };
                    format!(
                        r#"{{"index":{index},"message":{{"role":"assistant",{message},"refusal":null}},"logprobs":null,"finish_reason":{finish}}}"#
                    )
                });
                format!(
                    r#"{{"id":{id},"object":"chat.completion","created":{created},"model":{model},"choices":[{choices}]{usage}}}"#
                )
            }
            Dialect::Completions => {
                let choices = choices(&|index, said| {
                    format!(
                        r#"{{"index":{index},"text":{},"logprobs":null,"finish_reason":{finish}}}"#,
                        Quoted(&said.text)
                    )
                });
                format!(
                    r#"{{"id":{id},"object":"text_completion","created":{created},"model":{model},"choices":[{choices}]{usage}}}"#
                )
            }
            Dialect::Messages => {
                let block = match &self.call {
                    // The arguments are JSON already.
                    Some(tool) => format!(
                        r#"{{"type":"tool_use","id":"toolu_{}","name":{},"input":{}}}"#,
                        self.item,
                        Quoted(tool),
                        self.said[0].text
                    ),
                    None => format!(r#"{{"type":"text","text":{}}}"#, Quoted(&self.said[0].text)),
                };
                format!(
                    r#"{{"id":{id},"type":"message","role":"assistant","content":[{block}],"model":{model},"stop_reason":{finish},"stop_sequence":null{usage}}}"#
                )
            }
            Dialect::Responses => self.whole_response(),
        };
        body.into_bytes()
    }

    fn chunk(&self, out: &mut String, choice: usize, delta: &str, finish: &str, usage: &str) {
        let (id, created, model) = (&self.id, self.created, &self.model);
        let _ = write!(
            out,
            "data: {{\"id\":{id},\"object\":\"chat.completion.chunk\",\"created\":{created},\"model\":{model},\"choices\":[{{\"index\":{choice},\"delta\":{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]{usage}}}\n\n"
        );
    }

    fn text_chunk(&self, out: &mut String, choice: usize, text: &str, finish: &str, usage: &str) {
        let (id, created, model) = (&self.id, self.created, &self.model);
        let _ = write!(
            out,
            "data: {{\"id\":{id},\"object\":\"text_completion\",\"created\":{created},\"model\":{model},\"choices\":[{{\"index\":{choice},\"text\":{text},\"logprobs\":null,\"finish_reason\":{finish}}}]{usage}}}\n\n"
        );
    }

    fn chunk_object(&self) -> &'static str {
        if self.dialect == Dialect::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn numbered(&mut self, out: &mut String, name: &str, members: &str) {
        event(out, name, &format!(r#""sequence_number":{},{members}"#, self.sequence));
        self.sequence += 1;
    }

    /// `,"usage":…` of a chunk in mid-stream.
    fn running(&self) -> String {
        if self.bill.say == UsageSay::Running { self.total() } else { String::new() }
    }

    fn total(&self) -> String {
        self.bill.member(self.dialect, self.told, self.told_reasoning)
    }

    /// The finish reason in the dialect's words, as JSON.
    fn finish(&self) -> String {
        let Some(reason) = self.finish.as_deref() else { return "null".to_owned() };
        let word = match (self.dialect, reason) {
            (Dialect::Messages, "stop") => "end_turn",
            (Dialect::Messages, "length") => "max_tokens",
            (Dialect::Messages, "tool_calls") => "tool_use",
            (_, other) => other,
        };
        Quoted(word).to_string()
    }

    fn call_id(&self, choice: usize) -> String {
        format!("call_{}_{choice}", self.item)
    }

    fn item_id(&self) -> String {
        format!("{}_{}", if self.call.is_some() { "fc" } else { "msg" }, self.item)
    }

    fn item_place(&self) -> String {
        format!(r#""item_id":"{}","output_index":0"#, self.item_id())
    }

    fn place(&self) -> String {
        format!(r#"{},"content_index":0"#, self.item_place())
    }

    fn item(&self, status: &str, whole: bool) -> String {
        let id = self.item_id();
        let said = if whole { self.said[0].text.as_str() } else { "" };
        match &self.call {
            Some(tool) => format!(
                r#"{{"id":"{id}","type":"function_call","status":"{status}","call_id":"{}","name":{},"arguments":{}}}"#,
                self.call_id(0),
                Quoted(tool),
                Quoted(said)
            ),
            None => {
                let content = if whole {
                    format!(
                        r#"{{"type":"output_text","annotations":[],"logprobs":[],"text":{}}}"#,
                        Quoted(said)
                    )
                } else {
                    String::new()
                };
                format!(
                    r#"{{"id":"{id}","type":"message","status":"{status}","role":"assistant","content":[{content}]}}"#
                )
            }
        }
    }

    fn whole_response(&self) -> String {
        let status =
            if self.finish.as_deref() == Some("length") { "incomplete" } else { "completed" };
        self.response(status, &format!("[{}]", self.item("completed", true)), &self.total())
    }

    fn response(&self, status: &str, output: &str, usage: &str) -> String {
        let (id, model, created) = (&self.id, &self.model, self.created);
        let limit = self.limit.map_or("null".to_owned(), |limit| limit.to_string());
        let incomplete = match status {
            "incomplete" => r#"{"reason":"max_output_tokens"}"#,
            _ => "null",
        };
        format!(
            r#"{{"id":{id},"object":"response","created_at":{created},"status":"{status}","error":null,"incomplete_details":{incomplete},"instructions":null,"max_output_tokens":{limit},"model":{model},"output":{output},"parallel_tool_calls":true,"temperature":1.0,"tool_choice":"auto","tools":[],"top_p":1.0{usage}}}"#
        )
    }
}

/// An event with a name, whose data repeats the name as its `type`.
fn event(out: &mut String, name: &str, members: &str) {
    let comma = if members.is_empty() { "" } else { "," };
    let _ = write!(out, "event: {name}\ndata: {{\"type\":\"{name}\"{comma}{members}}}\n\n");
}
