//! Which experts of CPU ranks have a copy on the GPU: a cache of experts in *expert slots*, without threads, clocks or memory of a GPU.
//!
//! The user reports what happens and does what is proposed:
//!
//! 1. A step of a layer is launched with the table of that time: [`resident`](SlotCache::resident), then
//!    [`launched`](SlotCache::launched). The rows of experts that the table lacks are computed by CPU ranks; no step waits for a copy.
//! 2. The step has ended, or will never read a slot again: [`ended`](SlotCache::ended). Its rows of experts are counted:
//!    [`observe`](SlotCache::observe).
//! 3. [`propose`](SlotCache::propose) names the copies to begin. An expert that loses its slot leaves the table in this call.
//! 4. Each copy is reported once, when it no longer writes its slot: [`loaded`](SlotCache::loaded) or [`failed`](SlotCache::failed).
//!    A copy may be reported as loaded when it is enqueued if everything that later steps launch is ordered behind it.
//!
//! # Invariants
//!
//! The simulation in `tests/slots` checks the first seven with steps that overlap, copies that come late or fail, and reloads;
//! `tests/allocations.rs` checks the memory of the eighth.
//!
//! 1. *A slot that a copy may write has no reader*: between a proposal and its report no step is in flight that was launched with a
//!    table that names the slot.
//! 2. *A table names only what has been copied*: a slot that it gives for an expert holds that expert, of the weights that are current.
//! 3. An expert has at most one slot, a slot at most one expert. Both are in at most one upload.
//! 4. A layer has at most [`Policy::max_uploads_per_step`] uploads that are proposed or wait for readers of their slot.
//! 5. In any time of t seconds the bytes of proposals are at most t × [`Policy::bytes_per_second`] plus the [burst](SlotCache::burst).
//! 6. *An expert loses its slot only to one with a higher score*, by the factor [`MARGIN`].
//! 7. After [`invalidate`](SlotCache::invalidate) no table names a slot until an upload proposed later is loaded.
//! 8. Memory is allocated by [`new`](SlotCache::new) only. A call takes time proportional to the experts of one layer (`invalidate`: of
//!    all layers).

mod bucket;
mod driver;
mod layer;
mod score;

use std::time::Duration;

use expertd_types::{ExpertId, LayerId, Sequence};

use self::bucket::Bucket;
pub use self::driver::SlotDriver;
use self::layer::{LayerCache, State};

/// Most steps in flight at a time: each has a bit in a word.
pub const MAX_STEPS_IN_FLIGHT: usize = 64;

/// An expert gets the slot of another if its score is more than this times the other's.
pub const MARGIN: f32 = 1.25;

/// Number of an expert slot within its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotIndex(pub u32);

/// The expert slots of a layer.
#[derive(Clone, Debug)]
pub struct LayerSlots {
    /// The layer.
    pub layer: LayerId,
    /// Number of the layer's experts, on all ranks.
    pub experts: usize,
    /// The experts that CPU ranks own.
    pub on_cpus: Vec<ExpertId>,
    /// Number of slots.
    pub slots: usize,
    /// Bytes of a copy.
    pub expert_bytes: u64,
}

/// Limits of uploads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Most uploads of a layer at a time, and therefore in a step.
    pub max_uploads_per_step: usize,
    /// Bytes of uploads per second, of all layers.
    pub bytes_per_second: u64,
}

/// A copy of an expert's weights to a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upload {
    /// The layer.
    pub layer: LayerId,
    /// The expert to copy.
    pub expert: ExpertId,
    /// The slot to write.
    pub slot: SlotIndex,
    /// The expert that has lost the slot, if one had it.
    pub evicts: Option<ExpertId>,
    /// Number of this upload, which no other has.
    number: u64,
}

/// A report that does not fit what the cache has been told before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    /// There is no bit for another step.
    #[error(
        "step {0} is launched while {MAX_STEPS_IN_FLIGHT} steps are in flight, which is the limit; report the end of each step"
    )]
    TooManySteps(Sequence),
    /// An upload was reported that is not in progress.
    #[error(
        "upload {number} of expert {expert} in layer {layer} is reported, but is not in progress; report each upload once"
    )]
    NotInProgress {
        /// Its number.
        number: u64,
        /// Its layer.
        layer: LayerId,
        /// Its expert.
        expert: ExpertId,
    },
}

