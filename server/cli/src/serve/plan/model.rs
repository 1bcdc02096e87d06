//! The description of the model for callers.

use std::collections::BTreeMap;

use super::machine::{Machine, list};
use expertd_core::backend::{Limits, ModelInfo, MoeLayerInfo, RankPlacement, owned_ranges};
use expertd_ipc::control::DeviceKind;
use expertd_model::ModelSpec;
use expertd_types::{ExpertPlacement, Generation, Rank, WeightFingerprint, WeightVersion};

/// Describes a model for callers, before its first generation.
pub(super) fn model_info(
    spec: &ModelSpec,
    name: String,
    weight_fingerprint: WeightFingerprint,
    limits: Limits,
    machine: &Machine,
    placement: Option<&ExpertPlacement>,
) -> ModelInfo {
    let Machine { gpus, shares, nodes, .. } = machine;
    let devices = machine.devices();
    let layers: BTreeMap<_, _> = spec
        .moe_layers()
        .map(|(layer, moe)| {
            let info = MoeLayerInfo {
                num_experts: moe.experts.count,
                top_k: moe.gate.top_k,
                max_k: moe.gate.top_k,
                expert_width: moe.experts.width,
                shared_width: moe.shared.as_ref().map_or(0, |shared| shared.width),
                gate: moe.gate.describe(),
                gate_json: serde_json::to_string(&moe.gate).unwrap_or_default(),
                routes_by_token_id: moe.gate.vocab().is_some(),
                vocabulary: moe.gate.vocab().unwrap_or(0),
            };
            (layer, info)
        })
        .collect();
    let mut weight_formats: Vec<String> =
        spec.moe_layers().map(|(_, moe)| moe.experts.format.to_string()).collect();
    weight_formats.sort();
    weight_formats.dedup();
    let ranks = shares.len();
    let placement = (0..)
        .zip(shares.iter().zip(nodes))
        .map(|(rank, (cores, near))| RankPlacement {
            rank: Rank(rank),
            device: match devices[rank as usize] {
                DeviceKind::Cpu => format!("cpu, cores {}", list(cores)),
                DeviceKind::Cuda => {
                    let near = near.map_or_else(String::new, |node| format!(" (NUMA node {node})"));
                    let gpu = gpus.get(rank as usize).copied().unwrap_or(rank);
                    format!("cuda, GPU {gpu}{near}, cores {}", list(cores))
                }
            },
            experts: owned_ranges(&layers, placement, Rank(rank), ranks),
        })
        .collect();
    ModelInfo {
        name,
        family: spec.model_type.clone(),
        weight_version: WeightVersion(1),
        weight_fingerprint,
        generation: Generation(0),
        hidden: spec.hidden,
        num_layers: spec.num_layers,
        held: spec.held,
        layers,
        weight_formats,
        limits,
        sources: machine.sources as usize,
        placement,
    }
}
