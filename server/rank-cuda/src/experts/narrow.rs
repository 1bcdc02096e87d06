//! The upload buffer of one FP8 or MXFP4 expert: its codes and scales in the layout that the packing kernel reads.
//!
//! Codes are copied unchanged, and INT4's integers become e4m3 codes; padding rows and columns are zero. Scales of FP8 and INT4
//! become one multiplier per row and 128 columns, or one per row where a scale spans all columns of a matrix.

use expertd_kernels::experts::{PACK_DOWN, PACK_GATE_UP, PackNarrowParams};
use rayon::prelude::*;

use super::DeviceFormat;
use super::grouped::fill_integers;
use crate::format::FP8_COLS;
use expertd_model::ExpertWeights;
use expertd_model::{MatrixView, Scales, WeightFormat};

/// Rows that may share an FP8 multiplier on the device.
const BLOCK_ROWS: usize = 128;
/// Columns that share an MXFP4 exponent.
const MX_COLS: usize = 32;

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
        let row_scales = take((2 * inter + hidden) * 4);
        ExpertLayout { format, hidden, inter, codes, scales, row_scales, bytes: end }
    }

    /// Writes an expert to `to`, which has at least [`bytes`](Self::bytes) bytes.
    ///
    /// # Errors
    /// The property of a matrix that the kernels do not support.
    pub(super) fn fill(&self, weights: &ExpertWeights<'_>, to: &mut [u8]) -> Result<(), String> {
        let (codes, rest) = to.split_at_mut(self.scales[0]);
        let (scales, row_scales) = rest.split_at_mut(self.row_scales - self.scales[0]);
        let row_scales: &mut [f32] =
            bytemuck::cast_slice_mut(&mut row_scales[..(2 * self.inter + self.hidden) * 4]);
        let (inputs, outputs) = row_scales.split_at_mut(2 * self.inter);
        let (gate, up) = inputs.split_at_mut(self.inter);
        let matrices = [
            (&weights.gate, self.inter, self.hidden, gate),
            (&weights.up, self.inter, self.hidden, up),
            (&weights.down, self.hidden, self.inter, outputs),
        ];
        for (i, (view, rows, cols, row_scales)) in matrices.into_iter().enumerate() {
            check(self.format, view)?;
            fill_codes(
                view,
                cols,
                &mut codes[self.codes[i]..][..rows * row_bytes(self.format, cols)],
                self.format,
            );
            let scales =
                &mut scales[self.scales[i] - self.scales[0]..][..rows * scale_bytes(self.format, cols)];
            match self.format {
                DeviceFormat::Mxfp4 => {
                    fill_exponents(view, cols / MX_COLS, scales);
                    row_scales.fill(1.0);
                }
                _ => fill_multipliers(
                    view,
                    cols.div_ceil(FP8_COLS),
                    bytemuck::cast_slice_mut(scales),
                    row_scales,
                ),
            }
        }
        Ok(())
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
            row_scales_in: at(self.row_scales),
            kind: PACK_GATE_UP,
            ..common
        };
        let down = PackNarrowParams {
            first: at(self.codes[2]),
            first_scales: at(self.scales[2]),
            row_scales_in: at(self.row_scales + 2 * self.inter * 4),
            kind: PACK_DOWN,
            ..common
        };
        [gate_up, down]
    }
}

/// Size of a row of codes, in bytes.
fn row_bytes(format: DeviceFormat, cols: usize) -> usize {
    if format == DeviceFormat::Mxfp4 { cols / 2 } else { cols }
}

/// Size of a row's scales, in bytes.
fn scale_bytes(format: DeviceFormat, cols: usize) -> usize {
    if format == DeviceFormat::Mxfp4 { cols / MX_COLS } else { cols.div_ceil(FP8_COLS) * 4 }
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
        Scales::Groups(groups) if groups.cols < view.cols && !groups.cols.is_multiple_of(FP8_COLS) => {
            Err(format!(
                "INT4 scales for groups of {} columns cannot be packed as {format:?}: expected groups that are a multiple of \
                 {FP8_COLS} columns wide or span the matrix",
                groups.cols
            ))
        }
        _ => Ok(()),
    }
}