/// The experts of CPU ranks that have copies on a GPU, and those that are to get one.
#[derive(Debug)]
pub struct SlotCache {
    policy: Policy,
    /// Ascending by layer.
    layers: Vec<LayerCache>,
    bucket: Bucket,
    /// Steps in flight with indices of their layers; the place is the step's bit.
    steps: [Option<(Sequence, usize)>; MAX_STEPS_IN_FLIGHT],
    last_number: u64,
    proposed: Vec<Upload>,
}

impl SlotCache {
    /// A cache with empty slots.
    #[must_use]
    pub fn new(mut layers: Vec<LayerSlots>, policy: Policy) -> SlotCache {
        layers.sort_by_key(|layer| layer.layer);
        let largest = layers.iter().map(|layer| layer.expert_bytes).max().unwrap_or(0);
        let bucket =
            Bucket::new(policy.bytes_per_second, largest.saturating_mul(policy.max_uploads_per_step as u64));
        SlotCache {
            policy,
            layers: layers.into_iter().map(LayerCache::new).collect(),
            bucket,
            steps: [None; MAX_STEPS_IN_FLIGHT],
            last_number: 0,
            proposed: Vec::with_capacity(policy.max_uploads_per_step),
        }
    }

    /// The slots of the experts of `layer`, `[experts]`: the table for its next step. Empty if the layer has no slots.
    #[must_use]
    pub fn resident(&self, layer: LayerId) -> &[Option<SlotIndex>] {
        self.index(layer).map_or(&[], |index| &self.layers[index].table)
    }

    /// Number of changes of the table of `layer`.
    #[must_use]
    pub fn version(&self, layer: LayerId) -> u64 {
        self.index(layer).map_or(0, |index| self.layers[index].version)
    }

    /// Bytes that may be proposed at once after a pause.
    #[must_use]
    pub fn burst(&self) -> u64 {
        self.bucket.burst()
    }

    /// The score of an expert that CPU ranks own: the use that the next step is expected to make of it.
    #[must_use]
    pub fn score(&self, layer: LayerId, expert: ExpertId) -> Option<f32> {
        let layer = &self.layers[self.index(layer)?];
        let place = layer.shape.on_cpus.iter().position(|&other| other == expert)?;
        Some(layer.scores.of(place))
    }

    /// A step is launched with the present table of `layer`.
    ///
    /// # Errors
    /// If [`MAX_STEPS_IN_FLIGHT`] steps have not ended.
    pub fn launched(&mut self, layer: LayerId, step: Sequence) -> Result<(), SlotError> {
        let Some(index) = self.index(layer) else { return Ok(()) };
        let bit = self.steps.iter().position(Option::is_none).ok_or(SlotError::TooManySteps(step))?;
        self.steps[bit] = Some((step, index));
        for slot in &mut self.layers[index].slots {
            if matches!(slot.state, State::Resident { .. }) {
                slot.readers |= 1 << bit;
            }
        }
        Ok(())
    }

    /// A step reads no slot any more. Steps may end in any order.
    pub fn ended(&mut self, step: Sequence) {
        for (bit, place) in self.steps.iter_mut().enumerate() {
            let Some((_, index)) = place.take_if(|(other, _)| *other == step) else { continue };
            self.layers[index].slots.iter_mut().for_each(|slot| slot.readers &= !(1 << bit));
        }
    }

    /// Counts the rows that a step of `layer` had for each of its experts, `[experts]`.
    pub fn observe(&mut self, layer: LayerId, rows_per_expert: &[u32]) {
        let Some(index) = self.index(layer) else { return };
        let LayerCache { shape, scores, .. } = &mut self.layers[index];
        scores.observe(
            shape.on_cpus.iter().map(|expert| rows_per_expert.get(expert.index()).copied().unwrap_or(0)),
        );
    }

    /// Begins with what is known of the use of experts, such as rows counted by an earlier service: `[experts]`, in any unit.
    pub fn seed(&mut self, layer: LayerId, rows_per_expert: &[u64]) {
        let Some(index) = self.index(layer) else { return };
        let LayerCache { shape, scores, .. } = &mut self.layers[index];
        scores.seed(
            shape.on_cpus.iter().map(|expert| rows_per_expert.get(expert.index()).copied().unwrap_or(0)),
        );
    }

    /// The uploads of `layer` to begin at the time `now`, which counts from any fixed moment.
    pub fn propose(&mut self, layer: LayerId, now: Duration) -> &[Upload] {
        self.proposed.clear();
        self.bucket.fill(now);
        if let Some(index) = self.index(layer) {
            self.plan(index);
            self.begin(index);
        }
        &self.proposed
    }

