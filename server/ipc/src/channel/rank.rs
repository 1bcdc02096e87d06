//! A rank's end of its channel.

#![allow(unsafe_code, reason = "makes slices of memory that two processes take turns at")]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::ChannelError;
use super::layout::{ChannelLayout, GroupShape, Staging};
use super::records::{Completion, MAX_RAISES, Raise, Segment, StepDescriptor};
use expertd_shm::region::{PAGE, SharedRegion, SharedSlice};
use expertd_shm::ring::{RingConsumer, RingProducer};
use expertd_shm::wait::{Doorbell, WaitPolicy};
use expertd_types::{DeviceUsage, Rank, Slot};

/// A rank's end of its channel.
#[derive(Debug)]
pub struct RankChannel {
    rank: Rank,
    steps: RingConsumer<StepDescriptor>,
    completions: RingProducer<Completion>,
    heartbeat: SharedSlice<u64>,
    usage: SharedSlice<u64>,
    experts_done: SharedSlice<u64>,
    early_notice: SharedSlice<u32>,
    launched: SharedSlice<u64>,
    /// A step that was popped before the router had pushed it to every rank.
    unlaunched: Option<StepDescriptor>,
    bell: Doorbell,
    router_bell: Doorbell,
    pub(super) slots: Vec<Staging>,
    /// `[slots]`: sequence of the step that was popped for the slot and is not completed.
    in_flight: Vec<Option<u64>>,
    shape: GroupShape,
    region: Arc<SharedRegion>,
    /// Bytes of the region that hold this rank's staging.
    staging: Range<usize>,
}

/// Addresses of a slot's staging in this process; see [`RankStaging`].
#[derive(Clone, Copy, Debug)]
pub struct StagingAddresses {
    /// Segment table.
    pub segments: *const Segment,
    /// Capacity of `segments`, in entries.
    pub max_segments: usize,
    /// The word that gets the step's sequence before its completion words are raised.
    pub raised: *const u64,
    /// Expert ids.
    pub ids: *const i32,
    /// Routing weights.
    pub weights: *const f32,
    /// Token ids.
    pub token_ids: *const i32,
    /// Row area.
    pub rows: *const u8,
    /// Size of the row area, in bytes.
    pub row_bytes: usize,
}

/// A slot's staging while it belongs to the rank.
#[derive(Debug)]
pub struct RankStaging<'a> {
    /// Segment table of the step, in which engines may replace offsets by addresses.
    pub segments: &'a mut [Segment],
    /// Words to raise when every rank has written its results.
    pub raises: &'a [Raise],
    /// The whole row area; a segment's rows begin at its `byte_offset`. The answer overwrites the rows.
    pub rows: &'a mut [u8],
    /// `[tokens, k]`: the caller's ids on entry where given, otherwise to be written by the gate.
    pub ids: &'a mut [i32],
    /// `[tokens, k]`: the caller's weights on entry where given, otherwise to be written by the gate.
    pub weights: &'a mut [f32],
    /// `[tokens]`; only layers that route by token id use them.
    pub token_ids: &'a [i32],
}

impl RankChannel {
    /// Maps the router's memory.
    ///
    /// # Errors
    /// If the descriptor's memory does not have the shape's layout, or another process has used this rank's channel.
    pub fn join(
        shape: &GroupShape,
        rank: Rank,
        fd: OwnedFd,
        router_bell: Doorbell,
    ) -> Result<Self, ChannelError> {
        let places = ChannelLayout::new(shape)?;
        let region = SharedRegion::from_fd(fd, places.bytes)?;
        let link = &places.links[rank.index()];
        let ring = |source| ChannelError::Ring { rank, source };
        Ok(RankChannel {
            rank,
            steps: RingConsumer::new(link.steps.memory(&region)?).map_err(ring)?,
            completions: RingProducer::new(link.completions.memory(&region)?).map_err(ring)?,
            heartbeat: link.heartbeat.view(&region)?,
            usage: link.usage.view(&region)?,
            experts_done: link.experts_done.view(&region)?,
            early_notice: places.early_notice.view(&region)?,
            launched: places.launched.view(&region)?,
            unlaunched: None,
            bell: Doorbell::new(link.bell.view(&region)?),
            router_bell,
            slots: Staging::views(&link.slots, &region)?,
            in_flight: vec![None; link.slots.len()],
            shape: shape.clone(),
            staging: link.staging(),
            region,
        })
    }

