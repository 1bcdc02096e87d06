//! `expertd bench`: measures the phases of a step, without gRPC.

mod floor;
mod report;
mod routing;

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use expertd_kernels::ceilings::Ceilings;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};

use self::floor::{Floor, LayerSizes, floor};
use self::report::Figures;
use self::routing::RoutingArg;
use super::ceilings;
use super::serve::plan::{PlanError, ServePlan};
use super::serve::settings::{Given, ServeArgs};
use expertd_ipc::control::{DeviceKind, Fp8Compute};
use expertd_model::WeightFormat;
use expertd_rank_cuda as gpu;
use expertd_router::backend::{
    Backend, ClientKey, ModelInfo, Pending, RankPlacement, Receipt, Request, RequestId, ServiceState,
    StepError, SubmitError,
};
use expertd_router::steps::{Service, StartError};
use expertd_types::rows;
use expertd_types::{DType, LayerId, LayerPlacement, Placement, Rank};

/// Measure the phases of a step on this machine, without gRPC
///
/// Starts the ranks, sends one request at a time (or keeps several in flight), rotates over the model's layers and draws
/// new random rows for every step. Prints medians, and the range of the whole step. On GPUs, and if the machine's speed
/// limits are given, it also prints the floor for the routing that was drawn: the weights or arithmetic of the slowest rank,
/// and the rows over the busiest link.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Folder of the checkpoint; `expertd synth` writes one of any shape
    #[arg(long)]
    pub model: PathBuf,
    /// Number of expert ranks [default: 1]
    #[arg(long)]
    pub ranks: Option<u32>,
    /// Device of the ranks [default: cuda if this build and machine support it, otherwise cpu]
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// How GPU ranks multiply FP8 weights [default: fp8 on GPUs]
    #[arg(long, value_enum)]
    pub fp8_compute: Option<Fp8Compute>,
    /// JSON file with the experts that each rank owns, as in `serve`
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// Write the rows that each expert of each layer has computed on each rank to this file, as JSON for `rebalance --rows`
    #[arg(long, value_name = "FILE")]
    pub expert_rows: Option<PathBuf>,
    /// CPU cores to use, e.g. 0-7,16 [default: all that this process may run on]
    #[arg(long)]
    pub cores: Option<String>,
    /// Step sizes to measure, in tokens per rank, comma-separated
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 512], value_parser = at_least_one)]
    pub tokens: Vec<usize>,
    /// Element type of the rows
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DType,
    /// Number of steps to measure at each size
    #[arg(long, default_value_t = 30, value_parser = at_least_one)]
    pub steps: usize,
    /// Number of steps to run before measuring
    #[arg(long, default_value_t = 5)]
    pub warmup: usize,
    /// Number of requests in flight; with more than one, steps follow each other without a pause. A step holds as many tokens
    /// as the largest size, so measure one size at a time to prevent requests from sharing a step
    #[arg(long, default_value = "1")]
    pub in_flight: NonZeroUsize,
    /// How experts are chosen: gate, uniform, zipf:S (popular experts change with every step), hot:S (the same, but they stay),
    /// rows:FILE (as often as in the counts that `status --expert-rows` prints), even (all experts get equally many rows), or one-rank
    /// (only those that rank 0 owns without a placement)
    #[arg(long, default_value = "gate")]
    pub routing: RoutingArg,
    /// Launch the kernels of GPU ranks one by one instead of replaying graphs
    #[arg(long)]
    pub eager: bool,
    /// Make GPU ranks wait for each other before each step's work, so that the time printed as "without copies" includes no
    /// wait for a rank whose rows arrived later, as in peers that copy nothing; whole steps take a few microseconds more
    #[arg(long)]
    pub aligned: bool,
    /// Memory bandwidth of one rank in GB/s, for the floor [default: measured first, on GPUs]
    #[arg(long, value_name = "GB/s", requires = "tensor_tflops")]
    pub memory_gbps: Option<f64>,
    /// Matrix product rate of one rank in TFLOP/s, for the floor [default: measured first, on GPUs]
    #[arg(long, value_name = "TFLOP/s", requires = "memory_gbps")]
    pub tensor_tflops: Option<f64>,
    /// Rate at which one rank sends to others in GB/s, for the floor of several ranks [default: measured first, on GPUs]
    #[arg(long, value_name = "GB/s")]
    pub link_gbps: Option<f64>,
    /// Also write the figures to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number of at least 1".to_owned()),
    }
}

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A setting is invalid or the checkpoint cannot be served.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The service could not be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// The ranks did not get ready.
    #[error("the ranks did not get ready: {0}")]
    NotReady(String),
    /// A step was refused.
    #[error("a step was refused: {0}")]
    Submit(#[from] SubmitError),
    /// A step failed.
    #[error("a step failed: {0}")]
    Step(#[from] StepError),
    /// The service ended before it answered a step.
    #[error("the service ended during a step")]
    Gone,
    /// The JSON file could not be written.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}

/// Number of offsets in the pool of random elements at which the rows of a request can begin.
const POOL: usize = 4 << 20;

impl BenchArgs {
    /// The plan of the service that is measured, whose steps have room for `max_tokens_per_step` rows.
    fn plan(&self, ranks: u32, max_tokens_per_step: usize) -> Result<ServePlan, PlanError> {
        let serve = ServeArgs {
            model: Some(self.model.clone()),
            ranks: Some(ranks),
            placement: self.placement.clone(),
            device: self.device,
            fp8_compute: self.fp8_compute,
            cores: self.cores.clone(),
            max_tokens_per_step: Some(max_tokens_per_step),
            ..ServeArgs::default()
        };
        let mut plan = ServePlan::new(Given::merge(&serve, None)?)?;
        let variables = [(self.eager, gpu::EAGER), (self.aligned, gpu::ALIGNED)];
        let set = variables.into_iter().filter(|(is_set, _)| *is_set);
        plan.cluster.environment.extend(set.map(|(_, name)| (name.to_owned(), "1".to_owned())));
        Ok(plan)
    }

    /// The ceilings from which floors are computed: as given, otherwise measured on the GPUs. Returns `None` on CPU ranks
    /// without given ceilings, and prints why if the measurement fails.
    fn ceilings(&self, device: DeviceKind, ranks: u32) -> Option<Ceilings> {
        let link_known = ranks == 1 || self.link_gbps.is_some();
        let mut reached = if self.memory_gbps.is_some() && self.tensor_tflops.is_some() && link_known {
            Ceilings::default()
        } else if device == DeviceKind::Cuda {
            measured(ranks)?
        } else {
            return None;
        };
        if let Some(given) = self.memory_gbps {
            reached.memory_bytes_per_second = given * 1e9;
        }
        if let Some(given) = self.tensor_tflops {
            reached.tensor_sustained_flops = given * 1e12;
        }
        if let Some(given) = self.link_gbps {
            reached.link_bytes_per_second = Some(given * 1e9);
        }
        Some(reached)
    }
}

/// Measures and prints the GPUs' ceilings; prints why if the measurement fails.
fn measured(gpus: u32) -> Option<Ceilings> {
    match ceilings::in_child_process(gpus) {
        Ok(found) => {
            println!("{}", ceilings::in_words(&found));
            Some(found)
        }
        Err(error) => {
            eprintln!("no floors are printed, because the GPUs' ceilings cannot be measured: {error}");
            None
        }
    }
}

/// Mean bytes per weight as ranks hold it, from the bytes they loaded: routed experts, shared experts and gates.
fn bytes_per_weight(info: &ModelInfo, loaded: u64) -> f64 {
    let ranks = info.placement.len();
    let weights = info.layers.iter().map(|(id, layer)| {
        let ranges = info.placement.iter().flat_map(|rank| &rank.experts).filter(|(at, ..)| at == id);
        // Copies of an expert count, too.
        let owned: usize = ranges.map(|&(.., count)| count as usize).sum();
        let shared = ranks * layer.shared_width;
        3 * info.hidden * (owned * layer.expert_width + shared) + ranks * layer.num_experts * info.hidden
    });
    loaded as f64 / weights.sum::<usize>().max(1) as f64
}

/// Runs the benchmark.
///
/// # Errors
/// [`BenchError`].
pub async fn run(args: BenchArgs) -> Result<ExitCode, BenchError> {
    let largest = args.tokens.iter().copied().max().unwrap_or(1);
    let ranks = args.ranks.unwrap_or(1);
    let plan = args.plan(ranks, largest * ranks as usize)?;
    let (hidden, layers) = (plan.spec.hidden, plan.model.layers.clone());
    println!(
        "{} ({}), {} MoE layers, hidden {hidden}; {ranks} ranks, {} cores, rows in {}",
        plan.model.name,
        plan.model.family,
        layers.len(),
        plan.cluster.cores.concat().len(),
        args.dtype,
    );
    let fp8_stored = plan.spec.moe_layers().any(|(_, moe)| moe.experts.format == WeightFormat::Fp8E4m3);
    let fp8_products = fp8_stored && plan.cluster.fp8_compute == Fp8Compute::Fp8;
    let ceilings = args.ceilings(plan.cluster.device, ranks);
    plan.buffers.reserve();
    let service = Service::start(plan.model, plan.cluster, plan.scheduler)?;
    let loading = Arc::clone(&service);
    let _ = tokio::task::spawn_blocking(move || super::serve::follow_loading(&loading)).await;
    let status = service.status();
    if status.state != ServiceState::Serving {
        return Err(BenchError::NotReady(status.reason));
    }
    for rank in &status.ranks {
        println!(
            "rank {}: {}, {} MB of weights",
            rank.rank,
            rank.device,
            rank.weight_bytes_loaded / 1_000_000
        );
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
        random,
        next_id: 0,
        routing: args.routing.clone(),
        ceilings,
        weight_bytes: status.ranks.iter().map(|rank| rank.weight_bytes_loaded).sum(),
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

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    std::fs::write(path, text).map_err(|source| BenchError::Write { path: path.to_owned(), source })
}

struct Bench {
    service: Arc<Service>,
    hidden: usize,
    layers: Vec<LayerId>,
    next_layer: usize,
    dtype: DType,
    /// Normally distributed elements; the rows of a request are a slice of it.
    pool: Bytes,
    random: SmallRng,
    next_id: u64,
    routing: RoutingArg,
    ceilings: Option<Ceilings>,
    /// Bytes of weights that all ranks loaded together.
    weight_bytes: u64,
    /// Whether routed experts are multiplied as FP8.
    fp8_products: bool,
}

impl Bench {
    async fn measure(
        &mut self,
        tokens_per_rank: usize,
        tokens: usize,
        args: &BenchArgs,
    ) -> Result<Figures, BenchError> {
        let steps = args.steps;
        let mut answers = Vec::with_capacity(steps);
        let mut pending = VecDeque::with_capacity(args.in_flight.get());
        let mut begun = Instant::now();
        for step in 0..args.warmup + steps + args.in_flight.get() - 1 {
            pending.push_back(self.submit(tokens)?);
            if pending.len() < args.in_flight.get() {
                continue;
            }
            let Some((layer, answer)) = pending.pop_front() else { continue };
            let answer = answer.await.map_err(|_| BenchError::Gone)??;
            if step + 1 < args.warmup + args.in_flight.get() {
                begun = Instant::now();
            } else {
                answers.push((layer, answer.receipt));
            }
        }
        let wall = begun.elapsed();
        for (_, answer) in pending {
            answer.await.map_err(|_| BenchError::Gone)??;
        }
        let floors: Vec<Floor> =
            answers.iter().filter_map(|(layer, receipt)| self.floor(*layer, receipt)).collect();
        let mut times: Vec<Duration> = answers.iter().map(|(_, receipt)| receipt.step_time).collect();
        times.sort_unstable();
        let phases = std::array::from_fn(|phase| {
            let of = |(_, receipt): &(LayerId, Receipt)| {
                let timings = receipt.timings.iter().map(|t| t.phases.all()[phase]);
                timings.sum::<Duration>()
            };
            let mut times: Vec<Duration> = answers.iter().map(of).collect();
            times.sort_unstable();
            times[times.len() / 2]
        });
        let inner =
            |(_, receipt): &(LayerId, Receipt)| receipt.timings.iter().map(|t| t.computed).sum::<Duration>();
        let mut inner: Vec<Duration> = answers.iter().map(inner).collect();
        inner.sort_unstable();
        let inner = inner[inner.len() / 2];
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

    fn submit(&mut self, tokens: usize) -> Result<(LayerId, Pending), BenchError> {
        let size = self.dtype.size();
        let first = self.random.random_range(0..POOL) * size;
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
            self.routing.draw(layer, tokens, sizes.num_experts, first_rank, sizes.top_k, &mut self.random)
        });
        let request = Request {
            id: RequestId(self.next_id),
            client: ClientKey(0),
            layer,
            tokens,
            dtype: self.dtype,
            rows: rows.into(),
            routing,
            token_ids: by_id,
            shared_experts: true,
            expected_version: None,
            return_routing: self.ceilings.is_some(),
            return_timings: true,
            deadline: None,
        };
        Ok((layer, self.service.submit(request)?))
    }
}
