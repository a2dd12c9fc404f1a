//! A strict HTTP/1.1 codec over byte slices, for both sides of the gateway.
//!
//! One idea: a message has one reading or it is refused. `httparse` finds the parts of a head
//! quickly; this module then holds them to the grammar where `httparse` is lenient (line ends,
//! targets, hosts) and to what RFC 9112 leaves open (framing), always on the side of refusing. Heads
//! that go out are written from the parsed parts, so no byte of framing is ever copied.
//!
//! Deliberately absent: obs-fold, bare LF, `Upgrade` and h2c, CONNECT, transfer codings other than
//! chunked, requests to be answered until close, trailers passed on.

mod framing;
mod target;
#[cfg(test)]
mod tests;
mod usual;
mod write;

use std::mem::MaybeUninit;

pub use framing::{
    BodyFault, CHUNK_END, CHUNK_HEAD_MAX, Decoder, Framing, LAST_CHUNK, Piece, append_chunk,
    chunk_head,
};
pub use target::{BasePath, Target};
pub use write::{Answer, CONTINUE, Outgoing, write_request, write_response};

use crate::pure::fields::{self, Field, Known, ONCE, Span};

/// Bounds of one head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Start line, fields and the empty line. More is refused with 431.
    pub head_bytes: usize,
    /// The request target alone. More is refused with 414.
    pub target_bytes: usize,
    /// Field lines; at most [`FIELDS_MAX`] count. More is refused with 431.
    pub fields: usize,
}

impl Limits {
    fn fields_max(&self) -> usize {
        self.fields.min(FIELDS_MAX)
    }
}

impl Default for Limits {
    fn default() -> Limits {
        // RFC 9112, 3 asks for targets of 8,000 bytes at least.
        Limits { head_bytes: 64 * 1024, target_bytes: 8 * 1024, fields: 128 }
    }
}

/// No head can have more field lines than this, whatever [`Limits::fields`] says: they are parsed
/// on the stack, 32 bytes each.
pub const FIELDS_MAX: usize = 256;

/// Whether a head was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parse {
    /// The end of the head has not arrived: call again with the same bytes and more.
    Partial,
    /// The head was read; `head_len` bytes of the buffer are done with.
    Complete,
}

/// A request that cannot be served. Nothing behind it on the connection can be trusted: answer with
/// this status and close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// 400, 405 (add an `allow` field), 414, 417, 431, 501 or 505.
    pub status: u16,
    /// For the client; holds nothing of what it sent.
    pub message: &'static str,
}

/// A backend's answer that cannot be relayed: the client gets 502, the connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadResponse {
    /// Not HTTP/1.x, or a broken head; the text says where.
    Malformed(&'static str),
    /// The head is longer or has more fields than allowed.
    TooLarge,
    /// A switch of protocols, which nobody asked for.
    Switching,
}

/// A request method. Methods are case-sensitive: `get` is none of the known ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Method {
    #[default]
    Get,
    Head,
    Post,
    Put,
    Patch,
    Delete,
    Options,
    /// A token that is none of the others; the span lies in the request's buffer.
    Other(Span),
}

impl Method {
    /// The method as it is written; `buf` is what the request was parsed from.
    pub fn name(self, buf: &[u8]) -> &[u8] {
        match self {
            Method::Get => b"GET",
            Method::Head => b"HEAD",
            Method::Post => b"POST",
            Method::Put => b"PUT",
            Method::Patch => b"PATCH",
            Method::Delete => b"DELETE",
            Method::Options => b"OPTIONS",
            Method::Other(span) => span.of(buf),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    Http10,
    #[default]
    Http11,
}

/// A parsed request head. Spans point into the buffer that was parsed. Made once per connection
/// and parsed into again and again: the field list keeps its memory.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: Method,
    /// The whole target as it was sent.
    pub target: Span,
    /// The target's path, as sent; see [`Request::path`].
    path: Span,
    query: Span,
    pub version: Version,
    pub fields: Vec<Field>,
    /// Never [`Framing::UntilClose`].
    pub framing: Framing,
    /// Whether the client would use the connection again.
    pub keep_alive: bool,
    /// The client waits for [`CONTINUE`] before it sends the body.
    pub expect_continue: bool,
    /// Bytes of the buffer up to the body, empty lines before the request included.
    pub head_len: usize,
    scan: Scan,
}

impl Request {
    /// Forgets a head that was begun or read, and keeps the memory. Needed only when the buffer
    /// changes before a head was complete.
    pub fn clear(&mut self) {
        self.scan = Scan::default();
        self.fields.clear();
    }

