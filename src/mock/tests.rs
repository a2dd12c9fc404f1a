//! Goal: the mock does over a real socket what its script says, on every driver, and its books are
//! true. Method: a blocking client of few lines that reads with our strict codec and keeps the raw
//! bytes; where a test waits, it waits for the books to say so.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant as Clock};

use serde_json::{Value, json};

use super::*;
use crate::pure::h1::{self, Decoder, Framing, Limits, Method, Parse};

const PATIENCE: Duration = Duration::from_secs(20);

fn mock(act: &str) -> Mock {
    start(Script::instant(act).unwrap()).unwrap()
}

/// How a response ended on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    /// As its framing demands.
    Whole,
    /// FIN before that.
    Fin,
    Rst,
    /// Nothing more within the client's patience.
    Silent,
    /// The framing itself is broken.
    Broken,
}

struct Reply {
    status: u16,
    head: String,
    body: Vec<u8>,
    interim: Vec<u16>,
    ended: Ended,
    raw: Vec<u8>,
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let raw = String::from_utf8_lossy(&self.raw);
        write!(f, "{} {:?} {:?}\n{raw}", self.status, self.ended, self.interim)
    }
}

impl Reply {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The data of its events, by the simple rule that holds for what the mock sends.
    fn data(&self) -> Vec<String> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        let text = text.trim_start_matches('\u{FEFF}').replace("\r\n", "\n").replace('\r', "\n");
        text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// Those of them that are JSON.
    fn events(&self) -> Vec<Value> {
        self.data().iter().filter_map(|data| serde_json::from_str(data).ok()).collect()
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (field, value) = line.split_once(": ")?;
            field.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

struct Client {
    stream: TcpStream,
    buf: Vec<u8>,
    /// Also a stream that never ends must end.
    end: Clock,
}

impl Client {
    fn of(mock: &Mock) -> Client {
        let stream = TcpStream::connect(mock.addr()).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Client { stream, buf: Vec::new(), end: Clock::now() + 2 * PATIENCE }
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Client {
        self.stream.write_all(bytes.as_ref()).unwrap();
        self
    }

    fn patience(&mut self, span: Duration) -> &mut Client {
        self.stream.set_read_timeout(Some(span)).unwrap();
        self
    }

    /// One read; how the input ended, if it did.
    fn fill(&mut self) -> Option<Ended> {
        assert!(Clock::now() < self.end, "{}", String::from_utf8_lossy(&self.buf));
        let mut space = [0; 64 * 1024];
        match self.stream.read(&mut space) {
            Ok(0) => Some(Ended::Fin),
            Ok(read) => {
                self.buf.extend_from_slice(&space[..read]);
                None
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Some(Ended::Silent)
            }
            // Rings that were probed on this thread signal it when they are gone.
            Err(error) if error.kind() == ErrorKind::Interrupted => None,
            Err(_) => Some(Ended::Rst),
        }
    }

    fn reply(&mut self) -> Reply {
        let mut reply = Reply {
            status: 0,
            head: String::new(),
            body: Vec::new(),
            interim: Vec::new(),
            ended: Ended::Whole,
            raw: Vec::new(),
        };
        let mut head = h1::Response::default();
        loop {
            match h1::parse_response(&self.buf, &Limits::default(), Method::Post, &mut head) {
                Ok(Parse::Complete) => {
                    let bytes: Vec<u8> = self.buf.drain(..head.head_len).collect();
                    reply.raw.extend_from_slice(&bytes);
                    if !head.is_interim() {
                        reply.status = head.status;
                        reply.head = String::from_utf8(bytes).unwrap();
                        break;
                    }
                    reply.interim.push(head.status);
                    head.clear();
                }
                Ok(Parse::Partial) => {
                    if let Some(ended) = self.fill() {
                        reply.ended = ended;
                        return reply;
                    }
                }
                Err(_) => {
                    reply.ended = Ended::Broken;
                    reply.raw.append(&mut self.buf);
                    return reply;
                }
            }
        }
        let mut body = Decoder::new(head.framing);
        loop {
            match body.decode(&self.buf) {
                Ok(piece) => {
                    reply.body.extend_from_slice(&self.buf[piece.data]);
                    reply.raw.extend(self.buf.drain(..piece.consumed));
                }
                Err(_) => {
                    reply.ended = Ended::Broken;
                    return reply;
                }
            }
            if body.is_done() {
                return reply;
            }
            if self.buf.is_empty()
                && let Some(ended) = self.fill()
            {
                let until_close = head.framing == Framing::UntilClose && ended == Ended::Fin;
                reply.ended = if until_close { Ended::Whole } else { ended };
                return reply;
            }
        }
    }

    fn ask(&mut self, path: &str, fields: &str, body: &Value) -> Reply {
        self.send(post(path, fields, body)).reply()
    }
}

fn post(path: &str, fields: &str, body: &Value) -> String {
    let body = body.to_string();
    format!(
        "POST {path} HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\n{fields}content-length: \
         {}\r\n\r\n{body}",
        body.len()
    )
}

fn ask(mock: &Mock, path: &str, body: &Value) -> Reply {
    Client::of(mock).ask(path, "", body)
}

fn get(mock: &Mock, path: &str) -> Reply {
    Client::of(mock).send(format!("GET {path} HTTP/1.1\r\nhost: mock\r\n\r\n")).reply()
}

fn chat(stream: bool) -> Value {
    json!({"model": "m", "stream": stream, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello there"}]})
}

fn with(mut body: Value, member: &str, value: Value) -> Value {
    body[member] = value;
    body
}

const CHAT: &str = "/v1/chat/completions";

/// The text of a chat stream, of one choice.
fn told(reply: &Reply, choice: u64) -> String {
    reply
        .events()
        .iter()
        .flat_map(|event| event["choices"].as_array().cloned().unwrap_or_default())
        .filter(|one| one["index"] == choice)
        .filter_map(|one| one["delta"]["content"].as_str().map(str::to_owned))
        .collect()
}

fn ended(mock: &Mock, requests: u64) -> Seen {
    let over = |totals: &Totals| totals.requests == requests && totals.in_flight == 0;
    assert!(mock.counters().wait(PATIENCE, over), "{:?}", mock.counters().totals());
    mock.counters().last().unwrap()
}

#[test]
fn a_chat_says_the_same_whole_and_streamed_and_the_books_agree() {
    for driver in Driver::ALL.into_iter().filter(|driver| driver.probe().is_ok()) {
        let script = Script { driver: Some(driver), ..Script::instant("tokens=20").unwrap() };
        let mock = start(script).unwrap();
        let mut client = Client::of(&mock);
        let whole = client.ask(CHAT, "", &chat(false));
        assert_eq!((whole.status, whole.ended), (200, Ended::Whole));
        let body = whole.json();
        let text = body["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(text.starts_with("You said: hello there"), "{text}");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let options = json!({"include_usage": true});
        let streamed = client.ask(CHAT, "", &with(chat(true), "stream_options", options));
        assert_eq!(streamed.field("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(told(&streamed, 0), text);
        assert_eq!(streamed.data().last().unwrap(), "[DONE]");
        let events = streamed.events();
        let usage = &events.last().unwrap();
        assert_eq!((&usage["choices"], &usage["usage"]), (&json!([]), &body["usage"]));
        // Role, 20 tokens, finish, usage.
        assert_eq!(events.len(), 23);
        let seen = ended(&mock, 2);
        let truth = Truth {
            prompt_tokens: body["usage"]["prompt_tokens"].as_u64().unwrap(),
            completion_tokens: 20,
            ..Truth::default()
        };
        assert_eq!((seen.truth, seen.outcome, seen.connection), (truth, Outcome::Complete, 1));
        assert_eq!(seen.json()["stream"], true);
        assert_eq!(seen.field("Host"), Some("mock"));
        assert!(seen.started <= seen.first_token.unwrap() && seen.first_token <= seen.ended);
        drop(client);
        assert!(mock.counters().wait_idle(PATIENCE), "{}", driver.name());
    }
}

#[test]
fn max_tokens_is_honoured_and_named_as_the_reason() {
    let mock = mock("tokens=10");
    for (limit, tokens, reason) in
        [(1, 1, "length"), (9, 9, "length"), (10, 10, "stop"), (500, 10, "stop")]
    {
        for member in ["max_tokens", "max_completion_tokens"] {
            let body = ask(&mock, CHAT, &with(chat(false), member, json!(limit))).json();
            assert_eq!(body["usage"]["completion_tokens"], tokens);
            assert_eq!(body["choices"][0]["finish_reason"], reason, "{limit}");
        }
    }
    let both = with(with(chat(false), "max_tokens", json!(3)), "max_completion_tokens", json!(4));
    assert_eq!(ask(&mock, CHAT, &both).json()["usage"]["completion_tokens"], 4);
    let forced = with(with(chat(false), "max_tokens", json!(50)), "ignore_eos", json!(true));
    assert_eq!(ask(&mock, CHAT, &forced).json()["usage"]["completion_tokens"], 50);
    let absurd = with(with(forced, "max_tokens", json!(1 << 20)), "n", json!(128));
    assert_eq!(ask(&mock, CHAT, &absurd).status, 400);
    let stopped = ask(&mock, CHAT, &with(chat(false), "stop", json!(["hello"]))).json();
    assert_eq!(stopped["choices"][0]["message"]["content"], "You said: ");
}

#[test]
fn several_choices_are_told_side_by_side_and_counted_together() {
    let mock = mock("tokens=7");
    let many =
        with(with(chat(true), "n", json!(3)), "stream_options", json!({"include_usage": true}));
    let reply = ask(&mock, CHAT, &many);
    let texts = [0, 1, 2].map(|choice| told(&reply, choice));
    assert!(texts[0] != texts[1] && texts[1] != texts[2], "{texts:?}");
    assert_eq!(reply.events().last().unwrap()["usage"]["completion_tokens"], 21);
    assert_eq!(ended(&mock, 1).truth.completion_tokens, 21);
    let whole = ask(&mock, CHAT, &with(many, "stream", json!(false)));
    // Stream options without a stream are an error, as in vLLM.
    assert_eq!(whole.status, 400);
}

#[test]
fn tools_are_called_with_arguments_in_pieces_until_their_result_is_there() {
    let mock = mock("");
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}]);
    let asked = with(chat(true), "tools", tools.clone());
    let reply = ask(&mock, CHAT, &asked);
    let calls: Vec<Value> = reply
        .events()
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["tool_calls"][0].as_object().cloned())
        .map(Value::from)
        .collect();
    assert!(calls.len() > 3);
    assert_eq!(calls[0]["function"]["name"], "weather");
    assert!(calls[0]["id"].is_string() && calls[1]["id"].is_null());
    let arguments: String =
        calls.iter().map(|call| call["function"]["arguments"].as_str().unwrap()).collect();
    let wanted = json!({"city": "hello there", "days": 1});
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), wanted);
    let finish = reply
        .events()
        .iter()
        .rev()
        .find_map(|event| event["choices"][0]["finish_reason"].as_str().map(str::to_owned));
    assert_eq!(finish.as_deref(), Some("tool_calls"));
    let whole = ask(&mock, CHAT, &with(asked.clone(), "stream", json!(false))).json();
    assert_eq!(whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"], "weather");
    assert_eq!(whole["usage"]["completion_tokens"], calls.len());
    for (choice, calls) in [
        (json!("none"), false),
        (json!("auto"), true),
        (json!("required"), true),
        (json!({"type": "function", "function": {"name": "weather"}}), true),
    ] {
        let body = with(with(asked.clone(), "tool_choice", choice), "stream", json!(false));
        let message = &ask(&mock, CHAT, &body).json()["choices"][0]["message"];
        assert_eq!(message["tool_calls"].is_array(), calls);
    }
    let other = with(asked.clone(), "tool_choice", json!({"function": {"name": "other"}}));
    assert_eq!(ask(&mock, CHAT, &other).status, 400);
    let mut answered = with(asked, "stream", json!(false));
    answered["messages"].as_array_mut().unwrap().push(json!({"role": "tool", "content": "sunny"}));
    let text = &ask(&mock, CHAT, &answered).json()["choices"][0]["message"];
    assert!(text["content"].as_str().unwrap().starts_with("You said"), "{text}");
}

#[test]
fn completions_take_all_four_kinds_of_prompt() {
    let mock = mock("tokens=4");
    for (prompt, choices, tokens) in [
        (json!("one two"), 1, 2),
        (json!(["one", "two three"]), 2, 3),
        (json!([5, 6, 7]), 1, 3),
        (json!([[5, 6], [7]]), 2, 3),
    ] {
        let body = json!({"prompt": prompt, "max_tokens": 4});
        let reply = ask(&mock, "/v1/completions", &body).json();
        assert_eq!(reply["choices"].as_array().unwrap().len(), choices, "{body}");
        assert_eq!(reply["usage"]["prompt_tokens"], tokens, "{body}");
        assert_eq!(reply["usage"]["completion_tokens"], 4 * choices);
        if prompt == json!(["one", "two three"]) {
            let texts = [0, 1].map(|index| reply["choices"][index]["text"].clone());
            assert_eq!(texts, ["You said: one", "You said: two"]);
        }
        let streamed = ask(&mock, "/v1/completions", &with(body, "stream", json!(true)));
        let text: String = streamed
            .events()
            .iter()
            .filter(|event| event["choices"][0]["index"] == 0)
            .filter_map(|event| event["choices"][0]["text"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(text, reply["choices"][0]["text"]);
        assert_eq!(streamed.data().last().unwrap(), "[DONE]");
    }
    for prompt in [json!(null), json!(""), json!([]), json!(5), json!([[]]), json!([1, "a"])] {
        assert_eq!(
            ask(&mock, "/v1/completions", &json!({"prompt": prompt})).status,
            400,
            "{prompt}"
        );
    }
}

#[test]
fn responses_and_messages_come_whole_and_as_named_events() {
    let mock = mock("tokens=6");
    let body = json!({"model": "m", "input": "hello", "max_output_tokens": 4});
    let whole = ask(&mock, "/v1/responses", &body).json();
    assert_eq!(
        (&whole["status"], &whole["usage"]["output_tokens"]),
        (&json!("incomplete"), &json!(4))
    );
    let streamed = ask(&mock, "/v1/responses", &with(body, "stream", json!(true)));
    let events = streamed.events();
    for (index, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], index);
        let named = format!("event: {}\ndata: {{\"type\":", event["type"].as_str().unwrap());
        assert!(String::from_utf8_lossy(&streamed.body).contains(&named), "{named}");
    }
    let deltas: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(deltas, whole["output"][0]["content"][0]["text"]);
    let last = &events.last().unwrap()["response"];
    assert_eq!(
        (&last["output"][0]["content"], &last["usage"]),
        (&whole["output"][0]["content"], &whole["usage"])
    );

    let body = json!({"model": "m", "max_tokens": 4, "system": "x",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]});
    let whole = ask(&mock, "/v1/messages", &body).json();
    assert_eq!((&whole["type"], &whole["stop_reason"]), (&json!("message"), &json!("max_tokens")));
    let count = ask(&mock, "/v1/messages/count_tokens", &body).json();
    assert_eq!(count["input_tokens"], whole["usage"]["input_tokens"]);
    let events = ask(&mock, "/v1/messages", &with(body.clone(), "stream", json!(true))).events();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, whole["content"][0]["text"]);
    assert_eq!(events[7]["usage"]["output_tokens"], 4);

    let tools = json!([{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}]);
    let called = ask(&mock, "/v1/messages", &with(body, "tools", tools)).json();
    assert_eq!(
        (&called["content"][0]["input"], &called["stop_reason"]),
        (&json!({"a": "hello"}), &json!("tool_use"))
    );
    let body = json!({"input": "hello", "stream": true, "tools": [{"type": "function", "name": "f",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}]});
    let events = ask(&mock, "/v1/responses", &body).events();
    let last = &events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"][0]["arguments"], r#"{"a":"hello"}"#);
}

#[test]
fn the_other_endpoints_answer_in_shape() {
    let mock = mock("");
    let two = ask(&mock, "/v1/embeddings", &json!({"input": ["a", "b c"]})).json();
    let coded = json!({"input": ["a", "b c"], "encoding_format": "base64"});
    let coded = ask(&mock, "/v1/embeddings", &coded).json();
    for index in 0..2 {
        let vector = two["data"][index]["embedding"].as_array().unwrap();
        let bytes: Vec<u8> =
            // An f32 survives the way through an f64.
            vector.iter().flat_map(|x| (x.as_f64().unwrap() as f32).to_le_bytes()).collect();
        assert_eq!(coded["data"][index]["embedding"], text::base64(&bytes));
    }
    assert_eq!(
        two["usage"],
        json!({"prompt_tokens": 3, "total_tokens": 3, "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": null})
    );
    let ranked = json!({"query": "warm rain", "documents": ["snow", {"text": "rain is warm"}, "rain"], "top_n": 2});
    let ranked = ask(&mock, "/v1/rerank", &ranked).json();
    assert_eq!([&ranked["results"][0]["index"], &ranked["results"][1]["index"]], [1, 2]);
    assert_eq!(ranked["results"].as_array().unwrap().len(), 2);
    assert_eq!(ask(&mock, "/tokenize", &json!({"prompt": "one two"})).json()["count"], 2);
    let moderated = ask(&mock, "/v1/moderations", &json!({"input": ["calm", "violence"]})).json();
    assert_eq!(
        [&moderated["results"][0]["flagged"], &moderated["results"][1]["flagged"]],
        [false, true]
    );
    let images = ask(&mock, "/v1/images/generations", &json!({"prompt": "x", "n": 2})).json();
    assert_eq!(images["data"].as_array().unwrap().len(), 2);
    assert_eq!(ask(&mock, "/v1/audio/speech", &json!({"input": "x"})).body.len(), 4096);
    let batch = ask(&mock, "/v1/batches", &json!({"input_file_id": "f"})).json();
    assert_eq!(batch["status"], "validating");
    assert_eq!(get(&mock, "/v1/responses/resp_7").json()["id"], "resp_7");
    assert_eq!(get(&mock, "/v1/files/f7/content").body, b"content of f7\n");

    let form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b\r\n\
        Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
        Content-Type: audio/wav\r\n\r\n\x01\r\n\x02\r\n--b--\r\n";
    let sent = |path: &str, form: &str| {
        Client::of(&mock)
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: m\r\ncontent-type: multipart/form-data; \
                boundary=b\r\ncontent-length: {}\r\n\r\n{form}",
                form.len()
            ))
            .reply()
    };
    assert_eq!(sent("/v1/audio/transcriptions", form).json()["text"], "You sent 4 bytes of sound.");
    let file = sent("/v1/files", form).json();
    assert_eq!((&file["bytes"], &file["filename"]), (&json!(4), &json!("a.wav")));
    assert_eq!(sent("/v1/audio/transcriptions", "--b--").status, 400);
    assert_eq!(sent("/v1/audio/transcriptions", &form[..form.len() - 12]).status, 400);
}

