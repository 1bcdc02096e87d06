//! `expertd bench --ceilings`: the speed limits of this machine's GPUs.

use std::process::{Command, ExitCode};

use clap::Args;
use expertd_kernels::ceilings::Ceilings;

use super::exit::CommandError;
use expertd_rank_cuda as gpu;

/// Measure the speed limits of this machine's GPUs (replaced by `bench --ceilings`)
#[derive(Args, Clone, Debug)]
pub struct CeilingsArgs {
    /// Number of GPUs to measure together [default: all that this process may use]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub gpus: Option<u32>,
    /// Print the figures as JSON, in bytes and FLOP per second
    #[arg(long)]
    pub json: bool,
}

/// Measures the GPUs and prints the figures.
///
/// # Errors
/// Why they cannot be measured.
pub fn run(args: &CeilingsArgs) -> Result<ExitCode, CommandError> {
    eprintln!("WARNING: `expertd ceilings` will be removed; use `expertd bench --ceilings`");
    let found = measured(args.gpus.map(|gpus| (0..gpus).collect())).map_err(CommandError::failed)?;
    println!("{}", if args.json { serde_json::json!(found).to_string() } else { in_words(&found) });
    Ok(ExitCode::SUCCESS)
}

/// Measures these GPUs [default: all that this process may use], in this process. A GPU that is listed more than once is measured once.
///
/// # Errors
/// Why they cannot be measured.
pub(super) fn measured(gpus: Option<Vec<u32>>) -> Result<Ceilings, String> {
    let mut gpus = gpus.unwrap_or_else(|| (0..gpu::present().max(1)).collect());
    gpus.sort_unstable();
    gpus.dedup();
    gpu::ceilings(&gpus)
}

/// Formats the figures in one line.
pub(super) fn in_words(found: &Ceilings) -> String {
    let link = found.link_bytes_per_second.map_or_else(String::new, |link| {
        format!("; {:.0} GB/s stored to another GPU while as much comes in", link / 1e9)
    });
    format!(
        "each GPU reaches {:.0} GB/s read from its memory; {:.0} TFLOP/s of bf16 products, {:.0} in a burst{link}",
        found.memory_bytes_per_second / 1e9,
        found.tensor_sustained_flops / 1e12,
        found.tensor_burst_flops / 1e12,
    )
}

/// Measures in a child process, so that this process opens no device.
pub(super) fn in_child_process(gpus: &[u32]) -> Result<Ceilings, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    let list: Vec<String> = gpus.iter().map(u32::to_string).collect();
    command.args(["--log", "error", "bench", "--ceilings", "--json", "-", "--gpus", &list.join(",")]);
    let done = command.envs(gpu::environment(&[])).output().map_err(|error| error.to_string())?;
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).trim().to_owned());
    }
    serde_json::from_slice(&done.stdout).map_err(|error| error.to_string())
}
