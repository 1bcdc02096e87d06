//! Metrics and status of the step loop.

use std::sync::PoisonError;

use super::Driver;
use crate::backend::{RankState, RankStatus};
use crate::cluster::FaultKind;
use expertd_telemetry::names;
use expertd_types::Rank;

/// The queue's counts at their last publication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    queued_tokens: usize,
    requests_queued: usize,
    requests_in_step: usize,
}

impl Driver {
    fn counts(&self) -> Shown {
        Shown {
            queued_tokens: self.step_loop.queued_tokens(),
            requests_queued: self.step_loop.requests_queued(),
            requests_in_step: self.step_loop.requests_in_step(),
        }
    }

    /// Whether a completed step or the queue's counts are to be published.
    pub(super) fn has_unpublished(&self) -> bool {
        !self.unrecorded.is_empty() || self.counts() != self.shown
    }

    /// Publishes the queue's counts if they have changed.
    pub(super) fn show_queue(&mut self) {
        let counts = self.counts();
        if counts == self.shown {
            return;
        }
        self.shown = counts;
        metrics::gauge!(names::QUEUE_TOKENS).set(counts.queued_tokens as f64);
        metrics::gauge!(names::QUEUE_REQUESTS).set(counts.requests_queued as f64);
        let mut status = self.shared.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.requests_in_flight = counts.requests_in_step as u64;
        status.requests_queued = counts.requests_queued as u64;
    }

    pub(super) fn show_ranks(&self) {
        let ranks = match (&self.group, &self.loading) {
            (None, Some((_, loading))) => (0..)
                .zip(loading.views())
                .map(|(rank, view)| RankStatus {
                    rank: Rank(rank),
                    pid: view.pid,
                    device: self.cluster.device.to_string(),
                    state: RankState::Loading,
                    weight_bytes_loaded: view.loaded_bytes,
                    weight_bytes_total: view.total_bytes,
                    usage: None,
                })
                .collect(),
            (Some(group), _) => (0..)
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
                        usage: view.usage,
                    }
                })
                .collect(),
            (None, None) => (0..self.cluster.shape.ranks)
                .map(|rank| RankStatus {
                    rank: Rank(rank),
                    pid: 0,
                    device: self.cluster.device.to_string(),
                    state: RankState::Gone,
                    weight_bytes_loaded: 0,
                    weight_bytes_total: 0,
                    usage: None,
                })
                .collect(),
        };
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).ranks = ranks;
    }
}

/// Starts counters at 0, because a rate over a counter that starts at 1 misses the first fault.
pub(super) fn show_counters_of_faults() {
    for kind in FaultKind::ALL {
        metrics::counter!(names::GENERATION_ENDS_TOTAL, "reason" => kind.label()).increment(0);
    }
    metrics::counter!(names::REQUESTS_CANCELLED_TOTAL).increment(0);
    metrics::counter!(names::REQUESTS_POISONED_TOTAL).increment(0);
}
