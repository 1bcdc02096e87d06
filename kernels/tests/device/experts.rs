//! The expert kernel in every weight format against a plain MLP in f64 on the host, which reads the checkpoint's bytes by
//! the formats' definitions.

use expertd_kernels::device::{Buffer, Device};
use expertd_kernels::experts::{
    self, ExpertsParams, LayerWeights, PACK_DOWN, PACK_GATE_UP, PackNarrowParams, PackParams,
};
use half::bf16;

use crate::random::Random;
use crate::{Options, Outcome};

/// Largest relative L2 error of a row.
const TOLERANCE: f64 = 1e-2;
const ALPHA: f32 = 1.702;
const LIMIT: f32 = 1.5;

/// One matrix as a checkpoint stores it, `[rows, k]`.
struct Stored {
    k: usize,
    /// bf16 bits, FP8 bytes or FP4 nibbles.
    codes: Vec<u8>,
    /// FP8: `[rows, ceil(k / 128)]`.
    multipliers: Vec<f32>,
    /// MXFP4: `[rows, k / 32]`.
    exponents: Vec<u8>,
    row_scales: Vec<f32>,
    format: i32,
}

fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7) / 8.0);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2f64.powi(-6),
        _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

fn e2m1(code: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

impl Stored {
    /// Any codes but NaN, with values of about `size`.
    fn draw(random: &mut Random, format: i32, [rows, k]: [usize; 2], size: f32) -> Stored {
        let mut stored = Stored {
            k,
            codes: Vec::new(),
            multipliers: Vec::new(),
            exponents: Vec::new(),
            row_scales: vec![1.0; rows],
            format,
        };
        match format {
            experts::BF16 => {
                let values = (0..rows * k).map(|_| bf16::from_f32((random.unit() * 3.4 - 1.7) * size));
                stored.codes = values.flat_map(|v| v.to_bits().to_le_bytes()).collect();
            }
            experts::FP8 => {
                // Every code in turn, from a random start of each row: none that is a number is left out.
                for _ in 0..rows {
                    let start = random.below(256);
                    let codes = (0..k as u64).map(|c| ((start + c * 37) & 255) as u8);
                    stored.codes.extend(codes.map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c }));
                }
                let count = rows * k.div_ceil(128);
                stored.multipliers = (0..count).map(|_| size / 112.0 * (0.5 + random.unit())).collect();
            }
            _ => {
                stored.codes = (0..rows * k / 2).map(|_| random.below(256) as u8).collect();
                let largest = 128 + (size / 2.9).log2().floor() as i32;
                let exponents = (0..rows * k / 32).map(|_| (largest - random.below(4) as i32) as u8);
                stored.exponents = exponents.collect();
            }
        }
        if format != experts::BF16 {
            stored.row_scales = (0..rows).map(|_| 0.5 + random.unit()).collect();
        }
        stored
    }

    fn value(&self, row: usize, col: usize) -> f64 {
        let at = row * self.k + col;
        let unscaled = match self.format {
            experts::BF16 => {
                return bf16::from_le_bytes([self.codes[at * 2], self.codes[at * 2 + 1]]).to_f64();
            }
            experts::FP8 => {
                e4m3(self.codes[at]) * f64::from(self.multipliers[row * self.k.div_ceil(128) + col / 128])
            }
            _ => {
                let exponent = self.exponents[row * (self.k / 32) + col / 32];
                let scale = if exponent == 255 { f64::NAN } else { 2f64.powi(i32::from(exponent) - 127) };
                e2m1(self.codes[at / 2] >> (at % 2 * 4) & 15) * scale
            }
        };
        unscaled * f64::from(self.row_scales[row])
    }

    fn dot(&self, row: usize, x: &[f64]) -> f64 {
        x.iter().enumerate().map(|(col, x)| self.value(row, col) * x).sum()
    }

    fn scale_bytes(&self) -> Vec<u8> {
        if self.format == experts::FP8 {
            self.multipliers.iter().flat_map(|v| v.to_le_bytes()).collect()
        } else {
            self.exponents.clone()
        }
    }
}

/// One expert.
struct Expert {
    gate: Stored,
    up: Stored,
    down: Stored,
    gate_bias: Vec<f32>,
    up_bias: Vec<f32>,
    down_bias: Vec<f32>,
}

#[derive(Clone, Copy)]
struct Case {
    format: i32,
    hidden: usize,
    inter: usize,
    activation: i32,
    biases: bool,
    weight_on_input: bool,
}

