//! Errors of an EP group.

use super::config::ConfigError;
use crate::exchange::{AttachError, ExchangeError};
use expertd_rank::StepFault;
use expertd_shm::region::RegionError;

/// Why a call on a group failed. Unless [`is_misuse`](EpError::is_misuse) returns true, the group has ended: its peers have
/// been notified, and the caller can only drop it.
#[derive(Debug, thiserror::Error)]
pub enum EpError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The windows cannot be joined.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The memory of the windows cannot be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The exchange with the peers failed, or a call was out of order.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// An argument exceeds the capacity of the windows.
    #[error("{what} is {found}, expected 1 to {limit}, the group's limit")]
    Limit {
        /// `tokens` or `k`.
        what: &'static str,
        /// Value of the argument.
        found: usize,
        /// Largest value that the group supports.
        limit: usize,
    },
    /// The length of a buffer does not match the call's other arguments.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Name of the buffer.
        what: &'static str,
        /// Expected number of elements.
        expected: usize,
        /// Number of elements.
        found: usize,
    },
    /// A token's expert id is out of range.
    #[error("token {token} chooses expert {id}, but the layer has experts 0 to {last}")]
    Expert {
        /// Index of the token.
        token: usize,
        /// The id.
        id: i32,
        /// The layer's last expert.
        last: i64,
    },
    /// The owner of an expert is not a rank of the group.
    #[error("expert {id} is placed on rank {owner}, but the group has {ranks} ranks")]
    Owner {
        /// The expert.
        id: i32,
        /// The expert's owner.
        owner: u32,
        /// Number of ranks in the group.
        ranks: usize,
    },
}

impl EpError {
    /// Whether the error is a caller's mistake that left the group unchanged.
    #[must_use]
    pub fn is_misuse(&self) -> bool {
        match self {
            Self::Exchange(e) => matches!(e, ExchangeError::State { .. } | ExchangeError::Slot { .. }),
            Self::Limit { .. } | Self::Length { .. } | Self::Expert { .. } | Self::Owner { .. } => true,
            Self::Config(_) | Self::Attach(_) | Self::Region(_) => false,
        }
    }
}

impl From<EpError> for StepFault {
    fn from(error: EpError) -> Self {
        StepFault::engine(error)
    }
}
