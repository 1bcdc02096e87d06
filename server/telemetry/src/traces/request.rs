//! The span of one request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::Span;

use super::{TRACES, TraceParent};
use crate::code_name;

/// The code of a call that its caller has given up.
const CANCELLED: u32 = 1;
/// Statuses that are errors of the service and not of its caller.
const ERRORS_OF_THE_SERVICE: [&str; 6] =
    ["UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"];

/// The span of a request that is sampled. One that is dropped before it ends was cancelled.
pub struct RequestTrace {
    /// `None` once it has ended.
    span: Mutex<Option<Span>>,
    method: &'static str,
    /// One moment on both clocks, from which other times follow.
    instant: Instant,
    time: SystemTime,
}

impl TraceParent {
    /// Begins the span of a request that arrived at `arrived`, for `method`, which is `Forward`, `ForwardStream` or
    /// `Session`. `None` if its trace is not sampled.
    pub fn begin(&self, method: &'static str, arrived: Instant) -> Option<Arc<RequestTrace>> {
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
        let sampled = span.is_recording();
        sampled.then(|| Arc::new(RequestTrace { span: Mutex::new(Some(span)), method, instant, time }))
    }
}

impl RequestTrace {
    fn span(&self) -> MutexGuard<'_, Option<Span>> {
        self.span.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn time_of(&self, instant: Instant) -> SystemTime {
        let later = instant.saturating_duration_since(self.instant);
        let earlier = self.instant.saturating_duration_since(instant);
        self.time.checked_sub(earlier).unwrap_or(self.time) + later
    }

    /// Begins the span of a call of a session, which has a trace of its own. `kind` says where the session's rows lie.
    #[must_use]
    pub fn of_session(session: u64, kind: &'static str, arrived: Instant) -> Option<Arc<RequestTrace>> {
        let trace = TraceParent::none()?.begin("Session", arrived)?;
        trace.describe([
            KeyValue::new("expertd.session", i64::try_from(session).unwrap_or(i64::MAX)),
            KeyValue::new("expertd.session_kind", kind),
        ]);
        Some(trace)
    }

    /// Adds attributes.
    pub fn describe(&self, attributes: impl IntoIterator<Item = KeyValue>) {
        if let Some(span) = &mut *self.span() {
            span.set_attributes(attributes);
        }
    }

    /// Adds a child that has ended.
    pub fn child(&self, name: &'static str, start: Instant, end: Instant, attributes: Vec<KeyValue>) {
        let Some(traces) = TRACES.get() else { return };
        let Some(context) = self.span().as_ref().map(|span| span.span_context().clone()) else { return };
        let parent = Context::new().with_remote_span_context(context);
        let builder = traces.tracer.span_builder(name).with_start_time(self.time_of(start));
        let mut child = traces.tracer.build_with_context(builder.with_attributes(attributes), &parent);
        child.end_with_timestamp(self.time_of(end));
    }

    /// Ends the span with the gRPC status of the answer.
    pub fn end(&self, code: u32) {
        let Some(mut span) = self.span().take() else { return };
        span.set_attribute(KeyValue::new("rpc.grpc.status_code", i64::from(code)));
        if ERRORS_OF_THE_SERVICE.contains(&code_name(code)) {
            span.set_status(Status::error(code_name(code)));
        }
        span.end_with_timestamp(self.time_of(Instant::now()));
    }
}

impl std::fmt::Debug for RequestTrace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RequestTrace of {}", self.method)
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        self.end(CANCELLED);
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
