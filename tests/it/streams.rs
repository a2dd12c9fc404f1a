//! Goal: a stream passes as it comes, byte for byte, and never looks finished when it is not.
//! Method: both sides on one thread, so that the order of lines is the order of events.

use std::time::Duration;

use crate::harness::*;

/// A stream under way: its head has reached the client.
fn open(gateway: &Gateway, backend: &Listener, request: Vec<u8>) -> (Client, Peer, Head) {
    let mut client = gateway.client();
    client.send(request);
    let (mut peer, _) = backend.request();
    peer.send(STREAM_HEAD);
    peer.send(chunk(ROLE));
    let head = client.head();
    assert_eq!(head.status, 200, "{}", head.text);
    client.chunks_until("assistant");
    (client, peer, head)
}

#[test]
fn each_chunk_goes_out_before_the_next_comes_in() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for request in [stream(), stream_with_usage()] {
        let (mut client, mut peer, _) = open(&gateway, &backend, request);
        for number in 0..200 {
            let event = token(&format!("w{number}"));
            peer.send(chunk(&event));
            assert_eq!(client.chunks_until("\n\n"), event);
        }
        peer.send([chunk(FINISH), chunk(DONE), LAST_CHUNK.into()].concat());
        assert!(client.chunks_until("[DONE]").contains("\"stop\""));
        assert_eq!(client.chunk(), None);
        client.quiet();
    }
    gateway.idle();
}

#[test]
fn a_half_event_goes_out_too_when_nothing_is_hidden() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, _) = open(&gateway, &backend, stream_with_usage());
    let event = token("slow");
    for byte in event.as_bytes() {
        peer.send(chunk([*byte]));
        assert_eq!(client.chunk().expect("a chunk"), [*byte]);
    }
}

/// Recorded streams of real engines, cut into chunks of every kind of size.
#[test]
fn recorded_streams_pass_byte_for_byte() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recorded");
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut streams = 0;
    for entry in std::fs::read_dir(folder).expect("recordings") {
        let path = entry.expect("an entry").path();
        if path.extension().is_none_or(|kind| kind != "sse") {
            continue;
        }
        streams += 1;
        let body = std::fs::read(&path).expect("a recording");
        // What is behind [DONE] is nobody's business; the recordings end there or without one.
        for size in [1, 2, 3, 7, 61, 4096, usize::MAX] {
            let body = if size < 7 { &body[..body.len().min(1500)] } else { &body[..] };
            let mut client = gateway.client();
            client.send(stream_with_usage());
            let (mut peer, _) = backend.request();
            let mut bytes = STREAM_HEAD.as_bytes().to_vec();
            body.chunks(size.min(body.len())).for_each(|piece| bytes.extend(chunk(piece)));
            bytes.extend_from_slice(LAST_CHUNK.as_bytes());
            peer.send(bytes);
            let answer = client.answer();
            assert!(answer.whole, "{}", path.display());
            assert!(answer.body == body, "{} in chunks of {size}", path.display());
        }
    }
    assert!(streams >= 8, "{streams}");
}

#[test]
fn the_head_of_a_stream_tells_proxies_to_keep_their_hands_off() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (_client, _peer, head) = open(&gateway, &backend, stream());
    assert_eq!(head.field("content-type"), Some("text/event-stream"));
    assert_eq!(head.field("cache-control"), Some("no-cache"));
    assert_eq!(head.field("x-accel-buffering"), Some("no"));
    assert_eq!(head.field("x-forebay-backend"), Some("u1"));
    assert_eq!(head.field("x-forebay-route"), Some("chat"));
    assert_eq!(head.field("x-forebay-attempt"), Some("1"));
    assert!(head.field("x-request-id").is_some_and(|id| id.len() > 16));
    assert!(head.chunked());
}

#[test]
fn usage_is_asked_for_and_hidden_from_who_did_not_ask() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, request) = backend.request();
    assert_eq!(request.json()["stream_options"]["include_usage"], true);
    let events = [ROLE, &token("a"), FINISH, USAGE, DONE].concat();
    // In every cut, also in the middle of the event that must not be seen.
    for (round, cut) in [events.len(), 1, 10, 100].into_iter().enumerate() {
        if round > 0 {
            client.send(stream());
            peer.request();
        }
        let mut bytes = STREAM_HEAD.as_bytes().to_vec();
        events.as_bytes().chunks(cut).for_each(|piece| bytes.extend(chunk(piece)));
        bytes.extend_from_slice(LAST_CHUNK.as_bytes());
        peer.send(bytes);
        let answer = client.answer();
        assert!(answer.whole);
        assert_eq!(answer.text(), [ROLE, &token("a"), FINISH, DONE].concat(), "cut {cut}");
    }
    gateway.settled(4);
    assert_eq!(gateway.usage("a"), (28, 20, 0));
}