#[test]
fn models_health_metrics_and_sleep_are_probes() {
    let script = Script { models: vec!["a".into(), "b".into()], ..Script::instant("").unwrap() };
    let mock = start(script).unwrap();
    let models = get(&mock, "/v1/models").json();
    assert_eq!([&models["data"][0]["id"], &models["data"][1]["id"]], ["a", "b"]);
    assert_eq!((get(&mock, "/health").status, get(&mock, "/health").body.len()), (200, 0));
    let unknown = ask(&mock, CHAT, &chat(false));
    let error = &unknown.json()["error"];
    assert_eq!(
        (unknown.status, &error["code"], &error["param"]),
        (404, &json!(404), &json!("model"))
    );
    assert_eq!(error["message"], "The model `m` does not exist. Valid aliases: a, b.");
    ask(&mock, CHAT, &with(chat(false), "model", json!("b")));
    let metrics = String::from_utf8(get(&mock, "/metrics").body).unwrap();
    assert!(
        metrics.contains("vllm:num_requests_running{engine=\"0\",model_name=\"a\"} 0\n"),
        "{metrics}"
    );
    assert!(metrics.contains("vllm:generation_tokens_total{engine=\"0\",model_name=\"a\"} 32\n"));
    let totals = mock.counters().totals();
    assert_eq!((totals.requests, totals.probes), (2, 4));

    Client::of(&mock).send("POST /sleep HTTP/1.1\r\nhost: m\r\ncontent-length: 0\r\n\r\n").reply();
    assert_eq!(get(&mock, "/is_sleeping").json()["is_sleeping"], true);
    assert_eq!(get(&mock, "/health").status, 200);
    let silent = Client::of(&mock).patience(Duration::from_millis(50)).ask(CHAT, "", &chat(false));
    assert_eq!(silent.ended, Ended::Silent);
    Client::of(&mock)
        .send("POST /wake_up HTTP/1.1\r\nhost: m\r\ncontent-length: 0\r\n\r\n")
        .reply();
    assert_eq!(ask(&mock, CHAT, &with(chat(false), "model", json!("a"))).status, 200);

    mock.set_script(Script { metrics: Metrics::None, ..Script::instant("health=503").unwrap() });
    assert_eq!([get(&mock, "/metrics").status, get(&mock, "/health").status], [404, 503]);
}

