//! One resumable pass over a `multipart/form-data` request body (RFC 7578) that finds the few text
//! fields routing needs and jumps over files.
//!
//! Engines parse forms with different libraries, and what two of them read differently is a way
//! around the model that was routed and charged. So whatever is known to be read differently is a
//! fault here: a second `model`, blanks behind a boundary, `name*=`, folded headers, escaped quotes.

use memchr::memmem::{self, Finder};

use crate::pure::json::Span;

/// Longest head of one part. Browsers send two lines; a file name is at most 255 bytes.
pub const HEAD_BYTES_MAX: usize = 8 * 1024;

/// Most parts in one form, as in Starlette, which is what engines use.
pub const PARTS_MAX: usize = 1_000;

/// The text fields that are looked for: their contents as spans of the body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub model: Option<Span>,
    /// The value of a `Content-Length` field in the head of the `model` part (`OkHttp` writes one),
    /// which has to change together with the content.
    pub model_length: Option<Span>,
    pub stream: Option<Span>,
    pub n: Option<Span>,
    pub user: Option<Span>,
    pub prompt: Option<Span>,
}

/// Where and why a body is not a form that all engines read alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub at: usize,
    /// A sentence without subject or full stop, fit for an error message.
    pub text: &'static str,
}

/// The boundary named by a `Content-Type` value; `None` if that is not `multipart/form-data` with
/// exactly one well-formed boundary.
pub fn boundary(content_type: &[u8]) -> Option<&[u8]> {
    const MEDIA_TYPE: &[u8] = b"multipart/form-data";
    let (media_type, rest) = content_type.split_at_checked(MEDIA_TYPE.len())?;
    if !media_type.eq_ignore_ascii_case(MEDIA_TYPE) {
        return None;
    }
    let mut found = None;
    for param in (Params { rest }) {
        let (name, value) = param?;
        if name.eq_ignore_ascii_case(b"boundary") && found.replace(value).is_some() {
            return None;
        }
    }
    let allowed = |byte: &u8| byte.is_ascii_alphanumeric() || b"'()+_,-./:=? ".contains(byte);
    found.filter(|value| {
        (1..=70).contains(&value.len()) && value.iter().all(allowed) && !value.ends_with(b" ")
    })
}

/// The pass. Costs a substring search over the files and a few comparisons for each part; keeps
/// nothing but positions.
#[derive(Clone, Debug)]
pub struct Scanner {
    /// Two hyphens and the boundary.
    delimiter: Finder<'static>,
    state: State,
    /// Everything before this offset has been looked at.
    at: usize,
    parts: usize,
    part: Part,
    fields: Fields,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Start,
    BehindDelimiter,
    /// In the head that starts at this offset.
    Head(usize),
    /// In the content that starts at this offset.
    Content(usize),
    /// Behind the last delimiter.
    End,
}

/// What the head of a part says, if it is a field that is looked for.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    field: Option<Field>,
    length: Option<Span>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    N,
    User,
    Prompt,
}

impl Scanner {
    /// For a body whose parts are parted by `boundary`, as [`boundary`] gives it.
    pub fn new(boundary: &[u8]) -> Scanner {
        let delimiter = [b"--", boundary].concat();
        Scanner {
            delimiter: Finder::new(&delimiter).into_owned(),
            state: State::Start,
            at: 0,
            parts: 0,
            part: Part::default(),
            fields: Fields::default(),
        }
    }

    /// Goes on where it stopped. `body` is everything received so far.
    pub fn feed(&mut self, body: &[u8]) -> Result<(), Fault> {
        while self.step(body)? {}
        Ok(())
    }

    /// The fields of the form, `body` being all of it.
    pub fn finish(&mut self, body: &[u8]) -> Result<Fields, Fault> {
        self.feed(body)?;
        if self.state != State::End {
            return Err(Fault { at: body.len(), text: "it ends before its last boundary" });
        }
        match body.get(self.at..) {
            Some(b"" | b"\r\n") => Ok(self.fields),
            _ => Err(Fault { at: self.at, text: "something follows its last boundary" }),
        }
    }

