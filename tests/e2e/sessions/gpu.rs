//! Sessions on GPU ranks, which read and write the client's rows in place. Ignored by default:
//!
//!     cargo test --release --features cuda --test e2e sessions::gpu -- --ignored --nocapture --test-threads 1

use expertd_model::synth::{self, SynthConfig};
use expertd_proto::v1::{ForwardResponse, Routing};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::gpu::most_ranks;
use crate::service::part;

/// Relative L2 error of a row computed in bf16.
const TOLERANCE: f64 = 1e-2;

fn host(family: &str, ranks: u32, more: &[&str]) -> Host {
    Host::start(family, ranks, &[&["--device", "cuda"], more].concat())
}

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn answers_of_every_family_equal_those_of_grpc() {
    let (runtime, most) = (runtime(), most_ranks());
    for (index, family) in part((0..).zip(families()).collect()) {
        let host = host(&family, index % most + 1, &[]);
        let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
        let session = host.open();
        host.in_place(&runtime);
        let mut rows = Rows::new(&golden(&family), 1, 32).within(TOLERANCE);
        for round in 0..6 {
            let (mut request, wanted) = rows.draw();
            request.return_routing = true;
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            let over_session = session.forward(&request, LOST).unwrap();
            check_within(TOLERANCE, &over_session, &wanted, &request);
            assert_eq!(over_session.rows, over_grpc.rows, "{family}, round {round}");
            let (a, b) = (over_grpc.receipt.unwrap(), over_session.receipt.unwrap());
            assert_eq!((&a.topk_ids, &a.topk_weights), (&b.topk_ids, &b.topk_weights));
        }
        println!("{family}: {} ranks", index % most + 1);
    }
}

/// Sizes at which kernels access rows directly, copy engines carry them, and a request is split over steps; rows of 256 elements,
/// which need no padding.
#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn answers_of_every_size_and_type_equal_those_of_grpc() {
    let (runtime, ranks) = (runtime(), most_ranks());
    let folder = tempfile::tempdir().unwrap();
    synth::write(&SynthConfig { hidden: 256, ..SynthConfig::new(FAMILY) }, folder.path()).unwrap();
    let address = format!("unix:{}", folder.path().join("session.sock").display());
    let flags = ["--device", "cuda", "--session-listen", &address, "--max-tokens-per-step", "8192"];
    let service = Service::start_checkpoint(folder.path(), ranks, &flags, &[]);
    let host = Host { service, address, _folder: folder };
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let options = SessionOptions { rows_bytes: 128 << 20, ..SessionOptions::default() };
    let session = SessionClient::open(&host.address, &options).unwrap();
    host.in_place(&runtime);
    let mut rng = SmallRng::seed_from_u64(3);
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        for tokens in [1, 7, 300, 2500, 8192, 16_000] {
            let values: Vec<f32> = (0..tokens * 256).map(|_| rng.random_range(-2.0..2.0)).collect();
            let mut request =
                ForwardRequest::inline(0, tokens, expertd_proto::v1::DType::DtypeF32, encode(&values, dtype));
            request.dtype = dtype as i32;
            let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
            let over_session = session.forward(&request, LOST).unwrap();
            assert!(over_session.rows == over_grpc.rows, "{dtype}, {tokens} rows");
        }
    }
}

/// Rows and returned routing of requests of many sizes, one at a time, with the gate's routing and with the same routing given; over gRPC
/// and through a session. `parts` says where results are cut (`EXPERTD_CUDA_POISON`).
fn answers_in_parts(checkpoint: &Path, ranks: u32, parts: &str) -> Vec<(u32, ForwardResponse)> {
    let (runtime, folder) = (runtime(), tempfile::tempdir().unwrap());
    let address = format!("unix:{}", folder.path().join("session.sock").display());
    let flags = ["--device", "cuda", "--session-listen", &address, "--max-tokens-per-step", "8192"];
    let environment = [("EXPERTD_CUDA_POISON", parts)];
    let service = Service::start_checkpoint(checkpoint, ranks, &flags, &environment);
    let host = Host { service, address, _folder: folder };
    let client = runtime.block_on(Client::connect(&host.service.address)).unwrap();
    let options = SessionOptions { rows_bytes: 128 << 20, ..SessionOptions::default() };
    let session = SessionClient::open(&host.address, &options).unwrap();
    host.in_place(&runtime);
    let mut rng = SmallRng::seed_from_u64(4);
    let mut answers = Vec::new();
    for tokens in [1_u32, 64, 130, 700, 2048, 4096, 5001, 8192] {
        let values: Vec<f32> =
            (0..tokens as usize * PARTS_HIDDEN).map(|_| rng.random_range(-2.0..2.0)).collect();
        let rows = encode(&values, DType::Bf16);
        let mut request = ForwardRequest::inline(0, tokens, expertd_proto::v1::DType::DtypeBf16, rows);
        request.return_routing = true;
        let over_grpc = runtime.block_on(client.forward(request.clone(), None)).unwrap();
        let receipt = over_grpc.receipt.clone().unwrap();
        let (topk_ids, topk_weights) = (receipt.topk_ids, receipt.topk_weights);
        answers.push((tokens, over_grpc));
        answers.push((tokens, session.forward(&request, LOST).unwrap()));
        let k = topk_ids.len() as u32 / 4 / tokens;
        request.routing = Some(Routing { topk_ids, topk_weights, k });
        answers.push((tokens, session.forward(&request, LOST).unwrap()));
    }
    answers
}

/// Elements of a row in [`answers_in_parts`], with which combine has several parts from 480 rows on.
const PARTS_HIDDEN: usize = 2048;

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn steps_in_parts_give_the_same_bits() {
    let ranks = most_ranks();
    let folder = tempfile::tempdir().unwrap();
    // This family has shared experts.
    let config = SynthConfig { hidden: PARTS_HIDDEN, experts: 16, ..SynthConfig::new("qwen2_moe") };
    synth::write(&config, folder.path()).unwrap();
    let whole = answers_in_parts(folder.path(), ranks, "0");
    for parts in ["25", "12/25/37/50/62/75/87"] {
        let found = answers_in_parts(folder.path(), ranks, parts);
        for ((tokens, wanted), (_, found)) in whole.iter().zip(&found) {
            assert!(wanted.rows == found.rows, "{parts}, {tokens} rows");
            let (a, b) = (wanted.receipt.as_ref().unwrap(), found.receipt.as_ref().unwrap());
            assert!(a.topk_ids == b.topk_ids && a.topk_weights == b.topk_weights, "{parts}, {tokens} rows");
        }
        assert_eq!(whole.len(), found.len());
    }
}

#[test]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
fn a_killed_rank_and_clients_that_come_and_go_fail_no_call() {
    let (runtime, ranks) = (runtime(), most_ranks());
    let host = host(FAMILY, ranks, &[]);
    let load = Load::start_within(TOLERANCE, &host, 600);
    for round in 0..3 {
        load.goes_on();
        host.in_place(&runtime);
        for _ in 0..5 {
            let session = host.open();
            let (request, wanted) = Rows::new(&golden(FAMILY), round, 64).draw();
            check_within(TOLERANCE, &session.forward(&request, LOST).unwrap(), &wanted, &request);
        }
        let before = host.service.ranks();
        send(before[round as usize % before.len()], Signal::KILL);
        eventually(LOST, "the next generation serves", || {
            let now = host.service.ranks();
            now.len() == before.len() && now.iter().all(|pid| !before.contains(pid))
        });
        load.goes_on();
    }
    let generations = load.stop();
    assert!(generations.iter().max() >= Some(&4), "{:?}", generations.iter().max());
}
