//! Goal: a head has one reading, or is refused with the right status, however it is cut.
//! Method: a corpus of hostile and honest heads, each parsed whole and byte by byte; a naive strict
//! reader as the oracle over seeded changes of them.

use super::*;
use crate::pure::units::Rng;

/// The rest of a valid request after its request line.
const REST: &str = "\r\nHost: gw\r\n\r\n";

fn parse(text: &str) -> Result<(Parse, Request), Refusal> {
    let mut request = Request::default();
    parse_request(text.as_bytes(), &Limits::default(), &mut request).map(|parse| (parse, request))
}

/// The same, one byte more at each call.
fn drip(text: &str) -> Result<(Parse, Request), Refusal> {
    let mut request = Request::default();
    for end in 0..=text.len() {
        let parse = parse_request(&text.as_bytes()[..end], &Limits::default(), &mut request)?;
        if parse == Parse::Complete {
            return Ok((parse, request));
        }
    }
    Ok((Parse::Partial, request))
}

fn accepted(text: &str) -> Request {
    match (parse(text), drip(text)) {
        (Ok((Parse::Complete, whole)), Ok((Parse::Complete, dripped))) => {
            assert_eq!(format!("{whole:?}"), format!("{dripped:?}"), "{text:?}");
            whole
        }
        other => panic!("{text:?}: {other:?}"),
    }
}

fn refused(text: &str) -> u16 {
    match (parse(text), drip(text)) {
        (Err(whole), Err(dripped)) => {
            assert_eq!(whole.status, dripped.status, "{text:?}");
            whole.status
        }
        other => panic!("{text:?}: {other:?}"),
    }
}

#[test]
fn an_honest_request_is_read_whole() {
    let text = "\r\nPOST /v1/chat/completions?a=b HTTP/1.1\r\nHost: gw.test:8080\r\n\
        Authorization:Bearer k\r\nX-A: \ta\tb \r\nX-Empty:\r\nContent-Length: \t12 \r\n\r\n{\"model\":1}";
    let request = accepted(text);
    let buf = text.as_bytes();
    assert_eq!(request.method, Method::Post);
    assert_eq!(request.path(buf), b"/v1/chat/completions");
    assert_eq!(request.query(buf), b"?a=b");
    assert_eq!(request.target.of(buf), b"/v1/chat/completions?a=b");
    assert_eq!(request.field(buf, Known::Authorization), Some(&b"Bearer k"[..]));
    assert_eq!(request.named(buf, b"x-a"), Some(&b"a\tb"[..]));
    assert_eq!(request.named(buf, b"x-empty"), Some(&b""[..]));
    assert_eq!(request.named(buf, b"x-b"), None);
    assert_eq!((request.framing, request.keep_alive), (Framing::Length(12), true));
    assert_eq!(&buf[request.head_len..], b"{\"model\":1}");
}

#[test]
fn request_lines_are_exact() {
    for (line, status) in [
        ("G(ET / HTTP/1.1", 400),
        ("GET\0 / HTTP/1.1", 400),
        (" / HTTP/1.1", 400),
        (" GET / HTTP/1.1", 400),
        ("\tGET / HTTP/1.1", 400),
        ("\0GET / HTTP/1.1", 400),
        ("GET\t/\tHTTP/1.1", 400),
        ("GET  /  HTTP/1.1", 400),
        ("GET\u{b}/ HTTP/1.1", 400),
        ("GET / HTTP/1.1 ", 400),
        ("GET / HTTP/1.1\r", 400),
        ("GET /", 400),
        ("GET /?a b HTTP/1.1", 400),
        ("GET /?a\u{1}b HTTP/1.1", 400),
        ("GET /?a\u{7f}b HTTP/1.1", 400),
        ("GET /?é HTTP/1.1", 400),
        ("GET /#f HTTP/1.1", 400),
        ("GET * HTTP/1.1", 400),
        ("GET gw HTTP/1.1", 400),
        ("GET gw:80 HTTP/1.1", 400),
        ("GET http:///x HTTP/1.1", 400),
        ("GET http://u@gw/ HTTP/1.1", 400),
        ("GET http://other/ HTTP/1.1", 400),
        ("GET ftp://gw/ HTTP/1.1", 400),
        ("CONNECT gw:443 HTTP/1.1", 405),
        ("CONNECT / HTTP/1.1", 405),
        ("TRACE / HTTP/1.1", 405),
        ("GET / HTTP/2.0", 505),
        ("GET / HTTP/1.2", 505),
        ("GET / HTTP/0.9", 505),
        ("PRI * HTTP/2.0", 505),
        ("GET / http/1.1", 400),
        ("GET / HTTP/1.10", 400),
        ("GET / HTTP/01.1", 400),
        ("GET / HTTP/1.", 400),
        ("GET / HTTP/1", 400),
        ("GET / HTTP /1.1", 400),
        ("GET / HTTPS/1.1", 400),
        ("GET / HTTP/a.b", 400),
        ("GET / HTTP/1,1", 400),
        ("GET / HTTP/1.1\0", 400),
        ("GET / XTTP/1.1", 400),
        ("\u{16}\u{3}\u{1}", 400),
        ("SSH-2.0-OpenSSH_9.2", 400),
        ("\n", 400),
        ("\r\n\r\n\r\n\r\n\r\nGET / HTTP/1.1", 400),
    ] {
        assert_eq!(refused(&format!("{line}{REST}")), status, "{line:?}");
    }
    for line in [
        "GET / HTTP/1.1",
        "get / HTTP/1.1",
        "FOO / HTTP/1.0",
        "OPTIONS * HTTP/1.1",
        "HEAD http://GW/x HTTP/1.1",
        "GET https://gw HTTP/1.1",
        "GET /v1/models/a%2Fb HTTP/1.1",
        "GET /..//x?\"<>{}|^`%zz HTTP/1.1",
        "\r\n\r\n\r\n\r\nGET / HTTP/1.1",
    ] {
        accepted(&format!("{line}{REST}"));
    }
    let long = "M".repeat(33);
    assert_eq!(refused(&format!("{long} / HTTP/1.1{REST}")), 501);
    accepted(&format!("{} / HTTP/1.1{REST}", &long[1..]));
    let text = format!("get http://gw HTTP/1.1{REST}");
    let request = accepted(&text);
    assert_eq!(request.path(text.as_bytes()), b"/");
    assert_eq!(request.method.name(text.as_bytes()), b"get");
}

