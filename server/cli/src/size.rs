//! `expertd size`: the memory that a service of a checkpoint needs, as a block for a Kubernetes manifest.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::exit::CommandError;
use super::inspect::{CheckpointArgs, GPU_PRODUCTS};
use super::predict::{self, MemoryRates};
use super::serve::division::by_memory;
use super::serve::kinds::{Kinds, MemorySize, RankNumbers};
use super::serve::layers;
use super::serve::plan::{MAX_BYTES_IN_FLIGHT, default_bytes_in_flight, group_shape, read_placement};
use super::units::{bytes, count, wrap};
use super::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_core::backend::Limits;
use expertd_ipc::control::DeviceKind;
use expertd_model::{Checkpoint, LayerChoice, ModelSpec, MoeLayer};
use expertd_rank::share::ExpertShare;
use expertd_rank_cuda as gpu;
use expertd_tier::{TierLayout, TierShape};
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
/// Cores for a rank by default.
const CORES_OF_CPU_RANK: u32 = 8;
const CORES_OF_GPU_RANK: u32 = 4;
/// Columns before the text of a line.
const INDENT: usize = 13;
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
    /// Number of ranks, as in `serve`
    #[arg(long, default_value = "1")]
    pub ranks: RankNumbers,
    /// Device of the ranks, as in `serve`: cpu, cuda, or cuda,cpu
    #[arg(long, default_value = "cpu")]
    pub device: Kinds,
    /// With --device cuda,cpu: memory for weights on the GPU, as in `serve`
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["placement", "spare_experts"])]
    pub gpu_memory: Option<MemorySize>,
    /// With --device cuda,cpu: rates by which the time of steps is predicted, as in `serve`
    #[arg(long, default_value_t = MemoryRates::default(), value_name = "RATES")]
    pub memory_rates: MemoryRates,
    /// How GPU ranks multiply MXFP4 weights, as in `serve`; with fp8 their width is padded to a multiple of 128
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
    /// Number of ranks on GPUs: the first ones.
    gpu_ranks: usize,
    /// Windows of one rank, in the memory where its weights are.
    windows: u64,
    /// The wire of a mixed group, in host memory; 0 in other groups.
    wire: u64,
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
        let (sources, workers) = group(args)?;
        let ranks = (sources + workers) as usize;
        let products = products(args);
        let share = share(spec, args)?;
        let held = |layer, moe: &MoeLayer, rank| match args.spare_experts {
            0 => share.held(layer, moe, rank),
            spare => moe.experts.count.div_ceil(ranks).saturating_add(spare).min(moe.experts.count),
        };
        let per_step = args.max_tokens_per_step as usize;
        let shape = group_shape(spec, sources + workers, sources, args.slots, per_step);
        let wire = match shape.is_mixed() {
            true => TierLayout::new(TierShape::of(&shape)).map_err(|error| error.to_string())?.bytes(),
            false => 0,
        };
        let windows = match args.device.first {
            DeviceKind::Cpu if shape.is_mixed() => 0,
            DeviceKind::Cpu => expertd_rank_cpu::window_bytes(&shape).map_err(|error| error.to_string())?,
            DeviceKind::Cuda => gpu::window_bytes(&shape, spec.max_experts()),
        };
        let message = Limits::message_bytes(2 * per_step, spec.hidden, shape.max_top_k);
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
        let gpu_ranks = if args.device.first == DeviceKind::Cuda { sources } else { 0 };
        let padded = |bytes: u64| bytes / 10 * PADDING_TENTHS;
        let mut weights = bytes_of_ranks(spec, ranks, sources as usize, held);
        let on_gpus = gpu_bytes_of_ranks(spec, products, gpu_ranks as usize, held);
        weights[..gpu_ranks as usize].copy_from_slice(&on_gpus);
        Ok(MemoryNeeds {
            weights: weights.into_iter().map(padded).collect(),
            gpu_ranks: gpu_ranks as usize,
            windows: windows as u64,
            wire: wire as u64,
            channels: shape.channel_bytes().map_err(|error| error.to_string())? as u64,
            router: router as u64,
            // The limit counts each session for the router and for each rank that has rows.
            sessions: args.max_session_bytes / (u64::from(sources) + 1),
            processes: ranks as u64 * RANK_BYTES + u64::from(gpu_ranks) * CUDA_PROCESS_BYTES,
        })
    }

    /// Memory of the container.
    fn host(&self) -> u64 {
        let of_cpu_ranks = &self.weights[self.gpu_ranks..];
        let windows = if self.gpu_ranks == 0 { self.windows * of_cpu_ranks.len() as u64 } else { 0 };
        let weights_and_windows = of_cpu_ranks.iter().sum::<u64>() + windows;
        [self.wire, self.channels, self.router, self.sessions, self.processes]
            .into_iter()
            .fold(weights_and_windows, u64::saturating_add)
    }

    /// Memory of the fullest GPU.
    fn device(&self) -> u64 {
        self.weights[..self.gpu_ranks].iter().max().copied().unwrap_or(0) + self.windows + DEVICE_RESERVE
    }
}

