//! Goal: nobody gets more than the limits say, on however many shards and connections; everybody
//! gets all of it; what was reserved and not used comes back on every way out.
//! Method: limits that refill too slowly for the test to see, so that counts are exact.

use std::time::Instant;

use crate::harness::*;

/// A gateway to `backend` whose parts are these, in flow style.
fn limited(backend: &str, tenant: &str, rest: &str) -> Gateway {
    let text = Setup::to(backend.to_owned()).text();
    let people = people().replace("tenants: { a: { }", &format!("tenants: {{ a: {{ {tenant} }}"));
    Gateway::run(&format!("{}{rest}", text.replace(&self::people(), &people)))
}

fn people() -> String {
    crate::harness::people()
}

/// A chat with a prompt of so many words and a bound on the answer.
fn ask(words: usize, max_tokens: u64) -> Vec<u8> {
    let prompt = "word ".repeat(words);
    let body = format!(
        r#"{{"model":"m","max_tokens":{max_tokens},"messages":[{{"role":"user","content":"{prompt}"}}]}}"#
    );
    post("/v1/chat/completions", body)
}

fn left(answer: &Answer, of: &str) -> u64 {
    let field = answer.head.field(&format!("x-ratelimit-remaining-{of}"));
    field.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{}", answer.head.text))
}

#[test]
fn a_burst_over_many_connections_gets_the_limit_and_never_one_more() {
    let backend = Backend::kind();
    for (strict, shards) in [(false, 1), (false, 2), (true, 2), (false, 8)] {
        // Two a minute flow in at most: none while this runs, or one if the machine is very slow.
        let tenant = format!("rate_limit: {{ rpm: 2, burst: 2, strict: {strict} }}");
        let text = Setup::to(backend.url()).text();
        let text = text.replace("shards: 2", &format!("shards: {shards}"));
        let text = text.replace("tenants: { a: { }", &format!("tenants: {{ a: {{ {tenant} }}"));
        let gateway = Gateway::run(&text);
        let served = storm(std::slice::from_ref(&gateway), 8, 5, 5);
        assert_eq!(served, 2, "strict: {strict}, shards: {shards}");
        gateway.settled(200);
    }
}

/// As many as the reservoir holds and as flow in meanwhile, whatever the number of shards.
#[test]
fn ten_thousand_requests_on_a_key_of_a_hundred_a_minute_get_what_gcra_allows() {
    let backend = Backend::kind();
    for shards in [1, 2, 8] {
        let text = Setup::to(backend.url()).text();
        let text = text.replace("shards: 2", &format!("shards: {shards}"));
        let text = text.replace("tenant: a,", "tenant: a, rate_limit: { rpm: 100 },");
        let gateway = Gateway::run(&text);
        let began = Instant::now();
        let served = storm(std::slice::from_ref(&gateway), 50, 4, 50);
        let flowed = began.elapsed().as_secs_f64() * 100.0 / 60.0;
        let most = 100 + flowed.ceil() as u32;
        assert!((100..=most).contains(&served), "{served} of {most} on {shards} shards");
        gateway.settled(10_000);
    }
}

#[test]
fn each_level_has_limits_of_its_own() {
    let backend = Backend::kind();
    let two = "{ rpm: 2, burst: 2 }";
    for (whose, from, to) in [
        ("your account", "a: { }", format!("a: {{ rate_limit: {two} }}")),
        ("your account", "a: { }", "a: { tier: t }".to_owned()),
        ("your use of this model", "a: { }", format!("a: {{ model_limits: {{ m: {two} }} }}")),
        ("this key", "tenant: a,", format!("tenant: a, rate_limit: {two},")),
        ("this model", "  m: { }", format!("  m: {{ rate_limit: {two} }}")),
        ("this model", "pool: main,", format!("pool: main, rate_limit: {two},")),
        ("the gateway", "pools:", format!("global: {two}\npools:")),
    ] {
        let text = format!("tiers: {{ t: {two} }}\n{}", Setup::to(backend.url()).text());
        assert!(text.contains(from), "{from} in {text}");
        let gateway = Gateway::run(&text.replacen(from, &to, 1));
        let mut client = gateway.client();
        for expected in [200, 200, 429] {
            client.send(chat());
            let answer = client.answer();
            assert_eq!(answer.status(), expected, "{to}: {}", answer.text());
            if expected == 429 {
                assert!(answer.text().contains(whose), "{to}: {}", answer.text());
                assert_eq!(answer.json()["error"]["type"], "requests");
                assert_eq!(answer.code(), "rate_limit_exceeded");
                let after: u64 = answer
                    .head
                    .field("retry-after")
                    .and_then(|value| value.parse().ok())
                    .expect("a number");
                assert!((1..=60).contains(&after), "{after}");
                assert_eq!(answer.head.field("x-should-retry"), None);
            }
        }
        // Models and health are no business of limits.
        assert_eq!(gateway.ask(get("/v1/models")).status(), 200);
        assert_eq!(gateway.ask(get("/health")).status(), 200);
    }
}

