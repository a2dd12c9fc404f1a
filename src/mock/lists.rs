//! The endpoints that generate no text: vectors, rankings, images, sound, files, batches; and the
//! forms that some of them are asked with.

use std::fmt::Write as _;

use memchr::memmem;
use serde_json::{Value, json};

use super::say::{
    Answer, Asked, Ground, anthropic_prompt, bad, integer, invalid, missing, model, words,
};
use super::script::Act;
use super::stream::{Bill, Dialect, Quoted};
use super::tally::Truth;
use super::text;

pub struct Input {
    pub text: String,
    pub tokens: u64,
}

/// A string, a list of strings, a list of token ids, or a list of such lists.
pub fn inputs(value: &Value, field: &str) -> Result<Vec<Input>, Answer> {
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

pub fn embeddings(
    asked: &Asked,
    body: &Value,
    act: &Act,
    ground: &Ground,
) -> Result<Answer, Answer> {
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

pub fn rerank(asked: &Asked, body: &Value, act: &Act, ground: &Ground) -> Result<Answer, Answer> {
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

pub fn count_tokens(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(body["model"].as_str(), &body["model"], ground)?;
    if !body["messages"].is_array() {
        return Err(missing("messages"));
    }
    let tokens = anthropic_prompt(body);
    let mut answer = Answer::json(200, format!(r#"{{"input_tokens":{tokens}}}"#));
    answer.model = model.into();
    Ok(answer)
}

pub fn tokenize(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
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
    answer.model = model.into();
    Ok(answer)
}

/// What a mock without a bound shows where a length must be shown.
pub const CONTEXT_SHOWN: u64 = 131_072;

pub fn moderations(asked: &Asked, body: &Value, ground: &Ground) -> Result<Answer, Answer> {
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

pub fn images(name: Option<&str>, n: &Value, ground: &Ground) -> Result<Answer, Answer> {
    let model = model(name, &Value::Null, ground)?;
    let n = n.as_u64().unwrap_or(1).clamp(1, 10) as usize;
    let body = json!({"created": ground.created, "data": vec![json!({"b64_json": PNG}); n]});
    Ok(Answer::json(200, body.to_string()).worked(&model, Truth::default()))
}

pub fn speech(body: &Value, ground: &Ground) -> Result<Answer, Answer> {
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

pub fn transcription(parts: &[Part], ground: &Ground) -> Result<Answer, Answer> {
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

pub fn file(parts: &[Part], ground: &Ground) -> Result<Answer, Answer> {
    let file = parts.iter().find(|part| part.name == "file").ok_or_else(|| missing("file"))?;
    let body = json!({
        "id": format!("file-{:016x}", text::hash(&file.data)), "object": "file",
        "bytes": file.data.len(), "created_at": ground.created, "filename": file.file_name,
        "purpose": part(parts, "purpose"), "status": "processed",
    });
    Ok(Answer::json(200, body.to_string()))
}

pub fn batch(body: &Value, ground: &Ground) -> Answer {
    let body = json!({
        "id": format!("batch_{:016x}", text::hash(body.to_string().as_bytes())), "object": "batch",
        "endpoint": body["endpoint"], "input_file_id": body["input_file_id"], "status": "validating",
        "completion_window": body["completion_window"], "created_at": ground.created, "errors": null,
    });
    Answer::json(200, body.to_string())
}

/// Nothing is stored: every id exists, and an answer names it back.
pub fn stored(asked: &Asked, kind: &str) -> Answer {
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

/// One part of a multipart form.
#[derive(Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub file_name: Option<String>,
    pub data: Vec<u8>,
}

pub fn part<'a>(parts: &'a [Part], name: &str) -> Option<&'a str> {
    let part = parts.iter().find(|part| part.name == name)?;
    std::str::from_utf8(&part.data).ok()
}

pub fn boundary(content_type: &str) -> Option<String> {
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
pub fn form(body: &[u8], boundary: &str) -> Option<Vec<Part>> {
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
