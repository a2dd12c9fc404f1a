//! HTTP/1.1: a message has one reading or is refused, however it drips in; what is written is read
//! back the same. Oracles: readers of whole heads and whole chunked bodies that split lines.

use crate::pure::fields::{self, Field, Forward, Name, Own};
use crate::pure::h1::{
    Answer, BasePath, BodyFault, Decoder, Framing, LAST_CHUNK, Limits, Method, Outgoing, Parse,
    Request, Response, Version, append_chunk, parse_request, parse_response, write_request,
    write_response,
};
use crate::pure::units::Rng;
use crate::{cuts, find, pick, steer};

/// Mode: 0 a request, 1 a response, 2 a chunked body, 3 a body of another framing (modulo 4).
pub fn run(input: &[u8]) {
    let Some((mode, mut rng, bytes)) = steer(input) else { return };
    match mode % 4 {
        0 => request(&mut rng, bytes),
        1 => response(&mut rng, bytes),
        2 => chunked(&mut rng, bytes),
        _ => unchunked(&mut rng, bytes),
    }
}

fn limits(rng: &mut Rng) -> Limits {
    match rng.below(4) {
        0 | 1 => Limits::default(),
        2 => Limits {
            head_bytes: 32 + pick(rng, 512),
            target_bytes: 4 + pick(rng, 64),
            fields: pick(rng, 8),
        },
        _ => Limits { head_bytes: 1 << 20, target_bytes: 1 << 20, fields: 200 },
    }
}

/// Room for whatever the gateway makes of an admitted head.
const WIDE: Limits = Limits { head_bytes: 4 << 20, target_bytes: 4 << 20, fields: 256 };

// ---- requests

fn request(rng: &mut Rng, buf: &[u8]) {
    let limits = limits(rng);
    let mut whole = Request::default();
    let verdict = parse_request(buf, &limits, &mut whole);
    let mut drip = Request::default();
    if rng.below(2) == 0 {
        // What another message left behind must not matter.
        let _ = parse_request(b"POST /x HTTP/1.1\r\nhost: a\r\nexpect", &limits, &mut drip);
        drip.clear();
    }
    let (mut last, mut seen) = (Ok(Parse::Partial), 0);
    for end in cuts(rng, buf.len()) {
        (last, seen) = (parse_request(&buf[..end], &limits, &mut drip), end);
        if last != Ok(Parse::Partial) {
            break;
        }
    }
    let dripped = &buf[..seen];
    match (&verdict, &last) {
        (Ok(Parse::Complete), Ok(Parse::Complete)) => {
            assert_eq!(view(buf, &whole), view(dripped, &drip));
        }
        (Ok(Parse::Partial), Ok(Parse::Partial)) | (Err(_), Err(_)) => {}
        // A head that has begun is looked at for its end alone: what is wrong in it comes out then.
        (Err(_), Ok(Parse::Partial)) => assert!(find(begun(dripped), b"\r\n\r\n").is_none()),
        _ => panic!("whole {verdict:?}, dripped {last:?}"),
    }
    if let Err(refusal) = verdict {
        assert!([400, 405, 414, 417, 431, 501, 505].contains(&refusal.status));
    }
    if verdict != Ok(Parse::Complete) {
        return;
    }

    let head = &buf[..whole.head_len];
    assert!(head.len() <= limits.head_bytes && whole.fields.len() <= limits.fields);
    assert!(whole.target.of(buf).len() <= limits.target_bytes);
    let mut again = Request::default();
    assert_eq!(parse_request(head, &limits, &mut again), Ok(Parse::Complete));
    assert_eq!(view(head, &again), view(buf, &whole));
    for short in [head.len() - 1, pick(rng, head.len())] {
        let begun = parse_request(&head[..short], &limits, &mut Request::default());
        assert_eq!(begun, Ok(Parse::Partial), "the first {short} bytes of a sound head");
    }
    check_request(buf, &whole);
    forwarded(rng, buf, &whole);
}

/// Without the empty lines that may stand before a request.
fn begun(mut buf: &[u8]) -> &[u8] {
    while let Some(rest) = buf.strip_prefix(b"\r\n") {
        buf = rest;
    }
    buf
}

