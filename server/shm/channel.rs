//! What the router and the ranks of one generation share: step descriptors and completions in rings, token rows in
//! staging, signs of life.
//!
//! Per rank and slot, staging holds one area of rows, and the routing of each row. The router writes the rows of a step
//! there and pushes a [`StepDescriptor`]; the rank writes the answer over them, each row in its dtype and at its place,
//! and pushes a [`Completion`]. Between the two pushes the area is the rank's, otherwise the router's.

#![allow(unsafe_code, reason = "copies into and out of memory that two processes take turns on")]

use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Serialize};

use super::region::{Layout, PAGE, RegionError, SharedRegion, SharedSlice};
use super::ring::{RingConsumer, RingError, RingPlace, RingProducer};
use super::wait::{Doorbell, Patience};
use crate::telemetry::Phase;
use crate::types::{DType, Rank, Slot};

/// The sizes that the router and all ranks of a generation share; what the layout of shared memory follows from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupShape {
    /// Ranks of the group.
    pub ranks: u32,
    /// Sets of step buffers.
    pub slots: u32,
    /// Rows that one rank takes in one step, at most.
    pub max_tokens_per_rank: usize,
    /// Pieces of requests that one rank takes in one step, at most.
    pub max_segments: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Largest `k` of the model's layers.
    pub max_top_k: usize,
}

/// One rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct StepDescriptor {
    /// Number of the exchange: the same for all ranks, one more than the last step's.
    pub sequence: u64,
    /// Number of the step, for logs.
    pub step: u64,
    /// Decoder layer.
    pub layer: u32,
    /// Step buffers.
    pub slot: u32,
    /// This rank's rows.
    pub tokens: u32,
    /// Entries of the slot's segment table.
    pub segments: u32,
    /// Rows of all ranks together.
    pub step_tokens: u32,
    /// Experts per token.
    pub top_k: u32,
}

/// A run of rows of one request within one rank's part of a step.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// Where the rows begin in the slot's row area, in bytes.
    pub byte_offset: u64,
    /// First row, counted over the rank's rows of the step.
    pub first_row: u32,
    /// Rows.
    pub rows: u32,
    /// [`DType`] code.
    pub dtype: u32,
    /// [`Segment::GIVEN_ROUTING`] and others.
    pub flags: u32,
}

impl Segment {
    /// Ids and weights stand in staging; otherwise the gate chooses.
    pub const GIVEN_ROUTING: u32 = 1;
    /// Shared experts are part of the output.
    pub const SHARED_EXPERTS: u32 = 2;

    /// Whether a flag is set.
    #[must_use]
    pub const fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// How one rank's part of a step ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct Completion {
    /// The descriptor's.
    pub sequence: u64,
    /// Duration of each of [`Phase::ALL`].
    pub phase_ns: [u64; Phase::ALL.len()],
    /// The descriptor's.
    pub slot: u32,
    /// 0: the answer stands in staging. Else the step failed, and `message` says why.
    pub failed: u32,
    /// Rows that this rank's experts received from all ranks.
    pub received_rows: u32,
    /// Pairs of row and expert that it computed.
    pub expert_rows: u32,
    /// Bytes of `message` in use.
    pub message_len: u64,
    /// UTF-8.
    pub message: [u8; 168],
}

impl Completion {
    /// The message of a failed step.
    #[must_use]
    pub fn text(&self) -> String {
        let len = usize::try_from(self.message_len).unwrap_or(usize::MAX).min(self.message.len());
        String::from_utf8_lossy(&self.message[..len]).into_owned()
    }

    /// Marks the step as failed because of `message`, cut to what fits.
    pub fn fail(&mut self, message: &str) {
        let cut = message.char_indices().map(|(at, c)| at + c.len_utf8());
        let len = cut.take_while(|&end| end <= self.message.len()).last().unwrap_or(0);
        self.failed = 1;
        self.message_len = len as u64;
        self.message[..len].copy_from_slice(&message.as_bytes()[..len]);
    }
}

/// Rows are copied in runs that begin on their own cache line.
const SEGMENT_ALIGN: usize = 64;

