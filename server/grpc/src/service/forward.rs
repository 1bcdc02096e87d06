//! What unary calls and streams have in common: a request is taken in and answered.

use std::sync::Arc;
use std::time::Duration;

use expertd_core::backend::{Backend, Pending, StepError};
use expertd_core::failure::Failure;
use expertd_core::validate::Envelope;
use expertd_proto::v1::{ForwardRequest, ForwardResponse};
use expertd_telemetry::{RequestMetrics, RequestTrace};

use super::convert;
use super::validate::validate;
use crate::bytes::charges::{Ticket, guarded};

/// An accepted request.
pub(crate) enum Taken {
    /// Its answer is pending.
    Pending(Pending),
    /// Its answer is already known.
    Answered(Box<ForwardResponse>),
}

/// Validates a request and submits it. The rows keep the ticket until the scheduler drops them.
pub(crate) fn take_in(
    backend: &dyn Backend,
    metrics: &RequestMetrics,
    message: ForwardRequest,
    envelope: Envelope,
    ticket: Ticket,
    trace: Option<&RequestTrace>,
) -> Result<Taken, Failure> {
    let model = backend.model();
    let Some(mut request) = validate(&model, message, envelope)? else {
        return Ok(Taken::Answered(Box::new(convert::empty_response(&model))));
    };
    metrics.admitted(request.tokens);
    if let Some(trace) = trace {
        request.describe_in(trace);
    }
    request.rows = request.rows.into_iter().map(|piece| guarded(piece, Arc::clone(&ticket))).collect();
    tracing::trace!(request = %request.id, layer = %request.layer, tokens = request.tokens, "submitted to the step loop");
    Ok(Taken::Pending(backend.submit(request)?))
}

/// Waits for the answer of a request that was taken in.
pub(crate) async fn answer(
    pending: Pending,
    trace: Option<&RequestTrace>,
) -> Result<ForwardResponse, Failure> {
    let mut answer = pending.await.map_err(|_| {
        let reason = "the scheduler dropped the request".to_owned();
        StepError::Unavailable { reason, retry_after: Duration::from_millis(500) }
    })??;
    if let Some(trace) = trace {
        answer.receipt.move_timings_to(trace);
    }
    Ok(convert::response(answer))
}
