//! Kernels in plain Rust that the compiler vectorises.
#![allow(
    unsafe_code,
    reason = "kernels share one signature, of pointers; this file turns them into slices at once"
)]

use std::slice::{from_raw_parts, from_raw_parts_mut};

use super::{Kernel, KernelArgs};
use crate::linalg::groups::{GroupLayout, OCTET, PackedScale};
use crate::linalg::packed::{FP8_BIAS, K_BLOCK};
use crate::linalg::simd_level::SimdLevel;
use expertd_model::WeightFormat;
use expertd_model::decode::{fp4_e2m1, fp8_e4m3};

const P: usize = SimdLevel::Portable.panel_width();
const ROWS: usize = SimdLevel::Portable.max_tile_rows();

pub(super) fn kernels(format: WeightFormat) -> &'static [Kernel; ROWS] {
    match format {
        WeightFormat::F32 => const { &kernels_of::<F32>() },
        WeightFormat::F16 => const { &kernels_of::<F16>() },
        WeightFormat::Bf16 => const { &kernels_of::<Bf16>() },
        WeightFormat::Fp8E4m3 => const { &kernels_of::<Fp8>() },
        WeightFormat::Mxfp8 => const { &kernels_of::<Mxfp8>() },
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => const { &kernels_of::<Fp4>() },
        WeightFormat::Int4 => const { &kernels_of::<Int4>() },
    }
}

pub(super) fn widen(format: WeightFormat) -> Option<Kernel> {
    match format {
        WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16 => None,
        WeightFormat::Fp8E4m3 => Some(widen_blocks::<Fp8>),
        WeightFormat::Mxfp8 => Some(widen_blocks::<Mxfp8>),
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => Some(widen_blocks::<Fp4>),
        WeightFormat::Int4 => Some(widen_blocks::<Int4>),
    }
}

const fn kernels_of<F: Format>() -> [Kernel; ROWS] {
    [tile::<F, 1>, tile::<F, 2>, tile::<F, 3>, tile::<F, 4>]
}

/// Where the scales of a format lie.
#[derive(PartialEq, Eq)]
enum ScalePlace {
    /// The elements are the values.
    None,
    /// In an array of their own, with one vector for one or several blocks.
    Apart,
    /// At the start of each block.
    InBlock,
}

trait Format {
    /// Bytes of the elements of a block.
    const ELEMENTS: usize;
    const SCALES: ScalePlace;

    /// Widens the `P` elements of input feature `i` of a block, without their scales.
    fn widen(elements: &[u8], i: usize) -> [f32; P];
}

struct F32;
struct F16;
struct Bf16;
struct Fp8;
struct Mxfp8;
struct Fp4;
struct Int4;

impl Format for F32 {
    const ELEMENTS: usize = 4 * K_BLOCK * P;
    const SCALES: ScalePlace = ScalePlace::None;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        let elements = elements[i * P * 4..][..P * 4].as_chunks::<4>().0;
        std::array::from_fn(|c| f32::from_le_bytes(elements[c]))
    }
}

impl Format for F16 {
    const ELEMENTS: usize = 2 * K_BLOCK * P;
    const SCALES: ScalePlace = ScalePlace::None;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        let elements = elements[i * P * 2..][..P * 2].as_chunks::<2>().0;
        std::array::from_fn(|c| half::f16::from_le_bytes(elements[c]).to_f32())
    }
}

impl Format for Bf16 {
    const ELEMENTS: usize = 2 * K_BLOCK * P;
    const SCALES: ScalePlace = ScalePlace::None;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        let pairs = elements[i / 2 * P * 4..][..P * 4].as_chunks::<4>().0;
        let shift = if i.is_multiple_of(2) { 16 } else { 0 };
        std::array::from_fn(|c| f32::from_bits(u32::from_le_bytes(pairs[c]) << shift & 0xffff_0000))
    }
}

impl Format for Fp8 {
    const ELEMENTS: usize = K_BLOCK * P;
    const SCALES: ScalePlace = ScalePlace::Apart;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        let pairs = elements[i / 2 * P * 2..][..P * 2].as_chunks::<2>().0;
        // The scales include the factor 2^8 that the vector kernels need.
        std::array::from_fn(|c| fp8_e4m3(pairs[c][i % 2]) * (1.0 / FP8_BIAS))
    }
}

impl Format for Mxfp8 {
    const ELEMENTS: usize = K_BLOCK * P;
    const SCALES: ScalePlace = ScalePlace::InBlock;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        let pairs = elements[i / 2 * P * 2..][..P * 2].as_chunks::<2>().0;
        std::array::from_fn(|c| fp8_e4m3(pairs[c][i % 2]))
    }
}

impl Format for Fp4 {
    const ELEMENTS: usize = K_BLOCK / 2 * P;
    const SCALES: ScalePlace = ScalePlace::InBlock;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        nibbles(elements, i).map(|word| fp4_e2m1((word >> 28) as u8))
    }
}

impl Format for Int4 {
    const ELEMENTS: usize = K_BLOCK / 2 * P;
    const SCALES: ScalePlace = ScalePlace::InBlock;

    #[inline(always)]
    fn widen(elements: &[u8], i: usize) -> [f32; P] {
        nibbles(elements, i).map(|word| (word.cast_signed() >> 28) as f32)
    }
}

/// The words of input feature `i`, shifted so that its elements are the highest nibbles.
#[inline(always)]
fn nibbles(elements: &[u8], i: usize) -> [u32; P] {
    let words = elements[i / OCTET * P * 4..][..P * 4].as_chunks::<4>().0;
    std::array::from_fn(|c| u32::from_le_bytes(words[c]) << (i % OCTET * 4))
}

