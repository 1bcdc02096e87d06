//! A call of a CUDA session that the step loop has.

use std::sync::Arc;
use std::time::Instant;

use expertd_ipc::AttachedRows;
use expertd_session::wire::CompletionRecord;
use expertd_types::MemoryId;
use tonic::Code;

use super::super::call::{completion, end_trace, failed};
use super::state::CudaState;
use crate::api::Failure;
use crate::backend::{Receipt, StepError};
use crate::telemetry::RequestTrace;

/// A call of a CUDA session, from admission to its completion. A call that is dropped without an answer fails.
#[derive(Debug)]
pub(crate) struct CudaCall {
    pub(super) session: Arc<CudaState>,
    pub(super) doorbell: u32,
    /// Number of the call among the doorbell's calls.
    pub(super) call: u64,
    /// Offset of the rows in the client's memory, in bytes.
    pub(super) rows: u64,
    /// Offset of the output, in bytes.
    pub(super) output: u64,
    pub(super) tokens: usize,
    pub(super) began: Instant,
    /// The call's span, if it is sampled.
    pub(super) trace: Option<Arc<RequestTrace>>,
    pub(super) is_complete: bool,
}

impl CudaCall {
    /// Whether the client is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.session.is_closing()
    }

    /// The `bytes` bytes of rows and of output from byte `start` on.
    pub(crate) fn attached_rows(&self, start: usize, bytes: usize) -> AttachedRows {
        AttachedRows {
            memory: self.memory(),
            input: self.rows + start as u64,
            output: self.output + start as u64,
            bytes,
        }
    }

    fn memory(&self) -> MemoryId {
        self.session.memory_id()
    }

    /// Completes the call, whose output rows are in place.
    pub(crate) fn answer(mut self, receipt: &Receipt) {
        let record = completion(self.call, receipt);
        self.complete(&record, Some(receipt));
    }

    /// Ends the call without an answer.
    pub(crate) fn fail(mut self, error: StepError) {
        let record = failed(self.call, Failure::from(error));
        self.complete(&record, None);
    }

    /// Drops the call without a completion, for a caller that completes it otherwise.
    pub(crate) fn forget(mut self) {
        self.is_complete = true;
    }

    fn complete(&mut self, record: &CompletionRecord, receipt: Option<&Receipt>) {
        self.is_complete = true;
        self.session.complete(self.doorbell, record, self.tokens, self.began.elapsed());
        end_trace(self.trace.take(), record.code, receipt);
    }
}

impl Drop for CudaCall {
    fn drop(&mut self) {
        if !self.is_complete {
            let text = "the call was given up by the step loop; try it again";
            self.complete(&CompletionRecord::failed(self.call, Code::Unavailable as u32, text), None);
        }
    }
}
