//! Goal: the walker takes exactly RFC 8259, and what it reports does not depend on the cuts.
//! Method: a table written from the RFC's grammar; two other parsers as oracles on mutated
//! documents; every split of many documents.

use super::*;
use crate::pure::units::Rng;

/// Everything that is reported, in order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Log(Vec<Event>);

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Key(usize, Option<Vec<u8>>, Span),
    Begin(usize, Kind, usize),
    End(usize, Kind, Span),
    Text(Span),
}

impl Watch for Log {
    const DEPTH: usize = WATCH_DEPTH_MAX;
    const TEXT: bool = true;

    fn key(&mut self, depth: usize, key: Option<&[u8]>, span: Span) {
        self.0.push(Event::Key(depth, key.map(<[u8]>::to_vec), span));
    }

    fn begin(&mut self, depth: usize, kind: Kind, start: usize) {
        self.0.push(Event::Begin(depth, kind, start));
    }

    fn end(&mut self, depth: usize, kind: Kind, span: Span) {
        self.0.push(Event::End(depth, kind, span));
    }

    fn text(&mut self, span: Span) {
        self.0.push(Event::Text(span));
    }
}

fn walk<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> (Log, Result<(), Fault>) {
    let (mut walker, mut log) = (Walker::default(), Log::default());
    for piece in pieces {
        if let Err(fault) = walker.push(piece, &mut log) {
            assert_eq!(walker.finish(&mut log), Err(fault), "a fault is final");
            return (log, Err(fault));
        }
    }
    let result = walker.finish(&mut log);
    (log, result)
}

fn strict(document: &[u8]) -> (Log, Result<(), Fault>) {
    walk([document])
}

/// Splits at every place, and everywhere at once.
fn check_every_split(document: &[u8]) {
    let (log, result) = walk([document]);
    for cut in 0..=document.len() {
        let (head, tail) = document.split_at(cut);
        let (cut_log, cut_result) = walk([head, tail]);
        check_same(document, cut, (&log, result), (&cut_log, cut_result));
    }
    let (cut_log, cut_result) = walk(document.chunks(1));
    check_same(document, usize::MAX, (&log, result), (&cut_log, cut_result));
}

fn check_same(
    document: &[u8],
    cut: usize,
    whole: (&Log, Result<(), Fault>),
    split: (&Log, Result<(), Fault>),
) {
    let shown = String::from_utf8_lossy(document);
    assert_eq!(whole.1.is_ok(), split.1.is_ok(), "{shown} cut at {cut}");
    // UTF-8 is checked a push at a time, before the grammar, so with two faults in a document the
    // cuts decide which is met first.
    let utf8 = |result: Result<(), Fault>| result.is_err_and(|fault| fault.cause == Cause::Utf8);
    if !utf8(whole.1) && !utf8(split.1) {
        assert_eq!(whole, split, "{shown} cut at {cut}");
    }
}

const GOOD: &[&str] = &[
    "0",
    "-0",
    "7",
    "-7",
    "10",
    "1234567890",
    "0.0",
    "-0.5",
    "1.25",
    "10.000001",
    "1e5",
    "1E5",
    "1e+5",
    "1e-5",
    "1.5e10",
    "-1.5E-10",
    "0e0",
    "0E+9",
    "1e400",
    "-1e400",
    "1e-400",
    "18446744073709551615",
    "18446744073709551616",
    "123456789012345678901234567890123456789",
    "0.1234567890123456789012345678901234567890",
    "true",
    "false",
    "null",
    r#""""#,
    r#""a""#,
    r#""\"""#,
    r#""\\""#,
    r#""\/""#,
    r#""\b\f\n\r\t""#,
    r#""\u0000""#,
    r#""\u00e9\u00E9""#,
    r#""\ud83d\ude00""#,
    r#""\ud800""#,
    r#""\udc00""#,
    r#""\udc00\ud800""#,
    r#""\ud800x""#,
    r#""\ud800\n""#,
    r#""\uFFFF\ufffe""#,
    r#""\\u0041""#,
    r#""\\\"""#,
    "\"\u{7f}\"",
    "\"\u{80}\u{7ff}\u{800}\u{ffff}\u{10000}\u{10ffff}\"",
    "\"\u{2028}\u{2029}\"",
    "\"é模型😀\"",
    "\"\u{feff}\"",
    r#""/*no comment*/""#,
    r#""{}[]:,""#,
    r#""0123456789abcdef0123456789abcdef""#,
    "[]",
    "[ ]",
    "[\n]",
    "[1]",
    "[1,2]",
    "[ 1 , 2 ]",
    "[[]]",
    "[[],[]]",
    "[{}]",
    "[null,true]",
    "[[[[[[[[[[[[]]]]]]]]]]]]",
    r#"["",""]"#,
    "[0]",
    "[-0,0.0]",
    "[1e1,1E1]",
    "{}",
    "{ }",
    "{\t}",
    r#"{"a":1}"#,
    r#"{ "a" : 1 }"#,
    r#"{"a":1,"b":2}"#,
    r#"{"":0}"#,
    r#"{"a":{}}"#,
    r#"{"a":[]}"#,
    r#"{"a":{"b":{"c":[{"d":null}]}}}"#,
    r#"{"a":1,"a":2}"#,
    r#"{"\u0061":1}"#,
    r#"{"a\"b":1}"#,
    r#"{"\ud800":1}"#,
    "{\"模\":1}",
    " 1 ",
    "\r\n\t 1\r\n\t ",
    " [] ",
    "\n{}\n",
    "[1\n,2\r]",
    "{\"a\"\n:\n1\n,\n\"b\"\n:\n2}",
    "\"\u{fffd}\"",
];

