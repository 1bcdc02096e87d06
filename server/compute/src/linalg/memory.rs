//! Memory for packed weights and scratch: zeroed, 64-byte aligned and, where large enough, in huge pages.
#![allow(
    unsafe_code,
    reason = "anonymous mappings, so that large buffers lie in huge pages and are not rounded up"
)]

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

const ALIGN: usize = 64;
const HUGE: usize = 2 << 20;
const PAGE: usize = 4096;

/// A zeroed buffer of `T`s, aligned to 64 bytes.
///
/// From 2 MiB on it is an anonymous mapping that starts on a huge-page boundary and is advised to use huge pages, so
/// that TLB misses do not slow the streaming of weights. Its end is not rounded up to a huge page, so that resident
/// memory is what the weights need.
pub struct AlignedBuffer<T> {
    data: NonNull<T>,
    len: usize,
}

// SAFETY: AlignedBuffer owns its memory, as Vec does.
unsafe impl<T: Send> Send for AlignedBuffer<T> {}
// SAFETY: a shared reference gives shared slices only.
unsafe impl<T: Sync> Sync for AlignedBuffer<T> {}

impl<T: bytemuck::Pod> AlignedBuffer<T> {
    /// A buffer of `len` zeros.
    ///
    /// # Panics
    /// Aborts the process, as `Vec` does, when memory cannot be allocated.
    pub fn zeroed(len: usize) -> Self {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer is smaller than the address space");
        let data = if bytes == 0 {
            NonNull::dangling()
        } else if bytes < HUGE {
            // SAFETY: the layout is not empty.
            let data = unsafe { alloc_zeroed(layout(bytes)) };
            NonNull::new(data).unwrap_or_else(|| handle_alloc_error(layout(bytes))).cast()
        } else {
            map(bytes).unwrap_or_else(|| handle_alloc_error(layout(bytes))).cast()
        };
        AlignedBuffer { data, len }
    }

    /// A buffer of `len` zeros whose pages are already resident. A process that has such buffers before it is ready
    /// does not grow with the largest step that it has computed.
    ///
    /// # Panics
    /// See [`zeroed`](Self::zeroed).
    pub fn resident(len: usize) -> Self {
        let mut buffer = Self::zeroed(len);
        let pages = buffer.iter_mut().step_by((PAGE / size_of::<T>()).max(1));
        // `black_box` keeps the compiler from eliding stores of zeros to zeroed memory.
        pages.for_each(|element| *element = std::hint::black_box(T::zeroed()));
        if let Some(last) = buffer.last_mut() {
            *last = std::hint::black_box(T::zeroed());
        }
        buffer
    }
}

impl<T> std::ops::Deref for AlignedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: data points to len initialised elements (zeros are valid for Pod) owned by self; it is well aligned
        // and not null even when len is 0.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T> std::ops::DerefMut for AlignedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in deref, and self is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<T> Drop for AlignedBuffer<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes == 0 {
        } else if bytes < HUGE {
            // SAFETY: the memory was allocated in `zeroed` with this layout.
            unsafe { dealloc(self.data.as_ptr().cast(), layout(bytes)) }
        } else {
            // SAFETY: `map` returned this mapping with this length, and no borrow of it is left.
            let _ = unsafe { munmap(self.data.as_ptr().cast(), bytes.next_multiple_of(PAGE)) };
        }
    }
}

impl<T> std::fmt::Debug for AlignedBuffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBuffer({} elements)", self.len)
    }
}

fn layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, ALIGN).expect("the length was checked")
}

/// Maps `bytes`, rounded up to small pages, at a huge-page boundary.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let bytes = bytes.checked_next_multiple_of(PAGE)?;
    let reserved = bytes.checked_add(HUGE)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address that the kernel chooses affects no other memory.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::READ | ProtFlags::WRITE, flags) };
    let start = start.ok()?.cast::<u8>();
    let head = start.align_offset(HUGE);
    let tail = reserved - head - bytes;
    // SAFETY: the mapping is head + bytes + tail. Head and tail, multiples of the page size, are unmapped, and only the
    // rest is advised. An error leaves more mapped, or small pages, which is harmless.
    unsafe {
        if head > 0 {
            let _ = munmap(start.cast(), head);
        }
        if tail > 0 {
            let _ = munmap(start.add(head + bytes).cast(), tail);
        }
        let _ = madvise(start.add(head).cast(), bytes, Advice::LinuxHugepage);
        NonNull::new(start.add(head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_aligned_and_writable() {
        for bytes in [0, 1, 63, 4096, HUGE - 1, HUGE, HUGE + 1, 3 * HUGE + 12345] {
            let mut buffer = AlignedBuffer::<u8>::zeroed(bytes);
            assert_eq!(buffer.len(), bytes);
            assert!(
                bytes == 0 || buffer.as_ptr().addr().is_multiple_of(if bytes < HUGE { ALIGN } else { HUGE })
            );
            assert!(buffer.iter().all(|&b| b == 0));
            buffer.fill(0xa5);
            assert!(buffer.iter().all(|&b| b == 0xa5));
        }
        assert_eq!(AlignedBuffer::<f32>::zeroed(HUGE / 4 + 3).len(), HUGE / 4 + 3);
    }

    #[test]
    fn resident_buffers_have_all_pages() {
        for len in [0, 1, 1024, 3 * HUGE / 4 + 5] {
            assert!(AlignedBuffer::<f32>::resident(len).iter().all(|&value| value.to_bits() == 0));
        }
        // The length stays below a huge page: one write would make a whole huge page resident.
        let len = (HUGE - PAGE) / size_of::<f32>();
        let buffer = AlignedBuffer::<f32>::resident(len);
        let first = buffer.as_ptr().expose_provenance().next_multiple_of(PAGE);
        let last = (buffer.as_ptr().addr() + HUGE - PAGE) / PAGE * PAGE;
        let mut pages = vec![0_u8; (last - first) / PAGE];
        // SAFETY: the range consists of pages of the buffer, and `pages` has a byte for each.
        let status = unsafe {
            libc::mincore(std::ptr::with_exposed_provenance_mut(first), last - first, pages.as_mut_ptr())
        };
        assert_eq!(status, 0);
        assert!(pages.iter().all(|page| page & 1 == 1), "some page is not resident");
    }
}
