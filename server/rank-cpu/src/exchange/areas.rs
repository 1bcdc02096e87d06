//! Slices of window memory that an exchange lends to its caller.

#![allow(unsafe_code, reason = "makes slices of shared memory while the protocol assigns it to this rank")]

use std::ops::Range;

use super::super::window::{AreaHeader, WindowShape, Windows};
use expertd_types::{Rank, Slot};

/// The rows that this rank dispatches to one peer, to be filled while the slot is open ([`SlotState`](super::SlotState)).
#[derive(Debug)]
pub(crate) struct Outgoing<'a> {
    /// Number of rows, and k.
    pub head: &'a mut AreaHeader,
    /// `[max_tokens_per_rank, max_top_k]`.
    pub ids: &'a mut [i32],
    /// `[max_tokens_per_rank, max_top_k]`.
    pub weights: &'a mut [f32],
    /// `[max_tokens_per_rank, hidden]`.
    pub rows: &'a mut [f32],
}

/// Rows that one source rank dispatched to this rank, and the memory for their partials.
#[derive(Debug)]
pub struct ReceivedRows<'a> {
    /// The source rank.
    pub source: Rank,
    /// Experts per token.
    pub k: usize,
    /// `[rows, hidden]`.
    pub rows: &'a [f32],
    /// `[rows, k]`.
    pub ids: &'a [i32],
    /// `[rows, k]`.
    pub weights: &'a [f32],
    /// `[rows, hidden]` in the source's window; row `i` is the result of received row `i`.
    pub partials: &'a mut [f32],
}

/// Iterator over one [`ReceivedRows`] per source rank, in ascending order, including ranks without rows.
#[derive(Debug)]
pub struct ReceivedIter<'a> {
    // A mutable borrow, so that the exchange is not used otherwise while its memory is lent.
    pub(super) windows: &'a mut Windows,
    pub(super) slot: Slot,
    pub(super) k: usize,
    pub(super) ranks: Range<usize>,
}

impl<'a> Iterator for ReceivedIter<'a> {
    type Item = ReceivedRows<'a>;

    fn next(&mut self) -> Option<ReceivedRows<'a>> {
        let source = self.ranks.next()?;
        let (windows, k) = (&*self.windows, self.k);
        let WindowShape { hidden, max_tokens_per_rank, .. } = windows.shape;
        let at = windows.area(self.slot, source);
        let area = &windows.incoming[at];
        // SAFETY: the slot is ready. The source stored its dispatch flag after it wrote the area, and writes it again
        // only after it has seen our combine flag, which is not stored while this borrow of the exchange lives. No other
        // rank writes the partials. The source has finished reading the partials of the slot's previous exchange, because
        // it has stored the dispatch flag of this one, and reads the new ones only after our combine flag. Each source is
        // yielded once, so no second slice of its partials exists. The slices point into the region, which outlives the
        // borrow.
        unsafe {
            // The count was checked when it arrived; `min` prevents a panic if the peer overwrites it later.
            let rows = (area.head.as_slice()[0].rows as usize).min(max_tokens_per_rank);
            Some(ReceivedRows {
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

impl ExactSizeIterator for ReceivedIter<'_> {}

/// Extends a borrow of window memory from one call of `next` to the borrow of the exchange.
///
/// # Safety
/// The memory is in a region that lives as long as `'a`, and belongs to this rank that long.
const unsafe fn extend<'a, T>(slice: &[T]) -> &'a [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(slice.as_ptr(), slice.len()) }
}

/// Extends a mutable borrow; the counterpart of [`extend`].
///
/// # Safety
/// The conditions of [`extend`], and no other slice of the memory is made while `'a` lasts.
const unsafe fn extend_mut<'a, T>(slice: &mut [T]) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr(), slice.len()) }
}
