//! Header fields: the names that matter here, and which fields may cross the gateway.
//!
//! A name is looked up once, when the head is parsed, and is a small number from then on. What
//! crosses towards a backend is a list of what may (an unknown field stays here, because it may be
//! an order to somebody behind us); what crosses towards the client is all but a list of what may
//! not. Credentials, framing and hop-by-hop fields never cross: they are made anew on each side.

use crate::pure::lanes::{below, equals, place};

/// A range of bytes in the buffer that a head was parsed from. Heads are bounded far below 4 GiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    start: u32,
    end: u32,
}

impl Span {
    /// From byte offsets; saturates at `u32::MAX`, which no head can reach.
    pub fn new(start: usize, end: usize) -> Span {
        let clip = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Span { start: clip(start), end: clip(end) }
    }

    /// From byte offsets below 4 GiB.
    pub(super) const fn within(start: usize, end: usize) -> Span {
        Span { start: start as u32, end: end as u32 }
    }

    /// The bytes of this span in the buffer it was made for; empty if the buffer is another one
    /// and too short.
    pub fn of(self, buf: &[u8]) -> &[u8] {
        buf.get(self.start as usize..self.end as usize).unwrap_or_default()
    }

    /// The offset of the first byte.
    pub const fn start(self) -> usize {
        self.start as usize
    }

    /// The offset behind the last byte.
    pub const fn end(self) -> usize {
        self.end as usize
    }

    /// Whether there are no bytes in it.
    pub const fn is_empty(self) -> bool {
        self.start >= self.end
    }
}

/// One field line of a parsed head: a token for a name, and a value without CR, LF, NUL or other
/// control bytes except tab, free of white space at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: Span,
    pub value: Span,
    pub known: Known,
    /// Named by a `Connection` field, hence meant for this hop only (RFC 9110, 7.6.1).
    pub listed: bool,
}

macro_rules! known {
    ($($id:ident = $name:literal,)+) => {
        /// The field names that some rule here or further up asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Known {
            $(#[doc = $name] $id,)+
            /// Any other name.
            Other,
        }

        const ALL: &[(Known, &str)] = &[$((Known::$id, $name),)+];
    };
}

known! {
    Connection = "connection",
    KeepAlive = "keep-alive",
    ProxyConnection = "proxy-connection",
    ProxyAuthenticate = "proxy-authenticate",
    ProxyAuthenticationInfo = "proxy-authentication-info",
    ProxyAuthorization = "proxy-authorization",
    Te = "te",
    Trailer = "trailer",
    TransferEncoding = "transfer-encoding",
    Upgrade = "upgrade",
    Http2Settings = "http2-settings",
    Proxy = "proxy",
    ContentLength = "content-length",
    Host = "host",
    Expect = "expect",
    Authorization = "authorization",
    XApiKey = "x-api-key",
    ApiKey = "api-key",
    XGoogApiKey = "x-goog-api-key",
    Cookie = "cookie",
    OpenaiOrganization = "openai-organization",
    OpenaiProject = "openai-project",
    OpenaiBeta = "openai-beta",
    AnthropicVersion = "anthropic-version",
    AnthropicBeta = "anthropic-beta",
    Accept = "accept",
    AcceptEncoding = "accept-encoding",
    AcceptLanguage = "accept-language",
    ContentType = "content-type",
    ContentEncoding = "content-encoding",
    ContentLanguage = "content-language",
    UserAgent = "user-agent",
    Range = "range",
    IdempotencyKey = "idempotency-key",
    Traceparent = "traceparent",
    Tracestate = "tracestate",
    Baggage = "baggage",
    B3 = "b3",
    XRequestId = "x-request-id",
    XForwardedFor = "x-forwarded-for",
    XForwardedHost = "x-forwarded-host",
    XForwardedProto = "x-forwarded-proto",
    Forwarded = "forwarded",
    XRealIp = "x-real-ip",
    Location = "location",
    WwwAuthenticate = "www-authenticate",
    AltSvc = "alt-svc",
    StrictTransportSecurity = "strict-transport-security",
    XAccelRedirect = "x-accel-redirect",
    XSendfile = "x-sendfile",
    RetryAfter = "retry-after",
    CacheControl = "cache-control",
    XCorrelationId = "x-correlation-id",
    XRatelimitLimitRequests = "x-ratelimit-limit-requests",
    XRatelimitRemainingRequests = "x-ratelimit-remaining-requests",
    XRatelimitResetRequests = "x-ratelimit-reset-requests",
    XRatelimitLimitTokens = "x-ratelimit-limit-tokens",
    XRatelimitRemainingTokens = "x-ratelimit-remaining-tokens",
    XRatelimitResetTokens = "x-ratelimit-reset-tokens",
}

