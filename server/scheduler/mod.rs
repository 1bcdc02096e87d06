//! Admission, deadlines, step forming, fairness.

mod interface;

pub use interface::*;
