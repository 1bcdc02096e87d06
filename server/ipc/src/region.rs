//! Memory that several processes map: one sealed memfd, and bounds-checked views of it.
//!
//! A region is created by one process, its descriptor is inherited by others, and each maps all of it. Its length is
//! fixed by seals, so that no process can make another fault by truncating it. A new generation gets a new region:
//! a process that wakes up late still writes to the old one, where nobody looks.

#![allow(unsafe_code, reason = "mapping memory and making typed views of it is what this module is for")]

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use bytemuck::Pod;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes of a cache line: what is written by different processes stands on different lines.
pub const LINE: usize = 64;
/// Bytes of a page: what big areas are aligned to.
pub const PAGE: usize = 4096;

/// Why a region or a view of one could not be had.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The areas add up to more than an address space holds.
    #[error("shared memory layout exceeds the address space: an area of {bytes} bytes at offset {offset}")]
    TooLarge {
        /// Where the area would have begun.
        offset: usize,
        /// Its length.
        bytes: usize,
    },
    /// A region of no bytes was asked for.
    #[error("shared memory region {name:?} would have no bytes")]
    Empty {
        /// Name of the region.
        name: String,
    },
    /// A system call failed.
    #[error("cannot {what} shared memory region {name:?} of {bytes} bytes: {source}")]
    System {
        /// Which step failed.
        what: &'static str,
        /// Name of the region.
        name: String,
        /// Its length.
        bytes: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The descriptor's memory has another length.
    #[error(
        "inherited shared memory has {found} bytes, expected {expected}: both sides must agree on its layout"
    )]
    Length {
        /// What the caller's layout says.
        expected: usize,
        /// What the descriptor says.
        found: u64,
    },
    /// The descriptor's length is not fixed, so that another process could truncate it under us.
    #[error("inherited shared memory is not sealed against changes of its length")]
    Unsealed,
    /// A view reaches past the end.
    #[error("a view of {bytes} bytes at offset {offset} reaches past a region of {len} bytes")]
    OutOfBounds {
        /// Where the view begins.
        offset: usize,
        /// Its length.
        bytes: usize,
        /// The region's length.
        len: usize,
    },
    /// A view's offset does not suit its element type.
    #[error("offset {offset} is not a multiple of {align}, the alignment of the view's elements")]
    Misaligned {
        /// Where the view begins.
        offset: usize,
        /// What it must be a multiple of.
        align: usize,
    },
}

/// Assigns aligned offsets to the areas of a region, one after another.
///
/// Both sides build the same layout from the same numbers; nothing but the region's length needs to be told.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    len: usize,
}

impl Layout {
    /// An empty layout.
    #[must_use]
    pub const fn new() -> Self {
        Self { len: 0 }
    }

    /// Appends an area of `bytes` that begins on a cache line of its own; returns its offset.
    ///
    /// # Errors
    /// [`RegionError::TooLarge`].
    pub fn line(&mut self, bytes: usize) -> Result<usize, RegionError> {
        self.area(bytes, LINE)
    }

    /// Appends an area of `bytes` that begins on a page of its own; returns its offset.
    ///
    /// # Errors
    /// [`RegionError::TooLarge`].
    pub fn page(&mut self, bytes: usize) -> Result<usize, RegionError> {
        self.area(bytes, PAGE)
    }

    /// Bytes that hold all areas, a multiple of [`PAGE`].
    #[must_use]
    pub const fn len(&self) -> usize {
        // `area` keeps room for this rounding.
        self.len.next_multiple_of(PAGE)
    }

    /// Whether no area was appended.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn area(&mut self, bytes: usize, align: usize) -> Result<usize, RegionError> {
        let offset = self.len.next_multiple_of(align);
        let end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(LINE));
        match end {
            Some(end) if end <= isize::MAX as usize - PAGE => {
                self.len = end;
                Ok(offset)
            }
            _ => Err(RegionError::TooLarge { offset, bytes }),
        }
    }
}

