//! What a mock backend is told to do: its [`Script`], and the [`Act`] that one request gets.
//!
//! An act is text, `key=value, key=value`, and the same text works everywhere: as flags of
//! `forebay mock` (`--reset-after 3`), as `--fault`, as the request header `x-mock`, as the body
//! member `"mock"` (which crosses a gateway that drops unknown headers) and as the body of
//! `PUT /mock`. [`KEYS`] is the whole vocabulary.

use std::time::Duration;

use clap::{Arg, ArgAction, ArgMatches};

use crate::pure::units::Rng;
use crate::rt::Driver;

/// How a mock backend behaves until a request asks for something else.
#[derive(Clone, Debug)]
pub struct Script {
    /// The models it serves; with none it serves every name, and lists `mock`.
    pub models: Vec<String>,
    /// Same seed and same request, same text.
    pub seed: u64,
    /// Requests without `Authorization: Bearer` (or `x-api-key`) and this key get a 401.
    pub key: Option<String>,
    /// Whether `/metrics` speaks vLLM's names or is not there.
    pub metrics: Metrics,
    /// Requests that run at a time; more wait in order, as in an engine's queue.
    pub slots: Option<u32>,
    /// Prompt and answer together may not be longer; a longer prompt is a 400, as in vLLM.
    pub context: Option<u64>,
    /// A kept connection is closed after this long without a request (uvicorn's default).
    pub idle: Duration,
    /// How many of the last requests are remembered, and how many bytes of them together.
    pub kept_requests: usize,
    pub kept_bytes: usize,
    /// `None` takes the first driver that works.
    pub driver: Option<Driver>,
    /// What a request does that asks for nothing special.
    pub act: Act,
}

impl Default for Script {
    fn default() -> Script {
        Script {
            models: Vec::new(),
            seed: 1,
            key: None,
            metrics: Metrics::Vllm,
            slots: None,
            context: None,
            idle: Duration::from_secs(5),
            kept_requests: 256,
            kept_bytes: 32 << 20,
            driver: None,
            act: Act::default(),
        }
    }
}

