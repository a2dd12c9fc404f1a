//! The one outgoing HTTP client of the side threads: key sets, webhooks, exports.
//!
//! It blocks, so a shard must never call it, nor may control's own thread. Every call has a bound in
//! time and in bytes, and a fault says what happened in words for an operator. No fault, and no other
//! text made here, holds more of a URL than its scheme and authority: userinfo, paths (Slack's are
//! passwords) and queries stay unsaid.
//!
//! Proxies of the environment are not used: where a request goes is what the configuration says.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ureq::Agent;
use ureq::http::Uri;
use ureq::http::header::LOCATION;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsProvider};

/// What one call may take.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// For name, connection and TLS.
    pub connect: Duration,
    /// From the call to the last byte of the answer, redirects included.
    pub total: Duration,
    /// Of the answer's body; a longer one is a fault, not a part of it.
    pub body_bytes_max: usize,
}

/// Calls with the same bounds and the same trust. `Send + Sync`; keeps idle connections for a few
/// seconds.
#[derive(Clone, Debug)]
pub struct Fetcher {
    agent: Agent,
    bounds: Bounds,
    /// There is a certificate that TLS can be checked against.
    trusts: bool,
}

/// An answer with a status from 200 to 299.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Fetcher {
    /// `ca` is PEM: then only its certificates are trusted, as a private authority's clients want it.
    /// Without it those of the machine are, because a company's own services are as a rule signed by
    /// its own authority, which is installed there, and because they are renewed without a release
    /// of ours. Reads them from the disk, a few milliseconds.
    ///
    /// # Errors
    /// `ca` holds no certificate, or one that cannot be read.
    pub fn new(ca: Option<&[u8]>, bounds: Bounds) -> Result<Fetcher, NoCertificate> {
        let roots = match ca {
            Some(pem) => certificates(pem)?,
            // A machine without any can still call `http://`.
            None => rustls_native_certs::load_native_certs()
                .certs
                .iter()
                .map(|root| Certificate::from_der(root).to_owned())
                .collect(),
        };
        let trusts = !roots.is_empty();
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .root_certs(RootCerts::Specific(Arc::new(roots)))
            .unversioned_rustls_crypto_provider(Arc::new(
                rustls::crypto::aws_lc_rs::default_provider(),
            ))
            .build();
        let agent = Agent::config_builder()
            .tls_config(tls)
            .timeout_global(Some(bounds.total))
            .timeout_connect(Some(bounds.connect))
            .proxy(None)
            // Followed here or not at all.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .build()
            .new_agent();
        Ok(Fetcher { agent, bounds, trusts })
    }

    /// A GET with these header fields. Redirects are followed three times at most, never to
    /// another scheme; another authority is asked without the fields, which may be secrets.
    /// Blocks for [`Bounds::total`] at most.
    ///
    /// # Errors
    /// No answer with a status from 200 to 299 came in time and within the bounds.
    pub fn get(&self, url: &str, fields: &[(&str, &str)]) -> Result<Answer, Fault> {
        const REDIRECTS_MAX: usize = 3;
        let began = Instant::now();
        let asked = target(url)?;
        let mut at = asked.clone();
        for redirects in 0..=REDIRECTS_MAX {
            self.may_ask(&at)?;
            let mut request = self.agent.get(at.clone());
            if redirects > 0 {
                let left = self.bounds.total.saturating_sub(began.elapsed());
                if left.is_zero() {
                    return Err(fault(&at, What::Late));
                }
                request = request.config().timeout_global(Some(left)).build();
            }
            if at.authority() == asked.authority() {
                request = fields.iter().fold(request, |to, (name, value)| to.header(*name, *value));
            }
            match self.answer(&at, request.call())? {
                Ok(answer) => return Ok(answer),
                Err(location) => at = next(&at, &location)?,
            }
        }
        Err(fault(&at, What::Redirected("more often than three times")))
    }

    /// A POST of `body` with these header fields; redirects are not followed. Blocks for
    /// [`Bounds::total`] at most. After a fault the body may have been taken or not.
    ///
    /// # Errors
    /// No answer with a status from 200 to 299 came in time and within the bounds.
    pub fn post(&self, url: &str, fields: &[(&str, &str)], body: &[u8]) -> Result<Answer, Fault> {
        let at = target(url)?;
        self.may_ask(&at)?;
        let request = self.agent.post(at.clone());
        let request = fields.iter().fold(request, |to, (name, value)| to.header(*name, *value));
        self.answer(&at, request.send(body))?
            .map_err(|_| fault(&at, What::Redirected("and a POST follows no redirect")))
    }

    fn may_ask(&self, at: &Uri) -> Result<(), Fault> {
        match self.trusts || at.scheme_str() != Some("https") {
            true => Ok(()),
            false => Err(fault(at, What::NoRoots)),
        }
    }

    /// The answer, or where it sends us.
    fn answer(
        &self,
        at: &Uri,
        got: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Result<Answer, String>, Fault> {
        let mut got =
            got.map_err(|error| fault(at, What::of(error, self.bounds.body_bytes_max)))?;
        let status = got.status().as_u16();
        match status {
            200..=299 => {}
            301 | 302 | 303 | 307 | 308 => {
                let location = got.headers().get(LOCATION).and_then(|to| to.to_str().ok());
                return Ok(Err(location.unwrap_or_default().to_owned()));
            }
            _ => return Err(fault(at, What::Status(status))),
        }
        let most = self.bounds.body_bytes_max;
        // One byte more, so that a body of exactly the bound is no fault.
        let body = got.body_mut().with_config().limit(most as u64 + 1).read_to_vec();
        match body {
            Ok(body) if body.len() > most => Err(fault(at, What::TooLong(most))),
            Ok(body) => Ok(Ok(Answer { status, body })),
            Err(error) => Err(fault(at, What::of(error, most))),
        }
    }
}

