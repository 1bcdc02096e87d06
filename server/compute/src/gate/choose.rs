//! From one token's logits to its experts and weights.

use expertd_model::{GateSpec, GroupLimit, GroupScore, Normalise, ScoreFn};

/// Larger first; not-a-number before everything, as PyTorch's `topk` has it. Never "unordered", so that the choice is
/// always complete.
fn before(a: f32, b: f32) -> bool {
    a > b || (a.is_nan() && !b.is_nan())
}

/// The `ids.len()` best of `values`, best first, the lower index first among equals. Needs as many values.
pub(super) fn top_k(values: &[f32], ids: &mut [i32]) {
    let k = ids.len();
    let mut filled = 0;
    for (i, &value) in values.iter().enumerate() {
        let mut at = filled;
        while at > 0 && before(value, values[ids[at - 1] as usize]) {
            at -= 1;
        }
        if at == k {
            continue;
        }
        let end = if filled < k { filled + 1 } else { k };
        ids.copy_within(at..end - 1, at + 1);
        ids[at] = i32::try_from(i).expect("an expert index fits 32 bits");
        filled = end;
    }
}

/// Scores of all experts, in place of their logits.
pub(super) fn score(scores: ScoreFn, values: &mut [f32]) {
    match scores {
        ScoreFn::Softmax => softmax(values),
        ScoreFn::Sigmoid => values.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        ScoreFn::SqrtSoftplus => values.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
        ScoreFn::SoftmaxOfChosen | ScoreFn::SparseMixer { .. } => {}
    }
}

/// `ln(1 + exp(x))`, linear beyond 20 like PyTorch's.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

pub(super) fn softmax(values: &mut [f32]) {
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in values.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    values.iter_mut().for_each(|x| *x /= sum);
}

/// Takes the groups that do not stay out of the choice. `choice` is what experts are chosen by, `scores` what they
/// weigh.
pub(super) fn limit_groups(limit: GroupLimit, choice: &mut [f32], scores: &mut [f32], scratch: &mut Scratch) {
    let size = choice.len() / limit.groups;
    let rated = &mut scratch.rated[..limit.groups];
    for (rating, group) in rated.iter_mut().zip(choice.chunks(size)) {
        let mut best = [0i32; 2];
        *rating = match limit.by {
            GroupScore::Max => {
                top_k(group, &mut best[..1]);
                group[best[0] as usize]
            }
            GroupScore::TopTwoSum => {
                top_k(group, &mut best);
                group[best[0] as usize] + group[best[1] as usize]
            }
        };
    }
    let kept = &mut scratch.kept[..limit.kept];
    top_k(rated, kept);
    for group in (0..limit.groups).filter(|g| !kept.contains(&(*g as i32))) {
        let experts = group * size..(group + 1) * size;
        match limit.by {
            GroupScore::Max => {
                choice[experts.clone()].fill(0.0);
                scores[experts].fill(0.0);
            }
            GroupScore::TopTwoSum => choice[experts].fill(f32::NEG_INFINITY),
        }
    }
}

/// Room for the choice among groups.
#[derive(Debug)]
pub(super) struct Scratch {
    rated: Vec<f32>,
    kept: Vec<i32>,
}

impl Scratch {
    pub(super) fn new(spec: &GateSpec) -> Self {
        let groups = spec.groups.map_or(0, |limit| limit.groups);
        Self { rated: vec![0.0; groups], kept: vec![0; groups] }
    }
}

/// Normalises and scales the chosen weights.
pub(super) fn finish(spec: &GateSpec, weights: &mut [f32]) {
    if spec.scores == ScoreFn::SoftmaxOfChosen {
        softmax(weights);
    }
    let divisor = match spec.normalise {
        Normalise::No => None,
        Normalise::Sum { epsilon } => Some(weights.iter().sum::<f32>() + epsilon),
        Normalise::SumAtLeast { floor } => {
            let sum: f32 = weights.iter().sum();
            // Unlike `max`, lets a not-a-number through.
            Some(if sum < floor { floor } else { sum })
        }
    };
    if let Some(divisor) = divisor {
        weights.iter_mut().for_each(|w| *w /= divisor);
    }
    if spec.scale != 1.0 {
        weights.iter_mut().for_each(|w| *w *= spec.scale);
    }
}

/// PhiMoE's sparse mixer in evaluation: the largest logit, then the largest of the rest; each weighs as in a softmax
/// over the logits (the first one left out the second time) that lie close to it.
pub(super) fn sparse_mixer(jitter: f32, logits: &[f32], ids: &mut [i32], weights: &mut [f32]) {
    top_k(logits, &mut ids[..2]);
    for pick in 0..2 {
        let best = logits[ids[pick] as usize];
        let mut sum = 0.0;
        for (i, &logit) in logits.iter().enumerate() {
            let taken = pick == 1 && i == ids[0] as usize;
            let factor = if logit.abs() < best { best } else { logit.abs() };
            let far = (best - logit) / factor > 2.0 * jitter;
            if !taken && !far {
                sum += (logit - best).exp();
            }
        }
        weights[pick] = 1.0 / sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lower_index_and_not_a_number_comes_first() {
        let mut ids = [0; 3];
        top_k(&[1.0, 3.0, 3.0, 0.5, 3.0], &mut ids);
        assert_eq!(ids, [1, 2, 4]);
        top_k(&[1.0, f32::NAN, 3.0, f32::NAN, f32::INFINITY], &mut ids);
        assert_eq!(ids, [1, 3, 4]);
        top_k(&[f32::NEG_INFINITY; 4], &mut ids);
        assert_eq!(ids, [0, 1, 2]);
        let mut all = [0; 2];
        top_k(&[1.0, 2.0], &mut all);
        assert_eq!(all, [1, 0]);
    }
}
