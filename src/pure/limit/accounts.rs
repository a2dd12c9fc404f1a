//! What one shard holds of the limits that all shards share.
//!
//! If each request drew from the board, all shards would write to the same few cache lines, over and
//! over. An account leases a little of a reservoir at a time and hands that out in plain integers: at
//! most what flows in within 20 ms, divided by the shards, and only where that is four times what the
//! request takes; a smaller limit is drawn from directly. So all shards together never hold more
//! than 20 ms of a limit, which the reservoir takes for drawn already: over any span they admit at
//! most `burst` plus what flows in during that span and those 20 ms. What nobody has used for a tick
//! goes back. `drawn = spent + held + leased + returned` at every moment, in every resource.
//!
//! Only reservoirs are leased from. Bounds on what runs at a time, strict limits and calendars are
//! drawn on the board: they are exact to the last one, and calendars outlive the process. What the
//! fleet leases to this gateway is a lease already, and is not leased on. Where nothing limits how
//! many run they are counted here as well, and reach the board with each tick, for the plan that may
//! limit them one day.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::FixedState;

use super::{Draw, What};
use crate::pure::board::{Dry, LimitRow, Rate, Resource};
use crate::pure::units::Instant;

/// One shard's accounts. Those of a row are found by the row itself, which they keep alive, and are
/// dropped after a tick without a use: there are never more than rows, which names bound.
#[derive(Debug)]
pub struct Accounts {
    shards: u64,
    rows: HashMap<usize, Own, FixedState>,
}

impl Accounts {
    /// For one of so many shards.
    pub fn new(shards: usize) -> Accounts {
        // A number of CPUs.
        Accounts { shards: shards.max(1) as u64, rows: HashMap::default() }
    }

    /// What was not used since the last tick goes back to the board. Called every 20 ms; costs some
    /// steps for each row that was used in the last two.
    pub fn tick(&mut self) {
        self.rows.retain(|_, own| own.tick());
    }

    /// All goes back: the shard ends, or limits change.
    pub fn give_back(&mut self) {
        for (_, mut own) in self.rows.drain() {
            own.give_back();
        }
    }

    /// What is held of a row.
    pub(super) fn of(&mut self, row: &Arc<LimitRow>) -> &mut Own {
        let shards = self.shards;
        self.rows.entry(key(row)).or_insert_with(|| Own {
            row: Arc::clone(row),
            shards,
            running: 0,
            accounts: Default::default(),
        })
    }

    /// How much of a resource of `row` is held at this rate.
    pub fn held(&self, row: &Arc<LimitRow>, what: What, rate: &Rate) -> u64 {
        let account = self.rows.get(&key(row)).and_then(|own| own.accounts.get(what as usize));
        account.filter(|account| account.rate == Some(*rate)).map_or(0, |account| account.credit)
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        self.give_back();
    }
}

/// As long as its accounts hold the row, nothing else lives there.
fn key(row: &Arc<LimitRow>) -> usize {
    Arc::as_ptr(row).addr()
}

/// What a shard holds of one row.
#[derive(Debug)]
pub(super) struct Own {
    row: Arc<LimitRow>,
    shards: u64,
    /// Requests that have begun less those that have ended, since the board was told last.
    running: i64,
    /// By [`What`]; only what has a rate.
    accounts: [Account; 4],
}

impl Own {
    pub(super) fn began(&mut self) {
        self.running += 1;
    }

    pub(super) fn ended(&mut self) {
        self.running -= 1;
    }

    /// Takes what a request needs, of what is held and of the board.
    ///
    /// # Errors
    /// [`Dry`]; then nothing has changed.
    pub(super) fn take(&mut self, draw: &Draw<'_>, now: Instant) -> Result<(), Dry> {
        self.accounts[draw.what as usize].take(draw, now, self.shards)
    }

    /// Undoes a take of this very moment.
    pub(super) fn undo(&mut self, draw: &Draw<'_>, now: Instant) {
        let rest = draw.amount - self.accounts[draw.what as usize].keep(draw, draw.amount);
        if rest > 0 {
            draw.resource.undo(draw.rate, now, rest);
        }
    }

