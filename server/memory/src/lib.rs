//! The allocator of the process: mimalloc, and in the router a pool of pages for what token rows lie in.
//!
//! Messages, their parts and answers come in all sizes, are made by one thread and dropped by another, and are made
//! inside the transport as often as by us. An allocator with lists for each size and thread keeps pages for each of
//! them, so that its memory follows what sizes have met which threads, for hours. The pool has neither: allocations
//! of more than 8 KiB take the lowest free run of 16 KiB pages, whoever asks, and free pages next to each
//! other are one run again. So its memory is the most that was in use at once, the part that is used always is there
//! from the start, and what a burst took is given back a minute or two later.
//!
//! When the pool has no room, or is not there, mimalloc serves.

#![allow(unsafe_code, reason = "an allocator hands out memory")]

mod pool;
mod runs;

use std::alloc::{GlobalAlloc, Layout};
use std::io;
use std::time::Duration;

use mimalloc::MiMalloc;

use self::pool::Pool;
pub use self::pool::PoolUse;

/// The smallest allocation that the pool serves, bytes. The transport's own buffers, of one size and many in number,
/// are smaller.
const LEAST: usize = (8 << 10) + 1;
/// The largest alignment that the pool serves.
const ALIGN: usize = 4 << 10;
/// Memory that was not used for one to two of these goes back to the system.
pub const PERIOD: Duration = Duration::from_secs(60);

static POOL: Pool = Pool::new();

/// Gives this process a pool of up to `bytes`, of which the first `resident` are backed by memory from now on.
///
/// # Errors
/// If the system has no such memory. The process does without a pool then.
pub fn reserve(bytes: usize, resident: usize) -> io::Result<()> {
    POOL.reserve(bytes, resident)
}

/// Gives memory that was not used of late back to the system; to be called once in each [`PERIOD`].
pub fn settle() {
    POOL.settle();
}

/// How full the pool is.
#[must_use]
pub fn usage() -> PoolUse {
    POOL.usage()
}

/// What a binary names as its `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

/// Whether the pool serves such allocations while it has room.
const fn is_large(layout: &Layout) -> bool {
    layout.size() >= LEAST && layout.align() <= ALIGN
}

// SAFETY: what the pool hands out is as large and as aligned as was asked for, and nobody else has it; everything else
// is mimalloc's. Which of them serves an allocation follows from its address, and the pool owns none that is not
// `is_large`, so that the layout tells most of them.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_large(&layout) {
            let address = POOL.take(layout.size());
            if !address.is_null() {
                return address;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_large(&layout) {
            let address = POOL.take(layout.size());
            if !address.is_null() {
                // SAFETY: as many bytes were taken.
                unsafe { address.write_bytes(0, layout.size()) };
                return address;
            }
        }
        // SAFETY: the caller's promise.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if is_large(&layout) && POOL.owns(address) {
            POOL.free(address, layout.size());
            return;
        }
        // SAFETY: the caller's promise; it is none of the pool's.
        unsafe { MiMalloc.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that such a layout is legal.
        let after = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let pooled = is_large(&layout) && POOL.owns(address);
        if pooled && is_large(&after) && POOL.resize(address, layout.size(), size) {
            return address;
        }
        let serves = is_large(&after) && POOL.is_open();
        if !pooled && !serves {
            // SAFETY: the caller's promise; it is none of the pool's, and need not become one.
            return unsafe { MiMalloc.realloc(address, layout, size) };
        }
        // SAFETY: the caller's promise.
        let moved = unsafe { self.alloc(after) };
        if !moved.is_null() {
            // SAFETY: both have as many bytes, and the new one was nobody's.
            unsafe {
                std::ptr::copy_nonoverlapping(address, moved, layout.size().min(size));
                self.dealloc(address, layout);
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests;
