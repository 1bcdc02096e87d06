//! The weights of one expert, which each backend packs.

use crate::MatrixView;

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
