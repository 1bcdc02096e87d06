//! What the step loop tells about itself: metrics, and the status that others read.

use super::Driver;
use crate::backend::{RankState, RankStatus};
use crate::cluster::FaultKind;
use crate::telemetry::names;
use expertd_types::Rank;

impl Driver {
    pub(super) fn show_queue(&self) {
        let tokens = self.shared.inbox().queued_tokens;
        let in_step = self.active.values().filter(|a| a.is_in_step()).count();
        metrics::gauge!(names::QUEUE_TOKENS).set(tokens as f64);
        metrics::gauge!(names::QUEUE_REQUESTS).set((self.active.len() - in_step) as f64);
        if let Ok(mut status) = self.shared.status.lock() {
            status.requests_in_flight = in_step as u64;
            status.requests_queued = (self.active.len() - in_step) as u64;
        }
    }

    pub(super) fn show_ranks(&self) {
        let ranks = match &self.group {
            Some(group) => (0..)
                .zip(group.ranks())
                .map(|(rank, view)| {
                    metrics::gauge!(names::RANK_WEIGHT_BYTES, "rank" => rank.to_string())
                        .set(view.loaded_bytes as f64);
                    RankStatus {
                        rank: Rank(rank),
                        pid: view.pid,
                        device: view.device.clone().unwrap_or_else(|| self.cluster.device.to_string()),
                        state: if view.ready { RankState::Ready } else { RankState::Loading },
                        weight_bytes_loaded: view.loaded_bytes,
                        weight_bytes_total: view.total_bytes,
                    }
                })
                .collect(),
            None => (0..self.cluster.shape.ranks)
                .map(|rank| RankStatus {
                    rank: Rank(rank),
                    pid: 0,
                    device: self.cluster.device.to_string(),
                    state: RankState::Gone,
                    weight_bytes_loaded: 0,
                    weight_bytes_total: 0,
                })
                .collect(),
        };
        if let Ok(mut status) = self.shared.status.lock() {
            status.ranks = ranks;
        }
    }
}

/// From 0 on: a rate over a counter that begins at 1 does not see the first fault.
pub(super) fn show_counters_of_faults() {
    for kind in FaultKind::ALL {
        metrics::counter!(names::GENERATION_ENDS_TOTAL, "reason" => kind.label()).increment(0);
    }
    metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(0);
}
