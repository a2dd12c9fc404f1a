//! What the pure modules cost, in instructions and in nanoseconds.
//!
//! Instructions are the gate: they do not depend on who else uses the machine. Each case runs under
//! `valgrind --tool=cachegrind` with a short and a long repetition; the difference divided by the
//! extra repetitions is the cost of one, free of start-up. Nanoseconds are the fastest of many
//! short native batches, for the story.
//!
//! `forebay-micro` runs all cases, `forebay-micro NAME…` some, `--json` prints them for programs;
//! `forebay-micro --shards` says what a decision costs where many shards share the same limits.

use std::hint::black_box;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use forebay::pure::board::Registry;
use forebay::pure::body::{BodyKind, Edit, Inspector, splices};
use forebay::pure::fields::{Forward, Known, Name, Own};
use forebay::pure::h1::{
    Answer, BasePath, Framing, Limits, Method, Outgoing, Parse, Request, Response, Version,
    append_chunk, parse_request, parse_response, write_request, write_response,
};
use forebay::pure::limit::{Accounts, Amount, Windows};
use forebay::pure::plan::Plan;
use forebay::pure::policy::{Policy, Verdict};
use forebay::pure::relay::{End, Relay, Watch};
use forebay::pure::sse::Scanner;
use forebay::pure::tokens::{self, Vocabulary};
use forebay::pure::units::{self, Rng, RouteId};
use rustix::time::{ClockId, clock_gettime};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One thing that is measured: made once, then repeated.
struct Case {
    name: &'static str,
    what: &'static str,
    /// Repetitions under valgrind beyond the short run; big bodies need few.
    extra: u64,
    make: fn() -> Box<dyn FnMut()>,
}

const CASES: [Case; 22] = [
    Case {
        name: "request-head",
        what: "head of openai-python's chat request",
        extra: 2000,
        make: request_head,
    },
    Case { name: "response-head", what: "head of a vLLM stream", extra: 2000, make: response_head },
    Case {
        name: "body-small",
        what: "inspect a chat body of 294 bytes and estimate its prompt",
        extra: 2000,
        make: body_small,
    },
    Case {
        name: "head-up",
        what: "a small chat request's head: read, and written for the backend",
        extra: 2000,
        make: head_up,
    },
    Case {
        name: "head-down",
        what: "a small answer's head: read, and written for the client",
        extra: 2000,
        make: head_down,
    },
    Case {
        name: "body-1k",
        what: "inspect a 1 KiB chat body and splice include_usage",
        extra: 1000,
        make: || body(1 << 10),
    },
    Case { name: "body-32k", what: "the same, 32 KiB", extra: 100, make: || body(32 << 10) },
    Case { name: "body-1m", what: "the same, 1 MiB", extra: 4, make: || body(1 << 20) },
    Case {
        name: "sse-chunk",
        what: "scan one 200-byte chunk that came whole",
        extra: 5000,
        make: sse_chunk,
    },
    Case { name: "sse-cut", what: "the same chunk in two pieces", extra: 5000, make: sse_cut },
    Case { name: "sse-usage", what: "scan a usage event", extra: 2000, make: sse_usage },
    Case {
        name: "relay-chunk",
        what: "pass on one 200-byte event of a stream, in a chunk",
        extra: 5000,
        make: relay_chunk,
    },
    Case {
        name: "answer-small",
        what: "pass on a plain answer of 400 bytes and see what it used",
        extra: 2000,
        make: answer_small,
    },
    Case {
        name: "decision",
        what: "model, tenant, route and backend among 8, slot taken and given back",
        extra: 2000,
        make: decision,
    },
    Case {
        name: "limits",
        what: "six limits on requests and tokens: taken, told, settled",
        extra: 2000,
        make: || limits(1),
    },
    Case {
        name: "limits-32",
        what: "the same on one of 32 shards, which leases a 32nd at a time",
        extra: 2000,
        make: || limits(32),
    },
    Case {
        name: "estimate-4k",
        what: "estimate the tokens of a 4 KiB prompt",
        extra: 1000,
        make: || estimate(4 << 10),
    },
    Case {
        name: "exact-880",
        what: "count a chat prompt of 880 tokens by o200k_base",
        extra: 200,
        make: || exact("o200k_base", &[prose(880)]),
    },
    Case {
        name: "exact-32k",
        what: "the same, 32 KiB of prose and code",
        extra: 20,
        make: || exact("o200k_base", &[prose(usize::MAX)]),
    },
    Case {
        name: "exact-a-32k",
        what: "the same, 32 KiB of one letter",
        extra: 20,
        make: || exact("o200k_base", &["a".repeat(32 << 10)]),
    },
    Case {
        name: "exact-rnd-32k",
        what: "the same, 32 KiB of letters by chance",
        extra: 20,
        make: || exact("o200k_base", &chances(None)),
    },
    Case {
        name: "exact-words-32k",
        what: "the same, in words of eight that no cache has",
        extra: 20,
        make: || exact("o200k_base", &chances(Some(8))),
    },
];

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, times] = &arguments[..]
        && flag == "--repeat"
    {
        return repeat(name, times);
    }
    if arguments == ["--shards"] {
        for shards in [1, 2, 8, 32] {
            println!("{shards:>3} shards {:>8.1} ns of CPU a decision", shared(shards));
        }
        return ExitCode::SUCCESS;
    }
    let json =
        arguments.iter().position(|argument| argument == "--json").map(|at| arguments.remove(at));
    let mut results = Vec::new();
    for case in CASES
        .iter()
        .filter(|case| arguments.is_empty() || arguments.iter().any(|name| name == case.name))
    {
        let instructions = instructions(case);
        let ns = nanoseconds(case);
        match &instructions {
            Ok(count) => results
                .push(serde_json::json!({"name": case.name, "instructions": count, "ns": ns})),
            Err(why) => eprintln!("{}: {why}", case.name),
        }
        if json.is_none() {
            let count = instructions.map_or_else(|_| "-".to_owned(), |count| count.to_string());
            println!("{:<14}{count:>12} instructions{ns:>14.1} ns   {}", case.name, case.what);
        }
    }
    if json.is_some() {
        println!("{}", serde_json::json!({"schema": "forebay-micro-1", "cases": results}));
    }
    ExitCode::SUCCESS
}

