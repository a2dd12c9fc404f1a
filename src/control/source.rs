//! Where the configuration comes from, and how its problems are shown.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::pure::board::Registry;
use crate::pure::plan::{self, MadeKeys, Plan, Problem};

/// A configuration that can be read again at each reload.
#[derive(Clone, Debug)]
pub enum Source {
    File(PathBuf),
    /// Held in memory, for the demo.
    Text(String),
}

/// A plan, and the text that it was built from.
#[derive(Debug)]
pub struct Loaded {
    pub plan: Plan,
    pub text: String,
}

/// Why there is no plan.
#[derive(Debug)]
pub enum NoPlan {
    Unreadable(String),
    Refused { text: String, problems: Vec<Problem> },
}

impl Source {
    /// Reads the file and the secrets and tokenizers that it names, and builds the plan with the keys
    /// that were made at run time. Blocks on the disk.
    ///
    /// # Errors
    /// The file cannot be read, or it is refused whole.
    pub fn load(&self, made: &MadeKeys, registry: &mut Registry) -> Result<Loaded, NoPlan> {
        let text = match self {
            Source::Text(text) => text.clone(),
            Source::File(path) => read(path, CONFIG_BYTES_MAX)
                .map_err(|error| NoPlan::Unreadable(format!("{}: {error}", path.display())))?,
        };
        self.build(text, made, registry)
    }

    /// [`Source::load`] with a text that was read before.
    ///
    /// # Errors
    /// A secret cannot be read any more, or names have run out.
    pub fn build(
        &self,
        text: String,
        made: &MadeKeys,
        registry: &mut Registry,
    ) -> Result<Loaded, NoPlan> {
        let env = |name: &str| std::env::var(name).ok();
        let files = |path: &str| {
            read(&self.beside(path), FILE_BYTES_MAX).map_err(|error| format!("{path}: {error}"))
        };
        match Plan::build_with(&text, made, &env, &files, registry) {
            Ok(plan) => Ok(Loaded { plan, text }),
            Err(problems) => Err(NoPlan::Refused { text, problems }),
        }
    }

    /// A path that the file names: relative ones start at the file's own folder.
    pub fn beside(&self, path: &str) -> PathBuf {
        match self {
            Source::Text(_) => PathBuf::from(path),
            Source::File(file) => file.parent().unwrap_or(Path::new("")).join(path),
        }
    }

    /// The name to show.
    pub fn name(&self) -> String {
        match self {
            Source::Text(_) => "(built in)".to_owned(),
            Source::File(path) => path.display().to_string(),
        }
    }
}

/// Larger than any plan that a person or a script has a use for; a device file ends here.
const CONFIG_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Of a file that it names: tokenizers have up to 35 MB, and secrets a bound of their own.
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;

pub(super) fn read(path: &Path, bytes_max: u64) -> Result<String, String> {
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    match file.take(bytes_max + 1).read_to_string(&mut text) {
        Err(error) => Err(error.to_string()),
        Ok(_) if text.len() as u64 > bytes_max => Err(format!("longer than {bytes_max} bytes")),
        Ok(_) => Ok(text),
    }
}

impl NoPlan {
    /// For a terminal: each problem with the place in the file and a hint. The last line names
    /// every route, model and so on that has one.
    pub fn report(&self, file: &str) -> String {
        match self {
            NoPlan::Unreadable(why) => format!("error: the configuration cannot be read: {why}\n"),
            NoPlan::Refused { text, problems } => {
                let mut report = String::new();
                for problem in problems.iter().take(SHOWN_MAX) {
                    one(&mut report, problem, text, file);
                }
                if problems.len() > SHOWN_MAX {
                    let _ = writeln!(report, "... and {} more\n", problems.len() - SHOWN_MAX);
                }
                report.push_str(&plan::summary(problems));
                report.push('\n');
                report
            }
        }
    }
}

const SHOWN_MAX: usize = 100;

/// As rustc shows it.
fn one(out: &mut String, problem: &Problem, text: &str, file: &str) {
    let Problem { line, column, field, message, hint, owner } = problem;
    let margin = " ".repeat(line.to_string().len());
    // Writing to a string does not fail.
    let _ = writeln!(out, "error: {message}");
    let _ = write!(out, "{margin}--> {file}:{line}:{column}");
    if !field.is_empty() {
        let _ = write!(out, ", {field}");
    }
    if let Some((kind, name)) = owner {
        let _ = write!(out, " ({kind} {name})");
    }
    out.push('\n');
    if let Some((snippet, caret)) = snippet(text, *line as usize, *column as usize) {
        let indent = " ".repeat(caret);
        let _ = writeln!(out, "{margin} |\n{line} | {snippet}\n{margin} | {indent}^");
    }
    if let Some(hint) = hint {
        let _ = writeln!(out, "{margin} = help: {hint}");
    }
    out.push('\n');
}