    /// The path without the query: begins with `/`, or is `*` for `OPTIONS *`. Visible ASCII
    /// without `#`, otherwise as the client sent it; only [`BasePath::join`] checks it further.
    pub fn path<'b>(&self, buf: &'b [u8]) -> &'b [u8] {
        match self.path.of(buf) {
            b"" => b"/",
            path => path,
        }
    }

    /// The query with its `?`, or empty.
    pub fn query<'b>(&self, buf: &'b [u8]) -> &'b [u8] {
        self.query.of(buf)
    }

    /// The value of the first field with this name. For the names that may stand only once
    /// (credentials, content type and coding) it is the only one.
    pub fn field<'b>(&self, buf: &'b [u8], known: Known) -> Option<&'b [u8]> {
        first(&self.fields, known).map(|field| field.value.of(buf))
    }

    /// The value of the first field with this name, in any case; for names the configuration gives.
    pub fn named<'b>(&self, buf: &'b [u8], name: &[u8]) -> Option<&'b [u8]> {
        named(&self.fields, buf, name)
    }

    /// How to frame an answer to this request that came with `framing`, and whether the connection
    /// may be kept. `altered` says that the body's length may change on the way. Chunked coding is
    /// never sent to an HTTP/1.0 client.
    pub fn reply_framing(&self, framing: Framing, altered: bool) -> (Framing, bool) {
        match (framing, self.version) {
            (Framing::None, _) => (Framing::None, self.keep_alive),
            (Framing::Length(bytes), _) if !altered => (Framing::Length(bytes), self.keep_alive),
            (_, Version::Http11) => (Framing::Chunked, self.keep_alive),
            (_, Version::Http10) => (Framing::UntilClose, false),
        }
    }
}

/// A parsed response head; as [`Request`], made once and parsed into again.
#[derive(Clone, Debug, Default)]
pub struct Response {
    /// 100 to 599, never 101.
    pub status: u16,
    pub version: Version,
    pub fields: Vec<Field>,
    pub framing: Framing,
    /// Whether the connection may carry another request after this body: never after
    /// [`Framing::UntilClose`], nor when a body was announced that may not be there.
    pub keep_alive: bool,
    /// Bytes of the buffer up to the body.
    pub head_len: usize,
    scan: Scan,
}

impl Response {
    /// As [`Request::clear`].
    pub fn clear(&mut self) {
        self.scan = Scan::default();
        self.fields.clear();
    }

    /// Whether this is an interim answer (1xx): consume `head_len` and parse on.
    pub const fn is_interim(&self) -> bool {
        self.status < 200
    }

    /// As [`Request::field`].
    pub fn field<'b>(&self, buf: &'b [u8], known: Known) -> Option<&'b [u8]> {
        first(&self.fields, known).map(|field| field.value.of(buf))
    }

    /// As [`Request::named`].
    pub fn named<'b>(&self, buf: &'b [u8], name: &[u8]) -> Option<&'b [u8]> {
        named(&self.fields, buf, name)
    }
}

fn first(fields: &[Field], known: Known) -> Option<&Field> {
    fields.iter().find(|field| field.known == known)
}

fn named<'b>(fields: &[Field], buf: &'b [u8], name: &[u8]) -> Option<&'b [u8]> {
    let field = fields.iter().find(|field| field.name.of(buf).eq_ignore_ascii_case(name))?;
    Some(field.value.of(buf))
}

