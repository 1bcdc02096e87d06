//! The simulated ranks.

use std::collections::VecDeque;

use expertd_scheduler::{GroupFault, Step};
use expertd_types::{Generation, StepId, WeightVersion};

use super::world::World;

/// Events of the ranks on their way to the step loop.
#[derive(Clone, Debug)]
pub(super) enum Event {
    Ready(Generation, WeightVersion),
    ExpertsEnded(Generation, StepId),
    Done(Generation, StepId),
    Ended(Generation, GroupFault),
}

/// A step on the ranks.
#[derive(Clone, Debug)]
pub(super) struct RankStep {
    pub(super) step: Step,
    pub(super) is_poison: bool,
    pub(super) experts_ended: bool,
    pub(super) is_done: bool,
}

/// The ranks of the generation that was formed last.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    pub(super) generation: Generation,
    pub(super) is_ready: bool,
    pub(super) is_dead: bool,
    pub(super) version: WeightVersion,
    pub(super) steps: VecDeque<RankStep>,
}

impl World {
    pub(super) fn ranks_ready(&mut self) {
        if let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_ready && !ranks.is_dead) {
            ranks.is_ready = true;
            self.events.push_back(Event::Ready(ranks.generation, ranks.version));
        }
    }

    pub(super) fn ranks_end_experts(&mut self) {
        let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) else { return };
        if let Some(step) = ranks.steps.iter_mut().find(|step| !step.experts_ended) {
            step.experts_ended = true;
            self.events.push_back(Event::ExpertsEnded(ranks.generation, step.step.id));
        }
    }

    pub(super) fn ranks_complete(&mut self) {
        let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) else { return };
        let Some(step) = ranks.steps.iter_mut().find(|step| !step.is_done) else { return };
        if step.is_poison {
            return self.ranks_fail("a poisoned request", false);
        }
        if !step.experts_ended {
            step.experts_ended = true;
            self.events.push_back(Event::ExpertsEnded(ranks.generation, step.step.id));
        }
        step.is_done = true;
        self.events.push_back(Event::Done(ranks.generation, step.step.id));
    }

    pub(super) fn ranks_fail(&mut self, what: &str, is_load: bool) {
        if let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) {
            ranks.is_dead = true;
            let fault = GroupFault { is_load, message: what.to_owned() };
            self.events.push_back(Event::Ended(ranks.generation, fault));
        }
    }

    pub(super) fn stale_news(&mut self) {
        let current = self.ranks.as_ref().map(|ranks| ranks.generation);
        if let Some((generation, step)) = self.last_step.filter(|(old, _)| Some(*old) != current) {
            let fault = GroupFault { is_load: false, message: "stale".to_owned() };
            let running = self.ranks.as_ref().and_then(|ranks| ranks.steps.front());
            let step = running.map_or(step, |running| running.step.id);
            self.events.push_front(Event::Done(generation, step));
            self.events.push_back(Event::ExpertsEnded(generation, step));
            self.events.push_back(Event::Ready(generation, WeightVersion(999)));
            self.events.push_back(Event::Ended(generation, fault));
        }
    }
}
