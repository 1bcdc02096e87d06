//! The choice of a token's experts and weights from its logits.

use expertd_model::{GateSpec, GroupLimit, GroupScore, Normalise, ScoreFn};

/// Whether `a` ranks before `b`: larger values first, and NaN before everything, as in PyTorch's `topk`. The order is
/// total up to ties, so that k experts are always chosen.
fn ranks_before(a: f32, b: f32) -> bool {
    a > b || (a.is_nan() && !b.is_nan())
}

/// Writes the indices of the `ids.len()` best of `values`, best first; among equal values the lower index comes first.
/// `values` must have at least as many elements as `ids`.
pub(super) fn top_k(values: &[f32], ids: &mut [i32]) {
    let k = ids.len();
    let mut filled = 0;
    for (i, &value) in values.iter().enumerate() {
        let mut at = filled;
        while at > 0 && ranks_before(value, values[ids[at - 1] as usize]) {
            at -= 1;
        }
        if at == k {
            continue;
        }
        let end = if filled < k { filled + 1 } else { k };
        ids.copy_within(at..end - 1, at + 1);
        ids[at] = i32::try_from(i).expect("an expert index fits in 32 bits");
        filled = end;
    }
}

/// Replaces the logits of all experts with their scores.
pub(super) fn score(scores: ScoreFn, values: &mut [f32]) {
    match scores {
        ScoreFn::Softmax => softmax(values),
        ScoreFn::Sigmoid => values.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        ScoreFn::SqrtSoftplus => values.iter_mut().for_each(|x| *x = softplus(*x).sqrt()),
        ScoreFn::SoftmaxOfChosen | ScoreFn::SparseMixer { .. } => {}
    }
}

/// `ln(1 + exp(x))`, linear above 20 like PyTorch's.
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

/// Removes all but the best groups from the choice. `choice` holds the values that experts are chosen by, `scores` the
/// values that their weights are computed from.
pub(super) fn limit_groups(
    limit: GroupLimit,
    choice: &mut [f32],
    scores: &mut [f32],
    scratch: &mut GroupScratch,
) {
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

/// Scratch memory for the choice among groups.
#[derive(Debug)]
pub(super) struct GroupScratch {
    rated: Vec<f32>,
    kept: Vec<i32>,
}

impl GroupScratch {
    pub(super) fn new(spec: &GateSpec) -> Self {
        let groups = spec.groups.map_or(0, |limit| limit.groups);
        Self { rated: vec![0.0; groups], kept: vec![0; groups] }
    }
}

/// Normalises and scales the chosen weights.
pub(super) fn finish_weights(spec: &GateSpec, weights: &mut [f32]) {
    if spec.scores == ScoreFn::SoftmaxOfChosen {
        softmax(weights);
    }
    let divisor = match spec.normalise {
        Normalise::No => None,
        Normalise::Sum { epsilon } => Some(weights.iter().sum::<f32>() + epsilon),
        Normalise::SumAtLeast { floor } => {
            let sum: f32 = weights.iter().sum();
            // Unlike `max`, this returns NaN for NaN.
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

/// PhiMoE's sparse mixer in evaluation mode: the largest logit is chosen, then the largest of the others. The weight of
/// each is its softmax over the logits close to it; the second softmax leaves out the first expert.
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
    fn ties_go_to_the_lower_index_and_nan_comes_first() {
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
