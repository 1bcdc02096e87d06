//! A rank's share of a checkpoint: what both kinds of ranks load, and how far they are.

use std::ops::Range;

use expertd_ipc::control::RankSetup;
use expertd_model::{
    ExpertBiases, ExpertTensors, ExpertWeights, ExpertsSpec, ModelSpec, MoeLayer, Placement, SharedSpec,
};
use expertd_types::Rank;

/// Which share: that of one rank of so many.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    /// Ranks of the group.
    pub ranks: usize,
    rank: Rank,
}

impl Share {
    /// The share of the rank that `setup` is for.
    #[must_use]
    pub fn of(setup: &RankSetup) -> Self {
        Share { ranks: setup.shape.ranks as usize, rank: setup.rank }
    }

    /// The experts of a layer that this rank owns.
    pub fn experts(self, moe: &MoeLayer) -> Range<u32> {
        Placement::new(moe.experts.count, self.ranks).range(self.rank)
    }

    /// Bytes in the checkpoint of this rank's experts and of all shared ones.
    pub fn bytes(self, spec: &ModelSpec) -> u64 {
        let of = |moe: &MoeLayer| {
            self.experts(moe).len() as u64 * moe.experts.bytes + moe.shared.as_ref().map_or(0, |s| s.bytes)
        };
        spec.moe_layers().map(|(_, moe)| of(moe)).sum()
    }
}

/// Tells how much of a share is loaded.
pub struct Progress<F> {
    done: u64,
    total: u64,
    tell: F,
}

impl<F: FnMut(u64, u64)> Progress<F> {
    /// Nothing of `total` bytes yet; `tell` hears of bytes done and bytes in all.
    pub fn start(total: u64, mut tell: F) -> Self {
        tell(0, total);
        Progress { done: 0, total, tell }
    }

    /// One routed expert is loaded.
    pub fn expert(&mut self, spec: &ExpertsSpec) {
        self.add(spec.bytes);
    }

    /// A layer's shared experts are loaded.
    pub fn shared(&mut self, spec: &SharedSpec) {
        self.add(spec.bytes);
    }

    /// Bytes in all.
    pub const fn total(&self) -> u64 {
        self.total
    }

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        (self.tell)(self.done, self.total);
    }
}

/// Expert weights as the layer below takes them.
pub fn weights<'a>(tensors: &'a ExpertTensors<'a>) -> ExpertWeights<'a> {
    let biases = match (&tensors.gate_bias, &tensors.up_bias, &tensors.down_bias) {
        (Some(gate), Some(up), Some(down)) => Some(ExpertBiases { gate, up, down }),
        _ => None,
    };
    ExpertWeights { gate: tensors.gate.clone(), up: tensors.up.clone(), down: tensors.down.clone(), biases }
}
