//! One reader for each kind of value that is written as text: durations, sizes, shares, money,
//! addresses, URLs, patterns. Each says what is wrong in words for the operator.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::{Host, IpNet, Pattern};
use crate::pure::h1::BasePath;
use crate::pure::units::NanoUsd;

/// What is wrong with a value, and what would be right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub message: String,
    pub hint: Option<String>,
}

/// `{shown}` in the message of a [`Wrong`] is replaced by the value as the file writes it, which
/// may be `${VAR}` where the value itself must not be said.
const SHOWN: &str = "{shown}";

impl Wrong {
    fn new(message: &str, hint: &str) -> Wrong {
        let hint = (!hint.is_empty()).then(|| hint.to_owned());
        Wrong { message: message.to_owned(), hint }
    }

    pub(super) fn message_for(&self, shown: &str) -> String {
        self.message.replace(SHOWN, shown)
    }
}

/// The longest duration that means anything here. Beyond it a slip of units is more likely.
const DURATION_MAX: Duration = Duration::from_hours(366 * 24);

/// `1500ms`, `30s`, `10m`, `2h`, `1d`, `1m30s`, `0.5s`.
pub(super) fn duration(text: &str) -> Result<Duration, Wrong> {
    const HINT: &str = "write it as `1500ms`, `30s`, `10m`, `2h` or `1d`";
    if text.bytes().all(|b| b.is_ascii_digit() || b == b'.') && !text.is_empty() {
        let hint = format!("write `{text}s` for seconds or `{text}ms` for milliseconds");
        return Err(Wrong {
            message: format!("{SHOWN} is a number without a unit, not a duration"),
            hint: Some(hint),
        });
    }
    let wrong = || Wrong::new("{shown} is not a duration", HINT);
    let mut rest = text;
    let mut nanos: u128 = 0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, more) = rest.split_at(digits);
        let letters = more.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(more.len());
        let (unit, more) = more.split_at(letters);
        let scale: u64 = match unit {
            "ns" => 1,
            "us" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" => 86_400_000_000_000,
            _ => return Err(wrong()),
        };
        nanos = nanos.saturating_add(scaled(number, scale).ok_or_else(wrong)?);
        rest = more;
    }
    if text.is_empty() {
        return Err(wrong());
    }
    match u64::try_from(nanos).map(Duration::from_nanos) {
        Ok(span) if span <= DURATION_MAX => Ok(span),
        _ => Err(Wrong::new("{shown} is longer than a year", "the longest duration is 366d")),
    }
}

/// Bytes: `65536`, `64KiB`, `8MB`, `2GiB`.
pub(super) fn size(text: &str) -> Result<u64, Wrong> {
    let wrong = || {
        Wrong::new("{shown} is not a size", "write bytes as a number, or `64KiB`, `8MB`, `2GiB`")
    };
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_');
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let scale: u64 = match unit.trim_start() {
        "" | "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return Err(wrong()),
    };
    let bytes = scaled(&number.replace('_', ""), scale).ok_or_else(wrong)?;
    u64::try_from(bytes)
        .ok()
        .filter(|&bytes| bytes <= 1 << 50)
        .ok_or_else(|| Wrong::new("{shown} is more than a pebibyte", ""))
}

/// Bytes per second: `1KiB/s`; `0` is none.
pub(super) fn rate(text: &str) -> Result<u64, Wrong> {
    const HINT: &str = "write it as `1KiB/s`, or `0` for none";
    match text.strip_suffix("/s") {
        Some(bytes) => size(bytes).map_err(|_| Wrong::new("{shown} is not a rate", HINT)),
        None if text == "0" => Ok(0),
        None => Err(Wrong::new("{shown} is not a rate", HINT)),
    }
}

