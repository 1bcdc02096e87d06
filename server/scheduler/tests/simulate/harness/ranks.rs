//! The simulated ranks and loaders.

use std::collections::{BTreeSet, VecDeque};

use expertd_scheduler::{AttachAnswer, Fault, FaultKind, LoadFailure, Step};
use expertd_types::{Generation, MemoryId, Rank, WeightVersion};

use super::world::World;

/// Where weights come from: the number of the reload that brought them, or 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source(pub usize);

/// A step on the ranks.
#[derive(Clone, Debug)]
pub(super) struct RankStep {
    pub(super) step: Step,
    pub(super) is_poison: bool,
    pub(super) experts_ended: bool,
    pub(super) is_done: bool,
    /// Whether a rank tells its calls of their end, and whether it has.
    pub(super) tells: bool,
    pub(super) has_told: bool,
}

/// An order about a memory that ranks carry out.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) memory: MemoryId,
    pub(super) is_attach: bool,
    /// `[ranks]`: whether the rank has answered.
    pub(super) answered: Vec<bool>,
    pub(super) is_late: bool,
}

/// The end of killed ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// They may still write and tell.
    Slow,
    /// They are reaped, which the driver has not heard.
    Reaped,
    /// The driver has heard it.
    Heard,
}

/// The ranks of the generation that was formed last.
#[derive(Clone, Debug)]
pub(super) struct Ranks {
    pub(super) generation: Generation,
    pub(super) version: WeightVersion,
    pub(super) is_ready: bool,
    pub(super) is_ready_heard: bool,
    /// A fault that the driver has not heard.
    pub(super) fault: Option<Fault>,
    pub(super) is_dead: bool,
    /// Set once they are killed.
    pub(super) ending: Option<Ending>,
    pub(super) steps: VecDeque<RankStep>,
    /// `[ranks]`: the memories that the rank has.
    pub(super) has: Vec<BTreeSet<MemoryId>>,
    /// The memories that they were to attach.
    pub(super) asked: BTreeSet<MemoryId>,
    pub(super) order: Option<Order>,
    pub(super) answers: VecDeque<(Rank, MemoryId, AttachAnswer)>,
}

impl Ranks {
    pub(super) fn new(generation: Generation, version: WeightVersion, ranks: usize) -> Ranks {
        Ranks {
            generation,
            version,
            is_ready: false,
            is_ready_heard: false,
            fault: None,
            is_dead: false,
            ending: None,
            steps: VecDeque::new(),
            has: vec![BTreeSet::new(); ranks],
            asked: BTreeSet::new(),
            order: None,
            answers: VecDeque::new(),
        }
    }

    /// Whether the driver has something to hear.
    pub(super) fn has_news(&self) -> bool {
        if self.ending.is_some() {
            return self.ending == Some(Ending::Reaped);
        }
        self.is_ready && !self.is_ready_heard
            || self.fault.is_some()
            || !self.is_dead && self.steps.front().is_some_and(|step| step.is_done)
            || !self.answers.is_empty()
            || self.order.as_ref().is_some_and(|order| order.is_late)
    }
}

/// Loaders that pack a set.
#[derive(Clone, Debug)]
pub(super) struct Loaders {
    pub(super) version: WeightVersion,
    pub(super) source: Source,
    pub(super) beside: bool,
    pub(super) end: Option<Result<(), LoadFailure>>,
}

impl World {
    /// Loaders pack their set. Returns whether there were any.
    pub(super) fn loaders_pack(&mut self) -> bool {
        let running = self.loaders.as_mut().filter(|loaders| loaders.end.is_none());
        running.map(|loaders| loaders.end = Some(Ok(()))).is_some()
    }

    /// A loader fails.
    pub(super) fn loaders_fail(&mut self, lacks_room: bool) {
        if let Some(loaders) = self.loaders.as_mut().filter(|loaders| loaders.end.is_none()) {
            let lacks_room = lacks_room && loaders.beside;
            let message = "a loader died".to_owned();
            loaders.end = Some(Err(LoadFailure { message, lacks_room, is_setup: false }));
        }
    }

    /// What a generation that is being formed waits for happens: its weights are packed, or its ranks are ready.
    pub(super) fn ranks_ready(&mut self) -> bool {
        if self.loaders.as_ref().is_some_and(|loaders| !loaders.beside) {
            return self.loaders_pack();
        }
        let forming = self.ranks.as_mut().filter(|ranks| !ranks.is_ready && !ranks.is_dead);
        forming.map(|ranks| ranks.is_ready = true).is_some()
    }

    pub(super) fn ranks_end_experts(&mut self) -> bool {
        let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) else { return false };
        let running = ranks.steps.iter_mut().find(|step| !step.experts_ended);
        running.map(|step| step.experts_ended = true).is_some()
    }

    /// A rank tells the calls of the oldest step that they have ended, which the router learns later. `skips`: that step has failed on
    /// the rank, which goes on with the next one.
    pub(super) fn ranks_tell(&mut self, skips: bool) {
        // A rank that is killed may tell until it is reaped.
        let may_tell = |ranks: &&mut Ranks| matches!(ranks.ending, None | Some(Ending::Slow));
        let Some(ranks) = self.ranks.as_mut().filter(may_tell) else { return };
        let is_ending = ranks.ending.is_some();
        // The driver hears of a step that has failed at once.
        let skips = usize::from(skips && ranks.is_dead);
        let mut running = ranks.steps.iter_mut().filter(|step| !step.is_done && !step.has_told);
        if let Some(step) = running.nth(skips).filter(|step| step.tells && !step.is_poison) {
            (step.experts_ended, step.has_told) = (true, true);
            self.seen.told_while_ending += u64::from(is_ending);
            for range in &step.step.rows {
                self.callers[range.key.0 as usize - 1].is_told = true;
            }
        }
    }

    pub(super) fn ranks_complete(&mut self) -> bool {
        let Some(ranks) = self.ranks.as_mut().filter(|ranks| !ranks.is_dead) else { return false };
        let Some(step) = ranks.steps.iter_mut().find(|step| !step.is_done) else { return false };
        if step.is_poison {
            self.ranks_fail("a poisoned request", FaultKind::Step);
        } else {
            (step.experts_ended, step.is_done, step.has_told) = (true, true, step.tells);
        }
        true
    }

    /// Killed ranks are reaped. Returns whether they were waited for.
    pub(super) fn ranks_end(&mut self) -> bool {
        let ranks = self.ranks.as_mut().filter(|ranks| ranks.ending == Some(Ending::Slow));
        ranks.map(|ranks| ranks.ending = Some(Ending::Reaped)).is_some()
    }

    pub(super) fn ranks_fail(&mut self, what: &str, kind: FaultKind) {
        match self.ranks.as_mut() {
            Some(ranks) if !ranks.is_dead => {
                ranks.is_dead = true;
                ranks.fault = Some(Fault { kind, message: what.to_owned() });
            }
            _ => self.loaders_fail(false),
        }
    }
}
