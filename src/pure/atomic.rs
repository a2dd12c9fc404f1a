//! The atomics of the board. Named here so that `tests/loom` can put its own in their place, which go
//! through every order of events that the memory model allows.

pub use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