impl Script {
    /// An instant backend (no waits) that plays `act`: what most tests want.
    ///
    /// # Errors
    /// The text names an unknown key or a value that does not fit it.
    pub fn instant(act: &str) -> Result<Script, String> {
        let mut script = Script { act: Act::instant(), ..Script::default() };
        script.act.apply(act)?;
        Ok(script)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Metrics {
    Vllm,
    None,
}

/// What is done with one request.
#[derive(Clone, Debug, PartialEq)]
pub struct Act {
    pub ttft: Duration,
    pub inter_token: Duration,
    pub jitter: Duration,
    pub tokens: u32,
    pub token_bytes: Option<usize>,
    pub reasoning: u32,
    pub tricky: bool,
    pub finish: Option<String>,
    pub prompt_tokens: Option<u64>,
    pub cached: u64,
    pub usage: UsageSay,

    pub status: Option<u16>,
    pub retry_after: Option<String>,
    pub error_body: ErrorBody,
    pub times: Option<u64>,
    pub every: Option<u64>,

    pub reset_after: Option<u32>,
    pub close_after: Option<u32>,
    pub stall_after: Option<u32>,
    pub error_after: Option<u32>,
    pub garbage: Option<Garbage>,
    pub no_done: bool,

    pub late_head: bool,
    pub head_only: bool,
    pub slow_head: Option<Duration>,
    pub body_delay: Option<Duration>,
    pub read_delay: Option<Duration>,
    pub early: bool,
    pub hangs: bool,
    pub interim: Option<u16>,
    pub stale: bool,
    pub drop_idle: bool,
    pub close: bool,
    pub health: Option<Health>,

    pub framing: FramingSay,
    pub chunk_size: Option<usize>,
    pub merge: u32,
    pub write_size: Option<usize>,
    pub trailers: bool,
    pub eol: Eol,
    pub bom: bool,
    pub comments: bool,
    pub ping: Option<Duration>,
    pub early_role: bool,
}

impl Default for Act {
    fn default() -> Act {
        Act {
            ttft: Duration::from_millis(50),
            inter_token: Duration::from_millis(10),
            jitter: Duration::ZERO,
            tokens: 32,
            token_bytes: None,
            reasoning: 0,
            tricky: false,
            finish: None,
            prompt_tokens: None,
            cached: 0,
            usage: UsageSay::Right,
            status: None,
            retry_after: None,
            error_body: ErrorBody::Vllm,
            times: None,
            every: None,
            reset_after: None,
            close_after: None,
            stall_after: None,
            error_after: None,
            garbage: None,
            no_done: false,
            late_head: false,
            head_only: false,
            slow_head: None,
            body_delay: None,
            read_delay: None,
            early: false,
            hangs: false,
            interim: None,
            stale: false,
            drop_idle: false,
            close: false,
            health: None,
            framing: FramingSay::Proper,
            chunk_size: None,
            merge: 1,
            write_size: None,
            trailers: false,
            eol: Eol::Lf,
            bom: false,
            comments: false,
            ping: None,
            early_role: false,
        }
    }
}

/// How the end of the body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FramingSay {
    /// `content-length` for plain answers, chunks for streams.
    Proper,
    /// HTTP/1.1 that ends with the connection.
    UntilClose,
    /// HTTP/1.0 that ends with the connection.
    Http10,
}

/// How usage is reported. All but `Right` and `Running` are faults seen in the wild.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UsageSay {
    /// As asked for, and true.
    Right,
    /// Twice the truth and seven.
    Wrong,
    Negative,
    /// Beyond 2^64.
    Huge,
    /// Not at all, though asked for.
    Missing,
    /// `"usage":null`.
    Null,
    /// Numbers with a fraction.
    Float,
    /// Numbers in quotes.
    Text,
    /// In the finish chunk, whose `choices` is not empty (llama.cpp's completions).
    OnLastChunk,
    /// A running total on every chunk (vLLM's `continuous_usage_stats`).
    Running,
    /// In a chunk of its own although nobody asked (vLLM's `--enable-force-include-usage`).
    Always,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Garbage {
    /// No HTTP at all.
    Head,
    /// A stream with a chunk size that is none; a plain answer with two lengths.
    Framing,
    /// A good head, then bytes that are neither SSE nor JSON.
    Body,
    /// In mid-stream, an event whose data is no JSON.
    Event,
}

/// The body that comes with a `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorBody {
    Vllm,
    OpenAi,
    /// Older vLLM and SGLang.
    Flat,
    Tgi,
    Ollama,
    /// A proxy's page in front of the engine.
    Html,
    Empty,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Status(u16),
    Hangs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eol {
    Lf,
    CrLf,
    Cr,
}

/// What a stream does instead of its next event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Reset,
    Close,
    Stall,
    Error,
}

/// A key of the vocabulary: its name, what its value looks like (empty: it needs none), and what
/// it does.
pub struct Key {
    pub name: &'static str,
    pub value: &'static str,
    pub help: &'static str,
}

macro_rules! keys {
    ($($name:literal $value:literal $help:literal;)*) => {
        /// Every key an act knows.
        pub const KEYS: &[Key] = &[$(Key { name: $name, value: $value, help: $help }),*];
    };
}