/// The experts whose products GPU ranks compute in FP8.
fn products(args: &SizeArgs) -> Fp8Products {
    Fp8Products { of_mxfp4: args.mxfp4_compute == Fp8Compute::Fp8, ..GPU_PRODUCTS }
}

/// The experts of each rank.
fn share(spec: &ModelSpec, args: &SizeArgs) -> Result<ExpertShare, String> {
    let (sources, workers) = group(args)?;
    let ranks = (sources + workers) as usize;
    let placement = match (&args.placement, args.gpu_memory) {
        (Some(path), _) => Some(read_placement(path, spec, ranks)?),
        (None, Some(budget)) if workers > 0 => {
            let placed = by_memory(spec, args.device.first, products(args), budget.0, workers as usize);
            Some(placed.map_err(|problem| format!("--gpu-memory {problem}"))?)
        }
        (None, Some(_)) => return Err("--gpu-memory needs --device cuda,cpu".to_owned()),
        (None, None) if workers > 0 && args.device.first == DeviceKind::Cuda => {
            return Err("--device cuda,cpu needs --gpu-memory or --placement".to_owned());
        }
        (None, None) => None,
    };
    Ok(ExpertShare::of_rank(Rank(0), ranks, placement).with_sources(sources as usize))
}

/// The expected time of steps; `None` if the group is not of a GPU rank and CPU ranks.
fn steps(spec: &ModelSpec, args: &SizeArgs) -> Result<Option<String>, String> {
    let (_, workers) = group(args)?;
    if workers == 0 || args.device.first != DeviceKind::Cuda {
        return Ok(None);
    }
    let share = share(spec, args)?;
    let cores =
        args.cores.map_or(CORES_OF_CPU_RANK * workers, |cores| cores.saturating_sub(CORES_OF_GPU_RANK));
    let group = predict::Group {
        rates: args.memory_rates,
        cores: cores as usize,
        stream_rows: args.memory_rates.stream_rows(spec, cores as usize),
        uploads: 0,
    };
    let on_gpu = |layer, moe: &MoeLayer| share.layer(layer, moe).experts_of(Rank(0)).len();
    Ok(Some(predict::steps(spec, products(args), &group, on_gpu)))
}

/// Numbers of source ranks and of CPU ranks beside them.
fn group(args: &SizeArgs) -> Result<(u32, u32), String> {
    let RankNumbers { first, second } = args.ranks;
    let workers = second.unwrap_or(0);
    if (args.device.is_mixed && first != 1) || args.device.is_mixed != (workers > 0) {
        return Err(format!(
            "--ranks is {}, expected 1,CPU_RANKS with --device cuda,cpu and one number otherwise",
            args.ranks
        ));
    }
    match first.saturating_add(workers) {
        1..=8 => Ok((first, workers)),
        ranks => Err(format!("--ranks is {ranks} in all, must be 1 to 8")),
    }
}