#[test]
fn usage_is_shown_to_who_asked_and_the_body_stays_as_it_was() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let body = r#"{ "stream_options" : {"include_usage":true , "x":1}, "stream":true,"model":"m"}"#;
    let mut client = gateway.client();
    client.send(post("/v1/chat/completions", body));
    let (mut peer, request) = backend.request();
    assert_eq!(request.text(), body);
    let events = [ROLE, &token("a"), FINISH, USAGE, DONE].concat();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(&events), LAST_CHUNK.as_bytes()].concat());
    let answer = client.answer();
    assert_eq!(answer.text(), events);
    assert_eq!(gateway.booked("a", 7, 5), 0);
}

#[test]
fn text_that_looks_like_usage_or_the_end_is_text() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let tricky = token("data: [DONE]\n\n {\"choices\":[],\"usage\":{\"prompt_tokens\":9999}} ");
    let (mut client, mut peer, _) = open(&gateway, &backend, stream());
    peer.send(chunk(&tricky));
    assert_eq!(client.chunks_until("\n\n"), tricky);
    peer.send([chunk([FINISH, USAGE, DONE].concat()), LAST_CHUNK.into()].concat());
    assert_eq!(client.chunks_until("[DONE]"), [FINISH, DONE].concat());
    assert_eq!(gateway.booked("a", 7, 5), 0);
}

#[test]
fn a_stream_without_usage_is_estimated() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, _) = open(&gateway, &backend, stream());
    for word in ["one", " two", " three"] {
        peer.send(chunk(token(word)));
    }
    peer.send([chunk([FINISH, DONE].concat()), LAST_CHUNK.into()].concat());
    client.chunks_until("[DONE]");
    gateway.settled(1);
    let (_, completion, estimated) = gateway.usage("a");
    assert!((1..=20).contains(&completion), "{completion}");
    assert!(estimated >= completion, "{estimated}");
}

#[test]
fn a_silent_backend_is_bridged_by_a_heartbeat() {
    let backend = Listener::start();
    let gateway = Setup { route: "heartbeat: 50ms", ..Setup::to(backend.url()) }.start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    // The backend has not said a byte.
    let head = client.head();
    assert_eq!((head.status, head.field("content-type")), (200, Some("text/event-stream")));
    assert_eq!(client.chunk().expect("a chunk"), b": ping\n");
    peer.send(STREAM_HEAD);
    assert_eq!(client.chunk().expect("a chunk"), b": ping\n");
    let event = token("here");
    peer.send(chunk(&event));
    let mut seen = client.chunks_until("\n\n");
    assert_eq!(seen.replace(": ping\n", ""), event);
    assert_eq!(client.chunk().expect("a chunk"), b": ping\n");
    // Inside an event there is none: what comes before its end is that event.
    let (first, second) = event.split_at(20);
    peer.send(chunk(first));
    peer.send(chunk(second));
    seen = client.chunks_until("\n\n");
    let from = seen.find("data:").expect("the event");
    assert_eq!(&seen[from..], event);
    peer.send([chunk([FINISH, DONE].concat()), LAST_CHUNK.into()].concat());
    client.chunks_until("[DONE]");
}

#[test]
fn an_error_after_a_heartbeat_is_an_event() {
    let backend = Listener::start();
    let gateway = Setup { route: "heartbeat: 50ms", ..Setup::to(backend.url()) }.start();
    let mut client = gateway.client();
    client.send(stream());
    let (peer, _) = backend.request();
    let head = client.head();
    assert_eq!(client.chunk().expect("a chunk"), b": ping\n");
    peer.fin();
    let answer = client.rest(head);
    assert!(answer.text().contains("data: {\"error\":"), "{}", answer.text());
    assert!(!answer.text().contains("[DONE]"));
    assert!(!answer.whole);
}

