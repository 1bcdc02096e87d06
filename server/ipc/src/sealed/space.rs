//! Address space at a boundary of huge pages, into which sealed memory is mapped.

use std::io;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use expertd_shm::region::PAGE;

/// Bytes of a huge page.
pub(super) const HUGE: usize = 2 << 20;
/// Linux 6.1 or newer: moves a range into huge pages at once. Neither libc nor rustix names it.
const MADV_COLLAPSE: i32 = 25;

/// Reserved addresses, of which the first bytes show a file once it is mapped.
#[derive(Debug)]
pub(super) struct AddressSpace {
    /// The reserved range: a huge page more than is used.
    start: NonNull<u8>,
    reserved: usize,
    base: NonNull<u8>,
    mapped: usize,
}

impl AddressSpace {
    /// Reserves `len` bytes that begin at a multiple of [`HUGE`]. They take no memory and cannot be accessed.
    pub(super) fn reserve(len: usize) -> Result<Self, Errno> {
        let reserved = len.checked_next_multiple_of(PAGE).and_then(|bytes| bytes.checked_add(HUGE));
        let reserved = reserved.ok_or(Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice affects no other memory.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), reserved, ProtFlags::empty(), flags) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        // SAFETY: the distance to the next multiple of HUGE is below HUGE, which was reserved beyond `len`.
        let base = unsafe { start.add(start.align_offset(HUGE)) };
        Ok(AddressSpace { start, reserved, base, mapped: 0 })
    }

    /// Shows `len` bytes of `file` from `offset` on, for reading, in place of what was mapped before.
    pub(super) fn map(&mut self, file: impl AsFd, offset: u64, len: usize) -> Result<(), Errno> {
        // Shared mappings of memory that is sealed against writes need Linux 6.7; a private one that is never written
        // shows the same pages.
        self.map_as(MapFlags::PRIVATE, file, offset, len)
    }

    /// The same as a shared mapping, whose pages a device can pin. The kernel would give a private one copies of pages that are pinned; on
    /// Linux 6.18 it did not end with huge pages.
    pub(super) fn map_shared(&mut self, file: impl AsFd, len: usize) -> Result<(), Errno> {
        self.map_as(MapFlags::SHARED, file, 0, len)
    }

    fn map_as(&mut self, kind: MapFlags, file: impl AsFd, offset: u64, len: usize) -> Result<(), Errno> {
        if len > self.reserved - HUGE {
            return Err(Errno::NOMEM);
        }
        let flags = kind | MapFlags::FIXED;
        // SAFETY: the range lies within the addresses that this value has reserved (checked), and `&mut self` shows that
        // nothing borrows what it replaces.
        unsafe { rustix::mm::mmap(self.base.as_ptr().cast(), len, ProtFlags::READ, flags, file, offset) }?;
        self.mapped = len;
        Ok(())
    }

    /// Moves what is mapped into huge pages, with zeros where the file has no page. Each must hold one page already. A
    /// huge page that cannot be had ends the call; the earlier ones stay.
    pub(super) fn collapse(&self) -> Result<(), Errno> {
        // SAFETY: the range is mapped by this value, and the advice changes no contents.
        let status = unsafe { libc::madvise(self.base.as_ptr().cast(), self.mapped, MADV_COLLAPSE) };
        if status == 0 {
            return Ok(());
        }
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::INVAL))
    }

    /// First address of what is mapped, a multiple of [`HUGE`].
    pub(super) const fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        // SAFETY: `reserve` made the mapping, and no borrow of what was mapped into it is left. A failure leaves addresses in use,
        // which is harmless.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.reserved) };
    }
}

// SAFETY: the addresses belong to this value alone, in whatever thread it is.
unsafe impl Send for AddressSpace {}
// SAFETY: a shared reference gives addresses, and advice that changes no contents.
unsafe impl Sync for AddressSpace {}
