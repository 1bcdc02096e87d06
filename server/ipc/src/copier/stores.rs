//! How bytes are stored: through the caches, or past them.

#![allow(
    unsafe_code,
    reason = "copies between addresses, some with instructions that the compiler does not choose"
)]

/// How bytes are stored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Store {
    /// Whoever reads them next finds them in the caches.
    Plain,
    /// They go past the caches, from which a device would have to fetch them line by line.
    Streaming,
}

impl Store {
    /// Copies `bytes` bytes.
    ///
    /// # Safety
    /// `from` is good for reads of as many bytes and `to` for writes; they do not overlap, and nobody writes the one or
    /// uses the other meanwhile.
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Store::Plain => plain(from, to, bytes),
                Store::Streaming => streaming(from, to, bytes),
            }
        }
    }
}

/// # Safety
/// As for [`Store::copy`].
unsafe fn plain(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// As for [`Store::copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    // What stands before the first address that such stores can go to.
    let head = to.align_offset(size_of::<__m128i>()).min(bytes);
    // SAFETY: the caller's promise.
    unsafe { plain(from, to, head) };
    let (lines, mut done) = ((bytes - head) / LINE, head);
    for _ in 0..lines {
        let (source, target) = (from.wrapping_add(done), to.wrapping_add(done));
        // SAFETY: a line within both; the target is aligned to 16 bytes. The instructions are part of x86-64.
        unsafe {
            let (source, target) = (source.cast::<__m128i>(), target.cast::<__m128i>());
            let a = _mm_loadu_si128(source);
            let b = _mm_loadu_si128(source.wrapping_add(1));
            let c = _mm_loadu_si128(source.wrapping_add(2));
            let d = _mm_loadu_si128(source.wrapping_add(3));
            _mm_stream_si128(target, a);
            _mm_stream_si128(target.wrapping_add(1), b);
            _mm_stream_si128(target.wrapping_add(2), c);
            _mm_stream_si128(target.wrapping_add(3), d);
        }
        done += LINE;
    }
    // SAFETY: the caller's promise. The fence orders the stores above before whatever tells of them.
    unsafe {
        plain(from.wrapping_add(done), to.wrapping_add(done), bytes - done);
        _mm_sfence();
    }
}

/// # Safety
/// As for [`Store::copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { plain(from, to, bytes) }
}