/// Where an array of `T` stands.
#[derive(Clone, Copy, Debug)]
struct Place<T> {
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Place<T> {
    fn reserve(layout: &mut Layout, len: usize) -> Result<Self, RegionError> {
        let offset = layout.line(len.saturating_mul(size_of::<T>()))?;
        Ok(Place { offset, len, element: PhantomData })
    }

    fn view(&self, region: &Arc<SharedRegion>) -> Result<SharedSlice<T>, RegionError> {
        region.slice(self.offset, self.len)
    }
}

#[derive(Debug)]
struct SlotPlaces {
    segments: Place<Segment>,
    ids: Place<i32>,
    weights: Place<f32>,
    token_ids: Place<i32>,
    rows: Place<u8>,
}

#[derive(Debug)]
struct LinkPlaces {
    steps: RingPlace<StepDescriptor>,
    completions: RingPlace<Completion>,
    heartbeat: Place<u64>,
    experts_done: Place<u64>,
    bell: Place<u32>,
    slots: Vec<SlotPlaces>,
}

/// Where everything stands: the same for all processes, computed from the shape.
#[derive(Debug)]
struct Places {
    early_notice: Place<u32>,
    links: Vec<LinkPlaces>,
    bytes: usize,
}

impl Places {
    fn new(shape: &GroupShape) -> Result<Self, RegionError> {
        let mut layout = Layout::new();
        let early_notice = Place::reserve(&mut layout, 1)?;
        let records = (shape.slots as usize * 2).next_power_of_two();
        let rows = shape.max_tokens_per_rank;
        let mut links = Vec::new();
        for _ in 0..shape.ranks {
            let mut link = LinkPlaces {
                steps: RingPlace::reserve(&mut layout, records)?,
                completions: RingPlace::reserve(&mut layout, records)?,
                heartbeat: Place::reserve(&mut layout, 1)?,
                experts_done: Place::reserve(&mut layout, 1)?,
                bell: Place::reserve(&mut layout, 1)?,
                slots: Vec::new(),
            };
            for _ in 0..shape.slots {
                link.slots.push(SlotPlaces {
                    segments: Place::reserve(&mut layout, shape.max_segments)?,
                    ids: Place::reserve(&mut layout, rows.saturating_mul(shape.max_top_k))?,
                    weights: Place::reserve(&mut layout, rows.saturating_mul(shape.max_top_k))?,
                    token_ids: Place::reserve(&mut layout, rows)?,
                    rows: Place::reserve(&mut layout, shape.row_area_bytes())?,
                });
            }
            links.push(link);
        }
        Ok(Places { early_notice, links, bytes: layout.len() })
    }
}

impl GroupShape {
    /// Bytes of a slot's row area: every row in f32, and each segment on its own line.
    #[must_use]
    pub const fn row_area_bytes(&self) -> usize {
        (self.max_tokens_per_rank.saturating_mul(self.hidden).saturating_mul(4))
            .saturating_add(self.max_segments.saturating_mul(SEGMENT_ALIGN))
    }

    /// Bytes of the channels of all ranks.
    ///
    /// # Errors
    /// If that exceeds the address space.
    pub fn channel_bytes(&self) -> Result<usize, RegionError> {
        Places::new(self).map(|places| places.bytes)
    }
}

/// The doorbell of the router: what ranks ring after a completion, and whoever else has news for its step loop. It
/// outlives generations; a ring too many only makes the router look.
#[derive(Clone, Debug)]
pub struct RouterBell {
    region: Arc<SharedRegion>,
    bell: Doorbell,
}

impl RouterBell {
    /// Makes the bell in memory of its own.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create() -> Result<Self, RegionError> {
        Self::over(SharedRegion::create("expertd-bell", PAGE)?)
    }

    /// The bell in inherited memory.
    ///
    /// # Errors
    /// If the descriptor is not a router's bell.
    pub fn join(fd: OwnedFd) -> Result<Self, RegionError> {
        Self::over(SharedRegion::from_fd(fd, PAGE)?)
    }

    fn over(region: Arc<SharedRegion>) -> Result<Self, RegionError> {
        let bell = Doorbell::new(region.slice(0, 1)?);
        Ok(RouterBell { region, bell })
    }

    /// The memory, for ranks to map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// The bell itself.
    #[must_use]
    pub const fn bell(&self) -> &Doorbell {
        &self.bell
    }
}

/// Why a channel could not be made or used.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Its memory.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// One of its rings.
    #[error("rank {rank}: {source}")]
    Ring {
        /// Whose.
        rank: Rank,
        /// What is wrong.
        source: RingError,
    },
    /// The other side has not taken what was pushed before.
    #[error("rank {rank}: the ring is full; the other side does not take what it is given")]
    Full {
        /// Whose.
        rank: Rank,
    },
    /// More than the staging of a slot holds.
    #[error("rank {rank}: {what} would be {needed}, and the staging of a slot holds {capacity}")]
    Capacity {
        /// Whose.
        rank: Rank,
        /// What there is too much of.
        what: &'static str,
        /// How much.
        needed: usize,
        /// How much fits.
        capacity: usize,
    },
}

/// Views of one rank's staging in one slot.
#[derive(Debug)]
struct Staging {
    segments: SharedSlice<Segment>,
    ids: SharedSlice<i32>,
    weights: SharedSlice<f32>,
    token_ids: SharedSlice<i32>,
    rows: SharedSlice<u8>,
}

