//! Kernels for AVX-512: panels of 32 outputs (two vectors) and tiles of up to 12 rows, whose 24 sums stay in registers.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::vector::vector_kernels;
use super::{Kernel, KernelArgs};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::FP4;

vector_kernels! {
    level: SimdLevel::Avx512,
    features: "avx512f,avx512bw,avx512vl,avx2,fma,f16c",
    vector: __m512,
    zero: _mm512_setzero_ps,
    splat: _mm512_set1_ps,
    load: _mm512_loadu_ps,
    store: _mm512_storeu_ps,
    add: _mm512_add_ps,
    multiply_add: _mm512_fmadd_ps,
    sums: [1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 12: 1],
}

impl Format for F32 {
    const BLOCK: usize = 4 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: 128 bytes per input feature.
        unsafe {
            let at = block.cast::<f32>().add(i * P);
            [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))]
        }
    }
}

impl Format for F16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: 64 bytes per input feature.
        unsafe {
            let at = block.add(i * P * 2).cast::<__m256i>();
            [_mm512_cvtph_ps(_mm256_loadu_si256(at)), _mm512_cvtph_ps(_mm256_loadu_si256(at.add(1)))]
        }
    }
}

impl Format for Bf16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, _: Wide) -> Wide {
        // SAFETY: a block has 128 bytes per two input features; a 32-bit lane holds the even one in its low half.
        unsafe {
            let at = block.add(i / 2 * P * 4).cast::<i32>();
            let pairs = [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(16).cast())];
            if i.is_multiple_of(2) {
                pairs.map(|pair| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair)))
            } else {
                let odd = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                pairs.map(|pair| _mm512_castsi512_ps(_mm512_and_si512(pair, odd)))
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
        unsafe { [_mm512_loadu_ps(scales), _mm512_loadu_ps(scales.add(16))] }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide {
        // SAFETY: a block has 64 bytes per two input features; a 16-bit lane holds the even one in its low byte.
        //
        // An e4m3 code whose exponent and mantissa start at bit 13 reads as an f16 that is too small by 2^8; the scales
        // include that factor. The arithmetic shift copies the sign into bit 14, where it is masked out.
        unsafe {
            let pairs = _mm512_loadu_si512(block.add(i / 2 * P * 2).cast());
            let high = if i.is_multiple_of(2) { _mm512_slli_epi16::<8>(pairs) } else { pairs };
            let half =
                _mm512_and_si512(_mm512_srai_epi16::<1>(high), _mm512_set1_epi16(0xbf80_u16.cast_signed()));
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(half));
            [_mm512_mul_ps(low, scale[0]), _mm512_mul_ps(high, scale[1])]
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
                let upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
            };
            [widen(block), widen(block.add(32))]
        }
    }

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize, scale: Wide) -> Wide {
        // SAFETY: P words per eight input features follow the exponents.
        unsafe {
            let at = block.add(2 * P + i / 8 * P * 4).cast::<i32>();
            let words = [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(16).cast())];
            let [a, b, c, d, e, f, g, h] = FP4;
            let table = _mm512_setr_ps(a, b, c, d, e, f, g, h, -a, -b, -c, -d, -e, -f, -g, -h);
            let shift = _mm_cvtsi32_si128((i % 8 * 4) as i32);
            // The permutation uses the low four bits of its indices.
            let value = |word| _mm512_permutexvar_ps(_mm512_srl_epi32(word, shift), table);
            [_mm512_mul_ps(value(words[0]), scale[0]), _mm512_mul_ps(value(words[1]), scale[1])]
        }
    }
}
