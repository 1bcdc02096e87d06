//! Exit codes of `expertd serve`, after sysexits.h; other commands use the same where they fit.

/// The configuration is invalid or the checkpoint is broken. Nothing was started and no port was bound.
pub const USAGE: u8 = 64;
/// The weights could not be loaded.
pub const LOAD: u8 = 65;
/// An address could not be bound.
pub const BIND: u8 = 69;
/// Ranks kept failing before they were ready, or the service could not start.
pub const SETUP: u8 = 70;
/// A thread or task was lost that the service cannot do without.
pub const LOST: u8 = 71;
