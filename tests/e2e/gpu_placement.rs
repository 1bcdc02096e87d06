//! Placements with copies of experts on two GPU ranks. Ignored by default, like the tests of `gpu`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use expertd_client::Client;
use expertd_model::{Checkpoint, LayerChoice, MoeLayer};
use expertd_proto::v1::GetModelResponse;
use expertd_types::rows::{decode, relative_error};
use expertd_types::{DType, ExpertPlacement, LayerId, LayerPlacement, Rank};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::balance::{ROWS, counts, owned, reload_placement, routed};
use crate::gpu::{QUANTISED, TOLERANCE, gpus, start, verified_in_both_types};
use crate::service::load::{Load, Rows};
use crate::service::{Service, eventually, families, fixture, golden, part, send};

const RANKS: u32 = 2;

/// The first expert of every layer has copies on both ranks; the others are split against their order, with one more on rank 1
/// than on rank 0 and, in every other layer, the other way round.
fn placement(fixture_name: &str) -> ExpertPlacement {
    let checkpoint = Checkpoint::open_layers(&fixture(fixture_name), LayerChoice::All).unwrap();
    let of = |(index, (layer, moe)): (usize, (LayerId, &MoeLayer))| {
        let rest: Vec<u32> = (1..moe.experts.count as u32).rev().collect();
        let (first, second) = rest.split_at(rest.len() / 2);
        let mut ranks = [[&[0], first].concat(), [&[0], second].concat()];
        if index % 2 == 1 {
            ranks.reverse();
        }
        (layer, LayerPlacement::new(ranks.to_vec()))
    };
    ExpertPlacement::new(RANKS as usize, checkpoint.spec().moe_layers().enumerate().map(of))
}

fn write(placement: &ExpertPlacement) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("placement.json");
    std::fs::write(&file, serde_json::to_string(placement).unwrap()).unwrap();
    (folder, file)
}

async fn model(service: &Service) -> GetModelResponse {
    Client::connect(&service.address).await.unwrap().model("").await.unwrap()
}

/// A lock on the GPUs, if two ranks can run.
macro_rules! two_ranks {
    () => {{
        let (most, in_use) = gpus();
        assert!(
            most >= RANKS,
            "these tests need {RANKS} ranks, found {most}; EXPERTD_TEST_GPUS=0,0 lets them share a GPU"
        );
        in_use
    }};
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_every_family_with_copies_of_experts() {
    let _in_use = two_ranks!();
    for family in part(families()) {
        verified_with_copies(&family, "bf16", "1e-2").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn recorded_answers_of_quantised_checkpoints_with_copies_of_experts() {
    let _in_use = two_ranks!();
    for name in part(QUANTISED.to_vec()).into_iter().filter(|name| !crate::gpu::is_refused(name)) {
        // FP8 products differ from f32 by the rounding of quantised rows, in any implementation.
        for (compute, tolerance) in [("bf16", "1e-2"), ("fp8", "1e-1")] {
            if compute == "fp8" && (!name.contains("-fp8-") || crate::gpu::is_portable()) {
                continue;
            }
            verified_with_copies(name, compute, tolerance).await;
        }
    }
}

async fn verified_with_copies(name: &str, compute: &str, tolerance: &str) {
    let (_folder, file) = write(&placement(name));
    let more = ["--fp8-compute", compute, "--placement", file.to_str().unwrap()];
    let service = start(name, RANKS, &more);
    verified_in_both_types(&service, name, RANKS, tolerance).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn copies_share_the_rows_of_an_expert_and_give_the_same_bits() {
    let _in_use = two_ranks!();
    let family = "qwen3_moe";
    let service = start(family, RANKS, &["--max-tokens-per-step", "8"]);
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(family), 1, ROWS);
    let layer = rows.layers()[0];
    let (request, _) = rows.draw_of(layer, ROWS);
    let experts = counts(&service, layer).await[0].len();
    let hot = routed(request, |row| [0, 1 + (row % (experts - 1)) as i32]);
    let without = client.forward(hot.clone(), None).await.unwrap().rows;
    let counted = counts(&service, layer).await;
    let of_experts = |from: &[Vec<u64>], to: &[Vec<u64>]| -> Vec<u64> {
        (0..experts)
            .map(|expert| from.iter().zip(to).map(|(from, to)| to[expert] - from[expert]).sum())
            .collect()
    };
    let zeros = vec![vec![0; experts]; RANKS as usize];
    let expected = of_experts(&zeros, &counted);

    let placed = placement(family);
    let (_folder, file) = write(&placed);
    reload_placement(&service, &file).await.unwrap();
    let before = counts(&service, layer).await;
    let with = client.forward(hot.clone(), None).await.unwrap().rows;
    let after = counts(&service, layer).await;
    assert_eq!(of_experts(&before, &after), expected);
    // Both copies of expert 0 compute half of its rows; every other expert has one owner.
    let of_zero = [0, 1].map(|rank: usize| after[rank][0] - before[rank][0]);
    assert_eq!(of_zero, [ROWS as u64 / 2; 2]);
    let of_layer = placed.layer(LayerId(layer)).unwrap();
    for expert in 1..experts {
        let other = usize::from(of_layer.experts_of(Rank(0)).contains(&(expert as u32)));
        assert_eq!(after[other][expert], before[other][expert], "expert {expert}");
    }
    // Other sums are rounded between ranks than without the placement, but the same ones every time.
    let error = relative_error(&decode(&with, DType::F32), &decode(&without, DType::F32));
    assert!(error < TOLERANCE, "{error}");
    for _ in 0..20 {
        assert_eq!(client.forward(hot.clone(), None).await.unwrap().rows, with);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn a_placement_comes_in_under_load_and_outlives_a_killed_rank() {
    let _in_use = two_ranks!();
    let family = "qwen3_moe";
    let service = start(family, RANKS, &[]);
    let before = model(&service).await;
    let placed = placement(family);
    let (_folder, file) = write(&placed);
    let load = Load::start_within(TOLERANCE, &service.address, &golden(family), 32).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    reload_placement(&service, &file).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let old = service.ranks();
    send(old[1], Signal::KILL);
    eventually(Duration::from_secs(60), "new ranks", || {
        let now = service.ranks();
        now.len() == 2 && now.iter().all(|rank| !old.contains(rank))
    });
    tokio::time::sleep(Duration::from_secs(3)).await;
    let calls = load.stop().await;
    let failed = calls.iter().find_map(|call| call.result.as_ref().err());
    assert!(failed.is_none(), "{failed:?}");
    let after = model(&service).await;
    assert_eq!(after.weight_fingerprint, before.weight_fingerprint);
    assert!(after.generation > before.generation, "{} and {}", before.generation, after.generation);
    for (layer, of_layer) in placed.layers() {
        let expected = [0, 1].map(|rank| of_layer.experts_of(Rank(rank)).to_vec());
        assert_eq!(owned(&after, layer.0), expected, "layer {layer}");
    }
    reload_placement(&service, Path::new("contiguous")).await.unwrap();
    assert_eq!(model(&service).await.placement, before.placement);
}
