//! The gate of a layer as data: everything that distinguishes one routing function from another.

use serde::{Deserialize, Serialize};

/// Largest `top_k` that the service carries through a step.
pub const MAX_TOP_K: usize = 32;

/// A routing function: `[tokens, hidden]` rows to `topk_ids [tokens, top_k]` and `topk_weights [tokens, top_k]`.
///
/// In this order: logits = rows × weightᵀ (+ bias); scores = [`ScoreFn`] of them; a value to choose by
/// ([`Choice`], + correction bias, limited to groups); the `top_k` largest, lower id first among equals; weights = the
/// chosen experts' scores, [`Normalise`]d, times `scale`. All of it in f32, whatever the weights are stored in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    /// Number of routed experts, E.
    pub num_experts: usize,
    /// Experts per token, k.
    pub top_k: usize,
    /// From logits to scores.
    pub scores: ScoreFn,
    /// What the choice looks at.
    pub choice: Choice,
    /// Whether a bias `[E]` is added to the logits.
    pub logit_bias: bool,
    /// Whether a bias `[E]` is added for the choice only: it chooses but does not weigh.
    pub correction_bias: bool,
    /// Restriction of the choice to the best groups of experts.
    pub groups: Option<GroupLimit>,
    /// What happens to the chosen weights.
    pub normalise: Normalise,
    /// Multiplier of the weights, last.
    pub scale: f32,
}

/// From logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ScoreFn {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts only (choose by logits).
    SoftmaxOfChosen,
    /// Each logit on its own.
    Sigmoid,
    /// `sqrt(ln(1 + exp(logit)))`, each logit on its own.
    SqrtSoftplus,
    /// PhiMoE's sparse mixer, as it runs in evaluation: twice the largest logit, each weighted with a softmax over the
    /// experts whose logits lie within a relative distance of `2 * jitter` of it. Always two experts.
    SparseMixer {
        /// `router_jitter_noise`.
        jitter: f32,
    },
}

/// What the choice of experts looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Choice {
    /// The scores (+ correction bias).
    Scores,
    /// The logits.
    Logits,
    /// A table `[vocab, top_k]`: the token's id decides, scores only weigh.
    TokenIds {
        /// Rows of the table.
        vocab: usize,
    },
}

/// Choice among the experts of the best groups only. Groups are equal runs of consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupLimit {
    /// Number of groups; divides E.
    pub groups: usize,
    /// Groups that stay.
    pub kept: usize,
    /// How a group is rated.
    pub by: GroupScore,
}

/// How a group is rated, and what becomes of experts in groups that do not stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// By its largest value; the others' scores become zero (DeepSeek-V2).
    Max,
    /// By the sum of its two largest values; the others cannot be chosen (DeepSeek-V3).
    TopTwoSum,
}

/// What happens to the chosen weights before scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Normalise {
    /// Nothing.
    No,
    /// Divided by `sum + epsilon`.
    Sum {
        /// Added to the sum.
        epsilon: f32,
    },
    /// Divided by `max(sum, floor)`.
    SumAtLeast {
        /// Least divisor.
        floor: f32,
    },
}

impl GateSpec {
    /// Whether requests for this layer must carry token ids.
    #[must_use]
    pub const fn needs_token_ids(&self) -> bool {
        matches!(self.choice, Choice::TokenIds { .. })
    }

    /// Rows of the token table, for layers that route by token id.
    #[must_use]
    pub const fn vocab(&self) -> Option<usize> {
        match self.choice {
            Choice::TokenIds { vocab } => Some(vocab),
            _ => None,
        }
    }

    /// The routing function in words.
    #[must_use]
    pub fn describe(&self) -> String {
        let (k, e) = (self.top_k, self.num_experts);
        let mut words = match self.scores {
            ScoreFn::Softmax => "softmax over all experts".to_owned(),
            ScoreFn::SoftmaxOfChosen => "softmax over the chosen experts".to_owned(),
            ScoreFn::Sigmoid => "sigmoid scores".to_owned(),
            ScoreFn::SqrtSoftplus => "square root of softplus as scores".to_owned(),
            ScoreFn::SparseMixer { jitter } => format!("sparse mixer with jitter {jitter}"),
        };
        if self.logit_bias {
            words.push_str(" of biased logits");
        }
        words.push_str(&match self.choice {
            Choice::Scores => format!("; the {k} largest of {e}"),
            Choice::Logits => format!("; the {k} largest logits of {e}"),
            Choice::TokenIds { vocab } => format!("; {k} of {e} by token id (table of {vocab})"),
        });
        if self.correction_bias {
            words.push_str(" after adding a correction bias that does not weigh");
        }
        if let Some(GroupLimit { groups, kept, by }) = self.groups {
            let by = match by {
                GroupScore::Max => "largest score",
                GroupScore::TopTwoSum => "sum of its two largest scores",
            };
            words.push_str(&format!(", within the {kept} of {groups} groups with the best {by}"));
        }
        match self.normalise {
            Normalise::No => {}
            Normalise::Sum { .. } | Normalise::SumAtLeast { .. } => {
                words.push_str("; weights renormalised to sum 1")
            }
        }
        if self.scale != 1.0 {
            words.push_str(&format!("; times {}", self.scale));
        }
        words
    }
}
