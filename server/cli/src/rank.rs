//! `expertd rank` and `expertd loader`: one expert rank, and the process that packs its weights; started by `expertd serve` and not by
//! users.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use clap::Args;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use expertd_ipc::control::{DeviceKind, LoaderSetup};
use expertd_rank::{
    Failure, Joining, Loaded, PackFailure, PackedShare, Progress, RankExit, run_loader, run_rank,
};

/// Flags of `expertd rank` and `expertd loader`.
#[derive(Args, Clone, Debug)]
pub struct RankArgs {
    /// Number of the rank, shown in process lists; the setup comes over the control socket
    #[arg(long)]
    pub rank: u32,
    /// Process id of the router
    #[arg(long)]
    pub parent: u32,
}

/// Runs the rank until its router ends it.
#[must_use]
pub fn run(args: &RankArgs) -> ExitCode {
    follow(args.rank, |socket| run_rank(args.parent, socket, load))
}

/// Packs the rank's weights and passes them to the router.
#[must_use]
pub fn pack_weights(args: &RankArgs) -> ExitCode {
    follow(args.rank, |socket| run_loader(args.parent, &socket, pack))
}

/// Runs a process of a rank with its control socket, which is standard input.
fn follow(rank: u32, run: impl FnOnce(UnixStream) -> Result<(), RankExit>) -> ExitCode {
    let socket = match std::io::stdin().as_fd().try_clone_to_owned() {
        Ok(fd) => UnixStream::from(fd),
        Err(error) => {
            tracing::error!(%error, "cannot use standard input as the control socket");
            return ExitCode::FAILURE;
        }
    };
    match run(socket) {
        Ok(()) => return ExitCode::SUCCESS,
        Err(RankExit::Reported(message)) => tracing::debug!(rank, message, "the router was told a failure"),
        Err(error) => tracing::error!(rank, %error, "a process of the rank ended with an error"),
    }
    ExitCode::FAILURE
}

/// Loads the engine of the device that the router asks for.
fn load(joining: Joining<'_>) -> Result<Loaded, Failure> {
    match joining.setup.device {
        DeviceKind::Cpu => {
            protect();
            expertd_rank_cpu::load(joining)
        }
        DeviceKind::Cuda => expertd_rank_cuda::load(joining),
    }
}

/// Packs the weights for the device that the router asks for.
fn pack(setup: &LoaderSetup, progress: &Progress) -> Result<PackedShare, PackFailure> {
    match setup.device {
        DeviceKind::Cpu => {
            protect();
            Ok(expertd_rank_cpu::pack(setup, progress)?)
        }
        DeviceKind::Cuda => expertd_rank_cuda::pack(setup, progress),
    }
}

/// Keeps weights and rows from processes outside of this service. GPU drivers look into processes themselves.
fn protect() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "other processes of this user may read this one's memory");
    }
}
