//! Random matrices in every format, for tests.

use rand::seq::IndexedRandom;
use rand::{Rng, RngExt};

use expertd_model::{GroupScales, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints};

/// A matrix in some format: the bytes as in a checkpoint, and the values they encode, computed here.
pub(crate) struct TestMatrix {
    pub(crate) format: WeightFormat,
    pub(crate) data: Vec<u8>,
    packing: Packing,
    strides: [usize; 2],
    scales: Scales<'static>,
    exponents: Vec<u8>,
    groups: Option<TestGroups>,
    n: usize,
    k: usize,
    pub(crate) values: Vec<f64>,
}

/// Owned [`GroupScales`].
struct TestGroups {
    cols: usize,
    format: ScaleFormat,
    data: Vec<u8>,
    /// Whether neighbouring scales belong to neighbouring rows instead of neighbouring groups.
    transposed: bool,
    factor: f32,
    zeros: Option<TestZeros>,
}

struct TestZeros {
    data: Vec<u8>,
    packing: Packing,
    strides: [usize; 2],
    bias: u8,
}

pub(crate) const FORMATS: [WeightFormat; 8] = [
    WeightFormat::F32,
    WeightFormat::F16,
    WeightFormat::Bf16,
    WeightFormat::Fp8E4m3,
    WeightFormat::Mxfp4,
    WeightFormat::Mxfp8,
    WeightFormat::Nvfp4,
    WeightFormat::Int4,
];

/// Properties of a random INT4 matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int4Kind {
    pub(crate) group: usize,
    pub(crate) scales: ScaleFormat,
    pub(crate) packing: Packing,
    pub(crate) zeros: Option<(Packing, u8)>,
}

impl Int4Kind {
    pub(crate) fn random(rng: &mut impl Rng) -> Self {
        let packing = |rng: &mut _| {
            let all = [Packing::Strided, Packing::ColumnWords, Packing::RowWords, Packing::AwqWords];
            *all.choose(rng).unwrap()
        };
        // Zero points are never packed by columns.
        let zeros = match rng.random_range(0..4) {
            0 => None,
            1 => Some((Packing::Strided, 0)),
            2 => Some((Packing::RowWords, 1)),
            _ => Some((Packing::AwqWords, 0)),
        };
        Int4Kind {
            group: *[8, 16, 24, 32, 48, 64, 128, 1 << 20].choose(rng).unwrap(),
            scales: *[ScaleFormat::F32, ScaleFormat::F16, ScaleFormat::Bf16].choose(rng).unwrap(),
            packing: packing(rng),
            zeros,
        }
    }
}

fn fp8_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if code >= 128 { -magnitude } else { magnitude }
}

fn fp8_code(rng: &mut impl Rng) -> u8 {
    loop {
        let code: u8 = rng.random();
        if code & 0x7f != 0x7f {
            return code;
        }
    }
}

fn fp4_value(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code % 8)];
    if code >= 8 { -magnitude } else { magnitude }
}

/// Stores nibbles `[rows, cols]` in an order; returns the bytes and the strides.
fn pack_nibbles(codes: &[u8], rows: usize, cols: usize, packing: Packing) -> (Vec<u8>, [usize; 2]) {
    let strides = match packing {
        Packing::Strided => [cols, 1],
        // As GPTQ stores weights: words of neighbouring rows are neighbours.
        Packing::ColumnWords => [8, 8 * rows],
        // As AWQ stores weights: words of a column are neighbours.
        Packing::RowWords | Packing::AwqWords => [8, 8 * rows.div_ceil(8)],
    };
    let count = rows.next_multiple_of(8) * cols.next_multiple_of(8);
    let mut data = vec![0xee; count / 2];
    for (i, code) in codes.iter().enumerate() {
        let (row, col) = (i / cols, i % cols);
        let at = match packing {
            Packing::Strided => i,
            Packing::ColumnWords => (col / 8 * rows + row) * 8 + col % 8,
            Packing::RowWords => (col * rows.div_ceil(8) + row / 8) * 8 + row % 8,
            Packing::AwqWords => {
                (col * rows.div_ceil(8) + row / 8) * 8
                    + [0, 2, 4, 6, 1, 3, 5, 7].iter().position(|&r| r == row % 8).unwrap()
            }
        };
        let shift = at % 2 * 4;
        data[at / 2] = data[at / 2] & !(15 << shift) | code << shift;
    }
    (data, strides)
}

impl TestMatrix {
    fn empty(format: WeightFormat, n: usize, k: usize) -> Self {
        TestMatrix {
            format,
            data: Vec::new(),
            packing: Packing::Strided,
            strides: [k, 1],
            scales: Scales::None,
            exponents: Vec::new(),
            groups: None,
            n,
            k,
            values: Vec::with_capacity(n * k),
        }
    }