const BAD: &[(&str, Cause, usize)] = &[
    ("", Cause::Empty, 0),
    (" \n", Cause::Empty, 2),
    ("\u{feff}1", Cause::ByteOrderMark, 0),
    ("\u{feff}{}", Cause::ByteOrderMark, 0),
    (" \u{feff}1", Cause::Unexpected, 1),
    ("-", Cause::Cut, 1),
    ("+1", Cause::Unexpected, 0),
    (".5", Cause::Unexpected, 0),
    ("1.", Cause::Cut, 2),
    ("1.]", Cause::Number, 2),
    ("01", Cause::Trailing, 1),
    ("[01]", Cause::Unexpected, 2),
    ("-01", Cause::Trailing, 2),
    ("--1", Cause::Number, 1),
    ("-x", Cause::Number, 1),
    ("[-]", Cause::Number, 2),
    ("1e", Cause::Cut, 2),
    ("1e+", Cause::Cut, 3),
    ("[1e]", Cause::Number, 3),
    ("[1e+]", Cause::Number, 4),
    ("1e1.5", Cause::Trailing, 3),
    ("[1.e1]", Cause::Number, 3),
    ("0x10", Cause::Trailing, 1),
    ("1_000", Cause::Trailing, 1),
    ("1 2", Cause::Trailing, 2),
    ("NaN", Cause::Unexpected, 0),
    ("Infinity", Cause::Unexpected, 0),
    ("-Infinity", Cause::Number, 1),
    ("inf", Cause::Unexpected, 0),
    ("[\u{ff11}]", Cause::Unexpected, 1),
    ("tru", Cause::Cut, 3),
    ("truE", Cause::Unexpected, 3),
    ("True", Cause::Unexpected, 0),
    ("truee", Cause::Trailing, 4),
    ("nul", Cause::Cut, 3),
    ("[nul]", Cause::Unexpected, 4),
    ("none", Cause::Unexpected, 1),
    ("undefined", Cause::Unexpected, 0),
    ("\"", Cause::Cut, 1),
    ("\"a", Cause::Cut, 2),
    ("'a'", Cause::Unexpected, 0),
    ("a", Cause::Unexpected, 0),
    ("\"\\", Cause::Cut, 2),
    ("\"\\\"", Cause::Cut, 3),
    ("\"\\x41\"", Cause::Escape, 2),
    ("\"\\a\"", Cause::Escape, 2),
    ("\"\\'\"", Cause::Escape, 2),
    ("\"\\0\"", Cause::Escape, 2),
    ("\"\\U0041\"", Cause::Escape, 2),
    ("\"\\u\"", Cause::Escape, 3),
    ("\"\\u00\"", Cause::Escape, 5),
    ("\"\\u00g0\"", Cause::Escape, 5),
    ("\"\\u+041\"", Cause::Escape, 3),
    ("\"\\u004", Cause::Cut, 6),
    ("\"\\ud83d\\u", Cause::Cut, 9),
    ("\"\n\"", Cause::Control, 1),
    ("\"\t\"", Cause::Control, 1),
    ("\"a\0\"", Cause::Control, 2),
    ("\"0123456789012345678901234567\u{1f}\"", Cause::Control, 29),
    ("\"\\\n\"", Cause::Escape, 2),
    ("\"a\"b", Cause::Trailing, 3),
    ("\"a\"\"b\"", Cause::Trailing, 3),
    ("[", Cause::Cut, 1),
    ("]", Cause::Unexpected, 0),
    ("[1", Cause::Cut, 2),
    ("[1,", Cause::Cut, 3),
    ("[1,]", Cause::Unexpected, 3),
    ("[,1]", Cause::Unexpected, 1),
    ("[1,,2]", Cause::Unexpected, 3),
    ("[1 2]", Cause::Unexpected, 3),
    ("[1:2]", Cause::Unexpected, 2),
    ("[1}", Cause::Unexpected, 2),
    ("[1]]", Cause::Trailing, 3),
    ("[\"a\",\n4,\n1,1", Cause::Cut, 12),
    ("[\"a\" b]", Cause::Unexpected, 5),
    ("[\u{b}1]", Cause::Unexpected, 1),
    ("[\u{c}]", Cause::Unexpected, 1),
    ("[\u{a0}1]", Cause::Unexpected, 1),
    ("[\u{2060}]", Cause::Unexpected, 1),
    ("[1]x", Cause::Trailing, 3),
    ("[][]", Cause::Trailing, 2),
    ("{", Cause::Cut, 1),
    ("}", Cause::Unexpected, 0),
    ("{]", Cause::Unexpected, 1),
    ("{}}", Cause::Trailing, 2),
    ("{\"a\"", Cause::Cut, 4),
    ("{\"a\"}", Cause::Unexpected, 4),
    ("{\"a\":", Cause::Cut, 5),
    ("{\"a\":}", Cause::Unexpected, 5),
    ("{\"a\":1", Cause::Cut, 6),
    ("{\"a\":1,", Cause::Cut, 7),
    ("{\"a\":1,}", Cause::Unexpected, 7),
    ("{,\"a\":1}", Cause::Unexpected, 1),
    ("{\"a\":1,,\"b\":2}", Cause::Unexpected, 7),
    ("{\"a\",1}", Cause::Unexpected, 4),
    ("{\"a\"::1}", Cause::Unexpected, 5),
    ("{\"a\" 1}", Cause::Unexpected, 5),
    ("{a:1}", Cause::Unexpected, 1),
    ("{'a':1}", Cause::Unexpected, 1),
    ("{1:1}", Cause::Unexpected, 1),
    ("{null:1}", Cause::Unexpected, 1),
    ("{\"a\":1]", Cause::Unexpected, 6),
    ("{\"a\":1 \"b\":2}", Cause::Unexpected, 7),
    ("{\"a\":/*c*/1}", Cause::Unexpected, 5),
    ("{\"a\":1}//c", Cause::Trailing, 7),
    ("{\"a\":1}#", Cause::Trailing, 7),
    ("{\"a\n\":1}", Cause::Control, 3),
    ("{\"\\x\":1}", Cause::Escape, 3),
    ("\0", Cause::Unexpected, 0),
    ("[1]\0", Cause::Trailing, 3),
    ("\u{1b}[1m", Cause::Unexpected, 0),
];

