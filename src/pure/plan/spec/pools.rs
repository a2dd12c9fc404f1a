//! Pools, backends and models.

use std::time::Duration;

use super::routes::limits;
use super::{
    BackendSpec, ModelSpec, PoolSpec, TOKENS_MAX, TokenizerSpec, WEIGHT_MAX, fields_or_none, place,
    words,
};
use crate::pure::fields::Forward;
use crate::pure::plan::problem::nearest;
use crate::pure::plan::read::{Item, Named, Reader, shown};
use crate::pure::plan::terms::{Breaker, Engine, Gpu, Health, Kv, Scrape, Sleep};
use crate::pure::plan::tree::Value;
use crate::pure::plan::value;
use crate::pure::plan::{Dialect, Price, Secret, Timeouts};
use crate::pure::tokens;

pub(super) fn pool<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<PoolSpec> {
    r.fields(item, |r, f| {
        let dialect = f.get(r, "dialect", |r, item| {
            let dialects = [
                ("openai", Dialect::OpenAi),
                ("anthropic", Dialect::Anthropic),
                ("ollama", Dialect::Ollama),
                ("dashscope", Dialect::DashScope),
            ];
            r.choice(item, "dialect", &dialects)
        });
        let backends =
            f.need(r, "backends", "list at least one `{ url: \"http://...\" }`", |r, item| {
                let items = r.list(item);
                if items.is_empty() && matches!(item.node.value, Value::List(_)) {
                    r.wrong(item, "a pool needs at least one backend".to_owned(), None);
                }
                let backends: Vec<BackendSpec> =
                    items.iter().filter_map(|item| backend(r, item)).collect();
                let partial = backends.len() < items.len();
                Some((backends, partial))
            });
        let health = f.get(r, "health", health);
        let breaker = f.get(r, "breaker", breaker);
        let timeouts = f.get(r, "timeouts", timeouts).unwrap_or(TIMEOUTS);
        let connections = f.get(r, "pool", connections).unwrap_or(CONNECTIONS);
        let scrape = f.get(r, "metrics", scrape);
        let sleep = f.get(r, "sleep", sleep);
        let forward = f.get(r, "forward", forward);
        let (backends, partial) = backends?;
        Some(PoolSpec {
            at,
            dialect: dialect.unwrap_or(Dialect::OpenAi),
            backends,
            partial,
            timeouts,
            idle: connections.idle.min(connections.max),
            idle_for: connections.idle_for,
            max: connections.max,
            wait: connections.wait,
            forward: forward.unwrap_or_default(),
            breaker,
            health,
            scrape,
            sleep,
        })
    })
}

fn backend<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<BackendSpec> {
    r.fields(item, |r, f| {
        let name = f.get(r, "name", Reader::reference);
        let target = f.need(r, "url", "as in `http://10.0.0.12:8000`", |r, item| {
            let target = r.parsed(item, value::url)?;
            // The backend stays, so that what refers to its version is not wrong as well.
            if target.tls {
                let hint = "use `http://` within the rack, or a TLS proxy before the backend";
                let message = "TLS to backends is not built into this version".to_owned();
                r.wrong(item, message, Some(hint.to_owned()));
            }
            Some(target)
        });
        let weight = f.get(r, "weight", |r, item| r.small(item, 0, WEIGHT_MAX));
        let api_key = f.get(r, "api_key", |r, item| {
            r.secret(item).map(|key| Secret::new(format!("Bearer {key}")))
        });
        let version = f.get(r, "version", Reader::name);
        let region = f.get(r, "region", Reader::name);
        let tags = f.get(r, "tags", words);
        let slots = f.get(r, "slots", |r, item| r.small(item, 1, 1_000_000));
        let cost = f.get(r, "cost", price);
        let gpu = f.get(r, "gpu", gpu);
        f.get(r, "http", |r, item| r.small(item, 1, 2));
        f.get(r, "tls", |r, item| {
            r.fields(item, |r, f| {
                f.get(r, "ca", Reader::text);
                f.get(r, "cert", Reader::text);
                f.get(r, "key", Reader::text);
                f.get(r, "name", Reader::text)
            })
        });
        let target = target?;
        let at = name.unwrap_or_else(|| Named {
            name: target.authority.to_string(),
            pos: f.item().pos(),
            path: f.item().path.clone(),
        });
        Some(BackendSpec {
            at,
            target,
            weight: weight.unwrap_or(1),
            api_key,
            version,
            region,
            tags: tags.unwrap_or_default(),
            slots,
            cost,
            gpu,
        })
    })
}

/// Client fields that may pass beside the usual ones. Which never may is [`Forward`]'s to know.
fn forward<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Forward> {
    let entries = r.all(item, |r, item| {
        let entry = r.text(item)?;
        match Forward::parse([entry.as_str()]) {
            Ok(_) => Some(entry),
            Err(reason) => {
                r.wrong(item, reason, None);
                None
            }
        }
    });
    Forward::parse(entries.iter().map(String::as_str)).ok()
}

