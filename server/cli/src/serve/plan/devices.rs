//! The device of the ranks, their number, and the GPU of each of them.

use std::path::{Path, PathBuf};

use super::PlanError;
use super::values::{derive, value};
use crate::serve::kinds::{Kinds, RankNumbers};
use crate::serve::settings::{Given, ServeArgs};
use expertd_ipc::control::DeviceKind;
use expertd_rank_cuda::{self as gpu, Inventory, KernelPath};
use expertd_types::GpuPath;
use rustix::fs::{Access, access};

/// Largest number of ranks on one host.
pub(super) const MAX_RANKS: u32 = 8;

/// Devices and limits of this build and this machine.
pub(super) struct Host<'a> {
    /// Whether the build has GPU ranks.
    pub(super) has_gpu_ranks: bool,
    /// Number of GPUs, from device files.
    pub(super) gpus: u32,
    /// Asks the driver and NCCL; not called for CPU ranks or without GPUs.
    pub(super) inventory: &'a dyn Fn() -> Result<Inventory, String>,
    /// Number of NUMA nodes of the cores to use.
    pub(super) nodes: u32,
}

impl<'a> Host<'a> {
    /// Describes this build and this machine.
    pub(super) fn here(inventory: &'a dyn Fn() -> Result<Inventory, String>, nodes: u32) -> Self {
        Host { has_gpu_ranks: gpu::BUILT, gpus: gpu::present(), inventory, nodes }
    }
}

/// The GPUs that `serve` would take with these settings, in this process, which may load the driver.
///
/// # Errors
/// As the plan of a service.
pub(crate) fn gpus(serve: &ServeArgs) -> Result<Vec<u32>, PlanError> {
    let serve = ServeArgs { device: Some(DeviceKind::Cuda.into()), ..serve.clone() };
    let mut given = Given::merge(&serve, None)?;
    Ok(Devices::choose(&mut given, &Host::here(&gpu::inventory, 1))?.gpus)
}

/// The device of the ranks and what each of them gets.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Devices {
    /// Device of the source ranks.
    pub(super) device: DeviceKind,
    /// Number of ranks.
    pub(super) ranks: u32,
    /// Number of ranks that get rows: fewer than `ranks` in a mixed group, whose further ranks run on CPUs.
    pub(super) sources: u32,
    /// `[sources]`: each rank's GPU; empty on CPUs.
    pub(super) gpus: Vec<u32>,
    /// The kernels of GPU ranks; `None` if the driver did not answer.
    pub(super) kernels: Option<KernelPath>,
}

impl Devices {
    /// Chooses what the settings leave open.
    ///
    /// # Errors
    /// The first setting that contradicts another one or does not fit this machine or this build.
    pub(super) fn choose(given: &mut Given, host: &Host<'_>) -> Result<Self, PlanError> {
        let workers = workers(given, host)?;
        let found = Self::of_sources(given, host)?;
        let Some(workers) = workers else { return Ok(found) };
        let sources = found.sources;
        if let Some(ranks) = &mut given.ranks.0 {
            ranks.second = Some(workers);
        }
        if sources != 1 {
            return Err(value(
                "ranks",
                format!(
                    "is {sources},{workers}, but a mixed group has one {} rank, which gets all rows; use --ranks 1,{workers}",
                    found.device
                ),
            ));
        }
        if sources.saturating_add(workers) > MAX_RANKS {
            return Err(value(
                "ranks",
                format!("is {sources},{workers}; a host runs at most {MAX_RANKS} ranks"),
            ));
        }
        Ok(Devices { ranks: sources + workers, ..found })
    }

