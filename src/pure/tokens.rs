//! Tokens that nobody has counted yet: what a prompt will take, before it is sent, and what was
//! generated, when a backend reports no usage or a client left early.
//!
//! Prompts are estimated, or, where a model or a route names a vocabulary, counted ([`exact`]). A
//! tokenizer is exact, but takes some 100 ns for each token and megabytes of tables for each
//! model. The estimate is one pass of vector code that counts bytes by kind and weighs them. The weights
//! are a least-squares fit to the mean of three tokenizers (o200k, Llama 3, Qwen 3) over prose in
//! 29 languages, source code, Markdown, JSON and logs, plain and as JSON request bodies. The error
//! is 17 % RMS, within 30 % for all of the code and of the Latin and East Asian prose; only scripts
//! over which the tokenizers themselves differ by 2 × and more (Cyrillic, Greek, Hebrew, Thai,
//! Indic) are off by as much as 1.55 × or 0.65 ×. What remains is a matter of the model and its
//! users, which a [`Factor`] learns.

mod exact;
mod file;
mod vocabulary;

use std::collections::HashMap;

use foldhash::fast::FixedState;
use memchr::memmem;

pub use exact::exact;
pub use vocabulary::{NAMES, Tokenizer, Vocabularies, Vocabulary, Work};

use crate::pure::lanes::{ONES, TOPS};
use crate::pure::units::{Series, Tokens};

/// What an inline image, sound or file counts for: what vision encoders make of about a megapixel.
const INLINE_TOKENS: u64 = 1_000;

/// Bytes of a prompt, or of several pieces of one, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    kinds: Kinds,
    /// Contents of `data:` URLs, which are not text.
    inline: u64,
}

/// Counts of bytes. Those of one character are counted where it starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Kinds {
    ascii: u64,
    /// ASCII digits, counted in `ascii` too, as are punctuation and symbols.
    digits: u64,
    marks: u64,
    /// Two-byte characters: Latin letters with marks, which break words up, and other scripts.
    latin: u64,
    two: u64,
    three: u64,
    four: u64,
}

impl Kinds {
    fn add(&mut self, text: &[u8]) {
        count(text, self);
        if find(text, b"\\u").is_some() {
            unescape(text, self);
        }
    }

    /// Adds counts of a sample of length `part`, for a whole of length `whole`.
    fn add_scaled(&mut self, sample: &Kinds, whole: u64, part: u64) {
        let scale = |count: u64| count.saturating_mul(whole) / part.max(1);
        self.ascii += scale(sample.ascii);
        self.digits += scale(sample.digits);
        self.marks += scale(sample.marks);
        self.latin += scale(sample.latin);
        self.two += scale(sample.two);
        self.three += scale(sample.three);
        self.four += scale(sample.four);
    }

    /// Thousandths of a token.
    const fn weigh(&self) -> u64 {
        self.ascii * 212
            + self.digits * 788
            + self.marks * 180
            + self.latin * 1_600
            + self.two * 400
            + self.three * 760
            + self.four * 2_000
    }
}

/// Estimates the tokens of a prompt in parts, each given as text or as the JSON that holds it: chat
/// messages, tools and all. Escapes count for what they stand for. 0.1 to 0.3 ns a byte; no
/// allocation.
pub fn prompt<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> Tokens {
    let mut census = Census::default();
    parts.into_iter().for_each(|part| census.push(part));
    census.tokens()
}

impl Census {
    /// Takes in a piece of the prompt, cut at a value's end.
    pub fn push(&mut self, text: &[u8]) {
        const MARKER: &[u8; 8] = b";base64,";
        let mut rest = text;
        while let Some(at) = find(rest, MARKER) {
            let (text, inline) = rest.split_at(at);
            self.text(text);
            self.inline = self.inline.saturating_add(1);
            let len = memchr::memchr(b'"', inline).unwrap_or(inline.len());
            rest = &inline[len..];
        }
        self.text(rest);
    }

    pub fn tokens(&self) -> Tokens {
        // Bytes fit 2^48 by far, so the sum of weights fits 2^64.
        let thousandths = self.kinds.weigh();
        Tokens((thousandths / 1_000).saturating_add(self.inline.saturating_mul(INLINE_TOKENS)))
    }

