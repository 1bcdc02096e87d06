//! Rows that each rank's experts have computed, in memory that outlives generations.
//!
//! Ranks add to their own part of the table after each step; the router reads all of it at any time. Parts begin on pages of their
//! own, so that a GPU rank can pin its part, and a rank writes no line that another one writes.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use expertd_types::Rank;
use serde::{Deserialize, Serialize};

use expertd_shm::region::{Layout, PAGE, RegionError, SharedRegion, SharedSlice};

/// Sizes of a table of row counts. Every process computes the same layout from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCountsShape {
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Number of decoder layers of the checkpoint, with or without MoE.
    pub layers: u32,
    /// Largest number of experts of any layer.
    pub experts: u32,
}

impl RowCountsShape {
    /// Number of counts of one rank.
    const fn cells(&self) -> usize {
        self.layers as usize * self.experts as usize
    }

    /// Bytes of one rank's part, in whole pages.
    const fn part_bytes(&self) -> usize {
        let bytes = self.cells() * size_of::<u64>();
        // At least one page, because memory of no bytes can be neither mapped nor pinned.
        if bytes == 0 { PAGE } else { bytes.next_multiple_of(PAGE) }
    }
}

/// The number of rows that each expert of each layer has computed on each rank since the service started.
#[derive(Clone, Debug)]
pub struct RowCounts {
    shape: RowCountsShape,
    region: Arc<SharedRegion>,
    /// `[ranks]`, each `[layers, experts]`.
    parts: Vec<SharedSlice<u64>>,
}

impl RowCounts {
    /// Makes a table of zeros.
    pub fn create(shape: RowCountsShape) -> Result<Self, RegionError> {
        let (bytes, offsets) = Self::layout(&shape)?;
        Self::over(shape, SharedRegion::create("expertd-row-counts", bytes)?, &offsets)
    }

    /// Maps the table in inherited memory.
    ///
    /// # Errors
    /// If the descriptor's memory does not have the shape's layout.
    pub fn join(shape: RowCountsShape, fd: OwnedFd) -> Result<Self, RegionError> {
        let (bytes, offsets) = Self::layout(&shape)?;
        Self::over(shape, SharedRegion::from_fd(fd, bytes)?, &offsets)
    }

    fn layout(shape: &RowCountsShape) -> Result<(usize, Vec<usize>), RegionError> {
        let mut layout = Layout::new();
        let parts = (0..shape.ranks).map(|_| layout.page(shape.part_bytes()));
        let offsets = parts.collect::<Result<Vec<_>, _>>()?;
        Ok((layout.len(), offsets))
    }

    fn over(
        shape: RowCountsShape,
        region: Arc<SharedRegion>,
        offsets: &[usize],
    ) -> Result<Self, RegionError> {
        let parts = offsets.iter().map(|&offset| region.slice(offset, shape.cells()));
        Ok(RowCounts { shape, parts: parts.collect::<Result<_, _>>()?, region })
    }

    /// Descriptor of the memory, which ranks inherit and map.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.region.as_fd()
    }

    /// Sizes of the table.
    #[must_use]
    pub const fn shape(&self) -> RowCountsShape {
        self.shape
    }

    /// `[experts]`: counts of a layer on a rank.
    ///
    /// # Panics
    /// If there is no such rank or layer.
    pub fn of(&self, rank: Rank, layer: usize) -> &[AtomicU64] {
        let experts = self.shape.experts as usize;
        &self.parts[rank.index()].atomics()[layer * experts..][..experts]
    }

    /// Adds `rows` to an expert's count. Only the rank itself adds to its counts.
    ///
    /// # Panics
    /// If there is no such rank, layer or expert.
    pub fn add(&self, rank: Rank, layer: usize, expert: usize, rows: u64) {
        self.of(rank, layer)[expert].fetch_add(rows, Ordering::Relaxed);
    }

    /// Copies the counts of a layer: `[ranks][experts]`, of which the first `experts` experts are copied.
    ///
    /// # Panics
    /// If there is no such layer, or fewer experts.
    pub fn layer(&self, layer: usize, experts: usize) -> Vec<Vec<u64>> {
        let read = |cells: &[AtomicU64]| cells.iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        (0..self.shape.ranks).map(|rank| read(&self.of(Rank(rank), layer)[..experts])).collect()
    }

    /// Address and length in bytes of a rank's part, in whole pages, for devices that write it directly. Valid as long as the
    /// table lives.
    ///
    /// # Panics
    /// If there is no such rank.
    #[must_use]
    pub fn pages(&self, rank: Rank) -> (*mut u8, usize) {
        (self.parts[rank.index()].as_ptr().cast(), self.shape.part_bytes())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_router_reads_what_ranks_add() {
        let shape = RowCountsShape { ranks: 2, layers: 3, experts: 5 };
        let router = RowCounts::create(shape).unwrap();
        let join = || RowCounts::join(shape, router.fd().try_clone_to_owned().unwrap()).unwrap();
        let (zero, one) = (join(), join());
        zero.add(Rank(0), 2, 4, 7);
        one.add(Rank(1), 2, 4, 1);
        one.add(Rank(1), 2, 0, 3);
        drop((zero, one));
        // A rank of the next generation goes on counting.
        join().add(Rank(0), 2, 4, 10);
        assert_eq!(router.layer(2, 5), [[0, 0, 0, 0, 17], [3, 0, 0, 0, 1]]);
        assert_eq!(router.layer(2, 1), [[0], [3]]);
        assert_eq!(router.layer(1, 5), [[0; 5], [0; 5]]);
    }

    #[test]
    fn parts_are_whole_pages() {
        let shape = RowCountsShape { ranks: 3, layers: 7, experts: 129 };
        let counts = RowCounts::create(shape).unwrap();
        for rank in 0..3 {
            let (first, bytes) = counts.pages(Rank(rank));
            assert_eq!((first as usize % PAGE, bytes % PAGE), (0, 0));
            assert!(bytes >= 7 * 129 * 8);
        }
        let other = RowCountsShape { experts: 1290, ..shape };
        let error = RowCounts::join(other, counts.fd().try_clone_to_owned().unwrap()).unwrap_err();
        assert!(matches!(error, RegionError::Length { .. }), "{error}");
        RowCounts::create(RowCountsShape { layers: 0, ..shape }).unwrap();
    }
}
