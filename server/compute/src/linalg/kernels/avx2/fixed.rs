//! AVX2 kernels that multiply one row of fixed-point numbers with 4-bit weights.
//!
//! For one row, most instructions of the f32 kernels decode weights: each is shifted out of its word and converted. Here a byte
//! holds a weight, so a vector holds four times as many, and nothing is converted before the sums of a group. A block of the row
//! is given by three signed digits of 8 bits per element and a power of two, 24 bits in all; the sums of a group are exact. f32 sums
//! round after each product, to 24 bits.
//!
//! `vpmaddubsw` multiplies unsigned bytes with signed ones. The unsigned ones are weights plus a bias, whose products are
//! subtracted again: the sums of 16 bits start at their negative, or the sums of a group are corrected.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::{
    FixedKernel, Fp4, Int4, Int4Zeros, KernelArgs, LANES, P, Scaled, Wide, Words, load_words, scale_in_block,
};
use crate::linalg::groups::{GroupLayout, OCTET};
use crate::linalg::kernels::digits::{DIGITS, LOWER_DIGITS, Unit};
use crate::linalg::packed::K_BLOCK;
use expertd_model::WeightFormat;

/// Octets of a block.
const OCTETS: usize = K_BLOCK / OCTET;

/// Words of an octet: those of one digit lie at `4 * odd + digit`, where `odd` is 0 for the features 7, 5, 3 and 1 and 1 for 6, 4, 2 and
/// 0. The words between are free for [`START`] or [`SUMS`].
const WORDS: usize = OCTET;

/// Words of a group's first octets that hold the starts of its sums of 16 bits, one word per digit.
const START: [usize; DIGITS] = [3, 7, WORDS + 3];

/// Words of each octet that hold the sums of its elements' highest digits, and of the rest.
const SUMS: [usize; 2] = [3, 7];

pub(in crate::linalg::kernels) fn kernel(format: WeightFormat, layout: GroupLayout) -> Option<FixedKernel> {
    match format {
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Some(of_groups::<Fp4>(layout)),
        WeightFormat::Int4 if layout.zeros => Some(of_groups::<Int4Zeros>(layout)),
        WeightFormat::Int4 => Some(of_groups::<Int4>(layout)),
        _ => None,
    }
}

fn of_groups<F: Bytes>(layout: GroupLayout) -> FixedKernel {
    match layout.per_block {
        1 if !F::ZEROS => FixedKernel { convert: convert::<F, 1>, multiply: const { &[row::<F, true>] } },
        2 if !F::ZEROS => FixedKernel { convert: convert::<F, 2>, multiply: const { &[row::<F, true>] } },
        // With a start, one octet has too few free words.
        _ => FixedKernel { convert: convert::<F, 0>, multiply: const { &[row::<F, false>] } },
    }
}

/// Converts a block of a row, whose elements are finite, in place, and returns the value of its integers' unit, times
/// [`Bytes::UNIT`]. The free words become the starts of `GROUPS` groups, or sums if that is zero.
///
/// # Safety
/// Requires the CPU features.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn convert<F: Bytes, const GROUPS: usize>(block: &mut [f32; K_BLOCK]) -> f32 {
    // SAFETY: the octets and their words lie within the block.
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
        let unit = Unit::of(_mm_cvtsi128_si32(half).cast_unsigned());
        let factor = _mm256_set1_ps(unit.inverse());
        let order = _mm256_setr_epi32(7, 5, 3, 1, 6, 4, 2, 0);
        let digits = _mm256_set1_epi32(LOWER_DIGITS);
        let by_digit = _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1);
        let mut start = _mm_setzero_si128();
        for octet in 0..OCTETS {
            let words = at.add(octet * OCTET).cast::<i32>();
            let x = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(words.cast()), factor));
            let x = _mm256_permutevar8x32_epi32(x, order);
            let bytes = _mm256_xor_si256(_mm256_add_epi32(x, digits), digits);
            let bytes = _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(by_digit));
            _mm256_storeu_si256(words.cast(), bytes);
            if GROUPS == 0 {
                let high = _mm256_srai_epi32::<16>(_mm256_add_epi32(x, _mm256_set1_epi32(0x8080)));
                let low = _mm256_sub_epi32(x, _mm256_slli_epi32::<16>(high));
                for (word, digits) in SUMS.into_iter().zip([high, low]) {
                    *words.add(word) = sum(digits);
                }
                continue;
            }
            let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(F::BIAS), bytes);
            let pairs = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256::<1>(pairs));
            start = _mm_sub_epi16(start, pairs);
            let octets = OCTETS / GROUPS;
            if octet % octets + 1 == octets {
                let first = words.sub((octets - 1) * WORDS);
                *first.add(START[0]) = _mm_extract_epi32::<0>(start);
                *first.add(START[1]) = _mm_extract_epi32::<1>(start);
                *first.add(START[2]) = _mm_extract_epi32::<2>(start);
                start = _mm_setzero_si128();
            }
        }
        unit.value() * F::UNIT
    }
}

/// The sum of the words of a vector.
///
/// # Safety
/// Requires the CPU features.
#[inline(always)]
unsafe fn sum(words: __m256i) -> i32 {
    // SAFETY: register operations.
    unsafe {
        let half = _mm_add_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
        let half = _mm_add_epi32(half, _mm_shuffle_epi32::<0b01_00_11_10>(half));
        _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32::<0b10_11_00_01>(half)))
    }
}

/// The decoding of 4-bit weights into unsigned bytes.
trait Bytes: Scaled {
    /// What is added to each weight.
    const BIAS: i8;
    /// Value of a byte's unit.
    const UNIT: f32 = 1.0;

    /// Features 7, 5, 3 and 1 of a vector of words, and features 6, 4, 2 and 0.
    ///
    /// # Safety
    /// Requires the CPU features.
    unsafe fn bytes(words: __m256i) -> Words;
}