/// Reads a request head from the start of `buf`, which is all that has arrived since the end of
/// the last message.
///
/// On `Partial` call again with the same bytes and more behind them: bytes already looked at are
/// not looked at again, so that a head that drips in costs no more than twice one that came whole.
/// A buffer of `head_bytes` is enough: what does not fit is refused. Never panics; allocates
/// nothing once `request` has seen a head of this size.
///
/// # Errors
/// See [`Refusal`]: everything that is malformed, ambiguous, too large or not served here.
pub fn parse_request(buf: &[u8], limits: &Limits, request: &mut Request) -> Result<Parse, Refusal> {
    let parsed = request_head(buf, limits, request);
    if parsed != Ok(Parse::Partial) {
        request.scan = Scan::default();
    }
    parsed
}

fn request_head(buf: &[u8], limits: &Limits, request: &mut Request) -> Result<Parse, Refusal> {
    let window = buf.get(..limits.head_bytes).unwrap_or(buf);
    if !request.scan.skip_empty_lines(window).map_err(refuse)? {
        return full(window, limits, &request.scan);
    }
    if !request.scan.is_fresh() && !request.scan.advance(window).map_err(refuse)? {
        return full(window, limits, &request.scan);
    }
    let mut facts = Facts::default();
    if usual::request(window, limits, request, &mut facts).is_none() {
        facts = match any_request(window, limits, request)? {
            Some(facts) => facts,
            None => return full(window, limits, &request.scan),
        };
    }
    request.framing = request_framing(buf, request.version, &facts)?;
    request.keep_alive = facts.keep_alive(request.version);
    request.expect_continue = match facts.expect.map(|expect| expect.of(buf)) {
        None => false,
        Some(value) if value.eq_ignore_ascii_case(b"100-continue") => {
            request.version == Version::Http11
                && !matches!(request.framing, Framing::None | Framing::Length(0))
        }
        Some(_) => return Err(Refusal { status: 417, message: "unknown expectation" }),
    };
    Ok(Parse::Complete)
}

/// Reads any request head into `request`, up to what its fields mean together, and says what is wrong
/// with it; `None` if it has not ended. Never inlined: the usual head does without its eight
/// kilobytes of stack.
#[inline(never)]
fn any_request(
    window: &[u8],
    limits: &Limits,
    request: &mut Request,
) -> Result<Option<Facts>, Refusal> {
    let start = request.scan.start;
    let text = window.get(start..).unwrap_or_default();
    let mut room = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let room = room.get_mut(..limits.fields_max()).unwrap_or_default();
    let mut head = httparse::Request::new(&mut []);
    let len = match head.parse_with_uninit_headers(text, room) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if request.scan.is_fresh() => {
            // What has come is sound so far; only line ends are looked at from now on.
            if request.scan.advance(window).map_err(refuse)? {
                return Err(refuse("malformed head"));
            }
            return Ok(None);
        }
        Ok(httparse::Status::Partial) => return Err(refuse("malformed head")),
        Err(httparse::Error::Version) => return Err(version_refusal(text)),
        Err(error) => return Err(head_refusal(error)),
    };
    let (Some(method), Some(target), Some(version)) = (head.method, head.path, head.version) else {
        return Err(refuse("malformed request line"));
    };
    request.head_len = start + len;
    request.version = if version == 0 { Version::Http10 } else { Version::Http11 };
    if method.len() > METHOD_MAX {
        return Err(METHOD_UNKNOWN);
    }
    request.method = method_of(span(window, method.as_bytes()), method)?;
    if target.len() > limits.target_bytes {
        return Err(TARGET_TOO_LONG);
    }
    let facts = Facts::gather(window, start, request.head_len, head.headers, &mut request.fields)
        .map_err(refuse)?;
    if facts.twice & ONCE != 0 {
        return Err(refuse("a field that may stand once stands twice"));
    }
    let star = request.method == Method::Options;
    let parts = target::split(target.as_bytes(), star).map_err(refuse)?;
    let authority = parts.authority.clone().and_then(|range| target.as_bytes().get(range));
    check_host(request.version, authority, facts.host.map(|host| host.of(window)))?;
    request.target = span(window, target.as_bytes());
    let at = request.target.start();
    request.path = Span::new(at + parts.path.start, at + parts.path.end);
    request.query = Span::new(at + parts.query.start, at + parts.query.end);
    Ok(Some(facts))
}

