//! Invariants of sessions and of the memory that they share with ranks.

use expertd_scheduler::{Attachment, Step};
use expertd_types::MemoryId;

use super::check::ensure;
use super::sessions::Session;
use super::world::World;

impl World {
    fn known(&self, memory: MemoryId) -> Result<&Session, String> {
        let session = (memory.0 as usize).checked_sub(1).and_then(|at| self.sessions.get(at));
        session.ok_or_else(|| format!("there is no memory {memory}"))
    }

    /// Whether a step that the driver has not taken in names a memory.
    fn is_named(&self, memory: MemoryId) -> bool {
        let steps = self.ranks.iter().flat_map(|ranks| &ranks.steps);
        let mut ranges = steps.flat_map(|step| &step.step.rows);
        ranges.any(|range| self.caller(range.key).is_ok_and(|caller| caller.memory == Some(memory)))
    }

    /// Whether every rank has a memory.
    fn all_have(&self, memory: MemoryId) -> bool {
        self.ranks.as_ref().is_some_and(|ranks| ranks.has.iter().all(|has| has.contains(&memory)))
    }

    /// Checks an order to attach or to detach a memory.
    pub(super) fn check_order(&self, memory: MemoryId, is_attach: bool) -> Result<(), String> {
        let session = self.known(memory)?;
        let Some(ranks) = &self.ranks else {
            return Err(format!("memory {memory} is ordered where no ranks are"));
        };
        ensure!(ranks.is_ready, "memory {memory} is ordered before the ranks are ready");
        ensure!(ranks.order.is_none(), "memory {memory} is ordered before the last order was answered");
        if is_attach {
            ensure!(
                session.is_known && !session.is_known_to_end,
                "memory {memory} is to be attached, and its session has ended"
            );
            let has = ranks.has.iter().any(|has| has.contains(&memory));
            ensure!(!has, "memory {memory} is to be attached twice");
        } else {
            ensure!(session.is_known_to_end, "memory {memory} is to be detached, and its session goes on");
            ensure!(!self.is_named(memory), "memory {memory} is to be detached, and a step names it");
        }
        Ok(())
    }

    /// Checks what a client is told of its memory.
    pub(super) fn check_attachment(&self, memory: MemoryId, attachment: &Attachment) -> Result<(), String> {
        self.known(memory)?;
        match attachment {
            Attachment::Awaited => ensure!(self.ranks.is_none(), "memory {memory} is awaited, and ranks run"),
            Attachment::Attached => {
                ensure!(self.all_have(memory), "memory {memory} is called attached, and a rank lacks it");
            }
            Attachment::Refused(_) => {
                ensure!(!self.all_have(memory), "memory {memory} is called refused, and every rank has it");
            }
        }
        Ok(())
    }

    /// Checks that nothing uses a memory any more.
    pub(super) fn check_release(&self, memory: MemoryId) -> Result<(), String> {
        let session = self.known(memory)?;
        ensure!(session.is_known_to_end, "memory {memory} is released, and its session goes on");
        ensure!(!session.is_released, "memory {memory} is released twice");
        ensure!(!self.is_named(memory), "memory {memory} is released, and a step names it");
        let has = self.ranks.iter().flat_map(|ranks| &ranks.has).any(|has| has.contains(&memory));
        ensure!(!has, "memory {memory} is released, and a rank has it");
        Ok(())
    }

    /// Checks that every rank has the memories that a step names, and that its calls were not told of their end before.
    pub(super) fn check_named_memories(&self, step: &Step) -> Result<(), String> {
        for caller in step.rows.iter().filter_map(|range| self.caller(range.key).ok()) {
            ensure!(!caller.is_told, "request {} is computed again, and was told of its end", caller.key);
            if let Some(memory) = caller.memory {
                ensure!(self.all_have(memory), "step {} names memory {memory}, which a rank lacks", step.id);
            }
        }
        Ok(())
    }

    /// Whether the ranks have answered for the memory of every session that was open when they were ready.
    fn has_answered(&self) -> bool {
        let Some(ranks) = &self.ranks else { return false };
        let is_missing = |memory: &MemoryId| {
            self.known(*memory).is_ok_and(|session| !session.is_known_to_end)
                && (!ranks.asked.contains(memory)
                    || ranks.order.as_ref().is_some_and(|order| order.memory == *memory))
        };
        !self.awaited.iter().any(is_missing)
    }

    /// Checks that a generation serves only when its ranks have answered for the memory of every session that was open when they were
    /// ready.
    pub(super) fn check_answered_orders(&self) -> Result<(), String> {
        let Some(ranks) = &self.ranks else { return Err("a generation serves without ranks".to_owned()) };
        ensure!(ranks.is_ready, "a generation serves before its ranks are ready");
        ensure!(self.has_answered(), "a generation serves before its ranks have attached {:?}", self.awaited);
        Ok(())
    }

    /// Checks that a generation that is ready does not wait for sessions that were opened later.
    pub(super) fn check_ready_generation(&self) -> Result<(), String> {
        let ready = self.ranks.as_ref().filter(|ranks| ranks.is_ready_heard && !ranks.is_dead);
        let waits = ready.is_some_and(|ranks| ranks.answers.is_empty()) && self.told.serving.is_none();
        ensure!(!waits || !self.has_answered(), "a generation is ready and does not serve");
        Ok(())
    }
}
