//! The arguments of `expertd bench`, and what they ask for: the plan of the service and the ceilings of floors.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use expertd_core::cluster::ClusterConfig;
use expertd_ipc::control::DeviceKind;
use expertd_kernels::ceilings::Ceilings;
use expertd_rank_cuda as gpu;
use expertd_types::{DType, Fp8Compute, GpuPath};

use super::routing::RoutingRule;
use crate::ceilings;
use crate::serve::kinds::{Kinds, MemorySize, RankNumbers};
use crate::serve::plan::{self, PlanError, ServePlan};
use crate::serve::settings::{Given, ServeArgs};

/// Measure the phases of a step on this machine, without gRPC
///
/// Starts the ranks, sends one request at a time (or keeps several in flight), rotates over the model's layers and draws
/// new random rows for every step. Prints medians, and the range of the whole step. On GPUs, and if the machine's speed
/// limits are given, it also prints the floor for the routing that was drawn: the weights or arithmetic of the slowest rank,
/// and the rows over the busiest link.
///
/// Exits with status 0, 64 for an invalid setting or a broken checkpoint, 1 if a measurement failed.
#[derive(Args, Clone, Debug)]
pub struct BenchArgs {
    /// Folder of the checkpoint; `expertd synth` writes one of any shape
    #[arg(value_name = "DIR", required_unless_present_any = ["model", "ceilings"], conflicts_with = "ceilings")]
    pub folder: Option<PathBuf>,
    /// The same as DIR
    #[arg(long, value_name = "DIR", conflicts_with = "folder")]
    pub model: Option<PathBuf>,
    /// Only measure the speed limits of the GPUs, together: memory, tensor cores, links. Takes about a second, during which
    /// nothing else should use the GPUs. --gpus or --ranks choose them [default: all that this process may use]
    #[arg(long, conflicts_with = "model")]
    pub ceilings: bool,
    /// Number of expert ranks, as in `serve` [default: 1]
    #[arg(long)]
    pub ranks: Option<RankNumbers>,
    /// The GPU of each rank, comma-separated, as in `serve`; implies --ranks
    #[arg(long, value_name = "LIST")]
    pub gpus: Option<String>,
    /// Allow --gpus to name a GPU for several ranks, as in `serve`; such figures say nothing about GPUs of their own
    #[arg(long)]
    pub share_gpu: bool,
    /// Device of the ranks, as in `serve` [default: cuda if this build and machine support it, otherwise cpu]
    #[arg(long)]
    pub device: Option<Kinds>,
    /// Kernels of GPU ranks, as in `serve` [default: auto]
    #[arg(long, value_enum, env = gpu::GPU_PATH, hide_env = true)]
    pub gpu_path: Option<GpuPath>,
    /// With --device cuda,cpu: memory for weights on the GPU, as in `serve`
    #[arg(long, value_name = "SIZE")]
    pub gpu_memory: Option<MemorySize>,
    /// With --device cuda,cpu: part of --gpu-memory for copies of experts of CPU ranks, as in `serve`
    #[arg(long, value_name = "SIZE")]
    pub slot_memory: Option<MemorySize>,
    /// With --device cuda,cpu: least number of rows of a step whose experts of CPU ranks are all copied to the GPU, as in `serve`
    #[arg(long, value_name = "ROWS")]
    pub stream_rows: Option<usize>,
    /// How ranks multiply FP8 weights, as in `serve` [default: fp8 on GPUs, bf16 on CPUs]
    #[arg(long, value_enum)]
    pub fp8_compute: Option<Fp8Compute>,
    /// How ranks multiply MXFP4 weights, as in `serve` [default: bf16]
    #[arg(long, value_enum)]
    pub mxfp4_compute: Option<Fp8Compute>,
    /// JSON file with the experts that each rank owns, as in `serve`
    #[arg(long, value_name = "FILE")]
    pub placement: Option<PathBuf>,
    /// Start although the weights need more host memory than is available now, as in `serve`
    #[arg(long)]
    pub skip_memory_check: bool,
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
    /// reuse (each row is the next token of a sequence, which tends to use experts again: of 256, the 64 used last have 67 %),
    /// rows:FILE (as often as in the counts that `status --expert-rows` prints), even (all experts get equally many rows), or one-rank
    /// (only those that rank 0 owns without a placement)
    #[arg(long, default_value = "gate")]
    pub routing: RoutingRule,
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
    /// Also write the figures to this file (`-`: standard output), as JSON (speeds in bytes and FLOP per second, times in seconds)
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number of at least 1".to_owned()),
    }
}

