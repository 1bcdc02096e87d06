//! Traces: a span for each request, sent to an OpenTelemetry collector over gRPC (OTLP).
//!
//! A span continues the caller's trace, if the call's metadata names one (W3C `traceparent`). Calls of sessions have no
//! metadata; their spans begin traces. The children of a span are the time in
//! the queue and each step. Requests never wait for the collector: ended spans go to a bounded queue, and those that do
//! not fit are dropped.

mod export;
mod request;

use std::sync::OnceLock;
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{WithExportConfig as _, WithTonicConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tonic::transport::{Certificate, ClientTlsConfig};

pub use request::RequestTrace;

use self::export::Counted;

/// The traces of this process; unset while they are off.
static TRACES: OnceLock<Traces> = OnceLock::new();

struct Traces {
    tracer: SdkTracer,
    propagator: TraceContextPropagator,
    provider: SdkTracerProvider,
}

/// Why traces cannot be sent.
#[derive(Debug, thiserror::Error)]
#[error("otlp-endpoint: {0}")]
pub struct TraceError(String);

/// Sends traces to `endpoint`, or to that of `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`; returns
/// whether there is one. The other `OTEL_*` variables of exporter, sampler, resource and queue apply. It must be called
/// within a Tokio runtime; further calls change nothing.
///
/// # Errors
/// [`TraceError`] if the address or a variable cannot be used. A receiver that does not answer is no error.
pub fn start_traces(endpoint: Option<&str>) -> Result<bool, TraceError> {
    if TRACES.get().is_some() {
        return Ok(true);
    }
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is = |name: &str, wanted: &str| set(name).is_some_and(|value| value.eq_ignore_ascii_case(wanted));
    let given = endpoint.map(str::to_owned);
    let address = given
        .or_else(|| set("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
        .or_else(|| set("OTEL_EXPORTER_OTLP_ENDPOINT"));
    let Some(address) = address else { return Ok(false) };
    if is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none") {
        return Ok(false);
    }
    let uri = address.parse::<http::Uri>().map_err(|error| TraceError(format!("{address}: {error}")))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        let expected = "is not http://HOST:PORT or https://HOST:PORT of an OTLP receiver over gRPC";
        return Err(TraceError(format!("{address} {expected}")));
    }
    let exporter = opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(&address);
    let exporter = match uri.scheme_str() {
        Some("https") => exporter.with_tls_config(tls(set("OTEL_EXPORTER_OTLP_CERTIFICATE"))?),
        _ => exporter,
    };
    let exporter = exporter.build().map_err(|error| TraceError(error.to_string()))?;
    let provider = SdkTracerProvider::builder()
        .with_batch_exporter(Counted::new(exporter))
        .with_resource(resource())
        .build();
    let traces =
        Traces { tracer: provider.tracer("expertd"), propagator: TraceContextPropagator::new(), provider };
    let _ = TRACES.set(traces);
    tracing::info!(endpoint = address, "sending traces");
    Ok(true)
}

/// Waits until the spans that have ended are sent, up to `limit`.
pub async fn flush_traces(limit: Duration) {
    if let Some(traces) = TRACES.get() {
        let flush = tokio::task::spawn_blocking(|| traces.provider.force_flush());
        let _ = tokio::time::timeout(limit, flush).await;
    }
}

/// TLS towards a receiver whose certificate the authorities in `file` signed.
fn tls(file: Option<String>) -> Result<ClientTlsConfig, TraceError> {
    let missing = "https needs OTEL_EXPORTER_OTLP_CERTIFICATE, a PEM file with the receiver's authorities";
    let file = file.ok_or_else(|| TraceError(missing.to_owned()))?;
    let pem = std::fs::read(&file).map_err(|error| TraceError(format!("{file}: {error}")))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

/// The description of this process: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES`, and defaults where these say nothing.
fn resource() -> Resource {
    use opentelemetry::Key;

    let detected = Resource::builder().build();
    let named = detected.get(&Key::new("service.name"));
    let unnamed = named.is_none_or(|name| name.as_str().starts_with("unknown_service"));
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let builder = Resource::builder().with_attribute(version);
    if unnamed { builder.with_service_name("expertd").build() } else { builder.build() }
}

/// The caller's trace, from the metadata of a call.
#[derive(Clone)]
pub struct TraceParent(Context);

impl TraceParent {
    /// The trace that `headers` name, or none; `None` while traces are off.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<TraceParent> {
        let traces = TRACES.get()?;
        Some(TraceParent(traces.propagator.extract_with_context(&Context::new(), &Headers(headers))))
    }

    /// No trace, so that a span begins one; `None` while traces are off.
    fn none() -> Option<TraceParent> {
        TRACES.get().map(|_| TraceParent(Context::new()))
    }
}

/// Largest value of a caller's header that is kept with each of its spans, the size that the W3C asks for. Spans wait for the
/// receiver, and what callers send must not decide how much memory that takes.
const MAX_STATE_BYTES: usize = 512;

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok().filter(|value| value.len() <= MAX_STATE_BYTES)
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use opentelemetry::trace::TraceContextExt as _;

    use super::*;

    /// The caller's trace in the given headers.
    fn extract(state: &str) -> Context {
        let mut headers = HeaderMap::new();
        let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        headers.insert("traceparent", parent.parse().unwrap());
        headers.insert("tracestate", state.parse().unwrap());
        TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(&headers))
    }

    #[test]
    fn long_states_of_callers_are_not_kept() {
        let short = extract("vendor=value");
        assert_eq!(short.span().span_context().trace_state().header(), "vendor=value");
        let members: Vec<_> = (0..200).map(|number| format!("v{number}={}", "x".repeat(60))).collect();
        let long = extract(&members.join(","));
        assert!(long.span().span_context().is_valid(), "the trace goes on");
        assert_eq!(long.span().span_context().trace_state().header(), "");
    }
}
