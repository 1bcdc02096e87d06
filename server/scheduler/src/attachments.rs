//! Which memories of clients the ranks of the present generation have attached, as a state machine without threads, clock or
//! I/O.
//!
//! Ranks carry out one order at a time, all of them the same one, so that registering memory with a device stops them
//! together and few messages wait on their sockets. A session opens when every rank has attached its memory, and a generation serves
//! when its ranks have answered for the memory of every session that was open when they were ready.

use std::collections::BTreeMap;

use expertd_types::{MemoryId, Rank};

use AttachAnswer as Answer;

/// The driver's next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryAction {
    /// Send the memory to every rank.
    Attach(MemoryId),
    /// Ask every rank to detach the memory.
    Detach(MemoryId),
    /// Release the memory: no rank has it, and no step names it.
    Release(MemoryId),
}

/// Whether ranks have attached a client's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Attachment {
    /// Not every rank has answered.
    #[default]
    Awaited,
    /// Every rank reads and writes it in place.
    Attached,
    /// A rank cannot use it, for this reason.
    Refused(String),
}

/// The answer of a rank to an order about a client's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachAnswer {
    /// To an order to attach it.
    Attached {
        /// Why the rank cannot use it.
        error: Option<String>,
    },
    /// To an order to detach it.
    Detached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// No rank has it.
    Nowhere,
    /// Ranks are attaching it.
    Attaching,
    /// Every rank has it.
    Attached,
    /// Some rank cannot use it; others may have it.
    Refused,
    /// Ranks are detaching it.
    Detaching,
}

#[derive(Debug)]
struct Entry {
    place: Place,
    /// Whether the client is gone.
    is_closing: bool,
    /// Segments of steps in flight that name it.
    segments: usize,
    /// Whether it was open when the ranks of the generation were ready. Sessions that are opened later have no calls before ranks have
    /// attached them.
    is_early: bool,
}

#[derive(Debug)]
struct UnderWay {
    memory: MemoryId,
    /// `[ranks]`: whether the rank has answered.
    answered: Vec<bool>,
    /// Why a rank cannot use the memory.
    refused: Option<String>,
}

/// The memories of open sessions and what ranks have of them.
#[derive(Debug)]
pub(crate) struct Attachments {
    ranks: usize,
    /// Whether there are ranks that can attach and detach memories.
    is_serving: bool,
    memories: BTreeMap<MemoryId, Entry>,
    under_way: Option<UnderWay>,
}

impl Attachments {
    pub(crate) const fn new(ranks: usize) -> Self {
        Attachments { ranks, is_serving: false, memories: BTreeMap::new(), under_way: None }
    }

    /// A session was opened.
    pub(crate) fn open(&mut self, memory: MemoryId) {
        let new = Entry { place: Place::Nowhere, is_closing: false, segments: 0, is_early: false };
        self.memories.insert(memory, new);
    }

    /// A session has ended: no further step names its memory.
    pub(crate) fn close(&mut self, memory: MemoryId) {
        if let Some(attachment) = self.memories.get_mut(&memory) {
            attachment.is_closing = true;
        }
    }

    /// The ranks of a generation take orders from now on; they have no memory yet.
    pub(crate) fn begin_generation(&mut self) {
        self.end_generation();
        self.is_serving = true;
        self.memories.values_mut().for_each(|attachment| attachment.is_early = true);
    }

    /// Every rank is gone, and with them the steps in flight.
    pub(crate) fn end_generation(&mut self) {
        self.is_serving = false;
        self.under_way = None;
        for attachment in self.memories.values_mut() {
            attachment.place = Place::Nowhere;
            attachment.segments = 0;
        }
    }

    /// Memories that any rank of the present generation may have.
    pub(crate) fn held_by_ranks(&self) -> impl Iterator<Item = MemoryId> {
        let held = self.memories.iter().filter(|(_, attachment)| attachment.place != Place::Nowhere);
        held.map(|(memory, _)| *memory)
    }

    /// Whether every rank has the memory.
    pub(crate) fn is_attached(&self, memory: MemoryId) -> bool {
        self.memories.get(&memory).is_some_and(|attachment| attachment.place == Place::Attached)
    }

