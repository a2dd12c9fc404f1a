//! Goal: the rules of the source that no lint can hold.
//! Method: reading the source as text.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All Rust files below `folder`, as paths from the repository's root, with their text.
fn sources(folder: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let hidden = path.file_name().is_some_and(|name| name == "target");
            if path.is_dir() && !hidden {
                folders.push(path);
            } else if path.extension().is_some_and(|kind| kind == "rs") {
                let text = std::fs::read_to_string(&path).expect("UTF-8");
                let name = path.strip_prefix(root()).expect("below").display().to_string();
                found.push((name, text));
            }
        }
    }
    found.sort();
    found
}

fn only_tests(file: &str) -> bool {
    file.ends_with("/tests.rs") || file.contains("/tests/")
}

/// The text without comments, strings and what only tests see, roughly: enough to look for words.
fn code(text: &str) -> String {
    let text = match text.find("#[cfg(test)]\nmod tests {") {
        Some(tests) => &text[..tests],
        None => text,
    };
    text.lines()
        .map(|line| {
            let at = line.find("//").filter(|&at| !line[..at].ends_with(':'));
            &line[..at.unwrap_or(line.len())]
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// Modules in the order of dependence: each uses only those before it.
const ORDER: &[&str] = &[
    "pure::units",
    "pure::lanes",
    "pure::fields",
    "pure::h1",
    "pure::json",
    "pure::peek",
    "pure::usage",
    "pure::sse",
    "pure::multipart",
    "pure::body",
    "pure::dialect",
    "pure::answer",
    "pure::tokens",
    "pure::atomic",
    "pure::board",
    "pure::limit",
    "pure::jwt",
    "pure::member",
    "pure::plan",
    "pure::balance",
    "pure::policy",
    "pure::relay",
    "meter",
    "rt",
    "fetch",
    "client",
    "pool",
    "shard",
    "store",
    "fleet",
    "export",
    "admin",
    "control",
    "mock",
    "cli",
];

/// The module that a file belongs to: `src/pure/h1/target.rs` to `pure::h1`.
fn module(file: &str) -> Option<String> {
    let path = file.strip_prefix("src/")?.strip_suffix(".rs")?;
    let mut parts = path.split('/');
    Some(match (parts.next()?, parts.next()) {
        ("lib" | "main", _) => return None,
        ("pure", Some(name)) => format!("pure::{name}"),
        (name, _) => name.to_owned(),
    })
}

/// What a file names as `crate::…`: modules as in [`order`], also out of braces.
fn used(text: &str) -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    let name = |text: &str| -> String {
        text.chars().take_while(|&c| c.is_alphanumeric() || c == '_').collect()
    };
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        let (prefix, rest) = match rest.strip_prefix("pure::") {
            Some(rest) => ("pure::", rest),
            None => ("", rest),
        };
        match rest.strip_prefix('{') {
            None => {
                used.insert(format!("{prefix}{}", name(rest)));
            }
            Some(list) => {
                let list = &list[..list.find(';').unwrap_or(list.len())];
                let mut depth = 0;
                for part in list.split_inclusive(['{', '}', ',']) {
                    if depth == 0 && !name(part.trim()).is_empty() {
                        used.insert(format!("{prefix}{}", name(part.trim())));
                    }
                    depth += i32::from(part.ends_with('{')) - i32::from(part.ends_with('}'));
                }
            }
        }
    }
    used
}

#[test]
fn a_module_uses_only_modules_above_it() {
    let place = |module: &str| ORDER.iter().position(|own| *own == module);
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for (file, text) in sources("src") {
        let Some(own) = module(&file).filter(|_| !only_tests(&file)) else { continue };
        let Some(mine) = place(&own) else {
            panic!("{file}: give its module a place in ORDER");
        };
        seen.insert(own);
        for other in used(&code(&text)) {
            match place(&other) {
                Some(theirs) if theirs > mine => wrong.push(format!("{file} uses {other}")),
                _ => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(seen.len(), ORDER.len(), "ORDER names a module that is not there");
}

#[test]
fn the_reader_of_uses_reads_them() {
    let text = "use crate::pure::h1::{self, X};\nuse crate::{rt, pool::Conn};\nfn f() { crate::meter::g() }\n\
                use crate::pure::{sse::{A, B}, usage};";
    let used: Vec<String> = used(text).into_iter().collect();
    assert_eq!(used, ["meter", "pool", "pure::h1", "pure::sse", "pure::usage", "rt"]);
}

#[test]
fn what_is_pure_touches_nothing() {
    const TOUCHES: &[&str] = &[
        "std::net::Tcp",
        "std::net::Udp",
        "std::net::ToSocketAddrs",
        "std::fs",
        "std::thread",
        "std::process",
        "std::env::",
        "std::io::std",
        "std::os",
        "std::time::Instant",
        "SystemTime",
        "Mutex",
        "RwLock",
        "Condvar",
        "mpsc",
        "println!",
        "eprintln!",
        "print!(",
        "thread_rng",
        "RandomState",
        "getrandom",
        "monoio",
        "tokio",
        "rustix",
        "io_uring",
        "async ",
        ".await",
        "unsafe",
    ];
    let mut wrong = Vec::new();
    for (file, text) in sources("src/pure") {
        if only_tests(&file) {
            continue;
        }
        let code = code(&text);
        for (number, line) in (1..).zip(code.lines()) {
            for touch in TOUCHES.iter().filter(|touch| line.contains(**touch)) {
                wrong.push(format!("{file}:{number}: {touch}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn one_file_names_the_runtime() {
    let mut wrong = Vec::new();
    for (file, text) in sources("src") {
        if file == "src/rt.rs" {
            continue;
        }
        let code = code(&text);
        for name in ["monoio::", "io_uring::", "use monoio", "use io_uring"] {
            if code.contains(name) {
                wrong.push(format!("{file}: {name}"));
            }
        }
        // Sockets of the data path are the runtime's; control and the mock's thread have their own.
        let data_path = ["src/shard", "src/pool.rs", "src/client.rs"];
        if data_path.iter().any(|part| file.starts_with(part)) {
            for name in ["rustix::", "std::net::Tcp", "tokio::", "std::fs", "std::thread", "Mutex"]
            {
                if code.contains(name) {
                    wrong.push(format!("{file}: {name}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn nothing_is_left_undone_in_the_source() {
    // Put together here so that this file does not find itself.
    let words = ["todo", "unimplemented", "dbg"].map(|word| format!("{word}!("));
    let ignored = format!("#[{}", "ignore");
    let mut wrong = Vec::new();
    for (file, text) in ["src", "tests/it", "bench/src"].into_iter().flat_map(sources) {
        for word in words.iter().chain([&ignored]) {
            if text.contains(word.as_str()) {
                wrong.push(format!("{file}: {word}"));
            }
        }
        let lines = text.lines().count();
        if lines > 1_400 {
            wrong.push(format!("{file}: {lines} lines: there is a second idea hiding inside"));
        }
        if [["/", "root/"].concat(), ["/", "home/"].concat()].iter().any(|at| text.contains(at)) {
            wrong.push(format!("{file}: names a folder of one machine"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn the_top_level_stays_small() {
    const KNOWN: &[&str] = &[
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "bench",
        "tuning",
        "tests",
        "systemd",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        // What building and running leave, all of it ignored by git.
        "target",
    ];
    let mut strange = Vec::new();
    for entry in std::fs::read_dir(root()).expect("the root") {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        if !name.starts_with('.') && !KNOWN.contains(&name.as_str()) {
            strange.push(name);
        }
    }
    assert!(strange.is_empty(), "{strange:?}");
}
