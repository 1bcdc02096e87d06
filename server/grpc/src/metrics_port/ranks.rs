//! Gauges of the ranks' processes and devices, set when metrics are scraped.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use metrics::gauge;

use expertd_core::backend::RankStatus;
use expertd_telemetry::{names, resident_bytes};
use expertd_types::Rank;

/// Sets the gauges of ranks.
#[derive(Debug, Default)]
pub(super) struct RankGauges {
    /// The gauges of GPUs that have had a value.
    of_gpus: Mutex<BTreeSet<(Rank, &'static str)>>,
}

impl RankGauges {
    /// Sets the gauges to the present state of `ranks`.
    pub(super) fn record(&self, ranks: &[RankStatus]) {
        let mut of_gpus = self.of_gpus.lock().unwrap_or_else(PoisonError::into_inner);
        for rank in ranks {
            let memory = (rank.pid != 0).then(|| resident_bytes(rank.pid)).flatten();
            memory.unwrap_or_default().record(&rank.rank.to_string());
            let percent = rank.usage.and_then(|usage| usage.utilization_percent);
            let values = [
                (names::GPU_MEMORY_USED_BYTES, rank.usage.map(|usage| usage.memory_used_bytes as f64)),
                (names::GPU_MEMORY_TOTAL_BYTES, rank.usage.map(|usage| usage.memory_total_bytes as f64)),
                (names::GPU_UTILIZATION_RATIO, percent.map(|percent| f64::from(percent) / 100.0)),
            ];
            for (name, value) in values {
                if value.is_some() {
                    of_gpus.insert((rank.rank, name));
                }
                // The recorder cannot remove a gauge.
                if of_gpus.contains(&(rank.rank, name)) {
                    gauge!(name, "rank" => rank.rank.to_string()).set(value.unwrap_or(f64::NAN));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;

    use super::*;
    use expertd_core::backend::RankState;
    use expertd_types::DeviceUsage;

    fn rank(number: u32, pid: u32, usage: Option<DeviceUsage>) -> RankStatus {
        RankStatus {
            rank: Rank(number),
            pid,
            device: "a device".to_owned(),
            state: RankState::Ready,
            weight_bytes_loaded: 0,
            weight_bytes_total: 0,
            usage,
        }
    }

    #[test]
    fn a_gpu_has_gauges_once_it_reports_and_nan_while_it_does_not() {
        let recorder = PrometheusBuilder::new().build_recorder();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            let gauges = RankGauges::default();
            let usage =
                DeviceUsage { memory_used_bytes: 3, memory_total_bytes: 4, utilization_percent: Some(25) };
            gauges.record(&[rank(0, std::process::id(), Some(usage)), rank(1, std::process::id(), None)]);
            let text = handle.render();
            for line in [
                "expertd_gpu_memory_used_bytes{rank=\"0\"} 3",
                "expertd_gpu_memory_total_bytes{rank=\"0\"} 4",
                "expertd_gpu_utilization_ratio{rank=\"0\"} 0.25",
            ] {
                assert!(text.contains(line), "{line} is not in {text}");
            }
            assert!(!text.contains("expertd_gpu_memory_used_bytes{rank=\"1\"}"), "{text}");
            assert!(
                !text.contains("expertd_process_resident_bytes{process=\"1\",kind=\"anon\"} 0"),
                "{text}"
            );

            gauges.record(&[rank(0, 0, None), rank(1, 0, None)]);
            let text = handle.render();
            assert!(text.contains("expertd_gpu_memory_used_bytes{rank=\"0\"} NaN"), "{text}");
            assert!(text.contains("expertd_process_resident_bytes{process=\"0\",kind=\"anon\"} 0"), "{text}");
        });
    }
}
