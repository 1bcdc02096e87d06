//! The common part of unary and streaming workers: jobs and their outcomes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expertd_proto::v1::{ForwardResponse, Receipt};
use tokio::sync::mpsc;
use tonic::{Code, Status};

use crate::check::{self, Sample};
use crate::period::LoadPeriod;
use crate::request::{PlannedRequest, Purpose, RequestSource, Workload};
use crate::stats::{self, Recorder, Stats};

/// A request from its first sending to its outcome.
#[derive(Debug)]
pub struct Job {
    /// The request.
    pub planned: PlannedRequest,
    /// Start of its latency: the intended arrival, or the first sending.
    pub began: Instant,
    /// Time of the last sending.
    pub sent: Instant,
    /// Whether the request is measured: false during the warm-up.
    pub measured: bool,
    /// Number of sendings so far.
    pub attempts: u32,
    /// Time at which the outcome was there; `None` for the time at which it is recorded.
    pub ended: Option<Instant>,
}

impl Job {
    /// Creates a job that is about to be sent for the first time.
    #[must_use]
    pub fn new(planned: PlannedRequest, began: Instant, measured: bool) -> Job {
        Job { planned, began, sent: Instant::now(), measured, attempts: 1, ended: None }
    }
}

/// The outcome of a sending.
#[derive(Debug)]
pub enum Outcome {
    /// The service answered.
    Answer(Box<ForwardResponse>),
    /// The call ended with a status.
    Status {
        /// Code of the status.
        code: Code,
        /// Message of the status.
        message: String,
        /// Delay before a retry, if the service stated one.
        retry_after: Option<Duration>,
    },
    /// Neither an answer nor a status came.
    NoAnswer(String),
}

impl From<Status> for Outcome {
    fn from(status: Status) -> Outcome {
        let status = expertd_client::connection_loss(status);
        let retry_after = expertd_proto::retry_delay(&status);
        Outcome::Status { code: status.code(), message: status.message().to_owned(), retry_after }
    }
}

/// Whether load may explain a status of this code. Retrying is always safe, because the computation is pure.
#[must_use]
pub fn explained(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded)
}

fn retryable(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::ResourceExhausted)
}

/// Counters for the progress bar.
#[derive(Debug, Default)]
pub struct ProgressCounters {
    /// Number of requests answered.
    pub answered: AtomicU64,
    /// Number of rows in these answers.
    pub tokens: AtomicU64,
    /// Number of requests with another outcome.
    pub failed: AtomicU64,
    /// Number of outstanding requests.
    pub outstanding: AtomicU64,
    /// Number of complete walks through all layers.
    pub walks: AtomicU64,
}

impl ProgressCounters {
    /// A walk has ended.
    pub fn walked(&self, has_failed: bool) {
        self.walks.fetch_add(u64::from(!has_failed), Ordering::Relaxed);
    }
}

/// The state of a running load.
#[derive(Debug)]
pub struct Load {
    /// The model and the content of requests.
    pub workload: Arc<Workload>,
    /// The bounds of the load.
    pub period: Arc<LoadPeriod>,
    /// The records of the workers.
    pub recorder: Arc<Recorder>,
    /// Counters for the progress bar.
    pub progress: ProgressCounters,
    /// Share of checked requests.
    pub check: f64,
    /// Channel of the checkers for sampled answers.
    pub samples: Option<mpsc::Sender<Sample>>,
    /// Largest number of retries of a request.
    pub retry: u32,
    /// Deadline of each request, in milliseconds.
    pub deadline_ms: Option<u32>,
    /// Largest accepted error of recorded answers, which are f32.
    pub tolerance: f64,
    /// Open loop: largest number of outstanding requests.
    pub max_outstanding: u64,
}

impl Load {
    /// The requests of one worker.
    #[must_use]
    pub fn source(&self, worker: u64) -> RequestSource {
        self.workload.source(worker, self.check)
    }

