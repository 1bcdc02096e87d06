//! Bytes in one or several chunks, kept where they arrived.

use std::ops::Range;

use bytes::Bytes;

/// A sequence of bytes that is stored in one or several chunks.
#[derive(Clone, Debug, Default)]
pub struct ChunkedBytes {
    first: Bytes,
    rest: Vec<Bytes>,
}

impl From<Bytes> for ChunkedBytes {
    fn from(first: Bytes) -> Self {
        ChunkedBytes { first, rest: Vec::new() }
    }
}

impl FromIterator<Bytes> for ChunkedBytes {
    fn from_iter<I: IntoIterator<Item = Bytes>>(chunks: I) -> Self {
        let mut chunks = chunks.into_iter();
        ChunkedBytes { first: chunks.next().unwrap_or_default(), rest: chunks.collect() }
    }
}

impl IntoIterator for ChunkedBytes {
    type Item = Bytes;
    type IntoIter = std::iter::Chain<std::iter::Once<Bytes>, std::vec::IntoIter<Bytes>>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.first).chain(self.rest)
    }
}

impl ChunkedBytes {
    /// Length of all chunks together, in bytes.
    pub fn len(&self) -> usize {
        self.first.len() + self.rest.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Borrows bytes `range`, without a copy.
    #[must_use]
    pub fn view(&self, range: Range<usize>) -> ChunkedSlice<'_> {
        ChunkedSlice { first: &self.first, rest: &self.rest, skip: range.start, len: range.len() }
    }

    /// Bytes `range` as a separate value that shares the chunks' memory.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> ChunkedBytes {
        let mut start = 0;
        let parts = std::iter::once(&self.first).chain(&self.rest).filter_map(|chunk| {
            let here = start..start + chunk.len();
            start = here.end;
            let (from, to) = (range.start.max(here.start), range.end.min(here.end));
            (from < to).then(|| chunk.slice(from - here.start..to - here.start))
        });
        parts.collect()
    }

    /// All bytes in one buffer; copies only if there are several chunks.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        if self.rest.is_empty() {
            return self.first.clone();
        }
        self.view(0..self.len()).iter().collect::<Vec<_>>().concat().into()
    }
}

/// Borrowed bytes in one or several slices.
#[derive(Clone, Copy, Debug)]
pub struct ChunkedSlice<'a> {
    first: &'a [u8],
    rest: &'a [Bytes],
    /// Bytes before the first one that belongs to this slice.
    skip: usize,
    len: usize,
}

impl<'a> From<&'a [u8]> for ChunkedSlice<'a> {
    fn from(first: &'a [u8]) -> Self {
        ChunkedSlice { first, rest: &[], skip: 0, len: first.len() }
    }
}

impl<'a> ChunkedSlice<'a> {
    /// Length of all slices together, in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The non-empty slices in order.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (mut skip, mut left) = (self.skip, self.len);
        std::iter::once(self.first).chain(self.rest.iter().map(|chunk| &chunk[..])).filter_map(move |chunk| {
            let from = skip.min(chunk.len());
            skip -= from;
            let here = &chunk[from..chunk.len().min(from + left)];
            left -= here.len();
            (!here.is_empty()).then_some(here)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_of_chunks_are_ranges_of_the_whole(
            chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9),
            ends in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let whole = chunks.concat();
            let chunks: ChunkedBytes = chunks.into_iter().map(Bytes::from).collect();
            let (one, two) = (ends.0.index(whole.len() + 1), ends.1.index(whole.len() + 1));
            let range = one.min(two)..one.max(two);
            prop_assert_eq!(chunks.len(), whole.len());
            prop_assert_eq!(&chunks.to_bytes()[..], &whole[..]);
            let view = chunks.view(range.clone());
            prop_assert!(view.iter().all(|slice| !slice.is_empty()));
            prop_assert_eq!(view.len(), range.len());
            prop_assert_eq!(view.iter().collect::<Vec<_>>().concat(), &whole[range.clone()]);
            prop_assert_eq!(&chunks.slice(range.clone()).to_bytes()[..], &whole[range]);
        }
    }
}
