//! `expertd inventory`: what this machine's GPUs and its NCCL can do; started by `expertd serve` and not by users.

use std::io::Read;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use expertd_rank_cuda::{self as gpu, Inventory};

/// Longest time that the driver gets to describe its GPUs.
const DEADLINE: Duration = Duration::from_secs(60);

/// Prints the inventory as JSON.
#[must_use]
pub fn run() -> ExitCode {
    match gpu::inventory() {
        Ok(found) => {
            println!("{}", serde_json::json!(found));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Asks a child process, so that this process loads neither the driver nor NCCL.
///
/// # Errors
/// The child's error, or that it did not answer in time.
pub(super) fn in_child_process() -> Result<Inventory, String> {
    let mut child = Command::new("/proc/self/exe")
        .arg0("expertd")
        .args(["--log", "error", "inventory"])
        .envs(gpu::environment(&[]))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| error.to_string())?;
    let end = Instant::now() + DEADLINE;
    // The answer is much smaller than a pipe's buffer, so the child does not wait for its reader.
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() < end => std::thread::sleep(Duration::from_millis(5)),
            None => {
                let _ = child.kill();
                return Err(format!(
                    "the driver did not answer within {} s; look at nvidia-smi and dmesg",
                    DEADLINE.as_secs()
                ));
            }
        }
    };
    let text = |pipe: Option<&mut dyn Read>| {
        let mut text = String::new();
        if let Some(pipe) = pipe {
            let _ = pipe.read_to_string(&mut text);
        }
        text
    };
    if !status.success() {
        return Err(text(child.stderr.as_mut().map(|pipe| pipe as _)).trim().to_owned());
    }
    let answer = text(child.stdout.as_mut().map(|pipe| pipe as _));
    serde_json::from_str(&answer).map_err(|error| format!("the inventory of GPUs cannot be read: {error}"))
}
