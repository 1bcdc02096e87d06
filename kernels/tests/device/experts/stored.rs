//! Matrices as checkpoints store them, and what their elements are worth by the formats' definitions.

use std::sync::OnceLock;

use expertd_compute::experts::reference;
use expertd_kernels::experts;
use half::{bf16, f16};

use crate::random::Random;

/// One matrix as a checkpoint stores it, `[rows, k]`.
#[derive(Clone)]
pub struct Stored {
    pub k: usize,
    /// bf16 bits, FP8 bytes or nibbles.
    pub codes: Vec<u8>,
    /// FP8: `[rows, ceil(k / 128)]`.
    pub multipliers: Vec<f32>,
    /// MXFP4, MXFP8: `[rows, k / 32]`; NVFP4: e4m3 scales `[rows, k / 16]`.
    pub exponents: Vec<u8>,
    /// INT4: `[rows, k / 32]`.
    pub group_scales: Vec<f16>,
    /// INT4 with zero points: `[rows, k / 32]`.
    pub zeros: Vec<u8>,
    pub row_scales: Vec<f32>,
    pub format: i32,
    /// FP8 and INT4: elements are rounded to bf16 before the row's scale.
    rounded: bool,
    /// W4A8: the exponent that counts as each row's largest, found when a value is first asked for.
    tops: OnceLock<Vec<i32>>,
}

fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Every code in turn, from a random start of each row: none that is a number is left out.
fn e4m3_codes(random: &mut Random, [rows, k]: [usize; 2]) -> Vec<u8> {
    let row = |_| {
        let start = random.below(256);
        let codes = (0..k as u64).map(move |c| ((start + c * 37) & 255) as u8);
        codes.map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c })
    };
    (0..rows).flat_map(row).collect()
}

impl Stored {
    /// Any codes but NaN, with values of about `size`. `scale_rows` neighbouring rows share their FP8 multipliers.
    pub fn draw(
        random: &mut Random,
        format: i32,
        [rows, k]: [usize; 2],
        size: f32,
        scale_rows: usize,
    ) -> Stored {
        let mut stored = Stored {
            k,
            codes: Vec::new(),
            multipliers: Vec::new(),
            exponents: Vec::new(),
            group_scales: Vec::new(),
            zeros: Vec::new(),
            row_scales: vec![1.0; rows],
            format,
            rounded: false,
            tops: OnceLock::new(),
        };
        match format {
            experts::BF16 => {
                let values = (0..rows * k).map(|_| bf16::from_f32((random.unit() * 3.4 - 1.7) * size));
                stored.codes = values.flat_map(|v| v.to_bits().to_le_bytes()).collect();
            }
            experts::MXFP8 => {
                stored.codes = e4m3_codes(random, [rows, k]);
                let largest = 128 + (size / 112.0).log2().floor() as i32;
                stored.exponents =
                    (0..rows * k / 32).map(|_| (largest - random.below(4) as i32) as u8).collect();
            }
            experts::NVFP4 => {
                stored.codes = (0..rows * k / 2).map(|_| random.below(256) as u8).collect();
                // Codes from 0x30 on are at least 0.5; the rows' scales have the rest, and some scales are negative.
                let groups = rows * k / experts::NVFP4_GROUP;
                stored.exponents = (0..groups)
                    .map(|_| (0x30 + random.below(16) as u8) | (random.below(2) as u8 * 0x80))
                    .collect();
            }
            experts::FP8 | experts::W8A8 => {
                stored.codes = e4m3_codes(random, [rows, k]);
                let columns = k.div_ceil(128);
                let drawn: Vec<f32> = (0..rows.div_ceil(scale_rows) * columns)
                    .map(|_| size / 112.0 * (0.5 + random.unit()))
                    .collect();
                let at = |i: usize| drawn[i / columns / scale_rows * columns + i % columns];
                stored.multipliers = (0..rows * columns).map(at).collect();
            }
            experts::INT4 | experts::INT4_ZEROS => {
                stored.codes = (0..rows * k / 2).map(|_| random.below(256) as u8).collect();
                let groups = rows * k / experts::INT4_GROUP;
                // With the bits of f16, or those that a scale in bf16 has.
                let scale = |_| {
                    let scale = size / 5.0 * (0.5 + random.unit());
                    let fewer = bf16::from_f32(scale).to_f32();
                    f16::from_f32(if random.below(2) == 0 { scale } else { fewer })
                };
                stored.group_scales = (0..groups).map(scale).collect();
                let zero =
                    |_| if format == experts::INT4 { experts::INT4_MIDDLE } else { random.below(16) as u8 };
                stored.zeros = (0..groups).map(zero).collect();
            }
            _ => {
                stored.codes = (0..rows * k / 2).map(|_| random.below(256) as u8).collect();
                let largest = 128 + (size / 2.9).log2().floor() as i32;
                let exponents = (0..rows * k / 32).map(|_| (largest - random.below(4) as i32) as u8);
                stored.exponents = exponents.collect();
            }
        }
        if format != experts::BF16 {
            let size = if format == experts::NVFP4 { size / 3.0 } else { 1.0 };
            stored.row_scales = (0..rows).map(|_| size * (0.5 + random.unit())).collect();
        }
        stored
    }

