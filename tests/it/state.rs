//! Goal: what was spent is known after the process has ended, however it ended, and a file that
//! cannot be trusted is not overwritten.
//! Method: a budget of a few answers, and a gateway that is killed between them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;

use rustix::process::Signal;

use crate::harness::*;

/// A gateway with a budget of so many answers (12 tokens each), its state in `folder`.
fn budget(backend: &Backend, folder: &Folder, answers: u32) -> Gateway {
    budget_synced(backend.url(), folder, 12 * answers, "none", "group")
}

/// The same in tokens, with ways to reserve and to sync.
fn budget_synced(url: String, folder: &Folder, tokens: u32, reserve: &str, sync: &str) -> Gateway {
    let tenant = format!("reserve: {reserve}, budget: {{ tokens: {tokens}, per: total }}");
    let text = Setup::to(url).text();
    let text = text.replace("tenants: { a: { }", &format!("tenants: {{ a: {{ {tenant} }}"));
    let folder = folder.0.join("state").display().to_string();
    Gateway::run(&format!("state: {{ dir: '{folder}', sync: {sync} }}\n{text}"))
}

/// Tokens of `tokens` that tenant `a` has spent.
fn spent(gateway: &Gateway, tokens: u32) -> u32 {
    let share = gateway.metric("forebay_budget_spent_ratio", &["tenant=\"a\""]);
    (share * f64::from(tokens)).round() as u32
}

/// Waits until what was counted before is on disk.
fn written(gateway: &Gateway, before: f64) {
    wait_for("a commit", || {
        (gateway.metric("forebay_state_commits_total", &[]) > before).then_some(())
    });
}

#[test]
fn what_was_spent_survives_every_kind_of_end() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    const ANSWERS: u32 = 12;
    let mut served = 0;
    for round in 0..3 * ANSWERS {
        let mut gateway = budget(&backend, &folder, ANSWERS);
        let before = gateway.metric("forebay_state_commits_total", &[]);
        match gateway.ask(chat()).status() {
            200 => served += 1,
            429 => break,
            other => panic!("{other}"),
        }
        // A kill right behind a commit loses nothing; an orderly end writes what is left.
        if round % 2 == 0 {
            gateway.idle();
            written(&gateway, before);
            gateway.signal(Signal::KILL);
        } else {
            gateway.signal(Signal::TERM);
        }
        gateway.ended();
    }
    assert_eq!(served, ANSWERS);
    // Somebody else's budget is untouched.
    let gateway = budget(&backend, &folder, ANSWERS);
    let mut client = gateway.client();
    client.send(String::from_utf8(chat()).expect("ASCII").replace(KEY_A, KEY_B));
    assert_eq!(client.answer().status(), 200);
}

/// What has been said of budgets, in per cent.
fn alarms(gateway: &Gateway) -> Vec<u64> {
    let lines = gateway.errors();
    let events = lines.iter().filter_map(|line| serde_json::from_str(line).ok());
    let budgets = events.filter(|event: &serde_json::Value| event["event"] == "budget");
    let per_cent = |event: serde_json::Value| {
        assert_eq!(event["tenant"], "a");
        let share = &event["per_cent"];
        share.as_u64().or_else(|| share.as_str()?.parse().ok()).expect("per cent")
    };
    budgets.map(per_cent).collect()
}

#[test]
fn each_mark_of_a_budget_is_said_once_and_not_again_after_a_restart() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let spend = |gateway: &Gateway, answers: u32| {
        for _ in 0..answers {
            assert_eq!(gateway.ask(chat()).status(), 200);
            gateway.idle();
        }
    };
    let said = |gateway: &Gateway, marks: &[u64]| {
        wait_for("the marks", || (alarms(gateway).len() >= marks.len()).then_some(()));
        assert_eq!(alarms(gateway), marks);
    };
    // Ten answers are all of it.
    let mut gateway = budget(&backend, &folder, 10);
    spend(&gateway, 5);
    said(&gateway, &[50]);
    spend(&gateway, 3);
    said(&gateway, &[50, 80]);
    spend(&gateway, 1);
    gateway.signal(Signal::TERM);
    gateway.ended();
    assert_eq!(alarms(&gateway), [50, 80]);
    let gateway = budget(&backend, &folder, 10);
    spend(&gateway, 1);
    said(&gateway, &[100]);
    assert_eq!(gateway.ask(chat()).status(), 429);
    assert_eq!(alarms(&gateway), [100]);
}