fn health<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Health> {
    r.fields(item, |r, f| {
        let every = f.need(r, "every", "as in `every: 2s`", Reader::duration);
        let live = f.get(r, "live", path);
        let ready = f.get(r, "ready", path);
        let kv_below = f.get(r, "deep", |r, item| {
            r.fields(item, |r, f| f.need(r, "kv_below", "as in `kv_below: 0.95`", Reader::ratio))
        });
        let queue_below = f.get(r, "load", |r, item| {
            r.fields(item, |r, f| {
                let read = |r: &mut Reader<'a>, item: &Item<'a>| r.small(item, 1, 1_000_000);
                f.need(r, "queue_below", "as in `queue_below: 64`", read)
            })
        });
        let fall = f.get(r, "fall", |r, item| r.small(item, 1, 1_000));
        let rise = f.get(r, "rise", |r, item| r.small(item, 1, 1_000));
        Some(Health {
            every: every?,
            live,
            ready,
            kv_below,
            queue_below,
            fall: fall.unwrap_or(3),
            rise: rise.unwrap_or(2),
        })
    })
}

fn breaker<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Breaker> {
    r.fields(item, |r, f| {
        let failures = f.get(r, "failures", |r, item| r.small(item, 1, 1_000_000_000));
        let window = f.get(r, "window", Reader::duration);
        let open = f.get(r, "open", Reader::duration);
        let probes = f.get(r, "probes", |r, item| r.small(item, 1, 1_000));
        Some(Breaker {
            failures: failures.unwrap_or(5),
            window: window.unwrap_or(Duration::from_secs(30)),
            open: open.unwrap_or(Duration::from_secs(30)),
            probes: probes.unwrap_or(3),
        })
    })
}

/// Only connecting has a bound of its own accord: the kernel's is two minutes.
const TIMEOUTS: Timeouts = Timeouts {
    connect: Duration::from_secs(5),
    first_token: None,
    first_token_per_1k: None,
    answer: None,
    chunk: None,
    total: None,
};

fn timeouts<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Timeouts> {
    r.fields(item, |r, f| {
        Some(Timeouts {
            connect: f.get(r, "connect", Reader::duration).unwrap_or(TIMEOUTS.connect),
            first_token: f.get(r, "first_token", Reader::duration),
            first_token_per_1k: f.get(r, "first_token_per_1k", Reader::duration),
            answer: f.get(r, "answer", Reader::duration),
            chunk: f.get(r, "chunk", Reader::duration),
            total: f.get(r, "total", Reader::duration),
        })
    })
}

struct Connections {
    idle: usize,
    idle_for: Duration,
    max: usize,
    wait: Duration,
}

/// uvicorn closes idle connections after 5 s, so ours must go before that.
const CONNECTIONS: Connections = Connections {
    idle: 200,
    idle_for: Duration::from_secs(4),
    max: 1_000,
    wait: Duration::from_secs(10),
};

fn connections<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Connections> {
    r.fields(item, |r, f| {
        let idle = f.get(r, "idle", |r, item| r.small(item, 0, 1_000_000));
        let idle_for = f.get(r, "idle_for", Reader::duration);
        let max = f.get(r, "max", |r, item| r.small(item, 1, 1_000_000));
        let wait = f.get(r, "wait", Reader::duration_or_zero);
        Some(Connections {
            idle: idle.map_or(CONNECTIONS.idle, |n| n as usize),
            idle_for: idle_for.unwrap_or(CONNECTIONS.idle_for),
            max: max.map_or(CONNECTIONS.max, |n| n as usize),
            wait: wait.unwrap_or(CONNECTIONS.wait),
        })
    })
}

fn scrape<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Scrape> {
    r.fields(item, |r, f| {
        let path = f.get(r, "scrape", path);
        let every = f.get(r, "every", Reader::duration);
        let kind = f.get(r, "kind", |r, item| {
            let kinds = [
                ("auto", Engine::Auto),
                ("vllm", Engine::Vllm),
                ("sglang", Engine::SgLang),
                ("tgi", Engine::Tgi),
                ("llamacpp", Engine::LlamaCpp),
                ("dcgm", Engine::Dcgm),
                ("none", Engine::None),
            ];
            r.choice(item, "kind of engine", &kinds)
        });
        Some(Scrape {
            path: path.unwrap_or_else(|| "/metrics".into()),
            every: every.unwrap_or(Duration::from_secs(1)),
            kind: kind.unwrap_or(Engine::Auto),
        })
    })
}

