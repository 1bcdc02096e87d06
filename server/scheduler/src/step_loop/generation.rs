//! Generations, their faults, the drain and the end.

use std::sync::Arc;
use std::time::Duration;

use expertd_types::{Generation, WeightVersion};

use super::{Action, End, GroupLife, Leaving, OnFault, Request, ServiceState, StepLoop};
use crate::recovery::{GiveUp, Life, jittered};
use crate::{Fault, FaultKind, RequestKey, StepKind, Time, Unanswered};

/// A request that lost this many steps runs alone.
const SUSPECT_AFTER: u32 = 2;
/// Steps of a row of zeros that may end their generations before their layer is to blame.
const MAX_TRIALS: u32 = 2;
/// Retry time of callers when the service ends.
const RETRY_AFTER_END: Duration = Duration::from_secs(1);

impl StepLoop {
    /// Forms the next generation if it is time. Returns whether it did.
    pub(super) fn form_group(&mut self, now: Time) -> bool {
        if now < self.recovery.next_attempt() {
            return false;
        }
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        self.group =
            Some(GroupLife { generation, started: now, ready: None, steps_completed: 0, steps_launched: 0 });
        self.actions.push_back(Action::FormGroup { generation });
        true
    }

    /// Event: the ranks of a generation start, whose weights are in memory.
    pub fn ranks_start(&mut self, now: Time) {
        self.group.iter_mut().for_each(|group| group.started = now);
    }

    /// The next generation is to serve other weights, which are loaded: the present one ends once its steps are complete,
    /// and requests wait for the next. A generation that is being formed is replaced at once.
    pub fn replace_group(&mut self) {
        // The next generation takes the newest weights in any case.
        if self.group.is_some() && self.ending.is_none() && self.leaving.is_none() {
            self.is_replaced = true;
        }
    }

    /// Ends a generation that is to be replaced and has no step in flight. Returns whether it did.
    pub(super) fn end_replaced_group(&mut self) -> bool {
        if !self.is_replaced || self.group.is_none() || self.is_leaving() || !self.in_flight.is_empty() {
            return false;
        }
        (self.is_replaced, self.is_replacement) = (false, true);
        self.reason = "other weights are about to serve".into();
        self.end_group(Leaving::Replaced);
        if self.drain.is_none() {
            let state = if self.has_served { ServiceState::Reforming } else { ServiceState::Loading };
            self.show(state, Arc::clone(&self.reason));
        }
        true
    }

    /// Event: all ranks of a generation are ready, with weights of `version`.
    pub fn group_ready(&mut self, generation: Generation, version: WeightVersion, now: Time) {
        let is_forming = |group: &&mut GroupLife| group.generation == generation && group.ready.is_none();
        let Some(group) = self.group.as_mut().filter(is_forming).filter(|_| self.leaving.is_none()) else {
            return;
        };
        group.ready = Some(now);
        self.recovery.ready(group.started, now);
        self.has_served = true;
        self.reason = "".into();
        self.is_replacement = false;
        if self.weight_version.replace(version).is_some_and(|before| before != version) {
            self.restart_partly_answered();
        }
        self.fail_others_weights();
        if self.drain.is_none() {
            self.show(ServiceState::Serving, "".into());
        }
    }

    /// The failure of a request that expects another version than the loaded one.
    pub(super) fn other_weights(&self, request: &Request) -> Option<Unanswered> {
        let loaded = self.weight_version?;
        let expected = request.expected_version.filter(|expected| *expected != loaded)?;
        Some(Unanswered::OtherWeights { expected, loaded })
    }

    /// Fails the requests that expect another version than the loaded one.
    fn fail_others_weights(&mut self) {
        let failure = |(key, request): (&RequestKey, &Request)| Some((*key, self.other_weights(request)?));
        let mut failures: Vec<(RequestKey, Unanswered)> = self.requests.iter().filter_map(failure).collect();
        failures.sort_unstable_by_key(|(key, _)| *key);
        for (key, failure) in failures {
            self.fail(key, failure);
        }
    }

    /// Restarts requests that have rows computed with other weights.
    fn restart_partly_answered(&mut self) {
        let partly = self.requests.iter().filter(|(_, request)| request.completed > 0);
        let mut keys: Vec<RequestKey> = partly.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        for key in keys.into_iter().rev() {
            let Some(request) = self.requests.get_mut(&key) else { continue };
            let (kind, client, completed) = (request.kind, request.client, request.completed);
            (request.completed, request.begun) = (0, 0);
            request.steps.clear();
            request.tokens_per_rank.clear();
            if self.suspects.contains(&key) {
                self.suspect_tokens += completed;
            } else {
                self.queue.put_back(kind, client, key, completed);
            }
            self.actions.push_back(Action::Restart { key });
        }
    }

