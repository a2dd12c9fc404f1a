//! Goal: no byte of a client's ever becomes a request of its own behind our back, and no byte of a
//! backend's ever becomes somebody else's answer.
//! Method: hostile heads and framings, and after each one a victim who must get its own answer.

use crate::harness::*;

const BODY: &str = r#"{"model":"m"}"#;
const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n";

/// A backend that says which request it answers.
fn echoing() -> Backend {
    Backend::answering(|request| {
        let victim = request.field("x-stainless-victim").unwrap_or("none").to_owned();
        json(200, &format!("{{\"victim\":\"{victim}\"}}"))
    })
}

#[test]
fn ambiguous_requests_are_refused_and_reach_nobody() {
    let backend = echoing();
    let gateway = Setup::to(backend.url()).start();
    let line = "POST /v1/chat/completions HTTP/1.1\r\n";
    let usual = format!(
        "host: gateway\r\nauthorization: Bearer {KEY_A}\r\ncontent-type: application/json\r\n"
    );
    let length = BODY.len();
    let chunked = format!("{length:x}\r\n{BODY}\r\n0\r\n\r\n");
    let mut cases: Vec<(String, String)> = Vec::new();
    // Two framings, or one that can be read two ways.
    for fields in [
        format!("content-length: {length}\r\ntransfer-encoding: chunked\r\n"),
        format!("transfer-encoding: chunked\r\ncontent-length: {length}\r\n"),
        format!("content-length: {length}\r\ncontent-length: {length}\r\n"),
        format!("content-length: {length}\r\ncontent-length: 0\r\n"),
        format!("content-length: {length}, {length}\r\n"),
        format!("content-length: +{length}\r\n"),
        format!("content-length: -{length}\r\n"),
        format!("content-length: 0x{length:x}\r\n"),
        format!("content-length: {length} 0\r\n"),
        format!("content-length : {length}\r\n"),
        format!("content-length:\r\n {length}\r\n"),
        format!("content-length: {}\r\n", "9".repeat(30)),
        "content-length: 18446744073709551617\r\n".into(),
        "content-length: \r\n".into(),
    ] {
        cases.push((fields, format!("{BODY}{SMUGGLED}")));
    }
    for fields in [
        "transfer-encoding: chunked, identity\r\n",
        "transfer-encoding: identity, chunked\r\n",
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: chunked, chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
        "transfer-encoding: xchunked\r\n",
        "transfer-encoding: \"chunked\"\r\n",
        "transfer-encoding : chunked\r\n",
        " transfer-encoding: chunked\r\n",
        "transfer-encoding:\u{b}chunked\r\n",
        "transfer-encoding: chunked;q=1\r\n",
        "transfer-encoding:\r\n chunked\r\n",
        "x: y\ntransfer-encoding: chunked\r\n",
        "x: y\rtransfer-encoding: chunked\r\n",
    ] {
        cases.push((fields.to_owned(), format!("{chunked}{SMUGGLED}")));
    }
    // Chunks that are none.
    let te = "transfer-encoding: chunked\r\n";
    for body in [
        format!("{length:x}\n{BODY}\r\n0\r\n\r\n"),
        format!("{length:x}\r\n{BODY}0\r\n\r\n"),
        format!("{length:x}\r\n{BODY}\n0\r\n\r\n"),
        format!("0x{length:x}\r\n{BODY}\r\n0\r\n\r\n"),
        format!("-{length:x}\r\n{BODY}\r\n0\r\n\r\n"),
        format!("+{length:x}\r\n{BODY}\r\n0\r\n\r\n"),
        format!(" {length:x}\r\n{BODY}\r\n0\r\n\r\n"),
        format!("1000000000000000{length:x}\r\n{BODY}\r\n0\r\n\r\n"),
        format!("{length:x};a\nb\r\n{BODY}\r\n0\r\n\r\n"),
        format!("{length:x}\r\n{BODY}\r\n0\r\nbad trailer\r\n\r\n"),
        format!("{length:x}\r\n{BODY}\r\n0\r\ncontent-length : 5\r\n\r\n"),
        format!("\r\n{BODY}\r\n0\r\n\r\n"),
        format!("g\r\n{BODY}\r\n0\r\n\r\n"),
    ] {
        cases.push((te.to_owned(), format!("{body}{SMUGGLED}")));
    }
    // Fields that no two servers read alike.
    let cl = format!("content-length: {length}\r\n");
    for field in [
        "x y: z\r\n",
        "x\0y: z\r\n",
        "x: a\0b\r\n",
        "x: a\u{1}b\r\n",
        ": empty\r\n",
        "no colon\r\n",
        "x: a\r\n folded\r\n",
        "x: a\nhost: other\r\n",
        "host: other\r\n",
        "authorization: Bearer other\r\n",
        "content-type: text/plain\r\n",
    ] {
        cases.push((format!("{cl}{field}"), BODY.to_owned()));
    }
    for (fields, body) in &cases {
        let mut client = gateway.client();
        // The gateway may have heard enough before all of it is sent.
        let _ = client.try_send(format!("{line}{usual}{fields}\r\n{body}"));
        let answer = client.answer();
        assert!(
            matches!(answer.status(), 400 | 413 | 501),
            "{}: {fields:?} {body:?}",
            answer.status()
        );
        // Nothing behind it on the connection is read as a request.
        client.gone();
        let victim = post_with("/v1/chat/completions", "x-stainless-victim: me\r\n", BODY);
        let answer = gateway.ask(victim);
        assert_eq!(answer.json()["victim"], "me", "after {fields:?} {body:?}");
    }
    assert_eq!(backend.count(), cases.len(), "only the victims came through");
    assert!(backend.requests().iter().all(|seen| seen.target() == "/v1/chat/completions"));
}

