//! An expert rank: its process, its step loop, and [`StepEngine`], which each kind of device implements.

#![forbid(unsafe_code)]

mod clock;
pub mod convert;
mod loader;
mod memories;
mod process;
pub mod segments;
pub mod share;

pub use clock::SetupClock;
pub use loader::{PackFailure, PackedShare, Progress, run_loader};
pub use memories::{ClientMemory, DeviceMemory, HostMemories, PassedFd};
pub use process::{Failure, Joining, Loaded, RankExit, ReadUsage, end_with, run_rank, setup_failure};

use std::time::{Duration, Instant};

use expertd_ipc::{ChannelError, ExpertsNotice, RankChannel, RankStaging, StepDescriptor};
use expertd_types::{MemoryId, Phase};

/// Durations and counts of a rank's part of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepReport {
    /// Duration of each of [`Phase::ALL`].
    pub phases: [Duration; Phase::ALL.len()],
    /// Number of rows that this rank's experts received.
    pub received_rows: usize,
    /// Number of pairs of row and expert that this rank computed.
    pub expert_rows: usize,
    /// Bytes of weights that were copied from host memory to the device since the report before.
    pub copied_bytes: u64,
    /// Version of the table of expert slots with which the step was launched; 0 without slots.
    pub slot_version: u64,
}

/// Why a rank's part of a step failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum StepFault {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("layer {0} of this model has no MoE block")]
    Layer(u32),
    #[error("the router sent a step for slot {0}, which another step occupies")]
    SlotInUse(u32),
    /// The engine failed: its exchange with the peers, its gate or its device.
    #[error("{0}")]
    Engine(String),
    #[error("segment {index} of the step is invalid: {what}")]
    Segment { index: usize, what: String },
}

impl StepFault {
    /// Makes a fault of the engine.
    pub fn engine(error: impl std::fmt::Display) -> Self {
        StepFault::Engine(error.to_string())
    }
}

/// Runs the steps of one rank on its device, in the order in which they are begun.
pub trait StepEngine {
    /// Begins this rank's part of a step, or runs all of it: reads the rows in `staging`, overwrites them with the answer,
    /// writes the routing of every row, and reports the end of the experts phase to `notice`. If the result is `None`, the
    /// step is still running and the engine keeps the staging.
    ///
    /// # Errors
    /// The fault, which ends the generation.
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault>;

    /// Polls `step`, the oldest running step, without waiting; returns its report once it has ended.
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

    /// Makes a client's memory usable: segments of later steps may name it. No step is running.
    ///
    /// # Errors
    /// Why it cannot be used. The session is then refused.
    fn attach(&mut self, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
        let _ = (memory, client);
        Err("these ranks do not map the memory of clients".to_owned())
    }

    /// Releases a client's memory, if it is attached. No step is running.
    fn detach(&mut self, memory: MemoryId) {
        let _ = memory;
    }
}

/// Measures consecutive phases.
pub struct PhaseClock {
    last: Instant,
    phases: [Duration; Phase::ALL.len()],
}

impl PhaseClock {
    /// Starts a clock, whose first phase begins now.
    #[must_use]
    pub fn start() -> Self {
        PhaseClock { last: Instant::now(), phases: Default::default() }
    }

    /// Ends `phase`, which began at the previous call.
    pub fn end(&mut self, phase: Phase) {
        let now = Instant::now();
        self.phases[phase as usize] += now - self.last;
        self.last = now;
    }

    /// Duration of each of [`Phase::ALL`] up to now.
    pub const fn phases(&self) -> [Duration; Phase::ALL.len()] {
        self.phases
    }
}
