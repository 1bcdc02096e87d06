//! Rows times a packed matrix.
#![allow(unsafe_code, reason = "threads write disjoint parts of the packed rows and of the output")]

use rayon::ThreadPool;

use super::level::Level;
use super::memory::Buffer;
use super::packed::PackedMatrix;
use super::panel::multiply;
use super::parallel::{Items, Shared, run};
use super::tiles::{Tiling, pack_row, padded};

/// Rows that are packed at a time: few enough to stay in the L2 cache while all panels go by.
const CHUNK: usize = 120;

/// Items that a chunk should at least make, to keep all threads busy.
const ITEMS: usize = 64;

/// Memory that [`matmul`] works in.
#[derive(Debug)]
pub struct MatmulScratch {
    x: Buffer<f32>,
    /// Sums of rows with one panel, per thread.
    sums: Vec<Buffer<f32>>,
}

impl MatmulScratch {
    /// Scratch for matrices of up to `max_k` input features, any number of rows, and `threads` threads.
    #[must_use]
    pub fn new(max_k: usize, threads: usize) -> Self {
        let panel = Level::ALL.map(Level::panel).into_iter().max().unwrap_or(0);
        MatmulScratch {
            x: Buffer::resident(CHUNK * padded(max_k)),
            sums: (0..threads.max(1)).map(|_| Buffer::resident(CHUNK * panel)).collect(),
        }
    }
}

#[cfg(test)]
impl MatmulScratch {
    /// Fills it with not-a-number, which must not reach any result.
    pub(crate) fn poison(&mut self) {
        self.x.fill(f32::NAN);
        self.sums.iter_mut().for_each(|sums| sums.fill(f32::NAN));
    }
}

/// `out = rows * matrix^T`: `rows` is `[m, k]`, `out` `[m, n]`, both f32 and row-major. Sums are f32; the bits of a row
/// do not depend on the number of threads.
///
/// Works on `pool`, or on this thread if there is none, and does not allocate.
///
/// # Panics
/// If the lengths do not match, `k` exceeds what the scratch is for, or the matrix is a gated pair.
pub fn matmul(
    rows: &[f32],
    matrix: &PackedMatrix,
    out: &mut [f32],
    scratch: &mut MatmulScratch,
    pool: Option<&ThreadPool>,
) {
    let (n, k) = (matrix.n(), matrix.k());
    let m = rows.len() / k;
    assert_eq!(rows.len(), m * k, "rows of {k} features");
    assert_eq!(out.len(), m * n, "output of {m} rows of {n} features");
    assert!(padded(k) * CHUNK <= scratch.x.len(), "the scratch is for fewer input features than {k}");
    assert!(!matrix.is_gated(), "a gated pair is no plain matrix");
    for (rows, out) in rows.chunks(CHUNK * k).zip(out.chunks_mut(CHUNK * n)) {
        chunk(rows, matrix, out, scratch, pool);
    }
}

fn chunk(
    rows: &[f32],
    matrix: &PackedMatrix,
    out: &mut [f32],
    scratch: &mut MatmulScratch,
    pool: Option<&ThreadPool>,
) {
    let (n, k, width) = (matrix.n(), matrix.k(), matrix.level().panel());
    let (level, panels, count, stride) = (matrix.level(), matrix.panels(), rows.len() / k, padded(k));
    // An item is some rows and a panel: all rows, so that a panel's weights are read once, unless there are too few
    // panels. That must not depend on the number of threads, as the order of sums differs between sizes of tiles.
    let parts = ITEMS.div_ceil(panels);
    let per_part = count.div_ceil(parts).next_multiple_of(level.tile());
    let part = |part: usize| (part * per_part, per_part.min(count - part * per_part));
    let parts = count.div_ceil(per_part);

    let items = Items::new(parts);
    let packed = Shared::new(&mut scratch.x);
    run(pool, &mut scratch.sums, |_| {
        for (item, _) in items.iter() {
            let (start, count) = part(item);
            for tile in Tiling::new(level, count).iter() {
                let first = start + tile.start;
                // SAFETY: tiles do not overlap, and each is in one item.
                let x = unsafe { packed.part_mut(first * stride..(first + tile.rows) * stride) };
                for r in 0..tile.rows {
                    pack_row(x, tile.rows, r, &rows[(first + r) * k..][..k], None);
                }
            }
        }
    });

    let items = Items::new(parts * panels);
    let (x, out) = (&scratch.x, Shared::new(out));
    run(pool, &mut scratch.sums, |sums| {
        for (item, next) in items.iter() {
            let ((start, count), panel) = (part(item % parts), item / parts);
            let next = next.map_or(&[][..], |next| matrix.panel_data(next / parts));
            let sums = &mut sums[..count * width];
            sums.fill(0.0);
            multiply(matrix, panel, count, &x[start * stride..][..count * stride], sums, next);
            let columns = panel * width..n.min((panel + 1) * width);
            for (r, sums) in sums.chunks_exact(width).enumerate() {
                let row = (start + r) * n;
                // SAFETY: an item is a part's rows and a panel's columns, which no other item has.
                let out = unsafe { out.part_mut(row + columns.start..row + columns.end) };
                out.copy_from_slice(&sums[..columns.len()]);
            }
        }
    });
}
