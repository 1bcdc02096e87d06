//! `expertd rank`: one expert rank, started by `expertd serve` and not by users.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use clap::Args;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use expertd_ipc::control::DeviceKind;
use expertd_rank::{Failure, Joining, Loaded, RankExit, run_rank};

/// Flags of `expertd rank`.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    /// Number of this rank, shown in process lists; the setup comes over the control socket
    #[arg(long)]
    pub rank: u32,
    /// Process id of the router
    #[arg(long)]
    pub parent: u32,
}

/// Runs the rank until its router ends it.
#[must_use]
pub fn run(args: &RankArgs) -> ExitCode {
    let socket = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(fd) => UnixStream::from(fd),
        Err(error) => {
            tracing::error!(%error, "cannot use standard input as the control socket");
            return ExitCode::FAILURE;
        }
    };
    match run_rank(args.parent, socket, load) {
        Ok(()) => ExitCode::SUCCESS,
        Err(RankExit::Reported(message)) => {
            tracing::debug!(rank = args.rank, message, "could not get ready");
            ExitCode::FAILURE
        }
        Err(error) => {
            tracing::error!(rank = args.rank, %error, "the rank ended with an error");
            ExitCode::FAILURE
        }
    }
}

/// Loads the engine of the device that the router asks for.
fn load(joining: Joining<'_>) -> Result<Loaded, Failure> {
    match joining.setup.device {
        DeviceKind::Cpu => {
            // Weights and rows are for this process and its peers only. GPU drivers look into processes themselves.
            if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
                tracing::warn!(%error, "other processes of this user may read this one's memory");
            }
            expertd_rank_cpu::load(joining)
        }
        DeviceKind::Cuda => expertd_rank_cuda::load(joining),
    }
}
