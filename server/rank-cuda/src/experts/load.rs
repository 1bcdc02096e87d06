//! Uploads weights from a mapped checkpoint to panels: the host fills one pinned buffer while the device copies and packs the
//! other.

#![allow(unsafe_code, reason = "asynchronous copies and kernel launches")]

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::experts::{PACK_DOWN, PACK_GATE_UP, PackParams, pack, pack_narrow};
use expertd_kernels::launch::LaunchError;
use half::bf16;
use rayon::prelude::*;

use super::narrow::{ExpertLayout, has_block_scales};
use super::{CudaExperts, DeviceFormat, HostBuffer, padded};
use expertd_model::ExpertWeights;
use expertd_model::{MatrixView, WeightFormat};

/// Why an expert could not be uploaded.
#[derive(Debug, thiserror::Error)]
pub enum UploadError {
    /// The CUDA driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A kernel could not be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The copy to the device failed.
    #[error("copying weights to the device failed: {0}")]
    Copy(String),
    /// The kernels do not support the way in which the matrices are stored.
    #[error("device cuda: {0}")]
    Unsupported(String),
}

/// A pinned host buffer, its copy on the device, and the stream that fills and packs that copy.
#[derive(Debug)]
struct UploadBuffer {
    // `Uploader` drains the stream before it drops the buffers.
    stream: Stream,
    host: HostBuffer,
    staged: Buffer<u16>,
}

/// Uploads experts, one per call, through two buffers in turn.
#[derive(Debug)]
pub struct Uploader<'a> {
    pool: &'a rayon::ThreadPool,
    buffers: [UploadBuffer; 2],
    next: usize,
}

impl<'a> Uploader<'a> {
    /// Makes buffers for experts of at most `hidden` × `inter`, in any format. No format needs more bytes than bf16.
    ///
    /// # Errors
    /// If there is not enough host or device memory.
    pub fn new(
        device: &Device,
        pool: &'a rayon::ThreadPool,
        hidden: usize,
        inter: usize,
    ) -> Result<Self, DeviceError> {
        // FP8 needs half of bf16's bytes plus scales; FP8 products also pad the intermediate size to a larger unit.
        let elements = 3 * padded(hidden) * DeviceFormat::W8a8.padded_inter(inter);
        let buffer = || {
            Ok::<_, DeviceError>(UploadBuffer {
                stream: device.stream()?,
                host: HostBuffer::new(device, elements * 2)?,
                staged: Buffer::zeroed(device, elements)?,
            })
        };
        Ok(Uploader { pool, buffers: [buffer()?, buffer()?], next: 0 })
    }

    /// Starts to upload expert `index` of `experts`.
    ///
    /// # Errors
    /// If the device fails or the kernels do not support the matrices.
    pub fn load(
        &mut self,
        experts: &mut CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(), UploadError> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let buffer = &mut self.buffers[self.next];
        self.next = 1 - self.next;
        buffer.stream.synchronize()?;
        if let Some(biases) = &weights.biases {
            let at = index * 2 * inter;
            experts.host_gate_up_bias[at..][..biases.gate.len()].copy_from_slice(biases.gate);
            experts.host_gate_up_bias[at + inter..][..biases.up.len()].copy_from_slice(biases.up);
            experts.host_down_bias[index * hidden..][..biases.down.len()].copy_from_slice(biases.down);
        }
        let matrices = [&weights.gate, &weights.up, &weights.down];
        experts.has_block_scales &= matrices.into_iter().all(has_block_scales);
        match experts.format {
            DeviceFormat::Bf16 => buffer.load_bf16(self.pool, experts, index, weights),
            DeviceFormat::Fp8 | DeviceFormat::W8a8 | DeviceFormat::Mxfp4 => {
                buffer.load_narrow(self.pool, experts, index, weights)
            }
        }
    }

    /// Waits until all experts are on the device.
    ///
    /// # Errors
    /// The first error of any copy or kernel.
    pub fn finish(&self) -> Result<(), DeviceError> {
        self.buffers.iter().try_for_each(|buffer| buffer.stream.synchronize())
    }
}

