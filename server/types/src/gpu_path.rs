//! Which kernels GPU ranks run.

use serde::{Deserialize, Serialize};

/// Which kernels GPU ranks run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum GpuPath {
    /// Those made for Hopper on Hopper, the portable ones on other GPUs.
    #[default]
    Auto,
    /// The portable ones, also on Hopper.
    Portable,
}

impl std::fmt::Display for GpuPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            GpuPath::Auto => "auto",
            GpuPath::Portable => "portable",
        })
    }
}

impl std::str::FromStr for GpuPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(GpuPath::Auto),
            "portable" => Ok(GpuPath::Portable),
            other => Err(format!("`{other}` is neither auto nor portable")),
        }
    }
}
