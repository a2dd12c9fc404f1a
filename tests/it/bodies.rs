//! Goal: a body reaches the backend byte for byte, or is refused with a reason; no body does harm.
//! Method: a corpus of edge cases of JSON against a backend that remembers what it was sent.

use std::io::Write as _;

use crate::harness::*;

const PATH: &str = "/v1/chat/completions";

fn gateway_to(backend: &Backend) -> Gateway {
    Setup::to(backend.url()).start()
}

#[test]
fn what_json_allows_is_served_unchanged() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let mut client = gateway.client();
    let deep = |depth: usize| {
        format!("{{\"model\":\"m\",\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth))
    };
    let long = format!("{{\"pad\":\"{}\",\"model\":\"m\"}}", "y".repeat(200_000));
    let (deep, very) = (deep(100), deep(400));
    for body in [
        r#"{"model":"m"}"#,
        " \t\r\n{ \"model\" :\t\"m\" \n}\r\n ",
        r#"{"messages":[{"role":"user","content":"{\"model\":\"other\"}"}],"model":"m"}"#,
        // Escapes in a key, and in the name itself.
        r#"{"mod\u0065l":"m"}"#,
        r#"{"model":"\u006d"}"#,
        r#"{"model":"m","a\"b\\c\/d\u00e9":1,"":2}"#,
        // Lone surrogates, as SDKs send them for broken emoji.
        r#"{"model":"m","messages":[{"role":"user","content":"\ud83d"}]}"#,
        r#"{"model":"m","messages":[{"role":"user","content":"\ude00 \ud83d\ud83d\ude00"}]}"#,
        "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"你好 😀 \u{0}\"}]}"
            .replace('\u{0}', "\\u0000")
            .as_str(),
        // Numbers that fit no machine type.
        r#"{"model":"m","seed":18446744073709551616,"x":-9223372036854775809}"#,
        r#"{"model":"m","temperature":1e400,"y":-0.0e-999,"z":123456789012345678901234567890.5}"#,
        // Duplicates below the top are the backend's business.
        r#"{"model":"m","metadata":{"a":1,"a":2,"model":"x","stream":true}}"#,
        r#"{"model":"m","stream":null,"max_tokens":null,"n":null,"user":null,"stream_options":null}"#,
        r#"{"model":"m","stream":false,"stream_options":{"include_usage":true}}"#,
        deep.as_str(),
        very.as_str(),
        long.as_str(),
    ] {
        client.send(post(PATH, body));
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{:.300}: {}", body, answer.text());
        assert_eq!(answer.text(), REPLY);
        assert!(backend.last().body == body.as_bytes(), "{body:.300}");
    }
}

