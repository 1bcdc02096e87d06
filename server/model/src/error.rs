//! Errors of checkpoints, with what was found and expected, so that the reader can fix the cause.

use std::path::PathBuf;

use crate::LayerChoice;
use expertd_types::{ExpertId, LayerId, LayerRange, WeightFingerprint};

/// The error for a checkpoint that cannot be opened, or for a layer or expert that it does not have.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be read.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file was written to while it was read.
    #[error("{path}: the file was changed while its weights were read; expected that it stays as it is")]
    Written {
        /// The file.
        path: PathBuf,
    },
    /// The weights are not those that are expected.
    #[error(
        "{path}: the weights have fingerprint {found}, expected {expected}: files were replaced or changed since the \
         service opened them; put the old files back, or let the service load the new ones (a restart, or `expertd reload`)"
    )]
    OtherWeights {
        /// The directory.
        path: PathBuf,
        /// The expected fingerprint.
        expected: WeightFingerprint,
        /// The fingerprint of what is there.
        found: WeightFingerprint,
    },
    /// The directory has no weights.
    #[error("{path}: expected model.safetensors or model.safetensors.index.json here, found {found}")]
    NoWeights {
        /// The directory.
        path: PathBuf,
        /// The names of the files that are there.
        found: String,
    },
    /// A field of `config.json` is missing, malformed or contradictory.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    Field {
        /// The file.
        path: PathBuf,
        /// Path of the field inside the file.
        field: String,
        /// The expected value, in words.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A model type, field, value or format is not supported.
    #[error("{path}: {what} is not supported: {why}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The name of the unsupported thing.
        what: String,
        /// What is supported instead.
        why: String,
    },
    /// A JSON file does not parse or is too large.
    #[error("{path}: not a usable JSON file: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// A shard index is invalid.
    #[error("{path}: {reason}")]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is invalid.
        reason: String,
    },
    /// A safetensors file is truncated or its header is corrupt.
    #[error("{path}: broken safetensors file: {reason}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name where it concerns one.
        reason: String,
    },
    /// A tensor that the config implies is missing.
    #[error("{path}: tensor `{tensor}` is missing: {reason}")]
    MissingTensor {
        /// The file or index that should list it.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Why the tensor is expected, and what was found instead.
        reason: String,
    },
    /// The shape of a tensor contradicts the config.
    #[error("{path}: tensor `{tensor}` has shape {found:?}, expected {expected:?} ({reason})")]
    Shape {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shape that the config implies.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
        /// The config fields that imply the shape.
        reason: String,
    },
    /// A tensor has an element type that is not supported for its purpose.
    #[error("{path}: tensor `{tensor}` is stored as {found}, expected {expected}")]
    DType {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The supported types.
        expected: String,
        /// The type in the file.
        found: String,
    },
    /// The contents of a tensor are unsafe or meaningless to use.
    #[error("{path}: tensor `{tensor}`: {reason}")]
    Contents {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with the contents.
        reason: String,
    },
    /// The model has no layer of this index.
    #[error("the model has no layer {layer}: it has {num_layers} layers, 0 to {}", num_layers.saturating_sub(1))]
    NoSuchLayer {
        /// The requested index.
        layer: LayerId,
        /// Number of layers.
        num_layers: usize,
    },
    /// The layers to open are not layers of the model, or none of them has an MoE block.
    #[error("{path}: layers {chosen}: {reason}")]
    Layers {
        /// The file with the model's layers.
        path: PathBuf,
        /// The layers that were to be opened.
        chosen: LayerChoice,
        /// What was found and what is expected.
        reason: String,
    },
    /// The layer exists, but the checkpoint was opened without it.
    #[error("layer {layer} is not held: the checkpoint was opened for layers {held}")]
    LayerNotHeld {
        /// The requested index.
        layer: LayerId,
        /// The layers that it was opened for.
        held: LayerRange,
    },
    /// The layer has a plain MLP instead of an MoE block.
    #[error("layer {layer} has no MoE block: it is dense")]
    DenseLayer {
        /// The requested index.
        layer: LayerId,
    },
    /// The layer has no expert of this index.
    #[error("layer {layer} has no expert {expert}: it has {num_experts}")]
    NoSuchExpert {
        /// The requested layer.
        layer: LayerId,
        /// The requested index.
        expert: ExpertId,
        /// Number of experts.
        num_experts: usize,
    },
}

impl ModelError {
    /// Exit code for a broken or unsupported checkpoint or configuration that is found before any process is started
    /// (`EX_USAGE`; `docs/operations.md` lists all exit codes).
    pub const EXIT_CODE: u8 = 64;
}
