//! The reader: takes fields from the tree, one call per field, and notes whatever is wrong.
//!
//! A field that is asked for is thereby known, so the code that reads an area *is* its schema:
//! what nobody asked for is reported as unknown with the nearest name that somebody did ask for.
//! Reading goes on after every mistake; a value that is wrong reads as absent.

use std::time::Duration;

use super::problem::{Notice, Problem, Severity, suggest};
use super::tree::{Entry, Node, Pos, Value};
use super::value::{self, Wrong};
use super::{NotYet, Pattern};
use crate::pure::units::NanoUsd;

/// What reading has found so far, and where values may come from.
pub(super) struct Reader<'a> {
    env: &'a dyn Fn(&str) -> Option<String>,
    files: &'a dyn Fn(&str) -> Result<String, String>,
    not_yet: &'static [NotYet],
    pub problems: Vec<Problem>,
    pub notices: Vec<Notice>,
    /// The route, model or so that is being read: problems belong to it.
    owner: Option<(&'static str, String)>,
    /// Kind and name of what exists and could not be read: a reference to it is no second problem.
    pub failed: Vec<(&'static str, String)>,
    /// What variables turned out to hold, and how the file writes them: never to be said.
    variables: Vec<(String, String)>,
    /// The notice for each shape of field that this version does not act on.
    unbuilt: Vec<(&'static str, usize)>,
}

/// A node and its place in the schema.
#[derive(Clone)]
pub(super) struct Item<'a> {
    pub node: &'a Node,
    /// As the operator sees it: `routes[2].match.model`.
    pub path: String,
    /// The same without numbers and names: `routes[].match.model`, `pools.*.url`.
    shape: String,
}

/// A name from the file that must exist elsewhere in it, with its place.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub name: String,
    pub pos: Pos,
    pub path: String,
}

impl<'a> Item<'a> {
    pub(super) fn root(node: &'a Node) -> Item<'a> {
        Item { node, path: String::new(), shape: String::new() }
    }

    pub(super) fn pos(&self) -> Pos {
        self.node.pos
    }

    /// Member `name`: `shape` is the name again, or `*` where names are the operator's.
    fn member(&self, name: &str, shape: &str, node: &'a Node) -> Item<'a> {
        let join = |a: &str, b: &str| {
            if a.is_empty() { b.to_owned() } else { format!("{a}.{b}") }
        };
        Item { node, path: join(&self.path, name), shape: join(&self.shape, shape) }
    }

    fn element(&self, index: usize, node: &'a Node) -> Item<'a> {
        Item { node, path: format!("{}[{index}]", self.path), shape: format!("{}[]", self.shape) }
    }

    /// What the node is, in words.
    fn kind(&self) -> &'static str {
        match &self.node.value {
            Value::Null => "nothing",
            Value::Scalar(_) => "a single value",
            Value::List(_) => "a list",
            Value::Map(_) => "a map",
        }
    }

    fn elements(&self) -> Option<Vec<Item<'a>>> {
        match &self.node.value {
            Value::List(nodes) => {
                Some(nodes.iter().enumerate().map(|(i, node)| self.element(i, node)).collect())
            }
            _ => None,
        }
    }
}

/// The members of one map while they are being asked for.
pub(super) struct Fields<'a> {
    item: Item<'a>,
    entries: &'a [Entry],
    known: Vec<&'static str>,
}

impl<'a> Fields<'a> {
    /// The member read by `read`; absent and null are `None`, and so is what is wrong.
    pub(super) fn get<T>(
        &mut self,
        r: &mut Reader<'a>,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'a>, &Item<'a>) -> Option<T>,
    ) -> Option<T> {
        self.known.push(name);
        let entry = self.entries.iter().find(|entry| entry.key == name)?;
        if matches!(entry.node.value, Value::Null) {
            return None;
        }
        let item = self.item.member(name, name, &entry.node);
        r.note_unbuilt(&item, entry.pos);
        read(r, &item)
    }

