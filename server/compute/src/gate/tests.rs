//! Tests of routing with extreme and ambiguous scores. `tests/golden_block.rs` compares the routing functions with
//! recorded data.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::{CpuGate, GateError, GateScratch};
use expertd_model::{
    Choice, GateSpec, GateTensors, GroupLimit, GroupScore, MatrixView, Normalise, Packing, Scales, ScoreFn,
    WeightFormat,
};

/// A gate whose logits are the row itself: its weights are the identity, and `hidden` is the number of experts.
fn identity(spec: &GateSpec, correction: Option<Vec<f32>>, table: Option<Vec<i32>>) -> CpuGate {
    let e = spec.num_experts;
    let data: Vec<u8> =
        (0..e * e).flat_map(|i| if i % (e + 1) == 0 { 1f32 } else { 0.0 }.to_le_bytes()).collect();
    let weight = MatrixView {
        format: WeightFormat::F32,
        packing: Packing::Strided,
        data: &data,
        rows: e,
        cols: e,
        row_stride: e,
        col_stride: 1,
        scales: Scales::None,
    };
    CpuGate::new(spec, &GateTensors { weight, bias: None, correction_bias: correction, token_table: table })
}

fn spec(num_experts: usize, top_k: usize, scores: ScoreFn) -> GateSpec {
    GateSpec {
        num_experts,
        top_k,
        scores,
        choice: if matches!(scores, ScoreFn::SoftmaxOfChosen | ScoreFn::SparseMixer { .. }) {
            Choice::Logits
        } else {
            Choice::Scores
        },
        logit_bias: false,
        correction_bias: false,
        groups: None,
        normalise: Normalise::No,
        scale: 1.0,
    }
}

fn route(gate: &CpuGate, rows: &[f32]) -> (Vec<i32>, Vec<f32>) {
    let n = rows.len() / gate.spec().num_experts * gate.spec().top_k;
    let (mut ids, mut weights) = (vec![-7; n], vec![f32::NAN; n]);
    gate.route(rows, None, &mut ids, &mut weights).unwrap();
    (ids, weights)
}

#[test]
fn a_correction_bias_changes_the_choice_but_not_the_weights() {
    let spec = GateSpec { correction_bias: true, ..spec(4, 2, ScoreFn::Sigmoid) };
    let gate = identity(&spec, Some(vec![0.0, 0.0, 0.0, 5.0]), None);
    let (ids, weights) = route(&gate, &[0.0, 3.0, 1.0, -1.0]);
    assert_eq!(ids, [3, 1]);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
    assert!((weights[0] - sigmoid(-1.0)).abs() < 1e-6);
    assert!((weights[1] - sigmoid(3.0)).abs() < 1e-6);
}

#[test]
fn groups_are_rated_by_their_best_or_their_best_two() {
    let row = [3.0, -9.0, 2.0, 1.9, -1.0, 0.0];
    let limit = |by| GroupLimit { groups: 3, kept: 1, by };
    let by_two = GateSpec { groups: Some(limit(GroupScore::TopTwoSum)), ..spec(6, 2, ScoreFn::Sigmoid) };
    assert_eq!(route(&identity(&by_two, None, None), &row).0, [2, 3]);
    let by_max = GateSpec { groups: Some(limit(GroupScore::Max)), ..spec(6, 2, ScoreFn::Softmax) };
    assert_eq!(route(&identity(&by_max, None, None), &row).0, [0, 1]);
}

#[test]
fn ties_go_to_the_lower_expert() {
    for scores in [ScoreFn::Softmax, ScoreFn::Sigmoid, ScoreFn::SqrtSoftplus, ScoreFn::SoftmaxOfChosen] {
        let (ids, _) = route(&identity(&spec(5, 3, scores), None, None), &[1.0; 5]);
        assert_eq!(ids, [0, 1, 2], "{scores:?}");
    }
}

