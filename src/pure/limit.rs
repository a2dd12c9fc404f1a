//! Limits and money: what a request reserves before it is sent, and what it is charged in the end.
//!
//! A request stands under up to seven [`Scope`]s at once: its key, its tenant's use of the model, the
//! tier that its token names, its tenant, the route, the model, the gateway. Each limits some of:
//! requests, tokens (together, input, output) per minute, tokens per day, requests at a time, a budget.
//! All of them must allow it or nothing is taken. What is taken is a [`Grant`], which is settled once,
//! to what was really used.
//!
//! The words are on the board, so that limits are exact over all shards; what shards keep of their own
//! is how long answers have been ([`History`]) and what they lease of large limits ([`Accounts`]).

mod accounts;
mod history;
mod windows;

use std::sync::Arc;
use std::time::Duration;

pub use accounts::Accounts;
use accounts::Own;
pub use history::History;
pub use windows::{Per, Windows};

use crate::pure::board::{Allowance, Calendar, Dry, LimitRow, Rate, Resource, ScopeKind};
use crate::pure::units::Instant;

/// Limits of one scope, as the plan has them.
#[derive(Clone, Debug)]
pub struct Scope {
    pub kind: ScopeKind,
    pub row: Arc<LimitRow>,
    pub requests: Option<Rate>,
    pub tokens: Option<Rate>,
    pub input: Option<Rate>,
    pub output: Option<Rate>,
    pub concurrency: Option<u32>,
    /// Tokens within a day (UTC).
    pub day: Option<u64>,
    pub budget: Option<Cap>,
    /// How long a request may wait for one that runs to end, instead of being refused at once.
    pub wait: Duration,
}

/// The numbers of a scope's calendars, which the store and the fleet keep: tokens within a day, then
/// a budget's money and its tokens by kind of window.
const DAY: usize = 0;

fn money(per: Per) -> usize {
    1 + per as usize
}

fn tokens(per: Per) -> usize {
    5 + per as usize
}

/// What calendar `number` counts of an amount.
fn of_calendar(number: usize, amount: Amount) -> u64 {
    match number {
        1..5 => amount.nano,
        _ => amount.tokens(),
    }
}

/// The kind of window that calendar `number` counts in.
pub fn per_of(number: usize) -> Per {
    match number {
        DAY => Per::Day,
        _ => Per::ALL[(number - 1) % Per::ALL.len()],
    }
}

/// A budget: how much may be spent within a calendar window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap {
    /// In billionths of a dollar.
    pub nano: Option<u64>,
    pub tokens: Option<u64>,
    pub per: Per,
    /// Over it, requests go on (to a cheaper model, say): they are counted and not refused.
    pub soft: bool,
    /// Over it, streams under way are cut.
    pub cut: bool,
}

/// An amount of everything that is limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    pub input: u64,
    pub output: u64,
    /// In billionths of a dollar.
    pub nano: u64,
}

impl Amount {
    pub fn tokens(self) -> u64 {
        self.input.saturating_add(self.output)
    }

    fn plus(self, more: Amount) -> Amount {
        Amount {
            input: self.input.saturating_add(more.input),
            output: self.output.saturating_add(more.output),
            nano: self.nano.saturating_add(more.nano),
        }
    }

    /// What it is of a rate, if it is of so many requests.
    fn of(self, what: What, requests: u64) -> u64 {
        match what {
            What::Requests => requests,
            What::Input => self.input,
            What::Output => self.output,
            _ => self.tokens(),
        }
    }
}

/// The scopes that a request stands under, the narrowest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scopes<'p>([Option<&'p Scope>; SCOPES]);

const SCOPES: usize = 7;

