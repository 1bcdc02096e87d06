//! Counts of the spans that are sent.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use metrics::{Counter, counter};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};

use crate::{Rarely, names};

/// An exporter whose spans are counted, sent or dropped.
pub(super) struct Counted<E> {
    exporter: E,
    sent: Counter,
    failed: Counter,
    errors: Mutex<Rarely>,
}

impl<E> Counted<E> {
    pub(super) fn new(exporter: E) -> Counted<E> {
        let sent = counter!(names::TRACE_SPANS_SENT_TOTAL);
        let failed = counter!(names::TRACE_SPANS_DROPPED_TOTAL, "reason" => "export");
        failed.increment(0);
        Counted { exporter, sent, failed, errors: Mutex::default() }
    }
}

impl<E> std::fmt::Debug for Counted<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Counted")
    }
}

impl<E: SpanExporter> SpanExporter for Counted<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let count = batch.len() as u64;
        let result = self.exporter.export(batch).await;
        match &result {
            Ok(()) => self.sent.increment(count),
            Err(error) => {
                self.failed.increment(count);
                if let Some(times) = self.errors.lock().unwrap_or_else(PoisonError::into_inner).now() {
                    tracing::warn!(%error, times, "spans could not be sent and were dropped");
                }
            }
        }
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}
