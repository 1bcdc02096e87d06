//! Device buffers of one rank and slot, and the parameters of the kernels that use them.

use crate::device::{Buffer, Device, DeviceError};
use crate::layout::{Shape, WindowLayout};
use crate::params::{CombineParams, DispatchParams, Group, MAX_BLOCKS, MAX_RANKS, ScaleParams, SlotState};

/// Elements of a row that one warp moves at a time; see `dispatch.cu`.
const DISPATCH_PIECE: u32 = 1024;
/// Elements of a row that one warp moves at a time; see `combine.cu`.
const COMBINE_PIECE: u32 = 512;
/// Warps of a combine block that move rows; see `combine.cu`.
const COMBINE_WORKERS: u32 = 15;

/// Number of blocks for a dispatch of at most `tokens` rows per rank. One block in eight (at least one, at most 16) sends
/// routing and lists rows, the others send rows. All ranks must use the same number, which is at least 2.
///
/// Dispatch and combine use few blocks for few rows, because blocks of the next kernel start beside those of the running
/// one only on free multiprocessors.
#[must_use]
pub fn dispatch_blocks(shape: &Shape, tokens: u32, most: u32) -> u32 {
    let items = u64::from(tokens) * u64::from(shape.hidden.div_ceil(DISPATCH_PIECE));
    let rows = items.div_ceil(if items < 256 { 8 } else { 4 });
    blocks(rows + (rows / 7).clamp(1, 16), most).max(2)
}

/// Number of blocks for a combine of at most `tokens` rows per rank; few for few rows, as in [`dispatch_blocks`]. All ranks
/// must use the same number.
#[must_use]
pub fn combine_blocks(shape: &Shape, tokens: u32, most: u32) -> u32 {
    let pieces = u64::from(shape.hidden.div_ceil(COMBINE_PIECE));
    let units = u64::from(tokens) * u64::from(shape.ranks) * pieces;
    let few = if units < 1024 { 64 } else { u64::from(most) };
    blocks(units.div_ceil(4).min(few), most)
}

/// Rows that a combine of `blocks` blocks moves in one turn of all its warps. A combine in several launches is fastest if they are cut at
/// multiples of it.
#[must_use]
pub fn combine_turn(shape: &Shape, blocks: u32) -> u32 {
    (COMBINE_WORKERS * blocks / shape.hidden.div_ceil(COMBINE_PIECE)).max(1)
}

fn blocks(wanted: u64, most: u32) -> u32 {
    let most = most.clamp(1, MAX_BLOCKS as u32);
    u32::try_from(wanted).unwrap_or(most).clamp(1, most)
}

/// Device memory of one rank and slot, without the window.
#[derive(Debug)]
pub struct SlotBuffers {
    /// The slot's state.
    pub state: Buffer<SlotState>,
    /// bf16 `[max_tokens, H]`.
    pub tokens: Buffer<u16>,
    /// i32 `[max_tokens, k]`.
    pub topk_ids: Buffer<i32>,
    /// f32 `[max_tokens, k]`.
    pub topk_weights: Buffer<f32>,
    /// u32 `[local experts + 1]`.
    pub expert_offsets: Buffer<u32>,
    /// u32 `[assignments]`.
    pub row_index: Buffer<u32>,
    /// f32 `[assignments]`.
    pub row_weight: Buffer<f32>,
    /// u32 `[N, max_tokens, k]`.
    pub position: Buffer<u32>,
    /// Scratch memory of dispatch, u32 `[MAX_BLOCKS, local experts]`.
    pub block_counts: Buffer<u32>,
    /// bf16 `[assignments, H]`.
    pub expert_out: Buffer<u16>,
    /// `[max_tokens, H]` of elements of up to four bytes.
    pub out: Buffer<u32>,
}

