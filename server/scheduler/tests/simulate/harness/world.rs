//! The world around the driver: callers, ranks, loaders, sessions, and time. `machine.rs` shows it to the driver.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use expertd_scheduler::{Ask, Driver, End, Inbox, MemoryMail, ServiceState, Step, StepKind, StepLoop, Time};
use expertd_types::{Generation, LayerId, MemoryId, StepId, WeightVersion};

use super::Seen;
use super::callers::Caller;
use super::ranks::{Loaders, Ranks, Source};
use super::schedule::{Input, Schedule};
use super::sessions::Session;
use super::shares::Shares;

/// What the step loop has been told about the current generation.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    /// The generation that forms or runs.
    pub(super) group: Option<Generation>,
    /// The generation that serves.
    pub(super) serving: Option<(Generation, WeightVersion)>,
    /// The generation that served, while its ranks are being ended.
    pub(super) leaving: Option<(Generation, WeightVersion)>,
    /// Whether a fault ends the present generation.
    pub(super) has_fault: bool,
    /// The last version that served.
    pub(super) version: Option<WeightVersion>,
    /// Whether the present generation is to be replaced, and whether the next one replaces it without a fault.
    pub(super) is_replaced: bool,
    pub(super) is_replacement: bool,
    pub(super) ready_at: Option<Time>,
    pub(super) has_served: bool,
    pub(super) steps_done: u64,
    /// The steps in flight, and whether the step loop was told that their experts phase ended.
    pub(super) in_flight: VecDeque<(Step, bool)>,
    /// Clients of the last step that have sent nothing since, and the longest wait for them.
    pub(super) absent: Vec<u64>,
    pub(super) gathers_until: Time,
    /// When the last generation ended, and the pause that must follow.
    pub(super) ended_at: Time,
    pub(super) pause: Duration,
    pub(super) short_lived: u32,
    pub(super) unready: u32,
    pub(super) fruitless: u32,
}

/// A reload that was asked for. The first entry stands for the weights that the service began with.
#[derive(Clone, Debug, Default)]
pub(super) struct Reload {
    pub(super) checked_against: u64,
    pub(super) has_room: bool,
    pub(super) is_quick: bool,
    /// Whether loaders found no room beside the present weights.
    pub(super) lacked_room: bool,
    /// Whether the driver has it.
    pub(super) is_known: bool,
    pub(super) is_answered: bool,
}

/// Until when the driver goes on before the next input is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// For this number of its calls.
    Calls(usize),
    UntilAsleep,
}

pub struct World {
    pub(super) schedule: Schedule,
    pub(super) inputs: VecDeque<Input>,
    pace: Pace,
    /// Number of inputs that were applied.
    applied: u64,
    /// Whether callers have left anything for the driver.
    pub(super) has_mail: bool,
    pub(super) inbox: Inbox<usize>,
    pub(super) reload_mail: Vec<Ask<Source, usize>>,
    pub(super) memory_mail: Vec<MemoryMail>,
    pub(super) now: Time,
    /// The time that the driver was told last.
    pub(super) asked: Cell<Time>,
    pub(super) callers: Vec<Caller>,
    /// Indices of callers without an answer.
    pub(super) open: Vec<usize>,
    pub(super) sessions: Vec<Session>,
    pub(super) reloads: Vec<Reload>,
    pub(super) ranks: Option<Ranks>,
    pub(super) loaders: Option<Loaders>,
    /// The sets that are whole.
    pub(super) sets: Vec<(WeightVersion, Source)>,
    /// The weights that served last, or are to serve first.
    pub(super) served: (WeightVersion, Source),
    /// The source of the loaders that failed last, and whether they loaded beside other weights.
    pub(super) load_failed: Option<(Source, bool)>,
    /// The version of a generation whose ranks could not be started.
    pub(super) failed_to_form: Option<WeightVersion>,
    /// Memories of the sessions that were open when the ranks were ready.
    pub(super) awaited: Vec<MemoryId>,
    /// Memories that processes of an ended generation may still write, whose sessions have not been ended.
    pub(super) endangered: Vec<MemoryId>,
    /// Whether a fault was noted in this round, and whether one must be.
    pub(super) heard_fault: bool,
    pub(super) next_form_fails: bool,
    pub(super) next_load_fails: bool,
    pub(super) next_launch_fails: bool,
    pub(super) next_end_leaves: bool,
    pub(super) next_end_is_slow: bool,
    /// Processes that the present end leaves.
    pub(super) left: Vec<u32>,
    /// Whether late news of an ended generation are to reach the step loop.
    pub(super) stale_news: bool,
    pub(super) last_step: Option<(Generation, StepId)>,
    pub(super) told: Told,
    /// Whether the inbox was told to admit requests, and that a generation serves.
    pub(super) is_told_open: bool,
    pub(super) is_told_serving: bool,
    /// Whether a caller was refused because the service has failed.
    pub(super) is_said_to_fail: bool,
    /// Whether the step loop was told of a drain.
    pub(super) is_told_drain: bool,
    pub(super) shown: ServiceState,
    pub(super) drain: Option<Time>,
    pub(super) drain_reported: bool,
    pub(super) end: Option<End>,
    /// Rows of requests that were dropped since the last step was formed.
    pub(super) dropped_tokens: usize,
    /// The last step that was launched in this round, and the number of its requests, unless it is alone.
    pub(super) examined: Option<(StepId, usize)>,
    /// Whether a generation became ready before all decided actions were carried out.
    pub(super) is_just_ready: bool,
    pub(super) shares: Shares,
    /// Poisoned requests of each layer since its last complete step.
    pub(super) verdicts: BTreeMap<LayerId, u32>,
    /// Trials that ended their generations.
    pub(super) trials_lost: u32,
    /// Whether clients send no further requests.
    pub(super) is_over: bool,
    /// The first invariant that was broken.
    violation: Option<String>,
    trace: Option<String>,
    pub(super) seen: Seen,
}

