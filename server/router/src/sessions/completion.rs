//! Completion records: what a client reads of a call that has ended.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::Zeroable as _;
use expertd_session::wire::{CompletionRecord, MAX_RANKS};
use tonic::Code;
use tonic_types::StatusExt as _;

use crate::api::Failure;
use crate::backend::Receipt;
use crate::steps::CallError;
use crate::telemetry::RequestTrace;

impl From<CallError> for Failure {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Refused(error) => Failure::Submit(error),
            CallError::Failed(error) => Failure::Step(error),
        }
    }
}

/// The text of a call that was dropped without an answer.
pub(super) const GIVEN_UP: &str = "the call was given up by the step loop; try it again";

/// Ends the span of a call with the code of its completion. The client has its answer by then and does not wait for this.
pub(super) fn end_trace(trace: Option<Arc<RequestTrace>>, code: u32, receipt: Option<&Receipt>) {
    let Some(trace) = trace else { return };
    if let Some(receipt) = receipt {
        trace.describe(receipt);
    }
    trace.end(Code::from_i32(code.cast_signed()));
}

/// The completion of a call that was answered.
pub(super) fn completion(call: u64, receipt: &Receipt) -> CompletionRecord {
    let mut tokens_per_rank = [0; MAX_RANKS];
    let ranks = receipt.tokens_per_rank.len().min(MAX_RANKS);
    tokens_per_rank[..ranks].copy_from_slice(&receipt.tokens_per_rank[..ranks]);
    let mut phase_ns = [0_u64; 7];
    for timing in &receipt.timings {
        for (sum, time) in phase_ns.iter_mut().zip(timing.phases.all()) {
            *sum = sum.saturating_add(nanos(time));
        }
    }
    let record = CompletionRecord {
        call,
        generation: receipt.generation.0,
        weight_version: receipt.weight_version.0,
        first_step: receipt.steps.first().map_or(0, |step| step.0),
        last_step: receipt.steps.last().map_or(0, |step| step.0),
        steps: receipt.steps.len() as u32,
        ranks: ranks as u32,
        queue_ns: nanos(receipt.queue_time),
        step_ns: nanos(receipt.step_time),
        phase_ns,
        tokens_per_rank,
        ..CompletionRecord::zeroed()
    };
    record.with_text(&receipt.weight_fingerprint.to_string())
}

/// The completion of a call that failed.
pub(super) fn failed(call: u64, failure: Failure) -> CompletionRecord {
    let retry_after_ns = failure.retry_after().map_or(0, nanos);
    let status = tonic::Status::from(failure);
    let reason = status.get_details_error_info().map(|info| info.reason).unwrap_or_default();
    let fields = status.get_details_bad_request().map(|bad| bad.field_violations).unwrap_or_default();
    let record = CompletionRecord::failed(call, status.code() as i32 as u32, status.message());
    CompletionRecord {
        retry_after_ns,
        ..record.with_reason(&reason, fields.iter().map(|violation| violation.field.as_str()))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
