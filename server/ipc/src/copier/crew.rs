//! Threads that help with a batch of copies, and wait for the next one as everybody does who has a part in steps.
//!
//! Not a library's pool: those sleep within microseconds of their last work, and waking them takes longer than most
//! batches (docs/decisions/0012).

#![allow(unsafe_code, reason = "threads share the list of what to copy by turns")]

use std::cell::UnsafeCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use super::Run;
use super::portions::Portions;
use super::stores::Store;
use crate::region::{LINE, SharedRegion};
use crate::wait::{Doorbell, Patience};

/// A batch on its way, cut into portions of its bytes.
#[derive(Debug)]
pub(super) struct Work {
    /// In the order of their [`end`](Run::end).
    pub(super) runs: Vec<Run>,
    /// Bytes of a portion.
    pub(super) portion: usize,
    pub(super) store: Store,
}

impl Work {
    const fn none() -> Self {
        Work { runs: Vec::new(), portion: 1, store: Store::Plain }
    }

    fn portions(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end).div_ceil(self.portion)
    }

    /// Copies one portion: parts of runs, wherever they lie.
    ///
    /// # Safety
    /// As for [`Batch::push`](super::Batch::push), and nobody else copies this portion.
    unsafe fn copy(&self, portion: usize) {
        let (begin, end) = (portion * self.portion, (portion + 1) * self.portion);
        let first = self.runs.partition_point(|run| run.end <= begin);
        for run in self.runs[first..].iter().take_while(|run| run.begin() < end) {
            let at = begin.saturating_sub(run.begin());
            let bytes = end.min(run.end) - run.begin() - at;
            // SAFETY: within the run; portions do not overlap, nor do runs.
            unsafe { self.store.copy(run.from.wrapping_add(at), run.to.wrapping_add(at), bytes) };
        }
    }
}

/// What the threads of a crew share.
#[derive(Debug)]
struct Board {
    /// Written by the owner when all portions are done, read by takers of portions.
    work: UnsafeCell<Work>,
    portions: Portions,
    /// How many helpers are worth waking for the work.
    wanted: AtomicUsize,
    stop: AtomicBool,
    /// One for each helper.
    bells: Vec<Doorbell>,
}

// SAFETY: `work` is accessed by turns (`portions`); it holds addresses, whose use whoever made the batch has promised.
unsafe impl Sync for Board {}
// SAFETY: as above.
unsafe impl Send for Board {}

impl Board {
    /// Copies portions until none is left to take.
    fn take_part(&self) {
        while let Some(portion) = self.portions.take() {
            // SAFETY: the portion is this thread's, and not done, so the owner does not write.
            unsafe { (*self.work.get()).copy(portion) };
            self.portions.done();
        }
    }

    /// The life of a helper. The first one wakes the others, so that the owner need not.
    fn help(&self, helper: usize, spin: Duration) {
        while !self.stop.load(Ordering::Acquire) {
            let news = || self.portions.any_left() || self.stop.load(Ordering::Acquire);
            // It has no deadline to miss.
            let _ = self.bells[helper].wait_until(Patience::unlimited(spin), news);
            if helper == 0 {
                let wanted = self.wanted.load(Ordering::Relaxed);
                self.bells.iter().take(wanted).skip(1).for_each(Doorbell::ring);
            }
            self.take_part();
        }
    }
}

/// Looks at what others still copy, before the owner lets them have its core.
const LOOKS: u32 = 1000;

/// Threads beside the owner's. Dropping it ends them.
#[derive(Debug)]
pub(super) struct Crew {
    board: Arc<Board>,
    helpers: Vec<JoinHandle<()>>,
}

impl Crew {
    /// Starts `helpers` threads, at least one, that look for work for `spin` before they sleep.
    pub(super) fn start(helpers: usize, spin: Duration) -> io::Result<Self> {
        let lines = SharedRegion::create("expertd-copies", helpers * LINE).map_err(io::Error::other)?;
        let bells = (0..helpers).map(|helper| lines.slice(helper * LINE, 1).map(Doorbell::new));
        let board = Arc::new(Board {
            work: UnsafeCell::new(Work::none()),
            portions: Portions::default(),
            wanted: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            bells: bells.collect::<Result<_, _>>().map_err(io::Error::other)?,
        });
        let mut crew = Crew { board, helpers: Vec::new() };
        for helper in 0..helpers {
            let board = Arc::clone(&crew.board);
            let name = format!("copies-{}", helper + 1);
            let thread = std::thread::Builder::new().name(name).spawn(move || board.help(helper, spin))?;
            crew.helpers.push(thread);
        }
        Ok(crew)
    }

    pub(super) fn helpers(&self) -> usize {
        self.helpers.len()
    }

    /// Does `work` with the help of `helpers` threads, woken if need be, and of whoever else is awake.
    ///
    /// # Safety
    /// As for [`Batch::push`](super::Batch::push).
    pub(super) unsafe fn run(&mut self, work: Work, helpers: usize) {
        let (board, portions) = (&*self.board, work.portions());
        debug_assert!(board.portions.all_done(), "every run ends with that");
        // SAFETY: all portions are done, and `&mut self` keeps others from bringing work.
        unsafe { *board.work.get() = work };
        board.wanted.store(helpers, Ordering::Relaxed);
        board.portions.offer(portions);
        board.bells[0].ring();
        board.take_part();
        let mut looks = 0;
        while !board.portions.all_done() {
            std::hint::spin_loop();
            looks += 1;
            if looks > LOOKS {
                std::thread::yield_now();
            }
        }
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.board.stop.store(true, Ordering::Release);
        self.board.bells.iter().for_each(Doorbell::ring);
        for thread in self.helpers.drain(..) {
            // It copies, which does not panic.
            let _ = thread.join();
        }
    }
}
