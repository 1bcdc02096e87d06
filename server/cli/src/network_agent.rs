//! `expertd network-agent`: serves one network session; started by `expertd serve` and not by users.

use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use expertd_agent::{has_landlock, run_agent};
use expertd_network::probe;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::child;

/// Longest time that the library gets to find its transports.
const PROBE_DEADLINE: Duration = Duration::from_secs(30);

/// Flags of `expertd network-agent`.
#[derive(Args, Clone, Debug)]
pub struct AgentArgs {
    /// Process id of the router
    #[arg(long, required_unless_present = "probe")]
    pub parent: Option<u32>,
    /// Say which NIXL is found and whether it has a transport
    #[arg(long)]
    pub probe: bool,
    /// NIXL's library or its folder, with --probe
    #[arg(long)]
    pub library: Option<PathBuf>,
}

/// Serves a session, or says what is found.
#[must_use]
pub fn run(args: &AgentArgs) -> ExitCode {
    let Some(parent) = args.parent.filter(|_| !args.probe) else {
        return match probe(args.library.as_deref()) {
            Ok(found) => {
                let files = if has_landlock() {
                    ""
                } else {
                    "; this kernel has no Landlock, so that agents can read all files of the service's user"
                };
                println!("{found}{files}");
                ExitCode::SUCCESS
            }
            Err(error) => {
                println!("{error}");
                ExitCode::FAILURE
            }
        };
    };
    // The terminal of the service is not the agent's.
    let _ = rustix::process::setsid();
    // Other agents of this user may be in the hands of their clients.
    let served = set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| error.to_string())
        .and_then(|()| expertd_rank::end_with(parent).map_err(|error| error.to_string()))
        .and_then(|()| std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string()))
        .and_then(|control| run_agent(&UnixStream::from(control)).map_err(|error| error.to_string()));
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::debug!(error, "the agent ended");
            ExitCode::FAILURE
        }
    }
}

/// What a child process finds of NIXL, so that this process loads nothing of it.
///
/// # Errors
/// Why network sessions cannot be used.
pub(super) fn probe_in_child_process(library: Option<&Path>) -> Result<String, String> {
    let mut arguments: Vec<&OsStr> = vec!["network-agent".as_ref(), "--probe".as_ref()];
    if let Some(library) = library {
        arguments.extend(["--library".as_ref(), library.as_os_str()]);
    }
    let environment = [("CUDA_VISIBLE_DEVICES".to_owned(), String::new())];
    let answer = child::ask(&arguments, &environment, PROBE_DEADLINE).map_err(|error| error.to_string())?;
    let answer = answer.ok_or_else(|| format!("NIXL did not start within {} s", PROBE_DEADLINE.as_secs()))?;
    match (answer.status.success(), answer.output.is_empty()) {
        (true, _) => Ok(answer.output),
        (false, false) => Err(answer.output),
        (false, true) => Err(format!("NIXL's process ended without a word ({})", answer.status)),
    }
}
