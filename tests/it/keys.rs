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

/// A configuration with a place for keys.
fn with_state(backend: &Backend, folder: &Folder) -> String {
    let state = format!("state: {{ dir: '{}' }}\n", folder.0.join("state").display());
    state + &Setup::to(backend.url()).text()
}

fn ask_with(gateway: &Gateway, key: &str) -> u16 {
    gateway.ask(with_key(&format!("authorization: Bearer {key}\r\n"))).status()
}

#[test]
fn a_key_is_made_rotated_and_revoked_while_the_gateway_runs() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let text = with_state(&backend, &folder);
    let mut gateway = Gateway::run(&text);
    let config = gateway.named_in(&folder, &text);
    let keys = |args: &[&str]| -> (bool, serde_json::Value, String) {
        let output =
            command(&["keys", "--config"]).arg(&config).args(args).output().expect("it runs");
        let said = String::from_utf8(output.stdout).expect("UTF-8");
        let wrong = String::from_utf8(output.stderr).expect("UTF-8");
        let said = if said.is_empty() { "null".to_owned() } else { said };
        (output.status.success(), serde_json::from_str(&said).expect("JSON"), wrong)
    };
    let made = |said: &serde_json::Value| said["key"].as_str().expect("a key").to_owned();

    let (fine, said, wrong) =
        keys(&["create", "ci", "--tenant", "a", "--rate-limit", r#"{"rpm":2,"burst":2}"#]);
    assert!(fine, "{wrong}");
    let first = made(&said);
    assert_eq!([ask_with(&gateway, &first), ask_with(&gateway, &first)], [200, 200]);
    assert_eq!(ask_with(&gateway, &first), 429, "its own limit");
    // In force when it is answered, for every shard.
    let (fine, said, _) = keys(&["rotate", "ci"]);
    let second = made(&said);
    assert!(fine && first != second);
    for _ in 0..8 {
        assert_eq!(ask_with(&gateway, &first), 401);
    }
    let (fine, said, _) =
        keys(&["create", "other", "--tenant", "b", "--models", "n", "--deny-models", "m"]);
    assert!(fine);
    assert_eq!(ask_with(&gateway, &made(&said)), 403);
    let (_, said, _) = keys(&["list"]);
    let text = said.to_string();
    assert!(
        text.contains("\"ci\"") && text.contains("\"key-a\"") && !text.contains(&second),
        "{text}"
    );
    assert!(!text.contains("sha256"), "{text}");

    // What cannot be is said and changes nothing.
    for (args, why) in [
        (&["create", "ci", "--tenant", "a"][..], "a key with this id"),
        (&["create", "key-a", "--tenant", "a"], "a key with this id"),
        (&["create", "x", "--tenant", "nobody"], "no tenant"),
        (&["create", "x", "--tenant", "a", "--rate-limit", r#"{"rpmm":2}"#], "rpmm"),
        (&["rotate", "key-a"], "keys of the file"),
        (&["revoke", "nothing"], "no key with this id"),
    ] {
        let (fine, _, wrong) = keys(args);
        assert!(!fine && wrong.contains(why), "{args:?}: {wrong}");
    }

    // They outlive the process, and a reload.
    gateway.signal(rustix::process::Signal::KILL);
    gateway.ended();
    let text = with_state(&backend, &folder);
    let gateway = Gateway::run(&text);
    assert_eq!(ask_with(&gateway, &first), 401);
    assert_eq!(ask_with(&gateway, &second), 200);
    assert_eq!(gateway.admin("POST /reload").0, 200);
    assert_eq!(ask_with(&gateway, &second), 200);
    assert_eq!(gateway.admin("DELETE /keys/ci").0, 200);
    assert_eq!(ask_with(&gateway, &second), 401);
    assert_eq!(gateway.admin("DELETE /keys/ci").0, 404);
}

#[test]
fn without_keys_in_the_file_the_last_one_that_is_revoked_does_not_open_the_gateway() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let text = with_state(&backend, &folder);
    let start = text.find("keys:").expect("keys");
    let gateway = Gateway::run(&text[..start]);
    assert_eq!(gateway.ask(with_key("")).status(), 200, "open, as it said");
    let (status, made) = gateway.admin_post("/keys", r#"{"id":"one","tenant":"a"}"#);
    assert_eq!(status, 201, "{made}");
    let made: serde_json::Value = serde_json::from_str(&made).expect("JSON");
    let key = made["key"].as_str().expect("a key");
    assert_eq!(gateway.ask(with_key("")).status(), 401);
    assert_eq!(ask_with(&gateway, key), 200);
    assert_eq!(gateway.admin("DELETE /keys/one").0, 200);
    assert_eq!(ask_with(&gateway, key), 401);
    assert_eq!(gateway.ask(with_key("")).status(), 401);
}

#[test]
fn without_a_place_to_keep_them_no_keys_are_made() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    let (status, why) = gateway.admin_post("/keys", r#"{"id":"one","tenant":"a"}"#);
    assert_eq!(status, 409, "{why}");
    assert!(why.contains("state.dir"), "{why}");
    assert_eq!(gateway.admin("GET /keys").0, 200);
}

#[test]
fn what_is_denied_is_denied_under_every_name() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text();
    let text = text.replace("  m: { }", "  m: { aliases: [small] }\n  n: { }");
    let text = text.replace("model: [m]", "model: [\"*\"]");
    let deny = |of: &str| text.replacen("a: { }", &format!("a: {{ deny_models: [{of}] }}"), 1);
    let ask = |gateway: &Gateway, model: &str| {
        gateway.ask(post("/v1/chat/completions", format!("{{\"model\":\"{model}\"}}"))).status()
    };
    let gateway = Gateway::run(&deny("m"));
    assert_eq!([ask(&gateway, "m"), ask(&gateway, "small"), ask(&gateway, "n")], [403, 403, 200]);
    let gateway = Gateway::run(&deny("small"));
    assert_eq!([ask(&gateway, "m"), ask(&gateway, "small"), ask(&gateway, "n")], [200, 403, 200]);
    let listed = gateway.ask(get("/v1/models")).text();
    assert!(listed.contains("\"m\"") && !listed.contains("small"), "{listed}");
}
