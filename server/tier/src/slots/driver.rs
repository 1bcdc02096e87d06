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
    /// A driver of empty slots.
    #[must_use]
    pub fn new(layers: Vec<LayerSlots>, row_counts: RowCounts) -> SlotDriver {
        let counted = layers.iter().map(|LayerSlots { layer, experts, .. }| Counted {
            layer: *layer,
            rows: total(&row_counts, *layer, *experts),
        });
        let counted = counted.collect();
        SlotDriver { cache: SlotCache::new(layers, POLICY), row_counts, counted, begun: Instant::now() }
    }

    /// See [`SlotCache::resident`].
    #[must_use]
    pub fn resident(&self, layer: LayerId) -> &[Option<SlotIndex>] {
        self.cache.resident(layer)
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