    /// Replaces what was taken at `drawn` by what was used: less comes back here, and what does not
    /// fit to the board; more is paid from here, and what is not here is a debt on the board.
    pub(super) fn settle(&mut self, draw: &Draw<'_>, drawn: Instant, now: Instant, actual: u64) {
        let account = &mut self.accounts[draw.what as usize];
        let (unused, beyond) = match actual.checked_sub(draw.amount) {
            Some(0) => return,
            Some(beyond) => (0, beyond - account.pay(draw, beyond)),
            None => {
                let unused = draw.amount - actual;
                (unused - account.keep(draw, unused), 0)
            }
        };
        if unused > 0 || beyond > 0 {
            draw.resource.settle(draw.rate, drawn, now, unused, beyond);
        }
    }

    /// Whether anything of it is in use.
    fn tick(&mut self) -> bool {
        let mut stirred = std::mem::take(&mut self.running);
        count(&self.row, stirred);
        for (account, resource) in self.accounts.iter_mut().zip(resources(&self.row)) {
            match std::mem::take(&mut account.stirred) {
                true => stirred = 1,
                false => account.give_back(resource),
            }
        }
        stirred != 0
    }

    fn give_back(&mut self) {
        count(&self.row, std::mem::take(&mut self.running));
        for (account, resource) in self.accounts.iter_mut().zip(resources(&self.row)) {
            account.give_back(resource);
        }
    }
}

/// In the order of [`What`].
fn resources(row: &LimitRow) -> [&Resource; 4] {
    [&row.requests, &row.tokens, &row.input, &row.output]
}

fn count(row: &LimitRow, running: i64) {
    match running {
        0 => {}
        1.. => row.concurrency.add(running.unsigned_abs()),
        _ => row.concurrency.sub(running.unsigned_abs()),
    }
}

/// What a shard holds of one resource.
#[derive(Debug, Default)]
struct Account {
    /// Drawn from the reservoir at `rate`, and not given to a request.
    credit: u64,
    /// The most that may lie here; zero where nothing was leased.
    most: u64,
    rate: Option<Rate>,
    /// A request has drawn since the last tick.
    stirred: bool,
}

impl Account {
    fn take(&mut self, draw: &Draw<'_>, now: Instant, shards: u64) -> Result<(), Dry> {
        if self.credit >= draw.amount && self.rate == Some(*draw.rate) {
            self.credit -= draw.amount;
            self.stirred = true;
            return Ok(());
        }
        self.lease(draw, now, shards)
    }

    /// Draws what is missing, and a lease on top if there is one to be had.
    #[inline(never)]
    fn lease(&mut self, draw: &Draw<'_>, now: Instant, shards: u64) -> Result<(), Dry> {
        let Draw { rate, resource, amount, .. } = *draw;
        if self.rate != Some(*rate) {
            // Another plan's: a share of one limit is another amount of the next.
            self.give_back(resource);
            self.rate = Some(*rate);
        }
        if amount > rate.most() {
            return Err(Dry::Never);
        }
        let lease = rate.lease(amount, shards);
        let drawn = resource.lease(rate, now, amount - self.credit, lease)?;
        self.credit = self.credit + drawn - amount;
        self.most = self.most.max(lease);
        self.stirred = true;
        Ok(())
    }

    /// Keeps of what comes back as much as may lie here; how much that is.
    fn keep(&mut self, draw: &Draw<'_>, amount: u64) -> u64 {
        let kept = if self.is_for(draw) { amount.min(self.most - self.credit) } else { 0 };
        self.credit += kept;
        kept
    }

    /// Pays as much of a debt as is here; how much that is.
    fn pay(&mut self, draw: &Draw<'_>, amount: u64) -> u64 {
        let paid = if self.is_for(draw) { amount.min(self.credit) } else { 0 };
        self.credit -= paid;
        paid
    }

    /// Whether what lies here is of the same kind: not of another plan's limit, nor, once a fleet shares
    /// it, this gateway's.
    fn is_for(&self, draw: &Draw<'_>) -> bool {
        self.most > 0 && self.rate == Some(*draw.rate) && !draw.resource.lease.is_on()
    }

    fn give_back(&mut self, resource: &Resource) {
        if let Some(rate) = &self.rate
            && self.credit > 0
        {
            resource.give(rate, self.credit);
        }
        *self = Account::default();
    }
}

#[cfg(test)]
mod tests;