    /// The source ranks.
    fn of_sources(given: &mut Given, host: &Host<'_>) -> Result<Self, PlanError> {
        let list = match &given.gpus.0 {
            Some(text) => Some(parse(text).map_err(|problem| value("gpus", problem))?),
            None => None,
        };
        if let Some(list) = &list {
            let count = list.len();
            if given.device.0.is_some_and(|kinds| kinds.first == DeviceKind::Cpu) {
                return Err(value("gpus", "is given, but device is cpu; leave one of the two out"));
            }
            if count != 1 && given.device.0.is_some_and(|kinds| kinds.is_mixed) {
                return Err(value(
                    "gpus",
                    format!("has {count} entries, but a mixed group has one GPU rank; name one GPU"),
                ));
            }
            if let Some(ranks) =
                given.ranks.0.map(|ranks| ranks.first).filter(|&ranks| ranks as usize != count)
            {
                return Err(value(
                    "gpus",
                    format!("has {count} entries, one for each rank, but ranks is {ranks}; leave ranks out"),
                ));
            }
            let twice = list.iter().enumerate().find(|&(at, gpu)| list[..at].contains(gpu));
            if let Some((_, gpu)) = twice.filter(|_| given.share_gpu.0 != Some(true)) {
                return Err(value(
                    "gpus",
                    format!(
                        "names GPU {gpu} more than once; ranks share a GPU only with --share-gpu, which is for tests"
                    ),
                ));
            }
        }
        let wants_gpus =
            list.is_some() || given.device.0.is_some_and(|kinds| kinds.first == DeviceKind::Cuda);
        if wants_gpus && !host.has_gpu_ranks {
            return Err(value(if list.is_some() { "gpus" } else { "device" }, gpu::BUILD_HINT));
        }
        let is_cpu = given.device.0.is_some_and(|kinds| kinds.first == DeviceKind::Cpu);
        let found = if is_cpu || !host.has_gpu_ranks || host.gpus == 0 {
            Found { count: host.gpus, inventory: None, path: GpuPath::Auto }
        } else {
            Found::ask(host, given.gpu_path.0.unwrap_or_default())
        };
        let (default, why) = match (host.has_gpu_ranks, found.supported().is_empty()) {
            _ if list.is_some() => (DeviceKind::Cuda, "GPUs are listed".to_owned()),
            (false, _) => (DeviceKind::Cpu, "this build has no GPU ranks".to_owned()),
            (true, false) => (DeviceKind::Cuda, "GPUs found".to_owned()),
            (true, true) => {
                (DeviceKind::Cpu, found.unsupported().unwrap_or_else(|| "no GPU found".to_owned()))
            }
        };
        let is_given = given.device.0.is_some();
        let kinds = derive(&mut given.device, default.into(), &*why);
        let (device, is_mixed) = (kinds.first, kinds.is_mixed);
        if device == DeviceKind::Cpu {
            if let Some(refusal) = found.unsupported().filter(|_| !is_given) {
                tracing::warn!(why = refusal, "the ranks run on the CPU");
            }
            let (default, why) = if is_mixed {
                (1, "one source")
            } else {
                (host.nodes.clamp(1, MAX_RANKS), "one per NUMA node")
            };
            let ranks = derive(&mut given.ranks, default.into(), why);
            let (ranks, sources) = (ranks.first, ranks.first);
            return Ok(Devices { device, ranks, sources, gpus: Vec::new(), kernels: None });
        }
        if found.count == 0 {
            return Err(value(
                if list.is_some() { "gpus" } else { "device" },
                "needs a GPU, but none was found (no /dev/nvidia0, or CUDA_VISIBLE_DEVICES hides it); see \
                 `expertd doctor`, or use --device cpu",
            ));
        }
        let gpus = match list {
            Some(list) => found.check(list)?,
            None => found.in_turn(given, if is_mixed { 1 } else { MAX_RANKS })?,
        };
        let text: Vec<String> = gpus.iter().map(u32::to_string).collect();
        derive(&mut given.gpus, text.join(","), "one per rank");
        let ranks = derive(&mut given.ranks, (gpus.len() as u32).into(), "one per GPU listed");
        let kernels = found.kernels_of(&gpus);
        found.check_cache(given.gpu_cache_dir.0.as_deref(), &gpus)?;
        let why = kernels.map_or_else(String::new, |kernels| format!("the ranks run {kernels}"));
        derive(&mut given.gpu_path, GpuPath::Auto, &*why);
        Ok(Devices { device, ranks: ranks.first, sources: ranks.first, gpus, kernels })
    }
}

