//! `expertd loader`: packs the weights of one expert rank; started by `expertd serve` and not by users.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use clap::Args;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use expertd_rank::{RankExit, run_loader};

/// Flags of `expertd loader`.
#[derive(Args, Clone, Debug)]
pub struct LoaderArgs {
    /// Number of the rank whose weights are packed, shown in process lists
    #[arg(long)]
    pub rank: u32,
    /// Process id of the router
    #[arg(long)]
    pub parent: u32,
}

/// Packs the weights and passes them to the router.
#[must_use]
pub fn run(args: &LoaderArgs) -> ExitCode {
    let socket = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(fd) => UnixStream::from(fd),
        Err(error) => {
            tracing::error!(%error, "cannot use standard input as the control socket");
            return ExitCode::FAILURE;
        }
    };
    // Weights are for the ranks of this service only.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user may read this one's memory");
    }
    let packed = run_loader(args.parent, &socket, |setup, progress| {
        expertd_rank_cpu::pack(setup, progress).map_err(|error| error.to_string())
    });
    match packed {
        Ok(()) => ExitCode::SUCCESS,
        Err(RankExit::Reported(message)) => {
            tracing::debug!(rank = args.rank, message, "the weights were not packed");
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!(rank = args.rank, %error, "the loader ended with an error");
            ExitCode::FAILURE
        }
    }
}
