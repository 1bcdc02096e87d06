//! Requests without their rows, as the state machine needs them.

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

/// The client of a request, between which steps are shared: the caller's credential, or else its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientKey(pub u64);

/// The connection or session of a request. Steps wait for those of the last step to send their next requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionKey(pub u64);

/// The properties that all requests of one step share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepKind {
    /// The layer.
    pub layer: LayerId,
    /// Experts per token.
    pub top_k: usize,
}

/// A validated request for admission and the queue. Its rows stay with the user of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// The client that is charged.
    pub client: ClientKey,
    /// The connection or session that it came by.
    pub connection: ConnectionKey,
    /// The kind of step that computes it.
    pub kind: StepKind,
    /// Number of rows, at least 1.
    pub tokens: usize,
    /// The time after which the answer is useless.
    pub deadline: Option<Time>,
    /// The only version of the weights that may compute the answer.
    pub expected_version: Option<WeightVersion>,
    /// Whether ranks read its rows and write its answer in memory that the caller lends.
    pub in_place: bool,
}

/// The record of how an answer was computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// The steps that computed the request's rows, in order.
    pub steps: Vec<StepId>,
    /// The generation that computed the last row.
    pub generation: Generation,
    /// The weights that computed every row.
    pub weight_version: WeightVersion,
    /// Number of the request's rows on each rank, summed over its steps.
    pub tokens_per_rank: Vec<u32>,
    /// Time from admission until the first step formed.
    pub queue_time: Duration,
    /// Time from the forming of the first step until the last row was complete.
    pub step_time: Duration,
}

/// Why an admitted request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// There was a fault and the request could not wait for the next generation, or a drain passed its deadline. Retrying is safe.
    Unavailable {
        /// What happened.
        reason: Arc<str>,
        /// Time after which a retry makes sense.
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
    /// The request lost several steps to faults, the last one while nothing else was computed. It is never retried.
    Poisoned {
        /// Number of its steps that were lost to faults.
        lost_steps: u32,
    },
}
