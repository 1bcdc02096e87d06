//! The words of the project as types, so that two integers of the same width cannot be swapped. No I/O.

#![forbid(unsafe_code)]

mod ids;
mod phase;
mod pieces;

pub use ids::*;
pub use phase::Phase;
pub use pieces::{Pieces, Slices};
