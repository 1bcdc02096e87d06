//! Random checkpoints of any family, in Hugging Face's layout.
//!
//! They hold the MoE blocks only, which is what the service needs; transformers initialises the rest of the model
//! itself when it loads one. Weights are scaled so that rows of unit variance give outputs of about unit variance.

mod configs;
mod draw;
mod layout;
mod linear;
mod write;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Family, by_name};

/// Storage format of weights.
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
    /// FP8 e4m3 with one scale per block of 128×128 (Llama 4: per output channel).
    Fp8,
    /// MXFP4: blocks of 32 inputs share an exponent.
    Mxfp4,
    /// MXFP8 as compressed-tensors writes it: blocks of 32 inputs share an exponent.
    Mxfp8,
    /// NVFP4 as ModelOpt writes it: blocks of 16 inputs share an FP8 scale.
    Nvfp4,
    /// INT4 as Kimi-K2 has it (compressed-tensors): symmetric, groups of 32 inputs; shared experts in bf16.
    Int4,
    /// INT4 of GPTQ, with zero points; groups of 128 inputs, or 64 or 32 where 128 does not divide the sizes.
    #[serde(rename = "int4-gptq")]
    #[cfg_attr(feature = "clap", value(name = "int4-gptq"))]
    Int4Gptq,
    /// INT4 of AWQ, with zero points; groups as for GPTQ.
    #[serde(rename = "int4-awq")]
    #[cfg_attr(feature = "clap", value(name = "int4-awq"))]
    Int4Awq,
}

impl SynthFormat {
    /// Inputs that the format stores together; sizes must be multiples of them.
    const fn block(self) -> usize {
        match self {
            SynthFormat::Bf16 | SynthFormat::F16 | SynthFormat::F32 | SynthFormat::Fp8 => 1,
            SynthFormat::Nvfp4 => 16,
            SynthFormat::Mxfp4
            | SynthFormat::Mxfp8
            | SynthFormat::Int4
            | SynthFormat::Int4Gptq
            | SynthFormat::Int4Awq => 32,
        }
    }
}

/// The parameters of a synthesised checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SynthConfig {
    /// Name of a family ([`super::FAMILIES`]).
    pub family: String,
    /// Elements per token row.
    pub hidden: usize,
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Intermediate size of an expert.
    pub width: usize,
    /// Number of decoder layers. In families whose first layers are dense, the first layer is dense if there are
    /// several.
    pub layers: usize,
    /// Storage format of weights.
    pub format: SynthFormat,
    /// Seed of the random numbers; the same seed gives the same bytes.
    pub seed: u64,
    /// Largest size of a file in bytes, unless a single tensor is larger.
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

    /// Inputs of an INT4 group.
    fn int4_group(&self) -> usize {
        let divides = |group: &usize| self.hidden.is_multiple_of(*group) && self.width.is_multiple_of(*group);
        match self.format {
            SynthFormat::Int4Gptq | SynthFormat::Int4Awq => [128, 64].into_iter().find(divides).unwrap_or(32),
            _ => 32,
        }
    }
}

/// An error that prevents a checkpoint from being synthesised.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum SynthError {
    #[error("family `{0}` is unknown; the known families are {known}", known = configs::names().join(", "))]
    Family(String),
    #[error("{field}: expected {expected}, found {found}")]
    Field { field: &'static str, expected: String, found: String },
    #[error(
        "{path}: the weights take {needed} bytes, and the file system has {free} free; choose smaller sizes or another folder"
    )]
    Space {
        path: PathBuf,
        needed: u64,
        /// Free bytes, those of files that would be overwritten included.
        free: u64,
    },
    #[error("{path}: cannot write the file: {source}")]
    Io { path: PathBuf, source: std::io::Error },
}

/// Names of the families that can be synthesised.
#[must_use]
pub fn families() -> Vec<&'static str> {
    configs::names()
}

/// Size of the weights that [`write()`] would write, in bytes.
///
/// # Errors
/// If the family or the sizes are invalid.
pub fn size(config: &SynthConfig) -> Result<u64, SynthError> {
    let family = check(config)?;
    Ok(layout::tensors(config, family).iter().map(layout::Tensor::bytes).sum())
}

/// Writes a checkpoint into a directory, which is created if it does not exist. Existing files of the same names are
/// overwritten.
///
/// # Errors
/// If the family or the sizes are invalid, the file system has too little room, or a file cannot be written.
pub fn write(config: &SynthConfig, dir: &Path) -> Result<(), SynthError> {
    write_with(config, dir, &mut |_| {})
}

/// Like [`write()`], and calls `progress` with the number of bytes written since its last call.
///
/// # Errors
/// See [`write()`].
pub fn write_with(config: &SynthConfig, dir: &Path, progress: &mut dyn FnMut(u64)) -> Result<(), SynthError> {
    let family = check(config)?;
    let io = |path: PathBuf| move |source| SynthError::Io { path, source };
    std::fs::create_dir_all(dir).map_err(io(dir.to_owned()))?;
    let tensors = layout::tensors(config, family);
    let needed = tensors.iter().map(layout::Tensor::bytes).sum();
    let free =
        free_bytes(dir).map(|free| free.saturating_add(write::overwritten_bytes(&tensors, config, dir)));
    if let Some(free) = free.filter(|free| *free < needed) {
        return Err(SynthError::Space { path: dir.to_owned(), needed, free });
    }
    let path = dir.join("config.json");
    let text = serde_json::to_string_pretty(&configs::config_json(config, family)).expect("plain JSON");
    std::fs::write(&path, text + "\n").map_err(io(path))?;
    write::tensors(&tensors, config, dir, progress)
}

/// Bytes that this user may still write to the file system of a folder, if the system reports them.
fn free_bytes(dir: &Path) -> Option<u64> {
    let system = rustix::fs::statvfs(dir).ok()?;
    system.f_bavail.checked_mul(system.f_frsize)
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
        return wrong("hidden", "a multiple of 8 (for 4 attention heads of even width)", config.hidden);
    }
    let most = config.experts.min(super::MAX_TOP_K);
    if config.top_k == 0 || config.top_k > most {
        return wrong("top-k", &format!("1 to {most}"), config.top_k);
    }
    if family.name == "phimoe" && config.top_k != 2 {
        return wrong("top-k", "2, the number that this family's gate always chooses", config.top_k);
    }
    let block = config.format.block();
    for (field, size) in [("hidden", config.hidden), ("width", config.width)] {
        if !size.is_multiple_of(block) {
            return wrong(
                field,
                &format!("a multiple of {block}, the block size of {:?}", config.format),
                size,
            );
        }
    }
    Ok(family)
}