#[test]
fn a_field_that_only_looks_like_framing_frames_nothing() {
    let backend = echoing();
    let gateway = Setup::to(backend.url()).start();
    for field in ["transfer_encoding: chunked", "content_length: 13", "content-lenght: 13"] {
        let mut client = gateway.client();
        client.send(format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY_A}\r\n\
             {field}\r\n\r\nd\r\n{BODY}\r\n0\r\n\r\n"
        ));
        // Refused for want of a body; what follows is no request and is refused, too.
        loop {
            let answer = client.answer();
            assert_eq!(answer.status(), 400, "{field}");
            if answer.head.field("connection") == Some("close") {
                break;
            }
        }
        client.gone();
    }
    assert_eq!(backend.count(), 0);
}

#[test]
fn request_lines_that_nobody_reads_alike_are_refused() {
    let backend = echoing();
    let gateway = Setup::to(backend.url()).start();
    let rest = format!("host: gateway\r\nauthorization: Bearer {KEY_A}\r\n\r\n");
    for (line, statuses) in [
        ("GET  /v1/models HTTP/1.1", &[400][..]),
        ("GET /v1/models  HTTP/1.1", &[400]),
        ("GET\t/v1/models\tHTTP/1.1", &[400]),
        ("GET /v1/models", &[400]),
        ("GET /v1/models HTTP/1.2", &[400, 505]),
        ("GET /v1/models HTTP/2.0", &[400, 505]),
        ("GET /v1/models HTTP/0.9", &[400, 505]),
        ("GET /v1/models http/1.1", &[400]),
        ("GET /v1/mod els HTTP/1.1", &[400]),
        ("GET v1/models HTTP/1.1", &[400]),
        ("GET /v1/models#x HTTP/1.1", &[400]),
        ("GET http:///v1/models HTTP/1.1", &[400]),
        ("GET ftp://gateway/v1/models HTTP/1.1", &[400]),
        ("GET http://other/v1/models HTTP/1.1", &[400]),
        ("CONNECT gateway:80 HTTP/1.1", &[400, 405, 501]),
        ("TRACE / HTTP/1.1", &[400, 405, 501]),
        ("PRI * HTTP/2.0", &[400, 405, 505]),
        ("\0GET /v1/models HTTP/1.1", &[400]),
    ] {
        let mut client = gateway.client();
        let _ = client.try_send(format!("{line}\r\n{rest}"));
        let answer = client.answer();
        assert!(statuses.contains(&answer.status()), "{}: {line:?}", answer.status());
        client.gone();
    }
    // A full URL is a request like any other.
    let answer = gateway.ask(format!("GET http://gateway/v1/models HTTP/1.1\r\n{rest}"));
    assert_eq!(answer.status(), 200);
    let mut client = gateway.client();
    let _ = client.try_send(format!("GET /{} HTTP/1.1\r\n{rest}", "a".repeat(9_000)));
    assert_eq!(client.answer().status(), 414);
    let mut client = gateway.client();
    let _ = client.try_send(format!("GET / HTTP/1.1\r\n{}{rest}", "x: y\r\n".repeat(200)));
    assert_eq!(client.answer().status(), 431);
    let mut client = gateway.client();
    let _ = client.try_send(format!("GET / HTTP/1.1\r\nx: {}\r\n{rest}", "y".repeat(70_000)));
    assert_eq!(client.answer().status(), 431);
    assert_eq!(backend.count(), 0);
}

