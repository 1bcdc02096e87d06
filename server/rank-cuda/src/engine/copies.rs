//! Copies of the rows of large steps between staging and device memory. The copy engines run them on streams of their own,
//! so that one step's rows are copied while another step computes.

#![allow(unsafe_code, reason = "copies between staging and the device")]

use std::time::Duration;

use expertd_kernels::device::{Buffer, Device, DeviceError, Stream};
use expertd_kernels::event::{self, Event};

use super::memories::ClientCopy;
use super::step::StagedAddresses;
use expertd_ipc::{Segment, StagingAddresses};

/// If this variable is set, a slot's rows on the device are filled with NaN before each copy, so that a kernel that reads too early
/// gives a wrong result.
const POISON_ENV: &str = "EXPERTD_CUDA_POISON";

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
}

/// The streams of copies, and the device memory of each slot.
#[derive(Debug)]
pub(super) struct Copies {
    inward: Stream,
    outward: Stream,
    slots: Vec<SlotCopy>,
    poison: bool,
}

impl Copies {
    pub(super) fn new(device: &Device, places: &[StagingAddresses]) -> Result<Self, DeviceError> {
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
            })
        };
        Ok(Copies {
            inward: device.stream()?,
            outward: device.stream()?,
            slots: places.iter().map(slot).collect::<Result<_, _>>()?,
            poison: std::env::var_os(POISON_ENV).is_some(),
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

    /// Size of a slot's rows on the device, in bytes.
    pub(super) fn row_bytes(&self, slot: usize) -> usize {
        self.slots[slot].rows.len()
    }

    /// Whether a slot's rows are back on the host.
    pub(super) fn is_back(&self, slot: usize) -> Result<bool, DeviceError> {
        self.slots[slot].out_end.has_passed()
    }

    /// Durations of the copies of a slot's last step: to the device, and back.
    pub(super) fn times(&self, slot: usize) -> Result<(Duration, Duration), DeviceError> {
        let copy = &self.slots[slot];
        Ok((copy.in_end.since(&copy.in_begin)?, copy.out_end.since(&copy.out_begin)?))
    }
}
