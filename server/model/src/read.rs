//! Reads tensors from files to memory. Bytes that the page cache holds are copied from it; others are read past it, which is faster
//! than through a mapping or through the cache (docs/measurements/weights.md).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rayon::prelude::*;

use super::ModelError;
use super::store::{Mapped, Store};

/// Alignment of direct reads: of places in files, in memory, and of lengths. No block device in use asks for more.
const ALIGN: usize = 4096;
/// Number of bytes that a thread reads at a time, a multiple of [`ALIGN`].
const PIECE: usize = 4 << 20;

/// Number of bytes read, by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// From the page cache, or through it.
    pub cached: u64,
    /// Past the page cache.
    pub direct: u64,
}

impl std::iter::Sum for ReadBytes {
    fn sum<I: Iterator<Item = ReadBytes>>(all: I) -> ReadBytes {
        let add = |a: ReadBytes, b: ReadBytes| ReadBytes {
            cached: a.cached + b.cached,
            direct: a.direct + b.direct,
        };
        all.fold(ReadBytes::default(), add)
    }
}

/// Memory for the tensors of one expert at a time. It grows to the largest one.
#[derive(Debug, Default)]
pub struct ReadBuffer {
    memory: Vec<u8>,
    total: ReadBytes,
}

/// A part of a file, and its place in the buffer.
struct Part {
    shard: usize,
    /// Bytes of the file.
    bytes: Range<usize>,
    /// Where the first byte of the page that `bytes` begins in is put.
    place: usize,
}

impl Part {
    /// The bytes of the file in whole pages.
    const fn pages(&self) -> Range<usize> {
        self.bytes.start / ALIGN * ALIGN..self.bytes.end.next_multiple_of(ALIGN)
    }
}

impl ReadBuffer {
    /// All bytes read to this buffer.
    #[must_use]
    pub const fn total(&self) -> ReadBytes {
        self.total
    }

    /// Reads slices of mapped files; returns their copies in the same order. The threads of the current pool share the work.
    pub(super) fn read<'a>(
        &'a mut self,
        store: &'a Store,
        slices: &[&'a [u8]],
    ) -> Result<Vec<&'a [u8]>, ModelError> {
        let places: Vec<_> = slices.iter().map(|slice| store.place(slice)).collect();
        let parts = parts(&places);
        let bytes = parts.last().map_or(0, |part| part.place + part.pages().len());
        if self.memory.len() < bytes + ALIGN {
            self.memory.resize(bytes + ALIGN, 0);
        }
        let first = self.memory.as_ptr().align_offset(ALIGN);
        let mut rest = &mut self.memory[first..];
        let mut pieces = Vec::new();
        for part in &parts {
            let mapped = store.mapped(part.shard);
            let pages = part.pages();
            let direct = mapped.direct.as_ref().filter(|_| !mapped.is_cached(pages.clone()));
            match direct {
                Some(_) => self.total.direct += part.bytes.len() as u64,
                None => self.total.cached += part.bytes.len() as u64,
            }
            let (memory, after) = std::mem::take(&mut rest).split_at_mut(pages.len());
            rest = after;
            let starts = pages.step_by(PIECE);
            pieces
                .extend(memory.chunks_mut(PIECE).zip(starts).map(|(to, at)| (part, mapped, direct, to, at)));
        }
        pieces.into_par_iter().try_for_each(|(part, mapped, direct, to, at)| {
            read_piece(mapped, direct, to, at, part.bytes.end)
                .map_err(|error| store.read_error(part.shard, error))
        })?;
        let memory = &self.memory[first..];
        let copy = |(shard, bytes): &(usize, Range<usize>)| {
            let holds = |part: &&Part| {
                part.shard == *shard && part.pages().start <= bytes.start && bytes.end <= part.bytes.end
            };
            let part = parts.iter().find(holds).expect("each slice lies in a part");
            &memory[part.place + bytes.start - part.pages().start..][..bytes.len()]
        };
        Ok(places.iter().map(copy).collect())
    }
}

/// The parts of files that cover `places`, in the order of files, with places one after another. Two parts have no page in common.
fn parts(places: &[(usize, Range<usize>)]) -> Vec<Part> {
    let mut sorted: Vec<_> = places.iter().filter(|(_, bytes)| !bytes.is_empty()).collect();
    sorted.sort_unstable_by_key(|(shard, bytes)| (*shard, bytes.start));
    let mut parts: Vec<Part> = Vec::new();
    for (shard, bytes) in sorted {
        match parts.last_mut() {
            Some(last) if last.shard == *shard && bytes.start < last.pages().end => {
                last.bytes.end = last.bytes.end.max(bytes.end);
            }
            last => {
                let place = last.map_or(0, |last| last.place + last.pages().len());
                parts.push(Part { shard: *shard, bytes: bytes.clone(), place });
            }
        }
    }
    parts
}

/// Reads the bytes from `at` to `end` of a file, or as many as `to` takes, with `direct` if it can.
fn read_piece(
    mapped: &Mapped,
    direct: Option<&File>,
    to: &mut [u8],
    at: usize,
    end: usize,
) -> io::Result<()> {
    let wanted = to.len().min(end - at);
    let mut done = 0;
    if let Some(file) = direct {
        // Whole pages are read. A file system may refuse, and the last page of a file may be short.
        while done < wanted && done.is_multiple_of(ALIGN) {
            match file.read_at(&mut to[done..], (at + done) as u64) {
                Ok(0) => break,
                Ok(bytes) => done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    }
    match to.get_mut(done..wanted) {
        Some(rest) => mapped.file.read_exact_at(rest, (at + done) as u64),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_that_share_pages_are_read_once() {
        let place = |shard, bytes| (shard, bytes);
        let parts = parts(&[
            place(1, 10..5000),
            place(0, 9000..9001),
            place(1, 8000..8100),
            place(1, 20_000..20_500),
            place(0, 0..0),
            place(1, 20..30),
        ]);
        let found: Vec<_> = parts.iter().map(|p| (p.shard, p.bytes.clone(), p.place)).collect();
        assert_eq!(found, [(0, 9000..9001, 0), (1, 10..8100, 4096), (1, 20_000..20_500, 12_288)]);
    }
}
