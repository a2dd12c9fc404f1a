//! What must outlive the process: what was spent of days and budgets, keys that were made at run
//! time, and usage by day.
//!
//! One thread writes, in groups: every [`GROUP`] it takes the counters that have changed since the
//! last time and commits them in one transaction, which is on disk when it returns. A process that
//! is killed loses what was counted since the last commit began, at most a group and a commit. What
//! requests have reserved is in the counters, so a request that was under way when the process died
//! stays charged with what it had reserved, and nothing is charged twice.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};

use crate::meter::Catalog;
use crate::meter::events::{Level, say};
use crate::meter::usage::{Pending, Spend};
use crate::pure::board::{CALENDARS, LimitRow, Registry, ScopeKind};
use crate::pure::limit::{Per, Windows, per_of};
use crate::shard::Shared;

/// How long changes are gathered for one commit.
const GROUP: Duration = Duration::from_millis(50);

/// How long nothing is said to requests when a commit fails: a full disk may be emptied.
const PATIENCE: Duration = Duration::from_millis(500);

/// Scope and calendar (see [`key`]) to the number of the window and the amount in it; two windows
/// of each are kept, as the lowest bit of the number says.
const COUNTERS: TableDefinition<&[u8], (u64, u64)> = TableDefinition::new("counters");
/// Keys that were made at run time: id to a JSON object.
const KEYS: TableDefinition<&str, &str> = TableDefinition::new("keys");
/// Usage by day and by who (see [`crate::meter::usage::entry`]).
const USAGE: TableDefinition<&[u8], [u64; 7]> = TableDefinition::new("usage");
/// How long usage is kept.
const USAGE_DAYS: u32 = 400;
/// What wrote this file.
const META: TableDefinition<&str, u64> = TableDefinition::new("forebay");
const FORMAT: u64 = 1;

/// Commits, and commits that failed, since start.
pub static COMMITS: AtomicU64 = AtomicU64::new(0);
pub static FAILURES: AtomicU64 = AtomicU64::new(0);

/// Why the store cannot be used. Starting without it would forget what was spent.
#[derive(Debug)]
pub struct Unusable {
    path: PathBuf,
    why: Why,
}

#[derive(Debug)]
enum Why {
    Broken(redb::Error),
    Format(u64),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.why {
            Why::Broken(error) => write!(
                f,
                "cannot use {path}: {error}. It holds what has been spent of budgets: restore it, or \
                 move it away to begin with empty ones"
            ),
            Why::Format(format) => write!(
                f,
                "{path} has format {format}, and this version of Forebay writes format {FORMAT}: run \
                 the version that wrote it, or move the file away to begin with empty budgets"
            ),
        }
    }
}

/// The open file.
#[derive(Debug)]
pub struct Store {
    /// After a failure it has to be closed and opened again before it can be used.
    database: Mutex<Option<Database>>,
    path: PathBuf,
}

impl Store {
    /// Opens or makes the file in `folder`, which the caller has locked for this process.
    ///
    /// # Errors
    /// It is broken, of another format, or cannot be written.
    pub fn open(folder: &Path) -> Result<Store, Unusable> {
        let path = folder.join("forebay.redb");
        let broken = |error: redb::Error| Unusable { path: path.clone(), why: Why::Broken(error) };
        let open = || -> Result<(Database, u64), redb::Error> {
            let database = Database::create(&path)?;
            let write = database.begin_write()?;
            let found = {
                let mut meta = write.open_table(META)?;
                let found = meta.get("format")?.map(|format| format.value());
                if found.is_none() {
                    meta.insert("format", FORMAT)?;
                }
                write.open_table(COUNTERS)?;
                write.open_table(KEYS)?;
                write.open_table(USAGE)?;
                found.unwrap_or(FORMAT)
            };
            write.commit()?;
            Ok((database, found))
        };
        match open().map_err(broken)? {
            (database, FORMAT) => Ok(Store { database: Mutex::new(Some(database)), path }),
            (_, format) => Err(Unusable { path, why: Why::Format(format) }),
        }
    }