/// All that a request says, without where it stands.
fn view<'b>(buf: &'b [u8], request: &'b Request) -> impl PartialEq + std::fmt::Debug + 'b {
    let fields: Vec<_> = request
        .fields
        .iter()
        .map(|f| (f.name.of(buf), f.value.of(buf), f.known, f.listed))
        .collect();
    (
        (request.method.name(buf), request.target.of(buf), request.path(buf), request.query(buf)),
        (request.version, request.framing, request.keep_alive, request.expect_continue),
        (request.head_len, fields),
    )
}

/// The request against an obvious reading of its head.
fn check_request(buf: &[u8], request: &Request) {
    let (line, lines) =
        split_head(begun(&buf[..request.head_len])).expect("a head has one reading");
    let parts: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let [method, target, version] = parts[..] else { panic!("a request line has three parts") };
    assert!(fields::is_token(method) && !target.is_empty());
    assert_eq!(request.method.name(buf), method);
    assert_eq!(request.target.of(buf), target);
    let version: &[u8] = version;
    assert_eq!(version, if request.version == Version::Http10 { b"HTTP/1.0" } else { b"HTTP/1.1" });
    check_fields(buf, &request.fields, &lines);

    let all = |name: &str| values(&lines, name);
    let hosts = all("host");
    assert!(hosts.len() == 1 || hosts.is_empty() && request.version == Version::Http10);
    for once in ["authorization", "x-api-key", "api-key", "content-type", "content-encoding"] {
        assert!(all(once).len() <= 1, "{once}");
    }
    let framing = match (&all("transfer-encoding")[..], &all("content-length")[..]) {
        ([], []) => Framing::None,
        ([], [length]) => Framing::Length(number(length).expect("a length is a number")),
        ([coding], []) => {
            assert!(coding.eq_ignore_ascii_case(b"chunked") && request.version == Version::Http11);
            Framing::Chunked
        }
        both => panic!("{both:?} have two readings"),
    };
    assert_eq!(request.framing, framing);
    check_connection(&request.fields, buf, &lines, request.version, request.keep_alive);

    let (path, query) = (request.path(buf), request.query(buf));
    assert!(path.first() == Some(&b'/') || path == b"*" && request.method == Method::Options);
    assert!(!path.contains(&b'?') && (query.is_empty() || query.starts_with(b"?")));
    let joined = [path, query].concat();
    if target.starts_with(b"/") || path == b"*" {
        assert_eq!(joined, target);
    } else {
        assert!(target.ends_with(&joined) || path == b"/" && target.ends_with(query));
        let host = hosts.first().copied().unwrap_or_default().to_ascii_lowercase();
        assert!(find(&target.to_ascii_lowercase(), &host).is_some());
    }
}

