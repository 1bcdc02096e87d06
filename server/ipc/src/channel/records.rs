//! What travels through the rings, and the segment table of a slot.

use bytemuck::{Pod, Zeroable};

use expertd_types::Phase;

/// One rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StepDescriptor {
    /// Number of the exchange: the same for all ranks, one more than the last step's.
    pub sequence: u64,
    /// Number of the step, for logs.
    pub step: u64,
    /// Decoder layer.
    pub layer: u32,
    /// Step buffers.
    pub slot: u32,
    /// This rank's rows.
    pub tokens: u32,
    /// Entries of the slot's segment table.
    pub segments: u32,
    /// Rows of all ranks together.
    pub step_tokens: u32,
    /// Experts per token.
    pub top_k: u32,
}

/// A run of rows of one request within one rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Where the rows begin in the slot's row area, in bytes.
    pub byte_offset: u64,
    /// First row, counted over the rank's rows of the step.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
    /// [`DType`](expertd_types::DType) code.
    pub dtype: u32,
    /// [`Segment::GIVEN_ROUTING`] and others.
    pub flags: u32,
}

impl Segment {
    /// Ids and weights stand in staging; otherwise the gate chooses.
    pub const GIVEN_ROUTING: u32 = 1;
    /// Shared experts are part of the output.
    pub const SHARED_EXPERTS: u32 = 2;

    /// Whether a flag is set.
    #[must_use]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// How one rank's part of a step ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Completion {
    /// The descriptor's.
    pub sequence: u64,
    /// Duration of each of [`Phase::ALL`].
    pub phase_ns: [u64; Phase::ALL.len()],
    /// The descriptor's.
    pub slot: u32,
    /// 0: the answer stands in staging. Else the step failed, and `message` says why.
    pub failed: u32,
    /// Rows that this rank's experts received from all ranks.
    pub received_rows: u32,
    /// Pairs of row and expert that it computed.
    pub expert_rows: u32,
    /// Bytes of `message` in use.
    pub message_len: u64,
    /// UTF-8.
    pub message: [u8; 168],
}

impl Completion {
    /// All phases but the copies between the host's memory and the rank's own, one after the other.
    #[must_use]
    pub fn computed_ns(&self) -> u64 {
        let phases = Phase::ALL.into_iter().zip(self.phase_ns);
        phases.filter(|(phase, _)| !phase.is_copy()).map(|(_, ns)| ns).sum()
    }

    /// The message of a failed step.
    #[must_use]
    pub fn text(&self) -> String {
        let len = usize::try_from(self.message_len).unwrap_or(usize::MAX).min(self.message.len());
        String::from_utf8_lossy(&self.message[..len]).into_owned()
    }

    /// Marks the step as failed because of `message`, cut to what fits.
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
    fn what_a_rank_computed_is_everything_but_copies() {
        let mut completion = Completion::zeroed();
        completion.phase_ns = [1000, 1, 2, 3, 4, 5, 2000];
        assert_eq!(completion.computed_ns(), 15);
    }
}
