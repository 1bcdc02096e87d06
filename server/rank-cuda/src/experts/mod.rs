//! Experts on a GPU: weights in the layouts of the grouped kernel (`kernels/src/experts.h`).
//!
//! Sizes that the kernel does not support are padded with zeros, which changes no result: a padded intermediate feature is
//! `activation(0, 0) = 0`, and a padded hidden feature is multiplied with zeros only. Weights in f32 and f16 are rounded to
//! bf16 (to nearest, ties to even). Codes of other formats are kept for products in bf16; for products in FP8, FP8 codes have another
//! layout, and MXFP4 codes become FP8 codes. [`Stored::on_device`](crate::Stored::on_device) lists the exceptions and the other formats.

mod cpu_panels;
mod grouped;
mod host;
mod int4;
mod load;
mod narrow;
#[cfg(test)]
mod pack_tests;
#[cfg(test)]
mod repack_tests;
mod space;
#[cfg(test)]
mod unit_tests;

pub use crate::format::DeviceFormat;
pub(crate) use crate::format::padded;
pub(crate) use cpu_panels::rewriting;
pub use host::HostBuffer;
pub use load::{PackOn, UploadError, Uploader, bf16_parts, upload_bytes};
pub use narrow::Filled;
#[cfg(test)]
pub(crate) use repack_tests::bytes_on_cpu;
pub use space::WeightSpace;

use expertd_kernels::device::{Buffer, Device, DeviceError};
use expertd_kernels::experts::{BF16, FP8, INT4, INT4_ZEROS, LayerWeights, MXFP4, MXFP8, NVFP4, W8A8};

use expertd_model::Activation;

/// Alignment of panels, in bytes.
const PANEL_ALIGNMENT: u64 = 1024;

impl DeviceFormat {
    /// The kernel's code for this format.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            DeviceFormat::Bf16 => BF16,
            DeviceFormat::Fp8 => FP8,
            DeviceFormat::Mxfp4 => MXFP4,
            DeviceFormat::W8a8 => W8A8,
            DeviceFormat::Int4 => INT4,
            DeviceFormat::Int4Zeros => INT4_ZEROS,
            DeviceFormat::Nvfp4 => NVFP4,
            DeviceFormat::Mxfp8 => MXFP8,
        }
    }
}

/// The kernel's code of an activation, its alpha and its limit.
#[must_use]
pub const fn activation_code(activation: Activation) -> (i32, f32, f32) {
    match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::SwiGluClamped { limit } => (1, 0.0, limit),
        Activation::SwiGluOai { alpha, limit } => (2, alpha, limit),
    }
}

/// 16-bit elements in device memory with the kernel's alignment of panels and weights.
#[derive(Debug)]
pub struct Panels {
    #[expect(dead_code, reason = "keeps the memory allocated")]
    memory: Buffer<u16>,
    address: u64,
}

impl Panels {
    /// Allocates `elements` zeros.
    pub fn new(device: &Device, elements: usize) -> Result<Self, DeviceError> {
        let memory = Buffer::zeroed(device, elements + PANEL_ALIGNMENT as usize / 2)?;
        let address = memory.address().next_multiple_of(PANEL_ALIGNMENT);
        Ok(Panels { memory, address })
    }

    /// Device address of the first element.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }
}

/// Experts of one layer on one device: a rank's routed experts, or the layer's shared experts as one MLP. All addresses lie in
/// the memory of the [`WeightSpace`] that placed them.
#[derive(Clone, Copy, Debug)]
pub struct CudaExperts {
    format: DeviceFormat,
    count: usize,
    /// Hidden size, padded.
    hidden: usize,
    /// Intermediate size, padded.
    inter: usize,
    /// The kernel's table entry for this layer.
    weights: LayerWeights,
}

impl CudaExperts {
    /// Takes places for `count` experts of these sizes.
    #[must_use]
    pub fn place(
        space: &mut WeightSpace,
        format: DeviceFormat,
        count: usize,
        hidden: usize,
        inter: usize,
        biases: bool,
    ) -> Self {
        let (hidden, inter) = (padded(hidden), format.padded_inter(inter));
        let [gate_up, down] = format.matrix_bytes(hidden, inter);
        let biased = if biases { count * size_of::<f32>() } else { 0 };
        let scaled = if format == DeviceFormat::Bf16 { 0 } else { count * size_of::<f32>() };
        let weights = LayerWeights {
            gate_up: space.take(count * gate_up),
            down: space.take(count * down),
            gate_up_bias: space.take(biased * 2 * inter),
            down_bias: space.take(biased * hidden),
            gate_up_scale: space.take(scaled * 2 * inter),
            down_scale: space.take(scaled * hidden),
            block_scales: u64::from(format == DeviceFormat::W8a8),
        };
        CudaExperts { format, count, hidden, inter, weights }
    }

    /// Number of experts.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Format of the weights in device memory.
    #[must_use]
    pub const fn format(&self) -> DeviceFormat {
        self.format
    }

    /// Hidden size, padded.
    #[must_use]
    pub const fn hidden(&self) -> usize {
        self.hidden
    }

    /// Intermediate size, padded.
    #[must_use]
    pub const fn inter(&self) -> usize {
        self.inter
    }

    /// Whether 128 neighbouring rows of every matrix that was loaded, from a multiple of 128 on, share their FP8 multipliers; only
    /// W8A8 needs it.
    #[must_use]
    pub const fn has_block_scales(&self) -> bool {
        self.weights.block_scales != 0
    }

    /// Sets [`has_block_scales`](Self::has_block_scales).
    pub const fn set_block_scales(&mut self, has: bool) {
        self.weights.block_scales = has as u64;
    }

    /// This layer's entry in the kernel's table of layers.
    #[must_use]
    pub const fn weights(&self) -> LayerWeights {
        self.weights
    }
}
