//! Compares our matrix products (f32 and bf16 weights) with those of the `gemm` crate (f32; it has no bf16) on one thread:
//! rows [m, 2048] times weights [2048, 2048]. Weights rotate through 640 MB, so they are cold. Prints GFLOP/s of thread CPU
//! time, at the 10th percentile of the calls. The arguments are values of m.

use expertd_compute::linalg::{MatmulScratch, PackedMatrix, SimdLevel, matmul};
use expertd_model::{MatrixView, Packing, Scales, WeightFormat};
use rand::RngExt;

const N: usize = 2048;
const K: usize = 2048;

fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// GFLOP/s of `call(i)`, where `i` is the index of one of `count` matrices, used in turn.
fn rate(m: usize, count: usize, mut call: impl FnMut(usize)) -> f64 {
    let mut times: Vec<f64> = (0..3 * count)
        .map(|i| {
            let start = cpu_seconds();
            call(i % count);
            cpu_seconds() - start
        })
        .collect();
    times.sort_by(f64::total_cmp);
    2e-9 * (m * N * K) as f64 / times[times.len() / 10]
}

fn pack(format: WeightFormat, data: &[u8]) -> PackedMatrix {
    let view = MatrixView {
        format,
        packing: Packing::Strided,
        data,
        rows: N,
        cols: K,
        row_stride: K,
        col_stride: 1,
        scales: Scales::None,
    };
    PackedMatrix::pack(&view).expect("the matrix is valid")
}

fn main() {
    let mut rng = rand::rng();
    let values: Vec<f32> = (0..N * K).map(|_| rng.random_range(-0.02..0.02)).collect();
    let f32s: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let bf16s: Vec<u8> = values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    println!("level {}", SimdLevel::active());
    println!("| m | ours, bf16 | ours, f32 | gemm, f32 |\n|---|---|---|---|");
    let (narrow, wide) = (80, 40);
    let packed_bf16: Vec<_> = (0..narrow).map(|_| pack(WeightFormat::Bf16, &bf16s)).collect();
    let packed_f32: Vec<_> = (0..wide).map(|_| pack(WeightFormat::F32, &f32s)).collect();
    let plain: Vec<Vec<f32>> = (0..wide).map(|_| values.clone()).collect();
    let mut scratch = MatmulScratch::new(K, 1);
    let given: Vec<usize> = std::env::args().skip(1).map(|m| m.parse().expect("m is a number")).collect();
    for m in if given.is_empty() { vec![1, 8, 32, 64, 256, 512] } else { given } {
        let x: Vec<f32> = (0..m * K).map(|_| rng.random_range(-1.0..1.0)).collect();
        let mut out = vec![0.0; m * N];
        let bf16 = rate(m, narrow, |i| matmul(&x, &packed_bf16[i], &mut out, &mut scratch, None));
        let f32 = rate(m, wide, |i| matmul(&x, &packed_f32[i], &mut out, &mut scratch, None));
        let gemm = rate(m, wide, |i| unsafe {
            let (cs, rs) = (1, N as isize);
            let (x, w) = (x.as_ptr(), plain[i].as_ptr());
            // out [m, n] = x [m, k] * w^T; strides are columns first.
            let (k, none) = (K as isize, gemm::Parallelism::None);
            gemm::gemm(
                m,
                N,
                K,
                out.as_mut_ptr(),
                cs,
                rs,
                false,
                x,
                1,
                k,
                w,
                k,
                1,
                0.0,
                1.0,
                false,
                false,
                false,
                none,
            );
        });
        println!("| {m} | {bf16:.0} | {f32:.0} | {gemm:.0} |");
    }
}
