//! How an expert of a CPU rank comes to this GPU: a copy engine fills staging with it as CPU ranks have it, and kernels rewrite it to
//! panels.

#![allow(unsafe_code, reason = "copies and kernels work on memory that Rust only sees as addresses")]

use std::sync::Arc;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event;
use expertd_kernels::experts::{self, RepackParams};
use expertd_model::ModelSpec;

use super::memory::{HostExpert, HostExperts, HostLayer};
use crate::engine::fault::CudaFault;
use crate::engine::layers::Layer;
use crate::experts::{CudaExperts, DeviceFormat, WeightSpace, padded, rewriting};

/// Experts that are no neighbours in host memory begin at multiples of it in staging.
const ALIGNMENT: usize = 256;

/// Device memory for experts as CPU ranks have them.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Buffer<u8>,
    device: Device,
}

/// Distance of experts of `bytes` bytes in staging: that of the first two in host memory if little lies between them.
fn stride(experts: &[HostExpert], bytes: usize) -> usize {
    let padded = bytes.next_multiple_of(ALIGNMENT);
    match experts {
        [a, b, ..] if a.memory == b.memory => {
            let distance = b.at.checked_sub(a.at).filter(|distance| (bytes..=padded).contains(distance));
            distance.unwrap_or(padded)
        }
        _ => padded,
    }
}

/// Whether expert `b` lies behind `a` in host memory as it does in staging.
fn is_next(a: &HostExpert, b: &HostExpert, stride: usize) -> bool {
    a.memory == b.memory && a.at + stride == b.at
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
    /// How gate and up, and down, are rewritten, without addresses and sizes.
    rewriting: [RepackParams; 2],
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
            let of_both = layer.zip(of_host).and_then(|(layer, of_host)| {
                let [gate_up, down] = of_host.matrices.map(|matrix| rewriting(&matrix.form, layer.format));
                Some((layer, of_host, [gate_up?, down?]))
            });
            let copy = of_both.map(|(layer, of_host, rewriting)| {
                HostCopy::new(device, spec.hidden, layer, (of_host, rewriting)).map(Arc::new)
            });
            copy.transpose()
        };
        layers.iter().map(of).collect()
    }

    fn new(
        device: &Device,
        hidden: usize,
        layer: &Layer,
        (of_host, rewriting): (HostLayer, [RepackParams; 2]),
    ) -> Result<Self, DeviceError> {
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
            stride: stride(&of_host.experts, of_host.bytes),
            of_host,
            rewriting,
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
        let has_biases = self.biases.is_some();
        let mut places = CudaExperts::place(space, self.format, count, self.hidden, self.width, has_biases);
        places.set_block_scales(self.of_host.matrices.iter().all(|matrix| matrix.form.has_square_scales));
        places
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
        let mut place = 0;
        // Neighbours are one copy: between two of them the link is idle.
        let follows = |a: usize, b: usize| is_next(&self.experts()[a], &self.experts()[b], self.stride);
        for run in experts.chunk_by(|&a, &b| follows(a, b)) {
            let bytes = (run.len() - 1) * self.stride + self.bytes();
            for (from, range) in host.pieces(&self.experts()[run[0]], bytes) {
                let to = place * self.stride + range.start;
                assert!(to + range.len() <= staging.memory.len(), "the experts fit staging");
                // SAFETY: within staging (asserted), which nothing else uses, and within a pinned piece of sealed memory (the caller's
                // promise).
                unsafe {
                    event::copy_to_device(on, staging.memory.address() + to as u64, from, range.len())?;
                }
            }
            place += run.len();
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
        let rows = [2 * inter, hidden];
        let at = |base: u64, bytes: usize| if base == 0 { 0 } else { base + (first * bytes) as u64 };
        for (matrix, panels, row_scales, panel_stride, rows) in [
            (0, weights.gate_up, weights.gate_up_scale, gate_up, rows[0]),
            (1, weights.down, weights.down_scale, down, rows[1]),
        ] {
            let from = &self.of_host.matrices[matrix];
            let params = RepackParams {
                source: staged + from.elements_at as u64,
                scales: from.scales_at.map_or(0, |offset| staged + offset as u64),
                panels: at(panels, panel_stride),
                row_scales: at(row_scales, rows * size_of::<f32>()),
                source_stride: self.stride as u64,
                panel_stride: panel_stride as u64,
                experts: experts.len() as i32,
                hidden: hidden as i32,
                inter: inter as i32,
                ..self.rewriting[matrix]
            };
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
        let weights = places.weights();
        let parts = [
            (weights.gate_up, gate_up),
            (weights.down, down),
            (weights.gate_up_scale, 2 * places.inter() * size_of::<f32>()),
            (weights.down_scale, places.hidden() * size_of::<f32>()),
        ];
        for (at, bytes) in parts.into_iter().filter(|(at, _)| *at != 0) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(places: &[(usize, usize)]) -> Vec<HostExpert> {
        (0..).zip(places).map(|(expert, &(memory, at))| HostExpert { expert, memory, at }).collect()
    }

    #[test]
    fn staging_has_the_distance_of_neighbours() {
        let of = |places: &[_]| stride(&experts(places), 1000);
        assert_eq!(of(&[(0, 64), (0, 1088), (0, 5000)]), 1024, "1000 bytes and padding");
        let apart =
            [&[(0, 64), (0, 1344)][..], &[(0, 64), (1, 1088)], &[(0, 1088), (0, 64)], &[(0, 64)], &[]];
        assert_eq!(apart.map(of), [1024; 5], "something lies between them, or there is no second one");
        assert_eq!(stride(&experts(&[(0, 0), (0, 1088)]), 1025), 1088, "no multiple of the alignment");
    }

    #[test]
    fn only_neighbours_are_one_copy() {
        let experts = experts(&[(0, 0), (0, 1088), (0, 2176), (1, 3264), (0, 9000), (0, 7912)]);
        let runs = |chosen: &[usize]| {
            let runs = chosen.chunk_by(|&a, &b| is_next(&experts[a], &experts[b], 1088));
            runs.map(<[usize]>::len).collect::<Vec<_>>()
        };
        assert_eq!(runs(&[0, 1, 2, 3, 4, 5]), [3, 1, 1, 1], "another memory, a gap, and the wrong order");
        assert_eq!([runs(&[0, 2]), runs(&[1, 0]), runs(&[5, 4])], [vec![1, 1], vec![1, 1], vec![2]]);
    }
}
