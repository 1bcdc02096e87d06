//! The simulation: schedules, the world in which they run, the invariants, and the shrinking of schedules that fail.

mod callers;
mod check;
mod check_steps;
mod random;
mod ranks;
mod schedule;
mod shares;
mod thread;
mod world;

use std::fmt;

use self::schedule::{Input, Schedule};
use self::world::World;

/// Counts of the events that schedules are meant to cause.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    answers: u64,
    split_requests_answered: u64,
    steps: u64,
    faults: u64,
    steps_lost: u64,
    answers_after_a_lost_step: u64,
    restarts: u64,
    poisoned: u64,
    unavailable: u64,
    late: u64,
    withdrawn: u64,
    cancelled: u64,
    overloaded: u64,
    admitted_while_reforming: u64,
    drains: u64,
    drains_timed_out: u64,
    gave_up: u64,
    replacements: u64,
    other_weights: u64,
    trials: u64,
    layers_blamed: u64,
}

impl Seen {
    /// Each count with its name.
    #[allow(dead_code, reason = "the example prints them all instead")]
    pub fn all(&self) -> [(&'static str, u64); 21] {
        [
            ("answers", self.answers),
            ("split requests answered", self.split_requests_answered),
            ("steps", self.steps),
            ("faults", self.faults),
            ("steps lost", self.steps_lost),
            ("answers after a lost step", self.answers_after_a_lost_step),
            ("restarts", self.restarts),
            ("poisoned", self.poisoned),
            ("unavailable", self.unavailable),
            ("late", self.late),
            ("withdrawn while in a step", self.withdrawn),
            ("cancelled", self.cancelled),
            ("overloaded", self.overloaded),
            ("admitted while re-forming", self.admitted_while_reforming),
            ("drains", self.drains),
            ("drains timed out", self.drains_timed_out),
            ("gave up", self.gave_up),
            ("replacements", self.replacements),
            ("expected other weights", self.other_weights),
            ("trials", self.trials),
            ("layers blamed", self.layers_blamed),
        ]
    }
}

/// A schedule that broke an invariant, shrunk.
#[derive(Debug)]
pub struct Failed {
    seed: u64,
    schedules: u64,
    violation: String,
    inputs_before: usize,
    schedule: Schedule,
    trace: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.trace)?;
        writeln!(f, "violated: {}", self.violation)?;
        writeln!(
            f,
            "seed {}, schedule number {}, shrunk from {} to {} inputs: {:?}",
            self.seed,
            self.schedules,
            self.inputs_before,
            self.schedule.inputs.len(),
            self.schedule.inputs
        )
    }
}

/// The result of a run of schedules.
#[derive(Debug, Default)]
pub struct Report {
    /// The sum over all schedules.
    pub seen: Seen,
    /// The first schedule that broke an invariant.
    pub failure: Option<Failed>,
}

/// Runs the schedules of `count` seeds from `first` on, until one fails.
pub fn run_seeds(first: u64, count: u64) -> Report {
    let mut report = Report::default();
    for seed in first..first + count {
        let schedule = Schedule::new(seed);
        if let Err(violation) = run(&schedule, &mut report.seen) {
            report.failure = Some(shrink(seed, seed - first + 1, schedule, violation));
            return report;
        }
    }
    report
}

/// The trace of one seed's schedule.
pub fn trace_of(seed: u64) -> String {
    let schedule = Schedule::new(seed);
    let (trace, result) = traced(&schedule);
    match result {
        Ok(()) => trace,
        Err(violation) => format!("{trace}\nviolated: {violation}"),
    }
}

fn run(schedule: &Schedule, seen: &mut Seen) -> Result<(), String> {
    let mut world = World::new(schedule, false);
    let result = world.run(&schedule.inputs);
    world.seen.add_to(seen);
    result
}

fn traced(schedule: &Schedule) -> (String, Result<(), String>) {
    let mut world = World::new(schedule, true);
    let result = world.run(&schedule.inputs);
    (world.take_trace(), result)
}

/// Removes inputs, in smaller and smaller groups, as long as some invariant is still broken.
fn shrink(seed: u64, schedules: u64, mut schedule: Schedule, violation: String) -> Failed {
    let inputs_before = schedule.inputs.len();
    let mut size = inputs_before.div_ceil(2);
    let fails = |schedule: &Schedule| run(schedule, &mut Seen::default()).is_err();
    while size > 0 {
        let mut at = 0;
        while at < schedule.inputs.len() {
            let mut fewer: Vec<Input> = schedule.inputs.clone();
            fewer.drain(at..(at + size).min(fewer.len()));
            let candidate = Schedule { inputs: fewer, ..schedule.clone() };
            if fails(&candidate) {
                schedule = candidate;
            } else {
                at += size;
            }
        }
        size /= 2;
    }
    let (trace, result) = traced(&schedule);
    let violation = result.err().unwrap_or(violation);
    Failed { seed, schedules, violation, inputs_before, schedule, trace }
}

impl Seen {
    fn add_to(&self, sum: &mut Seen) {
        sum.answers += self.answers;
        sum.split_requests_answered += self.split_requests_answered;
        sum.steps += self.steps;
        sum.faults += self.faults;
        sum.steps_lost += self.steps_lost;
        sum.answers_after_a_lost_step += self.answers_after_a_lost_step;
        sum.restarts += self.restarts;
        sum.poisoned += self.poisoned;
        sum.unavailable += self.unavailable;
        sum.late += self.late;
        sum.withdrawn += self.withdrawn;
        sum.cancelled += self.cancelled;
        sum.overloaded += self.overloaded;
        sum.admitted_while_reforming += self.admitted_while_reforming;
        sum.drains += self.drains;
        sum.drains_timed_out += self.drains_timed_out;
        sum.gave_up += self.gave_up;
        sum.replacements += self.replacements;
        sum.other_weights += self.other_weights;
        sum.trials += self.trials;
        sum.layers_blamed += self.layers_blamed;
    }
}