/// A memfd of fixed length, mapped readable and writable, shared with every process that holds its descriptor.
pub struct SharedRegion {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    name: String,
}

// SAFETY: the mapping is plain memory, valid in every thread until drop; access goes through atomics or through
// unsafe views whose users state who may touch what.
unsafe impl Send for SharedRegion {}
// SAFETY: as above.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Creates a region of `len` zero bytes. Its descriptor closes on exec; whoever starts a child that should
    /// inherit it clears that for the child only.
    ///
    /// # Errors
    /// [`RegionError::Empty`], or [`RegionError::System`] if the kernel refuses.
    pub fn create(name: &str, len: usize) -> Result<Arc<Self>, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: name.into() });
        }
        let failed = |what| move |e: Errno| system_error(what, name, len, e);
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(failed("create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(failed("size"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("seal"))?;
        Self::map(fd, len, name)
    }

    /// Maps a region that another process created; `expected_len` is what this side's layout says.
    ///
    /// # Errors
    /// [`RegionError::Length`] or [`RegionError::Unsealed`] if the descriptor is not such a region,
    /// [`RegionError::System`] if the kernel refuses.
    pub fn from_fd(fd: OwnedFd, expected_len: usize) -> Result<Arc<Self>, RegionError> {
        let name = "inherited";
        let failed = |what| move |e: Errno| system_error(what, name, expected_len, e);
        let found = rustix::fs::fstat(&fd).map_err(failed("inspect"))?.st_size as u64;
        if expected_len == 0 || found != expected_len as u64 {
            return Err(RegionError::Length { expected: expected_len, found });
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed("inspect the seals of"))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(RegionError::Unsealed);
        }
        Self::map(fd, expected_len, name)
    }

    fn map(fd: OwnedFd, len: usize, name: &str) -> Result<Arc<Self>, RegionError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }
        .map_err(|e| system_error("map", name, len, e))?;
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| system_error("map", name, len, Errno::NOMEM))?;
        Ok(Arc::new(Self { fd, base, len, name: name.into() }))
    }

    /// Another descriptor of the same memory, which also closes on exec.
    ///
    /// # Errors
    /// [`RegionError::System`] if the process has no descriptor left.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, RegionError> {
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)
            .map_err(|e| system_error("duplicate the descriptor of", &self.name, self.len, e))
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never true: a region has at least one byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of `len` elements of `T` that begins `offset` bytes into the region. The view keeps the mapping alive.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`] or [`RegionError::Misaligned`].
    pub fn slice<T: Pod>(self: &Arc<Self>, offset: usize, len: usize) -> Result<SharedSlice<T>, RegionError> {
        let bytes = len.saturating_mul(size_of::<T>());
        if offset.checked_add(bytes).is_none_or(|end| end > self.len) {
            return Err(RegionError::OutOfBounds { offset, bytes, len: self.len });
        }
        if !offset.is_multiple_of(align_of::<T>()) {
            return Err(RegionError::Misaligned { offset, align: align_of::<T>() });
        }
        // SAFETY: the offset is within the mapping (at most one past its end, for an empty view).
        let ptr = unsafe { self.base.add(offset) }.cast::<T>();
        Ok(SharedSlice { region: Arc::clone(self), ptr, len, element: PhantomData })
    }

    /// Makes the pages of `offset .. offset + bytes` present and writable, so that no later access allocates:
    /// memory that is missing is an error here instead of a killed process later, and the process's resident size
    /// does not creep up with the batches it sees.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; [`RegionError::System`] if the memory is not to be had.
    pub fn populate(&self, offset: usize, bytes: usize) -> Result<(), RegionError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.len) {
            return Err(RegionError::OutOfBounds { offset, bytes, len: self.len });
        }
        let first = offset - offset % PAGE;
        let last = (offset + bytes).next_multiple_of(PAGE).min(self.len.next_multiple_of(PAGE));
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the range lies within this mapping, and populating changes no contents.
        let done = unsafe {
            rustix::mm::madvise(
                self.base.as_ptr().add(first).cast(),
                last - first,
                Advice::LinuxPopulateWrite,
            )
        };
        match done {
            Ok(()) => Ok(()),
            // Kernels before 5.14 do not know the advice.
            Err(Errno::INVAL) => {
                for at in (first..last.min(self.len)).step_by(PAGE) {
                    // SAFETY: the page lies within the mapping; adding zero atomically leaves its contents alone,
                    // whoever else writes there.
                    unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }
                        .fetch_add(0, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(e) => Err(system_error("populate", &self.name, bytes, e)),
        }
    }
}

impl AsFd for SharedRegion {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl fmt::Debug for SharedRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRegion")
            .field("name", &self.name)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map`, and every view holds an `Arc` of this region, so none is left.
        // A failure would leave it mapped, which harms nobody.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn system_error(what: &'static str, name: &str, bytes: usize, errno: Errno) -> RegionError {
    RegionError::System { what, name: name.into(), bytes, source: errno.into() }
}

