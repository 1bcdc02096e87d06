//! Conversion of rows whose length the kernels do not support: the host widens and pads them, in pinned memory of its own.

#![allow(unsafe_code, reason = "accesses memory that host and device take turns at")]

use super::step::SlotSet;
use expertd_ipc::Segment;
use expertd_rank::convert::{narrow, widen};
use expertd_rank::segments::CheckedSegment;
use expertd_types::DType;

/// Writes the rows of a step to the slot's host buffers as f32, padded with zeros, with their segment table.
///
/// # Safety
/// No step is in flight in the slot.
pub(super) unsafe fn pad(
    runs: &[CheckedSegment],
    staged: &[u8],
    hidden: usize,
    wide: usize,
    slot: &mut SlotSet,
) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    // SAFETY: the device uses the buffer only for a step in flight in the slot.
    let rows = unsafe { slot.rows.as_mut_slice::<f32>(end * wide) };
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        for (at, row) in run.rows.clone().zip(staged[run.bytes.clone()].chunks_exact(row_bytes)) {
            let (values, padding) = rows[at * wide..(at + 1) * wide].split_at_mut(hidden);
            widen(row, run.dtype, values);
            padding.fill(0.0);
        }
    }
    // The type has the layout of the kernels' segment.
    // SAFETY: as above.
    let segments = unsafe { slot.segments.as_mut_slice::<Segment>(runs.len()) };
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

/// Narrows the result rows of a step from the slot's host buffer to staging, without their padding.
///
/// # Safety
/// No step is in flight in the slot.
pub(super) unsafe fn unpad(
    runs: &[CheckedSegment],
    staged: &mut [u8],
    hidden: usize,
    wide: usize,
    slot: &mut SlotSet,
) {
    let end = runs.last().map_or(0, |run| run.rows.end);
    // SAFETY: the device uses the buffer only for a step in flight in the slot.
    let rows = unsafe { slot.rows.as_mut_slice::<f32>(end * wide) };
    for run in runs {
        let row_bytes = hidden * run.dtype.size();
        let into = staged[run.bytes.clone()].chunks_exact_mut(row_bytes);
        for (at, row) in run.rows.clone().zip(into) {
            narrow(&rows[at * wide..][..hidden], run.dtype, row);
        }
    }
}
