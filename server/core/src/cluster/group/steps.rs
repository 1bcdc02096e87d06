//! Steps in flight of a generation: launched, completed by every rank, taken in order.

use std::time::Instant;

use bytemuck::Zeroable as _;
use expertd_ipc::{Completion, FormingStep, StagedRows, StepDescriptor};
use expertd_scheduler::{Fault, FaultKind};
use expertd_types::{LayerId, Phase, Rank, Slot, StepId};

use super::Group;
use crate::cluster::fault::channel_fault;
use expertd_shm::ObservedTime;

/// A step that not every rank has completed.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) step: StepId,
    sequence: u64,
    slot: Slot,
    tokens: usize,
    /// Whether rank 0 raises completion words at its end.
    raises: bool,
    /// Number of ranks that run it: the first ones.
    ranks: usize,
    /// `[ranks of the group]`; empty records for those that do not run it.
    pub(super) completions: Vec<Option<Completion>>,
}

/// A completed step.
#[derive(Debug)]
pub(crate) struct StepDone {
    /// Id of the step.
    pub step: StepId,
    /// Rows of the step, all ranks together.
    pub tokens: usize,
    /// `[phases]`: duration on the slowest rank, in nanoseconds.
    pub phase_ns: [u64; Phase::ALL.len()],
    /// `[ranks]`: completion records.
    pub completions: Vec<Completion>,
    /// Whether the ranks were killed before all of them had reported the step's end.
    pub is_after_end: bool,
}

impl StepDone {
    /// The largest [`Completion::computed_ns`] of any rank. It is less than the sum of [`phase_ns`](Self::phase_ns) if one rank
    /// waited for another, because the sum counts the wait twice.
    pub(crate) fn computed_ns(&self) -> u64 {
        self.completions.iter().map(Completion::computed_ns).max().unwrap_or(0)
    }
}

impl Group {
    /// The newest step in flight whose experts phase has ended on every rank.
    pub(crate) fn experts_ended(&self) -> Option<StepId> {
        let has_ended = |step: &&InFlight| step.sequence <= self.channel.experts_done(step.ranks);
        self.in_flight.iter().rev().find(has_ended).map(|step| step.step)
    }

    /// Sets whether ranks ring the bell at the end of an experts phase. Set it while requests wait that could form a step then.
    pub(crate) fn want_early_notice(&self, on: bool) {
        self.channel.set_early_notice(on);
    }

    /// Begins to form a step in `slot`, which no step in flight uses.
    pub(crate) fn begin(&mut self, slot: Slot, top_k: usize) -> FormingStep<'_, '_> {
        self.channel.begin(slot, top_k)
    }

    /// Number of ranks that run steps of a layer: the first ones.
    pub(crate) fn ranks_of(&self, layer: LayerId) -> usize {
        self.config.ranks_of(layer, self.placement.as_ref())
    }

    /// Sends the staged step to the ranks that run it. `raises` says whether rank 0 raises completion words at its end.
    ///
    /// # Errors
    /// If a rank's ring has no room for it.
    pub(crate) fn launch(
        &mut self,
        step: StepId,
        slot: Slot,
        layer: LayerId,
        top_k: usize,
        tokens: usize,
        raises: bool,
    ) -> Result<(), Fault> {
        self.sequence += 1;
        let common = StepDescriptor {
            sequence: self.sequence,
            step: step.0,
            layer: layer.0,
            slot: slot.0,
            tokens: 0,
            segments: 0,
            step_tokens: tokens as u32,
            top_k: top_k as u32,
            ..StepDescriptor::zeroed()
        };
        let ranks = self.ranks_of(layer);
        self.channel.launch(&common, ranks).map_err(channel_fault)?;
        if self.in_flight.is_empty() {
            self.front_time = ObservedTime::start(Instant::now());
        }
        self.in_flight.push_back(InFlight {
            step,
            sequence: self.sequence,
            slot,
            tokens,
            raises,
            ranks,
            completions: (0..self.members.len())
                .map(|rank| (rank >= ranks).then(Completion::zeroed))
                .collect(),
        });
        Ok(())
    }

    /// Takes the oldest step in flight if every rank has completed it.
    pub(crate) fn take_done(&mut self) -> Option<StepDone> {
        if self.in_flight.front()?.completions.iter().any(Option::is_none) {
            return None;
        }
        self.take(0, false)
    }

    /// After the ranks have ended: takes the oldest step in flight whose completion words rank 0 has raised or was about to raise, so that
    /// all its results are written. Steps before it may still be in flight, because a GPU continues with the next step after one that
    /// failed. Completions that never arrived are all zeros.
    pub(crate) fn take_raised(&mut self) -> Option<StepDone> {
        let was_raised = |step: &InFlight| step.raises && self.channel.raised(step.slot) == step.sequence;
        let at = self.in_flight.iter().position(was_raised)?;
        self.take(at, true)
    }

    fn take(&mut self, at: usize, is_after_end: bool) -> Option<StepDone> {
        let step = self.in_flight.remove(at)?;
        self.front_time = ObservedTime::start(Instant::now());
        let filled = |completion: Option<Completion>| completion.unwrap_or_else(Completion::zeroed);
        let completions: Vec<Completion> = step.completions.into_iter().map(filled).collect();
        let slowest = |phase: usize| completions.iter().map(|done| done.phase_ns[phase]).max().unwrap_or(0);
        let phase_ns = std::array::from_fn(slowest);
        Some(StepDone { step: step.step, tokens: step.tokens, phase_ns, completions, is_after_end })
    }

    /// Output rows of a completed step.
    pub(crate) fn answer(&self, staged: &StagedRows) -> &[u8] {
        self.channel.answer(staged)
    }

    /// Ids and weights of a completed step.
    #[must_use]
    pub(crate) fn routing(&self, staged: &StagedRows, top_k: usize) -> (&[u8], &[u8]) {
        self.channel.routing(staged, top_k)
    }

    /// Notes that a rank has completed a step.
    pub(super) fn record(&mut self, rank: Rank, completion: Completion) -> Result<(), Fault> {
        if completion.failed != 0 {
            let message = format!("rank {rank}: step failed: {}", completion.text());
            return Err(Fault { kind: FaultKind::Step, message });
        }
        let Some(step) = self.in_flight.iter_mut().find(|s| s.sequence == completion.sequence) else {
            let message = format!(
                "rank {rank} completed step sequence {}, which is not in flight",
                completion.sequence
            );
            return Err(Fault { kind: FaultKind::Channel, message });
        };
        step.completions[rank.index()] = Some(completion);
        Ok(())
    }
}
