//! Waiting for another process or thread: spin briefly, then sleep on a futex in shared memory.
//!
//! # How long to spin
//! One rule for everyone who waits for the next event of a step (the step loop, GPU ranks, the threads that copy rows):
//! where there are cores to spare, each looks for [`SPIN`] since its last event, then sleeps until it is rung. CPU ranks
//! need their cores to compute, and sleep at once.
//!
//! # The doorbell
//! A [`Doorbell`] is one 32-bit word: bit 0 says that the waiter sleeps or is about to, the other bits count rings.
//! One process (one thread of it) waits; any number ring, each after it has published what the waiter looks for.
//!
//! No wake-up is lost. The waiter sets the sleeping bit, executes a sequentially consistent fence and looks once more
//! at its condition. A ringer publishes, executes such a fence and then looks at the word. Of two such fences one
//! comes first:
//! * if the waiter's does, the ringer sees the bit, changes the word and wakes. If the waiter is not asleep yet, the
//!   kernel finds that the word is not the one the waiter saw, and does not put it to sleep;
//! * if the ringer's does, the waiter's second look sees what was published.
//!
//! A ringer that finds the bit clear is done after one fence and one load: ringing costs next to nothing while the
//! waiter spins or works. The waiter alone clears the bit, so that a ringer which dies between its two steps takes only
//! its own wake-up with it; and sleeps are cut into slices ([`SLICE`]), so that even this costs a moment, not a
//! deadline. `loom_tests` checks the protocol over its interleavings.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use super::region::SharedSlice;

/// The longest single sleep; afterwards the waiter looks again. Not a polling interval: wake-ups do not depend on it.
pub const SLICE: Duration = Duration::from_millis(250);

/// How long whoever has a core to itself looks for the next event before it sleeps. A sleeper needs 50 µs and more to
/// come back where idle cores are halted, every rank another time, and a step waits for the last of them; steps that
/// follow each other, and what the host does between them, are mostly shorter than this. An idle service sleeps.
pub const SPIN: Duration = Duration::from_millis(1);

/// Looks between two looks at the clock.
const LOOKS: u32 = 16;

/// How long to wait and in which manner.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Look at the condition for so long, with a processor pause between looks, before sleeping. Zero where waiters
    /// outnumber cores: spinning would take the core from whoever is waited for.
    pub spin: Duration,
    /// When to give up; `None` waits for ever.
    pub deadline: Option<Instant>,
}

impl Patience {
    /// Gives up `limit` from now.
    #[must_use]
    pub fn within(spin: Duration, limit: Duration) -> Self {
        // A limit beyond the clock's range is as good as none.
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
#[error("the deadline passed")]
pub struct TimedOut;

/// A word that processes sleep on; generic so that loom can check the protocol.
pub trait FutexWord {
    /// Loads the word.
    fn load(&self, order: Ordering) -> u32;
    /// Adds, returning the previous value.
    fn fetch_add(&self, value: u32, order: Ordering) -> u32;
    /// Ors, returning the previous value.
    fn fetch_or(&self, value: u32, order: Ordering) -> u32;
    /// Ands, returning the previous value.
    fn fetch_and(&self, value: u32, order: Ordering) -> u32;
    /// A sequentially consistent fence.
    fn fence();
    /// Sleeps until woken or `limit` passes, unless the word differs from `expected`. May wake up for no reason.
    fn sleep(&self, expected: u32, limit: Duration);
    /// Wakes whoever sleeps on the word.
    fn wake(&self);
}

/// One word of shared memory.
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
        // Shared between processes, hence not PRIVATE. Changed, interrupted, timed out: the caller looks again.
        let _ = futex::wait(self.word(), futex::Flags::empty(), expected, Some(&limit));
    }
    fn wake(&self) {
        // Fails for no word that is mapped.
        let _ = futex::wake(self.word(), futex::Flags::empty(), u32::MAX >> 1);
    }
}

const SLEEPING: u32 = 1;
const RING: u32 = 2;

/// A word that many processes ring and one thread waits on. See the module's text for the protocol.
///
/// A second waiter at the same time would be safe and slow: the first to leave clears the other's bit.
#[derive(Clone, Debug)]
pub struct Doorbell<W = SharedWord>(W);

impl Doorbell {
    /// A doorbell in the first of `words`; zeroed memory is a doorbell that nobody rang.
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
    /// A doorbell over a given word.
    pub const fn over(word: W) -> Self {
        Self(word)
    }

    /// Tells the waiter to look again at what this process has published. Stores made before, with any ordering, are
    /// seen by a waiter that this wakes.
    pub fn ring(&self) {
        W::fence();
        if self.0.load(Ordering::Relaxed) & SLEEPING != 0 {
            self.0.fetch_add(RING, Ordering::Release);
            self.0.wake();
        }
    }