/// What a backend would get, read as a backend would.
fn forwarded(rng: &mut Rng, buf: &[u8], request: &Request) {
    let bases = ["", "/v1", "/openai/v1", "/api/v3"];
    let base = BasePath::parse(bases[pick(rng, bases.len())]).expect("a base path");
    let Ok(joined) = base.join(request.path(buf), request.query(buf)) else { return };
    let mut target = b"kept".to_vec();
    joined.write(&mut target);
    let target = target.strip_prefix(b"kept").expect("what was there stays");
    for trap in [&b"//"[..], b"/./", b"/../", b"\\", b"#", b" ", b"%2f", b"%2F", b"%00", b"%2e"] {
        let path = target.split(|&byte| byte == b'?').next().unwrap_or_default();
        assert!(find(path, trap).is_none(), "{trap:?}");
    }
    let forward = match rng.below(3) {
        0 => Forward::default(),
        1 => Forward::parse(["X-Trace-Me", "x-team-*"]).expect("names"),
        _ => Forward::parse(["auth*", "prox*", "host*", "cont*", "tran*", "conn*", "x-fo*"])
            .expect("names"),
    };
    // An identifier from outside: whatever stands in the buffer.
    let from = pick(rng, buf.len() + 1);
    let id = &buf[from..buf.len().min(from + pick(rng, 24))];
    static NAMES: [Name; 3] =
        [Name::new("authorization"), Name::new("x-request-id"), Name::new("baggage")];
    let said: [Line; 3] =
        [(b"authorization", b"Bearer ours"), (b"x-request-id", id), (b"baggage", b"")];
    let said = &said[..pick(rng, 4)];
    let own = &quoted(&NAMES, said);
    let head = Outgoing {
        method: request.method.name(buf),
        target: joined,
        host: "backend:8000",
        framing: request.framing,
        forward: &forward,
        own,
    };
    let mut out = b"before".to_vec();
    write_request(&mut out, &head, buf, &request.fields);
    let out = out.strip_prefix(b"before").expect("what was there stays");

    let mut back = Request::default();
    assert_eq!(parse_request(out, &WIDE, &mut back), Ok(Parse::Complete));
    assert_eq!(back.head_len, out.len());
    assert_eq!(back.method.name(out), head.method);
    assert_eq!(back.target.of(out), target);
    assert_eq!((back.version, back.framing), (Version::Http11, request.framing));
    assert!(back.keep_alive && !back.expect_continue);
    let mut expected: Vec<(&[u8], &[u8])> =
        vec![(b"host", b"backend:8000"), (b"accept-encoding", b"identity")];
    expected.extend(crossing(buf, &request.fields, said, |name, field| {
        fields::crosses_up(name, field.known, field.listed, &forward)
    }));
    check_written(out, &back.fields, &expected, request.framing, said);
    for (name, value) in read(out, &back.fields) {
        let ours = said.iter().any(|&(own, said)| name.eq_ignore_ascii_case(own) && value == said);
        for never in CREDENTIALS_AND_HOPS {
            assert!(ours || !name.eq_ignore_ascii_case(never.as_bytes()), "{never} crossed");
        }
    }
}

const CREDENTIALS_AND_HOPS: [&str; 14] = [
    "authorization",
    "x-api-key",
    "api-key",
    "cookie",
    "proxy-authorization",
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "http2-settings",
    "openai-organization",
];

// ---- responses

fn response(rng: &mut Rng, buf: &[u8]) {
    let limits = limits(rng);
    let method = [Method::Get, Method::Head, Method::Post][pick(rng, 3)];
    let mut whole = Response::default();
    let verdict = parse_response(buf, &limits, method, &mut whole);
    let mut drip = Response::default();
    let (mut last, mut seen) = (Ok(Parse::Partial), 0);
    for end in cuts(rng, buf.len()) {
        (last, seen) = (parse_response(&buf[..end], &limits, method, &mut drip), end);
        if last != Ok(Parse::Partial) {
            break;
        }
    }
    let dripped = &buf[..seen];
    match (&verdict, &last) {
        (Ok(Parse::Complete), Ok(Parse::Complete)) => {
            assert_eq!(response_view(buf, &whole), response_view(dripped, &drip));
        }
        (Ok(Parse::Partial), Ok(Parse::Partial)) | (Err(_), Err(_)) => {}
        (Err(_), Ok(Parse::Partial)) => assert!(find(dripped, b"\r\n\r\n").is_none()),
        _ => panic!("whole {verdict:?}, dripped {last:?}"),
    }
    if verdict != Ok(Parse::Complete) {
        return;
    }
    let head = &buf[..whole.head_len];
    assert!(head.len() <= limits.head_bytes && whole.fields.len() <= limits.fields);
    for short in [head.len() - 1, pick(rng, head.len())] {
        let begun = parse_response(&head[..short], &limits, method, &mut Response::default());
        assert_eq!(begun, Ok(Parse::Partial), "the first {short} bytes of a sound head");
    }
    check_response(buf, &whole, method);
    if !whole.is_interim() {
        relayed(rng, buf, &whole, method);
    }
}

fn response_view<'b>(buf: &'b [u8], response: &Response) -> impl PartialEq + std::fmt::Debug + 'b {
    let fields: Vec<_> = response
        .fields
        .iter()
        .map(|f| (f.name.of(buf), f.value.of(buf), f.known, f.listed))
        .collect();
    (
        response.status,
        response.version,
        response.framing,
        response.keep_alive,
        response.head_len,
        fields,
    )
}