    /// Lends the database, opened again if it failed the last time.
    fn with<T>(
        &self,
        work: impl FnOnce(&Database) -> Result<T, redb::Error>,
    ) -> Result<T, redb::Error> {
        let mut held = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let database = match held.take() {
            Some(database) => database,
            None => Database::create(&self.path)?,
        };
        let result = work(&database);
        if result.is_ok() {
            *held = Some(database);
        }
        result
    }

    /// Puts what was counted before on the board; how many counters that were. Those of windows before
    /// the last one are deleted, whoever they were of: nobody asks for them any more, and names that are
    /// in no plan would stay for ever. Later ones than `windows` are kept: the clock may yet be set.
    ///
    /// # Errors
    /// The file cannot be read, or not be written.
    pub fn restore(&self, registry: &mut Registry, windows: &Windows) -> Result<usize, Unusable> {
        self.read(registry, windows)
            .map_err(|error| Unusable { path: self.path.clone(), why: Why::Broken(error) })
    }

    fn read(&self, registry: &mut Registry, windows: &Windows) -> Result<usize, redb::Error> {
        let table = self.with(|database| Ok(database.begin_read()?.open_table(COUNTERS)?))?;
        let (mut count, mut old) = (0, Vec::new());
        for entry in table.iter()? {
            let (stored, value) = entry?;
            let (window, amount) = value.value();
            let Some((kind, calendar, name)) = parts(stored.value()) else { continue };
            let calendar = usize::from(calendar);
            if calendar < CALENDARS && window + 1 < windows.number(per_of(calendar)) {
                old.push(stored.value().to_vec());
                continue;
            }
            let row = registry.limits(kind, name);
            if let Some(calendar) = row.calendars.get(calendar) {
                calendar.restore(window, amount);
                count += 1;
            }
        }
        drop(table);
        if !old.is_empty() {
            self.with(|database| Store::delete(database, &old))?;
        }
        Ok(count)
    }

