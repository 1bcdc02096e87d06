//! Uploads weights from a mapped checkpoint to panels: the host fills one pinned buffer while the device copies and packs the
//! other, or only copies it.

#![allow(unsafe_code, reason = "asynchronous copies and kernel launches")]

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream, write_device};
use expertd_kernels::experts::{
    PACK_DOWN, PACK_GATE_UP, PANEL, PackParams, UNIT_ROWS, pack, pack_host, pack_narrow, pack_narrow_host,
};
use expertd_kernels::launch::LaunchError;
use half::bf16;
use rayon::prelude::*;

use super::grouped::{fill_row, is_grouped};
use super::narrow::{ExpertLayout, Filled};
use super::{CudaExperts, DeviceFormat, HostBuffer, padded};
use expertd_model::ExpertWeights;
use expertd_model::{MatrixView, WeightFormat};

/// Why an expert could not be uploaded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum UploadError {
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("copying weights to the device failed: {0}")]
    Copy(String),
    #[error("device cuda: {0}")]
    Unsupported(String),
}

/// Where rows become panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackOn {
    /// On the device, by kernels.
    Device,
    /// On the host, by threads: the device only copies. For devices whose multiprocessors serve another process meanwhile.
    Host,
}

/// Memory for an expert before it is packed.
#[derive(Debug)]
enum Unpacked {
    /// A copy of the pinned buffer on the device.
    Device(Buffer<u16>),
    /// Rows on the host, which are packed to the pinned buffer.
    Host(Vec<u64>),
}

/// 16-bit elements of an expert that is not packed, in any format.
const fn unpacked_elements(hidden: usize, inter: usize) -> usize {
    // FP8 needs half of bf16's bytes plus scales; FP8 products also pad the intermediate size to a larger unit.
    3 * padded(hidden) * DeviceFormat::W8a8.padded_inter(inter)
}

/// Pinned memory of an [`Uploader`], in bytes. Its device memory has the same size.
#[must_use]
pub const fn upload_bytes(hidden: usize, inter: usize) -> usize {
    2 * 2 * unpacked_elements(hidden, inter)
}

/// A pinned host buffer, memory for an unpacked expert, and the stream that copies and packs.
#[derive(Debug)]
struct UploadBuffer {
    // `Uploader` drains the stream before it drops the buffers.
    stream: Stream,
    host: HostBuffer,
    unpacked: Unpacked,
}

/// Uploads experts, one per call, through two buffers in turn.
#[derive(Debug)]
pub struct Uploader<'a> {
    pool: &'a rayon::ThreadPool,
    buffers: [UploadBuffer; 2],
    next: usize,
}

impl<'a> Uploader<'a> {
    /// Makes buffers for experts of at most `hidden` × `inter`, in any format. No format needs more bytes than bf16, packed or
    /// not.
    ///
    /// # Errors
    /// If there is not enough host or device memory.
    pub fn new(
        device: &Device,
        pool: &'a rayon::ThreadPool,
        hidden: usize,
        inter: usize,
        pack_on: PackOn,
    ) -> Result<Self, DeviceError> {
        let elements = unpacked_elements(hidden, inter);
        let buffer = || {
            Ok::<_, DeviceError>(UploadBuffer {
                stream: device.stream()?,
                host: HostBuffer::new(device, elements * 2)?,
                unpacked: match pack_on {
                    PackOn::Device => Unpacked::Device(Buffer::zeroed(device, elements)?),
                    PackOn::Host => Unpacked::Host(vec![0; elements.div_ceil(4)]),
                },
            })
        };
        Ok(Uploader { pool, buffers: [buffer()?, buffer()?], next: 0 })
    }

