//! Errors of an EP group.

use super::config::ConfigError;
use crate::exchange::{AttachError, ExchangeError};
use expertd_rank::StepFault;
use expertd_shm::region::RegionError;

/// Why a call on a group failed. Unless [`is_misuse`](EpError::is_misuse) returns true, the group has ended: its peers have
/// been notified, and the caller can only drop it.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum EpError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The exchange with the peers failed, or a call was out of order.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    #[error("{what} is {found}, expected 1 to {limit}, the group's limit")]
    Limit { what: &'static str, found: usize, limit: usize },
    /// The length of a buffer does not match the call's other arguments.
    #[error("{what} has {found} elements, expected {expected}")]
    Length { what: &'static str, expected: usize, found: usize },
    #[error("token {token} chooses expert {id}, but the layer has experts 0 to {last}")]
    Expert { token: usize, id: i32, last: i64 },
    #[error("expert {id} is placed on rank {owner}, but the group has {ranks} ranks")]
    Owner { id: i32, owner: u32, ranks: usize },
}

impl EpError {
    /// Whether the error is a caller's mistake that left the group unchanged.
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
