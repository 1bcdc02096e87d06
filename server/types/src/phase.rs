//! The phases of a step.

/// A phase of a step, the unit of timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Rows are copied from staging to the rank's own buffers.
    CopyIn,
    /// Experts are scored and chosen.
    Gate,
    /// Assignments are counted and listed by expert.
    Prepare,
    /// Rows are sent to the ranks that own their experts.
    Dispatch,
    /// The MLPs of the experts are computed.
    Experts,
    /// Partial outputs are returned to the source ranks and added up.
    Combine,
    /// Output rows are copied to staging.
    CopyOut,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Phase; 7] = [
        Phase::CopyIn,
        Phase::Gate,
        Phase::Prepare,
        Phase::Dispatch,
        Phase::Experts,
        Phase::Combine,
        Phase::CopyOut,
    ];

    /// Name of the phase in metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Phase::CopyIn => "copy_in",
            Phase::Gate => "gate",
            Phase::Prepare => "prepare",
            Phase::Dispatch => "dispatch",
            Phase::Experts => "experts",
            Phase::Combine => "combine",
            Phase::CopyOut => "copy_out",
        }
    }

    /// Whether the phase only copies rows between the host's memory and the rank's own.
    #[must_use]
    pub const fn is_copy(self) -> bool {
        matches!(self, Phase::CopyIn | Phase::CopyOut)
    }
}
