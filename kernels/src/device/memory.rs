//! Memory of devices, and of the host where devices reach it.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr};

use super::{Device, DeviceError, check};

/// Plain-old-data that may be copied between host and device byte by byte.
///
/// # Safety
/// Any bytes are a valid value, and there is no padding that matters.
pub unsafe trait Plain: Copy + Default {}
// SAFETY: integers and floats.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: integers only, laid out without gaps.
unsafe impl Plain for crate::params::SlotState {}
// SAFETY: as above.
unsafe impl Plain for crate::params::StepRequest {}
// SAFETY: as above.
unsafe impl Plain for crate::params::Completion {}
// SAFETY: as above.
unsafe impl Plain for crate::params::GateLayer {}
// SAFETY: as above.
unsafe impl Plain for crate::params::Segment {}
// SAFETY: as above.
unsafe impl Plain for crate::experts::LayerWeights {}

/// An array in device memory.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    address: CUdeviceptr,
    len: usize,
    device: Device,
    kind: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Allocates `len` elements of zeros (at least one, so that the address is never null).
    ///
    /// # Errors
    /// When memory is short.
    pub fn zeroed(device: &Device, len: usize) -> Result<Buffer<T>, DeviceError> {
        device.bind()?;
        let bytes = len.max(1) * size_of::<T>();
        // SAFETY: a current context; the memory is set before anything reads it.
        let address = check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        let buffer = Buffer { address, len, device: device.clone(), kind: PhantomData };
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// Allocates and copies `values`.
    ///
    /// # Errors
    /// When memory is short.
    pub fn from_slice(device: &Device, values: &[T]) -> Result<Buffer<T>, DeviceError> {
        let buffer = Buffer::zeroed(device, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Device address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_bytes(&self, byte: u8) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: within the allocation.
        check("cuMemsetD8", unsafe {
            result::memset_d8_sync(self.address, byte, self.len * size_of::<T>())
        })?;
        // Memset of device memory returns before it is done.
        self.device.synchronize()
    }

    /// Copies values to the start of the array; waits until they are there.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Panics
    /// When there are more values than elements.
    pub fn write(&self, values: &[T]) -> Result<(), DeviceError> {
        assert!(values.len() <= self.len, "{} values into a buffer of {}", values.len(), self.len);
        if values.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: within the allocation (checked above).
        check("cuMemcpyHtoD", unsafe { result::memcpy_htod_sync(self.address, values) })
    }

    /// Copies the whole array to the host.
    ///
    /// # Errors
    /// The driver's.
    pub fn read(&self) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::default(); self.len];
        if self.len != 0 {
            self.device.bind()?;
            // SAFETY: as long as the allocation; any bytes are a `T`.
            check("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut values, self.address) })?;
        }
        Ok(values)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: freed once. Nothing can be done about an error here.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Copies bytes from device memory at an address; what a window's resolution needs.
///
/// # Errors
/// The driver's words.
///
/// # Safety
/// `address` must be readable device memory of the current context for the whole length.
pub unsafe fn read_device(address: u64, bytes: &mut [u8]) -> Result<(), String> {
    // SAFETY: the caller's promise.
    unsafe { result::memcpy_dtoh_sync(bytes, address) }.map_err(|error| format!("{error:?}"))
}

/// Sets bytes of device memory.
///
/// # Errors
/// The driver's.
///
/// # Safety
/// `address` must be writable device memory of the current context for the whole length, and nobody may be using it.
pub unsafe fn fill_device(address: u64, byte: u8, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemsetD8", unsafe { result::memset_d8_sync(address, byte, bytes) })?;
    check("cuCtxSynchronize", result::ctx::synchronize())
}

/// One value in pinned host memory that host and device take turns on.
#[derive(Debug)]
pub struct Mailbox<T: Plain> {
    host: *mut T,
    address: CUdeviceptr,
    device: Device,
}

// SAFETY: an address; accesses are volatile and ordered by the protocol of its users.
unsafe impl<T: Plain> Send for Mailbox<T> {}

impl<T: Plain> Mailbox<T> {
    /// Allocates it, with `value`.
    ///
    /// # Errors
    /// When memory cannot be pinned.
    pub fn new(device: &Device, value: T) -> Result<Mailbox<T>, DeviceError> {
        device.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a current context; freed in drop.
        let host = check("cuMemHostAlloc", unsafe { result::malloc_host(size_of::<T>().max(64), flags) })?;
        let mut address = 0;
        // SAFETY: allocated just now with device mapping.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        let mailbox = Mailbox { host: host.cast(), address, device: device.clone() };
        check("cuMemHostGetDevicePointer", status.result())?;
        mailbox.put(value);
        Ok(mailbox)
    }

    /// Where the device sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Stores a value; a launch afterwards makes the device see it.
    pub fn put(&self, value: T) {
        // SAFETY: live memory of this size, aligned to a page.
        unsafe { ptr::write_volatile(self.host, value) };
    }

    /// Reads what the device stored, after [`first_word`](Self::first_word) told that it is there.
    #[must_use]
    pub fn get(&self) -> T {
        // SAFETY: as in `put`; any bytes are a `T`.
        unsafe { ptr::read_volatile(self.host) }
    }

    /// The first eight bytes, with acquire: what comes after them in the struct was stored before.
    ///
    /// # Panics
    /// When `T` is smaller.
    #[must_use]
    pub fn first_word(&self) -> u64 {
        assert!(size_of::<T>() >= 8, "a mailbox with a sequence has room for it");
        // SAFETY: at least eight bytes, aligned to a page.
        unsafe { AtomicU64::from_ptr(self.host.cast()) }.load(Ordering::Acquire)
    }
}

impl<T: Plain> Drop for Mailbox<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: freed once. Nothing can be done about an error here.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}

/// Host memory that the device may address: pages of this process's mapping, pinned while this lives.
#[derive(Debug)]
pub struct Pinned<'a> {
    host: *mut c_void,
    address: CUdeviceptr,
    device: Device,
    mapping: PhantomData<&'a mut [u8]>,
}

// SAFETY: an address; the memory behind it is shared with other processes anyway.
unsafe impl Send for Pinned<'_> {}

impl Pinned<'_> {
    /// Pins and maps `bytes` at `host` into the device's address space.
    ///
    /// # Errors
    /// When the pages cannot be pinned (locked-memory limit, memory short).
    ///
    /// # Safety
    /// `host` must be mapped, page-aligned memory of that length, for as long as the result lives.
    pub unsafe fn register(
        device: &Device,
        host: *mut u8,
        bytes: usize,
    ) -> Result<Pinned<'static>, DeviceError> {
        device.bind()?;
        let host = host.cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(host, bytes, flags) }.result())?;
        let mut address = 0;
        // SAFETY: registered just now.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        if let Err(error) = status.result() {
            // SAFETY: registered just now.
            let _ = unsafe { sys::cuMemHostUnregister(host) };
            return Err(DeviceError::Driver { call: "cuMemHostGetDevicePointer", error });
        }
        Ok(Pinned { host, address, device: device.clone(), mapping: PhantomData })
    }

    /// Where the device sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: registered once, unregistered once. Nothing can be done about an error here.
            let _ = unsafe { sys::cuMemHostUnregister(self.host) };
        }
    }
}