keys! {
    "ttft" "TIME" "Time to the first token [50ms]";
    "inter-token" "TIME" "Time between tokens [10ms]";
    "jitter" "TIME" "Lengthen every wait by a random part of this [0ms]";
    "tokens" "N" "Tokens of an answer, if the request allows as many [32]";
    "token-bytes" "N" "Pad every token to this many bytes";
    "reasoning" "N" "The first N tokens of a chat are reasoning";
    "tricky" "" "Text that looks like usage, [DONE] and line ends";
    "finish" "REASON" "Say this finish reason; `none` says null";
    "prompt-tokens" "N" "Claim a prompt of this many tokens";
    "cached" "N" "Claim that so many prompt tokens were cached";
    "usage" "HOW" "right, wrong, negative, huge, missing, null, float, text, on_last_chunk, running or always";
    "no-usage" "" "The same as usage=missing";
    "status" "CODE" "Answer with this status";
    "retry-after" "TEXT" "With a status: the Retry-After field";
    "error-body" "SHAPE" "With a status: vllm, openai, flat, tgi, ollama, html or empty";
    "times" "N" "Faults hit only the first N requests that would have them";
    "every" "N" "Faults hit only every Nth request that would have them";
    "reset-after" "N" "RST after N content events (plain answers: in mid-body)";
    "close-after" "N" "FIN after N content events, the body unfinished";
    "stall-after" "N" "Silence after N content events, until the client leaves";
    "error-after" "N" "An error event after N content events, then a proper end";
    "garbage" "WHERE" "Rubbish in the body, the head, the framing, or as an event [body]";
    "no-done" "" "Leave out data: [DONE]";
    "late-head" "" "Send the head with the first token (llama.cpp)";
    "head-only" "" "Send the head and nothing more, until the client leaves";
    "slow-head" "TIME" "Spread the head's bytes over this time";
    "body-delay" "TIME" "Wait this long between head and body";
    "read-delay" "TIME" "Wait this long before reading the request's body";
    "early" "" "With a status: answer without reading the request's body";
    "hangs" "" "Send nothing at all, until the client leaves";
    "interim" "CODE" "Send a 1xx first [103]";
    "stale" "" "Close a kept connection when a further request arrives on it";
    "drop-idle" "" "Close after a whole answer that promised keep-alive (llama.cpp)";
    "close" "" "Say connection: close and do it";
    "health" "HOW" "GET /health answers this status, or `hangs`";
    "http10" "" "Answer as HTTP/1.0, the body ended by the close";
    "close-delimited" "" "Answer as HTTP/1.1, the body ended by the close";
    "chunk-size" "N" "Cut a stream into HTTP chunks of N bytes, one write each";
    "merge" "N" "Put N events into one HTTP chunk";
    "write-size" "N" "Write N bytes at a time, 1 ms apart";
    "trailers" "" "End a chunked body with trailers";
    "crlf" "" "End SSE lines with CR LF";
    "cr" "" "End SSE lines with CR";
    "bom" "" "Begin a stream with a byte order mark";
    "comments" "" "Put a comment before every event";
    "ping" "TIME" "While silent, send a comment this often";
    "early-role" "" "Send a chat's role chunk before the first token's time";
}

impl Act {
    /// No waits.
    pub fn instant() -> Act {
        Act { ttft: Duration::ZERO, inter_token: Duration::ZERO, ..Act::default() }
    }

