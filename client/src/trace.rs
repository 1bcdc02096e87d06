//! The trace context that calls carry (W3C `traceparent` and `tracestate`).

use opentelemetry::Context;
use opentelemetry::trace::TraceContextExt as _;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};

/// Adds the current context, if there is a trace, to the metadata of a call.
pub(crate) fn inject(metadata: &mut MetadataMap) {
    Context::map_current(|context| {
        let span = context.span();
        let span = span.span_context();
        if !span.is_valid() {
            return;
        }
        let flags = span.trace_flags().to_u8();
        let parent = format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id());
        let mut insert = |name: &'static str, text: &str| {
            if let Ok(value) = AsciiMetadataValue::try_from(text) {
                metadata.insert(name, value);
            }
        };
        insert("traceparent", &parent);
        let state = span.trace_state().header();
        if !state.is_empty() {
            insert("tracestate", &state);
        }
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

    use super::*;

    #[test]
    fn the_current_trace_becomes_metadata() {
        let mut metadata = MetadataMap::new();
        inject(&mut metadata);
        assert!(metadata.is_empty(), "there is no trace");
        let span = SpanContext::new(
            TraceId::from(0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736),
            SpanId::from(0x00f0_67aa_0ba9_02b7),
            TraceFlags::SAMPLED,
            false,
            TraceState::from_key_value([("vendor", "x")]).unwrap(),
        );
        let _guard = Context::new().with_remote_span_context(span).attach();
        inject(&mut metadata);
        let text = |name: &str| metadata.get(name).unwrap().to_str().unwrap().to_owned();
        assert_eq!(text("traceparent"), "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01");
        assert_eq!(text("tracestate"), "vendor=x");
    }
}
