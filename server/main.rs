//! The `expertd` binary: sets the allocator; everything else is in `expertd-cli`.

use std::process::ExitCode;

/// Memory freed by one request serves the next without going back to the kernel.
#[global_allocator]
static ALLOCATOR: expertd_memory::Allocator = expertd_memory::Allocator;

fn main() -> ExitCode {
    expertd_cli::main()
}
