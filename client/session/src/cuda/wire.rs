//! Frames of CUDA sessions, and the layout of their control region.

use bytemuck::{Pod, Zeroable};
use expertd_shm::region::{LINE, Layout, RegionError};

use crate::wire::{ALIGN, CompletionRecord, RequestRecord};

/// Kind of a session whose rows lie in the memory of the client's GPU.
pub const KIND_CUDA: u32 = 2;
/// Largest number of doorbells of one session.
pub const MAX_DOORBELLS: u32 = 64;
/// Largest number of prepared calls of one session: their numbers have 16 bits in a [`Ring`].
pub const MAX_PREPARED: usize = 1 << 16;
/// Largest number of rows of a call, which has 16 bits in a [`Ring`].
pub const MAX_ROWS: u32 = 0xffff;
/// Largest payload of a [`PREPARE`](crate::wire::frame::PREPARE) frame, in bytes.
pub const MAX_PREPARE_FRAME: usize = 1024 * size_of::<PreparedCall>();

/// Value of a completion word while the call is in flight.
pub const PENDING: u32 = 0;
/// Value of a completion word: the output is complete.
pub const DONE: u32 = 1;
/// Value of a completion word: the call failed; the doorbell's status says why.
pub const FAILED: u32 = 2;
/// Value of a completion word: the client's own thread released the waiting stream, because the session has ended.
pub const RELEASED: u32 = 3;

/// A client's request to open a CUDA session. The byte after the frame carries the descriptor of its memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct OpenCuda {
    /// [`VERSION`](crate::wire::VERSION) of the client.
    pub version: u32,
    /// [`KIND_CUDA`].
    pub kind: u32,
    /// Size of the memory, in bytes: a multiple of the allocation's granularity.
    pub memory_bytes: u64,
    /// Number of doorbells, 1 to [`MAX_DOORBELLS`].
    pub doorbells: u32,
    /// Size of each doorbell's routing area, in bytes; 0 if no call carries routing or token ids.
    pub routing_bytes: u32,
    /// UUID of the GPU that has the memory.
    pub device: [u8; 16],
}

/// The session that the service made.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct OpenedCuda {
    /// [`VERSION`](crate::wire::VERSION) of the service.
    pub version: u32,
    /// [`KIND_CUDA`].
    pub kind: u32,
    /// Number of the session, as logs of the service name it.
    pub session: u64,
    /// Size of the control region, in bytes.
    pub region_bytes: u64,
    /// Offset of the first doorbell; each one is on a cache line of its own.
    pub doorbells_offset: u64,
    /// Offset of the first doorbell's routing area; `routing_bytes` bytes for each.
    pub routing_offset: u64,
    /// Offset of the first doorbell's status; [`STATUS_STRIDE`] bytes for each.
    pub statuses_offset: u64,
    /// Number of doorbells.
    pub doorbells: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Size of each doorbell's routing area, in bytes: what the client asked for, rounded up to [`ALIGN`].
    pub routing_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

/// A call that is described once and started by its number. Places are offsets into the client's memory, in bytes, and multiples
/// of [`ALIGN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PreparedCall {
    /// Decoder layer.
    pub layer: u32,
    /// Element type: 1 bf16, 2 f16, 3 f32.
    pub dtype: u32,
    /// Largest number of rows of a call, at most [`MAX_ROWS`].
    pub max_rows: u32,
    /// Flags of a [`RequestRecord`]. Ids, weights and token ids are in the doorbell's routing area ([`RoutingLayout`]).
    pub flags: u32,
    /// Place of the rows, `[max_rows, hidden]`.
    pub rows: u64,
    /// Place for the output rows, `[max_rows, hidden]`. It must not overlap `rows`.
    pub output: u64,
    /// Deadline of a call in microseconds from the time at which the service takes it; 0 for none.
    pub timeout_us: u64,
    /// The weight version that must be loaded, with its flag.
    pub weight_version: u64,
    /// Experts per token of given or returned routing; otherwise 0 for the layer's own.
    pub k: u32,
    /// Zero.
    pub reserved: u32,
}

/// Offsets in a doorbell's routing area of what a call of `rows` rows carries, in bytes. Parts that it does not carry are empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoutingLayout {
    /// Size of the ids, i32 `[rows, k]` at offset 0, and of the weights, f32 `[rows, k]`.
    pub routing_bytes: usize,
    /// Offset of the weights.
    pub weights: usize,
    /// Size of the token ids, i32 `[rows]`.
    pub token_bytes: usize,
    /// Offset of the token ids.
    pub token_ids: usize,
    /// Size of everything.
    pub bytes: usize,
}

impl RoutingLayout {
    /// The layout for a call with these flags. All numbers come from a client and may be too large: sizes saturate.
    #[must_use]
    pub fn new(flags: u32, rows: u32, k: u32) -> Self {
        let has = |flag| flags & flag != 0;
        let size = |present: bool, words: usize| if present { words.saturating_mul(4) } else { 0 };
        let after = |bytes: usize| bytes.checked_next_multiple_of(ALIGN).unwrap_or(usize::MAX);
        let routed = has(RequestRecord::GIVEN_ROUTING | RequestRecord::RETURN_ROUTING);
        let routing_bytes = size(routed, (rows as usize).saturating_mul(k as usize));
        let weights = after(routing_bytes);
        let token_bytes = size(has(RequestRecord::TOKEN_IDS), rows as usize);
        let token_ids = weights.saturating_mul(2);
        let bytes = token_ids.saturating_add(after(token_bytes));
        RoutingLayout { routing_bytes, weights, token_bytes, token_ids, bytes }
    }
}

