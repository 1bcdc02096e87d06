//! Copies of experts of CPU ranks have the bytes that a loader packs from the same weights, whatever the CPU's panels.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "tests pack host memory, and read and write device memory"
)]

use expertd_compute::experts::cpu::CpuExpert;
use expertd_compute::linalg::{PackedMatrix, SimdLevel};
use expertd_kernels::device::Buffer;
use expertd_kernels::experts::{
    PACK_DOWN, PACK_GATE_UP, PANEL, PackParams, RepackParams, UNIT_ROWS, pack_host, pack_narrow_host, repack,
    repack_host,
};
use expertd_model::{
    ExpertWeights, GroupScales, INT4_ZERO, MatrixView, Packing, ScaleFormat, Scales, WeightFormat, ZeroPoints,
};
use half::{bf16, f16};
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};

use super::load::fill;
use super::narrow::ExpertLayout;
use super::{DeviceFormat, padded, rewriting};

const EXPERTS: usize = 3;
/// `[hidden, inter]`.
const SIZES: [[usize; 2]; 4] = [[64, 64], [200, 36], [192, 320], [416, 160]];
/// A block or group that spans all rows or columns.
const ALL: usize = 1 << 20;

/// Weights of a checkpoint, and what they become on a GPU.
#[derive(Clone, Copy, Debug)]
struct Case {
    stored: WeightFormat,
    device: DeviceFormat,
    /// Rows of a block of scales.
    rows: usize,
    /// Columns of a block or group of scales.
    cols: usize,
    scale: ScaleFormat,
    factor: f32,
    zeros: bool,
    /// Whether all scales of a row are equal.
    is_even: bool,
}

fn case(stored: WeightFormat, device: DeviceFormat, [rows, cols]: [usize; 2]) -> Case {
    let (scale, factor) = match stored {
        WeightFormat::Nvfp4 => (ScaleFormat::Fp8E4m3, 0.003_71),
        _ => (ScaleFormat::Bf16, 1.0),
    };
    Case { stored, device, rows, cols, scale, factor, zeros: false, is_even: false }
}

fn cases() -> Vec<Case> {
    use DeviceFormat::{Bf16, Fp8, Int4, Int4Zeros, Mxfp4, Mxfp8, Nvfp4, W4a8, W8a8};
    let mut cases = Vec::new();
    for stored in [WeightFormat::Bf16, WeightFormat::F16, WeightFormat::F32] {
        cases.push(case(stored, Bf16, [ALL, ALL]));
    }
    for cols in [32, 64, 96, 128, 256, ALL] {
        for (scale, factor) in [
            (ScaleFormat::Bf16, 1.0),
            (ScaleFormat::F16, 1.0),
            (ScaleFormat::F16, 0.37),
            (ScaleFormat::F32, 1.0),
        ] {
            for is_even in [false, true] {
                let symmetric = Case { scale, factor, is_even, ..case(WeightFormat::Int4, Int4, [1, cols]) };
                cases.push(symmetric);
                cases.push(Case { device: Int4Zeros, ..symmetric });
                cases.push(Case { device: Int4Zeros, zeros: true, ..symmetric });
            }
        }
    }
    // 12: no whole octets, so that CPU ranks hold values.
    for cols in [8, 12, 16, 48] {
        let narrow = case(WeightFormat::Int4, Bf16, [1, cols]);
        cases.extend([narrow, Case { zeros: true, scale: ScaleFormat::F16, factor: 0.7, ..narrow }]);
    }
    for device in [Mxfp4, W4a8, Bf16] {
        cases.push(case(WeightFormat::Mxfp4, device, [1, 32]));
    }
    for device in [Mxfp8, Bf16] {
        cases.push(case(WeightFormat::Mxfp8, device, [1, 32]));
    }
    for cols in [16, 32, ALL] {
        cases.push(case(WeightFormat::Nvfp4, Nvfp4, [1, cols]));
    }
    cases.push(case(WeightFormat::Nvfp4, Bf16, [1, 8]));
    for device in [Fp8, W8a8] {
        for block in [[128, 128], [1, 128], [13, 256], [1, ALL], [ALL, ALL]] {
            cases.push(case(WeightFormat::Fp8E4m3, device, block));
        }
    }
    // 100: no whole blocks of CPU ranks, which hold values.
    for cols in [32, 64, 96, 100] {
        cases.push(case(WeightFormat::Fp8E4m3, Bf16, [64, cols]));
    }
    cases
}

