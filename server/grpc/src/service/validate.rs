//! Turns a message into a request for the step loop.

use expertd_core::backend::{ModelInfo, Request};
use expertd_core::failure::Failure;
use expertd_core::validate::{Asked, AskedRouting, AskedRows, Envelope, check_any, check_model};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, SharedExperts};
use expertd_types::LayerId;

/// Checks a message against the model. `None` for zero tokens: the answer is empty and needs no step.
pub(crate) fn validate(
    model: &ModelInfo,
    message: ForwardRequest,
    envelope: Envelope,
) -> Result<Option<Request>, Failure> {
    check_model(model, &message.model)?;
    check_any(model, asked(message), envelope)
}

fn asked(message: ForwardRequest) -> Asked {
    let rows = message.payload.map(|Payload::Inline(rows)| rows.into());
    Asked {
        layer: LayerId(message.layer),
        tokens: message.tokens as usize,
        dtype: message.dtype.cast_unsigned(),
        rows: AskedRows::Given(rows),
        routing: message.routing.map(|given| AskedRouting {
            ids: given.topk_ids,
            weights: given.topk_weights,
            k: given.k,
        }),
        token_ids: message.token_ids,
        shared_experts: match SharedExperts::try_from(message.shared_experts) {
            Ok(SharedExperts::Unspecified | SharedExperts::Include) => Ok(true),
            Ok(SharedExperts::Exclude) => Ok(false),
            Err(_) => Err(message.shared_experts),
        },
        expected_version: message.expected_weight_version,
        expected_fingerprint: message.expected_weight_fingerprint,
        return_routing: message.return_routing,
        return_timings: message.return_timings,
    }
}
