//! Parameter structs of the kernels, which mirror `step.h` field by field. Pointers are `u64` device addresses, or device
//! addresses of mapped host memory where the field's documentation says so: the host never dereferences them.

use crate::layout::WindowLayout;

/// Largest number of ranks of an EP group.
pub const MAX_RANKS: usize = 8;
/// Largest number of experts per token.
pub const MAX_TOP_K: usize = 32;
/// Largest number of blocks of a dispatch or combine launch, per rank.
pub const MAX_BLOCKS: usize = 128;
/// Largest number of chunks of a combine block, each of which has its own flag.
pub const MAX_CHUNKS: usize = 16;
/// Largest number of experts that the gate chooses from.
pub const MAX_EXPERTS: usize = 512;
/// Number of timed phases, in the order of [`Phase`].
pub const PHASES: usize = 7;

/// A timed phase of a step, as in `SlotState` and [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Rows are copied from host staging to device memory.
    CopyIn = 0,
    /// Experts are scored and chosen.
    Gate = 1,
    /// Rows are listed by expert.
    Prepare = 2,
    /// Rows are pushed to and awaited from peers.
    Dispatch = 3,
    /// Expert MLPs are computed.
    Experts = 4,
    /// Partials are pushed to and awaited from peers, and reduced.
    Combine = 5,
    /// Rows are copied from device memory to host staging.
    CopyOut = 6,
}

impl Phase {
    fn from_code(code: u32) -> Option<Phase> {
        use Phase::{Combine, CopyIn, CopyOut, Dispatch, Experts, Gate, Prepare};
        [CopyIn, Gate, Prepare, Dispatch, Experts, Combine, CopyOut]
            .into_iter()
            .find(|phase| *phase as u32 == code)
    }
}

/// A fault that the device reports in its error word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFault {
    /// A peer's flag was not set before the deadline.
    #[error("rank {peer} did not answer in time in phase {phase:?}")]
    Timeout {
        /// The rank that was waited for.
        peer: u32,
        /// The phase that waited.
        phase: Phase,
    },
    /// A count or id is out of range.
    #[error("an out-of-range count or id came from {peer:#x} in phase {phase:?}")]
    BadCount {
        /// Rank of origin; 0xff means the host's request, 0xfe its ids.
        peer: u32,
        /// The phase that found it.
        phase: Phase,
    },
    /// A peer's flag shows a later exchange of this generation: ranks do not run the same steps.
    #[error("rank {peer} is at a later exchange in phase {phase:?}; ranks do not run the same steps")]
    Ahead {
        /// The rank that was waited for.
        peer: u32,
        /// The phase that waited.
        phase: Phase,
    },
    /// A block of the experts' kernel waited too long for the others.
    #[error("the experts' kernel waited too long for its own blocks")]
    Stuck,
    /// The step has more assignments than the experts' workspace holds.
    #[error("the experts' workspace is too small for this step's assignments")]
    Workspace,
    /// The error word has an unknown code.
    #[error("unknown device fault {0:#010x}")]
    Unknown(u32),
}

impl DeviceFault {
    /// Decodes the error word; `None` if there is no fault.
    #[must_use]
    pub fn decode(word: u32) -> Option<DeviceFault> {
        let peer = word >> 8 & 0xff;
        match (word, word & 0xff, Phase::from_code(word >> 16)) {
            (0, ..) => None,
            (0x4558_0001, ..) => Some(DeviceFault::Workspace),
            (0x4558_0002, ..) => Some(DeviceFault::Stuck),
            (_, 1, Some(phase)) => Some(DeviceFault::Timeout { peer, phase }),
            (_, 2, Some(phase)) => Some(DeviceFault::BadCount { peer, phase }),
            (_, 3, Some(phase)) => Some(DeviceFault::Ahead { peer, phase }),
            _ => Some(DeviceFault::Unknown(word)),
        }
    }
}

/// State of one slot, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotState {
    /// Sequence of the next dispatch; starts at 1.
    pub sequence: u64,
    /// Error word, see [`DeviceFault::decode`].
    pub error: u32,
    /// Number of this rank's rows in the step.
    pub tokens: u32,
    /// Index of the layer in device tables.
    pub layer: u32,
    /// 1 if all rows have given routing.
    pub given_routing: u32,
    /// Number of rows that arrived for local experts.
    pub received: u32,
    /// Element type of combine's rows, as a wire dtype code.
    pub out_dtype: u32,
    /// Number of the step.
    pub step: u64,
    /// Number of blocks that have finished the running kernel.
    pub ticket: u32,
    /// Number of passes of the barrier between a rank's own blocks.
    pub epoch: u32,
    /// Sequence of the next combine.
    pub exchange: u64,
    /// Begin of each phase by the device's clock, in nanoseconds.
    pub begin_ns: [u64; PHASES],
    /// End of each phase by the device's clock, in nanoseconds.
    pub end_ns: [u64; PHASES],
}

