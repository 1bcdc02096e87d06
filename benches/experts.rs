//! The experts of one OLMoE-sized layer (H2048 I1024 E64 k8) on all cores, without gate and exchange.
//!
//! Every call has fresh random rows and routing. A layer has 0.8 GB in bf16, so weights that the previous call did not
//! use are cold. `EXPERTD_CPU=avx2` measures another SIMD level.

#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use expertd_compute::experts::cpu::{CpuExpert, Workspace, WorkspaceSize, forward};
use expertd_compute::experts::{Assignments, ExpertKind};
use expertd_model::{
    Activation, ExpertWeights, GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, WeightOn,
};
use rand::seq::index::sample;
use rand::{Rng, RngExt};

const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 1024;
const EXPERTS: usize = 64;
const K: usize = 8;
const KIND: ExpertKind =
    ExpertKind { activation: Activation::SwiGlu, weight_on: WeightOn::Output, fp8_rows: None };

/// Formats, with the columns of a group and the name of the benchmark.
const FORMATS: [(WeightFormat, usize, &str); 8] = [
    (WeightFormat::Bf16, 1, "Bf16"),
    (WeightFormat::F32, 1, "F32"),
    (WeightFormat::Fp8E4m3, 128, "Fp8E4m3"),
    (WeightFormat::Mxfp8, 32, "Mxfp8"),
    (WeightFormat::Mxfp4, 32, "Mxfp4"),
    (WeightFormat::Nvfp4, 16, "Nvfp4"),
    (WeightFormat::Int4, 32, "Int4-32"),
    (WeightFormat::Int4, 128, "Int4-128"),
];

/// One projection's bytes and scales; all experts have the same ones.
struct Projection {
    format: WeightFormat,
    /// Columns of a group.
    group: usize,
    data: Vec<u8>,
    exponents: Vec<u8>,
    /// The scales of groups: FP8 of NVFP4, bf16 of INT4.
    scales: Vec<u8>,
}

impl Projection {
    fn random(rng: &mut impl Rng, format: WeightFormat, group: usize) -> Self {
        let len = HIDDEN * INTERMEDIATE;
        let mut value = || rng.random_range(-0.02_f32..0.02);
        let data = match format {
            WeightFormat::F32 => (0..len).flat_map(|_| value().to_le_bytes()).collect(),
            WeightFormat::F16 => (0..len).flat_map(|_| half::f16::from_f32(value()).to_le_bytes()).collect(),
            WeightFormat::Bf16 => {
                (0..len).flat_map(|_| half::bf16::from_f32(value()).to_le_bytes()).collect()
            }
            WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => {
                (0..len).map(|_| rng.random::<u8>() & 0xbf).collect()
            }
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Int4 => {
                (0..len / 2).map(|_| rng.random()).collect()
            }
        };
        let scale = match format {
            WeightFormat::Nvfp4 => vec![0x30],
            _ => half::bf16::from_f32(0.005).to_le_bytes().to_vec(),
        };
        Projection { format, group, data, exponents: vec![119; len / 32], scales: scale.repeat(len / group) }
    }

    fn view(&self, rows: usize, cols: usize) -> MatrixView<'_> {
        let scales = match self.format {
            WeightFormat::Fp8E4m3 => Scales::Block {
                values: vec![0.01; rows.div_ceil(128) * cols.div_ceil(128)].into(),
                block_rows: 128,
                block_cols: 128,
            },
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => {
                Scales::Mx { exponents: &self.exponents, row_stride: cols / 32 }
            }
            WeightFormat::Nvfp4 | WeightFormat::Int4 => Scales::Groups(GroupScales {
                cols: self.group,
                format: match self.format {
                    WeightFormat::Nvfp4 => ScaleFormat::Fp8E4m3,
                    _ => ScaleFormat::Bf16,
                },
                data: &self.scales,
                row_stride: cols / self.group,
                group_stride: 1,
                factor: 1.0,
                zeros: None,
            }),
            _ => Scales::None,
        };
        MatrixView {
            format: self.format,
            packing: Packing::Strided,
            data: &self.data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales,
        }
    }

    fn experts(&self) -> Vec<CpuExpert> {
        let (gate, down) = (self.view(INTERMEDIATE, HIDDEN), self.view(HIDDEN, INTERMEDIATE));
        let weights = ExpertWeights { gate: gate.clone(), up: gate, down, biases: None };
        (0..EXPERTS).map(|_| CpuExpert::pack(&weights).unwrap()).collect()
    }
}

/// Duration of one call with fresh rows and routing.
fn call(
    rng: &mut impl Rng,
    experts: &[CpuExpert],
    tokens: usize,
    workspace: &mut Workspace,
    pool: &rayon::ThreadPool,
) -> Duration {
    let x: Vec<f32> = (0..tokens * HIDDEN).map(|_| rng.random_range(-1.0..1.0)).collect();
    let mut chosen = vec![Vec::new(); EXPERTS];
    for row in 0..tokens {
        for expert in sample(rng, EXPERTS, K) {
            chosen[expert].push(row as u32);
        }
    }
    let mut offsets = vec![0];
    offsets.extend(chosen.iter().scan(0, |end, rows| {
        *end += rows.len() as u32;
        Some(*end)
    }));
    let rows = chosen.concat();
    let weights = vec![1.0 / K as f32; rows.len()];
    let mut out = vec![0.0; tokens * HIDDEN];
    let assignments = Assignments { offsets: &offsets, rows: &rows, weights: &weights };
    let start = Instant::now();
    forward(KIND, experts, assignments, &[&x], &mut [&mut out], workspace, Some(pool));
    let time = start.elapsed();
    black_box(out);
    time
}

fn experts(c: &mut Criterion) {
    let threads = std::thread::available_parallelism().unwrap().get();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let mut rng = rand::rng();
    let mut group = c.benchmark_group("experts");
    group.sample_size(20);
    for (format, columns, name) in FORMATS {
        let experts = Projection::random(&mut rng, format, columns).experts();
        for tokens in [1, 8, 64, 512] {
            let assignments = tokens * K;
            let size = WorkspaceSize { hidden: HIDDEN, intermediate: INTERMEDIATE, assignments, threads };
            let mut workspace = Workspace::new(size);
            group.throughput(Throughput::Elements(tokens as u64));
            group.bench_function(BenchmarkId::new(name, tokens), |b| {
                b.iter_custom(|calls| {
                    (0..calls).map(|_| call(&mut rng, &experts, tokens, &mut workspace, &pool)).sum()
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, experts);
criterion_main!(benches);
