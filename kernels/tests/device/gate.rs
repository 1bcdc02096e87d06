//! Compares the gate with f64 code on the host.

use expertd_kernels::device::{Buffer, Device};
use expertd_kernels::launch;
use expertd_kernels::params::{GateLayer, GateParams, SlotState};
use half::bf16;

use crate::random::{Random, rows};
use crate::{Options, Outcome};

/// Codes of element types (`step.h`).
const BF16: u32 = 1;
const F32: u32 = 3;

fn routed(p: &GateParams, logits: &[f64], correction: Option<&[f32]>) -> (Vec<f64>, Vec<f64>) {
    let exp_all = |values: &[f64]| {
        let top = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = values.iter().map(|v| (v - top).exp()).sum();
        values.iter().map(|v| (v - top).exp() / sum).collect::<Vec<f64>>()
    };
    let mut scores: Vec<f64> = match p.score_fn {
        0 => exp_all(logits),
        2 => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
        3 => logits.iter().map(|x| x.exp().ln_1p().sqrt()).collect(),
        _ => logits.to_vec(),
    };
    let mut values = scores.clone();
    if let Some(bias) = correction {
        values.iter_mut().zip(bias).for_each(|(v, b)| *v += f64::from(*b));
    }
    if p.group_score != 0 {
        let size = logits.len() / p.groups as usize;
        let mut rated: Vec<(f64, usize)> = values
            .chunks(size)
            .enumerate()
            .map(|(g, chunk)| {
                let mut sorted = chunk.to_vec();
                sorted.sort_by(|a, b| b.total_cmp(a));
                (if p.group_score == 1 { sorted[0] } else { sorted[0] + sorted[1] }, g)
            })
            .collect();
        rated.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        for &(_, g) in &rated[p.groups_kept as usize..] {
            values[g * size..(g + 1) * size].fill(if p.group_score == 1 { 0.0 } else { f64::NEG_INFINITY });
            if p.group_score == 1 {
                // An excluded expert counts as 0, so it may still be chosen if the remaining values are negative.
                scores[g * size..(g + 1) * size].fill(0.0);
            }
        }
    }
    (scores, values)
}

fn finish(p: &GateParams, chosen: &mut [f64]) {
    if p.score_fn == 1 {
        let top = chosen.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = chosen.iter().map(|v| (v - top).exp()).sum();
        chosen.iter_mut().for_each(|v| *v = (*v - top).exp() / sum);
    }
    if p.normalise == 1 {
        let sum: f64 = chosen.iter().sum();
        chosen.iter_mut().for_each(|v| *v /= sum + f64::from(p.epsilon));
    }
    chosen.iter_mut().for_each(|v| *v *= f64::from(p.scale));
}

