//! Tests of grouped experts against the definition, in f64.
#![allow(clippy::unwrap_used)]

use expertd_test_seed::TestRng;
use rand::RngExt;

use super::*;
use crate::experts::{Assignments, ExpertKind, reference};
use crate::linalg::Fp8Scales;
use crate::linalg::tests::{FORMATS, Int4Kind, TestMatrix, levels, random_rows};
use expertd_model::{Activation, ExpertBiases, Packing, ScaleFormat, WeightFormat, WeightOn};

struct TestExpert {
    gate: TestMatrix,
    up: TestMatrix,
    down: TestMatrix,
    biases: Option<[Vec<f32>; 3]>,
}

impl TestExpert {
    fn random(
        rng: &mut TestRng,
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
    fn apply(&self, kind: ExpertKind, x: &[f32], weight: f64) -> Vec<Sum> {
        let on = |place| if kind.weight_on == place { weight } else { 1.0 };
        let rows = |row: Vec<f64>| match kind.fp8_rows {
            Some(scales) => reference::quantised(&row, scales == Fp8Scales::PowerOfTwo),
            None => row,
        };
        let x = rows(x.iter().map(|x| f64::from(*x)).collect());
        let x: Vec<Sum> = x.iter().map(|x| Sum::exact(x * on(WeightOn::Input))).collect();
        let project = |matrix: &TestMatrix, x: &[Sum], which: usize, on_bias: f64| -> Vec<Sum> {
            let bias =
                |i: usize| self.biases.as_ref().map_or(0.0, |biases| f64::from(biases[which][i])) * on_bias;
            let rows = matrix.values.chunks_exact(x.len()).enumerate();
            rows.map(|(i, row)| {
                row.iter().zip(x).fold(Sum::exact(bias(i)), |sum, (w, x)| Sum {
                    value: sum.value + w * x.value,
                    magnitude: sum.magnitude + w.abs() * x.magnitude,
                })
            })
            .collect()
        };
        let (gate, up) = (project(&self.gate, &x, 0, 1.0), project(&self.up, &x, 1, 1.0));
        let h: Vec<Sum> = gate
            .iter()
            .zip(&up)
            .map(|(gate, up)| {
                let (alpha, limit, shift) = match kind.activation {
                    Activation::SwiGlu => (1.0, f64::INFINITY, 0.0),
                    Activation::SwiGluClamped { limit } => (1.0, f64::from(limit), 0.0),
                    Activation::SwiGluOai { alpha, limit } => (f64::from(alpha), f64::from(limit), 1.0),
                };
                let (g, u) = (gate.value.min(limit), up.value.clamp(-limit, limit) + shift);
                let sigmoid = 1.0 / (1.0 + (-alpha * g).exp());
                let slope = sigmoid * (1.0 + alpha * g * (1.0 - sigmoid));
                let magnitude =
                    (slope * u).abs() * gate.magnitude + (g * sigmoid).abs() * (up.magnitude + shift);
                let weight = on(WeightOn::Output);
                Sum { value: g * sigmoid * u * weight, magnitude: magnitude * weight }
            })
            .collect();
        let codes = rows(h.iter().map(|h| h.value).collect());
        let h: Vec<Sum> = h.iter().zip(codes).map(|(h, value)| Sum { value, ..*h }).collect();
        project(&self.down, &h, 2, on(WeightOn::Output))
    }
}

/// A sum in f64, and the sum of its terms' absolute values: errors are compared with that, because it does not cancel. Where a
/// function stands between two sums, its slope carries the magnitude on, as it carries rounding errors on.
#[derive(Clone, Copy, Default)]
struct Sum {
    value: f64,
    magnitude: f64,
}

impl Sum {
    fn exact(value: f64) -> Self {
        Sum { value, magnitude: value.abs() }
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
        rng: &mut TestRng,
        experts: usize,
        rows: usize,
        is_assigned: impl Fn(&mut TestRng, usize, usize) -> bool,
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

    fn reference(&self, kind: ExpertKind, experts: &[TestExpert], x: &[f32], hidden: usize) -> Vec<Sum> {
        let mut out = vec![Sum::default(); x.len()];
        for (expert, bounds) in experts.iter().zip(self.offsets.windows(2)) {
            for i in bounds[0] as usize..bounds[1] as usize {
                let at = self.rows[i] as usize * hidden;
                let y = expert.apply(kind, &x[at..at + hidden], f64::from(self.weights[i]));
                for (out, y) in out[at..at + hidden].iter_mut().zip(y) {
                    *out = Sum { value: out.value + y.value, magnitude: out.magnitude + y.magnitude };
                }
            }
        }
        out
    }
}

/// The error of each row, of its sums' magnitude in the L2 norm; rows that should be zero must be.
fn errors(got: &[f32], want: &[Sum], hidden: usize) -> Vec<f64> {
    let rows = got.chunks_exact(hidden).zip(want.chunks_exact(hidden)).enumerate();
    rows.map(|(row, (got, want))| {
        if want.iter().all(|w| w.magnitude == 0.0) {
            assert!(got.iter().all(|g| *g == 0.0), "row {row} should be zero");
            return 0.0;
        }
        let error: f64 = got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w.value).powi(2)).sum();
        (error / want.iter().map(|w| w.magnitude.powi(2)).sum::<f64>()).sqrt()
    })
    .collect()
}

