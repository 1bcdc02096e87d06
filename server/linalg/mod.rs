//! Packed matrices and the SIMD kernels that multiply rows with them.

mod activation;
mod view;

pub use activation::Activation;
pub use view::{MatrixView, Scales, WeightFormat};
