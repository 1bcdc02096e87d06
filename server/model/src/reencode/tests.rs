#![allow(clippy::unwrap_used)]

use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::*;
use crate::Packing;
use crate::codes::fp8_e4m3;

/// Owned MXFP4 codes and exponents of `rows` × `cols` elements.
struct Stored {
    data: Vec<u8>,
    exponents: Vec<u8>,
    rows: usize,
    cols: usize,
}

impl Stored {
    /// Elements with the code 6.0 and the exponent `exponent`.
    fn full(rows: usize, cols: usize, exponent: u8) -> Self {
        let blocks = cols.div_ceil(BLOCK);
        Stored { data: vec![0x77; rows * cols / 2], exponents: vec![exponent; rows * blocks], rows, cols }
    }

    /// Replaces a block: element i gets the code `codes[i % codes.len()]`.
    fn set(&mut self, row: usize, block: usize, exponent: u8, codes: &[u8]) {
        self.exponents[row * self.cols.div_ceil(BLOCK) + block] = exponent;
        let first = row * self.cols + block * BLOCK;
        for (i, at) in (first..(first + BLOCK).min((row + 1) * self.cols)).enumerate() {
            let shift = at % 2 * 4;
            self.data[at / 2] = self.data[at / 2] & !(15 << shift) | codes[i % codes.len()] << shift;
        }
    }

    fn view(&self) -> MatrixView<'_> {
        let view = MatrixView {
            format: WeightFormat::Mxfp4,
            packing: Packing::Strided,
            data: &self.data,
            rows: self.rows,
            cols: self.cols,
            row_stride: self.cols,
            col_stride: 1,
            scales: Scales::Mx { exponents: &self.exponents, row_stride: self.cols.div_ceil(BLOCK) },
        };
        view.check().unwrap();
        view
    }
}

/// The FP8 form of a matrix with more rows and columns.
struct Encoded {
    codes: Vec<u8>,
    scales: Vec<f32>,
    cols: usize,
    found: Reencoded,
}

impl Encoded {
    fn of(view: &MatrixView<'_>, rows: usize, cols: usize) -> Self {
        let mut codes = vec![0xaa; rows * cols];
        let mut scales = vec![f32::NAN; rows * cols.div_ceil(GROUP)];
        let found = mxfp4_as_fp8(view, cols, &mut codes, &mut scales);
        Encoded { codes, scales, cols, found }
    }

    fn scale(&self, row: usize, col: usize) -> f32 {
        self.scales[row * self.cols.div_ceil(GROUP) + col / GROUP]
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        self.codes[row * self.cols + col]
    }

    fn value(&self, row: usize, col: usize) -> f64 {
        f64::from(fp8_e4m3(self.code(row, col))) * f64::from(self.scale(row, col))
    }
}

/// The value of an element by the definition of MXFP4.
fn defined(view: &MatrixView<'_>, row: usize, col: usize) -> f64 {
    let code = view.nibble(row, col);
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    let sign = if code & 8 == 0 { 1.0 } else { -1.0 };
    sign * magnitude * 2f64.powi(i32::from(view.exponent(row, col)) - 127)
}

/// Compares every element, to the bit. Padding is zero.
fn assert_exact(view: &MatrixView<'_>, encoded: &Encoded) {
    assert_eq!(encoded.found.rounded, 0);
    for row in 0..encoded.codes.len() / encoded.cols {
        for col in 0..encoded.cols {
            let inside = row < view.rows && col < view.cols;
            let expected = if inside { defined(view, row, col) } else { 0.0 };
            let found = encoded.value(row, col);
            assert_eq!(found.to_bits(), expected.to_bits(), "({row}, {col}): {found:e} for {expected:e}");
            assert!(encoded.scale(row, col).is_normal(), "({row}, {col})");
        }
    }
}

const ALL_CODES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

#[test]
fn every_code_is_exact_up_to_fourteen_powers_of_two_below_the_largest_scale() {
    for top in 0..=254_u8 {
        for shift in 0..=14.min(top) {
            let mut stored = Stored::full(2, 128, top);
            stored.set(1, 2, top - shift, &ALL_CODES);
            let encoded = Encoded::of(&stored.view(), 2, 128);
            assert_exact(&stored.view(), &encoded);
            assert!(encoded.found.block_scales, "{top} {shift}");
        }
    }
}

/// The nearest of all e4m3 magnitudes; of two equally near ones that with the even code.
fn nearest(magnitude: f64) -> u8 {
    let distance = |code: &u8| (f64::from(fp8_e4m3(*code)) - magnitude).abs();
    let less = |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2)));
    (0..0x7f).min_by(less).unwrap()
}

#[test]
fn smaller_blocks_are_rounded_to_the_nearest_code_and_counted() {
    for shift in 15..=60_u8 {
        let mut stored = Stored::full(1, 128, 200);
        stored.set(0, 1, 200 - shift, &ALL_CODES);
        let view = stored.view();
        let encoded = Encoded::of(&view, 1, 128);
        let mut rounded = 0;
        for col in 0..128 {
            let scaled = defined(&view, 0, col) / f64::from(encoded.scale(0, col));
            let sign = if view.nibble(0, col) & 8 == 0 { 0 } else { 0x80 };
            assert_eq!(encoded.code(0, col), sign | nearest(scaled.abs()), "shift {shift}, column {col}");
            rounded += u64::from(encoded.value(0, col) != defined(&view, 0, col));
        }
        assert!(rounded > 0, "{shift}");
        assert_eq!(encoded.found, Reencoded { block_scales: false, rounded }, "{shift}");
    }
}

