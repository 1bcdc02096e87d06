//! Kernels for AVX-512: panels of 32 outputs (two vectors) and tiles of up to 12 rows, whose 24 sums stay in registers.
#![allow(unsafe_code, reason = "SIMD intrinsics and pointers into packed panels")]

use std::arch::x86_64::*;

use super::{Kernel, KernelArgs};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::FP4;

const P: usize = SimdLevel::Avx512.panel_width();
const ROWS: usize = SimdLevel::Avx512.max_tile_rows();

macro_rules! by_rows {
    ($format:ty) => {
        // A tile of few rows has registers to spare: a second set of sums hides the latency of the multiply-add.
        &[
            tile::<$format, 1, 2>,
            tile::<$format, 2, 2>,
            tile::<$format, 3, 2>,
            tile::<$format, 4, 2>,
            tile::<$format, 5, 2>,
            tile::<$format, 6, 1>,
            tile::<$format, 7, 1>,
            tile::<$format, 8, 1>,
            tile::<$format, 9, 1>,
            tile::<$format, 10, 1>,
            tile::<$format, 11, 1>,
            tile::<$format, 12, 1>,
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

/// The weights of one input feature for the 32 outputs of a panel.
type Wide = [__m512; 2];

/// The decoding of one format. The functions are inlined into `tile`, which enables the CPU features.
trait Format {
    const BLOCK: usize;
    /// Whether scales are stored apart from the weights.
    const SCALED: bool = false;

    /// Loads the scales that hold for a whole block.
    ///
    /// # Safety
    /// Requires AVX-512; `block` points to a block, `scales` to a vector of scales if the format is `SCALED`.
    unsafe fn scale(block: *const u8, scales: *const f32) -> Wide;

    /// Widens the weights of input feature `i`.
    ///
    /// # Safety
    /// Requires AVX-512; `block` points to a block and `i < K_BLOCK`.
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
        unsafe { [_mm512_setzero_ps(); 2] }
    }

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
    unsafe fn scale(_: *const u8, _: *const f32) -> Wide {
        // SAFETY: a register operation.
        unsafe { [_mm512_setzero_ps(); 2] }
    }

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
    unsafe fn scale(_: *const u8, _: *const f32) -> Wide {
        // SAFETY: a register operation.
        unsafe { [_mm512_setzero_ps(); 2] }
    }

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

/// `S` is the number of sets of sums.
///
/// # Safety
/// See [`Kernel`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn tile<F: Format, const R: usize, const S: usize>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the CPU features and the extents that `KernelArgs` states.
    unsafe {
        let mut acc = [[[_mm512_setzero_ps(); 2]; R]; S];
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
                        let x = _mm512_set1_ps(*x.add(r * K_BLOCK + i));
                        acc[0] = _mm512_fmadd_ps(wide[0], x, acc[0]);
                        acc[1] = _mm512_fmadd_ps(wide[1], x, acc[1]);
                    }
                }
            }
            weights = weights.add(F::BLOCK);
            x = x.add(R * K_BLOCK);
        }
        let (low, high) = (acc[0], acc[S - 1]);
        for (r, (low, high)) in low.into_iter().zip(high).enumerate() {
            for (half, (low, high)) in low.into_iter().zip(high).enumerate() {
                let at = args.acc.add(r * P + half * 16);
                let sum = if S == 2 { _mm512_add_ps(low, high) } else { low };
                _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), sum));
            }
        }
    }
}