impl Case {
    fn draw(&self, random: &mut Random) -> Expert {
        let (hidden, inter) = (self.hidden, self.inter);
        let (into, out) = (1.5 / (hidden as f32).sqrt(), 1.5 / (inter as f32).sqrt());
        let mut bias = |len: usize| -> Vec<f32> {
            (0..len).map(|_| if self.biases { random.unit() - 0.5 } else { 0.0 }).collect()
        };
        let (gate_bias, up_bias, down_bias) = (bias(inter), bias(inter), bias(hidden));
        Expert {
            gate: Stored::draw(random, self.format, [inter, hidden], into),
            up: Stored::draw(random, self.format, [inter, hidden], into),
            down: Stored::draw(random, self.format, [hidden, inter], out),
            gate_bias,
            up_bias,
            down_bias,
        }
    }

    /// The outputs, and for each the sum of the sizes of its terms.
    fn reference(&self, expert: &Expert, x: &[f64], weight: f32) -> (Vec<f64>, Vec<f64>) {
        let weight = f64::from(weight);
        let (on_input, on_output) = if self.weight_on_input { (weight, 1.0) } else { (1.0, weight) };
        let h: Vec<f64> = (0..self.inter)
            .map(|f| {
                let mut g = expert.gate.dot(f, x) * on_input + f64::from(expert.gate_bias[f]);
                let mut u = expert.up.dot(f, x) * on_input + f64::from(expert.up_bias[f]);
                let limit = f64::from(LIMIT);
                // Comparisons that keep what is not a number.
                let clamp = |v: f64, low: f64| {
                    if v > limit {
                        limit
                    } else if v < low {
                        low
                    } else {
                        v
                    }
                };
                if self.activation != experts::SWIGLU {
                    (g, u) = (clamp(g, f64::NEG_INFINITY), clamp(u, -limit));
                }
                let alpha = if self.activation == experts::SWIGLU_OAI { f64::from(ALPHA) } else { 1.0 };
                let offset = if self.activation == experts::SWIGLU_OAI { 1.0 } else { 0.0 };
                g / (1.0 + (-alpha * g).exp()) * (u + offset)
            })
            .collect();
        let bias = |f: usize| f64::from(expert.down_bias[f]);
        let y = (0..self.hidden).map(|f| (expert.down.dot(f, &h) + bias(f)) * on_output);
        let sizes = (0..self.hidden).map(|f| {
            let terms = h.iter().enumerate().map(|(col, h)| (expert.down.value(f, col) * h).abs());
            (terms.sum::<f64>() + bias(f).abs()) * on_output.abs()
        });
        (y.collect(), sizes.collect())
    }
}

/// Experts in device memory.
struct Loaded {
    weights: LayerWeights,
    #[expect(dead_code, reason = "held for the addresses in `weights`")]
    held: (Vec<Buffer<u8>>, Vec<Buffer<f32>>),
}

/// Bytes on the device, aligned as panels have to be.
fn room(device: &Device, bytes: u64) -> Result<(Buffer<u8>, u64), Box<dyn std::error::Error>> {
    let buffer = Buffer::<u8>::zeroed(device, bytes as usize + 1024)?;
    buffer.fill_bytes(0xff)?;
    let address = buffer.address().next_multiple_of(1024);
    Ok((buffer, address))
}