    /// Applies `key=value, key=value`; a key whose value is optional may stand alone.
    ///
    /// # Errors
    /// The first pair that is not understood, in words.
    pub fn apply(&mut self, text: &str) -> Result<(), String> {
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some((key, value)) => self.set(key.trim(), value.trim())?,
                None => self.set(pair, "")?,
            }
        }
        Ok(())
    }

    /// Sets one key; an empty value means that none was given.
    ///
    /// # Errors
    /// The key is not in [`KEYS`] (written with `-` or `_`), or the value does not fit it.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let fits = match key.replace('-', "_").as_str() {
            "ttft" => span(value).map(|v| self.ttft = v),
            "inter_token" => span(value).map(|v| self.inter_token = v),
            "jitter" => span(value).map(|v| self.jitter = v),
            "tokens" => number(value).filter(|&v| v <= TOKENS_MAX).map(|v| self.tokens = v),
            "token_bytes" => size(value).map(|v| self.token_bytes = Some(v)),
            "reasoning" => number(value).map(|v| self.reasoning = v),
            "tricky" => flag(value).map(|v| self.tricky = v),
            "finish" => visible(value).map(|v| self.finish = Some(v)),
            "prompt_tokens" => number(value).map(|v| self.prompt_tokens = Some(v)),
            "cached" => number(value).map(|v| self.cached = v),
            "usage" => usage(value).map(|v| self.usage = v),
            "no_usage" => either(value, UsageSay::Missing, UsageSay::Right).map(|v| self.usage = v),
            "status" => code(value, 200..=599).map(|v| self.status = Some(v)),
            "retry_after" => visible(value).map(|v| self.retry_after = Some(v)),
            "error_body" => error_body(value).map(|v| self.error_body = v),
            "times" => number(value).map(|v| self.times = Some(v)),
            "every" => number(value).filter(|&v| v > 0).map(|v| self.every = Some(v)),
            "reset_after" => number(value).map(|v| self.reset_after = Some(v)),
            "close_after" => number(value).map(|v| self.close_after = Some(v)),
            "stall_after" => number(value).map(|v| self.stall_after = Some(v)),
            "error_after" => number(value).map(|v| self.error_after = Some(v)),
            "garbage" => garbage(value).map(|v| self.garbage = Some(v)),
            "no_done" => flag(value).map(|v| self.no_done = v),
            "late_head" => flag(value).map(|v| self.late_head = v),
            "head_only" => flag(value).map(|v| self.head_only = v),
            "slow_head" => span(value).map(|v| self.slow_head = Some(v)),
            "body_delay" => span(value).map(|v| self.body_delay = Some(v)),
            "read_delay" => span(value).map(|v| self.read_delay = Some(v)),
            "early" => flag(value).map(|v| self.early = v),
            "hangs" => flag(value).map(|v| self.hangs = v),
            "interim" if value.is_empty() => self.set("interim", "103").ok(),
            "interim" => code(value, 100..=199).map(|v| self.interim = Some(v)),
            "stale" => flag(value).map(|v| self.stale = v),
            "drop_idle" => flag(value).map(|v| self.drop_idle = v),
            "close" => flag(value).map(|v| self.close = v),
            "health" => health(value).map(|v| self.health = Some(v)),
            "http10" => {
                either(value, FramingSay::Http10, FramingSay::Proper).map(|v| self.framing = v)
            }
            "close_delimited" => {
                either(value, FramingSay::UntilClose, FramingSay::Proper).map(|v| self.framing = v)
            }
            "chunk_size" => size(value).map(|v| self.chunk_size = Some(v)),
            "merge" => number(value).filter(|&v| v > 0).map(|v| self.merge = v),
            "write_size" => size(value).map(|v| self.write_size = Some(v)),
            "trailers" => flag(value).map(|v| self.trailers = v),
            "crlf" => either(value, Eol::CrLf, Eol::Lf).map(|v| self.eol = v),
            "cr" => either(value, Eol::Cr, Eol::Lf).map(|v| self.eol = v),
            "bom" => flag(value).map(|v| self.bom = v),
            "comments" => flag(value).map(|v| self.comments = v),
            "ping" => span(value).filter(|v| !v.is_zero()).map(|v| self.ping = Some(v)),
            "early_role" => flag(value).map(|v| self.early_role = v),
            _ => return Err(format!("mock: unknown key `{}`", shortened(key))),
        };
        fits.ok_or_else(|| format!("mock: `{}` does not fit `{key}`", shortened(value)))
    }

    /// What ends a stream that has sent `content` content events, before its next event.
    pub fn cut(&self, content: u32) -> Option<Cut> {
        [
            (self.reset_after, Cut::Reset),
            (self.close_after, Cut::Close),
            (self.stall_after, Cut::Stall),
            (self.error_after, Cut::Error),
        ]
        .into_iter()
        .find_map(|(after, cut)| (after == Some(content)).then_some(cut))
    }

    /// Whether it holds anything that `times` and `every` may switch off.
    pub fn is_faulty(&self) -> bool {
        *self != self.without_faults()
    }

    /// The same pace, text and encoding with nothing going wrong.
    pub fn without_faults(&self) -> Act {
        Act {
            usage: match self.usage {
                usage @ (UsageSay::OnLastChunk | UsageSay::Running | UsageSay::Always) => usage,
                _ => UsageSay::Right,
            },
            head_only: false,
            finish: None,
            status: None,
            reset_after: None,
            close_after: None,
            stall_after: None,
            error_after: None,
            garbage: None,
            no_done: false,
            slow_head: None,
            body_delay: None,
            read_delay: None,
            early: false,
            hangs: false,
            stale: false,
            ..self.clone()
        }
    }

    /// A wait of `span`, lengthened at random by at most the jitter.
    pub fn wait(&self, span: Duration, rng: &mut Rng) -> Duration {
        // Beyond 584 years the jitter may as well saturate.
        let jitter = u64::try_from(self.jitter.as_nanos()).unwrap_or(u64::MAX);
        span.saturating_add(Duration::from_nanos(rng.below(jitter.saturating_add(1))))
    }
}

/// A long answer is a mistake in a test more often than it is meant: 24 MB of text at most.
const TOKENS_MAX: u32 = 1 << 20;

fn number<T: std::str::FromStr>(value: &str) -> Option<T> {
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok())?
}

fn size(value: &str) -> Option<usize> {
    number(value).filter(|size| (1..=1 << 20).contains(size))
}

fn code(value: &str, within: std::ops::RangeInclusive<u16>) -> Option<u16> {
    number(value).filter(|code| within.contains(code))
}

/// A time on the command line.
///
/// # Errors
/// It is none.
pub fn time(value: &str) -> Result<Duration, String> {
    span(value).ok_or_else(|| "a time like 50ms or 1.5s is expected".to_owned())
}

