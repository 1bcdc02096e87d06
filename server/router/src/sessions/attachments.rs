//! Which memories of clients the ranks of the present generation have attached, as a state machine without threads, clock or
//! I/O.
//!
//! Ranks carry out one order at a time, all of them the same one, so that registering memory with a device stops them
//! together and few messages wait on their sockets. No call waits for an order: until every rank has attached a memory, the router
//! copies its rows.

use std::collections::BTreeMap;

use expertd_types::{MemoryId, Rank};

/// What the step loop's thread does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send the memory to every rank.
    Attach(MemoryId),
    /// Ask every rank to detach the memory.
    Detach(MemoryId),
    /// Release the memory: no rank has it, and no step names it.
    Release(MemoryId),
}

/// How ranks have carried out an order to attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Steps may name the memory.
    Attached(MemoryId),
    /// A rank cannot use the memory.
    Refused(MemoryId),
}

/// The answer of a rank to an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// To [`Action::Attach`].
    Attached {
        /// Whether the rank cannot use the memory.
        refused: bool,
    },
    /// To [`Action::Detach`].
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
struct Attachment {
    place: Place,
    /// Whether the client is gone.
    is_closing: bool,
    /// Segments of steps in flight that name it.
    segments: usize,
}

#[derive(Debug)]
struct UnderWay {
    memory: MemoryId,
    /// `[ranks]`: whether the rank has answered.
    answered: Vec<bool>,
    refused: bool,
}

/// The memories of open sessions and what ranks have of them.
#[derive(Debug)]
pub(crate) struct Attachments {
    ranks: usize,
    /// Whether there are ranks that take orders.
    is_serving: bool,
    memories: BTreeMap<MemoryId, Attachment>,
    under_way: Option<UnderWay>,
}

impl Attachments {
    pub(crate) const fn new(ranks: usize) -> Self {
        Attachments { ranks, is_serving: false, memories: BTreeMap::new(), under_way: None }
    }

