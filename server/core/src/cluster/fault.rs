//! Why generations end or cannot be formed.

use std::fmt;
use std::io;

use expertd_ipc::ChannelError;
use expertd_shm::RegionError;
use expertd_types::Rank;

/// Kind of a fault that ended a generation; the `reason` label of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// A rank's process ended.
    Exit,
    /// A rank sent no heartbeat in time, or the router's thread that reads its messages was lost.
    Liveness,
    /// A rank reported that a step failed.
    Step,
    /// A step, or an order to attach or detach a session's memory, exceeded `step_timeout`.
    StepTimeout,
    /// Shared memory held invalid data.
    Channel,
    /// A rank could not load its weights.
    Load,
    /// A rank could not set up its device or the group.
    Setup,
}

impl FaultKind {
    /// Every kind.
    pub(crate) const ALL: [FaultKind; 7] = [
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
    pub(crate) const fn label(self) -> &'static str {
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
pub(crate) struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Description for operators.
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

/// Why a generation could not be formed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FormError {
    /// A rank's process could not be started.
    #[error("cannot start rank {rank}: {source}")]
    Spawn {
        /// The rank.
        rank: Rank,
        /// The cause.
        source: io::Error,
    },
    /// The channel could not be created.
    #[error("cannot create the shared memory of a generation: {0}")]
    Channel(#[from] ChannelError),
    /// The windows could not be created.
    #[error("cannot create the windows of a generation: {0}")]
    Windows(String),
    /// Shared memory could not be created.
    #[error("cannot create the shared memory of a generation: {0}")]
    Region(#[from] RegionError),
}
