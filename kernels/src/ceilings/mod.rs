//! Ceilings: the speed limits of this machine's GPUs, from which floors are computed.

#[cfg(feature = "cuda")]
mod measure;
#[cfg(feature = "cuda")]
pub use measure::{CeilingError, measure};

/// Speed limits of a GPU; of several GPUs, those of the slowest.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Ceilings {
    /// Bytes per second read from device memory.
    pub memory_bytes_per_second: f64,
    /// FLOP per second of bf16 products in a burst of milliseconds.
    pub tensor_burst_flops: f64,
    /// FLOP per second of bf16 products over a longer time, at the clocks that the power limit allows.
    pub tensor_sustained_flops: f64,
    /// Bytes per second that each GPU stores to the next one while all GPUs do so; `None` for a single GPU.
    pub link_bytes_per_second: Option<f64>,
}
