//! The symmetric windows of an EP group on CPU ranks: one region per generation that holds a window per rank.
//!
//! Every window has the same layout:
//!
//! ```text
//! shape       the sizes that the creator used; a rank that attaches compares them with its own
//! claim       set by the rank that the window belongs to
//! doorbell    rung by peers after they have stored a flag or an error here
//! error       the first fault that any rank reported
//! flags       [slots, 2 kinds, ranks], generation << 40 | sequence, each on a line of its own
//! per slot and source rank, written by that rank:
//!   head      rows and k
//!   ids       [max_tokens_per_rank, max_top_k] i32
//!   weights   [max_tokens_per_rank, max_top_k] f32
//!   rows      [max_tokens_per_rank, hidden] f32
//! per slot and expert rank, written by that rank:
//!   partials  [max_tokens_per_rank, hidden] f32
//! ```
//!
//! This module computes addresses. [`exchange`](super::exchange) decides which rank may access what and when;
//! `docs/protocol.md` explains why that is safe.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};

use expertd_shm::region::{LINE, Layout, RegionError, SharedRegion, SharedSlice};
use expertd_shm::wait::Doorbell;
use expertd_types::{Generation, Rank, Sequence, Slot};

/// Low bits of a flag, which hold the sequence; the generation is in the bits above.
pub(crate) const SEQUENCE_BITS: u32 = 40;

/// The value of a flag whose writer has reached exchange `sequence` of `generation`.
#[must_use]
pub(crate) const fn flag_value(generation: Generation, sequence: Sequence) -> u64 {
    generation.0 << SEQUENCE_BITS | sequence.0
}

/// The sizes that determine the layout of a window. All fields are at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowShape {
    /// Ranks of the group.
    pub ranks: usize,
    /// Sets of step buffers.
    pub slots: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Largest number of experts per token.
    pub max_top_k: usize,
    /// Largest number of tokens that one rank contributes to a step.
    pub max_tokens_per_rank: usize,
}

/// The two flags of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagKind {
    /// The peer's rows for this rank have been written.
    Dispatch = 0,
    /// The peer has read this rank's rows of this exchange and written its partials for this rank.
    Combine = 1,
}

impl FlagKind {
    /// Name of the phase that waits for the flag.
    #[must_use]
    pub(crate) const fn phase(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
        }
    }
}

/// The header of a dispatch area.
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AreaHeader {
    /// Number of rows in the area.
    pub rows: u32,
    /// Experts per token in this step.
    pub k: u32,
}

/// Why a rank cannot attach to windows.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum AttachError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("the windows were created with {field} = {found}, this rank expects {expected}")]
    Shape { field: &'static str, expected: u64, found: u64 },
    #[error(
        "rank {rank}'s window of generation {generation} has been claimed before; windows are never reused"
    )]
    Claimed { rank: Rank, generation: Generation },
    #[error("rank {rank} is not one of {ranks} ranks")]
    Rank { rank: Rank, ranks: usize },
}

const MAGIC: u64 = u64::from_le_bytes(*b"expertd1");
const SHAPE_FIELDS: [&str; 7] =
    ["magic", "generation", "ranks", "slots", "hidden", "max_top_k", "max_tokens_per_rank"];

