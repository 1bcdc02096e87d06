//! The slots of one layer.

use expertd_types::ExpertId;

use super::score::Scores;
use super::{LayerSlots, SlotIndex};

/// The life of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Holds nothing of use.
    Empty,
    /// An upload waits until the slot has no reader. It reserves no bandwidth: a layer that is not used any more would keep it.
    Planned { expert: usize, evicts: Option<ExpertId> },
    /// A copy may write the slot. `is_current` is false if the weights have been replaced since.
    Loading { expert: usize, number: u64, is_current: bool },
    /// Holds an expert, which the table names.
    Resident { expert: usize },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertSlot {
    pub(super) state: State,
    /// A bit for each step in flight that was launched with a table that names this slot.
    pub(super) readers: u64,
}

/// Cache of one layer. Experts are numbered by their place in `on_cpus`.
#[derive(Debug)]
pub(super) struct LayerCache {
    pub(super) shape: LayerSlots,
    pub(super) slots: Vec<ExpertSlot>,
    /// `[experts]`, as given to callers.
    pub(super) table: Vec<Option<SlotIndex>>,
    /// Changes of the table.
    pub(super) version: u64,
    pub(super) scores: Scores,
    /// `[on_cpus]`: whether the expert has a slot or is to get one.
    pub(super) is_placed: Vec<bool>,
    /// Scratch memory of proposals: scores with experts, and with slots.
    pub(super) candidates: Vec<(f32, usize)>,
    pub(super) victims: Vec<(f32, usize)>,
}

impl LayerCache {
    pub(super) fn new(mut shape: LayerSlots) -> LayerCache {
        shape.on_cpus.sort_unstable();
        shape.on_cpus.dedup();
        shape.on_cpus.retain(|expert| expert.index() < shape.experts);
        let on_cpus = shape.on_cpus.len();
        let slots = shape.slots.min(on_cpus);
        LayerCache {
            slots: vec![ExpertSlot { state: State::Empty, readers: 0 }; slots],
            table: vec![None; shape.experts],
            version: 0,
            scores: Scores::new(on_cpus),
            is_placed: vec![false; on_cpus],
            candidates: Vec::with_capacity(on_cpus),
            victims: Vec::with_capacity(slots),
            shape,
        }
    }

    pub(super) fn place_of(&self, expert: ExpertId) -> usize {
        self.shape.on_cpus.binary_search(&expert).expect("only experts of CPU ranks are uploaded")
    }

    /// Writes the table.
    pub(super) fn name(&mut self, expert: ExpertId, slot: Option<SlotIndex>) {
        self.table[expert.index()] = slot;
        self.version += 1;
    }

    /// Lists the `room` experts with the highest scores, best first, that have no slot and have been used; and the `room` slots to give
    /// away: empty ones, then those of the experts with the lowest scores.
    pub(super) fn rank(&mut self, room: usize) {
        let LayerCache { slots, scores, is_placed, candidates, victims, .. } = self;
        candidates.clear();
        let unplaced = is_placed.iter().enumerate().filter(|(_, placed)| !**placed);
        candidates.extend(
            unplaced.map(|(expert, _)| (scores.of(expert), expert)).filter(|(score, _)| *score > 0.0),
        );
        victims.clear();
        victims.extend(slots.iter().enumerate().filter_map(|(slot, of)| match of.state {
            // No score is lower.
            State::Empty => Some((0.0, slot)),
            State::Resident { expert } => Some((scores.of(expert), slot)),
            State::Planned { .. } | State::Loading { .. } => None,
        }));
        keep_first(candidates, room, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        keep_first(victims, room, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    }
}

/// Keeps the first `count` entries by `order`, in this order.
fn keep_first(
    entries: &mut Vec<(f32, usize)>,
    count: usize,
    order: impl Fn(&(f32, usize), &(f32, usize)) -> std::cmp::Ordering + Copy,
) {
    if count < entries.len() {
        entries.select_nth_unstable_by(count, order);
        entries.truncate(count);
    }
    entries.sort_unstable_by(order);
}
