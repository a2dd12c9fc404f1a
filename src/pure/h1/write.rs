//! Heads going out: built from parsed parts, never from framing bytes that somebody sent.

use super::{Framing, Target, Version};
use crate::pure::fields::{self, Field, Forward, Own};

/// Answers `Expect: 100-continue`.
pub const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// What the gateway decides about a request to a backend.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// As the client sent it: [`super::Method::name`].
    pub method: &'a [u8],
    pub target: Target<'a>,
    /// The backend's own authority; the port left out where it is the scheme's.
    pub host: &'a str,
    /// [`Framing::None`] and [`Framing::UntilClose`] write no framing: there is no body.
    pub framing: Framing,
    /// The pool's additions to what crosses.
    pub forward: &'a Forward,
    /// Credential, request id, trace: each replaces the client's field of that name.
    pub own: &'a Own<'a>,
}

/// Appends the whole head of a request to a backend. `buf` and `fields` are the client's parsed
/// head; both may be empty, for a request of the gateway's own.
pub fn write_request(out: &mut Vec<u8>, head: &Outgoing, buf: &[u8], fields: &[Field]) {
    out.reserve(head.host.len() + buf.len().min(4_096) + 256);
    out.extend_from_slice(head.method);
    out.push(b' ');
    head.target.write(out);
    out.extend_from_slice(b" HTTP/1.1\r\nhost: ");
    out.extend_from_slice(head.host.as_bytes());
    // Compressed answers could not be watched for usage.
    out.extend_from_slice(b"\r\naccept-encoding: identity\r\n");
    fields::copy_up(out, buf, fields, head.forward, head.own);
    fields::copy_own(out, head.own);
    framing(out, head.framing);
    out.extend_from_slice(b"\r\n");
}

/// What the gateway decides about an answer to a client.
#[derive(Clone, Copy, Debug)]
pub struct Answer<'a> {
    /// 100 to 999.
    pub status: u16,
    /// What the client speaks.
    pub version: Version,
    /// [`Framing::None`] writes no framing: for 204, 304 and answers to HEAD. An empty body of
    /// another answer is `Length(0)`. From [`super::Request::reply_framing`] for relayed answers.
    pub framing: Framing,
    /// Whether the connection serves another request after this one.
    pub keep_alive: bool,
    /// Request id, limits, what a stream needs: each replaces the backend's field of that name.
    pub own: &'a Own<'a>,
}

/// Appends the whole head of an answer to a client. `buf` and `fields` are the backend's parsed
/// head; both are empty for an answer of the gateway's own.
pub fn write_response(out: &mut Vec<u8>, head: &Answer, buf: &[u8], fields: &[Field]) {
    out.reserve(buf.len().min(4_096) + 256);
    if head.status == 200 {
        // In one piece what nearly all answers begin with.
        out.extend_from_slice(b"HTTP/1.1 200 OK\r\n");
    } else {
        out.extend_from_slice(b"HTTP/1.1 ");
        number(out, u64::from(head.status));
        out.push(b' ');
        out.extend_from_slice(reason(head.status).as_bytes());
        out.extend_from_slice(b"\r\n");
    }
    fields::copy_down(out, buf, fields, head.own);
    fields::copy_own(out, head.own);
    framing(out, head.framing);
    match (head.keep_alive, head.version) {
        (false, _) => out.extend_from_slice(b"connection: close\r\n"),
        (true, Version::Http10) => out.extend_from_slice(b"connection: keep-alive\r\n"),
        (true, Version::Http11) => {}
    }
    out.extend_from_slice(b"\r\n");
}

fn framing(out: &mut Vec<u8>, framing: Framing) {
    match framing {
        Framing::None | Framing::UntilClose => {}
        Framing::Chunked => out.extend_from_slice(b"transfer-encoding: chunked\r\n"),
        Framing::Length(bytes) => {
            out.extend_from_slice(b"content-length: ");
            number(out, bytes);
            out.extend_from_slice(b"\r\n");
        }
    }
}

