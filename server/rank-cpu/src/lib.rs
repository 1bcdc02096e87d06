//! Expert ranks on CPUs.
//!
//! * `window`: the symmetric windows of a generation, in one region of shared memory.
//! * `exchange`: the protocol that decides which rank may access which part of a window, described in `docs/protocol.md`.
//! * [`CpuGroup`]: prepare, dispatch and combine over the windows.
//! * `engine`: the phases of a step in f32; [`load`] makes the engine of a rank.
//! * `weights`: packed weights in sealed memory; [`pack`] makes them in a loader.

mod config;
mod engine;
mod error;
mod exchange;
pub mod group;
mod weights;
mod window;

pub use config::{ConfigError, EpConfig, MAX_RANKS, MAX_SLOTS, MAX_TOP_K};
pub use engine::load;
pub use error::EpError;
pub use group::{CpuGroup, HostRouting};
pub use weights::{HeldExperts, WeightsError, pack};

use std::sync::Arc;
use std::time::Duration;

use expertd_ipc::GroupShape;
use expertd_ipc::control::RankSetup;
use expertd_shm::SharedRegion;
use expertd_types::{Generation, Rank};

/// Creates the windows of `setup`'s generation, whose descriptor the ranks inherit.
///
/// # Errors
/// If the configuration is invalid or there is no memory for the windows.
pub fn create_windows(setup: &RankSetup) -> Result<Arc<SharedRegion>, EpError> {
    group::create_windows(&ep_config(setup))
}

/// Bytes of one rank's window in a group of this shape.
///
/// # Errors
/// If the shape is invalid or its windows exceed the address space.
pub fn window_bytes(shape: &GroupShape) -> Result<usize, ConfigError> {
    // Sizes depend neither on the rank nor on the generation nor on how ranks wait.
    let config = config_of(shape, Rank(0), Generation(1), Duration::from_secs(1), Duration::ZERO);
    Ok(group::window_layout(&config)?.window_bytes())
}

/// The EP group's configuration for the rank of `setup`.
#[must_use]
pub(crate) fn ep_config(setup: &RankSetup) -> EpConfig {
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
