//! Experts that are packed on the host have the bytes that kernels pack.
#![allow(clippy::unwrap_used, unsafe_code, reason = "tests read and write device memory")]

use expertd_kernels::device::{Device, ShareableMemory, fill_device, read_device};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::{CudaExperts, DeviceFormat, PackOn, Uploader, WeightSpace};
use expertd_model::{
    ExpertBiases, ExpertWeights, GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat,
    ZeroPoints,
};

const EXPERTS: usize = 3;

/// Columns of a group of INT4 scales.
const GROUP: usize = 32;

/// Random codes and scales of one matrix.
pub(super) struct Stored {
    data: Vec<u8>,
    scales: Vec<f32>,
    /// Exponents of MXFP4 and MXFP8; scales of NVFP4.
    exponents: Vec<u8>,
    /// Zero points of INT4, if it has them.
    pub(super) zeros: Option<Vec<u8>>,
    rows: usize,
    cols: usize,
}

impl Stored {
    pub(super) fn draw(format: WeightFormat, rows: usize, cols: usize, random: &mut SmallRng) -> Self {
        let data = (0..(rows * cols * format.bits()).div_ceil(8)).map(|_| random.random()).collect();
        // f16 holds them.
        let scale = |_| half::f16::from_f32(random.random_range(0.1..2.0)).to_f32();
        let scales = (0..rows * cols.div_ceil(GROUP)).map(scale).collect();
        // Some are NaN, and some exponents exceed what bf16 multipliers hold.
        let exponents = (0..rows * cols.div_ceil(16)).map(|_| random.random()).collect();
        Stored { data, scales, exponents, zeros: None, rows, cols }
    }

    /// Adds random zero points.
    pub(super) fn add_zeros(&mut self, random: &mut SmallRng) {
        self.zeros =
            Some((0..(self.rows * self.cols.div_ceil(GROUP)).div_ceil(2)).map(|_| random.random()).collect());
    }

    /// Replaces FP8 codes that are NaN, and exponents by those whose values f32 holds.
    pub(super) fn leave_out_nan(&mut self, format: WeightFormat) {
        let clean = |codes: &mut [u8]| {
            codes.iter_mut().filter(|code| **code & 0x7f == 0x7f).for_each(|code| *code ^= 1);
        };
        clean(&mut self.data);
        match format {
            WeightFormat::Nvfp4 => clean(&mut self.exponents),
            _ => self.exponents.iter_mut().for_each(|code| *code = 90 + *code % 60),
        }
    }

