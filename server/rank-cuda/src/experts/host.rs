//! Pinned host memory of this process.

#![allow(unsafe_code, reason = "allocates pages, and registers them with the driver")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use expertd_kernels::device::{Device, DeviceError, Pinned};

const PAGE: usize = 4096;

/// A page-aligned buffer that is pinned and addressable by the device.
#[derive(Debug)]
pub struct HostBuffer {
    // Dropped before the memory is freed.
    pinned: Option<Pinned<'static>>,
    host: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this process and is not tied to a thread.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    /// Allocates at least `bytes` zero bytes.
    ///
    /// # Errors
    /// If the pages cannot be pinned.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        let layout = Layout::from_size_align(bytes.max(1).next_multiple_of(PAGE), PAGE)
            .expect("a size of staging fits the address space");
        // SAFETY: the size is not zero.
        let Some(host) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            std::alloc::handle_alloc_error(layout)
        };
        let mut buffer = HostBuffer { pinned: None, host, layout };
        // SAFETY: the pages were allocated above and are freed after the registration has ended.
        buffer.pinned = Some(unsafe { Pinned::register(device, host.as_ptr(), layout.size())? });
        Ok(buffer)
    }

    /// Device address of the buffer.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.pinned.as_ref().map_or(0, Pinned::address)
    }

    /// Host address of the buffer.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// Size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.layout.size()
    }

    /// The first `len` elements of the buffer.
    ///
    /// # Panics
    /// If the buffer is shorter.
    ///
    /// # Safety
    /// While the slice lives, no copy engine and no kernel reads or writes the buffer.
    #[must_use]
    pub unsafe fn as_mut_slice<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        let bytes = self.layout.size();
        assert!(
            len.saturating_mul(size_of::<T>()) <= bytes,
            "{len} elements exceed a buffer of {bytes} bytes"
        );
        // SAFETY: the slice lies within the allocation, which is page-aligned and initialised; it is exclusive on the host
        // by `&mut self`, and on the device by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr().cast(), len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: the memory was allocated with this layout and is no longer registered.
        unsafe { dealloc(self.host.as_ptr(), self.layout) };
    }
}
