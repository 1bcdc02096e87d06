//! The memory that the router shares with the ranks of one generation: step descriptors and completions in rings, token
//! rows in staging, heartbeats.
//!
//! For each rank and slot, staging holds one area of rows and the routing of each row. The router writes the rows of a
//! step there and pushes a [`StepDescriptor`]; the rank overwrites each row with its answer, in the row's dtype, and
//! pushes a [`Completion`]. Between the two pushes the area belongs to the rank, otherwise to the router. Each end records
//! which slots are in flight and refuses to access an area that the other side owns.

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod attached_tests;
mod layout;
mod rank;
mod records;
mod router;

pub use layout::GroupShape;
pub use rank::{ExpertsNotice, Heartbeat, RankChannel, RankStaging, StagingAddresses, UsageReport};
pub use records::{Completion, MAX_RAISES, Raise, Segment, StepDescriptor};
pub use router::{AttachedRows, FormingStep, RouterChannel, RowSource, RowsToStage, StagedRows};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use expertd_shm::region::{PAGE, RegionError, SharedRegion};
use expertd_shm::ring::RingError;
use expertd_shm::wait::Doorbell;
use expertd_types::{Rank, Slot};

/// The doorbell of the router's step loop. Ranks ring it after a completion, other threads of the router after any other
/// event for the step loop. It outlives generations; a superfluous ring only makes the step loop poll.
#[derive(Clone, Debug)]
pub struct RouterBell {
    region: Arc<SharedRegion>,
    bell: Doorbell,
}

impl RouterBell {
    /// Makes a doorbell in memory of its own.
    pub fn create() -> Result<Self, RegionError> {
        Self::over(SharedRegion::create("expertd-bell", PAGE)?)
    }

    /// Maps the doorbell in inherited memory.
    ///
    /// # Errors
    /// If the descriptor is not that of a router's doorbell.
    pub fn join(fd: OwnedFd) -> Result<Self, RegionError> {
        Self::over(SharedRegion::from_fd(fd, PAGE)?)
    }

    fn over(region: Arc<SharedRegion>) -> Result<Self, RegionError> {
        let bell = Doorbell::new(region.slice(0, 1)?);
        Ok(RouterBell { region, bell })
    }

    /// Descriptor of the memory, which ranks inherit and map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// The doorbell itself.
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }
}

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ChannelError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("rank {rank}: {source}")]
    Ring { rank: Rank, source: RingError },
    #[error("rank {rank}: the ring is full because the other side does not pop its records")]
    Full { rank: Rank },
    #[error("rank {rank}: the step needs {needed} {what}, but the staging of a slot holds {capacity}")]
    Capacity { rank: Rank, what: &'static str, needed: usize, capacity: usize },
    /// A slot is in flight, so that its staging belongs to the step of an earlier exchange.
    #[error("rank {rank}: slot {slot} is in flight until exchange {sequence} is completed")]
    InFlight { rank: Rank, slot: Slot, sequence: u64 },
    #[error("rank {rank}: exchange {sequence} in slot {slot} is not in flight, so it cannot be completed")]
    NotInFlight { rank: Rank, slot: Slot, sequence: u64 },
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
