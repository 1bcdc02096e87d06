//! The time that a step of a mixed group is expected to take, from the rates of memories and processors.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::units::time;
use expertd_model::{ModelSpec, MoeLayer};
use expertd_rank_cuda as gpu;
use expertd_types::{Fp8Products, LayerId};

/// Rows of the steps that plans predict.
const ROWS: [usize; 4] = [1, 8, 64, 2048];

/// Time of a step that depends neither on rows nor on experts: what a step of one row took on an H100 beside reading its experts.
const FIXED: Duration = Duration::from_micros(30);

/// Rates of a machine's memories and processors, as `gpu=4000,host=85,pcie=55,gpu-tflops=530,core-gflops=59`; those that are left out
/// have their defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryRates {
    /// GB/s at which the GPU reads experts from its memory. One H200: steps of 8 to 32 rows of Qwen3-30B-A3B's shape in bf16.
    gpu: f64,
    /// GB/s at which all CPU ranks together read experts from host memory. 14 threads beside an H100.
    host: f64,
    /// GB/s of copies to the GPU. PCIe 5 ×16.
    pcie: f64,
    /// TFLOP/s of the GPU's products. One H200: steps of 8192 rows, as for `gpu`.
    gpu_tflops: f64,
    /// GFLOP/s of the products of one core. 14 threads beside an H100: steps of 2048 rows in bf16.
    core_gflops: f64,
}

impl Default for MemoryRates {
    fn default() -> Self {
        MemoryRates { gpu: 4000.0, host: 85.0, pcie: 55.0, gpu_tflops: 530.0, core_gflops: 59.0 }
    }
}

impl FromStr for MemoryRates {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rates = MemoryRates::default();
        for part in text.split(',').map(str::trim) {
            let (name, number) = part.split_once('=').unwrap_or((part, ""));
            let rate = match name.trim() {
                "gpu" => &mut rates.gpu,
                "host" => &mut rates.host,
                "pcie" => &mut rates.pcie,
                "gpu-tflops" => &mut rates.gpu_tflops,
                "core-gflops" => &mut rates.core_gflops,
                _ => {
                    return Err(format!(
                        "`{part}` is not a rate; expected gpu=, host= or pcie= with GB/s, gpu-tflops= or core-gflops="
                    ));
                }
            };
            let number =
                number.trim().parse::<f64>().ok().filter(|number| number.is_finite() && *number > 0.0);
            *rate = number
                .ok_or_else(|| format!("`{part}` has no rate; expected a number above 0, such as host=85"))?;
        }
        Ok(rates)
    }
}

impl fmt::Display for MemoryRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryRates { gpu, host, pcie, gpu_tflops, core_gflops } = self;
        write!(f, "gpu={gpu},host={host},pcie={pcie},gpu-tflops={gpu_tflops},core-gflops={core_gflops}")
    }
}

/// A layer of a mixed group.
#[derive(Clone, Copy, Debug)]
struct Layer {
    experts: usize,
    top_k: usize,
    /// Experts that the GPU owns or has copies of.
    on_gpu: usize,
    /// Bytes of an expert in the GPU's memory.
    gpu_bytes: f64,
    /// Bytes of an expert in host memory, and of a copy to the GPU.
    host_bytes: f64,
    /// Bytes of gate and shared experts, which every step reads on the GPU.
    always_bytes: f64,
    /// Operations for a row of one expert, and of shared experts.
    row_operations: f64,
    shared_operations: f64,
}

/// The other quantities that determine the time of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) rates: MemoryRates,
    /// Cores of all CPU ranks together.
    pub(crate) cores: usize,
    /// Rows of a step from which all experts of CPU ranks stream to the GPU, which computes them; `usize::MAX` if they never do.
    pub(crate) stream_rows: usize,
    /// Experts that are copied to slots beside a step.
    pub(crate) uploads: usize,
}

