//! Work that threads share.
#![allow(unsafe_code, reason = "threads write disjoint parts of one buffer")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;
use rayon::prelude::*;

/// Runs `work` once per element of `scratch`, on the threads of `pool` (on the calling thread if there is none), and
/// waits for all.
///
/// `work` takes items from [`WorkQueue`]. Which thread computes an item differs between runs, so an item's result must
/// not depend on it.
pub(crate) fn run_parallel<S: Send>(
    pool: Option<&ThreadPool>,
    scratch: &mut [S],
    work: impl Fn(&mut S) + Sync + Send,
) {
    match (pool, scratch) {
        (_, []) => {}
        (None, [first, ..]) | (_, [first]) => work(first),
        (Some(pool), scratch) => pool.install(|| scratch.par_iter_mut().with_max_len(1).for_each(work)),
    }
}

/// A queue of numbered items of work, handed out in ascending order.
pub(crate) struct WorkQueue {
    next: AtomicUsize,
    count: usize,
}

impl WorkQueue {
    pub(crate) fn new(count: usize) -> Self {
        WorkQueue { next: AtomicUsize::new(0), count }
    }

    /// The items that the calling thread takes, until none are left. Each comes with the thread's next item, which is taken early
    /// so that its weights can be prefetched.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Option<usize>)> + '_ {
        let mut ahead = self.take();
        std::iter::from_fn(move || {
            let item = ahead?;
            ahead = self.take();
            Some((item, ahead))
        })
    }

    fn take(&self) -> Option<usize> {
        let item = self.next.fetch_add(1, Ordering::Relaxed);
        (item < self.count).then_some(item)
    }
}

/// A slice that threads borrow disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct DisjointSlice<'a, T> {
    data: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are borrowed only through `part_mut`, whose callers guarantee that they are disjoint.
unsafe impl<T: Send> Send for DisjointSlice<'_, T> {}
// SAFETY: see `Send`.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        DisjointSlice { data: slice.as_mut_ptr(), len: slice.len(), borrowed: PhantomData }
    }

    /// Borrows a part of the slice.
    ///
    /// # Safety
    /// No overlapping part may be in use.
    ///
    /// # Panics
    /// If the range does not lie within the slice.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts, by the contract")]
    pub(crate) unsafe fn part_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range lies within the slice that `new` borrowed mutably, and by the contract no overlapping part
        // is in use.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_handed_out_once() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
            for count in [0, 1, 2, 1000] {
                let mut done = vec![0_u8; count];
                let shared = DisjointSlice::new(&mut done);
                let queue = WorkQueue::new(count);
                run_parallel(Some(&pool), &mut vec![(); threads], |()| {
                    for (item, next) in queue.iter() {
                        assert!(next.is_none_or(|next| next > item));
                        // SAFETY: each item is handed out once.
                        let part = unsafe { shared.part_mut(item..item + 1) };
                        part[0] += 1;
                    }
                });
                assert!(done.iter().all(|&n| n == 1));
            }
        }
    }
}
