//! Forebay: an LLM inference gateway for bare-metal Linux beside GPU racks.
//!
//! A request costs GPU-seconds; the gateway costs microseconds. Hence:
//!
//! 1. Never send work that will be refused or thrown away.
//! 2. Stop work that nobody reads, at once.
//! 3. Never block, lock or wander on a core that carries thousands of streams.
//! 4. Everything has a bound: every buffer, queue, table, label set, wait and retry.
//! 5. Bytes pass untouched unless a rule of the operator says otherwise.
//!
//! # The map
//!
//! [`pure`] decides and touches nothing: no socket, clock, thread, channel, log or hidden
//! randomness. What stands beside it touches the world. The order below is the order of
//! dependence: a module uses only modules above it, and `tests/it/tidy.rs` holds that.
//!
//! To see what happens to a request, read [`shard`] from top to bottom.
//!
//! # Invariants
//!
//! - One request sees one [`pure::plan::Plan`], whatever is reloaded meanwhile.
//! - A request is settled and recorded exactly once, also when it is aborted or panics.
//! - An answer that broke off never looks finished to the client.
//! - All limits that apply allow a request, or nothing is taken of any; what was taken is settled once.
//! - A shard takes no lock, waits for no file and resolves no name.
//! - Nothing that a client sends becomes a metric label or an unescaped log field.
//!
//! Deliberately absent: trait objects on the data path (the runtime's own futures in [`rt`] aside), a
//! connection shared between shards,
//! retries behind the client's back once something counted.

pub mod pure {
    pub mod units;

    pub mod answer;
    pub mod atomic;
    pub mod balance;
    pub mod board;
    pub mod body;
    pub mod dialect;
    pub mod fields;
    pub mod h1;
    pub mod json;
    pub mod jwt;
    pub mod lanes;
    pub mod limit;
    pub mod member;
    pub mod multipart;
    pub mod peek;
    pub mod plan;
    pub mod policy;
    pub mod relay;
    pub mod sse;
    pub mod tokens;
    pub mod usage;
}
pub mod admin;
pub mod cli;
pub mod client;
pub mod control;
pub mod export;
pub mod fetch;
pub mod fleet;
pub mod meter;
pub mod mock;
pub mod pool;
pub mod rt;
pub mod shard;
pub mod store;
