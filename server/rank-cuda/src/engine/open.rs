//! The GPU of a rank or loader.

use expertd_kernels::device::{Description, Device, DeviceError, describe_device, driver_version};
use expertd_types::GpuPath;

use crate::gpus::ptx_refusal;
use crate::{GPU_PATH, GpuFacts};

/// The setting of the service, in its ranks and loaders.
///
/// # Errors
/// If the variable has an unknown value.
pub(super) fn gpu_path() -> Result<GpuPath, String> {
    match std::env::var(GPU_PATH) {
        Ok(text) => text.parse().map_err(|error| format!("{GPU_PATH}: {error}")),
        Err(_) => Ok(GpuPath::Auto),
    }
}

/// The properties of a GPU that are known without a context on it.
///
/// # Errors
/// The driver's error.
pub(super) fn facts_of(gpu: u32) -> Result<GpuFacts, DeviceError> {
    let Description { name, capability, multiprocessors } = describe_device(gpu)?;
    Ok(GpuFacts { name, capability, multiprocessors })
}

/// Opens the GPU of a rank, checks that ranks can use it, and chooses the kernels of this process.
///
/// # Errors
/// What was found and what to do.
pub(crate) fn open(gpu: u32) -> Result<Device, String> {
    let failed = |error: DeviceError| error.to_string();
    let present = Device::count().map_err(failed)?;
    if gpu >= present {
        return Err(format!(
            "a rank needs GPU {gpu}, but this process sees {present} GPUs; lower --ranks, or look at --gpus and CUDA_VISIBLE_DEVICES"
        ));
    }
    let device = Device::open(gpu).map_err(failed)?;
    let (facts, path) = (facts_of(gpu).map_err(failed)?, gpu_path()?);
    let kernels = facts.kernels(path).ok_or_else(|| facts.refusal(gpu))?;
    if facts.needs_ptx(path) {
        let driver = driver_version().map_err(failed)?;
        if let Some(refusal) = ptx_refusal(expertd_kernels::NVCC, driver) {
            return Err(format!("GPU {gpu} ({}): {refusal}", facts.name));
        }
    }
    if !device.exports_memory().map_err(failed)? {
        return Err(format!(
            "GPU {gpu} ({}) cannot export memory as a descriptor, which weights that outlive ranks need (a virtual GPU, or WSL?); \
             use --device cpu",
            facts.name
        ));
    }
    kernels.choose();
    Ok(device)
}
