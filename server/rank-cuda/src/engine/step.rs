//! The buffers of a step's kernels.

mod launches;

use expertd_kernels::device::{Buffer, Device, DeviceError, Mailbox};
use expertd_kernels::experts;
use expertd_kernels::layout::Shape;
use expertd_kernels::params::{Completion, ROW_PLACE_BYTES, Segment, StepRequest};
use expertd_kernels::slot::SlotBuffers;

pub(super) use launches::{StepLaunches, TierPlaces};

use crate::experts::{HostBuffer, Panels};
use crate::host::panel_rows;

/// Least number of blocks of the kernels that copy rows between host and device: enough to saturate the link, and few enough to leave
/// most multiprocessors to other kernels.
pub(super) const COPY_BLOCKS: u32 = 16;
/// Rows that a block of these kernels copies at a time.
const COPY_BLOCK_ROWS: u32 = 16;
/// Blocks of a cluster of copy_in.
const COPY_CLUSTER: u32 = 8;

/// Blocks of the kernels that copy up to `rows` rows between device memories: one row for each warp. More blocks read the step's
/// description over PCIe more often, and it takes longer for all of them to start.
pub(super) fn copy_blocks(rows: u32, most: u32) -> u32 {
    let wanted = rows.div_ceil(COPY_BLOCK_ROWS).next_multiple_of(COPY_CLUSTER);
    wanted.min(most / COPY_CLUSTER * COPY_CLUSTER).max(COPY_BLOCKS)
}

/// The buffers of one slot.
pub(super) struct SlotSet {
    pub(super) kernels: SlotBuffers,
    token_ids: Buffer<i32>,
    /// bf16 `[max_tokens, hidden]`: the part of f32 and f16 rows that rounding to bf16 removed.
    tokens_low: Buffer<u16>,
    /// `RowPlace` of each row.
    places: Buffer<u8>,
    shared_offsets: Buffer<u32>,
    shared_index: Buffer<u32>,
    shared_weight: Buffer<f32>,
    shared_out: Buffer<u16>,
    pub(super) request: Mailbox<StepRequest>,
    pub(super) completion: Mailbox<Completion>,
    /// Sequence number of the last step whose experts phase has ended.
    pub(super) experts_done: Mailbox<u64>,
    /// Padded rows, f32 `[max_tokens, hidden]`; one page if rows need no padding.
    pub(super) rows: HostBuffer,
    /// Segments of [`rows`](Self::rows).
    pub(super) segments: HostBuffer,
}

/// All buffers of steps, apart from weights and windows.
pub(super) struct Buffers {
    pub(super) slots: Vec<SlotSet>,
    x_panels: Panels,
    h: Panels,
    /// Scales of `x_panels` for FP8 products; empty without them.
    x_scales: Buffer<f32>,
    /// Scales of `h` for FP8 products; empty without them.
    h_scales: Buffer<f32>,
    state: Buffer<u32>,
    panel_rows: usize,
}

/// Sizes of buffers that do not follow from the group's shape.
pub(super) struct Sizes {
    /// The largest intermediate size of any layer, padded.
    pub(super) inter: usize,
    pub(super) slots: u32,
    /// Whether the kernels' rows are longer than the callers'.
    pub(super) padding: bool,
    /// Whether any layer's experts compute products in FP8.
    pub(super) fp8_products: bool,
}

impl Buffers {
    /// Allocates the buffers for a group of this shape.
    pub(super) fn new(device: &Device, shape: &Shape, sizes: &Sizes) -> Result<Self, DeviceError> {
        let &Sizes { inter, slots, padding, fp8_products } = sizes;
        let tokens = shape.max_tokens as usize;
        let hidden = shape.hidden as usize;
        let converted = if padding { tokens } else { 0 };
        let slot = || {
            Ok::<_, DeviceError>(SlotSet {
                kernels: SlotBuffers::new(device, shape)?,
                token_ids: Buffer::zeroed(device, tokens)?,
                tokens_low: Buffer::zeroed(device, tokens * hidden)?,
                places: Buffer::zeroed(device, tokens * ROW_PLACE_BYTES)?,
                shared_offsets: Buffer::zeroed(device, 2)?,
                shared_index: Buffer::zeroed(device, tokens)?,
                shared_weight: Buffer::zeroed(device, tokens)?,
                shared_out: Buffer::zeroed(device, tokens * hidden)?,
                request: Mailbox::new(device, StepRequest::default())?,
                completion: Mailbox::new(device, Completion::default())?,
                experts_done: Mailbox::new(device, 0)?,
                rows: HostBuffer::new(device, converted * hidden * 4)?,
                segments: HostBuffer::new(device, converted * size_of::<Segment>())?,
            })
        };
        let local = shape.max_local_experts() as usize;
        // Routed and shared experts use the same workspace with the same distance between panels.
        let rows = panel_rows(shape);
        let scales = |k: usize| if fp8_products { k.div_ceil(experts::SCALE_ELEMENTS) * rows } else { 0 };
        Ok(Buffers {
            slots: (0..slots).map(|_| slot()).collect::<Result<_, _>>()?,
            x_panels: Panels::new(device, rows * hidden)?,
            h: Panels::new(device, rows * inter)?,
            x_scales: Buffer::zeroed(device, scales(hidden))?,
            h_scales: Buffer::zeroed(device, scales(inter))?,
            state: Buffer::zeroed(device, experts::state_words(local.max(1)))?,
            panel_rows: rows,
        })
    }
}

/// Device addresses of a slot's segments, rows and routing on the host, or of their copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StagedAddresses {
    pub(super) segments: u64,
    pub(super) max_segments: u32,
    pub(super) rows: u64,
    pub(super) row_bytes: u64,
    pub(super) ids: u64,
    pub(super) weights: u64,
    pub(super) token_ids: u64,
    /// The word that gets the step's sequence before its completion words are raised.
    pub(super) raised: u64,
}
