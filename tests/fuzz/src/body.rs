//! Request bodies: a body is taken exactly if two other parsers take it and no rule of ours forbids
//! it, what is found is what they find, nothing depends on cuts, and an edit changes what it names
//! and nothing else. Oracles: `serde_json`, `jiter`, a plain splitter of forms.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::pure::body::{
    BodyFault, BodyKind, Edit, Inspected, Inspector, MEMBERS_MAX, MODEL_BYTES_MAX, apply, splices,
};
use crate::pure::json::{DEPTH_MAX, KEY_BYTES_MAX};
use crate::pure::multipart;
use crate::pure::units::Rng;
use crate::{cuts, find, pick, steer};

/// Mode: 0 to 4 JSON of one kind, 5 a form with the boundary `XbX`, 6 a content type, 7 JSON again
/// (modulo 8).
pub fn run(input: &[u8]) {
    const KINDS: [BodyKind; 8] = [
        BodyKind::Chat,
        BodyKind::Completions,
        BodyKind::Responses,
        BodyKind::Messages,
        BodyKind::Other,
        BodyKind::Other,
        BodyKind::Other,
        BodyKind::Chat,
    ];
    let Some((mode, mut rng, body)) = steer(input) else { return };
    let mode = usize::from(mode % 8);
    match mode {
        5 => form(&mut rng, body),
        6 => content_type(body),
        _ => json(&mut rng, KINDS[mode], body),
    }
}

/// Inspects a body that comes whole, and cut.
fn inspect(
    rng: &mut Rng,
    new: &dyn Fn() -> Inspector,
    body: &[u8],
) -> Result<Inspected, BodyFault> {
    let whole = new().finish(body);
    for _ in 0..2 {
        let mut inspector = new();
        let fed =
            cuts(rng, body.len()).into_iter().try_for_each(|end| inspector.feed(&body[..end]));
        match (&whole, fed.and_then(|()| inspector.finish(body))) {
            // Of two faults the cuts decide which is met first.
            (Err(_), Err(_)) => {}
            (whole, cut) => assert_eq!(*whole, cut),
        }
    }
    if let Err(fault) = &whole {
        assert!(fault.offset <= body.len() as u64 && !fault.message.is_empty());
    }
    whole
}

/// Splices are in order, apart and within the body, and say how long it becomes.
fn edit(inspected: &Inspected, body: &[u8], edit: &Edit) -> (Vec<u8>, bool) {
    let splices = splices(inspected, body, edit);
    let edited = apply(body, &splices);
    assert_eq!(edited.len(), splices.new_len(body.len()));
    assert!(
        splices.pieces(body).count() <= 5 && splices.pieces(body).all(|piece| !piece.is_empty())
    );
    assert_eq!(splices.pieces(body).collect::<Vec<_>>().concat(), edited);
    let (mut at, mut expected) = (0, Vec::new());
    for splice in splices.iter() {
        assert!(at <= splice.at && splice.at + splice.cut <= body.len());
        expected.extend_from_slice(&body[at..splice.at]);
        expected.extend_from_slice(&splice.insert);
        at = splice.at + splice.cut;
    }
    expected.extend_from_slice(&body[at..]);
    assert_eq!(edited, expected);
    (edited, splices.is_empty())
}

// ---- JSON

fn json(rng: &mut Rng, kind: BodyKind, body: &[u8]) {
    let found = inspect(rng, &|| Inspector::new(kind), body);

    let utf8 = std::str::from_utf8(body).is_ok();
    let serde = utf8 && serde_json::from_slice::<IgnoredAny>(body).is_ok();
    let depth = if serde { depth(body) } else { 0 };
    let sound = serde && depth <= DEPTH_MAX;
    let says_json =
        |fault: &BodyFault| fault.message.starts_with("The request body is not valid JSON");
    if let Err(fault) = &found {
        // Of a fault of each sort either may be met first.
        assert!(!sound || !says_json(fault), "sound JSON is refused: {fault:?}");
    }
    assert!(sound || found.is_err(), "broken JSON is taken");
    // jiter refuses surrogates without their other half, which RFC 8259 leaves open; it gives up at
    // 200 levels, and at numbers of 4,300 digits.
    if !lone_surrogate(body) && depth <= 150 && body.len() < 4_000 {
        let mut jiter = jiter::Jiter::new(body);
        let taken = utf8 && jiter.next_skip().is_ok() && jiter.finish().is_ok();
        assert_eq!(taken, serde, "the oracles disagree");
    }
    if !sound {
        return;
    }

    match serde_json::from_slice::<Members>(body) {
        Ok(Members(members)) => match facts(kind, &members) {
            Some(Ok(facts)) => {
                let found = found.as_ref().expect("no rule forbids it");
                let text = |text: Option<Cow<str>>| text.map(Cow::into_owned);
                assert_eq!(
                    Facts {
                        model: text(found.model_str(body)),
                        stream: found.stream,
                        include_usage: found.include_usage,
                        max_tokens: found.max_tokens,
                        n: found.n,
                        prompt_bytes: found.prompt_bytes,
                    },
                    facts
                );
                check_spans(found, body, &members);
            }
            Some(Err(rule)) => assert!(found.is_err(), "{rule}"),
            None => {}
        },
        // Either no object, or a name is no Unicode and that parser gives up.
        Err(_) => assert!(found.is_err() || body.trim_ascii_start().starts_with(b"{")),
    }
    if let Ok(found) = found {
        edits(rng, kind, body, &found);
    }
}

