//! Units and panels that the host has packed, read as the experts' kernel reads them: units lane by lane, with its masks and
//! rotations, panels by their swizzle.
#![allow(clippy::unwrap_used, unsafe_code, reason = "tests pack host memory")]

use expertd_kernels::experts::{
    PACK_DOWN, PACK_GATE_UP, PANEL, PackParams, UNIT_ROWS, pack_host, pack_narrow_host,
};
use half::{bf16, f16};
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use super::DeviceFormat;
use super::load::fill;
use super::narrow::ExpertLayout;
use super::pack_tests::Stored;
use super::padded;
use expertd_model::decode::FP4;
use expertd_model::synth::{self, SynthConfig, SynthFormat};
use expertd_model::{Checkpoint, ExpertTensors, ExpertWeights, MatrixView, WeightFormat};
use expertd_types::{ExpertId, Fp8Products};

/// Columns of a unit.
const COLS: usize = 128;
const HIDDEN: usize = 192;
const INTER: usize = 128;

/// Both halves of a register as bf16, multiplied with a power of two.
fn halves(bits: u32, exponent: i32) -> [f64; 2] {
    [bits as u16, (bits >> 16) as u16]
        .map(|bits| f64::from(bf16::from_bits(bits).to_f32()) * 2f64.powi(exponent))
}

fn word(unit: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*unit[at..].first_chunk().unwrap())
}

/// Two e4m3 elements with the exponent that is too low (`Fp8::widen_word`).
fn fp8_elements(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let word = word(unit, step / 2 * 512 + lane * 16 + step % 2 * 8 + pair / 2 * 4);
    let bits = match pair % 2 {
        0 => word & 0x87F0_87F0,
        _ => word.rotate_right(4) & 0x8780_8780 | word << 4 & 0x0070_0070,
    };
    halves(bits, 0)
}

/// The two elements that a lane holds in pair `pair` of step `step`, without factors of rows (`Fp8::widen`, `Fp8::load_scales`).
fn fp8_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let scale = word(unit, 2048 + lane / 4 * 8 + pair % 2 * 4);
    fp8_elements(unit, lane, step, pair)
        .map(|value| value * 2f64.powi(120) * f64::from(f32::from_bits(scale)))
}

/// Two e2m1 elements with the exponent that is too low (`Mxfp4::place_block`).
fn mxfp4_elements(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let at = step / 4 * 512 + lane * 16 + step % 4 / 2 * 8;
    let (first, second) = (word(unit, at), word(unit, at + 4));
    let third = first & 0x6030_6030 | second.rotate_right(30) & !0x6030_6030;
    let bits = [
        first,
        first.rotate_right(4),
        first << 6,
        second,
        second.rotate_right(4),
        second << 6,
        third.rotate_right(8),
        third << 2,
    ];
    halves(bits[step % 2 * 4 + pair] & 0x81C0_81C0, 0)
}

/// The multiplier of 32 k, of the exponents at `at` (`Mxfp4::multiplier`).
fn mxfp4_multiplier(unit: &[u8], at: usize, lane: usize, block: usize, pair: usize) -> f64 {
    let four = word(unit, at + lane / 4 * 8 + pair % 2 * 4);
    let two = if block < 2 { four } else { four.rotate_right(8) } & 0x7F80_7F80;
    halves(two, 0)[block % 2]
}

/// The same for MXFP4 (`Mxfp4::widen`).
fn mxfp4_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let multiplier = mxfp4_multiplier(unit, 1024, lane, step / 2, pair);
    mxfp4_elements(unit, lane, step, pair).map(|value| value * multiplier)
}

/// The same for NVFP4 (`Nvfp4::widen`, `Nvfp4::scale_twice`).
fn nvfp4_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let four = word(unit, 1024 + lane / 4 * 16 + pair % 2 * 8 + step / 4 * 4);
    let two = four.rotate_right(8 * (step as u32 % 2)) & 0x0FF0_0FF0 | 0x7000_7000;
    let scale = halves(two, 0)[step % 4 / 2];
    // The product is what the kernel rounds to bf16.
    mxfp4_elements(unit, lane, step, pair).map(|value| {
        let product = value * scale;
        assert_eq!(f64::from(bf16::from_f32(product as f32).to_f32()), product);
        product
    })
}

