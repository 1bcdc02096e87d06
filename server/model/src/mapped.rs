//! The files of a checkpoint, memory-mapped.
#![allow(unsafe_code, reason = "memory-mapping the checkpoint's files")]

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use memmap2::{Advice, Mmap};

use super::ModelError;
use super::config::regular;
use super::header::Header;

/// A mapped safetensors file whose header was checked.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) file: File,
    /// The same file, opened for reads past the page cache, if its file system has them.
    pub(super) direct: Option<File>,
    stamp: Stamp,
    bytes: Mmap,
    header: Header,
}

impl Mapped {
    /// Maps a file and checks its header.
    pub(super) fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |action| move |source| ModelError::Io { path: path.to_owned(), action, source };
        regular(path).map_err(io("open it"))?;
        let file = File::open(path).map_err(io("open it"))?;
        let stamp = Stamp::of(&file).map_err(io("read its size"))?;
        // SAFETY: the mapping is read-only and private to this process. If another process truncates the file while
        // it is served, reads beyond its end raise SIGBUS and end this process, which its supervisor handles. If
        // another process overwrites it, weights change: bytes are only read as numbers, never as addresses.
        let bytes = unsafe { Mmap::map(&file) }.map_err(io("map it"))?;
        let header =
            Header::parse(&bytes).map_err(|reason| ModelError::Header { path: path.to_owned(), reason })?;
        let direct = open_direct(path, &file);
        Ok(Mapped { file, direct, stamp, bytes, header })
    }

    /// The whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The header of the file.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Advises the kernel whether only few bytes in scattered places are accessed.
    pub(super) fn expect_few_bytes(&self, few: bool) {
        let _ = self.bytes.advise(if few { Advice::Random } else { Advice::Normal });
    }

    /// Checks that the file was not written to or truncated since it was opened.
    pub(super) fn check_unchanged(&self, path: &Path) -> Result<(), ModelError> {
        let now = Stamp::of(&self.file).map_err(|source| ModelError::Io {
            path: path.to_owned(),
            action: "read its size",
            source,
        })?;
        if now == self.stamp { Ok(()) } else { Err(ModelError::Written { path: path.to_owned() }) }
    }

    /// Whether the page cache holds all or nearly all of these bytes of the file, which begin at a page. The kernel reports this
    /// only to users who may write the file; for others every page counts as cached.
    pub(super) fn is_cached(&self, bytes: Range<usize>) -> bool {
        const PAGE: usize = 4096;
        let Some(mapped) = self.bytes.get(bytes.start..bytes.end.min(self.bytes.len())) else { return true };
        let mut pages = vec![0_u8; mapped.len().div_ceil(PAGE)];
        // SAFETY: the range lies in the mapping and begins at a page of it, and `pages` has a byte for each page, also where
        // pages are larger than 4096 bytes.
        let status =
            unsafe { libc::mincore(mapped.as_ptr().cast_mut().cast(), mapped.len(), pages.as_mut_ptr()) };
        status != 0 || 16 * pages.iter().filter(|page| **page & 1 == 0).count() <= pages.len()
    }

    /// Begins to bring bytes to the page cache, where they are not there. It is a hint.
    pub(super) fn will_need(&self, bytes: Range<usize>) {
        let _ = self.bytes.advise_range(Advice::WillNeed, bytes.start, bytes.len());
    }
}

/// Opens a file again for reads past the page cache.
fn open_direct(path: &Path, file: &File) -> Option<File> {
    let direct = File::options().read(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
    let [found, expected] = [direct.metadata().ok()?, file.metadata().ok()?];
    ((found.dev(), found.ino()) == (expected.dev(), expected.ino())).then_some(direct)
}

/// The file's attributes that change when it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    length: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(file: &File) -> std::io::Result<Self> {
        let found = file.metadata()?;
        Ok(Stamp { length: found.len(), modified: (found.mtime(), found.mtime_nsec()) })
    }
}
