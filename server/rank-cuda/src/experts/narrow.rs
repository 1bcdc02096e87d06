//! The upload buffer of one expert that is not bf16: its codes and scales in the layout that the packing kernel reads.
//!
//! Codes are copied unchanged; padding rows and columns are zero. Scales of FP8 become one multiplier per row and 128 columns, or one per
//! row where a scale spans all columns of a matrix. Those of INT4: `int4.rs`.

use expertd_kernels::experts::{PACK_DOWN, PACK_GATE_UP, PackNarrowParams};
use rayon::prelude::*;

use super::DeviceFormat;
use super::int4::{fill_groups, fill_nibbles};
use crate::format::{FP8_COLS, INT4_COLS, MX_COLS, NVFP4_COLS};
use expertd_model::ExpertWeights;
use expertd_model::{MatrixView, ScaleFormat, Scales, WeightFormat};

/// Rows that may share an FP8 multiplier on the device.
const BLOCK_ROWS: usize = 128;

/// Properties of an expert that was written to an upload buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// Whether all matrices have block scales where their format has scales
    /// ([`CudaExperts::has_block_scales`](super::CudaExperts::has_block_scales)).
    pub block_scales: bool,
}

/// Byte offsets of one expert's codes and scales in an upload buffer. All are multiples of 16.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertLayout {
    format: DeviceFormat,
    hidden: usize,
    inter: usize,
    /// Codes of gate, up and down.
    codes: [usize; 3],
    /// Scales of gate, up and down.
    scales: [usize; 3],
    /// Zero points of gate, up and down.
    zeros: [usize; 3],
    /// Row scales: f32 `[2, inter]`, then `[hidden]`.
    row_scales: usize,
    /// Size of the whole layout.
    pub(super) bytes: usize,
}

impl ExpertLayout {
    /// Makes the layout of an expert of these padded sizes.
    pub(super) fn new(format: DeviceFormat, hidden: usize, inter: usize) -> Self {
        let mut end = 0_usize;
        let mut take = |bytes: usize| {
            let at = end;
            end += bytes.next_multiple_of(16);
            at
        };
        let shapes = [[inter, hidden], [inter, hidden], [hidden, inter]];
        let codes = shapes.map(|[rows, cols]| take(rows * row_bytes(format, cols)));
        let scales = shapes.map(|[rows, cols]| take(rows * scale_bytes(format, cols)));
        let zeros = shapes.map(|[rows, cols]| take(rows * zero_bytes(format, cols)));
        let row_scales = take((2 * inter + hidden) * 4);
        ExpertLayout { format, hidden, inter, codes, scales, zeros, row_scales, bytes: end }
    }

    /// Writes an expert to `to`, which has at least [`bytes`](Self::bytes) bytes.
    ///
    /// # Errors
    /// The property of a matrix that the kernels do not support.
    pub(super) fn fill(&self, weights: &ExpertWeights<'_>, to: &mut [u8]) -> Result<Filled, String> {
        let (codes, rest) = to.split_at_mut(self.scales[0]);
        let (scales, rest) = rest.split_at_mut(self.zeros[0] - self.scales[0]);
        let (zeros, row_scales) = rest.split_at_mut(self.row_scales - self.zeros[0]);
        let row_scales: &mut [f32] =
            bytemuck::cast_slice_mut(&mut row_scales[..(2 * self.inter + self.hidden) * 4]);
        let (inputs, outputs) = row_scales.split_at_mut(2 * self.inter);
        let (gate, up) = inputs.split_at_mut(self.inter);
        let matrices = [
            (&weights.gate, self.inter, self.hidden, gate),
            (&weights.up, self.inter, self.hidden, up),
            (&weights.down, self.hidden, self.inter, outputs),
        ];
        let mut filled = Filled { block_scales: true };
        for (i, (view, rows, cols, row_scales)) in matrices.into_iter().enumerate() {
            check(self.format, view)?;
            let codes = &mut codes[self.codes[i]..][..rows * row_bytes(self.format, cols)];
            let scales =
                &mut scales[self.scales[i] - self.scales[0]..][..rows * scale_bytes(self.format, cols)];
            if matches!(self.format, DeviceFormat::Int4 | DeviceFormat::Int4Zeros) {
                let zeros =
                    &mut zeros[self.zeros[i] - self.zeros[0]..][..rows * zero_bytes(self.format, cols)];
                fill_nibbles(view, cols, codes);
                fill_groups(view, cols / INT4_COLS, bytemuck::cast_slice_mut(scales), zeros, row_scales);
                continue;
            }
            fill_codes(view, cols, codes, self.format);
            filled.block_scales &= has_block_scales(view);
            match self.format {
                DeviceFormat::Mxfp4 | DeviceFormat::W4a8 | DeviceFormat::Mxfp8 => {
                    fill_exponents(view, cols / MX_COLS, scales);
                    row_scales.fill(1.0);
                }
                DeviceFormat::Nvfp4 => fill_e4m3_scales(view, cols / NVFP4_COLS, scales, row_scales),
                _ => fill_multipliers(
                    view,
                    cols.div_ceil(FP8_COLS),
                    bytemuck::cast_slice_mut(scales),
                    row_scales,
                ),
            }
        }
        Ok(filled)
    }

