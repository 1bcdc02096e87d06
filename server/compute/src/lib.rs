//! Gate and grouped experts on CPUs.
//!
//! * [`linalg`]: packed matrices and the SIMD kernels that multiply rows with them.
//! * [`gate`]: routing functions, driven by data.
//! * [`experts`]: the grouped MLP, and an f64 reference of the whole block.

pub mod experts;
pub mod gate;
pub mod linalg;
