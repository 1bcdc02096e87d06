//! The router's end of the channels.

#![allow(unsafe_code, reason = "makes slices of memory that two processes take turns at")]

mod forming;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ChannelError;
use super::layout::{ChannelLayout, GroupShape, Staging};
use super::records::{Completion, StepDescriptor};
use expertd_shm::region::{SharedRegion, SharedSlice};
use expertd_shm::ring::{RingConsumer, RingProducer};
use expertd_shm::wait::Doorbell;
use expertd_types::{DeviceUsage, Rank, Slot};

pub use self::forming::{AttachedRows, FormingStep, RowSource, RowsToStage};

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
    pub const fn is_attached(&self) -> bool {
        self.is_attached
    }

    /// Number of rows.
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
    pub(super) launched: SharedSlice<u64>,
}

impl RouterChannel {
    /// Makes the shared memory of a generation.
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
        let launched = places.launched.view(&region)?;
        Ok(RouterChannel { region, shape: shape.clone(), links, early_notice, launched })
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
        FormingStep::new(self, slot, top_k)
    }

    /// Pushes the formed step to the first `ranks` ranks; `common` holds the fields that are equal for all of them, and its sequence is
    /// higher than that of any step before. The slot is in flight on each rank until its [`completion`](Self::completion).
    ///
    /// No rank begins the step before every rank has it: a rank that began alone would wait for its peers, and fail, if this process
    /// were stopped in between.
    ///
    /// # Errors
    /// If the slot is in flight, or a rank's ring is full or broken.
    pub fn launch(&mut self, common: &StepDescriptor, ranks: usize) -> Result<(), ChannelError> {
        let slot = Slot(common.slot);
        for (rank, link) in self.links.iter().enumerate().take(ranks) {
            link.expect_idle(Rank(rank as u32), slot)?;
        }
        for (rank, link) in self.links.iter_mut().enumerate().take(ranks) {
            let rank = Rank(rank as u32);
            let descriptor = StepDescriptor {
                tokens: link.cursor.rows as u32,
                segments: link.cursor.segments as u32,
                raises: link.cursor.raises as u32,
                ..*common
            };
            match link.steps.try_push(&descriptor) {
                Ok(true) => link.in_flight[slot.index()] = Some(common.sequence),
                Ok(false) => return Err(ChannelError::Full { rank }),
                Err(source) => return Err(ChannelError::Ring { rank, source }),
            }
        }
        self.launched.atomics()[0].store(common.sequence, Ordering::Release);
        self.links.iter().take(ranks).for_each(|link| link.bell.ring());
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
    pub fn raised(&self, slot: Slot) -> u64 {
        let rank = self.links.first().and_then(|link| link.slots.get(slot.index()));
        rank.map_or(0, |staging| staging.raised.atomics()[0].load(Ordering::Acquire))
    }

    /// Sequence of the last exchange whose experts phase has ended on the first `ranks` ranks.
    pub fn experts_done(&self, ranks: usize) -> u64 {
        let done = self.links.iter().take(ranks).map(|l| l.experts_done.atomics()[0].load(Ordering::Acquire));
        done.min().unwrap_or(0)
    }

    /// Sets whether ranks ring at the end of an experts phase, too.
    pub fn set_early_notice(&self, on: bool) {
        self.early_notice.atomics()[0].store(u32::from(on), Ordering::SeqCst);
    }

    /// The rank's heartbeat, a counter that increases while its process runs.
    pub fn heartbeat(&self, rank: Rank) -> u64 {
        self.links[rank.index()].heartbeat.atomics()[0].load(Ordering::Relaxed)
    }

    /// The usage of the rank's device that the rank reported last; `None` if it has reported none.
    pub fn usage(&self, rank: Rank) -> Option<DeviceUsage> {
        let words = self.links[rank.index()].usage.atomics();
        DeviceUsage::from_words(std::array::from_fn(|at| words[at].load(Ordering::Relaxed)))
    }
}
