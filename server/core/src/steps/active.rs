//! An admitted request: its caller and its partial answer.

use std::ops::Range;

use bytes::Bytes;
use expertd_ipc::{Raise, RowsToStage};
use expertd_types::{DType, MemoryId, WeightFingerprint};

use super::caller::{Caller, Raising};
use crate::backend::{self, Request, StepTiming};
use crate::failure::Failure;
use expertd_telemetry::names;

/// The parts of an answer: rows, and expert ids and weights if requested.
pub(super) type Output = [Vec<u8>; 3];
/// Indices into an [`Output`].
pub(super) const ROWS: usize = 0;
pub(super) const IDS: usize = 1;
pub(super) const WEIGHTS: usize = 2;

/// One row of zeros, for the trial of a layer.
pub(super) struct TrialRow {
    row: Vec<u8>,
    ids: Vec<u8>,
    weights: Vec<u8>,
}

impl TrialRow {
    pub(super) fn new(hidden: usize, top_k: usize) -> Self {
        let weight = 1.0 / top_k.max(1) as f32;
        TrialRow {
            row: vec![0; hidden * DType::F32.size()],
            ids: (0..top_k as u32).flat_map(u32::to_le_bytes).collect(),
            weights: (0..top_k).flat_map(|_| weight.to_le_bytes()).collect(),
        }
    }

    /// The row to stage. `routed_by_gate`: the layer's gate chooses its experts; otherwise the first experts are given.
    pub(super) fn rows(&self, routed_by_gate: bool) -> RowsToStage<'_> {
        RowsToStage {
            rows: self.row[..].into(),
            tokens: 1,
            dtype: DType::F32,
            routing: (!routed_by_gate).then_some((&self.ids[..], &self.weights[..])),
            token_ids: Some(&self.row[..4]),
            shared_experts: true,
        }
    }
}

/// The data of a request that the step loop's thread keeps while the state machine decides about it.
#[derive(Debug)]
pub(super) struct Active {
    request: Request,
    caller: Box<dyn Caller>,
    row_bytes: usize,
    /// The rows that are complete; rows that ranks write in place are not part of it. Taken out, and thus empty, while rows are
    /// appended.
    output: Output,
    timings: Vec<StepTiming>,
}

impl Active {
    pub(super) fn new(request: Request, caller: Box<dyn Caller>, hidden: usize) -> Self {
        Active {
            row_bytes: hidden * request.dtype.size(),
            request,
            caller,
            output: Output::default(),
            timings: Vec::new(),
        }
    }

    pub(super) const fn request(&self) -> &Request {
        &self.request
    }

    /// Whether the caller has cancelled the request.
    pub(super) fn is_cancelled(&self) -> bool {
        self.caller.has_left()
    }

    /// The memory that the caller lends.
    pub(super) fn memory(&self) -> Option<MemoryId> {
        self.caller.memory()
    }

    /// Allocates the whole answer, once.
    pub(super) fn begin_output(&mut self) {
        if self.output[ROWS].capacity() == 0 {
            self.output[ROWS].reserve_exact(self.request.tokens * self.row_bytes);
        }
    }

    /// The rows of `range` and their routing, for staging.
    pub(super) fn rows(&self, range: Range<usize>) -> RowsToStage<'_> {
        let bytes =
            |of: &'_ Bytes, per_row: usize| range.start * per_row..(range.end * per_row).min(of.len());
        let request = &self.request;
        RowsToStage {
            rows: self.caller.rows(range.start * self.row_bytes..range.end * self.row_bytes),
            tokens: range.len(),
            dtype: request.dtype,
            routing: request.routing.as_ref().map(|given| {
                (
                    &given.ids[bytes(&given.ids, given.k * 4)],
                    &given.weights[bytes(&given.weights, given.k * 4)],
                )
            }),
            token_ids: request.token_ids.as_ref().map(|ids| &ids[bytes(ids, 4)]),
            shared_experts: request.shared_experts,
        }
    }

    /// Takes the answer, so that the rows of a step can be appended to it. A request's steps complete in order, and a step's ranges
    /// are in the order of the request's rows.
    pub(super) fn take_output(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// Puts the answer back.
    pub(super) fn put_output(&mut self, output: Output) {
        self.output = output;
    }

    pub(super) fn add_timing(&mut self, timing: StepTiming) {
        self.timings.push(timing);
    }

    /// Drops the partial answer.
    pub(super) fn restart(&mut self) {
        for part in &mut self.output {
            part.clear();
        }
        self.timings.clear();
    }

    /// The completion word that rank 0 can raise for the call, whose `rows` rows in a step are all of its rows.
    pub(super) fn raise(&self, rows: usize) -> Option<Raise> {
        let is_whole = rows == self.request.tokens && !self.request.return_routing;
        is_whole.then(|| self.caller.raise()).flatten()
    }

    /// Sets who raises the completion word.
    pub(super) fn set_raising(&mut self, raising: Raising) {
        self.caller.set_raising(raising);
    }

    /// Sends the complete answer to the caller. `is_idle`: no step is in flight.
    pub(super) fn answer(
        self,
        receipt: expertd_scheduler::Receipt,
        fingerprint: WeightFingerprint,
        is_idle: bool,
    ) {
        let [rows, ids, weights] = self.output;
        let as_given = self.request.routing.and_then(|given| given.as_given);
        let (ids, weights) = match as_given.filter(|_| self.request.return_routing) {
            Some(as_given) => as_given,
            None => (ids.into(), weights.into()),
        };
        tracing::debug!(request = %self.request.id, steps = ?receipt.steps, "answered");
        let queue_time = receipt.queue_time;
        let receipt = backend::Receipt {
            steps: receipt.steps,
            generation: receipt.generation,
            weight_version: receipt.weight_version,
            weight_fingerprint: fingerprint,
            tokens_per_rank: receipt.tokens_per_rank,
            timings: self.timings,
            topk_ids: ids,
            topk_weights: weights,
            queue_time: receipt.queue_time,
            step_time: receipt.step_time,
        };
        self.caller.answer(rows.into(), receipt, is_idle);
        // The caller does not wait for it.
        metrics::histogram!(names::QUEUE_DURATION_SECONDS).record(queue_time.as_secs_f64());
    }

    /// Ends the request without an answer.
    pub(super) fn fail(self, failure: Failure) {
        self.caller.fail(failure);
    }
}
