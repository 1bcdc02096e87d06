//! A rank's share of a checkpoint and the progress of loading it, for ranks on CPUs and GPUs.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use expertd_ipc::control::CheckpointSource;
use expertd_model::{
    Checkpoint, ExpertBiases, ExpertTensors, ExpertWeights, ExpertsSpec, LayerChoice, ModelError, ModelSpec,
    MoeLayer, ReadBuffer, ReadBytes, SharedSpec,
};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement, Rank};

use crate::Progress;

/// One rank's share of the experts.
#[derive(Clone, Debug)]
pub struct ExpertShare {
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Number of ranks that get rows. In a mixed group these are fewer: the further ranks hold experts only.
    sources: usize,
    rank: Rank,
    placement: Option<ExpertPlacement>,
}

impl ExpertShare {
    /// The share of one of `ranks` ranks, all of which get rows, by a placement (`None`: contiguous ranges).
    #[must_use]
    pub const fn of_rank(rank: Rank, ranks: usize, placement: Option<ExpertPlacement>) -> Self {
        ExpertShare { ranks, sources: ranks, rank, placement }
    }

    /// The same share in a group in which only the first `sources` ranks get rows.
    #[must_use]
    pub fn with_sources(self, sources: usize) -> Self {
        ExpertShare { sources, ..self }
    }

    /// Whether the rank gets rows, and therefore holds gates and shared experts.
    #[must_use]
    pub const fn is_source(&self) -> bool {
        self.rank.index() < self.sources
    }

    /// Whether the share follows from a placement.
    pub const fn has_placement(&self) -> bool {
        self.placement.is_some()
    }

    /// Whether the first rank owns all experts of a layer by the placement: in a mixed group the layer's steps are its alone.
    #[must_use]
    pub fn is_whole(&self, layer: LayerId) -> bool {
        self.placement.as_ref().is_some_and(|placement| placement.is_whole(layer, Rank(0)))
    }

    /// The owners of a layer's experts.
    #[must_use]
    pub fn layer(&self, layer: LayerId, moe: &MoeLayer) -> LayerPlacement {
        let given = self.placement.as_ref().and_then(|placement| placement.layer(layer));
        given.cloned().unwrap_or_else(|| LayerPlacement::contiguous(moe.experts.count, self.ranks))
    }

    /// The experts of a layer that this rank holds, ascending: those that it owns; in a mixed group, beside the source, those of which it
    /// is the first owner, because no other one computes rows there.
    pub fn experts(&self, layer: LayerId, moe: &MoeLayer) -> Vec<u32> {
        let owned = self.layer(layer, moe);
        if self.is_source() { owned.experts_of(self.rank).to_vec() } else { owned.first_owned_by(self.rank) }
    }

    /// Number of experts of a layer that a rank of this group holds; see [`experts`](Self::experts).
    pub fn held(&self, layer: LayerId, moe: &MoeLayer, rank: Rank) -> usize {
        let owned = self.layer(layer, moe);
        if rank.index() < self.sources {
            owned.experts_of(rank).len()
        } else {
            owned.first_owned_by(rank).len()
        }
    }

    /// Size in the checkpoint of this rank's routed experts and, on a source, of all shared experts, in bytes.
    pub fn bytes(&self, spec: &ModelSpec) -> u64 {
        let shared = |moe: &MoeLayer| moe.shared.as_ref().filter(|_| self.is_source()).map_or(0, |s| s.bytes);
        let of = |(layer, moe): (LayerId, &MoeLayer)| {
            self.experts(layer, moe).len() as u64 * moe.experts.bytes + shared(moe)
        };
        spec.moe_layers().map(of).sum()
    }
}

