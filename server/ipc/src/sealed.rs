//! Memory that is written once and then never changes: a memfd that one process writes, seals against any change, and
//! passes on, and that others map for reading. It lies in huge pages where the kernel has them.

#![allow(unsafe_code, reason = "maps sealed memory")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::Advice;

use expertd_shm::faults;
use expertd_shm::region::PAGE;

use self::huge::HugePages;
use self::space::AddressSpace;

mod huge;
mod space;

/// The operations that a sealed memfd no longer allows.
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

/// Writes memory that is to be sealed. Nothing is written through a mapping: a lack of memory is an error, not a signal.
#[derive(Debug)]
pub struct SealedWriter {
    fd: OwnedFd,
    name: String,
    len: u64,
    huge: HugePages,
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
        Ok(SealedWriter { fd, name: name.to_owned(), len: 0, huge: HugePages::new() })
    }

    /// Writes `bytes` at `offset`; the memory grows as needed, and what was not written reads as zeros.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn write_at(&mut self, mut offset: u64, mut bytes: &[u8]) -> Result<(), SealedError> {
        if faults::happens("weights-enomem") {
            return Err(failed(&format!("write byte {offset} of"), &self.name, Errno::NOMEM));
        }
        self.huge.prepare(self.fd.as_fd(), offset, bytes);
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

    /// Bytes that lie in huge pages, some of them perhaps beyond the end of the last write.
    pub const fn huge_bytes(&self) -> u64 {
        self.huge.bytes()
    }

    /// Seals the memory: from now on nothing can write, shrink or grow it.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn seal(self) -> Result<OwnedFd, SealedError> {
        let SealedWriter { fd, name, len, huge } = self;
        tracing::debug!(name, len, huge_bytes = huge.bytes(), refusal = ?huge.last_refusal(), "sealing");
        drop(huge);
        rustix::fs::fcntl_add_seals(&fd, SEALS)
            .map_err(|error| failed(&format!("seal the {len} bytes of"), &name, error))?;
        Ok(fd)
    }
}

fn failed(what: &str, name: &str, error: Errno) -> SealedError {
    SealedError::System { what: what.to_owned(), name: name.to_owned(), source: error.into() }
}

/// Sealed memory, mapped for reading.
pub struct SealedMemory {
    space: AddressSpace,
    len: usize,
}

impl SealedMemory {
    /// Maps memory that another process has sealed.
    ///
    /// # Errors
    /// [`SealedError::Unsealed`] or [`SealedError::Empty`] if it is no such memory; [`SealedError::System`] if the kernel
    /// refuses.
    pub fn map(fd: impl AsFd) -> Result<Arc<Self>, SealedError> {
        Self::map_by(fd, |space, fd, len| space.map(fd, 0, len))
    }

    /// The same for a device that is to pin the pages, which needs Linux 6.7 or newer.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub fn map_for_device(fd: impl AsFd) -> Result<Arc<Self>, SealedError> {
        Self::map_by(fd, |space, fd, len| space.map_shared(fd, len))
    }

    fn map_by<F: AsFd>(
        fd: F,
        map: impl FnOnce(&mut AddressSpace, &F, usize) -> Result<(), Errno>,
    ) -> Result<Arc<Self>, SealedError> {
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
        // Huge pages are mapped as such only at addresses that are multiples of their size.
        let mapped =
            AddressSpace::reserve(len).and_then(|mut space| map(&mut space, &fd, len).map(|()| space));
        let space = mapped.map_err(|error| failed(&format!("map the {found} bytes of"), name, error))?;
        Ok(Arc::new(SealedMemory { space, len }))
    }

    /// Maps every page, so that later reads do not fault. An error leaves that to the reads.
    pub fn populate(&self) {
        for first in (0..self.len).step_by(POPULATE_BYTES) {
            let bytes = POPULATE_BYTES.min(self.len - first).next_multiple_of(PAGE);
            // SAFETY: the range begins at a page of this mapping and ends at most at its last page; reading changes nothing.
            let done = unsafe {
                let begin = self.space.base().as_ptr().add(first).cast();
                rustix::mm::madvise(begin, bytes, Advice::LinuxPopulateRead)
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
        unsafe { std::slice::from_raw_parts(self.space.base().as_ptr(), self.len) }
    }
}

impl fmt::Debug for SealedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedMemory").field("len", &self.len).finish_non_exhaustive()
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
        // Kernels before 6.7 refuse it.
        if let Ok(for_device) = SealedMemory::map_for_device(&fd) {
            assert!((*for_device).as_ref() == (*memory).as_ref());
        }
        drop(fd);
        memory.populate();
        let bytes = (*memory).as_ref();
        assert_eq!((&bytes[..5], &bytes[8192..]), (&b"index"[..], &b"weights"[..]));
        assert!(bytes[5..8192].iter().all(|&byte| byte == 0));
    }

    /// What smaps says of the mapping that begins at `address`, in KiB.
    fn smaps(address: *const u8, field: &str) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = smaps
            .lines()
            .skip_while(|line| !line.starts_with(&format!("{:x}-", address.expose_provenance())));
        let mut fields = mapping.filter_map(|line| line.split_once(':')).filter(|(name, _)| *name == field);
        fields.next().unwrap().1.trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn large_memory_lies_in_huge_pages_where_the_kernel_has_them() {
        let mut expected: Vec<u8> =
            (0..(9_u32 << 20) + 12_345).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        let mut writer = SealedWriter::create("test").unwrap();
        let (first, second) = (5000, (5 << 20) + 77);
        writer.write_at(first as u64, &expected[first..second]).unwrap();
        writer.write_at(second as u64, &expected[second..]).unwrap();
        writer.write_at(0, &expected[..100]).unwrap();
        expected[100..first].fill(0);
        let huge_bytes = writer.huge_bytes();
        assert!(huge_bytes.is_multiple_of(2 << 20) && huge_bytes <= 8 << 20, "{huge_bytes}");
        let memory = SealedMemory::map(writer.seal().unwrap()).unwrap();
        memory.populate();
        let bytes = (*memory).as_ref();
        assert!(bytes == expected, "other bytes than were written");
        assert!(
            bytes.as_ptr().addr().is_multiple_of(2 << 20),
            "{:p} cannot be mapped in huge pages",
            bytes.as_ptr()
        );
        // The mapping ends within the last huge page, which is mapped in small ones.
        let huge_mapped = huge_bytes.saturating_sub(2 << 20) / 1024;
        assert!(smaps(bytes.as_ptr(), "ShmemPmdMapped") >= huge_mapped, "of {huge_bytes} bytes");
    }

    #[test]
    fn small_memory_and_holes_are_not_rounded_up() {
        let allocated = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512;
        let mut writer = SealedWriter::create("test").unwrap();
        writer.write_at(0, &[1; 5000]).unwrap();
        assert_eq!((writer.huge_bytes(), allocated(&writer.fd)), (0, 8192));
        writer.write_at(1 << 30, &[1; 5000]).unwrap();
        assert!(allocated(&writer.fd) <= 8192 + (2 << 20), "{}", allocated(&writer.fd));
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
