//! Waiting for another process or thread: spin briefly, then sleep on a futex in shared memory.
//!
//! # How long to spin
//! All threads that wait for the next event of a step (the step loop, GPU ranks, the threads that copy rows) follow one
//! rule: where there are cores to spare, a thread spins for [`SPIN_TIME`] after its last event, then sleeps until it is
//! rung. CPU ranks need their cores to compute, so their first thread sleeps at once while it waits for other ranks; the other threads
//! of a rank spin for a moment after each part of a step ([`team`](crate::team)). While no step is in flight, those cores are idle, so the
//! step loop, the first thread of a rank and, after an answer, a session's thread spin for [`BETWEEN_STEPS`] before they sleep
//! ([`spin_between_steps`]).
//!
//! # The doorbell
//! A [`Doorbell`] is one 32-bit word: bit 0 says that the waiter sleeps or is about to sleep, the other bits count rings.
//! One thread waits; any number of threads ring, each after it has published what the waiter polls for.
//!
//! No wake-up is lost. The waiter sets the sleeping bit, executes a sequentially consistent fence and polls its
//! condition once more. A ringer publishes, executes such a fence and then loads the word. One of the two fences comes
//! first:
//! * if the waiter's comes first, the ringer sees the bit, changes the word and wakes the waiter. If the waiter is not
//!   asleep yet, the kernel finds that the word has changed since the waiter loaded it, and does not put it to sleep;
//! * if the ringer's comes first, the waiter's second poll sees what was published.
//!
//! A ringer that finds the bit clear is done after one fence and one load: ringing costs next to nothing while the
//! waiter spins or works. Only the waiter clears the bit, so that a ringer which dies between publishing and waking loses
//! no other ringer's wake-up. Because one sleep lasts [`MAX_SLEEP`] at most, even that lost wake-up costs a moment and
//! not the whole deadline. `loom_tests` checks the protocol over its interleavings.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::observed::ObservedTime;
use super::region::SharedSlice;

/// The longest single sleep; afterwards the waiter polls again. It is not a polling interval: wake-ups do not depend on it.
pub const MAX_SLEEP: Duration = Duration::from_millis(250);

/// How long a thread with a core to itself spins for the next event before it sleeps. Waking a sleeper takes 50 µs or
/// more where idle cores are halted, a different time on every rank, and a step waits for the slowest rank. Consecutive
/// steps and the host's work between them are mostly shorter than this. An idle service sleeps.
pub const SPIN_TIME: Duration = Duration::from_millis(1);

/// How long the step loop and CPU ranks spin for the next step while none is in flight: about the time that a client in a closed loop
/// takes for its next call.
pub const BETWEEN_STEPS: Duration = Duration::from_micros(100);

/// How long a thread of a service with `cores` cores spins for the next step; `spin` is the time that it spins for other events.
/// With few cores the time is no longer than `spin`, so that the client gets the cores.
#[must_use]
pub fn spin_between_steps(spin: Duration, cores: usize) -> Duration {
    if cores >= 4 { spin.max(BETWEEN_STEPS) } else { spin }
}

/// Polls of the condition between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// How long a wait spins before it sleeps, and when it gives up.
#[derive(Clone, Copy, Debug)]
pub struct WaitPolicy {
    /// How long the condition is polled, with a processor pause between polls, before the thread sleeps. Zero where
    /// waiters outnumber cores: spinning would take the core from the thread that is waited for.
    pub spin: Duration,
    /// When the wait gives up; `None` waits for ever.
    pub deadline: Option<Instant>,
}

impl WaitPolicy {
    /// Gives up `limit` from now.
    #[must_use]
    pub fn within(spin: Duration, limit: Duration) -> Self {
        // A limit beyond the clock's range means no deadline.
        Self { spin, deadline: Instant::now().checked_add(limit) }
    }

    /// Never gives up.
    #[must_use]
    pub const fn unlimited(spin: Duration) -> Self {
        Self { spin, deadline: None }
    }
}

/// The deadline passed before the condition held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the deadline passed before the condition held")]
pub struct TimedOut;

/// A word that processes sleep on; generic so that loom can check the protocol.
pub trait FutexWord {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Adds `value` and returns the previous word.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// Sets the bits of `value` and returns the previous word.
    fn fetch_or(&self, value: u32, order: Ordering) -> u32;
    /// Clears the bits that `value` lacks and returns the previous word.
    fn fetch_and(&self, value: u32, order: Ordering) -> u32;
    /// A sequentially consistent fence.
    fn fence();
    /// Sleeps until woken or until `limit` has passed, unless the word differs from `expected`. May wake up spuriously.
    fn sleep(&self, expected: u32, limit: Duration);
    /// Wakes one thread that sleeps on the word.
    fn wake(&self);
}

/// A futex word in shared memory.
#[derive(Clone, Debug)]
pub struct SharedWord(SharedSlice<u32>);

impl SharedWord {
    fn word(&self) -> &AtomicU32 {
        &self.0.atomics()[0]
    }
}

