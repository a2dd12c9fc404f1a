//! Goal: gateways that share a Redis share every limit: together they give what one would give, also
//! when one is killed, and when Redis is.
//! Method: a real redis-server and three gateways. Without redis-server there is a note, and under
//! `CI=true` a failure.

use std::process::{Child, Command, Stdio};

use rustix::process::Signal;

use crate::harness::*;

/// A redis-server that forgets everything; ended on drop.
struct Redis {
    child: Option<Child>,
    port: u16,
    folder: Folder,
}

impl Redis {
    fn start() -> Option<Redis> {
        let found = Command::new("redis-server").arg("--version").output().is_ok();
        if !found {
            let in_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
            assert!(!in_ci, "redis-server is not there: .ci/run installs it");
            eprintln!("note: redis-server is not installed, so the fleet is not tried");
            return None;
        }
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let mut redis = Redis { child: None, port, folder: Folder::new() };
        redis.again();
        Some(redis)
    }

    fn again(&mut self) {
        let child = Command::new("redis-server")
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no", "--dir"])
            .arg(&self.folder.0)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        self.child = Some(child);
        wait_for("redis", || std::net::TcpStream::connect(("127.0.0.1", self.port)).ok());
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A gateway of the fleet, whose tenant `a` has these limits.
fn member(redis: &Redis, name: &str, backend: &Backend, tenant: &str, share: &str) -> Gateway {
    let text = Setup::to(backend.url()).text();
    let text = text.replace("a: { }", &format!("a: {{ {tenant} }}"));
    let fleet = format!(
        "fleet: {{ redis: 'redis://127.0.0.1:{}', name: {name}, share: {share} }}\n",
        redis.port
    );
    Gateway::run(&(fleet + &text))
}

fn three(redis: &Redis, backend: &Backend, tenant: &str, share: &str) -> [Gateway; 3] {
    let gateways = ["one", "two", "three"].map(|name| member(redis, name, backend, tenant, share));
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 1.0);
    }
    gateways
}

#[test]
fn together_they_give_what_one_would_give() {
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    // One flows in every half a minute.
    let gateways = three(&redis, &backend, "rate_limit: { rpm: 2, burst: 2 }", "10%");
    let served = storm(&gateways, 4, 1, 4);
    assert_eq!(served, 2);
    assert_eq!(backend.count(), 2);
    let answer = gateways[0].ask(chat());
    let after = answer.head.field("retry-after").and_then(|value| value.parse::<u64>().ok());
    assert!(after.is_some_and(|after| (1..=60).contains(&after)), "{}", answer.head.text);
}

#[test]
fn a_larger_limit_is_given_out_whole_and_never_beyond() {
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    // 90 at once, and one and a half a second.
    let gateways = three(&redis, &backend, "rate_limit: { rpm: 90, burst: 90 }", "10%");
    let began = std::time::Instant::now();
    let served = storm(&gateways, 4, 1, 30);
    let inflow = began.elapsed().as_secs_f64() * 1.5;
    assert!(f64::from(served) <= 90.0 + inflow + 1.0, "{served} in {:?}", began.elapsed());
    // Blocks lie at gateways that need no more: two of them, a thirty-second each.
    assert!(served >= 80, "{served}");
}

#[test]
fn a_budget_is_shared_and_survives_members_that_are_killed() {
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    // Ten answers of twelve tokens.
    let tenant = "reserve: none, budget: { tokens: 120, per: month }";
    let mut gateways = three(&redis, &backend, tenant, "10%");
    let mut served = 0;
    for round in 0..4 {
        served += u32::from(gateways[round % 3].ask(chat()).status() == 200);
        gateways[round % 3].idle();
    }
    assert_eq!(served, 4);
    // Killed with what it holds; a successor knows nothing, and the fleet does.
    gateways[0].signal(Signal::KILL);
    gateways[0].ended();
    gateways[0] = member(&redis, "one", &backend, tenant, "10%");
    gateways[0].reaches("forebay_fleet_up", &[], 1.0);
    let mut last = 0;
    for round in 0..60 {
        if gateways[round % 3].ask(chat()).status() == 200 {
            served += 1;
            last = round;
        }
        gateways[round % 3].idle();
    }
    // The last answer of each may overrun what is left, as a request's size is known at its end.
    assert!((9..=12).contains(&served), "{served}, the last in round {last}");
}

