//! The assignment of experts to ranks.

mod contiguous;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use self::contiguous::Placement;
use crate::{ExpertId, LayerId, Rank};

/// Why a placement cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum PlacementError {
    #[error(
        "the placement is not valid JSON of the form {{\"ranks\": 2, \"layers\": [{{\"layer\": 0, \"experts\": [[0], [1]]}}]}}: {0}"
    )]
    Syntax(String),
    #[error(
        "the placement is for {found} ranks, but the service has {expected}; make one with `expertd rebalance`"
    )]
    Ranks { found: usize, expected: usize },
    #[error("layer {layer} of the placement lists the experts of {found} ranks, expected {expected}")]
    LayerRanks { layer: LayerId, found: usize, expected: usize },
    #[error("layer {0} occurs twice in the placement")]
    LayerTwice(LayerId),
    #[error("layer {0} of the placement is no MoE layer that this service holds; remove it")]
    NoLayer(LayerId),
    #[error(
        "layer {layer}: rank {rank} owns expert {expert} by the placement, but experts are numbered below {experts}"
    )]
    NoExpert { layer: LayerId, rank: Rank, expert: u32, experts: usize },
    #[error("layer {layer}: rank {rank} lists expert {expert} twice; a second copy must be on another rank")]
    Twice { layer: LayerId, rank: Rank, expert: u32 },
    #[error("layer {layer}: no rank owns expert {expert} by the placement; every expert needs at least one")]
    Missing { layer: LayerId, expert: u32 },
}

/// The experts that each rank owns in one layer. An expert may have copies on several ranks, and ranks may own different numbers of
/// experts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LayerPlacement {
    /// `[ranks]`: experts of each rank, ascending.
    experts: Vec<Vec<u32>>,
}

impl LayerPlacement {
    /// A placement that gives each rank the listed experts, in any order.
    #[must_use]
    pub fn new(mut experts: Vec<Vec<u32>>) -> Self {
        experts.iter_mut().for_each(|experts| experts.sort_unstable());
        LayerPlacement { experts }
    }

    /// Contiguous ranges in rank order; see [`Placement`].
    #[must_use]
    pub fn contiguous(num_experts: usize, ranks: usize) -> Self {
        let placement = Placement::new(num_experts, ranks);
        LayerPlacement {
            experts: (0..ranks as u32).map(|rank| placement.range(Rank(rank)).collect()).collect(),
        }
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.experts.len()
    }

    /// The experts that a rank owns, ascending; none if there is no such rank.
    pub fn experts_of(&self, rank: Rank) -> &[u32] {
        self.experts.get(rank.index()).map_or(&[], Vec::as_slice)
    }

    /// The experts of which a rank is the first owner, ascending.
    #[must_use]
    pub fn first_owned_by(&self, rank: Rank) -> Vec<u32> {
        let earlier = self.experts.get(..rank.index()).unwrap_or_default();
        let is_first = |expert: &&u32| earlier.iter().all(|experts| experts.binary_search(expert).is_err());
        self.experts_of(rank).iter().filter(is_first).copied().collect()
    }

    /// Number of copies of all experts, all ranks together.
    pub fn copies(&self) -> usize {
        self.experts.iter().map(Vec::len).sum()
    }

    /// The experts that a rank owns as ranges of consecutive ones: first expert and count.
    pub fn ranges_of(&self, rank: Rank) -> Vec<(u32, u32)> {
        let runs = self.experts_of(rank).chunk_by(|a, b| a + 1 == *b);
        runs.map(|run| (run[0], run.len() as u32)).collect()
    }

    /// Checks that every one of `num_experts` experts has an owner and no rank lists an expert twice.
    ///
    /// # Errors
    /// The first expert that is missing, unknown or listed twice.
    pub fn check(&self, layer: LayerId, num_experts: usize) -> Result<(), PlacementError> {
        let mut owned = vec![false; num_experts];
        for (rank, experts) in (0..).map(Rank).zip(&self.experts) {
            for &expert in experts {
                match owned.get_mut(expert as usize) {
                    Some(owned) => *owned = true,
                    None => {
                        return Err(PlacementError::NoExpert { layer, rank, expert, experts: num_experts });
                    }
                }
            }
            if let Some(pair) = experts.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(PlacementError::Twice { layer, rank, expert: pair[0] });
            }
        }
        match owned.iter().position(|owned| !owned) {
            Some(expert) => Err(PlacementError::Missing { layer, expert: expert as u32 }),
            None => Ok(()),
        }
    }

    /// The ranks that own each of `num_experts` experts.
    #[must_use]
    pub fn owners(&self, num_experts: usize) -> ExpertOwners {
        let mut owners = vec![Vec::new(); num_experts];
        for (rank, experts) in (0..).map(Rank).zip(&self.experts) {
            for &expert in experts {
                if let Some(owners) = owners.get_mut(expert as usize) {
                    owners.push(rank);
                }
            }
        }
        ExpertOwners::new(owners)
    }
}

