//! Goal: what a scanner reports is right, and does not depend on how the stream was cut.
//! Method: recorded streams of real engines against a slow reading of the standard over
//! `serde_json`, in every cut; seeded mutations of them; hand-made cases for the rules.

use super::*;
use crate::pure::units::Rng;
use crate::pure::usage::TOKENS_MAX;
use serde_json::Value;

macro_rules! recorded {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../tests/recorded/", $name, ".sse")))),+]
    };
}

const RECORDED: &[(&str, &[u8])] = recorded![
    "llamacpp-chat-n2",
    "llamacpp-chat-usage",
    "llamacpp-completions",
    "llamacpp-messages",
    "llamacpp-native",
    "llamacpp-responses",
    "llamacpp-two-prompts",
    "vllm-chat-continuous",
    "vllm-chat-logprobs",
    "vllm-chat-tools",
    "vllm-chat-usage",
    "vllm-completions",
    "vllm-messages",
    "vllm-responses",
];

/// Events with offsets from the start of the stream, and the tally.
fn scan<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Vec<(i64, i64, Event)>, Tally) {
    let mut scanner = Scanner::new();
    let mut events = Vec::new();
    let mut base = 0;
    for piece in pieces {
        let before = events.len();
        scanner.push(piece, |event| {
            events.push((base + event.start, base + event.end as i64, event));
        });
        if let Some((_, end, _)) = events[..before].last_mut() {
            *end += scanner.tail() as i64;
        }
        base += piece.len() as i64;
        assert!(scanner.held.capacity() <= HELD_BYTES_MAX);
        assert_eq!(scanner.before == 0 && !scanner.lines.after_cr, scanner.at_boundary());
    }
    if let Some(event) = scanner.finish() {
        events.push((base + event.start, base + event.end as i64, event));
    }
    for (_, _, event) in &mut events {
        (event.start, event.end) = (0, 0);
    }
    (events, *scanner.tally())
}

fn kinds(stream: &[u8]) -> String {
    let letter = |event: &Event| match event.kind {
        Kind::Comment => ':',
        Kind::Error => 'E',
        Kind::Content => 'c',
        Kind::Done => 'D',
        Kind::Usage => 'U',
        Kind::Other => '.',
    };
    scan([stream]).0.iter().map(|(_, _, event)| letter(event)).collect()
}

fn usage_of(stream: &[u8]) -> Option<(Option<u64>, Option<u64>, Option<u64>)> {
    scan([stream]).1.usage.map(|usage| (usage.prompt, usage.completion, usage.total))
}

#[test]
fn recorded_streams_are_read_as_people_read_them() {
    let summary: String = RECORDED
        .iter()
        .map(|(name, stream)| {
            let tally = scan([*stream]).1;
            let usage = tally.usage.unwrap_or_default();
            format!(
                "{name:22} {:24} {:?} {:?} cached {:?} text {}/{} fresh {} {:?}\n",
                kinds(stream),
                usage.prompt,
                usage.completion,
                usage.cached,
                tally.text.tokens,
                tally.text.bytes,
                tally.fresh.tokens,
                tally.ending(),
            )
            .replace("Some(", "")
            .replace(") ", " ")
        })
        .collect();
    assert_eq!(summary, SUMMARY, "\n{summary}");
}

