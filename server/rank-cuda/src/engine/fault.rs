//! Why the engine of a GPU rank fails.

use expertd_kernels::device::DeviceError;
use expertd_kernels::launch::LaunchError;
use expertd_kernels::params::DeviceFault;
use expertd_rank::StepFault;

/// Why the engine of a GPU rank fails.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub(super) enum CudaFault {
    #[error(transparent)]
    Driver(#[from] DeviceError),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error(transparent)]
    Kernel(#[from] DeviceFault),
    #[error("{0}")]
    Stuck(String),
}

impl From<CudaFault> for StepFault {
    fn from(fault: CudaFault) -> Self {
        StepFault::engine(fault)
    }
}
