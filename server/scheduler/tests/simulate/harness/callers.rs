//! The callers of a schedule, each with the expected state of its request.

use expertd_scheduler::{RequestKey, StepKind, Time};
use expertd_types::{Generation, MemoryId, StepId, WeightVersion};

/// An admitted request, with the state that an observer outside the step loop can see.
#[derive(Clone, Debug)]
pub struct Caller {
    pub key: RequestKey,
    pub client: u64,
    pub kind: StepKind,
    pub tokens: usize,
    pub deadline: Option<Time>,
    pub admitted: Time,
    pub is_poison: bool,
    /// The memory of its session.
    pub memory: Option<MemoryId>,
    /// Whether a rank has told it that it has ended, whatever the router knows.
    pub is_told: bool,
    /// The only version that may compute its answer.
    pub expected: Option<WeightVersion>,
    /// Whether the next request of the client follows the answer.
    pub is_closed_loop: bool,
    /// Time at which the caller left.
    pub left: Option<Time>,
    /// Whether it was seen to be withdrawn while it was in a step.
    pub was_withdrawn: bool,
    /// Whether the step loop has received it.
    pub is_received: bool,
    pub is_answered: bool,
    /// Time at which the step loop received it, or its last step ended.
    pub waits_since: Time,
    /// Number of rows in steps or complete.
    pub begun: usize,
    /// Number of complete rows.
    pub completed: usize,
    /// The steps that computed the complete rows.
    pub steps: Vec<StepId>,
    /// Version of the weights that computed the complete rows.
    pub version: Option<WeightVersion>,
    /// Whether complete rows were computed with several versions.
    pub is_mixed: bool,
    /// The generation that computed the last complete row.
    pub generation: Option<Generation>,
    /// Number of generations that ended while rows of it were in a step.
    pub lost: u32,
    /// Whether it was alone in the last step that it lost.
    pub was_lost_alone: bool,
    /// Number of shared steps that were launched while it waited.
    pub steps_waited: usize,
    /// Largest allowed value of `steps_waited`.
    pub max_steps_waited: usize,
}

impl Caller {
    /// Whether it needs no further step.
    pub fn is_unwanted(&self, now: Time) -> bool {
        self.left.is_some() || self.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Whether rows of it wait for a step.
    pub const fn waits(&self) -> bool {
        !self.is_answered && self.begun < self.tokens
    }

    pub const fn waiting_tokens(&self) -> usize {
        if self.is_answered { 0 } else { self.tokens - self.begun }
    }

    pub const fn is_in_step(&self) -> bool {
        !self.is_answered && self.begun > self.completed
    }
}