fn load(device: &Device, case: &Case, all: &[Expert]) -> Result<Loaded, Box<dyn std::error::Error>> {
    let (hidden, inter) = (case.hidden, case.inter);
    let bytes = [PACK_GATE_UP, PACK_DOWN].map(|kind| experts::matrix_bytes(case.format, kind, hidden, inter));
    let (gate_up_held, gate_up) = room(device, bytes[0] * all.len() as u64)?;
    let (down_held, down) = room(device, bytes[1] * all.len() as u64)?;
    let floats = |of: &dyn Fn(&Expert) -> Vec<f32>| -> Vec<f32> { all.iter().flat_map(of).collect() };
    let gate_up_bias =
        Buffer::from_slice(device, &floats(&|e| [e.gate_bias.clone(), e.up_bias.clone()].concat()))?;
    let down_bias = Buffer::from_slice(device, &floats(&|e| e.down_bias.clone()))?;
    let gate_up_scale = Buffer::<f32>::zeroed(device, all.len() * 2 * inter)?;
    let down_scale = Buffer::<f32>::zeroed(device, all.len() * hidden)?;
    let stream = device.stream()?;
    for (i, expert) in all.iter().enumerate() {
        let send = |stored: &Stored| Buffer::from_slice(device, &stored.codes);
        let (g, u, d) = (send(&expert.gate)?, send(&expert.up)?, send(&expert.down)?);
        let i = i as u64;
        if case.format == experts::BF16 {
            let matrix = (hidden * inter) as u64;
            let pack = PackParams {
                first: g.address(),
                second: u.address(),
                panels: gate_up + i * bytes[0],
                expert_stride: matrix,
                experts: 1,
                hidden: hidden as i32,
                inter: inter as i32,
                kind: PACK_GATE_UP,
            };
            let last = PackParams {
                first: d.address(),
                second: 0,
                panels: down + i * bytes[1],
                kind: PACK_DOWN,
                ..pack
            };
            // SAFETY: buffers of those sizes, alive until the stream is drained below.
            unsafe {
                experts::pack(&pack, stream.raw())?;
                experts::pack(&last, stream.raw())?;
            }
            stream.synchronize()?;
            continue;
        }
        let send = |stored: &Stored| Buffer::from_slice(device, &stored.scale_bytes());
        let (g_scales, u_scales, d_scales) = (send(&expert.gate)?, send(&expert.up)?, send(&expert.down)?);
        let inputs = [expert.gate.row_scales.clone(), expert.up.row_scales.clone()].concat();
        let (inputs, outputs) =
            (Buffer::from_slice(device, &inputs)?, Buffer::from_slice(device, &expert.down.row_scales)?);
        let pack = PackNarrowParams {
            first: g.address(),
            second: u.address(),
            first_scales: g_scales.address(),
            second_scales: u_scales.address(),
            row_scales_in: inputs.address(),
            row_scales: gate_up_scale.address() + i * 2 * inter as u64 * 4,
            units: gate_up + i * bytes[0],
            hidden: hidden as i32,
            inter: inter as i32,
            kind: PACK_GATE_UP,
            format: case.format,
        };
        let last = PackNarrowParams {
            first: d.address(),
            second: 0,
            first_scales: d_scales.address(),
            second_scales: 0,
            row_scales_in: outputs.address(),
            row_scales: down_scale.address() + i * hidden as u64 * 4,
            units: down + i * bytes[1],
            kind: PACK_DOWN,
            ..pack
        };
        // SAFETY: as above.
        unsafe {
            experts::pack_narrow(&pack, stream.raw())?;
            experts::pack_narrow(&last, stream.raw())?;
        }
        stream.synchronize()?;
    }
    let weights = LayerWeights {
        gate_up,
        down,
        gate_up_bias: if case.biases { gate_up_bias.address() } else { 0 },
        down_bias: if case.biases { down_bias.address() } else { 0 },
        gate_up_scale: gate_up_scale.address(),
        down_scale: down_scale.address(),
    };
    let held = (vec![gate_up_held, down_held], vec![gate_up_bias, down_bias, gate_up_scale, down_scale]);
    Ok(Loaded { weights, held })
}

/// Routing and rows of a launch, and what comes of it.
struct Step {
    counts: Vec<usize>,
    /// Rows of x.
    index: Vec<i32>,
    weights: Vec<f32>,
    x: Vec<bf16>,
}

impl Step {
    fn draw(random: &mut Random, hidden: usize, counts: &[usize]) -> Step {
        let total: usize = counts.iter().sum();
        let rows = total.max(3);
        Step {
            counts: counts.to_vec(),
            index: (0..total).map(|_| random.below(rows as u64) as i32).collect(),
            weights: (0..total).map(|_| 0.05 + random.unit()).collect(),
            x: (0..rows * hidden).map(|_| bf16::from_f32(random.unit() * 3.4 - 1.7)).collect(),
        }
    }

    fn row(&self, assignment: usize, hidden: usize) -> Vec<f64> {
        let at = self.index[assignment] as usize * hidden;
        self.x[at..at + hidden].iter().map(|v| v.to_f64()).collect()
    }

