//! Kernels for AVX2 with FMA and F16C: panels of 16 outputs (two vectors) and tiles of up to 6 rows, whose 12 sums stay
//! in registers.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::vector::vector_kernels;
use super::{Kernel, KernelArgs};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::FP4;

vector_kernels! {
    level: SimdLevel::Avx2,
    features: "avx2,fma,f16c",
    vector: __m256,
    zero: _mm256_setzero_ps,
    splat: _mm256_set1_ps,
    load: _mm256_loadu_ps,
    store: _mm256_storeu_ps,
    add: _mm256_add_ps,
    multiply_add: _mm256_fmadd_ps,
    sums: [1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1],
}

impl Format for F32 {
    const BLOCK: usize = 4 * K_BLOCK * P;

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