impl Known {
    /// The name as a number. Case does not matter. Costs a hash of three bytes and one comparison.
    #[inline]
    pub fn of(name: &[u8]) -> Known {
        let Some(slot) = slot(name) else {
            return Known::Other;
        };
        let Some((known, spelt)) = ALL.get(usize::from(SLOTS[slot])) else {
            return Known::Other;
        };
        let [start, end] = ends(name);
        let lower = &ENDS[usize::from(SLOTS[slot])];
        let differ = differ(start, lower[0]) | differ(end, lower[1]);
        // The middle of few names is neither of their ends.
        let spelt = differ == 0
            && name.len() == spelt.len()
            && (name.len() <= 16 || same(name, spelt.as_bytes()));
        if spelt { *known } else { Known::Other }
    }

    /// This name's bit in a set of names; [`Known::Other`] has none.
    pub(super) const fn bit(self) -> u64 {
        if matches!(self, Known::Other) { 0 } else { 1 << self as u8 }
    }
}

const _: () = assert!(ALL.len() < 64, "a set of names is one u64");

/// Sets of names, by bit.
const fn set(names: &[Known]) -> u64 {
    let (mut bits, mut i) = (0, 0);
    while i < names.len() {
        bits |= names[i].bit();
        i += 1;
    }
    bits
}

/// Made anew on each hop, whatever a message says: hop-by-hop (RFC 9110, 7.6.1) and framing.
const HOP: u64 = set(&[
    Known::Connection,
    Known::KeepAlive,
    Known::ProxyConnection,
    Known::ProxyAuthenticate,
    Known::ProxyAuthenticationInfo,
    Known::ProxyAuthorization,
    Known::Te,
    Known::Trailer,
    Known::TransferEncoding,
    Known::Upgrade,
    Known::Http2Settings,
    Known::ContentLength,
]);

/// What a client's request may bring to a backend without being asked for by the pool.
const UP: u64 = set(&[
    Known::Accept,
    Known::AcceptLanguage,
    Known::ContentType,
    Known::ContentEncoding,
    Known::ContentLanguage,
    Known::UserAgent,
    Known::Range,
    Known::IdempotencyKey,
    Known::OpenaiBeta,
    Known::AnthropicVersion,
    Known::AnthropicBeta,
    Known::Traceparent,
    Known::Tracestate,
    Known::Baggage,
    Known::B3,
]);

/// What not even the operator's `forward` list may let through to a backend: hop-by-hop and
/// framing fields, the client's credentials, who pays, and what the gateway says itself.
const UP_NEVER: u64 = HOP
    | set(&[
        Known::Proxy,
        Known::Host,
        Known::Expect,
        Known::Authorization,
        Known::XApiKey,
        Known::ApiKey,
        Known::XGoogApiKey,
        Known::Cookie,
        Known::OpenaiOrganization,
        Known::OpenaiProject,
        Known::AcceptEncoding,
        Known::XRequestId,
    ]);

/// What never reaches the client. Beside hop-by-hop fields: a redirect or another service's
/// address (the gateway never sends clients elsewhere), a challenge about our own key, whose
/// account pays, promises about our own host name, and orders to a web server in front of us.
const DOWN_NEVER: u64 = HOP
    | set(&[
        Known::Location,
        Known::AltSvc,
        Known::WwwAuthenticate,
        Known::OpenaiOrganization,
        Known::OpenaiProject,
        Known::StrictTransportSecurity,
        Known::XAccelRedirect,
        Known::XSendfile,
        Known::XRequestId,
    ]);

