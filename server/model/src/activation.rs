//! Activations of expert MLPs, applied between the gate and up projections and the down projection.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The function that combines an expert's gate and up projections, element by element, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Activation {
    /// `silu(gate) * up`, where `silu(x) = x * sigmoid(x)`.
    SwiGlu,
    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)` (DeepSeek-V4).
    SwiGluClamped {
        /// Bound of both projections.
        limit: f32,
    },
    /// `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)`, `u = clamp(up, -limit, limit)` (gpt-oss).
    SwiGluOai {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Bound of both projections.
        limit: f32,
    },
}

impl Activation {
    /// The value for one element: the scalar reference that kernels are compared with.
    #[must_use]
    pub fn apply(self, gate: f32, up: f32) -> f32 {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        match self {
            Activation::SwiGlu => gate * sigmoid(gate) * up,
            Activation::SwiGluClamped { limit } => {
                let gate = at_most(gate, limit);
                gate * sigmoid(gate) * clamp(up, limit)
            }
            Activation::SwiGluOai { alpha, limit } => {
                let gate = at_most(gate, limit);
                gate * sigmoid(alpha * gate) * (clamp(up, limit) + 1.0)
            }
        }
    }
}

/// `min` that returns NaN for NaN, as PyTorch's `clamp` does.
fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

fn clamp(x: f32, limit: f32) -> f32 {
    if x < -limit { -limit } else { at_most(x, limit) }
}

impl fmt::Display for Activation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Activation::SwiGlu => f.write_str("SwiGLU"),
            Activation::SwiGluClamped { limit } => write!(f, "SwiGLU clamped at {limit}"),
            Activation::SwiGluOai { alpha, limit } => {
                write!(f, "SwiGLU with alpha {alpha}, clamped at {limit}, up projection + 1")
            }
        }
    }
}
