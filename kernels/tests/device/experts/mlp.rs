//! Random experts, and what they make of a row in f64.

use expertd_compute::experts::reference::quantised;
use expertd_kernels::experts;
use half::bf16;

use super::is_fp8;
use super::stored::{Stored, code_range, group_scales};
use crate::random::Random;

/// Of the activations that have them.
pub const ALPHA: f32 = 1.702;
/// Low, so that clamping happens.
pub const LIMIT: f32 = 1.5;

/// Error of a sum of FP8 products beside the sum of their sizes. The tensor cores align the products of 32 k to the largest and
/// keep 13 bits behind its leading one.
const SUM_ERROR: f64 = 1.0 / 2048.0;

/// One expert.
#[derive(Clone)]
pub struct Expert {
    pub gate: Stored,
    pub up: Stored,
    pub down: Stored,
    pub gate_bias: Vec<f32>,
    pub up_bias: Vec<f32>,
    pub down_bias: Vec<f32>,
}

impl Expert {
    /// [`Stored::rounded`] of all matrices.
    pub fn rounded(&self) -> Expert {
        let [gate, up, down] = [&self.gate, &self.up, &self.down].map(Stored::rounded);
        Expert { gate, up, down, ..self.clone() }
    }
}

#[derive(Clone, Copy)]
pub struct Case {
    pub format: i32,
    pub hidden: usize,
    pub inter: usize,
    pub activation: i32,
    pub biases: bool,
    pub weight_on_input: bool,
    /// W8A8: 128 neighbouring rows have the same multipliers.
    pub block_scales: bool,
}

impl Case {
    pub fn draw(&self, random: &mut Random) -> Expert {
        let (hidden, inter) = (self.hidden, self.inter);
        let (into, out) = (1.5 / (hidden as f32).sqrt(), 1.5 / (inter as f32).sqrt());
        let mut bias = |len: usize| -> Vec<f32> {
            (0..len).map(|_| if self.biases { random.unit() - 0.5 } else { 0.0 }).collect()
        };
        let (gate_bias, up_bias, down_bias) = (bias(inter), bias(inter), bias(hidden));
        Expert {
            gate: Stored::draw(random, self.format, [inter, hidden], into, self.scale_rows()),
            up: Stored::draw(random, self.format, [inter, hidden], into, self.scale_rows()),
            down: Stored::draw(random, self.format, [hidden, inter], out, self.scale_rows()),
            gate_bias,
            up_bias,
            down_bias,
        }
    }

    /// The outputs, and for each the sum of the sizes of its terms.
    pub fn reference(&self, expert: &Expert, x: &[f64], weight: f32) -> (Vec<f64>, Vec<f64>) {
        let (_, on_output) = self.weights(weight);
        let fp8 = is_fp8(self.format);
        let rows = if fp8 { quantised(x, false) } else { x.to_vec() };
        let h: Vec<f64> = (0..self.inter).map(|f| self.feature(expert, f, &rows, weight).0).collect();
        let h: Vec<f64> = if fp8 {
            let weighted: Vec<f64> = h.iter().map(|h| h * on_output).collect();
            quantised(&weighted, false).iter().map(|h| h / on_output).collect()
        } else {
            // Kernels hold h in bf16, with the routing weight. Where the terms of an output cancel each other, as they may in all rows of
            // down that have the same codes, or the same zero points, this rounding alone can exceed the tolerance.
            h.iter().map(|h| bf16::from_f32((h * on_output) as f32).to_f64() / on_output).collect()
        };
        let bias = |f: usize| f64::from(expert.down_bias[f]);
        let y = (0..self.hidden).map(|f| (expert.down.dot(f, &h) + bias(f)) * on_output);
        let sizes = (0..self.hidden).map(|f| {
            let terms = h.iter().enumerate().map(|(col, h)| (expert.down.value(f, col) * h).abs());
            (terms.sum::<f64>() + bias(f).abs()) * on_output.abs()
        });
        (y.collect(), sizes.collect())
    }

