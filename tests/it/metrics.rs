//! Goal: the numbers are there from the start, bounded, and true.
//! Method: `/metrics` and `/usage` held against what the test itself has sent.

use crate::harness::*;

/// Names that dashboards and the wire cases read, with the labels that they read them by.
const NAMES: &[(&str, &[&str])] = &[
    ("forebay_requests_in_flight", &[]),
    ("forebay_backend_in_flight", &["backend=\"u1\""]),
    ("forebay_tenant_concurrency", &["tenant=\"a\""]),
    ("forebay_tenant_concurrency", &["tenant=\"b\""]),
    ("forebay_reserved_tokens", &["tenant=\"a\""]),
    ("forebay_upstream_failures_total", &["backend=\"u1\""]),
    ("forebay_client_aborts_total", &[]),
    ("forebay_tenant_tokens_total", &["tenant=\"a\"", "kind=\"prompt\""]),
    ("forebay_tenant_tokens_total", &["tenant=\"a\"", "kind=\"completion\""]),
    ("forebay_tenant_tokens_total", &["tenant=\"a\"", "kind=\"estimated\""]),
    ("forebay_tokens_total", &["model=\"m\"", "kind=\"prompt\""]),
    ("forebay_requests_total", &["route=\"chat\"", "status=\"200\""]),
    ("forebay_retries_total", &["route=\"chat\""]),
    ("forebay_stale_resends_total", &["backend=\"u1\""]),
    ("forebay_time_to_first_token_seconds_count", &["route=\"chat\""]),
    ("forebay_inter_token_seconds_count", &["route=\"chat\""]),
    ("forebay_request_duration_seconds_count", &["route=\"chat\""]),
    ("forebay_connections", &[]),
    ("forebay_bad_requests_total", &[]),
    ("forebay_buffered_bytes", &[]),
    ("forebay_panics_total", &[]),
    ("forebay_config_reloads_total", &["result=\"in_force\""]),
    ("forebay_config_reloads_total", &["result=\"refused\""]),
    ("forebay_access_log_dropped_total", &[]),
];

#[test]
fn every_series_is_there_from_the_start_with_value_0() {
    let gateway = Setup::to("http://127.0.0.1:9".into()).start();
    for (name, labels) in NAMES {
        assert_eq!(gateway.metric(name, labels) as u64, 0, "{name} {labels:?}");
    }
    assert_eq!(gateway.metric("forebay_ready", &[]) as u64, 1);
    assert!(gateway.metric("forebay_driver_info", &["driver="]) >= 1.0);
    assert_eq!(gateway.usage("a"), (0, 0, 0));
    assert_eq!(gateway.admin("GET /usage?tenant=nobody").0, 404);
}

