//! Tests of `fixed`.

use rand::RngExt;

use super::*;
use crate::linalg::groups::GroupLayout;
use crate::linalg::tests::{FORMATS, TestMatrix, levels, random_rows, relative_error};
use crate::linalg::{MatmulScratch, SimdLevel, matmul};
use expertd_model::{
    GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints, decode,
};

/// The products of rows `[m, k]` with the matrix on a level, `[m, n]`.
fn product(level: SimdLevel, matrix: &TestMatrix, x: &[f32], k: usize) -> Vec<f32> {
    let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
    let mut out = vec![f32::NAN; x.len() / k * packed.n()];
    let mut scratch = MatmulScratch::new(k, 1);
    scratch.poison();
    matmul(x, &packed, &mut out, &mut scratch, None);
    out
}

fn exact(matrix: &TestMatrix, x: &[f32], k: usize) -> Vec<f64> {
    let dot = |x: &[f32], weights: &[f64]| x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum();
    let of_row = |x| matrix.values.chunks_exact(k).map(move |weights| dot(x, weights));
    x.chunks_exact(k).flat_map(of_row).collect()
}

/// Numbers of rows of fixed-point tiles, and one more.
fn tile_rows() -> std::ops::RangeInclusive<usize> {
    let kernels = |level| fixed_kernel(level, WeightFormat::Mxfp4, Some(GroupLayout::MX));
    let most = levels().filter_map(kernels).map(|kernel| kernel.multiply.len()).max();
    1..=most.unwrap_or(0) + 1
}

/// One bit less would exceed the limit. Single draws may be a tenth worse than f32, so the errors of several are compared.
#[test]
fn fixed_point_is_as_exact_as_f32() {
    const DRAWS: usize = 8;
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        for (power, rows) in [(1, 1), (5, 1), (1, 3), (5, 4)] {
            let draws: Vec<_> = (0..DRAWS)
                .map(|_| {
                    let matrix = TestMatrix::random(&mut rng, format, 200, 2080, (128, 128));
                    // The fifth power spreads the exponents of a block.
                    let x: Vec<f32> =
                        random_rows(&mut rng, rows * 2080).iter().map(|x| x.powi(power)).collect();
                    let want = exact(&matrix, &x, 2080);
                    (matrix, x, want)
                })
                .collect();
            let error = |level| {
                let errors = draws
                    .iter()
                    .map(|(matrix, x, want)| relative_error(&product(level, matrix, x, 2080), want));
                errors.sum::<f64>() / DRAWS as f64
            };
            let f32_error = error(SimdLevel::Portable);
            for level in levels() {
                let packed = PackedMatrix::pack_for(level, &draws[0].0.view()).unwrap();
                if takes_fixed(&packed, rows) {
                    let error = error(level);
                    assert!(
                        error < 1.25 * f32_error,
                        "{format:?} {level}, {rows} rows, x^{power}: {error:e}, in f32 {f32_error:e}"
                    );
                }
            }
        }
    }
}