/// The ranks that own each expert of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertOwners {
    /// `[experts + 1]`: index of each expert's first owner in `ranks`.
    first: Vec<u32>,
    /// Owners of all experts, each expert's in ascending order.
    ranks: Vec<Rank>,
}

impl ExpertOwners {
    /// `owners[e]` are the ranks that own expert `e`.
    #[must_use]
    pub fn new(owners: impl IntoIterator<Item = Vec<Rank>>) -> Self {
        let (mut first, mut ranks) = (vec![0], Vec::new());
        for owners in owners {
            ranks.extend(owners);
            first.push(ranks.len() as u32);
        }
        ExpertOwners { first, ranks }
    }

    /// One owner for each expert.
    #[must_use]
    pub fn single(owners: impl IntoIterator<Item = Rank>) -> Self {
        Self::new(owners.into_iter().map(|rank| vec![rank]))
    }

    /// Number of experts.
    pub const fn len(&self) -> usize {
        self.first.len() - 1
    }

    /// Whether there are no experts.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ranks that own an expert, ascending; `None` if there is no such expert.
    pub fn of(&self, expert: ExpertId) -> Option<&[Rank]> {
        let end = *self.first.get(expert.index() + 1)? as usize;
        Some(&self.ranks[self.first[expert.index()] as usize..end])
    }

    /// The rank whose copy of an expert computes a row: consecutive rows use the copies in turn. `None` if there is no such expert,
    /// or it has no owner.
    pub fn for_row(&self, expert: ExpertId, row: usize) -> Option<Rank> {
        match self.of(expert)? {
            [] => None,
            [rank] => Some(*rank),
            ranks => Some(ranks[row % ranks.len()]),
        }
    }
}

/// A placement of the experts of a model's layers. Layers that it does not list have contiguous ranges.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertPlacement {
    /// Number of ranks.
    ranks: usize,
    /// The layers, in any order.
    layers: Vec<PlacedLayer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlacedLayer {
    layer: LayerId,
    experts: LayerPlacement,
}

impl ExpertPlacement {
    /// A placement of these layers.
    #[must_use]
    pub fn new(ranks: usize, layers: impl IntoIterator<Item = (LayerId, LayerPlacement)>) -> Self {
        let layers = layers.into_iter().map(|(layer, experts)| PlacedLayer { layer, experts });
        ExpertPlacement { ranks, layers: layers.collect() }
    }

    /// Reads a placement from JSON. [`check`](Self::check) compares it with a model.
    ///
    /// # Errors
    /// If the text is not a placement.
    pub fn from_json(text: &str) -> Result<Self, PlacementError> {
        let mut read: ExpertPlacement =
            serde_json::from_str(text).map_err(|error| PlacementError::Syntax(error.to_string()))?;
        for layer in &mut read.layers {
            layer.experts = LayerPlacement::new(std::mem::take(&mut layer.experts.experts));
        }
        Ok(read)
    }

    /// Number of ranks.
    pub const fn ranks(&self) -> usize {
        self.ranks
    }

    /// The listed layers.
    pub fn layers(&self) -> impl Iterator<Item = (LayerId, &LayerPlacement)> {
        self.layers.iter().map(|placed| (placed.layer, &placed.experts))
    }

    /// The placement of a layer, if it is listed.
    pub fn layer(&self, layer: LayerId) -> Option<&LayerPlacement> {
        self.layers().find(|(listed, _)| *listed == layer).map(|(_, placement)| placement)
    }

    /// Whether `rank` owns every expert of a listed layer, whoever else owns some of them. Layers that are not listed are not whole.
    pub fn is_whole(&self, layer: LayerId, rank: Rank) -> bool {
        let owns =
            |placed: &LayerPlacement, expert: &u32| placed.experts_of(rank).binary_search(expert).is_ok();
        self.layer(layer)
            .is_some_and(|placed| placed.experts.iter().flatten().all(|expert| owns(placed, expert)))
    }