/// Random elements and scales of one matrix.
struct Drawn {
    data: Vec<u8>,
    scales: Vec<u8>,
    values: Vec<f32>,
    zeros: Vec<u8>,
    rows: usize,
    cols: usize,
}

impl Drawn {
    fn new(case: &Case, rows: usize, cols: usize, random: &mut SmallRng) -> Self {
        let (mut data, count) = (Vec::new(), rows * cols);
        // FP8 NaN stay with CPU ranks, which hold them as f32.
        let clean = |code: u8| if code & 0x7f == 0x7f { code ^ 1 } else { code };
        for _ in 0..count {
            let value = random.random_range(-2.0..2.0_f32);
            match case.stored {
                WeightFormat::F32 => data.extend(value.to_le_bytes()),
                WeightFormat::F16 => data.extend(f16::from_f32(value).to_le_bytes()),
                WeightFormat::Bf16 => data.extend(bf16::from_f32(value).to_le_bytes()),
                WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => data.push(clean(random.random())),
                _ => data.push(random.random()),
            }
        }
        let (mut scales, mut values) = (Vec::new(), Vec::new());
        for row in 0..rows {
            let of_row = random.random_range(0.001..1.0_f32);
            // Rows of any range of exponents, some of which hold a NaN.
            let (lowest, nan) = (random.random_range(0..247_u8), row % 11 == 3);
            for group in 0..cols.div_ceil(8) {
                let exponent = lowest.saturating_add(random.random_range(0..9)).min(246);
                let drawn = random.random_range(-0.5..1.0_f32) * 2_f32.powi(random.random_range(-12..3));
                let scale = if case.is_even { of_row } else { drawn };
                values.push(scale);
                match (case.stored, case.scale) {
                    (WeightFormat::Mxfp4 | WeightFormat::Mxfp8, _) => {
                        scales.push(if nan && group == 1 { 255 } else { exponent })
                    }
                    (_, ScaleFormat::Fp8E4m3) => {
                        scales.push(if nan && group == 1 { 0x7f } else { clean(random.random()) })
                    }
                    (_, ScaleFormat::F16) => scales.extend(f16::from_f32(scale).to_le_bytes()),
                    (_, ScaleFormat::Bf16) => scales.extend(bf16::from_f32(scale).to_le_bytes()),
                    (_, ScaleFormat::F32) => scales.extend(scale.to_le_bytes()),
                }
            }
        }
        // Not all are those of symmetric integers, which CPU ranks leave out: a matrix may have one zero point only.
        let mut zeros: Vec<u8> = (0..rows * cols).map(|_| random.random()).collect();
        zeros[0] = if zeros[0] & 0xf == INT4_ZERO { 0 } else { zeros[0] };
        Drawn { data, scales, values, zeros, rows, cols }
    }

    fn view(&self, case: &Case) -> MatrixView<'_> {
        let (rows, cols) = (self.rows, self.cols);
        let row_stride = cols.div_ceil(8);
        let scales = match case.stored {
            WeightFormat::Fp8E4m3 => {
                let (block_rows, block_cols) = (case.rows.min(rows), case.cols.min(cols));
                let count = rows.div_ceil(block_rows) * cols.div_ceil(block_cols);
                Scales::Block { values: self.values[..count].into(), block_rows, block_cols }
            }
            WeightFormat::Mxfp4 | WeightFormat::Mxfp8 => Scales::Mx { exponents: &self.scales, row_stride },
            WeightFormat::Int4 | WeightFormat::Nvfp4 => Scales::Groups(GroupScales {
                cols: case.cols.min(cols),
                format: case.scale,
                data: &self.scales,
                row_stride,
                group_stride: 1,
                factor: case.factor,
                zeros: case.zeros.then_some(ZeroPoints {
                    data: &self.zeros,
                    packing: Packing::Strided,
                    row_stride,
                    group_stride: 1,
                    bias: 0,
                }),
            }),
            _ => Scales::None,
        };
        MatrixView {
            format: case.stored,
            packing: Packing::Strided,
            data: &self.data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
            scales,
        }
    }
}

