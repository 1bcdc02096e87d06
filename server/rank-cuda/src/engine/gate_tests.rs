//! The gate's kernel against the CPU's gate, for every kind of routing function, on the same exact logits.
#![allow(clippy::unwrap_used)]

use expertd_kernels::device::{Buffer, Device};
use expertd_kernels::launch;
use expertd_kernels::params::{GateLayer, GateParams, SlotState};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use rand_distr::{Distribution as _, StandardNormal};

use super::layers::gate_params;
use expertd_compute::gate::CpuGate;
use expertd_model::{Choice, GateSpec, GateTensors, GroupLimit, GroupScore, Normalise, ScoreFn};
use expertd_model::{MatrixView, Packing, Scales, WeightFormat};

/// A layer's gate and its inputs. Weights are the identity, so that logits are the rows' first elements, exactly.
struct Case {
    spec: GateSpec,
    hidden: usize,
    rows: Vec<f32>,
    token_ids: Vec<i32>,
    bias: Option<Vec<f32>>,
    correction: Option<Vec<f32>>,
    table: Option<Vec<i32>>,
}

impl Case {
    fn draw(spec: GateSpec, tokens: usize, random: &mut SmallRng) -> Case {
        let (e, k) = (spec.num_experts, spec.top_k);
        let hidden = e.next_multiple_of(64);
        let mut rows = vec![0.0; tokens * hidden];
        for (t, row) in rows.chunks_exact_mut(hidden).enumerate() {
            for value in &mut row[..e] {
                let normal: f32 = StandardNormal.sample(&mut *random);
                *value = bf16::from_f32(normal * 2.0).to_f32();
            }
            match t % 8 {
                // Copied scores make ties, also among the best.
                0..4 => {
                    for _ in 0..e / 4 + 1 {
                        let (from, to) = (random.random_range(0..e), random.random_range(0..e));
                        row[to] = row[from];
                    }
                }
                4 => row[..e].fill(0.5),
                // One element that is no number makes all logits of the row none.
                5 => row[random.random_range(0..e)] = f32::NAN,
                _ => {}
            }
        }
        // Single logits that are no numbers come from the bias.
        let bias = spec.logit_bias.then(|| {
            let mut bias: Vec<f32> = (0..e).map(|_| random.random_range(-4..4) as f32 * 0.25).collect();
            bias[random.random_range(0..e)] = f32::NAN;
            bias[random.random_range(0..e)] = f32::NEG_INFINITY;
            bias
        });
        let correction = spec.correction_bias.then(|| {
            let mut bias: Vec<f32> = (0..e).map(|_| random.random_range(-0.3..0.3)).collect();
            if random.random_range(0..2) == 0 {
                bias[random.random_range(0..e)] = f32::NAN;
            }
            bias
        });
        let vocab = spec.vocab().unwrap_or(1);
        let table = spec.vocab().map(|vocab| {
            let first: Vec<usize> = (0..vocab).map(|_| random.random_range(0..e)).collect();
            first.iter().flat_map(|first| (0..k).map(move |j| ((first + 7 * j) % e) as i32)).collect()
        });
        let token_ids = (0..tokens).map(|_| random.random_range(0..vocab) as i32).collect();
        Case { spec, hidden, rows, token_ids, bias, correction, table }
    }

    fn weight(&self) -> Vec<u16> {
        let (e, h) = (self.spec.num_experts, self.hidden);
        (0..e * h).map(|i| if i / h == i % h { bf16::ONE } else { bf16::ZERO }.to_bits()).collect()
    }