/// A share of a whole, 0 to 1: `20%`, `99.95%`, `0.2`.
pub(super) fn ratio(text: &str) -> Result<f64, Wrong> {
    let wrong = || Wrong::new("{shown} is not a share", "write it as `20%` or `0.2`");
    let (digits, per_cent) = match text.strip_suffix('%') {
        Some(digits) => (digits.trim_end(), true),
        None => (text, false),
    };
    if !digits.bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b'-') {
        return Err(wrong());
    }
    let number = digits.parse::<f64>().map_err(|_| wrong())?;
    let share = if per_cent { number / 100.0 } else { number };
    if (0.0..=1.0).contains(&share) {
        return Ok(share);
    }
    let hint = if !per_cent && (1.0..=100.0).contains(&share) {
        format!("write `{digits}%` for per cent")
    } else {
        "a share lies between 0% and 100%".to_owned()
    };
    Err(Wrong { message: format!("{SHOWN} is out of range"), hint: Some(hint) })
}

/// US dollars to the billionth, exactly: no float on the way.
pub(super) fn usd(text: &str) -> Result<NanoUsd, Wrong> {
    const HINT: &str = "write dollars as `0.50`, with at most nine decimals";
    if text.starts_with('-') {
        return Err(Wrong::new("{shown} is negative", HINT));
    }
    let wrong = || Wrong::new("{shown} is not an amount of dollars", HINT);
    let nanos = scaled(&text.replace('_', ""), 1_000_000_000).ok_or_else(wrong)?;
    i64::try_from(nanos).map(NanoUsd).map_err(|_| Wrong::new("{shown} is too much", HINT))
}

/// A whole number, `_` between digits allowed.
pub(super) fn integer(text: &str) -> Result<u64, Wrong> {
    let wrong =
        || Wrong::new("{shown} is not a whole number", "write digits only, as in `100_000`");
    let digits = text.replace('_', "");
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) || text.starts_with('_') {
        return Err(wrong());
    }
    digits.parse().map_err(|_| wrong())
}

/// A plain number above zero.
pub(super) fn factor(text: &str) -> Result<f64, Wrong> {
    let number = text.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    text.parse::<f64>()
        .ok()
        .filter(|value| number && value.is_finite() && *value > 0.0)
        .ok_or_else(|| Wrong::new("{shown} is not a number above zero", "write it as `1.2`"))
}

/// `number × scale` exactly; `None` where that is no whole number or the text is no decimal.
fn scaled(number: &str, scale: u64) -> Option<u128> {
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) => (whole, fraction),
        None => (number, "0"),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || whole.len() > 18 || fraction.len() > 18 {
        return None;
    }
    let scale = u128::from(scale);
    // At most 18 digits each, so neither product passes 10^18 × 10^14.
    let whole = whole.parse::<u128>().ok()? * scale;
    let parts = fraction.parse::<u128>().ok()? * scale;
    let unit = 10u128.pow(u32::try_from(fraction.len()).ok()?);
    (parts % unit == 0).then_some(whole + parts / unit)
}

/// An address to listen on: `0.0.0.0:8080`, `[::]:8080`.
pub(super) fn socket(text: &str) -> Result<SocketAddr, Wrong> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let port = text.rsplit_once(':').and_then(|(host, port)| {
        let port = port.parse::<u16>().ok()?;
        Some((host, port))
    });
    let hint = match port {
        Some(("" | "*", port)) => format!("write `0.0.0.0:{port}` for every address"),
        Some(("localhost", port)) => format!("write `127.0.0.1:{port}`"),
        Some((host, port)) if host.contains(':') && host.parse::<IpAddr>().is_ok() => {
            format!("write `[{host}]:{port}`")
        }
        Some(_) => "an address to listen on is an IP address, not a name".to_owned(),
        None if text.parse::<IpAddr>().is_ok() => "add a port, as in `0.0.0.0:8080`".to_owned(),
        None => match text.parse::<u16>() {
            Ok(port) => format!("write `0.0.0.0:{port}` for every address"),
            Err(_) => "write it as `0.0.0.0:8080`; the port is at most 65535".to_owned(),
        },
    };
    Err(Wrong { message: format!("{SHOWN} is not an address with a port"), hint: Some(hint) })
}

