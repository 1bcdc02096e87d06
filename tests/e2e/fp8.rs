//! Tests of FP8 products (`--fp8-compute fp8`, `--mxfp4-compute fp8`) through the service: recorded answers and equal bits at several
//! numbers of CPU ranks, and GPU ranks beside CPU ranks.

use crate::gpu::gpus;
use crate::service::load::Rows;
use crate::service::{Service, golden};
use clap::Parser as _;
use expertd_cli::verify::{VerifyArgs, verify};
use expertd_client::Client;
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_proto::v1::ForwardRequest;
use expertd_types::DType;
use expertd_types::rows::{decode, encode, encode_i32, relative_error};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::StandardNormal;

/// Fixtures with experts in FP8.
const FP8: [&str; 4] = [
    "../quantised/deepseek_v3-fp8",
    "../quantised/deepseek_v3-fp8-odd",
    "../quantised/granitemoe-fp8-odd",
    "../quantised/llama4_text-fp8-odd",
];
const FP8_PRODUCTS: [&str; 2] = ["--fp8-compute", "fp8"];
/// Fixtures with experts in MXFP4.
const MXFP4: [&str; 2] = ["../quantised/gpt_oss-mxfp4-odd", "../quantised/qwen3_moe-mxfp4-library"];
const MXFP4_PRODUCTS: [&str; 2] = ["--mxfp4-compute", "fp8"];
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

/// Ids and weights of `k` random experts for each row.
fn routing(rng: &mut SmallRng, rows: usize, num_experts: u32, k: usize) -> (Vec<i32>, Vec<f32>) {
    let mut experts: Vec<i32> = (0..num_experts.cast_signed()).collect();
    let mut ids = Vec::new();
    for _ in 0..rows {
        experts.shuffle(rng);
        ids.extend_from_slice(&experts[..k]);
    }
    (ids, (0..rows * k).map(|_| rng.random_range(0.05..0.9)).collect())
}

/// Requests of recorded rows for all layers, `k` random experts for each row, or as many as a layer allows.
async fn requests(client: &Client, name: &str, k: usize) -> Vec<ForwardRequest> {
    let mut rng = SmallRng::seed_from_u64(11);
    let model = client.model("").await.unwrap();
    let mut rows = Rows::new(&golden(name), 11, ROWS);
    let mut of_layer = |moe: &expertd_proto::v1::MoeLayer| {
        let k = k.min(moe.max_k as usize);
        let (ids, weights) = routing(&mut rng, ROWS, moe.num_experts, k);
        let (request, _) = rows.draw_of(moe.layer, ROWS);
        request.with_routing(encode_i32(&ids), encode(&weights, DType::F32), k as u32)
    };
    model.moe_layers.iter().map(&mut of_layer).collect()
}

