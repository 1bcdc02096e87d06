//! An MoE block computed the plain way: every matrix widened to f64, every sum in f64.

use expertd::linalg::{MatrixView, Scales, WeightFormat};
use expertd::model::{Checkpoint, ExpertTensors, MoeLayer};
use expertd::types::{ExpertId, LayerId};

/// The element `(r, c)` of a matrix with its scale, by the definitions of the formats.
pub fn element(view: &MatrixView<'_>, r: usize, c: usize) -> f64 {
    let at = r * view.row_stride + c * view.col_stride;
    let bytes = |size: usize| &view.data[at * size..(at + 1) * size];
    let raw = match view.format {
        WeightFormat::F32 => f64::from(f32::from_le_bytes(bytes(4).try_into().unwrap())),
        WeightFormat::F16 => f64::from(half::f16::from_le_bytes(bytes(2).try_into().unwrap())),
        WeightFormat::Bf16 => f64::from(half::bf16::from_le_bytes(bytes(2).try_into().unwrap())),
        WeightFormat::Fp8E4m3 => fp8(view.data[at]),
        WeightFormat::Mxfp4 => fp4(view.data[at / 2] >> (4 * (at % 2)) & 15),
    };
    raw * match &view.scales {
        Scales::None => 1.0,
        Scales::Block { values, block_rows, block_cols } => {
            f64::from(values[r / block_rows * view.cols.div_ceil(*block_cols) + c / block_cols])
        }
        Scales::Mx { exponents, row_stride } => {
            f64::powi(2.0, i32::from(exponents[r * row_stride + c / 32]) - 127)
        }
    }
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

/// A matrix as f64, row-major.
pub fn dense(view: &MatrixView<'_>) -> Vec<f64> {
    (0..view.rows)
        .flat_map(|r| (0..view.cols).map(move |c| (r, c)))
        .map(|(r, c)| element(view, r, c))
        .collect()
}

struct Mlp {
    gate: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
    biases: Option<[Vec<f32>; 3]>,
    width: usize,
    hidden: usize,
}

impl Mlp {
    fn new(tensors: &ExpertTensors<'_>) -> Self {
        let biases = (tensors.gate_bias.clone())
            .map(|gate| [gate, tensors.up_bias.clone().unwrap(), tensors.down_bias.clone().unwrap()]);
        Self {
            gate: dense(&tensors.gate),
            up: dense(&tensors.up),
            down: dense(&tensors.down),
            biases,
            width: tensors.gate.rows,
            hidden: tensors.gate.cols,
        }
    }

    /// `down(activation(gate(x), up(x)))` of one row.
    fn run(&self, x: &[f64], activation: expertd::linalg::Activation) -> Vec<f64> {
        let bias = |i: usize, j: usize| self.biases.as_ref().map_or(0.0, |b| f64::from(b[i][j]));
        let middle: Vec<f64> = (0..self.width)
            .map(|j| {
                let gate = dot(&self.gate[j * self.hidden..][..self.hidden], x) + bias(0, j);
                let up = dot(&self.up[j * self.hidden..][..self.hidden], x) + bias(1, j);
                activate(activation, gate, up)
            })
            .collect();
        (0..self.hidden)
            .map(|h| dot(&self.down[h * self.width..][..self.width], &middle) + bias(2, h))
            .collect()
    }
}

fn activate(activation: expertd::linalg::Activation, gate: f64, up: f64) -> f64 {
    use expertd::linalg::Activation::{SwiGlu, SwiGluClamped, SwiGluOai};
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match activation {
        SwiGlu => gate * sigmoid(gate) * up,
        SwiGluClamped { limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate * sigmoid(gate) * up.clamp(-limit, limit)
        }
        SwiGluOai { alpha, limit } => {
            let limit = f64::from(limit);
            let gate = gate.min(limit);
            gate * sigmoid(gate * f64::from(alpha)) * (up.clamp(-limit, limit) + 1.0)
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The block's output `[tokens, hidden]` for given routing `[tokens, k]`.
pub fn block(
    checkpoint: &Checkpoint,
    layer: LayerId,
    rows: &[f32],
    ids: &[i32],
    weights: &[f32],
) -> Vec<f64> {
    let spec = checkpoint.spec();
    let hidden = spec.hidden;
    let moe: &MoeLayer = spec.layer(layer).unwrap();
    let k = moe.gate.top_k;
    let mut experts: Vec<Option<Mlp>> = (0..moe.experts.count).map(|_| None).collect();
    let shared = checkpoint.shared(layer).unwrap().map(|shared| (Mlp::new(&shared.mlp), shared.gate));
    let mut output = vec![0.0; rows.len()];
    for (t, row) in rows.chunks_exact(hidden).enumerate() {
        let x: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let out = &mut output[t * hidden..][..hidden];
        for (id, weight) in ids[t * k..][..k].iter().zip(&weights[t * k..][..k]) {
            let id = usize::try_from(*id).unwrap();
            let mlp = experts[id].get_or_insert_with(|| {
                Mlp::new(&checkpoint.expert(layer, ExpertId(u32::try_from(id).unwrap())).unwrap())
            });
            let w = f64::from(*weight);
            if moe.experts.weight_on_input {
                let scaled: Vec<f64> = x.iter().map(|x| x * w).collect();
                let y = mlp.run(&scaled, moe.experts.activation);
                out.iter_mut().zip(y).for_each(|(out, y)| *out += y);
            } else {
                let y = mlp.run(&x, moe.experts.activation);
                out.iter_mut().zip(y).for_each(|(out, y)| *out += w * y);
            }
        }
        if let Some((mlp, gate)) = &shared {
            let factor = gate.as_ref().map_or(1.0, |gate| {
                let logit: f64 = gate.iter().zip(&x).map(|(g, x)| f64::from(*g) * x).sum();
                1.0 / (1.0 + (-logit).exp())
            });
            let y = mlp.run(&x, moe.shared.as_ref().unwrap().activation);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += factor * y);
        }
    }
    output
}

/// The largest relative L2 error of a row.
pub fn worst_row(expected: &[f32], found: &[f64], hidden: usize) -> f64 {
    let rows = expected.chunks_exact(hidden).zip(found.chunks_exact(hidden));
    rows.map(|(expected, found)| {
        let error: f64 = expected.iter().zip(found).map(|(e, f)| (f64::from(*e) - f).powi(2)).sum();
        let norm: f64 = expected.iter().map(|e| f64::from(*e).powi(2)).sum();
        if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
    })
    .fold(0.0, |a, b| if b.is_nan() || b > a { b } else { a })
}
