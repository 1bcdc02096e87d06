//! Mixed groups whose source also computes experts of CPU ranks: all of them in steps of many rows, and those that have a copy in a slot.

mod divided;
mod pair;

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use expertd_cli::admin::AdminAddress;
use expertd_cli::golden::Golden;
use expertd_cli::status::{StatusArgs, status};
use expertd_client::Client;
use expertd_model::{Checkpoint, LayerChoice};
use expertd_proto::v1::admin_client::AdminClient;
use expertd_proto::v1::{GetStatusRequest, TierStatus};
use expertd_test_seed::TestRng;
use expertd_types::rows::decode;
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement, Rank};
use rand::RngExt as _;
use rustix::process::Signal;

use self::pair::{K, Pair, all};
use crate::balance::counts;
use crate::gpu::gpus;
use crate::reload::reload_of;
use crate::service::load::check_within;
use crate::service::{PATIENT, Service, eventually, families, fixture, part, send};
use crate::tiers::{POISONED_WIRE, TOLERANCE, placement, start, verified, write};

const FAMILY: &str = "qwen3_moe";
/// Least number of rows of steps that the source computes alone, in these tests.
const STREAM_ROWS: usize = 6;
pub(crate) const STREAMED: [&str; 2] = ["--stream-rows", "6"];
/// Of the copies of a source on a CPU some fail.
const FAILED_COPIES: (&str, &str) = ("EXPERTD_TIER_FAIL_COPIES", "5");
const PATIENCE: Duration = Duration::from_secs(120);