/// Number of CPU ranks beside the source of a mixed group; `None` in other groups.
fn workers(given: &Given, host: &Host<'_>) -> Result<Option<u32>, PlanError> {
    let kinds: Option<Kinds> = given.device.0;
    let second = given.ranks.0.and_then(|ranks: RankNumbers| ranks.second);
    if kinds.is_some_and(|kinds| kinds.is_mixed) {
        let workers = second.unwrap_or_else(|| host.nodes.clamp(1, MAX_RANKS - 1));
        return if workers == 0 {
            Err(value("ranks", "has no CPU ranks; leave the second device out"))
        } else {
            Ok(Some(workers))
        };
    }
    if second.is_some() {
        let ranks = given.ranks.0.map_or_else(String::new, |ranks| ranks.to_string());
        return Err(value("ranks", format!("is {ranks}; two numbers need --device cuda,cpu")));
    }
    if given.gpu_memory.0.is_some() {
        return Err(value(
            "gpu-memory",
            "is given, but only a group with --device cuda,cpu divides experts by it",
        ));
    }
    if given.stream_rows.0.is_some() {
        let problem = "is given, but only a group with --device cuda,cpu copies experts for large steps";
        return Err(value("stream-rows", problem));
    }
    if given.slot_memory.0.is_some() {
        let problem = "is given, but only a group with --device cuda,cpu keeps copies of experts";
        return Err(value("slot-memory", problem));
    }
    Ok(None)
}

/// The GPUs that were found.
struct Found {
    /// Number of GPUs.
    count: u32,
    /// `None` if nothing was asked, or the driver did not answer: ranks then say what is wrong.
    inventory: Option<Inventory>,
    /// The setting.
    path: GpuPath,
}

impl Found {
    fn ask(host: &Host<'_>, path: GpuPath) -> Self {
        match (host.inventory)() {
            Ok(inventory) => Found { count: inventory.gpus.len() as u32, inventory: Some(inventory), path },
            Err(error) => {
                tracing::warn!(%error, "the GPUs cannot be examined before the ranks start");
                Found { count: host.gpus, inventory: None, path }
            }
        }
    }

    /// The kernels that ranks on these GPUs run. [`Inventory::apart`] keeps GPUs with different ones apart.
    fn kernels_of(&self, gpus: &[u32]) -> Option<KernelPath> {
        let first = self.inventory.as_ref()?.gpus.get(*gpus.first()? as usize)?;
        first.kernels(self.path)
    }

