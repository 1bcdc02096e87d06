//! Dispatch and combine on CPU ranks without experts: the cost of an exchange apart from the arithmetic.
//!
//! Ranks are threads over the same windows that processes use. The experts phase copies the rows that arrived as
//! partial rows, so that combine reduces real data.

#![allow(clippy::unwrap_used, reason = "a benchmark")]

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use expertd_rank_cpu::group::loopback;
use expertd_rank_cpu::{CpuGroup, EpConfig, HostRouting};
use expertd_shm::wait::SPIN_TIME;
use expertd_types::{ExpertOwners, Generation, Rank, Slot};
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const HIDDEN: usize = 2048;
const EXPERTS: usize = 64;
const K: usize = 8;

struct Input {
    owners: ExpertOwners,
    ids: Vec<i32>,
    weights: Vec<f32>,
    rows: Vec<f32>,
    out: Vec<f32>,
}

fn input(group: &CpuGroup, tokens: usize) -> Input {
    let ranks = group.config().ranks;
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(group.config().rank.0));
    let mut all: Vec<i32> = (0..EXPERTS as i32).collect();
    let mut ids = vec![];
    for _ in 0..tokens {
        all.shuffle(&mut rng);
        ids.extend_from_slice(&all[..K]);
    }
    Input {
        owners: ExpertOwners::single((0..EXPERTS).map(|e| Rank((e * ranks / EXPERTS) as u32))),
        ids,
        weights: vec![0.125; tokens * K],
        rows: (0..tokens * HIDDEN).map(|_| rng.random_range(-1.0..1.0)).collect(),
        out: vec![0.0; tokens * HIDDEN],
    }
}

fn exchanges(group: &mut CpuGroup, input: &mut Input, count: u64) {
    let tokens = input.rows.len() / HIDDEN;
    for n in 0..count {
        let slot = Slot((n % 2) as u32);
        let routing = HostRouting {
            owners: &input.owners,
            turn: 0,
            tokens,
            k: K,
            ids: &input.ids,
            weights: &input.weights,
        };
        group.prepare(slot, routing).unwrap();
        group.dispatch(slot, &input.rows).unwrap();
        for batch in group.received(slot).unwrap() {
            batch.partials.copy_from_slice(batch.rows);
        }
        group.combine(slot, &mut input.out).unwrap();
    }
}

fn bench(c: &mut Criterion) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    for ranks in [1, 2, 4] {
        let mut suite = c.benchmark_group(format!("exchange/{ranks}-ranks"));
        suite.sample_size(20).measurement_time(Duration::from_secs(2));
        for tokens in [0, 1, 8, 64, 512] {
            let config = EpConfig {
                ranks,
                rank: Rank(0),
                hidden: HIDDEN,
                max_top_k: K,
                max_tokens_per_rank: tokens.max(1),
                slots: 2,
                generation: Generation(1),
                wait_deadline: Duration::from_secs(30),
                spin: if ranks <= cores { SPIN_TIME } else { Duration::ZERO },
                poison: false,
            };
            let mut groups = loopback(&config).unwrap().into_iter();
            let mut first = groups.next().unwrap();
            thread::scope(|s| {
                let peers: Vec<mpsc::Sender<u64>> = groups
                    .map(|mut group| {
                        let (tx, rx) = mpsc::channel();
                        s.spawn(move || {
                            let mut input = input(&group, tokens);
                            rx.iter().for_each(|count| exchanges(&mut group, &mut input, count));
                        });
                        tx
                    })
                    .collect();
                let mut own = input(&first, tokens);
                suite.throughput(Throughput::Elements((tokens * ranks).max(1) as u64));
                suite.bench_function(BenchmarkId::new("tokens-per-rank", tokens), |b| {
                    b.iter_custom(|count| {
                        peers.iter().for_each(|peer| peer.send(count).unwrap());
                        let start = Instant::now();
                        exchanges(&mut first, &mut own, count);
                        start.elapsed()
                    });
                });
                drop(peers);
            });
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