    /// Waits until `poll` returns something, and returns that. `poll` loads what it looks at with acquire ordering;
    /// whoever makes it return something rings afterwards.
    ///
    /// # Errors
    /// [`TimedOut`]; `poll` was asked once more after the deadline.
    pub fn wait_for<T>(
        &self,
        patience: Patience,
        mut poll: impl FnMut() -> Option<T>,
    ) -> Result<T, TimedOut> {
        if !patience.spin.is_zero() {
            let begun = Instant::now();
            let over = |now| now - begun >= patience.spin || patience.deadline.is_some_and(|end| end <= now);
            while !over(Instant::now()) {
                for _ in 0..LOOKS {
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
            let limit = match patience.deadline {
                None => SLICE,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()).min(SLICE),
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

    /// [`wait_for`](Self::wait_for) a condition.
    ///
    /// # Errors
    /// [`TimedOut`].
    pub fn wait_until(
        &self,
        patience: Patience,
        mut condition: impl FnMut() -> bool,
    ) -> Result<(), TimedOut> {
        self.wait_for(patience, || condition().then_some(()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::thread;

    use super::super::region::SharedRegion;
    use super::*;

    fn doorbell() -> Doorbell {
        let region = SharedRegion::create("doorbell", 4096).expect("memfd");
        Doorbell::new(region.slice(0, 1).expect("in bounds"))
    }

    #[test]
    fn times_out_and_leaves_no_trace() {
        let bell = doorbell();
        let start = Instant::now();
        let limit = Duration::from_millis(30);
        assert_eq!(bell.wait_until(Patience::within(Duration::ZERO, limit), || false), Err(TimedOut));
        assert!(start.elapsed() >= limit);
        assert_eq!(bell.0.load(Ordering::Relaxed) & SLEEPING, 0);
        // A deadline that has passed still takes what is there.
        assert_eq!(bell.wait_for(Patience::within(SPIN, Duration::ZERO), || Some(3)), Ok(3));
    }

    #[test]
    fn looks_for_its_time_and_sleeps_then() {
        let bell = doorbell();
        let (spin, limit) = (Duration::from_millis(20), Duration::from_millis(200));
        let (mut awake, mut asleep, mut slept) = (0, 0, None);
        let start = Instant::now();
        let timed_out = bell.wait_until(Patience::within(spin, limit), || {
            let sleeps = bell.0.load(Ordering::Relaxed) & SLEEPING != 0;
            slept = slept.or_else(|| sleeps.then(|| start.elapsed()));
            *(if sleeps { &mut asleep } else { &mut awake }) += 1;
            false
        });
        assert_eq!(timed_out, Err(TimedOut));
        assert!(start.elapsed() >= limit);
        assert!(slept.is_some_and(|after| after >= spin), "slept after {slept:?}");
        assert!(awake > 100 && asleep < 10, "{awake} looks awake, {asleep} between sleeps");
        // A deadline within that time ends it.
        let start = Instant::now();
        let patience = Patience::within(Duration::from_secs(60), Duration::from_millis(10));
        assert_eq!(bell.wait_until(patience, || false), Err(TimedOut));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn ping_pong_without_relying_on_slices() {
        // Two doorbells, many rounds. If wake-ups were lost each would cost a slice of 250 ms, and the deadline,
        // which covers every round together, would pass.
        for spin in [Duration::ZERO, Duration::from_micros(20)] {
            let (a, b) = (doorbell(), doorbell());
            let turn = AtomicU64::new(0);
            let rounds = 5_000;
            let patience = Patience::within(spin, Duration::from_secs(60));
            thread::scope(|s| {
                s.spawn(|| {
                    for i in 0..rounds {
                        a.wait_until(patience, || turn.load(Ordering::Acquire) > 2 * i).expect("rung");
                        turn.store(2 * i + 2, Ordering::Release);
                        b.ring();
                    }
                });
                for i in 0..rounds {
                    turn.store(2 * i + 1, Ordering::Release);
                    a.ring();
                    b.wait_until(patience, || turn.load(Ordering::Acquire) == 2 * i + 2).expect("rung");
                }
            });
        }
    }

    #[test]
    fn many_ringers_one_waiter() {
        let bell = doorbell();
        let sum = AtomicU64::new(0);
        let (ringers, each) = (4, 2_000);
        thread::scope(|s| {
            for _ in 0..ringers {
                s.spawn(|| {
                    for _ in 0..each {
                        sum.fetch_add(1, Ordering::Release);
                        bell.ring();
                    }
                });
            }
            let mut target = 0;
            while target < ringers * each {
                let reached = || Some(sum.load(Ordering::Acquire)).filter(|&s| s > target);
                target = bell
                    .wait_for(Patience::within(Duration::ZERO, Duration::from_secs(60)), reached)
                    .expect("rung");
            }
        });
    }
}
