//! Layout of the channels in shared memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

use super::records::{Completion, MAX_RAISES, Raise, Segment, StepDescriptor};
use expertd_shm::region::{Layout, RegionError, SharedRegion, SharedSlice};
use expertd_shm::ring::RingLayout;
use expertd_types::USAGE_WORDS;

/// The sizes that determine the layout of the channels. The router and all ranks of a generation use the same ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupShape {
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Number of source ranks, which get the rows of steps: the first ones. All ranks, or 1 in a mixed group.
    pub sources: u32,
    /// Number of slots: sets of step buffers.
    pub slots: u32,
    /// Largest number of rows that one rank receives in one step.
    pub max_tokens_per_rank: usize,
    /// Largest number of segments that one rank receives in one step.
    pub max_segments: usize,
    /// Elements of a row.
    pub hidden: usize,
    /// Largest `k` of the model's layers.
    pub max_top_k: usize,
}

/// Alignment of a segment's rows in bytes: each segment begins on its own cache line.
pub(super) const SEGMENT_ALIGN: usize = 64;

/// Offset and length of an array of `T`.
#[derive(Clone, Copy, Debug)]
pub(super) struct ArrayLayout<T> {
    offset: usize,
    pub(super) len: usize,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T: Pod> ArrayLayout<T> {
    fn reserve(layout: &mut Layout, len: usize) -> Result<Self, RegionError> {
        let offset = layout.line(len.saturating_mul(size_of::<T>()))?;
        Ok(ArrayLayout { offset, len, element: PhantomData })
    }

    pub(super) fn view(&self, region: &Arc<SharedRegion>) -> Result<SharedSlice<T>, RegionError> {
        region.slice(self.offset, self.len)
    }
}

#[derive(Debug)]
pub(super) struct SlotLayout {
    pub(super) segments: ArrayLayout<Segment>,
    pub(super) raises: ArrayLayout<Raise>,
    /// One word: sequence of the last step whose completion words were raised.
    pub(super) raised: ArrayLayout<u64>,
    pub(super) ids: ArrayLayout<i32>,
    pub(super) weights: ArrayLayout<f32>,
    pub(super) token_ids: ArrayLayout<i32>,
    pub(super) rows: ArrayLayout<u8>,
}

impl SlotLayout {
    /// Range of the slot's staging in the region, in bytes.
    fn bytes(&self) -> Range<usize> {
        self.segments.offset..self.rows.offset + self.rows.len
    }
}

#[derive(Debug)]
pub(super) struct LinkLayout {
    pub(super) steps: RingLayout<StepDescriptor>,
    pub(super) completions: RingLayout<Completion>,
    pub(super) heartbeat: ArrayLayout<u64>,
    pub(super) usage: ArrayLayout<u64>,
    pub(super) experts_done: ArrayLayout<u64>,
    pub(super) bell: ArrayLayout<u32>,
    pub(super) slots: Vec<SlotLayout>,
}

impl LinkLayout {
    /// Range of the staging of all slots in the region, in bytes.
    pub(super) fn staging(&self) -> Range<usize> {
        let start = self.slots.first().map_or(0, |slot| slot.bytes().start);
        start..self.slots.last().map_or(start, |slot| slot.bytes().end)
    }
}

/// Offsets of all arrays and rings; every process computes the same ones from the shape.
#[derive(Debug)]
pub(super) struct ChannelLayout {
    pub(super) early_notice: ArrayLayout<u32>,
    /// One word: sequence of the last step that every rank's ring holds.
    pub(super) launched: ArrayLayout<u64>,
    pub(super) links: Vec<LinkLayout>,
    pub(super) bytes: usize,
}

impl ChannelLayout {
    pub(super) fn new(shape: &GroupShape) -> Result<Self, RegionError> {
        let mut layout = Layout::new();
        let early_notice = ArrayLayout::reserve(&mut layout, 1)?;
        let launched = ArrayLayout::reserve(&mut layout, 1)?;
        let records = (shape.slots as usize * 2).next_power_of_two();
        let mut links = Vec::new();
        for rank in 0..shape.ranks {
            // Other ranks need no staging.
            let is_source = rank < shape.sources;
            let of_source = |len: usize| if is_source { len } else { 0 };
            let rows = of_source(shape.max_tokens_per_rank);
            let mut link = LinkLayout {
                steps: RingLayout::reserve(&mut layout, records)?,
                completions: RingLayout::reserve(&mut layout, records)?,
                heartbeat: ArrayLayout::reserve(&mut layout, 1)?,
                usage: ArrayLayout::reserve(&mut layout, USAGE_WORDS)?,
                experts_done: ArrayLayout::reserve(&mut layout, 1)?,
                bell: ArrayLayout::reserve(&mut layout, 1)?,
                slots: Vec::new(),
            };
            for _ in 0..shape.slots {
                link.slots.push(SlotLayout {
                    segments: ArrayLayout::reserve(&mut layout, of_source(shape.max_segments))?,
                    raises: ArrayLayout::reserve(&mut layout, MAX_RAISES)?,
                    raised: ArrayLayout::reserve(&mut layout, 1)?,
                    ids: ArrayLayout::reserve(&mut layout, rows.saturating_mul(shape.max_top_k))?,
                    weights: ArrayLayout::reserve(&mut layout, rows.saturating_mul(shape.max_top_k))?,
                    token_ids: ArrayLayout::reserve(&mut layout, rows)?,
                    rows: ArrayLayout::reserve(&mut layout, of_source(shape.row_area_bytes()))?,
                });
            }
            links.push(link);
        }
        Ok(ChannelLayout { early_notice, launched, links, bytes: layout.len() })
    }
}

impl GroupShape {
    /// Whether ranks beside the sources compute experts.
    pub const fn is_mixed(&self) -> bool {
        self.sources < self.ranks
    }

    /// Bytes of a slot's row area: all rows in f32, and each segment on its own cache line.
    pub const fn row_area_bytes(&self) -> usize {
        (self.max_tokens_per_rank.saturating_mul(self.hidden).saturating_mul(4))
            .saturating_add(self.max_segments.saturating_mul(SEGMENT_ALIGN))
    }

    /// Bytes of the channels of all ranks.
    ///
    /// # Errors
    /// If that exceeds the address space.
    pub fn channel_bytes(&self) -> Result<usize, RegionError> {
        ChannelLayout::new(self).map(|places| places.bytes)
    }
}

/// Views of one rank's staging in one slot.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) segments: SharedSlice<Segment>,
    pub(super) raises: SharedSlice<Raise>,
    pub(super) raised: SharedSlice<u64>,
    pub(super) ids: SharedSlice<i32>,
    pub(super) weights: SharedSlice<f32>,
    pub(super) token_ids: SharedSlice<i32>,
    pub(super) rows: SharedSlice<u8>,
}

impl Staging {
    pub(super) fn views(places: &[SlotLayout], region: &Arc<SharedRegion>) -> Result<Vec<Self>, RegionError> {
        places
            .iter()
            .map(|slot| {
                Ok(Staging {
                    segments: slot.segments.view(region)?,
                    raises: slot.raises.view(region)?,
                    raised: slot.raised.view(region)?,
                    ids: slot.ids.view(region)?,
                    weights: slot.weights.view(region)?,
                    token_ids: slot.token_ids.view(region)?,
                    rows: slot.rows.view(region)?,
                })
            })
            .collect()
    }
}
