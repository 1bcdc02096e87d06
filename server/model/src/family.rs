//! The description of a model family: the meaning of its config fields, the names of its tensors and its routing.
//!
//! A family is nothing but a constant of type [`Family`]; the module `families` has all of them. `docs/models.md` shows how to
//! add one.

use super::gate_spec::{GroupScore, Normalise};

/// One family of models.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Name of the family, equal to the reference implementation's model type.
    pub name: &'static str,
    /// Values of `model_type` (of the text part) that this family serves. `synth` writes the first.
    pub model_types: &'static [&'static str],
    /// Class name in `architectures` of a text-only checkpoint.
    pub architecture: &'static str,
    /// Names of the MoE block within a layer, in the order in which they are tried.
    pub block: &'static [&'static str],
    /// Config field with the number of routed experts; further names are aliases that must agree.
    pub experts: &'static [&'static str],
    /// Config field with the number of experts per token, and its aliases.
    pub top_k: &'static [&'static str],
    /// Config field with the experts' intermediate size, and its aliases.
    pub width: &'static [&'static str],
    /// Rule for which layers have an MoE block.
    pub layers: LayerRule,
    /// How the gate chooses experts and computes their weights.
    pub routing: Routing,
    /// Names of the gate's tensors within the block.
    pub gate: GateNames,
    /// The experts' activation.
    pub activation: ActivationRule,
    /// Whether the routing weight multiplies the expert's input instead of its output.
    pub weight_on_input: bool,
    /// Names of the tensors of fused experts within the block: gate and up in one tensor, and down.
    pub fused: (&'static str, &'static str),
    /// Whether gate and up rows alternate in fused experts (gate, up, gate, up, …) instead of being two halves.
    pub interleaved: bool,
    /// Whether experts have biases.
    pub expert_biases: bool,
    /// Shared experts, if the family has them.
    pub shared: Option<SharedRule>,
    /// The layout in which this family's released checkpoints store experts; `synth` writes it.
    pub stored: StoredLayout,
    /// Config fields that must have one of these values if they are present.
    pub only: &'static [(&'static str, &'static [&'static str])],
    /// Config fields that sound relevant to the block but are not in this family.
    pub ignored: &'static [&'static str],
}

/// The layout in which released checkpoints store experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredLayout {
    /// Separate tensors: `experts.N.gate_proj.weight`, `up_proj`, `down_proj`.
    Projections,
    /// Separate tensors: `experts.N.w1.weight` (gate), `w3` (up), `w2` (down).
    Numbered,
    /// One tensor for all experts, `[E, out, in]`.
    Fused,
    /// One tensor for all experts, `[E, in, out]`.
    FusedTransposed,
}

/// A rule for which layers have an MoE block.
#[derive(Clone, Copy, Debug)]
pub enum LayerRule {
    /// All layers.
    All,
    /// The layers that `mlp_layer_types` names; without that field, those whose flag is set; without flags, all but the
    /// first few.
    FirstDense {
        /// Config field with the number of dense layers.
        count: Option<&'static str>,
        /// Config field with a list of flags, one for each layer: true or 1 for a layer with an MoE block.
        flags: Option<&'static str>,
        /// Number of dense layers if all these fields are absent.
        default: usize,
    },
    /// Every `decoder_sparse_step`-th layer, except `mlp_only_layers`.
    SparseStep,
    /// Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`.
    Window,
    /// The layers whose number modulo `expert_layer_period` is `expert_layer_offset`.
    Period {
        /// Value of `expert_layer_period` if it is absent.
        period: usize,
        /// Value of `expert_layer_offset` if it is absent.
        offset: usize,
    },
    /// `moe_layers`; without that field, every `interleave_moe_layer_step`-th layer.
    Listed,
    /// All layers. Those that `mlp_layer_types` calls `hash_moe` (without that field, the first `num_hash_layers`)
    /// route by token id.
    Hashed {
        /// Value of `num_hash_layers` if both fields are absent.
        default: usize,
    },
}

/// How the gate chooses experts and computes their weights.
#[derive(Clone, Copy, Debug)]
pub struct Routing {
    /// Function from logits to scores.
    pub scores: ScoreRule,
    /// Choice limited to the best groups of experts.
    pub groups: Option<GroupRule>,
    /// Renormalisation of the chosen weights.
    pub normalise: NormaliseRule,
    /// Config field with the multiplier of the weights, and the value if it is absent.
    pub scale: Option<(&'static str, f32)>,
}

/// A limit of the choice to the best groups: `topk_group` of them.
#[derive(Clone, Copy, Debug)]
pub struct GroupRule {
    /// The rating of a group.
    pub by: GroupScore,
    /// Config field with the number of groups, and its aliases.
    pub count: &'static [&'static str],
}

/// A rule for the function from logits to scores.
#[derive(Clone, Copy, Debug)]
pub enum ScoreRule {
    /// Softmax over all experts, then the choice.
    Softmax,
    /// Choice by logits, then softmax over the chosen experts.
    SoftmaxOfChosen,
    /// Sigmoid, then the choice.
    Sigmoid,
    /// Choice by logits, then sigmoid.
    SigmoidOfChosen,
    /// The function that `scoring_func` names: `sqrtsoftplus` or `sigmoid`.
    ScoringFunc,
    /// PhiMoE's sparse mixer with `router_jitter_noise`.
    SparseMixer,
}