impl<'p> Scopes<'p> {
    pub fn new(scopes: [Option<&'p Scope>; SCOPES]) -> Scopes<'p> {
        Scopes(scopes)
    }

    /// One alone.
    pub fn of(scope: &'p Scope) -> Scopes<'p> {
        let mut scopes = Scopes::default();
        scopes.0[0] = Some(scope);
        scopes
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &'p Scope> {
        self.0.iter().copied().flatten()
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Whether anything is counted over a day or longer.
    pub fn count_windows(&self) -> bool {
        self.iter().any(Scope::counts_windows)
    }

    /// Reserves `ask` in every scope, or nothing in any: each is drawn from at once, and what was drawn
    /// goes back if a later one refuses. For as long as that takes, others may find it missing.
    ///
    /// # Errors
    /// The first scope that refuses.
    pub fn take(
        &self,
        ask: Amount,
        now: Instant,
        windows: &Windows,
        accounts: &mut Accounts,
    ) -> Result<Grant, Denied> {
        for (done, scope) in self.iter().enumerate() {
            if let Err(denied) = scope.take(ask, now, windows, accounts.of(&scope.row)) {
                for taken in self.iter().take(done) {
                    let all = (usize::MAX, usize::MAX);
                    taken.undo(ask, now, windows, all, accounts.of(&taken.row));
                }
                return Err(denied);
            }
        }
        Ok(Grant { reserved: ask, extra: Amount::default(), at: now, windows: *windows })
    }

    /// Whether a budget cuts answers that run into it.
    pub fn cut(&self) -> bool {
        self.iter().any(|scope| scope.budget.is_some_and(|cap| cap.cut))
    }

    /// Reserves `more` for an answer that turns out to be longer than `grant` foresaw, in the budgets
    /// that cut, or nothing in any. False if one of them is spent.
    pub fn extend(&self, grant: &mut Grant, more: Amount, now: Instant) -> bool {
        let cutting = || self.iter().filter(|scope| scope.budget.is_some_and(|cap| cap.cut));
        for (done, scope) in cutting().enumerate() {
            if !scope.extend(more, &grant.windows, now) {
                for taken in cutting().take(done) {
                    taken.shrink(more, &grant.windows);
                }
                return false;
            }
        }
        grant.extra = grant.extra.plus(more);
        true
    }

    /// Charges what was used in the place of what `grant` reserved.
    pub fn settle(&self, grant: &Grant, used: Amount, now: Instant, accounts: &mut Accounts) {
        for scope in self.iter() {
            scope.settle(grant, used, 1, now, accounts.of(&scope.row));
        }
    }

    /// Gives back all that `grant` reserved, as if it had never been asked for.
    pub fn cancel(&self, grant: &Grant, now: Instant, accounts: &mut Accounts) {
        for scope in self.iter() {
            scope.settle(grant, Amount::default(), 0, now, accounts.of(&scope.row));
        }
    }

    /// The most tokens that could ever be drawn at once.
    pub fn most_tokens(&self) -> u64 {
        let rates = self.iter().filter_map(|scope| scope.tokens.as_ref());
        rates.map(Rate::most).min().unwrap_or(u64::MAX)
    }

    /// What is left for this shard's requests, for the answer's fields: of requests and of tokens, by
    /// the scope that has the smallest share of its limit left on the board.
    pub fn quotas(&self, now: Instant, accounts: &Accounts) -> Quotas {
        let (mut requests, mut tokens) = (None, None);
        for scope in self.iter() {
            tighter(&mut requests, scope, &scope.requests, &scope.row.requests, now);
            tighter(&mut tokens, scope, &scope.tokens, &scope.row.tokens, now);
        }
        let quota = |tightest: Option<Tightest<'_>>, what| {
            let Tightest { scope, rate, resource, .. } = tightest?;
            let held = accounts.held(&scope.row, what, rate);
            Some(Quota {
                limit: rate.limit(),
                left: (resource.left(rate, now) + held).min(rate.most()),
                reset: resource.refills_in(rate, now).saturating_sub(rate.fills(held)),
            })
        };
        Quotas { requests: quota(requests, What::Requests), tokens: quota(tokens, What::Tokens) }
    }

    /// The longest that any scope lets a request wait for one that runs to end.
    pub fn wait(&self) -> Duration {
        self.iter().map(|scope| scope.wait).max().unwrap_or_default()
    }
}

/// What a request holds of every limit, until it is settled. Settling it twice would charge twice:
/// its owner takes it out to do so.
#[derive(Clone, Copy, Debug)]
pub struct Grant {
    reserved: Amount,
    /// Reserved beside, in budgets that cut.
    extra: Amount,
    at: Instant,
    /// Amounts are settled in the windows that they were reserved in.
    windows: Windows,
}

impl Grant {
    pub fn reserved(&self) -> Amount {
        self.reserved
    }

    /// What budgets that cut hold beside.
    pub fn extra(&self) -> Amount {
        self.extra
    }
}

/// What is limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Requests,
    Tokens,
    Input,
    Output,
    Concurrency,
    Day,
    Budget,
}

/// Why nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied {
    pub what: What,
    pub whose: ScopeKind,
    pub limit: u64,
    pub dry: Dry,
}

/// One limit's state, as clients are told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    pub limit: u64,
    pub left: u64,
    /// Until all of it is there again.
    pub reset: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quotas {
    pub requests: Option<Quota>,
    pub tokens: Option<Quota>,
}

/// The limit with the smallest share left so far.
struct Tightest<'p> {
    share: f64,
    scope: &'p Scope,
    rate: &'p Rate,
    resource: &'p Resource,
}

