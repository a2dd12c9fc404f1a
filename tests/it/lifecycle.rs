//! Goal: starting, reloading and stopping lose nothing and hide nothing.
//! Method: signals and the admin port against a process that is serving.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::process::Signal;

use crate::harness::*;

/// Runs `forebay check` on a configuration: its status and what it says.
fn check(config: &str) -> (bool, String) {
    let folder = Folder::new();
    let file = folder.0.join("forebay.yaml");
    std::fs::write(&file, config).expect("written");
    let output = command(&["check", "--config"]).arg(&file).output().expect("it runs");
    (output.status.success(), String::from_utf8(output.stderr).expect("UTF-8"))
}

#[test]
fn check_names_every_problem_at_once_with_its_place_and_binds_nothing() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("bound");
    let good = Setup::to("http://127.0.0.1:9".into()).text();
    let good = good.replacen("127.0.0.1:0", &taken.to_string(), 1);
    let (fine, said) = check(&good);
    assert!(fine, "{said}");
    assert!(said.contains("fine"), "{said}");

    let bad = "server: { listen: '127.0.0.1:0', shrads: 2 }
pools:
  p: { backends: [ { name: u1, url: 'ftp://x' } ], timeouts: { chunk: 10 } }
routes:
  - { name: chat, match: { model: [m] }, pool: q, strategy: least-request }
  - { name: chat, pool: p }
keys: [ { id: k, tenant: nobody, sha256: abc } ]
";
    let (fine, said) = check(bad);
    assert!(!fine);
    for part in [
        "forebay.yaml:1:",
        "shrads",
        "shards",
        "forebay.yaml:3:",
        "ftp",
        "chunk",
        "forebay.yaml:5:",
        "`q`",
        "least-requests",
        "forebay.yaml:6:",
        "forebay.yaml:7:",
        "nobody",
        "sha256",
    ] {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }
    assert!(said.matches("error:").count() >= 7, "{said}");
    let last = said.trim_end().lines().last().unwrap_or_default();
    assert!(last.contains("chat"), "the last line names the route: {last}");
    let (fine, said) = check("server: {");
    assert!(!fine && said.contains("forebay.yaml:1:"), "{said}");
    let missing = command(&["check", "--config", "/nowhere.yaml"]).output().expect("it runs");
    assert!(!missing.status.success());
}

#[test]
fn check_says_that_a_fleet_does_not_hold_limits_strictly() {
    let text = Setup::to("http://127.0.0.1:9".into()).text();
    let fleet = "fleet: { redis: 'redis://127.0.0.1:9', name: one }\n";
    let strict = |text: &str| text.replace("a: { }", "a: { rate_limit: { rpm: 9, strict: true } }");
    let (fine, said) = check(&(fleet.to_owned() + &strict(&text)));
    assert!(fine && said.contains("NOT ENFORCED") && said.contains("`strict`"), "{said}");
    for quiet in [strict(&text), fleet.to_owned() + &text] {
        let (fine, said) = check(&quiet);
        assert!(fine && !said.contains("NOT ENFORCED"), "{said}");
    }
}

#[test]
fn a_bad_file_at_the_start_ends_the_process_with_a_reason() {
    let folder = Folder::new();
    let file = folder.0.join("forebay.yaml");
    let text = Setup::to("http://127.0.0.1:9".into()).text();
    std::fs::write(&file, text.replace("pool: main", "pool: nowhere")).expect("written");
    let output = command(&["run", "--config"]).arg(&file).output().expect("it runs");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(said.trim_end().lines().last().is_some_and(|last| last.contains("chat")), "{said}");
}

#[test]
fn a_second_process_on_the_same_port_or_state_is_refused() {
    let backend = Backend::kind();
    let folder = Folder::new();
    let state = format!("state: {{ dir: '{}' }}\n", folder.0.join("state").display());
    let config = Setup::to(backend.url()).text() + &state;
    let gateway = Gateway::run(&config);
    let again = |config: String| {
        let file = folder.0.join("again.yaml");
        std::fs::write(&file, config).expect("written");
        let output = command(&["run", "--config"]).arg(&file).output().expect("it runs");
        (output.status.success(), String::from_utf8(output.stderr).expect("UTF-8"))
    };
    let address = gateway.address.to_string();
    let same_port = Setup::to(backend.url()).text().replacen("127.0.0.1:0", &address, 1);
    let (fine, said) = again(same_port);
    assert!(!fine && said.contains(&address), "{said}");
    let (fine, said) = again(config);
    assert!(!fine && said.contains("state"), "{said}");
    assert_eq!(gateway.ask(chat()).status(), 200);
}