impl World {
    fn new(schedule: &Schedule, traced: bool) -> World {
        World {
            inbox: Inbox::new(schedule.max_queued_tokens, schedule.config.seed),
            schedule: Schedule { inputs: Vec::new(), ..schedule.clone() },
            inputs: schedule.inputs.iter().copied().collect(),
            pace: Pace::Calls(1),
            applied: 0,
            has_mail: false,
            reload_mail: Vec::new(),
            memory_mail: Vec::new(),
            now: Time(0),
            asked: Cell::new(Time(0)),
            callers: Vec::new(),
            open: Vec::new(),
            sessions: Vec::new(),
            reloads: vec![Reload { is_answered: true, ..Reload::default() }],
            ranks: None,
            loaders: None,
            sets: Vec::new(),
            served: (WeightVersion(1), Source(0)),
            load_failed: None,
            failed_to_form: None,
            awaited: Vec::new(),
            endangered: Vec::new(),
            heard_fault: false,
            next_form_fails: false,
            next_load_fails: false,
            next_launch_fails: false,
            next_end_leaves: false,
            next_end_is_slow: false,
            left: Vec::new(),
            stale_news: false,
            last_step: None,
            told: Told::default(),
            is_told_open: false,
            is_told_serving: false,
            is_said_to_fail: false,
            is_told_drain: false,
            shown: ServiceState::Loading,
            drain: None,
            drain_reported: false,
            end: None,
            dropped_tokens: 0,
            examined: None,
            is_just_ready: false,
            shares: Shares::default(),
            verdicts: BTreeMap::new(),
            trials_lost: 0,
            is_over: false,
            violation: None,
            trace: traced.then(|| format!("{:#?}\n", schedule.config)),
            seen: Seen::default(),
        }
    }

    /// Runs a schedule, then lets all requests and reloads be answered and drains the service. Returns what happened, and the trace.
    pub fn run(schedule: &Schedule, traced: bool) -> (Result<(), String>, Seen, String) {
        let world = World::new(schedule, traced);
        let mut driver = Driver::new(schedule.config.clone(), world.served.0, world.served.1, world);
        let result = World::drive(&mut driver);
        let (_, world) = driver.parts();
        (result, world.seen, world.trace.take().unwrap_or_default())
    }

