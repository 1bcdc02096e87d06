//! A step that the router forms: which rows go to which rank, and the copies of those that are staged.

use bytemuck::Pod;
use expertd_types::{DType, MemoryId, Rank, Slot};

use super::super::super::copier::{Copier, CopyBatch};
use super::super::ChannelError;
use super::super::layout::SEGMENT_ALIGN;
use super::super::records::{Raise, Segment};
use super::{Cursor, RouterChannel, StagedRows};
use expertd_shm::region::SharedSlice;

/// Where the router finds rows.
#[derive(Clone, Copy, Debug)]
pub enum RowSource<'a> {
    /// Memory of this process.
    Own(&'a [u8]),
    /// Memory that every rank has attached: ranks read the rows and write the answer there, and the router copies neither.
    Attached(AttachedRows),
}

/// Rows in a memory that every rank has attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedRows {
    /// The memory.
    pub memory: MemoryId,
    /// Offset of the rows, in bytes.
    pub input: u64,
    /// Offset of the answer, in bytes; it does not overlap the rows.
    pub output: u64,
    /// Length of the rows, in bytes.
    pub bytes: usize,
}

impl<'a> From<&'a [u8]> for RowSource<'a> {
    fn from(rows: &'a [u8]) -> Self {
        RowSource::Own(rows)
    }
}

impl RowSource<'_> {
    /// Length of the rows, in bytes.
    pub const fn len(&self) -> usize {
        match self {
            RowSource::Own(rows) => rows.len(),
            RowSource::Attached(AttachedRows { bytes, .. }) => *bytes,
        }
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows of one request that the router stages for one rank.
#[derive(Clone, Copy, Debug)]
pub struct RowsToStage<'a> {
    /// `[n, hidden]` in `dtype`.
    pub rows: RowSource<'a>,
    /// Number of rows, n.
    pub tokens: usize,
    /// Element type of the rows.
    pub dtype: DType,
    /// Expert ids `[n, k]` int32 and weights `[n, k]` f32, little-endian; the gate chooses if absent.
    pub routing: Option<(&'a [u8], &'a [u8])>,
    /// `[n]` int32, little-endian.
    pub token_ids: Option<&'a [u8]>,
    /// Whether the output includes the shared experts.
    pub shared_experts: bool,
}

/// A step that is being formed: each call of [`stage`](Self::stage) allocates staging, [`copy`](Self::copy) copies all rows.
#[derive(Debug)]
pub struct FormingStep<'c, 'a> {
    // A mutable borrow, so that the slot's staging is not used otherwise before the copies are made.
    channel: &'c mut RouterChannel,
    slot: Slot,
    top_k: usize,
    batch: CopyBatch<'a>,
}

impl<'c, 'a> FormingStep<'c, 'a> {
    pub(super) fn new(channel: &'c mut RouterChannel, slot: Slot, top_k: usize) -> Self {
        FormingStep { channel, slot, top_k, batch: CopyBatch::default() }
    }