#[test]
fn a_budget_that_one_has_spent_turns_all_of_them_to_the_cheaper_model() {
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    let budget = "reserve: none, budget: { tokens: 30, per: day, over: downgrade, to: small }";
    let text = Setup::to(backend.url()).text().replace("  m: { }", "  m: { }\n  small: { }");
    let text = text.replace("model: [m]", "model: [m, small]");
    let text = text.replace("a: { }", &format!("a: {{ {budget} }}"));
    let gateways = ["one", "two"].map(|name| {
        let url = format!("redis://127.0.0.1:{}", redis.port);
        Gateway::run(&format!("fleet: {{ redis: '{url}', name: {name} }}\n{text}"))
    });
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 1.0);
    }
    let downgraded = |gateway: &Gateway| {
        let answer = gateway.ask(chat());
        assert_eq!(answer.status(), 200, "{}", answer.text());
        answer.head.field("x-forebay-fallback").is_some()
    };
    wait_for("the first to be over", || downgraded(&gateways[0]).then_some(()));
    // The second learns of it with the first answer that it has to count.
    wait_for("the second to know", || downgraded(&gateways[1]).then_some(()));
    assert!(backend.count() < 20, "{}", backend.count());
}

#[test]
fn without_redis_each_has_its_share_and_what_that_was_is_charged_later() {
    let Some(mut redis) = Redis::start() else { return };
    let backend = Backend::kind();
    let gateways = three(&redis, &backend, "rate_limit: { rpm: 40, burst: 40 }", "25%");
    assert!(storm(&gateways, 4, 1, 1) > 0);
    redis.kill();
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 0.0);
    }
    let before = backend.count();
    // Ten each of their own, and what they hold (an eighth and what was asked for, at most).
    let alone = storm(&gateways, 4, 1, 6);
    assert!((25..=58).contains(&alone), "{alone}");
    assert_eq!(backend.count() - before, alone as usize);
    redis.again();
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 1.0);
        gateway.said("fleet_joined");
    }
    // This Redis knows nothing but what they owe it: about thirty of its forty.
    let rest = storm(&gateways, 4, 1, 20);
    assert!(rest <= 25, "{rest}");
}

#[test]
fn a_redis_that_comes_back_empty_is_told_what_was_spent() {
    let Some(mut redis) = Redis::start() else { return };
    let backend = Backend::kind();
    // Twenty answers of twelve tokens.
    let tenant = "reserve: none, budget: { tokens: 240, per: total }";
    let gateways = three(&redis, &backend, tenant, "0%");
    let spend = |answers: u32| -> u32 {
        let mut served = 0;
        for round in 0..answers {
            let gateway = &gateways[round as usize % 3];
            served += u32::from(gateway.ask(chat()).status() == 200);
            gateway.idle();
        }
        served
    };
    assert_eq!(spend(12), 12);
    redis.kill();
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 0.0);
    }
    redis.again();
    for gateway in &gateways {
        gateway.reaches("forebay_fleet_up", &[], 1.0);
    }
    // The last answer of each may overrun what is left, as a request's size is known at its end.
    let rest = spend(60);
    assert!((1..=11).contains(&rest), "{rest}");
}

#[test]
fn two_that_go_by_one_name_are_told_so() {
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    let tenant = "reserve: none, budget: { tokens: 6400, per: total }";
    let twins = ["one", "one"].map(|name| member(&redis, name, &backend, tenant, "5%"));
    for gateway in &twins {
        gateway.reaches("forebay_fleet_up", &[], 1.0);
    }
    wait_for("a word about it", || {
        for gateway in &twins {
            assert_eq!(gateway.ask(chat()).status(), 200);
            gateway.idle();
        }
        let told = |gateway: &Gateway| {
            gateway.errors().iter().any(|line| line.contains("fleet_name_taken"))
        };
        twins.iter().any(told).then_some(())
    });
}

#[test]
fn a_member_that_ends_in_order_gives_back_what_it_held() {
    const ANSWERS: u32 = 200;
    let Some(redis) = Redis::start() else { return };
    let backend = Backend::kind();
    let tenant = format!("reserve: none, budget: {{ tokens: {}, per: total }}", 12 * ANSWERS);
    let mut first = member(&redis, "one", &backend, &tenant, "5%");
    first.reaches("forebay_fleet_up", &[], 1.0);
    assert_eq!(first.ask(chat()).status(), 200);
    first.idle();
    first.signal(Signal::TERM);
    first.ended();
    let second = member(&redis, "two", &backend, &tenant, "5%");
    second.reaches("forebay_fleet_up", &[], 1.0);
    let mut client = second.client();
    let mut served = 0;
    while served <= ANSWERS {
        client.send(chat());
        if client.answer().status() != 200 {
            break;
        }
        served += 1;
        second.idle();
    }
    assert_eq!(served, ANSWERS - 1);
}
