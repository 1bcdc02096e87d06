//! States of a slot, and errors of an exchange.

use std::fmt;
use std::time::Duration;

use super::super::window::SEQUENCE_BITS;
use expertd_types::{Generation, Rank, Sequence, Slot};

/// Progress of a slot's exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// No exchange is in flight.
    Idle,
    /// The exchange has begun: this rank may write what it dispatches.
    Open,
    /// Dispatch flags are released.
    Sent,
    /// Every peer's dispatch has arrived: received rows may be read, partials written.
    Ready,
    /// Combine flags are released: received rows have been consumed.
    Returning,
    /// Every peer's partials have arrived and may be read.
    Returned,
}

/// Why an exchange failed. All errors but [`State`](Self::State) and [`Slot`](Self::Slot) end the group: the other ranks are
/// notified, and later calls return [`Ended`](Self::Ended).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ExchangeError {
    #[error("slot {slot} is {found:?}, but the call requires {expected:?}")]
    State { slot: Slot, expected: SlotState, found: SlotState },
    #[error("slot {slot} is not one of {slots} slots")]
    Slot { slot: Slot, slots: usize },
    #[error("{phase} of exchange {sequence} waited {waited:?} for rank(s) {}", list(.peers))]
    Missing { phase: &'static str, sequence: Sequence, peers: Vec<Rank>, waited: Duration },
    #[error("rank {rank} {cause}")]
    Fault { rank: Rank, cause: FaultCause },
    /// A peer is at a later exchange: the ranks did not run the same steps.
    #[error(
        "{phase} of exchange {expected}: rank {peer} is at exchange {found} already; ranks must run the same steps"
    )]
    Ahead { phase: &'static str, peer: Rank, expected: Sequence, found: Sequence },
    #[error(
        "rank {peer} announces {rows} rows with k = {k}; this step has k = {expected_k} and at most {max_rows} rows"
    )]
    Head { peer: Rank, rows: u32, k: u32, expected_k: u32, max_rows: usize },
    #[error("the generation has used all of its 2^40 sequences; a new generation is needed")]
    Exhausted,
    #[error("the group has ended after an earlier fault")]
    Ended,
}

/// The fault that a rank reports through the error word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultCause {
    /// The reporting rank failed, or left with an exchange in flight.
    Failed,
    /// The reporting rank's wait for this peer (the first of several missing ones) timed out.
    Missed(Rank),
}

impl fmt::Display for FaultCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed => f.write_str("failed or left during an exchange"),
            Self::Missed(rank) => write!(f, "timed out while waiting for rank {rank}"),
        }
    }
}

fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}

/// The error word of a fault: `generation << 40 | (missed rank + 1) << 20 | rank + 1`, which is never zero.
pub(super) fn encode_fault(generation: Generation, rank: Rank, cause: FaultCause) -> u64 {
    let missed = match cause {
        FaultCause::Failed => 0,
        FaultCause::Missed(peer) => u64::from(peer.0) + 1,
    };
    generation.0 << SEQUENCE_BITS | missed << 20 | (u64::from(rank.0) + 1)
}

pub(super) fn decode_fault(generation: Generation, word: u64) -> Option<(Rank, FaultCause)> {
    let rank = (word & 0xf_ffff) as u32;
    if word >> SEQUENCE_BITS != generation.0 || rank == 0 {
        return None;
    }
    let cause = match (word >> 20 & 0xf_ffff) as u32 {
        0 => FaultCause::Failed,
        missed => FaultCause::Missed(Rank(missed - 1)),
    };
    Some((Rank(rank - 1), cause))
}
