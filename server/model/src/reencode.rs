//! MXFP4 matrices re-encoded as FP8: e4m3 codes with an f32 scale for each row and 128 columns.
//!
//! The scale of a group is 2^(t - 6), where 2^t is the largest scale of its blocks. A block's code is its e2m1 value times 2^(6 - d),
//! where the block's scale is 2^(t - d). Up to d = 14 e4m3 holds all these values, the largest as 384 and the smallest as 2^-9. Of blocks
//! that lie further below, it holds some values; the others are rounded.

use std::ops::Range;
use std::sync::LazyLock;

use rayon::prelude::*;

use crate::codes::FP4;
use crate::{FP8_ROW_GROUP, MatrixView, Scales, WeightFormat};

/// Columns that share an MXFP4 exponent.
const BLOCK: usize = 32;
/// Columns that share an FP8 scale.
const GROUP: usize = FP8_ROW_GROUP;
/// Rows that share FP8 scales in matrices where sharing rounds no element.
const TILE_ROWS: usize = 128;
/// A group's FP8 scale is 2^-HEADROOM times its largest block scale.
const HEADROOM: i32 = 6;
/// The largest shift at which e4m3 holds all values of e2m1.
const EXACT_SHIFT: usize = 14;
/// The first shift at which all values of e2m1 are rounded to zero.
const ZERO_SHIFT: usize = 19;
/// Place of the codes of a NaN block in [`CODES`].
const NAN: usize = ZERO_SHIFT + 1;
/// The E8M0 exponent of blocks that are not numbers.
const NAN_EXPONENT: u8 = 255;
/// Smallest E8M0 exponent that a group's largest block scale counts as: with it the group's FP8 scale is the smallest normal f32.
const LEAST_TOP: u8 = 7;
/// E8M0 exponent that the largest block scale of a group of zeros counts as; the group's FP8 scale is 1.
const EMPTY_TOP: u8 = 127 + HEADROOM as u8;

/// `[shifts, then NaN][bytes]`: the two e4m3 codes of the two elements in a byte, the first one in the low bits.
static CODES: LazyLock<[[u16; 256]; NAN + 1]> = LazyLock::new(|| {
    std::array::from_fn(|shift| {
        std::array::from_fn(|byte| {
            let code = |nibble: usize| u16::from(fp8_code(nibble, shift));
            code(byte & 15) | code(byte >> 4) << 8
        })
    })
});

/// `[shifts]`: bit m is set if magnitude m of [`FP4`] is rounded.
static ROUNDED: LazyLock<[u8; NAN]> = LazyLock::new(|| {
    std::array::from_fn(|shift| {
        let is_rounded = |m: &usize| scaled(*m, shift) / step(scaled(*m, shift)) % 1.0 != 0.0;
        (0..8).filter(is_rounded).map(|m| 1 << m).sum()
    })
});

/// Magnitude number `m` of e2m1 in units of the group's FP8 scale, if its block's scale is `shift` powers of two below the
/// group's top.
fn scaled(m: usize, shift: usize) -> f32 {
    FP4[m] * 2f32.powi(HEADROOM - shift as i32)
}

/// The distance between neighbouring e4m3 values at a magnitude of at most 448.
fn step(magnitude: f32) -> f32 {
    (magnitude.log2().floor().max(-6.0) - 3.0).exp2()
}

/// The e4m3 code of an e2m1 code at a shift, rounded to nearest, ties to even.
fn fp8_code(nibble: usize, shift: usize) -> u8 {
    let sign = (nibble as u8 & 8) << 4;
    if shift == NAN {
        return sign | 0x7f;
    }
    let magnitude = scaled(nibble & 7, shift);
    let step = step(magnitude);
    let exponent = step.log2() as i32 + 3;
    // From 8 steps on the code continues with the next exponent.
    sign | ((exponent + 6) * 8 + (magnitude / step).round_ties_even() as i32) as u8
}

/// Properties of an FP8 encoding apart from its codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reencoded {
    /// Whether tiles of 128 × 128 elements share a scale; otherwise each row has scales of its own.
    pub block_scales: bool,
    /// Number of elements that e4m3 does not hold, which were rounded.
    pub rounded: u64,
}

