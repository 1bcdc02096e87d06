//! A call of a session that the step loop has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::Zeroable as _;
use expertd_ipc::{AttachedRows, RowSource};
use expertd_session::wire::{CompletionRecord, MAX_RANKS};
use expertd_shm::SharedSlice;
use expertd_types::MemoryId;
use tonic::Code;
use tonic_types::StatusExt as _;

use super::session::SessionState;
use crate::api::Failure;
use crate::backend::{Receipt, StepError};
use crate::telemetry::RequestTrace;

/// A call of a session, from admission to its completion. A call that is dropped without an answer fails.
#[derive(Debug)]
pub(crate) struct SessionCall {
    pub(super) session: Arc<SessionState>,
    /// The client's number.
    pub(super) call: u64,
    /// Offset of the rows in the row area, in bytes.
    pub(super) rows: usize,
    /// Offset of the output, in bytes.
    pub(super) output: usize,
    /// Offsets of returned ids and weights, in bytes.
    pub(super) returned: Option<(usize, usize)>,
    pub(super) tokens: usize,
    pub(super) began: Instant,
    /// The call's span, if it is sampled.
    pub(super) trace: Option<Arc<RequestTrace>>,
    pub(super) is_complete: bool,
}

impl SessionCall {
    /// Whether the client is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.session.is_closing()
    }

    /// The `bytes` bytes of rows from byte `start` on.
    pub(crate) fn source(&self, start: usize, bytes: usize) -> RowSource<'_> {
        RowSource::Session { area: self.session.memory().rows(), offset: self.rows + start, bytes }
    }

    /// The memory that holds the call's rows.
    pub(crate) fn memory(&self) -> MemoryId {
        self.session.memory_id()
    }

    /// The `bytes` bytes of rows and of output from byte `start` on, for ranks that have attached the session's memory.
    pub(crate) fn attached_rows(&self, start: usize, bytes: usize) -> AttachedRows {
        let area = self.session.memory().rows_offset();
        AttachedRows {
            memory: self.memory(),
            input: (area + self.rows + start) as u64,
            output: (area + self.output + start) as u64,
            bytes,
        }
    }

    /// The `bytes` bytes of output from byte `start` on.
    pub(crate) fn output(&self, start: usize, bytes: usize) -> Option<SharedSlice<u8>> {
        self.session.memory().rows().part(self.output + start, bytes).ok()
    }

    /// Completes the call, whose output rows are in place. `is_idle`: no step is in flight, so that the session's thread may spin.
    pub(crate) fn answer(mut self, receipt: &Receipt, is_idle: bool) {
        if let Some((ids, weights)) = self.returned {
            let memory = self.session.memory();
            // Both were checked to lie within the row area.
            let _ = memory.write_words(ids, &receipt.topk_ids);
            let _ = memory.write_words(weights, &receipt.topk_weights);
        }
        let record = completion(self.call, receipt);
        self.complete(record, Some(receipt));
        if is_idle {
            self.session.expect_request();
        }
    }

    /// Ends the call without an answer.
    pub(crate) fn fail(mut self, error: StepError) {
        let record = failed(self.call, Failure::from(error));
        self.complete(record, None);
    }

    /// Drops the call without a completion, for a caller that completes it otherwise.
    pub(crate) fn forget(mut self) {
        self.is_complete = true;
    }

    fn complete(&mut self, record: CompletionRecord, receipt: Option<&Receipt>) {
        self.is_complete = true;
        let code = record.code;
        self.session.complete(record, self.tokens, self.began.elapsed());
        end_trace(self.trace.take(), code, receipt);
    }
}

impl Drop for SessionCall {
    fn drop(&mut self) {
        if !self.is_complete {
            let text = "the call was given up by the step loop; try it again";
            self.complete(CompletionRecord::failed(self.call, Code::Unavailable as u32, text), None);
        }
    }
}

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
