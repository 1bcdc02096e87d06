//! The parts of the CUDA driver that sessions use. The library is loaded when it is first needed.

#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute, CUresult};

use crate::client::SessionError;

/// Whether the driver's library can be loaded. If not, nothing else of CUDA sessions works.
#[must_use]
pub fn driver_present() -> bool {
    // SAFETY: the call only loads the library.
    unsafe { sys::is_culib_present() }
}

/// The error of a driver call.
pub(super) fn check(call: &'static str, status: CUresult) -> Result<(), SessionError> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(SessionError::Driver { call, error: format!("{status:?}") })
}

/// A GPU and its primary context, which the CUDA runtime and PyTorch use as well.
#[derive(Debug)]
pub struct Gpu {
    ordinal: i32,
    device: CUdevice,
    context: CUcontext,
    /// The process that opened the GPU. A fork cannot use its context, and releases nothing of it.
    process: u32,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Makes a context current until it is dropped.
pub(super) struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let mut left = ptr::null_mut();
        // SAFETY: `Gpu::enter` pushed a context on this thread.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut left) };
    }
}

impl Gpu {
    /// Opens a GPU by its number among those that this process sees.
    ///
    /// # Errors
    /// [`SessionError::NoDriver`], or the driver's error if there is no such GPU.
    pub fn open(ordinal: u32) -> Result<Arc<Gpu>, SessionError> {
        if !driver_present() {
            return Err(SessionError::NoDriver);
        }
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the arguments are valid for writes. The context is released in drop.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, ordinal))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        Ok(Arc::new(Gpu { ordinal, device, context, process: std::process::id() }))
    }

    /// Number of the GPU among those that this process sees.
    #[must_use]
    pub const fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// The GPU's UUID.
    ///
    /// # Errors
    /// The driver's error.
    pub fn uuid(&self) -> Result<[u8; 16], SessionError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the argument is valid for writes.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        Ok(uuid.bytes.map(i8::cast_unsigned))
    }

    /// Checks that streams of this GPU support memory operations.
    ///
    /// # Errors
    /// [`SessionError::Device`] if they do not.
    pub fn check_memory_operations(&self) -> Result<(), SessionError> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        let mut can = 0;
        // SAFETY: the argument is valid for writes.
        check("cuDeviceGetAttribute", unsafe {
            sys::cuDeviceGetAttribute(&raw mut can, attribute, self.device)
        })?;
        if can == 0 {
            let ordinal = self.ordinal;
            return Err(SessionError::Device(format!(
                "GPU {ordinal} has no 64-bit memory operations of streams, which CUDA sessions need; use a host session"
            )));
        }
        Ok(())
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// In a fork of the process that opened the GPU, and the driver's error.
    pub(super) fn enter(&self) -> Result<Entered, SessionError> {
        if self.process != std::process::id() {
            let opener = self.process;
            return Err(SessionError::Device(format!(
                "the GPU was opened in process {opener}, of which this process is a fork; open a session in each process"
            )));
        }
        // SAFETY: the context is retained as long as `self` lives.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        // SAFETY: retained once in `open`.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}