/// Opens a checkpoint and proves that it holds the expected weights. Where that reads every byte, `progress` counts them.
///
/// # Errors
/// If it cannot be read, or holds other weights.
pub fn open_checkpoint(source: &CheckpointSource, progress: &Progress) -> Result<Checkpoint, ModelError> {
    let checkpoint = Checkpoint::open_layers(&source.folder, LayerChoice::Range(source.layers))?;
    checkpoint.expect(&source.fingerprint, &|bytes| progress.checked(bytes as u64))?;
    Ok(checkpoint)
}

/// Buffers that loaders read experts to, one after another or side by side.
///
/// A checkpoint that takes more than half of the memory that is available is read past the page cache, which could not keep it, nor give
/// it to the next loader. Other checkpoints are mapped, so that the next load finds them in memory; the other half is for weights that
/// are packed on the host.
#[derive(Debug)]
pub struct ReadBuffers {
    past_cache: bool,
    /// Buffers that no thread uses now.
    free: Mutex<Vec<ReadBuffer>>,
}

impl ReadBuffers {
    /// Buffers for one checkpoint.
    #[must_use]
    pub fn new(checkpoint: &Checkpoint) -> Self {
        Self::within(checkpoint, available_memory())
    }

    /// Buffers for one checkpoint in a machine with `available` bytes of memory; `None`: unknown.
    fn within(checkpoint: &Checkpoint, available: Option<u64>) -> Self {
        let past_cache = available.is_some_and(|available| checkpoint.bytes() > available / 2);
        if past_cache {
            checkpoint.expect_reads_past_cache();
        }
        ReadBuffers { past_cache, free: Mutex::default() }
    }

    /// Takes a buffer.
    pub fn take(&self) -> ReadBuffer {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match free {
            Some(buffer) => buffer,
            None if self.past_cache => ReadBuffer::past_cache(),
            None => ReadBuffer::default(),
        }
    }

    /// Puts a buffer back.
    pub fn put_back(&self, buffer: ReadBuffer) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffer);
    }

    /// Bytes of all tensors that were read with buffers that are put back.
    pub fn total(&self) -> ReadBytes {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).iter().map(ReadBuffer::total).sum()
    }
}

/// Memory that processes of this service can still take, in bytes, if the system reports it.
#[must_use]
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let available = line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10;
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = left_in_groups(Path::new("/sys/fs/cgroup"), &own);
    Some(group.map_or(available, |group| group.min(available)))
}

/// Files of a control group's memory controller: limit, usage, and two counters of page cache.
type GroupFiles = (&'static str, &'static str, [&'static str; 2]);

const VERSION_2: GroupFiles = ("memory.max", "memory.current", ["inactive_file ", "active_file "]);
const VERSION_1: GroupFiles =
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ["total_inactive_file ", "total_active_file "]);

/// Bytes that the memory limits of the process's control groups, and of the groups above them, leave free. `own` is the text of
/// `/proc/self/cgroup`, `mounts` is `/sys/fs/cgroup`. `None` without a limit.
fn left_in_groups(mounts: &Path, own: &str) -> Option<u64> {
    let groups = own.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let (root, files) = match controllers {
            "" => (mounts.to_owned(), VERSION_2),
            _ if controllers.split(',').any(|controller| controller == "memory") => {
                (mounts.join("memory"), VERSION_1)
            }
            _ => return None,
        };
        // A container may see its group at the root and not at its path.
        let group = root.join(path.trim_start_matches('/'));
        group
            .ancestors()
            .take_while(|group| group.starts_with(&root))
            .filter_map(|group| left_in(group, files))
            .min()
    });
    groups.min()
}

fn left_in(group: &Path, (limit, usage, cache): GroupFiles) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let stat = read("memory.stat").unwrap_or_default();
    let value = |name| stat.lines().find_map(|line| line.strip_prefix(name))?.trim().parse::<u64>().ok();
    // Page cache counts as used in a control group, and can be reclaimed.
    let reclaimable: u64 = cache.into_iter().filter_map(value).sum();
    Some(number(limit)?.saturating_sub(number(usage)?.saturating_sub(reclaimable)))
}

