//! Kernels for AVX-512: panels of 32 outputs (two vectors) and tiles of up to 12 rows, whose 24 sums stay in registers.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

mod fixed;

use std::arch::x86_64::*;

use super::vector::vector_kernels;
pub(super) use fixed::kernel as fixed_kernel;

use super::{FixedKernel, Kernel, KernelArgs};
use crate::linalg::groups::{GroupLayout, OCTET, PackedScale};
use crate::linalg::packed::{FP8_BIAS, K_BLOCK};
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
    subtract: _mm512_sub_ps,
    multiply: _mm512_mul_ps,
    multiply_add: _mm512_fmadd_ps,
    sums: [1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 12: 1],
}

impl Format for F16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize) -> Wide {
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
    unsafe fn widen(block: *const u8, i: usize) -> Wide {
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

/// Widens 16 bf16 values.
///
/// # Safety
/// Requires the CPU features; 32 bytes are read.
#[inline(always)]
unsafe fn bf16(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees the extent.
    unsafe {
        let upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(upper))
    }
}

/// Widens 16 f16 values.
///
/// # Safety
/// Requires the CPU features; 32 bytes are read.
#[inline(always)]
unsafe fn f16(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees the extent.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// Widens 16 integers of 8 bits.
///
/// # Safety
/// Requires the CPU features; 16 bytes are read.
#[inline(always)]
unsafe fn i8(at: *const u8) -> __m512 {
    // SAFETY: the caller guarantees the extent.
    unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast()))) }
}

/// Four pairs of FP8 input features that are read one after the other.
#[derive(Clone, Copy)]
struct Fp8Pairs {
    next: *const u8,
    pairs: __m512i,
}

impl Fp8Pairs {
    /// # Safety
    /// `elements` points to the FP8 elements of a block, and `octet < K_BLOCK / OCTET`.
    #[inline(always)]
    unsafe fn load(elements: *const u8, octet: usize) -> Self {
        // SAFETY: the caller guarantees the extent; `next` loads the pairs before they are used.
        unsafe { Fp8Pairs { next: elements.add(octet * OCTET * P), pairs: _mm512_setzero_si512() } }
    }

    /// The next input feature, times 2^-8.
    ///
    /// # Safety
    /// Requires the CPU features. Called at most eight times after a `load`, for an even input feature first.
    #[inline(always)]
    unsafe fn next(&mut self, odd: bool) -> Wide {
        // SAFETY: a block has 64 bytes per two input features; a 16-bit lane holds the even one in its low byte.
        //
        // An e4m3 code whose exponent and mantissa start at bit 13 reads as an f16 that is too small by 2^8; the scales
        // include that factor. The arithmetic shift copies the sign into bit 14, where it is masked out.
        unsafe {
            if !odd {
                self.pairs = _mm512_loadu_si512(self.next.cast());
                self.next = self.next.add(2 * P);
            }
            let high = if odd { self.pairs } else { _mm512_slli_epi16::<8>(self.pairs) };
            let half =
                _mm512_and_si512(_mm512_srai_epi16::<1>(high), _mm512_set1_epi16(0xbf80_u16.cast_signed()));
            let low = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
            let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(half));
            [low, high]
        }
    }
}

/// Two vectors of words, each with eight 4-bit elements: the next element to decode is in the highest bits.
type Words = [__m512i; 2];

/// # Safety
/// Requires the CPU features. `elements` points to the 4-bit elements of a block, and `octet < K_BLOCK / OCTET`.
#[inline(always)]
unsafe fn load_words(elements: *const u8, octet: usize) -> Words {
    // SAFETY: P words per eight input features.
    unsafe {
        let at = elements.add(octet * P * 4);
        [_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())]
    }
}

/// The values of the highest nibbles, which are rotated out.
///
/// # Safety
/// Requires the CPU features.
#[inline(always)]
unsafe fn next_nibbles(words: &mut Words, table: __m512) -> Wide {
    // SAFETY: register operations. The permutation uses the low four bits of its indices.
    unsafe {
        *words = [_mm512_rol_epi32::<4>(words[0]), _mm512_rol_epi32::<4>(words[1])];
        [_mm512_permutexvar_ps(words[0], table), _mm512_permutexvar_ps(words[1], table)]
    }
}

impl Scaled for Fp4 {
    const ELEMENTS: usize = K_BLOCK / 2 * P;
    type Elements = Words;

    #[inline(always)]
    unsafe fn load(elements: *const u8, octet: usize) -> Words {
        // SAFETY: the caller guarantees the extent.
        unsafe { load_words(elements, octet) }
    }

    #[inline(always)]
    unsafe fn next(words: &mut Words, _: usize) -> Wide {
        // SAFETY: the caller guarantees the features.
        unsafe {
            let [a, b, c, d, e, f, g, h] = FP4;
            let table = _mm512_setr_ps(a, b, c, d, e, f, g, h, -a, -b, -c, -d, -e, -f, -g, -h);
            next_nibbles(words, table)
        }
    }
}

impl Scaled for Int4 {
    const ELEMENTS: usize = K_BLOCK / 2 * P;
    type Elements = Words;

    #[inline(always)]
    unsafe fn load(elements: *const u8, octet: usize) -> Words {
        // SAFETY: the caller guarantees the extent.
        unsafe { load_words(elements, octet) }
    }

    #[inline(always)]
    unsafe fn next(words: &mut Words, _: usize) -> Wide {
        // SAFETY: the caller guarantees the features.
        unsafe {
            let table = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0,
            );
            next_nibbles(words, table)
        }
    }
}