const SUMMARY: &str = "\
llamacpp-chat-n2       .c.ccccc.Uc.UD           25 16 cached 24 text 7/28 fresh 0 Done
llamacpp-chat-usage    .cccccc.UD               25 16 cached 24 text 6/16 fresh 0 Done
llamacpp-completions   cccccccc.D               5 8 cached 4 text 8/27 fresh 0 Done
llamacpp-messages      ..cccccccc..D            12 8 cached 11 text 8/26 fresh 0 Done
llamacpp-native        ccccD                    3 4 cached None text 4/11 fresh 0 Done
llamacpp-responses     ....cccccccc...D         12 8 cached 11 text 8/27 fresh 0 Done
llamacpp-two-prompts   .ccccccccccc.c.D         4 6 cached 3 text 12/35 fresh 0 Done
vllm-chat-continuous   .cccccccUD               25 16 cached 0 text 7/24 fresh 0 Done
vllm-chat-logprobs     .ccccD                   None None cached None text 4/18 fresh 4 Done
vllm-chat-tools        .ccccc.UD                400 48 cached 384 text 5/15 fresh 0 Done
vllm-chat-usage        .cccccccUD               25 16 cached 0 text 7/23 fresh 0 Done
vllm-completions       ccccccccUD               5 8 cached 0 text 8/25 fresh 0 Done
vllm-messages          ..cccccccc..D            12 8 cached 0 text 8/21 fresh 0 Done
vllm-responses         ....ccccc...D            12 8 cached 0 text 5/27 fresh 0 Done
";

/// The standard's way of reading a stream, over the whole of it: names and data of its events.
fn dispatched(stream: &[u8]) -> Vec<(String, String)> {
    let text = String::from_utf8_lossy(stream).into_owned();
    let text = text.strip_prefix('\u{FEFF}').unwrap_or(&text);
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut events = Vec::new();
    let (mut name, mut data, mut fields) = (String::new(), Vec::new(), false);
    let mut lines: Vec<&str> = text.split('\n').collect();
    // The end of the stream ends an event, too.
    if lines.pop_if(|last| last.is_empty()).is_none() || fields {
        lines.push("");
    }
    lines.push("");
    for line in lines {
        if line.is_empty() {
            if fields {
                events.push((name, data.join("\n")));
            }
            (name, data, fields) = (String::new(), Vec::new(), false);
            continue;
        }
        if line.starts_with(':') {
            continue;
        }
        fields = true;
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "data" => data.push(value.to_owned()),
            "event" => name = value.to_owned(),
            _ => {}
        }
    }
    events
}

/// An event as [`Event`] has it, read from a parsed document by the plainest code.
fn oracle(name: &str, data: &str) -> Option<(Kind, Option<Usage>, u64, u64)> {
    if data.trim_ascii() == "[DONE]" {
        return Some((Kind::Done, None, 0, 0));
    }
    let value: Value = serde_json::from_str(data).ok()?;
    let none = Value::Null;
    let at = |path: &str| value.pointer(path).unwrap_or(&none);
    let mut text = String::new();
    let mut said = 0;
    let choices = at("/choices").as_array().cloned().unwrap_or_default();
    for choice in &choices {
        let mut here = false;
        for (key, inner) in choice.as_object().into_iter().flatten() {
            match (key.as_str(), inner) {
                ("text", _) => here |= words(inner, &mut text),
                ("delta" | "message", Value::String(_)) => here |= words(inner, &mut text),
                ("delta" | "message", _) => here |= delta(inner, &mut text),
                _ => {}
            }
        }
        said += u64::from(here);
    }
    let mut here = false;
    for key in ["delta", "token"] {
        here |= match at(&format!("/{key}")) {
            inner @ Value::String(_) => words(inner, &mut text),
            inner => delta(inner, &mut text),
        };
    }
    here |= words(at("/content"), &mut text);
    for key in ["name", "text", "thinking"] {
        here |= words(at(&format!("/content_block/{key}")), &mut text);
    }
    for outer in ["response", "message"] {
        for key in ["content", "thinking", "tool_calls"] {
            here |= words(at(&format!("/{outer}/{key}")), &mut text);
        }
    }
    here |= at("/response").is_string() && words(at("/response"), &mut text);
    match at("/output") {
        Value::Object(output) => {
            here |= words(output.get("text").unwrap_or(&none), &mut text);
        }
        output => here |= output.is_array() && words(output, &mut text),
    }
    said += u64::from(here);
    let kind = match at("/type").as_str() {
        Some(kind) => kind.to_owned(),
        None => String::new(),
    };
    let last = |kind: &str| {
        matches!(
            kind,
            "message_stop" | "response.completed" | "response.incomplete" | "response.cancelled"
        )
    };
    let failed = |value: &Value| match value {
        Value::Object(members) => !members.is_empty(),
        _ => false,
    };
    let error = ["error", "response.failed"];
    let error = error.contains(&name)
        || error.contains(&kind.as_str())
        || failed(at("/error"))
        || at("/error").as_str().is_some_and(|text| !text.is_empty())
        || at("/object") == "error"
        || failed(at("/response/error"))
        || failed(at("/message/error"));
    let stop = at("/stop") == &Value::Bool(true)
        || at("/done") == &Value::Bool(true)
        || at("/generated_text").is_string();
    let mut usage = None;
    let mut top = false;
    for (key, inner) in value.as_object()? {
        let object = match key.as_str() {
            "usage" => inner,
            "response" | "message" => inner.get("usage").unwrap_or(&none),
            _ => continue,
        };
        if let Some(found) = oracle_usage(object) {
            usage = Some(found);
            top = key == "usage";
        }
    }
    if usage.is_none() {
        let count = |keys: [&str; 2]| {
            let mut keys = keys.iter().filter_map(|key| value.get(key));
            keys.next_back().and_then(Value::as_u64).filter(|&tokens| tokens <= TOKENS_MAX)
        };
        let prompt = count(["tokens_evaluated", "prompt_eval_count"]);
        let completion = count(["tokens_predicted", "eval_count"]);
        if prompt.is_some() || completion.is_some() {
            usage = Some(Usage { prompt, completion, ..Usage::default() });
        }
    }
    let kind = if error {
        Kind::Error
    } else if said > 0 {
        Kind::Content
    } else if stop || last(name) || last(&kind) {
        Kind::Done
    } else if top && choices.is_empty() && kind.is_empty() {
        Kind::Usage
    } else {
        Kind::Other
    };
    Some((kind, usage, text.len() as u64, said))
}