fn check_response(buf: &[u8], response: &Response, method: Method) {
    let (line, lines) = split_head(&buf[..response.head_len]).expect("a head has one reading");
    let version: &[u8] =
        if response.version == Version::Http10 { b"HTTP/1.0 " } else { b"HTTP/1.1 " };
    let rest = line.strip_prefix(version).expect("a version and a space");
    let (code, reason) = rest.split_at(3);
    assert_eq!(number(code), Some(u64::from(response.status)));
    assert!(reason.is_empty() || reason[0] == b' ');
    assert!((100..600).contains(&response.status) && response.status != 101);
    check_fields(buf, &response.fields, &lines);

    let all = |name: &str| values(&lines, name);
    let (codings, lengths) = (all("transfer-encoding"), all("content-length"));
    let announced = match (&codings[..], &lengths[..]) {
        ([], []) => Framing::UntilClose,
        ([], [first, others @ ..]) => {
            let length = number(first).expect("a length is a number");
            assert!(others.iter().all(|other| number(other) == Some(length)));
            Framing::Length(length)
        }
        ([coding], []) => {
            assert!(coding.eq_ignore_ascii_case(b"chunked") && response.version == Version::Http11);
            Framing::Chunked
        }
        both => panic!("{both:?} have two readings"),
    };
    let bodiless = method == Method::Head || matches!(response.status, ..200 | 204 | 304);
    assert_eq!(response.framing, if bodiless { Framing::None } else { announced });
    if response.framing == Framing::UntilClose {
        assert!(!response.keep_alive);
    }
    if response.keep_alive {
        check_connection(&response.fields, buf, &lines, response.version, true);
    }
}

/// What a client would get, read as a client would.
fn relayed(rng: &mut Rng, buf: &[u8], response: &Response, method: Method) {
    let mut request = Request::default();
    request.version = [Version::Http10, Version::Http11][pick(rng, 2)];
    request.keep_alive = rng.below(2) == 0;
    let (framing, keep_alive) = request.reply_framing(response.framing, rng.below(2) == 0);
    let from = pick(rng, buf.len() + 1);
    let id = &buf[from..buf.len().min(from + pick(rng, 24))];
    static NAMES: [Name; 2] = [Name::new("x-request-id"), Name::new("cache-control")];
    let said: [Line; 2] = [(b"x-request-id", id), (b"cache-control", b"no-cache")];
    let said = &said[..pick(rng, 3)];
    let own = &quoted(&NAMES, said);
    let answer =
        Answer { status: response.status, version: request.version, framing, keep_alive, own };
    let mut out = Vec::new();
    write_response(&mut out, &answer, buf, &response.fields);

    let mut back = Response::default();
    assert_eq!(parse_response(&out, &WIDE, method, &mut back), Ok(Parse::Complete));
    assert_eq!((back.status, back.head_len), (response.status, out.len()));
    assert_eq!((back.framing, back.keep_alive), (framing, keep_alive));
    let mut expected: Vec<(&[u8], &[u8])> = crossing(buf, &response.fields, said, |name, field| {
        fields::crosses_down(name, field.known, field.listed)
    })
    .collect();
    let mut read_back = read(&out, &back.fields);
    read_back.retain(|(name, _)| !name.eq_ignore_ascii_case(b"connection"));
    expected.extend(legal(said));
    expected.extend(framing_line(framing));
    let expected: Vec<_> =
        expected.iter().map(|(n, v)| (n.to_ascii_lowercase(), v.to_vec())).collect();
    let found: Vec<_> = read_back
        .iter()
        .map(|(n, v)| {
            (
                n.to_ascii_lowercase(),
                if n.eq_ignore_ascii_case(b"content-length") { b"#".to_vec() } else { v.to_vec() },
            )
        })
        .collect();
    assert_eq!(found, expected);
}

// ---- heads

type Line<'b> = (&'b [u8], &'b [u8]);

