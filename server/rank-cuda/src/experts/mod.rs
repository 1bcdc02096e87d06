//! Experts on a GPU: weights in the layouts of the grouped kernel (`kernels/src/experts.h`).
//!
//! Sizes that the kernel cannot work with are padded with zeros, which changes no result: a padded intermediate feature
//! is `activation(0, 0) = 0`, a padded hidden feature meets zeros only. Weights in f32 and f16 are rounded to bf16, to
//! nearest, ties to even; FP8 and MXFP4 stay what they are, in one layout where they are widened and another where FP8 is
//! multiplied as FP8.

mod host;
mod load;
mod narrow;

pub use host::HostBuffer;
pub use load::{Loader, PackFailure, to_bf16};

use expertd_ipc::control::Fp8Compute;
use expertd_kernels::device::{Buffer, Device, DeviceError};
use expertd_kernels::experts::{
    BF16, FP8, LayerWeights, MXFP4, PACK_DOWN, PACK_GATE_UP, SCALE_ELEMENTS, W8A8, matrix_bytes,
};

use expertd_model::{Activation, WeightFormat};

/// Multiple of the hidden and the intermediate size.
const SIZE_UNIT: usize = 64;
/// Alignment of panels, bytes.
const PANEL_ALIGNMENT: u64 = 1024;

/// Rounds a hidden or intermediate size up to what the kernels work with.
#[must_use]
pub const fn padded(size: usize) -> usize {
    size.next_multiple_of(SIZE_UNIT)
}

/// How weights are held in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// Of what is stored in bf16, f16 and f32.
    Bf16,
    /// FP8 e4m3, with multipliers, widened to bf16 before it is multiplied.
    Fp8,
    /// The same, multiplied as FP8.
    W8a8,
    /// MXFP4.
    Mxfp4,
}

impl Held {
    /// How weights that are stored in `format` are held.
    #[must_use]
    pub const fn of(format: WeightFormat, fp8: Fp8Compute) -> Self {
        match (format, fp8) {
            (WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32, _) => Held::Bf16,
            (WeightFormat::Fp8E4m3, Fp8Compute::Bf16) => Held::Fp8,
            (WeightFormat::Fp8E4m3, Fp8Compute::Fp8) => Held::W8a8,
            (WeightFormat::Mxfp4, _) => Held::Mxfp4,
        }
    }

    /// Whether weights that are stored in `format` can be held so.
    fn holds(self, format: WeightFormat) -> bool {
        [Fp8Compute::Bf16, Fp8Compute::Fp8].iter().any(|fp8| Held::of(format, *fp8) == self)
    }

    /// The intermediate size that the kernel works with.
    #[must_use]
    pub const fn padded_inter(self, inter: usize) -> usize {
        match self {
            Held::W8a8 => inter.next_multiple_of(SCALE_ELEMENTS),
            Held::Bf16 | Held::Fp8 | Held::Mxfp4 => padded(inter),
        }
    }

    /// The kernel's code.
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Held::Bf16 => BF16,
            Held::Fp8 => FP8,
            Held::Mxfp4 => MXFP4,
            Held::W8a8 => W8A8,
        }
    }

    /// Device bytes of one expert's gate and up, and of its down.
    fn matrix_bytes(self, hidden: usize, inter: usize) -> [usize; 2] {
        [PACK_GATE_UP, PACK_DOWN].map(|kind| matrix_bytes(self.code(), kind, hidden, inter) as usize)
    }
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

/// 16-bit elements in device memory, aligned as the kernel wants panels and weights.
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
    held: Held,
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
    /// All but bf16: f32 `[count, 2, inter]`, what the rows are multiplied with.
    gate_up_scale: Option<Buffer<f32>>,
    /// All but bf16: f32 `[count, hidden]`.
    down_scale: Option<Buffer<f32>>,
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
        held: Held,
        count: usize,
        hidden: usize,
        inter: usize,
        biases: bool,
    ) -> Result<Self, DeviceError> {
        let (hidden, inter) = (padded(hidden), held.padded_inter(inter));
        let biased = count * usize::from(biases);
        let [gate_up, down] = held.matrix_bytes(hidden, inter);
        let scales = |len: usize| match held {
            Held::Bf16 => Ok(None),
            Held::Fp8 | Held::W8a8 | Held::Mxfp4 => Buffer::zeroed(device, count * len).map(Some),
        };
        Ok(CudaExperts {
            held,
            count,
            hidden,
            inter,
            gate_up: Panels::new(device, count * gate_up / 2)?,
            down: Panels::new(device, count * down / 2)?,
            gate_up_bias: None,
            down_bias: None,
            gate_up_scale: scales(2 * inter)?,
            down_scale: scales(hidden)?,
            host_gate_up_bias: vec![0.0; biased * 2 * inter],
            host_down_bias: vec![0.0; biased * hidden],
        })
    }

    /// Bytes that [`new`](Self::new) takes of the device, but for biases and the scales of rows.
    #[must_use]
    pub fn bytes(held: Held, count: usize, hidden: usize, inter: usize) -> u64 {
        let [gate_up, down] = held.matrix_bytes(padded(hidden), held.padded_inter(inter));
        (count * (gate_up + down)) as u64
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

    /// How the weights are held.
    #[must_use]
    pub const fn held(&self) -> Held {
        self.held
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
            gate_up_scale: self.gate_up_scale.as_ref().map_or(0, Buffer::address),
            down_scale: self.down_scale.as_ref().map_or(0, Buffer::address),
        }
    }
}
