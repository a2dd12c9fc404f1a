//! Goal: the runtime's edges hold: drivers, descriptors that run out, a bug in one request.
//! Method: limits set on the running process from outside.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use forebay::rt::{self, Driver};
use rustix::process::{Resource, Rlimit, prlimit};

use crate::harness::*;

#[test]
fn each_driver_that_this_kernel_has_serves_and_is_named() {
    let backend = Backend::kind();
    for (flag, name) in
        [("epoll", "epoll"), ("uring-plain", "io_uring"), ("uring", "io_uring-defer")]
    {
        let driver: &[&'static str] = match flag {
            "epoll" => &["--driver", "epoll"],
            "uring-plain" => &["--driver", "uring-plain"],
            _ => &["--driver", "uring"],
        };
        if flag != "epoll" && !has(driver) {
            eprintln!("note: this machine denies {flag}, its part is left out");
            continue;
        }
        let gateway = Setup { args: driver.to_vec(), ..Setup::to(backend.url()) }.start();
        let label = format!("driver=\"{name}\"");
        assert!(gateway.metric("forebay_driver_info", &[&label]) >= 1.0);
        assert!(gateway.errors()[0].contains(name), "{:?}", gateway.errors());
        for _ in 0..5 {
            assert_eq!(gateway.ask(chat()).text(), REPLY);
            assert!(gateway.ask(stream()).whole);
        }
    }
}

/// A bug in one request costs that request: its client and its backend are let go of, what it had
/// reserved stays charged (nobody knows what it has used), and everybody else goes on.
#[test]
fn a_request_that_panics_loses_only_itself_and_keeps_its_reservation() {
    let backend = Listener::start();
    let text = Setup::to(backend.url()).text().replace("shards: 2", "shards: 1");
    let tenant = "a: { rate_limit: { tpm: 5000, concurrency: 2 }, reserve: max }";
    let gateway = Gateway::run(&text.replace("a: { }", tenant));
    let body = r#"{"model":"m","messages":[],"max_tokens":1000,"stream":true}"#;
    let start = |client: &mut Client, peer: &mut Peer| {
        peer.send([STREAM_HEAD.as_bytes(), &chunk(token("one"))].concat());
        assert_eq!(client.head().status, 200);
        client.chunks_until("one");
    };
    let mut other = gateway.client();
    other.send(post("/v1/chat/completions", body));
    let (mut others, _) = backend.request();
    start(&mut other, &mut others);
    for (count, place) in ["reserved", "relay"].into_iter().enumerate() {
        let mut client = gateway.client();
        let field = format!("x-forebay-panic: {place}\r\n");
        client.send(post_with("/v1/chat/completions", &field, body));
        if place == "relay" {
            let (mut peer, _) = backend.request();
            peer.send([STREAM_HEAD.as_bytes(), &chunk(token("one"))].concat());
            peer.gone();
        }
        gateway.said("\"panic\"");
        gateway.reaches("forebay_panics_total", &[], (count + 1) as f64);
        gateway.reaches("forebay_tenant_concurrency", &["tenant=\"a\""], 1.0);
        gateway.log.until("\"end\":\"panicked\"");
    }
    others.send([chunk(token("two")), chunk(FINISH), chunk(DONE), LAST_CHUNK.into()].concat());
    assert!(other.chunks_until("[DONE]").contains("two"));
    gateway.idle();
    gateway.reaches("forebay_reserved_tokens", &["tenant=\"a\""], 0.0);
    other.send(post("/v1/chat/completions", r#"{"model":"m","messages":[],"max_tokens":1}"#));
    assert_eq!(other.chunk(), None);
    others.request();
    others.send(json(200, REPLY));
    let answer = other.answer();
    let left = answer.head.field("x-ratelimit-remaining-tokens").expect("a limit");
    let left: u64 = left.parse().expect("a number");
    // Two reservations of a thousand and more, of which 83 flow back in a second.
    assert!((2_500..4_000).contains(&left), "{left}");
}

/// The same below the gateway: whatever the task was.
#[test]
fn a_task_that_panics_loses_only_itself() {
    for driver in Driver::ALL.into_iter().filter(|driver| driver.probe().is_ok()) {
        let before = rt::PANICS.load(Ordering::Relaxed);
        let survivors = rt::block_on(driver, async {
            let done = Rc::new(Cell::new(0));
            for number in 0..9 {
                let done = done.clone();
                rt::spawn(async move {
                    // At once, later, and while what is left of the task is dropped.
                    let _bomb = (number % 3 == 2).then_some(Bomb);
                    if number % 3 > 0 {
                        rt::sleep(Duration::from_millis(1)).await;
                    }
                    assert!(number == 8, "on purpose");
                    done.set(done.get() + 1);
                });
            }
            let done_too = done.clone();
            rt::spawn(async move {
                rt::sleep(Duration::from_millis(1)).await;
                done_too.set(done_too.get() + 1);
            });
            while rt::PANICS.load(Ordering::Relaxed) < before + 9 || done.get() < 2 {
                rt::sleep(Duration::from_millis(1)).await;
            }
            done.get()
        });
        assert_eq!(survivors.expect("the driver works"), 2, "{}", driver.name());
    }
}

/// Panics when it is dropped in peace.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        assert!(std::thread::panicking(), "on purpose");
    }
}