    /// Allocates space for `rows` in the staging of `rank`.
    ///
    /// # Errors
    /// [`ChannelError::Capacity`] if they do not fit, [`ChannelError::InFlight`] if the slot is in flight on the rank.
    pub fn stage(&mut self, rank: Rank, rows: &RowsToStage<'a>) -> Result<StagedRows, ChannelError> {
        let FormingStep { channel, slot, top_k, batch } = self;
        let (shape, top_k) = (&channel.shape, *top_k);
        let link = &mut channel.links[rank.index()];
        link.expect_idle(rank, *slot)?;
        let cursor = link.cursor;
        let fits = |what, needed: usize, capacity: usize| {
            if needed <= capacity {
                Ok(())
            } else {
                Err(ChannelError::Capacity { rank, what, needed, capacity })
            }
        };
        let most_rows = if rank.0 < shape.sources { shape.max_tokens_per_rank } else { 0 };
        fits("rows", cursor.rows + rows.tokens, most_rows)?;
        fits("segments", cursor.segments + 1, shape.max_segments)?;
        fits("experts per token", top_k, shape.max_top_k)?;
        // Where the rows are, and how many bytes of staging they take.
        let (memory, byte_offset, output_offset, bytes) = match rows.rows {
            RowSource::Attached(rows) => (rows.memory.0, rows.input, rows.output, 0),
            staged => (Segment::STAGING, cursor.bytes as u64, 0, staged.len()),
        };
        fits("bytes", cursor.bytes + bytes, shape.row_area_bytes())?;
        let staging = &link.slots[slot.index()];
        let mut flags = 0;
        push_copy(batch, rows.rows, &staging.rows, cursor.bytes);
        if let Some((ids, weights)) = rows.routing {
            flags |= Segment::GIVEN_ROUTING;
            push_copy(batch, ids.into(), &staging.ids, cursor.rows * top_k);
            push_copy(batch, weights.into(), &staging.weights, cursor.rows * top_k);
        }
        if let Some(token_ids) = rows.token_ids {
            push_copy(batch, token_ids.into(), &staging.token_ids, cursor.rows);
        }
        if rows.shared_experts {
            flags |= Segment::SHARED_EXPERTS;
        }
        // SAFETY: the slot is not in flight (checked), so its staging belongs to the router, and this borrow of the channel
        // is exclusive.
        let segments = unsafe { staging.segments.as_mut_slice() };
        segments[cursor.segments] = Segment {
            byte_offset,
            output_offset,
            first_row: cursor.rows as u32,
            rows: rows.tokens as u32,
            dtype: rows.dtype as u32,
            flags,
            memory,
            reserved: 0,
        };
        link.cursor = Cursor {
            rows: cursor.rows + rows.tokens,
            bytes: (cursor.bytes + bytes).next_multiple_of(SEGMENT_ALIGN),
            segments: cursor.segments + 1,
            ..cursor
        };
        Ok(StagedRows {
            rank,
            slot: *slot,
            byte_offset: cursor.bytes,
            bytes,
            first_row: cursor.rows,
            rows: rows.tokens,
            is_attached: memory != Segment::STAGING,
        })
    }

    /// Lets rank 0 raise a completion word when every rank has written its results.
    ///
    /// # Errors
    /// As [`stage`](Self::stage).
    pub fn raise(&mut self, raise: Raise) -> Result<(), ChannelError> {
        let rank = Rank(0);
        let link = &mut self.channel.links[rank.index()];
        link.expect_idle(rank, self.slot)?;
        // SAFETY: the slot is not in flight (checked), so its staging belongs to the router, and this borrow of the channel
        // is exclusive.
        let raises = unsafe { link.slots[self.slot.index()].raises.as_mut_slice() };
        let (what, needed, capacity) = ("words to raise", link.cursor.raises + 1, raises.len());
        let place = raises.get_mut(link.cursor.raises);
        *place.ok_or(ChannelError::Capacity { rank, what, needed, capacity })? = raise;
        link.cursor.raises = needed;
        Ok(())
    }

    /// Copies all staged rows with `copier`.
    pub fn copy(self, copier: &mut Copier) {
        copier.stream(self.batch);
    }
}

/// Adds a copy of `bytes` to elements `at..` of `to`, which must be staging of a slot that is not in flight. Rows in an
/// attached memory stay there.
fn push_copy<'a, T: Pod>(batch: &mut CopyBatch<'a>, bytes: RowSource<'a>, to: &SharedSlice<T>, at: usize) {
    let RowSource::Own(bytes) = bytes else { return };
    let capacity = to.len() * size_of::<T>();
    let start = at * size_of::<T>();
    assert!(start <= capacity && bytes.len() <= capacity - start, "the rows exceed the staging");
    // SAFETY: in bounds (asserted). The slot is not in flight, so only the router accesses the destination; it is shared
    // memory, so it overlaps no source, and cursors advance, so it overlaps no other destination. The batch lives with a
    // mutable borrow of the channel, which keeps the memory mapped and the slot out of flight.
    unsafe { batch.push(bytes, to.as_ptr().cast::<u8>().add(start)) };
}
