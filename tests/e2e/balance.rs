//! Rows per expert are counted on the ranks, and a placement from these counts comes in under load.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use expertd_cli::admin::AdminAddress;
use expertd_cli::reload::{ReloadArgs, reload};
use expertd_cli::status::expert_rows;
use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig};
use expertd_proto::v1::{ForwardRequest, GetModelResponse, ReloadResponse};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement, Rank};
use rustix::process::Signal;
use serde_json::json;

use crate::service::load::{Rows, check};
use crate::service::{Service, eventually, fixture, golden, send, serve_to_the_end, with_patience};

const FAMILY: &str = "qwen3_moe";
/// Rows of a request.
pub(crate) const ROWS: usize = 12;

/// The counts of a layer, `[ranks][experts]`.
pub(crate) async fn counts(service: &Service, layer: u32) -> Vec<Vec<u64>> {
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let rows = expert_rows(&admin).await.unwrap();
    rows.layers.into_iter().find(|found| found.layer == LayerId(layer)).unwrap().ranks
}

/// A request whose row `i` goes to the experts `of(i)`, with equal weights.
pub(crate) fn routed(request: ForwardRequest, of: impl Fn(usize) -> [i32; 2]) -> ForwardRequest {
    let ids: Vec<u8> = (0..ROWS).flat_map(&of).flat_map(i32::to_le_bytes).collect();
    let weights: Vec<u8> = [0.5_f32; 2 * ROWS].into_iter().flat_map(f32::to_le_bytes).collect();
    request.with_routing(Bytes::from(ids), Bytes::from(weights), 2)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_are_counted_for_each_expert_over_generations() {
    let service = Service::start(FAMILY, 2, &with_patience(&["--max-tokens-per-step", "8"]));
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 1, ROWS);
    let layer = rows.layers()[0];
    let (request, _) = rows.draw_of(layer, ROWS);
    let experts = counts(&service, layer).await[0].len();
    assert_eq!(counts(&service, layer).await, vec![vec![0; experts]; 2]);

    // Every row goes to expert 0; the second expert counts up over the others.
    let hot = routed(request, |row| [0, 1 + (row % (experts - 1)) as i32]);
    let mut expected = vec![0; experts];
    expected[0] = ROWS as u64;
    (0..ROWS).for_each(|row| expected[1 + row % (experts - 1)] += 1);
    client.forward(hot.clone(), None).await.unwrap();
    // The first half of the experts belongs to rank 0.
    let by_rank = |expected: &[u64]| {
        let (first, second) = expected.split_at(experts / 2);
        let zeros = vec![0; experts / 2];
        vec![[first, zeros.as_slice()].concat(), [zeros.as_slice(), second].concat()]
    };
    assert_eq!(counts(&service, layer).await, by_rank(&expected));

    // The counts outlive a generation.
    let ranks = service.ranks();
    send(ranks[0], Signal::KILL);
    eventually(Duration::from_secs(120), "new ranks", || {
        let now = service.ranks();
        now.len() == 2 && now.iter().all(|rank| !ranks.contains(rank))
    });
    assert_eq!(counts(&service, layer).await, by_rank(&expected));
    client.forward(hot, None).await.unwrap();
    expected.iter_mut().for_each(|rows| *rows *= 2);
    assert_eq!(counts(&service, layer).await, by_rank(&expected));
}

/// The experts of layers whose first expert has copies on both ranks and whose others are split against their order.
fn placement(layers: &[u32], experts: usize) -> ExpertPlacement {
    let rest: Vec<u32> = (1..experts as u32).rev().collect();
    let (first, second) = rest.split_at(rest.len() / 2);
    let ranks = [first, second].map(|experts| [&[0], experts].concat());
    let placed = LayerPlacement::new(ranks.to_vec());
    ExpertPlacement::new(2, layers.iter().map(|&layer| (LayerId(layer), placed.clone())))
}

pub(crate) async fn reload_placement(service: &Service, placement: &Path) -> Result<ReloadResponse, String> {
    let admin = AdminAddress { address: Some(service.admin.clone()), ..AdminAddress::default() };
    let args = ReloadArgs { model: None, placement: Some(placement.to_owned()), admin, json: false };
    reload(&args).await.map_err(|error| error.to_string())
}