#[test]
fn a_request_is_charged_what_the_backend_reports_and_the_rest_comes_back() {
    let backend = Listener::start();
    let gateway = limited(&backend.url(), "rate_limit: { tpm: 1000 }, reserve: max", "");
    let mut client = gateway.client();
    client.send(ask(10, 600));
    let (mut peer, _) = backend.request();
    // While it runs all that it may use is held.
    gateway.reaches("forebay_tenant_concurrency", &["tenant=\"a\""], 1.0);
    assert!(gateway.metric("forebay_reserved_tokens", &["tenant=\"a\""]) >= 600.0);
    let mut other = gateway.client();
    other.send(ask(10, 600));
    let refused = other.answer();
    assert_eq!((refused.status(), refused.code().as_str()), (429, "rate_limit_exceeded"));
    assert_eq!(refused.json()["error"]["type"], "tokens");
    assert!(left(&refused, "tokens") < 400);
    // REPLY says that 7 + 5 were used.
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().status(), 200);
    gateway.reaches("forebay_reserved_tokens", &["tenant=\"a\""], 0.0);
    client.send(ask(0, 1));
    peer.request();
    peer.send(json(200, REPLY));
    let answer = client.answer();
    // 12 are gone, and what this one holds; a second brings 16.
    assert!((960..=1_000).contains(&left(&answer, "tokens")), "{}", answer.head.text);
    let never = gateway.ask(ask(10, 2_000));
    assert_eq!((never.status(), never.code().as_str()), (400, "request_too_large"));
}

#[test]
fn what_backends_count_corrects_what_later_prompts_are_estimated_at() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text().replace("shards: 2", "shards: 1");
    let tenant = "a: { rate_limit: { tpm: 900 }, reserve: max }";
    let gateway = Gateway::run(&text.replace("a: { }", tenant));
    let mut client = gateway.client();
    let mut status = |words| {
        client.send(ask(words, 1));
        client.answer().status()
    };
    // A thousand words are a thousand tokens and more, as far as anybody knows.
    assert_eq!(status(1_000), 400);
    // REPLY says 7 where a hundred were expected: as few as a prompt is ever taken to have.
    for _ in 0..40 {
        assert_eq!(status(100), 200);
    }
    assert_eq!(status(1_000), 200);
}