/// Why a call failed. Its text fits an event: one line, without credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Scheme and authority only; who called knows the rest.
    pub whom: Box<str>,
    pub what: What,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Not `http://host` or `https://host`.
    NoUrl,
    /// The name has no address.
    NoAddress,
    /// No connection, or one that broke; the operating system's words.
    Broken(Box<str>),
    /// The other side's certificate is not trusted, or TLS failed otherwise; rustls's words.
    Tls(Box<str>),
    /// The machine has no trusted certificates, and none were given.
    NoRoots,
    /// Not within [`Bounds::connect`] or [`Bounds::total`].
    Late,
    /// The body is longer than this.
    TooLong(usize),
    /// A status outside of 200 to 299.
    Status(u16),
    /// A redirect that is not followed, and why.
    Redirected(&'static str),
    /// What came is no HTTP, or a header field that was to go is none.
    Rubbish(Box<str>),
}

impl What {
    fn of(error: ureq::Error, most: usize) -> What {
        match error {
            ureq::Error::Timeout(_) => What::Late,
            ureq::Error::HostNotFound => What::NoAddress,
            ureq::Error::BodyExceedsLimit(_) => What::TooLong(most),
            ureq::Error::Tls(why) => What::Tls(why.into()),
            ureq::Error::Rustls(why) => What::Tls(why.to_string().into()),
            ureq::Error::BadUri(_) => What::NoUrl,
            ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut => What::Late,
            // The standard library has no kind for it.
            ureq::Error::Io(error) if error.to_string().starts_with("failed to lookup") => {
                What::NoAddress
            }
            ureq::Error::Io(error) => {
                let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
                match tls {
                    Some(why) => What::Tls(why.to_string().into()),
                    None => What::Broken(error.to_string().into()),
                }
            }
            ureq::Error::ConnectionFailed => What::Broken("no connection".into()),
            // Neither holds anything that we sent.
            ureq::Error::Protocol(why) => What::Rubbish(why.to_string().into()),
            ureq::Error::Http(why) => What::Rubbish(why.to_string().into()),
            _ => What::Broken("the call failed".into()),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.whom.is_empty() {
            write!(f, "{}: ", self.whom)?;
        }
        match &self.what {
            What::NoUrl => f.write_str("not a URL of the form `https://host/path`"),
            What::NoAddress => f.write_str("the name has no address"),
            What::Broken(why) => f.write_str(why),
            What::Tls(why) => write!(f, "TLS: {why}"),
            What::NoRoots => f.write_str(
                "this machine has no trusted certificates: install ca-certificates, or name a `ca`",
            ),
            What::Late => f.write_str("no whole answer in time"),
            What::TooLong(most) => write!(f, "the answer is longer than {most} bytes"),
            What::Status(status) => write!(f, "answered {status}"),
            What::Redirected(why) => write!(f, "redirects {why}"),
            What::Rubbish(why) => write!(f, "not HTTP: {why}"),
        }
    }
}

impl std::error::Error for Fault {}

/// A PEM text without a certificate that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoCertificate;

impl fmt::Display for NoCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("there is no certificate in PEM form (`-----BEGIN CERTIFICATE-----`)")
    }
}

