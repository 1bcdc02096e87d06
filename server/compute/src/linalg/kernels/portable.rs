//! Kernels in plain Rust that the compiler vectorises.
#![allow(
    unsafe_code,
    reason = "kernels share one signature, of pointers; this file turns them into slices at once"
)]

use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::{Kernel, KernelArgs};
use crate::linalg::packed::K_BLOCK;
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::{fp4_e2m1, fp8_e4m3};

const P: usize = SimdLevel::Portable.panel_width();
const ROWS: usize = SimdLevel::Portable.max_tile_rows();

pub(super) fn kernels(format: WeightFormat) -> &'static [Kernel; ROWS] {
    match format {
        WeightFormat::F32 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4 => {
            &[tile::<F32, 1>, tile::<F32, 2>, tile::<F32, 3>, tile::<F32, 4>]
        }
        WeightFormat::F16 => &[tile::<F16, 1>, tile::<F16, 2>, tile::<F16, 3>, tile::<F16, 4>],
        WeightFormat::Bf16 => &[tile::<Bf16, 1>, tile::<Bf16, 2>, tile::<Bf16, 3>, tile::<Bf16, 4>],
        WeightFormat::Fp8E4m3 => &[tile::<Fp8, 1>, tile::<Fp8, 2>, tile::<Fp8, 3>, tile::<Fp8, 4>],
        WeightFormat::Mxfp4 => &[tile::<Mxfp4, 1>, tile::<Mxfp4, 2>, tile::<Mxfp4, 3>, tile::<Mxfp4, 4>],
    }
}

trait Format {
    const BLOCK: usize;
    /// Whether scales are stored apart from the weights.
    const SCALED: bool = false;

    /// Widens the `P` weights of input feature `i` of a block.
    fn widen(block: &[u8], i: usize, scales: &[f32; P]) -> [f32; P];
}

struct F32;
struct F16;
struct Bf16;
struct Fp8;
struct Mxfp4;

impl Format for F32 {
    const BLOCK: usize = 4 * K_BLOCK * P;

    #[inline(always)]
    fn widen(block: &[u8], i: usize, _: &[f32; P]) -> [f32; P] {
        let elements = block[i * P * 4..][..P * 4].as_chunks::<4>().0;
        std::array::from_fn(|c| f32::from_le_bytes(elements[c]))
    }
}

impl Format for F16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    fn widen(block: &[u8], i: usize, _: &[f32; P]) -> [f32; P] {
        let elements = block[i * P * 2..][..P * 2].as_chunks::<2>().0;
        std::array::from_fn(|c| half::f16::from_le_bytes(elements[c]).to_f32())
    }
}

impl Format for Bf16 {
    const BLOCK: usize = 2 * K_BLOCK * P;

    #[inline(always)]
    fn widen(block: &[u8], i: usize, _: &[f32; P]) -> [f32; P] {
        let pairs = block[i / 2 * P * 4..][..P * 4].as_chunks::<4>().0;
        let shift = if i.is_multiple_of(2) { 16 } else { 0 };
        std::array::from_fn(|c| f32::from_bits(u32::from_le_bytes(pairs[c]) << shift & 0xffff_0000))
    }
}

impl Format for Fp8 {
    const BLOCK: usize = K_BLOCK * P;
    const SCALED: bool = true;

    #[inline(always)]
    fn widen(block: &[u8], i: usize, scales: &[f32; P]) -> [f32; P] {
        let pairs = block[i / 2 * P * 2..][..P * 2].as_chunks::<2>().0;
        // The scales include the factor 2^8 that the vector kernels need.
        std::array::from_fn(|c| fp8_e4m3(pairs[c][i % 2]) * (scales[c] * (1.0 / 256.0)))
    }
}

impl Format for Mxfp4 {
    const BLOCK: usize = 2 * P + K_BLOCK / 2 * P;

    #[inline(always)]
    fn widen(block: &[u8], i: usize, _: &[f32; P]) -> [f32; P] {
        let (exponents, words) = block.split_at(2 * P);
        let exponents = exponents.as_chunks::<2>().0;
        let words = words[i / 8 * P * 4..][..P * 4].as_chunks::<4>().0;
        std::array::from_fn(|c| {
            let code = words[c][i % 8 / 2] >> (i % 2 * 4) & 15;
            fp4_e2m1(code) * half::bf16::from_le_bytes(exponents[c]).to_f32()
        })
    }
}

/// # Safety
/// See [`Kernel`].
unsafe fn tile<F: Format, const R: usize>(args: &KernelArgs) {
    // SAFETY: the caller guarantees the extents; weights, rows and sums do not overlap.
    let (weights, x, sums) = unsafe {
        (
            from_raw_parts(args.weights, args.blocks * F::BLOCK),
            from_raw_parts(args.x, args.blocks * R * K_BLOCK),
            from_raw_parts_mut(args.acc, R * P),
        )
    };
    let mut acc = [[0.0_f32; P]; R];
    let mut scales = [1.0; P];
    for (b, (weights, x)) in weights.chunks_exact(F::BLOCK).zip(x.chunks_exact(R * K_BLOCK)).enumerate() {
        if F::SCALED {
            let vector = (b + args.scale_blocks - args.scale_left) / args.scale_blocks;
            // SAFETY: the caller guarantees a vector of scales for each block.
            scales = unsafe { *args.scales.add(vector * P).cast::<[f32; P]>() };
        }
        for i in 0..K_BLOCK {
            let w = F::widen(weights, i, &scales);
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = x[r * K_BLOCK + i];
                for (acc, w) in acc.iter_mut().zip(w) {
                    *acc += x * w;
                }
            }
        }
    }
    for (sums, acc) in sums.chunks_exact_mut(P).zip(acc) {
        for (sum, acc) in sums.iter_mut().zip(acc) {
            *sum += acc;
        }
    }
}
