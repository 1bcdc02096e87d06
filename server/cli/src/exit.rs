//! Exit codes of `expertd serve`, after sysexits.h; other commands use the same where they fit.

use std::fmt::{Display, Formatter};

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

/// Why a command failed, and its exit status.
#[derive(Debug)]
pub struct CommandError {
    status: u8,
    text: String,
}

impl CommandError {
    /// Exit status 1.
    pub fn failed(text: impl Display) -> Self {
        CommandError { status: 1, text: text.to_string() }
    }

    /// [`USAGE`]: a file, a setting or a checkpoint that cannot be used.
    pub fn usage(text: impl Display) -> Self {
        CommandError { status: USAGE, text: text.to_string() }
    }

    /// The exit status.
    pub const fn status(&self) -> u8 {
        self.status
    }
}

impl Display for CommandError {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl<E: std::error::Error> From<E> for CommandError {
    fn from(error: E) -> Self {
        CommandError::failed(error)
    }
}