    fn on_cpu(&self) -> (Vec<i32>, Vec<f32>) {
        let data: Vec<u8> = self.weight().iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let weight = MatrixView {
            format: WeightFormat::Bf16,
            packing: Packing::Strided,
            data: &data,
            rows: self.spec.num_experts,
            cols: self.hidden,
            row_stride: self.hidden,
            col_stride: 1,
            scales: Scales::None,
        };
        let tensors = GateTensors {
            weight,
            bias: self.bias.clone(),
            correction_bias: self.correction.clone(),
            token_table: self.table.clone(),
        };
        let gate = CpuGate::new(&self.spec, &tensors);
        let entries = self.token_ids.len() * self.spec.top_k;
        let (mut ids, mut weights) = (vec![-7; entries], vec![0.0; entries]);
        let token_ids = self.spec.vocab().map(|_| &self.token_ids[..]);
        gate.route(&self.rows, token_ids, &mut ids, &mut weights).unwrap();
        (ids, weights)
    }

    fn on_device(&self, device: &Device) -> (Vec<i32>, Vec<f32>) {
        let tokens = self.token_ids.len();
        let entries = tokens * self.spec.top_k;
        let stream = device.stream().unwrap();
        let rows: Vec<u16> = self.rows.iter().map(|value| bf16::from_f32(*value).to_bits()).collect();
        let rows = Buffer::from_slice(device, &rows).unwrap();
        let weight = Buffer::from_slice(device, &self.weight()).unwrap();
        let upload = |values: &Option<Vec<f32>>| {
            values.as_ref().map(|values| Buffer::from_slice(device, values).unwrap())
        };
        let (bias, correction) = (upload(&self.bias), upload(&self.correction));
        let table = self.table.as_ref().map(|table| Buffer::from_slice(device, table).unwrap());
        let layer = GateLayer {
            weight: weight.address(),
            weight_low: 0,
            logit_bias: bias.as_ref().map_or(0, Buffer::address),
            correction_bias: correction.as_ref().map_or(0, Buffer::address),
            token_table: table.as_ref().map_or(0, Buffer::address),
        };
        let layers = Buffer::from_slice(device, &[layer]).unwrap();
        let state = SlotState { sequence: 1, tokens: tokens as u32, ..SlotState::default() };
        let state = Buffer::from_slice(device, &[state]).unwrap();
        let token_ids = Buffer::from_slice(device, &self.token_ids).unwrap();
        let ids = Buffer::<i32>::zeroed(device, entries).unwrap();
        let weights = Buffer::<f32>::zeroed(device, entries).unwrap();
        for poisoned in [ids.fill_bytes(0xff), weights.fill_bytes(0x11)] {
            poisoned.unwrap();
        }
        let params = GateParams {
            state: state.address(),
            layers: layers.address(),
            tokens: rows.address(),
            token_ids: token_ids.address(),
            topk_ids: ids.address(),
            topk_weights: weights.address(),
            hidden: self.hidden as u32,
            max_tokens: tokens as u32,
            ..gate_params(&self.spec)
        };
        // SAFETY: all addresses are of live buffers of the sizes above.
        unsafe { launch::gate(&[params], tokens as u32, stream.raw()).unwrap() };
        stream.synchronize().unwrap();
        (ids.read().unwrap(), weights.read().unwrap())
    }

    /// Rows that both route to the same experts in the same order, and how many there are.
    fn check(&self, device: &Device) -> (usize, usize) {
        let ((cpu_ids, cpu_weights), (ids, weights)) = (self.on_cpu(), self.on_device(device));
        let k = self.spec.top_k;
        let mut alike = 0;
        for t in 0..self.token_ids.len() {
            let (wanted, found) = (&cpu_ids[t * k..][..k], &ids[t * k..][..k]);
            for (j, id) in found.iter().enumerate() {
                assert!(
                    (0..self.spec.num_experts as i32).contains(id),
                    "{:?}: row {t}: {found:?}",
                    self.spec
                );
                assert!(!found[..j].contains(id), "{:?}: row {t}: {found:?}", self.spec);
            }
            if wanted != found {
                // Scores that exp of the two sides rounds differently may change places; nothing else may.
                assert!(self.rounds(), "{:?}: row {t}: {found:?}, expected {wanted:?}", self.spec);
                continue;
            }
            alike += 1;
            for (j, (found, wanted)) in weights[t * k..][..k].iter().zip(&cpu_weights[t * k..]).enumerate() {
                let same = if wanted.is_nan() {
                    found.is_nan()
                } else {
                    (found - wanted).abs() <= 1e-5 * wanted.abs().max(1e-6)
                };
                assert!(same, "{:?}: row {t}, choice {j}: weight {found}, expected {wanted}", self.spec);
            }
        }
        (alike, self.token_ids.len())
    }

