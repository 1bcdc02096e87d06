//! Expert ranks on CPUs.
//!
//! * [`window`]: the symmetric windows of a generation, in one region of shared memory.
//! * [`exchange`]: which rank may touch which part of a window when.
//! * [`CpuGroup`]: prepare, dispatch and combine over them. The protocol stands in `docs/protocol.md`.
//! * [`CpuEngine`]: the phases of a step in f32.

mod config;
mod engine;
mod error;
pub mod exchange;
pub mod group;
pub mod window;

pub use config::{ConfigError, EpConfig, MAX_RANKS, MAX_SLOTS, MAX_TOP_K};
pub use engine::{CpuEngine, LoadError, load};
pub use error::EpError;
pub use group::{CpuGroup, HostRouting};

use std::sync::Arc;
use std::time::Duration;

use expertd_ipc::control::RankSetup;
use expertd_ipc::{GroupShape, SharedRegion};
use expertd_types::{Generation, Rank};

/// Creates the windows of the generation that `setup` belongs to, for its ranks to inherit.
///
/// # Errors
/// If the configuration makes no sense or there is no memory for it.
pub fn create_windows(setup: &RankSetup) -> Result<Arc<SharedRegion>, EpError> {
    group::create_windows(&ep_config(setup))
}

/// Bytes of one rank's window in a group of this shape.
///
/// # Errors
/// If the shape makes no sense or its windows are larger than memory can be.
pub fn window_bytes(shape: &GroupShape) -> Result<usize, ConfigError> {
    // Sizes do not depend on the rank, the generation or on how ranks wait.
    let config = config_of(shape, Rank(0), Generation(1), Duration::from_secs(1), Duration::ZERO);
    Ok(group::window_layout(&config)?.window_bytes())
}

/// What the EP group is made for, as the rank of `setup` sees it.
#[must_use]
pub fn ep_config(setup: &RankSetup) -> EpConfig {
    config_of(&setup.shape, setup.rank, setup.generation, setup.peer_timeout, setup.spin)
}

fn config_of(
    shape: &GroupShape,
    rank: Rank,
    generation: Generation,
    wait_deadline: Duration,
    spin: Duration,
) -> EpConfig {
    EpConfig {
        ranks: shape.ranks as usize,
        rank,
        hidden: shape.hidden,
        max_top_k: shape.max_top_k,
        max_tokens_per_rank: shape.max_tokens_per_rank,
        slots: shape.slots as usize,
        generation,
        wait_deadline,
        spin,
        poison: false,
    }
}
