//! Goal: what is found in a body does not depend on how it came, whatever two engines could read
//! differently is refused, and edits change what they name and nothing else.
//! Method: tables of bodies, every split of them, and `serde_json` as the oracle of edits.

use super::*;
use crate::pure::units::Rng;

fn inspect(kind: BodyKind, body: &[u8]) -> Result<Inspected, BodyFault> {
    Inspector::new(kind).finish(body)
}

fn chat(body: &str) -> Inspected {
    inspect(BodyKind::Chat, body.as_bytes()).unwrap_or_else(|fault| panic!("{body}: {fault:?}"))
}

fn fault(kind: BodyKind, body: &[u8]) -> BodyFault {
    match inspect(kind, body) {
        Ok(_) => panic!("{} was taken", String::from_utf8_lossy(body)),
        Err(fault) => fault,
    }
}

/// The same result for every split in two, and byte by byte.
fn check_every_split(kind: BodyKind, body: &[u8]) {
    let whole = inspect(kind, body);
    let check = |split: Result<Inspected, BodyFault>, cut: usize| match (&whole, &split) {
        // With two faults in a body the cuts decide which is met first.
        (Err(_), Err(_)) => {}
        _ => assert_eq!(whole, split, "{} cut at {cut}", String::from_utf8_lossy(body)),
    };
    for cut in 0..=body.len() {
        let mut inspector = Inspector::new(kind);
        check(inspector.feed(&body[..cut]).and_then(|()| inspector.finish(body)), cut);
    }
    let mut inspector = Inspector::new(kind);
    let fed = (0..=body.len()).try_for_each(|end| inspector.feed(&body[..end]));
    check(fed.and_then(|()| inspector.finish(body)), usize::MAX);
}

const BODIES: &[&str] = &[
    r#"{"model":"m-small","messages":[{"role":"user","content":"Say hi"}],"stream":true}"#,
    r#"{ "zzz" : {"vendor_opt":[1, 2,null]},
 "messages":[ {"role":"user","content":"caf\u00e9 \/ \ud83d\ude00","name":null} ],	"temperature":1.0, "model":"m-small" }"#,
    r#"{"metadata":{"model":"m-secret"},"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"model":{"type":"string","default":"m-secret"}}}}}],"messages":[{"role":"user","content":"\"model\":\"m-secret\""}],"model":"m-small"}"#,
    r#"{"mod\u0065l":"org\/m\u00f6del:7b","stream":true,"stream_options":{"a":[{"include_usage":1}],"include_usage":false},"max_tokens":12,"max_completion_tokens":7,"n":2,"user":"u\n1"}"#,
    r#"{"model":"模型-β","stream":true,"stream_options":{}}"#,
    r#"{"model":"m","stream":true,"stream_options":null,"prompt":"x","user":null}"#,
    r#"{"model":"m","stream":true,"stream_options":{ "x" : 1 }}"#,
    r#"{"model":"m","messages":[{"content":"a\ud800b"}],"stream":null}"#,
    r#"{"model":"m","messages":[{"content":[{"image_url":{"url":"data:image/png;base64,AAAA"}}]}]}"#,
    r#"{"input":["a","b"],"model":"m","big":123456789012345678901234567890,"huge":1e400}"#,
    "{}",
];

#[test]
fn every_split_gives_the_same() {
    for body in BODIES {
        for kind in [BodyKind::Chat, BodyKind::Responses, BodyKind::Other] {
            check_every_split(kind, body.as_bytes());
        }
    }
}

