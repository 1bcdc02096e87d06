//! Invariants of steps, and of moments at which the step loop has nothing to do.

use std::collections::BTreeMap;
use std::time::Duration;

use expertd_scheduler::{
    AGED_STEP_INTERVAL, MAX_SKIPPED, RequestKey, SWEEP_INTERVAL, ServiceState, Step, StepKind, StepLoop,
    Time, spread,
};
use expertd_types::{Generation, StepId};

use super::callers::Caller;
use super::check::ensure;
use super::world::World;

/// Whether a step is a trial of a row of zeros.
pub(super) fn is_trial(step: &Step) -> bool {
    step.rows.iter().any(|range| range.key == RequestKey::TRIAL)
}

/// Whether rows of a request wait for a step.
fn waits(steps: &StepLoop, caller: &Caller) -> bool {
    caller.waits() && !steps.is_withdrawn(caller.key)
}

impl World {
    /// Checks that a step exceeds no limit, and that each row is in one place.
    pub(super) fn check_step(&mut self, step: &Step) -> Result<(), String> {
        let config = &self.schedule.config;
        let in_flight = &self.told.in_flight;
        let id = step.id;
        ensure!(self.told.serving.is_some(), "step {id} is launched, but no generation serves");
        ensure!(in_flight.len() < config.slots, "step {id} is launched, but all slots are taken");
        ensure!(step.slot.index() < config.slots, "step {id} has slot {}", step.slot);
        ensure!(
            in_flight.iter().all(|(other, _)| other.slot != step.slot && other.id < id),
            "step {id} shares slot {} with a step in flight",
            step.slot
        );
        ensure!(!self.told.is_replaced, "step {id} is launched by a generation that is to be replaced");
        if is_trial(step) {
            let verdicts = self.verdicts.get(&step.kind.layer).copied().unwrap_or(0);
            ensure!(
                step.is_alone && step.rows.len() == 1 && step.tokens == 1 && in_flight.is_empty(),
                "the trial {id} is not one row alone"
            );
            ensure!(
                verdicts >= config.recovery.max_poisoned_per_layer,
                "layer {} is tried after {verdicts} poisoned requests",
                step.kind.layer
            );
            return Ok(());
        }
        let tokens: usize = step.rows.iter().map(|range| range.rows.len()).sum();
        ensure!(
            tokens == step.tokens && tokens > 0,
            "step {id} has {tokens} rows, but its count is {}",
            step.tokens
        );
        ensure!(tokens <= config.max_tokens_per_step, "step {id} has {tokens} rows");
        for (rank, share) in spread(tokens, config.ranks).enumerate() {
            let here = step.rows.iter().filter(|range| range.rank.index() == rank);
            let rows: usize = here.clone().map(|range| range.rows.len()).sum();
            ensure!(rows == share, "step {id} gives rank {rank} {rows} rows instead of {share}");
            let segments = here.count();
            ensure!(
                segments <= config.max_segments_per_rank,
                "step {id} gives rank {rank} {segments} ranges"
            );
        }
        let mut taken: BTreeMap<RequestKey, usize> = BTreeMap::new();
        for range in &step.rows {
            let caller = self.caller(range.key)?;
            ensure!(!caller.is_answered, "step {id} computes request {}, which is answered", range.key);
            ensure!(caller.kind == step.kind, "step {id} mixes kinds");
            ensure!(caller.left.is_none(), "step {id} computes request {}, whose caller left", range.key);
            ensure!(
                caller.deadline.is_none_or(|deadline| deadline > self.asked.get()),
                "step {id} computes request {}, which is late",
                range.key
            );
            let next = taken.entry(range.key).or_insert(caller.begun);
            ensure!(
                range.rows.start == *next && range.rows.end <= caller.tokens,
                "step {id} takes rows {:?} of request {}, of which the first {next} are already taken",
                range.rows,
                range.key
            );
            *next = range.rows.end;
        }
        for (key, end) in &taken {
            let caller = self.caller(*key)?;
            ensure!(
                caller.tokens > config.max_tokens_per_step || *end == caller.tokens,
                "step {id} splits request {key} of {} rows",
                caller.tokens
            );
            ensure!(
                caller.lost < 2 || step.is_alone,
                "step {id} computes suspect {key} together with other requests"
            );
        }
        ensure!(!step.is_alone || taken.len() == 1 && in_flight.is_empty(), "step {id} is not alone");
        ensure!(
            in_flight.iter().all(|(other, _)| !other.is_alone),
            "step {id} is launched while a step that must be alone is in flight"
        );
        let waiting: usize = self.kind_waiting(step.kind).map(Caller::waiting_tokens).sum();
        let is_full = waiting + self.dropped_tokens >= config.max_tokens_per_step;
        if let Some((_, false)) = in_flight.back() {
            ensure!(is_full, "step {id} forms with {waiting} rows while an experts phase runs");
        }
        let is_ripe = |caller: &Caller| caller.lost > 0 || self.asked.get() >= self.ripe_at(caller, false);
        ensure!(
            step.is_alone
                || is_full
                || self.dropped_tokens > 0
                || self.drain.is_some()
                || config.max_wait.is_none()
                || self.kind_waiting(step.kind).any(is_ripe),
            "step {id} of {waiting} rows forms before others have had time to join it"
        );
        self.examined = (!step.is_alone).then_some((id, taken.len()));
        Ok(())
    }

