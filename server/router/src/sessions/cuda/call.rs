//! A call of a CUDA session that the step loop has.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use expertd_ipc::{AttachedRows, Raise, RowSource};
use expertd_session::cuda::wire::{PreparedCall, RoutingLayout};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use tonic::Code;

use super::super::completion::{GIVEN_UP, completion, end_trace, failed};
use super::state::CudaSession;
use crate::api::Failure;
use crate::backend::Receipt;
use crate::steps::{CallError, Caller, Raising};
use crate::telemetry::RequestTrace;

/// A call of a CUDA session, from admission to its completion. A call that is dropped without an answer fails.
#[derive(Debug)]
pub(super) struct CudaCall {
    session: Arc<CudaSession>,
    doorbell: u32,
    /// Number of the call among the doorbell's calls.
    call: u64,
    /// Offset of the rows in the client's memory, in bytes.
    rows: u64,
    /// Offset of the output, in bytes.
    output: u64,
    /// Where the call's routing is returned, if the client asked for it.
    returned: Option<RoutingLayout>,
    tokens: usize,
    began: Instant,
    /// The call's span, if it is sampled.
    trace: Option<Arc<RequestTrace>>,
    raising: Raising,
    is_complete: bool,
}

impl CudaCall {
    /// Call number `call` of a doorbell, for `tokens` rows, with routing at `layout`.
    pub(super) fn new(
        session: &Arc<CudaSession>,
        (doorbell, call): (u32, u64),
        prepared: &PreparedCall,
        (tokens, layout): (usize, RoutingLayout),
        began: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Self {
        let returns = prepared.flags & RequestRecord::RETURN_ROUTING != 0;
        CudaCall {
            session: Arc::clone(session),
            doorbell,
            call,
            rows: prepared.rows,
            output: prepared.output,
            returned: returns.then_some(layout),
            tokens,
            began,
            trace,
            raising: Raising::Caller,
            is_complete: false,
        }
    }

    /// Ends the call without an answer.
    pub(super) fn end(mut self, failure: Failure) {
        let record = failed(self.call, failure);
        self.complete(&record, None);
    }

    fn complete(&mut self, record: &CompletionRecord, receipt: Option<&Receipt>) {
        self.is_complete = true;
        self.session.complete(self.doorbell, record, self.tokens, self.began.elapsed(), self.raising);
        end_trace(self.trace.take(), record.code, receipt);
    }
}

impl Caller for CudaCall {
    fn has_left(&self) -> bool {
        self.session.session.is_closing()
    }

    fn rows(&self, range: Range<usize>) -> RowSource<'_> {
        RowSource::Attached(AttachedRows {
            memory: self.session.session.memory_id(),
            input: self.rows + range.start as u64,
            output: self.output + range.start as u64,
            bytes: range.len(),
        })
    }

    fn answer(mut self: Box<Self>, _rows: Bytes, receipt: Receipt, _is_idle: bool) {
        if let Some(layout) = &self.returned {
            self.session.return_routing(self.doorbell, layout, &receipt.topk_ids, &receipt.topk_weights);
        }
        let record = completion(self.call, &receipt);
        self.complete(&record, Some(&receipt));
    }

    fn fail(self: Box<Self>, error: CallError) {
        self.end(error.into());
    }

    fn raise(&self) -> Option<Raise> {
        let control = self.session.control();
        Some(Raise {
            memory: self.session.session.memory_id().0,
            word: control.doorbell_offset(self.doorbell) as u32,
            number: control.number_offset(self.doorbell) as u32,
            reserved: 0,
            call: self.call,
        })
    }

    fn set_raising(&mut self, raising: Raising) {
        self.raising = raising;
    }
}

impl Drop for CudaCall {
    fn drop(&mut self) {
        if !self.is_complete {
            let record = CompletionRecord::failed(self.call, Code::Unavailable as u32, GIVEN_UP);
            self.complete(&record, None);
        }
    }
}
