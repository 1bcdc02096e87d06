//! Tests of grouped experts against the definition, in f64.
#![allow(clippy::unwrap_used)]

use rand::RngExt;
use rand::rngs::ThreadRng;

use super::*;
use crate::experts::{Assignments, ExpertKind};
use crate::linalg::tests::{FORMATS, TestMatrix, levels, random_rows, relative_error};
use expertd_model::{Activation, ExpertBiases, WeightFormat, WeightOn};

struct TestExpert {
    gate: TestMatrix,
    up: TestMatrix,
    down: TestMatrix,
    biases: Option<[Vec<f32>; 3]>,
}

impl TestExpert {
    fn random(
        rng: &mut ThreadRng,
        format: WeightFormat,
        hidden: usize,
        intermediate: usize,
        biased: bool,
    ) -> Self {
        let block = [(128, 128), (1, 1 << 20), (1 << 20, 1 << 20), (16, 32)][rng.random_range(0..4)];
        let mut matrix = |n, k| TestMatrix::random(rng, format, n, k, block);
        let (gate, up, down) =
            (matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate));
        let biases = biased.then(|| [intermediate, intermediate, hidden].map(|len| random_rows(rng, len)));
        TestExpert { gate, up, down, biases }
    }

    fn pack(&self, level: SimdLevel) -> CpuExpert {
        let biases = self.biases.as_ref();
        let biases = biases.map(|[gate, up, down]| ExpertBiases { gate, up, down });
        let (gate, up, down) = (self.gate.view(), self.up.view(), self.down.view());
        CpuExpert::pack_for(level, &ExpertWeights { gate, up, down, biases }).unwrap()
    }

    /// `weight * expert(x)`, or `expert(weight * x)` if the kind weighs the input.
    fn apply(&self, kind: ExpertKind, x: &[f32], weight: f64) -> Vec<f64> {
        let on = |place| if kind.weight_on == place { weight } else { 1.0 };
        let x: Vec<f64> = x.iter().map(|x| f64::from(*x) * on(WeightOn::Input)).collect();
        let bias = |which: usize| self.biases.as_ref().map(|biases| &biases[which]);
        let project = |matrix: &TestMatrix, x: &[f64], bias: Option<&Vec<f32>>| -> Vec<f64> {
            let products =
                matrix.values.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
            products.enumerate().map(|(i, sum)| sum + bias.map_or(0.0, |bias| f64::from(bias[i]))).collect()
        };
        let (gate, up) = (project(&self.gate, &x, bias(0)), project(&self.up, &x, bias(1)));
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let h: Vec<f64> = gate
            .iter()
            .zip(up)
            .map(|(&gate, up)| match kind.activation {
                Activation::SwiGlu => gate * sigmoid(gate) * up,
                Activation::SwiGluClamped { limit } => {
                    let (limit, gate) = (f64::from(limit), gate.min(f64::from(limit)));
                    gate * sigmoid(gate) * up.clamp(-limit, limit)
                }
                Activation::SwiGluOai { alpha, limit } => {
                    let (limit, gate) = (f64::from(limit), gate.min(f64::from(limit)));
                    (up.clamp(-limit, limit) + 1.0) * gate * sigmoid(f64::from(alpha) * gate)
                }
            })
            .collect();
        project(&self.down, &h, bias(2)).into_iter().map(|y| y * on(WeightOn::Output)).collect()
    }
}

/// Owned storage in the layout of [`Assignments`].
struct Routing {
    offsets: Vec<u32>,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

impl Routing {
    /// Assigns row `r` to expert `e` if `is_assigned` returns true for them.
    fn new(
        rng: &mut ThreadRng,
        experts: usize,
        rows: usize,
        is_assigned: impl Fn(&mut ThreadRng, usize, usize) -> bool,
    ) -> Self {
        let mut routing = Routing { offsets: vec![0], rows: Vec::new(), weights: Vec::new() };
        for expert in 0..experts {
            for row in 0..rows {
                if is_assigned(rng, expert, row) {
                    routing.rows.push(row as u32);
                    routing.weights.push(rng.random_range(0.05..1.0));
                }
            }
            routing.offsets.push(routing.rows.len() as u32);
        }
        routing
    }

    fn assignments(&self) -> Assignments<'_> {
        Assignments { offsets: &self.offsets, rows: &self.rows, weights: &self.weights }
    }

