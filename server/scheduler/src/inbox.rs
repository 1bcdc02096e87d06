//! The callers' side of the step loop: admission.

use std::sync::Arc;
use std::time::Duration;

use crate::recovery::jittered;
use crate::{RequestKey, Submission, Time};

/// Retry time of an overloaded caller while the throughput is unknown.
const UNKNOWN_WAIT: Duration = Duration::from_millis(100);
/// The shortest and the longest retry time of an overloaded caller.
const OVERLOAD_WAIT: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(5));

/// Whether requests are admitted; written by the step loop in [`exchange`](crate::StepLoop::exchange).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// A generation serves.
    Open,
    /// A generation is being formed after a fault. Requests that can wait for it are admitted.
    Recovering { reason: Arc<str>, ready_at: Time },
    /// There is no generation to wait for, or requests must not wait.
    NotReady { reason: Arc<str>, ready_at: Time },
    /// The service has ended.
    Ended { reason: Arc<str> },
}

/// A request on its way to the step loop.
#[derive(Debug)]
pub(crate) struct InboxEntry<P> {
    pub(crate) key: RequestKey,
    pub(crate) submission: Submission,
    pub(crate) admitted: Time,
    pub(crate) payload: P,
}

/// Why a request is not admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The queue has no room.
    Overloaded {
        /// Number of rows that wait for a step.
        queued_tokens: usize,
        /// Largest number of rows that may wait.
        max_queued_tokens: usize,
        /// Time until there is probably room.
        retry_after: Duration,
    },
    /// The service drains.
    Draining,
    /// No generation serves, and the request cannot or must not wait for one.
    NotReady {
        /// Why no generation serves.
        reason: Arc<str>,
        /// Time until one probably serves.
        retry_after: Duration,
    },
    /// The deadline passed before admission.
    DeadlineExceeded,
}

/// Requests and drains on their way from callers to the step loop. `P` holds what the state machine does not need of a request: its
/// rows and the channel back to its caller.
///
/// A service keeps the inbox under a lock. Submitting takes a few comparisons and one push.
#[derive(Debug)]
pub struct Inbox<P> {
    max_queued_tokens: usize,
    admission: Admission,
    draining: Option<Time>,
    /// Whether a request or a drain has arrived since the last exchange.
    has_mail: bool,
    incoming: Vec<InboxEntry<P>>,
    /// Number of rows of `incoming`; only the inbox writes it.
    incoming_tokens: usize,
    /// Number of rows that wait in the step loop. Only the step loop writes it, so the inbox never subtracts from it.
    waiting_tokens: usize,
    tokens_per_second: f64,
    last_key: u64,
    jitter: u64,
}

/// The contents that the step loop took out of an inbox, for [`StepLoop::receive`](crate::StepLoop::receive).
#[derive(Debug)]
#[must_use = "requests of a delivery that is not received are lost"]
pub struct Delivery<P>(pub(crate) Vec<InboxEntry<P>>);

impl<P> Inbox<P> {
    /// An inbox that admits nothing before the first generation serves. An empty queue accepts a request of any size; otherwise
    /// at most `max_queued_tokens` rows may wait, including those of the new request. `seed` is for the jitter of retry times.
    #[must_use]
    pub fn new(max_queued_tokens: usize, seed: u64) -> Self {
        Inbox {
            max_queued_tokens,
            admission: Admission::NotReady {
                reason: "the weights are being loaded".into(),
                ready_at: Time(Duration::from_secs(1).as_nanos() as u64),
            },
            draining: None,
            has_mail: false,
            incoming: Vec::new(),
            incoming_tokens: 0,
            waiting_tokens: 0,
            tokens_per_second: 0.0,
            last_key: 0,
            jitter: seed,
        }
    }

    /// Admits a request.
    ///
    /// # Errors
    /// [`Refusal`] if it is not admitted now.
    pub fn submit(&mut self, now: Time, submission: Submission, payload: P) -> Result<RequestKey, Refusal> {
        match self.refuse(now, &submission) {
            Some(refusal) => Err(refusal),
            None => Ok(self.admit(now, submission, payload)),
        }
    }

