//! Tests of packed products against plain ones, for every format and level and for odd shapes.
#![allow(clippy::unwrap_used)]

use rand::{Rng, RngExt};

use super::*;
use expertd_model::decode;
use expertd_model::{MatrixView, Packing, Scales, WeightFormat};

/// A matrix in some format: the bytes as in a checkpoint, and the values they encode, computed here.
pub(crate) struct TestMatrix {
    format: WeightFormat,
    data: Vec<u8>,
    scales: Scales<'static>,
    exponents: Vec<u8>,
    n: usize,
    k: usize,
    pub(crate) values: Vec<f64>,
}

pub(crate) const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::F16, WeightFormat::Bf16, WeightFormat::Fp8E4m3, WeightFormat::Mxfp4];

impl TestMatrix {
    /// A matrix of random elements; `block` is rows by columns of an FP8 scale block.
    pub(crate) fn random(
        rng: &mut impl Rng,
        format: WeightFormat,
        n: usize,
        k: usize,
        block: (usize, usize),
    ) -> Self {
        let mut matrix = TestMatrix {
            format,
            data: Vec::new(),
            scales: Scales::None,
            exponents: Vec::new(),
            n,
            k,
            values: Vec::with_capacity(n * k),
        };
        let size = 1.0 / (k as f32).sqrt();
        match format {
            WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => {
                for _ in 0..n * k {
                    let x: f32 = rng.random_range(-size..size);
                    let (bytes, value) = match format {
                        WeightFormat::F32 => (x.to_le_bytes().to_vec(), f64::from(x)),
                        WeightFormat::F16 => {
                            let x = half::f16::from_f32(x);
                            (x.to_le_bytes().to_vec(), x.to_f64())
                        }
                        _ => {
                            let x = half::bf16::from_f32(x);
                            (x.to_le_bytes().to_vec(), x.to_f64())
                        }
                    };
                    matrix.data.extend(bytes);
                    matrix.values.push(value);
                }
            }
            WeightFormat::Fp8E4m3 => {
                let across = k.div_ceil(block.1);
                let scales: Vec<f32> =
                    (0..n.div_ceil(block.0) * across).map(|_| size * rng.random_range(0.001..0.01)).collect();
                for i in 0..n * k {
                    let code = loop {
                        let code: u8 = rng.random();
                        if code & 0x7f != 0x7f {
                            break code;
                        }
                    };
                    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
                    let magnitude = if exponent == 0 {
                        mantissa / 64.0
                    } else {
                        (1.0 + mantissa) * 2f64.powi(exponent - 7)
                    };
                    let scale = scales[i / k / block.0 * across + i % k / block.1];
                    matrix.data.push(code);
                    matrix.values.push(if code >= 128 { -magnitude } else { magnitude } * f64::from(scale));
                }
                matrix.scales =
                    Scales::Block { values: scales.into(), block_rows: block.0, block_cols: block.1 };
            }
            WeightFormat::Mxfp4 => {
                assert!(k.is_multiple_of(2));
                matrix.exponents = (0..n * k.div_ceil(32)).map(|_| rng.random_range(110..124)).collect();
                for i in 0..n * k {
                    let code: u8 = rng.random_range(0..16);
                    if i.is_multiple_of(2) {
                        matrix.data.push(code)
                    } else {
                        *matrix.data.last_mut().unwrap() |= code << 4
                    }
                    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
                    let exponent = matrix.exponents[i / k * k.div_ceil(32) + i % k / 32];
                    let value = magnitude * 2f64.powi(i32::from(exponent) - 127);
                    matrix.values.push(if code >= 8 { -value } else { value });
                }
            }
            WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4 => {
                unreachable!("`FORMATS` does not list {format}")
            }
        }
        matrix
    }

    pub(crate) fn view(&self) -> MatrixView<'_> {
        let scales = match self.format {
            WeightFormat::Mxfp4 => Scales::Mx { exponents: &self.exponents, row_stride: self.k.div_ceil(32) },
            _ => self.scales.clone(),
        };
        MatrixView {
            format: self.format,
            packing: Packing::Strided,
            data: &self.data,
            rows: self.n,
            cols: self.k,
            row_stride: self.k,
            col_stride: 1,
            scales,
        }
    }
}

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

#[test]
fn matmul_matches_the_definition() {
    let mut rng = rand::rng();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
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
            let scale = magnitudes(&x, &matrix.values, n, k);
            for level in levels() {
                let packed = PackedMatrix::pack_for(level, &matrix.view()).unwrap();
                assert_eq!((packed.n(), packed.k(), packed.level()), (n, k, level));
                let mut bits: Option<Vec<u32>> = None;
                for (threads, pool) in [(1, None), (3, Some(&pool))] {
                    let mut scratch = MatmulScratch::new(k, threads);
                    scratch.poison();
                    let mut out = vec![f32::NAN; m * n];
                    matmul(&x, &packed, &mut out, &mut scratch, pool);
                    for ((got, want), scale) in out.iter().zip(&want).zip(&scale) {
                        let error = (f64::from(*got) - want).abs();
                        assert!(
                            error <= 1e-6 * scale,
                            "{format:?} {level} [{m}, {n}, {k}]: {error:e} of {scale:e}"
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
fn packing_does_not_depend_on_strides() {
    let mut rng = rand::rng();
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
    let mut rng = rand::rng();
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
