//! The engine of a CPU rank that is the source of a mixed group: it has all rows, and computes the experts that it owns, and those in
//! slots, beside the other ranks. In steps of many rows it also computes some or all of the other experts, like a source on a GPU, which
//! copies them; here their weights are read where they lie.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use expertd_compute::experts::cpu::{Workspace, forward};
use expertd_compute::gate::GateScratch;
use expertd_compute::linalg::for_each_chunk;
use expertd_ipc::control::RankSetup;
use expertd_ipc::{ExpertsNotice, RankStaging, RowCounts, StepDescriptor};
use expertd_rank::segments::CheckedSegment;
use expertd_rank::{
    ClientMemory, Failure, HostMemories, PhaseClock, StepEngine, StepFault, StepReport, setup_failure,
};
use expertd_shm::ThreadTeam;
use expertd_tier::{SourceWire, StreamedExperts, TierShape, counts_for_slots, streamed_share, touched_share};
use expertd_types::{ExpertId, ExpertOwners, MemoryId, Phase, Rank, Sequence, Slot};
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::grouped::{GroupedRows, StepExperts};
use super::phases::StepRows;
use super::slots::{Slots, on_cpus};
use super::{EngineParts, StepBuffers, attach_to, count_rows, workspace};
use crate::weights::RankLayer;

/// The engine of the source rank.
pub(super) struct SourceEngine {
    wire: SourceWire,
    team: ThreadTeam,
    hidden: usize,
    layers: Vec<Option<RankLayer>>,
    /// The layers with the experts of all ranks, for steps of many rows ([`StreamedExperts`]).
    whole_layers: Arc<Vec<Option<RankLayer>>>,
    /// `[layers]`: the experts of other ranks.
    on_cpus: Vec<Vec<ExpertId>>,
    stream_rows: usize,
    /// Copies of experts of other ranks.
    slots: Option<Slots>,
    buffers: StepBuffers,
    grouped: GroupedRows,
    workspace: Workspace,
    gate_scratch: GateScratch,
    /// `[max_tokens_per_rank]`: factors of the shared experts' output.
    sigmoids: Vec<f32>,
    rank: Rank,
    row_counts: RowCounts,
    memories: HostMemories,
    spin: Duration,
    /// Longest wait for the other ranks.
    limit: Duration,
}

impl SourceEngine {
    /// Joins the group whose wire is `wire`.
    pub(super) fn new(setup: &RankSetup, wire: OwnedFd, parts: EngineParts) -> Result<Self, Failure> {
        let EngineParts { team, weights, all, row_counts } = parts;
        let wire = SourceWire::join(TierShape::of(&setup.shape), setup.generation, wire);
        let wire = wire.map_err(setup_failure)?;
        let (spec, layers, threads) = (weights.spec, weights.layers, team.threads());
        let whole_layers = Arc::new(whole(all.into_iter().map(|share| share.layers)));
        let on_cpus = on_cpus(&layers, setup.rank);
        let slots = Slots::new(&whole_layers, &on_cpus, row_counts.clone(), setup.slot_bytes);
        Ok(SourceEngine {
            wire,
            hidden: setup.shape.hidden,
            buffers: StepBuffers::new(&spec, &setup.shape),
            grouped: GroupedRows::default(),
            workspace: workspace(&spec, &whole_layers, &setup.shape, threads),
            gate_scratch: GateScratch::new(spec.hidden, threads),
            sigmoids: vec![0.0; setup.shape.max_tokens_per_rank],
            rank: setup.rank,
            row_counts,
            memories: HostMemories::default(),
            spin: setup.spin,
            limit: setup.step_timeout,
            team,
            layers,
            whole_layers,
            on_cpus,
            stream_rows: setup.stream_rows,
            slots: slots.map_err(setup_failure)?,
        })
    }
}

/// The layers of a rank that holds what all ranks hold, of which the first one is the source. An expert is in one share.
fn whole(shares: impl Iterator<Item = Vec<Option<RankLayer>>>) -> Vec<Option<RankLayer>> {
    let join = |mut all: Vec<Option<RankLayer>>, share: Vec<Option<RankLayer>>| {
        for (all, layer) in all.iter_mut().zip(share) {
            let (Some(all), Some(layer)) = (all, layer) else { continue };
            all.mine.extend(layer.mine);
            all.experts.extend(layer.experts);
        }
        all
    };
    let mut layers = shares.reduce(join).unwrap_or_default();
    for layer in layers.iter_mut().flatten() {
        for (index, &expert) in (0..).zip(&layer.mine) {
            layer.local[expert as usize] = index;
        }
        layer.owners = ExpertOwners::new(vec![vec![Rank(0)]; layer.local.len()]);
        layer.is_whole = true;
    }
    layers
}

