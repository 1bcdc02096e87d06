//! CUDA kernels of expertd and thin wrappers to launch them.
//!
//! [`params`] and [`layout`] describe what the kernels work on and build everywhere, as does [`ceilings::Ceilings`]; `device`,
//! `event`, `experts`, `launch` and `slot` exist with the feature `cuda` only. A binary with that feature still starts
//! without a driver: ask `device::driver_present` first.

pub mod ceilings;
#[cfg(feature = "cuda")]
pub mod device;
#[cfg(feature = "cuda")]
pub mod event;
#[cfg(feature = "cuda")]
pub mod experts;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod layout;
pub mod params;
#[cfg(feature = "cuda")]
pub mod slot;

/// Release of nvcc that compiled the kernels.
#[cfg(feature = "cuda")]
pub const NVCC: &str = env!("EXPERTD_NVCC_RELEASE");