impl Bytes for Int4 {
    const BIAS: i8 = 8;

    #[inline(always)]
    unsafe fn bytes(words: __m256i) -> Words {
        // SAFETY: register operations.
        unsafe {
            let words = _mm256_xor_si256(words, _mm256_set1_epi8(0x88_u8.cast_signed()));
            let low = _mm256_set1_epi8(15);
            [_mm256_and_si256(words, low), _mm256_and_si256(_mm256_srli_epi16::<4>(words), low)]
        }
    }
}

impl Bytes for Int4Zeros {
    const BIAS: i8 = Int4::BIAS;

    #[inline(always)]
    unsafe fn bytes(words: __m256i) -> Words {
        // SAFETY: the trait function has the contract of the function that is called.
        unsafe { Int4::bytes(words) }
    }
}

impl Bytes for Fp4 {
    // Twice the values, as in the table.
    const BIAS: i8 = 12;
    const UNIT: f32 = 0.5;

    #[inline(always)]
    unsafe fn bytes(words: __m256i) -> Words {
        // SAFETY: register operations.
        unsafe {
            let table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
            let table = _mm256_broadcastsi128_si256(table);
            let low = _mm256_set1_epi8(15);
            let odd = _mm256_and_si256(words, low);
            let even = _mm256_and_si256(_mm256_srli_epi16::<4>(words), low);
            [_mm256_shuffle_epi8(table, odd), _mm256_shuffle_epi8(table, even)]
        }
    }
}

/// Adds the products of one fixed-point row to its sums, group by group. `STARTS`: whether the row has [`START`], otherwise [`SUMS`].
///
/// No sum of a group leaves its type. A lane of 16 bits adds up to 16 products of a digit, at least -128, and a weight: up to 8, or
/// 12 in FP4. With a start, sums may wrap around meanwhile; without one, weights with the bias are at most 15 where groups have 16
/// products per lane.
///
/// # Safety
/// See [`Kernel`](super::Kernel); `x` holds blocks that `convert` wrote for this format and layout, and `x_scales` what it returned.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn row<F: Bytes, const STARTS: bool>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states. A prefetch takes any address.
    unsafe {
        let layout = args.groups;
        let octets = OCTETS / layout.per_block;
        let (mut weights, mut x, mut prefetch) = (args.weights, args.x.cast::<i32>(), args.prefetch);
        for number in 0..args.blocks {
            if number == args.next_from {
                prefetch = args.prefetch_next;
            }
            let unit = _mm256_set1_ps(*args.x_scales.add(number));
            let block = weights;
            weights = weights.add(layout.header_bytes(P));
            for group in 0..layout.per_block {
                let mut sums = [[_mm256_setzero_si256(); 2]; DIGITS];
                if STARTS {
                    sums = START.map(|word| [_mm256_set1_epi32(*x.add(word)); 2]);
                }
                let mut biases = [0; 2];
                for _ in 0..octets {
                    // Twice per octet: the lines of the largest block are fetched at least once. Into L1: these kernels wait for it.
                    _mm_prefetch::<_MM_HINT_T0>(prefetch.cast());
                    _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(2 * args.prefetch_step).cast());
                    prefetch = prefetch.wrapping_add(4 * args.prefetch_step);
                    let [first, second] = load_words(weights, 0).map(|words| F::bytes(words));
                    let by_feature = [[first[0], second[0]], [first[1], second[1]]];
                    for (odd, bytes) in by_feature.into_iter().enumerate() {
                        for (digit, sums) in sums.iter_mut().enumerate() {
                            let digits = _mm256_set1_epi32(*x.add(4 * odd + digit));
                            for (sum, bytes) in sums.iter_mut().zip(bytes) {
                                *sum = _mm256_add_epi16(*sum, _mm256_maddubs_epi16(bytes, digits));
                            }
                        }
                    }
                    if !STARTS {
                        biases = [0, 1].map(|part| biases[part] + *x.add(SUMS[part]));
                    }
                    weights = weights.add(F::ELEMENTS / OCTETS);
                    x = x.add(WORDS);
                }
                let scale: Wide = scale_in_block(layout, block, args.scales, group);
                for half in 0..2 {
                    let (one, base) = (_mm256_set1_epi16(1), _mm256_set1_epi16(256));
                    let [high, middle, low] = sums.map(|sums| sums[half]);
                    let mut high = _mm256_madd_epi16(high, one);
                    let mut low =
                        _mm256_add_epi32(_mm256_madd_epi16(middle, base), _mm256_madd_epi16(low, one));
                    if !STARTS {
                        let mut bias = _mm256_set1_epi32(F::BIAS.into());
                        if F::ZEROS {
                            // Stored less 8.
                            let zeros = block.add((group + 1) * layout.group_bytes(P) - P + half * LANES);
                            let zeros = _mm256_cvtepi8_epi32(_mm_loadl_epi64(zeros.cast()));
                            bias = _mm256_add_epi32(bias, zeros);
                        }
                        let biases = biases.map(|sum| _mm256_mullo_epi32(bias, _mm256_set1_epi32(sum)));
                        high = _mm256_sub_epi32(high, biases[0]);
                        low = _mm256_sub_epi32(low, biases[1]);
                    }
                    // Both are exact: below 2^24.
                    let (high, low) = (_mm256_cvtepi32_ps(high), _mm256_cvtepi32_ps(low));
                    let sum = _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0), low);
                    let at = args.acc.add(half * LANES);
                    let sum = _mm256_fmadd_ps(_mm256_mul_ps(sum, unit), scale[half], _mm256_loadu_ps(at));
                    _mm256_storeu_ps(at, sum);
                }
            }
        }
    }
}
