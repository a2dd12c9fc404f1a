//! Goal: connections to backends are used again, never beyond their time, and a request that meets
//! a closed one is served all the same, but never by two.
//! Method: the test is the backend and counts its connections.

use crate::harness::*;

/// One chat over `client`, answered on `peer`.
fn exchange(client: &mut Client, peer: &mut Peer) {
    client.send(chat());
    peer.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
}

#[test]
fn a_connection_serves_one_request_after_another() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let mut peer = backend.accept();
    peer.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
    for _ in 0..20 {
        exchange(&mut client, &mut peer);
        // A stream in between.
        client.send(stream());
        peer.request();
        let events = chunk([&token("a"), FINISH, USAGE, DONE].concat());
        peer.send([STREAM_HEAD.as_bytes(), &events, LAST_CHUNK.as_bytes()].concat());
        assert!(client.answer().whole);
    }
    backend.nobody();
}

#[test]
fn the_end_of_a_stream_is_read_behind_the_clients_back() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk([&token("a"), FINISH, DONE].concat())].concat());
    assert!(client.answer().whole);
    // The last chunk comes a packet behind the last event, as it does from engines.
    peer.send(LAST_CHUNK);
    wait_for("the connection's next request", || {
        client.send(chat());
        let again = wait_for("a request", || {
            if peer.has_more() {
                return Some(true);
            }
            backend.waiting().then_some(false)
        });
        if again {
            peer.request();
            peer.send(json(200, REPLY));
        } else {
            // Not read yet: that request came on a connection which is not kept.
            let (mut other, _) = backend.request();
            other.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}");
        }
        assert_eq!(client.answer().status(), 200);
        again.then_some(())
    });
}

#[test]
fn a_backend_that_says_close_is_taken_at_its_word() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    for answer in [
        "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}",
        "HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ] {
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(answer);
        assert_eq!(client.answer().text(), "{}");
        peer.gone();
    }
}

/// A backend that closes an idle connection at the moment in which a request is sent on it.
#[test]
fn a_request_that_meets_a_closed_connection_is_served_once_and_nobody_notices() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    client.answer();
    for round in 0..100 {
        // Whether the gateway sees the close before it sends is a race, and must not matter.
        if round % 2 == 0 {
            peer.fin()
        } else {
            peer.rst()
        }
        client.send(post("/v1/chat/completions", format!("{{\"model\":\"m\",\"round\":{round}}}")));
        let (again, request) = backend.request();
        peer = again;
        assert_eq!(request.json()["round"], round);
        peer.send(json(200, REPLY));
        let answer = client.answer();
        assert_eq!(answer.text(), REPLY);
        assert_eq!(answer.head.field("x-forebay-attempt"), Some("1"));
    }
    backend.nobody();
    gateway.settled(101);
    assert_eq!(gateway.metric("forebay_upstream_failures_total", &[]) as u64, 0);
    assert_eq!(gateway.booked("a", 707, 505), 0);
}

/// The backend may have begun to generate: to send it again could cost twice.
#[test]
fn a_request_that_a_backend_has_taken_is_not_sent_again() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    client.answer();
    client.send(chat());
    peer.request();
    peer.fin();
    assert_eq!(client.answer().status(), 502);
    backend.nobody();
    gateway.settled(2);
    assert_eq!(gateway.metric("forebay_stale_resends_total", &[]) as u64, 0);
}

#[test]
fn a_request_that_was_begun_to_be_answered_is_not_sent_again() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    client.answer();
    client.send(chat());
    peer.request();
    peer.send("HTTP/1.1 200 OK\r\ncontent-le");
    peer.fin();
    assert_eq!(client.answer().status(), 502);
    backend.nobody();
}

#[test]
fn a_fresh_connection_that_dies_is_a_failure_and_no_reason_to_try_again() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (peer, _) = backend.request();
    peer.rst();
    assert_eq!(client.answer().status(), 502);
    backend.nobody();
    gateway.reaches("forebay_upstream_failures_total", &["backend=\"u1\""], 1.0);
}

#[test]
fn an_idle_connection_is_closed_before_the_backend_does_it() {
    let backend = Listener::start();
    let pool = "pool: { idle_for: 100ms }";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    client.answer();
    peer.gone();
}

