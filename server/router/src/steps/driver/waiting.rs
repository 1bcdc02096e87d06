//! How the step loop's thread sleeps, and who is woken when a step is about to end.

use std::time::{Duration, Instant};

use expertd_ipc::WaitPolicy;
use expertd_ipc::wait::spin_between_steps;
use expertd_types::StepId;

use super::{Driver, Launched, QUIET};
use crate::steps::reload::Reload;

impl Driver {
    /// How long this thread spins while no step is in flight, or one that is about to end.
    fn spin_between_steps(&self) -> Duration {
        spin_between_steps(self.cluster.spin, self.cluster.usable_cores)
    }

    /// Whether this thread, which sleeps while experts compute, and the clients of sessions wake up when the experts of a step have ended,
    /// while its rows are combined. They wake up at the same time then, and not one after the other when the step has ended.
    fn wakes_early(&self) -> bool {
        self.cluster.spin.is_zero() && !self.spin_between_steps().is_zero()
    }

    /// Wakes the clients of sessions whose calls `step` is about to complete.
    pub(super) fn expect_answers(&self, step: StepId) {
        if !self.wakes_early() {
            return;
        }
        let ended = self.launched.iter().filter(|launched| launched.step == step);
        for (key, _) in ended.flat_map(|launched| &launched.staged) {
            if let Some(active) = self.active.get(key) {
                active.expect_answer();
            }
        }
    }

    /// Sleeps until mail, a completion, an event of a rank, or the time of the next decision.
    pub(super) fn wait(&mut self) {
        let now = Instant::now();
        let mut until = self.shared.instant(self.step_loop.wake_at(self.shared.time(now)));
        if !self.is_quiet() && self.has_unpublished() {
            until = until.min(self.last_event + QUIET);
        }
        let is_near = |step: &Launched| self.experts_ended.is_some_and(|ended| step.step <= ended);
        let spin = match self.launched.front() {
            Some(step) if !is_near(step) => self.cluster.spin,
            _ => self.spin_between_steps(),
        };
        let wants_notice = self.step_loop.has_waiting() || (!self.launched.is_empty() && self.wakes_early());
        let spin = spin.saturating_sub(now - self.last_event);
        let Driver { shared, group, loading, reload, experts_ended, .. } = self;
        if let Some(group) = group {
            group.want_early_notice(wants_notice);
        }
        let policy = WaitPolicy { spin, deadline: Some(until), after_ring: Duration::ZERO };
        let event = shared.bell.bell().wait_until(policy, || {
            shared.has_mail()
                || loading.as_mut().is_some_and(|(_, loading)| loading.collect())
                || reload.as_mut().is_some_and(Reload::collect)
                || group.as_mut().is_some_and(|group| {
                    group.collect()
                        || (wants_notice
                            && group.experts_ended().is_some_and(|step| Some(step) != *experts_ended))
                })
        });
        // A timeout is the periodic tick; it does not count as an event.
        if event.is_ok() {
            self.last_event = Instant::now();
        }
    }
}
