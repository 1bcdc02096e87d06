//! Shared memory between the processes of one service: regions, rings, staging, waiting.
//!
//! * [`region`]: memory that several processes map, and bounds-checked views of it.
//! * [`wait`]: spin-then-futex waiting, and the [`wait::Doorbell`] that many ring and one waits on.
//! * [`ring`]: a single-producer, single-consumer ring of fixed-size records.
//! * [`copier`]: copies of many rows by several threads.
//! * [`control`]: messages over the socket between the router and a rank, and descriptors that travel with them.
//! * [`channel`]: step descriptors, completions and staging between the router and its ranks.
//!
//! Unsafe code of this layer stands in `region` (mapping and views) and in the modules that say when a view's memory
//! belongs to whom; rings and waiting go through atomics and need none.

pub mod channel;
pub mod control;
pub mod copier;
pub mod region;
pub mod ring;
pub mod wait;

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

pub use channel::{
    ChannelError, Completion, ExpertsNotice, Forming, GroupShape, Pulse, RankChannel, RankStaging,
    RouterBell, RouterChannel, Segment, StageRows, Staged, StagingPlace, StepDescriptor,
};
pub use copier::Copier;
pub use region::{RegionError, SharedRegion, SharedSlice};
pub use wait::Patience;