/// Answer to [`PREPARE`](crate::wire::frame::PREPARE). A refused frame prepares no call.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct PrepareReply {
    /// Number of the first call; the others follow.
    pub first: u32,
    /// Number of calls; 0 if they are refused, and a sentence follows.
    pub count: u32,
}

/// How a client starts a call: the upper half of the doorbell's 64-bit word, never zero. The lower half is the completion word, which the
/// same store clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Number of the prepared call, below [`MAX_PREPARED`].
    pub prepared: u32,
    /// Number of rows, 1 to the prepared largest number.
    pub rows: u32,
}

impl Ring {
    /// What the client stores to the doorbell: the ring and [`PENDING`].
    #[must_use]
    pub const fn to_word(self) -> u64 {
        ((self.prepared << 16 | self.rows) as u64) << 32 | PENDING as u64
    }

    /// The ring in the upper half of a doorbell. Its fields are not checked: the client may have stored any number.
    #[must_use]
    pub const fn from_half(half: u32) -> Self {
        Ring { prepared: half >> 16, rows: half & MAX_ROWS }
    }
}

/// The status of a doorbell's calls. The service writes it before it raises completion words; if a rank has raised them, shortly after.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct StatusRecord {
    /// Twice the number of changes, plus one while the service writes.
    pub stamp: u64,
    /// Number of calls that ended.
    pub calls: u64,
    /// Number of calls that failed.
    pub failures: u64,
    /// Number of answered calls whose weight version is another one than that of the answered call before.
    pub moves: u32,
    /// The lower half of the last answered call's weight version.
    pub moved_to: u32,
    /// The last call; its number counts the session's calls.
    pub last: CompletionRecord,
    /// The last call that failed.
    pub last_failure: CompletionRecord,
}

/// Bytes between the statuses of doorbells.
pub const STATUS_STRIDE: usize = size_of::<StatusRecord>().next_multiple_of(LINE);

/// Offsets of everything in a control region.
#[derive(Clone, Copy, Debug)]
pub struct ControlLayout {
    /// The doorbells.
    pub doorbells: usize,
    /// The routing areas.
    pub routing: usize,
    /// Size of one routing area, in bytes: a multiple of [`ALIGN`].
    pub routing_bytes: usize,
    /// The statuses.
    pub statuses: usize,
    /// Size of the region, in bytes.
    pub bytes: usize,
}

impl ControlLayout {
    /// The layout for a number of doorbells with routing areas of at least `routing_bytes` bytes.
    ///
    /// # Errors
    /// If the sizes exceed the address space.
    pub fn new(doorbells: u32, routing_bytes: u32) -> Result<Self, RegionError> {
        let mut layout = Layout::new();
        let routing_bytes = (routing_bytes as usize).next_multiple_of(ALIGN);
        Ok(ControlLayout {
            doorbells: layout.page(doorbells as usize * LINE)?,
            routing: layout.page(doorbells as usize * routing_bytes)?,
            routing_bytes,
            statuses: layout.page(doorbells as usize * STATUS_STRIDE)?,
            bytes: layout.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The sizes are part of the protocol: a change must change this test, the page and the version.
    #[test]
    fn sizes_are_pinned() {
        assert_eq!(size_of::<OpenCuda>(), 40);
        assert_eq!(size_of::<OpenedCuda>(), 64);
        assert_eq!(size_of::<PreparedCall>(), 56);
        assert_eq!(size_of::<PrepareReply>(), 8);
        assert_eq!(size_of::<StatusRecord>(), 848);
        let layout = ControlLayout::new(4, 0).unwrap();
        assert_eq!((layout.doorbells, layout.routing, layout.statuses, layout.bytes), (0, 4096, 4096, 8192));
        let layout = ControlLayout::new(4, 1025).unwrap();
        assert_eq!((layout.routing, layout.routing_bytes, layout.statuses), (4096, 1088, 12288));
    }

    #[test]
    fn a_call_carries_what_its_flags_say() {
        let given = RoutingLayout::new(RequestRecord::GIVEN_ROUTING | RequestRecord::TOKEN_IDS, 5, 4);
        let wanted =
            RoutingLayout { routing_bytes: 80, weights: 128, token_bytes: 20, token_ids: 256, bytes: 320 };
        assert_eq!(given, wanted);
        assert_eq!(RoutingLayout::new(RequestRecord::RETURN_ROUTING, 5, 4).bytes, 256);
        assert_eq!(RoutingLayout::new(RequestRecord::TOKEN_IDS, 5, 4).token_ids, 0);
        assert_eq!(RoutingLayout::new(RequestRecord::EXCLUDE_SHARED, 5, 4).bytes, 0);
        assert!(RoutingLayout::new(u32::MAX, u32::MAX, u32::MAX).bytes > usize::MAX / 2);
    }

    #[test]
    fn a_ring_is_one_word() {
        let ring = Ring { prepared: 7, rows: 2048 };
        assert_eq!(ring.to_word(), 0x7_0800_0000_0000);
        assert_eq!(Ring::from_half((ring.to_word() >> 32) as u32), ring);
    }
}