impl StepEngine for SourceEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let mut clock = PhaseClock::start();
        let mut staging = staging;
        let (hidden, tokens, k) = (self.hidden, step.tokens as usize, step.top_k as usize);
        let (slot, sequence) = (Slot(step.slot), Sequence(step.sequence));
        let layer = self.layers.get_mut(step.layer as usize).and_then(Option::as_mut);
        let layer = layer.ok_or(StepFault::Layer(step.layer))?;
        let rows = &mut self.buffers.rows[..tokens * hidden];
        let out = &mut self.buffers.out[..tokens * hidden];
        let shared_elements = if layer.shared.is_some() { tokens * hidden } else { 0 };
        let shared_out = &mut self.buffers.shared[..shared_elements];

        let (staged_bytes, memories) = (staging.rows.len(), &self.memories);
        let size = |memory| memories.size(memory);
        let segments = CheckedSegment::all(staging.segments, tokens, hidden, staged_bytes, size)?;
        let step_rows = StepRows { segments: &segments, memories, hidden };
        step_rows.copy_in(staging.rows, rows);
        clock.end(Phase::CopyIn);

        step_rows.route(layer, rows, k, &mut staging, &mut self.gate_scratch, &self.team)?;
        clock.end(Phase::Gate);

        let (index, is_split) = (step.layer as usize, !layer.is_whole);
        let mut experts = StepExperts::of(layer, self.rank);
        // In this order, as on a GPU: the step counts as a reader of slots even if it needs none.
        let slot_version = match self.slots.as_mut().filter(|_| is_split) {
            Some(slots) => slots.begin(index, sequence, &mut experts)?,
            None => 0,
        };
        let is_alone = is_split && tokens >= self.stream_rows;
        if is_alone {
            self.wire.spare(slot, sequence);
            let whole = self.whole_layers.get(index).and_then(Option::as_ref);
            experts = StepExperts::of(whole.ok_or(StepFault::Layer(step.layer))?, self.rank);
        } else if let Some(whole) = self.whole_layers[index].as_ref().filter(|_| is_split) {
            let elsewhere = self.on_cpus[index].iter().filter(|id| !experts.has(**id));
            let elsewhere: Vec<ExpertId> = elsewhere.copied().collect();
            let touched = touched_share(tokens, k, whole.local.len());
            let share = streamed_share(tokens, self.stream_rows, touched);
            let streamed = StreamedExperts::new(share, elsewhere.len());
            let streamed = elsewhere.iter().enumerate().filter(|(place, _)| streamed.has(*place));
            streamed.for_each(|(_, id)| experts.add(*id, whole.expert(*id)));
        }
        let needs_others = is_split && !is_alone;
        if needs_others {
            let stride = self.wire.shape().stride();
            self.wire.begin(slot);
            let outgoing = self.wire.outgoing(slot, tokens, k).map_err(StepFault::engine)?;
            let choices = staging.ids.iter().zip(&*staging.weights);
            let sent = choices.map(|(&id, &weight)| experts.sent_id(id, weight));
            outgoing.ids.iter_mut().zip(sent).for_each(|(place, id)| *place = id);
            outgoing.weights.copy_from_slice(staging.weights);
            let places = bytemuck::cast_slice_mut::<u16, bf16>(outgoing.rows);
            for_each_chunk(Some(&self.team), (places, stride), (rows, hidden), |place, row| {
                place[..hidden].convert_from_f32_slice(row);
            });
            self.wire.send(slot, sequence);
        }
        clock.end(Phase::Dispatch);

        if let Some(shared) = &layer.shared {
            let sigmoids = &mut self.sigmoids;
            step_rows.compute_shared(shared, rows, shared_out, sigmoids, &mut self.workspace, &self.team);
        }
        self.grouped.fill_mixed(experts.local(), staging.ids, staging.weights, k);
        let assignments = self.grouped.assignments();
        let (workspace, team) = (&mut self.workspace, Some(&self.team));
        forward(layer.kind, &experts.experts, assignments, &[rows], &mut [out], workspace, team);
        let expert_rows = assignments.rows.len();
        notice.experts_ended(step.sequence);
        clock.end(Phase::Experts);
        count_rows(&self.row_counts, self.rank, step.layer, &experts.numbers, &self.grouped);

        let out = &mut self.buffers.out[..tokens * hidden];
        if needs_others {
            self.wire.wait(slot, sequence, self.spin, self.limit).map_err(StepFault::engine)?;
            let stride = self.wire.shape().stride();
            for worker in 0..self.wire.shape().workers {
                let sums = self.wire.sums(slot, sequence, worker, tokens).map_err(StepFault::engine)?;
                for_each_chunk(Some(&self.team), (out, hidden), (sums, stride), |out, sums| {
                    out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                });
            }
        }
        if layer.shared.is_some() {
            step_rows.add_shared(shared_out, out);
        }
        clock.end(Phase::Combine);

        step_rows.copy_out(out, staging.rows);
        clock.end(Phase::CopyOut);
        let copied_bytes = match self.slots.as_mut().filter(|_| is_split) {
            Some(slots) => slots.ended(index, sequence, counts_for_slots(tokens, self.stream_rows))?,
            None => 0,
        };
        let phases = clock.phases();
        Ok(Some(StepReport { phases, received_rows: tokens, expert_rows, copied_bytes, slot_version }))
    }

    fn attach(&mut self, memory: MemoryId, client: ClientMemory) -> Result<(), String> {
        attach_to(&mut self.memories, memory, client)
    }

    fn detach(&mut self, memory: MemoryId) {
        self.memories.detach(memory);
    }
}
