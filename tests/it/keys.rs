//! Goal: only a configured key opens the gateway, and it opens what its tenant may use.
//! Method: every way of presenting a key, right and wrong.

use crate::harness::*;

fn with_key(fields: &str) -> String {
    let body = r#"{"model":"m"}"#;
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n{fields}\r\n{body}",
        body.len()
    )
}

#[test]
fn a_key_is_taken_where_sdks_put_it() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    for fields in [
        format!("authorization: Bearer {KEY_A}\r\n"),
        format!("Authorization: bearer {KEY_A}\r\n"),
        format!("AUTHORIZATION:BEARER   {KEY_A}  \r\n"),
        format!("x-api-key: {KEY_A}\r\n"),
    ] {
        assert_eq!(gateway.ask(with_key(&fields)).status(), 200, "{fields:?}");
    }
    gateway.settled(4);
    assert_eq!(gateway.usage("a"), (28, 20, 0));
    assert_eq!(gateway.usage("b"), (0, 0, 0));
    assert_eq!(gateway.ask(with_key(&format!("x-api-key: {KEY_B}\r\n"))).status(), 200);
    assert_eq!(gateway.booked("b", 7, 5), 0);
}

#[test]
fn without_a_key_nothing_is_served_and_openais_sdk_understands_why() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    for fields in [
        String::new(),
        "authorization: Bearer wrong\r\n".into(),
        "authorization: Bearer \r\n".into(),
        "authorization: Bearer\r\n".into(),
        format!("authorization: {KEY_A}\r\n"),
        format!("authorization: Basic {KEY_A}\r\n"),
        format!("authorization: Bearer {KEY_A}x\r\n"),
        format!("authorization: Bearer {}\r\n", &KEY_A[..KEY_A.len() - 1]),
        format!("authorization: Bearer {}\r\n", KEY_A.to_uppercase()),
        format!("api-key: {KEY_A}\r\n"),
        format!("cookie: key={KEY_A}\r\n"),
    ] {
        if !client.try_send(with_key(&fields)) {
            client = gateway.client();
            client.send(with_key(&fields));
        }
        let answer = client.answer();
        assert_eq!(
            (answer.status(), answer.code().as_str()),
            (401, "invalid_api_key"),
            "{fields:?}"
        );
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].is_string() && error["param"].is_null());
        assert!(!answer.text().contains("wrong"), "a key is never repeated");
        // The body may be unread: then the connection is given up.
        client = gateway.client();
    }
    assert_eq!(gateway.ask("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").status(), 401);
    // In Anthropic's words on Anthropic's path.
    let answer = gateway.ask("POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(answer.status(), 401);
    assert_eq!(answer.json()["error"]["type"], "authentication_error");
    assert_eq!(answer.json()["type"], "error");
    assert_eq!(backend.count(), 0);
    let log = gateway.log.count("\"refused\"", 13).join("\n");
    assert!(!log.contains("wrong") && !log.contains(KEY_A), "{log}");
}

#[test]
fn a_gateway_without_keys_is_open_and_says_so() {
    let backend = Backend::kind();
    let config = Setup::to(backend.url()).text();
    let open = &config[..config.find("tenants:").expect("people")];
    let gateway = Gateway::run(open);
    assert_eq!(gateway.ask(with_key("")).status(), 200);
    assert_eq!(gateway.ask(with_key("authorization: Bearer any\r\n")).status(), 200);
    assert_eq!(backend.last().field("authorization"), None, "nor is it passed on");
    assert!(gateway.errors().iter().any(|line| line.contains("OPEN")), "{:?}", gateway.errors());
}

#[test]
fn a_tenant_sees_and_uses_its_models_only() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text().replace("match: { model: [m] }, ", "");
    let text = text
        .replace("  m: { }\n", "  m: { aliases: [m-alias] }\n  n-1: { }\n")
        .replace("a: { }, b: { }", "a: { models: [m, 'n-*'] }, b: { }");
    let gateway = Gateway::run(&text);
    let ask = |model: &str| {
        gateway.ask(post("/v1/chat/completions", format!("{{\"model\":\"{model}\"}}")))
    };
    assert_eq!(ask("m").status(), 200);
    assert_eq!(ask("n-1").status(), 200);
    for model in ["m-alias", "other"] {
        let answer = ask(model);
        assert_eq!(
            (answer.status(), answer.code().as_str()),
            (403, "model_not_allowed"),
            "{model}"
        );
    }
    let ids = |key: &str| {
        let request = String::from_utf8(get("/v1/models")).expect("ASCII").replace(KEY_A, key);
        let list = gateway.ask(request).json();
        let ids = list["data"].as_array().expect("a list").iter();
        ids.map(|m| m["id"].as_str().expect("an id").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(ids(KEY_A), ["m", "n-1"]);
    assert_eq!(ids(KEY_B), ["m", "m-alias", "n-1"]);
    assert_eq!(backend.count(), 2);
}

#[test]
fn the_admin_port_asks_for_its_token_and_for_no_foreign_page() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text().replace(
        "admin: { listen: '127.0.0.1:0' }",
        "admin: { listen: '127.0.0.1:0', token: open-sesame }",
    );
    let gateway = Gateway::run(&text);
    let ask = |fields: &str| {
        let mut client = Client::new(gateway.admin);
        client.send(format!("GET /metrics HTTP/1.1\r\nhost: localhost\r\n{fields}\r\n"));
        client.answer().status()
    };
    assert_eq!(ask(""), 401);
    assert_eq!(ask("authorization: Bearer wrong\r\n"), 401);
    assert_eq!(ask("authorization: Bearer open-sesame\r\n"), 200);
    let gateway = Setup::to(backend.url()).start();
    let mut client = Client::new(gateway.admin);
    client.send("POST /reload HTTP/1.1\r\nhost: localhost\r\norigin: http://evil\r\ncontent-length: 0\r\n\r\n");
    assert!((400..500).contains(&client.answer().status()));
    let mut client = Client::new(gateway.admin);
    client.send("GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n");
    assert!((400..500).contains(&client.answer().status()));
}
