//! Packed matrices and the SIMD kernels that multiply rows with them.

mod activation;
mod decode;
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
mod view;

pub use activation::Activation;
pub use level::{LEVEL_ENV, Level};
pub use matmul::{MatmulScratch, matmul};
pub use packed::{PackError, PackedMatrix};
pub use view::{MatrixView, Scales, WeightFormat};

pub(crate) use epilogue::{Place, activate};
pub(crate) use memory::Buffer;
pub(crate) use panel::multiply;
pub(crate) use parallel::{Items, Shared, run};
pub(crate) use tiles::{Tiling, pack_row, padded};
