//! `expertd synth`: writes a random checkpoint.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};

use super::exit::CommandError;
use expertd_model::synth::{self, SynthConfig, SynthError, SynthFormat};

/// Write a random checkpoint of any supported family in Hugging Face layout
///
/// Exits with status 0, 64 for sizes that no checkpoint can have or a folder that is not empty, 1 if the files cannot be written.
#[derive(Args, Clone, Debug)]
pub struct SynthArgs {
    /// Family, such as mixtral, qwen3_moe or deepseek_v3; an unknown name lists all families
    #[arg(long)]
    pub family: String,
    /// Directory to write, which must be empty or not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Elements of a token row
    #[arg(long, default_value_t = 64)]
    pub hidden: usize,
    /// Number of routed experts per layer
    #[arg(long, default_value_t = 8)]
    pub experts: usize,
    /// Number of experts per token
    #[arg(long, default_value_t = 2)]
    pub top_k: usize,
    /// Intermediate size of an expert
    #[arg(long, default_value_t = 96)]
    pub width: usize,
    /// Number of decoder layers; families that begin with dense layers get one dense layer
    #[arg(long, default_value_t = 2)]
    pub layers: usize,
    /// Format of the weights
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: SynthFormat,
    /// Seed of the weights; the same seed gives the same bytes
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Largest size of a safetensors file, in MiB
    #[arg(long, default_value_t = 4096)]
    pub max_shard_mib: u64,
}

impl SynthArgs {
    fn config(&self) -> SynthConfig {
        SynthConfig {
            family: self.family.clone(),
            hidden: self.hidden,
            experts: self.experts,
            top_k: self.top_k,
            width: self.width,
            layers: self.layers,
            format: self.dtype,
            seed: self.seed,
            max_shard_bytes: self.max_shard_mib << 20,
        }
    }
}

/// Writes the checkpoint, with a progress bar on the terminal.
///
/// # Errors
/// If the folder is not empty, no checkpoint has these sizes, or the files cannot be written.
pub fn run(args: &SynthArgs) -> Result<ExitCode, CommandError> {
    if let Some(found) = first_file(&args.out) {
        return Err(CommandError::usage(format!(
            "{} is not empty (it contains `{found}`); expected an empty or new folder, so that nothing is overwritten: choose \
             another --out, or empty the folder",
            args.out.display()
        )));
    }
    let written = write(args).map_err(|error| match error {
        SynthError::Io { .. } | SynthError::Space { .. } => CommandError::failed(error),
        error => CommandError::usage(error),
    });
    println!("wrote {} of weights to {}", super::units::bytes(written?), args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// Name of an entry of the folder, if it has any.
fn first_file(folder: &Path) -> Option<String> {
    let entry = std::fs::read_dir(folder).ok()?.flatten().next()?;
    Some(entry.file_name().to_string_lossy().into_owned())
}

fn write(args: &SynthArgs) -> Result<u64, SynthError> {
    let config = args.config();
    let total = synth::size(&config)?;
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template("{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.expect("a constant template"));
    let written = synth::write_with(&config, &args.out, &mut |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    written.map(|()| total)
}
