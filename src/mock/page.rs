//! What a mock shows of itself: models, metrics in vLLM's names, and its books.

use serde_json::{Value, json};

use super::lists::CONTEXT_SHOWN;
use super::say::DEFAULT_MODEL;
use super::script::Script;
use super::stream::Quoted;
use super::tally::{Counters, Outcome, Totals};

fn names(script: &Script) -> Vec<&str> {
    match script.models.as_slice() {
        [] => vec![DEFAULT_MODEL],
        models => models.iter().map(String::as_str).collect(),
    }
}

pub fn models(script: &Script, created: u64) -> String {
    let context = script.context.unwrap_or(CONTEXT_SHOWN);
    let data: Vec<Value> = names(script)
        .iter()
        .map(|name| {
            json!({"id": name, "object": "model", "created": created, "owned_by": "mock",
                "root": name, "parent": null, "max_model_len": context})
        })
        .collect();
    json!({"object": "list", "data": data}).to_string()
}

/// The series a gateway reads from vLLM. KV use follows the slots: half a slot's worth each.
pub fn metrics(script: &Script, totals: &Totals, asleep: bool) -> String {
    let model = names(script)[0];
    let running = totals.in_flight - totals.waiting.min(totals.in_flight);
    // Counts of open requests: far below 2^52.
    let kv = (running as f64 / (2.0 * f64::from(script.slots.unwrap_or(64)).max(1.0))).min(1.0);
    let series: [(&str, &str, &str, String); 12] = [
        ("num_requests_running", "gauge", "", running.to_string()),
        ("num_requests_waiting", "gauge", "", totals.waiting.to_string()),
        (
            "num_requests_waiting_by_reason",
            "gauge",
            r#",reason="capacity""#,
            totals.waiting.to_string(),
        ),
        ("num_requests_waiting_by_reason", "", r#",reason="deferred""#, "0".to_owned()),
        ("engine_sleep_state", "gauge", r#",sleep_state="awake""#, u8::from(!asleep).to_string()),
        ("kv_cache_usage_perc", "gauge", "", kv.to_string()),
        ("num_preemptions_total", "counter", "", "0".to_owned()),
        ("prefix_cache_queries_total", "counter", "", totals.prompt_tokens.to_string()),
        ("prefix_cache_hits_total", "counter", "", "0".to_owned()),
        ("prompt_tokens_total", "counter", "", totals.prompt_tokens.to_string()),
        ("generation_tokens_total", "counter", "", totals.completion_tokens.to_string()),
        (
            "request_success_total",
            "counter",
            r#",finished_reason="stop""#,
            totals.complete.to_string(),
        ),
    ];
    let mut text = String::new();
    for (name, kind, labels, value) in series {
        if !kind.is_empty() {
            text.push_str(&format!(
                "# HELP vllm:{name} As vLLM names it.\n# TYPE vllm:{name} {kind}\n"
            ));
        }
        let model = Quoted(model);
        text.push_str(&format!("vllm:{name}{{engine=\"0\",model_name={model}{labels}}} {value}\n"));
    }
    text
}

/// The books as JSON: totals, and the last requests with at most 4 KiB of their bodies.
pub fn mock(counters: &Counters) -> String {
    let totals = counters.totals();
    let recent: Vec<Value> = counters
        .seen()
        .iter()
        .map(|seen| {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            json!({
                "number": seen.number, "connection": seen.connection, "head": text(&seen.head),
                "body": text(&seen.body[..seen.body.len().min(4096)]), "body_bytes": seen.body_bytes,
                "model": seen.model, "status": seen.status,
                "started_ns": seen.started.nanos(),
                "first_token_ns": seen.first_token.map(|at| at.nanos()),
                "ended_ns": seen.ended.map(|at| at.nanos()),
                "outcome": match seen.outcome {
                    Outcome::Running => "running",
                    Outcome::Complete => "complete",
                    Outcome::ClientGone => "client_gone",
                    Outcome::Cut => "cut",
                    Outcome::Stopped => "stopped",
                },
                "prompt_tokens": seen.truth.prompt_tokens,
                "completion_tokens": seen.truth.completion_tokens,
            })
        })
        .collect();
    json!({
        "connections": totals.connections, "connections_open": totals.connections_open,
        "requests": totals.requests, "probes": totals.probes, "in_flight": totals.in_flight,
        "in_flight_max": totals.in_flight_max, "waiting": totals.waiting,
        "complete": totals.complete, "aborted": totals.aborted, "cut": totals.cut,
        "refused": totals.refused, "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens, "recent": recent,
    })
    .to_string()
}