/// Deepest nesting of sound JSON.
fn depth(body: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    let (mut string, mut escape) = (false, false);
    for &byte in body {
        match byte {
            _ if escape => escape = false,
            b'\\' => escape = string,
            b'"' => string = !string,
            b'{' | b'[' if !string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !string => depth -= 1,
            _ => {}
        }
    }
    deepest
}

/// Whether some escape may be a surrogate.
fn lone_surrogate(body: &[u8]) -> bool {
    body.windows(4).any(
        |four| matches!(four, [b'\\', b'u', b'd' | b'D', third] if !matches!(third, b'0'..=b'7')),
    )
}

/// The members of an object in order, with those that come twice, their values as written.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> serde::Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Members, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(Object)
    }
}

/// What is to be found in a body.
#[derive(Debug, Default, PartialEq)]
struct Facts {
    model: Option<String>,
    stream: Option<bool>,
    include_usage: Option<bool>,
    max_tokens: Option<u64>,
    n: Option<u64>,
    prompt_bytes: u64,
}

/// The members that may stand once and in one spelling.
const INSPECTED: [&str; 8] = [
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "n",
    "user",
];

const PROMPT: [&str; 15] = [
    "messages",
    "prompt",
    "input",
    "system",
    "instructions",
    "tools",
    "functions",
    "suffix",
    "query",
    "queries",
    "documents",
    "inputs",
    "texts",
    "text_1",
    "text_2",
];

/// What is in a body of these members, or which rule forbids it; `None` where this oracle cannot
/// tell.
fn facts(
    kind: BodyKind,
    members: &[(String, Box<RawValue>)],
) -> Option<Result<Facts, &'static str>> {
    let mut names = HashSet::new();
    for (name, _) in members {
        if name.len() > KEY_BYTES_MAX {
            return Some(Err("too long a name"));
        }
        if !names.insert(name.as_str()) {
            return Some(Err("two members of one name"));
        }
        let folded: String = name
            .chars()
            .map(|c| match c {
                'ſ' => 's',
                '\u{212A}' => 'k',
                c => c.to_ascii_lowercase(),
            })
            .collect();
        if folded != *name && INSPECTED.contains(&folded.as_str()) {
            return Some(Err("a look-alike"));
        }
    }
    if members.len() > MEMBERS_MAX {
        return Some(Err("too many members"));
    }
    let value = |name: &str| {
        let (_, raw) = members.iter().find(|member| member.0 == name)?;
        Some(raw.get()).filter(|&raw| raw != "null")
    };
    let flag = |raw: Option<&str>| match raw {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(_) => Err("no boolean"),
    };
    let mut facts = Facts::default();

    if let Some(raw) = value("model") {
        // Fails for what is no string, and for a lone surrogate.
        let Ok(model) = serde_json::from_str::<String>(raw) else {
            return Some(Err("no model's name"));
        };
        if model.is_empty() || model.len() > MODEL_BYTES_MAX || model.chars().any(char::is_control)
        {
            return Some(Err("no model's name"));
        }
        facts.model = Some(model);
    }
    match flag(value("stream")) {
        Ok(stream) => facts.stream = stream,
        Err(rule) => return Some(Err(rule)),
    }

    let option = matches!(kind, BodyKind::Chat | BodyKind::Completions);
    if let Some(raw) = value("stream_options") {
        match serde_json::from_str::<Members>(raw) {
            Ok(Members(options)) => {
                let mut usage = options.iter().filter(|(name, _)| name == "include_usage");
                let first = usage.next().map(|(_, raw)| raw.get()).filter(|&raw| raw != "null");
                if usage.next().is_some() {
                    return Some(Err("include_usage twice"));
                }
                match flag(first) {
                    _ if !option => {}
                    Ok(include) => facts.include_usage = include,
                    Err(rule) => return Some(Err(rule)),
                }
            }
            Err(_) if raw.starts_with('{') => return None,
            Err(_) if option => return Some(Err("options are an object")),
            Err(_) => {}
        }
    }

    let strict = kind != BodyKind::Other;
    let count = |name: &str, strict: bool| match value(name) {
        None => Ok(None),
        Some(raw) => match whole(raw) {
            None if strict => Err("no count"),
            count => Ok(count),
        },
    };
    let limits: &[&str] = match kind {
        BodyKind::Chat => &["max_completion_tokens", "max_tokens"],
        BodyKind::Completions | BodyKind::Messages => &["max_tokens"],
        BodyKind::Responses => &["max_output_tokens"],
        BodyKind::Other => &["max_completion_tokens", "max_tokens", "max_output_tokens"],
    };
    for name in limits {
        match count(name, strict) {
            Ok(limit) => facts.max_tokens = facts.max_tokens.or(limit),
            Err(rule) => return Some(Err(rule)),
        }
    }
    match count("n", option) {
        Ok(n) => facts.n = n,
        Err(rule) => return Some(Err(rule)),
    }
    let prompt = members.iter().filter(|(name, _)| PROMPT.contains(&name.as_str()));
    facts.prompt_bytes = prompt.map(|(_, raw)| raw.get().len() as u64).sum();
    Some(Ok(facts))
}

