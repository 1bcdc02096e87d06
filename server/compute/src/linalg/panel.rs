//! Products of packed rows with one panel of packed weights.
#![allow(unsafe_code, reason = "calls kernels, which take pointers")]

use std::mem::MaybeUninit;

use super::fixed::PackedRows;
use super::groups::GroupLayout;
use super::kernels::{Kernel, KernelArgs, fixed_kernel, kernel, widen};
use super::packed::{K_BLOCK, MAX_PANEL, PackedMatrix};
use super::tiles::{Tiling, padded};
use expertd_model::WeightFormat;

/// Largest number of blocks of input features per pass over the tiles, so that this part of a panel stays in the L2
/// cache.
const MAX_BLOCKS: usize = 64;

/// Distance between the weights that are multiplied and the weights that are prefetched, in bytes.
const AHEAD: usize = 4096;

/// Number of blocks that are widened at a time for several tiles: 32 KiB at the most.
const WIDE_BLOCKS: usize = 8;

/// Largest number of rows whose sums the FP8 kernel keeps in registers with AVX-512, measured.
const CROWDED_ROWS: usize = 10;

/// Pairs of input features per block.
const PAIRS: usize = K_BLOCK / 2;

/// Adds to `acc`, `[rows, P]`, the products of the rows with one panel of `matrix`.
///
/// Each sum runs over the input features in ascending order, in parts of up to 2048 that are then added; its bits
/// depend neither on threads nor on other panels. `next`, the weights that this thread reads after the panel (empty if there are
/// none), is prefetched into the cache meanwhile: all of it if there are several tiles, otherwise its beginning.
///
/// # Panics
/// If `x`, its scales or `acc` have another length than the rows need.
pub(crate) fn multiply(
    matrix: &PackedMatrix,
    panel: usize,
    rows: PackedRows<'_>,
    acc: &mut [f32],
    next: &[u8],
) {
    // Several tiles share the work of widening weights that have scales. One tile of the most rows leaves its FP8 kernel
    // too few registers, so that widening first is faster there, too.
    let crowded = matrix.format == WeightFormat::Fp8E4m3 && rows.rows > CROWDED_ROWS;
    let shared = rows.rows > matrix.level.max_tile_rows();
    match widen(matrix.level, matrix.format, matrix.has_zeros()).filter(|_| shared || crowded) {
        Some(widen) => multiply_widened(matrix, panel, rows, acc, next, widen),
        None => add_products(matrix, panel, rows, acc, next, None),
    }
}

/// Multiplies with weights that `widen` writes to the stack. It is a function of its own, because each call of one with such a frame
/// touches all pages of the frame.
#[inline(never)]
fn multiply_widened(
    matrix: &PackedMatrix,
    panel: usize,
    rows: PackedRows<'_>,
    acc: &mut [f32],
    next: &[u8],
    widen: Kernel,
) {
    // The buffer stays uninitialised: filling it with zeros takes a tenth of the time of a panel of 4-bit weights.
    let mut wide = MaybeUninit::<[f32; WIDE_BLOCKS * K_BLOCK * MAX_PANEL]>::uninit();
    add_products(matrix, panel, rows, acc, next, Some((widen, wide.as_mut_ptr().cast())));
}

