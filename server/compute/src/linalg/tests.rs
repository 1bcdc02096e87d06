//! Tests of packed products against plain ones, for every format and level and for odd shapes.
#![allow(clippy::unwrap_used)]

use rand::{Rng, RngExt};

use super::*;
use expertd_model::{
    GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints, decode,
};

pub(crate) use super::test_matrix::{FORMATS, Int4Kind, TestMatrix};

pub(crate) fn levels() -> impl Iterator<Item = SimdLevel> {
    SimdLevel::ALL.into_iter().filter(|level| level.is_supported())
}

pub(crate) fn random_rows(rng: &mut impl Rng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// `|got - want| / |want|` in the L2 norm.
pub(crate) fn relative_error(got: &[f32], want: &[f64]) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum();
    (error / want.iter().map(|w| w * w).sum::<f64>()).sqrt()
}

fn product(x: &[f32], values: &[f64], n: usize, k: usize) -> Vec<f64> {
    x.chunks_exact(k)
        .flat_map(|x| {
            (0..n).map(move |c| x.iter().zip(&values[c * k..]).map(|(x, w)| f64::from(*x) * w).sum())
        })
        .collect()
}

/// Sums of the absolute values of the products, which errors are compared with because they do not cancel.
fn magnitudes(x: &[f32], values: &[f64], n: usize, k: usize) -> Vec<f64> {
    let x: Vec<f32> = x.iter().map(|x| x.abs()).collect();
    let values: Vec<f64> = values.iter().map(|w| w.abs()).collect();
    product(&x, &values, n, k)
}

/// Of the sum of the products' absolute values. Where the first product dominates, as with FP8's range of codes, roundings of the
/// partial sums add up as a random walk; this is seven standard deviations for 300 products.
const TOLERANCE: f64 = 3e-6;

/// Largest allowed errors of products. Few rows may be converted to fixed point, which moves each element by up to 2^-23 of its row's
/// largest one.
fn allowed_errors(x: &[f32], values: &[f64], n: usize, k: usize) -> Vec<f64> {
    let largest = x.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let off = f64::from(largest) * 2f64.powi(-23);
    let sum = |i: usize| values[i % n * k..][..k].iter().map(|w| w.abs()).sum::<f64>();
    let magnitudes = magnitudes(x, values, n, k).into_iter().enumerate();
    magnitudes.map(|(i, magnitude)| TOLERANCE * magnitude + off * sum(i)).collect()
}

#[test]
fn matmul_matches_the_definition() {
    let mut rng = expertd_test_seed::rng();
    let team = expertd_shm::ThreadTeam::start("team", 2, std::time::Duration::ZERO).unwrap();
    for format in FORMATS {
        for (m, n, k, block) in [
            (1, 1, 2, (128, 128)),
            (3, 17, 34, (1, 34)),
            (12, 33, 96, (16, 64)),
            (13, 64, 130, (128, 128)),
            (29, 100, 258, (100, 258)),
            (2, 40, 4106, (128, 128)),
            (5, 70, 300, (7, 33)),
            (131, 3, 64, (1, 32)),
            (300, 20, 34, (8, 32)),
        ] {
            let matrix = TestMatrix::random(&mut rng, format, n, k, block);
            let x = random_rows(&mut rng, m * k);
            let want = product(&x, &matrix.values, n, k);
            let allowed = allowed_errors(&x, &matrix.values, n, k);
            for level in levels() {
                let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
                assert_eq!((packed.n(), packed.k(), packed.level()), (n, k, level));
                let mut bits: Option<Vec<u32>> = None;
                for (threads, team) in [(1, None), (3, Some(&team))] {
                    let mut scratch = MatmulScratch::new(k, threads);
                    scratch.poison();
                    let mut out = vec![f32::NAN; m * n];
                    matmul(&x, &packed, &mut out, &mut scratch, team);
                    for ((got, want), allowed) in out.iter().zip(&want).zip(&allowed) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(
                            error <= *allowed,
                            "{format:?} {level} [{m}, {n}, {k}]: {error:e}, allowed {allowed:e}"
                        );
                    }
                    let got = out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert!(bits.as_ref().is_none_or(|bits| *bits == got), "threads change the bits");
                    bits = Some(got);
                }
            }
        }
    }
}