    /// Makes the pages of this rank's staging resident. The kernel places a page on the NUMA node of the thread that accesses
    /// it first, so a rank calls this on a thread that is pinned to the rank's cores, before the router accesses the pages.
    ///
    /// # Errors
    /// If there is no memory for the pages.
    pub fn populate(&self) -> Result<(), ChannelError> {
        Ok(self.region.populate(self.staging.start, self.staging.len())?)
    }

    /// The doorbell that the router rings after pushing a step.
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// The heartbeat of this rank, which another thread may drive.
    #[must_use]
    pub fn heartbeat(&self) -> Heartbeat {
        Heartbeat(self.heartbeat.clone())
    }

    /// The place where another thread may report the usage of this rank's device.
    #[must_use]
    pub fn usage(&self) -> UsageReport {
        UsageReport(self.usage.clone())
    }

    /// Address and length, in bytes, of the whole pages that hold this rank's staging of all slots, for devices that need
    /// them pinned. Valid as long as the channel lives.
    #[must_use]
    pub fn staging_pages(&self) -> (*mut u8, usize) {
        let starts = self.slots.iter().map(|slot| slot.segments.as_ptr() as usize);
        let ends = self.slots.iter().map(|slot| slot.rows.as_ptr() as usize + slot.rows.len());
        let first = starts.min().unwrap_or(0) / PAGE * PAGE;
        let last = ends.max().unwrap_or(first).next_multiple_of(PAGE);
        // A region begins on a page boundary and its length is a multiple of pages, so the rounding stays within it.
        (std::ptr::with_exposed_provenance_mut(first), last - first)
    }

    /// Addresses of each slot's staging, for devices that access it directly.
    pub fn staging_addresses(&self) -> Vec<StagingAddresses> {
        let addresses = |slot: &Staging| StagingAddresses {
            segments: slot.segments.as_ptr(),
            max_segments: slot.segments.len(),
            raised: slot.raised.as_ptr(),
            ids: slot.ids.as_ptr(),
            weights: slot.weights.as_ptr(),
            token_ids: slot.token_ids.as_ptr(),
            rows: slot.rows.as_ptr(),
            row_bytes: slot.rows.len(),
        };
        self.slots.iter().map(addresses).collect()
    }

    /// Takes the next step, if there is one that every rank has. Its slot is in flight until [`complete`](Self::complete).
    ///
    /// # Errors
    /// If the ring is broken, the descriptor exceeds the shape, or its slot is in flight.
    pub fn step(&mut self) -> Result<Option<StepDescriptor>, ChannelError> {
        let rank = self.rank;
        if self.unlaunched.is_none() {
            self.unlaunched = self.steps.try_pop().map_err(|source| ChannelError::Ring { rank, source })?;
        }
        let launched =
            |step: &mut StepDescriptor| step.sequence <= self.launched.atomics()[0].load(Ordering::Acquire);
        let Some(step) = self.unlaunched.take_if(launched) else { return Ok(None) };
        let limits = [
            ("slots", step.slot as usize + 1, self.slots.len()),
            ("rows", step.tokens as usize, self.shape.max_tokens_per_rank),
            ("segments", step.segments as usize, self.shape.max_segments),
            ("experts per token", step.top_k as usize, self.shape.max_top_k),
            ("words to raise", step.raises as usize, MAX_RAISES),
        ];
        for (what, needed, capacity) in limits {
            if needed > capacity {
                return Err(ChannelError::Capacity { rank, what, needed, capacity });
            }
        }
        let in_flight = &mut self.in_flight[step.slot as usize];
        if let Some(sequence) = *in_flight {
            return Err(ChannelError::InFlight { rank, slot: Slot(step.slot), sequence });
        }
        *in_flight = Some(step.sequence);
        Ok(Some(step))
    }

