//! Gate and grouped experts on CPUs.
//!
//! * [`linalg`]: packed matrices and the SIMD kernels that multiply rows with them.
//! * [`gate`]: routing functions, driven by data.
//! * [`experts`]: the grouped MLP, and the plain f64 reference of a whole block.

pub mod experts;
pub mod gate;
pub mod linalg;
