//! One `ForwardStream`: several requests in flight, each with its own status and deadline.
//!
//! The stream runs in the transport's task of the call: it reads requests when it is polled for answers, so it needs no
//! further task or queue. It reads no requests from a client that reads no answers, which bounds the client's memory here.

use std::collections::HashSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use expertd_proto::v1::{
    ForwardResponse, ForwardStreamRequest, ForwardStreamResponse, forward_stream_response::Result as Outcome,
};
use futures_util::Stream;
use futures_util::stream::FuturesUnordered;
use tokio::time::Sleep;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Code, Status, Streaming};

use super::call::Call;
use super::convert;
use super::forward::{Taken, take_in};
use crate::bytes::charges::Ticket;
use crate::status::{request_status, status_of};
use expertd_core::backend::{Backend, Pending};
use expertd_core::failure::Failure;
use expertd_telemetry::{RequestMetrics, RequestTrace, code_name};

/// The answering side of a `ForwardStream`.
pub(crate) struct AnswerStream {
    backend: Arc<dyn Backend>,
    metrics: Arc<RequestMetrics>,
    call: Call,
    /// `None` once the client has sent its last request.
    inbound: Option<Streaming<ForwardStreamRequest>>,
    in_flight: FuturesUnordered<InFlight>,
    ids: HashSet<u64>,
    max_in_flight: usize,
    deadline: Option<Pin<Box<Sleep>>>,
    closing: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Status with which the stream ends after its last request in flight.
    end: Option<Status>,
    over: bool,
}

/// An answer with its charge.
struct Answered {
    id: u64,
    result: Result<ForwardResponse, Status>,
    ticket: Option<Ticket>,
    started: Instant,
    trace: Option<Arc<RequestTrace>>,
}

impl AnswerStream {
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        metrics: Arc<RequestMetrics>,
        call: Call,
        inbound: Streaming<ForwardStreamRequest>,
    ) -> AnswerStream {
        let max_in_flight = backend.model().limits.max_requests_per_stream.max(1) as usize;
        AnswerStream {
            backend,
            metrics,
            inbound: Some(inbound),
            in_flight: FuturesUnordered::new(),
            ids: HashSet::new(),
            max_in_flight,
            deadline: call.deadline.map(|at| Box::pin(tokio::time::sleep_until(at.into()))),
            closing: Box::pin(call.closing.clone().cancelled_owned()),
            call,
            end: None,
            over: false,
        }
    }

    /// Accepts one request. Returns its answer if that is already known.
    fn take(&mut self, message: ForwardStreamRequest) -> Option<Answered> {
        let started = Instant::now();
        let id = message.id;
        let trace = self.call.parent.as_ref().and_then(|parent| parent.begin("ForwardStream", started));
        let ticket = self.call.charges.next_arrival();
        let result = match &ticket {
            Some(ticket) => self.submit(message, ticket, started, trace.clone()).map_err(status_of),
            None => Err(Status::internal("the message was not charged")),
        };
        match result {
            Ok(None) => None,
            Ok(Some(response)) => Some(Answered { id, result: Ok(response), ticket, started, trace }),
            Err(status) => Some(Answered { id, result: Err(status), ticket, started, trace }),
        }
    }

    fn submit(
        &mut self,
        message: ForwardStreamRequest,
        ticket: &Ticket,
        started: Instant,
        trace: Option<Arc<RequestTrace>>,
    ) -> Result<Option<ForwardResponse>, Failure> {
        let id = message.id;
        if self.ids.contains(&id) {
            return Err(Failure::field("id", format!("a request with id {id} is in flight on this stream")));
        }
        let Some(request) = message.request else {
            return Err(Failure::field("request", "the request is missing"));
        };
        let own =
            (message.timeout_ms > 0).then(|| started + Duration::from_millis(message.timeout_ms.into()));
        let deadline = own.into_iter().chain(self.call.deadline).min();
        let envelope = self.call.envelope(deadline);
        let (backend, metrics, tokens) = (&*self.backend, &*self.metrics, request.tokens);
        let taken = take_in(backend, metrics, request, envelope, Arc::clone(ticket), trace.as_deref())?;
        self.call.count_tokens(tokens);
        match taken {
            Taken::Answered(response) => Ok(Some(*response)),
            Taken::Pending(pending) => {
                self.ids.insert(id);
                self.in_flight.push(InFlight {
                    id,
                    pending,
                    // The stream itself checks its own deadline, for all its requests.
                    deadline: own.map(|at| Box::pin(tokio::time::sleep_until(at.into()))),
                    ticket: Some(Arc::clone(ticket)),
                    started,
                    trace,
                });
                Ok(None)
            }
        }
    }

    fn send(&mut self, answered: Answered) -> Poll<Option<Result<ForwardStreamResponse, Status>>> {
        let code = answered.result.as_ref().map_or_else(Status::code, |_| Code::Ok);
        self.metrics.answered(code_name(code as u32), answered.started.elapsed());
        if let Some(trace) = answered.trace {
            trace.end(code as u32);
        }
        let outcome = match answered.result {
            Ok(response) => Outcome::Response(response),
            Err(status) => Outcome::Status(request_status(&status)),
        };
        answered.ticket.into_iter().for_each(|ticket| self.call.charges.leave(ticket));
        Poll::Ready(Some(Ok(ForwardStreamResponse { id: answered.id, result: Some(outcome) })))
    }

    /// Ends the stream now and cancels its requests in flight.
    fn finish(&mut self, status: Option<Status>) -> Poll<Option<Result<ForwardStreamResponse, Status>>> {
        self.over = true;
        self.inbound = None;
        for _ in 0..self.in_flight.len() {
            let code = status.as_ref().map_or(Code::Cancelled, Status::code);
            self.metrics.answered(code_name(code as u32), Duration::ZERO);
        }
        self.in_flight.clear();
        Poll::Ready(status.map(Err))
    }
}

