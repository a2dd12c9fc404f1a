//! Request targets: what a client may name, and how its path is joined to a backend's base.
//!
//! What is matched must be what is forwarded and what the backend reads. So a path is never
//! rewritten to a normal form; one that has a second reading (dot segments, doubled or encoded
//! slashes, needless escapes, parameters) is refused where it would be forwarded.

use std::ops::Range;

use crate::pure::fields::{byte_set, find};
use crate::pure::lanes::{below, equals, high};

/// Where the parts of a request target lie. The path is empty for `http://host` (it then means
/// `/`), and `*` for the asterisk-form; the query includes its `?`.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parts {
    pub authority: Option<Range<usize>>,
    pub path: Range<usize>,
    pub query: Range<usize>,
}

/// Splits a target in origin-form, absolute-form (http, https) or asterisk-form (RFC 9112, 3.2).
/// `star` says whether the method allows the last.
pub(super) fn split(target: &[u8], star: bool) -> Result<Parts, &'static str> {
    let hidden = |word| below(word, b'!') | equals(word, 0x7f) | equals(word, b'#') | high(word);
    if find(target, hidden) < target.len() {
        return Err("a byte in the request target must be percent-encoded");
    }
    if target.first() == Some(&b'/') {
        return Ok(from_path(target, 0, None));
    }
    if target == b"*" && star {
        return Ok(Parts { authority: None, path: 0..1, query: 1..1 });
    }
    let scheme = [&b"http://"[..], b"https://"].into_iter().find(|scheme| {
        target.get(..scheme.len()).is_some_and(|head| head.eq_ignore_ascii_case(scheme))
    });
    let Some(scheme) = scheme else {
        return Err("the request target must be a path");
    };
    let start = scheme.len();
    let rest = target.get(start..).unwrap_or_default();
    let end =
        start + rest.iter().position(|byte| matches!(byte, b'/' | b'?')).unwrap_or(rest.len());
    if !is_authority(target.get(start..end).unwrap_or_default()) {
        return Err("the request target names no valid host");
    }
    Ok(from_path(target, end, Some(start..end)))
}

fn from_path(target: &[u8], start: usize, authority: Option<Range<usize>>) -> Parts {
    let rest = target.get(start..).unwrap_or_default();
    let mark = start + find(rest, |word| equals(word, b'?'));
    Parts { authority, path: start..mark, query: mark..target.len() }
}

/// Whether this is a host with an optional port (RFC 3986, 3.2, without userinfo). Stricter than
/// the grammar in names: letters, digits, `-`, `.`, `_`, `~`, as names in use are.
pub(super) fn is_authority(text: &[u8]) -> bool {
    static NAME: [bool; 256] = byte_set(b"-._~");
    let (host, port) = if text.first() == Some(&b'[') {
        let Some(close) = memchr::memchr(b']', text) else {
            return false;
        };
        let address = text.get(1..close).unwrap_or_default();
        let literal = std::str::from_utf8(address).unwrap_or_default();
        if literal.parse::<std::net::Ipv6Addr>().is_err() {
            return false;
        }
        text.split_at(close + 1)
    } else {
        let end = text.iter().position(|&byte| !NAME[usize::from(byte)]).unwrap_or(text.len());
        text.split_at(end)
    };
    if host.is_empty() {
        return false;
    }
    match port {
        [] => true,
        // Five digits at most, so that the sum cannot wrap.
        [b':', digits @ ..] if digits.len() <= 5 => {
            let sum = digits.iter().try_fold(0, |sum, digit| {
                digit.is_ascii_digit().then(|| sum * 10 + u32::from(digit - b'0'))
            });
            sum.is_some_and(|port| port <= 65_535)
        }
        _ => false,
    }
}

/// The path of a backend's URL, as a prefix for the paths that clients ask for.
///
/// Clients speak of `/v1/…`. A base that ends in a version segment (`/v1`, `/openai/v1`, `/api/v3`)
/// is what an SDK would be given as its base URL: that version stands for the client's `/v1`. So
/// `http://b`, `http://b/`, `http://b/v1` and `http://b/v1/` are the same backend,
/// `http://b/openai/` serves `/openai/v1/…`, and `http://b/api/v3` serves `/api/v3/…`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BasePath {
    /// Empty, or begins with `/` and does not end with it.
    prefix: String,
    /// The version segment that takes the place of the client's `/v1`: `/v3`; empty for none.
    version: String,
}

