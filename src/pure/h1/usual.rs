//! Heads as nearly everybody writes them, read in one pass, eight bytes at a time.
//!
//! One idea: this reader never refuses. It takes heads in their plainest form (the usual methods,
//! a path for a target, HTTP/1.1, one space behind each colon, values of at least one byte without
//! tabs) and leaves all others, also those that have not ended and those that are wrong, to the
//! general reader, which alone knows what to say of them. What this one takes, that one reads alike:
//! the tests hold it.

use super::{Facts, Limits, Method, Request, Response, Version, check_host};
use crate::pure::fields::{Field, Known, ONCE, Span, control, find, is_token};
use crate::pure::lanes::{below, equals, high};

/// Reads a request head into `request`, up to what its fields mean together: that goes to `facts`,
/// which are empty. Leaves rubbish in both if it does not take the head.
pub(super) fn request(
    window: &[u8],
    limits: &Limits,
    request: &mut Request,
    facts: &mut Facts,
) -> Option<()> {
    const VERSION: &[u8; 11] = b" HTTP/1.1\r\n";
    let at = request.scan.start;
    let (method, start) = match window.get(at..)? {
        [b'P', b'O', b'S', b'T', b' ', b'/', ..] => (Method::Post, at + 5),
        [b'G', b'E', b'T', b' ', b'/', ..] => (Method::Get, at + 4),
        _ => return None,
    };
    let hidden = |word| below(word, b'!') | equals(word, 0x7f) | equals(word, b'#') | high(word);
    let mark = start + find(window.get(start..)?, |word| hidden(word) | equals(word, b'?'));
    let end = match window.get(mark)? {
        b'?' => mark + find(window.get(mark..)?, hidden),
        _ => mark,
    };
    if window.get(end..)?.first_chunk() != Some(VERSION) || end - start > limits.target_bytes {
        return None;
    }
    request.method = method;
    request.version = Version::Http11;
    request.target = Span::new(start, end);
    request.path = Span::new(start, mark);
    request.query = Span::new(mark, end);
    request.head_len = lines(window, end + VERSION.len(), limits, &mut request.fields, facts)?;
    check_host(Version::Http11, None, facts.host.map(|host| host.of(window))).ok()?;
    (facts.twice & ONCE == 0).then_some(())
}

/// Reads the head of a plain success into `response`, likewise.
pub(super) fn response(
    window: &[u8],
    limits: &Limits,
    response: &mut Response,
    facts: &mut Facts,
) -> Option<()> {
    const STATUS: &[u8; 17] = b"HTTP/1.1 200 OK\r\n";
    if window.first_chunk() != Some(STATUS) {
        return None;
    }
    response.status = 200;
    response.version = Version::Http11;
    response.head_len = lines(window, STATUS.len(), limits, &mut response.fields, facts)?;
    Some(())
}

/// Reads field lines from `at` to the empty line, and gives where that ends.
fn lines(
    window: &[u8],
    at: usize,
    limits: &Limits,
    fields: &mut Vec<Field>,
    facts: &mut Facts,
) -> Option<usize> {
    let most = limits.fields_max();
    fields.clear();
    let mut rest = window.get(at..)?;
    u32::try_from(window.len()).ok()?;
    loop {
        let at = window.len() - rest.len();
        if let [b'\r', b'\n', ..] = rest {
            if facts.listed > 0 {
                Facts::mark_listed(window, fields);
            }
            return Some(at + 2);
        }
        let (name, behind) = rest.split_at_checked(find(rest, |word| equals(word, b':')))?;
        let [b':', b' ', text @ ..] = behind else { return None };
        let (value, behind) = text.split_at_checked(find(text, control))?;
        let [b'\r', b'\n', behind @ ..] = behind else { return None };
        if matches!(value, [] | [b' ', ..] | [.., b' ']) || fields.len() >= most {
            return None;
        }
        let known = Known::of(name);
        if known == Known::Other && !is_token(name) {
            return None;
        }
        let start = at + name.len() + 2;
        let span = Span::within(start, start + value.len());
        facts.note(known, span, value).ok()?;
        fields.push(Field {
            name: Span::within(at, at + name.len()),
            value: span,
            known,
            listed: false,
        });
        rest = behind;
    }
}