/// The same for MXFP8 (`Mxfp8::widen`).
fn mxfp8_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let multiplier = mxfp4_multiplier(unit, 2048, lane, step / 2, pair);
    fp8_elements(unit, lane, step, pair).map(|value| value * multiplier)
}

/// The same for MXFP4 elements that are widened to FP8 (`w4a8_word`). Lanes have other elements there: this one finds those of the pair.
fn w4a8_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let first = 16 * step + 2 * (lane % 4) + 8 * (pair / 2);
    [first, first + 1].map(|col| {
        let (lane, row) = (lane / 4 * 4 + col / 32, pair % 2);
        let (step, register, byte) = (col % 32 / 8, col % 8 / 4, col % 4);
        let word = word(unit, step / 2 * 512 + lane * 16 + (step % 2 * 2 + row) * 4);
        let magnitude = FP4[(word >> (16 * register + 4 * byte) & 7) as usize];
        let is_negative = word >> (8 * byte + [7, 3][register]) & 1 != 0;
        let shift = i32::from(unit[1024 + lane * 2 + row]);
        f64::from(if is_negative { -magnitude } else { magnitude }) * 2f64.powi(6 - shift)
    })
}

/// The same for INT4 (`Int4Of::integers`, `Int4Of::group_scale`); `zero` finds the zero point of a unit, a row of its lane's two and a group.
fn int4_pair_of(unit: &[u8], [lane, step, pair]: [usize; 3], zero: impl Fn(usize, usize) -> u8) -> [f64; 2] {
    let word_of_step = word(unit, step / 4 * 512 + lane * 16 + step % 4 * 4);
    let bits = word_of_step >> (pair / 2 * 8) & [0x00F0_00F0, 0x000F_000F][pair % 2];
    let power = 2f64.powi(if pair % 2 == 0 { -2 } else { -6 });
    let (row, group) = (pair % 2, step / 2);
    let scale = f16::from_bits(
        word(unit, 1024 + (lane / 4 * 2 + row) * 8 + group / 2 * 4).rotate_right(group as u32 % 2 * 16)
            as u16,
    );
    halves(bits, 127).map(|value| (value - f64::from(zero(row, group)) * power) * scale.to_f64())
}

fn int4_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    int4_pair_of(unit, [lane, step, pair], |_, _| 8)
}

fn int4_zeros_pair(unit: &[u8], lane: usize, step: usize, pair: usize) -> [f64; 2] {
    let zero = |row: usize, group: usize| unit[1152 + lane / 4 * 4 + group] >> (4 * row) & 15;
    int4_pair_of(unit, [lane, step, pair], zero)
}

/// The two elements that a lane holds in a pair of a step.
type PairOf = fn(&[u8], usize, usize, usize) -> [f64; 2];

/// Draws an expert and checks it.
fn check_drawn(stored: WeightFormat, format: DeviceFormat, pair_of: PairOf) {
    let mut random = SmallRng::seed_from_u64(11);
    let [gate, up, down] = [(INTER, HIDDEN), (INTER, HIDDEN), (HIDDEN, INTER)].map(|(rows, cols)| {
        let mut drawn = Stored::draw(stored, rows, cols, &mut random);
        drawn.leave_out_nan(stored);
        if format == DeviceFormat::Int4Zeros {
            drawn.add_zeros(&mut random);
        }
        if format == DeviceFormat::W4a8 {
            drawn.limit_shifts();
        }
        drawn
    });
    let weights =
        ExpertWeights { gate: gate.view(stored), up: up.view(stored), down: down.view(stored), biases: None };
    check(&weights, format, pair_of);
}

