//! Conversion of rows whose length the kernels do not support: the host widens and pads them, in pinned memory of its own. Rows in the
//! memory of clients' GPUs stay there; the kernels that copy rows pad those.

#![allow(unsafe_code, reason = "accesses memory that host and device use in turn")]

use super::memories::Memories;
use super::step::SlotSet;
use expertd_ipc::Segment;
use expertd_kernels::params::NARROW_ROWS;
use expertd_rank::convert::{narrow, narrow_shared, widen, widen_shared};
use expertd_rank::segments::{CheckedSegment, RowsPlace};
use expertd_types::DType;

/// Writes the rows of a step to the slot's host buffers as f32, padded with zeros, with their segment table.
///
/// # Safety
/// No step is in flight in the slot.
pub(super) unsafe fn pad(
    segments: &[CheckedSegment],
    staged: &[u8],
    memories: &Memories,
    hidden: usize,
    wide: usize,
    slot: &mut SlotSet,
) {
    let end = segments.last().map_or(0, |segment| segment.rows.end);
    // SAFETY: the device uses the buffer only for a step in flight in the slot.
    let rows = unsafe { slot.rows.as_mut_slice::<f32>(end * wide) };
    for segment in segments {
        let row_bytes = hidden * segment.dtype.size();
        for (index, at) in segment.rows.clone().enumerate() {
            let (values, padding) = rows[at * wide..(at + 1) * wide].split_at_mut(hidden);
            match &segment.place {
                RowsPlace::Staging(bytes) => {
                    widen(&staged[bytes.start + index * row_bytes..][..row_bytes], segment.dtype, values);
                }
                RowsPlace::Memory { memory, input, .. } => {
                    if let Some(bytes) = memories.bytes(*memory) {
                        widen_shared(bytes, input.start + index * row_bytes, segment.dtype, values);
                    }
                }
            }
            padding.fill(0.0);
        }
    }
    // `Segment` has the layout of the kernels' segment.
    // SAFETY: as above.
    let table = unsafe { slot.segments.as_mut_slice::<Segment>(segments.len()) };
    for (entry, segment) in table.iter_mut().zip(segments) {
        let padded = Segment {
            byte_offset: (segment.rows.start * wide * 4) as u64,
            first_row: segment.rows.start as u32,
            rows: segment.rows.len() as u32,
            dtype: DType::F32 as u32,
            flags: if segment.gated { 0 } else { Segment::GIVEN_ROUTING }
                | if segment.shared { Segment::SHARED_EXPERTS } else { 0 },
            memory: Segment::STAGING,
            output_offset: 0,
            reserved: 0,
        };
        *entry = on_device(segment, memories, padded).unwrap_or(padded);
    }
}

/// The entry of a segment whose rows lie in the memory of a client's GPU; `padded` is its entry after padding on the host.
fn on_device(segment: &CheckedSegment, memories: &Memories, padded: Segment) -> Option<Segment> {
    let RowsPlace::Memory { memory, input, output } = &segment.place else { return None };
    let address = memories.device_address(*memory)?;
    Some(Segment {
        byte_offset: address + input.start as u64,
        output_offset: address + output.start as u64,
        dtype: segment.dtype as u32,
        flags: padded.flags | NARROW_ROWS,
        memory: memory.0,
        ..padded
    })
}

/// Narrows the result rows of a step from the slot's host buffer to their places, without their padding.
///
/// # Safety
/// No step is in flight in the slot.
pub(super) unsafe fn unpad(
    segments: &[CheckedSegment],
    staged: &mut [u8],
    memories: &Memories,
    hidden: usize,
    wide: usize,
    slot: &mut SlotSet,
) {
    let end = segments.last().map_or(0, |segment| segment.rows.end);
    // SAFETY: the device uses the buffer only for a step in flight in the slot.
    let rows = unsafe { slot.rows.as_mut_slice::<f32>(end * wide) };
    for segment in segments {
        let row_bytes = hidden * segment.dtype.size();
        for (index, at) in segment.rows.clone().enumerate() {
            let values = &rows[at * wide..][..hidden];
            match &segment.place {
                RowsPlace::Staging(bytes) => {
                    let row = &mut staged[bytes.start + index * row_bytes..][..row_bytes];
                    narrow(values, segment.dtype, row);
                }
                RowsPlace::Memory { memory, output, .. } => {
                    if let Some(bytes) = memories.bytes(*memory) {
                        narrow_shared(values, segment.dtype, bytes, output.start + index * row_bytes);
                    }
                }
            }
        }
    }
}