#[test]
fn what_is_not_a_good_request_is_refused_as_vllm_does() {
    let mock = mock("");
    let fields = "POST /v1/chat/completions HTTP/1.1\r\nhost: m\r\n";
    let raw = |kind: &str, body: &str| {
        let length = body.len();
        Client::of(&mock)
            .send(format!("{fields}content-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}"))
            .reply()
    };
    for (body, param) in [
        ("{\"model\":\"m\",", "body.13"),
        ("", "body"),
        ("[]", "body"),
        ("{}", "body.messages"),
        ("{\"messages\":5}", "body.messages"),
        ("{\"messages\":[{}]}", "body.messages.0.role"),
        ("{\"model\":5,\"messages\":[{\"role\":\"user\"}]}", "body.model"),
        ("{\"messages\":[{\"role\":\"user\"}],\"stream\":\"yes\"}", "body.stream"),
        ("{\"messages\":[{\"role\":\"user\"}],\"max_tokens\":\"1\"}", "body.max_tokens"),
        ("{\"messages\":[{\"role\":\"user\"}],\"max_tokens\":0}", "max_tokens"),
        ("{\"messages\":[{\"role\":\"user\"}],\"n\":1.5}", "body.n"),
    ] {
        let reply = raw("application/json", body);
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["param"], &error["code"]),
            (400, &json!(param), &json!(400)),
            "{body}"
        );
    }
    assert_eq!(raw("text/plain", "{}").status, 400);
    assert_eq!(get(&mock, "/v1/nothing").status, 404);
    let wrong = get(&mock, CHAT);
    assert_eq!((wrong.status, wrong.field("allow")), (405, Some("POST")));
    for broken in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET /\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: m\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ] {
        let mut client = Client::of(&mock);
        assert_eq!(client.send(broken).reply().status, 400, "{broken}");
        assert_eq!(client.fill(), Some(Ended::Fin));
    }
    let bad_chunk = format!(
        "{fields}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nx\r\n"
    );
    assert_eq!(Client::of(&mock).send(bad_chunk).reply().status, 400);
    assert_eq!(mock.counters().totals().refused, 4);
    let bounded = Script { context: Some(20), ..Script::instant("").unwrap() };
    mock.set_script(bounded);
    let reply = ask(&mock, CHAT, &with(chat(false), "max_tokens", json!(5)));
    assert!(
        reply.json()["error"]["message"].as_str().unwrap().contains("maximum context length is 20")
    );
    mock.set_script(Script { key: Some("k".into()), ..Script::instant("").unwrap() });
    assert_eq!(ask(&mock, CHAT, &chat(false)).json(), json!({"error": "Unauthorized"}));
    for field in ["authorization: Bearer k\r\n", "x-api-key: k\r\n"] {
        assert_eq!(Client::of(&mock).ask(CHAT, field, &chat(false)).status, 200);
    }
}

