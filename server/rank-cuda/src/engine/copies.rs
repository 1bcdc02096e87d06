//! Copies of the rows of large steps between staging and device memory. The copy engines run them on streams of their own,
//! so that one step's rows are copied while another step computes.

#![allow(unsafe_code, reason = "copies between staging and the device")]

use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event::{self, Event};

use super::memories::{ClientCopy, Memories};
use super::parts::{PartEvents, Parts};
use super::step::StagedAddresses;
use expertd_ipc::{Segment, StagingAddresses};
use expertd_rank::segments::{CheckedSegment, RowsPlace};
use expertd_types::DType;

/// Largest number of copies in each direction of a step whose rows travel unchanged; each costs the host microseconds.
const MAX_COPIES: usize = 16;

/// Device memory for the rows and segments in a slot's staging, and the events of their copies.
#[derive(Debug)]
struct SlotCopy {
    staging: StagingAddresses,
    rows: Buffer<u8>,
    segments: Buffer<u8>,
    in_begin: Event,
    in_end: Event,
    computed: Event,
    out_begin: Event,
    out_end: Event,
    combined: PartEvents,
}

/// The rows of a step that travel unchanged: their copies, and where kernels read rows and write results.
pub(super) struct UnchangedRows<'a> {
    /// In the order of rows; [`ClientCopy::at`] is the offset in both buffers.
    pub(super) copies: &'a [ClientCopy],
    pub(super) row_bytes: usize,
    /// bf16 `[max_tokens, hidden]`.
    pub(super) tokens: &'a Buffer<u16>,
    /// Results, of the same shape.
    pub(super) out: &'a Buffer<u32>,
}

impl UnchangedRows<'_> {
    /// The copies of the rows from `first` up to `end`.
    fn between(&self, first: u32, end: u32) -> impl Iterator<Item = ClientCopy> {
        let (first, end) = (first as usize * self.row_bytes, end as usize * self.row_bytes);
        self.copies.iter().filter_map(move |copy| copy.clip(first..end))
    }

    /// The row after the last one.
    fn end(&self) -> u32 {
        self.copies.last().map_or(0, |copy| ((copy.at + copy.bytes) / self.row_bytes) as u32)
    }

    /// Size of the copied part of each buffer, in bytes.
    fn bytes(&self) -> usize {
        let bytes = self.copies.last().map_or(0, |copy| copy.at + copy.bytes);
        assert!(bytes <= self.tokens.len() * 2 && bytes <= self.out.len() * 4, "checked with the descriptor");
        bytes
    }
}

/// The copies that carry a step's rows unchanged; `None` if some row is not bf16 or lies on a GPU, or if there are too many copies. Rows
/// have `row_bytes` bytes, and the staging's row area begins at `staged`.
pub(super) fn unchanged(
    segments: &[CheckedSegment],
    memories: &Memories,
    staged: *const u8,
    row_bytes: usize,
) -> Option<Vec<ClientCopy>> {
    let mut copies: Vec<ClientCopy> = Vec::new();
    for segment in segments {
        if segment.dtype != DType::Bf16 {
            return None;
        }
        let (input, output, bytes) = match &segment.place {
            RowsPlace::Staging(bytes) => {
                let rows = staged.wrapping_add(bytes.start);
                (rows, rows.cast_mut(), bytes.len())
            }
            RowsPlace::Memory { memory, input, output } => {
                let memory = memories.bytes(*memory)?.as_ptr();
                (
                    memory.wrapping_add(input.start).cast_const(),
                    memory.wrapping_add(output.start),
                    input.len(),
                )
            }
        };
        let copy = ClientCopy { input, output, at: segment.rows.start * row_bytes, bytes };
        if let Some(last) = copies.last_mut().filter(|last| last.is_followed_by(&copy)) {
            last.bytes += bytes;
        } else if bytes != 0 {
            if copies.len() == MAX_COPIES {
                return None;
            }
            copies.push(copy);
        }
    }
    Some(copies)
}

/// The streams of copies, and the device memory of each slot.
#[derive(Debug)]
pub(super) struct Copies {
    inward: Stream,
    outward: Stream,
    slots: Vec<SlotCopy>,
    /// Whether a slot's memory is filled with NaN before each copy.
    poison: bool,
}

impl Copies {
    pub(super) fn new(
        device: &Device,
        places: &[StagingAddresses],
        poison: bool,
    ) -> Result<Self, DeviceError> {
        let slot = |staging: &StagingAddresses| {
            Ok::<_, DeviceError>(SlotCopy {
                staging: *staging,
                rows: Buffer::zeroed(device, staging.row_bytes)?,
                segments: Buffer::zeroed(device, staging.max_segments * size_of::<Segment>())?,
                in_begin: Event::new(device)?,
                in_end: Event::new(device)?,
                computed: Event::new(device)?,
                out_begin: Event::new(device)?,
                out_end: Event::new(device)?,
                combined: PartEvents::new(device)?,
            })
        };
        Ok(Copies {
            inward: device.stream()?,
            outward: device.stream()?,
            slots: places.iter().map(slot).collect::<Result<_, _>>()?,
            poison,
        })
    }