fn delta(value: &Value, text: &mut String) -> bool {
    let mut here = false;
    for (key, inner) in value.as_object().into_iter().flatten() {
        here |= match key.as_str() {
            "content" | "reasoning_content" | "reasoning" | "refusal" | "tool_calls"
            | "function_call" | "text" | "thinking" | "partial_json" => words(inner, text),
            "audio" | "images" | "reasoning_details" => match inner {
                Value::Object(members) => !members.is_empty(),
                Value::Array(elements) => !elements.is_empty(),
                _ => false,
            },
            _ => false,
        };
    }
    here
}

fn words(value: &Value, text: &mut String) -> bool {
    match value {
        Value::String(part) => {
            text.push_str(part);
            !part.is_empty()
        }
        Value::Array(elements) => elements.iter().fold(false, |here, element| {
            let container = element.is_object() || element.is_array();
            here | container | (container && words(element, text))
        }),
        Value::Object(members) => members.iter().fold(false, |here, (key, inner)| {
            let counts = matches!(
                key.as_str(),
                "text"
                    | "arguments"
                    | "name"
                    | "content"
                    | "function"
                    | "summary"
                    | "thinking"
                    | "refusal"
                    | "reasoning"
                    | "custom"
                    | "input"
            );
            here | (counts && words(inner, text))
        }),
        _ => false,
    }
}

fn oracle_usage(value: &Value) -> Option<Usage> {
    if !value.is_object() {
        return None;
    }
    Usage::from_json(&serde_json::to_vec(value).expect("a value can be written"))
}

fn assert_like_oracle(stream: &[u8], what: &str) {
    let (events, _) = scan([stream]);
    let mut events = events.iter().map(|(_, _, event)| event);
    let mut done = false;
    for (name, data) in dispatched(stream) {
        let event = events.by_ref().find(|event| event.kind != Kind::Comment);
        let event = event.unwrap_or_else(|| panic!("{what}: no event for {data}"));
        let found = (event.kind, event.usage, u64::from(event.text_bytes));
        let expected = oracle(&name, &data).map(|(kind, usage, bytes, _)| (kind, usage, bytes));
        if let Some(expected) = expected.filter(|_| !done) {
            assert_eq!(found, expected, "{what}: {name} {data}");
        }
        done |= event.last;
    }
    assert!(events.all(|event| event.kind == Kind::Comment), "{what}: too many events");
}