#[test]
fn a_mark_that_is_passed_by_what_comes_back_is_said_once() {
    let backend = Listener::start();
    let text = Setup::to(backend.url()).text();
    let tenant = "reserve: max, budget: { tokens: 1000, per: total }";
    let gateway = Gateway::run(&text.replace("a: { }", &format!("a: {{ {tenant} }}")));
    let hold = |tokens: u32, marks: usize| {
        let mut client = gateway.client();
        let body = format!(r#"{{"model":"m","max_tokens":{tokens},"messages":[]}}"#);
        client.send(post("/v1/chat/completions", body));
        let mut peer = backend.accept();
        peer.request();
        wait_for("the mark", || (alarms(&gateway).len() >= marks).then_some(()));
        peer.send(json(200, REPLY));
        peer.fin();
        assert_eq!(client.answer().status(), 200);
        gateway.idle();
    };
    // Held, given back but for twelve tokens, and held again.
    for _ in 0..10 {
        hold(500, 1);
    }
    hold(800, 2);
    assert_eq!(alarms(&gateway).len(), 2);
}

#[test]
fn a_hundred_kills_under_load_charge_nothing_twice_and_forget_the_last_moments_alone() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    // More than is ever asked for.
    const ANSWERS: u32 = 100_000;
    let (served, cut) = (AtomicU32::new(0), AtomicU32::new(0));
    for round in 0..100 {
        let mut gateway = budget(&backend, &folder, ANSWERS);
        let address = gateway.address;
        // Two clients that ask until the connection breaks, and a kill in the midst of it: sooner or
        // later, before, in and behind a commit.
        let (told, heard) = mpsc::channel();
        thread::scope(|scope| {
            for _ in 0..2 {
                let told = told.clone();
                let (served, cut) = (&served, &cut);
                scope.spawn(move || {
                    // It may be killed before it is asked anything.
                    let Ok(mut client) = Client::try_new(address) else { return };
                    while client.try_send(chat()) {
                        match client.try_answer() {
                            Some(200) => {
                                served.fetch_add(1, Ordering::Relaxed);
                                let _ = told.send(());
                            }
                            Some(other) => panic!("{other}"),
                            None => break,
                        }
                    }
                    cut.fetch_add(1, Ordering::Relaxed);
                });
            }
            drop(told);
            // A commit is due every two hundred answers or so.
            assert_eq!(heard.iter().take(round % 10 * 80).count(), round % 10 * 80);
            gateway.signal(Signal::KILL);
        });
        gateway.ended();
    }
    let gateway = budget(&backend, &folder, ANSWERS);
    let (served, cut) = (served.into_inner(), cut.into_inner());
    let charged = spent(&gateway, ANSWERS);
    // An answer that was cut off may have been charged.
    assert!(charged <= served + cut, "{charged} of {served} and {cut}");
    assert!(charged > 0, "nothing of {served} is remembered");
}

/// No wait for a commit here: whoever has the whole answer knows that it is on disk.
#[test]
fn with_sync_always_a_kill_right_behind_an_answer_forgets_nothing() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    const TOKENS: u32 = 1_000_000;
    let mut served = 0;
    for round in 0..24 {
        let mut gateway = budget_synced(backend.url(), &folder, TOKENS, "none", "always");
        for _ in 0..round % 4 {
            served += u32::from(gateway.ask(chat()).status() == 200);
        }
        let last = gateway.ask(if round % 2 == 0 { chat() } else { stream() });
        gateway.signal(Signal::KILL);
        served += u32::from(last.status() == 200);
        gateway.ended();
    }
    assert_eq!(served, 24 + 6 * (1 + 2 + 3));
    let gateway = budget_synced(backend.url(), &folder, TOKENS, "none", "always");
    assert_eq!(spent(&gateway, TOKENS), 12 * served);
}

#[test]
fn with_sync_always_what_is_reserved_is_on_disk_before_a_backend_is_asked() {
    let (backend, folder) = (Listener::start(), Folder::new());
    let asked = || post("/v1/chat/completions", r#"{"model":"m","messages":[],"max_tokens":500}"#);
    let before = {
        let mut gateway = budget_synced(backend.url(), &folder, 10_000, "max", "always");
        let mut client = gateway.client();
        client.send(asked());
        let (_peer, _) = backend.request();
        gateway.signal(Signal::KILL);
        gateway.ended();
        let gateway = budget_synced(backend.url(), &folder, 10_000, "max", "always");
        spent(&gateway, 10_000)
    };
    assert!((500..600).contains(&before), "{before}");
}

/// The answer stands complete in the gateway and its last bytes are not sent while they cannot be
/// vouched for; a store that goes on failing is not waited for.
#[test]
fn with_sync_always_a_full_disk_holds_answers_up_for_a_while_and_then_not() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let gateway = budget_synced(backend.url(), &folder, 10_000, "none", "always");
    assert_eq!(gateway.ask(chat()).status(), 200);
    let size = |most| {
        let limit = rustix::process::Rlimit { current: most, maximum: None };
        rustix::process::prlimit(Some(gateway.pid()), rustix::process::Resource::Fsize, limit)
            .expect("a child's limits are ours to set");
    };
    size(Some(0));
    // Given up after half a second of failures, and served then, as `unwritten: serve` has it.
    let answer = gateway.ask(chat());
    assert_eq!(answer.status(), 200);
    gateway.said("state_not_written");
    assert!(gateway.metric("forebay_state_failures_total", &[]) >= 5.0);
    size(None);
    gateway.said("state_written_again");
    assert_eq!(gateway.ask(stream()).status(), 200);
    assert_eq!(spent(&gateway, 10_000), 36);
}