    /// Replaces the addresses of rows and segments by those of their copies. Kernels read routing, which is small, from staging.
    pub(super) fn staged(&self, slot: usize, mapped: StagedAddresses) -> StagedAddresses {
        let SlotCopy { rows, segments, .. } = &self.slots[slot];
        StagedAddresses { rows: rows.address(), segments: segments.address(), ..mapped }
    }

    /// Copies a slot's segments, the first `bytes` of its rows, and the rows of `clients`; `compute` waits for them.
    ///
    /// No earlier step is running in the slot: its completion was reported.
    pub(super) fn inward(
        &self,
        slot: usize,
        segments: usize,
        bytes: usize,
        clients: &[ClientCopy],
        compute: &Stream,
    ) -> Result<(), DeviceError> {
        let copy = &self.slots[slot];
        if self.poison {
            // SAFETY: the slot's own memory, which no kernel uses before `in_end`.
            unsafe { event::fill(&self.inward, copy.rows.address(), 0xff, copy.rows.len())? };
        }
        copy.in_begin.record(&self.inward)?;
        let of_segments = segments * size_of::<Segment>();
        assert!(
            of_segments <= copy.segments.len() && bytes <= copy.rows.len(),
            "checked with the descriptor"
        );
        // SAFETY: both copies are within source and destination (asserted); staging is pinned and outlives the engine, and the
        // router does not write it before the step's completion.
        unsafe {
            event::copy_to_device(
                &self.inward,
                copy.segments.address(),
                copy.staging.segments.cast(),
                of_segments,
            )?;
            event::copy_to_device(&self.inward, copy.rows.address(), copy.staging.rows, bytes)?;
        }
        for client in clients {
            assert!(client.at + client.bytes <= copy.rows.len(), "placed within the rows");
            // SAFETY: within the slot's rows (asserted) and within a registered memory, which stays registered while the step
            // runs. Its client may write it meanwhile, which changes the numbers that are copied and nothing else.
            unsafe {
                let to = copy.rows.address() + client.at as u64;
                event::copy_to_device(&self.inward, to, client.input, client.bytes)?;
            }
        }
        copy.in_end.record(&self.inward)?;
        copy.in_end.wait_event(compute)
    }

    /// Copies the first `bytes` of a slot's rows and the results of `clients` back, after the work that `compute` has so far.
    pub(super) fn outward(
        &self,
        slot: usize,
        bytes: usize,
        clients: &[ClientCopy],
        compute: &Stream,
    ) -> Result<(), DeviceError> {
        let copy = &self.slots[slot];
        copy.computed.record(compute)?;
        copy.computed.wait_event(&self.outward)?;
        copy.out_begin.record(&self.outward)?;
        // SAFETY: as above; bytes between segments are written back unchanged.
        unsafe {
            event::copy_to_host(&self.outward, copy.staging.rows.cast_mut(), copy.rows.address(), bytes)?;
        }
        for client in clients {
            // SAFETY: as in `inward`.
            unsafe {
                let from = copy.rows.address() + client.at as u64;
                event::copy_to_host(&self.outward, client.output, from, client.bytes)?;
            }
        }
        copy.out_end.record(&self.outward)
    }

    /// Copies the rows of a step that travel unchanged. [`arrived`](Self::arrived) says when they are on the device. `is_alone`: no
    /// other step is in flight, so that `compute` is idle until then.
    ///
    /// Results are cleared first, because they are copied out even if a fault keeps combine from writing them, and must not be those of an
    /// earlier step's client then.
    ///
    /// No earlier step is running in the slot: its completion was reported.
    pub(super) fn inward_unchanged(
        &self,
        slot: usize,
        rows: &UnchangedRows<'_>,
        is_alone: bool,
        compute: &Stream,
    ) -> Result<(), DeviceError> {
        let copy = &self.slots[slot];
        let bytes = rows.bytes();
        let clearing = if is_alone { compute } else { &self.inward };
        let results = if self.poison { 0xff } else { 0 };
        // SAFETY: the slot's own memory of at least `bytes` bytes (asserted). Its last results were copied out, and the kernels of this
        // step follow on `compute`, which waits for `inward` before the gate.
        unsafe { event::fill(clearing, rows.out.address(), results, bytes)? };
        if self.poison {
            // SAFETY: as above; no kernel reads the rows before the copies have ended.
            unsafe { event::fill(&self.inward, rows.tokens.address(), 0xff, bytes)? };
        }
        copy.in_begin.record(&self.inward)?;
        for part in rows.copies {
            // SAFETY: within `tokens` (asserted above) and within staging or a registered memory, which stay registered while
            // the step runs. A client may write its memory meanwhile, which changes the numbers that are copied and nothing else.
            unsafe {
                let to = rows.tokens.address() + part.at as u64;
                event::copy_to_device(&self.inward, to, part.input, part.bytes)?;
            }
        }
        copy.in_end.record(&self.inward)
    }

