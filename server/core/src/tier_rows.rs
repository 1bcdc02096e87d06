//! Where the rows of a mixed group were computed, by the counts of its ranks and the placement of the time.

use std::collections::BTreeMap;

use expertd_ipc::RowCounts;
use expertd_types::LayerId;

/// Rows of a layer's experts in a mixed group since the service started: one for each token and chosen expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierRows {
    /// Of experts that the source rank owns.
    pub source: u64,
    /// Of experts of CPU ranks of which the source had a copy, in a slot or for a large or divided step.
    pub copied: u64,
    /// Computed by CPU ranks.
    pub cpu: u64,
}

impl TierRows {
    /// Share of all rows that CPU ranks computed; `None` without rows.
    #[must_use]
    pub fn cpu_share(&self) -> Option<f64> {
        share(self.cpu, self.source + self.copied + self.cpu)
    }

    /// Share of the rows of CPU ranks' experts that found a copy; `None` without such rows.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        share(self.copied, self.copied + self.cpu)
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

impl std::iter::Sum for TierRows {
    fn sum<I: Iterator<Item = TierRows>>(rows: I) -> TierRows {
        rows.fold(TierRows::default(), |sum, rows| TierRows {
            source: sum.source + rows.source,
            copied: sum.copied + rows.copied,
            cpu: sum.cpu + rows.cpu,
        })
    }
}

/// What an operator sees of a mixed group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierStatus {
    /// Of each layer, ascending.
    pub layers: Vec<(LayerId, TierRows)>,
    /// Bytes of weights that the source has copied from host memory.
    pub copied_bytes: u64,
}

/// Takes the growth of the ranks' counts apart. A placement must be accounted for before it changes.
#[derive(Debug, Default)]
pub(crate) struct TierCounts {
    layers: BTreeMap<LayerId, Layer>,
}

#[derive(Debug, Default)]
struct Layer {
    /// `[experts]`: the source's counts at the last look.
    source: Vec<u64>,
    /// Counts of all CPU ranks at the last look.
    cpu: u64,
    rows: TierRows,
}

impl TierCounts {
    /// Adds what ranks have counted since the last call. `experts`: the number of experts of each layer; `owned`: those of the source by
    /// the placement of the time, as layer, first expert and count.
    pub(crate) fn update(
        &mut self,
        counts: &RowCounts,
        experts: impl Iterator<Item = (LayerId, usize)>,
        owned: &[(LayerId, u32, u32)],
    ) -> Vec<(LayerId, TierRows)> {
        let rows = experts.map(|(id, experts)| {
            let layer = self.layers.entry(id).or_default();
            layer.source.resize(experts, 0);
            let mut ranks = counts.layer(id.index(), experts).into_iter();
            let now = ranks.next().unwrap_or_default();
            let cpu = ranks.flatten().sum();
            let mut is_owned = vec![false; experts];
            for &(_, first, count) in owned.iter().filter(|(of, ..)| *of == id) {
                is_owned[first as usize..][..count as usize].fill(true);
            }
            for ((now, before), is_owned) in now.iter().zip(&layer.source).zip(is_owned) {
                let rows = if is_owned { &mut layer.rows.source } else { &mut layer.rows.copied };
                *rows += now.saturating_sub(*before);
            }
            layer.rows.cpu += u64::saturating_sub(cpu, layer.cpu);
            (layer.source, layer.cpu) = (now, cpu);
            (id, layer.rows)
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use expertd_ipc::RowCountsShape;
    use expertd_types::Rank;

    use super::*;

    #[test]
    fn rows_count_by_the_placement_of_their_time() {
        const LAYER: LayerId = LayerId(3);
        let shape = RowCountsShape { ranks: 3, layers: 4, experts: 3 };
        let counts = RowCounts::create(shape).expect("memory for the counts");
        let mut tier = TierCounts::default();
        let mut update = |owned| tier.update(&counts, [(LAYER, 3)].into_iter(), &[(LAYER, owned, 1)]);
        // Expert 0 lies on the source, expert 1 has a copy there.
        for (rank, expert, rows) in [(0, 0, 5), (0, 1, 7), (1, 1, 11), (2, 2, 13)] {
            counts.add(Rank(rank), LAYER.index(), expert, rows);
        }
        let first = TierRows { source: 5, copied: 7, cpu: 24 };
        assert_eq!(update(0), [(LAYER, first)]);
        assert_eq!((first.cpu_share(), first.hit_rate()), (Some(24.0 / 36.0), Some(7.0 / 31.0)));
        assert_eq!((TierRows::default().cpu_share(), TierRows::default().hit_rate()), (None, None));
        // Earlier rows of expert 1 stay those of a copy when the source comes to own it.
        counts.add(Rank(0), LAYER.index(), 0, 1);
        counts.add(Rank(0), LAYER.index(), 1, 2);
        counts.add(Rank(2), LAYER.index(), 1, 4);
        assert_eq!(update(1), [(LAYER, TierRows { source: 7, copied: 8, cpu: 28 })]);
    }
}
