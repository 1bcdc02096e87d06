//! Distribution of a job's portions over threads.
//!
//! The owner writes a job, [offers](Portions::offer) its portions, and writes the next job only when
//! [all are done](Portions::all_done). A worker reads the job between [taking](Portions::take) a portion and marking it
//! [done](Portions::done). No thread reads while the owner writes: a portion that is taken is not done, and a worker
//! that comes late takes no portion, or one of the job that is current by then. Taking a portion acquires what the offer
//! released, also after other workers have decremented the counter, and the owner acquires the workers' results.
//! `loom_tests` checks the protocol over its interleavings.

use std::sync::atomic::{AtomicUsize, Ordering};

/// An atomic counter; generic so that loom can check the protocol.
pub(crate) trait Counter {
    /// Loads the value.
    fn load(&self, order: Ordering) -> usize;
    /// Stores a value.
    fn store(&self, value: usize, order: Ordering);
    /// Subtracts `value` and returns the previous value.
    fn fetch_sub(&self, value: usize, order: Ordering) -> usize;
    /// Decrements the counter unless it is zero, and returns the previous value.
    fn take_one(&self, order: Ordering) -> Option<usize>;
}

/// Implements [`Counter`] for an atomic type.
macro_rules! counter {
    ($atomic:ty) => {
        impl Counter for $atomic {
            fn load(&self, order: Ordering) -> usize {
                self.load(order)
            }
            fn store(&self, value: usize, order: Ordering) {
                self.store(value, order);
            }
            fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
                self.fetch_sub(value, order)
            }
            fn take_one(&self, order: Ordering) -> Option<usize> {
                self.fetch_update(order, Ordering::Relaxed, |number| number.checked_sub(1)).ok()
            }
        }
    };
}

counter!(AtomicUsize);
#[cfg(all(test, feature = "loom"))]
counter!(loom::sync::atomic::AtomicUsize);

/// The portions of one job after another.
#[derive(Debug, Default)]
pub(crate) struct Portions<C = AtomicUsize> {
    /// Portions that no thread has taken.
    left: C,
    /// Portions that are not done.
    undone: C,
}

impl<C: Counter> Portions<C> {
    /// No portions; both counters must be zero.
    #[cfg(all(test, feature = "loom"))]
    pub(crate) const fn over(left: C, undone: C) -> Self {
        Portions { left, undone }
    }

    /// Offers `portions` portions of the job that the owner has just written.
    pub(crate) fn offer(&self, portions: usize) {
        self.undone.store(portions, Ordering::Relaxed);
        self.left.store(portions, Ordering::Release);
    }

    /// Whether a portion can be taken.
    pub(crate) fn any_left(&self) -> bool {
        self.left.load(Ordering::Acquire) > 0
    }

    /// Takes a portion for the caller and returns its number. Numbers descend to zero.
    pub(crate) fn take(&self) -> Option<usize> {
        self.left.take_one(Ordering::AcqRel).map(|left| left - 1)
    }

    /// Marks a portion as done; its taker does not read the job after this.
    pub(crate) fn done(&self) {
        self.undone.fetch_sub(1, Ordering::Release);
    }

    /// Whether the owner has exclusive access to the job again.
    pub(crate) fn all_done(&self) -> bool {
        self.undone.load(Ordering::Acquire) == 0
    }
}
