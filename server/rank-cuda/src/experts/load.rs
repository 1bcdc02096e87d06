//! Weights from a mapped checkpoint to panels: the host fills one pinned buffer while the other's copy and packing run.

#![allow(unsafe_code, reason = "asynchronous copies and kernel launches")]

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::experts::{PACK_DOWN, PACK_GATE_UP, PackParams, pack, pack_narrow};
use expertd_kernels::launch::LaunchError;
use half::bf16;
use rayon::prelude::*;

use super::narrow::Parts;
use super::{CudaExperts, Held, HostBuffer, padded};
use expertd_model::ExpertWeights;
use expertd_model::{MatrixView, WeightFormat};

/// Why an expert could not be brought to the device.
#[derive(Debug, thiserror::Error)]
pub enum PackFailure {
    /// The driver.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The copy.
    #[error("copying weights to the device failed: {0}")]
    Copy(String),
    /// The matrices are stored in a way that the kernels do not work with.
    #[error("device cuda: {0}")]
    Unsupported(String),
}

/// One of the two ways to the device.
#[derive(Debug)]
struct Lane {
    // Drained before its buffers go: see the drop of `Loader`.
    stream: Stream,
    host: HostBuffer,
    staged: Buffer<u16>,
}

/// Brings experts to the device, one at a time.
#[derive(Debug)]
pub struct Loader<'a> {
    pool: &'a rayon::ThreadPool,
    lanes: [Lane; 2],
    next: usize,
}

impl<'a> Loader<'a> {
    /// For experts of at most `hidden` times `inter`, in any format: none takes more than bf16 does.
    ///
    /// # Errors
    /// When memory is short.
    pub fn new(
        device: &Device,
        pool: &'a rayon::ThreadPool,
        hidden: usize,
        inter: usize,
    ) -> Result<Self, DeviceError> {
        // FP8 takes half of bf16's bytes and its scales, and pads the intermediate size further where it is multiplied as FP8.
        let elements = 3 * padded(hidden) * Held::W8a8.padded_inter(inter);
        let lane = || {
            Ok::<_, DeviceError>(Lane {
                stream: device.stream()?,
                host: HostBuffer::new(device, elements * 2)?,
                staged: Buffer::zeroed(device, elements)?,
            })
        };
        Ok(Loader { pool, lanes: [lane()?, lane()?], next: 0 })
    }

    /// Begins to bring expert `index` of `experts` to the device.
    ///
    /// # Errors
    /// The driver's.
    pub fn load(
        &mut self,
        experts: &mut CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(), PackFailure> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let lane = &mut self.lanes[self.next];
        self.next = 1 - self.next;
        lane.stream.synchronize()?;
        if let Some(biases) = &weights.biases {
            let at = index * 2 * inter;
            experts.host_gate_up_bias[at..][..biases.gate.len()].copy_from_slice(biases.gate);
            experts.host_gate_up_bias[at + inter..][..biases.up.len()].copy_from_slice(biases.up);
            experts.host_down_bias[index * hidden..][..biases.down.len()].copy_from_slice(biases.down);
        }
        match experts.held {
            Held::Bf16 => lane.load_bf16(self.pool, experts, index, weights),
            Held::Fp8 | Held::W8a8 | Held::Mxfp4 => lane.load_narrow(self.pool, experts, index, weights),
        }
    }

    /// Waits until everything has arrived.
    ///
    /// # Errors
    /// The first error of any copy or kernel.
    pub fn finish(&self) -> Result<(), DeviceError> {
        self.lanes.iter().try_for_each(|lane| lane.stream.synchronize())
    }
}

impl Lane {
    fn load_bf16(
        &mut self,
        pool: &rayon::ThreadPool,
        experts: &CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(), PackFailure> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let matrix = hidden * inter;
        let [gate, up, down] = {
            // SAFETY: `Loader::load` has drained the lane's stream, so no copy reads the buffer.
            let host = unsafe { self.host.as_mut_slice::<u16>(3 * matrix) };
            let (gate, rest) = host.split_at_mut(matrix);
            let (up, down) = rest.split_at_mut(matrix);
            [gate, up, down]
        };
        pool.install(|| {
            fill(&weights.gate, hidden, gate);
            fill(&weights.up, hidden, up);
            fill(&weights.down, inter, down);
        });
        self.copy(3 * matrix * 2)?;
        let staged = self.staged.address();
        let common = PackParams {
            first: staged,
            second: staged + 2 * matrix as u64,
            panels: experts.gate_up.address + (index * 2 * matrix * 2) as u64,
            expert_stride: matrix as u64,
            experts: 1,
            hidden: hidden as i32,
            inter: inter as i32,
            kind: PACK_GATE_UP,
        };
        let down = PackParams {
            first: staged + 4 * matrix as u64,
            second: 0,
            panels: experts.down.address + (index * matrix * 2) as u64,
            kind: PACK_DOWN,
            ..common
        };
        // SAFETY: source and destination are live buffers of those sizes, and the copy comes first on the stream.
        unsafe {
            pack(&common, self.stream.raw())?;
            pack(&down, self.stream.raw())?;
        }
        Ok(())
    }