/// The first line, and names and values of the others. `None` if a line does not end in CRLF or has
/// no colon.
fn split_head(head: &[u8]) -> Option<(&[u8], Vec<Line<'_>>)> {
    let mut rest = head.strip_suffix(b"\r\n")?;
    let mut lines = Vec::new();
    while !rest.is_empty() {
        let (line, behind) = rest.split_at(rest.iter().position(|b| matches!(b, b'\r' | b'\n'))?);
        rest = behind.strip_prefix(b"\r\n")?;
        lines.push(line);
    }
    let (first, others) = lines.split_first()?;
    Some((first, others.iter().map(|line| split_line(line)).collect::<Option<_>>()?))
}

fn split_line(line: &[u8]) -> Option<Line<'_>> {
    let (name, value) = line.split_at(line.iter().position(|&byte| byte == b':')?);
    Some((name, trim(&value[1..])))
}

fn trim(value: &[u8]) -> &[u8] {
    let blank = |byte: &&u8| matches!(byte, b' ' | b'\t');
    let value = &value[value.iter().take_while(blank).count()..];
    &value[..value.len() - value.iter().rev().take_while(blank).count()]
}

fn values<'b>(lines: &[Line<'b>], name: &str) -> Vec<&'b [u8]> {
    lines.iter().filter(|l| l.0.eq_ignore_ascii_case(name.as_bytes())).map(|l| l.1).collect()
}

fn number(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    std::str::from_utf8(text).ok().filter(|_| digits)?.parse().ok()
}

fn read<'b>(buf: &'b [u8], parsed: &[Field]) -> Vec<Line<'b>> {
    parsed.iter().map(|field| (field.name.of(buf), field.value.of(buf))).collect()
}

fn check_fields(buf: &[u8], parsed: &[Field], lines: &[Line]) {
    assert_eq!(read(buf, parsed), lines);
    for field in parsed {
        let name = field.name.of(buf);
        assert!(fields::is_token(name) && fields::is_value(field.value.of(buf)));
        assert_eq!(field.known, fields::Known::of(name));
    }
}

fn check_connection(parsed: &[Field], buf: &[u8], lines: &[Line], version: Version, stays: bool) {
    let options: Vec<Vec<u8>> = values(lines, "connection")
        .iter()
        .flat_map(|value| value.split(|&byte| byte == b','))
        .map(|option| option.trim_ascii().to_ascii_lowercase())
        .collect();
    let has = |word: &[u8]| options.iter().any(|option| option == word);
    assert_eq!(stays, !has(b"close") && (version == Version::Http11 || has(b"keep-alive")));
    for field in parsed {
        let name = field.name.of(buf).to_ascii_lowercase();
        let told = name != b"close" && name != b"keep-alive" && has(&name);
        assert_eq!(field.listed, told, "{name:?}");
    }
}

/// Fields that cross and are not replaced by the gateway's own.
fn crossing<'b>(
    buf: &'b [u8],
    parsed: &'b [Field],
    own: &'b [Line],
    crosses: impl Fn(&[u8], &Field) -> bool + 'b,
) -> impl Iterator<Item = Line<'b>> + 'b {
    parsed.iter().map(move |field| (field, field.name.of(buf))).filter_map(move |(field, name)| {
        let taken = own.iter().any(|(own, _)| name.eq_ignore_ascii_case(own));
        (crosses(name, field) && !taken).then(|| (name, field.value.of(buf)))
    })
}

/// The gateway's own fields, under names that were made of them.
fn quoted<'b>(names: &'static [Name], own: &[Line<'b>]) -> Own<'b> {
    let mut quoted = Own::default();
    for (name, (_, value)) in names.iter().zip(own) {
        quoted.quote(name, value);
    }
    quoted
}

/// Those that are fit to be said.
fn legal<'b>(own: &'b [Line<'b>]) -> impl Iterator<Item = Line<'b>> + 'b {
    own.iter().copied().filter(|(_, value)| fields::is_value(value))
}

/// A length is compared elsewhere.
fn framing_line(framing: Framing) -> Option<Line<'static>> {
    match framing {
        Framing::None | Framing::UntilClose => None,
        Framing::Chunked => Some((b"transfer-encoding", b"chunked")),
        Framing::Length(_) => Some((b"content-length", b"#")),
    }
}