impl MemoryRates {
    /// Four times the least number of rows of a step for which copies of all experts of CPU ranks take less time than the products of
    /// `cores` cores, if rows choose experts evenly; `usize::MAX` without layers. More experts on CPU ranks make both longer alike.
    pub(crate) fn stream_rows(&self, spec: &ModelSpec, cores: usize) -> usize {
        let of_layer = |moe: &MoeLayer| {
            let experts = &moe.experts;
            let bytes = gpu::Stored::routed(experts).bytes_on_cpu(spec.hidden, experts.width);
            let copy = bytes as f64 / (self.pcie * 1e9);
            let operations = 6.0 * (experts.width * spec.hidden) as f64;
            let of_row = operations / (cores.max(1) as f64 * self.core_gflops * 1e9);
            (copy / of_row * experts.count as f64 / moe.gate.top_k as f64).ceil() as usize
        };
        let even = spec.moe_layers().map(|(_, moe)| of_layer(moe)).max().unwrap_or(usize::MAX);
        expertd_tier::stream_rows_of(even)
    }
}

/// The device or copy that limits a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bound {
    Gpu,
    HostMemory,
    CpuProducts,
    Pcie,
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bound::Gpu => "the GPU",
            Bound::HostMemory => "host memory",
            Bound::CpuProducts => "products on CPUs",
            Bound::Pcie => "PCIe",
        })
    }
}

impl Layer {
    /// The time of a step in seconds, without [`FIXED`], and what it waits for, if rows choose experts evenly.
    ///
    /// GPU, CPU ranks and copies work at the same time, so the slowest counts.
    fn step(&self, group: &Group, rows: usize) -> (f64, Bound) {
        let rates = &group.rates;
        let (gpu_rate, host_rate, pcie_rate) = (rates.gpu * 1e9, rates.host * 1e9, rates.pcie * 1e9);
        let products = |operations: f64| operations / (rates.gpu_tflops * 1e12);
        let experts = self.experts as f64;
        let choices = (rows * self.top_k) as f64;
        let touched = experts * expertd_tier::touched_share(rows, self.top_k, self.experts);
        let missing = 1.0 - self.on_gpu as f64 / experts;
        let core_rate = group.cores.max(1) as f64 * rates.core_gflops * 1e9;
        // Divided steps are balanced while the service runs.
        let all_by_cpus =
            (touched * self.host_bytes / host_rate).max(choices * self.row_operations / core_rate);
        let all_copied = experts * self.host_bytes / pcie_rate;
        let share = expertd_tier::share_of(rows, group.stream_rows, all_by_cpus / all_copied);
        let come = (experts * missing * share) as usize;
        let comes = rows >= group.stream_rows || expertd_tier::pays(rows, come, self.host_bytes as usize);
        let streamed = if comes { share } else { 0.0 };
        let by_cpus = missing * (1.0 - streamed);
        let on_gpu = 1.0 - by_cpus;
        let read = (self.always_bytes + touched * on_gpu * self.gpu_bytes) / gpu_rate;
        let computed =
            products(choices * on_gpu * self.row_operations + rows as f64 * self.shared_operations);
        let copied = group.uploads as f64 + experts * missing * streamed;
        [
            (read.max(computed), Bound::Gpu),
            (touched * by_cpus * self.host_bytes / host_rate, Bound::HostMemory),
            (choices * by_cpus * self.row_operations / core_rate, Bound::CpuProducts),
            (copied * self.host_bytes / pcie_rate, Bound::Pcie),
        ]
        .into_iter()
        .fold((0.0, Bound::Gpu), |longest, part| if part.0 > longest.0 { part } else { longest })
    }
}

/// The expected time of a layer's step in words. `on_gpu` experts of each layer are in the GPU's memory.
pub(crate) fn steps(
    spec: &ModelSpec,
    products: Fp8Products,
    group: &Group,
    on_gpu: impl Fn(LayerId, &MoeLayer) -> usize,
) -> String {
    let layers: Vec<Layer> =
        spec.moe_layers().map(|(id, moe)| layer(spec, products, moe, on_gpu(id, moe))).collect();
    let mut text = String::new();
    let mut bound_before = None;
    for rows in ROWS {
        let (seconds, bound) = mean(&layers, group, rows);
        if let Some(before) = bound_before {
            text += &if before == bound { ", ".to_owned() } else { format!(" ({before}), ") };
        }
        text += &time(FIXED + Duration::from_secs_f64(seconds));
        bound_before = Some(bound);
    }
    let bound = bound_before.map_or_else(String::new, |bound| format!(" ({bound})"));
    let rows = ROWS.map(|rows| rows.to_string()).join(", ");
    format!(
        "a layer takes about {text}{bound} for {rows} rows that choose experts evenly, by memory_rates {}",
        group.rates
    )
}

