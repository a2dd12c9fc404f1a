//! `forebay mock`: a scripted backend that speaks OpenAI's and Anthropic's wire formats, for the
//! demo, the tests and whoever wants to try a configuration without a GPU.
//!
//! It answers like a well-behaved engine until its [`Script`] or the request itself (header
//! `x-mock`, body member `"mock"`; see [`KEYS`]) asks for a fault, and it keeps the books: what it
//! was sent, what it really generated, and when it noticed that a client had left
//! ([`Counters`]). A gateway's numbers can be held against these.
//!
//! ```no_run
//! use forebay::mock::{self, Script};
//!
//! # fn main() -> std::io::Result<()> {
//! let script = Script::instant("tokens=5, reset_after=3").map_err(std::io::Error::other)?;
//! let mock = mock::start(script)?;
//! println!("send something to {}", mock.url());
//! mock.counters().wait(std::time::Duration::from_secs(60), |totals| totals.cut == 1);
//! # Ok(())
//! # }
//! ```
//!
//! Not for measuring: it allocates per event and keeps requests in memory.

mod conn;
mod lists;
mod page;
mod reply;
mod say;
mod script;
mod stream;
mod tally;
#[cfg(test)]
mod tests;
mod text;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

pub use script::{
    Act, Cut, Eol, ErrorBody, FramingSay, Garbage, Health, KEYS, Key, Metrics, Script, UsageSay,
};
pub use tally::{BODY_KEPT_MAX, Counters, Outcome, Seen, Totals, Truth};

use crate::pure::units::Rng;
use crate::rt::{self, Driver, Listener, Timer};

/// The command line of `forebay mock`. Every key of an act is a flag as well.
#[derive(Clone, Debug, clap::Args)]
pub struct MockArgs {
    /// Where to listen; port 0 takes a free one. The address is printed.
    #[arg(long, default_value = "127.0.0.1:0")]
    pub listen: SocketAddr,
    /// A model to serve (repeatable). Without any, every name is served.
    #[arg(long = "model", value_name = "NAME")]
    pub models: Vec<String>,
    /// Texts, ids and random waits follow from it.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Demand this key as `Authorization: Bearer KEY` or `x-api-key: KEY`.
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// What /metrics says.
    #[arg(long, value_enum, default_value_t = Metrics::Vllm)]
    pub metrics: Metrics,
    /// Run at most so many requests at a time; more wait in order.
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,
    /// Refuse longer prompts (with the output they ask for) as an engine does.
    #[arg(long, value_name = "TOKENS")]
    pub context: Option<u64>,
    /// Close a kept connection after this time without a request.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = script::time)]
    pub idle: Duration,
    /// `KEY=VALUE, …`, as in the request header `x-mock` (repeatable).
    #[arg(long = "fault", value_name = "KEY=VALUE")]
    pub faults: Vec<String>,
    #[command(flatten)]
    pub act: Act,
}

impl MockArgs {
    /// The script that these arguments describe.
    ///
    /// # Errors
    /// A `--fault` that is not understood.
    pub fn script(&self) -> Result<Script, String> {
        let mut act = self.act.clone();
        for fault in &self.faults {
            act.apply(fault)?;
        }
        Ok(Script {
            models: self.models.clone(),
            seed: self.seed,
            key: self.key.clone(),
            metrics: self.metrics,
            slots: self.slots,
            context: self.context,
            idle: self.idle,
            act,
            ..Script::default()
        })
    }
}

/// Runs a mock until the process is told to end, after printing
/// `listening on http://ADDRESS:PORT`.
///
/// # Errors
/// A fault that is not understood, or an address that cannot be bound.
pub fn run(args: &MockArgs) -> io::Result<()> {
    let script = args.script().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
    let mock = serve(listen(args.listen)?, script)?;
    // One write: whoever waits for the line gets it whole.
    let line = format!("listening on {}\n", mock.url());
    io::stdout().write_all(line.as_bytes())?;
    io::stdout().flush()?;
    mock.join()
}

/// Starts a mock on a free port of 127.0.0.1.
///
/// # Errors
/// No port or no thread is to be had.
pub fn start(script: Script) -> io::Result<Mock> {
    serve(listen(SocketAddr::from(([127, 0, 0, 1], 0)))?, script)
}

