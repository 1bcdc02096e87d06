//! A slow reference of the MoE block: every matrix is widened to f64, every sum is in f64, and FP8 rows are quantised by
//! their definition. It shares no code with the kernels, because the demo and the tests compare them with it.

use expertd_model::{
    Activation, Checkpoint, ExpertTensors, GroupScales, MatrixView, ModelError, ReadBuffer, ScaleFormat,
    Scales, WeightFormat, WeightOn,
};
use expertd_types::{ExpertId, Fp8Products, LayerId};

use super::ExpertKind;
use crate::linalg::Fp8Scales;

/// Element `(r, c)` of a matrix, scaled, by the definition of its format.
#[must_use]
pub fn element(view: &MatrixView<'_>, r: usize, c: usize) -> f64 {
    let at = view.packing.index(r, c, view.row_stride, view.col_stride);
    let raw = match view.format {
        WeightFormat::F32 => f64::from(f32::from_bits(u32::from_le_bytes(bytes(view, at)))),
        WeightFormat::F16 => f64::from(half::f16::from_le_bytes(bytes(view, at))),
        WeightFormat::Bf16 => f64::from(half::bf16::from_le_bytes(bytes(view, at))),
        WeightFormat::Fp8E4m3 | WeightFormat::Mxfp8 => fp8(view.data[at]),
        WeightFormat::Mxfp4 | WeightFormat::Nvfp4 => fp4(nibble(view.data, at)),
        WeightFormat::Int4 => f64::from(nibble(view.data, at)) - zero_point(view, r, c),
    };
    raw * match &view.scales {
        Scales::None => 1.0,
        Scales::Block { values, block_rows, block_cols } => {
            f64::from(values[r / block_rows * view.cols.div_ceil(*block_cols) + c / block_cols])
        }
        Scales::Mx { exponents, row_stride } => {
            f64::powi(2.0, i32::from(exponents[r * row_stride + c / 32]) - 127)
        }
        Scales::Groups(groups) => {
            let at = r * groups.row_stride + c / groups.cols * groups.group_stride;
            let scale = match groups.format {
                ScaleFormat::F32 => {
                    f64::from(f32::from_bits(u32::from_le_bytes(element_bytes(groups.data, at))))
                }
                ScaleFormat::F16 => f64::from(half::f16::from_le_bytes(element_bytes(groups.data, at))),
                ScaleFormat::Bf16 => f64::from(half::bf16::from_le_bytes(element_bytes(groups.data, at))),
                ScaleFormat::Fp8E4m3 => fp8(groups.data[at]),
            };
            scale * f64::from(groups.factor)
        }
    }
}

fn nibble(data: &[u8], at: usize) -> u8 {
    data[at / 2] >> (4 * (at % 2)) & 15
}

/// The zero point of INT4 element `(r, c)`: 8 if the matrix has none.
fn zero_point(view: &MatrixView<'_>, r: usize, c: usize) -> f64 {
    let Scales::Groups(GroupScales { cols, zeros: Some(zeros), .. }) = &view.scales else { return 8.0 };
    let at = zeros.packing.index(r, c / cols, zeros.row_stride, zeros.group_stride);
    if zeros.bias == 0 {
        return f64::from(nibble(zeros.data, at));
    }
    // The bias is added to all eight nibbles as one 32-bit sum; a carry out of the highest nibble is dropped.
    let ones = (0..8).map(|i| 1_u64 << (4 * i)).sum::<u64>();
    let word = (0..8).map(|i| u64::from(nibble(zeros.data, at / 8 * 8 + i)) << (4 * i)).sum::<u64>();
    ((word + ones * u64::from(zeros.bias)) >> (4 * (at % 8)) & 15) as f64
}

fn bytes<const N: usize>(view: &MatrixView<'_>, at: usize) -> [u8; N] {
    element_bytes(view.data, at)
}

fn element_bytes<const N: usize>(data: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| data[at * N + i])
}

