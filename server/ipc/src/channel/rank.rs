//! A rank's end of its channel.

#![allow(unsafe_code, reason = "copies into and out of memory that two processes take turns on")]

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::region::{PAGE, SharedRegion, SharedSlice};
use super::super::ring::{RingConsumer, RingProducer};
use super::super::wait::{Doorbell, Patience};
use super::ChannelError;
use super::places::{GroupShape, Places, Staging};
use super::records::{Completion, Segment, StepDescriptor};
use expertd_types::Rank;

/// A rank's end of its channel.
#[derive(Debug)]
pub struct RankChannel {
    rank: Rank,
    steps: RingConsumer<StepDescriptor>,
    completions: RingProducer<Completion>,
    heartbeat: SharedSlice<u64>,
    experts_done: SharedSlice<u64>,
    early_notice: SharedSlice<u32>,
    bell: Doorbell,
    router_bell: Doorbell,
    slots: Vec<Staging>,
    shape: GroupShape,
    region: Arc<SharedRegion>,
    /// Bytes of the region that hold this rank's staging.
    staging: Range<usize>,
}

/// Addresses of a slot's staging in this process; see [`RankStaging`].
#[derive(Clone, Copy, Debug)]
pub struct StagingPlace {
    /// The runs of rows.
    pub segments: *const Segment,
    /// Of these there is room for so many.
    pub max_segments: usize,
    /// Expert ids.
    pub ids: *const i32,
    /// Routing weights.
    pub weights: *const f32,
    /// Token ids.
    pub token_ids: *const i32,
    /// Row bytes.
    pub rows: *const u8,
    /// How many.
    pub row_bytes: usize,
}

/// A slot's staging while it is the rank's.
#[derive(Debug)]
pub struct RankStaging<'a> {
    /// The runs of rows.
    pub segments: &'a [Segment],
    /// All row bytes; a segment's begin at its `byte_offset`. Answers go where the rows came from.
    pub rows: &'a mut [u8],
    /// `[tokens, k]`: given ids are here, the gate's go here.
    pub ids: &'a mut [i32],
    /// `[tokens, k]`: given weights are here, the gate's go here.
    pub weights: &'a mut [f32],
    /// `[tokens]`; meaningful for layers that route by token id.
    pub token_ids: &'a [i32],
}

impl RankChannel {
    /// Maps the router's memory.
    ///
    /// # Errors
    /// If the descriptor is not what the shape says, or another process has been here.
    pub fn join(
        shape: &GroupShape,
        rank: Rank,
        fd: OwnedFd,
        router_bell: Doorbell,
    ) -> Result<Self, ChannelError> {
        let places = Places::new(shape)?;
        let region = SharedRegion::from_fd(fd, places.bytes)?;
        let link = &places.links[rank.index()];
        let ring = |source| ChannelError::Ring { rank, source };
        Ok(RankChannel {
            rank,
            steps: RingConsumer::new(link.steps.memory(&region)?).map_err(ring)?,
            completions: RingProducer::new(link.completions.memory(&region)?).map_err(ring)?,
            heartbeat: link.heartbeat.view(&region)?,
            experts_done: link.experts_done.view(&region)?,
            early_notice: places.early_notice.view(&region)?,
            bell: Doorbell::new(link.bell.view(&region)?),
            router_bell,
            slots: Staging::views(&link.slots, &region)?,
            shape: shape.clone(),
            staging: link.staging(),
            region,
        })
    }