/// Steps of few rows are computed by all ranks, those of many rows by the source.
async fn large_steps_are_the_sources(device: &str, environment: &[(&str, &str)]) {
    let mut pair = Pair::start(device, &STREAMED, environment).await;
    for layer in 0..2 {
        pair.call(layer, STREAM_ROWS - 1, &all()).await;
        let [of_source, of_others] = pair.rows(layer).await;
        assert!(of_source == 0 && of_others > 0, "layer {layer}: {of_source} and {of_others} rows");
        let [of_source, _] = pair.call_until(layer, STREAM_ROWS, |[_, of_others]| of_others == 0).await;
        assert!(of_source > 0, "layer {layer}: nobody computed the rows of CPU ranks' experts");
    }
    // Steps of both kinds follow one another in all slots of steps.
    for step in 0..60 {
        let tokens = pair.rng.random_range(1..40);
        let (_, computed) = pair.counted_call(step % 2, tokens, &all()).await;
        assert_eq!(computed[1] == 0, tokens >= STREAM_ROWS, "{tokens} rows: {computed:?}");
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

/// Each family's experts, biases and gates.
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
async fn slots_follow_the_use(device: &str, environment: &[(&str, &str)]) {
    // Two layers of experts of 48 KiB: four slots each.
    let more = [&STREAMED[..], &["--slot-memory", "400K"]].concat();
    let mut pair = Pair::start(device, &more, environment).await;
    let ranks = pair.mixed.1.ranks();
    let mut versions = [0; 2];
    for round in 0..8 {
        let first = 1 + round * 4 % 12;
        let hot: Vec<i32> = (first..first + 4).collect();
        let begun = Instant::now();
        // Until one step finds all of its experts in slots.
        for step in 0.. {
            let layer = step % 2;
            let tokens = pair.rng.random_range(1..STREAM_ROWS);
            let (version, [of_source, of_others]) = pair.counted_call(layer, tokens, &hot).await;
            let earlier = std::mem::replace(&mut versions[layer as usize], version);
            assert!(version >= earlier, "layer {layer}: version {version} of the table after {earlier}");
            assert_eq!(of_source + of_others, (tokens * K) as u64, "round {round}, step {step}");
            if step > 20 && of_others == 0 {
                assert!(version > 0, "a row was computed in a slot of an empty table");
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
    assert_eq!(pair.mixed.1.ranks(), ranks, "a rank found another expert in a slot than its table names");
    for (layer, version) in versions.into_iter().enumerate() {
        assert!(version > 8, "layer {layer}: {version} changes of the table in 8 rounds");
    }
    operators_see_the_rows(&pair).await;
}

async fn tier_status(service: &Service) -> TierStatus {
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let status = status(&StatusArgs { admin, json: false, expert_rows: false, watch: None }).await.unwrap();
    status.tier.unwrap()
}

/// Bytes of experts that were copied to the source.
pub(crate) async fn copied_bytes(service: &Service) -> u64 {
    tier_status(service).await.copied_bytes
}

/// Status and metrics of a mixed group say what ranks have counted.
async fn operators_see_the_rows(pair: &Pair) {
    let service = &pair.mixed.1;
    let tier = tier_status(service).await;
    assert_eq!(tier.layers.len(), 2);
    assert!(tier.copied_bytes > 0);
    for of in &tier.layers {
        let counted = counts(service, of.layer).await;
        let rows = pair.rows(of.layer).await;
        assert_eq!((of.source, [of.copied, of.cpu]), (counted[0][0], rows), "layer {}", of.layer);
        assert!(of.source > 0 && of.copied > 0 && of.cpu > 0, "{of:?}");
    }
    let first = tier.layers[0];
    let line = format!("expertd_tier_rows_total{{layer=\"{}\",by=\"copy\"}} {}\n", first.layer, first.copied);
    // Metrics are set every five seconds.
    eventually(PATIENCE, "the metric of rows that found a copy", || scraped(service).contains(&line));
}

fn scraped(service: &Service) -> String {
    let address = service.metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn answers_are_right_while_slots_change() {
    let _in_use = gpus();
    slots_follow_the_use("cuda,cpu", &[POISONED_WIRE]).await;
    slots_follow_the_use("cuda,cpu", &[POISONED_WIRE, ("EXPERTD_CUDA_POISON", "50")]).await;
}

/// A source on a CPU has the same slots, in host memory.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_right_while_slots_of_a_cpu_change() {
    slots_follow_the_use("cpu,cpu", &[POISONED_WIRE, FAILED_COPIES]).await;
}

/// After a reload and a fault slots fill with the experts that were used most before, whatever the first steps use.
#[tokio::test(flavor = "multi_thread")]
async fn slots_start_warm() {
    let mut pair = Pair::start("cpu,cpu", &["--slot-memory", "400K"], &[POISONED_WIRE]).await;
    let (hot, others): (Vec<i32>, Vec<i32>) = ((3..7).collect(), (9..13).collect());
    for step in 0..40 {
        pair.call(0, 8, if step % 10 == 0 { &others } else { &hot }).await;
    }
    for reloads in [true, false] {
        let ranks = pair.mixed.1.ranks();
        if reloads {
            reload_of(&pair.mixed.1, None, None).await.unwrap();
        } else {
            send(ranks[1], Signal::KILL);
        }
        eventually(PATIENCE, "new ranks", || {
            let now = pair.mixed.1.ranks();
            now.len() == 3 && now.iter().all(|rank| !ranks.contains(rank))
        });
        assert_eq!(pair.call(0, 1, &others).await, 0, "slots are empty in the first step");
        // Copies come one after the other meanwhile.
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        let before = pair.rows(0).await;
        assert_ne!(pair.call(0, 4, &hot).await, 0);
        let after = pair.rows(0).await;
        assert_eq!(after, [before[0] + 16, before[1]], "reload: {reloads}");
    }
}

/// Rows of several clients that wait for a step share the next one, in which each rank computes an expert once for all of them.
#[tokio::test(flavor = "multi_thread")]
async fn rows_of_several_clients_share_a_step() {
    const CLIENTS: usize = 4;
    let faults = tempfile::tempdir().unwrap();
    let environment = [("EXPERTD_INJECT_FAULTS", faults.path().to_str().unwrap()), POISONED_WIRE];
    let mut pair = Pair::start("cpu,cpu", &["--slot-memory", "200K"], &environment).await;
    // In a round of which the machine leaves no time, a call may come after the step that holds the others.
    let mut rounds = 0;
    for round in 0.. {
        assert!(round < 20, "the calls of no two rounds waited together");
        let place = faults.path().join("worker-slow");
        std::fs::write(&place, "").unwrap();
        let (first, client) = (pair.request(1, 2, &all()), pair.mixed.0.clone());
        let held = tokio::spawn(async move { client.forward(first, None).await });
        eventually(PATIENCE, "a step in which a rank is slow", || !place.exists());
        let before = counts(&pair.mixed.1, 0).await;
        let mut calls = Vec::new();
        for tokens in 1..=CLIENTS {
            let request = pair.request(0, tokens, &all()).returning_timings();
            let client = Client::connect(&pair.mixed.1.address).await.unwrap();
            let of_alone = pair.alone.0.clone();
            calls.push(tokio::spawn(async move {
                let (wanted, found) = tokio::join!(
                    of_alone.forward(request.clone(), None),
                    client.forward(request.clone(), None)
                );
                let (wanted, found) =
                    (decode(&wanted.unwrap().rows, expertd_types::DType::F32), found.unwrap());
                check_within(TOLERANCE, &found, &wanted, &request);
                found.receipt.unwrap()
            }));
        }
        let mut admin =
            AdminClient::new(expertd_client::transport::connect(&pair.mixed.1.admin).await.unwrap());
        let mut wait_together = false;
        while !wait_together && !held.is_finished() {
            let status = admin.get_status(GetStatusRequest {}).await.unwrap().into_inner();
            wait_together = status.requests_queued == CLIENTS as u64;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        held.await.unwrap().unwrap();
        let mut steps = Vec::new();
        for call in calls {
            let receipt = call.await.unwrap();
            if !wait_together {
                continue;
            }
            let rows: Vec<u32> = receipt.timings.iter().map(|step| step.tokens).collect();
            assert_eq!(rows, [(1..=CLIENTS as u32).sum::<u32>()], "rows of all clients in one step");
            steps.extend(receipt.steps);
        }
        if !wait_together {
            continue;
        }
        assert!(steps.len() == CLIENTS && steps.iter().all(|step| *step == steps[0]), "steps {steps:?}");
        let after = counts(&pair.mixed.1, 0).await;
        let sum = |counts: Vec<Vec<u64>>| counts.into_iter().flatten().sum::<u64>();
        assert_eq!(sum(after) - sum(before), 10 * K as u64, "round {round}");
        rounds += 1;
        if rounds == 2 {
            break;
        }
    }
}

/// Each family and format is computed from slots, which are too few for the experts in use.
#[tokio::test(flavor = "multi_thread")]
async fn recorded_answers_of_every_family_and_format_with_slots() {
    let mut rng = expertd_test_seed::rng();
    let quantised = expertd_test_fixtures::all("quantised");
    for (index, model) in families().iter().map(|family| fixture(family)).chain(quantised).enumerate() {
        let workers = index % 3 + 1;
        let placed = placement_that_needs_cpu_ranks(&model, workers, &mut rng);
        let (_folder, file) = write(&placed);
        let slot_memory = slot_memory(&model).to_string();
        let flags =
            ["--device", "cpu,cpu", "--placement", file.to_str().unwrap(), "--slot-memory", &slot_memory];
        let flags = [&flags[..], &PATIENT].concat();
        let service = Service::start_checkpoint(&model, workers as u32 + 1, &flags, &[POISONED_WIRE]);
        let ranks = service.ranks();
        verified(&service, &model, "f32", &["1000", "1", "1000", "3"], "1e-2").await;
        assert_eq!(service.ranks(), ranks, "{}: a step failed", model.display());
        let from_slots = copied_rows(&service, &placed).await;
        assert!(from_slots > 0, "{}: no row found its expert in a slot", model.display());
    }
}

/// Rows that the source has computed with experts that CPU ranks own.
pub(crate) async fn copied_rows(service: &Service, placed: &ExpertPlacement) -> u64 {
    let mut rows = 0;
    for (layer, of_layer) in placed.layers() {
        let counted = counts(service, layer.0).await;
        let of_cpus = (1..counted.len() as u32).flat_map(|rank| of_layer.first_owned_by(Rank(rank)));
        rows += of_cpus.map(|expert| counted[0][expert as usize]).sum::<u64>();
    }
    rows
}

/// A random placement that leaves to CPU ranks an expert that recorded rows use.
pub(crate) fn placement_that_needs_cpu_ranks(
    model: &Path,
    workers: usize,
    rng: &mut TestRng,
) -> ExpertPlacement {
    let golden = Golden::read(&model.join("golden.safetensors")).unwrap();
    for _ in 0..10_000 {
        let placed = placement(model, workers, rng);
        let needs = |(layer, of_layer): (LayerId, &LayerPlacement)| {
            let of_source = of_layer.experts_of(Rank(0));
            match &golden.layers[&layer.0].routing {
                Some(routing) => routing.ids.iter().any(|id| !of_source.contains(&id.cast_unsigned())),
                // The blocks of some families do not return their ids. Each row uses some expert.
                None => of_source.is_empty(),
            }
        };
        if placed.layers().any(needs) {
            return placed;
        }
    }
    panic!("no placement of {} leaves a recorded row's expert to CPU ranks", model.display())
}

/// Memory for one expert of each layer in f32, in which CPU ranks hold some formats: several slots in others.
pub(crate) fn slot_memory(model: &Path) -> u64 {
    let checkpoint = Checkpoint::open_layers(model, LayerChoice::All).unwrap();
    let spec = checkpoint.spec();
    let padded = |features: usize| features.next_multiple_of(64) as u64;
    spec.moe_layers().map(|(_, moe)| 3 * 4 * padded(spec.hidden) * padded(moe.experts.width)).sum()
}

/// Several clients at a time, while slots change and copies fail; ranks of both kinds are killed and stopped, and placements come in.
#[tokio::test(flavor = "multi_thread")]
async fn slots_of_a_cpu_change_under_load_faults_and_reloads() {
    let mut rng = expertd_test_seed::rng();
    let model = fixture(FAMILY);
    let (_folder, file) = write(&placement(&model, 2, &mut rng));
    let slot_memory = slot_memory(&model).to_string();
    let flags = ["--device", "cpu,cpu", "--placement", file.to_str().unwrap(), "--slot-memory", &slot_memory];
    let more = [&flags[..], &["--stream-rows", "48"]].concat();
    let service = Service::start_checkpoint(&model, 3, &more, &[POISONED_WIRE, FAILED_COPIES]);
    crate::tiers::faults_are_unseen(&service).await;
    let ranks = service.ranks();
    crate::tiers::placements_come_in(&service, 2, false, &mut rng).await;
    assert!(service.ranks().iter().all(|rank| !ranks.contains(rank)));
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