/// The scales and the zero points of a group.
fn group_header(
    layout: GroupLayout,
    header: &[u8],
    factors: impl Fn() -> [f32; P],
    group: usize,
) -> [[f32; P]; 2] {
    let bytes = &header[group * layout.group_bytes(P)..][..layout.group_bytes(P)];
    let (halves, words) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
    let scales = match layout.scale {
        PackedScale::Bf16 => std::array::from_fn(|c| half::bf16::from_le_bytes(halves[c]).to_f32()),
        PackedScale::F16 => {
            let factors = factors();
            std::array::from_fn(|c| half::f16::from_le_bytes(halves[c]).to_f32() * factors[c])
        }
        PackedScale::F32 => std::array::from_fn(|c| f32::from_le_bytes(words[c])),
    };
    let zeros = &bytes[bytes.len() - P..];
    [scales, std::array::from_fn(|c| if layout.zeros { f32::from(zeros[c].cast_signed()) } else { 0.0 })]
}

/// Writes the weights of the blocks, scaled, to `acc` as f32 blocks.
///
/// # Safety
/// See [`Kernel`]; `acc` is `[blocks, 32, P]`, and `x` is not read.
unsafe fn widen_blocks<F: Format>(args: &KernelArgs) {
    let in_block = F::SCALES == ScalePlace::InBlock;
    let (header, groups) =
        if in_block { (args.groups.header_bytes(P), args.groups.per_block) } else { (0, 1) };
    let size = header + F::ELEMENTS;
    // SAFETY: the caller guarantees the extents, which do not overlap.
    let (weights, out) = unsafe {
        (
            from_raw_parts(args.weights, args.blocks * size),
            from_raw_parts_mut(args.acc, args.blocks * K_BLOCK * P),
        )
    };
    let (out, _) = out.as_chunks_mut::<P>();
    for (b, (block, out)) in weights.chunks_exact(size).zip(out.chunks_exact_mut(K_BLOCK)).enumerate() {
        let apart = || {
            let vector = (b + args.scale_blocks - args.scale_left) / args.scale_blocks;
            // SAFETY: the caller guarantees a vector of scales or factors for each block of formats that have them.
            unsafe { *args.scales.add(vector * P).cast::<[f32; P]>() }
        };
        let (header, elements) = block.split_at(header);
        for (group, out) in out.chunks_exact_mut(K_BLOCK / groups).enumerate() {
            let [scales, zeros] = match F::SCALES {
                ScalePlace::None => [[1.0; P], [0.0; P]],
                ScalePlace::Apart => [apart(), [0.0; P]],
                ScalePlace::InBlock => group_header(args.groups, header, apart, group),
            };
            for (i, out) in out.iter_mut().enumerate() {
                let weights = F::widen(elements, group * K_BLOCK / groups + i);
                *out = std::array::from_fn(|c| (weights[c] - zeros[c]) * scales[c]);
            }
        }
    }
}

/// # Safety
/// See [`Kernel`].
unsafe fn tile<F: Format, const R: usize>(args: &KernelArgs) {
    let in_block = F::SCALES == ScalePlace::InBlock;
    let (header, groups) =
        if in_block { (args.groups.header_bytes(P), args.groups.per_block) } else { (0, 1) };
    let size = header + F::ELEMENTS;
    // SAFETY: the caller guarantees the extents; weights, rows and sums do not overlap.
    let (weights, x, sums) = unsafe {
        (
            from_raw_parts(args.weights, args.blocks * size),
            from_raw_parts(args.x, args.blocks * R * K_BLOCK),
            from_raw_parts_mut(args.acc, R * P),
        )
    };
    let (sums, _) = sums.as_chunks_mut::<P>();
    let mut total = [[0.0_f32; P]; R];
    for (b, (block, x)) in weights.chunks_exact(size).zip(x.chunks_exact(R * K_BLOCK)).enumerate() {
        let apart = || {
            let vector = (b + args.scale_blocks - args.scale_left) / args.scale_blocks;
            // SAFETY: the caller guarantees a vector of scales or factors for each block of formats that have them.
            unsafe { *args.scales.add(vector * P).cast::<[f32; P]>() }
        };
        let (header, elements) = block.split_at(header);
        for group in 0..groups {
            let [scales, zeros] = match F::SCALES {
                ScalePlace::None => [[1.0; P], [0.0; P]],
                ScalePlace::Apart => [apart(), [0.0; P]],
                ScalePlace::InBlock => group_header(args.groups, header, apart, group),
            };
            let mut acc = [[0.0_f32; P]; R];
            let acc = if F::SCALES == ScalePlace::None { &mut total } else { &mut acc };
            for i in group * K_BLOCK / groups..(group + 1) * K_BLOCK / groups {
                let mut w = F::widen(elements, i);
                if in_block && args.groups.zeros {
                    w = std::array::from_fn(|c| w[c] - zeros[c]);
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = x[r * K_BLOCK + i];
                    for (acc, w) in acc.iter_mut().zip(w) {
                        *acc += x * w;
                    }
                }
            }
            if F::SCALES == ScalePlace::None {
                continue;
            }
            for (sums, acc) in sums.iter_mut().zip(acc) {
                for ((sum, acc), scale) in sums.iter_mut().zip(acc).zip(scales) {
                    *sum += *acc * scale;
                }
            }
        }
    }
    for (sums, acc) in sums.iter_mut().zip(total) {
        for (sum, acc) in sums.iter_mut().zip(acc) {
            *sum += acc;
        }
    }
}