#[test]
fn a_file_that_cannot_be_trusted_is_neither_used_nor_touched() {
    let (backend, folder) = (Backend::kind(), Folder::new());
    let file = folder.0.join("state/forebay.redb");
    let mut gateway = budget(&backend, &folder, 5);
    gateway.signal(Signal::TERM);
    gateway.ended();
    let junk = vec![b'x'; 100_000];
    std::fs::write(&file, &junk).expect("written");
    let state = format!("state: {{ dir: '{}' }}\n", folder.0.join("state").display());
    let config = folder.0.join("forebay.yaml");
    std::fs::write(&config, state + &Setup::to(backend.url()).text()).expect("written");
    let output = command(&["run", "--config"]).arg(&config).output().expect("it runs");
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(said.contains("forebay.redb") && said.contains("budgets"), "{said}");
    assert_eq!(std::fs::read(&file).expect("still there"), junk);
}

#[test]
fn a_full_disk_is_said_and_loses_nothing_once_there_is_room_again() {
    for unwritten in ["serve", "refuse"] {
        let (backend, folder) = (Backend::kind(), Folder::new());
        let folder_text = folder.0.join("state").display().to_string();
        let state = format!("state: {{ dir: '{folder_text}', unwritten: {unwritten} }}\n");
        let text = Setup::to(backend.url()).text();
        let tenant = "reserve: none, budget: { tokens: 120, per: total }";
        let text = text.replace("a: { }", &format!("a: {{ {tenant} }}"));
        let mut gateway = Gateway::run(&(state + &text));
        let size = |most| {
            let limit = rustix::process::Rlimit { current: most, maximum: None };
            rustix::process::prlimit(Some(gateway.pid()), rustix::process::Resource::Fsize, limit)
                .expect("a child's limits are ours to set");
        };
        let mut served = u32::from(gateway.ask(chat()).status() == 200);
        gateway.idle();
        // Every write to a file fails from here on.
        size(Some(0));
        served += u32::from(gateway.ask(chat()).status() == 200);
        gateway.said("state_not_written");
        assert!(gateway.metric("forebay_state_failures_total", &[]) > 0.0);
        if unwritten == "refuse" {
            // Twenty tries to write are longer than it is borne with.
            wait_for("a lasting failure", || {
                (gateway.metric("forebay_state_failures_total", &[]) >= 20.0).then_some(())
            });
            let refused = gateway.ask(chat());
            assert_eq!((refused.status(), &*refused.code()), (503, "state_not_written"));
            assert_eq!(refused.head.field("retry-after"), Some("5"));
        } else {
            served += u32::from(gateway.ask(chat()).status() == 200);
        }
        assert!(served < 10, "{served}");
        let before = gateway.metric("forebay_state_commits_total", &[]);
        size(None);
        gateway.said("state_written_again");
        written(&gateway, before);
        gateway.signal(Signal::KILL);
        gateway.ended();
        let gateway = budget(&backend, &folder, 10);
        while gateway.ask(chat()).status() == 200 {
            served += 1;
            // Nothing is reserved here: the next is judged by what the last has been charged.
            gateway.idle();
        }
        assert_eq!(served, 10, "{unwritten}");
    }
}

#[test]
fn without_a_place_to_keep_them_budgets_are_said_to_be_forgotten() {
    let backend = Backend::kind();
    let text = Setup::to(backend.url()).text();
    let text = text.replace("a: { }", "a: { budget: { usd: 1, per: day } }");
    let gateway = Gateway::run(&text);
    assert!(gateway.errors().iter().any(|line| line.contains("NOT KEPT")));
    let gateway = Setup::to(backend.url()).start();
    assert!(!gateway.errors().iter().any(|line| line.contains("NOT KEPT")));
}
