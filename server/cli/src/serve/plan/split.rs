//! The division of a mixed group's experts between its source rank and its CPU ranks.

use super::PlanError;
use super::machine::Machine;
use super::values::value;
use crate::serve::settings::Given;
use crate::units::bytes;
use crate::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_ipc::control::DeviceKind;
use expertd_model::{ModelSpec, MoeLayer};
use expertd_types::{ExpertPlacement, Fp8Products, LayerPlacement, Placement, Rank};

/// Divides the experts by `gpu-memory`: the source has as many of each layer's first experts as fit, equally many of every layer, and the
/// CPU ranks share the others.
///
/// # Errors
/// If the setting is missing or too small.
pub(super) fn choose(
    given: &Given,
    spec: &ModelSpec,
    machine: &Machine,
) -> Result<ExpertPlacement, PlanError> {
    let workers = (machine.ranks - machine.sources) as usize;
    let Some(budget) = given.gpu_memory.0 else {
        if machine.device == DeviceKind::Cpu {
            let contiguous = |moe: &MoeLayer| LayerPlacement::contiguous(moe.experts.count, workers + 1);
            let layers = spec.moe_layers().map(|(layer, moe)| (layer, contiguous(moe)));
            return Ok(ExpertPlacement::new(workers + 1, layers));
        }
        return Err(value(
            "gpu-memory",
            "is not given; say how much of the GPU's memory weights may take (such as 40GiB), or which rank owns which expert (--placement)",
        ));
    };
    by_memory(spec, machine.device, machine.fp8_products, budget.0, workers)
        .map_err(|problem| value("gpu-memory", problem))
}

/// The placement by which the source's weights take at most `budget` bytes.
///
/// # Errors
/// If they cannot.
pub(crate) fn by_memory(
    spec: &ModelSpec,
    device: DeviceKind,
    products: Fp8Products,
    budget: u64,
    workers: usize,
) -> Result<ExpertPlacement, String> {
    let of = |resident| source_bytes(spec, device, products, resident);
    let resident = (1..=spec.max_experts()).rev().find(|&resident| of(resident) <= budget);
    let resident = resident.ok_or_else(|| {
        let (given, needed) = (bytes(budget), bytes(of(1)));
        format!("is {given}, but one expert of each layer with gates and shared experts takes {needed}")
    })?;
    let layers = spec.moe_layers().map(|(layer, moe)| (layer, divide(moe.experts.count, resident, workers)));
    Ok(ExpertPlacement::new(workers + 1, layers))
}

/// Bytes of weights of a source that has up to `resident` experts of each layer.
fn source_bytes(spec: &ModelSpec, device: DeviceKind, products: Fp8Products, resident: usize) -> u64 {
    let held = |_, moe: &MoeLayer, _| resident.min(moe.experts.count);
    let of_ranks = match device {
        DeviceKind::Cpu => bytes_of_ranks(spec, 1, 1, held),
        DeviceKind::Cuda => gpu_bytes_of_ranks(spec, products, 1, held),
    };
    of_ranks.iter().sum()
}

/// The first `resident` experts for the source, the others in contiguous ranges for the CPU ranks.
fn divide(experts: usize, resident: usize, workers: usize) -> LayerPlacement {
    let resident = resident.min(experts);
    let others = Placement::new(experts - resident, workers);
    let first = resident as u32;
    let of_worker = |worker| others.range(Rank(worker)).map(|expert| first + expert).collect();
    let source = std::iter::once((0..first).collect());
    LayerPlacement::new(source.chain((0..workers as u32).map(of_worker)).collect())
}

/// Checks what a mixed group needs of a placement beside what every group needs.
///
/// # Errors
/// If the source owns no expert.
pub(super) fn check(placement: &ExpertPlacement, spec: &ModelSpec) -> Result<(), String> {
    let owns = |layer| placement.layer(layer).is_none_or(|placed| !placed.experts_of(Rank(0)).is_empty());
    if spec.moe_layers().any(|(layer, _)| owns(layer)) {
        return Ok(());
    }
    Err("gives rank 0 no expert of any layer; the rank that gets all rows needs at least one".to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use expertd_model::Checkpoint;
    use expertd_model::synth::{self, SynthConfig};
    use expertd_types::LayerId;

    fn spec() -> ModelSpec {
        let folder = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new("mixtral"), folder.path()).unwrap();
        Checkpoint::open(folder.path()).unwrap().spec().clone()
    }

    #[test]
    fn the_first_experts_are_the_sources_and_the_others_are_shared() {
        let placed = divide(8, 3, 2);
        let owned = [0, 1, 2].map(|rank| placed.experts_of(Rank(rank)).to_vec());
        assert_eq!(owned, [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7]]);
        assert_eq!(divide(8, 9, 2).experts_of(Rank(0)).len(), 8);
        assert_eq!(divide(2, 1, 3).experts_of(Rank(3)), [0_u32; 0]);
        for (experts, resident, workers) in [(8, 3, 2), (8, 8, 1), (8, 1, 7), (3, 2, 4)] {
            divide(experts, resident, workers).check(LayerId(0), experts).unwrap();
        }
    }

    #[test]
    fn a_source_without_experts_is_refused() {
        let spec = spec();
        let of =
            |experts: &[u32], others: &[u32]| LayerPlacement::new(vec![experts.to_vec(), others.to_vec()]);
        let all: Vec<u32> = (0..8).collect();
        let placement = |first: &[u32]| {
            ExpertPlacement::new(2, spec.moe_layers().map(|(layer, _)| (layer, of(first, &all))))
        };
        assert_eq!(check(&placement(&[7]), &spec), Ok(()));
        assert!(check(&placement(&[]), &spec).unwrap_err().contains("rank 0"));
    }

    #[test]
    fn bytes_grow_by_experts_until_all_are_resident() {
        let spec = spec();
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let of = |resident| source_bytes(&spec, device, Fp8Products::NONE, resident);
            let step = of(2) - of(1);
            assert_eq!((of(8) - of(1), of(9)), (7 * step, of(8)), "{device}");
        }
    }
}