#[test]
fn pipelined_chunked_and_expecting_requests_are_served_in_order() {
    let mock = mock("tokens=3");
    let mut client = Client::of(&mock);
    let one = with(chat(false), "user", json!("1"));
    let two = post(CHAT, "x-request-id: two\r\n", &chat(true));
    client.send(post(CHAT, "x-request-id: one\r\n", &one) + &two);
    let first = client.reply();
    assert_eq!(
        (first.json()["id"].as_str(), first.field("x-request-id")),
        (Some("chatcmpl-one"), Some("one"))
    );
    assert_eq!(client.reply().events()[0]["id"], "chatcmpl-two");
    let body = chat(false).to_string();
    let (left, right) = body.split_at(7);
    client.send(format!(
        "POST {CHAT} HTTP/1.1\r\nhost: m\r\ncontent-type: application/json\r\ntransfer-encoding: \
         chunked\r\nexpect: 100-continue\r\n\r\n"
    ));
    let mut interim = h1::Response::default();
    while h1::parse_response(&client.buf, &Limits::default(), Method::Post, &mut interim)
        == Ok(Parse::Partial)
    {
        assert_eq!(client.fill(), None);
    }
    assert_eq!(interim.status, 100);
    client.send(format!("7\r\n{left}\r\n{:x}\r\n{right}\r\n0\r\n\r\n", right.len()));
    assert_eq!((client.reply().status, mock.counters().last().unwrap().json()), (200, chat(false)));
    assert_eq!(mock.counters().totals().connections, 1);
    client.send(post(CHAT, "connection: close\r\n", &chat(true)));
    let last = client.reply();
    assert_eq!((last.ended, last.field("connection")), (Ended::Whole, Some("close")));
    assert_eq!(client.fill(), Some(Ended::Fin));
}

