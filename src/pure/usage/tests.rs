//! Goal: the same numbers from every dialect, from both readers, in every cut. Method: a table of
//! usage objects as engines and vendors send them; recorded bodies of real engines; the two readers
//! against each other on recorded, cut and mutated documents.

use super::*;
use crate::pure::units::Rng;

macro_rules! recorded {
    ($($name:literal),+ $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../../tests/recorded/", $name)))),+]
    };
}

const BODIES: &[(&str, &[u8])] = recorded![
    "llamacpp-chat-tools.json",
    "llamacpp-chat.json",
    "llamacpp-messages.json",
    "llamacpp-responses.json",
    "vllm-chat.json",
    "vllm-completions.json",
    "vllm-embeddings.json",
    "vllm-error.json",
    "vllm-messages.json",
    "vllm-responses.json",
];

const STREAMS: &[(&str, &[u8])] = recorded![
    "llamacpp-completions.sse",
    "llamacpp-messages.sse",
    "llamacpp-native.sse",
    "llamacpp-responses.sse",
    "vllm-chat-continuous.sse",
    "vllm-chat-logprobs.sse",
    "vllm-chat-tools.sse",
    "vllm-chat-usage.sse",
    "vllm-messages.sse",
    "vllm-responses.sse",
];

fn usage(
    prompt: impl Into<Option<u64>>,
    completion: impl Into<Option<u64>>,
    total: impl Into<Option<u64>>,
) -> Usage {
    let (prompt, completion, total) = (prompt.into(), completion.into(), total.into());
    Usage { prompt, completion, total, ..Usage::default() }
}

fn plain<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Plain {
    let mut scanner = PlainScanner::new();
    for piece in pieces {
        scanner.push(piece);
    }
    scanner.finish()
}

#[test]
fn every_dialect_is_understood() {
    let cached = |usage: Usage, cached| Usage { cached: Some(cached), ..usage };
    let reasoning = |usage: Usage, tokens| Usage { reasoning: Some(tokens), ..usage };
    for (object, expected) in [
        // OpenAI chat and completions.
        (r#"{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}"#, usage(9, 3, 12)),
        (
            r#"{"prompt_tokens":2000,"completion_tokens":300,"total_tokens":2300,
                "prompt_tokens_details":{"cached_tokens":1900,"audio_tokens":0},
                "completion_tokens_details":{"reasoning_tokens":260,"x":{"reasoning_tokens":1}}}"#,
            reasoning(cached(usage(2000, 300, 2300), 1900), 260),
        ),
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}"#,
            usage(9, 3, None),
        ),
        // OpenAI Responses; vLLM adds lists.
        (
            r#"{"input_tokens":12,"input_tokens_details":{"cached_tokens":5,"per_turn":[1,{"a":2}]},
                "output_tokens":8,"output_tokens_details":{"reasoning_tokens":2},"total_tokens":20}"#,
            reasoning(cached(usage(12, 8, 20), 5), 2),
        ),
        // Anthropic: what the cache gave or took stands apart.
        (
            r#"{"input_tokens":1,"cache_creation_input_tokens":4,"cache_read_input_tokens":11,
                "output_tokens":8}"#,
            cached(usage(16, 8, None), 11),
        ),
        (r#"{"output_tokens":8}"#, usage(None, 8, None)),
        // A translator that gives both names means OpenAI's.
        (
            r#"{"prompt_tokens":16,"completion_tokens":8,"cache_read_input_tokens":11}"#,
            cached(usage(16, 8, None), 11),
        ),
        (
            r#"{"input_tokens":16,"output_tokens":8,"total_tokens":24,"cache_read_input_tokens":11}"#,
            cached(usage(16, 8, 24), 11),
        ),
        // Rerank, embeddings.
        (r#"{"total_tokens":7}"#, usage(None, None, 7)),
        (r#"{"prompt_tokens":7,"total_tokens":7}"#, usage(7, None, 7)),
        // DeepSeek, Moonshot, SGLang.
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"prompt_cache_hit_tokens":5}"#,
            cached(usage(9, 3, None), 5),
        ),
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"cached_tokens":5,"reasoning_tokens":2}"#,
            reasoning(cached(usage(9, 3, None), 5), 2),
        ),
        // Reasoning beside the completion, as the total says.
        (
            r#"{"prompt_tokens":9,"completion_tokens":3,"total_tokens":32,
                "completion_tokens_details":{"reasoning_tokens":20}}"#,
            reasoning(usage(9, 23, 32), 20),
        ),
        (r#" { "prompt\u005ftokens" : 9 , "x" : "\"}" } "#, usage(9, None, None)),
        (r#"{"prompt_tokens":0}"#, usage(0, None, None)),
    ] {
        assert_eq!(Usage::from_json(object.as_bytes()), Some(expected), "{object}");
    }
}