#[test]
fn a_request_for_n_answers_reserves_n_times_and_teaches_single_ones() {
    let backend = Listener::start();
    let text = Setup::to(backend.url()).text().replace("shards: 2", "shards: 1");
    let tenant = "rate_limit: { tpm: 100000000 }, reserve: p95";
    let gateway = Gateway::run(&text.replace("a: { }", &format!("a: {{ {tenant} }}")));
    let mut client = gateway.client();
    let request = |fields: &str| {
        let words = r#"[{"role":"user","content":"Hi"}]"#;
        post("/v1/chat/completions", format!(r#"{{"model":"m",{fields}"messages":{words}}}"#))
    };
    // Each answer takes a thousand tokens.
    let reply = |answers: u32| {
        let (five, all) = (r#""completion_tokens":5,"total_tokens":12"#, 1_000 * answers);
        assert!(REPLY.contains(five));
        let usage = format!(r#""completion_tokens":{all},"total_tokens":{}"#, all + 7);
        json(200, &REPLY.replace(five, &usage))
    };
    let mut peer = None;
    let mut held = |answers: u32, fields: &str| {
        client.send(request(fields));
        let peer = peer.get_or_insert_with(|| backend.accept());
        peer.request();
        let held = gateway.metric("forebay_reserved_tokens", &["tenant=\"a\""]);
        peer.send(reply(answers));
        assert_eq!(client.answer().status(), 200);
        gateway.idle();
        held
    };
    // Enough of a history.
    for _ in 0..8 {
        held(4, r#""n":4,"#);
    }
    let one = held(1, "");
    assert!((1_000.0..1_300.0).contains(&one), "{one}");
    let three = held(3, r#""n":3,"#);
    assert!((3_000.0..3_900.0).contains(&three), "{three}");
    let bounded = held(3, r#""n":3,"max_tokens":50,"#);
    assert!((150.0..200.0).contains(&bounded), "{bounded}");
}

#[test]
fn where_a_model_or_a_route_names_a_vocabulary_the_prompt_is_counted_and_not_estimated() {
    // OpenAI's rule: three tokens a message, its role, its text, three for the answer.
    const OVERHEAD: u64 = 3 + 1 + 3;
    // " word" is one token, and so is "word"; the blank behind the last one is another.
    let tokens = |words: u64| OVERHEAD + words + 1;
    let words = 300;
    for (model, route, counted) in [
        ("o200k_base", None, true),
        ("auto", Some("cl100k_base"), true),
        ("o200k_base", Some("auto"), false),
    ] {
        let backend = Backend::kind();
        let text = Setup::to(backend.url()).text();
        let text = text.replace("  m: { }", &format!("  m: {{ tokenizer: {model} }}"));
        let route = route.map(|route| format!("pool: main, tokenizer: {route},"));
        let text = text.replace("pool: main,", route.as_deref().unwrap_or("pool: main,"));
        let limit = tokens(words) + 1;
        let tenant = format!("a: {{ rate_limit: {{ tpm: {limit} }}, reserve: max }}");
        let gateway = Gateway::run(&text.replace("a: { }", &tenant));
        // One token more than fits, then all that fits.
        let never = gateway.ask(ask(words as usize, 2));
        assert_eq!((never.status(), never.code().as_str()), (400, "request_too_large"), "{model}");
        let answer = gateway.ask(ask(words as usize, 1));
        if counted {
            assert_eq!((answer.status(), left(&answer, "tokens")), (200, 0), "{model}");
        } else {
            assert_eq!(answer.status(), 400, "the estimate is higher");
        }
    }
}

#[test]
fn what_ends_early_is_charged_for_what_was_generated() {
    let backend = Listener::start();
    let gateway = limited(&backend.url(), "rate_limit: { tpm: 100000, concurrency: 1 }", "");
    // The client leaves, the backend breaks, the backend refuses: the slot and the tokens return.
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk([token("a"), token("b")].concat())].concat());
    client.head();
    client.chunks_until("b");
    client.fin();
    peer.gone();
    gateway.reaches("forebay_tenant_concurrency", &["tenant=\"a\""], 0.0);
    wait_for("the two tokens", || (gateway.usage("a").1 == 2).then_some(()));

    for answer in ["HTTP/1.1 200 OK\r\ncontent-le".to_owned(), String::new()] {
        let mut client = gateway.client();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(answer);
        peer.rst();
        assert_eq!(client.answer().status(), 502);
    }
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(400, r#"{"error":{"message":"no"}}"#));
    assert_eq!(client.answer().status(), 400);
    gateway.reaches("forebay_reserved_tokens", &["tenant=\"a\""], 0.0);
    client.send(chat());
    peer.request();
    peer.send(json(200, REPLY));
    let answer = client.answer();
    // The estimate of the first, and what this one holds, is all that is gone.
    assert!(left(&answer, "tokens") >= 100_000 - 100, "{}", answer.head.text);
}

#[test]
fn a_request_that_no_backend_was_asked_costs_nothing() {
    let gateway =
        limited("http://127.0.0.1:9", "rate_limit: { rpm: 2, burst: 2 }, models: [m, other]", "");
    for _ in 0..5 {
        // Unknown models, broken bodies, too many tokens: refused before anything is taken.
        assert_eq!(gateway.ask(post("/v1/chat/completions", "{")).status(), 400);
        assert_eq!(gateway.ask(post("/v1/chat/completions", r#"{"model":"z"}"#)).status(), 403);
        assert_eq!(gateway.ask(post("/v1/chat/completions", r#"{"model":"other"}"#)).status(), 404);
    }
    // One that was tried counts, although nobody was there.
    assert_eq!(gateway.ask(chat()).status(), 503);
    assert_eq!(left(&gateway.ask(chat()), "requests"), 0);
    assert_eq!(gateway.ask(chat()).status(), 429);
}

#[test]
fn a_stream_is_charged_what_the_backend_counts_and_a_broken_one_nearly_that() {
    let mock = Mock::start(&["--ttft", "1ms", "--inter-token", "1ms", "--tokens", "60"]);
    let gateway = Setup::to(mock.url.clone()).start();
    let mut client = gateway.client();
    let said = |more: &str| {
        let words = r#"[{"role":"user","content":"Count to sixty."}]"#;
        let body = format!(r#"{{"model":"m","stream":true,"messages":{words}{more}}}"#);
        post("/v1/chat/completions", body)
    };
    for round in 0..10 {
        let asks = round % 2 == 0;
        client.send(said(if asks { r#","stream_options":{"include_usage":true}"# } else { "" }));
        let answer = client.answer();
        assert!(answer.whole && answer.text().contains("\"usage\":{") == asks);
    }
    let (prompt, completion) = mock.truth();
    assert!(completion == 600, "{completion}");
    assert_eq!(gateway.booked("a", prompt, completion), 0, "nothing was estimated");
    // Clients that leave in the middle: what they were sent is estimated, from what was seen.
    for round in 0..20 {
        let mut client = gateway.client();
        client.send(said(""));
        assert_eq!(client.head().status, 200);
        // A busy machine passes several events on as one chunk.
        let mut events = 0;
        while events < 20 + round % 20 {
            let chunk = client.chunk().expect("it is not over");
            events += String::from_utf8_lossy(&chunk).matches("data: ").count();
        }
        client.fin();
    }
    gateway.reaches("forebay_requests_total", &[], 30.0);
    let truth = mock.truth().1 - completion;
    let booked = gateway.usage("a").1 - completion;
    assert!(truth > 20 * 20 && truth < 20 * 60, "{truth} {booked}");
    let apart = truth.abs_diff(booked);
    // What was on the wire when the client left is all that the backend can know more.
    assert!(apart * 100 <= truth * 3 + 20 * 100, "{booked} of {truth}");
}

#[test]
fn at_the_bound_of_concurrency_a_request_waits_a_moment_for_its_predecessor() {
    let backend = Listener::start();
    let gateway = limited(&backend.url(), "rate_limit: { concurrency: 1, limit_wait: 20s }", "");
    let (mut first, mut second) = (gateway.client(), gateway.client());
    first.send(chat());
    let (mut peer, _) = backend.request();
    second.send(chat());
    backend.nobody();
    peer.send(json(200, REPLY));
    assert_eq!(first.answer().status(), 200);
    // On this shard's idle connection, or on a new one of the other shard.
    wait_for("the second request", || (peer.has_more() || backend.waiting()).then_some(()));
    if peer.has_more() {
        peer.request();
    } else {
        peer = backend.request().0;
    }
    peer.send(json(200, REPLY));
    assert_eq!(second.answer().status(), 200);

    let gateway = limited(&backend.url(), "rate_limit: { concurrency: 1, limit_wait: 0s }", "");
    let (mut first, mut second) = (gateway.client(), gateway.client());
    first.send(chat());
    let (_peer, _) = backend.request();
    second.send(chat());
    let answer = second.answer();
    assert_eq!((answer.status(), answer.head.field("retry-after")), (429, Some("1")));
    backend.nobody();
}

#[test]
fn a_spent_budget_refuses_for_good_or_turns_to_a_cheaper_model() {
    let price = "  m: { price: { input: 1000, cached: 0, output: 1000 } }\n  small: { }\n";
    for over in ["refuse", "read-only", "downgrade"] {
        let backend = Backend::kind();
        let to = if over == "downgrade" { ", to: small" } else { "" };
        // REPLY's twelve tokens cost 1.2 cents.
        let tenant = format!("budget: {{ usd: 0.01, per: total, over: {over}{to} }}");
        let text = Setup::to(backend.url()).text().replace("  m: { }\n", price);
        let text = text.replace("model: [m]", "model: [m, small]");
        let text = text.replace("tenants: { a: { }", &format!("tenants: {{ a: {{ {tenant} }}"));
        let gateway = Gateway::run(&text);
        assert_eq!(gateway.ask(post("/v1/chat/completions", r#"{"model":"m"}"#)).status(), 200);
        gateway.settled(1);
        let answer = gateway.ask(post("/v1/chat/completions", r#"{"model":"m"}"#));
        if over == "downgrade" {
            assert_eq!(answer.status(), 200, "{}", answer.text());
            assert_eq!(answer.head.field("x-forebay-fallback"), Some("m;small;budget"));
            assert_eq!(backend.last().json()["model"], "small");
        } else {
            assert_eq!((answer.status(), answer.code().as_str()), (429, "insufficient_quota"));
            assert_eq!(answer.json()["error"]["type"], "insufficient_quota");
            assert_eq!(answer.head.field("x-should-retry"), Some("false"));
            assert_eq!(answer.head.field("retry-after"), None);
            assert_eq!(backend.count(), 1);
        }
        assert_eq!(gateway.ask(get("/v1/models")).status(), 200);
    }
}

/// Two streams share what is left; each is cut when it is gone, and nobody gets more.
#[test]
fn a_budget_that_cuts_ends_streams_with_a_reason_and_stops_the_backend() {
    let backend = Listener::start();
    let budget = "reserve: none, budget: { tokens: 200, per: total, cut: true }";
    let gateway = limited(&backend.url(), budget, "");
    let mut streams: Vec<_> = (0..2)
        .map(|_| {
            let mut client = gateway.client();
            client.send(stream());
            let (mut peer, _) = backend.request();
            peer.send([STREAM_HEAD.as_bytes(), &chunk(ROLE)].concat());
            assert_eq!(client.head().status, 200);
            client.chunks_until("assistant");
            (client, peer)
        })
        .collect();
    let mut generated = 0;
    for word in 0..200 {
        streams.retain_mut(|(client, peer)| {
            // The stream may have been cut behind the last one: this one is not passed on then.
            peer.try_send(chunk(token(&format!("w{word}"))));
            let data = client.chunk().expect("a token, or why there is none");
            let cut = String::from_utf8_lossy(&data).contains("insufficient_quota");
            generated += u32::from(!cut);
            if cut {
                peer.gone();
                client.gone();
            }
            !cut
        });
    }
    assert!(streams.is_empty(), "not cut");
    // Paid for in pieces of 32: so much each may leave, and its last token is one too many.
    assert!((200 - 2 * 32..=202).contains(&generated), "{generated}");
    gateway.idle();
    let spent = gateway.metric("forebay_budget_spent_ratio", &["tenant=\"a\""]) * 200.0;
    assert!((200.0 - 2.0 * 32.0..=202.0).contains(&spent), "{spent}");
    gateway.log.until("\"end\":\"spent\"");
}

#[test]
fn a_budget_that_does_not_cut_lets_a_stream_under_way_end() {
    let backend = Listener::start();
    let budget = "reserve: none, budget: { tokens: 20, per: total }";
    let gateway = limited(&backend.url(), budget, "");
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(ROLE)].concat());
    assert_eq!(client.head().status, 200);
    for word in 0..60 {
        peer.send(chunk(token(&format!("w{word}"))));
    }
    peer.send([chunk(FINISH), chunk(DONE), LAST_CHUNK.into()].concat());
    assert!(client.chunks_until("[DONE]").contains("w59"));
    gateway.idle();
    let refused = gateway.ask(chat());
    assert_eq!((refused.status(), &*refused.code()), (429, "insufficient_quota"));
}

#[test]
fn a_reload_keeps_what_is_used_and_sets_the_new_limit() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text();
    let with = |limits: &str| text.replace("a: { }", &format!("a: {{ rate_limit: {limits} }}"));
    let gateway = Gateway::run(&with("{ rpm: 4, burst: 4 }"));
    for _ in 0..2 {
        assert_eq!(gateway.ask(chat()).status(), 200);
    }
    // Half of it is used: half of the larger one is as well.
    gateway.configure(&with("{ rpm: 8, burst: 8 }"));
    assert_eq!(gateway.admin("POST /reload").0, 200);
    for expected in [200, 200, 200, 200, 429] {
        assert_eq!(gateway.ask(chat()).status(), expected);
    }
    gateway.configure(&text);
    assert_eq!(gateway.admin("POST /reload").0, 200);
    let answer = gateway.ask(chat());
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.head.field("x-ratelimit-limit-requests"), None);
}