    /// A matrix of random elements; `block` is rows by columns of an FP8 scale block.
    pub(crate) fn random(
        rng: &mut impl Rng,
        format: WeightFormat,
        n: usize,
        k: usize,
        block: (usize, usize),
    ) -> Self {
        let mut matrix = Self::empty(format, n, k);
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
                    let code = fp8_code(rng);
                    let scale = scales[i / k / block.0 * across + i % k / block.1];
                    matrix.data.push(code);
                    matrix.values.push(fp8_value(code) * f64::from(scale));
                }
                matrix.scales =
                    Scales::Block { values: scales.into(), block_rows: block.0, block_cols: block.1 };
            }
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => {
                matrix.exponents = (0..n * k.div_ceil(32)).map(|_| rng.random_range(110..124)).collect();
                let four_bits = format == WeightFormat::Mxfp4;
                let codes: Vec<u8> = (0..n * k)
                    .map(|_| if four_bits { rng.random_range(0..16) } else { fp8_code(rng) })
                    .collect();
                for (i, &code) in codes.iter().enumerate() {
                    let exponent = matrix.exponents[i / k * k.div_ceil(32) + i % k / 32];
                    let element = if four_bits { fp4_value(code) } else { fp8_value(code) };
                    matrix.values.push(element * 2f64.powi(i32::from(exponent) - 127));
                }
                matrix.data = if four_bits { pack_nibbles(&codes, n, k, Packing::Strided).0 } else { codes };
            }
            WeightFormat::Nvfp4 => {
                let codes: Vec<u8> = (0..n * k).map(|_| rng.random_range(0..16)).collect();
                matrix.data = pack_nibbles(&codes, n, k, Packing::Strided).0;
                let scales: Vec<u8> = (0..n * k.div_ceil(16)).map(|_| fp8_code(rng) & 0x7f).collect();
                let factor = rng.random_range(0.001..0.002);
                matrix.values.extend(codes.iter().enumerate().map(|(i, &code)| {
                    let scale = fp8_value(scales[i / k * k.div_ceil(16) + i % k / 16]);
                    fp4_value(code) * scale * f64::from(factor)
                }));
                matrix.groups = Some(TestGroups {
                    cols: 16,
                    format: ScaleFormat::Fp8E4m3,
                    data: scales,
                    transposed: false,
                    factor,
                    zeros: None,
                });
            }
            WeightFormat::Int4 => {
                let kind = Int4Kind::random(rng);
                return Self::int4(rng, n, k, kind);
            }
        }
        matrix
    }

    /// A random INT4 matrix.
    pub(crate) fn int4(rng: &mut impl Rng, n: usize, k: usize, kind: Int4Kind) -> Self {
        let mut matrix = Self::empty(WeightFormat::Int4, n, k);
        let groups = k.div_ceil(kind.group);
        let codes: Vec<u8> = (0..n * k).map(|_| rng.random_range(0..16)).collect();
        (matrix.data, matrix.strides) = pack_nibbles(&codes, n, k, kind.packing);
        matrix.packing = kind.packing;
        let transposed = rng.random();
        let mut data = Vec::new();
        let mut scales = vec![0.0; n * groups];
        for i in 0..n * groups {
            let scale: f32 = rng.random_range(-0.02..0.02);
            let (bytes, value) = match kind.scales {
                ScaleFormat::F16 => {
                    let scale = half::f16::from_f32(scale);
                    (scale.to_le_bytes().to_vec(), scale.to_f64())
                }
                ScaleFormat::Bf16 => {
                    let scale = half::bf16::from_f32(scale);
                    (scale.to_le_bytes().to_vec(), scale.to_f64())
                }
                _ => (scale.to_le_bytes().to_vec(), f64::from(scale)),
            };
            data.extend(bytes);
            scales[if transposed { i % n * groups + i / n } else { i }] = value;
        }
        let points: Vec<u8> = (0..n * groups).map(|_| rng.random_range(0..16)).collect();
        let zero = |i: usize| kind.zeros.map_or(8.0, |_| f64::from(points[i]));
        matrix.values.extend(codes.iter().enumerate().map(|(i, &code)| {
            let group = i / k * groups + i % k / kind.group;
            (f64::from(code) - zero(group)) * scales[group]
        }));
        let zeros = kind.zeros.map(|(packing, bias)| {
            let (mut data, strides) = pack_nibbles(&points, n, groups, packing);
            // As GPTQ's first files were written: the bias was subtracted from whole words.
            for word in data.as_chunks_mut::<4>().0 {
                let biased = u32::from_le_bytes(*word).wrapping_sub(0x1111_1111 * u32::from(bias));
                *word = biased.to_le_bytes();
            }
            TestZeros { data, packing, strides, bias }
        });
        matrix.groups =
            Some(TestGroups { cols: kind.group, format: kind.scales, data, transposed, factor: 1.0, zeros });
        matrix
    }

    pub(crate) fn view(&self) -> MatrixView<'_> {
        let scales = match &self.groups {
            _ if !self.exponents.is_empty() => {
                Scales::Mx { exponents: &self.exponents, row_stride: self.k.div_ceil(32) }
            }
            None => self.scales.clone(),
            Some(groups) => Scales::Groups(GroupScales {
                cols: groups.cols,
                format: groups.format,
                data: &groups.data,
                row_stride: if groups.transposed { 1 } else { self.k.div_ceil(groups.cols) },
                group_stride: if groups.transposed { self.n } else { 1 },
                factor: groups.factor,
                zeros: groups.zeros.as_ref().map(|zeros| ZeroPoints {
                    data: &zeros.data,
                    packing: zeros.packing,
                    row_stride: zeros.strides[0],
                    group_stride: zeros.strides[1],
                    bias: zeros.bias,
                }),
            }),
        };
        MatrixView {
            format: self.format,
            packing: self.packing,
            data: &self.data,
            rows: self.n,
            cols: self.k,
            row_stride: self.strides[0],
            col_stride: self.strides[1],
            scales,
        }
    }
}
