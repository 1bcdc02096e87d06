//! The router's end of the channels.

#![allow(unsafe_code, reason = "makes slices of memory that two processes take turns at")]

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::Pod;

use super::super::copier::{Copier, CopyBatch};
use super::super::region::{SharedRegion, SharedSlice};
use super::super::ring::{RingConsumer, RingProducer};
use super::super::wait::Doorbell;
use super::ChannelError;
use super::layout::{ChannelLayout, GroupShape, SEGMENT_ALIGN, Staging};
use super::records::{Completion, Raise, Segment, StepDescriptor};
use expertd_types::{ChunkedSlice, DType, DeviceUsage, MemoryId, Rank, Slot};

/// Where the router finds rows.
#[derive(Clone, Copy, Debug)]
pub enum RowSource<'a> {
    /// Memory of this process.
    Own(ChunkedSlice<'a>),
    /// Memory that a client may write at any time.
    Session {
        /// The client's row area.
        area: &'a SharedSlice<u8>,
        /// Offset of the rows in the area, in bytes.
        offset: usize,
        /// Length of the rows, in bytes.
        bytes: usize,
    },
    /// Memory that every rank has attached: ranks read the rows and write the answer there, and the router copies neither.
    Attached(AttachedRows),
}

/// Rows in a memory that every rank has attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedRows {
    /// The memory.
    pub memory: MemoryId,
    /// Offset of the rows, in bytes.
    pub input: u64,
    /// Offset of the answer, in bytes; it does not overlap the rows.
    pub output: u64,
    /// Length of the rows, in bytes.
    pub bytes: usize,
}

impl<'a> From<ChunkedSlice<'a>> for RowSource<'a> {
    fn from(rows: ChunkedSlice<'a>) -> Self {
        RowSource::Own(rows)
    }
}

impl<'a> From<&'a [u8]> for RowSource<'a> {
    fn from(rows: &'a [u8]) -> Self {
        RowSource::Own(rows.into())
    }
}

impl RowSource<'_> {
    /// Length of the rows, in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        match self {
            RowSource::Own(rows) => rows.len(),
            RowSource::Session { bytes, .. } | RowSource::Attached(AttachedRows { bytes, .. }) => *bytes,
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows of one request that the router stages for one rank.
#[derive(Clone, Copy, Debug)]
pub struct RowsToStage<'a> {
    /// `[n, hidden]` in `dtype`.
    pub rows: RowSource<'a>,
    /// Number of rows, n.
    pub tokens: usize,
    /// Element type of the rows.
    pub dtype: DType,
    /// Expert ids `[n, k]` int32 and weights `[n, k]` f32, little-endian; the gate chooses if absent.
    pub routing: Option<(&'a [u8], &'a [u8])>,
    /// `[n]` int32, little-endian.
    pub token_ids: Option<&'a [u8]>,
    /// Whether the output includes the shared experts.
    pub shared_experts: bool,
}

/// Location of staged rows, and of their answer after the step.
#[derive(Clone, Copy, Debug)]
pub struct StagedRows {
    rank: Rank,
    slot: Slot,
    byte_offset: usize,
    /// Bytes of the rows in staging; 0 if they are in an attached memory.
    bytes: usize,
    first_row: usize,
    rows: usize,
    is_attached: bool,
}

impl StagedRows {
    /// Whether the rank writes the answer to an attached memory; staging then holds its routing only.
    #[must_use]
    pub const fn is_attached(&self) -> bool {
        self.is_attached
    }

    /// Number of rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }
}

/// Fill level of a rank's staging for the step that is being formed.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    rows: usize,
    bytes: usize,
    segments: usize,
    raises: usize,
}

#[derive(Debug)]
struct RouterLink {
    steps: RingProducer<StepDescriptor>,
    completions: RingConsumer<Completion>,
    heartbeat: SharedSlice<u64>,
    usage: SharedSlice<u64>,
    experts_done: SharedSlice<u64>,
    bell: Doorbell,
    slots: Vec<Staging>,
    /// `[slots]`: sequence of the step that was pushed for the slot and is not completed.
    in_flight: Vec<Option<u64>>,
    cursor: Cursor,
}

