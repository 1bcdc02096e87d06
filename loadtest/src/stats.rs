//! Records of the workers and their evaluation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use expertd_proto::v1::StepTiming;
use hdrhistogram::Histogram;
use serde::Serialize;
use tonic::Code;

/// Number of wrong or lost answers that are described individually.
const NOTES: usize = 20;

/// A histogram of durations from 1 ns to 1 h with three significant digits.
#[derive(Clone, Debug)]
pub struct Durations(Histogram<u64>);

impl Default for Durations {
    fn default() -> Durations {
        let histogram = Histogram::new_with_bounds(1, 3_600_000_000_000, 3);
        Durations(histogram.expect("the constant bounds are valid"))
    }
}

impl Durations {
    /// Durations in less memory, of two significant digits instead of three: for records of which there are many.
    #[must_use]
    pub fn coarse() -> Durations {
        let histogram = Histogram::new_with_bounds(1, 3_600_000_000_000, 2);
        Durations(histogram.expect("the constant bounds are valid"))
    }

    /// Records one duration.
    pub fn record(&mut self, duration: Duration) {
        self.0.saturating_record(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).max(1));
    }

    /// Adds the durations of `other`.
    pub fn merge(&mut self, other: &Durations) {
        // Merging fails only if the bounds differ, and all histograms have the same bounds.
        let _ = self.0.add(&other.0);
    }

    /// Number of recorded durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The smallest recorded duration that a share of `quantile` (0 to 1) does not exceed.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_nanos(self.0.value_at_quantile(quantile))
    }

    /// The usual percentiles.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let at = |quantile| self.quantile(quantile).as_secs_f64();
        let none = self.0.is_empty();
        Summary {
            count: self.0.len(),
            mean_seconds: if none { 0.0 } else { self.0.mean() * 1e-9 },
            min_seconds: if none { 0.0 } else { self.0.min() as f64 * 1e-9 },
            p50_seconds: at(0.5),
            p90_seconds: at(0.9),
            p99_seconds: at(0.99),
            p999_seconds: at(0.999),
            max_seconds: self.0.max() as f64 * 1e-9,
        }
    }
}

/// Percentiles of durations, in seconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[allow(missing_docs, reason = "the names are complete descriptions")]
pub struct Summary {
    pub count: u64,
    pub mean_seconds: f64,
    pub min_seconds: f64,
    pub p50_seconds: f64,
    pub p90_seconds: f64,
    pub p99_seconds: f64,
    pub p999_seconds: f64,
    pub max_seconds: f64,
}

/// The phases of a step, in order.
pub const PHASES: [&str; 7] = ["copy_in", "gate", "prepare", "dispatch", "experts", "combine", "copy_out"];

/// Durations by phase in nanoseconds, in the order of [`PHASES`].
#[must_use]
pub fn phases(timing: &StepTiming) -> [u64; 7] {
    [
        timing.copy_in_ns,
        timing.gate_ns,
        timing.prepare_ns,
        timing.dispatch_ns,
        timing.experts_ns,
        timing.combine_ns,
        timing.copy_out_ns,
    ]
}

/// The record of one worker. Durations and sums cover measured requests only; faults are counted from the first request
/// on.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Time from the intended arrival (open loop) or the sending (closed loop) to the decoded answer.
    pub latency: Durations,
    /// Step time, from receipts.
    pub step: Durations,
    /// Queue time, from receipts.
    pub queue: Durations,
    /// Rest of the time since sending: transport, client, validation.
    pub rest: Durations,
    /// Delay of the client's own sending (open loop).
    pub late: Durations,
    /// Time of each walk through all layers.
    pub walks: Durations,
    /// The part of each walk that its calls took.
    pub walks_in_calls: Durations,
    /// Number of rows of all walks.
    pub walk_rows: u64,
    /// Number of walks in which a call failed. The figures of walks exclude them.
    pub walks_failed: u64,
    /// Time of walks' calls by decoder layer.
    pub layers: BTreeMap<u32, Durations>,
    /// Durations by phase; empty without `--timings`.
    pub phases: BTreeMap<usize, Durations>,
    /// Sum of the tokens of the steps that requests took part in, and the number of summands.
    pub step_tokens: (u64, u64),
    /// Number of measured requests that were answered.
    pub answered: u64,
    /// Number of rows in these answers.
    pub tokens: u64,
    /// Bytes of rows sent and received for these answers.
    pub row_bytes: u64,
    /// Number of all answers, warm-up included.
    pub answered_all: u64,
    /// Number of statuses by code, warm-up and retried calls included.
    pub statuses: BTreeMap<i32, u64>,
    /// Message of one status per code.
    pub status_texts: BTreeMap<i32, String>,
    /// Number of requests sent again.
    pub retries: u64,
    /// Number of requests that ended without an answer or a status.
    pub lost: u64,
    /// Number of wrong answers.
    pub wrong: u64,
    /// Number of arrivals that were not sent because too many requests were outstanding.
    pub shed: u64,
    /// Number of answers compared with recorded answers.
    pub checked_known: u64,
    /// Number of answers whose rows were sent again and compared.
    pub checked_again: u64,
    /// Number of samples that were not compared.
    pub unchecked: u64,
    /// Largest relative L2 error of compared rows.
    pub largest_error: f64,
    /// Descriptions of the first wrong and lost answers.
    pub notes: Vec<String>,
    /// Smallest and largest step number in measured answers.
    pub steps: Option<(u64, u64)>,
    /// Generations in receipts.
    pub generations: BTreeSet<u64>,
    /// Time of the last measured answer.
    pub last_answer: Option<Instant>,
}