#[test]
fn recorded_streams_are_read_like_the_oracle() {
    for (name, stream) in RECORDED {
        assert_like_oracle(stream, name);
    }
}

#[test]
fn cuts_do_not_matter() {
    for (name, stream) in RECORDED {
        for end in ["\n", "\r\n", "\r"] {
            let stream = String::from_utf8_lossy(stream).replace('\n', end).into_bytes();
            let whole = scan([&stream[..]]);
            for size in [1, 2, 3, 7, 64, 150, 333] {
                assert_eq!(scan(stream.chunks(size)), whole, "{name} cut by {size}");
            }
            // One cut in every place. Between events a scanner has no past but its tally and the
            // shape it knows, so an event and the start of the next are enough.
            let mut scanner = Scanner::new();
            let mut from = 0;
            for (_, to, event) in whole.0 {
                let (from, to) = (std::mem::replace(&mut from, to as usize), to as usize);
                // Bare LF and CR are the simpler cases.
                let step = if end == "\r\n" { 1 } else { 7 };
                for at in (from + 1..(to + 2).min(stream.len())).step_by(step) {
                    let mut scanner = scanner.clone();
                    let mut found = Vec::new();
                    scanner.push(&stream[from..at], |event| found.push((at, event)));
                    let stop = stream.len().min(to + 10);
                    scanner.push(&stream[at..stop], |event| found.push((stop, event)));
                    let (_, first) = found[0];
                    assert_eq!(found.len(), 1, "{name} cut at {at}");
                    assert_eq!(Event { start: 0, end: 0, ..first }, event, "{name} cut at {at}");
                }
                scanner.push(&stream[from..to], |_| {});
            }
        }
    }
}

#[test]
fn line_ends_do_not_matter() {
    for (name, stream) in RECORDED {
        let text = String::from_utf8_lossy(stream);
        for end in ["\r\n", "\r"] {
            let other = text.replace('\n', end);
            assert_eq!(kinds(other.as_bytes()), kinds(stream), "{name} with {end:?}");
            assert_eq!(usage_of(other.as_bytes()), usage_of(stream), "{name} with {end:?}");
        }
    }
}

#[test]
fn events_cover_the_stream_without_gaps() {
    for (name, stream) in RECORDED {
        let (events, _) = scan(stream.chunks(5));
        let mut at = 0;
        for (start, end, _) in events {
            assert_eq!(start, at, "{name}");
            at = end;
        }
        assert_eq!(at, stream.len() as i64, "{name}");
    }
}

#[test]
fn mutated_streams_are_read_like_the_oracle_where_they_still_are_json() {
    const SPLICES: [&str; 16] = [
        "{",
        "}",
        "[",
        "]",
        "\"",
        ",",
        ":",
        "null",
        "1e9",
        "-5",
        "99999999999999999999",
        "\\u0061",
        "\"usage\":",
        "\n",
        "true",
        " ",
    ];
    let mut rng = Rng::seeded(7);
    let mut parsed = 0;
    for round in 0..6_000 {
        let (name, stream) = RECORDED[rng.below(RECORDED.len() as u64) as usize];
        let text = std::str::from_utf8(stream).expect("recordings are UTF-8");
        let events: Vec<&str> = text.split_inclusive("\n\n").collect();
        let mut event = events[rng.below(events.len() as u64) as usize].as_bytes().to_vec();
        for _ in 0..=rng.below(3) {
            let at = rng.below(event.len() as u64) as usize;
            match rng.below(4) {
                0 => event[at] = rng.next_u64() as u8,
                1 => event.truncate(at.max(1)),
                2 => {
                    event.remove(at);
                }
                _ => {
                    let splice = SPLICES[rng.below(16) as usize].bytes();
                    event.splice(at..at, splice);
                }
            }
            if event.is_empty() {
                event.push(b'\n');
            }
        }
        let what = format!("{name}, round {round}: {}", String::from_utf8_lossy(&event));
        let whole = scan([&event[..]]);
        let at = rng.below(event.len() as u64) as usize;
        assert_eq!(scan([&event[..at], &event[at..]]), whole, "{what}");
        if let Some(usage) = whole.1.usage {
            for count in [usage.prompt, usage.completion, usage.total] {
                // Cached tokens that stand apart, and reasoning, may be added once.
                assert!(count.is_none_or(|tokens| tokens <= 3 * TOKENS_MAX), "{what}");
            }
        }
        if std::str::from_utf8(&event).is_ok() {
            parsed += 1;
            assert_like_oracle(&event, &what);
        }
    }
    assert!(parsed > 3_000);
}