/// Binds without `SO_REUSEPORT`: two mocks on one port would take turns unnoticed.
fn listen(addr: SocketAddr) -> io::Result<OwnedFd> {
    let listener = OwnedFd::from(TcpListener::bind(addr)?);
    // The standard library asks for a backlog of 128; a test may open a thousand at once.
    rustix::net::listen(&listener, 4096)?;
    Ok(listener)
}

/// Serves a listening socket on a thread of its own until the [`Mock`] is stopped or dropped.
///
/// # Errors
/// The socket is none, or no thread is to be had.
pub fn serve(listener: OwnedFd, script: Script) -> io::Result<Mock> {
    let addr = rustix::net::getsockname(&listener)?.try_into()?;
    let counters = Counters::new(script.kept_requests, script.kept_bytes);
    let driver = script.driver.unwrap_or_else(|| Driver::choose().0);
    let remote = Arc::new(Remote {
        script: Mutex::new(Arc::new(script)),
        faulty: AtomicU64::new(0),
        listener: listener.try_clone()?,
    });
    let (distant, tally) = (remote.clone(), counters.clone());
    let thread = std::thread::Builder::new()
        .name("mock".to_owned())
        .spawn(move || rt::block_on(driver, floor(listener, distant, tally))?)?;
    Ok(Mock { addr, counters, remote, thread: Some(thread) })
}

/// A running mock backend. Dropping it stops it.
#[derive(Debug)]
pub struct Mock {
    addr: SocketAddr,
    counters: Counters,
    remote: Arc<Remote>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl Mock {
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://ADDRESS:PORT`, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// From the next request on it plays this script (its idle time and memory stay as they
    /// were); the counts of `times` and `every` begin anew.
    pub fn set_script(&self, script: Script) {
        self.remote.set(Arc::new(script));
    }

    /// Like [`Mock::set_script`], for the act alone: the script's own, changed by `text`.
    ///
    /// # Errors
    /// The text names an unknown key or a value that does not fit it.
    pub fn set_act(&self, text: &str) -> Result<(), String> {
        self.remote.change(text)
    }

    /// Stops listening, closes every connection, and waits until the thread has ended. The
    /// counters can still be read through a clone.
    ///
    /// # Errors
    /// What ended the thread, if it was no stop.
    pub fn stop(mut self) -> io::Result<()> {
        self.end()
    }

    /// Waits until it ends by itself, which is never unless its socket breaks.
    fn join(mut self) -> io::Result<()> {
        self.thread.take().map_or(Ok(()), joined)
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        // Shutting the shared listening socket down ends the pending accept.
        rustix::net::shutdown(&self.remote.listener, rustix::net::Shutdown::Both)?;
        joined(thread)
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        // Nobody is there to be told.
        let _ = self.end();
    }
}

fn joined(thread: JoinHandle<io::Result<()>>) -> io::Result<()> {
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the mock's thread panicked")))
}

/// What other threads may do to a running mock.
#[derive(Debug)]
struct Remote {
    script: Mutex<Arc<Script>>,
    /// Requests so far that would have had a fault, for `times` and `every`.
    faulty: AtomicU64,
    /// The same socket as the thread's: shutting it down is the stop signal.
    listener: OwnedFd,
}

impl Remote {
    fn script(&self) -> Arc<Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, script: Arc<Script>) {
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = script;
        self.faulty.store(0, Ordering::Relaxed);
    }

    fn change(&self, text: &str) -> Result<(), String> {
        let mut script = Script::clone(&self.script());
        script.act.apply(text)?;
        self.set(Arc::new(script));
        Ok(())
    }
}

/// What the connections of one mock share.
struct Floor {
    remote: Arc<Remote>,
    counters: Counters,
    bell: Bell,
    gate: Gate,
    /// As after vLLM's `POST /sleep`: alive, and silent to every request.
    asleep: Cell<bool>,
    rng: RefCell<Rng>,
}

