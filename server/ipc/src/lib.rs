//! What the processes of one service pass to each other, over the memory of [`expertd_shm`].
//!
//! * [`apart`]: drops on threads of their own.
//! * [`copier`]: copies of many rows by several threads.
//! * [`sealed`]: memory that is written once and mapped by others for reading.
//! * [`passing`]: control messages that carry descriptors.
//! * [`control`]: messages over the socket between the router and a rank, and descriptors that travel with them.
//! * [`RowCounts`]: rows that each expert has computed, counted by the ranks.
//! * [`channel`]: step descriptors, completions and staging between the router and its ranks.
//!
//! Unsafe code is confined to `sealed` (mapping and views) and to the modules that decide which process owns a view's memory at a time.

pub mod apart;
pub mod channel;
pub mod control;
pub mod copier;
pub mod passing;
mod row_counts;
pub mod sealed;

pub use channel::{
    AttachedRows, ChannelError, Completion, ExpertsNotice, FormingStep, GroupShape, Heartbeat, MAX_RAISES,
    Raise, RankChannel, RankStaging, RouterBell, RouterChannel, RowSource, RowsToStage, Segment, StagedRows,
    StagingAddresses, StepDescriptor, UsageReport,
};
pub use copier::Copier;
pub use row_counts::{RowCounts, RowCountsShape};
pub use sealed::{SealedError, SealedMemory, SealedWriter};
