//! Scratch memory of the grouped MLP.

use crate::linalg::{AlignedBuffer, K_BLOCK, SimdLevel, Tiling, padded};

/// Largest sizes that a [`Workspace`] supports.
#[derive(Clone, Copy, Debug)]
pub struct WorkspaceSize {
    /// Length of the longest row.
    pub hidden: usize,
    /// Largest number of features between the projections of an expert, shared experts included.
    pub intermediate: usize,
    /// Largest number of assignments per call: rows times the most local experts that a row can have.
    pub assignments: usize,
    /// Number of threads of the team that calls use; 1 without a team.
    pub threads: usize,
}

/// Scratch of [`forward`](super::forward), allocated once.
#[derive(Debug)]
pub struct Workspace {
    /// Packed input rows of a chunk.
    pub(super) x: AlignedBuffer<f32>,
    /// Packed inputs of the down projections of a chunk.
    pub(super) h: AlignedBuffer<f32>,
    /// Scales of the blocks of fixed-point rows in `x`, `[chunk, blocks]`.
    pub(super) x_scales: AlignedBuffer<f32>,
    /// The same for `h`.
    pub(super) h_scales: AlignedBuffer<f32>,
    /// The parts of a chunk.
    pub(super) parts: Vec<ExpertPart>,
    /// Products of rows with one panel, summed over k; one buffer per thread.
    pub(super) sums: Vec<AlignedBuffer<f32>>,
    pub(super) size: WorkspaceSize,
    /// Largest number of assignments computed together.
    pub(super) chunk: usize,
    /// Largest number of assignments of a part.
    pub(super) part: usize,
}

/// A part of a chunk: assignments of one expert. An expert with many assignments has several parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertPart {
    pub(super) expert: usize,
    /// Index of the first one in [`Assignments`](crate::experts::Assignments).
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Number of rows in earlier parts of the chunk.
    pub(super) start: usize,
    /// The part's rows as tiles.
    pub(super) tiling: Tiling,
    /// Number of tiles in earlier parts of the chunk.
    pub(super) tiles: usize,
}

/// Target size of a chunk's packed rows: the outer caches supply them once per few panels.
const CHUNK_BYTES: usize = 6 << 20;

/// Target size of a part's packed rows: the L2 cache supplies them once per panel.
const PART_BYTES: usize = 1 << 20;

/// Smallest limit on the rows of a part: weights are read once per part.
const PART_ROWS: usize = 60;

/// Smallest limit on the rows of a chunk: weights are read once per chunk, and the work of this many rows hides that.
const CHUNK_ROWS: usize = 256;

impl Workspace {
    /// Allocates the memory that calls up to `size` need.
    #[must_use]
    pub fn new(size: WorkspaceSize) -> Self {
        let row = padded(size.hidden) + padded(size.intermediate);
        let chunk = (CHUNK_BYTES / (4 * row)).max(CHUNK_ROWS).min(size.assignments.max(1));
        let widest = padded(size.hidden).max(padded(size.intermediate));
        let part = (PART_BYTES / (4 * widest)).max(PART_ROWS).min(chunk);
        let panel = SimdLevel::ALL.map(SimdLevel::panel_width).into_iter().max().unwrap_or(0);
        Workspace {
            x: AlignedBuffer::resident(chunk * padded(size.hidden)),
            h: AlignedBuffer::resident(chunk * padded(size.intermediate)),
            x_scales: AlignedBuffer::resident(chunk * padded(size.hidden) / K_BLOCK),
            h_scales: AlignedBuffer::resident(chunk * padded(size.intermediate) / K_BLOCK),
            parts: Vec::with_capacity(chunk),
            sums: (0..size.threads.max(1)).map(|_| AlignedBuffer::resident(part * panel)).collect(),
            size,
            chunk,
            part,
        }
    }

    /// Size of the workspace once all of it has been used, in bytes.
    pub fn bytes(&self) -> usize {
        let rows = [&self.x, &self.h, &self.x_scales, &self.h_scales];
        rows.into_iter().chain(&self.sums).map(|buffer| buffer.len()).sum::<usize>() * size_of::<f32>()
    }

    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.x.fill(f32::NAN);
        self.h.fill(f32::NAN);
        self.x_scales.fill(1.0);
        self.h_scales.fill(1.0);
        self.sums.iter_mut().for_each(|sums| sums.fill(f32::NAN));
    }
}