#[test]
fn a_backend_that_dies_in_mid_stream_leaves_an_unfinished_answer() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for reset in [false, true] {
        for request in [stream(), stream_with_usage()] {
            let (mut client, mut peer, head) = open(&gateway, &backend, request);
            peer.send(chunk(token("half")));
            client.chunks_until("half");
            if reset {
                peer.rst()
            } else {
                peer.fin()
            }
            let answer = client.rest(head);
            assert!(!answer.whole, "looks finished");
            let text = answer.text();
            let error = text.strip_prefix("data: ").expect("an event").trim();
            let error: serde_json::Value = serde_json::from_str(error).expect("JSON");
            assert_eq!(error["error"]["type"], "upstream_error");
        }
    }
    gateway.reaches("forebay_upstream_failures_total", &["backend=\"u1\""], 4.0);
    gateway.idle();
}

#[test]
fn a_break_inside_an_event_adds_nothing_to_it() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, head) = open(&gateway, &backend, stream_with_usage());
    peer.send(chunk("data: {\"choices\":[{\"del"));
    client.chunks_until("del");
    peer.fin();
    let answer = client.rest(head);
    assert_eq!(answer.text(), "");
    assert!(!answer.whole);
}

#[test]
fn malformed_chunks_in_mid_stream_end_it_visibly() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, head) = open(&gateway, &backend, stream());
    peer.send("zz\r\nrubbish\r\n");
    let answer = client.rest(head);
    assert!(answer.text().contains("backend_protocol"), "{}", answer.text());
    assert!(!answer.whole);
    peer.gone();
}

#[test]
fn an_answer_of_known_length_that_breaks_off_is_not_padded() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    let whole = json(200, REPLY);
    peer.send(&whole[..whole.len() - 10]);
    let head = client.head();
    peer.fin();
    let answer = client.rest(head);
    assert!(!answer.whole);
    assert_eq!(answer.text(), &REPLY[..REPLY.len() - 10]);
}

#[test]
fn a_death_before_the_first_byte_is_a_502() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for request in [chat(), stream()] {
        for reset in [false, true] {
            let mut client = gateway.client();
            client.send(&request);
            let (peer, _) = backend.request();
            if reset {
                peer.rst()
            } else {
                peer.fin()
            }
            let answer = client.answer();
            assert_eq!(answer.status(), 502);
            assert_eq!(answer.json()["error"]["type"], "upstream_error");
            // The client's connection is none the worse for it.
            client.send(get("/v1/models"));
            assert_eq!(client.answer().status(), 200);
        }
    }
}

#[test]
fn a_stream_is_over_at_its_last_event_whatever_the_backend_does_then() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, head) = open(&gateway, &backend, stream());
    peer.send(chunk([FINISH, USAGE, DONE].concat()));
    // The backend says neither a last chunk nor goodbye.
    let answer = client.rest(head);
    assert!(answer.whole);
    assert_eq!(answer.text(), [FINISH, DONE].concat());
    gateway.settled(1);
    assert_eq!(gateway.metric("forebay_client_aborts_total", &[]) as u64, 0);
    assert_eq!(gateway.usage("a"), (7, 5, 0));
    // The client's connection serves on.
    client.send(get("/v1/models"));
    assert_eq!(client.answer().status(), 200);
}

#[test]
fn streams_that_end_with_the_connection_are_told_apart_from_dead_ones() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for line in ["HTTP/1.0 200 OK", "HTTP/1.1 200 OK"] {
        for (events, whole) in [
            ([ROLE, &token("a"), FINISH, DONE].concat(), true),
            ([ROLE, &token("a"), FINISH].concat(), true),
            ([ROLE, &token("a")].concat(), false),
        ] {
            let mut client = gateway.client();
            client.send(stream_with_usage());
            let (mut peer, _) = backend.request();
            peer.send(format!("{line}\r\ncontent-type: text/event-stream\r\n\r\n{events}"));
            let head = client.head();
            assert!(head.chunked(), "{}", head.text);
            peer.fin();
            let answer = client.rest(head);
            assert_eq!(answer.whole, whole, "{line}: {events}");
            assert!(answer.text().starts_with(&events));
        }
    }
}

#[test]
fn a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let request = String::from_utf8(stream()).expect("ASCII").replace("HTTP/1.1", "HTTP/1.0");
    for dies in [false, true] {
        let mut client = gateway.client();
        client.send(&request);
        let (mut peer, _) = backend.request();
        peer.send([STREAM_HEAD.as_bytes(), &chunk(token("a"))].concat());
        let head = client.head();
        assert!(!head.chunked() && head.field("content-length").is_none(), "{}", head.text);
        assert_eq!(head.field("connection"), Some("close"));
        match dies {
            true => peer.rst(),
            false => peer.send([chunk([FINISH, DONE].concat()), LAST_CHUNK.into()].concat()),
        }
        let answer = client.rest(head);
        assert_eq!(answer.whole, !dies, "an orderly end is the only sign of a whole body");
        assert_eq!(answer.text().contains("[DONE]"), !dies);
    }
}

