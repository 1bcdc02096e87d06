//! What must be true after every event.

use std::collections::BTreeMap;
use std::time::Duration;

use expertd_scheduler::{
    AGED_STEP_INTERVAL, Action, End, Failure, MAX_SKIPPED, OnFault, Refusal, RequestKey, SWEEP_INTERVAL,
    ServiceState, Step, StepKind, Submission, Time, spread,
};
use expertd_types::{Generation, StepId};

use super::callers::Caller;
use super::world::World;

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

impl World {
    fn caller(&self, key: RequestKey) -> Result<&Caller, String> {
        let caller = (key.0 as usize).checked_sub(1).and_then(|index| self.callers.get(index));
        caller.ok_or_else(|| format!("there is no request {key}"))
    }

    fn retries(&self) -> bool {
        self.schedule.config.on_fault == OnFault::Retry
    }

    /// Nothing is admitted while the service is closed, or beyond its limit.
    pub(super) fn check_admission(&self, submission: &Submission, queued: usize) -> Result<(), String> {
        ensure!(self.end.is_none(), "a request was admitted after the end");
        ensure!(self.drain.is_none(), "a request was admitted while draining");
        ensure!(self.is_told_open, "a request was admitted while no generation serves");
        ensure!(
            queued == 0 || queued + submission.tokens <= self.schedule.max_queued_tokens,
            "{} rows were admitted beside {queued}",
            submission.tokens
        );
        Ok(())
    }

    /// A request is refused for a reason that is true.
    pub(super) fn check_refusal(
        &self,
        submission: &Submission,
        queued: usize,
        refusal: &Refusal,
    ) -> Result<(), String> {
        let is_true = match refusal {
            Refusal::Overloaded { .. } => {
                queued > 0 && queued + submission.tokens > self.schedule.max_queued_tokens
            }
            Refusal::Draining => self.drain.is_some(),
            Refusal::NotReady { .. } => {
                !self.is_told_open || !self.is_told_serving && submission.deadline.is_some()
            }
            Refusal::DeadlineExceeded => submission.deadline.is_some_and(|deadline| deadline <= self.now),
        };
        ensure!(is_true, "a request was refused without cause: {refusal:?}");
        if let Refusal::Overloaded { retry_after, .. } | Refusal::NotReady { retry_after, .. } = refusal {
            ensure!(
                !retry_after.is_zero() && *retry_after < Duration::from_secs(60),
                "a caller is told to retry after {retry_after:?}"
            );
        }
        Ok(())
    }

    /// Notes what the inbox was told.
    pub(super) fn check_exchange(&mut self) {
        self.is_told_serving = self.told.serving.is_some();
        self.is_told_drain = self.drain.is_some();
        self.is_told_open = self.shown != ServiceState::Failed
            && (self.is_told_serving || self.told.has_served && self.retries());
    }

