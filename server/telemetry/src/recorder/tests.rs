//! Tests of `recorder`.

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
         series with labels, a histogram, and a gauge of something that the service does not use (sessions, TLS, GPUs) are\nabsent \
         until their first value; counters without labels start at 0.\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n",
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
