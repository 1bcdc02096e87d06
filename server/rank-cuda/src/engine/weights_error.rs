//! Why a rank's weights could not be packed or mapped.

use expertd_ipc::SealedError;
use expertd_kernels::device::DeviceError;
use expertd_model::ModelError;
use expertd_types::LayerId;

use crate::experts::UploadError;

/// Why a rank's weights could not be packed or mapped.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WeightsError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// An expert could not be uploaded.
    #[error("layer {layer}: {source}")]
    Upload {
        /// The layer of the expert.
        layer: LayerId,
        /// The cause.
        source: UploadError,
    },
    /// The CUDA driver failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The index cannot be written or mapped.
    #[error(transparent)]
    Memory(#[from] SealedError),
    /// The GPU cannot be used.
    #[error("{0}")]
    Gpu(String),
    /// Threads cannot be started.
    #[error("cannot start the threads that load weights: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The device has too little memory.
    #[error(
        "GPU {gpu} has {} MiB free of {} MiB, and this rank's weights and a reserve{} need {} MiB; use more {}", .free >> 20,
        .total >> 20, if *.gpu_ranks == 1 { String::new() } else { format!(" for each of {gpu_ranks} ranks on it") },
        .needed >> 20, if *.gpu_ranks == 1 { "ranks" } else { "GPUs" }
    )]
    Room {
        /// The GPU.
        gpu: u32,
        /// Number of ranks on the GPU.
        gpu_ranks: u32,
        /// Free bytes.
        free: u64,
        /// All bytes.
        total: u64,
        /// Needed bytes.
        needed: u64,
    },
    /// The index or the memory is of something else.
    #[error("packed weights: expected {expected}, found {found}")]
    Contents {
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
}

impl WeightsError {
    /// Whether the only cause is that the weights do not fit beside what is in the device's memory.
    pub(crate) fn lacks_room(&self) -> bool {
        matches!(self, WeightsError::Room { needed, total, .. } if needed <= total)
    }
}
