//! Weight matrices as a checkpoint stores them.

use crate::codes::fp8_e4m3;
use crate::{Packing, Scales};

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
    /// Microscaling FP8 e4m3: 32 elements of a row share one E8M0 exponent.
    Mxfp8,
    /// NVIDIA's FP4 e2m1: 16 elements of a row share one FP8 e4m3 scale, and a matrix has one f32 factor; a byte
    /// holds two elements, low nibble first.
    Nvfp4,
    /// Unsigned 4-bit integers: a group of columns of a row shares a scale and a zero point, which is subtracted
    /// before the multiplication.
    Int4,
}

impl WeightFormat {
    /// Bits of an element, without its share of scales.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            WeightFormat::F32 => 32,
            WeightFormat::F16 | WeightFormat::Bf16 => 16,
            WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => 8,
            WeightFormat::Mxfp4 | WeightFormat::Nvfp4 | WeightFormat::Int4 => 4,
        }
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            WeightFormat::F32 => "f32",
            WeightFormat::F16 => "f16",
            WeightFormat::Bf16 => "bf16",
            WeightFormat::Fp8E4m3 => "fp8_e4m3",
            WeightFormat::Mxfp4 => "mxfp4",
            WeightFormat::Mxfp8 => "mxfp8",
            WeightFormat::Nvfp4 => "nvfp4",
            WeightFormat::Int4 => "int4",
        })
    }
}

/// A weight matrix `[rows, cols]` = `[output features, input features]`, borrowed from a mapped checkpoint.
///
/// Element `(r, c)` has index `packing.index(r, c, row_stride, col_stride)` in `data`. For formats of 4 bits that index
/// counts nibbles. MXFP4, MXFP8 and NVFP4 have column stride 1. `data` need not be aligned.
#[derive(Clone, Debug)]
pub struct MatrixView<'a> {
    /// Storage format of the elements.
    pub format: WeightFormat,
    /// Order of the elements; anything but [`Packing::Strided`] is for [`WeightFormat::Int4`].
    pub packing: Packing,
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
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum MatrixError {
    #[error("a weight matrix of {rows} rows and {cols} columns is empty")]
    Empty { rows: usize, cols: usize },
    #[error("weights [{rows}, {cols}] in {format:?} need {needed} bytes, but {found} were given")]
    TooShort { rows: usize, cols: usize, format: WeightFormat, needed: usize, found: usize },
    #[error("{format:?} weights cannot have {found}")]
    WrongScales { format: WeightFormat, found: &'static str },
    #[error("weights [{rows}, {cols}] need {needed} scales, but {found} were given")]
    ScaleCount { rows: usize, cols: usize, needed: usize, found: usize },
    /// The elements of a row are not contiguous, which the format demands.
    #[error("{0:?} weights must be contiguous along a row, but the column stride is {1}")]
    Strided(WeightFormat, usize),
    #[error("{0:?} weights cannot be packed in {1:?}")]
    Packing(WeightFormat, Packing),
}

impl MatrixView<'_> {
    /// Whether an FP8 matrix holds a NaN code.
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
        let &MatrixView { format, packing, rows, cols, .. } = self;
        if rows == 0 || cols == 0 {
            return Err(MatrixError::Empty { rows, cols });
        }
        if packing != Packing::Strided && format != WeightFormat::Int4 {
            return Err(MatrixError::Packing(format, packing));
        }
        if self.col_stride != 1
            && matches!(format, WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4)
        {
            return Err(MatrixError::Strided(format, self.col_stride));
        }
        let last = packing.last_index(rows, cols, self.row_stride, self.col_stride);
        let needed = last.and_then(|last| bytes_up_to(last, format.bits()));
        match needed {
            Some(needed) if needed <= self.data.len() => self.check_scales(),
            needed => Err(MatrixError::TooShort {
                rows,
                cols,
                format,
                needed: needed.unwrap_or(usize::MAX),
                found: self.data.len(),
            }),
        }
    }

    fn check_scales(&self) -> Result<(), MatrixError> {
        let &MatrixView { format, rows, cols, .. } = self;
        let enough = |needed: Option<usize>, found: usize| match needed {
            Some(needed) if needed <= found => Ok(()),
            needed => {
                Err(MatrixError::ScaleCount { rows, cols, needed: needed.unwrap_or(usize::MAX), found })
            }
        };
        match (&self.scales, format) {
            (
                Scales::None,
                WeightFormat::Mxfp4 | WeightFormat::Mxfp8 | WeightFormat::Nvfp4 | WeightFormat::Int4,
            ) => Err(MatrixError::WrongScales { format, found: "no scales" }),
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
            (Scales::Mx { exponents, row_stride }, WeightFormat::Mxfp4 | WeightFormat::Mxfp8) => {
                let last = Packing::Strided.last_index(rows, cols.div_ceil(32), *row_stride, 1);
                enough(last.and_then(|last| last.checked_add(1)), exponents.len())
            }
            (Scales::Mx { .. }, _) => Err(MatrixError::WrongScales { format, found: "E8M0 exponents" }),
            (Scales::Groups(scales), WeightFormat::Nvfp4 | WeightFormat::Int4) => {
                if scales.cols == 0 {
                    return Err(MatrixError::WrongScales { format, found: "scales of empty groups" });
                }
                if scales.zeros.is_some() && format != WeightFormat::Int4 {
                    return Err(MatrixError::WrongScales { format, found: "zero points" });
                }
                let groups = cols.div_ceil(scales.cols);
                let last = Packing::Strided.last_index(rows, groups, scales.row_stride, scales.group_stride);
                let bits = scales.format.bytes() * 8;
                let needed = last.and_then(|last| bytes_up_to(last, bits));
                enough(
                    needed.map(|bytes| bytes / scales.format.bytes()),
                    scales.data.len() / scales.format.bytes(),
                )?;
                let Some(zeros) = &scales.zeros else { return Ok(()) };
                if zeros.bias != 0 && zeros.packing == Packing::Strided {
                    return Err(MatrixError::WrongScales {
                        format,
                        found: "biased zero points outside words",
                    });
                }
                let last = zeros.packing.last_index(rows, groups, zeros.row_stride, zeros.group_stride);
                enough(last.and_then(|last| bytes_up_to(last, 4)), zeros.data.len())
            }
            (Scales::Groups(_), _) => Err(MatrixError::WrongScales { format, found: "group scales" }),
        }
    }
}

/// Bytes of the elements up to `last`, each of `bits` bits; `None` if they overflow.
fn bytes_up_to(last: usize, bits: usize) -> Option<usize> {
    Some(last.checked_add(1)?.checked_mul(bits)?.div_ceil(8))
}
