//! Tests of FP8 products (`--fp8-compute fp8`) through the service: recorded answers and equal bits at several numbers of CPU
//! ranks, and GPU ranks beside CPU ranks.

use crate::gpu::gpus;
use crate::service::load::Rows;
use crate::service::{Service, golden};
use clap::Parser as _;
use expertd_cli::verify::{VerifyArgs, verify};
use expertd_proto::Client;
use expertd_proto::v1::ForwardRequest;
use expertd_types::DType;
use expertd_types::rows::{decode, encode, encode_i32, relative_error};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

const FIXTURES: [&str; 4] = [
    "../quantised/deepseek_v3-fp8",
    "../quantised/deepseek_v3-fp8-odd",
    "../quantised/granitemoe-fp8-odd",
    "../quantised/llama4_text-fp8-odd",
];
/// Rows of a request.
const ROWS: usize = 40;

#[derive(clap::Parser)]
struct Verify {
    #[command(flatten)]
    args: VerifyArgs,
}

/// The largest relative error of a recorded row.
async fn recorded_error(service: &Service, name: &str) -> f64 {
    let path = golden(name);
    let line = ["verify", "--address", &service.address, "--golden", path.to_str().unwrap()];
    // What quantising rows changes, in any implementation.
    let line = [&line[..], &["--tolerance", "1e-1"]].concat();
    let report = verify(&Verify::try_parse_from(line).unwrap().args).await.unwrap();
    assert!(report.ok(), "{name}: {report:#?}");
    report.largest_error()
}

/// Requests of recorded rows for all layers, `k` random experts for each row.
async fn requests(client: &Client, name: &str, k: usize) -> Vec<ForwardRequest> {
    let mut rng = SmallRng::seed_from_u64(11);
    let model = client.model("").await.unwrap();
    let mut rows = Rows::new(&golden(name), 11, ROWS);
    let mut of_layer = |moe: &expertd_proto::v1::MoeLayer| {
        let mut experts: Vec<i32> = (0..moe.num_experts as i32).collect();
        let mut ids = Vec::new();
        for _ in 0..ROWS {
            experts.shuffle(&mut rng);
            ids.extend_from_slice(&experts[..k]);
        }
        let weights: Vec<f32> = (0..ROWS * k).map(|_| rng.random_range(0.05..0.9)).collect();
        let (request, _) = rows.draw_of(moe.layer, ROWS);
        request.with_routing(encode_i32(&ids), encode(&weights, DType::F32), k as u32)
    };
    model.moe_layers.iter().map(&mut of_layer).collect()
}

/// With two experts for each row a sum over ranks has at most two terms, whose order changes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn one_and_three_cpu_ranks_give_the_same_bits_near_the_recorded_answers() {
    for name in FIXTURES {
        let widened = Service::start(name, 1, &[]);
        let services = [1, 3].map(|ranks| Service::start(name, ranks, &["--fp8-compute", "fp8"]));
        for service in &services {
            // Without quantised rows the error would be that of f32.
            let error = recorded_error(service, name).await;
            assert!(error > 1e-3, "{name}: {error:.1e}");
        }
        let mut clients = Vec::new();
        for service in [&widened, &services[0], &services[1]] {
            clients.push(Client::connect(&service.address).await.unwrap());
        }
        for request in requests(&clients[0], name, 2).await {
            let mut answers = Vec::new();
            for client in &clients {
                answers.push(client.forward(request.clone(), None).await.unwrap().rows);
            }
            assert_eq!(answers[1], answers[2], "{name}, layer {}", request.layer);
            assert_ne!(answers[0], answers[1], "{name}, layer {}: rows were not quantised", request.layer);
        }
    }
}

/// GPU ranks round what they send to bf16, add FP8 products with fewer bits than f32 has, and may therefore give an element of h
/// the neighbouring code.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn gpu_ranks_agree_with_cpu_ranks() {
    let (most, _in_use) = gpus();
    for name in FIXTURES {
        let cpu_ranks = Service::start(name, 1, &["--fp8-compute", "fp8"]);
        let cpu = Client::connect(&cpu_ranks.address).await.unwrap();
        for ranks in 1..=most {
            let gpu_ranks = Service::start(name, ranks, &["--device", "cuda", "--fp8-compute", "fp8"]);
            let gpu = Client::connect(&gpu_ranks.address).await.unwrap();
            let mut errors = Vec::new();
            for request in requests(&cpu, name, 3).await {
                let [found, wanted] = [
                    gpu.forward(request.clone(), None).await.unwrap(),
                    cpu.forward(request.clone(), None).await.unwrap(),
                ]
                .map(|answer| decode(&answer.rows, DType::F32));
                assert_eq!(found.len(), wanted.len(), "{name}");
                let hidden = wanted.len() / ROWS;
                let rows = found.chunks(hidden).zip(wanted.chunks(hidden));
                errors.extend(rows.map(|(found, wanted)| relative_error(found, wanted)));
            }
            let mean = (errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64).sqrt();
            let worst = errors.iter().copied().fold(0.0, f64::max);
            println!("{name}, {ranks} GPUs: root mean square {mean:.1e}, worst {worst:.1e}");
            // Rows that are not quantised differ by 4e-2 and up to 8e-2.
            assert!(mean < 1.5e-2 && worst < 6e-2, "{name}, {ranks} GPUs: {mean:.1e}, {worst:.1e}");
        }
    }
}
