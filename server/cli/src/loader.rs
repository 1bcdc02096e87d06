//! `expertd loader`: packs the weights of one expert rank; started by `expertd serve` and not by users.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use clap::Args;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use expertd_ipc::control::{DeviceKind, LoaderSetup};
use expertd_rank::{PackFailure, PackedShare, Progress, RankExit, run_loader};

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
    match run_loader(args.parent, &socket, pack) {
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

/// Packs the weights for the device that the router asks for.
fn pack(setup: &LoaderSetup, progress: &Progress) -> Result<PackedShare, PackFailure> {
    match setup.device {
        DeviceKind::Cpu => {
            // Weights are for the ranks of this service only. GPU drivers look into processes themselves.
            if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
                tracing::warn!(%error, "other processes of this user may read this one's memory");
            }
            Ok(expertd_rank_cpu::pack(setup, progress)?)
        }
        DeviceKind::Cuda => expertd_rank_cuda::pack(setup, progress),
    }
}
