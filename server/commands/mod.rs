//! The subcommands of the `expertd` binary.

pub mod call;
pub mod client;
pub mod golden;
pub mod rows;
pub mod verify;
