//! Kernels for AVX2 with FMA and F16C: panels of 16 outputs (two vectors) and tiles of up to 6 rows, whose 12 sums stay
//! in registers.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::{Kernel, KernelArgs};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::FP4;

const P: usize = SimdLevel::Avx2.panel_width();
const ROWS: usize = SimdLevel::Avx2.max_tile_rows();

macro_rules! by_rows {
    ($format:ty) => {
        // A tile of few rows has registers to spare: a second set of sums hides the latency of the multiply-add.
        &[
            tile::<$format, 1, 2>,
            tile::<$format, 2, 2>,
            tile::<$format, 3, 1>,
            tile::<$format, 4, 1>,
            tile::<$format, 5, 1>,
            tile::<$format, 6, 1>,
        ]
    };
}

pub(super) fn kernels(format: WeightFormat) -> &'static [Kernel; ROWS] {
    match format {
        WeightFormat::F32 => by_rows!(F32),
        WeightFormat::F16 => by_rows!(F16),
        WeightFormat::Bf16 => by_rows!(Bf16),
        WeightFormat::Fp8E4m3 => by_rows!(Fp8),
        WeightFormat::Mxfp4 => by_rows!(Mxfp4),
    }
}

/// The weights of one input feature for the 16 outputs of a panel.
type Wide = [__m256; 2];

/// The decoding of one format. The functions are inlined into `tile`, which enables the CPU features.
trait Format {
    const BLOCK: usize;
    /// Whether scales are stored apart from the weights.
    const SCALED: bool = false;

    /// Loads the scales that hold for a whole block.
    ///
    /// # Safety
    /// Requires AVX2; `block` points to a block, `scales` to a vector of scales if the format is `SCALED`.
    unsafe fn scale(block: *const u8, scales: *const f32) -> Wide;

    /// Widens the weights of input feature `i`.
    ///
    /// # Safety
    /// Requires AVX2 and F16C; `block` points to a block and `i < K_BLOCK`.
    unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide;
}

struct F32;
struct F16;
struct Bf16;
struct Fp8;
struct Mxfp4;

impl Format for F32 {
    const BLOCK: usize = 4 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn scale(_: *const u8, _: *const f32) -> Wide {
        // SAFETY: a register operation.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: 64 bytes per input feature.
        unsafe {
            let at = block.cast::<f32>().add(i * P);
            [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))]
        }
    }
}

impl Format for F16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn scale(_: *const u8, _: *const f32) -> Wide {
        // SAFETY: a register operation.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: 32 bytes per input feature.
        unsafe {
            let at = block.add(i * P * 2).cast::<__m128i>();
            [_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at.add(1)))]
        }
    }
}

impl Format for Bf16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn scale(_: *const u8, _: *const f32) -> Wide {
        // SAFETY: a register operation.
        unsafe { [_mm256_setzero_ps(); 2] }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: a block has 64 bytes per two input features; a 32-bit lane holds the even one in its low half.
        unsafe {
            let at = block.add(i / 2 * P * 4).cast::<__m256i>();
            let pairs = [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))];
            if i.is_multiple_of(2) {
                pairs.map(|pair| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pair)))
            } else {
                let odd = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
                pairs.map(|pair| _mm256_castsi256_ps(_mm256_and_si256(pair, odd)))
            }
        }
    }
}

impl Format for Fp8 {
    const BLOCK: usize = K_BLOCK * P;
    const SCALED: bool = true;

