//! The project's identifiers and quantities as types, so that two integers of the same width cannot be swapped. No I/O.

#![forbid(unsafe_code)]

mod fingerprint;
mod gpu_path;
mod ids;
mod layers;
mod phase;
mod placement;
mod products;
pub mod reuse;
pub mod rows;
mod usage;
mod uuid;

pub use fingerprint::{Coverage, NoFingerprint, WeightFingerprint};
pub use gpu_path::GpuPath;
pub use ids::*;
pub use layers::LayerRange;
pub use phase::Phase;
pub use placement::{ExpertOwners, ExpertPlacement, LayerPlacement, Placement, PlacementError};
pub use products::{Fp8Compute, Fp8Products};
pub use usage::{DeviceUsage, USAGE_WORDS};
pub use uuid::uuid_text;