fn check_written(out: &[u8], parsed: &[Field], expected: &[Line], framing: Framing, own: &[Line]) {
    let mut expected = expected.to_vec();
    expected.extend(legal(own));
    expected.extend(framing_line(framing));
    let found: Vec<Line> = read(out, parsed)
        .into_iter()
        .map(
            |(name, value)| {
                if name == b"content-length" { (name, &b"#"[..]) } else { (name, value) }
            },
        )
        .collect();
    assert_eq!(found, expected);
}

// ---- bodies

/// What a decoder made of a body: its bytes, how much of the input it used, how it ended.
#[derive(Debug, PartialEq)]
struct Decoded {
    body: Vec<u8>,
    used: usize,
    ending: Ending,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    More,
    Done,
    Fault(BodyFault),
}

fn decode(mut decoder: Decoder, bytes: &[u8], ends: &[usize], joined: bool) -> Decoded {
    let mut found = Decoded { body: Vec::new(), used: 0, ending: Ending::More };
    let mut from = 0;
    for &end in ends {
        let mut part = bytes[from..end].to_vec();
        let mut at = 0;
        loop {
            let before = part.len();
            let step = if joined {
                decoder.decode_joined(&mut part[at..])
            } else {
                decoder.decode(&part[at..])
            };
            let piece = match step {
                Ok(piece) => piece,
                Err(fault) => {
                    assert_eq!(decoder.decode(b"0\r\n\r\n"), Err(fault), "a fault stays");
                    assert_eq!(decoder.eof(), Err(fault));
                    // How much sound framing goes with a fault depends on the cuts.
                    (found.used, found.ending) = (0, Ending::Fault(fault));
                    return found;
                }
            };
            assert!(piece.data.start <= piece.data.end && piece.data.end <= piece.consumed);
            assert!(at + piece.consumed <= before);
            found.body.extend_from_slice(&part[at..][piece.data.clone()]);
            at += piece.consumed;
            found.used += piece.consumed;
            assert_eq!(part[at..], bytes[from + at..end], "what is not consumed is not touched");
            assert_eq!(piece.end, decoder.is_done());
            if piece.end {
                let after = decoder.decode(b"GET /").expect("no fault behind the end");
                assert_eq!((after.consumed, after.data.len(), after.end), (0, 0, true));
                assert_eq!(decoder.eof(), Ok(()));
                found.ending = Ending::Done;
                return found;
            }
            if at == part.len() {
                break;
            }
            assert!(piece.consumed > 0, "a call makes progress");
        }
        from = end;
    }
    found
}

fn chunked(rng: &mut Rng, bytes: &[u8]) {
    let all = [bytes.len()];
    let whole = decode(Decoder::new(Framing::Chunked), bytes, &all, false);
    let ends = cuts(rng, bytes.len());
    for (ends, joined) in [(&all[..], true), (&ends, false), (&ends, true)] {
        assert_eq!(decode(Decoder::new(Framing::Chunked), bytes, ends, joined), whole);
    }

    // Extensions and trailers are bounded, which the oracle is not.
    if bytes.len() < 16 * 1024 {
        let expected = match naive_chunked(bytes) {
            None => None,
            Some(None) => Some(Ending::More),
            Some(Some((body, used))) => {
                assert_eq!((&body, used), (&whole.body, whole.used));
                Some(Ending::Done)
            }
        };
        match whole.ending {
            Ending::Fault(fault) => {
                assert!(matches!(fault, BodyFault::Malformed(_)), "{fault:?}");
                assert_eq!(expected, None);
            }
            ending => assert_eq!(expected, Some(ending)),
        }
    }

    let most = rng.below(64);
    let bounded = decode(Decoder::bounded(Framing::Chunked, most), bytes, &ends, joined(rng));
    assert!(bounded.body.len() as u64 <= most && whole.body.starts_with(&bounded.body));
    match bounded.ending {
        Ending::Fault(BodyFault::TooLarge) => {}
        _ => assert_eq!(bounded, whole),
    }

    let mut wire = Vec::new();
    let mut from = 0;
    for end in cuts(rng, bytes.len()) {
        append_chunk(&mut wire, &bytes[from..end]);
        from = end;
    }
    wire.extend_from_slice(LAST_CHUNK);
    let used = wire.len();
    wire.extend_from_slice(b"HTTP/1.1 200 OK");
    let ends = cuts(rng, wire.len());
    let back = decode(Decoder::new(Framing::Chunked), &wire, &ends, joined(rng));
    assert_eq!((&back.body[..], back.used, back.ending), (bytes, used, Ending::Done));
}

