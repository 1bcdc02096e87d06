//! CUDA kernels of expertd and thin wrappers that launch them.
//!
//! [`params`], [`layout`], [`copies`], [`path`] and [`ceilings::Ceilings`] describe the kernels' data and build everywhere; `device`, `event`,
//! `experts`, `launch` and `slot` need the feature `cuda`. A binary with that feature also starts on a machine without a
//! driver; it must call `device::driver_present` before anything else of these modules.

pub mod ceilings;
pub mod copies;
#[cfg(feature = "cuda")]
pub mod device;
#[cfg(feature = "cuda")]
pub mod event;
#[cfg(feature = "cuda")]
pub mod experts;
#[cfg(test)]
mod header;
#[cfg(feature = "cuda")]
pub mod launch;
pub mod layout;
pub mod params;
pub mod path;
#[cfg(feature = "cuda")]
pub mod slot;

/// Release of the nvcc that compiled the kernels.
#[cfg(feature = "cuda")]
pub const NVCC: &str = env!("EXPERTD_NVCC_RELEASE");
