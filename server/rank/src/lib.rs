//! An expert rank: its process, its step loop, and [`StepEngine`], which each kind of device implements.

pub mod convert;
mod process;
pub mod segments;
pub mod share;

pub use process::{Failure, Joining, Loaded, RankExit, run_rank, setup_failure};

use std::time::{Duration, Instant};

use expertd_ipc::{ChannelError, ExpertsNotice, RankChannel, RankStaging, StepDescriptor};
use expertd_types::Phase;

/// What a rank did in a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepReport {
    /// Duration of each of [`Phase::ALL`].
    pub phases: [Duration; Phase::ALL.len()],
    /// Rows that this rank's experts received.
    pub received_rows: usize,
    /// Pairs of row and expert that it computed.
    pub expert_rows: usize,
}

/// Why a rank's part of a step failed.
#[derive(Debug, thiserror::Error)]
pub enum StepFault {
    /// The router and this rank disagree.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A layer that this rank does not have.
    #[error("layer {0} has no MoE block here")]
    Layer(u32),
    /// A step for buffers that another one is using.
    #[error("a step came for slot {0}, which is in use")]
    SlotInUse(u32),
    /// What the engine found: its exchange with the peers, its gate, its device.
    #[error("{0}")]
    Engine(String),
    /// A segment that does not lie in the step's staging.
    #[error("segment {index} of the step does not lie in its staging: {what}")]
    Segment {
        /// Which.
        index: usize,
        /// What is wrong with it.
        what: String,
    },
}

impl StepFault {
    /// A fault that the engine found.
    pub fn engine(error: impl std::fmt::Display) -> Self {
        StepFault::Engine(error.to_string())
    }
}

/// Runs the steps of one rank on its device, in the order in which they are begun.
pub trait StepEngine {
    /// Begins this rank's part of one step, or does all of it: reads the rows in `staging`, writes the answer over them,
    /// and the routing of every row beside them; tells `notice` when the experts phase has ended. Without a report the
    /// step goes on, and its staging stays the rank's.
    ///
    /// # Errors
    /// The fault, which ends the generation.
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault>;

    /// Looks, without waiting, at `step`, the oldest that goes on; its report once it has ended.
    ///
    /// # Errors
    /// As [`begin`](Self::begin).
    fn ended(
        &mut self,
        step: &StepDescriptor,
        channel: &mut RankChannel,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let _ = (step, channel, notice);
        Ok(None)
    }
}

/// Times phases one after another.
pub struct PhaseClock {
    last: Instant,
    phases: [Duration; Phase::ALL.len()],
}

impl PhaseClock {
    /// A clock whose first phase begins now.
    #[must_use]
    pub fn start() -> Self {
        PhaseClock { last: Instant::now(), phases: Default::default() }
    }

    /// What passed since the last call was `phase`.
    pub fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        self.phases[phase as usize] += now - self.last;
        self.last = now;
    }

    /// Duration of each of [`Phase::ALL`] so far.
    #[must_use]
    pub const fn phases(&self) -> [Duration; Phase::ALL.len()] {
        self.phases
    }
}
