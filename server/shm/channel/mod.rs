//! What the router and the ranks of one generation share: step descriptors and completions in rings, token rows in
//! staging, signs of life.
//!
//! Per rank and slot, staging holds one area of rows, and the routing of each row. The router writes the rows of a step
//! there and pushes a [`StepDescriptor`]; the rank writes the answer over them, each row in its dtype and at its place,
//! and pushes a [`Completion`]. Between the two pushes the area is the rank's, otherwise the router's.

mod places;
mod rank;
mod records;
mod router;

pub use places::GroupShape;
pub use rank::{ExpertsNotice, Pulse, RankChannel, RankStaging};
pub use records::{Completion, Segment, StepDescriptor};
pub use router::{RouterChannel, StageRows, Staged};

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::region::{PAGE, RegionError, SharedRegion};
use super::ring::RingError;
use super::wait::Doorbell;
use crate::types::Rank;

/// The doorbell of the router: what ranks ring after a completion, and whoever else has news for its step loop. It
/// outlives generations; a ring too many only makes the router look.
#[derive(Clone, Debug)]
pub struct RouterBell {
    region: Arc<SharedRegion>,
    bell: Doorbell,
}

impl RouterBell {
    /// Makes the bell in memory of its own.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create() -> Result<Self, RegionError> {
        Self::over(SharedRegion::create("expertd-bell", PAGE)?)
    }

    /// The bell in inherited memory.
    ///
    /// # Errors
    /// If the descriptor is not a router's bell.
    pub fn join(fd: OwnedFd) -> Result<Self, RegionError> {
        Self::over(SharedRegion::from_fd(fd, PAGE)?)
    }

    fn over(region: Arc<SharedRegion>) -> Result<Self, RegionError> {
        let bell = Doorbell::new(region.slice(0, 1)?);
        Ok(RouterBell { region, bell })
    }

    /// The memory, for ranks to map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// The bell itself.
    #[must_use]
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }
}

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Its memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// One of its rings.
    #[error("rank {rank}: {source}")]
    Ring {
        /// Whose.
        rank: Rank,
        /// What is wrong.
        source: RingError,
    },
    /// The other side has not taken what was pushed before.
    #[error("rank {rank}: the ring is full; the other side does not take what it is given")]
    Full {
        /// Whose.
        rank: Rank,
    },
    /// More than the staging of a slot holds.
    #[error("rank {rank}: {what} would be {needed}, and the staging of a slot holds {capacity}")]
    Capacity {
        /// Whose.
        rank: Rank,
        /// What there is too much of.
        what: &'static str,
        /// How much.
        needed: usize,
        /// How much fits.
        capacity: usize,
    },
}
