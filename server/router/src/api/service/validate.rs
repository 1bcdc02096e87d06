//! Converts a message to a request of the backend, or lists its invalid fields.
//!
//! Nothing is copied: rows, ids and weights stay slices of the received message and may be unaligned.

use std::time::Instant;

use bytes::Bytes;
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{self, ForwardRequest, SharedExperts};

use super::unowned::{self, UNOWNED};
use crate::api::failure::{Failure, Violation};
use crate::backend::{ClientKey, GivenRouting, MAX_NAME_BYTES, ModelInfo, MoeLayerInfo, Request, RequestId};
use expertd_types::{ChunkedBytes, DType, LayerId, NoFingerprint, WeightFingerprint, WeightVersion};

/// The parts of a request that are not in its message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Envelope {
    pub(crate) id: RequestId,
    pub(crate) client: ClientKey,
    pub(crate) deadline: Option<Instant>,
}

/// Checks a request against the model. `None` for zero tokens: the answer is empty and needs no step.
pub(in crate::api) fn validate(
    model: &ModelInfo,
    message: ForwardRequest,
    envelope: Envelope,
) -> Result<Option<Request>, Failure> {
    check(model, message, Rows::Message, envelope)
}

/// The same for a request of at least one row, whose rows lie in the memory of a session.
pub(crate) fn validate_session(
    model: &ModelInfo,
    message: ForwardRequest,
    envelope: Envelope,
) -> Result<Request, Failure> {
    let request = check(model, message, Rows::Session, envelope)?;
    request.ok_or_else(|| Failure::field("tokens", "must be at least 1, found 0"))
}

/// Where the rows of a request are.
enum Rows {
    /// In the message.
    Message,
    /// In the memory of a session, where their places were checked.
    Session,
}

fn check(
    model: &ModelInfo,
    message: ForwardRequest,
    rows: Rows,
    envelope: Envelope,
) -> Result<Option<Request>, Failure> {
    check_model(model, &message.model)?;
    let layer_id = LayerId(message.layer);
    let layer = held_layer(model, layer_id)?;
    let expected_version = expected_version(model, &message)?;

    let mut found = Violations::default();
    let tokens = message.tokens as usize;
    if tokens > model.limits.max_tokens_per_request {
        let limit = model.limits.max_tokens_per_request;
        return Err(Failure::field("tokens", format!("at most {limit} per request, found {tokens}")));
    }
    let dtype = u32::try_from(message.dtype).ok().and_then(DType::from_code);
    if dtype.is_none() {
        found.add(
            "dtype",
            format!("must be DTYPE_BF16, DTYPE_F16 or DTYPE_F32, found {}", name_of(message.dtype)),
        );
    }
    let rows = match rows {
        Rows::Message => found.rows(message.payload, tokens, model.hidden, dtype),
        Rows::Session => ChunkedBytes::default(),
    };
    let routing = message.routing.and_then(|routing| found.routing(routing, tokens, layer));
    let token_ids = layer.routes_by_token_id.then(|| found.token_ids(message.token_ids, tokens, layer));
    let shared_experts = match SharedExperts::try_from(message.shared_experts) {
        Ok(SharedExperts::Unspecified | SharedExperts::Include) => true,
        Ok(SharedExperts::Exclude) => false,
        Err(_) => {
            let value = message.shared_experts;
            found.add("shared_experts", format!("must be INCLUDE or EXCLUDE, found {value}"));
            true
        }
    };

    let (Some(dtype), true) = (dtype, found.0.is_empty()) else {
        return Err(Failure::Invalid { violations: found.0 });
    };
    if tokens == 0 {
        return Ok(None);
    }
    Ok(Some(Request {
        id: envelope.id,
        client: envelope.client,
        layer: layer_id,
        tokens,
        dtype,
        rows,
        routing,
        token_ids,
        shared_experts,
        expected_version,
        return_routing: message.return_routing,
        return_timings: message.return_timings,
        deadline: envelope.deadline,
    }))
}

