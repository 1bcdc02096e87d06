//! The experts of an OLMoE-sized layer on one thread, for the comparison with `loadtest/peers/cpu/llama_layer.c`, which prints
//! the same fields. Every call has fresh random rows and routing, and three layers take turns, so that weights are cold.
//!
//!     layer CASE SECONDS TOKENS...
//!
//! CASE is the beginning of a format's name as the other program prints it. Times are of the thread's CPU.

use std::time::{Duration, Instant};

use expertd_compute::experts::cpu::{CpuExpert, Workspace, WorkspaceSize, forward};
use expertd_compute::experts::{Assignments, ExpertKind};
use expertd_cpu_formats::{CASES, cpu_seconds, with_matrix};
use expertd_model::{Activation, ExpertWeights, WeightOn};
use rand::RngExt;
use rand::seq::index::sample;

const HIDDEN: usize = 2048;
const WIDTH: usize = 1024;
const EXPERTS: usize = 64;
const TOP_K: usize = 8;
const LAYERS: usize = 3;
const KIND: ExpertKind =
    ExpertKind { activation: Activation::SwiGlu, weight_on: WeightOn::Output, fp8_rows: None };

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [wanted, seconds, tokens @ ..] = &arguments[..] else { panic!("layer CASE SECONDS TOKENS...") };
    let case = CASES.into_iter().find(|case| case.0.starts_with(wanted)).expect("CASE is known");
    let seconds = Duration::from_secs_f64(seconds.parse().expect("SECONDS is a number"));
    let layers: Vec<Vec<CpuExpert>> = with_matrix(case, WIDTH, HIDDEN, |gate| {
        with_matrix(case, HIDDEN, WIDTH, |down| {
            let expert =
                ExpertWeights { gate: gate.clone(), up: gate.clone(), down: down.clone(), biases: None };
            let layer = || (0..EXPERTS).map(|_| CpuExpert::pack(&expert).expect("the expert is valid"));
            (0..LAYERS).map(|_| layer().collect()).collect()
        })
    });
    let mut rng = rand::rng();
    for tokens in tokens.iter().map(|tokens| tokens.parse::<usize>().expect("TOKENS is a number")) {
        let mut workspace = Workspace::new(WorkspaceSize {
            hidden: HIDDEN,
            intermediate: WIDTH,
            assignments: tokens * TOP_K,
            threads: 1,
        });
        let (mut times, end) = (Vec::new(), Instant::now() + seconds);
        while times.len() < 9 || Instant::now() < end {
            let x: Vec<f32> = (0..tokens * HIDDEN).map(|_| rng.random_range(-1.0..1.0)).collect();
            let mut chosen = vec![Vec::new(); EXPERTS];
            for row in 0..tokens {
                sample(&mut rng, EXPERTS, TOP_K)
                    .into_iter()
                    .for_each(|expert| chosen[expert].push(row as u32));
            }
            let mut offsets = vec![0];
            for rows in &chosen {
                offsets.push(offsets[offsets.len() - 1] + rows.len() as u32);
            }
            let (rows, weights) = (chosen.concat(), vec![0.125; tokens * TOP_K]);
            let assignments = Assignments { offsets: &offsets, rows: &rows, weights: &weights };
            let mut out = vec![0.0; tokens * HIDDEN];
            let experts = &layers[times.len() % LAYERS];
            let start = cpu_seconds();
            forward(KIND, experts, assignments, &[&x], &mut [&mut out], &mut workspace, None);
            times.push(cpu_seconds() - start);
        }
        times.sort_by(f64::total_cmp);
        println!(
            "{{\"format\": \"{}\", \"threads\": 1, \"tokens\": {tokens}, \"steps\": {}, \"median_cpu_seconds\": {:.7}, \"least_cpu_seconds\": {:.7}}}",
            case.0,
            times.len(),
            times[times.len() / 2],
            times[0]
        );
    }
}
