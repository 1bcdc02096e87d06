//! AVX2 kernels that multiply one row of fixed-point numbers with 4-bit weights.
//!
//! For one row, most instructions of the f32 kernels decode weights: each is shifted out of its word and converted. Here 16 bits
//! hold a weight, so a vector holds twice as many, and nothing is converted before the sums of a group. A block of the row is
//! given by two integers of 15 bits per element and a power of two, 29 bits in all; the sums are exact. f32 sums round after
//! each product, to 24 bits.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::{
    FixedKernel, Fp4, Int4, Int4Zeros, Kernel, KernelArgs, LANES, P, Scaled, Wide, Words, fp4_values,
    load_words,
};
use crate::linalg::groups::OCTET;
use crate::linalg::packed::K_BLOCK;
use expertd_model::WeightFormat;

/// Bits of the low integer of an element; the high one has as many.
const DIGIT: i32 = 15;

/// Exponent of the integer of a block's largest element.
const EXPONENT: u32 = 28;

/// Octets of a block.
const OCTETS: usize = K_BLOCK / OCTET;

pub(in crate::linalg::kernels) fn kernel(format: WeightFormat, zeros: bool) -> Option<FixedKernel> {
    let multiply: Kernel = match format {
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => row::<Fp4>,
        WeightFormat::Int4 if zeros => row::<Int4Zeros>,
        WeightFormat::Int4 => row::<Int4>,
        _ => return None,
    };
    Some(FixedKernel { convert, multiply })
}

/// Converts a block of a row, whose elements are finite, in place, and returns the value of its integers' unit.
///
/// Of each octet, the high integers come first, then the low ones. Word `p` of four holds feature `7 - p` in its low
/// half and feature `3 - p` in its high half, as the halves of a word of 4-bit weights do from bit `4 * p` on.
///
/// # Safety
/// Requires the CPU features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn convert(block: &mut [f32; K_BLOCK]) -> f32 {
    // SAFETY: the octets lie within the block.
    unsafe {
        let at = block.as_mut_ptr();
        let bits = _mm256_set1_epi32(0x7fff_ffff);
        let mut largest = _mm256_setzero_si256();
        for octet in 0..OCTETS {
            let x = _mm256_loadu_si256(at.add(octet * OCTET).cast());
            largest = _mm256_max_epi32(largest, _mm256_and_si256(x, bits));
        }
        let half = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256::<1>(largest));
        let half = _mm_max_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
        let half = _mm_max_epi32(half, _mm_shuffle_epi32::<0b10_11_00_01>(half));
        // Elements become integers of up to 2^29. The unit must be a normal number.
        let exponent = (_mm_cvtsi128_si32(half).cast_unsigned() >> 23).max(EXPONENT + 1);
        let factor = _mm256_set1_ps(f32::from_bits((2 * 127 + EXPONENT - exponent) << 23));
        let reverse = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
        for octet in 0..OCTETS {
            let x = _mm256_loadu_ps(at.add(octet * OCTET));
            let x = _mm256_permutevar8x32_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x, factor)), reverse);
            let high = _mm256_srai_epi32::<DIGIT>(_mm256_add_epi32(x, _mm256_set1_epi32(1 << (DIGIT - 1))));
            let low = _mm256_sub_epi32(x, _mm256_slli_epi32::<DIGIT>(high));
            // The low lane has features 7 to 4, the high lane features 3 to 0.
            let pairs = |digits: __m256i| {
                let digits = _mm256_and_si256(digits, _mm256_set1_epi32(0xffff));
                let upper = _mm_slli_epi32::<16>(_mm256_extracti128_si256::<1>(digits));
                _mm_or_si128(_mm256_castsi256_si128(digits), upper)
            };
            _mm_storeu_si128(at.add(octet * OCTET).cast(), pairs(high));
            _mm_storeu_si128(at.add(octet * OCTET + OCTET / 2).cast(), pairs(low));
        }
        f32::from_bits((exponent - EXPONENT) << 23)
    }
}

/// The decoding of 4-bit weights into integers of 16 bits.
trait Pairs: Scaled {
    /// The value of an integer's unit before the group's scale is applied, as a part of what [`Scaled::scale`] returns.
    const UNIT: f32;

    /// Features 7 and 3, 6 and 2, 5 and 1, 4 and 0 of a vector of words.
    ///
    /// # Safety
    /// Requires the CPU features.
    unsafe fn pairs(words: __m256i) -> [__m256i; 4];
}

impl Pairs for Int4 {
    const UNIT: f32 = 1.0;

    #[inline(always)]
    unsafe fn pairs(words: __m256i) -> [__m256i; 4] {
        // SAFETY: register operations.
        unsafe {
            [
                _mm256_srai_epi16::<12>(_mm256_slli_epi16::<12>(words)),
                _mm256_srai_epi16::<12>(_mm256_slli_epi16::<8>(words)),
                _mm256_srai_epi16::<12>(_mm256_slli_epi16::<4>(words)),
                _mm256_srai_epi16::<12>(words),
            ]
        }
    }
}