    /// Counts are those of the callers' own, whenever no decided action waits to be carried out.
    pub(super) fn check_counts(&self) -> Result<(), String> {
        if self.step_loop.has_actions() {
            return Ok(());
        }
        let (mut waiting, mut incoming, mut in_step, mut received) = (0, 0, 0, 0);
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            if caller.is_received {
                waiting += caller.waiting_tokens();
                in_step += usize::from(caller.is_in_step());
                received += 1;
            } else {
                incoming += caller.tokens;
            }
        }
        let queued = self.step_loop.queued_tokens();
        ensure!(queued == waiting, "{queued} queued rows are counted, {waiting} are queued");
        let counted = self.inbox.incoming_tokens();
        ensure!(counted == incoming, "{counted} incoming rows are counted, there are {incoming}");
        if !self.step_loop.has_news_for_inbox(self.now) {
            let told = self.inbox.queued_tokens();
            ensure!(
                told == waiting + incoming,
                "{told} rows wait for admission's count, {waiting} + {incoming} do"
            );
        }
        let counted = (self.step_loop.requests_in_step(), self.step_loop.requests_queued());
        let are = (in_step, received - in_step);
        ensure!(counted == are, "requests in steps and queued are counted as {counted:?}, and are {are:?}");
        Ok(())
    }

    pub(super) fn check_action(&mut self, action: &Action) -> Result<(), String> {
        ensure!(self.end.is_none(), "an action follows the end");
        match action {
            Action::FormGroup { generation } => self.check_forming(*generation),
            Action::Answer { key, receipt } => {
                let caller = self.caller(*key)?;
                ensure!(!caller.is_answered, "request {key} is answered twice");
                ensure!(caller.completed == caller.tokens, "request {key} is answered before it is complete");
                ensure!(!caller.is_mixed, "request {key} has rows of several weight versions");
                let computed = (caller.generation, caller.version);
                ensure!(
                    computed == (Some(receipt.generation), Some(receipt.weight_version)),
                    "request {key} was computed by {computed:?}, its receipt says {} and {}",
                    receipt.generation,
                    receipt.weight_version
                );
                ensure!(receipt.steps == caller.steps, "request {key}: steps {:?}", receipt.steps);
                let tokens: u32 = receipt.tokens_per_rank.iter().sum();
                ensure!(tokens as usize == caller.tokens, "request {key}: its receipt counts {tokens} rows");
                let (lost, split) = (caller.lost > 0, caller.steps.len() > 1);
                self.seen.answers += 1;
                self.seen.answers_after_a_lost_step += u64::from(lost);
                self.seen.split_requests_answered += u64::from(split);
                Ok(())
            }
            Action::Fail { key, failure } => self.check_failure(*key, failure),
            Action::Restart { key } => {
                let caller = self.caller(*key)?;
                let loaded = self.told.serving.map(|(_, version)| version);
                ensure!(
                    caller.completed > 0 && caller.version != loaded,
                    "request {key} starts again without need"
                );
                self.seen.restarts += 1;
                Ok(())
            }
            Action::ReportDrain { requests_dropped } => {
                ensure!(self.drain.is_some(), "a drain is reported that was not asked for");
                ensure!(!self.drain_reported, "a drain is reported twice");
                self.seen.drains_timed_out += u64::from(*requests_dropped > 0);
                Ok(())
            }
            Action::End(end) => {
                ensure!(self.open.is_empty(), "{} requests have no answer at the end", self.open.len());
                // A drain that is asked for after the last exchange finds the service ended.
                ensure!(
                    !self.is_told_drain || self.drain_reported,
                    "the end comes before the drain's report"
                );
                match end {
                    End::Drained => self.seen.drains += 1,
                    _ => self.seen.gave_up += 1,
                }
                Ok(())
            }
            Action::Launch { .. } | Action::Show { .. } | Action::EndGroup { .. } => Ok(()),
        }
    }

    fn check_forming(&mut self, generation: Generation) -> Result<(), String> {
        let told = &self.told;
        ensure!(self.shown != ServiceState::Failed, "generation {generation} forms after the service failed");
        let pause = self.now.since(told.ended_at);
        ensure!(
            pause >= told.pause,
            "generation {generation} forms {pause:?} after the end of the last one, {:?} are due after {} short lives",
            told.pause,
            told.short_lived
        );
        let policy = &self.schedule.config.recovery;
        ensure!(
            told.unready < policy.max_unready && told.fruitless < policy.max_fruitless,
            "generation {generation} forms after {} ends before ready and {} without a step",
            told.unready,
            told.fruitless
        );
        Ok(())
    }

    fn check_failure(&mut self, key: RequestKey, failure: &Failure) -> Result<(), String> {
        let caller = self.caller(key)?.clone();
        ensure!(!caller.is_answered, "request {key} is answered twice");
        match failure {
            Failure::Cancelled => {
                ensure!(caller.left.is_some(), "request {key} is cancelled and its caller is there");
                self.seen.cancelled += 1;
            }
            Failure::DeadlineExceeded => {
                ensure!(caller.deadline.is_some_and(|d| d <= self.now), "request {key} is not late");
                self.seen.late += 1;
            }
            Failure::Poisoned { lost_steps } => {
                ensure!(
                    caller.lost >= 3 && *lost_steps == caller.lost && caller.was_lost_alone,
                    "request {key} counts as poisoned after {} lost steps, alone in the last one: {}",
                    caller.lost,
                    caller.was_lost_alone
                );
                self.told.fruitless = self.told.fruitless.min(1);
                self.seen.poisoned += 1;
            }
            Failure::Unavailable { retry_after, .. } => {
                let drained = self.drain.is_some_and(|deadline| deadline <= self.now);
                let is_end = self.shown == ServiceState::Failed;
                let cannot_wait =
                    (self.told.serving.is_none() || self.is_just_ready) && caller.deadline.is_some();
                let may_not_wait = !self.retries();
                ensure!(
                    drained || is_end || cannot_wait || may_not_wait,
                    "request {key}, which can wait, sees a fault"
                );
                ensure!(!retry_after.is_zero(), "request {key} is told to retry at once");
                self.seen.unavailable += 1;
            }
        }
        Ok(())
    }

    /// No step exceeds a limit, and each row is in one place.
    pub(super) fn check_step(&self, step: &Step) -> Result<(), String> {
        let config = &self.schedule.config;
        let in_flight = &self.told.in_flight;
        let id = step.id;
        ensure!(self.told.serving.is_some(), "step {id} is launched and no generation serves");
        ensure!(in_flight.len() < config.slots, "step {id} is launched and all slots are taken");
        ensure!(step.slot.index() < config.slots, "step {id} has slot {}", step.slot);
        ensure!(
            in_flight.iter().all(|(other, _)| other.slot != step.slot && other.id < id),
            "step {id} shares slot {} with a step in flight",
            step.slot
        );
        let tokens: usize = step.rows.iter().map(|range| range.rows.len()).sum();
        ensure!(tokens == step.tokens && tokens > 0, "step {id} has {tokens} rows and says {}", step.tokens);
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
                caller.deadline.is_none_or(|deadline| deadline > self.now),
                "step {id} computes request {}, which is late",
                range.key
            );
            let next = taken.entry(range.key).or_insert(caller.begun);
            ensure!(
                range.rows.start == *next && range.rows.end <= caller.tokens,
                "step {id} takes rows {:?} of request {}, of which {next} are taken",
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
            ensure!(caller.lost < 2 || step.is_alone, "step {id} computes suspect {key} beside others");
        }
        ensure!(!step.is_alone || taken.len() == 1 && in_flight.is_empty(), "step {id} is not alone");
        ensure!(
            in_flight.iter().all(|(other, _)| !other.is_alone),
            "step {id} is launched beside one that has to be alone"
        );
        if let Some((_, false)) = in_flight.back() {
            let waiting: usize = self.kind_waiting(step.kind).map(Caller::waiting_tokens).sum();
            ensure!(
                waiting + self.dropped_tokens >= config.max_tokens_per_step,
                "step {id} forms with {waiting} rows while an experts phase runs"
            );
        }
        let examined = self.step_loop.entries_examined();
        let dropped = self.callers.iter().filter(|caller| caller.left.is_some() || caller.deadline.is_some());
        ensure!(
            step.is_alone || examined <= taken.len() + MAX_SKIPPED + dropped.count(),
            "to form step {id} of {} requests, {examined} queue entries were examined",
            taken.len()
        );
        Ok(())
    }

    /// A waiting request is served within a number of steps that its place in the queue implies.
    pub(super) fn check_waits(&self) -> Result<(), String> {
        if !self.schedule.config.max_wait.is_zero() {
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

    /// Every so many steps the oldest request is served: those before it, and itself, range by range.
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

    /// What must be true when the step loop has nothing to do.
    pub(super) fn check_rest(&self) -> Result<(), String> {
        self.check_counts()?;
        if let Some(deadline) = self.drain
            && self.now >= deadline
        {
            // The thread learns of a drain, and closes admission, with the next exchange.
            let is_told = !self.inbox.has_mail() && !self.step_loop.has_news_for_inbox(self.now);
            ensure!(!is_told || self.end.is_some(), "a drain goes on after its deadline");
        }
        let state = if self.step_loop.has_news_for_inbox(self.now) || self.inbox.has_mail() {
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
        ensure!(self.shown == state, "the service shows {:?} and is {state:?}", self.shown);
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            if !caller.is_received || caller.is_in_step() {
                continue;
            }
            let too_long = |since| self.now.since(caller.waits_since.max(since)) > SWEEP_INTERVAL;
            ensure!(
                !caller.deadline.is_some_and(too_long) && !caller.left.is_some_and(too_long),
                "request {} is unwanted for long and not dropped",
                caller.key
            );
        }
        self.check_work_is_done()
    }

    /// The thread may not sleep beyond a time at which something is due.
    pub(super) fn check_sleep(&self, until: Time) -> Result<(), String> {
        if self.step_loop.has_news_for_inbox(self.now) || self.inbox.has_mail() {
            return Ok(());
        }
        let config = &self.schedule.config;
        let mut due = self.now + SWEEP_INTERVAL;
        due = self.drain.map_or(due, |deadline| due.min(deadline));
        if self.step_loop.generation().is_none() {
            due = due.min(self.told.ended_at + self.told.pause);
        }
        let can_form = self.told.in_flight.len() < config.slots
            && self.told.in_flight.back().is_none_or(|(last, ended)| *ended && !last.is_alone);
        if self.told.serving.is_some() && can_form {
            for caller in self.open.iter().map(|index| &self.callers[*index]) {
                if caller.is_received && caller.waits() && caller.lost == 0 {
                    due = due.min(caller.admitted + config.max_wait);
                }
            }
        }
        ensure!(until <= due.max(self.now), "the thread sleeps {:?} too long", until.since(due));
        Ok(())
    }

    /// No request waits while a step could be formed of it.
    fn check_work_is_done(&self) -> Result<(), String> {
        let config = &self.schedule.config;
        let in_flight = &self.told.in_flight;
        if self.told.serving.is_none() || self.end.is_some() || in_flight.len() >= config.slots {
            return Ok(());
        }
        let mut kinds: BTreeMap<StepKind, (usize, bool)> = BTreeMap::new();
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            if !caller.is_received || !caller.waits() {
                continue;
            }
            if caller.lost >= 2 {
                ensure!(!in_flight.is_empty(), "suspect {} waits and nothing is in flight", caller.key);
                return Ok(());
            }
            let (tokens, is_ripe) = kinds.entry(caller.kind).or_default();
            *tokens += caller.waiting_tokens();
            *is_ripe |= self.now >= caller.admitted + config.max_wait;
        }
        let is_draining = self.drain.is_some() && !self.inbox.has_mail();
        let (may_form, may_form_full) = match in_flight.back() {
            None => (true, true),
            Some((last, experts_ended)) => (*experts_ended && !last.is_alone, !last.is_alone),
        };
        let only_one = kinds.len() == 1;
        for (kind, (tokens, is_ripe)) in kinds {
            let is_full = tokens >= config.max_tokens_per_step;
            ensure!(
                !may_form || !(is_full || is_ripe || is_draining),
                "{tokens} rows of {kind:?} wait though a step could form"
            );
            ensure!(
                !(may_form_full && only_one && is_full),
                "{tokens} rows of {kind:?} wait though they fill a step and a slot is free"
            );
        }
        Ok(())
    }

    /// Notes that the step loop is told of a completed step.
    pub(super) fn note_done(&mut self, generation: Generation, step: StepId) {
        let Some((_, version)) = self.told.serving.filter(|(serving, _)| *serving == generation) else {
            return;
        };
        if self.told.in_flight.front().is_none_or(|(oldest, _)| oldest.id != step) {
            return;
        }
        let Some((done, _)) = self.told.in_flight.pop_front() else { return };
        self.told.steps_done += 1;
        self.told.fruitless = 0;
        for range in &done.rows {
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

    /// Notes that the step loop is told of the end of a generation.
    pub(super) fn note_ended(&mut self, generation: Generation) {
        if self.step_loop.generation() != Some(generation) {
            return;
        }
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
        told.ended_at = self.now;
        (told.serving, told.ready_at, told.steps_done) = (None, None, 0);
        let lost: Vec<_> = told.in_flight.drain(..).collect();
        self.seen.steps_lost += lost.len() as u64;
        let mut keys: Vec<RequestKey> =
            lost.iter().flat_map(|(step, _)| step.rows.iter().map(|range| range.key)).collect();
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
        self.bound_waits();
    }

    /// After the end every request has its answer, and nothing is taken in.
    pub(super) fn check_end(&mut self) -> Result<(), String> {
        ensure!(self.open.is_empty(), "{} requests were never answered", self.open.len());
        let submission = Submission {
            client: expertd_scheduler::ClientKey(1),
            kind: self.schedule.kinds[0],
            tokens: 1,
            deadline: None,
        };
        let admitted = self.inbox.submit(self.now, submission, 0);
        ensure!(admitted.is_err(), "a request was admitted after the end");
        let later = self.now + Duration::from_secs(600);
        let action = self.step_loop.poll(later, &|_: RequestKey| false);
        ensure!(action.is_none(), "an action follows the end: {action:?}");
        Ok(())
    }
}
