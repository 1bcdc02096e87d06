//! Expert ranks on GPUs.
//!
//! What can be said about GPUs without touching one is in every build, and the router uses it: [`check`], [`environment`],
//! [`present`], [`window_bytes`]. With feature `cuda`, [`load`] makes the engine, [`probe`] and [`ceilings`] look at the
//! machine's GPUs.

#[cfg(feature = "cuda")]
mod engine;
#[cfg(feature = "cuda")]
pub mod experts;
mod host;
#[cfg(feature = "cuda")]
pub mod windows;

pub use host::{
    ALIGNED, BUILD_HINT, BUILT, EAGER, Gate, check, environment, kernel_shape, numa_nodes, present,
    window_bytes,
};

use expertd_kernels::ceilings::Ceilings;
use expertd_rank::{Failure, Joining, Loaded};

/// Every requirement that ranks on GPUs have of this machine. Opens devices, so the router must not call it.
#[must_use]
pub fn probe() -> Vec<Gate> {
    #[cfg(feature = "cuda")]
    {
        engine::probe()
    }
    #[cfg(not(feature = "cuda"))]
    {
        let found = format!("without GPU ranks; {} GPUs here", present());
        vec![Gate::failed("build", found, "feature cuda", BUILD_HINT)]
    }
}

/// Measures the first `gpus` GPUs in about a second. Opens devices, so the router must not call it.
///
/// # Errors
/// What is missing, or what failed.
pub fn ceilings(gpus: u32) -> Result<Ceilings, String> {
    #[cfg(feature = "cuda")]
    {
        expertd_kernels::ceilings::measure(gpus).map_err(|error| error.to_string())
    }
    #[cfg(not(feature = "cuda"))]
    {
        Err(format!("{gpus} GPUs cannot be measured: {BUILD_HINT}"))
    }
}

/// Sets up this rank's GPU, joins the group, and loads; a build without feature `cuda` refuses.
///
/// # Errors
/// What is missing, or what about the weights is wrong.
pub fn load(joining: Joining<'_>) -> Result<Loaded, Failure> {
    #[cfg(feature = "cuda")]
    {
        engine::load(joining)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = joining;
        Err(expertd_rank::setup_failure(BUILD_HINT))
    }
}