    /// Has the ranks of the generation killed and reaped, which [`group_gone`](Self::group_gone) ends.
    fn end_group(&mut self, why: Leaving) {
        if let Some(generation) = self.generation() {
            self.leaving = Some(why);
            self.actions.push_back(Action::EndGroup { generation });
        }
    }

    /// Event: a generation has a fault, or could not start. The event is ignored if the generation is already being ended.
    pub fn group_ended(&mut self, generation: Generation, fault: &Fault) {
        if self.ending.is_some() || self.has_ended || self.leaving.is_some() {
            return;
        }
        if self.generation() != Some(generation) {
            return;
        }
        // The next generation takes the newest weights in any case.
        (self.is_replaced, self.is_replacement) = (false, false);
        self.reason = self.what_follows().into();
        self.end_group(Leaving::Fault(fault.clone()));
        self.show_fault(fault);
    }

    /// Callers are told only that there was a fault. Details such as processes and paths are for operators.
    fn show_fault(&mut self, fault: &Fault) {
        if self.drain.is_none() {
            let state = if self.has_served { ServiceState::Reforming } else { ServiceState::Loading };
            self.show(state, format!("{}: {}", self.reason, fault.message).into());
        }
    }

    /// Event: the ranks of the generation are gone, and the steps whose calls they have told of their end are complete.
    pub fn group_gone(&mut self, now: Time) {
        let Some(group) = self.group.take_if(|_| self.leaving.is_some()) else { return };
        match self.leaving.take() {
            Some(Leaving::Fault(fault)) => self.after_fault(group, &fault, now),
            Some(Leaving::Replaced) => self.recovery.replaced(now),
            // The service ends, and their requests fail.
            Some(Leaving::Drained) | None => self.in_flight.clear(),
        }
    }

    fn after_fault(&mut self, group: GroupLife, fault: &Fault, now: Time) {
        let poison = self.take_back_steps();
        let life = Life { ready: group.ready, completed_a_step: group.steps_completed > 0 };
        let given_up = self.recovery.ended(now, life).err();
        self.reason = self.describe(now).into();
        if let Some(end) = given_up.map(|why| why.end(fault)).or(poison) {
            self.give_up(end);
            return;
        }
        self.show_fault(fault);
        match self.config.on_fault {
            OnFault::Fail => self.fail_where(now, |_| true),
            OnFault::Retry => {
                let ready_at = self.expected_ready(now);
                self.fail_where(now, |deadline| deadline.is_some_and(|deadline| deadline < ready_at));
            }
        }
    }