#[test]
fn a_client_that_leaves_is_noticed_at_once_and_its_tokens_are_counted_so_far() {
    for driver in Driver::ALL.into_iter().filter(|driver| driver.probe().is_ok()) {
        let script = Script { driver: Some(driver), ..Script::instant("stall_after=2").unwrap() };
        let mock = start(script).unwrap();
        for (round, how) in [Shutdown::Both, Shutdown::Write].into_iter().enumerate() {
            let mut client = Client::of(&mock);
            client.send(post(CHAT, "", &chat(true)));
            while String::from_utf8_lossy(&client.buf).matches("\"content\"").count() < 3 {
                assert_eq!(client.fill(), None);
            }
            let left = rt::now();
            client.stream.shutdown(how).unwrap();
            let seen = ended(&mock, round as u64 + 1);
            assert_eq!((seen.outcome, seen.truth.completion_tokens), (Outcome::ClientGone, 2));
            // Generous, as the machine may be busy; alone it is under 1 ms.
            assert!(
                seen.ended.unwrap().since(left) < Duration::from_millis(500),
                "{}",
                driver.name()
            );
        }
        assert_eq!(mock.counters().totals().aborted, 2);
        assert!(mock.counters().wait_idle(PATIENCE));
    }
}

#[test]
fn faults_of_a_stream_look_on_the_wire_as_they_should() {
    let mock = mock("tokens=5");
    let options = json!({"include_usage": true});
    let play = |act: &str| {
        let mut client = Client::of(&mock);
        if act.contains("stall") || act.contains("only") || act.contains("hangs") {
            client.patience(Duration::from_millis(60));
        }
        let asked = with(chat(true), "stream_options", options.clone());
        client.ask(CHAT, &format!("x-mock: {act}\r\n"), &asked)
    };
    for (act, ended, content) in [
        ("reset_after=3", Ended::Rst, 3),
        ("close_after=3", Ended::Fin, 3),
        ("stall_after=3", Ended::Silent, 3),
        ("reset_after=0", Ended::Rst, 0),
        ("close_after=0", Ended::Fin, 0),
        ("stall_after=0, ping=200ms", Ended::Silent, 0),
        ("head_only", Ended::Silent, 0),
        ("close_after=5", Ended::Fin, 5),
        ("close_after=6", Ended::Whole, 5),
        ("error_after=2", Ended::Whole, 2),
        ("close_delimited", Ended::Whole, 5),
        ("http10", Ended::Whole, 5),
        ("chunk_size=1", Ended::Whole, 5),
        ("write_size=100", Ended::Whole, 5),
        ("merge=4", Ended::Whole, 5),
        ("slow_head=20ms", Ended::Whole, 5),
        ("body_delay=5ms, read_delay=5ms, late_head", Ended::Whole, 5),
        ("crlf, bom, comments, trailers", Ended::Whole, 5),
        ("cr, bom, comments, early_role", Ended::Whole, 5),
        ("garbage=event", Ended::Whole, 5),
    ] {
        let reply = play(act);
        assert_eq!((reply.status, reply.ended), (200, ended), "{act}: {reply:?}");
        let contents = reply
            .events()
            .iter()
            .filter(|event| {
                event["choices"][0]["delta"]["content"]
                    .as_str()
                    .is_some_and(|text| !text.is_empty())
            })
            .count();
        assert_eq!(contents, content, "{act}");
        let done = reply.data().iter().any(|data| data == "[DONE]");
        assert_eq!(done, ended == Ended::Whole, "{act}");
    }
    let failed = play("error_after=2");
    assert_eq!(failed.events().last().unwrap()["error"]["code"], 500);
    assert!(String::from_utf8_lossy(&play("ping=2ms, ttft=40ms").body).contains(": ping\n\n"));
    assert!(play("bom, crlf").body.starts_with("\u{FEFF}data: ".as_bytes()));
    assert!(play("http10").head.starts_with("HTTP/1.0 200"));
    assert_eq!(play("hangs").ended, Ended::Silent);
    assert_eq!(play("garbage=head").ended, Ended::Broken);
    assert_eq!(play("garbage=framing").ended, Ended::Broken);
    let rubbish = play("garbage");
    assert!(rubbish.ended == Ended::Whole && std::str::from_utf8(&rubbish.body).is_err());
    assert!(!play("no_done").data().iter().any(|data| data == "[DONE]"));
    assert_eq!((play("interim").interim, play("interim=100").interim), (vec![103], vec![100]));
    assert_eq!(
        play("finish=content_filter").events()[6]["choices"][0]["finish_reason"],
        "content_filter"
    );
    assert_eq!(play("finish=none").events()[6]["choices"][0]["finish_reason"], Value::Null);
    let cut = play("chunk_size=7").raw;
    assert!(cut.windows(5).filter(|bytes| bytes == b"\r\n7\r\n").count() > 50);
    let thinking = play("reasoning=2").events();
    assert_eq!(
        thinking
            .iter()
            .filter(|event| event["choices"][0]["delta"]["reasoning_content"].is_string())
            .count(),
        2
    );
}