/// May stand once in a request: two of them would leave it open which one counts.
pub(super) const ONCE: u64 = set(&[
    Known::Host,
    Known::ContentLength,
    Known::TransferEncoding,
    Known::Authorization,
    Known::XApiKey,
    Known::ApiKey,
    Known::ContentType,
    Known::ContentEncoding,
    Known::Expect,
]);

/// Names that a pool lets through to its backends besides the usual ones.
#[derive(Clone, Debug, Default)]
pub struct Forward {
    names: Vec<String>,
    prefixes: Vec<String>,
}

impl Forward {
    /// From the configuration's `forward: [X-Trace-Me, X-Team-*]`: names, or prefixes that end in
    /// `*`, in any case.
    ///
    /// # Errors
    /// What is wrong with which entry, for the operator: not a token, too wide a prefix, or a name
    /// that must never cross.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Forward, String> {
        let mut forward = Forward::default();
        for entry in entries {
            let (stem, list) = match entry.strip_suffix('*') {
                Some(stem) => (stem, &mut forward.prefixes),
                None => (entry, &mut forward.names),
            };
            if !is_token(stem.as_bytes()) || stem.contains('_') {
                return Err(format!("`{entry}` is no field name that can be forwarded"));
            }
            if stem.len() < entry.len() && stem.len() < 4 {
                return Err(format!("`{entry}` is too wide: at least four characters before `*`"));
            }
            if stem.len() == entry.len() && never_up(stem.as_bytes()) {
                return Err(format!("`{entry}` is made by the gateway and is never forwarded"));
            }
            list.push(stem.to_ascii_lowercase());
        }
        Ok(forward)
    }

    fn takes(&self, name: &[u8]) -> bool {
        let begins = |own: &String| {
            let head = name.get(..own.len()).unwrap_or_default();
            head.eq_ignore_ascii_case(own.as_bytes())
        };
        self.names.iter().any(|own| name.eq_ignore_ascii_case(own.as_bytes()))
            || self.prefixes.iter().any(begins)
    }
}

fn never_up(name: &[u8]) -> bool {
    let known = Known::of(name);
    let family = family(name, known);
    known.bit() & UP_NEVER != 0 || matches!(family, Family::Ours | Family::Credential)
}

/// Whether a client's field may go to a backend. `listed` as in [`Field::listed`].
pub fn crosses_up(name: &[u8], known: Known, listed: bool, forward: &Forward) -> bool {
    if listed {
        return false;
    }
    match family(name, known) {
        Family::Harmless => true,
        Family::Ours | Family::Credential => false,
        Family::None if known.bit() & UP != 0 => true,
        Family::None if known.bit() & UP_NEVER != 0 => false,
        // Backends that read fields as CGI variables cannot tell `_` from `-`.
        Family::None => forward.takes(name) && !name.contains(&b'_'),
    }
}

/// Whether a backend's field may go to the client. `listed` as in [`Field::listed`].
pub fn crosses_down(name: &[u8], known: Known, listed: bool) -> bool {
    !listed && known.bit() & DOWN_NEVER == 0 && family(name, known) != Family::Ours
}

/// Names that share a prefix and a fate.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    /// What SDKs say about themselves, and tracing.
    Harmless,
    /// What only the gateway says, to either side: about itself, or to a web server before it.
    Ours,
    /// What opens or bills accounts.
    Credential,
    None,
}

fn family(name: &[u8], known: Known) -> Family {
    if known != Known::Other {
        return Family::None;
    }
    let (prefix, family) = match name {
        [b'x' | b'X', b'-', b's' | b'S', ..] => ("x-stainless-", Family::Harmless),
        [b'x' | b'X', b'-', b'b' | b'B', ..] => ("x-b3-", Family::Harmless),
        [b'x' | b'X', b'-', b'f' | b'F', ..] => ("x-forebay-", Family::Ours),
        [b'x' | b'X', b'-', b'a' | b'A', ..] => ("x-accel-", Family::Ours),
        [b'x' | b'X', b'-', b'g' | b'G', ..] => ("x-goog-", Family::Credential),
        [b'p' | b'P', ..] => ("proxy-", Family::Credential),
        _ => return Family::None,
    };
    let head = name.get(..prefix.len()).unwrap_or_default();
    if same(head, prefix.as_bytes()) { family } else { Family::None }
}