    /// Parameters that pack gate and up, and down, from a buffer at device address `staged`. The caller sets the destinations.
    pub(super) fn packs(&self, staged: u64) -> [PackNarrowParams; 2] {
        let at = |offset: usize| staged + offset as u64;
        let common = PackNarrowParams {
            hidden: self.hidden as i32,
            inter: self.inter as i32,
            format: self.format.code(),
            ..PackNarrowParams::default()
        };
        let gate_up = PackNarrowParams {
            first: at(self.codes[0]),
            second: at(self.codes[1]),
            first_scales: at(self.scales[0]),
            second_scales: at(self.scales[1]),
            first_zeros: at(self.zeros[0]),
            second_zeros: at(self.zeros[1]),
            row_scales_in: at(self.row_scales),
            kind: PACK_GATE_UP,
            ..common
        };
        let down = PackNarrowParams {
            first: at(self.codes[2]),
            first_scales: at(self.scales[2]),
            first_zeros: at(self.zeros[2]),
            row_scales_in: at(self.row_scales + 2 * self.inter * 4),
            kind: PACK_DOWN,
            ..common
        };
        [gate_up, down]
    }
}

/// Size of a row of codes, in bytes.
fn row_bytes(format: DeviceFormat, cols: usize) -> usize {
    match format {
        DeviceFormat::Mxfp4
        | DeviceFormat::W4a8
        | DeviceFormat::Int4
        | DeviceFormat::Int4Zeros
        | DeviceFormat::Nvfp4 => cols / 2,
        _ => cols,
    }
}

/// Size of a row's scales, in bytes.
fn scale_bytes(format: DeviceFormat, cols: usize) -> usize {
    match format {
        DeviceFormat::Mxfp4 | DeviceFormat::W4a8 | DeviceFormat::Mxfp8 => cols / MX_COLS,
        DeviceFormat::Nvfp4 => cols / NVFP4_COLS,
        DeviceFormat::Int4 | DeviceFormat::Int4Zeros => cols / INT4_COLS * 2,
        _ => cols.div_ceil(FP8_COLS) * 4,
    }
}

/// Size of a row's zero points, in bytes.
fn zero_bytes(format: DeviceFormat, cols: usize) -> usize {
    if format == DeviceFormat::Int4Zeros { cols / INT4_COLS } else { 0 }
}