fn joined(rng: &mut Rng) -> bool {
    rng.below(2) == 0
}

/// Body and length of a whole chunked body; `Some(None)` if it is sound and not complete.
fn naive_chunked(bytes: &[u8]) -> Option<Option<(Vec<u8>, usize)>> {
    let (mut rest, mut body) = (bytes, Vec::new());
    loop {
        let digits = rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        if digits > 16 || digits == 0 && !rest.is_empty() {
            return None;
        }
        let text = &rest[digits..];
        if !matches!(text.first(), None | Some(b';' | b'\r')) {
            return None;
        }
        let Some(line) = line(text)? else { return Some(None) };
        let size = std::str::from_utf8(&rest[..digits]).ok()?;
        let size = u64::from_str_radix(size, 16).ok().filter(|&size| size < 1 << 63)?;
        rest = &rest[digits + line + 2..];
        if size == 0 {
            break;
        }
        let Some((data, behind)) =
            usize::try_from(size).ok().and_then(|n| rest.split_at_checked(n))
        else {
            return Some(None);
        };
        body.extend_from_slice(data);
        rest = match behind {
            [b'\r', b'\n', rest @ ..] => rest,
            [] | [b'\r'] => return Some(None),
            _ => return None,
        };
    }
    loop {
        let name = rest.iter().take_while(|&&byte| fields::is_token(&[byte])).count();
        if name < rest.len() && !matches!((name, rest[name]), (1.., b':') | (0, b'\r')) {
            return None;
        }
        let Some(len) = line(rest)? else { return Some(None) };
        rest = &rest[len + 2..];
        if len == 0 {
            return Some(Some((body, bytes.len() - rest.len())));
        }
    }
}

/// Length of the line that `rest` starts with; `Some(None)` if its end has not come.
fn line(rest: &[u8]) -> Option<Option<usize>> {
    let Some(stop) = rest.iter().position(|&byte| !fields::is_value(&[b'x', byte, b'x'])) else {
        return Some(None);
    };
    match rest[stop..] {
        [b'\r'] => Some(None),
        [b'\r', b'\n', ..] => Some(Some(stop)),
        _ => None,
    }
}

fn unchunked(rng: &mut Rng, bytes: &[u8]) {
    let framing = match rng.below(3) {
        0 => Framing::None,
        1 => Framing::Length(rng.below(2 * bytes.len() as u64 + 1)),
        _ => Framing::UntilClose,
    };
    let most = if rng.below(2) == 0 { u64::MAX } else { rng.below(2 * bytes.len() as u64 + 1) };
    let ends = cuts(rng, bytes.len());
    let found = decode(Decoder::bounded(framing, most), bytes, &ends, joined(rng));
    let len = bytes.len() as u64;
    let wanted = match framing {
        Framing::Length(length) => length,
        Framing::UntilClose => u64::MAX,
        Framing::None | Framing::Chunked => 0,
    };
    let too_large = most < if framing == Framing::UntilClose { len } else { wanted };
    let ending = match (too_large, wanted <= len) {
        (true, _) => Ending::Fault(BodyFault::TooLarge),
        (false, true) => Ending::Done,
        (false, false) => Ending::More,
    };
    assert_eq!(found.ending, ending);
    assert!(bytes.starts_with(&found.body) && found.body.len() as u64 <= most);
    if !too_large {
        assert_eq!((found.body.len() as u64, found.used), (wanted.min(len), found.body.len()));
    }
}