/// Bytes of an expert that is packed for a processor.
pub(crate) fn bytes_on_cpu(stored: &crate::Stored, hidden: usize, inter: usize) -> usize {
    let cols = stored.scale_cols.unwrap_or(ALL);
    let of = case(stored.format, DeviceFormat::Bf16, [1, cols]);
    let of = Case { zeros: stored.zero_points, ..of };
    let drawn = &draw(&of, [hidden, inter])[0];
    let packed = CpuExpert::pack_for(SimdLevel::ALL[0], &weights(drawn, &of)).unwrap();
    packed.matrices().into_iter().map(PackedMatrix::bytes).sum()
}

fn draw(case: &Case, [hidden, inter]: [usize; 2]) -> Vec<[Drawn; 3]> {
    let mut random = SmallRng::seed_from_u64(expertd_test_seed::seed());
    let shapes = [(inter, hidden), (inter, hidden), (hidden, inter)];
    (0..EXPERTS).map(|_| shapes.map(|(rows, cols)| Drawn::new(case, rows, cols, &mut random))).collect()
}

fn weights<'a>([gate, up, down]: &'a [Drawn; 3], case: &Case) -> ExpertWeights<'a> {
    ExpertWeights { gate: gate.view(case), up: up.view(case), down: down.view(case), biases: None }
}

/// Matrices in the kernels' layout, of all experts, and scales of their rows.
#[derive(PartialEq)]
struct Panels {
    /// Bytes of an expert's matrix, and rows of it.
    bytes: usize,
    rows: usize,
    elements: Vec<u128>,
    row_scales: Vec<u32>,
}

/// Gate and up, and down, without contents.
fn panels(case: &Case, [hidden, inter]: [usize; 2]) -> [Panels; 2] {
    let (hidden, inter) = (padded(hidden), case.device.padded_inter(inter));
    let bytes = case.device.matrix_bytes(hidden, inter);
    let scaled = usize::from(case.device != DeviceFormat::Bf16);
    [(bytes[0], 2 * inter), (bytes[1], hidden)].map(|(bytes, rows)| Panels {
        bytes,
        rows,
        elements: vec![u128::MAX; EXPERTS * bytes / 16],
        row_scales: vec![u32::MAX; scaled * EXPERTS * rows],
    })
}

/// As a loader packs on the host.
fn of_loader(case: &Case, sizes: [usize; 2], experts: &[[Drawn; 3]]) -> [Panels; 2] {
    let mut all = panels(case, sizes);
    let (hidden, inter) = (padded(sizes[0]), case.device.padded_inter(sizes[1]));
    for (index, expert) in experts.iter().enumerate() {
        let weights = weights(expert, case);
        if case.device == DeviceFormat::Bf16 {
            let of = |view, rows: usize, cols| {
                let mut plain = vec![0_u16; rows * cols];
                fill(view, cols, &mut plain);
                plain
            };
            let plain = [
                of(&weights.gate, inter, hidden),
                of(&weights.up, inter, hidden),
                of(&weights.down, hidden, inter),
            ];
            let [gate, up, down] = plain.each_ref().map(|rows| rows.as_ptr() as u64);
            for (to, (first, second, kind, k)) in
                all.iter_mut().zip([(gate, up, PACK_GATE_UP, hidden), (down, 0, PACK_DOWN, inter)])
            {
                let panels = to.elements[index * to.bytes / 16..].as_mut_ptr() as u64;
                let (hidden, inter) = (hidden as i32, inter as i32);
                let params =
                    PackParams { first, second, panels, expert_stride: 0, experts: 1, hidden, inter, kind };
                // SAFETY: source and destination are live buffers of these sizes.
                unsafe { pack_host(&params, 0..(k / PANEL) as u64) }.unwrap();
            }
            continue;
        }
        let layout = ExpertLayout::new(case.device, hidden, inter);
        let mut staged = vec![0_u64; layout.bytes.div_ceil(8)];
        layout.fill(&weights, bytemuck::cast_slice_mut(&mut staged)).unwrap();
        for (to, mut params) in all.iter_mut().zip(layout.packs(staged.as_ptr() as u64)) {
            params.units = to.elements[index * to.bytes / 16..].as_mut_ptr() as u64;
            params.row_scales = to.row_scales[index * to.rows..].as_mut_ptr() as u64;
            // SAFETY: as above.
            unsafe { pack_narrow_host(&params, 0..(to.rows / UNIT_ROWS) as u64) }.unwrap();
        }
    }
    all
}

