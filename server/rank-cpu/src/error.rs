//! Why a call on an EP group fails.

use super::config::ConfigError;
use crate::exchange::{AttachError, ExchangeError};
use expertd_ipc::region::RegionError;
use expertd_rank::StepFault;

/// Why a call on a group failed. Unless [`is_misuse`](EpError::is_misuse) says otherwise the group has ended: its peers
/// have been told, and nothing but dropping it makes sense.
#[derive(Debug, thiserror::Error)]
pub enum EpError {
    /// A configuration that makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The windows cannot be joined.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The windows cannot be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The exchange with the peers failed, or a call was out of order.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// More than the windows hold.
    #[error("{what} is {found}, the group was made for at most {limit}")]
    Limit {
        /// `tokens` or `k`.
        what: &'static str,
        /// What the call says.
        found: usize,
        /// What the group was made for.
        limit: usize,
    },
    /// A buffer of another length than the call's other arguments imply.
    #[error("{what} has {found} elements, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// What it must have.
        expected: usize,
        /// What it has.
        found: usize,
    },
    /// An expert that the layer does not have.
    #[error("token {token} chooses expert {id}, but the layer has experts 0 to {last}")]
    Expert {
        /// Index of the token.
        token: usize,
        /// What it chooses.
        id: i32,
        /// The layer's last expert.
        last: i64,
    },
    /// An expert whose owner is not a rank of the group.
    #[error("expert {id} is placed on rank {owner}, but the group has {ranks} ranks")]
    Owner {
        /// The expert.
        id: i32,
        /// Its owner.
        owner: u32,
        /// Ranks of the group.
        ranks: usize,
    },
}

impl EpError {
    /// Whether the caller made a mistake that left the group as it was.
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
