//! The process-wide metrics recorder, rendered in Prometheus' text format.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::logs::record_dropped_lines;
use super::names::{self, Kind};
use super::process::resident_bytes;
use crate::progress;

/// Interval at which histograms are drained. Until then they hold every sample in memory: at forty thousand calls a second, 2 MB more
/// each second.
const UPKEEP_EVERY: Duration = Duration::from_millis(250);
/// Number of such intervals between two records of the process's memory.
const MEMORY_EVERY: usize = 20;

/// Handle that renders the metrics of this process.
#[derive(Clone)]
pub struct Recorder {
    handle: PrometheusHandle,
}

impl Recorder {
    /// All metrics in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        record_dropped_lines();
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
                for turn in (0..MEMORY_EVERY).cycle() {
                    needed.tick();
                    upkeep.run_upkeep();
                    if turn == 0 {
                        record_memory();
                    }
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
        "commit" => option_env!("EXPERTD_COMMIT").unwrap_or("unknown"),
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
mod tests {
    use std::collections::BTreeSet;

    use metrics::histogram;

    use super::*;

    /// Name and type of every `# TYPE` line.
    fn exported(text: &str) -> BTreeSet<(String, String)> {
        text.lines()
            .filter_map(|line| line.strip_prefix("# TYPE "))
            .filter_map(|rest| rest.split_once(' '))
            .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
            .collect()
    }

    #[test]
    fn exported_names_and_kinds_are_the_documented_ones() {
        let recorder = build();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe_all();
            for metric in names::ALL {
                let labels: Vec<_> = metric.labels.iter().map(|l| metrics::Label::new(*l, "x")).collect();
                match metric.kind {
                    Kind::Counter => counter!(metric.name, labels).increment(1),
                    Kind::Gauge => gauge!(metric.name, labels).set(1.0),
                    Kind::Histogram(_) => histogram!(metric.name, labels).record(1.0),
                }
            }
        });
        let text = handle.render();
        let documented: BTreeSet<_> = names::ALL
            .iter()
            .map(|m| {
                let kind = match m.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge => "gauge",
                    Kind::Histogram(_) => "histogram",
                };
                (m.name.to_owned(), kind.to_owned())
            })
            .collect();
        assert_eq!(exported(&text), documented);
        for metric in names::ALL {
            assert!(
                text.contains(&format!("# HELP {} {}", metric.name, metric.help)),
                "{} has no help",
                metric.name
            );
        }
    }

    #[test]
    fn names_end_in_their_units() {
        let mut seen = BTreeSet::new();
        for metric in names::ALL {
            assert!(seen.insert(metric.name), "{} twice", metric.name);
            assert!(metric.name.starts_with("expertd_"));
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Kind::Counter, "{}", metric.name);
            match metric.unit {
                metrics::Unit::Seconds => assert!(metric.name.ends_with("_seconds"), "{}", metric.name),
                metrics::Unit::Bytes => assert!(metric.name.contains("_bytes"), "{}", metric.name),
                _ => {}
            }
            if let Kind::Histogram(buckets) = metric.kind {
                assert!(buckets.windows(2).all(|w| w[0] < w[1]), "{} has unsorted buckets", metric.name);
            }
        }
    }

    /// Text of docs/metrics.md, made from the table.
    fn page() -> String {
        use std::fmt::Write as _;
        let mut page = String::from(
            "# Metrics\n\nOne Prometheus endpoint per host (`--metrics-listen`, path `/metrics`), ranks as labels. This page is made \
             from\n`server/telemetry/src/names.rs` (`UPDATE_DOCS=1 cargo test -p expertd-telemetry metrics_page`).\n\nA \
             series with labels, a histogram, and a gauge of something that the service does not use (sessions, TLS, GPUs) are absent \
             until their\nfirst value; counters without labels start at 0.\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n",
        );
        for m in names::ALL {
            let kind = match m.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram(_) => "histogram",
            };
            let labels = m.labels.iter().map(|l| format!("`{l}`")).collect::<Vec<_>>().join(", ");
            writeln!(page, "| `{}` | {kind} | {labels} | {} |", m.name, m.help.trim())
                .expect("writes to a string");
        }
        page.push_str(
            "\n## Reading them\n\nImbalance of expert load over five minutes (1 is perfect):\n\n```\nmax by (instance) \
             (rate(expertd_rank_expert_rows_total[5m]))\n  / avg by (instance) (rate(expertd_rank_expert_rows_total[5m]))\n```\n\nShare of time per phase on the slowest rank:\n\n```\nmax by (instance, phase) \
             (rate(expertd_phase_duration_seconds_sum[5m]))\n  / on (instance) group_left sum by (instance) \
             (rate(expertd_step_duration_seconds_sum[5m]))\n```\n\nThe same listener answers `/healthz` (200 while the process lives) and \
             `/readyz` (200 while requests are admitted,\nelse 503 with the reason).\nAt `/` it has a status page ([operations](operations.md#watch-it)).\n",
        );
        page
    }

    #[test]
    fn metrics_page_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, page()).expect("docs/metrics.md can be written");
        }
        let found = std::fs::read_to_string(path).unwrap_or_default();
        assert!(found == page(), "docs/metrics.md is stale: run UPDATE_DOCS=1 cargo test metrics_page");
    }
}
