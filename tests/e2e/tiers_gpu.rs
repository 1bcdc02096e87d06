//! Mixed groups of one GPU rank and CPU ranks. Ignored by default, like the tests of `gpu`.

use std::time::{Duration, Instant};

use crate::gpu::{QUANTISED, REPACKED, gpus, is_portable, is_refused};
use crate::service::{Service, families, fixture, part};
use crate::tiers::{
    POISONED_WIRE, faults_are_unseen, faults_within_steps_are_unseen, fewer_experts_are_right, placement,
    placements_come_in, start, verified, write,
};
use crate::tiers_copies::{STREAMED, copied_rows, placement_that_needs_cpu_ranks, slot_memory};

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_every_family_beside_cpu_ranks() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    for (index, family) in part(families()).iter().enumerate() {
        let model = fixture(family);
        let service = start("cuda,cpu", &model, index % 3 + 1, &mut rng, &[]);
        // On a GPU alone a row of jamba is 1.0e-2 off; which experts lie on CPUs changes that a little.
        let tolerance = if family == "jamba" { "1.2e-2" } else { "1e-2" };
        verified(&service, &model, "f32", &["1000", "3"], tolerance).await;
        verified(&service, &model, "bf16", &["1000"], tolerance).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_quantised_checkpoints_beside_cpu_ranks() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let names = part([&QUANTISED[..], &REPACKED].concat());
    for (index, name) in names.into_iter().filter(|name| !is_refused(name)).enumerate() {
        let model = fixture(name);
        let service = start("cuda,cpu", &model, index % 2 + 1, &mut rng, &["--fp8-compute", "bf16"]);
        verified(&service, &model, "f32", &["1000", "3"], "1e-2").await;
    }
}

/// Large steps and slots of all formats: experts are rewritten from what CPU ranks hold.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_quantised_checkpoints_whose_experts_come_to_a_gpu() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let environment = [POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")];
    let names = part([&QUANTISED[..], &REPACKED].concat());
    for (index, name) in names.into_iter().filter(|name| !is_refused(name)).enumerate() {
        let model = fixture(name);
        let workers = index % 2 + 1;
        let placed = placement_that_needs_cpu_ranks(&model, workers, &mut rng);
        let (_folder, file) = write(&placed);
        let slot_memory = slot_memory(&model).to_string();
        let flags = ["--device", "cuda,cpu", "--placement", file.to_str().unwrap()];
        let slots = ["--slot-memory", &slot_memory];
        // FP8 products differ from f32 by the rounding of quantised rows, in any implementation.
        for (compute, tolerance) in [("bf16", "1e-2"), ("fp8", "1e-1")] {
            if compute == "fp8" && (is_portable() || !(name.contains("-fp8-") || name.contains("-mxfp4-"))) {
                continue;
            }
            let setting = if name.contains("-mxfp4-") { "--mxfp4-compute" } else { "--fp8-compute" };
            let more = [&flags[..], &slots, &STREAMED, &[setting, compute]].concat();
            let service = Service::start_checkpoint(&model, workers as u32 + 1, &more, &environment);
            // Large steps, once the memory of CPU ranks is pinned; then small ones, until a slot is used.
            for batch in ["1000", "3"] {
                let (begun, before) = (Instant::now(), copied_rows(&service, &placed).await);
                while copied_rows(&service, &placed).await == before {
                    verified(&service, &model, "f32", &[batch], tolerance).await;
                    assert!(
                        begun.elapsed() < PATIENCE,
                        "{name}, batches of {batch}: no expert came to the GPU"
                    );
                }
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn ranks_of_both_kinds_killed_and_stopped_under_load_fail_no_call() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let service = start("cuda,cpu", &fixture("qwen3_moe"), 2, &mut rng, &[]);
    faults_are_unseen(&service).await;
    placements_come_in(&service, 2, true, &mut rng).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn fewer_experts_than_the_gate_chooses_beside_cpu_ranks() {
    let _in_use = gpus();
    fewer_experts_are_right("cuda,cpu", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn cpu_ranks_of_a_gpu_that_are_slow_or_stop_within_a_step() {
    let _in_use = gpus();
    faults_within_steps_are_unseen("cuda,cpu").await;
}

/// Copy engines carry the rows of all steps, also the results of second halves, and each step finds a poisoned wire.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn answers_of_copy_engines_beside_cpu_ranks_with_poisoned_memory() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let environment = [POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")];
    // Rows of the second one need no padding, so that copy engines can carry them.
    let (model, unpadded) = (fixture("qwen3_moe"), fixture("../unpadded/qwen2_moe"));
    for model in [model, unpadded] {
        let (_folder, file) = write(&placement(&model, 2, &mut rng));
        let flags = ["--device", "cuda,cpu", "--placement", file.to_str().unwrap()];
        let service = Service::start_checkpoint(&model, 3, &flags, &environment);
        verified(&service, &model, "f32", &["1000", "3"], "1e-2").await;
        verified(&service, &model, "bf16", &["1000"], "1e-2").await;
    }
    fewer_experts_are_right("cuda,cpu", &environment).await;
}