    /// Checks that not every entry of the queue was examined to form the last step of this round.
    fn check_examined(&mut self, steps: &StepLoop) -> Result<(), String> {
        let Some((id, requests)) = self.examined.take() else { return Ok(()) };
        let examined = steps.entries_examined();
        let dropped = self.callers.iter().filter(|caller| caller.left.is_some() || caller.deadline.is_some());
        ensure!(
            examined <= requests + MAX_SKIPPED + dropped.count(),
            "to form step {id} of {requests} requests, {examined} queue entries were examined"
        );
        Ok(())
    }

    /// Checks that waiting requests are served within the number of steps that their place in the queue implies.
    pub(super) fn check_waits(&self) -> Result<(), String> {
        if self.schedule.config.max_wait.is_some_and(|wait| !wait.is_zero()) {
            return Ok(());
        }
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            ensure!(
                !caller.is_received
                    || caller.left.is_some()
                    || caller.steps_waited <= caller.max_steps_waited,
                "request {} has waited for {} steps; the bound is {}",
                caller.key,
                caller.steps_waited,
                caller.max_steps_waited
            );
        }
        Ok(())
    }

    /// Computes how many steps a request may wait. Aged steps serve the oldest request, so they serve all earlier requests and then
    /// this one, range by range.
    pub(super) fn bound_wait(&mut self, index: usize) {
        let limit = self.schedule.config.max_tokens_per_step;
        let steps = |caller: &Caller| 1 + caller.tokens / limit;
        let before = self.open.iter().filter(|other| **other <= index);
        let ahead: usize = before.map(|other| steps(&self.callers[*other])).sum();
        let caller = &mut self.callers[index];
        caller.steps_waited = 0;
        caller.max_steps_waited = AGED_STEP_INTERVAL as usize * (ahead + 1);
    }

    pub(super) fn bound_waits(&mut self) {
        for index in self.open.clone() {
            self.bound_wait(index);
        }
    }

    /// Checks the state after a round, when the step loop has nothing to do.
    pub(super) fn check_round(&mut self, steps: &StepLoop) -> Result<(), String> {
        for index in &self.open {
            let caller = &mut self.callers[*index];
            caller.was_withdrawn |= steps.is_withdrawn(caller.key);
        }
        self.check_counts(steps)?;
        self.check_examined(steps)?;
        self.check_waiting_generation()?;
        self.check_ready_generation()?;
        self.check_rest(steps)?;
        self.check_work_is_done(steps)?;
        (self.dropped_tokens, self.is_just_ready, self.heard_fault) = (0, false, false);
        Ok(())
    }

    fn check_rest(&self, steps: &StepLoop) -> Result<(), String> {
        let now = self.asked.get();
        if let Some(deadline) = self.drain
            && now >= deadline
        {
            // The thread learns of a drain, and closes admission, at the next exchange.
            let is_told = !self.inbox.has_mail() && !steps.has_news_for_inbox(now);
            // Ranks that write in memory of callers are ended first.
            let waits = self.is_ending() && !self.told.in_flight.is_empty();
            ensure!(!is_told || waits || self.end.is_some(), "a drain goes on after its deadline");
        }
        let state = if steps.has_news_for_inbox(now) || self.inbox.has_mail() {
            self.shown
        } else if self.shown == ServiceState::Failed {
            return Ok(());
        } else if self.drain.is_some() {
            ServiceState::Draining
        } else if self.told.serving.is_some() {
            ServiceState::Serving
        } else if self.told.has_served {
            ServiceState::Reforming
        } else {
            ServiceState::Loading
        };
        ensure!(self.shown == state, "the service shows {:?}, but its state is {state:?}", self.shown);
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            let is_held = caller.is_in_step() && (caller.memory.is_some() || !self.is_ending());
            if !caller.is_received || is_held {
                continue;
            }
            let too_long = |since| now.since(caller.waits_since.max(since)) > SWEEP_INTERVAL;
            ensure!(
                !caller.deadline.is_some_and(too_long) && !caller.left.is_some_and(too_long),
                "request {} has been unwanted for a long time, but is not dropped",
                caller.key
            );
        }
        Ok(())
    }

    /// Time from which on a request need not wait for others.
    fn ripe_at(&self, caller: &Caller, gathers: bool) -> Time {
        match self.schedule.config.max_wait {
            Some(wait) => caller.admitted + wait,
            None if gathers => caller.admitted.max(self.told.gathers_until),
            None => caller.admitted,
        }
    }

    /// Whether requests of some client wait that may be held back until clients of the last step have sent their next ones.
    fn gathers(&self) -> bool {
        let mut waiting =
            self.open.iter().map(|index| &self.callers[*index]).filter(|c| c.is_received && c.waits());
        !self.told.absent.is_empty() && waiting.any(|caller| !self.told.absent.contains(&caller.client))
    }

    /// Notes that the step loop is told of the end of the last step's experts phase.
    pub(super) fn note_experts(&mut self, formed: Time) {
        let wait = self.now.since(formed) / 8;
        let wait = if wait < Duration::from_micros(20) { Duration::ZERO } else { wait };
        self.told.gathers_until = self.now + wait.min(Duration::from_millis(5));
    }

    /// Checks that the thread does not sleep past a time at which something is due.
    pub(super) fn check_sleep(&self, steps: &StepLoop, until: Time) -> Result<(), String> {
        if self.inbox.has_mail() {
            return Ok(());
        }
        let (config, now) = (&self.schedule.config, self.asked.get());
        let mut due = now + SWEEP_INTERVAL;
        due = self.drain.filter(|_| !self.is_ending()).map_or(due, |deadline| due.min(deadline));
        if steps.generation().is_none() {
            due = due.min(self.told.ended_at + self.told.pause);
        }
        let can_form = self.told.in_flight.len() < config.slots
            && self.told.in_flight.back().is_none_or(|(last, ended)| *ended && !last.is_alone);
        if self.told.serving.is_some() && can_form && !self.told.is_replaced {
            let gathers = self.gathers();
            for caller in self.open.iter().map(|index| &self.callers[*index]) {
                if caller.is_received && waits(steps, caller) && caller.lost == 0 {
                    due = due.min(self.ripe_at(caller, gathers));
                }
            }
        }
        ensure!(until <= due.max(now), "the thread sleeps {:?} too long", until.since(due));
        Ok(())
    }

    /// Checks that no request waits while a step could be formed from it.
    fn check_work_is_done(&mut self, steps: &StepLoop) -> Result<(), String> {
        let (config, now) = (&self.schedule.config, self.asked.get());
        let in_flight = &self.told.in_flight;
        if self.told.serving.is_none() || self.end.is_some() || in_flight.len() >= config.slots {
            return Ok(());
        }
        if self.told.is_replaced {
            ensure!(!in_flight.is_empty(), "a generation is not replaced though no step is in flight");
            return Ok(());
        }
        let gathers = self.gathers();
        let mut kinds: BTreeMap<StepKind, (usize, bool)> = BTreeMap::new();
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            if !caller.is_received || !waits(steps, caller) {
                continue;
            }
            if caller.lost >= 2 {
                ensure!(!in_flight.is_empty(), "suspect {} waits although nothing is in flight", caller.key);
                return Ok(());
            }
            let (tokens, is_ripe) = kinds.entry(caller.kind).or_default();
            *tokens += caller.waiting_tokens();
            *is_ripe |= now >= self.ripe_at(caller, gathers);
        }
        let is_draining = self.drain.is_some() && !self.inbox.has_mail();
        let (may_form, may_form_full) = match in_flight.back() {
            None => (true, true),
            Some((last, experts_ended)) => (*experts_ended && !last.is_alone, !last.is_alone),
        };
        let only_one = kinds.len() == 1;
        let holds_back = gathers && now < self.told.gathers_until && config.max_wait.is_none();
        self.seen.steps_held_back += u64::from(may_form && holds_back && !kinds.is_empty());
        for (kind, (tokens, is_ripe)) in kinds {
            let is_full = tokens >= config.max_tokens_per_step;
            // Full steps do not overtake a step that is held back.
            let is_behind = holds_back && !only_one;
            ensure!(
                !may_form || !(is_full && !is_behind || is_ripe || is_draining),
                "{tokens} rows of {kind:?} wait although a step could form"
            );
            ensure!(
                !(may_form_full && only_one && is_full),
                "{tokens} rows of {kind:?} wait although they fill a step and a slot is free"
            );
        }
        Ok(())
    }

    /// Checks that a generation whose ranks are ended had a fault, is replaced without steps in flight, or is ended by a drain.
    pub(super) fn check_replaced(&mut self) -> Result<(), String> {
        let ends_drain = self.drain.is_some_and(|deadline| deadline <= self.now);
        if self.told.has_fault || ends_drain && !self.told.in_flight.is_empty() {
            return Ok(());
        }
        ensure!(self.told.is_replaced, "ranks are ended without cause");
        ensure!(self.told.in_flight.is_empty(), "a generation is replaced with steps in flight");
        self.told.is_replacement = true;
        Ok(())
    }

    /// Notes that the ranks of the present generation are being ended.
    pub(super) fn note_ending(&mut self, by_fault: bool) {
        if by_fault {
            (self.told.has_fault, self.told.is_replacement) = (true, false);
        }
        self.told.is_replaced = false;
        self.told.leaving = self.told.leaving.or(self.told.serving.take());
        for index in &self.open {
            self.callers[*index].waits_since = self.now;
        }
    }

    /// Notes that the ranks are gone, and that the step loop is about to be told so.
    pub(super) fn note_gone(&mut self) {
        if let Some(ranks) = self.ranks.take() {
            let last = ranks.steps.back().map(|step| step.step.id);
            self.last_step = Some((ranks.generation, last.unwrap_or(StepId(1))));
            if !std::mem::take(&mut self.left).is_empty() {
                self.endangered = ranks.has.into_iter().flatten().collect();
                self.endangered.dedup();
            }
        }
        let has_fault = std::mem::take(&mut self.told.has_fault);
        if has_fault {
            self.note_ended();
        } else if self.told.in_flight.is_empty() {
            self.seen.replacements += 1;
        }
        self.told.group = None;
        (self.told.leaving, self.told.ready_at, self.told.steps_done) = (None, None, 0);
        self.told.ended_at = self.now;
        if !has_fault {
            self.told.pause = Duration::ZERO;
        }
        self.bound_waits();
    }

    /// Notes that the step loop is told of a completed step.
    pub(super) fn note_done(&mut self, generation: Generation, step: StepId) {
        let served = self.told.serving.or(self.told.leaving);
        let Some((_, version)) = served.filter(|(serving, _)| *serving == generation) else {
            return;
        };
        let at = self.told.in_flight.iter().position(|(running, _)| running.id == step);
        let at = at.filter(|at| *at == 0 || self.told.leaving.is_some());
        let Some((done, has_ended)) = at.and_then(|at| self.told.in_flight.remove(at)) else { return };
        self.told.steps_done += 1;
        if !has_ended && self.told.in_flight.is_empty() {
            self.note_experts(done.formed);
        }
        self.told.fruitless = 0;
        self.verdicts.remove(&done.kind.layer);
        for range in done.rows.iter().filter(|range| range.key != RequestKey::TRIAL) {
            let caller = &mut self.callers[range.key.0 as usize - 1];
            if caller.is_answered {
                continue;
            }
            caller.completed = range.rows.end;
            caller.waits_since = self.now;
            caller.generation = Some(generation);
            if caller.version.is_none_or(|first| first == version) {
                caller.version = Some(version);
            } else {
                caller.is_mixed = true;
            }
            if caller.steps.last() != Some(&step) {
                caller.steps.push(step);
            }
        }
    }

    /// Notes that the step loop is told that the generation has ended by a fault.
    fn note_ended(&mut self) {
        self.seen.faults += 1;
        let told = &mut self.told;
        let lived = told.ready_at.map_or(Duration::ZERO, |ready| self.now.since(ready));
        told.unready += u32::from(told.ready_at.is_none());
        if lived >= Duration::from_secs(60) {
            (told.short_lived, told.fruitless) = (0, 0);
        } else {
            told.short_lived += 1;
            told.fruitless += u32::from(told.steps_done == 0);
        }
        told.pause = match told.short_lived {
            0 | 1 => Duration::ZERO,
            ends => (Duration::from_millis(100) * 2u32.pow((ends - 2).min(10))).min(Duration::from_secs(5)),
        };
        let lost: Vec<_> = told.in_flight.drain(..).collect();
        self.seen.steps_lost += lost.len() as u64;
        self.trials_lost += lost.iter().filter(|(step, _)| is_trial(step)).count() as u32;
        let mut keys: Vec<RequestKey> =
            lost.iter().flat_map(|(step, _)| step.rows.iter().map(|range| range.key)).collect();
        keys.retain(|key| *key != RequestKey::TRIAL);
        keys.sort_unstable();
        keys.dedup();
        for key in &keys {
            let caller = &mut self.callers[key.0 as usize - 1];
            if caller.is_answered {
                continue;
            }
            caller.begun = caller.completed;
            caller.waits_since = self.now;
            caller.lost += 1;
            caller.was_lost_alone = keys.len() == 1 && lost.len() == 1;
        }
    }
}
