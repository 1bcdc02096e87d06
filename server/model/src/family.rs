//! What a family of models looks like: which config fields mean what, how its tensors are called, how it routes.
//!
//! A family is a constant of [`Family`], nothing else; `families.rs` has them all. `docs/models.md` shows how to add
//! one.

use super::gate_spec::{GroupScore, Normalise};

/// One family of models.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Name, that of the reference implementation's model type.
    pub name: &'static str,
    /// Values of `model_type` (of the text part) that are served as this family. The first is what `synth` writes.
    pub model_types: &'static [&'static str],
    /// Class name in `architectures` for a text-only checkpoint.
    pub architecture: &'static str,
    /// Names of the MoE block within a layer, in the order in which they are tried.
    pub block: &'static [&'static str],
    /// Config field with the number of routed experts; further names are aliases that must agree.
    pub experts: &'static [&'static str],
    /// Config field with the experts per token, likewise.
    pub top_k: &'static [&'static str],
    /// Config field with the experts' intermediate size, likewise.
    pub width: &'static [&'static str],
    /// Which layers have an MoE block.
    pub layers: LayerRule,
    /// How the gate decides.
    pub routing: Routing,
    /// Tensors of the gate, within the block.
    pub gate: GateNames,
    /// The experts' activation.
    pub activation: ActivationRule,
    /// Whether the routing weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// Tensors of fused experts, within the block: gate and up in one, and down.
    pub fused: (&'static str, &'static str),
    /// Whether gate and up rows alternate in fused experts (gate, up, gate, up, …) instead of following each other.
    pub interleaved: bool,
    /// Whether experts have biases.
    pub expert_biases: bool,
    /// Shared experts.
    pub shared: Option<SharedRule>,
    /// How this family's released checkpoints store experts: what `synth` writes.
    pub stored: Stored,
    /// Config fields that must have one of these values where they are present.
    pub only: &'static [(&'static str, &'static [&'static str])],
    /// Config fields that sound as if they mattered and do not, here.
    pub ignored: &'static [&'static str],
}

/// How released checkpoints store experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// One by one: `experts.N.gate_proj.weight`, `up_proj`, `down_proj`.
    Projections,
    /// One by one: `experts.N.w1.weight` (gate), `w3` (up), `w2` (down).
    Numbered,
    /// All in one tensor, `[E, out, in]`.
    Fused,
    /// All in one tensor, `[E, in, out]`.
    FusedTransposed,
}

/// Which layers have an MoE block.
#[derive(Clone, Copy, Debug)]
pub enum LayerRule {
    /// All of them.
    All,
    /// `mlp_layer_types` where present, else all but the first `first_k_dense_replace`.
    FirstDense {
        /// Where the field is absent.
        default: usize,
    },
    /// Every `decoder_sparse_step`-th, except `mlp_only_layers`.
    SparseStep,
    /// `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`-th.
    Window,
    /// `moe_layers` where present, else every `interleave_moe_layer_step`-th.
    Listed,
    /// All; those that `mlp_layer_types` calls `hash_moe` (else the first `num_hash_layers`) route by token id.
    Hashed {
        /// Where both fields are absent.
        default: usize,
    },
}

/// How the gate decides.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    /// From logits to scores.
    pub scores: ScoreRule,
    /// Group-limited choice by `n_group` and `topk_group`.
    pub groups: Option<GroupScore>,
    /// Renormalisation of the chosen weights.
    pub normalise: NormaliseRule,
    /// Field with the multiplier of the weights, and its default.
    pub scale: Option<(&'static str, f32)>,
}

/// From logits to scores.
#[derive(Clone, Copy, Debug)]
pub enum ScoreRule {
    /// Softmax over all experts, then choice.
    Softmax,
    /// Choice by logits, then softmax over the chosen.
    SoftmaxOfChosen,
    /// Sigmoid, then choice.
    Sigmoid,
    /// Choice by logits, then sigmoid.
    SigmoidOfChosen,
    /// What `scoring_func` says: `sqrtsoftplus` or `sigmoid`.
    ScoringFunc,
    /// PhiMoE's sparse mixer with `router_jitter_noise`.
    SparseMixer,
}

/// Renormalisation of the chosen weights.
#[derive(Clone, Copy, Debug)]
pub enum NormaliseRule {
    /// Never.
    Never,
    /// Always.
    Always(Normalise),
    /// If `norm_topk_prob` says so.
    NormTopkProb {
        /// Where the field is absent.
        default: bool,
        /// How.
        how: Normalise,
    },
    /// Always, by at least `moe_norm_min`.
    NormMin,
}

/// Tensors of the gate, within the block; alternatives in the order in which they are tried.
#[derive(Clone, Copy, Debug)]
pub struct GateNames {
    /// `[E, hidden]`.
    pub weight: &'static [&'static str],
    /// Bias of the logits, `[E]`.
    pub bias: Option<&'static str>,
    /// Correction bias, `[E]` or `[1, E]`.
    pub correction: &'static [&'static str],
    /// Token table, `[vocab, top_k]`, in layers that route by token id.
    pub table: &'static str,
}