/// Offsets within a window, the same for every rank.
#[derive(Clone, Debug)]
pub struct WindowLayout {
    shape: WindowShape,
    claim: usize,
    doorbell: usize,
    error: usize,
    flags: usize,
    /// Bytes of the control words, which precede the areas.
    control: usize,
    /// `[slots, ranks]`.
    areas: Vec<AreaOffsets>,
    bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct AreaOffsets {
    head: usize,
    ids: usize,
    weights: usize,
    rows: usize,
    partials: usize,
}

impl WindowLayout {
    /// Lays out a window.
    ///
    /// # Errors
    /// [`RegionError::TooLarge`] if all windows together exceed the address space.
    pub fn new(shape: WindowShape) -> Result<Self, RegionError> {
        let WindowShape { ranks, slots, hidden, max_top_k, max_tokens_per_rank } = shape;
        let area = |width: usize| max_tokens_per_rank.saturating_mul(width).saturating_mul(size_of::<f32>());
        let mut layout = Layout::new();
        layout.line(SHAPE_FIELDS.len() * size_of::<u64>())?;
        let claim = layout.line(size_of::<u64>())?;
        let doorbell = layout.line(size_of::<u32>())?;
        let error = layout.line(size_of::<u64>())?;
        let flags = layout.line(slots.saturating_mul(2).saturating_mul(ranks).saturating_mul(LINE))?;
        let control = layout.len();
        let mut areas = Vec::new();
        for _ in 0..slots * ranks {
            areas.push(AreaOffsets {
                head: layout.page(size_of::<AreaHeader>())?,
                ids: layout.line(area(max_top_k))?,
                weights: layout.line(area(max_top_k))?,
                rows: layout.page(area(hidden))?,
                partials: layout.page(area(hidden))?,
            });
        }
        let bytes = layout.len();
        if bytes.checked_mul(ranks).is_none_or(|all| all > isize::MAX as usize) {
            return Err(RegionError::TooLarge { offset: bytes, bytes });
        }
        Ok(Self { shape, claim, doorbell, error, flags, control, areas, bytes })
    }

    /// Bytes of one window.
    pub const fn window_bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of the region, which holds one window per rank.
    pub const fn region_bytes(&self) -> usize {
        self.bytes * self.shape.ranks
    }

    /// Creates the windows of a generation; ranks inherit the region's descriptor.
    ///
    /// # Errors
    /// [`RegionError`] if there is no memory for them.
    pub fn create(&self, generation: Generation) -> Result<Arc<SharedRegion>, RegionError> {
        let region = SharedRegion::create(&format!("expertd-windows-{generation}"), self.region_bytes())?;
        for rank in 0..self.shape.ranks {
            let words = region.slice::<u64>(rank * self.bytes, SHAPE_FIELDS.len())?;
            for (word, value) in words.atomics().iter().zip(self.shape_words(generation)) {
                word.store(value, Ordering::Release);
            }
        }
        Ok(region)
    }

