//! The cache with what surrounds it on every source rank: a clock, the limits of copies, and the rows that ranks count.

use std::time::Instant;

use expertd_ipc::RowCounts;
use expertd_types::{LayerId, Sequence};

use super::{LayerSlots, Policy, SlotCache, SlotError, SlotIndex, Upload};

/// Limits of copies, at a time for a layer and in bytes per second, because they share the bandwidth of host memory with CPU ranks.
const POLICY: Policy = Policy { max_uploads_per_step: 4, bytes_per_second: 16_000_000_000 };

/// A [`SlotCache`] that takes the use of experts from the counts of all ranks.
#[derive(Debug)]
pub struct SlotDriver {
    cache: SlotCache,
    row_counts: RowCounts,
    /// `[layers with slots]`.
    counted: Vec<Counted>,
    begun: Instant,
}

/// What ranks have counted of a layer up to the last look.
#[derive(Debug)]
struct Counted {
    layer: LayerId,
    /// `[experts]`: rows of all ranks.
    rows: Vec<u64>,
}

impl SlotDriver {
    /// A driver of empty slots. What ranks have counted before, in earlier generations and of earlier weights, says which experts get them
    /// first.
    #[must_use]
    pub fn new(layers: Vec<LayerSlots>, row_counts: RowCounts) -> SlotDriver {
        let counted = layers.iter().map(|LayerSlots { layer, experts, .. }| Counted {
            layer: *layer,
            rows: total(&row_counts, *layer, *experts),
        });
        let counted: Vec<Counted> = counted.collect();
        let mut cache = SlotCache::new(layers, POLICY);
        counted.iter().for_each(|counted| cache.seed(counted.layer, &counted.rows));
        SlotDriver { cache, row_counts, counted, begun: Instant::now() }
    }

    /// See [`SlotCache::resident`].
    #[must_use]
    pub fn resident(&self, layer: LayerId) -> &[Option<SlotIndex>] {
        self.cache.resident(layer)
    }

    /// See [`SlotCache::version`].
    #[must_use]
    pub fn version(&self, layer: LayerId) -> u64 {
        self.cache.version(layer)
    }

    /// See [`SlotCache::launched`].
    ///
    /// # Errors
    /// As there.
    pub fn launched(&mut self, layer: LayerId, step: Sequence) -> Result<(), SlotError> {
        self.cache.launched(layer, step)
    }

    /// See [`SlotCache::ended`].
    pub fn ended(&mut self, step: Sequence) {
        self.cache.ended(step);
    }

    /// See [`SlotCache::loaded`].
    ///
    /// # Errors
    /// As there.
    pub fn loaded(&mut self, upload: Upload) -> Result<(), SlotError> {
        self.cache.loaded(upload)
    }

    /// See [`SlotCache::failed`].
    ///
    /// # Errors
    /// As there.
    pub fn failed(&mut self, upload: Upload) -> Result<(), SlotError> {
        self.cache.failed(upload)
    }

    /// A step of `layer` has completed: the rows that ranks have counted since the last call are its use of experts, if it `counts`. What
    /// a CPU rank counts late counts for the next step.
    pub fn observe(&mut self, layer: LayerId, counts: bool) {
        let Some(counted) = self.counted.iter_mut().find(|counted| counted.layer == layer) else { return };
        let now = total(&self.row_counts, layer, counted.rows.len());
        if counts {
            let rows = now.iter().zip(&counted.rows);
            let rows: Vec<u32> = rows
                .map(|(now, before)| u32::try_from(now.saturating_sub(*before)).unwrap_or(u32::MAX))
                .collect();
            self.cache.observe(layer, &rows);
        }
        counted.rows = now;
    }

    /// The uploads of `layer` to begin now; see [`SlotCache::propose`].
    pub fn propose(&mut self, layer: LayerId) -> Vec<Upload> {
        self.cache.propose(layer, self.begun.elapsed()).to_vec()
    }
}

/// `[experts]`: rows of a layer's experts, all ranks together.
fn total(counts: &RowCounts, layer: LayerId, experts: usize) -> Vec<u64> {
    let mut sums = vec![0; experts];
    for rank in counts.layer(layer.index(), experts) {
        sums.iter_mut().zip(rank).for_each(|(sum, rows)| *sum += rows);
    }
    sums
}

#[cfg(test)]
mod tests {
    use expertd_ipc::RowCountsShape;
    use expertd_types::{ExpertId, Rank};

    use super::*;

    const LAYER: LayerId = LayerId(2);

    fn driver(counts: &RowCounts) -> SlotDriver {
        let on_cpus = (1..8).map(ExpertId).collect();
        let layer = LayerSlots { layer: LAYER, experts: 8, on_cpus, slots: 2, expert_bytes: 1000 };
        SlotDriver::new(vec![layer], counts.clone())
    }

    fn proposed(driver: &mut SlotDriver) -> Vec<u32> {
        let mut uploads = driver.propose(LAYER);
        uploads.sort_by_key(|upload| upload.expert);
        for upload in &uploads {
            driver.loaded(*upload).expect("an upload in progress");
        }
        uploads.iter().map(|upload| upload.expert.0).collect()
    }

    #[test]
    fn slots_fill_with_what_was_counted_before_and_follow_what_ranks_count() {
        let shape = RowCountsShape { ranks: 3, layers: 3, experts: 8 };
        let counts = RowCounts::create(shape).expect("memory for the counts");
        let mut empty = driver(&counts);
        empty.observe(LAYER, true);
        assert!(proposed(&mut empty).is_empty(), "no expert was used");
        for (rank, expert, rows) in [(0, 0, 900), (1, 3, 50), (2, 6, 70), (1, 5, 10), (0, 5, 20)] {
            counts.add(Rank(rank), LAYER.index(), expert, rows);
        }
        let mut warm = driver(&counts);
        // The first step has used none of these.
        warm.observe(LAYER, true);
        assert_eq!(proposed(&mut warm), [3, 6]);
        assert_eq!(warm.version(LAYER), 2);
        // A step for which all experts came to the source says nothing about slots.
        counts.add(Rank(0), LAYER.index(), 7, 100);
        warm.observe(LAYER, false);
        assert!(proposed(&mut warm).is_empty());
        counts.add(Rank(1), LAYER.index(), 1, 100);
        warm.observe(LAYER, true);
        assert_eq!(proposed(&mut warm), [1]);
        assert!(warm.resident(LAYER)[1].is_some() && warm.version(LAYER) == 4);
    }
}
