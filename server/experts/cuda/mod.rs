//! Experts on a GPU: bf16 weights in the layout of the grouped kernel (`kernels/src/experts.h`).
//!
//! Sizes that the kernel cannot work with are padded with zeros, which changes no result: a padded intermediate feature
//! is `activation(0, 0) = 0`, a padded hidden feature meets zeros only. Weights in f32 and f16 are rounded to bf16, to
//! nearest, ties to even.

mod host;
mod load;

pub use host::HostBuffer;
pub use load::{Loader, PackFailure, to_bf16};

use expertd_kernels::device::{Buffer, Device, DeviceError};
use expertd_kernels::experts::LayerWeights;

use crate::linalg::{Activation, WeightFormat};

/// Multiple of the hidden and the intermediate size.
const SIZE_UNIT: usize = 64;
/// Alignment of panels, bytes.
const PANEL_ALIGNMENT: u64 = 1024;

/// Rounds a hidden or intermediate size up to what the kernels work with.
#[must_use]
pub const fn padded(size: usize) -> usize {
    size.next_multiple_of(SIZE_UNIT)
}

/// Whether weights of this format can be held on a GPU.
#[must_use]
pub const fn format_is_supported(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32)
}

/// The kernel's code of an activation, with alpha and limit.
#[must_use]
pub const fn activation_code(activation: Activation) -> (i32, f32, f32) {
    match activation {
        Activation::SwiGlu => (0, 0.0, 0.0),
        Activation::SwiGluClamped { limit } => (1, 0.0, limit),
        Activation::SwiGluOai { alpha, limit } => (2, alpha, limit),
    }
}

/// bf16 panels in device memory, aligned as the kernel wants them.
#[derive(Debug)]
pub struct Panels {
    #[expect(dead_code, reason = "held, not read")]
    memory: Buffer<u16>,
    address: u64,
}

impl Panels {
    /// Zeros.
    ///
    /// # Errors
    /// When device memory is short.
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

/// Experts of one layer on one device: the routed ones of a rank, or the shared ones as one.
#[derive(Debug)]
pub struct CudaExperts {
    count: usize,
    /// Padded.
    hidden: usize,
    /// Padded.
    inter: usize,
    gate_up: Panels,
    down: Panels,
    /// f32 `[count, 2, inter]`.
    gate_up_bias: Option<Buffer<f32>>,
    /// f32 `[count, hidden]`.
    down_bias: Option<Buffer<f32>>,
    host_gate_up_bias: Vec<f32>,
    host_down_bias: Vec<f32>,
}

impl CudaExperts {
    /// Room for `count` experts of these sizes.
    ///
    /// # Errors
    /// When device memory is short.
    pub fn new(
        device: &Device,
        count: usize,
        hidden: usize,
        inter: usize,
        biases: bool,
    ) -> Result<Self, DeviceError> {
        let (hidden, inter) = (padded(hidden), padded(inter));
        let biased = count * usize::from(biases);
        Ok(CudaExperts {
            count,
            hidden,
            inter,
            gate_up: Panels::new(device, count * 2 * inter * hidden)?,
            down: Panels::new(device, count * hidden * inter)?,
            gate_up_bias: None,
            down_bias: None,
            host_gate_up_bias: vec![0.0; biased * 2 * inter],
            host_down_bias: vec![0.0; biased * hidden],
        })
    }

    /// Bytes that [`new`](Self::new) takes of the device, but for biases.
    #[must_use]
    pub const fn bytes(count: usize, hidden: usize, inter: usize) -> u64 {
        count as u64 * 3 * padded(hidden) as u64 * padded(inter) as u64 * 2
    }

    /// Sends the biases to the device, once every expert is loaded.
    ///
    /// # Errors
    /// The driver's.
    pub fn finish(&mut self, device: &Device) -> Result<(), DeviceError> {
        if !self.host_gate_up_bias.is_empty() {
            self.gate_up_bias = Some(Buffer::from_slice(device, &self.host_gate_up_bias)?);
            self.down_bias = Some(Buffer::from_slice(device, &self.host_down_bias)?);
        }
        (self.host_gate_up_bias, self.host_down_bias) = (Vec::new(), Vec::new());
        Ok(())
    }

    /// Experts.
    #[must_use]
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Intermediate size, padded.
    #[must_use]
    pub const fn inter(&self) -> usize {
        self.inter
    }

    /// Entry of the kernel's table of layers.
    #[must_use]
    pub fn weights(&self) -> LayerWeights {
        LayerWeights {
            gate_up: self.gate_up.address,
            down: self.down.address,
            gate_up_bias: self.gate_up_bias.as_ref().map_or(0, Buffer::address),
            down_bias: self.down_bias.as_ref().map_or(0, Buffer::address),
        }
    }
}
