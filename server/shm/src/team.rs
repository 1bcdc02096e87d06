//! A team of threads that do the parts of a step together.
//!
//! The thread pools of libraries sleep within microseconds of their last task. Waking a thread takes 50 µs or more where idle
//! cores are halted, which is longer than many parts of a step. The helpers of a team spin for a bounded time after each part
//! instead, and then sleep.
//!
//! # The protocol
//! The caller writes a job and opens a turn, does its own share, closes the turn and waits until no helper is in it. A helper enters
//! a turn that is open, once, does its share and leaves. So no helper reads the job while the caller writes it: a helper that comes
//! late finds the turn closed, or enters a later one, whose job is current by then. The caller waits only for helpers that have
//! entered, never for one that still sleeps. `loom_tests` checks the protocol in all interleavings of up to three preemptions.

#![allow(unsafe_code, reason = "helpers borrow the caller's closure for the length of a turn")]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::region::{LINE, SharedRegion};
use crate::wait::{Doorbell, WaitPolicy};

/// A 64-bit atomic; generic so that loom can check the protocol.
pub(crate) trait TurnWord {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    fn fetch_and(&self, value: u64, order: Ordering) -> u64;
    fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> Result<u64, u64>;
}

/// Implements [`TurnWord`] for an atomic type.
macro_rules! turn_word {
    ($atomic:ty) => {
        impl TurnWord for $atomic {
            fn load(&self, order: Ordering) -> u64 {
                self.load(order)
            }
            fn store(&self, value: u64, order: Ordering) {
                self.store(value, order);
            }
            fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_sub(value, order)
            }
            fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
                self.fetch_and(value, order)
            }
            fn compare_exchange(&self, current: u64, new: u64, order: Ordering) -> Result<u64, u64> {
                self.compare_exchange(current, new, order, Ordering::Relaxed)
            }
        }
    };
}

turn_word!(AtomicU64);
#[cfg(all(test, feature = "loom"))]
turn_word!(loom::sync::atomic::AtomicU64);

/// Number of helpers inside.
const INSIDE: u64 = (1 << 15) - 1;
/// Number of helpers that may enter.
const WANTED_SHIFT: u32 = 15;
/// Set while helpers may enter. The bits above number the turns.
const OPEN: u64 = 1 << 31;
const NUMBER_SHIFT: u32 = 32;
/// Most helpers of a team.
const MAX_HELPERS: usize = INSIDE as usize;

/// The state of a team's turns: the number of the last one, whether and which helpers may enter, and how many are inside. The
/// alignment keeps what is read once a turn apart from the word that helpers poll.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Turn<W = AtomicU64>(W);

impl<W: TurnWord> Turn<W> {
    /// The state before the first turn. `word` must be zero.
    #[cfg(all(test, feature = "loom"))]
    pub(crate) const fn over(word: W) -> Self {
        Turn(word)
    }

    /// Opens a turn of the first `helpers` helpers for the job that the caller has just written. The previous turn is closed and
    /// empty.
    pub(crate) fn open(&self, helpers: usize) {
        let number = (self.0.load(Ordering::Relaxed) >> NUMBER_SHIFT) + 1;
        self.0.store(number << NUMBER_SHIFT | OPEN | (helpers as u64) << WANTED_SHIFT, Ordering::Release);
    }

    /// Enters the turn as helper `helper` if that may and the turn is not the one with the number `last`, and writes its number to
    /// `last`. Returns the number of helpers that may enter.
    pub(crate) fn enter(&self, helper: usize, last: &mut u64) -> Option<usize> {
        let mut word = self.0.load(Ordering::Relaxed);
        let wanted = |word| (word >> WANTED_SHIFT & INSIDE) as usize;
        while word & OPEN != 0 && helper < wanted(word) && word >> NUMBER_SHIFT != *last {
            match self.0.compare_exchange(word, word + 1, Ordering::Acquire) {
                Ok(_) => {
                    *last = word >> NUMBER_SHIFT;
                    return Some(wanted(word));
                }
                Err(found) => word = found,
            }
        }
        None
    }

    /// Ends the helper's share of the turn that it has entered; it does not read the job after this.
    pub(crate) fn leave(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Lets no further helper in.
    pub(crate) fn close(&self) {
        self.0.fetch_and(!OPEN, Ordering::Relaxed);
    }

    /// Whether no helper is in the turn. If it is closed as well, the caller has exclusive access to the job again, and sees what
    /// helpers did.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Acquire) & INSIDE == 0
    }
}

/// A job: a function of the thread's number, borrowed from the caller of [`ThreadTeam::run`].
type Job = *const (dyn Fn(usize) + Sync);

/// State that the threads of a team share.
struct Shared {
    turn: Turn,
    /// Written by the caller between turns, read by helpers within one.
    job: UnsafeCell<Option<Job>>,
    stop: AtomicBool,
    /// The panic of a helper in this turn.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// One doorbell per helper.
    bells: Vec<Doorbell>,
}

