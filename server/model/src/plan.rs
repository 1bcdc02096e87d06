//! The location of a layer's parts in the checkpoint's tensors, resolved and checked once.

use std::borrow::Cow;

use super::store::{Store, TensorId};
use crate::{MatrixView, Packing, Scales, WeightFormat};

/// A matrix inside a tensor.
#[derive(Clone, Debug)]
pub(super) struct MatrixRef {
    pub(super) tensor: TensorId,
    pub(super) format: WeightFormat,
    /// Element index of `(0, 0)` in the tensor.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    pub(super) scales: ScalesRef,
}

/// The multipliers of a matrix, in a tensor of their own.
#[derive(Clone, Debug)]
pub(super) enum ScalesRef {
    None,
    Block(BlockScales),
    Mx {
        tensor: TensorId,
        /// Byte offset of row 0.
        first: usize,
        /// Distance between rows, in bytes.
        row_stride: usize,
    },
}

/// A grid of block scales; the part that a matrix uses need not start at the edge of a block.
#[derive(Clone, Debug)]
pub(super) struct BlockScales {
    pub(super) tensor: TensorId,
    /// Element index of the grid's first scale.
    pub(super) first: usize,
    /// Number of scales per row of the grid.
    pub(super) grid_cols: usize,
    pub(super) block: [usize; 2],
    /// Row of the tensor that is the matrix's row 0, and the distance between the matrix's rows.
    pub(super) row_first: usize,
    pub(super) row_step: usize,
}

/// Evenly spaced numbers inside a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct VectorRef {
    pub(super) tensor: TensorId,
    pub(super) first: usize,
    pub(super) stride: usize,
    pub(super) len: usize,
}

/// An MLP: `down(activation(gate(x), up(x)))`.
#[derive(Clone, Debug)]
pub(super) struct MlpPlan {
    pub(super) gate: MatrixRef,
    pub(super) up: MatrixRef,
    pub(super) down: MatrixRef,
    /// Biases of gate, up and down, in that order.
    pub(super) biases: Option<[VectorRef; 3]>,
    /// Size in the checkpoint, scales and biases included, in bytes.
    pub(super) bytes: u64,
}

/// A gate.
#[derive(Clone, Debug)]
pub(super) struct GatePlan {
    pub(super) weight: MatrixRef,
    pub(super) bias: Option<VectorRef>,
    pub(super) correction: Option<VectorRef>,
    pub(super) table: Option<TensorId>,
}

/// An MoE block.
#[derive(Clone, Debug)]
pub(super) struct LayerPlan {
    pub(super) gate: GatePlan,
    pub(super) experts: Vec<MlpPlan>,
    pub(super) shared: Option<(MlpPlan, Option<VectorRef>)>,
}

impl MlpPlan {
    /// Columns per block of scales, if a row of any matrix has several blocks; all matrices have the config's block
    /// size.
    pub(super) fn scale_cols(&self) -> Option<usize> {
        let narrow = |matrix: &MatrixRef| match &matrix.scales {
            ScalesRef::Block(scales) if scales.block[1] < matrix.cols => Some(scales.block[1]),
            _ => None,
        };
        [&self.gate, &self.up, &self.down].into_iter().find_map(narrow)
    }
}

impl VectorRef {
    pub(super) fn read(&self, store: &Store) -> Vec<f32> {
        store.floats(self.tensor, self.first, self.stride, self.len)
    }
}

impl MatrixRef {
    pub(super) fn view<'a>(&self, store: &'a Store) -> MatrixView<'a> {
        let bits = self.format.bits();
        let last = self.first + (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
        MatrixView {
            format: self.format,
            packing: Packing::Strided,
            data: &store.bytes(self.tensor)[self.first * bits / 8..((last + 1) * bits).div_ceil(8)],
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
            scales: self.scales.view(store, self.rows, self.cols),
        }
    }
}

impl ScalesRef {
    fn view<'a>(&self, store: &'a Store, rows: usize, cols: usize) -> Scales<'a> {
        match self {
            ScalesRef::None => Scales::None,
            ScalesRef::Block(scales) => scales.view(store, rows),
            ScalesRef::Mx { tensor, first, row_stride } => {
                let bytes = (rows - 1) * row_stride + cols / 32;
                Scales::Mx { exponents: &store.bytes(*tensor)[*first..][..bytes], row_stride: *row_stride }
            }
        }
    }
}

impl BlockScales {
    fn view<'a>(&self, store: &'a Store, rows: usize) -> Scales<'a> {
        let [block_rows, block_cols] = self.block;
        let line = |grid_row: usize| {
            store.floats(self.tensor, self.first + grid_row * self.grid_cols, 1, self.grid_cols)
        };
        if self.row_step == 1 && self.row_first.is_multiple_of(block_rows) {
            let start = self.row_first / block_rows;
            let values = (start..start + rows.div_ceil(block_rows)).flat_map(line).collect();
            return Scales::Block { values: Cow::Owned(values), block_rows, block_cols };
        }
        // The matrix starts inside a block or takes every other row, so each row gets its own scales.
        let values =
            (0..rows).flat_map(|r| line((self.row_first + r * self.row_step) / block_rows)).collect();
        Scales::Block { values: Cow::Owned(values), block_rows: 1, block_cols }
    }
}
