//! Usage by day, tenant, key, model and route: what the store keeps, and what `/usage` adds up.
//!
//! Shards count by numbers; control turns these into names, which outlive the process; the store
//! adds them to what it has. What it has not taken yet waits in [`Pending`].

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

use foldhash::fast::FixedState;

use super::text::{dollars, json_string};
use super::{Booked, Catalog, name_in};
use crate::pure::board::OTHER;
use crate::pure::units::{Series, civil};

/// Whose usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Whose {
    /// Since 1970, UTC; of the request's end.
    pub day: u32,
    pub tenant: Series,
    pub key: Series,
    pub model: Series,
    pub route: Series,
}

/// How much.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spend {
    pub requests: u64,
    pub booked: Booked,
}

impl Spend {
    pub fn add(&mut self, more: &Spend) {
        self.requests = self.requests.saturating_add(more.requests);
        self.booked.add(&more.booked);
    }

    /// As the store writes it. New numbers go to the end.
    pub fn words(&self) -> [u64; 7] {
        let Booked { prompt, completion, cached, reasoning, estimated, nano } = self.booked;
        [self.requests, prompt, completion, cached, reasoning, estimated, nano]
    }

    pub fn of(words: [u64; 7]) -> Spend {
        let [requests, prompt, completion, cached, reasoning, estimated, nano] = words;
        let booked = Booked { prompt, completion, cached, reasoning, estimated, nano };
        Spend { requests, booked }
    }
}

/// Usage of a few milliseconds, by numbers.
#[derive(Debug, Default)]
pub struct Spends(HashMap<Whose, Spend, FixedState>);

impl Spends {
    /// Whoever comes when there are so many already is counted as `other`.
    const WHOSE_MAX: usize = 4096;

    pub fn add(&mut self, whose: Whose, more: &Spend) {
        let known = self.0.len() < Spends::WHOSE_MAX || self.0.contains_key(&whose);
        let whose = if known { whose } else { Whose { day: whose.day, ..Whose::default() } };
        self.0.entry(whose).or_default().add(more);
    }

    pub fn drain(&mut self) -> impl Iterator<Item = (Whose, Spend)> + '_ {
        self.0.drain()
    }
}

/// Usage by names that no store has taken yet: of the last moments where there is one, of all the
/// time since the start where there is none.
#[derive(Debug, Default)]
pub struct Pending(Mutex<HashMap<Box<[u8]>, Spend>>);

impl Pending {
    /// Whoever comes when there are so many already is counted as `other`.
    const WHOSE_MAX: usize = 1 << 16;

    pub fn name(&self, whose: Whose, spend: &Spend, catalog: &Catalog) {
        let tenant = catalog.tenants.get(whose.tenant.index()).map_or(OTHER, |row| &row.name);
        let key = name_in(&catalog.keys, whose.key);
        let model = name_in(&catalog.models, whose.model);
        let route = name_in(&catalog.routes, whose.route);
        self.add(entry(whose.day, [tenant, key, model, route]), spend);
    }

    pub fn add(&self, entry: Box<[u8]>, spend: &Spend) {
        let mut held = self.lock();
        let known = held.len() < Pending::WHOSE_MAX || held.contains_key(&entry);
        let entry = match (known, parts(&entry)) {
            (false, Some((day, _))) => self::entry(day, [OTHER; 4]),
            _ => entry,
        };
        held.entry(entry).or_default().add(spend);
    }

