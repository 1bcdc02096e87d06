//! Products of f32 rows with cold weights `[2048, 2048]` in each weight format, on one thread. All formats take turns in
//! every round, because the speed of shared machines varies. Prints µs of thread CPU time per matrix, the median and the
//! 10th percentile over all calls, and the time of bf16 divided by that of the format. The arguments are numbers of rows.

use expertd_compute::linalg::{MatmulScratch, PackedMatrix, SimdLevel, matmul};
use expertd_cpu_formats::{CASES, Case, cpu_seconds, with_matrix};
use rand::RngExt;

const N: usize = 2048;
const K: usize = 2048;
/// Bytes of packed weights per format, more than a last-level cache holds.
const BYTES: usize = 160 << 20;
const ROUNDS: usize = 12;

/// Copies of one random matrix, which fill `BYTES`.
fn matrices(case: Case) -> Vec<PackedMatrix> {
    with_matrix(case, N, K, |view| {
        let pack = || PackedMatrix::pack(view).expect("the matrix is valid");
        let first = pack();
        assert_eq!(first.format(), case.1, "the kernels hold the format itself");
        let count = BYTES / first.bytes();
        std::iter::once(first).chain((1..count).map(|_| pack())).collect()
    })
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
            println!(
                "| {m} | {} | {bytes:.3} | {median:.0} | {tenth:.0} | {:.2} |",
                CASES[case].0,
                bf16 / tenth
            );
        }
    }
}
