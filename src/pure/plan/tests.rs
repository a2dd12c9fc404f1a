//! Goal: whatever a file says, the answer is a plan or a list of problems with places, and the
//! plan's lookups agree with the plain reading of the rules.
//! Method: tables of broken files with the exact lines they must give, seeded mutations of a good
//! file, and oracles that do what the fast lookups do one by one.

use std::sync::Arc;

use super::*;
use crate::pure::board::{Kind, Slot};
use crate::pure::units::Rng;

/// Every area of the design's example, with what it leaves out filled in and without what this
/// version refuses (TLS).
const FULL: &str = r#"
server:
  listen: ["0.0.0.0:8080", "fd:forebay"]
  tls: null
  shards: auto
  gpu_cpu: auto
  bounds: { head: 64KiB, headers: 128, body: 64MiB, buffered: 2GiB, connections: 100000 }
  timeouts: { head: 10s, idle: 75s, body_rate: 1KiB/s, send: 30s }
  half_close: abort
  trust_forwarded: [10.0.0.0/8]
  grace: 10m
admin: { listen: "127.0.0.1:9900", token: { file: admin.token } }
state: { dir: /var/lib/forebay, sync: group }
fleet: { redis: "redis://:hunter2@10.0.0.5:6379", name: gw-1 }

pools:
  llama-cluster:
    dialect: openai
    backends:
      - { name: a1, url: "http://10.0.0.12:8000", version: v1, weight: 1, region: cn-east, tags: [gold],
          slots: 256, api_key: { file: upstream.key }, gpu: { kind: A100-80G, nvml: [0, 1] },
          cost: { input: 0.10, output: 0.40 } }
      - { name: a2, url: "http://rack-2:8443/base/v1", version: v2, http: 2, api_key: "${UPSTREAM_KEY}" }
    health: { every: 2s, live: /health, ready: /v1/models, deep: { kv_below: 0.95 }, load: { queue_below: 64 }, fall: 3, rise: 2 }
    breaker: { failures: 5, window: 30s, open: 30s, probes: 3 }
    timeouts: { connect: 5s, first_token: 60s, first_token_per_1k: 500ms, answer: 10m, chunk: 10s, total: null }
    pool: { idle: 200, idle_for: 4s, max: 1000, wait: 10s }
    metrics: { scrape: /metrics, every: 100ms, kind: auto }
    sleep: { after: 15m, sleep: /sleep?level=1, wake: /wake_up }
    forward: [X-Team]
  shared-7b-pool: { backends: [ { url: "http://10.0.0.20:8000/" } ] }
  llama-next: { backends: [ { name: n1, url: "http://10.0.0.21:8000" } ] }
  gpt4-cluster: { backends: [ { name: g1, url: "http://[fd00::1]:8000/v1/" } ] }

models:
  llama-3-70b:
    aliases: [llama-70b]
    context: 131072
    max_output: 8192
    price: { input: 0.50, cached: 0.05, output: 1.50 }
    tokenizer: auto
    kv: { layers: 80, heads: 8, dim: 128, bytes: 2, hidden: 8192 }
    fallback:
      - { model: llama-3-8b, reason: capability_downgrade }
  llama-3-8b:

routes:
  - name: budget-tenant
    match: { header: { X-Tenant-Tier: "free" } }
    pool: shared-7b-pool
    strategy: least-requests
    rate_limit: { rpm: 60, tpm: 10000 }
  - name: canary-v2
    match: { model: "llama-3-70b", tier: [gold], profile: [steady], compliance: [cn-pii], prompt_tokens: { max: 100000 } }
    pool: llama-cluster
    strategy: weighted-split
    weights: { v1: 90, v2: 10 }
    sticky: { header: X-Session-ID }
    queue: { max: 1024, wait: 30s }
    retry: { attempts: 2, budget: 20% }
    heartbeat: 5s
    canary: { candidate: v2, baseline: v1, steps: [ {weight: 5, for: 5m}, {weight: 25, for: 10m}, {weight: 50, for: 30m}, {weight: 100} ],
              rollback: { error_rate: 1%, p99_ratio: 1.2, min_requests: 200 } }
    shadow: { pool: llama-next, sample: 100%, promote: { consecutive: 1000, agree: 99.95%, within: 50ms } }
    units: [ prompt-filter: { words: words.txt }, redact: { paths: ["$.choices[*].message.content"], kinds: [phone, email, id-card], when: { header: { X-Enable-PII-Scan: "true" } } } ]
    admission: { headroom: kv, reserve: 0.8 }
  - name: small
    match: { model: "llama-3-8*" }
    pool: llama-cluster
  - name: default
    match: { model: ["gpt-4", "gpt-4-turbo"] }
    pool: gpt4-cluster
    strategy: weighted_round_robin

tiers:
  free:       { rpm: 60,   tpm: 100_000,    tpd: 10_000_000,    concurrency: 10, priority: low }
  pro:        { rpm: 600,  tpm: 1_000_000,  tpd: 500_000_000 }
  enterprise: { rpm: 6000, tpm: 10_000_000, tpd: 5_000_000_000, priority: high }
tenants:
  acme: { tier: pro, models: ["llama-3-*"], regions: [cn-east], reserve: p95,
          budget: { usd: 5000, per: month, over: downgrade, to: llama-3-8b } }
keys:
  - { id: acme-1, tenant: acme, sha256: "00000000000000000000000000000000000000000000000000000000000000aa" }
global: { rpm: 100000 }
"#;

/// The smallest useful file; the broken ones are changes of it.
const SMALL: &str = r#"server: { listen: "127.0.0.1:8080" }
pools:
  main:
    backends:
      - { name: b1, url: "http://10.0.0.1:8000" }
      - { name: b2, url: "http://10.0.0.2:8000", version: v2 }
models:
  big: { aliases: [small] }
routes:
  - name: chat
    match: { model: big }
    pool: main
tenants:
  acme: {}
keys:
  - { id: k1, tenant: acme, sha256: "00000000000000000000000000000000000000000000000000000000000000aa" }
"#;

fn env(name: &str) -> Option<String> {
    match name {
        "UPSTREAM_KEY" => Some("sk-upstream".to_owned()),
        "PORT" => Some("9000".to_owned()),
        "EMPTY" => Some(String::new()),
        _ => None,
    }
}

fn files(path: &str) -> Result<String, String> {
    match path {
        "admin.token" | "upstream.key" => Ok("sk-of-file\n".to_owned()),
        "two.key" => Ok("one\ntwo\n".to_owned()),
        _ => Err("no such file".to_owned()),
    }
}

fn build(text: &str) -> Result<Plan, Vec<Problem>> {
    Plan::build(text, &env, &files, &mut Registry::new())
}

