//! Multipliers and zero points of weight matrices.

use std::borrow::Cow;

use crate::Packing;

/// Multipliers of the elements of a [`MatrixView`](crate::MatrixView).
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
    /// E8M0 exponents of [`WeightFormat::Mxfp4`](crate::WeightFormat::Mxfp4) and [`WeightFormat::Mxfp8`](crate::WeightFormat::Mxfp8): byte `b` at `r * row_stride + c` scales block `c` of row `r` by
    /// `2^(b - 127)`.
    Mx {
        /// The exponents.
        exponents: &'a [u8],
        /// Distance between rows, in bytes.
        row_stride: usize,
    },
    /// Scales of groups of neighbouring columns, of [`WeightFormat::Int4`](crate::WeightFormat::Int4) and [`WeightFormat::Nvfp4`](crate::WeightFormat::Nvfp4).
    Groups(GroupScales<'a>),
}

impl<'a> Scales<'a> {
    /// The parts that are borrowed from the checkpoint as they are stored.
    pub(crate) fn mapped(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let parts = match self {
            Scales::None | Scales::Block { .. } => [None, None],
            Scales::Mx { exponents, .. } => [Some(*exponents), None],
            Scales::Groups(groups) => [Some(groups.data), groups.zeros.map(|zeros| zeros.data)],
        };
        parts.into_iter().flatten()
    }

    /// Mutable references to the parts that [`mapped`](Self::mapped) lists, in that order.
    pub(crate) fn mapped_mut(&mut self) -> impl Iterator<Item = &mut &'a [u8]> {
        let parts = match self {
            Scales::None | Scales::Block { .. } => [None, None],
            Scales::Mx { exponents, .. } => [Some(exponents), None],
            Scales::Groups(groups) => {
                [Some(&mut groups.data), groups.zeros.as_mut().map(|zeros| &mut zeros.data)]
            }
        };
        parts.into_iter().flatten()
    }
}

/// Scales, and zero points where there are any, of groups of neighbouring columns. The scale of row `r` and group `g` has
/// index `r * row_stride + g * group_stride`.
#[derive(Clone, Copy, Debug)]
pub struct GroupScales<'a> {
    /// Columns of a group. The last group of a row may have fewer.
    pub cols: usize,
    /// Type of the scales.
    pub format: ScaleFormat,
    /// Bytes of the scales, starting with the scale of row 0 and group 0.
    pub data: &'a [u8],
    /// Distance between rows, in scales.
    pub row_stride: usize,
    /// Distance between groups, in scales.
    pub group_stride: usize,
    /// Multiplier of every scale.
    pub factor: f32,
    /// Zero points of [`WeightFormat::Int4`](crate::WeightFormat::Int4). Without them every zero point is [`INT4_ZERO`].
    pub zeros: Option<ZeroPoints<'a>>,
}

/// The zero point of symmetric 4-bit integers, whose values are -8 to 7.
pub const INT4_ZERO: u8 = 8;

/// Storage type of group scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleFormat {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// FP8 e4m3.
    Fp8E4m3,
}

impl ScaleFormat {
    /// Size of a scale, in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            ScaleFormat::F32 => 4,
            ScaleFormat::F16 | ScaleFormat::Bf16 => 2,
            ScaleFormat::Fp8E4m3 => 1,
        }
    }
}

/// 4-bit zero points. That of row `r` and group `g` is the nibble at `packing.index(r, g, row_stride, group_stride)`, after
/// `bias` was added to each word.
#[derive(Clone, Copy, Debug)]
pub struct ZeroPoints<'a> {
    /// Bytes of the zero points, starting with the word of row 0 and group 0.
    pub data: &'a [u8],
    /// Order of the nibbles.
    pub packing: Packing,
    /// Distance between rows, or between words of eight rows, in nibbles.
    pub row_stride: usize,
    /// Distance between groups, in nibbles.
    pub group_stride: usize,
    /// What is added to each of the eight nibbles of a word, as one sum: a carry goes to the next nibble, and that of the
    /// last one is dropped. 1 in the first version of GPTQ's files, whose words were stored after the opposite
    /// subtraction; 0 otherwise, and always if `packing` is [`Packing::Strided`].
    pub bias: u8,
}