fn chat(content: &str) -> String {
    format!(
        r#"{{"id":"c-1","choices":[{{"index":0,"delta":{{"content":"{content}"}},"finish_reason":null}}]}}"#
    )
}

const USAGE: &str = r#"{"id":"c","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}"#;

#[test]
fn the_standard_is_kept_to_the_letter() {
    let hi = chat("hi");
    let usage = Some((Some(9), Some(3), Some(12)));
    for (stream, found, reported) in [
        (format!("data:{hi}\n\ndata:{USAGE}\n\ndata:[DONE]\n\n"), "cUD", usage),
        (format!("\u{FEFF}data: {USAGE}\n\n"), "U", usage),
        // Only one mark, and only at the start.
        (format!("\u{FEFF}\u{FEFF}data: {USAGE}\n\n"), ".", None),
        (format!("data: {hi}\n\n\u{FEFF}data: {USAGE}\n\n"), "c.", None),
        (format!("\u{FEFF}\n\u{FEFF}data: {USAGE}\n\n"), ":.", None),
        // Field names are exact.
        (format!(" data: {USAGE}\n\n"), ".", None),
        (format!("Data: {USAGE}\n\ndataset: {USAGE}\n\ndata {USAGE}\n\n"), "...", None),
        (format!("id: 7\nretry: 10\nx\nevent: y\ndata: {USAGE}\n: z\n\n"), "U", usage),
        // One document over several lines, cut between its tokens and within a string.
        (format!("data: {}\n\n", USAGE.replace(',', ",\ndata: ")), "U", usage),
        (format!("data: {}\n\n", hi.replace("c-1", "c\ndata: 1")), "c", None),
        (format!("data\ndata: {USAGE}\ndata:\n\n"), "U", usage),
        // Line ends of all kinds in one event.
        (format!("id: 7\rdata: {USAGE}\r\n\r"), "U", usage),
        (format!("id: 7\ndata: {USAGE}\n\r\n"), "U", usage),
        (format!(": hi\n\n:\ndata: {hi}\n\n"), "::: c".replace(' ', "").as_str(), None),
        // What has no field is no event; what has one is.
        ("\n\n\r\n\r".to_owned(), "::::", None),
        ("event: ping\n\nretry: 5\n\ndata:\n\n".to_owned(), "...", None),
        // The end of the stream ends an event.
        (format!("data: {USAGE}"), "U", usage),
        (format!("data: {USAGE}\n"), "U", usage),
        (format!("data: {USAGE}\n\ndata: [DONE]"), "UD", usage),
        (": bye".to_owned(), ":", None),
        ("data".to_owned(), ".", None),
        ("\u{FEFF}".to_owned(), ":", None),
    ]
    .map(|(stream, found, reported)| (stream, found.to_owned(), reported))
    {
        assert_eq!(kinds(stream.as_bytes()), found, "{stream:?}");
        assert_eq!(usage_of(stream.as_bytes()), reported, "{stream:?}");
        let whole = scan([stream.as_bytes()]);
        for size in 1..5 {
            assert_eq!(scan(stream.as_bytes().chunks(size)), whole, "{stream:?} by {size}");
        }
    }
}

