//! Offsets of the areas of a region.

use super::RegionError;

/// Bytes of a cache line. Words that different processes write are placed on different lines.
pub const LINE: usize = 64;
/// Bytes of a page, the alignment of large areas.
pub const PAGE: usize = 4096;

/// Assigns aligned offsets to the areas of a region, one after another.
///
/// All processes build the same layout from the same numbers, so offsets need not be transmitted.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    len: usize,
}

impl Layout {
    /// An empty layout.
    #[must_use]
    pub const fn new() -> Self {
        Self { len: 0 }
    }

    /// Appends an area of `bytes` that begins on a cache line of its own; returns its offset.
    pub fn line(&mut self, bytes: usize) -> Result<usize, RegionError> {
        self.area(bytes, LINE)
    }

    /// Appends an area of `bytes` that begins on a page of its own; returns its offset.
    pub fn page(&mut self, bytes: usize) -> Result<usize, RegionError> {
        self.area(bytes, PAGE)
    }

    /// Length of a region that holds all areas, in bytes: a multiple of [`PAGE`].
    pub const fn len(&self) -> usize {
        // `area` refuses lengths that this rounding would overflow.
        self.len.next_multiple_of(PAGE)
    }

    /// Whether no area was appended.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn area(&mut self, bytes: usize, align: usize) -> Result<usize, RegionError> {
        let offset = self.len.next_multiple_of(align);
        let end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(LINE));
        match end {
            Some(end) if end <= isize::MAX as usize - PAGE => {
                self.len = end;
                Ok(offset)
            }
            _ => Err(RegionError::TooLarge { offset, bytes }),
        }
    }
}
