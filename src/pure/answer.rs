//! What Forebay itself says to a client: refusals, faults, health, models.
//!
//! An error is one value with a status and machine-readable fields, and is written in the
//! envelope that the client's SDK parses: OpenAI's, or Anthropic's on `/v1/messages`.

use std::time::Duration;

use crate::pure::dialect::Envelope;

/// Why a request is not (or no longer) being served, in the words a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub status: u16,
    /// OpenAI's `type`.
    pub kind: &'static str,
    pub code: Option<&'static str>,
    pub param: Option<&'static str>,
    /// Whole sentences; never a key, a backend address or a prompt.
    pub message: String,
    pub retry_after: Option<Duration>,
    /// SDKs retry 408, 409, 429 and 5xx by themselves; false tells them that it cannot help.
    pub should_retry: bool,
}

impl Refusal {
    /// A fault in the request itself: repeating it cannot help.
    pub fn invalid(status: u16, message: impl Into<String>) -> Refusal {
        Refusal {
            status,
            kind: "invalid_request_error",
            code: None,
            param: None,
            message: message.into(),
            retry_after: None,
            should_retry: false,
        }
    }

    /// A backend broke, was slow or could not be reached.
    pub fn upstream(status: u16, code: &'static str, message: impl Into<String>) -> Refusal {
        Refusal {
            kind: "upstream_error",
            code: Some(code),
            should_retry: true,
            ..Refusal::invalid(status, message)
        }
    }

    /// No room here at the moment.
    pub fn busy(code: &'static str, message: impl Into<String>, after: Duration) -> Refusal {
        Refusal {
            kind: "server_error",
            code: Some(code),
            retry_after: Some(after),
            should_retry: true,
            ..Refusal::invalid(503, message)
        }
    }

    pub fn code(self, code: &'static str) -> Refusal {
        Refusal { code: Some(code), ..self }
    }

    pub fn param(self, param: &'static str) -> Refusal {
        Refusal { param: Some(param), ..self }
    }

    /// 401. The same whether a key is missing, unknown or malformed: nobody learns what exists.
    pub fn unauthorized() -> Refusal {
        let message = "A valid API key is needed: send it as `Authorization: Bearer KEY`.";
        Refusal::invalid(401, message).code("invalid_api_key")
    }

    /// 401 for a token that is not good, and why in general terms (RFC 6750 3.1).
    pub fn invalid_token(why: &str) -> Refusal {
        Refusal::invalid(401, format!("The bearer token is not accepted: {why}."))
            .code(INVALID_TOKEN)
    }

    /// What `www-authenticate` says of a 401.
    pub fn challenge(&self) -> &'static str {
        match self.code {
            Some(INVALID_TOKEN) => "Bearer error=\"invalid_token\"",
            _ => "Bearer",
        }
    }

    /// The JSON body in `envelope`.
    pub fn body(&self, envelope: Envelope) -> Vec<u8> {
        let mut out = Vec::with_capacity(160 + self.message.len());
        match envelope {
            Envelope::OpenAi => {
                out.extend_from_slice(b"{\"error\":{\"message\":");
                push_json(&mut out, &self.message);
                out.extend_from_slice(b",\"type\":");
                push_json(&mut out, self.kind);
                out.extend_from_slice(b",\"param\":");
                push_optional(&mut out, self.param);
                out.extend_from_slice(b",\"code\":");
                push_optional(&mut out, self.code);
                out.extend_from_slice(b"}}");
            }
            Envelope::Anthropic => {
                out.extend_from_slice(b"{\"type\":\"error\",\"error\":{\"type\":");
                push_json(&mut out, anthropic_kind(self.status));
                out.extend_from_slice(b",\"message\":");
                push_json(&mut out, &self.message);
                out.extend_from_slice(b"}}");
            }
        }
        out
    }

    /// The same as an event inside a stream that has begun. Never followed by `[DONE]`.
    pub fn event(&self, envelope: Envelope) -> Vec<u8> {
        let mut out = match envelope {
            Envelope::OpenAi => b"data: ".to_vec(),
            Envelope::Anthropic => b"event: error\ndata: ".to_vec(),
        };
        out.extend_from_slice(&self.body(envelope));
        out.extend_from_slice(b"\n\n");
        out
    }
}

const INVALID_TOKEN: &str = "invalid_token";

/// Anthropic's names, by status (its API reference, "Errors").
fn anthropic_kind(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500..=599 => "api_error",
        _ => "invalid_request_error",
    }
}

/// An answer of our own, head and body, appended to `out`.
#[derive(Clone, Copy, Debug)]
pub struct Reply<'a> {
    pub status: u16,
    pub content_type: &'a str,
    pub body: &'a [u8],
    /// Whole field lines, each ending in CRLF.
    pub fields: &'a [u8],
    pub request_id: &'a str,
    pub keep_alive: bool,
    /// An HTTP/1.0 client must be told that the connection stays.
    pub http10: bool,
    /// The answer to HEAD: the length is told, the body is not sent.
    pub head_only: bool,
}

