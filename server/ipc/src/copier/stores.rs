//! Copies with plain or with streaming stores.

#![allow(
    unsafe_code,
    reason = "copies between addresses, some with instructions that the compiler does not choose"
)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Bytes of the words of copies from and to shared memory.
const WORD: usize = size_of::<u64>();

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

/// Copies from memory that other threads and processes may write meanwhile: each word or byte is loaded once, atomically.
///
/// # Safety
/// `from` is valid for reads of `bytes` bytes, and all its concurrent writers in this process store atomically. `to` is valid
/// for writes of `bytes` bytes, which nothing else accesses.
pub(super) unsafe fn from_shared(from: *const u8, to: *mut u8, bytes: usize) {
    let head = from.align_offset(WORD).min(bytes);
    let tail = head + (bytes - head) / WORD * WORD;
    for at in (0..head).chain(tail..bytes) {
        // SAFETY: within both, which are valid as the caller promises.
        unsafe {
            let byte = AtomicU8::from_ptr(from.wrapping_add(at).cast_mut()).load(Ordering::Relaxed);
            to.wrapping_add(at).write(byte);
        }
    }
    for at in (head..tail).step_by(WORD) {
        // SAFETY: within both; `from` is aligned from `head` on, and the store needs no alignment.
        unsafe {
            let word = AtomicU64::from_ptr(from.wrapping_add(at).cast_mut().cast()).load(Ordering::Relaxed);
            to.wrapping_add(at).cast::<u64>().write_unaligned(word);
        }
    }
}

/// Copies to memory that other threads and processes may access meanwhile: each word or byte is stored atomically.
///
/// # Safety
/// `from` is valid for reads of `bytes` bytes, which nothing writes meanwhile. `to` is valid for writes of `bytes` bytes, and
/// all its concurrent accesses in this process are atomic.
pub(super) unsafe fn to_shared(from: *const u8, to: *mut u8, bytes: usize) {
    let head = to.align_offset(WORD).min(bytes);
    let tail = head + (bytes - head) / WORD * WORD;
    for at in (0..head).chain(tail..bytes) {
        // SAFETY: within both, which are valid as the caller promises.
        unsafe {
            let byte = from.wrapping_add(at).read();
            AtomicU8::from_ptr(to.wrapping_add(at)).store(byte, Ordering::Relaxed);
        }
    }
    for at in (head..tail).step_by(WORD) {
        // SAFETY: within both; `to` is aligned from `head` on, and the load needs no alignment.
        unsafe {
            let word = from.wrapping_add(at).cast::<u64>().read_unaligned();
            AtomicU64::from_ptr(to.wrapping_add(at).cast()).store(word, Ordering::Relaxed);
        }
    }
}

/// # Safety
/// As for [`StoreKind::copy`].
unsafe fn plain(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

/// # Safety
/// As for [`StoreKind::copy`].
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
/// As for [`StoreKind::copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { plain(from, to, bytes) }
}