fn fp8(bits: u8) -> f64 {
    let sign = if bits & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f64::from(bits & 7));
    match (exponent, bits & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * mantissa / 8.0 * f64::powi(2.0, -6),
        _ => sign * (1.0 + mantissa / 8.0) * f64::powi(2.0, exponent - 7),
    }
}

fn fp4(bits: u8) -> f64 {
    let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(bits & 7)];
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// A matrix widened to f64, row-major.
#[must_use]
pub fn dense(view: &MatrixView<'_>) -> Vec<f64> {
    (0..view.rows).flat_map(|r| (0..view.cols).map(move |c| element(view, r, c))).collect()
}

/// What quantisation to FP8 e4m3 leaves of a row, by the definition in docs/models.md ("FP8 products"): each value is rounded
/// to bf16, divided by the scale of its group of 128, rounded to the nearest code, and multiplied by the scale.
#[must_use]
pub fn quantised(row: &[f64], power_of_two_scales: bool) -> Vec<f64> {
    let rounded: Vec<f64> = row.iter().map(|x| half::bf16::from_f32(*x as f32).to_f64()).collect();
    let of_group = |group: &[f64]| {
        let scale = group_scale(group, power_of_two_scales);
        group.iter().map(|x| code(*x, scale) * f64::from(scale)).collect::<Vec<_>>()
    };
    rounded.chunks(128).flat_map(of_group).collect()
}

/// The scale of a group of bf16 values.
#[must_use]
pub fn group_scale(group: &[f64], power_of_two: bool) -> f32 {
    let largest = group.iter().fold(2f64.powi(-100), |most, x| if x.abs() > most { x.abs() } else { most });
    let scale = largest as f32 / 448.0;
    if power_of_two { f64::from(scale).log2().ceil().exp2() as f32 } else { scale }
}

/// The nearest e4m3 value to `x / scale`, ties to even, at most 448. The division is a multiplication by the f32 inverse.
#[must_use]
pub fn code(x: f64, scale: f32) -> f64 {
    let x = f64::from(x as f32 * (1.0 / scale));
    if x.is_nan() {
        return f64::NAN;
    }
    let magnitude = x.abs().min(448.0);
    // Codes below 2^-6 are subnormal and have its step.
    let exponent = magnitude.log2().floor().max(-6.0);
    let step = (exponent - 3.0).exp2();
    ((magnitude / step).round_ties_even() * step).copysign(x)
}

struct Mlp {
    gate: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
    gate_bias: Option<Vec<f32>>,
    up_bias: Option<Vec<f32>>,
    down_bias: Option<Vec<f32>>,
    kind: ExpertKind,
}

impl Mlp {
    fn new(tensors: &ExpertTensors<'_>, kind: ExpertKind) -> Self {
        Mlp {
            gate: dense(&tensors.gate),
            up: dense(&tensors.up),
            down: dense(&tensors.down),
            gate_bias: tensors.gate_bias.clone(),
            up_bias: tensors.up_bias.clone(),
            down_bias: tensors.down_bias.clone(),
            kind,
        }
    }

    /// `weight * down(activation(gate(x), up(x)))` of one row, or the same with the weight on its input.
    fn run(&self, x: &[f64], weight: f64) -> Vec<f64> {
        let (on_input, on_output) = match self.kind.weight_on {
            WeightOn::Input => (weight, 1.0),
            WeightOn::Output => (1.0, weight),
        };
        let x = self.rows(x.to_vec()).into_iter().map(|x| x * on_input).collect::<Vec<_>>();
        let gates = linear(&self.gate, self.gate_bias.as_deref(), &x, 1.0);
        let ups = linear(&self.up, self.up_bias.as_deref(), &x, 1.0);
        let h = gates.iter().zip(&ups).map(|(g, u)| activate(self.kind.activation, *g, *u) * on_output);
        linear(&self.down, self.down_bias.as_deref(), &self.rows(h.collect()), on_output)
    }