#[test]
fn every_code_is_converted_exactly() {
    // The rows are the identity, so the output is the weights: FP8 and FP4 codes in all positions of a pair or word,
    // NaN included.
    let k = 64;
    let identity: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    for level in levels() {
        for offset in 0..8 {
            for with_nan in [false, true] {
                let codes: Vec<u8> = (0..256 * k)
                    .map(|i| ((i / k + i % k * 37 + offset) % 256) as u8)
                    .map(|code| if code & 0x7f == 0x7f && !with_nan { 0x80 } else { code })
                    .collect();
                let scales = [0.75_f32, -3.0];
                let view = MatrixView {
                    format: WeightFormat::Fp8E4m3,
                    packing: Packing::Strided,
                    data: &codes,
                    rows: 256,
                    cols: k,
                    row_stride: k,
                    col_stride: 1,
                    scales: Scales::Block { values: scales[..].into(), block_rows: 128, block_cols: 64 },
                };
                let packed = PackedMatrix::pack_for(level, &view).unwrap();
                assert_eq!(packed.format(), if with_nan { WeightFormat::F32 } else { WeightFormat::Fp8E4m3 });
                let mut out = vec![f32::NAN; 256 * k];
                matmul(&identity, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
                for (i, got) in out.iter().enumerate() {
                    let (col, row) = (i / 256, i % 256);
                    let code = codes[row * k + col];
                    let want = decode::fp8_e4m3(code) * scales[row / 128];
                    // A NaN poisons only the output feature whose weights contain it.
                    let nan = codes[row * k..][..k].iter().any(|code| code & 0x7f == 0x7f);
                    assert!(
                        if nan { got.is_nan() } else { *got == want },
                        "{level} {code:#x}: {got}, not {want}"
                    );
                }
            }
            let nibbles: Vec<u8> =
                (0..32 * k / 2).map(|i| ((i * 17 + i / 16 + offset * 29) % 256) as u8).collect();
            // The largest exponents keep 6 * 2^e finite.
            let exponents: Vec<u8> = (0..64).map(|i| (i * 4 + offset / 2).min(252) as u8).collect();
            let view = MatrixView {
                format: WeightFormat::Mxfp4,
                packing: Packing::Strided,
                data: &nibbles,
                rows: 32,
                cols: k,
                row_stride: k,
                col_stride: 1,
                scales: Scales::Mx { exponents: &exponents, row_stride: 2 },
            };
            let packed = PackedMatrix::pack_for(level, &view).unwrap();
            let mut out = vec![f32::NAN; 32 * k];
            matmul(&identity, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
            for (i, got) in out.iter().enumerate() {
                let (col, row) = (i / 32, i % 32);
                let element = row * k + col;
                let code = nibbles[element / 2] >> (element % 2 * 4) & 15;
                let exponent = exponents[row * 2 + col / 32];
                let want = f64::from(decode::fp4_e2m1(code)) * 2f64.powi(i32::from(exponent) - 127);
                assert_eq!(f64::from(*got), want, "{level} {code} 2^{exponent}");
            }
        }
    }
}

#[test]
fn every_int4_code_is_converted_exactly() {
    // The rows are the identity, so the output is the weights. The sources are laid out as compressed-tensors, GPTQ (with
    // its zero points less one) and AWQ lay them out; the groups do not divide the columns, and 70 columns leave padding.
    let mut rng = expertd_test_seed::rng();
    let (n, k) = (45, 70);
    let identity: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    for (packing, zeros) in [
        (Packing::Strided, None),
        (Packing::ColumnWords, Some((Packing::RowWords, 1))),
        (Packing::AwqWords, Some((Packing::AwqWords, 0))),
        (Packing::RowWords, Some((Packing::Strided, 0))),
    ] {
        for scales in [ScaleFormat::F32, ScaleFormat::F16, ScaleFormat::Bf16] {
            for group in [8, 16, 24, 32, 40, 48, 64, 128] {
                let matrix = TestMatrix::int4(&mut rng, n, k, Int4Kind { group, scales, packing, zeros });
                for level in levels() {
                    let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
                    assert_eq!(packed.format(), WeightFormat::Int4);
                    let mut out = vec![f32::NAN; k * n];
                    matmul(&identity, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
                    for (i, got) in out.iter().enumerate() {
                        let (col, row) = (i / n, i % n);
                        let want = matrix.values[row * k + col] as f32;
                        assert_eq!(*got, want, "{level} {packing:?} {scales:?} groups of {group} at {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_code_with_scales_within_blocks_is_converted_exactly() {
    let (n, k) = (32, 64);
    let identity: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    let check = |view: &MatrixView<'_>, want: &dyn Fn(usize, usize) -> f64| {
        for level in levels() {
            let packed = PackedMatrix::pack_for(level, view).unwrap();
            assert_eq!(packed.format(), view.format);
            let mut out = vec![f32::NAN; n * k];
            matmul(&identity, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
            for (i, got) in out.iter().enumerate() {
                let want = want(i % n, i / n) as f32;
                assert!(*got == want || want.is_nan() && got.is_nan(), "{level} {i}: {got}, not {want}");
            }
        }
    };
    for offset in 0..8 {
        // MXFP8: every code that is a number, with exponents from the smallest to the largest that keeps 448 * 2^e finite.
        let codes: Vec<u8> = (0..n * k)
            .map(|i| ((i * 37 + i / k + offset) % 256) as u8)
            .map(|code| if code & 0x7f == 0x7f { 0x80 } else { code })
            .collect();
        let exponents: Vec<u8> = (0..n * 2).map(|i| (i * 4 + offset / 2).min(245) as u8).collect();
        let view = MatrixView {
            format: WeightFormat::Mxfp8,
            packing: Packing::Strided,
            data: &codes,
            rows: n,
            cols: k,
            row_stride: k,
            col_stride: 1,
            scales: Scales::Mx { exponents: &exponents, row_stride: 2 },
        };
        check(&view, &|row, col| {
            let exponent = exponents[row * 2 + col / 32];
            f64::from(decode::fp8_e4m3(codes[row * k + col])) * 2f64.powi(i32::from(exponent) - 127)
        });
        // NVFP4: every code under every scale, NaN included, which poisons the outputs of its row. f32 holds all products.
        let nibbles: Vec<u8> =
            (0..n * k / 2).map(|i| ((i * 17 + i / 16 + offset * 29) % 256) as u8).collect();
        let scales: Vec<u8> = (0..n * 4).map(|i| (i + offset * 32) as u8).collect();
        let groups = GroupScales {
            cols: 16,
            format: ScaleFormat::Fp8E4m3,
            data: &scales,
            row_stride: 4,
            group_stride: 1,
            factor: 0.375,
            zeros: None,
        };
        let view = MatrixView {
            format: WeightFormat::Nvfp4,
            data: &nibbles,
            scales: Scales::Groups(groups),
            ..view.clone()
        };
        check(&view, &|row, col| {
            if scales[row * 4..][..4].iter().any(|code| code & 0x7f == 0x7f) {
                return f64::NAN;
            }
            let element = row * k + col;
            let code = nibbles[element / 2] >> (element % 2 * 4) & 15;
            let scale = decode::fp8_e4m3(scales[row * 4 + col / 16]);
            f64::from(decode::fp4_e2m1(code)) * f64::from(scale) * 0.375
        });
    }
}

#[test]
fn matrices_that_the_kernels_cannot_hold_are_kept_as_f32() {
    let mut rng = expertd_test_seed::rng();
    let k = 70;
    let kind = Int4Kind { group: 5, scales: ScaleFormat::F16, packing: Packing::Strided, zeros: None };
    let odd_groups = TestMatrix::int4(&mut rng, 20, k, kind);
    let mut nan = TestMatrix::random(&mut rng, WeightFormat::Mxfp8, 20, k, (1, 1));
    nan.data[k + 3] = 0xff;
    let exponents = [247_u8; 20 * 3];
    let mut plain = TestMatrix::random(&mut rng, WeightFormat::Mxfp8, 20, k, (1, 1));
    // Elements below 2 keep the weights finite.
    plain.data.iter_mut().for_each(|code| *code &= 0xbf);
    let huge = MatrixView { scales: Scales::Mx { exponents: &exponents, row_stride: 3 }, ..plain.view() };
    let identity: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    for (view, nan_row) in [(odd_groups.view(), None), (nan.view(), Some(1)), (huge, None)] {
        for level in levels() {
            let packed = PackedMatrix::pack_for(level, &view).unwrap();
            assert_eq!(packed.format(), WeightFormat::F32);
            let mut out = vec![f32::NAN; k * 20];
            matmul(&identity, &packed, &mut out, &mut MatmulScratch::new(k, 1), None);
            for (i, got) in out.iter().enumerate() {
                let (row, col) = (i % 20, i / 20);
                let same = *got == view.value(row, col);
                assert!(if nan_row == Some(row) { got.is_nan() } else { same }, "{level} {i}: {got}");
            }
        }
    }
}

#[test]
fn gate_and_up_may_have_different_groups() {
    // `forward` computes pairs; here it is enough that the header holds the groups of both without rounding.
    let mut rng = expertd_test_seed::rng();
    let kind = |group, scales, zeros| Int4Kind { group, scales, packing: Packing::Strided, zeros };
    let gate = TestMatrix::int4(&mut rng, 20, 64, kind(32, ScaleFormat::Bf16, None));
    let up = TestMatrix::int4(&mut rng, 20, 64, kind(16, ScaleFormat::F16, Some((Packing::Strided, 0))));
    let packed = PackedMatrix::pack_gated(SimdLevel::Portable, &gate.view(), &up.view()).unwrap();
    let groups = GroupLayout { per_block: 2, scale: PackedScale::F32, zeros: true };
    assert_eq!(packed.form().groups, Some(groups));
    let same = PackedMatrix::pack_gated(SimdLevel::Portable, &gate.view(), &gate.view()).unwrap();
    let groups = GroupLayout { per_block: 1, scale: PackedScale::Bf16, zeros: false };
    assert_eq!(same.form().groups, Some(groups));
    // 4 bits and 2 bytes of scale per 32 elements: 4.5 bits per weight of two halves of three padded panels.
    assert_eq!(same.bytes(), 3 * 16 * 64 * 9 / 16);
}

#[test]
fn zero_points_of_symmetric_weights_are_not_packed() {
    let mut rng = expertd_test_seed::rng();
    let (n, k) = (24, 64);
    let kind = Int4Kind { group: 32, scales: ScaleFormat::F16, packing: Packing::ColumnWords, zeros: None };
    let matrix = TestMatrix::int4(&mut rng, n, k, kind);
    let Scales::Groups(groups) = matrix.view().scales else { panic!("INT4 has groups") };
    let pack = |zeros: Option<ZeroPoints<'_>>| {
        let scales = Scales::Groups(GroupScales { zeros, ..groups });
        PackedMatrix::pack_for(SimdLevel::Portable, &MatrixView { scales, ..matrix.view() }).unwrap()
    };
    let expected = pack(None);
    for (nibbles, bias) in [(0x88, 0), (0x77, 1)] {
        let mut data = vec![nibbles; n * (k / 32) / 2];
        let symmetric = pack(Some(zero_points(&data, n, bias)));
        assert_eq!(symmetric.form(), expected.form());
        assert_eq!(symmetric.data[..], expected.data[..]);
        *data.last_mut().unwrap() ^= 0x10;
        let other = pack(Some(zero_points(&data, n, bias)));
        assert!(other.form().groups.unwrap().zeros, "one zero point differs");
    }
}

/// Zero points in GPTQ's order, for `n` rows.
fn zero_points(data: &[u8], n: usize, bias: u8) -> ZeroPoints<'_> {
    ZeroPoints { data, packing: Packing::RowWords, row_stride: 8, group_stride: n, bias }
}

#[test]
fn packing_does_not_depend_on_strides() {
    let mut rng = expertd_test_seed::rng();
    let (n, k) = (45, 70);
    for format in [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Fp8E4m3] {
        let matrix = TestMatrix::random(&mut rng, format, n, k, (128, 128));
        let size = matrix.data.len() / n / k;
        // Transposed, with a gap after each column, at an odd address.
        let mut data = vec![0xee; 1 + size * k * (n + 3)];
        for (i, element) in matrix.data.chunks_exact(size).enumerate() {
            let at = 1 + (i % k * (n + 3) + i / k) * size;
            data[at..at + size].copy_from_slice(element);
        }
        let view = MatrixView { data: &data[1..], row_stride: 1, col_stride: n + 3, ..matrix.view() };
        for level in levels() {
            let (a, b) =
                (PackedMatrix::pack_for(level, &matrix.view()), PackedMatrix::pack_for(level, &view));
            let (a, b) = (a.unwrap(), b.unwrap());
            assert!(a.data[..] == b.data[..] && a.scales[..] == b.scales[..]);
        }
    }
}

#[test]
fn non_finite_inputs_affect_only_their_rows() {
    let mut rng = expertd_test_seed::rng();
    for format in FORMATS {
        let matrix = TestMatrix::random(&mut rng, format, 40, 70, (128, 128));
        let mut x = random_rows(&mut rng, 5 * 70);
        x[70 * 2 + 3] = f32::NAN;
        x[70 * 3 + 4] = f32::INFINITY;
        x[70 * 4 + 4] = f32::MAX;
        for level in levels() {
            let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
            let mut out = vec![f32::NAN; 5 * 40];
            matmul(&x, &packed, &mut out, &mut MatmulScratch::new(70, 1), None);
            assert!(out[..80].iter().all(|x| x.is_finite()));
            assert!(out[80..120].iter().all(|x| x.is_nan()));
        }
    }
}

#[test]
fn inconsistent_views_are_refused() {
    let data = vec![0_u8; 64];
    let view = |format, rows, cols, scales| MatrixView {
        format,
        packing: Packing::Strided,
        data: &data,
        rows,
        cols,
        row_stride: cols,
        col_stride: 1,
        scales,
    };
    let block = |count: usize, block_rows, block_cols| Scales::Block {
        values: vec![1.0; count].into(),
        block_rows,
        block_cols,
    };
    let check =
        |view: &MatrixView<'_>| PackedMatrix::pack(view).map(|_| ()).map_err(|error| error.to_string());
    assert!(check(&view(WeightFormat::F32, 4, 4, Scales::None)).is_ok());
    for (bad, words) in [
        (view(WeightFormat::F32, 4, 5, Scales::None), "need 80 bytes, but 64 were given"),
        (view(WeightFormat::Bf16, usize::MAX, 2, Scales::None), "bytes"),
        (view(WeightFormat::F32, 0, 4, Scales::None), "empty"),
        (view(WeightFormat::F32, 4, 4, block(1, 4, 4)), "block scales"),
        (view(WeightFormat::Fp8E4m3, 4, 4, block(3, 2, 2)), "need 4 scales, but 3 were given"),
        (view(WeightFormat::Fp8E4m3, 4, 4, block(1, 0, 2)), "empty blocks"),
        (view(WeightFormat::Mxfp4, 2, 32, Scales::None), "no scales"),
        (
            view(WeightFormat::Mxfp4, 2, 32, Scales::Mx { exponents: &data[..1], row_stride: 1 }),
            "need 2 scales",
        ),
        (view(WeightFormat::F16, 2, 2, Scales::Mx { exponents: &data, row_stride: 1 }), "E8M0"),
    ] {
        let message = check(&bad).unwrap_err();
        assert!(message.contains(words), "{message}");
    }
    let (gate, up) =
        (view(WeightFormat::F32, 4, 4, Scales::None), view(WeightFormat::F32, 2, 4, Scales::None));
    let message = PackedMatrix::pack_gated(SimdLevel::Portable, &gate, &up).unwrap_err().to_string();
    assert!(message.contains("[4, 4]") && message.contains("[2, 4]"), "{message}");
}
