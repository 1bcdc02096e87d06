//! The phases of a step.

/// A phase of a step, the unit of timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Staging rows into the rank's own buffers.
    CopyIn,
    /// Scores and top-k.
    Gate,
    /// Counting and laying out routing.
    Prepare,
    /// Rows to the ranks that own their experts.
    Dispatch,
    /// The grouped MLP.
    Experts,
    /// Partial outputs back to the source rank.
    Combine,
    /// The rank's rows into staging.
    CopyOut,
}

impl Phase {
    /// All of them, in the order of a step.
    pub const ALL: [Phase; 7] = [
        Phase::CopyIn,
        Phase::Gate,
        Phase::Prepare,
        Phase::Dispatch,
        Phase::Experts,
        Phase::Combine,
        Phase::CopyOut,
    ];

    /// Its name in metrics and logs.
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

    /// Whether it only moves rows between the host's memory and the rank's own.
    #[must_use]
    pub const fn is_copy(self) -> bool {
        matches!(self, Phase::CopyIn | Phase::CopyOut)
    }
}