    const fn what_follows(&self) -> &'static str {
        if self.has_served { "the EP group is re-forming" } else { "the weights are being loaded again" }
    }

    fn describe(&self, now: Time) -> String {
        let what = self.what_follows();
        let pause = self.recovery.next_attempt().since(now);
        let pause = if pause.is_zero() { String::new() } else { format!(" in {} ms", pause.as_millis()) };
        format!("{what}{pause}, {} tries left", self.recovery.tries_left())
    }

    /// Takes back the rows of the steps in flight. A request that lost a second step becomes a suspect; a request that lost a step
    /// in which it was alone fails. Returns the end of the service if that has happened too often in one layer.
    fn take_back_steps(&mut self) -> Option<End> {
        let steps: Vec<_> = self.in_flight.drain(..).collect();
        self.in_step = 0;
        for client in steps.iter().flat_map(|step| &step.clients) {
            self.queue.release(*client);
        }
        let is_alone = steps.first().is_some_and(|step| step.is_alone);
        let mut lost: Vec<RequestKey> =
            steps.iter().flat_map(|step| step.rows.iter().map(|range| range.key)).collect();
        lost.sort_unstable();
        lost.dedup();
        let mut end = None;
        if lost.first() == Some(&RequestKey::TRIAL)
            && let Some((StepKind { layer, .. }, losses)) = &mut self.trial
        {
            *losses += 1;
            let (layer, losses) = (*layer, *losses);
            let verdicts = self.poisoned.get(&layer).copied().unwrap_or(0);
            // The trial goes on below its limit: a fault that the row did not cause may have ended the generation.
            if losses >= MAX_TRIALS {
                end = Some(End::SetupFailed(format!(
                    "{losses} steps of one row of zeros for layer {layer} ended their generations, like {verdicts} requests \
                     for that layer before them"
                )));
            }
        }
        for key in lost.into_iter().rev() {
            let Some(request) = self.requests.get_mut(&key) else { continue };
            if let Some(failure) = request.withdrawn.take() {
                self.requests.remove(&key);
                self.actions.push_back(Action::Fail { key, failure });
                continue;
            }
            let (kind, client, rows) = (request.kind, request.client, request.begun - request.completed);
            request.begun = request.completed;
            request.lost_steps += 1;
            let lost_steps = request.lost_steps;
            if is_alone {
                self.suspects.remove(&key);
                // Rows that were not in the lost step are still counted as waiting.
                if let Some(request) = self.requests.remove(&key) {
                    self.suspect_tokens -= request.tokens - request.begun - rows;
                }
                self.actions.push_back(Action::Fail { key, failure: Unanswered::Poisoned { lost_steps } });
                self.recovery.explained();
                let verdicts = self.poisoned.entry(kind.layer).or_insert(0);
                *verdicts += 1;
                // The requests may be to blame, or the layer: a row of zeros tells.
                if *verdicts >= self.recovery.policy().max_poisoned_per_layer {
                    self.trial = Some((kind, 0));
                }
            } else if lost_steps >= SUSPECT_AFTER {
                let waiting = self.queue.remove(kind, client, key).unwrap_or(0);
                self.suspects.insert(key);
                self.suspect_tokens += rows + waiting;
            } else {
                self.queue.put_back(kind, client, key, rows);
            }
        }
        end
    }

    /// Fails the requests for whose deadline `chosen` is true, as unavailable.
    fn fail_where(&mut self, now: Time, chosen: impl Fn(Option<Time>) -> bool) {
        let matching = self.requests.iter().filter(|(_, request)| chosen(request.deadline));
        let mut keys: Vec<RequestKey> = matching.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        for key in keys {
            let failure = self.unavailable(now);
            self.fail(key, failure);
        }
    }

    /// Fails a request that no step in flight names.
    fn fail(&mut self, key: RequestKey, failure: Unanswered) {
        debug_assert!(self.in_flight.is_empty(), "a step in flight may name request {key}");
        self.leave_queue(key);
        self.end_request(key, failure);
    }

    fn fail_all(&mut self, reason: &Arc<str>) -> u64 {
        let mut keys: Vec<RequestKey> = self.requests.keys().copied().collect();
        keys.sort_unstable();
        for key in &keys {
            let retry_after = jittered(RETRY_AFTER_END, &mut self.jitter);
            self.fail(*key, Unanswered::Unavailable { reason: Arc::clone(reason), retry_after });
        }
        keys.len() as u64
    }

    fn give_up(&mut self, end: End) {
        let (End::LoadFailed(message) | End::SetupFailed(message)) = &end else { return };
        self.show(ServiceState::Failed, message.as_str().into());
        self.reason = "the service has failed and needs a restart".into();
        self.ending = Some(end);
        self.fail_all(&Arc::clone(&self.reason));
    }

    /// Ends the service if it drains, and either no request is left or the deadline has passed. Returns whether it did.
    pub(super) fn check_drain(&mut self, now: Time) -> bool {
        let Some(deadline) = self.drain else { return false };
        if !self.requests.is_empty() && now < deadline {
            return false;
        }
        if !self.in_flight.is_empty() {
            // The failed requests' memory is free for other uses, so that no rank may write it any more.
            if self.leaving.is_none() {
                self.end_group(Leaving::Drained);
            }
            return false;
        }
        let reason = "the service is draining, and its drain timeout passed before the answer was complete";
        let dropped = self.fail_all(&reason.into());
        self.reason = "the service has drained".into();
        self.actions.push_back(Action::ReportDrain { requests_dropped: dropped });
        // The inbox has been closed since the drain was requested.
        self.ending = Some(End::Drained);
        self.is_closed = true;
        true
    }

    pub(super) fn end(&mut self) -> bool {
        let Some(end) = self.ending.take() else { return false };
        if self.drain.is_some() && end != End::Drained {
            self.actions.push_back(Action::ReportDrain { requests_dropped: 0 });
        }
        self.actions.push_back(Action::End(end));
        self.has_ended = true;
        true
    }
}

impl GiveUp {
    fn end(self, fault: &Fault) -> End {
        let message = match self {
            GiveUp::Unready(ends) => {
                format!(
                    "{ends} generations in a row ended before they were ready; the last one: {}",
                    fault.message
                )
            }
            GiveUp::Fruitless(ends) => {
                format!(
                    "{ends} generations in a row ended before they completed a step; the last one: {}",
                    fault.message
                )
            }
        };
        if fault.kind == FaultKind::Load { End::LoadFailed(message) } else { End::SetupFailed(message) }
    }
}
