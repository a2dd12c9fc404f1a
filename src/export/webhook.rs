//! Alerts to a URL that takes JSON by POST: Slack, Mattermost, a pager, a script.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use crate::fetch::{Bounds, Fetcher};
use crate::meter::events::{Level, say};

/// Alerts that were taken, and those that were given up.
pub static SENT: AtomicU64 = AtomicU64::new(0);
pub static DROPPED: AtomicU64 = AtomicU64::new(0);

/// One alert: where it goes, and what it says there.
#[derive(Debug)]
pub struct Alert {
    pub url: String,
    /// PEM; without it the machine's roots are trusted.
    pub ca: Option<Arc<str>>,
    /// JSON.
    pub body: String,
}

const BOUNDS: Bounds = Bounds {
    connect: Duration::from_secs(5),
    total: Duration::from_secs(10),
    body_bytes_max: 64 * 1024,
};
/// Alerts that wait. More come only when hundreds of budgets are spent at once.
const WAITING_MAX: usize = 256;
/// Before each further try.
const AGAIN: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];

/// The thread that sends, until this is dropped; what waits then is not sent.
#[derive(Debug)]
pub struct Webhook(SyncSender<Alert>);

impl Webhook {
    /// # Errors
    /// No thread can be started.
    pub fn start() -> io::Result<Webhook> {
        let (alerts, waiting) = sync_channel(WAITING_MAX);
        std::thread::Builder::new().name("webhook".into()).spawn(|| run(waiting))?;
        Ok(Webhook(alerts))
    }

    /// Never waits.
    pub fn send(&self, alert: Alert) {
        if self.0.try_send(alert).is_err() {
            DROPPED.fetch_add(1, Ordering::Relaxed);
            say(Level::Error, "alert_dropped", &[("reason", &"too many wait")]);
        }
    }
}

fn run(waiting: Receiver<Alert>) {
    for alert in waiting {
        match deliver(&alert) {
            Ok(()) => SENT.fetch_add(1, Ordering::Relaxed),
            Err(why) => {
                say(Level::Error, "alert_dropped", &[("reason", &why)]);
                DROPPED.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

fn deliver(alert: &Alert) -> Result<(), String> {
    let ca = alert.ca.as_deref().map(str::as_bytes);
    let fetcher = Fetcher::new(ca, BOUNDS).map_err(|why| why.to_string())?;
    let fields = [("content-type", "application/json")];
    let mut again = AGAIN.iter();
    loop {
        match fetcher.post(&alert.url, &fields, alert.body.as_bytes()) {
            Ok(_) => return Ok(()),
            Err(fault) => match again.next() {
                Some(pause) => std::thread::sleep(*pause),
                None => return Err(fault.to_string()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    use super::*;

    /// The first answer gets lost: the alert is said again, and the next one behind it.
    #[test]
    fn an_alert_is_sent_until_it_is_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/hook", listener.local_addr().expect("bound"));
        let webhook = Webhook::start().expect("a thread");
        for body in ["{\"text\":\"one\"}", "{\"text\":\"two\"}"] {
            webhook.send(Alert { url: url.clone(), ca: None, body: body.to_owned() });
        }
        let mut seen = Vec::new();
        for answer in ["", "HTTP/1.1 204 No Content\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n"] {
            let (mut stream, _) = listener.accept().expect("a connection");
            let mut text = String::new();
            let mut buf = [0; 4096];
            while !text.ends_with('}') {
                let read = stream.read(&mut buf).expect("more");
                assert!(read > 0, "an early end: {text}");
                text.push_str(std::str::from_utf8(&buf[..read]).expect("text"));
            }
            assert!(text.starts_with("POST /hook HTTP/1.1\r\n"), "{text}");
            seen.push(text.split("\r\n\r\n").nth(1).expect("a body").to_owned());
            stream.write_all(answer.as_bytes()).expect("taken");
        }
        assert_eq!(seen, ["{\"text\":\"one\"}", "{\"text\":\"one\"}", "{\"text\":\"two\"}"]);
    }
}