#[test]
fn events_are_told_apart() {
    for (data, kind) in [
        ("null", '.'),
        ("[]", '.'),
        ("42", '.'),
        ("", '.'),
        ("{", '.'),
        ("[DONE]", 'D'),
        ("[DONE] ", 'D'),
        (r#""[DONE]""#, '.'),
        (r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#, '.'),
        (r#"{"choices":[{"delta":{"content":null}}]}"#, '.'),
        (r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"reasoning":"hm"}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"refusal":"no"}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"tool_calls":[]}}]}"#, '.'),
        (r#"{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"x"}]}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"function_call":{"name":"f"}}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"audio":{"data":"AAAA"}}}]}"#, 'c'),
        (r#"{"choices":[{"delta":{"audio":{}}}]}"#, '.'),
        (r#"{"choices":[{"delta":{"content":[{"type":"text","text":"x"}]}}]}"#, 'c'),
        (r#"{"choices":[{"index":0,"text":" x"}]}"#, 'c'),
        (r#"{"choices":[{"delta":{},"finish_reason":"stop"}],"usage":{"total_tokens":4}}"#, '.'),
        (r#"{"choices":[],"prompt_filter_results":[],"usage":null}"#, '.'),
        (r#"{"usage":{"total_tokens":4}}"#, 'U'),
        (r#"{"usage":{"total_tokens":4},"choices":[null]}"#, '.'),
        (r#"{"type":"message_delta","usage":{"output_tokens":4}}"#, '.'),
        (r#"{"us\u0061ge":{"total_tokens":4}}"#, 'U'),
        (r#"{"usage":{"total_tokens":4}} x"#, '.'),
        (r#"{"usage":{"total_tokens":4}"#, '.'),
        (r#"{"error":{"message":"x","code":500}}"#, 'E'),
        (r#"{"error":"x","error_type":"overloaded"}"#, 'E'),
        (r#"{"error":null,"choices":[]}"#, '.'),
        (r#"{"object":"error","message":"x"}"#, 'E'),
        (r#"{"choices":[{"delta":{"content":"x"}}],"error":{"code":1}}"#, 'E'),
        (r#"{"type":"error","error":{"type":"overloaded_error"}}"#, 'E'),
        (r#"{"type":"error","code":"server_error","message":"x"}"#, 'E'),
        (r#"{"type":"response.failed","response":{"error":{"code":"x"}}}"#, 'E'),
        (r#"{"type":"response.output_text.delta","delta":"x"}"#, 'c'),
        (r#"{"type":"response.output_text.delta","delta":""}"#, '.'),
        (r#"{"type":"response.output_text.done","text":"x"}"#, '.'),
        (r#"{"type":"response.incomplete","response":{"usage":{"input_tokens":1}}}"#, 'D'),
        (r#"{"type":"content_block_start","content_block":{"type":"tool_use","name":"f"}}"#, 'c'),
        (r#"{"type":"content_block_start","content_block":{"type":"text","text":""}}"#, '.'),
        (
            r#"{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{"}}"#,
            'c',
        ),
        (
            r#"{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"x"}}"#,
            '.',
        ),
        (r#"{"type":"message_stop"}"#, 'D'),
        (r#"{"token":{"id":1,"text":"x","special":false},"generated_text":null}"#, 'c'),
        (r#"{"output":{"text":"x","finish_reason":"null"},"usage":{"input_tokens":1}}"#, 'c'),
        (r#"{"message":"processing"}"#, '.'),
    ] {
        let stream = format!("data: {data}\n\n");
        assert_eq!(kinds(stream.as_bytes()), kind.to_string(), "{data}");
        if kind != 'D' {
            assert_like_oracle(stream.as_bytes(), data);
        }
    }
    assert_eq!(kinds(b"event: error\ndata: overloaded\n\n"), "E");
    assert_eq!(kinds(b"event: message_stop\ndata: {}\n\n"), "D");
}

#[test]
fn text_that_looks_like_something_else_is_text() {
    for content in [
        r#"now print \"usage\":{\"prompt_tokens\":999999,\"completion_tokens\":999999} [DONE]"#,
        r#"\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":5}}\n\n"#,
        r#"\"}}],\"usage\":{\"total_tokens\":1},\"x\":[{\"y\":{\"z\":\""#,
        r"\\",
        r#"\\\""#,
        "data: [DONE]",
    ] {
        let stream = format!("data: {0}\n\ndata: {0}\n\n", chat(content));
        assert_eq!(kinds(stream.as_bytes()), "cc", "{content}");
        assert_eq!(usage_of(stream.as_bytes()), None, "{content}");
        assert_like_oracle(stream.as_bytes(), content);
    }
}

/// The second of two events of one shape is recognised, not walked; it must make no difference.
#[test]
fn a_known_shape_is_read_as_if_it_were_not_known() {
    for content in [
        "",
        "a",
        "\u{20AC}\u{1F600}",
        r"\u20ac",
        r"\ud83d\ude00",
        r"\n\t",
        r"\u00",
        r#"\""#,
        "\t",
        "\u{1}",
        r#"","refusal":"no"#,
        r#""},"finish_reason":"stop"#,
        r#"" "#,
    ] {
        for frame in ["data: {}\n\n", "data:{}\r\n\r\n", "event: x\ndata: {}\n\n", "data: {}\r\r"] {
            let one = frame.replace("{}", &chat(content));
            let two = frame.replace("{}", &chat("first")) + &one;
            let (alone, after) = (scan([one.as_bytes()]).0, scan([two.as_bytes()]).0);
            assert_eq!(after[1].2, alone[0].2, "{content:?} in {frame:?}");
            assert_eq!(after.len(), 2, "{content:?} in {frame:?}");
        }
    }
}

#[test]
fn usage_replaces_and_never_adds() {
    let report = |prompt: &str, completion: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"a\"}}}}],\"usage\":\
             {{\"prompt_tokens\":{prompt},\"completion_tokens\":{completion}}}}}\n\n"
        )
    };
    let null = "data: {\"choices\":[],\"usage\":null}\n\n";
    let stream = report("50", "1") + &report("50", "2") + null + &report("50", "3");
    assert_eq!(usage_of(stream.as_bytes()), Some((Some(50), Some(3), None)));
    let stream = report("50", "3") + &report("0", "0") + &report("-1", "1e3");
    assert_eq!(usage_of(stream.as_bytes()), Some((Some(50), Some(3), None)));
    let tally = scan([(report("50", "3") + "data: " + &chat("more") + "\n\n").as_bytes()]).1;
    assert_eq!((tally.text.tokens, tally.fresh.tokens, tally.fresh.bytes), (2, 1, 4));
}

#[test]
fn what_follows_the_last_event_counts_for_nothing() {
    let hi = chat("hi");
    for last in ["data: [DONE]", r#"data: {"type":"response.completed"}"#] {
        let stream = format!("data: {hi}\n\n{last}\n\n: bye\n\ndata: {USAGE}\n\ndata: {hi}\n\n");
        let tally = scan([stream.as_bytes()]).1;
        assert_eq!(kinds(stream.as_bytes()), "cD::..");
        assert_eq!((tally.usage, tally.content_events), (None, 1));
        assert_eq!(tally.ending(), Ending::Done);
    }
}

#[test]
fn the_ending_is_told() {
    let finish = |index: u32| {
        format!("data: {{\"choices\":[{{\"index\":{index},\"finish_reason\":\"stop\"}}]}}\n\n")
    };
    let hi = format!("data: {}\n\n", chat("hi"));
    let ending = |stream: String| scan([stream.as_bytes()]).1.ending();
    assert_eq!(ending(hi.clone()), Ending::Open);
    assert_eq!(ending(hi.clone() + &finish(0)), Ending::Finished);
    assert_eq!(ending(hi.clone() + &finish(1)), Ending::Open);
    assert_eq!(ending(hi.clone() + &finish(1) + &finish(0)), Ending::Finished);
    assert_eq!(ending(hi.clone() + "data: [DONE]"), Ending::Done);
    assert_eq!(ending(String::new()), Ending::Open);
    let stop = "data: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"}}\n\n";
    assert_eq!(ending(stop.to_owned()), Ending::Finished);
}

#[test]
fn a_long_event_is_read_like_a_short_one_in_little_memory() {
    let filler = format!(r#"{{"filler":"{}","#, r"\u20ac long ".repeat(2 << 10));
    let mut documents: Vec<(String, String)> = RECORDED
        .iter()
        .flat_map(|(_, stream)| dispatched(stream).into_iter().step_by(3))
        .filter(|(_, data)| data.starts_with('{'))
        .collect();
    for content in ["a", r"\u20ac", r#"\"usage\":{}"#, ""] {
        documents.push((String::new(), chat(content)));
    }
    for (name, data) in documents {
        let event = |data: &str| format!("event: {name}\nid: 1\ndata: {data}\n\n");
        let (short, long) = (event(&data), event(&data.replacen('{', &filler, 1)));
        // As it comes, and with a line end where white space may stand.
        let lines = long.replacen("\",", "\",\ndata: ", 1);
        let expected = scan([short.as_bytes()]);
        for long in [long, lines] {
            assert!(long.len() > HELD_BYTES_MAX);
            for size in [17, HELD_BYTES_MAX, usize::MAX] {
                let (events, tally) = scan(long.as_bytes().chunks(size));
                assert_eq!(events[0].2, expected.0[0].2, "{data} by {size}");
                assert_eq!(tally, expected.1, "{data} by {size}");
            }
        }
    }
}

#[test]
fn a_long_last_event_is_the_last_however_it_comes() {
    let filler = format!("x: {}\n", "y".repeat(HELD_BYTES_MAX));
    for (data, last) in [
        ("data: [DONE]", true),
        ("data:  [DONE] \t", true),
        ("data\ndata: [DONE]\ndata", true),
        ("data: [DONE]x", false),
        ("data: [DO\ndata: NE]", false),
        ("data: [[DONE]", false),
        ("data: [DONE", false),
    ] {
        let event = format!("{filler}{data}\n\n");
        for size in [1, 7, HELD_BYTES_MAX, usize::MAX] {
            let (events, tally) = scan(event.as_bytes().chunks(size));
            assert_eq!(events[0].2.kind == Kind::Done, last, "{data:?} by {size}");
            assert_eq!(tally.ending() == Ending::Done, last, "{data:?} by {size}");
        }
    }
}

#[test]
fn a_line_without_end_stays_bounded() {
    const BYTES: usize = 10 << 20;
    for start in [&b"data: {\"choices\":[{\"delta\":{\"content\":\""[..], b"data: x", b"x", b": "] {
        let mut scanner = Scanner::new();
        let junk = [b'a'; 8 << 10];
        scanner.push(start, |_| panic!("no event ends here"));
        for _ in 0..BYTES / junk.len() {
            scanner.push(&junk, |_| panic!("no event ends here"));
            let kept = scanner.long.as_ref().map_or(0, |long| long.name.capacity());
            assert!(scanner.held.capacity() + scanner.joined.capacity() + kept <= 17 << 10);
        }
        assert_eq!(scanner.open_bytes(), (start.len() + BYTES) as u64);
        assert!(!scanner.at_boundary());
        let event = scanner.finish().expect("a cut event");
        assert!(event.usage.is_none() && event.text_bytes == 0);
        let expected = if start == b": " { Kind::Comment } else { Kind::Other };
        assert_eq!(event.kind, expected);
    }
}

#[test]
fn a_comment_of_ours_may_stand_only_between_events() {
    let stream = format!("data: {}\r\n\r\n: x\r\n", chat("hi"));
    let mut scanner = Scanner::new();
    let mut free = Vec::new();
    for (at, byte) in stream.bytes().enumerate() {
        scanner.push(&[byte], |_| {});
        if scanner.at_boundary() {
            free.push(at + 1);
        }
    }
    assert_eq!(free, [stream.len() - 5, stream.len()]);
}