#[test]
fn nothing_that_a_client_sends_becomes_a_label() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    let series =
        |gateway: &Gateway| gateway.metrics().lines().filter(|line| !line.starts_with('#')).count();
    gateway.ask(chat());
    gateway.ask(post("/v1/chat/completions", r#"{"model":"evil-0"}"#));
    gateway.ask("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n");
    gateway.settled(3);
    let before = series(&gateway);
    for number in 1..50 {
        gateway.ask(post("/v1/chat/completions", format!("{{\"model\":\"evil-{number}\"}}")));
        gateway.ask(get(&format!("/v1/evil-{number}")));
        let fields = format!("x-evil-{number}: evil\r\nuser-agent: evil-{number}\r\n");
        gateway.ask(post_with("/v1/chat/completions", &fields, r#"{"model":"m","user":"evil"}"#));
    }
    gateway.settled(3 + 3 * 49);
    let page = gateway.metrics();
    assert!(!page.contains("evil"), "{page}");
    assert!(series(&gateway) <= before + 2, "{before} became {}", series(&gateway));
}

#[test]
fn usage_adds_up_over_shards_models_and_ways_to_report_it() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    // Over many connections, so that every shard has its share.
    for number in 0..30 {
        let request = match number % 3 {
            0 => chat(),
            1 => stream(),
            _ => stream_with_usage(),
        };
        let answer = gateway.ask(request);
        assert!(answer.whole && answer.status() == 200);
        assert_eq!(answer.text().contains("\"choices\":[],"), number % 3 == 2);
    }
    gateway.settled(30);
    assert_eq!(gateway.usage("a"), (210, 150, 0));
    for (name, label) in
        [("forebay_tenant_tokens_total", "tenant=\"a\""), ("forebay_tokens_total", "model=\"m\"")]
    {
        assert_eq!(gateway.metric(name, &[label, "kind=\"prompt\""]) as u64, 210);
        assert_eq!(gateway.metric(name, &[label, "kind=\"completion\""]) as u64, 150);
    }
    let of_chat = ["route=\"chat\""];
    for name in ["forebay_requests_total", "forebay_request_duration_seconds_count"] {
        assert_eq!(gateway.metric(name, &of_chat) as u64, 30, "{name}");
    }
    assert_eq!(gateway.metric("forebay_time_to_first_token_seconds_count", &of_chat) as u64, 30);
    let (_, all) = gateway.admin("GET /usage");
    let all: serde_json::Value = serde_json::from_str(&all).expect("JSON");
    let a = all["tenants"].as_array().expect("a list").iter().find(|t| t["tenant"] == "a");
    assert_eq!(a.expect("tenant a")["total_tokens"], 360);
    // One line of the log for each, and none with a prompt or a key.
    let log = gateway.log.count("\"whole\"", 30);
    for line in &log {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        assert_eq!(line["status"], 200);
    }
    assert!(!log.join("").contains(KEY_A) && !log.join("").contains("Hello"));
}

/// A shard's clock stands within one turn, and a refusal is one.
#[test]
fn also_what_is_answered_at_once_takes_time() {
    let gateway = Setup::to("http://127.0.0.1:9".into()).start();
    let request = String::from_utf8(chat()).expect("ASCII").replace(KEY_A, "sk-nobodys");
    for _ in 0..100 {
        assert_eq!(gateway.ask(&request).status(), 401);
    }
    let took = |line: &String| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        line["duration_ms"].as_f64().expect("a number")
    };
    let log = gateway.log.count("\"refused\"", 100);
    assert!(log.iter().map(took).sum::<f64>() > 0.0, "{log:?}");
}

#[test]
fn the_command_line_shows_the_usage_that_the_admin_port_has_as_csv_and_json() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let text = Setup::to(backend.url()).text();
    let odd = r#"o, "dd""#;
    let text = text.replace("b: { } }", &format!("b: {{ }}, '{odd}': {{ }} }}"));
    let gateway = Gateway::run(&text);
    for _ in 0..3 {
        assert_eq!(gateway.ask(stream()).status(), 200);
    }
    gateway.settled(3);
    let config = gateway.named_in(&folder, &text);
    let usage = |args: &[&str]| {
        let output =
            command(&["usage", "--config"]).arg(&config).args(args).output().expect("it runs");
        let said = String::from_utf8(output.stdout).expect("UTF-8");
        let wrong = String::from_utf8(output.stderr).expect("UTF-8");
        (output.status.success(), said, wrong)
    };
    let (fine, csv, wrong) = usage(&[]);
    assert!(fine, "{wrong}");
    assert_eq!(gateway.admin("GET /usage?format=csv"), (200, csv.clone()));
    let (fine, json, wrong) = usage(&["--json"]);
    assert!(fine, "{wrong}");
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");

    const HEAD: &str = "tenant,requests,prompt_tokens,completion_tokens,total_tokens,cached_tokens,\
                        reasoning_tokens,estimated_tokens,cost_usd";
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some(HEAD));
    let lines: Vec<&str> = lines.collect();
    let tenants = json["tenants"].as_array().expect("a list");
    assert_eq!(lines.len(), tenants.len());
    for (line, tenant) in lines.iter().zip(tenants) {
        let name = tenant["tenant"].as_str().expect("a name");
        let quoted = format!("\"{}\",", name.replace('"', "\"\""));
        let numbers = line.strip_prefix(&quoted).unwrap_or_else(|| panic!("{quoted} {line}"));
        for (field, number) in HEAD.split(',').skip(1).zip(numbers.split(',')) {
            assert_eq!(tenant[field].to_string(), number, "{name}: {field}");
        }
        assert_eq!(numbers.split(',').count(), 8, "{line}");
    }
    assert!(csv.contains("\n\"a\",3,21,15,36,0,0,0,0\n"), "{csv}");
    assert!(csv.contains("\n\"o, \"\"dd\"\"\",0,0,0,0,0,0,0,0\n"), "{csv}");

    let (fine, one, wrong) = usage(&["--tenant", odd]);
    assert!(fine, "{wrong}");
    assert_eq!(one.lines().count(), 2, "{one}");
    let (fine, said, wrong) = usage(&["--tenant", "nobody", "--json"]);
    assert!(!fine && said.is_empty() && wrong.contains("no such tenant"), "{wrong}");
    drop(gateway);
    let (fine, _, wrong) = usage(&[]);
    assert!(!fine && wrong.contains("no gateway answers"), "{wrong}");
}

#[test]
fn odd_usage_is_never_believed() {
    let backend = Backend::answering(|request| {
        let usage = request.json()["say"].to_string();
        json(200, &format!("{{\"choices\":[],\"usage\":{usage}}}"))
    });
    let gateway = Setup::to(backend.url()).start();
    for usage in [
        r#"{"prompt_tokens":-5,"completion_tokens":-9}"#,
        r#"{"prompt_tokens":1e300,"completion_tokens":18446744073709551616}"#,
        r#"{"prompt_tokens":"many","completion_tokens":null}"#,
        "null",
        "[]",
        r#""12""#,
    ] {
        let body = format!("{{\"model\":\"m\",\"say\":{usage}}}");
        assert_eq!(gateway.ask(post("/v1/chat/completions", body)).status(), 200, "{usage}");
    }
    gateway.settled(6);
    let (prompt, completion, _) = gateway.usage("a");
    assert!(prompt + completion < 1000, "{prompt} {completion}");
    let cached = r#"{"model":"m","say":{"prompt_tokens":100,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":500}}}"#;
    gateway.ask(post("/v1/chat/completions", cached));
    gateway.settled(7);
    assert_eq!(gateway.usage("a").0, prompt + 100);
    let labels = ["tenant=\"a\"", "kind=\"cached\""];
    assert_eq!(gateway.metric("forebay_tenant_tokens_total", &labels) as u64, 100);
}