impl std::error::Error for NoCertificate {}

/// All of a PEM text; keys and the like in it are passed over.
fn certificates(pem: &[u8]) -> Result<Vec<Certificate<'static>>, NoCertificate> {
    let mut found = Vec::new();
    let mut store = rustls::RootCertStore::empty();
    for item in ureq::tls::parse_pem(pem) {
        if let PemItem::Certificate(one) = item.map_err(|_| NoCertificate)? {
            // `ureq` would pass over what is no certificate inside, and trust nobody.
            store.add(one.der().to_vec().into()).map_err(|_| NoCertificate)?;
            found.push(one);
        }
    }
    if found.is_empty() { Err(NoCertificate) } else { Ok(found) }
}

fn fault(at: &Uri, what: What) -> Fault {
    let scheme = at.scheme_str().unwrap_or_default();
    let host = at.host().unwrap_or_default();
    let port = at.port_u16().map(|port| format!(":{port}")).unwrap_or_default();
    Fault { whom: format!("{scheme}://{host}{port}").into(), what }
}

fn target(url: &str) -> Result<Uri, Fault> {
    let no_url = || Fault { whom: Box::default(), what: What::NoUrl };
    let uri: Uri = url.parse().map_err(|_| no_url())?;
    let known = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.host().is_some_and(|host| !host.is_empty());
    if known && host { Ok(uri) } else { Err(no_url()) }
}