#[test]
fn a_connection_that_the_backend_closed_is_not_used() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    let base = gateway.metric("process_open_fds", &[]);
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    client.answer();
    let with_idle = gateway.metric("process_open_fds", &[]);
    assert!(with_idle > base);
    peer.fin();
    // The gateway notices by itself.
    wait_for("the close", || (gateway.metric("process_open_fds", &[]) < with_idle).then_some(()));
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().status(), 200);
    gateway.settled(2);
    assert_eq!(gateway.metric("forebay_stale_resends_total", &[]) as u64, 0);
}

/// llama.cpp promises to keep alive and says FIN right behind a stream or an error; what comes after
/// it reads and forgets, so that nothing but the FIN itself tells that a request was lost.
#[test]
fn a_backend_that_closes_behind_an_answer_against_its_promise_loses_no_request() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    let mut former: Vec<Peer> = Vec::new();
    for round in 0..60 {
        client.send(if round % 3 == 0 { chat() } else { stream() });
        let (mut peer, _) = backend.request();
        if round % 3 == 0 {
            peer.send(json(400, "{\"error\":{\"message\":\"no\"}}"));
        } else {
            let events = chunk([&token("a"), FINISH, USAGE, DONE].concat());
            peer.send([STREAM_HEAD.as_bytes(), &events, LAST_CHUNK.as_bytes()].concat());
        }
        peer.half_close();
        former.push(peer);
        let answer = client.answer();
        assert!(answer.whole && matches!(answer.status(), 200 | 400), "{}", answer.text());
    }
    for mut peer in former {
        assert!(peer.rest().is_empty(), "a request was sent to who had closed");
    }
    gateway.settled(60);
    assert_eq!(gateway.metric("forebay_upstream_failures_total", &[]) as u64, 0);
}

#[test]
fn a_full_backend_is_waited_for_and_then_said_to_be_full() {
    let backend = Listener::start();
    let pool = "pool: { max: 1, wait: 200ms }";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    let mut first = gateway.client();
    first.send(chat());
    let (mut peer, _) = backend.request();
    let refused = gateway.ask(chat());
    assert_eq!((refused.status(), refused.code().as_str()), (503, "overloaded"));
    assert!(refused.head.field("retry-after").is_some());
    backend.nobody();
    peer.send(json(200, REPLY));
    assert_eq!(first.answer().text(), REPLY);
    // Who still waits when a place is free gets it, whichever shard it is on.
    let gateway = Setup { backend: "slots: 1", ..Setup::to(backend.url()) }.start();
    let mut first = gateway.client();
    first.send(chat());
    let (mut peer, _) = backend.request();
    let mut waiting: Vec<Client> = (0..6).map(|_| gateway.client()).collect();
    for client in &mut waiting {
        client.send(chat());
    }
    gateway.reaches("forebay_requests_in_flight", &[], 7.0);
    // Closing, so that each comes on a connection of its own.
    const CLOSING: &str = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}";
    peer.send(CLOSING);
    assert_eq!(first.answer().text(), "{}");
    for _ in 0..6 {
        let (mut peer, _) = backend.request();
        assert_eq!(gateway.metric("forebay_backend_in_flight", &[]) as u64, 1);
        peer.send(CLOSING);
    }
    for client in &mut waiting {
        assert_eq!(client.answer().text(), "{}");
    }
}

#[test]
fn a_backend_that_is_not_there_is_a_503() {
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound")
    };
    let gateway = Setup::to(format!("http://{nobody}")).start();
    let answer = gateway.ask(chat());
    assert_eq!((answer.status(), answer.code().as_str()), (503, "backend_unreachable"));
    assert!(answer.head.field("retry-after").is_some());
    let labels = ["backend=\"u1\"", "reason=\"connect\""];
    gateway.reaches("forebay_upstream_failures_total", &labels, 1.0);
    // Nothing of it says where we looked.
    assert!(!answer.text().contains(&nobody.port().to_string()), "{}", answer.text());
    let gateway = Setup::to("http://no-such-host.invalid".into()).start();
    assert_eq!(gateway.ask(chat()).status(), 503);
}