    /// Whether the choice depends on values of exp.
    fn rounds(&self) -> bool {
        self.spec.choice == Choice::Scores && self.spec.scores != ScoreFn::SoftmaxOfChosen
    }
}

fn specs(random: &mut SmallRng) -> Vec<GateSpec> {
    let experts = [16, 60, 64, 128, 256, 512][random.random_range(0..6)];
    let plain = GateSpec {
        num_experts: experts,
        top_k: [1, 2, 6, 8][random.random_range(0..4)],
        scores: ScoreFn::Softmax,
        choice: Choice::Scores,
        logit_bias: random.random_range(0..2) == 0,
        correction_bias: false,
        groups: None,
        normalise: Normalise::Sum { epsilon: 1e-20 },
        scale: 2.5,
    };
    let grouped = GateSpec { num_experts: [64, 160, 256][random.random_range(0..3)], ..plain.clone() };
    let limit = |by| Some(GroupLimit { groups: 8, kept: random_kept(grouped.top_k), by });
    let mixer = ScoreFn::SparseMixer { jitter: 0.01 };
    let no = Normalise::No;
    vec![
        GateSpec {
            scores: mixer,
            choice: Choice::Logits,
            top_k: 2,
            normalise: no,
            scale: 1.0,
            ..plain.clone()
        },
        // Llama 4, which weighs by the sigmoid of what it chose by, and gpt-oss.
        GateSpec { scores: ScoreFn::Sigmoid, choice: Choice::Logits, ..plain.clone() },
        GateSpec { scores: ScoreFn::SoftmaxOfChosen, choice: Choice::Logits, normalise: no, ..plain.clone() },
        GateSpec { scores: ScoreFn::SqrtSoftplus, choice: Choice::TokenIds { vocab: 1000 }, ..plain.clone() },
        GateSpec { correction_bias: true, scores: ScoreFn::Sigmoid, ..plain.clone() },
        GateSpec { normalise: Normalise::SumAtLeast { floor: 0.5 }, ..plain.clone() },
        GateSpec { groups: limit(GroupScore::Max), ..grouped.clone() },
        GateSpec {
            groups: limit(GroupScore::TopTwoSum),
            scores: ScoreFn::Sigmoid,
            correction_bias: true,
            ..grouped.clone()
        },
    ]
}

/// Groups of eight experts or more, as many as k needs, and one more.
const fn random_kept(top_k: usize) -> usize {
    top_k.div_ceil(8) + 1
}

#[test]
#[ignore = "needs a GPU; run on a machine that has one with `-- --ignored`"]
fn every_kind_of_gate_routes_as_on_the_cpu() {
    // As a rank does, which chooses the kernels, too.
    let device = super::open::open(0).expect("a GPU");
    let seed = expertd_test_seed::seed();
    println!("seed {seed}");
    let mut random = SmallRng::seed_from_u64(seed);
    let (mut alike, mut all) = (0, 0);
    for round in 0..12 {
        for spec in specs(&mut random) {
            let tokens = [1, 19, 130, 700][round % 4];
            let case = Case::draw(spec, tokens, &mut random);
            let (same, rows) = case.check(&device);
            alike += same;
            all += rows;
        }
    }
    println!("{alike} of {all} rows routed alike");
    assert!((all - alike) * 500 <= all, "only {alike} of {all} rows alike");
}