/// See [`multiply`]. `wide` is the kernel that widens weights, and memory for `WIDE_BLOCKS` blocks of f32; `None` if the other kernels
/// read the weights as they are.
#[inline(always)]
fn add_products(
    matrix: &PackedMatrix,
    panel: usize,
    PackedRows { rows, x, scales: x_scales }: PackedRows<'_>,
    acc: &mut [f32],
    next: &[u8],
    wide: Option<(Kernel, *mut f32)>,
) {
    let width = matrix.level.panel_width();
    let k = padded(matrix.k());
    assert!(
        matrix.level.is_supported(),
        "the weights are packed for {}, which this CPU does not support",
        matrix.level
    );
    assert_eq!(x.len(), rows * k);
    assert_eq!(acc.len(), rows * width);
    assert!(x_scales.is_empty() || x_scales.len() == rows * matrix.blocks());
    let tiling = Tiling::new(matrix.level, rows);
    let blocks = matrix.blocks();
    let part = blocks.div_ceil(blocks.div_ceil(MAX_BLOCKS));
    let weights = matrix.panel_data(panel);
    let scales = &matrix.scales[..];
    let (mut prefetch, prefetch_step, next_from) = match tiling.tiles() {
        // The panel is read once and streams from memory: prefetch a fixed distance ahead. Near the panel's end that is the start of
        // `next`.
        0 | 1 => {
            let ahead = AHEAD.div_ceil(matrix.block_bytes());
            let next_from = if next.is_empty() { blocks } else { blocks.saturating_sub(ahead) };
            let first = weights.as_ptr().wrapping_add(ahead * matrix.block_bytes());
            (first, matrix.block_bytes() / PAIRS, next_from)
        }
        // Only the first tile reads the panel from memory, the others from the cache: prefetch the next panel.
        tiles => (next.as_ptr(), next.len().div_ceil(tiles * blocks * PAIRS), blocks),
    };
    let zeros = matrix.has_zeros();
    let fixed = fixed_kernel(matrix.level, matrix.format, matrix.groups).filter(|_| !x_scales.is_empty());
    assert!(fixed.is_some() || x_scales.is_empty(), "the matrix takes no fixed-point rows");
    let part = if wide.is_some() { part.min(WIDE_BLOCKS) } else { part };
    for first in (0..blocks).step_by(part) {
        let blocks = part.min(blocks - first);
        let scale_vector = panel * matrix.scale_vectors() + first / matrix.scale_blocks;
        let weights = &weights[first * matrix.block_bytes()..][..blocks * matrix.block_bytes()];
        let mut arguments = KernelArgs {
            weights: weights.as_ptr(),
            scales: scales.get(scale_vector * width..).unwrap_or_default().as_ptr(),
            scale_left: matrix.scale_blocks - first % matrix.scale_blocks,
            scale_blocks: matrix.scale_blocks,
            groups: matrix.groups.unwrap_or(GroupLayout::MX),
            x: x.as_ptr(),
            x_scales: x_scales.get(first * rows..).unwrap_or_default().as_ptr(),
            blocks,
            acc: wide.map_or(std::ptr::null_mut(), |(_, wide)| wide),
            prefetch,
            prefetch_step,
            next_from: next_from.checked_sub(first).unwrap_or(usize::MAX),
            prefetch_next: next.as_ptr(),
        };
        let mut format = matrix.format;
        if let Some((widen, wide)) = wide {
            // SAFETY: the level is supported; weights and scales have the lengths that `KernelArgs` asks for (see below), and
            // `wide` has room for `WIDE_BLOCKS` blocks of f32, of which a part has no more. `widen` writes all elements of
            // these blocks, and the kernel reads no others.
            unsafe { widen(&arguments) };
            arguments.weights = wide.cast();
            format = WeightFormat::F32;
        }
        for tile in tiling.iter() {
            let x = &x[tile.start * k + first * tile.rows * K_BLOCK..][..blocks * tile.rows * K_BLOCK];
            let acc = &mut acc[tile.start * width..][..tile.rows * width];
            arguments = KernelArgs { x: x.as_ptr(), acc: acc.as_mut_ptr(), prefetch, ..arguments };
            let kernel = match fixed {
                Some(fixed) => fixed.multiply[rows - 1],
                None => kernel(matrix.level, format, zeros, tile.rows),
            };
            // SAFETY: the level is supported; weights, x, its scales and acc have the lengths that `KernelArgs` asks for; a
            // matrix that needs scales has `scale_vectors` vectors per panel, which cover its blocks.
            unsafe { kernel(&arguments) };
            prefetch = match next_from.checked_sub(first).filter(|from| *from < blocks) {
                Some(from) => next.as_ptr().wrapping_add((blocks - from) * matrix.block_bytes()),
                None => prefetch.wrapping_add(blocks * PAIRS * prefetch_step),
            };
        }
    }
}