    /// One bf16 row per assignment; checks that nothing else is written and that counters are left clean.
    fn run(
        &self,
        device: &Device,
        case: &Case,
        loaded: &Loaded,
        [tile_rows, tile_tokens]: [i32; 2],
    ) -> Result<Vec<bf16>, Box<dyn std::error::Error>> {
        const BEHIND: usize = 64;
        let (hidden, inter) = (case.hidden, case.inter);
        let (total, count) = (self.index.len(), self.counts.len());
        let mut offsets = vec![0_i32];
        for c in &self.counts {
            offsets.push(offsets.last().unwrap_or(&0) + *c as i32);
        }
        let panel_rows = total + 7 * count + 8;
        let bits: Vec<u16> = self.x.iter().map(|v| v.to_bits()).collect();
        let (x, offsets) = (Buffer::from_slice(device, &bits)?, Buffer::from_slice(device, &offsets)?);
        let index = Buffer::from_slice(device, &[&self.index[..], &[0]].concat())?;
        let weights = Buffer::from_slice(device, &[&self.weights[..], &[0.0]].concat())?;
        let layers = Buffer::from_slice(device, &[LayerWeights::default(), loaded.weights])?;
        let layer = Buffer::from_slice(device, &[1_u32])?;
        let state = Buffer::<u32>::zeroed(device, experts::state_words(count))?;
        let y = Buffer::<u16>::zeroed(device, total * hidden + BEHIND)?;
        y.fill_bytes(0xff)?;
        let (_x_held, x_panels) = room(device, (panel_rows * hidden * 2) as u64)?;
        let (_h_held, h) = room(device, (panel_rows * inter * 2) as u64)?;
        let params = ExpertsParams {
            layers: layers.address(),
            layer: layer.address(),
            expert_offsets: offsets.address(),
            row_index: index.address(),
            row_weight: weights.address(),
            x: x.address(),
            y: y.address(),
            x_panels,
            h,
            state: state.address(),
            x_stride: hidden as u64,
            panel_rows: panel_rows as i32,
            experts: count as i32,
            hidden: hidden as i32,
            inter: inter as i32,
            activation: case.activation,
            alpha: ALPHA,
            limit: LIMIT,
            weight_on_input: i32::from(case.weight_on_input),
            tile_rows,
            tile_tokens,
            format: case.format,
            ..ExpertsParams::default()
        };
        let stream = device.stream()?;
        // SAFETY: buffers of those sizes, alive until the stream is drained.
        unsafe { experts::experts(&params, stream.raw())? };
        stream.synchronize()?;
        if state.read()?.iter().any(|word| *word != 0) {
            return Err("counters are left dirty".into());
        }
        let mut y = y.read()?;
        if y[total * hidden..].iter().any(|bits| *bits != 0xffff) {
            return Err("written behind the last row".into());
        }
        y.truncate(total * hidden);
        Ok(y.into_iter().map(bf16::from_bits).collect())
    }
}

/// Compares all rows; returns the largest relative error.
fn compare(case: &Case, all: &[Expert], step: &Step, y: &[bf16]) -> Result<f64, String> {
    let (mut worst, mut assignment) = (0.0_f64, 0);
    for (expert, count) in step.counts.iter().enumerate() {
        for _ in 0..*count {
            let x = step.row(assignment, case.hidden);
            let (expected, _) = case.reference(&all[expert], &x, step.weights[assignment]);
            let got = &y[assignment * case.hidden..][..case.hidden];
            let (mut error, mut norm) = (0.0, 0.0);
            for (feature, (want, got)) in expected.iter().zip(got).enumerate() {
                if want.is_nan() != got.is_nan() {
                    return Err(format!("assignment {assignment} feature {feature}: {got} for {want}"));
                }
                if !want.is_nan() {
                    error += (want - got.to_f64()).powi(2);
                    norm += want.powi(2);
                }
            }
            let relative = if norm == 0.0 { error } else { (error / norm).sqrt() };
            if relative > TOLERANCE {
                return Err(format!(
                    "assignment {assignment} of expert {expert}: relative error {relative:.2e}"
                ));
            }
            worst = worst.max(relative);
            assignment += 1;
        }
    }
    Ok(worst)
}

/// Random weights, ragged counts, every tile shape.
fn ragged(device: &Device, random: &mut Random, case: &Case) -> Outcome {
    let all: Vec<Expert> = (0..4).map(|_| case.draw(random)).collect();
    let loaded = load(device, case, &all)?;
    let mut worst = 0.0_f64;
    for counts in [[0, 0, 0, 0], [1, 0, 0, 0], [3, 0, 41, 9], [0, 0, 0, 150], [8, 17, 64, 33]] {
        let step = Step::draw(random, case.hidden, &counts);
        for tiles in [[0, 0], [16, 32], [64, 64], [128, 128], [256, 128]] {
            let y = step.run(device, case, &loaded, tiles)?;
            let found = compare(case, &all, &step, &y)
                .map_err(|e| format!("counts {counts:?} tiles {tiles:?}: {e}"))?;
            worst = worst.max(found);
            if step.run(device, case, &loaded, tiles)? != y && !y.iter().any(|v| v.is_nan()) {
                return Err(format!("counts {counts:?} tiles {tiles:?}: two runs differ").into());
            }
        }
    }
    println!(
        "experts format {} hidden {} inter {} activation {}: largest error {worst:.1e}",
        case.format, case.hidden, case.inter, case.activation
    );
    Ok(())
}