/// Prints the sizes.
///
/// # Errors
/// If the checkpoint or a size cannot be used.
pub fn run(args: &SizeArgs) -> Result<ExitCode, CommandError> {
    print!("{}", text(args).map_err(CommandError::usage)?);
    Ok(ExitCode::SUCCESS)
}

fn text(args: &SizeArgs) -> Result<String, String> {
    let choice: LayerChoice =
        layers::parse(&args.layers, layers::host_name).map_err(|problem| format!("--layers {problem}"))?;
    let checkpoint =
        Checkpoint::open_layers(args.checkpoint.folder(), choice).map_err(|error| error.to_string())?;
    let sizes = MemoryNeeds::new(checkpoint.spec(), args)?;
    let steps = steps(checkpoint.spec(), args)?.map_or_else(String::new, |text| {
        // Each line is a comment.
        let indent = " ".repeat(INDENT);
        let text = wrap(&text, INDENT).replace(&format!("\n{indent}"), &format!("\n#{}", &indent[1..]));
        format!("# {:<10} {text}\n", "steps")
    });
    Ok(steps + &block(&sizes, args, &checkpoint.spec().held.to_string()))
}

/// The sizes as comments, and the resources as YAML.
fn block(sizes: &MemoryNeeds, args: &SizeArgs, held: &str) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "# {name:<10} {value}");
    };
    let (device, ranks) = (args.device, sizes.weights.len() as u32);
    line(
        "service",
        format!(
            "layers {held}, {} per step, {} on {device}",
            count(args.max_tokens_per_step.into(), "token"),
            count(ranks.into(), "rank")
        ),
    );
    let where_weights_are = if sizes.gpu_ranks == 0 { "in this memory" } else { "on GPUs" };
    if device.is_mixed {
        let of_workers: u64 = sizes.weights[1..].iter().sum();
        let of_source = bytes(sizes.weights[0]);
        line(
            "weights",
            format!("{of_source} of the first rank, {where_weights_are}; {} of CPU ranks", bytes(of_workers)),
        );
        line("wire", bytes(sizes.wire));
    } else {
        let all: u64 = sizes.weights.iter().sum();
        line("weights", format!("{} of all ranks, {where_weights_are}", bytes(all)));
        line("windows", format!("{} per rank, {where_weights_are}", bytes(sizes.windows)));
    }
    line("staging", bytes(sizes.channels));
    line("router", format!("up to {}", bytes(sizes.router)));
    line("sessions", format!("up to {}", bytes(sizes.sessions)));
    line("ranks", bytes(sizes.processes));
    if sizes.gpu_ranks > 0 {
        line("GPU", format!("{} on the fullest one", bytes(sizes.device())));
    }
    let memory = sizes.host().div_ceil(1 << 30);
    let gpu_ranks = sizes.gpu_ranks as u32;
    let cores = args.cores.unwrap_or(CORES_OF_GPU_RANK * gpu_ranks + CORES_OF_CPU_RANK * (ranks - gpu_ranks));
    line(
        "cores",
        if args.cores.is_some() {
            "as given".to_owned()
        } else {
            let kinds = [(gpu_ranks, "4 for each GPU rank"), (ranks - gpu_ranks, "8 for each CPU rank")];
            let kinds: Vec<&str> =
                kinds.iter().filter(|(ranks, _)| *ranks > 0).map(|(_, text)| *text).collect();
            format!("{}; --cores gives others", kinds.join(", "))
        },
    );
    let gpus = match gpu_ranks {
        0 => String::new(),
        gpus => format!(", nvidia.com/gpu: \"{gpus}\""),
    };
    let list = format!("{{ cpu: \"{cores}\", memory: {memory}Gi{gpus} }}");
    let _ = write!(text, "resources:\n  requests: {list}\n  limits: {list}\n");
    text
}

#[cfg(test)]
mod tests;