impl Stats {
    /// Records a walk of `rows` rows through all layers, and the part of it that its calls took.
    pub fn walk(&mut self, rows: u32, took: Duration, in_calls: Duration) {
        self.walks.record(took);
        self.walks_in_calls.record(in_calls);
        self.walk_rows += u64::from(rows);
    }

    /// Records the call of one layer of a walk.
    pub fn layer(&mut self, layer: u32, took: Duration) {
        self.layers.entry(layer).or_insert_with(Durations::coarse).record(took);
    }

    /// Counts a wrong answer.
    pub fn wrong(&mut self, note: String) {
        self.wrong += 1;
        if self.notes.len() < NOTES {
            self.notes.push(note);
        }
    }

    /// Counts a lost request.
    pub fn lost(&mut self, note: String) {
        self.lost += 1;
        if self.notes.len() < NOTES {
            self.notes.push(note);
        }
    }

    /// Counts a status.
    pub fn status(&mut self, code: Code, message: &str) {
        *self.statuses.entry(code as i32).or_default() += 1;
        self.status_texts.entry(code as i32).or_insert_with(|| message.to_owned());
    }

    /// Adds the record `other`.
    pub fn merge(&mut self, other: &Stats) {
        self.latency.merge(&other.latency);
        self.step.merge(&other.step);
        self.queue.merge(&other.queue);
        self.rest.merge(&other.rest);
        self.late.merge(&other.late);
        self.walks.merge(&other.walks);
        self.walks_in_calls.merge(&other.walks_in_calls);
        self.walk_rows += other.walk_rows;
        self.walks_failed += other.walks_failed;
        for (&layer, durations) in &other.layers {
            self.layers.entry(layer).or_insert_with(Durations::coarse).merge(durations);
        }
        for (&phase, durations) in &other.phases {
            self.phases.entry(phase).or_default().merge(durations);
        }
        self.step_tokens.0 += other.step_tokens.0;
        self.step_tokens.1 += other.step_tokens.1;
        self.answered += other.answered;
        self.tokens += other.tokens;
        self.row_bytes += other.row_bytes;
        self.answered_all += other.answered_all;
        for (&code, count) in &other.statuses {
            *self.statuses.entry(code).or_default() += count;
        }
        for (&code, text) in &other.status_texts {
            self.status_texts.entry(code).or_insert_with(|| text.clone());
        }
        self.retries += other.retries;
        self.lost += other.lost;
        self.wrong += other.wrong;
        self.shed += other.shed;
        self.checked_known += other.checked_known;
        self.checked_again += other.checked_again;
        self.unchecked += other.unchecked;
        self.largest_error = self.largest_error.max(other.largest_error);
        let room = NOTES.saturating_sub(self.notes.len());
        self.notes.extend(other.notes.iter().take(room).cloned());
        self.steps = match (self.steps, other.steps) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
        self.generations.extend(&other.generations);
        self.last_answer = self.last_answer.max(other.last_answer);
    }
}

/// The records of all workers, behind several locks, so that workers seldom wait for each other.
#[derive(Debug)]
pub struct Recorder(Vec<Mutex<Stats>>);

impl Recorder {
    /// Creates records for about `workers` simultaneous writers.
    #[must_use]
    pub fn new(workers: usize) -> Recorder {
        Recorder((0..workers.clamp(1, 16)).map(|_| Mutex::default()).collect())
    }

    /// The record that worker `worker` writes to.
    pub fn of(&self, worker: u64) -> MutexGuard<'_, Stats> {
        let index = worker as usize % self.0.len();
        self.0[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sum of all records.
    #[must_use]
    pub fn total(&self) -> Stats {
        let mut total = Stats::default();
        for worker in 0..self.0.len() as u64 {
            total.merge(&self.of(worker));
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_recorded_durations() {
        let (mut odd, mut even) = (Durations::default(), Durations::default());
        for ms in 1..=1000 {
            let half = if ms % 2 == 0 { &mut even } else { &mut odd };
            half.record(Duration::from_millis(ms));
        }
        odd.merge(&even);
        let summary = odd.summary();
        assert_eq!(summary.count, 1000);
        for (got, wanted) in [
            (summary.p50_seconds, 0.5),
            (summary.p90_seconds, 0.9),
            (summary.p99_seconds, 0.99),
            (summary.max_seconds, 1.0),
            (summary.mean_seconds, 0.5005),
            (summary.min_seconds, 0.001),
        ] {
            assert!((got / wanted - 1.0).abs() < 2e-3, "{got} {wanted}");
        }
    }

    #[test]
    fn durations_beyond_the_bounds_are_counted() {
        let mut durations = Durations::default();
        durations.record(Duration::ZERO);
        durations.record(Duration::from_secs(100_000));
        assert_eq!(durations.count(), 2);
        assert_eq!(Durations::default().summary().p50_seconds, 0.0);
    }

    #[test]
    fn records_of_all_workers_add_up() {
        let recorder = Recorder::new(3);
        for worker in 0..10 {
            let mut stats = recorder.of(worker);
            stats.answered += 1;
            stats.steps = Some((worker, worker + 1));
            stats.status(Code::Unavailable, "re-forming");
            stats.wrong(format!("worker {worker}"));
        }
        let total = recorder.total();
        assert_eq!((total.answered, total.wrong, total.notes.len()), (10, 10, 10));
        assert_eq!(total.statuses[&(Code::Unavailable as i32)], 10);
        // A shared record keeps the span of its last worker, so the total covers the last three workers.
        assert_eq!(total.steps, Some((7, 10)));
    }
}
