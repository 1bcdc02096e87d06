//! `expertd bench`: the phases of a step, without gRPC.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};
use serde_json::json;

use super::client::DTypeArg;
use super::rows;
use super::serve::plan::{PlanError, ServePlan};
use super::serve::settings::{Given, ServeArgs};
use crate::engine::control::DeviceKind;
use crate::scheduler::{
    Backend, ClientKey, Pending, Request, RequestId, Service, ServiceState, StartError, StepError,
    SubmitError,
};
use crate::telemetry::Phase;
use crate::types::{DType, LayerId};

/// Measure the phases of a step on this machine, without gRPC
///
/// Starts the ranks, sends one request at a time (or keeps several in flight), rotates over the model's layers and draws
/// other random rows for every step. Prints medians; the spread is that of the whole step.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Folder of the checkpoint; `expertd synth` makes one of any shape
    #[arg(long)]
    pub model: PathBuf,
    /// Expert ranks
    #[arg(long)]
    pub ranks: Option<u32>,
    /// Device of the ranks
    #[arg(long, value_enum)]
    pub device: Option<DeviceKind>,
    /// CPU cores to use, e.g. 0-7,16
    #[arg(long)]
    pub cores: Option<String>,
    /// Tokens per rank of the steps to measure
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 64, 512])]
    pub tokens: Vec<usize>,
    /// Element type of the rows
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: DTypeArg,
    /// Steps to measure at each size
    #[arg(long, default_value_t = 30)]
    pub steps: usize,
    /// Steps to run before that
    #[arg(long, default_value_t = 5)]
    pub warmup: usize,
    /// Requests in flight: with more than one, steps follow each other without a pause. Steps cannot hold more than the
    /// largest of the sizes, so measure one size at a time to keep requests from joining each other
    #[arg(long, default_value = "1")]
    pub in_flight: NonZeroUsize,
    /// Write the figures to this file as JSON, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Settings or checkpoint.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// No service.
    #[error(transparent)]
    Start(#[from] StartError),
    /// It did not get ready.
    #[error("the ranks did not get ready: {0}")]
    NotReady(String),
    /// A step was refused.
    #[error("a step was refused: {0}")]
    Submit(#[from] SubmitError),
    /// A step failed.
    #[error("a step failed: {0}")]
    Step(#[from] StepError),
    /// A step had no end.
    #[error("the service ended in the midst of a step")]
    Gone,
    /// The file.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// Offsets in the pool that rows can begin at.
const POOL: usize = 4 << 20;

/// Figures of one size.
struct Figures {
    tokens_per_rank: usize,
    tokens: usize,
    /// Ascending.
    steps: Vec<Duration>,
    /// From the first answer that counts to the last, and the requests in between.
    wall: Duration,
    requests: usize,
    /// Medians, of the slowest rank.
    phases: [Duration; Phase::ALL.len()],
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub async fn run(args: BenchArgs) -> Result<ExitCode, BenchError> {
    let largest = args.tokens.iter().copied().max().unwrap_or(1);
    let ranks = args.ranks.unwrap_or(1);
    let serve = ServeArgs {
        model: Some(args.model.clone()),
        ranks: Some(ranks),
        device: args.device,
        cores: args.cores.clone(),
        max_tokens_per_step: Some(largest * ranks as usize),
        ..ServeArgs::default()
    };
    let plan = ServePlan::new(Given::merge(&serve, None).map_err(PlanError::from)?)?;
    let (hidden, layers) = (plan.spec.hidden, plan.model.layers.clone());
    println!(
        "{} ({}), {} MoE layers, hidden {hidden}; {ranks} ranks, {} cores, rows in {}",
        plan.model.name,
        plan.model.family,
        layers.len(),
        plan.cluster.cores.concat().len(),
        DType::from(args.dtype),
    );
    let service = Service::start(plan.model, plan.cluster, plan.scheduler)?;
    super::serve::follow_loading(Arc::clone(&service)).await;
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
        dtype: DType::from(args.dtype),
        pool: rows::encode(&values, DType::from(args.dtype)),
        random,
        next_id: 0,
    };
    drop(values);
    let mut figures = Vec::new();
    for &tokens in &args.tokens {
        figures.push(bench.measure(tokens, tokens * ranks as usize, &args).await?);
    }
    service.drain(None).await;
    service.join();
    print!("{}", table(&figures));
    if let Some(path) = &args.json {
        let text = json(&figures).to_string();
        std::fs::write(path, text).map_err(|source| BenchError::Write { path: path.clone(), source })?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Bench {
    service: Arc<Service>,
    hidden: usize,
    layers: Vec<LayerId>,
    next_layer: usize,
    dtype: DType,
    /// Normally distributed elements: requests are slices of it.
    pool: Bytes,
    random: SmallRng,
    next_id: u64,
}

impl Bench {
    async fn measure(
        &mut self,
        tokens_per_rank: usize,
        tokens: usize,
        args: &BenchArgs,
    ) -> Result<Figures, BenchError> {
        let steps = args.steps.max(1);
        let mut answers = Vec::with_capacity(steps);
        let mut pending = VecDeque::with_capacity(args.in_flight.get());
        let mut begun = Instant::now();
        for step in 0..args.warmup + steps + args.in_flight.get() - 1 {
            pending.push_back(self.submit(tokens)?);
            if pending.len() < args.in_flight.get() {
                continue;
            }
            let Some(answer) = pending.pop_front() else { continue };
            let answer = answer.await.map_err(|_| BenchError::Gone)??;
            if step + 1 < args.warmup + args.in_flight.get() {
                begun = Instant::now();
            } else {
                answers.push(answer.receipt);
            }
        }
        let wall = begun.elapsed();
        for answer in pending {
            answer.await.map_err(|_| BenchError::Gone)??;
        }
        let mut times: Vec<Duration> = answers.iter().map(|receipt| receipt.step_time).collect();
        times.sort_unstable();
        let phases = std::array::from_fn(|phase| {
            let of = |receipt: &crate::scheduler::Receipt| {
                let timings = receipt.timings.iter().map(|t| t.phases.all()[phase]);
                timings.sum::<Duration>()
            };
            let mut times: Vec<Duration> = answers.iter().map(of).collect();
            times.sort_unstable();
            times[times.len() / 2]
        });
        Ok(Figures { tokens_per_rank, tokens, steps: times, wall, requests: answers.len(), phases })
    }

    fn submit(&mut self, tokens: usize) -> Result<Pending, BenchError> {
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
        let request = Request {
            id: RequestId(self.next_id),
            client: ClientKey(0),
            layer,
            tokens,
            dtype: self.dtype,
            rows,
            routing: None,
            token_ids: by_id,
            shared_experts: true,
            return_routing: false,
            return_timings: true,
            deadline: None,
        };
        Ok(self.service.submit(request)?)
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn table(figures: &[Figures]) -> String {
    let mut text = String::new();
    let _ = write!(text, "{:>7} {:>10} {:>18} {:>10}", "T/rank", "step µs", "min .. p90", "tokens/s");
    for phase in Phase::ALL {
        let _ = write!(text, " {:>9}", phase.name());
    }
    let _ = writeln!(text, " {:>9}", "rest");
    for f in figures {
        let median = f.steps[f.steps.len() / 2];
        let p90 = f.steps[(f.steps.len() * 9 / 10).min(f.steps.len() - 1)];
        let spread = format!("{:.0} .. {:.0}", micros(f.steps[0]), micros(p90));
        let rate = (f.tokens * f.requests) as f64 / f.wall.as_secs_f64();
        let _ = write!(text, "{:>7} {:>10.0} {spread:>18} {rate:>10.0}", f.tokens_per_rank, micros(median));
        for time in f.phases {
            let _ = write!(text, " {:>9.0}", micros(time));
        }
        let rest = median.saturating_sub(f.phases.iter().sum());
        let _ = writeln!(text, " {:>9.0}", micros(rest));
    }
    text.push_str("medians; phases are those of the slowest rank in each, so that they may add up to more than the step\n");
    text
}

fn json(figures: &[Figures]) -> serde_json::Value {
    let one = |f: &Figures| {
        let phases: serde_json::Map<_, _> = Phase::ALL
            .iter()
            .zip(f.phases)
            .map(|(p, t)| (format!("{}_seconds", p.name()), json!(t.as_secs_f64())))
            .collect();
        json!({
            "tokens_per_rank": f.tokens_per_rank,
            "tokens": f.tokens,
            "tokens_per_second": (f.tokens * f.requests) as f64 / f.wall.as_secs_f64(),
            "step_seconds": f.steps.iter().map(Duration::as_secs_f64).collect::<Vec<_>>(),
            "phases": phases,
        })
    };
    json!(figures.iter().map(one).collect::<Vec<_>>())
}