    /// Admits a request that [`refuse`](Self::refuse) has just let pass.
    pub fn admit(&mut self, now: Time, submission: Submission, payload: P) -> RequestKey {
        self.has_mail = true;
        self.last_key += 1;
        let key = RequestKey(self.last_key);
        self.incoming_tokens += submission.tokens;
        self.incoming.push(InboxEntry { key, submission, admitted: now, payload });
        key
    }

    /// Why a request is not admitted now; `None` if it would be.
    pub fn refuse(&mut self, now: Time, submission: &Submission) -> Option<Refusal> {
        if submission.deadline.is_some_and(|deadline| deadline <= now) {
            return Some(Refusal::DeadlineExceeded);
        }
        if self.draining.is_some() && !matches!(self.admission, Admission::Ended { .. }) {
            return Some(Refusal::Draining);
        }
        let not_before = match &self.admission {
            Admission::Open => now,
            Admission::Recovering { reason, ready_at } => {
                if submission.deadline.is_some_and(|deadline| deadline < *ready_at) {
                    return Some(self.not_ready(Arc::clone(reason), *ready_at, now));
                }
                *ready_at
            }
            Admission::NotReady { reason, ready_at } => {
                return Some(self.not_ready(Arc::clone(reason), *ready_at, now));
            }
            Admission::Ended { reason } => {
                let ready_at = now + OVERLOAD_WAIT.1;
                return Some(self.not_ready(Arc::clone(reason), ready_at, now));
            }
        };
        let queued_tokens = self.queued_tokens();
        if queued_tokens == 0 || queued_tokens + submission.tokens <= self.max_queued_tokens {
            return None;
        }
        let rate = self.tokens_per_second;
        let wait = if rate > 0.0 {
            Duration::from_secs_f64((queued_tokens as f64 / rate).min(OVERLOAD_WAIT.1.as_secs_f64()))
        } else {
            UNKNOWN_WAIT
        };
        let wait = (wait + not_before.since(now)).clamp(OVERLOAD_WAIT.0, OVERLOAD_WAIT.1);
        Some(Refusal::Overloaded {
            queued_tokens,
            max_queued_tokens: self.max_queued_tokens,
            retry_after: jittered(wait, &mut self.jitter),
        })
    }

    fn not_ready(&mut self, reason: Arc<str>, ready_at: Time, now: Time) -> Refusal {
        let wait = ready_at.since(now).max(OVERLOAD_WAIT.0);
        Refusal::NotReady { reason, retry_after: jittered(wait, &mut self.jitter) }
    }

    /// Stops admission at once. Admitted requests have until `deadline`; of several drains the earliest deadline counts.
    pub fn drain(&mut self, deadline: Time) {
        self.has_mail = true;
        self.draining = Some(self.draining.map_or(deadline, |before| before.min(deadline)));
    }

    /// Closes admission for good because the step loop is gone. Returns what the step loop has not taken out.
    pub fn close(&mut self, reason: &str) -> Vec<P> {
        self.admission = Admission::Ended { reason: reason.into() };
        self.incoming_tokens = 0;
        self.waiting_tokens = 0;
        self.incoming.drain(..).map(|mail| mail.payload).collect()
    }

    /// Number of admitted rows that are not in a step. Rows that entered a step since the last exchange are still counted.
    pub const fn queued_tokens(&self) -> usize {
        self.incoming_tokens + self.waiting_tokens
    }

    /// Whether the step loop has anything to take out.
    pub const fn has_mail(&self) -> bool {
        self.has_mail
    }

    /// Rows of the requests that the step loop has not taken out yet.
    pub const fn incoming_tokens(&self) -> usize {
        self.incoming_tokens
    }

    /// Takes out what has arrived, and stores the state of the step loop for callers.
    pub(crate) fn exchange(&mut self, view: View) -> (Delivery<P>, Option<Time>) {
        self.has_mail = false;
        self.waiting_tokens = view.waiting_tokens + std::mem::take(&mut self.incoming_tokens);
        self.admission = view.admission;
        self.tokens_per_second = view.tokens_per_second;
        (Delivery(std::mem::take(&mut self.incoming)), self.draining)
    }
}

/// The state of the step loop as callers need it.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) waiting_tokens: usize,
    pub(crate) admission: Admission,
    pub(crate) tokens_per_second: f64,
}

impl<P> Delivery<P> {
    /// Rows of the delivered requests.
    pub fn tokens(&self) -> usize {
        self.0.iter().map(|mail| mail.submission.tokens).sum()
    }
}