/// The host's description of a step, in mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StepRequest {
    /// Number of the step, returned in [`Completion::step`].
    pub step: u64,
    /// Number of this rank's rows.
    pub tokens: u32,
    /// Index of the layer in device tables.
    pub layer: u32,
    /// 1 if all rows have given routing.
    pub given_routing: u32,
    /// Element type of result rows in device memory.
    pub out_dtype: u32,
    /// Number of entries of the segment table.
    pub segments: u32,
    /// Padding.
    pub reserved: u32,
}

/// Consecutive rows in staging, in mapped memory. Each row of a step belongs to one segment.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// Offset of the rows in staging in bytes, a multiple of 16.
    pub byte_offset: u64,
    /// Index of the first row in the step.
    pub first_row: u32,
    /// Number of rows.
    pub rows: u32,
    /// Element type of the rows.
    pub dtype: u32,
    /// Bit set: 1 for given routing, 2 for shared experts in the output.
    pub flags: u32,
}

/// Size of `RowPlace` in `step.h`, in bytes.
pub const ROW_PLACE_BYTES: usize = 16;

/// Completion record of a step, in mapped memory. The device stores `step` last: the host loads it with acquire ordering.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion {
    /// Number of the finished step.
    pub step: u64,
    /// Error word, see [`DeviceFault::decode`].
    pub error: u32,
    /// Number of rows that arrived for local experts.
    pub received: u32,
    /// Number of pairs of row and local expert.
    pub assignments: u32,
    /// Padding.
    pub reserved: u32,
    /// Begin of each phase by the device's clock, in nanoseconds.
    pub begin_ns: [u64; PHASES],
    /// End of each phase by the device's clock, in nanoseconds.
    pub end_ns: [u64; PHASES],
}

/// One rank's view of the group and of one slot's window.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// Address of this slot's region at each rank.
    pub windows: [u64; MAX_RANKS],
    /// Address of the [`SlotState`].
    pub state: u64,
    /// `generation << 40`.
    pub generation: u64,
    /// Time limit of each wait, in nanoseconds.
    pub deadline_ns: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Elements of a row, a multiple of 8.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Number of routed experts of the layer.
    pub experts: u32,
    /// Largest number of rows per rank.
    pub max_tokens: u32,
    /// For tests: longest random delay of a block before it sends, in nanoseconds.
    pub delay_ns: u32,
    /// Smallest number of row pieces that a combine block sends before it sets their flag, equal on every rank; 0 means the
    /// kernel's default.
    pub chunk: u32,
    /// Offsets in a window region.
    pub layout: WindowLayout,
}

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
    /// 1: rows are quantised as they are sent and take [`fp8_row_bytes`] in the window.
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
    /// bf16 `[T, H]` to be added, or 0.
    pub shared: u64,
    /// Row places from copy_in, whose flags select the rows to which `shared` is added; 0 selects all rows.
    pub places: u64,
    /// Out: `[T, H]` of the slot's `out_dtype`.
    pub out: u64,
    /// Out: u64 in mapped memory, set to the step's number when its experts have ended; or 0.
    pub experts_done: u64,
}

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

/// One layer of the gate's device table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GateLayer {
    /// bf16 `[E, H]`.
    pub weight: u64,
    /// bf16 `[E, H]`: what rounding to bf16 took from weights that are stored in more, or 0: nothing.
    pub weight_low: u64,
    /// f32 `[E]`, or 0.
    pub logit_bias: u64,
    /// f32 `[E]`, or 0.
    pub correction_bias: u64,
    /// i32 `[vocab, k]`, or 0.
    pub token_table: u64,
}