/// `10.0.0.0/8`, or one address.
pub(super) fn net(text: &str) -> Result<IpNet, Wrong> {
    let wrong =
        || Wrong::new("{shown} is not an address range", "write it as `10.0.0.0/8` or `10.1.2.3`");
    let (base, bits) = match text.split_once('/') {
        Some((base, bits)) => (base, Some(bits)),
        None => (text, None),
    };
    let base: IpAddr = base.parse().map_err(|_| wrong())?;
    let most = if base.is_ipv4() { 32 } else { 128 };
    let bits = match bits {
        Some(bits) if bits.bytes().all(|b| b.is_ascii_digit()) => {
            bits.parse::<u8>().ok().filter(|&bits| bits <= most).ok_or_else(wrong)?
        }
        Some(_) => return Err(wrong()),
        None => most,
    };
    Ok(IpNet { base, bits })
}

/// A CPU list: `2-15`, `0,2,4-7`.
pub(super) fn cpus(text: &str) -> Result<Vec<usize>, Wrong> {
    // The kernel's own bound (CONFIG_NR_CPUS of the largest distribution kernels).
    const CPU_MAX: usize = 8191;
    let wrong = || Wrong::new("{shown} is not a list of CPUs", "write it as `2-15` or `0,2,4-7`");
    let number = |text: &str| -> Option<usize> {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        text.parse().ok().filter(|&cpu| digits && cpu <= CPU_MAX)
    };
    let mut cpus = Vec::new();
    for part in text.split(',').map(str::trim) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to) = (number(from).ok_or_else(wrong)?, number(to).ok_or_else(wrong)?);
        if from > to {
            return Err(wrong());
        }
        for cpu in from..=to {
            if cpus.contains(&cpu) {
                let hint = "each CPU carries one shard";
                return Err(Wrong::new("{shown} names a CPU twice", hint));
            }
            cpus.push(cpu);
        }
    }
    Ok(cpus)
}

/// SHA-256 in hexadecimal.
pub(super) fn sha256(text: &str) -> Result<[u8; 32], Wrong> {
    const HINT: &str = "write the 64 hex digits that `printf %s \"$KEY\" | sha256sum` prints";
    let wrong = |what: &str| Wrong::new(what, HINT);
    if text.starts_with("sk-") {
        return Err(wrong("this is a key itself, not its SHA-256"));
    }
    let bytes = text.as_bytes();
    if bytes.len() != 64 {
        let count = text.chars().count();
        return Err(wrong(&format!("a SHA-256 has 64 hex digits, this has {count}")));
    }
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(bytes.chunks_exact(2)) {
        let nibble = |digit: u8| (digit as char).to_digit(16);
        match (nibble(pair[0]), nibble(pair[1])) {
            // Two hex digits fit.
            (Some(high), Some(low)) => *byte = u8::try_from(high << 4 | low).unwrap_or(0),
            _ => return Err(wrong("a SHA-256 is written in hex digits only")),
        }
    }
    Ok(digest)
}

/// A field name by RFC 9110 5.6.2 (a token), in lowercase.
pub(super) fn header_name(text: &str) -> Result<Box<str>, Wrong> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if text.is_empty() || text.len() > 128 || !text.bytes().all(token) {
        let hint = "letters, digits and `-`, as in `X-Session-ID`";
        return Err(Wrong::new("{shown} is not the name of a header", hint));
    }
    Ok(text.to_ascii_lowercase().into())
}

