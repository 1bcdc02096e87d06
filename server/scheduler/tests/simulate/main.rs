//! Runs seeded schedules against the step loop. `docs/step-loop.md` describes the simulation.
#![allow(unreachable_pub, reason = "the example includes these modules, too")]

mod harness;

/// Number of schedules in `cargo test`. `scripts/simulate.sh` runs any number.
const SCHEDULES: u64 = 10_000;

#[test]
fn every_schedule_keeps_the_invariants() {
    let report = harness::run_seeds(0, SCHEDULES);
    if let Some(failure) = report.failure {
        panic!("{failure}");
    }
    // A simulation in which faults, drains or poisoned requests never happen tests nothing about them.
    let seen = report.seen;
    println!("{seen:#?}");
    for (what, count) in seen.all() {
        assert!(count > SCHEDULES / 100, "only {count} of {SCHEDULES} schedules' events were: {what}");
    }
}

#[test]
fn a_seed_gives_the_same_trace_every_time() {
    for seed in 0..50 {
        assert_eq!(harness::trace_of(seed), harness::trace_of(seed), "seed {seed}");
    }
}
