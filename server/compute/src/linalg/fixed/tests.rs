//! Tests of `fixed`.

use super::*;
use crate::linalg::tests::{FORMATS, TestMatrix, levels, random_rows, relative_error};
use crate::linalg::{MatmulScratch, SimdLevel, matmul};

/// The product of one row with the matrix on a level.
fn product(level: SimdLevel, matrix: &TestMatrix, x: &[f32]) -> Vec<f32> {
    let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
    let mut out = vec![f32::NAN; packed.n()];
    let mut scratch = MatmulScratch::new(x.len(), 1);
    scratch.poison();
    matmul(x, &packed, &mut out, &mut scratch, None);
    out
}

fn exact(matrix: &TestMatrix, x: &[f32]) -> Vec<f64> {
    let dot = |weights: &[f64]| x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w).sum();
    matrix.values.chunks_exact(x.len()).map(dot).collect()
}

/// One bit less would double the error. Single draws may be a tenth worse than f32, so the errors of several are compared.
#[test]
fn fixed_point_is_as_exact_as_f32() {
    const DRAWS: usize = 8;
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        for power in [1, 5] {
            let draws: Vec<_> = (0..DRAWS)
                .map(|_| {
                    let matrix = TestMatrix::random(&mut rng, format, 200, 2080, (128, 128));
                    // The fifth power spreads the exponents of a block.
                    let x: Vec<f32> = random_rows(&mut rng, 2080).iter().map(|x| x.powi(power)).collect();
                    let want = exact(&matrix, &x);
                    (matrix, x, want)
                })
                .collect();
            let error = |level| {
                let errors =
                    draws.iter().map(|(matrix, x, want)| relative_error(&product(level, matrix, x), want));
                errors.sum::<f64>() / DRAWS as f64
            };
            let f32_error = error(SimdLevel::Portable);
            for level in levels() {
                let packed = PackedMatrix::pack_for(level, &draws[0].0.view()).unwrap();
                if fixed_kernel(level, packed.format(), packed.has_zeros()).is_some() {
                    let error = error(level);
                    assert!(
                        error < 1.25 * f32_error,
                        "{format:?} {level} x^{power}: {error:e}, in f32 {f32_error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn one_row_of_extreme_elements_is_multiplied() {
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        let matrix = TestMatrix::random(&mut rng, format, 40, 130, (128, 128));
        // Zeros, subnormal numbers, the smallest and the largest exponents, and both in one block.
        for (one, other) in
            [(0.0, 0.0), (1e-42, 1e-44), (1e-38, -1e-38), (1e30, 1e30), (1e30, 1e-30), (-1e-20, 1e20)]
        {
            let x: Vec<f32> =
                random_rows(&mut rng, 130).iter().enumerate().map(|(i, x)| x * [one, other][i % 2]).collect();
            let (want, largest) = (exact(&matrix, &x), f64::from(one.abs().max(other.abs())));
            for level in levels() {
                for (got, want) in product(level, &matrix, &x).iter().zip(&want) {
                    // Subnormal results round to multiples of 2^-149, up to 2^-98 * 2^-30 away in fixed point.
                    let error = (f64::from(*got) - want).abs();
                    assert!(
                        error < 1e-4 * largest + 1e-34,
                        "{format:?} {level} {one:e}: {got:e}, not {want:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn one_row_that_is_not_finite_stays_so() {
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        let matrix = TestMatrix::random(&mut rng, format, 40, 70, (128, 128));
        for element in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = random_rows(&mut rng, 70);
            x[67] = element;
            for level in levels() {
                assert!(product(level, &matrix, &x).iter().all(|out| !out.is_finite()));
            }
        }
    }
}
