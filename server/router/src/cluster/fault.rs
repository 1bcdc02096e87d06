//! Why generations end, or cannot begin.

use std::fmt;
use std::io;

use expertd_ipc::{ChannelError, RegionError};
use expertd_types::Rank;

/// What kind of fault ended a generation; the `reason` label of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A rank's process ended.
    Exit,
    /// A rank showed no life.
    Liveness,
    /// A rank reported that a step failed.
    Step,
    /// A step took too long.
    StepTimeout,
    /// Shared memory was not as it should be.
    Channel,
    /// A rank could not load its weights.
    Load,
    /// A rank could not set up its device or the group.
    Setup,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [FaultKind; 7] = [
        FaultKind::Exit,
        FaultKind::Liveness,
        FaultKind::Step,
        FaultKind::StepTimeout,
        FaultKind::Channel,
        FaultKind::Load,
        FaultKind::Setup,
    ];

    /// The label.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            FaultKind::Exit => "exit",
            FaultKind::Liveness => "liveness",
            FaultKind::Step => "step",
            FaultKind::StepTimeout => "step_timeout",
            FaultKind::Channel => "channel",
            FaultKind::Load => "load",
            FaultKind::Setup => "setup",
        }
    }
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Of which kind.
    pub kind: FaultKind,
    /// For people.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Fault {}

impl From<ChannelError> for Fault {
    fn from(error: ChannelError) -> Self {
        Fault { kind: FaultKind::Channel, message: error.to_string() }
    }
}

/// Why a generation could not be begun.
#[derive(Debug, thiserror::Error)]
pub enum FormError {
    /// No process.
    #[error("cannot start rank {rank}: {source}")]
    Spawn {
        /// Which.
        rank: Rank,
        /// The cause.
        source: io::Error,
    },
    /// No staging.
    #[error("cannot make the shared memory of a generation: {0}")]
    Channel(#[from] ChannelError),
    /// No windows.
    #[error("cannot make the windows of a generation: {0}")]
    Windows(String),
    /// No memory.
    #[error("cannot make the shared memory of a generation: {0}")]
    Region(#[from] RegionError),
}