    fn reference(&self, kind: ExpertKind, experts: &[TestExpert], x: &[f32], hidden: usize) -> Vec<f64> {
        let mut out = vec![0.0; x.len()];
        for (expert, bounds) in experts.iter().zip(self.offsets.windows(2)) {
            for i in bounds[0] as usize..bounds[1] as usize {
                let at = self.rows[i] as usize * hidden;
                let y = expert.apply(kind, &x[at..at + hidden], f64::from(self.weights[i]));
                out[at..at + hidden].iter_mut().zip(y).for_each(|(out, y)| *out += y);
            }
        }
        out
    }
}

fn check(got: &[f32], want: &[f64], hidden: usize, what: &str) {
    for (row, (got, want)) in got.chunks_exact(hidden).zip(want.chunks_exact(hidden)).enumerate() {
        if want.iter().all(|w| *w == 0.0) {
            assert!(got.iter().all(|g| *g == 0.0), "{what}: row {row} should be zero");
        } else {
            let error = relative_error(got, want);
            assert!(error < 1e-5, "{what}: row {row} is off by {error:e}");
        }
    }
}

/// Runs a case at all levels, on one and on three threads, and compares the results.
fn case(
    rng: &mut ThreadRng,
    kind: ExpertKind,
    experts: &[TestExpert],
    routing: &Routing,
    rows: usize,
    chunk: Option<usize>,
) {
    let hidden = experts[0].pack(SimdLevel::Portable).hidden();
    let intermediate = experts[0].pack(SimdLevel::Portable).intermediate();
    let x = random_rows(rng, rows * hidden);
    let want = routing.reference(kind, experts, &x, hidden);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for level in levels() {
        let packed: Vec<CpuExpert> = experts.iter().map(|expert| expert.pack(level)).collect();
        let mut first: Option<Vec<u32>> = None;
        for (threads, pool) in [(1, None), (3, Some(&pool))] {
            let size = WorkspaceSize { hidden, intermediate, assignments: routing.rows.len(), threads };
            let mut workspace = Workspace::new(size);
            workspace.chunk = chunk.unwrap_or(workspace.chunk).min(workspace.chunk);
            workspace.part = chunk.map_or(workspace.part, |chunk| chunk.div_ceil(2)).min(workspace.part);
            workspace.poison();
            let mut out = vec![f32::NAN; rows * hidden];
            // Input and output are divided at different rows.
            let (a, b) = x.split_at(rng.random_range(0..=rows) * hidden);
            let (c, d) = out.split_at_mut(rng.random_range(0..=rows) * hidden);
            forward(kind, &packed, routing.assignments(), &[a, &[], b], &mut [c, d], &mut workspace, pool);
            check(&out, &want, hidden, &format!("{:?} {level}", packed[0].gate_up.format()));
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert!(first.as_ref().is_none_or(|first| *first == bits), "threads change the bits");
            first = Some(bits);
        }
    }
}

fn kinds() -> [ExpertKind; 4] {
    [
        ExpertKind { activation: Activation::SwiGlu, weight_on: WeightOn::Output },
        ExpertKind { activation: Activation::SwiGlu, weight_on: WeightOn::Input },
        ExpertKind { activation: Activation::SwiGluClamped { limit: 0.5 }, weight_on: WeightOn::Output },
        ExpertKind {
            activation: Activation::SwiGluOai { alpha: 1.702, limit: 0.75 },
            weight_on: WeightOn::Output,
        },
    ]
}

#[test]
fn every_format_and_kind() {
    let mut rng = rand::rng();
    for format in FORMATS {
        for (kind, biased) in kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            for (hidden, intermediate) in [(64, 40), (50, 18), (160, 96)] {
                let experts: Vec<_> = (0..5)
                    .map(|_| TestExpert::random(&mut rng, format, hidden, intermediate, biased))
                    .collect();
                let rows = rng.random_range(1..20);
                let routing =
                    Routing::new(&mut rng, 5, rows, |rng, expert, _| expert != 2 && rng.random_bool(0.4));
                case(&mut rng, kind, &experts, &routing, rows, None);
            }
        }
    }
}