fn sleep<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Sleep> {
    r.fields(item, |r, f| {
        let after = f.need(r, "after", "as in `after: 15m`", Reader::duration);
        let sleep = f.need(r, "sleep", "as in `sleep: /sleep?level=1`", path);
        let wake = f.need(r, "wake", "as in `wake: /wake_up`", path);
        Some(Sleep { after: after?, sleep: sleep?, wake: wake? })
    })
}

fn gpu<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Gpu> {
    r.fields(item, |r, f| {
        let kind = f.get(r, "kind", Reader::name).map(String::into_boxed_str);
        let nvml = f.get(r, "nvml", |r, item| Some(r.all(item, |r, item| r.small(item, 0, 255))));
        Some(Gpu { kind, nvml: nvml.unwrap_or_default() })
    })
}

/// US dollars per million tokens.
fn price<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Price> {
    r.fields(item, |r, f| {
        let input = f.need(r, "input", "USD per million tokens, as in `input: 0.50`", Reader::usd);
        let cached = f.get(r, "cached", Reader::usd);
        let output =
            f.need(r, "output", "USD per million tokens, as in `output: 1.50`", Reader::usd);
        Some(Price { input: input?, cached: cached.or(input)?, output: output? })
    })
}

/// A path on a server, a query allowed.
fn path<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Box<str>> {
    let text = r.text(item)?;
    if !text.starts_with('/') || !text.bytes().all(|b| (0x21..=0x7e).contains(&b)) {
        let hint = "as in `/health`".to_owned();
        r.wrong(item, format!("{} is not a path", shown(item)), Some(hint));
        return None;
    }
    Some(text.into())
}

pub(super) fn model<'a>(r: &mut Reader<'a>, at: Named, item: &Item<'a>) -> Option<ModelSpec> {
    fields_or_none(r, item, |r, f| {
        let aliases = f.get(r, "aliases", |r, item| Some(r.all(item, Reader::reference)));
        let context = f.get(r, "context", |r, item| r.integer(item, 1, TOKENS_MAX));
        let max_output = f.get(r, "max_output", |r, item| r.integer(item, 1, TOKENS_MAX));
        let price = f.get(r, "price", price);
        let tokenizer = f.get(r, "tokenizer", tokenizer);
        let kv = f.get(r, "kv", kv);
        let rate_limit = f.get(r, "rate_limit", limits);
        let fallback = f.get(r, "fallback", |r, item| Some(r.all(item, fallback)));
        Some(ModelSpec {
            at,
            aliases: aliases.unwrap_or_default(),
            context,
            max_output,
            price,
            tokenizer,
            kv,
            rate_limit,
            fallback: fallback.unwrap_or_default(),
        })
    })
}

/// `auto`, a vocabulary that is built in, or the path of a `tokenizer.json`, read now.
pub(super) fn tokenizer<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<TokenizerSpec> {
    let text = r.text(item)?;
    if text == "auto" {
        return Some(TokenizerSpec::Auto);
    }
    if tokens::NAMES.contains(&text.as_str()) {
        return Some(TokenizerSpec::BuiltIn(text));
    }
    if text.contains('/') || text.ends_with(".json") {
        return match r.file(&text) {
            Ok(json) => Some(TokenizerSpec::File { at: place(item), json }),
            Err(error) => {
                r.wrong(item, format!("the tokenizer cannot be read: {error}"), None);
                None
            }
        };
    }
    let known = tokens::NAMES.into_iter().chain(["auto"]);
    let near = nearest(&text, known).map(|near| format!("did you mean `{near}`?"));
    let hint = near.unwrap_or_else(|| {
        format!("`auto`, `{}`, or the path of a tokenizer.json", tokens::NAMES.join("`, `"))
    });
    r.wrong(item, format!("{} is no known tokenizer", shown(item)), Some(hint));
    None
}

fn kv<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<Kv> {
    r.fields(item, |r, f| {
        const HINT: &str = "as in `kv: { layers: 80, heads: 8, dim: 128, bytes: 2 }`";
        let number = |r: &mut Reader<'a>, item: &Item<'a>| r.small(item, 1, 1_000_000);
        let layers = f.need(r, "layers", HINT, number);
        let heads = f.need(r, "heads", HINT, number);
        let dim = f.need(r, "dim", HINT, number);
        let bytes = f.need(r, "bytes", HINT, number);
        let hidden = f.get(r, "hidden", number);
        Some(Kv { layers: layers?, heads: heads?, dim: dim?, bytes: bytes?, hidden })
    })
}

fn fallback<'a>(r: &mut Reader<'a>, item: &Item<'a>) -> Option<(Named, String)> {
    r.fields(item, |r, f| {
        let model = f.need(r, "model", "the model to use instead", Reader::reference);
        let reason = f.get(r, "reason", Reader::name);
        Some((model?, reason.unwrap_or_else(|| "fallback".to_owned())))
    })
}