#[test]
fn what_is_no_request_is_refused_and_the_connection_lives() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let deep = format!("{{\"model\":\"m\",\"x\":{}", "[".repeat(10_000));
    let deep_and_whole = format!("{deep}{}}}", "]".repeat(10_000));
    let objects = format!("{{\"model\":\"m\",\"x\":{}", "{\"a\":".repeat(10_000));
    let mut client = gateway.client();
    let bodies: &[&[u8]] = &[
        b"",
        b" ",
        b"null",
        b"5",
        b"\"model\"",
        b"[]",
        b"[{\"model\":\"m\"}]",
        b"{}",
        b"{",
        b"{\"model\":\"m\"",
        b"{\"model\":\"m\"}}",
        b"{\"model\":\"m\"} x",
        b"{\"model\":\"m\"}{\"model\":\"m\"}",
        b"{\"model\":\"m\",}",
        b"{\"model\":\"m\" \"a\":1}",
        b"{'model':'m'}",
        b"{model:\"m\"}",
        b"{\"model\":\"m\",\"a\":01}",
        b"{\"model\":\"m\",\"a\":+1}",
        b"{\"model\":\"m\",\"a\":.5}",
        b"{\"model\":\"m\",\"a\":1.}",
        b"{\"model\":\"m\",\"a\":NaN}",
        b"{\"model\":\"m\",\"a\":Infinity}",
        b"{\"model\":\"m\",\"a\":tru}",
        b"{\"model\":\"m\",\"a\":\"\n\"}",
        b"{\"model\":\"m\",\"a\":\"\\x41\"}",
        b"{\"model\":\"m\",\"a\":\"\\u12g4\"}",
        b"{\"model\":\"m\",\"a\":\"\xff\"}",
        b"{\"model\":\"m\",\"a\":\"\xc0\xaf\"}",
        b"{\"model\":\"m\",\"a\":\"\xed\xa0\x80\"}",
        b"{\"model\":\"m\",/*c*/\"a\":1}",
        b"\xef\xbb\xbf{\"model\":\"m\"}",
        b"{\"model\":\"m\"}\0",
        // Two readings.
        b"{\"model\":\"m\",\"model\":\"x\"}",
        b"{\"model\":\"m\",\"mod\\u0065l\":\"x\"}",
        b"{\"model\":\"m\",\"stream\":true,\"stream\":false}",
        b"{\"model\":\"m\",\"temperature\":1,\"temperature\":2}",
        // Wrong kinds.
        b"{\"model\":5}",
        b"{\"model\":null}",
        b"{\"model\":\"\"}",
        b"{\"model\":[\"m\"]}",
        b"{\"model\":\"m\",\"stream\":\"yes\"}",
        b"{\"model\":\"m\",\"stream\":1}",
        b"{\"model\":\"m\",\"max_tokens\":\"12\"}",
        b"{\"model\":\"m\",\"max_tokens\":-1}",
        b"{\"model\":\"m\",\"max_tokens\":1.5}",
        b"{\"model\":\"m\",\"max_tokens\":1e400}",
        b"{\"model\":\"m\",\"max_tokens\":18446744073709551616}",
        b"{\"model\":\"m\",\"n\":-1}",
        b"{\"model\":\"m\",\"stream\":true,\"stream_options\":5}",
        deep.as_bytes(),
        deep_and_whole.as_bytes(),
        objects.as_bytes(),
    ];
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]);
        // A connection stays if its body was read to the end, and closes otherwise.
        if !client.try_send(post(PATH, body)) {
            client = gateway.client();
            client.send(post(PATH, body));
        }
        let answer = client.answer();
        assert_eq!(answer.status(), 400, "{shown}: {}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(error["type"], "invalid_request_error", "{shown}");
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{shown}");
        if answer.head.field("connection") == Some("close") {
            client = gateway.client();
        }
    }
    assert_eq!(backend.count(), 0);
    assert_eq!(gateway.ask(chat()).status(), 200);
    assert_eq!(gateway.metric("forebay_panics_total", &[]) as u64, 0);
}

