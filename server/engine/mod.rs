//! One rank's step loop: slots and phases.

pub mod control;
mod convert;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod gpu;
mod rank;
mod segments;

pub use rank::{RankExit, run_rank};

use std::time::{Duration, Instant};

use crate::ep::EpError;
use crate::gate::GateError;
use crate::shm::{ChannelError, ExpertsNotice, RankStaging, StepDescriptor};
use crate::telemetry::Phase;

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
    /// The exchange with the peers.
    #[error(transparent)]
    Ep(#[from] EpError),
    /// The gate.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// The router and this rank disagree.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// A layer that this rank does not have.
    #[error("layer {0} has no MoE block here")]
    Layer(u32),
    /// What the device reported in its error word.
    #[error(transparent)]
    Fault(#[from] expertd_kernels::params::DeviceFault),
    /// The device, or its driver.
    #[error("{0}")]
    Device(String),
    /// A segment that does not lie in the step's staging.
    #[error("segment {index} of the step does not lie in its staging: {what}")]
    Segment {
        /// Which.
        index: usize,
        /// What is wrong with it.
        what: String,
    },
}

/// Runs the steps of one rank on its device.
pub trait StepEngine {
    /// Runs this rank's part of one step: reads the rows in `staging`, writes the answer over them, and the routing of
    /// every row beside them. Tells `notice` when the experts phase has ended.
    ///
    /// # Errors
    /// The fault, which ends the generation.
    fn run(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<StepReport, StepFault>;
}

/// Times phases one after another.
struct PhaseClock {
    last: Instant,
    phases: [Duration; Phase::ALL.len()],
}

impl PhaseClock {
    fn start() -> Self {
        PhaseClock { last: Instant::now(), phases: Default::default() }
    }

    /// What passed since the last call was `phase`.
    fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        self.phases[phase as usize] += now - self.last;
        self.last = now;
    }
}