    /// A row as it enters the products: quantised to FP8 if the expert's kind says so.
    fn rows(&self, row: Vec<f64>) -> Vec<f64> {
        match self.kind.fp8_rows {
            Some(scales) => quantised(&row, scales == Fp8Scales::PowerOfTwo),
            None => row,
        }
    }
}

/// `weights * x + bias_weight * bias`.
fn linear(weights: &[f64], bias: Option<&[f32]>, x: &[f64], bias_weight: f64) -> Vec<f64> {
    let products =
        weights.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
    products.enumerate().map(|(i, y)| y + bias_weight * bias.map_or(0.0, |bias| f64::from(bias[i]))).collect()
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn activate(activation: Activation, gate: f64, up: f64) -> f64 {
    match activation {
        Activation::SwiGlu => gate * sigmoid(gate) * up,
        Activation::SwiGluClamped { limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate * sigmoid(gate) * up.clamp(-limit, limit)
        }
        Activation::SwiGluOai { alpha, limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate * sigmoid(gate * f64::from(alpha)) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

/// The block's output `[tokens, hidden]` for `rows [tokens, hidden]` and given routing (ids and weights, each `[tokens, k]`), shared
/// experts included.
///
/// # Errors
/// If the layer has no MoE block, or an id names no expert of it.
pub fn block(
    checkpoint: &Checkpoint,
    layer: LayerId,
    rows: &[f32],
    (ids, weights): (&[i32], &[f32]),
    fp8_products: Fp8Products,
) -> Result<Vec<f64>, ModelError> {
    let hidden = checkpoint.spec().hidden;
    let moe = checkpoint.spec().layer(layer)?;
    let k = ids.len() * hidden / rows.len().max(1);
    let mut experts: Vec<Option<Mlp>> = (0..moe.experts.count).map(|_| None).collect();
    let mut buffer = ReadBuffer::default();
    let shared = match (checkpoint.read_shared(layer, &mut buffer)?, &moe.shared) {
        (Some(tensors), Some(spec)) => {
            Some((Mlp::new(&tensors.mlp, ExpertKind::shared(spec, fp8_products)), tensors.gate))
        }
        _ => None,
    };
    let kind = ExpertKind::routed(&moe.experts, fp8_products);
    let mut output = vec![0.0; rows.len()];
    for (t, (row, out)) in rows.chunks_exact(hidden).zip(output.chunks_exact_mut(hidden)).enumerate() {
        let x: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        for (&id, &weight) in ids[t * k..][..k].iter().zip(&weights[t * k..][..k]) {
            let mlp = match &mut experts[id as usize] {
                Some(mlp) => mlp,
                empty => {
                    let id = ExpertId(id.cast_unsigned());
                    let tensors = checkpoint.read_expert(layer, id, &mut buffer)?;
                    empty.insert(Mlp::new(&tensors, kind))
                }
            };
            out.iter_mut().zip(mlp.run(&x, f64::from(weight))).for_each(|(out, y)| *out += y);
        }
        if let Some((mlp, gate)) = &shared {
            let factor = gate.as_ref().map_or(1.0, |gate| sigmoid(linear(&widen(gate), None, &x, 0.0)[0]));
            out.iter_mut().zip(mlp.run(&x, factor)).for_each(|(out, y)| *out += y);
        }
    }
    Ok(output)
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

/// The largest relative L2 error of any row; NaN if an element is NaN.
#[must_use]
pub fn worst_row(expected: &[f64], found: &[f32], hidden: usize) -> f64 {
    let rows = expected.chunks_exact(hidden).zip(found.chunks_exact(hidden));
    rows.map(|(expected, found)| {
        let error: f64 = expected.iter().zip(found).map(|(e, f)| (e - f64::from(*f)).powi(2)).sum();
        let norm: f64 = expected.iter().map(|e| e.powi(2)).sum();
        if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
    })
    .fold(0.0, |worst, error| if error.is_nan() || error > worst { error } else { worst })
}
