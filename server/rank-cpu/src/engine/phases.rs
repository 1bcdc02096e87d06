//! The phases of a step that compute or copy rows.

use std::ops::Range;

use expertd_compute::experts::cpu::{Workspace, forward, forward_one};
use expertd_compute::gate::GateScratch;
use expertd_ipc::RankStaging;
use expertd_rank::convert::{narrow, narrow_shared, widen, widen_shared};
use expertd_rank::segments::{CheckedSegment, RowsPlace, rows_of};
use expertd_rank::{HostMemories, StepFault};
use expertd_shm::ThreadTeam;

use super::grouped::GroupedRows;
use crate::exchange::ReceivedRows;
use crate::weights::{RankLayer, SharedMlp};

/// A step's rows. While the rank computes they are `[tokens, hidden]` in f32; before and after they lie in segments, each with
/// one type and place.
#[derive(Clone, Copy)]
pub(super) struct StepRows<'a> {
    pub(super) segments: &'a [CheckedSegment],
    pub(super) memories: &'a HostMemories,
    pub(super) hidden: usize,
}

impl<'a> StepRows<'a> {
    /// Widens the rows of all segments into `rows`.
    pub(super) fn copy_in(&self, staged: &[u8], rows: &mut [f32]) {
        for segment in self.segments {
            let to = &mut rows[self.elements(&segment.rows)];
            match &segment.place {
                RowsPlace::Staging(bytes) => widen(&staged[bytes.clone()], segment.dtype, to),
                RowsPlace::Memory { memory, input, .. } => {
                    if let Some(memory) = self.memories.get(*memory) {
                        widen_shared(memory, input.start, segment.dtype, to);
                    }
                }
            }
        }
    }

    /// Narrows the results in `out` to the places of their segments.
    pub(super) fn copy_out(&self, out: &[f32], staged: &mut [u8]) {
        for segment in self.segments {
            let from = &out[self.elements(&segment.rows)];
            match &segment.place {
                RowsPlace::Staging(bytes) => narrow(from, segment.dtype, &mut staged[bytes.clone()]),
                RowsPlace::Memory { memory, output, .. } => {
                    if let Some(memory) = self.memories.get(*memory) {
                        narrow_shared(from, segment.dtype, memory, output.start);
                    }
                }
            }
        }
    }

    /// Routes the rows that came without routing.
    ///
    /// # Errors
    /// If this rank has no gate, or that cannot route them.
    pub(super) fn route(
        &self,
        layer: &mut RankLayer,
        rows: &[f32],
        k: usize,
        staging: &mut RankStaging<'_>,
        scratch: &mut GateScratch,
        team: &ThreadTeam,
    ) -> Result<(), StepFault> {
        for range in self.runs(|segment| segment.gated) {
            let routed = range.start * k..range.end * k;
            let gate = layer.gate.as_mut().ok_or_else(|| StepFault::engine("this rank has no gates"))?;
            gate.route_with(
                &rows[self.elements(&range)],
                Some(&staging.token_ids[range]),
                &mut staging.ids[routed.clone()],
                &mut staging.weights[routed],
                scratch,
                Some(team),
            )
            .map_err(StepFault::engine)?;
        }
        Ok(())
    }

    /// Computes the shared experts of the rows that ask for them. Other rows of `out` keep their values.
    pub(super) fn compute_shared(
        &self,
        shared: &SharedMlp,
        rows: &[f32],
        out: &mut [f32],
        sigmoids: &mut [f32],
        workspace: &mut Workspace,
        team: &ThreadTeam,
    ) {
        for range in self.runs(|segment| segment.shared) {
            let elements = self.elements(&range);
            let rows = &rows[elements.clone()];
            let sigmoids = shared.gate.as_ref().map(|gate| {
                let sigmoids = &mut sigmoids[..range.len()];
                for (sigmoid, row) in sigmoids.iter_mut().zip(rows.chunks_exact(self.hidden)) {
                    *sigmoid = 1.0 / (1.0 + (-dot(row, gate)).exp());
                }
                &*sigmoids
            });
            forward_one(shared.kind, &shared.mlp, sigmoids, rows, &mut out[elements], workspace, Some(team));
        }
    }

    /// Adds the output of the shared experts to the rows that asked for them.
    pub(super) fn add_shared(&self, shared: &[f32], out: &mut [f32]) {
        for range in self.runs(|segment| segment.shared) {
            let elements = self.elements(&range);
            let (out, shared) = (&mut out[elements.clone()], &shared[elements]);
            out.iter_mut().zip(shared).for_each(|(out, shared)| *out += shared);
        }
    }

    /// Runs of neighbouring rows whose segments are `chosen`.
    fn runs(
        &self,
        chosen: impl Fn(&CheckedSegment) -> bool + Copy + 'a,
    ) -> impl Iterator<Item = Range<usize>> + 'a {
        let chunks = self.segments.chunk_by(move |a, b| chosen(a) == chosen(b));
        chunks.filter(move |chunk| chosen(&chunk[0])).map(rows_of)
    }

    const fn elements(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.hidden..rows.end * self.hidden
    }
}

/// Computes this rank's experts on the received rows and writes the partial sums. Returns the number of received rows and that of
/// the rows of all experts.
pub(super) fn compute_received(
    layer: &RankLayer,
    batches: Vec<ReceivedRows<'_>>,
    hidden: usize,
    grouped: &mut GroupedRows,
    workspace: &mut Workspace,
    team: &ThreadTeam,
) -> (usize, usize) {
    grouped.fill(layer, &batches, hidden);
    let received = batches.iter().map(|batch| batch.rows.len() / hidden).sum();
    let (rows, mut out): (Vec<&[f32]>, Vec<&mut [f32]>) =
        batches.into_iter().map(|batch| (batch.rows, batch.partials)).unzip();
    let assignments = grouped.assignments();
    forward(layer.kind, &layer.experts, assignments, &rows, &mut out, workspace, Some(team));
    (received, assignments.rows.len())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    // Eight independent sums let the additions run in parallel.
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}