fn check(got: &[f32], want: &[Sum], hidden: usize, what: &str) {
    for (row, error) in errors(got, want, hidden).into_iter().enumerate() {
        assert!(error < 1e-6, "{what}: row {row} is off by {error:e}");
    }
}

/// Runs a case at all levels, on one and on three threads, which must give the same bits. Returns the errors of all rows.
fn run(
    rng: &mut TestRng,
    kind: ExpertKind,
    experts: &[TestExpert],
    routing: &Routing,
    rows: usize,
    chunk: Option<usize>,
) -> Vec<f64> {
    let hidden = experts[0].pack(SimdLevel::Portable).hidden();
    let intermediate = experts[0].pack(SimdLevel::Portable).intermediate();
    let x = random_rows(rng, rows * hidden);
    let want = routing.reference(kind, experts, &x, hidden);
    let team = expertd_shm::ThreadTeam::start("team", 2, std::time::Duration::ZERO).unwrap();
    let mut all = Vec::new();
    for level in levels() {
        let packed: Vec<CpuExpert> = experts.iter().map(|expert| expert.pack(level)).collect();
        let mut first: Option<Vec<u32>> = None;
        for (threads, team) in [(1, None), (3, Some(&team))] {
            let size = WorkspaceSize { hidden, intermediate, assignments: routing.rows.len(), threads };
            let mut workspace = Workspace::new(size);
            workspace.chunk = chunk.unwrap_or(workspace.chunk).min(workspace.chunk);
            workspace.part = chunk.map_or(workspace.part, |chunk| chunk.div_ceil(2)).min(workspace.part);
            workspace.poison();
            let mut out = vec![f32::NAN; rows * hidden];
            // Input and output are divided at different rows.
            let (a, b) = x.split_at(rng.random_range(0..=rows) * hidden);
            let (c, d) = out.split_at_mut(rng.random_range(0..=rows) * hidden);
            forward(kind, &packed, routing.assignments(), &[a, &[], b], &mut [c, d], &mut workspace, team);
            all.append(&mut errors(&out, &want, hidden));
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert!(first.as_ref().is_none_or(|first| *first == bits), "threads change the bits");
            first = Some(bits);
        }
    }
    all
}

/// The same of a case without quantised rows, where every row must be right to f32's precision.
fn case(
    rng: &mut TestRng,
    kind: ExpertKind,
    experts: &[TestExpert],
    routing: &Routing,
    rows: usize,
    chunk: Option<usize>,
) {
    let worst = run(rng, kind, experts, routing, rows, chunk).into_iter().fold(0.0, f64::max);
    assert!(worst < 1e-6, "{:?}: a row is off by {worst:e}", experts[0].gate.format);
}

fn kinds() -> [ExpertKind; 4] {
    let oai = Activation::SwiGluOai { alpha: 1.702, limit: 0.75 };
    let clamped = Activation::SwiGluClamped { limit: 0.5 };
    [
        (Activation::SwiGlu, WeightOn::Output),
        (Activation::SwiGlu, WeightOn::Input),
        (clamped, WeightOn::Output),
        (oai, WeightOn::Output),
    ]
    .map(|(activation, weight_on)| ExpertKind { activation, weight_on, fp8_rows: None })
}

