//! The layout of the wire's memory:
//!
//! ```text
//! shape       the sizes that the creator used; a rank that attaches compares them with its own
//! claims      one word for each rank, the source first
//! per slot:
//!   sent      the source's word
//!   spared    the source's word of a step without work for CPU ranks
//!   ids       [max_tokens, k] i32, where k is that of the step
//!   weights   [max_tokens, k] f32
//!   rows      [max_tokens, stride] bf16
//!   per CPU rank:
//!     done    its word
//!     sums    [max_tokens, stride] f32
//! ```
//!
//! The stride is `hidden` rounded up to a multiple of 64 elements, as GPUs hold rows; elements from `hidden` on are zeros or not written.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use expertd_ipc::GroupShape;
use expertd_shm::region::{Layout, RegionError, SharedRegion, SharedSlice};
use expertd_types::{Generation, Sequence};

/// Largest number of CPU ranks of a mixed group.
pub const MAX_WORKERS: usize = 7;
/// Rows begin at multiples of this number of elements.
const STRIDE_UNIT: usize = 64;
const MAGIC: u64 = u64::from_le_bytes(*b"expertdt");
const SHAPE_FIELDS: [&str; 7] =
    ["magic", "generation", "CPU ranks", "slots", "hidden", "max_top_k", "max_tokens"];

/// Why the wire cannot be used, or a wait on it failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum WireError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("the wire of a mixed group was created with {field} = {found}, this rank expects {expected}")]
    Shape { field: &'static str, expected: u64, found: u64 },
    #[error(
        "the place of rank {rank} at the wire of generation {generation} has been claimed before; wires are never reused"
    )]
    Claimed { rank: usize, generation: Generation },
    #[error("rank {rank} is not one of the {ranks} ranks at the wire")]
    Rank { rank: usize, ranks: usize },
    #[error("the step has {found} {what}, expected at most {limit}")]
    Limit { what: &'static str, found: usize, limit: usize },
    #[error("step {expected}: {whose} is at step {found} already; ranks must run the same steps")]
    Ahead { whose: &'static str, expected: Sequence, found: Sequence },
    #[error("the source rank did not send the rows of step {sequence} within {waited:?}")]
    Late { sequence: Sequence, waited: Duration },
    #[error("the sums of step {sequence} did not come from rank(s) {ranks:?} within {waited:?}")]
    Missing { sequence: Sequence, ranks: Vec<usize>, waited: Duration },
}

/// The sizes that determine the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierShape {
    /// Number of CPU ranks beside the source.
    pub workers: usize,
    /// Sets of step buffers.
    pub slots: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Largest number of experts per token.
    pub max_top_k: usize,
    /// Largest number of rows of a step.
    pub max_tokens: usize,
}

/// Offsets of a slot's places from the beginning of the memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPlaces {
    /// The source's word.
    pub sent: usize,
    /// The source's word of a step without work for CPU ranks.
    pub spared: usize,
    /// Ids of experts; -1 for a choice that no CPU rank computes.
    pub ids: usize,
    /// Routing weights.
    pub weights: usize,
    /// Rows.
    pub rows: usize,
    /// `[workers]`: each CPU rank's word.
    pub done: Vec<usize>,
    /// `[workers]`: each CPU rank's sums.
    pub sums: Vec<usize>,
}

/// Offsets of everything in the memory; every process computes the same ones.
#[derive(Clone, Debug)]
pub struct TierLayout {
    pub(crate) shape: TierShape,
    claims: usize,
    slots: Vec<SlotPlaces>,
    bytes: usize,
}

impl TierLayout {
    /// Lays out the memory.
    ///
    /// # Errors
    /// If it exceeds the address space, or there are more than [`MAX_WORKERS`] CPU ranks.
    pub fn new(shape: TierShape) -> Result<Self, WireError> {
        let TierShape { workers, slots, max_top_k, max_tokens, .. } = shape;
        if !(1..=MAX_WORKERS).contains(&workers) {
            return Err(WireError::Limit { what: "CPU ranks", found: workers, limit: MAX_WORKERS });
        }
        let area = |width: usize, size: usize| max_tokens.saturating_mul(width).saturating_mul(size);
        let mut layout = Layout::new();
        layout.line(SHAPE_FIELDS.len() * size_of::<u64>())?;
        let claims = layout.line((workers + 1) * size_of::<u64>())?;
        let mut places = Vec::new();
        for _ in 0..slots {
            let mut slot = SlotPlaces {
                sent: layout.page(size_of::<u64>())?,
                spared: layout.line(size_of::<u64>())?,
                ids: layout.line(area(max_top_k, size_of::<i32>()))?,
                weights: layout.line(area(max_top_k, size_of::<f32>()))?,
                rows: layout.page(area(shape.stride(), size_of::<u16>()))?,
                done: Vec::new(),
                sums: Vec::new(),
            };
            for _ in 0..workers {
                slot.done.push(layout.page(size_of::<u64>())?);
                slot.sums.push(layout.page(area(shape.stride(), size_of::<f32>()))?);
            }
            places.push(slot);
        }
        Ok(TierLayout { shape, claims, slots: places, bytes: layout.len() })
    }

