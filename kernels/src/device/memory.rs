//! Device memory, and host memory that devices can address.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdeviceptr};

use super::{Device, DeviceError, check};

/// Plain data that may be copied between host and device as bytes.
///
/// # Safety
/// Any bytes are a valid value, and the type has no padding.
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
// SAFETY: the struct consists of integers without padding.
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
    /// Allocates `len` zeros; at least one element is allocated, so that the address is never null.
    pub fn zeroed(device: &Device, len: usize) -> Result<Buffer<T>, DeviceError> {
        device.bind()?;
        let bytes = len.max(1) * size_of::<T>();
        // SAFETY: the context is current, and the memory is set before anything reads it.
        let address = check("cuMemAlloc", unsafe { result::malloc_sync(bytes) })?;
        let buffer = Buffer { address, len, device: device.clone(), kind: PhantomData };
        buffer.fill_bytes(0)?;
        Ok(buffer)
    }

    /// Allocates a buffer and copies `values` to it.
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

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Sets every byte to `byte`, and waits until that is done.
    pub fn fill_bytes(&self, byte: u8) -> Result<(), DeviceError> {
        self.device.bind()?;
        // SAFETY: the range is the allocation.
        check("cuMemsetD8", unsafe {
            result::memset_d8_sync(self.address, byte, self.len * size_of::<T>())
        })?;
        // The driver's memset of device memory is asynchronous.
        self.device.synchronize()
    }

    /// Copies `values` to the start of the buffer, and waits until that is done.
    ///
    /// # Panics
    /// If there are more values than elements.
    pub fn write(&self, values: &[T]) -> Result<(), DeviceError> {
        assert!(values.len() <= self.len, "{} values do not fit a buffer of {}", values.len(), self.len);
        if values.is_empty() {
            return Ok(());
        }
        self.device.bind()?;
        // SAFETY: the range lies within the allocation (asserted).
        unsafe { copy_to_device(self.address, values) }
    }

    /// Copies the whole buffer to the host.
    pub fn read(&self) -> Result<Vec<T>, DeviceError> {
        let mut values = vec![T::default(); self.len];
        if self.len != 0 {
            self.device.bind()?;
            // SAFETY: `values` has the length of the allocation, and any bytes are a `T`.
            check("cuMemcpyDtoH", unsafe { result::memcpy_dtoh_sync(&mut values, self.address) })?;
        }
        Ok(values)
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the memory is freed once. An error cannot be handled here.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Copies bytes from device memory at an address.
///
/// # Errors
/// The driver's message.
///
/// # Safety
/// `address` must be readable device memory of the current context for the whole length.
pub unsafe fn read_device(address: u64, bytes: &mut [u8]) -> Result<(), String> {
    // SAFETY: the caller's promise.
    unsafe { result::memcpy_dtoh_sync(bytes, address) }.map_err(|error| format!("{error:?}"))
}

/// Copies bytes to device memory at an address, and waits until that is done. No kernel is involved.
///
/// # Safety
/// `address` must be writable device memory of the current context for the whole length, and nothing else may use it.
pub unsafe fn write_device(address: u64, bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { copy_to_device(address, bytes) }
}

/// Copies values to device memory, and waits until they have arrived. The driver's call returns once it has read memory that is not
/// pinned; kernels on streams that do not wait for the default stream could still read the old bytes then.
///
/// # Safety
/// That of [`write_device`].
unsafe fn copy_to_device<T>(address: u64, values: &[T]) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemcpyHtoD", unsafe { result::memcpy_htod_sync(address, values) })?;
    // SAFETY: null names the default stream, which carries the copy.
    check("cuStreamSynchronize", unsafe { result::stream::synchronize(std::ptr::null_mut()) })
}

/// Sets bytes of device memory, and waits until that is done.
///
/// # Safety
/// `address` must be writable device memory of the current context for the whole length, and nothing else may use it.
pub unsafe fn fill_device(address: u64, byte: u8, bytes: usize) -> Result<(), DeviceError> {
    // SAFETY: the caller's promise.
    check("cuMemsetD8", unsafe { result::memset_d8_sync(address, byte, bytes) })?;
    check("cuCtxSynchronize", result::ctx::synchronize())
}

/// One value in pinned host memory, which host and device access in turns.
#[derive(Debug)]
pub struct Mailbox<T: Plain> {
    host: *mut T,
    address: CUdeviceptr,
    device: Device,
}