/// Packs an expert and compares every element with its value in the checkpoint.
fn check(weights: &ExpertWeights<'_>, format: DeviceFormat, pair_of: PairOf) {
    let (hidden, inter) = (padded(weights.gate.cols), format.padded_inter(weights.gate.rows));
    let layout = ExpertLayout::new(format, hidden, inter);
    let mut staged = vec![0_u64; layout.bytes.div_ceil(8)];
    layout.fill(weights, bytemuck::cast_slice_mut(&mut staged)).unwrap();
    let sizes = format.matrix_bytes(hidden, inter);
    let shapes = [(2 * inter, hidden), (hidden, inter)];
    for (which, mut params) in layout.packs(staged.as_ptr() as u64).into_iter().enumerate() {
        let (rows, cols) = shapes[which];
        let (mut units, mut factors) = (vec![0_u128; sizes[which] / 16], vec![0_f32; rows]);
        (params.units, params.row_scales) = (units.as_mut_ptr() as u64, factors.as_mut_ptr() as u64);
        let count = rows / UNIT_ROWS;
        // SAFETY: source and destinations are live buffers of the documented sizes.
        unsafe { pack_narrow_host(&params, 0..count as u64) }.unwrap();
        let bytes: &[u8] = bytemuck::cast_slice(&units);
        let unit_bytes = bytes.len() / (count * cols.div_ceil(COLS));
        for (index, unit) in bytes.chunks(unit_bytes).enumerate() {
            let (block, first) = (index / count, index % count * UNIT_ROWS);
            let all = |n: usize| (0..32).flat_map(move |lane| (0..n).map(move |i| (lane, i)));
            for (lane, i) in all(8 * 4) {
                let (step, pair) = (i / 4, i % 4);
                let row = lane / 4 + pair % 2 * 8;
                let col = block * COLS + 16 * step + 2 * (lane % 4) + 8 * (pair / 2);
                let (feature, view) = match (which, row < 8) {
                    (0, true) => (first / 2 + row, &weights.gate),
                    (0, false) => (first / 2 + row - 8, &weights.up),
                    _ => (first + row, &weights.down),
                };
                let factor = factors[feature + if which == 0 && row >= 8 { inter } else { 0 }];
                for (half, found) in pair_of(unit, lane, step, pair).into_iter().enumerate() {
                    let col = col + half;
                    let inside = feature < view.rows && col < view.cols;
                    let expected = if inside { f64::from(view.value(feature, col)) } else { 0.0 };
                    let found = found * f64::from(factor);
                    // The value in NVFP4 is rounded to f32 twice: with the factor, and with the element.
                    let rounded = if view.format == WeightFormat::Nvfp4 { 2f64.powi(-22) } else { 0.0 };
                    let close = (f64::from(found as f32) - expected).abs() <= expected.abs() * rounded;
                    assert!(close, "{} {which} ({feature}, {col}): {found} for {expected}", view.format);
                }
            }
        }
    }
}

#[test]
fn lanes_find_every_element_where_the_host_packed_it() {
    check_drawn(WeightFormat::Fp8E4m3, DeviceFormat::Fp8, fp8_pair);
    check_drawn(WeightFormat::Int4, DeviceFormat::Int4, int4_pair);
    check_drawn(WeightFormat::Int4, DeviceFormat::Int4Zeros, int4_zeros_pair);
    check_drawn(WeightFormat::Mxfp4, DeviceFormat::Mxfp4, mxfp4_pair);
    check_drawn(WeightFormat::Mxfp4, DeviceFormat::W4a8, w4a8_pair);
    check_drawn(WeightFormat::Nvfp4, DeviceFormat::Nvfp4, nvfp4_pair);
    check_drawn(WeightFormat::Mxfp8, DeviceFormat::Mxfp8, mxfp8_pair);
}

