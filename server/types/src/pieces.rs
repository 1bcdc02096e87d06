//! Bytes that stay where they arrived: in one piece, or in several that follow each other.

use std::ops::Range;

use bytes::Bytes;

/// Bytes in one piece or several.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    first: Bytes,
    more: Vec<Bytes>,
}

impl From<Bytes> for Pieces {
    fn from(first: Bytes) -> Self {
        Pieces { first, more: Vec::new() }
    }
}

impl FromIterator<Bytes> for Pieces {
    fn from_iter<I: IntoIterator<Item = Bytes>>(pieces: I) -> Self {
        let mut pieces = pieces.into_iter();
        Pieces { first: pieces.next().unwrap_or_default(), more: pieces.collect() }
    }
}

impl IntoIterator for Pieces {
    type Item = Bytes;
    type IntoIter = std::iter::Chain<std::iter::Once<Bytes>, std::vec::IntoIter<Bytes>>;

    fn into_iter(self) -> Self::IntoIter {
        std::iter::once(self.first).chain(self.more)
    }
}

impl Pieces {
    /// All of them together, bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.first.len() + self.more.iter().map(Bytes::len).sum::<usize>()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes `range`, without a copy.
    #[must_use]
    pub fn slices(&self, range: Range<usize>) -> Slices<'_> {
        Slices { first: &self.first, more: &self.more, skip: range.start, len: range.len() }
    }

    /// Bytes `range` as pieces of their own, without a copy.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Pieces {
        let mut start = 0;
        let parts = std::iter::once(&self.first).chain(&self.more).filter_map(|piece| {
            let here = start..start + piece.len();
            start = here.end;
            let (from, to) = (range.start.max(here.start), range.end.min(here.end));
            (from < to).then(|| piece.slice(from - here.start..to - here.start))
        });
        parts.collect()
    }

    /// All in one piece; a copy if there are several.
    #[must_use]
    pub fn to_bytes(&self) -> Bytes {
        if self.more.is_empty() {
            return self.first.clone();
        }
        self.slices(0..self.len()).iter().collect::<Vec<_>>().concat().into()
    }
}

/// Borrowed bytes in one slice or several.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a> {
    first: &'a [u8],
    more: &'a [Bytes],
    skip: usize,
    len: usize,
}

impl<'a> From<&'a [u8]> for Slices<'a> {
    fn from(first: &'a [u8]) -> Self {
        Slices { first, more: &[], skip: 0, len: first.len() }
    }
}

impl<'a> Slices<'a> {
    /// All of them together, bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slices in order, none of them empty.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let (mut skip, mut left) = (self.skip, self.len);
        std::iter::once(self.first).chain(self.more.iter().map(|piece| &piece[..])).filter_map(move |piece| {
            let from = skip.min(piece.len());
            skip -= from;
            let here = &piece[from..piece.len().min(from + left)];
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
        fn ranges_of_pieces_are_ranges_of_the_whole(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..9),
            ends in any::<(prop::sample::Index, prop::sample::Index)>(),
        ) {
            let whole = pieces.concat();
            let pieces: Pieces = pieces.into_iter().map(Bytes::from).collect();
            let (one, two) = (ends.0.index(whole.len() + 1), ends.1.index(whole.len() + 1));
            let range = one.min(two)..one.max(two);
            prop_assert_eq!(pieces.len(), whole.len());
            prop_assert_eq!(&pieces.to_bytes()[..], &whole[..]);
            let slices = pieces.slices(range.clone());
            prop_assert!(slices.iter().all(|slice| !slice.is_empty()));
            prop_assert_eq!(slices.len(), range.len());
            prop_assert_eq!(slices.iter().collect::<Vec<_>>().concat(), &whole[range.clone()]);
            prop_assert_eq!(&pieces.part(range.clone()).to_bytes()[..], &whole[range]);
        }
    }
}
