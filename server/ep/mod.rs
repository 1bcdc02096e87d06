//! EP groups: symmetric windows, prepare, dispatch and combine.
//!
//! [`EpGroup`] is what the engine sees of a group; [`cpu`] implements it over shared memory. The protocol stands in
//! `docs/protocol.md`.

mod config;
pub mod cpu;
mod group;
#[cfg(feature = "cuda")]
pub mod lsa;

pub use config::{ConfigError, EpConfig, MAX_RANKS, MAX_SLOTS, MAX_TOP_K};
pub use cpu::{CpuGroup, HostRouting};
pub use group::{EpError, EpGroup};