#[test]
fn values_decide_where_exponents_are_far_apart() {
    // 4.0 has one bit, so e4m3 holds it three powers of two further.
    for (shift, codes, is_exact) in
        [(17, &[0, 6, 14][..], true), (18, &[6], false), (16, &[5, 7], false), (15, &[5, 7, 2], true)]
    {
        let mut stored = Stored::full(1, 128, 150);
        stored.set(0, 3, 150 - shift, codes);
        let encoded = Encoded::of(&stored.view(), 1, 128);
        assert_eq!(encoded.found.block_scales, is_exact, "{shift} {codes:?}");
        if is_exact {
            assert_exact(&stored.view(), &encoded);
        }
    }
}

#[test]
fn rows_get_scales_of_their_own_where_a_tile_spreads_too_far() {
    let mut stored = Stored::full(140, 256, 120);
    for block in 0..4 {
        stored.set(3, block, 100, &ALL_CODES);
    }
    let encoded = Encoded::of(&stored.view(), 144, 256);
    assert_exact(&stored.view(), &encoded);
    assert!(!encoded.found.block_scales);
    assert_eq!(encoded.scale(3, 0) * 2f32.powi(20), encoded.scale(4, 0));
    // The same row alone in its tile costs the tiles nothing.
    let mut stored = Stored::full(129, 256, 120);
    for block in 0..8 {
        stored.set(128, block, 100, &ALL_CODES);
    }
    let encoded = Encoded::of(&stored.view(), 256, 256);
    assert_exact(&stored.view(), &encoded);
    assert!(encoded.found.block_scales);
}

#[test]
fn blocks_of_zeros_constrain_nothing() {
    for zeros in [0, 1, 60, 200, 254] {
        let mut stored = Stored::full(130, 128, 110);
        stored.set(7, 1, zeros, &[0, 8]);
        stored.set(8, 0, 96, &ALL_CODES);
        let encoded = Encoded::of(&stored.view(), 192, 128);
        assert_exact(&stored.view(), &encoded);
        assert!(encoded.found.block_scales, "{zeros}");
    }
    let stored = Stored { data: vec![0x80; 64 * 128], ..Stored::full(128, 128, 3) };
    let encoded = Encoded::of(&stored.view(), 128, 128);
    assert_exact(&stored.view(), &encoded);
    assert!(encoded.scales.iter().all(|scale| *scale == 1.0));
}

#[test]
fn blocks_that_are_not_numbers_become_nan_and_change_nothing_else() {
    let mut stored = Stored::full(130, 160, 110);
    stored.set(5, 1, 255, &ALL_CODES);
    stored.set(129, 4, 255, &[0]);
    let encoded = Encoded::of(&stored.view(), 192, 192);
    for row in 0..192 {
        for col in 0..192 {
            let is_nan = (row == 5 && (32..64).contains(&col)) || (row == 129 && (128..160).contains(&col));
            assert_eq!(encoded.value(row, col).is_nan(), is_nan, "({row}, {col})");
            if !is_nan {
                let inside = row < 130 && col < 160;
                let expected = if inside { defined(&stored.view(), row, col) } else { 0.0 };
                assert_eq!(encoded.value(row, col), expected, "({row}, {col})");
            }
        }
    }
    assert_eq!(encoded.found, Reencoded { block_scales: true, rounded: 0 });
}

/// gpt-oss stores rows of gate and up in turn, of 2880 columns, which the kernels pad.
#[test]
fn alternating_rows_of_padded_sizes_are_exact() {
    const COLS: usize = 2880;
    let mut random = SmallRng::seed_from_u64(5);
    let rows = 150;
    let data: Vec<u8> = (0..2 * rows * COLS / 2).map(|_| random.random()).collect();
    for spread in [12, 18] {
        let exponents: Vec<u8> =
            (0..2 * rows * COLS / 32).map(|_| 110 + random.random_range(0..spread)).collect();
        for first in [0, 1] {
            let view = MatrixView {
                format: WeightFormat::Mxfp4,
                packing: Packing::Strided,
                data: &data[first * COLS / 2..],
                rows,
                cols: COLS,
                row_stride: 2 * COLS,
                col_stride: 1,
                scales: Scales::Mx { exponents: &exponents[first * COLS / 32..], row_stride: 2 * COLS / 32 },
            };
            view.check().unwrap();
            let encoded = Encoded::of(&view, 256, 2944);
            if spread == 12 {
                assert_exact(&view, &encoded);
                assert!(encoded.found.block_scales);
                // Rows of a tile share scales beyond the matrix, too.
                assert_eq!(encoded.scale(149, 64), encoded.scale(255, 64));
                continue;
            }
            assert!(!encoded.found.block_scales && encoded.found.rounded > 0);
            let differs = |row, col| encoded.value(row, col) != defined(&view, row, col);
            let count = |row| (0..COLS).filter(|col| differs(row, *col)).count() as u64;
            assert_eq!((0..rows).map(count).sum::<u64>(), encoded.found.rounded);
        }
    }
}

#[test]
fn odd_columns_are_read_one_by_one() {
    let mut random = SmallRng::seed_from_u64(6);
    for (cols, stride) in [(45, 45), (45, 46), (44, 47)] {
        let data: Vec<u8> = (0..20 * stride).map(|_| random.random()).collect();
        let exponents: Vec<u8> = (0..40).map(|_| random.random_range(100..110)).collect();
        let view = MatrixView {
            format: WeightFormat::Mxfp4,
            packing: Packing::Strided,
            data: &data,
            rows: 20,
            cols,
            row_stride: stride,
            col_stride: 1,
            scales: Scales::Mx { exponents: &exponents, row_stride: 2 },
        };
        view.check().unwrap();
        assert_exact(&view, &Encoded::of(&view, 64, 64));
    }
}
