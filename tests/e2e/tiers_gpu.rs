//! Mixed groups of one GPU rank and CPU ranks. Ignored by default, like the tests of `gpu`.

use crate::gpu::{QUANTISED, REPACKED, gpus, is_refused};
use crate::service::{families, fixture, part};
use crate::tiers::{faults_are_unseen, placements_come_in, start, verified};

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_every_family_beside_cpu_ranks() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    for (index, family) in part(families()).iter().enumerate() {
        let model = fixture(family);
        let service = start("cuda,cpu", &model, index % 3 + 1, &mut rng, &[]);
        verified(&service, &model, "f32", &["1000", "3"], "1e-2").await;
        verified(&service, &model, "bf16", &["1000"], "1e-2").await;
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

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn ranks_of_both_kinds_killed_and_stopped_under_load_fail_no_call() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let service = start("cuda,cpu", &fixture("qwen3_moe"), 2, &mut rng, &[]);
    faults_are_unseen(&service).await;
    placements_come_in(&service, 2, &mut rng).await;
}
