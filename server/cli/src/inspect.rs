//! `expertd inspect`: describes a checkpoint and how its experts would be placed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use serde_json::json;

use super::cores::{available_cores, usable};
use super::exit::CommandError;
use super::predict::{self, MemoryRates};
use super::serve::division::by_memory;
use super::serve::kinds::MemorySize;
use super::serve::layers;
use super::units::{bytes, runs, wrap};
use super::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_ipc::control::DeviceKind;
use expertd_model::{Checkpoint, ModelSpec, MoeLayer, Placement, WeightFormat};
use expertd_rank::end_with;
use expertd_rank::share::available_memory;
use expertd_rank_cuda as gpu;
use expertd_types::{Coverage, Fp8Products, LayerId, Rank};

/// The products that GPU ranks compute in FP8 with the defaults of `serve`.
pub const GPU_PRODUCTS: Fp8Products = Fp8Products::OF_FP8;

/// Cores of a mixed group that are not for CPU ranks, as in `serve`.
const POLLING_CORES: usize = 2;

/// The folder of a checkpoint, as DIR or by `--model` as in `serve`.
#[derive(Args, Clone, Debug, Default)]
pub struct CheckpointArgs {
    /// Folder of the checkpoint: config.json and *.safetensors in Hugging Face layout
    #[arg(value_name = "DIR", required_unless_present = "model")]
    folder: Option<PathBuf>,
    /// The same as DIR
    #[arg(long, value_name = "DIR", conflicts_with = "folder")]
    model: Option<PathBuf>,
}

impl CheckpointArgs {
    /// The given folder; empty only if the arguments were not parsed.
    pub(super) fn folder(&self) -> &Path {
        self.folder.as_deref().or(self.model.as_deref()).unwrap_or(Path::new(""))
    }
}

/// Show the contents of a checkpoint: family, layers, gate, formats, and bytes per rank
///
/// Exits with status 0, or with 64 if the checkpoint cannot be served.
#[derive(Args, Clone, Debug)]
pub struct InspectArgs {
    /// The checkpoint.
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Number of ranks to place the experts on
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub ranks: u16,
    /// Fingerprint every byte of the weights instead of samples, as `serve --verify-weights` does
    #[arg(long)]
    pub verify_weights: bool,
    /// Layers to check and describe, as in `serve --layers`
    #[arg(long, default_value = "all")]
    pub layers: String,
    /// Say how the experts would be divided between a GPU with this much memory for weights and CPU ranks, as in `serve`
    #[arg(long, value_name = "SIZE", conflicts_with = "json")]
    pub gpu_memory: Option<MemorySize>,
    /// With --gpu-memory: rates by which the time of steps is predicted, as in `serve`
    #[arg(long, default_value_t = MemoryRates::default(), value_name = "RATES")]
    pub memory_rates: MemoryRates,
    /// Print everything as JSON
    #[arg(long)]
    pub json: bool,
    /// End with this process, which must be the parent (set by `serve` for the check of a reload)
    #[arg(long, hide = true)]
    pub parent: Option<u32>,
}

/// Opens a checkpoint and describes it; exit status 64 if it cannot be served.
///
/// # Errors
/// If it cannot be served, or an argument does not fit it.
pub fn run(args: &InspectArgs) -> Result<ExitCode, CommandError> {
    if let Some(parent) = args.parent {
        end_with(parent)?;
    }
    let usage = |name: &str, problem: String| CommandError::usage(format!("{name} {problem}"));
    let choice =
        layers::parse(&args.layers, layers::host_name).map_err(|problem| usage("--layers", problem))?;
    let checkpoint =
        Checkpoint::open_layers(args.checkpoint.folder(), choice).map_err(CommandError::usage)?;
    let coverage = if args.verify_weights { Coverage::Whole } else { Coverage::Sampled };
    let describe = if args.json { as_json } else { in_words };
    print!("{}", describe(&checkpoint, usize::from(args.ranks), coverage));
    if let Some(size) = args.gpu_memory {
        let tiers = tiers(checkpoint.spec(), size.0, args.memory_rates, available_memory());
        let text = tiers.map_err(|problem| usage("--gpu-memory", problem))?;
        println!("{text}");
    }
    Ok(ExitCode::SUCCESS)
}

