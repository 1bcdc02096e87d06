//! Parameter structs of the kernels, field by field as in `step.h`. Pointers are device addresses (or addresses of
//! mapped host memory, where said so) and are carried as `u64`: the host never follows them.

use crate::layout::WindowLayout;

/// Most ranks of one EP group.
pub const MAX_RANKS: usize = 8;
/// Most choices per token.
pub const MAX_TOP_K: usize = 32;
/// Most blocks of a dispatch or combine launch, per rank.
pub const MAX_BLOCKS: usize = 128;
/// Most parts that a block of combine flags on their own.
pub const MAX_CHUNKS: usize = 16;
/// Most experts that the gate chooses from.
pub const MAX_EXPERTS: usize = 512;
/// Number of timed phases, in the order of [`Phase`].
pub const PHASES: usize = 7;

/// A timed phase of a step, as in `SlotState` and [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// Host staging to device memory.
    CopyIn = 0,
    /// Scores and choice.
    Gate = 1,
    /// Rows listed per expert.
    Prepare = 2,
    /// Rows pushed and arrived.
    Dispatch = 3,
    /// Expert MLPs.
    Experts = 4,
    /// Partials pushed, arrived and reduced.
    Combine = 5,
    /// Device memory to host staging.
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

/// What the device reports in its error word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceFault {
    /// A peer's flag did not come before the deadline.
    #[error("rank {peer} did not answer in time in phase {phase:?}")]
    Timeout {
        /// The silent rank.
        peer: u32,
        /// Where it was waited for.
        phase: Phase,
    },
    /// A count or id that cannot be.
    #[error("an impossible count or id came from {peer:#x} in phase {phase:?}")]
    BadCount {
        /// The rank it came from; 0xff is the host's request, 0xfe its ids.
        peer: u32,
        /// Where it was seen.
        phase: Phase,
    },
    /// The experts kernel met more assignments than its workspace holds.
    #[error("the experts' workspace is too small for this step's assignments")]
    Workspace,
    /// A code that is not known here.
    #[error("unknown device fault {0:#010x}")]
    Unknown(u32),
}

impl DeviceFault {
    /// Reads the error word; `None` when all is well.
    #[must_use]
    pub fn decode(word: u32) -> Option<DeviceFault> {
        let peer = word >> 8 & 0xff;
        match (word, word & 0xff, Phase::from_code(word >> 16)) {
            (0, ..) => None,
            (0x4558_0001, ..) => Some(DeviceFault::Workspace),
            (_, 1, Some(phase)) => Some(DeviceFault::Timeout { peer, phase }),
            (_, 2, Some(phase)) => Some(DeviceFault::BadCount { peer, phase }),
            _ => Some(DeviceFault::Unknown(word)),
        }
    }
}

/// State of one slot, in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotState {
    /// Number of the next dispatch; starts at 1.
    pub sequence: u64,
    /// See [`DeviceFault::decode`].
    pub error: u32,
    /// Rows of this rank in this step.
    pub tokens: u32,
    /// Index into device tables.
    pub layer: u32,
    /// 1 when all rows brought their routing.
    pub given_routing: u32,
    /// Rows that arrived for local experts.
    pub received: u32,
    /// Element type of combine's rows (codes of the wire's dtypes).
    pub out_dtype: u32,
    /// The step's number.
    pub step: u64,
    /// Blocks done in the running kernel.
    pub ticket: u32,
    /// Passes of the barrier between a rank's own blocks.
    pub epoch: u32,
    /// Number of the next combine.
    pub exchange: u64,
    /// Nanoseconds of the device's clock, by phase.
    pub begin_ns: [u64; PHASES],
    /// Nanoseconds of the device's clock, by phase.
    pub end_ns: [u64; PHASES],
}

/// A step as the host describes it, in mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct StepRequest {
    /// The step's number, handed back in [`Completion::step`].
    pub step: u64,
    /// Rows of this rank.
    pub tokens: u32,
    /// Index into device tables.
    pub layer: u32,
    /// 1 when all rows bring their routing.
    pub given_routing: u32,
    /// Element type of result rows in device memory.
    pub out_dtype: u32,
    /// Entries of the segment table.
    pub segments: u32,
    /// Padding.
    pub reserved: u32,
}

/// A run of rows in staging, in mapped memory. All rows of a step belong to one.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// Where its rows begin, a multiple of 16.
    pub byte_offset: u64,
    /// First row of the step.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
    /// Element type.
    pub dtype: u32,
    /// 1: brings its routing; 2: wants the shared experts.
    pub flags: u32,
}

/// Bytes of a row's place in device memory (`RowPlace` in `step.h`).
pub const ROW_PLACE_BYTES: usize = 16;

/// What a finished step tells the host, in mapped memory. `step` is stored last: read it with acquire.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Completion {
    /// Number of the finished step.
    pub step: u64,
    /// See [`DeviceFault::decode`].
    pub error: u32,
    /// Rows that arrived for local experts.
    pub received: u32,
    /// Pairs of row and local expert.
    pub assignments: u32,
    /// Padding.
    pub reserved: u32,
    /// Nanoseconds of the device's clock, by phase.
    pub begin_ns: [u64; PHASES],
    /// Nanoseconds of the device's clock, by phase.
    pub end_ns: [u64; PHASES],
}

