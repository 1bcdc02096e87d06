//! Products of f32 rows with cold weights `[2048, 2048]` in each weight format, on one thread. All formats take turns in
//! every round, because the speed of shared machines varies. Prints µs of thread CPU time per matrix, the median and the
//! 10th percentile over all calls, and the time of bf16 divided by that of the format. The arguments are numbers of rows.

use expertd_compute::linalg::{MatmulScratch, PackedMatrix, SimdLevel, matmul};
use expertd_model::{GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints};
use rand::RngExt;

const N: usize = 2048;
const K: usize = 2048;
/// Bytes of packed weights per format, more than a last-level cache holds.
const BYTES: usize = 160 << 20;
const ROUNDS: usize = 12;

/// A format with its name, group size (INT4) and whether it has zero points.
type Case = (&'static str, WeightFormat, usize, bool);

const CASES: [Case; 8] = [
    ("bf16", WeightFormat::Bf16, 0, false),
    ("FP8 (128 × 128)", WeightFormat::Fp8E4m3, 0, false),
    ("MXFP8", WeightFormat::Mxfp8, 0, false),
    ("MXFP4", WeightFormat::Mxfp4, 0, false),
    ("NVFP4", WeightFormat::Nvfp4, 16, false),
    ("INT4, groups of 32, bf16 scales", WeightFormat::Int4, 32, false),
    ("INT4, groups of 128, bf16 scales", WeightFormat::Int4, 128, false),
    ("INT4, groups of 128, zero points", WeightFormat::Int4, 128, true),
];

fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Copies of one random matrix, which fill `BYTES`.
fn matrices((_, format, group, zeros): Case) -> Vec<PackedMatrix> {
    let mut rng = rand::rng();
    // Any bytes are good elements, but no FP8 NaN and no infinite or huge bf16.
    let data: Vec<u8> = (0..N * K * format.bits() / 8).map(|_| rng.random::<u8>() & 0xbf).collect();
    let exponents = vec![119; N * K / 32];
    let scale = match format {
        WeightFormat::Nvfp4 => vec![0x30],
        _ => 0x3c00_u16.to_le_bytes().to_vec(),
    };
    let scale_data = scale.repeat(N * K / group.max(1));
    let zero_data = vec![0x87; (N * K / group.max(1)).div_ceil(2)];
    let across = K / group.max(1);
    let scales = match format {
        WeightFormat::Fp8E4m3 => Scales::Block {
            values: vec![0.01; (N / 128) * (K / 128)].into(),
            block_rows: 128,
            block_cols: 128,
        },
        WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => {
            Scales::Mx { exponents: &exponents, row_stride: K / 32 }
        }
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
        rows: N,
        cols: K,
        row_stride: K,
        col_stride: 1,
        scales,
    };
    let pack = || PackedMatrix::pack(&view).expect("the matrix is valid");
    let first = pack();
    assert_eq!(first.format(), format, "the kernels hold the format itself");
    let count = BYTES / first.bytes();
    std::iter::once(first).chain((1..count).map(|_| pack())).collect()
}

fn main() {
    let mut rng = rand::rng();
    let packed = CASES.map(matrices);
    let mut scratch = MatmulScratch::new(K, 1);
    let given: Vec<usize> = std::env::args().skip(1).map(|m| m.parse().expect("m is a number")).collect();
    println!("level {}, [m, {K}] x [{N}, {K}], µs of one thread", SimdLevel::active());
    println!("| m | format | bytes per weight | median | 10th percentile | bf16's 10th percentile / this |");
    println!("|---|---|---|---|---|---|");
    for m in if given.is_empty() { vec![1, 8, 64, 512] } else { given } {
        let x: Vec<f32> = (0..m * K).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut out = vec![0.0; m * N];
        let mut times = CASES.map(|_| Vec::new());
        // Many rows take long, and leave memory alone: fewer matrices give enough calls.
        let calls = (64 / m).clamp(1, 16);
        let mut next = CASES.map(|_| 0);
        for _ in 0..ROUNDS {
            for (case, packed) in packed.iter().enumerate() {
                for _ in 0..calls {
                    let matrix = &packed[next[case] % packed.len()];
                    next[case] += 1;
                    let start = cpu_seconds();
                    matmul(&x, matrix, &mut out, &mut scratch, None);
                    times[case].push((cpu_seconds() - start) * 1e6);
                }
            }
        }
        let mut bf16 = 0.0;
        for (case, times) in times.iter_mut().enumerate() {
            times.sort_by(f64::total_cmp);
            let (median, tenth) = (times[times.len() / 2], times[times.len() / 10]);
            if case == 0 {
                bf16 = tenth;
            }
            let bytes = packed[case][0].bytes() as f64 / (N * K) as f64;
            println!("| {m} | {} | {bytes:.3} | {median:.0} | {tenth:.0} | {:.2} |", CASES[case].0, bf16 / tenth);
        }
    }
}
