//! The location of a layer's parts in the checkpoint's tensors, resolved and checked once.

use std::borrow::Cow;

use super::store::{Store, TensorId};
use crate::{GroupScales, MatrixView, ModelError, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints};

/// A matrix inside a tensor.
#[derive(Clone, Debug)]
pub(super) struct MatrixRef {
    pub(super) tensor: TensorId,
    pub(super) format: WeightFormat,
    pub(super) packing: Packing,
    /// Element index of `(0, 0)` in the tensor.
    pub(super) first: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) col_stride: usize,
    pub(super) scales: ScalesRef,
    /// `weight_shape` of compressed-tensors: `[rows, cols]` again, as contents of a tensor.
    pub(super) shape: Option<TensorId>,
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
    Groups(GroupsRef),
}

/// Scales and zero points of groups, in tensors of their own; see [`GroupScales`].
#[derive(Clone, Debug)]
pub(super) struct GroupsRef {
    pub(super) tensor: TensorId,
    pub(super) format: ScaleFormat,
    /// Index of the scale of row 0 and group 0.
    pub(super) first: usize,
    /// Columns of a group.
    pub(super) cols: usize,
    pub(super) row_stride: usize,
    pub(super) group_stride: usize,
    pub(super) factor: Factor,
    pub(super) zeros: Option<ZerosRef>,
}

/// A number that multiplies all scales of a matrix.
#[derive(Clone, Copy, Debug)]
pub(super) enum Factor {
    One,
    /// An element of a tensor.
    Of(TensorId, usize),
    /// The reciprocal of that element.
    Reciprocal(TensorId, usize),
}

/// Zero points; see [`ZeroPoints`].
#[derive(Clone, Copy, Debug)]
pub(super) struct ZerosRef {
    pub(super) tensor: TensorId,
    pub(super) packing: Packing,
    pub(super) row_stride: usize,
    pub(super) group_stride: usize,
    pub(super) bias: u8,
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
    /// Columns that share a scale, if some row has several scales. All matrices of a layer have the number that the config gives.
    pub(super) fn scale_cols(&self) -> Option<usize> {
        let narrow = |matrix: &MatrixRef| match &matrix.scales {
            ScalesRef::Block(scales) if scales.block[1] < matrix.cols => Some(scales.block[1]),
            ScalesRef::Groups(groups) if groups.cols < matrix.cols => Some(groups.cols),
            _ => None,
        };
        [&self.gate, &self.up, &self.down].into_iter().find_map(narrow)
    }

    /// Formats of the up and down projections other than the gate projection's, each once.
    pub(super) fn other_formats(&self) -> Vec<WeightFormat> {
        let mut found = vec![self.up.format, self.down.format];
        found.dedup();
        found.retain(|format| *format != self.gate.format);
        found
    }

    /// Whether groups have zero points.
    pub(super) fn zero_points(&self) -> bool {
        matches!(&self.gate.scales, ScalesRef::Groups(groups) if groups.zeros.is_some())
    }

    /// Checks what headers do not show.
    pub(super) fn check_contents(&self, store: &Store) -> Result<(), ModelError> {
        [&self.gate, &self.up, &self.down].into_iter().try_for_each(|matrix| matrix.check_contents(store))
    }
}

impl VectorRef {
    pub(super) fn read(&self, store: &Store) -> Vec<f32> {
        store.floats(self.tensor, self.first, self.stride, self.len)
    }
}

impl MatrixRef {
    /// A whole tensor with contiguous rows.
    pub(super) const fn by_rows(
        tensor: TensorId,
        format: WeightFormat,
        [rows, cols]: [usize; 2],
        scales: ScalesRef,
    ) -> Self {
        MatrixRef {
            tensor,
            format,
            packing: Packing::Strided,
            first: 0,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales,
            shape: None,
        }
    }

    pub(super) fn view<'a>(&self, store: &'a Store) -> MatrixView<'a> {
        let bits = self.format.bits();
        let last = self.packing.last_index(self.rows, self.cols, self.row_stride, self.col_stride);
        let last = self.first + last.expect("the shape of the tensor was checked");
        MatrixView {
            format: self.format,
            packing: self.packing,
            data: &store.bytes(self.tensor)[self.first * bits / 8..((last + 1) * bits).div_ceil(8)],
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
            scales: self.scales.view(store, self.rows, self.cols),
        }
    }

    /// Checks the small tensors whose contents, not only headers, must fit: a shape, and the factor of all scales.
    pub(super) fn check_contents(&self, store: &Store) -> Result<(), ModelError> {
        if let Some(id) = self.shape {
            let found = store.integers(id);
            if found != [self.rows as i64, self.cols as i64] {
                let reason = format!("holds the shape {found:?}, expected [{}, {}]", self.rows, self.cols);
                return Err(store.wrong_contents(id, reason));
            }
        }
        let ScalesRef::Groups(GroupsRef { factor: Factor::Of(id, at) | Factor::Reciprocal(id, at), .. }) =
            self.scales
        else {
            return Ok(());
        };
        let found = store.floats(id, at, 1, 1)[0];
        if found.is_finite() && found > 0.0 {
            return Ok(());
        }
        let reason = format!("is {found}, expected a positive number that multiplies or divides all scales");
        Err(store.wrong_contents(id, reason))
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
            ScalesRef::Groups(groups) => Scales::Groups(groups.view(store, rows, cols)),
        }
    }
}

impl GroupsRef {
    fn view<'a>(&self, store: &'a Store, rows: usize, cols: usize) -> GroupScales<'a> {
        let groups = cols.div_ceil(self.cols);
        let last = self.first + (rows - 1) * self.row_stride + (groups - 1) * self.group_stride;
        let bytes = self.format.bytes();
        GroupScales {
            cols: self.cols,
            format: self.format,
            data: &store.bytes(self.tensor)[self.first * bytes..(last + 1) * bytes],
            row_stride: self.row_stride,
            group_stride: self.group_stride,
            factor: match self.factor {
                Factor::One => 1.0,
                Factor::Of(id, at) => store.floats(id, at, 1, 1)[0],
                Factor::Reciprocal(id, at) => 1.0 / store.floats(id, at, 1, 1)[0],
            },
            zeros: self.zeros.map(|zeros| ZeroPoints {
                data: store.bytes(zeros.tensor),
                packing: zeros.packing,
                row_stride: zeros.row_stride,
                group_stride: zeros.group_stride,
                bias: zeros.bias,
            }),
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
