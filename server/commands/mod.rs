//! The subcommands of the `expertd` binary.
