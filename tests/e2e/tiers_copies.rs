//! Mixed groups whose source also computes experts of CPU ranks: all of them in steps of many rows, and those that have a copy in a slot.

use std::path::Path;
use std::time::{Duration, Instant};

use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};
use expertd_proto::v1::{DType, ForwardRequest};
use expertd_test_seed::TestRng;
use expertd_types::rows::{decode, encode, encode_i32};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement};
use rand::RngExt as _;
use rand::seq::SliceRandom as _;

use crate::balance::counts;
use crate::gpu::gpus;
use crate::service::load::check_within;
use crate::service::{Service, families, fixture, part};
use crate::tiers::{POISONED_WIRE, TOLERANCE, placement, start, verified, write};

const FAMILY: &str = "qwen3_moe";
/// Least number of rows of steps that the source computes alone, in these tests.
const STREAM_ROWS: usize = 6;
const STREAMED: [&str; 2] = ["--stream-rows", "6"];
/// Sizes of the model that [`Pair`] serves.
const EXPERTS: usize = 16;
const K: usize = 4;
const PATIENCE: Duration = Duration::from_secs(30);

/// A mixed group of a source and two CPU ranks, and one rank with the same weights.
struct Pair {
    mixed: (Client, Service),
    alone: (Client, Service),
    hidden: usize,
    rng: TestRng,
}

impl Pair {
    /// Expert 0 of each layer is on the source, the others are on CPU ranks in turn.
    async fn start(device: &str, more: &[&str], environment: &[(&str, &str)]) -> Pair {
        let folder = tempfile::tempdir().unwrap();
        let sizes = SynthConfig { experts: EXPERTS, top_k: K, ..SynthConfig::new(FAMILY) };
        synth::write(&sizes, folder.path()).unwrap();
        let of_rank =
            |rank: usize| (1..EXPERTS as u32).filter(|expert| *expert as usize % 2 + 1 == rank).collect();
        let placed = |layer| (LayerId(layer), LayerPlacement::new(vec![vec![0], of_rank(1), of_rank(2)]));
        let (_placement, file) = write(&ExpertPlacement::new(3, (0..2).map(placed)));
        let flags = ["--device", device, "--placement", file.to_str().unwrap()];
        let mixed = Service::start_checkpoint(folder.path(), 3, &[&flags, more].concat(), environment);
        let alone = Service::start_checkpoint(folder.path(), 1, &[], &[]);
        Pair {
            mixed: (Client::connect(&mixed.address).await.unwrap(), mixed),
            alone: (Client::connect(&alone.address).await.unwrap(), alone),
            hidden: sizes.hidden,
            rng: expertd_test_seed::rng(),
        }
    }

    /// Calls both with `tokens` rows whose experts are among `of`, and compares.
    async fn call(&mut self, layer: u32, tokens: usize, of: &[i32]) {
        let rng = &mut self.rng;
        let rows: Vec<f32> = (0..tokens * self.hidden).map(|_| rng.random_range(-1.0..1.0)).collect();
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for _ in 0..tokens {
            let mut of = of.to_vec();
            of.shuffle(rng);
            ids.extend_from_slice(&of[..K]);
            weights.extend((0..K).map(|_| rng.random_range(0.1..1.0_f32)));
        }
        let rows = encode(&rows, expertd_types::DType::F32);
        let request = ForwardRequest::inline(layer, tokens as u32, DType::DtypeF32, rows).with_routing(
            encode_i32(&ids),
            encode(&weights, expertd_types::DType::F32),
            K as u32,
        );
        let (wanted, found) = tokio::join!(
            self.alone.0.forward(request.clone(), None),
            self.mixed.0.forward(request.clone(), None)
        );
        let wanted = decode(&wanted.unwrap().rows, expertd_types::DType::F32);
        check_within(TOLERANCE, &found.unwrap(), &wanted, &request);
    }

    /// Rows that the source has computed of experts that CPU ranks own, and that CPU ranks have computed.
    async fn rows(&self, layer: u32) -> [u64; 2] {
        let counted = counts(&self.mixed.1, layer).await;
        [counted[0][1..].iter().sum(), counted[1..].iter().flatten().sum()]
    }
}

fn all() -> Vec<i32> {
    (0..EXPERTS as i32).collect()
}

