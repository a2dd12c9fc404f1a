//! Goal: whatever a file says, the answer is a plan or a list of problems with places.
//! Method: the design's example, files that are wrong in many ways, seeded mutations of good ones.

mod broken;
mod issuers;
mod lookups;

use super::*;
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
jwt:
  - { name: sso, issuer: "https://sso.example.com", audience: forebay, algorithms: [RS256, ES256], leeway: 10s,
      tenant: realm.team, tier: plan, default_tenant: acme, jwks: { url: "https://sso.example.com/keys?v=1", every: 1m } }
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
        "bad.json" => Ok("{\"model\":{\"type\":\"Unigram\"}}".to_owned()),
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

/// Changes of a good file (from, to), and every line that each must give.
fn each_gives_exactly(cases: &[(&str, &str, &[&str])], changed: fn(&str, &str) -> String) {
    let mut wrong = String::new();
    for (from, to, expected) in cases {
        let got = match build(&changed(from, to)) {
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
fn the_example_with_every_area_builds() {
    let plan = good(FULL);
    assert_eq!((plan.pools.len(), plan.backends.len(), plan.routes.len()), (4, 5, 4));
    assert_eq!(plan.server.listen[1], Listen::Fd("forebay".into()));
    assert_eq!(plan.server.bounds.buffered, 2 << 30);
    assert_eq!(plan.server.grace, Duration::from_mins(10));
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
    assert_eq!(plan.global.as_ref().unwrap().requests.unwrap().limit(), 100_000);
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
        "ignored tiers.free.priority",
        "unenforced-limit routes[1].admission",
    ];
    assert_eq!(said, expected);
    assert!(good(SMALL).notices.is_empty(), "{:?}", good(SMALL).notices);
    let text = FULL.replace(
        "    pool: llama-cluster\n",
        "    pool: llama-cluster\n    heartbeat: 1s\n    strategy: adaptive\n",
    );
    let text = text.replacen(
        "    heartbeat: 1s\n    strategy: adaptive\n    strategy: weighted-split",
        "    strategy: adaptive",
        1,
    );
    let text = text.replace("    weights: { v1: 90, v2: 10 }\n", "");
    let notices = good(&text).notices;
    let strategy = notices.iter().find(|notice| notice.field.ends_with("strategy")).unwrap();
    assert_eq!((strategy.places, strategy.severity), (2, Severity::Ignored));
    assert!(strategy.to_string().contains("(and 1 more places)"), "{strategy}");
}

#[test]
fn a_price_is_exact_and_a_part_of_a_nano_dollar_is_one() {
    let price = Price {
        input: NanoUsd(500_000_000),
        cached: NanoUsd(50_000_000),
        output: NanoUsd(1_500_000_000),
    };
    assert_eq!(price.of(1_000_000, 0, 0), 500_000_000);
    assert_eq!(price.of(1_000, 400, 10), 600 * 500 + 400 * 50 + 10 * 1_500);
    assert_eq!(price.of(1_000, 2_000, 0), 1_000 * 50, "no more is cached than there is");
    let cheap = Price { input: NanoUsd(1), cached: NanoUsd(0), output: NanoUsd(0) };
    assert_eq!([cheap.of(1, 0, 0), cheap.of(1_000_001, 0, 0), cheap.of(9, 9, 9)], [1, 2, 0]);
    assert_eq!(price.of(u64::MAX, 0, u64::MAX), u64::MAX);
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
    assert_eq!(backend.tags, [Box::<str>::from("true"), Box::from("1e3")]);
    let on = |_: &str| -> Option<&[u8]> { Some(b"true") };
    assert_eq!(plan.route(Some("big"), Some("big"), "/v1/chat/completions", &on), Some(RouteId(0)));
}

#[test]
fn a_byte_order_mark_and_windows_line_ends_change_nothing() {
    let text = format!("{}{}", '\u{feff}', SMALL.replace('\n', "\r\n"));
    assert_eq!(good(&text).backends.len(), 2);
    let problems = build(&text.replace("pool: main", "pool: mian")).unwrap_err();
    assert_eq!((problems[0].line, problems[0].column), (12, 11));
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
        .replace("http://10.0.0.1:8000", "http//user:hunter2@h")
        .replace("http://10.0.0.2:8000", "http://user:hunter2@h")
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

/// A name that a variable made is said as the file writes it, by whoever misses it.
#[test]
fn names_made_by_variables_are_said_as_written() {
    let places = [
        ("pool: main", "pool: \"${UPSTREAM_KEY}\""),
        ("tenant: acme", "tenant: \"a-${UPSTREAM_KEY}\""),
    ];
    let value = env("UPSTREAM_KEY").unwrap();
    let mut tried = 0;
    for (from, to) in places {
        let broken = SMALL.replacen(from, to, 1);
        if broken == SMALL {
            continue;
        }
        tried += 1;
        let problems = build(&broken).unwrap_err();
        let said = format!("{}{}{problems:?}", lines(&problems), summary(&problems));
        assert!(!said.contains(&value), "{said}");
        assert!(said.contains("${UPSTREAM_KEY}"), "{said}");
    }
    assert!(tried >= 2, "the file has changed: {tried}");
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
