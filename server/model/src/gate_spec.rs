//! The gate of a layer as data: the parameters that distinguish routing functions.

use serde::{Deserialize, Serialize};

/// Largest `top_k` that the service supports.
pub const MAX_TOP_K: usize = 32;

/// A routing function: `[tokens, hidden]` rows to `topk_ids [tokens, top_k]` and `topk_weights [tokens, top_k]`.
///
/// It computes: logits = rows × weightᵀ (+ bias); scores = [`ScoreFn`] of the logits; selection values = the scores,
/// the logits or a token table ([`Choice`]), plus the correction bias, limited to groups; chosen experts = the `top_k`
/// largest selection values, lower id first among equals; weights = the chosen experts' scores, [`Normalise`]d, times
/// `scale`. All of it is in f32, in whatever format the weights are stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GateSpec {
    /// Number of routed experts, E.
    pub num_experts: usize,
    /// Experts per token, k.
    pub top_k: usize,
    /// Function from logits to scores.
    pub scores: ScoreFn,
    /// Values that experts are chosen by.
    pub choice: Choice,
    /// Whether a bias `[E]` is added to the logits.
    pub logit_bias: bool,
    /// Whether a bias `[E]` is added to the values that experts are chosen by, but not to their weights.
    pub correction_bias: bool,
    /// Restriction of the choice to the best groups of experts.
    pub groups: Option<GroupLimit>,
    /// Normalisation of the chosen weights.
    pub normalise: Normalise,
    /// Multiplier of the weights, applied last.
    pub scale: f32,
}

/// A function from logits to scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ScoreFn {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the chosen experts only; experts are chosen by their logits.
    SoftmaxOfChosen,
    /// Sigmoid of each logit.
    Sigmoid,
    /// `sqrt(ln(1 + exp(logit)))` of each logit.
    SqrtSoftplus,
    /// PhiMoE's sparse mixer in evaluation mode: the largest logit is chosen twice, each time weighted by a softmax
    /// over the experts whose logits lie within a relative distance of `2 * jitter` of it. It always chooses two
    /// experts.
    SparseMixer {
        /// The config's `router_jitter_noise`.
        jitter: f32,
    },
}

/// The values that experts are chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Choice {
    /// The scores (+ correction bias).
    Scores,
    /// The logits.
    Logits,
    /// A table `[vocab, top_k]` indexed by token id; scores only determine the weights.
    TokenIds {
        /// Rows of the table.
        vocab: usize,
    },
}

/// Restriction of the choice to the experts of the best groups. Groups are equal ranges of consecutive experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupLimit {
    /// Number of groups; it divides E.
    pub groups: usize,
    /// Number of groups that experts may be chosen from.
    pub kept: usize,
    /// How a group is rated.
    pub by: GroupScore,
}

/// The rating of a group, and the treatment of experts outside the best groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The rating is the largest value; the scores of experts in other groups become zero (DeepSeek-V2).
    Max,
    /// The rating is the sum of the two largest values; experts in other groups cannot be chosen (DeepSeek-V3).
    TopTwoSum,
}

/// Normalisation of the chosen weights before scaling.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Normalise {
    /// The weights stay as they are.
    No,
    /// The weights are divided by `sum + epsilon`.
    Sum {
        /// Number added to the sum.
        epsilon: f32,
    },
    /// The weights are divided by `max(sum, floor)`.
    SumAtLeast {
        /// Smallest divisor.
        floor: f32,
    },
}

impl GateSpec {
    /// Whether requests for this layer must carry token ids.
    pub const fn needs_token_ids(&self) -> bool {
        matches!(self.choice, Choice::TokenIds { .. })
    }

    /// Number of rows of the token table, for layers that route by token id.
    pub const fn vocab(&self) -> Option<usize> {
        match self.choice {
            Choice::TokenIds { vocab } => Some(vocab),
            _ => None,
        }
    }

    /// The routing function in words.
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