    fn text(&mut self, text: &[u8]) {
        if text.len() <= WHOLE_BYTES_MAX {
            self.kinds.add(text);
            return;
        }
        let mut sample = Kinds::default();
        let mut len: u64 = 0;
        for stretch in text.chunks(4 * SAMPLE_BYTES) {
            let part = &stretch[..stretch.len().min(SAMPLE_BYTES)];
            sample.add(part);
            len += part.len() as u64;
        }
        self.kinds.add_scaled(&sample, text.len() as u64, len);
    }
}

/// As `memmem::find`, which prepares its search: that costs more than to see that a text has nothing
/// like the needle's first byte, or, if it is short, its first two.
fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    const SHORT: usize = 1 << 10;
    let [first, second, ..] = *needle else { return memmem::find(text, needle) };
    let from = memchr::memchr(first, text)?;
    let rest = &text[from..];
    if rest.len() <= SHORT && !has_pair(rest, first, second) {
        return None;
    }
    memmem::find(rest, needle).map(|at| from + at)
}

/// Whether these two bytes stand side by side anywhere.
fn has_pair(text: &[u8], first: u8, second: u8) -> bool {
    let Some((_, behind)) = text.split_first() else { return false };
    let before = &text[..behind.len()];
    // A zero byte for each place where they do, and the test for one (Mycroft).
    let zeros = |here: &[u8; 8], next: &[u8; 8]| {
        let apart = u64::from_le_bytes(*here) ^ (ONES * u64::from(first))
            | u64::from_le_bytes(*next) ^ (ONES * u64::from(second));
        apart.wrapping_sub(ONES) & !apart
    };
    let (Some(last), Some(last_next)) = (before.last_chunk(), behind.last_chunk()) else {
        return text.windows(2).any(|pair| pair == [first, second]);
    };
    let words = before.as_chunks().0.iter().zip(behind.as_chunks().0);
    let any = words.fold(zeros(last, last_next), |any, (here, next)| any | zeros(here, next));
    any & TOPS != 0
}

/// A text up to this length is counted whole; of the rest of a longer one one part in four, because
/// a long text is like itself, and the weights are off by more than the sample is.
const WHOLE_BYTES_MAX: usize = 16 << 10;
const SAMPLE_BYTES: usize = 1 << 10;

/// The width of a vector, and how many of them are counted before sums could leave a byte. Short
/// stretches, because those that are all ASCII cost half.
const LANES: usize = 16;
const VECTORS: usize = 64;

fn count(text: &[u8], kinds: &mut Kinds) {
    kinds.ascii += text.len() as u64;
    let (vectors, rest) = text.as_chunks::<LANES>();
    // Zeros count for nothing but ASCII.
    let mut last = [0; LANES];
    match text.last_chunk::<LANES>() {
        // The same bytes as in the other case, but for their places.
        Some(lanes) => {
            for i in 0..LANES {
                last[i] = if i < LANES - rest.len() { 0 } else { lanes[i] };
            }
        }
        None => last[..rest.len()].copy_from_slice(rest),
    }
    let (parts, part) = vectors.as_chunks::<VECTORS>();
    for part in parts {
        count_part(part, &[0; LANES], kinds);
    }
    count_part(part, &last, kinds);
}

/// Counts of bytes in each lane.
type Lanes = [u8; LANES];

