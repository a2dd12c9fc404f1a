//! Goal: a large body that nobody looks into passes as it comes, is held by nobody, and is never
//! taken for whole when it is not.
//! Method: both sides by hand, on `/v1/files`, where only the path is routed by.

use std::time::Duration;

use crate::harness::*;

const PATH: &str = "/v1/files";
const MIB: usize = 1024 * 1024;

fn gateway(urls: &[String], server_fields: &str, route: &str) -> Gateway {
    let backends: Vec<String> = urls.iter().map(|url| format!("{{ url: '{url}' }}")).collect();
    Gateway::run(&format!(
        "{}pools: {{ p: {{ backends: [ {} ] }} }}\nroutes:\n\
         \x20 - {{ name: files, match: {{ path: ['/v1/files*'] }}, pool: p, {route} }}\n{}",
        server(server_fields),
        backends.join(", "),
        people()
    ))
}

/// Bytes in which a lost, doubled or moved piece shows.
fn body(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

fn head_of_chunks() -> String {
    format!(
        "POST {PATH} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {KEY_A}\r\n\
         content-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
}

#[test]
fn a_large_body_passes_as_it_comes() {
    let backend = Listener::start();
    let gateway = gateway(&[backend.url()], "", "");
    let body = body(5 * MIB);
    let whole = post(PATH, &body);
    let head = whole.len() - body.len();
    let mut client = gateway.client();
    let mut sent = 0;
    let mut peer = None;
    // Each piece is with the backend before the client sends the next.
    for step in [head + 1, 1000, 100_000, MIB, 3 * MIB] {
        client.send(&whole[sent..(sent + step)]);
        let from = sent.max(head);
        sent += step;
        let peer = peer.get_or_insert_with(|| {
            let mut peer = backend.accept();
            let request = peer.next_head().expect("a head");
            assert_eq!(request.field("content-length"), Some(&*body.len().to_string()));
            peer
        });
        assert!(peer.take(sent - from) == whole[from..sent]);
    }
    assert_eq!(gateway.metric("forebay_buffered_bytes", &[]) as u64, 0);
    client.send(&whole[sent..]);
    let mut peer = peer.expect("accepted");
    assert!(peer.take(whole.len() - sent) == whole[sent..]);
    peer.send(json(200, "{\"id\":\"file-1\"}"));
    assert_eq!(client.answer().text(), "{\"id\":\"file-1\"}");
    // Both connections go on.
    client.send(get("/v1/files/file-1"));
    assert_eq!(peer.request().target(), "/v1/files/file-1");
    peer.send(json(200, "{}"));
    assert_eq!(client.answer().text(), "{}");
}

#[test]
fn a_body_of_unknown_length_stays_in_chunks() {
    let backend = Listener::start();
    let gateway = gateway(&[backend.url()], "", "");
    let mut client = gateway.client();
    client.send(head_of_chunks());
    let mut peer = backend.accept();
    let request = peer.next_head().expect("a head");
    assert_eq!(request.field("transfer-encoding"), Some("chunked"));
    assert_eq!(request.field("content-length"), None);
    for size in [1, 10, 1000, 100_000, MIB] {
        let piece = body(size);
        client.send(chunk(&piece));
        let mut came = Vec::new();
        while came.len() < size {
            came.extend(peer.take_chunk());
        }
        assert!(came == piece, "{size}");
    }
    // The next request is right behind the end, in the same packet.
    client.send([b"0\r\nx-trailer: 1\r\n\r\n", &get("/v1/files")[..]].concat());
    assert_eq!(peer.take_chunk(), b"");
    peer.send(json(200, "{\"whole\":1}"));
    assert_eq!(client.answer().text(), "{\"whole\":1}");
    assert_eq!(peer.request().target(), "/v1/files");
    peer.send(json(200, "{}"));
    assert_eq!(client.answer().text(), "{}");
}

#[test]
fn a_body_that_breaks_off_is_not_whole_for_the_backend() {
    let backend = Listener::start();
    let gateway = gateway(&[backend.url()], "bounds: { body: 4MiB }", "");
    let open = || {
        let mut client = gateway.client();
        client.send([head_of_chunks().as_bytes(), &chunk("first")].concat());
        let mut peer = backend.accept();
        peer.next_head().expect("a head");
        assert_eq!(peer.take_chunk(), b"first");
        (client, peer)
    };
    // The client leaves, in two ways.
    for reset in [false, true] {
        let (client, mut peer) = open();
        if reset {
            client.rst()
        } else {
            client.fin()
        }
        assert_eq!(peer.rest(), b"");
    }
    // It sends what is no chunk.
    let (mut client, mut peer) = open();
    client.send("zz\r\n");
    assert_eq!(client.answer().status(), 400);
    assert_eq!(peer.rest(), b"");
    client.gone();
    // It sends too much.
    let (mut client, mut peer) = open();
    let sender = std::thread::spawn(move || {
        let piece = chunk(body(100_000));
        while client.try_send(&piece) {}
        client
    });
    let came = peer.rest();
    assert!(came.len() < 5 * MIB && !came.ends_with(LAST_CHUNK.as_bytes()), "{}", came.len());
    drop(sender.join().expect("no panic"));
    // With a length: half of it.
    let mut client = gateway.client();
    let whole = post(PATH, body(2 * MIB));
    client.send(&whole[..MIB]);
    let mut peer = backend.accept();
    peer.next_head().expect("a head");
    client.fin();
    assert!(peer.rest().len() < 2 * MIB);
    gateway.idle();
}

#[test]
fn too_much_and_too_slow_are_told() {
    let backend = Listener::start();
    let fields = "bounds: { body: 2MiB }, timeouts: { head: 200ms, body_rate: 100MiB/s }";
    let gateway = gateway(&[backend.url()], fields, "");
    let mut client = gateway.client();
    client.send(&post(PATH, body(3 * MIB))[..500]);
    assert_eq!(client.answer().status(), 413);
    backend.nobody();
    let mut client = gateway.client();
    client.send([head_of_chunks().as_bytes(), &chunk("slow")].concat());
    let mut peer = backend.accept();
    peer.next_head().expect("a head");
    assert_eq!(client.answer().status(), 408);
    assert!(!peer.rest().ends_with(LAST_CHUNK.as_bytes()));
}

#[test]
fn a_backend_that_does_not_read_holds_the_client_back() {
    let backend = Listener::start();
    let gateway = gateway(&[backend.url()], "", "");
    let resident = gateway.metric("process_resident_memory_bytes", &[]);
    let body = body(60 * MIB);
    let whole = post(PATH, &body);
    let mut client = gateway.client();
    let taken = client.send_until_stalled(&whole, Duration::from_millis(700));
    assert!(taken < whole.len() / 2, "{taken} bytes were taken for a backend that reads nothing");
    let grown = gateway.metric("process_resident_memory_bytes", &[]) - resident;
    assert!(grown < 16e6, "{grown}");
    let sender = std::thread::spawn(move || {
        client.send(&whole[taken..]);
        client
    });
    let mut peer = backend.accept();
    assert!(peer.request().body == body);
    peer.send(json(200, "{}"));
    assert_eq!(sender.join().expect("no panic").answer().text(), "{}");
}

#[test]
fn an_answer_before_the_end_is_passed_on() {
    let backend = Listener::start();
    let gateway = gateway(&[backend.url()], "", "");
    let mut client = gateway.client();
    let whole = post(PATH, body(20 * MIB));
    client.send(&whole[..2 * MIB]);
    let mut peer = backend.accept();
    peer.next_head().expect("a head");
    peer.send(json(413, "{\"no\":\"too large for me\"}"));
    let answer = client.answer();
    assert_eq!((answer.status(), answer.text().as_str()), (413, "{\"no\":\"too large for me\"}"));
    // Neither connection is used again: both have half a body in them.
    drop(peer);
    client.gone();
}

/// What has passed cannot be sent again.
#[test]
fn a_body_that_has_passed_is_never_sent_to_another_backend() {
    let backends = [Listener::start(), Listener::start()];
    let urls: Vec<String> = backends.iter().map(Listener::url).collect();
    let gateway = gateway(&urls, "", "retry: { attempts: 1, budget: 100% }");
    let mut client = gateway.client();
    client.send(head_of_chunks());
    client.send(chunk("data"));
    let index = wait_for("a pick", || (0..2).find(|&index| backends[index].waiting()));
    let mut peer = backends[index].accept();
    peer.next_head().expect("a head");
    assert_eq!(peer.take_chunk(), b"data");
    client.send(LAST_CHUNK);
    assert_eq!(peer.take_chunk(), b"");
    peer.fin();
    assert_eq!(client.answer().status(), 502);
    backends[1 - index].nobody();
    gateway.settled(1);
    assert_eq!(gateway.metric("forebay_retries_total", &[]) as u64, 0);
}