/// The part that valgrind watches.
fn repeat(name: &str, times: &str) -> ExitCode {
    let case = CASES.iter().find(|case| case.name == name);
    let (Some(case), Ok(times)) = (case, times.parse::<u64>()) else { return ExitCode::FAILURE };
    let mut run = (case.make)();
    for _ in 0..times {
        run();
    }
    ExitCode::SUCCESS
}

fn instructions(case: &Case) -> Result<u64, String> {
    // What the first calls do once (grow a buffer, detect the CPU) is in both runs.
    const SHORT: u64 = 4;
    let count = |times: u64| -> Result<u64, String> {
        let this = std::env::current_exe().map_err(|error| error.to_string())?;
        let output = Command::new("valgrind")
            .args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"])
            .arg(this)
            .args(["--repeat", case.name, &times.to_string()])
            .output()
            .map_err(|error| format!("valgrind: {error}"))?;
        let text = String::from_utf8_lossy(&output.stderr);
        // ==123== I   refs:      1,234,567
        let line = text.lines().find(|line| line.contains("refs:"));
        let digits: String = line
            .and_then(|line| line.rsplit("refs:").next())
            .unwrap_or("")
            .chars()
            .filter(char::is_ascii_digit)
            .collect();
        digits
            .parse()
            .map_err(|_| format!("valgrind counted nothing: {}", text.lines().last().unwrap_or("")))
    };
    Ok((count(SHORT + case.extra)?.saturating_sub(count(SHORT)?)) / case.extra)
}

fn nanoseconds(case: &Case) -> f64 {
    let mut run = (case.make)();
    let batch = case.extra.max(4);
    let mut best = f64::INFINITY;
    let begun = Instant::now();
    while begun.elapsed().as_millis() < 150 {
        let start = Instant::now();
        for _ in 0..batch {
            run();
        }
        best = best.min(start.elapsed().as_nanos() as f64 / batch as f64);
    }
    best
}

