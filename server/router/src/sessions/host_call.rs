//! A call of a host session that the step loop has.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use expertd_ipc::{AttachedRows, RowSource};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use tonic::Code;

use super::completion::{GIVEN_UP, completion, end_trace, failed};
use super::host::HostSession;
use crate::api::Failure;
use crate::backend::Receipt;
use crate::steps::{CallError, Caller};
use crate::telemetry::RequestTrace;

/// A call of a session, from admission to its completion. A call that is dropped without an answer fails.
#[derive(Debug)]
pub(super) struct HostCall {
    session: Arc<HostSession>,
    /// The client's number.
    call: u64,
    /// Offset of the rows in the row area, in bytes.
    rows: usize,
    /// Offset of the output, in bytes.
    output: usize,
    /// Offsets of returned ids and weights, in bytes.
    returned: Option<(usize, usize)>,
    tokens: usize,
    began: Instant,
    /// The call's span, if it is sampled.
    trace: Option<Arc<RequestTrace>>,
    is_complete: bool,
}

impl HostCall {
    /// A call that the session's table holds, and whose places were checked.
    pub(super) fn new(
        session: &Arc<HostSession>,
        record: &RequestRecord,
        tokens: usize,
        began: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Self {
        let returns = record.flags & RequestRecord::RETURN_ROUTING != 0;
        HostCall {
            session: Arc::clone(session),
            call: record.call,
            rows: record.rows as usize,
            output: record.output as usize,
            returned: returns.then_some((record.ids as usize, record.weights as usize)),
            tokens,
            began,
            trace,
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
        self.session.complete(record, self.tokens, self.began.elapsed());
        end_trace(self.trace.take(), record.code, receipt);
    }
}

impl Caller for HostCall {
    fn has_left(&self) -> bool {
        self.session.session.is_closing()
    }

    fn rows(&self, range: Range<usize>) -> RowSource<'_> {
        let area = self.session.memory().rows_offset();
        RowSource::Attached(AttachedRows {
            memory: self.session.session.memory_id(),
            input: (area + self.rows + range.start) as u64,
            output: (area + self.output + range.start) as u64,
            bytes: range.len(),
        })
    }

    fn answer(mut self: Box<Self>, _rows: Bytes, receipt: Receipt, is_idle: bool) {
        if let Some((ids, weights)) = self.returned {
            let memory = self.session.memory();
            // Both were checked to lie within the row area.
            let _ = memory.write_words(ids, &receipt.topk_ids);
            let _ = memory.write_words(weights, &receipt.topk_weights);
        }
        let record = completion(self.call, &receipt);
        self.complete(&record, Some(&receipt));
        if is_idle {
            // So that its thread and the client wake up at the same time.
            self.session.expect_request();
        }
    }

    fn fail(self: Box<Self>, error: CallError) {
        self.end(error.into());
    }
}

impl Drop for HostCall {
    fn drop(&mut self) {
        if !self.is_complete {
            let record = CompletionRecord::failed(self.call, Code::Unavailable as u32, GIVEN_UP);
            self.complete(&record, None);
        }
    }
}