    /// Checks that the placement is for `ranks` ranks and for MoE layers of a model, given with their numbers of experts, and that
    /// every expert of a listed layer has an owner.
    ///
    /// # Errors
    /// The first contradiction.
    pub fn check(&self, ranks: usize, model: &BTreeMap<LayerId, usize>) -> Result<(), PlacementError> {
        if self.ranks != ranks {
            return Err(PlacementError::Ranks { found: self.ranks, expected: ranks });
        }
        let mut listed = BTreeSet::new();
        for (layer, placement) in self.layers() {
            if !listed.insert(layer) {
                return Err(PlacementError::LayerTwice(layer));
            }
            if placement.ranks() != ranks {
                return Err(PlacementError::LayerRanks { layer, found: placement.ranks(), expected: ranks });
            }
            placement.check(layer, *model.get(&layer).ok_or(PlacementError::NoLayer(layer))?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn model() -> BTreeMap<LayerId, usize> {
        BTreeMap::from([(LayerId(1), 3), (LayerId(2), 2)])
    }

    fn check(text: &str) -> Result<(), String> {
        ExpertPlacement::from_json(text)
            .and_then(|placement| placement.check(2, &model()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_placement_that_cannot_be_used_says_why() {
        assert_eq!(check(r#"{"ranks": 2, "layers": [{"layer": 1, "experts": [[2, 0], [1, 0]]}]}"#), Ok(()));
        assert_eq!(check(r#"{"ranks": 2, "layers": []}"#), Ok(()));
        let cases = [
            (r#"{"ranks": 2}"#, "missing field `layers`"),
            (r#"{"ranks": 2, "layers": [], "more": 1}"#, "unknown field `more`"),
            (r#"{"ranks": 4, "layers": []}"#, "is for 4 ranks, but the service has 2"),
            (
                r#"{"ranks": 2, "layers": [{"layer": 0, "experts": [[], []]}]}"#,
                "layer 0 of the placement is no MoE layer",
            ),
            (r#"{"ranks": 2, "layers": [{"layer": 2, "experts": [[0, 1]]}]}"#, "of 1 ranks, expected 2"),
            (r#"{"ranks": 2, "layers": [{"layer": 2, "experts": [[0], [2]]}]}"#, "rank 1 owns expert 2"),
            (
                r#"{"ranks": 2, "layers": [{"layer": 2, "experts": [[0, 0], [1]]}]}"#,
                "rank 0 lists expert 0 twice",
            ),
            (r#"{"ranks": 2, "layers": [{"layer": 2, "experts": [[0], []]}]}"#, "no rank owns expert 1"),
            (
                r#"{"ranks": 2, "layers": [{"layer": 2, "experts": [[0], [1]]}, {"layer": 2, "experts": [[0], [1]]}]}"#,
                "layer 2 occurs twice",
            ),
        ];
        for (text, expected) in cases {
            let error = check(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn rows_use_the_copies_in_turn() {
        let placement = LayerPlacement::new(vec![vec![2, 0], vec![1, 0], vec![0]]);
        assert_eq!(placement.experts_of(Rank(0)), [0, 2]);
        assert_eq!((placement.copies(), placement.ranges_of(Rank(1))), (5, vec![(0, 2)]));
        assert_eq!(placement.ranges_of(Rank(0)), [(0, 1), (2, 1)]);
        let owners = placement.owners(3);
        assert_eq!(owners.of(ExpertId(0)).unwrap(), [Rank(0), Rank(1), Rank(2)]);
        let ranks: Vec<u32> = (0..5).map(|row| owners.for_row(ExpertId(0), row).unwrap().0).collect();
        assert_eq!(ranks, [0, 1, 2, 0, 1]);
        assert_eq!((owners.for_row(ExpertId(2), 9), owners.for_row(ExpertId(3), 0)), (Some(Rank(0)), None));
        assert_eq!(placement.check(LayerId(0), 3), Ok(()));
    }

    #[test]
    fn a_layer_is_whole_where_all_of_its_experts_are() {
        let placed = |experts: &[&[u32]]| LayerPlacement::new(experts.iter().map(|of| of.to_vec()).collect());
        let layers = [placed(&[&[1, 0, 2], &[]]), placed(&[&[0, 2, 1], &[1]]), placed(&[&[0, 2], &[1]])];
        let placement = ExpertPlacement::new(2, (0..).map(LayerId).zip(layers));
        let whole = |layer, rank| placement.is_whole(LayerId(layer), Rank(rank));
        assert_eq!([whole(0, 0), whole(1, 0), whole(2, 0), whole(3, 0)], [true, true, false, false]);
        assert!(!whole(0, 1) && !whole(1, 1));
    }

    #[test]
    fn json_is_read_as_it_is_written() {
        let contiguous = LayerPlacement::contiguous(5, 2);
        assert_eq!(contiguous.experts_of(Rank(1)), [3, 4]);
        let placement = ExpertPlacement::new(2, [(LayerId(7), contiguous.clone())]);
        let text = serde_json::to_string(&placement).unwrap();
        assert_eq!(text, r#"{"ranks":2,"layers":[{"layer":7,"experts":[[0,1,2],[3,4]]}]}"#);
        let read = ExpertPlacement::from_json(&text).unwrap();
        assert_eq!((read.layer(LayerId(7)), read.layer(LayerId(8))), (Some(&contiguous), None));
    }
}
