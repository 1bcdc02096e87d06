//! Events, and asynchronous copies.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

use crate::device::{Device, DeviceError, Stream, check};

/// A CUDA event: a point in the work of a stream, with its time.
#[derive(Debug)]
pub struct Event {
    raw: sys::CUevent,
    device: Device,
}

// SAFETY: driver handles may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Creates an event, which counts as passed until it is recorded.
    pub fn new(device: &Device) -> Result<Event, DeviceError> {
        device.bind()?;
        let raw = check("cuEventCreate", result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT))?;
        Ok(Event { raw, device: device.clone() })
    }

    /// Records the event after all work that `stream` has so far.
    pub fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: event and stream are alive.
        check("cuEventRecord", unsafe { result::event::record(self.raw, stream.raw()) })
    }

    /// Makes later work on `stream` wait for this event.
    pub fn wait_event(&self, stream: &Stream) -> Result<(), DeviceError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive.
        check("cuStreamWaitEvent", unsafe { result::stream::wait_event(stream.raw(), self.raw, flags) })
    }

    /// Whether all work before the event has ended.
    ///
    /// # Errors
    /// The first error of any earlier work.
    pub fn has_passed(&self) -> Result<bool, DeviceError> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.raw) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(DeviceError::Driver { call: "cuEventQuery", error }),
        }
    }

    /// Time between two events that have passed.
    pub fn since(&self, earlier: &Event) -> Result<Duration, DeviceError> {
        // SAFETY: both events are alive.
        let millis = check("cuEventElapsedTime", unsafe { result::event::elapsed(earlier.raw, self.raw) })?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the event is destroyed once. An error cannot be handled here.
            let _ = unsafe { result::event::destroy(self.raw) };
        }
    }
}

/// Enqueues a copy from pinned host memory to device memory.
///
/// # Safety
/// Source and destination have `bytes` bytes and live until the copy has ended. Until then nothing else writes the source,
/// and nothing else reads or writes the destination.
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

/// Enqueues a copy from device memory to pinned host memory.
///
/// # Safety
/// The conditions of [`copy_to_device`].
pub unsafe fn copy_to_host(stream: &Stream, to: *mut u8, from: u64, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    let status = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, stream.raw()) };
    check("cuMemcpyDtoHAsync", status.result())
}

/// Enqueues a fill of device memory.
///
/// # Safety
/// `at` is device memory of `bytes` bytes, which nothing else uses until the fill has ended.
pub unsafe fn fill(stream: &Stream, at: u64, byte: u8, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemsetD8Async", unsafe { result::memset_d8_async(at, byte, bytes, stream.raw()) })
}

/// Enqueues a fill of `count` words of device memory.
///
/// # Safety
/// As [`fill`].
pub unsafe fn fill_words(stream: &Stream, at: u64, word: u32, count: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(at, word, count, stream.raw()) }.result())
}

/// Enqueues a copy within device memory.
///
/// # Safety
/// The conditions of [`copy_to_device`].
pub unsafe fn copy_on_device(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    let status = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.raw()) };
    check("cuMemcpyDtoDAsync", status.result())
}