/// Whether the process starts with this driver at all.
fn has(driver: &[&str]) -> bool {
    let folder = Folder::new();
    let file = folder.0.join("forebay.yaml");
    // A port that is taken ends it after the driver was tried.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    let text = Setup::to("http://127.0.0.1:9".into()).text();
    std::fs::write(&file, text.replacen("127.0.0.1:0", &address, 1)).expect("written");
    let output = command(&["run", "--config"]).arg(&file).args(driver).output().expect("it runs");
    !String::from_utf8_lossy(&output.stderr).contains("does not work here")
}

#[test]
fn without_descriptors_running_streams_live_and_new_clients_wait() {
    let backend = Listener::start();
    let gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(token("before"))].concat());
    client.head();
    client.chunks_until("before");
    let open = gateway.metric("process_open_fds", &[]) as u64;
    let limit = |current: u64| {
        let old = prlimit(
            Some(gateway.pid()),
            Resource::Nofile,
            Rlimit { current: Some(current), maximum: Some(1_000) },
        );
        old.expect("a child's limits are ours to set");
    };
    limit(open);
    // More clients than there are descriptors.
    let mut crowd: Vec<Client> = (0..30).map(|_| gateway.client()).collect();
    for one in &mut crowd {
        one.send(get("/v1/models"));
    }
    for number in 0..200 {
        let event = token(&format!("w{number}"));
        peer.send(chunk(&event));
        assert_eq!(client.chunks_until("\n\n"), event);
    }
    // To wait for a client that is behind takes a descriptor more: it is done without.
    let event = token(&"x".repeat(1000));
    let bytes = chunk(&event).repeat(20_000);
    let taken = peer.send_until_stalled(&bytes, Duration::from_millis(300));
    assert!(taken < bytes.len(), "{taken} bytes were taken for a client that reads nothing");
    let writer = std::thread::spawn(move || {
        peer.send(&bytes[taken..]);
        peer
    });
    let mut came = 0;
    while came < event.len() * 20_000 {
        came += client.chunk().expect("the stream lives").len();
    }
    let mut peer = writer.join().expect("no panic");
    limit(1_000);
    // Now they are served, in the order that the kernel kept.
    for one in &mut crowd {
        assert_eq!(one.answer().status(), 200);
    }
    peer.send([chunk(DONE), LAST_CHUNK.into()].concat());
    client.chunks_until("[DONE]");
}

#[test]
fn the_bound_on_connections_closes_what_is_beyond_it() {
    let backend = Backend::kind();
    let server = "bounds: { connections: 5 }";
    let gateway = Setup { server, ..Setup::to(backend.url()) }.start();
    let mut held: Vec<Client> = (0..5)
        .map(|_| {
            let mut client = gateway.client();
            client.send(get("/v1/models"));
            assert_eq!(client.answer().status(), 200);
            client
        })
        .collect();
    gateway.client().gone();
    held.pop().expect("five").fin();
    gateway.reaches("forebay_connections", &[], 4.0);
    assert_eq!(gateway.ask(chat()).status(), 200);
    for client in &mut held {
        client.send(chat());
        assert_eq!(client.answer().text(), REPLY);
    }
}

#[test]
fn clients_that_come_and_go_leave_no_descriptor_behind() {
    let backend = Backend::kind();
    let gateway = Setup::to(backend.url()).start();
    gateway.ask(chat());
    gateway.reaches("forebay_connections", &[], 0.0);
    let open = || gateway.metric("process_open_fds", &[]);
    let base = open();
    for number in 0..300 {
        let mut client = gateway.client();
        match number % 6 {
            0 => client.fin(),
            1 => client.rst(),
            2 => {
                client.send("GET /v1");
                client.fin();
            }
            3 => {
                client.send("rubbish\r\n\r\n");
                client.answer();
            }
            4 => {
                client.send(chat());
                client.answer();
                client.rst();
            }
            _ => {
                client.send(stream());
                client.rst();
            }
        }
    }
    gateway.reaches("forebay_connections", &[], 0.0);
    // Idle backend connections, one for each shard at most a few, are not a leak.
    wait_for("the descriptors of before", || (open() <= base + 20.0).then_some(()));
}