/// Where a redirect leads, if there.
fn next(at: &Uri, location: &str) -> Result<Uri, Fault> {
    let not = |why| fault(at, What::Redirected(why));
    let absolute = match location.starts_with('/') && !location.starts_with("//") {
        true => {
            let authority = at.authority().map_or("", |authority| authority.as_str());
            format!("{}://{authority}{location}", at.scheme_str().unwrap_or_default())
        }
        false => location.to_owned(),
    };
    let to = target(&absolute).map_err(|_| not("to what is no URL"))?;
    match to.scheme_str() == at.scheme_str() {
        true => Ok(to),
        false => Err(not("to another scheme; write the URL that it leads to")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;

    const BOUNDS: Bounds = Bounds {
        connect: Duration::from_secs(10),
        total: Duration::from_secs(20),
        body_bytes_max: 100,
    };

    fn fetcher() -> Fetcher {
        Fetcher::new(None, BOUNDS).expect("no certificate of ours")
    }

    /// Gives these answers, one connection each, and what it was asked. With `None` it stays silent
    /// until the other side has gone.
    fn peer(answers: Vec<Option<String>>) -> (String, JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let thread = std::thread::spawn(move || {
            let mut asked = Vec::new();
            for answer in answers {
                let (mut stream, _) = listener.accept().expect("a connection");
                asked.push(request(&mut stream));
                match answer {
                    Some(answer) => stream.write_all(answer.as_bytes()).expect("taken"),
                    None => drop(stream.read(&mut [0; 64])),
                }
            }
            asked
        });
        (url, thread)
    }

    /// Head and body of one request.
    fn request(stream: &mut impl Read) -> String {
        let mut text = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let count = stream.read(&mut piece).expect("readable");
            text.extend_from_slice(&piece[..count]);
            let so_far = String::from_utf8_lossy(&text).into_owned();
            let Some((head, body)) = so_far.split_once("\r\n\r\n") else { continue };
            let length = head.to_ascii_lowercase().lines().find_map(|line| {
                line.strip_prefix("content-length: ").and_then(|n| n.parse::<usize>().ok())
            });
            if body.len() >= length.unwrap_or(0) {
                return so_far;
            }
        }
    }

    fn answer(status: u16, fields: &str, body: &str) -> Option<String> {
        Some(format!(
            "HTTP/1.1 {status} Status\r\nconnection: close\r\ncontent-length: {}\r\n{fields}\r\n{body}",
            body.len()
        ))
    }

    #[test]
    fn an_answer_comes_with_its_body_and_a_status_outside_of_2xx_is_a_fault() {
        let (url, peer) = peer(vec![
            answer(200, "", "hello"),
            answer(204, "", ""),
            answer(500, "", "secret words"),
            answer(404, "", ""),
            answer(200, "", &"x".repeat(100)),
        ]);
        let fetcher = fetcher();
        let url = format!("{url}/keys?token=hunter2");
        let got = fetcher.get(&url, &[("x-test", "1")]).expect("200");
        assert_eq!((got.status, got.body.as_slice()), (200, b"hello".as_slice()));
        let got = fetcher.post(&url, &[("content-type", "application/json")], b"{}").expect("204");
        assert_eq!(got.status, 204);
        let fault = fetcher.get(&url, &[]).expect_err("500");
        assert_eq!(fault.what, What::Status(500));
        assert!(fault.to_string().ends_with(": answered 500"), "{fault}");
        assert_eq!(fetcher.post(&url, &[], b"").expect_err("404").what, What::Status(404));
        // A body of exactly the bound fits.
        assert_eq!(fetcher.get(&url, &[]).expect("whole").body.len(), 100);
        let asked = peer.join().expect("no panic");
        assert!(asked[0].starts_with("GET /keys?token=hunter2 HTTP/1.1\r\n"), "{}", asked[0]);
        assert!(
            asked[0].contains("x-test: 1\r\n") && asked[0].contains("forebay/"),
            "{}",
            asked[0]
        );
        assert!(asked[1].starts_with("POST ") && asked[1].ends_with("\r\n\r\n{}"), "{}", asked[1]);
    }

    #[test]
    fn a_body_beyond_the_bound_is_refused_whatever_its_framing() {
        let body = "x".repeat(101);
        let chunked = format!(
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n65\r\n{body}\r\n0\r\n\r\n"
        );
        let endless = format!("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}", "x".repeat(9_999));
        let (url, peer) = peer(vec![answer(200, "", &body), Some(chunked), Some(endless)]);
        let fetcher = fetcher();
        for _ in 0..3 {
            assert_eq!(fetcher.get(&url, &[]).expect_err("long").what, What::TooLong(100));
        }
        drop(peer.join());
    }

    #[test]
    fn silence_a_slow_body_a_closed_port_and_rubbish_are_told_apart() {
        let quick = Bounds { total: Duration::from_millis(200), ..BOUNDS };
        let begun = "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe".to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}/", listener.local_addr().expect("bound"));
        let slow = std::thread::spawn(move || {
            for text in ["", &begun] {
                let (mut stream, _) = listener.accept().expect("a connection");
                request(&mut stream);
                stream.write_all(text.as_bytes()).expect("taken");
                let _ = stream.read(&mut [0; 64]);
            }
        });
        let hasty = Fetcher::new(None, quick).expect("no certificate of ours");
        for _ in 0..2 {
            assert_eq!(hasty.get(&url, &[]).expect_err("late").what, What::Late);
        }
        slow.join().expect("no panic");

        let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr();
        let closed = format!("http://user:hunter2@{}/hunter2", closed.expect("bound"));
        let fault = fetcher().get(&closed, &[]).expect_err("refused");
        assert!(matches!(fault.what, What::Broken(_)), "{fault:?}");
        assert!(fault.to_string().contains("refused"), "{fault}");
        assert!(!fault.to_string().contains("hunter2"), "{fault}");

        let (url, rubbish) = peer(vec![
            Some("220 smtp.example ESMTP\r\n\r\n".to_owned()),
            Some("HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhe".to_owned()),
        ]);
        let fault = fetcher().get(&url, &[]).expect_err("no HTTP");
        assert!(matches!(fault.what, What::Rubbish(_)), "{fault:?}");
        let fault = fetcher().get(&url, &[]).expect_err("cut off");
        assert!(matches!(fault.what, What::Broken(_) | What::Rubbish(_)), "{fault:?}");
        rubbish.join().expect("no panic");

        let fault = fetcher().get("http://name.invalid/", &[]).expect_err("no such name");
        assert_eq!(fault.what, What::NoAddress);
        for url in ["", "sso.example.com/keys", "ftp://h/", "file:///etc/passwd", "http://", "h t"]
        {
            assert_eq!(fetcher().get(url, &[]).expect_err(url).what, What::NoUrl);
        }
        let split = fetcher().get(&closed, &[("x-a", "1\r\nx-b: hunter2")]).expect_err("no field");
        assert!(matches!(split.what, What::Rubbish(_)), "{split:?}");
        assert!(!split.to_string().contains("hunter2"), "{split}");
    }

    #[test]
    fn redirects_are_followed_a_few_times_within_their_scheme_and_secrets_stay_at_home() {
        let (other, elsewhere) = peer(vec![answer(200, "", "there")]);
        let (url, peer) = peer(vec![
            answer(302, "location: /moved?x=1\r\n", ""),
            answer(307, &format!("location: {other}/keys\r\n"), ""),
            answer(301, "location: https://127.0.0.1/keys\r\n", ""),
            answer(301, "location: file:///etc/passwd\r\n", ""),
            answer(301, "", ""),
            answer(307, "location: /again\r\n", ""),
            answer(302, "location: /1\r\n", ""),
            answer(302, "location: /2\r\n", ""),
            answer(302, "location: /3\r\n", ""),
            answer(302, "location: /4\r\n", ""),
        ]);
        let fetcher = fetcher();
        let secret = [("authorization", "Bearer hunter2")];
        assert_eq!(fetcher.get(&url, &secret).expect("at last").body, b"there");
        for _ in 0..3 {
            let what = fetcher.get(&url, &[]).expect_err("not followed").what;
            assert!(matches!(what, What::Redirected(_)), "{what:?}");
        }
        let what = fetcher.post(&url, &[], b"{}").expect_err("not followed").what;
        assert!(matches!(what, What::Redirected(_)), "{what:?}");
        let what = fetcher.get(&url, &[]).expect_err("round and round").what;
        assert!(matches!(what, What::Redirected(_)), "{what:?}");
        let asked = peer.join().expect("no panic");
        assert!(asked[0].contains("hunter2"));
        assert!(asked[1].starts_with("GET /moved?x=1 ") && asked[1].contains("hunter2"));
        let asked = elsewhere.join().expect("no panic");
        assert!(
            asked[0].starts_with("GET /keys ") && !asked[0].contains("hunter2"),
            "{}",
            asked[0]
        );
    }

    #[test]
    fn a_certificate_that_nobody_signed_is_refused_unless_it_is_the_one_that_was_named() {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("made");
        let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let server = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key.expect("a key"))
            .expect("a pair");
        let server = Arc::new(server);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("bound").port();
        let peer = std::thread::spawn(move || {
            for _ in 0..3 {
                let (stream, _) = listener.accept().expect("a connection");
                let tls = rustls::ServerConnection::new(Arc::clone(&server)).expect("a side");
                let mut tls = rustls::StreamOwned::new(tls, stream);
                if tls.conn.complete_io(&mut tls.sock).is_ok() {
                    request(&mut tls);
                    let text = answer(200, "", "trusted").expect("an answer");
                    tls.write_all(text.as_bytes()).expect("taken");
                    tls.conn.send_close_notify();
                    let _ = tls.flush();
                }
            }
        });
        let url = format!("https://localhost:{port}/keys");
        let fault = fetcher().get(&url, &[]).expect_err("not trusted");
        assert!(matches!(fault.what, What::Tls(_) | What::NoRoots), "{fault:?}");
        if fault.what == What::NoRoots {
            // The peer waits for three.
            drop(std::net::TcpStream::connect(("127.0.0.1", port)));
        }
        let named = Fetcher::new(Some(made.cert.pem().as_bytes()), BOUNDS).expect("a certificate");
        assert_eq!(named.get(&url, &[]).expect("trusted").body, b"trusted");
        let wrong_name = format!("https://127.0.0.1:{port}/");
        let fault = named.get(&wrong_name, &[]).expect_err("another name");
        assert!(fault.to_string().contains("not valid for name"), "{fault}");
        peer.join().expect("no panic");

        for pem in ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
        {
            assert_eq!(
                Fetcher::new(Some(pem.as_bytes()), BOUNDS).err(),
                Some(NoCertificate),
                "{pem}"
            );
        }
    }
}
