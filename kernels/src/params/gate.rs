//! Parameters of the gate.

/// One layer of the gate's device table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GateLayer {
    /// bf16 `[E, H]`.
    pub weight: u64,
    /// bf16 `[E, H]`: rounding errors of weights that are stored in f32 or f16; 0: none.
    pub weight_low: u64,
    /// f32 `[E]`, or 0.
    pub logit_bias: u64,
    /// f32 `[E]`, or 0.
    pub correction_bias: u64,
    /// i32 `[vocab, k]`, or 0.
    pub token_table: u64,
}

/// The gate of all layers of one shape. Codes are those of `step.h`; fields follow the model's gate specification.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct GateParams {
    /// [`SlotState`](super::SlotState).
    pub state: u64,
    /// Table of [`GateLayer`].
    pub layers: u64,
    /// bf16 `[T, H]`.
    pub tokens: u64,
    /// bf16 `[T, H]`: rounding errors of rows that came in f32 or f16; 0: not kept.
    pub tokens_low: u64,
    /// i32 `[T]`, or 0.
    pub token_ids: u64,
    /// Row places from copy_in, whose flags mark rows with given routing; 0 if no row has any.
    pub places: u64,
    /// Out: i32 `[T, k]`.
    pub topk_ids: u64,
    /// Out: f32 `[T, k]`.
    pub topk_weights: u64,
    /// Elements of a row.
    pub hidden: u32,
    /// Number of routed experts.
    pub experts: u32,
    /// Experts per token.
    pub top_k: u32,
    /// Largest number of rows.
    pub max_tokens: u32,
    /// Score function: 0 softmax, 1 softmax of the chosen, 2 sigmoid, 3 square root of softplus, 4 sparse mixer.
    pub score_fn: u32,
    /// Choice of experts: 0 by scores, 1 by logits, 2 by token ids.
    pub choice: u32,
    /// Score of a group: 0 no groups, 1 its largest value, 2 the sum of its two largest values.
    pub group_score: u32,
    /// Number of groups.
    pub groups: u32,
    /// Number of groups from which experts are chosen.
    pub groups_kept: u32,
    /// Normalisation of weights: 0 none, 1 divide by sum + epsilon, 2 divide by max(sum, epsilon).
    pub normalise: u32,
    /// Epsilon of `normalise`.
    pub epsilon: f32,
    /// Factor of the weights.
    pub scale: f32,
    /// Jitter of the sparse mixer.
    pub jitter: f32,
    /// Number of rows of the token table.
    pub vocab: u32,
}

// `step.h` asserts the same sizes; `header.rs` compares every field.
const _: () = {
    assert!(size_of::<GateLayer>() == 40);
    assert!(size_of::<GateParams>() == 120);
};