/// Every element is the same integer, so that the sums of its digits are as large as they can be.
#[test]
fn the_largest_sums_of_digits_are_exact() {
    let (n, k) = (16, 64);
    // Digits of 127, of -128, and elements at which a block's exponent changes.
    let largest = 0x7f_7f7f;
    let near = (-2..=2).map(|off| largest + off);
    let integers = near.chain([0x7e_7f7f, 0x7e_8080, 0x7f_7f80, 0x7f_0000, 0x40_8080]);
    for x in integers.flat_map(|x: i32| [x, -x]) {
        for code in [0x0_u8, 0x7, 0x8, 0xf] {
            for (format, group, zero) in [
                (WeightFormat::Mxfp4, 32, None),
                (WeightFormat::Nvfp4, 16, None),
                (WeightFormat::Nvfp4, 8, None),
                (WeightFormat::Int4, 32, None),
                (WeightFormat::Int4, 16, None),
                (WeightFormat::Int4, 8, None),
                (WeightFormat::Int4, 32, Some(0_u8)),
                (WeightFormat::Int4, 16, Some(15)),
                (WeightFormat::Int4, 8, Some(15)),
            ] {
                let data = vec![code * 0x11; n * k / 2];
                let ones: Vec<u8> = (0..n * k / group).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
                let exponents = vec![127; n * k / 32];
                let points = vec![zero.unwrap_or(8) * 0x11; n * k / group / 2];
                let zeros = zero.map(|_| ZeroPoints {
                    data: &points,
                    packing: Packing::Strided,
                    row_stride: k / group,
                    group_stride: 1,
                    bias: 0,
                });
                let weight = match format {
                    WeightFormat::Int4 => f32::from(code) - f32::from(zero.unwrap_or(8)),
                    _ => decode::fp4_e2m1(code),
                };
                let scales = if format == WeightFormat::Mxfp4 {
                    Scales::Mx { exponents: &exponents, row_stride: k / 32 }
                } else {
                    let groups = GroupScales {
                        cols: group,
                        format: ScaleFormat::F32,
                        data: &ones,
                        row_stride: k / group,
                        group_stride: 1,
                        factor: 1.0,
                        zeros,
                    };
                    Scales::Groups(groups)
                };
                let view = MatrixView {
                    format,
                    packing: Packing::Strided,
                    data: &data,
                    rows: n,
                    cols: k,
                    row_stride: k,
                    col_stride: 1,
                    scales,
                };
                let want = f64::from(x) * f64::from(weight) * k as f64;
                for level in levels() {
                    let packed = PackedMatrix::pack_for(level, &view).unwrap();
                    // The second row has other sums.
                    let rows = [vec![x as f32; k], vec![x as f32 / 2.0; k]].concat();
                    let mut out = vec![f32::NAN; 2 * n];
                    matmul(&rows, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
                    let of_second = out.split_off(n).into_iter().map(|out| out * 2.0);
                    for got in out.into_iter().chain(of_second) {
                        // Two integers of 24 bits are rounded, and their sums with each other and with the last block's.
                        assert!(
                            (f64::from(got) - want).abs() <= 4e-7 * want.abs(),
                            "{format:?} {level}, groups of {group}, {zero:?}: {x:#x} times {weight}: {got}, not {want}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_extreme_elements_are_multiplied() {
    let mut rng = expertd_test_seed::rng();
    // Zeros, subnormal numbers, the smallest and the largest exponents, and both in one block.
    let kinds = [(0.0, 0.0), (1e-42, 1e-44), (1e-38, -1e-38), (1e30, 1e30), (1e30, 1e-30), (-1e-20, 1e20)];
    for format in FORMATS {
        let matrix = TestMatrix::random(&mut rng, format, 40, 130, (128, 128));
        for rows in tile_rows() {
            let firsts = if rows == 1 { 0..kinds.len() } else { 0..1 };
            for first in firsts {
                let of_row = |row: usize| kinds[(first + row) % kinds.len()];
                let x = random_rows(&mut rng, rows * 130);
                let x = x.iter().enumerate().map(|(i, x)| x * <[f32; 2]>::from(of_row(i / 130))[i % 2]);
                let x: Vec<f32> = x.collect();
                let want = exact(&matrix, &x, 130);
                for level in levels() {
                    for (i, (got, want)) in product(level, &matrix, &x, 130).iter().zip(&want).enumerate() {
                        let (one, other) = of_row(i / 40);
                        let largest = f64::from(one.abs().max(other.abs()));
                        // Subnormal results round to multiples of 2^-149, up to 2^-98 * 2^-30 away in fixed point.
                        let error = (f64::from(*got) - want).abs();
                        assert!(
                            error < 1e-4 * largest + 1e-34,
                            "{format:?} {level}, {rows} rows, {one:e}: {got:e}, not {want:e}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_that_is_not_finite_stays_so_and_spoils_no_other() {
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        let matrix = TestMatrix::random(&mut rng, format, 40, 70, (128, 128));
        for (rows, element) in
            tile_rows().zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle())
        {
            let bad = rng.random_range(0..rows);
            let mut x = random_rows(&mut rng, rows * 70);
            x[bad * 70 + 67] = 0.0;
            let want = exact(&matrix, &x, 70);
            x[bad * 70 + 67] = element;
            for level in levels() {
                for (i, (got, want)) in product(level, &matrix, &x, 70).iter().zip(&want).enumerate() {
                    let is_right = (f64::from(*got) - want).abs() < 1e-4 * want.abs().max(1.0);
                    assert!(
                        if i / 40 == bad { !got.is_finite() } else { is_right },
                        "{format:?} {level}, {rows} rows"
                    );
                }
            }
        }
    }
}
