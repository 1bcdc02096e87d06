//! All families. Each description states its differences from [`PLAIN`].

use super::family::{
    ActivationRule, Family, GateNames, LayerRule, NormaliseRule, Routing, ScoreRule, SharedRule, SharedWidth,
    StoredLayout,
};
use super::gate_spec::{GroupScore, Normalise};

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

const MIXTRAL: Family = Family {
    name: "mixtral",
    model_types: &["mixtral"],
    architecture: "MixtralForCausalLM",
    block: &["block_sparse_moe", "mlp"],
    experts: LOCAL,
    width: &["intermediate_size"],
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    stored: StoredLayout::Numbered,
    ..PLAIN
};

const OLMOE: Family = Family {
    name: "olmoe",
    model_types: &["olmoe"],
    architecture: "OlmoeForCausalLM",
    width: &["intermediate_size"],
    routing: Routing { normalise: NormaliseRule::NormTopkProb { default: false, how: SUM }, ..PLAIN.routing },
    ..PLAIN
};

const QWEN_SHARED: SharedRule = SharedRule {
    module: "shared_expert",
    width: SharedWidth::Field("shared_expert_intermediate_size"),
    gate: Some("shared_expert_gate.weight"),
    bias_field: None,
};

const QWEN2_MOE: Family = Family {
    name: "qwen2_moe",
    model_types: &["qwen2_moe"],
    architecture: "Qwen2MoeForCausalLM",
    layers: LayerRule::SparseStep,
    routing: Routing { normalise: NormaliseRule::NormTopkProb { default: false, how: SUM }, ..PLAIN.routing },
    shared: Some(QWEN_SHARED),
    ..PLAIN
};

const QWEN3_MOE: Family = Family {
    name: "qwen3_moe",
    model_types: &["qwen3_moe"],
    architecture: "Qwen3MoeForCausalLM",
    shared: None,
    ignored: &["router_jitter_noise", "shared_expert_intermediate_size"],
    ..QWEN2_MOE
};

/// The text part of Qwen3-VL-MoE.
const QWEN3_VL_MOE: Family = Family {
    name: "qwen3_vl_moe",
    model_types: &["qwen3_vl_moe_text", "qwen3_vl_moe"],
    architecture: "Qwen3VLMoeForConditionalGeneration",
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    stored: StoredLayout::FusedTransposed,
    ignored: &["router_jitter_noise", "shared_expert_intermediate_size", "norm_topk_prob"],
    ..QWEN3_MOE
};

const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    model_types: &["qwen3_next"],
    architecture: "Qwen3NextForCausalLM",
    routing: Routing { normalise: NormaliseRule::NormTopkProb { default: true, how: SUM }, ..PLAIN.routing },
    ..QWEN2_MOE
};

const QWEN3_5_MOE: Family = Family {
    name: "qwen3_5_moe_text",
    model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    architecture: "Qwen3_5MoeForCausalLM",
    layers: LayerRule::All,
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    only: &[("mlp_only_layers", &["[]"]), ("decoder_sparse_step", &["1"])],
    ignored: &["router_jitter_noise", "norm_topk_prob"],
    ..QWEN2_MOE
};

const DEEPSEEK_SHARED: SharedRule = SharedRule {
    module: "shared_experts",
    width: SharedWidth::Count { field: "n_shared_experts", default: 1 },
    gate: None,
    bias_field: None,
};

const DEEPSEEK_V2: Family = Family {
    name: "deepseek_v2",
    model_types: &["deepseek_v2"],
    architecture: "DeepseekV2ForCausalLM",
    experts: &["n_routed_experts", "num_local_experts", "num_experts"],
    layers: LayerRule::FirstDense { default: 0 },
    routing: Routing {
        scores: ScoreRule::Softmax,
        groups: Some(GroupScore::Max),
        normalise: NormaliseRule::Never,
        scale: Some(("routed_scaling_factor", 1.0)),
    },
    shared: Some(SharedRule {
        width: SharedWidth::Count { field: "n_shared_experts", default: 2 },
        bias_field: Some("mlp_bias"),
        ..DEEPSEEK_SHARED
    }),
    only: &[("scoring_func", &["softmax"]), ("moe_layer_freq", &["1"])],
    // The reference implementation does not renormalise here, whatever this field is.
    ignored: &["router_jitter_noise", "norm_topk_prob"],
    ..PLAIN
};

