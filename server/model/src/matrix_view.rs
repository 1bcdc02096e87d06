//! Weight matrices as a checkpoint stores them.

use std::borrow::Cow;

use crate::decode::fp8_e4m3;

/// Storage format of weight elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 e4m3 (finite, NaN at 0x7f and 0xff), with scales.
    Fp8E4m3,
    /// Microscaling FP4 e2m1: 32 elements of a row share one E8M0 exponent; a byte holds two elements, low
    /// nibble first.
    Mxfp4,
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            WeightFormat::F32 => "f32",
            WeightFormat::F16 => "f16",
            WeightFormat::Bf16 => "bf16",
            WeightFormat::Fp8E4m3 => "fp8_e4m3",
            WeightFormat::Mxfp4 => "mxfp4",
        })
    }
}

/// Multipliers of the elements of a [`MatrixView`].
#[derive(Clone, Debug)]
pub enum Scales<'a> {
    /// No multipliers: the elements are the values.
    None,
    /// One multiplier per block, row-major `[ceil(rows / block_rows), ceil(cols / block_cols)]`. One scale for the
    /// whole tensor is a block of all rows and columns; one scale per output channel is a block of one row.
    Block {
        /// The multipliers, named `weight_scale_inv` or `weight_scale` in checkpoints.
        values: Cow<'a, [f32]>,
        /// Rows per block.
        block_rows: usize,
        /// Columns per block.
        block_cols: usize,
    },
    /// E8M0 exponents of [`WeightFormat::Mxfp4`]: byte `b` at `r * row_stride + c` scales block `c` of row `r` by
    /// `2^(b - 127)`.
    Mx {
        /// The exponents.
        exponents: &'a [u8],
        /// Distance between rows, in bytes.
        row_stride: usize,
    },
}

/// A weight matrix `[rows, cols]` = `[output features, input features]`, borrowed from a mapped checkpoint.
///
/// Element `(r, c)` has index `r * row_stride + c * col_stride` in `data`. For [`WeightFormat::Mxfp4`] that index
/// counts nibbles, and `col_stride` is 1. `data` need not be aligned.
#[derive(Clone, Debug)]
pub struct MatrixView<'a> {
    /// Storage format of the elements.
    pub format: WeightFormat,
    /// The bytes, starting with element `(0, 0)`.
    pub data: &'a [u8],
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// Distance between rows, in elements.
    pub row_stride: usize,
    /// Distance between columns, in elements.
    pub col_stride: usize,
    /// Multipliers of the elements.
    pub scales: Scales<'a>,
}

/// An inconsistency of a [`MatrixView`].
#[derive(Debug, thiserror::Error)]
pub enum MatrixError {
    /// The matrix has no rows or no columns.
    #[error("a weight matrix of {rows} rows and {cols} columns is empty")]
    Empty {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
    },
    /// The data end before the last element.
    #[error("weights [{rows}, {cols}] in {format:?} need {needed} bytes, but {found} were given")]
    TooShort {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
        /// Format of the elements.
        format: WeightFormat,
        /// Bytes up to the end of the last element.
        needed: usize,
        /// Bytes given.
        found: usize,
    },
    /// The scales do not fit the format.
    #[error("{format:?} weights cannot have {found}")]
    WrongScales {
        /// Format of the elements.
        format: WeightFormat,
        /// What was given, in words.
        found: &'static str,
    },
    /// The number of scales differs from the number of blocks.
    #[error("weights [{rows}, {cols}] need {needed} scales, but {found} were given")]
    ScaleCount {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
        /// Blocks of the matrix.
        needed: usize,
        /// Scales given.
        found: usize,
    },
    /// The MXFP4 elements of a row are not contiguous.
    #[error("MXFP4 weights must be contiguous along a row, but the column stride is {0}")]
    Strided(usize),
}

impl MatrixView<'_> {
    /// Whether an FP8 matrix holds a NaN code.
    #[must_use]
    pub fn has_fp8_nan(&self) -> bool {
        (0..self.rows).any(|row| {
            if self.col_stride == 1 {
                self.data[row * self.row_stride..][..self.cols].iter().any(|&code| code & 0x7f == 0x7f)
            } else {
                (0..self.cols).any(|col| fp8_e4m3(self.bits::<1>(row, col)[0]).is_nan())
            }
        })
    }

    /// Checks that data and scales suffice for the shape.
    ///
    /// # Errors
    /// If they do not, or if the scales do not fit the format.
    pub fn check(&self) -> Result<(), MatrixError> {
        let &MatrixView { format, rows, cols, .. } = self;
        if rows == 0 || cols == 0 {
            return Err(MatrixError::Empty { rows, cols });
        }
        let too_short = |needed, found| MatrixError::TooShort { rows, cols, format, needed, found };
        let last =
            |row_stride: usize, last_col: usize| (rows - 1).checked_mul(row_stride)?.checked_add(last_col);
        let last_col = (cols - 1).checked_mul(self.col_stride);
        let last_element = last_col.and_then(|col| last(self.row_stride, col));
        let needed = last_element.and_then(|element| match format {
            WeightFormat::F32 => element.checked_add(1)?.checked_mul(4),
            WeightFormat::F16 | WeightFormat::Bf16 => element.checked_add(1)?.checked_mul(2),
            WeightFormat::Fp8E4m3 => element.checked_add(1),
            WeightFormat::Mxfp4 => Some(element / 2 + 1),
        });
        match needed {
            Some(needed) if needed <= self.data.len() => {}
            needed => return Err(too_short(needed.unwrap_or(usize::MAX), self.data.len())),
        }
        match (&self.scales, format) {
            (Scales::None, WeightFormat::Mxfp4) => {
                Err(MatrixError::WrongScales { format, found: "no scales" })
            }
            (Scales::None, _) => Ok(()),
            (Scales::Block { values, block_rows, block_cols }, WeightFormat::Fp8E4m3) => {
                if *block_rows == 0 || *block_cols == 0 {
                    return Err(MatrixError::WrongScales { format, found: "scales of empty blocks" });
                }
                let needed = rows.div_ceil(*block_rows) * cols.div_ceil(*block_cols);
                let found = values.len();
                if needed == found {
                    Ok(())
                } else {
                    Err(MatrixError::ScaleCount { rows, cols, needed, found })
                }
            }
            (Scales::Block { .. }, _) => Err(MatrixError::WrongScales { format, found: "block scales" }),
            (Scales::Mx { exponents, row_stride }, WeightFormat::Mxfp4) => {
                if self.col_stride != 1 {
                    return Err(MatrixError::Strided(self.col_stride));
                }
                let needed = last(*row_stride, cols.div_ceil(32)).unwrap_or(usize::MAX);
                let found = exponents.len();
                if needed <= found {
                    Ok(())
                } else {
                    Err(MatrixError::ScaleCount { rows, cols, needed, found })
                }
            }
            (Scales::Mx { .. }, _) => Err(MatrixError::WrongScales { format, found: "E8M0 exponents" }),
        }
    }
}
