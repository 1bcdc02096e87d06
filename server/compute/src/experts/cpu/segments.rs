//! Rows that lie in several slices.

use crate::linalg::Shared;

/// Most slices of one call.
pub(super) const MAX_SEGMENTS: usize = 64;

/// Where rows lie that are numbered through several slices.
pub(super) struct Segments<S> {
    slices: [Option<S>; MAX_SEGMENTS],
    /// Rows up to the end of each slice.
    ends: [usize; MAX_SEGMENTS],
    rows: usize,
}

impl<S> Segments<S> {
    fn new(slices: impl Iterator<Item = (S, usize)>, hidden: usize) -> Self {
        let mut segments =
            Segments { slices: [const { None }; MAX_SEGMENTS], ends: [usize::MAX; MAX_SEGMENTS], rows: 0 };
        for (i, (slice, len)) in slices.enumerate() {
            assert!(i < MAX_SEGMENTS, "rows lie in more than {MAX_SEGMENTS} segments");
            assert!(
                len.is_multiple_of(hidden),
                "a segment of {len} elements is no number of rows of {hidden}"
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

    /// The slice that holds a row, and the row's number within it.
    fn find(&self, row: usize) -> (&S, usize) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (mut i, mut start) = (0, 0);
        while self.ends[i] <= row {
            start = self.ends[i];
            i += 1;
        }
        (self.slices[i].as_ref().expect("rows lie in slices"), row - start)
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

impl<'a> Segments<Shared<'a, f32>> {
    pub(super) fn of_mut(slices: &'a mut [&mut [f32]], hidden: usize) -> Self {
        Segments::new(
            slices.iter_mut().map(|slice| (slice.len(), slice)).map(|(len, slice)| (Shared::new(slice), len)),
            hidden,
        )
    }

    /// The slice that holds a row, and the place in it where the row starts.
    pub(super) fn place(&self, row: usize, hidden: usize) -> (&Shared<'a, f32>, usize) {
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
    #[should_panic(expected = "row 2 of 2")]
    fn rows_beyond_the_end_are_not() {
        let _ = Segments::of(&[&[0.0; 4]], 2).row(2, 2);
    }
}