/// Writes rows of `cols` codes; those outside the matrix are zero.
fn fill_codes(view: &MatrixView<'_>, cols: usize, to: &mut [u8], format: DeviceFormat) {
    if view.format == WeightFormat::Int4 {
        return fill_integers(view, cols, to);
    }
    let bytes = row_bytes(format, cols);
    to.par_chunks_mut(bytes).enumerate().for_each(|(row, to)| {
        to.fill(0);
        if row >= view.rows {
            return;
        }
        let start = row * view.row_stride;
        if format == DeviceFormat::Mxfp4 {
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

/// Whether a scale spans all columns of the FP8 or INT4 matrix.
fn is_scaled_by_row(view: &MatrixView<'_>) -> bool {
    match &view.scales {
        Scales::Block { block_cols, .. } => *block_cols >= view.cols,
        Scales::Groups(groups) => groups.cols >= view.cols,
        Scales::None | Scales::Mx { .. } => true,
    }
}

/// Whether 128 neighbouring rows, from a multiple of 128 on, have the same multipliers of 128 columns.
pub(super) fn has_block_scales(view: &MatrixView<'_>) -> bool {
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
mod tests {
    use std::borrow::Cow;

    use super::*;
    use expertd_model::decode::fp8_e4m3;
    use expertd_model::{GroupScales, Packing, ScaleFormat, ZeroPoints};

    const HIDDEN: usize = 200;
    const INTER: usize = 96;
    const PADDED: [usize; 2] = [256, 128];

    /// Bytes with a long period.
    fn bytes(len: usize, seed: usize) -> Vec<u8> {
        (0..len).map(|i| ((i * 37 + i / 251 + seed * 11) % 251) as u8).collect()
    }

    fn fp8(rows: usize, cols: usize, data: &[u8], block: [usize; 2]) -> MatrixView<'_> {
        let [block_rows, block_cols] = block;
        let count = rows.div_ceil(block_rows) * cols.div_ceil(block_cols);
        let values: Vec<f32> = (0..count).map(|i| 0.5 + i as f32 * 0.25).collect();
        MatrixView {
            format: WeightFormat::Fp8E4m3,
            packing: Packing::Strided,
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales: Scales::Block { values: Cow::Owned(values), block_rows, block_cols },
        }
    }

    fn expert<'a>(gate: &MatrixView<'a>, up: &MatrixView<'a>, down: &MatrixView<'a>) -> ExpertWeights<'a> {
        ExpertWeights { gate: gate.clone(), up: up.clone(), down: down.clone(), biases: None }
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }

    /// Decodes every element of matrix `which` from the upload buffer and compares it with `view`.
    fn compare(layout: &ExpertLayout, staged: &[u8], which: usize, view: &MatrixView<'_>) {
        let [rows, cols] = if which == 2 { PADDED } else { [PADDED[1], PADDED[0]] };
        let row_scales = floats(&staged[layout.row_scales..]);
        for row in 0..rows {
            for col in 0..cols {
                let at = row * cols + col;
                let value = if layout.format == DeviceFormat::Mxfp4 {
                    let code = staged[layout.codes[which] + at / 2] >> (at % 2 * 4) & 15;
                    let exponent = staged[layout.scales[which] + row * (cols / 32) + col / 32];
                    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)]
                        * if code & 8 == 0 { 1.0 } else { -1.0 }
                        * 2f64.powi(i32::from(exponent) - 127)
                } else {
                    let scale = (row * cols.div_ceil(128) + col / 128) * 4 + layout.scales[which];
                    let scale = f64::from(floats(&staged[scale..scale + 4])[0]);
                    f64::from(fp8_e4m3(staged[layout.codes[which] + at])) * scale
                };
                let row_scale = row_scales[[0, PADDED[1], 2 * PADDED[1]][which] + row];
                let inside = row < view.rows && col < view.cols;
                let expected = if inside { f64::from(view.value(row, col)) } else { 0.0 };
                assert_eq!((value * f64::from(row_scale)) as f32, expected as f32, "{which} ({row}, {col})");
            }
        }
    }

    #[test]
    fn fp8_with_scales_of_any_height_arrives() {
        let (gate, up, down) = (bytes(INTER * HIDDEN, 1), bytes(INTER * HIDDEN, 2), bytes(HIDDEN * INTER, 3));
        // The packing kernel handles codes that are NaN; these tests avoid them.
        let clean =
            |v: Vec<u8>| v.into_iter().map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c }).collect::<Vec<_>>();
        let (gate, up, down) = (clean(gate), clean(up), clean(down));
        for block in [[128, 128], [1, 128], [1, HIDDEN], [INTER, HIDDEN], [13, 256]] {
            let gate = fp8(INTER, HIDDEN, &gate, block);
            let up = fp8(INTER, HIDDEN, &up, block);
            let down = fp8(HIDDEN, INTER, &down, [block[0], 128]);
            let layout = ExpertLayout::new(DeviceFormat::Fp8, PADDED[0], PADDED[1]);
            let mut staged = vec![0xaa; layout.bytes];
            layout.fill(&expert(&gate, &up, &down), &mut staged).unwrap();
            for (which, view) in [&gate, &up, &down].into_iter().enumerate() {
                compare(&layout, &staged, which, view);
            }
        }
    }

    /// A symmetric or asymmetric INT4 matrix with groups of `group` columns.
    fn int4<'a>(
        [rows, cols]: [usize; 2],
        data: &'a [u8],
        scales: &'a [u8],
        group: usize,
        zeros: Option<&'a [u8]>,
    ) -> MatrixView<'a> {
        let groups = cols.div_ceil(group);
        let zeros = zeros.map(|data| ZeroPoints {
            data,
            packing: Packing::Strided,
            row_stride: groups,
            group_stride: 1,
            bias: 0,
        });
        MatrixView {
            format: WeightFormat::Int4,
            packing: Packing::Strided,
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales: Scales::Groups(GroupScales {
                cols: group,
                format: ScaleFormat::Bf16,
                data: scales,
                row_stride: groups,
                group_stride: 1,
                factor: 1.0,
                zeros,
            }),
        }
    }

    #[test]
    fn int4_with_groups_of_128_columns_arrives() {
        let data = bytes(INTER * HIDDEN / 2, 7);
        let zeros = bytes(INTER * HIDDEN / 2, 8);
        let scales: Vec<u8> = (0..HIDDEN * 2)
            .flat_map(|i| half::bf16::from_f32(0.02 + i as f32 * 0.001).to_le_bytes())
            .collect();
        for (group, zeros) in [(128, None), (128, Some(&zeros[..])), (256, Some(&zeros)), (HIDDEN, None)] {
            let gate = int4([INTER, HIDDEN], &data, &scales, group, zeros);
            let down = int4([HIDDEN, INTER], &data, &scales, group, zeros);
            for view in [&gate, &down] {
                view.check().unwrap();
            }
            let layout = ExpertLayout::new(DeviceFormat::Fp8, PADDED[0], PADDED[1]);
            let mut staged = vec![0xaa; layout.bytes];
            layout.fill(&expert(&gate, &gate, &down), &mut staged).unwrap();
            for (which, view) in [&gate, &gate, &down].into_iter().enumerate() {
                compare(&layout, &staged, which, view);
            }
        }
        // Such weights are never multiplied in FP8, and narrow groups have no FP8 multipliers.
        let (gate, down) = (
            int4([INTER, HIDDEN], &data, &scales, 128, None),
            int4([HIDDEN, INTER], &data, &scales, 32, None),
        );
        for (format, part) in [(DeviceFormat::W8a8, "int4"), (DeviceFormat::Fp8, "groups of 32 columns")] {
            let layout = ExpertLayout::new(format, PADDED[0], PADDED[1]);
            let mut staged = vec![0; layout.bytes];
            let error = layout.fill(&expert(&gate, &gate, &down), &mut staged).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn mxfp4_with_alternating_rows_arrives() {
        const HIDDEN: usize = 224; // blocks of 32
        let (gate_up, down) = (bytes(2 * INTER * HIDDEN / 2, 4), bytes(HIDDEN * INTER / 2, 5));
        let exponents: Vec<u8> = (0..2 * INTER * (HIDDEN / 32)).map(|i| 110 + (i % 23) as u8).collect();
        let half = |first: usize| MatrixView {
            format: WeightFormat::Mxfp4,
            packing: Packing::Strided,
            data: &gate_up[first * HIDDEN / 2..],
            rows: INTER,
            cols: HIDDEN,
            row_stride: 2 * HIDDEN,
            col_stride: 1,
            scales: Scales::Mx {
                exponents: &exponents[first * (HIDDEN / 32)..],
                row_stride: 2 * (HIDDEN / 32),
            },
        };
        let (gate, up) = (half(0), half(1));
        let down = MatrixView {
            data: &down,
            rows: HIDDEN,
            cols: INTER,
            row_stride: INTER,
            scales: Scales::Mx { exponents: &exponents, row_stride: INTER / 32 },
            ..half(0)
        };
        let layout = ExpertLayout::new(DeviceFormat::Mxfp4, PADDED[0], PADDED[1]);
        let mut staged = vec![0xaa; layout.bytes];
        layout.fill(&expert(&gate, &up, &down), &mut staged).unwrap();
        for (which, view) in [&gate, &up, &down].into_iter().enumerate() {
            compare(&layout, &staged, which, view);
        }
    }

    #[test]
    fn matrices_that_do_not_fit_the_format_are_errors() {
        let data = bytes(INTER * HIDDEN, 6);
        let gate = fp8(INTER, HIDDEN, &data, [128, 96]);
        let down = fp8(HIDDEN, INTER, &data, [128, 128]);
        let layout = ExpertLayout::new(DeviceFormat::Fp8, PADDED[0], PADDED[1]);
        let mut staged = vec![0; layout.bytes];
        let error = layout.fill(&expert(&gate, &gate, &down), &mut staged).unwrap_err();
        assert!(error.contains("128×96") && error.contains("multiple of 128"), "{error}");
        let plain = vec![0; HIDDEN * INTER * 2];
        let bf16 = MatrixView { format: WeightFormat::Bf16, data: &plain, scales: Scales::None, ..down };
        let gate = fp8(INTER, HIDDEN, &data, [128, 128]);
        let error = layout.fill(&expert(&gate, &gate, &bf16), &mut staged).unwrap_err();
        assert!(error.contains("bf16"), "{error}");
    }
}