/// Experts as CPU ranks have them, one after another, and how gate and up, and down, are rewritten: addresses of sources are offsets.
fn of_cpu(
    case: &Case,
    sizes: [usize; 2],
    experts: &[[Drawn; 3]],
    level: SimdLevel,
) -> (Vec<u128>, [RepackParams; 2]) {
    const ALIGN: usize = 64;
    let packed: Vec<CpuExpert> =
        experts.iter().map(|expert| CpuExpert::pack_for(level, &weights(expert, case)).unwrap()).collect();
    let (mut bytes, mut starts, mut places) = (Vec::<u8>::new(), Vec::new(), Vec::new());
    for expert in &packed {
        let start = bytes.len();
        starts.push(start);
        let mut add = |part: &[u8]| {
            let at = bytes.len() - start;
            bytes.extend_from_slice(part);
            bytes.resize(bytes.len().next_multiple_of(ALIGN), 0xff);
            at
        };
        let places_of = expert.matrices().map(|matrix: &PackedMatrix| {
            [add(matrix.elements()), add(bytemuck::cast_slice(matrix.scales()))]
        });
        places.push(places_of);
    }
    let stride = bytes.len() / packed.len();
    for (index, expert) in packed.iter().enumerate() {
        assert_eq!(starts[index], index * stride, "{case:?}: experts have equal sizes");
        assert_eq!(expert.matrices().map(PackedMatrix::form), packed[0].matrices().map(PackedMatrix::form));
    }
    let params = [0, 1].map(|which| {
        let form = packed[0].matrices()[which].form();
        let found = rewriting(&form, case.device);
        RepackParams {
            source: places[0][which][0] as u64,
            scales: places[0][which][1] as u64,
            source_stride: stride as u64,
            experts: EXPERTS as i32,
            hidden: padded(sizes[0]) as i32,
            inter: case.device.padded_inter(sizes[1]) as i32,
            ..found.unwrap_or_else(|| panic!("{case:?}: no kernel rewrites {form:?}"))
        }
    });
    let mut words = vec![0_u128; bytes.len().div_ceil(16)];
    bytemuck::cast_slice_mut::<u128, u8>(&mut words)[..bytes.len()].copy_from_slice(&bytes);
    (words, params)
}

/// Calls `rewrite` on every case, with its experts as CPU ranks have them, and compares what it fills in with what a loader packs.
fn compare(mut rewrite: impl FnMut(&[u128], [RepackParams; 2], &mut [Panels; 2])) {
    let mut random = SmallRng::seed_from_u64(expertd_test_seed::seed());
    for (index, case) in cases().into_iter().enumerate() {
        let any = [random.random_range(1..450), random.random_range(1..300)];
        for sizes in [SIZES[index % SIZES.len()], any] {
            let experts = draw(&case, sizes);
            let expected = of_loader(&case, sizes, &experts);
            for level in SimdLevel::ALL {
                let (source, params) = of_cpu(&case, sizes, &experts, level);
                let mut found = panels(&case, sizes);
                rewrite(&source, params, &mut found);
                for (name, expected, found) in
                    [("gate and up", &expected[0], &found[0]), ("down", &expected[1], &found[1])]
                {
                    let what = format!("{case:?}, {level}, {sizes:?}, {name}: the first that differs");
                    let bytes = |panels: &Panels| {
                        let mut elements = panels.elements.clone();
                        if case.device == DeviceFormat::Bf16 {
                            // The bits of a NaN depend on the processor that multiplies it.
                            let elements: &mut [u16] = bytemuck::cast_slice_mut(&mut elements);
                            elements
                                .iter_mut()
                                .filter(|bits| **bits & 0x7fff > 0x7f80)
                                .for_each(|bits| *bits = 0x7fc0);
                        }
                        bytemuck::cast_slice::<u128, u8>(&elements).to_vec()
                    };
                    let (of_loader, of_copy) = (bytes(expected), bytes(found));
                    assert_eq!(of_loader.iter().zip(&of_copy).position(|(a, b)| a != b), None, "{what}");
                    let scales = expected.row_scales.iter().zip(&found.row_scales);
                    let differs = scales.enumerate().find(|(_, (a, b))| a != b);
                    assert_eq!(differs, None, "{what}");
                }
            }
        }
    }
}

