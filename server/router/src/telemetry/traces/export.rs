//! The queue of ended spans, and the task that sends them.

use std::time::Duration;

use metrics::{Counter, counter};
use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::telemetry::{Rarely, names};

/// Capacity of the queue, in spans, unless `OTEL_BSP_MAX_QUEUE_SIZE` says otherwise.
const QUEUE_SPANS: usize = 8192;
/// Longest time that a span waits for others of its batch, unless `OTEL_BSP_SCHEDULE_DELAY` says otherwise.
const DELAY: Duration = Duration::from_secs(1);
/// Largest number of spans in one message, unless `OTEL_BSP_MAX_EXPORT_BATCH_SIZE` says otherwise.
const BATCH_SPANS: usize = 512;

enum Mail {
    Span(Box<SpanData>),
    /// Answered once all spans before it were sent or dropped.
    Flush(oneshot::Sender<()>),
}

/// The sending side of the queue.
#[derive(Clone)]
pub(super) struct Queue {
    mail: mpsc::Sender<Mail>,
    full: Counter,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Queue with room for {} spans", self.mail.capacity())
    }
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok().filter(|value| *value > 0)
}

fn spans(name: &str, default: usize) -> usize {
    setting(name).and_then(|value| usize::try_from(value).ok()).unwrap_or(default).min(1 << 20)
}

impl Queue {
    /// Starts the task that sends spans.
    pub(super) fn start(exporter: impl SpanExporter + 'static) -> Queue {
        let (mail, received) = mpsc::channel(spans("OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_SPANS));
        let delay = setting("OTEL_BSP_SCHEDULE_DELAY").map_or(DELAY, Duration::from_millis);
        let most = spans("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", BATCH_SPANS);
        tokio::spawn(send_all(exporter, received, delay, most));
        let full = counter!(names::TRACE_SPANS_DROPPED_TOTAL, "reason" => "queue");
        full.increment(0);
        Queue { mail, full }
    }

    /// Resolves when the spans that are in the queue were sent or dropped.
    pub(super) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if self.mail.send(Mail::Flush(done)).await.is_ok() {
            let _ = flushed.await;
        }
    }
}

/// Sends spans in batches until the queue is closed.
async fn send_all(exporter: impl SpanExporter, mut mail: mpsc::Receiver<Mail>, delay: Duration, most: usize) {
    let sent = counter!(names::TRACE_SPANS_SENT_TOTAL);
    let failed = counter!(names::TRACE_SPANS_DROPPED_TOTAL, "reason" => "export");
    sent.increment(0);
    failed.increment(0);
    let mut rarely = Rarely::default();
    let mut open = true;
    while open {
        let (mut batch, mut flushes) = (Vec::new(), Vec::new());
        let mut until = None;
        while batch.len() < most && flushes.is_empty() {
            let next = match until {
                None => mail.recv().await,
                Some(until) => match tokio::time::timeout_at(until, mail.recv()).await {
                    Ok(next) => next,
                    Err(_) => break,
                },
            };
            match next {
                Some(Mail::Span(span)) => batch.push(*span),
                Some(Mail::Flush(done)) => flushes.push(done),
                None => {
                    open = false;
                    break;
                }
            }
            until = until.or_else(|| Some(Instant::now() + delay));
        }
        let count = batch.len() as u64;
        if count > 0 {
            match exporter.export(batch).await {
                Ok(()) => sent.increment(count),
                Err(error) => {
                    failed.increment(count);
                    if let Some(times) = rarely.now() {
                        tracing::warn!(%error, times, "spans could not be sent and were dropped");
                    }
                }
            }
        }
        for done in flushes {
            let _ = done.send(());
        }
    }
}

/// Puts ended spans into the queue.
#[derive(Debug)]
pub(super) struct QueueProcessor(pub(super) Queue);

impl SpanProcessor for QueueProcessor {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.0.mail.try_send(Mail::Span(Box::new(span))).is_err() {
            self.0.full.increment(1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}
