//! `forebay mock` as a backend, for what a byte-by-byte script would be too long for.

use std::process::{Child, Stdio};

use super::{Lines, command, wait_for};

/// A mock that runs; ended on drop.
pub struct Mock {
    child: Child,
    pub url: String,
}

impl Mock {
    #[track_caller]
    pub fn start(args: &[&str]) -> Mock {
        let mut child = command(&["mock"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let said = Lines::of(child.stdout.take().expect("piped"));
        let line = said.until("listening on").pop().expect("a line");
        let url = line.rsplit(' ').next().expect("a URL").to_owned();
        Mock { child, url }
    }

    /// What it has really done: prompt and completion tokens of all requests, once none runs.
    #[track_caller]
    pub fn truth(&self) -> (u64, u64) {
        let address = self.url.trim_start_matches("http://").parse().expect("an address");
        wait_for("the mock's rest", || {
            let mut client = super::Client::new(address);
            client.send("GET /mock HTTP/1.1\r\nhost: mock\r\n\r\n");
            let books = client.answer().json();
            let of = |name: &str| books[name].as_u64().expect("a count");
            (of("in_flight") == 0).then(|| (of("prompt_tokens"), of("completion_tokens")))
        })
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
