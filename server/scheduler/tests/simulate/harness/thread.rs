//! The step loop's thread: its turns, the events that it tells the step loop, and the actions that it carries out.

use std::collections::VecDeque;

use expertd_scheduler::{Action, Delivery, RequestKey, Time};
use expertd_types::{StepId, WeightVersion};

use super::check_steps::is_trial;
use super::ranks::{Event, RankStep, Ranks};
use super::world::World;

/// The thread's next action. A real thread does the same in the same order; in the simulation anything can happen in between.
#[derive(Debug)]
pub(super) enum Turn {
    Exchange,
    Receive(Delivery<usize>),
    TakeEvent,
    Poll,
    Sleep { until: Time },
}

impl World {
    /// Runs turns of the thread until it sleeps and has no reason to wake up.
    pub(super) fn until_asleep(&mut self) -> Result<(), String> {
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
                return Err("the thread takes turns without doing anything".into());
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

    /// Runs one turn of the step loop's thread. Returns whether it did anything.
    pub(super) fn thread_turn(&mut self) -> Result<bool, String> {
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
                let action = self.step_loop.poll(self.now, &has_left);
                for index in &self.open {
                    let caller = &mut self.callers[*index];
                    caller.was_withdrawn |= self.step_loop.is_withdrawn(caller.key);
                }
                let Some(action) = action else {
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
                    // That processes could not be started is an event at once.
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
                // The inbox changes before others see the state, so that they find it as the state says.
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
        let step =
            step.ok_or_else(|| format!("step {id} is launched but is not the newest step in flight"))?;
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
}