#[test]
fn token_ids_must_be_present_and_in_range() {
    let spec = GateSpec { choice: Choice::TokenIds { vocab: 2 }, ..spec(3, 2, ScoreFn::Sigmoid) };
    let gate = identity(&spec, None, Some(vec![2, 0, 1, 2]));
    let rows = [0.0; 6];
    let (mut ids, mut weights) = (vec![-7; 4], vec![f32::NAN; 4]);
    let mut route = |token_ids: Option<&[i32]>| {
        let result = gate.route(&rows, token_ids, &mut ids, &mut weights);
        (result, ids.clone())
    };
    assert_eq!(route(None).0, Err(GateError::TokenIdsMissing { tokens: 2 }));
    assert_eq!(route(Some(&[0])).0, Err(GateError::TokenIdCount { tokens: 2, found: 1 }));
    assert_eq!(route(Some(&[0, 2])).0, Err(GateError::TokenIdRange { token: 1, id: 2, vocab: 2 }));
    let (result, untouched) = route(Some(&[-1, 0]));
    assert_eq!(result, Err(GateError::TokenIdRange { token: 0, id: -1, vocab: 2 }));
    assert_eq!(untouched, [-7; 4]);
    assert_eq!(route(Some(&[1, 0])), (Ok(()), vec![1, 2, 2, 0]));
}

#[test]
fn wrong_lengths_are_refused() {
    let gate = identity(&spec(3, 2, ScoreFn::Softmax), None, None);
    let error = gate.route(&[0.0; 6], None, &mut [0; 3], &mut [0.0; 4]).unwrap_err();
    assert_eq!(error.to_string(), "ids: expected 4 elements, found 3");
    assert!(gate.route(&[0.0; 5], None, &mut [0; 2], &mut [0.0; 2]).is_err());
}

#[test]
fn results_do_not_depend_on_threads_or_scratch() {
    let spec = GateSpec {
        normalise: Normalise::Sum { epsilon: 1e-20 },
        scale: 2.5,
        ..spec(96, 6, ScoreFn::Sigmoid)
    };
    let gate = identity(&spec, None, None);
    let rows: Vec<f32> = (0..96 * 300).map(|i| ((i * 7919) % 1013) as f32 / 200.0 - 2.5).collect();
    let alone = route(&gate, &rows);
    let team = expertd_shm::ThreadTeam::start("team", 3, std::time::Duration::ZERO).unwrap();
    let mut scratch = GateScratch::new(96, 3);
    for tokens in [300, 1, 0, 200] {
        let (mut ids, mut weights) = (vec![-7; tokens * 6], vec![f32::NAN; tokens * 6]);
        let rows = &rows[..tokens * 96];
        gate.route_with(rows, None, &mut ids, &mut weights, &mut scratch, Some(&team)).unwrap();
        assert_eq!(ids, alone.0[..tokens * 6]);
        assert_eq!(weights, alone.1[..tokens * 6]);
    }
}

fn any_score() -> impl Strategy<Value = ScoreFn> {
    prop_oneof![
        Just(ScoreFn::Softmax),
        Just(ScoreFn::Sigmoid),
        Just(ScoreFn::SqrtSoftplus),
        Just(ScoreFn::SoftmaxOfChosen),
        Just(ScoreFn::SparseMixer { jitter: 0.01 }),
    ]
}

fn any_value() -> impl Strategy<Value = f32> {
    prop_oneof![
        4 => -20.0f32..20.0,
        1 => prop_oneof![
            Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(0.0), Just(-0.0), Just(f32::MAX)
        ],
    ]
}

proptest! {
    #[test]
    fn ids_are_in_range_and_distinct_for_any_scores(
        scores in any_score(),
        k in 1usize..9,
        groups in 0usize..4,
        normalise in any::<bool>(),
        row in proptest::collection::vec(any_value(), 8..=8),
        correction in proptest::option::of(proptest::collection::vec(any_value(), 8..=8)),
    ) {
        let k = if matches!(scores, ScoreFn::SparseMixer { .. }) { 2 } else { k };
        let by = if groups % 2 == 0 { GroupScore::Max } else { GroupScore::TopTwoSum };
        let spec = GateSpec {
            correction_bias: correction.is_some(),
            groups: (groups > 0 && k <= 4).then_some(GroupLimit { groups: 4, kept: 2, by }),
            normalise: if normalise { Normalise::Sum { epsilon: 0.0 } } else { Normalise::No },
            ..spec(8, k, scores)
        };
        let (ids, weights) = route(&identity(&spec, correction, None), &row);
        prop_assert!(ids.iter().all(|id| (0..8).contains(id)), "{ids:?}");
        let mut sorted = ids.clone();
        sorted.sort_unstable();
        sorted.dedup();
        prop_assert_eq!(sorted.len(), k, "{:?}", ids);
        // Finite scores, whose products with zeros are also finite, give finite weights.
        if row.iter().all(|x| x.abs() <= 20.0) && !normalise {
            prop_assert!(weights.iter().all(|w| w.is_finite()), "{weights:?}");
        }
    }
}
