//! The timers of a shard: kept by deadline, woken by one alarm of the kernel's.
//!
//! The runtime has timers of its own, which read the clock at each turn of the shard and give each
//! wait a timeout of its own. A turn is as a rule one chunk, and no timer is due: the deadlines of
//! streams move later with every chunk and those of idle connections are minutes away. So the
//! kernel is told only of the earliest deadline, when that moves earlier or has passed: about fifty
//! times a second.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll, Waker};

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::{clock, now};
use crate::pure::units::Instant;

thread_local! {
    static TIMERS: RefCell<Timers> = const { RefCell::new(Timers::new()) };
}

struct Timers {
    /// Who waits for what, and a number that tells equal deadlines apart.
    waiting: BTreeMap<(Instant, u64), Waker>,
    count: u64,
    alarm: Option<OwnedFd>,
    /// What the alarm is set to.
    set_to: Option<Instant>,
}

impl Timers {
    const fn new() -> Timers {
        Timers { waiting: BTreeMap::new(), count: 0, alarm: None, set_to: None }
    }

    /// Sees to it that the alarm goes off in time for the earliest.
    fn set_alarm(&mut self) {
        let Some((&(earliest, _), _)) = self.waiting.first_key_value() else { return };
        if self.set_to.is_some_and(|set_to| set_to <= earliest) {
            return;
        }
        let Some(alarm) = &self.alarm else { return };
        let nanos = earliest.nanos();
        let at = Timespec {
            // 584 years of nanoseconds are 2^34 seconds.
            tv_sec: (nanos / 1_000_000_000) as i64,
            tv_nsec: (nanos % 1_000_000_000) as _,
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
        // It can fail only for a time that is none.
        if timerfd_settime(alarm, TimerfdTimerFlags::ABSTIME, &once).is_ok() {
            self.set_to = Some(earliest);
        }
    }

    fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let first = self.waiting.first_entry().filter(|first| first.key().0 <= now)?;
        Some(first.remove())
    }
}

/// Makes this thread's alarm and gives a handle of it, to be watched: [`ring`] is to be called each
/// time that it has become readable.
///
/// # Errors
/// The process is out of descriptors.
pub(super) fn begin() -> io::Result<OwnedFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let alarm = timerfd_create(TimerfdClockId::Monotonic, flags)?;
    let watched = alarm.try_clone()?;
    TIMERS.with_borrow_mut(|timers| {
        timers.alarm = Some(alarm);
        timers.set_to = None;
        timers.set_alarm();
    });
    Ok(watched)
}

/// Wakes who has waited long enough.
pub(super) fn ring() {
    // The time of now, not of this turn: an alarm of this turn would ring in vain, and again.
    let now = clock();
    // One at a time: whoever is woken may set timers.
    while let Some(due) = TIMERS.with_borrow_mut(|timers| timers.pop_due(now)) {
        due.wake();
    }
    TIMERS.with_borrow_mut(|timers| {
        timers.set_to = None;
        timers.set_alarm();
    });
}

/// A place among those who wait, left when dropped.
struct Waiting {
    until: Instant,
    number: u64,
}

impl Waiting {
    fn begin(until: Instant, waker: &Waker) -> Waiting {
        TIMERS.with_borrow_mut(|timers| {
            let number = timers.count;
            timers.count += 1;
            timers.waiting.insert((until, number), waker.clone());
            timers.set_alarm();
            Waiting { until, number }
        })
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        // Behind the thread's end there is nothing to leave.
        let _ = TIMERS.try_with(|timers| {
            timers.borrow_mut().waiting.remove(&(self.until, self.number));
        });
    }
}

/// A deadline that is cheap to move later: it is waited for anew only when it has been waited for
/// in vain.
///
/// A stream pushes its deadline forward with every chunk; moving a place in a queue each time would
/// cost more than forwarding the chunk.
#[derive(Default)]
pub struct Timer {
    deadline: Option<Instant>,
    waiting: Option<Waiting>,
}

impl Timer {
    pub const fn new() -> Timer {
        Timer { deadline: None, waiting: None }
    }

    /// Sets or moves the deadline; `None` turns it off. True if the timer must be polled for the
    /// deadline to be kept; one that was moved later will wake as it is.
    pub fn set(&mut self, deadline: Option<Instant>) -> bool {
        let was_off = self.deadline.is_none();
        self.deadline = deadline;
        match (deadline, &self.waiting) {
            (None, _) => false,
            (Some(_), None) => true,
            (Some(deadline), Some(waiting)) => was_off || waiting.until > deadline,
        }
    }

    /// Ready once the deadline has passed, never early, and again at each poll until it is moved.
    /// Always to be polled for the same waker: the first one is kept.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(deadline) = self.deadline else {
            return Poll::Pending;
        };
        let now = now();
        if now >= deadline {
            self.waiting = None;
            return Poll::Ready(());
        }
        let wakes = |waiting: &Waiting| waiting.until <= deadline && waiting.until > now;
        if !self.waiting.as_ref().is_some_and(wakes) {
            self.waiting = Some(Waiting::begin(deadline, cx.waker()));
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    //! Random timers against a list: who is woken at which moment, and what the alarm is set to.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::task::Wake;
    use std::time::Duration;

    use super::*;
    use crate::pure::units::Rng;

    #[derive(Default)]
    struct Count(AtomicU64);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_is_due_is_woken_and_nobody_else() {
        for seed in 0..200 {
            let mut rng = Rng::seeded(seed);
            let mut timers = Timers::new();
            let mut expected: Vec<(u64, Arc<Count>)> = Vec::new();
            for at in 0..64 {
                let until = at + rng.next_u64() % 16;
                let count = Arc::new(Count::default());
                let key = (Instant::from_nanos(until), at);
                timers.waiting.insert(key, Waker::from(Arc::clone(&count)));
                if rng.next_u64().is_multiple_of(4) {
                    timers.waiting.remove(&key);
                    expected.push((u64::MAX, count));
                } else {
                    expected.push((until, count));
                }
                while let Some(due) = timers.pop_due(Instant::from_nanos(at)) {
                    due.wake();
                }
                for (until, count) in &expected {
                    let woken = u64::from(*until <= at);
                    assert_eq!(count.0.load(Ordering::Relaxed), woken, "seed {seed}, at {at}");
                }
            }
        }
    }

    #[test]
    fn the_alarm_is_never_later_than_the_earliest() {
        let _alarm = begin().unwrap();
        let set_to = || TIMERS.with_borrow(|timers| timers.set_to);
        let start = now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let waker = Waker::noop();
        let late = Waiting::begin(at(60), waker);
        assert_eq!(set_to(), Some(at(60)));
        let early = Waiting::begin(at(30), waker);
        assert_eq!(set_to(), Some(at(30)));
        // One that leaves costs an alarm in vain, which sets the next.
        drop(early);
        assert_eq!(set_to(), Some(at(30)));
        ring();
        assert_eq!(set_to(), Some(at(60)));
        drop(late);
        ring();
        assert_eq!(set_to(), None);
    }
}