#[test]
fn the_host_rewrites_panels_of_cpu_ranks_to_those_of_the_loader() {
    compare(|source, params, found| {
        for (params, found) in params.into_iter().zip(found) {
            let source = source.as_ptr() as u64;
            let params = RepackParams {
                source: source + params.source,
                scales: source + params.scales,
                panels: found.elements.as_mut_ptr() as u64,
                row_scales: found.row_scales.as_mut_ptr() as u64,
                panel_stride: found.bytes as u64,
                ..params
            };
            // SAFETY: source and destination are live buffers of the sizes that the parameters say.
            unsafe { repack_host(&params) }.unwrap();
        }
    });
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn panels_of_cpu_ranks_become_those_of_the_loader() {
    let device = crate::engine::open::open(0).unwrap();
    let stream = device.stream().unwrap();
    compare(|source, params, found| {
        let source = Buffer::from_slice(&device, bytemuck::cast_slice::<u128, u64>(source)).unwrap();
        for (params, found) in params.into_iter().zip(found) {
            // Panels begin at multiples of 1024.
            const WORDS: usize = 1024 / 8;
            let poison = vec![u64::MAX; found.elements.len() * 2 + WORDS];
            let panels = Buffer::from_slice(&device, &poison).unwrap();
            let row_scales = Buffer::from_slice(&device, &[&found.row_scales[..], &[0; 4]].concat()).unwrap();
            let skipped = panels.address().next_multiple_of(1024) - panels.address();
            let params = RepackParams {
                source: source.address() + params.source,
                scales: source.address() + params.scales,
                panels: panels.address() + skipped,
                row_scales: row_scales.address(),
                panel_stride: found.bytes as u64,
                ..params
            };
            device.synchronize().unwrap();
            // SAFETY: source and destination are live buffers of the sizes that the parameters say.
            unsafe { repack(&params, stream.raw()) }.unwrap();
            stream.synchronize().unwrap();
            let written = panels.read().unwrap();
            let words = &written[skipped as usize / 8..][..found.elements.len() * 2];
            bytemuck::cast_slice_mut::<u128, u64>(&mut found.elements).copy_from_slice(words);
            let count = found.row_scales.len();
            found.row_scales.copy_from_slice(&row_scales.read().unwrap()[..count]);
        }
    });
}

/// Whether the experts of a case come to the GPU.
fn is_rewritten(case: &Case, change: impl Fn(&mut [Drawn; 3])) -> [bool; 2] {
    let mut experts = draw(case, [192, 320]);
    change(&mut experts[0]);
    let packed = CpuExpert::pack_for(SimdLevel::ALL[0], &weights(&experts[0], case)).unwrap();
    packed.matrices().map(|matrix| rewriting(&matrix.form(), case.device).is_some())
}

#[test]
fn matrices_that_lack_what_the_format_needs_are_not_rewritten() {
    use DeviceFormat::{Bf16, Fp8, Int4, Mxfp8, W8a8};
    let fp8 = case(WeightFormat::Fp8E4m3, Fp8, [128, 128]);
    let nan = |expert: &mut [Drawn; 3]| expert[2].data[7] = 0x7f;
    assert_eq!(is_rewritten(&fp8, |_| ()), [true, true]);
    // CPU ranks hold a matrix with a NaN as f32, which only bf16 follows from.
    assert_eq!(is_rewritten(&fp8, nan), [true, false]);
    assert_eq!(is_rewritten(&Case { device: Bf16, ..fp8 }, nan), [true, true]);
    assert_eq!(is_rewritten(&case(WeightFormat::Mxfp8, Mxfp8, [1, 32]), nan), [true, false]);
    assert_eq!(is_rewritten(&case(WeightFormat::Fp8E4m3, W8a8, [128, 64]), |_| ()), [false, false]);
    let zeros = Case { zeros: true, ..case(WeightFormat::Int4, Int4, [1, 64]) };
    assert_eq!(is_rewritten(&zeros, |_| ()), [false, false]);
    assert_eq!(is_rewritten(&case(WeightFormat::Int4, Int4, [1, 16]), |_| ()), [false, false]);
    assert_eq!(is_rewritten(&case(WeightFormat::Mxfp4, W8a8, [1, 32]), |_| ()), [false, false]);
}
