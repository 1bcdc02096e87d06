//! The `expertd` binary: sets the allocator; everything else is in `expertd-cli`.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    expertd_cli::main()
}
