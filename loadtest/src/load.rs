//! What workers of both modes share: jobs, and settling them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use expertd_proto::v1::{ForwardResponse, Receipt};
use tokio::sync::mpsc;
use tonic::{Code, Status};

use crate::check::{self, Sample};
use crate::request::{Draft, Drafts, Purpose, Workload};
use crate::stats::{self, Recorder, Stats};
use crate::window::Window;

/// One request on its way, from its first sending to its last answer.
#[derive(Debug)]
pub struct Job {
    /// The request.
    pub draft: Draft,
    /// Latency counts from here: the intended arrival, or the first sending.
    pub began: Instant,
    /// The last sending.
    pub sent: Instant,
    /// Outside the warm-up.
    pub measured: bool,
    /// Sendings so far.
    pub attempts: u32,
}

impl Job {
    /// A job that is about to be sent for the first time.
    #[must_use]
    pub fn new(draft: Draft, began: Instant, measured: bool) -> Job {
        Job { draft, began, sent: Instant::now(), measured, attempts: 1 }
    }
}

/// How a request ended.
#[derive(Debug)]
pub enum Ending {
    /// With an answer.
    Answer(ForwardResponse),
    /// With a status.
    Status {
        /// Its code.
        code: Code,
        /// Its text.
        message: String,
        /// After how long to retry, if the service said so.
        retry_after: Option<Duration>,
    },
    /// With neither.
    Silence(String),
}

impl From<Status> for Ending {
    fn from(status: Status) -> Ending {
        let status = expertd_proto::connection_loss(status);
        let retry_after = expertd_proto::retry_delay(&status);
        Ending::Status { code: status.code(), message: status.message().to_owned(), retry_after }
    }
}

/// Whether the load may explain an error of this code. Retrying is always safe: the computation is pure.
#[must_use]
pub fn explained(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded)
}

fn retryable(code: Code) -> bool {
    matches!(code, Code::Unavailable | Code::ResourceExhausted)
}

/// Counters that the progress bar reads.
#[derive(Debug, Default)]
pub struct Live {
    /// Requests answered.
    pub answered: AtomicU64,
    /// Rows in them.
    pub tokens: AtomicU64,
    /// Requests that ended otherwise.
    pub failed: AtomicU64,
    /// Requests on their way.
    pub outstanding: AtomicU64,
}

/// One run of load.
#[derive(Debug)]
pub struct Load {
    /// What is asked for.
    pub workload: Arc<Workload>,
    /// When.
    pub window: Arc<Window>,
    /// What was seen.
    pub recorder: Arc<Recorder>,
    /// For the progress bar.
    pub live: Live,
    /// Share of checked requests.
    pub check: f64,
    /// Where sampled answers go.
    pub samples: Option<mpsc::Sender<Sample>>,
    /// Retries of a request at most.
    pub retry: u32,
    /// Sent with each request.
    pub deadline_ms: Option<u32>,
    /// Tolerance of known answers, which are f32.
    pub tolerance: f64,
    /// Open loop: requests outstanding at most.
    pub max_outstanding: u64,
}

impl Load {
    /// The supply of one worker.
    #[must_use]
    pub fn drafts(&self, worker: u64) -> Drafts {
        self.workload.drafts(worker, self.check)
    }

    /// Records how `job` ended. `Some` hands it back to be sent again after a while.
    pub fn settle(&self, worker: u64, mut job: Job, ending: Ending) -> Option<(Job, Duration)> {
        let now = Instant::now();
        match ending {
            Ending::Answer(response) => {
                self.live.answered.fetch_add(1, Ordering::Relaxed);
                self.live.tokens.fetch_add(u64::from(job.draft.request.tokens), Ordering::Relaxed);
                self.answered(&mut self.recorder.of(worker), &job, &response, now);
                if matches!(job.draft.purpose, Purpose::Sampled)
                    && let Some(samples) = &self.samples
                    && samples.try_send(Sample { request: job.draft.request, response }).is_err()
                {
                    self.recorder.of(worker).unchecked += 1;
                }
                None
            }
            Ending::Status { code, message, retry_after } => {
                let mut stats = self.recorder.of(worker);
                stats.status(code, &message);
                if retryable(code) && job.attempts <= self.retry {
                    stats.retries += 1;
                    let backoff = Duration::from_millis(10 << job.attempts.min(7));
                    job.attempts += 1;
                    return Some((job, retry_after.unwrap_or(backoff)));
                }
                self.live.failed.fetch_add(1, Ordering::Relaxed);
                None
            }
            Ending::Silence(why) => {
                self.live.failed.fetch_add(1, Ordering::Relaxed);
                let request = &job.draft.request;
                let note = format!("layer {}, {} tokens: lost: {why}", request.layer, request.tokens);
                self.recorder.of(worker).lost(note);
                None
            }
        }
    }

    fn answered(&self, stats: &mut Stats, job: &Job, response: &ForwardResponse, now: Instant) {
        let request = &job.draft.request;
        stats.answered_all += 1;
        let receipt = response.receipt.as_ref();
        if let Err(why) = self.judge(job, response) {
            stats.wrong(format!("layer {}, {} tokens: {why}", request.layer, request.tokens));
        }
        if let Purpose::Known(output) = &job.draft.purpose {
            stats.checked_known += 1;
            let wanted = self.workload.model.hidden as usize;
            let error = check::largest_error(&response.rows, crate::args::DType::F32, output, wanted);
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

    /// What every answer must satisfy.
    fn judge(&self, job: &Job, response: &ForwardResponse) -> Result<(), String> {
        let request = &job.draft.request;
        let expected = self.workload.answer_bytes(request.tokens, request.dtype);
        if response.rows.len() != expected {
            return Err(format!("expected {expected} bytes of rows, found {}", response.rows.len()));
        }
        let Some(receipt) = &response.receipt else { return Err("no receipt".to_owned()) };
        let placed: u64 = receipt.tokens_per_rank.iter().copied().map(u64::from).sum();
        if placed != u64::from(request.tokens) {
            return Err(format!("the receipt places {placed} tokens: {:?}", receipt.tokens_per_rank));
        }
        Ok(())
    }
}

/// Queue time and step time of a receipt.
#[must_use]
pub fn times(receipt: &Receipt) -> (Duration, Duration) {
    // Written out, so that the message's own duration type need not be named.
    let queue = receipt.queue_time.as_ref().map(|time| (time.seconds, time.nanos));
    let step = receipt.step_time.as_ref().map(|time| (time.seconds, time.nanos));
    let duration = |(seconds, nanos)| {
        Duration::new(u64::try_from(seconds).unwrap_or(0), u32::try_from(nanos).unwrap_or(0))
    };
    (queue.map_or(Duration::ZERO, duration), step.map_or(Duration::ZERO, duration))
}