/// Written so that the compiler makes vector code of it: a few operations for each count and
/// vector. ASCII is taken from `kinds` for each byte that is none.
#[inline]
fn count_part(part: &[Lanes], last: &Lanes, kinds: &mut Kinds) {
    let [mut digits, mut letters, mut visible, mut high] = [[0u8; LANES]; 4];
    let mut add = |vector: &Lanes| {
        for i in 0..LANES {
            let byte = vector[i];
            digits[i] += u8::from(byte.wrapping_sub(b'0') < 10);
            letters[i] += u8::from((byte | 0x20).wrapping_sub(b'a') < 26);
            // As signed numbers, bytes above ASCII are below it.
            visible[i] += u8::from(byte.cast_signed() > 0x20);
            high[i] |= byte;
        }
    };
    part.iter().for_each(&mut add);
    add(last);
    let [digits, letters, visible] = [digits, letters, visible].map(sum);
    kinds.digits += digits;
    // No byte is two of these, and all of them are visible.
    kinds.marks += visible - letters - digits;
    if high.is_ascii() {
        return;
    }
    let [mut more, mut latin, mut two, mut three, mut four] = [[0u8; LANES]; 5];
    let mut add = |vector: &Lanes| {
        for i in 0..LANES {
            let byte = vector[i];
            more[i] += u8::from(byte >= 0x80);
            latin[i] += u8::from(byte.wrapping_sub(0xC2) < 10);
            two[i] += u8::from(byte >= 0xC2);
            three[i] += u8::from(byte >= 0xE0);
            four[i] += u8::from(byte >= 0xF0);
        }
    };
    part.iter().for_each(&mut add);
    add(last);
    let [more, latin, two, three, four] = [more, latin, two, three, four].map(sum);
    kinds.ascii -= more;
    kinds.latin += latin;
    kinds.two += two - latin - three;
    kinds.three += three - four;
    kinds.four += four;
}

/// The sum of all lanes: first of every two, which fits sixteen bits, as does the whole.
fn sum(lanes: Lanes) -> u64 {
    const EVEN: u128 = u128::from_le_bytes([
        0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0, 0xFF, 0,
    ]);
    let lanes = u128::from_le_bytes(lanes);
    let pairs = (lanes & EVEN) + (lanes >> 8 & EVEN);
    let pairs = pairs as u64 + (pairs >> 64) as u64;
    pairs.wrapping_mul(0x0001_0001_0001_0001) >> 48
}

/// Makes up for `\u` escapes, which [`count`] took for text: a request in Chinese is six bytes for
/// each character if its sender, as Python's `json` does by default, escapes all but ASCII.
fn unescape(text: &[u8], kinds: &mut Kinds) {
    const ESCAPED_PART: usize = 192;
    let digit = |byte: u8| u8::from(byte.wrapping_sub(b'0') < 10);
    let mut from = text;
    while let [head @ .., _, _, _, _, _] = from
        && !head.is_empty()
    {
        let len = head.len().min(ESCAPED_PART);
        let [a, b, c, d, e, f] = [0, 1, 2, 3, 4, 5].map(|shift| &from[shift..][..len]);
        let [mut all, mut digits, mut low] = [0u8; 3];
        for i in 0..len {
            let here = u8::from(a[i] == b'\\') & u8::from(b[i] == b'u');
            all += here;
            // Escapes do not overlap, so this stays below four for every six bytes.
            digits += (digit(c[i]) + digit(d[i]) + digit(e[i]) + digit(f[i])) * here;
            low += u8::from(c[i] == b'0') & u8::from(d[i] < b'8') & here;
        }
        let [all, digits, low] = [all, digits, low].map(u64::from);
        kinds.ascii = kinds.ascii.saturating_sub(6 * all);
        kinds.digits = kinds.digits.saturating_sub(digits);
        kinds.marks = kinds.marks.saturating_sub(all);
        // Below U+0800 a character has two bytes; a pair of surrogates weighs about as much as two
        // characters of three.
        kinds.two += low;
        kinds.three += all - low;
        from = &from[len..];
    }
}

/// Estimates the tokens of generated text: `events` are the tokens that its events suggest (zero
/// for a plain response), `bytes` and `chars` its length in UTF-8.
///
/// Engines usually send one token an event, so events count, unless there is so much text in them
/// that several tokens must share one.
pub fn generated(events: u64, bytes: u64, chars: u64) -> Tokens {
    // A character of three bytes adds two to the length that ASCII would have, one of two bytes
    // adds one and weighs about half.
    let wide = (bytes.saturating_sub(chars) / 2).min(chars);
    let thousandths = (chars - wide).saturating_mul(235).saturating_add(wide.saturating_mul(760));
    let by_text = thousandths.div_ceil(1_000);
    Tokens(if by_text > events.saturating_add(events / 2) { by_text } else { events })
}

