//! Rows of quantised matrices as bf16, a group of columns at a time.

use std::sync::LazyLock;

use expertd_model::decode::{fp4_e2m1, fp8_e4m3};
use expertd_model::{MatrixView, Packing, Scales, WeightFormat};
use half::bf16;

use crate::format::MX_COLS;

/// The values of FP8 codes.
static E4M3: LazyLock<[f32; 256]> = LazyLock::new(|| std::array::from_fn(|code| fp8_e4m3(code as u8)));

/// Whether [`fill_row`] converts the matrix.
pub(super) fn is_grouped(view: &MatrixView<'_>) -> bool {
    match view.format {
        WeightFormat::Int4 | WeightFormat::Nvfp4 | WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => true,
        WeightFormat::Fp8E4m3 => view.col_stride == 1,
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => false,
    }
}

/// Writes row `row` of a matrix that [`is_grouped`] as bf16: each element's value, rounded once. `codes` is memory for a row.
pub(super) fn fill_row(view: &MatrixView<'_>, row: usize, codes: &mut Vec<u8>, to: &mut [u16]) {
    let (group, round) = (group_cols(view), |value: f32| bf16::from_f32(value).to_bits());
    if matches!(view.format, WeightFormat::Mxfp8 | WeightFormat::Fp8E4m3) {
        let start = row * view.row_stride;
        let codes = &view.data[start..start + view.cols];
        for (index, (codes, to)) in codes.chunks(group).zip(to.chunks_mut(group)).enumerate() {
            let scale = view.scale(row, index * group);
            codes.iter().zip(to).for_each(|(code, to)| *to = round(E4M3[usize::from(*code)] * scale));
        }
        return;
    }
    codes.resize(view.cols, 0);
    nibbles(view, row, codes);
    for (index, (codes, to)) in codes.chunks(group).zip(to.chunks_mut(group)).enumerate() {
        let first = index * group;
        let scale = view.scale(row, first);
        let zero = i16::from(view.zero_point(row, first));
        let value = |code: usize| match view.format {
            WeightFormat::Int4 => f32::from(code as i16 - zero),
            _ => fp4_e2m1(code as u8),
        };
        let table: [u16; 16] = std::array::from_fn(|code| round(value(code) * scale));
        codes.iter().zip(to).for_each(|(code, to)| *to = table[usize::from(*code)]);
    }
}

/// Columns that share a scale and a zero point.
pub(super) fn group_cols(view: &MatrixView<'_>) -> usize {
    match &view.scales {
        Scales::Groups(scales) => scales.cols,
        Scales::Mx { .. } => MX_COLS,
        Scales::Block { block_cols, .. } => *block_cols,
        Scales::None => view.cols,
    }
}

/// Writes the four bits of each element of row `row` to a byte of its own.
pub(super) fn nibbles(view: &MatrixView<'_>, row: usize, to: &mut [u8]) {
    let first = row * view.row_stride;
    match view.packing {
        Packing::Strided if view.col_stride == 1 && first.is_multiple_of(2) => {
            let bytes = &view.data[first / 2..];
            for (to, byte) in to.chunks_mut(2).zip(bytes) {
                to[0] = byte & 15;
                if let Some(odd) = to.get_mut(1) {
                    *odd = byte >> 4;
                }
            }
        }
        Packing::ColumnWords if first.is_multiple_of(8) && view.col_stride.is_multiple_of(8) => {
            for (word, to) in to.chunks_mut(8).enumerate() {
                let bytes = &view.data[(first + word * view.col_stride) / 2..];
                to.iter_mut().enumerate().for_each(|(col, to)| *to = bytes[col / 2] >> (col % 2 * 4) & 15);
            }
        }
        _ => to.iter_mut().enumerate().for_each(|(col, to)| *to = view.nibble(row, col)),
    }
}