impl FutexWord for SharedWord {
    fn load(&self, order: Ordering) -> u32 {
        self.word().load(order)
    }
    fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        self.word().fetch_add(value, order)
    }
    fn fetch_or(&self, value: u32, order: Ordering) -> u32 {
        self.word().fetch_or(value, order)
    }
    fn fetch_and(&self, value: u32, order: Ordering) -> u32 {
        self.word().fetch_and(value, order)
    }
    fn fence() {
        fence(Ordering::SeqCst);
    }
    fn sleep(&self, expected: u32, limit: Duration) {
        let limit = futex::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // The word is shared between processes, hence not PRIVATE. Whether the word had changed, the sleep was interrupted
        // or it timed out: the caller polls again.
        let _ = futex::wait(self.word(), futex::Flags::empty(), expected, Some(&limit));
    }
    fn wake(&self) {
        // A doorbell has one waiter. Waking more would let a peer with thousands of sleeping threads hold up the ringer. The call
        // cannot fail for a mapped word.
        let _ = futex::wake(self.word(), futex::Flags::empty(), 1);
    }
}

const SLEEPING: u32 = 1;
const RING: u32 = 2;

/// A word that many threads ring and one thread waits on. The module's text describes the protocol.
///
/// Two simultaneous waiters would be safe but slow: the first one to leave clears the other's sleeping bit.
#[derive(Clone, Debug)]
pub struct Doorbell<W = SharedWord>(W);

impl Doorbell {
    /// A doorbell in the first of `words`. Zeroed memory is a doorbell that has not been rung.
    ///
    /// # Panics
    /// If `words` is empty.
    #[must_use]
    pub fn new(words: SharedSlice<u32>) -> Self {
        assert!(!words.is_empty(), "a doorbell needs a word of memory");
        Self(SharedWord(words))
    }
}

impl<W: FutexWord> Doorbell<W> {
    /// A doorbell over the given word.
    pub const fn over(word: W) -> Self {
        Self(word)
    }

    /// Makes the waiter poll again. A waiter that this call wakes sees all earlier stores of this thread, whatever their
    /// ordering.
    pub fn ring(&self) {
        W::fence();
        if self.0.load(Ordering::Relaxed) & SLEEPING != 0 {
            self.0.fetch_add(RING, Ordering::Release);
            self.0.wake();
        }
    }

    /// Waits until `poll` returns a value, and returns it. `poll` must load with acquire ordering, and a thread that
    /// changes its result must ring afterwards.
    ///
    /// # Errors
    /// [`TimedOut`], after a last poll at the deadline.
    pub fn wait_for<T>(
        &self,
        policy: WaitPolicy,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Result<T, TimedOut> {
        if !policy.spin.is_zero() {
            let begun = Instant::now();
            let over = |now| now - begun >= policy.spin || policy.deadline.is_some_and(|end| end <= now);
            while !over(Instant::now()) {
                for _ in 0..POLLS_PER_CLOCK_READ {
                    if let Some(found) = poll() {
                        return Ok(found);
                    }
                    std::hint::spin_loop();
                }
            }
        }
        loop {
            if let Some(found) = poll() {
                return Ok(found);
            }
            let seen = self.0.fetch_or(SLEEPING, Ordering::AcqRel) | SLEEPING;
            W::fence();
            let found = poll();
            let limit = match policy.deadline {
                None => MAX_SLEEP,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()).min(MAX_SLEEP),
            };
            if found.is_none() && !limit.is_zero() {
                self.0.sleep(seen, limit);
            }
            self.0.fetch_and(!SLEEPING, Ordering::AcqRel);
            match found {
                Some(found) => return Ok(found),
                None if limit.is_zero() => return Err(TimedOut),
                None => {}
            }
        }
    }

    /// Waits as [`wait_for`](Self::wait_for) does, for `limit` of the time in which this process runs: if a container or a virtual machine
    /// is frozen as a whole, those that are waited for get their time after it.
    ///
    /// # Errors
    /// As there.
    pub fn wait_running<T>(
        &self,
        mut spin: Duration,
        limit: Duration,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Result<T, TimedOut> {
        let mut time = ObservedTime::start(Instant::now());
        let mut waited = Duration::ZERO;
        loop {
            let policy = WaitPolicy::within(spin, (limit - waited).min(MAX_SLEEP));
            if let Ok(found) = self.wait_for(policy, &mut poll) {
                return Ok(found);
            }
            spin = Duration::ZERO;
            waited = time.look(Instant::now());
            if waited >= limit {
                return Err(TimedOut);
            }
        }
    }

    /// Waits until `condition` holds, as [`wait_for`](Self::wait_for) does for a value.
    pub fn wait_until(
        &self,
        policy: WaitPolicy,
        mut condition: impl FnMut() -> bool,
    ) -> Result<(), TimedOut> {
        self.wait_for(policy, || condition().then_some(()))
    }
}

#[cfg(test)]
mod tests;