/// What an incomplete head means: wait, or refuse because it can no longer fit.
fn full(window: &[u8], limits: &Limits, scan: &Scan) -> Result<Parse, Refusal> {
    // The request line, as far as it has come, is held to the bounds of a whole one.
    let line = window.get(scan.start..).unwrap_or_default();
    match memchr::memchr(b' ', &line[..line.len().min(METHOD_MAX + 1)]) {
        None if line.len() > METHOD_MAX => return Err(METHOD_UNKNOWN),
        None => {}
        Some(space) => {
            let target = &line[space + 1..];
            let most = target.len().min(limits.target_bytes.saturating_add(1));
            let length = memchr::memchr(b' ', &target[..most]).unwrap_or(most);
            if length > limits.target_bytes {
                return Err(TARGET_TOO_LONG);
            }
        }
    }
    if window.len() >= limits.head_bytes {
        return Err(HEAD_TOO_LARGE);
    }
    Ok(Parse::Partial)
}

/// No registered method is longer than 17 bytes.
const METHOD_MAX: usize = 32;
const METHOD_UNKNOWN: Refusal = Refusal { status: 501, message: "this method is not known" };
const TARGET_TOO_LONG: Refusal = Refusal { status: 414, message: "the request target is too long" };
const HEAD_TOO_LARGE: Refusal = Refusal { status: 431, message: "the request head is too large" };

const fn refuse(message: &'static str) -> Refusal {
    Refusal { status: 400, message }
}

fn head_refusal(error: httparse::Error) -> Refusal {
    match error {
        httparse::Error::TooManyHeaders => Refusal { status: 431, message: "too many fields" },
        httparse::Error::Token | httparse::Error::Version | httparse::Error::Status => {
            refuse("malformed request line")
        }
        httparse::Error::NewLine => refuse("malformed line end"),
        httparse::Error::HeaderName => refuse("malformed field name"),
        httparse::Error::HeaderValue => refuse("malformed field value"),
    }
}

/// Tells a version of HTTP that we do not speak from a line that is malformed.
fn version_refusal(text: &[u8]) -> Refusal {
    let line = text.split(|byte| matches!(byte, b'\r' | b'\n')).next().unwrap_or_default();
    let mut parts = line.splitn(3, |&byte| byte == b' ').skip(2);
    match parts.next().and_then(|version| version.strip_prefix(b"HTTP/")) {
        // As it arrives, another major version shows before all of it is there.
        Some(
            [b'0'..=b'9', b'.', b'0'..=b'9'] | [b'0' | b'2'..=b'9', b'.'] | [b'0' | b'2'..=b'9'],
        ) => Refusal { status: 505, message: "this version of HTTP is not supported" },
        _ => refuse("malformed HTTP version"),
    }
}

fn method_of(span: Span, name: &str) -> Result<Method, Refusal> {
    Ok(match name {
        "POST" => Method::Post,
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "PUT" => Method::Put,
        "PATCH" => Method::Patch,
        "DELETE" => Method::Delete,
        "OPTIONS" => Method::Options,
        // A tunnel would carry bytes nobody judged; an echo would show credentials to scripts.
        "CONNECT" | "TRACE" => {
            return Err(Refusal { status: 405, message: "this method is not allowed" });
        }
        _ => Method::Other(span),
    })
}

/// One valid host, said once (RFC 9112, 3.2). A target with another authority than `Host` has two
/// readings, though the RFC lets the target win.
fn check_host(
    version: Version,
    authority: Option<&[u8]>,
    host: Option<&[u8]>,
) -> Result<(), Refusal> {
    match (host, authority) {
        (None, _) if version == Version::Http10 => Ok(()),
        (None, _) => Err(refuse("the host field is missing")),
        (Some(host), _) if !target::is_authority(host) => {
            Err(refuse("the host field is malformed"))
        }
        (Some(host), Some(authority)) if !host.eq_ignore_ascii_case(authority) => {
            Err(refuse("the request target and the host field disagree"))
        }
        (Some(_), _) => Ok(()),
    }
}

