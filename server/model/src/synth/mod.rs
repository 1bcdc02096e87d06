//! Random checkpoints of any family, in Hugging Face's layout.
//!
//! They hold the MoE blocks only: what the service needs. Loaded into transformers, the rest of the model is
//! initialised by that library. Weights are scaled so that rows of unit variance give outputs of about unit variance.

mod configs;
mod draw;
mod layout;
mod write;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Family, by_name};

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "clap", value(rename_all = "lower"))]
pub enum SynthFormat {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// FP8 e4m3 with a scale for each block of 128×128 (Llama 4: for each output channel).
    Fp8,
    /// MXFP4: blocks of 32 inputs share an exponent.
    Mxfp4,
}

/// What to synthesise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SynthConfig {
    /// Name of a family ([`super::FAMILIES`]).
    pub family: String,
    /// Elements of a token row.
    pub hidden: usize,
    /// Routed experts of each layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Intermediate size of an expert.
    pub width: usize,
    /// Decoder layers. In families whose first layers are dense, the first one is, if there are more.
    pub layers: usize,
    /// How weights are stored.
    pub format: SynthFormat,
    /// The same seed gives the same bytes.
    pub seed: u64,
    /// Files are not made larger than this, if a single tensor fits.
    pub max_shard_bytes: u64,
}

impl SynthConfig {
    /// A small checkpoint of a family.
    #[must_use]
    pub fn new(family: &str) -> Self {
        Self {
            family: family.to_owned(),
            hidden: 64,
            experts: 8,
            top_k: 2,
            width: 96,
            layers: 2,
            format: SynthFormat::Bf16,
            seed: 0,
            max_shard_bytes: 4 << 30,
        }
    }
}

/// Why a checkpoint cannot be synthesised.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// No such family.
    #[error("family `{0}` is not known; known are {known}", known = configs::names().join(", "))]
    Family(String),
    /// Sizes that make no model.
    #[error("{field}: expected {expected}, found {found}")]
    Field {
        /// Which one.
        field: &'static str,
        /// What would be right.
        expected: String,
        /// What was asked for.
        found: String,
    },
    /// A file that cannot be written.
    #[error("{path}: cannot write it: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
}

/// Names of the families that can be synthesised.
#[must_use]
pub fn families() -> Vec<&'static str> {
    configs::names()
}

/// Bytes of weights that [`write()`] would write.
///
/// # Errors
/// A family or sizes that make no model.
pub fn size(config: &SynthConfig) -> Result<u64, SynthError> {
    let family = check(config)?;
    Ok(layout::tensors(config, family).iter().map(layout::Tensor::bytes).sum())
}

/// Writes a checkpoint into a directory, which is made if it is not there. Files of the same names are overwritten.
///
/// # Errors
/// A family or sizes that make no model, or a file that cannot be written.
pub fn write(config: &SynthConfig, dir: &Path) -> Result<(), SynthError> {
    write_with(config, dir, &mut |_| {})
}

/// Like [`write()`], and tells `progress` how many more bytes have been written.
///
/// # Errors
/// As [`write()`].
pub fn write_with(config: &SynthConfig, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), SynthError> {
    let family = check(config)?;
    let io = |path: PathBuf| move |source| SynthError::Io { path, source };
    std::fs::create_dir_all(dir).map_err(io(dir.to_owned()))?;
    let path = dir.join("config.json");
    let text = serde_json::to_string_pretty(&configs::config_json(config, family)).expect("plain JSON");
    std::fs::write(&path, text + "\n").map_err(io(path))?;
    write::tensors(&layout::tensors(config, family), config, dir, progress)
}

fn check(config: &SynthConfig) -> Result<&'static Family, SynthError> {
    let family = by_name(&config.family).filter(|family| configs::names().contains(&family.name));
    let family = family.ok_or_else(|| SynthError::Family(config.family.clone()))?;
    let wrong = |field, expected: &str, found: usize| {
        Err(SynthError::Field { field, expected: expected.to_owned(), found: found.to_string() })
    };
    let sizes = [
        ("hidden", config.hidden, 1 << 20),
        ("experts", config.experts, 65536),
        ("width", config.width, 1 << 20),
        ("layers", config.layers, 4096),
    ];
    for (field, size, max) in sizes {
        if size == 0 || size > max {
            return wrong(field, &format!("1 to {max}"), size);
        }
    }
    if !config.hidden.is_multiple_of(8) {
        return wrong("hidden", "a multiple of 8 (4 attention heads of even width)", config.hidden);
    }
    let most = config.experts.min(super::MAX_TOP_K);
    if config.top_k == 0 || config.top_k > most {
        return wrong("top-k", &format!("1 to {most}"), config.top_k);
    }
    if family.name == "phimoe" && config.top_k != 2 {
        return wrong("top-k", "2, which this family's gate always chooses", config.top_k);
    }
    if config.format == SynthFormat::Mxfp4 {
        for (field, size) in [("hidden", config.hidden), ("width", config.width)] {
            if !size.is_multiple_of(32) {
                return wrong(field, "a multiple of 32, the block size of MXFP4", size);
            }
        }
    }
    Ok(family)
}
