//! Why the engine of a GPU rank fails.

use expertd_kernels::device::DeviceError;
use expertd_kernels::launch::LaunchError;
use expertd_kernels::params::DeviceFault;
use expertd_rank::StepFault;

/// Why the engine of a GPU rank fails.
#[derive(Debug, thiserror::Error)]
pub(super) enum CudaFault {
    /// The CUDA driver failed.
    #[error(transparent)]
    Driver(#[from] DeviceError),
    /// A kernel could not be launched.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A kernel stored a fault in the error word.
    #[error(transparent)]
    Kernel(#[from] DeviceFault),
    /// The GPU stopped working, or stopped making progress.
    #[error("{0}")]
    Stuck(String),
}

impl From<CudaFault> for StepFault {
    fn from(fault: CudaFault) -> Self {
        StepFault::engine(fault)
    }
}
