//! Memory that the grouped MLP works in.

use crate::linalg::{Buffer, Level, Tiling, padded};

/// What a [`Workspace`] is for.
#[derive(Clone, Copy, Debug)]
pub struct WorkspaceSize {
    /// Most features of a row.
    pub hidden: usize,
    /// Most features between the projections of an expert (shared experts too).
    pub intermediate: usize,
    /// Most assignments of a call: rows times the most local experts that a row can have.
    pub assignments: usize,
    /// Threads of the pool that calls will pass; 1 without one.
    pub threads: usize,
}

/// Scratch of [`forward`](super::forward), allocated once.
#[derive(Debug)]
pub struct Workspace {
    /// Packed input rows of a chunk.
    pub(super) x: Buffer<f32>,
    /// Packed inputs of the down projections of a chunk.
    pub(super) h: Buffer<f32>,
    /// The pieces of a chunk.
    pub(super) pieces: Vec<Piece>,
    /// Per thread.
    pub(super) sums: Vec<Buffer<f32>>,
    pub(super) size: WorkspaceSize,
    /// Assignments that are worked on at a time.
    pub(super) chunk: usize,
    /// Most assignments of a piece.
    pub(super) piece: usize,
}

/// Assignments of one expert within a chunk; an expert with many has several pieces.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) expert: usize,
    /// The first one, as a place in [`Assignments`](crate::experts::Assignments).
    pub(super) first: usize,
    pub(super) rows: usize,
    /// Rows of the chunk before it.
    pub(super) start: usize,
    /// Its rows as tiles.
    pub(super) tiling: Tiling,
    /// Tiles of the chunk before it.
    pub(super) tiles: usize,
}

/// Bytes of packed rows that a chunk should not exceed: they are read once per few panels, from the outer caches.
const CHUNK_BYTES: usize = 6 << 20;

/// Bytes of packed rows that a piece should not exceed: they are read once per panel, from the L2 cache.
const PIECE_BYTES: usize = 1 << 20;

/// Least rows to cut an expert's rows at: weights are read once per piece.
const PIECE_ROWS: usize = 60;

/// Least rows of a chunk: weights are read once per chunk, and this many hide that.
const CHUNK_ROWS: usize = 256;

impl Workspace {
    /// Allocates what calls of that size need.
    #[must_use]
    pub fn new(size: WorkspaceSize) -> Self {
        let row = padded(size.hidden) + padded(size.intermediate);
        let chunk = (CHUNK_BYTES / (4 * row)).max(CHUNK_ROWS).min(size.assignments.max(1));
        let widest = padded(size.hidden).max(padded(size.intermediate));
        let piece = (PIECE_BYTES / (4 * widest)).max(PIECE_ROWS).min(chunk);
        let panel = Level::ALL.map(Level::panel).into_iter().max().unwrap_or(0);
        Workspace {
            x: Buffer::resident(chunk * padded(size.hidden)),
            h: Buffer::resident(chunk * padded(size.intermediate)),
            pieces: Vec::with_capacity(chunk),
            sums: (0..size.threads.max(1)).map(|_| Buffer::resident(piece * panel)).collect(),
            size,
            chunk,
            piece,
        }
    }

    /// Bytes that it takes once all of it has been used.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.x.len() + self.h.len() + self.sums.iter().map(|sums| sums.len()).sum::<usize>())
            * size_of::<f32>()
    }

    #[cfg(test)]
    pub(super) fn poison(&mut self) {
        self.x.fill(f32::NAN);
        self.h.fill(f32::NAN);
        self.sums.iter_mut().for_each(|sums| sums.fill(f32::NAN));
    }
}
