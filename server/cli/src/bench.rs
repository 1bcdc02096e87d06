//! `expertd bench`: measures the phases of a step, without gRPC.

mod args;
mod floor;
mod report;
mod routing;

use std::collections::VecDeque;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_kernels::ceilings::Ceilings;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};

pub use self::args::BenchArgs;
use self::floor::{Floor, LayerSizes, floor};
use self::report::Figures;
use self::routing::{Draws, RoutingRule};
use super::ceilings;
use super::exit::CommandError;
use super::serve::gpu_bytes;
use super::units::{bytes, count};
use expertd_core::backend::{
    Answer, Backend, ClientKey, ConnectionKey, ModelInfo, Pending, RankPlacement, Receipt, Request,
    RequestId, ServiceState, StepTiming,
};
use expertd_core::steps::Service;
use expertd_ipc::control::DeviceKind;
use expertd_model::MoeLayer;
use expertd_rank_cuda as gpu;
use expertd_types::{DType, LayerId, LayerPlacement, Placement, Rank, rows};

/// Number of offsets in the pool of random elements at which the rows of a request can begin.
const POOL: usize = 4 << 20;

/// Mean bytes per weight as ranks hold it, from the bytes that they hold: routed experts, shared experts and gates.
fn bytes_per_weight(info: &ModelInfo, held: u64) -> f64 {
    let ranks = info.placement.len();
    let weights = info.layers.iter().map(|(id, layer)| {
        let ranges = info.placement.iter().flat_map(|rank| &rank.experts).filter(|(at, ..)| at == id);
        // Copies of an expert count, too.
        let owned: usize = ranges.map(|&(.., count)| count as usize).sum();
        let shared = ranks * layer.shared_width;
        3 * info.hidden * (owned * layer.expert_width + shared) + ranks * layer.num_experts * info.hidden
    });
    held as f64 / weights.sum::<usize>().max(1) as f64
}

