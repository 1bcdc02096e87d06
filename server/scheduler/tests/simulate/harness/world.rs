//! The world around the step loop: its callers, its ranks, and time. Its thread is in `thread.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use expertd_scheduler::{
    ClientKey, End, Inbox, Refusal, RequestKey, ServiceState, Step, StepKind, StepLoop, Submission, Time,
};
use expertd_types::{Generation, LayerId, StepId, WeightVersion};

use super::Seen;
use super::callers::Caller;
use super::ranks::{Event, Ranks};
use super::schedule::{Input, Schedule};
use super::shares::Shares;
use super::thread::Turn;

/// What the step loop has been told about the current generation.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    /// The generation that serves.
    pub(super) serving: Option<(Generation, WeightVersion)>,
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
    /// When the last generation ended, and the pause that must follow.
    pub(super) ended_at: Time,
    pub(super) pause: Duration,
    pub(super) short_lived: u32,
    pub(super) unready: u32,
    pub(super) fruitless: u32,
}

pub struct World {
    pub(super) schedule: Schedule,
    pub(super) step_loop: StepLoop,
    pub(super) inbox: Inbox<usize>,
    pub(super) now: Time,
    pub(super) callers: Vec<Caller>,
    /// Indices of callers without an answer.
    pub(super) open: Vec<usize>,
    pub(super) turn: Turn,
    pub(super) events: VecDeque<Event>,
    pub(super) ranks: Option<Ranks>,
    pub(super) next_form_fails: bool,
    pub(super) weights: u64,
    /// The version that the next submitted request expects.
    pinned: Option<WeightVersion>,
    pub(super) last_step: Option<(Generation, StepId)>,
    pub(super) told: Told,
    /// Whether the inbox was told to admit requests, and that a generation serves.
    pub(super) is_told_open: bool,
    pub(super) is_told_serving: bool,
    /// Whether the step loop was told of a drain.
    pub(super) is_told_drain: bool,
    pub(super) shown: ServiceState,
    pub(super) drain: Option<Time>,
    pub(super) drain_reported: bool,
    pub(super) end: Option<End>,
    /// Rows of requests that were dropped since the last step was formed.
    pub(super) dropped_tokens: usize,
    /// Whether a generation became ready before all decided actions were carried out.
    pub(super) is_just_ready: bool,
    pub(super) shares: Shares,
    /// Poisoned requests of each layer since its last complete step.
    pub(super) verdicts: BTreeMap<LayerId, u32>,
    /// Trials that ended their generations.
    pub(super) trials_lost: u32,
    /// Whether clients send no further requests.
    pub(super) is_over: bool,
    trace: Option<String>,
    pub(super) seen: Seen,
}

impl World {
    pub fn new(schedule: &Schedule, traced: bool) -> World {
        World {
            step_loop: StepLoop::new(schedule.config.clone()),
            inbox: Inbox::new(schedule.max_queued_tokens, schedule.config.seed),
            schedule: Schedule { inputs: Vec::new(), ..schedule.clone() },
            now: Time(0),
            callers: Vec::new(),
            open: Vec::new(),
            turn: Turn::Exchange,
            events: VecDeque::new(),
            ranks: None,
            next_form_fails: false,
            weights: 1,
            pinned: None,
            last_step: None,
            told: Told::default(),
            is_told_open: false,
            is_told_serving: false,
            is_told_drain: false,
            shown: ServiceState::Loading,
            drain: None,
            drain_reported: false,
            end: None,
            dropped_tokens: 0,
            is_just_ready: false,
            shares: Shares::default(),
            verdicts: BTreeMap::new(),
            trials_lost: 0,
            is_over: false,
            trace: traced.then(|| format!("{:#?}\n", schedule.config)),
            seen: Seen::default(),
        }
    }

    pub fn take_trace(&mut self) -> String {
        self.trace.take().unwrap_or_default()
    }

    /// Runs a schedule, then lets all requests be answered and drains the service.
    pub fn run(&mut self, inputs: &[Input]) -> Result<(), String> {
        for input in inputs {
            self.note(|| format!("{input:?}"));
            self.apply(*input)?;
        }
        self.note(|| "the schedule is over: ranks work without faults, then the service drains".to_owned());
        self.settle()
    }

