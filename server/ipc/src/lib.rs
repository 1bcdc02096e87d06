//! Memory that the processes of one service share: regions, rings, staging, waiting.
//!
//! * [`region`]: memory that several processes map, and bounds-checked views of it.
//! * [`wait`]: spin-then-futex waiting, and the [`wait::Doorbell`] that many threads ring and one waits on.
//! * [`ring`]: a single-producer, single-consumer ring of fixed-size records.
//! * [`copier`]: copies of many rows by several threads.
//! * [`sealed`]: memory that is written once and mapped by others for reading.
//! * [`passing`]: control messages that carry descriptors.
//! * [`control`]: messages over the socket between the router and a rank, and descriptors that travel with them.
//! * [`RowCounts`]: rows that each expert has computed, counted by the ranks.
//! * [`channel`]: step descriptors, completions and staging between the router and its ranks.
//!
//! Unsafe code is confined to `region` and `sealed` (mapping and views) and to the modules that decide which process owns a view's
//! memory at a time. Rings and waiting use atomics and contain no unsafe code.

pub mod channel;
pub mod control;
pub mod copier;
pub mod faults;
pub mod passing;
pub mod region;
pub mod ring;
mod row_counts;
pub mod sealed;
pub mod wait;

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

pub use channel::{
    AttachedRows, ChannelError, Completion, ExpertsNotice, FormingStep, GroupShape, Heartbeat, MAX_RAISES,
    Raise, RankChannel, RankStaging, RouterBell, RouterChannel, RowSource, RowsToStage, Segment, StagedRows,
    StagingAddresses, StepDescriptor, UsageReport,
};
pub use copier::Copier;
pub use region::{RegionError, SharedRegion, SharedSlice};
pub use row_counts::{RowCounts, RowCountsShape};
pub use sealed::{SealedError, SealedMemory, SealedWriter};
pub use wait::WaitPolicy;