// SAFETY: `turn` orders all accesses to `job`, and the function that it points to is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Shared {
    /// The loop of helper `helper`.
    fn help(&self, helper: usize, spin: Duration) {
        let mut last = 0;
        loop {
            let entered = self.bells[helper].wait_for(WaitPolicy::unlimited(spin), || {
                let entered = self.turn.enter(helper, &mut last);
                (entered.is_some() || self.stop.load(Ordering::Acquire)).then_some(entered)
            });
            // A wait without a deadline cannot time out.
            let Ok(Some(wanted)) = entered else { return };
            // The caller wakes one thread, and each thread two more.
            self.bells.iter().take(wanted).skip(2 * helper + 1).take(2).for_each(Doorbell::ring);
            // SAFETY: this thread is in the turn, so the caller neither writes the job nor ends its borrow.
            let job = unsafe { (*self.job.get()).map(|job| &*job) };
            let end = catch_unwind(AssertUnwindSafe(|| job.map(|job| job(helper + 1))));
            if let Err(panic) = end {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            self.turn.leave();
        }
    }
}

/// Spins of the caller while it waits for the helpers of a turn; afterwards it yields its core.
const SPINS_BEFORE_YIELD: u32 = 1000;

/// A turn under way. Dropping it ends the turn: no helper uses the job after this.
struct UnderWay<'a> {
    turn: &'a Turn,
    busy: &'a Cell<bool>,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.turn.close();
        let mut spins = 0;
        while !self.turn.is_empty() {
            std::hint::spin_loop();
            if spins == SPINS_BEFORE_YIELD {
                std::thread::yield_now();
            } else {
                spins += 1;
            }
        }
        self.busy.set(false);
    }
}

/// Threads that work together: the calling thread and helpers. Dropping the team ends the helpers.
pub struct ThreadTeam {
    shared: Arc<Shared>,
    helpers: usize,
    /// True during a turn. The cell keeps the team from being shared between threads.
    busy: Cell<bool>,
}

impl std::fmt::Debug for ThreadTeam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadTeam").field("threads", &self.threads()).finish_non_exhaustive()
    }
}

impl ThreadTeam {
    /// Starts `threads - 1` helpers, named `name` and a number, with the caller's CPU affinity. After a turn helpers spin for `spin`
    /// before they sleep.
    ///
    /// # Errors
    /// If the doorbells' memory or a thread cannot be created.
    pub fn start(name: &str, threads: usize, spin: Duration) -> io::Result<Self> {
        let helpers = threads.saturating_sub(1).min(MAX_HELPERS);
        let bells = match helpers {
            0 => Vec::new(),
            _ => {
                let lines = SharedRegion::create("expertd-team", helpers * LINE).map_err(io::Error::other)?;
                let bells = (0..helpers).map(|helper| lines.slice(helper * LINE, 1).map(Doorbell::new));
                bells.collect::<Result<_, _>>().map_err(io::Error::other)?
            }
        };
        let shared = Arc::new(Shared {
            turn: Turn::default(),
            job: UnsafeCell::new(None),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
            bells,
        });
        // Dropped on an error, which ends the helpers that run already.
        let mut team = ThreadTeam { shared, helpers: 0, busy: Cell::new(false) };
        for helper in 0..helpers {
            let shared = Arc::clone(&team.shared);
            let name = format!("{name}-{}", helper + 1);
            std::thread::Builder::new().name(name).spawn(move || shared.help(helper, spin))?;
            team.helpers += 1;
        }
        Ok(team)
    }

    /// Number of threads, the caller's included.
    #[must_use]
    pub const fn threads(&self) -> usize {
        self.helpers + 1
    }

    /// Calls `work(0)` on this thread and `work(i)` on up to `threads - 1` helpers, each number below `threads` at most once, and
    /// returns after the last call.
    ///
    /// Helpers that sleep are woken. A helper that comes late makes no call, so `work` must take its items from a queue.
    ///
    /// # Panics
    /// If a call panics, or `work` uses the team.
    pub fn run(&self, threads: usize, work: &(dyn Fn(usize) + Sync)) {
        let helpers = threads.saturating_sub(1).min(self.helpers);
        if helpers == 0 {
            return work(0);
        }
        assert!(!self.busy.replace(true), "a turn of the team is under way");
        let shared = &*self.shared;
        // SAFETY: the types differ in the lifetime only. Helpers use the pointer within the turn, which `under_way` ends before `work`'s
        // borrow ends, also when `work` panics.
        let job = unsafe { std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), Job>(work) };
        // SAFETY: the last turn is closed and empty, and `busy` excludes another one.
        unsafe { *shared.job.get() = Some(job) };
        shared.turn.open(helpers);
        let under_way = UnderWay { turn: &shared.turn, busy: &self.busy };
        shared.bells[0].ring();
        let end = catch_unwind(AssertUnwindSafe(|| work(0)));
        drop(under_way);
        let of_helper = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = end.err().or(of_helper) {
            resume_unwind(panic);
        }
    }
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Helpers use only the shared state from here on, so they need not be joined.
        self.shared.bells.iter().for_each(Doorbell::ring);
    }
}

#[cfg(test)]
mod tests;
