//! Soak test: many steps of random load on GPU ranks. Sizes, routing, element types and layers are drawn for each
//! request, a sample of the answers is compared with CPU ranks, and neither host nor device memory may grow. Not run by
//! default:
//!
//!     EXPERTD_SOAK_STEPS=1000000 cargo test --release --features cuda --test e2e soak_gpu:: -- --ignored --nocapture

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::gpu::gpus;
use crate::service::{Service, program};
use expertd_client::Client;
use expertd_proto::v1::{self, ForwardRequest, ForwardResponse};
use expertd_types::DType;
use expertd_types::rows::{decode, encode, encode_i32, relative_error};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

const HIDDEN: usize = 1024;
const EXPERTS: usize = 64;
const LAYERS: u32 = 2;
/// Number of rows of the largest request, and of the largest that CPU ranks compute again.
const LARGEST: usize = 2000;
const LARGEST_COMPARED: usize = 64;
/// Relative L2 error of a row of random weights computed in bf16.
const TOLERANCE: f64 = 2e-2;
/// Number of callers: few, so that many steps hold only one request.
const CALLERS: u64 = 8;
/// One of this many answers is compared.
const COMPARED: u64 = 100;
/// Number of steps without `EXPERTD_SOAK_STEPS`.
const STEPS: u64 = 50_000;
/// Number of parts of the run; memory is measured in each.
const PARTS: u64 = 10;
/// Number of rounds at the start in which all callers together send a request of the largest size. The router's memory
/// follows the bytes in flight, and no later load has more in flight.
const FULL_ROUNDS: usize = 5;
/// Largest growth of the router's memory from the second to fifth part, of which the largest counts, to the last one.
const ROUTER_GROWTH: f64 = 0.05;
/// Largest growth of the host memory of all ranks in the same time, in kB.
const RANK_GROWTH: u64 = 1024;
/// Number of random values in the pool from which requests take rows at random offsets.
const POOL: usize = 1 << 24;

fn synthesise(folder: &Path) {
    let sizes = [("--hidden", HIDDEN), ("--experts", EXPERTS), ("--layers", LAYERS as usize)];
    let mut command = Command::new(program());
    command.args(["synth", "--family", "qwen3_moe", "--top-k", "8", "--width", "512", "--out"]).arg(folder);
    for (flag, size) in sizes {
        command.args([flag, &size.to_string()]);
    }
    assert!(command.status().unwrap().success());
}

/// A request with random content, and the element type of its rows.
fn draw(rng: &mut SmallRng, pool: &[f32], largest: usize) -> (ForwardRequest, DType) {
    // Most are small: the size is the smaller of two powers of random exponents.
    let most = largest.min(1 << rng.random_range(0..12).min(rng.random_range(0..12)));
    let tokens = rng.random_range(1..=most);
    let (dtype, wire) = match rng.random_range(0..3) {
        0 => (DType::Bf16, v1::DType::DtypeBf16),
        1 => (DType::F16, v1::DType::DtypeF16),
        _ => (DType::F32, v1::DType::DtypeF32),
    };
    let first = rng.random_range(0..=pool.len() - tokens * HIDDEN);
    let values = &pool[first..first + tokens * HIDDEN];
    let layer = rng.random_range(0..LAYERS);
    let request =
        ForwardRequest::inline(layer, tokens as u32, wire, encode(values, dtype)).returning_routing();
    if rng.random() {
        return (request, dtype);
    }
    // Often all rows go to the same few experts.
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

/// Sends the same rows with the same routing to CPU ranks; returns the largest relative error of a row.
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

/// Memory in use, in kB.
#[derive(Clone, Copy, Debug)]
struct Memory {
    /// The median over a part of the run: it follows the bytes in flight, and each of the runtime's threads keeps some.
    router: u64,
    ranks: u64,
    /// GPU memory of the ranks, in steps of 1 MiB.
    device: u64,
}

/// The host memory of a process in kB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().nth(1).map_or(0, |number| number.parse::<u64>().unwrap())
    };
    value("RssAnon:") + value("RssShmem:")
}

/// The answer of `nvidia-smi --query-WHAT`, a line for each GPU or process.
fn nvidia_smi(what: &str) -> String {
    let query = [&format!("--query-{what}"), "--format=csv,noheader,nounits"];
    String::from_utf8(Command::new("nvidia-smi").args(query).output().unwrap().stdout).unwrap()
}

/// GPU memory of these processes in kB; `None` where `nvidia-smi` does not list them, as in a container.
fn of_processes(pids: &[u32]) -> Option<u64> {
    let listed = nvidia_smi("compute-apps=pid,used_memory");
    let used = listed.lines().filter_map(|line| line.split_once(", "));
    let used: Vec<u64> = used
        .filter(|(pid, _)| pid.parse().is_ok_and(|pid: u32| pids.contains(&pid)))
        .filter_map(|(_, mebibytes)| mebibytes.trim().parse::<u64>().ok())
        .collect();
    (used.len() >= pids.len()).then(|| used.iter().sum::<u64>() << 10)
}

/// Memory in use of all GPUs in kB.
fn of_gpus() -> u64 {
    nvidia_smi("gpu=memory.used").lines().map(|line| line.trim().parse::<u64>().unwrap() << 10).sum()
}

