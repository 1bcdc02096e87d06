//! Where everything of the channels stands in their memory.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;
use serde::{Deserialize, Serialize};

use super::super::region::{Layout, RegionError, SharedRegion, SharedSlice};
use super::super::ring::RingPlace;
use super::records::{Completion, Segment, StepDescriptor};

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

/// Rows are copied in runs that begin on their own cache line.
pub(super) const SEGMENT_ALIGN: usize = 64;

/// Where an array of `T` stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<T> {
    offset: usize,
    pub(super) len: usize,
    pub(super) element: PhantomData<fn() -> T>,
}

impl<T: Pod> Place<T> {
    fn reserve(layout: &mut Layout, len: usize) -> Result<Self, RegionError> {
        let offset = layout.line(len.saturating_mul(size_of::<T>()))?;
        Ok(Place { offset, len, element: PhantomData })
    }

    pub(super) fn view(&self, region: &Arc<SharedRegion>) -> Result<SharedSlice<T>, RegionError> {
        region.slice(self.offset, self.len)
    }
}

#[derive(Debug)]
pub(super) struct SlotPlaces {
    pub(super) segments: Place<Segment>,
    pub(super) ids: Place<i32>,
    pub(super) weights: Place<f32>,
    pub(super) token_ids: Place<i32>,
    pub(super) rows: Place<u8>,
}

impl SlotPlaces {
    /// From the first to the last byte of the slot's staging.
    fn bytes(&self) -> Range<usize> {
        self.segments.offset..self.rows.offset + self.rows.len
    }
}

#[derive(Debug)]
pub(super) struct LinkPlaces {
    pub(super) steps: RingPlace<StepDescriptor>,
    pub(super) completions: RingPlace<Completion>,
    pub(super) heartbeat: Place<u64>,
    pub(super) experts_done: Place<u64>,
    pub(super) bell: Place<u32>,
    pub(super) slots: Vec<SlotPlaces>,
}

impl LinkPlaces {
    /// From the first to the last byte of the staging of all slots.
    pub(super) fn staging(&self) -> Range<usize> {
        let start = self.slots.first().map_or(0, |slot| slot.bytes().start);
        start..self.slots.last().map_or(start, |slot| slot.bytes().end)
    }
}

/// Where everything stands: the same for all processes, computed from the shape.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) early_notice: Place<u32>,
    pub(super) links: Vec<LinkPlaces>,
    pub(super) bytes: usize,
}

impl Places {
    pub(super) fn new(shape: &GroupShape) -> Result<Self, RegionError> {
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

/// Views of one rank's staging in one slot.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) segments: SharedSlice<Segment>,
    pub(super) ids: SharedSlice<i32>,
    pub(super) weights: SharedSlice<f32>,
    pub(super) token_ids: SharedSlice<i32>,
    pub(super) rows: SharedSlice<u8>,
}

impl Staging {
    pub(super) fn views(places: &[SlotPlaces], region: &Arc<SharedRegion>) -> Result<Vec<Self>, RegionError> {
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