/// DeepSeek-V3 and the models that share its block: R1, V3.1, V3.2, Kimi-K2.
const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    model_types: &["deepseek_v3", "deepseek_v32", "kimi_k2"],
    architecture: "DeepseekV3ForCausalLM",
    layers: LayerRule::FirstDense { default: 3 },
    routing: Routing {
        scores: ScoreRule::Sigmoid,
        groups: Some(GroupScore::TopTwoSum),
        normalise: NormaliseRule::NormTopkProb { default: true, how: SUM_EPSILON },
        scale: Some(("routed_scaling_factor", 2.5)),
    },
    gate: GateNames { correction: &["gate.e_score_correction_bias"], ..PLAIN.gate },
    shared: Some(DEEPSEEK_SHARED),
    only: &[("scoring_func", &["sigmoid"]), ("topk_method", &["noaux_tc"]), ("moe_layer_freq", &["1"])],
    ignored: &["router_jitter_noise"],
    ..DEEPSEEK_V2
};

const DEEPSEEK_V4: Family = Family {
    name: "deepseek_v4",
    model_types: &["deepseek_v4"],
    architecture: "DeepseekV4ForCausalLM",
    block: &["ffn", "mlp"],
    layers: LayerRule::Hashed { default: 3 },
    routing: Routing {
        scores: ScoreRule::ScoringFunc,
        groups: None,
        normalise: NormaliseRule::Always(SUM_EPSILON),
        scale: Some(("routed_scaling_factor", 1.5)),
    },
    gate: GateNames { correction: &["gate.bias", "gate.e_score_correction_bias"], ..PLAIN.gate },
    activation: ActivationRule::Clamped { default: 10.0 },
    shared: Some(SharedRule {
        width: SharedWidth::SameAsExperts,
        bias_field: Some("mlp_bias"),
        ..DEEPSEEK_SHARED
    }),
    stored: StoredLayout::Numbered,
    only: &[("topk_method", &["noaux_tc"]), ("moe_layer_freq", &["1"])],
    // The reference implementation has one shared expert and always renormalises, whatever these fields are.
    ignored: &["router_jitter_noise", "norm_topk_prob", "n_shared_experts"],
    ..DEEPSEEK_V2
};

const DOTS1: Family = Family {
    name: "dots1",
    model_types: &["dots1"],
    architecture: "Dots1ForCausalLM",
    layers: LayerRule::FirstDense { default: 0 },
    routing: Routing {
        normalise: NormaliseRule::NormTopkProb { default: false, how: SUM_EPSILON },
        scale: Some(("routed_scaling_factor", 1.0)),
        ..DEEPSEEK_V3.routing
    },
    only: &[
        ("scoring_func", &["sigmoid", "noaux_tc"]),
        ("topk_method", &["noaux_tc"]),
        ("moe_layer_freq", &["1"]),
    ],
    ..DEEPSEEK_V3
};

/// GLM-4.5 to 4.7, and the text part of GLM-4.5V.
const GLM4_MOE: Family = Family {
    name: "glm4_moe",
    model_types: &["glm4_moe", "glm4v_moe_text", "glm4_moe_lite"],
    architecture: "Glm4MoeForCausalLM",
    layers: LayerRule::FirstDense { default: 1 },
    routing: Routing { scale: Some(("routed_scaling_factor", 1.0)), ..DEEPSEEK_V3.routing },
    ..DEEPSEEK_V3
};

/// GLM-5.
const GLM_MOE_DSA: Family = Family {
    name: "glm_moe_dsa",
    model_types: &["glm_moe_dsa"],
    architecture: "GlmMoeDsaForCausalLM",
    layers: LayerRule::FirstDense { default: 3 },
    ..GLM4_MOE
};

