//! The default placement of experts.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{ExpertId, Rank};

/// The placement of a layer's experts: contiguous ranges in rank order. The first `num_experts % ranks` ranks own one
/// expert more than the others; with fewer experts than ranks, the last ranks own none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    num_experts: u32,
    ranks: u32,
}

impl Placement {
    /// Distributes `num_experts` experts over `ranks` ranks.
    ///
    /// # Panics
    /// If `ranks` is zero or a number does not fit in 32 bits.
    #[must_use]
    pub fn new(num_experts: usize, ranks: usize) -> Self {
        assert!(ranks > 0, "an EP group has at least one rank");
        Self {
            num_experts: u32::try_from(num_experts).expect("an expert index fits in 32 bits"),
            ranks: u32::try_from(ranks).expect("a rank fits in 32 bits"),
        }
    }

    /// Number of experts placed.
    pub const fn num_experts(&self) -> usize {
        self.num_experts as usize
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks as usize
    }

    /// The experts that `rank` owns.
    #[must_use]
    pub const fn range(&self, rank: Rank) -> Range<u32> {
        let (share, extra) = (self.num_experts / self.ranks, self.num_experts % self.ranks);
        let longer = if rank.0 < extra { rank.0 } else { extra };
        let start = rank.0 * share + longer;
        start..start + share + (rank.0 < extra) as u32
    }

    /// The rank that owns `expert`, which must lie in `0..num_experts`.
    pub const fn owner(&self, expert: ExpertId) -> Rank {
        let (share, extra) = (self.num_experts / self.ranks, self.num_experts % self.ranks);
        let longer = extra * (share + 1);
        if expert.0 < longer {
            Rank(expert.0 / (share + 1))
        } else {
            Rank(extra + (expert.0 - longer) / share)
        }
    }

    /// The largest number of experts that one rank owns.
    pub const fn max_per_rank(&self) -> usize {
        self.num_experts.div_ceil(self.ranks) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_expert_once_and_agree_with_owner() {
        for experts in 0..40 {
            for ranks in 1..12 {
                let placement = Placement::new(experts, ranks);
                let mut next = 0;
                for rank in 0..ranks as u32 {
                    let range = placement.range(Rank(rank));
                    assert_eq!(range.start, next, "{experts} experts, {ranks} ranks, rank {rank}");
                    assert!(range.len() <= placement.max_per_rank());
                    next = range.end;
                    for expert in range {
                        assert_eq!(placement.owner(ExpertId(expert)), Rank(rank), "{experts}/{ranks}");
                    }
                }
                assert_eq!(next as usize, experts);
            }
        }
    }

    #[test]
    fn the_first_ranks_own_one_more() {
        let placement = Placement::new(10, 4);
        let lengths: Vec<usize> = (0..4).map(|r| placement.range(Rank(r)).len()).collect();
        assert_eq!(lengths, [3, 3, 2, 2]);
        let few = Placement::new(2, 4);
        assert_eq!(few.range(Rank(3)), 2..2);
    }
}
