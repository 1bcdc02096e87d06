//! Sizes of the weights of ranks.

use expertd_model::{ModelSpec, MoeLayer};
use expertd_rank_cuda as gpu;
use expertd_types::{Fp8Products, LayerId, Rank};

/// `[ranks]`: bytes of weights of ranks that hold `held` routed experts of each layer; the first `sources` ranks, which get rows, also hold
/// all shared experts and gates.
pub(crate) fn bytes_of_ranks(
    spec: &ModelSpec,
    ranks: usize,
    sources: usize,
    held: impl Fn(LayerId, &MoeLayer, Rank) -> usize,
) -> Vec<u64> {
    let mut bytes = vec![0; ranks];
    for (layer, moe) in spec.moe_layers() {
        let replicated = moe.shared.as_ref().map_or(0, |shared| shared.bytes) + gate_bytes(spec, moe);
        for (rank, bytes) in (0..).map(Rank).zip(&mut bytes) {
            let of_source = if rank.index() < sources { replicated } else { 0 };
            *bytes += held(layer, moe, rank) as u64 * moe.experts.bytes + of_source;
        }
    }
    bytes
}

/// `[ranks]`: bytes of GPU memory that the weights of GPU ranks take, which hold as [`bytes_of_ranks`] says.
pub(crate) fn gpu_bytes_of_ranks(
    spec: &ModelSpec,
    products: Fp8Products,
    ranks: usize,
    held: impl Fn(LayerId, &MoeLayer, Rank) -> usize,
) -> Vec<u64> {
    let gates: u64 = spec.moe_layers().map(|(_, moe)| gate_bytes(spec, moe)).sum();
    let of = |rank| gates + gpu::weight_bytes(spec, products, |layer, moe| held(layer, moe, rank));
    (0..).map(Rank).take(ranks).map(of).collect()
}

/// Size of a gate in bytes, with two bytes per weight, including its token table.
fn gate_bytes(spec: &ModelSpec, moe: &MoeLayer) -> u64 {
    let table = moe.gate.vocab().unwrap_or(0) * moe.gate.top_k * 4;
    (moe.gate.num_experts * spec.hidden * 2 + table) as u64
}
