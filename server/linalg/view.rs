//! Weight matrices as a checkpoint stores them.

use std::borrow::Cow;

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
    /// Microscaling FP4 e2m1: 32 elements of a row share one E8M0 exponent; a byte holds two elements, low nibble
    /// first.
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
    /// E8M0 exponents of [`WeightFormat::Mxfp4`]: byte `b` at `r * row_stride + c` scales block `c` of row `r` by `2^(b
    /// - 127)`.
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