fn tighter<'p>(
    tightest: &mut Option<Tightest<'p>>,
    scope: &'p Scope,
    rate: &'p Option<Rate>,
    resource: &'p Resource,
    now: Instant,
) {
    let Some(rate) = rate else { return };
    let share = resource.share_left(rate, now);
    if tightest.as_ref().is_none_or(|tightest| share < tightest.share) {
        *tightest = Some(Tightest { share, scope, rate, resource });
    }
}

impl Scope {
    /// One that limits nothing yet.
    pub fn unlimited(row: Arc<LimitRow>) -> Scope {
        Scope {
            kind: row.kind,
            row,
            requests: None,
            tokens: None,
            input: None,
            output: None,
            concurrency: None,
            day: None,
            budget: None,
            wait: Duration::ZERO,
        }
    }

    /// Whether the budget of this scope is spent.
    pub fn is_spent(&self, windows: &Windows) -> bool {
        self.spent(windows).is_some_and(|share| share >= 1.0)
    }

    /// How much of the budget is spent or held, as a share of it: the larger one of money and
    /// tokens. `None` without a budget.
    pub fn spent(&self, windows: &Windows) -> Option<f64> {
        let cap = self.budget?;
        let window = windows.number(cap.per);
        let share = |(number, _, limit): (usize, Per, u64)| {
            // Both are below 2^56; a share needs no more than the 53 bits that are kept.
            let own = self.row.calendars[number].used(window) as f64 / (limit as f64).max(1.0);
            // Others of a fleet may have spent what this gateway has not.
            let gone = self.row.allowances[number].is_gone(window);
            if gone { own.max(1.0) } else { own }
        };
        let budget = self.calendars().filter(|(number, ..)| *number != DAY);
        Some(budget.map(share).fold(0.0, f64::max))
    }

    /// Whether anything is counted over a day or longer.
    fn counts_windows(&self) -> bool {
        self.day.is_some() || self.budget.is_some()
    }

    /// Every rate in force, with its resource.
    pub fn rates(&self) -> impl Iterator<Item = (What, &Rate, &Resource)> {
        let row = &*self.row;
        [
            (What::Requests, &self.requests, &row.requests),
            (What::Tokens, &self.tokens, &row.tokens),
            (What::Input, &self.input, &row.input),
            (What::Output, &self.output, &row.output),
        ]
        .into_iter()
        .filter_map(|(what, rate, resource)| Some((what, rate.as_ref()?, resource)))
    }

    /// Every calendar in force: its number, its kind of window, and its limit.
    pub fn calendars(&self) -> impl Iterator<Item = (usize, Per, u64)> {
        let day = self.day.map(|limit| (DAY, Per::Day, limit));
        let money = self.budget.and_then(|cap| Some((money(cap.per), cap.per, cap.nano?)));
        let tokens = self.budget.and_then(|cap| Some((tokens(cap.per), cap.per, cap.tokens?)));
        [day, money, tokens].into_iter().flatten()
    }