fn request_head() -> Box<dyn FnMut()> {
    const HEAD: &[u8] = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.example:8080\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\nUser-Agent: OpenAI/Python 1.99.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 1.99.0\r\nX-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\nX-Stainless-Runtime-Version: 3.12.3\r\nAuthorization: Bearer sk-0123456789abcdef0123456789abcdef\r\nX-Stainless-Async: false\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\nContent-Length: 1024\r\n\r\n";
    let (limits, mut request) = (Limits::default(), Request::default());
    Box::new(move || {
        request.clear();
        let parsed = parse_request(black_box(HEAD), &limits, &mut request);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
    })
}

fn response_head() -> Box<dyn FnMut()> {
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ndate: Mon, 02 Mar 2026 10:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n";
    let (limits, mut response) = (Limits::default(), Response::default());
    Box::new(move || {
        response.clear();
        let parsed = parse_response(black_box(HEAD), &limits, Method::Post, &mut response);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
    })
}

/// What a shard does to a short question that it sends on as it came.
fn body_small() -> Box<dyn FnMut()> {
    const BODY: &[u8] = br#"{"model":"bench","user":"00000000","max_tokens":16,"temperature":0.7,"messages":[{"role":"system","content":"You are a helpful assistant."},{"role":"user","content":"3,14,159,2653,58979,323846,2643383,27950288,41971693,99375105 The forebay is the still water before the turbines.\nIt waits."}]}"#;
    Box::new(move || {
        let body = black_box(BODY);
        let mut inspector = Inspector::new(BodyKind::Chat);
        assert!(inspector.feed(body).is_ok());
        let Ok(inspected) = inspector.finish(body) else { panic!("the body is right") };
        assert!(inspected.require_model().is_ok());
        assert_eq!(black_box(inspected.model_str(body)).as_deref(), Some("bench"));
        assert!(tokens::prompt(inspected.parts.iter().map(|part| part.span.of(body))).0 > 50);
        let edit = Edit { model: None, ask_usage: false };
        assert!(black_box(splices(&inspected, body, &edit)).is_empty());
    })
}

/// As `Trip::send` does it.
fn head_up() -> Box<dyn FnMut()> {
    static NAMES: [Name; 3] =
        [Name::new("x-request-id"), Name::new("authorization"), Name::new("x-correlation-id")];
    const HEAD: &[u8] = b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:18201\r\nauthorization: Bearer sk-forebay-bench\r\ncontent-type: application/json\r\naccept: application/json\r\nuser-agent: forebay-bench\r\ncontent-length: 330\r\n\r\n";
    let (limits, mut request) = (Limits::default(), Request::default());
    let (base, forward) = (BasePath::default(), Forward::default());
    let mut out = Vec::new();
    Box::new(move || {
        let buf = black_box(HEAD);
        let parsed = parse_request(buf, &limits, &mut request);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
        out.clear();
        let Ok(target) = base.join(request.path(buf), request.query(buf)) else {
            panic!("the path is right")
        };
        let mut own = Own::default();
        own.say(&NAMES[0], black_box(b"req_0123456789abcdef0123456789ab"));
        own.quote(&NAMES[1], black_box(b"Bearer sk-of-the-backend"));
        if let Some(theirs) = request.field(buf, Known::XRequestId) {
            own.quote(&NAMES[2], theirs);
        }
        let head = Outgoing {
            method: request.method.name(buf),
            target,
            host: black_box("127.0.0.1:18301"),
            framing: request.framing,
            forward: &forward,
            own: &own,
        };
        write_request(&mut out, &head, buf, &request.fields);
        assert_eq!(black_box(&out).len(), 283);
    })
}

/// As `Trip::open` does it.
fn head_down() -> Box<dyn FnMut()> {
    static NAMES: [Name; 4] = [
        Name::new("x-request-id"),
        Name::new("x-forebay-route"),
        Name::new("x-forebay-backend"),
        Name::new("x-forebay-attempt"),
    ];
    const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n";
    let (limits, mut response) = (Limits::default(), Response::default());
    let mut out = Vec::new();
    Box::new(move || {
        let buf = black_box(HEAD);
        let parsed = parse_response(buf, &limits, Method::Post, &mut response);
        assert_eq!(black_box(parsed), Ok(Parse::Complete));
        out.clear();
        let mut own = Own::default();
        own.say(&NAMES[0], black_box(b"req_0123456789abcdef0123456789ab"));
        own.quote(&NAMES[1], black_box(b"main"));
        own.quote(&NAMES[2], black_box(b"pool/b0"));
        own.say(&NAMES[3], black_box(b"1"));
        let head = Answer {
            status: response.status,
            version: Version::Http11,
            framing: response.framing,
            keep_alive: black_box(true),
            own: &own,
        };
        write_response(&mut out, &head, buf, &response.fields);
        assert_eq!(black_box(&out).len(), 210);
    })
}