    fn load_narrow(
        &mut self,
        pool: &rayon::ThreadPool,
        experts: &CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(), PackFailure> {
        let (held, hidden, inter) = (experts.held, experts.hidden, experts.inter);
        let parts = Parts::new(held, hidden, inter);
        // SAFETY: as for bf16.
        let to = unsafe { self.host.as_mut_slice::<u8>(parts.bytes) };
        pool.install(|| parts.fill(weights, to)).map_err(PackFailure::Unsupported)?;
        self.copy(parts.bytes)?;
        let matrices = [&experts.gate_up, &experts.down];
        let row_scales = [(&experts.gate_up_scale, 2 * inter), (&experts.down_scale, hidden)];
        let bytes = held.matrix_bytes(hidden, inter);
        for (i, mut pack) in parts.packs(self.staged.address()).into_iter().enumerate() {
            let (scales, len) = row_scales[i];
            pack.units = matrices[i].address + (index * bytes[i]) as u64;
            pack.row_scales = scales.as_ref().map_or(0, |scales| scales.address() + (index * len * 4) as u64);
            // SAFETY: as for bf16.
            unsafe { pack_narrow(&pack, self.stream.raw())? };
        }
        Ok(())
    }

    /// Begins to copy what is in the host's buffer.
    fn copy(&self, bytes: usize) -> Result<(), PackFailure> {
        assert!(bytes <= self.staged.len() * 2, "{bytes} bytes of an expert in a smaller buffer");
        // SAFETY: both buffers are as long; they are touched again only after the stream was drained.
        let status = unsafe {
            cudarc::driver::sys::cuMemcpyHtoDAsync_v2(
                self.staged.address(),
                self.host.as_ptr().cast(),
                bytes,
                self.stream.raw(),
            )
        };
        status.result().map_err(|error| PackFailure::Copy(format!("{error:?}")))
    }
}

impl Drop for Loader<'_> {
    fn drop(&mut self) {
        // An error has been or will be reported by a call that can return it.
        let _ = self.finish();
    }
}

/// A matrix as bf16 rows of `cols` elements, padded with zeros.
#[must_use]
pub fn to_bf16(view: &MatrixView<'_>, cols: usize) -> Vec<u16> {
    let mut rows = vec![0; view.rows * cols];
    fill(view, cols, &mut rows);
    rows
}

/// Writes `view` as bf16 rows of `cols` elements; what is beyond it becomes zero.
fn fill(view: &MatrixView<'_>, cols: usize, to: &mut [u16]) {
    to.par_chunks_mut(cols).enumerate().for_each(|(row, to)| {
        if row >= view.rows {
            to.fill(0);
            return;
        }
        let (values, padding) = to.split_at_mut(view.cols);
        padding.fill(0);
        if view.format == WeightFormat::Bf16 && view.col_stride == 1 {
            let start = row * view.row_stride * 2;
            bytemuck::cast_slice_mut::<u16, u8>(values)
                .copy_from_slice(&view.data[start..start + view.cols * 2]);
        } else {
            for (col, value) in values.iter_mut().enumerate() {
                *value = bf16::from_f32(view.value(row, col)).to_bits();
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use expertd_model::Scales;

    #[test]
    fn matrices_are_rounded_and_padded() {
        let values: Vec<f32> = (0..15).map(|i| i as f32 * 0.3 - 2.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut view = MatrixView {
            format: WeightFormat::F32,
            data: &bytes,
            rows: 3,
            cols: 5,
            row_stride: 5,
            col_stride: 1,
            scales: Scales::None,
        };
        let mut to = vec![0xffff_u16; 4 * 8];
        fill(&view, 8, &mut to);
        for row in 0..4 {
            for col in 0..8 {
                let expected =
                    if row < 3 && col < 5 { bf16::from_f32(values[row * 5 + col]).to_bits() } else { 0 };
                assert_eq!(to[row * 8 + col], expected, "({row}, {col})");
            }
        }
        // The same matrix stored the other way round, in bf16.
        let stored: Vec<u8> =
            (0..15).flat_map(|i| bf16::from_f32(values[i % 3 * 5 + i / 3]).to_bits().to_le_bytes()).collect();
        view = MatrixView { format: WeightFormat::Bf16, data: &stored, row_stride: 1, col_stride: 3, ..view };
        let mut again = vec![0xffff_u16; 4 * 8];
        fill(&view, 8, &mut again);
        assert_eq!(to, again);
    }
}
