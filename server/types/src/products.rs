//! Which products of experts are computed in FP8.

use serde::{Deserialize, Serialize};

/// How the products of experts in a narrow format are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[serde(rename_all = "lowercase")]
pub enum Fp8Compute {
    /// Rows are also quantised to FP8, in blocks of 128 elements.
    Fp8,
    /// Weights are widened to bf16 on GPUs, to f32 on CPUs, and rows keep that precision.
    #[default]
    Bf16,
}

impl std::fmt::Display for Fp8Compute {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Fp8Compute::Fp8 => "fp8",
            Fp8Compute::Bf16 => "bf16",
        })
    }
}

/// The stored formats whose experts multiply rows in FP8, as docs/models.md defines ("FP8 products"). Rows for all other experts keep
/// the precision of the device: bf16 on GPUs, f32 on CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fp8Products {
    /// Experts that are stored in FP8.
    pub of_fp8: bool,
    /// Experts that are stored in MXFP4.
    pub of_mxfp4: bool,
}

impl Fp8Products {
    /// No experts.
    pub const NONE: Self = Fp8Products { of_fp8: false, of_mxfp4: false };
    /// Experts that are stored in FP8, and no others.
    pub const OF_FP8: Self = Fp8Products { of_fp8: true, of_mxfp4: false };
    /// Experts that are stored in MXFP4, and no others.
    pub const OF_MXFP4: Self = Fp8Products { of_fp8: false, of_mxfp4: true };
    /// Experts in both formats.
    pub const OF_BOTH: Self = Fp8Products { of_fp8: true, of_mxfp4: true };
}
