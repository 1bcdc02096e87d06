//! Attachments beside a model of ranks, steps and clients.

use std::collections::{BTreeSet, VecDeque};

use proptest::prelude::*;

use super::*;

const ATTACHED: Answer = Answer::Attached { error: None };

fn refusal() -> Answer {
    Answer::Attached { error: Some("no room".into()) }
}

fn answer_all(table: &mut Attachments, memory: u32, answer: Answer) -> Option<Attachment> {
    let answers = (0..2).map(|rank| table.answered(Rank(rank), MemoryId(memory), answer.clone()).unwrap());
    answers.last().unwrap()
}

#[test]
fn a_memory_is_attached_from_the_last_answer_until_its_last_step_ends() {
    let mut table = Attachments::new(2);
    let memory = MemoryId(1);
    table.open(memory);
    assert_eq!(table.poll(true), None, "no rank takes orders yet");
    table.begin_generation();
    assert_eq!(table.poll(true), Some(MemoryAction::Attach(memory)));
    assert_eq!(table.answered(Rank(0), memory, ATTACHED), Ok(None));
    assert!(!table.is_attached(memory) && table.are_awaited());
    assert_eq!(table.answered(Rank(1), memory, ATTACHED), Ok(Some(Attachment::Attached)));
    assert!(table.is_attached(memory) && !table.are_awaited());
    table.launched(memory);
    table.close(memory);
    assert!(table.is_attached(memory), "the step in flight has it");
    assert_eq!(table.poll(true), None, "a step in flight names it");
    table.ended(memory);
    assert_eq!(table.poll(true), Some(MemoryAction::Detach(memory)));
    assert_eq!(answer_all(&mut table, 1, Answer::Detached), None);
    assert_eq!((table.poll(true), table.poll(true)), (Some(MemoryAction::Release(memory)), None));
}

#[test]
fn a_new_generation_gets_every_open_memory() {
    let mut table = Attachments::new(2);
    table.begin_generation();
    for memory in [1, 2, 3] {
        table.open(MemoryId(memory));
        assert_eq!(table.poll(true), Some(MemoryAction::Attach(MemoryId(memory))));
        answer_all(&mut table, memory, ATTACHED);
    }
    table.launched(MemoryId(2));
    table.close(MemoryId(2));
    assert_eq!(table.held_by_ranks().count(), 3);
    table.end_generation();
    assert_eq!(table.held_by_ranks().count(), 0);
    assert_eq!(table.poll(true), Some(MemoryAction::Release(MemoryId(2))));
    assert_eq!(table.poll(true), None);
    table.begin_generation();
    for memory in [1, 3] {
        assert_eq!(table.poll(true), Some(MemoryAction::Attach(MemoryId(memory))));
        answer_all(&mut table, memory, ATTACHED);
    }
}

#[test]
fn a_refused_memory_is_detached_when_its_client_goes() {
    let mut table = Attachments::new(2);
    table.begin_generation();
    table.open(MemoryId(1));
    table.poll(true);
    table.answered(Rank(1), MemoryId(1), refusal()).unwrap();
    let outcome = table.answered(Rank(0), MemoryId(1), ATTACHED).unwrap();
    assert_eq!(outcome, Some(Attachment::Refused("rank 1: no room".into())));
    assert!(!table.is_attached(MemoryId(1)) && table.poll(true).is_none());
    table.close(MemoryId(1));
    assert_eq!(table.poll(true), Some(MemoryAction::Detach(MemoryId(1))));
}

#[test]
fn a_generation_waits_for_memories_that_were_open_when_its_ranks_were_ready() {
    let mut table = Attachments::new(2);
    table.open(MemoryId(1));
    table.begin_generation();
    table.open(MemoryId(2));
    assert_eq!(table.poll(true), Some(MemoryAction::Attach(MemoryId(1))));
    assert!(table.are_awaited());
    answer_all(&mut table, 1, ATTACHED);
    assert!(!table.are_awaited());
    assert_eq!(table.poll(true), Some(MemoryAction::Attach(MemoryId(2))));
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
    ranks: [(BTreeSet<MemoryId>, VecDeque<MemoryAction>); 2],
    steps: VecDeque<MemoryId>,
    is_serving: bool,
}

impl World {
    fn act(&mut self, table: &mut Attachments) {
        while let Some(action) = table.poll(true) {
            match action {
                MemoryAction::Attach(memory) => {
                    assert!(self.is_serving && self.open.contains(&memory));
                    assert!(
                        self.ranks.iter().all(|(has, orders)| !has.contains(&memory) && orders.is_empty())
                    );
                    self.ranks.iter_mut().for_each(|(_, orders)| orders.push_back(action));
                }
                MemoryAction::Detach(memory) => {
                    assert!(self.is_serving && self.closing.contains(&memory));
                    assert!(!self.steps.contains(&memory), "a step in flight names it");
                    assert!(self.ranks.iter().all(|(_, orders)| orders.is_empty()));
                    self.ranks.iter_mut().for_each(|(_, orders)| orders.push_back(action));
                }
                MemoryAction::Release(memory) => {
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
            Some(MemoryAction::Attach(memory)) => {
                if !refused {
                    has.insert(memory);
                }
                table.answered(number, memory, if refused { refusal() } else { ATTACHED }).unwrap();
            }
            Some(MemoryAction::Detach(memory)) => {
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
                    if let Some(&memory) = all.get(at % all.len().max(1)).filter(|memory| table.is_attached(**memory) && world.open.contains(memory)) {
                        prop_assert!(world.ranks.iter().all(|(has, _)| has.contains(&memory)));
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