/// The line, or the part of it around the place when it is long, and where the caret goes. Values
/// of fields that hold secrets are covered: the report may end in a log.
fn snippet(text: &str, line: usize, column: usize) -> Option<(String, usize)> {
    let line: Vec<char> = text.lines().nth(line.checked_sub(1)?)?.chars().collect();
    let covered = cover(&line);
    let at = column.saturating_sub(1).min(covered.len());
    let from = if at > WIDTH / 2 && covered.len() > WIDTH { at - WIDTH / 2 } else { 0 };
    let shown = covered[from..].iter().take(WIDTH);
    // Tabs would move the caret, other control characters the terminal.
    let shown: String = shown.map(|&c| if c.is_control() { ' ' } else { c }).collect();
    (!shown.trim().is_empty()).then_some((shown, at - from))
}

const WIDTH: usize = 96;

/// Everything after a secret's name, up to the end of its value, as asterisks.
fn cover(line: &[char]) -> Vec<char> {
    let mut out = line.to_vec();
    for name in ["api_key", "token", "redis", "password", "secret"] {
        let name: Vec<char> = name.chars().collect();
        let mut from = 0;
        while let Some(found) = line[from..].windows(name.len()).position(|w| w == name) {
            let after = from + found + name.len();
            from = after;
            // Its value follows a colon; a longer word (`first_token: 60s`) is another field.
            let starts = after == name.len() || !is_word(line[after - name.len() - 1]);
            let rest = line[after..].iter().take_while(|&&c| matches!(c, '"' | '\'' | ' '));
            let colon = after + rest.count();
            if !starts || line.get(colon) != Some(&':') {
                continue;
            }
            let mut quote = None;
            for index in colon + 1..line.len() {
                match (quote, line[index]) {
                    (None, ',' | '}' | '{') => break,
                    (None, c @ ('"' | '\'')) => quote = Some(c),
                    (Some(open), c) if c == open => quote = None,
                    (_, ' ') => {}
                    _ => out[index] = '*',
                }
            }
        }
    }
    out
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str, line: usize, column: usize) -> String {
        let (snippet, caret) = snippet(text, line, column).expect("a line");
        format!("{snippet}\n{}^", " ".repeat(caret))
    }

    #[test]
    fn the_caret_stands_under_the_place() {
        let text = "routes:\n  - name: x\n\tstrategy: foo\n";
        assert_eq!(shown(text, 2, 5), "  - name: x\n    ^");
        assert_eq!(shown(text, 3, 12), " strategy: foo\n           ^");
        assert_eq!(snippet(text, 9, 1), None);
        assert_eq!(snippet(text, 0, 0), None);
        // In a long line the caret stays under its character.
        let long: String = ('a'..='z').cycle().take(10_000).collect();
        for column in [1, 40, 60, 5_000, 10_000, 10_001] {
            let (snippet, caret) = snippet(&long, 1, column).expect("a line");
            let expected = long.as_bytes().get(column - 1).map(|&byte| char::from(byte));
            assert_eq!(snippet.chars().nth(caret), expected, "{column}");
            assert!(snippet.len() <= WIDTH);
        }
    }

    #[test]
    fn secrets_are_covered_wherever_they_stand_in_the_line() {
        for line in [
            "api_key: sk-123",
            "  - { name: a, api_key: sk-123, weight: 1 }",
            "{\"api_key\": \"sk-123\", \"weigth\": 3}",
            "{\"api_key\":\"sk-,}123\",\"x\":1}",
            "token: 'sk-123'",
            "fleet: { redis: \"redis://:sk-123@h\" }",
        ] {
            let covered: String = cover(&line.chars().collect::<Vec<_>>()).iter().collect();
            assert!(!covered.contains("sk-") && !covered.contains("123"), "{covered}");
            assert_eq!(covered.chars().count(), line.chars().count());
        }
        for line in ["first_token: 60s", "name: token", "tokenizer: auto", "weight: 3"] {
            assert_eq!(cover(&line.chars().collect::<Vec<_>>()).iter().collect::<String>(), line);
        }
    }

    #[test]
    fn a_refused_file_is_shown_with_its_problems_and_ends_in_their_owners() {
        let text = "pools:\n  p: { backends: [ { name: u1, url: \"http://u1\" } ] }\n\
                    routes:\n  - { name: chat, match: { model: [m] }, pool: q }\n";
        let source = Source::Text(text.to_owned());
        let refusal = source
            .load(&MadeKeys::default(), &mut Registry::new())
            .expect_err("pool q is not there");
        let report = refusal.report("forebay.yaml");
        assert!(report.contains("--> forebay.yaml:4:"), "{report}");
        assert!(report.contains("routes[0].pool"), "{report}");
        assert!(report.lines().any(|line| line.trim_end().ends_with('^')), "{report}");
        assert!(report.lines().last().is_some_and(|line| line.contains("route chat")), "{report}");
    }

    #[test]
    fn what_cannot_be_read_is_said() {
        let missing = Source::File("/nowhere/forebay.yaml".into());
        let report = missing
            .load(&MadeKeys::default(), &mut Registry::new())
            .expect_err("missing")
            .report("x");
        assert!(report.contains("/nowhere/forebay.yaml"), "{report}");
        let endless = Source::File("/dev/zero".into());
        let report = endless
            .load(&MadeKeys::default(), &mut Registry::new())
            .expect_err("endless")
            .report("x");
        assert!(report.contains("longer than"), "{report}");
        assert_eq!(missing.beside("up.key"), Path::new("/nowhere/up.key"));
        assert_eq!(missing.beside("/etc/up.key"), Path::new("/etc/up.key"));
    }
}