/// A chat body of about this many bytes: turns of 600 characters with escapes and some UTF-8.
fn body(size: usize) -> Box<dyn FnMut()> {
    const TURN: &str = "The forebay is the still water before the turbines.\\n\\nIt says \\\"slow down\\\" to the river: Stauraum, 前池, аванкамера. ";
    let mut text = String::from(
        "{\"model\":\"llama-3-70b\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"}",
    );
    let mut turns = ["user", "assistant"].iter().cycle();
    while text.len() + 200 < size {
        let length = (size - text.len() - 150).min(600);
        let mut content: String = TURN.chars().cycle().take(length).collect();
        while content.ends_with('\\') {
            content.pop();
        }
        text += &format!(
            ",{{\"role\":\"{}\",\"content\":\"{content}\"}}",
            turns.next().unwrap_or(&"user")
        );
    }
    text += "],\"temperature\":0.7,\"max_tokens\":512,\"stream\":true}";
    let body = text.into_bytes();
    Box::new(move || {
        let mut inspector = Inspector::new(BodyKind::Chat);
        let fed = inspector.feed(black_box(&body));
        assert!(fed.is_ok());
        let Ok(inspected) = inspector.finish(&body) else { panic!("the body is right") };
        let edit = Edit { model: None, ask_usage: true };
        assert!(!black_box(splices(&inspected, &body, &edit)).is_empty());
    })
}

const CHUNK: &[u8] = b"data: {\"id\":\"chatcmpl-00000000\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" a word or two, padded\"},\"finish_reason\":null}]}\n\n";
const USAGE: &[u8] = b"data: {\"id\":\"chatcmpl-00000000\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":100,\"total_tokens\":116}}\n\n";

fn scan(pieces: [&'static [u8]; 2]) -> Box<dyn FnMut()> {
    let mut scanner = Scanner::new();
    Box::new(move || {
        let mut events = 0;
        for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
            scanner.push(black_box(piece), |event| {
                black_box(&event);
                events += 1;
            });
        }
        assert_eq!(events, 1);
    })
}

fn sse_chunk() -> Box<dyn FnMut()> {
    scan([CHUNK, b""])
}

fn sse_cut() -> Box<dyn FnMut()> {
    scan([&CHUNK[..120], &CHUNK[120..]])
}

fn sse_usage() -> Box<dyn FnMut()> {
    scan([USAGE, b""])
}

/// As a shard does it for each read of a stream that has been running: the bytes come in a buffer
/// that may be edited, and go out behind whatever waits there.
fn relay_chunk() -> Box<dyn FnMut()> {
    let watch = Watch::Stream(Box::default());
    let mut relay = Relay::new(Framing::Chunked, Framing::Chunked, watch, false);
    let (mut wire, mut out) = (Vec::new(), Vec::new());
    append_chunk(&mut wire, CHUNK);
    Box::new(move || {
        out.clear();
        let pushed = relay.push(black_box(&mut wire), &mut out);
        assert!(pushed.is_ok_and(|(progress, used)| progress.content && used == wire.len()));
        assert_eq!(out.len(), wire.len());
    })
}

/// As a shard does it for a small answer: one read brings it whole, and its usage is booked.
fn answer_small() -> Box<dyn FnMut()> {
    let mut body = format!(
        "{{\"id\":\"chatcmpl-00000000\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\"content\":\"{}\"}},\"finish_reason\":\"stop\"}}],\"usage\":{{\"prompt_tokens\":16,\"completion_tokens\":16,\"total_tokens\":32}}}}",
        "x".repeat(150)
    )
    .into_bytes();
    let length = Framing::Length(body.len() as u64);
    let mut out = Vec::new();
    Box::new(move || {
        out.clear();
        let mut relay = Relay::new(length, length, Watch::Plain(Box::default()), false);
        let pushed = relay.push(black_box(&mut body), &mut out);
        assert!(pushed.is_ok_and(|(progress, _)| progress.end == Some(End::Whole)));
        let (seen, _) = black_box(relay).finish();
        assert!(black_box(seen).usage.is_some_and(|usage| usage.total == Some(32)));
    })
}

