//! Converts what a call asks for to a request of the step loop, or lists its invalid fields.
//!
//! Nothing is copied: rows, ids and weights stay slices of the received message and may be unaligned.

mod unowned;

use std::time::Instant;

use bytes::Bytes;

use self::unowned::UNOWNED;
use crate::backend::{
    ClientKey, ConnectionKey, GivenRouting, MAX_NAME_BYTES, ModelInfo, MoeLayerInfo, Request, RequestId,
};
use crate::failure::{Failure, Violation};
use expertd_types::{DType, LayerId, NoFingerprint, WeightFingerprint, WeightVersion};

/// The parts of a request that are not in its message.
#[derive(Clone, Copy, Debug)]
pub struct Envelope {
    /// Number of the request.
    pub id: RequestId,
    /// Its client, for fairness.
    pub client: ClientKey,
    /// Its connection or session.
    pub connection: ConnectionKey,
    /// Time after which the answer is of no use to the caller.
    pub deadline: Option<Instant>,
}

/// The request of a call, whichever way it came.
pub struct Asked {
    /// The layer, which the model may lack.
    pub layer: LayerId,
    /// Number of rows.
    pub tokens: usize,
    /// The number of [`DType::from_code`].
    pub dtype: u32,
    /// Where the rows are.
    pub rows: AskedRows,
    /// `None`: the layer's gate routes the rows.
    pub routing: Option<AskedRouting>,
    /// Row-major int32 little-endian `[tokens]`; may be empty where the layer does not route by token id.
    pub token_ids: Bytes,
    /// Whether shared experts are part of the output; otherwise the number that means neither.
    pub shared_experts: Result<bool, i32>,
    /// The only version of the weights that may compute the answer.
    pub expected_version: Option<u64>,
    /// Their fingerprint; empty: any.
    pub expected_fingerprint: String,
    /// Whether the receipt carries ids and weights.
    pub return_routing: bool,
}

/// Where the rows of a call are.
pub enum AskedRows {
    /// Here; `None` if the call has none.
    Given(Option<Bytes>),
    /// In memory that ranks have attached, at places that were checked.
    InPlace,
}

/// Routing that a call brings along.
pub struct AskedRouting {
    /// Row-major int32 little-endian `[tokens, k]`.
    pub ids: Bytes,
    /// Row-major float32 little-endian `[tokens, k]`.
    pub weights: Bytes,
    /// 0: as many as the layer's gate chooses.
    pub k: u32,
}

/// Checks a call of at least one row against the model.
///
/// # Errors
/// [`Failure`] with every invalid field.
pub fn check(model: &ModelInfo, asked: Asked, envelope: Envelope) -> Result<Request, Failure> {
    let request = check_any(model, asked, envelope)?;
    request.ok_or_else(|| Failure::field("tokens", "must be at least 1, found 0"))
}

/// Checks a call against the model. `None` for zero tokens: the answer is empty and needs no step.
///
/// # Errors
/// [`Failure`] with every invalid field.
pub fn check_any(model: &ModelInfo, asked: Asked, envelope: Envelope) -> Result<Option<Request>, Failure> {
    let layer = held_layer(model, asked.layer)?;
    let expected_version = expected_version(model, &asked)?;

    let mut found = Violations::default();
    let tokens = asked.tokens;
    if tokens > model.limits.max_tokens_per_request {
        let limit = model.limits.max_tokens_per_request;
        return Err(Failure::field("tokens", format!("at most {limit} per request, found {tokens}")));
    }
    let dtype = DType::from_code(asked.dtype);
    if dtype.is_none() {
        found.add(
            "dtype",
            format!(
                "must be DTYPE_BF16, DTYPE_F16 or DTYPE_F32, found {}",
                if asked.dtype == 0 { "DTYPE_UNSPECIFIED".to_owned() } else { asked.dtype.to_string() }
            ),
        );
    }
    let rows = match asked.rows {
        AskedRows::Given(rows) => found.rows(rows, tokens, model.hidden, dtype),
        AskedRows::InPlace => Bytes::new(),
    };
    let routing = asked.routing.and_then(|routing| found.routing(routing, tokens, layer));
    let token_ids = layer.routes_by_token_id.then(|| found.token_ids(asked.token_ids, tokens, layer));
    let shared_experts = asked.shared_experts.unwrap_or_else(|value| {
        found.add("shared_experts", format!("must be INCLUDE or EXCLUDE, found {value}"));
        true
    });

    let (Some(dtype), true) = (dtype, found.0.is_empty()) else {
        return Err(Failure::Invalid { violations: found.0 });
    };
    if tokens == 0 {
        return Ok(None);
    }
    Ok(Some(Request {
        id: envelope.id,
        client: envelope.client,
        connection: envelope.connection,
        layer: asked.layer,
        tokens,
        dtype,
        rows,
        routing,
        token_ids,
        shared_experts,
        expected_version,
        return_routing: asked.return_routing,
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
fn expected_version(model: &ModelInfo, asked: &Asked) -> Result<Option<WeightVersion>, Failure> {
    let loaded = model.weight_version;
    if let Some(expected) = asked.expected_version
        && expected != loaded.0
    {
        return Err(Failure::WeightVersion { expected, loaded: loaded.0 });
    }
    let fingerprint = &asked.expected_fingerprint;
    if !fingerprint.is_empty() {
        check_fingerprint(model, fingerprint)?;
    }
    let is_named = asked.expected_version.is_some() || !fingerprint.is_empty();
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
///
/// # Errors
/// [`Failure`] if another model is loaded.
pub fn check_model(model: &ModelInfo, name: &str) -> Result<(), Failure> {
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

/// Invalid fields found so far.
#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn add(&mut self, field: &'static str, text: impl Into<String>) {
        self.0.push(Violation::new(field, text));
    }

    fn bytes(&mut self, field: &'static str, found: usize, expected: usize, shape: &str) -> bool {
        if found != expected {
            self.add(field, format!("must have {expected} bytes ({shape}), found {found}"));
        }
        found == expected
    }

    fn rows(&mut self, rows: Option<Bytes>, tokens: usize, hidden: usize, dtype: Option<DType>) -> Bytes {
        if rows.is_none() && tokens > 0 {
            self.add("inline", "the rows are missing");
        }
        let Some(rows) = rows else { return Bytes::new() };
        if let Some(dtype) = dtype {
            let shape = format!("{tokens} tokens of {hidden} {dtype}");
            self.bytes("inline", rows.len(), tokens * hidden * dtype.size(), &shape);
        }
        rows
    }

    fn routing(
        &mut self,
        routing: AskedRouting,
        tokens: usize,
        layer: &MoeLayerInfo,
    ) -> Option<GivenRouting> {
        let k = if routing.k == 0 { layer.top_k } else { routing.k as usize };
        if k == 0 || k > layer.max_k {
            self.add("routing.k", format!("must be 1 to {} for this layer, found {k}", layer.max_k));
            return None;
        }
        let shape = format!("{tokens} tokens, k = {k}, 4 bytes each");
        let expected = tokens * k * 4;
        let ids_fit = self.bytes("routing.topk_ids", routing.ids.len(), expected, &shape);
        let weights_fit = self.bytes("routing.topk_weights", routing.weights.len(), expected, &shape);
        if ids_fit && let Err(text) = check_ids(&routing.ids, k, layer.num_experts) {
            self.add("routing.topk_ids", text);
        }
        if weights_fit
            && ids_fit
            && let Err(text) = check_weights(&routing.weights, &routing.ids, k)
        {
            self.add("routing.topk_weights", text);
        }
        let (ids, weights) = (routing.ids, routing.weights);
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