/// `len` elements of `T` in a region, by whoever maps it.
///
/// Having the view grants nothing: other threads and processes may write the same bytes. Words that several sides
/// access at once go through [`atomics`](Self::atomics); plain data goes through [`as_slice`](Self::as_slice) and
/// [`as_mut_slice`](Self::as_mut_slice) by whoever owns it at that time by some protocol of flags.
pub struct SharedSlice<T> {
    region: Arc<SharedRegion>,
    ptr: NonNull<T>,
    len: usize,
    element: PhantomData<T>,
}

// SAFETY: a pointer into a region that the view keeps alive; elements are plain data.
unsafe impl<T: Pod> Send for SharedSlice<T> {}
// SAFETY: as above; shared use needs atomics or an unsafe claim of ownership.
unsafe impl<T: Pod> Sync for SharedSlice<T> {}

impl<T: Pod> SharedSlice<T> {
    /// Elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The region that this is part of.
    #[must_use]
    pub const fn region(&self) -> &Arc<SharedRegion> {
        &self.region
    }

    /// The address in this process, for registering the memory with a device.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut T {
        self.ptr.as_ptr()
    }

    /// The elements, for reading. Any bit pattern is a valid `T`, so their values need no promise, only their
    /// stillness does.
    ///
    /// # Safety
    /// While the slice lives nobody, in any process, writes these elements: their writer released them (a flag
    /// stored with release ordering that the caller has loaded with acquire) and will not write again before the
    /// caller in turn has released them.
    #[must_use]
    pub unsafe fn as_slice(&self) -> &[T] {
        // SAFETY: in bounds and aligned (checked when the view was made), initialised (memfds are zeroed), unchanged
        // while borrowed (the caller's promise).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The elements, for writing.
    ///
    /// # Safety
    /// While the slice lives nobody else, in any process, accesses these elements: all others released them as for
    /// [`as_slice`](Self::as_slice), and the caller makes no second slice of them meanwhile.
    #[must_use]
    #[allow(clippy::mut_from_ref, reason = "exclusive by the caller's promise: the view is only an address")]
    pub unsafe fn as_mut_slice(&self) -> &mut [T] {
        // SAFETY: as in `as_slice`, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl SharedSlice<u64> {
    /// The elements as atomics, which any number of processes may access at once.
    #[must_use]
    pub const fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: same size and alignment; nobody makes plain slices of words that are used as atomics.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast::<AtomicU64>(), self.len) }
    }
}

impl SharedSlice<u32> {
    /// The elements as atomics, which any number of processes may access at once.
    #[must_use]
    pub const fn atomics(&self) -> &[AtomicU32] {
        // SAFETY: same size and alignment; nobody makes plain slices of words that are used as atomics.
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

#[cfg(test)]
mod tests;