/// Steps of few rows are computed by all ranks, those of many rows by the source.
async fn large_steps_are_the_sources(device: &str, environment: &[(&str, &str)]) {
    let mut pair = Pair::start(device, &STREAMED, environment).await;
    for layer in 0..2 {
        pair.call(layer, STREAM_ROWS - 1, &all()).await;
        let [of_source, of_others] = pair.rows(layer).await;
        assert!(of_source == 0 && of_others > 0, "layer {layer}: {of_source} and {of_others} rows");
        // A GPU pins the memory of CPU ranks in the background.
        let begun = Instant::now();
        loop {
            let before = pair.rows(layer).await;
            pair.call(layer, STREAM_ROWS, &all()).await;
            let after = pair.rows(layer).await;
            if after[1] == before[1] {
                assert!(after[0] > before[0], "layer {layer}: {before:?}, then {after:?}");
                break;
            }
            assert!(begun.elapsed() < PATIENCE, "CPU ranks still compute: {before:?}, then {after:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    // Steps of both kinds follow one another in all slots of steps.
    for step in 0..60 {
        let before = pair.rows(step % 2).await;
        let tokens = pair.rng.random_range(1..40);
        pair.call(step % 2, tokens, &all()).await;
        let after = pair.rows(step % 2).await;
        assert_eq!(after[1] == before[1], tokens >= STREAM_ROWS, "{tokens} rows: {before:?}, then {after:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_computes_all_experts_of_large_steps() {
    large_steps_are_the_sources("cpu,cpu", &[POISONED_WIRE]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_answers_of_every_family_where_large_steps_are_the_sources() {
    let mut rng = expertd_test_seed::rng();
    for (index, family) in families().iter().enumerate() {
        let model = fixture(family);
        let service = start("cpu,cpu", &model, index % 3 + 1, &mut rng, &STREAMED);
        verified(&service, &model, "f32", &["1000", "5"], "1e-2").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn experts_come_to_a_gpu_for_large_steps() {
    let _in_use = gpus();
    large_steps_are_the_sources("cuda,cpu", &[POISONED_WIRE]).await;
    large_steps_are_the_sources("cuda,cpu", &[POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")]).await;
}

/// Each family's experts, biases and gates; formats that no kernel rewrites stay with their CPU ranks.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_every_family_whose_experts_come_to_a_gpu() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let environment = [POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")];
    for (index, family) in part(families()).iter().enumerate() {
        let model = fixture(family);
        let (_folder, file) = write(&placement(&model, index % 3 + 1, &mut rng));
        let flags = ["--device", "cuda,cpu", "--placement", file.to_str().unwrap(), "--slot-memory", "300K"];
        let service = Service::start_checkpoint(
            &model,
            index as u32 % 3 + 2,
            &[&flags[..], &STREAMED].concat(),
            &environment,
        );
        pinned(&service).await;
        verified(&service, &model, "f32", &["1000", "5", "1000", "3"], "1e-2").await;
    }
}

/// Gives a GPU rank the time in which it pins the memory of a small model.
async fn pinned(service: &Service) {
    assert!(!service.ranks().is_empty());
    tokio::time::sleep(Duration::from_millis(500)).await;
}

/// Without pinned memory nothing is copied, and CPU ranks compute large steps, too.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn memory_that_cannot_be_pinned_leaves_experts_with_their_ranks() {
    let _in_use = gpus();
    let environment = [POISONED_WIRE, ("EXPERTD_TIER_REFUSE_PINS", "1")];
    let more = [&STREAMED[..], &["--slot-memory", "400K"]].concat();
    let mut pair = Pair::start("cuda,cpu", &more, &environment).await;
    pinned(&pair.mixed.1).await;
    for step in 0..20 {
        pair.call(step % 2, 4 * STREAM_ROWS, &all()).await;
    }
    let [of_source, of_others] = pair.rows(0).await;
    assert!(of_source == 0 && of_others > 0, "{of_source} and {of_others} rows");
}

/// Experts that are used much get slots, one set after another, while calls of both layers and of all sizes are compared.
async fn slots_follow_the_use(environment: &[(&str, &str)]) {
    // Two layers of experts of 48 KiB: four slots each.
    let more = [&STREAMED[..], &["--slot-memory", "400K"]].concat();
    let mut pair = Pair::start("cuda,cpu", &more, environment).await;
    for round in 0..8 {
        let first = 1 + round * 4 % 12;
        let hot: Vec<i32> = (first..first + 4).collect();
        let begun = Instant::now();
        // Until one step finds all of its experts in slots.
        for step in 0.. {
            let layer = step % 2;
            let before = pair.rows(layer).await;
            let tokens = pair.rng.random_range(1..STREAM_ROWS);
            pair.call(layer, tokens, &hot).await;
            let after = pair.rows(layer).await;
            let [of_source, of_others] = [after[0] - before[0], after[1] - before[1]];
            assert_eq!(of_source + of_others, (tokens * K) as u64, "round {round}, step {step}");
            if step > 20 && of_others == 0 {
                break;
            }
            assert!(
                begun.elapsed() < PATIENCE,
                "round {round}: {of_others} rows of {hot:?} miss after {step} steps"
            );
            // Other experts, and steps for which all of them come to the GPU.
            if step % 5 == 0 {
                let tokens = pair.rng.random_range(1..3 * STREAM_ROWS);
                pair.call(layer, tokens, &all()).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn answers_are_right_while_slots_change() {
    let _in_use = gpus();
    slots_follow_the_use(&[POISONED_WIRE]).await;
    slots_follow_the_use(&[POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")]).await;
}

/// Several clients at a time, so that steps of both layers overlap with each other and with copies; ranks are killed meanwhile.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn slots_change_under_load_and_faults() {
    let _in_use = gpus();
    let mut rng = expertd_test_seed::rng();
    let model = fixture(FAMILY);
    let (_folder, file) = write(&placement(&model, 2, &mut rng));
    let flags = ["--device", "cuda,cpu", "--placement", file.to_str().unwrap(), "--slot-memory", "200K"];
    let service = Service::start_checkpoint(Path::new(&model), 3, &[&flags[..], &STREAMED].concat(), &[]);
    crate::tiers::faults_are_unseen(&service).await;
}
