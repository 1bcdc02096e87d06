//! Reads tensors past the page cache if it does not hold them (docs/measurements/weights.md); the others are read from their
//! mappings.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rayon::prelude::*;

use super::ModelError;
use super::mapped::Mapped;
use super::store::Store;

/// Alignment of direct reads: of places in files, in memory, and of lengths. No block device in use asks for more.
const ALIGN: usize = 4096;
/// Number of bytes that a thread reads at a time, a multiple of [`ALIGN`].
const PIECE: usize = 4 << 20;

/// Number of bytes, by where they came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBytes {
    /// Used from mappings.
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
///
/// The default uses all tensors from their mappings, so that the page cache holds them afterwards, and has no memory.
#[derive(Debug, Default)]
pub struct ReadBuffer {
    past_cache: bool,
    memory: Vec<u8>,
    total: ReadBytes,
}

/// A part of a file, and its place in the buffer.
struct Part {
    shard: usize,
    /// Bytes of the file.
    bytes: Range<usize>,
    /// Place in the buffer of the page in which `bytes` begins. `None`: the part is in the page cache and is used from there.
    place: Option<usize>,
}

impl Part {
    /// The bytes of the file in whole pages.
    const fn pages(&self) -> Range<usize> {
        self.bytes.start / ALIGN * ALIGN..self.bytes.end.next_multiple_of(ALIGN)
    }
}

impl ReadBuffer {
    /// A buffer whose tensors are read past the page cache, where it does not hold them.
    #[must_use]
    pub fn past_cache() -> Self {
        ReadBuffer { past_cache: true, ..ReadBuffer::default() }
    }

    /// Number of bytes of all tensors that were asked for.
    #[must_use]
    pub const fn total(&self) -> ReadBytes {
        self.total
    }

    /// Reads slices of mapped files, where the page cache does not hold them; returns what was read, or the slices themselves, in the same
    /// order. The threads of the current pool share the work.
    pub(super) fn read<'a>(
        &'a mut self,
        store: &'a Store,
        slices: &[&'a [u8]],
    ) -> Result<Vec<&'a [u8]>, ModelError> {
        if !self.past_cache {
            self.total.cached += slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
            return Ok(slices.to_vec());
        }
        let places: Vec<_> = slices.iter().map(|slice| store.place(slice)).collect();
        let mut parts = parts(&places);
        let mut end = 0;
        for part in &mut parts {
            let mapped = store.mapped(part.shard);
            if mapped.direct.is_some() && !mapped.is_cached(part.pages()) {
                part.place = Some(end);
                end += part.pages().len();
                self.total.direct += part.bytes.len() as u64;
            } else {
                mapped.will_need(part.bytes.clone());
                self.total.cached += part.bytes.len() as u64;
            }
        }
        if self.memory.len() < end + ALIGN {
            self.memory.resize(end + ALIGN, 0);
        }
        let first = self.memory.as_ptr().align_offset(ALIGN);
        let mut rest = &mut self.memory[first..];
        let mut pieces = Vec::new();
        for part in parts.iter().filter(|part| part.place.is_some()) {
            let (memory, after) = std::mem::take(&mut rest).split_at_mut(part.pages().len());
            rest = after;
            pieces.extend(memory.chunks_mut(PIECE).zip(part.pages().step_by(PIECE)).map(|to| (part, to)));
        }
        pieces.into_par_iter().try_for_each(|(part, (to, at))| {
            let read = read_piece(store.mapped(part.shard), to, at, part.bytes.end);
            read.map_err(|error| store.read_error(part.shard, error))
        })?;
        let memory = &self.memory[first..];
        let find = |(slice, (shard, bytes)): (&&'a [u8], &(usize, Range<usize>))| {
            let holds = |part: &&Part| {
                part.shard == *shard && part.pages().start <= bytes.start && bytes.end <= part.bytes.end
            };
            match parts
                .iter()
                .find(holds)
                .and_then(|part| Some(part.place? + bytes.start - part.pages().start))
            {
                Some(at) => &memory[at..][..bytes.len()],
                None => slice,
            }
        };
        Ok(slices.iter().zip(&places).map(find).collect())
    }
}

/// The parts of files that cover `places`, in the order of files. Two parts have no page in common.
fn parts(places: &[(usize, Range<usize>)]) -> Vec<Part> {
    let mut sorted: Vec<_> = places.iter().filter(|(_, bytes)| !bytes.is_empty()).collect();
    sorted.sort_unstable_by_key(|(shard, bytes)| (*shard, bytes.start));
    let mut parts: Vec<Part> = Vec::new();
    for (shard, bytes) in sorted {
        match parts.last_mut() {
            Some(last) if last.shard == *shard && bytes.start < last.pages().end => {
                last.bytes.end = last.bytes.end.max(bytes.end);
            }
            _ => parts.push(Part { shard: *shard, bytes: bytes.clone(), place: None }),
        }
    }
    parts
}

/// Reads the bytes from `at` to `end` of a file, or as many as `to` takes, past the page cache if the file system lets it.
fn read_piece(mapped: &Mapped, to: &mut [u8], at: usize, end: usize) -> io::Result<()> {
    let wanted = to.len().min(end - at);
    let mut done = 0;
    if let Some(file) = &mapped.direct {
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
        let found: Vec<_> = parts.iter().map(|p| (p.shard, p.bytes.clone(), p.pages())).collect();
        let expected = [
            (0, 9000..9001, 8192..12_288),
            (1, 10..8100, 0..8192),
            (1, 20_000..20_500, 16_384..20_480 + 4096),
        ];
        assert_eq!(found, expected);
    }
}