/// How one model's tokens compare to the estimate: learnt from what its backends report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Factor {
    /// In 65,536ths.
    ratio: u32,
}

impl Default for Factor {
    fn default() -> Factor {
        Factor::ONE
    }
}

impl Factor {
    pub const ONE: Factor = Factor { ratio: 1 << 16 };

    /// Short prompts say little: what a chat template adds outweighs the text.
    const TOKENS_MIN: u64 = 64;

    /// No tokenizer is further from the estimate; a report that is comes from something else, as
    /// images behind a link or a prompt that a template replaces.
    const RATIO_MAX: u32 = 4 << 16;
    const RATIO_MIN: u32 = 1 << 14;

    /// What leads from an estimate to what was counted; [`Factor::ONE`] where that says little.
    fn between(estimate: Tokens, counted: Tokens) -> Factor {
        if estimate.0 < Factor::TOKENS_MIN {
            return Factor::ONE;
        }
        let ratio = (u128::from(counted.0) << 16) / u128::from(estimate.0);
        let ratio = u32::try_from(ratio).unwrap_or(u32::MAX);
        Factor { ratio: ratio.clamp(Factor::RATIO_MIN, Factor::RATIO_MAX) }
    }

    /// The estimate, corrected.
    pub fn apply(self, estimate: Tokens) -> Tokens {
        let tokens = (u128::from(estimate.0) * u128::from(self.ratio)) >> 16;
        Tokens(u64::try_from(tokens).unwrap_or(u64::MAX))
    }

    /// Learns from one response: the estimate before correction, and what was reported. Moves a
    /// sixteenth of the way, so the last few dozen responses decide.
    pub fn learn(&mut self, estimate: Tokens, reported: Tokens) {
        // A prompt without tokens is a report without a count.
        if estimate.0 < Factor::TOKENS_MIN || reported.0 == 0 {
            return;
        }
        let seen = i64::from(Factor::between(estimate, reported).ratio);
        let ratio = i64::from(self.ratio);
        // Between two ratios, so it fits as they do.
        self.ratio = (ratio + (seen - ratio) / 16) as u32;
    }
}

/// The factors of the models that one shard has seen. Bounded; a model that comes when it is full is
/// estimated without correction.
#[derive(Debug, Default)]
pub struct Factors {
    by_model: HashMap<Series, Factor, FixedState>,
}

const FACTORS_MAX: usize = 1_024;

impl Factors {
    /// [`Factor::ONE`] where nothing was learnt. One lookup.
    pub fn of(&self, model: Series) -> Factor {
        self.by_model.get(&model).copied().unwrap_or_default()
    }