    /// Bytes of the memory.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Places of each slot.
    #[must_use]
    pub fn slots(&self) -> &[SlotPlaces] {
        &self.slots
    }

    /// Creates the memory of a generation; its ranks inherit the descriptor.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn create(&self, generation: Generation) -> Result<Arc<SharedRegion>, WireError> {
        let region = SharedRegion::create(&format!("expertd-tier-{generation}"), self.bytes)?;
        let words = region.slice::<u64>(0, SHAPE_FIELDS.len())?;
        for (word, value) in words.atomics().iter().zip(self.shape_words(generation)) {
            word.store(value, Ordering::Release);
        }
        Ok(region)
    }

    /// Checks that memory was created for these sizes and this generation, and claims the place of `rank`, where the source is 0.
    pub(crate) fn claim(
        &self,
        region: &Arc<SharedRegion>,
        rank: usize,
        generation: Generation,
    ) -> Result<(), WireError> {
        let ranks = self.shape.workers + 1;
        if rank >= ranks {
            return Err(WireError::Rank { rank, ranks });
        }
        let words = region.slice::<u64>(0, SHAPE_FIELDS.len())?;
        for ((word, expected), field) in
            words.atomics().iter().zip(self.shape_words(generation)).zip(SHAPE_FIELDS)
        {
            let found = word.load(Ordering::Acquire);
            if found != expected {
                return Err(WireError::Shape { field, expected, found });
            }
        }
        let claims = region.slice::<u64>(self.claims, ranks)?;
        if claims.atomics()[rank].swap(1, Ordering::AcqRel) != 0 {
            return Err(WireError::Claimed { rank, generation });
        }
        Ok(())
    }

    fn shape_words(&self, generation: Generation) -> [u64; SHAPE_FIELDS.len()] {
        let s = &self.shape;
        let [workers, slots, hidden, k, tokens] =
            [s.workers, s.slots, s.hidden, s.max_top_k, s.max_tokens].map(|size| size as u64);
        [MAGIC, generation.0, workers, slots, hidden, k, tokens]
    }
}

impl TierShape {
    /// The sizes for a mixed group of this shape.
    #[must_use]
    pub const fn of(shape: &GroupShape) -> Self {
        TierShape {
            workers: shape.ranks.saturating_sub(shape.sources) as usize,
            slots: shape.slots as usize,
            hidden: shape.hidden,
            max_top_k: shape.max_top_k,
            max_tokens: shape.max_tokens_per_rank,
        }
    }

    /// Elements from the beginning of a row to that of the next one.
    #[must_use]
    pub const fn stride(&self) -> usize {
        self.hidden.next_multiple_of(STRIDE_UNIT)
    }

    /// Fails if a step of `tokens` rows with `k` experts each does not fit.
    pub(crate) fn check(&self, tokens: usize, k: usize) -> Result<(), WireError> {
        for (what, found, limit) in
            [("rows", tokens, self.max_tokens), ("experts per token", k, self.max_top_k)]
        {
            if found > limit {
                return Err(WireError::Limit { what, found, limit });
            }
        }
        Ok(())
    }
}

/// Views of what the source writes in one slot.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    pub(crate) word: SharedSlice<u64>,
    pub(crate) spared: SharedSlice<u64>,
    pub(crate) ids: SharedSlice<i32>,
    pub(crate) weights: SharedSlice<f32>,
    pub(crate) rows: SharedSlice<u16>,
}

/// Views of what one CPU rank writes in one slot.
#[derive(Clone, Debug)]
pub(crate) struct Returned {
    pub(crate) word: SharedSlice<u64>,
    pub(crate) sums: SharedSlice<f32>,
}

impl TierLayout {
    /// `[slots]`: what the source writes.
    pub(crate) fn sent(&self, region: &Arc<SharedRegion>) -> Result<Vec<Sent>, WireError> {
        let TierShape { max_top_k, max_tokens, .. } = self.shape;
        let of = |slot: &SlotPlaces| {
            Ok(Sent {
                word: region.slice(slot.sent, 1)?,
                spared: region.slice(slot.spared, 1)?,
                ids: region.slice(slot.ids, max_tokens * max_top_k)?,
                weights: region.slice(slot.weights, max_tokens * max_top_k)?,
                rows: region.slice(slot.rows, max_tokens * self.shape.stride())?,
            })
        };
        self.slots.iter().map(of).collect()
    }

    /// `[slots]`: what a CPU rank writes.
    pub(crate) fn returned(
        &self,
        region: &Arc<SharedRegion>,
        worker: usize,
    ) -> Result<Vec<Returned>, WireError> {
        let elements = self.shape.max_tokens * self.shape.stride();
        let of = |slot: &SlotPlaces| {
            Ok(Returned {
                word: region.slice(slot.done[worker], 1)?,
                sums: region.slice(slot.sums[worker], elements)?,
            })
        };
        self.slots.iter().map(of).collect()
    }
}
