//! Minutes of random load on GPU ranks: sizes, routing, types and layers are drawn anew for each request, a sample of the
//! answers is compared with CPU ranks, and neither host nor device memory may grow. Not run by default:
//!
//!     EXPERTD_SOAK_SECONDS=120 cargo test --release --features cuda --test soak_gpu -- --ignored --nocapture
#![allow(clippy::unwrap_used)]

mod service;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expertd::commands::rows::{decode, encode, encode_i32, relative_error};
use expertd::engine::gpu;
use expertd::types::DType;
use expertd_proto::Client;
use expertd_proto::v1::{self, ForwardRequest, ForwardResponse};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};
use service::Service;
use tokio::task::JoinSet;

const HIDDEN: usize = 1024;
const EXPERTS: usize = 64;
const LAYERS: u32 = 2;
/// Rows of the largest request, and of the largest that CPU ranks compute again.
const LARGEST: usize = 2000;
const LARGEST_COMPARED: usize = 64;
/// Relative L2 error of a row computed in bf16, by random weights.
const TOLERANCE: f64 = 2e-2;
const CALLERS: u64 = 24;

fn synthesise(folder: &Path) {
    let sizes = [("--hidden", HIDDEN), ("--experts", EXPERTS), ("--layers", LAYERS as usize)];
    let mut command = Command::new(env!("CARGO_BIN_EXE_expertd"));
    command.args(["synth", "--family", "qwen3_moe", "--top-k", "8", "--width", "512", "--out"]).arg(folder);
    for (flag, size) in sizes {
        command.args([flag, &size.to_string()]);
    }
    assert!(command.status().unwrap().success());
}

/// A request of random everything; `None` for the type that the wire does not know.
fn draw(rng: &mut SmallRng, largest: usize) -> (ForwardRequest, DType) {
    // Most are small; each power of two is as likely as another.
    let most = largest.min(1 << rng.random_range(0..12));
    let tokens = rng.random_range(1..=most);
    let (dtype, wire) = match rng.random_range(0..3) {
        0 => (DType::Bf16, v1::DType::DtypeBf16),
        1 => (DType::F16, v1::DType::DtypeF16),
        _ => (DType::F32, v1::DType::DtypeF32),
    };
    let values: Vec<f32> = StandardNormal.sample_iter(&mut *rng).take(tokens * HIDDEN).collect();
    let layer = rng.random_range(0..LAYERS);
    let request =
        ForwardRequest::inline(layer, tokens as u32, wire, encode(&values, dtype)).returning_routing();
    if rng.random() {
        return (request, dtype);
    }
    // Often all on the same few experts.
    let k = rng.random_range(1..=8_usize);
    let pool = if rng.random() { EXPERTS } else { 8 };
    let mut experts: Vec<i32> = (0..pool as i32).collect();
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for _ in 0..tokens {
        experts.shuffle(rng);
        ids.extend_from_slice(&experts[..k]);
        weights.extend((0..k).map(|_| rng.random_range(0.05_f32..0.5)));
    }
    (request.with_routing(encode_i32(&ids), encode(&weights, DType::F32), k as u32), dtype)
}

/// The same rows, routed the same, by CPU ranks; the largest relative error of a row.
async fn compare(cpu: &Client, request: &ForwardRequest, answer: &ForwardResponse, dtype: DType) -> f64 {
    let receipt = answer.receipt.as_ref().unwrap();
    let (ids, weights) = (receipt.topk_ids.clone(), receipt.topk_weights.clone());
    let k = ids.len() / 4 / request.tokens as usize;
    let again = request.clone().with_routing(ids, weights, k as u32);
    let wanted = cpu.forward(again, None).await.unwrap();
    let (got, wanted) = (decode(&answer.rows, dtype), decode(&wanted.rows, dtype));
    assert_eq!(got.len(), wanted.len());
    let rows = got.chunks(HIDDEN).zip(wanted.chunks(HIDDEN));
    rows.map(|(got, wanted)| relative_error(got, wanted)).fold(0.0, f64::max)
}

/// kB of host memory of the ranks, and MiB in use of all GPUs.
fn memory(service: &Service) -> (u64, u64) {
    let of_rank = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let value = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_whitespace().nth(1).map_or(0, |number| number.parse::<u64>().unwrap())
        };
        value("RssAnon:") + value("RssShmem:")
    };
    let query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"];
    let used = Command::new("nvidia-smi").args(query).output().unwrap().stdout;
    let used = String::from_utf8_lossy(&used).lines().map(|line| line.trim().parse::<u64>().unwrap()).sum();
    (service.ranks().iter().map(of_rank).sum(), used)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; see the top of the file"]
async fn random_load_is_answered_right_and_memory_stays_flat() {
    let gpus = if gpu::BUILT { gpu::present().min(4) } else { 0 };
    if gpus == 0 {
        println!("skipped: no GPU");
        return;
    }
    let seconds = std::env::var("EXPERTD_SOAK_SECONDS").map_or(20, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    synthesise(&model);
    let flags = ["--device", "cuda", "--max-tokens-per-step", "1024", "--max-queued-tokens", "100000"];
    let service = Service::start_checkpoint(&model, gpus, &flags, &[]);
    let reference = Service::start_checkpoint(&model, 1, &[], &[]);
    let (answered, compared, rows) =
        (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)), AtomicU64::new(0));
    let rows = Arc::new(rows);
    let begun = Instant::now();
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let client = Client::connect(&service.address).await.unwrap();
        let cpu = Client::connect(&reference.address).await.unwrap();
        let (answered, compared, rows) = (Arc::clone(&answered), Arc::clone(&compared), Arc::clone(&rows));
        callers.spawn(async move {
            let mut rng = SmallRng::seed_from_u64(caller);
            let mut largest: f64 = 0.0;
            while begun.elapsed() < Duration::from_secs(seconds) {
                let compare_this = rng.random_range(0..20) == 0;
                let (request, dtype) = draw(&mut rng, if compare_this { LARGEST_COMPARED } else { LARGEST });
                let answer = client.forward(request.clone(), None).await.unwrap();
                assert_eq!(answer.rows.len(), request.tokens as usize * HIDDEN * dtype.size());
                answered.fetch_add(1, Ordering::Relaxed);
                rows.fetch_add(u64::from(request.tokens), Ordering::Relaxed);
                if compare_this {
                    let error = compare(&cpu, &request, &answer, dtype).await;
                    assert!(error <= TOLERANCE, "rows differ by {error:.1e}: {:?}", answer.receipt);
                    largest = largest.max(error);
                    compared.fetch_add(1, Ordering::Relaxed);
                }
            }
            largest
        });
    }
    tokio::time::sleep(Duration::from_secs(seconds / 4)).await;
    let early = memory(&service);
    let largest = callers.join_all().await.into_iter().fold(0.0, f64::max);
    let late = memory(&service);
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    println!(
        "{gpus} GPUs, {seconds} s: {} requests, {} rows, {} compared with CPU ranks, largest error {largest:.1e}; host \
         memory {} then {} kB, device memory {} then {} MiB",
        count(&answered),
        count(&rows),
        count(&compared),
        early.0,
        late.0,
        early.1,
        late.1
    );
    assert!(count(&compared) > 0);
    assert!(late.0 as f64 <= early.0 as f64 * 1.02, "host memory grew: {early:?}, {late:?}");
    assert_eq!(late.1, early.1, "device memory, in MiB");
}