    /// Starts to upload expert `index` of `experts`.
    ///
    /// # Errors
    /// If the device fails or the matrices do not fit the device format.
    pub fn load(
        &mut self,
        experts: &CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<Filled, UploadError> {
        let (hidden, inter) = (experts.hidden, experts.inter);
        let buffer = &mut self.buffers[self.next];
        self.next = 1 - self.next;
        buffer.stream.synchronize()?;
        if let Some(biases) = &weights.biases {
            let mut gate_up = vec![0.0_f32; 2 * inter];
            gate_up[..biases.gate.len()].copy_from_slice(biases.gate);
            gate_up[inter..][..biases.up.len()].copy_from_slice(biases.up);
            let mut down = vec![0.0_f32; hidden];
            down[..biases.down.len()].copy_from_slice(biases.down);
            let places = [experts.weights.gate_up_bias, experts.weights.down_bias];
            for (place, values) in places.into_iter().zip([gate_up, down]) {
                let at = place + (index * values.len() * size_of::<f32>()) as u64;
                // SAFETY: the place has room for as many values of each expert, and nothing else accesses this expert's.
                unsafe { write_device(at, bytemuck::cast_slice(&values))? };
            }
        }
        match experts.format {
            DeviceFormat::Bf16 => {
                buffer.load_bf16(self.pool, experts, index, weights)?;
                Ok(Filled { block_scales: true })
            }
            _ => buffer.load_narrow(self.pool, experts, index, weights),
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
        let rows: &mut [u16] = match &mut self.unpacked {
            // SAFETY: `Uploader::load` has drained the buffer's stream, so no copy reads the buffer.
            Unpacked::Device(_) => unsafe { self.host.as_mut_slice(3 * matrix) },
            Unpacked::Host(rows) => &mut bytemuck::cast_slice_mut(rows)[..3 * matrix],
        };
        pool.install(|| {
            let (gate, rest) = rows.split_at_mut(matrix);
            let (up, down) = rest.split_at_mut(matrix);
            fill(&weights.gate, hidden, gate);
            fill(&weights.up, hidden, up);
            fill(&weights.down, inter, down);
        });
        let places = [
            experts.weights.gate_up + (index * 2 * matrix * 2) as u64,
            experts.weights.down + (index * matrix * 2) as u64,
        ];
        let packed = self.host.as_ptr() as u64;
        let (rows, panels) = match &self.unpacked {
            Unpacked::Device(staged) => {
                self.copy(0, staged.address(), 3 * matrix * 2)?;
                (staged.address(), places)
            }
            Unpacked::Host(rows) => (rows.as_ptr() as u64, [packed, packed + 4 * matrix as u64]),
        };
        let gate_up = PackParams {
            first: rows,
            second: rows + 2 * matrix as u64,
            panels: panels[0],
            expert_stride: matrix as u64,
            experts: 1,
            hidden: hidden as i32,
            inter: inter as i32,
            kind: PACK_GATE_UP,
        };
        let first = rows + 4 * matrix as u64;
        let down = PackParams { first, second: 0, panels: panels[1], kind: PACK_DOWN, ..gate_up };
        if let Unpacked::Device(_) = self.unpacked {
            // SAFETY: source and destination are live buffers of those sizes, and the stream runs the copy before the kernels.
            unsafe {
                pack(&gate_up, self.stream.raw())?;
                pack(&down, self.stream.raw())?;
            }
            return Ok(());
        }
        for (params, k) in [(gate_up, hidden), (down, inter)] {
            // SAFETY: source and destination are live host buffers of those sizes, each panel is written once, and no copy reads
            // the destination.
            let of = |panel: u64| unsafe { pack_host(&params, panel..panel + 1) };
            pool.install(|| (0..(k / PANEL) as u64).into_par_iter().try_for_each(of))?;
        }
        self.copy(0, places[0], 4 * matrix)?;
        self.copy(4 * matrix, places[1], 2 * matrix)
    }

    fn load_narrow(
        &mut self,
        pool: &rayon::ThreadPool,
        experts: &CudaExperts,
        index: usize,
        weights: &ExpertWeights<'_>,
    ) -> Result<Filled, UploadError> {
        let (format, hidden, inter) = (experts.format, experts.hidden, experts.inter);
        let layout = ExpertLayout::new(format, hidden, inter);
        let rows: &mut [u8] = match &mut self.unpacked {
            // SAFETY: as for bf16.
            Unpacked::Device(_) => unsafe { self.host.as_mut_slice(layout.bytes) },
            Unpacked::Host(rows) => &mut bytemuck::cast_slice_mut(rows)[..layout.bytes],
        };
        let filled = pool.install(|| layout.fill(weights, rows)).map_err(UploadError::Unsupported)?;
        let source = match &self.unpacked {
            Unpacked::Device(staged) => {
                self.copy(0, staged.address(), layout.bytes)?;
                staged.address()
            }
            Unpacked::Host(rows) => rows.as_ptr() as u64,
        };
        let of = experts.weights;
        let row_counts = [2 * inter, hidden];
        let mut at = 0;
        for (i, mut params) in layout.packs(source).into_iter().enumerate() {
            let (bytes, rows) = (format.matrix_bytes(hidden, inter)[i], row_counts[i]);
            let units = [of.gate_up, of.down][i] + (index * bytes) as u64;
            let row_scales = [of.gate_up_scale, of.down_scale][i] + (index * rows * 4) as u64;
            if let Unpacked::Device(_) = self.unpacked {
                (params.units, params.row_scales) = (units, row_scales);
                // SAFETY: as for bf16.
                unsafe { pack_narrow(&params, self.stream.raw())? };
                continue;
            }
            let packed = self.host.as_ptr() as u64;
            (params.units, params.row_scales) = (packed + at as u64, packed + (at + bytes) as u64);
            // SAFETY: as for bf16, for units.
            let pack_unit = |unit: u64| unsafe { pack_narrow_host(&params, unit..unit + 1) };
            pool.install(|| (0..(rows / UNIT_ROWS) as u64).into_par_iter().try_for_each(pack_unit))?;
            self.copy(at, units, bytes)?;
            self.copy(at + bytes, row_scales, rows * 4)?;
            at += (bytes + rows * 4).next_multiple_of(64);
        }
        Ok(filled)
    }

    /// Starts to copy `bytes` bytes at `offset` of the host's buffer to device address `to`.
    fn copy(&self, offset: usize, to: u64, bytes: usize) -> Result<(), UploadError> {
        let room = self.host.bytes();
        assert!(offset + bytes <= room, "an expert of {bytes} bytes exceeds the upload buffer of {room}");
        // SAFETY: the host's buffer has these bytes, and they are not accessed again before the stream is drained; the
        // destination is the buffer's copy on the device or a place of this expert.
        let status = unsafe {
            cudarc::driver::sys::cuMemcpyHtoDAsync_v2(
                to,
                self.host.as_ptr().add(offset).cast(),
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
pub(super) fn fill(view: &MatrixView<'_>, cols: usize, to: &mut [u16]) {
    to.par_chunks_mut(cols).enumerate().for_each_init(Vec::new, |codes, (row, to)| {
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
        } else if is_grouped(view) {
            fill_row(view, row, codes, values);
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
    use expertd_model::{Packing, Scales};

    #[test]
    fn matrices_are_rounded_and_padded() {
        let values: Vec<f32> = (0..15).map(|i| i as f32 * 0.3 - 2.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut view = MatrixView {
            format: WeightFormat::F32,
            packing: Packing::Strided,
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
            packing: Packing::Strided,
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
