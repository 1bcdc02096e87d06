//! Memory that several processes map: one sealed memfd, and bounds-checked views of it.
//!
//! One process creates a region, others inherit its descriptor, and each maps all of it. Seals fix its length, so that no
//! process can cause a fault in another by truncating it. A new generation gets a new region: a process that wakes up
//! late still writes to the old one, which nothing reads any more.

#![allow(unsafe_code, reason = "the module maps memory and makes typed views of it")]

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytemuck::Pod;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::faults;

mod copies;
mod layout;
mod slice;

pub use copies::{from_shared, to_shared};
pub use layout::{LINE, Layout, PAGE};
pub use slice::SharedSlice;

/// Bytes that [`SharedRegion::populate`] asks of the kernel at once.
const POPULATED_AT_ONCE: usize = 4 << 20;

/// Why a region or a view of one could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum RegionError {
    #[error("shared memory layout exceeds the address space: an area of {bytes} bytes at offset {offset}")]
    TooLarge { offset: usize, bytes: usize },
    #[error("shared memory region {name:?} would have no bytes; at least one is required")]
    Empty { name: String },
    #[error("cannot {what} shared memory region {name:?} of {bytes} bytes: {source}")]
    System { what: &'static str, name: String, bytes: usize, source: io::Error },
    #[error(
        "inherited shared memory has {found} bytes, expected {expected}: both sides must agree on its layout"
    )]
    Length { expected: usize, found: u64 },
    /// The descriptor's length is not fixed: another process could truncate it while it is mapped.
    #[error(
        "inherited shared memory is not sealed against changes of its length (F_SEAL_SHRINK and F_SEAL_GROW)"
    )]
    Unsealed,
    #[error("a view of {bytes} bytes at offset {offset} reaches past a region of {len} bytes")]
    OutOfBounds { offset: usize, bytes: usize, len: usize },
    #[error("offset {offset} is not a multiple of {align}, the alignment of the view's elements")]
    Misaligned { offset: usize, align: usize },
}

/// A memfd of fixed length, mapped readable and writable, shared with every process that holds its descriptor.
pub struct SharedRegion {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
    name: String,
}

// SAFETY: the mapping is plain memory, valid in every thread until drop; access goes through atomics or through
// unsafe views whose users state which side owns the memory.
unsafe impl Send for SharedRegion {}
// SAFETY: as above.
unsafe impl Sync for SharedRegion {}

impl SharedRegion {
    /// Creates a region of `len` zero bytes. Its descriptor closes on exec, unless the flag is cleared in a child that
    /// inherits it.
    ///
    /// # Errors
    /// [`RegionError::Empty`], or [`RegionError::System`] if the kernel refuses.
    pub fn create(name: &str, len: usize) -> Result<Arc<Self>, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: name.into() });
        }
        let failed = |what| move |e: Errno| system_error(what, name, len, e);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if faults::happens("memfd-emfile") {
            return Err(failed("create")(Errno::MFILE));
        }
        if faults::happens("memfd-enomem") {
            return Err(failed("size")(Errno::NOMEM));
        }
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            // Kernels before 6.3 do not know the flag.
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
            created => created,
        }
        .map_err(failed("create"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(failed("size"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(failed("seal"))?;
        Self::map(fd, len, name)
    }

    /// Maps a region that another process created; `expected_len` is the length by this side's layout.
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
        // SAFETY: a fresh mapping at an address of the kernel's choice does not affect existing memory.
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

    /// Duplicates the descriptor; the duplicate closes on exec, too.
    ///
    /// # Errors
    /// [`RegionError::System`] if the process has no descriptors left.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, RegionError> {
        rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)
            .map_err(|e| system_error("duplicate the descriptor of", &self.name, self.len, e))
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Never true: a region has at least one byte.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of `len` elements of `T` that begins `offset` bytes into the region. The view keeps the mapping alive.
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
        // SAFETY: `len` elements are in bounds and aligned (checked), and the view keeps the mapping alive.
        Ok(unsafe { SharedSlice::new(Arc::clone(self), ptr, len) })
    }

    /// Asks the kernel for pages of 4 KiB, also where it prefers larger ones. Other processes decide for their mappings.
    pub fn avoid_huge_pages(&self) {
        // SAFETY: the range is this mapping, and the advice changes no contents. Kernels without huge pages refuse the
        // advice, which they do not need.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxNoHugepage) };
    }

    /// Makes the pages of `offset .. offset + bytes` present and writable, so that no later access allocates: a lack of
    /// memory is an error here instead of a killed process later, and the resident size does not grow with the traffic.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; [`RegionError::System`] if there is no memory for the pages.
    pub fn populate(&self, offset: usize, bytes: usize) -> Result<(), RegionError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.len) {
            return Err(RegionError::OutOfBounds { offset, bytes, len: self.len });
        }
        let first = offset - offset % PAGE;
        let last = (offset + bytes).next_multiple_of(PAGE).min(self.len.next_multiple_of(PAGE));
        if bytes == 0 {
            return Ok(());
        }
        // In parts, because threads that map memory wait until a part is populated.
        for at in (first..last).step_by(POPULATED_AT_ONCE) {
            let part = POPULATED_AT_ONCE.min(last - at);
            // SAFETY: the range lies within this mapping, and populating changes no contents.
            let done = unsafe {
                let begin = self.base.as_ptr().add(at).cast();
                rustix::mm::madvise(begin, part, Advice::LinuxPopulateWrite)
            };
            match done {
                Ok(()) => {}
                // Kernels before 5.14 do not support the advice.
                Err(Errno::INVAL) => self.touch(at..(at + part).min(self.len)),
                Err(e) => return Err(system_error("populate", &self.name, bytes, e)),
            }
        }
        Ok(())
    }

    /// Writes to every page of a range that begins with a page, without changing its contents.
    fn touch(&self, range: Range<usize>) {
        for at in range.step_by(PAGE) {
            // SAFETY: the page lies within the mapping; adding zero atomically changes nothing, whatever other
            // processes write there.
            unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(at).cast()) }.fetch_add(0, Ordering::Relaxed);
        }
    }

    /// Frees every page of the region, although other processes have its descriptor or map it: what they read afterwards is zero,
    /// and a page that they touch again counts for their own container. Pages that a process has pinned stay until it releases them, and
    /// no process sees them through the region any more, so a device must not use the region when this is called.
    ///
    /// It takes about as long as clearing the pages does.
    ///
    /// # Errors
    /// [`RegionError::System`] if the kernel refuses.
    pub fn free_pages(&self) -> Result<(), RegionError> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let bytes = self.len.next_multiple_of(PAGE) as u64;
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(&self.fd, flags, 0, bytes))
            .map_err(|e| system_error("free the pages of", &self.name, self.len, e))
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
        // A failure leaves the memory mapped, which is harmless.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn system_error(what: &'static str, name: &str, bytes: usize, errno: Errno) -> RegionError {
    RegionError::System { what, name: name.into(), bytes, source: errno.into() }
}

#[cfg(test)]
mod tests;
