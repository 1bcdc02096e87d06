//! The simulation: schedules, the world in which they run, the invariants, and the shrinking of schedules that fail.

mod callers;
mod check;
mod check_memories;
mod check_steps;
mod check_weights;
mod inputs;
mod machine;
mod ranks;
mod schedule;
mod sessions;
mod shares;
mod with_sessions;
mod world;

use std::fmt;

use self::schedule::{Input, Schedule};
use self::world::World;

expertd_test_seed::seen!(
    answers,
    split_requests_answered,
    steps,
    steps_held_back,
    faults,
    steps_lost,
    answers_after_a_lost_step,
    restarts,
    poisoned,
    unavailable,
    late,
    withdrawn_while_in_a_step,
    cancelled,
    overloaded,
    admitted_while_reforming,
    drains,
    drains_timed_out,
    gave_up,
    replacements,
    expected_other_weights,
    trials,
    layers_blamed,
    reloads,
    reloads_that_dropped_first,
    reloads_refused,
    reloads_that_could_not_load,
    loaded_again,
    new_weights_never_served,
    loaders_died_without_reload,
    sessions_opened,
    sessions_reattached,
    memories_refused,
    memories_released,
    sessions_ended_by_the_service,
    orders_too_late,
    answers_to_no_order,
    steps_in_place,
    told_steps_kept,
    told_while_ending,
    told_behind_a_failed_step,
    told_before_a_drains_end,
    ended_while_ranks_end
);

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
    let (result, here, _) = World::run(schedule, false);
    here.add_to(seen);
    result
}

fn traced(schedule: &Schedule) -> (String, Result<(), String>) {
    let (result, _, trace) = World::run(schedule, true);
    (trace, result)
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
