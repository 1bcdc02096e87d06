//! The description of a checkpoint that all other layers use.

use serde::{Deserialize, Serialize};

use super::{GateSpec, ModelError};
use crate::{Activation, WeightFormat};
use expertd_types::{Fp8Products, LayerId, LayerRange};

/// The MoE part of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name of the family; see [`super::FAMILIES`].
    pub family: String,
    /// `model_type` in `config.json`.
    pub model_type: String,
    /// Elements per token row.
    pub hidden: usize,
    /// Number of decoder layers, with and without an MoE block.
    pub num_layers: usize,
    /// The decoder layers that were checked and can be loaded.
    pub held: LayerRange,
    /// The MoE block of each layer; `None` for a dense layer and for one outside `held`.
    pub layers: Vec<Option<MoeLayer>>,
}

/// One MoE block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MoeLayer {
    /// Routing function.
    pub gate: GateSpec,
    /// Routed experts.
    pub experts: ExpertsSpec,
    /// Shared experts, which process every token.
    pub shared: Option<SharedSpec>,
}

/// The routed experts of a layer: `down(activation(gate(x), up(x)))`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertsSpec {
    /// Number of experts, E.
    pub count: usize,
    /// Intermediate size, I: gate and up are `[I, hidden]`, down is `[hidden, I]`.
    pub width: usize,
    /// Activation between gate/up and down.
    pub activation: Activation,
    /// Whether the routing weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// Whether gate, up and down have biases.
    pub biases: bool,
    /// Storage format of the weights, in the checkpoint and in memory.
    pub format: WeightFormat,
    /// Columns per block or group of scales (of FP8, INT4 and NVFP4), if a row of any matrix has several.
    pub scale_cols: Option<usize>,
    /// Whether groups of INT4 weights have zero points; without them every zero point is 8.
    #[serde(default)]
    pub zero_points: bool,
    /// Whether scales of rows that are quantised to FP8 are rounded up to powers of two.
    #[serde(default)]
    pub power_of_two_scales: bool,
    /// Size of one expert in the checkpoint, scales and biases included, in bytes.
    pub bytes: u64,
}

/// The shared experts of a layer, as one MLP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SharedSpec {
    /// Intermediate size of all shared experts together.
    pub width: usize,
    /// Activation between gate/up and down.
    pub activation: Activation,
    /// Whether the output is multiplied by `sigmoid(x · g)` for a vector g `[hidden]`.
    pub gated: bool,
    /// Whether gate, up and down have biases.
    pub biases: bool,
    /// Storage format of the gate projection in the checkpoint.
    pub format: WeightFormat,
    /// Storage formats of the up and down projections that differ from [`format`](Self::format), each once.
    #[serde(default)]
    pub other_formats: Vec<WeightFormat>,
    /// Columns per block or group of scales; see [`ExpertsSpec::scale_cols`].
    pub scale_cols: Option<usize>,
    /// Whether groups of INT4 weights have zero points; without them every zero point is 8.
    #[serde(default)]
    pub zero_points: bool,
    /// Whether scales of rows that are quantised to FP8 are rounded up to powers of two.
    #[serde(default)]
    pub power_of_two_scales: bool,
    /// Size in the checkpoint, scales and biases included, in bytes.
    pub bytes: u64,
}

/// Neighbouring elements of a row that share a scale where the row is quantised to FP8.
pub const FP8_ROW_GROUP: usize = 128;

impl ExpertsSpec {
    /// Whether these experts multiply rows in FP8: `products` asks for it, and their matrices are stored in MXFP4, or in FP8 whose
    /// scales do not change within the columns of a group of such a row.
    pub const fn take_fp8_rows(&self, products: Fp8Products) -> bool {
        take_fp8_rows(self.format, self.scale_cols, products)
    }
}

impl SharedSpec {
    /// See [`ExpertsSpec::take_fp8_rows`].
    pub const fn take_fp8_rows(&self, products: Fp8Products) -> bool {
        self.other_formats.is_empty() && take_fp8_rows(self.format, self.scale_cols, products)
    }
}

const fn take_fp8_rows(format: WeightFormat, scale_cols: Option<usize>, products: Fp8Products) -> bool {
    match format {
        WeightFormat::Fp8E4m3 => products.of_fp8 && has_wide_scales(scale_cols),
        WeightFormat::Mxfp4 => products.of_mxfp4,
        _ => false,
    }
}

/// Whether no scale changes within [`FP8_ROW_GROUP`] columns, from a multiple of it on; see [`ExpertsSpec::scale_cols`].
#[must_use]
pub const fn has_wide_scales(scale_cols: Option<usize>) -> bool {
    match scale_cols {
        Some(cols) => cols.is_multiple_of(FP8_ROW_GROUP),
        None => true,
    }
}

impl ModelSpec {
    /// The MoE block of a layer.
    ///
    /// # Errors
    /// [`ModelError::NoSuchLayer`] if the model has no such layer, [`ModelError::LayerNotHeld`] if it is outside
    /// [`held`](Self::held), [`ModelError::DenseLayer`] if it has no MoE block.
    pub fn layer(&self, layer: LayerId) -> Result<&MoeLayer, ModelError> {
        match self.layers.get(layer.index()) {
            None => Err(ModelError::NoSuchLayer { layer, num_layers: self.num_layers }),
            Some(None) if !self.held.contains(layer) => {
                Err(ModelError::LayerNotHeld { layer, held: self.held })
            }
            Some(None) => Err(ModelError::DenseLayer { layer }),
            Some(Some(moe)) => Ok(moe),
        }
    }

    /// The held layers with an MoE block, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = (LayerId, &MoeLayer)> {
        (0u32..).zip(&self.layers).filter_map(|(i, moe)| Some((LayerId(i), moe.as_ref()?)))
    }

    /// The largest `top_k` of all layers.
    pub fn max_top_k(&self) -> usize {
        self.moe_layers().map(|(_, moe)| moe.gate.top_k).max().unwrap_or(0)
    }

    /// The largest number of experts of all layers.
    pub fn max_experts(&self) -> usize {
        self.moe_layers().map(|(_, moe)| moe.experts.count).max().unwrap_or(0)
    }
}
