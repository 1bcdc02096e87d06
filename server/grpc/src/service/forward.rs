//! What unary calls and streams have in common: a message becomes a request for the step loop, which is taken in and answered.

use std::time::Duration;

use bytes::Bytes;
use expertd_core::backend::{Answer, Backend, ModelInfo, Pending, Receipt, Request};
use expertd_core::failure::Failure;
use expertd_core::validate::{Asked, AskedRouting, AskedRows, Envelope, check_any, check_model};
use expertd_proto::v1::forward_request::Payload;
use expertd_proto::v1::{ForwardRequest, ForwardResponse, SharedExperts};
use expertd_telemetry::{RequestMetrics, RequestTrace};
use expertd_types::LayerId;
use tokio::sync::oneshot;

use super::convert;
use crate::bytes::budget::{MessageCharge, guarded};

/// Validates a request and submits it; one without tokens is answered at once. The rows keep the ticket until the scheduler drops them.
pub(crate) fn take_in(
    backend: &dyn Backend,
    metrics: &RequestMetrics,
    message: ForwardRequest,
    envelope: Envelope,
    ticket: MessageCharge,
    trace: Option<&RequestTrace>,
) -> Result<Pending, Failure> {
    let model = backend.model();
    let Some(mut request) = validate(&model, message, envelope)? else {
        let (sender, pending) = oneshot::channel();
        let _ = sender.send(Ok(empty_answer(&model)));
        return Ok(pending);
    };
    metrics.admitted(request.tokens);
    if let Some(trace) = trace {
        request.describe_in(trace);
    }
    request.rows = guarded(request.rows, ticket);
    tracing::trace!(request = %request.id, layer = %request.layer, tokens = request.tokens, "submitted to the step loop");
    backend.submit(request)
}

/// The answer to a request without tokens.
fn empty_answer(model: &ModelInfo) -> Answer {
    let receipt = Receipt {
        steps: Vec::new(),
        generation: model.generation,
        weight_version: model.weight_version,
        weight_fingerprint: model.weight_fingerprint,
        tokens_per_rank: vec![0; model.sources],
        timings: Vec::new(),
        topk_ids: Bytes::new(),
        topk_weights: Bytes::new(),
        queue_time: Duration::ZERO,
        step_time: Duration::ZERO,
    };
    Answer { rows: Bytes::new(), receipt }
}

/// Waits for the answer of a request that was taken in. Timings of steps are part of it if `return_timings`.
pub(crate) async fn answer(
    pending: Pending,
    return_timings: bool,
    trace: Option<&RequestTrace>,
) -> Result<ForwardResponse, Failure> {
    let answer = pending.await.map_err(|_| {
        let reason = "the scheduler dropped the request".to_owned();
        Failure::Unavailable { reason, retry_after: Duration::from_millis(500) }
    })??;
    if let Some(trace) = trace {
        answer.receipt.describe_in(trace);
    }
    let mut response = convert::response(answer);
    if let Some(receipt) = response.receipt.as_mut().filter(|_| !return_timings) {
        receipt.timings.clear();
    }
    Ok(response)
}

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
    let rows = message.payload.map(|Payload::Inline(rows)| rows);
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
    }
}
