//! `expertd network-agent`: serves one network session; started by `expertd serve` and not by users.

use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use expertd_agent::{has_landlock, run_agent};
use expertd_network::probe;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

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
    let mut command = Command::new("/proc/self/exe");
    command.arg0("expertd").args(["--log", "error", "network-agent", "--probe"]);
    if let Some(library) = library {
        command.arg("--library").arg(library);
    }
    let child = command
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = child.map_err(|error| error.to_string())?;
    let end = Instant::now() + PROBE_DEADLINE;
    // The answer is a line, which a pipe holds without a reader.
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("NIXL did not start within {} s", PROBE_DEADLINE.as_secs()));
            }
        }
    };
    let mut answer = String::new();
    if let Some(pipe) = &mut child.stdout {
        let _ = pipe.read_to_string(&mut answer);
    }
    let answer = answer.trim().to_owned();
    match (status.success(), answer.is_empty()) {
        (true, _) => Ok(answer),
        (false, false) => Err(answer),
        (false, true) => Err(format!("NIXL's process ended without a word ({status})")),
    }
}
