//! The experts of a CPU rank, for the source of its group, which copies them to a device.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{RankWeights, WeightsError, map};
use expertd_compute::experts::cpu::CpuExpert;
use expertd_ipc::SealedMemory;
use expertd_types::{Fp8Products, LayerId, Rank, WeightFingerprint};

/// The packed experts of a CPU rank, mapped.
pub struct HeldExperts(RankWeights);

impl HeldExperts {
    /// Maps what a loader has packed for `rank` of `ranks`, of which `sources` get rows.
    ///
    /// # Errors
    /// If the memory holds something else.
    pub fn map(
        fd: OwnedFd,
        rank: Rank,
        (ranks, sources): (usize, usize),
        fingerprint: &WeightFingerprint,
    ) -> Result<Self, WeightsError> {
        map(fd, rank, (ranks, sources), fingerprint, Fp8Products::NONE).map(HeldExperts)
    }

    /// The memory in which all matrices lie.
    #[must_use]
    pub const fn memory(&self) -> &Arc<SealedMemory> {
        &self.0.memory
    }

    /// The rank's experts of a layer.
    pub fn experts(&self, layer: LayerId) -> impl Iterator<Item = (u32, &CpuExpert)> {
        let layer = self.0.layers.get(layer.index()).and_then(Option::as_ref);
        layer.into_iter().flat_map(|layer| layer.mine.iter().copied().zip(&layer.experts))
    }
}