/// `[ranks]`: bytes of weights that each rank would hold: its routed experts, and all shared experts and gates.
#[must_use]
pub fn bytes_per_rank(spec: &ModelSpec, ranks: usize) -> Vec<u64> {
    bytes_of_ranks(spec, ranks, ranks, |_, moe, rank| {
        Placement::new(moe.experts.count, ranks).range(rank).len()
    })
}

/// `[ranks]`: bytes of GPU memory that each rank's weights would take.
fn gpu_bytes_per_rank(spec: &ModelSpec, ranks: usize, products: Fp8Products) -> Vec<u64> {
    let held = |_, moe: &MoeLayer, rank| Placement::new(moe.experts.count, ranks).range(rank).len();
    gpu_bytes_of_ranks(spec, products, ranks, held)
}

/// What a mixed group with `budget` bytes of weights on its GPU would hold where, with `available` bytes of host memory, and the expected
/// time of its steps on this machine's cores.
fn tiers(
    spec: &ModelSpec,
    budget: u64,
    rates: MemoryRates,
    available: Option<u64>,
) -> Result<String, String> {
    let placed = by_memory(spec, DeviceKind::Cuda, GPU_PRODUCTS, budget, 1)?;
    let held =
        |layer, _: &MoeLayer, rank| placed.layer(layer).map_or(0, |layer| layer.experts_of(rank).len());
    let (resident, all) = spec.moe_layers().fold((0, 0), |(resident, all), (layer, moe)| {
        (resident + held(layer, moe, Rank(0)), all + moe.experts.count)
    });
    let on_gpu = gpu_bytes_of_ranks(spec, GPU_PRODUCTS, 1, held)[0];
    let on_cpus = bytes_of_ranks(spec, 2, 1, held)[1];
    let missing = available.map_or(0, |available| on_cpus.saturating_sub(available));
    let room = match missing {
        0 => String::new(),
        missing => format!("; this machine has {} too little for them", bytes(missing)),
    };
    let mut text = format!(
        "tiers             {resident} of {all} experts on the GPU ({}), the others on CPU ranks ({}){room}",
        bytes(on_gpu),
        bytes(on_cpus)
    );
    if resident < all {
        let cores = usable(&available_cores()).saturating_sub(POLLING_CORES);
        let stream_rows = rates.stream_rows(spec, cores);
        let group = predict::Group { rates, cores, stream_rows, uploads: 0 };
        let steps = predict::steps(spec, GPU_PRODUCTS, &group, |layer, moe| held(layer, moe, Rank(0)));
        let _ = write!(text, "\nsteps             {}", wrap(&steps, 18));
    }
    Ok(text)
}

fn as_json(checkpoint: &Checkpoint, ranks: usize, coverage: Coverage) -> String {
    let spec = checkpoint.spec();
    let value = json!({
        "model": spec,
        "weight_fingerprint": checkpoint.fingerprint(coverage),
        "ranks": ranks,
        "bytes_per_rank": bytes_per_rank(spec, ranks),
        "gpu_bytes_per_rank": gpu_bytes_per_rank(spec, ranks, GPU_PRODUCTS),
        "available_memory_bytes": available_memory(),
    });
    format!("{value:#}\n")
}