/// A rule for the renormalisation of the chosen weights.
#[derive(Clone, Copy, Debug)]
pub enum NormaliseRule {
    /// Never.
    Never,
    /// Always.
    Always(Normalise),
    /// If a config field is true.
    If {
        /// The field, and its aliases.
        fields: &'static [&'static str],
        /// The value of an absent field.
        default: bool,
        /// The normalisation.
        how: Normalise,
    },
    /// Always, with `moe_norm_min` as the smallest divisor.
    NormMin,
}

/// Names of the gate's tensors within the block; alternatives are in the order in which they are tried.
#[derive(Clone, Copy, Debug)]
pub struct GateNames {
    /// `[E, hidden]`.
    pub weight: &'static [&'static str],
    /// Bias of the logits, `[E]`.
    pub bias: Option<&'static str>,
    /// Correction bias, `[E]` or `[1, E]`.
    pub correction: &'static [&'static str],
    /// Token table, `[vocab, top_k]`, of layers that route by token id.
    pub table: &'static str,
}

/// A rule for the activation of an MLP.
#[derive(Clone, Copy, Debug)]
pub enum ActivationRule {
    /// The activation `hidden_act`, which must be SiLU.
    HiddenAct,
    /// SiLU clamped at `swiglu_limit`.
    Clamped {
        /// Value of `swiglu_limit` if it is absent.
        default: f32,
    },
    /// The activation of gpt-oss with `swiglu_alpha` and `swiglu_limit`.
    Oai {
        /// Value of `swiglu_alpha` if it is absent.
        alpha: f32,
        /// Value of `swiglu_limit` if it is absent.
        limit: f32,
    },
}

/// A description of shared experts.
#[derive(Clone, Copy, Debug)]
pub struct SharedRule {
    /// Name of their module within the block.
    pub module: &'static str,
    /// Intermediate size of the shared experts.
    pub width: SharedWidth,
    /// Name of the tensor `[1, hidden]` of their sigmoid gate within the block.
    pub gate: Option<&'static str>,
    /// Config field that states whether the shared experts' projections have biases.
    pub bias_field: Option<&'static str>,
    /// Whether released checkpoints name their projections `w1`, `w3` and `w2`, as `synth` then does.
    pub numbered: bool,
}

/// Intermediate size of the shared experts together.
#[derive(Clone, Copy, Debug)]
pub enum SharedWidth {
    /// The value of this config field.
    Field(&'static str),
    /// A count times the experts' intermediate size.
    Count {
        /// Config field with the count.
        field: &'static str,
        /// Value of the field if it is absent.
        default: usize,
    },
    /// The intermediate size of a routed expert.
    SameAsExperts,
}

/// Substrings of config field names that may change the block's arithmetic: an unknown field with one of them is
/// refused.
const RELEVANT_PARTS: [&str; 6] = ["expert", "moe", "router", "gate", "topk", "swiglu"];

/// Config fields about training, outputs or attention that no family's block depends on.
pub(super) const COMMONLY_IGNORED: &[&str] = &[
    "output_router_logits",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "attn_output_gate",
    "attention_output_gate",
    "index_skip_topk_offset",
    "index_topk",
    "index_topk_blocks",
    "index_topk_freq",
    "index_topk_pattern",
    "output_gate_type",
];

impl Family {
    /// Config fields that this family's description reads.
    pub fn uses(&self) -> Vec<&'static str> {
        let mut fields = vec!["model_type", "hidden_size", "num_hidden_layers", "quantization_config"];
        fields.extend(self.experts.iter().chain(self.top_k).chain(self.width));
        fields.extend_from_slice(match self.layers {
            LayerRule::All => &[],
            LayerRule::FirstDense { .. } => &["mlp_layer_types"],
            LayerRule::SparseStep => &["decoder_sparse_step", "mlp_only_layers"],
            LayerRule::Window => &["moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"],
            LayerRule::Period { .. } => &["expert_layer_period", "expert_layer_offset"],
            LayerRule::Listed => &["moe_layers", "interleave_moe_layer_step"],
            LayerRule::Hashed { .. } => &["mlp_layer_types", "num_hash_layers", "vocab_size"],
        });
        if let LayerRule::FirstDense { count, flags, .. } = self.layers {
            fields.extend(count.into_iter().chain(flags));
        }
        fields.extend_from_slice(match self.routing.scores {
            ScoreRule::ScoringFunc => &["scoring_func"],
            ScoreRule::SparseMixer => &["router_jitter_noise"],
            _ => &[],
        });
        if let Some(groups) = self.routing.groups {
            fields.extend_from_slice(groups.count);
            fields.push("topk_group");
            fields.extend((groups.by == GroupScore::Max).then_some("topk_method"));
        }
        fields.extend_from_slice(match self.routing.normalise {
            NormaliseRule::If { fields, .. } => fields,
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

    /// Config fields that this family ignores on purpose.
    pub fn ignores(&self) -> Vec<&'static str> {
        let uses = self.uses();
        let all = COMMONLY_IGNORED.iter().chain(self.ignored).copied();
        all.filter(|field| !uses.contains(field)).collect()
    }

    /// Whether a config field sounds relevant to the block and this family's description does not cover it.
    pub(super) fn is_unknown(&self, field: &str) -> bool {
        let lower = field.to_lowercase();
        RELEVANT_PARTS.iter().any(|part| lower.contains(part))
            && !self.uses().contains(&field)
            && !self.ignored.contains(&field)
            && !COMMONLY_IGNORED.contains(&field)
    }
}