impl Staging {
    fn views(places: &[SlotPlaces], region: &Arc<SharedRegion>) -> Result<Vec<Self>, RegionError> {
        places
            .iter()
            .map(|slot| {
                Ok(Staging {
                    segments: slot.segments.view(region)?,
                    ids: slot.ids.view(region)?,
                    weights: slot.weights.view(region)?,
                    token_ids: slot.token_ids.view(region)?,
                    rows: slot.rows.view(region)?,
                })
            })
            .collect()
    }
}

/// Rows of one request for one rank, as the router stages them.
#[derive(Clone, Copy, Debug)]
pub struct StageRows<'a> {
    /// `[n, hidden]` in `dtype`.
    pub rows: &'a [u8],
    /// n.
    pub tokens: usize,
    /// Element type.
    pub dtype: DType,
    /// `[n, k]` int32 and f32, little-endian; the gate chooses if absent.
    pub routing: Option<(&'a [u8], &'a [u8])>,
    /// `[n]` int32, little-endian.
    pub token_ids: Option<&'a [u8]>,
    /// Whether shared experts are part of the output.
    pub shared_experts: bool,
}

/// Where staged rows stand, and their answer after the step.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    rank: Rank,
    slot: Slot,
    byte_offset: usize,
    bytes: usize,
    first_row: usize,
    rows: usize,
}

/// How far a rank's staging of the step being formed is filled.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    rows: usize,
    bytes: usize,
    segments: usize,
}

#[derive(Debug)]
struct RouterLink {
    steps: RingProducer<StepDescriptor>,
    completions: RingConsumer<Completion>,
    heartbeat: SharedSlice<u64>,
    experts_done: SharedSlice<u64>,
    bell: Doorbell,
    slots: Vec<Staging>,
    cursor: Cursor,
}

/// The router's end of the channels of one generation.
#[derive(Debug)]
pub struct RouterChannel {
    region: Arc<SharedRegion>,
    shape: GroupShape,
    links: Vec<RouterLink>,
    early_notice: SharedSlice<u32>,
}