#[test]
fn a_host_is_said_once() {
    for host in [
        "",
        "Host:\r\n",
        "Host: gw\r\nHost: gw\r\n",
        "Host: gw\r\nhost: other\r\n",
        "Host: a b\r\n",
        "Host: a/b\r\n",
        "Host: u@a\r\n",
        "Host: a:80x\r\n",
        "Host: a\0b\r\n",
        "Host: [::1\r\n",
        "Host : gw\r\n",
        "Host:\r\n gw\r\n",
        "Host: a, b\r\n",
    ] {
        assert_eq!(refused(&format!("GET / HTTP/1.1\r\n{host}\r\n")), 400, "{host:?}");
    }
    accepted("GET / HTTP/1.0\r\n\r\n");
    accepted("GET / HTTP/1.1\r\nhOST:[::1]:80\r\n\r\n");
}

#[test]
fn field_lines_are_exact() {
    for line in [
        "BadLine",
        ": x",
        "X Y: 1",
        "X\0Y: 1",
        "X\u{7f}Y: 1",
        "Xé: 1",
        "X/Y: 1",
        "X,Y: 1",
        "X@Y: 1",
        "X[Y: 1",
        "X=Y: 1",
        "X<Y: 1",
        "X : 1",
        "X\t: 1",
        "X-A: a\0b",
        "X-A: a\u{1}b",
        "X-A: a\u{1b}[31mb",
        "X-A: a\u{7f}b",
        "X-A: a\rb",
        "X-A: a\rX-Inj: 1",
        "X-A: a\nX-B: b",
        "X-A: a\r\n b",
        "X-A: a\r\n\tb",
        " X-A: a",
        "X-A: a\r",
        "X-A: a\n",
    ] {
        assert_eq!(
            refused(&format!("GET / HTTP/1.1\r\nHost: gw\r\n{line}\r\n\r\n")),
            400,
            "{line:?}"
        );
        assert_eq!(
            refused(&format!("GET / HTTP/1.1\r\n{line}\r\nHost: gw\r\n\r\n")),
            400,
            "{line:?}"
        );
    }
    for whole in [
        "GET / HTTP/1.1\nHost: gw\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: gw\n\r\n",
        "GET / HTTP/1.1\r\nHost: gw\r\n\n",
        "GET / HTTP/1.1\nHost: gw\n\n",
        "GET / HTTP/1.0\n\n",
        "GET / HTTP/1.0\r\n\n",
        "GET / HTTP/1.0\n\r\n",
        "GET / HTTP/1.1\rHost: gw\r\r\n\r\n",
    ] {
        assert_eq!(refused(whole), 400, "{whole:?}");
    }
    accepted("GET / HTTP/1.1\r\nHost: gw\r\n#Odd|Name~: \u{e9}\ta\r\n\r\n");
}