    #[inline(always)]
    unsafe fn scale(_: *const u8, scales: *const f32) -> Wide {
        // SAFETY: scales has P elements.
        unsafe { [_mm256_loadu_ps(scales), _mm256_loadu_ps(scales.add(8))] }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide {
        // SAFETY: a block has 32 bytes per two input features; a 16-bit lane holds the even one in its low byte.
        //
        // An e4m3 code whose exponent and mantissa start at bit 13 reads as an f16 that is too small by 2^8; the scales
        // include that factor. The arithmetic shift copies the sign into bit 14, where it is masked out.
        unsafe {
            let pairs = _mm256_loadu_si256(block.add(i / 2 * P * 2).cast());
            let high = if i.is_multiple_of(2) { _mm256_slli_epi16::<8>(pairs) } else { pairs };
            let half =
                _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbf80_u16.cast_signed()));
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half));
            [_mm256_mul_ps(low, scale[0]), _mm256_mul_ps(high, scale[1])]
        }
    }
}

impl Format for Mxfp4 {
    const BLOCK: usize = 2 * P + K_BLOCK / 2 * P;

    #[inline(always)]
    unsafe fn scale(block: *const u8, _: *const f32) -> Wide {
        // SAFETY: a block starts with P 16-bit exponents.
        unsafe {
            let widen = |at: *const u8| {
                let upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
            };
            [widen(block), widen(block.add(16))]
        }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide {
        // SAFETY: P words per eight input features follow the exponents.
        unsafe {
            let at = block.add(2 * P + i / 8 * P * 4).cast::<__m256i>();
            let words = [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))];
            let [a, b, c, d, e, f, g, h] = FP4;
            let magnitudes = _mm256_setr_ps(a, b, c, d, e, f, g, h);
            let right = _mm_cvtsi32_si128((i % 8 * 4) as i32);
            let left = _mm_cvtsi32_si128((28 - i % 8 * 4) as i32);
            let minus = _mm256_set1_epi32(i32::MIN);
            // The permutation uses the low three bits of its indices; the fourth bit is the sign.
            let value = |word| {
                let magnitude = _mm256_permutevar8x32_ps(magnitudes, _mm256_srl_epi32(word, right));
                let sign = _mm256_and_si256(_mm256_sll_epi32(word, left), minus);
                _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign))
            };
            [_mm256_mul_ps(value(words[0]), scale[0]), _mm256_mul_ps(value(words[1]), scale[1])]
        }
    }
}

/// `S` is the number of sets of sums.
///
/// # Safety
/// See [`Kernel`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Format, const R: usize, const S: usize>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states.
    unsafe {
        let mut acc = [[[_mm256_setzero_ps(); 2]; R]; S];
        let (mut weights, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
        let (mut scales, mut scale_left) = (args.scales, args.scale_left);
        for _ in 0..args.blocks {
            if F::SCALED {
                if scale_left == 0 {
                    scales = scales.add(P);
                    scale_left = args.scale_blocks;
                }
                scale_left -= 1;
            }
            let scale = F::scale(weights, scales);
            for pair in 0..K_BLOCK / 2 {
                for line in 0..F::BLOCK.div_ceil(K_BLOCK / 2 * 64) {
                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(line * 64).cast());
                }
                prefetch = prefetch.wrapping_add(args.prefetch_step);
                for odd in 0..2 {
                    let i = pair * 2 + odd;
                    let wide = F::widen(weights, i, scale);
                    for (r, acc) in acc[odd % S].iter_mut().enumerate() {
                        let x = _mm256_set1_ps(*x.add(r * K_BLOCK + i));
                        acc[0] = _mm256_fmadd_ps(wide[0], x, acc[0]);
                        acc[1] = _mm256_fmadd_ps(wide[1], x, acc[1]);
                    }
                }
            }
            weights = weights.add(F::BLOCK);
            x = x.add(R * K_BLOCK);
        }
        let (low, high) = (acc[0], acc[S - 1]);
        for (r, (low, high)) in low.into_iter().zip(high).enumerate() {
            for (half, (low, high)) in low.into_iter().zip(high).enumerate() {
                let at = args.acc.add(r * P + half * 8);
                let sum = if S == 2 { _mm256_add_ps(low, high) } else { low };
                _mm256_storeu_ps(at, _mm256_add_ps(_mm256_loadu_ps(at), sum));
            }
        }
    }
}