/// `50ms`, `1.5s`, `200us`, `2m`; a unit is demanded, except of 0.
fn span(value: &str) -> Option<Duration> {
    if value == "0" {
        return Some(Duration::ZERO);
    }
    let unit = value.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (amount, unit) = value.split_at(unit);
    let seconds = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => return None,
    };
    let span = Duration::try_from_secs_f64(amount.parse::<f64>().ok()? * seconds).ok()?;
    (span <= SPAN_MAX).then_some(span)
}

/// Longer is a slip of the unit.
const SPAN_MAX: Duration = Duration::from_hours(24);

fn flag(value: &str) -> Option<bool> {
    match value {
        "" | "yes" | "true" | "1" => Some(true),
        "no" | "false" | "0" => Some(false),
        _ => None,
    }
}

fn either<T>(value: &str, on: T, off: T) -> Option<T> {
    flag(value).map(|yes| if yes { on } else { off })
}

/// What goes into a head or a finish reason as it is.
fn visible(value: &str) -> Option<String> {
    let fits = !value.is_empty() && value.bytes().all(|b| (b' '..0x7f).contains(&b));
    fits.then(|| value.to_owned())
}

fn usage(value: &str) -> Option<UsageSay> {
    Some(match value {
        "right" => UsageSay::Right,
        "wrong" => UsageSay::Wrong,
        "negative" => UsageSay::Negative,
        "huge" => UsageSay::Huge,
        "missing" => UsageSay::Missing,
        "null" => UsageSay::Null,
        "float" => UsageSay::Float,
        "text" => UsageSay::Text,
        "on_last_chunk" => UsageSay::OnLastChunk,
        "running" => UsageSay::Running,
        "always" => UsageSay::Always,
        _ => return None,
    })
}

fn garbage(value: &str) -> Option<Garbage> {
    Some(match value {
        "" | "body" | "yes" => Garbage::Body,
        "head" => Garbage::Head,
        "framing" => Garbage::Framing,
        "event" => Garbage::Event,
        _ => return None,
    })
}

fn health(value: &str) -> Option<Health> {
    match value {
        "hangs" => Some(Health::Hangs),
        status => code(status, 200..=599).map(Health::Status),
    }
}

fn error_body(value: &str) -> Option<ErrorBody> {
    Some(match value {
        "vllm" => ErrorBody::Vllm,
        "openai" => ErrorBody::OpenAi,
        "flat" => ErrorBody::Flat,
        "tgi" => ErrorBody::Tgi,
        "ollama" => ErrorBody::Ollama,
        "html" => ErrorBody::Html,
        "empty" => ErrorBody::Empty,
        _ => return None,
    })
}

fn shortened(text: &str) -> &str {
    let end = text.char_indices().nth(40).map_or(text.len(), |(at, _)| at);
    &text[..end]
}

/// Every key as a flag of its own: `reset_after=3` is `--reset-after 3`.
impl clap::Args for Act {
    fn augment_args(command: clap::Command) -> clap::Command {
        KEYS.iter().fold(command, |command, key| {
            let flag = Arg::new(key.name).long(key.name).help(key.help);
            command.arg(match key.value {
                "" => flag.action(ArgAction::SetTrue),
                // Alone they mean the usual case.
                value if OPTIONAL.contains(&key.name) => {
                    flag.value_name(value).num_args(0..=1).default_missing_value("")
                }
                value => flag.value_name(value),
            })
        })
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Act::augment_args(command)
    }
}

const OPTIONAL: [&str; 2] = ["garbage", "interim"];

impl clap::FromArgMatches for Act {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Act, clap::Error> {
        let mut act = Act::default();
        act.update_from_arg_matches(matches)?;
        Ok(act)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for key in KEYS {
            if key.value.is_empty() {
                if matches.get_flag(key.name) {
                    self.set(key.name, "").map_err(unfit)?;
                }
            } else if let Some(value) = matches.get_one::<String>(key.name) {
                self.set(key.name, value).map_err(unfit)?;
            }
        }
        Ok(())
    }
}

