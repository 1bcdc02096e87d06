//! Orders of elements within the data of a matrix.

/// Order of the elements of a matrix within its data. Words have 32 bits, and their first nibble is the lowest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// Rows and columns have constant distances.
    #[default]
    Strided,
    /// A word holds eight neighbouring columns of a row (GPTQ's weights). The column stride counts words.
    ColumnWords,
    /// A word holds eight neighbouring rows of a column (zero points). The row stride counts words.
    RowWords,
    /// Like [`RowWords`](Self::RowWords), with rows 0, 2, 4, 6, 1, 3, 5, 7 in the nibbles of a word (AWQ).
    AwqWords,
}

impl Packing {
    /// Index of element `(row, col)`.
    #[must_use]
    pub const fn index(self, row: usize, col: usize, row_stride: usize, col_stride: usize) -> usize {
        /// `[row % 8]`: index of the nibble of an AWQ word that holds the row.
        const AWQ: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
        match self {
            Packing::Strided => row * row_stride + col * col_stride,
            Packing::ColumnWords => row * row_stride + col / 8 * col_stride + col % 8,
            Packing::RowWords => row / 8 * row_stride + row % 8 + col * col_stride,
            Packing::AwqWords => row / 8 * row_stride + AWQ[row % 8] + col * col_stride,
        }
    }

    /// The largest index of a matrix of `rows` rows and `cols` columns; `None` if it overflows.
    pub(crate) fn last_index(
        self,
        rows: usize,
        cols: usize,
        row_stride: usize,
        col_stride: usize,
    ) -> Option<usize> {
        let (row, col) = (rows.checked_sub(1)?, cols.checked_sub(1)?);
        let (row, col, within_word) = match self {
            Packing::Strided => (row, col, 0),
            // The whole last word is counted.
            Packing::ColumnWords => (row, col / 8, 7),
            Packing::RowWords | Packing::AwqWords => (row / 8, col, 7),
        };
        row.checked_mul(row_stride)?.checked_add(col.checked_mul(col_stride)?)?.checked_add(within_word)
    }
}