#[test]
fn a_wrong_value_names_its_field() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    for (body, param) in [
        (r#"{"messages":[]}"#, "model"),
        (r#"{"model":5}"#, "model"),
        (r#"{"model":"m","stream":"yes"}"#, "stream"),
        (r#"{"model":"m","max_tokens":-1}"#, "max_tokens"),
        (r#"{"model":"m","max_completion_tokens":1e400}"#, "max_completion_tokens"),
        (r#"{"model":"m","n":"1"}"#, "n"),
        (r#"{"model":"m","stream":true,"stream_options":[]}"#, "stream_options"),
    ] {
        let answer = gateway.ask(post(PATH, body));
        assert_eq!(answer.status(), 400, "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
}

#[test]
fn ten_megabytes_pass_in_one_piece_and_in_chunks() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let resident = || gateway.metric("process_resident_memory_bytes", &[]);
    let before = resident();
    let text = "lorem ipsum \\u00e9 \\\" 😀 ".repeat(400_000);
    let body =
        format!("{{\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}],\"model\":\"m\"}}");
    assert!(body.len() > 10_000_000);
    let mut client = gateway.client();
    client.send(post(PATH, &body));
    assert_eq!(client.answer().text(), REPLY);
    assert!(backend.last().body == body.as_bytes());

    client.send(head_of_chunks(""));
    for piece in body.as_bytes().chunks(100_000) {
        client.send(chunk(piece));
    }
    client.send(LAST_CHUNK);
    assert_eq!(client.answer().text(), REPLY);
    assert!(backend.last().body == body.as_bytes());
    gateway.reaches("forebay_buffered_bytes", &[], 0.0);
    let grown = resident() - before;
    assert!(grown < 80e6, "{grown}");
}

fn head_of_chunks(fields: &str) -> String {
    format!(
        "POST {PATH} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY_A}\r\n\
         content-type: application/json\r\ntransfer-encoding: chunked\r\n{fields}\r\n"
    )
}

#[test]
fn chunks_of_every_size_are_one_body() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let mut client = gateway.client();
    let body = br#"{"model":"m","messages":[{"role":"user","content":"in pieces"}]}"#;
    for size in 1..=body.len() {
        client.send(head_of_chunks(""));
        let mut bytes = Vec::new();
        for piece in body.chunks(size) {
            write!(bytes, "{:x};ext=\"1\"\r\n", piece.len()).expect("written");
            bytes.extend_from_slice(piece);
            bytes.extend_from_slice(b"\r\n");
        }
        // A trailer is validated and dropped.
        bytes.extend_from_slice(b"0\r\nx-trailer: 1\r\n\r\n");
        client.send(bytes);
        assert_eq!(client.answer().text(), REPLY, "{size}");
        let seen = backend.last();
        assert_eq!(seen.body, body);
        assert_eq!(seen.field("x-trailer"), None);
    }
}

#[test]
fn requests_that_come_together_are_answered_in_order() {
    let backend = Backend::answering(|request| {
        let number = request.json()["number"].to_string();
        json(200, &format!("{{\"number\":{number}}}"))
    });
    let gateway = gateway_to(&backend);
    let mut client = gateway.client();
    let one = |number: u32| post(PATH, format!("{{\"model\":\"m\",\"number\":{number}}}"));
    client.send((0..20).flat_map(one).collect::<Vec<u8>>());
    for number in 0..20 {
        assert_eq!(client.answer().json()["number"], number);
    }
}

#[test]
fn bytes_that_drip_are_one_request() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let mut client = gateway.client();
    for byte in stream() {
        client.send([byte]);
    }
    assert!(client.answer().whole);
}

#[test]
fn too_much_is_413_and_nothing_of_it_is_sent() {
    let backend = Backend::kind();
    let server = "bounds: { body: 100KB }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    let body = |len: usize| format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "x".repeat(len));
    assert_eq!(gateway.ask(post(PATH, body(90_000))).status(), 200);
    // By its announced length, before a byte of it came.
    let mut client = gateway.client();
    client.send(&post(PATH, body(100_000))[..200]);
    let answer = client.answer();
    assert_eq!((answer.status(), answer.code().as_str()), (413, "body_too_large"));
    assert_eq!(answer.head.field("connection"), Some("close"));
    client.gone();
    // By what came, where nothing was announced.
    let mut client = gateway.client();
    client.send(head_of_chunks(""));
    for piece in body(200_000).as_bytes().chunks(10_000) {
        if !client.try_send(chunk(piece)) {
            break;
        }
    }
    assert_eq!(client.answer().status(), 413);
    assert_eq!(backend.count(), 1);
}

#[test]
fn all_bodies_together_are_bounded() {
    let backend = Listener::start();
    let server = "bounds: { buffered: 1MiB }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "x".repeat(700_000));
    let mut first = gateway.client();
    first.send(post(PATH, &body));
    let (mut peer, request) = backend.request();
    assert_eq!(request.body.len(), body.len());
    let answer = gateway.ask(post(PATH, &body));
    assert_eq!((answer.status(), answer.code().as_str()), (503, "buffer_full"));
    assert!(answer.head.field("retry-after").is_some());
    // Small ones pass all the while.
    assert_eq!(gateway.ask(get("/v1/models")).status(), 200);
    peer.send(json(200, REPLY));
    assert_eq!(first.answer().text(), REPLY);
    gateway.reaches("forebay_buffered_bytes", &[], 0.0);
    first.send(post(PATH, &body));
    peer.request();
}

#[test]
fn a_client_that_is_too_slow_is_told_so() {
    let backend = Backend::kind();
    let server = "timeouts: { head: 200ms, body_rate: 1MiB/s }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    let whole = chat();
    // In the middle of its body, and in the middle of its head.
    for part in [whole.len() - 5, 30] {
        let mut client = gateway.client();
        client.send(&whole[..part]);
        let answer = client.answer();
        assert_eq!(answer.status(), 408);
        client.gone();
    }
    // One that never says a word is closed without one.
    let server = "timeouts: { idle: 100ms }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    gateway.client().gone();
    let mut client = gateway.client();
    client.send(&whole);
    assert_eq!(client.answer().status(), 200);
    client.gone();
    assert_eq!(backend.count(), 1);
}

#[test]
fn whoever_expects_to_be_told_to_go_on_is_told() {
    let backend = Backend::kind();
    let gateway = gateway_to(&backend);
    let body = r#"{"model":"m"}"#;
    let whole = post_with(PATH, "expect: 100-continue\r\n", body);
    let (head, body) = whole.split_at(whole.len() - body.len());
    let mut client = gateway.client();
    for _ in 0..3 {
        client.send(head);
        assert_eq!(client.any_head().status, 100);
        client.send(body);
        let answer = client.any_head();
        assert_eq!(answer.status, 200);
        assert_eq!(client.rest(answer).text(), REPLY);
        assert_eq!(backend.last().field("expect"), None);
    }
    // A refusal comes instead.
    let wrong = String::from_utf8(head.to_vec()).expect("ASCII").replace(KEY_A, "wrong");
    client.send(wrong);
    assert_eq!(client.any_head().status, 401);
    let unknown = post_with(PATH, "expect: 200-ok\r\n", body);
    assert_eq!(gateway.ask(unknown).status(), 417);
}

#[test]
fn encoded_bodies_pass_only_where_nobody_needs_to_look_inside() {
    let backend = Backend::kind();
    let config = format!(
        "{}pools: {{ p: {{ backends: [ {{ url: '{}' }} ] }} }}\nroutes:\n\
         \x20 - {{ name: files, match: {{ path: ['/v1/files*'] }}, pool: p }}\n\
         \x20 - {{ name: chat, match: {{ model: ['*'] }}, pool: p }}\n{}",
        server(""),
        backend.url(),
        people()
    );
    let gateway = Gateway::run(&config);
    for coding in ["gzip", "zstd", "br", "x-unknown"] {
        let fields = format!("content-encoding: {coding}\r\n");
        let answer = gateway.ask(post_with(PATH, &fields, b"\x1f\x8b\x08"));
        assert_eq!(answer.status(), 415, "{coding}");
        let answer = gateway.ask(post_with("/v1/files", &fields, b"\x1f\x8b\x08"));
        assert_eq!(answer.status(), 200, "{coding}");
        assert_eq!(backend.last().field("content-encoding"), Some(coding));
        assert_eq!(backend.last().body, b"\x1f\x8b\x08");
    }
    let plain = post_with(PATH, "content-encoding: identity\r\n", r#"{"model":"m"}"#);
    assert_eq!(gateway.ask(plain).status(), 200);
}

#[test]
fn an_alias_changes_the_model_and_not_a_byte_beside() {
    let backend = Backend::kind();
    let config = format!(
        "{}pools: {{ p: {{ backends: [ {{ url: '{}' }} ] }} }}\n\
         models: {{ 'org/big-model': {{ aliases: [small] }} }}\nroutes:\n\
         \x20 - {{ name: chat, match: {{ model: [small] }}, pool: p }}\n{}",
        server(""),
        backend.url(),
        people()
    );
    let gateway = Gateway::run(&config);
    for (sent, seen) in [
        (
            r#"{ "seed":18446744073709551616 , "model" : "small","x":"\ud83d"} "#,
            r#"{ "seed":18446744073709551616 , "model" : "org/big-model","x":"\ud83d"} "#,
        ),
        (r#"{"mod\u0065l":"sm\u0061ll"}"#, r#"{"mod\u0065l":"org/big-model"}"#),
        (
            r#"{"stream":true,"model":"small"}"#,
            r#"{"stream":true,"model":"org/big-model","stream_options":{"include_usage":true}}"#,
        ),
        (
            r#"{"model":"small","stream_options":{"x":1},"stream":true}"#,
            r#"{"model":"org/big-model","stream_options":{"x":1,"include_usage":true},"stream":true}"#,
        ),
    ] {
        let answer = gateway.ask(post(PATH, sent));
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let body = backend.last();
        let same = |a: &str, b: &str| {
            let parse = |text| serde_json::from_str::<serde_json::Value>(text).ok();
            a == b || (a.contains("stream_options") && parse(a) == parse(b))
        };
        assert!(same(body.text(), seen), "{}\n{seen}", body.text());
    }
    // Without a change of length that a backend could stumble over.
    assert_eq!(
        backend.last().field("content-length"),
        Some(&*backend.last().body.len().to_string())
    );
}

#[test]
fn a_form_is_routed_and_rewritten_by_its_model_field() {
    let backend = Backend::kind();
    let config = format!(
        "{}pools: {{ p: {{ backends: [ {{ url: '{}' }} ] }} }}\n\
         models: {{ whisper-large-v3: {{ aliases: [whisper-1] }} }}\nroutes:\n\
         \x20 - {{ name: audio, match: {{ model: [whisper-1] }}, pool: p }}\n{}",
        server(""),
        backend.url(),
        people()
    );
    let gateway = Gateway::run(&config);
    let form = |model: &str, audio: &[u8]| {
        let mut body =
            b"--bound\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                         content-type: audio/wav\r\n\r\n"
                .to_vec();
        body.extend_from_slice(audio);
        body.extend_from_slice(
            format!(
                "\r\n--bound\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n\
                 --bound--\r\n"
            )
            .as_bytes(),
        );
        body
    };
    let ask = |body: &[u8]| {
        let whole = post("/v1/audio/transcriptions", body);
        let head = whole.len() - body.len();
        let text = String::from_utf8(whole[..head].to_vec()).expect("ASCII");
        let kind = "multipart/form-data; boundary=bound";
        let mut bytes = text.replace("application/json", kind).into_bytes();
        bytes.extend_from_slice(body);
        gateway.ask(bytes)
    };
    let audio: Vec<u8> = (0..=255).cycle().take(100_000).chain(*b"\r\n--boun").collect();
    let answer = ask(&form("whisper-1", &audio));
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(backend.last().body == form("whisper-large-v3", &audio));
    assert_eq!(backend.last().field("content-type"), Some("multipart/form-data; boundary=bound"));
    assert_eq!(ask(&form("unknown", &audio)).status(), 404);
    let answer =
        ask(b"--bound\r\ncontent-disposition: form-data; name=\"x\"\r\n\r\n1\r\n--bound--\r\n");
    assert_eq!(answer.status(), 400);
    assert_eq!(backend.count(), 1);
}

#[test]
fn answers_without_a_body_have_none() {
    let backend = Listener::start();
    let config = format!(
        "{}pools: {{ p: {{ backends: [ {{ url: '{}' }} ] }} }}\nroutes:\n\
         \x20 - {{ name: default, pool: p }}\n{}",
        server(""),
        backend.url(),
        people()
    );
    let gateway = Gateway::run(&config);
    let mut client = gateway.client();
    let ask =
        |method: &str| String::from_utf8(get("/v1/files/f")).expect("ASCII").replace("GET", method);
    client.send(ask("HEAD"));
    let (mut peer, request) = backend.request();
    assert!(request.line.starts_with("HEAD "));
    peer.send("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n");
    let answer = client.answer_to_head();
    assert_eq!(answer.status(), 200);
    // A body was announced that may come all the same: that connection is not used again.
    peer.gone();
    client.send(ask("OPTIONS"));
    let (mut peer, _) = backend.request();
    peer.send(json(200, "{}"));
    assert_eq!(client.answer().text(), "{}");
    for status in ["204 No Content", "304 Not Modified"] {
        client.send(ask("DELETE"));
        peer.request();
        peer.send(format!("HTTP/1.1 {status}\r\n\r\n"));
        let head = client.head();
        assert!(!head.chunked(), "{}", head.text);
        assert!(client.rest(head).whole);
    }
    client.send(ask("GET"));
    peer.request();
    peer.send(json(200, "{}"));
    assert_eq!(client.answer().text(), "{}");
    client.quiet();
}
