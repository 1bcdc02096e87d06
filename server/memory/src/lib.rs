//! The allocator of the process: mimalloc, and in the router a pool of pages for the buffers of token rows.
//!
//! Messages, their parts and answers have all sizes, are allocated on one thread and freed on another, and are
//! allocated by the transport as often as by this program. An allocator with lists for each size and thread keeps pages
//! in each list, so its memory grows for hours with each new combination of size and thread. The pool has no such
//! lists: allocations of more than 8 KiB take the lowest free range of 16 KiB pages, and neighbouring free pages merge
//! into one range. Its memory is therefore the most that was in use at once; the part that is always used is resident
//! from the start, and the memory of a burst is returned 20 to 40 s later.
//!
//! mimalloc serves the other allocations, and all of them if the pool is full or was not reserved. It returns memory only
//! while a thread allocates or frees, and each thread keeps pages whose blocks other threads have freed; [`collect`] returns both.

#![allow(unsafe_code, reason = "an allocator hands out memory")]

mod page_map;
mod pool;

use std::alloc::{GlobalAlloc, Layout};
use std::io;
use std::time::Duration;

use mimalloc::MiMalloc;

use self::pool::Pool;
pub use self::pool::PoolUsage;

/// Size of the smallest allocation that the pool serves, in bytes. The transport has many buffers of its own, all of
/// one smaller size.
const MIN_BYTES: usize = (8 << 10) + 1;
/// The largest alignment that the pool serves, in bytes.
const MAX_ALIGN: usize = 4 << 10;
/// Time between calls of [`release_unused`]. Memory that was unused for a whole period is returned to the system.
pub const RELEASE_PERIOD: Duration = Duration::from_secs(20);

static POOL: Pool = Pool::new();

/// Gives this process a pool of up to `bytes` bytes; the first `resident` bytes are made resident.
///
/// # Errors
/// If the system cannot provide the memory. The process then has no pool.
pub fn reserve(bytes: usize, resident: usize) -> io::Result<()> {
    POOL.reserve(bytes, resident)
}

/// Returns recently unused memory of the pool to the system; to be called once per [`RELEASE_PERIOD`].
pub fn release_unused() {
    POOL.release_unused();
}

/// Returns to the system what mimalloc keeps without use: of the whole process what no thread owns, and of the calling thread
/// the pages whose blocks are all free. The calling thread is busy for up to a few milliseconds.
pub fn collect() {
    // SAFETY: the function has no preconditions. mimalloc defines it with this signature (mimalloc.h), and `MiMalloc` links it.
    unsafe { mi_collect(true) };
}

unsafe extern "C" {
    /// mimalloc's function; `force` disregards the delay after which it usually returns memory.
    fn mi_collect(force: bool);
}

/// Current use of the pool.
#[must_use]
pub fn usage() -> PoolUsage {
    POOL.usage()
}

/// The allocator, to be declared as the `#[global_allocator]` of a binary.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocator;

/// Whether the pool serves allocations of this layout while it has room.
const fn is_large(layout: &Layout) -> bool {
    layout.size() >= MIN_BYTES && layout.align() <= MAX_ALIGN
}

// SAFETY: the pool returns memory of the requested size and alignment that nothing else uses; mimalloc serves all other
// allocations. The address tells which of them served an allocation. The pool owns no allocation that is not
// `is_large`, so that the layout answers this for most of them.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_large(&layout) {
            let address = POOL.take(layout.size());
            if !address.is_null() {
                return address;
            }
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        unsafe { MiMalloc.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if is_large(&layout) {
            let address = POOL.take(layout.size());
            if !address.is_null() {
                // SAFETY: the pool returned as many bytes.
                unsafe { address.write_bytes(0, layout.size()) };
                return address;
            }
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc_zeroed`.
        unsafe { MiMalloc.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if is_large(&layout) && POOL.owns(address) {
            POOL.free(address, layout.size());
            return;
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::dealloc`, and mimalloc served this allocation.
        unsafe { MiMalloc.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: by the contract of `GlobalAlloc::realloc` the layout is valid.
        let after = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        let pooled = is_large(&layout) && POOL.owns(address);
        if pooled && is_large(&after) && POOL.resize(address, layout.size(), size) {
            return address;
        }
        let serves = is_large(&after) && POOL.is_open();
        if !pooled && !serves {
            // SAFETY: mimalloc served this allocation, and it need not move to the pool.
            return unsafe { MiMalloc.realloc(address, layout, size) };
        }
        // SAFETY: the caller keeps the contract of `GlobalAlloc::alloc`.
        let moved = unsafe { self.alloc(after) };
        if !moved.is_null() {
            // SAFETY: both allocations have at least this many bytes, and the new one does not overlap the old one.
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
