//! Runs the kernels on a GPU and compares them with plain code on the host, bit by bit where the order is fixed.
//!
//! `device all` checks everything on one GPU with loopback groups of virtual ranks, except what takes much memory or several
//! processes. `device COMMAND [key=value ...]`:
//!
//! * `loopback cases=N seed=S ranks=N deadline=SECONDS`: exchanges of random shapes, counts, routing, placements and delays.
//! * `faults`: a rank that never takes part, and a block that comes too late.
//! * `beyond`: an exchange beyond 2^32 bytes.
//! * `gate cases=N tokens=N hidden=N experts=N`: routing functions against f64.
//! * `experts`: the experts' kernels in every weight format against f64.
//! * `full`, `wide`, `skew`, `rows`, `word [format=0..8]`: shapes of released models, offsets beyond 2^32 bytes, rows on few experts,
//!   rows that are not numbers, an error word that changes.
//! * `same_bits`, `rates [format=0..5]`: the portable kernels beside those for Hopper, on Hopper.
//! * `staging cases=N deadline=SECONDS`: a whole step from pinned host memory and back, as a replayed graph.
//! * `peers ranks=N cases=N share=1`: the exchanges with one process per rank, over NCCL windows; then their times. With `share=1` ranks
//!   share GPUs if there are too few.
//! * `fp8_rows cases=N`: dispatch with FP8 rows.
//! * `timing [placed=1]`: dispatch + combine of the loopback group under graph replay; with `placed=1` the owners of contiguous ranges
//!   are looked up instead of computed.
//!
//! On cards other than Hopper, and with `EXPERTD_GPU_PATH=portable`, the checks run the portable kernels.
#![allow(unsafe_code, reason = "launches kernels on addresses")]
#![allow(missing_docs, unreachable_pub, reason = "a test program, not a library")]

mod beyond;
mod exchange;
mod experts;
mod faults;
mod fp8_rows;
mod gate;
mod peers;
mod placed;
mod random;
mod staging;
mod timing;

use std::process::ExitCode;

use expertd_kernels::device::{Device, DeviceError, describe_device};
use expertd_kernels::path::KernelPath;

/// `key=value` arguments.
pub struct Options(Vec<(String, String)>);

impl Options {
    fn parse(words: &[String]) -> Result<Options, String> {
        words
            .iter()
            .map(|word| {
                word.split_once('=')
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .ok_or_else(|| format!("expected key=value, found `{word}`"))
            })
            .collect::<Result<_, _>>()
            .map(Options)
    }

    pub fn number(&self, key: &str, default: u64) -> u64 {
        self.0
            .iter()
            .find(|(name, _)| name == key)
            .map_or(default, |(_, value)| value.parse().expect("a number"))
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }
}

pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Whether the checks run the portable kernels, decided by the first card as for ranks.
fn is_portable() -> Result<bool, DeviceError> {
    Ok(describe_device(0)?.capability != (9, 0)
        || std::env::var("EXPERTD_GPU_PATH").is_ok_and(|path| path == "portable"))
}

fn run(words: &[String]) -> Outcome {
    // `cargo test` may pass flags of libtest.
    let words: Vec<String> = words.iter().filter(|word| !word.starts_with('-')).cloned().collect();
    let Some(command) = words.first() else {
        println!("ignored: these checks need a GPU; run them with the argument `all`");
        return Ok(());
    };
    let options = Options::parse(words.get(1..).unwrap_or_default())?;
    if Device::count()? == 0 {
        return Err("this machine has no GPU".into());
    }
    if is_portable()? {
        KernelPath::Portable.choose();
    }
    match command.as_str() {
        "all" => {
            exchange::loopback(&options)?;
            faults::check()?;
            fp8_rows::check(&options)?;
            gate::check(&options)?;
            experts::check(&options)?;
            experts::sizes::skew(&options)?;
            experts::rows::check(&options)?;
            experts::word::check(&options)?;
            experts::paths::same_bits(&options)?;
            staging::check(&options)
        }
        "loopback" => exchange::loopback(&options),
        "faults" => faults::check(),
        "beyond" => beyond::check(&options),
        "full" => experts::sizes::full(&options),
        "wide" => experts::sizes::wide(&options),
        "skew" => experts::sizes::skew(&options),
        "rows" => experts::rows::check(&options),
        "word" => experts::word::check(&options),
        "same_bits" => experts::paths::same_bits(&options),
        "rates" => experts::paths::rates(&options),
        "fp8_rows" => fp8_rows::check(&options),
        "gate" => gate::check(&options),
        "experts" => experts::check(&options),
        "staging" => staging::check(&options),
        "timing" => timing::loopback(&options),
        "peers" => peers::parent(&options),
        "peer" => peers::child(&options),
        other => Err(format!("unknown command `{other}`").into()),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}
