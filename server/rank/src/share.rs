//! A rank's share of a checkpoint and the progress of loading it, for ranks on CPUs and GPUs.

use std::ops::Range;

use expertd_ipc::control::{CheckpointSource, RankSetup};
use expertd_model::{
    Checkpoint, ExpertBiases, ExpertTensors, ExpertWeights, ExpertsSpec, LayerChoice, ModelError, ModelSpec,
    MoeLayer, Placement, SharedSpec,
};
use expertd_types::Rank;

/// One rank's share of the experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertShare {
    /// Number of ranks in the group.
    pub ranks: usize,
    rank: Rank,
}

impl ExpertShare {
    /// The share of one of `ranks` ranks.
    #[must_use]
    pub const fn of_rank(rank: Rank, ranks: usize) -> Self {
        ExpertShare { ranks, rank }
    }

    /// The share of the rank that `setup` describes.
    #[must_use]
    pub fn of(setup: &RankSetup) -> Self {
        ExpertShare { ranks: setup.shape.ranks as usize, rank: setup.rank }
    }

    /// Range of a layer's experts that this rank owns.
    pub fn experts(self, moe: &MoeLayer) -> Range<u32> {
        Placement::new(moe.experts.count, self.ranks).range(self.rank)
    }

    /// Size in the checkpoint of this rank's routed experts and all shared experts, in bytes.
    pub fn bytes(self, spec: &ModelSpec) -> u64 {
        let of = |moe: &MoeLayer| {
            self.experts(moe).len() as u64 * moe.experts.bytes + moe.shared.as_ref().map_or(0, |s| s.bytes)
        };
        spec.moe_layers().map(|(_, moe)| of(moe)).sum()
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