#[test]
fn faults_of_a_plain_answer_look_on_the_wire_as_they_should() {
    let mock = mock("tokens=5");
    for (act, status, ended) in [
        ("", 200, Ended::Whole),
        ("reset_after=1", 200, Ended::Rst),
        ("close_after=1", 200, Ended::Fin),
        ("stall_after=1", 200, Ended::Silent),
        ("head_only", 200, Ended::Silent),
        ("hangs", 0, Ended::Silent),
        ("slow_head=20ms, body_delay=5ms", 200, Ended::Whole),
        ("http10", 200, Ended::Whole),
        ("close_delimited", 200, Ended::Whole),
        ("garbage", 200, Ended::Whole),
        ("garbage=head", 0, Ended::Broken),
        ("garbage=framing", 0, Ended::Broken),
        ("status=503", 503, Ended::Whole),
        ("status=204", 204, Ended::Whole),
        ("status=201", 201, Ended::Whole),
        ("status=429, early", 429, Ended::Whole),
        ("stale", 200, Ended::Whole),
    ] {
        let mut client = Client::of(&mock);
        if ended == Ended::Silent {
            client.patience(Duration::from_millis(60));
        }
        let reply = client.ask(CHAT, &format!("x-mock: {act}\r\n"), &chat(false));
        assert_eq!((reply.status, reply.ended), (status, ended), "{act}");
    }
    let mut client = Client::of(&mock);
    for (shape, wanted) in [
        (
            "vllm",
            json!({"error": {"message": "mock: asked to answer 429", "type": "TooManyRequestsError", "param": null, "code": 429}}),
        ),
        (
            "openai",
            json!({"error": {"message": "mock: asked to answer 429", "type": "rate_limit_error", "param": null, "code": "rate_limit_exceeded"}}),
        ),
        (
            "flat",
            json!({"object": "error", "message": "mock: asked to answer 429", "type": "TooManyRequestsError", "param": null, "code": 429}),
        ),
        ("tgi", json!({"error": "mock: asked to answer 429", "error_type": "overloaded"})),
        ("ollama", json!({"error": "mock: asked to answer 429"})),
    ] {
        let act = format!("x-mock: status=429, retry_after=7, error_body={shape}\r\n");
        let reply = client.ask(CHAT, &act, &chat(false));
        assert_eq!((reply.json(), reply.field("retry-after")), (wanted, Some("7")), "{shape}");
    }
    // Reused: the connection is reset under the second request, and a fresh one serves.
    assert_eq!(client.ask(CHAT, "x-mock: stale\r\n", &chat(false)).ended, Ended::Rst);
    let mut promised = Client::of(&mock);
    let reply = promised.ask(CHAT, "x-mock: drop_idle\r\n", &chat(false));
    assert_eq!((reply.field("connection"), promised.fill()), (None, Some(Ended::Fin)));
}