/// A whole number from 0 to 2⁶⁴ − 1; above 2⁵³ only if written with digits alone.
fn whole(raw: &str) -> Option<u64> {
    if raw.bytes().all(|byte| byte.is_ascii_digit()) {
        return raw.parse().ok();
    }
    let first = raw.bytes().next()?;
    let value: f64 = raw.parse().ok().filter(|_| first == b'-' || first.is_ascii_digit())?;
    let fits = (0.0..=9_007_199_254_740_992.0).contains(&value) && value.trunc().eq(&value);
    fits.then_some(value as u64)
}

fn check_spans(found: &Inspected, body: &[u8], members: &[(String, Box<RawValue>)]) {
    let raw = |name: &str| {
        let member = members.iter().find(|member| member.0 == name);
        member.map(|(_, raw)| raw.get().as_bytes())
    };
    let present = |name: &str| raw(name).filter(|&raw| raw != b"null");
    assert_eq!(found.model.map(|span| span.of(body)), present("model"));
    assert_eq!(found.stream_options.map(|span| span.of(body)), raw("stream_options"));
    let user = present("user").filter(|raw| raw.starts_with(b"\""));
    assert_eq!(found.user.map(|span| span.of(body)), user);
    if let Some(Ok(user)) = user.map(serde_json::from_slice::<String>) {
        assert_eq!(found.user_str(body).as_deref(), Some(&user[..]));
    }
    let first = members.iter().find(|(name, _)| PROMPT[..3].contains(&name.as_str()));
    assert_eq!(found.prompt.map(|span| span.of(body)), first.map(|(_, raw)| raw.get().as_bytes()));
    assert!(found.media_bytes <= found.prompt_bytes);
    assert_eq!(found.require_model().is_ok(), present("model").is_some());
}

fn edits(rng: &mut Rng, kind: BodyKind, body: &[u8], found: &Inspected) {
    let long = "m".repeat(300);
    let same = found.model_str(body).unwrap_or_default().into_owned();
    let names = ["new", "\"q\\模", "a/b:7b", "\u{1}\n\u{7f}", &long, &same];
    let name = rng.below(2).eq(&0).then(|| names[pick(rng, names.len())]);
    let wish = Edit { model: name, ask_usage: rng.below(2) == 0 };
    let (edited, unchanged) = edit(found, body, &wish);
    if unchanged {
        assert_eq!(edited, body);
    }
    // It gives up at 128 levels, at numbers that no f64 holds, and at lone surrogates.
    if let Ok(mut expected) = serde_json::from_slice::<Value>(body) {
        if let (Some(name), Some(true)) = (name, expected.get("model").map(Value::is_string)) {
            expected["model"] = name.into();
        }
        let option = matches!(kind, BodyKind::Chat | BodyKind::Completions);
        if wish.ask_usage && option && expected.get("stream") == Some(&true.into()) {
            if !expected["stream_options"].is_object() {
                expected["stream_options"] = serde_json::json!({});
            }
            expected["stream_options"]["include_usage"] = true.into();
        }
        let edited: Value = serde_json::from_slice(&edited).expect("an edited body is JSON");
        assert_eq!(edited, expected);
    }
    // What was edited is taken again and needs no more edit.
    let fit = name.is_none_or(|name| !name.is_empty() && !name.chars().any(char::is_control));
    let full = serde_json::from_slice::<Members>(body).is_ok_and(|m| m.0.len() >= MEMBERS_MAX);
    if fit && !full {
        let again = Inspector::new(kind).finish(&edited).expect("an edited body is sound");
        assert!(edit(&again, &edited, &wish).1);
        if let (Some(name), Some(_)) = (name, found.model) {
            assert_eq!(again.model_str(&edited).as_deref(), Some(name));
        }
    }
}

