//! Pinned host memory that belongs to this process alone.

#![allow(unsafe_code, reason = "allocates pages, and registers them with the driver")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use expertd_kernels::device::{Device, DeviceError, Pinned};

const PAGE: usize = 4096;

/// Page-aligned zeros, pinned and addressable by the device.
#[derive(Debug)]
pub struct HostBuffer {
    // Unregistered before the memory goes.
    pinned: Option<Pinned<'static>>,
    host: NonNull<u8>,
    layout: Layout,
}

// SAFETY: memory of this process that no thread is tied to.
unsafe impl Send for HostBuffer {}

impl HostBuffer {
    /// At least `bytes`.
    ///
    /// # Errors
    /// When the pages cannot be had or pinned.
    pub fn new(device: &Device, bytes: usize) -> Result<Self, DeviceError> {
        let layout = Layout::from_size_align(bytes.max(1).next_multiple_of(PAGE), PAGE)
            .expect("a size of staging fits the address space");
        // SAFETY: the size is not zero.
        let Some(host) = NonNull::new(unsafe { alloc_zeroed(layout) }) else {
            std::alloc::handle_alloc_error(layout)
        };
        let mut buffer = HostBuffer { pinned: None, host, layout };
        // SAFETY: the allocation above, freed after the registration ends.
        buffer.pinned = Some(unsafe { Pinned::register(device, host.as_ptr(), layout.size())? });
        Ok(buffer)
    }

    /// Where the device sees it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.pinned.as_ref().map_or(0, Pinned::address)
    }

    /// First byte on the host.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.host.as_ptr()
    }

    /// The first `len` elements, for the host alone: the caller sees to it that no copy or kernel is using them.
    #[must_use]
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self, len: usize) -> &mut [T] {
        assert!(len * size_of::<T>() <= self.layout.size(), "{len} elements of a smaller buffer");
        // SAFETY: within the allocation, which is aligned to pages and initialised.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr().cast(), len) }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        self.pinned = None;
        // SAFETY: allocated with this layout, and no longer registered.
        unsafe { dealloc(self.host.as_ptr(), self.layout) };
    }
}