    /// Whether ranks have yet to answer for the memory of a session that was open when they were ready.
    pub(crate) fn are_awaited(&self) -> bool {
        self.memories.values().any(|attachment| {
            attachment.is_early
                && !attachment.is_closing
                && matches!(attachment.place, Place::Nowhere | Place::Attaching)
        })
    }

    /// A step was launched, a segment of which names the memory.
    pub(crate) fn launched(&mut self, memory: MemoryId) {
        if let Some(attachment) = self.memories.get_mut(&memory) {
            attachment.segments += 1;
        }
    }

    /// A step has ended, a segment of which named the memory.
    pub(crate) fn ended(&mut self, memory: MemoryId) {
        if let Some(attachment) = self.memories.get_mut(&memory) {
            attachment.segments = attachment.segments.saturating_sub(1);
        }
    }

    /// Takes in the answer of a rank. Returns the outcome of an order to attach once every rank has answered.
    ///
    /// # Errors
    /// The answer belongs to no order: a fault of the rank.
    pub(crate) fn answered(
        &mut self,
        rank: Rank,
        memory: MemoryId,
        answer: Answer,
    ) -> Result<Option<Attachment>, String> {
        let wrong = || format!("rank {rank} answers for memory {memory}, which it was not asked");
        let order = self.under_way.as_mut().filter(|order| order.memory == memory).ok_or_else(wrong)?;
        let attachment = self.memories.get_mut(&memory).ok_or_else(wrong)?;
        let expected = match answer {
            Answer::Attached { .. } => Place::Attaching,
            Answer::Detached => Place::Detaching,
        };
        let has_answered = order.answered.get_mut(rank.index()).ok_or_else(wrong)?;
        if attachment.place != expected || std::mem::replace(has_answered, true) {
            return Err(wrong());
        }
        if let Answer::Attached { error: Some(error) } = answer {
            order.refused = Some(format!("rank {rank}: {error}"));
        }
        if order.answered.contains(&false) {
            return Ok(None);
        }
        let refused = self.under_way.take().and_then(|order| order.refused);
        let (place, outcome) = match (expected, refused) {
            (Place::Detaching, _) => (Place::Nowhere, None),
            (_, Some(reason)) => (Place::Refused, Some(Attachment::Refused(reason))),
            (_, None) => (Place::Attached, Some(Attachment::Attached)),
        };
        attachment.place = place;
        Ok(outcome)
    }

    /// Whether ranks are carrying out an order.
    pub(crate) const fn is_ordering(&self) -> bool {
        self.under_way.is_some()
    }

    /// The memory of the order under way, and the ranks that have not answered it.
    pub(crate) fn unanswered(&self) -> Option<(MemoryId, Vec<Rank>)> {
        let order = self.under_way.as_ref()?;
        let ranks = (0..).zip(&order.answered).filter(|(_, answered)| !**answered);
        Some((order.memory, ranks.map(|(rank, _)| Rank(rank)).collect()))
    }

    /// The next action; without `may_order`, only a release.
    pub(crate) fn poll(&mut self, may_order: bool) -> Option<MemoryAction> {
        let idle = |attachment: &Entry| attachment.is_closing && attachment.segments == 0;
        let mut memories = self.memories.iter();
        let released = memories.find(|(_, memory)| idle(memory) && memory.place == Place::Nowhere);
        if let Some(memory) = released.map(|(memory, _)| *memory) {
            self.memories.remove(&memory);
            return Some(MemoryAction::Release(memory));
        }
        if !may_order || !self.is_serving || self.under_way.is_some() {
            return None;
        }
        let wants = |attachment: &Entry| match attachment.place {
            Place::Attached | Place::Refused if idle(attachment) => Some(Place::Detaching),
            Place::Nowhere if !attachment.is_closing => Some(Place::Attaching),
            _ => None,
        };
        let mut memories = self.memories.iter_mut();
        let (memory, attachment, place) = memories
            .find_map(|(memory, attachment)| wants(attachment).map(|place| (*memory, attachment, place)))?;
        attachment.place = place;
        self.under_way = Some(UnderWay { memory, answered: vec![false; self.ranks], refused: None });
        Some(if place == Place::Attaching {
            MemoryAction::Attach(memory)
        } else {
            MemoryAction::Detach(memory)
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