fn good(text: &str) -> Plan {
    match build(text) {
        Ok(plan) => plan,
        Err(problems) => panic!("{}", lines(&problems)),
    }
}

fn lines(problems: &[Problem]) -> String {
    problems.iter().map(|problem| format!("{problem}\n")).collect()
}

/// `SMALL` with one text for another.
fn small(from: &str, to: &str) -> String {
    assert_eq!(SMALL.matches(from).count(), 1, "{from:?} must be in SMALL once");
    SMALL.replace(from, to)
}

#[test]
fn the_example_with_every_area_builds() {
    let plan = good(FULL);
    assert_eq!((plan.pools.len(), plan.backends.len(), plan.routes.len()), (4, 5, 4));
    assert_eq!(plan.server.listen[1], Listen::Fd("forebay".into()));
    assert_eq!(plan.server.bounds.buffered, 2 << 30);
    assert_eq!(plan.server.grace, Duration::from_secs(600));
    let a1 = &plan.backends[0];
    assert_eq!(a1.api_key.as_ref().map(Secret::expose), Some("Bearer sk-of-file"));
    assert_eq!((a1.slots, a1.weight, a1.region.as_deref()), (Some(256), 1, Some("cn-east")));
    let a2 = &plan.backends[1];
    assert_eq!(a2.api_key.as_ref().map(Secret::expose), Some("Bearer sk-upstream"));
    assert_eq!((&a2.base_path, a2.port), (&BasePath::parse("/base").unwrap(), 8443));
    // Without a name a backend is called by its authority; without a price there is none.
    assert_eq!(&*plan.backends[2].name, "10.0.0.20:8000");
    assert_eq!(&*plan.backends[4].host_header, "[fd00::1]:8000");
    let pool = &plan.pools[0];
    assert_eq!(pool.timeouts.first_token_per_1k, Some(Duration::from_millis(500)));
    assert_eq!(pool.timeouts.total, None);
    let price = plan.models[0].price.unwrap();
    assert_eq!(
        (price.input, price.cached, price.output),
        (NanoUsd(500_000_000), NanoUsd(50_000_000), NanoUsd(1_500_000_000))
    );
    assert_eq!(plan.models[0].fallback[0].model, ModelId(1));
    let canary = &plan.routes[1];
    assert_eq!(canary.strategy, Strategy::WeightedSplit);
    let weights: Vec<u32> = canary.candidates.iter().map(|candidate| candidate.weight).collect();
    assert_eq!(weights, [9, 1]);
    assert_eq!(canary.sticky.as_deref(), Some("x-session-id"));
    assert_eq!(canary.retry, Retry { attempts: 2, budget: 0.2 });
    assert_eq!(canary.canary.as_ref().unwrap().steps.len(), 4);
    assert_eq!(canary.units.len(), 2);
    assert_eq!(canary.shadow.as_ref().unwrap().pool, PoolId(2));
    assert_eq!(plan.tenants[0].tier, Some(1));
    let budget = plan.tenants[0].budget.as_ref().unwrap();
    assert_eq!(budget.over, OverBudget::Downgrade(ModelId(1)));
    assert_eq!(plan.global.as_ref().unwrap().rpm, Some(100_000));
    // Names that only a route knows are models too.
    assert_eq!(plan.model("gpt-4"), Some(ModelId(2)));
    fn shared<T: Send + std::marker::Sync>(_: &T) {}
    shared(&plan);
}

/// What the file asks for and does not get is said, the limits among it with emphasis.
#[test]
fn what_is_not_acted_on_is_said() {
    let plan = good(FULL);
    let mut said: Vec<String> = plan
        .notices
        .iter()
        .map(|notice| format!("{} {}", notice.severity.word(), notice.field))
        .collect();
    said.sort();
    let expected = [
        "ignored models.llama-3-70b.context",
        "ignored models.llama-3-70b.fallback",
        "ignored models.llama-3-70b.kv",
        "ignored pools.llama-cluster.backends[0].cost",
        "ignored pools.llama-cluster.backends[0].gpu",
        "ignored pools.llama-cluster.backends[1].http",
        "ignored pools.llama-cluster.breaker",
        "ignored pools.llama-cluster.health",
        "ignored pools.llama-cluster.metrics.kind",
        "ignored pools.llama-cluster.metrics.scrape",
        "ignored pools.llama-cluster.sleep",
        "ignored routes[1].canary",
        "ignored routes[1].match.compliance",
        "ignored routes[1].match.profile",
        "ignored routes[1].match.prompt_tokens",
        "ignored routes[1].match.tier",
        "ignored routes[1].queue",
        "ignored routes[1].shadow",
        "ignored routes[1].units",
        "ignored tenants.acme.regions",
        "unenforced-limit fleet",
        "unenforced-limit global",
        "unenforced-limit routes[0].rate_limit",
        "unenforced-limit routes[1].admission",
        "unenforced-limit tenants.acme.budget",
        "unenforced-limit tenants.acme.reserve",
        "unenforced-limit tiers",
    ];
    assert_eq!(said, expected);
    assert!(good(SMALL).notices.is_empty(), "{:?}", good(SMALL).notices);
    let text = FULL.replace(
        "    pool: llama-cluster\n",
        "    pool: llama-cluster\n    heartbeat: 1s\n    strategy: cost\n",
    );
    let text = text.replacen(
        "    heartbeat: 1s\n    strategy: cost\n    strategy: weighted-split",
        "    strategy: cost",
        1,
    );
    let text = text.replace("    weights: { v1: 90, v2: 10 }\n", "");
    let notices = good(&text).notices;
    let strategy = notices.iter().find(|notice| notice.field.ends_with("strategy")).unwrap();
    assert_eq!((strategy.places, strategy.severity), (2, Severity::Ignored));
    assert!(strategy.to_string().contains("(and 1 more places)"), "{strategy}");
}

#[test]
fn advice_for_what_is_allowed_and_hardly_meant() {
    let advice = |text: &str| -> Vec<String> {
        good(text)
            .notices
            .iter()
            .map(|notice| format!("{} {notice}", notice.severity.word()))
            .collect()
    };
    assert_eq!(
        advice(&small("match: { model: big }", "match: { model: bigg }")),
        [
            "advice 8:3: models.big: no route serves model `big`, so clients get 404; did a route mean it by `bigg`?"
        ]
    );
    assert_eq!(
        advice(&small("tenants:\n  acme: {}", "tenants:\n  acme: { models: [smal] }")),
        [
            "advice 14:20: tenants.acme.models[0]: no model has the name `smal`; did you mean `small`?"
        ]
    );
    assert_eq!(
        advice(&small(
            "    match: { model: big }\n    pool: main",
            "    pool: main\n  - { name: late, pool: main }"
        )),
        [
            "advice 12:13: routes[1].name: route `late` is never reached: route `chat` above has no `match` and takes everything"
        ]
    );
    assert_eq!(
        advice(&small("models:\n", "  spare: { backends: [ { url: \"http://h\" } ] }\nmodels:\n")),
        ["advice 7:3: pools.spare: no route uses pool `spare`"]
    );
    assert_eq!(
        advice(&small("server:", "admin: { listen: \"0.0.0.0:9900\" }\nserver:")),
        ["advice 1:18: admin.listen: the admin port is open to other machines and has no `token`"]
    );
    assert_eq!(
        advice(&small("name: b1,", "name: b1, api_key: sk-plain,")),
        [
            "advice 5:30: pools.main.backends[0].api_key: a secret stands in the file itself; `{ file: path }` or `${VAR}` keeps it out"
        ]
    );
}