#[test]
fn experts_of_checkpoints_get_their_device_format_and_arrive() {
    use DeviceFormat::Int4Zeros;
    use SynthFormat::{Int4, Int4Awq, Int4Gptq, Mxfp8, Nvfp4};
    // The groups of GPTQ and AWQ have 128 columns and zero points, those of compressed-tensors 32.
    let cases = [
        (Int4Gptq, Int4Zeros, int4_zeros_pair as PairOf),
        (Int4Awq, Int4Zeros, int4_zeros_pair),
        (Int4, DeviceFormat::Int4, int4_pair),
        (Mxfp8, DeviceFormat::Mxfp8, mxfp8_pair),
        (Nvfp4, DeviceFormat::Nvfp4, nvfp4_pair),
    ];
    for (format, expected, pair_of) in cases {
        let dir = tempfile::tempdir().unwrap();
        let config = SynthConfig { format, hidden: 256, width: 128, ..SynthConfig::new("qwen3_moe") };
        synth::write(&config, dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let (layer, moe) = checkpoint.spec().moe_layers().next().unwrap();
        for fp8 in [Fp8Products::OF_BOTH, Fp8Products::NONE] {
            assert_eq!(crate::Stored::routed(&moe.experts).on_device(fp8), expected, "{format:?}");
        }
        let tensors = checkpoint.expert(layer, ExpertId(1)).unwrap();
        let (gate, up, down) = (tensors.gate, tensors.up, tensors.down);
        check(&ExpertWeights { gate, up, down, biases: None }, expected, pair_of);
    }
}

#[test]
fn experts_of_libraries_arrive() {
    use DeviceFormat::{Int4, Int4Zeros, Mxfp8, Nvfp4};
    let cases = [
        ("deepseek_v3-int4", Int4, int4_pair as PairOf),
        ("qwen2_moe-int4-awq", Int4Zeros, int4_zeros_pair),
        ("qwen3_moe-int4-gptq", Int4Zeros, int4_zeros_pair),
        ("qwen3_moe-int4-asymmetric-library", Int4Zeros, int4_zeros_pair),
        ("qwen3_moe-int4-channel-library", Int4Zeros, int4_zeros_pair),
        ("deepseek_v3-nvfp4", Nvfp4, nvfp4_pair),
        ("qwen3_moe-nvfp4-library", Nvfp4, nvfp4_pair),
        ("qwen3_moe-mxfp8-library", Mxfp8, mxfp8_pair),
    ];
    for (name, expected, pair_of) in cases {
        let checkpoint =
            Checkpoint::open(&expertd_test_fixtures::fixture(&format!("quantised/{name}"))).unwrap();
        for (layer, moe) in checkpoint.spec().moe_layers() {
            let stored = crate::Stored::routed(&moe.experts);
            assert_eq!(stored.on_device(Fp8Products::OF_BOTH), expected, "{name}");
            if let Some(shared) = moe.shared.as_ref().map(crate::Stored::shared) {
                let all = if shared.format == stored.format { expected } else { DeviceFormat::Bf16 };
                assert_eq!(shared.on_device(Fp8Products::OF_BOTH), all, "{name}");
            }
            for expert in 0..moe.experts.count as u32 {
                let ExpertTensors { gate, up, down, .. } =
                    checkpoint.expert(layer, ExpertId(expert)).unwrap();
                check(&ExpertWeights { gate, up, down, biases: None }, expected, pair_of);
            }
        }
    }
}

#[test]
fn mxfp4_experts_arrive_for_products_in_fp8() {
    for name in ["gpt_oss-mxfp4-odd", "qwen3_moe-mxfp4-library"] {
        let folder = expertd_test_fixtures::fixture(&format!("quantised/{name}"));
        let checkpoint = Checkpoint::open(&folder).unwrap();
        for (layer, moe) in checkpoint.spec().moe_layers() {
            let stored = crate::Stored::routed(&moe.experts);
            assert_eq!(stored.on_device(Fp8Products::OF_MXFP4), DeviceFormat::W4a8, "{name}");
            for expert in 0..moe.experts.count as u32 {
                let ExpertTensors { gate, up, down, .. } =
                    checkpoint.expert(layer, ExpertId(expert)).unwrap();
                check(&ExpertWeights { gate, up, down, biases: None }, DeviceFormat::W4a8, w4a8_pair);
            }
        }
    }
}

/// Converts and packs an expert to bf16 panels and compares every element with its value in the checkpoint. The padding of an odd
/// size is zero.
fn check_panels(expert: &ExpertTensors<'_>) {
    let ExpertTensors { gate, up, down, .. } = expert;
    let (hidden, inter) = (padded(gate.cols), padded(gate.rows));
    let rows_of = |view: &MatrixView<'_>, rows: usize, cols: usize| {
        let mut to = vec![0xaaaa_u16; rows * cols];
        fill(view, cols, &mut to);
        to
    };
    let (first, second) = (rows_of(gate, inter, hidden), rows_of(up, inter, hidden));
    let third = rows_of(down, hidden, inter);
    let of_kinds = [
        (PACK_GATE_UP, &first, second.as_ptr() as u64, [2 * inter, hidden]),
        (PACK_DOWN, &third, 0, [hidden, inter]),
    ];
    for (kind, source, second, [rows, cols]) in of_kinds {
        let mut panels = vec![0xaaaa_u16; rows * cols];
        let params = PackParams {
            first: source.as_ptr() as u64,
            second,
            panels: panels.as_mut_ptr() as u64,
            expert_stride: (hidden * inter) as u64,
            experts: 1,
            hidden: hidden as i32,
            inter: inter as i32,
            kind,
        };
        // SAFETY: sources and destination are live buffers of those sizes.
        unsafe { pack_host(&params, 0..(cols / PANEL) as u64) }.unwrap();
        for row in 0..rows {
            let (feature, view) = match (kind, row % 16 < 8) {
                (PACK_GATE_UP, true) => (row / 16 * 8 + row % 8, gate),
                (PACK_GATE_UP, false) => (row / 16 * 8 + row % 8, up),
                _ => (row, down),
            };
            for col in 0..cols {
                let chunk = (col % 64 / 8) ^ (row % 8);
                let found = panels[(col / 64 * rows + row) * 64 + chunk * 8 + col % 8];
                let inside = feature < view.rows && col < view.cols;
                let expected = if inside { view.value(feature, col) } else { 0.0 };
                assert_eq!(found, bf16::from_f32(expected).to_bits(), "{} ({feature}, {col})", view.format);
            }
        }
    }
}

