//! Copies of many rows by several threads: one core moves about 10 GB/s, a GPU's link takes 50.

#![allow(
    unsafe_code,
    reason = "copies into memory that two processes take turns on, or that holds nothing yet"
)]

use rayon::prelude::*;

use super::pieces::Slices;

/// Less than this the calling thread copies alone: waking others takes as long.
const ALONE: usize = 1 << 19;
/// What a thread takes at a time.
const CHUNK: usize = 1 << 17;

/// Copies bytes, many of them over several threads.
#[derive(Debug, Default)]
pub struct Copier {
    pool: Option<rayon::ThreadPool>,
}

/// Where a copy goes; the threads write to different parts of it.
#[derive(Clone, Copy)]
struct Target(*mut u8);

// SAFETY: an address; see `Copier::copy` for who may write there.
unsafe impl Sync for Target {}

impl Target {
    fn at(&self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

impl Copier {
    /// Copies over `threads` threads, of which the calling one is the first; all copies are to be made by it. With one,
    /// or if others cannot be had, it copies alone.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        if threads < 2 {
            return Copier::default();
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .use_current_thread()
            .thread_name(|i| format!("copies-{i}"))
            .build();
        if let Err(error) = &pool {
            tracing::warn!(%error, "rows are copied by one thread");
        }
        Copier { pool: pool.ok() }
    }

    /// Copies `from` to `to`.
    ///
    /// # Safety
    /// There are as many bytes at `to`, which nobody else uses meanwhile, and which do not overlap `from`.
    pub unsafe fn copy(&self, from: &[u8], to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.run(from.into(), to, plain) }
    }

    /// The same for bytes that a device reads next, and that may be in pieces. What several threads copy goes past
    /// their caches, from which the device would have to fetch it line by line.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn stream(&self, from: Slices<'_>, to: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe { self.run(from, to, streaming) }
    }

    /// Copies `from` to `to`, by several threads in the way of `how`.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    unsafe fn run(&self, from: Slices<'_>, to: *mut u8, how: unsafe fn(&[u8], *mut u8)) {
        let to = Target(to);
        let mut offset = 0;
        let placed = from.iter().map(|slice| {
            let at = offset;
            offset += slice.len();
            (at, slice)
        });
        let Some(pool) = self.pool.as_ref().filter(|_| from.len() >= ALONE) else {
            // SAFETY: the caller's promise; slices follow each other.
            placed.for_each(|(at, slice)| unsafe { plain(slice, to.at(at)) });
            return;
        };
        let chunks = placed.flat_map(|(at, slice)| (at..).step_by(CHUNK).zip(slice.chunks(CHUNK)));
        let chunks: Vec<(usize, &[u8])> = chunks.collect();
        pool.install(|| {
            chunks.into_par_iter().for_each(|(at, chunk)| {
                // SAFETY: the caller's promise; chunks are disjoint.
                unsafe { how(chunk, to.at(at)) };
            });
        });
    }

    /// Appends `from` to `to`.
    pub fn append(&self, from: &[u8], to: &mut Vec<u8>) {
        to.reserve(from.len());
        let before = to.len();
        // SAFETY: room was reserved behind what the vector holds, and all of it is written before it counts.
        unsafe {
            self.copy(from, to.as_mut_ptr().add(before));
            to.set_len(before + from.len());
        }
    }
}

/// # Safety
/// As for [`Copier::copy`].
unsafe fn plain(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
}

/// # Safety
/// As for [`Copier::copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn streaming(from: &[u8], to: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    // What stands before the first address that such stores can go to.
    let (head, from) = from.split_at(to.align_offset(16).min(from.len()));
    // SAFETY: the caller's promise.
    unsafe { plain(head, to) };
    let to = to.wrapping_add(head.len());
    let lines = from.len() / 64;
    for line in 0..lines {
        let (source, target) = (from.as_ptr().wrapping_add(line * 64), to.wrapping_add(line * 64));
        // SAFETY: 64 bytes within both; the target is aligned to 16 bytes. The instructions are part of x86-64.
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
    }
    let rest = &from[lines * 64..];
    // SAFETY: the caller's promise. The fence orders the stores above before whatever tells of them.
    unsafe {
        plain(rest, to.wrapping_add(lines * 64));
        _mm_sfence();
    }
}

/// # Safety
/// As for [`Copier::copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn streaming(from: &[u8], to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { plain(from, to) }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::Pieces;
    use super::*;

    #[test]
    fn copies_are_whole_however_many_threads_make_them() {
        for threads in [1, 3] {
            // A thread can belong to one pool only.
            let checked = std::thread::spawn(move || {
                let copier = Copier::new(threads);
                let mut staged = vec![0_u8; 4 * ALONE];
                let bytes: Vec<u8> = (0..3 * ALONE + 77).map(|i| (i * 31 % 251) as u8).collect();
                let mut all = vec![1, 2, 3];
                for len in [0, 1, ALONE - 1, ALONE, ALONE + CHUNK + 5, bytes.len()] {
                    let before = all.len();
                    // In pieces, and with a byte on either side that is not asked for.
                    let around = [&[9], &bytes[..len], &[9]].concat();
                    let pieces: Pieces = around.chunks(CHUNK / 3 + 1).map(Bytes::copy_from_slice).collect();
                    copier.append(&bytes[..len], &mut all);
                    assert!(all[before..] == bytes[..len], "{len} bytes by {threads} threads");
                    // Aligned to 16 bytes and not.
                    for at in [0, 64, 3] {
                        staged.fill(0xee);
                        // SAFETY: as many bytes and more.
                        unsafe { copier.stream(pieces.slices(1..len + 1), staged.as_mut_ptr().add(at)) };
                        assert!(
                            staged[at..at + len] == bytes[..len],
                            "{len} bytes to {at} by {threads} threads"
                        );
                        assert!(staged[..at].iter().chain(&staged[at + len..]).all(|&byte| byte == 0xee));
                    }
                }
                assert_eq!(all[..3], [1, 2, 3]);
            });
            assert!(checked.join().is_ok());
        }
    }
}
