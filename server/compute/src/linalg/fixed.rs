//! Single rows as fixed-point numbers, which some kernels multiply faster than f32.
#![allow(unsafe_code, reason = "calls kernels")]

use super::kernels::fixed_kernel;
use super::packed::{K_BLOCK, PackedMatrix};

/// Rows that are packed in tiles.
#[derive(Clone, Copy)]
pub(crate) struct PackedRows<'a> {
    /// Number of rows.
    pub(crate) rows: usize,
    /// The elements: f32, or one row that [`fix_row`] converted.
    pub(crate) x: &'a [f32],
    /// The scales of a converted row, one per block; empty for f32.
    pub(crate) scales: &'a [f32],
}

impl<'a> PackedRows<'a> {
    /// Rows in `x`. If there is only one, [`fix_row`] has written `scales`.
    pub(crate) fn new(rows: usize, x: &'a [f32], scales: &'a [f32]) -> Self {
        let fixed = rows == 1 && scales.first().is_some_and(|scale| !scale.is_nan());
        PackedRows { rows, x, scales: if fixed { scales } else { &[] } }
    }
}

/// Converts a packed row in place into fixed-point numbers and writes the scales of its blocks. If the kernels of `matrix` take
/// no such rows, or an element is not finite, the row stays f32 and the first scale becomes NaN.
///
/// # Panics
/// If `x` is not a packed row for `matrix`, or `scales` does not have one element per block.
pub(crate) fn fix_row(matrix: &PackedMatrix, x: &mut [f32], scales: &mut [f32]) {
    assert_eq!((x.len(), scales.len()), (matrix.blocks() * K_BLOCK, matrix.blocks()));
    let kernel = fixed_kernel(matrix.level(), matrix.format(), matrix.groups);
    // Without short-circuits, so that the compiler vectorises it.
    let finite = |x: &[f32]| x.iter().fold(true, |finite, x| finite & x.is_finite());
    match kernel.filter(|_| matrix.level().is_supported() && finite(x)) {
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