/// A name, or a name with `*` and `?`.
pub(super) fn pattern(text: &str) -> Result<Pattern, Wrong> {
    // Matching is at worst the product of pattern and name.
    const LENGTH_MAX: usize = 256;
    if text.len() > LENGTH_MAX {
        let message = format!("a pattern has at most {LENGTH_MAX} bytes");
        return Err(Wrong { message, hint: None });
    }
    if text.chars().any(char::is_control) {
        return Err(Wrong::new("{shown} holds a control character", ""));
    }
    if !text.contains(['*', '?']) {
        return Ok(Pattern::Exact(text.into()));
    }
    if text.contains(['[', ']', '{', '}', '\\', '|']) {
        let hint =
            "only `*` (anything) and `?` (one character) are special; list alternatives apart";
        return Err(Wrong::new("{shown} is not a pattern that is understood", hint));
    }
    let mut glob = String::with_capacity(text.len());
    for c in text.chars() {
        // `**` means what `*` means.
        if c != '*' || !glob.ends_with('*') {
            glob.push(c);
        }
    }
    Ok(Pattern::Glob(glob.into()))
}

/// Where a backend is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub tls: bool,
    pub host: Host,
    pub port: u16,
    pub authority: Box<str>,
    pub base_path: BasePath,
}

/// `http://host[:port][/base][/v1][/]`, strictly.
pub(super) fn url(text: &str) -> Result<Target, Wrong> {
    const HINT: &str = "write it as `http://10.0.0.12:8000` or `http://host:8000/base/v1`";
    let wrong = |what: &str| Wrong::new(what, HINT);
    if text.contains('@') {
        let hint = "put the credential into `api_key: { file: ... }`";
        // First of all checks, since the others would show the credential again.
        return Err(Wrong::new("a backend's URL holds no user, no password, no `@`", hint));
    }
    let (scheme, rest) =
        text.split_once("://").ok_or_else(|| wrong("{shown} has no scheme such as `http://`"))?;
    let tls = match scheme.to_ascii_lowercase().as_str() {
        "http" => false,
        "https" => true,
        _ => return Err(wrong("{shown} is neither `http://` nor `https://`")),
    };
    if rest.contains(['?', '#']) {
        return Err(wrong("{shown} has a query or a fragment, which a backend has not"));
    }
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) =
                rest.split_once(']').ok_or_else(|| wrong("{shown} lacks a closing `]`"))?;
            let ip = host.parse().map_err(|_| wrong("{shown} holds no valid IPv6 address"))?;
            (Host::Ip(IpAddr::V6(ip)), port)
        }
        None => {
            let (host, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
            (host_of(host).ok_or_else(|| wrong("{shown} has no valid host"))?, port)
        }
    };
    let port = match port {
        "" if tls => 443,
        "" => 80,
        _ => port
            .strip_prefix(':')
            .filter(|digits| digits.len() <= 5 && digits.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .filter(|&port| port != 0)
            .ok_or_else(|| wrong("{shown} has no valid port (1 to 65535)"))?,
    };
    let base_path = BasePath::parse(path).map_err(|reason| {
        Wrong::new(&format!("the path of {SHOWN} is not usable: {reason}"), HINT)
    })?;
    Ok(Target { tls, host, port, authority: authority.into(), base_path })
}

/// Where something is fetched from: `https://host[:port][/path][?query]`.
pub(super) fn web_url(text: &str) -> Result<Box<str>, Wrong> {
    const HINT: &str = "write it as `https://sso.example.com/keys`";
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.contains('@') {
        return Err(Wrong::new("this URL holds a user or a password", HINT));
    }
    let plain = text.bytes().all(|b| b.is_ascii_graphic()) && !path.contains(['#', '\\', '"', '<']);
    match url(&format!("{scheme}://{authority}")) {
        Ok(_) if plain => Ok(text.into()),
        _ => Err(Wrong::new("{shown} is not a URL that can be asked", HINT)),
    }
}

/// Whether a URL names this machine, as `http://127.0.0.1:8080/keys` does.
pub(super) fn is_loopback(text: &str) -> bool {
    let rest = text.split_once("://").map_or(text, |(_, rest)| rest);
    let authority = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len())).0;
    match url(&format!("http://{authority}")) {
        Ok(Target { host: Host::Ip(ip), .. }) => ip.is_loopback(),
        Ok(Target { host: Host::Name(name), .. }) => &*name == "localhost",
        Err(_) => false,
    }
}