/// With two experts for each row a sum over ranks has at most two terms, whose order changes nothing.
async fn equal_bits_at_one_and_three_ranks(names: &[&str], products: &[&str]) {
    for name in names {
        let widened = Service::start(name, 1, &[]);
        let services = [1, 3].map(|ranks| Service::start(name, ranks, products));
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

#[tokio::test(flavor = "multi_thread")]
async fn one_and_three_cpu_ranks_give_the_same_bits_near_the_recorded_answers() {
    equal_bits_at_one_and_three_ranks(&FP8, &FP8_PRODUCTS).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mxfp4_experts_multiply_fp8_rows_on_request() {
    equal_bits_at_one_and_three_ranks(&MXFP4, &MXFP4_PRODUCTS).await;
    // The setting for FP8 experts changes nothing for them.
    let services = [&[][..], &FP8_PRODUCTS].map(|products| Service::start(MXFP4[0], 1, products));
    let [plain, fp8] = services.each_ref().map(|service| Client::connect(&service.address));
    let (plain, fp8) = (plain.await.unwrap(), fp8.await.unwrap());
    for request in requests(&plain, MXFP4[0], 2).await {
        let answers = [plain.forward(request.clone(), None).await, fp8.forward(request, None).await];
        let [plain, fp8] = answers.map(|answer| answer.unwrap().rows);
        assert_eq!(plain, fp8);
    }
}

/// Compares the answers of GPU ranks with those of CPU ranks. GPU ranks round what they send to bf16, add FP8 products with fewer bits
/// than f32 has, and may therefore give an element of h the neighbouring code.
async fn assert_near(name: &str, gpu: &Client, cpu: &Client, requests: Vec<ForwardRequest>) {
    let mut errors = Vec::new();
    for request in requests {
        let rows = request.tokens as usize;
        let answers = [gpu.forward(request.clone(), None).await, cpu.forward(request, None).await];
        let [found, wanted] = answers.map(|answer| decode(&answer.unwrap().rows, DType::F32));
        assert_eq!(found.len(), wanted.len(), "{name}");
        let hidden = wanted.len() / rows;
        let rows = found.chunks(hidden).zip(wanted.chunks(hidden));
        errors.extend(rows.map(|(found, wanted)| relative_error(found, wanted)));
    }
    let mean = (errors.iter().map(|error| error * error).sum::<f64>() / errors.len() as f64).sqrt();
    let worst = errors.iter().copied().fold(0.0, f64::max);
    println!("{name}: root mean square {mean:.1e}, worst {worst:.1e}");
    // Rows that are not quantised differ by 4e-2 and up to 8e-2.
    assert!(mean < 1.5e-2 && worst < 6e-2, "{name}: {mean:.1e}, {worst:.1e}");
}

/// Compares the fixtures' answers at every number of GPU ranks.
async fn gpu_ranks_agree(most: u32, names: &[&str], products: &[&str]) {
    for name in names {
        let cpu_ranks = Service::start(name, 1, products);
        let cpu = Client::connect(&cpu_ranks.address).await.unwrap();
        for ranks in 1..=most {
            let gpu_ranks = Service::start(name, ranks, &[&["--device", "cuda"], products].concat());
            let gpu = Client::connect(&gpu_ranks.address).await.unwrap();
            assert_near(&format!("{name}, {ranks} GPU ranks"), &gpu, &cpu, requests(&cpu, name, 3).await)
                .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn gpu_ranks_agree_with_cpu_ranks() {
    let (most, _in_use) = gpus();
    gpu_ranks_agree(most, &FP8, &FP8_PRODUCTS).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn gpu_ranks_agree_with_cpu_ranks_on_mxfp4() {
    let (most, _in_use) = gpus();
    gpu_ranks_agree(most, &MXFP4, &MXFP4_PRODUCTS).await;
}

/// Enough rows for segments with tokens as rows, alone and in pairs, at sizes that 128 does not divide.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs; run on a machine that has them with `-- --ignored`"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn gpu_ranks_agree_with_cpu_ranks_on_many_rows_of_mxfp4() {
    let (most, _in_use) = gpus();
    let (hidden, experts, k) = (320, 4, 2);
    let folder = tempfile::tempdir().unwrap();
    let sizes = SynthConfig { hidden, width: 288, experts, top_k: k, ..SynthConfig::new("gpt_oss") };
    synth::write(&SynthConfig { format: SynthFormat::Mxfp4, ..sizes }, folder.path()).unwrap();
    let start = |ranks, more: &[&str]| {
        Service::start_checkpoint(folder.path(), ranks, &[&MXFP4_PRODUCTS, more].concat(), &[])
    };
    let cpu_ranks = start(1, &[]);
    let cpu = Client::connect(&cpu_ranks.address).await.unwrap();
    let mut rng = SmallRng::seed_from_u64(12);
    let mut request = |tokens: usize| {
        let rows: Vec<f32> = (0..tokens * hidden).map(|_| rng.sample(StandardNormal)).collect();
        let (ids, weights) = routing(&mut rng, tokens, experts as u32, k);
        ForwardRequest::inline(
            0,
            tokens as u32,
            expertd_proto::v1::DType::DtypeF32,
            encode(&rows, DType::F32),
        )
        .with_routing(encode_i32(&ids), encode(&weights, DType::F32), k as u32)
    };
    let requests: Vec<ForwardRequest> = [1, 60, 250, 900, 2000].map(&mut request).to_vec();
    for ranks in 1..=most {
        let gpu_ranks = start(ranks, &["--device", "cuda"]);
        let gpu = Client::connect(&gpu_ranks.address).await.unwrap();
        assert_near(&format!("many rows, {ranks} GPU ranks"), &gpu, &cpu, requests.clone()).await;
    }
}