#[test]
fn paths_that_mean_two_things_reach_nobody() {
    let backend = Backend::kind();
    let config = format!(
        "{}pools: {{ p: {{ backends: [ {{ url: '{}/base' }} ] }} }}\nroutes:\n\
         \x20 - {{ name: default, pool: p }}\n{}",
        server(""),
        backend.url(),
        people()
    );
    let gateway = Gateway::run(&config);
    for path in [
        "/v1/../admin",
        "/v1/files/..",
        "/v1/./files",
        "/v1//files",
        "/v1/%2e%2e/admin",
        "/v1/files%2f..%2fadmin",
        "/v1/files%5c..",
        "/v1\\files",
        "/v1/files%00",
        "/v1/files%zz",
        "/v1/%2E%2e/x",
    ] {
        let status = gateway.ask(get(path)).status();
        assert!(matches!(status, 400 | 404), "{status}: {path}");
    }
    assert_eq!(backend.count(), 0);
    assert_eq!(gateway.ask(get("/v1/files/f-1?limit=2&after=%2F")).status(), 200);
    assert_eq!(backend.last().target(), "/base/v1/files/f-1?limit=2&after=%2F");
}

#[test]
fn answers_that_can_be_read_two_ways_are_a_502() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for head in [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ncontent-length: 2x\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx: y\r\n folded\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\nno colon\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
        "HTTP/1.1 99 Low\r\ncontent-length: 0\r\n\r\n",
        "HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        "SSH-2.0-OpenSSH_9.2\r\n\r\n",
        "{\"no\":\"http\"}\r\n\r\n",
    ] {
        let mut client = gateway.client();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(head);
        let answer = client.answer();
        assert_eq!(answer.status(), 502, "{head:?}");
        assert_eq!(answer.code(), "backend_protocol", "nothing of it passes");
        peer.gone();
    }
}

#[test]
fn what_stands_behind_an_answer_is_nobodys_next_answer() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let poison = json(200, "{\"poison\":true}");
    for answer in [
        [json(200, REPLY), poison.clone()].concat(),
        [STREAM_HEAD.as_bytes(), &chunk(DONE), LAST_CHUNK.as_bytes(), &poison].concat(),
        [&b"HTTP/1.1 204 No Content\r\n\r\n"[..], &poison].concat(),
    ] {
        let mut client = gateway.client();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(answer);
        assert!(client.answer().whole);
        // The connection is not used again; the next request goes on another.
        peer.gone();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(json(200, REPLY));
        assert_eq!(client.answer().text(), REPLY);
        client.quiet();
        client.fin();
        peer.fin();
    }
    // Poison that comes later, on an idle connection.
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
    peer.send(&poison);
    peer.gone();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
}

#[test]
fn fields_of_one_hop_stay_on_it() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let fields = "connection: x-stainless-secret, keep-alive\r\nx-stainless-secret: 1\r\n\
                  keep-alive: timeout=5\r\nproxy-authorization: Basic x\r\nte: trailers\r\n\
                  upgrade: h2c\r\nhttp2-settings: x\r\nproxy: http://evil\r\n\
                  x-forebay-route: forged\r\nx-stainless-lang: python\r\n";
    let mut client = gateway.client();
    client.send(post_with("/v1/chat/completions", fields, BODY));
    let (mut peer, request) = backend.request();
    for name in [
        "x-stainless-secret",
        "keep-alive",
        "proxy-authorization",
        "te",
        "upgrade",
        "http2-settings",
        "proxy",
        "x-forebay-route",
    ] {
        assert_eq!(request.field(name), None, "{name}");
    }
    assert_eq!(request.field("x-stainless-lang"), Some("python"));
    peer.send(
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: x-inner\r\nx-inner: 1\r\n\
         keep-alive: timeout=5\r\nlocation: http://backend/\r\nwww-authenticate: Basic\r\n\
         x-forebay-backend: forged\r\nx-accel-redirect: /etc\r\nserver: engine\r\n\
         x-outer: 2\r\n\r\n{}",
    );
    let answer = client.answer();
    for name in ["x-inner", "keep-alive", "location", "www-authenticate", "x-accel-redirect"] {
        assert_eq!(answer.head.field(name), None, "{name}");
    }
    assert_eq!(answer.head.field("x-forebay-backend"), Some("u1"));
    assert_eq!(answer.head.field("x-outer"), Some("2"));
    assert_eq!(answer.head.field("server"), Some("engine"));
}