// ---- forms

fn form(rng: &mut Rng, body: &[u8]) {
    let new = || Inspector::multipart(BodyKind::Other, b"XbX");
    let Ok(found) = inspect(rng, &new, body) else { return };
    let parts = parts(body).expect("a form that is taken has one reading");
    let field = |name: &str| {
        let quoted = format!("name=\"{name}\"");
        let bare = format!("name={name}");
        let mut with = parts.iter().filter(|(head, _)| {
            head.split(|&byte| byte == b'\n').any(|line| {
                let disposition = b"content-disposition:";
                line.get(..disposition.len()).is_some_and(|d| d.eq_ignore_ascii_case(disposition))
                    && line.split(|&byte| byte == b';').skip(1).any(|parameter| {
                        let parameter = parameter.trim_ascii();
                        parameter.eq_ignore_ascii_case(quoted.as_bytes())
                            && parameter.ends_with(&quoted.as_bytes()[5..])
                            || parameter.eq_ignore_ascii_case(bare.as_bytes())
                                && parameter.ends_with(&bare.as_bytes()[5..])
                    })
            })
        });
        (with.next().map(|part| part.1), with.count())
    };
    let (model, more) = field("model");
    assert_eq!(found.model.map(|span| span.of(body)), model);
    assert_eq!(more, 0, "two models");
    let (prompt, _) = field("prompt");
    assert_eq!(found.prompt.map(|span| span.of(body)), prompt);
    let (stream, _) = field("stream");
    assert_eq!(found.stream.is_some(), stream.is_some());

    let name = ["new", "a/b:7b", "模型", "m"][pick(rng, 4)];
    let (edited, unchanged) = edit(&found, body, &Edit { model: Some(name), ask_usage: true });
    assert!(found.model.is_some() || unchanged);
    let again = new().finish(&edited).expect("an edited form is sound");
    assert_eq!(again.model.is_some(), found.model.is_some());
    if again.model.is_some() {
        assert_eq!(again.model_str(&edited).as_deref(), Some(name));
    }
    assert_eq!((again.stream, again.n), (found.stream, found.n));
    assert!(edit(&again, &edited, &Edit { model: Some(name), ask_usage: true }).1);
}

/// Heads and contents of the parts of a form, split at each delimiter line.
fn parts(body: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut parts = Vec::new();
    let mut rest = body.strip_prefix(b"--XbX")?;
    while let Some(part) = rest.strip_prefix(b"\r\n") {
        let head = find(part, b"\r\n\r\n")?;
        let content = &part[head + 4..];
        let mut from = 0;
        let end = loop {
            let at = from + find(&content[from..], b"\r\n--XbX")?;
            let behind = &content[at + 7..];
            if behind.starts_with(b"\r\n") || behind.starts_with(b"--") {
                break at;
            }
            from = at + 1;
        };
        parts.push((&part[..head], &content[..end]));
        rest = &content[end + 7..];
    }
    matches!(rest, b"--" | b"--\r\n").then_some(parts)
}

/// A boundary is a legal one that the value holds, and quoting it again gives it again.
fn content_type(value: &[u8]) {
    let Some(boundary) = multipart::boundary(value) else { return };
    assert!((1..=70).contains(&boundary.len()) && !boundary.ends_with(b" "));
    assert!(find(value, boundary).is_some() && !boundary.contains(&b'"'));
    let quoted = [b"multipart/form-data; boundary=\"", boundary, b"\""].concat();
    assert_eq!(multipart::boundary(&quoted), Some(boundary));
    let twice = [value, b"; boundary=x"].concat();
    assert_eq!(multipart::boundary(&twice), None, "a second boundary");
}
