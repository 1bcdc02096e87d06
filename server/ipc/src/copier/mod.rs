//! Copies of many rows by several threads: one core moves about 10 GB/s, a GPU's link takes 50.
//!
//! All that a step copies in one direction is one [`Batch`], whichever requests and ranks its rows belong to: small
//! pieces share the threads as large ones do, and the step waits for others once.

#![allow(
    unsafe_code,
    reason = "copies into memory that two processes take turns on, or that holds nothing yet"
)]

mod crew;
pub(super) mod portions;
mod stores;

use std::marker::PhantomData;
use std::time::Duration;

use self::crew::{Crew, Work};
use self::stores::Store;
use expertd_types::Slices;

/// Less than this the calling thread copies alone.
const ALONE: usize = 256 << 10;
/// So much for each thread makes it worth waking.
const SHARE: usize = 64 << 10;
/// What a thread takes at a time: two portions each, so that a late one costs little, within these bounds.
const PORTION: std::ops::RangeInclusive<usize> = 32 << 10..=128 << 10;

/// One copy of a batch.
#[derive(Clone, Copy, Debug)]
struct Run {
    from: *const u8,
    to: *mut u8,
    bytes: usize,
    /// Bytes of the batch up to the end of this run.
    end: usize,
}

impl Run {
    const fn begin(&self) -> usize {
        self.end - self.bytes
    }
}

/// Copies that are to be made together.
#[derive(Debug, Default)]
pub struct Batch<'a> {
    runs: Vec<Run>,
    sources: PhantomData<&'a [u8]>,
}

impl<'a> Batch<'a> {
    /// Adds a copy of `from` to `to`.
    ///
    /// # Safety
    /// Until the batch is copied or dropped, `to` is good for writes of as many bytes, which nobody else uses, and which
    /// overlap nothing that the batch reads or writes elsewhere.
    pub unsafe fn push(&mut self, from: Slices<'a>, mut to: *mut u8) {
        for slice in from.iter() {
            let (bytes, end) = (slice.len(), self.bytes() + slice.len());
            self.runs.push(Run { from: slice.as_ptr(), to, bytes, end });
            to = to.wrapping_add(bytes);
        }
    }

    /// Bytes of all copies together.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.runs.last().map_or(0, |run| run.end)
    }
}

/// Makes copies, many of them over several threads.
#[derive(Debug, Default)]
pub struct Copier {
    crew: Option<Crew>,
}

impl Copier {
    /// Copies over `threads` threads, of which the calling one is the first; the others look for work for `spin` before
    /// they sleep. With one, or if others cannot be had, it copies alone.
    #[must_use]
    pub fn new(threads: usize, spin: Duration) -> Self {
        if threads < 2 {
            return Copier::default();
        }
        let crew = Crew::start(threads - 1, spin);
        if let Err(error) = &crew {
            tracing::warn!(%error, "rows are copied by one thread");
        }
        Copier { crew: crew.ok() }
    }

    /// Makes the copies of `batch` for a device that reads them next. What several threads copy goes past their caches;
    /// one alone is faster with plain stores.
    pub fn stream(&mut self, batch: Batch<'_>) {
        self.copy(batch, Store::Streaming);
    }

    /// Appends each of `pieces` to the vector whose index stands beside it.
    ///
    /// # Panics
    /// If there is no such vector.
    pub fn append(&mut self, pieces: &[(usize, &[u8])], to: &mut [Vec<u8>]) {
        let mut lengths: Vec<usize> = to.iter().map(Vec::len).collect();
        pieces.iter().for_each(|&(index, piece)| lengths[index] += piece.len());
        for (vec, length) in to.iter_mut().zip(&lengths) {
            vec.reserve(length - vec.len());
        }
        let mut ends: Vec<*mut u8> =
            to.iter_mut().map(|vec| vec.spare_capacity_mut().as_mut_ptr().cast()).collect();
        let mut batch = Batch::default();
        for &(index, piece) in pieces {
            // SAFETY: room for all pieces of a vector was reserved behind what it holds, and they follow each other
            // there. The vectors are borrowed until the batch is copied, so they are nobody else's and no piece's.
            unsafe { batch.push(piece.into(), ends[index]) };
            ends[index] = ends[index].wrapping_add(piece.len());
        }
        self.copy(batch, Store::Plain);
        for (vec, length) in to.iter_mut().zip(lengths) {
            // SAFETY: reserved and written above.
            unsafe { vec.set_len(length) };
        }
    }

    fn copy(&mut self, batch: Batch<'_>, store: Store) {
        let bytes = batch.bytes();
        let Some(crew) = self.crew.as_mut().filter(|_| bytes >= ALONE) else {
            for run in batch.runs {
                // SAFETY: promised when it was pushed; the source is borrowed.
                unsafe { Store::Plain.copy(run.from, run.to, run.bytes) };
            }
            return;
        };
        let helpers = (bytes / SHARE - 1).min(crew.helpers());
        let portion = (bytes / (2 * (helpers + 1))).clamp(*PORTION.start(), *PORTION.end());
        // Cut between lines, where the runs begin at lines.
        let work = Work { runs: batch.runs, portion: portion.next_multiple_of(4 << 10), store };
        // SAFETY: promised when the copies were pushed; sources are borrowed until this returns.
        unsafe { crew.run(work, helpers) };
    }
}

#[cfg(test)]
mod tests;
