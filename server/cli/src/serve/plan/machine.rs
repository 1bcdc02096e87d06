//! The processors and devices that a service uses.

use std::time::Duration;

use super::PlanError;
use super::devices::{Devices, Host, MAX_RANKS};
use super::values::{derive, value, within};
use crate::cores::{self, available_cores, numa_nodes, share_cores, share_cores_near, usable};
use crate::inventory;
use crate::serve::settings::Given;
use crate::units::runs;
use expertd_ipc::control::DeviceKind;
use expertd_rank_cuda::{self as gpu, KernelPath};
use expertd_shm::wait::SPIN_TIME;
use expertd_types::{Fp8Compute, Fp8Products};

/// The processors and devices of a service.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    /// Device of the source ranks.
    pub(super) device: DeviceKind,
    /// Number of ranks.
    pub(super) ranks: u32,
    /// Number of source ranks; the further ranks of a mixed group run on CPUs.
    pub(super) sources: u32,
    /// `[sources]`: each rank's GPU; empty on CPUs.
    pub(super) gpus: Vec<u32>,
    /// The kernels of GPU ranks, if that is known.
    pub(super) kernels: Option<KernelPath>,
    /// Environment variables of ranks and loaders.
    pub(super) environment: Vec<(String, String)>,
    /// The experts whose products are computed in FP8.
    pub(super) fp8_products: Fp8Products,
    /// Number of cores that may be busy all the time.
    pub(super) usable_cores: usize,
    /// `[ranks]`: cores of each rank.
    pub(super) shares: Vec<Vec<usize>>,
    /// `[ranks]`: NUMA node of each rank's GPU, where it is known.
    pub(super) nodes: Vec<Option<usize>>,
    /// Time that ranks and the router spin before they sleep.
    pub(super) spin: Duration,
}

/// Cores beside those of CPU ranks from which the router's threads may spin.
const SPARE_CORES: usize = 4;

impl Machine {
    /// Whether CPU ranks hold further experts beside one source rank.
    pub(super) const fn is_mixed(&self) -> bool {
        self.sources < self.ranks
    }

    /// `[ranks]`: their devices.
    pub(super) fn devices(&self) -> Vec<DeviceKind> {
        let of = |rank| if rank < self.sources { self.device } else { DeviceKind::Cpu };
        (0..self.ranks).map(of).collect()
    }
}

impl Machine {
    /// Chooses what the settings leave open.
    ///
    /// # Errors
    /// The first setting that does not fit this machine or this build.
    pub(super) fn choose(given: &mut Given) -> Result<Self, PlanError> {
        let cores = match &given.cores.0 {
            Some(text) => chosen_cores(text).map_err(|problem| value("cores", problem))?,
            None => available_cores(),
        };
        derive(&mut given.cores, list(&cores), "all that this process may run on");
        let usable_cores = usable(&cores);
        if usable_cores < cores.len() {
            tracing::warn!(
                cores = cores.len(),
                usable_cores,
                "a CPU quota allows fewer cores than this process sees, so fewer threads are started; steps stall when the \
                 quota is used up: give the container whole cores (Kubernetes: static CPU manager policy)"
            );
        }
        let host = Host::here(&inventory::in_child_process, numa_nodes(&cores).len() as u32);
        let Devices { device, ranks, sources, gpus, kernels } = Devices::choose(given, &host)?;
        let ranks = within("ranks", ranks, 1, MAX_RANKS)?;
        let fp8_compute = match device {
            DeviceKind::Cpu => derive(&mut given.fp8_compute, Fp8Compute::Bf16, "CPU ranks keep rows in f32"),
            DeviceKind::Cuda if kernels == Some(KernelPath::Portable) => {
                derive(&mut given.fp8_compute, Fp8Compute::Bf16, "the portable kernels multiply in bf16")
            }
            DeviceKind::Cuda => {
                derive(&mut given.fp8_compute, Fp8Compute::Fp8, "as FP8 checkpoints are meant to be run")
            }
        };
        let mxfp4_compute =
            derive(&mut given.mxfp4_compute, Fp8Compute::Bf16, "MXFP4 checkpoints quantise the weights only");
        for (name, compute) in [("fp8-compute", fp8_compute), ("mxfp4-compute", mxfp4_compute)] {
            if kernels == Some(KernelPath::Portable) && compute == Fp8Compute::Fp8 {
                let found =
                    "is fp8, but the ranks run the portable kernels, which multiply in bf16; leave it out";
                return Err(value(name, found));
            }
        }
        let fp8_products = Fp8Products {
            of_fp8: fp8_compute == Fp8Compute::Fp8,
            of_mxfp4: mxfp4_compute == Fp8Compute::Fp8,
        };
        let mut nodes = match device {
            DeviceKind::Cpu => vec![None; sources as usize],
            DeviceKind::Cuda => gpu::numa_nodes(&gpus),
        };
        let workers = ranks - sources;
        let shares = match device {
            DeviceKind::Cpu => share_cores(&cores, ranks as usize),
            DeviceKind::Cuda if workers > 0 => share_cores_mixed(&cores, workers as usize),
            DeviceKind::Cuda => share_cores_near(&cores, &nodes),
        };
        nodes.resize(ranks as usize, None);
        // GPU ranks leave most of their cores idle; CPU ranks use all of theirs, and the rest is for other threads.
        let spare_cores = match device {
            DeviceKind::Cuda => usable_cores > 2 * ranks as usize,
            DeviceKind::Cpu => available_cores().len() >= cores.len() + SPARE_CORES,
        };
        let spin = if spare_cores { SPIN_TIME } else { Duration::ZERO };
        let environment = match device {
            DeviceKind::Cpu => Vec::new(),
            DeviceKind::Cuda => {
                let path = given.gpu_path.0.unwrap_or_default();
                let mut all = gpu::environment(&gpus);
                all.extend(gpu::path_environment(path, given.gpu_cache_dir.0.as_deref()));
                all
            }
        };
        Ok(Machine {
            device,
            ranks,
            sources,
            gpus,
            kernels,
            environment,
            fp8_products,
            usable_cores,
            shares,
            nodes,
            spin,
        })
    }
}

/// Cores of the GPU rank of a mixed group and of each CPU rank. The first cores are for the GPU rank and the router, which poll while a
/// step runs.
fn share_cores_mixed(cores: &[usize], workers: usize) -> Vec<Vec<usize>> {
    let polling = if cores.len() >= 2 * (workers + 1) { 2 } else { 1 };
    let (first, others) = cores.split_at(polling.min(cores.len()));
    let others = if others.is_empty() { cores } else { others };
    [vec![first.to_vec()], share_cores(others, workers)].concat()
}

/// Parses a list of cores, each of which must be available to this process.
fn chosen_cores(text: &str) -> Result<Vec<usize>, String> {
    let (cores, available) = (cores::parse(text)?, available_cores());
    match cores.iter().find(|core| !available.contains(core)) {
        Some(core) => Err(format!(
            "`{text}` contains core {core}, but this process may run only on {}",
            list(&available)
        )),
        None => Ok(cores),
    }
}

/// A list of cores as ranges, such as `0-3,8`.
pub(super) fn list(cores: &[usize]) -> String {
    let show = |(first, last): (usize, usize)| {
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    };
    runs(cores.iter().copied()).into_iter().map(show).collect::<Vec<_>>().join(",")
}
