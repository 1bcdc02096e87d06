//! The division of a mixed group's experts by the settings, and the steps for which all experts come to the GPU.

use super::PlanError;
use super::machine::Machine;
use super::values::{derive, value};
use crate::serve::division::Division;
use crate::serve::settings::Given;
use crate::units::bytes;
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
pub(super) fn choose(
    given: &Given,
    spec: &ModelSpec,
    division: &Division,
) -> Result<ExpertPlacement, PlanError> {
    division.contiguous(spec).map_err(|problem| match slot_bytes(given) {
        0 => value("gpu-memory", problem),
        slots => value("gpu-memory", format!("without slot-memory ({}) {problem}", bytes(slots))),
    })
}

/// The part of `gpu-memory` for copies of experts of CPU ranks that change between steps.
pub(super) fn slot_bytes(given: &Given) -> u64 {
    given.slot_memory.0.map_or(0, |memory| memory.0)
}

/// Least number of rows of a step for which the source computes all experts of CPU ranks, too; `usize::MAX` if it never computes any.
pub(super) fn stream_rows(given: &mut Given, spec: &ModelSpec, machine: &Machine) -> usize {
    if !machine.is_mixed() {
        return usize::MAX;
    }
    let cores: usize = machine.shares.iter().skip(machine.sources as usize).map(Vec::len).sum();
    let cores = cores.clamp(1, machine.usable_cores.max(1));
    let rates = given.memory_rates.0.unwrap_or_default();
    let (rows, why) = match machine.device {
        DeviceKind::Cuda => {
            let rows = rates.stream_rows(spec, cores);
            (rows, "four times where copies of experts take less time than the CPUs, by memory-rates")
        }
        DeviceKind::Cpu => (0, "rank 0 is on a CPU, too"),
    };
    match derive(&mut given.stream_rows, rows, why) {
        0 => usize::MAX,
        rows => rows,
    }
}