fn unfit(reason: String) -> clap::Error {
    clap::Error::raw(clap::error::ErrorKind::ValueValidation, reason + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the vocabulary, the parser and the flags cannot drift apart. Method: every key of
    /// the table is set with a value that fits its placeholder, as text and as a flag.
    #[test]
    fn every_key_is_understood_everywhere_and_changes_the_act() {
        for key in KEYS {
            let value = match (key.name, key.value) {
                (_, "") => "",
                (_, "TIME") => "7ms",
                (_, "N") => "7",
                ("interim", _) => "102",
                ("status", _) => "503",
                ("usage", _) => "wrong",
                ("error-body", _) => "html",
                ("garbage", _) => "head",
                ("health", _) => "hangs",
                _ => "length",
            };
            let mut set = Act::default();
            set.set(key.name, value).unwrap();
            assert_ne!(set, Act::default(), "{}", key.name);
            let mut applied = Act::default();
            let name = key.name.replace('-', "_");
            let pair = if value.is_empty() { name } else { format!("{name} = {value}") };
            applied.apply(&format!(" {pair} ,, ")).unwrap();
            assert_eq!(set, applied, "{}", key.name);
            let flag = format!("--{}", key.name);
            let line = ["mock", &flag, value];
            let line = if value.is_empty() { &line[..2] } else { &line[..] };
            assert_eq!(set, from_flags(line).unwrap(), "{}", key.name);
        }
    }

    fn from_flags(line: &[&str]) -> Result<Act, clap::Error> {
        use clap::{Args, FromArgMatches};
        let command = Act::augment_args(clap::Command::new("mock"));
        Act::from_arg_matches(&command.try_get_matches_from(line)?)
    }

    #[test]
    fn what_does_not_fit_is_named() {
        for (text, named) in [
            ("tokens=-1", "`-1` does not fit `tokens`"),
            ("tokens=", "`` does not fit `tokens`"),
            ("tokens=99999999", "does not fit"),
            ("ttft=5", "`5` does not fit `ttft`"),
            ("ttft=1e9m", "does not fit"),
            ("status=99", "does not fit"),
            ("status=600", "does not fit"),
            ("status=OK", "does not fit"),
            ("every=0", "does not fit"),
            ("no_done=perhaps", "does not fit"),
            ("retry_after=a\nb", "does not fit"),
            ("chunk_size=0", "does not fit"),
            ("rest_after=1", "unknown key `rest_after`"),
        ] {
            let error = Act::default().apply(text).unwrap_err();
            assert!(error.contains(named), "{text}: {error}");
        }
        assert!(from_flags(&["mock", "--ttft", "soon"]).is_err());
    }

    #[test]
    fn times_are_read_with_their_unit() {
        for (text, micros) in
            [("0", 0), ("200us", 200), ("50ms", 50_000), ("1.5s", 1_500_000), ("2m", 120_000_000)]
        {
            assert_eq!(span(text), Some(Duration::from_micros(micros)), "{text}");
        }
        for text in ["", "5", "ms", "-5ms", "5 ms", "5h", "1..2s", "é"] {
            assert_eq!(span(text), None, "{text}");
        }
    }

    #[test]
    fn a_cut_waits_for_its_event_and_the_first_in_order_wins() {
        let mut act = Act::default();
        act.apply("error_after=2, reset_after=2, close_after=0").unwrap();
        assert_eq!(
            [0, 1, 2, 3].map(|content| act.cut(content)),
            [Some(Cut::Close), None, Some(Cut::Reset), None]
        );
    }

    #[test]
    fn pace_and_encoding_are_no_faults() {
        let mut act = Act::instant();
        act.apply("tokens=9, late_head, crlf, chunk_size=3, http10").unwrap();
        for usage in ["right", "running", "always", "on_last_chunk"] {
            act.set("usage", usage).unwrap();
            assert!(!act.is_faulty(), "{usage}");
        }
        act.set("usage", "right").unwrap();
        for fault in ["status=503", "no_done", "stall_after=0", "usage=wrong", "head_only"] {
            let mut bad = act.clone();
            bad.apply(fault).unwrap();
            assert!(bad.is_faulty(), "{fault}");
            assert_eq!(bad.without_faults(), act, "{fault}");
        }
    }

    #[test]
    fn jitter_only_lengthens() {
        let mut act = Act::default();
        let mut rng = Rng::seeded(7);
        let span = Duration::from_millis(3);
        assert_eq!(act.wait(span, &mut rng), span);
        act.jitter = Duration::from_millis(2);
        let waits: Vec<_> = (0..1_000).map(|_| act.wait(span, &mut rng)).collect();
        assert!(waits.iter().all(|wait| (span..=span + act.jitter).contains(wait)));
        assert!(waits.iter().any(|wait| *wait > span + act.jitter / 2));
    }
}
