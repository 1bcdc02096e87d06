//! Who does which part of a piece of work that its owner has cut into portions.
//!
//! The owner writes the work down, [offers](Portions::offer) its portions, and writes the next one down only when
//! [all are done](Portions::all_done). Others read it between [taking](Portions::take) a portion and having
//! [done](Portions::done) it. So nobody reads while the owner writes: a portion that is taken is not done, and whoever
//! comes late finds none to take, or those of the work that is there by then. Taking acquires what the offer released (a
//! taker's change of the number in between keeps that), and the owner acquires what is done. `loom_tests` checks it over
//! its interleavings.

use std::sync::atomic::{AtomicUsize, Ordering};

/// A number that threads share; generic so that loom can check the protocol.
pub(crate) trait Counter {
    /// Loads the number.
    fn load(&self, order: Ordering) -> usize;
    /// Stores a number.
    fn store(&self, value: usize, order: Ordering);
    /// Subtracts, returning the previous number.
    fn fetch_sub(&self, value: usize, order: Ordering) -> usize;
    /// Subtracts one from any number but zero, returning the previous one.
    fn take_one(&self, order: Ordering) -> Option<usize>;
}

/// The same over another atomic type.
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

/// The portions of one piece of work after another.
#[derive(Debug, Default)]
pub(crate) struct Portions<C = AtomicUsize> {
    /// Nobody has taken them.
    left: C,
    /// They are not done.
    undone: C,
}

impl<C: Counter> Portions<C> {
    /// None, in these counters, which are zero.
    #[cfg(all(test, feature = "loom"))]
    pub(crate) const fn over(left: C, undone: C) -> Self {
        Portions { left, undone }
    }

    /// Lets others have portions of what the owner has written down.
    pub(crate) fn offer(&self, portions: usize) {
        self.undone.store(portions, Ordering::Relaxed);
        self.left.store(portions, Ordering::Release);
    }

    /// Whether there is one to take.
    pub(crate) fn any_left(&self) -> bool {
        self.left.load(Ordering::Acquire) > 0
    }

    /// The number of a portion that is the caller's now, from the last to the first.
    pub(crate) fn take(&self) -> Option<usize> {
        self.left.take_one(Ordering::AcqRel).map(|left| left - 1)
    }

    /// Tells that a portion is done, and that its taker has read all it will of the work.
    pub(crate) fn done(&self) {
        self.undone.fetch_sub(1, Ordering::Release);
    }

    /// Whether the owner has the work to itself again.
    pub(crate) fn all_done(&self) -> bool {
        self.undone.load(Ordering::Acquire) == 0
    }
}
