//! `expertd inventory`: what this machine's GPUs and its NCCL can do; started by `expertd serve` and not by users.

use std::process::ExitCode;
use std::time::Duration;

use expertd_rank_cuda::{self as gpu, Inventory};

use crate::child;

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
    let answer = child::ask(&["inventory".as_ref()], &gpu::environment(&[]), DEADLINE)
        .map_err(|error| error.to_string())?;
    let answer = answer.ok_or_else(|| {
        format!("the driver did not answer within {} s; look at nvidia-smi and dmesg", DEADLINE.as_secs())
    })?;
    if !answer.status.success() {
        return Err(answer.errors);
    }
    serde_json::from_str(&answer.output)
        .map_err(|error| format!("the inventory of GPUs cannot be read: {error}"))
}