/// Writes an MXFP4 matrix as rows of `cols` e4m3 codes, and one scale for each row and 128 columns: codes `[rows][cols]` and scales
/// `[rows][ceil(cols / 128)]`. Rows and columns outside the matrix are zero. Tiles of 128 × 128 share a scale if no element of the matrix is
/// rounded for it. Blocks that are not numbers become NaN codes. Uses the threads of the current rayon pool.
///
/// # Panics
/// If the matrix is not in MXFP4, [`MatrixView::check`] fails on it, or `cols`, `codes` or `scales` have no room for it.
pub fn mxfp4_as_fp8(view: &MatrixView<'_>, cols: usize, codes: &mut [u8], scales: &mut [f32]) -> Reencoded {
    assert_eq!(view.format, WeightFormat::Mxfp4);
    let groups = cols.div_ceil(GROUP);
    assert!(view.cols <= cols && codes.len() >= view.rows * cols, "an FP8 matrix has room for the MXFP4 one");
    assert!(scales.len() * cols >= codes.len() * groups, "each row of codes has scales");
    let matrix = Mxfp4 { view };
    let rows_of = |stripe: usize| stripe * TILE_ROWS..view.rows.min((stripe + 1) * TILE_ROWS);
    let stripes = view.rows.div_ceil(TILE_ROWS);
    let tiles: Vec<Tops> = (0..stripes).into_par_iter().map(|stripe| matrix.tops(rows_of(stripe))).collect();
    let block_scales = tiles.iter().all(|tops| tops.is_exact);
    let parts = codes.par_chunks_mut(TILE_ROWS * cols).zip(scales.par_chunks_mut(TILE_ROWS * groups));
    let of_stripe = |(stripe, (codes, scales)): (usize, (&mut [u8], &mut [f32]))| {
        let mut rounded = 0;
        let shared = tiles.get(stripe).filter(|_| block_scales);
        for (row, (codes, scales)) in codes.chunks_mut(cols).zip(scales.chunks_mut(groups)).enumerate() {
            let row = stripe * TILE_ROWS + row;
            let own = (shared.is_none() && row < view.rows).then(|| matrix.tops(row..row + 1));
            let tops = shared.or(own.as_ref()).map_or(&[][..], |tops| &tops.of_groups[..]);
            codes.fill(0);
            scales.fill(1.0);
            tops.iter().zip(scales).for_each(|(top, scale)| *scale = fp8_scale(*top));
            if row < view.rows {
                rounded += matrix.encode(row, tops, codes);
            }
        }
        rounded
    };
    let rounded = parts.enumerate().map(of_stripe).sum();
    Reencoded { block_scales, rounded }
}

/// The FP8 scale of a group whose largest block scale has the exponent `top`.
fn fp8_scale(top: u8) -> f32 {
    2f32.powi(i32::from(top) - 127 - HEADROOM)
}

/// The top exponents of the groups that neighbouring rows share.
struct Tops {
    of_groups: Vec<u8>,
    /// Whether e4m3 holds all elements with scales that follow from these exponents.
    is_exact: bool,
}

/// An MXFP4 matrix, read a row at a time.
struct Mxfp4<'a> {
    view: &'a MatrixView<'a>,
}

