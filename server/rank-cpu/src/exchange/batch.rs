//! The memory that an exchange hands out.

#![allow(
    unsafe_code,
    reason = "turns views of shared memory into slices while the protocol says they are ours"
)]

use std::ops::Range;

use super::super::window::{BatchHead, WindowShape, Windows};
use expertd_types::{Rank, Slot};

/// What this rank dispatches to one other: to be filled while the slot is open ([`SlotState`](super::SlotState)).
#[derive(Debug)]
pub struct Outgoing<'a> {
    /// How much of the rest is filled.
    pub head: &'a mut BatchHead,
    /// `[max_tokens_per_rank, max_top_k]`.
    pub ids: &'a mut [i32],
    /// `[max_tokens_per_rank, max_top_k]`.
    pub weights: &'a mut [f32],
    /// `[max_tokens_per_rank, hidden]`.
    pub rows: &'a mut [f32],
}

/// What one source rank dispatched to this rank, and where the answer goes.
#[derive(Debug)]
pub struct Batch<'a> {
    /// The source.
    pub source: Rank,
    /// Experts per token.
    pub k: usize,
    /// `[rows, hidden]`.
    pub rows: &'a [f32],
    /// `[rows, k]`.
    pub ids: &'a [i32],
    /// `[rows, k]`.
    pub weights: &'a [f32],
    /// `[rows, hidden]`, in the source's window: row `i` answers received row `i`.
    pub partials: &'a mut [f32],
}

/// One [`Batch`] per source rank, in ascending order, those without rows included.
#[derive(Debug)]
pub struct Batches<'a> {
    // Mutable, so that nothing else of the exchange is used while batches are out.
    pub(super) windows: &'a mut Windows,
    pub(super) slot: Slot,
    pub(super) k: usize,
    pub(super) ranks: Range<usize>,
}

impl<'a> Iterator for Batches<'a> {
    type Item = Batch<'a>;

    fn next(&mut self) -> Option<Batch<'a>> {
        let source = self.ranks.next()?;
        let (windows, k) = (&*self.windows, self.k);
        let WindowShape { hidden, max_tokens_per_rank, .. } = windows.shape;
        let at = windows.area(self.slot, source);
        let area = &windows.incoming[at];
        // SAFETY: the slot is ready. The source stored its dispatch flag after it wrote the area, and writes it again
        // only after it has seen our combine flag, which is not stored while this borrow of the exchange lives. The
        // partials nobody else writes, and the source, having stored the dispatch flag of this exchange, has finished
        // reading those of the slot's last one and reads these after our combine flag. Each source comes once, so no
        // second slice of its partials exists. The slices point into the region, which outlives the borrow.
        unsafe {
            // The count was checked when it arrived; `min` keeps a peer that scribbles later from causing a panic.
            let rows = (area.head.as_slice()[0].rows as usize).min(max_tokens_per_rank);
            Some(Batch {
                source: Rank(source as u32),
                k,
                rows: extend(&area.rows.as_slice()[..rows * hidden]),
                ids: extend(&area.ids.as_slice()[..rows * k]),
                weights: extend(&area.weights.as_slice()[..rows * k]),
                partials: extend_mut(&mut windows.partials[at].as_mut_slice()[..rows * hidden]),
            })
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ranks.size_hint()
    }
}

impl ExactSizeIterator for Batches<'_> {}

/// Lengthens a borrow of window memory from one call of `next` to the borrow of the exchange.
///
/// # Safety
/// The memory is in a region that lives as long as `'a`, and stays ours that long.
const unsafe fn extend<'a, T>(slice: &[T]) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len()) }
}

/// As [`extend`].
///
/// # Safety
/// As there, and the slice is given out once.
const unsafe fn extend_mut<'a, T>(slice: &mut [T]) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr(), slice.len()) }
}
