//! AVX-512 kernels that multiply up to [`ROWS`] rows of fixed-point numbers with 4-bit weights, for CPUs with VNNI.
//!
//! The f32 kernels spend two instructions per vector of weights on decoding, and one per row. Here a vector holds four times as many
//! weights: a byte each, which one or two instructions take out of their words. As in the AVX2 kernels, a block of a row is given
//! by three signed digits of 8 bits per element and a power of two, 24 bits in all, and the sums of a group are exact.
//!
//! `vpdpbusd` adds four products of unsigned and signed bytes to a lane of 32 bits. The unsigned ones are weights plus a bias; the sums
//! start at the negative of what that adds.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::{
    FixedKernel, Fp4, Int4, Int4Zeros, Kernel, KernelArgs, LANES, P, Scaled, Wide, Words, load_words,
    scale_in_block, zeros_in_block,
};
use crate::linalg::groups::{GroupLayout, OCTET};
use crate::linalg::kernels::digits::{DIGITS, LOWER_DIGITS, Unit};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;

/// Rows of the largest tile.
const ROWS: usize = 8;

/// Rows whose sums stay in registers.
const PIECE: usize = 4;

/// Octets of a block.
const OCTETS: usize = K_BLOCK / OCTET;

/// Words of a group's first octet that hold the starts of its sums: of the highest digits, and of the rest. The words before each hold
/// the digits of the features 7, 5, 3 and 1, and of 6, 4, 2 and 0.
const START: [usize; 2] = [3, 7];

/// The kernels for the format if this CPU has them.
pub(in crate::linalg::kernels) fn kernel(format: WeightFormat, layout: GroupLayout) -> Option<FixedKernel> {
    if !is_x86_feature_detected!("avx512vnni") {
        return None;
    }
    match format {
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Some(of_groups::<Fp4>(layout)),
        WeightFormat::Int4 if layout.zeros => Some(of_groups::<Int4Zeros>(layout)),
        WeightFormat::Int4 => Some(of_groups::<Int4>(layout)),
        _ => None,
    }
}

fn of_groups<F: Bytes>(layout: GroupLayout) -> FixedKernel {
    let convert = match layout.per_block {
        1 => convert::<F, 1>,
        2 => convert::<F, 2>,
        _ => convert::<F, 4>,
    };
    const { assert!(ROWS <= SimdLevel::Avx512.max_tile_rows(), "fixed-point rows are one tile") };
    FixedKernel { convert, multiply: const { &tiles::<F>() } }
}

const fn tiles<F: Bytes>() -> [Kernel; ROWS] {
    [
        tile::<F, 1>,
        tile::<F, 2>,
        tile::<F, 3>,
        tile::<F, 4>,
        tile::<F, 5>,
        tile::<F, 6>,
        tile::<F, 7>,
        tile::<F, 8>,
    ]
}

/// Converts a block of a row, whose elements are finite, in place, and returns the value of its integers' unit, times
/// [`Bytes::UNIT`].
///
/// # Safety
/// Requires the CPU features.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn convert<F: Bytes, const GROUPS: usize>(block: &mut [f32; K_BLOCK]) -> f32 {
    // SAFETY: the halves and their words lie within the block.
    unsafe {
        let at = block.as_mut_ptr();
        let halves = [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(LANES))];
        let largest = _mm512_max_ps(_mm512_abs_ps(halves[0]), _mm512_abs_ps(halves[1]));
        let largest = _mm512_reduce_max_epi32(_mm512_castps_si512(largest));
        let unit = Unit::of(largest.cast_unsigned());
        let factor = _mm512_set1_ps(unit.inverse());
        let order = _mm512_setr_epi32(7, 5, 3, 1, 6, 4, 2, 0, 15, 13, 11, 9, 14, 12, 10, 8);
        let digits = _mm512_set1_epi32(LOWER_DIGITS);
        let by_digit = _mm_setr_epi8(2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12, -1, -1, -1, -1);
        let by_digit = _mm512_broadcast_i32x4(by_digit);
        let bias = _mm512_set1_epi8(F::BIAS);
        let mut starts = [_mm512_setzero_si512(); 2];
        for (half, (x, start)) in halves.into_iter().zip(&mut starts).enumerate() {
            let x = _mm512_permutexvar_epi32(order, _mm512_cvtps_epi32(_mm512_mul_ps(x, factor)));
            let bytes = _mm512_xor_si512(_mm512_add_epi32(x, digits), digits);
            let bytes = _mm512_shuffle_epi8(bytes, by_digit);
            _mm512_storeu_si512(at.add(half * LANES).cast(), bytes);
            *start = _mm512_dpbusd_epi32(_mm512_setzero_si512(), bias, bytes);
        }
        let quarters = match GROUPS {
            1 => [
                _mm512_castsi512_si256(fold(_mm512_add_epi32(starts[0], starts[1]))),
                _mm256_setzero_si256(),
                _mm256_setzero_si256(),
                _mm256_setzero_si256(),
            ],
            2 => [
                _mm512_castsi512_si256(fold(starts[0])),
                _mm512_castsi512_si256(fold(starts[1])),
                _mm256_setzero_si256(),
                _mm256_setzero_si256(),
            ],
            _ => [
                _mm512_castsi512_si256(starts[0]),
                _mm512_extracti64x4_epi64::<1>(starts[0]),
                _mm512_castsi512_si256(starts[1]),
                _mm512_extracti64x4_epi64::<1>(starts[1]),
            ],
        };
        for (group, quarter) in quarters.into_iter().enumerate().take(GROUPS) {
            let sums = _mm_add_epi32(_mm256_castsi256_si128(quarter), _mm256_extracti128_si256::<1>(quarter));
            let (high, middle, low) =
                (_mm_extract_epi32::<0>(sums), _mm_extract_epi32::<1>(sums), _mm_extract_epi32::<2>(sums));
            let words = at.add(group * K_BLOCK / GROUPS).cast::<i32>();
            *words.add(START[0]) = -high;
            *words.add(START[1]) = -(middle * 256 + low);
        }
        unit.value() * F::UNIT
    }
}

