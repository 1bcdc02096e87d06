//! The two sets of kernels in a build: those made for Hopper, and the portable ones for NVIDIA GPUs from compute capability 8.0 on. A process
//! uses one of them, on the same packed weights.

use std::sync::atomic::{AtomicBool, Ordering};

/// A set of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelPath {
    /// For compute capability 9.0.
    Hopper,
    /// For compute capability 8.0 and newer: machine code for 8.x, PTX that the driver compiles for the others.
    Portable,
}

impl std::fmt::Display for KernelPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            KernelPath::Hopper => "kernels for Hopper",
            KernelPath::Portable => "portable kernels",
        })
    }
}

static IS_PORTABLE: AtomicBool = AtomicBool::new(false);

impl KernelPath {
    /// Makes all later launches of this process use this set, which is otherwise Hopper's.
    pub fn choose(self) {
        IS_PORTABLE.store(self == KernelPath::Portable, Ordering::Relaxed);
    }

    /// The set that this process uses.
    #[must_use]
    pub fn chosen() -> Self {
        if IS_PORTABLE.load(Ordering::Relaxed) { KernelPath::Portable } else { KernelPath::Hopper }
    }
}