#[test]
fn every_format_and_kind() {
    let mut rng = expertd_test_seed::rng();
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

/// Experts that have only this row, some with weight zero, and INT4 experts in different layouts.
#[test]
fn one_row_on_several_experts() {
    let mut rng = expertd_test_seed::rng();
    let (hidden, intermediate) = (96, 64);
    for format in FORMATS {
        for kind in kinds() {
            let mut expert = |i: usize| {
                let mut expert = TestExpert::random(&mut rng, format, hidden, intermediate, false);
                if format == WeightFormat::Int4 {
                    let group = [32, 16, 8][i % 3];
                    let zeros = (i % 2 == 1).then_some((Packing::Strided, 0));
                    let (packing, scales) = (Packing::Strided, ScaleFormat::Bf16);
                    let int4 = Int4Kind { group, scales, packing, zeros };
                    expert.gate = TestMatrix::int4(&mut rng, intermediate, hidden, int4);
                    expert.up = TestMatrix::int4(&mut rng, intermediate, hidden, int4);
                }
                expert
            };
            let experts: Vec<_> = (0..9).map(&mut expert).collect();
            let mut routing = Routing::new(&mut rng, 9, 2, |_, expert, row| row == usize::from(expert > 6));
            for i in [0, 3] {
                routing.weights[i] = 0.0;
            }
            for chunk in [None, Some(3)] {
                case(&mut rng, kind, &experts, &routing, 2, chunk);
            }
        }
    }
}

/// The definition quantises the same h up to the rounding of f32 sums, which rarely decides on a code: nearly all rows are right
/// to f32's precision, and the others differ by few codes.
#[test]
fn fp8_products_of_every_kind() {
    let mut rng = expertd_test_seed::rng();
    let mut all = Vec::new();
    for scales in [Fp8Scales::F32, Fp8Scales::PowerOfTwo] {
        for (kind, biased) in kinds().into_iter().flat_map(|kind| [(kind, false), (kind, true)]) {
            let kind = ExpertKind { fp8_rows: Some(scales), ..kind };
            for (hidden, intermediate, chunk) in [(64, 40, None), (160, 96, Some(7)), (330, 200, None)] {
                let experts: Vec<_> = (0..5)
                    .map(|_| {
                        TestExpert::random(&mut rng, WeightFormat::Fp8E4m3, hidden, intermediate, biased)
                    })
                    .collect();
                let rows = rng.random_range(1..40);
                let routing =
                    Routing::new(&mut rng, 5, rows, |rng, expert, _| expert != 2 && rng.random_bool(0.4));
                all.append(&mut run(&mut rng, kind, &experts, &routing, rows, chunk));
            }
        }
    }
    let off = all.iter().filter(|error| **error > 1e-6).count();
    let worst = all.iter().copied().fold(0.0, f64::max);
    println!("{off} of {} rows have other codes; the worst is off by {worst:.1e}", all.len());
    // Two of a thousand are expected. They come in groups: a row has the same code at each level and number of threads.
    assert!(off * 50 < all.len(), "{off} of {} rows are off by up to {worst:e}", all.len());
    assert!(worst < 1e-2, "a row is off by {worst:e}");
}

#[test]
fn skewed_routing_and_several_chunks() {
    let mut rng = expertd_test_seed::rng();
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
    forward::<CpuExpert>(
        kinds()[0],
        &[],
        none,
        &[&[1.0; 16]],
        &mut [&mut out],
        &mut Workspace::new(size),
        None,
    );
    assert_eq!(out, [0.0; 16]);
}

#[test]
fn one_expert_for_all_rows() {
    let mut rng = expertd_test_seed::rng();
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
            let want: Vec<Sum> = (0..rows)
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
    let mut rng = expertd_test_seed::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::Bf16, 64, 50, true);
    let mut x = random_rows(&mut rng, 20 * 64);
    x[64 * 7] = f32::NAN;
    x[64 * 8] = f32::INFINITY;
    x[64 * 9] = f32::MAX;
    let fp8_kinds = kinds().map(|kind| ExpertKind { fp8_rows: Some(Fp8Scales::F32), ..kind });
    for level in levels() {
        for kind in kinds().into_iter().chain(fp8_kinds) {
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
fn weight_zero_adds_zeros_whatever_the_row_holds() {
    let mut rng = expertd_test_seed::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::Bf16, 64, 50, false);
    let mut x = random_rows(&mut rng, 20 * 64);
    let mut weights = vec![0.5; 20];
    for (row, value) in [(7, f32::NAN), (8, f32::INFINITY), (9, f32::MAX), (19, -f32::INFINITY)] {
        x[64 * row + row] = value;
        weights[row] = 0.0;
    }
    let fp8_kinds = kinds().map(|kind| ExpertKind { fp8_rows: Some(Fp8Scales::F32), ..kind });
    for level in levels() {
        for kind in kinds().into_iter().chain(fp8_kinds) {
            let size = WorkspaceSize { hidden: 64, intermediate: 50, assignments: 20, threads: 1 };
            let mut workspace = Workspace::new(size);
            workspace.poison();
            let mut out = vec![f32::NAN; 20 * 64];
            forward_one(kind, &expert.pack(level), Some(&weights), &x, &mut out, &mut workspace, None);
            for (row, (out, weight)) in out.chunks_exact(64).zip(&weights).enumerate() {
                assert!(out.iter().all(|x| x.is_finite()), "{kind:?}, row {row}");
                assert_eq!(out.iter().all(|x| *x == 0.0), *weight == 0.0, "{kind:?}, row {row}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "row 3 is out of range: there are 3 rows")]
fn a_row_out_of_range_panics() {
    let mut rng = expertd_test_seed::rng();
    let expert = TestExpert::random(&mut rng, WeightFormat::F32, 32, 32, false).pack(SimdLevel::Portable);
    let size = WorkspaceSize { hidden: 32, intermediate: 32, assignments: 4, threads: 1 };
    let assignments = Assignments { offsets: &[0, 2], rows: &[1, 3], weights: &[1.0, 1.0] };
    let mut out = vec![0.0; 96];
    let x = vec![0.0; 96];
    forward(kinds()[0], &[expert], assignments, &[&x], &mut [&mut out], &mut Workspace::new(size), None);
}

#[test]
fn mismatched_shapes_are_refused() {
    let mut rng = expertd_test_seed::rng();
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
