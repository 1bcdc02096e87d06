//! One `ForwardStream`: several requests in flight, each with its own status and deadline.
//!
//! The stream runs in the transport's task of the call: it reads requests when it is polled for answers, so it needs no
//! further task or queue. It reads no requests from a client that reads no answers, which bounds the client's memory here.

use std::collections::HashSet;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use expertd_core::backend::Backend;
use expertd_core::failure::Failure;
use expertd_proto::v1::{
    ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, forward_stream_response::Result as Outcome,
};
use expertd_telemetry::{RequestMetrics, RequestTrace, code_name};
use futures_util::stream::{FuturesUnordered, unfold};
use futures_util::{Stream, StreamExt as _};
use tokio::time::{Sleep, sleep_until};
use tonic::{Code, Status, Streaming};

use super::call::Call;
use super::forward::{answer, take_in};
use crate::bytes::budget::MessageCharge;
use crate::status::{request_status, status_of};

/// The answers of a stream.
pub(crate) type Answers = Pin<Box<dyn Stream<Item = Result<ForwardStreamResponse, Status>> + Send>>;

/// Answers the requests of a stream.
pub(crate) fn answers(
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    call: Call,
    inbound: Streaming<ForwardStreamRequest>,
) -> Answers {
    let open = OpenStream {
        max_in_flight: backend.model().limits.max_requests_per_stream.max(1) as usize,
        deadline: call.deadline.map(|at| Box::pin(sleep_until(at.into()))),
        backend,
        metrics,
        call,
        inbound: Some(inbound),
        in_flight: FuturesUnordered::new(),
        ids: HashSet::new(),
        end: None,
    };
    Box::pin(unfold(open, |mut open| async move { open.next().await.map(|answer| (answer, open)) }))
}

/// An open stream.
struct OpenStream {
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    call: Call,
    /// `None` once the client has sent its last request.
    inbound: Option<Streaming<ForwardStreamRequest>>,
    in_flight: FuturesUnordered<Pin<Box<dyn Future<Output = Answered> + Send>>>,
    /// The client's numbers of the requests in flight.
    ids: HashSet<u64>,
    max_in_flight: usize,
    deadline: Option<Pin<Box<Sleep>>>,
    /// Status with which the stream ends after its last request in flight.
    end: Option<Status>,
}

/// An answer with its charge.
struct Answered {
    id: u64,
    result: Result<ForwardResponse, Status>,
    ticket: Option<MessageCharge>,
    started: Instant,
    trace: Option<Arc<RequestTrace>>,
}

impl OpenStream {
    /// The next answer, or the status with which the stream ends. `None`: the stream has ended.
    async fn next(&mut self) -> Option<Result<ForwardStreamResponse, Status>> {
        loop {
            if self.inbound.is_none() && self.in_flight.is_empty() {
                return self.end.take().map(Err);
            }
            let has_room = self.in_flight.len() < self.max_in_flight;
            tokio::select! {
                biased;
                () = reached(self.deadline.as_mut()) => return Some(Err(self.give_up())),
                () = self.call.closing.cancelled(), if self.inbound.is_some() => {
                    self.end_with(status_of(Failure::Draining));
                }
                Some(answered) = self.in_flight.next() => {
                    self.ids.remove(&answered.id);
                    return Some(Ok(self.send(answered)));
                }
                message = received(self.inbound.as_mut()), if has_room => {
                    if let Some(answered) = self.receive(message) {
                        return Some(Ok(self.send(answered)));
                    }
                }
            }
        }
    }

    /// Reads no further requests; the stream ends with `status` after the answers to those in flight.
    fn end_with(&mut self, status: Status) {
        (self.inbound, self.end) = (None, Some(status));
    }