/// Adds the upper half of a vector to its lower half.
///
/// # Safety
/// Requires the CPU features.
#[inline(always)]
unsafe fn fold(words: __m512i) -> __m512i {
    // SAFETY: register operations.
    unsafe { _mm512_add_epi32(words, _mm512_shuffle_i64x2::<0b01_00_11_10>(words, words)) }
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
    unsafe fn bytes(words: __m512i) -> Words;
}

impl Bytes for Int4 {
    const BIAS: i8 = 8;

    #[inline(always)]
    unsafe fn bytes(words: __m512i) -> Words {
        // SAFETY: register operations. The truth table is that of `(a ^ b) & c`.
        unsafe {
            let (flip, low) = (_mm512_set1_epi8(8), _mm512_set1_epi8(15));
            [
                _mm512_ternarylogic_epi32::<0b0010_1000>(words, flip, low),
                _mm512_ternarylogic_epi32::<0b0010_1000>(_mm512_srli_epi16::<4>(words), flip, low),
            ]
        }
    }
}

impl Bytes for Int4Zeros {
    const BIAS: i8 = Int4::BIAS;

    #[inline(always)]
    unsafe fn bytes(words: __m512i) -> Words {
        // SAFETY: the trait function has the contract of the function that is called.
        unsafe { Int4::bytes(words) }
    }
}

impl Bytes for Fp4 {
    // Twice the values, as in the table.
    const BIAS: i8 = 12;
    const UNIT: f32 = 0.5;

    #[inline(always)]
    unsafe fn bytes(words: __m512i) -> Words {
        // SAFETY: register operations.
        unsafe {
            let table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
            let (table, low) = (_mm512_broadcast_i32x4(table), _mm512_set1_epi8(15));
            [
                _mm512_shuffle_epi8(table, _mm512_and_si512(words, low)),
                _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16::<4>(words), low)),
            ]
        }
    }
}

/// Adds the products of a tile of `R` fixed-point rows to its sums, group by group.
///
/// # Safety
/// See [`Kernel`]; `x` holds blocks that `convert` wrote for this format and layout, and `x_scales`, `[blocks, R]`, what it returned.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<F: Bytes, const R: usize>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states.
    unsafe {
        let header = args.groups.header_bytes(P);
        let (mut block, mut prefetch) = (args.weights, args.prefetch);
        let (mut x, mut units) = (args.x.cast::<i32>(), args.x_scales);
        let pieces = R.div_ceil(PIECE);
        for number in 0..args.blocks {
            if number == args.next_from {
                prefetch = args.prefetch_next;
            }
            let mut row = 0;
            for piece in 0..pieces {
                let rows = R / pieces + usize::from(piece < R % pieces);
                let at = Place {
                    block,
                    x: x.add(row * K_BLOCK),
                    units: units.add(row),
                    acc: args.acc.add(row * P),
                };
                match rows {
                    1 => at.add::<F, 1, 2>(args, prefetch),
                    2 => at.add::<F, 2, 1>(args, prefetch),
                    3 => at.add::<F, 3, 1>(args, prefetch),
                    _ => at.add::<F, PIECE, 1>(args, prefetch),
                }
                row += rows;
            }
            prefetch = prefetch.wrapping_add(K_BLOCK / 2 * args.prefetch_step);
            block = block.add(header + F::ELEMENTS);
            x = x.add(R * K_BLOCK);
            units = units.add(R);
        }
    }
}