    /// The rows that [`inward_unchanged`](Self::inward_unchanged) copies last are on the device.
    pub(super) fn arrived(&self, slot: usize) -> &Event {
        &self.slots[slot].in_end
    }

    /// Copies the results of a step whose rows travel unchanged: those of each part when it is complete, or all after the work that
    /// `compute` has so far.
    pub(super) fn outward_unchanged(
        &self,
        slot: usize,
        rows: &UnchangedRows<'_>,
        parts: Option<Parts<'_>>,
        compute: &Stream,
    ) -> Result<(), DeviceError> {
        let copy = &self.slots[slot];
        rows.bytes();
        if parts.is_none() {
            copy.computed.record(compute)?;
            copy.computed.wait_event(&self.outward)?;
            copy.out_begin.record(&self.outward)?;
        }
        let mut first = 0;
        for (index, &end) in parts.map_or(&[rows.end()][..], |parts| parts.ends).iter().enumerate() {
            if parts.is_some() {
                copy.combined.of(index).wait_event(&self.outward)?;
            }
            for part in rows.between(first, end) {
                // SAFETY: as in `inward_unchanged`, for `out`.
                unsafe {
                    let from = rows.out.address() + part.at as u64;
                    event::copy_to_host(&self.outward, part.output, from, part.bytes)?;
                }
            }
            first = end;
        }
        copy.out_end.record(&self.outward)
    }

    /// The events of the parts of a slot's step.
    pub(super) fn combined(&self, slot: usize) -> &PartEvents {
        &self.slots[slot].combined
    }

    /// The beginning of a slot's row area in staging.
    pub(super) fn staged_rows(&self, slot: usize) -> *const u8 {
        self.slots[slot].staging.rows
    }

    /// Size of a slot's rows on the device, in bytes.
    pub(super) fn row_bytes(&self, slot: usize) -> usize {
        self.slots[slot].rows.len()
    }

    /// Whether a slot's rows are back on the host.
    pub(super) fn is_back(&self, slot: usize) -> Result<bool, DeviceError> {
        self.slots[slot].out_end.has_passed()
    }

    /// Durations of the copies of a slot's last step: to the device, and back. If the step was cut into `parts` parts,
    /// copies that run beside combine do not count.
    pub(super) fn times(&self, slot: usize, parts: usize) -> Result<(Duration, Duration), DeviceError> {
        let copy = &self.slots[slot];
        let out_begin = match parts {
            0 => &copy.out_begin,
            parts => copy.combined.of(parts - 1),
        };
        Ok((copy.in_end.since(&copy.in_begin)?, copy.out_end.since(out_begin)?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ROW_BYTES: usize = 16;

    fn segment(first: usize, rows: usize, staged_at: usize, dtype: DType) -> CheckedSegment {
        CheckedSegment {
            dtype,
            rows: first..first + rows,
            place: RowsPlace::Staging(staged_at..staged_at + rows * ROW_BYTES),
            gated: true,
            shared: false,
        }
    }

    fn copies_of(segments: &[CheckedSegment]) -> Option<Vec<(usize, usize, usize)>> {
        let area = [0_u8; 4096];
        let copies = unchanged(segments, &Memories::new(false), area.as_ptr(), ROW_BYTES)?;
        let staged = |copy: &ClientCopy| copy.input as usize - area.as_ptr() as usize;
        assert!(copies.iter().all(|copy| copy.input == copy.output.cast_const()));
        Some(copies.iter().map(|copy| (staged(copy), copy.at, copy.bytes)).collect())
    }

    #[test]
    fn rows_that_follow_one_another_at_both_places_are_one_copy() {
        let bf16 = DType::Bf16;
        let adjacent = [segment(0, 2, 0, bf16), segment(2, 3, 32, bf16)];
        assert_eq!(copies_of(&adjacent), Some(vec![(0, 0, 80)]));
        let apart = [segment(0, 2, 0, bf16), segment(2, 0, 64, bf16), segment(2, 3, 64, bf16)];
        assert_eq!(copies_of(&apart), Some(vec![(0, 0, 32), (64, 32, 48)]));
        assert_eq!(copies_of(&[]), Some(vec![]));
        assert_eq!(copies_of(&[segment(0, 2, 0, bf16), segment(2, 1, 32, DType::F16)]), None);
        let many: Vec<_> = (0..=MAX_COPIES).map(|i| segment(i, 1, 32 * i, bf16)).collect();
        assert_eq!(copies_of(&many), None);
        assert_eq!(copies_of(&many[1..]).unwrap().len(), MAX_COPIES);
    }

    #[test]
    fn copies_are_cut_at_the_ends_of_parts() {
        let area = [0_u8; 256];
        let input = area.as_ptr();
        let copy = ClientCopy { input, output: input.cast_mut(), at: 32, bytes: 64 };
        let cut =
            |range| copy.clip(range).map(|part| (part.input as usize - input as usize, part.at, part.bytes));
        assert_eq!(cut(0..32), None);
        assert_eq!(cut(0..48), Some((0, 32, 16)));
        assert_eq!(cut(48..200), Some((16, 48, 48)));
        assert_eq!(cut(96..200), None);
    }
}