impl SlotBuffers {
    /// Allocates all buffers for `shape`; the sequence starts at 1.
    pub fn new(device: &Device, shape: &Shape) -> Result<SlotBuffers, DeviceError> {
        let tokens = shape.max_tokens as usize;
        let (hidden, top_k) = (shape.hidden as usize, shape.top_k as usize);
        let assignments = shape.max_assignments();
        Ok(SlotBuffers {
            state: Buffer::from_slice(device, &[SlotState { sequence: 1, ..SlotState::default() }])?,
            tokens: Buffer::zeroed(device, tokens * hidden)?,
            topk_ids: Buffer::zeroed(device, tokens * top_k)?,
            topk_weights: Buffer::zeroed(device, tokens * top_k)?,
            expert_offsets: Buffer::zeroed(device, shape.max_local_experts() as usize + 1)?,
            row_index: Buffer::zeroed(device, assignments)?,
            row_weight: Buffer::zeroed(device, assignments)?,
            position: Buffer::zeroed(device, shape.window_rows() * top_k)?,
            block_counts: Buffer::zeroed(device, MAX_BLOCKS * shape.max_local_experts() as usize)?,
            expert_out: Buffer::zeroed(device, assignments * hidden)?,
            out: Buffer::zeroed(device, tokens * hidden)?,
        })
    }

    /// This rank's view of the group. `windows` holds the address of this slot's region at each rank.
    #[must_use]
    pub fn group(
        &self,
        shape: &Shape,
        rank: u32,
        windows: &[u64],
        generation: u64,
        deadline_ns: u64,
    ) -> Group {
        let mut all = [0; MAX_RANKS];
        for (address, window) in all.iter_mut().zip(windows) {
            *address = *window;
        }
        Group {
            windows: all,
            state: self.state.address(),
            generation: generation << 40,
            deadline_ns,
            copies: 0,
            rank,
            ranks: shape.ranks,
            hidden: shape.hidden,
            top_k: shape.top_k,
            experts: shape.experts,
            max_tokens: shape.max_tokens,
            delay_ns: 0,
            chunk: 0,
            layout: WindowLayout::new(shape).0,
        }
    }

    /// Parameters of dispatch.
    #[must_use]
    pub fn dispatch(&self, group: Group) -> DispatchParams {
        DispatchParams {
            group,
            tokens: self.tokens.address(),
            topk_ids: self.topk_ids.address(),
            topk_weights: self.topk_weights.address(),
            expert_offsets: self.expert_offsets.address(),
            row_index: self.row_index.address(),
            row_weight: self.row_weight.address(),
            position: self.position.address(),
            block_counts: self.block_counts.address(),
            fp8_rows: 0,
            power_of_two_scales: 0,
        }
    }

    /// Parameters of combine; `shared` is the device address of bf16 `[T, H]` to be added, or 0.
    #[must_use]
    pub fn combine(&self, group: Group, shared: u64) -> CombineParams {
        CombineParams {
            group,
            expert_out: self.expert_out.address(),
            position: self.position.address(),
            topk_ids: self.topk_ids.address(),
            topk_weights: self.topk_weights.address(),
            shared,
            out: self.out.address(),
            ..CombineParams::default()
        }
    }

    /// Device address of the rows that dispatch lists and experts read: in the window or, in a group of one rank whose rows stay in
    /// bf16, `tokens` itself. `fp8`: [`DispatchParams::fp8_rows`].
    #[must_use]
    pub fn rows(&self, group: &Group, fp8: bool) -> u64 {
        if group.ranks == 1 && !fp8 {
            self.tokens.address()
        } else {
            group.windows[group.rank as usize] + group.layout.rows
        }
    }

    /// Parameters of the kernel that stands in for experts.
    #[must_use]
    pub fn scale(&self, group: Group) -> ScaleParams {
        ScaleParams {
            group,
            rows: self.rows(&group, false),
            expert_offsets: self.expert_offsets.address(),
            row_index: self.row_index.address(),
            row_weight: self.row_weight.address(),
            out: self.expert_out.address(),
        }
    }
}