impl Stream for AnswerStream {
    type Item = Result<ForwardStreamResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.over {
            return Poll::Ready(None);
        }
        if let Some(deadline) = &mut this.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return this.finish(Some(status_of(Failure::DeadlineExceeded)));
        }
        if this.inbound.is_some() && this.closing.as_mut().poll(cx).is_ready() {
            this.inbound = None;
            this.end = Some(status_of(Failure::ShuttingDown));
        }
        loop {
            if let Poll::Ready(Some(answered)) = Pin::new(&mut this.in_flight).poll_next(cx) {
                this.ids.remove(&answered.id);
                return this.send(answered);
            }
            let Some(inbound) = &mut this.inbound else {
                if this.in_flight.is_empty() {
                    let end = this.end.take();
                    return this.finish(end);
                }
                return Poll::Pending;
            };
            if this.in_flight.len() >= this.max_in_flight {
                return Poll::Pending;
            }
            match Pin::new(inbound).poll_next(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(_))) if this.call.pass.as_mut().is_some_and(|pass| !pass.is_valid()) => {
                    drop(this.call.charges.next_arrival());
                    this.end = Some(status_of(Failure::Unauthenticated(
                        "the token is no longer known to the service",
                    )));
                    this.inbound = None;
                }
                Poll::Ready(Some(Ok(message))) => {
                    if let Some(answered) = this.take(message) {
                        return this.send(answered);
                    }
                }
                Poll::Ready(Some(Err(status))) => {
                    this.end = Some(status);
                    this.inbound = None;
                }
                Poll::Ready(None) => this.inbound = None,
            }
        }
    }
}

/// A submitted request of the stream.
struct InFlight {
    id: u64,
    pending: Pending,
    deadline: Option<Pin<Box<Sleep>>>,
    ticket: Option<Ticket>,
    started: Instant,
    trace: Option<Arc<RequestTrace>>,
}

impl Future for InFlight {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answered> {
        let this = &mut *self;
        let result = match Pin::new(&mut this.pending).poll(cx) {
            Poll::Ready(Ok(Ok(mut answer))) => {
                if let Some(trace) = &this.trace {
                    answer.receipt.move_timings_to(trace);
                }
                Ok(convert::response(answer))
            }
            Poll::Ready(Ok(Err(error))) => Err(status_of(Failure::from(error))),
            Poll::Ready(Err(_)) => Err(status_of(convert::abandoned())),
            Poll::Pending => {
                let late =
                    this.deadline.as_mut().is_some_and(|deadline| deadline.as_mut().poll(cx).is_ready());
                if !late {
                    return Poll::Pending;
                }
                Err(status_of(Failure::DeadlineExceeded))
            }
        };
        let (ticket, trace) = (this.ticket.take(), this.trace.take());
        Poll::Ready(Answered { id: this.id, result, ticket, started: this.started, trace })
    }
}
