//! The innermost loops: products of a register tile of rows with one panel of packed weights.
//!
//! There is one kernel for each level, format and number of rows of a tile. Every kernel adds, for each row `r` and
//! column `c` of the panel, the sum over i of `x[r][i] * weight(c, i)` to `acc[r][c]`, in f32.
//!
//! Where weights have scales, the kernels sum the products of the elements that share one, multiply the sum by the scale, and
//! add it to `acc`. An element less its zero point is converted exactly.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod digits;
mod portable;
#[cfg(target_arch = "x86_64")]
mod vector;

use super::groups::GroupLayout;
use super::packed::K_BLOCK;
use super::simd_level::SimdLevel;
use expertd_model::WeightFormat;

/// Arguments of a kernel. `P` is the level's panel width, `R` the kernel's number of rows.
#[derive(Clone, Copy)]
pub(super) struct KernelArgs {
    /// First block of the panel to read; `blocks` contiguous blocks follow.
    pub(super) weights: *const u8,
    /// FP8: the scales (`P` floats) of the first block; the vectors of later blocks follow. Formats with f16 scales: the
    /// factors.
    pub(super) scales: *const f32,
    /// Number of blocks that the first vector of `scales` covers.
    pub(super) scale_left: usize,
    /// Number of blocks that each later vector of `scales` covers.
    pub(super) scale_blocks: usize,
    /// MXFP4, MXFP8, NVFP4, INT4: the scales within the blocks.
    pub(super) groups: GroupLayout,
    /// Rows: `[blocks, R, 32]`.
    pub(super) x: *const f32,
    /// Fixed-point rows: scales, `[blocks, R]`.
    pub(super) x_scales: *const f32,
    /// Blocks of 32 input features.
    pub(super) blocks: usize,
    /// Sums: `[R, P]`.
    pub(super) acc: *mut f32,
    /// First address to prefetch into the L2 cache; it need not be valid.
    pub(super) prefetch: *const u8,
    /// Prefetch distance per two input features, in bytes, at most the size of their weights. Prefetching in small
    /// steps, and into L2, keeps memory busy without stalling the multiply-adds; one burst per block was 15 % slower.
    pub(super) prefetch_step: usize,
    /// Index of the block at which prefetching continues at `prefetch_next`; at least `blocks` if it does not.
    pub(super) next_from: usize,
    /// First address of the weights that this thread reads after the panel. It is only prefetched and need not be valid.
    pub(super) prefetch_next: *const u8,
}

/// Adds the products of a tile to its sums.
///
/// # Safety
/// The CPU must support the level, and the pointers must cover what [`KernelArgs`] states. No alignment is needed.
pub(super) type Kernel = unsafe fn(&KernelArgs);

/// The kernel for `rows` rows, in `1 ..= level.max_tile_rows()`; `zeros`: whether the matrix has zero points.
pub(super) fn kernel(level: SimdLevel, format: WeightFormat, zeros: bool, rows: usize) -> Kernel {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => avx512::kernels(format, zeros)[rows - 1],
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => avx2::kernels(format, zeros)[rows - 1],
        _ => portable::kernels(format)[rows - 1],
    }
}

/// Kernels for tiles of few rows of fixed-point numbers.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "only x86-64 has such kernels"))]
#[derive(Clone, Copy)]
pub(super) struct FixedKernel {
    /// Converts a block of the row, whose elements are finite, in place, and returns its scale. The CPU must support the level.
    pub(super) convert: unsafe fn(&mut [f32; K_BLOCK]) -> f32,
    /// Multiply converted tiles of one row, of two, and so on.
    pub(super) multiply: &'static [Kernel],
}

/// The kernels for fixed-point rows and scales within blocks; `None` if there are only f32 kernels.
pub(super) fn fixed_kernel(
    level: SimdLevel,
    format: WeightFormat,
    groups: Option<GroupLayout>,
) -> Option<FixedKernel> {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => groups.and_then(|groups| avx512::fixed_kernel(format, groups)),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => groups.and_then(|groups| avx2::fixed_kernel(format, groups)),
        _ => None,
    }
}

/// The kernel that writes the weights of `blocks` blocks, scaled, to `acc` as blocks of f32, `[blocks, 32, P]`; it does not
/// read `x`. `None` if the format has no scales.
pub(super) fn widen(level: SimdLevel, format: WeightFormat, zeros: bool) -> Option<Kernel> {
    match level {
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => avx512::widen(format, zeros),
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => avx2::widen(format, zeros),
        _ => portable::widen(format),
    }
}