impl RouterLink {
    /// Fails if the staging of `slot` belongs to the rank.
    fn expect_idle(&self, rank: Rank, slot: Slot) -> Result<(), ChannelError> {
        match self.in_flight.get(slot.index()) {
            Some(None) => Ok(()),
            Some(&Some(sequence)) => Err(ChannelError::InFlight { rank, slot, sequence }),
            None => {
                let (needed, capacity) = (slot.index() + 1, self.in_flight.len());
                Err(ChannelError::Capacity { rank, what: "slots", needed, capacity })
            }
        }
    }
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
    /// Makes the shared memory of a generation.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(shape: &GroupShape) -> Result<Self, ChannelError> {
        let places = ChannelLayout::new(shape)?;
        let region = SharedRegion::create("expertd-channel", places.bytes)?;
        let mut links = Vec::new();
        for (rank, link) in places.links.iter().enumerate() {
            let ring = |source| ChannelError::Ring { rank: Rank(rank as u32), source };
            links.push(RouterLink {
                steps: RingProducer::new(link.steps.memory(&region)?).map_err(ring)?,
                completions: RingConsumer::new(link.completions.memory(&region)?).map_err(ring)?,
                heartbeat: link.heartbeat.view(&region)?,
                usage: link.usage.view(&region)?,
                experts_done: link.experts_done.view(&region)?,
                bell: Doorbell::new(link.bell.view(&region)?),
                slots: Staging::views(&link.slots, &region)?,
                in_flight: vec![None; link.slots.len()],
                cursor: Cursor::default(),
            });
        }
        let early_notice = places.early_notice.view(&region)?;
        Ok(RouterChannel { region, shape: shape.clone(), links, early_notice })
    }

    /// Maps every page of the memory, so that the first steps need not. The router calls this once every rank is ready: by
    /// then each rank has made the pages of its own staging resident on its own NUMA node
    /// ([`RankChannel::populate`](super::RankChannel::populate)).
    ///
    /// # Errors
    /// If there is no memory for the remaining pages.
    pub fn populate(&self) -> Result<(), ChannelError> {
        Ok(self.region.populate(0, self.region.len())?)
    }

    /// Descriptor of the memory, which ranks inherit and map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// Begins to form a step in `slot`, with `top_k` experts per token. The slot's staging counts as empty on every rank.
    pub fn begin(&mut self, slot: Slot, top_k: usize) -> FormingStep<'_, '_> {
        for link in &mut self.links {
            link.cursor = Cursor::default();
        }
        FormingStep { channel: self, slot, top_k, batch: CopyBatch::default() }
    }

    /// Pushes the formed step to every rank; `common` holds the fields that are equal for all of them. The slot is in
    /// flight on each rank until its [`completion`](Self::completion).
    ///
    /// # Errors
    /// If the slot is in flight, or a rank's ring is full or broken.
    pub fn launch(&mut self, common: &StepDescriptor) -> Result<(), ChannelError> {
        let slot = Slot(common.slot);
        for (rank, link) in self.links.iter().enumerate() {
            link.expect_idle(Rank(rank as u32), slot)?;
        }
        for (rank, link) in self.links.iter_mut().enumerate() {
            let rank = Rank(rank as u32);
            let descriptor = StepDescriptor {
                tokens: link.cursor.rows as u32,
                segments: link.cursor.segments as u32,
                raises: link.cursor.raises as u32,
                ..*common
            };
            match link.steps.try_push(&descriptor) {
                Ok(true) => {
                    link.in_flight[slot.index()] = Some(common.sequence);
                    link.bell.ring();
                }
                Ok(false) => return Err(ChannelError::Full { rank }),
                Err(source) => return Err(ChannelError::Ring { rank, source }),
            }
        }
        Ok(())
    }

    /// Takes the next completion of `rank`, if there is one. It returns the slot's staging to the router; a completion of a
    /// step that is not in flight returns none.
    ///
    /// # Errors
    /// If the ring is broken.
    pub fn completion(&mut self, rank: Rank) -> Result<Option<Completion>, ChannelError> {
        let link = &mut self.links[rank.index()];
        let completion = link.completions.try_pop().map_err(|source| ChannelError::Ring { rank, source })?;
        if let Some(completion) = &completion
            && let Some(in_flight) = link.in_flight.get_mut(completion.slot as usize)
            && *in_flight == Some(completion.sequence)
        {
            *in_flight = None;
        }
        Ok(completion)
    }

    /// Output rows of a completed step, in the dtype of the rows that were staged; none if they are in an attached memory.
    ///
    /// # Panics
    /// If the step is in flight on the rows' rank.
    #[must_use]
    pub fn answer(&self, staged: &StagedRows) -> &[u8] {
        let staging = self.returned_staging(staged);
        // SAFETY: the staging belongs to the router; the rank writes there only after another `launch`, which takes
        // `&mut self`.
        let rows = unsafe { staging.rows.as_slice() };
        &rows[staged.byte_offset..][..staged.bytes]
    }

    /// Expert ids `[rows, k]` int32 and weights `[rows, k]` f32 of a completed step, as bytes.
    ///
    /// # Panics
    /// If the step is in flight on the rows' rank.
    #[must_use]
    pub fn routing(&self, staged: &StagedRows, top_k: usize) -> (&[u8], &[u8]) {
        let staging = self.returned_staging(staged);
        let range = staged.first_row * top_k..(staged.first_row + staged.rows) * top_k;
        // SAFETY: as in `answer`.
        let (ids, weights) = unsafe { (staging.ids.as_slice(), staging.weights.as_slice()) };
        (bytemuck::cast_slice(&ids[range.clone()]), bytemuck::cast_slice(&weights[range]))
    }

    /// The staging that holds the rows, which must belong to the router.
    fn returned_staging(&self, staged: &StagedRows) -> &Staging {
        let link = &self.links[staged.rank.index()];
        let slot = staged.slot.index();
        assert_eq!(link.in_flight[slot], None, "slot {slot} was read while its step was in flight");
        &link.slots[slot]
    }

    /// Sequence of the last step in `slot` whose completion words rank 0 has raised, or was about to raise: every result of that step
    /// is written. After a fault this is final once the ranks are reaped.
    #[must_use]
    pub fn raised(&self, slot: Slot) -> u64 {
        let rank = self.links.first().and_then(|link| link.slots.get(slot.index()));
        rank.map_or(0, |staging| staging.raised.atomics()[0].load(Ordering::Acquire))
    }

    /// Sequence of the last exchange whose experts phase has ended on every rank.
    #[must_use]
    pub fn experts_done(&self) -> u64 {
        self.links.iter().map(|l| l.experts_done.atomics()[0].load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// Sets whether ranks ring at the end of an experts phase, too.
    pub fn set_early_notice(&self, on: bool) {
        self.early_notice.atomics()[0].store(u32::from(on), Ordering::SeqCst);
    }

    /// The rank's heartbeat, a counter that increases while its process runs.
    #[must_use]
    pub fn heartbeat(&self, rank: Rank) -> u64 {
        self.links[rank.index()].heartbeat.atomics()[0].load(Ordering::Relaxed)
    }

    /// The usage of the rank's device that the rank reported last; `None` if it has reported none.
    #[must_use]
    pub fn usage(&self, rank: Rank) -> Option<DeviceUsage> {
        let words = self.links[rank.index()].usage.atomics();
        DeviceUsage::from_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)))
    }
}

