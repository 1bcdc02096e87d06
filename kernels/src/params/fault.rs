//! The phases of a step, and the faults that a device reports.

/// A timed phase of a step, as in `SlotState` and [`Completion`](super::Completion).
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
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum DeviceFault {
    #[error("rank {peer} did not answer in time in phase {phase:?}; {OTHER_PROCESSES}")]
    Timeout { peer: u32, phase: Phase },
    #[error("{} sent a count or id that is out of range (phase {phase:?})", origin(*peer))]
    BadCount {
        /// Rank of origin; 0xff means the host's request, 0xfe its segments or ids.
        peer: u32,
        phase: Phase,
    },
    /// A peer's flag shows a later exchange of this generation: ranks do not run the same steps.
    #[error("rank {peer} is at a later exchange in phase {phase:?}; ranks do not run the same steps")]
    Ahead { peer: u32, phase: Phase },
    /// A block of the experts' kernel waited too long for the others.
    #[error(
        "a block of the experts' kernel waited too long for the other blocks, which must all run at once; {OTHER_PROCESSES}"
    )]
    Stuck,
    /// The step has more assignments than the experts' workspace holds.
    #[error("the experts' workspace is too small for this step's assignments")]
    Workspace,
    #[error("unknown device fault {0:#010x}")]
    Unknown(u32),
}

/// Why a wait may pass its deadline although all ranks work.
pub const OTHER_PROCESSES: &str =
    "if the ranks run, another process may compute on this GPU (nvidia-smi lists them)";

/// Name of the origin of a bad count.
fn origin(peer: u32) -> String {
    match peer {
        0xff => "the router's step request".to_owned(),
        0xfe => "the router's segment table or routing".to_owned(),
        rank => format!("rank {rank}"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_that_passed_its_deadline_names_other_processes() {
        for fault in [DeviceFault::Stuck, DeviceFault::Timeout { peer: 1, phase: Phase::Combine }] {
            let text = fault.to_string();
            assert!(text.contains("another process may compute on this GPU"), "{text}");
        }
    }

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