impl BenchArgs {
    /// The settings that choose GPUs.
    fn devices(&self) -> ServeArgs {
        ServeArgs {
            ranks: self.ranks,
            gpus: self.gpus.clone(),
            share_gpu: Some(self.share_gpu),
            gpu_path: self.gpu_path,
            ..ServeArgs::default()
        }
    }

    /// The GPUs whose speed limits `--ceilings` measures.
    pub(super) fn measured_gpus(&self) -> Result<Vec<u32>, PlanError> {
        plan::gpus(&self.devices())
    }

    /// Number of source ranks, which get rows. A list of GPUs that does not parse is refused with the plan.
    pub(super) fn sources(&self) -> u32 {
        self.rank_numbers().first
    }

    fn rank_numbers(&self) -> RankNumbers {
        let listed = self.gpus.as_ref().map(|list| (list.split(',').count() as u32).into());
        self.ranks.or(listed).unwrap_or(1.into())
    }

    /// The plan of the service that is measured, whose steps have room for `max_tokens_per_step` rows.
    pub(super) fn plan(&self, max_tokens_per_step: usize) -> Result<ServePlan, PlanError> {
        let serve = ServeArgs {
            model: self.folder.clone().or_else(|| self.model.clone()),
            ranks: Some(self.rank_numbers()),
            gpu_memory: self.gpu_memory,
            slot_memory: self.slot_memory,
            stream_rows: self.stream_rows,
            placement: self.placement.clone(),
            skip_memory_check: Some(self.skip_memory_check),
            device: self.device,
            fp8_compute: self.fp8_compute,
            mxfp4_compute: self.mxfp4_compute,
            cores: self.cores.clone(),
            max_tokens_per_step: Some(max_tokens_per_step),
            ..self.devices()
        };
        let mut plan = ServePlan::new(Given::merge(&serve, None)?)?;
        plan.check_memory()?;
        let variables = [(self.eager, gpu::EAGER), (self.aligned, gpu::ALIGNED)];
        let set = variables.into_iter().filter(|(is_set, _)| *is_set);
        plan.cluster.environment.extend(set.map(|(_, name)| (name.to_owned(), "1".to_owned())));
        Ok(plan)
    }

    /// The ceilings from which floors are computed: as given, otherwise measured on the GPUs. Returns `None` on CPU ranks
    /// without given ceilings, for ranks that share a GPU, and, with the reason printed, if the measurement fails.
    pub(super) fn ceilings(&self, cluster: &ClusterConfig) -> Option<Ceilings> {
        let link_known = cluster.shape.ranks == 1 || self.link_gbps.is_some();
        if cluster.shape.is_mixed() {
            eprintln!("no floors are printed for a group with CPU ranks");
            return None;
        }
        let mut reached = if self.memory_gbps.is_some() && self.tensor_tflops.is_some() && link_known {
            Ceilings::default()
        } else if gpu::is_shared(&cluster.gpus) {
            eprintln!("no floors are printed, because ranks that share a GPU share its speed");
            return None;
        } else if cluster.device() == DeviceKind::Cuda {
            measured(&cluster.gpus)?
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
fn measured(gpus: &[u32]) -> Option<Ceilings> {
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