impl Reply<'_> {
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"HTTP/1.1 ");
        push_decimal(out, u64::from(self.status));
        out.push(b' ');
        out.extend_from_slice(reason(self.status).as_bytes());
        out.extend_from_slice(b"\r\ncontent-type: ");
        out.extend_from_slice(self.content_type.as_bytes());
        out.extend_from_slice(b"\r\ncontent-length: ");
        push_decimal(out, self.body.len() as u64);
        out.extend_from_slice(b"\r\n");
        if !self.request_id.is_empty() {
            out.extend_from_slice(b"x-request-id: ");
            out.extend_from_slice(self.request_id.as_bytes());
            out.extend_from_slice(b"\r\n");
        }
        out.extend_from_slice(self.fields);
        match (self.keep_alive, self.http10) {
            (false, _) => out.extend_from_slice(b"connection: close\r\n"),
            (true, true) => out.extend_from_slice(b"connection: keep-alive\r\n"),
            (true, false) => {}
        }
        out.extend_from_slice(b"\r\n");
        if !self.head_only {
            out.extend_from_slice(self.body);
        }
    }
}

/// Appends `retry-after` (whole seconds, at least one) with OpenAI's finer `retry-after-ms`, and
/// `x-should-retry: false` where repeating cannot help but the status suggests that it may.
pub fn push_retry_fields(out: &mut Vec<u8>, refusal: &Refusal) {
    if let Some(after) = refusal.retry_after {
        let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
        out.extend_from_slice(b"retry-after: ");
        push_decimal(out, millis.div_ceil(1000).max(1));
        out.extend_from_slice(b"\r\nretry-after-ms: ");
        push_decimal(out, millis);
        out.extend_from_slice(b"\r\n");
    }
    if !refusal.should_retry && matches!(refusal.status, 408 | 409 | 429 | 500..=599) {
        out.extend_from_slice(b"x-should-retry: false\r\n");
    }
}

/// Appends `value` as a JSON string. All control characters are escaped.
pub fn push_json(out: &mut Vec<u8>, value: &str) {
    out.push(b'"');
    for &byte in value.as_bytes() {
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            0..=0x1f | 0x7f => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(byte >> 4)]);
                out.push(HEX[usize::from(byte & 15)]);
            }
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

fn push_optional(out: &mut Vec<u8>, value: Option<&str>) {
    match value {
        Some(value) => push_json(out, value),
        None => out.extend_from_slice(b"null"),
    }
}

pub fn push_decimal(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        // A remainder by ten is one digit.
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Reason phrases of the statuses that Forebay itself sends; others go without.
pub fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        411 => "Length Required",
        413 => "Content Too Large",
        414 => "URI Too Long",
        415 => "Unsupported Media Type",
        417 => "Expectation Failed",
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
    use super::*;

    #[test]
    fn errors_are_valid_json_whatever_the_message_holds() {
        let hostile: String =
            (0..=0x9f).filter_map(char::from_u32).chain("\"\\é你".chars()).collect();
        let refusal = Refusal::invalid(400, hostile.clone()).param("model").code("x");
        for envelope in [Envelope::OpenAi, Envelope::Anthropic] {
            let value: serde_json::Value = serde_json::from_slice(&refusal.body(envelope)).unwrap();
            assert_eq!(value["error"]["message"], hostile.as_str());
            let event = String::from_utf8(refusal.event(envelope)).unwrap();
            assert!(event.ends_with("}}\n\n") && event.contains("data: {"));
        }
        let value: serde_json::Value =
            serde_json::from_slice(&refusal.body(Envelope::OpenAi)).unwrap();
        assert_eq!(value["error"]["param"], "model");
        assert_eq!(value["error"]["type"], "invalid_request_error");
    }

    #[test]
    fn retry_after_is_never_zero_and_says_the_milliseconds() {
        let mut out = Vec::new();
        push_retry_fields(&mut out, &Refusal::busy("full", "Full.", Duration::from_millis(20)));
        assert_eq!(out, b"retry-after: 1\r\nretry-after-ms: 20\r\n");
    }

    #[test]
    fn decimals_match_the_standard_library() {
        for value in [0, 1, 9, 10, 99, 100, 12_345, u64::MAX] {
            let mut out = Vec::new();
            push_decimal(&mut out, value);
            assert_eq!(out, value.to_string().into_bytes());
        }
    }

    #[test]
    fn a_reply_to_head_tells_the_length_and_keeps_the_body() {
        let mut out = Vec::new();
        Reply {
            status: 200,
            content_type: "text/plain",
            body: b"hello",
            fields: b"",
            request_id: "r",
            keep_alive: false,
            http10: false,
            head_only: true,
        }
        .write(&mut out);
        let text = String::from_utf8(out).unwrap();
        assert!(
            text.contains("content-length: 5\r\n") && text.ends_with("connection: close\r\n\r\n")
        );
    }
}