fn request_framing(buf: &[u8], version: Version, facts: &Facts) -> Result<Framing, Refusal> {
    let Some(coding) = facts.coding.map(|coding| coding.of(buf)) else {
        return Ok(facts.length.map_or(Framing::None, Framing::Length));
    };
    if facts.length.is_some() {
        return Err(refuse("content-length and transfer-encoding exclude each other"));
    }
    if version == Version::Http10 {
        return Err(refuse("transfer-encoding needs HTTP/1.1"));
    }
    if coding.eq_ignore_ascii_case(b"chunked") {
        return Ok(Framing::Chunked);
    }
    let known_twice = coding
        .split(|&byte| byte == b',')
        .any(|part| part.trim_ascii().eq_ignore_ascii_case(b"chunked"));
    if !known_twice && fields::is_token(coding) {
        return Err(Refusal { status: 501, message: "this transfer coding is not supported" });
    }
    Err(refuse("malformed transfer-encoding"))
}

/// Reads a response head from the start of `buf`; as [`parse_request`]. `method` is that of the
/// request it answers, which decides whether there is a body. Interim answers are reported like
/// others ([`Response::is_interim`]): bound how many of them a backend may send.
///
/// # Errors
/// See [`BadResponse`].
pub fn parse_response(
    buf: &[u8],
    limits: &Limits,
    method: Method,
    response: &mut Response,
) -> Result<Parse, BadResponse> {
    let parsed = response_head(buf, limits, method, response);
    if parsed != Ok(Parse::Partial) {
        response.scan = Scan::default();
    }
    parsed
}

fn response_head(
    buf: &[u8],
    limits: &Limits,
    method: Method,
    response: &mut Response,
) -> Result<Parse, BadResponse> {
    let window = buf.get(..limits.head_bytes).unwrap_or(buf);
    let full = if window.len() >= limits.head_bytes {
        Err(BadResponse::TooLarge)
    } else {
        Ok(Parse::Partial)
    };
    // `httparse` would skip empty lines: here they are what another answer left behind.
    if !matches!(window.first(), None | Some(b'H')) {
        return Err(BadResponse::Malformed("the answer is not HTTP/1.x"));
    }
    if !response.scan.is_fresh()
        && !response.scan.advance(window).map_err(BadResponse::Malformed)?
    {
        return full;
    }
    let mut facts = Facts::default();
    if usual::response(window, limits, response, &mut facts).is_none() {
        facts = match any_response(window, limits, response)? {
            Some(facts) => facts,
            None => return full,
        };
    }
    let announced = match (facts.coding.map(|coding| coding.of(buf)), facts.length) {
        (Some(_), Some(_)) => {
            return Err(BadResponse::Malformed(
                "content-length and transfer-encoding exclude each other",
            ));
        }
        (Some(coding), None) => {
            let sound = response.version == Version::Http11
                && facts.twice & Known::TransferEncoding.bit() == 0
                && coding.eq_ignore_ascii_case(b"chunked");
            if !sound {
                return Err(BadResponse::Malformed("unknown transfer coding"));
            }
            Framing::Chunked
        }
        (None, Some(bytes)) => Framing::Length(bytes),
        (None, None) => Framing::UntilClose,
    };
    let bodiless = method == Method::Head || matches!(response.status, ..200 | 204 | 304);
    response.framing = if bodiless { Framing::None } else { announced };
    // A body behind an answer that has none would be read as the next answer.
    let clean = match announced {
        Framing::None | Framing::Length(0) => true,
        Framing::UntilClose => bodiless,
        Framing::Length(_) | Framing::Chunked => !bodiless,
    };
    response.keep_alive = clean && facts.keep_alive(response.version);
    Ok(Parse::Complete)
}

