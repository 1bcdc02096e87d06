//! One range of addresses, handed out in runs of pages.

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::runs::Runs;

/// What is handed out is a multiple of this, bytes.
const PAGE: usize = 16 << 10;
/// What the system gives memory in, at least.
const SYSTEM_PAGE: usize = 4 << 10;

/// A pool of pages; empty, and of no use, until [`reserve`](Pool::reserve).
pub(super) struct Pool {
    start: AtomicUsize,
    end: AtomicUsize,
    state: Mutex<State>,
}

struct State {
    runs: Runs,
    /// Pages from the start that are never given back to the system.
    resident: usize,
    /// Pages from the start that were used since the system had them last.
    touched: usize,
    /// The largest end of what was taken, in this period and in the one before.
    peaks: [usize; 2],
}

/// How full a pool is, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolUse {
    /// Taken now.
    pub taken: usize,
    /// Backed by memory, at most.
    pub resident: usize,
}

const fn pages(bytes: usize) -> usize {
    bytes.div_ceil(PAGE)
}

impl Pool {
    pub(super) const fn new() -> Self {
        let state = State { runs: Runs::empty(), resident: 0, touched: 0, peaks: [0; 2] };
        Pool { start: AtomicUsize::new(0), end: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// Gives the pool `bytes` of addresses, the first `resident` of which are backed by memory from now on. A pool that
    /// has some already keeps these.
    ///
    /// # Errors
    /// If the system has no such memory.
    pub(super) fn reserve(&self, bytes: usize, resident: usize) -> io::Result<()> {
        let runs = Runs::new(pages(bytes));
        let bytes = pages(bytes) * PAGE;
        let resident = resident.min(bytes).next_multiple_of(PAGE);
        let mut state = self.state();
        if self.is_open() {
            return Ok(());
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping, of which nobody else knows.
        let start = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        if let Err(error) = populate(start.cast(), resident) {
            // SAFETY: nobody has learned of the mapping.
            let _ = unsafe { munmap(start, bytes) };
            return Err(error.into());
        }
        let resident = pages(resident);
        *state = State { runs, resident, touched: resident, peaks: [0; 2] };
        self.end.store(start.addr() + bytes, Ordering::Relaxed);
        // The end must be known to whoever sees the start.
        self.start.store(start.expose_provenance(), Ordering::Release);
        Ok(())
    }

    /// Whether the pool has addresses.
    pub(super) fn is_open(&self) -> bool {
        self.start.load(Ordering::Acquire) != 0
    }

    /// Whether `address` is one of the pool's.
    pub(super) fn owns(&self, address: *mut u8) -> bool {
        let start = self.start.load(Ordering::Acquire);
        start != 0 && (start..self.end.load(Ordering::Relaxed)).contains(&address.addr())
    }

    /// Takes `bytes >= 1`, aligned to a page; null if there is no room for them. What they hold is anything.
    pub(super) fn take(&self, bytes: usize) -> *mut u8 {
        let start = self.start.load(Ordering::Acquire);
        if start == 0 {
            return null_mut();
        }
        let count = pages(bytes);
        let mut state = self.state();
        let Some(first) = state.runs.take(count) else { return null_mut() };
        state.used_up_to(first + count);
        std::ptr::with_exposed_provenance_mut(start + first * PAGE)
    }

    /// Takes back what [`take`](Pool::take) gave.
    pub(super) fn free(&self, address: *mut u8, bytes: usize) {
        let first = self.index(address);
        self.state().runs.free(first, pages(bytes));
    }

    /// Lets what [`take`](Pool::take) gave have `bytes` instead of `before` where it lies, if there is room.
    pub(super) fn resize(&self, address: *mut u8, before: usize, bytes: usize) -> bool {
        let (first, before, after) = (self.index(address), pages(before), pages(bytes));
        let mut state = self.state();
        if after <= before {
            state.runs.free(first + after, before - after);
            return true;
        }
        let fits = state.runs.take_at(first + before, after - before);
        if fits {
            state.used_up_to(first + after);
        }
        fits
    }

    /// Begins a new period, and gives back what lies beyond all that was taken in the last two.
    pub(super) fn settle(&self) {
        let mut state = self.state();
        let State { resident, touched, peaks, .. } = *state;
        let end = state.runs.end();
        state.peaks = [end, peaks[0]];
        let keep = resident.max(peaks[0]).max(peaks[1]);
        if touched <= keep || !state.runs.take_at(keep, touched - keep) {
            return;
        }
        state.touched = keep;
        drop(state);
        // Without the lock, which all threads need: this can take milliseconds. The range counts as taken meanwhile.
        let range = std::ptr::with_exposed_provenance_mut(self.start.load(Ordering::Acquire) + keep * PAGE);
        // SAFETY: within the mapping, and nobody has it. Where it fails the memory stays, which harms nobody.
        let _ = unsafe { madvise(range, (touched - keep) * PAGE, Advice::LinuxDontNeed) };
        self.state().runs.free(keep, touched - keep);
    }

    pub(super) fn usage(&self) -> PoolUse {
        let state = self.state();
        PoolUse { taken: state.runs.taken() * PAGE, resident: state.touched * PAGE }
    }

    fn index(&self, address: *mut u8) -> usize {
        (address.addr() - self.start.load(Ordering::Acquire)) / PAGE
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Backs the first `bytes` of a new mapping with memory.
fn populate(start: *mut u8, bytes: usize) -> Result<(), Errno> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the range lies within the mapping, of which nobody else knows.
    match unsafe { madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) } {
        // Kernels before 5.14 do not know the advice.
        Err(Errno::INVAL) => {
            for page in (0..bytes).step_by(SYSTEM_PAGE) {
                // SAFETY: as above.
                unsafe { start.wrapping_add(page).write_volatile(0) };
            }
            Ok(())
        }
        done => done,
    }
}

impl State {
    fn used_up_to(&mut self, end: usize) {
        self.peaks[0] = self.peaks[0].max(end);
        self.touched = self.touched.max(end);
    }
}
