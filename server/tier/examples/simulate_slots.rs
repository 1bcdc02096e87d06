//! Runs schedules of the simulation of expert slots: `simulate_slots FIRST COUNT`, or `simulate_slots SEED`, which prints a trace.
#![allow(unreachable_pub, reason = "the test includes these modules, too")]

#[path = "../tests/slots/harness/mod.rs"]
mod harness;

use std::process::ExitCode;

fn main() -> ExitCode {
    let numbers: Option<Vec<u64>> = std::env::args().skip(1).map(|text| text.parse().ok()).collect();
    match numbers.as_deref() {
        Some([seed]) => {
            println!("{}", harness::trace_of(*seed));
            ExitCode::SUCCESS
        }
        Some([first, count]) => {
            let report = harness::run_seeds(*first, *count);
            if let Some(failure) = report.failure {
                println!("{failure}");
                return ExitCode::FAILURE;
            }
            println!("{count} schedules from seed {first} on: all invariants held");
            println!("{:#?}", report.seen);
            ExitCode::SUCCESS
        }
        _ => {
            println!("usage: simulate_slots FIRST COUNT | simulate_slots SEED");
            ExitCode::from(64)
        }
    }
}
