//! Memory that processes share, of the server and of its clients.
//!
//! * [`region`]: memory that several processes map, and bounds-checked views of it.
//! * [`observed`]: time limits that a pause of this process does not use up.
//! * [`wait`]: spin-then-futex waiting, and the [`wait::Doorbell`] that many threads ring and one waits on.
//! * [`ring`]: a single-producer, single-consumer ring of fixed-size records.
//! * [`descriptors`]: descriptors that travel over a socket.
//! * [`team`]: threads of one process that do the parts of a step together.
//!
//! Unsafe code is confined to `region` (mapping and views) and `team`. Rings and waiting use atomics and contain no unsafe code.

pub mod descriptors;
pub mod faults;
pub mod observed;
pub mod region;
pub mod ring;
pub mod team;
pub mod wait;

#[cfg(all(test, feature = "loom"))]
mod loom_tests;

pub use observed::ObservedTime;
pub use region::{RegionError, SharedRegion, SharedSlice};
pub use team::ThreadTeam;
pub use wait::WaitPolicy;
