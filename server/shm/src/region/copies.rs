//! Copies by one thread from and to memory that other processes may access at any time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::SharedSlice;

/// Bytes of the words that copies move.
const WORD: usize = size_of::<u64>();

impl SharedSlice<u8> {
    /// Copies the bytes from byte `at` on to `to`, each once. Bytes that change meanwhile are copied as they were or as they
    /// become.
    ///
    /// # Panics
    /// If the bytes exceed the view.
    pub fn load_bytes(&self, at: usize, to: &mut [u8]) {
        assert!(at <= self.len() && to.len() <= self.len() - at, "a copy exceeds its source");
        // SAFETY: in bounds (asserted) of a region that the view keeps mapped; this process writes memory that is shared so
        // with atomic stores only. The destination is borrowed mutably.
        unsafe { from_shared(self.as_ptr().wrapping_add(at), to.as_mut_ptr(), to.len()) };
    }

    /// Copies `from` to the bytes from byte `at` on.
    ///
    /// # Panics
    /// If the bytes exceed the view.
    pub fn store_bytes(&self, at: usize, from: &[u8]) {
        assert!(at <= self.len() && from.len() <= self.len() - at, "a copy exceeds its destination");
        // SAFETY: as in `load_bytes`; the source is borrowed.
        unsafe { to_shared(from.as_ptr(), self.as_ptr().wrapping_add(at), from.len()) };
    }
}

/// Copies from memory that other threads and processes may write meanwhile: each word or byte is loaded once, atomically.
///
/// # Safety
/// `from` is valid for reads of `bytes` bytes, and all its concurrent writers in this process store atomically. `to` is valid
/// for writes of `bytes` bytes, which nothing else accesses.
pub unsafe fn from_shared(from: *const u8, to: *mut u8, bytes: usize) {
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
pub unsafe fn to_shared(from: *const u8, to: *mut u8, bytes: usize) {
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
