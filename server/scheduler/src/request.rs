//! Requests as the state machine sees them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, LayerId, StepId, WeightVersion};

use crate::Time;

/// Number of an admitted request, in the order of admission; unique over the life of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey(pub u64);

impl RequestKey {
    /// Stands for the row of zeros of a trial step, which no caller sent. Numbers of requests begin at 1.
    pub const TRIAL: RequestKey = RequestKey(0);
}

impl fmt::Display for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The client that a request counts for when load is shared out: the caller's credential, else its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientKey(pub u64);

/// What all requests of one step have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepKind {
    /// The layer.
    pub layer: LayerId,
    /// Experts per token.
    pub top_k: usize,
}

/// A validated request as admission and the queue see it. Its rows, wherever they lie, stay with the caller of this
/// crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// For fairness.
    pub client: ClientKey,
    /// The steps that can compute it.
    pub kind: StepKind,
    /// Rows, at least 1.
    pub tokens: usize,
    /// The time after which the answer is useless.
    pub deadline: Option<Time>,
    /// The only version of the weights that may compute the answer.
    pub expected_version: Option<WeightVersion>,
}

/// How an answer came about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The steps that computed the request's rows, in order.
    pub steps: Vec<StepId>,
    /// The generation that computed the last row.
    pub generation: Generation,
    /// The weights that computed every row.
    pub weight_version: WeightVersion,
    /// The request's rows on each rank, summed over its steps.
    pub tokens_per_rank: Vec<u32>,
    /// From admission until the first step formed.
    pub queue_time: Duration,
    /// From the forming of the first step until the last row was complete.
    pub step_time: Duration,
}

/// Why an admitted request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A fault that the request could not wait out, or a drain that ran out of time. Retrying is safe.
    Unavailable {
        /// What happened.
        reason: Arc<str>,
        /// When a retry makes sense.
        retry_after: Duration,
    },
    /// The deadline passed while rows of the request waited for a step.
    DeadlineExceeded,
    /// The caller left; no answer is expected.
    Cancelled,
    /// The request waited while other weights were loaded than it expects.
    OtherWeights {
        /// The version that it expects.
        expected: WeightVersion,
        /// The version that is loaded.
        loaded: WeightVersion,
    },
    /// The request lost several steps to faults, and the last one while nothing else was computed. Never retried.
    Poisoned {
        /// Steps that faults took from it.
        lost_steps: u32,
    },
}
