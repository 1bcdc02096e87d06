//! A request that was taken in, until its answer is whole.

use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;

use super::service::{Incoming, Reply};
use crate::backend::{Answer, Receipt, Request, StepError, StepTiming};
use crate::telemetry::names;
use expertd_ipc::RowsToStage;
use expertd_types::{Generation, Rank, StepId, WeightVersion};

/// What there is of an answer: rows, and expert ids and weights where they are asked for.
pub(super) type Output = [Vec<u8>; 3];
/// Places in an [`Output`].
pub(super) const ROWS: usize = 0;
pub(super) const IDS: usize = 1;
pub(super) const WEIGHTS: usize = 2;

/// A request with what there is of its answer.
#[derive(Debug)]
pub(super) struct Active {
    request: Request,
    reply: Reply,
    admitted: Instant,
    row_bytes: usize,
    /// Rows given to steps so far.
    begun: usize,
    /// Given out while something is appended to it.
    output: Output,
    steps: Vec<StepId>,
    tokens_per_rank: Vec<u32>,
    timings: Vec<StepTiming>,
    first_step: Option<Instant>,
}

impl Active {
    pub(super) fn new(mail: Incoming, hidden: usize) -> Self {
        let Incoming { request, reply, admitted } = mail;
        Active {
            row_bytes: hidden * request.dtype.size(),
            request,
            reply,
            admitted,
            begun: 0,
            output: Output::default(),
            steps: Vec::new(),
            tokens_per_rank: Vec::new(),
            timings: Vec::new(),
            first_step: None,
        }
    }

    /// Whether the caller went away.
    pub(super) fn is_cancelled(&self) -> bool {
        self.reply.is_closed()
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.request.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Whether rows of it are in a step now.
    pub(super) const fn is_in_step(&self) -> bool {
        self.begun * self.row_bytes > self.output[ROWS].len()
    }

    pub(super) const fn wants_routing(&self) -> bool {
        self.request.return_routing
    }

    /// Takes the next `tokens` rows for a step; which ones.
    pub(super) fn begin_step(&mut self, step: StepId, tokens: usize, now: Instant) -> Range<usize> {
        if self.first_step.is_none() {
            self.first_step = Some(now);
            self.output[ROWS].reserve_exact(self.request.tokens * self.row_bytes);
            metrics::histogram!(names::QUEUE_DURATION_SECONDS).record((now - self.admitted).as_secs_f64());
        }
        self.steps.push(step);
        let range = self.begun..self.begun + tokens;
        self.begun = range.end;
        range
    }

    /// The rows of `range` as they are staged.
    pub(super) fn rows(&self, range: Range<usize>) -> RowsToStage<'_> {
        let bytes =
            |of: &'_ Bytes, per_row: usize| range.start * per_row..(range.end * per_row).min(of.len());
        let request = &self.request;
        RowsToStage {
            rows: request.rows.view(range.start * self.row_bytes..range.end * self.row_bytes),
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

    pub(super) fn count_tokens(&mut self, rank: Rank, tokens: usize) {
        if self.tokens_per_rank.len() <= rank.index() {
            self.tokens_per_rank.resize(rank.index() + 1, 0);
        }
        self.tokens_per_rank[rank.index()] += tokens as u32;
    }

    /// Gives the answer out, for what comes next to be appended. That is in order, because steps complete in order and
    /// a step's pieces are kept in the order of its rows.
    pub(super) fn give_output(&mut self) -> Output {
        std::mem::take(&mut self.output)
    }

    /// Takes the answer back.
    pub(super) fn take_output(&mut self, output: Output) {
        self.output = output;
    }

    pub(super) fn time(&mut self, timing: StepTiming) {
        if self.request.return_timings {
            self.timings.push(timing);
        }
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.output[ROWS].len() == self.request.tokens * self.row_bytes
    }

    /// Hands the whole answer to the caller.
    pub(super) fn answer(
        self,
        generation: Generation,
        weight_version: WeightVersion,
        ranks: usize,
        now: Instant,
    ) {
        let first_step = self.first_step.unwrap_or(now);
        let [rows, ids, weights] = self.output;
        let as_given = self.request.routing.and_then(|given| given.as_given);
        let (ids, weights) = match as_given.filter(|_| self.request.return_routing) {
            Some(as_given) => as_given,
            None => (ids.into(), weights.into()),
        };
        let mut tokens_per_rank = self.tokens_per_rank;
        tokens_per_rank.resize(ranks, 0);
        tracing::debug!(request = %self.request.id, steps = ?self.steps, "answered");
        let receipt = Receipt {
            steps: self.steps,
            generation,
            weight_version,
            tokens_per_rank,
            timings: self.timings,
            topk_ids: ids,
            topk_weights: weights,
            queue_time: first_step - self.admitted,
            step_time: now - first_step,
        };
        // A caller that went away meanwhile does not want it.
        if self.reply.send(Ok(Answer { rows: rows.into(), receipt })).is_err() {
            metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(1);
        }
    }

    /// Ends the request without an answer.
    pub(super) fn finish(self, result: Result<Answer, StepError>) {
        let _ = self.reply.send(result);
    }

    /// Ends a request that was cancelled or came too late.
    pub(super) fn leave(self, now: Instant) {
        if self.is_cancelled() {
            tracing::debug!(request = %self.request.id, waited = ?(now - self.admitted), "cancelled");
            metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(1);
        } else {
            self.finish(Err(StepError::DeadlineExceeded));
        }
    }
}