/// The name of a field that the gateway itself says.
#[derive(Debug)]
pub struct Name {
    /// The name, `: `, and spaces up to the end, so that all names are copied by the same code.
    text: [u8; Name::MAX + 2],
    len: usize,
    known: Known,
}

impl Name {
    const MAX: usize = 30;

    /// For names in lower case, at compile time.
    ///
    /// # Panics
    /// If the other side's field of that name could pass beside ours: it must be a known one, or one
    /// that nobody but the gateway may say.
    pub const fn new(name: &'static str) -> Name {
        let name = name.as_bytes();
        let mut known = Known::Other;
        let mut i = 0;
        while i < ALL.len() {
            if ALL[i].1.len() == name.len() && begins(name, ALL[i].1.as_bytes()) {
                known = ALL[i].0;
            }
            i += 1;
        }
        let ours = begins(name, b"x-forebay-") || begins(name, b"x-accel-");
        assert!(ours || !matches!(known, Known::Other), "make it a known name");
        let mut text = [b' '; Name::MAX + 2];
        let mut i = 0;
        while i < name.len() {
            assert!(is_token_byte(name[i]) && !name[i].is_ascii_uppercase());
            text[i] = name[i];
            i += 1;
        }
        text[i] = b':';
        Name { text, len: i + 2, known }
    }
}

const fn begins(name: &[u8], prefix: &[u8]) -> bool {
    let mut i = 0;
    while i < prefix.len() && i < name.len() && name[i] == prefix[i] {
        i += 1;
    }
    i == prefix.len()
}

/// What the gateway itself says in one head: each field replaces the other side's of that name.
#[derive(Clone, Copy, Debug)]
pub struct Own<'a> {
    lines: [(&'static Name, &'a [u8]); OWN_MAX],
    len: usize,
    /// The names, by bit.
    names: u64,
}

/// What all that the gateway may have to say in one head comes to.
const OWN_MAX: usize = 14;

impl Default for Own<'_> {
    fn default() -> Self {
        static NONE: Name = Name::new("x-forebay-none");
        Own { lines: [(&NONE, b""); OWN_MAX], len: 0, names: 0 }
    }
}

impl<'a> Own<'a> {
    /// Adds a field whose value is ours, or was checked: legal.
    #[inline]
    pub fn say(&mut self, name: &'static Name, value: &'a [u8]) {
        debug_assert!(is_value(value));
        self.names |= name.known.bit();
        if let Some(line) = self.lines.get_mut(self.len) {
            *line = (name, value);
            self.len += 1;
        }
    }

    /// Adds a field whose value comes from elsewhere. With an illegal one the field is left out rather
    /// than written, and so is the other side's: a model's name or an identifier from outside must
    /// not become a second field.
    pub fn quote(&mut self, name: &'static Name, value: &'a [u8]) {
        if is_value(value) {
            self.say(name, value);
        } else {
            self.names |= name.known.bit();
        }
    }
}

/// Appends the client's fields that may go to a backend, one line each, except those whose names
/// stand in `own`: what the gateway says itself is said once.
pub fn copy_up(out: &mut Vec<u8>, buf: &[u8], fields: &[Field], forward: &Forward, own: &Own) {
    copy(out, buf, fields, own.names | UP_NEVER, UP, |field| {
        crosses_up(field.name.of(buf), field.known, field.listed, forward)
    });
}

/// Appends the backend's fields that may go to the client, except those named in `own`.
pub fn copy_down(out: &mut Vec<u8>, buf: &[u8], fields: &[Field], own: &Own) {
    copy(out, buf, fields, own.names | DOWN_NEVER, !0, |field| {
        crosses_down(field.name.of(buf), field.known, field.listed)
    });
}