/// One rank's view of the group and of one slot's window.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// This slot's region at every rank.
    pub windows: [u64; MAX_RANKS],
    /// [`SlotState`].
    pub state: u64,
    /// `generation << 40`.
    pub generation: u64,
    /// Of each wait.
    pub deadline_ns: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks of the group.
    pub ranks: u32,
    /// Elements of a row, a multiple of 8.
    pub hidden: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Routed experts of the layer.
    pub experts: u32,
    /// Rows per rank, at most.
    pub max_tokens: u32,
    /// For tests: longest random delay of a block before it sends.
    pub delay_ns: u32,
    /// Pieces of rows that a block of combine sends before it flags them, at least; 0: the kernel's default. The same on
    /// every rank.
    pub chunk: u32,
    /// Where things stand in a window region.
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
    /// Out: u32 `[N, max_tokens, k]`, place of each local choice among the assignments.
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
    /// Which rows want it, from copy_in; 0: all.
    pub places: u64,
    /// Out: `[T, H]` of the slot's `out_dtype`.
    pub out: u64,
    /// u64 in mapped memory that gets the step's number when its experts have ended; or 0.
    pub experts_done: u64,
}

/// See `ScaleParams` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ScaleParams {
    /// The group.
    pub group: Group,
    /// bf16 rows, where experts read them.
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
    /// f32 `[E]`, or 0.
    pub logit_bias: u64,
    /// f32 `[E]`, or 0.
    pub correction_bias: u64,
    /// i32 `[vocab, k]`, or 0.
    pub token_table: u64,
}

/// The gate of a shape of layers. Codes as in `step.h`; the fields follow the project's gate description.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GateParams {
    /// [`SlotState`].
    pub state: u64,
    /// Table of [`GateLayer`].
    pub layers: u64,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// i32 `[T]`, or 0.
    pub token_ids: u64,
    /// Scratch: f32 `[max_tokens, E]`.
    pub logits: u64,
    /// Scratch: u32, one per tile of 16 tokens, zero before the first step.
    pub tickets: u64,
    /// Which rows brought their routing, from copy_in; 0: none.
    pub places: u64,
    /// Out: i32 `[T, k]`.
    pub topk_ids: u64,
    /// Out: f32 `[T, k]`.
    pub topk_weights: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Routed experts.
    pub experts: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Rows, at most.
    pub max_tokens: u32,
    /// 0 softmax, 1 softmax of the chosen, 2 sigmoid, 3 square root of softplus, 4 sparse mixer.
    pub score_fn: u32,
    /// 0 by scores, 1 by logits, 2 by token ids.
    pub choice: u32,
    /// 0 no groups, 1 by largest value, 2 by the sum of the two largest.
    pub group_score: u32,
    /// Number of groups.
    pub groups: u32,
    /// Groups that stay.
    pub groups_kept: u32,
    /// 0 no, 1 by sum + epsilon, 2 by max(sum, epsilon).
    pub normalise: u32,
    /// For `normalise`.
    pub epsilon: f32,
    /// Multiplier of the weights.
    pub scale: f32,
    /// Of the sparse mixer.
    pub jitter: f32,
    /// Rows of the token table.
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
    /// Out: i32 `[T, k]`.
    pub topk_ids: u64,
    /// Out: f32 `[T, k]`.
    pub topk_weights: u64,
    /// Out: i32 `[T]`.
    pub token_ids: u64,
    /// Out: row places `[T]`.
    pub places: u64,
    /// Bytes of `staged_rows`.
    pub staged_bytes: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Rows, at most.
    pub max_tokens: u32,
    /// Routed experts.
    pub experts: u32,
    /// Entries that may be read at `segments`.
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
    /// Rows for the host.
    pub staged_rows: u64,
    /// The routing that was used.
    pub staged_ids: u64,
    /// Its weights.
    pub staged_weights: u64,
    /// [`Completion`].
    pub completion: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Choices per token.
    pub top_k: u32,
    /// Rows, at most.
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
    /// Per layer an address of bf16 `[H]`, or 0.
    pub gates: u64,
    /// Out: u32 `[2]`.
    pub expert_offsets: u64,
    /// Out: u32 `[T]`.
    pub row_index: u64,
    /// Out: f32 `[T]`.
    pub row_weight: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Rows, at most.
    pub max_tokens: u32,
}

// The C++ side asserts the same numbers.
const _: () = {
    assert!(size_of::<SlotState>() == 168);
    assert!(size_of::<StepRequest>() == 32);
    assert!(size_of::<Completion>() == 136);
    assert!(size_of::<Group>() == 184);
    assert!(size_of::<DispatchParams>() == 256);
    assert!(size_of::<CombineParams>() == 240);
    assert!(size_of::<ScaleParams>() == 224);
    assert!(size_of::<GateLayer>() == 32);
    assert!(size_of::<GateParams>() == 128);
    assert!(size_of::<CopyInParams>() == 128);
    assert!(size_of::<CopyOutParams>() == 96);
    assert!(size_of::<SharedParams>() == 56);
    assert!(size_of::<Segment>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_words_are_read_back() {
        assert_eq!(DeviceFault::decode(0), None);
        let word = 1 | 3 << 8 | (Phase::Combine as u32) << 16;
        assert_eq!(DeviceFault::decode(word), Some(DeviceFault::Timeout { peer: 3, phase: Phase::Combine }));
        assert_eq!(DeviceFault::decode(2), Some(DeviceFault::BadCount { peer: 0, phase: Phase::CopyIn }));
        assert_eq!(DeviceFault::decode(0x4558_0001), Some(DeviceFault::Workspace));
        assert_eq!(DeviceFault::decode(0x77), Some(DeviceFault::Unknown(0x77)));
    }
}
