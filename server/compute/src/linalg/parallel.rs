//! Work shared between threads.
#![allow(unsafe_code, reason = "threads write disjoint parts of one buffer")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::ThreadPool;
use rayon::prelude::*;

/// Runs `work` once per scratch, on the threads of `pool` (on this one if there is none), and waits for all.
///
/// Which thread does what differs from run to run; `work` takes its share from [`Items`], and each item's result must
/// not depend on who computes it.
pub(crate) fn run<S: Send>(
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

/// Numbered items of work, handed out in order.
pub(crate) struct Items {
    next: AtomicUsize,
    count: usize,
}

impl Items {
    pub(crate) fn new(count: usize) -> Self {
        Items { next: AtomicUsize::new(0), count }
    }

    /// The items that this caller gets, until all are taken. It takes each item before it has dealt with the one
    /// before, so that it can look ahead: items come with their successor.
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

/// A slice of which threads borrow disjoint parts.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it gives out parts only through part_mut, whose callers vouch that they are disjoint.
unsafe impl<T: Send> Send for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Shared { data: slice.as_mut_ptr(), len: slice.len(), borrowed: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No other part that overlaps it is in use.
    ///
    /// # Panics
    /// If the range is not within the slice.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts, by the contract")]
    pub(crate) unsafe fn part_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice that new borrowed mutably, and used by no one else.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(range.start), range.end - range.start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads start");
            for count in [0, 1, 2, 1000] {
                let mut done = vec![0_u8; count];
                let shared = Shared::new(&mut done);
                let items = Items::new(count);
                run(Some(&pool), &mut vec![(); threads], |()| {
                    for (item, next) in items.iter() {
                        assert!(next.is_none_or(|next| next > item));
                        // SAFETY: an item is handed out once.
                        let part = unsafe { shared.part_mut(item..item + 1) };
                        part[0] += 1;
                    }
                });
                assert!(done.iter().all(|&n| n == 1));
            }
        }
    }
}
