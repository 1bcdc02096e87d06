//! Generations: the weights that they serve, their ranks, their steps, and their ends.

use expertd_types::{StepId, WeightVersion};

use super::{Driver, Ranks, ReloadFailure};
use crate::weights::{Ask, Begin, LoadFailure, Loaded, Need, NotLoaded};
use crate::{Fault, FaultKind, Time};

impl<R: Ranks> Driver<R> {
    /// Begins a reload, or refuses it.
    pub(super) fn start_reload(&mut self, ask: Ask<R::Source, R::Ticket>, now: Time) {
        match self.weights.ask(ask, now) {
            Ok(Begin::Beside(version, source)) => {
                if let Err(failure) = self.ranks.load(version, &source, true)
                    && let Some(ticket) = self.weights.cancel()
                {
                    self.ranks.end_reload(ticket, Err(ReloadFailure::Refused(failure.message)));
                }
            }
            Ok(Begin::Drop) => {
                self.ranks.note_drop(None);
                self.steps.replace_group();
            }
            Err((ticket, reason)) => self.ranks.end_reload(ticket, Err(ReloadFailure::Refused(reason))),
        }
    }

    /// Takes in how loaders have ended.
    pub(super) fn hear_loaders(&mut self) {
        match self.ranks.poll_loaders() {
            None => {}
            Some(Ok(())) => match self.weights.loaded(self.ranks.now()) {
                Loaded::Serve(version) => self.start_ranks(version),
                Loaded::Replace => self.steps.replace_group(),
            },
            Some(Err(failure)) => self.not_loaded(failure),
        }
    }

    fn not_loaded(&mut self, failure: LoadFailure) {
        let LoadFailure { message, lacks_room, is_setup } = failure;
        match self.weights.not_loaded(lacks_room) {
            NotLoaded::Fault => {
                let kind = if is_setup { FaultKind::Setup } else { FaultKind::Load };
                self.fault(&Fault { kind, message });
            }
            NotLoaded::GoOn(ticket) => self.ranks.end_reload(ticket, Err(ReloadFailure::GoOn(message))),
            NotLoaded::Again(ticket) => {
                self.ranks.end_reload(ticket, Err(ReloadFailure::Again(message)));
                self.form_group();
            }
            NotLoaded::DropFirst => {
                self.ranks.note_drop(Some(&message));
                self.steps.replace_group();
            }
        }
    }

    /// Starts the ranks of the step loop's generation, or the loaders of the weights that it needs.
    pub(super) fn form_group(&mut self) {
        match self.weights.form() {
            Need::Serve(version) => self.start_ranks(version),
            Need::Load(version, source) => {
                self.free_unneeded();
                if let Err(failure) = self.ranks.load(version, &source, false) {
                    self.not_loaded(failure);
                }
            }
        }
    }

    fn start_ranks(&mut self, version: WeightVersion) {
        let Some(generation) = self.steps.generation() else { return };
        self.steps.ranks_start(self.ranks.now());
        match self.ranks.form(generation, version) {
            Ok(()) => self.group = Some((generation, version)),
            Err(fault) => self.fault(&fault),
        }
    }

    fn free_unneeded(&mut self) {
        while let Some(version) = self.weights.take_unneeded() {
            self.ranks.free(version);
        }
    }

    /// Tells the step loop that experts phases have ended.
    pub(super) fn hear_experts(&mut self) {
        let Some((generation, _)) = self.group.filter(|_| !self.is_ending) else { return };
        let ended = self.ranks.experts_ended();
        if let Some(step) = ended.filter(|_| ended != self.experts_ended) {
            self.experts_ended = ended;
            self.steps.experts_ended(generation, step, self.ranks.now());
        }
    }