/// The layer, if the model has it, this service holds it, and it has an MoE block.
fn held_layer(model: &ModelInfo, id: LayerId) -> Result<&MoeLayerInfo, Failure> {
    if id.index() >= model.num_layers {
        return Err(Failure::UnknownLayer { layer: id.0, num_layers: model.num_layers });
    }
    if !model.held.contains(id) {
        return Err(Failure::LayerNotHeld { layer: id.0, held: model.held });
    }
    model.layers.get(&id).ok_or_else(|| {
        Failure::field("layer", format!("layer {id} has no MoE block; GetModel lists the layers with one"))
    })
}

/// The version that must compute the answer: the loaded one if the call names it or its fingerprint, `None` if it names neither.
/// It is checked again when another version that was loaded meanwhile begins to serve.
fn expected_version(model: &ModelInfo, message: &ForwardRequest) -> Result<Option<WeightVersion>, Failure> {
    let loaded = model.weight_version;
    if let Some(expected) = message.expected_weight_version
        && expected != loaded.0
    {
        return Err(Failure::WeightVersion { expected, loaded: loaded.0 });
    }
    let fingerprint = &message.expected_weight_fingerprint;
    if !fingerprint.is_empty() {
        check_fingerprint(model, fingerprint)?;
    }
    let is_named = message.expected_weight_version.is_some() || !fingerprint.is_empty();
    Ok(is_named.then_some(loaded))
}

/// Compares the fingerprint that a call expects with that of the loaded weights.
fn check_fingerprint(model: &ModelInfo, expected: &str) -> Result<(), Failure> {
    let expected: WeightFingerprint = expected
        .parse()
        .map_err(|error: NoFingerprint| Failure::field("expected_weight_fingerprint", error.to_string()))?;
    let loaded = model.weight_fingerprint;
    if expected == loaded { Ok(()) } else { Err(Failure::WeightFingerprint { expected, loaded }) }
}

/// Checks the model's name. An empty name means the loaded model.
pub(in crate::api) fn check_model(model: &ModelInfo, name: &str) -> Result<(), Failure> {
    if name.is_empty() || name == model.name {
        return Ok(());
    }
    if name.len() > MAX_NAME_BYTES {
        let found = name.len();
        return Err(Failure::field(
            "model",
            format!("a name has at most {MAX_NAME_BYTES} bytes, found {found}"),
        ));
    }
    Err(Failure::UnknownModel { given: name.to_owned(), known: model.name.clone() })
}

fn name_of(dtype: i32) -> String {
    v1::DType::try_from(dtype).map_or_else(|_| dtype.to_string(), |dtype| dtype.as_str_name().to_owned())
}