    pub(super) fn note(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{:>14.6} s  {}", self.now.0 as f64 / 1e9, line());
        }
    }

    fn apply(&mut self, input: Input) -> Result<(), String> {
        match input {
            Input::Submit { client, kind, tokens, deadline_millis, is_poison, is_pinned } => {
                let deadline = deadline_millis.map(|millis| self.now + Duration::from_millis(millis));
                self.pinned = self.told.version.filter(|_| is_pinned);
                self.submit(client, kind, tokens, deadline, is_poison, false)?;
            }
            Input::Leave { which } => {
                if let Some(index) = self.open.get(which).copied() {
                    self.callers[index].left.get_or_insert(self.now);
                }
            }
            Input::Drain { timeout_millis } => self.ask_to_drain(Duration::from_millis(timeout_millis)),
            Input::Turns { count } => {
                for _ in 0..count {
                    self.thread_turn()?;
                }
            }
            Input::UntilAsleep => self.until_asleep()?,
            Input::Pass { micros } => self.now = self.now + Duration::from_micros(micros),
            Input::Ready => self.ranks_ready(),
            Input::Experts => self.ranks_end_experts(),
            Input::Done => self.ranks_complete(),
            Input::Fault { is_load } => self.ranks_fail("a fault of the schedule", is_load),
            Input::NextFormFails => self.next_form_fails = true,
            Input::NewWeights => self.weights += 1,
            Input::Replace => {
                self.weights += 1;
                self.step_loop.replace_group();
                self.told.is_replaced |= self.step_loop.generation().is_some();
            }
            Input::StaleNews => self.stale_news(),
            Input::ClosedLoop { client, kind, tokens } => {
                self.submit(client, kind, tokens, None, false, true)?;
                self.shares.add(client, tokens, kind);
            }
            Input::Backlog { client, kind, tokens, size } => {
                self.shares.add_backlog(client, size, kind, tokens);
            }
            Input::Round => self.round()?,
        }
        Ok(())
    }

    pub(super) fn submit(
        &mut self,
        client: u64,
        kind: usize,
        tokens: usize,
        deadline: Option<Time>,
        is_poison: bool,
        is_closed_loop: bool,
    ) -> Result<(), String> {
        let kind = self.schedule.kinds[kind];
        let expected = self.pinned.take();
        let submission =
            Submission { client: ClientKey(client), kind, tokens, deadline, expected_version: expected };
        let queued = self.inbox.queued_tokens();
        let index = self.callers.len();
        match self.inbox.submit(self.now, submission, index) {
            Ok(key) => {
                self.check_admission(&submission, queued)?;
                if key != RequestKey(index as u64 + 1) {
                    return Err(format!("request {key} was numbered after {index} others"));
                }
                self.seen.admitted_while_reforming += u64::from(!self.is_told_serving);
                self.callers.push(Caller {
                    key,
                    client,
                    kind,
                    tokens,
                    deadline,
                    admitted: self.now,
                    is_poison,
                    expected,
                    is_closed_loop,
                    left: None,
                    was_withdrawn: false,
                    is_received: false,
                    is_answered: false,
                    waits_since: self.now,
                    begun: 0,
                    completed: 0,
                    steps: Vec::new(),
                    version: None,
                    is_mixed: false,
                    generation: None,
                    lost: 0,
                    was_lost_alone: false,
                    steps_waited: 0,
                    max_steps_waited: 0,
                });
                self.open.push(index);
                self.bound_wait(index);
            }
            Err(refusal) => {
                self.note(|| format!("    refused: {refusal:?}"));
                self.seen.overloaded += u64::from(matches!(refusal, Refusal::Overloaded { .. }));
                self.check_refusal(&submission, queued, &refusal)?;
            }
        }
        Ok(())
    }

    fn ask_to_drain(&mut self, timeout: Duration) {
        let deadline = self.now + timeout;
        self.inbox.drain(deadline);
        self.drain = Some(self.drain.map_or(deadline, |before| before.min(deadline)));
    }

    /// Forms, computes and completes a step. The next step forms when the experts phase of this one ends, if a slot is free.
    fn round(&mut self) -> Result<(), String> {
        for (client, kind, tokens, size) in self.shares.backlogs() {
            let of = |caller: &Caller| caller.client == client && caller.kind == self.schedule.kinds[kind];
            let open = self.open.iter().map(|index| &self.callers[*index]);
            let mut waiting: usize = open.filter(|c| of(c)).map(Caller::waiting_tokens).sum();
            while waiting < tokens {
                self.submit(client, kind, size, None, false, false)?;
                waiting += size;
            }
        }
        self.until_asleep()?;
        self.ranks_end_experts();
        self.until_asleep()?;
        self.ranks_complete();
        self.now = self.now + Duration::from_micros(100);
        self.until_asleep()?;
        self.shares.check(&self.schedule, self.end.is_none() && self.told.serving.is_some())
    }

    /// Runs ranks without faults until every request is answered, then drains the service until it ends.
    fn settle(&mut self) -> Result<(), String> {
        self.is_over = true;
        for _ in 0..20_000 {
            self.until_asleep()?;
            if self.end.is_some() {
                return self.check_end();
            }
            if self.open.is_empty() && self.drain.is_none() {
                self.ask_to_drain(Duration::from_secs(1));
                continue;
            }
            let before = self.events.len();
            self.ranks_ready();
            self.ranks_end_experts();
            self.ranks_complete();
            if self.events.len() == before
                && let Turn::Sleep { until } = self.turn
            {
                self.now = until.max(Time(self.now.0 + 1));
            }
        }
        Err(format!("{} requests have no answer although ranks work", self.open.len()))
    }

    pub(super) fn kind_waiting(&self, kind: StepKind) -> impl Iterator<Item = &Caller> {
        let open = self.open.iter().map(|index| &self.callers[*index]);
        open.filter(move |caller| caller.kind == kind && caller.is_received && caller.waits())
    }
}
