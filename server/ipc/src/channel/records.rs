//! Records of the rings, and entries of a slot's segment table.

use bytemuck::{Pod, Zeroable};

use expertd_types::Phase;

/// One rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StepDescriptor {
    /// Number of the exchange: the same for all ranks, one more than that of the step before.
    pub sequence: u64,
    /// Number of the step, for logs.
    pub step: u64,
    /// Decoder layer.
    pub layer: u32,
    /// Slot whose buffers hold the step.
    pub slot: u32,
    /// Number of this rank's rows.
    pub tokens: u32,
    /// Number of entries in the slot's segment table.
    pub segments: u32,
    /// Number of rows of all ranks together.
    pub step_tokens: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Number of entries in the slot's table of words to raise; 0 for ranks other than rank 0.
    pub raises: u32,
    /// Zero.
    pub reserved: u32,
}

/// A call of a CUDA session all of whose rows are in one step. Rank 0 raises its completion word when every rank has written its
/// results.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Raise {
    /// [`MemoryId`](expertd_types::MemoryId) of the session's memory.
    pub memory: u32,
    /// Offset of the completion word, u32, in the session's control region, in bytes.
    pub word: u32,
    /// Offset of the word, u64, that gets the call's number before, in bytes.
    pub number: u32,
    /// Zero.
    pub reserved: u32,
    /// Number of the call.
    pub call: u64,
}

/// Largest number of completion words that the ranks raise at the end of one step.
pub const MAX_RAISES: usize = 4;

/// Consecutive rows of one request within one rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Offset of the rows in the slot's row area, or in `memory`, in bytes.
    pub byte_offset: u64,
    /// Offset of the answer in `memory`, in bytes. The answer of staged rows overwrites them; this is 0 for them.
    pub output_offset: u64,
    /// Index of the first row among the rank's rows of the step.
    pub first_row: u32,
    /// Number of rows.
    pub rows: u32,
    /// [`DType`](expertd_types::DType) code.
    pub dtype: u32,
    /// Bit set of [`Segment::GIVEN_ROUTING`] and [`Segment::SHARED_EXPERTS`].
    pub flags: u32,
    /// [`MemoryId`](expertd_types::MemoryId) of the attached memory that holds the rows; [`Segment::STAGING`] for staged rows.
    pub memory: u32,
    /// Zero.
    pub reserved: u32,
}

impl Segment {
    /// The value of `memory` for rows in staging.
    pub const STAGING: u32 = 0;
    /// Staging holds expert ids and weights; without this flag the gate chooses.
    pub const GIVEN_ROUTING: u32 = 1;
    /// The output includes the shared experts.
    pub const SHARED_EXPERTS: u32 = 2;

    /// Whether a flag is set.
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// How one rank's part of a step ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Completion {
    /// The descriptor's sequence.
    pub sequence: u64,
    /// Duration of each of [`Phase::ALL`], in nanoseconds.
    pub phase_ns: [u64; Phase::ALL.len()],
    /// The descriptor's slot.
    pub slot: u32,
    /// 0 if staging holds the answer; otherwise the step failed, and `message` holds the reason.
    pub failed: u32,
    /// Number of rows that this rank's experts received from all ranks.
    pub received_rows: u32,
    /// Number of pairs of row and expert that this rank computed.
    pub expert_rows: u32,
    /// Bytes of weights that were copied from host memory to this rank's device for the step, or since the step before.
    pub copied_bytes: u64,
    /// Version of the table of expert slots with which the step was launched; 0 without slots.
    pub slot_version: u64,
    /// Number of bytes of `message` in use.
    pub message_len: u64,
    /// Reason of a failure, in UTF-8.
    pub message: [u8; 160],
}

impl Completion {
    /// Sum of all phases except the copies between the host's memory and the rank's own, in nanoseconds.
    pub fn computed_ns(&self) -> u64 {
        let phases = Phase::ALL.into_iter().zip(self.phase_ns);
        // Saturating: a faulty rank may report any durations.
        phases.filter(|(phase, _)| !phase.is_copy()).fold(0, |sum: u64, (_, ns)| sum.saturating_add(ns))
    }

    /// The message of a failed step.
    pub fn text(&self) -> String {
        let len = usize::try_from(self.message_len).unwrap_or(usize::MAX).min(self.message.len());
        String::from_utf8_lossy(&self.message[..len]).into_owned()
    }

    /// Marks the step as failed because of `message`, which is cut to the space available.
    pub fn fail(&mut self, message: &str) {
        let cut = message.char_indices().map(|(at, c)| at + c.len_utf8());
        let len = cut.take_while(|&end| end <= self.message.len()).last().unwrap_or(0);
        self.failed = 1;
        self.message_len = len as u64;
        self.message[..len].copy_from_slice(&message.as_bytes()[..len]);
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    #[test]
    fn computed_time_excludes_copies() {
        let mut completion = Completion::zeroed();
        completion.phase_ns = [1000, 1, 2, 3, 4, 5, 2000];
        assert_eq!(completion.computed_ns(), 15);
    }
}
