//! The GPUs of ranks: which one each rank uses, and what a machine's GPUs and its NCCL can do.

use serde::{Deserialize, Serialize};

use expertd_kernels::path::KernelPath;
use expertd_types::{GpuPath, Rank};

/// Compute capability of the GPUs that have kernels of their own.
const HOPPER: (i32, i32) = (9, 0);
/// Oldest compute capability that the portable kernels run on.
const OLDEST: (i32, i32) = (8, 0);
/// The compute capabilities that the kernels run on, as messages name them.
pub const CAPABILITY_NEEDED: &str = "compute capability 8.0 (Ampere) or newer";
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
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
}

impl GpuFacts {
    /// The kernels that ranks run on it; `None` if none do.
    #[must_use]
    pub fn kernels(&self, path: GpuPath) -> Option<KernelPath> {
        if self.capability < OLDEST {
            None
        } else if self.capability == HOPPER && path == GpuPath::Auto {
            Some(KernelPath::Hopper)
        } else {
            Some(KernelPath::Portable)
        }
    }

    /// Whether the driver compiles the kernels of ranks on it from PTX.
    #[must_use]
    pub fn needs_ptx(&self, path: GpuPath) -> bool {
        self.kernels(path) == Some(KernelPath::Portable) && self.capability.0 != OLDEST.0
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
    /// `[gpus, gpus]`: whether the first can load and store the memory of the second; true for a GPU and itself.
    pub peers: Vec<Vec<bool>>,
    /// The NCCL that ranks would load, or why there is none.
    pub nccl: Result<NcclFacts, String>,
}

impl Inventory {
    /// Why ranks on these GPUs cannot form a group; `None` if they can. Whether each of them is supported is not asked.
    #[must_use]
    pub fn apart(&self, gpus: &[u32], path: GpuPath) -> Option<String> {
        let facts = |gpu: u32| self.gpus.get(gpu as usize);
        let reaches = |from: u32, to: u32| self.peers.get(from as usize)?.get(to as usize).copied();
        let pairs = gpus.iter().enumerate().flat_map(|(at, &a)| gpus[..at].iter().map(move |&b| (b, a)));
        pairs.into_iter().find_map(|(a, b)| {
            let (one, other) = (facts(a)?, facts(b)?);
            if one.kernels(path) != other.kernels(path) {
                return Some(format!(
                    "GPU {a} ({}) and GPU {b} ({}) run different kernels",
                    one.name, other.name
                ));
            }
            if one.multiprocessors != other.multiprocessors {
                return Some(format!(
                    "GPU {a} ({}) has {} multiprocessors and GPU {b} ({}) has {}",
                    one.name, one.multiprocessors, other.name, other.multiprocessors
                ));
            }
            let (from, to) =
                [(a, b), (b, a)].into_iter().find(|&(from, to)| reaches(from, to) != Some(true))?;
            Some(format!("GPU {from} has no peer access to GPU {to}"))
        })
    }

