//! Grouped expert MLPs.
//!
//! An expert is `down(activation(gate(x), up(x)))`. A rank runs each row that it received through the experts that the
//! row's assignments name, and adds up their results.

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod reference;

use crate::linalg::{Activation, MatrixView};

/// One expert's weights as a checkpoint stores them: `gate` and `up` are `[intermediate, hidden]`, `down` is `[hidden,
/// intermediate]`, and each bias has the length of its projection's output.
#[derive(Clone, Debug)]
pub struct ExpertWeights<'a> {
    /// Projection that passes through the nonlinearity.
    pub gate: MatrixView<'a>,
    /// Projection that is multiplied with the activated gate projection.
    pub up: MatrixView<'a>,
    /// Projection back to hidden features.
    pub down: MatrixView<'a>,
    /// Biases, if the family has them.
    pub biases: Option<ExpertBiases<'a>>,
}

/// Biases of an expert's three projections.
#[derive(Clone, Copy, Debug)]
pub struct ExpertBiases<'a> {
    /// `[intermediate]`.
    pub gate: &'a [f32],
    /// `[intermediate]`.
    pub up: &'a [f32],
    /// `[hidden]`; multiplied by the routing weight like the rest of the expert's output.
    pub down: &'a [f32],
}

/// Operand that a routing weight multiplies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightOn {
    /// The expert's output.
    #[default]
    Output,
    /// The expert's input row (Llama 4).
    Input,
}

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