fn in_words(checkpoint: &Checkpoint, ranks: usize, coverage: Coverage) -> String {
    let spec = checkpoint.spec();
    let mut out = String::new();
    let mut line = |name: &str, text: &str| {
        writeln!(out, "{}", format!("{name:<18}{text}").trim_end()).expect("a string grows");
    };
    line("checkpoint", &checkpoint.dir().display().to_string());
    line("fingerprint", &checkpoint.fingerprint(coverage).to_string());
    line("family", &spec.family);
    line("model type", &spec.model_type);
    line("hidden size", &spec.hidden.to_string());
    let moe: Vec<LayerId> = spec.moe_layers().map(|(layer, _)| layer).collect();
    line("layers", &format!("{}, of which {} have MoE blocks: {}", spec.num_layers, moe.len(), ranges(&moe)));
    for (layers, moe) in group_equal(spec) {
        line("", "");
        line("layers", &ranges(&layers));
        line("  gate", &moe.gate.describe());
        let experts = &moe.experts;
        line("  experts", &format!("{} of width {}, {}", experts.count, experts.width, experts.activation));
        let weight_on = if experts.weight_on_input { "input" } else { "output" };
        let biases = if experts.biases { "with biases" } else { "no biases" };
        line(
            "  weights",
            &format!(
                "{}, {} each, {biases}",
                format_name(experts.format, experts.scale_cols, experts.zero_points),
                bytes(experts.bytes)
            ),
        );
        if experts.take_fp8_rows(Fp8Products::OF_BOTH) {
            let is_mxfp4 = experts.format == WeightFormat::Mxfp4;
            let (name, flag) = if is_mxfp4 { ("MXFP4", "mxfp4") } else { ("FP8", "fp8") };
            let text = format!("{name}, as stored; rows in f32, or in FP8 with --{flag}-compute fp8");
            line("  on CPUs", &text);
        }
        line("  on GPUs", &on_gpus(gpu::Stored::routed(experts)));
        line("  routing weight", &format!("multiplies the expert's {weight_on}"));
        match &moe.shared {
            None => line("  shared", "none"),
            Some(shared) => {
                let gated = if shared.gated { ", behind a sigmoid gate" } else { "" };
                let size = bytes(shared.bytes);
                let formats = [&[shared.format], &shared.other_formats[..]].concat();
                let names = formats.iter().map(|f| format_name(*f, shared.scale_cols, shared.zero_points));
                let format = names.collect::<Vec<_>>().join(" and ");
                line("  shared", &format!("width {}, {format}, {size}{gated}", shared.width));
                if gpu::Stored::shared(shared) != gpu::Stored::routed(experts) {
                    line("  … on GPUs", &on_gpus(gpu::Stored::shared(shared)));
                }
            }
        }
        if moe.gate.needs_token_ids() {
            line("  requests", "must carry token_ids");
        }
    }
    let per_rank = bytes_per_rank(spec, ranks);
    line("", "");
    line("ranks", &ranks.to_string());
    for (rank, size) in per_rank.iter().enumerate() {
        let experts: Vec<String> = counts(spec).into_iter().map(|e| range(e, ranks, rank)).collect();
        line(&format!("  rank {rank}"), &format!("{} of weights, {}", bytes(*size), experts.join(" or ")));
    }
    let total: u64 = per_rank.iter().sum();
    line("  all ranks", &bytes(total));
    line("fits", &fits(total, available_memory()));
    let largest = |products| gpu_bytes_per_rank(spec, ranks, products).into_iter().max().unwrap_or(0);
    let (by_default, in_fp8) = (largest(GPU_PRODUCTS), largest(Fp8Products::OF_BOTH));
    let mut text = format!("{} of weights on the fullest one", bytes(by_default));
    if in_fp8 != by_default {
        let _ = write!(text, ", {} with --mxfp4-compute fp8", bytes(in_fp8));
    }
    line("on GPUs", &text);
    out
}

/// The format of weights on GPUs, and the setting that changes it where the weights are in MXFP4.
fn on_gpus(stored: gpu::Stored) -> String {
    let by_default = stored.explain(GPU_PRODUCTS);
    match stored.explain(Fp8Products::OF_BOTH) {
        in_fp8 if in_fp8 != by_default => format!("{by_default}; with --mxfp4-compute fp8: {in_fp8}"),
        _ => by_default,
    }
}

