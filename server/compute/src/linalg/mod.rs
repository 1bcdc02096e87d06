//! Packed matrices and the SIMD kernels that multiply rows with them.

mod epilogue;
mod fixed;
mod groups;
mod kernels;
mod matmul;
mod memory;
mod packed;
mod panel;
mod parallel;
mod quantise;
mod simd_level;
mod storage;
mod stored;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod test_matrix;
#[cfg(test)]
pub(crate) mod tests;
mod tiles;

pub use groups::{GroupLayout, PackedScale};
pub use matmul::{MatmulScratch, matmul};
pub use packed::{PackError, PackedMatrix};
pub use quantise::Fp8Scales;
pub use simd_level::{SIMD_LEVEL_ENV, SimdLevel};
pub use storage::SharedBytes;
pub use stored::{PackedForm, StoredError};

pub(crate) use epilogue::{PanelOutput, activate};
pub(crate) use fixed::{PackedRows, fix_tile, takes_fixed};
pub use memory::AlignedBuffer;
pub(crate) use packed::K_BLOCK;
pub(crate) use panel::multiply;
pub use parallel::for_each_chunk;
pub(crate) use parallel::{DisjointSlice, WorkQueue, for_each, run_parallel};
pub(crate) use quantise::quantise_row;
pub(crate) use tiles::{RowTile, Tiling, pack_row, pack_zeros, padded};