    /// All of it, to be written. What could not be comes back by [`Pending::add`].
    pub fn take(&self) -> Vec<(Box<[u8]>, Spend)> {
        self.lock().drain().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    pub fn each(&self, mut look: impl FnMut(&[u8], &Spend)) {
        self.lock().iter().for_each(|(entry, spend)| look(entry, spend));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Box<[u8]>, Spend>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The day, for entries to be in the order of days, and the names with NULs between them.
pub fn entry(day: u32, names: [&str; 4]) -> Box<[u8]> {
    let mut entry = day.to_be_bytes().to_vec();
    entry.extend_from_slice(names.join("\0").as_bytes());
    entry.into()
}

/// What [`entry`] was made of: tenant, key, model, route.
pub fn parts(entry: &[u8]) -> Option<(u32, [&str; 4])> {
    let (day, names) = entry.split_first_chunk()?;
    let mut names = std::str::from_utf8(names).ok()?.split('\0');
    let names = [names.next()?, names.next()?, names.next()?, names.next()?];
    Some((u32::from_be_bytes(*day), names))
}

/// What usage is told apart by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Day,
    Tenant,
    Key,
    Model,
    Route,
}

impl By {
    pub const ALL: [By; 5] = [By::Day, By::Tenant, By::Key, By::Model, By::Route];

    pub const fn name(self) -> &'static str {
        match self {
            By::Day => "day",
            By::Tenant => "tenant",
            By::Key => "key",
            By::Model => "model",
            By::Route => "route",
        }
    }
}

/// A question about usage.
#[derive(Clone, Debug)]
pub struct Question {
    pub by: Vec<By>,
    /// Days, both included.
    pub from: u32,
    pub to: u32,
    /// Only of this tenant, key, model, route.
    pub only: [Option<String>; 4],
}

/// Its answer, to which entries are added.
#[derive(Debug)]
pub struct Sums {
    question: Question,
    rows: BTreeMap<Vec<String>, Spend>,
}

impl Sums {
    pub fn new(question: Question) -> Sums {
        Sums { question, rows: BTreeMap::new() }
    }

    /// The days that it asks for.
    pub fn days(&self) -> (u32, u32) {
        (self.question.from, self.question.to)
    }

    pub fn add(&mut self, entry: &[u8], spend: &Spend) {
        let Some((day, names)) = parts(entry) else { return };
        let Question { by, from, to, only } = &self.question;
        let meant =
            |(only, name): (&Option<String>, &str)| only.as_deref().is_none_or(|o| o == name);
        if day < *from || day > *to || !only.iter().zip(names).all(meant) {
            return;
        }
        let row = by.iter().map(|by| match by {
            By::Day => date(day),
            By::Tenant => names[0].to_owned(),
            By::Key => names[1].to_owned(),
            By::Model => names[2].to_owned(),
            By::Route => names[3].to_owned(),
        });
        self.rows.entry(row.collect()).or_default().add(spend);
    }

    /// `{"usage":[{…},…]}`.
    pub fn json(&self) -> String {
        let mut out = "{\"usage\":[".to_owned();
        for (index, (names, spend)) in self.rows.iter().enumerate() {
            out.push_str(if index > 0 { ",{" } else { "{" });
            for (by, name) in self.question.by.iter().zip(names) {
                // Writing to a string does not fail, here and below.
                let _ = write!(out, "\"{}\":", by.name());
                json_string(&mut out, name, usize::MAX);
                out.push(',');
            }
            for (index, (field, value)) in fields(spend).into_iter().enumerate() {
                let comma = if index > 0 { "," } else { "" };
                let _ = write!(out, "{comma}\"{field}\":{value}");
            }
            out.push('}');
        }
        out.push_str("]}\n");
        out
    }