    /// Makes the pages of this rank's staging resident. The kernel places a page on the NUMA node of the thread that touches
    /// it first, so a rank calls this on a thread that is pinned to the rank's cores, before the router touches the pages.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn populate(&self) -> Result<(), ChannelError> {
        Ok(self.region.populate(self.staging.start, self.staging.len())?)
    }

    /// What the router rings after pushing a step.
    #[must_use]
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }

    /// A handle that shows life; it may live on another thread.
    #[must_use]
    pub fn pulse(&self) -> Pulse {
        Pulse(self.heartbeat.clone())
    }

    /// The whole pages that hold this rank's staging of all slots, for devices that want them pinned: first byte and
    /// length. Valid as long as the channel lives.
    #[must_use]
    pub fn staging_pages(&self) -> (*mut u8, usize) {
        let starts = self.slots.iter().map(|slot| slot.segments.as_ptr() as usize);
        let ends = self.slots.iter().map(|slot| slot.rows.as_ptr() as usize + slot.rows.len());
        let first = starts.min().unwrap_or(0) / PAGE * PAGE;
        let last = ends.max().unwrap_or(first).next_multiple_of(PAGE);
        // A region begins at a page and is a multiple of pages long, so the rounding stays within it.
        (std::ptr::with_exposed_provenance_mut(first), last - first)
    }

    /// Where each slot's staging stands, for devices that address it by themselves.
    #[must_use]
    pub fn staging_places(&self) -> Vec<StagingPlace> {
        let place = |slot: &Staging| StagingPlace {
            segments: slot.segments.as_ptr(),
            max_segments: slot.segments.len(),
            ids: slot.ids.as_ptr(),
            weights: slot.weights.as_ptr(),
            token_ids: slot.token_ids.as_ptr(),
            rows: slot.rows.as_ptr(),
            row_bytes: slot.rows.len(),
        };
        self.slots.iter().map(place).collect()
    }

    /// The next step, if there is one.
    ///
    /// # Errors
    /// If the ring is broken, or the descriptor is not one of this shape.
    pub fn step(&mut self) -> Result<Option<StepDescriptor>, ChannelError> {
        let rank = self.rank;
        let Some(step) = self.steps.try_pop().map_err(|source| ChannelError::Ring { rank, source })? else {
            return Ok(None);
        };
        let limits = [
            ("slot", step.slot as usize + 1, self.slots.len()),
            ("rows", step.tokens as usize, self.shape.max_tokens_per_rank),
            ("segments", step.segments as usize, self.shape.max_segments),
            ("k", step.top_k as usize, self.shape.max_top_k),
        ];
        for (what, needed, capacity) in limits {
            if needed > capacity {
                return Err(ChannelError::Capacity { rank, what, needed, capacity });
            }
        }
        Ok(Some(step))
    }

    /// The staging of a step that was popped and not completed yet.
    pub fn staging(&mut self, step: &StepDescriptor) -> RankStaging<'_> {
        let staging = &self.slots[step.slot as usize];
        let (tokens, routed) = (step.tokens as usize, step.tokens as usize * step.top_k as usize);
        // SAFETY: between a popped descriptor and its completion the slot's staging is this rank's alone, and the
        // borrow of `self` keeps a second set of slices from being made.
        unsafe {
            RankStaging {
                segments: &staging.segments.as_slice()[..step.segments as usize],
                rows: staging.rows.as_mut_slice(),
                ids: &mut staging.ids.as_mut_slice()[..routed],
                weights: &mut staging.weights.as_mut_slice()[..routed],
                token_ids: &staging.token_ids.as_slice()[..tokens],
            }
        }
    }

    /// A handle that tells of the end of an experts phase while the step's staging is borrowed.
    #[must_use]
    pub fn notice(&self) -> ExpertsNotice {
        ExpertsNotice {
            done: self.experts_done.clone(),
            wanted: self.early_notice.clone(),
            router_bell: self.router_bell.clone(),
        }
    }

    /// Waits for the next step; `None` once `stop` says so.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn wait_step(
        &mut self,
        spin: Duration,
        stop: &AtomicBool,
    ) -> Result<Option<StepDescriptor>, ChannelError> {
        let bell = self.bell.clone();
        let found = bell.wait_for(Patience::unlimited(spin), || {
            if stop.load(Ordering::Acquire) {
                Some(Ok(None))
            } else {
                self.step().transpose().map(|s| s.map(Some))
            }
        });
        found.unwrap_or(Ok(None))
    }

    /// Gives a step's staging back with how it ended.
    ///
    /// # Errors
    /// If the ring is full or broken.
    pub fn complete(&mut self, completion: &Completion) -> Result<(), ChannelError> {
        let rank = self.rank;
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

/// Tells the router that the experts phase of a step has ended.
#[derive(Clone, Debug)]
pub struct ExpertsNotice {
    done: SharedSlice<u64>,
    wanted: SharedSlice<u32>,
    router_bell: Doorbell,
}

impl ExpertsNotice {
    /// The phase of exchange `sequence` has ended on this rank, and so have those of earlier ones. Told late, of an
    /// exchange before the last one told of, it says nothing new.
    pub fn tell(&self, sequence: u64) {
        self.done.atomics()[0].fetch_max(sequence, Ordering::SeqCst);
        if self.wanted.atomics()[0].load(Ordering::SeqCst) != 0 {
            self.router_bell.ring();
        }
    }
}

/// Shows that a process is alive.
#[derive(Clone, Debug)]
pub struct Pulse(SharedSlice<u64>);

impl Pulse {
    /// Moves the counter.
    pub fn beat(&self) {
        self.0.atomics()[0].fetch_add(1, Ordering::Relaxed);
    }
}