impl UploadBuffer {
    fn load_bf16(
        &mut self,
        pool: &rayon::ThreadPool,
        experts: &CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<(), UploadError> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let matrix = hidden * inter;
        let [gate, up, down] = {
            // SAFETY: `Uploader::load` has drained the buffer's stream, so no copy reads the buffer.
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
        // SAFETY: source and destination are live buffers of those sizes, and the stream runs the copy before the kernels.
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
    ) -> Result<(), UploadError> {
        let (format, hidden, inter) = (experts.format, experts.hidden, experts.inter);
        let layout = ExpertLayout::new(format, hidden, inter);
        // SAFETY: as for bf16.
        let to = unsafe { self.host.as_mut_slice::<u8>(layout.bytes) };
        pool.install(|| layout.fill(weights, to)).map_err(UploadError::Unsupported)?;
        self.copy(layout.bytes)?;
        let matrices = [&experts.gate_up, &experts.down];
        let row_scales = [(&experts.gate_up_scale, 2 * inter), (&experts.down_scale, hidden)];
        let bytes = format.matrix_bytes(hidden, inter);
        for (i, mut pack) in layout.packs(self.staged.address()).into_iter().enumerate() {
            let (scales, len) = row_scales[i];
            pack.units = matrices[i].address + (index * bytes[i]) as u64;
            pack.row_scales = scales.as_ref().map_or(0, |scales| scales.address() + (index * len * 4) as u64);
            // SAFETY: as for bf16.
            unsafe { pack_narrow(&pack, self.stream.raw())? };
        }
        Ok(())
    }

    /// Starts to copy the first `bytes` of the host's buffer to the device.
    fn copy(&self, bytes: usize) -> Result<(), UploadError> {
        assert!(bytes <= self.staged.len() * 2, "an expert of {bytes} bytes exceeds the upload buffer");
        // SAFETY: both buffers have at least `bytes` bytes, and neither is accessed again before the stream is drained.
        let status = unsafe {
            cudarc::driver::sys::cuMemcpyHtoDAsync_v2(
                self.staged.address(),
                self.host.as_ptr().cast(),
                bytes,
                self.stream.raw(),
            )
        };
        status.result().map_err(|error| UploadError::Copy(format!("{error:?}")))
    }
}

impl Drop for Uploader<'_> {
    fn drop(&mut self) {
        // `finish` has reported the error, or the load has already failed.
        let _ = self.finish();
    }
}

/// Converts a matrix to bf16 rows of `cols` elements, padded with zeros. The second value is what rounding took, in bf16 and in the
/// same layout; `None` if it took nothing. An element that bf16 rounds to infinity leaves zero.
#[must_use]
pub fn bf16_parts(view: &MatrixView<'_>, cols: usize) -> (Vec<u16>, Option<Vec<u16>>) {
    let mut high = vec![0; view.rows * cols];
    if view.format == WeightFormat::Bf16 {
        fill(view, cols, &mut high);
        return (high, None);
    }
    let mut low = vec![0; high.len()];
    high.par_chunks_mut(cols).zip(low.par_chunks_mut(cols)).enumerate().for_each(|(row, (high, low))| {
        for (col, (high, low)) in high.iter_mut().zip(low).take(view.cols).enumerate() {
            let value = view.value(row, col);
            let rounded = bf16::from_f32(value);
            *high = rounded.to_bits();
            let difference = value - rounded.to_f32();
            if difference.is_finite() {
                *low = bf16::from_f32(difference).to_bits();
            }
        }
    });
    let low = low.iter().any(|bits| bits & 0x7fff != 0).then_some(low);
    (high, low)
}

/// Writes `view` as bf16 rows of `cols` elements; elements outside the matrix are zero.
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
        // The same matrix in bf16, stored column by column.
        let stored: Vec<u8> =
            (0..15).flat_map(|i| bf16::from_f32(values[i % 3 * 5 + i / 3]).to_bits().to_le_bytes()).collect();
        view = MatrixView { format: WeightFormat::Bf16, data: &stored, row_stride: 1, col_stride: 3, ..view };
        let mut again = vec![0xffff_u16; 4 * 8];
        fill(&view, 8, &mut again);
        assert_eq!(to, again);
        assert_eq!(bf16_parts(&view, 8), (to[..3 * 8].to_vec(), None));
    }

    #[test]
    fn what_rounding_takes_makes_up_for_it() {
        let mut values: Vec<f32> = (0..15).map(|i| i as f32 * 0.3 - 2.0).collect();
        values[7] = f32::MAX; // infinity in bf16
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = MatrixView {
            format: WeightFormat::F32,
            data: &bytes,
            rows: 3,
            cols: 5,
            row_stride: 5,
            col_stride: 1,
            scales: Scales::None,
        };
        let (high, low) = bf16_parts(&view, 8);
        let low = low.unwrap();
        let of = |bits: u16| bf16::from_bits(bits).to_f32();
        for (i, value) in values.iter().enumerate() {
            let at = i / 5 * 8 + i % 5;
            let sum = of(high[at]) + of(low[at]);
            if i == 7 {
                assert_eq!((sum, low[at]), (f32::INFINITY, 0));
            } else {
                assert!((sum - value).abs() <= value.abs() / 131_072.0, "{sum} for {value}");
            }
        }
        assert!((0..3).all(|row| low[row * 8 + 5..][..3] == [0; 3]));
        // Values that bf16 holds leave nothing.
        let bytes: Vec<u8> = (0..15).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let exact = MatrixView { data: &bytes, ..view };
        assert_eq!(bf16_parts(&exact, 8).1, None);
    }
}
