//! Rows stored in several slices.

use crate::linalg::DisjointSlice;

/// Largest number of slices per call.
pub(super) const MAX_SEGMENTS: usize = 64;

/// Slices of rows whose numbers count through all slices.
pub(super) struct Segments<S> {
    slices: [Option<S>; MAX_SEGMENTS],
    /// Number of rows up to the end of each slice.
    ends: [usize; MAX_SEGMENTS],
    rows: usize,
}

impl<S> Segments<S> {
    fn new(slices: impl Iterator<Item = (S, usize)>, hidden: usize) -> Self {
        let mut segments =
            Segments { slices: [const { None }; MAX_SEGMENTS], ends: [usize::MAX; MAX_SEGMENTS], rows: 0 };
        for (i, (slice, len)) in slices.enumerate() {
            assert!(i < MAX_SEGMENTS, "the rows have more than {MAX_SEGMENTS} segments");
            assert!(
                len.is_multiple_of(hidden),
                "a segment of {len} elements is not a whole number of rows of {hidden} elements"
            );
            segments.rows += len / hidden;
            segments.ends[i] = segments.rows;
            segments.slices[i] = Some(slice);
        }
        segments
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// The slice that holds a row, and the row's index within it.
    fn find(&self, row: usize) -> (&S, usize) {
        assert!(row < self.rows, "row {row} is out of range: there are {} rows", self.rows);
        let (mut i, mut start) = (0, 0);
        while self.ends[i] <= row {
            start = self.ends[i];
            i += 1;
        }
        (self.slices[i].as_ref().expect("the slices cover all rows"), row - start)
    }
}

impl<'a> Segments<&'a [f32]> {
    pub(super) fn of(slices: &[&'a [f32]], hidden: usize) -> Self {
        Segments::new(slices.iter().map(|slice| (*slice, slice.len())), hidden)
    }

    pub(super) fn row(&self, row: usize, hidden: usize) -> &'a [f32] {
        let (slice, row) = self.find(row);
        &slice[row * hidden..][..hidden]
    }
}

impl<'a> Segments<DisjointSlice<'a, f32>> {
    pub(super) fn of_mut(slices: &'a mut [&mut [f32]], hidden: usize) -> Self {
        Segments::new(
            slices
                .iter_mut()
                .map(|slice| (slice.len(), slice))
                .map(|(len, slice)| (DisjointSlice::new(slice), len)),
            hidden,
        )
    }

    /// The slice that holds a row, and the offset in it at which the row starts.
    pub(super) fn place(&self, row: usize, hidden: usize) -> (&DisjointSlice<'a, f32>, usize) {
        let (slice, row) = self.find(row);
        (slice, row * hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found() {
        let data: Vec<f32> = (0..12_u8).map(f32::from).collect();
        let segments = Segments::of(&[&data[..0], &data[..4], &data[4..4], &data[4..6], &data[6..]], 2);
        assert_eq!(segments.rows(), 6);
        for row in 0..6 {
            assert_eq!(segments.row(row, 2), &data[2 * row..2 * row + 2]);
        }
    }

    #[test]
    #[should_panic(expected = "row 2 is out of range: there are 2 rows")]
    fn rows_beyond_the_end_panic() {
        let _ = Segments::of(&[&[0.0; 4]], 2).row(2, 2);
    }
}