/// Reads any response head into `response`, as [`any_request`].
#[inline(never)]
fn any_response(
    window: &[u8],
    limits: &Limits,
    response: &mut Response,
) -> Result<Option<Facts>, BadResponse> {
    let mut room = [const { MaybeUninit::uninit() }; FIELDS_MAX];
    let room = room.get_mut(..limits.fields_max()).unwrap_or_default();
    let mut head = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let len = match config.parse_response_with_uninit_headers(&mut head, window, room) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if response.scan.is_fresh() => {
            if response.scan.advance(window).map_err(BadResponse::Malformed)? {
                return Err(BadResponse::Malformed("malformed head"));
            }
            return Ok(None);
        }
        Err(httparse::Error::TooManyHeaders) => return Err(BadResponse::TooLarge),
        Err(httparse::Error::Version) => {
            return Err(BadResponse::Malformed("the answer is not HTTP/1.x"));
        }
        Err(httparse::Error::Status) => {
            return Err(BadResponse::Malformed("malformed status line"));
        }
        Ok(httparse::Status::Partial) | Err(_) => {
            return Err(BadResponse::Malformed("malformed head"));
        }
    };
    response.status = match head.code {
        Some(101) => return Err(BadResponse::Switching),
        Some(code @ 100..=599) => code,
        _ => return Err(BadResponse::Malformed("malformed status")),
    };
    response.version = if head.version == Some(0) { Version::Http10 } else { Version::Http11 };
    response.head_len = len;
    let facts = Facts::gather(window, 0, len, head.headers, &mut response.fields)
        .map_err(BadResponse::Malformed)?;
    Ok(Some(facts))
}

/// How far a head that has not ended was searched for its end.
#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    /// Where the start line begins, behind empty lines.
    start: usize,
    /// Bytes that need no second look.
    seen: usize,
    /// Line ends found from `start` on.
    lines: usize,
}

impl Scan {
    /// Whether the head's first line has not been looked at.
    const fn is_fresh(&self) -> bool {
        self.seen <= self.start
    }

    /// Moves `start` over empty lines, which a client may leave behind a body (RFC 9112, 2.2).
    /// Gives whether a start line has begun.
    fn skip_empty_lines(&mut self, window: &[u8]) -> Result<bool, &'static str> {
        const EMPTY_LINES_MAX: usize = 4;
        if !self.is_fresh() {
            return Ok(true);
        }
        loop {
            match window.get(self.start..).unwrap_or_default() {
                [] | [b'\r'] => return Ok(false),
                [b'\r', b'\n', ..] if self.start < EMPTY_LINES_MAX * 2 => self.start += 2,
                [b'\r' | b'\n', ..] => return Err("malformed line end before the request"),
                _ => return Ok(true),
            }
        }
    }

    /// Looks at the bytes not seen before; gives whether the head's end is among them.
    fn advance(&mut self, window: &[u8]) -> Result<bool, &'static str> {
        let from = self.seen.max(self.start);
        for offset in memchr::memchr_iter(b'\n', window.get(from..).unwrap_or_default()) {
            let at = from + offset;
            if at.checked_sub(1).and_then(|before| window.get(before)) != Some(&b'\r') {
                return Err(BARE_LF);
            }
            if self.lines > 0
                && at.checked_sub(2).and_then(|before| window.get(before)) == Some(&b'\n')
            {
                return Ok(true);
            }
            self.lines += 1;
        }
        self.seen = window.len();
        Ok(false)
    }
}

const BARE_LF: &str = "a line does not end in CRLF";

/// What the field lines of a head say about the connection and the body.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    /// Names that came at all, by bit.
    seen: u64,
    /// Names that came twice or more.
    twice: u64,
    length: Option<u64>,
    /// The last of each; [`Facts::twice`] says whether there were more.
    coding: Option<Span>,
    host: Option<Span>,
    expect: Option<Span>,
    close: bool,
    stay: bool,
    /// Names that `Connection` lists; each costs a pass over the fields.
    listed: usize,
}

/// More names in `Connection` than this are refused.
const LISTED_MAX: usize = 16;

