//! What every generation of a service has in common.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use expertd_ipc::control::{DeviceKind, Fp8Compute, RankSetup};
use expertd_ipc::{GroupShape, SharedRegion};
use expertd_types::{LayerRange, Rank};

/// Makes the windows of the generation that a rank is set up for.
pub type MakeWindows = fn(&RankSetup) -> Result<Arc<SharedRegion>, String>;

/// What every generation of a service has in common.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// Shared sizes.
    pub shape: GroupShape,
    /// Makes the windows of a generation that the router creates and its ranks inherit; `None` where ranks make their own.
    pub windows: Option<MakeWindows>,
    /// The ranks' device.
    pub device: DeviceKind,
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// The layers that ranks load.
    pub layers: LayerRange,
    /// How the products of FP8 experts are computed on GPUs.
    pub fp8_compute: Fp8Compute,
    /// Cores of each rank.
    pub cores: Vec<Vec<usize>>,
    /// How many of them may be busy all the time; less than all where a container's quota allows less.
    pub usable_cores: usize,
    /// How long ranks and the router spin before they sleep; see [`SPIN_TIME`](expertd_ipc::wait::SPIN_TIME).
    pub spin: Duration,
    /// How long a rank waits for its peers within a step.
    pub peer_timeout: Duration,
    /// A rank that shows no life for this long is given up.
    pub liveness_timeout: Duration,
    /// A step that takes longer is given up.
    pub step_timeout: Duration,
    /// Environment that ranks need beside the router's.
    pub environment: Vec<(String, String)>,
}

impl ClusterConfig {
    /// Threads of a rank: one for each of its cores, or its part of what the quota allows, at least one.
    #[must_use]
    pub fn threads(&self, rank: Rank) -> usize {
        let all: usize = self.cores.iter().map(Vec::len).sum();
        part(self.cores[rank.index()].len(), all, self.usable_cores)
    }
}

/// What `cores` of `all` cores come to where only `usable` may be busy.
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