#[test]
fn a_reload_under_load_loses_nothing_and_streams_live_on() {
    let (old, new) = (Backend::kind(), Backend::kind());
    let held = Listener::start();
    let config = |to: &Backend, stream_to: &Listener, alias: &str| {
        format!(
            "{}pools:\n  main: {{ backends: [ {{ name: u1, url: '{}' }} ] }}\n\
             \x20 held: {{ backends: [ {{ name: h1, url: '{}' }} ] }}\n\
             models: {{ m: {{ aliases: [{alias}] }} }}\nroutes:\n\
             \x20 - {{ name: chat, match: {{ model: [m] }}, pool: main }}\n\
             \x20 - {{ name: held, match: {{ model: [h] }}, pool: held }}\n{}",
            server(""),
            to.url(),
            stream_to.url(),
            people()
        )
    };
    let gateway = Arc::new(Gateway::run(&config(&old, &held, "before")));
    let mut client = gateway.client();
    client.send(post("/v1/chat/completions", r#"{"model":"h","stream":true}"#));
    let (mut peer, _) = held.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(token("before"))].concat());
    let head = client.head();
    client.chunks_until("before");

    let stop = Arc::new(AtomicBool::new(false));
    let served = Arc::new(AtomicUsize::new(0));
    let load: Vec<_> = (0..4)
        .map(|number| {
            let (gateway, stop, served) = (gateway.clone(), stop.clone(), served.clone());
            std::thread::spawn(move || {
                let mut client = gateway.client();
                while !stop.load(Ordering::Acquire) {
                    // Half of them on one connection, half on a new one each.
                    if number % 2 == 0 {
                        client = gateway.client();
                    }
                    client.send(chat());
                    let answer = client.answer();
                    assert_eq!(answer.status(), 200, "{}", answer.text());
                    assert_eq!(answer.text(), REPLY);
                    served.fetch_add(1, Ordering::AcqRel);
                }
            })
        })
        .collect();
    for round in 1..=10_u32 {
        let seen = served.load(Ordering::Acquire);
        let to = if round % 2 == 1 { &new } else { &old };
        gateway.configure(&config(to, &held, &format!("round-{round}")));
        if round % 3 == 0 {
            let (status, said) = gateway.admin("POST /reload");
            assert_eq!(status, 200, "{said}");
        } else {
            gateway.signal(Signal::HUP);
        }
        let labels = ["result=\"in_force\""];
        gateway.reaches("forebay_config_reloads_total", &labels, f64::from(round));
        // New requests see the new plan at once.
        let alias = format!("{{\"model\":\"round-{round}\"}}");
        assert_eq!(gateway.ask(post("/v1/chat/completions", alias)).status(), 200);
        wait_for("more requests", || (served.load(Ordering::Acquire) > seen + 20).then_some(()));
    }
    stop.store(true, Ordering::Release);
    for thread in load {
        thread.join().expect("every request was answered");
    }
    assert!(old.count() > 0 && new.count() > 0);
    // The stream began under the first plan, and goes on.
    peer.send([chunk(token("after")), chunk(DONE), LAST_CHUNK.into()].concat());
    let answer = client.rest(head);
    assert!(answer.whole && answer.text().contains("after"));
    gateway.idle();
    assert_eq!(gateway.metric("forebay_upstream_failures_total", &[]) as u64, 0);
}

#[test]
fn a_bad_reload_changes_nothing() {
    let backend = Backend::kind();
    let setup = Setup::to(backend.url());
    let gateway = setup.start();
    for bad in ["", "{", "routes: []", &setup.text().replace("pool: main", "pool: other")] {
        gateway.configure(bad);
        let (status, said) = gateway.admin("POST /reload");
        assert!((400..500).contains(&status), "{status} {said}");
        assert_eq!(gateway.ask(chat()).status(), 200);
    }
    gateway.signal(Signal::HUP);
    gateway.reaches("forebay_config_reloads_total", &["result=\"refused\""], 5.0);
    assert_eq!(gateway.metric("forebay_config_reloads_total", &["result=\"in_force\""]) as u64, 0);
    gateway.said("config_refused");
    assert_eq!(gateway.admin("GET /reload").0, 405);
    gateway.configure(&setup.text());
    assert_eq!(gateway.admin("POST /reload").0, 200);
}

/// Whether any socket of this machine listens on `port` of 127.0.0.1.
fn listens(port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
    let local = format!("0100007F:{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        fields.next() == Some(&local) && fields.nth(1) == Some("0A")
    })
}

