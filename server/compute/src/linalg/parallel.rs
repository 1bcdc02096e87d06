//! Work that threads share.
#![allow(unsafe_code, reason = "threads write disjoint parts of one buffer")]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use expertd_shm::ThreadTeam;

/// Calls `work` on up to `items` threads of `team`, each with its own element of `scratch`, or on the calling thread if there is no
/// team, and waits for all.
///
/// `work` takes the items from a [`WorkQueue`]. Which thread computes an item differs between runs, so an item's result must
/// not depend on it.
pub(crate) fn run_parallel<S: Send>(
    team: Option<&ThreadTeam>,
    items: usize,
    scratch: &mut [S],
    work: impl Fn(&mut S) + Sync,
) {
    let threads = team.map_or(1, ThreadTeam::threads).min(items).min(scratch.len());
    match (team, &mut *scratch) {
        (_, []) => {}
        (Some(team), scratch) if threads > 1 => {
            let scratch = DisjointSlice::new(scratch);
            // SAFETY: a team uses each number at most once in a run.
            team.run(threads, &|thread| work(unsafe { &mut scratch.part_mut(thread..thread + 1)[0] }));
        }
        (_, [first, ..]) => work(first),
    }
}

/// Calls `each` for all items, on the threads of `team`.
pub(crate) fn for_each<T: Send>(team: Option<&ThreadTeam>, items: &mut [T], each: impl Fn(&mut T) + Sync) {
    // Elements without a size take no memory.
    let none = vec![(); items.len()];
    for_each_chunk(team, (items, 1), (&none, 1), |items, _| items.iter_mut().for_each(&each));
}

/// Calls `each` for pairs of chunks of two slices, `a_len` and `b_len` elements long (the last ones may be shorter), on the threads
/// of `team`.
pub fn for_each_chunk<A: Send, B: Sync>(
    team: Option<&ThreadTeam>,
    (a, a_len): (&mut [A], usize),
    (b, b_len): (&[B], usize),
    each: impl Fn(&mut [A], &[B]) + Sync,
) {
    let threads = team.map_or(1, ThreadTeam::threads);
    let count = a.len().div_ceil(a_len).min(b.len().div_ceil(b_len));
    let (total, a, queue) = (a.len(), DisjointSlice::new(a), WorkQueue::new(count));
    run_parallel(team, count, &mut vec![(); threads], |()| {
        for item in queue.items() {
            // SAFETY: each item is handed out once, and chunks do not overlap.
            let a = unsafe { a.part_mut(item * a_len..total.min((item + 1) * a_len)) };
            each(a, &b[item * b_len..b.len().min((item + 1) * b_len)]);
        }
    });
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

    /// The items that the calling thread takes, until none are left.
    pub(crate) fn items(&self) -> impl Iterator<Item = usize> + '_ {
        std::iter::from_fn(|| self.take())
    }

    /// The items that the calling thread takes, until none are left. Each comes with the thread's next item, which is taken early
    /// so that its weights can be prefetched.
    pub(crate) fn with_next(&self) -> impl Iterator<Item = (usize, Option<usize>)> + '_ {
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_item_is_handed_out_once() {
        for threads in [1, 2, 5] {
            let team = ThreadTeam::start("team", threads, Duration::ZERO).expect("threads start");
            for count in [0, 1, 2, 1000] {
                let mut done = vec![0_u8; count];
                let shared = DisjointSlice::new(&mut done);
                let queue = WorkQueue::new(count);
                run_parallel(Some(&team), count, &mut vec![(); threads], |()| {
                    for (item, next) in queue.with_next() {
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

    #[test]
    fn chunks_are_paired_in_order() {
        for threads in [1, 3] {
            let team = ThreadTeam::start("team", threads, Duration::ZERO).expect("threads start");
            for rows in [0, 1, 2, 100] {
                // The last chunks are shorter: 3 of 4 elements, 2 of 3.
                let b: Vec<usize> = (0..(rows * 3_usize).saturating_sub(1)).collect();
                let mut a = vec![usize::MAX; (rows * 4_usize).saturating_sub(1)];
                for_each_chunk(Some(&team), (&mut a, 4), (&b, 3), |a, b| {
                    a.fill(b.iter().sum());
                });
                for (i, &found) in a.iter().enumerate() {
                    let chunk = &b[i / 4 * 3..b.len().min(i / 4 * 3 + 3)];
                    assert_eq!(
                        found,
                        chunk.iter().sum::<usize>(),
                        "element {i} of {rows} rows, {threads} threads"
                    );
                }
            }
        }
    }
}
