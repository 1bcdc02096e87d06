//! Huge pages for memory that is being written.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::space::{AddressSpace, HUGE};

const HUGE_BYTES: u64 = HUGE as u64;
/// Most bytes that become huge pages in one call: a multiple of [`HUGE`].
const WINDOW: usize = 16 * HUGE;
/// Refusals in a row after which the kernel is not asked again: each may have searched all memory for a huge page.
const MAX_REFUSALS: u32 = 8;
/// A call that takes longer counts as a refusal: small pages for a window take about as long.
const MAX_TIME: Duration = Duration::from_millis(50);

/// Places huge pages where memory is about to be written. Where the kernel has none, the write gets small pages.
#[derive(Debug)]
pub(super) struct HugePages {
    window: Option<AddressSpace>,
    /// Offset up to which huge pages were asked for. The first [`HUGE`] bytes have small pages, so that small memories stay small.
    end: u64,
    bytes: u64,
    refusals: u32,
    last_refusal: Option<Errno>,
}

impl HugePages {
    pub(super) const fn new() -> Self {
        HugePages { window: None, end: HUGE_BYTES, bytes: 0, refusals: 0, last_refusal: None }
    }

    /// Prepares a file for a write of `bytes` at `offset`, which must follow. Huge pages are placed where nothing was written
    /// yet: that takes less time than to move small pages later. The last one may reach beyond the write.
    pub(super) fn prepare(&mut self, fd: BorrowedFd<'_>, offset: u64, bytes: &[u8]) {
        let end = offset.saturating_add(bytes.len() as u64);
        while self.end < end && !bytes.is_empty() && self.refusals < MAX_REFUSALS {
            let first = self.end.max(offset - offset % HUGE_BYTES);
            let len = WINDOW.min((end - first).next_multiple_of(HUGE_BYTES) as usize);
            self.end = first + len as u64;
            // A huge page takes the place of at least one small page.
            for page in (first..self.end).step_by(HUGE) {
                let at = page.max(offset);
                let byte = &bytes[(at - offset) as usize..][..1];
                // The write that follows reports a lack of memory.
                let _ = rustix::io::pwrite(fd, byte, at);
            }
            let begun = Instant::now();
            match self.place(fd, first, len) {
                Ok(()) => {
                    self.bytes += len as u64;
                    self.refusals = if begun.elapsed() > MAX_TIME { self.refusals + 1 } else { 0 };
                }
                Err(error) => {
                    // Kernels before 6.1 do not support the call, and later ones can be told to deny it.
                    let is_unsupported = error == Errno::INVAL && self.bytes == 0;
                    self.refusals = if is_unsupported { MAX_REFUSALS } else { self.refusals + 1 };
                    self.last_refusal = Some(error);
                }
            }
        }
    }

    fn place(&mut self, fd: BorrowedFd<'_>, first: u64, len: usize) -> Result<(), Errno> {
        let window = match &mut self.window {
            Some(window) => window,
            none => none.insert(AddressSpace::reserve(WINDOW)?),
        };
        window.map(fd, first, len)?;
        window.collapse()
    }

    /// Bytes that were placed in huge pages.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Why the kernel last refused.
    pub(super) const fn last_refusal(&self) -> Option<Errno> {
        self.last_refusal
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_kernel_that_refuses_is_asked_a_few_times() {
        let (_reader, not_a_file) = std::io::pipe().unwrap();
        let mut huge = HugePages::new();
        let bytes = vec![1; 4 * HUGE];
        for page in 0..2 * u64::from(MAX_REFUSALS) {
            huge.prepare(not_a_file.as_fd(), page * 4 * HUGE_BYTES, &bytes);
        }
        assert_eq!((huge.bytes(), huge.refusals), (0, MAX_REFUSALS));
        assert!(huge.last_refusal().is_some());
    }
}
