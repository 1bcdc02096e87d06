//! One expert's weights as a backend packs them.

use crate::MatrixView;

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
