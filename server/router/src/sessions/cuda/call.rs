//! A call of a CUDA session that the step loop has.

use std::sync::Arc;
use std::time::Instant;

use expertd_ipc::{AttachedRows, Raise};
use expertd_session::cuda::wire::RoutingLayout;
use expertd_session::wire::CompletionRecord;
use expertd_types::MemoryId;
use tonic::Code;

use super::super::call::{completion, end_trace, failed};
use super::state::CudaState;
use crate::api::Failure;
use crate::backend::{Receipt, StepError};
use crate::telemetry::RequestTrace;

/// Who raises the completion words of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Raising {
    /// The router.
    Router,
    /// Rank 0 has raised them; the client may have begun its next call.
    Rank,
    /// Rank 0, which was killed: it has raised them or was about to.
    KilledRank,
}

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
    /// Where the call's routing is returned, if the client asked for it.
    pub(super) returned: Option<RoutingLayout>,
    pub(super) tokens: usize,
    pub(super) began: Instant,
    /// The call's span, if it is sampled.
    pub(super) trace: Option<Arc<RequestTrace>>,
    /// Who raises the completion words.
    pub(super) raising: Raising,
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

    /// The completion word, for rank 0.
    pub(crate) fn raise(&self) -> Raise {
        let control = self.session.control();
        Raise {
            memory: self.memory().0,
            word: control.doorbell_offset(self.doorbell) as u32,
            number: control.number_offset(self.doorbell) as u32,
            reserved: 0,
            call: self.call,
        }
    }

    /// Sets who raises the completion words.
    pub(crate) const fn set_raising(&mut self, raising: Raising) {
        self.raising = raising;
    }

    fn memory(&self) -> MemoryId {
        self.session.memory_id()
    }

    /// Completes the call, whose output rows are in place.
    pub(crate) fn answer(mut self, receipt: &Receipt) {
        if let Some(layout) = &self.returned {
            self.session.return_routing(self.doorbell, layout, &receipt.topk_ids, &receipt.topk_weights);
        }
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
        self.session.complete(self.doorbell, record, self.tokens, self.began.elapsed(), self.raising);
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
