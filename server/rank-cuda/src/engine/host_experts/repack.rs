//! How an expert of a CPU rank comes to this GPU: a copy engine fills staging with it as CPU ranks have it, and kernels rewrite it to
//! panels.

#![allow(unsafe_code, reason = "copies and kernels work on memory that Rust only sees as addresses")]

use std::sync::Arc;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event;
use expertd_kernels::experts::{self, FROM_BF16, FROM_F16, FROM_F32, PACK_DOWN, PACK_GATE_UP, RepackParams};
use expertd_model::{ModelSpec, WeightFormat};

use super::memory::{HostExpert, HostExperts, HostLayer};
use crate::engine::fault::CudaFault;
use crate::engine::layers::Layer;
use crate::experts::{CudaExperts, DeviceFormat, WeightSpace, padded};

/// Distance of experts in staging is a multiple of it.
const ALIGNMENT: usize = 256;

/// Device memory for experts as CPU ranks have them.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Buffer<u8>,
    device: Device,
}

impl Staging {
    pub(super) fn new(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Staging { memory: Buffer::zeroed(device, bytes)?, device: device.clone() })
    }

    pub(super) const fn device(&self) -> &Device {
        &self.device
    }
}

/// The experts of CPU ranks of a layer, which kernels can rewrite.
#[derive(Debug)]
pub(super) struct HostCopy {
    layer: usize,
    format: DeviceFormat,
    /// Unpadded sizes.
    hidden: usize,
    width: usize,
    of_host: HostLayer,
    /// Bytes from an expert to the next one in staging.
    stride: usize,
    /// Biases of gate and up `[experts, 2, inter]` and of down `[experts, hidden]`, padded, which are small enough to stay on the GPU.
    biases: Option<[Buffer<f32>; 2]>,
}

/// Those of all layers, where there are any.
pub(super) type HostCopies = Vec<Option<Arc<HostCopy>>>;

impl HostCopy {
    /// The experts of CPU ranks that can be copied.
    pub(super) fn all(
        device: &Device,
        spec: &ModelSpec,
        layers: &[Option<Layer>],
        host: &mut HostExperts,
    ) -> Result<HostCopies, DeviceError> {
        let of = |layer: &Option<Layer>| {
            let layer = layer.as_ref().filter(|layer| !layer.is_whole);
            let of_host = layer.and_then(|layer| host.take(layer.index));
            let both = layer.zip(of_host).filter(|(layer, of_host)| is_rewritten(layer.format, of_host));
            both.map(|(layer, of_host)| HostCopy::new(device, spec.hidden, layer, of_host).map(Arc::new))
                .transpose()
        };
        layers.iter().map(of).collect()
    }

    fn new(device: &Device, hidden: usize, layer: &Layer, of_host: HostLayer) -> Result<Self, DeviceError> {
        let width = layer.spec.experts.width;
        let (wide, inter) = (padded(hidden), layer.format.padded_inter(width));
        let biases = if of_host.biases.is_empty() {
            None
        } else {
            let pad = |to: &mut Vec<f32>, from: &[f32], width: usize| {
                to.extend_from_slice(from);
                to.resize(to.len() + width - from.len(), 0.0);
            };
            let (mut gate_up, mut down) = (Vec::new(), Vec::new());
            for [gate, up, of_down] in &of_host.biases {
                pad(&mut gate_up, gate, inter);
                pad(&mut gate_up, up, inter);
                pad(&mut down, of_down, wide);
            }
            Some([Buffer::from_slice(device, &gate_up)?, Buffer::from_slice(device, &down)?])
        };
        Ok(HostCopy {
            layer: layer.index,
            format: layer.format,
            hidden,
            width,
            stride: of_host.bytes.next_multiple_of(ALIGNMENT),
            of_host,
            biases,
        })
    }

    /// Number of the layer.
    pub(super) const fn layer(&self) -> usize {
        self.layer
    }

    /// The experts, in the order of CPU ranks.
    pub(super) fn experts(&self) -> &[HostExpert] {
        &self.of_host.experts
    }

    /// Bytes of an expert.
    pub(super) const fn bytes(&self) -> usize {
        self.of_host.bytes
    }

    /// Bytes of an expert in staging.
    pub(super) const fn stride(&self) -> usize {
        self.stride
    }

    /// Takes places for `count` of them in the form that kernels multiply.
    pub(super) fn place(&self, space: &mut WeightSpace, count: usize) -> CudaExperts {
        CudaExperts::place(space, self.format, count, self.hidden, self.width, self.biases.is_some())
    }

    /// Whether copy engines can read them.
    pub(super) fn is_pinned(&self, host: &HostExperts) -> bool {
        host.is_pinned(&self.of_host)
    }