/// Appends fields but those that are listed or among `never`: those among `always`, and of the others
/// those that cross. Most lines already stand in `buf` just as they would be written: neighbours go
/// in one piece.
#[inline(always)]
fn copy(
    out: &mut Vec<u8>,
    buf: &[u8],
    fields: &[Field],
    never: u64,
    always: u64,
    crosses: impl Fn(&Field) -> bool,
) {
    let mut piece = Span::default();
    for field in fields {
        let bit = field.known.bit();
        if field.listed || bit & never != 0 || (bit & always == 0 && !crosses(field)) {
            continue;
        }
        let (name, value) = (field.name, field.value);
        let whole = Span { start: name.start, end: value.end.saturating_add(2) };
        let gap = Span { start: name.end, end: value.start };
        let end = Span { start: value.end, end: whole.end };
        let stands = gap.of(buf) == b": " && end.of(buf) == b"\r\n";
        if stands && piece.end == whole.start {
            piece.end = whole.end;
            continue;
        }
        if !piece.is_empty() {
            out.extend_from_slice(piece.of(buf));
        }
        if stands {
            piece = whole;
        } else {
            piece = Span::default();
            out.extend_from_slice(name.of(buf));
            out.extend_from_slice(b": ");
            out.extend_from_slice(value.of(buf));
            out.extend_from_slice(b"\r\n");
        }
    }
    out.extend_from_slice(piece.of(buf));
}

/// Appends the gateway's own fields.
pub fn copy_own(out: &mut Vec<u8>, own: &Own) {
    for (name, value) in own.lines.get(..own.len).unwrap_or_default() {
        let start = out.len();
        out.extend_from_slice(&name.text);
        out.truncate(start + name.len);
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }
}

