//! `expertd size`: the memory that a service of a checkpoint needs, as a block for a Kubernetes manifest.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::inspect::{CheckpointArgs, GPU_PRODUCTS};
use super::serve::layers;
use super::serve::plan::{MAX_BYTES_IN_FLIGHT, default_bytes_in_flight, read_placement};
use super::units::{bytes, count};
use super::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_core::backend::Limits;
use expertd_ipc::GroupShape;
use expertd_ipc::control::DeviceKind;
use expertd_model::{Checkpoint, LayerChoice, ModelError, ModelSpec, MoeLayer};
use expertd_rank::share::ExpertShare;
use expertd_rank_cuda as gpu;
use expertd_types::{Fp8Compute, Fp8Products, Rank};

/// Bytes of the router beside messages, sessions and staging.
const ROUTER_BYTES: usize = 256 << 20;
/// Copies of the bytes in flight that the router may hold: a message as it came, and decoded.
const COPIES_IN_FLIGHT: usize = 2;
/// Bytes of a rank beside weights, windows and staging: program, stacks of threads, scratch memory.
const RANK_BYTES: u64 = 128 << 20;
/// Bytes of a GPU rank's device memory that are not counted separately: graphs, tables, step buffers, and the driver's own.
const DEVICE_RESERVE: u64 = 2 << 30;
/// Host memory of a GPU rank beside [`RANK_BYTES`]: its share of the driver and CUDA's modules.
const CUDA_PROCESS_BYTES: u64 = 1 << 30;
/// Packed weights are padded to whole panels, by less than a tenth.
const PADDING_TENTHS: u64 = 11;

/// Print the memory that a service needs, and a resources block for its container
///
/// Counts weights, windows, staging, messages and processes, at the largest that settings allow. It needs the checkpoint's headers
/// only and no GPU. A reload that keeps the earlier weights until the new ones are loaded needs the weights twice. `serve` chooses ranks
/// and device from its machine; this command counts what --ranks and --device say.
///
/// Exits with status 0, or with 64 if the checkpoint or a size cannot be used.
#[derive(Args, Clone, Debug)]
pub struct SizeArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Number of ranks
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub ranks: u32,
    /// Device of the ranks
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// How GPU ranks multiply MXFP4 weights, as in `serve`; with fp8 these take twice the memory
    #[arg(long, value_enum, default_value_t = Fp8Compute::Bf16)]
    pub mxfp4_compute: Fp8Compute,
    /// Layers that the service holds, as in `serve --layers`
    #[arg(long, default_value = "all")]
    pub layers: String,
    /// JSON file with the experts that each rank owns, as in `serve`
    #[arg(long, value_name = "FILE", conflicts_with = "spare_experts")]
    pub placement: Option<PathBuf>,
    /// Experts of a layer that each rank may own beside its even share, as in `rebalance`
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub spare_experts: usize,
    /// Number of cores for the container [default: 8 for each CPU rank, 4 for each GPU rank]
    #[arg(long)]
    pub cores: Option<u32>,
    /// As in `serve`
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub max_tokens_per_step: u32,
    /// As in `serve`
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=8))]
    pub slots: u32,
    /// As in `serve` [default: 1 GiB, or 4 of the largest requests]
    #[arg(long, value_name = "BYTES")]
    pub max_bytes_in_flight: Option<usize>,
    /// As in `serve`, for a service with sessions
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub max_session_bytes: u64,
}

/// Bytes that a service needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MemoryNeeds {
    /// `[ranks]`, weights of each rank.
    weights: Vec<u64>,
    /// Windows of one rank.
    windows: u64,
    /// Staging and rings of all ranks.
    channels: u64,
    /// Memory of the router, without channels and sessions.
    router: u64,
    /// Memory of all sessions, at most.
    sessions: u64,
    /// Memory of the ranks that is not counted separately.
    processes: u64,
}

