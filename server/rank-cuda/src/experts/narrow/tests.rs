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
            let value = if matches!(layout.format, DeviceFormat::Int4 | DeviceFormat::Int4Zeros) {
                let code = staged[layout.codes[which] + at / 2] >> (at % 2 * 4) & 15;
                let group = row * (cols / 32) + col / 32;
                let scale = &staged[layout.scales[which] + group * 2..][..2];
                let zero =
                    if layout.format == DeviceFormat::Int4 { 8 } else { staged[layout.zeros[which] + group] };
                (f64::from(code) - f64::from(zero)) * half::f16::from_le_bytes([scale[0], scale[1]]).to_f64()
            } else if matches!(layout.format, DeviceFormat::Mxfp4 | DeviceFormat::W4a8) {
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
fn int4_arrives() {
    let data = bytes(INTER * HIDDEN / 2, 7);
    let zeros = bytes(INTER * HIDDEN / 2, 8);
    let scales: Vec<u8> =
        (0..HIDDEN * 7).flat_map(|i| half::bf16::from_f32(0.02 + i as f32 * 0.001).to_le_bytes()).collect();
    let cases = [
        (32, None),
        (96, Some(&zeros[..])),
        (128, None),
        (128, Some(&zeros)),
        (256, Some(&zeros)),
        (HIDDEN, None),
    ];
    for (group, zeros) in cases {
        let gate = int4([INTER, HIDDEN], &data, &scales, group, zeros);
        let down = int4([HIDDEN, INTER], &data, &scales, group, zeros);
        for view in [&gate, &down] {
            view.check().unwrap();
        }
        let format = if zeros.is_some() { DeviceFormat::Int4Zeros } else { DeviceFormat::Int4 };
        let layout = ExpertLayout::new(format, PADDED[0], PADDED[1]);
        let mut staged = vec![0xaa; layout.bytes];
        layout.fill(&expert(&gate, &gate, &down), &mut staged).unwrap();
        for (which, view) in [&gate, &gate, &down].into_iter().enumerate() {
            compare(&layout, &staged, which, view);
        }
    }
    // Such weights are never multiplied in FP8, and groups are whole multiples of the device's.
    let (gate, down) =
        (int4([INTER, HIDDEN], &data, &scales, 128, None), int4([HIDDEN, INTER], &data, &scales, 48, None));
    for (format, part) in [(DeviceFormat::W8a8, "int4"), (DeviceFormat::Int4, "groups of 48 columns")] {
        let layout = ExpertLayout::new(format, PADDED[0], PADDED[1]);
        let mut staged = vec![0; layout.bytes];
        let error = layout.fill(&expert(&gate, &gate, &down), &mut staged).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

/// Fills a buffer with an MXFP4 expert and compares every element.
fn mxfp4_arrives(format: DeviceFormat) {
    const HIDDEN: usize = 224; // blocks of 32
    let (gate_up, down) = (bytes(2 * INTER * HIDDEN / 2, 4), bytes(HIDDEN * INTER / 2, 5));
    let exponent = |i: usize| 110 + (i % 23) as u8;
    let exponents: Vec<u8> = (0..2 * INTER * (HIDDEN / 32)).map(exponent).collect();
    let half = |first: usize| MatrixView {
        format: WeightFormat::Mxfp4,
        packing: Packing::Strided,
        data: &gate_up[first * HIDDEN / 2..],
        rows: INTER,
        cols: HIDDEN,
        row_stride: 2 * HIDDEN,
        col_stride: 1,
        scales: Scales::Mx { exponents: &exponents[first * (HIDDEN / 32)..], row_stride: 2 * (HIDDEN / 32) },
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
    let layout = ExpertLayout::new(format, PADDED[0], PADDED[1]);
    let mut staged = vec![0_u64; layout.bytes.div_ceil(8)];
    let staged: &mut [u8] = bytemuck::cast_slice_mut(&mut staged);
    staged.fill(0xaa);
    layout.fill(&expert(&gate, &up, &down), staged).unwrap();
    for (which, view) in [&gate, &up, &down].into_iter().enumerate() {
        compare(&layout, staged, which, view);
    }
}

#[test]
fn mxfp4_with_alternating_rows_arrives_in_both_formats() {
    mxfp4_arrives(DeviceFormat::Mxfp4);
    mxfp4_arrives(DeviceFormat::W4a8);
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
