//! Metrics and status of the step loop.

use std::sync::PoisonError;

use expertd_scheduler::{FaultKind, StepLoop};
use expertd_types::Rank;

use super::Processes;
use crate::backend::{RankState, RankStatus};
use expertd_telemetry::names;

/// The queue's counts at their last publication.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QueueCounts {
    queued_tokens: usize,
    requests_queued: usize,
    requests_in_step: usize,
}

impl QueueCounts {
    fn of(steps: &StepLoop) -> QueueCounts {
        QueueCounts {
            queued_tokens: steps.queued_tokens(),
            requests_queued: steps.requests_queued(),
            requests_in_step: steps.requests_in_step(),
        }
    }
}

impl Processes {
    /// Whether a completed step or the queue's counts are to be published.
    pub(super) fn has_unpublished(&self, steps: &StepLoop) -> bool {
        !self.unrecorded.is_empty() || QueueCounts::of(steps) != self.shown
    }

    /// Publishes the queue's counts if they have changed.
    pub(super) fn show_queue(&mut self, steps: &StepLoop) {
        let counts = QueueCounts::of(steps);
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
        let loading = self.loading.as_ref().filter(|loading| !loading.is_in_background());
        let group = self.group.as_ref().filter(|group| !group.is_ending());
        let gone = |rank| RankStatus {
            rank: Rank(rank),
            pid: 0,
            device: self.cluster.devices[rank as usize].to_string(),
            state: RankState::Gone,
            weight_bytes_loaded: 0,
            weight_bytes_total: 0,
            usage: None,
        };
        let mut ranks: Vec<RankStatus> = (0..self.cluster.shape.ranks).map(gone).collect();
        if let Some(group) = group {
            for (status, view) in ranks.iter_mut().zip(group.ranks()) {
                let label = status.rank.to_string();
                metrics::gauge!(names::RANK_WEIGHT_BYTES, "rank" => label).set(view.loaded_bytes as f64);
                (status.pid, status.usage) = (view.pid, view.usage);
                status.device = view.device.clone().unwrap_or_else(|| status.device.clone());
                status.state = if view.ready { RankState::Ready } else { RankState::Loading };
                (status.weight_bytes_loaded, status.weight_bytes_total) =
                    (view.loaded_bytes, view.total_bytes);
            }
        } else if let Some(loading) = loading {
            for (status, view) in ranks.iter_mut().zip(loading.views()) {
                (status.pid, status.state) = (view.pid, RankState::Loading);
                (status.weight_bytes_loaded, status.weight_bytes_total) =
                    (view.loaded_bytes, view.total_bytes);
            }
        }
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).ranks = ranks;
    }

    /// Publishes the progress of a reload.
    pub(super) fn show_reload(&self, progress: Option<(u64, u64)>) {
        self.shared.status.lock().unwrap_or_else(PoisonError::into_inner).reload = progress;
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