    /// One step; `false` if it needs more bytes.
    fn step(&mut self, body: &[u8]) -> Result<bool, Fault> {
        let fault = |at, text| Err(Fault { at, text });
        let rest = body.get(self.at..).unwrap_or_default();
        let delimiter = self.delimiter.needle();
        match self.state {
            State::Start => {
                if rest.len() < delimiter.len() && delimiter.starts_with(rest) {
                    return Ok(false);
                }
                if !rest.starts_with(delimiter) {
                    return fault(0, "it does not start with its boundary");
                }
                self.at += delimiter.len();
                self.state = State::BehindDelimiter;
            }
            State::BehindDelimiter => match rest {
                [b'\r', b'\n', ..] => {
                    self.parts += 1;
                    if self.parts > PARTS_MAX {
                        return fault(self.at, "it has too many parts");
                    }
                    self.at += 2;
                    self.state = State::Head(self.at);
                }
                [b'-', b'-', ..] => {
                    self.at += 2;
                    self.state = State::End;
                }
                [] | [b'\r' | b'-'] => return Ok(false),
                _ => return fault(self.at, "a boundary is not followed by a line end"),
            },
            State::Head(start) => {
                if body.get(start..start + 2) == Some(b"\r\n") {
                    return fault(start, "a part has no disposition");
                }
                let end = memmem::find(rest, b"\r\n\r\n").map(|n| self.at + n);
                if end.unwrap_or(body.len()) - start > HEAD_BYTES_MAX {
                    return fault(start, "the head of a part is too long");
                }
                let Some(end) = end else {
                    self.at = body.len().saturating_sub(3).max(start);
                    return Ok(false);
                };
                self.part = read_head(body, start, end)?;
                self.at = end + 4;
                self.state = State::Content(self.at);
            }
            State::Content(start) => {
                let Some(n) = self.delimiter.find(rest) else {
                    self.at = body.len().saturating_sub(delimiter.len() - 1).max(self.at);
                    return Ok(false);
                };
                let found = self.at + n;
                let behind = found + delimiter.len();
                let is_whole = match body.get(behind..).unwrap_or_default() {
                    [b'\r', b'\n', ..] | [b'-', b'-', ..] => true,
                    [] | [b'\r' | b'-'] => {
                        self.at = found;
                        return Ok(false);
                    }
                    // Blanks may follow a boundary for some, and not for others.
                    [b' ' | b'\t' | b'\r' | b'\n' | b'-', ..] => false,
                    // A longer word that begins like the boundary: content.
                    _ => {
                        self.at = found + 1;
                        return Ok(true);
                    }
                };
                match body.get(start..found).unwrap_or_default() {
                    [.., b'\r', b'\n'] if is_whole => {
                        self.part_end(Span { start, end: found - 2 })?;
                        self.at = behind;
                        self.state = State::BehindDelimiter;
                    }
                    [.., b'\r', b'\n'] => {
                        return fault(behind, "a boundary is not followed by a line end");
                    }
                    // Some parsers end an empty part here, others read on; and some are content
                    // with half a line end before a boundary.
                    [] | [.., b'\r' | b'\n'] => {
                        return fault(found, "a boundary does not follow a line end");
                    }
                    _ => self.at = found + 1,
                }
            }
            State::End => return Ok(false),
        }
        Ok(true)
    }

    fn part_end(&mut self, content: Span) -> Result<(), Fault> {
        let part = std::mem::take(&mut self.part);
        let fields = &mut self.fields;
        let slot = match part.field {
            None => return Ok(()),
            Some(Field::Model) => &mut fields.model,
            Some(Field::Stream) => &mut fields.stream,
            Some(Field::N) => &mut fields.n,
            Some(Field::User) => &mut fields.user,
            Some(Field::Prompt) => &mut fields.prompt,
        };
        if slot.replace(content).is_some() {
            return Err(Fault { at: content.start, text: "a field appears twice" });
        }
        if part.field == Some(Field::Model) {
            fields.model_length = part.length;
        }
        Ok(())
    }
}