#[test]
fn top_level_members_are_found_and_nested_ones_are_not() {
    let body = BODIES[2];
    let found = chat(body);
    assert_eq!(found.model_str(body.as_bytes()).as_deref(), Some("m-small"));
    assert_eq!(found.model.map(|span| span.of(body.as_bytes())), Some(&b"\"m-small\""[..]));
    assert_eq!((found.stream, found.max_tokens, found.n), (None, None, None));

    let body = BODIES[3];
    let found = chat(body);
    assert_eq!(found.model_str(body.as_bytes()).as_deref(), Some("org/mödel:7b"));
    assert_eq!(found.user_str(body.as_bytes()).as_deref(), Some("u\n1"));
    assert_eq!((found.stream, found.include_usage), (Some(true), Some(false)));
    // The newer name wins, wherever it stands.
    assert_eq!((found.max_tokens, found.n), (Some(7), Some(2)));

    let body = BODIES[4];
    assert_eq!(chat(body).model_str(body.as_bytes()).as_deref(), Some("模型-β"));
    assert_eq!(chat("{}").require_model().unwrap_err().param, Some("model"));
    assert_eq!(chat(r#"{"model":null}"#).model, None);
}

#[test]
fn limits_go_by_the_kind_of_body() {
    let body = br#"{"max_tokens":1,"max_completion_tokens":2,"max_output_tokens":3}"#;
    for (kind, max) in [
        (BodyKind::Chat, 2),
        (BodyKind::Completions, 1),
        (BodyKind::Messages, 1),
        (BodyKind::Responses, 3),
        (BodyKind::Other, 2),
    ] {
        assert_eq!(inspect(kind, body).unwrap().max_tokens, Some(max), "{kind:?}");
    }
    for (path, kind) in [
        ("/v1/chat/completions", BodyKind::Chat),
        ("/base/v1/chat/completions/", BodyKind::Chat),
        ("/v1/completions", BodyKind::Completions),
        ("/v1/responses", BodyKind::Responses),
        ("/v1/messages", BodyKind::Messages),
        ("/v1/messages/count_tokens", BodyKind::Other),
        ("/v1/embeddings", BodyKind::Other),
    ] {
        assert_eq!(BodyKind::of_path(path), kind, "{path}");
    }
}

#[test]
fn prompt_is_measured_with_its_pictures_apart() {
    let found = chat(r#"{"model":"m","messages":[1],"tools":[22],"metadata":"data:xx","top_p":1}"#);
    assert_eq!((found.prompt_bytes, found.media_bytes), (7, 0));
    assert_eq!(found.parts.iter().map(|part| part.span.len()).collect::<Vec<_>>(), [3, 4]);
    let kinds: Vec<PartKind> = found.parts.iter().map(|part| part.kind).collect();
    assert_eq!(kinds, [PartKind::Messages, PartKind::Tools]);
    let body = BODIES[8];
    let found = chat(body);
    assert_eq!(found.media_bytes, r#""data:image/png;base64,AAAA""#.len() as u64);
    let prompt = found.prompt.map(|span| span.of(body.as_bytes()).len() as u64);
    assert_eq!(prompt, Some(found.prompt_bytes));
}

#[test]
fn whole_numbers_are_taken_as_engines_take_them() {
    for (text, value) in [
        ("0", Some(0)),
        ("-0", Some(0)),
        ("12", Some(12)),
        ("12.0", Some(12)),
        ("1e3", Some(1_000)),
        ("1200e-2", Some(12)),
        ("18446744073709551615", Some(u64::MAX)),
        ("18446744073709551616", None),
        ("99999999999999999999999", None),
        ("1e19", None),
        ("9007199254740992.0", Some(9_007_199_254_740_992)),
        ("9007199254740994.0", None),
        ("1e400", None),
        ("-1", None),
        ("-0.5", None),
        ("0.5", None),
        ("1e-400", Some(0)),
        ("\"12\"", None),
        ("true", None),
        ("[]", None),
        ("{}", None),
    ] {
        let body = format!(r#"{{"model":"m","max_tokens":{text}}}"#);
        match (inspect(BodyKind::Chat, body.as_bytes()), value) {
            (Ok(found), Some(_)) => assert_eq!(found.max_tokens, value, "{text}"),
            (Err(fault), None) => assert_eq!(fault.param, Some("max_tokens"), "{text}"),
            (result, _) => panic!("{text}: {result:?}"),
        }
        let lenient = inspect(BodyKind::Other, body.as_bytes()).unwrap();
        assert_eq!(lenient.max_tokens, value, "{text}");
    }
}

#[test]
fn wrong_types_name_their_member() {
    for (body, param) in [
        (r#"{"model":123}"#, "model"),
        (r#"{"model":true}"#, "model"),
        (r#"{"model":[]}"#, "model"),
        (r#"{"model":{}}"#, "model"),
        (r#"{"model":""}"#, "model"),
        (r#"{"model":"a\nb"}"#, "model"),
        (r#"{"model":"a\u0000"}"#, "model"),
        (r#"{"model":"\ud800"}"#, "model"),
        (r#"{"stream":"false"}"#, "stream"),
        (r#"{"stream":1}"#, "stream"),
        (r#"{"stream":[]}"#, "stream"),
        (r#"{"stream":{}}"#, "stream"),
        (r#"{"stream_options":true}"#, "stream_options"),
        (r#"{"stream_options":[]}"#, "stream_options"),
        (r#"{"stream_options":{"include_usage":"yes"}}"#, "stream_options.include_usage"),
        (r#"{"max_tokens":-1}"#, "max_tokens"),
        (r#"{"max_completion_tokens":2,"max_tokens":"1"}"#, "max_tokens"),
        (r#"{"n":"2"}"#, "n"),
        (r#"{"n":1.5}"#, "n"),
    ] {
        assert_eq!(fault(BodyKind::Chat, body.as_bytes()).param, Some(param), "{body}");
        check_every_split(BodyKind::Chat, body.as_bytes());
    }
    let long = format!(r#"{{"model":"{}"}}"#, "m".repeat(MODEL_BYTES_MAX + 1));
    assert_eq!(fault(BodyKind::Other, long.as_bytes()).param, Some("model"));
    // Not ours to judge.
    for body in [r#"{"user":5}"#, r#"{"stream":null,"n":null,"max_tokens":null}"#] {
        assert_eq!(chat(body).user, None);
    }
    assert!(inspect(BodyKind::Other, br#"{"n":"x","stream_options":1}"#).is_ok());
    assert!(
        inspect(BodyKind::Responses, br#"{"stream_options":{"include_obfuscation":true}}"#).is_ok()
    );
}

#[test]
fn what_is_no_json_object_is_refused() {
    for body in [
        &b""[..],
        b" ",
        b"[]",
        b"null",
        b"\"m-small\"",
        b"1",
        b"true",
        b"{\"model\":\"m\"",
        b"{\"model\":\"m\",\"messages\":[]}}",
        b"{\"model\":\"m\",\"messages\":[],}",
        b"\xef\xbb\xbf{\"model\":\"m\"}",
        b"{\"model\":\"m\"}\0",
        b"{\"model\":\"m\"} x",
        b"{\"model\":\"m\",\"x\":\"\xff\"}",
        b"{\"model\":\"m\",\"x\":\"a\0b\"}",
        b"{'model':'m'}",
        b"{\"model\":\"m\",\"x\":NaN}",
        b"{\"model\":\"m\",\"x\":01}",
        b"model=m&x=1",
    ] {
        let found = fault(BodyKind::Chat, body);
        assert_eq!(found.param, None, "{}", String::from_utf8_lossy(body));
        assert!(found.offset <= body.len() as u64);
        check_every_split(BodyKind::Chat, body);
    }
    for depth in [10_000, 1_000_000] {
        for (open, inner, close) in [("[", "", "]"), ("{\"model\":", "0", "}")] {
            let nested = open.repeat(depth) + inner + &close.repeat(depth);
            let body = format!(r#"{{"model":"m","x":{nested}}}"#);
            assert!(fault(BodyKind::Chat, body.as_bytes()).message.contains("nested too deeply"));
        }
    }
}

#[test]
fn no_member_may_be_read_two_ways() {
    for (body, param) in [
        (r#"{"model":"a","model":"b"}"#, Some("model")),
        (r#"{"model":"a","mod\u0065l":"b"}"#, Some("model")),
        (r#"{"\u006d\u006F\u0064\u0065\u006c":"a","model":"a"}"#, Some("model")),
        (r#"{"model":null,"model":"b"}"#, Some("model")),
        (r#"{"stream":true,"stream":true}"#, Some("stream")),
        (r#"{"stream_options":{},"stream_options":{}}"#, Some("stream_options")),
        (
            r#"{"stream_options":{"include_usage":true,"include_us\u0061ge":false}}"#,
            Some("stream_options.include_usage"),
        ),
        (r#"{"messages":[],"messages":[]}"#, None),
        (r#"{"x":1,"y":2,"x":1}"#, None),
        (r#"{"é":1,"\u00e9":2}"#, None),
        (r#"{"\ud800":1,"\uD800":2}"#, None),
        (r#"{"":1,"":2}"#, None),
        // Go's encoding/json, and with it Ollama, would take these for the lower case ones.
        (r#"{"Model":"b","model":"a"}"#, Some("model")),
        (r#"{"model":"a","MODEL":"b"}"#, Some("model")),
        (r#"{"\u004dodel":"b"}"#, Some("model")),
        (r#"{"max_to\u212aens":9}"#, Some("max_tokens")),
        (r#"{"ſtream":true}"#, Some("stream")),
    ] {
        assert_eq!(fault(BodyKind::Chat, body.as_bytes()).param, param, "{body}");
        check_every_split(BodyKind::Chat, body.as_bytes());
    }
    // Nested ones are the engine's business, and others may differ in case.
    for body in [
        r#"{"model":"a","x":{"y":1,"y":2},"messages":[{"role":1,"role":2}]}"#,
        r#"{"model":"a","X":1,"x":2,"models":[],"MaxTokens":1}"#,
    ] {
        assert!(inspect(BodyKind::Chat, body.as_bytes()).is_ok(), "{body}");
    }
}

#[test]
fn members_and_their_names_are_bounded() {
    let with = |count: usize| {
        let members: Vec<String> = (0..count).map(|n| format!(r#""m{n}":0"#)).collect();
        format!("{{{}}}", members.join(","))
    };
    assert!(inspect(BodyKind::Other, with(MEMBERS_MAX).as_bytes()).is_ok());
    assert!(inspect(BodyKind::Other, with(MEMBERS_MAX + 1).as_bytes()).is_err());
    let named = |len: usize| format!(r#"{{"{}":0}}"#, "x".repeat(len));
    assert!(inspect(BodyKind::Other, named(json::KEY_BYTES_MAX).as_bytes()).is_ok());
    assert!(inspect(BodyKind::Other, named(json::KEY_BYTES_MAX + 1).as_bytes()).is_err());
}

#[test]
fn a_name_that_comes_twice_is_found_among_many() {
    for count in 1..40 {
        let mut names: Vec<String> =
            (0..count).map(|n| "abc".repeat(n / 7) + &n.to_string()).collect();
        for twice in 0..count {
            names.push(names[twice].clone());
            let members: Vec<String> = names.iter().map(|name| format!(r#""{name}":0"#)).collect();
            let body = format!("{{{}}}", members.join(","));
            let offset = fault(BodyKind::Other, body.as_bytes()).offset as usize;
            assert_eq!(offset, body.len() - names[twice].len() - 5, "{body}");
            names.pop();
        }
    }
}

/// Against a look at each byte.
#[test]
fn look_alikes_are_found_wherever_the_capital_stands() {
    let mut rng = Rng::seeded(12);
    let alike = |key: &str| {
        let folded = key.replace('\u{17F}', "s").replace('\u{212A}', "k").to_ascii_lowercase();
        Field::TOP.into_iter().find(|field| field.name() == folded && field.name() != key)
    };
    for field in Field::TOP {
        for _ in 0..2_000 {
            let key: String = field
                .name()
                .chars()
                .map(|c| match (rng.below(12), c) {
                    (0, _) => c.to_ascii_uppercase(),
                    (1, 's') => '\u{17F}',
                    (1, 'k') => '\u{212A}',
                    (2, _) if rng.below(9) == 0 => '1',
                    _ => c,
                })
                .collect();
            if key != field.name() {
                assert_eq!(look_alike(key.as_bytes()), alike(&key), "{key}");
            }
        }
    }
}

#[test]
fn every_part_is_kept_in_order() {
    let body = r#"{"system":"1","tools":[2],"messages":[33],"documents":[4],"query":"5"}"#;
    let spans: Vec<&[u8]> =
        chat(body).parts.iter().map(|part| part.span.of(body.as_bytes())).collect();
    assert_eq!(spans, [&b"\"1\""[..], b"[2]", b"[33]", b"[4]", b"\"5\""]);
}

/// Whatever the length of a body, this and two bounded lists is all that is kept of it.
#[test]
fn inspector_is_small() {
    let lists = MEMBERS_MAX * size_of::<u64>() + 2 * 6 * json::KEY_BYTES_MAX;
    assert!(size_of::<Inspector>() + lists <= 8 * 1024, "{}", size_of::<Inspector>());
}

#[test]
fn ten_megabytes_in_reads_of_64_kib() {
    let text = "k".repeat(10_000_000);
    let body = format!(r#"{{"messages":[{{"role":"user","content":"{text}"}}],"model":"m"}}"#);
    let body = body.as_bytes();
    let mut inspector = Inspector::new(BodyKind::Chat);
    for end in (65_536..body.len()).step_by(65_536) {
        inspector.feed(&body[..end]).unwrap();
    }
    let found = inspector.finish(body).unwrap();
    assert_eq!(found.model_str(body).as_deref(), Some("m"));
    assert_eq!(found.prompt_bytes, text.len() as u64 + 30);
}

#[test]
fn edits_go_where_they_should() {
    let ask = Edit { model: None, ask_usage: true };
    let rename = Edit { model: Some("big \"1\"\n"), ask_usage: false };
    for (body, edit, expected) in [
        (
            r#"{"model":"a","stream":true}"#,
            ask,
            r#"{"stream_options":{"include_usage":true},"model":"a","stream":true}"#,
        ),
        (
            r#" {  "stream" :true , "stream_options" : null }"#,
            ask,
            r#" {  "stream" :true , "stream_options" : {"include_usage":true} }"#,
        ),
        (
            r#"{"stream":true,"stream_options":{ }}"#,
            ask,
            r#"{"stream":true,"stream_options":{"include_usage":true }}"#,
        ),
        (
            r#"{"stream":true,"stream_options":{ "x":1}}"#,
            ask,
            r#"{"stream":true,"stream_options":{"include_usage":true, "x":1}}"#,
        ),
        (
            r#"{"stream_options":{"include_usage": false ,"x":1},"stream":true}"#,
            ask,
            r#"{"stream_options":{"include_usage": true ,"x":1},"stream":true}"#,
        ),
        (
            r#"{"stream_options":{"include_usage":null},"stream":true}"#,
            ask,
            r#"{"stream_options":{"include_usage":true},"stream":true}"#,
        ),
        (r#"{"a":1, "model" : "x" }"#, rename, r#"{"a":1, "model" : "big \"1\"\u000a" }"#),
        (
            r#"{"stream":true,"model":"x"}"#,
            Edit { model: Some("y"), ask_usage: true },
            r#"{"stream_options":{"include_usage":true},"stream":true,"model":"y"}"#,
        ),
        (
            r#"{"stream":true,"model":"x","stream_options":{}}"#,
            Edit { model: Some("yy"), ask_usage: true },
            r#"{"stream":true,"model":"yy","stream_options":{"include_usage":true}}"#,
        ),
    ] {
        let found = chat(body);
        let splices = splices(&found, body.as_bytes(), &edit);
        let edited = apply(body.as_bytes(), &splices);
        assert_eq!(String::from_utf8_lossy(&edited), expected);
        assert_eq!(splices.new_len(body.len()), expected.len());
        assert!(splices.pieces(body.as_bytes()).count() <= 5);
    }
}

#[test]
fn nothing_is_edited_without_need() {
    let both = Edit { model: Some("m"), ask_usage: true };
    for (kind, body) in [
        (BodyKind::Chat, r#"{"model":"m"}"#),
        (BodyKind::Chat, r#"{"model":"m","stream":false}"#),
        (BodyKind::Chat, r#"{"model":"m","stream":null}"#),
        (BodyKind::Chat, r#"{"\u006dodel":"\u006d","stream":false,"stream_options":null}"#),
        (BodyKind::Chat, r#"{"model":"m","stream":false,"stream_options":{"include_usage":true}}"#),
        (BodyKind::Chat, r#"{"model":"m","stream":true,"stream_options":{"include_usage":true}}"#),
        (BodyKind::Chat, r#"{"stream":false}"#),
        (BodyKind::Responses, r#"{"model":"m","stream":true}"#),
        (BodyKind::Messages, r#"{"model":"m","stream":true}"#),
        (BodyKind::Other, r#"{"model":"m","stream":true}"#),
    ] {
        let found = inspect(kind, body.as_bytes()).unwrap();
        let splices = splices(&found, body.as_bytes(), &both);
        assert!(splices.is_empty(), "{body}");
        assert_eq!(apply(body.as_bytes(), &splices), body.as_bytes());
        assert_eq!(splices.pieces(body.as_bytes()).count(), 1);
    }
}

/// Bodies with members in every order and state, edited here and by `serde_json`.
#[test]
fn edits_agree_with_serde_json() {
    let mut rng = Rng::seeded(11);
    let pick = |rng: &mut Rng, from: &[&'static str]| from[rng.below(from.len() as u64) as usize];
    let mut edits = 0;
    for _ in 0..20_000 {
        let mut members = vec![
            format!(
                "{}:{}",
                pick(&mut rng, &[r#""model""#, r#""mod\u0065l" "#]),
                pick(&mut rng, &[r#""a""#, r#" "b\/c" "#, r#""\ud83d\ude00""#, "null"])
            ),
            format!(r#""messages":{}"#, pick(&mut rng, &["[]", r#"[{"content":"\"model\":{}"}]"#])),
            format!(r#""stream" : {}"#, pick(&mut rng, &["true", "true", "true", "false", "null"])),
            format!(
                r#""stream_options":{}"#,
                pick(
                    &mut rng,
                    &[
                        "{}",
                        "null",
                        "{ }",
                        r#"{"include_usage":false}"#,
                        r#"{"x":{"include_usage":1}, "include_usage" : null }"#,
                        r#"{"include_usage":true,"y":[]}"#,
                        r#"{"x":1}"#
                    ]
                )
            ),
            r#""temperature":0.5"#.to_owned(),
        ];
        for n in (1..members.len()).rev() {
            members.swap(n, rng.below(n as u64 + 1) as usize);
        }
        members.truncate(rng.below(members.len() as u64 + 1) as usize);
        let comma = pick(&mut rng, &[",", " ,\n "]);
        let body = format!("{}{}}}\n", pick(&mut rng, &["{", " { "]), members.join(comma));
        let edit = Edit {
            model: [None, Some("new"), Some("\"q\\模")][rng.below(3) as usize],
            ask_usage: rng.below(2) == 0,
        };
        let splices = splices(&chat(&body), body.as_bytes(), &edit);
        let edited = apply(body.as_bytes(), &splices);
        assert_eq!(edited.len(), splices.new_len(body.len()));

        let mut expected: serde_json::Value = serde_json::from_str(&body).unwrap();
        if let (Some(name), Some(true)) = (edit.model, expected.get("model").map(|m| m.is_string()))
        {
            expected["model"] = name.into();
        }
        if edit.ask_usage && expected.get("stream") == Some(&true.into()) {
            if !expected["stream_options"].is_object() {
                expected["stream_options"] = serde_json::json!({});
            }
            expected["stream_options"]["include_usage"] = true.into();
        }
        let found: serde_json::Value = serde_json::from_slice(&edited).unwrap();
        assert_eq!(found, expected, "{body} {edit:?}");
        edits += usize::from(!splices.is_empty());
        if splices.is_empty() {
            assert_eq!(edited, body.as_bytes());
        }
        // An edited body is one that would be taken again, and needs no more edit.
        let again = inspect(BodyKind::Chat, &edited).unwrap();
        assert!(super::splices(&again, &edited, &edit).is_empty(), "{body} {edit:?}");
    }
    assert!(edits > 5_000, "{edits}");
}

#[test]
fn mutated_bodies_never_panic_and_never_depend_on_cuts() {
    let mut rng = Rng::seeded(5);
    let mut taken = 0;
    for round in 0..20_000 {
        let mut body = BODIES[rng.below(BODIES.len() as u64) as usize].as_bytes().to_vec();
        for _ in 0..rng.below(4) {
            let at = rng.below(body.len() as u64) as usize;
            match rng.below(3) {
                0 => body[at] = rng.below(256) as u8,
                1 if body.len() > 1 => drop(body.remove(at)),
                _ => body.insert(at, b"{}[]:,\"\\ntu0"[rng.below(12) as usize]),
            }
        }
        if round % 50 == 0 {
            check_every_split(BodyKind::Chat, &body);
        }
        if let Ok(found) = inspect(BodyKind::Chat, &body) {
            taken += 1;
            let edit = Edit { model: Some("new"), ask_usage: true };
            let edited = apply(&body, &splices(&found, &body, &edit));
            assert!(serde_json::from_slice::<serde::de::IgnoredAny>(&edited).is_ok());
            // `serde_json` refuses lone surrogates in a value.
            if let Ok(value) = serde_json::from_slice::<serde_json::Value>(&body) {
                let model = value.get("model").and_then(serde_json::Value::as_str);
                assert_eq!(found.model_str(&body).as_deref(), model);
            }
        }
    }
    assert!(taken > 2_000, "{taken}");
}

const FORM: &[u8] = b"--XbX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
    Content-Type: audio/wav\r\n\r\n\x00\x01\xff\r\n--other\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\
    m-evil\r\n\r\n--XbX\r\nContent-Disposition: form-data; name=\"model\"\r\nContent-Length: 7\r\n\r\nm-small\r\n\
    --XbX\r\nContent-Disposition: form-data; name=\"stream\"\r\n\r\ntrue\r\n--XbX--\r\n";

#[test]
fn forms_are_inspected_and_edited_alike() {
    let inspector = || Inspector::multipart(BodyKind::Other, b"XbX");
    let whole = inspector().finish(FORM).unwrap();
    assert_eq!(whole.model_str(FORM).as_deref(), Some("m-small"));
    assert_eq!(whole.stream, Some(true));
    for cut in 0..=FORM.len() {
        let mut inspector = inspector();
        inspector.feed(&FORM[..cut]).unwrap();
        assert_eq!(inspector.finish(FORM).unwrap(), whole);
    }
    assert!(splices(&whole, FORM, &Edit { model: Some("m-small"), ask_usage: true }).is_empty());
    let splices = splices(&whole, FORM, &Edit { model: Some("whisper-large"), ask_usage: true });
    let edited = apply(FORM, &splices);
    let expected = String::from_utf8_lossy(FORM)
        .replace("Content-Length: 7\r\n\r\nm-small", "Content-Length: 13\r\n\r\nwhisper-large");
    assert_eq!(String::from_utf8_lossy(&edited), expected);
    assert_eq!(splices.new_len(FORM.len()), edited.len());

    let body = b"--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--b--";
    let found = Inspector::multipart(BodyKind::Other, b"b").finish(body).unwrap_err();
    assert_eq!(found.param, Some("model"));
}