    /// Index in [`experts`](Self::experts) of an expert of a CPU rank.
    pub(super) fn find(&self, expert: u32) -> Option<usize> {
        self.experts().iter().position(|other| other.expert == expert)
    }

    /// Copies experts, which are numbered as in [`experts`](Self::experts), to staging.
    ///
    /// # Safety
    /// Nothing else uses the staging until the copies have ended, and the experts are pinned until then.
    pub(super) unsafe fn bring(
        &self,
        host: &HostExperts,
        experts: &[usize],
        staging: &Staging,
        on: &Stream,
    ) -> Result<(), CudaFault> {
        for (place, &expert) in experts.iter().enumerate() {
            for (from, range) in host.pieces(&self.of_host, &self.experts()[expert]) {
                let to = place * self.stride + range.start;
                assert!(to + range.len() <= staging.memory.len(), "the experts fit staging");
                // SAFETY: within staging (asserted), which nothing else uses, and within a pinned piece of sealed memory (the caller's
                // promise).
                unsafe {
                    event::copy_to_device(on, staging.memory.address() + to as u64, from, range.len())?;
                }
            }
        }
        Ok(())
    }

    /// Rewrites the experts that [`bring`](Self::bring) has copied to consecutive places from number `first` on.
    ///
    /// # Safety
    /// The copies have ended on `on`, `places` has room, and nothing else uses these places until the launches have ended.
    pub(super) unsafe fn unpack(
        &self,
        places: &CudaExperts,
        first: usize,
        experts: &[usize],
        staging: &Staging,
        on: &Stream,
    ) -> Result<(), CudaFault> {
        let (hidden, inter) = (places.hidden(), places.inter());
        let [gate_up, down] = places.format().matrix_bytes(hidden, inter);
        let weights = places.weights();
        let staged = staging.memory.address();
        let of = |form: usize, kind, source, panels: u64, panel_stride: usize| {
            let form = &self.of_host.forms[form];
            RepackParams {
                source,
                panels: panels + (first * panel_stride) as u64,
                source_stride: self.stride as u64,
                panel_stride: panel_stride as u64,
                experts: experts.len() as i32,
                hidden: hidden as i32,
                inter: inter as i32,
                kind,
                source_features: (if form.interleaved { form.n / 2 } else { form.n }) as i32,
                source_k: form.k as i32,
                width: form.level.panel_width() as i32,
                source_format: match form.format {
                    WeightFormat::F16 => FROM_F16,
                    WeightFormat::F32 => FROM_F32,
                    _ => FROM_BF16,
                },
            }
        };
        for params in [
            of(0, PACK_GATE_UP, staged, weights.gate_up, gate_up),
            of(1, PACK_DOWN, staged + self.of_host.down_at as u64, weights.down, down),
        ] {
            // SAFETY: the caller's promise.
            unsafe { experts::repack(&params, on.raw())? };
        }
        let Some(biases) = &self.biases else { return Ok(()) };
        for (biases, to, width) in
            [(&biases[0], weights.gate_up_bias, 2 * inter), (&biases[1], weights.down_bias, hidden)]
        {
            let bytes = width * size_of::<f32>();
            for (place, &expert) in (first..).zip(experts) {
                let (from, to) = (biases.address() + (expert * bytes) as u64, to + (place * bytes) as u64);
                // SAFETY: the biases of an expert, and the caller's promise.
                unsafe { event::copy_on_device(on, to, from, bytes)? };
            }
        }
        Ok(())
    }

    /// For tests: fills staging and `count` places from number `first` on with NaN.
    ///
    /// # Safety
    /// Nothing else uses them until the fills have ended.
    pub(super) unsafe fn poison(
        &self,
        places: &CudaExperts,
        (first, count): (usize, usize),
        on: &Stream,
    ) -> Result<(), CudaFault> {
        let [gate_up, down] = places.format().matrix_bytes(places.hidden(), places.inter());
        for (at, bytes) in [(places.weights().gate_up, gate_up), (places.weights().down, down)] {
            // SAFETY: the caller's promise.
            unsafe { event::fill(on, at + (first * bytes) as u64, 0xff, count * bytes)? };
        }
        Ok(())
    }
}

impl Staging {
    /// For tests: fills it with NaN.
    ///
    /// # Safety
    /// Nothing else uses it until the fill has ended.
    pub(super) unsafe fn poison(&self, on: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the caller's promise.
        unsafe { event::fill(on, self.memory.address(), 0xff, self.memory.len()) }
    }
}

/// Whether a kernel rewrites experts of this form to the format that this GPU multiplies.
fn is_rewritten(format: DeviceFormat, of_host: &HostLayer) -> bool {
    let is_plain =
        |form: WeightFormat| matches!(form, WeightFormat::Bf16 | WeightFormat::F16 | WeightFormat::F32);
    format == DeviceFormat::Bf16 && of_host.forms.iter().all(|form| is_plain(form.format))
}