/// Reads the head of a part, `body[start..end]`, without the empty line.
fn read_head(body: &[u8], start: usize, end: usize) -> Result<Part, Fault> {
    let fault = |at, text| Err(Fault { at, text });
    let mut named = None;
    let mut encoded = false;
    let mut part = Part::default();
    let mut at = start;
    while at < end {
        let rest = body.get(at..end).unwrap_or_default();
        let line = memmem::find(rest, b"\r\n").map_or(rest, |n| &rest[..n]);
        // Tabs aside, a control character can only be meant to be read as a line end.
        if line.iter().any(|&byte| (byte < 0x20 && byte != b'\t') || byte == 0x7F) {
            return fault(at, "the head of a part holds a control character");
        }
        let Some(colon) = memchr::memchr(b':', line) else {
            return fault(at, "the head of a part holds a line without a colon");
        };
        let (name, value) = (&line[..colon], &line[colon + 1..]);
        if name.is_empty() || !name.iter().all(|&byte| is_token(byte)) {
            return fault(at, "the head of a part holds a malformed name");
        }
        if name.eq_ignore_ascii_case(b"content-disposition") {
            if named.is_some() {
                return fault(at, "a part has two dispositions");
            }
            let Some(disposition) = Disposition::read(value.trim_ascii()) else {
                return fault(at, "the disposition of a part is malformed");
            };
            named = Some(disposition);
        } else if name.eq_ignore_ascii_case(b"content-transfer-encoding") {
            let plain = [&b"7bit"[..], b"8bit", b"binary"];
            let value = value.trim_ascii();
            encoded |= !plain.iter().any(|plain| value.eq_ignore_ascii_case(plain));
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let lead = value.len() - value.trim_ascii_start().len();
            let from = at + colon + 1 + lead;
            let length = Span { start: from, end: from + value.trim_ascii().len() };
            if part.length.replace(length).is_some() {
                return fault(at, "a part has two lengths");
            }
        }
        at += line.len() + 2;
    }
    let Some(disposition) = named else {
        return fault(start, "a part has no disposition");
    };
    part.field = match disposition.name {
        b"model" => Some(Field::Model),
        b"stream" => Some(Field::Stream),
        b"n" => Some(Field::N),
        b"user" => Some(Field::User),
        b"prompt" => Some(Field::Prompt),
        _ => None,
    };
    if part.field.is_some() && (disposition.is_file || encoded) {
        return fault(start, "a text field is sent as a file or encoded");
    }
    Ok(part)
}

struct Disposition<'a> {
    name: &'a [u8],
    is_file: bool,
}

impl<'a> Disposition<'a> {
    fn read(value: &'a [u8]) -> Option<Disposition<'a>> {
        const FORM_DATA: &[u8] = b"form-data";
        let (kind, rest) = value.split_at_checked(FORM_DATA.len())?;
        if !kind.eq_ignore_ascii_case(FORM_DATA) {
            return None;
        }
        let (mut name, mut is_file) = (None, false);
        for param in (Params { rest }) {
            let (param, value) = param?;
            if param.eq_ignore_ascii_case(b"name") {
                if name.replace(value).is_some() {
                    return None;
                }
            } else if starts_ignoring_case(param, b"name*") {
                return None;
            } else if starts_ignoring_case(param, b"filename") {
                is_file = true;
            }
        }
        // An escape in a name is read as such by some and literally by others.
        let name: &[u8] = name?;
        (!name.contains(&b'\\')).then_some(Disposition { name, is_file })
    }
}

/// The parameters of a header value, from the first semicolon on: names, and values without their
/// quotes. `None` for what is no parameter, and then no more.
struct Params<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Params<'a> {
    type Item = Option<(&'a [u8], &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = trim_spaces(std::mem::take(&mut self.rest));
        if matches!(rest, b"" | b";") {
            return None;
        }
        Some(self.read(rest))
    }
}

impl<'a> Params<'a> {
    fn read(&mut self, rest: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
        let rest = trim_spaces(rest.strip_prefix(b";")?);
        let (name, rest) = rest.split_at(rest.iter().position(|&byte| !is_token(byte))?);
        let rest = rest.strip_prefix(b"=")?;
        let value = if let Some(quoted) = rest.strip_prefix(b"\"") {
            let value = &quoted[..memchr::memchr(b'"', quoted)?];
            self.rest = &quoted[value.len() + 1..];
            value
        } else {
            let end = rest.iter().position(|&byte| !is_token(byte)).unwrap_or(rest.len());
            self.rest = &rest[end..];
            &rest[..end]
        };
        // A quote behind a backslash is escaped for some parsers, the end of the value for others.
        (!name.is_empty() && !value.ends_with(b"\\")).then_some((name, value))
    }
}

