//! The span of one request.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Array, Context, KeyValue, Value};
use opentelemetry_sdk::trace::Span;
use tonic::Code;

use super::{TRACES, TraceParent};
use crate::api::code_name;
use crate::backend::{Receipt, Request, StepTiming};
use expertd_types::Phase;

/// The span of a request that is sampled. One that is dropped before it ends was cancelled.
pub(crate) struct RequestTrace {
    state: Mutex<State>,
    method: &'static str,
    /// One moment on both clocks, from which other times follow.
    instant: Instant,
    time: SystemTime,
}

struct State {
    /// `None` once it has ended.
    span: Option<Span>,
    /// Whether the caller asked for timings as well.
    timings_asked: bool,
}

impl TraceParent {
    /// Begins the span of a request that arrived at `arrived`, for `method`, which is `Forward`, `ForwardStream` or
    /// `Session`. `None` if its trace is not sampled.
    pub(crate) fn begin(&self, method: &'static str, arrived: Instant) -> Option<Arc<RequestTrace>> {
        let traces = TRACES.get()?;
        let (instant, time) = (Instant::now(), SystemTime::now());
        let start = time.checked_sub(instant.saturating_duration_since(arrived)).unwrap_or(time);
        let (name, attributes) = match method {
            "Session" => ("expertd session call", Vec::new()),
            "Forward" => ("expertd.v1.Moe/Forward", rpc(method)),
            _ => ("expertd.v1.Moe/ForwardStream", rpc(method)),
        };
        let builder = traces
            .tracer
            .span_builder(name)
            .with_kind(SpanKind::Server)
            .with_start_time(start)
            .with_attributes(attributes);
        let span = traces.tracer.build_with_context(builder, &self.0);
        let state = State { span: Some(span), timings_asked: false };
        let sampled = state.span.as_ref().is_some_and(Span::is_recording);
        sampled.then(|| Arc::new(RequestTrace { state: Mutex::new(state), method, instant, time }))
    }
}

impl RequestTrace {
    fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn time_of(&self, instant: Instant) -> SystemTime {
        let later = instant.saturating_duration_since(self.instant);
        let earlier = self.instant.saturating_duration_since(instant);
        self.time.checked_sub(earlier).unwrap_or(self.time) + later
    }

    /// Begins the span of a call of a session, which has a trace of its own. `kind` says where the session's rows lie.
    pub(crate) fn of_session(
        session: u64,
        kind: &'static str,
        arrived: Instant,
    ) -> Option<Arc<RequestTrace>> {
        let trace = TraceParent::none()?.begin("Session", arrived)?;
        trace.with(|state| {
            let Some(span) = &mut state.span else { return };
            span.set_attributes([
                KeyValue::new("expertd.session", number(session)),
                KeyValue::new("expertd.session_kind", kind),
            ]);
        });
        Some(trace)
    }

    /// Describes the request, and asks for the timings of its steps.
    pub(crate) fn admitted(&self, request: &mut Request) {
        self.with(|state| {
            state.timings_asked = request.return_timings;
            request.return_timings = true;
            let Some(span) = &mut state.span else { return };
            span.set_attributes([
                KeyValue::new("expertd.request", number(request.id.0)),
                KeyValue::new("expertd.layer", i64::from(request.layer.0)),
                KeyValue::new("expertd.tokens", number(request.tokens as u64)),
                KeyValue::new("expertd.dtype", request.dtype.to_string()),
                KeyValue::new("expertd.routing", if request.routing.is_some() { "given" } else { "gate" }),
            ]);
        });
    }

    /// Adds what the receipt says, and removes the timings from it unless the caller has asked for them.
    pub(crate) fn answered(&self, receipt: &mut Receipt) {
        self.describe(receipt);
        if self.with(|state| state.span.is_some() && !state.timings_asked) {
            receipt.timings.clear();
        }
    }

    /// Adds what the receipt says: a child for the time in the queue, and one for each step.
    pub(crate) fn describe(&self, receipt: &Receipt) {
        let Some(traces) = TRACES.get() else { return };
        self.with(|state| {
            let Some(span) = &mut state.span else { return };
            let ranks = receipt.tokens_per_rank.iter().map(|tokens| i64::from(*tokens)).collect();
            span.set_attributes([
                KeyValue::new("expertd.generation", number(receipt.generation.0)),
                KeyValue::new("expertd.weight_version", number(receipt.weight_version.0)),
                KeyValue::new("expertd.weight_fingerprint", receipt.weight_fingerprint.to_string()),
                KeyValue::new("expertd.steps", number(receipt.steps.len() as u64)),
                KeyValue::new("expertd.tokens_per_rank", Value::Array(Array::I64(ranks))),
            ]);
            let parent = Context::new().with_remote_span_context(span.span_context().clone());
            let child = |name: &'static str, start: Instant, end: Instant, attributes: Vec<KeyValue>| {
                let builder = traces.tracer.span_builder(name).with_start_time(self.time_of(start));
                let mut span = traces.tracer.build_with_context(builder.with_attributes(attributes), &parent);
                span.end_with_timestamp(self.time_of(end));
            };
            if let Some(first) = receipt.timings.first() {
                let admitted = first.formed.checked_sub(receipt.queue_time).unwrap_or(first.formed);
                child("queue", admitted, first.formed, Vec::new());
            }
            for timing in &receipt.timings {
                child("step", timing.formed, timing.done, step_attributes(timing));
            }
        });
    }

    /// Ends the span with the status of the answer.
    pub(crate) fn end(&self, code: Code) {
        self.with(|state| {
            let Some(mut span) = state.span.take() else { return };
            span.set_attribute(KeyValue::new("rpc.grpc.status_code", code as i64));
            // Errors of the caller are not errors of the service.
            if matches!(
                code,
                Code::Unknown
                    | Code::DeadlineExceeded
                    | Code::Unimplemented
                    | Code::Internal
                    | Code::Unavailable
                    | Code::DataLoss
            ) {
                span.set_status(Status::error(code_name(code)));
            }
            span.end_with_timestamp(self.time_of(Instant::now()));
        });
    }
}

impl std::fmt::Debug for RequestTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RequestTrace of {}", self.method)
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

/// Attributes of a call over gRPC.
fn rpc(method: &'static str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("rpc.system", "grpc"),
        KeyValue::new("rpc.service", "expertd.v1.Moe"),
        KeyValue::new("rpc.method", method),
    ]
}

fn step_attributes(timing: &StepTiming) -> Vec<KeyValue> {
    let phases = Phase::ALL.iter().zip(timing.phases.all());
    let phases = phases.map(|(phase, time)| {
        KeyValue::new(format!("expertd.phase.{}_seconds", phase.name()), time.as_secs_f64())
    });
    let about = [
        KeyValue::new("expertd.step", number(timing.step.0)),
        KeyValue::new("expertd.step_tokens", i64::from(timing.tokens)),
    ];
    about.into_iter().chain(phases).collect()
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
