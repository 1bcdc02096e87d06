//! The innermost loops: a register tile of rows times one panel of packed weights.
//!
//! A kernel exists for each level, format and number of rows of a tile. All of them compute, for every row `r` and
//! column `c` of the panel, `acc[r][c] += sum over i of x[r][i] * weight(c, i)` in f32.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::level::Level;
use expertd_model::WeightFormat;

/// What a kernel works on. `P` is the level's panel, `R` the kernel's number of rows.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First block of the panel to read; `blocks` blocks follow each other.
    pub(super) weights: *const u8,
    /// FP8: the vector of scales (`P` floats) of the first block; further vectors follow.
    pub(super) scales: *const f32,
    /// FP8: blocks for which the first vector of scales still holds.
    pub(super) scale_left: usize,
    /// FP8: blocks for which each further vector of scales holds.
    pub(super) scale_blocks: usize,
    /// Rows: `[blocks, R, 32]`.
    pub(super) x: *const f32,
    /// Blocks of 32 input features.
    pub(super) blocks: usize,
    /// Sums: `[R, P]`.
    pub(super) acc: *mut f32,
    /// Where to start fetching what is needed next into the L2 cache; any address will do.
    pub(super) prefetch: *const u8,
    /// How far to go on per two input features, at most the bytes of their weights. (Spread out like this, and into
    /// L2, fetching keeps memory busy without stalling the multiply-adds; a burst per block was 15 % slower.)
    pub(super) prefetch_step: usize,
}

/// Adds a tile's products to its sums.
///
/// # Safety
/// The CPU supports the level, and the pointers cover what [`Tile`] says. No alignment is needed.
pub(super) type Kernel = unsafe fn(&Tile);

/// The kernel for `rows` rows, `1 ..= level.tile()`.
pub(super) fn kernel(level: Level, format: WeightFormat, rows: usize) -> Kernel {
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => avx512::kernels(format)[rows - 1],
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => avx2::kernels(format)[rows - 1],
        _ => portable::kernels(format)[rows - 1],
    }
}
