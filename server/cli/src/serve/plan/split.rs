//! The division of a mixed group's experts by the settings.

use super::PlanError;
use super::machine::Machine;
use super::values::value;
use crate::serve::division::Division;
use crate::serve::settings::Given;
use expertd_model::ModelSpec;
use expertd_types::ExpertPlacement;

/// The division that the settings ask for; `None` in groups that are not mixed.
pub(super) fn division(given: &Given, machine: &Machine) -> Option<Division> {
    machine.is_mixed().then(|| Division {
        device: machine.device,
        products: machine.fp8_products,
        budget: given.gpu_memory.0.map(|budget| budget.0),
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
