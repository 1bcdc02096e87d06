//! A call of a session that the step loop has.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use expertd_core::backend::{Receipt, Request};
use expertd_core::failure::{Code, Failure};
use expertd_core::steps::{Caller, Raising, Steps};
use expertd_core::validate::{Asked, AskedRows};
use expertd_ipc::{AttachedRows, Raise, RowSource};
use expertd_session::wire::{CompletionRecord, RequestRecord};
use expertd_telemetry::RequestTrace;
use expertd_types::{LayerId, MemoryId};

use crate::completion::{completion, failed};
use crate::session::Session;

/// The text of a call that was dropped without an answer.
const GIVEN_UP: &str = "the call was given up by the step loop; try it again";

/// The client's side of a call: where its routing and its completion go.
pub(crate) trait CallEnd: fmt::Debug + Send {
    /// The session.
    fn session(&self) -> &Session;

    /// Writes the ids and weights that the client has asked for.
    fn return_routing(&self, ids: &[u8], weights: &[u8]);

    /// Ends the call for the client.
    fn complete(&self, record: &CompletionRecord, tokens: usize, elapsed: Duration);

    /// The call was answered while no step is in flight: the client may soon send the next one.
    fn expect_call(&self) {}

    /// The completion word of call number `call`, if rank 0 can raise it.
    fn raise(&self, _call: u64) -> Option<Raise> {
        None
    }

    /// Sets who raises the completion word.
    fn set_raising(&mut self, _raising: Raising) {}
}

/// The places of a call's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowPlaces {
    /// Offset of the rows in the session's memory, in bytes.
    pub(crate) input: u64,
    /// Offset of the output, in bytes.
    pub(crate) output: u64,
    /// Number of rows.
    pub(crate) tokens: usize,
}

/// A call of a session, from admission to its completion. A call that is dropped without an answer fails.
#[derive(Debug)]
pub(crate) struct Call<E: CallEnd> {
    end: E,
    /// The client's number.
    number: u64,
    places: RowPlaces,
    began: Instant,
    /// The call's span, if it is sampled.
    trace: Option<Arc<RequestTrace>>,
    is_complete: bool,
}

impl<E: CallEnd + 'static> Call<E> {
    pub(crate) const fn new(
        end: E,
        number: u64,
        places: RowPlaces,
        began: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Self {
        Call { end, number, places, began, trace, is_complete: false }
    }

    /// Hands the call to the step loop if its request is valid; otherwise ends it.
    pub(crate) fn submit(mut self, request: Result<Request, Failure>, steps: &dyn Steps) {
        match request {
            Ok(request) => {
                self.end.session().admitted(request.tokens);
                if let Some(trace) = &self.trace {
                    request.describe_in(trace);
                }
                steps.take_in(request, Box::new(self));
            }
            Err(failure) => self.complete(&failed(self.number, &failure), None),
        }
    }
}

impl<E: CallEnd> Call<E> {
    fn complete(&mut self, record: &CompletionRecord, receipt: Option<&Receipt>) {
        self.is_complete = true;
        self.end.complete(record, self.places.tokens, self.began.elapsed());
        // The client has its answer by then and does not wait for the span.
        let Some(trace) = self.trace.take() else { return };
        if let Some(receipt) = receipt {
            receipt.describe_in(&trace);
        }
        trace.end(record.code);
    }
}

impl<E: CallEnd> Caller for Call<E> {
    fn has_left(&self) -> bool {
        self.end.session().is_closing()
    }

    fn memory(&self) -> Option<MemoryId> {
        Some(self.end.session().memory_id())
    }

    fn rows(&self, range: Range<usize>) -> RowSource<'_> {
        RowSource::Attached(AttachedRows {
            memory: self.end.session().memory_id(),
            input: self.places.input + range.start as u64,
            output: self.places.output + range.start as u64,
            bytes: range.len(),
        })
    }

    fn answer(mut self: Box<Self>, _rows: Bytes, receipt: Receipt, is_idle: bool) {
        self.end.return_routing(&receipt.topk_ids, &receipt.topk_weights);
        let record = completion(self.number, &receipt);
        self.complete(&record, Some(&receipt));
        if is_idle {
            self.end.expect_call();
        }
    }

    fn fail(mut self: Box<Self>, failure: Failure) {
        let record = failed(self.number, &failure);
        self.complete(&record, None);
    }

    fn raise(&self) -> Option<Raise> {
        self.end.raise(self.number)
    }

    fn set_raising(&mut self, raising: Raising) {
        self.end.set_raising(raising);
    }
}

impl<E: CallEnd> Drop for Call<E> {
    fn drop(&mut self) {
        if !self.is_complete {
            let record = CompletionRecord::failed(self.number, Code::Unavailable as u32, GIVEN_UP);
            self.complete(&record, None);
        }
    }
}

/// What a record asks for, without what it carries.
pub(crate) fn asked(flags: u32, layer: u32, tokens: u32, dtype: u32, version: u64) -> Asked {
    let has = |flag| flags & flag != 0;
    Asked {
        layer: LayerId(layer),
        tokens: tokens as usize,
        dtype,
        rows: AskedRows::InPlace,
        routing: None,
        token_ids: Bytes::new(),
        shared_experts: Ok(!has(RequestRecord::EXCLUDE_SHARED)),
        expected_version: has(RequestRecord::EXPECT_WEIGHT_VERSION).then_some(version),
        expected_fingerprint: String::new(),
        return_routing: has(RequestRecord::RETURN_ROUTING),
    }
}
