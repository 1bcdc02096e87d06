//! A simulation of steps, copies and reloads around a [`SlotCache`](expertd_tier::slots::SlotCache).
//!
//! A schedule is drawn from its seed: sizes, limits, and then a few hundred events. [`machine`] keeps what a GPU would have in its slots
//! and which steps read them; [`check`] compares with it what the cache proposes and what its tables name. Both use only what an observer
//! outside the cache sees.

mod check;
mod machine;

use std::fmt;

use self::machine::Machine;

expertd_test_seed::seen!(
    uploads,
    evictions,
    uploads_that_waited_for_readers,
    failed_uploads,
    uploads_that_ended_after_a_reload,
    reloads,
    steps_that_overlap_in_a_layer,
    proposals_that_bandwidth_limited,
    slots_with_the_most_used_experts_at_the_end
);

/// A schedule that broke an invariant.
#[derive(Debug)]
pub struct Failed {
    seed: u64,
    number: u64,
    what: String,
    trace: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failed { seed, number, what, trace } = self;
        let last: Vec<&str> = trace.lines().rev().take(30).collect();
        writeln!(f, "seed {seed}, schedule number {number}, broke an invariant: {what}")?;
        last.into_iter().rev().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// What a run has found.
#[derive(Debug, Default)]
pub struct Report {
    pub failure: Option<Failed>,
    pub seen: Seen,
}

/// Runs schedules until one fails.
pub fn run_seeds(first: u64, count: u64) -> Report {
    let mut report = Report::default();
    for number in 0..count {
        let seed = first.wrapping_add(number);
        let mut machine = Machine::new(seed);
        if let Err(what) = machine.run(&mut report.seen) {
            report.failure = Some(Failed { seed, number: number + 1, what, trace: machine.trace });
            break;
        }
    }
    report
}

/// The events of one schedule.
pub fn trace_of(seed: u64) -> String {
    let mut machine = Machine::new(seed);
    let end = machine.run(&mut Seen::default());
    format!("{}{end:?}", machine.trace)
}