    /// A line of names and one for each row (RFC 4180: quoted, with quotes doubled).
    pub fn csv(&self) -> String {
        let heads = self.question.by.iter().map(|by| by.name());
        let fields_of_none = fields(&Spend::default());
        let heads: Vec<&str> =
            heads.chain(fields_of_none.iter().map(|(field, _)| *field)).collect();
        let mut out = heads.join(",") + "\n";
        for (names, spend) in &self.rows {
            for name in names {
                let _ = write!(out, "\"{}\",", name.replace('"', "\"\""));
            }
            let values: Vec<String> = fields(spend).into_iter().map(|(_, value)| value).collect();
            out.push_str(&values.join(","));
            out.push('\n');
        }
        out
    }
}

/// Every number of it, by the names that all answers use.
pub fn fields(spend: &Spend) -> [(&'static str, String); 8] {
    let booked = &spend.booked;
    let total = booked.prompt.saturating_add(booked.completion);
    [
        ("requests", spend.requests.to_string()),
        ("prompt_tokens", booked.prompt.to_string()),
        ("completion_tokens", booked.completion.to_string()),
        ("total_tokens", total.to_string()),
        ("cached_tokens", booked.cached.to_string()),
        ("reasoning_tokens", booked.reasoning.to_string()),
        ("estimated_tokens", booked.estimated.to_string()),
        ("cost_usd", dollars(booked.nano)),
    ]
}

/// `2026-12-01`.
pub fn date(day: u32) -> String {
    let (year, month, day) = civil(u64::from(day));
    format!("{year:04}-{month:02}-{day:02}")
}

/// The day of a date, as [`date`] writes it.
pub fn day_of(text: &str) -> Option<u32> {
    let mut parts = text.splitn(3, '-').map(|part| part.parse::<u32>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // No later than this in any calendar; the date itself decides.
    let near = (year - 1970) * 365 + (year - 1969) / 4;
    let text = format!("{year:04}-{month:02}-{day:02}");
    (near.saturating_sub(30)..near + 400).find(|&day| date(day) == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spend(prompt: u64) -> Spend {
        Spend { requests: 1, booked: Booked { prompt, nano: 1_500_000, ..Booked::default() } }
    }

    fn question(by: &[By]) -> Question {
        Question { by: by.to_vec(), from: 0, to: u32::MAX, only: Default::default() }
    }

    #[test]
    fn usage_is_summed_by_what_was_asked_for_and_of_whom() {
        let pending = Pending::default();
        for (day, names, prompt) in [
            (20_000, ["a", "k1", "m", "r"], 1),
            (20_000, ["a", "k2", "m", "r"], 10),
            (20_001, ["a", "k1", "n", "r"], 100),
            (20_001, ["b", "k3", "m", "r\"2,"], 1_000),
        ] {
            pending.add(entry(day, names), &spend(prompt));
        }
        let sums = |question: Question| {
            let mut sums = Sums::new(question);
            pending.each(|entry, spend| sums.add(entry, spend));
            sums
        };
        let by_tenant = sums(question(&[By::Tenant])).json();
        let parsed: serde_json::Value = serde_json::from_str(&by_tenant).expect("JSON");
        assert_eq!(parsed["usage"][0]["tenant"], "a");
        assert_eq!(parsed["usage"][0]["prompt_tokens"], 111);
        assert_eq!(parsed["usage"][0]["requests"], 3);
        assert_eq!(parsed["usage"][0]["cost_usd"], 0.0045);
        assert_eq!(parsed["usage"][1]["prompt_tokens"], 1_000);
        let day = Question { from: 20_001, to: 20_001, ..question(&[By::Day, By::Route]) };
        assert_eq!(
            sums(day.clone()).csv(),
            "day,route,requests,prompt_tokens,completion_tokens,total_tokens,cached_tokens,\
             reasoning_tokens,estimated_tokens,cost_usd\n\
             \"2024-10-05\",\"r\",1,100,0,100,0,0,0,0.0015\n\
             \"2024-10-05\",\"r\"\"2,\",1,1000,0,1000,0,0,0,0.0015\n"
        );
        let mut only = question(&[]);
        only.only[1] = Some("k1".to_owned());
        assert!(sums(only).json().contains("\"prompt_tokens\":101"));
        assert_eq!(pending.take().len(), 4);
        assert_eq!(pending.take().len(), 0);
    }

    #[test]
    fn more_than_can_be_told_apart_is_counted_all_the_same() {
        let mut spends = Spends::default();
        for number in 0..10_000 {
            let whose = Whose { day: 7, key: Series(number), ..Whose::default() };
            spends.add(whose, &spend(2));
        }
        let all: Vec<_> = spends.drain().collect();
        assert!(all.len() <= Spends::WHOSE_MAX + 1);
        assert_eq!(all.iter().map(|(_, spend)| spend.booked.prompt).sum::<u64>(), 20_000);
        let pending = Pending::default();
        for number in 0..Pending::WHOSE_MAX + 100 {
            pending.add(entry(7, ["t", &number.to_string(), "m", "r"]), &spend(1));
        }
        let all = pending.take();
        assert!(all.len() <= Pending::WHOSE_MAX + 1);
        let sum = all.iter().map(|(_, spend)| spend.requests).sum::<u64>();
        assert_eq!(sum, Pending::WHOSE_MAX as u64 + 100);
    }

    #[test]
    fn dates_are_read_as_they_are_written() {
        for day in (0..40_000).chain([2_000_000]) {
            assert_eq!(day_of(&date(day)), Some(day), "{}", date(day));
        }
        for wrong in ["", "2026", "2026-13-01", "2026-02-30", "2026-2-3-4", "x-y-z", "99999-01-01"]
        {
            assert_eq!(day_of(wrong), None, "{wrong}");
        }
        assert_eq!(day_of("2026-2-3"), day_of("2026-02-03"));
    }
}