impl Facts {
    /// Moves the parsed fields into `fields` and learns what they say. The error is a message about
    /// a broken head.
    fn gather(
        buf: &[u8],
        start: usize,
        end: usize,
        headers: &[httparse::Header],
        fields: &mut Vec<Field>,
    ) -> Result<Facts, &'static str> {
        let mut facts = Facts::default();
        fields.clear();
        fields.reserve(headers.len());
        for header in headers {
            let name = span(buf, header.name.as_bytes());
            // `httparse` takes a bare LF for a line end. Values hold no CR, so one before the LF is
            // the line end's own.
            if !ends_in_crlf(buf, name.start()) {
                return Err(BARE_LF);
            }
            let known = Known::of(header.name.as_bytes());
            let value = span(buf, header.value);
            facts.note(known, value, header.value)?;
            fields.push(Field { name, value, known, listed: false });
        }
        if end < start + 4 || buf.get(end - 4..end) != Some(b"\r\n\r\n") {
            return Err(BARE_LF);
        }
        if facts.listed > 0 {
            Facts::mark_listed(buf, fields);
        }
        Ok(facts)
    }

    /// Learns what one field says; `span` is where its value stands.
    #[inline]
    fn note(&mut self, known: Known, span: Span, value: &[u8]) -> Result<(), &'static str> {
        self.twice |= self.seen & known.bit();
        self.seen |= known.bit();
        match known {
            Known::ContentLength => {
                let length = decimal(value).ok_or("malformed content-length")?;
                if self.length.is_some_and(|first| first != length) {
                    return Err("content-length fields disagree");
                }
                self.length = Some(length);
            }
            Known::TransferEncoding => self.coding = Some(span),
            Known::Host => self.host = Some(span),
            Known::Expect => self.expect = Some(span),
            Known::Connection => self.options(value)?,
            _ => {}
        }
        Ok(())
    }

    /// Reads one `Connection` field's value.
    fn options(&mut self, value: &[u8]) -> Result<(), &'static str> {
        for option in options(value) {
            if option.eq_ignore_ascii_case(b"keep-alive") {
                self.stay = true;
            } else if option.eq_ignore_ascii_case(b"close") {
                self.close = true;
            } else if fields::is_token(option) {
                self.listed += 1;
                if self.listed > LISTED_MAX {
                    return Err("too many connection options");
                }
            } else if !option.is_empty() {
                return Err("malformed connection option");
            }
        }
        Ok(())
    }

    /// Marks the fields that `Connection` lists, which may stand before it.
    #[cold]
    fn mark_listed(buf: &[u8], fields: &mut [Field]) {
        for at in 0..fields.len() {
            let Field { known: Known::Connection, value, .. } = fields[at] else { continue };
            let listed = options(value.of(buf)).filter(|option| {
                let said = [&b""[..], b"keep-alive", b"close"];
                !said.iter().any(|said| option.eq_ignore_ascii_case(said))
            });
            for option in listed {
                for field in fields.iter_mut() {
                    field.listed |= field.name.of(buf).eq_ignore_ascii_case(option);
                }
            }
        }
    }

    fn keep_alive(&self, version: Version) -> bool {
        !self.close && (version == Version::Http11 || self.stay)
    }
}

/// The options of a `Connection` field, some of which may be empty.
fn options(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|&byte| byte == b',').map(<[u8]>::trim_ascii)
}

fn ends_in_crlf(buf: &[u8], end: usize) -> bool {
    end.checked_sub(2).and_then(|start| buf.get(start..end)) == Some(b"\r\n")
}

/// 1*DIGIT that fits a u64 (RFC 9110, 8.6). Leading zeros are legal, within twenty digits.
fn decimal(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 {
        return None;
    }
    // Nineteen digits fit whatever they are; only a twentieth may not.
    let (last, rest) = text.split_last()?;
    let mut number = 0;
    for digit in rest {
        number = number * 10 + u64::from(digit_of(*digit)?);
    }
    number.checked_mul(10)?.checked_add(digit_of(*last)?.into())
}

fn digit_of(byte: u8) -> Option<u8> {
    let digit = byte.wrapping_sub(b'0');
    (digit < 10).then_some(digit)
}

/// Where `part`, which is a part of `buf`, lies in it.
fn span(buf: &[u8], part: &[u8]) -> Span {
    let start = part.as_ptr().addr().wrapping_sub(buf.as_ptr().addr());
    Span::new(start, start.wrapping_add(part.len()))
}
