//! Tiles of few rows as fixed-point numbers, which some kernels multiply faster than f32.
#![allow(unsafe_code, reason = "calls kernels")]

use super::kernels::fixed_kernel;
use super::packed::{K_BLOCK, PackedMatrix};

/// Rows that are packed in tiles.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a> {
    /// Number of rows.
    pub(crate) rows: usize,
    /// The elements: f32, or one tile that [`fix_tile`] converted.
    pub(crate) x: &'a [f32],
    /// The scales of a converted tile, `[blocks, rows]`; empty for f32.
    pub(crate) scales: &'a [f32],
}

impl<'a> PackedRows<'a> {
    /// Rows in `x`, operands of `matrix`. If it [takes](takes_fixed) as many in fixed point, [`fix_tile`] has written `scales`, or they are
    /// empty and the rows f32.
    pub(crate) fn new(matrix: &PackedMatrix, rows: usize, x: &'a [f32], scales: &'a [f32]) -> Self {
        let fixed = takes_fixed(matrix, rows) && scales.first().is_some_and(|scale| !scale.is_nan());
        PackedRows { rows, x, scales: if fixed { scales } else { &[] } }
    }
}

/// Whether the kernels of `matrix` multiply `rows` rows, one tile, in fixed point.
pub(crate) fn takes_fixed(matrix: &PackedMatrix, rows: usize) -> bool {
    let kernel = fixed_kernel(matrix.level(), matrix.format(), matrix.groups);
    kernel.is_some_and(|kernel| (1..=kernel.multiply.len()).contains(&rows)) && matrix.level().is_supported()
}

/// Converts a tile of packed rows, of a number that `matrix` [takes](takes_fixed), in place into fixed-point numbers and writes the
/// scales of its blocks. If an element is not finite, the tile stays f32 and the first scale becomes NaN.
///
/// # Panics
/// If `x` is not a tile of packed rows for `matrix`, `scales` does not have one element per block and row, or `matrix` takes no such
/// tiles.
pub(crate) fn fix_tile(matrix: &PackedMatrix, rows: usize, x: &mut [f32], scales: &mut [f32]) {
    assert_eq!((x.len(), scales.len()), (rows * matrix.blocks() * K_BLOCK, rows * matrix.blocks()));
    assert!(takes_fixed(matrix, rows));
    // Without short-circuits, so that the compiler vectorises it.
    let finite = x.iter().fold(true, |finite, x| finite & x.is_finite());
    match fixed_kernel(matrix.level(), matrix.format(), matrix.groups).filter(|_| finite) {
        Some(kernel) => {
            for (block, scale) in x.as_chunks_mut().0.iter_mut().zip(scales) {
                // SAFETY: the CPU supports the level.
                *scale = unsafe { (kernel.convert)(block) };
            }
        }
        None => scales[0] = f32::NAN,
    }
}

#[cfg(test)]
mod tests;
