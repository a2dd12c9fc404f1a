//! Goal: what was used can be asked for, by day and by who, also after restarts.
//! Method: a few answers of known size and price, and questions to the admin port and the command.

use rustix::process::Signal;

use crate::harness::*;

/// A gateway that keeps usage in `folder`; an answer's 7 and 5 tokens cost 27 millionths.
fn priced(backend: &Backend, folder: &Folder) -> Gateway {
    let text = Setup::to(backend.url()).text();
    let text = text.replace("m: { }", "m: { price: { input: 1, output: 4 } }");
    let folder = folder.0.join("state").display().to_string();
    Gateway::run(&format!("state: {{ dir: '{folder}' }}\n{text}"))
}

fn rows(gateway: &Gateway, question: &str) -> Vec<serde_json::Value> {
    let (status, text) = gateway.admin(&format!("GET /usage?{question}"));
    assert_eq!(status, 200, "{text}");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    json["usage"].as_array().expect("rows").clone()
}

#[test]
fn usage_by_day_and_by_who_is_known_after_restarts() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let as_b = String::from_utf8(chat()).expect("ASCII").replace(KEY_A, KEY_B);
    for round in 1..=3 {
        let mut gateway = priced(&backend, &folder);
        for _ in 0..2 {
            assert_eq!(gateway.ask(chat()).status(), 200);
        }
        assert_eq!(gateway.ask(stream()).status(), 200);
        assert_eq!(gateway.ask(&as_b).status(), 200);
        gateway.settled(4);
        let by_tenant = rows(&gateway, "by=tenant");
        let a = by_tenant.iter().find(|row| row["tenant"] == "a").expect("a");
        assert_eq!(a["requests"], 3 * round);
        assert_eq!(
            (&a["prompt_tokens"], &a["completion_tokens"]),
            (&(21 * round).into(), &(15 * round).into())
        );
        let cost = a["cost_usd"].as_f64().expect("a number");
        assert!((cost - 81e-6 * f64::from(round)).abs() < 1e-12, "{cost}");
        let b = rows(&gateway, "by=day,key,model,route&tenant=b");
        assert_eq!(b.len(), 1, "{b:?}");
        let names = ["key", "model", "route"].map(|name| b[0][name].as_str().expect("a name"));
        assert_eq!((names, &b[0]["total_tokens"]), (["key-b", "m", "chat"], &(12 * round).into()));
        let day = b[0]["day"].as_str().expect("a day").to_owned();
        assert_eq!(rows(&gateway, &format!("by=day&from={day}&to={day}")).len(), 1);
        assert!(rows(&gateway, "by=day&to=2020-01-01").is_empty());
        gateway.signal(Signal::TERM);
        gateway.ended();
    }
    let gateway = priced(&backend, &folder);
    let total = rows(&gateway, "by=model");
    assert_eq!((&total[0]["model"], &total[0]["requests"]), (&"m".into(), &12.into()));
    let usd = ["tenant=\"a\""];
    assert_eq!(gateway.metric("forebay_tenant_cost_usd_total", &usd), 0.0, "since the start");
    assert_eq!(gateway.ask(chat()).status(), 200);
    gateway.reaches("forebay_tenant_cost_usd_total", &usd, 27e-6);
    gateway.reaches("forebay_key_tokens_total", &["key=\"key-a\"", "kind=\"prompt\""], 7.0);
    gateway.reaches("forebay_route_tokens_total", &["route=\"chat\"", "kind=\"completion\""], 5.0);
}

