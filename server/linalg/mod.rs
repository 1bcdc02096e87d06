//! Packed matrices and the SIMD kernels that multiply rows with them.

mod view;

pub use view::{MatrixView, Scales, WeightFormat};
