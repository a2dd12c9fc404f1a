//! Behaviour of the whole gateway, seen from outside: one binary, one file per behaviour.
//!
//! Each test starts the real process on free ports with a configuration of its own, plays the
//! backend byte by byte, and reads what clients get. No test waits for time to pass, and none
//! depends on another: they run side by side.

mod bodies;
mod fleet;
mod harness;
mod jwt;
mod keys;
mod leaving;
mod lifecycle;
mod limits;
mod metrics;
mod pool;
mod routing;
mod runtime;
mod sdk;
mod smuggling;
mod state;
mod streams;
mod tidy;
mod uploads;
mod usage;
