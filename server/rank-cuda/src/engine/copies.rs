//! Rows of large steps on their way between staging and device memory: by the copy engines, on streams of their own, so
//! that one step's rows travel while another one computes.

#![allow(unsafe_code, reason = "copies between staging and the device")]

use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event::{self, Event};

use super::step::Staged;
use expertd_ipc::{Segment, StagingAddresses};

/// Set: what a step copies into is filled with NaN before, so that nothing read too early goes unnoticed.
const POISON_ENV: &str = "EXPERTD_CUDA_POISON";

/// A slot's copy of its staging in device memory.
#[derive(Debug)]
struct SlotCopy {
    place: StagingAddresses,
    rows: Buffer<u8>,
    segments: Buffer<u8>,
    in_begin: Event,
    in_end: Event,
    computed: Event,
    out_begin: Event,
    out_end: Event,
}

/// The streams of copies, and what they copy into.
#[derive(Debug)]
pub(super) struct Copies {
    inward: Stream,
    outward: Stream,
    slots: Vec<SlotCopy>,
    poison: bool,
}

impl Copies {
    pub(super) fn new(device: &Device, places: &[StagingAddresses]) -> Result<Self, DeviceError> {
        let slot = |place: &StagingAddresses| {
            Ok::<_, DeviceError>(SlotCopy {
                place: *place,
                rows: Buffer::zeroed(device, place.row_bytes)?,
                segments: Buffer::zeroed(device, place.max_segments * size_of::<Segment>())?,
                in_begin: Event::new(device)?,
                in_end: Event::new(device)?,
                computed: Event::new(device)?,
                out_begin: Event::new(device)?,
                out_end: Event::new(device)?,
            })
        };
        Ok(Copies {
            inward: device.stream()?,
            outward: device.stream()?,
            slots: places.iter().map(slot).collect::<Result<_, _>>()?,
            poison: std::env::var_os(POISON_ENV).is_some(),
        })
    }

    /// Where kernels find what was copied; routing stays where it is, which is little.
    pub(super) fn staged(&self, slot: usize, mapped: Staged) -> Staged {
        let SlotCopy { rows, segments, .. } = &self.slots[slot];
        Staged { rows: rows.address(), segments: segments.address(), ..mapped }
    }

    /// Copies a slot's segments and the first `bytes` of its rows; `compute` waits for them.
    ///
    /// The slot is this rank's, and nothing of an earlier step in it is still under way: its completion was reported.
    pub(super) fn inward(
        &self,
        slot: usize,
        segments: usize,
        bytes: usize,
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
        // SAFETY: within both (asserted); staging is pinned and outlives the engine, and the router lets it be until
        // the step's completion.
        unsafe {
            event::copy_to_device(
                &self.inward,
                copy.segments.address(),
                copy.place.segments.cast(),
                of_segments,
            )?;
            event::copy_to_device(&self.inward, copy.rows.address(), copy.place.rows, bytes)?;
        }
        copy.in_end.record(&self.inward)?;
        copy.in_end.wait_event(compute)
    }

    /// Copies the first `bytes` of a slot's rows back, after what `compute` was given so far.
    pub(super) fn outward(&self, slot: usize, bytes: usize, compute: &Stream) -> Result<(), DeviceError> {
        let copy = &self.slots[slot];
        copy.computed.record(compute)?;
        copy.computed.wait_event(&self.outward)?;
        copy.out_begin.record(&self.outward)?;
        // SAFETY: as above; gaps between segments get back what they were.
        unsafe {
            event::copy_to_host(&self.outward, copy.place.rows.cast_mut(), copy.rows.address(), bytes)?;
        }
        copy.out_end.record(&self.outward)
    }

    /// Whether a slot's rows are back.
    pub(super) fn is_back(&self, slot: usize) -> Result<bool, DeviceError> {
        self.slots[slot].out_end.has_passed()
    }

    /// How long the copies of a slot's last step took, there and back.
    pub(super) fn times(&self, slot: usize) -> Result<(Duration, Duration), DeviceError> {
        let copy = &self.slots[slot];
        Ok((copy.in_end.since(&copy.in_begin)?, copy.out_end.since(&copy.out_begin)?))
    }
}
