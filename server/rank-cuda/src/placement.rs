//! Which rank computes a row by a placement, in the form in which kernels look it up.

use expertd_kernels::copies::CopyTables;
use expertd_model::ModelSpec;
use expertd_rank::share::ExpertShare;
use expertd_types::{LayerId, Rank};

/// The tables of a share's placement; `None` if the kernels compute the owners of experts: without a placement, and in a group of one
/// rank, which owns all experts in any case.
#[must_use]
pub fn copy_tables(spec: &ModelSpec, share: &ExpertShare) -> Option<CopyTables> {
    if !share.has_placement() || share.ranks == 1 {
        return None;
    }
    let of = |(layer, moe): (u32, &Option<_>)| {
        let Some(moe) = moe else { return Vec::new() };
        let owned = share.layer(LayerId(layer), moe);
        (0..share.ranks as u32).map(|rank| owned.experts_of(Rank(rank)).to_vec()).collect()
    };
    Some(CopyTables::new((0..).zip(&spec.layers).map(of).collect()))
}

/// The tables of the experts that the source of a mixed group holds. Its kernels see a group of it alone.
#[must_use]
pub fn resident_tables(spec: &ModelSpec, share: &ExpertShare) -> CopyTables {
    let of = |(layer, moe): (u32, &Option<_>)| match moe {
        Some(moe) => vec![share.experts(LayerId(layer), moe)],
        None => Vec::new(),
    };
    CopyTables::new((0..).zip(&spec.layers).map(of).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use expertd_kernels::params::{MAX_EXPERTS, MAX_RANKS};
    use expertd_model::synth::{self, SynthConfig};
    use expertd_model::{Checkpoint, LayerChoice};
    use expertd_types::{ExpertId, ExpertPlacement, LayerPlacement};

    use super::*;

    fn spec() -> ModelSpec {
        let folder = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig { layers: 2, ..SynthConfig::new("mixtral") }, folder.path()).unwrap();
        Checkpoint::open_layers(folder.path(), LayerChoice::All).unwrap().spec().clone()
    }

    fn share(placement: Option<ExpertPlacement>, ranks: usize) -> ExpertShare {
        ExpertShare::of_rank(Rank(0), ranks, placement)
    }

    #[test]
    fn without_a_placement_or_with_one_rank_owners_are_computed() {
        let spec = spec();
        assert_eq!(copy_tables(&spec, &share(None, 3)), None);
        assert_eq!(copy_tables(&spec, &share(Some(ExpertPlacement::new(1, [])), 1)), None);
    }

    #[test]
    fn a_source_has_its_own_experts_only() {
        let placed = LayerPlacement::new(vec![vec![6, 1], vec![0, 2, 3, 4, 5, 7]]);
        let share = share(Some(ExpertPlacement::new(2, [(LayerId(1), placed)])), 2);
        let tables = resident_tables(&spec(), &share);
        // Layer 0 is not placed: the source has its first half.
        assert_eq!((tables.per_rank(), tables.local_ids(0)), (4, vec![0, 1, 2, 3, 1, 6, 0, 0]));
        let resident = tables.resident(0);
        assert_eq!(resident[MAX_EXPERTS..][..8], [0xffff, 0, 0xffff, 0xffff, 0xffff, 0xffff, 1, 0xffff]);
    }

    /// Layer 1 is placed with copies; layer 0 keeps contiguous ranges, but its rows are looked up, too.
    #[test]
    fn the_tables_send_rows_where_cpu_ranks_send_them() {
        let spec = spec();
        let placed = LayerPlacement::new(vec![vec![7, 0, 3], vec![0, 1, 2, 4, 5], vec![3, 6, 0]]);
        let placement = ExpertPlacement::new(3, [(LayerId(1), placed)]);
        let share = share(Some(placement), 3);
        let tables = copy_tables(&spec, &share).unwrap();
        assert_eq!(tables.per_rank(), 5);
        for (layer, moe) in spec.moe_layers() {
            let owners = share.layer(layer, moe).owners(moe.experts.count);
            let of_layer = &tables.copies()[layer.0 as usize * MAX_EXPERTS * MAX_RANKS..];
            for expert in 0..moe.experts.count {
                let entries = &of_layer[expert * MAX_RANKS..][..MAX_RANKS];
                for row in 0..7 {
                    // As `physical_of` in common.cuh.
                    let entry = entries[row % (entries[0] >> 16) as usize];
                    let rank = Rank((entry & 0xffff) / tables.per_rank());
                    assert_eq!(owners.for_row(ExpertId(expert as u32), row), Some(rank));
                    let ids = tables.local_ids(rank.index());
                    let local = layer.0 * tables.per_rank() + (entry & 0xffff) % tables.per_rank();
                    assert_eq!(ids[local as usize], expert as u32);
                }
            }
        }
    }
}