    pub(super) fn view(&self, format: WeightFormat) -> MatrixView<'_> {
        let (rows, cols) = (self.rows, self.cols);
        let scales = match format {
            WeightFormat::Fp8E4m3 => {
                let blocks = rows.div_ceil(128) * cols.div_ceil(128);
                Scales::Block { values: self.scales[..blocks].into(), block_rows: 128, block_cols: 128 }
            }
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => {
                Scales::Mx { exponents: &self.exponents, row_stride: cols.div_ceil(32) }
            }
            WeightFormat::Int4 => Scales::Groups(GroupScales {
                cols: GROUP,
                format: ScaleFormat::F32,
                data: bytemuck::cast_slice(&self.scales),
                row_stride: cols.div_ceil(GROUP),
                group_stride: 1,
                factor: 1.0,
                zeros: self.zeros.as_deref().map(|data| ZeroPoints {
                    data,
                    packing: Packing::Strided,
                    row_stride: cols.div_ceil(GROUP),
                    group_stride: 1,
                    bias: 0,
                }),
            }),
            WeightFormat::Nvfp4 => Scales::Groups(GroupScales {
                cols: 16,
                format: ScaleFormat::Fp8E4m3,
                data: &self.exponents,
                row_stride: cols.div_ceil(16),
                group_stride: 1,
                factor: 0.003_71,
                zeros: None,
            }),
            _ => Scales::None,
        };
        MatrixView {
            format,
            packing: Packing::Strided,
            data: &self.data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales,
        }
    }
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn packing_on_the_host_gives_the_bytes_of_the_kernels() {
    // As a loader does, which chooses the kernels, too.
    let device = crate::engine::open::open(0).unwrap();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    let formats = [
        (WeightFormat::Bf16, DeviceFormat::Bf16),
        (WeightFormat::Fp8E4m3, DeviceFormat::Fp8),
        (WeightFormat::Fp8E4m3, DeviceFormat::W8a8),
        (WeightFormat::Mxfp4, DeviceFormat::Mxfp4),
        (WeightFormat::Mxfp4, DeviceFormat::W8a8),
        (WeightFormat::Int4, DeviceFormat::Int4),
        (WeightFormat::Int4, DeviceFormat::Int4Zeros),
        (WeightFormat::Int4, DeviceFormat::Bf16),
        (WeightFormat::Nvfp4, DeviceFormat::Nvfp4),
        (WeightFormat::Mxfp8, DeviceFormat::Mxfp8),
        (WeightFormat::Mxfp8, DeviceFormat::Bf16),
        (WeightFormat::Mxfp4, DeviceFormat::Bf16),
        (WeightFormat::Fp8E4m3, DeviceFormat::Bf16),
    ];
    for (stored, format) in formats {
        for (hidden, inter) in [(64, 64), (192, 320), (384, 160)] {
            let mut random = SmallRng::seed_from_u64(7);
            let experts: Vec<[Stored; 3]> = (0..EXPERTS)
                .map(|_| {
                    [(inter, hidden), (inter, hidden), (hidden, inter)].map(|(rows, cols)| {
                        let mut drawn = Stored::draw(stored, rows, cols, &mut random);
                        if format == DeviceFormat::Int4Zeros {
                            drawn.add_zeros(&mut random);
                        }
                        drawn
                    })
                })
                .collect();
            let bias = vec![0.5; hidden.max(inter)];
            let packed = [PackOn::Device, PackOn::Host].map(|pack_on| {
                let mut space = WeightSpace::counting();
                let _ = CudaExperts::place(&mut space, format, EXPERTS, hidden, inter, true);
                let memory = ShareableMemory::allocate(&device, space.bytes() as usize).unwrap();
                // SAFETY: the memory was just allocated.
                unsafe { fill_device(memory.address(), 0x5a, memory.bytes()) }.unwrap();
                let mut space = WeightSpace::at(memory.address());
                let placed = CudaExperts::place(&mut space, format, EXPERTS, hidden, inter, true);
                let mut uploader = Uploader::new(&device, &pool, hidden, inter, pack_on).unwrap();
                for (index, [gate, up, down]) in experts.iter().enumerate() {
                    let [gate, up, down] = [gate, up, down].map(|matrix| matrix.view(stored));
                    let biases =
                        ExpertBiases { gate: &bias[..inter], up: &bias[..inter], down: &bias[..hidden] };
                    let weights = ExpertWeights { gate, up, down, biases: Some(biases) };
                    uploader.load(&placed, index, &weights).unwrap();
                }
                uploader.finish().unwrap();
                let mut bytes = vec![0; space.bytes() as usize];
                // SAFETY: the memory has at least these bytes, and all work on it has ended.
                unsafe { read_device(memory.address(), &mut bytes) }.unwrap();
                bytes
            });
            let differs = packed[0].iter().zip(&packed[1]).position(|(device, host)| device != host);
            assert_eq!(differs, None, "{format:?}, {hidden} × {inter}: the first byte that differs");
        }
    }
}

/// Memory that is exported and imported again shows the same bytes after the exporter is gone, and cannot be written.
#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn exported_memory_outlives_its_allocation() {
    use std::os::fd::AsFd as _;
    let device = Device::open(0).unwrap();
    let memory = ShareableMemory::allocate(&device, 3 << 20).unwrap();
    let bytes = memory.bytes();
    // SAFETY: the memory was just allocated.
    unsafe { fill_device(memory.address(), 0x5a, bytes) }.unwrap();
    let fd = memory.export().unwrap();
    drop(memory);
    let imported = ShareableMemory::import(&device, fd.as_fd(), bytes).unwrap();
    assert!(imported.export().is_err(), "imported memory cannot be exported again");
    let mut read = vec![0; bytes];
    // SAFETY: the memory has these bytes.
    unsafe { read_device(imported.address(), &mut read) }.unwrap();
    assert!(read.iter().all(|byte| *byte == 0x5a));
    assert!(ShareableMemory::import(&device, fd.as_fd(), bytes + (64 << 20)).is_err());
}

/// Memory of a client is mapped only if it is what the client says.
#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn memory_of_a_client_is_checked() {
    use crate::engine::memories::import;
    use std::os::fd::AsFd as _;
    let device = Device::open(0).unwrap();
    let memory = ShareableMemory::allocate(&device, 3 << 20).unwrap();
    let (bytes, fd, uuid) = (memory.bytes(), memory.export().unwrap(), device.uuid().unwrap());
    let imported = import(&device, fd.as_fd(), bytes, uuid).unwrap();
    // SAFETY: both map the same bytes, and no kernel runs.
    unsafe { fill_device(imported.address(), 0x3c, bytes) }.unwrap();
    let mut read = vec![0; bytes];
    // SAFETY: the memory has these bytes.
    unsafe { read_device(memory.address(), &mut read) }.unwrap();
    assert!(read.iter().all(|byte| *byte == 0x3c), "it is written in place");
    let other = import(&device, fd.as_fd(), bytes, [7; 16]).unwrap_err();
    assert!(other.contains("the client names"), "{other}");
    let larger = import(&device, fd.as_fd(), bytes + (2 << 20), uuid).unwrap_err();
    assert!(larger.contains("cannot be mapped"), "{larger}");
    let file = import(&device, tempfile::tempfile().unwrap().as_fd(), bytes, uuid).unwrap_err();
    assert!(file.contains("not memory of a GPU"), "{file}");
}
