//! Rows whose length the kernels do not take: widened and padded by the host, in pinned memory of its own.

use super::step::SlotSet;
use expertd_ipc::Segment;
use expertd_rank::convert::{narrow, widen};
use expertd_rank::segments::Run;
use expertd_types::DType;

/// Rows of a step as kernels want them: f32, padded with zeros.
pub(super) fn pad(runs: &[Run], staged: &[u8], hidden: usize, wide: usize, slot: &mut SlotSet) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    let rows = slot.rows.as_mut_slice::<f32>(end * wide);
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        for (at, row) in run.rows.clone().zip(staged[run.bytes.clone()].chunks_exact(row_bytes)) {
            let (values, padding) = rows[at * wide..(at + 1) * wide].split_at_mut(hidden);
            widen(row, run.dtype, values);
            padding.fill(0.0);
        }
    }
    // Of the same layout as the kernels' segment.
    let segments = slot.segments.as_mut_slice::<Segment>(runs.len());
    for (segment, run) in segments.iter_mut().zip(runs) {
        *segment = Segment {
            byte_offset: (run.rows.start * wide * 4) as u64,
            first_row: run.rows.start as u32,
            rows: run.rows.len() as u32,
            dtype: DType::F32 as u32,
            flags: if run.gated { 0 } else { Segment::GIVEN_ROUTING }
                | if run.shared { Segment::SHARED_EXPERTS } else { 0 },
        };
    }
}

/// The inverse of [`pad`], for results.
pub(super) fn unpad(runs: &[Run], staged: &mut [u8], hidden: usize, wide: usize, slot: &mut SlotSet) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    let rows = slot.rows.as_mut_slice::<f32>(end * wide);
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        let into = staged[run.bytes.clone()].chunks_exact_mut(row_bytes);
        for (at, row) in run.rows.clone().zip(into) {
            narrow(&rows[at * wide..][..hidden], run.dtype, row);
        }
    }
}
