//! Counts what a thread has allocated, so that bounds of memory are claims like others.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Bytes that this thread has allocated and not freed. Can be negative, when it freed another's.
pub fn live_bytes() -> isize {
    LIVE.get()
}

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Counting;

fn count(bytes: usize, sign: isize) {
    // No allocation is larger than isize::MAX. A thread that ends has nothing left to count in.
    let _ = LIVE.try_with(|live| live.set(live.get() + sign * bytes as isize));
}

// SAFETY: every call goes to the system's allocator as it came, and its result back.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's duties are the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size(), 1);
        // SAFETY: the caller's duties are the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout.size(), -1);
        count(size, 1);
        // SAFETY: the caller's duties are the same.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        count(layout.size(), -1);
        // SAFETY: the caller's duties are the same.
        unsafe { System.dealloc(old, layout) }
    }
}
