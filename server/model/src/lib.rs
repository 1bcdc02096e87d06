//! Reading of checkpoints: `config.json` and safetensors files become a [`ModelSpec`] and views of the weights.
//!
//! [`Checkpoint::open`] maps a directory in Hugging Face's layout and checks it by its headers alone. The differences
//! between model families are data in the module `families`.

mod activation;
pub mod balance;
mod checkpoint;
mod codes;
mod config;
mod context;
pub mod decode;
mod error;
mod experts;
mod families;
mod family;
mod fingerprint;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod gate_rules;
mod gate_spec;
mod header;
mod layer_choice;
mod mapped;
mod matrices;
mod matrix_view;
mod packing;
mod plan;
mod quant;
mod quantised;
mod read;
mod resolve;
mod scales;
mod spec;
mod store;
pub mod synth;
mod weights;

pub use activation::Activation;
pub use checkpoint::{Checkpoint, ExpertTensors, GateTensors, SharedTensors};
pub use error::ModelError;
pub use expertd_types::Placement;
pub use families::{FAMILIES, by_model_type, by_name};
pub use family::Family;
pub use gate_spec::{Choice, GateSpec, GroupLimit, GroupScore, MAX_TOP_K, Normalise, ScoreFn};
pub use layer_choice::LayerChoice;
pub use matrix_view::{MatrixError, MatrixView, WeightFormat};
pub use packing::Packing;
pub use read::{ReadBuffer, ReadBytes};
pub use scales::{GroupScales, INT4_ZERO, ScaleFormat, Scales, ZeroPoints};
pub use spec::{ExpertsSpec, FP8_ROW_GROUP, ModelSpec, MoeLayer, SharedSpec, has_wide_scales};
pub use weights::{ExpertBiases, ExpertWeights, WeightOn};
