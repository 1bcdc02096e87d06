//! Copies with plain or with streaming stores.

#![allow(
    unsafe_code,
    reason = "copies between addresses, some with instructions that the compiler does not choose"
)]

/// The kind of store that a copy uses.
#[derive(Clone, Copy, Debug)]
pub(super) enum StoreKind {
    /// Stores through the caches, for data that a processor reads next.
    Plain,
    /// Stores past the caches, for data that a device reads next: it would have to fetch cached lines one by one.
    Streaming,
}

impl StoreKind {
    /// Copies `bytes` bytes.
    ///
    /// # Safety
    /// `from` is valid for reads of `bytes` bytes and `to` for writes of `bytes` bytes; they do not overlap. During the
    /// copy nothing else writes `from`, and nothing else reads or writes `to`.
    pub(super) unsafe fn copy(self, from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                StoreKind::Plain => plain(from, to, bytes),
                StoreKind::Streaming => streaming(from, to, bytes),
            }
        }
    }
}

/// # Safety
/// The conditions of [`StoreKind::copy`].
unsafe fn plain(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// The conditions of [`StoreKind::copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    // Bytes before the first aligned address, which streaming stores require.
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
    // SAFETY: the caller's promise. The fence orders the stores above before a later store that announces them.
    unsafe {
        plain(from.wrapping_add(done), to.wrapping_add(done), bytes - done);
        _mm_sfence();
    }
}

/// # Safety
/// The conditions of [`StoreKind::copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { plain(from, to, bytes) }
}
