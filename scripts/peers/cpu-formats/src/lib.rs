//! Random matrices of each weight format, and the clock that the programs share.

use expertd_model::{GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints};
use rand::RngExt;

/// A format with its name, group size (INT4) and whether it has zero points.
pub type Case = (&'static str, WeightFormat, usize, bool);

pub const CASES: [Case; 8] = [
    ("bf16", WeightFormat::Bf16, 0, false),
    ("FP8 (128 × 128)", WeightFormat::Fp8E4m3, 0, false),
    ("MXFP8", WeightFormat::Mxfp8, 0, false),
    ("MXFP4", WeightFormat::Mxfp4, 0, false),
    ("NVFP4", WeightFormat::Nvfp4, 16, false),
    ("INT4, groups of 32, bf16 scales", WeightFormat::Int4, 32, false),
    ("INT4, groups of 128, bf16 scales", WeightFormat::Int4, 128, false),
    ("INT4, groups of 128, zero points", WeightFormat::Int4, 128, true),
];

/// Seconds of CPU time of the calling thread.
pub fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Calls `use_view` with a random matrix `[n, k]`.
pub fn with_matrix<T>(
    (_, format, group, zeros): Case,
    n: usize,
    k: usize,
    use_view: impl FnOnce(&MatrixView<'_>) -> T,
) -> T {
    let mut rng = rand::rng();
    // Any bytes are good elements, but no FP8 NaN and no infinite or huge bf16.
    let data: Vec<u8> = (0..n * k * format.bits() / 8).map(|_| rng.random::<u8>() & 0xbf).collect();
    let exponents = vec![119; n * k / 32];
    let scale = match format {
        WeightFormat::Nvfp4 => vec![0x30],
        _ => 0x3c00_u16.to_le_bytes().to_vec(),
    };
    let scale_data = scale.repeat(n * k / group.max(1));
    let zero_data = vec![0x87; (n * k / group.max(1)).div_ceil(2)];
    let across = k / group.max(1);
    let scales = match format {
        WeightFormat::Fp8E4m3 => Scales::Block {
            values: vec![0.01; (n / 128) * (k / 128)].into(),
            block_rows: 128,
            block_cols: 128,
        },
        WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => Scales::Mx { exponents: &exponents, row_stride: k / 32 },
        WeightFormat::Nvfp4 | WeightFormat::Int4 => Scales::Groups(GroupScales {
            cols: group,
            format: if group == 16 { ScaleFormat::Fp8E4m3 } else { ScaleFormat::Bf16 },
            data: &scale_data,
            row_stride: across,
            group_stride: 1,
            factor: 1.0,
            zeros: zeros.then_some(ZeroPoints {
                data: &zero_data,
                packing: Packing::Strided,
                row_stride: across,
                group_stride: 1,
                bias: 0,
            }),
        }),
        _ => Scales::None,
    };
    let view = MatrixView {
        format,
        packing: Packing::Strided,
        data: &data,
        rows: n,
        cols: k,
        row_stride: k,
        col_stride: 1,
        scales,
    };
    use_view(&view)
}
