//! Text to a tree of nodes that know where they stand.
//!
//! The events of `serde_saphyr`'s own parser are read rather than its serde side, because serde
//! ends at the first mistake and an operator wants all of them; and because a scalar must keep its
//! spelling until the field says what it is (`version: 1.10` is no number, `NO` no boolean).

use std::collections::HashMap;
use std::rc::Rc;

use foldhash::fast::FixedState;
use serde_saphyr::granit_parser::{
    ErrorKind, Event, Options, Parser, ScalarStyle, ScanError, Span, Tag,
};

use super::problem::Problem;

/// A configuration of 5,000 routes and 5,000 keys is 1 MB and becomes a plan in about 0.2 s; the
/// time is the parser's, some 3 us a node, and grows with the text.
pub(super) const TEXT_BYTES_MAX: usize = 4 << 20;

/// What anchors and aliases (`&name`, `*name`) may copy, in bytes as [`Node::weight`] counts them.
/// Nine doubling levels would otherwise make millions of nodes out of a few lines.
const ALIASED_BYTES_MAX: usize = 8 << 20;

/// The deepest field of the schema lies ten levels down.
const DEPTH_MAX: usize = 32;

/// From 1; columns in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pos {
    pub line: u32,
    pub column: u32,
}

impl Pos {
    pub(super) const START: Pos = Pos { line: 1, column: 1 };
}

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub pos: Pos,
    pub value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    /// `null`, `~`, or nothing at all.
    Null,
    /// The value after YAML's own escapes; whether it was quoted says nothing about its kind.
    Scalar(String),
    List(Vec<Node>),
    /// In file order, no key twice.
    Map(Vec<Entry>),
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub key: String,
    pub pos: Pos,
    pub node: Node,
}

impl Node {
    /// About how much memory a copy takes.
    fn weight(&self) -> usize {
        size_of::<Node>()
            + match &self.value {
                Value::Null => 0,
                Value::Scalar(text) => text.len(),
                Value::List(nodes) => nodes.iter().map(Node::weight).sum(),
                Value::Map(entries) => {
                    entries.iter().map(|entry| entry.key.len() + entry.node.weight()).sum()
                }
            }
    }

    /// The scalar's spelling, if it is one.
    pub(super) fn scalar(&self) -> Option<&str> {
        match &self.value {
            Value::Scalar(text) => Some(text),
            _ => None,
        }
    }
}

/// The one document of `text`. A text that is no YAML gives one problem; duplicate keys and the
/// like are all reported beside the tree.
pub(super) fn parse(text: &str, problems: &mut Vec<Problem>) -> Option<Node> {
    if text.len() > TEXT_BYTES_MAX {
        let message =
            format!("the file has {} bytes; the most that is read is {TEXT_BYTES_MAX}", text.len());
        problems.push(problem(Pos::START, message, None));
        return None;
    }
    let mut options = Options::default();
    options.set_emit_comments(false);
    options.flow_nesting_limit = DEPTH_MAX;
    options.block_nesting_limit = DEPTH_MAX;
    // JSON knows no limit for a key on the line of its value.
    options.simple_key_max_lookahead = 64 << 10;
    options.disallow_directives = true;
    let mut builder =
        Builder { problems, open: Vec::new(), anchors: HashMap::default(), aliased: 0, root: None };
    for event in Parser::new_from_str_with_options(text, options) {
        let step = match event {
            Ok((event, span)) => builder.step(event, span),
            Err(error) => Err(scan_problem(&error, text)),
        };
        if let Err(problem) = step {
            builder.problems.push(problem);
            return None;
        }
    }
    match builder.root {
        Some(root) if !matches!(root.value, Value::Null) => Some(root),
        _ => {
            let hint = "the smallest useful file has `server.listen`, one pool and one route";
            problems.push(problem(Pos::START, "the file is empty".to_owned(), Some(hint)));
            None
        }
    }
}