#[test]
fn framing_has_one_reading() {
    for (fields, status) in [
        ("Content-Length: 5\r\nContent-Length: 5", 400),
        ("Content-Length: 0\r\nContent-Length: 5", 400),
        ("Content-Length: 5, 5", 400),
        ("Content-Length: -5", 400),
        ("Content-Length: +5", 400),
        ("Content-Length: 0x5", 400),
        ("Content-Length: 1 0", 400),
        ("Content-Length:", 400),
        ("Content-Length: 5.0", 400),
        ("Content-Length: 1e1", 400),
        ("Content-Length: 5;q=1", 400),
        ("Content-Length: \u{b}5", 400),
        ("Content-Length: 5\0", 400),
        ("Content-Length: ٥", 400),
        ("Content-Length: 18446744073709551616", 400),
        ("Content-Length: 18446744073709551621", 400),
        ("Content-Length: 000000000000000000005", 400),
        ("Content-Length : 5", 400),
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5", 400),
        ("Transfer-Encoding: gzip\r\nContent-Length: 5", 400),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: chunked\r\ntransfer-encoding: identity", 400),
        ("Transfer-Encoding: chunked, chunked", 400),
        ("Transfer-Encoding: gzip, chunked", 400),
        ("Transfer-Encoding: chunked, gzip", 400),
        ("Transfer-Encoding: ,chunked", 400),
        ("Transfer-Encoding: chunked;q=1", 400),
        ("Transfer-Encoding: chunked chunked", 400),
        ("Transfer-Encoding: \"chunked\"", 400),
        ("Transfer-Encoding: chun\u{212a}ed", 400),
        ("Transfer-Encoding:", 400),
        ("Transfer-Encoding: \u{c}chunked", 400),
        ("Transfer-Encoding:\r\n chunked", 400),
        ("Transfer-Encoding\u{a0}: chunked", 400),
        ("Transfer-Encoding: gzip", 501),
        ("Transfer-Encoding: identity", 501),
        ("Transfer-Encoding: xchunked", 501),
    ] {
        assert_eq!(
            refused(&format!("POST / HTTP/1.1\r\nHost: gw\r\n{fields}\r\n\r\n")),
            status,
            "{fields:?}"
        );
    }
    assert_eq!(refused("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
    for (fields, framing) in [
        ("X: 1", Framing::None),
        ("Content-Length: 0", Framing::Length(0)),
        ("Content-Length:\t5", Framing::Length(5)),
        ("content-length:0005", Framing::Length(5)),
        ("Content-Length: 18446744073709551615", Framing::Length(u64::MAX)),
        ("Content_Length: 9", Framing::None),
        ("#Transfer-Encoding: chunked", Framing::None),
        ("tRANSFER-eNCODING:cHuNkEd \t", Framing::Chunked),
    ] {
        let request = accepted(&format!("POST / HTTP/1.1\r\nHost: gw\r\n{fields}\r\n\r\n"));
        assert_eq!(request.framing, framing, "{fields:?}");
    }
}

#[test]
fn connection_options_say_who_stays_and_what_goes_no_further() {
    for (version, fields, keep_alive) in [
        ("1.1", "X: 1", true),
        ("1.1", "Connection: close", false),
        ("1.1", "Connection: keep-alive, Close", false),
        ("1.1", "Connection: x-a\r\nConnection: CLOSE", false),
        ("1.1", "Connection: Upgrade\r\nUpgrade: h2c", true),
        ("1.0", "X: 1", false),
        ("1.0", "Connection: Keep-Alive", true),
        ("1.0", "Connection: keep-alive, close", false),
    ] {
        let request = accepted(&format!("GET / HTTP/{version}\r\nHost: gw\r\n{fields}\r\n\r\n"));
        assert_eq!(request.keep_alive, keep_alive, "{version} {fields:?}");
    }
    let text = "GET / HTTP/1.1\r\nHost: gw\r\nX-A: 1\r\nConnection: ,x-a,\t x-B ,Content-Length\r\nX-b: 1\r\n\
        X-C: 1\r\nContent-Length: 3\r\n\r\n";
    let request = accepted(text);
    let listed: Vec<_> =
        request.fields.iter().filter(|f| f.listed).map(|f| f.name.of(text.as_bytes())).collect();
    assert_eq!(listed, [&b"X-A"[..], b"X-b", b"Content-Length"]);
    assert_eq!(request.framing, Framing::Length(3), "framing is never the client's to strip");
    for options in ["a b", "\"close\"", "close;q=1", &"x,".repeat(LISTED_MAX + 1)] {
        assert_eq!(
            refused(&format!("GET / HTTP/1.1\r\nHost: gw\r\nConnection: {options}\r\n\r\n")),
            400
        );
    }
}

#[test]
fn what_may_stand_once_stands_once() {
    for name in
        ["Authorization", "X-Api-Key", "Api-Key", "Content-Type", "Content-Encoding", "Expect"]
    {
        let text = format!("GET / HTTP/1.1\r\nHost: gw\r\n{name}: a\r\n{name}: a\r\n\r\n");
        assert_eq!(refused(&text), 400, "{name}");
    }
    accepted("GET / HTTP/1.1\r\nHost: gw\r\nAccept: a\r\nAccept: b\r\nX: 1\r\nX: 2\r\n\r\n");
}

#[test]
fn an_expectation_is_met_or_refused() {
    let expects = |fields: &str| {
        accepted(&format!("POST / HTTP/1.1\r\nHost: gw\r\n{fields}\r\n\r\n")).expect_continue
    };
    assert!(expects("Expect: 100-Continue\r\nContent-Length: 1"));
    assert!(expects("Expect: 100-continue\r\nTransfer-Encoding: chunked"));
    assert!(!expects("Expect: 100-continue"));
    assert!(!expects("Expect: 100-continue\r\nContent-Length: 0"));
    assert!(
        !accepted("POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n")
            .expect_continue
    );
    for bad in ["y 100-continue", "200-ok", "100-continue, x", ""] {
        assert_eq!(refused(&format!("POST / HTTP/1.1\r\nHost: gw\r\nExpect: {bad}\r\n\r\n")), 417);
    }
}

#[test]
fn bounds_hold_to_the_byte() {
    let limits = Limits { head_bytes: 1_000, target_bytes: 300, fields: 10 };
    let mut request = Request::default();
    let mut status = |text: &str| {
        let whole = parse_request(text.as_bytes(), &limits, &mut request).map_err(|r| r.status);
        let mut dripped = Ok(Parse::Partial);
        for end in 0..=text.len() {
            dripped =
                parse_request(&text.as_bytes()[..end], &limits, &mut request).map_err(|r| r.status);
            if dripped != Ok(Parse::Partial) {
                break;
            }
        }
        request.clear();
        assert_eq!(whole, dripped);
        whole
    };
    let head =
        |fill: usize| format!("GET / HTTP/1.1\r\nHost: gw\r\nX: {}\r\n\r\n", "a".repeat(fill - 33));
    assert_eq!(head(1_000).len(), 1_000);
    assert_eq!(status(&head(1_000)), Ok(Parse::Complete));
    assert_eq!(status(&head(1_001)), Err(431));
    assert_eq!(status(&head(100_000)), Err(431));
    let target = |fill: usize| format!("GET /{} HTTP/1.1{REST}", "a".repeat(fill - 1));
    assert_eq!(status(&target(300)), Ok(Parse::Complete));
    assert_eq!(status(&target(301)), Err(414));
    assert_eq!(status(&target(100_000)), Err(414));
    assert_eq!(status(&"A".repeat(100_000)), Err(501));
    let fields = |count: usize| {
        format!("GET / HTTP/1.1\r\n{}Host: gw\r\n\r\n", "A: b\r\n".repeat(count - 1))
    };
    assert_eq!(status(&fields(10)), Ok(Parse::Complete));
    assert_eq!(status(&fields(11)), Err(431));
    let wide = Limits { fields: 1_000, ..Limits::default() };
    let mut request = Request::default();
    assert_eq!(
        parse_request(fields(FIELDS_MAX).as_bytes(), &wide, &mut request),
        Ok(Parse::Complete)
    );
    assert!(parse_request(fields(FIELDS_MAX + 1).as_bytes(), &wide, &mut request).is_err());
}

#[test]
fn one_request_is_parsed_into_again_and_again() {
    let first = "GET /a HTTP/1.1\r\nHost: gw\r\nX: 1\r\nConnection: close\r\nY: 2\r\n\r\n";
    let pipelined =
        format!("{first}POST /b HTTP/1.1\r\nHost: gw\r\nContent-Length: 3\r\n\r\nabc{first}");
    let mut request = Request::default();
    let mut rest = pipelined.as_bytes();
    let mut seen = Vec::new();
    let mut capacity = 0;
    while !rest.is_empty() {
        assert_eq!(parse_request(rest, &Limits::default(), &mut request), Ok(Parse::Complete));
        seen.push((
            request.path(rest).to_vec(),
            request.framing,
            request.keep_alive,
            request.fields.len(),
        ));
        assert!(capacity == 0 || capacity == request.fields.capacity(), "no memory is taken again");
        capacity = request.fields.capacity();
        let body = if request.framing == Framing::Length(3) { 3 } else { 0 };
        rest = &rest[request.head_len + body..];
    }
    let a = (b"/a".to_vec(), Framing::None, false, 4);
    assert_eq!(seen, [a.clone(), (b"/b".to_vec(), Framing::Length(3), true, 2), a]);
    // A head that was begun and given up leaves nothing behind.
    assert_eq!(
        parse_request(b"GET / HTTP/1.1\r\nHo", &Limits::default(), &mut request),
        Ok(Parse::Partial)
    );
    request.clear();
    assert_eq!(
        parse_request(first.as_bytes(), &Limits::default(), &mut request),
        Ok(Parse::Complete)
    );
    // So does a head that was refused.
    assert_eq!(
        parse_request(b"GET / HTTP/1.1\r\nHo", &Limits::default(), &mut request),
        Ok(Parse::Partial)
    );
    assert!(parse_request(b"GET / HTTP/1.1\r\nHo\n", &Limits::default(), &mut request).is_err());
    assert_eq!(
        parse_request(first.as_bytes(), &Limits::default(), &mut request),
        Ok(Parse::Complete)
    );
}

#[test]
fn an_answer_is_framed_for_its_client() {
    let reply = |version: &str, framing, altered| {
        accepted(&format!("GET / HTTP/{version}\r\nHost: gw\r\nConnection: keep-alive\r\n\r\n"))
            .reply_framing(framing, altered)
    };
    assert_eq!(reply("1.1", Framing::None, true), (Framing::None, true));
    assert_eq!(reply("1.1", Framing::Length(5), false), (Framing::Length(5), true));
    assert_eq!(reply("1.1", Framing::Length(5), true), (Framing::Chunked, true));
    assert_eq!(reply("1.1", Framing::UntilClose, false), (Framing::Chunked, true));
    assert_eq!(reply("1.0", Framing::Length(5), false), (Framing::Length(5), true));
    assert_eq!(reply("1.0", Framing::Chunked, false), (Framing::UntilClose, false));
    assert_eq!(reply("1.0", Framing::Length(5), true), (Framing::UntilClose, false));
}

/// What the oracle says of a complete head.
#[derive(Debug, PartialEq)]
struct Naive {
    fields: Vec<(Vec<u8>, Vec<u8>)>,
    framing: Framing,
    keep_alive: bool,
    head_len: usize,
}

/// Reads a request head the obvious way, or gives nothing for a head that is to be refused; the
/// outer `None` is a head that has not ended.
fn naive(input: &[u8]) -> Option<Option<Naive>> {
    let mut start = 0;
    while start < 8 && input[start..].starts_with(b"\r\n") {
        start += 2;
    }
    let end = start + input[start..].windows(4).position(|four| four == b"\r\n\r\n")?;
    Some(read_naively(&input[start..end], end + 4))
}

fn read_naively(text: &[u8], head_len: usize) -> Option<Naive> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.windows(2).position(|two| two == b"\r\n") {
        lines.push(&rest[..at]);
        rest = &rest[at + 2..];
    }
    lines.push(rest);
    let mut words = lines[0].split(|&byte| byte == b' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let sound = words.next().is_none()
        && fields::is_token(method)
        && method != b"CONNECT"
        && method != b"TRACE";
    let new = version == b"HTTP/1.1";
    if !sound || !(new || version == b"HTTP/1.0") {
        return None;
    }
    let parts = target::split(target, method == b"OPTIONS").ok()?;
    let mut found = Vec::new();
    for line in &lines[1..] {
        let colon = line.iter().position(|&byte| byte == b':')?;
        let (name, mut value) = (&line[..colon], &line[colon + 1..]);
        while let [b' ' | b'\t', tail @ ..] = value {
            value = tail;
        }
        while let [head @ .., b' ' | b'\t'] = value {
            value = head;
        }
        if !fields::is_token(name) || !fields::is_value(value) {
            return None;
        }
        found.push((name.to_ascii_lowercase(), value.to_vec()));
    }
    let all = |name: &str| -> Vec<&[u8]> {
        found.iter().filter(|(n, _)| n == name.as_bytes()).map(|(_, v)| v.as_slice()).collect()
    };
    let once =
        ["host", "content-length", "transfer-encoding", "authorization", "content-type", "expect"];
    if once.iter().any(|name| all(name).len() > 1) || found.len() > 128 {
        return None;
    }
    match all("host")[..] {
        [] if !new => {}
        [host] if target::is_authority(host) => {
            let named = parts.authority.map(|range| &target[range]);
            if named.is_some_and(|named| !named.eq_ignore_ascii_case(host)) {
                return None;
            }
        }
        _ => return None,
    }
    let framing = match (&all("content-length")[..], &all("transfer-encoding")[..]) {
        ([], []) => Framing::None,
        ([length], []) => {
            let text = std::str::from_utf8(length).ok()?;
            let digits = text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit());
            Framing::Length(if digits { text.parse().ok()? } else { return None })
        }
        ([], [coding]) if new && coding.eq_ignore_ascii_case(b"chunked") => Framing::Chunked,
        _ => return None,
    };
    let mut options = Vec::new();
    for value in all("connection") {
        for option in
            value.split(|&byte| byte == b',').map(|option| option.trim_ascii().to_ascii_lowercase())
        {
            if !option.is_empty() && !fields::is_token(&option) {
                return None;
            }
            options.push(option);
        }
    }
    if all("expect").iter().any(|value| !value.eq_ignore_ascii_case(b"100-continue")) {
        return None;
    }
    let has = |name: &[u8]| options.iter().any(|option| option == name);
    let keep_alive = !has(b"close") && (new || has(b"keep-alive"));
    Some(Naive { fields: found, framing, keep_alive, head_len })
}

/// Changes a few bytes of a seed: flips, insertions of what matters, removals, doubled lines.
fn change(seed: &[u8], rng: &mut Rng) -> Vec<u8> {
    const BITS: [&[u8]; 18] = [
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b",",
        b"0",
        b"\xff",
        b"chunked",
        b"Host: a\r\n",
        b"\r\n ",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: close\r\n",
        b"HTTP/1.0",
        b"\r\n\r\n",
    ];
    let mut input = seed.to_vec();
    for _ in 0..=rng.below(3) {
        let at = rng.below(input.len() as u64) as usize;
        match rng.below(4) {
            0 => input[at] = rng.below(256) as u8,
            1 => drop(
                input.splice(at..at, BITS[rng.below(BITS.len() as u64) as usize].iter().copied()),
            ),
            2 => drop(input.drain(at..(at + 1 + rng.below(4) as usize).min(input.len()))),
            _ => {
                let line = input[at..]
                    .windows(2)
                    .position(|two| two == b"\r\n")
                    .map_or(0, |gap| at + gap + 2);
                let copy = input[at..line.max(at)].to_vec();
                input.splice(at..at, copy);
            }
        }
        if input.is_empty() {
            break;
        }
    }
    input
}

#[test]
fn changed_requests_are_read_as_the_oracle_reads_them() {
    let seeds: [&[u8]; 4] = [
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nAuthorization: Bearer k\r\nContent-Length: 5\r\n\r\nhello",
        b"POST /a?b HTTP/1.1\r\nhost: gw:80\r\nTransfer-Encoding: chunked\r\nConnection: x, close\r\nX: 1\r\n\r\n0\r\n\r\n",
        b"\r\nGET http://gw/ HTTP/1.1\r\nHost: gw\r\nAccept: */*\r\n\r\nGET / HTTP/1.1\r\nHost: gw\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
    ];
    let mut rng = Rng::seeded(11);
    let (mut request, mut complete, mut refused) = (Request::default(), 0, 0);
    for round in 0..40_000 {
        let input = change(seeds[rng.below(4) as usize], &mut rng);
        // Every other time in two parts.
        let cut = if round % 2 == 0 { 0 } else { rng.below(input.len() as u64 + 1) as usize };
        let mut got = parse_request(&input[..cut], &Limits::default(), &mut request);
        if got == Ok(Parse::Partial) {
            got = parse_request(&input, &Limits::default(), &mut request);
        }
        let shown = || input.escape_ascii().to_string();
        match (got, naive(&input)) {
            (Ok(Parse::Complete), Some(Some(wanted))) => {
                complete += 1;
                let fields = request.fields.iter().map(|field| {
                    assert_eq!(field.known, Known::of(field.name.of(&input)));
                    (field.name.of(&input).to_ascii_lowercase(), field.value.of(&input).to_vec())
                });
                let got = Naive {
                    fields: fields.collect(),
                    framing: request.framing,
                    keep_alive: request.keep_alive,
                    head_len: request.head_len,
                };
                assert_eq!(got, wanted, "{}", shown());
            }
            (Err(_), Some(None) | None) => refused += 1,
            (Ok(Parse::Partial), None) => {}
            (got, wanted) => panic!("{}: {got:?}, not {wanted:?}", shown()),
        }
        request.clear();
    }
    assert!(complete > 5_000 && refused > 5_000, "{complete} {refused}: both sides are tried");
}

fn answer(text: &str, method: Method) -> Result<(Parse, Response), BadResponse> {
    let mut whole = Response::default();
    let result = parse_response(text.as_bytes(), &Limits::default(), method, &mut whole);
    let mut dripped = Response::default();
    let mut last = Ok(Parse::Partial);
    for end in 0..=text.len() {
        last = parse_response(&text.as_bytes()[..end], &Limits::default(), method, &mut dripped);
        if last != Ok(Parse::Partial) {
            break;
        }
    }
    assert_eq!(result.is_err(), last.is_err(), "{text:?}");
    if result == Ok(Parse::Complete) {
        assert_eq!(format!("{whole:?}"), format!("{dripped:?}"));
    }
    result.map(|parse| (parse, whole))
}

#[test]
fn answers_are_framed_by_status_method_and_fields() {
    for (text, method, framing, keep_alive) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n", Method::Post, Framing::Length(11), true),
        ("HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", Method::Post, Framing::Length(0), true),
        (
            "HTTP/1.1 200 \r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\n",
            Method::Post,
            Framing::Length(5),
            true,
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n",
            Method::Post,
            Framing::Chunked,
            true,
        ),
        (
            "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\n",
            Method::Post,
            Framing::Length(1),
            false,
        ),
        ("HTTP/1.1 200 OK\r\n\r\n", Method::Post, Framing::UntilClose, false),
        ("HTTP/1.0 200 OK\r\n\r\n", Method::Get, Framing::UntilClose, false),
        ("HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", Method::Get, Framing::Length(1), false),
        (
            "HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\n",
            Method::Get,
            Framing::Length(1),
            true,
        ),
        ("HTTP/1.1 204 No Content\r\n\r\n", Method::Post, Framing::None, true),
        (
            "HTTP/1.1 204 No Content\r\nContent-Length: 6\r\n\r\n",
            Method::Post,
            Framing::None,
            false,
        ),
        (
            "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
            Method::Get,
            Framing::None,
            false,
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", Method::Head, Framing::None, false),
        ("HTTP/1.1 200 OK\r\n\r\n", Method::Head, Framing::None, true),
        ("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n", Method::Post, Framing::None, true),
        (
            "HTTP/1.1 503 \u{e9}\r\nContent-Length: 1\r\n\r\n",
            Method::Post,
            Framing::Length(1),
            true,
        ),
    ] {
        let (parse, response) = answer(text, method).unwrap();
        assert_eq!(parse, Parse::Complete, "{text:?}");
        assert_eq!((response.framing, response.keep_alive), (framing, keep_alive), "{text:?}");
        assert_eq!(response.is_interim(), response.status == 103);
        assert_eq!(response.head_len, text.len());
    }
}

#[test]
fn answers_that_two_readers_would_read_differently_are_refused() {
    for head in [
        "HTTP/1.1 200 OK\r\nContent-Length: 11\r\nContent-Length: 3",
        "HTTP/1.1 200 OK\r\nContent-Length: 11, 3",
        "HTTP/1.1 200 OK\r\nContent-Length: 11, 11",
        "HTTP/1.1 200 OK\r\nContent-Length: -1",
        "HTTP/1.1 200 OK\r\nContent-Length: 0xb",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551627",
        "HTTP/1.1 204 No Content\r\nContent-Length: x",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 099 X",
        "HTTP/1.1 600 X",
        "HTTP/1.1 1000 X",
        "HTTP/1.1 20 X",
        "HTTP/2.0 200 OK",
        "http/1.1 200 OK",
        "HTTP/1.1  200 OK",
        "UPSTREAM-OK",
        "\0\u{1}\u{2}",
        "\r\nHTTP/1.1 200 OK",
        "HTTP/1.1 200 OK\r\nX-A: a\0b",
        "HTTP/1.1 200 OK\r\nX-A: a\rX-Inj: 1",
        "HTTP/1.1 200 OK\r\nX-A: a\nX-Inj: 1",
        "HTTP/1.1 200 OK\r\nContent-Length : 11",
        "HTTP/1.1 200 OK\r\nBadLine",
        "HTTP/1.1 200 OK\r\n X-A: a",
        "HTTP/1.1 200 OK\r\nConnection: a b",
    ] {
        let text = format!("{head}\r\n\r\n");
        assert!(matches!(answer(&text, Method::Post), Err(BadResponse::Malformed(_))), "{head:?}");
    }
    assert!(matches!(
        answer("HTTP/1.1 200 OK\nX: a\n\n", Method::Post),
        Err(BadResponse::Malformed(_))
    ));
    let switch = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n";
    assert!(matches!(answer(switch, Method::Get), Err(BadResponse::Switching)));
    for big in [
        format!("HTTP/1.1 200 OK\r\nX: {}", "a".repeat(70_000)),
        format!("HTTP/1.1 200 OK\r\n{}", "A: b\r\n".repeat(129)),
    ] {
        let mut response = Response::default();
        let got = parse_response(big.as_bytes(), &Limits::default(), Method::Get, &mut response);
        assert_eq!(got, Err(BadResponse::TooLarge));
    }
}

#[test]
fn changed_answers_never_yield_what_could_split_a_head() {
    let seeds: [&[u8]; 2] = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-A: b\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 404 Not Found\r\nContent-Length: 5\r\nConnection: close, x-a\r\nX-A:\r\n\r\nhello",
    ];
    let mut rng = Rng::seeded(13);
    let (mut response, mut complete) = (Response::default(), 0);
    for _ in 0..20_000 {
        let input = change(seeds[rng.below(2) as usize], &mut rng);
        let cut = rng.below(input.len() as u64 + 1) as usize;
        let mut got =
            parse_response(&input[..cut], &Limits::default(), Method::Post, &mut response);
        if got == Ok(Parse::Partial) {
            got = parse_response(&input, &Limits::default(), Method::Post, &mut response);
        }
        if got == Ok(Parse::Complete) {
            complete += 1;
            let head = &input[..response.head_len];
            assert!(
                head.ends_with(b"\r\n\r\n")
                    && head.windows(4).filter(|four| four == b"\r\n\r\n").count() == 1
            );
            // Each CR and LF of the head belongs to a line end.
            let lines = head.windows(2).filter(|two| two == b"\r\n").count();
            assert_eq!(lines, head.iter().filter(|&&byte| byte == b'\n').count());
            assert_eq!(lines, head.iter().filter(|&&byte| byte == b'\r').count());
            assert_eq!(lines, response.fields.len() + 2);
            let count = |name: &str| {
                response
                    .fields
                    .iter()
                    .filter(|f| f.name.of(head).eq_ignore_ascii_case(name.as_bytes()))
                    .count()
            };
            match response.framing {
                Framing::Chunked => {
                    assert_eq!((count("transfer-encoding"), count("content-length")), (1, 0))
                }
                Framing::Length(_) => {
                    assert_eq!((count("transfer-encoding"), count("content-length").min(1)), (0, 1))
                }
                Framing::None | Framing::UntilClose => assert_eq!(
                    count("transfer-encoding")
                        * usize::from(response.framing == Framing::UntilClose),
                    0
                ),
            }
        }
        response.clear();
    }
    assert!(complete > 2_000, "{complete}");
}

