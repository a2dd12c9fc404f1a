//! The board on loom's atomics.
//!
//! The pure modules are included as files, with another `pure::atomic` in the place of the product's:
//! the code that is checked is the code that runs, to the letter, and this builds in seconds.

/// As in `src/lib.rs`.
#[path = "../../src/pure"]
pub mod pure {
    /// In the place of `src/pure/atomic.rs`.
    pub mod atomic {
        pub use loom::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
    }
    pub mod board;
    pub mod limit;
    /// What the board carries for plans and never looks into; the product's would bring half of it
    /// along.
    pub mod tokens {
        #[derive(Debug, Default)]
        pub struct Vocabularies;
    }
    pub mod units;
}
