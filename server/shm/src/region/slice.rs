//! Views of a region's memory.

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use bytemuck::Pod;

use super::{RegionError, SharedRegion};

/// A view of `len` elements of `T` in a region.
///
/// A view is only an address: other threads and processes may write the same bytes. Words that several sides access at
/// once are accessed through [`atomics`](Self::atomics); plain data through [`as_slice`](Self::as_slice) and
/// [`as_mut_slice`](Self::as_mut_slice), by the side that owns the data according to a protocol of flags.
pub struct SharedSlice<T> {
    region: Arc<SharedRegion>,
    ptr: NonNull<T>,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: the pointer leads into a region that the view keeps alive; elements are plain data.
unsafe impl<T: Pod> Send for SharedSlice<T> {}
// SAFETY: as above; shared use needs atomics or an unsafe claim of ownership.
unsafe impl<T: Pod> Sync for SharedSlice<T> {}

impl<T: Pod> SharedSlice<T> {
    /// A view of `len` elements from `ptr` on.
    ///
    /// # Safety
    /// The elements are aligned and lie in the region's mapping.
    pub(super) const unsafe fn new(region: Arc<SharedRegion>, ptr: NonNull<T>, len: usize) -> Self {
        SharedSlice { region, ptr, len, element: PhantomData }
    }

    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of `len` elements of this view, from element `start` on.
    pub fn part(&self, start: usize, len: usize) -> Result<Self, RegionError> {
        if start.checked_add(len).is_none_or(|end| end > self.len) {
            let size = size_of::<T>();
            let (offset, bytes) = (start.saturating_mul(size), len.saturating_mul(size));
            return Err(RegionError::OutOfBounds { offset, bytes, len: self.len * size });
        }
        // SAFETY: the element lies within this view (at most one past its end, for an empty part).
        let ptr = unsafe { self.ptr.add(start) };
        Ok(SharedSlice { region: Arc::clone(&self.region), ptr, len, element: PhantomData })
    }

    /// The region that holds the elements.
    pub const fn region(&self) -> &Arc<SharedRegion> {
        &self.region
    }

    /// The address in this process, for registering the memory with a device.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut T {
        self.ptr.as_ptr()
    }

    /// The elements, for reading. Any bit pattern is a valid `T`.
    ///
    /// # Safety
    /// No thread of any process writes these elements while the slice lives: their writer has released them (by storing
    /// a flag with release ordering that the caller has loaded with acquire ordering) and does not write again before
    /// the caller has released them in turn.
    pub unsafe fn as_slice(&self) -> &[T] {
        // SAFETY: in bounds and aligned (checked when the view was made), initialised (memfds are zeroed), unchanged
        // while borrowed (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The elements, for writing.
    ///
    /// # Safety
    /// No other thread of any process accesses these elements while the slice lives: all others have released them as
    /// for [`as_slice`](Self::as_slice), and the caller makes no second slice of them meanwhile.
    #[allow(clippy::mut_from_ref, reason = "exclusive by the caller's promise: the view is only an address")]
    pub unsafe fn as_mut_slice(&self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl SharedSlice<u64> {
    /// The elements as atomics, which any number of processes may access at once.
    pub const fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: same size and alignment; words that are used as atomics are never made plain slices of.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<AtomicU64>(), self.len) }
    }
}

impl SharedSlice<u32> {
    /// The elements as atomics, which any number of processes may access at once.
    pub const fn atomics(&self) -> &[AtomicU32] {
        // SAFETY: same size and alignment; words that are used as atomics are never made plain slices of.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<AtomicU32>(), self.len) }
    }
}

impl<T> Clone for SharedSlice<T> {
    fn clone(&self) -> Self {
        Self { region: Arc::clone(&self.region), ptr: self.ptr, len: self.len, element: PhantomData }
    }
}

impl<T> fmt::Debug for SharedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSlice").field("len", &self.len).field("region", &self.region).finish()
    }
}
