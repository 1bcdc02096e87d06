//! The GPUs of ranks: which one each rank uses, and what a machine's GPUs and its NCCL can do.

use serde::{Deserialize, Serialize};

use expertd_types::Rank;

/// Compute capability that the kernels are built for.
const CAPABILITY: (i32, i32) = (9, 0);
/// The compute capability that the kernels are built for, as messages name it.
pub const CAPABILITY_NEEDED: &str = "compute capability 9.0 (Hopper)";
/// What to do about a GPU with another compute capability.
pub const CAPABILITY_WAY_OUT: &str = "hide it with CUDA_VISIBLE_DEVICES, or use --device cpu";
/// Oldest NCCL with which several ranks can share a GPU: major and minor version.
const SHARING_NCCL: (u32, u32) = (2, 30);
/// The NCCL with which several ranks can share a GPU, as messages name it.
pub const SHARING_NEEDED: &str = "NCCL 2.30 or newer for several ranks on one GPU (--share-gpu, for tests)";
/// What to do if NCCL is missing or too old for several ranks on one GPU.
pub const SHARING_WAY_OUT: &str =
    "point EXPERTD_NCCL at such a libnccl.so.2, or give each rank a GPU of its own";

/// Whether several ranks share a GPU. `gpus` has each rank's GPU.
#[must_use]
pub fn is_shared(gpus: &[u32]) -> bool {
    gpus.iter().enumerate().any(|(at, gpu)| gpus[..at].contains(gpu))
}

/// A rank's GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankGpu {
    /// Its index among the GPUs that the process may use.
    pub index: u32,
    /// Number of ranks that use it, at least 1.
    pub ranks: u32,
}

impl RankGpu {
    /// The GPU of `rank`; `gpus` has each rank's GPU.
    ///
    /// # Errors
    /// If `gpus` has no entry for the rank.
    pub fn of(rank: Rank, gpus: &[u32]) -> Result<Self, String> {
        let found = gpus.len();
        let index = *gpus
            .get(rank.index())
            .ok_or_else(|| format!("rank {rank} has no GPU in the router's list of {found} GPUs"))?;
        let ranks = gpus.iter().filter(|gpu| **gpu == index).count() as u32;
        Ok(RankGpu { index, ranks })
    }
}

/// A GPU that this process may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Its name.
    pub name: String,
    /// Its compute capability: major and minor version.
    pub capability: (i32, i32),
}

impl GpuFacts {
    /// Whether the kernels run on it.
    #[must_use]
    pub fn is_supported(&self) -> bool {
        self.capability == CAPABILITY
    }

    /// What is wrong with an unsupported GPU, and what to do.
    #[must_use]
    pub fn refusal(&self, index: u32) -> String {
        let (major, minor) = self.capability;
        format!(
            "GPU {index} ({}) has compute capability {major}.{minor}, needed: {CAPABILITY_NEEDED}; {CAPABILITY_WAY_OUT}",
            self.name
        )
    }
}

/// The NCCL that ranks would load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclFacts {
    /// Major, minor and patch version.
    pub version: (u32, u32, u32),
    /// The path or name, and its source.
    pub origin: String,
}

impl NcclFacts {
    /// Whether several ranks can share a GPU with it.
    #[must_use]
    pub fn can_share(&self) -> bool {
        let (major, minor, _) = self.version;
        (major, minor) >= SHARING_NCCL
    }
}

impl std::fmt::Display for NcclFacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor, patch) = self.version;
        write!(f, "NCCL {major}.{minor}.{patch} from {}", self.origin)
    }
}

/// What decides whether ranks can run on this machine's GPUs. Only another process than the router can ask for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inventory {
    /// The GPUs that this process may use, in CUDA's order.
    pub gpus: Vec<GpuFacts>,
    /// The NCCL that ranks would load, or why there is none.
    pub nccl: Result<NcclFacts, String>,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_knows_its_gpu_and_how_many_share_it() {
        let gpus = [1, 0, 1, 1];
        assert_eq!(RankGpu::of(Rank(0), &gpus), Ok(RankGpu { index: 1, ranks: 3 }));
        assert_eq!(RankGpu::of(Rank(1), &gpus), Ok(RankGpu { index: 0, ranks: 1 }));
        assert!(RankGpu::of(Rank(4), &gpus).unwrap_err().contains("rank 4"));
        assert!(is_shared(&gpus) && !is_shared(&[2, 0, 1]) && !is_shared(&[]));
    }

    #[test]
    fn a_gpu_is_shared_from_nccl_2_30_on() {
        let can = |version| NcclFacts { version, origin: String::new() }.can_share();
        assert!(!can((2, 28, 9)) && !can((2, 29, 7)) && !can((1, 99, 0)));
        assert!(can((2, 30, 0)) && can((2, 30, 7)) && can((2, 32, 3)) && can((3, 0, 0)));
    }

    #[test]
    fn only_hopper_is_supported() {
        let of = |capability| GpuFacts { name: "A card".into(), capability };
        assert!(of((9, 0)).is_supported() && !of((8, 0)).is_supported() && !of((10, 0)).is_supported());
        let refusal = of((8, 9)).refusal(3);
        for part in ["GPU 3 (A card)", "8.9", "9.0 (Hopper)", "--device cpu"] {
            assert!(refusal.contains(part), "{part} is not in {refusal}");
        }
    }
}