/// Without the spaces at the start. Tabs stay: not every parser takes them for blanks.
fn trim_spaces(text: &[u8]) -> &[u8] {
    let len = text.iter().take_while(|&&byte| byte == b' ').count();
    text.get(len..).unwrap_or_default()
}

fn starts_ignoring_case(text: &[u8], start: &[u8]) -> bool {
    text.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start))
}

/// A character of a token (RFC 9110, section 5.6.2).
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// Goal: the fields are found wherever the body is cut, and what engines read differently is
/// refused. Method: a table of forms, each fed whole, split everywhere, and byte by byte.
#[cfg(test)]
mod tests {
    use super::*;

    fn scan(body: &[u8]) -> Result<Fields, Fault> {
        Scanner::new(b"XbX").finish(body)
    }

    fn check_every_split(body: &[u8]) {
        let whole = scan(body);
        for cut in 0..=body.len() {
            let mut scanner = Scanner::new(b"XbX");
            let split = scanner.feed(&body[..cut]).and_then(|()| scanner.finish(body));
            assert_eq!(split, whole, "{} cut at {cut}", String::from_utf8_lossy(body));
        }
        let mut scanner = Scanner::new(b"XbX");
        let fed = (0..=body.len()).try_for_each(|end| scanner.feed(&body[..end]));
        assert_eq!(fed.and_then(|()| scanner.finish(body)), whole);
    }

    /// A form of parts given as heads and contents.
    fn form(parts: &[(&str, &str)]) -> Vec<u8> {
        let mut body = String::new();
        for (head, content) in parts {
            body += &format!("--XbX\r\n{head}\r\n\r\n{content}\r\n");
        }
        (body + "--XbX--\r\n").into_bytes()
    }

    const MODEL: &str = "Content-Disposition: form-data; name=\"model\"";
    const FILE: &str = "Content-Disposition: form-data; name=\"file\"; filename=\"a\\b.wav\"\r\nContent-Type: audio/wav";

    #[test]
    fn fields_are_found_at_every_split() {
        for (parts, model) in [
            (&[(MODEL, "m")][..], Some("m")),
            (&[(FILE, "--XbY\r\n--XbXX\r\n\r\n--Xb\r\n-"), (MODEL, "m-small")], Some("m-small")),
            (&[(FILE, "\r\n--XbXY\r\n\r\n--XbX\0"), (MODEL, "m")], Some("m")),
            (&[(FILE, "a--XbX\r\n"), (MODEL, "m--XbX--")], Some("m--XbX--")),
            (&[(MODEL, "模"), (FILE, "")], Some("模")),
            (&[("content-disposition:FORM-DATA;name=model", "m")], Some("m")),
            (&[("A: b\r\nContent-Disposition: form-data; NAME=\"model\"\r\nC:", "m")], Some("m")),
            (&[("Content-Disposition: form-data; name=\"Model\"", "m")], None),
            (&[("Content-Disposition: form-data; name=\"x\"; filename*=utf-8''m", "m")], None),
            (&[], None),
        ] {
            let body = form(parts);
            let fields = scan(&body).unwrap_or_else(|fault| panic!("{parts:?} {fault:?}"));
            let found =
                fields.model.map(|span| String::from_utf8_lossy(span.of(&body)).into_owned());
            assert_eq!(found.as_deref(), model, "{parts:?}");
            check_every_split(&body);
        }
    }