pub fn check(options: &Options) -> Outcome {
    let device = Device::open(0)?;
    let stream = device.stream()?;
    let mut random = Random(options.number("seed", 11));
    let cases = options.number("cases", 40);
    let (mut routed_tokens, mut close) = (0_u64, 0_u64);
    for case in 0..cases {
        let given = |key: &str, drawn: u32| options.number(key, u64::from(drawn)) as u32;
        let experts = given("experts", random.pick(&[1_u32, 8, 16, 60, 64, 128, 256, 384, 512]));
        let hidden = given("hidden", random.pick(&[64_u32, 2048, 2880, 4096, 7168]));
        let drawn = random.pick(&[1_u32, 7, 16, 33, 130, 300, 2100]).min(4_000_000 / hidden);
        let tokens = given("tokens", drawn);
        let score_fn = random.pick(&[0, 1, 2, 3]);
        let groups = if experts.is_multiple_of(8) && experts >= 16 { random.pick(&[0, 8]) } else { 0 };
        let top_k = random.pick(&[1, 2, 4, 8]).min(if groups == 0 { experts } else { experts / 2 });
        let x = rows(&mut random, (tokens * hidden) as usize);
        // What rounding took from rows and weights, in half of the cases each.
        let (low_rows, low_weights) = (random.below(2) == 0, random.below(2) == 0);
        let below = |values: &[u16], random: &mut Random| -> Vec<u16> {
            let below = |bits: &u16| bf16::from_bits(*bits).to_f32() * (random.unit() - 0.5) / 128.0;
            values.iter().map(below).map(|v| bf16::from_f32(v).to_bits()).collect()
        };
        let scale_down = 2.0 / (hidden as f32).sqrt();
        let w: Vec<u16> =
            (0..experts * hidden).map(|_| bf16::from_f32(random.normal() * scale_down).to_bits()).collect();
        let (x_low, w_low) = (below(&x, &mut random), below(&w, &mut random));
        let logit_bias: Option<Vec<f32>> =
            (random.below(3) == 0).then(|| (0..experts).map(|_| random.normal() * 0.1).collect());
        let correction: Option<Vec<f32>> = (score_fn != 1 && random.below(2) == 0)
            .then(|| (0..experts).map(|_| random.normal() * 0.05).collect());
        let upload = |values: &Option<Vec<f32>>| -> Result<Option<Buffer<f32>>, Box<dyn std::error::Error>> {
            values.as_ref().map(|v| Buffer::from_slice(&device, v)).transpose().map_err(Into::into)
        };
        let (x_device, w_device) = (Buffer::from_slice(&device, &x)?, Buffer::from_slice(&device, &w)?);
        let (x_low_device, w_low_device) =
            (Buffer::from_slice(&device, &x_low)?, Buffer::from_slice(&device, &w_low)?);
        let (bias_device, correction_device) = (upload(&logit_bias)?, upload(&correction)?);
        let table = Buffer::from_slice(
            &device,
            &[
                GateLayer::default(),
                GateLayer {
                    weight: w_device.address(),
                    weight_low: if low_weights { w_low_device.address() } else { 0 },
                    logit_bias: bias_device.as_ref().map_or(0, Buffer::address),
                    correction_bias: correction_device.as_ref().map_or(0, Buffer::address),
                    token_table: 0,
                },
            ],
        )?;
        let state = Buffer::from_slice(
            &device,
            &[SlotState {
                sequence: 1,
                tokens,
                layer: 1,
                out_dtype: if low_rows { F32 } else { BF16 },
                ..SlotState::default()
            }],
        )?;
        let ids = Buffer::<i32>::zeroed(&device, (tokens * top_k) as usize)?;
        let weights = Buffer::<f32>::zeroed(&device, (tokens * top_k) as usize)?;
        let p = GateParams {
            state: state.address(),
            layers: table.address(),
            tokens: x_device.address(),
            tokens_low: x_low_device.address(),
            token_ids: 0,
            places: 0,
            topk_ids: ids.address(),
            topk_weights: weights.address(),
            hidden,
            experts,
            top_k,
            max_tokens: tokens,
            score_fn,
            choice: 0,
            group_score: if groups == 0 { 0 } else { random.pick(&[1, 2]) },
            groups,
            groups_kept: 4,
            normalise: random.pick(&[0, 1]),
            epsilon: 1e-20,
            scale: random.pick(&[1.0, 2.5]),
            jitter: 0.0,
            vocab: 0,
        };
        let mut first: Option<(Vec<i32>, Vec<f32>)> = None;
        for _ in 0..2 {
            for poisoned in [&ids.fill_bytes(0xff), &weights.fill_bytes(0xff)] {
                poisoned.as_ref().map_err(ToString::to_string)?;
            }
            // SAFETY: all addresses are of live buffers of the sizes above.
            unsafe { launch::gate(&[p], tokens, stream.raw())? };
            stream.synchronize()?;
            let found = (ids.read()?, weights.read()?);
            if let Some(first) = &first
                && (first.0 != found.0
                    || first.1.iter().zip(&found.1).any(|(a, b)| a.to_bits() != b.to_bits()))
            {
                return Err(format!("case {case}: two runs differ").into());
            }
            first = Some(found);
        }
        let (ids, weights) = first.expect("two runs");
        for token in 0..tokens as usize {
            // Checking every token of a large case on the host takes too long.
            if tokens > 300 && token % 23 != 0 {
                continue;
            }
            let h = hidden as usize;
            let element = |high: &[u16], low: &[u16], has_low: bool, at: usize| {
                let low = if has_low { bf16::from_bits(low[at]).to_f64() } else { 0.0 };
                bf16::from_bits(high[at]).to_f64() + low
            };
            let row: Vec<f64> =
                (token * h..(token + 1) * h).map(|at| element(&x, &x_low, low_rows, at)).collect();
            let logit = |expert: usize| -> f64 {
                row.iter().zip(expert * h..).map(|(x, at)| x * element(&w, &w_low, low_weights, at)).sum()
            };
            let mut logits: Vec<f64> = (0..experts as usize).map(logit).collect();
            if let Some(bias) = &logit_bias {
                logits.iter_mut().zip(bias).for_each(|(l, b)| *l += f64::from(*b));
            }
            let (scores, values) = routed(&p, &logits, correction.as_deref());
            let k = top_k as usize;
            let found = &ids[token * k..][..k];
            let mut order: Vec<usize> = (0..experts as usize).collect();
            order.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
            if found.iter().any(|&id| id < 0 || id >= experts as i32)
                || found.iter().enumerate().any(|(j, id)| found[..j].contains(id))
            {
                return Err(format!("case {case}, token {token}: ids {found:?}").into());
            }
            routed_tokens += 1;
            if found.iter().zip(&order).any(|(&a, &b)| a as usize != b) {
                // Ids may differ only where values are too close for f32 sums to order them.
                let near =
                    found.iter().zip(&order).all(|(&a, &b)| (values[a as usize] - values[b]).abs() < 2e-5);
                // A different choice of groups is possible for the same reason. Count these tokens as close and limit their number.
                if !near && p.group_score == 0 {
                    return Err(format!(
                        "case {case}, token {token}, {p:?}: ids {found:?}, expected {:?}",
                        &order[..k]
                    )
                    .into());
                }
                close += 1;
                continue;
            }
            let mut wanted: Vec<f64> = found.iter().map(|&id| scores[id as usize]).collect();
            finish(&p, &mut wanted);
            for (j, (&found, wanted)) in weights[token * k..][..k].iter().zip(&wanted).enumerate() {
                if (f64::from(found) - wanted).abs() > 1e-4 * wanted.abs().max(1e-3) {
                    return Err(format!(
                        "case {case}, token {token}, choice {j}, {p:?}: weight {found}, expected {wanted}"
                    )
                    .into());
                }
            }
        }
    }
    if close * 50 > routed_tokens {
        return Err(format!(
            "{close} of {routed_tokens} tokens differ from f64 in close choices, which are too many"
        )
        .into());
    }
    println!(
        "gate: {routed_tokens} tokens routed as in f64, {close} of them with close values in another order"
    );
    Ok(())
}