    fn shape_words(&self, generation: Generation) -> [u64; SHAPE_FIELDS.len()] {
        let s = &self.shape;
        let [ranks, slots, hidden, k, tokens] =
            [s.ranks, s.slots, s.hidden, s.max_top_k, s.max_tokens_per_rank].map(|v| v as u64);
        [MAGIC, generation.0, ranks, slots, hidden, k, tokens]
    }
}

/// Views of a dispatch area: what one rank writes for one other in one slot.
#[derive(Clone, Debug)]
pub(super) struct Area {
    pub(super) head: SharedSlice<AreaHeader>,
    pub(super) ids: SharedSlice<i32>,
    pub(super) weights: SharedSlice<f32>,
    pub(super) rows: SharedSlice<f32>,
}

/// One rank's view of all windows.
#[derive(Debug)]
pub(super) struct Windows {
    pub(super) shape: WindowShape,
    pub(super) generation: Generation,
    /// `[ranks]`.
    doorbells: Vec<Doorbell>,
    /// `[ranks]`.
    errors: Vec<SharedSlice<u64>>,
    /// `[ranks]`.
    flags: Vec<SharedSlice<u64>>,
    /// `[slots, ranks]`: this rank's dispatch area in the peer's window.
    pub(super) outgoing: Vec<Area>,
    /// `[slots, ranks]`: the peer's dispatch area in this rank's window.
    pub(super) incoming: Vec<Area>,
    /// `[slots, ranks]`: this rank's partials in the peer's window.
    pub(super) partials: Vec<SharedSlice<f32>>,
    /// `[slots, ranks]`: the peer's partials in this rank's window.
    pub(super) returned: Vec<SharedSlice<f32>>,
}

impl Windows {
    /// Claims `rank`'s window and makes every page present that this rank will access.
    pub(super) fn attach(
        layout: &WindowLayout,
        region: &Arc<SharedRegion>,
        rank: Rank,
        generation: Generation,
    ) -> Result<Self, AttachError> {
        let shape = layout.shape;
        if rank.index() >= shape.ranks {
            return Err(AttachError::Rank { rank, ranks: shape.ranks });
        }
        let own = rank.index() * layout.bytes;
        let words = region.slice::<u64>(own, SHAPE_FIELDS.len())?;
        for ((word, expected), field) in
            words.atomics().iter().zip(layout.shape_words(generation)).zip(SHAPE_FIELDS)
        {
            let found = word.load(Ordering::Acquire);
            if found != expected {
                return Err(AttachError::Shape { field, expected, found });
            }
        }
        let claim = region.slice::<u64>(own + layout.claim, 1)?;
        if claim.atomics()[0].swap(1, Ordering::AcqRel) != 0 {
            return Err(AttachError::Claimed { rank, generation });
        }

        let windows = (0..shape.ranks).map(|r| r * layout.bytes);
        let mut doorbells = Vec::new();
        let mut errors = Vec::new();
        let mut flags = Vec::new();
        for window in windows.clone() {
            doorbells.push(Doorbell::new(region.slice(window + layout.doorbell, 1)?));
            errors.push(region.slice(window + layout.error, 1)?);
            let words = shape.slots * 2 * shape.ranks * (LINE / size_of::<u64>());
            flags.push(region.slice(window + layout.flags, words)?);
            region.populate(window, layout.control)?;
        }
        region.populate(own, layout.bytes)?;

        let row_elements = shape.max_tokens_per_rank * shape.hidden;
        let choice_elements = shape.max_tokens_per_rank * shape.max_top_k;
        let area = |window: usize, at: &AreaOffsets| -> Result<Area, RegionError> {
            Ok(Area {
                head: region.slice(window + at.head, 1)?,
                ids: region.slice(window + at.ids, choice_elements)?,
                weights: region.slice(window + at.weights, choice_elements)?,
                rows: region.slice(window + at.rows, row_elements)?,
            })
        };
        let (mut outgoing, mut incoming, mut partials, mut returned) = (vec![], vec![], vec![], vec![]);
        for slot_areas in layout.areas.chunks(shape.ranks) {
            let mine = &slot_areas[rank.index()];
            for (window, theirs) in windows.clone().zip(slot_areas) {
                outgoing.push(area(window, mine)?);
                partials.push(region.slice(window + mine.partials, row_elements)?);
                region.populate(
                    window + mine.head,
                    mine.partials - mine.head + row_elements * size_of::<f32>(),
                )?;
                incoming.push(area(own, theirs)?);
                returned.push(region.slice(own + theirs.partials, row_elements)?);
            }
        }
        Ok(Self { shape, generation, doorbells, errors, flags, outgoing, incoming, partials, returned })
    }

    /// Maps an inherited descriptor and attaches to it.
    pub(super) fn from_fd(
        layout: &WindowLayout,
        fd: OwnedFd,
        rank: Rank,
        generation: Generation,
    ) -> Result<Self, AttachError> {
        let region = SharedRegion::from_fd(fd, layout.region_bytes())?;
        Self::attach(layout, &region, rank, generation)
    }

    /// The flag in `owner`'s window that `writer` sets.
    pub(super) fn flag(&self, owner: usize, slot: Slot, kind: FlagKind, writer: usize) -> &AtomicU64 {
        let line = (slot.index() * 2 + kind as usize) * self.shape.ranks + writer;
        &self.flags[owner].atomics()[line * (LINE / size_of::<u64>())]
    }

    /// The error word in `owner`'s window.
    pub(super) fn error(&self, owner: usize) -> &AtomicU64 {
        &self.errors[owner].atomics()[0]
    }

    /// The doorbell in `owner`'s window.
    pub(super) fn doorbell(&self, owner: usize) -> &Doorbell {
        &self.doorbells[owner]
    }

    /// Index of a slot and rank in the area lists.
    pub(super) const fn area(&self, slot: Slot, rank: usize) -> usize {
        slot.index() * self.shape.ranks + rank
    }
}