    /// The staging of a step that was taken and is not completed.
    ///
    /// # Panics
    /// If the step is not in flight.
    pub fn staging(&mut self, step: &StepDescriptor) -> RankStaging<'_> {
        let slot = step.slot as usize;
        assert_eq!(
            self.in_flight.get(slot),
            Some(&Some(step.sequence)),
            "staging of slot {slot} was requested for an exchange that is not in flight there"
        );
        let staging = &self.slots[slot];
        let (tokens, routed) = (step.tokens as usize, step.tokens as usize * step.top_k as usize);
        // SAFETY: the step was popped and is not completed (asserted), so the slot's staging belongs to this rank alone;
        // the mutable borrow of `self` excludes a second set of slices and a completion while these slices live.
        unsafe {
            RankStaging {
                segments: &mut staging.segments.as_mut_slice()[..step.segments as usize],
                raises: &staging.raises.as_slice()[..step.raises as usize],
                rows: staging.rows.as_mut_slice(),
                ids: &mut staging.ids.as_mut_slice()[..routed],
                weights: &mut staging.weights.as_mut_slice()[..routed],
                token_ids: &staging.token_ids.as_slice()[..tokens],
            }
        }
    }

    /// A handle that reports the end of an experts phase while the step's staging is borrowed.
    #[must_use]
    pub fn notice(&self) -> ExpertsNotice {
        ExpertsNotice {
            done: self.experts_done.clone(),
            wanted: self.early_notice.clone(),
            router_bell: self.router_bell.clone(),
        }
    }

    /// Waits for the next step; returns `None` while `interrupt` is true.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn wait_step(
        &mut self,
        spin: Duration,
        interrupt: &AtomicBool,
    ) -> Result<Option<StepDescriptor>, ChannelError> {
        let bell = self.bell.clone();
        let found = bell.wait_for(WaitPolicy::unlimited(spin), || {
            if interrupt.load(Ordering::Acquire) {
                Some(Ok(None))
            } else {
                self.step().transpose().map(|s| s.map(Some))
            }
        });
        found.unwrap_or(Ok(None))
    }

    /// Returns a step's staging to the router, with the step's result.
    ///
    /// # Errors
    /// If the step is not in flight, or the ring is full or broken.
    pub fn complete(&mut self, completion: &Completion) -> Result<(), ChannelError> {
        let rank = self.rank;
        let Completion { sequence, slot, .. } = *completion;
        match self.in_flight.get_mut(slot as usize) {
            Some(in_flight) if *in_flight == Some(sequence) => *in_flight = None,
            _ => return Err(ChannelError::NotInFlight { rank, slot: Slot(slot), sequence }),
        }
        match self.completions.try_push(completion) {
            Ok(true) => {
                self.router_bell.ring();
                Ok(())
            }
            Ok(false) => Err(ChannelError::Full { rank }),
            Err(source) => Err(ChannelError::Ring { rank, source }),
        }
    }
}

/// Reports the end of experts phases to the router.
#[derive(Clone, Debug)]
pub struct ExpertsNotice {
    done: SharedSlice<u64>,
    wanted: SharedSlice<u32>,
    router_bell: Doorbell,
}

impl ExpertsNotice {
    /// Reports that the experts phases of all exchanges up to `sequence` have ended on this rank. A report for an earlier
    /// exchange than the last one reported has no effect.
    pub fn experts_ended(&self, sequence: u64) {
        self.done.atomics()[0].fetch_max(sequence, Ordering::SeqCst);
        if self.wanted.atomics()[0].load(Ordering::SeqCst) != 0 {
            self.router_bell.ring();
        }
    }
}

/// A counter that shows that a process is alive.
#[derive(Clone, Debug)]
pub struct Heartbeat(SharedSlice<u64>);

impl Heartbeat {
    /// Increments the counter.
    pub fn beat(&self) {
        self.0.atomics()[0].fetch_add(1, Ordering::Relaxed);
    }
}

/// The last reported usage of a rank's device. The words are read and written one by one: a reader may see the memory of one
/// report and the utilisation of the next.
#[derive(Clone, Debug)]
pub struct UsageReport(SharedSlice<u64>);

impl UsageReport {
    /// Replaces the reported usage; `None` if the device no longer reports it.
    pub fn set(&self, usage: Option<DeviceUsage>) {
        let words = usage.map_or_else(Default::default, DeviceUsage::to_words);
        for (word, value) in self.0.atomics().iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
    }
}