impl RouterChannel {
    /// Makes new shared memory for one generation.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(shape: &GroupShape) -> Result<Self, ChannelError> {
        let places = Places::new(shape)?;
        let region = SharedRegion::create("expertd-channel", places.bytes)?;
        // Now rather than in the first steps, so that memory is flat from the start and its lack shows here.
        region.populate(0, places.bytes)?;
        let mut links = Vec::new();
        for (rank, link) in places.links.iter().enumerate() {
            let ring = |source| ChannelError::Ring { rank: Rank(rank as u32), source };
            links.push(RouterLink {
                steps: RingProducer::new(link.steps.memory(&region)?).map_err(ring)?,
                completions: RingConsumer::new(link.completions.memory(&region)?).map_err(ring)?,
                heartbeat: link.heartbeat.view(&region)?,
                experts_done: link.experts_done.view(&region)?,
                bell: Doorbell::new(link.bell.view(&region)?),
                slots: Staging::views(&link.slots, &region)?,
                cursor: Cursor::default(),
            });
        }
        let early_notice = places.early_notice.view(&region)?;
        Ok(RouterChannel { region, shape: shape.clone(), links, early_notice })
    }

    /// The memory, for ranks to map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// Begins forming a step: every rank's staging of the next slot counts as empty.
    pub fn begin(&mut self) {
        for link in &mut self.links {
            link.cursor = Cursor::default();
        }
    }

    /// Copies rows into the staging of `rank`.
    ///
    /// # Errors
    /// [`ChannelError::Capacity`] if they do not fit; nothing is staged then.
    pub fn stage(
        &mut self,
        rank: Rank,
        slot: Slot,
        top_k: usize,
        piece: &StageRows<'_>,
    ) -> Result<Staged, ChannelError> {
        let shape = &self.shape;
        let link = &mut self.links[rank.index()];
        let cursor = link.cursor;
        let fits = |what, needed: usize, capacity: usize| {
            if needed <= capacity {
                Ok(())
            } else {
                Err(ChannelError::Capacity { rank, what, needed, capacity })
            }
        };
        fits("rows", cursor.rows + piece.tokens, shape.max_tokens_per_rank)?;
        fits("segments", cursor.segments + 1, shape.max_segments)?;
        fits("k", top_k, shape.max_top_k)?;
        fits("bytes", cursor.bytes + piece.rows.len(), shape.row_area_bytes())?;
        let staging = &link.slots[slot.index()];
        let mut flags = 0;
        copy_in(&staging.rows, cursor.bytes, piece.rows);
        if let Some((ids, weights)) = piece.routing {
            flags |= Segment::GIVEN_ROUTING;
            copy_in(&staging.ids, cursor.rows * top_k, ids);
            copy_in(&staging.weights, cursor.rows * top_k, weights);
        }
        if let Some(token_ids) = piece.token_ids {
            copy_in(&staging.token_ids, cursor.rows, token_ids);
        }
        if piece.shared_experts {
            flags |= Segment::SHARED_EXPERTS;
        }
        let segment = Segment {
            byte_offset: cursor.bytes as u64,
            first_row: cursor.rows as u32,
            rows: piece.tokens as u32,
            dtype: piece.dtype as u32,
            flags,
        };
        copy_in(&staging.segments, cursor.segments, bytemuck::bytes_of(&segment));
        link.cursor = Cursor {
            rows: cursor.rows + piece.tokens,
            bytes: (cursor.bytes + piece.rows.len()).next_multiple_of(SEGMENT_ALIGN),
            segments: cursor.segments + 1,
        };
        Ok(Staged {
            rank,
            slot,
            byte_offset: cursor.bytes,
            bytes: piece.rows.len(),
            first_row: cursor.rows,
            rows: piece.tokens,
        })
    }

    /// Hands the formed step to every rank; `common` gives what is the same for all.
    ///
    /// # Errors
    /// If a rank's ring is full or broken.
    pub fn launch(&mut self, common: &StepDescriptor) -> Result<(), ChannelError> {
        for (rank, link) in self.links.iter_mut().enumerate() {
            let rank = Rank(rank as u32);
            let descriptor = StepDescriptor {
                tokens: link.cursor.rows as u32,
                segments: link.cursor.segments as u32,
                ..*common
            };
            match link.steps.try_push(&descriptor) {
                Ok(true) => link.bell.ring(),
                Ok(false) => return Err(ChannelError::Full { rank }),
                Err(source) => return Err(ChannelError::Ring { rank, source }),
            }
        }
        Ok(())
    }

    /// The next completion of `rank`, if there is one.
    ///
    /// # Errors
    /// If the ring is broken.
    pub fn completion(&mut self, rank: Rank) -> Result<Option<Completion>, ChannelError> {
        self.links[rank.index()].completions.try_pop().map_err(|source| ChannelError::Ring { rank, source })
    }

    /// Output rows of a completed step, in the dtype they came in.
    #[must_use]
    pub fn answer(&self, staged: &Staged) -> &[u8] {
        let staging = &self.links[staged.rank.index()].slots[staged.slot.index()];
        // SAFETY: the caller has the completion of the step, so the rank has let go of the slot's staging, and writes
        // there only after another `launch`, which takes `&mut self`.
        let rows = unsafe { staging.rows.as_slice() };
        &rows[staged.byte_offset..][..staged.bytes]
    }

    /// Expert ids `[rows, k]` int32 and weights `[rows, k]` f32 of a completed step, as bytes.
    #[must_use]
    pub fn routing(&self, staged: &Staged, top_k: usize) -> (&[u8], &[u8]) {
        let staging = &self.links[staged.rank.index()].slots[staged.slot.index()];
        let range = staged.first_row * top_k..(staged.first_row + staged.rows) * top_k;
        // SAFETY: as in `answer`.
        let (ids, weights) = unsafe { (staging.ids.as_slice(), staging.weights.as_slice()) };
        (bytemuck::cast_slice(&ids[range.clone()]), bytemuck::cast_slice(&weights[range]))
    }

    /// The last exchange whose experts phase has ended on every rank.
    #[must_use]
    pub fn experts_done(&self) -> u64 {
        self.links.iter().map(|l| l.experts_done.atomics()[0].load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// Whether ranks ring at the end of an experts phase, too.
    pub fn set_early_notice(&self, on: bool) {
        self.early_notice.atomics()[0].store(u32::from(on), Ordering::SeqCst);
    }

    /// A counter that moves while the rank's process runs.
    #[must_use]
    pub fn heartbeat(&self, rank: Rank) -> u64 {
        self.links[rank.index()].heartbeat.atomics()[0].load(Ordering::Relaxed)
    }
}

/// Copies bytes to elements `at..` of `to`, which the caller has to itself.
fn copy_in<T: Pod>(to: &SharedSlice<T>, at: usize, bytes: &[u8]) {
    let capacity = to.len() * size_of::<T>();
    let start = at * size_of::<T>();
    assert!(start <= capacity && bytes.len() <= capacity - start, "checked when the piece was staged");
    // SAFETY: in bounds (asserted); the destination is shared memory that only this side touches now (module's text),
    // and so does not overlap `bytes`.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr().cast::<u8>().add(start), bytes.len()) }
}

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
        region.populate(0, places.bytes)?;
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
        })
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
        spin: u32,
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
    /// The phase of exchange `sequence` has ended on this rank.
    pub fn tell(&self, sequence: u64) {
        self.done.atomics()[0].store(sequence, Ordering::SeqCst);
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
