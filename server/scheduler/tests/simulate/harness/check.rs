//! Invariants of admissions, answers, failures, drains and ends.

use std::time::Duration;

use expertd_scheduler::{
    End, OnFault, Receipt, Refusal, RequestKey, ServiceState, StepLoop, Submission, Unanswered,
};
use expertd_types::Generation;

use super::callers::Caller;
use super::ranks::{Ending, Ranks};
use super::world::World;

/// Returns an error with this text from the enclosing function unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}
pub(super) use ensure;

impl World {
    pub(super) fn caller(&self, key: RequestKey) -> Result<&Caller, String> {
        let caller = (key.0 as usize).checked_sub(1).and_then(|index| self.callers.get(index));
        caller.ok_or_else(|| format!("there is no request {key}"))
    }

    fn retries(&self) -> bool {
        self.schedule.config.on_fault == OnFault::Retry
    }

    /// Checks that nothing is admitted while the service is closed or beyond its limit.
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

    /// Checks that the reason of a refusal is true.
    pub(super) fn check_refusal(
        &mut self,
        submission: &Submission,
        queued: usize,
        refusal: &Refusal,
    ) -> Result<(), String> {
        // The inbox is told before the state is shown.
        let is_for_good =
            matches!(refusal, Refusal::NotReady { reason, .. } if reason.contains("needs a restart"));
        self.is_said_to_fail |= is_for_good;
        let is_true = match refusal {
            Refusal::Overloaded { .. } => {
                queued > 0 && queued + submission.tokens > self.schedule.max_queued_tokens
            }
            Refusal::Draining => self.drain.is_some(),
            Refusal::NotReady { .. } => {
                is_for_good || !self.is_told_open || !self.is_told_serving && submission.deadline.is_some()
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

    /// Notes what the inbox is told.
    pub(super) fn check_exchange(&mut self) {
        self.is_told_serving = self.told.serving.is_some();
        self.is_told_drain = self.drain.is_some();
        self.is_told_open = self.shown != ServiceState::Failed
            && (self.is_told_serving || self.told.has_served && (self.retries() || self.told.is_replacement));
    }

    /// Checks that callers are admitted if the service shows that it serves.
    pub(super) fn check_shown(&self) -> Result<(), String> {
        ensure!(
            self.shown != ServiceState::Serving || self.is_told_open,
            "the service shows that it serves, but admits nothing"
        );
        Ok(())
    }

    /// Checks the step loop's counts against the callers' state, when every decided action is carried out.
    pub(super) fn check_counts(&self, steps: &StepLoop) -> Result<(), String> {
        let (mut waiting, mut incoming, mut in_step, mut received) = (0, 0, 0, 0);
        for caller in self.open.iter().map(|index| &self.callers[*index]) {
            if steps.is_withdrawn(caller.key) {
                ensure!(
                    caller.is_in_step() && caller.is_unwanted(self.now),
                    "request {} is withdrawn, but is in no step or wanted",
                    caller.key
                );
            } else if caller.is_received {
                waiting += caller.waiting_tokens();
            }
            if caller.is_received {
                in_step += usize::from(caller.is_in_step());
                received += 1;
            } else {
                incoming += caller.tokens;
            }
        }
        let queued = steps.queued_tokens();
        ensure!(queued == waiting, "{queued} queued rows are counted, but {waiting} are queued");
        let counted = self.inbox.incoming_tokens();
        ensure!(counted == incoming, "{counted} incoming rows are counted, but there are {incoming}");
        if !steps.has_news_for_inbox(self.now) {
            let told = self.inbox.queued_tokens();
            ensure!(
                told == waiting + incoming,
                "admission counts {told} waiting rows, but {waiting} + {incoming} wait"
            );
        }
        let counted = (steps.requests_in_step(), steps.requests_queued());
        let are = (in_step, received - in_step);
        ensure!(
            counted == are,
            "the counts of requests in steps and of queued requests are {counted:?}, expected {are:?}"
        );
        Ok(())
    }

    /// Checks that no rank may still read the rows of a request or write its output: every step that names it has ended on all ranks,
    /// or the ranks have been reaped. Killed ranks no longer matter to a request that lends no memory.
    fn check_unused(&mut self, key: RequestKey) -> Result<(), String> {
        let lends = self.caller(key)?.memory.is_some();
        self.seen.ended_while_ranks_end += u64::from(self.is_ending());
        let matters = |ranks: &&Ranks| match ranks.ending {
            None => true,
            Some(ending) => lends && ending != Ending::Heard,
        };
        let ranks = self.ranks.iter().filter(matters);
        let mut steps = ranks.flat_map(|ranks| &ranks.steps).filter(|step| !step.is_done);
        match steps.find(|step| step.step.rows.iter().any(|range| range.key == key)) {
            None => Ok(()),
            Some(step) => Err(format!("request {key} ends while step {} is in flight", step.step.id)),
        }
    }

    pub(super) fn check_answer(&mut self, key: RequestKey, receipt: &Receipt) -> Result<(), String> {
        self.check_unused(key)?;
        let caller = self.caller(key)?;
        ensure!(!caller.is_answered, "request {key} is answered twice");
        ensure!(caller.completed == caller.tokens, "request {key} is answered before it is complete");
        ensure!(!caller.is_mixed, "request {key} has rows of several weight versions");
        let computed = (caller.generation, caller.version);
        ensure!(
            computed == (Some(receipt.generation), Some(receipt.weight_version)),
            "request {key} was computed by {computed:?}, but its receipt says {} and {}",
            receipt.generation,
            receipt.weight_version
        );
        ensure!(
            caller.expected.is_none_or(|expected| expected == receipt.weight_version),
            "request {key} expects version {:?} and is answered by {}",
            caller.expected,
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

    pub(super) fn check_restart(&mut self, key: RequestKey) -> Result<(), String> {
        let caller = self.caller(key)?;
        let loaded = self.told.serving.map(|(_, version)| version);
        ensure!(caller.completed > 0 && caller.version != loaded, "request {key} starts again without need");
        self.seen.restarts += 1;
        Ok(())
    }

    pub(super) fn check_drain_report(&mut self, requests_dropped: u64) -> Result<(), String> {
        ensure!(self.drain.is_some(), "a drain is reported that was not asked for");
        ensure!(!self.drain_reported, "a drain is reported twice");
        self.seen.drains_timed_out += u64::from(requests_dropped > 0);
        Ok(())
    }

    pub(super) fn check_forming(&mut self, generation: Generation) -> Result<(), String> {
        let told = &self.told;
        ensure!(self.shown != ServiceState::Failed, "generation {generation} forms after the service failed");
        let pause = self.asked.get().since(told.ended_at);
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

    pub(super) fn check_failure(&mut self, key: RequestKey, failure: &Unanswered) -> Result<(), String> {
        self.check_unused(key)?;
        let caller = self.caller(key)?.clone();
        ensure!(!caller.is_answered, "request {key} is answered twice");
        ensure!(!caller.is_told, "request {key} fails, and a rank has told it of its end");
        self.seen.withdrawn_while_in_a_step += u64::from(caller.was_withdrawn);
        match failure {
            Unanswered::Cancelled => {
                ensure!(caller.left.is_some(), "request {key} is cancelled, but its caller has not left");
                self.seen.cancelled += 1;
            }
            Unanswered::DeadlineExceeded => {
                ensure!(caller.deadline.is_some_and(|d| d <= self.now), "request {key} is not late");
                self.seen.late += 1;
            }
            Unanswered::Poisoned { lost_steps } => {
                ensure!(
                    caller.lost >= 3 && *lost_steps == caller.lost && caller.was_lost_alone,
                    "request {key} counts as poisoned after {} lost steps, alone in the last one: {}",
                    caller.lost,
                    caller.was_lost_alone
                );
                self.told.fruitless = self.told.fruitless.min(1);
                *self.verdicts.entry(caller.kind.layer).or_insert(0) += 1;
                self.seen.poisoned += 1;
            }
            Unanswered::OtherWeights { expected, loaded } => {
                ensure!(
                    caller.expected == Some(*expected)
                        && expected != loaded
                        && self.told.version == Some(*loaded),
                    "request {key} expects {:?} and fails because {expected} is not {loaded}",
                    caller.expected
                );
                self.seen.expected_other_weights += 1;
            }
            Unanswered::Unavailable { retry_after, .. } => {
                let drained = self.drain.is_some_and(|deadline| deadline <= self.now);
                let is_end = self.shown == ServiceState::Failed;
                let cannot_wait =
                    (self.told.serving.is_none() || self.is_just_ready) && caller.deadline.is_some();
                let may_not_wait = !self.retries();
                ensure!(
                    drained || is_end || cannot_wait || may_not_wait,
                    "request {key} fails because of a fault, but it can wait"
                );
                ensure!(!retry_after.is_zero(), "request {key} is told to retry at once");
                self.seen.unavailable += 1;
            }
        }
        Ok(())
    }

    /// Checks that after the end every request has its answer, and that nothing follows.
    pub(super) fn check_end(&mut self, steps: &mut StepLoop, end: End) -> Result<(), String> {
        self.note(|| format!("    the service ends: {end:?}"));
        ensure!(self.open.is_empty(), "{} requests have no answer at the end", self.open.len());
        let has_failed = self.shown == ServiceState::Failed;
        ensure!(
            has_failed || !self.is_said_to_fail,
            "callers were told of a failure, and the end is {end:?}"
        );
        // A drain that is requested after the last exchange finds that the service has ended.
        ensure!(!self.is_told_drain || self.drain_reported, "the end comes before the drain's report");
        match &end {
            End::Drained => self.seen.drains += 1,
            End::SetupFailed(message) if message.contains("row of zeros") => {
                ensure!(self.trials_lost >= 2, "a layer is to blame after {} trials", self.trials_lost);
                self.seen.layers_blamed += 1;
                self.seen.gave_up += 1;
            }
            _ => self.seen.gave_up += 1,
        }
        let submission = Submission {
            client: expertd_scheduler::ClientKey(1),
            connection: expertd_scheduler::ConnectionKey(1),
            kind: self.schedule.kinds[0],
            tokens: 1,
            deadline: None,
            expected_version: None,
            in_place: false,
        };
        let admitted = self.inbox.submit(self.now, submission, 0);
        ensure!(admitted.is_err(), "a request was admitted after the end");
        let later = self.now + Duration::from_secs(600);
        let action = steps.poll(later, &|_: RequestKey| false);
        ensure!(action.is_none(), "an action follows the end: {action:?}");
        Ok(())
    }
}