#[test]
fn what_cannot_be_believed_is_not_counted() {
    for value in [
        "-1",
        "1.5",
        "12.0",
        "1e3",
        "1000000001",
        "18446744073709551616",
        r#""12""#,
        "true",
        "[1]",
        "{}",
        "99999999999999999999999999999999999999",
    ] {
        let object = format!(r#"{{"prompt_tokens":{value},"completion_tokens":3}}"#);
        let expected = Usage { odd: true, ..usage(None, 3, None) };
        assert_eq!(Usage::from_json(object.as_bytes()), Some(expected), "{object}");
    }
    let odd = |usage: Usage| Some(Usage { odd: true, ..usage });
    let object = br#"{"prompt_tokens":479,"completion_tokens":373,"total_tokens":14164,
        "prompt_tokens_details":{"cached_tokens":13312}}"#;
    let expected = Usage { cached: Some(479), ..usage(479, 373, 14164) };
    assert_eq!(Usage::from_json(object), odd(expected));
    let object = br#"{"completion_tokens":3,"completion_tokens_details":{"reasoning_tokens":4}}"#;
    let expected = Usage { reasoning: Some(3), ..usage(None, 3, None) };
    assert_eq!(Usage::from_json(object), odd(expected));
    let object = br#"{"prompt_tokens":9,"completion_tokens":3,"total_tokens":11}"#;
    assert_eq!(Usage::from_json(object), odd(usage(9, 3, 11)));
    for nothing in [
        "",
        "null",
        "5",
        "[]",
        "{}",
        "\"\"",
        r#"{"x":1}"#,
        r#"{"prompt_tokens":null}"#,
        r#"{"prompt_tokens":9"#,
        r#"{"prompt_tokens":9}}"#,
        r#"{"prompt_tokens" 9}"#,
        r#"{prompt_tokens:9}"#,
        r#"{"prompt_tokens":9,}"#,
        r#"{"a":{]},"prompt_tokens":9}"#,
    ] {
        assert_eq!(Usage::from_json(nothing.as_bytes()), None, "{nothing}");
    }
}

#[test]
fn later_reports_replace_earlier_ones_and_never_lower_them() {
    // Anthropic: the start has the prompt, the end may have only the completion.
    let mut sum = usage(12, 0, None);
    sum.absorb(&usage(None, 8, None));
    assert_eq!(sum, usage(12, 8, None));
    sum.absorb(&usage(0, 3, 5));
    assert_eq!(sum, usage(12, 8, 5));
    sum.absorb(&Usage { cached: Some(13), ..usage(12, 9, 21) });
    assert_eq!(sum, Usage { cached: Some(12), odd: true, ..usage(12, 9, 21) });
}

#[test]
fn a_charge_needs_both_sides() {
    assert_eq!(usage(9, 3, 12).charge(), Some((9, 3)));
    assert_eq!(usage(9, 3, 99).charge(), Some((9, 3)));
    assert_eq!(usage(9, None, 12).charge(), Some((9, 3)));
    assert_eq!(usage(9, None, 9).charge(), Some((9, 0)));
    assert_eq!(usage(9, None, 5).charge(), Some((9, 0)));
    assert_eq!(usage(None, 3, 12).charge(), Some((9, 3)));
    assert_eq!(usage(None, None, 12).charge(), Some((12, 0)));
    assert_eq!(usage(9, None, None).charge(), None);
    assert_eq!(usage(None, 3, None).charge(), None);
}

#[test]
fn recorded_bodies_are_read_in_every_cut() {
    let mut summary = String::new();
    for (name, body) in BODIES {
        let whole = plain([*body]);
        for at in 0..=body.len() {
            assert_eq!(plain([&body[..at], &body[at..]]), whole, "{name} cut at {at}");
        }
        assert_eq!(plain(body.chunks(1)), whole, "{name}");
        assert!(whole.whole, "{name}");
        let usage = whole.usage.unwrap_or_default();
        let counts = [usage.prompt, usage.completion, usage.total, usage.cached];
        let counts = counts.map(|count| count.map_or_else(|| "-".to_owned(), |n| n.to_string()));
        let (bytes, error) = (whole.text_bytes, whole.error);
        summary += &format!("{name:24} {:14} text {bytes} error {error}\n", counts.join(" "));
    }
    assert_eq!(summary, SUMMARY, "\n{summary}");
}

const SUMMARY: &str = "\
llamacpp-chat-tools.json 400 80 480 0   text 277 error false
llamacpp-chat.json       25 16 41 0     text 49 error false
llamacpp-messages.json   12 8 - 11      text 27 error false
llamacpp-responses.json  12 8 20 11     text 22 error false
vllm-chat.json           25 16 41 0     text 44 error false
vllm-completions.json    5 8 13 0       text 20 error false
vllm-embeddings.json     2 0 2 -        text 0 error false
vllm-error.json          - - - -        text 0 error true
vllm-messages.json       12 8 - 0       text 23 error false
vllm-responses.json      12 8 20 0      text 26 error false
";