/// An MLP's activation.
#[derive(Clone, Copy, Debug)]
pub enum ActivationRule {
    /// `hidden_act`, which must be SiLU.
    HiddenAct,
    /// SiLU clamped at `swiglu_limit`.
    Clamped {
        /// Where the field is absent.
        default: f32,
    },
    /// gpt-oss: `swiglu_alpha`, `swiglu_limit`.
    Oai {
        /// Where `swiglu_alpha` is absent.
        alpha: f32,
        /// Where `swiglu_limit` is absent.
        limit: f32,
    },
}

/// Shared experts.
#[derive(Clone, Copy, Debug)]
pub struct SharedRule {
    /// Their module within the block.
    pub module: &'static str,
    /// Their intermediate size.
    pub width: SharedWidth,
    /// Tensor `[1, hidden]` of their sigmoid gate, within the block.
    pub gate: Option<&'static str>,
    /// Config field that gives their projections biases.
    pub bias_field: Option<&'static str>,
}

/// Intermediate size of the shared experts together.
#[derive(Clone, Copy, Debug)]
pub enum SharedWidth {
    /// A field of its own.
    Field(&'static str),
    /// A count times the experts' intermediate size.
    Count {
        /// The field with the count.
        field: &'static str,
        /// Where it is absent.
        default: usize,
    },
    /// That of a routed expert.
    SameAsExperts,
}

/// Parts of names that make a config field suspicious: not knowing one of these is a reason to refuse.
const TELLING: [&str; 6] = ["expert", "moe", "router", "gate", "topk", "swiglu"];

/// Fields about training and outputs, or about attention, that no family's block depends on.
pub(super) const COMMONLY_IGNORED: &[&str] = &[
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "attn_output_gate",
    "index_topk",
    "output_gate_type",
];

impl Family {
    /// Config fields that this family's description reads.
    #[must_use]
    pub fn uses(&self) -> Vec<&'static str> {
        let mut fields = vec!["model_type", "hidden_size", "num_hidden_layers", "quantization_config"];
        fields.extend(self.experts.iter().chain(self.top_k).chain(self.width));
        fields.extend_from_slice(match self.layers {
            LayerRule::All => &[],
            LayerRule::FirstDense { .. } => &["first_k_dense_replace", "mlp_layer_types"],
            LayerRule::SparseStep => &["decoder_sparse_step", "mlp_only_layers"],
            LayerRule::Window => &["moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"],
            LayerRule::Listed => &["moe_layers", "interleave_moe_layer_step"],
            LayerRule::Hashed { .. } => &["mlp_layer_types", "num_hash_layers", "vocab_size"],
        });
        fields.extend_from_slice(match self.routing.scores {
            ScoreRule::ScoringFunc => &["scoring_func"],
            ScoreRule::SparseMixer => &["router_jitter_noise"],
            _ => &[],
        });
        fields.extend_from_slice(match self.routing.groups {
            None => &[],
            Some(GroupScore::Max) => &["topk_method", "n_group", "topk_group"],
            Some(GroupScore::TopTwoSum) => &["n_group", "topk_group"],
        });
        fields.extend_from_slice(match self.routing.normalise {
            NormaliseRule::NormTopkProb { .. } => &["norm_topk_prob"],
            NormaliseRule::NormMin => &["moe_norm_min"],
            NormaliseRule::Never | NormaliseRule::Always(_) => &[],
        });
        fields.extend(self.routing.scale.map(|(field, _)| field));
        fields.extend_from_slice(match self.activation {
            ActivationRule::HiddenAct => &["hidden_act"],
            ActivationRule::Clamped { .. } => &["hidden_act", "swiglu_limit"],
            ActivationRule::Oai { .. } => &["swiglu_alpha", "swiglu_limit"],
        });
        if let Some(shared) = self.shared {
            fields.extend(match shared.width {
                SharedWidth::Field(field) | SharedWidth::Count { field, .. } => Some(field),
                SharedWidth::SameAsExperts => None,
            });
            fields.extend(shared.bias_field);
        }
        fields.extend(self.only.iter().map(|(field, _)| *field));
        fields
    }

    /// Config fields that this family knowingly ignores.
    #[must_use]
    pub fn ignores(&self) -> Vec<&'static str> {
        let uses = self.uses();
        let all = COMMONLY_IGNORED.iter().chain(self.ignored).copied();
        all.filter(|field| !uses.contains(field)).collect()
    }

    /// Whether a config field sounds as if it mattered, and this family knows nothing of it.
    pub(super) fn is_unknown(&self, field: &str) -> bool {
        let lower = field.to_lowercase();
        TELLING.iter().any(|part| lower.contains(part))
            && !self.uses().contains(&field)
            && !self.ignored.contains(&field)
            && !COMMONLY_IGNORED.contains(&field)
    }
}
