//! An address range whose pages are allocated in contiguous ranges.

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::page_map::PageMap;

/// Granularity of allocations, in bytes.
const PAGE: usize = 16 << 10;
/// Smallest page size of the system, in bytes.
const SYSTEM_PAGE: usize = 4 << 10;

/// A pool of pages; it serves nothing until [`reserve`](Pool::reserve) is called.
pub(super) struct Pool {
    start: AtomicUsize,
    end: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    map: PageMap,
    /// Number of pages, from the start, that are never returned to the system.
    resident: usize,
}

/// Use of a pool, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUsage {
    /// Bytes in allocated pages.
    pub taken: usize,
    /// Upper bound of the resident bytes.
    pub resident: usize,
}

const fn pages(bytes: usize) -> usize {
    bytes.div_ceil(PAGE)
}

impl Pool {
    pub(super) const fn new() -> Self {
        let state = State { map: PageMap::empty(), resident: 0 };
        Pool { start: AtomicUsize::new(0), end: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// Reserves an address range of `bytes` bytes and makes its first `resident` bytes resident. A pool that already
    /// has addresses keeps them.
    ///
    /// # Errors
    /// If the system cannot provide the memory.
    pub(super) fn reserve(&self, bytes: usize, resident: usize) -> io::Result<()> {
        let bytes = pages(bytes) * PAGE;
        let resident = resident.min(bytes).next_multiple_of(PAGE);
        let map = PageMap::new(pages(bytes), pages(resident));
        let mut state = self.state();
        if self.is_open() {
            return Ok(());
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
        let start = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        if let Err(error) = populate(start.cast(), resident) {
            // SAFETY: the address of the mapping has not been published.
            let _ = unsafe { munmap(start, bytes) };
            return Err(error.into());
        }
        *state = State { map, resident: pages(resident) };
        self.end.store(start.addr() + bytes, Ordering::Relaxed);
        // A thread that sees the start must also see the end.
        self.start.store(start.expose_provenance(), Ordering::Release);
        Ok(())
    }

    /// Whether the pool has addresses.
    pub(super) fn is_open(&self) -> bool {
        self.start.load(Ordering::Acquire) != 0
    }

    /// Whether the pool contains `address`.
    pub(super) fn owns(&self, address: *mut u8) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start != 0 && (start..self.end.load(Ordering::Relaxed)).contains(&address.addr())
    }

    /// Allocates `bytes >= 1` bytes of unspecified content, aligned to a page; null if there is no room.
    pub(super) fn take(&self, bytes: usize) -> *mut u8 {
        let start = self.start.load(Ordering::Acquire);
        if start == 0 {
            return null_mut();
        }
        let count = pages(bytes);
        let mut state = self.state();
        let Some(first) = state.map.take(count) else { return null_mut() };
        std::ptr::with_exposed_provenance_mut(start + first * PAGE)
    }

    /// Frees an allocation of [`take`](Pool::take).
    pub(super) fn free(&self, address: *mut u8, bytes: usize) {
        let first = self.index(address);
        self.state().map.free(first, pages(bytes));
    }

    /// Changes the size of an allocation of [`take`](Pool::take) from `before` to `bytes` without moving it, if there
    /// is room.
    pub(super) fn resize(&self, address: *mut u8, before: usize, bytes: usize) -> bool {
        let (first, before, after) = (self.index(address), pages(before), pages(bytes));
        let mut state = self.state();
        if after <= before {
            state.map.free(first + after, before - after);
            return true;
        }
        state.map.take_at(first + before, after - before)
    }

    /// Returns the pages that nothing has used in this period to the system, and starts a new period.
    pub(super) fn release_unused(&self) {
        let start = self.start.load(Ordering::Acquire);
        if start == 0 {
            return;
        }
        let mut from = self.state().resident;
        loop {
            // The system calls run without the lock, which all threads need, because they can take milliseconds. The range
            // is marked as taken meanwhile.
            let Some((first, count)) = self.state().map.take_idle(from) else { break };
            let range = std::ptr::with_exposed_provenance_mut(start + first * PAGE);
            // SAFETY: the range lies within the mapping and is not in use. If the call fails, the memory stays resident,
            // which is harmless.
            let _ = unsafe { madvise(range, count * PAGE, Advice::LinuxDontNeed) };
            self.state().map.free(first, count);
            from = first + count;
        }
        self.state().map.start_period();
    }

    pub(super) fn usage(&self) -> PoolUsage {
        let state = self.state();
        PoolUsage { taken: state.map.taken() * PAGE, resident: state.map.touched() * PAGE }
    }

    fn index(&self, address: *mut u8) -> usize {
        (address.addr() - self.start.load(Ordering::Acquire)) / PAGE
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes the first `bytes` bytes of a new mapping resident.
fn populate(start: *mut u8, bytes: usize) -> Result<(), Errno> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the range lies within the mapping, whose address has not been published.
    match unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) } {
        // Kernels before 5.14 do not support the advice.
        Err(Errno::INVAL) => {
            for page in (0..bytes).step_by(SYSTEM_PAGE) {
                // SAFETY: the byte lies within the same range.
                unsafe { start.wrapping_add(page).write_volatile(0) };
            }
            Ok(())
        }
        done => done,
    }
}
