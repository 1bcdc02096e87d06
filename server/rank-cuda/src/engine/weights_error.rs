//! Why a rank's weights could not be packed or mapped.

use expertd_ipc::SealedError;
use expertd_kernels::device::DeviceError;
use expertd_model::ModelError;
use expertd_types::LayerId;

use crate::experts::UploadError;

/// Why a rank's weights could not be packed or mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub(crate) enum WeightsError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("layer {layer}: {source}")]
    Upload { layer: LayerId, source: UploadError },
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Memory(#[from] SealedError),
    #[error("{0}")]
    Gpu(String),
    #[error("cannot start the threads that load weights: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    #[error(
        "GPU {gpu} has {} MiB free of {} MiB, and this rank's weights and a reserve{} need {} MiB; use more {}", .free >> 20,
        .total >> 20, if *.gpu_ranks == 1 { String::new() } else { format!(" for each of {gpu_ranks} ranks on it") },
        .needed >> 20, if *.gpu_ranks == 1 { "ranks, or beside CPU ranks a smaller --gpu-memory" } else { "GPUs" }
    )]
    Room { gpu: u32, gpu_ranks: u32, free: u64, total: u64, needed: u64 },
    #[error("packed weights: expected {expected}, found {found}")]
    Contents { expected: String, found: String },
}

impl WeightsError {
    /// Whether the only cause is that the weights do not fit beside what is in the device's memory.
    pub(crate) fn lacks_room(&self) -> bool {
        matches!(self, WeightsError::Room { needed, total, .. } if needed <= total)
    }
}
