//! Packed matrices and the SIMD kernels that multiply rows with them.

mod epilogue;
mod kernels;
mod level;
mod matmul;
mod memory;
mod packed;
mod panel;
mod parallel;
#[cfg(test)]
pub(crate) mod tests;
mod tiles;

pub use level::{LEVEL_ENV, Level};
pub use matmul::{MatmulScratch, matmul};
pub use packed::{PackError, PackedMatrix};

pub(crate) use epilogue::{Place, activate};
pub use memory::Buffer;
pub(crate) use panel::multiply;
pub(crate) use parallel::{Items, Shared, run};
pub(crate) use tiles::{Tiling, pack_row, padded};