/// Checks whether a matrix fits the format, which [`Stored::on_device`](crate::Stored::on_device) chose for all matrices of the experts.
fn check(format: DeviceFormat, view: &MatrixView<'_>) -> Result<(), String> {
    if !format.accepts(view.format) {
        return Err(format!("a matrix in {} cannot be packed as {format:?}", view.format));
    }
    match view.scales {
        Scales::Block { block_rows, block_cols, .. }
            if block_cols < view.cols && !block_cols.is_multiple_of(FP8_COLS) =>
        {
            Err(format!(
                "FP8 scales for blocks of {block_rows}×{block_cols} cannot be packed as {format:?}: expected blocks that are a \
                 multiple of {FP8_COLS} columns wide or span the matrix"
            ))
        }
        Scales::Groups(groups) => {
            let nvfp4 = view.format == WeightFormat::Nvfp4;
            let unit = if nvfp4 { NVFP4_COLS } else { INT4_COLS };
            if nvfp4 && groups.format != ScaleFormat::Fp8E4m3 {
                return Err(format!("NVFP4 scales in {:?} cannot be packed as {format:?}", groups.format));
            }
            if groups.cols < view.cols && !groups.cols.is_multiple_of(unit) {
                return Err(format!(
                    "{} scales for groups of {} columns cannot be packed as {format:?}: expected groups that are a multiple of \
                     {unit} columns wide or span the matrix",
                    view.format, groups.cols
                ));
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Writes rows of `cols` codes; those outside the matrix are zero.
fn fill_codes(view: &MatrixView<'_>, cols: usize, to: &mut [u8], format: DeviceFormat) {
    let bytes = row_bytes(format, cols);
    to.par_chunks_mut(bytes).enumerate().for_each(|(row, to)| {
        to.fill(0);
        if row >= view.rows {
            return;
        }
        let start = row * view.row_stride;
        if matches!(format, DeviceFormat::Mxfp4 | DeviceFormat::W4a8 | DeviceFormat::Nvfp4) {
            if start.is_multiple_of(2) && view.cols.is_multiple_of(2) {
                to[..view.cols / 2].copy_from_slice(&view.data[start / 2..(start + view.cols) / 2]);
            } else {
                (0..view.cols).for_each(|col| to[col / 2] |= view.nibble(row, col) << (col % 2 * 4));
            }
        } else if view.col_stride == 1 {
            to[..view.cols].copy_from_slice(&view.data[start..start + view.cols]);
        } else {
            to.iter_mut().take(view.cols).enumerate().for_each(|(col, to)| [*to] = view.bits(row, col));
        }
    });
}

/// Writes `[rows, cols / 32]` exponents. Those outside the matrix scale zeros only.
fn fill_exponents(view: &MatrixView<'_>, blocks: usize, to: &mut [u8]) {
    for (row, to) in to.chunks_mut(blocks).enumerate() {
        for (block, to) in to.iter_mut().enumerate() {
            let inside = row < view.rows && block * MX_COLS < view.cols;
            *to = if inside { view.exponent(row, block * MX_COLS) } else { 0 };
        }
    }
}

/// Writes `[rows, groups]` e4m3 scales of an NVFP4 matrix, and the factor of the matrix for each row. Scales outside the matrix are zero.
fn fill_e4m3_scales(view: &MatrixView<'_>, groups: usize, to: &mut [u8], row_scales: &mut [f32]) {
    let Scales::Groups(scales) = &view.scales else { unreachable!("NVFP4 has scales of groups") };
    for (row, (to, row_scale)) in to.chunks_mut(groups).zip(row_scales).enumerate() {
        let inside = row < view.rows;
        *row_scale = if inside { scales.factor } else { 1.0 };
        for (group, to) in to.iter_mut().enumerate() {
            let col = group * NVFP4_COLS;
            *to = if inside && col < view.cols {
                scales.data[row * scales.row_stride + col / scales.cols * scales.group_stride]
            } else {
                0
            };
        }
    }
}

/// Whether a scale spans all columns of the FP8 matrix.
fn is_scaled_by_row(view: &MatrixView<'_>) -> bool {
    match &view.scales {
        Scales::Block { block_cols, .. } => *block_cols >= view.cols,
        Scales::None | Scales::Mx { .. } | Scales::Groups(_) => true,
    }
}

/// Whether 128 neighbouring rows, from a multiple of 128 on, have the same multipliers of 128 columns.
fn has_block_scales(view: &MatrixView<'_>) -> bool {
    match view.scales {
        Scales::Block { block_rows, .. } if !is_scaled_by_row(view) => {
            block_rows.is_multiple_of(BLOCK_ROWS) || block_rows >= view.rows
        }
        _ => true,
    }
}

/// Writes `[rows, cols / 128]` multipliers and one multiplier per row.
fn fill_multipliers(view: &MatrixView<'_>, blocks: usize, to: &mut [f32], row_scales: &mut [f32]) {
    let by_row = is_scaled_by_row(view);
    for (row, (to, row_scale)) in to.chunks_mut(blocks).zip(row_scales).enumerate() {
        let inside = row < view.rows;
        *row_scale = if inside && by_row { view.scale(row, 0) } else { 1.0 };
        for (block, to) in to.iter_mut().enumerate() {
            *to = if inside && !by_row { view.scale(row, block * FP8_COLS) } else { 1.0 };
        }
    }
}

#[cfg(test)]
mod tests;