fn number(out: &mut Vec<u8>, mut rest: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    while let Some(before) = at.checked_sub(1) {
        at = before;
        // A decimal digit fits a u8.
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(digits.get(at..).unwrap_or_default());
}

/// Reason phrases of the statuses that backends and the gateway use; empty for others, which is
/// legal and what HTTP/2 made of them all.
fn reason(status: u16) -> &'static str {
    match status {
        201 => "Created",
        202 => "Accepted",
        204 => "No Content",
        206 => "Partial Content",
        304 => "Not Modified",
        400 => "Bad Request",
        401 => "Unauthorized",
        402 => "Payment Required",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
        421 => "Misdirected Request",
        422 => "Unprocessable Content",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is written is read back as it was meant. Method: through the parser.
    use super::super::{
        BasePath, Limits, Method, Parse, Request, Response, parse_request, parse_response,
    };
    use super::*;
    use crate::pure::fields::Name;

    #[test]
    fn numbers_are_decimal() {
        for value in [0, 7, 10, 99, 100, 12_345, u64::MAX] {
            let mut out = Vec::new();
            number(&mut out, value);
            assert_eq!(out, value.to_string().into_bytes());
        }
    }

    #[test]
    fn a_forwarded_request_is_ours_in_all_that_counts() {
        let buf = b"POST http://gw/v1/x?a=b HTTP/1.1\r\nHost: gw\r\nAuthorization: Bearer client\r\n\
            Connection: X-Secret, keep-alive\r\nX-Secret: 1\r\nKeep-Alive: timeout=9\r\nUpgrade: h2c\r\n\
            X-Trace-Me: yes\r\nContent-Type: application/json\r\nX-Request-Id: theirs\r\nTraceparent: old\r\n\
            Content-Length: 2\r\n\r\n{}";
        let mut request = Request::default();
        assert_eq!(parse_request(buf, &Limits::default(), &mut request), Ok(Parse::Complete));
        let base = BasePath::default();
        static NAMES: [Name; 3] =
            [Name::new("authorization"), Name::new("x-request-id"), Name::new("traceparent")];
        let mut own = Own::default();
        for (name, value) in NAMES.iter().zip([&b"Bearer ours"[..], b"r1", b"new"]) {
            own.say(name, value);
        }
        let head = Outgoing {
            method: request.method.name(buf),
            target: base.join(b"/v1/x", b"?a=b").unwrap(),
            host: "backend:8000",
            framing: Framing::Length(7),
            forward: &Forward::parse(["x-trace-me", "x-secret"]).unwrap(),
            own: &own,
        };
        let mut out = Vec::new();
        write_request(&mut out, &head, buf, &request.fields);
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "POST /v1/x?a=b HTTP/1.1\r\nhost: backend:8000\r\naccept-encoding: identity\r\nX-Trace-Me: yes\r\n\
             Content-Type: application/json\r\nauthorization: Bearer ours\r\nx-request-id: r1\r\n\
             traceparent: new\r\ncontent-length: 7\r\n\r\n"
        );
    }

    #[test]
    fn an_answer_is_read_back_as_it_was_meant() {
        let buf = b"HTTP/1.1 200 OK\r\nConnection: X-Up-Hop\r\nX-Up-Hop: 1\r\nX-Up-Keep: yes\r\nSet-Cookie: a=1\r\n\
            Set-Cookie: b=2\r\nCache-Control: private\r\nContent-Length: 5\r\n\r\n";
        let mut response = Response::default();
        assert_eq!(
            parse_response(buf, &Limits::default(), Method::Post, &mut response),
            Ok(Parse::Complete)
        );
        for (version, keep_alive) in
            [(Version::Http11, true), (Version::Http11, false), (Version::Http10, true)]
        {
            for framing in [Framing::Length(3), Framing::Chunked, Framing::UntilClose] {
                static CACHE_CONTROL: Name = Name::new("cache-control");
                let mut own = Own::default();
                own.say(&CACHE_CONTROL, b"no-cache");
                let answer =
                    Answer { status: response.status, version, framing, keep_alive, own: &own };
                let mut out = Vec::new();
                write_response(&mut out, &answer, buf, &response.fields);
                let mut back = Response::default();
                assert_eq!(
                    parse_response(&out, &Limits::default(), Method::Post, &mut back),
                    Ok(Parse::Complete)
                );
                assert_eq!(back.framing, framing);
                assert_eq!(back.keep_alive, keep_alive && framing != Framing::UntilClose);
                let names: Vec<_> =
                    back.fields.iter().map(|f| f.name.of(&out).to_ascii_lowercase()).collect();
                assert_eq!(
                    names[..4],
                    [&b"x-up-keep"[..], b"set-cookie", b"set-cookie", b"cache-control"]
                );
                assert_eq!(names.iter().filter(|n| *n == b"cache-control").count(), 1);
            }
        }
    }

    #[test]
    fn every_status_makes_a_legal_line() {
        for status in 100..600 {
            if status == 101 {
                continue;
            }
            let answer = Answer {
                status,
                version: Version::Http11,
                framing: Framing::Length(0),
                keep_alive: true,
                own: &Own::default(),
            };
            let mut out = Vec::new();
            write_response(&mut out, &answer, b"", &[]);
            let mut back = Response::default();
            assert_eq!(
                parse_response(&out, &Limits::default(), Method::Get, &mut back),
                Ok(Parse::Complete)
            );
            assert_eq!((back.status, back.head_len), (status, out.len()));
        }
    }
}