#[test]
fn usage_is_reported_as_asked_while_the_books_keep_the_truth() {
    let mock = mock("tokens=5, prompt_tokens=11, cached=4");
    let asked = with(chat(true), "stream_options", json!({"include_usage": true}));
    let huge = serde_json::from_str::<Value>("900000000000000000000005").unwrap();
    for (say, completion) in [
        ("right", json!(5)),
        ("wrong", json!(17)),
        ("negative", json!(-6)),
        ("huge", huge),
        ("float", json!(5.5)),
        ("text", json!("5")),
        ("null", Value::Null),
        ("missing", Value::Null),
    ] {
        for stream in [true, false] {
            let act = format!("x-mock: usage={say}\r\n");
            let body = if stream { asked.clone() } else { chat(false) };
            let reply = Client::of(&mock).ask(CHAT, &act, &body);
            let found = reply.events().into_iter().chain(serde_json::from_slice(&reply.body).ok());
            let usage: Vec<Value> = found.filter_map(|event| event.get("usage").cloned()).collect();
            assert_eq!(usage.len(), usize::from(say != "missing"), "{say} {stream}");
            let reported =
                usage.first().map_or(Value::Null, |usage| usage["completion_tokens"].clone());
            assert_eq!(reported, completion, "{say} {stream}");
        }
    }
    let seen = ended(&mock, 16);
    assert_eq!(
        (seen.truth.prompt_tokens, seen.truth.completion_tokens, seen.truth.cached_tokens),
        (11, 5, 4)
    );
    let with_usage = |act: &str, body: &Value| -> Vec<(bool, u64)> {
        let reply = Client::of(&mock).ask(CHAT, &format!("x-mock: {act}\r\n"), body);
        let events = reply.events();
        let usage = events.iter().filter(|event| event["usage"].is_object());
        usage
            .map(|event| {
                (
                    event["choices"] == json!([]),
                    event["usage"]["completion_tokens"].as_u64().unwrap(),
                )
            })
            .collect()
    };
    assert_eq!(with_usage("usage=on_last_chunk", &asked), [(false, 5)]);
    let running = [
        (false, 0),
        (false, 1),
        (false, 2),
        (false, 3),
        (false, 4),
        (false, 5),
        (false, 5),
        (true, 5),
    ];
    assert_eq!(with_usage("usage=running", &asked), running);
    let continuous = json!({"include_usage": true, "continuous_usage_stats": true});
    assert_eq!(with_usage("", &with(asked.clone(), "stream_options", continuous)), running);
    assert_eq!(with_usage("usage=always", &chat(true)), [(true, 5)]);
    assert_eq!(with_usage("", &chat(true)), []);
    let claude = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]});
    let usage = &ask(&mock, "/v1/messages", &claude).json()["usage"];
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(7), &json!(4)));
}

#[test]
fn faults_can_be_asked_for_in_the_body_and_limited_in_number() {
    let mock = mock("status=503, times=2");
    let statuses = |n| (0..n).map(|_| ask(&mock, CHAT, &chat(false)).status).collect::<Vec<_>>();
    assert_eq!(statuses(4), [503, 503, 200, 200]);
    mock.set_act("every=3, times=2").unwrap();
    assert_eq!(statuses(9), [200, 200, 503, 200, 200, 503, 200, 200, 200]);
    mock.set_script(Script::instant("").unwrap());
    assert_eq!(ask(&mock, CHAT, &with(chat(false), "mock", json!("status=418"))).status, 418);
    assert_eq!(statuses(1), [200]);
    let typo = Client::of(&mock).ask(CHAT, "x-mock: stauts=503\r\n", &chat(false));
    assert_eq!(
        (typo.status, typo.json()["error"]["message"].as_str()),
        (400, Some("mock: unknown key `stauts`"))
    );
    assert_eq!(ask(&mock, CHAT, &with(chat(false), "mock", json!("tokens"))).status, 400);
    assert!(mock.set_act("nonsense").is_err());
    let put = "PUT /mock HTTP/1.1\r\nhost: m\r\ncontent-length: 10\r\n\r\nstatus=500";
    assert_eq!(Client::of(&mock).send(put).reply().status, 200);
    assert_eq!(statuses(1), [500]);
    let books = get(&mock, "/mock").json();
    assert_eq!((&books["requests"], &books["recent"][0]["status"]), (&json!(18), &json!(503)));
}

