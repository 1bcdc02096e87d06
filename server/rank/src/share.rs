//! A rank's share of a checkpoint and the progress of loading it, for ranks on CPUs and GPUs.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use expertd_ipc::control::CheckpointSource;
use expertd_model::{
    Checkpoint, ExpertBiases, ExpertTensors, ExpertWeights, ExpertsSpec, LayerChoice, ModelError, ModelSpec,
    MoeLayer, ReadBuffer, ReadBytes, SharedSpec,
};
use expertd_types::{ExpertPlacement, LayerId, LayerPlacement, Rank};

/// One rank's share of the experts.
#[derive(Clone, Debug)]
pub struct ExpertShare {
    /// Number of ranks in the group.
    pub ranks: usize,
    rank: Rank,
    placement: Option<ExpertPlacement>,
}

impl ExpertShare {
    /// The share of one of `ranks` ranks by a placement (`None`: contiguous ranges).
    #[must_use]
    pub const fn of_rank(rank: Rank, ranks: usize, placement: Option<ExpertPlacement>) -> Self {
        ExpertShare { ranks, rank, placement }
    }

    /// Whether the share follows from a placement.
    #[must_use]
    pub const fn has_placement(&self) -> bool {
        self.placement.is_some()
    }

    /// The owners of a layer's experts.
    #[must_use]
    pub fn layer(&self, layer: LayerId, moe: &MoeLayer) -> LayerPlacement {
        let given = self.placement.as_ref().and_then(|placement| placement.layer(layer));
        given.cloned().unwrap_or_else(|| LayerPlacement::contiguous(moe.experts.count, self.ranks))
    }

    /// The experts of a layer that this rank owns, ascending.
    #[must_use]
    pub fn experts(&self, layer: LayerId, moe: &MoeLayer) -> Vec<u32> {
        self.layer(layer, moe).experts_of(self.rank).to_vec()
    }

    /// Size in the checkpoint of this rank's routed experts and all shared experts, in bytes.
    pub fn bytes(&self, spec: &ModelSpec) -> u64 {
        let of = |(layer, moe): (LayerId, &MoeLayer)| {
            self.experts(layer, moe).len() as u64 * moe.experts.bytes
                + moe.shared.as_ref().map_or(0, |s| s.bytes)
        };
        spec.moe_layers().map(of).sum()
    }
}

/// Opens a checkpoint and proves that it holds the expected weights.
///
/// # Errors
/// If it cannot be read, or holds other weights.
pub fn open_checkpoint(source: &CheckpointSource) -> Result<Checkpoint, ModelError> {
    let checkpoint = Checkpoint::open_layers(&source.folder, LayerChoice::Range(source.layers))?;
    checkpoint.expect(&source.fingerprint)?;
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

    /// The same, with `available` bytes of memory; `None`: unknown.
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

    /// Number of bytes of all tensors that were asked for with buffers that were put back.
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
    let number = |name: &str| {
        let text = std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    // Page cache counts as used in a control group, and can be reclaimed.
    let limit = number("memory.max").zip(number("memory.current"));
    let group = limit.map(|(max, current)| max.saturating_sub(current.saturating_sub(reclaimable())));
    Some(group.map_or(available, |group| group.min(available)))
}

fn reclaimable() -> u64 {
    let text = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let file = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().parse::<u64>().ok()
    };
    file("inactive_file ").unwrap_or(0) + file("active_file ").unwrap_or(0)
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