    /// What the thread of the service does.
    fn drive(driver: &mut Driver<World>) -> Result<(), String> {
        let (mut restless, mut applied) = (0, 0);
        for _ in 0..100_000 {
            let end = driver.round();
            let (steps, world) = driver.parts();
            if let Some(violation) = world.violation.take() {
                return Err(violation);
            }
            if let Some(end) = end {
                return world.check_end(steps, end);
            }
            world.check_round(steps)?;
            world.tell_stale_news(steps);
            // The thread publishes counts before it falls asleep.
            world.pulse();
            let (wake_at, heard) = (driver.wake_at(), driver.heard_experts());
            let (steps, world) = driver.parts();
            if steps.has_news_for_inbox(world.now) {
                let is_news = std::mem::replace(&mut applied, world.applied) != world.applied;
                restless = if is_news { 0 } else { restless + 1 };
                if restless > 40 {
                    return Err("the driver goes round without doing anything".into());
                }
                continue;
            }
            restless = 0;
            world.check_sleep(steps, wake_at)?;
            world.sleep(steps, wake_at, heard)?;
        }
        Err(format!("{} requests have no answer although ranks work", driver.parts().1.open.len()))
    }

    /// Keeps the first violation.
    pub(super) fn demand(&mut self, checked: Result<(), String>) {
        if let Err(violation) = checked {
            self.violation.get_or_insert(violation);
        }
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{:>14.6} s  {}", self.now.0 as f64 / 1e9, line());
        }
    }

    /// The driver has made a call: anything may happen now.
    pub(super) fn pulse(&mut self) {
        if let Pace::Calls(calls) = &mut self.pace {
            *calls = calls.saturating_sub(1);
            if *calls == 0 {
                self.apply_inputs();
            }
        }
    }

    /// Applies inputs up to the next that lets the driver go on.
    fn apply_inputs(&mut self) {
        self.pace = Pace::UntilAsleep;
        while let Some(input) = self.inputs.pop_front() {
            self.note(|| format!("{input:?}"));
            self.applied += 1;
            match input {
                Input::Turns { count } => {
                    self.pace = Pace::Calls(count);
                    return;
                }
                Input::UntilAsleep => return,
                input => self.apply(input),
            }
        }
    }

    /// Sleeps until something happens that wakes the driver.
    fn sleep(&mut self, steps: &StepLoop, wake_at: Time, heard: Option<StepId>) -> Result<(), String> {
        while !self.is_woken(steps, wake_at, heard) {
            if self.inputs.is_empty() {
                self.settle(wake_at);
            } else {
                self.apply_inputs();
            }
            if let Some(violation) = self.violation.take() {
                return Err(violation);
            }
        }
        Ok(())
    }

    /// Whether ranks are being ended.
    pub(super) fn is_ending(&self) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.ending.is_some())
    }

    fn is_woken(&self, steps: &StepLoop, wake_at: Time, heard: Option<StepId>) -> bool {
        self.has_mail
            || self.now >= wake_at
            || self.loaders.as_ref().is_some_and(|loaders| loaders.end.is_some())
            || self.ranks.as_ref().is_some_and(Ranks::has_news)
            || steps.has_waiting()
                && !self.is_ending()
                && self.ended_experts().is_some_and(|step| Some(step) != heard)
    }

    /// The schedule is over: ranks work without faults until everything is answered, then the service drains until it ends.
    fn settle(&mut self, wake_at: Time) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.note(|| {
                "the schedule is over: ranks work without faults, then the service drains".to_owned()
            });
        }
        let is_answered = self.open.is_empty() && self.reloads.iter().all(|reload| reload.is_answered);
        if is_answered && self.drain.is_none() {
            if let Some(at) = self.sessions.iter().position(|session| !session.has_ended) {
                return self.close_session(MemoryId(at as u32 + 1));
            }
            if self.sessions.iter().all(|session| session.is_released) {
                return self.ask_to_drain(Duration::from_secs(1));
            }
        }
        let worked = [
            self.ranks_end(),
            self.loaders_pack(),
            self.ranks_ready(),
            self.rank_answers(false),
            self.ranks_end_experts(),
            self.ranks_complete(),
        ];
        if !worked.contains(&true) {
            self.now = wake_at.max(Time(self.now.0 + 1));
        }
    }

    pub(super) fn kind_waiting(&self, kind: StepKind) -> impl Iterator<Item = &Caller> {
        let open = self.open.iter().map(|index| &self.callers[*index]);
        open.filter(move |caller| caller.kind == kind && caller.is_received && caller.waits())
    }
}