/// A block of weights, and of some rows of a tile.
#[derive(Clone, Copy)]
struct Place {
    block: *const u8,
    x: *const i32,
    units: *const f32,
    acc: *mut f32,
}

impl Place {
    /// Adds the block's products with `R` rows; `S` is the number of sets of sums.
    ///
    /// Each group's sums are exact: those of a digit are below 2^16, and those of the lower two together below 2^24.
    ///
    /// # Safety
    /// See [`tile`].
    #[inline(always)]
    #[allow(clippy::needless_range_loop, reason = "an index into several arrays")]
    unsafe fn add<F: Bytes, const R: usize, const S: usize>(
        self,
        args: &KernelArgs,
        mut prefetch: *const u8,
    ) {
        // SAFETY: the caller guarantees the CPU features and the extents. A prefetch takes any address.
        unsafe {
            let layout = args.groups;
            let octets = OCTETS / layout.per_block;
            let (mut weights, mut x) = (self.block.add(layout.header_bytes(P)), self.x);
            for group in 0..layout.per_block {
                let first = x;
                let mut sums = [[[[_mm512_setzero_si512(); 2]; R]; DIGITS]; S];
                for r in 0..R {
                    sums[0][0][r] = [_mm512_set1_epi32(*first.add(r * K_BLOCK + START[0])); 2];
                    sums[0][2][r] = [_mm512_set1_epi32(*first.add(r * K_BLOCK + START[1])); 2];
                }
                for _ in 0..octets {
                    // Three lines per octet are all of blocks of up to 768 bytes, and most of larger ones.
                    for third in 0..3 {
                        _mm_prefetch::<_MM_HINT_T0>(prefetch.wrapping_add(third * 64).cast());
                    }
                    prefetch = prefetch.wrapping_add(4 * args.prefetch_step);
                    let [left, right] = load_words(weights, 0);
                    let (left, right) = (F::bytes(left), F::bytes(right));
                    for odd in 0..2 {
                        for r in 0..R {
                            for digit in 0..DIGITS {
                                let digits = _mm512_set1_epi32(*x.add(r * K_BLOCK + 4 * odd + digit));
                                let sums = &mut sums[odd % S][digit][r];
                                sums[0] = _mm512_dpbusd_epi32(sums[0], left[odd], digits);
                                sums[1] = _mm512_dpbusd_epi32(sums[1], right[odd], digits);
                            }
                        }
                    }
                    weights = weights.add(F::ELEMENTS / OCTETS);
                    x = x.add(OCTET);
                }
                let scale: Wide = scale_in_block(layout, self.block, args.scales, group);
                let zeros: Wide = if F::ZEROS {
                    zeros_in_block(layout, self.block, group)
                } else {
                    [_mm512_setzero_ps(); 2]
                };
                for r in 0..R {
                    let unit = _mm512_set1_ps(*self.units.add(r));
                    for half in 0..2 {
                        let of = |digit: usize| {
                            if S == 2 {
                                _mm512_add_epi32(sums[0][digit][r][half], sums[S - 1][digit][r][half])
                            } else {
                                sums[0][digit][r][half]
                            }
                        };
                        let low = _mm512_add_epi32(_mm512_slli_epi32::<8>(of(1)), of(2));
                        let (mut high, mut low) = (_mm512_cvtepi32_ps(of(0)), _mm512_cvtepi32_ps(low));
                        if F::ZEROS {
                            // A start is the sum of the row's digits times the negative of the bias.
                            let zeros = _mm512_mul_ps(zeros[half], _mm512_set1_ps(1.0 / f32::from(F::BIAS)));
                            let start = |word: usize| {
                                _mm512_cvtepi32_ps(_mm512_set1_epi32(*first.add(r * K_BLOCK + word)))
                            };
                            high = _mm512_fmadd_ps(zeros, start(START[0]), high);
                            low = _mm512_fmadd_ps(zeros, start(START[1]), low);
                        }
                        let sum = _mm512_fmadd_ps(high, _mm512_set1_ps(65536.0), low);
                        let at = self.acc.add(r * P + half * LANES);
                        let sum = _mm512_fmadd_ps(_mm512_mul_ps(sum, unit), scale[half], _mm512_loadu_ps(at));
                        _mm512_storeu_ps(at, sum);
                    }
                }
            }
        }
    }
}
