//! Memory that is written once and then never changes: a memfd that one process writes, seals against any change, and
//! passes on, and that others map for reading.

#![allow(unsafe_code, reason = "maps sealed memory")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use expertd_shm::faults;
use expertd_shm::region::PAGE;

/// What a sealed memfd no longer allows.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE).union(SealFlags::SEAL);
/// Bytes that are made present at a time, so that other threads can change the address space in between.
const POPULATE_BYTES: usize = 16 << 20;

/// Why sealed memory could not be made or mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum SealedError {
    #[error("cannot {what} the memory for {name}: {source}")]
    System { what: String, name: String, source: io::Error },
    #[error(
        "memory that another process passed on is not sealed against changes (found seals {found:#x}, expected {expected:#x})"
    )]
    Unsealed { found: u32, expected: u32 },
    #[error("memory that another process passed on is empty")]
    Empty,
}

/// Writes memory that is to be sealed. No mapping is involved: a lack of memory is an error of a write, not a signal.
#[derive(Debug)]
pub struct SealedWriter {
    fd: OwnedFd,
    name: String,
    len: u64,
}

impl SealedWriter {
    /// Creates empty memory.
    ///
    /// # Errors
    /// If the kernel refuses, for example because the process has no descriptors left.
    pub fn create(name: &str) -> Result<Self, SealedError> {
        if faults::happens("weights-emfile") {
            return Err(failed("create", name, Errno::MFILE));
        }
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|error| failed("create", name, error))?;
        Ok(SealedWriter { fd, name: name.to_owned(), len: 0 })
    }

    /// Writes `bytes` at `offset`; the memory grows as needed, and what was not written reads as zeros.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn write_at(&mut self, mut offset: u64, mut bytes: &[u8]) -> Result<(), SealedError> {
        if faults::happens("weights-enomem") {
            return Err(failed(&format!("write byte {offset} of"), &self.name, Errno::NOMEM));
        }
        while !bytes.is_empty() {
            match rustix::io::pwrite(&self.fd, bytes, offset) {
                Ok(0) => return Err(failed(&format!("write byte {offset} of"), &self.name, Errno::NOSPC)),
                Ok(written) => {
                    (bytes, offset) = (&bytes[written..], offset + written as u64);
                    self.len = self.len.max(offset);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(failed(&format!("write byte {offset} of"), &self.name, error)),
            }
        }
        Ok(())
    }

    /// Bytes up to the end of the last write.
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing was written.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Seals the memory: from now on nothing can write, shrink or grow it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn seal(self) -> Result<OwnedFd, SealedError> {
        rustix::fs::fcntl_add_seals(&self.fd, SEALS)
            .map_err(|error| failed(&format!("seal the {} bytes of", self.len), &self.name, error))?;
        Ok(self.fd)
    }
}

fn failed(what: &str, name: &str, error: Errno) -> SealedError {
    SealedError::System { what: what.to_owned(), name: name.to_owned(), source: error.into() }
}

/// Sealed memory, mapped for reading.
pub struct SealedMemory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is read-only memory whose contents never change; it is valid in every thread until drop.
unsafe impl Send for SealedMemory {}
// SAFETY: as above.
unsafe impl Sync for SealedMemory {}

impl SealedMemory {
    /// Maps memory that another process has sealed.
    ///
    /// # Errors
    /// [`SealedError::Unsealed`] or [`SealedError::Empty`] if it is no such memory; [`SealedError::System`] if the kernel
    /// refuses.
    pub fn map(fd: impl AsFd) -> Result<Arc<Self>, SealedError> {
        let name = "weights that another process sealed";
        let seals =
            rustix::fs::fcntl_get_seals(&fd).map_err(|error| failed("read the seals of", name, error))?;
        if !seals.contains(SEALS) {
            return Err(SealedError::Unsealed { found: seals.bits(), expected: SEALS.bits() });
        }
        let found =
            rustix::fs::fstat(&fd).map_err(|error| failed("read the size of", name, error))?.st_size as u64;
        let len = usize::try_from(found)
            .map_err(|_| failed(&format!("map the {found} bytes of"), name, Errno::NOMEM))?;
        if len == 0 {
            return Err(SealedError::Empty);
        }
        // Shared mappings of memory that is sealed against writes need Linux 6.7; a private one that is never written
        // shows the same pages.
        // SAFETY: a fresh mapping at an address of the kernel's choice does not affect existing memory.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::PRIVATE, &fd, 0) }
                .map_err(|error| failed(&format!("map the {found} bytes of"), name, error))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| failed(&format!("map the {found} bytes of"), name, Errno::NOMEM))?;
        Ok(Arc::new(SealedMemory { base, len }))
    }

    /// Maps every page, so that later reads do not fault. An error leaves that to the reads.
    pub fn populate(&self) {
        for first in (0..self.len).step_by(POPULATE_BYTES) {
            let bytes = POPULATE_BYTES.min(self.len - first).next_multiple_of(PAGE);
            // SAFETY: the range begins at a page of this mapping and ends at most at its last page; reading changes nothing.
            let done = unsafe {
                rustix::mm::madvise(self.base.as_ptr().add(first).cast(), bytes, Advice::LinuxPopulateRead)
            };
            if done.is_err() {
                return;
            }
        }
    }
}

impl AsRef<[u8]> for SealedMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` bytes are mapped until drop; seals that were checked before the mapping was made keep every
        // process from changing the bytes or their number.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl fmt::Debug for SealedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for SealedMemory {
    fn drop(&mut self) {
        // SAFETY: `map` made the mapping, and no borrow of it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_mapped_and_cannot_change() {
        let mut writer = SealedWriter::create("test").unwrap();
        assert!(writer.is_empty());
        writer.write_at(8192, b"weights").unwrap();
        writer.write_at(0, b"index").unwrap();
        assert_eq!(writer.len(), 8199);
        let fd = writer.seal().unwrap();
        assert!(rustix::io::pwrite(&fd, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 1).is_err());
        assert!(rustix::fs::ftruncate(&fd, 1 << 20).is_err());
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(&fd, punch, 0, 4096).is_err());
        let memory = SealedMemory::map(&fd).unwrap();
        drop(fd);
        memory.populate();
        let bytes = (*memory).as_ref();
        assert_eq!((&bytes[..5], &bytes[8192..]), (&b"index"[..], &b"weights"[..]));
        assert!(bytes[5..8192].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn errors_name_the_operation_and_the_memory() {
        let full = failed("write byte 4096 of", "the weights of rank 1", Errno::NOSPC).to_string();
        assert!(
            full.starts_with("cannot write byte 4096 of the memory for the weights of rank 1: No space left"),
            "{full}"
        );
        let file = tempfile::tempfile().unwrap();
        let error = SealedMemory::map(&file).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the seals of the memory for weights"), "{error}");
    }

    #[test]
    fn memory_that_may_still_change_is_not_mapped() {
        let writer = SealedWriter::create("test").unwrap();
        assert!(matches!(SealedMemory::map(&writer.fd), Err(SealedError::Unsealed { .. })));
        assert!(matches!(SealedMemory::map(writer.seal().unwrap()), Err(SealedError::Empty)));
    }
}
