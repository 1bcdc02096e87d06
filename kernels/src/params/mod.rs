//! Parameter structs of the kernels, which mirror `step.h` field by field. Pointers are `u64` device addresses, or device
//! addresses of mapped host memory where the field's documentation says so: the host never dereferences them.

mod copy;
mod exchange;
mod fault;
mod gate;

pub use copy::{CopyInParams, CopyOutParams, SharedParams};
pub use exchange::{AWAY, CombineParams, DispatchParams, ScaleParams, TierParams, fp8_row_bytes};
pub use fault::{DeviceFault, OTHER_PROCESSES, Phase};
pub use gate::{GateLayer, GateParams};

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
/// Largest number of completion words that one step raises.
pub const MAX_RAISES: usize = 4;
/// Number of timed phases, in the order of [`Phase`].
pub const PHASES: usize = 7;

/// A call of a CUDA session that is complete when the step has ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Raise {
    /// u32 in mapped memory: the completion word, which becomes 1.
    pub word: u64,
    /// u64 in mapped memory, which gets the call's number before.
    pub number: u64,
    /// Number of the call.
    pub call: u64,
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
    /// State of the barrier between a rank's own blocks: number of passes, and in the low 16 bits the blocks that wait.
    pub epoch: u32,
    /// Sequence of the next combine.
    pub exchange: u64,
    /// Begin of each phase by the device's clock, in nanoseconds.
    pub begin_ns: [u64; PHASES],
    /// End of each phase by the device's clock, in nanoseconds.
    pub end_ns: [u64; PHASES],
    /// Number of entries of `raise`.
    pub raises: u32,
    /// 1 if combine stores results at their places.
    pub direct: u32,
    /// The words that are raised when the step has ended.
    pub raise: [Raise; MAX_RAISES],
    /// What copy_in tells the gate ahead of the rows; see `announcement` in `common.cuh`.
    pub announced: u64,
    /// Padding: the size is a multiple of 16.
    pub reserved: u64,
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
    /// Number of entries of `raise`; 0 at ranks other than rank 0.
    pub raises: u32,
    /// 1 if combine stores results at their places. All rows then have the element type `out_dtype`.
    pub direct: u32,
    /// Padding.
    pub reserved: [u32; 3],
    /// The words that are raised when the step has ended.
    pub raise: [Raise; MAX_RAISES],
}

/// Consecutive rows in staging or in an attached memory. Each row of a step belongs to one segment. The table is in mapped memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment {
    /// Offset of the rows in staging in bytes, or their address in an attached memory; a multiple of 16.
    pub byte_offset: u64,
    /// Address of the results in an attached memory, a multiple of 16; results of staged rows overwrite them.
    pub output_offset: u64,
    /// Index of the first row in the step.
    pub first_row: u32,
    /// Number of rows.
    pub rows: u32,
    /// Element type of the rows.
    pub dtype: u32,
    /// Bit set: 1 for given routing, 2 for shared experts in the output, [`NARROW_ROWS`].
    pub flags: u32,
    /// 0 for rows in staging.
    pub memory: u32,
    /// Padding.
    pub reserved: u32,
}

/// Flag of a segment whose rows in memory have `row_elements` elements, fewer than the kernels' rows. Its offsets are multiples of the
/// element size.
pub const NARROW_ROWS: u32 = 4;

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
    /// Table of [`CopyTables::copies`](crate::copies::CopyTables::copies), or 0: no placement.
    pub copies: u64,
    /// This rank.
    pub rank: u32,
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Elements of a row, a multiple of 8.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Number of physical experts; without a placement that of the layer's routed experts.
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

// `step.h` asserts the same sizes; `header.rs` compares every field.
const _: () = {
    assert!(size_of::<SlotState>() == 288);
    assert!(size_of::<StepRequest>() == 144);
    assert!(size_of::<Completion>() == 136);
    assert!(size_of::<Group>() == 200);
    assert!(size_of::<Segment>() == 40);
};
