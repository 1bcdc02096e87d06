//! Completed steps.

use expertd_types::{Generation, StepId};

use super::{Action, StepLoop};
use crate::{Receipt, RequestKey, Time};

impl StepLoop {
    /// Event: the experts phase of `step`, and of every earlier step, has ended on all ranks.
    pub fn experts_ended(&mut self, generation: Generation, step: StepId, now: Time) {
        if self.generation() == Some(generation) {
            for earlier in self.in_flight.iter_mut().filter(|earlier| earlier.id <= step) {
                earlier.experts_ended = true;
            }
            if let Some(last) = self.in_flight.back().filter(|last| last.experts_ended) {
                self.gathering.experts_ended(last.formed, now);
            }
        }
    }

    /// Event: every rank has completed the oldest step, and its rows have been copied out of its slot. While ranks are being ended: a
    /// rank has told the calls of that step of their end; all of their rows are in it, and earlier steps may have failed. A step of a
    /// generation that has ended is ignored.
    pub fn step_done(&mut self, generation: Generation, step: StepId, now: Time) {
        let Some(group) = self.group.as_mut().filter(|group| group.generation == generation) else { return };
        let at = self.in_flight.iter().position(|running| running.id == step);
        let Some(at) = at.filter(|at| *at == 0 || self.leaving.is_some()) else { return };
        let Some(done) = self.in_flight.remove(at) else { return };
        group.steps_completed += 1;
        self.recovery.step_done();
        self.poisoned.remove(&done.kind.layer);
        if self.trial.is_some_and(|(kind, _)| kind.layer == done.kind.layer) {
            self.trial = None;
        }
        self.throughput.add(done.tokens, done.formed, now);
        if self.in_flight.is_empty() {
            self.gathering.experts_ended(done.formed, now);
        }
        let mut last = None;
        for range in &done.rows {
            let Some(request) = self.requests.get_mut(&range.key) else { continue };
            if last != Some(range.key) {
                request.steps.push(done.id);
                last = Some(range.key);
            }
            request.completed = range.rows.end;
            request.tokens_per_rank.resize(self.config.ranks, 0);
            request.tokens_per_rank[range.rank.index()] += range.rows.len() as u32;
            if request.completed == request.tokens {
                self.answer(range.key, generation, now);
            } else if !request.is_in_step() {
                self.in_step -= 1;
                if let Some(failure) = request.withdrawn.take() {
                    self.requests.remove(&range.key);
                    self.actions.push_back(Action::Fail { key: range.key, failure });
                }
            }
        }
        for client in done.clients {
            self.queue.release(client);
        }
        if self.in_flight.is_empty() && self.queue.is_empty() {
            self.queue.end_busy_period();
        }
    }

    fn answer(&mut self, key: RequestKey, generation: Generation, now: Time) {
        let (Some(request), Some(weight_version)) = (self.requests.remove(&key), self.weight_version) else {
            return;
        };
        self.in_step -= 1;
        self.suspects.remove(&key);
        let first_step = request.first_step.unwrap_or(now);
        let receipt = Receipt {
            steps: request.steps,
            generation,
            weight_version,
            tokens_per_rank: request.tokens_per_rank,
            queue_time: first_step.since(request.admitted),
            step_time: now.since(first_step),
        };
        self.actions.push_back(Action::Answer { key, receipt });
    }
}