/// Counts over all callers.
#[derive(Default)]
struct Seen {
    requests: AtomicU64,
    rows: AtomicU64,
    compared: AtomicU64,
    /// Number of the last step that computed an answer; steps are numbered from 0.
    last_step: AtomicU64,
}

impl Seen {
    fn add(&self, answer: &ForwardResponse, tokens: u32) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.rows.fetch_add(u64::from(tokens), Ordering::Relaxed);
        let last = answer.receipt.iter().flat_map(|receipt| &receipt.steps).max();
        self.last_step.fetch_max(last.copied().unwrap_or(0), Ordering::Relaxed);
    }

    fn steps(&self) -> u64 {
        self.last_step.load(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs GPUs and takes minutes; the top of the file has the command"]
#[allow(clippy::await_holding_lock, reason = "the lock keeps other tests off the GPUs")]
async fn random_load_is_answered_right_and_memory_stays_flat() {
    let (ranks, _in_use) = gpus();
    let wanted = std::env::var("EXPERTD_SOAK_STEPS").map_or(STEPS, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    synthesise(&model);
    let flags = ["--device", "cuda", "--max-tokens-per-step", "1024", "--max-queued-tokens", "100000"];
    let service = Service::start_checkpoint(&model, ranks, &flags, &[]);
    let reference = Service::start_checkpoint(&model, 1, &[], &[]);
    let pool: Arc<[f32]> = StandardNormal.sample_iter(SmallRng::seed_from_u64(CALLERS)).take(POOL).collect();
    let seen = Arc::new(Seen::default());
    let begun = Instant::now();
    let together = Arc::new(Barrier::new(CALLERS as usize));
    let mut callers = JoinSet::new();
    let mut largest: f64 = 0.0;
    for caller in 0..CALLERS {
        let client = Client::connect(&service.address).await.unwrap();
        let cpu = Client::connect(&reference.address).await.unwrap();
        let (seen, pool, together) = (Arc::clone(&seen), Arc::clone(&pool), Arc::clone(&together));
        callers.spawn(async move {
            let mut rng = SmallRng::seed_from_u64(caller);
            let mut largest: f64 = 0.0;
            for _ in 0..FULL_ROUNDS {
                let rows = encode(&pool[..LARGEST * HIDDEN], DType::F32);
                together.wait().await;
                let request = ForwardRequest::inline(0, LARGEST as u32, v1::DType::DtypeF32, rows);
                client.forward(request, None).await.unwrap();
            }
            while seen.steps() < wanted {
                let compare_this = rng.random_range(0..COMPARED) == 0;
                let most = if compare_this { LARGEST_COMPARED } else { LARGEST };
                let (request, dtype) = draw(&mut rng, &pool, most);
                let answer = client.forward(request.clone(), None).await.unwrap();
                assert_eq!(answer.rows.len(), request.tokens as usize * HIDDEN * dtype.size());
                seen.add(&answer, request.tokens);
                if compare_this {
                    let error = compare(&cpu, &request, &answer, dtype).await;
                    assert!(
                        error <= TOLERANCE,
                        "the rows of CPU and GPU ranks differ by {error:.1e}: {:?}",
                        answer.receipt
                    );
                    largest = largest.max(error);
                    seen.compared.fetch_add(1, Ordering::Relaxed);
                }
            }
            largest
        });
    }
    let mut parts = Vec::new();
    for part in 1..=PARTS {
        let mut router = Vec::new();
        while router.is_empty() || seen.steps() < wanted / PARTS * part && !callers.is_empty() {
            router.push(resident(service.pid()));
            tokio::time::sleep(Duration::from_millis(100)).await;
            while let Some(ended) = callers.try_join_next() {
                largest = largest.max(ended.unwrap());
            }
        }
        router.sort_unstable();
        let ranks = service.ranks();
        let memory = Memory {
            router: router[router.len() / 2],
            ranks: ranks.iter().copied().map(resident).sum(),
            device: of_processes(&ranks).unwrap_or_else(of_gpus),
        };
        println!("{} steps in {:.0} s, kB: {memory:?}", seen.steps(), begun.elapsed().as_secs_f64());
        parts.push(memory);
    }
    largest = callers.join_all().await.into_iter().fold(largest, f64::max);
    println!(
        "{ranks} ranks, {:.0} s: {} steps, {} requests, {} rows, {} compared with CPU ranks, largest error {largest:.1e}",
        begun.elapsed().as_secs_f64(),
        seen.steps(),
        seen.requests.load(Ordering::Relaxed),
        seen.rows.load(Ordering::Relaxed),
        seen.compared.load(Ordering::Relaxed),
    );
    assert!(seen.compared.load(Ordering::Relaxed) > 0);
    let early = &parts[1..parts.len() / 2];
    let most = |of: fn(&Memory) -> u64| early.iter().map(of).max().unwrap();
    let late = parts.last().unwrap();
    let router = most(|memory| memory.router);
    assert!(
        late.router as f64 <= router as f64 * (1.0 + ROUTER_GROWTH),
        "the router's memory grew: {parts:?}"
    );
    assert!(late.ranks <= most(|memory| memory.ranks) + RANK_GROWTH, "the ranks' memory grew: {parts:?}");
    assert!(late.device <= most(|memory| memory.device), "the devices' memory grew: {parts:?}");
}