/// Whether the quick readers take a head; what they take, the general ones must read alike.
fn read_alike(text: &[u8], limits: &Limits) -> bool {
    let window = text.get(..limits.head_bytes).unwrap_or(text);
    let shown = text.escape_ascii();
    let (mut quick, mut general) = (Request::default(), Request::default());
    let begun = general.scan.skip_empty_lines(window) == Ok(true);
    quick.scan = general.scan;
    let mut facts = Facts::default();
    if begun && usual::request(window, limits, &mut quick, &mut facts).is_some() {
        let Ok(Some(wanted)) = any_request(window, limits, &mut general) else { panic!("{shown}") };
        assert_eq!(format!("{facts:?} {quick:?}"), format!("{wanted:?} {general:?}"), "{shown}");
        return true;
    }
    let (mut quick, mut general) = (Response::default(), Response::default());
    let mut facts = Facts::default();
    if usual::response(window, limits, &mut quick, &mut facts).is_some() {
        let Ok(Some(wanted)) = any_response(window, limits, &mut general) else {
            panic!("{shown}")
        };
        assert_eq!(format!("{facts:?} {quick:?}"), format!("{wanted:?} {general:?}"), "{shown}");
        return true;
    }
    false
}

#[test]
fn what_the_quick_reader_takes_the_general_one_reads_alike() {
    let heads = [
        "POST /v1/chat/completions?a=b HTTP/1.1\r\nhost: gw:1\r\nConnection: keep-alive, x-a\r\nX-a: 1\r\n\
         content-length: 12\r\nuser-agent: a b\r\n\r\n{}",
        "GET / HTTP/1.1\r\nHost: gw\r\nExpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\nConnection: close\r\n\
         content-length: 4\r\n\r\n{}",
        "HTTP/1.1 200 OK\r\ndate: x\r\ntransfer-encoding: chunked\r\n\r\n",
    ];
    let limits = Limits { head_bytes: 180, target_bytes: 24, fields: 5 };
    for head in heads {
        let end = head.find("\r\n\r\n").unwrap() + 4;
        for cut in 0..=head.len() {
            assert_eq!(read_alike(&head.as_bytes()[..cut], &limits), cut >= end, "{head}");
        }
        // Every byte at every place; then what changes a head's meaning, put in or over its bytes.
        let mut taken = 0;
        for at in 0..head.len() {
            for byte in 0..=255 {
                let mut text = head.as_bytes().to_vec();
                text[at] = byte;
                taken += usize::from(read_alike(&text, &limits));
            }
        }
        assert!(taken > head.len() * 20, "{taken} of {head}");
    }
    let mut rng = Rng::seeded(23);
    let parts = [
        "\r\n",
        "\n",
        "\r",
        " ",
        "\t",
        ":",
        ": ",
        "?",
        "#",
        "\0",
        "\u{7f}",
        "é",
        "\r\n ",
        "\r\n\r\n",
        ",",
        "\r\nHost: gw",
        "\r\nContent-Length: 5",
        "\r\nTransfer-Encoding: chunked",
        "\r\nX:",
        "\r\nConnection: close, x-a",
        "\r\nAuthorization: a",
        "\r\nContent-Length: ",
        "/",
        "A",
        " HTTP/1.1\r\n",
    ];
    for _ in 0..60_000 {
        let mut text = heads[rng.below(heads.len() as u64) as usize].as_bytes().to_vec();
        for _ in 0..=rng.below(3) {
            let at = rng.below(text.len() as u64) as usize;
            let over = rng.below(4).min((text.len() - at) as u64) as usize;
            let part = parts[rng.below(parts.len() as u64) as usize];
            text.splice(at..at + over, part.bytes());
        }
        read_alike(&text, &limits);
        read_alike(&text, &Limits::default());
    }
}
