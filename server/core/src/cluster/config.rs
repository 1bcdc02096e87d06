//! Configuration that all generations of a service share.

use std::sync::Arc;
use std::time::Duration;

use expertd_ipc::GroupShape;
use expertd_ipc::control::{CheckpointSource, DeviceKind, RankSetup};
use expertd_shm::SharedRegion;
use expertd_types::{ExpertPlacement, Fp8Products, LayerId, Rank};

/// Interval at which heartbeats and step deadlines are checked.
pub(super) const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Creates the windows of the generation that a rank is set up for.
pub type MakeWindows = fn(&RankSetup) -> Result<Arc<SharedRegion>, String>;

/// Configuration that all generations of a service share.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Shared sizes.
    pub shape: GroupShape,
    /// Creates in the router the windows of a generation, or the wire of a mixed group; `None` if ranks make their own.
    pub windows: Option<MakeWindows>,
    /// `[ranks]`: their devices.
    pub devices: Vec<DeviceKind>,
    /// The GPUs of the GPU ranks, which are the first ones, as indices among the GPUs that the process may use.
    pub gpus: Vec<u32>,
    /// Description of the model, with which that of a checkpoint to reload is compared.
    pub description: serde_json::Value,
    /// The checkpoint that the first generation serves.
    pub checkpoint: CheckpointSource,
    /// Host memory that packed weights may take, two versions of them together, in bytes; `None` if only the machine limits it.
    pub max_weight_bytes: Option<u64>,
    /// The experts whose products are computed in FP8.
    pub fp8_products: Fp8Products,
    /// Cores of each rank.
    pub cores: Vec<Vec<usize>>,
    /// Cores that may be busy all the time; fewer than all if a container's quota allows less.
    pub usable_cores: usize,
    /// Time that ranks and the router spin before they sleep; see [`SPIN_TIME`](expertd_shm::wait::SPIN_TIME).
    pub spin: Duration,
    /// Longest wait of a rank for its peers within a step; in a mixed group ranks wait for each other for `step_timeout`.
    pub peer_timeout: Duration,
    /// A rank without a heartbeat for this long is a fault.
    pub liveness_timeout: Duration,
    /// A generation whose ranks are not ready for this long is a fault.
    pub forming_timeout: Duration,
    /// A step that takes longer is a fault.
    pub step_timeout: Duration,
    /// In a mixed group: least number of rows of a step for which the source computes all experts of CPU ranks, too.
    pub stream_rows: usize,
    /// In a mixed group: memory of the source's device for copies of experts of CPU ranks that change between steps, in bytes.
    pub slot_bytes: u64,
    /// Environment variables that ranks get in addition to the router's.
    pub environment: Vec<(String, String)>,
}

impl ClusterConfig {
    /// Interval of the signs of life of ranks and loaders.
    pub fn heartbeat(&self) -> Duration {
        (self.liveness_timeout / 10).min(CHECK_INTERVAL)
    }

    /// Checks in a row without a sign of life after which a process is given up.
    pub fn silent_checks(&self) -> u32 {
        self.liveness_timeout.div_duration_f64(CHECK_INTERVAL).ceil().max(2.0) as u32
    }

    /// The device of source ranks.
    #[must_use]
    pub fn device(&self) -> DeviceKind {
        self.devices.first().copied().unwrap_or(DeviceKind::Cpu)
    }

    /// The ranks that run steps of a layer by `placement`: in a mixed group the source alone if it has all of the layer's experts.
    #[must_use]
    pub fn ranks_of(&self, layer: LayerId, placement: Option<&ExpertPlacement>) -> usize {
        let whole = self.shape.is_mixed() && placement.is_some_and(|placed| placed.is_whole(layer, Rank(0)));
        (if whole { self.shape.sources } else { self.shape.ranks }) as usize
    }

    /// Threads of a rank: one for each of its cores, or its share of the quota if that is less; at least one.
    pub fn threads(&self, rank: Rank) -> usize {
        let all: usize = self.cores.iter().map(Vec::len).sum();
        part(self.cores[rank.index()].len(), all, self.usable_cores)
    }

    /// Cores of a rank's loader: the rank's own, on whose NUMA node a CPU rank's weights must lie. A GPU rank of a mixed group has one or
    /// two cores, and most of the weights: its loader may use all cores.
    pub fn loader_cores(&self, rank: Rank) -> Vec<usize> {
        if !self.shares_all_cores(rank) {
            return self.cores[rank.index()].clone();
        }
        let mut all = self.cores.concat();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Threads of a rank's loader: those of the rank, or where that has few cores an even part of all.
    pub fn loader_threads(&self, rank: Rank) -> usize {
        let even = self.usable_cores.div_ceil(self.cores.len().max(1));
        if self.shares_all_cores(rank) { even.max(self.threads(rank)) } else { self.threads(rank) }
    }

    fn shares_all_cores(&self, rank: Rank) -> bool {
        self.shape.is_mixed() && self.devices[rank.index()] == DeviceKind::Cuda
    }
}

/// Share of `usable` cores that belongs to `cores` of `all` cores.
fn part(cores: usize, all: usize, usable: usize) -> usize {
    (cores * usable.min(all)).div_ceil(all.max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::part;

    #[test]
    fn a_quota_leaves_each_rank_its_part() {
        assert_eq!((part(4, 8, 8), part(5, 13, 13)), (4, 5));
        assert_eq!((part(32, 64, 8), part(16, 64, 8), part(16, 64, 2)), (4, 2, 1));
        // More ranks than cores: shares overlap.
        assert_eq!((part(1, 3, 2), part(0, 0, 1)), (1, 1));
    }
}
