//! INT4 matrices in the layout that the packing kernel reads: nibbles, f16 scales and zero points of 32 columns, f32 scales of rows.

use expertd_kernels::experts::INT4_MIDDLE;
use expertd_model::{MatrixView, Packing};
use half::f16;
use rayon::prelude::*;

use super::grouped::{group_cols, nibbles};
use crate::format::INT4_COLS;

/// The power of two below which the largest f16 scale of a row stays, and which it reaches half of: f16 then holds scales of bf16 and f16
/// exactly down to 2^-22 of the largest, and products keep most of the range of f32.
const LARGEST: i32 = 9;

/// Writes rows of `cols` nibbles. Those outside the matrix are the zero points of their groups, or 8 in groups without scales.
pub(super) fn fill_nibbles(view: &MatrixView<'_>, cols: usize, to: &mut [u8]) {
    const OUTSIDE: u8 = INT4_MIDDLE | INT4_MIDDLE << 4;
    to.par_chunks_mut(cols / 2).enumerate().for_each_init(Vec::new, |codes: &mut Vec<u8>, (row, to)| {
        to.fill(OUTSIDE);
        if row >= view.rows {
            return;
        }
        let (first, whole) = (row * view.row_stride, view.cols.is_multiple_of(8));
        match view.packing {
            Packing::Strided if whole && view.col_stride == 1 && first.is_multiple_of(2) => {
                to[..view.cols / 2].copy_from_slice(&view.data[first / 2..][..view.cols / 2]);
            }
            // The eight columns of a word follow each other in its bits.
            Packing::ColumnWords if whole && first.is_multiple_of(8) && view.col_stride.is_multiple_of(8) => {
                for (word, to) in to[..view.cols / 2].chunks_exact_mut(4).enumerate() {
                    to.copy_from_slice(&view.data[(first + word * view.col_stride) / 2..][..4]);
                }
            }
            _ => {
                codes.resize(view.cols, 0);
                nibbles(view, row, codes);
                for (to, codes) in to.iter_mut().zip(codes.chunks(2)) {
                    *to = codes[0] | codes.get(1).copied().unwrap_or_default() << 4;
                }
            }
        }
        let partial = view.cols / INT4_COLS * INT4_COLS;
        for col in view.cols..view.cols.next_multiple_of(INT4_COLS) {
            let (zero, place) = (view.zero_point(row, partial), col % 2 * 4);
            to[col / 2] = to[col / 2] & !(15 << place) | zero << place;
        }
    });
}

/// Writes `[rows, groups]` scales and, where `zeros` is not empty, zero points; and one scale per row. Scales outside the matrix are zero.
/// A row's scales are those of the matrix divided by the row's own, which is the common scale of a row with a single one, and otherwise
/// a power of two.
pub(super) fn fill_groups(
    view: &MatrixView<'_>,
    groups: usize,
    scales: &mut [u16],
    zeros: &mut [u8],
    row_scales: &mut [f32],
) {
    let width = group_cols(view);
    let fill = |(row, (scales, row_scale)): (usize, (&mut [u16], &mut f32))| {
        scales.fill(0);
        *row_scale = 1.0;
        if row >= view.rows {
            return;
        }
        let of = |col: usize| view.scale(row, col);
        let first = of(0);
        let inside = view.cols.div_ceil(INT4_COLS);
        if (0..view.cols).step_by(width).all(|col| of(col).to_bits() == first.to_bits()) {
            scales[..inside].fill(f16::ONE.to_bits());
            *row_scale = first;
            return;
        }
        let finite = |scale: f32| if scale.is_finite() { scale.abs() } else { 0.0 };
        let largest = (0..view.cols).step_by(width).map(|col| finite(of(col))).fold(0.0, f32::max);
        let exponent = shift(largest);
        *row_scale = 2_f32.powi(exponent);
        let inverse = 2_f32.powi(-exponent);
        for (group, to) in scales[..inside].iter_mut().enumerate() {
            *to = f16::from_f32(of(group * INT4_COLS) * inverse).to_bits();
        }
    };
    scales.par_chunks_mut(groups).zip(row_scales).enumerate().for_each(fill);
    if zeros.is_empty() {
        return;
    }
    zeros.par_chunks_mut(groups).enumerate().for_each(|(row, zeros)| {
        let inside = if row < view.rows { view.cols.div_ceil(INT4_COLS) } else { 0 };
        zeros[inside..].fill(INT4_MIDDLE);
        zeros[..inside]
            .iter_mut()
            .enumerate()
            .for_each(|(group, to)| *to = view.zero_point(row, group * INT4_COLS));
    });
}

/// The exponent of the power of two by which a row's scales are divided, given the largest.
fn shift(largest: f32) -> i32 {
    if largest == 0.0 {
        return 0;
    }
    // Beyond these limits a power of two or its inverse is no normal number.
    ((f64::from(largest).log2().floor() as i32) + 1 - LARGEST).clamp(-126, 126)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::grouped::tests::integers;
    use super::*;

    /// Compares what the kernels read with the values of the elements, whose scales have more than the eleven bits of f16 here.
    fn compare(view: &MatrixView<'_>) {
        let cols = 256;
        let (rows, groups) = (view.rows + 8, cols / INT4_COLS);
        let (mut codes, mut scales) = (vec![0xaa; rows * cols / 2], vec![0xaaaa; rows * groups]);
        let (mut zeros, mut row_scales) = (vec![0xaa; rows * groups], vec![f32::NAN; rows]);
        fill_nibbles(view, cols, &mut codes);
        fill_groups(view, groups, &mut scales, &mut zeros, &mut row_scales);
        for (row, row_scale) in row_scales.iter().enumerate() {
            for col in 0..cols {
                let (at, group) = (row * cols + col, row * groups + col / INT4_COLS);
                let integer = f32::from(codes[at / 2] >> (at % 2 * 4) & 15) - f32::from(zeros[group]);
                let found = integer * f16::from_bits(scales[group]).to_f32() * row_scale;
                if row < view.rows && col < view.cols {
                    let value = view.value(row, col);
                    let close = (found - value).abs() <= value.abs() / 2048.0;
                    assert!(close, "{:?} ({row}, {col}): {found} for {value}", view.packing);
                } else {
                    assert_eq!(found, 0.0, "{:?} ({row}, {col})", view.packing);
                }
            }
        }
    }

    #[test]
    fn integers_of_any_packing_arrive() {
        for group in [32, 64, 128, 256] {
            integers(group, compare);
        }
    }

    #[test]
    fn shifted_scales_fit_f16() {
        for largest in [f32::MIN_POSITIVE, 1e-20, 0.1, 0.5, 1.0, 511.9, 65504.0, 1e30, f32::MAX] {
            let shifted = largest * 2_f32.powi(-shift(largest));
            assert!(
                shifted < 512.0 && (shifted >= 256.0 || largest <= f32::MIN_POSITIVE),
                "{largest}: {shifted}"
            );
        }
        assert_eq!(shift(0.0), 0);
        assert_eq!(shift(1e-45), -126);
    }
}
