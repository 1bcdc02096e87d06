//! The engine of a CPU rank of a mixed group that is not its source: it has no rows of its own, and computes the experts that it owns for
//! the source's rows.

use std::os::fd::OwnedFd;
use std::time::Duration;

use expertd_compute::experts::cpu::{Workspace, forward};
use expertd_compute::linalg::{AlignedBuffer, for_each_chunk};
use expertd_ipc::control::RankSetup;
use expertd_ipc::{ExpertsNotice, RankStaging, RowCounts, StepDescriptor};
use expertd_rank::{PhaseClock, StepEngine, StepFault, StepReport};
use expertd_shm::{ThreadTeam, faults};
use expertd_tier::{Arrival, TierShape, WireError, WorkerWire};
use expertd_types::{Phase, Rank, Sequence, Slot};
use half::slice::HalfFloatSliceExt;
use rustix::process::Signal;

use super::grouped::GroupedRows;
use super::{EngineParts, count_rows, workspace};
use crate::weights::RankLayer;

/// The engine of a rank beside the source.
pub(super) struct WorkerEngine {
    wire: WorkerWire,
    team: ThreadTeam,
    hidden: usize,
    layers: Vec<Option<RankLayer>>,
    /// `[max_tokens, hidden]`: the rows in f32.
    rows: AlignedBuffer<f32>,
    /// `[max_tokens, hidden]`: the sums, where rows of the wire are padded; otherwise empty.
    out: AlignedBuffer<f32>,
    grouped: GroupedRows,
    workspace: Workspace,
    rank: Rank,
    row_counts: RowCounts,
    spin: Duration,
    /// Longest wait for the source.
    limit: Duration,
}

impl WorkerEngine {
    /// Joins the group whose wire is `wire`.
    pub(super) fn new(setup: &RankSetup, wire: OwnedFd, parts: EngineParts) -> Result<Self, WireError> {
        let EngineParts { team, weights, row_counts, .. } = parts;
        let wire = WorkerWire::join(TierShape::of(&setup.shape), setup.generation, setup.rank, wire)?;
        let (hidden, threads) = (setup.shape.hidden, team.threads());
        let elements = setup.shape.max_tokens_per_rank * hidden;
        Ok(WorkerEngine {
            hidden,
            rows: AlignedBuffer::resident(elements),
            out: AlignedBuffer::resident(if wire.shape().stride() == hidden { 0 } else { elements }),
            grouped: GroupedRows::default(),
            workspace: workspace(&weights.spec, &weights.layers, &setup.shape, threads),
            layers: weights.layers,
            rank: setup.rank,
            row_counts,
            spin: setup.spin,
            limit: setup.step_timeout,
            wire,
            team,
        })
    }
}

/// The faults of tests in the middle of a step: the rank takes long but gives signs of life, or its process stops.
fn inject_faults() {
    if faults::happens("worker-slow") {
        std::thread::sleep(Duration::from_secs(3));
    }
    if faults::happens("worker-stop") {
        let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::STOP);
    }
}

impl StepEngine for WorkerEngine {
    fn begin(
        &mut self,
        step: &StepDescriptor,
        _staging: RankStaging<'_>,
        notice: &ExpertsNotice,
    ) -> Result<Option<StepReport>, StepFault> {
        let mut clock = PhaseClock::start();
        let (hidden, tokens, k) = (self.hidden, step.step_tokens as usize, step.top_k as usize);
        let (slot, sequence) = (Slot(step.slot), Sequence(step.sequence));
        let layer = self.layers.get(step.layer as usize).and_then(Option::as_ref);
        let layer = layer.ok_or(StepFault::Layer(step.layer))?;
        self.wire.begin(slot);
        let arrival = self.wire.wait(slot, sequence, self.spin, self.limit).map_err(StepFault::engine)?;
        clock.end(Phase::Dispatch);
        if arrival == Arrival::Spared {
            notice.experts_ended(step.sequence);
            return Ok(Some(StepReport { phases: clock.phases(), ..StepReport::default() }));
        }

        let stride = self.wire.shape().stride();
        let (incoming, sums) = self.wire.step(slot, sequence, tokens, k).map_err(StepFault::engine)?;
        let rows = &mut self.rows[..tokens * hidden];
        for_each_chunk(Some(&self.team), (rows, hidden), (incoming.rows, stride), |row, sent| {
            sent[..hidden].convert_to_f32_slice(row);
        });
        clock.end(Phase::CopyIn);
        inject_faults();

        self.grouped.fill_mixed((&layer.local, layer.mine.len()), incoming.ids, incoming.weights, k);
        let assignments = self.grouped.assignments();
        let (workspace, team) = (&mut self.workspace, Some(&self.team));
        if stride == hidden {
            forward(layer.kind, &layer.experts, assignments, &[rows], &mut [sums], workspace, team);
        } else {
            let out = &mut self.out[..tokens * hidden];
            forward(layer.kind, &layer.experts, assignments, &[rows], &mut [out], workspace, team);
            let pairs = sums.chunks_exact_mut(stride).zip(self.out.chunks_exact(hidden));
            pairs.for_each(|(sum, out)| sum[..hidden].copy_from_slice(out));
        }
        let expert_rows = assignments.rows.len();
        self.wire.finish(slot, sequence);
        notice.experts_ended(step.sequence);
        clock.end(Phase::Experts);
        count_rows(&self.row_counts, self.rank, step.layer, &layer.mine, &self.grouped);
        Ok(Some(StepReport {
            phases: clock.phases(),
            received_rows: tokens,
            expert_rows,
            ..StepReport::default()
        }))
    }
}