#[test]
fn slots_let_requests_run_in_order_and_the_rest_wait() {
    let script = Script { slots: Some(2), ..Script::instant("stall_after=1").unwrap() };
    let mock = start(script).unwrap();
    let mut clients: Vec<Client> = (0..5)
        .map(|index| {
            let mut client = Client::of(&mock);
            client.send(post(CHAT, "", &chat(true)));
            let arrived = |totals: &Totals| totals.requests == index + 1;
            assert!(mock.counters().wait(PATIENCE, arrived));
            client
        })
        .collect();
    let waits = |n| move |totals: &Totals| totals.waiting == n;
    assert!(mock.counters().wait(PATIENCE, waits(3)));
    let running = |mock: &Mock| -> Vec<u64> {
        let seen = mock.counters().seen();
        let open = seen.iter().filter(|seen| seen.outcome == Outcome::Running);
        open.filter(|seen| seen.first_token.is_some()).map(|seen| seen.number).collect()
    };
    // One that waits leaves; then one that runs: the oldest that waits takes its place.
    drop(clients.remove(3));
    assert!(mock.counters().wait(PATIENCE, waits(2)));
    drop(clients.remove(0));
    assert!(mock.counters().wait(PATIENCE, waits(1)));
    assert!(mock.counters().wait(PATIENCE, |_| running(&mock) == [2, 3]));
    drop(clients);
    assert!(mock.counters().wait_idle(PATIENCE));
    assert_eq!(mock.counters().totals().aborted, 5);
}

#[test]
fn the_pace_is_kept_and_a_stop_ends_everything() {
    let mut script = Script::instant("ttft=30ms, inter_token=10ms, tokens=4").unwrap();
    script.idle = Duration::from_millis(30);
    let mock = start(script).unwrap();
    let mut client = Client::of(&mock);
    for stream in [true, false] {
        let start = Clock::now();
        assert_eq!(client.ask(CHAT, "", &chat(stream)).status, 200);
        assert!(start.elapsed() >= Duration::from_millis(60), "{:?}", start.elapsed());
    }
    assert_eq!(client.fill(), Some(Ended::Fin), "idle connections are closed");
    mock.set_act("hangs").unwrap();
    let mut waiting = Client::of(&mock);
    waiting.send(post(CHAT, "", &chat(true)));
    let mut idle = Client::of(&mock);
    assert!(mock.counters().wait(PATIENCE, |totals| totals.in_flight == 1));
    let (counters, addr) = (mock.counters().clone(), mock.addr());
    mock.stop().unwrap();
    assert!(matches!(waiting.fill(), Some(Ended::Fin | Ended::Rst)));
    assert!(matches!(idle.fill(), Some(Ended::Fin | Ended::Rst)));
    assert!(TcpStream::connect(addr).is_err());
    let totals = counters.totals();
    assert_eq!((totals.in_flight, totals.connections_open), (0, 0));
    assert_eq!(counters.last().unwrap().outcome, Outcome::Stopped);
    // The port is free again at once.
    let again = serve(listen(addr).unwrap(), Script::instant("").unwrap()).unwrap();
    assert_eq!(ask(&again, CHAT, &chat(false)).status, 200);
}

#[test]
fn a_thousand_streams_run_side_by_side() {
    let script = Script::instant("ttft=5ms, inter_token=5ms, tokens=5, jitter=5ms").unwrap();
    let mock = start(script).unwrap();
    let mut clients: Vec<Client> = (0..1_000)
        .map(|_| {
            let mut client = Client::of(&mock);
            client.send(post(CHAT, "", &chat(true)));
            client
        })
        .collect();
    let first = told(&clients[0].reply(), 0);
    assert!(clients[1..].iter_mut().all(|client| told(&client.reply(), 0) == first));
    drop(clients);
    assert!(mock.counters().wait_idle(PATIENCE));
    let totals = mock.counters().totals();
    assert_eq!((totals.complete, totals.completion_tokens), (1_000, 5_000));
}

#[test]
fn what_is_remembered_is_bounded_and_a_large_body_is_kept_whole() {
    let script = Script { kept_requests: 2, ..Script::instant("tokens=1").unwrap() };
    let mock = start(script).unwrap();
    let mut client = Client::of(&mock);
    for _ in 0..5 {
        client.ask(CHAT, "", &chat(false));
    }
    let numbers: Vec<u64> = mock.counters().seen().iter().map(|seen| seen.number).collect();
    assert_eq!(numbers, [4, 5]);
    let large = with(chat(false), "pad", json!("x".repeat(3 << 20)));
    assert_eq!(client.ask(CHAT, "", &large).status, 200);
    let seen = mock.counters().last().unwrap();
    assert_eq!((seen.body_bytes, seen.json()), (seen.body.len() as u64, large));
}

#[test]
fn flags_make_the_script() {
    use clap::Parser as _;
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: MockArgs,
    }
    let line = "mock --model a --model b --ttft 5ms --no-done --garbage --slots 3 --metrics none \
                --fault status=503,times=1 --fault tokens=9 --listen 127.0.0.1:0";
    let args = Line::try_parse_from(line.split_whitespace()).unwrap().args;
    let script = args.script().unwrap();
    let mut act = Act::default();
    act.apply("ttft=5ms, no_done, garbage, status=503, times=1, tokens=9").unwrap();
    assert_eq!((script.act, script.slots, script.metrics), (act, Some(3), Metrics::None));
    assert_eq!(script.models, ["a", "b"]);
    let args = Line::try_parse_from(["mock", "--fault", "tokens"]).unwrap().args;
    assert!(args.script().is_err());
    assert!(Line::try_parse_from(["mock", "--ttft", "soon"]).is_err());
    let taken = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let addr: SocketAddr = rustix::net::getsockname(&taken).unwrap().try_into().unwrap();
    assert_eq!(listen(addr).unwrap_err().kind(), ErrorKind::AddrInUse);
}
