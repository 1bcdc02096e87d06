//! Runs schedules of the simulation of expert slots: `simulate_slots FIRST COUNT`, or `simulate_slots SEED`, which prints a trace.
#![allow(unreachable_pub, reason = "the test includes these modules, too")]

#[path = "../tests/slots/harness/mod.rs"]
mod harness;

fn main() -> std::process::ExitCode {
    let run_seeds = |first, count| {
        let harness::Report { failure, seen } = harness::run_seeds(first, count);
        (failure, seen)
    };
    expertd_test_seed::simulation::program(run_seeds, harness::trace_of)
}