struct Builder<'p> {
    problems: &'p mut Vec<Problem>,
    open: Vec<Open>,
    /// Anchors whose node is complete; one that is still open cannot be an alias of itself.
    anchors: HashMap<usize, Rc<(Node, usize)>, FixedState>,
    /// Bytes copied for anchors and aliases so far.
    aliased: usize,
    root: Option<Node>,
}

/// A list or a map whose end has not come.
struct Open {
    pos: Pos,
    anchor: usize,
    inside: Inside,
}

enum Inside {
    List(Vec<Node>),
    Map {
        entries: Vec<Entry>,
        /// Where each key stands: finds duplicates without a search per key.
        seen: HashMap<String, Pos, FixedState>,
        key: Option<(String, Pos)>,
        merges: Vec<Node>,
    },
}

impl Builder<'_> {
    fn step(&mut self, event: Event<'_>, span: Span) -> Result<(), Problem> {
        let pos = position(span.start.line(), span.start.col());
        match event {
            Event::DocumentStart(..) if self.root.is_some() => Err(problem(
                pos,
                "a second document begins here; a configuration is one document".to_owned(),
                None,
            )),
            Event::Scalar(text, style, anchor, tag) => {
                no_tag(span, tag.as_deref())?;
                let plain = style == ScalarStyle::Plain;
                let null = plain && matches!(text.as_ref(), "" | "~" | "null" | "Null" | "NULL");
                let value = if null { Value::Null } else { Value::Scalar(text.into_owned()) };
                self.put(Node { pos, value }, anchor)
            }
            Event::SequenceStart(_, anchor, tag) => {
                no_tag(span, tag.as_deref())?;
                self.begin(pos, anchor, Inside::List(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                no_tag(span, tag.as_deref())?;
                let inside = Inside::Map {
                    entries: Vec::new(),
                    seen: HashMap::default(),
                    key: None,
                    merges: Vec::new(),
                };
                self.begin(pos, anchor, inside)
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::Alias(id) => {
                let Some(target) = self.anchors.get(&id).map(Rc::clone) else {
                    return Err(problem(
                        pos,
                        "this alias stands inside what it names".to_owned(),
                        None,
                    ));
                };
                self.copied(target.1, pos)?;
                // Where the alias stands is where the reader looks; inside it the anchor's lines count.
                let node = Node { pos, value: target.0.value.clone() };
                self.put(node, 0)
            }
            _ => Ok(()),
        }
    }

    fn copied(&mut self, weight: usize, pos: Pos) -> Result<(), Problem> {
        self.aliased += weight;
        if self.aliased <= ALIASED_BYTES_MAX {
            return Ok(());
        }
        let message = "anchors and aliases repeat more of the file than is reasonable".to_owned();
        Err(problem(pos, message, Some("write the repeated parts out, or share less")))
    }

    fn begin(&mut self, pos: Pos, anchor: usize, inside: Inside) -> Result<(), Problem> {
        if let Some(Open { inside: Inside::Map { key: None, .. }, .. }) = self.open.last() {
            return Err(problem(
                pos,
                "a key must be a plain word, not a list or a map".to_owned(),
                None,
            ));
        }
        self.open.push(Open { pos, anchor, inside });
        Ok(())
    }

    fn end(&mut self) -> Result<(), Problem> {
        let Some(Open { pos, anchor, inside }) = self.open.pop() else {
            return Ok(());
        };
        let value = match inside {
            Inside::List(nodes) => Value::List(nodes),
            Inside::Map { mut entries, mut seen, merges, .. } => {
                for merge in merges {
                    let Value::Map(more) = merge.value else {
                        let message = "`<<` merges maps, and this is none".to_owned();
                        self.problems.push(problem(merge.pos, message, None));
                        continue;
                    };
                    for entry in more {
                        // What is written here, or merged first, wins.
                        if !seen.contains_key(&entry.key) {
                            seen.insert(entry.key.clone(), entry.pos);
                            entries.push(entry);
                        }
                    }
                }
                Value::Map(entries)
            }
        };
        self.put(Node { pos, value }, anchor)
    }

    /// A complete node goes to where it belongs.
    fn put(&mut self, node: Node, anchor: usize) -> Result<(), Problem> {
        if anchor != 0 {
            let weight = node.weight();
            self.copied(weight, node.pos)?;
            self.anchors.insert(anchor, Rc::new((node.clone(), weight)));
        }
        match self.open.last_mut().map(|open| &mut open.inside) {
            None => self.root = Some(node),
            Some(Inside::List(nodes)) => nodes.push(node),
            Some(Inside::Map { entries, seen, key, merges }) => match key.take() {
                None => match node.value {
                    Value::Scalar(text) => *key = Some((text, node.pos)),
                    Value::Null => {
                        return Err(problem(node.pos, "a key is missing here".to_owned(), None));
                    }
                    Value::List(_) | Value::Map(_) => {
                        let message = "a key must be a plain word, not a list or a map".to_owned();
                        return Err(problem(node.pos, message, None));
                    }
                },
                Some((name, pos)) if name == "<<" => match node.value {
                    Value::Map(_) => merges.push(node),
                    Value::List(nodes) => merges.extend(nodes),
                    Value::Null | Value::Scalar(_) => {
                        let hint = "`<<: *name` merges the map that `&name` marks";
                        return Err(problem(
                            pos,
                            "`<<` merges maps, and this is none".to_owned(),
                            Some(hint),
                        ));
                    }
                },
                Some((name, pos)) => {
                    if let Some(first) = seen.get(&name) {
                        let message =
                            format!("`{name}` is here twice; the first is on line {}", first.line);
                        self.problems.push(problem(pos, message, Some("keep one of them")));
                    } else {
                        seen.insert(name.clone(), pos);
                        entries.push(Entry { key: name, pos, node });
                    }
                }
            },
        }
        Ok(())
    }
}

fn no_tag(span: Span, tag: Option<&Tag>) -> Result<(), Problem> {
    if tag.is_none() {
        return Ok(());
    }
    let at = span.tag_start().unwrap_or(span.start);
    let pos = position(at.line(), at.col());
    Err(problem(pos, "a tag means nothing here".to_owned(), Some("remove the `!...`")))
}

const TABS: &str = "YAML is indented with spaces; replace the tab";

fn scan_problem(error: &ScanError, text: &str) -> Problem {
    let pos = position(error.marker().line(), error.marker().col());
    let line = text.lines().nth(pos.line as usize - 1).unwrap_or_default();
    let indent = &line[..line.len() - line.trim_start().len()];
    let hint = match error.kind() {
        // The scanner often says something else first.
        _ if indent.contains('\t') => Some(TABS),
        ErrorKind::TabNotAllowed
        | ErrorKind::TabInBlockIndentation
        | ErrorKind::TabInIndentation
        | ErrorKind::TabAtBlockScalarStart
        | ErrorKind::TabInPlainScalar => Some(TABS),
        ErrorKind::UnexpectedEofFlowSequence
        | ErrorKind::UnexpectedEofFlowMapping
        | ErrorKind::UnexpectedEofImplicitFlowMapping
        | ErrorKind::UnclosedFlowCollection { .. }
        | ErrorKind::UnclosedQuotedScalar => {
            Some("the file may be cut off; write it whole, then rename it into place")
        }
        ErrorKind::RecursionLimitExceeded => Some("no field of a configuration lies that deep"),
        ErrorKind::MappingValueNotAllowed | ErrorKind::InvalidIndentation => {
            Some("check the indentation, and quote values that contain `: `")
        }
        _ => None,
    };
    problem(pos, format!("this is not valid YAML: {}", error.info()), hint)
}

/// Lines and columns past four billion do not occur below `TEXT_BYTES_MAX`.
fn position(line: usize, column_from_zero: usize) -> Pos {
    let fit = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Pos { line: fit(line.max(1)), column: fit(column_from_zero).saturating_add(1) }
}

fn problem(pos: Pos, message: String, hint: Option<&str>) -> Problem {
    Problem {
        line: pos.line,
        column: pos.column,
        field: String::new(),
        message,
        hint: hint.map(str::to_owned),
        owner: None,
    }
}
