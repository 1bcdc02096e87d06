//! The configuration of the step loop, its steps and its actions.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, Rank, Slot, StepId};

use crate::{Receipt, RecoveryPolicy, RequestKey, StepKind, Time, Unanswered};

/// Settings of the step loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of expert ranks.
    pub ranks: usize,
    /// Number of slots, which is the largest number of steps in flight.
    pub slots: usize,
    /// Largest number of rows of one step, all ranks together.
    pub max_tokens_per_step: usize,
    /// Largest number of ranges of rows that one rank accepts in one step.
    pub max_segments_per_rank: usize,
    /// Time that the oldest request waits for others to join its step, from its admission. `None`: requests wait for the connections of
    /// the last step, up to an eighth of that step's time.
    pub max_wait: Option<Duration>,
    /// The treatment of requests without an answer after a fault.
    pub on_fault: OnFault,
    /// Rules for forming generations again.
    pub recovery: RecoveryPolicy,
    /// Seed for the jitter of retry times.
    pub seed: u64,
}

/// The treatment of requests without an answer after a fault of the EP group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(rename_all = "lowercase"))]
pub enum OnFault {
    /// They continue in the next generation, as long as their deadlines allow; new requests are admitted meanwhile
    #[default]
    Retry,
    /// They fail with UNAVAILABLE, and so do new requests until the next generation serves
    Fail,
}

impl fmt::Display for OnFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnFault::Retry => "retry",
            OnFault::Fail => "fail",
        })
    }
}

/// The state of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ServiceState {
    /// Ranks load weights, and no generation has served yet.
    #[default]
    Loading,
    /// A generation computes requests.
    Serving,
    /// A fault ended the generation; the next one is being formed.
    Reforming,
    /// New requests are refused, and admitted ones are completed.
    Draining,
    /// The service does not serve again without a restart.
    Failed,
}

/// How the service ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// It was drained.
    Drained,
    /// Several generations in a row could not load weights.
    LoadFailed(String),
    /// Too many generations ended by faults.
    SetupFailed(String),
}

/// Rows of one request that one rank computes in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankRows {
    /// The request.
    pub key: RequestKey,
    /// The range of the request's rows.
    pub rows: Range<usize>,
    /// The rank that computes them.
    pub rank: Rank,
}

/// A step under way.
#[derive(Clone, Debug)]
pub struct Step {
    /// Number of the step.
    pub id: StepId,
    /// Its step buffers, which no other step in flight uses.
    pub slot: Slot,
    /// The properties that its requests share.
    pub kind: StepKind,
    /// Time at which it was formed.
    pub formed: Time,
    /// Number of rows on all ranks.
    pub tokens: usize,
    /// Every row of the step once, or the row of a trial ([`RequestKey::TRIAL`]), sorted by rank and, within a rank, by request.
    /// The ranges of a request are in the order of its rows.
    pub rows: Vec<RankRows>,
    /// Whether it consists of one suspected request or a trial and is the only step in flight.
    pub is_alone: bool,
    pub(super) experts_ended: bool,
    /// The client of each request that was taken from the fair queue.
    pub(super) clients: Vec<crate::ClientKey>,
}

/// An action that the thread must carry out. Actions come one at a time, in the order in which they must be carried out.
#[derive(Clone, Debug)]
pub enum Action {
    /// Start the processes of a generation.
    FormGroup {
        /// Number of the generation.
        generation: Generation,
    },
    /// Kill and reap every process of a generation. Events of the generation are ignored from now on.
    EndGroup {
        /// Number of the generation.
        generation: Generation,
    },
    /// Copy the rows of the newest step of [`StepLoop::in_flight`](crate::StepLoop::in_flight) to its slot and hand it to
    /// the ranks.
    Launch {
        /// Number of the step.
        step: StepId,
    },
    /// Send the request's rows, which are all complete, to the caller.
    Answer {
        /// The request.
        key: RequestKey,
        /// The record of how the answer was computed.
        receipt: Receipt,
    },
    /// End the request without an answer.
    Fail {
        /// The request.
        key: RequestKey,
        /// The reason.
        failure: Unanswered,
    },
    /// Drop the computed rows of a request, which were computed with other weights. The request starts again.
    Restart {
        /// The request.
        key: RequestKey,
    },
    /// Publish the state of the service.
    Show {
        /// The state.
        state: ServiceState,
        /// Why the service does not serve; may be empty.
        reason: Arc<str>,
    },
    /// Report the end of a drain.
    ReportDrain {
        /// Number of requests that failed because the drain passed its deadline.
        requests_dropped: u64,
    },
    /// Let the ranks leave, and end the service. No action follows.
    End(End),
}