#[test]
fn interim_answers_are_skipped() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    peer.send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n");
    peer.send(json(200, REPLY));
    let head = client.any_head();
    assert_eq!(head.status, 200);
    assert_eq!(client.rest(head).text(), REPLY);
}

#[test]
fn a_first_token_that_is_late_is_a_504() {
    let backend = Listener::start();
    let pool = "timeouts: { first_token: 100ms }";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    // No head at all.
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    assert_eq!(client.answer().status(), 504);
    peer.gone();
    // A head, a role and comments are not a token.
    let (mut client, mut peer, head) = open(&gateway, &backend, stream());
    peer.send(chunk(": working\n\n"));
    let answer = client.rest(head);
    assert!(!answer.whole && answer.text().contains("backend_timeout"), "{}", answer.text());
    peer.gone();
    let labels = ["backend=\"u1\"", "reason=\"first_token_timeout\""];
    gateway.reaches("forebay_upstream_failures_total", &labels, 2.0);
}

#[test]
fn a_plain_answer_that_is_late_is_a_504() {
    let backend = Listener::start();
    let pool = "timeouts: { answer: 100ms, first_token: 1h }";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    let answer = client.answer();
    assert_eq!(answer.status(), 504);
    assert_eq!(answer.json()["error"]["code"], "backend_timeout");
    peer.gone();
}

#[test]
fn a_stream_that_stalls_is_cut_and_comments_do_not_count() {
    let backend = Listener::start();
    let pool = "timeouts: { chunk: 150ms }";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    for comments in [false, true] {
        let (mut client, mut peer, head) = open(&gateway, &backend, stream());
        peer.send(chunk(token("first")));
        client.chunks_until("first");
        // One comment after the other, for as long as they pass.
        let mut said = String::new();
        while comments && !said.contains("backend_timeout") {
            peer.try_send(chunk(": still here\n\n"));
            match client.chunk() {
                Some(data) => said.push_str(&String::from_utf8_lossy(&data)),
                None => break,
            }
        }
        assert!(!comments || said.contains("still here"));
        let answer = client.rest(head);
        assert!(!answer.whole);
        said.push_str(&answer.text());
        assert!(said.contains("backend_timeout"), "{said}");
    }
    let labels = ["backend=\"u1\"", "reason=\"chunk_timeout\""];
    gateway.reaches("forebay_upstream_failures_total", &labels, 2.0);
}

/// The chunk timer is the backend's: it does not run while the client is what is slow.
#[test]
fn a_slow_reader_holds_the_backend_back_and_loses_nothing() {
    const EVENTS: usize = 60_000;
    let backend = Listener::start();
    let pool = "timeouts: { chunk: 2s }";
    let route = "route=\"chat\"";
    let gateway = Setup { pool, ..Setup::to(backend.url()) }.start();
    let resident = gateway.metric("process_resident_memory_bytes", &[]);
    let (mut client, mut peer, head) = open(&gateway, &backend, stream_with_usage());
    let event = token(&"x".repeat(1000));
    let bytes = chunk(&event).repeat(EVENTS);
    // Longer than the chunk timer: what was taken without a reader is all that ever will be.
    let taken = peer.send_until_stalled(&bytes, Duration::from_millis(2500));
    assert!(taken < bytes.len() / 2, "{taken} bytes were taken for a client that reads nothing");
    let grown = gateway.metric("process_resident_memory_bytes", &[]) - resident;
    assert!(grown < 16e6, "{grown} bytes for one slow reader");
    let writer = std::thread::spawn(move || {
        peer.send(&bytes[taken..]);
        peer.send([chunk([FINISH, DONE].concat()), LAST_CHUNK.into()].concat());
        peer
    });
    let answer = client.rest(head);
    assert!(answer.whole, "{}", &answer.text()[answer.body.len().saturating_sub(300)..]);
    assert_eq!(answer.body.len(), event.len() * EVENTS + FINISH.len() + DONE.len());
    drop(writer.join().expect("no panic"));
    // That the client took nothing for 2.5 s was no gap of the backend's.
    gateway.settled(1);
    let bucket = |le: &str| gateway.metric("forebay_inter_token_seconds_bucket", &[route, le]);
    assert_eq!(bucket("le=\"2.5\"") as u64, bucket("le=\"+Inf\"") as u64);
}