/// Runs the benchmark.
pub async fn run(args: BenchArgs) -> Result<ExitCode, CommandError> {
    if args.ceilings {
        let gpus = args.measured_gpus().map_err(CommandError::usage)?;
        let found = ceilings::measured(Some(gpus)).map_err(CommandError::failed)?;
        if args.json.as_deref() != Some(Path::new("-")) {
            println!("{}", ceilings::in_words(&found));
        }
        if let Some(path) = &args.json {
            write(path, &serde_json::json!(found).to_string())?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let largest = args.tokens.iter().copied().max().unwrap_or(1);
    let ranks = args.sources();
    let plan = args.plan(largest * ranks as usize).map_err(CommandError::usage)?;
    let (hidden, layers) = (plan.spec.hidden, plan.model.layers.clone());
    println!(
        "{} ({}), {}, hidden {hidden}; {}, {}, rows in {}",
        plan.model.name,
        plan.model.family,
        count(layers.len() as u64, "MoE layer"),
        count(plan.cluster.shape.ranks.into(), "rank"),
        count(plan.cluster.cores.concat().len() as u64, "core"),
        args.dtype,
    );
    let on_gpus = plan.cluster.device() == DeviceKind::Cuda;
    let of = |moe: &MoeLayer| gpu::Stored::routed(&moe.experts).on_device(plan.cluster.fp8_products);
    let fp8_products = on_gpus && plan.spec.moe_layers().any(|(_, moe)| of(moe).has_fp8_rows());
    if let Some(text) = super::serve::describe_weights(&plan) {
        println!("{text}");
    }
    // Ranks report what they read of the checkpoint, and GPU ranks may hold it in another format.
    let bytes_on_gpus = on_gpus.then(|| gpu_bytes(&plan).into_iter().sum());
    let ceilings = args.ceilings(&plan.cluster);
    let service = Service::new(plan.model, plan.cluster, plan.scheduler)?;
    service.begin()?;
    let loading = Arc::clone(&service);
    let _ = tokio::task::spawn_blocking(move || super::serve::follow_loading(&loading)).await;
    let status = service.status();
    if status.state != ServiceState::Serving {
        return Err(CommandError::failed(format!("the ranks did not get ready: {}", status.reason)));
    }
    for rank in &status.ranks {
        println!("rank {}: {}, {} of weights", rank.rank, rank.device, bytes(rank.weight_bytes_loaded));
    }
    let mut random = SmallRng::seed_from_u64(rand::random());
    let elements = POOL + largest * ranks as usize * hidden;
    let values: Vec<f32> = StandardNormal.sample_iter(&mut random).take(elements).collect();
    let mut bench = Bench {
        service: Arc::clone(&service),
        hidden,
        layers: layers.keys().copied().collect(),
        next_layer: 0,
        dtype: args.dtype,
        pool: rows::encode(&values, args.dtype),
        draws: Draws::new(random),
        next_id: 0,
        routing: args.routing.clone(),
        ceilings,
        weight_bytes: bytes_on_gpus
            .unwrap_or_else(|| status.ranks.iter().map(|rank| rank.weight_bytes_loaded).sum()),
        fp8_products,
    };
    drop(values);
    let mut figures = Vec::new();
    for &tokens in &args.tokens {
        figures.push(bench.measure(tokens, tokens * ranks as usize, &args).await?);
    }
    let rows = service.expert_rows();
    service.drain(None).await;
    service.join();
    print!("{}", report::table(&figures));
    if let Some((mean, (layer, largest))) = rows.mean_imbalance().zip(rows.largest_imbalance()) {
        println!("imbalance of rows over ranks: {mean:.3}, at most {largest:.3} (layer {layer})");
    }
    if let Some(path) = &args.expert_rows {
        write(path, &serde_json::to_string(&rows).unwrap_or_default())?;
    }
    if let Some(path) = &args.json {
        write(path, &report::json(bench.ceilings.as_ref(), &figures).to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes to a file; `-` is standard output.
fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    if path == Path::new("-") {
        println!("{text}");
        return Ok(());
    }
    std::fs::write(path, text)
        .map_err(|error| CommandError::failed(format!("cannot write {}: {error}", path.display())))
}

/// The answer of a step.
async fn answered(pending: Pending) -> Result<Answer, CommandError> {
    let answer = pending.await.map_err(|_| CommandError::failed("the service ended during a step"))?;
    answer.map_err(|failure| CommandError::failed(format!("a step failed: {failure}")))
}

/// The median of durations.
fn median(durations: impl Iterator<Item = Duration>) -> Duration {
    let mut sorted: Vec<Duration> = durations.collect();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

struct Bench {
    service: Arc<Service>,
    hidden: usize,
    layers: Vec<LayerId>,
    next_layer: usize,
    dtype: DType,
    /// Normally distributed elements; the rows of a request are a slice of it.
    pool: Bytes,
    draws: Draws,
    next_id: u64,
    routing: RoutingRule,
    ceilings: Option<Ceilings>,
    /// Bytes of weights that all ranks hold together.
    weight_bytes: u64,
    /// Whether GPUs multiply routed experts as FP8.
    fp8_products: bool,
}

impl Bench {
    async fn measure(
        &mut self,
        tokens_per_rank: usize,
        tokens: usize,
        args: &BenchArgs,
    ) -> Result<Figures, CommandError> {
        let steps = args.steps;
        let mut answers = Vec::new();
        let mut pending = VecDeque::new();
        let mut begun = Instant::now();
        let warm = args.warmup.saturating_add(args.in_flight.get());
        for step in 0..warm.saturating_add(steps) - 1 {
            pending.push_back(self.submit(tokens)?);
            if pending.len() < args.in_flight.get() {
                continue;
            }
            let Some((layer, answer)) = pending.pop_front() else { continue };
            let answer = answered(answer).await?;
            if step + 1 < warm {
                begun = Instant::now();
            } else {
                answers.push((layer, answer.receipt));
            }
        }
        let wall = begun.elapsed();
        for (_, answer) in pending {
            answered(answer).await?;
        }
        let floors: Vec<Floor> =
            answers.iter().filter_map(|(layer, receipt)| self.floor(*layer, receipt)).collect();
        let mut times: Vec<Duration> = answers.iter().map(|(_, receipt)| receipt.step_time).collect();
        times.sort_unstable();
        let sum = |of: &dyn Fn(&StepTiming) -> Duration| {
            median(answers.iter().map(|(_, receipt)| receipt.timings.iter().map(of).sum()))
        };
        let phases = std::array::from_fn(|phase| sum(&|timing| timing.phases[phase]));
        let inner = sum(&|timing| timing.computed);
        let (requests, floor) = (answers.len(), Floor::mean(&floors));
        Ok(Figures { tokens_per_rank, tokens, steps: times, wall, requests, phases, inner, floor })
    }

    /// The floor of a measured step.
    fn floor(&self, layer: LayerId, receipt: &Receipt) -> Option<Floor> {
        let ceilings = self.ceilings.as_ref()?;
        let info = self.service.model();
        let sizes = info.layers.get(&layer)?;
        let of_rank = |rank: &RankPlacement| {
            let ranges = rank.experts.iter().filter(|(at, ..)| *at == layer);
            ranges.flat_map(|&(_, first, count)| first..first + count).collect()
        };
        let owners = LayerPlacement::new(info.placement.iter().map(of_rank).collect());
        let owners = owners.owners(sizes.num_experts);
        let sizes = LayerSizes {
            hidden: info.hidden,
            width: sizes.expert_width,
            shared_width: sizes.shared_width,
            bytes_per_weight: bytes_per_weight(&info, self.weight_bytes),
            fp8_products: self.fp8_products,
        };
        let ids = rows::decode_i32(&receipt.topk_ids);
        let rows: u32 = receipt.tokens_per_rank.iter().sum();
        let k = ids.len() / (rows as usize).max(1);
        Some(floor(&ids, k, &receipt.tokens_per_rank, &owners, &sizes, ceilings))
    }

    fn submit(&mut self, tokens: usize) -> Result<(LayerId, Pending), CommandError> {
        let size = self.dtype.size();
        let first = self.draws.random.random_range(0..POOL) * size;
        let rows = self.pool.slice(first..first + tokens * self.hidden * size);
        let layer = self.layers[self.next_layer % self.layers.len()];
        self.next_layer += 1;
        self.next_id += 1;
        let info = self.service.model();
        let by_id = info.layers.get(&layer).filter(|layer| layer.routes_by_token_id).map(|layer| {
            let vocabulary = layer.vocabulary.max(1) as u64;
            let ids: Vec<i32> =
                (0..tokens as u64).map(|_| (rand::random::<u64>() % vocabulary) as i32).collect();
            rows::encode_i32(&ids)
        });
        let routing = info.layers.get(&layer).and_then(|sizes| {
            // Also with a placement, so that its steps can be compared with those without.
            let contiguous = Placement::new(sizes.num_experts, info.placement.len());
            let first_rank = contiguous.range(Rank(0)).len();
            self.routing.draw(layer, tokens, sizes.num_experts, first_rank, sizes.top_k, &mut self.draws)
        });
        let request = Request {
            id: RequestId(self.next_id),
            client: ClientKey(0),
            connection: ConnectionKey(0),
            layer,
            tokens,
            dtype: self.dtype,
            rows,
            routing,
            token_ids: by_id,
            shared_experts: true,
            expected_version: None,
            return_routing: self.ceilings.is_some(),
            deadline: None,
        };
        Ok((layer, self.service.submit(request)?))
    }
}
