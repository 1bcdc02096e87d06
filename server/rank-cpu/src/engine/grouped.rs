//! Received rows in the order of their experts.

use expertd_compute::experts::Assignments;
use expertd_compute::experts::cpu::CpuExpert;

use crate::exchange::ReceivedRows;
use crate::weights::{NOT_HERE, RankLayer};
use expertd_types::{ExpertId, ExpertOwners, Rank};

/// Whether `rank` of a mixed group computes the rows of an expert: it is the first one of its owners.
pub(super) fn computes(owners: &ExpertOwners, rank: Rank, id: i32) -> bool {
    let id = u32::try_from(id).ok().map(ExpertId);
    id.and_then(|id| owners.of(id)).is_some_and(|owners| owners.first() == Some(&rank))
}

/// The experts of a layer that a rank of a mixed group computes in a step.
pub(super) struct StepExperts<'a> {
    /// `[experts of the layer]`: index of each in the fields below, or [`NOT_HERE`].
    local: Vec<u32>,
    pub(super) numbers: Vec<u32>,
    pub(super) experts: Vec<&'a CpuExpert>,
}

impl<'a> StepExperts<'a> {
    /// Those that `rank` computes by the placement.
    pub(super) fn of(layer: &'a RankLayer, rank: Rank) -> Self {
        let mut all = StepExperts {
            local: vec![NOT_HERE; layer.local.len()],
            numbers: Vec::new(),
            experts: Vec::new(),
        };
        for (&expert, held) in layer.mine.iter().zip(&layer.experts) {
            if computes(&layer.owners, rank, expert as i32) {
                all.add(ExpertId(expert), held);
            }
        }
        all
    }

    /// Adds an expert of another rank.
    pub(super) fn add(&mut self, expert: ExpertId, held: &'a CpuExpert) {
        self.local[expert.index()] = self.numbers.len() as u32;
        self.numbers.push(expert.0);
        self.experts.push(held);
    }

    /// Whether the rank computes an expert in the step.
    pub(super) fn has(&self, expert: ExpertId) -> bool {
        self.local[expert.index()] != NOT_HERE
    }

    /// The indices of experts, and their number.
    pub(super) fn local(&self) -> (&[u32], usize) {
        (&self.local, self.numbers.len())
    }

    /// The id that the source of a mixed group sends to CPU ranks for a choice: -1 if it computes the expert itself, or the weight is
    /// zero, as the kernel of a source on a GPU does.
    pub(super) fn sent_id(&self, id: i32, weight: f32) -> i32 {
        if index(&self.local, id).is_some() || weight == 0.0 { -1 } else { id }
    }
}

fn index(local: &[u32], id: i32) -> Option<usize> {
    let index = *local.get(usize::try_from(id).ok()?)?;
    (index != NOT_HERE).then_some(index as usize)
}

/// Received rows in the order of their experts; see [`Assignments`].
#[derive(Default)]
pub(super) struct GroupedRows {
    offsets: Vec<u32>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl GroupedRows {
    /// Sorts the choices of the experts that this rank owns by expert, and by row within an expert. The rows of all batches count
    /// from the first row of the first batch.
    pub(super) fn fill(&mut self, layer: &RankLayer, batches: &[ReceivedRows<'_>], hidden: usize) {
        let mut next = 0;
        let firsts: Vec<usize> = batches
            .iter()
            .map(|batch| {
                let first = next;
                next += batch.rows.len() / hidden;
                first
            })
            .collect();
        let choices = batches.iter().zip(&firsts).flat_map(|(batch, &first)| {
            let choices = batch.ids.iter().zip(batch.weights).enumerate();
            choices.map(move |(i, (&id, &weight))| ((first + i / batch.k) as u32, id, weight))
        });
        self.sort(layer.mine.len(), |id| index(&layer.local, id), choices);
    }

    /// Sorts the choices of a step of a mixed group by the indices in `local` of the experts that the rank computes, which are below
    /// `count`. Ids of other experts are ignored.
    pub(super) fn fill_mixed(
        &mut self,
        (local, count): (&[u32], usize),
        ids: &[i32],
        weights: &[f32],
        k: usize,
    ) {
        let choices = ids.iter().zip(weights).enumerate();
        let choices = choices.map(|(i, (&id, &weight))| ((i / k) as u32, id, weight));
        self.sort(count, |id| index(local, id), choices);
    }

    /// Sorts `(row, expert, weight)` by the indices that `local` gives for experts, which are below `count`; `choices` is iterated twice.
    fn sort(
        &mut self,
        count: usize,
        local: impl Fn(i32) -> Option<usize>,
        choices: impl Iterator<Item = (u32, i32, f32)> + Clone,
    ) {
        self.offsets.clear();
        self.offsets.resize(count + 1, 0);
        for expert in choices.clone().filter_map(|(_, id, _)| local(id)) {
            self.offsets[expert + 1] += 1;
        }
        for expert in 0..count {
            self.offsets[expert + 1] += self.offsets[expert];
        }
        let total = self.offsets[count] as usize;
        self.rows.resize(total, 0);
        self.weights.resize(total, 0.0);
        // Each expert's offset serves as its write position, which ends at the next expert's first offset.
        for (row, id, weight) in choices {
            if let Some(expert) = local(id) {
                let at = self.offsets[expert] as usize;
                self.rows[at] = row;
                self.weights[at] = weight;
                self.offsets[expert] += 1;
            }
        }
        self.offsets.copy_within(0..count, 1);
        self.offsets[0] = 0;
    }

    /// Rows of each expert.
    pub(super) fn rows_per_expert(&self) -> impl Iterator<Item = u64> {
        self.offsets.windows(2).map(|pair| u64::from(pair[1] - pair[0]))
    }

    pub(super) fn assignments(&self) -> Assignments<'_> {
        Assignments { offsets: &self.offsets, rows: &self.rows, weights: &self.weights }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_sends_the_choices_that_other_ranks_compute() {
        let owners = [vec![Rank(0)], vec![Rank(1)], vec![Rank(0), Rank(2)], vec![Rank(1), Rank(2)]];
        let owners = ExpertOwners::new(owners);
        let mut experts = StepExperts { local: vec![NOT_HERE; 4], numbers: Vec::new(), experts: Vec::new() };
        for expert in (0..4).filter(|&expert| computes(&owners, Rank(0), expert)) {
            experts.local[expert as usize] = experts.numbers.len() as u32;
            experts.numbers.push(expert as u32);
        }
        let sent = |id, weight| experts.sent_id(id, weight);
        assert_eq!([0, 1, 2, 3].map(|id| sent(id, 0.5)), [-1, 1, -1, 3]);
        assert_eq!([0, 1, 2, 3].map(|id| sent(id, 0.0)), [-1; 4]);
        assert_eq!((sent(-1, 0.5), sent(3, f32::NAN), sent(4, 0.5)), (-1, 3, 4));
        // Each choice that is sent has one rank that computes it.
        for id in 0..4 {
            let ranks = (0..3).filter(|&rank| computes(&owners, Rank(rank), id));
            assert_eq!(ranks.count(), 1, "expert {id}");
        }
    }
}
