//! Random numbers for gigabytes of weights.
//!
//! Weights are drawn from a table of 2^16 numbers of the wanted distribution, already stored in the element type, so
//! that 16 random bits yield a weight. The generator is SplitMix64 (Steele, Lea, Flood 2014), seeded for each block of
//! a tensor, so that blocks can be drawn in parallel and the result does not depend on how the work was divided.

use half::{bf16, f16};
use rand::seq::index;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::StandardNormal;
use rayon::prelude::*;

use super::layout::{Element, FP8_DEVIATION, FP8_SCALE, Fill, Tensor};

/// Bytes drawn from one seed.
const SEED_BLOCK: usize = 1 << 16;

/// Tables of numbers to draw from.
pub(super) struct Tables {
    normal: Vec<f32>,
    fp8: Vec<u8>,
}

impl Tables {
    pub(super) fn new() -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(0x7ab1e);
        let normal: Vec<f32> = (0..1 << 16).map(|_| rng.sample(StandardNormal)).collect();
        let fp8 = normal.iter().map(|x| nearest_fp8(x * FP8_DEVIATION)).collect();
        Self { normal, fp8 }
    }

    /// Fills bytes `start..` of a tensor. `start` must be a multiple of [`SEED_BLOCK`].
    pub(super) fn fill(&self, tensor: &Tensor, seed: u64, start: u64, out: &mut [u8]) {
        let first = start / SEED_BLOCK as u64;
        let seeded = |i: usize| SplitMix(mix(seed ^ mix(first + i as u64)));
        let blocks = out.par_chunks_mut(SEED_BLOCK).enumerate();
        match (tensor.fill, tensor.element) {
            (Fill::Normal(deviation), Element::F32) => {
                let table = self.bytes(deviation, f32::to_le_bytes);
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Normal(deviation), Element::F16) => {
                let table = self.bytes(deviation, |x| f16::from_f32(x).to_le_bytes());
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Normal(deviation), _) => {
                let table = self.bytes(deviation, |x| bf16::from_f32(x).to_le_bytes());
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Fp8Codes, _) => {
                let table: Vec<[u8; 1]> = self.fp8.iter().map(|b| [*b]).collect();
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Fp4Codes | Fill::Words, _) => blocks.for_each(|(i, out)| seeded(i).raw(out)),
            (Fill::ZeroPoints(first), _) => {
                let nibble = |bits: u8| first + (bits & 7);
                let table: Vec<[u8; 1]> =
                    (0..=u16::MAX).map(|i| [nibble(i as u8) | nibble((i >> 8) as u8) << 4]).collect();
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Fp8Scales, _) => {
                let scale = |i: u32| FP8_SCALE * (0.5 + i as f32 / 65536.0);
                let table: Vec<[u8; 1]> = (0..1 << 16).map(|i| [nearest_fp8(scale(i))]).collect();
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Numbers(numbers), _) => {
                for (cell, number) in out.chunks_exact_mut(4).zip(numbers) {
                    cell.copy_from_slice(&(number as u32).to_le_bytes());
                }
            }
            (Fill::Groups { cols }, _) => {
                for (i, cell) in out.chunks_exact_mut(4).enumerate() {
                    cell.copy_from_slice(&((start as usize / 4 + i) as u32 / cols as u32).to_le_bytes());
                }
            }
            (Fill::Exponents(mean), _) => {
                let middle = mean.log2().round() + 127.0;
                let middle = middle.clamp(2.0, 252.0) as u8;
                let table: Vec<[u8; 1]> = (0..1 << 16).map(|i| [middle - 1 + (i % 4 != 0) as u8]).collect();
                blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
            }
            (Fill::Scales(mean), element) => {
                let values = (0..1 << 16).map(|i| mean * (0.5 + i as f32 / 65536.0));
                if element == Element::F32 {
                    let table: Vec<[u8; 4]> = values.map(f32::to_le_bytes).collect();
                    blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
                } else if element == Element::F16 {
                    let table: Vec<[u8; 2]> = values.map(|x| f16::from_f32(x).to_le_bytes()).collect();
                    blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
                } else {
                    let table: Vec<[u8; 2]> = values.map(|x| bf16::from_f32(x).to_le_bytes()).collect();
                    blocks.for_each(|(i, out)| seeded(i).pick4(&table, out));
                }
            }
            (Fill::Experts { count }, _) => {
                let top_k = tensor.shape[1];
                for (i, row) in out.chunks_mut(8 * top_k).enumerate() {
                    let mut rng = ChaCha8Rng::seed_from_u64(mix(seed ^ mix(start + i as u64)));
                    let experts = index::sample(&mut rng, count, top_k);
                    for (cell, expert) in row.chunks_exact_mut(8).zip(experts) {
                        cell.copy_from_slice(&(expert as i64).to_le_bytes());
                    }
                }
            }
        }
    }

    fn bytes<const N: usize>(&self, deviation: f32, store: impl Fn(f32) -> [u8; N]) -> Vec<[u8; N]> {
        self.normal.iter().map(|x| store(x * deviation)).collect()
    }
}

struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Draws elements from a table of 2^16.
    fn pick4<const N: usize>(&mut self, table: &[[u8; N]], out: &mut [u8]) {
        let table: &[[u8; N]; 1 << 16] = table.try_into().expect("tables have 2^16 entries");
        for four in out.as_chunks_mut::<N>().0.chunks_mut(4) {
            let mut bits = self.next();
            for element in four {
                *element = table[usize::from(bits as u16)];
                bits >>= 16;
            }
        }
    }

    fn raw(&mut self, out: &mut [u8]) {
        for eight in out.chunks_mut(8) {
            eight.copy_from_slice(&self.next().to_le_bytes()[..eight.len()]);
        }
    }
}

/// The finaliser of SplitMix64.
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The FP8 e4m3 code of a number, rounded to nearest and saturated at 448.
fn nearest_fp8(x: f32) -> u8 {
    let sign = if x < 0.0 { 0x80 } else { 0 };
    let magnitude = x.abs().min(448.0);
    // Steps are powers of two: 2^-9 among subnormals, otherwise an eighth of the power of two below the number.
    let exponent = magnitude.log2().floor().max(-6.0);
    let step = (exponent - 3.0).exp2();
    let steps = (magnitude / step).round() as u32;
    // A count of 16 is the next exponent's 8; the addition below carries it over.
    let code =
        if exponent <= -6.0 && steps < 8 { steps } else { (exponent as i32 + 7) as u32 * 8 + (steps - 8) };
    sign | u8::try_from(code.min(0x7e)).expect("the code is at most 0x7e")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_codes_are_the_nearest() {
        assert_eq!(nearest_fp8(0.0), 0);
        assert_eq!(nearest_fp8(1.0), 0x38);
        assert_eq!(nearest_fp8(-1.0), 0xb8);
        assert_eq!(nearest_fp8(448.0), 0x7e);
        assert_eq!(nearest_fp8(1e9), 0x7e);
        assert_eq!(nearest_fp8(0.001_953_125), 1);
        assert_eq!(nearest_fp8(1.97), 0x40);
        assert_eq!(nearest_fp8(1.0 + 1.0 / 8.0), 0x39);
    }

    #[test]
    fn drawing_does_not_depend_on_how_it_is_split() {
        let tables = Tables::new();
        let tensor = Tensor {
            name: "t".into(),
            element: Element::Bf16,
            shape: vec![3 * SEED_BLOCK / 2],
            fill: Fill::Normal(0.5),
        };
        let mut whole = vec![0; 3 * SEED_BLOCK];
        tables.fill(&tensor, 7, 0, &mut whole);
        let mut parts = vec![0; 3 * SEED_BLOCK];
        let (head, tail) = parts.split_at_mut(SEED_BLOCK);
        tables.fill(&tensor, 7, 0, head);
        tables.fill(&tensor, 7, SEED_BLOCK as u64, tail);
        assert_eq!(whole, parts);
        assert_ne!(whole[..SEED_BLOCK], whole[SEED_BLOCK..2 * SEED_BLOCK]);
        let values: Vec<f32> = whole.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect();
        let square: f32 = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
        assert!((square.sqrt() - 0.5).abs() < 0.01, "{square}");
    }
}
