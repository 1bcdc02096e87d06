//! The callers of a schedule: what each of them knows of its own request.

use expertd_scheduler::{RequestKey, StepKind, Time};
use expertd_types::{Generation, StepId, WeightVersion};

/// An admitted request as its caller and an onlooker see it.
#[derive(Clone, Debug)]
pub struct Caller {
    pub key: RequestKey,
    pub client: u64,
    pub kind: StepKind,
    pub tokens: usize,
    pub deadline: Option<Time>,
    pub admitted: Time,
    pub is_poison: bool,
    /// The only version that may compute its answer.
    pub expected: Option<WeightVersion>,
    /// Whether the next request of the client follows the answer.
    pub is_closed_loop: bool,
    /// When the caller left.
    pub left: Option<Time>,
    /// Whether the step loop has received it.
    pub is_received: bool,
    pub is_answered: bool,
    /// When the step loop received it, or a step of it last ended.
    pub waits_since: Time,
    /// Rows in steps or complete.
    pub begun: usize,
    /// Complete rows.
    pub completed: usize,
    /// The steps of the complete rows.
    pub steps: Vec<StepId>,
    /// The weights of the complete rows.
    pub version: Option<WeightVersion>,
    /// Whether complete rows are of several weights.
    pub is_mixed: bool,
    /// The generation of the last complete row.
    pub generation: Option<Generation>,
    /// Generations that ended with rows of it in a step.
    pub lost: u32,
    /// Whether it was alone in the last step that was lost.
    pub was_lost_alone: bool,
    /// Shared steps launched while it waited.
    pub steps_waited: usize,
    /// The most that may be.
    pub max_steps_waited: usize,
}

impl Caller {
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