/// The gate of all layers of one shape. Codes are those of `step.h`; fields follow the model's gate specification.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GateParams {
    /// [`SlotState`].
    pub state: u64,
    /// Table of [`GateLayer`].
    pub layers: u64,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// bf16 `[T, H]`: what rounding to bf16 took from rows that came in more, or 0: not known.
    pub tokens_low: u64,
    /// i32 `[T]`, or 0.
    pub token_ids: u64,
    /// Scratch: f32 `[max_tokens, E]`.
    pub logits: u64,
    /// Scratch: u32, one per tile of 16 tokens, zero before the first step.
    pub tickets: u64,
    /// Row places from copy_in, whose flags mark rows with given routing; 0 if no row has any.
    pub places: u64,
    /// Out: i32 `[T, k]`.
    pub topk_ids: u64,
    /// Out: f32 `[T, k]`.
    pub topk_weights: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Number of routed experts.
    pub experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Score function: 0 softmax, 1 softmax of the chosen, 2 sigmoid, 3 square root of softplus, 4 sparse mixer.
    pub score_fn: u32,
    /// Choice of experts: 0 by scores, 1 by logits, 2 by token ids.
    pub choice: u32,
    /// Score of a group: 0 no groups, 1 its largest value, 2 the sum of its two largest values.
    pub group_score: u32,
    /// Number of groups.
    pub groups: u32,
    /// Number of groups from which experts are chosen.
    pub groups_kept: u32,
    /// Normalisation of weights: 0 none, 1 divide by sum + epsilon, 2 divide by max(sum, epsilon).
    pub normalise: u32,
    /// Epsilon of `normalise`.
    pub epsilon: f32,
    /// Factor of the weights.
    pub scale: f32,
    /// Jitter of the sparse mixer.
    pub jitter: f32,
    /// Number of rows of the token table.
    pub vocab: u32,
}

/// See `CopyInParams` in `step.h`. `request`, `segments` and `staged_*` are mapped host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyInParams {
    /// [`SlotState`].
    pub state: u64,
    /// [`StepRequest`].
    pub request: u64,
    /// Table of [`Segment`].
    pub segments: u64,
    /// Row bytes.
    pub staged_rows: u64,
    /// i32 `[T, k]`.
    pub staged_ids: u64,
    /// f32 `[T, k]`.
    pub staged_weights: u64,
    /// i32 `[T]`, or 0.
    pub staged_token_ids: u64,
    /// Out: bf16 `[T, H]`.
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
    /// Padding.
    pub reserved: u32,
}

/// See `CopyOutParams` in `step.h`. `staged_*` and `completion` are mapped host memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CopyOutParams {
    /// [`SlotState`].
    pub state: u64,
    /// `[T, H]` of the slot's `out_dtype`.
    pub out: u64,
    /// i32 `[T, k]`.
    pub topk_ids: u64,
    /// f32 `[T, k]`.
    pub topk_weights: u64,
    /// From copy_in.
    pub places: u64,
    /// u32: number of assignments.
    pub assignments: u64,
    /// Out: result rows.
    pub staged_rows: u64,
    /// Out: i32 `[T, k]`, the ids that were used.
    pub staged_ids: u64,
    /// Out: f32 `[T, k]`, the weights that were used.
    pub staged_weights: u64,
    /// Out: [`Completion`].
    pub completion: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Padding.
    pub reserved: u32,
}

/// See `SharedParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SharedParams {
    /// [`SlotState`].
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
    assert!(size_of::<SlotState>() == 168);
    assert!(size_of::<StepRequest>() == 32);
    assert!(size_of::<Completion>() == 136);
    assert!(size_of::<Group>() == 184);
    assert!(size_of::<DispatchParams>() == 256);
    assert!(size_of::<CombineParams>() == 240);
    assert!(size_of::<ScaleParams>() == 224);
    assert!(size_of::<GateLayer>() == 40);
    assert!(size_of::<GateParams>() == 136);
    assert!(size_of::<CopyInParams>() == 136);
    assert!(size_of::<CopyOutParams>() == 96);
    assert!(size_of::<SharedParams>() == 56);
    assert!(size_of::<Segment>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_words_are_decoded() {
        assert_eq!(DeviceFault::decode(0), None);
        let word = 1 | 3 << 8 | (Phase::Combine as u32) << 16;
        assert_eq!(DeviceFault::decode(word), Some(DeviceFault::Timeout { peer: 3, phase: Phase::Combine }));
        assert_eq!(DeviceFault::decode(2), Some(DeviceFault::BadCount { peer: 0, phase: Phase::CopyIn }));
        assert_eq!(DeviceFault::decode(0x4558_0001), Some(DeviceFault::Workspace));
        assert_eq!(DeviceFault::decode(0x4558_0002), Some(DeviceFault::Stuck));
        let word = 3 | 1 << 8 | (Phase::Dispatch as u32) << 16;
        assert_eq!(DeviceFault::decode(word), Some(DeviceFault::Ahead { peer: 1, phase: Phase::Dispatch }));
        assert_eq!(DeviceFault::decode(0x77), Some(DeviceFault::Unknown(0x77)));
    }
}
