//! The tables in which kernels look up a placement: the physical experts of each expert, and back.
//!
//! A physical expert is a copy of an expert on a rank. Physical expert `rank * per_rank + i` is the `i`-th expert of `rank`, where
//! `per_rank` is the largest number of experts that any rank owns in any layer; numbers past a rank's last expert stay unused.

use crate::params::{AWAY, MAX_EXPERTS, MAX_RANKS};

/// Number of low bits of an entry that hold the physical expert; see `step.h`.
pub(crate) const PHYSICAL_BITS: u32 = 16;

/// The tables of a placement, the same on every rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyTables {
    per_rank: u32,
    copies: Vec<u32>,
    layers: Vec<Vec<Vec<u32>>>,
}

impl CopyTables {
    /// `layers[l][r]` are the experts of rank `r` in layer `l`, ascending. A layer without MoE has none.
    ///
    /// # Panics
    /// If there are more ranks or higher experts than the kernels support. A placement is checked before it reaches a rank.
    #[must_use]
    pub fn new(layers: Vec<Vec<Vec<u32>>>) -> Self {
        let per_rank = layers.iter().flatten().map(Vec::len).max().unwrap_or(0) as u32;
        let mut copies = vec![0; layers.len() * MAX_EXPERTS * MAX_RANKS];
        for (ranks, table) in layers.iter().zip(copies.chunks_exact_mut(MAX_EXPERTS * MAX_RANKS)) {
            assert!(ranks.len() <= MAX_RANKS, "{} ranks, expected at most {MAX_RANKS}", ranks.len());
            let mut counts = [0_usize; MAX_EXPERTS];
            for (rank, experts) in (0..).zip(ranks) {
                for (index, &expert) in (0..).zip(experts) {
                    let count = &mut counts[expert as usize];
                    table[expert as usize * MAX_RANKS + *count] = rank * per_rank + index;
                    *count += 1;
                }
            }
            for (entries, count) in table.chunks_exact_mut(MAX_RANKS).zip(counts) {
                entries[..count].iter_mut().for_each(|entry| *entry |= (count as u32) << PHYSICAL_BITS);
            }
        }
        CopyTables { per_rank, copies, layers }
    }

    /// Number of physical experts of each rank.
    #[must_use]
    pub const fn per_rank(&self) -> u32 {
        self.per_rank
    }

    /// `[layers, MAX_EXPERTS, MAX_RANKS]`, see `Group::copies` in `step.h`.
    #[must_use]
    pub fn copies(&self) -> &[u32] {
        &self.copies
    }

    /// `[layers, per_rank]`: the expert of each of a rank's physical experts; 0 for unused ones.
    #[must_use]
    pub fn local_ids(&self, rank: usize) -> Vec<u32> {
        let of_layer = |ranks: &Vec<Vec<u32>>| {
            let mut ids = ranks.get(rank).cloned().unwrap_or_default();
            ids.resize(self.per_rank as usize, 0);
            ids
        };
        self.layers.iter().flat_map(of_layer).collect()
    }
}

impl CopyTables {
    /// `[layers, MAX_EXPERTS]`: the index of each expert among a rank's, or [`AWAY`]; see `TierParams::resident` in `step.h`.
    #[must_use]
    pub fn resident(&self, rank: usize) -> Vec<u32> {
        let of_layer = |ranks: &Vec<Vec<u32>>| {
            let mut indices = [AWAY; MAX_EXPERTS];
            for (index, &expert) in (0..).zip(ranks.get(rank).into_iter().flatten()) {
                indices[expert as usize] = index;
            }
            indices
        };
        self.layers.iter().flat_map(of_layer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_listed_by_rank_and_found_again() {
        let placed = vec![vec![1, 2], vec![0], vec![1, 3, 4]];
        let tables = CopyTables::new(vec![vec![], placed.clone()]);
        assert_eq!(tables.per_rank(), 3);
        let (none, table) = tables.copies().split_at(MAX_EXPERTS * MAX_RANKS);
        assert!(none.iter().all(|entry| *entry == 0));
        let mut found = vec![Vec::new(); 5];
        for (entries, found) in table.chunks_exact(MAX_RANKS).zip(&mut found) {
            let count = entries[0] >> PHYSICAL_BITS;
            for entry in &entries[..count as usize] {
                assert_eq!(entry >> PHYSICAL_BITS, count);
                found.push(entry & 0xffff);
            }
            assert!(entries[count as usize..].iter().all(|entry| *entry == 0));
        }
        assert_eq!(found, [vec![3], vec![0, 6], vec![1], vec![7], vec![8]]);
        assert_eq!(tables.local_ids(0), [0, 0, 0, 1, 2, 0]);
        assert_eq!(tables.local_ids(2), [0, 0, 0, 1, 3, 4]);
        let resident = tables.resident(2);
        assert_eq!(resident[MAX_EXPERTS..][..6], [AWAY, 0, AWAY, 1, 2, AWAY]);
        assert!(resident[..MAX_EXPERTS].iter().all(|index| *index == AWAY));
    }
}