    /// Records the outcome of a sending. `Some` means that the job is to be sent again after this delay.
    pub fn finish(&self, worker: u64, mut job: Job, outcome: Outcome) -> Option<(Job, Duration)> {
        let now = job.ended.unwrap_or_else(Instant::now);
        match outcome {
            Outcome::Answer(response) => {
                self.progress.answered.fetch_add(1, Ordering::Relaxed);
                self.progress.tokens.fetch_add(u64::from(job.planned.request.tokens), Ordering::Relaxed);
                self.answered(&mut self.recorder.of(worker), &job, &response, now);
                if matches!(job.planned.purpose, Purpose::Sampled)
                    && let Some(samples) = &self.samples
                    && samples.try_send(Sample { request: job.planned.request, response: *response }).is_err()
                {
                    self.recorder.of(worker).unchecked += 1;
                }
                None
            }
            Outcome::Status { code, message, retry_after } => {
                let mut stats = self.recorder.of(worker);
                stats.status(code, &message);
                if retryable(code) && job.attempts <= self.retry {
                    stats.retries += 1;
                    let backoff = Duration::from_millis(10 << job.attempts.min(7));
                    job.attempts += 1;
                    return Some((job, retry_after.unwrap_or(backoff)));
                }
                self.progress.failed.fetch_add(1, Ordering::Relaxed);
                None
            }
            Outcome::NoAnswer(why) => {
                self.progress.failed.fetch_add(1, Ordering::Relaxed);
                let request = &job.planned.request;
                let note = format!("layer {}, {} tokens: lost: {why}", request.layer, request.tokens);
                self.recorder.of(worker).lost(note);
                None
            }
        }
    }

    fn answered(&self, stats: &mut Stats, job: &Job, response: &ForwardResponse, now: Instant) {
        let request = &job.planned.request;
        stats.answered_all += 1;
        let receipt = response.receipt.as_ref();
        if let Err(why) = self.judge(job, response) {
            stats.wrong(format!("layer {}, {} tokens: {why}", request.layer, request.tokens));
        }
        if let Purpose::Known(output) = &job.planned.purpose {
            stats.checked_known += 1;
            let wanted = self.workload.model.hidden as usize;
            let error = check::largest_error(&response.rows, expertd_types::DType::F32, output, wanted);
            stats.largest_error = stats.largest_error.max(error);
            if error > self.tolerance {
                stats.wrong(format!(
                    "layer {}, {} tokens: relative error {error:.2e} against the recorded answer",
                    request.layer, request.tokens
                ));
            }
            return;
        }
        if !job.measured {
            return;
        }
        stats.answered += 1;
        stats.tokens += u64::from(request.tokens);
        stats.row_bytes += 2 * response.rows.len() as u64;
        stats.last_answer = stats.last_answer.max(Some(now));
        stats.latency.record(now.saturating_duration_since(job.began));
        let Some(receipt) = receipt else { return };
        let (queue, step) = times(receipt);
        stats.queue.record(queue);
        stats.step.record(step);
        stats.rest.record(now.saturating_duration_since(job.sent).saturating_sub(queue + step));
        stats.generations.insert(receipt.generation);
        for &step in &receipt.steps {
            let seen = stats.steps.unwrap_or((step, step));
            stats.steps = Some((seen.0.min(step), seen.1.max(step)));
        }
        for timing in &receipt.timings {
            stats.step_tokens.0 += u64::from(timing.tokens);
            stats.step_tokens.1 += 1;
            for (phase, ns) in stats::phases(timing).into_iter().enumerate() {
                stats.phases.entry(phase).or_default().record(Duration::from_nanos(ns));
            }
        }
    }

    /// Checks the properties of every correct answer.
    fn judge(&self, job: &Job, response: &ForwardResponse) -> Result<(), String> {
        let request = &job.planned.request;
        let expected = self.workload.answer_bytes(request.tokens, request.dtype);
        if response.rows.len() != expected {
            return Err(format!("expected {expected} bytes of rows, found {}", response.rows.len()));
        }
        let Some(receipt) = &response.receipt else { return Err("the answer has no receipt".to_owned()) };
        let placed: u64 = receipt.tokens_per_rank.iter().copied().map(u64::from).sum();
        if placed != u64::from(request.tokens) {
            return Err(format!("the receipt accounts for {placed} tokens: {:?}", receipt.tokens_per_rank));
        }
        Ok(())
    }
}

/// Queue time and step time of a receipt.
#[must_use]
pub fn times(receipt: &Receipt) -> (Duration, Duration) {
    // The fields are converted here, so that the message's duration type need not be named.
    let queue = receipt.queue_time.as_ref().map(|time| (time.seconds, time.nanos));
    let step = receipt.step_time.as_ref().map(|time| (time.seconds, time.nanos));
    let duration = |(seconds, nanos)| {
        Duration::new(u64::try_from(seconds).unwrap_or(0), u32::try_from(nanos).unwrap_or(0))
    };
    (queue.map_or(Duration::ZERO, duration), step.map_or(Duration::ZERO, duration))
}
