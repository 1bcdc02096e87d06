//! FP8 rows: what quantisation to e4m3 leaves of packed rows. docs/models.md defines it for all devices ("FP8 products");
//! the GPU kernels' form of it is `kernels/src/experts_quantise.cuh`.

use super::packed::K_BLOCK;
use expertd_model::FP8_ROW_GROUP;

/// The largest e4m3 value.
const LARGEST: f32 = 448.0;
/// Lower bound of the magnitude from which a group's scale is computed.
const SMALLEST_MAXIMUM: f32 = f32::from_bits((127 - 100) << 23);

/// The scales of rows in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// The largest magnitude of a group / 448.
    F32,
    /// The largest magnitude of a group / 448, rounded up to a power of two (ue8m0).
    PowerOfTwo,
}

impl Fp8Scales {
    /// The scale of a group whose largest magnitude is `largest`.
    fn of(self, largest: f32) -> f32 {
        let scale = largest.max(SMALLEST_MAXIMUM) / LARGEST;
        match self {
            Fp8Scales::F32 => scale,
            Fp8Scales::PowerOfTwo => f32::from_bits((scale.to_bits() + 0x007f_ffff) & 0x7f80_0000),
        }
    }
}

/// Rounds row `r` of a tile of `rows` packed rows to bf16 and then to FP8, and writes the values of its codes times their
/// scales times `factor`.
pub(crate) fn quantise_row(tile: &mut [f32], rows: usize, r: usize, scales: Fp8Scales, factor: f32) {
    let (blocks, _) = tile.as_chunks_mut::<K_BLOCK>();
    for group in blocks.chunks_mut(FP8_ROW_GROUP / K_BLOCK * rows) {
        let mut largest = [0.0; K_BLOCK];
        for block in group.iter_mut().skip(r).step_by(rows) {
            for (x, largest) in block.iter_mut().zip(&mut largest) {
                *x = to_bf16(*x);
                *largest = larger(*largest, x.abs());
            }
        }
        let scale = scales.of(largest.into_iter().fold(0.0, larger));
        let (inverse, multiplier) = (1.0 / scale, scale * factor);
        for block in group.iter_mut().skip(r).step_by(rows) {
            for x in block {
                *x = to_e4m3(*x * inverse) * multiplier;
            }
        }
    }
}

/// The larger value; NaN is ignored.
#[inline(always)]
fn larger(largest: f32, x: f32) -> f32 {
    if x > largest { x } else { largest }
}

/// The nearest bf16, ties to even.
#[inline(always)]
fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { bits } else { rounded })
}

/// The nearest e4m3 value, ties to even; values beyond the largest become the largest, NaN stays NaN.
#[inline(always)]
fn to_e4m3(x: f32) -> f32 {
    // Values from 2^-6 on have three bits after the leading one; below, values are multiples of 2^-9.
    let exponent = (x.to_bits() >> 23 & 0xff).max(127 - 6);
    // In the sum the last bit of f32 has the weight of the last bit that e4m3 keeps.
    let shift = f32::from_bits((exponent + 20) << 23 | 0x0040_0000);
    ((x + shift) - shift).clamp(-LARGEST, LARGEST)
}

#[cfg(test)]
mod tests;