    #[test]
    fn what_engines_read_differently_is_refused() {
        let head = |head: &str| form(&[(head, "m")]);
        for (body, text) in [
            (form(&[(MODEL, "a"), (MODEL, "b")]), "twice"),
            (head(&format!("{MODEL}; filename=\"a\"")), "as a file"),
            (head(&format!("{MODEL}\r\nContent-Transfer-Encoding: base64")), "encoded"),
            (head(&format!("{MODEL}; name=\"file\"")), "malformed"),
            (head("Content-Disposition: form-data; name*=utf-8''model"), "malformed"),
            (head("Content-Disposition: form-data; name*0=mo; name*1=del"), "malformed"),
            (head("Content-Disposition: form-data; name=\"mo\\del\""), "malformed"),
            (head("Content-Disposition: form-data; filename=\"a\\\"; name=\"model\""), "malformed"),
            (head("Content-Disposition: form-data; name = \"model\""), "malformed"),
            (head("Content-Disposition: form-data; name=\"model"), "malformed"),
            (head("Content-Disposition: attachment; name=\"model\""), "malformed"),
            (head("Content-Disposition: form-data"), "malformed"),
            (head("Content-Disposition: form-data;\r\n name=\"model\""), "malformed"),
            (head("Content-Disposition: form-data; name=\"a\"\r\n ;name=\"model\""), "colon"),
            (
                head("Content-Disposition: form-data; name=\"a\"\r\n ;x:;name=\"model\""),
                "malformed name",
            ),
            (head("Content-Disposition : form-data; name=\"model\""), "malformed name"),
            (head("Content-Disposition: form-data; name=\"model\"\nX: y"), "control"),
            (head(&format!("{MODEL}\r\n{MODEL}")), "two dispositions"),
            (head("X: y"), "no disposition"),
            (b"--XbX\r\n\r\nm\r\n--XbX--\r\n".to_vec(), "no disposition"),
            (b"".to_vec(), "ends before"),
            (b"--Xb".to_vec(), "ends before"),
            (
                b"--XbX\r\nContent-Disposition: form-data; name=\"model\"\r\n".to_vec(),
                "ends before",
            ),
            (b"--XbX\r\nX: y\r\n\r\nabc".to_vec(), "no disposition"),
            (b"preamble\r\n--XbX--\r\n".to_vec(), "start"),
            (b"\r\n--XbX--\r\n".to_vec(), "start"),
            (b"--XbX \r\n".to_vec(), "line end"),
            (b"--XbX\n".to_vec(), "line end"),
            (b"--XbX-\r\n".to_vec(), "line end"),
            (form(&[(FILE, "x\r\n--XbX \r\n")]), "line end"),
            (form(&[(FILE, "x\r\n--XbX\n")]), "line end"),
            (form(&[(FILE, "x\r\n--XbX-y")]), "line end"),
            (form(&[(FILE, "--XbX\r\n")]), "does not follow"),
            (form(&[(FILE, "\n--XbX--\r\n")]), "does not follow"),
            (form(&[(FILE, "x\n--XbX\r\n")]), "does not follow"),
            (form(&[(FILE, "x\r--XbX \r\n")]), "does not follow"),
            (b"--XbX--\r\nmore".to_vec(), "follows"),
        ] {
            let shown = String::from_utf8_lossy(&body);
            let fault = scan(&body).expect_err(&shown);
            assert!(fault.text.contains(text), "{shown} {fault:?}");
            check_every_split(&body);
        }
    }

    #[test]
    fn heads_and_parts_are_bounded() {
        let long = |len: usize| form(&[(&format!("{MODEL}\r\nX: {}", "y".repeat(len)), "m")]);
        assert!(scan(&long(HEAD_BYTES_MAX / 2)).is_ok());
        assert!(scan(&long(HEAD_BYTES_MAX)).is_err());
        let endless = [b"--XbX\r\nX: ", &[b'y'; HEAD_BYTES_MAX][..]].concat();
        assert!(Scanner::new(b"XbX").feed(&endless).is_err());
        assert!(scan(&form(&vec![(FILE, ""); PARTS_MAX])).is_ok());
        assert!(scan(&form(&vec![(FILE, ""); PARTS_MAX + 1])).is_err());
    }

    #[test]
    fn boundaries_are_read_strictly() {
        for (content_type, expected) in [
            ("multipart/form-data; boundary=XbX", Some("XbX")),
            ("Multipart/Form-Data;charset=utf-8;BOUNDARY=\"a b\"", Some("a b")),
            (
                "multipart/form-data; boundary=----WebKitFormBoundary7MA4",
                Some("----WebKitFormBoundary7MA4"),
            ),
            ("multipart/form-data; boundary=a; boundary=b", None),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data; boundary=\"\"", None),
            ("multipart/form-data; boundary=\"a\\\"b\"", None),
            ("multipart/form-data; boundary=\"a ", None),
            ("multipart/form-data; boundary=\"a \"", None),
            ("multipart/form-data; boundary=a b", None),
            ("multipart/form-data", None),
            ("multipart/mixed; boundary=a", None),
            ("application/json", None),
        ] {
            let found = boundary(content_type.as_bytes());
            assert_eq!(found, expected.map(str::as_bytes), "{content_type}");
        }
        let long = format!("multipart/form-data; boundary={}", "x".repeat(71));
        assert_eq!(boundary(long.as_bytes()), None);
    }
}
