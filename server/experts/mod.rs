//! Grouped expert MLPs.
//!
//! An expert is `down(activation(gate(x), up(x)))`. A rank runs its experts over the rows that it received, each row
//! with the experts that its assignments name, and adds up the results of a row.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod reference;

use crate::linalg::{Activation, MatrixView};

/// One expert's weights as they lie in a checkpoint: `gate` and `up` are `[intermediate, hidden]`, `down` is
/// `[hidden, intermediate]`, biases as long as their output.
#[derive(Clone, Debug)]
pub struct ExpertWeights<'a> {
    /// Projection that goes through the nonlinearity.
    pub gate: MatrixView<'a>,
    /// Projection that it is multiplied with.
    pub up: MatrixView<'a>,
    /// Projection back to hidden features.
    pub down: MatrixView<'a>,
    /// Biases, if the family has them.
    pub biases: Option<ExpertBiases<'a>>,
}

/// Biases of the three projections.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiases<'a> {
    /// `[intermediate]`.
    pub gate: &'a [f32],
    /// `[intermediate]`.
    pub up: &'a [f32],
    /// `[hidden]`; weighted like the rest of the expert's output.
    pub down: &'a [f32],
}

/// What the routing weight of a row multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightOn {
    /// The expert's output.
    #[default]
    Output,
    /// The expert's input row (Llama 4).
    Input,
}

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