const BAD_UTF8: &[&[u8]] = &[
    b"\"\x80\"",
    b"\"\xbf\"",
    b"\"\xc0\x80\"",
    b"\"\xc1\xbf\"",
    b"\"\xc3\"",
    b"\"\xc3",
    b"\"\xe2\x82\"",
    b"\"\xe0\x80\x80\"",
    b"\"\xed\xa0\x80\"",
    b"\"\xed\xbf\xbf\"",
    b"\"\xf0\x80\x80\x80\"",
    b"\"\xf4\x90\x80\x80\"",
    b"\"\xf5\x80\x80\x80\"",
    b"\"\xff\"",
    b"\"\xfe\"",
    b"\xff\xfe1\x00",
    b"{\"\xff\":1}",
    b"\"ok\xe4\xb8",
    b"\"\xf0\x9f\x98\"",
    b"\"\xc3\xc3\xa9\"",
    b"\xc3\xa9",
];

#[test]
fn takes_what_the_grammar_takes_at_every_split() {
    for document in GOOD {
        assert_eq!(strict(document.as_bytes()).1, Ok(()), "{document}");
        check_every_split(document.as_bytes());
    }
}

#[test]
fn refuses_the_rest_and_says_where() {
    for &(document, cause, at) in BAD {
        assert_eq!(strict(document.as_bytes()).1, Err(Fault { at, cause }), "{document:?}");
        check_every_split(document.as_bytes());
    }
    for document in BAD_UTF8 {
        assert!(strict(document).1.is_err(), "{document:?}");
        check_every_split(document);
    }
}

