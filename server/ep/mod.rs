//! EP groups: symmetric windows, prepare, dispatch and combine.
//!
//! [`EpGroup`] is the engine's interface to a group; [`cpu`] implements it over shared memory. `docs/protocol.md` describes
//! the protocol.

mod config;
pub mod cpu;
mod group;
#[cfg(feature = "cuda")]
pub mod lsa;

pub use config::{ConfigError, EpConfig, MAX_RANKS, MAX_SLOTS, MAX_TOP_K};
pub use cpu::{CpuGroup, HostRouting};
pub use group::{EpError, EpGroup};