    /// [`Factor::learn`] for a model. Allocates when a model is new.
    pub fn learn(&mut self, model: Series, estimate: Tokens, reported: Tokens) {
        if self.by_model.len() < FACTORS_MAX || self.by_model.contains_key(&model) {
            self.by_model.entry(model).or_default().learn(estimate, reported);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: estimates near what tokenizers count, and the same by any way of counting. Method:
    //! texts with known counts (mean of o200k, Llama 3 and Qwen 3); a byte-at-a-time oracle on
    //! seeded bytes.

    use super::*;
    use crate::pure::units::Rng;

    fn of(text: &[u8]) -> Tokens {
        prompt([text])
    }

    #[test]
    fn estimates_are_near_what_tokenizers_count() {
        for (text, tokens) in TEXTS {
            let estimate = of(text.as_bytes()).0;
            assert!((tokens * 6 / 10..=tokens * 16 / 10).contains(&estimate), "{estimate} {text}");
        }
    }

    const TEXTS: &[(&str, u64)] = &[
        ("The gateway forwards each event as it arrives, and nothing waits for anything else.", 16),
        (
            "Der Zwischenspeicher wird geleert, sobald die Verbindung zum Server abbricht; größere Anfragen müssen warten.",
            28,
        ),
        (
            "Les requêtes refusées ne coûtent rien, mais celles qui ont été acceptées sont réglées exactement une fois.",
            27,
        ),
        (
            "网关会立即转发每个事件,不会等待其他任何内容。如果客户端离开,后端连接会在几毫秒内关闭。",
            31,
        ),
        ("ゲートウェイは届いたイベントをすぐに転送し、他のものを待つことはありません。", 24),
        ("게이트웨이는 도착한 이벤트를 즉시 전달하며 다른 것을 기다리지 않습니다.", 22),
        ("Шлюз передаёт каждое событие сразу после его получения и ничего не ждёт.", 21),
        ("بوابة الاتصال تمرر كل حدث فور وصوله ولا تنتظر أي شيء آخر.", 20),
        (
            "fn main() -> Result<(), Error> {\n    let port: u16 = std::env::args().nth(1).unwrap_or(\"8080\".into()).parse()?;\n    serve(port)\n}",
            42,
        ),
        (
            "{\"model\":\"m-small\",\"messages\":[{\"role\":\"user\",\"content\":\"Say hi\"}],\"stream\":true,\"max_tokens\":256}",
            28,
        ),
        (
            "2026-11-30T15:46:49.120Z INFO shard=3 status=200 ttft_us=18342 tokens=512 bytes=20480",
            41,
        ),
        ("| a | 1.25 | 2.50 |\n| b | 10.75 | 3.00 |\n", 28),
        ("🎉🚀 Done! 👍", 8),
    ];

    #[test]
    fn escapes_count_for_what_they_stand_for() {
        for (text, _) in TEXTS {
            let plain = of(text.as_bytes()).0;
            let escaped: String = text
                .chars()
                .map(|c| match c {
                    ' '..='~' => c.to_string(),
                    _ => {
                        c.encode_utf16(&mut [0; 2]).iter().map(|u| format!("\\u{u:04x}")).collect()
                    }
                })
                .collect();
            let escaped = of(escaped.as_bytes()).0;
            assert!((plain * 7 / 10..=plain * 13 / 10 + 1).contains(&escaped), "{escaped} {text}");
        }
    }

    #[test]
    fn bytes_are_counted_right() {
        let mut rng = Rng::seeded(3);
        for len in (0..600).chain([4_096, 10_000]) {
            let text: Vec<u8> = (0..len).map(|_| rng.next_u64() as u8).collect();
            let mut kinds = Kinds::default();
            count(&text, &mut kinds);
            let number = |is: fn(u8) -> bool| text.iter().filter(|&&byte| is(byte)).count() as u64;
            let expected = Kinds {
                ascii: number(|byte| byte.is_ascii()),
                digits: number(|byte| byte.is_ascii_digit()),
                marks: number(|byte| byte.is_ascii_punctuation() || byte == 0x7F),
                latin: number(|byte| (0xC2..=0xCB).contains(&byte)),
                two: number(|byte| (0xCC..=0xDF).contains(&byte)),
                three: number(|byte| (0xE0..=0xEF).contains(&byte)),
                four: number(|byte| byte >= 0xF0),
            };
            assert_eq!(kinds, expected, "{len}");
        }
    }

    #[test]
    fn needles_are_found_in_short_texts_and_long_ones() {
        let mut rng = Rng::seeded(5);
        for round in 0..3_000 {
            let len = if round % 50 == 0 { 3_000 } else { rng.below(80) };
            let mut text: Vec<u8> =
                (0..len).map(|_| b";;b\\\\uxyz"[rng.below(9) as usize]).collect();
            if rng.below(2) == 0 {
                let place = rng.below(len + 1) as usize;
                text.splice(place..place, *b";base64,");
            }
            for needle in [&b";base64,"[..], b"\\u"] {
                assert_eq!(find(&text, needle), memmem::find(&text, needle));
            }
            for pair in [*b";b", *b"xy", *b"\\u"] {
                let expected = text.windows(2).any(|two| two == pair);
                assert_eq!(has_pair(&text, pair[0], pair[1]), expected);
            }
        }
    }

    #[test]
    fn any_bytes_can_be_estimated() {
        let mut rng = Rng::seeded(4);
        for _ in 0..2_000 {
            let len = rng.below(300);
            let text: Vec<u8> =
                (0..len).map(|_| b"\\u0d\";base64,9a\xE4"[rng.below(15) as usize]).collect();
            let _ = of(&text);
        }
        assert_eq!(of(b""), Tokens(0));
    }

    #[test]
    fn a_long_text_is_estimated_like_its_parts() {
        for (text, _) in TEXTS {
            let long = text.repeat(100_000 / text.len());
            let mut parts = Census::default();
            long.as_bytes().chunks(5_000).for_each(|part| parts.push(part));
            let (parts, whole) = (parts.tokens().0, of(long.as_bytes()).0);
            assert!(
                (parts * 97 / 100..=parts * 103 / 100).contains(&whole),
                "{parts} {whole} {text}"
            );
        }
    }

    #[test]
    fn pictures_are_no_text() {
        let picture = format!(
            r#"[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{}"}}}},"#,
            "iVBORw0KGgo".repeat(10_000)
        );
        let estimate = of(format!("{picture}{picture}").as_bytes()).0;
        assert!((2_000..2_100).contains(&estimate), "{estimate}");
        assert!((1_000..1_100).contains(&of(&picture.as_bytes()[..50_000]).0));
    }

    #[test]
    fn events_count_unless_they_hold_too_much() {
        assert_eq!(generated(8, 27, 27), Tokens(8));
        // One token an event, long words.
        assert_eq!(generated(8, 48, 48), Tokens(8));
        // Ten tokens an event.
        assert_eq!(generated(10, 400, 400), Tokens(94));
        assert_eq!(generated(0, 400, 400), Tokens(94));
        assert_eq!(generated(0, 300, 100), Tokens(76));
        assert_eq!(generated(0, 0, 0), Tokens(0));
        assert_eq!(generated(0, 1, 1), Tokens(1));
        // Nonsense stays finite.
        generated(u64::MAX, u64::MAX, 0);
        generated(0, u64::MAX, u64::MAX);
        generated(0, 0, u64::MAX);
    }

    #[test]
    fn a_factor_learns_and_stays_sane() {
        let mut factor = Factor::ONE;
        assert_eq!(factor.apply(Tokens(1_000)), Tokens(1_000));
        for _ in 0..200 {
            factor.learn(Tokens(1_000), Tokens(1_500));
        }
        assert!((1_490..=1_500).contains(&factor.apply(Tokens(1_000)).0));
        factor.learn(Tokens(63), Tokens(1_000_000));
        assert!((1_490..=1_500).contains(&factor.apply(Tokens(1_000)).0));
        for _ in 0..200 {
            factor.learn(Tokens(1_000), Tokens(u64::MAX));
        }
        assert!((3_900..=4_000).contains(&factor.apply(Tokens(1_000)).0));
        for _ in 0..200 {
            factor.learn(Tokens(1_000), Tokens(1));
        }
        assert!((250..=260).contains(&factor.apply(Tokens(1_000)).0));
        let before = factor;
        factor.learn(Tokens(1_000), Tokens(0));
        assert_eq!(factor, before);
        assert_eq!(Factor { ratio: u32::MAX }.apply(Tokens(u64::MAX)), Tokens(u64::MAX));
    }

    #[test]
    fn each_model_has_a_factor_of_its_own_and_there_are_not_too_many() {
        let mut factors = Factors::default();
        assert_eq!(factors.of(Series(1)), Factor::ONE);
        for _ in 0..100 {
            factors.learn(Series(1), Tokens(1_000), Tokens(2_000));
            factors.learn(Series(2), Tokens(1_000), Tokens(500));
        }
        let corrected = |factors: &Factors, model| factors.of(Series(model)).apply(Tokens(100)).0;
        assert!((197..=200).contains(&corrected(&factors, 1)));
        assert!((50..=52).contains(&corrected(&factors, 2)));
        for model in 3..10_000 {
            factors.learn(Series(model), Tokens(1_000), Tokens(2_000));
        }
        assert_eq!(factors.by_model.len(), FACTORS_MAX);
        assert_eq!(factors.of(Series(9_999)), Factor::ONE);
        // Those that are there go on learning.
        for _ in 0..200 {
            factors.learn(Series(1), Tokens(1_000), Tokens(1_000));
        }
        assert_eq!(corrected(&factors, 1), 100);
    }
}
