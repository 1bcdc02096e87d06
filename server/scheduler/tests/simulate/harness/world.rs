//! The world around the step loop: its thread, its ranks, its callers, and time.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::time::Duration;

use expertd_scheduler::{
    Action, ClientKey, Delivery, End, Inbox, Refusal, RequestKey, ServiceState, Step, StepKind, StepLoop,
    Submission, Time,
};
use expertd_types::{Generation, LayerId, StepId, WeightVersion};

use super::Seen;
use super::callers::Caller;
use super::check_steps::is_trial;
use super::ranks::{Event, RankStep, Ranks};
use super::schedule::{Input, Schedule};
use super::shares::Shares;

/// What the thread does next. A real thread does the same in the same order; here anything can happen in between.
#[derive(Debug)]
enum Turn {
    Exchange,
    Receive(Delivery<usize>),
    TakeEvent,
    Poll,
    Sleep { until: Time },
}

/// What the step loop was told of the present generation, and what it came to.
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
    /// The steps in flight, with whether the end of their experts phases was told.
    pub(super) in_flight: VecDeque<(Step, bool)>,
    /// When the last generation ended, and the pause that is due.
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
    /// Callers without an answer.
    pub(super) open: Vec<usize>,
    turn: Turn,
    pub(super) events: VecDeque<Event>,
    pub(super) ranks: Option<Ranks>,
    next_form_fails: bool,
    weights: u64,
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
    /// Whether a generation became ready while decided actions were not carried out yet.
    pub(super) is_just_ready: bool,
    shares: Shares,
    /// Poisoned requests of each layer since its last complete step.
    pub(super) verdicts: BTreeMap<LayerId, u32>,
    /// Trials that ended their generations.
    pub(super) trials_lost: u32,
    /// Whether clients send no further requests.
    is_over: bool,
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

    /// Runs a schedule, and then lets everything end in peace.
    pub fn run(&mut self, inputs: &[Input]) -> Result<(), String> {
        for input in inputs {
            self.note(|| format!("{input:?}"));
            self.apply(*input)?;
        }
        self.note(|| "the schedule is over: the ranks work, and then a drain".to_owned());
        self.settle()
    }

    fn note(&mut self, line: impl FnOnce() -> String) {
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

    fn submit(
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

    /// A step forms, computes and completes; the next one forms when its experts phase ends, if slots allow.
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

    /// Lets the thread turn until it sleeps and has no reason to wake up.
    fn until_asleep(&mut self) -> Result<(), String> {
        let mut idle_turns = 0;
        for _ in 0..20_000 {
            if self.end.is_some() {
                return Ok(());
            }
            if matches!(self.turn, Turn::Sleep { .. }) && !self.is_woken() {
                return Ok(());
            }
            idle_turns = if self.thread_turn()? { 0 } else { idle_turns + 1 };
            if idle_turns > 40 {
                return Err("the thread turns and does nothing".into());
            }
        }
        Err("the thread never sleeps".into())
    }

    fn is_woken(&self) -> bool {
        let Turn::Sleep { until } = self.turn else { return true };
        self.now >= until
            || self.inbox.has_mail()
            || !self.events.is_empty()
            || self.step_loop.has_news_for_inbox(self.now)
    }

    /// One turn of the step loop's thread; whether it did anything.
    fn thread_turn(&mut self) -> Result<bool, String> {
        if self.end.is_some() {
            return Ok(false);
        }
        match std::mem::replace(&mut self.turn, Turn::Exchange) {
            Turn::Exchange => {
                self.turn = Turn::TakeEvent;
                if !self.inbox.has_mail() && !self.step_loop.has_news_for_inbox(self.now) {
                    return Ok(false);
                }
                self.turn = Turn::Receive(self.exchange());
                Ok(true)
            }
            Turn::Receive(delivery) => {
                self.turn = Turn::TakeEvent;
                self.receive(delivery)?;
                Ok(true)
            }
            Turn::TakeEvent => {
                let Some(event) = self.events.pop_front() else {
                    self.turn = Turn::Poll;
                    return Ok(false);
                };
                self.turn = if self.events.is_empty() { Turn::Poll } else { Turn::TakeEvent };
                self.note(|| format!("    event {event:?}"));
                self.tell(&event)?;
                Ok(true)
            }
            Turn::Poll => {
                let callers = &self.callers;
                let has_left = |key: RequestKey| callers[key.0 as usize - 1].left.is_some();
                let Some(action) = self.step_loop.poll(self.now, &has_left) else {
                    self.check_rest()?;
                    self.dropped_tokens = 0;
                    self.is_just_ready = false;
                    let until = self.step_loop.wake_at(self.now);
                    self.check_sleep(until)?;
                    self.turn = Turn::Sleep { until };
                    return Ok(false);
                };
                self.turn = Turn::Poll;
                self.note(|| format!("    action {action:?}"));
                self.carry_out(action)?;
                Ok(true)
            }
            Turn::Sleep { until } => {
                self.turn = Turn::Sleep { until };
                if self.is_woken() {
                    self.turn = Turn::Exchange;
                }
                Ok(false)
            }
        }
    }

    fn exchange(&mut self) -> Delivery<usize> {
        let delivery = self.step_loop.exchange(&mut self.inbox, self.now);
        self.check_exchange();
        delivery
    }

    fn receive(&mut self, delivery: Delivery<usize>) -> Result<(), String> {
        let (now, callers) = (self.now, &mut self.callers);
        self.step_loop.receive(delivery, now, |_, index| {
            callers[index].is_received = true;
            callers[index].waits_since = now;
        });
        self.check_counts()
    }

    fn tell(&mut self, event: &Event) -> Result<(), String> {
        match event {
            Event::Ready(generation, version) => {
                if self.step_loop.generation() == Some(*generation) {
                    self.told.serving = Some((*generation, *version));
                    self.told.version = Some(*version);
                    self.told.is_replacement = false;
                    self.told.ready_at = Some(self.now);
                    self.told.has_served = true;
                    self.told.unready = 0;
                    self.is_just_ready = true;
                }
                self.step_loop.group_ready(*generation, *version, self.now);
                self.bound_waits();
            }
            Event::ExpertsEnded(generation, step) => {
                if self.told.serving.is_some_and(|(serving, _)| serving == *generation) {
                    for (earlier, ended) in &mut self.told.in_flight {
                        *ended |= earlier.id <= *step;
                    }
                }
                self.step_loop.experts_ended(*generation, *step);
            }
            Event::Done(generation, step) => {
                self.note_done(*generation, *step);
                self.step_loop.step_done(*generation, *step, self.now);
            }
            Event::Ended(generation, fault) => {
                self.note_ended(*generation);
                self.step_loop.group_ended(*generation, fault, self.now);
            }
        }
        self.check_counts()
    }

    fn carry_out(&mut self, action: Action) -> Result<(), String> {
        self.check_action(&action)?;
        match action {
            Action::FormGroup { generation } => {
                self.ranks = Some(Ranks {
                    generation,
                    is_ready: false,
                    is_dead: false,
                    version: WeightVersion(self.weights),
                    steps: VecDeque::new(),
                });
                if std::mem::take(&mut self.next_form_fails) {
                    self.ranks_fail("no process", false);
                    // The thread knows at once that it could not start processes.
                    if let Some(event) = self.events.pop_back() {
                        self.tell(&event)?;
                    }
                }
            }
            Action::EndGroup { generation } => {
                self.note_replaced(generation)?;
                if let Some(ranks) = self.ranks.take_if(|ranks| ranks.generation == generation) {
                    let last = ranks.steps.back().map(|step| step.step.id);
                    self.last_step = Some((generation, last.unwrap_or(StepId(1))));
                    self.events.clear();
                }
            }
            Action::Launch { step } => self.launch(step)?,
            Action::Answer { key, .. } => {
                self.close(key);
                let caller = &self.callers[key.0 as usize - 1];
                if caller.is_closed_loop && !self.is_over {
                    let (client, tokens, kind) = (caller.client, caller.tokens, caller.kind);
                    let kind = self.schedule.kinds.iter().position(|k| *k == kind).unwrap_or(0);
                    self.submit(client, kind, tokens, None, false, true)?;
                }
            }
            Action::Fail { key, .. } => {
                self.dropped_tokens += self.callers[key.0 as usize - 1].waiting_tokens();
                self.close(key);
            }
            Action::Restart { key } => {
                let caller = &mut self.callers[key.0 as usize - 1];
                (caller.begun, caller.completed, caller.version) = (0, 0, None);
                caller.steps.clear();
            }
            Action::Show { state, .. } => {
                self.shown = state;
                // Before others see the state: they find the inbox as it says.
                let delivery = self.exchange();
                self.receive(delivery)?;
                self.check_shown()?;
            }
            Action::ReportDrain { .. } => self.drain_reported = true,
            Action::End(end) => self.end = Some(end),
        }
        Ok(())
    }

    fn launch(&mut self, id: StepId) -> Result<(), String> {
        let step = self.step_loop.in_flight().back().filter(|step| step.id == id).cloned();
        let step = step.ok_or_else(|| format!("step {id} is launched and is not the newest in flight"))?;
        self.check_step(&step)?;
        self.dropped_tokens = 0;
        let mut is_poison = self.schedule.broken == Some(step.kind.layer);
        for range in step.rows.iter().filter(|range| range.key != RequestKey::TRIAL) {
            let caller = &mut self.callers[range.key.0 as usize - 1];
            caller.begun = range.rows.end;
            is_poison |= caller.is_poison;
            self.shares.count(caller.client, range.rows.len());
        }
        if !step.is_alone {
            for index in &self.open {
                let caller = &mut self.callers[*index];
                caller.steps_waited += usize::from(caller.waits());
            }
        }
        self.seen.steps += 1;
        self.seen.trials += u64::from(is_trial(&step));
        self.told.in_flight.push_back((step.clone(), false));
        if let Some(ranks) = &mut self.ranks {
            ranks.steps.push_back(RankStep { step, is_poison, experts_ended: false, is_done: false });
        }
        self.check_waits()
    }

    fn close(&mut self, key: RequestKey) {
        let index = key.0 as usize - 1;
        self.callers[index].is_answered = true;
        self.open.retain(|open| *open != index);
    }

    /// From now on ranks work and nothing is left to chance; every request is answered, and a drain ends the service.
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
        Err(format!("{} requests are not answered though ranks work", self.open.len()))
    }

    pub(super) fn kind_waiting(&self, kind: StepKind) -> impl Iterator<Item = &Caller> {
        let open = self.open.iter().map(|index| &self.callers[*index]);
        open.filter(move |caller| caller.kind == kind && caller.is_received && caller.waits())
    }
}
