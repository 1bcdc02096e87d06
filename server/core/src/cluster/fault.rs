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
#[allow(missing_docs, reason = "the messages describe the variants")]
pub(crate) enum FormError {
    #[error("cannot start rank {rank}: {source}")]
    Spawn { rank: Rank, source: io::Error },
    #[error("cannot create the shared memory of a generation: {0}")]
    Channel(#[from] ChannelError),
    #[error("cannot create the windows of a generation: {0}")]
    Windows(String),
    #[error("cannot create the shared memory of a generation: {0}")]
    Region(#[from] RegionError),
}