#[test]
fn another_backend_is_tried_where_the_route_says_so() {
    let nobody = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("bound")
    };
    let backend = Backend::kind();
    let urls = vec![format!("http://{nobody}"), backend.url()];
    let route = "retry: { attempts: 1, budget: 100% }";
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    for _ in 0..10 {
        assert_eq!(gateway.ask(chat()).text(), REPLY);
    }
    assert_eq!(backend.count(), 10);
    gateway.settled(10);
    assert!(gateway.metric("forebay_retries_total", &[]) >= 1.0);
}

#[test]
fn the_backend_sees_its_own_host_and_credential_and_none_of_the_clients() {
    let backend = Backend::kind();
    let url = backend.url() + "/base/v1/";
    let pool = "forward: [X-Team, X-Trace-*]";
    let with_key = "api_key: upstream-secret";
    let gateway = Setup { backend: with_key, pool, ..Setup::to(url) }.start();
    let fields = "x-api-key: sk-other\r\ncookie: session=1\r\nx-team: red\r\nx-trace-id: 7\r\n\
                  x-unknown: 1\r\nopenai-organization: org\r\nuser-agent: test/1\r\n\
                  traceparent: 00-11-22-01\r\nx-request-id: mine\r\naccept-encoding: gzip\r\n\
                  x-forwarded-for: 10.0.0.1\r\n";
    let mut ids = std::collections::HashSet::new();
    let mut client = gateway.client();
    for _ in 0..20 {
        client.send(post_with("/v1/chat/completions?beta=1", fields, r#"{"model":"m"}"#));
        let answer = client.answer();
        assert_eq!(answer.status(), 200, "{}", answer.text());
        let seen = backend.last();
        assert_eq!(seen.target(), "/base/v1/chat/completions?beta=1");
        assert_eq!(seen.field("host"), Some(&*backend.address.to_string()));
        assert_eq!(seen.field("authorization"), Some("Bearer upstream-secret"));
        for (name, value) in [("x-team", "red"), ("x-trace-id", "7"), ("user-agent", "test/1")] {
            assert_eq!(seen.field(name), Some(value));
        }
        assert_eq!(seen.field("traceparent"), Some("00-11-22-01"));
        assert_eq!(seen.field("x-correlation-id"), Some("mine"));
        for name in ["x-api-key", "cookie", "x-unknown", "openai-organization"] {
            assert_eq!(seen.field(name), None, "{name}");
        }
        let coding = seen.field("accept-encoding");
        assert!(matches!(coding, None | Some("identity")), "{coding:?}");
        assert!(!format!("{seen:?}").contains(KEY_A));
        let id = seen.field("x-request-id").expect("an id").to_owned();
        assert_ne!(id, "mine");
        assert_eq!(answer.head.field("x-request-id"), Some(id.as_str()));
        assert!(ids.insert(id));
    }
    // Without a key of its own a backend gets none.
    let gateway = Setup::to(backend.url()).start();
    gateway.ask(chat());
    assert_eq!(backend.last().field("authorization"), None);
    assert_eq!(backend.last().target(), "/v1/chat/completions");
}

#[test]
fn a_backend_that_refuses_our_credential_is_our_fault_and_not_the_clients() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for status in [401, 403] {
        let mut client = gateway.client();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(json(status, "{\"error\":\"bad key upstream-secret\"}"));
        let answer = client.answer();
        assert_eq!((answer.status(), answer.code().as_str()), (502, "backend_credential"));
        assert!(!answer.text().contains("secret"));
        drop(peer);
    }
    // Every other error is the client's to read.
    for status in [400, 404, 422, 429, 500, 503] {
        let mut client = gateway.client();
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(json(status, "{\"detail\":\"engine says no\"}"));
        let answer = client.answer();
        assert_eq!(answer.status(), status);
        assert_eq!(answer.text(), "{\"detail\":\"engine says no\"}");
        drop(peer);
    }
}

#[test]
fn backends_are_found_by_name_and_over_ipv6() {
    let backend = Backend::kind();
    let url = format!("http://localhost:{}", backend.address.port());
    let gateway = Setup::to(url).start();
    assert_eq!(gateway.ask(chat()).text(), REPLY);
    assert_eq!(
        backend.last().field("host"),
        Some(&*format!("localhost:{}", backend.address.port()))
    );
    let Some(backend) = Listener::on("[::1]:0") else {
        eprintln!("note: no IPv6 on this machine, that half is left out");
        return;
    };
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, request) = backend.request();
    assert_eq!(request.field("host"), Some(&*backend.address.to_string()));
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
}

