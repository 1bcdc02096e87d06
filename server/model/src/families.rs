//! All families. Each description states its differences from [`PLAIN`].

mod sigmoid;
mod softmax;

use super::family::{
    ActivationRule, Family, GateNames, LayerRule, NormaliseRule, Routing, ScoreRule, StoredLayout,
};
use super::gate_spec::Normalise;
use sigmoid::{
    AFMOE, BAILING_HYBRID, DEEPSEEK_V3, DEEPSEEK_V4, DOTS1, EXAONE_MOE, GLM_MOE_DSA, GLM4_MOE, GLM5_NEXT,
    HY_V3, KIMI_LINEAR, LAGUNA, LFM2_MOE, LLAMA4, MIMO_V2_FLASH, MINIMAX_M2, MINIMAX_M3, SOLAR_OPEN,
};
use softmax::{
    DEEPSEEK_V2, ERNIE4_5_MOE, GPT_OSS, GRANITEMOE, HUNYUAN_V1_MOE, JAMBA, MELLUM, MINIMAX, MISTRAL4,
    MIXTRAL, OLMOE, PHIMOE, QWEN2_MOE, QWEN3_5_MOE, QWEN3_MOE, QWEN3_NEXT, QWEN3_OMNI_MOE, QWEN3_VL_MOE,
};

const SUM: Normalise = Normalise::Sum { epsilon: 0.0 };
const SUM_EPSILON: Normalise = Normalise::Sum { epsilon: 1e-20 };

/// The config field with the number of experts in most families without a shared gate.
const LOCAL: &[&str] = &["num_local_experts", "num_experts"];

/// The most common values of all fields; no model has exactly these.
const PLAIN: Family = Family {
    name: "",
    model_types: &[],
    architecture: "",
    block: &["mlp"],
    experts: &["num_experts", "num_local_experts"],
    top_k: &["num_experts_per_tok"],
    width: &["moe_intermediate_size"],
    layers: LayerRule::All,
    routing: Routing {
        scores: ScoreRule::Softmax,
        groups: None,
        normalise: NormaliseRule::Never,
        scale: None,
    },
    gate: GateNames { weight: &["gate.weight"], bias: None, correction: &[], table: "gate.tid2eid" },
    activation: ActivationRule::HiddenAct,
    weight_on_input: false,
    fused: ("experts.gate_up_proj", "experts.down_proj"),
    interleaved: false,
    expert_biases: false,
    shared: None,
    stored: StoredLayout::Projections,
    only: &[],
    ignored: &["router_jitter_noise"],
};

/// A renormalisation if `norm_topk_prob` is true.
const fn norm_topk_prob(default: bool, how: Normalise) -> NormaliseRule {
    NormaliseRule::If { fields: &["norm_topk_prob"], default, how }
}

/// The layers that `mlp_layer_types` names; without that field, all but the first `first_k_dense_replace`.
const fn first_dense(default: usize) -> LayerRule {
    LayerRule::FirstDense { count: Some("first_k_dense_replace"), flags: None, default }
}

/// All families, in no particular order.
pub const FAMILIES: &[Family] = &[
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_VL_MOE,
    QWEN3_OMNI_MOE,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DOTS1,
    ERNIE4_5_MOE,
    GLM4_MOE,
    GLM_MOE_DSA,
    GPT_OSS,
    GRANITEMOE,
    LLAMA4,
    MINIMAX_M2,
    PHIMOE,
    AFMOE,
    BAILING_HYBRID,
    EXAONE_MOE,
    GLM5_NEXT,
    HUNYUAN_V1_MOE,
    HY_V3,
    JAMBA,
    KIMI_LINEAR,
    LAGUNA,
    LFM2_MOE,
    MELLUM,
    MIMO_V2_FLASH,
    MINIMAX,
    MINIMAX_M3,
    MISTRAL4,
    SOLAR_OPEN,
];

/// The family that serves a `model_type`.
#[must_use]
pub fn by_model_type(model_type: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.model_types.contains(&model_type))
}

/// A family by its name.
#[must_use]
pub fn by_name(name: &str) -> Option<&'static Family> {
    FAMILIES.iter().find(|family| family.name == name)
}
