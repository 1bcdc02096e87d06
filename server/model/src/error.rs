//! Why a checkpoint cannot be served, said so that the reader can mend it.

use std::path::PathBuf;

use expertd_types::{ExpertId, LayerId};

/// A checkpoint that cannot be opened, or a question about it that has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file that cannot be read.
    #[error("{path}: cannot {action}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// No weights in the directory.
    #[error("{path}: no model.safetensors and no model.safetensors.index.json here; found: {found}")]
    NoWeights {
        /// The directory.
        path: PathBuf,
        /// What lies there instead.
        found: String,
    },
    /// A field of `config.json` that is missing, malformed or contradictory.
    #[error("{path}: field `{field}`: expected {expected}, found {found}")]
    Field {
        /// The file.
        path: PathBuf,
        /// The field, with its path inside the file.
        field: String,
        /// What would be right.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A model type, field, value or format that expertd does not know how to serve.
    #[error("{path}: {what} is not supported: {why}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The thing by its name.
        what: String,
        /// What is known and supported instead.
        why: String,
    },
    /// A JSON file that does not parse, or is too large to be one.
    #[error("{path}: not a usable JSON file: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// A shard index that does not make sense.
    #[error("{path}: {reason}")]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A safetensors file that is truncated or whose header is corrupt.
    #[error("{path}: broken safetensors file: {reason}")]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the tensor's name where one is concerned.
        reason: String,
    },
    /// A tensor that the config promises and the files do not have.
    #[error("{path}: tensor `{tensor}` is missing: {reason}")]
    MissingTensor {
        /// The file (or index) that should have it.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Why it is expected, and what is there instead.
        reason: String,
    },
    /// A tensor whose shape contradicts the config.
    #[error("{path}: tensor `{tensor}` has shape {found:?}, expected {expected:?} ({reason})")]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that follows from the config.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
        /// Which fields the expectation comes from.
        reason: String,
    },
    /// A tensor stored in an element type that cannot be used where it stands.
    #[error("{path}: tensor `{tensor}` is stored as {found}, expected {expected}")]
    DType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The types that would do.
        expected: String,
        /// The type in the file.
        found: String,
    },
    /// Contents of a tensor that would be unsafe or meaningless to use.
    #[error("{path}: tensor `{tensor}`: {reason}")]
    Contents {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
    /// A layer index beyond the model.
    #[error("the model has no layer {layer}: it has {num_layers} layers, 0 to {}", num_layers.saturating_sub(1))]
    NoSuchLayer {
        /// The index asked for.
        layer: LayerId,
        /// How many there are.
        num_layers: usize,
    },
    /// A layer that has a plain MLP instead of an MoE block.
    #[error("layer {layer} has no MoE block: it is dense")]
    DenseLayer {
        /// The layer.
        layer: LayerId,
    },
    /// An expert index beyond the layer.
    #[error("layer {layer} has no expert {expert}: it has {num_experts}")]
    NoSuchExpert {
        /// The layer.
        layer: LayerId,
        /// The index asked for.
        expert: ExpertId,
        /// How many there are.
        num_experts: usize,
    },
}

impl ModelError {
    /// Exit code for a checkpoint or configuration that is broken or not supported, found before anything starts
    /// (`EX_USAGE`, as `docs/operations.md` lists it).
    pub const EXIT_CODE: u8 = 64;
}
