//! A simulation of steps, copies and reloads around a [`SlotCache`](expertd_tier::slots::SlotCache).
//!
//! A schedule is drawn from its seed: sizes, limits, and then a few hundred events. [`machine`] keeps what a GPU would have in its slots
//! and which steps read them; [`check`] compares with it what the cache proposes and what its tables name. Both use only what an observer
//! outside the cache sees.

mod check;
mod machine;

use std::fmt;

use self::machine::Machine;

/// How often something happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub uploads: u64,
    pub evictions: u64,
    pub waited_for_readers: u64,
    pub failed: u64,
    pub late_after_reload: u64,
    pub reloads: u64,
    pub overlapping_steps: u64,
    pub refused_for_bandwidth: u64,
    pub filled_at_the_end: u64,
}

impl Seen {
    #[allow(dead_code, reason = "the example does not call it")]
    pub fn all(self) -> [(&'static str, u64); 9] {
        [
            ("uploads", self.uploads),
            ("evictions", self.evictions),
            ("uploads that waited for readers", self.waited_for_readers),
            ("failed uploads", self.failed),
            ("uploads that ended after a reload", self.late_after_reload),
            ("reloads", self.reloads),
            ("steps that overlap in a layer", self.overlapping_steps),
            ("proposals that bandwidth limited", self.refused_for_bandwidth),
            ("slots that held the most used experts at the end", self.filled_at_the_end),
        ]
    }
}

/// A schedule that broke an invariant.
#[derive(Debug)]
pub struct Failure {
    seed: u64,
    number: u64,
    what: String,
    trace: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, number, what, trace } = self;
        let last: Vec<&str> = trace.lines().rev().take(30).collect();
        writeln!(f, "seed {seed}, schedule number {number}, broke an invariant: {what}")?;
        last.into_iter().rev().try_for_each(|line| writeln!(f, "  {line}"))
    }
}

/// What a run has found.
#[derive(Debug, Default)]
pub struct Report {
    pub failure: Option<Failure>,
    pub seen: Seen,
}

/// Runs schedules until one fails.
pub fn run_seeds(first: u64, count: u64) -> Report {
    let mut report = Report::default();
    for number in 0..count {
        let seed = first.wrapping_add(number);
        let mut machine = Machine::new(seed);
        if let Err(what) = machine.run(&mut report.seen) {
            report.failure = Some(Failure { seed, number: number + 1, what, trace: machine.trace });
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