    /// As [`Fields::get`], but absence is a problem.
    pub(super) fn need<T>(
        &mut self,
        r: &mut Reader<'a>,
        name: &'static str,
        hint: &str,
        read: impl FnOnce(&mut Reader<'a>, &Item<'a>) -> Option<T>,
    ) -> Option<T> {
        if !self.has(name) {
            self.known.push(name);
            let path = self.item.member(name, name, self.item.node).path;
            r.problem(
                self.item.pos(),
                &path,
                format!("`{name}` is missing"),
                Some(hint.to_owned()),
            );
            return None;
        }
        self.get(r, name, read)
    }

    /// Present and not null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.entries
            .iter()
            .any(|entry| entry.key == name && !matches!(entry.node.value, Value::Null))
    }

    pub(super) fn item(&self) -> &Item<'a> {
        &self.item
    }

    fn report_unknown(&self, r: &mut Reader<'a>) {
        for entry in self.entries {
            if !self.known.contains(&entry.key.as_str()) && !r.full() {
                let path = self.item.member(&entry.key, &entry.key, &entry.node).path;
                let hint = suggest(&entry.key, self.known.iter().copied());
                r.problem(
                    entry.pos,
                    &path,
                    format!("unknown field `{}`", printable(&entry.key)),
                    hint,
                );
            }
        }
    }
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        env: &'a dyn Fn(&str) -> Option<String>,
        files: &'a dyn Fn(&str) -> Result<String, String>,
        not_yet: &'static [NotYet],
        problems: Vec<Problem>,
    ) -> Reader<'a> {
        Reader {
            env,
            files,
            not_yet,
            problems,
            notices: Vec::new(),
            owner: None,
            failed: Vec::new(),
            unbuilt: Vec::new(),
            variables: Vec::new(),
        }
    }

    pub(super) fn problem(&mut self, pos: Pos, path: &str, message: String, hint: Option<String>) {
        if self.full() {
            return;
        }
        self.problems.push(Problem {
            line: pos.line,
            column: pos.column,
            field: printable(path),
            message: self.masked(message),
            hint: hint.map(|hint| self.masked(hint)),
            owner: self.owner.clone().map(|(kind, name)| (kind, self.masked(name))),
        });
    }

    /// `text` with the values of variables put back to what the file says. Here, at the one place
    /// that all messages pass, because a name made by a variable is quoted by whoever misses it.
    fn masked(&self, text: String) -> String {
        self.variables.iter().fold(text, |text, (value, written)| text.replace(value, written))
    }

    /// No more than this many are reported: nobody reads on, and a suggestion costs a search.
    fn full(&self) -> bool {
        const PROBLEMS_MAX: usize = 500;
        self.problems.len() >= PROBLEMS_MAX
    }

    /// Something wrong with an item's value.
    pub(super) fn wrong(&mut self, item: &Item<'a>, message: String, hint: Option<String>) {
        self.problem(item.pos(), &item.path, message, hint);
    }

    pub(super) fn notice(&mut self, pos: Pos, path: &str, message: String, severity: Severity) {
        const NOTICES_MAX: usize = 200;
        if self.notices.len() >= NOTICES_MAX {
            return;
        }
        self.notices.push(Notice {
            line: pos.line,
            column: pos.column,
            field: printable(path),
            message: self.masked(message),
            severity,
            places: 1,
        });
    }

    /// One notice per shape of field, however many places have it.
    fn note_unbuilt(&mut self, item: &Item<'a>, pos: Pos) {
        let Some(unbuilt) = self.not_yet.iter().find(|row| row.shape == item.shape) else {
            return;
        };
        if item.node.scalar().is_some_and(|value| unbuilt.except.contains(&value)) {
            return;
        }
        let message = format!("`{}` is {}", last_word(unbuilt.shape), unbuilt.message);
        if let Some(&(_, first)) = self.unbuilt.iter().find(|(shape, _)| *shape == unbuilt.shape) {
            self.notices[first].places += 1;
            return;
        }
        let place = self.notices.len();
        self.notice(pos, &item.path, message, unbuilt.severity);
        if self.notices.len() > place {
            self.unbuilt.push((unbuilt.shape, place));
        }
    }

    /// Reads under an owner, whom the problems then name.
    pub(super) fn owned<T>(
        &mut self,
        kind: &'static str,
        name: &str,
        read: impl FnOnce(&mut Reader<'a>) -> T,
    ) -> T {
        let before = self.owner.replace((kind, printable(name)));
        let value = read(self);
        self.owner = before;
        value
    }

    // ---- shapes

    /// A map with fixed members, all of which `read` must ask for.
    pub(super) fn fields<T>(
        &mut self,
        item: &Item<'a>,
        read: impl FnOnce(&mut Reader<'a>, &mut Fields<'a>) -> Option<T>,
    ) -> Option<T> {
        let Value::Map(entries) = &item.node.value else {
            self.wrong(
                item,
                format!("a map of fields is expected here, not {}", item.kind()),
                None,
            );
            return None;
        };
        let mut fields = Fields { item: item.clone(), entries, known: Vec::new() };
        let value = read(self, &mut fields);
        fields.report_unknown(self);
        value
    }

    /// A map whose keys are the operator's names. Null members stay: `small: ~` is a model.
    pub(super) fn named(&mut self, item: &Item<'a>) -> Vec<(Named, Item<'a>)> {
        let Value::Map(entries) = &item.node.value else {
            self.wrong(
                item,
                format!("a map from names is expected here, not {}", item.kind()),
                None,
            );
            return Vec::new();
        };
        let mut members = Vec::with_capacity(entries.len());
        for entry in entries {
            let member = item.member(&entry.key, "*", &entry.node);
            if let Some(complaint) = name_complaint(&entry.key) {
                self.problem(entry.pos, &item.path, complaint, None);
                continue;
            }
            let named =
                Named { name: entry.key.clone(), pos: entry.pos, path: member.path.clone() };
            members.push((named, member));
        }
        members
    }

    pub(super) fn list(&mut self, item: &Item<'a>) -> Vec<Item<'a>> {
        item.elements().unwrap_or_else(|| {
            self.wrong(item, format!("a list is expected here, not {}", item.kind()), None);
            Vec::new()
        })
    }

    /// Every element of a list (or the one) by `read`; wrong ones are left out.
    pub(super) fn all<T>(
        &mut self,
        item: &Item<'a>,
        mut read: impl FnMut(&mut Reader<'a>, &Item<'a>) -> Option<T>,
    ) -> Vec<T> {
        let items = item.elements().unwrap_or_else(|| vec![item.clone()]);
        items.iter().filter_map(|item| read(self, item)).collect()
    }

    // ---- scalars

    /// The value with `${VAR}` put in; `None` and a problem where it is no single value.
    fn scalar(&mut self, item: &Item<'a>) -> Option<String> {
        match &item.node.value {
            Value::Scalar(text) => self.expand(item, text),
            Value::Null => {
                self.wrong(item, "a value is missing here".to_owned(), None);
                None
            }
            Value::List(_) | Value::Map(_) => {
                let message = format!("a single value is expected here, not {}", item.kind());
                self.wrong(item, message, None);
                None
            }
        }
    }

    /// `${VAR}` and `${VAR:-default}`; `$${` is a plain `${`.
    fn expand(&mut self, item: &Item<'a>, text: &str) -> Option<String> {
        // A variable is put in once and not looked into, so what comes out stays in proportion.
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            let (before, after) = rest.split_at(at);
            if let Some(before) = before.strip_suffix('$') {
                out.push_str(before);
                out.push_str("${");
                rest = &after[2..];
                continue;
            }
            out.push_str(before);
            let Some(end) = after.find('}') else {
                let hint = "write `$${` for a plain `${`".to_owned();
                self.wrong(item, "`${` without a closing `}`".to_owned(), Some(hint));
                return None;
            };
            let inside = &after[2..end];
            let (name, default) = match inside.split_once(":-") {
                Some((name, default)) => (name, Some(default)),
                None => (inside, None),
            };
            let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
            if name.is_empty() || !name.bytes().all(word) || name.as_bytes()[0].is_ascii_digit() {
                let message = format!("`${{{}}}` names no variable", printable(inside));
                self.wrong(item, message, Some("write `${NAME}` or `${NAME:-default}`".to_owned()));
                return None;
            }
            match (self.env)(name).filter(|value| default.is_none() || !value.is_empty()) {
                Some(value) => {
                    out.push_str(&value);
                    self.note_variable(name, value);
                }
                None if default.is_some() => out.push_str(default.unwrap_or_default()),
                None => {
                    let message = format!("the environment has no variable `{name}`");
                    let hint = format!("set it, or write `${{{name}:-default}}`");
                    self.wrong(item, message, Some(hint));
                    return None;
                }
            }
            rest = &after[end + 1..];
        }
        out.push_str(rest);
        Some(out)
    }

    fn note_variable(&mut self, name: &str, value: String) {
        // A shorter one is no secret, and would be found inside of ordinary words.
        const MASKED_MIN: usize = 6;
        let known = self.variables.iter().any(|(known, _)| *known == value);
        if value.len() >= MASKED_MIN && !known {
            self.variables.push((value, format!("${{{name}}}")));
            // A value may hold another: the longer one is put back first.
            self.variables.sort_by_key(|(value, _)| std::cmp::Reverse(value.len()));
        }
    }

    /// A value by one of the parsers of [`value`].
    pub(super) fn parsed<T>(
        &mut self,
        item: &Item<'a>,
        parse: impl FnOnce(&str) -> Result<T, Wrong>,
    ) -> Option<T> {
        let text = self.scalar(item)?;
        match parse(&text) {
            Ok(value) => Some(value),
            Err(wrong) => {
                let message = wrong.message_for(&shown(item));
                // A hint that repeats the value must not give a variable's content away.
                let hint = wrong.hint.filter(|_| item.node.scalar() == Some(text.as_str()));
                self.wrong(item, message, hint);
                None
            }
        }
    }

    /// What a file holds that is no secret, or why it cannot be read.
    pub(super) fn file(&self, path: &str) -> Result<String, String> {
        (self.files)(path)
    }

    /// Any text but the empty one.
    pub(super) fn text(&mut self, item: &Item<'a>) -> Option<String> {
        let text = self.scalar(item)?;
        if text.is_empty() || text.contains('\0') {
            self.wrong(item, "this must not be empty".to_owned(), None);
            return None;
        }
        Some(text)
    }

    /// A name: visible, without blanks at its ends, of bounded length.
    pub(super) fn name(&mut self, item: &Item<'a>) -> Option<String> {
        let text = self.scalar(item)?;
        if let Some(complaint) = name_complaint(&text) {
            self.wrong(item, complaint, None);
            return None;
        }
        Some(text)
    }

    /// A name that must exist elsewhere.
    pub(super) fn reference(&mut self, item: &Item<'a>) -> Option<Named> {
        let name = self.name(item)?;
        Some(Named { name, pos: item.pos(), path: item.path.clone() })
    }

    pub(super) fn pattern(&mut self, item: &Item<'a>) -> Option<Pattern> {
        self.text(item)?;
        self.parsed(item, value::pattern)
    }

    /// A whole number within `least..=most`.
    pub(super) fn integer(&mut self, item: &Item<'a>, least: u64, most: u64) -> Option<u64> {
        let number = self.parsed(item, value::integer)?;
        self.within(item, number, least, most, "")
    }

    /// As [`Reader::integer`], for what is held in 32 bits.
    pub(super) fn small(&mut self, item: &Item<'a>, least: u32, most: u32) -> Option<u32> {
        let number = self.integer(item, u64::from(least), u64::from(most))?;
        u32::try_from(number).ok()
    }

    /// Bytes within `least..=most`.
    pub(super) fn size(&mut self, item: &Item<'a>, least: u64, most: u64) -> Option<u64> {
        let bytes = self.parsed(item, value::size)?;
        self.within(item, bytes, least, most, " bytes")
    }

    fn within(
        &mut self,
        item: &Item<'a>,
        n: u64,
        least: u64,
        most: u64,
        unit: &str,
    ) -> Option<u64> {
        if (least..=most).contains(&n) {
            return Some(n);
        }
        let bound = if n < least { format!("at least {least}") } else { format!("at most {most}") };
        self.wrong(
            item,
            format!("{} is out of range: it must be {bound}{unit}", shown(item)),
            None,
        );
        None
    }

    /// A duration above zero.
    pub(super) fn duration(&mut self, item: &Item<'a>) -> Option<Duration> {
        let span = self.parsed(item, value::duration)?;
        if span.is_zero() {
            let hint = "leave it out, or write `null`, to turn it off".to_owned();
            self.wrong(item, "this must be longer than zero".to_owned(), Some(hint));
            return None;
        }
        Some(span)
    }

    /// A duration that may be zero.
    pub(super) fn duration_or_zero(&mut self, item: &Item<'a>) -> Option<Duration> {
        self.parsed(item, value::duration)
    }

    pub(super) fn ratio(&mut self, item: &Item<'a>) -> Option<f64> {
        self.parsed(item, value::ratio)
    }

    pub(super) fn usd(&mut self, item: &Item<'a>) -> Option<NanoUsd> {
        self.parsed(item, value::usd)
    }

    pub(super) fn header_name(&mut self, item: &Item<'a>) -> Option<Box<str>> {
        self.parsed(item, value::header_name)
    }

    pub(super) fn flag(&mut self, item: &Item<'a>) -> Option<bool> {
        self.choice(item, "switch", &[("true", true), ("false", false)])
    }

    /// One of a fixed set of words; `_` counts as `-`.
    pub(super) fn choice<T: Copy>(
        &mut self,
        item: &Item<'a>,
        what: &str,
        choices: &[(&'static str, T)],
    ) -> Option<T> {
        let text = self.scalar(item)?;
        let word = text.replace('_', "-");
        if let Some((_, value)) = choices.iter().find(|(name, _)| *name == word) {
            return Some(*value);
        }
        let hint = suggest(&text, choices.iter().map(|(name, _)| *name));
        self.wrong(item, format!("{} is no known {what}", shown(item)), hint);
        None
    }

    /// `{ file: path }` (read now, one trailing line break dropped) or text, preferably `${VAR}`.
    /// Neither the value nor its length is ever said.
    pub(super) fn secret(&mut self, item: &Item<'a>) -> Option<String> {
        let text = match &item.node.value {
            Value::Map(_) => {
                let path = self.fields(item, |r, f| {
                    f.need(r, "file", "a secret is text or `{ file: path }`", Reader::text)
                })?;
                match self.file(&path) {
                    Ok(text) => text,
                    Err(error) => {
                        self.wrong(item, format!("the secret cannot be read: {error}"), None);
                        return None;
                    }
                }
            }
            _ => {
                let text = self.scalar(item)?;
                if item.node.scalar().is_some_and(|written| !written.contains("${")) {
                    let message = "a secret stands in the file itself; `{ file: path }` or `${VAR}` keeps it out";
                    self.notice(item.pos(), &item.path, message.to_owned(), Severity::Advice);
                }
                text
            }
        };
        let text = text.strip_suffix('\n').unwrap_or(&text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        // Long tokens exist (JWTs of several KB); a file by mistake is longer still.
        if text.is_empty()
            || text.len() > 8_192
            || !text.bytes().all(|b| (0x21..=0x7e).contains(&b))
        {
            let message = "a secret is one line of 1 to 8192 visible ASCII characters without blanks; this is not";
            self.wrong(item, message.to_owned(), None);
            return None;
        }
        Some(text.to_owned())
    }
}

/// What is wrong with a name. Names become labels of metrics and values of headers.
fn name_complaint(name: &str) -> Option<String> {
    const LENGTH_MAX: usize = 128;
    if name.is_empty() {
        Some("a name must not be empty".to_owned())
    } else if name.len() > LENGTH_MAX {
        Some(format!("a name has at most {LENGTH_MAX} bytes, this one {}", name.len()))
    } else if name.chars().any(char::is_control) || name.trim() != name {
        Some("a name has no control characters, and no blanks at its ends".to_owned())
    } else {
        None
    }
}

/// The value as the file writes it, quoted and cut to what fits a line.
pub(super) fn shown(item: &Item<'_>) -> String {
    match item.node.scalar() {
        Some(text) => format!("`{}`", printable(text)),
        None => item.kind().to_owned(),
    }
}

/// Fit for a terminal and a log line: no control characters, bounded.
pub(super) fn printable(text: &str) -> String {
    const CHARS_MAX: usize = 120;
    let mut out: String = text
        .chars()
        .take(CHARS_MAX)
        .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
        .collect();
    if text.chars().nth(CHARS_MAX).is_some() {
        out.push_str("...");
    }
    out
}

fn last_word(shape: &str) -> &str {
    shape.rsplit('.').next().unwrap_or(shape).trim_end_matches("[]")
}
