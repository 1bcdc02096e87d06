//! Why generations end.

use std::fmt;

/// Kind of a fault that ended a generation; the `reason` label of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A rank's process ended.
    Exit,
    /// A rank sent no heartbeat in time.
    Liveness,
    /// A rank reported that a step failed.
    Step,
    /// A step, or an order to attach or detach a session's memory, exceeded `step_timeout`.
    StepTimeout,
    /// Shared memory held invalid data.
    Channel,
    /// Weights could not be loaded.
    Load,
    /// A rank could not set up its device or the group, or a process could not be started.
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

/// Why a generation ended, or could not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
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
