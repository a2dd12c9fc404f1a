//! Goal: a request goes where its model, its fields and its path say, and nowhere else.
//! Method: one backend for each place, and a look at who was asked.

use crate::harness::*;

/// A gateway over backends named as in `names`, with `rest` for models and routes: pool `NAME` has
/// backend `NAME`.
fn gateway(backends: &[(&str, &Backend)], rest: &str) -> Gateway {
    let pools: Vec<String> = backends
        .iter()
        .map(|(name, at)| {
            format!("  {name}: {{ backends: [ {{ name: {name}, url: '{}' }} ] }}\n", at.url())
        })
        .collect();
    Gateway::run(&format!("{}pools:\n{}{rest}\n{}", server(""), pools.concat(), people()))
}

fn asked(model: &str) -> Vec<u8> {
    post("/v1/chat/completions", format!("{{\"model\":\"{model}\"}}"))
}

/// The backend that answered, by its field.
fn answered_by(gateway: &Gateway, request: Vec<u8>) -> String {
    let answer = gateway.ask(request);
    match answer.status() {
        200 => answer.head.field("x-forebay-backend").expect("a backend").to_owned(),
        status => status.to_string(),
    }
}

#[test]
fn models_aliases_globs_fields_and_paths_choose_the_route() {
    let (one, two, three) = (Backend::kind(), Backend::kind(), Backend::kind());
    let rest = "models:
  big-1: { aliases: [big, gpt-4] }
routes:
  - { name: paid, match: { model: [big-1], header: { X-Tier: [gold, 'plat*'] } }, pool: two }
  - { name: big, match: { model: [big-1] }, pool: one }
  - { name: glob, match: { model: ['llama-*', 'q?'] }, pool: two }
  - { name: files, match: { path: ['/v1/files*', '/v1/batches*'] }, pool: three }
  - { name: embed, match: { model: [e], path: /v1/embeddings }, pool: three }";
    let gateway = gateway(&[("one", &one), ("two", &two), ("three", &three)], rest);
    for (model, backend) in [
        ("big", "one"),
        ("gpt-4", "one"),
        ("big-1", "one"),
        ("llama-", "two"),
        ("llama-3-70b", "two"),
        ("q7", "two"),
        ("q", "404"),
        ("q77", "404"),
        ("BIG", "404"),
        ("big ", "404"),
        ("unknown", "404"),
        ("e", "404"),
    ] {
        assert_eq!(answered_by(&gateway, asked(model)), backend, "{model}");
    }
    assert_eq!(one.last().json()["model"], "big-1", "an alias is translated");
    assert_eq!(two.last().json()["model"], "q7", "a glob is not");
    for (value, backend) in
        [("gold", "two"), ("platinum", "two"), ("silver", "one"), ("Gold", "one"), ("", "one")]
    {
        let field = format!("x-tier: {value}\r\n");
        let request = post_with("/v1/chat/completions", &field, r#"{"model":"big"}"#);
        assert_eq!(answered_by(&gateway, request), backend, "{value}");
    }
    for (path, backend) in [
        ("/v1/files", "three"),
        ("/v1/files/f-1/content?x=1", "three"),
        ("/v1/batches/b", "three"),
        ("/v1/assistants", "404"),
        ("/", "404"),
        ("/v1/chat/completion", "404"),
    ] {
        assert_eq!(answered_by(&gateway, get(path)), backend, "{path}");
    }
    assert_eq!(answered_by(&gateway, post("/v1/embeddings", r#"{"model":"e"}"#)), "three");
    // What is unknown is said in words that SDKs know.
    let answer = gateway.ask(asked("unknown"));
    assert_eq!((answer.status(), answer.code().as_str()), (404, "model_not_found"));
    assert_eq!(answer.json()["error"]["param"], "model");
}

#[test]
fn every_path_of_the_api_passes() {
    let backend = Backend::kind();
    let gateway = gateway(&[("p", &backend)], "routes: [ { name: all, pool: p } ]");
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/responses",
        "/v1/moderations",
        "/v1/audio/speech",
        "/v1/images/generations",
        "/v1/messages",
    ] {
        let answer = gateway.ask(post(path, r#"{"model":"anything"}"#));
        assert_eq!((answer.status(), answer.text().as_str()), (200, REPLY), "{path}");
        assert_eq!(backend.last().target(), path);
    }
    for (method, path) in [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/files"),
        ("GET", "/v1/batches/b_1"),
        ("PATCH", "/v1/vector_stores/x"),
    ] {
        let request = String::from_utf8(get(path)).expect("ASCII").replacen("GET", method, 1);
        assert_eq!(gateway.ask(request).status(), 200, "{method} {path}");
        assert_eq!(backend.last().line, format!("{method} {path} HTTP/1.1"));
    }
}

#[test]
fn objects_stay_with_the_backend_that_made_them() {
    let backends: Vec<Backend> = (0..4).map(|_| Backend::kind()).collect();
    let list: Vec<String> =
        backends.iter().map(|backend| format!("{{ url: '{}' }}", backend.url())).collect();
    let gateway = Gateway::run(&format!(
        "{}pools: {{ p: {{ backends: [ {} ] }} }}\nroutes:\n\
         \x20 - {{ name: all, pool: p, sticky: {{ header: X-Session-ID }} }}\n{}",
        server(""),
        list.join(", "),
        people()
    ));
    let mut used = std::collections::HashSet::new();
    for id in 0..24 {
        let by = |request| answered_by(&gateway, request);
        let object = format!("/v1/responses/resp_{id}");
        let first = by(get(&object));
        for _ in 0..3 {
            assert_eq!(by(get(&object)), first);
            assert_eq!(by(get(&format!("{object}/input_items"))), first);
        }
        let field = format!("x-session-id: s{id}\r\n");
        let session = || post_with("/v1/chat/completions", &field, r#"{"model":"m"}"#);
        let first = by(session());
        used.insert(first.clone());
        for _ in 0..3 {
            assert_eq!(by(session()), first);
        }
    }
    assert_eq!(used.len(), 4, "24 sessions use all four");
}

#[test]
fn weights_are_shares() {
    let backends: Vec<Backend> = (0..3).map(|_| Backend::kind()).collect();
    let config = |strategy: &str| {
        format!(
            "{}pools:\n  p:\n    backends:\n\
             \x20     - {{ name: u1, url: '{}', weight: 3, version: v1 }}\n\
             \x20     - {{ name: u2, url: '{}', version: v2 }}\n\
             \x20     - {{ name: u3, url: '{}', weight: 0, version: v2 }}\n\
             routes: [ {{ name: all, pool: p, {strategy} }} ]\n{}",
            server(""),
            backends[0].url(),
            backends[1].url(),
            backends[2].url(),
            people()
        )
    };
    for (strategy, first) in [
        ("strategy: weighted-round-robin", 60),
        ("strategy: weighted-split, weights: { v1: 50, v2: 50 }", 40),
    ] {
        let before: Vec<usize> = backends.iter().map(Backend::count).collect();
        let gateway = Gateway::run(&config(strategy));
        // One connection is one shard, whose turns are in order.
        let mut client = gateway.client();
        for _ in 0..80 {
            client.send(asked("x"));
            assert_eq!(client.answer().status(), 200);
        }
        let counts: Vec<usize> =
            backends.iter().zip(before).map(|(now, before)| now.count() - before).collect();
        assert_eq!(counts[2], 0, "weight 0 gets nothing: {counts:?}");
        assert_eq!(counts[0] + counts[1], 80);
        assert!(counts[0].abs_diff(first) <= 12, "{strategy}: {counts:?}");
    }
}

#[test]
fn the_least_busy_backend_is_next_over_all_shards() {
    let backends = [Listener::start(), Listener::start(), Listener::start()];
    let urls = backends.iter().map(Listener::url).collect();
    let route = "strategy: least-requests";
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    // Nine streams that do not end, one by one: three each, whichever shard they came to.
    let mut held = Vec::new();
    for number in 0..9 {
        let mut client = gateway.client();
        client.send(stream());
        let index = wait_for("a pick", || (0..3).find(|&index| backends[index].waiting()));
        let (peer, _) = backends[index].request();
        held.push((index, client, peer));
        let most = (0..3).map(|of| held.iter().filter(|(index, ..)| *index == of).count());
        assert_eq!(most.max(), Some(number / 3 + 1), "after {}", number + 1);
    }
    // The one that gets rid of one is next.
    let (index, client, mut peer) = held.remove(4);
    client.fin();
    peer.gone();
    gateway.reaches("forebay_backend_in_flight", &[], 8.0);
    let mut client = gateway.client();
    client.send(stream());
    backends[index].request();
}

#[test]
fn models_are_answered_from_the_plan() {
    let backend = Backend::kind();
    let rest = "models:
  big-1: { aliases: [big, 'org/name with space'] }
  hidden: { }
routes: [ { name: r, match: { model: [big-1, other] }, pool: p } ]";
    let gateway = gateway(&[("p", &backend)], rest);
    let answer = gateway.ask(get("/v1/models"));
    let list = answer.json();
    assert_eq!((answer.status(), &list["object"]), (200, &serde_json::json!("list")));
    let ids: Vec<&str> =
        list["data"].as_array().expect("a list").iter().filter_map(|m| m["id"].as_str()).collect();
    assert_eq!(ids, ["big-1", "big", "org/name with space", "other"]);
    for id in ["big-1", "big", "org/name%20with%20space", "org%2Fname%20with%20space", "other"] {
        let answer = gateway.ask(get(&format!("/v1/models/{id}")));
        assert_eq!(answer.status(), 200, "{id}");
        assert_eq!(answer.json()["object"], "model");
    }
    for id in ["hidden", "nothing", "", "big-1/"] {
        let answer = gateway.ask(get(&format!("/v1/models/{id}")));
        assert_eq!((answer.status(), answer.code().as_str()), (404, "model_not_found"), "{id}");
    }
    assert_eq!(backend.count(), 0);
}

#[test]
fn health_is_answered_without_a_key() {
    let backend = Backend::kind();
    let gateway = gateway(&[("p", &backend)], "routes: [ { name: r, pool: p } ]");
    let mut client = gateway.client();
    for path in ["/health", "/healthz", "/readyz"] {
        client.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
        assert_eq!(client.answer().status(), 200, "{path}");
        client.send(format!("HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n"));
        assert_eq!(client.answer_to_head().status(), 200, "{path}");
    }
    assert_eq!(gateway.admin("GET /healthz").0, 200);
    assert_eq!(gateway.admin("GET /readyz").0, 200);
    assert_eq!(backend.count(), 0);
}
