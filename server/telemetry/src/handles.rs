//! Metric handles for hot paths, looked up once instead of for every event.

use std::time::Duration;

use metrics::{Counter, Histogram, counter, histogram};

use super::names;
use expertd_types::Phase;

/// Metrics of steps. Must be made after [`super::install_recorder`].
pub struct StepMetrics {
    steps: Counter,
    tokens: Histogram,
    duration: Histogram,
    ranks: Vec<RankMetrics>,
}

struct RankMetrics {
    tokens: Counter,
    expert_rows: Counter,
    copied_bytes: Counter,
    phases: [Histogram; 7],
}

impl StepMetrics {
    /// Makes the handles for a group of `ranks` ranks.
    #[must_use]
    pub fn new(ranks: usize) -> StepMetrics {
        StepMetrics {
            steps: counter!(names::STEPS_TOTAL),
            tokens: histogram!(names::STEP_TOKENS),
            duration: histogram!(names::STEP_DURATION_SECONDS),
            ranks: (0..ranks).map(RankMetrics::new).collect(),
        }
    }

    /// Records one completed step.
    pub fn step(&self, tokens: usize, duration: Duration) {
        self.steps.increment(1);
        self.tokens.record(tokens as f64);
        self.duration.record(duration.as_secs_f64());
    }

    /// Records one rank's part of a step: the tokens that it was the source of, the pairs of row and expert that it
    /// computed, the bytes of weights that it copied to its device, and the duration of each phase in the order of [`Phase::ALL`].
    pub fn rank(
        &self,
        rank: usize,
        tokens: u64,
        expert_rows: u64,
        copied_bytes: u64,
        phases: &[Duration; 7],
    ) {
        let Some(metrics) = self.ranks.get(rank) else { return };
        metrics.tokens.increment(tokens);
        metrics.expert_rows.increment(expert_rows);
        metrics.copied_bytes.increment(copied_bytes);
        for (histogram, time) in metrics.phases.iter().zip(phases) {
            histogram.record(time.as_secs_f64());
        }
    }
}

impl RankMetrics {
    fn new(rank: usize) -> RankMetrics {
        let rank = rank.to_string();
        RankMetrics {
            tokens: counter!(names::RANK_TOKENS_TOTAL, "rank" => rank.clone()),
            expert_rows: counter!(names::RANK_EXPERT_ROWS_TOTAL, "rank" => rank.clone()),
            copied_bytes: counter!(names::RANK_COPIED_BYTES_TOTAL, "rank" => rank.clone()),
            phases: Phase::ALL.map(
                |phase| histogram!(names::PHASE_DURATION_SECONDS, "rank" => rank.clone(), "phase" => phase.name()),
            ),
        }
    }
}

/// Metrics of the requests of one method. Must be made after [`super::install_recorder`].
#[derive(Debug)]
pub struct RequestMetrics {
    method: &'static str,
    ok: Counter,
    duration: Histogram,
    tokens: Histogram,
}

impl RequestMetrics {
    /// Makes the handles for `method`, which is `Forward`, `ForwardStream` or `Session`.
    #[must_use]
    pub fn new(method: &'static str) -> RequestMetrics {
        RequestMetrics {
            method,
            ok: counter!(names::REQUESTS_TOTAL, "method" => method, "code" => "OK"),
            duration: histogram!(names::REQUEST_DURATION_SECONDS, "method" => method),
            tokens: histogram!(names::REQUEST_TOKENS),
        }
    }

    /// Records an admitted request.
    pub fn admitted(&self, tokens: usize) {
        self.tokens.record(tokens as f64);
    }

    /// Records an answered request; `code` is the name of its gRPC status code.
    pub fn answered(&self, code: &'static str, duration: Duration) {
        if code == "OK" {
            self.ok.increment(1);
        } else {
            counter!(names::REQUESTS_TOTAL, "method" => self.method, "code" => code).increment(1);
        }
        self.duration.record(duration.as_secs_f64());
    }
}
