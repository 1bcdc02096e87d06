//! GPUs, and owners of device memory, pinned host memory, streams and graphs, over the driver API. Drops never panic.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

mod memory;
mod shareable;
mod stream;

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, result};

pub use memory::{Buffer, Mailbox, Pinned, Plain, fill_device, read_device, write_device};
pub use shareable::{ShareableMemory, Unmapped};
pub use stream::{Graph, Stream};

/// Errors of the CUDA driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum DeviceError {
    #[error("the CUDA driver (libcuda.so.1) was not found: install NVIDIA's driver, or use --device cpu")]
    NoDriver,
    #[error("{call} failed: {error:?}")]
    Driver { call: &'static str, error: result::DriverError },
}

pub(crate) fn check<T>(
    call: &'static str,
    outcome: Result<T, result::DriverError>,
) -> Result<T, DeviceError> {
    outcome.map_err(|error| DeviceError::Driver { call, error })
}

/// Whether the driver's library can be loaded. If not, nothing else of this module may be called.
#[must_use]
pub fn driver_present() -> bool {
    // SAFETY: the call only loads the library.
    unsafe { sys::is_culib_present() }
}

/// One GPU with its primary context.
#[derive(Clone, Debug)]
pub struct Device {
    context: Arc<CudaContext>,
}

impl Device {
    /// Number of GPUs that this process may use.
    ///
    /// # Errors
    /// [`DeviceError::NoDriver`] without a driver; the driver's error if it does not start.
    pub fn count() -> Result<u32, DeviceError> {
        if !driver_present() {
            return Err(DeviceError::NoDriver);
        }
        check("cuDeviceGetCount", CudaContext::device_count()).map(|count| u32::try_from(count).unwrap_or(0))
    }

    /// Opens a GPU and makes its context current on this thread.
    ///
    /// # Errors
    /// As [`Device::count`], and the driver's error if there is no such GPU.
    pub fn open(ordinal: u32) -> Result<Device, DeviceError> {
        if !driver_present() {
            return Err(DeviceError::NoDriver);
        }
        let context = check("opening the device", CudaContext::new(ordinal as usize))?;
        // SAFETY: this module does not use cudarc's buffers, which the tracked events would order.
        unsafe { context.disable_event_tracking() };
        Ok(Device { context })
    }

    /// Makes the context current on the calling thread.
    pub fn bind(&self) -> Result<(), DeviceError> {
        check("cuCtxSetCurrent", self.context.bind_to_thread())
    }

    /// Number of the GPU among those that this process may use.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        u32::try_from(self.context.ordinal()).unwrap_or(u32::MAX)
    }

    /// The GPU's name.
    pub fn name(&self) -> Result<String, DeviceError> {
        check("cuDeviceGetName", self.context.name())
    }

    /// The GPU's UUID, or that of the part of a GPU.
    pub fn uuid(&self) -> Result<[u8; 16], DeviceError> {
        let uuid = check("cuDeviceGetUuid", self.context.uuid())?;
        Ok(uuid.bytes.map(i8::cast_unsigned))
    }

    /// Compute capability, as `(major, minor)`.
    pub fn capability(&self) -> Result<(i32, i32), DeviceError> {
        check("cuDeviceGetAttribute", self.context.compute_capability())
    }

    /// Number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> Result<u32, DeviceError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        check("cuDeviceGetAttribute", self.context.attribute(attribute))
            .map(|n| u32::try_from(n).unwrap_or(0))
    }

    /// Whether its memory can be exported as a descriptor, as [`ShareableMemory`] is.
    pub fn exports_memory(&self) -> Result<bool, DeviceError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
        check("cuDeviceGetAttribute", self.context.attribute(attribute)).map(|can| can != 0)
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize), DeviceError> {
        check("cuMemGetInfo", self.context.mem_get_info())
    }

    /// Whether this GPU can load and store `other`'s memory.
    pub fn reaches(&self, other: &Device) -> Result<bool, DeviceError> {
        Ok(self.ordinal() != other.ordinal() && self.reaches_number(other.ordinal().cast_signed())?)
    }

    /// Whether this GPU can load and store the memory of the GPU with number `other`.
    pub fn reaches_number(&self, other: i32) -> Result<bool, DeviceError> {
        reaches(self.context.cu_device(), check("cuDeviceGet", result::device::get(other))?)
    }

    /// Lets this GPU's kernels load and store `other`'s memory; returns false if they cannot.
    pub fn map_peer(&self, other: &Device) -> Result<bool, DeviceError> {
        if !self.reaches(other)? {
            return Ok(false);
        }
        self.bind()?;
        // SAFETY: both contexts are alive, and the call takes no flags.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context.cu_ctx(), 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
            status => check("cuCtxEnablePeerAccess", status.result()).map(|()| true),
        }
    }

    /// Waits until all work on the device has ended.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        check("cuCtxSynchronize", self.context.synchronize())
    }

    /// Creates a stream.
    pub fn stream(&self) -> Result<Stream, DeviceError> {
        self.bind()?;
        let raw = check("cuStreamCreate", result::stream::create(result::stream::StreamKind::NonBlocking))?;
        Ok(Stream::new(raw, self.clone()))
    }
}

/// The UUID of the GPU with this number.
pub fn uuid_of(number: i32) -> Result<[u8; 16], DeviceError> {
    let device = check("cuDeviceGet", result::device::get(number))?;
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the argument is valid for writes.
    let status = unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, device) };
    check("cuDeviceGetUuid", status.result())?;
    Ok(uuid.bytes.map(i8::cast_unsigned))
}

fn reaches(own: sys::CUdevice, other: sys::CUdevice) -> Result<bool, DeviceError> {
    let mut can = 0;
    // SAFETY: the driver returned both devices, and `can` is valid for writes.
    let status = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, own, other) };
    Ok(own == other || check("cuDeviceCanAccessPeer", status.result()).map(|()| can != 0)?)
}

/// Whether the GPU with number `own` can load and store the memory of the one with number `other`, as it can its own. Makes no context.
pub fn reaches_device(own: u32, other: u32) -> Result<bool, DeviceError> {
    let device = |number: u32| check("cuDeviceGet", result::device::get(number.cast_signed()));
    reaches(device(own)?, device(other)?)
}

/// Properties of a GPU.
#[derive(Clone, Debug)]
pub struct Description {
    /// Its name.
    pub name: String,
    /// Its compute capability, as `(major, minor)`.
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
}

/// Describes a GPU, whose number is less than [`Device::count`]. Makes no context.
pub fn describe_device(ordinal: u32) -> Result<Description, DeviceError> {
    let device = check("cuDeviceGet", result::device::get(ordinal.cast_signed()))?;
    let attribute = |attribute| {
        // SAFETY: the driver has just returned the device.
        check("cuDeviceGetAttribute", unsafe { result::device::get_attribute(device, attribute) })
    };
    let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let multiprocessors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    Ok(Description {
        name: check("cuDeviceGetName", result::device::get_name(device))?,
        capability: (major, minor),
        multiprocessors: u32::try_from(multiprocessors).unwrap_or(0),
    })
}

/// The newest CUDA version that the driver supports, as `(major, minor)`.
///
/// # Errors
/// [`DeviceError::NoDriver`], or the driver's error.
pub fn driver_version() -> Result<(i32, i32), DeviceError> {
    if !driver_present() {
        return Err(DeviceError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the call works before initialisation, and `version` is valid for writes.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) }.result())?;
    Ok((version / 1000, version % 1000 / 10))
}