    /// The matrix with each element of FP8 or INT4 times its scale rounded to bf16 once, as tiles of many tokens multiply it.
    pub fn rounded(&self) -> Stored {
        Stored { rounded: true, ..self.clone() }
    }

    pub fn value(&self, row: usize, col: usize) -> f64 {
        let at = row * self.k + col;
        let unscaled = match self.format {
            experts::BF16 => {
                return bf16::from_le_bytes([self.codes[at * 2], self.codes[at * 2 + 1]]).to_f64();
            }
            experts::FP8 | experts::W8A8 => self.scaled(
                e4m3(self.codes[at]) * f64::from(self.multipliers[row * self.k.div_ceil(128) + col / 128]),
            ),
            experts::MXFP8 => e4m3(self.codes[at]) * self.power_of_two(row, col),
            experts::W4A8 => self.in_e4m3(row, col),
            experts::NVFP4 => {
                let scale =
                    self.exponents[row * (self.k / experts::NVFP4_GROUP) + col / experts::NVFP4_GROUP];
                e2m1(self.codes[at / 2] >> (at % 2 * 4) & 15) * e4m3(scale)
            }
            experts::INT4 | experts::INT4_ZEROS => {
                let group = row * (self.k / experts::INT4_GROUP) + col / experts::INT4_GROUP;
                let code = self.codes[at / 2] >> (at % 2 * 4) & 15;
                let integer = f64::from(code) - f64::from(self.zeros[group]);
                self.scaled(integer * self.group_scales[group].to_f64())
            }
            _ => e2m1(self.codes[at / 2] >> (at % 2 * 4) & 15) * self.power_of_two(row, col),
        };
        unscaled * f64::from(self.row_scales[row])
    }

    /// An element times its scale.
    fn scaled(&self, product: f64) -> f64 {
        if self.rounded { bf16::from_f32(product as f32).to_f64() } else { product }
    }

    /// The scale of MXFP4 and MXFP8.
    fn power_of_two(&self, row: usize, col: usize) -> f64 {
        let exponent = self.exponents[row * (self.k / 32) + col / 32];
        if exponent == 255 { f64::NAN } else { 2f64.powi(i32::from(exponent) - 127) }
    }

    /// W4A8: an element as docs/models.md defines it ("MXFP4 with rows in FP8").
    fn in_e4m3(&self, row: usize, col: usize) -> f64 {
        let top =
            self.tops.get_or_init(|| (0..self.row_scales.len()).map(|row| self.top(row)).collect())[row];
        let at = row * self.k + col;
        let unit = 2f64.powi(top - 127 - 6);
        let value = e2m1(self.codes[at / 2] >> (at % 2 * 4) & 15) * self.power_of_two(row, col) / unit;
        if top == 255 || value.is_nan() { f64::NAN } else { reference::code(value, 1.0) * unit }
    }

    fn top(&self, row: usize) -> i32 {
        let of = |block: usize| {
            let bytes = &self.codes[(row * self.k + block * 32) / 2..][..16];
            let exponent = self.exponents[row * (self.k / 32) + block];
            if exponent == 255 || bytes.iter().any(|byte| byte & 0x77 != 0) { exponent } else { 0 }
        };
        i32::from((0..self.k / 32).map(of).max().unwrap_or(0)).max(7)
    }

    pub fn dot(&self, row: usize, x: &[f64]) -> f64 {
        x.iter().enumerate().map(|(col, x)| self.value(row, col) * x).sum()
    }

    pub fn scale_bytes(&self) -> Vec<u8> {
        match self.format {
            experts::FP8 | experts::W8A8 => self.multipliers.iter().flat_map(|v| v.to_le_bytes()).collect(),
            experts::INT4 | experts::INT4_ZEROS => {
                self.group_scales.iter().flat_map(|v| v.to_le_bytes()).collect()
            }
            _ => self.exponents.clone(),
        }
    }
}

/// The scale of every 128 values.
pub fn group_scales(values: &[f64]) -> Vec<f32> {
    values.chunks(experts::SCALE_ELEMENTS).map(|group| reference::group_scale(group, false)).collect()
}

/// The codes, as numbers, of the smallest and the largest magnitude that a value may have, with the scales that its group may
/// have: the smallest magnitude with the largest scale, and the other way round.
pub fn code_range(least: f64, most: f64, small_scale: f32, large_scale: f32) -> (f64, f64) {
    (reference::code(least, large_scale), reference::code(most, small_scale))
}