    /// The GPUs that ranks use by default: the longest of the groups that begin with one supported GPU each and take every later one that
    /// fits those before it; the first of equally long ones. Empty if no GPU is supported.
    #[must_use]
    pub fn group(&self, path: GpuPath) -> Vec<u32> {
        let runs = |gpu: &u32| self.gpus[*gpu as usize].kernels(path).is_some();
        let supported: Vec<u32> = (0..self.gpus.len() as u32).filter(runs).collect();
        let mut longest = Vec::new();
        for at in 0..supported.len() {
            let mut group = Vec::new();
            for &gpu in &supported[at..] {
                group.push(gpu);
                if self.apart(&group, path).is_some() {
                    group.pop();
                }
            }
            if group.len() > longest.len() {
                longest = group;
            }
        }
        longest
    }
}

/// Why the driver cannot compile the build's PTX; `None` if it can. `nvcc` is the release that made the PTX, `driver` the newest CUDA that
/// the driver supports.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn ptx_refusal(nvcc: &str, driver: (i32, i32)) -> Option<String> {
    let (major, minor) = nvcc.split_once('.')?;
    let made = (major.parse().ok()?, minor.parse().ok()?);
    (driver < made).then(|| {
        format!(
            "the driver supports CUDA {}.{}, and its compiler does not read the PTX of nvcc {nvcc}, which this GPU's kernels are made \
             from; install a newer driver, or build with nvcc {}.{} or older",
            driver.0, driver.1, driver.0, driver.1
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn card(capability: (i32, i32), multiprocessors: u32) -> GpuFacts {
        GpuFacts { name: "A card".into(), capability, multiprocessors }
    }

    fn inventory(gpus: &[((i32, i32), u32)], reaches: impl Fn(usize, usize) -> bool) -> Inventory {
        let count = gpus.len();
        let peers = (0..count).map(|from| (0..count).map(|to| from == to || reaches(from, to)).collect());
        Inventory {
            gpus: gpus
                .iter()
                .map(|&(capability, multiprocessors)| card(capability, multiprocessors))
                .collect(),
            peers: peers.collect(),
            nccl: Err("none".into()),
        }
    }

    #[test]
    fn a_group_has_equal_gpus_that_reach_each_other() {
        let auto = GpuPath::Auto;
        let (h100, l40s, turing) = (((9, 0), 132), ((8, 9), 142), ((7, 5), 40));
        let (all, none) = (|_, _| true, |_, _| false);
        assert_eq!(inventory(&[h100; 4], all).group(auto), [0, 1, 2, 3]);
        assert_eq!(inventory(&[l40s, l40s], none).group(auto), [0], "two GeForce cards serve with one rank");
        assert_eq!(inventory(&[h100, l40s], all).group(auto), [0]);
        assert_eq!(inventory(&[h100, l40s], all).group(GpuPath::Portable), [0]);
        assert_eq!(inventory(&[h100, l40s, l40s], all).group(auto), [1, 2]);
        assert_eq!(inventory(&[turing, h100, turing, h100], all).group(auto), [1, 3]);
        assert_eq!(inventory(&[turing], all).group(auto), Vec::<u32>::new());
        // Two pairs, each over a bridge of its own; then a GPU that others reach but that does not reach them.
        assert_eq!(inventory(&[h100; 4], |a, b| a / 2 == b / 2).group(auto), [0, 1]);
        assert_eq!(inventory(&[h100; 3], |from, _| from != 0).group(auto), [1, 2]);
    }

    #[test]
    fn what_keeps_gpus_apart_is_named() {
        let (h100, l40s) = (((9, 0), 132), ((8, 9), 142));
        let of = |gpus: &[((i32, i32), u32)], list: &[u32], path| {
            inventory(gpus, |from, to| (from, to) != (1, 0)).apart(list, path).unwrap_or_default()
        };
        let apart = of(&[h100, l40s], &[0, 1], GpuPath::Auto);
        assert!(apart.contains("different kernels"), "{apart}");
        let apart = of(&[h100, l40s], &[0, 1], GpuPath::Portable);
        assert!(apart.contains("132 multiprocessors") && apart.contains("142"), "{apart}");
        assert_eq!(of(&[h100; 3], &[2, 0, 1], GpuPath::Auto), "GPU 1 has no peer access to GPU 0");
        assert_eq!(of(&[h100; 3], &[2, 1, 2, 2], GpuPath::Auto), "");
    }

    #[test]
    fn ptx_needs_a_driver_as_new_as_the_compiler() {
        assert!(
            !card((9, 0), 132).needs_ptx(GpuPath::Auto) && card((9, 0), 132).needs_ptx(GpuPath::Portable)
        );
        let needs = |capability| card(capability, 1).needs_ptx(GpuPath::Auto);
        assert!(!needs((8, 0)) && !needs((8, 6)) && !needs((8, 9)) && !needs((7, 5)));
        assert!(needs((10, 0)) && needs((12, 0)));
        assert_eq!(ptx_refusal("13.0", (13, 0)), None);
        assert_eq!(ptx_refusal("12.8", (13, 0)), None);
        let refused = ptx_refusal("13.1", (13, 0)).unwrap();
        assert!(refused.contains("CUDA 13.0") && refused.contains("nvcc 13.1"), "{refused}");
    }

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
    fn the_kernels_follow_from_the_card_and_the_setting() {
        let of = |capability| card(capability, 132);
        let portable = Some(KernelPath::Portable);
        assert_eq!(of((9, 0)).kernels(GpuPath::Auto), Some(KernelPath::Hopper));
        assert_eq!(of((9, 0)).kernels(GpuPath::Portable), portable);
        for capability in [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)] {
            assert_eq!(of(capability).kernels(GpuPath::Auto), portable, "{capability:?}");
        }
        assert_eq!(of((7, 5)).kernels(GpuPath::Portable), None);
        let refusal = of((7, 5)).refusal(3);
        for part in ["GPU 3 (A card)", "7.5", "8.0 (Ampere)", "--device cpu"] {
            assert!(refusal.contains(part), "{part} is not in {refusal}");
        }
    }
}