/// The experts of a fixture that have the device format bf16: routed ones, and shared ones.
fn bf16_experts_of(name: &str, fp8: Fp8Products) -> [bool; 2] {
    let folder = expertd_test_fixtures::fixture(&format!("quantised/{name}"));
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut found = [false; 2];
    for (layer, moe) in checkpoint.spec().moe_layers() {
        if crate::Stored::routed(&moe.experts).on_device(fp8) == DeviceFormat::Bf16 {
            found[0] = true;
            for expert in 0..moe.experts.count as u32 {
                check_panels(&checkpoint.expert(layer, ExpertId(expert)).unwrap());
            }
        }
        let shared = moe.shared.as_ref().map(crate::Stored::shared);
        if shared.is_some_and(|shared| shared.on_device(fp8) == DeviceFormat::Bf16) {
            found[1] = true;
            check_panels(&checkpoint.shared(layer).unwrap().unwrap().mlp);
        }
    }
    found
}

#[test]
fn experts_without_a_layout_of_their_own_arrive_in_bf16_panels() {
    for fp8 in [Fp8Products::OF_BOTH, Fp8Products::NONE] {
        assert_eq!(bf16_experts_of("deepseek_v3-fp8-narrow", fp8), [true, true]);
        assert_eq!(bf16_experts_of("qwen2_moe-fp8-mixed", fp8), [false, true]);
        assert_eq!(bf16_experts_of("deepseek_v3-fp8-odd", fp8), [false, false]);
    }
}
