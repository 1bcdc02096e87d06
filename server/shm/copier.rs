//! Copies of many rows by several threads: one core moves about 10 GB/s, a GPU's link takes 50.

#![allow(
    unsafe_code,
    reason = "copies into memory that two processes take turns on, or that holds nothing yet"
)]

use rayon::prelude::*;

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
        let Some(pool) = self.pool.as_ref().filter(|_| from.len() >= ALONE) else {
            // SAFETY: the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            return;
        };
        let to = Target(to);
        pool.install(|| {
            from.par_chunks(CHUNK).enumerate().for_each(|(index, chunk)| {
                // SAFETY: the caller's promise; chunks are disjoint.
                unsafe { std::ptr::copy_nonoverlapping(chunk.as_ptr(), to.at(index * CHUNK), chunk.len()) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_whole_however_many_threads_make_them() {
        for threads in [1, 3] {
            // A thread can belong to one pool only.
            let checked = std::thread::spawn(move || {
                let copier = Copier::new(threads);
                let bytes: Vec<u8> = (0..3 * ALONE + 77).map(|i| (i * 31 % 251) as u8).collect();
                let mut all = vec![1, 2, 3];
                for len in [0, 1, ALONE - 1, ALONE, ALONE + CHUNK + 5, bytes.len()] {
                    let before = all.len();
                    copier.append(&bytes[..len], &mut all);
                    assert!(all[before..] == bytes[..len], "{len} bytes by {threads} threads");
                }
                assert_eq!(all[..3], [1, 2, 3]);
            });
            assert!(checked.join().is_ok());
        }
    }
}
