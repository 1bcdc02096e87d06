//! Which instructions the kernels use.

use std::fmt;
use std::sync::OnceLock;

/// A set of CPU instructions that kernels exist for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// What the target has at least (SSE2 on x86-64, NEON on aarch64), left to the compiler.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW and VL.
    Avx512,
}

/// Environment variable that lowers the level: `portable`, `avx2` or `avx512`. Read once.
pub const LEVEL_ENV: &str = "EXPERTD_CPU";

impl Level {
    /// All of them, lowest first.
    pub const ALL: [Level; 3] = [Level::Portable, Level::Avx2, Level::Avx512];

    /// The level of this process: the best that the CPU supports, or what [`LEVEL_ENV`] asks for if the CPU has it.
    #[must_use]
    pub fn active() -> Level {
        static ACTIVE: OnceLock<Level> = OnceLock::new();
        *ACTIVE.get_or_init(|| {
            let best = Level::best();
            let Ok(wanted) = std::env::var(LEVEL_ENV) else { return best };
            match Level::ALL.into_iter().find(|level| level.name() == wanted) {
                Some(level) if level.is_supported() => level,
                Some(level) => {
                    tracing::warn!("{LEVEL_ENV}={level}, which this CPU lacks: using {best}");
                    best
                }
                None => {
                    tracing::warn!("{LEVEL_ENV}={wanted} is none of portable, avx2, avx512: using {best}");
                    best
                }
            }
        })
    }

    /// The best level that this CPU supports.
    #[must_use]
    pub fn best() -> Level {
        Level::ALL.into_iter().rev().find(|level| level.is_supported()).unwrap_or(Level::Portable)
    }

    /// Whether this CPU has the instructions.
    #[must_use]
    pub fn is_supported(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_supported()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => false,
        }
    }

    /// Its name, as [`LEVEL_ENV`] spells it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
        }
    }

    /// Output features of a panel of packed weights: two vectors.
    pub(crate) const fn panel(self) -> usize {
        match self {
            Level::Portable | Level::Avx2 => 16,
            Level::Avx512 => 32,
        }
    }

    /// Most rows of a register tile.
    pub(crate) const fn tile(self) -> usize {
        match self {
            Level::Portable => 4,
            Level::Avx2 => 6,
            Level::Avx512 => 12,
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
