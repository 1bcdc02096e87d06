//! SIMD instruction sets that the kernels are compiled for.

use std::fmt;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// A CPU instruction set that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SimdLevel {
    /// The target's baseline (SSE2 on x86-64, NEON on aarch64), vectorised by the compiler.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

/// Environment variable that lowers the level: `portable`, `avx2` or `avx512`. It is read once.
pub const SIMD_LEVEL_ENV: &str = "EXPERTD_CPU";

impl SimdLevel {
    /// All levels, lowest first.
    pub const ALL: [SimdLevel; 3] = [SimdLevel::Portable, SimdLevel::Avx2, SimdLevel::Avx512];

    /// The level of this process: the one that [`SIMD_LEVEL_ENV`] names if the CPU supports it, otherwise the best
    /// supported one.
    #[must_use]
    pub fn active() -> SimdLevel {
        static ACTIVE: OnceLock<SimdLevel> = OnceLock::new();
        *ACTIVE.get_or_init(|| {
            let best = SimdLevel::best();
            let Ok(wanted) = std::env::var(SIMD_LEVEL_ENV) else { return best };
            match SimdLevel::ALL.into_iter().find(|level| level.name() == wanted) {
                Some(level) if level.is_supported() => level,
                Some(level) => {
                    tracing::warn!("{SIMD_LEVEL_ENV}={level} is not supported by this CPU: using {best}");
                    best
                }
                None => {
                    tracing::warn!("{SIMD_LEVEL_ENV}={wanted} is unknown (expected portable, avx2 or avx512): using {best}");
                    best
                }
            }
        })
    }

    /// The best level that this CPU supports.
    #[must_use]
    pub fn best() -> SimdLevel {
        SimdLevel::ALL.into_iter().rev().find(|level| level.is_supported()).unwrap_or(SimdLevel::Portable)
    }

    /// Whether this CPU supports the level.
    #[must_use]
    pub fn is_supported(self) -> bool {
        match self {
            SimdLevel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx512 => {
                SimdLevel::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            SimdLevel::Avx2 | SimdLevel::Avx512 => false,
        }
    }

    /// The name as [`SIMD_LEVEL_ENV`] spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            SimdLevel::Portable => "portable",
            SimdLevel::Avx2 => "avx2",
            SimdLevel::Avx512 => "avx512",
        }
    }

    /// Output features per panel of packed weights: two vectors.
    #[must_use]
    pub const fn panel_width(self) -> usize {
        match self {
            SimdLevel::Portable | SimdLevel::Avx2 => 16,
            SimdLevel::Avx512 => 32,
        }
    }

    /// Largest number of rows of a register tile.
    pub(crate) const fn max_tile_rows(self) -> usize {
        match self {
            SimdLevel::Portable => 4,
            SimdLevel::Avx2 => 6,
            SimdLevel::Avx512 => 12,
        }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