    /// Looks at all usage of the days from `from` to `to`, both included, written or still pending.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn usage(
        &self,
        (from, to): (u32, u32),
        pending: &Pending,
        mut look: impl FnMut(&[u8], &Spend),
    ) -> Result<(), redb::Error> {
        // Both at one moment between two commits, so that nothing is seen twice or missed.
        let table = self.with(|database| {
            let table = database.begin_read()?.open_table(USAGE)?;
            pending.each(&mut look);
            Ok(table)
        })?;
        let (from, behind) = (from.to_be_bytes(), to.saturating_add(1).to_be_bytes());
        for entry in table.range::<&[u8]>(&from[..]..&behind[..])? {
            let (entry, words) = entry?;
            look(entry.value(), &Spend::of(words.value()));
        }
        Ok(())
    }

    /// Forgets usage of days before `day`.
    fn forget_usage_before(&self, day: u32) -> Result<(), redb::Error> {
        self.with(|database| {
            let write = database.begin_write()?;
            let day = day.to_be_bytes();
            write.open_table(USAGE)?.retain_in::<&[u8], _>(..&day[..], |_, _| false)?;
            write.commit()?;
            Ok(())
        })
    }

    fn delete(database: &Database, counters: &[Vec<u8>]) -> Result<(), redb::Error> {
        let write = database.begin_write()?;
        {
            let mut table = write.open_table(COUNTERS)?;
            for counter in counters {
                table.remove(&**counter)?;
            }
        }
        Ok(write.commit()?)
    }

    /// Every key that was ever made, as it was put.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn keys(&self) -> Result<Vec<String>, redb::Error> {
        let table = self.with(|database| Ok(database.begin_read()?.open_table(KEYS)?))?;
        let mut keys = Vec::new();
        for entry in table.iter()? {
            keys.push(entry?.1.value().to_owned());
        }
        Ok(keys)
    }

    /// Puts what `change` makes of the key that `id` is now; on disk when this returns. The inner
    /// error is `change`'s.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn put_key<E>(
        &self,
        id: &str,
        change: impl FnOnce(Option<&str>) -> Result<String, E>,
    ) -> Result<Result<(), E>, redb::Error> {
        self.with(|database| {
            let write = database.begin_write()?;
            let refused = {
                let mut table = write.open_table(KEYS)?;
                let known = table.get(id)?.map(|known| known.value().to_owned());
                match change(known.as_deref()) {
                    Ok(key) => {
                        table.insert(id, &*key)?;
                        None
                    }
                    Err(why) => Some(why),
                }
            };
            match refused {
                None => write.commit()?,
                Some(why) => {
                    write.abort()?;
                    return Ok(Err(why));
                }
            }
            Ok(Ok(()))
        })
    }

    /// Begins to write what changes on the board.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        self: Arc<Self>,
        shared: Arc<Shared>,
        catalog: Arc<ArcSwap<Catalog>>,
        pending: Arc<Pending>,
    ) -> std::io::Result<Writer> {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("store".into()).spawn(move || {
            let commits = &shared.commits;
            let this = std::thread::current();
            commits.serve(move || this.unpark());
            let mut failing: Option<Instant> = None;
            let mut swept = 0;
            loop {
                // Read before the last look at the board: what was counted until now is written.
                let last = told.load(Ordering::Acquire);
                let waited_for = commits.begin();
                let windows = **shared.windows.load();
                match self.commit(&catalog.load().limits, &windows, &pending) {
                    Ok(written) => {
                        if failing.take().is_some() {
                            say(Level::Info, "state_written_again", &[]);
                        }
                        COMMITS.fetch_add(u64::from(written > 0), Ordering::Relaxed);
                        commits.end();
                    }
                    Err(error) => {
                        FAILURES.fetch_add(1, Ordering::Relaxed);
                        if failing.is_none() {
                            say(Level::Error, "state_not_written", &[("error", &error)]);
                        }
                        let since = *failing.get_or_insert_with(Instant::now);
                        commits.fail(since.elapsed() >= PATIENCE);
                    }
                }
                if waited_for {
                    commits.ring();
                }
                // Days since 1970 fit.
                let today = windows.number(Per::Day) as u32;
                if swept != today && failing.is_none() {
                    // What is not forgotten today is tomorrow.
                    let _ = self.forget_usage_before(today.saturating_sub(USAGE_DAYS));
                    swept = today;
                }
                if last {
                    return;
                }
                match failing.is_some() {
                    // Not at once, whoever waits.
                    true => std::thread::sleep(GROUP),
                    false if commits.is_wanted() => {}
                    false => std::thread::park_timeout(GROUP),
                }
            }
        })?;
        Ok(Writer { stop, thread: Some(thread) })
    }

    /// Writes what has changed, in one transaction; how many numbers that were.
    fn commit(
        &self,
        rows: &[Arc<LimitRow>],
        windows: &Windows,
        pending: &Pending,
    ) -> Result<usize, redb::Error> {
        let touched: Vec<&Arc<LimitRow>> = rows.iter().filter(|row| row.was_touched()).collect();
        if touched.is_empty() && pending.is_empty() {
            return Ok(0);
        }
        let written = self.with(|database| {
            let usage = pending.take();
            let written = Store::write(database, &touched, windows, &usage);
            if written.is_err() {
                usage.into_iter().for_each(|(entry, spend)| pending.add(entry, &spend));
            }
            written
        });
        if written.is_err() {
            // To be tried again with what has been counted by then.
            touched.iter().for_each(|row| row.touch());
        }
        written
    }

    fn write(
        database: &Database,
        rows: &[&Arc<LimitRow>],
        windows: &Windows,
        usage: &[(Box<[u8]>, Spend)],
    ) -> Result<usize, redb::Error> {
        let mut written = usage.len();
        let write = database.begin_write()?;
        {
            let mut table = write.open_table(COUNTERS)?;
            for row in rows {
                for (number, calendar) in row.calendars.iter().enumerate() {
                    for (window, amount) in calendar.kept(windows.number(per_of(number))) {
                        let key = key(row, number, window);
                        let known = table.get(&*key)?.map(|known| known.value());
                        if known != Some((window, amount)) {
                            table.insert(&*key, (window, amount))?;
                            written += 1;
                        }
                    }
                }
            }
        }
        {
            let mut table = write.open_table(USAGE)?;
            for (entry, spend) in usage {
                let known = table.get(&**entry)?.map(|known| known.value());
                let mut sum = known.map_or(Spend::default(), Spend::of);
                sum.add(spend);
                table.insert(&**entry, sum.words())?;
            }
        }
        if written > 0 {
            write.commit()?;
        } else {
            write.abort()?;
        }
        Ok(written)
    }
}

