//! Grouped expert MLPs.
//!
//! An expert is `down(activation(gate(x), up(x)))`. A rank runs its experts over the rows that it received, each row
//! with the experts that its assignments name, and adds up the results of a row.

pub mod cpu;
pub mod reference;

use expertd_model::{Activation, WeightOn};

/// Which rows go through which experts of this rank, grouped by expert.
///
/// Expert `e` gets the rows `rows[offsets[e] .. offsets[e + 1]]` with the routing weights at the same places.
#[derive(Clone, Copy, Debug)]
pub struct Assignments<'a> {
    /// `[experts + 1]`, ascending from 0.
    pub offsets: &'a [u32],
    /// Row numbers; a row occurs at most once per expert.
    pub rows: &'a [u32],
    /// Routing weights.
    pub weights: &'a [f32],
}

/// How the experts of a layer compute, whatever their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertKind {
    /// Between the projections.
    pub activation: Activation,
    /// Where the routing weight goes.
    pub weight_on: WeightOn,
}