    /// An upload is complete: the layer's next step finds the expert in its slot.
    ///
    /// # Errors
    /// If it is not in progress.
    pub fn loaded(&mut self, upload: Upload) -> Result<(), SlotError> {
        let (layer, is_current) = self.report(upload)?;
        if is_current {
            let expert = layer.place_of(upload.expert);
            layer.slots[upload.slot.0 as usize].state = State::Resident { expert };
            layer.name(upload.expert, Some(upload.slot));
        }
        Ok(())
    }

    /// An upload has ended without a copy, and writes its slot no more.
    ///
    /// # Errors
    /// If it is not in progress.
    pub fn failed(&mut self, upload: Upload) -> Result<(), SlotError> {
        let (layer, is_current) = self.report(upload)?;
        if is_current {
            let expert = layer.place_of(upload.expert);
            layer.is_placed[expert] = false;
        }
        Ok(())
    }

    /// The weights are replaced: no copy is of use any more. Uploads in progress are still to be reported.
    pub fn invalidate(&mut self) {
        for layer in &mut self.layers {
            for slot in &mut layer.slots {
                slot.state = match slot.state {
                    State::Loading { expert, number, .. } => {
                        State::Loading { expert, number, is_current: false }
                    }
                    State::Empty | State::Planned { .. } | State::Resident { .. } => State::Empty,
                };
            }
            layer.table.fill(None);
            layer.version += 1;
            layer.is_placed.fill(false);
        }
    }

    fn index(&self, layer: LayerId) -> Option<usize> {
        self.layers.binary_search_by_key(&layer, |cache| cache.shape.layer).ok()
    }

    /// Ends an upload; its slot is empty then. Also returns whether it copied current weights.
    fn report(&mut self, upload: Upload) -> Result<(&mut LayerCache, bool), SlotError> {
        let Upload { layer, expert, slot, number, .. } = upload;
        let unknown = SlotError::NotInProgress { number, layer, expert };
        let index = self.index(layer).ok_or(unknown)?;
        let layer = &mut self.layers[index];
        let slot = layer.slots.get_mut(slot.0 as usize).ok_or(unknown)?;
        match slot.state {
            State::Loading { number: other, is_current, .. } if other == number => {
                slot.state = State::Empty;
                Ok((layer, is_current))
            }
            _ => Err(unknown),
        }
    }

    /// Gives slots to experts with high scores.
    fn plan(&mut self, index: usize) {
        let layer = &mut self.layers[index];
        let count = |is: fn(State) -> bool| layer.slots.iter().filter(|slot| is(slot.state)).count();
        let planned = count(|state| matches!(state, State::Planned { .. }));
        let loading = count(|state| matches!(state, State::Loading { .. }));
        let room = self.policy.max_uploads_per_step.saturating_sub(planned + loading);
        if room == 0 {
            return;
        }
        layer.rank(room);
        let mut bytes = planned as u64 * layer.shape.expert_bytes;
        for at in 0..layer.candidates.len().min(layer.victims.len()) {
            let ((score, expert), (victim_score, slot)) = (layer.candidates[at], layer.victims[at]);
            bytes += layer.shape.expert_bytes;
            if score <= victim_score * MARGIN || !self.bucket.has(bytes) {
                break;
            }
            let evicts = match layer.slots[slot].state {
                State::Resident { expert: victim } => {
                    let victim_id = layer.shape.on_cpus[victim];
                    layer.is_placed[victim] = false;
                    layer.name(victim_id, None);
                    Some(victim_id)
                }
                _ => None,
            };
            layer.is_placed[expert] = true;
            layer.slots[slot].state = State::Planned { expert, evicts };
        }
    }

    /// Proposes the planned uploads whose slots have no reader.
    fn begin(&mut self, index: usize) {
        let layer = &mut self.layers[index];
        for (slot, number) in layer.slots.iter_mut().zip(0..) {
            if let State::Planned { expert, evicts } = slot.state
                && slot.readers == 0
                && self.bucket.take(layer.shape.expert_bytes)
            {
                self.last_number += 1;
                slot.state = State::Loading { expert, number: self.last_number, is_current: true };
                self.proposed.push(Upload {
                    layer: layer.shape.layer,
                    expert: layer.shape.on_cpus[expert],
                    slot: SlotIndex(number),
                    evicts,
                    number: self.last_number,
                });
            }
        }
    }
}