    /// What rounding of sums leaves open about h. FP8 products only.
    pub fn range<'a>(&self, expert: &'a Expert, x: &[f64], weight: f32) -> Range<'a> {
        let (_, on_output) = self.weights(weight);
        let rows = quantised(x, false);
        let h: Vec<(f64, f64)> = (0..self.inter).map(|f| self.feature(expert, f, &rows, weight)).collect();
        let rounded = |by: f64| -> Vec<f64> {
            h.iter()
                .map(|(h, error)| {
                    let magnitude = (h.abs() + by * error).max(0.0) * on_output.abs();
                    bf16::from_f32(magnitude.copysign(h * on_output) as f32).to_f64()
                })
                .collect()
        };
        let bias = expert.down_bias.iter().map(|bias| f64::from(*bias) * on_output).collect();
        Range { expert, bias, least: rounded(-1.0), nominal: rounded(0.0), most: rounded(1.0) }
    }

    fn scale_rows(&self) -> usize {
        if self.block_scales { 128 } else { 1 }
    }

    /// What the routing weight multiplies: the inputs of gate and up, and h.
    fn weights(&self, weight: f32) -> (f64, f64) {
        let weight = f64::from(weight);
        if self.weight_on_input { (weight, 1.0) } else { (1.0, weight) }
    }

    /// Feature `f` of h before the weight on it, and how far the kernel's may be from it before it is rounded.
    fn feature(&self, expert: &Expert, f: usize, x: &[f64], weight: f32) -> (f64, f64) {
        let (on_input, _) = self.weights(weight);
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
        let activated = g / (1.0 + (-alpha * g).exp());
        let size = |matrix: &Stored| -> f64 {
            x.iter().enumerate().map(|(col, x)| (matrix.value(f, col) * x).abs()).sum::<f64>()
                * on_input.abs()
        };
        // The derivative of the activation is at most 1.1.
        let error = 1.1 * (u + offset).abs() * size(&expert.gate) + activated.abs() * size(&expert.up);
        (activated * (u + offset), error * SUM_ERROR)
    }
}

/// The values of h, times the routing weight, before they are quantised: the nearest to zero that sums may give, those of the
/// reference, and the farthest.
pub struct Range<'a> {
    expert: &'a Expert,
    bias: Vec<f64>,
    least: Vec<f64>,
    nominal: Vec<f64>,
    most: Vec<f64>,
}

impl Range<'_> {
    /// What the outputs change by where an element of h gets the neighbouring code instead of the reference's: one vector
    /// for each element whose code the rounding of sums before it decides.
    pub fn undecided(&self) -> Vec<Vec<f64>> {
        let [small, nominal, large] =
            [&self.least, &self.nominal, &self.most].map(|values| group_scales(values));
        self.outputs(&small, &nominal, &large).1
    }

    /// The scales that the groups of h may have: the largest magnitude of a group may be any bf16 between its least and its
    /// most, of which eight are tried.
    pub fn scales(&self) -> Vec<Vec<f32>> {
        let largest = |group: &[f64]| {
            bf16::from_f32(group.iter().fold(0.0, |most: f64, h| most.max(h.abs())) as f32).to_bits()
        };
        let groups =
            self.least.chunks(experts::SCALE_ELEMENTS).zip(self.most.chunks(experts::SCALE_ELEMENTS));
        groups.fold(vec![Vec::new()], |all: Vec<Vec<f32>>, (least, most)| {
            let bits = (largest(least)..=largest(most)).take(8);
            let own: Vec<f32> = bits.map(|bits| group_scales(&[bf16::from_bits(bits).to_f64()])[0]).collect();
            all.iter()
                .flat_map(|front| own.iter().map(move |scale| [&front[..], &[*scale]].concat()))
                .collect()
        })
    }

    /// The outputs with these scales of the groups, and their changes by elements whose code is undecided.
    pub fn with_scales(&self, scales: &[f32]) -> (Vec<f64>, Vec<Vec<f64>>) {
        self.outputs(scales, scales, scales)
    }

    fn outputs(&self, small: &[f32], nominal: &[f32], large: &[f32]) -> (Vec<f64>, Vec<Vec<f64>>) {
        let (mut y, mut changes) = (self.bias.clone(), Vec::new());
        for (f, h) in self.nominal.iter().enumerate() {
            let [small, scale, large] =
                [small, nominal, large].map(|scales| scales[f / experts::SCALE_ELEMENTS]);
            let column = (0..y.len()).map(|row| self.expert.down.value(row, f) * f64::from(scale));
            let column: Vec<f64> = column.collect();
            let code = code_range(*h, *h, scale, scale).0;
            y.iter_mut().zip(&column).for_each(|(y, weight)| *y += weight * code);
            let (low, high) = code_range(self.least[f], self.most[f], small, large);
            for other in [low, high] {
                if other != code {
                    changes.push(column.iter().map(|weight| weight * (other - code)).collect());
                }
            }
        }
        (y, changes)
    }
}