/// The name of a format with the columns of its groups and zero points, where checkpoints differ in them.
fn format_name(format: WeightFormat, scale_cols: Option<usize>, zero_points: bool) -> String {
    match format {
        WeightFormat::F32 => "f32".into(),
        WeightFormat::F16 => "f16".into(),
        WeightFormat::Bf16 => "bf16".into(),
        WeightFormat::Fp8E4m3 => "FP8 e4m3 with scales".into(),
        WeightFormat::Mxfp4 => "MXFP4".into(),
        WeightFormat::Mxfp8 => "MXFP8".into(),
        WeightFormat::Nvfp4 => "NVFP4".into(),
        WeightFormat::Int4 => {
            let groups =
                scale_cols.map_or("a scale per row".into(), |cols| format!("groups of {cols} columns"));
            format!("INT4, {groups}{}", if zero_points { " with zero points" } else { "" })
        }
    }
}

/// Describes whether the weights fit this machine's memory on CPU ranks. GPU memory is not considered.
fn fits(total: u64, available: Option<u64>) -> String {
    match available {
        None => "unknown: this system does not report its available memory".into(),
        Some(available) if total < available => {
            format!("yes, on CPU ranks: {} of {} available", bytes(total), bytes(available))
        }
        Some(available) => format!(
            "no, not on CPU ranks of this machine: {} needed, {} available; elsewhere each rank needs room for its share",
            bytes(total),
            bytes(available)
        ),
    }
}

