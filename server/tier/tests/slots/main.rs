//! Runs seeded schedules against the cache of expert slots.
#![allow(unreachable_pub, reason = "the example includes these modules, too")]

mod harness;

/// Number of schedules in `cargo test`. `scripts/simulate.sh slots` runs any number.
const SCHEDULES: u64 = 3_000;

#[test]
fn every_schedule_keeps_the_invariants() {
    let report = harness::run_seeds(expertd_test_seed::seed(), SCHEDULES);
    if let Some(failure) = report.failure {
        panic!("{failure}");
    }
    let seen = report.seen;
    println!("{seen:#?}");
    // A simulation in which copies never come late or fail tests nothing about them.
    for (what, count) in seen.all() {
        assert!(count > SCHEDULES / 10, "only {count} events in {SCHEDULES} schedules were: {what}");
    }
}

#[test]
fn a_seed_gives_the_same_trace_every_time() {
    let first = expertd_test_seed::seed();
    for seed in (first..).take(20) {
        assert_eq!(harness::trace_of(seed), harness::trace_of(seed), "seed {seed}");
    }
}
