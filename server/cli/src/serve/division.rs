//! The division of a mixed group's experts between its source rank and its CPU ranks.

use crate::units::bytes;
use crate::weight_bytes::{bytes_of_ranks, gpu_bytes_of_ranks};
use expertd_ipc::control::DeviceKind;
use expertd_model::{ModelSpec, MoeLayer};
use expertd_types::{ExpertPlacement, Fp8Products, LayerId, LayerPlacement, Placement, Rank};

/// How a mixed group divides experts between its source rank and its CPU ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    /// Device of the source rank.
    pub(crate) device: DeviceKind,
    /// The experts whose products are computed in FP8.
    pub(crate) products: Fp8Products,
    /// Bytes that weights may take on the source rank; `None` if `gpu-memory` is not given.
    pub(crate) budget: Option<u64>,
    /// Number of CPU ranks beside the source.
    pub(crate) workers: usize,
}

impl Division {
    /// The placement of contiguous ranges: the source has as many of each layer's first experts as its budget allows, equally many of
    /// every layer, and the CPU ranks share the others. Without a budget ranks on CPUs have equal parts.
    ///
    /// # Errors
    /// If the budget is too small, or a source on a GPU has none. The text continues the name `gpu-memory`.
    pub(crate) fn contiguous(&self, spec: &ModelSpec) -> Result<ExpertPlacement, String> {
        let &Division { device, products, budget, workers } = self;
        if let Some(budget) = budget {
            return by_memory(spec, device, products, budget, workers);
        }
        if device == DeviceKind::Cuda {
            let problem = "is not given; say how much of the GPU's memory weights may take (such as 40GiB), or which rank owns which \
                           expert (--placement)";
            return Err(problem.to_owned());
        }
        let contiguous = |moe: &MoeLayer| LayerPlacement::contiguous(moe.experts.count, workers + 1);
        let layers = spec.moe_layers().map(|(layer, moe)| (layer, contiguous(moe)));
        Ok(ExpertPlacement::new(workers + 1, layers))
    }

    /// Checks what a mixed group needs of a placement beside what every group needs.
    ///
    /// # Errors
    /// If the source owns no expert, or its weights exceed the budget.
    pub(crate) fn check(&self, spec: &ModelSpec, placement: &ExpertPlacement) -> Result<(), String> {
        let contiguous =
            |moe: &MoeLayer| Placement::new(moe.experts.count, self.workers + 1).range(Rank(0)).len();
        let held = |layer, moe: &MoeLayer| {
            placement.layer(layer).map_or_else(|| contiguous(moe), |placed| placed.experts_of(Rank(0)).len())
        };
        if spec.moe_layers().all(|(layer, moe)| held(layer, moe) == 0) {
            let problem =
                "gives rank 0 no expert of any layer; the rank that gets all rows needs at least one";
            return Err(problem.to_owned());
        }
        let needed = source_bytes(spec, self.device, self.products, held);
        match self.budget.filter(|&budget| needed > budget) {
            None => Ok(()),
            Some(budget) => Err(format!(
                "gives rank 0 {needed} bytes of weights ({}), but --gpu-memory is {budget} bytes ({}); give rank 0 fewer experts, or \
                 start the service with more --gpu-memory",
                bytes(needed),
                bytes(budget)
            )),
        }
    }
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
    let of = |resident: usize| source_bytes(spec, device, products, |_, moe| resident.min(moe.experts.count));
    let resident = (1..=spec.max_experts()).rev().find(|&resident| of(resident) <= budget);
    let resident = resident.ok_or_else(|| {
        let (given, needed) = (bytes(budget), bytes(of(1)));
        format!("is {given}, but one expert of each layer with gates and shared experts takes {needed}")
    })?;
    let layers = spec.moe_layers().map(|(layer, moe)| (layer, divide(moe.experts.count, resident, workers)));
    Ok(ExpertPlacement::new(workers + 1, layers))
}

/// Bytes of weights of a source that holds `held` experts of each layer.
fn source_bytes(
    spec: &ModelSpec,
    device: DeviceKind,
    products: Fp8Products,
    held: impl Fn(LayerId, &MoeLayer) -> usize,
) -> u64 {
    let held = |layer, moe: &MoeLayer, _| held(layer, moe);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use expertd_model::Checkpoint;
    use expertd_model::synth::{self, SynthConfig};

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
        let division =
            Division { device: DeviceKind::Cpu, products: Fp8Products::NONE, budget: None, workers: 1 };
        assert_eq!(division.check(&spec, &placement(&[7])), Ok(()));
        assert!(division.check(&spec, &placement(&[])).unwrap_err().contains("rank 0"));
        assert!(division.contiguous(&spec).is_ok());
        let on_gpu = Division { device: DeviceKind::Cuda, ..division };
        assert!(on_gpu.contiguous(&spec).unwrap_err().starts_with("is not given"));
    }

    #[test]
    fn a_placement_that_outgrows_the_budget_is_refused_with_the_sizes() {
        let spec = spec();
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let bytes_of = |resident: usize| source_bytes(&spec, device, Fp8Products::NONE, |_, _| resident);
            let budget = bytes_of(4) - 1;
            let division = Division { device, products: Fp8Products::NONE, budget: Some(budget), workers: 2 };
            let chosen = division.contiguous(&spec).unwrap();
            assert!(chosen.layers().all(|(_, placed)| placed.experts_of(Rank(0)) == [0, 1, 2]), "{device}");
            assert_eq!(division.check(&spec, &chosen), Ok(()));
            // Layers that are not listed have equal parts: three of eight experts.
            assert_eq!(division.check(&spec, &ExpertPlacement::new(3, [])), Ok(()));
            let four = spec.moe_layers().map(|(layer, _)| (layer, divide(8, 4, 2)));
            let refused = division.check(&spec, &ExpertPlacement::new(3, four)).unwrap_err();
            for part in [&bytes_of(4).to_string(), &budget.to_string(), "--gpu-memory", "fewer experts"] {
                assert!(refused.contains(part), "{part} is not in {refused}");
            }
        }
    }

    #[test]
    fn bytes_grow_by_experts_until_all_are_resident() {
        let spec = spec();
        for device in [DeviceKind::Cpu, DeviceKind::Cuda] {
            let of = |resident: usize| {
                source_bytes(&spec, device, Fp8Products::NONE, |_, moe| resident.min(moe.experts.count))
            };
            let step = of(2) - of(1);
            assert_eq!((of(8) - of(1), of(9)), (7 * step, of(8)), "{device}");
        }
    }
}