#[test]
fn skewed_routing_and_several_chunks() {
    let mut rng = rand::rng();
    let kind = kinds()[0];
    let experts: Vec<_> =
        (0..4).map(|_| TestExpert::random(&mut rng, WeightFormat::Bf16, 96, 70, true)).collect();
    for chunk in [None, Some(1), Some(7), Some(40)] {
        // Cases: all rows on one expert; every row on all experts; no assignments; no rows.
        let one = Routing::new(&mut rng, 4, 150, |_, expert, _| expert == 1);
        case(&mut rng, kind, &experts, &one, 150, chunk);
        let all = Routing::new(&mut rng, 4, 37, |_, _, _| true);
        case(&mut rng, kind, &experts, &all, 37, chunk);
        let none = Routing::new(&mut rng, 4, 9, |_, _, _| false);
        case(&mut rng, kind, &experts, &none, 9, chunk);
        let empty = Routing::new(&mut rng, 4, 0, |_, _, _| true);
        case(&mut rng, kind, &experts, &empty, 0, chunk);
    }
}

#[test]
fn no_experts_give_zeros() {
    let size = WorkspaceSize { hidden: 8, intermediate: 8, assignments: 1, threads: 1 };
    let mut out = [f32::NAN; 16];
    let none = Assignments { offsets: &[0], rows: &[], weights: &[] };
    forward(kinds()[0], &[], none, &[&[1.0; 16]], &mut [&mut out], &mut Workspace::new(size), None);
    assert_eq!(out, [0.0; 16]);
}

#[test]
fn one_expert_for_all_rows() {
    let mut rng = rand::rng();
    let (hidden, intermediate, rows) = (70, 36, 29);
    let expert = TestExpert::random(&mut rng, WeightFormat::F16, hidden, intermediate, false);
    let x = random_rows(&mut rng, rows * hidden);
    let weights: Vec<f32> = (0..rows).map(|_| rng.random()).collect();
    for level in levels() {
        for weights in [None, Some(&weights[..])] {
            let size = WorkspaceSize { hidden, intermediate, assignments: 10, threads: 1 };
            let mut workspace = Workspace::new(size);
            workspace.poison();
            let mut out = vec![f32::NAN; rows * hidden];
            forward_one(kinds()[0], &expert.pack(level), weights, &x, &mut out, &mut workspace, None);
            let want: Vec<f64> = (0..rows)
                .flat_map(|r| {
                    let weight = weights.map_or(1.0, |weights| f64::from(weights[r]));
                    expert.apply(kinds()[0], &x[r * hidden..][..hidden], weight)
                })
                .collect();
            check(&out, &want, hidden, level.name());
        }
    }
}

#[test]
fn non_finite_rows_do_not_affect_others() {
    let mut rng = rand::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::Bf16, 64, 50, true);
    let mut x = random_rows(&mut rng, 20 * 64);
    x[64 * 7] = f32::NAN;
    x[64 * 8] = f32::INFINITY;
    x[64 * 9] = f32::MAX;
    for level in levels() {
        for kind in kinds() {
            let size = WorkspaceSize { hidden: 64, intermediate: 50, assignments: 20, threads: 1 };
            let mut out = vec![f32::NAN; 20 * 64];
            forward_one(kind, &expert.pack(level), None, &x, &mut out, &mut Workspace::new(size), None);
            for (row, out) in out.chunks_exact(64).enumerate() {
                assert!(row == 8 || row == 9 || out.iter().all(|x| x.is_finite() != (row == 7)));
            }
        }
    }
}

#[test]
#[should_panic(expected = "row 3 is out of range: there are 3 rows")]
fn a_row_out_of_range_panics() {
    let mut rng = rand::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::F32, 32, 32, false).pack(SimdLevel::Portable);
    let size = WorkspaceSize { hidden: 32, intermediate: 32, assignments: 4, threads: 1 };
    let assignments = Assignments { offsets: &[0, 2], rows: &[1, 3], weights: &[1.0, 1.0] };
    let mut out = vec![0.0; 96];
    let x = vec![0.0; 96];
    forward(kinds()[0], &[expert], assignments, &[&x], &mut [&mut out], &mut Workspace::new(size), None);
}

#[test]
fn mismatched_shapes_are_refused() {
    let mut rng = rand::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::F32, 32, 16, true);
    let weights = |down: &'_ TestMatrix| -> String {
        let biases = ExpertBiases { gate: &[0.0; 16], up: &[0.0; 15], down: &[0.0; 32] };
        let weights = ExpertWeights {
            gate: expert.gate.view(),
            up: expert.up.view(),
            down: down.view(),
            biases: Some(biases),
        };
        CpuExpert::pack(&weights).unwrap_err().to_string()
    };
    assert_eq!(weights(&expert.gate), "the down projection should be [32, 16], but is [16, 32]");
    assert_eq!(weights(&expert.down), "the bias of the up projection should have 16 elements, but has 15");
}