/// A step that is being formed: each call of [`stage`](Self::stage) allocates staging, [`copy`](Self::copy) copies all rows.
#[derive(Debug)]
pub struct FormingStep<'c, 'a> {
    // A mutable borrow, so that the slot's staging is not used otherwise before the copies are made.
    channel: &'c mut RouterChannel,
    slot: Slot,
    top_k: usize,
    batch: CopyBatch<'a>,
}

impl<'a> FormingStep<'_, 'a> {
    /// Allocates space for `rows` in the staging of `rank`.
    ///
    /// # Errors
    /// [`ChannelError::Capacity`] if they do not fit, [`ChannelError::InFlight`] if the slot is in flight on the rank.
    pub fn stage(&mut self, rank: Rank, rows: &RowsToStage<'a>) -> Result<StagedRows, ChannelError> {
        let FormingStep { channel, slot, top_k, batch } = self;
        let (shape, top_k) = (&channel.shape, *top_k);
        let link = &mut channel.links[rank.index()];
        link.expect_idle(rank, *slot)?;
        let cursor = link.cursor;
        let fits = |what, needed: usize, capacity: usize| {
            if needed <= capacity {
                Ok(())
            } else {
                Err(ChannelError::Capacity { rank, what, needed, capacity })
            }
        };
        fits("rows", cursor.rows + rows.tokens, shape.max_tokens_per_rank)?;
        fits("segments", cursor.segments + 1, shape.max_segments)?;
        fits("experts per token", top_k, shape.max_top_k)?;
        // Where the rows are, and how many bytes of staging they take.
        let (memory, byte_offset, output_offset, bytes) = match rows.rows {
            RowSource::Attached(rows) => (rows.memory.0, rows.input, rows.output, 0),
            staged => (Segment::STAGING, cursor.bytes as u64, 0, staged.len()),
        };
        fits("bytes", cursor.bytes + bytes, shape.row_area_bytes())?;
        let staging = &link.slots[slot.index()];
        let mut flags = 0;
        push_copy(batch, rows.rows, &staging.rows, cursor.bytes);
        if let Some((ids, weights)) = rows.routing {
            flags |= Segment::GIVEN_ROUTING;
            push_copy(batch, ids.into(), &staging.ids, cursor.rows * top_k);
            push_copy(batch, weights.into(), &staging.weights, cursor.rows * top_k);
        }
        if let Some(token_ids) = rows.token_ids {
            push_copy(batch, token_ids.into(), &staging.token_ids, cursor.rows);
        }
        if rows.shared_experts {
            flags |= Segment::SHARED_EXPERTS;
        }
        // SAFETY: the slot is not in flight (checked), so its staging belongs to the router, and this borrow of the channel
        // is exclusive.
        let segments = unsafe { staging.segments.as_mut_slice() };
        segments[cursor.segments] = Segment {
            byte_offset,
            output_offset,
            first_row: cursor.rows as u32,
            rows: rows.tokens as u32,
            dtype: rows.dtype as u32,
            flags,
            memory,
            reserved: 0,
        };
        link.cursor = Cursor {
            rows: cursor.rows + rows.tokens,
            bytes: (cursor.bytes + bytes).next_multiple_of(SEGMENT_ALIGN),
            segments: cursor.segments + 1,
            ..cursor
        };
        Ok(StagedRows {
            rank,
            slot: *slot,
            byte_offset: cursor.bytes,
            bytes,
            first_row: cursor.rows,
            rows: rows.tokens,
            is_attached: memory != Segment::STAGING,
        })
    }

    /// Lets rank 0 raise a completion word when every rank has written its results.
    ///
    /// # Errors
    /// As [`stage`](Self::stage).
    pub fn raise(&mut self, raise: Raise) -> Result<(), ChannelError> {
        let rank = Rank(0);
        let link = &mut self.channel.links[rank.index()];
        link.expect_idle(rank, self.slot)?;
        // SAFETY: the slot is not in flight (checked), so its staging belongs to the router, and this borrow of the channel
        // is exclusive.
        let raises = unsafe { link.slots[self.slot.index()].raises.as_mut_slice() };
        let (what, needed, capacity) = ("words to raise", link.cursor.raises + 1, raises.len());
        let place = raises.get_mut(link.cursor.raises);
        *place.ok_or(ChannelError::Capacity { rank, what, needed, capacity })? = raise;
        link.cursor.raises = needed;
        Ok(())
    }

    /// Copies all staged rows with `copier`.
    pub fn copy(self, copier: &mut Copier) {
        copier.stream(self.batch);
    }
}

/// Adds a copy of `bytes` to elements `at..` of `to`, which must be staging of a slot that is not in flight. Rows in an
/// attached memory stay there.
fn push_copy<'a, T: Pod>(batch: &mut CopyBatch<'a>, bytes: RowSource<'a>, to: &SharedSlice<T>, at: usize) {
    if matches!(bytes, RowSource::Attached(_)) {
        return;
    }
    let capacity = to.len() * size_of::<T>();
    let start = at * size_of::<T>();
    assert!(start <= capacity && bytes.len() <= capacity - start, "the rows exceed the staging");
    // SAFETY: in bounds (asserted). The slot is not in flight, so only the router accesses the destination; it is shared
    // memory, so it overlaps no source, and cursors advance, so it overlaps no other destination. The batch lives with a
    // mutable borrow of the channel, which keeps the memory mapped and the slot out of flight. A session's memory is another
    // region, and this process writes it with atomic stores only.
    unsafe {
        let to = to.as_ptr().cast::<u8>().add(start);
        match bytes {
            RowSource::Own(bytes) => batch.push(bytes, to),
            RowSource::Session { area, offset, bytes } => batch.push_shared(area, offset, bytes, to),
            RowSource::Attached(_) => {}
        }
    }
}