/// Invalid fields found so far.
#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn add(&mut self, field: &'static str, text: impl Into<String>) {
        self.0.push(Violation { field, text: text.into() });
    }

    fn bytes(&mut self, field: &'static str, found: usize, expected: usize, shape: &str) -> bool {
        if found != expected {
            self.add(field, format!("must have {expected} bytes ({shape}), found {found}"));
        }
        found == expected
    }

    fn rows(
        &mut self,
        payload: Option<Payload>,
        tokens: usize,
        hidden: usize,
        dtype: Option<DType>,
    ) -> ChunkedBytes {
        match payload {
            Some(Payload::Inline(rows)) => {
                if let Some(dtype) = dtype {
                    let shape = format!("{tokens} tokens of {hidden} {dtype}");
                    self.bytes("inline", rows.len(), tokens * hidden * dtype.size(), &shape);
                }
                return rows.into();
            }
            None if tokens == 0 => {}
            None => self.add("inline", "the rows are missing"),
        }
        ChunkedBytes::default()
    }

    fn routing(&mut self, routing: v1::Routing, tokens: usize, layer: &MoeLayerInfo) -> Option<GivenRouting> {
        let k = if routing.k == 0 { layer.top_k } else { routing.k as usize };
        if k == 0 || k > layer.max_k {
            self.add("routing.k", format!("must be 1 to {} for this layer, found {k}", layer.max_k));
            return None;
        }
        let shape = format!("{tokens} tokens, k = {k}, 4 bytes each");
        let expected = tokens * k * 4;
        let ids_fit = self.bytes("routing.topk_ids", routing.topk_ids.len(), expected, &shape);
        let weights_fit = self.bytes("routing.topk_weights", routing.topk_weights.len(), expected, &shape);
        if ids_fit && let Err(text) = check_ids(&routing.topk_ids, k, layer.num_experts) {
            self.add("routing.topk_ids", text);
        }
        if weights_fit
            && ids_fit
            && let Err(text) = check_weights(&routing.topk_weights, &routing.topk_ids, k)
        {
            self.add("routing.topk_weights", text);
        }
        let (ids, weights) = (routing.topk_ids, routing.topk_weights);
        if !self.0.is_empty() {
            return None;
        }
        Some(match unowned::replace(&ids, &weights, k, layer.num_experts) {
            None => GivenRouting { ids, weights, k, as_given: None },
            Some(replaced) => GivenRouting {
                ids: replaced.ids,
                weights: replaced.weights,
                k,
                as_given: Some((ids, weights)),
            },
        })
    }

    fn token_ids(&mut self, ids: Bytes, tokens: usize, layer: &MoeLayerInfo) -> Bytes {
        let shape = format!("{tokens} int32; this layer routes by token id");
        if self.bytes("token_ids", ids.len(), tokens * 4, &shape) {
            let bad = le_words(&ids)
                .map(i32::from_le_bytes)
                .enumerate()
                .find(|&(_, id)| !in_range(id, layer.vocabulary));
            if let Some((token, id)) = bad {
                self.add(
                    "token_ids",
                    format!(
                        "token {token} has id {id}, expected 0 to {}",
                        layer.vocabulary.saturating_sub(1)
                    ),
                );
            }
        }
        ids
    }
}

fn le_words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> + '_ {
    bytes.as_chunks::<4>().0.iter().copied()
}

fn in_range(id: i32, bound: usize) -> bool {
    usize::try_from(id).is_ok_and(|id| id < bound)
}

/// Checks that all ids are in range and distinct within a row, because ids become addresses. −1 is exempt, since it is
/// replaced.
fn check_ids(ids: &[u8], k: usize, num_experts: usize) -> Result<(), String> {
    let mut seen = vec![0u64; num_experts.div_ceil(64)];
    for (token, row) in ids.chunks_exact(k * 4).enumerate() {
        let owned = || le_words(row).map(i32::from_le_bytes).filter(|&id| id != UNOWNED);
        for id in owned() {
            if !in_range(id, num_experts) {
                return Err(format!(
                    "token {token} names expert {id}, expected 0 to {}, or -1 for none",
                    num_experts.saturating_sub(1)
                ));
            }
            let (word, bit) = (id as usize / 64, 1u64 << (id as usize % 64));
            if seen[word] & bit != 0 {
                return Err(format!("token {token} names expert {id} twice"));
            }
            seen[word] |= bit;
        }
        for id in owned() {
            seen[id as usize / 64] = 0;
        }
    }
    Ok(())
}

/// Checks that all weights are finite. Weights of −1 are exempt, since they are ignored.
fn check_weights(weights: &[u8], ids: &[u8], k: usize) -> Result<(), String> {
    let bad = le_words(weights).zip(le_words(ids)).position(|(weight, id)| {
        !f32::from_le_bytes(weight).is_finite() && i32::from_le_bytes(id) != UNOWNED
    });
    match bad {
        Some(at) => Err(format!("token {} has a weight that is not finite", at / k)),
        None => Ok(()),
    }
}
