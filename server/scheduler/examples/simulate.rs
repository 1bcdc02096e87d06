//! Runs schedules of the simulation: `simulate FIRST COUNT` or `simulate SEED`, which prints the trace of one.
#![allow(unreachable_pub, reason = "the test includes these modules, too")]

#[path = "../tests/simulate/harness/mod.rs"]
mod harness;

use std::process::ExitCode;
use std::time::Instant;

fn main() -> ExitCode {
    let numbers: Option<Vec<u64>> = std::env::args().skip(1).map(|text| text.parse().ok()).collect();
    match numbers.as_deref() {
        Some([seed]) => {
            println!("{}", harness::trace_of(*seed));
            ExitCode::SUCCESS
        }
        Some([first, count]) => {
            let start = Instant::now();
            let report = harness::run_seeds(*first, *count);
            if let Some(failure) = report.failure {
                println!("{failure}");
                return ExitCode::FAILURE;
            }
            println!(
                "{count} schedules from seed {first} on: all invariants held, {:.1} s",
                start.elapsed().as_secs_f64()
            );
            println!("{:#?}", report.seen);
            ExitCode::SUCCESS
        }
        _ => {
            println!("usage: simulate FIRST COUNT | simulate SEED");
            ExitCode::from(64)
        }
    }
}