impl BasePath {
    /// From the path of a configured URL, which may be empty.
    ///
    /// # Errors
    /// What is wrong with it, for the operator.
    pub fn parse(path: &str) -> Result<BasePath, &'static str> {
        let trimmed = path.trim_end_matches('/');
        if trimmed.is_empty() {
            return Ok(BasePath::default());
        }
        check_path(trimmed.as_bytes())?;
        let (head, last) = trimmed.rsplit_once('/').unwrap_or(("", trimmed));
        let versioned = last
            .strip_prefix('v')
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
        Ok(match (versioned, last) {
            (true, "v1") => BasePath { prefix: head.to_owned(), version: String::new() },
            (true, _) => BasePath { prefix: head.to_owned(), version: format!("/{last}") },
            (false, _) => BasePath { prefix: trimmed.to_owned(), version: String::new() },
        })
    }

    /// The target for this backend: base, client's path, client's query.
    ///
    /// The query passes byte for byte, except that parameters which carry a credential (`key`,
    /// `api_key`, `access_token`) are left out: the credential is ours to set.
    ///
    /// # Errors
    /// What is wrong with the path, for a 400.
    pub fn join<'a>(&'a self, path: &'a [u8], query: &'a [u8]) -> Result<Target<'a>, &'static str> {
        let path = if path.is_empty() { b"/" } else { path };
        check_path(path)?;
        let unversioned = match path.strip_prefix(b"/v1") {
            Some(rest @ ([] | [b'/', ..])) if !self.version.is_empty() => Some(rest),
            _ => None,
        };
        Ok(match unversioned {
            Some(rest) => Target { base: [&self.prefix, &self.version], path: rest, query },
            None => Target { base: [&self.prefix, ""], path, query },
        })
    }
}

/// What a backend is asked for, in parts that pass as they are; from [`BasePath::join`].
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    base: [&'a str; 2],
    path: &'a [u8],
    /// Credentials included.
    query: &'a [u8],
}

impl Target<'_> {
    /// Appends it.
    pub fn write(&self, out: &mut Vec<u8>) {
        for part in self.base.iter().filter(|part| !part.is_empty()) {
            out.extend_from_slice(part.as_bytes());
        }
        out.extend_from_slice(self.path);
        copy_query(self.query, out);
    }
}

/// Whether a path has one reading only, whoever reads it.
fn check_path(path: &[u8]) -> Result<(), &'static str> {
    const DOTS: &str = "dot segments are not allowed in the path";
    // Two words each to compare, for what nearly all requests name.
    if matches!(path, b"/v1/chat/completions" | b"/v1/completions" | b"/v1/messages") {
        return Ok(());
    }
    if path.first() != Some(&b'/') {
        return Err("the path must begin with a slash");
    }
    let mut segment = 0;
    let mut at = 0;
    while let Some(&byte) = path.get(at) {
        at += 1;
        match byte {
            b'/' => {
                let closed = path.get(segment..at - 1).unwrap_or_default();
                if at > 1 && closed.is_empty() {
                    return Err("empty segments are not allowed in the path");
                }
                if matches!(closed, b"." | b"..") {
                    return Err(DOTS);
                }
                segment = at;
            }
            byte if is_plain(byte) || byte == b'.' => {}
            b'%' => {
                let byte = match path.get(at..at + 2) {
                    Some(&[high, low]) => {
                        hex(high).zip(hex(low)).map(|(high, low)| high << 4 | low)
                    }
                    _ => None,
                };
                match byte {
                    None => return Err("malformed percent-encoding in the path"),
                    Some(b'/' | b'\\' | 0..=0x1f | 0x7f) => {
                        return Err("an encoded slash or control byte is not allowed in the path");
                    }
                    Some(plain) if is_plain(plain) || matches!(plain, b'.' | b';') => {
                        return Err("a needless percent-encoding is not allowed in the path");
                    }
                    Some(_) => at += 2,
                }
            }
            _ => return Err("a byte in the path is not allowed unencoded"),
        }
    }
    match path.get(segment..) {
        Some(b"." | b"..") => Err(DOTS),
        _ => Ok(()),
    }
}

