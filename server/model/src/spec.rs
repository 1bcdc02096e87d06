//! What a checkpoint holds, as data that every layer above works from.

use serde::{Deserialize, Serialize};

use super::{GateSpec, ModelError};
use crate::{Activation, WeightFormat};
use expertd_types::LayerId;

/// The MoE side of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Family, see [`super::FAMILIES`].
    pub family: String,
    /// `model_type` in `config.json`.
    pub model_type: String,
    /// Elements of a token row.
    pub hidden: usize,
    /// Decoder layers, with and without an MoE block.
    pub num_layers: usize,
    /// Per layer its MoE block; `None` for a dense layer.
    pub layers: Vec<Option<MoeLayer>>,
}

/// One MoE block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeLayer {
    /// Routing function.
    pub gate: GateSpec,
    /// Routed experts.
    pub experts: ExpertsSpec,
    /// Shared experts, which see every token.
    pub shared: Option<SharedSpec>,
}

/// The routed experts of a layer: `down(activation(gate(x), up(x)))`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// Number of experts, E.
    pub count: usize,
    /// Intermediate size, I: gate and up are `[I, hidden]`, down is `[hidden, I]`.
    pub width: usize,
    /// Between gate/up and down.
    pub activation: Activation,
    /// Whether the routing weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// Whether gate, up and down have biases.
    pub biases: bool,
    /// How the weights are stored, and stay stored.
    pub format: WeightFormat,
    /// Columns of a block of FP8 scales, where a row of some matrix has several.
    pub scale_cols: Option<usize>,
    /// Bytes of one expert in the checkpoint, scales and biases included.
    pub bytes: u64,
}

/// The shared experts of a layer, as one MLP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedSpec {
    /// Intermediate size of all of them together.
    pub width: usize,
    /// Between gate/up and down.
    pub activation: Activation,
    /// Whether the output is multiplied with `sigmoid(x · g)` for a vector g `[hidden]`.
    pub gated: bool,
    /// Whether gate, up and down have biases.
    pub biases: bool,
    /// How the weights are stored, and stay stored.
    pub format: WeightFormat,
    /// As of [`ExpertsSpec`].
    pub scale_cols: Option<usize>,
    /// Bytes in the checkpoint, scales and biases included.
    pub bytes: u64,
}

impl ModelSpec {
    /// The MoE block of a layer.
    ///
    /// # Errors
    /// [`ModelError::NoSuchLayer`] beyond the model, [`ModelError::DenseLayer`] for a layer without MoE block.
    pub fn layer(&self, layer: LayerId) -> Result<&MoeLayer, ModelError> {
        match self.layers.get(layer.index()) {
            None => Err(ModelError::NoSuchLayer { layer, num_layers: self.num_layers }),
            Some(None) => Err(ModelError::DenseLayer { layer }),
            Some(Some(moe)) => Ok(moe),
        }
    }

    /// Layers with an MoE block, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = (LayerId, &MoeLayer)> {
        (0u32..).zip(&self.layers).filter_map(|(i, moe)| Some((LayerId(i), moe.as_ref()?)))
    }

    /// The largest `top_k` of any layer.
    #[must_use]
    pub fn max_top_k(&self) -> usize {
        self.moe_layers().map(|(_, moe)| moe.gate.top_k).max().unwrap_or(0)
    }

    /// The largest number of experts of any layer.
    #[must_use]
    pub fn max_experts(&self) -> usize {
        self.moe_layers().map(|(_, moe)| moe.experts.count).max().unwrap_or(0)
    }
}
