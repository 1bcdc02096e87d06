//! Grouped expert MLPs.
//!
//! An expert is `down(activation(gate(x), up(x)))`. A rank runs each row that it received through the experts that the
//! row's assignments name, and adds up their results.

pub mod cpu;
pub mod reference;

use expertd_model::{Activation, WeightOn};

/// Assignments of rows to the experts of a rank, grouped by expert.
///
/// Expert `e` computes the rows `rows[offsets[e] .. offsets[e + 1]]`, with the routing weights at the same indices.
#[derive(Clone, Copy, Debug)]
pub struct Assignments<'a> {
    /// `[experts + 1]`, ascending from 0.
    pub offsets: &'a [u32],
    /// Row numbers; a row occurs at most once per expert.
    pub rows: &'a [u32],
    /// Routing weights, one per assignment.
    pub weights: &'a [f32],
}

/// What the experts of a layer compute, apart from their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertKind {
    /// Activation between the projections.
    pub activation: Activation,
    /// Operand of the routing weight.
    pub weight_on: WeightOn,
}
