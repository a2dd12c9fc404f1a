//! Goal: a client that leaves stops the GPU at once, and nothing of it stays behind.
//! Method: the backend's side waits for the close while it is itself silent.

use crate::harness::*;

/// Descriptors, once what was just closed is closed.
fn descriptors(gateway: &Gateway) -> f64 {
    gateway.metric("process_open_fds", &[])
}

#[test]
fn a_client_that_leaves_in_the_silence_ends_the_backends_work() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let base = descriptors(&gateway);
    for round in 0..50 {
        let mut client = gateway.client();
        client.send(if round % 5 == 4 { chat() } else { stream() });
        let (mut peer, _) = backend.request();
        if round % 5 < 2 {
            peer.send([STREAM_HEAD.as_bytes(), &chunk(token("a"))].concat());
            client.head();
            client.chunks_until("\"a\"");
        }
        if round % 2 == 0 {
            client.fin()
        } else {
            client.rst()
        }
        peer.gone();
    }
    gateway.settled(50);
    assert_eq!(gateway.metric("forebay_client_aborts_total", &[]) as u64, 50);
    assert_eq!(gateway.metric("forebay_upstream_failures_total", &[]) as u64, 0);
    // Fifty leaks would be fifty; the admin port may still hold the connections that asked above.
    wait_for("the descriptors of before", || (descriptors(&gateway) <= base + 2.0).then_some(()));
}

#[test]
fn what_was_generated_until_then_is_booked() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send(STREAM_HEAD);
    for word in 0..40 {
        peer.send(chunk(token(&format!(" word{word}"))));
    }
    client.head();
    client.chunks_until("word39");
    client.fin();
    peer.gone();
    gateway.settled(1);
    let (_, completion, estimated) = gateway.usage("a");
    assert!((30..=200).contains(&completion), "{completion}");
    assert!(estimated >= completion);
}

/// `openai-python` closes as soon as it has read `[DONE]`.
#[test]
fn leaving_right_after_the_last_event_is_success() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for reset in [false, true] {
        let mut client = gateway.client();
        client.send(stream());
        let (mut peer, _) = backend.request();
        peer.send(
            [STREAM_HEAD.as_bytes(), &chunk([&token("a"), FINISH, USAGE, DONE].concat())].concat(),
        );
        client.head();
        client.chunks_until("[DONE]");
        if reset { client.rst() } else { client.fin() }
    }
    gateway.settled(2);
    assert_eq!(gateway.metric("forebay_client_aborts_total", &[]) as u64, 0);
    assert_eq!(gateway.usage("a"), (14, 10, 0));
    gateway.log.count("\"whole\"", 2);
}

#[test]
fn a_half_closed_client_is_gone_unless_the_operator_says_otherwise() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(chat());
    let (mut peer, _) = backend.request();
    client.half_close();
    peer.gone();

    let server = "half_close: serve";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    for request in [chat(), stream_with_usage()] {
        let mut client = gateway.client();
        client.send(&request);
        client.half_close();
        let (mut peer, request) = backend.request();
        let streamed = request.json()["stream"] == true;
        peer.send(match streamed {
            true => [STREAM_HEAD.as_bytes(), &chunk(DONE), LAST_CHUNK.as_bytes()].concat(),
            false => json(200, REPLY),
        });
        let answer = client.answer();
        assert!(answer.whole);
        assert_eq!(answer.text(), if streamed { DONE } else { REPLY });
        client.gone();
    }
    // One that is really gone is seen as soon as we write to it, also then.
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    client.rst();
    peer.gone();
    gateway.idle();
}

#[test]
fn a_client_that_waits_for_a_slot_and_leaves_is_never_sent() {
    let backend = Listener::start();
    let gateway = Setup { backend: "slots: 1", ..Setup::to(backend.url()) }.start();
    let mut first = gateway.client();
    first.send(chat());
    let (mut peer, _) = backend.request();
    let mut second = gateway.client();
    second.send(chat());
    gateway.reaches("forebay_requests_in_flight", &[], 2.0);
    second.fin();
    gateway.reaches("forebay_requests_in_flight", &[], 1.0);
    peer.send(json(200, REPLY));
    assert_eq!(first.answer().text(), REPLY);
    // The slot is free again, and the next request on the connection is the next that was sent.
    first.send(post("/v1/chat/completions", r#"{"model":"m","third":3}"#));
    assert_eq!(peer.request().json()["third"], 3);
    backend.nobody();
}

#[test]
fn a_client_that_leaves_in_the_middle_of_its_body_costs_nothing() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    for reset in [false, true] {
        let mut client = gateway.client();
        let whole = post("/v1/chat/completions", vec![b' '; 300_000]);
        client.send(&whole[..200_000]);
        wait_for("the buffer", || {
            (gateway.metric("forebay_buffered_bytes", &[]) > 0.0).then_some(())
        });
        if reset {
            client.rst()
        } else {
            client.fin()
        }
        gateway.reaches("forebay_buffered_bytes", &[], 0.0);
    }
    gateway.idle();
    backend.nobody();
}
