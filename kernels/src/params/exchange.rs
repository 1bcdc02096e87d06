//! Parameters of dispatch, combine and the kernel that stands in for experts.

use super::Group;

/// See `DispatchParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DispatchParams {
    /// The group.
    pub group: Group,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// i32 `[T, k]`.
    pub topk_ids: u64,
    /// f32 `[T, k]`.
    pub topk_weights: u64,
    /// Out: u32 `[local experts + 1]`.
    pub expert_offsets: u64,
    /// Out: u32 `[assignments]`, rows of the window.
    pub row_index: u64,
    /// Out: f32 `[assignments]`.
    pub row_weight: u64,
    /// Out: u32 `[N, max_tokens, k]`, index of each local choice among the assignments.
    pub position: u64,
    /// Scratch: u32 `[MAX_BLOCKS, local experts]`.
    pub block_counts: u64,
    /// 1: rows are quantised as they are sent and take [`fp8_row_bytes`] in the window. A rank alone then quantises into its window.
    pub fp8_rows: u32,
    /// 1: scales of these rows are rounded up to powers of two.
    pub power_of_two_scales: u32,
}

/// Bytes of a row of `hidden` elements that is pushed in FP8: e4m3 codes, then an f32 scale for every 128 of them.
#[must_use]
pub const fn fp8_row_bytes(hidden: usize) -> usize {
    (hidden + hidden.div_ceil(128) * 4).next_multiple_of(16)
}

/// See `CombineParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CombineParams {
    /// The group.
    pub group: Group,
    /// bf16 `[assignments, H]`, weighted.
    pub expert_out: u64,
    /// From dispatch.
    pub position: u64,
    /// Own tokens' choices, i32 `[T, k]`.
    pub topk_ids: u64,
    /// Their weights, f32 `[T, k]`.
    pub topk_weights: u64,
    /// bf16 `[T, H]` to be added, or 0.
    pub shared: u64,
    /// Row places from copy_in, whose flags select the rows to which `shared` is added; 0 selects all rows.
    pub places: u64,
    /// Out: `[T, H]` of the slot's `out_dtype`.
    pub out: u64,
    /// Out: u64 in mapped memory, set to the step's number when its experts have ended; or 0.
    pub experts_done: u64,
    /// Rows before it are combined by earlier launches.
    pub first_row: u32,
    /// Later launches combine the rows from it on; 0: none.
    pub end_row: u32,
    /// f32 `[T, H]` in mapped memory, the sums of a mixed group's first CPU rank; or 0.
    pub sums: u64,
    /// Elements from there to the sums of the next CPU rank.
    pub sums_stride: u64,
    /// Number of CPU ranks.
    pub sums_count: u32,
    /// Padding.
    pub reserved: u32,
}

/// See `TierParams` in `step.h`. `sent` and `sent_*` are mapped host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TierParams {
    /// [`SlotState`](super::SlotState).
    pub state: u64,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// i32 `[T, k]`.
    pub topk_ids: u64,
    /// f32 `[T, k]`.
    pub topk_weights: u64,
    /// u32 `[layers, MAX_EXPERTS]`, index of each expert among the resident ones, or [`AWAY`].
    pub resident: u64,
    /// Out: i32 `[T, k]`, these indices.
    pub local_ids: u64,
    /// Out: f32 `[T, k]`, 0 for experts of CPU ranks.
    pub local_weights: u64,
    /// Out: i32 `[T, k]`, -1 for resident experts.
    pub sent_ids: u64,
    /// Out: f32 `[T, k]`.
    pub sent_weights: u64,
    /// Out: bf16 `[T, H]`.
    pub sent_rows: u64,
    /// Out: u64, `generation | step`, stored last.
    pub sent: u64,
    /// Out: u64 in mapped memory, the number of a step that had failed before.
    pub failed: u64,
    /// `generation << 40`.
    pub generation: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Padding.
    pub reserved: u32,
}

/// Entry of [`TierParams::resident`] for an expert of a CPU rank.
pub const AWAY: u32 = 0xffff;

/// See `ScaleParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleParams {
    /// The group.
    pub group: Group,
    /// bf16 rows that experts read.
    pub rows: u64,
    /// From dispatch.
    pub expert_offsets: u64,
    /// From dispatch.
    pub row_index: u64,
    /// From dispatch.
    pub row_weight: u64,
    /// Out: bf16 `[assignments, H]`.
    pub out: u64,
}

// `step.h` asserts the same sizes; `header.rs` compares every field.
const _: () = {
    assert!(size_of::<DispatchParams>() == 272);
    assert!(size_of::<CombineParams>() == 296);
    assert!(size_of::<TierParams>() == 120);
    assert!(size_of::<ScaleParams>() == 240);
};