/// Path bytes (RFC 3986's pchar) with one reading: without `;`, which some servers cut at, `@`,
/// which some URL parsers split at, and `.`, which the caller looks at.
fn is_plain(byte: u8) -> bool {
    static PLAIN: [bool; 256] = byte_set(b"-_~:!$&'()*+,=");
    PLAIN[usize::from(byte)]
}

fn hex(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

fn copy_query(query: &[u8], out: &mut Vec<u8>) {
    let Some(pairs) = query.strip_prefix(b"?") else {
        return;
    };
    if !pairs.split(|&byte| byte == b'&').any(is_credential) {
        out.extend_from_slice(query);
        return;
    }
    let mut mark = b'?';
    for pair in pairs.split(|&byte| byte == b'&').filter(|pair| !is_credential(pair)) {
        out.push(mark);
        out.extend_from_slice(pair);
        mark = b'&';
    }
}

/// Whether a query parameter's name, decoded, is one that services take credentials from.
fn is_credential(pair: &[u8]) -> bool {
    const NAMES: [&[u8]; 6] =
        [b"key", b"api_key", b"api-key", b"apikey", b"access_token", b"authorization"];
    // Longer than the longest name even when each byte of it is encoded: not one of them.
    let mut name = [0u8; 16];
    let (mut len, mut at) = (0, 0);
    while let Some(&byte) = pair.get(at).filter(|&&byte| byte != b'=') {
        let escape = match pair.get(at..at + 3) {
            Some(&[b'%', high, low]) => hex(high).zip(hex(low)),
            _ => None,
        };
        let Some(cell) = name.get_mut(len) else {
            return false;
        };
        (*cell, at) = match escape {
            Some((high, low)) => (high << 4 | low, at + 3),
            None => (byte, at + 1),
        };
        len += 1;
    }
    let name = name.get(..len).unwrap_or_default();
    NAMES.iter().any(|own| name.eq_ignore_ascii_case(own))
}

#[cfg(test)]
mod tests {
    //! Goal: no path with two readings is forwarded, and every spelling of a base gives one path.
    //! Method: tables of both, and all one-byte changes of a good path.
    use super::*;

    fn joined(base: &str, target: &str) -> Result<String, &'static str> {
        let parts = split(target.as_bytes(), false)?;
        let (path, query) = (&target.as_bytes()[parts.path], &target.as_bytes()[parts.query]);
        let mut out = Vec::new();
        BasePath::parse(base)?.join(path, query)?.write(&mut out);
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn every_spelling_of_a_base_gives_the_same_path() {
        for base in ["", "/", "//", "/v1", "/v1/"] {
            assert_eq!(
                joined(base, "/v1/chat/completions").unwrap(),
                "/v1/chat/completions",
                "{base}"
            );
            assert_eq!(joined(base, "/tokenize").unwrap(), "/tokenize", "{base}");
            assert_eq!(joined(base, "/v1").unwrap(), "/v1", "{base}");
        }
        for base in ["/openai", "/openai/", "/openai/v1", "/openai/v1/"] {
            assert_eq!(joined(base, "/v1/embeddings?a=b").unwrap(), "/openai/v1/embeddings?a=b");
        }
        assert_eq!(joined("/api/v3/", "/v1/chat/completions").unwrap(), "/api/v3/chat/completions");
        assert_eq!(joined("/api/v3", "/v1").unwrap(), "/api/v3");
        assert_eq!(joined("/api/v3", "/v1x/a").unwrap(), "/api/v1x/a");
        assert_eq!(joined("/api/v1beta", "/v1/models").unwrap(), "/api/v1beta/models");
        assert_eq!(joined("/vllm", "/v1/models").unwrap(), "/vllm/v1/models");
        assert_eq!(joined("/a", "http://h").unwrap(), "/a/");
        for bad in ["v1", "/a//b", "/a/../b", "/a?b", "/a#b", "/a b", "/%2e", "/a/.", "/é"] {
            assert!(BasePath::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_query_passes_byte_for_byte_but_for_credentials() {
        let query = "?api-version=2024-10-01&x=a+b&y=%2B//z&empty=&flag&%E4%BD%A0=1&&monkey=1&key2=%zz&a=key=b";
        assert_eq!(joined("", &format!("/v1/x{query}")).unwrap(), format!("/v1/x{query}"));
        assert_eq!(joined("", "/v1/x?key=s").unwrap(), "/v1/x");
        assert_eq!(
            joined("", "/v1/x?a=1&KEY=s&b&api_key=t&%6bey=u&access_token&c=").unwrap(),
            "/v1/x?a=1&b&c="
        );
        assert_eq!(joined("", "/v1/x?").unwrap(), "/v1/x?");
        assert_eq!(joined("", "/v1/x?%6b%65%79=s&&").unwrap(), "/v1/x?&");
        assert_eq!(joined("", &format!("/v1/x?{}key=s", "k".repeat(99))).unwrap().len(), 6 + 104);
    }

    #[test]
    fn a_path_with_two_readings_is_refused() {
        for path in [
            "/v1/../admin",
            "/v1/..",
            "/..",
            "/.",
            "/v1/./x",
            "//evil.example/",
            "/v1//chat",
            "/v1/%2e%2e/x",
            "/v1/.%2E/x",
            "/v1/..;/admin",
            "/v1/a;b",
            "/v1/a%3bb",
            "/v1/a%2fb",
            "/v1/a%5Cb",
            "/v1/a\\b",
            "/v1/a%00b",
            "/v1/%0d%0aX-Inj:1",
            "/v1/%63hat/completions",
            "/v1/chat%5fcompletions",
            "/v1/%zz",
            "/v1/%",
            "/v1/%2",
            "/@evil.example/x",
            "/v1/a|b",
            "/v1/a\"b",
            "/v1/{id}",
            "/v1/a^b",
            "/v1/a`b",
            "/v1/a<b",
        ] {
            assert!(joined("", path).is_err(), "{path}");
        }
        for path in [
            "/",
            "/v1/files/file-abc.jsonl",
            "/v1/x/",
            "/v1/%E6%A8%A1/a%20b",
            "/v1/models/x:generate",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/.../..a",
            "/a%25b",
        ] {
            assert_eq!(joined("", path).unwrap(), path);
        }
    }

    #[test]
    fn each_byte_of_a_path_is_allowed_or_refused_as_the_table_says() {
        for byte in 0..=255u8 {
            let path = [b'/', b'a', byte, b'b'];
            let wanted = byte.is_ascii_alphanumeric() || b"-_~:!$&'()*+,=./".contains(&byte);
            assert_eq!(check_path(&path).is_ok(), wanted, "{byte:#x}");
            let target = split(&path, false).is_ok();
            assert_eq!(target, byte.is_ascii_graphic() && byte != b'#', "{byte:#x}");
        }
    }

    #[test]
    fn targets_come_in_three_forms() {
        assert_eq!(
            split(b"/a?b?c", false).unwrap(),
            Parts { authority: None, path: 0..2, query: 2..6 }
        );
        assert_eq!(split(b"*", true).unwrap(), Parts { authority: None, path: 0..1, query: 1..1 });
        let parts = split(b"HTTP://h:80/a?b", false).unwrap();
        assert_eq!(parts, Parts { authority: Some(7..11), path: 11..13, query: 13..15 });
        let parts = split(b"https://h?b", false).unwrap();
        assert_eq!(parts, Parts { authority: Some(8..9), path: 9..9, query: 9..11 });
        for bad in [
            "",
            "*",
            "h",
            "h:80",
            "http:/x",
            "http:///x",
            "http://",
            "ftp://h/",
            "http://u@h/",
            "http://h\\/",
            "x/y",
        ] {
            assert!(split(bad.as_bytes(), false).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_host_is_a_name_or_an_address_with_an_optional_port() {
        for good in [
            "a",
            "gw.example.test",
            "10.0.0.1:8080",
            "[::1]",
            "[::1]:443",
            "a_b-c:",
            "a:0",
            "h:65535",
        ] {
            assert!(is_authority(good.as_bytes()), "{good}");
        }
        for bad in [
            "",
            ":80",
            "a b",
            "a/b",
            "u@a",
            "a:80x",
            "a\\b",
            "a?b",
            "a#b",
            "[::1",
            "[::1]x",
            "[]",
            "[1]",
            "::1",
            "a:99999",
            "a:1:2",
            "a,b",
            "a%41",
            "[::1%eth0]",
            "a:4294967376",
            "a:99999999999999999999",
        ] {
            assert!(!is_authority(bad.as_bytes()), "{bad}");
        }
    }
}