/// Reports how much of a share is loaded.
pub struct LoadProgress<F> {
    done: u64,
    total: u64,
    report: F,
}

impl<F: FnMut(u64, u64)> LoadProgress<F> {
    /// Progress of loading `total` bytes; calls `report` with bytes loaded and `total`, first with zero bytes.
    pub fn start(total: u64, mut report: F) -> Self {
        report(0, total);
        LoadProgress { done: 0, total, report }
    }

    /// Adds one routed expert.
    pub fn expert(&mut self, spec: &ExpertsSpec) {
        self.add(spec.bytes);
    }

    /// Adds a layer's shared experts.
    pub fn shared(&mut self, spec: &SharedSpec) {
        self.add(spec.bytes);
    }

    /// Bytes to load.
    pub const fn total(&self) -> u64 {
        self.total
    }

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        (self.report)(self.done, self.total);
    }
}

/// Converts an expert's tensors to the form that the CPU and GPU packers take.
pub fn weights<'a>(tensors: &'a ExpertTensors<'a>) -> ExpertWeights<'a> {
    let biases = match (&tensors.gate_bias, &tensors.up_bias, &tensors.down_bias) {
        (Some(gate), Some(up), Some(down)) => Some(ExpertBiases { gate, up, down }),
        _ => None,
    };
    ExpertWeights { gate: tensors.gate.clone(), up: tensors.up.clone(), down: tensors.down.clone(), biases }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use expertd_model::synth::{self, SynthConfig};
    use expertd_types::ExpertId;

    use super::*;

    #[test]
    fn limits_of_the_own_control_group_and_of_those_above_count() {
        let folder = tempfile::tempdir().unwrap();
        let write = |group: &str, files: &[(&str, &str)]| {
            let group = folder.path().join(group);
            std::fs::create_dir_all(&group).unwrap();
            files.iter().for_each(|(name, text)| std::fs::write(group.join(name), text).unwrap());
        };
        let left = |own| left_in_groups(folder.path(), own);
        assert_eq!(left("0::/system.slice/expertd.service\n"), None);
        let stat = "anon 7\ninactive_file 20\nactive_file 10\n";
        let own = [("memory.max", "1000\n"), ("memory.current", "130\n"), ("memory.stat", stat)];
        write("system.slice/expertd.service", &own);
        write("system.slice", &[("memory.max", "max\n"), ("memory.current", "5000\n")]);
        assert_eq!(left("0::/system.slice/expertd.service\n"), Some(900));
        write("", &[("memory.max", "800\n"), ("memory.current", "200\n")]);
        assert_eq!(left("0::/system.slice/expertd.service\n"), Some(600), "the group above leaves less");
        assert_eq!(left("0::/not/here\n"), Some(600));
        let first = [("memory.limit_in_bytes", "110\n"), ("memory.usage_in_bytes", "10\n")];
        write("memory/docker/1", &first);
        assert_eq!(left("12:cpu,cpuacct:/x\n7:memory:/docker/1\n"), Some(100));
    }

    #[test]
    fn what_memory_cannot_keep_is_read_past_the_page_cache() {
        let folder = tempfile::tempdir().unwrap();
        synth::write(&SynthConfig::new("qwen3_moe"), folder.path()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let bytes = checkpoint.bytes();
        assert_eq!(bytes, 2 * 8 * 3 * 64 * 96 * 2, "two layers of eight experts in bf16");
        let is_past = |available| ReadBuffers::within(&checkpoint, available).past_cache;
        assert_eq!([None, Some(2 * bytes), Some(2 * bytes - 1)].map(is_past), [false, false, true]);

        let buffers = ReadBuffers::within(&checkpoint, Some(bytes));
        let mut buffer = buffers.take();
        checkpoint.read_expert(LayerId(0), ExpertId(3), &mut buffer).unwrap();
        buffers.put_back(buffer);
        let total = buffers.total();
        assert_eq!(total.cached + total.direct, bytes / 16);
    }
}