/// The distinct numbers of experts in the model's layers, ascending.
fn counts(spec: &ModelSpec) -> Vec<usize> {
    let mut counts: Vec<usize> = spec.moe_layers().map(|(_, moe)| moe.experts.count).collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

fn range(experts: usize, ranks: usize, rank: usize) -> String {
    let range = Placement::new(experts, ranks).range(Rank(u32::try_from(rank).expect("few ranks")));
    match range.len() {
        0 => "no experts".into(),
        1 => format!("expert {}", range.start),
        _ => format!("experts {} to {}", range.start, range.end - 1),
    }
}

/// Groups layers whose blocks are equal.
fn group_equal(spec: &ModelSpec) -> Vec<(Vec<LayerId>, &MoeLayer)> {
    let mut groups: Vec<(Vec<LayerId>, &MoeLayer)> = Vec::new();
    for (layer, moe) in spec.moe_layers() {
        match groups.iter_mut().find(|(_, other)| *other == moe) {
            Some((layers, _)) => layers.push(layer),
            None => groups.push((vec![layer], moe)),
        }
    }
    groups
}

/// Formats ascending numbers as ranges: `0 to 3, 5`.
fn ranges(layers: &[LayerId]) -> String {
    let text = |(start, end)| if start == end { format!("{start}") } else { format!("{start} to {end}") };
    runs(layers.iter().map(|layer| layer.index())).into_iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn layers_are_formatted_as_ranges() {
        let layers: Vec<LayerId> = [0, 1, 2, 5, 7, 8].map(LayerId).to_vec();
        assert_eq!(ranges(&layers), "0 to 2, 5, 7 to 8");
    }

    #[test]
    fn tiers_are_divided_by_the_memory_of_the_gpu() {
        use expertd_model::synth::{self, SynthConfig};
        let dir = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig { layers: 2, width: 128, ..SynthConfig::new("mixtral") }, dir.path())
            .unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let expert = checkpoint.spec().layers[0].as_ref().unwrap().experts.bytes;
        let tiers =
            |budget, available| super::tiers(checkpoint.spec(), budget, MemoryRates::default(), available);
        let text = tiers(7 * expert, Some(10 * expert)).unwrap();
        assert!(text.contains(" 6 of 16 experts on the GPU") && !text.contains("too little"), "{text}");
        assert!(text.contains("\nsteps             a layer takes about "), "{text}");
        let text = tiers(7 * expert, Some(8 * expert)).unwrap();
        assert!(text.contains(&format!("this machine has {} too little", bytes(2 * expert))), "{text}");
        let text = tiers(u64::MAX, None).unwrap();
        assert!(text.contains("16 of 16") && !text.contains("steps"), "{text}");
        assert!(tiers(expert, None).unwrap_err().contains("one expert of each layer"));
    }

    #[test]
    fn gpus_hold_other_bytes_than_checkpoints() {
        use expertd_model::synth::{self, SynthConfig, SynthFormat};
        let sizes = |format, width| {
            let dir = tempfile::tempdir().unwrap();
            let config = SynthConfig { format, width, ..SynthConfig::new("mixtral") };
            synth::write(&config, dir.path()).unwrap();
            let checkpoint = Checkpoint::open(dir.path()).unwrap();
            let text = in_words(&checkpoint, 2, Coverage::Sampled);
            (
                bytes_per_rank(checkpoint.spec(), 2),
                gpu_bytes_per_rank(checkpoint.spec(), 2, GPU_PRODUCTS),
                text,
            )
        };
        let (stored, gpu, text) = sizes(SynthFormat::Bf16, 128);
        assert_eq!(stored, gpu);
        assert!(text.contains("on GPUs         bf16, as stored"), "{text}");
        // 128 × 64 elements in bytes need panels of 128 × 128.
        let (stored, gpu, text) = sizes(SynthFormat::Fp8, 128);
        assert!(gpu[0] > stored[0] * 5 / 4 && gpu[0] < 2 * stored[0], "{stored:?} {gpu:?}");
        assert!(text.contains("FP8, as stored; products in FP8"), "{text}");
    }

    #[test]
    fn formats_that_gpus_hold_otherwise_are_said() {
        let of = |name: &str| {
            let folder = expertd_test_fixtures::fixture(&format!("quantised/{name}"));
            let checkpoint = Checkpoint::open(&folder).unwrap();
            let text = in_words(&checkpoint, 1, Coverage::Sampled);
            (gpu_bytes_per_rank(checkpoint.spec(), 1, GPU_PRODUCTS)[0], text)
        };
        // Matrices [136, 72] take 192 × 128 elements, of two bytes in bf16. FP8 takes 256 × 128 bytes and scales.
        let [bf16, gate] = [3 * 192 * 128 * 2, 6 * 72 * 2];
        let (size, text) = of("deepseek_v3-fp8-narrow");
        assert_eq!(size, 7 * bf16 + gate);
        assert!(text.contains("on GPUs         bf16, rounded once, because blocks of 48 columns"), "{text}");
        let (size, text) = of("qwen2_moe-fp8-mixed");
        let fp8 = (2 * 256 / 16 + 128 / 16 * 2) * (2048 + 64) + (2 * 256 + 128) * 4;
        assert_eq!(size, 6 * fp8 + bf16 + gate);
        assert!(text.contains("width 136, FP8 e4m3 with scales and bf16"), "{text}");
        assert!(
            text.contains("… on GPUs       bf16, rounded once, because gate, up and down differ"),
            "{text}"
        );
        // Matrices [160, 96] take 192 × 128 elements of half a byte, 256 × 128 for products in FP8.
        let (size, text) = of("gpt_oss-mxfp4-odd");
        let mxfp4 = (2 * 192 / 16 + 128 / 16 * 2) * (1024 + 64) + 2 * (2 * 192 + 128) * 4;
        let fp8 = (2 * 256 / 16 + 128 / 16 * 2) * (1024 + 64) + 2 * (2 * 256 + 128) * 4;
        let (experts, gates) = (3 * 9, 3 * 9 * 96 * 2);
        assert_eq!(size, experts * mxfp4 + gates);
        let format =
            "MXFP4, as stored; products in bf16; with --mxfp4-compute fp8: MXFP4, as stored; products in FP8";
        assert!(text.contains(format), "{text}");
        let in_fp8 = format!("{} with --mxfp4-compute fp8", bytes(experts * fp8 + gates));
        assert!(text.contains(&in_fp8), "{text}");
    }
}