impl<'a> Mxfp4<'a> {
    /// The row's E8M0 exponents.
    fn exponents(&self, row: usize) -> &'a [u8] {
        let Scales::Mx { exponents, row_stride } = self.view.scales else {
            panic!("MatrixView::check covers the exponents of MXFP4")
        };
        &exponents[row * row_stride..][..self.view.cols.div_ceil(BLOCK)]
    }

    /// The row's elements, two in a byte. An odd last element is padded with a zero. `copy` is scratch memory for one row.
    fn elements<'b>(&self, row: usize, copy: &'b mut Vec<u8>) -> &'b [u8]
    where
        'a: 'b,
    {
        let (start, cols) = (row * self.view.row_stride, self.view.cols);
        if start.is_multiple_of(2) && cols.is_multiple_of(2) {
            return &self.view.data[start / 2..(start + cols) / 2];
        }
        copy.clear();
        copy.resize(cols.div_ceil(2), 0);
        (0..cols).for_each(|col| copy[col / 2] |= self.view.nibble(row, col) << (col % 2 * 4));
        copy
    }

    /// The exponents at the top of groups that all these rows share. Blocks of zeros, and those that are not numbers, do not count.
    fn tops(&self, rows: Range<usize>) -> Tops {
        let groups = self.view.cols.div_ceil(GROUP);
        let (mut of_groups, mut least) = (vec![0_u8; groups], vec![NAN_EXPONENT; groups]);
        let mut copy = Vec::new();
        for row in rows.clone() {
            let blocks = self.elements(row, &mut copy).chunks(BLOCK / 2).zip(self.exponents(row));
            for (block, (bytes, &exponent)) in blocks.enumerate() {
                if exponent != NAN_EXPONENT && has_values(bytes) {
                    let group = block * BLOCK / GROUP;
                    of_groups[group] = of_groups[group].max(exponent);
                    least[group] = least[group].min(exponent);
                }
            }
        }
        for (top, least) in of_groups.iter_mut().zip(&least) {
            *top = if *least == NAN_EXPONENT { EMPTY_TOP } else { (*top).max(LEAST_TOP) };
        }
        let are_near = of_groups
            .iter()
            .zip(&least)
            .all(|(top, least)| usize::from(top.saturating_sub(*least)) <= EXACT_SHIFT);
        let is_exact = are_near || rows.into_iter().all(|row| self.rounded(row, &of_groups, &mut copy) == 0);
        Tops { of_groups, is_exact }
    }

    /// Number of elements of a row that e4m3 does not hold with the scales of these top exponents.
    fn rounded(&self, row: usize, tops: &[u8], copy: &mut Vec<u8>) -> u64 {
        let mut rounded = 0;
        let blocks = self.elements(row, copy).chunks(BLOCK / 2).zip(self.exponents(row));
        for (block, (bytes, &exponent)) in blocks.enumerate() {
            let shift = shift_of(exponent, tops[block * BLOCK / GROUP]);
            if shift > EXACT_SHIFT && shift != NAN {
                let is_rounded = ROUNDED[shift];
                let count = |byte: u8| (is_rounded >> (byte & 7) & 1) + (is_rounded >> (byte >> 4 & 7) & 1);
                rounded += bytes.iter().map(|byte| u64::from(count(*byte))).sum::<u64>();
            }
        }
        rounded
    }

    /// Writes the codes of a row. Returns how many elements were rounded.
    fn encode(&self, row: usize, tops: &[u8], to: &mut [u8]) -> u64 {
        let (codes, mut copy) = (&*CODES, Vec::new());
        let blocks = self.elements(row, &mut copy).chunks(BLOCK / 2).zip(self.exponents(row));
        let blocks = blocks.zip(to[..self.view.cols].chunks_mut(BLOCK)).enumerate();
        let mut is_far = false;
        for (block, ((bytes, &exponent), to)) in blocks {
            let shift = shift_of(exponent, tops[block * BLOCK / GROUP]);
            is_far |= shift > EXACT_SHIFT && shift != NAN;
            let pairs = &codes[shift];
            if let (Ok(to), Ok(bytes)) =
                (<&mut [u8; BLOCK]>::try_from(&mut *to), <&[u8; BLOCK / 2]>::try_from(bytes))
            {
                // Known lengths let the compiler do without checks.
                for (to, byte) in to.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                    *to = pairs[usize::from(*byte)].to_le_bytes();
                }
                continue;
            }
            for (to, byte) in to.chunks_mut(2).zip(bytes) {
                to.copy_from_slice(&pairs[usize::from(*byte)].to_le_bytes()[..to.len()]);
            }
        }
        if is_far { self.rounded(row, tops, &mut copy) } else { 0 }
    }
}

/// Whether a block has elements other than zero.
fn has_values(bytes: &[u8]) -> bool {
    const MAGNITUDES: u8 = 0x77;
    match <[u8; BLOCK / 2]>::try_from(bytes) {
        Ok(bytes) => u128::from_le_bytes(bytes) & u128::from_le_bytes([MAGNITUDES; BLOCK / 2]) != 0,
        Err(_) => bytes.iter().any(|byte| byte & MAGNITUDES != 0),
    }
}

/// The distance of a block's exponent from the top of its group, as an index of [`CODES`].
fn shift_of(exponent: u8, top: u8) -> usize {
    if exponent == NAN_EXPONENT {
        return NAN;
    }
    // A block of zeros may lie above the top.
    usize::from(top.saturating_sub(exponent)).min(ZERO_SHIFT)
}

#[cfg(test)]
mod tests;
