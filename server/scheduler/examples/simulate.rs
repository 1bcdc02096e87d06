//! Runs schedules of the simulation: `simulate FIRST COUNT` or `simulate SEED`, which prints the trace of one.
#![allow(unreachable_pub, reason = "the test includes these modules, too")]

#[path = "../tests/simulate/harness/mod.rs"]
mod harness;

fn main() -> std::process::ExitCode {
    let run_seeds = |first, count| {
        let harness::Report { failure, seen } = harness::run_seeds(first, count);
        (failure, seen)
    };
    expertd_test_seed::simulation::program(run_seeds, harness::trace_of)
}