/// An IPv4 address in the one usual form, or a host name; `None` for what is neither.
fn host_of(host: &str) -> Option<Host> {
    if let Ok(ip) = host.parse::<Ipv4Addr>() {
        return Some(Host::Ip(ip.into()));
    }
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    let labels = host.strip_suffix('.').unwrap_or(host);
    // A last label of digits (`10.0.0`, `0x7f.1`) is what resolvers read as an address (RFC 3696 2).
    let numeric = labels.rsplit('.').next()?.bytes().next()?.is_ascii_digit()
        && labels.rsplit('.').next()?.bytes().all(|b| b.is_ascii_hexdigit() || b == b'x');
    (host.len() <= 253 && labels.split('.').all(label) && !numeric)
        .then(|| Host::Name(host.to_ascii_lowercase().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_add_up() {
        let cases = [
            ("1500ms", 1_500_000_000),
            ("30s", 30_000_000_000),
            ("10m", 600_000_000_000),
            ("2h", 7_200_000_000_000),
            ("1d", 86_400_000_000_000),
            ("1m30s", 90_000_000_000),
            ("0.5s", 500_000_000),
            ("0s", 0),
            ("366d", 366 * 86_400_000_000_000),
        ];
        for (text, nanos) in cases {
            assert_eq!(duration(text), Ok(Duration::from_nanos(nanos)), "{text}");
        }
        for text in [
            "", "s", "5", "5.5", "-5s", "5 s", "5x", "5S", "1m30", "1.s", ".5s", "1..5s", "367d",
            "∞s",
        ] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert_eq!(
            duration("300").unwrap_err().hint.unwrap(),
            "write `300s` for seconds or `300ms` for milliseconds"
        );
        assert!(
            duration(&"9".repeat(40)).is_err()
                && duration(&format!("{}d", "9".repeat(18))).is_err()
        );
    }

    #[test]
    fn sizes_are_plain_bytes_or_have_a_unit() {
        let cases = [
            ("0", 0),
            ("65536", 65_536),
            ("64KiB", 65_536),
            ("8MB", 8_000_000),
            ("1.5KiB", 1_536),
            ("2GiB", 2 << 30),
            ("1_000", 1_000),
            ("7B", 7),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "KiB", "-1", "64K", "64kib", "1.0001KiB", "9999999TiB", "0x10", "1e3"] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!((rate("1KiB/s"), rate("0")), (Ok(1_024), Ok(0)));
        assert!(rate("1024").is_err() && rate("1KiB").is_err() && rate("/s").is_err());
    }

    #[test]
    fn shares_and_money_are_exact_and_bounded() {
        assert_eq!(
            (ratio("20%"), ratio("0.2"), ratio("0"), ratio("1")),
            (Ok(0.2), Ok(0.2), Ok(0.0), Ok(1.0))
        );
        assert_eq!(ratio("99.95%"), Ok(0.9995));
        for text in ["", "%", "101%", "-1%", "1.01", "20 percent", "nan", "inf", "1e-1"] {
            assert!(ratio(text).is_err(), "{text}");
        }
        assert_eq!(ratio("20").unwrap_err().hint.unwrap(), "write `20%` for per cent");
        assert_eq!(
            (usd("0.10"), usd("5000")),
            (Ok(NanoUsd(100_000_000)), Ok(NanoUsd(5_000_000_000_000)))
        );
        assert_eq!(usd("0.000000001"), Ok(NanoUsd(1)));
        for text in ["", "-1", "1e3", "0.0000000001", "9999999999", "$5", "1,000"] {
            assert!(usd(text).is_err(), "{text}");
        }
        assert_eq!(integer("100_000"), Ok(100_000));
        for text in ["", "_", "_1", "1.0", "-1", "0x1", "1e3", "99999999999999999999"] {
            assert!(integer(text).is_err(), "{text}");
        }
    }

    /// What a backend is sent for `/v1/models`.
    fn joined(target: &Target) -> String {
        let mut out = Vec::new();
        target.base_path.join(b"/v1/models", b"").unwrap().write(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn urls_with_or_without_v1_name_the_same_backend() {
        for tail in ["", "/", "/v1", "/v1/", "//"] {
            let target = url(&format!("http://10.0.0.12:8000{tail}")).unwrap();
            assert_eq!((target.port, &*target.authority), (8000, "10.0.0.12:8000"));
            assert_eq!(joined(&target), "/v1/models", "{tail}");
            let target = url(&format!("HTTP://Rack-1.example/base{tail}")).unwrap();
            assert_eq!((joined(&target).as_str(), target.port), ("/base/v1/models", 80), "{tail}");
            assert_eq!(target.host, Host::Name("rack-1.example".into()));
        }
        assert_eq!(joined(&url("http://h/api/v3").unwrap()), "/api/v3/models");
        assert_eq!(url("http://[::1]:9/").unwrap().host, Host::Ip("::1".parse().unwrap()));
        assert!(url("https://h").unwrap().tls && url("https://h").unwrap().port == 443);
        let bad = [
            "",
            "h:80",
            "ftp://h",
            "http://",
            "http:///v1",
            "http://h:0",
            "http://h:65536",
            "http://h:+1",
            "http://h:",
            "http://u:p@h",
            "http://h/?q",
            "http://h/#f",
            "http://h/a//b",
            "http://h/../b",
            "http://h/%2e%2e",
            "http://h\\x",
            "http://[::1",
            "http://[v1.x]",
            "http://a b",
            "http://10.0.0",
            "http://1.2.3.4.5",
            "http://0x7f.1",
            "http://-h",
            "http://h..x",
            "http://é",
            "http://[::1]x",
            "http://h/a b",
            "http://127.0.0.01",
        ];
        for text in bad {
            assert!(url(text).is_err(), "{text}");
        }
        assert!(!url("http://user:hunter2@h").unwrap_err().message.contains(SHOWN));
    }

    #[test]
    fn cpus_nets_sockets_digests_names() {
        assert_eq!(cpus("2-4"), Ok(vec![2, 3, 4]));
        assert_eq!(cpus("0, 5-6"), Ok(vec![0, 5, 6]));
        for text in ["", "a", "3-1", "1,1", "1-", "-1", "0-99999999", "1,,2"] {
            assert!(cpus(text).is_err(), "{text}");
        }
        assert_eq!(net("10.0.0.0/8").unwrap().bits, 8);
        assert_eq!(net("::1").unwrap().bits, 128);
        for text in ["", "10/8", "10.0.0.0/33", "10.0.0.0/+1", "10.0.0.0/", "::/129"] {
            assert!(net(text).is_err(), "{text}");
        }
        for text in [
            "8080",
            ":8080",
            "*:8080",
            "localhost:80",
            "::1:80",
            "h:80",
            "1.2.3.4",
            "1.2.3.4:65536",
            "",
        ] {
            assert!(socket(text).is_err(), "{text}");
        }
        assert_eq!(
            socket(":8080").unwrap_err().hint.unwrap(),
            "write `0.0.0.0:8080` for every address"
        );
        assert_eq!(sha256(&"Ff".repeat(32)), Ok([255; 32]));
        for text in ["", "…", &"0".repeat(63), &"g".repeat(64), &"é".repeat(32)] {
            assert!(sha256(text).is_err(), "{text}");
        }
        assert_eq!(header_name("X-Session-ID").unwrap().as_ref(), "x-session-id");
        assert!(
            header_name("X Y").is_err() && header_name("").is_err() && header_name("é").is_err()
        );
    }
}