#[cfg(test)]
pub(super) mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use expertd_model::{GroupScales, ScaleFormat, ZeroPoints};

    /// Bytes with a long period.
    fn bytes(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|i| ((i * 37 + i / 251 + seed * 11) % 251) as u8).collect()
    }

    /// Calls `with` on INT4 matrices of each packing, with and without zero points, whose last group and word are not full.
    pub(in super::super) fn integers(group: usize, with: impl Fn(&MatrixView<'_>)) {
        const ROWS: usize = 24;
        const COLS: usize = 200;
        let (data, zeros) = (bytes(ROWS * COLS / 2, 1), bytes(ROWS * COLS, 2));
        let groups = COLS.div_ceil(group);
        let scales: Vec<u8> = (0..ROWS * groups)
            .flat_map(|i| half::f16::from_f32(0.01 + i as f32 * 0.003).to_le_bytes())
            .collect();
        let by_rows = |data| ZeroPoints {
            data,
            packing: Packing::Strided,
            row_stride: groups,
            group_stride: 1,
            bias: 0,
        };
        let by_words =
            |packing, bias| ZeroPoints { data: &zeros, packing, row_stride: 8, group_stride: ROWS, bias };
        let cases = [
            (Packing::Strided, [COLS, 1], None),
            (Packing::Strided, [COLS, 1], Some(by_rows(&zeros))),
            (Packing::Strided, [1, ROWS], None),
            (Packing::ColumnWords, [8, 8 * ROWS], Some(by_words(Packing::RowWords, 1))),
            (Packing::AwqWords, [8, ROWS], Some(by_words(Packing::AwqWords, 0))),
        ];
        for (packing, [row_stride, col_stride], zeros) in cases {
            let scales = GroupScales {
                cols: group,
                format: ScaleFormat::F16,
                data: &scales,
                row_stride: groups,
                group_stride: 1,
                factor: 0.75,
                zeros,
            };
            let view = MatrixView {
                format: WeightFormat::Int4,
                packing,
                data: &data,
                rows: ROWS,
                cols: COLS,
                row_stride,
                col_stride,
                scales: Scales::Groups(scales),
            };
            view.check().unwrap();
            with(&view);
        }
    }

    /// Compares a row by row conversion with the values of the elements.
    fn compare(view: &MatrixView<'_>) {
        let (mut codes, mut row_of) = (Vec::new(), vec![0; view.cols]);
        for row in 0..view.rows {
            fill_row(view, row, &mut codes, &mut row_of);
            for (col, found) in row_of.iter().enumerate() {
                let (found, value) = (bf16::from_bits(*found), bf16::from_f32(view.value(row, col)));
                let same = found.to_bits() == value.to_bits() || (found.is_nan() && value.is_nan());
                assert!(same, "{:?} ({row}, {col}): {found} for {value}", view.packing);
            }
        }
    }

    #[test]
    fn integers_of_any_packing_are_rounded_to_bf16_once() {
        for group in [32, 64, 100, 128, 256] {
            integers(group, compare);
        }
    }

    #[test]
    fn nvfp4_is_rounded_to_bf16_once() {
        const ROWS: usize = 8;
        const COLS: usize = 72;
        let (data, scales) = (bytes(ROWS * COLS / 2, 3), bytes(ROWS * 5, 4));
        for factor in [1.0, 0.003_71, f32::MIN_POSITIVE] {
            let scales = GroupScales {
                cols: 16,
                format: ScaleFormat::Fp8E4m3,
                data: &scales,
                row_stride: 5,
                group_stride: 1,
                factor,
                zeros: None,
            };
            let view = MatrixView {
                format: WeightFormat::Nvfp4,
                packing: Packing::Strided,
                data: &data,
                rows: ROWS,
                cols: COLS,
                row_stride: COLS,
                col_stride: 1,
                scales: Scales::Groups(scales),
            };
            view.check().unwrap();
            compare(&view);
            if factor == 1.0 {
                // e2m1 × e4m3 has at most six significant bits, so bf16 takes nothing.
                let exact = |row, col| {
                    let value = view.value(row, col);
                    value.is_nan() || bf16::from_f32(value).to_f32() == value
                };
                assert!((0..ROWS).all(|row| (0..COLS).all(|col| exact(row, col))));
            }
        }
    }

    #[test]
    fn fp8_in_narrow_blocks_is_rounded_to_bf16_once() {
        const ROWS: usize = 24;
        const COLS: usize = 200;
        // Every code occurs, NaN too.
        let data: Vec<u8> = (0..ROWS * COLS).map(|i| (i * 7 + i / 256) as u8).collect();
        for (block_rows, block_cols) in [(1, 16), (128, 64), (7, 96), (ROWS, COLS), (5, 1 << 16)] {
            let count = ROWS.div_ceil(block_rows) * COLS.div_ceil(block_cols);
            let values: Vec<f32> = (0..count).map(|i| 0.01 + i as f32 * 0.003).collect();
            let view = MatrixView {
                format: WeightFormat::Fp8E4m3,
                packing: Packing::Strided,
                data: &data,
                rows: ROWS,
                cols: COLS,
                row_stride: COLS,
                col_stride: 1,
                scales: Scales::Block { values: values.into(), block_rows, block_cols },
            };
            view.check().unwrap();
            assert!(is_grouped(&view));
            compare(&view);
        }
    }

    /// MXFP4 becomes bf16 only beside matrices of another format.
    #[test]
    fn mx_formats_arrive_exactly() {
        mx_arrives_exactly(WeightFormat::Mxfp8);
        mx_arrives_exactly(WeightFormat::Mxfp4);
    }

    fn mx_arrives_exactly(format: WeightFormat) {
        const ROWS: usize = 32;
        const COLS: usize = 96;
        let data: Vec<u8> = (0..ROWS * COLS * format.bits() / 8).map(|i| (i * 7) as u8).collect();
        // 2^-110 to 2^110, and NaN.
        let exponents: Vec<u8> =
            (0..ROWS * 3).map(|i| if i == 17 { 0xff } else { (17 + i * 23 % 221) as u8 }).collect();
        let view = MatrixView {
            format,
            packing: Packing::Strided,
            data: &data,
            rows: ROWS,
            cols: COLS,
            row_stride: COLS,
            col_stride: 1,
            scales: Scales::Mx { exponents: &exponents, row_stride: 3 },
        };
        view.check().unwrap();
        compare(&view);
        for row in 0..ROWS {
            for col in 0..COLS {
                let value = view.value(row, col);
                assert!(value.is_nan() || bf16::from_f32(value).to_f32() == value, "({row}, {col}): {value}");
            }
        }
    }
}