    /// What `amount` draws from reservoirs.
    fn draws(&self, amount: Amount) -> impl Iterator<Item = Draw<'_>> {
        self.rates().map(move |(what, rate, resource)| {
            // Who reserves nothing holds one, so that it is refused while its tenant is in debt.
            Draw { what, rate, resource, amount: amount.of(what, 1).max(1) }
        })
    }

    /// What `amount` books in calendar windows.
    fn bookings(&self, amount: Amount) -> impl Iterator<Item = Booking<'_>> {
        let soft = self.budget.is_some_and(|cap| cap.soft);
        self.calendars().map(move |(number, per, limit)| Booking {
            what: if number == DAY { What::Day } else { What::Budget },
            limit: if soft && number != DAY { u64::MAX } else { limit },
            per,
            calendar: &self.row.calendars[number],
            allowance: &self.row.allowances[number],
            number,
            amount: of_calendar(number, amount),
        })
    }

    fn denied(&self, what: What, limit: u64, dry: Dry) -> Denied {
        Denied { what, whose: self.kind, limit, dry }
    }

    /// Takes all or nothing of this scope.
    fn take(
        &self,
        ask: Amount,
        now: Instant,
        windows: &Windows,
        own: &mut Own,
    ) -> Result<(), Denied> {
        match self.concurrency.map(u64::from) {
            Some(limit) if !self.row.concurrency.add_within(1, limit) => {
                return Err(self.denied(What::Concurrency, limit, Dry::For(SOON)));
            }
            Some(_) => {}
            None => own.began(),
        }
        let (mut drawn, mut booked) = (0, 0);
        let mut take_all = || {
            self.draws(ask).try_for_each(|draw| {
                own.take(&draw, now)
                    .map_err(|dry| self.denied(draw.what, draw.rate.limit(), dry))?;
                drawn += 1;
                Ok(())
            })?;
            if !self.counts_windows() {
                return Ok(());
            }
            for booking in self.bookings(ask) {
                let number = windows.number(booking.per);
                let limit = booking.allowance.limit(number, booking.limit);
                // Who has spent it all is refused even when this request is free.
                if booking.calendar.used(number) >= limit
                    || !booking.calendar.take(number, booking.amount, limit)
                {
                    let dry = booking.dry(booking.calendar.used(number), now, windows);
                    return Err(self.denied(booking.what, booking.limit, dry));
                }
                booked += 1;
            }
            Ok(())
        };
        let result = take_all();
        if result.is_err() {
            self.undo(ask, now, windows, (drawn, booked), own);
        } else if booked > 0 {
            // Behind the change: a commit that looks in between would take the row for written.
            self.row.touch();
        }
        result
    }

    /// As if it had never been asked: so many draws and bookings of `ask` go back.
    fn undo(
        &self,
        ask: Amount,
        now: Instant,
        windows: &Windows,
        (drawn, booked): (usize, usize),
        own: &mut Own,
    ) {
        self.ended(own);
        for draw in self.draws(ask).take(drawn) {
            own.undo(&draw, now);
        }
        for booking in self.bookings(ask).take(booked) {
            booking.calendar.settle(windows.number(booking.per), booking.amount, 0);
            self.row.touch();
        }
    }

    fn ended(&self, own: &mut Own) {
        match self.concurrency {
            Some(_) => self.row.concurrency.sub(1),
            None => own.ended(),
        }
    }

    /// Books `more` in the budget, or nothing of it.
    fn extend(&self, more: Amount, windows: &Windows, now: Instant) -> bool {
        let budget = || self.bookings(more).filter(|booking| booking.what == What::Budget);
        for (done, booking) in budget().enumerate() {
            let number = windows.number(booking.per);
            let limit = booking.allowance.limit(number, booking.limit);
            let taken = booking.calendar.take(number, booking.amount, limit);
            // The fleet is being asked for more: it is spent only where the fleet says so.
            let asked = || booking.dry(booking.calendar.used(number), now, windows) == Dry::Asked;
            if !taken && asked() {
                booking.calendar.settle(number, 0, booking.amount);
            } else if !taken {
                for booking in budget().take(done) {
                    booking.calendar.settle(windows.number(booking.per), booking.amount, 0);
                }
                self.row.touch();
                return false;
            }
        }
        self.row.touch();
        true
    }

    fn shrink(&self, less: Amount, windows: &Windows) {
        for booking in self.bookings(less).filter(|booking| booking.what == What::Budget) {
            booking.calendar.settle(windows.number(booking.per), booking.amount, 0);
        }
        self.row.touch();
    }

    fn settle(&self, grant: &Grant, used: Amount, requests: u64, now: Instant, own: &mut Own) {
        self.ended(own);
        self.draws(grant.reserved).for_each(|draw| {
            own.settle(&draw, grant.at, now, used.of(draw.what, requests));
        });
        if !self.counts_windows() {
            return;
        }
        let cut = self.budget.is_some_and(|cap| cap.cut);
        for booking in self.bookings(grant.reserved) {
            let extra = match booking.what {
                What::Budget if cut => booking.of(grant.extra),
                _ => 0,
            };
            let number = grant.windows.number(booking.per);
            let reserved = booking.amount.saturating_add(extra);
            booking.calendar.settle(number, reserved, booking.of(used));
        }
        self.row.touch();
    }
}

/// An amount of a resource with a rate.
struct Draw<'a> {
    what: What,
    rate: &'a Rate,
    resource: &'a Resource,
    amount: u64,
}

/// An amount of what a calendar window may hold.
struct Booking<'a> {
    what: What,
    limit: u64,
    per: Per,
    calendar: &'a Calendar,
    allowance: &'a Allowance,
    number: usize,
    amount: u64,
}

impl Booking<'_> {
    /// The same of another amount.
    fn of(&self, amount: Amount) -> u64 {
        of_calendar(self.number, amount)
    }

    /// How long it will not fit where `used` is used.
    fn dry(&self, used: u64, now: Instant, windows: &Windows) -> Dry {
        if used.saturating_add(self.amount) <= self.limit
            && used < self.limit
            && let Some(dry) = self.allowance.want(windows.number(self.per), used, self.amount)
        {
            return dry;
        }
        match windows.left(self.per, now) {
            Some(left) if self.amount <= self.limit => Dry::For(left),
            _ => Dry::Never,
        }
    }
}

/// When a running request may end; nobody knows.
const SOON: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