/// The kind of scope, the calendar, which of the two windows it is, and the scope's name.
fn key(row: &LimitRow, calendar: usize, window: u64) -> Vec<u8> {
    // There are nine calendars; one bit of the window.
    let mut key = vec![row.kind as u8, calendar as u8, (window & 1) as u8];
    key.extend_from_slice(row.name.as_bytes());
    key
}

fn parts(key: &[u8]) -> Option<(ScopeKind, u8, &str)> {
    let [kind, calendar, _, name @ ..] = key else { return None };
    Some((*ScopeKind::ALL.get(usize::from(*kind))?, *calendar, std::str::from_utf8(name).ok()?))
}

/// The thread that writes. Dropping it does not stop the thread: [`Writer::finish`] does.
#[derive(Debug)]
pub struct Writer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Writes what is left and ends.
    pub fn finish(mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It cannot panic: nothing is left to say if it did.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::meter::usage::entry;
    use crate::pure::units;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder =
                std::env::temp_dir().join(format!("forebay-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).expect("a folder");
            Folder(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn windows(unix: u64) -> Windows {
        Windows::at(unix, units::Instant::ZERO)
    }

    /// Amounts by scope and calendar, as a new process would find them.
    fn found(folder: &Folder) -> HashMap<(ScopeKind, String, usize), Vec<(u64, u64)>> {
        let store = Store::open(&folder.0).expect("a store");
        let mut registry = Registry::new();
        store.restore(&mut registry, &windows(1_796_083_200)).expect("read");
        let mut found = HashMap::new();
        for row in registry.limit_rows() {
            for (number, calendar) in row.calendars.iter().enumerate() {
                let now = windows(1_796_083_200).number(per_of(number));
                let kept: Vec<_> = calendar.kept(now).collect();
                if !kept.is_empty() {
                    found.insert((row.kind, row.name.to_string(), number), kept);
                }
            }
        }
        found
    }

    #[test]
    fn what_was_written_is_found_again_and_in_its_window() {
        let folder = Folder::new("store");
        let today = windows(1_796_083_200);
        let (day, month) = (today.number(Per::Day), today.number(Per::Month));
        {
            let (store, none) = (Store::open(&folder.0).expect("a store"), Pending::default());
            let mut registry = Registry::new();
            let a = registry.limits(ScopeKind::Tenant, "a");
            let both = registry.limits(ScopeKind::TenantModel, "a\0m");
            assert!(a.calendars[0].take(day, 70, 100) && a.calendars[0].take(day - 1, 30, 100));
            assert!(a.calendars[3].take(month, 5_000, 9_000));
            assert!(both.calendars[8].take(0, 12, 99));
            assert_eq!(store.commit(registry.limit_rows(), &today, &none).expect("written"), 0);
            a.touch();
            both.touch();
            assert_eq!(store.commit(registry.limit_rows(), &today, &none).expect("written"), 4);
            a.touch();
            assert_eq!(store.commit(registry.limit_rows(), &today, &none).expect("written"), 0);
        }
        let found = found(&folder);
        let mut days = found[&(ScopeKind::Tenant, "a".into(), 0)].clone();
        days.sort_unstable();
        assert_eq!(days, [(day - 1, 30), (day, 70)]);
        assert_eq!(found[&(ScopeKind::Tenant, "a".into(), 3)], [(month, 5_000)]);
        assert_eq!(found[&(ScopeKind::TenantModel, "a\0m".into(), 8)], [(0, 12)]);
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn usage_is_added_up_over_processes_and_forgotten_by_days() {
        let folder = Folder::new("store-usage");
        let today = windows(1_796_083_200);
        let spend = |requests| Spend { requests, ..Spend::default() };
        let a = |day| entry(day, ["a", "k", "m", "r"]);
        for round in 1..=3 {
            let store = Store::open(&folder.0).expect("a store");
            let pending = Pending::default();
            pending.add(a(100), &spend(1));
            pending.add(a(101), &spend(10));
            assert_eq!(store.commit(&[], &today, &pending).expect("written"), 2);
            assert_eq!(store.commit(&[], &today, &pending).expect("written"), 0);
            // What is not written yet counts, too, and days beside are not looked at.
            pending.add(a(101), &spend(5));
            let mut sum = 0;
            let add = |_: &[u8], spend: &Spend| sum += spend.requests;
            store.usage((101, 101), &pending, add).expect("read");
            assert_eq!(sum, 10 * round + 5);
        }
        let store = Store::open(&folder.0).expect("a store");
        store.forget_usage_before(101).expect("written");
        let mut seen = Vec::new();
        let look = |entry: &[u8], spend: &Spend| seen.push((entry.to_vec(), spend.requests));
        store.usage((0, u32::MAX), &Pending::default(), look).expect("read");
        assert_eq!(seen, [(a(101).to_vec(), 30)]);
    }

    #[test]
    fn counters_of_windows_long_gone_are_deleted_at_the_start_and_no_others() {
        const NAME: &str = "of a name that no plan has";
        let today = windows(1_796_083_200);
        let (day, month) = (today.number(Per::Day), today.number(Per::Month));
        let in_file = |folder: &Folder| {
            let store = Store::open(&folder.0).expect("a store");
            let table = |database: &Database| Ok(database.begin_read()?.open_table(COUNTERS)?);
            let table = store.with(table).expect("read");
            let mut all: Vec<(ScopeKind, u8, u64)> = Vec::new();
            for entry in table.iter().expect("read") {
                let (key, value) = entry.expect("an entry");
                let (kind, calendar, _) = parts(key.value()).expect("a counter");
                all.push((kind, calendar, value.value().0));
            }
            all
        };
        let write = |folder: &Folder, kind, day: u64, month: u64| {
            let store = Store::open(&folder.0).expect("a store");
            let mut registry = Registry::new();
            let row = registry.limits(kind, NAME);
            row.calendars[0].restore(day, 7);
            row.calendars[3].restore(month, 7);
            row.calendars[8].restore(0, 7);
            row.touch();
            let then = windows(day * 86_400);
            assert_eq!(
                store.commit(registry.limit_rows(), &then, &Pending::default()).expect("written"),
                3
            );
        };
        // 256 days are one turn of the bits that the board keeps of a number.
        for old in [2, 100, 256, 512] {
            let folder = Folder::new("store-old");
            write(&folder, ScopeKind::Key, day - old, month);
            write(&folder, ScopeKind::Tenant, day - 1, month - 1);
            write(&folder, ScopeKind::Route, day, month - 2);
            assert_eq!(in_file(&folder).len(), 9);
            // A clock that is behind at the start deletes nothing.
            let store = Store::open(&folder.0).expect("a store");
            store.restore(&mut Registry::new(), &windows(0)).expect("read");
            drop(store);
            assert_eq!(in_file(&folder).len(), 9);
            let found = found(&folder);
            let of_key = |calendar| found.contains_key(&(ScopeKind::Key, NAME.into(), calendar));
            assert_eq!([of_key(0), of_key(3), of_key(8)], [false, true, true], "{old} days ago");
            let mut kept = [
                (ScopeKind::Key, 3, month),
                (ScopeKind::Key, 8, 0),
                (ScopeKind::Tenant, 0, day - 1),
                (ScopeKind::Tenant, 3, month - 1),
                (ScopeKind::Tenant, 8, 0),
                (ScopeKind::Route, 0, day),
                (ScopeKind::Route, 8, 0),
            ];
            kept.sort_by_key(|(kind, calendar, _)| (*kind as u8, *calendar));
            assert_eq!(in_file(&folder), kept);
        }
    }

    #[test]
    fn a_broken_or_foreign_file_is_refused_with_a_reason() {
        let folder = Folder::new("store-broken");
        std::fs::write(folder.0.join("forebay.redb"), b"this is no database").expect("written");
        let said = Store::open(&folder.0).expect_err("broken").to_string();
        assert!(said.contains("forebay.redb") && said.contains("move it away"), "{said}");
        std::fs::remove_file(folder.0.join("forebay.redb")).expect("removed");
        {
            let store = Store::open(&folder.0).expect("a store");
            let foreign = |database: &Database| {
                let write = database.begin_write()?;
                write.open_table(META)?.insert("format", 7)?;
                write.commit()?;
                Ok(())
            };
            store.with(foreign).expect("written");
        }
        let said = Store::open(&folder.0).expect_err("foreign").to_string();
        assert!(said.contains("format 7"), "{said}");
    }
}
