//! Threads that copy the portions of a batch and spin before they sleep, as the other threads of a step do.
//!
//! Library thread pools sleep within microseconds of their last task, and waking them takes longer than most batches
//! (docs/decisions/0015-gpu-step-copies.md).

#![allow(unsafe_code, reason = "threads take turns at the list of copies")]

use std::cell::UnsafeCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use super::CopyRange;
use super::portions::Portions;
use super::stores::StoreKind;
use expertd_shm::region::{LINE, SharedRegion};
use expertd_shm::wait::{Doorbell, WaitPolicy};

/// A batch that is being copied, cut into portions of equal size.
#[derive(Debug)]
pub(super) struct CopyJob {
    /// The copies, in the order of their [`end`](CopyRange::end).
    pub(super) ranges: Vec<CopyRange>,
    /// Size of a portion, in bytes of the batch.
    pub(super) portion: usize,
    pub(super) store: StoreKind,
}

impl CopyJob {
    const fn empty() -> Self {
        CopyJob { ranges: Vec::new(), portion: 1, store: StoreKind::Plain }
    }

    fn portions(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end).div_ceil(self.portion)
    }

    /// Copies one portion, which may cover parts of several ranges.
    ///
    /// # Safety
    /// The conditions of [`CopyBatch::push`](super::CopyBatch::push), and no other thread copies this portion.
    unsafe fn copy(&self, portion: usize) {
        let (begin, end) = (portion * self.portion, (portion + 1) * self.portion);
        let first = self.ranges.partition_point(|range| range.end <= begin);
        for range in self.ranges[first..].iter().take_while(|range| range.begin() < end) {
            let at = begin.saturating_sub(range.begin());
            let bytes = end.min(range.end) - range.begin() - at;
            // SAFETY: both addresses lie within the range; neither portions nor ranges overlap.
            unsafe { range.copy(self.store, at, bytes) };
        }
    }
}

/// State that the threads of a pool share.
#[derive(Debug)]
struct PoolState {
    /// Written by the owner while all portions are done; read by threads that have taken a portion.
    job: UnsafeCell<CopyJob>,
    portions: Portions,
    /// Number of helpers to wake for the job.
    wanted: AtomicUsize,
    stop: AtomicBool,
    /// One doorbell per helper.
    bells: Vec<Doorbell>,
}

// SAFETY: `portions` orders all accesses to `job`; the caller of `CopyBatch::push` has promised that the addresses in it
// may be used.
unsafe impl Sync for PoolState {}
// SAFETY: as above.
unsafe impl Send for PoolState {}

impl PoolState {
    /// Copies portions until none is left.
    fn take_part(&self) {
        while let Some(portion) = self.portions.take() {
            // SAFETY: only this thread has taken the portion; it is not done, so the owner does not write the job.
            unsafe { (*self.job.get()).copy(portion) };
            self.portions.done();
        }
    }

    /// The loop of a helper thread. The first helper wakes the others, so that the owner wakes only one thread.
    fn help(&self, helper: usize, spin: Duration) {
        while !self.stop.load(Ordering::Acquire) {
            let news = || self.portions.any_left() || self.stop.load(Ordering::Acquire);
            // A wait without a deadline cannot time out.
            let _ = self.bells[helper].wait_until(WaitPolicy::unlimited(spin), news);
            if helper == 0 {
                let wanted = self.wanted.load(Ordering::Relaxed);
                self.bells.iter().take(wanted).skip(1).for_each(Doorbell::ring);
            }
            self.take_part();
        }
    }
}

/// Spins of the owner while it waits for the helpers' last portions; afterwards it yields its core.
const SPINS_BEFORE_YIELD: u32 = 1000;

/// Helper threads for copies. Dropping the pool ends them.
#[derive(Debug)]
pub(super) struct CopyPool {
    state: Arc<PoolState>,
    helpers: usize,
}

impl CopyPool {
    /// Starts `helpers` threads, at least one, that spin for `spin` before they sleep.
    pub(super) fn start(helpers: usize, spin: Duration) -> io::Result<Self> {
        let lines = SharedRegion::create("expertd-copies", helpers * LINE).map_err(io::Error::other)?;
        let bells = (0..helpers).map(|helper| lines.slice(helper * LINE, 1).map(Doorbell::new));
        let state = Arc::new(PoolState {
            job: UnsafeCell::new(CopyJob::empty()),
            portions: Portions::default(),
            wanted: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            bells: bells.collect::<Result<_, _>>().map_err(io::Error::other)?,
        });
        let mut pool = CopyPool { state, helpers: 0 };
        for helper in 0..helpers {
            let state = Arc::clone(&pool.state);
            let name = format!("copies-{}", helper + 1);
            std::thread::Builder::new().name(name).spawn(move || state.help(helper, spin))?;
            pool.helpers += 1;
        }
        Ok(pool)
    }

    pub(super) const fn helpers(&self) -> usize {
        self.helpers
    }

    /// Copies `job` on this thread, on `helpers` threads that are woken if necessary, and on helpers that are awake.
    ///
    /// # Safety
    /// The conditions of [`CopyBatch::push`](super::CopyBatch::push).
    pub(super) unsafe fn run(&mut self, job: CopyJob, helpers: usize) {
        let (state, portions) = (&*self.state, job.portions());
        debug_assert!(state.portions.all_done(), "the previous job still has undone portions");
        // SAFETY: all portions are done, and `&mut self` excludes another job.
        unsafe { *state.job.get() = job };
        state.wanted.store(helpers, Ordering::Relaxed);
        state.portions.offer(portions);
        state.bells[0].ring();
        state.take_part();
        let mut spins = 0;
        while !state.portions.all_done() {
            std::hint::spin_loop();
            spins += 1;
            if spins > SPINS_BEFORE_YIELD {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for CopyPool {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::Release);
        // No job is under way, so the threads touch nothing but the state, which they share. They are not joined: a join of a
        // thread that was killed panics.
        self.state.bells.iter().for_each(Doorbell::ring);
    }
}
