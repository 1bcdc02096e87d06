//! The router's end of the channels.

#![allow(unsafe_code, reason = "copies into and out of memory that two processes take turns on")]

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::Pod;

use super::super::copier::{Batch, Copier};
use super::super::region::{SharedRegion, SharedSlice};
use super::super::ring::{RingConsumer, RingProducer};
use super::super::wait::Doorbell;
use super::ChannelError;
use super::places::{GroupShape, Places, SEGMENT_ALIGN, Staging};
use super::records::{Completion, Segment, StepDescriptor};
use expertd_types::{DType, Rank, Slices, Slot};

/// Rows of one request for one rank, as the router stages them.
#[derive(Clone, Copy, Debug)]
pub struct StageRows<'a> {
    /// `[n, hidden]` in `dtype`.
    pub rows: Slices<'a>,
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

    /// Maps every page of the memory, so that the first steps do not. Ranks make the pages resident, each those of its own
    /// staging on its own NUMA node ([`RankChannel::populate`](super::RankChannel::populate)); the router calls this once
    /// every rank is ready.
    ///
    /// # Errors
    /// If there is no memory for what no rank made resident.
    pub fn populate(&self) -> Result<(), ChannelError> {
        Ok(self.region.populate(0, self.region.len())?)
    }

    /// The memory, for ranks to map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// Begins forming the step of `slot`, which no step in flight has, with `top_k` experts per token: every rank's
    /// staging there counts as empty.
    pub fn begin(&mut self, slot: Slot, top_k: usize) -> Forming<'_, '_> {
        for link in &mut self.links {
            link.cursor = Cursor::default();
        }
        Forming { channel: self, slot, top_k, batch: Batch::default() }
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

/// A step being formed: rows are given their places piece by piece, and are copied there all at once.
#[derive(Debug)]
pub struct Forming<'c, 'a> {
    // Mutable, so that the slot's staging is used for nothing else until the copies are made.
    channel: &'c mut RouterChannel,
    slot: Slot,
    top_k: usize,
    batch: Batch<'a>,
}

impl<'a> Forming<'_, 'a> {
    /// Gives rows a place in the staging of `rank`.
    ///
    /// # Errors
    /// [`ChannelError::Capacity`] if they do not fit.
    pub fn stage(&mut self, rank: Rank, piece: &StageRows<'a>) -> Result<Staged, ChannelError> {
        let Forming { channel, slot, top_k, batch } = self;
        let (shape, top_k) = (&channel.shape, *top_k);
        let link = &mut channel.links[rank.index()];
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
        place(&staging.rows, cursor.bytes, piece.rows, batch);
        if let Some((ids, weights)) = piece.routing {
            flags |= Segment::GIVEN_ROUTING;
            place(&staging.ids, cursor.rows * top_k, ids.into(), batch);
            place(&staging.weights, cursor.rows * top_k, weights.into(), batch);
        }
        if let Some(token_ids) = piece.token_ids {
            place(&staging.token_ids, cursor.rows, token_ids.into(), batch);
        }
        if piece.shared_experts {
            flags |= Segment::SHARED_EXPERTS;
        }
        // SAFETY: the slot is this side's, for this borrow of the channel alone.
        let segments = unsafe { staging.segments.as_mut_slice() };
        segments[cursor.segments] = Segment {
            byte_offset: cursor.bytes as u64,
            first_row: cursor.rows as u32,
            rows: piece.tokens as u32,
            dtype: piece.dtype as u32,
            flags,
        };
        link.cursor = Cursor {
            rows: cursor.rows + piece.tokens,
            bytes: (cursor.bytes + piece.rows.len()).next_multiple_of(SEGMENT_ALIGN),
            segments: cursor.segments + 1,
        };
        Ok(Staged {
            rank,
            slot: *slot,
            byte_offset: cursor.bytes,
            bytes: piece.rows.len(),
            first_row: cursor.rows,
            rows: piece.tokens,
        })
    }

    /// Copies everything to its place, with `copier`.
    pub fn copy(self, copier: &mut Copier) {
        copier.stream(self.batch);
    }
}

/// Has bytes copied to elements `at..` of `to`, which the caller has to itself until the batch is copied.
fn place<'a, T: Pod>(to: &SharedSlice<T>, at: usize, bytes: Slices<'a>, batch: &mut Batch<'a>) {
    let capacity = to.len() * size_of::<T>();
    let start = at * size_of::<T>();
    assert!(start <= capacity && bytes.len() <= capacity - start, "checked when the piece was staged");
    // SAFETY: in bounds (asserted); the destination is shared memory that only this side touches now (module's text),
    // and so overlaps nothing that is read. Cursors advance, so it overlaps nothing that is written; the batch borrows
    // the channel, and with it the memory.
    unsafe { batch.push(bytes, to.as_ptr().cast::<u8>().add(start)) }
}
