//! The division of a mixed group's experts by the settings, and the steps for which all experts come to the GPU.

use super::PlanError;
use super::machine::Machine;
use super::values::{derive, value};
use crate::serve::division::Division;
use crate::serve::settings::Given;
use expertd_ipc::control::DeviceKind;
use expertd_model::ModelSpec;
use expertd_types::ExpertPlacement;

/// The division that the settings ask for; `None` in groups that are not mixed.
pub(super) fn division(given: &Given, machine: &Machine) -> Option<Division> {
    machine.is_mixed().then(|| Division {
        device: machine.device,
        products: machine.fp8_products,
        budget: given.gpu_memory.0.map(|budget| budget.0.saturating_sub(slot_bytes(given))),
        workers: (machine.ranks - machine.sources) as usize,
    })
}

/// The placement of a mixed group without a file.
///
/// # Errors
/// If `gpu-memory` is missing or too small.
pub(super) fn choose(spec: &ModelSpec, division: &Division) -> Result<ExpertPlacement, PlanError> {
    division.contiguous(spec).map_err(|problem| value("gpu-memory", problem))
}

/// The part of `gpu-memory` for copies of experts of CPU ranks that change between steps.
pub(super) fn slot_bytes(given: &Given) -> u64 {
    given.slot_memory.0.map_or(0, |memory| memory.0)
}

/// Rate at which copy engines bring weights to a GPU, in bytes per second, and products of bf16 weights of one thread of a CPU rank, in
/// operations per second, where steps of many rows were measured (docs/measurements/tiers.md).
const COPY_RATE: f64 = 55e9;
const THREAD_RATE: f64 = 59e9;

/// Least number of rows of a step for which the source computes the experts of CPU ranks, too; `usize::MAX` if it never does.
pub(super) fn stream_rows(given: &mut Given, spec: &ModelSpec, machine: &Machine) -> usize {
    if !machine.is_mixed() {
        return usize::MAX;
    }
    let threads: usize = machine.shares.iter().skip(machine.sources as usize).map(Vec::len).sum();
    let threads = threads.clamp(1, machine.usable_cores.max(1));
    let (rows, why) = match machine.device {
        DeviceKind::Cuda => {
            (break_even(spec, threads), "where copies at 55 GB/s take less time than the CPUs")
        }
        DeviceKind::Cpu => (0, "rank 0 is on a CPU, too"),
    };
    match derive(&mut given.stream_rows, rows, why) {
        0 => usize::MAX,
        rows => rows,
    }
}

/// Number of rows from which the products of an expert with its rows take `threads` threads longer than a copy of the expert, if rows choose
/// experts evenly. More experts on CPU ranks make both longer alike.
fn break_even(spec: &ModelSpec, threads: usize) -> usize {
    let of_layer = spec.moe_layers().map(|(_, moe)| {
        let experts = &moe.experts;
        let operations = 6.0 * (experts.width * spec.hidden) as f64;
        let copy = experts.bytes as f64 / COPY_RATE;
        let of_row =
            operations / (THREAD_RATE * threads as f64) * moe.gate.top_k as f64 / experts.count as f64;
        (copy / of_row).ceil() as usize
    });
    of_layer.max().unwrap_or(1).max(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use expertd_model::Checkpoint;
    use expertd_model::synth::{self, SynthConfig, SynthFormat};

    #[test]
    fn more_threads_and_fewer_bytes_move_the_break_even() {
        let rows = |format, threads| {
            let folder = tempfile::tempdir().unwrap();
            let sizes = SynthConfig { experts: 128, top_k: 8, format, ..SynthConfig::new("qwen3_moe") };
            synth::write(&sizes, folder.path()).unwrap();
            break_even(Checkpoint::open(folder.path()).unwrap().spec(), threads)
        };
        // 16 experts for each choice, two bytes for six operations, 14 × 59 / 55.
        assert_eq!(rows(SynthFormat::Bf16, 14), 241);
        assert_eq!(rows(SynthFormat::Bf16, 28), 481);
        assert!(rows(SynthFormat::Fp8, 14) < 150);
    }
}
