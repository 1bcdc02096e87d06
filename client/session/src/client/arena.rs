//! Allocation of a session's row area.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use expertd_shm::region::SharedSlice;

use super::link::Link;
use crate::wire::ALIGN;

/// Free ranges of the row area, in ascending order, none adjacent to the next.
#[derive(Debug)]
pub(super) struct Arena {
    free: Vec<Range<usize>>,
}

impl Arena {
    pub(super) fn new(bytes: usize) -> Self {
        Arena { free: std::iter::once(0..bytes).collect() }
    }

    /// The first free range of `bytes` bytes; `None` if there is none.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Range<usize>> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let at = self.free.iter().position(|free| free.len() >= bytes)?;
        let start = self.free[at].start;
        self.free[at].start += bytes;
        if self.free[at].is_empty() {
            self.free.remove(at);
        }
        Some(start..start + bytes)
    }

    /// Gives a range back that was taken.
    pub(super) fn give_back(&mut self, range: Range<usize>) {
        let at = self.free.partition_point(|free| free.end <= range.start);
        self.free.insert(at, range);
        if at + 1 < self.free.len() && self.free[at].end == self.free[at + 1].start {
            self.free[at].end = self.free.remove(at + 1).end;
        }
        if at > 0 && self.free[at - 1].end == self.free[at].start {
            self.free[at - 1].end = self.free.remove(at).end;
        }
    }

    /// Length of the largest free range, in bytes.
    pub(super) fn largest(&self) -> usize {
        self.free.iter().map(Range::len).max().unwrap_or(0)
    }
}

/// Bytes of a session's memory that one owner has at a time. The service reads and writes them only while a call has them. They outlive
/// the session, whose memory counts against the service's limits until the last buffer is dropped.
#[derive(Debug)]
pub struct Buffer {
    pub(super) arena: Arc<Mutex<Arena>>,
    /// The allocated range; may be longer than the view.
    pub(super) range: Range<usize>,
    pub(super) bytes: SharedSlice<u8>,
    pub(super) _link: Arc<Link>,
}

impl Buffer {
    /// The bytes.
    #[must_use]
    #[allow(unsafe_code, reason = "makes a slice of memory that this buffer owns")]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: no other buffer has these bytes, and calls take buffers by value until their completion, which the
        // ring's counter releases; so the service does not write them while the borrow lives.
        unsafe { self.bytes.as_slice() }
    }

    /// The bytes, for writing.
    #[must_use]
    #[allow(unsafe_code, reason = "makes a slice of memory that this buffer owns")]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and exclusive by the borrow of `self`.
        unsafe { self.bytes.as_mut_slice() }
    }

    /// Offset in the row area, in bytes.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.range.start
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let range = std::mem::take(&mut self.range);
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).give_back(range);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_never_overlap_and_all_space_comes_back(
            steps in prop::collection::vec((any::<bool>(), 0_usize..700, any::<prop::sample::Index>()), 1..200),
        ) {
            const BYTES: usize = 64 * 64;
            let mut arena = Arena::new(BYTES);
            let mut taken: Vec<Range<usize>> = Vec::new();
            for (take, bytes, at) in steps {
                if take {
                    if let Some(range) = arena.take(bytes) {
                        prop_assert!(range.len() >= bytes && range.start % ALIGN == 0 && range.end <= BYTES);
                        prop_assert!(taken.iter().all(|other| range.end <= other.start || other.end <= range.start));
                        taken.push(range);
                    }
                } else if !taken.is_empty() {
                    let range = taken.swap_remove(at.index(taken.len()));
                    arena.give_back(range);
                }
                let used: usize = taken.iter().map(Range::len).sum();
                prop_assert_eq!(arena.free.iter().map(Range::len).sum::<usize>(), BYTES - used);
            }
            taken.into_iter().for_each(|range| arena.give_back(range));
            prop_assert_eq!(arena.free, vec![0..BYTES]);
        }
    }
}
