//! Parameters of the kernels that copy rows between staging and device memory, and of the kernel that lists the rows of the
//! shared experts.

use super::Group;

/// See `CopyInParams` in `step.h`. `request`, `segments` and `staged_*` are mapped host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyInParams {
    /// [`SlotState`](super::SlotState).
    pub state: u64,
    /// [`StepRequest`](super::StepRequest).
    pub request: u64,
    /// Table of [`Segment`](super::Segment).
    pub segments: u64,
    /// Row bytes.
    pub staged_rows: u64,
    /// i32 `[T, k]`.
    pub staged_ids: u64,
    /// f32 `[T, k]`.
    pub staged_weights: u64,
    /// i32 `[T]`, or 0.
    pub staged_token_ids: u64,
    /// Out: bf16 `[T, H]`; 0: copy engines write the rows, which are all bf16.
    pub tokens: u64,
    /// Out: bf16 `[T, H]`, rows minus `tokens` in steps with any row that is not bf16; or 0.
    pub tokens_low: u64,
    /// Out: i32 `[T, k]`.
    pub topk_ids: u64,
    /// Out: f32 `[T, k]`.
    pub topk_weights: u64,
    /// Out: i32 `[T]`.
    pub token_ids: u64,
    /// Out: row places `[T]`.
    pub places: u64,
    /// Size of `staged_rows`, in bytes.
    pub staged_bytes: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Number of routed experts.
    pub experts: u32,
    /// Capacity of `segments`, in entries.
    pub max_segments: u32,
    /// Elements of a row of segments with [`NARROW_ROWS`](super::NARROW_ROWS).
    pub row_elements: u32,
}

/// See `CopyOutParams` in `step.h`. `staged_*` and `completion` are mapped host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyOutParams {
    /// The group.
    pub group: Group,
    /// `[T, H]` of the slot's `out_dtype`; 0: copy engines read the results.
    pub out: u64,
    /// i32 `[T, k]`.
    pub topk_ids: u64,
    /// f32 `[T, k]`.
    pub topk_weights: u64,
    /// Row places `[T]`, which copy_in wrote.
    pub places: u64,
    /// u32: number of assignments.
    pub assignments: u64,
    /// Out: i32 `[T, k]`, the ids that were used.
    pub staged_ids: u64,
    /// Out: f32 `[T, k]`, the weights that were used.
    pub staged_weights: u64,
    /// Out: [`Completion`](super::Completion).
    pub completion: u64,
    /// Out: u64 in mapped memory, the number of the step before its words are raised.
    pub raised: u64,
    /// From dispatch, or 0: rows are not counted.
    pub expert_offsets: u64,
    /// Out: u64 `[layers, count_stride]`, rows of each expert since the service started.
    pub row_counts: u64,
    /// Out: the same table in mapped memory.
    pub row_counts_host: u64,
    /// u32 `[layers, local_experts]`, expert of each local one by a placement; or 0: [`first_expert`](Self::first_expert) and on.
    pub local_ids: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Index in its layer of the first local expert.
    pub first_expert: u32,
    /// Number of local physical experts.
    pub local_experts: u32,
    /// Number of experts that a layer has room for in the tables.
    pub count_stride: u32,
    /// Elements of a row of segments with [`NARROW_ROWS`](super::NARROW_ROWS).
    pub row_elements: u32,
    /// Padding.
    pub reserved: u32,
}

/// See `SharedParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedParams {
    /// [`SlotState`](super::SlotState).
    pub state: u64,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// `[layers]`: address of bf16 `[H]`, or 0.
    pub gates: u64,
    /// Out: u32 `[2]`.
    pub expert_offsets: u64,
    /// Out: u32 `[T]`.
    pub row_index: u64,
    /// Out: f32 `[T]`.
    pub row_weight: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
}

// `step.h` asserts the same sizes; `header.rs` compares every field.
const _: () = {
    assert!(size_of::<CopyInParams>() == 136);
    assert!(size_of::<CopyOutParams>() == 336);
    assert!(size_of::<SharedParams>() == 56);
};
