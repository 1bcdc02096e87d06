//! Layout of a slot's window region, computed equally by every rank.

use crate::params::{MAX_BLOCKS, MAX_CHUNKS, MAX_RANKS, MAX_TOP_K};

/// The sizes that determine the kernels' buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of ranks in the group.
    pub ranks: u32,
    /// Largest number of rows per rank in a step.
    pub max_tokens: u32,
    /// Elements of a row.
    pub hidden: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Number of physical experts of a layer; without a placement that of its routed experts.
    pub experts: u32,
}

/// A size that the kernels do not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ShapeError {
    #[error("the number of ranks is {0}, expected 1 to {MAX_RANKS}")]
    Ranks(u32),
    #[error("the hidden size is {0}, expected a positive multiple of 8 (16 bytes of bf16)")]
    Hidden(u32),
    #[error(
        "top_k is {top_k}, expected 1 to {MAX_TOP_K} and at most the number of experts, which is {experts}"
    )]
    TopK { top_k: u32, experts: u32 },
    #[error(
        "max_tokens_per_rank is {0}, expected at least 1 and so few that ranks x max_tokens_per_rank x top_k and the \
         pieces of all rows fit 31 bits"
    )]
    MaxTokens(u32),
}

impl Shape {
    /// Checks that the kernels support these sizes.
    ///
    /// # Errors
    /// The first size that is not supported.
    pub fn check(&self) -> Result<(), ShapeError> {
        if self.ranks == 0 || self.ranks as usize > MAX_RANKS {
            return Err(ShapeError::Ranks(self.ranks));
        }
        if self.hidden == 0 || !self.hidden.is_multiple_of(8) {
            return Err(ShapeError::Hidden(self.hidden));
        }
        if self.top_k == 0 || self.top_k as usize > MAX_TOP_K || self.top_k > self.experts {
            return Err(ShapeError::TopK { top_k: self.top_k, experts: self.experts });
        }
        let entries = u64::from(self.ranks) * u64::from(self.max_tokens) * u64::from(self.top_k);
        // The device counts entries and pieces of rows in 32 bits.
        let items = u64::from(self.ranks) * u64::from(self.max_tokens) * u64::from(self.hidden.div_ceil(512));
        if self.max_tokens == 0 || entries.max(items) > i32::MAX as u64 {
            return Err(ShapeError::MaxTokens(self.max_tokens));
        }
        Ok(())
    }

    /// Range of `rank`'s experts: its first expert, and one past its last. The first `experts % ranks` ranks own one expert
    /// more than the others.
    #[must_use]
    pub fn expert_range(&self, rank: u32) -> (u32, u32) {
        let (share, extra) = (self.experts / self.ranks, self.experts % self.ranks);
        let first = rank * share + rank.min(extra);
        (first, first + share + u32::from(rank < extra))
    }

    /// Largest number of experts of one rank.
    #[must_use]
    pub fn max_local_experts(&self) -> u32 {
        self.experts.div_ceil(self.ranks)
    }

    /// Largest number of assignments, which are pairs of row and local expert, at one rank.
    #[must_use]
    pub fn max_assignments(&self) -> usize {
        self.ranks as usize * self.max_tokens as usize * self.top_k.min(self.max_local_experts()) as usize
    }

    /// Number of rows of a window.
    #[must_use]
    pub fn window_rows(&self) -> usize {
        self.ranks as usize * self.max_tokens as usize
    }
}

/// Byte offsets in a slot's window region, in the order of `Group` in `step.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowLayout {
    /// u64 `[N, MAX_BLOCKS]`.
    pub dispatch_flags: u64,
    /// u64 `[N, MAX_BLOCKS, MAX_CHUNKS]`.
    pub combine_flags: u64,
    /// u64 `[N]`.
    pub meet_flags: u64,
    /// u64 `[N]`.
    pub written_flags: u64,
    /// u32 `[N]`.
    pub counts: u64,
    /// i32 `[N, max_tokens, k]`.
    pub ids: u64,
    /// f32 `[N, max_tokens, k]`.
    pub weights: u64,
    /// bf16 `[N, max_tokens, H]`.
    pub rows: u64,
    /// bf16 `[N, max_tokens, H]`.
    pub partials: u64,
}

impl WindowLayout {
    /// Lays out a region; returns the offsets and the region's size in bytes.
    #[must_use]
    pub fn new(shape: &Shape) -> (WindowLayout, u64) {
        let mut end = 0_u64;
        let mut place = |bytes: usize| {
            let start = end;
            end = (start + bytes as u64).next_multiple_of(1024);
            start
        };
        let flags = shape.ranks as usize * MAX_BLOCKS * size_of::<u64>();
        let entries = shape.window_rows() * shape.top_k as usize * 4;
        let rows = shape.window_rows() * shape.hidden as usize * 2;
        let layout = WindowLayout {
            dispatch_flags: place(flags),
            combine_flags: place(flags * MAX_CHUNKS),
            meet_flags: place(shape.ranks as usize * size_of::<u64>()),
            written_flags: place(shape.ranks as usize * size_of::<u64>()),
            counts: place(shape.ranks as usize * 4),
            ids: place(entries),
            weights: place(entries),
            rows: place(rows),
            partials: place(rows),
        };
        (layout, end)
    }

    /// Number of bytes at the start of a region that must be zero before the first step: flags and counts.
    #[must_use]
    pub fn zeroed_bytes(&self) -> u64 {
        self.ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 4, max_tokens: 100, hidden: 2048, top_k: 8, experts: 10 };

    #[test]
    fn regions_do_not_overlap_and_are_aligned_for_bulk_copies() {
        let (layout, bytes) = WindowLayout::new(&SHAPE);
        let starts = [
            layout.dispatch_flags,
            layout.combine_flags,
            layout.meet_flags,
            layout.written_flags,
            layout.counts,
            layout.ids,
            layout.weights,
            layout.rows,
            layout.partials,
            bytes,
        ];
        let sizes = [4 * 128 * 8, 4 * 128 * 16 * 8, 32, 32, 16, 12800, 12800, 4 * 100 * 4096, 4 * 100 * 4096];
        for (pair, size) in starts.windows(2).zip(sizes) {
            assert!(pair[1] >= pair[0] + size && pair[0] % 1024 == 0, "{starts:?}");
        }
    }

    #[test]
    fn experts_are_placed_evenly() {
        let ranges: Vec<_> = (0..4).map(|rank| SHAPE.expert_range(rank)).collect();
        assert_eq!(ranges, [(0, 3), (3, 6), (6, 8), (8, 10)]);
        assert_eq!(SHAPE.max_local_experts(), 3);
        assert_eq!(SHAPE.max_assignments(), 4 * 100 * 3);
    }

    #[test]
    fn every_size_is_checked() {
        assert_eq!(SHAPE.check(), Ok(()));
        assert_eq!(Shape { ranks: 9, ..SHAPE }.check(), Err(ShapeError::Ranks(9)));
        assert_eq!(Shape { hidden: 2044, ..SHAPE }.check(), Err(ShapeError::Hidden(2044)));
        assert_eq!(Shape { top_k: 11, ..SHAPE }.check(), Err(ShapeError::TopK { top_k: 11, experts: 10 }));
        assert_eq!(Shape { max_tokens: 0, ..SHAPE }.check(), Err(ShapeError::MaxTokens(0)));
        assert!(Shape { max_tokens: 1 << 27, ..SHAPE }.check().is_err());
    }
}
