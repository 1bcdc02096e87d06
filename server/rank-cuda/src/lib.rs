//! Expert ranks on GPUs.
//!
//! [`check`], [`copy_tables`], [`resident_tables`], [`environment`], [`present`], [`RankGpu`], [`Stored`], [`weight_bytes`] and [`window_bytes`] need no access to a GPU; they are part of every build, and
//! the router uses them. With feature `cuda`, [`pack`] loads weights, [`load`] makes the engine, and [`probe`], [`inventory`] and [`ceilings`]
//! inspect the machine's GPUs.

#[cfg(feature = "cuda")]
mod engine;
#[cfg(feature = "cuda")]
pub mod experts;
mod format;
mod gpus;
mod host;
#[cfg(any(feature = "cuda", test))]
pub mod kernel_choice;
mod placement;
#[cfg(feature = "cuda")]
pub mod windows;

pub use expertd_kernels::path::KernelPath;
pub use format::{DeviceFormat, Stored, weight_bytes};
pub use gpus::{
    CAPABILITY_NEEDED, CAPABILITY_WAY_OUT, GpuFacts, Inventory, NcclFacts, RankGpu, SHARING_NEEDED,
    SHARING_WAY_OUT, is_shared,
};
pub use host::{
    ALIGNED, BUILD_HINT, BUILT, Check, EAGER, GPU_PATH, check, check_portable, check_portable_sizes,
    environment, kernel_shape, numa_nodes, path_environment, present, window_bytes,
};
pub use placement::{copy_tables, resident_tables};

use expertd_ipc::control::LoaderSetup;
use expertd_kernels::ceilings::Ceilings;
use expertd_rank::{Failure, Joining, Loaded, PackFailure, PackedShare, Progress};

/// Checks every requirement of GPU ranks. Opens devices, so the router must not call it.
#[must_use]
pub fn probe() -> Vec<Check> {
    #[cfg(feature = "cuda")]
    {
        engine::probe()
    }
    #[cfg(not(feature = "cuda"))]
    {
        let found = format!("without GPU ranks; the machine has {} GPUs", present());
        vec![Check::failed("build", found, "feature cuda", BUILD_HINT)]
    }
}

/// What decides whether ranks can run on this machine's GPUs, without a context on any of them. Loads the driver, so the router must not
/// call it.
///
/// # Errors
/// If the driver is missing or does not start.
pub fn inventory() -> Result<Inventory, String> {
    #[cfg(feature = "cuda")]
    {
        engine::inventory()
    }
    #[cfg(not(feature = "cuda"))]
    {
        Err(BUILD_HINT.to_owned())
    }
}

/// Measures these GPUs together in about a second. Opens devices, so the router must not call it.
///
/// # Errors
/// What is missing, or what failed.
pub fn ceilings(gpus: &[u32]) -> Result<Ceilings, String> {
    #[cfg(feature = "cuda")]
    {
        engine::check_ceilings(gpus)?;
        expertd_kernels::ceilings::measure(gpus).map_err(|error| error.to_string())
    }
    #[cfg(not(feature = "cuda"))]
    {
        Err(format!("{} GPUs cannot be measured: {BUILD_HINT}", gpus.len()))
    }
}

/// Sets up this rank's GPU, joins the group and maps the weights. A build without feature `cuda` returns an error.
///
/// # Errors
/// The reason why the group could not be joined or the weights could not be mapped.
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

/// Packs one rank's share of a checkpoint into memory of its GPU that outlives this process. A build without feature `cuda`
/// returns an error.
///
/// # Errors
/// If the checkpoint cannot be read, holds other weights or changes meanwhile, or the GPU has no room for it.
pub fn pack(setup: &LoaderSetup, progress: &Progress) -> Result<PackedShare, PackFailure> {
    #[cfg(feature = "cuda")]
    {
        engine::pack(setup, progress).map_err(|error| {
            let lacks_room = error.lacks_room();
            PackFailure { lacks_room, ..PackFailure::from(error) }
        })
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (setup, progress);
        Err(PackFailure { message: BUILD_HINT.to_owned(), lacks_room: false })
    }
}