#[test]
fn both_readers_find_the_same() {
    let mut documents: Vec<Vec<u8>> = BODIES.iter().map(|(_, body)| body.to_vec()).collect();
    for (_, stream) in STREAMS {
        for line in stream.split(|&byte| byte == b'\n') {
            documents.extend(line.strip_prefix(b"data: ").map(<[u8]>::to_vec));
        }
    }
    let mut rng = Rng::seeded(11);
    let mut valid = 0;
    for round in 0..10_000 {
        let mut document = documents[rng.below(documents.len() as u64) as usize].clone();
        for _ in 0..rng.below(4) {
            let at = rng.below(document.len() as u64) as usize;
            match rng.below(3) {
                0 => document[at] = b" \"\\{}[],:0-"[rng.below(11) as usize],
                1 => {
                    document.remove(at);
                }
                _ => document.insert(at, rng.next_u64() as u8),
            }
        }
        let mut scanner = PlainScanner::new();
        let at = 1 + rng.below(document.len() as u64 - 1) as usize;
        scanner.push(&document[..at]);
        scanner.push(&document[at..]);
        // Only the quick reader says where the text lies.
        let mut gist = Gist::default();
        let quick =
            read(&document, &mut gist).map(|()| Gist { text_span: Span::default(), ..gist });
        let text = String::from_utf8_lossy(&document);
        assert_eq!(scanner.gist(), quick, "round {round}: {text}");
        valid += u32::from(quick.is_some());
    }
    assert!((4_000..8_000).contains(&valid), "{valid}");
}

#[test]
fn a_usage_object_is_the_same_whether_it_is_read_in_place_or_kept() {
    let deep = |depth: usize| {
        let (open, close) = ("[".repeat(depth), "]".repeat(depth));
        format!(r#"{{"prompt_tokens":4,"x":{open}1{close},"total_tokens":5}}"#)
    };
    let long = |len| format!(r#"{{"total_tokens":5,"x":"{}"}}"#, "y".repeat(len));
    let mut objects: Vec<String> = (120..132).map(deep).collect();
    objects.extend((KEPT_BYTES_MAX - 40..KEPT_BYTES_MAX).map(long));
    for value in
        ["1", "999999999", "1000000000", "1000000001", "01", "1 ", "1x", "1\"", "1{}", "1]"]
    {
        for name in ["prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "x"] {
            for tail in ["", ",\"total_tokens\":7", ",", " , \"output_tokens\":3"] {
                objects.push(format!(r#"{{"{name}":{value}{tail}}}"#));
                objects.push(format!(r#"{{"completion_tokens":2,"{name}":{value}{tail}}}"#));
                objects.push(format!(r#"{{"prompt_tokens_details":{{"{name}":{value}}}{tail}}}"#));
            }
        }
    }
    for object in objects {
        for (before, behind) in [("{", "}"), (r#"{"choices":[{"index":0,"#, r#"}],"error":"x"}"#)] {
            let document = format!(r#"{before}"usage":{object}{behind}"#).into_bytes();
            let mut gist = Gist::default();
            let quick = read(&document, &mut gist).map(|()| gist);
            // What comes in pieces is kept.
            let mut scanner = PlainScanner::new();
            document.chunks(document.len() - 1).for_each(|piece| scanner.push(piece));
            assert_eq!(scanner.gist(), quick, "{}", String::from_utf8_lossy(&document));
        }
    }
}

#[test]
fn what_is_no_json_object_yields_nothing() {
    for body in ["", "<html>", "[]", "null", "{\"a\":1", "{} {}", "\"usage\"", "{\"a\":x}"] {
        let found = plain([body.as_bytes()]);
        assert_eq!(found, Plain::default(), "{body}");
    }
    // What was complete before the break is kept, and said to be no whole answer.
    let found = plain([&br#"{"usage":{"total_tokens":5},"x":"#[..]]);
    assert_eq!(found, Plain { usage: Some(usage(None, None, 5)), ..Plain::default() });
}

#[test]
fn usage_inside_of_anything_else_is_not_the_usage() {
    let body = br#"{"choices":[{"message":{"content":"{\"usage\":{\"total_tokens\":1}}",
        "usage":{"total_tokens":2},"tool_calls":[{"usage":{"total_tokens":3}}]}}],
        "metadata":{"usage":{"total_tokens":4}},"data":[{"usage":{"total_tokens":5}}]}"#;
    assert_eq!(plain([&body[..]]).usage, None);
}

#[test]
fn long_bodies_take_little_memory() {
    let mut scanner = PlainScanner::new();
    scanner.push(br#"{"choices":[{"message":{"content":""#);
    for _ in 0..1_000 {
        scanner.push(&b"\\u20ac".repeat(200));
    }
    scanner.push(br#""}}],"usage":{"total_tokens":5,"x":""#);
    for _ in 0..1_000 {
        scanner.push(&[b'x'; 1024]);
    }
    assert!(scanner.kept.capacity() <= 2 * KEPT_BYTES_MAX);
    scanner.push(br#""}}"#);
    let found = scanner.finish();
    // A usage object that long is not kept.
    assert!(found.whole && found.usage.is_none() && found.text_bytes == 600_000, "{found:?}");
}