impl Floor {
    /// The act that a request gets, when `times` and `every` have had their say. Called once for
    /// a request, as it counts.
    fn dealt(&self, act: Act) -> Act {
        if !act.is_faulty() || (act.times.is_none() && act.every.is_none()) {
            return act;
        }
        let number = self.remote.faulty.fetch_add(1, Ordering::Relaxed) + 1;
        let turn = act.every.is_none_or(|every| number.is_multiple_of(every));
        let hits = act.every.map_or(number, |every| number.div_ceil(every));
        if turn && act.times.is_none_or(|times| hits <= times) { act } else { act.without_faults() }
    }
}

async fn floor(listener: OwnedFd, remote: Arc<Remote>, counters: Counters) -> io::Result<()> {
    let listener = Listener::new(listener)?;
    let seed = remote.script().seed;
    let floor = Rc::new(Floor {
        remote,
        counters,
        bell: Bell::default(),
        gate: Gate::default(),
        asleep: Cell::new(false),
        rng: RefCell::new(Rng::seeded(seed)),
    });
    let mut number = 0;
    while let Ok((socket, _)) = listener.accept().await {
        number += 1;
        rt::spawn(conn::serve(socket, floor.clone(), number));
    }
    floor.bell.ring();
    let mut limit = Timer::new();
    limit.set(Some(rt::now() + STOP_MAX));
    std::future::poll_fn(|cx| match floor.bell.poll_quiet(cx) {
        Poll::Pending => limit.poll(cx),
        ready @ Poll::Ready(()) => ready,
    })
    .await;
    Ok(())
}

/// Connections only have to notice the bell. If one does not, the process must still go on.
const STOP_MAX: Duration = Duration::from_secs(1);

/// Tells every connection that the mock stops, and the mock when all have gone.
#[derive(Default)]
struct Bell {
    rung: Cell<bool>,
    listening: RefCell<HashMap<u64, Option<Waker>>>,
    waiting: RefCell<Option<Waker>>,
}

impl Bell {
    fn enter(&self, who: u64) {
        self.listening.borrow_mut().insert(who, None);
    }

    fn leave(&self, who: u64) {
        self.listening.borrow_mut().remove(&who);
        if let Some(waker) = self.waiting.borrow_mut().take() {
            waker.wake();
        }
    }

    fn poll(&self, who: u64, cx: &Context<'_>) -> Poll<()> {
        if self.rung.get() {
            return Poll::Ready(());
        }
        if let Some(place) = self.listening.borrow_mut().get_mut(&who)
            && place.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker()))
        {
            *place = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    fn ring(&self) {
        self.rung.set(true);
        for waker in self.listening.borrow_mut().values_mut().filter_map(Option::take) {
            waker.wake();
        }
    }

    fn poll_quiet(&self, cx: &Context<'_>) -> Poll<()> {
        if self.listening.borrow().is_empty() {
            return Poll::Ready(());
        }
        *self.waiting.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// The slots of the engine, and who waits for one, in order of arrival.
#[derive(Default)]
struct Gate {
    running: Cell<u32>,
    queue: RefCell<VecDeque<(u64, Option<Waker>)>>,
}

impl Gate {
    /// Ready when `who` runs; it must [`Gate::leave`] then, and [`Gate::give_up`] before.
    fn poll_enter(&self, who: u64, slots: u32, cx: &Context<'_>) -> Poll<()> {
        let mut queue = self.queue.borrow_mut();
        let known = queue.iter().position(|(waiting, _)| *waiting == who);
        let place = known.unwrap_or_else(|| {
            queue.push_back((who, None));
            queue.len() - 1
        });
        if place == 0 && self.running.get() < slots {
            self.running.set(self.running.get() + 1);
            queue.pop_front();
            wake_front(&mut queue);
            return Poll::Ready(());
        }
        queue[place].1 = Some(cx.waker().clone());
        Poll::Pending
    }

    fn give_up(&self, who: u64) {
        let mut queue = self.queue.borrow_mut();
        queue.retain(|(waiting, _)| *waiting != who);
        wake_front(&mut queue);
    }

    fn leave(&self) {
        self.running.set(self.running.get() - 1);
        wake_front(&mut self.queue.borrow_mut());
    }
}

fn wake_front(queue: &mut VecDeque<(u64, Option<Waker>)>) {
    if let Some(waker) = queue.front_mut().and_then(|(_, waker)| waker.take()) {
        waker.wake();
    }
}