#[test]
fn a_question_that_makes_no_sense_is_told_so() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    for (question, why) in [
        ("by=team", "not `team`"),
        ("by=", "not ``"),
        ("by=day&from=yesterday", "`yesterday` is no date"),
        ("by=day&to=2026-02-30", "`2026-02-30` is no date"),
        ("model=m", "without `by`"),
    ] {
        let (status, text) = gateway.admin(&format!("GET /usage?{question}"));
        assert!(status == 400 && text.contains(why), "{question}: {status} {text}");
    }
    // Without a place to keep it, usage is that since the start.
    assert_eq!(gateway.ask(chat()).status(), 200);
    gateway.settled(1);
    let (status, csv) = gateway.admin("GET /usage?by=tenant,model&format=csv");
    assert_eq!(status, 200);
    assert_eq!(csv.lines().nth(1), Some("\"a\",\"m\",1,7,5,12,0,0,0,0"), "{csv}");
}

/// One record of each request, the same in the file and in the table; the file stays behind SIGHUP.
#[test]
fn records_of_usage_go_to_a_file_and_to_clickhouse() {
    let (backend, table, folder) = (Backend::kind(), Listener::start(), Folder::new());
    let file = folder.0.join("usage.jsonl");
    let text = Setup::to(backend.url()).text();
    let text = text.replace("m: { }", "m: { price: { input: 1, output: 4 } }");
    let usage = format!(
        "usage: {{ file: {{ path: '{}' }}, clickhouse: {{ url: '{}', table: llm.usage }} }}\n",
        file.display(),
        table.url()
    );
    let mut gateway = Gateway::run(&(usage + &text));
    assert_eq!(gateway.ask(chat()).status(), 200);
    let (mut peer, request) = table.request();
    assert!(
        request.target().starts_with("/?query=INSERT%20INTO%20llm.usage%20FORMAT%20JSONEachRow")
    );
    peer.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    let record: serde_json::Value = serde_json::from_str(request.text()).expect("one line of JSON");
    assert_eq!((&record["tenant"], &record["key"]), (&"a".into(), &"key-a".into()));
    assert_eq!((&record["total_tokens"], &record["prompt_tokens"]), (&().into(), &7.into()));
    assert_eq!(record["cost_usd"], 27e-6);
    gateway.reaches("forebay_exported_total", &["sink=\"clickhouse\"", "result=\"sent\""], 1.0);
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), request.text());

    // What waits for the next batch is sent before the end.
    assert_eq!(gateway.ask(stream()).status(), 200);
    gateway.settled(2);
    gateway.signal(Signal::TERM);
    let request = peer.request();
    peer.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    let record: serde_json::Value = serde_json::from_str(request.text()).expect("one line of JSON");
    assert_eq!(record["stream"], true);
    assert!(gateway.ended().success());
    assert_eq!(std::fs::read_to_string(&file).expect("a file").lines().count(), 2);
}

#[test]
fn a_budget_that_is_nearly_spent_is_told_to_the_webhook() {
    let (backend, hook) = (Backend::kind(), Listener::start());
    let text = Setup::to(backend.url()).text();
    let text = text.replace("a: { }", "a: { reserve: none, budget: { tokens: 24, per: month } }");
    let alerts = format!("alerts: {{ webhook: '{}/services/T0/hush' }}\n", hook.url());
    let gateway = Gateway::run(&(alerts + &text));
    let told = |share: u32| {
        assert_eq!(gateway.ask(chat()).status(), 200);
        let (mut peer, request) = hook.request();
        peer.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
        assert_eq!(request.target(), "/services/T0/hush");
        let alert = request.json();
        assert_eq!((&alert["event"], &alert["tenant"]), (&"budget".into(), &"a".into()));
        assert_eq!(alert["per_cent"].as_f64(), Some(f64::from(share)));
        let text = alert["text"].as_str().expect("a text for people");
        assert!(text.contains("tenant a") && text.contains("month"), "{text}");
        assert_eq!(alert["limit_tokens"], 24);
    };
    told(50);
    told(100);
    gateway.reaches("forebay_exported_total", &["sink=\"webhook\"", "result=\"sent\""], 2.0);
    // The URL is a password.
    assert!(!gateway.errors().iter().any(|line| line.contains("hush")));
    assert!(!gateway.metrics().contains("hush"));
}
