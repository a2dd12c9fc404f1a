//! Goal: OpenAI's own SDKs work through the gateway and notice nothing.
//! Method: their scripts in `tests/sdk`, run against `forebay run` in front of `forebay mock`.
//!
//! The SDKs are installed by `tests/run`. Without them there is a note, and under `CI=true` a
//! failure.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::*;

/// Where `tests/run` puts them.
fn installed(what: &str) -> Option<PathBuf> {
    let folder = std::env::var("FOREBAY_TEST_SDK")
        .map_or_else(|_| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/sdk"), PathBuf::from);
    let path = folder.join(what);
    if path.exists() {
        return Some(path);
    }
    let in_ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
    assert!(!in_ci, "{} is not there: tests/run installs it", path.display());
    eprintln!("note: {what} is not installed (tests/run does it), so its SDK is not tried");
    None
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk")
}

/// A gateway in front of `forebay mock`, both ended on drop.
struct Stack {
    gateway: Gateway,
    _mock: Mock,
}

impl Stack {
    fn start() -> Stack {
        let mock = Mock::start(&["--ttft", "1ms", "--inter-token", "1ms"]);
        Stack { gateway: Setup::to(mock.url.clone()).start(), _mock: mock }
    }

    /// Runs a script that prints a line for each case, and gives how many were fine.
    #[track_caller]
    fn run(&self, program: &Path, script: &Path) -> usize {
        let base = format!("http://{}", self.gateway.address);
        let output = Command::new(program)
            .arg(script)
            .args([&base, KEY_A, "m"])
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}{errors}");
        said.lines().filter(|line| line.starts_with("ok")).count()
    }

    /// What was asked for has been booked, and nothing is left of it.
    #[track_caller]
    fn settled(&self) {
        self.gateway.idle();
        wait_for("the books", || (self.gateway.usage("a").1 > 0).then_some(()));
        let (prompt, completion, _) = self.gateway.usage("a");
        assert!(prompt > 0 && completion > 0);
        assert_eq!(self.gateway.metric("forebay_panics_total", &[]) as u64, 0);
        assert_eq!(self.gateway.metric("forebay_upstream_failures_total", &[]) as u64, 0);
    }
}

#[test]
fn openai_for_python_works() {
    let Some(python) = installed("venv/bin/python") else { return };
    let stack = Stack::start();
    let fine = stack.run(&python, &scripts().join("clients.py"));
    assert!(fine >= 16, "{fine}");
    stack.settled();
}

#[test]
fn openai_for_node_works() {
    let Some(sdk) = installed("node_modules/openai") else { return };
    // A module finds its packages in the folders above it.
    let script = sdk.join("../../clients.mjs");
    std::fs::copy(scripts().join("clients.mjs"), &script).expect("copied");
    let stack = Stack::start();
    let fine = stack.run(Path::new("node"), &script);
    assert!(fine >= 9, "{fine}");
    stack.settled();
}
