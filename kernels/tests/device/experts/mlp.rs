//! Random experts, and what they make of a row in f64.

use expertd_kernels::experts;

use super::stored::{Stored, quantised};
use crate::random::Random;

/// Of the activations that have them.
pub const ALPHA: f32 = 1.702;
/// Low, so that clamping happens.
pub const LIMIT: f32 = 1.5;

/// One expert.
pub struct Expert {
    pub gate: Stored,
    pub up: Stored,
    pub down: Stored,
    pub gate_bias: Vec<f32>,
    pub up_bias: Vec<f32>,
    pub down_bias: Vec<f32>,
}

#[derive(Clone, Copy)]
pub struct Case {
    pub format: i32,
    pub hidden: usize,
    pub inter: usize,
    pub activation: i32,
    pub biases: bool,
    pub weight_on_input: bool,
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
            gate: Stored::draw(random, self.format, [inter, hidden], into),
            up: Stored::draw(random, self.format, [inter, hidden], into),
            down: Stored::draw(random, self.format, [hidden, inter], out),
            gate_bias,
            up_bias,
            down_bias,
        }
    }

    /// The outputs, and for each the sum of the sizes of its terms.
    pub fn reference(&self, expert: &Expert, x: &[f64], weight: f32) -> (Vec<f64>, Vec<f64>) {
        let weight = f64::from(weight);
        let (on_input, on_output) = if self.weight_on_input { (weight, 1.0) } else { (1.0, weight) };
        let fp8 = self.format == experts::W8A8;
        let rows = if fp8 { quantised(x) } else { x.to_vec() };
        let x = &rows[..];
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
        // The kernel quantises the weighted h, rounded to bf16.
        let narrow = |h: &f64| half::bf16::from_f64(h * on_output).to_f64();
        let h = if fp8 {
            quantised(&h.iter().map(narrow).collect::<Vec<_>>()).iter().map(|h| h / on_output).collect()
        } else {
            h
        };
        let bias = |f: usize| f64::from(expert.down_bias[f]);
        let y = (0..self.hidden).map(|f| (expert.down.dot(f, &h) + bias(f)) * on_output);
        let sizes = (0..self.hidden).map(|f| {
            let terms = h.iter().enumerate().map(|(col, h)| (expert.down.value(f, col) * h).abs());
            (terms.sum::<f64>() + bias(f).abs()) * on_output.abs()
        });
        (y.collect(), sizes.collect())
    }
}