#[test]
fn reports_members_with_depth_kind_and_span() {
    let document = br#"{"a":1,"b":["x",{"c\u0064":null}]}"#;
    let span = |start, end| Span { start, end };
    let (log, result) = strict(document);
    assert_eq!(result, Ok(()));
    assert_eq!(
        log.0,
        [
            Event::Begin(0, Kind::Object, 0),
            Event::Key(1, Some(b"a".to_vec()), span(1, 4)),
            Event::Begin(1, Kind::Number, 5),
            Event::End(1, Kind::Number, span(5, 6)),
            Event::Key(1, Some(b"b".to_vec()), span(7, 10)),
            Event::Begin(1, Kind::Array, 11),
            Event::Begin(2, Kind::String, 12),
            Event::Text(span(12, 15)),
            Event::End(2, Kind::String, span(12, 15)),
            Event::Begin(2, Kind::Object, 16),
            Event::Key(3, Some(b"cd".to_vec()), span(17, 26)),
            Event::Begin(3, Kind::Null, 27),
            Event::End(3, Kind::Null, span(27, 31)),
            Event::End(2, Kind::Object, span(16, 32)),
            Event::End(1, Kind::Array, span(11, 33)),
            Event::End(0, Kind::Object, span(0, 34)),
        ]
    );
}

#[test]
fn names_are_bounded_and_unescaped_the_same_for_every_cut() {
    for (raw, shown) in [
        ("x".repeat(KEY_BYTES_MAX), true),
        ("x".repeat(KEY_BYTES_MAX + 1), false),
        (r"\u0078".repeat(KEY_BYTES_MAX), true),
        (r"\u0078".repeat(KEY_BYTES_MAX + 1), false),
        (format!("{}{}", r"\u0078".repeat(KEY_BYTES_MAX), "x"), false),
        ("x".repeat(100_000), false),
        ("é".repeat(128), true),
        (r"\ud83d\ude00".repeat(64), true),
    ] {
        let document = format!("{{\"{raw}\":0}}");
        let (log, result) = strict(document.as_bytes());
        assert_eq!(result, Ok(()));
        let Event::Key(1, key, span) = &log.0[1] else { panic!("{:?}", log.0[1]) };
        assert_eq!(key.is_some(), shown, "{} bytes", raw.len());
        assert_eq!(*span, Span { start: 1, end: raw.len() + 3 });
        for size in [1, 5, 6, 7, 255, 1_000] {
            assert_eq!(walk(document.as_bytes().chunks(size)).0, log);
        }
    }
}

#[test]
fn nesting_is_bounded() {
    for (open, close) in [("[", "]"), ("{\"\":", "}")] {
        let nested = |depth: usize| {
            let inner = if open == "[" { "" } else { "0" };
            open.repeat(depth) + inner + &close.repeat(depth)
        };
        assert_eq!(strict(nested(DEPTH_MAX).as_bytes()).1, Ok(()));
        check_every_split(nested(66).as_bytes());
        let fault = Fault { at: open.len() * DEPTH_MAX, cause: Cause::Depth };
        for depth in [DEPTH_MAX + 1, 10_000, 1_000_000] {
            assert_eq!(strict(nested(depth).as_bytes()).1, Err(fault));
        }
    }
    // Brackets of both kinds keep their order over the words of the stack.
    let mixed = "[{\"\":".repeat(DEPTH_MAX / 2) + "1" + &"}]".repeat(DEPTH_MAX / 2);
    assert_eq!(strict(mixed.as_bytes()).1, Ok(()));
    let swapped = "[{\"\":".repeat(DEPTH_MAX / 2) + "1" + &"]}".repeat(DEPTH_MAX / 2);
    assert!(strict(swapped.as_bytes()).1.is_err());
}