/// `[ranks]`: the experts of a layer by GetModel.
pub(crate) fn owned(model: &GetModelResponse, layer: u32) -> Vec<Vec<u32>> {
    let ranks = model.placement.iter().map(|rank| {
        let ranges = rank.experts.iter().filter(|range| range.layer == layer);
        ranges.flat_map(|range| range.first..range.first + range.count).collect()
    });
    ranks.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placement_with_copies_comes_in_without_a_failed_call() {
    let service = Service::start(FAMILY, 2, &with_patience(&["--max-tokens-per-step", "8"]));
    let client = Client::connect(&service.address).await.unwrap();
    let mut rows = Rows::new(&golden(FAMILY), 1, ROWS);
    let layers = rows.layers().to_vec();
    let layer = layers[0];
    let (request, wanted) = rows.draw_of(layer, ROWS);
    let experts = counts(&service, layer).await[0].len();
    let before = client.model("").await.unwrap();

    let stop = Arc::new(AtomicBool::new(false));
    let caller = {
        let (client, request, wanted, stop) =
            (client.clone(), request.clone(), wanted.clone(), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut versions = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                let response = client.forward(request.clone(), None).await.expect("no call fails");
                check(&response, &wanted, &request);
                versions.push(response.receipt.unwrap().weight_version);
            }
            versions
        })
    };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("placement.json");
    let placed = placement(&layers, experts);
    std::fs::write(&file, serde_json::to_string(&placed).unwrap()).unwrap();
    let report = reload_placement(&service, &file).await.unwrap();
    assert_eq!((report.weight_version, &report.weight_fingerprint), (2, &before.weight_fingerprint));
    let after = client.model("").await.unwrap();
    let of_layer = placed.layer(LayerId(layer)).unwrap();
    assert_eq!(owned(&after, layer), [0, 1].map(|rank| of_layer.experts_of(Rank(rank)).to_vec()));

    // Both copies of expert 0 compute half of its rows, and the same request gives the same bits.
    let hot = routed(request.clone(), |row| [0, 1 + (row % (experts - 1)) as i32]);
    let base = counts(&service, layer).await;
    stop.store(true, Ordering::Relaxed);
    let versions = caller.await.unwrap();
    assert!(versions.is_sorted() && versions.contains(&2), "{versions:?}");
    // Without other callers, because the order of sums may depend on the other rows of a step.
    let first = client.forward(hot.clone(), None).await.unwrap().rows;
    let quiet = counts(&service, layer).await;
    assert!(quiet.iter().flatten().sum::<u64>() >= base.iter().flatten().sum());
    assert_eq!(client.forward(hot, None).await.unwrap().rows, first);
    let now = counts(&service, layer).await;
    let of_zero = [0, 1].map(|rank: usize| now[rank][0] - quiet[rank][0]);
    assert_eq!(of_zero, [ROWS as u64 / 2; 2]);
    for expert in 1..experts {
        let ranks = [0, 1].map(|rank: usize| now[rank][expert] - quiet[rank][expert]);
        let owner = usize::from(!of_layer.experts_of(Rank(0)).contains(&(expert as u32)));
        assert_eq!(ranks[1 - owner], 0, "expert {expert}");
    }

    // A placement that cannot be used changes nothing; contiguous ranges come back.
    std::fs::write(&file, r#"{"ranks": 3, "layers": []}"#).unwrap();
    let refused = reload_placement(&service, &file).await.unwrap_err();
    assert!(refused.contains("for 3 ranks, but the service has 2"), "{refused}");
    let report = reload_placement(&service, Path::new("contiguous")).await.unwrap();
    assert_eq!(report.weight_version, 3);
    assert_eq!(owned(&client.model("").await.unwrap(), layer), owned(&before, layer));
}

/// Placements of released models have tens of kilobytes.
#[tokio::test(flavor = "multi_thread")]
async fn a_placement_of_hundreds_of_experts_is_taken() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().join("model"), folder.path().join("placement.json"));
    let config =
        SynthConfig { hidden: 16, experts: 384, width: 8, layers: 6, ..SynthConfig::new("qwen3_moe") };
    synth::write(&config, &path).unwrap();
    let service = Service::start_checkpoint(&path, 2, &[], &[]);
    let all: Vec<u32> = (0..384).collect();
    let layers: Vec<_> = (0..6).map(|layer| json!({"layer": layer, "experts": [all, all]})).collect();
    let text = json!({"ranks": 2, "layers": layers}).to_string();
    assert!(text.len() > 16 << 10, "{}", text.len());
    std::fs::write(&file, text).unwrap();
    let report = reload_placement(&service, &file).await.unwrap();
    assert_eq!(report.weight_version, 2);
    let model = Client::connect(&service.address).await.unwrap().model("").await.unwrap();
    assert_eq!(owned(&model, 5), [all.clone(), all]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_starts_with_a_placement() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("placement.json");
    let mut rows = Rows::new(&golden(FAMILY), 1, ROWS);
    let layers = rows.layers().to_vec();
    let experts = {
        let service = Service::start(FAMILY, 2, &[]);
        counts(&service, layers[0]).await[0].len()
    };
    std::fs::write(&file, serde_json::to_string(&placement(&layers, experts)).unwrap()).unwrap();
    let service = Service::start(FAMILY, 2, &["--placement", file.to_str().unwrap()]);
    let client = Client::connect(&service.address).await.unwrap();
    for layer in layers {
        let (request, wanted) = rows.draw_of(layer, ROWS);
        check(&client.forward(request.clone(), None).await.unwrap(), &wanted, &request);
    }
    std::fs::write(&file, r#"{"ranks": 2, "layers": [{"layer": 99, "experts": [[], []]}]}"#).unwrap();
    let (code, error) =
        serve_to_the_end(&fixture(FAMILY), &["--ranks", "2", "--placement", file.to_str().unwrap()]);
    assert_eq!(code, Some(64), "{error}");
    assert!(error.contains("placement.json") && error.contains("layer 99"), "{error}");
}
