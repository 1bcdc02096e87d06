//! Copies of many rows by several threads: one core moves about 10 GB/s, a GPU's link takes 50.
//!
//! All copies of a step in one direction form one [`CopyBatch`], across requests and ranks. Small copies share the threads
//! as large ones do, and the step waits for the helper threads once.

#![allow(
    unsafe_code,
    reason = "copies into memory that two processes take turns at, or into uninitialised memory"
)]

mod stores;

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use expertd_shm::ThreadTeam;

use self::stores::StoreKind;

/// Smaller batches, in bytes, are copied by the calling thread alone.
const MIN_PARALLEL: usize = 256 << 10;
/// Bytes per thread that make waking the thread worthwhile.
const MIN_PER_THREAD: usize = 64 << 10;
/// Bounds of a portion, in bytes. Within them there are two portions per thread, so that a late thread costs little.
const PORTION: std::ops::RangeInclusive<usize> = 32 << 10..=128 << 10;

/// One copy of a batch.
#[derive(Clone, Copy, Debug)]
struct CopyRange {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
    /// Offset of this range's end in the batch, in bytes.
    end: usize,
}

impl CopyRange {
    const fn begin(&self) -> usize {
        self.end - self.bytes
    }

    /// Copies `bytes` bytes from offset `at` of the range on.
    ///
    /// # Safety
    /// The conditions of [`CopyBatch::push`]; the bytes lie within the range, and no other thread copies them.
    unsafe fn copy(&self, store: StoreKind, at: usize, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { store.copy(self.from.wrapping_add(at), self.to.wrapping_add(at), bytes) };
    }
}

/// A batch that several threads copy, cut into portions of equal size.
struct Portions {
    /// The copies, in the order of their [`end`](CopyRange::end).
    ranges: Vec<CopyRange>,
    /// Size of a portion, in bytes of the batch.
    size: usize,
    store: StoreKind,
    /// The next portion that no thread has taken.
    next: AtomicUsize,
}

// SAFETY: `push`'s callers promise that the addresses are valid, and each portion is copied by one thread.
unsafe impl Sync for Portions {}

impl Portions {
    /// Copies portions until none is left.
    ///
    /// # Safety
    /// The conditions of [`CopyBatch::push`].
    unsafe fn copy(&self) {
        let bytes = self.ranges.last().map_or(0, |range| range.end);
        loop {
            let begin = self.next.fetch_add(1, Ordering::Relaxed) * self.size;
            if begin >= bytes {
                return;
            }
            let end = begin + self.size;
            let first = self.ranges.partition_point(|range| range.end <= begin);
            for range in self.ranges[first..].iter().take_while(|range| range.begin() < end) {
                let at = begin.saturating_sub(range.begin());
                let bytes = end.min(range.end) - range.begin() - at;
                // SAFETY: both addresses lie within the range; neither portions nor ranges overlap.
                unsafe { range.copy(self.store, at, bytes) };
            }
        }
    }
}

/// Copies that are made together.
#[derive(Debug, Default)]
pub struct CopyBatch<'a> {
    ranges: Vec<CopyRange>,
    sources: PhantomData<&'a [u8]>,
}

impl<'a> CopyBatch<'a> {
    /// Adds a copy of `from` to `to`.
    ///
    /// # Safety
    /// Until the batch is copied or dropped, `to` is valid for writes of `from.len()` bytes. Nothing else reads or writes
    /// these bytes meanwhile, and they overlap no other source or destination of the batch.
    pub unsafe fn push(&mut self, from: &'a [u8], to: *mut u8) {
        if !from.is_empty() {
            let (bytes, end) = (from.len(), self.bytes() + from.len());
            self.ranges.push(CopyRange { from: from.as_ptr(), to, bytes, end });
        }
    }

    /// Size of all copies together, in bytes.
    pub fn bytes(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }
}

/// Copies batches, large ones on several threads.
#[derive(Debug, Default)]
pub struct Copier {
    team: Option<ThreadTeam>,
}

impl Copier {
    /// A copier for `threads` threads. The calling thread is one of them; the others spin for `spin` before they sleep.
    /// The calling thread copies alone if `threads` is below two or the other threads cannot be started.
    #[must_use]
    pub fn new(threads: usize, spin: Duration) -> Self {
        if threads < 2 {
            return Copier::default();
        }
        let team = ThreadTeam::start("copies", threads, spin);
        if let Err(error) = &team {
            tracing::warn!(%error, "cannot start threads that copy rows; one thread copies alone");
        }
        Copier { team: team.ok() }
    }

    /// Copies `batch` to memory that a device reads next. Several threads use streaming stores, which bypass their caches;
    /// one thread alone is faster with plain stores.
    pub fn stream(&mut self, batch: CopyBatch<'_>) {
        self.copy(batch, StoreKind::Streaming);
    }

    /// Appends each slice to the vector of `to` whose index is paired with it.
    ///
    /// # Panics
    /// If `to` has no such vector.
    pub fn append(&mut self, slices: &[(usize, &[u8])], to: &mut [Vec<u8>]) {
        let mut lengths: Vec<usize> = to.iter().map(Vec::len).collect();
        slices.iter().for_each(|&(index, slice)| lengths[index] += slice.len());
        for (vec, length) in to.iter_mut().zip(&lengths) {
            vec.reserve(length - vec.len());
        }
        let mut ends: Vec<*mut u8> =
            to.iter_mut().map(|vec| vec.spare_capacity_mut().as_mut_ptr().cast()).collect();
        let mut batch = CopyBatch::default();
        for &(index, slice) in slices {
            // SAFETY: each vector has capacity for all its slices behind its contents (reserved above), where they follow
            // each other. The vectors are mutably borrowed until the batch is copied, so nothing else uses them and no
            // slice lies in them.
            unsafe { batch.push(slice, ends[index]) };
            ends[index] = ends[index].wrapping_add(slice.len());
        }
        self.copy(batch, StoreKind::Plain);
        for (vec, length) in to.iter_mut().zip(lengths) {
            // SAFETY: `length` elements were reserved and written above.
            unsafe { vec.set_len(length) };
        }
    }

    fn copy(&self, batch: CopyBatch<'_>, store: StoreKind) {
        let bytes = batch.bytes();
        let Some(team) = self.team.as_ref().filter(|_| bytes >= MIN_PARALLEL) else {
            for range in batch.ranges {
                // SAFETY: the caller of `push` promised it; the source is borrowed.
                unsafe { range.copy(StoreKind::Plain, 0, range.bytes) };
            }
            return;
        };
        let threads = (bytes / MIN_PER_THREAD).min(team.threads());
        // Portions are multiples of cache lines: ranges that begin on a line are cut between lines.
        let size = (bytes / (2 * threads)).clamp(*PORTION.start(), *PORTION.end()).next_multiple_of(4 << 10);
        let portions = Portions { ranges: batch.ranges, size, store, next: AtomicUsize::new(0) };
        // SAFETY: the callers of `push` promised it; the sources are borrowed until this returns.
        team.run(threads, &|_| unsafe { portions.copy() });
    }
}

#[cfg(test)]
mod tests;