/// Six limits in force, each on requests and tokens: taken, told to the client, settled. As fast as
/// the limits allow, as time goes on.
fn limits(shards: usize) -> Box<dyn FnMut()> {
    let mut decide = Decide::new(&Arc::new(six_limits()), shards);
    let mut now = 1_000_000_000_000_u64;
    Box::new(move || {
        now += 100_000;
        decide.once(units::Instant::from_nanos(black_box(now)));
    })
}

/// A plan in which a request stands under six limits.
fn six_limits() -> Plan {
    let limits = "{ rpm: 1000000000, tpm: 1000000000000 }";
    let text = format!(
        "server: {{ listen: \"127.0.0.1:8080\" }}\npools: {{ p: {{ backends: [ {{ name: b, url: \"http://10.0.0.1:8000\" }} ] }} }}\nmodels: {{ m: {{ price: {{ input: 1, cached: 1, output: 1 }}, rate_limit: {limits} }} }}\nroutes: [ {{ name: r, match: {{ model: [m] }}, pool: p, rate_limit: {limits} }} ]\ntenants: {{ t: {{ rate_limit: {limits}, model_limits: {{ m: {limits} }} }} }}\nkeys: [ {{ id: k, tenant: t, sha256: \"{}\", rate_limit: {limits} }} ]\nglobal: {limits}\n",
        "ab".repeat(32)
    );
    let plan = Plan::build(&text, &|_| None, &|path| Err(path.to_owned()), &mut Registry::new());
    plan.unwrap_or_else(|problems| panic!("{problems:?}"))
}

/// One shard's decisions under six limits.
struct Decide {
    plan: Arc<Plan>,
    windows: Windows,
    accounts: Accounts,
    ticked: units::Instant,
}

impl Decide {
    fn new(plan: &Arc<Plan>, shards: usize) -> Decide {
        Decide {
            plan: Arc::clone(plan),
            windows: Windows::at(1_796_083_200, units::Instant::ZERO),
            accounts: Accounts::new(shards),
            ticked: units::Instant::ZERO,
        }
    }

    fn once(&mut self, now: units::Instant) {
        let Decide { plan, windows, accounts, ticked } = self;
        if now.since(*ticked) >= TICK {
            accounts.tick();
            *ticked = now;
        }
        let (Some(key), Some(model)) = (plan.key(&[0xab; 32]), plan.model("m")) else {
            panic!("both are there")
        };
        let tenant = Some(plan.keys[key.index()].tenant);
        let scopes = plan.scopes(Some(key), tenant, None, Some(model), RouteId(0));
        let ask = Amount { input: 100, output: 200, nano: 300 };
        let Ok(grant) = scopes.take(black_box(ask), now, windows, accounts) else {
            panic!("there is enough")
        };
        black_box(scopes.quotas(now, accounts));
        scopes.settle(&grant, Amount { output: 150, ..ask }, now, accounts);
    }
}

/// As a shard's.
const TICK: Duration = Duration::from_millis(20);

/// What a decision under six limits costs where so many shards share all of their rows, in
/// nanoseconds of CPU: the mean over all of them, and the fastest of several runs.
fn shared(shards: usize) -> f64 {
    const ALL: usize = 2_000_000;
    let plan = Arc::new(six_limits());
    let begun = Instant::now();
    let shard = |decisions: usize| {
        let mut decide = Decide::new(&plan, shards);
        let before = cpu_ns();
        for _ in 0..decisions {
            let now = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            decide.once(units::Instant::from_nanos(1_000_000_000_000 + now));
        }
        cpu_ns() - before
    };
    let run = || {
        let spent: u64 = thread::scope(|threads| {
            let all: Vec<_> = (0..shards).map(|_| threads.spawn(|| shard(ALL / shards))).collect();
            all.into_iter().map(|one| one.join().unwrap_or(u64::MAX)).sum()
        });
        spent as f64 / (ALL / shards * shards) as f64
    };
    (0..5).map(|_| run()).fold(f64::INFINITY, f64::min)
}