/// An engine that refuses an upload by its head alone: what it says must reach the client, though
/// most of the body was never taken.
#[test]
fn an_answer_that_comes_before_the_body_was_read_is_passed_on() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "x".repeat(16_000_000));
    for stays in [true, false] {
        let mut client = gateway.client();
        client.send(post("/v1/chat/completions", &body));
        let mut peer = backend.accept();
        peer.next_head().expect("a head");
        peer.send(json(413, "{\"error\":\"too large for me\"}"));
        let peer = stays.then_some(peer);
        let answer = client.answer();
        assert_eq!(answer.status(), 413, "{}", answer.text());
        assert_eq!(answer.text(), "{\"error\":\"too large for me\"}");
        // With half a request in it, that connection serves nobody else.
        drop(peer);
        client.send(chat());
        let (mut peer, _) = backend.request();
        peer.send(json(200, REPLY));
        assert_eq!(client.answer().text(), REPLY);
        drop(peer);
    }
    gateway.settled(4);
}

#[test]
fn an_error_is_tried_elsewhere_and_the_last_one_is_told() {
    let backends: Vec<Backend> = [503, 429]
        .into_iter()
        .map(|status| Backend::answering(move |_| json(status, &format!("{{\"own\":{status}}}"))))
        .collect();
    let urls = backends.iter().map(Backend::url).collect();
    let route = "retry: { attempts: 1, budget: 100% }";
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    for request in [chat(), stream()] {
        let answer = gateway.ask(request);
        assert!(matches!(answer.status(), 429 | 503), "{}", answer.status());
        assert_eq!(answer.text(), format!("{{\"own\":{}}}", answer.status()));
        assert_eq!(answer.head.field("x-forebay-attempt"), Some("2"));
    }
    assert_eq!(backends.iter().map(Backend::count).collect::<Vec<_>>(), [2, 2]);
    // A fault of the client's own is nobody else's to repeat.
    let backends: Vec<Backend> =
        (0..2).map(|_| Backend::answering(|_| json(400, "{\"bad\":1}"))).collect();
    let urls = backends.iter().map(Backend::url).collect();
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    assert_eq!(gateway.ask(chat()).status(), 400);
    assert_eq!(backends.iter().map(Backend::count).sum::<usize>(), 1);
}

#[test]
fn clients_connections_stay_or_close_as_their_version_and_words_say() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    let text = |request: Vec<u8>| String::from_utf8(request).expect("ASCII");
    for (request, stays) in [
        (text(chat()), true),
        (
            text(post_with("/v1/chat/completions", "connection: close\r\n", r#"{"model":"m"}"#)),
            false,
        ),
        (text(chat()).replace("HTTP/1.1", "HTTP/1.0"), false),
        (text(chat()).replace("HTTP/1.1\r\n", "HTTP/1.0\r\nconnection: keep-alive\r\n"), true),
    ] {
        let mut client = gateway.client();
        client.send(&request);
        let answer = client.answer();
        assert_eq!(answer.text(), REPLY);
        if stays {
            client.send(chat());
            assert_eq!(client.answer().text(), REPLY, "{request}");
        } else {
            assert_eq!(answer.head.field("connection"), Some("close"), "{request}");
            client.gone();
        }
    }
}

#[test]
fn trailers_end_with_the_hop() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream_with_usage());
    let (mut peer, _) = backend.request();
    let event = chunk([&token("a"), FINISH].concat());
    peer.send(
        [STREAM_HEAD.as_bytes(), &event, b"0\r\nx-checksum: 1\r\nset-cookie: a=b\r\n\r\n"].concat(),
    );
    let answer = client.answer();
    assert!(answer.whole);
    client.quiet();
    client.send(chat());
    peer.request();
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().text(), REPLY);
}