/// The mean of the layers' times, and the limit of the slowest.
fn mean(layers: &[Layer], group: &Group, rows: usize) -> (f64, Bound) {
    let times = || layers.iter().map(|layer| layer.step(group, rows));
    let sum: f64 = times().map(|(seconds, _)| seconds).sum();
    let slowest = times().max_by(|a, b| a.0.total_cmp(&b.0));
    (sum / layers.len().max(1) as f64, slowest.map_or(Bound::Gpu, |(_, bound)| bound))
}

fn layer(spec: &ModelSpec, products: Fp8Products, moe: &MoeLayer, on_gpu: usize) -> Layer {
    let of = |stored: gpu::Stored, width, biases| {
        stored.on_device(products).expert_bytes(spec.hidden, width, biases) as f64
    };
    let experts = &moe.experts;
    let operations = |width: usize| 6.0 * (spec.hidden * width) as f64;
    let shared = moe.shared.as_ref();
    let gate_bytes = (moe.gate.num_experts * spec.hidden * 2) as f64;
    Layer {
        experts: experts.count,
        top_k: moe.gate.top_k,
        on_gpu: on_gpu.min(experts.count),
        gpu_bytes: of(gpu::Stored::routed(experts), experts.width, experts.biases),
        host_bytes: gpu::Stored::routed(experts).bytes_on_cpu(spec.hidden, experts.width) as f64,
        always_bytes: gate_bytes
            + shared.map_or(0.0, |shared| of(gpu::Stored::shared(shared), shared.width, shared.biases)),
        row_operations: operations(experts.width),
        shared_operations: shared.map_or(0.0, |shared| operations(shared.width)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// A layer of Qwen3-30B-A3B with `on_gpu` experts on the GPU.
    fn qwen3(on_gpu: usize) -> Layer {
        let bytes = f64::from(3 * 2048 * 768 * 2);
        Layer {
            experts: 128,
            top_k: 8,
            on_gpu,
            gpu_bytes: bytes,
            host_bytes: bytes,
            always_bytes: f64::from(128 * 2048 * 2),
            row_operations: f64::from(6 * 2048 * 768),
            shared_operations: 0.0,
        }
    }

    /// The H100 and 14 threads of docs/measurements/tiers.md.
    fn group() -> Group {
        let rates = MemoryRates { gpu: 2600.0, ..MemoryRates::default() };
        Group { rates, cores: 14, stream_rows: usize::MAX, uploads: 0 }
    }

    fn micros(layer: &Layer, group: &Group, rows: usize) -> (f64, Bound) {
        let (seconds, bound) = layer.step(group, rows);
        (seconds * 1e6 + FIXED.as_micros() as f64, bound)
    }

    /// Figures of docs/measurements/tiers.md.
    #[test]
    fn predictions_are_near_what_was_measured() {
        for (on_gpu, measured) in [
            (128, [62.0, 203.0, 467.0]),
            (96, [271.0, 1422.0, 3411.0]),
            (64, [495.0, 2585.0, 7245.0]),
            (32, [677.0, 3830.0, 10737.0]),
        ] {
            for (rows, measured) in [1, 8, 64].into_iter().zip(measured) {
                let (predicted, bound) = micros(&qwen3(on_gpu), &group(), rows);
                let error = predicted / measured;
                assert!(
                    (0.85..1.15).contains(&error),
                    "{on_gpu} on the GPU, {rows} rows: {predicted} and {measured}"
                );
                assert_eq!(bound, if on_gpu == 128 { Bound::Gpu } else { Bound::HostMemory });
            }
        }
        for (on_gpu, measured) in [(96, 47e3), (64, 89e3), (32, 132e3)] {
            let (predicted, bound) = micros(&qwen3(on_gpu), &group(), 2048);
            assert!((0.9..1.1).contains(&(predicted / measured)), "{on_gpu}: {predicted} and {measured}");
            assert_eq!(bound, Bound::CpuProducts);
        }
    }

    #[test]
    fn streaming_costs_the_copies_of_missing_experts() {
        let streams = Group { stream_rows: 512, ..group() };
        let (predicted, bound) = micros(&qwen3(64), &streams, 2048);
        // 64 experts of 9.44 MB at 55 GB/s.
        assert!((predicted - 11_011.0).abs() < 10.0 && bound == Bound::Pcie, "{predicted} {bound}");
        assert_eq!(micros(&qwen3(64), &streams, 7), micros(&qwen3(64), &group(), 7));
        // Four tenths of them, while CPU ranks read the others.
        let (divided, bound) = micros(&qwen3(64), &streams, 64);
        assert_ne!(bound, Bound::Gpu);
        assert!((4_200.0..4_400.0).contains(&divided), "{divided}");
        assert!(divided < 0.7 * micros(&qwen3(64), &group(), 64).0, "{divided}");
        assert_eq!(micros(&qwen3(128), &streams, 2048), micros(&qwen3(128), &group(), 2048));
    }

    #[test]
    fn uploads_count_where_nothing_takes_longer() {
        let uploads = |uploads| micros(&qwen3(120), &Group { uploads, ..group() }, 1);
        assert_eq!(uploads(0).1, Bound::HostMemory);
        let (predicted, bound) = uploads(4);
        assert!((predicted - 716.0).abs() < 2.0 && bound == Bound::Pcie, "{predicted} {bound}");
    }

    #[test]
    fn rates_are_read_as_they_are_shown() {
        let rates: MemoryRates = "host=120.5, pcie=26".parse().unwrap();
        assert_eq!(rates, MemoryRates { host: 120.5, pcie: 26.0, ..MemoryRates::default() });
        assert_eq!(rates.to_string().parse(), Ok(rates));
        for text in ["", "host", "host=0", "host=-1", "host=x", "disk=1", "host=inf"] {
            let error = text.parse::<MemoryRates>().unwrap_err();
            assert!(error.contains("expected"), "{text}: {error}");
        }
    }

    #[test]
    fn the_text_names_what_steps_wait_for() {
        use expertd_model::Checkpoint;
        use expertd_model::synth::{self, SynthConfig};
        let folder = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("qwen2_moe") }, folder.path()).unwrap();
        let spec = Checkpoint::open(folder.path()).unwrap().spec().clone();
        let text = |on_gpu: usize| steps(&spec, Fp8Products::NONE, &group(), |_, _| on_gpu);
        assert!(text(1).contains("µs (products on CPUs) for 1, 8, 64, 2048 rows"), "{}", text(1));
        assert!(
            text(99).contains("µs (the GPU) for") && text(99).ends_with("core-gflops=59"),
            "{}",
            text(99)
        );
    }

    #[test]
    fn more_cores_and_narrow_formats_move_the_break_even() {
        use expertd_model::Checkpoint;
        use expertd_model::synth::{self, SynthConfig, SynthFormat};
        let rows = |format, cores| {
            let folder = tempfile::tempdir().unwrap();
            let sizes = SynthConfig { experts: 128, top_k: 8, format, ..SynthConfig::new("qwen3_moe") };
            synth::write(&sizes, folder.path()).unwrap();
            let spec = Checkpoint::open(folder.path()).unwrap().spec().clone();
            MemoryRates::default().stream_rows(&spec, cores)
        };
        // 16 experts for each choice, two bytes for six operations, 14 × 59 / 55.
        assert_eq!(rows(SynthFormat::Bf16, 14), 4 * 241);
        assert_eq!(rows(SynthFormat::Bf16, 28), 4 * 481);
        // 9 of 32 bytes: four bits and an f16 scale of 32 columns for each element.
        assert_eq!(rows(SynthFormat::Int4, 14), 4 * 68);
        assert_eq!(rows(SynthFormat::Mxfp4, 14), 4 * 68);
    }
}
