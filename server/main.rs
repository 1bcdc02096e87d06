//! The `expertd` binary: picks the subcommand; everything else is in the library.

use std::process::ExitCode;

use expertd::commands;

/// Pages freed by one request serve the next without going back to the kernel.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    commands::main()
}
