//! The process-wide metrics recorder, rendered in Prometheus' text format.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::build::commit;
use super::logs::record_dropped_lines;
use super::names::{self, Kind};
use super::process::resident_bytes;
use crate::progress;

/// Interval at which histograms are drained. Until then they hold every sample in memory: at forty thousand calls a second, 2 MB more
/// each second.
const UPKEEP_EVERY: Duration = Duration::from_millis(250);

/// Handle that renders the metrics of this process.
#[derive(Clone)]
pub struct Recorder {
    handle: PrometheusHandle,
}

impl Recorder {
    /// All metrics in Prometheus' text format.
    pub fn render(&self) -> String {
        record_dropped_lines();
        record_memory();
        self.handle.render()
    }
}

/// Builds a recorder with explicit buckets for every histogram of [`names::ALL`].
pub(super) fn build() -> PrometheusRecorder {
    let mut builder = PrometheusBuilder::new();
    for metric in names::ALL {
        if let Kind::Histogram(buckets) = metric.kind {
            builder = builder
                .set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), buckets)
                .expect("every histogram of the table has buckets");
        }
    }
    builder.build_recorder()
}

/// Describes every metric to the current recorder.
pub(super) fn describe_all() {
    for metric in names::ALL {
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, metric.unit, metric.help),
            Kind::Gauge => describe_gauge!(metric.name, metric.unit, metric.help),
            Kind::Histogram(_) => describe_histogram!(metric.name, metric.unit, metric.help),
        }
    }
}

/// Installs the recorder of this process at the first call; later calls return the same one. Metric handles that were made
/// before the first call record nothing.
///
/// `features` names the features of this build, for [`names::BUILD_INFO`].
///
/// The recorder's upkeep runs on a thread of its own and needs no asynchronous runtime.
pub fn install_recorder(features: &'static str) -> Recorder {
    static INSTALLED: OnceLock<Recorder> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            let recorder = build();
            let handle = recorder.handle();
            if metrics::set_global_recorder(recorder).is_err() {
                tracing::warn!("another metrics recorder is installed already; metrics will stay empty");
            }
            describe_all();
            start_counters();
            record_build(features);
            let upkeep = handle.clone();
            let thread = std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
                let needed = progress::need("the thread that drains histograms");
                loop {
                    needed.tick();
                    upkeep.run_upkeep();
                    std::thread::sleep(UPKEEP_EVERY);
                }
            });
            if let Err(error) = thread {
                tracing::warn!(%error, "cannot start the thread that drains histograms; they will grow until metrics are scraped");
            }
            Recorder { handle }
        })
        .clone()
}

/// Lets counters without labels start at 0, so that a rate includes the first increment.
fn start_counters() {
    for metric in names::ALL.iter().filter(|metric| metric.kind == Kind::Counter && metric.labels.is_empty())
    {
        counter!(metric.name).increment(0);
    }
}

fn record_build(features: &'static str) {
    gauge!(
        names::BUILD_INFO,
        "version" => env!("CARGO_PKG_VERSION"),
        "commit" => commit(),
        "features" => features,
    )
    .set(1.0);
    gauge!(names::ROUTER_MEMORY_LIMIT_BYTES).set(0.0);
    if let Ok(now) = SystemTime::now().duration_since(UNIX_EPOCH) {
        gauge!(names::START_TIME_SECONDS).set(now.as_secs_f64());
    }
}

fn record_memory() {
    if let Some(memory) = resident_bytes(std::process::id()) {
        memory.record("router");
    }
}

#[cfg(test)]
mod tests;
