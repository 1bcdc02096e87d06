//! Kernels for AVX2 with FMA and F16C: panels of 16 outputs (two vectors) and tiles of up to 6 rows, whose 12 sums stay
//! in registers.
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

vector_kernels! {
    level: SimdLevel::Avx2,
    features: "avx2,fma,f16c",
    vector: __m256,
    zero: _mm256_setzero_ps,
    splat: _mm256_set1_ps,
    load: _mm256_loadu_ps,
    store: _mm256_storeu_ps,
    add: _mm256_add_ps,
    subtract: _mm256_sub_ps,
    multiply: _mm256_mul_ps,
    multiply_add: _mm256_fmadd_ps,
    sums: [1: 2, 2: 2, 3: 1, 4: 1, 5: 1, 6: 1],
}

impl Format for F16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    unsafe fn widen(block: *const u8, i: usize) -> Wide {
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
    unsafe fn widen(block: *const u8, i: usize) -> Wide {
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

/// Widens 8 bf16 values.
///
/// # Safety
/// Requires the CPU features; 16 bytes are read.
#[inline(always)]
unsafe fn bf16(at: *const u8) -> __m256 {
    // SAFETY: the caller guarantees the extent.
    unsafe {
        let upper = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(upper))
    }
}

/// Widens 8 f16 values.
///
/// # Safety
/// Requires the CPU features; 16 bytes are read.
#[inline(always)]
unsafe fn f16(at: *const u8) -> __m256 {
    // SAFETY: the caller guarantees the extent.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// Widens 8 integers of 8 bits.
///
/// # Safety
/// Requires the CPU features; 8 bytes are read.
#[inline(always)]
unsafe fn i8(at: *const u8) -> __m256 {
    // SAFETY: the caller guarantees the extent.
    unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()))) }
}

/// Four pairs of FP8 input features that are read one after the other.
#[derive(Clone, Copy)]
struct Fp8Pairs {
    next: *const u8,
    pairs: __m256i,
}

impl Fp8Pairs {
    /// # Safety
    /// `elements` points to the FP8 elements of a block, and `octet < K_BLOCK / OCTET`.
    #[inline(always)]
    unsafe fn load(elements: *const u8, octet: usize) -> Self {
        // SAFETY: the caller guarantees the extent; `next` loads the pairs before they are used.
        unsafe { Fp8Pairs { next: elements.add(octet * OCTET * P), pairs: _mm256_setzero_si256() } }
    }

    /// The next input feature, times 2^-8.
    ///
    /// # Safety
    /// Requires the CPU features. Called at most eight times after a `load`, for an even input feature first.
    #[inline(always)]
    unsafe fn next(&mut self, odd: bool) -> Wide {
        // SAFETY: a block has 32 bytes per two input features; a 16-bit lane holds the even one in its low byte.
        //
        // An e4m3 code whose exponent and mantissa start at bit 13 reads as an f16 that is too small by 2^8; the scales
        // include that factor. The arithmetic shift copies the sign into bit 14, where it is masked out.
        unsafe {
            if !odd {
                self.pairs = _mm256_loadu_si256(self.next.cast());
                self.next = self.next.add(2 * P);
            }
            let high = if odd { self.pairs } else { _mm256_slli_epi16::<8>(self.pairs) };
            let half =
                _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbf80_u16.cast_signed()));
            let low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
            let high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(half));
            [low, high]
        }
    }
}

/// Two vectors of words, each with eight 4-bit elements: the next element to decode is in the highest bits.
type Words = [__m256i; 2];

/// # Safety
/// Requires the CPU features. `elements` points to the 4-bit elements of a block, and `octet < K_BLOCK / OCTET`.
#[inline(always)]
unsafe fn load_words(elements: *const u8, octet: usize) -> Words {
    // SAFETY: P words per eight input features.
    unsafe {
        let at = elements.add(octet * P * 4).cast::<__m256i>();
        [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))]
    }
}

/// The highest `BITS` bits of each word as a signed integer; they are shifted out.
///
/// # Safety
/// Requires the CPU features.
#[inline(always)]
unsafe fn next_integers<const BITS: i32, const REST: i32>(words: &mut Words) -> Wide {
    // SAFETY: register operations.
    unsafe {
        let values = words.map(|word| _mm256_cvtepi32_ps(_mm256_srai_epi32::<REST>(word)));
        *words = words.map(|word| _mm256_slli_epi32::<BITS>(word));
        values
    }
}

/// Twice the values of the FP4 codes in the low halves of bytes.
///
/// # Safety
/// Requires the CPU features.
#[inline(always)]
unsafe fn fp4_values(codes: __m256i) -> __m256i {
    // SAFETY: register operations.
    unsafe {
        let table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        let codes = _mm256_and_si256(codes, _mm256_set1_epi8(15));
        _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes)
    }
}

/// Eight FP4 input features as integers of 8 bits, twice their values: the even ones and the odd ones.
#[derive(Clone, Copy)]
struct Fp4Words {
    even: Words,
    odd: Words,
}

impl Scaled for Fp4 {
    const ELEMENTS: usize = K_BLOCK / 2 * P;
    type Elements = Fp4Words;

    #[inline(always)]
    unsafe fn scale(args: &KernelArgs, block: *const u8, scales: *const f32, group: usize) -> Wide {
        // SAFETY: the caller guarantees the extents.
        unsafe {
            let half = _mm256_set1_ps(0.5);
            scale_in_block(args.groups, block, scales, group).map(|scale| _mm256_mul_ps(scale, half))
        }
    }

    #[inline(always)]
    unsafe fn load(elements: *const u8, octet: usize) -> Fp4Words {
        // SAFETY: the caller guarantees the extent.
        unsafe {
            let words = load_words(elements, octet);
            Fp4Words {
                even: words.map(|word| fp4_values(_mm256_srli_epi32::<4>(word))),
                odd: words.map(|word| fp4_values(word)),
            }
        }
    }

    #[inline(always)]
    unsafe fn next(words: &mut Fp4Words, i: usize) -> Wide {
        // SAFETY: the caller guarantees the features.
        unsafe { next_integers::<8, 24>(if i % 2 == 1 { &mut words.odd } else { &mut words.even }) }
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
        unsafe { next_integers::<4, 28>(words) }
    }
}