#[test]
fn ten_megabytes_in_one_string_or_many_values_are_nothing_special() {
    let mut document = b"{\"a\":\"".to_vec();
    document.resize(10_000_000, b'k');
    document.extend_from_slice(b"\",\"b\":[");
    for _ in 0..1_000_000 {
        document.extend_from_slice(b"\"\\n\",");
    }
    document.extend_from_slice(b"0]}");
    struct Ends(usize);
    impl Watch for Ends {
        const DEPTH: usize = 1;
        fn end(&mut self, _depth: usize, _kind: Kind, span: Span) {
            self.0 = span.end;
        }
    }
    let (mut walker, mut ends) = (Walker::default(), Ends(0));
    for piece in document.chunks(65_536) {
        assert_eq!(walker.push(piece, &mut ends), Ok(()));
    }
    assert_eq!(walker.finish(&mut ends), Ok(()));
    assert_eq!(ends.0, document.len());
}

/// Strings of every length around the steps in which they are read, with something to meet at every
/// place: cut into bytes they are read without any step.
#[test]
fn strings_are_read_the_same_in_steps_and_in_bytes() {
    for special in ["\\n", "\\u00e9", "\"", "\n", "\\x", "é", "😀"] {
        for (len, place) in (0..76).flat_map(|len| [0, len / 2, len].map(|place| (len, place))) {
            let text = format!("{}{special}{}", "a".repeat(place), "b".repeat(len - place));
            for document in [
                format!("[\"{text}\"]"),
                format!("{{\"{text}\":1}}"),
                format!("{{\"a\":\"{text}\",\"{text}\":{{}},\"b\":[\"{text}\"]}}"),
            ] {
                let document = document.as_bytes();
                let (log, result) = walk([document]);
                let (cut_log, cut_result) = walk(document.chunks(1));
                check_same(document, usize::MAX, (&log, result), (&cut_log, cut_result));
            }
        }
    }
}

/// `plain_end` against its definition, with a special byte at every place, or none.
#[test]
fn plain_text_ends_at_the_first_special_byte() {
    for len in 0..90 {
        for place in 0..=len {
            let mut bytes = vec![0xE4; len];
            if let Some(byte) = bytes.get_mut(place) {
                *byte = b"\"\\\n"[len % 3];
            }
            for from in [0, 1, place, len] {
                let end = plain_end(&bytes, from.min(len));
                if from.min(len) + NEAR <= len {
                    let near = (from + NEAR).min(if from <= place { place } else { len });
                    assert_eq!(end, near, "{len} {place} {from}");
                } else if from <= place {
                    assert!(end == place || end < place && end + 8 > len, "{len} {place} {from}");
                }
            }
        }
    }
}

#[test]
fn ascii_is_told_from_the_rest() {
    for len in 0..70 {
        let mut bytes = vec![0x7F; len];
        assert!(is_ascii(&bytes));
        for place in 0..len {
            bytes[place] = 0x80;
            assert!(!is_ascii(&bytes), "{len} {place}");
            bytes[place] = 0;
        }
    }
}

/// The faster `specials_of_32`, `specials` and `skip_digits` against the definition, for every byte
/// at every place.
#[test]
fn scans_agree_with_their_definitions() {
    let plain = |byte: u8| byte >= 0x20 && byte != b'"' && byte != b'\\';
    for byte in 0..=255 {
        for other in [b'a', 0x1F, b'"', b'\\', 0xFF, b'#', b'!'] {
            for place in 0..32 {
                let mut lanes = [b'a'; 32];
                lanes[31] = other;
                lanes[place] = byte;
                let expected = (0..32).filter(|&n| !plain(lanes[n])).fold(0, |m, n| m | 1 << n);
                assert_eq!(specials_of_32(&lanes), expected);
            }
            for place in 0..8 {
                let mut word = [b'a'; 8];
                word[7] = other;
                word[place] = byte;
                let expected = word.iter().position(|&byte| !plain(byte)).unwrap_or(8);
                let found = specials(u64::from_le_bytes(word)).trailing_zeros() / 8;
                assert_eq!(found as usize, expected);
                let mut digits = [b'7'; 20];
                digits[19] = other;
                digits[place + 5] = byte;
                let expected = digits.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(20);
                assert_eq!(skip_digits(&digits, 0), expected);
            }
        }
    }
}