/// What this thread has used of a CPU.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // Both are positive, and their sum fits for centuries.
    (time.tv_sec * 1_000_000_000 + time.tv_nsec).unsigned_abs()
}

/// This file's own text: prose and code. So many tokens of it by o200k, or 32 KiB.
fn prose(tokens: usize) -> String {
    const TEXT: &str = include_str!("main.rs");
    // Three and a half bytes a token, counted once.
    let len = tokens.saturating_mul(7).saturating_div(2).min(32 << 10);
    TEXT.chars().filter(char::is_ascii).cycle().take(len).collect()
}

/// Texts of 32 KiB of letters by chance, in words of so many or without a break.
fn chances(word: Option<usize>) -> Vec<String> {
    let mut rng = Rng::seeded(11);
    let blank = |at: usize| word.is_some_and(|word| at % (word + 1) == word);
    let mut letter =
        |at| if blank(at) { ' ' } else { char::from(b'a' + (rng.next_u64() % 26) as u8) };
    (0..32).map(|_| (0..32 << 10).map(&mut letter).collect()).collect()
}

fn chat(text: &str) -> Vec<u8> {
    let messages = serde_json::json!([{ "role": "user", "content": text }]);
    serde_json::json!({ "model": "m", "messages": messages }).to_string().into_bytes()
}

fn estimate(len: usize) -> Box<dyn FnMut()> {
    let body = chat(&prose(usize::MAX)[..len]);
    Box::new(move || assert!(tokens::prompt([black_box(&body[..])]).0 > 500))
}

/// Each text in turn: the vocabulary remembers a few thousand words.
fn exact(name: &str, texts: &[String]) -> Box<dyn FnMut()> {
    let Some(vocabulary) = Vocabulary::built_in(name) else { panic!("{name} is built in") };
    let mut bodies: Vec<Vec<u8>> = texts.iter().map(|text| chat(text)).collect();
    Box::new(move || {
        bodies.rotate_left(1);
        let body = &bodies[0];
        let Ok(inspected) = Inspector::new(BodyKind::Chat).finish(body) else { panic!("a body") };
        assert!(tokens::exact(&vocabulary, black_box(&inspected.parts), body).0 > 100);
    })
}

fn decision() -> Box<dyn FnMut()> {
    let backends: String = (0..8)
        .map(|at| format!("      - {{ name: b{at}, url: \"http://10.0.0.{at}:8000\" }}\n"))
        .collect();
    let text = format!(
        "server: {{ listen: \"127.0.0.1:8080\" }}\npools:\n  p:\n    backends:\n{backends}models:\n  llama-3-70b: {{ aliases: [llama-70b] }}\nroutes:\n  - {{ name: main, match: {{ model: [\"llama-3-70b\"] }}, pool: p, strategy: least-requests }}\ntenants:\n  acme: {{ models: [\"llama-*\"] }}\nkeys:\n  - {{ id: k, tenant: acme, sha256: \"{}\" }}\n",
        "ab".repeat(32)
    );
    let plan = Plan::build(&text, &|_| None, &|path| Err(path.to_owned()), &mut Registry::new());
    let plan = plan.unwrap_or_else(|problems| panic!("{problems:?}"));
    let mut policy = Policy::new(Rng::seeded(7));
    let digest = [0xab; 32];
    Box::new(move || {
        let Some(key) = plan.key(black_box(&digest)) else { panic!("the key is there") };
        let tenant = plan.keys[key.index()].tenant;
        let asked = black_box("llama-70b");
        assert!(plan.may_use(tenant, asked));
        let model = plan.model(asked).map(|model| &*plan.models[model.index()].name);
        let route = plan.route(model, Some(asked), "/v1/chat/completions", &|_| None);
        let Some(route) = route else { panic!("the route is there") };
        let verdict = policy.decide(&plan, route, None, &[]);
        assert!(matches!(black_box(verdict), Verdict::Send(_)));
    })
}