    /// Takes in what the client has sent. Returns its answer if it is refused.
    fn receive(&mut self, message: Option<Result<ForwardStreamRequest, Status>>) -> Option<Answered> {
        match message {
            Some(Ok(_)) if self.call.pass.as_mut().is_some_and(|pass| !pass.is_valid()) => {
                drop(self.call.charges.next_arrival());
                self.end_with(status_of(Failure::Unauthenticated(
                    "the token is no longer known to the service",
                )));
                None
            }
            Some(Ok(message)) => self.take(message),
            Some(Err(status)) => {
                self.end_with(status);
                None
            }
            None => {
                self.inbound = None;
                None
            }
        }
    }

    /// Accepts one request. Returns its answer if it is refused.
    fn take(&mut self, message: ForwardStreamRequest) -> Option<Answered> {
        let started = Instant::now();
        let id = message.id;
        let trace = self.call.parent.as_ref().and_then(|parent| parent.begin("ForwardStream", started));
        let ticket = self.call.charges.next_arrival();
        let failure = match &ticket {
            Some(ticket) => self.submit(message, ticket, started, trace.clone()).err().map(status_of)?,
            None => Status::internal("the message was not charged"),
        };
        Some(Answered { id, result: Err(failure), ticket, started, trace })
    }

    fn submit(
        &mut self,
        message: ForwardStreamRequest,
        ticket: &MessageCharge,
        started: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Result<(), Failure> {
        let id = message.id;
        if self.ids.contains(&id) {
            return Err(Failure::field("id", format!("a request with id {id} is in flight on this stream")));
        }
        let Some(request) = message.request else {
            return Err(Failure::field("request", "the request is missing"));
        };
        let own =
            (message.timeout_ms > 0).then(|| started + Duration::from_millis(message.timeout_ms.into()));
        let envelope = self.call.envelope(own.into_iter().chain(self.call.deadline).min());
        let (backend, metrics) = (&*self.backend, &*self.metrics);
        let (tokens, return_timings) = (request.tokens, request.return_timings);
        let pending = take_in(backend, metrics, request, envelope, Arc::clone(ticket), trace.as_deref())?;
        self.call.count_tokens(tokens);
        self.ids.insert(id);
        let ticket = Some(Arc::clone(ticket));
        self.in_flight.push(Box::pin(async move {
            let answer = answer(pending, return_timings, trace.as_deref());
            // The stream itself checks its own deadline, for all its requests.
            let result = match own {
                Some(at) => tokio::time::timeout_at(at.into(), answer).await,
                None => Ok(answer.await),
            };
            let result = result.unwrap_or(Err(Failure::DeadlineExceeded)).map_err(status_of);
            Answered { id, result, ticket, started, trace }
        }));
        Ok(())
    }

    fn send(&self, answered: Answered) -> ForwardStreamResponse {
        let Answered { id, result, ticket, started, trace } = answered;
        let code = result.as_ref().map_or_else(Status::code, |_| Code::Ok) as u32;
        self.metrics.answered(code_name(code), started.elapsed());
        if let Some(trace) = trace {
            trace.end(code);
        }
        ticket.into_iter().for_each(|ticket| self.call.charges.leave(ticket));
        let outcome = match result {
            Ok(response) => Outcome::Response(response),
            Err(status) => Outcome::Status(request_status(&status)),
        };
        ForwardStreamResponse { id, result: Some(outcome) }
    }

    /// Ends the stream at its deadline and cancels its requests in flight. Returns its status.
    fn give_up(&mut self) -> Status {
        let status = status_of(Failure::DeadlineExceeded);
        for _ in 0..self.in_flight.len() {
            self.metrics.answered(code_name(status.code() as u32), Duration::ZERO);
        }
        (self.inbound, self.end) = (None, None);
        self.in_flight.clear();
        status
    }
}

/// Resolves at a deadline, if there is one.
async fn reached(deadline: Option<&mut Pin<Box<Sleep>>>) {
    match deadline {
        Some(deadline) => deadline.await,
        None => pending().await,
    }
}

/// The next message of the client, unless it has sent its last one.
async fn received(
    inbound: Option<&mut Streaming<ForwardStreamRequest>>,
) -> Option<Result<ForwardStreamRequest, Status>> {
    match inbound {
        Some(inbound) => inbound.next().await,
        None => pending().await,
    }
}
