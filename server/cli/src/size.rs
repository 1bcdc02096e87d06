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
/// Bytes of a GPU rank's device memory that are not counted separately: graphs, tables, step buffers, and those of the driver.
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
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::Parser;
    use expertd_model::synth::{self, SynthConfig};

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        size: SizeArgs,
    }

    fn printed(more: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let config = SynthConfig { layers: 3, ..SynthConfig::new("mixtral") };
        synth::write(&config, dir.path()).unwrap();
        let line = [&["size", dir.path().to_str().unwrap()], more].concat();
        text(&Cli::try_parse_from(line).unwrap().size).unwrap()
    }

    #[test]
    fn huge_numbers_are_bounded_or_refused() {
        let all = printed(&["--spare-experts", "8"]);
        assert_eq!(printed(&["--spare-experts", "18446744073709551615"]), all);
        printed(&["--max-session-bytes", "18446744073709551615"]);
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new("mixtral"), dir.path()).unwrap();
        let folder = dir.path().to_str().unwrap();
        let line = ["size", folder, "--max-bytes-in-flight", "18446744073709551615"];
        let error = text(&Cli::try_parse_from(line).unwrap().size).unwrap_err();
        assert!(error.contains("must be at most 1099511627776"), "{error}");
    }

    #[test]
    fn the_block_has_requests_equal_to_limits() {
        let text = printed(&["--ranks", "2", "--cores", "6"]);
        // 2.25 GiB in the router, 256 MiB of ranks, and small windows and weights.
        let resources =
            "resources:\n  requests: { cpu: \"6\", memory: 3Gi }\n  limits: { cpu: \"6\", memory: 3Gi }\n";
        assert!(text.ends_with(resources), "{text}");
        let text = printed(&["--ranks", "4", "--device", "cuda"]);
        assert!(text.contains("nvidia.com/gpu: \"4\" }") && text.contains("cpu: \"16\""), "{text}");
        assert!(text.contains("# GPU"), "{text}");
        assert!(text.contains("# ranks      4.5 GiB") && text.contains("memory: 7Gi"), "{text}");
    }

    #[test]
    fn limits_of_the_service_are_counted() {
        // 256 MiB of messages instead of 2 GiB, and 4 GiB of sessions, mapped by three processes.
        let text = printed(&[
            "--ranks",
            "2",
            "--max-bytes-in-flight",
            "134217728",
            "--max-session-bytes",
            "12884901888",
        ]);
        assert!(text.contains("# sessions   up to 4.0 GiB") && text.contains("memory: 5Gi"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new("mixtral"), dir.path()).unwrap();
        let line = ["size", dir.path().to_str().unwrap(), "--max-bytes-in-flight", "1000"];
        let error = super::text(&Cli::try_parse_from(line).unwrap().size).unwrap_err();
        assert!(error.contains("--max-bytes-in-flight is 1000"), "{error}");
    }

    #[test]
    fn copies_of_experts_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("placement.json");
        let sizes = |text: &str, more: &[&str]| {
            std::fs::write(&file, text).unwrap();
            let line = [&["size", "x", "--ranks", "2"], more].concat();
            let dir = tempfile::tempdir().unwrap();
            synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("mixtral") }, dir.path()).unwrap();
            let checkpoint = Checkpoint::open_layers(dir.path(), LayerChoice::All).unwrap();
            MemoryNeeds::new(checkpoint.spec(), &Cli::try_parse_from(line).unwrap().size)
        };
        let path = file.to_str().unwrap();
        let even = sizes("", &[]).unwrap();
        assert_eq!(even, sizes(r#"{"ranks": 2, "layers": []}"#, &["--placement", path]).unwrap());
        // Layer 1 has eight experts: rank 0 owns six, rank 1 all of them.
        let placed =
            r#"{"ranks": 2, "layers": [{"layer": 1, "experts": [[0,1,2,3,4,5], [0,1,2,3,4,5,6,7]]}]}"#;
        let placed = sizes(placed, &["--placement", path]).unwrap();
        let more = |sizes: &MemoryNeeds, rank: usize| sizes.weights[rank] - even.weights[rank];
        assert!(more(&placed, 0).abs_diff(more(&placed, 1) / 2) < 100, "{placed:?} {even:?}");
        // Two spare experts in each of two layers.
        let spare = sizes("", &["--spare-experts", "2"]).unwrap();
        assert!(more(&spare, 0).abs_diff(more(&placed, 1)) < 100, "{spare:?}");
        assert_eq!(sizes("", &["--spare-experts", "9"]), sizes("", &["--spare-experts", "4"]));
        let error = sizes(r#"{"ranks": 3, "layers": []}"#, &["--placement", path]).unwrap_err();
        assert!(error.contains("placement.json") && error.contains("3 ranks"), "{error}");
    }

    #[test]
    fn mxfp4_held_as_fp8_takes_twice_the_memory_of_gpus() {
        use expertd_model::synth::SynthFormat;
        let dir = tempfile::tempdir().unwrap();
        let config = SynthConfig {
            hidden: 256,
            width: 256,
            format: SynthFormat::Mxfp4,
            ..SynthConfig::new("gpt_oss")
        };
        synth::write(&config, dir.path()).unwrap();
        let checkpoint = Checkpoint::open_layers(dir.path(), LayerChoice::All).unwrap();
        let weights = |more: &[&str]| {
            let line = [&["size", "x", "--mxfp4-compute"], more].concat();
            MemoryNeeds::new(checkpoint.spec(), &Cli::try_parse_from(line).unwrap().size).unwrap().weights[0]
        };
        let (widened, fp8) = (weights(&["bf16", "--device", "cuda"]), weights(&["fp8", "--device", "cuda"]));
        assert!(fp8 > widened * 18 / 10 && fp8 < 2 * widened, "{widened} {fp8}");
        assert_eq!(weights(&["bf16"]), weights(&["fp8"]));
    }

    #[test]
    fn fewer_layers_need_less() {
        let spec = |choice| {
            let dir = tempfile::tempdir().unwrap();
            synth::write(&SynthConfig { layers: 3, ..SynthConfig::new("mixtral") }, dir.path()).unwrap();
            Checkpoint::open_layers(dir.path(), choice).unwrap().spec().clone()
        };
        let args = Cli::try_parse_from(["size", "x", "--ranks", "2"]).unwrap().size;
        let all = MemoryNeeds::new(&spec(LayerChoice::All), &args).unwrap();
        let share = MemoryNeeds::new(&spec(LayerChoice::Share { index: 0, of: 3 }), &args).unwrap();
        let total = |sizes: &MemoryNeeds| sizes.weights.iter().sum::<u64>();
        assert!((3 * total(&share)).abs_diff(total(&all)) < 100, "{share:?} {all:?}");
        assert_eq!(all.windows, share.windows);
    }
}