    /// Checks that the driver can keep the kernels that it compiles for these GPUs; without that it compiles them whenever ranks start.
    fn check_cache(&self, folder: Option<&Path>, gpus: &[u32]) -> Result<(), PlanError> {
        let facts = |gpu: &u32| self.inventory.as_ref()?.gpus.get(*gpu as usize);
        if !gpus.iter().filter_map(facts).any(|facts| facts.needs_ptx(self.path)) {
            return Ok(());
        }
        if let Some(folder) = folder {
            let made = std::fs::create_dir_all(folder).map_err(|error| error.to_string());
            return made.and_then(|()| writable(folder)).map_err(|problem| {
                let folder = folder.display();
                value(
                    "gpu-cache-dir",
                    format!("is {folder}, where the driver keeps the kernels that it compiles: {problem}"),
                )
            });
        }
        let of_driver = std::env::var_os("CUDA_CACHE_PATH").map(PathBuf::from);
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".nv/ComputeCache"));
        let problem = match of_driver.or_else(home) {
            // The driver makes it.
            Some(folder) => folder.ancestors().find(|folder| folder.exists()).and_then(|folder| {
                writable(folder).err().map(|problem| format!("{}: {problem}", folder.display()))
            }),
            None => Some("HOME is not set".to_owned()),
        };
        if let Some(problem) = problem {
            tracing::warn!(
                problem,
                "the driver cannot keep the kernels that it compiles, and compiles them whenever ranks start; set gpu-cache-dir"
            );
        }
        Ok(())
    }

    /// The GPUs that the kernels run on, as far as that is known.
    fn supported(&self) -> Vec<u32> {
        let runs = |gpu: &u32| self.refusal(*gpu).is_none();
        (0..self.count).filter(runs).collect()
    }

    /// Why ranks cannot use the GPU; `None` if they can.
    fn refusal(&self, gpu: u32) -> Option<String> {
        let facts = self.inventory.as_ref()?.gpus.get(gpu as usize)?;
        facts.kernels(self.path).is_none().then(|| facts.refusal(gpu))
    }

    /// The reason why the first unsupported GPU cannot be used.
    fn unsupported(&self) -> Option<String> {
        (0..self.count).find_map(|gpu| self.refusal(gpu))
    }

    /// The first GPUs of the largest group, one for each rank.
    fn in_turn(&self, given: &mut Given, most: u32) -> Result<Vec<u32>, PlanError> {
        let supported = self.supported();
        let count = supported.len() as u32;
        if let Some(refusal) = self.unsupported().filter(|_| count == 0) {
            return Err(value("device", format!("is cuda, but {refusal}")));
        }
        let group = self.inventory.as_ref().map_or_else(|| supported.clone(), |found| found.group(self.path));
        let apart = self.inventory.as_ref().and_then(|found| found.apart(&supported, self.path));
        let of_group = (group.len() as u32).min(most);
        let why = match &apart {
            Some(apart) if of_group < most => {
                if given.ranks.0.is_none() {
                    tracing::warn!(gpus = ?group, why = apart, "ranks use only these GPUs");
                }
                format!("one per GPU that can be in one group: {apart}")
            }
            _ => "one per GPU".to_owned(),
        };
        let ranks = derive(&mut given.ranks, of_group.into(), &*why).first;
        if ranks > count {
            let others = self.unsupported().map_or_else(String::new, |refusal| format!(" ({refusal})"));
            return Err(value(
                "ranks",
                format!("is {ranks}, but only {count} GPUs were found; each rank needs one{others}"),
            ));
        }
        if let Some(apart) = apart.filter(|_| ranks as usize > group.len()) {
            return Err(value(
                "ranks",
                format!(
                    "is {ranks}, but the largest group of GPUs that was found has {}: {apart}; lower ranks, leave it out, or list GPUs with --gpus",
                    group.len()
                ),
            ));
        }
        Ok(group.into_iter().take(ranks as usize).collect())
    }

    /// Checks that ranks can use the GPUs of a list.
    fn check(&self, list: Vec<u32>) -> Result<Vec<u32>, PlanError> {
        let count = self.count;
        if let Some(gpu) = list.iter().find(|&&gpu| gpu >= count) {
            return Err(value(
                "gpus",
                format!(
                    "names GPU {gpu}, but this process sees {count} GPUs, numbered from 0; see `expertd doctor` and \
                     CUDA_VISIBLE_DEVICES"
                ),
            ));
        }
        if let Some(refusal) = list.iter().find_map(|&gpu| self.refusal(gpu)) {
            return Err(value("gpus", refusal));
        }
        if let Some(apart) = self.inventory.as_ref().and_then(|found| found.apart(&list, self.path)) {
            return Err(value(
                "gpus",
                format!(
                    "lists GPUs whose ranks cannot form a group: {apart}; list equal GPUs that reach each other (`expertd doctor`), or one"
                ),
            ));
        }
        if !gpu::is_shared(&list) {
            return Ok(list);
        }
        match self.inventory.as_ref().map(|inventory| &inventory.nccl) {
            Some(Ok(nccl)) if !nccl.can_share() => Err(value(
                "share-gpu",
                format!("found {nccl}, needed: {}; {}", gpu::SHARING_NEEDED, gpu::SHARING_WAY_OUT),
            )),
            Some(Err(error)) => Err(value("share-gpu", format!("{error}; needed: {}", gpu::SHARING_NEEDED))),
            _ => {
                tracing::warn!(
                    "ranks share a GPU, which is for tests: their kernels take turns, so steps take many times longer"
                );
                Ok(list)
            }
        }
    }
}

/// Checks that this process and its children can make files in a folder.
fn writable(folder: &Path) -> Result<(), String> {
    access(folder, Access::WRITE_OK | Access::EXEC_OK).map_err(|error| error.to_string())
}

/// Parses the GPUs of ranks, such as `0,1,2`.
fn parse(text: &str) -> Result<Vec<u32>, String> {
    let entry = |entry: &str| {
        let problem =
            || format!("`{entry}` in `{text}` is not the number of a GPU; expected a list such as 0,1");
        entry.trim().parse().map_err(|_| problem())
    };
    let list = text.split(',').map(entry).collect::<Result<Vec<u32>, _>>()?;
    if list.len() > MAX_RANKS as usize {
        let found = list.len();
        return Err(format!("has {found} entries, one for each rank; a host runs at most {MAX_RANKS} ranks"));
    }
    Ok(list)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
