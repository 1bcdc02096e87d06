//! Errors of checkpoints, with what was found and expected, so that the reader can fix the cause.

use std::path::PathBuf;

use crate::LayerChoice;
use expertd_types::{ExpertId, LayerId, LayerRange, WeightFingerprint};

/// The error for a checkpoint that cannot be opened, or for a layer or expert that it does not have.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum ModelError {
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    #[error("{path}: the file was changed while its weights were read; expected that it stays as it is")]
    Written { path: PathBuf },
    #[error(
        "{path}: the weights have fingerprint {found}, expected {expected}: files were replaced or changed since the \
         service opened them; put the old files back, or let the service load the new ones (a restart, or `expertd reload`)"
    )]
    OtherWeights { path: PathBuf, expected: WeightFingerprint, found: WeightFingerprint },
    #[error("{path}: expected model.safetensors or model.safetensors.index.json here, found {found}")]
    NoWeights { path: PathBuf, found: String },
    /// A field of `config.json` is missing, malformed or contradictory.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    Field { path: PathBuf, field: String, expected: String, found: String },
    #[error("{path}: {what} is not supported: {why}")]
    Unsupported { path: PathBuf, what: String, why: String },
    #[error("{path}: not a usable JSON file: {reason}")]
    Json { path: PathBuf, reason: String },
    #[error("{path}: {reason}")]
    Index { path: PathBuf, reason: String },
    #[error("{path}: broken safetensors file: {reason}")]
    Header { path: PathBuf, reason: String },
    #[error("{path}: tensor `{tensor}` is missing: {reason}")]
    MissingTensor { path: PathBuf, tensor: String, reason: String },
    #[error("{path}: tensor `{tensor}` has shape {found:?}, expected {expected:?} ({reason})")]
    Shape { path: PathBuf, tensor: String, expected: Vec<usize>, found: Vec<usize>, reason: String },
    /// A tensor has an element type that is not supported for its purpose.
    #[error("{path}: tensor `{tensor}` is stored as {found}, expected {expected}")]
    DType { path: PathBuf, tensor: String, expected: String, found: String },
    #[error("{path}: tensor `{tensor}`: {reason}")]
    Contents { path: PathBuf, tensor: String, reason: String },
    #[error("the model has no layer {layer}: it has {num_layers} layers, 0 to {}", num_layers.saturating_sub(1))]
    NoSuchLayer { layer: LayerId, num_layers: usize },
    /// The layers to open are not layers of the model, or none of them has an MoE block.
    #[error("{path}: layers {chosen}: {reason}")]
    Layers { path: PathBuf, chosen: LayerChoice, reason: String },
    #[error("layer {layer} is not held: the checkpoint was opened for layers {held}")]
    LayerNotHeld { layer: LayerId, held: LayerRange },
    #[error("layer {layer} has no MoE block: it is dense")]
    DenseLayer { layer: LayerId },
    #[error("layer {layer} has no expert {expert}: it has {num_experts}")]
    NoSuchExpert { layer: LayerId, expert: ExpertId, num_experts: usize },
}

impl ModelError {
    /// Exit code for a broken or unsupported checkpoint or configuration that is found before any process is started
    /// (`EX_USAGE`; `docs/operations.md` lists all exit codes).
    pub const EXIT_CODE: u8 = 64;
}
