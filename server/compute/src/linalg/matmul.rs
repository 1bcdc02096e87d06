//! Products of rows with a packed matrix.
#![allow(unsafe_code, reason = "threads write disjoint parts of the packed rows and of the output")]

use expertd_shm::ThreadTeam;

use super::fixed::{PackedRows, fix_tile, takes_fixed};
use super::memory::AlignedBuffer;
use super::packed::{K_BLOCK, PackedMatrix};
use super::panel::multiply;
use super::parallel::{DisjointSlice, WorkQueue, run_parallel};
use super::simd_level::SimdLevel;
use super::tiles::{Tiling, pack_row, padded};

/// Rows packed at a time, few enough to stay in the L2 cache while all panels are multiplied.
const CHUNK: usize = 120;

/// Smallest number of work items per chunk that keeps all threads busy.
const ITEMS: usize = 64;

/// Rows of the largest tile.
const MAX_TILE: usize = SimdLevel::Avx512.max_tile_rows();

/// Scratch memory of [`matmul`].
#[derive(Debug)]
pub struct MatmulScratch {
    x: AlignedBuffer<f32>,
    /// The scales of a tile of fixed-point rows.
    x_scales: AlignedBuffer<f32>,
    /// Products of rows with one panel, summed over k; one buffer per thread.
    sums: Vec<AlignedBuffer<f32>>,
}

impl MatmulScratch {
    /// Allocates scratch for any number of rows, matrices of up to `max_k` input features and `threads` threads.
    #[must_use]
    pub fn new(max_k: usize, threads: usize) -> Self {
        let panel = SimdLevel::ALL.map(SimdLevel::panel_width).into_iter().max().unwrap_or(0);
        MatmulScratch {
            x: AlignedBuffer::resident(CHUNK * padded(max_k)),
            x_scales: AlignedBuffer::resident(padded(max_k) / K_BLOCK * MAX_TILE),
            sums: (0..threads.max(1)).map(|_| AlignedBuffer::resident(CHUNK * panel)).collect(),
        }
    }
}

#[cfg(test)]
impl MatmulScratch {
    /// Fills the scratch with NaN, which must not reach any result.
    pub(crate) fn poison(&mut self) {
        self.x.fill(f32::NAN);
        self.x_scales.fill(f32::NAN);
        self.sums.iter_mut().for_each(|sums| sums.fill(f32::NAN));
    }
}

/// `out = rows * matrix^T`: `rows` is `[m, k]`, `out` is `[m, n]`, both f32 and row-major. Sums are f32; the bits of a
/// row do not depend on the number of threads.
///
/// Runs on `team`, or on the calling thread if there is none, and does not allocate.
///
/// # Panics
/// If the lengths do not match, `k` exceeds the scratch's `max_k`, or the matrix is a gated pair.
pub fn matmul(
    rows: &[f32],
    matrix: &PackedMatrix,
    out: &mut [f32],
    scratch: &mut MatmulScratch,
    team: Option<&ThreadTeam>,
) {
    let (n, k) = (matrix.n(), matrix.k());
    let m = rows.len() / k;
    assert_eq!(rows.len(), m * k, "rows of {k} features");
    assert_eq!(out.len(), m * n, "output of {m} rows of {n} features");
    assert!(padded(k) * CHUNK <= scratch.x.len(), "the scratch is too small for {k} input features");
    assert!(!matrix.is_gated(), "matmul takes a plain matrix, not a gated pair");
    for (rows, out) in rows.chunks(CHUNK * k).zip(out.chunks_mut(CHUNK * n)) {
        chunk(rows, matrix, out, scratch, team);
    }
}

fn chunk(
    rows: &[f32],
    matrix: &PackedMatrix,
    out: &mut [f32],
    scratch: &mut MatmulScratch,
    team: Option<&ThreadTeam>,
) {
    let (n, k, width) = (matrix.n(), matrix.k(), matrix.level().panel_width());
    let (level, panels, count, stride) = (matrix.level(), matrix.panels(), rows.len() / k, padded(k));
    // An item is one panel and some rows. All rows are best, because the panel's weights are then read once; with too
    // few panels the rows are divided. The division must not depend on the number of threads, because the order of sums
    // differs between tile sizes.
    let parts = ITEMS.div_ceil(panels);
    let per_part = count.div_ceil(parts).next_multiple_of(level.max_tile_rows());
    let part = |part: usize| (part * per_part, per_part.min(count - part * per_part));
    let parts = count.div_ceil(per_part);

    let queue = WorkQueue::new(parts);
    let packed = DisjointSlice::new(&mut scratch.x);
    run_parallel(team, parts, &mut scratch.sums, |_| {
        for item in queue.items() {
            let (start, count) = part(item);
            for tile in Tiling::new(level, count).iter() {
                let first = start + tile.start;
                // SAFETY: tiles do not overlap, and each belongs to one item.
                let x = unsafe { packed.part_mut(first * stride..(first + tile.rows) * stride) };
                for r in 0..tile.rows {
                    pack_row(x, tile.rows, r, &rows[(first + r) * k..][..k], None);
                }
            }
        }
    });

    // Of more rows, the last part may be as few; those stay f32.
    let scales = if takes_fixed(matrix, count) { count * matrix.blocks() } else { 0 };
    if scales > 0 {
        fix_tile(matrix, count, &mut scratch.x[..count * stride], &mut scratch.x_scales[..scales]);
    }

    let queue = WorkQueue::new(parts * panels);
    let (x, x_scales) = (&scratch.x, &scratch.x_scales[..scales]);
    let out = DisjointSlice::new(out);
    run_parallel(team, parts * panels, &mut scratch.sums, |sums| {
        for (item, next) in queue.with_next() {
            let ((start, count), panel) = (part(item % parts), item / parts);
            let next = next.map_or(&[][..], |next| matrix.panel_data(next / parts));
            let sums = &mut sums[..count * width];
            sums.fill(0.0);
            let x = &x[start * stride..][..count * stride];
            multiply(matrix, panel, PackedRows::new(matrix, count, x, x_scales), sums, next);
            let columns = panel * width..n.min((panel + 1) * width);
            for (r, sums) in sums.chunks_exact(width).enumerate() {
                let row = (start + r) * n;
                // SAFETY: an item owns its rows and its panel's columns; no other item has both.
                let out = unsafe { out.part_mut(row + columns.start..row + columns.end) };
                out.copy_from_slice(&sums[..columns.len()]);
            }
        }
    });
}