impl Pairs for Int4Zeros {
    const UNIT: f32 = 1.0;

    #[inline(always)]
    unsafe fn pairs(words: __m256i) -> [__m256i; 4] {
        // SAFETY: the trait function has the contract of the function that is called.
        unsafe { Int4::pairs(words) }
    }
}

impl Pairs for Fp4 {
    // The elements stay in the high bytes.
    const UNIT: f32 = 1.0 / 256.0;

    #[inline(always)]
    unsafe fn pairs(words: __m256i) -> [__m256i; 4] {
        // SAFETY: register operations.
        unsafe {
            let odd = fp4_values(words);
            let even = fp4_values(_mm256_srli_epi32::<4>(words));
            let high = _mm256_set1_epi16(0xff00_u16.cast_signed());
            [
                _mm256_slli_epi16::<8>(odd),
                _mm256_slli_epi16::<8>(even),
                _mm256_and_si256(odd, high),
                _mm256_and_si256(even, high),
            ]
        }
    }
}

/// The zero points of a group, less 8, in both halves of each output's word.
///
/// # Safety
/// Requires the CPU features. `zeros` points to P bytes.
#[inline(always)]
unsafe fn zero_pairs(zeros: *const u8) -> Words {
    // SAFETY: the caller guarantees the extent.
    unsafe {
        [zeros, zeros.add(LANES)].map(|at| {
            let zeros = _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast()));
            _mm256_or_si256(
                _mm256_slli_epi32::<16>(zeros),
                _mm256_and_si256(zeros, _mm256_set1_epi32(0xffff)),
            )
        })
    }
}

/// Adds the products of one fixed-point row to its sums, group by group.
///
/// No sum overflows: 32 elements of up to 2^14 times weights of up to 12 * 2^8.
///
/// # Safety
/// See [`Kernel`]; `x` holds blocks that `convert` wrote, and `x_scales` what it returned.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn row<F: Pairs>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states. A prefetch takes any address.
    unsafe {
        let layout = args.groups;
        let header = layout.header_bytes(P);
        let octets = OCTETS / layout.per_block;
        let (mut block, mut x, mut prefetch) = (args.weights, args.x, args.prefetch);
        let (mut scales, mut scale_left) = (args.scales, args.scale_left);
        for number in 0..args.blocks {
            if number == args.next_from {
                prefetch = args.prefetch_next;
            }
            if scale_left == 0 {
                scales = scales.wrapping_add(P);
                scale_left = args.scale_blocks;
            }
            scale_left -= 1;
            let unit = _mm256_set1_ps(*args.x_scales.add(number) * F::UNIT);
            let elements = block.add(header);
            for group in 0..layout.per_block {
                let zeros = if F::ZEROS {
                    zero_pairs(block.add((group + 1) * layout.group_bytes(P) - P))
                } else {
                    [_mm256_setzero_si256(); 2]
                };
                let mut sums = [[_mm256_setzero_si256(); 2]; 2];
                for octet in group * octets..(group + 1) * octets {
                    // Twice per octet: the lines of the largest block are fetched at least once.
                    _mm_prefetch::<_MM_HINT_T1>(prefetch.cast());
                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(2 * args.prefetch_step).cast());
                    prefetch = prefetch.wrapping_add(4 * args.prefetch_step);
                    let mut weights = load_words(elements, octet).map(|words| F::pairs(words));
                    if F::ZEROS {
                        for (weights, zeros) in weights.iter_mut().zip(zeros) {
                            *weights = weights.map(|pair| _mm256_sub_epi16(pair, zeros));
                        }
                    }
                    let digits = x.add(octet * OCTET).cast::<i32>();
                    for (p, (first, second)) in weights[0].into_iter().zip(weights[1]).enumerate() {
                        let high = _mm256_set1_epi32(*digits.add(p));
                        let low = _mm256_set1_epi32(*digits.add(4 + p));
                        for (sums, weights) in sums.iter_mut().zip([first, second]) {
                            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(weights, high));
                            sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(weights, low));
                        }
                    }
                }
                let scale: Wide = F::scale(args, block, scales, group);
                for half in 0..2 {
                    let [high, low] = sums[half].map(|sum| _mm256_cvtepi32_ps(sum));
                    let sum = _mm256_fmadd_ps(high, _mm256_set1_ps((1 << DIGIT) as f32), low);
                    let at = args.acc.add(half * LANES);
                    let sum = _mm256_fmadd_ps(_mm256_mul_ps(sum, unit), scale[half], _mm256_loadu_ps(at));
                    _mm256_storeu_ps(at, sum);
                }
            }
            block = elements.add(F::ELEMENTS);
            x = x.add(K_BLOCK);
        }
    }
}
