//! The GPU of a rank or loader.

use expertd_kernels::device::{Device, DeviceError};

use crate::GpuFacts;

/// Opens the GPU of a rank and checks that the kernels support it.
///
/// # Errors
/// What was found and what to do.
pub(super) fn open(gpu: u32) -> Result<Device, String> {
    let failed = |error: DeviceError| error.to_string();
    let present = Device::count().map_err(failed)?;
    if gpu >= present {
        return Err(format!(
            "a rank needs GPU {gpu}, but this process sees {present} GPUs; lower --ranks, or look at --gpus and CUDA_VISIBLE_DEVICES"
        ));
    }
    let device = Device::open(gpu).map_err(failed)?;
    let capability = device.capability().map_err(failed)?;
    let facts = GpuFacts { name: device.name().unwrap_or_default(), capability };
    if facts.is_supported() { Ok(device) } else { Err(facts.refusal(gpu)) }
}