/// Appends `text` in a form that is legal as a field value: every byte outside visible ASCII, and
/// `%` itself, becomes `%XX`.
pub fn escape_value(out: &mut Vec<u8>, text: &[u8]) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for &byte in text {
        if byte.is_ascii_graphic() && byte != b'%' {
            out.push(byte);
        } else {
            out.extend([b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
}

/// Whether these bytes are a token (RFC 9110, 5.6.2), as names and methods are.
pub fn is_token(bytes: &[u8]) -> bool {
    // Without a branch for each byte.
    let (eights, rest) = bytes.as_chunks::<8>();
    let whole = |eight: &[u8; 8]| eight.iter().fold(true, |whole, &b| whole & is_token_byte(b));
    !bytes.is_empty() && eights.iter().all(whole) && rest.iter().all(|&b| is_token_byte(b))
}

pub(super) const fn is_token_byte(byte: u8) -> bool {
    static TOKEN: [bool; 256] = byte_set(b"!#$%&'*+-.^_`|~");
    TOKEN[byte as usize]
}

/// Whether these bytes may stand as a field value: no control byte but tab, and no white space at
/// the ends (where it would not survive a hop).
pub fn is_value(bytes: &[u8]) -> bool {
    let blank = |byte: Option<&u8>| matches!(byte, Some(b' ' | b'\t'));
    let (eights, rest) = bytes.as_chunks();
    let sound = |bytes: &[u8]| bytes.iter().all(|&byte| is_value_byte(byte));
    eights.iter().all(|eight| control(u64::from_le_bytes(*eight)) == 0 || sound(eight))
        && sound(rest)
        && !blank(bytes.first())
        && !blank(bytes.last())
}

pub(super) const fn is_value_byte(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

/// A table of letters, digits and these others.
pub(super) const fn byte_set(others: &[u8]) -> [bool; 256] {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < 256 {
        // It is below 256.
        table[byte] = (byte as u8).is_ascii_alphanumeric();
        byte += 1;
    }
    let mut i = 0;
    while i < others.len() {
        table[others[i] as usize] = true;
        i += 1;
    }
    table
}

/// Whether `name` spells `lower` in any case. `lower` is made of lower-case letters, digits and
/// `-` alone.
fn same(name: &[u8], lower: &[u8]) -> bool {
    let differ = |(&a, &b): (&u8, &u8)| differ(a.into(), b.into()) != 0;
    name.len() == lower.len() && !name.iter().zip(lower).any(differ)
}

/// The bits that keep bytes from spelling lower-case letters, digits and `-`: case is bit 5 of the
/// bytes that have bit 6.
const fn differ(bytes: u64, lower: u64) -> u64 {
    (bytes ^ lower) & !((lower & 0x4040_4040_4040_4040) >> 1)
}

/// All bytes of a name of at most sixteen, some of them twice; of a longer one, those at its ends.
#[inline]
const fn ends(name: &[u8]) -> [u64; 2] {
    if let (Some(start), Some(end)) = (name.first_chunk(), name.last_chunk()) {
        return [u64::from_le_bytes(*start), u64::from_le_bytes(*end)];
    }
    if let (Some(start), Some(end)) = (name.first_chunk(), name.last_chunk()) {
        return [u32::from_le_bytes(*start) as u64, u32::from_le_bytes(*end) as u64];
    }
    match name {
        [first, .., last] => [*first as u64 | (name[1] as u64) << 8, *last as u64],
        [only] => [*only as u64, 0],
        [] => [0, 0],
    }
}

static ENDS: [[u64; 2]; ALL.len()] = {
    let mut all = [[0; 2]; ALL.len()];
    let mut i = 0;
    while i < ALL.len() {
        all[i] = ends(ALL[i].1.as_bytes());
        i += 1;
    }
    all
};

/// How many bytes stand before the first that `mark` sets bits in; all if it marks none. `mark` is
/// asked of eight bytes at once, of which the first is the lowest, and must be exact about the first
/// that it marks, not about those behind it.
#[inline(always)]
pub(super) fn find(bytes: &[u8], mark: impl Fn(u64) -> u64) -> usize {
    // What is asked for is mostly near: two steps without a loop.
    let mut looked = 0;
    if let Some(near) = bytes.first_chunk::<16>() {
        let near = u128::from_le_bytes(*near);
        // The lower half, then the upper.
        let (first, second) = (mark(near as u64), mark((near >> 64) as u64));
        if first != 0 {
            return place(first);
        }
        if second != 0 {
            return 8 + place(second);
        }
        looked = 2;
    }
    let (eights, rest) = bytes.as_chunks();
    for (index, eight) in eights.iter().enumerate().skip(looked) {
        let marks = mark(u64::from_le_bytes(*eight));
        if marks != 0 {
            return 8 * index + place(marks);
        }
    }
    // What stands behind the end is zeros, which may be marked.
    8 * eights.len() + rest.len().min(place(mark(word(rest))))
}

/// Up to eight bytes as one word, with zeros behind them.
fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// Marks control bytes, of which tab is one.
pub(super) const fn control(word: u64) -> u64 {
    below(word, b' ') | equals(word, 0x7f)
}

/// Where a name's number stands in [`SLOTS`]; `None` for the empty name. Three bytes and the
/// length tell all known names apart; the multipliers were searched for, and the compiler checks
/// that they still do.
const fn slot(name: &[u8]) -> Option<usize> {
    let len = name.len();
    if len == 0 {
        return None;
    }
    // Widening casts. Setting bit 5 makes letters lower-case and maps equal names equally.
    let key = (name[0] | 0x20) as usize * MIX[0]
        + (name[len - 1] | 0x20) as usize * MIX[1]
        + (name[len / 2] | 0x20) as usize * MIX[2]
        + len * MIX[3];
    Some(key % SLOTS_LEN)
}

const SLOTS_LEN: usize = 256;
const MIX: [usize; 4] = [175, 34, 40, 20];

static SLOTS: [u8; SLOTS_LEN] = {
    let mut slots = [u8::MAX; SLOTS_LEN];
    let mut i = 0;
    while i < ALL.len() {
        if let Some(at) = slot(ALL[i].1.as_bytes()) {
            assert!(slots[at] == u8::MAX, "two known names share a slot: search new multipliers");
            // There are fewer than 64 names.
            slots[at] = i as u8;
        }
        i += 1;
    }
    slots
};

#[cfg(test)]
mod tests {
    //! Goal: each name is found in any case and nothing else is; each rule of crossing holds for
    //! each name it was made for. Method: every known name and every near miss of it.
    use super::*;
    use crate::pure::lanes::high;

    #[test]
    fn every_name_is_found_in_any_case_and_no_near_miss_is() {
        for &(known, name) in ALL {
            assert_eq!(Known::of(name.as_bytes()), known);
            assert_eq!(Known::of(name.to_ascii_uppercase().as_bytes()), known);
            for at in 0..name.len() {
                for byte in 0..=255u8 {
                    let mut near = name.as_bytes().to_vec();
                    near[at] = byte;
                    let spelt = near.eq_ignore_ascii_case(name.as_bytes());
                    let naive = ALL.iter().find(|(_, n)| near.eq_ignore_ascii_case(n.as_bytes()));
                    assert_eq!(Known::of(&near), naive.map_or(Known::Other, |(k, _)| *k));
                    assert!(!spelt || Known::of(&near) == known);
                }
            }
            assert_ne!(Known::of(&name.as_bytes()[1..]), known);
            assert_ne!(Known::of(format!("{name}x").as_bytes()), known);
        }
        assert_eq!(Known::of(b""), Known::Other);
    }

    fn up(name: &str) -> bool {
        crosses_up(name.as_bytes(), Known::of(name.as_bytes()), false, &Forward::default())
    }

    fn down(name: &str) -> bool {
        crosses_down(name.as_bytes(), Known::of(name.as_bytes()), false)
    }

    #[test]
    fn a_request_takes_along_what_is_listed_and_nothing_else() {
        for name in [
            "Accept",
            "Content-Type",
            "content-encoding",
            "User-Agent",
            "traceparent",
            "baggage",
            "B3",
            "X-B3-TraceId",
            "Idempotency-Key",
            "anthropic-version",
            "Anthropic-Beta",
            "OpenAI-Beta",
            "X-Stainless-Lang",
        ] {
            assert!(up(name), "{name}");
        }
        for name in [
            "Host",
            "Authorization",
            "X-Api-Key",
            "Api-Key",
            "X-Goog-Api-Key",
            "X-Goog-User-Project",
            "OpenAI-Organization",
            "OpenAI-Project",
            "Cookie",
            "Connection",
            "Keep-Alive",
            "TE",
            "Trailer",
            "Transfer-Encoding",
            "Upgrade",
            "HTTP2-Settings",
            "Proxy",
            "Proxy-Authorization",
            "Proxy-Connection",
            "Proxy-Status",
            "Content-Length",
            "Content_Length",
            "Transfer_Encoding",
            "Expect",
            "Accept-Encoding",
            "X-Request-Id",
            "X-Forwarded-For",
            "X-Forwarded-Host",
            "Forwarded",
            "X-Prefiller-Url",
            "X-Portkey-Custom-Host",
            "X-Target-Url",
            "X-Trace-Me",
            "X-Forebay-Attempt",
            "#Transfer-Encoding",
            "X-Stainless",
            "",
        ] {
            assert!(!up(name), "{name}");
        }
    }

    #[test]
    fn a_pool_may_forward_more_but_never_what_the_gateway_makes() {
        let forward = Forward::parse(["X-Trace-Me", "x-team-*"]).unwrap();
        let takes =
            |name: &str| crosses_up(name.as_bytes(), Known::of(name.as_bytes()), false, &forward);
        assert!(takes("x-trace-me") && takes("X-TEAM-Red"));
        assert!(
            !takes("x-trace-me2")
                && !takes("x-team_x")
                && !takes("x-team-a_b")
                && !takes("authorization")
        );
        assert!(!crosses_up(b"x-trace-me", Known::Other, true, &forward), "listed in Connection");
        let wide = Forward::parse(["auth*", "prox*", "host*", "cont*"]).unwrap();
        for name in ["authorization", "proxy-authorization", "proxy", "host", "content-length"] {
            assert!(
                !crosses_up(name.as_bytes(), Known::of(name.as_bytes()), false, &wide),
                "{name}"
            );
        }
        for bad in
            ["Authorization", "host", "x_y", "a b", "", "*", "x-*", "X-Forebay-Route", "Connection"]
        {
            assert!(Forward::parse([bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_answer_loses_what_belongs_to_the_hop_or_to_us() {
        for name in [
            "Content-Type",
            "Content-Encoding",
            "Server",
            "Date",
            "Set-Cookie",
            "Retry-After",
            "Cache-Control",
            "X-Up-Keep",
            "X-RateLimit-Limit-Requests",
            "OpenAI-Processing-Ms",
            "Via",
            "X-Accelerated",
        ] {
            assert!(down(name), "{name}");
        }
        for name in [
            "Connection",
            "Keep-Alive",
            "Proxy-Authenticate",
            "Transfer-Encoding",
            "Content-Length",
            "Trailer",
            "Upgrade",
            "TE",
            "X-Request-Id",
            "X-Forebay-Backend",
            "Location",
            "Alt-Svc",
            "X-Accel-Redirect",
            "X-Accel-Buffering",
            "OpenAI-Organization",
            "WWW-Authenticate",
        ] {
            assert!(!down(name), "{name}");
        }
        assert!(!crosses_down(b"X-Up-Hop", Known::Other, true));
    }

    #[test]
    fn own_fields_replace_and_never_inject() {
        let buf =
            b"User-Agent: a\r\nAccept: b\r\nRange:c\r\nB3:  d\r\nBaggage: e \r\nTracestate: f\n";
        let field = |name: &str, value: u8| {
            let start = buf.windows(name.len()).position(|part| part == name.as_bytes()).unwrap();
            let name = Span::new(start, start + name.len());
            let at = name.end() + buf[name.end()..].iter().position(|&byte| byte == value).unwrap();
            Field {
                name,
                value: Span::new(at, at + 1),
                known: Known::of(name.of(buf)),
                listed: false,
            }
        };
        let fields = [
            field("User-Agent", b'a'),
            field("Accept", b'b'),
            field("Range", b'c'),
            field("B3", b'd'),
            field("Baggage", b'e'),
            field("Tracestate", b'f'),
        ];
        static NAMES: [Name; 3] =
            [Name::new("accept"), Name::new("x-request-id"), Name::new("traceparent")];
        let mut own = Own::default();
        for (name, value) in NAMES.iter().zip([&b"c"[..], b"1\r\nx-b: 2", b" 3"]) {
            own.quote(name, value);
        }
        let mut out = Vec::new();
        copy_up(&mut out, buf, &fields, &Forward::default(), &own);
        copy_own(&mut out, &own);
        let wanted =
            "User-Agent: a\r\nRange: c\r\nB3: d\r\nBaggage: e\r\nTracestate: f\r\naccept: c\r\n";
        assert_eq!(String::from_utf8(out).unwrap(), wanted);
    }

    #[test]
    fn bytes_in_blocks_are_judged_as_one_by_one() {
        // Each byte at each place of texts around a block's length, once alone and once behind another.
        for len in 1..=19 {
            for at in 0..len {
                for byte in 0..=255u8 {
                    let mut text = vec![b'a'; len];
                    text[at] = byte;
                    for before in [b'a', b'\r', b':', 0x80] {
                        text[at.saturating_sub(3)] = before;
                        text[at] = byte;
                        let first = |hit: &dyn Fn(u8) -> bool| {
                            text.iter().position(|&byte| hit(byte)).unwrap_or(len)
                        };
                        assert_eq!(find(&text, control), first(&|byte| byte < 32 || byte == 127));
                        assert_eq!(find(&text, |word| equals(word, b':')), first(&|b| b == b':'));
                        assert_eq!(find(&text, |word| below(word, b'!')), first(&|b| b < b'!'));
                        assert_eq!(find(&text, high), first(&|b| b >= 128));
                        let token =
                            |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
                        assert_eq!(is_token(&text), text.iter().all(|&b| token(b)));
                        let legal = |b: u8| b == b'\t' || b >= b' ' && b != 127;
                        let blank = |b: u8| b == b' ' || b == b'\t';
                        let wanted = text.iter().all(|&b| legal(b))
                            && !blank(text[0])
                            && !blank(text[len - 1]);
                        assert_eq!(is_value(&text), wanted, "{text:?}");
                    }
                }
            }
        }
        assert!(!is_token(b"") && is_value(b""));
    }

    #[test]
    fn escaped_text_is_always_a_legal_value() {
        for byte in 0..=255u8 {
            let mut out = Vec::new();
            escape_value(&mut out, &[byte, b'x']);
            assert!(is_value(&out), "{byte}");
        }
        let mut out = Vec::new();
        escape_value(&mut out, "a b模%".as_bytes());
        assert_eq!(out, b"a%20b%E6%A8%A1%25");
    }

    #[test]
    fn span_of_another_buffer_is_empty() {
        assert_eq!(Span::new(5, 9).of(b"abc"), b"");
        assert_eq!(Span::new(1, 3).of(b"abc"), b"bc");
        assert!(Span::default().is_empty());
    }
}