// SAFETY: the memory may be accessed from any thread; accesses are volatile and ordered by the users' protocol.
unsafe impl<T: Plain> Send for Mailbox<T> {}

impl<T: Plain> Mailbox<T> {
    /// Allocates a mailbox that holds `value`.
    ///
    /// # Errors
    /// If memory cannot be pinned.
    pub fn new(device: &Device, value: T) -> Result<Mailbox<T>, DeviceError> {
        device.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the memory is freed in drop.
        let host = check("cuMemHostAlloc", unsafe { result::malloc_host(size_of::<T>().max(64), flags) })?;
        let mut address = 0;
        // SAFETY: the memory was just allocated with device mapping.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        let mailbox = Mailbox { host: host.cast(), address, device: device.clone() };
        check("cuMemHostGetDevicePointer", status.result())?;
        mailbox.put(value);
        Ok(mailbox)
    }

    /// Device address of the memory.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Stores a value, which kernels of later launches see.
    pub fn put(&self, value: T) {
        // SAFETY: the memory is alive, of this size and aligned to a page.
        unsafe { ptr::write_volatile(self.host, value) };
    }

    /// Loads the value that the device stored. [`first_word`](Self::first_word) shows when it is complete.
    #[must_use]
    pub fn get(&self) -> T {
        // SAFETY: as in `put`; any bytes are a `T`.
        unsafe { ptr::read_volatile(self.host) }
    }

    /// Loads the first eight bytes with acquire ordering. The device stores them last, so the rest of the value belongs to
    /// them.
    ///
    /// # Panics
    /// If `T` has fewer than eight bytes.
    #[must_use]
    pub fn first_word(&self) -> u64 {
        assert!(size_of::<T>() >= 8, "the mailbox's type is smaller than a word of eight bytes");
        // SAFETY: the memory has at least eight bytes and is aligned to a page.
        unsafe { AtomicU64::from_ptr(self.host.cast()) }.load(Ordering::Acquire)
    }
}

impl<T: Plain> Drop for Mailbox<T> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the memory is freed once. An error cannot be handled here.
            let _ = unsafe { result::free_host(self.host.cast()) };
        }
    }
}

/// Pages of this process that are pinned and addressable by the device while this value lives.
#[derive(Debug)]
pub struct Pinned<'a> {
    host: *mut c_void,
    address: CUdeviceptr,
    device: Device,
    mapping: PhantomData<&'a mut [u8]>,
}

// SAFETY: the value is only an address; it gives no access to the memory on the host.
unsafe impl Send for Pinned<'_> {}

impl Pinned<'_> {
    /// Pins `bytes` at `host` and maps them into the device's address space.
    ///
    /// # Errors
    /// If the pages cannot be pinned, because of the limit of locked memory or a lack of memory.
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
        // SAFETY: the pages were just registered.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        if let Err(error) = status.result() {
            // SAFETY: the pages were just registered.
            let _ = unsafe { sys::cuMemHostUnregister(host) };
            return Err(DeviceError::Driver { call: "cuMemHostGetDevicePointer", error });
        }
        Ok(Pinned { host, address, device: device.clone(), mapping: PhantomData })
    }

    /// Device address of the memory; 0 for a [source of copies](Self::register_source).
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Pinned<'_> {
    /// Pins `bytes` at `host`, memory that is mapped for reading only, as a source of copies.
    ///
    /// # Errors
    /// As [`register`](Self::register), or if the driver pins no memory that cannot be written.
    ///
    /// # Safety
    /// As [`register`](Self::register), and nothing writes the memory.
    pub unsafe fn register_source(
        device: &Device,
        host: *const u8,
        bytes: usize,
    ) -> Result<Pinned<'static>, DeviceError> {
        device.bind()?;
        let host = host.cast_mut().cast::<c_void>();
        let flags = sys::CU_MEMHOSTREGISTER_READ_ONLY | sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller's promise; the driver does not write what is registered for reading only.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(host, bytes, flags) }.result())?;
        Ok(Pinned { host, address: 0, device: device.clone(), mapping: PhantomData })
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        if self.device.bind().is_ok() {
            // SAFETY: the pages are registered and are unregistered once. An error cannot be handled here.
            let _ = unsafe { sys::cuMemHostUnregister(self.host) };
        }
    }
}