#[test]
fn a_reader_that_takes_nothing_is_cut() {
    let backend = Listener::start();
    let server = "timeouts: { send: 300ms }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    let (client, mut peer, _) = open(&gateway, &backend, stream_with_usage());
    let bytes = chunk(token(&"x".repeat(1000)));
    // Until the gateway gives up on the client, and so on the backend.
    while peer.try_send(&bytes) {}
    gateway.idle();
    drop(client);
}

#[test]
fn a_backends_own_error_event_passes_and_counts() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let (mut client, mut peer, head) = open(&gateway, &backend, stream());
    let error = "data: {\"error\":{\"message\":\"out of memory\",\"code\":500}}\n\n";
    peer.send([chunk(error), chunk(DONE), LAST_CHUNK.into()].concat());
    let answer = client.rest(head);
    assert!(answer.whole);
    assert_eq!(answer.text(), [error, DONE].concat());
    let labels = ["backend=\"u1\""];
    gateway.reaches("forebay_upstream_failures_total", &labels, 1.0);
}

#[test]
fn a_retry_comes_before_the_first_content_and_never_after() {
    let backends = [Listener::start(), Listener::start()];
    let urls = backends.iter().map(Listener::url).collect();
    let route = "retry: { attempts: 1, budget: 100% }";
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    // Before: role chunk and death. The other backend answers, the client sees one stream.
    let mut client = gateway.client();
    client.send(stream_with_usage());
    let (first, second) = whichever(&backends);
    let mut peer = backends[first].accept();
    peer.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(ROLE)].concat());
    peer.fin();
    let (mut peer, _) = backends[second].request();
    let events = [ROLE, &token("second"), FINISH, DONE].concat();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(&events), LAST_CHUNK.as_bytes()].concat());
    let answer = client.answer();
    assert!(answer.whole);
    assert_eq!(answer.text(), events);
    assert_eq!(answer.head.field("x-forebay-attempt"), Some("2"));

    // After: the same death behind one token is the client's to see.
    drop(peer);
    let urls = backends.iter().map(Listener::url).collect();
    let gateway = Setup { urls, route, ..Setup::default() }.start();
    let mut client = gateway.client();
    client.send(stream_with_usage());
    let (first, second) = whichever(&backends);
    let (mut peer, _) = backends[first].request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk([ROLE, &token("a")].concat())].concat());
    let head = client.head();
    client.chunks_until("\"a\"");
    peer.fin();
    assert!(!client.rest(head).whole);
    backends[second].nobody();
}

/// Which backend was picked: the index of the one with a connection, then the other.
fn whichever(backends: &[Listener; 2]) -> (usize, usize) {
    wait_for("a pick", || {
        let picked = (0..2).find(|&index| backends[index].waiting())?;
        Some((picked, 1 - picked))
    })
}

/// More than the kernel holds between two sockets, so that part of it waits in the gateway.
fn long_chat(stream: bool) -> Vec<u8> {
    let text = "long ".repeat(6 << 20);
    let body = format!(
        "{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}],\
         \"stream\":{stream},\"stream_options\":{{\"include_usage\":true}}}}"
    );
    post("/v1/chat/completions", body)
}

#[test]
fn a_stream_that_begins_early_still_gets_the_rest_of_its_request() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(long_chat(true));
    let mut peer = backend.accept();
    let request = peer.next_head().expect("a head");
    let length: usize = request.field("content-length").expect("a length").parse().unwrap();
    // The first token goes out while most of the request is still on its way.
    peer.send([STREAM_HEAD.into(), chunk(ROLE), chunk(token("early"))].concat());
    assert_eq!(client.head().status, 200);
    client.chunks_until("early");
    assert!(peer.take(length).ends_with(b"}"));
    peer.send([chunk(FINISH), chunk(DONE), LAST_CHUNK.into()].concat());
    client.chunks_until("[DONE]");
    assert_eq!(client.chunk(), None);
    gateway.idle();
}

#[test]
fn a_connection_with_half_a_request_in_it_carries_no_other() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(long_chat(false));
    let mut peer = backend.accept();
    peer.next_head().expect("a head");
    peer.send(json(200, REPLY));
    assert_eq!(client.answer().status(), 200);
    // What is left of the first request would be taken for the beginning of the next.
    client.send(chat());
    let (mut other, _) = backend.request();
    other.send(json(200, REPLY));
    assert_eq!(client.answer().status(), 200);
    gateway.idle();
}
