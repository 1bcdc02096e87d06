//! Events, and copies that run beside kernels.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use crate::device::{Device, DeviceError, Stream, check};

/// A point in the work of a stream, with its time.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    device: Device,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event that counts as passed until it is recorded.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device) -> Result<Event, DeviceError> {
        device.bind()?;
        let raw = check("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(Event { raw, device: device.clone() })
    }

    /// Marks what `stream` has been given so far.
    ///
    /// # Errors
    /// The driver's.
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both are alive.
        check("cuEventRecord", unsafe { result::event::record(self.raw, stream.raw()) })
    }

    /// What `stream` is given from now on begins when the event has passed.
    ///
    /// # Errors
    /// The driver's.
    pub fn hold(&self, stream: &Stream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream.raw(), self.raw, flags) })
    }

    /// Whether everything before it is done.
    ///
    /// # Errors
    /// The first error of anything that ran.
    pub fn has_passed(&self) -> Result<bool, DeviceError> {
        // SAFETY: a live event.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(DeviceError::Driver { call: "cuEventQuery", error }),
        }
    }

    /// Time between two events that have passed.
    ///
    /// # Errors
    /// The driver's.
    pub fn since(&self, earlier: &Event) -> Result<Duration, DeviceError> {
        // SAFETY: both are alive.
        let millis = check("cuEventElapsedTime", unsafe { result::event::elapsed(earlier.raw, self.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: destroyed once. Nothing can be done about an error here.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// Enqueues a copy from pinned host memory.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// Both places have `bytes` bytes, live until the copy is done, and nobody else writes to them meanwhile.
pub unsafe fn copy_to_device(
    stream: &Stream,
    to: u64,
    from: *const u8,
    bytes: usize,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, stream.raw()) };
    check("cuMemcpyHtoDAsync", status.result())
}

/// Enqueues a copy to pinned host memory.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// As for [`copy_to_device`]; nobody reads the host's place before the copy is done.
pub unsafe fn copy_to_host(stream: &Stream, to: *mut u8, from: u64, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.raw()) };
    check("cuMemcpyDtoHAsync", status.result())
}

/// Enqueues setting bytes of device memory.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// The place has `bytes` bytes, which nobody else uses until it is done.
pub unsafe fn fill(stream: &Stream, at: u64, byte: u8, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemsetD8Async", unsafe { result::memset_d8_async(at, byte, bytes, stream.raw()) })
}