const ERNIE4_5_MOE: Family = Family {
    name: "ernie4_5_moe",
    model_types: &["ernie4_5_moe"],
    architecture: "Ernie4_5_MoeForCausalLM",
    experts: &["moe_num_experts"],
    top_k: &["moe_k"],
    layers: LayerRule::Window,
    routing: Routing { normalise: NormaliseRule::NormMin, ..PLAIN.routing },
    gate: GateNames {
        correction: &["moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"],
        ..PLAIN.gate
    },
    shared: Some(SharedRule {
        module: "shared_experts",
        width: SharedWidth::Count { field: "moe_num_shared_experts", default: 2 },
        gate: None,
        bias_field: Some("use_bias"),
    }),
    only: &[
        ("moe_gate", &["topk", "top2_fused"]),
        ("moe_use_aux_free", &["true"]),
        ("moe_gate_act", &["softmax"]),
    ],
    ignored: &["router_jitter_noise", "moe_capacity", "moe_layer_use_dense_layer"],
    ..PLAIN
};

const GPT_OSS: Family = Family {
    name: "gpt_oss",
    model_types: &["gpt_oss"],
    architecture: "GptOssForCausalLM",
    experts: LOCAL,
    top_k: &["num_experts_per_tok", "experts_per_token"],
    width: &["intermediate_size"],
    routing: Routing { scores: ScoreRule::SoftmaxOfChosen, ..PLAIN.routing },
    gate: GateNames { weight: &["router.weight"], bias: Some("router.bias"), ..PLAIN.gate },
    activation: ActivationRule::Oai { alpha: 1.702, limit: 7.0 },
    interleaved: true,
    expert_biases: true,
    stored: StoredLayout::FusedTransposed,
    ..PLAIN
};

const GRANITEMOE: Family = Family {
    name: "granitemoe",
    model_types: &["granitemoe"],
    architecture: "GraniteMoeForCausalLM",
    block: &["block_sparse_moe"],
    experts: LOCAL,
    width: &["intermediate_size"],
    routing: Routing { scores: ScoreRule::SoftmaxOfChosen, ..PLAIN.routing },
    gate: GateNames { weight: &["router.layer.weight", "router.weight"], ..PLAIN.gate },
    fused: ("input_linear.weight", "output_linear.weight"),
    stored: StoredLayout::Fused,
    ..PLAIN
};

const LLAMA4: Family = Family {
    name: "llama4_text",
    model_types: &["llama4_text", "llama4"],
    architecture: "Llama4ForCausalLM",
    block: &["feed_forward"],
    experts: LOCAL,
    width: &["intermediate_size"],
    layers: LayerRule::Listed,
    routing: Routing { scores: ScoreRule::SigmoidOfChosen, ..PLAIN.routing },
    gate: GateNames { weight: &["router.weight"], ..PLAIN.gate },
    weight_on_input: true,
    shared: Some(SharedRule {
        module: "shared_expert",
        width: SharedWidth::SameAsExperts,
        gate: None,
        bias_field: None,
    }),
    stored: StoredLayout::FusedTransposed,
    ..PLAIN
};

const MINIMAX_M2: Family = Family {
    name: "minimax_m2",
    model_types: &["minimax_m2"],
    architecture: "MiniMaxM2ForCausalLM",
    block: &["block_sparse_moe", "mlp"],
    experts: LOCAL,
    width: &["intermediate_size"],
    routing: Routing { scores: ScoreRule::Sigmoid, normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    gate: GateNames {
        correction: &["e_score_correction_bias", "gate.e_score_correction_bias"],
        ..PLAIN.gate
    },
    stored: StoredLayout::Numbered,
    only: &[
        ("scoring_func", &["sigmoid"]),
        ("use_routing_bias", &["true"]),
        ("shared_intermediate_size", &["0"]),
    ],
    ignored: &["router_jitter_noise", "shared_moe_mode"],
    ..PLAIN
};

const PHIMOE: Family = Family {
    name: "phimoe",
    model_types: &["phimoe"],
    architecture: "PhimoeForCausalLM",
    block: &["block_sparse_moe", "mlp"],
    experts: LOCAL,
    width: &["intermediate_size"],
    routing: Routing { scores: ScoreRule::SparseMixer, ..PLAIN.routing },
    gate: GateNames { weight: &["gate.weight", "router.weight"], ..PLAIN.gate },
    // The mixer always chooses two experts, whatever this field is.
    top_k: &[],
    stored: StoredLayout::Numbered,
    ignored: &["num_experts_per_tok"],
    ..PLAIN
};

/// All families, in no particular order.
pub const FAMILIES: &[Family] = &[
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_VL_MOE,
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