    /// A session was opened.
    pub(crate) fn open(&mut self, memory: MemoryId) {
        let new = Attachment { place: Place::Nowhere, is_closing: false, segments: 0 };
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

    /// Whether a step may name the memory.
    pub(crate) fn is_usable(&self, memory: MemoryId) -> bool {
        let usable = |attachment: &Attachment| attachment.place == Place::Attached && !attachment.is_closing;
        self.memories.get(&memory).is_some_and(usable)
    }

    /// Whether every rank has the memory.
    pub(crate) fn is_attached(&self, memory: MemoryId) -> bool {
        self.memories.get(&memory).is_some_and(|attachment| attachment.place == Place::Attached)
    }

    /// Whether the memory of an open session waits for the answers of ranks.
    pub(crate) fn is_awaited(&self, memory: MemoryId) -> bool {
        let waits = |attachment: &Attachment| {
            !attachment.is_closing && matches!(attachment.place, Place::Nowhere | Place::Attaching)
        };
        self.memories.get(&memory).is_some_and(waits)
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
    ) -> Result<Option<Outcome>, String> {
        let wrong = || format!("rank {rank} answers {answer:?} for memory {memory}, which it was not asked");
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
        order.refused |= answer == Answer::Attached { refused: true };
        if order.answered.contains(&false) {
            return Ok(None);
        }
        let (place, outcome) = match (answer, order.refused) {
            (Answer::Detached, _) => (Place::Nowhere, None),
            (_, true) => (Place::Refused, Some(Outcome::Refused(memory))),
            (_, false) => (Place::Attached, Some(Outcome::Attached(memory))),
        };
        attachment.place = place;
        self.under_way = None;
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
    pub(crate) fn poll(&mut self, may_order: bool) -> Option<Action> {
        let idle = |attachment: &Attachment| attachment.is_closing && attachment.segments == 0;
        let mut memories = self.memories.iter();
        let released = memories.find(|(_, memory)| idle(memory) && memory.place == Place::Nowhere);
        if let Some(memory) = released.map(|(memory, _)| *memory) {
            self.memories.remove(&memory);
            return Some(Action::Release(memory));
        }
        if !may_order || !self.is_serving || self.under_way.is_some() {
            return None;
        }
        let wants = |attachment: &Attachment| match attachment.place {
            Place::Attached | Place::Refused if idle(attachment) => Some(Place::Detaching),
            Place::Nowhere if !attachment.is_closing => Some(Place::Attaching),
            _ => None,
        };
        let mut memories = self.memories.iter_mut();
        let (memory, attachment, place) = memories
            .find_map(|(memory, attachment)| wants(attachment).map(|place| (*memory, attachment, place)))?;
        attachment.place = place;
        self.under_way = Some(UnderWay { memory, answered: vec![false; self.ranks], refused: false });
        Some(if place == Place::Attaching { Action::Attach(memory) } else { Action::Detach(memory) })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use proptest::prelude::*;

    use super::*;

    const ATTACHED: Answer = Answer::Attached { refused: false };

    fn answer_all(table: &mut Attachments, memory: u32, answer: Answer) -> Option<Outcome> {
        let answers = (0..2).map(|rank| table.answered(Rank(rank), MemoryId(memory), answer).unwrap());
        answers.last().unwrap()
    }

    #[test]
    fn a_memory_is_usable_between_the_last_answer_and_the_close() {
        let mut table = Attachments::new(2);
        let memory = MemoryId(1);
        table.open(memory);
        assert_eq!(table.poll(true), None, "no rank takes orders yet");
        table.begin_generation();
        assert_eq!(table.poll(true), Some(Action::Attach(memory)));
        assert_eq!(table.answered(Rank(0), memory, ATTACHED), Ok(None));
        assert!(!table.is_usable(memory) && table.is_awaited(memory));
        assert_eq!(table.answered(Rank(1), memory, ATTACHED), Ok(Some(Outcome::Attached(memory))));
        assert!(table.is_usable(memory) && !table.is_awaited(memory));
        table.launched(memory);
        table.close(memory);
        assert!(!table.is_usable(memory) && table.is_attached(memory));
        assert_eq!(table.poll(true), None, "a step in flight names it");
        table.ended(memory);
        assert_eq!(table.poll(true), Some(Action::Detach(memory)));
        assert_eq!(answer_all(&mut table, 1, Answer::Detached), None);
        assert_eq!((table.poll(true), table.poll(true)), (Some(Action::Release(memory)), None));
    }

    #[test]
    fn a_new_generation_gets_every_open_memory() {
        let mut table = Attachments::new(2);
        table.begin_generation();
        for memory in [1, 2, 3] {
            table.open(MemoryId(memory));
            assert_eq!(table.poll(true), Some(Action::Attach(MemoryId(memory))));
            answer_all(&mut table, memory, ATTACHED);
        }
        table.launched(MemoryId(2));
        table.close(MemoryId(2));
        assert_eq!(table.held_by_ranks().count(), 3);
        table.end_generation();
        assert_eq!(table.held_by_ranks().count(), 0);
        assert_eq!(table.poll(true), Some(Action::Release(MemoryId(2))));
        assert_eq!(table.poll(true), None);
        table.begin_generation();
        for memory in [1, 3] {
            assert_eq!(table.poll(true), Some(Action::Attach(MemoryId(memory))));
            answer_all(&mut table, memory, ATTACHED);
        }
    }

    #[test]
    fn a_refused_memory_is_detached_when_its_client_goes() {
        let mut table = Attachments::new(2);
        table.begin_generation();
        table.open(MemoryId(1));
        table.poll(true);
        table.answered(Rank(1), MemoryId(1), Answer::Attached { refused: true }).unwrap();
        let outcome = table.answered(Rank(0), MemoryId(1), ATTACHED).unwrap();
        assert_eq!(outcome, Some(Outcome::Refused(MemoryId(1))));
        assert!(!table.is_usable(MemoryId(1)) && table.poll(true).is_none());
        table.close(MemoryId(1));
        assert_eq!(table.poll(true), Some(Action::Detach(MemoryId(1))));
    }

    #[test]
    fn answers_to_no_order_are_faults() {
        let mut table = Attachments::new(2);
        table.begin_generation();
        table.open(MemoryId(1));
        assert!(table.answered(Rank(0), MemoryId(1), ATTACHED).is_err(), "before the order");
        table.poll(true);
        assert!(table.answered(Rank(0), MemoryId(1), Answer::Detached).is_err(), "another order");
        assert!(table.answered(Rank(0), MemoryId(2), ATTACHED).is_err(), "another memory");
        assert!(table.answered(Rank(2), MemoryId(1), ATTACHED).is_err(), "another rank");
        table.answered(Rank(0), MemoryId(1), ATTACHED).unwrap();
        assert!(table.answered(Rank(0), MemoryId(1), ATTACHED).is_err(), "twice");
    }

    /// Ranks and steps as an observer sees them.
    #[derive(Default)]
    struct World {
        next: u32,
        open: Vec<MemoryId>,
        closing: BTreeSet<MemoryId>,
        /// Memories that each of two ranks has, and the orders on their way to it.
        ranks: [(BTreeSet<MemoryId>, VecDeque<Action>); 2],
        steps: VecDeque<MemoryId>,
        is_serving: bool,
    }

    impl World {
        fn act(&mut self, table: &mut Attachments) {
            while let Some(action) = table.poll(true) {
                match action {
                    Action::Attach(memory) => {
                        assert!(self.is_serving && self.open.contains(&memory));
                        assert!(
                            self.ranks
                                .iter()
                                .all(|(has, orders)| !has.contains(&memory) && orders.is_empty())
                        );
                        self.ranks.iter_mut().for_each(|(_, orders)| orders.push_back(action));
                    }
                    Action::Detach(memory) => {
                        assert!(self.is_serving && self.closing.contains(&memory));
                        assert!(!self.steps.contains(&memory), "a step in flight names it");
                        assert!(self.ranks.iter().all(|(_, orders)| orders.is_empty()));
                        self.ranks.iter_mut().for_each(|(_, orders)| orders.push_back(action));
                    }
                    Action::Release(memory) => {
                        assert!(self.closing.remove(&memory) && !self.steps.contains(&memory));
                        assert!(self.ranks.iter().all(|(has, _)| !has.contains(&memory)), "a rank has it");
                    }
                }
            }
        }

        fn answer(&mut self, table: &mut Attachments, rank: usize, refused: bool) {
            let (has, orders) = &mut self.ranks[rank];
            let number = Rank(rank as u32);
            match orders.pop_front() {
                Some(Action::Attach(memory)) => {
                    if !refused {
                        has.insert(memory);
                    }
                    table.answered(number, memory, Answer::Attached { refused }).unwrap();
                }
                Some(Action::Detach(memory)) => {
                    has.remove(&memory);
                    table.answered(number, memory, Answer::Detached).unwrap();
                }
                _ => {}
            }
        }

        fn end_generation(&mut self, table: &mut Attachments) {
            self.ranks = Default::default();
            self.steps.clear();
            self.is_serving = false;
            table.end_generation();
        }

        fn close(&mut self, table: &mut Attachments, at: usize) {
            let memory = self.open.remove(at % self.open.len());
            self.closing.insert(memory);
            table.close(memory);
        }
    }

    proptest! {
        /// Opens, closes, steps, answers and faults in any order: steps name only memories that every rank has; nothing is
        /// detached or released too early; and in the end every memory is released.
        #[test]
        fn no_memory_goes_while_it_is_used(events in prop::collection::vec((0_u8..8, any::<usize>()), 1..200)) {
            let (mut table, mut world) = (Attachments::new(2), World::default());
            for (event, at) in events {
                match event {
                    0 => {
                        world.next += 1;
                        world.open.push(MemoryId(world.next));
                        table.open(MemoryId(world.next));
                    }
                    1 if !world.open.is_empty() => world.close(&mut table, at),
                    2 | 3 => world.answer(&mut table, at % 2, at % 10 == 9),
                    4 | 5 => {
                        let all: Vec<MemoryId> = world.open.iter().chain(&world.closing).copied().collect();
                        if let Some(&memory) = all.get(at % all.len().max(1)).filter(|memory| table.is_usable(**memory)) {
                            prop_assert!(world.ranks.iter().all(|(has, _)| has.contains(&memory)));
                            prop_assert!(world.open.contains(&memory));
                            world.steps.push_back(memory);
                            table.launched(memory);
                        }
                    }
                    6 => if let Some(memory) = world.steps.pop_front() {
                        table.ended(memory);
                    },
                    7 if at % 8 == 0 => world.end_generation(&mut table),
                    7 if !world.is_serving => {
                        world.is_serving = true;
                        table.begin_generation();
                    }
                    _ => {}
                }
                world.act(&mut table);
            }
            while !world.open.is_empty() {
                world.close(&mut table, 0);
            }
            while let Some(memory) = world.steps.pop_front() {
                table.ended(memory);
            }
            world.act(&mut table);
            for turn in 0..4 * (world.next as usize + 1) {
                world.answer(&mut table, turn % 2, false);
                world.act(&mut table);
            }
            prop_assert!(world.closing.is_empty() || !world.is_serving);
            world.end_generation(&mut table);
            world.act(&mut table);
            prop_assert!(world.closing.is_empty() && table.memories.is_empty());
        }
    }
}