    /// Takes in what ranks have done.
    pub(super) fn hear_ranks(&mut self) {
        if self.group.is_none() || self.is_ending {
            return;
        }
        let news = self.ranks.poll();
        self.hear_experts();
        // Steps that all ranks completed before a fault count.
        while let Some((step, at)) = self.ranks.collect() {
            self.end_step(step, at);
        }
        match news.and_then(|is_ready| self.hear_memories().map(|()| is_ready)) {
            Err(fault) => self.fault(&fault),
            Ok(true) => self.begin_serving(),
            Ok(false) => {}
        }
    }

    fn begin_serving(&mut self) {
        let Some((generation, version)) = self.group else { return };
        let reloaded = self.weights.serves(version, self.ranks.now());
        self.ranks.note_ready(generation, version, self.weights.source());
        if let Some((ticket, reloaded)) = reloaded {
            self.ranks.end_reload(ticket, Ok(reloaded));
        }
        self.free_unneeded();
        self.attachments.begin_generation();
        self.ready = Some((generation, version));
        self.begin_steps();
    }

    /// Lets steps form once the ranks have answered for the memories of sessions that were open when they were ready.
    pub(super) fn begin_steps(&mut self) {
        if let Some((generation, version)) = self.ready.take_if(|_| !self.attachments.are_awaited()) {
            self.ranks.note_steps();
            self.steps.group_ready(generation, version, self.ranks.now());
        }
    }

    /// Has the ranks compute the newest step.
    pub(super) fn launch(&mut self, id: StepId) {
        if let Err(fault) = self.try_launch(id) {
            self.fault(&fault);
        }
    }

    fn try_launch(&mut self, id: StepId) -> Result<(), Fault> {
        let Some(step) = self.steps.in_flight().back().filter(|step| step.id == id) else { return Ok(()) };
        let mut memories = Vec::new();
        for memory in step.rows.iter().filter_map(|range| self.ranks.memory_of(range.key)) {
            if !self.attachments.is_attached(memory) {
                let message = format!("a step names memory {memory}, which the ranks have not attached");
                return Err(Fault { kind: FaultKind::Channel, message });
            }
            memories.push(memory);
        }
        self.ranks.launch(step)?;
        memories.iter().for_each(|memory| self.attachments.launched(*memory));
        self.launched.push_back((id, memories));
        Ok(())
    }

    /// A step in flight has ended on every rank, at time `at`.
    fn end_step(&mut self, id: StepId, at: Time) {
        let place = self.launched.iter().position(|(launched, _)| *launched == id);
        let launched = place.and_then(|place| self.launched.remove(place));
        let (Some((generation, _)), Some((_, memories))) = (self.group, launched) else { return };
        memories.iter().for_each(|memory| self.attachments.ended(*memory));
        self.steps.step_done(generation, id, at);
    }

    /// The step loop's generation has a fault.
    fn fault(&mut self, fault: &Fault) {
        let Some(generation) = self.steps.generation().filter(|_| !self.steps.is_leaving()) else { return };
        self.ranks.note_fault(generation, fault);
        self.ready = None;
        if let Some(ticket) = self.weights.fault() {
            self.ranks.end_reload(ticket, Err(ReloadFailure::NotServed(fault.clone())));
        }
        self.steps.group_ended(generation, fault);
    }

    /// Begins to end the ranks of a generation: they are killed and reaped, so that a rank that wakes up late cannot write to the next
    /// one.
    pub(super) fn end_group(&mut self) {
        self.ranks.end();
        (self.is_ending, self.ready) = (true, None);
        self.hear_end();
    }

    /// Takes in the end of the ranks of a generation.
    pub(super) fn hear_end(&mut self) {
        if !self.is_ending {
            return;
        }
        let Some(left) = self.ranks.poll_end() else { return };
        // Calls whose clients were told of their end must be neither computed again nor failed: these have gone on.
        while let Some((step, at)) = self.ranks.collect_told() {
            self.end_step(step, at);
        }
        let now = self.ranks.now();
        self.leave_memories(&left, now);
        self.weights.group_ended(now);
        self.free_unneeded();
        self.launched.clear();
        (self.group, self.experts_ended, self.is_ending) = (None, None, false);
        self.steps.group_gone(now);
    }
}
