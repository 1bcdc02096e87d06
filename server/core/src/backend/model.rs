//! The description of the loaded model: its layers, the limits on requests, and the experts of each rank.

use std::collections::BTreeMap;

use expertd_types::{
    ExpertPlacement, Generation, LayerId, LayerPlacement, LayerRange, Rank, WeightFingerprint, WeightVersion,
};

/// Longest name of a model, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// Description of the loaded model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The served name.
    pub name: String,
    /// `model_type` of config.json.
    pub family: String,
    /// Version of the loaded weights.
    pub weight_version: WeightVersion,
    /// Fingerprint of the loaded weights.
    pub weight_fingerprint: WeightFingerprint,
    /// The current generation; 0 before the first.
    pub generation: Generation,
    /// Elements of a token row.
    pub hidden: usize,
    /// Decoder layers of the checkpoint, with or without MoE.
    pub num_layers: usize,
    /// The decoder layers that this service holds.
    pub held: LayerRange,
    /// The layers with an MoE block that are served.
    pub layers: BTreeMap<LayerId, MoeLayerInfo>,
    /// Storage formats of the expert weights, e.g. `bf16`.
    pub weight_formats: Vec<String>,
    /// Limits on requests.
    pub limits: Limits,
    /// Number of ranks that get rows, which are the first ones; fewer than all in a mixed group.
    pub sources: usize,
    /// Experts of each rank.
    pub placement: Vec<RankPlacement>,
}

impl ModelInfo {
    /// Number of a layer's experts that the source rank of a mixed group owns; `None` in other groups.
    pub fn source_experts(&self, layer: LayerId) -> Option<usize> {
        let source = self.placement.first().filter(|_| self.sources < self.placement.len())?;
        let ranges = source.experts.iter().filter(|(of, _, _)| *of == layer);
        Some(ranges.map(|&(_, _, count)| count as usize).sum())
    }
}

/// Description of one MoE layer.
#[derive(Clone, Debug)]
pub struct MoeLayerInfo {
    /// Number of experts; ids are `0..num_experts`.
    pub num_experts: usize,
    /// Experts per token that the gate selects.
    pub top_k: usize,
    /// Largest k that callers may give with their own routing.
    pub max_k: usize,
    /// Intermediate size of one expert.
    pub expert_width: usize,
    /// Intermediate size of all shared experts together; 0 if there are none.
    pub shared_width: usize,
    /// The gate in words.
    pub gate: String,
    /// The gate as data (JSON).
    pub gate_json: String,
    /// Whether requests must carry token ids.
    pub routes_by_token_id: bool,
    /// Token ids are `0..vocabulary`; 0 where the layer does not route by token id.
    pub vocabulary: usize,
}

/// Limits on requests and connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one request. A request larger than a step is split.
    pub max_tokens_per_request: usize,
    /// Tokens of one step over all ranks.
    pub max_tokens_per_step: usize,
    /// Tokens of one step on one rank.
    pub max_tokens_per_rank: usize,
    /// Largest gRPC message; see [`Limits::message_bytes`].
    pub max_message_bytes: usize,
    /// Concurrent calls on one connection.
    pub max_streams_per_connection: u32,
    /// Requests in flight on one `ForwardStream`; more wait in the transport.
    pub max_requests_per_stream: u32,
    /// Connections accepted at once.
    pub max_connections: u32,
    /// Request bytes held by the service at once, over all connections.
    pub max_bytes_in_flight: usize,
}

impl Limits {
    /// Bytes of the largest legal request or answer: f32 rows, ids, weights, token ids, and room for the rest.
    #[must_use]
    pub const fn message_bytes(max_tokens_per_request: usize, hidden: usize, max_k: usize) -> usize {
        const ENVELOPE: usize = 64 << 10;
        max_tokens_per_request * (hidden * 4 + max_k * 8 + 4) + ENVELOPE
    }
}

/// The experts of one rank.
#[derive(Clone, Debug)]
pub struct RankPlacement {
    /// The rank.
    pub rank: Rank,
    /// Its device in words, e.g. `cpu (4 cores)`.
    pub device: String,
    /// Ranges of consecutive experts that the rank owns: layer, first expert and count. Each MoE layer has at least one range, which
    /// is empty if the rank owns none of the layer's experts.
    pub experts: Vec<(LayerId, u32, u32)>,
}

/// The ranges of experts that a rank owns by a placement (`None`: contiguous ranges); see [`RankPlacement::experts`].
#[must_use]
pub fn owned_ranges(
    layers: &BTreeMap<LayerId, MoeLayerInfo>,
    placement: Option<&ExpertPlacement>,
    rank: Rank,
    ranks: usize,
) -> Vec<(LayerId, u32, u32)> {
    let mut owned = Vec::new();
    for (&layer, info) in layers {
        let given = placement.and_then(|placement| placement.layer(layer)).cloned();
        let placed = given.unwrap_or_else(|| LayerPlacement::contiguous(info.num_experts, ranks));
        let ranges = placed.ranges_of(rank);
        if ranges.is_empty() {
            owned.push((layer, 0, 0));
        }
        owned.extend(ranges.into_iter().map(|(first, count)| (layer, first, count)));
    }
    owned
}
