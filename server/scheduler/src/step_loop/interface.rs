//! What goes in and what comes out.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, Rank, Slot, StepId};

use crate::{Failure, Receipt, RecoveryPolicy, RequestKey, StepKind, Time};

/// How steps form, how much may wait for them, and what faults mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Expert ranks.
    pub ranks: usize,
    /// Sets of step buffers: steps that may be in flight.
    pub slots: usize,
    /// Rows of one step, all ranks together.
    pub max_tokens_per_step: usize,
    /// Ranges of rows that one rank accepts in one step.
    pub max_segments_per_rank: usize,
    /// How long the oldest request waits for others to join its step.
    pub max_wait: Duration,
    /// What a fault of a generation means to the requests that it did not answer.
    pub on_fault: OnFault,
    /// How generations are formed again.
    pub recovery: RecoveryPolicy,
    /// Seed for the jitter of retry times.
    pub seed: u64,
}

/// What a fault of a generation means to the requests that it did not answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFault {
    /// They go on in the next generation as long as their deadlines allow, and new ones are admitted meanwhile.
    #[default]
    Retry,
    /// They fail at once, and none is admitted until the next generation serves.
    Fail,
}

/// What the service as a whole is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ServiceState {
    /// Ranks load weights; no generation has served yet.
    #[default]
    Loading,
    /// Requests are computed.
    Serving,
    /// A fault ended the generation; the next one is being formed.
    Reforming,
    /// No new requests; what is in flight ends.
    Draining,
    /// It will not serve without a restart.
    Failed,
}

/// How the service ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// By a drain.
    Drained,
    /// Weights could not be loaded, several times over.
    LoadFailed(String),
    /// Generations kept ending.
    SetupFailed(String),
}

/// Why a generation ended, or could not begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupFault {
    /// Whether weights could not be loaded.
    pub is_load: bool,
    /// What happened, for people.
    pub message: String,
}

/// Rows of one request that one rank computes in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankRows {
    /// The request.
    pub key: RequestKey,
    /// Which of its rows.
    pub rows: Range<usize>,
    /// Where they are computed.
    pub rank: Rank,
}

/// A step under way.
#[derive(Clone, Debug)]
pub struct Step {
    /// Its number.
    pub id: StepId,
    /// Its step buffers; no other step in flight has them.
    pub slot: Slot,
    /// What its requests have in common.
    pub kind: StepKind,
    /// When it formed.
    pub formed: Time,
    /// Rows of all ranks.
    pub tokens: usize,
    /// Each row once, or the row of a trial ([`RequestKey::TRIAL`]): by rank, and by request within a rank; the ranges of one request follow each other in order.
    pub rows: Vec<RankRows>,
    /// Whether it holds one suspected request or a trial, and no other step is in flight beside it.
    pub is_alone: bool,
    pub(super) experts_ended: bool,
    /// The clients of the requests that the fair queue gave, one entry for each request.
    pub(super) clients: Vec<crate::ClientKey>,
}

/// What the thread that drives the machine has to do. Actions come one at a time, in the order in which they must be
/// carried out.
#[derive(Clone, Debug)]
pub enum Action {
    /// Start the processes of a generation.
    FormGroup {
        /// Its number.
        generation: Generation,
    },
    /// Kill and reap every process of a generation; nothing of it is read any more.
    EndGroup {
        /// Its number.
        generation: Generation,
    },
    /// Copy the rows of the newest step of [`StepLoop::in_flight`](crate::StepLoop::in_flight) to its slot and hand it to
    /// the ranks.
    Launch {
        /// Its number.
        step: StepId,
    },
    /// Give the caller the request's rows, which are all complete.
    Answer {
        /// The request.
        key: RequestKey,
        /// How the answer came about.
        receipt: Receipt,
    },
    /// End the request without an answer.
    Fail {
        /// The request.
        key: RequestKey,
        /// Why.
        failure: Failure,
    },
    /// Drop the rows of the answer that are there already: they are of other weights, and the request starts again.
    Restart {
        /// The request.
        key: RequestKey,
    },
    /// Show what the service is doing.
    Show {
        /// The state.
        state: ServiceState,
        /// Why it is not serving; may be empty.
        reason: Arc<str>,
    },
    /// Report the end of a drain.
    ReportDrain {
        /// Requests that failed because time ran out.
        requests_dropped: u64,
    },
    /// Let the ranks leave, and end. No action follows.
    End(End),
}

/// What the machine asks about the callers of requests.
pub trait Callers {
    /// Whether the caller of a request has left.
    fn has_left(&self, key: RequestKey) -> bool;
}

impl<F: Fn(RequestKey) -> bool> Callers for F {
    fn has_left(&self, key: RequestKey) -> bool {
        self(key)
    }
}