/// Changes of `SMALL` (from, to) and every line they must give.
const BROKEN: &[(&str, &str, &[&str])] = &[
    // ---- names of fields
    (
        "    pool: main",
        "    pool: main\n    strateggy: cost",
        &[
            "13:5: routes[0].strateggy: unknown field `strateggy` (route chat); help: did you mean `strategy`?",
        ],
    ),
    (
        "tenants:\n",
        "tenant:\n",
        &[
            "13:1: tenant: unknown field `tenant`; help: did you mean `tenants`?",
            "16:23: keys[0].tenant: there is no tenant `acme` (key k1); help: the file defines no tenant at all",
        ],
    ),
    (
        "listen: \"127.0.0.1:8080\"",
        "Listen: \"127.0.0.1:8080\"",
        &[
            "1:9: server.listen: `listen` is missing; help: as in `listen: \"0.0.0.0:8080\"`",
            "1:11: server.Listen: unknown field `Listen`; help: did you mean `listen`?",
        ],
    ),
    (
        "    pool: main\n",
        "",
        &[
            "10:5: routes[0].pool: `pool` is missing (route chat); help: the pool that serves this route",
        ],
    ),
    (
        "name: chat",
        "name: chat\n    name: chat",
        &["11:5: `name` is here twice; the first is on line 10; help: keep one of them"],
    ),
    (
        "  acme: {}",
        "  acme: {}\n  acme: {}",
        &["15:3: `acme` is here twice; the first is on line 14; help: keep one of them"],
    ),
    // ---- shapes
    (
        "  acme: {}",
        "  acme: [a]",
        &["14:9: tenants.acme: a map of fields is expected here, not a list (tenant acme)"],
    ),
    (
        "    pool: main",
        "    pool: [main]",
        &["12:11: routes[0].pool: a single value is expected here, not a list (route chat)"],
    ),
    (
        "routes:\n  - name: chat\n    match: { model: big }\n    pool: main\n",
        "routes: chat\n",
        &[
            "9:9: routes: a list is expected here, not a single value",
            "9:9: routes: there is no route here, so nothing would be served",
        ],
    ),
    (
        "    backends:\n      - { name: b1, url: \"http://10.0.0.1:8000\" }\n      - { name: b2, url: \"http://10.0.0.2:8000\", version: v2 }\n",
        "    backends: []\n",
        &["4:15: pools.main.backends: a pool needs at least one backend (pool main)"],
    ),
    // ---- values
    (
        "127.0.0.1:8080",
        ":8080",
        &[
            "1:19: server.listen: `:8080` is not an address with a port; help: write `0.0.0.0:8080` for every address",
        ],
    ),
    (
        "\"127.0.0.1:8080\"",
        "[\"127.0.0.1:80\", \"0.0.0.0:80\"]",
        &["1:36: server.listen[1]: `0.0.0.0:80` is taken by a listener above"],
    ),
    (
        "server: {",
        "admin: { listen: \"127.0.0.1:8080\" }\nserver: {",
        &[
            "1:18: admin.listen: `127.0.0.1:8080` is taken by `server.listen`; help: the admin port is a port of its own",
        ],
    ),
    (
        "8080\" }",
        "8080\", tls: { cert: a, key: b } }",
        &[
            "1:42: server.tls: TLS is not built into this version; help: leave `tls` out, and end TLS before Forebay",
        ],
    ),
    (
        "8080\" }",
        "8080\", grace: 600 }",
        &[
            "1:44: server.grace: `600` is a number without a unit, not a duration; help: write `600s` for seconds or `600ms` for milliseconds",
        ],
    ),
    (
        "8080\" }",
        "8080\", shards: 0 }",
        &["1:45: server.shards: `0` is out of range: it must be at least 1"],
    ),
    (
        "8080\" }",
        "8080\", shards: 4-2 }",
        &[
            "1:45: server.shards: `4-2` is not a list of CPUs; help: write it as `2-15` or `0,2,4-7`",
        ],
    ),
    (
        "8080\" }",
        "8080\", bounds: { body: 64M } }",
        &[
            "1:53: server.bounds.body: `64M` is not a size; help: write bytes as a number, or `64KiB`, `8MB`, `2GiB`",
        ],
    ),
    (
        "8080\" }",
        "8080\", timeouts: { idle: 0s } }",
        &[
            "1:55: server.timeouts.idle: this must be longer than zero; help: leave it out, or write `null`, to turn it off",
        ],
    ),
    (
        "8080\" }",
        "8080\", half_close: server }",
        &[
            "1:49: server.half_close: `server` is no known meaning of half-close; help: did you mean `serve`?",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "https://10.0.0.1",
        &[
            "5:26: pools.main.backends[0].url: TLS to backends is not built into this version (pool main); help: use `http://` within the rack, or a TLS proxy before the backend",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "10.0.0.1:8000",
        &[
            "5:26: pools.main.backends[0].url: `10.0.0.1:8000` has no scheme such as `http://` (pool main); help: write it as `http://10.0.0.12:8000` or `http://host:8000/base/v1`",
        ],
    ),
    (
        "name: b1,",
        "name: b1, slots: 0,",
        &[
            "5:28: pools.main.backends[0].slots: `0` is out of range: it must be at least 1 (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, weight: -1,",
        &[
            "5:29: pools.main.backends[0].weight: `-1` is not a whole number (pool main); help: write digits only, as in `100_000`",
        ],
    ),
    (
        "name: b1,",
        "name: b1, weight: 1.5,",
        &[
            "5:29: pools.main.backends[0].weight: `1.5` is not a whole number (pool main); help: write digits only, as in `100_000`",
        ],
    ),
    (
        "name: b1,",
        "name: b2,",
        &[
            "6:17: pools.main.backends[1].name: backend `b2` is here twice; the first is on line 5 (backend b2)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    strategy: random",
        &[
            "13:15: routes[0].strategy: `random` is no known strategy (route chat); help: known: `weighted-round-robin`, `least-requests`, `weighted-split`, `consistent-hash`, `prefix`, `adaptive`, `least-queued`, `least-latency`, `most-available`, `cost`, `cost-optimized`",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    retry: { attempts: 1, budget: 20 }",
        &[
            "13:35: routes[0].retry.budget: `20` is out of range (route chat); help: write `20%` for per cent",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    retry: { attempts: 99 }",
        &[
            "13:24: routes[0].retry.attempts: `99` is out of range: it must be at most 10 (route chat)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    sticky: { header: \"X Y\" }",
        &[
            "13:23: routes[0].sticky.header: `X Y` is not the name of a header (route chat); help: letters, digits and `-`, as in `X-Session-ID`",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    units: [ { redactt: {} } ]",
        &[
            "13:16: routes[0].units[0].redactt: unknown field `redactt` (route chat); help: did you mean `redact`?",
        ],
    ),
    (
        "match: { model: big }",
        "match: { model: \"b[ij]*\" }",
        &[
            "11:21: routes[0].match.model: `b[ij]*` is not a pattern that is understood (route chat); help: only `*` (anything) and `?` (one character) are special; list alternatives apart",
        ],
    ),
    (
        "match: { model: big }",
        "match: { model: \"\" }",
        &["11:21: routes[0].match.model: this must not be empty (route chat)"],
    ),
    (
        "match: { model: big }",
        "match: { path: v1/files }",
        &[
            "11:20: routes[0].match.path: `v1/files` can match no path (route chat); help: as in `/v1/files*`",
        ],
    ),
    (
        "match: { model: big }",
        "match: { header: { \"X:Y\": a } }",
        &[
            "11:24: routes[0].match.header.X:Y: `X:Y` is not the name of a header (route chat); help: letters, digits and `-`, as in `X-Session-ID`",
        ],
    ),
    (
        "  acme: {}",
        "  acme: { budget: { usd: -5, per: year } }",
        &[
            "14:26: tenants.acme.budget.usd: `-5` is negative (tenant acme); help: write dollars as `0.50`, with at most nine decimals",
            "14:35: tenants.acme.budget.per: `year` is no known window (tenant acme); help: known: `day`, `month`",
        ],
    ),
    (
        "  acme: {}",
        "  acme: { models: [] }",
        &[
            "14:19: tenants.acme.models: an empty list would allow no model (tenant acme); help: leave `models` out to allow every model",
        ],
    ),
    (
        "00aa\"",
        "00a\"",
        &[
            "16:37: keys[0].sha256: a SHA-256 has 64 hex digits, this has 63 (key k1); help: write the 64 hex digits that `printf %s \"$KEY\" | sha256sum` prints",
        ],
    ),
    (
        "main:\n",
        "main:\n    forward: [X-Ok, Authorization]\n",
        &[
            "4:21: pools.main.forward[1]: `Authorization` is made by the gateway and is never forwarded (pool main)",
        ],
    ),
    // ---- references
    (
        "    pool: main",
        "    pool: mian",
        &[
            "12:11: routes[0].pool: there is no pool `mian` (route chat of model big); help: did you mean `main`?",
        ],
    ),
    (
        "tenant: acme",
        "tenant: amce",
        &["16:23: keys[0].tenant: there is no tenant `amce` (key k1); help: did you mean `acme`?"],
    ),
    (
        "  acme: {}",
        "  acme: { tier: gold }",
        &[
            "14:17: tenants.acme.tier: there is no tier `gold` (tenant acme); help: the file defines no tier at all",
        ],
    ),
    (
        "aliases: [small]",
        "fallback: [ { model: huge } ]",
        &[
            "8:31: models.big.fallback[0].model: there is no model `huge` (model big); help: known: `big`",
        ],
    ),
    (
        "aliases: [small]",
        "fallback: [ { model: big } ]",
        &[
            "8:31: models.big.fallback[0].model: the fallback of model `big` leads back to itself (model big); help: break the ring big -> big",
        ],
    ),
    (
        "aliases: [small]",
        "aliases: [big]",
        &["8:20: models.big.aliases[0]: alias `big` is the model's own name (model big)"],
    ),
    (
        "aliases: [small] }",
        "aliases: [small] }\n  small: ~",
        &["8:20: models.big.aliases[0]: alias `small` is a model of its own (model big)"],
    ),
    (
        "aliases: [small] }",
        "aliases: [small] }\n  other: { aliases: [small] }",
        &[
            "9:22: models.other.aliases[0]: alias `small` is an alias of model `big` already (model other)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 1, v3: 1 }",
        &[
            "13:23: routes[0].weights.v3: no backend of pool `main` has version `v3` (route chat of model big); help: did you mean `v2`?",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 1 }\n    strategy: least-requests",
        &[
            "14:15: routes[0].strategy: `weights` by version go with strategy `weighted-split` (route chat of model big)",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n    weights: { v2: 0 }",
        &[
            "12:11: routes[0].pool: the weights leave no backend of pool `main` that could be sent anything (route chat of model big); help: give at least one backend a weight above 0, or remove the route",
        ],
    ),
    (
        "    pool: main",
        "    pool: main\n  - { name: chat, pool: main }",
        &[
            "13:13: routes[1].name: route `chat` is here twice; the first is on line 10 (route chat)",
        ],
    ),
    (
        "keys:\n",
        "keys:\n  - { id: k0, tenant: acme, sha256: \"00000000000000000000000000000000000000000000000000000000000000AA\" }\n",
        &["17:11: keys[1].id: key `k1` has the same SHA-256 as key `k0` (key k1)"],
    ),
    // ---- variables and secrets
    (
        "http://10.0.0.1:8000",
        "http://${HOST}:8000",
        &[
            "5:26: pools.main.backends[0].url: the environment has no variable `HOST` (pool main); help: set it, or write `${HOST:-default}`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "http://${HOST",
        &[
            "5:26: pools.main.backends[0].url: `${` without a closing `}` (pool main); help: write `$${` for a plain `${`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "${1X}",
        &[
            "5:26: pools.main.backends[0].url: `${1X}` names no variable (pool main); help: write `${NAME}` or `${NAME:-default}`",
        ],
    ),
    (
        "http://10.0.0.1:8000",
        "${UPSTREAM_KEY}",
        &[
            "5:26: pools.main.backends[0].url: `${UPSTREAM_KEY}` has no scheme such as `http://` (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { file: gone.key },",
        &[
            "5:30: pools.main.backends[0].api_key: the secret cannot be read: no such file (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { file: two.key },",
        &[
            "5:30: pools.main.backends[0].api_key: a secret is one line of 1 to 8192 visible ASCII characters without blanks; this is not (pool main)",
        ],
    ),
    (
        "name: b1,",
        "name: b1, api_key: { path: two.key },",
        &[
            "5:30: pools.main.backends[0].api_key.file: `file` is missing (pool main); help: a secret is text or `{ file: path }`",
            "5:32: pools.main.backends[0].api_key.path: unknown field `path` (pool main); help: known: `file`",
        ],
    ),
    // ---- what is missing does not hide what is wrong
    (
        "server: { listen: \"127.0.0.1:8080\" }\npools:\n",
        "pool:\n",
        &[
            "1:1: server: `server` is missing; help: at least `server: { listen: \"0.0.0.0:8080\" }`",
            "1:1: pools: `pools` is missing; help: name at least one pool of backends",
            "1:1: pool: unknown field `pool`; help: did you mean `pools`?",
        ],
    ),
    (
        "tenants:\n  acme: {}",
        "tenants: acme",
        &["13:10: tenants: a map from names is expected here, not a single value"],
    ),
    // ---- YAML itself
    (
        "\npools:",
        "\n\tpools:",
        &[
            "2:2: this is not valid YAML: while parsing a block mapping, did not find expected key; help: YAML is indented with spaces; replace the tab",
        ],
    ),
    (
        "00aa\" }",
        "00aa\"",
        &[
            "16:5: this is not valid YAML: unclosed bracket '{'; help: the file may be cut off; write it whole, then rename it into place",
        ],
    ),
    (
        "  acme: {}",
        "  acme: !!map {}",
        &["14:9: a tag means nothing here; help: remove the `!...`"],
    ),
    (
        "  acme: {}",
        "  acme: {}\n---\nserver: {}",
        &["15:1: a second document begins here; a configuration is one document"],
    ),
    ("  acme: {}", "  ? [a]\n  : {}", &["14:5: a key must be a plain word, not a list or a map"]),
    ("  acme: {}", "  acme: &a [*a]", &["14:13: this alias stands inside what it names"]),
];

#[test]
fn each_broken_file_gives_exactly_its_lines() {
    let mut wrong = String::new();
    for (from, to, expected) in BROKEN {
        let got = match build(&small(from, to)) {
            Ok(_) => "accepted\n".to_owned(),
            Err(problems) => lines(&problems),
        };
        let expected: String = expected.iter().map(|line| format!("{line}\n")).collect();
        if got != expected {
            wrong.push_str(&format!("---- {to}\nexpected:\n{expected}got:\n{got}\n"));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn every_problem_is_reported_at_once() {
    let text = r#"
server: { listen: "0.0.0.0:99999", graze: 1m }
pools:
  a: { backends: [ { url: "ftp://h" }, { url: "http://h", slots: x } ] }
  b: 5
routes:
  - { name: one, pool: a, strategy: foo }
  - { name: two, pool: c, match: { model: m, headers: {} } }
  - { name: three, pool: b }
keys:
  - { id: k, tenant: t, sha256: zz }
"#;
    let problems = build(text).unwrap_err();
    let places: Vec<String> = problems
        .iter()
        .map(|problem| format!("{}:{} {}", problem.line, problem.column, problem.field))
        .collect();
    let expected = [
        "2:19 server.listen",
        "2:36 server.graze",
        "4:27 pools.a.backends[0].url",
        "4:66 pools.a.backends[1].slots",
        "5:6 pools.b",
        "7:37 routes[0].strategy",
        "8:24 routes[1].pool",
        "8:46 routes[1].match.headers",
        "11:33 keys[0].sha256",
    ];
    assert_eq!(places, expected);
    let last = summary(&problems);
    assert_eq!(
        last,
        "configuration refused: 9 problems: pool a, pool b, route one, route two of model m, route two, key k"
    );
}

/// The wire cases read the last line: it must name the model or route.
#[test]
fn the_last_line_names_the_model_whose_backends_all_have_weight_zero() {
    let text = SMALL
        .replace("name: b1,", "name: b1, weight: 0,")
        .replace("name: b2,", "name: b2, weight: 0,");
    let problems = build(&text).unwrap_err();
    assert_eq!(summary(&problems), "configuration refused: 1 problem: route chat of model big");
    assert_eq!(
        problems[0].in_file("forebay.yaml"),
        "error: every backend of pool `main` has weight 0, so nothing could be sent\n  \
         --> forebay.yaml:12:11, routes[0].pool (route chat of model big)\n  \
         = help: give at least one backend a weight above 0, or remove the route"
    );
}

#[test]
fn rings_of_fallbacks_are_found_whatever_their_length() {
    let ring = |edges: &[(usize, usize)]| -> String {
        let models: String = (0..5)
            .map(|model| {
                let chain: Vec<String> = edges
                    .iter()
                    .filter(|edge| edge.0 == model)
                    .map(|edge| format!("{{ model: m{} }}", edge.1))
                    .collect();
                format!("  m{model}: {{ fallback: [ {} ] }}\n", chain.join(", "))
            })
            .collect();
        small("  big: { aliases: [small] }\n", &models).replace("model: big", "model: m0")
    };
    // Oracle: the transitive closure of every graph of up to four edges (sampled).
    let mut rng = Rng::seeded(7);
    for _ in 0..300 {
        let mut edges: Vec<(usize, usize)> =
            (0..rng.below(6)).map(|_| (rng.below(5) as usize, rng.below(5) as usize)).collect();
        edges.sort_unstable();
        edges.dedup();
        let mut reach = [[false; 5]; 5];
        for &(from, to) in &edges {
            reach[from][to] = true;
        }
        for via in 0..5 {
            for from in 0..5 {
                for to in 0..5 {
                    reach[from][to] |= reach[from][via] && reach[via][to];
                }
            }
        }
        let loops = (0..5).any(|model| reach[model][model]);
        let built = build(&ring(&edges));
        assert_eq!(built.is_err(), loops, "{edges:?}");
        for problem in built.err().into_iter().flatten() {
            assert!(problem.message.contains("leads back to itself"), "{problem}");
            let (_, name) = problem.owner.unwrap();
            let model: usize = name[1..].parse().unwrap();
            assert!(reach[model][model], "{name} in {edges:?}");
        }
    }
}

#[test]
fn texts_that_are_no_configuration_are_refused_with_a_place() {
    let said = |text: &str| lines(&build(text).unwrap_err());
    for text in ["", "   \n", "# nothing\n", "~", "---\n...\n", "\u{feff}"] {
        assert!(said(text).starts_with("1:1: the file is empty"), "{text:?}: {}", said(text));
    }
    assert!(said("hello").starts_with("1:1: a map of fields is expected here, not a single value"));
    assert!(said("[1, 2]").starts_with("1:1: a map of fields is expected here, not a list"));
    assert!(said("{ this is not valid").contains("this is not valid YAML"));
    assert!(said("%YAML 1.2\n---\na: b").contains("this is not valid YAML"));
    assert!(said(&"x".repeat(10 << 20)).starts_with("1:1: the file has 10485760 bytes"));
    assert!(said(&"[".repeat(10_000)).contains("no field of a configuration lies that deep"));
    let deep = (0..200).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect::<String>();
    assert!(said(&deep).contains("no field of a configuration lies that deep"));
    assert!(said("a\0b: c").contains("1:"));
    // The 500th problem is the last; nobody reads on.
    let many = (0..2_000).map(|n| format!("unknown-{n}: 1\n")).collect::<String>();
    assert_eq!(build(&many).unwrap_err().len(), 500);
}

#[test]
fn aliases_are_followed_merged_and_bounded() {
    let text = SMALL.replace("- { name: b1,", "- &common { name: b1, weight: 7,").replace(
        "- { name: b2, url: \"http://10.0.0.2:8000\", version: v2 }",
        "- { <<: *common, name: b2 }",
    );
    let plan = good(&text);
    let b2 = &plan.backends[1];
    assert_eq!((&*b2.name, b2.weight, &*b2.host_header), ("b2", 7, "10.0.0.1:8000"));

    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..20 {
        let below = format!("*a{}", level - 1);
        let list = vec![below; 9].join(", ");
        bomb.push_str(&format!("a{level}: &a{level} [{list}]\n"));
    }
    let said = lines(&build(&bomb).unwrap_err());
    assert!(said.contains("repeat more of the file than is reasonable"), "{said}");
    let long = format!("a: &a \"{}\"\nb: [{}]\n", "x".repeat(100_000), vec!["*a"; 500].join(", "));
    let said = lines(&build(&long).unwrap_err());
    assert!(said.contains("repeat more of the file than is reasonable"), "{said}");
    assert!(lines(&build("a: *nobody").unwrap_err()).contains("unknown anchor"));
    assert!(lines(&build("a: { <<: 5 }").unwrap_err()).contains("`<<` merges maps"));
    assert!(lines(&build("a: { <<: [5] }").unwrap_err()).contains("`<<` merges maps"));
}

#[test]
fn variables_are_put_in_where_the_file_asks() {
    let host = |url: &str| -> String {
        let plan = good(&small("http://10.0.0.1:8000", url));
        plan.backends[0].host_header.to_string()
    };
    assert_eq!(host("http://h:${PORT}"), "h:9000");
    assert_eq!(host("http://${NONE:-localhost}:${NONE:-1}"), "localhost:1");
    assert_eq!(host("http://h:${EMPTY:-80}"), "h:80");
    assert_eq!(host("http://h${EMPTY}:80"), "h:80");
    // A value is not looked into again, and two dollars are one.
    let plan = good(&small("name: b1,", "name: \"$${PORT}\","));
    assert_eq!(&*plan.backends[0].name, "${PORT}");
    let plan = good(&small("name: b1,", "name: \"a$b\","));
    assert_eq!(&*plan.backends[0].name, "a$b");
}

#[test]
fn plain_words_keep_their_spelling() {
    let plan = good(
        &SMALL
            .replace("name: b1,", "name: 012, version: 1.10, region: no, tags: [true, 1e3],")
            .replace("match: { model: big }", "match: { model: big, header: { X-On: true } }"),
    );
    let backend = &plan.backends[0];
    assert_eq!(
        (&*backend.name, backend.version.as_deref(), backend.region.as_deref()),
        ("012", Some("1.10"), Some("no"))
    );
    assert_eq!(backend.tags, ["true".into(), "1e3".into()]);
    let on = |_: &str| -> Option<&[u8]> { Some(b"true") };
    assert_eq!(plan.route(Some("big"), Some("big"), "/v1/chat/completions", &on), Some(RouteId(0)));
}

#[test]
fn json_is_read_as_it_is() {
    let json = "{\n\t\"server\": {\"listen\": \"127.0.0.1:1\"},\n\t\"pools\": {\"p\": {\"backends\": \
                [{\"url\": \"http:\\/\\/h\", \"weight\": null, \"name\": \"caf\\u00e9 \\ud83d\\ude00\"}]}},\n\
                \t\"models\": {\"m\": {}},\n\t\"routes\": [{\"name\": \"r\", \"pool\": \"p\"}]\n}\n";
    let plan = good(json);
    assert_eq!((&*plan.backends[0].name, plan.backends[0].weight), ("caf\u{e9} \u{1f600}", 1));
    let one_line = format!("{{\"{}\": 1}}", "k".repeat(2_000));
    assert!(lines(&build(&one_line).unwrap_err()).contains("unknown field"));
}

/// Neither the plan's `Debug` nor a problem nor a notice says what a secret is.
#[test]
fn secrets_are_never_said() {
    let plan = good(FULL);
    let debug = format!("{plan:?}");
    for secret in ["sk-of-file", "sk-upstream", "hunter2"] {
        assert!(!debug.contains(secret), "{secret}");
    }
    let broken = SMALL
        .replace("name: b1,", "name: b1, slots: \"${UPSTREAM_KEY}\", weight: \"5${UPSTREAM_KEY}\",")
        .replace("http://10.0.0.1:8000", "http://user:hunter2@h")
        .replace("version: v2", "version: v2, api_key: \"hunter2 with blanks\"")
        .replace("match: { model: big }", "match: { model: \"[${UPSTREAM_KEY}*\" }")
        .replace(
            "server: { listen:",
            "admin: { listen: \"127.0.0.1:1\", token: [hunter2] }\nserver: { listen:",
        )
        .replace("tenant: acme", "tenant: \"${UPSTREAM_KEY}\"")
        .replace("sha256: \"", "sha256: \"sk-hunter2");
    let problems = build(&broken).unwrap_err();
    assert!(problems.len() >= 7, "{}", lines(&problems));
    let said = lines(&problems);
    for secret in ["sk-of-file", "sk-upstream", "hunter2"] {
        assert!(!said.contains(secret), "{said}");
    }
}

/// 500 seeded mutations each of the small and the full file: no panic, and every refusal has a
/// place inside the file.
#[test]
fn mutations_never_panic_and_always_have_a_place() {
    const SEED: u64 = 0x5eed_f0eb;
    let mut rng = Rng::seeded(SEED);
    let mut refused = 0;
    for base in [SMALL, FULL] {
        for round in 0..500 {
            let mut bytes = base.as_bytes().to_vec();
            for _ in 0..=rng.below(4) {
                mutate(&mut bytes, base.as_bytes(), &mut rng);
            }
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let Err(problems) = build(&text) else { continue };
            refused += 1;
            assert!(!problems.is_empty(), "seed {SEED:#x}, round {round}: {text}");
            let rows = text.split(['\n', '\r']).count();
            for problem in &problems {
                let line = problem.line as usize;
                assert!(
                    (1..=rows + 1).contains(&line) && problem.column >= 1,
                    "seed {SEED:#x}, round {round}: {problem}\n{text}"
                );
                assert!(!problem.message.is_empty() && !problem.to_string().contains('\n'));
            }
            assert!(problems.is_sorted_by_key(|problem| (problem.line, problem.column)));
        }
    }
    assert!((500..1_000).contains(&refused), "{refused} of 1000 refused");
}

/// One change: a byte, a cut, a copy, a swap of lines, a strange character.
fn mutate(bytes: &mut Vec<u8>, base: &[u8], rng: &mut Rng) {
    if bytes.is_empty() {
        return;
    }
    let at = rng.below(bytes.len() as u64) as usize;
    let span = (at + 1 + rng.below(12) as usize).min(bytes.len());
    match rng.below(8) {
        0 => bytes[at] = (rng.next_u64() & 0x7f) as u8,
        1 => {
            let signs = b"{}[]:,&*!|>'\"%@`#-?\t\n $~0";
            bytes[at] = signs[rng.below(signs.len() as u64) as usize];
        }
        2 => drop(bytes.drain(at..span)),
        3 => bytes.truncate(at),
        4 => {
            let piece = bytes[at..span].to_vec();
            bytes.splice(at..at, piece);
        }
        5 => {
            let from = rng.below(base.len() as u64) as usize;
            let to = (from + rng.below(40) as usize).min(base.len());
            bytes.splice(at..at, base[from..to].iter().copied());
        }
        6 => drop(bytes.splice(at..at, "\u{1f600}\u{2028}é${".bytes())),
        _ => {
            let mut rows: Vec<Vec<u8>> = bytes.split(|&b| b == b'\n').map(<[u8]>::to_vec).collect();
            let a = rng.below(rows.len() as u64) as usize;
            let b = rng.below(rows.len() as u64) as usize;
            rows.swap(a, b);
            *bytes = rows.join(&b'\n');
        }
    }
}

// ---- lookups

fn names_of<'p>(plan: &'p Plan, tenant: Option<TenantId>) -> Vec<&'p str> {
    plan.visible_models(tenant).map(|(name, _)| name).collect()
}

const NONE: &dyn Fn(&str) -> Option<&'static [u8]> = &|_| None;

/// The list is of names that clients use: the alias may be allowed and the model behind it not.
#[test]
fn a_tenant_may_use_the_names_on_its_list_and_no_others() {
    let text = SMALL
        .replace("  acme: {}", "  acme: { models: [small, \"gpt-*\"] }\n  free: ~")
        .replace("match: { model: big }", "match: { model: [big, gpt-4, other] }");
    let plan = good(&text);
    let (acme, free) = (TenantId(0), TenantId(1));
    assert_eq!(plan.model("small"), plan.model("big"));
    assert!(plan.may_use(acme, "small") && plan.may_use(acme, "gpt-4"));
    assert!(!plan.may_use(acme, "big") && !plan.may_use(acme, "other"));
    assert!(!plan.may_use(acme, "") && !plan.may_use(acme, "Small"));
    assert!(plan.may_use(free, "big"));
    assert_eq!(names_of(&plan, Some(acme)), ["small", "gpt-4"]);
    assert_eq!(names_of(&plan, Some(free)), ["big", "small", "gpt-4", "other"]);
    assert_eq!(names_of(&plan, None), ["big", "small", "gpt-4", "other"]);
}

#[test]
fn names_that_no_route_serves_are_not_shown() {
    // Only the alias is routed, as where clients must not use the upstream's name.
    let plan = good(&small("match: { model: big }", "match: { model: small }"));
    assert_eq!(names_of(&plan, None), ["small"]);
    assert_eq!(plan.route(Some("big"), Some("small"), "/", NONE), Some(RouteId(0)));
    assert_eq!(plan.route(Some("big"), Some("big"), "/", NONE), None);
    let plan = good(&small("big: { aliases: [small] }", "big: { aliases: [small] }\n  spare: ~"));
    assert_eq!(names_of(&plan, None), ["big", "small"]);
}

#[test]
fn keys_are_found_by_their_whole_digest() {
    let key = |last: u8, first: u8| {
        let mut digest = [0; 32];
        (digest[0], digest[31]) = (first, last);
        digest
    };
    let hex =
        |digest: &[u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let mut text = SMALL.to_owned();
    let all: Vec<[u8; 32]> = (0..40).map(|n| key(n + 1, if n % 4 == 0 { 0 } else { n })).collect();
    for (n, digest) in all.iter().enumerate() {
        text.push_str(&format!("  - {{ id: x{n}, tenant: acme, sha256: {} }}\n", hex(digest)));
    }
    let plan = good(&text);
    for (n, digest) in all.iter().enumerate() {
        let found = plan.key(digest).unwrap();
        assert_eq!(&*plan.keys[found.index()].id, format!("x{n}"));
    }
    assert_eq!(plan.key(&key(0xaa, 0)), Some(KeyId(0)));
    assert_eq!(
        (plan.key(&key(99, 0)), plan.key(&[0xff; 32]), plan.key(&[0; 32])),
        (None, None, None)
    );
    assert!(!plan.open() && good(&SMALL[..SMALL.find("keys:").unwrap()]).open());
}

/// Random tables of routes against the rule read off the page: first match in file order, then
/// `default`.
#[test]
fn routes_agree_with_a_walk_through_the_file() {
    let models = ["a", "b", "ab", "a*", "?", "*"];
    let paths = ["/x", "/x/*", "*"];
    let mut rng = Rng::seeded(11);
    let mut hits = [0_u32; 3];
    for _ in 0..150 {
        let count = 1 + rng.below(7);
        let default_at = rng.below(count + 3);
        let mut text = SMALL[..SMALL.find("routes:").unwrap()].to_owned();
        text.push_str("routes:\n");
        for route in 0..count {
            let mut conditions = Vec::new();
            if rng.below(4) != 0 {
                let list: Vec<String> = (0..=rng.below(2))
                    .map(|_| format!("\"{}\"", models[rng.below(6) as usize]))
                    .collect();
                conditions.push(format!("model: [{}]", list.join(", ")));
            }
            if rng.below(3) == 0 {
                conditions.push(format!("path: \"{}\"", paths[rng.below(3) as usize]));
            }
            if rng.below(3) == 0 {
                conditions
                    .push(format!("header: {{ X-T: \"{}\" }}", models[rng.below(6) as usize]));
            }
            let name = if route == default_at { "default".to_owned() } else { format!("r{route}") };
            text.push_str(&format!(
                "  - {{ name: {name}, pool: main, match: {{ {} }} }}\n",
                conditions.join(", ")
            ));
        }
        let plan = good(&text);
        for (canonical, asked) in [
            (None, None),
            (Some("a"), Some("a")),
            (Some("b"), Some("a")),
            (Some("b"), Some("ab")),
            (None, Some("zz")),
        ] {
            for path in ["/x", "/x/y", "/"] {
                for value in [None, Some("a"), Some("ab")] {
                    let header = |name: &str| value.filter(|_| name == "x-t").map(str::as_bytes);
                    let walk = |wanted_default: bool| {
                        plan.routes.iter().position(|route| {
                            let one = |patterns: &[Pattern], text: &str| {
                                patterns.iter().any(|pattern| {
                                    naive(pattern.as_str().as_bytes(), text.as_bytes())
                                })
                            };
                            let matches = &route.matches;
                            let model = matches.models.is_empty()
                                || [canonical, asked]
                                    .iter()
                                    .flatten()
                                    .any(|name| one(&matches.models, name));
                            let path = matches.paths.is_empty() || one(&matches.paths, path);
                            let header = matches.headers.is_empty()
                                || value.is_some_and(|value| one(&matches.headers[0].1, value));
                            (&*route.name == "default") == wanted_default && model && path && header
                        })
                    };
                    let expected =
                        walk(false).or_else(|| walk(true)).map(|index| RouteId(index as u32));
                    let got = plan.route(canonical, asked, path, &header);
                    assert_eq!(got, expected, "{canonical:?} {asked:?} {path} {value:?}\n{text}");
                    match got {
                        None => hits[0] += 1,
                        Some(id) if &*plan.routes[id.index()].name == "default" => hits[1] += 1,
                        Some(_) => hits[2] += 1,
                    }
                }
            }
        }
    }
    assert!(hits.iter().all(|&hits| hits > 100), "the table is lopsided: {hits:?}");
}

/// Globs by their definition, exponentially.
fn naive(glob: &[u8], text: &[u8]) -> bool {
    match glob {
        [] => text.is_empty(),
        [b'*', rest @ ..] => (0..=text.len()).any(|skip| naive(rest, &text[skip..])),
        [b'?', rest @ ..] => !text.is_empty() && naive(rest, &text[1..]),
        [byte, rest @ ..] => text.first() == Some(byte) && naive(rest, &text[1..]),
    }
}

#[test]
fn globs_agree_with_their_definition_on_all_short_words() {
    fn words(alphabet: &[u8], longest: usize) -> Vec<Vec<u8>> {
        let mut all = vec![Vec::new()];
        let mut from = 0;
        for _ in 0..longest {
            let to = all.len();
            for index in from..to {
                for &byte in alphabet {
                    let mut longer: Vec<u8> = all[index].clone();
                    longer.push(byte);
                    all.push(longer);
                }
            }
            from = to;
        }
        all
    }
    let texts = words(b"ab", 6);
    for glob in words(b"ab*?", 5) {
        for text in &texts {
            assert_eq!(fits(&glob, text), naive(&glob, text), "{glob:?} {text:?}");
        }
    }
    // `?` is a character, not a byte, and a byte where the text is no UTF-8.
    assert!(
        fits("a?c".as_bytes(), "aéc".as_bytes()) && fits("?".as_bytes(), "\u{1f600}".as_bytes())
    );
    assert!(fits(b"a?c", b"a\xffc") && !fits("a?c".as_bytes(), "aééc".as_bytes()));
    // Linear where a recursive matcher is exponential.
    let text = vec![b'a'; 20_000];
    assert!(!fits(&b"a*".repeat(60).iter().copied().chain(*b"b").collect::<Vec<_>>(), &text));
}

#[test]
fn address_ranges_hold_their_addresses_and_no_others() {
    let net = |text: &str| value::net(text).unwrap();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    assert!(net("10.0.0.0/8").contains(ip("10.255.0.1")));
    assert!(net("10.0.0.0/8").contains(ip("::ffff:10.1.2.3")));
    assert!(!net("10.0.0.0/8").contains(ip("11.0.0.0")));
    assert!(net("0.0.0.0/0").contains(ip("1.2.3.4")) && !net("0.0.0.0/0").contains(ip("::1")));
    assert!(net("fd00::/7").contains(ip("fc00::1")) && !net("fd00::/8").contains(ip("fc00::1")));
    assert!(net("10.1.2.3").contains(ip("10.1.2.3")) && !net("10.1.2.3").contains(ip("10.1.2.2")));
    assert!(net("::/0").contains(ip("::1")));
}

// ---- reload

#[test]
fn a_reload_keeps_rows_and_numbers_and_a_refused_one_changes_nothing() {
    let mut registry = Registry::new();
    let mut load = |text: &str| Plan::build(text, &env, &files, &mut registry);
    let first = load(SMALL).unwrap();
    let slot = Slot::take(&first.backends[0].row, None).unwrap();
    let without_b1 = small("      - { name: b1, url: \"http://10.0.0.1:8000\" }\n", "");
    let second = load(&without_b1).unwrap();
    assert_eq!(&*second.backends[0].name, "b2");
    assert_eq!(second.backends[0].series, first.backends[1].series);
    load(&small("name: b1,", "name: new-name, slots: 0,")).unwrap_err();
    let third = load(SMALL).unwrap();
    assert!(Arc::ptr_eq(&third.backends[0].row, &first.backends[0].row));
    assert_eq!(third.backends[0].row.in_flight(), 1);
    drop(slot);
    assert_eq!(third.backends[0].row.in_flight(), 0);
    assert_eq!(third.digest, first.digest);
    assert_ne!(third.digest, second.digest);
    let names: Vec<&str> = registry.names(Kind::Backend).iter().map(AsRef::as_ref).collect();
    assert_eq!(names, ["other", "b1", "b2"]);
}

#[test]
fn more_names_than_a_process_has_numbers_for_are_refused_whole() {
    let mut registry = Registry::new();
    for name in 0..crate::pure::board::NAMES_MAX - 2 {
        registry.series(Kind::Backend, &format!("n{name}")).unwrap();
    }
    let refused = Plan::build(SMALL, &env, &files, &mut registry).unwrap_err();
    assert!(lines(&refused).contains("different Backend names since start"), "{}", lines(&refused));
    assert_eq!(registry.names(Kind::Pool).len(), 1, "the pool took no number");
}

/// Thousands of routes stay cheap: the exact ones are found by hash.
#[test]
fn five_thousand_routes_build_and_route() {
    let mut text = SMALL[..SMALL.find("routes:").unwrap()].to_owned();
    text.push_str("routes:\n");
    for route in 0..5_000 {
        text.push_str(&format!(
            "  - name: r{route}\n    match: {{ model: m{route} }}\n    pool: main\n    strategy: least-requests\n"
        ));
    }
    let plan = good(&text);
    for route in [0, 1, 2_500, 4_999] {
        let name = format!("m{route}");
        assert_eq!(plan.route(Some(&name), Some(&name), "/", NONE), Some(RouteId(route)));
    }
    assert_eq!(plan.models.len(), 5_001);
}