#[test]
fn unescape_agrees_with_serde_json() {
    let mut rng = Rng::seeded(3);
    let parts = [
        "a",
        "é",
        "模",
        "😀",
        r"\n",
        r"\\",
        r#"\""#,
        r"\/",
        r"\b",
        r"\f",
        r"\r",
        r"\t",
        r"\u0041",
        r"\u00e9",
        r"\uFFFF",
        r"\ud83d\ude00",
        r"\u0000",
        r"\u2028",
    ];
    for _ in 0..5_000 {
        let raw: String = (0..rng.below(8)).map(|_| parts[pick(&mut rng, parts.len())]).collect();
        let expected: String = serde_json::from_str(&format!("\"{raw}\"")).unwrap();
        assert_eq!(unescape(raw.as_bytes()), expected.as_bytes(), "{raw}");
    }
    assert_eq!(unescape(br"\ud800"), b"\xED\xA0\x80");
    assert_eq!(unescape(br"\ud800\ud83d\ude00"), b"\xED\xA0\x80\xF0\x9F\x98\x80");
    // Not valid, and no panic.
    for raw in [&br"\"[..], br"\u", br"\u12", br"\uzzzz", br"\ud800\u", br"\ud800\u12", br"\q"] {
        unescape(raw);
    }
}

fn pick(rng: &mut Rng, len: usize) -> usize {
    rng.below(len as u64) as usize
}

const SEEDS: &[&str] = &[
    r#"{"model":"m-small","messages":[{"role":"user","content":"caf\u00e9 \/ \ud83d\ude00","name":null}],"temperature":1.0,"stream":true}"#,
    r#"[1,-0,0.5,-1.25e+10,1E-3,true,false,null,"",{},[],[[]],{"a":{}},123456789]"#,
    "{ \"模型\" : \"é\u{10FFFF}\u{800}\" ,\r\n\t\"x\":[ ] }",
    "  -12.5e3 ",
    r#""0123456789012345678901234567890123456789\n01234567890123456789012345678901234567890""#,
    r#"{"mod\u0065l":1,"a\"b":"\\\\\"","":{"":[{"":""}]}}"#,
];

#[test]
fn agrees_with_two_other_parsers_on_mutated_documents() {
    const ALPHABET: &[u8] =
        b"{}[]:,\"\\/ \n\t0123456789.eE+-truefalsn u\x00\x1f\x7f\xff\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xed\xa0\xc0\xefabcdDU";
    let mut rng = Rng::seeded(7);
    let (mut taken, mut refused) = (0, 0);
    for round in 0..20_000 {
        let mut document = SEEDS[pick(&mut rng, SEEDS.len())].as_bytes().to_vec();
        for _ in 0..rng.below(4) {
            let at = pick(&mut rng, document.len());
            let byte = ALPHABET[pick(&mut rng, ALPHABET.len())];
            match rng.below(4) {
                0 => document[at] = byte,
                1 if document.len() > 1 => drop(document.remove(at)),
                2 => document.insert(at, byte),
                _ => {
                    let end = document.len().min(at + pick(&mut rng, 6));
                    let part = document[at..end].to_vec();
                    let to = pick(&mut rng, document.len());
                    document.splice(to..to, part);
                }
            }
        }
        let shown = String::from_utf8_lossy(&document);
        let result = strict(&document).1;
        let utf8 = std::str::from_utf8(&document).is_ok();
        let serde = utf8 && serde_json::from_slice::<serde::de::IgnoredAny>(&document).is_ok();
        assert_eq!(result.is_ok(), serde, "{shown} {result:?}");
        // jiter refuses surrogates without their other half, which RFC 8259 leaves open.
        let surrogates = document.windows(4).any(|four| {
            matches!(four, [b'\\', b'u', b'd' | b'D', third] if !matches!(third, b'0'..=b'7'))
        });
        if !surrogates {
            let mut jiter = jiter::Jiter::new(&document);
            let jiter = utf8 && jiter.next_skip().is_ok() && jiter.finish().is_ok();
            assert_eq!(result.is_ok(), jiter, "{shown} {result:?}");
        }
        if round % 20 == 0 {
            check_every_split(&document);
        }
        if result.is_ok() {
            taken += 1;
        } else {
            refused += 1;
        }
    }
    // Both sides of the question were asked often.
    assert!(taken > 4_000 && refused > 4_000, "{taken} taken, {refused} refused");
}
