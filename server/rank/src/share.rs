//! A rank's share of a checkpoint and the progress of loading it, for ranks on CPUs and GPUs.

use expertd_ipc::control::CheckpointSource;
use expertd_model::{
    Checkpoint, ExpertBiases, ExpertTensors, ExpertWeights, ExpertsSpec, LayerChoice, ModelError, ModelSpec,
    MoeLayer, SharedSpec,
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
