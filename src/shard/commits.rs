//! How far the store has got, for requests that wait until what they took is on disk.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::task::{Context, Poll};

use super::Shard;
use crate::client::Client;
use crate::pure::plan::HalfClose;
use crate::rt;

/// The rounds of the store, shared by the shards, which wait, and the store's thread.
///
/// A round writes what was counted before it began. Who has counted something asks for a round and
/// waits for its number; a round that had begun by then may have looked already.
#[derive(Default)]
pub struct Commits {
    begun: AtomicU64,
    done: AtomicU64,
    /// Somebody waits for a round that had not begun.
    wanted: AtomicBool,
    /// Rounds have failed for a while: nobody waits for them.
    failing: AtomicBool,
    /// Wakes the store's thread.
    store: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// One for each shard, rung after each round that was waited for.
    bells: Vec<OwnedFd>,
}

impl Commits {
    /// For so many shards; for none where there is no store.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn new(shards: usize) -> io::Result<Commits> {
        let bells = (0..shards).map(|_| rt::bell()).collect::<io::Result<_>>()?;
        Ok(Commits { bells, ..Commits::default() })
    }

    /// The bell of shard `index`, where one is rung.
    pub fn bell(&self, index: usize) -> Option<&OwnedFd> {
        self.bells.get(index)
    }

    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// Whether there is a store at all. From the start: its thread may come to life behind the first
    /// answers, and they wait for it.
    fn are_made(&self) -> bool {
        !self.bells.is_empty()
    }

    /// The round that writes what this thread has counted until now. Wakes the store.
    fn next(&self) -> u64 {
        // Either this sees that a round has begun, and takes the next, or that round sees what was
        // counted: the other half is in `begin`.
        fence(Ordering::SeqCst);
        let round = self.begun.load(Ordering::Relaxed) + 1;
        if !self.wanted.swap(true, Ordering::AcqRel)
            && let Some(store) = self.store.get()
        {
            store();
        }
        round
    }

    fn is_done(&self, round: u64) -> bool {
        self.done.load(Ordering::Acquire) >= round
    }
}

/// The store's side.
impl Commits {
    /// There is a store: `wake` has it look whether a round is wanted. It must not block.
    pub fn serve(&self, wake: impl Fn() + Send + Sync + 'static) {
        // There is one store in a process.
        let _ = self.store.set(Box::new(wake));
    }

    /// Begins a round: what was counted before is to be written. True if it is waited for.
    pub fn begin(&self) -> bool {
        let wanted = self.wanted.swap(false, Ordering::AcqRel);
        self.begun.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        wanted
    }

    /// All that the round was to write is on disk.
    pub fn end(&self) {
        self.done.store(self.begun.load(Ordering::Relaxed), Ordering::Release);
        self.failing.store(false, Ordering::Relaxed);
    }

    /// The round could not be written. Who waits goes on waiting, unless it is given up.
    pub fn fail(&self, given_up: bool) {
        self.failing.store(given_up, Ordering::Relaxed);
        self.wanted.store(true, Ordering::Release);
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// Wakes who waits.
    pub fn ring(&self) {
        self.bells.iter().for_each(rt::ring);
    }
}

/// What came of waiting for the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    OnDisk,
    /// The store cannot write at the moment.
    Failing,
    /// The client left meanwhile.
    Gone,
}

/// Waits until what this shard has counted so far is on disk.
pub async fn kept(shard: &Shard, client: &mut Client, half_close: HalfClose) -> Kept {
    let commits = &shard.shared.commits;
    if !commits.are_made() {
        return Kept::OnDisk;
    }
    let round = commits.next();
    std::future::poll_fn(|cx: &mut Context<'_>| {
        if commits.is_done(round) {
            return Poll::Ready(Kept::OnDisk);
        }
        if commits.is_failing() {
            return Poll::Ready(Kept::Failing);
        }
        if client.poll_gone(half_close, cx).is_ready() {
            return Poll::Ready(Kept::Gone);
        }
        shard.committing.borrow_mut().push(cx.waker().clone());
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Many threads count and ask; whenever a round is done, what was counted before it was asked
    /// for has been read.
    #[test]
    fn a_round_that_is_done_has_seen_what_was_counted_before_it_was_asked_for() {
        const THREADS: usize = 3;
        const TURNS: u64 = 20_000;
        let commits = Commits::default();
        let counted: [AtomicU64; THREADS] = Default::default();
        let written: [AtomicU64; THREADS] = Default::default();
        let over = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for (counted, written) in counted.iter().zip(&written) {
                scope.spawn(|| {
                    for turn in 1..=TURNS {
                        counted.store(turn, Ordering::Relaxed);
                        let round = commits.next();
                        while !commits.is_done(round) {
                            std::thread::yield_now();
                        }
                        assert!(written.load(Ordering::Relaxed) >= turn);
                    }
                    over.fetch_add(1, Ordering::Release);
                });
            }
            while over.load(Ordering::Acquire) < THREADS as u64 {
                commits.begin();
                for (counted, written) in counted.iter().zip(&written) {
                    written.store(counted.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                commits.end();
                std::thread::yield_now();
            }
        });
    }

    #[test]
    fn who_comes_before_the_stores_thread_waits_for_its_first_round() {
        assert!(!Commits::new(0).unwrap().are_made());
        let commits = Commits::new(1).unwrap();
        assert!(commits.are_made());
        let round = commits.next();
        assert!(!commits.is_done(round));
        commits.serve(|| {});
        assert!(commits.begin());
        commits.end();
        assert!(commits.is_done(round));
    }

    #[test]
    fn who_waits_is_told_when_the_store_gives_up_and_when_it_works_again() {
        let commits = Arc::new(Commits::default());
        let round = commits.next();
        assert!(commits.begin());
        commits.fail(false);
        assert!(!commits.is_done(round) && !commits.is_failing() && commits.is_wanted());
        assert!(commits.begin());
        commits.fail(true);
        assert!(!commits.is_done(round) && commits.is_failing());
        assert!(commits.begin());
        commits.end();
        assert!(commits.is_done(round) && !commits.is_failing());
        assert!(!commits.is_wanted() && !commits.begin());
    }
}
