//! The model of fuzz targets, and what the step loop relies on; not part of the interface.

use std::collections::BTreeMap;
use std::time::Duration;

use expertd_types::{Coverage, Generation, LayerId, LayerRange, StepId, WeightFingerprint, WeightVersion};

use crate::backend::{Limits, ModelInfo, MoeLayerInfo, Receipt, Request};

const HIDDEN: usize = 4;
const LAYER: u32 = 1;
const BY_TOKEN_ID: u32 = 2;
const EXPERTS: usize = 6;
const MAX_K: usize = 3;
const VOCABULARY: usize = 10;
const FINGERPRINT: WeightFingerprint = WeightFingerprint { coverage: Coverage::Sampled, digest: [7; 16] };
/// Largest message, in bytes.
const MESSAGE_LIMIT: usize = 64 << 10;

/// Checks what the step loop relies on, apart from the rows.
///
/// # Panics
/// If the request breaks a promise of [`Request`].
pub fn check_request(model: &ModelInfo, request: &Request) {
    let layer = &model.layers[&request.layer];
    assert!((1..=model.limits.max_tokens_per_request).contains(&request.tokens));
    assert_eq!(request.token_ids.is_some(), layer.routes_by_token_id);
    if let Some(ids) = &request.token_ids {
        assert_eq!(ids.len(), request.tokens * 4);
        assert!(words(ids).all(|id| (0..VOCABULARY as i32).contains(&id)));
    }
    let Some(routing) = &request.routing else { return };
    assert!((1..=MAX_K).contains(&routing.k));
    let ids: Vec<i32> = words(&routing.ids).collect();
    assert_eq!(ids.len(), request.tokens * routing.k);
    for row in ids.chunks(routing.k) {
        for (at, id) in row.iter().enumerate() {
            assert!((0..EXPERTS as i32).contains(id) && !row[..at].contains(id), "ids {row:?}");
        }
    }
    assert_eq!(routing.weights.len(), ids.len() * 4);
    assert!(words(&routing.weights).all(|bits| f32::from_bits(bits as u32).is_finite()));
}

fn words(bytes: &[u8]) -> impl Iterator<Item = i32> {
    bytes.as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word))
}

/// The model of the targets.
#[must_use]
pub fn model() -> ModelInfo {
    let layer = |by_token_id| MoeLayerInfo {
        num_experts: EXPERTS,
        top_k: 2,
        max_k: MAX_K,
        expert_width: 8,
        shared_width: 0,
        gate: String::new(),
        gate_json: "{}".to_owned(),
        routes_by_token_id: by_token_id,
        vocabulary: if by_token_id { VOCABULARY } else { 0 },
    };
    ModelInfo {
        name: "fuzz".to_owned(),
        family: "mixtral".to_owned(),
        weight_version: WeightVersion(7),
        weight_fingerprint: FINGERPRINT,
        generation: Generation(1),
        hidden: HIDDEN,
        num_layers: 3,
        held: LayerRange::whole(3),
        layers: BTreeMap::from([(LayerId(LAYER), layer(false)), (LayerId(BY_TOKEN_ID), layer(true))]),
        weight_formats: vec!["bf16".to_owned()],
        limits: Limits {
            max_tokens_per_request: 4096,
            max_tokens_per_step: 64,
            max_tokens_per_rank: 64,
            max_message_bytes: MESSAGE_LIMIT,
            max_streams_per_connection: 16,
            max_requests_per_stream: 8,
            max_connections: 64,
            max_bytes_in_flight: 16 << 20,
        },
        sources: 0,
        placement: Vec::new(),
    }
}

/// The receipt of a request that one step computed.
#[must_use]
pub fn receipt(request: &Request) -> Receipt {
    let returned = request.routing.as_ref().filter(|_| request.return_routing);
    let (topk_ids, topk_weights) =
        returned.map(|routing| (routing.ids.clone(), routing.weights.clone())).unwrap_or_default();
    Receipt {
        steps: vec![StepId(1)],
        generation: Generation(1),
        weight_version: WeightVersion(7),
        weight_fingerprint: FINGERPRINT,
        tokens_per_rank: vec![request.tokens as u32],
        timings: Vec::new(),
        topk_ids,
        topk_weights,
        queue_time: Duration::ZERO,
        step_time: Duration::ZERO,
    }
}