/// Codes and scales that are not numbers, zeros, extreme scales.
fn specials(device: &Device, random: &mut Random, case: &Case) -> Outcome {
    let mut all: Vec<Expert> = (0..4).map(|_| case.draw(random)).collect();
    let [first, second, third, fourth] = &mut all[..] else { unreachable!("four were made") };
    if case.format == experts::FP8 {
        let k = first.down.k;
        first.down.codes[5 * k + 3] = 0x7f;
        first.down.codes[17 * k + k - 1] = 0xff;
        second.down.codes.fill(0x80); // -0 everywhere
        second.down.codes[..k].fill(0x01); // a row of the smallest subnormal
        third.down.multipliers[0] = 1e20;
        third.down.multipliers[1] = 1e-30;
        third.gate.row_scales[7] = 0.0;
        fourth.up.codes[3 * fourth.up.k] = 0xff; // reaches every output
    } else {
        let k = first.down.k;
        first.down.exponents[5 * (k / 32)] = 255;
        first.down.exponents[17 * (k / 32) + k / 32 - 1] = 255;
        second.down.codes.fill(0x88); // -0 everywhere
        second.down.codes[..k / 2].fill(0x11); // a row of 0.5
        // Scales beyond what the multiplier carries, beside small ones; and a row of tiny ones.
        third.down.exponents[..k / 32].fill(200);
        third.down.exponents[1] = 190;
        third.down.exponents[k / 32..2 * (k / 32)].fill(40);
        third.down.exponents[2 * (k / 32)] = 0;
        third.gate.exponents[0] = 0;
        fourth.gate.exponents[3] = 255; // reaches every output
    }
    let loaded = load(device, case, &all)?;
    let step = Step::draw(random, case.hidden, &[9, 20, 70, 5]);
    let y = step.run(device, case, &loaded, [0, 0])?;
    // Features differ in size by dozens of powers of two here: each is compared on its own. Rounding h and y to bf16 moves
    // an output by less than 2^-7 of its terms.
    let mut assignment = 0;
    for (expert, count) in step.counts.iter().enumerate() {
        for _ in 0..*count {
            let x = step.row(assignment, case.hidden);
            let (expected, sizes) = case.reference(&all[expert], &x, step.weights[assignment]);
            for (feature, (want, size)) in expected.iter().zip(sizes).enumerate() {
                let got = y[assignment * case.hidden + feature].to_f64();
                let good =
                    if want.is_nan() { got.is_nan() } else { (got - want).abs() <= size * 2f64.powi(-7) };
                if !good {
                    return Err(format!(
                        "specials, format {}: expert {expert} feature {feature}: {got} for {want}",
                        case.format
                    )
                    .into());
                }
            }
            assignment += 1;
        }
    }
    println!(
        "experts format {}: codes and scales that are not numbers, zeros, extreme scales: good",
        case.format
    );
    Ok(())
}

pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    experts::setup()?;
    let mut random = Random(options.number("seed", 31));
    let plain = Case {
        format: experts::BF16,
        hidden: 128,
        inter: 64,
        activation: experts::SWIGLU,
        biases: false,
        weight_on_input: false,
    };
    for format in [experts::BF16, experts::FP8, experts::MXFP4] {
        ragged(&device, &mut random, &Case { format, ..plain })?;
        // An odd number of panels in both, more rows than a tile, biases.
        let other =
            Case { hidden: 192, inter: 320, activation: experts::SWIGLU_OAI, biases: true, format, ..plain };
        ragged(&device, &mut random, &other)?;
        let clamped = Case {
            hidden: 256,
            inter: 192,
            activation: experts::SWIGLU_CLAMPED,
            weight_on_input: true,
            format,
            ..plain
        };
        ragged(&device, &mut random, &clamped)?;
    }
    for format in [experts::FP8, experts::MXFP4] {
        specials(&device, &mut random, &Case { format, hidden: 128, inter: 256, ..plain })?;
    }
    Ok(())
}