impl MemoryNeeds {
    fn new(spec: &ModelSpec, args: &SizeArgs) -> Result<MemoryNeeds, String> {
        let ranks = args.ranks as usize;
        let placement =
            args.placement.as_deref().map(|path| read_placement(path, spec, ranks)).transpose()?;
        let share = ExpertShare::of_rank(Rank(0), ranks, placement);
        let held = |layer, moe: &MoeLayer, rank| match args.spare_experts {
            0 => share.layer(layer, moe).experts_of(rank).len(),
            spare => moe.experts.count.div_ceil(ranks).saturating_add(spare).min(moe.experts.count),
        };
        let per_step = args.max_tokens_per_step as usize;
        let per_rank = per_step.div_ceil(ranks);
        let max_top_k = spec.max_top_k();
        let shape = GroupShape {
            ranks: args.ranks,
            slots: args.slots,
            max_tokens_per_rank: per_rank,
            max_segments: per_rank,
            hidden: spec.hidden,
            max_top_k,
        };
        let windows = match args.device {
            DeviceKind::Cpu => expertd_rank_cpu::window_bytes(&shape).map_err(|error| error.to_string())?,
            DeviceKind::Cuda => gpu::window_bytes(&shape, spec.max_experts()),
        };
        let message = Limits::message_bytes(2 * per_step, spec.hidden, max_top_k);
        let in_flight = args.max_bytes_in_flight.unwrap_or(default_bytes_in_flight(message));
        if in_flight < message {
            return Err(format!(
                "--max-bytes-in-flight is {in_flight}, but the largest request needs up to {message} bytes"
            ));
        }
        if in_flight > MAX_BYTES_IN_FLIGHT {
            return Err(format!(
                "--max-bytes-in-flight is {in_flight}, must be at most {MAX_BYTES_IN_FLIGHT}"
            ));
        }
        let router = ROUTER_BYTES + COPIES_IN_FLIGHT * in_flight;
        let process = match args.device {
            DeviceKind::Cpu => RANK_BYTES,
            DeviceKind::Cuda => RANK_BYTES + CUDA_PROCESS_BYTES,
        };
        let padded = |bytes: u64| bytes / 10 * PADDING_TENTHS;
        let weights = match args.device {
            DeviceKind::Cpu => bytes_of_ranks(spec, ranks, held),
            DeviceKind::Cuda => {
                let of_mxfp4 = args.mxfp4_compute == Fp8Compute::Fp8;
                gpu_bytes_of_ranks(spec, Fp8Products { of_mxfp4, ..GPU_PRODUCTS }, ranks, held)
            }
        };
        Ok(MemoryNeeds {
            weights: weights.into_iter().map(padded).collect(),
            windows: windows as u64,
            channels: shape.channel_bytes().map_err(|error| error.to_string())? as u64,
            router: router as u64,
            // The limit counts each session for the router and for each rank.
            sessions: args.max_session_bytes / (ranks as u64 + 1),
            processes: ranks as u64 * process,
        })
    }

    /// Memory of the container.
    fn host(&self, device: DeviceKind) -> u64 {
        let weights_and_windows = match device {
            DeviceKind::Cpu => self.weights.iter().sum::<u64>() + self.windows * self.weights.len() as u64,
            DeviceKind::Cuda => 0,
        };
        [self.channels, self.router, self.sessions, self.processes]
            .into_iter()
            .fold(weights_and_windows, u64::saturating_add)
    }

    /// Memory of the fullest GPU.
    fn device(&self) -> u64 {
        self.weights.iter().max().copied().unwrap_or(0) + self.windows + DEVICE_RESERVE
    }
}

/// Prints the sizes; exit status 64 if the checkpoint or a size cannot be used.
#[must_use]
pub fn run(args: &SizeArgs) -> ExitCode {
    match text(args) {
        Ok(text) => {
            print!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("expertd size: {error}");
            ExitCode::from(ModelError::EXIT_CODE)
        }
    }
}

fn text(args: &SizeArgs) -> Result<String, String> {
    let choice: LayerChoice =
        layers::parse(&args.layers, layers::host_name).map_err(|problem| format!("--layers {problem}"))?;
    let checkpoint =
        Checkpoint::open_layers(args.checkpoint.folder(), choice).map_err(|error| error.to_string())?;
    let sizes = MemoryNeeds::new(checkpoint.spec(), args)?;
    Ok(block(&sizes, args, &checkpoint.spec().held.to_string()))
}

/// The sizes as comments, and the resources as YAML.
fn block(sizes: &MemoryNeeds, args: &SizeArgs, held: &str) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "# {name:<10} {value}");
    };
    let (device, ranks) = (args.device, args.ranks);
    line(
        "service",
        format!(
            "layers {held}, {} per step, {} on {device}",
            count(args.max_tokens_per_step.into(), "token"),
            count(ranks.into(), "rank")
        ),
    );
    let where_weights_are = match device {
        DeviceKind::Cpu => "in this memory",
        DeviceKind::Cuda => "on GPUs",
    };
    let all: u64 = sizes.weights.iter().sum();
    line("weights", format!("{} of all ranks, {where_weights_are}", bytes(all)));
    line("windows", format!("{} per rank, {where_weights_are}", bytes(sizes.windows)));
    line("staging", bytes(sizes.channels));
    line("router", format!("up to {}", bytes(sizes.router)));
    line("sessions", format!("up to {}", bytes(sizes.sessions)));
    line("ranks", bytes(sizes.processes));
    if device == DeviceKind::Cuda {
        line("GPU", format!("{} on the fullest one", bytes(sizes.device())));
    }
    let memory = sizes.host(device).div_ceil(1 << 30);
    let per_rank = if device == DeviceKind::Cpu { 8 } else { 4 };
    let cores = args.cores.unwrap_or(ranks * per_rank);
    line(
        "cores",
        if args.cores.is_some() {
            "as given".to_owned()
        } else {
            format!("{per_rank} for each rank; --cores gives others")
        },
    );
    let gpus = match device {
        DeviceKind::Cpu => String::new(),
        DeviceKind::Cuda => format!(", nvidia.com/gpu: \"{ranks}\""),
    };
    let list = format!("{{ cpu: \"{cores}\", memory: {memory}Gi{gpus} }}");
    let _ = write!(text, "resources:\n  requests: {list}\n  limits: {list}\n");
    text
}

#[cfg(test)]
mod tests;
