//! What the GPUs of this machine reach by themselves, for floors.

#[cfg(feature = "cuda")]
mod measure;
#[cfg(feature = "cuda")]
pub use measure::{CeilingError, measure};

/// What a GPU reaches; the slowest of several.
#[derive(Clone, Copy, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Ceilings {
    /// Bytes per second read from device memory.
    pub memory_bytes_per_second: f64,
    /// FLOP per second of bf16 products, for milliseconds.
    pub tensor_burst_flops: f64,
    /// The same kept up, at the clocks that the power limit leaves.
    pub tensor_sustained_flops: f64,
    /// Bytes per second that each GPU stores to the next one while all do; `None` of one GPU.
    pub link_bytes_per_second: Option<f64>,
}
