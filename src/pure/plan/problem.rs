//! What is wrong with a file, said so that its writer finds the place and the right word.

use std::fmt;

/// Something wrong in the file. Never holds the value of a secret or of a variable: values are
/// quoted as the file writes them (`${TOKEN}`), those of secrets not at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub column: u32,
    /// As `routes[2].match.model`; empty for the file as a whole.
    pub field: String,
    pub message: String,
    pub hint: Option<String>,
    /// The route, model, pool or so that it belongs to: kind and name.
    pub owner: Option<(&'static str, String)>,
}

impl Problem {
    /// The problem in the manner of rustc, for a terminal; `file` is the name to show.
    pub fn in_file(&self, file: &str) -> String {
        let mut text =
            format!("error: {}\n  --> {file}:{}:{}", self.message, self.line, self.column);
        if !self.field.is_empty() {
            text.push_str(", ");
            text.push_str(&self.field);
        }
        if let Some((kind, name)) = &self.owner {
            text.push_str(&format!(" ({kind} {name})"));
        }
        if let Some(hint) = &self.hint {
            text.push_str("\n  = help: ");
            text.push_str(hint);
        }
        text
    }
}

/// One line: `5:15: routes[0].strategy: unknown strategy ... (route chat); help: ...`.
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.line, self.column)?;
        if !self.field.is_empty() {
            write!(f, "{}: ", self.field)?;
        }
        f.write_str(&self.message)?;
        if let Some((kind, name)) = &self.owner {
            write!(f, " ({kind} {name})")?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "; help: {hint}")?;
        }
        Ok(())
    }
}

/// The last line of a refusal: how many problems, and every route, model and so on that has one,
/// so that the line alone says whom to call.
pub fn summary(problems: &[Problem]) -> String {
    const OWNERS_MAX: usize = 20;
    let mut owners: Vec<String> = Vec::new();
    for (kind, name) in problems.iter().filter_map(|p| p.owner.as_ref()) {
        let owner = format!("{kind} {name}");
        if !owners.contains(&owner) {
            if owners.len() == OWNERS_MAX {
                owners.push("...".to_owned());
                break;
            }
            owners.push(owner);
        }
    }
    let count = problems.len();
    let noun = if count == 1 { "problem" } else { "problems" };
    if owners.is_empty() {
        format!("configuration refused: {count} {noun}")
    } else {
        format!("configuration refused: {count} {noun}: {}", owners.join(", "))
    }
}

/// Something the file asks for that this version reads and does not do, or advice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    pub line: u32,
    pub column: u32,
    /// The first place.
    pub field: String,
    pub message: String,
    pub severity: Severity,
    /// How many places of the file it holds for.
    pub places: usize,
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.line, self.column, self.field, self.message)?;
        match self.places {
            0 | 1 => Ok(()),
            more => write!(f, " (and {} more places)", more - 1),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Allowed, and probably not meant.
    Advice,
    /// A wish that goes unfulfilled.
    Ignored,
    /// A limit or a budget that is not enforced: money runs.
    UnenforcedLimit,
}

impl Severity {
    /// The word for logs.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Advice => "advice",
            Severity::Ignored => "ignored",
            Severity::UnenforcedLimit => "unenforced-limit",
        }
    }
}

/// "did you mean", or the names that there are, at most a dozen of them.
pub(super) fn suggest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    const LISTED_MAX: usize = 12;
    let known: Vec<&str> = known.into_iter().collect();
    if let Some(near) = nearest(wrong, known.iter().copied()) {
        return Some(format!("did you mean `{near}`?"));
    }
    if known.is_empty() {
        return None;
    }
    let mut listed: Vec<String> =
        known.iter().take(LISTED_MAX).map(|name| format!("`{name}`")).collect();
    if known.len() > LISTED_MAX {
        listed.push(format!("... ({} in all)", known.len()));
    }
    Some(format!("known: {}", listed.join(", ")))
}

/// The known word fewest edits away, if that is at most a third of its length.
pub(super) fn nearest<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // The cost is the product of the lengths; a word longer than this is no slip of the hand.
    const LENGTH_MAX: usize = 64;
    if wrong.len() > LENGTH_MAX {
        return None;
    }
    let plain = |word: &str| word.to_ascii_lowercase().replace('_', "-");
    let wrong = plain(wrong);
    known
        // Cheap first: there may be thousands, and the distance is no less than this difference.
        .filter(|word| word.len() <= LENGTH_MAX && word.len().abs_diff(wrong.len()) <= 12)
        .filter_map(|word| {
            let distance = edits(&wrong, &plain(word));
            (distance <= word.chars().count().div_ceil(3).min(4)).then_some((distance, word))
        })
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, word)| word)
}

/// Edit distance with neighbours swapped as one edit (optimal string alignment).
fn edits(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().collect();
    let b: Vec<char> = b.chars().collect();
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_agree_with_the_recursive_definition() {
        fn slow(a: &[u8], b: &[u8]) -> usize {
            match (a, b) {
                ([], rest) | (rest, []) => rest.len(),
                ([x, a1 @ ..], [y, b1 @ ..]) => {
                    let mut best = (slow(a1, b) + 1)
                        .min(slow(a, b1) + 1)
                        .min(slow(a1, b1) + usize::from(x != y));
                    if let ([_, x2, a2 @ ..], [_, y2, b2 @ ..]) = (a, b)
                        && x == y2
                        && y == x2
                    {
                        best = best.min(slow(a2, b2) + 1);
                    }
                    best
                }
            }
        }
        let mut words = vec![String::new()];
        for length in 0..4 {
            let longer: Vec<String> = words
                .iter()
                .filter(|word| word.len() == length)
                .flat_map(|word| ["a", "b", "c"].map(|c| format!("{word}{c}")))
                .collect();
            words.extend(longer);
        }
        for a in &words {
            for b in words.iter().filter(|b| b.len() <= 3) {
                assert_eq!(edits(a, b), slow(a.as_bytes(), b.as_bytes()), "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn near_words_are_suggested_and_far_ones_listed() {
        let known = ["least-requests", "weighted-split", "prefix"];
        assert_eq!(
            suggest("wieghted_split", known).as_deref(),
            Some("did you mean `weighted-split`?")
        );
        assert_eq!(
            suggest("least_request", known).as_deref(),
            Some("did you mean `least-requests`?")
        );
        assert_eq!(
            suggest("random", known).as_deref(),
            Some("known: `least-requests`, `weighted-split`, `prefix`")
        );
        assert_eq!(suggest("x", std::iter::empty::<&str>()), None);
    }
}
