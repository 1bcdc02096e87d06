//! Why generations end or cannot be formed.

use std::io;

use expertd_ipc::ChannelError;
use expertd_scheduler::{Fault, FaultKind};
use expertd_shm::RegionError;
use expertd_types::Rank;

/// The fault of a generation whose shared memory is broken.
pub(crate) fn channel_fault(error: ChannelError) -> Fault {
    Fault { kind: FaultKind::Channel, message: error.to_string() }
}

/// Why a generation could not be formed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormError {
    /// A rank's process could not be started.
    #[error("cannot start rank {rank}: {source}")]
    Spawn {
        /// The rank.
        rank: Rank,
        /// The cause.
        source: io::Error,
    },
    /// The channel could not be created.
    #[error("cannot create the shared memory of a generation: {0}")]
    Channel(#[from] ChannelError),
    /// The windows could not be created.
    #[error("cannot create the windows of a generation: {0}")]
    Windows(String),
    /// Shared memory could not be created.
    #[error("cannot create the shared memory of a generation: {0}")]
    Region(#[from] RegionError),
}