#[test]
fn sigterm_lets_streams_end_and_takes_nothing_new() {
    let backend = Listener::start();
    let mut gateway = Setup::to(backend.url()).start();
    let mut idle = gateway.client();
    idle.send(get("/v1/models"));
    assert_eq!(idle.answer().status(), 200);
    let mut streaming = gateway.client();
    streaming.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(token("before"))].concat());
    let head = streaming.head();
    streaming.chunks_until("before");
    let mut waiting = gateway.client();
    waiting.send(chat());
    let (mut slow, _) = backend.request();

    gateway.signal(Signal::TERM);
    gateway.said("draining");
    // Idle connections are closed, new ones are not taken.
    idle.gone();
    let address = gateway.address;
    // Of every shard, also of one that has nothing left to do.
    wait_for("closed doors", || (!listens(address.port())).then_some(()));
    assert!(Client::try_new(address).is_err());
    assert_eq!(gateway.admin("GET /readyz").0, 503);
    assert_eq!(gateway.admin("GET /healthz").0, 200);
    // What runs goes on, chunk by chunk, and is whole.
    for word in ["one", "two", "three"] {
        peer.send(chunk(token(word)));
        streaming.chunks_until(word);
    }
    assert!(gateway.running());
    slow.send(json(200, REPLY));
    let answer = waiting.answer();
    assert_eq!(answer.text(), REPLY);
    assert_eq!(answer.head.field("connection"), Some("close"), "{}", answer.head.text);
    waiting.gone();
    peer.send([chunk([FINISH, DONE].concat()), LAST_CHUNK.into()].concat());
    let answer = streaming.rest(head);
    assert!(answer.whole);
    streaming.gone();
    assert!(gateway.ended().success());
    gateway.said("\"stopped\"");
}

#[test]
fn after_the_grace_what_still_runs_is_cut_visibly() {
    let backend = Listener::start();
    let mut gateway = Setup { server: "grace: 200ms", ..Setup::to(backend.url()) }.start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    peer.send([STREAM_HEAD.as_bytes(), &chunk(token("half"))].concat());
    let head = client.head();
    client.chunks_until("half");
    gateway.signal(Signal::TERM);
    assert!(!client.rest(head).whole);
    peer.gone();
    assert!(gateway.ended().success());
    // Told twice, it does not wait.
    let mut gateway = Setup::to(backend.url()).start();
    let mut client = gateway.client();
    client.send(stream());
    let (mut peer, _) = backend.request();
    gateway.signal(Signal::TERM);
    gateway.said("draining");
    gateway.signal(Signal::TERM);
    peer.gone();
    let answer = client.answer();
    assert_eq!(answer.status(), 503);
    assert!(gateway.ended().success());
}

#[test]
fn a_gateway_with_nothing_to_do_stops_at_once() {
    let backend = Backend::kind();
    for signal in [Signal::TERM, Signal::INT] {
        let mut gateway = Setup::to(backend.url()).start();
        gateway.ask(chat());
        gateway.signal(signal);
        assert!(gateway.ended().success());
        gateway.log.until("\"chat\"");
    }
}

/// The kernel takes the rings of a killed process apart after its end; its listeners live as long.
#[test]
fn a_restart_does_not_trip_over_the_process_that_was_killed() {
    let backend = Backend::kind();
    let mut config = Setup::to(backend.url()).text();
    let mut gateway = Gateway::run(&config);
    config = config.replacen("127.0.0.1:0", &gateway.address.to_string(), 1);
    for round in 0..10 {
        assert_eq!(gateway.ask(chat()).status(), 200);
        gateway.signal(if round % 2 == 0 { Signal::KILL } else { Signal::TERM });
        gateway.ended();
        gateway = Gateway::run(&config);
    }
}

/// `forebay demo` is the first thing that anybody runs: what it prints must work.
#[test]
fn the_demo_streams() {
    let mut child = command(&["demo", "--port", "0"])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("it runs");
    let said = Lines::of(child.stderr.take().expect("piped"));
    let line = said.until("curl -N").pop().expect("a line");
    let from = line.find("http://").expect("a URL") + 7;
    let address = line[from..].split('/').next().expect("an address").parse().expect("an address");
    let said = said.until("-d '").join("\n");
    let key = said.split("Bearer ").nth(1).and_then(|rest| rest.split('\'').next()).expect("a key");
    let body = said.rsplit("-d '").next().and_then(|rest| rest.split('\'').next()).expect("a body");
    let mut client = Client::new(address);
    client.send(
        String::from_utf8(post("/v1/chat/completions", body)).expect("ASCII").replace(KEY_A, key),
    );
    let answer = client.answer();
    assert_eq!(answer.status(), 200, "{}", answer.text());
    assert!(answer.whole && answer.text().ends_with(DONE), "{}", answer.text());
    assert!(answer.text().matches("\"content\"").count() > 5, "{}", answer.text());
    let _ = child.kill();
    let _ = child.wait();
}
