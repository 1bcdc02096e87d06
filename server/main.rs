//! The `expertd` binary: picks the subcommand; everything else is in the library.

use std::process::ExitCode;

use expertd::commands;

/// Memory freed by one request serves the next without going back to the kernel.
#[global_allocator]
static ALLOCATOR: expertd::memory::Allocator = expertd::memory::Allocator;

fn main() -> ExitCode {
    commands::main()
}
