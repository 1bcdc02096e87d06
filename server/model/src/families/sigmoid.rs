//! Families whose gates score every expert by itself, in most of them by a sigmoid.

use super::softmax::{DEEPSEEK_SHARED, DEEPSEEK_V2};
use super::{LOCAL, PLAIN, SUM, SUM_EPSILON, first_dense, norm_topk_prob};
use crate::family::{
    ActivationRule, Family, GateNames, GroupRule, LayerRule, NormaliseRule, Routing, ScoreRule, SharedRule,
    SharedWidth, StoredLayout,
};
use crate::gate_spec::{GroupScore, Normalise};

/// DeepSeek-V3 and the models that share its block: R1, V3.1, V3.2, Kimi-K2.
pub(super) const DEEPSEEK_V3: Family = Family {
    name: "deepseek_v3",
    model_types: &["deepseek_v3", "deepseek_v32", "kimi_k2"],
    architecture: "DeepseekV3ForCausalLM",
    layers: first_dense(3),
    routing: Routing {
        scores: ScoreRule::Sigmoid,
        groups: Some(GroupRule { by: GroupScore::TopTwoSum, count: &["n_group"] }),
        normalise: norm_topk_prob(true, SUM_EPSILON),
        scale: Some(("routed_scaling_factor", 2.5)),
    },
    gate: GateNames { correction: &["gate.e_score_correction_bias"], ..PLAIN.gate },
    shared: Some(DEEPSEEK_SHARED),
    only: &[("scoring_func", &["sigmoid"]), ("topk_method", &["noaux_tc"]), ("moe_layer_freq", &["1"])],
    ignored: &["router_jitter_noise"],
    ..DEEPSEEK_V2
};

pub(super) const DEEPSEEK_V4: Family = Family {
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
        numbered: true,
        ..DEEPSEEK_SHARED
    }),
    stored: StoredLayout::Numbered,
    only: &[("topk_method", &["noaux_tc"]), ("moe_layer_freq", &["1"])],
    // The reference implementation has one shared expert and always renormalises, whatever these fields are.
    ignored: &["router_jitter_noise", "norm_topk_prob", "n_shared_experts"],
    ..DEEPSEEK_V2
};

pub(super) const DOTS1: Family = Family {
    name: "dots1",
    model_types: &["dots1"],
    architecture: "Dots1ForCausalLM",
    layers: first_dense(0),
    routing: Routing {
        normalise: norm_topk_prob(false, SUM_EPSILON),
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
pub(super) const GLM4_MOE: Family = Family {
    name: "glm4_moe",
    model_types: &["glm4_moe", "glm4v_moe_text", "glm4_moe_lite"],
    architecture: "Glm4MoeForCausalLM",
    layers: first_dense(1),
    routing: Routing { scale: Some(("routed_scaling_factor", 1.0)), ..DEEPSEEK_V3.routing },
    ..DEEPSEEK_V3
};

/// GLM-5.
pub(super) const GLM_MOE_DSA: Family = Family {
    name: "glm_moe_dsa",
    model_types: &["glm_moe_dsa"],
    architecture: "GlmMoeDsaForCausalLM",
    layers: first_dense(3),
    ..GLM4_MOE
};

pub(super) const LLAMA4: Family = Family {
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
        numbered: false,
    }),
    stored: StoredLayout::FusedTransposed,
    ..PLAIN
};

pub(super) const MINIMAX_M2: Family = Family {
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

/// The shared experts of families that call their number `num_shared_experts`.
const NUM_SHARED: SharedRule =
    SharedRule { width: SharedWidth::Count { field: "num_shared_experts", default: 1 }, ..DEEPSEEK_SHARED };

/// K-EXAONE.
pub(super) const EXAONE_MOE: Family = Family {
    name: "exaone_moe",
    model_types: &["exaone_moe"],
    architecture: "ExaoneMoeForCausalLM",
    experts: &["num_experts", "num_local_experts"],
    layers: LayerRule::FirstDense {
        count: Some("first_k_dense_replace"),
        flags: Some("is_moe_layer"),
        default: 1,
    },
    gate: GateNames {
        correction: &["e_score_correction_bias", "gate.e_score_correction_bias"],
        ..PLAIN.gate
    },
    shared: Some(NUM_SHARED),
    ..DEEPSEEK_V3
};

/// Solar Open.
pub(super) const SOLAR_OPEN: Family = Family {
    name: "solar_open",
    model_types: &["solar_open"],
    architecture: "SolarOpenForCausalLM",
    layers: LayerRule::All,
    only: &[
        ("first_k_dense_replace", &["0"]),
        ("moe_layer_freq", &["1"]),
        ("scoring_func", &["sigmoid"]),
        ("topk_method", &["noaux_tc"]),
    ],
    ..GLM4_MOE
};

/// MiMo-V2-Flash.
pub(super) const MIMO_V2_FLASH: Family = Family {
    name: "mimo_v2_flash",
    model_types: &["mimo_v2_flash"],
    architecture: "MiMoV2FlashForCausalLM",
    layers: LayerRule::FirstDense { count: None, flags: Some("moe_layer_freq"), default: 1 },
    shared: None,
    only: &[("scoring_func", &["sigmoid"]), ("topk_method", &["noaux_tc"]), ("n_shared_experts", &["0"])],
    ..GLM4_MOE
};

/// The text part of GLM-5.3-Flash.
pub(super) const GLM5_NEXT: Family = Family {
    name: "glm5_next_text",
    model_types: &["glm5_next_text", "glm5_next"],
    architecture: "Glm5NextForConditionalGeneration",
    layers: first_dense(3),
    routing: DEEPSEEK_V3.routing,
    activation: ActivationRule::Clamped { default: 10.0 },
    ..GLM4_MOE
};

/// Kimi-Linear.
pub(super) const KIMI_LINEAR: Family = Family {
    name: "kimi_linear",
    model_types: &["kimi_linear"],
    architecture: "KimiLinearForCausalLM",
    block: &["block_sparse_moe", "mlp"],
    experts: &["num_experts", "num_local_experts"],
    top_k: &["num_experts_per_token", "num_experts_per_tok"],
    layers: first_dense(1),
    routing: Routing {
        groups: Some(GroupRule { by: GroupScore::TopTwoSum, count: &["num_expert_group", "n_group"] }),
        normalise: NormaliseRule::If {
            fields: &["moe_renormalize", "norm_topk_prob"],
            default: true,
            how: SUM_EPSILON,
        },
        scale: Some(("routed_scaling_factor", 2.446)),
        ..DEEPSEEK_V3.routing
    },
    shared: Some(NUM_SHARED),
    stored: StoredLayout::Numbered,
    only: &[
        ("moe_layer_freq", &["1"]),
        ("moe_router_activation_func", &["sigmoid"]),
        ("topk_method", &["noaux_tc"]),
        ("use_grouped_topk", &["true"]),
    ],
    ..DEEPSEEK_V3
};

/// Ling and Ring, from version 2.0.
pub(super) const BAILING_HYBRID: Family = Family {
    name: "bailing_hybrid",
    // Files of version 1, whose gates take a softmax, also have the type `bailing_moe`; they lack the correction bias and
    // are refused for that.
    model_types: &["bailing_hybrid", "bailing_moe_v2", "bailing_moe_linear_v2", "bailing_moe"],
    architecture: "BailingHybridForCausalLM",
    block: &["mlp"],
    layers: first_dense(2),
    routing: Routing { scale: Some(("routed_scaling_factor", 2.5)), ..KIMI_LINEAR.routing },
    gate: GateNames { correction: &["gate.expert_bias"], ..PLAIN.gate },
    stored: StoredLayout::Projections,
    only: &[
        ("moe_router_enable_expert_bias", &["true"]),
        ("moe_router_enable_routed_scaling", &["true"]),
        ("moe_router_enable_shared_expert", &["true"]),
        ("score_function", &["sigmoid"]),
        ("scoring_func", &["sigmoid"]),
        ("topk_method", &["noaux_tc"]),
        ("use_expert_bias", &["true"]),
    ],
    // The shared experts are as wide as the routed ones, whatever the third field is.
    ignored: &["router_jitter_noise", "router_dtype", "moe_shared_expert_intermediate_size", "kda_safe_gate"],
    ..KIMI_LINEAR
};

/// Trinity.
pub(super) const AFMOE: Family = Family {
    name: "afmoe",
    model_types: &["afmoe"],
    architecture: "AfmoeForCausalLM",
    layers: LayerRule::FirstDense { count: Some("num_dense_layers"), flags: None, default: 1 },
    routing: Routing {
        scores: ScoreRule::Sigmoid,
        normalise: NormaliseRule::Always(SUM_EPSILON),
        scale: Some(("route_scale", 1.0)),
        ..PLAIN.routing
    },
    gate: GateNames { weight: &["router.gate.weight"], correction: &["expert_bias"], ..PLAIN.gate },
    shared: Some(SharedRule {
        width: SharedWidth::Count { field: "num_shared_experts", default: 2 },
        ..NUM_SHARED
    }),
    only: &[
        ("n_group", &["1"]),
        ("num_expert_groups", &["1"]),
        ("num_limited_groups", &["1"]),
        ("route_norm", &["true"]),
        ("score_func", &["sigmoid"]),
        ("topk_group", &["1"]),
    ],
    ..PLAIN
};

/// Hunyuan 3.
pub(super) const HY_V3: Family = Family {
    name: "hy_v3",
    model_types: &["hy_v3"],
    architecture: "HYV3ForCausalLM",
    width: &["moe_intermediate_size", "expert_hidden_dim"],
    layers: first_dense(1),
    routing: Routing { scale: Some(("router_scaling_factor", 2.826)), ..AFMOE.routing },
    shared: Some(SharedRule { module: "shared_mlp", bias_field: Some("mlp_bias"), ..NUM_SHARED }),
    only: &[
        ("moe_router_enable_expert_bias", &["true"]),
        ("moe_router_use_sigmoid", &["true"]),
        ("route_norm", &["true"]),
    ],
    // Sums are in f32 in any case.
    ignored: &["router_jitter_noise", "enable_moe_fp32_combine"],
    ..AFMOE
};

/// Laguna.
pub(super) const LAGUNA: Family = Family {
    name: "laguna",
    model_types: &["laguna"],
    architecture: "LagunaForCausalLM",
    layers: LayerRule::FirstDense { count: None, flags: None, default: 1 },
    routing: Routing {
        normalise: NormaliseRule::Always(SUM),
        scale: Some(("moe_routed_scaling_factor", 1.0)),
        ..AFMOE.routing
    },
    gate: GateNames {
        correction: &["experts.e_score_correction_bias", "gate.e_score_correction_bias"],
        ..PLAIN.gate
    },
    shared: Some(SharedRule {
        module: "shared_expert",
        width: SharedWidth::Field("shared_expert_intermediate_size"),
        ..NUM_SHARED
    }),
    only: &[
        ("decoder_sparse_step", &["1"]),
        ("mlp_only_layers", &["[0]"]),
        ("moe_apply_router_weight_on_input", &["false"]),
        ("moe_router_logit_softcapping", &["0", "0.0"]),
        ("moe_router_use_sigmoid", &["true"]),
        ("norm_topk_prob", &["true"]),
    ],
    ..PLAIN
};

/// LFM2-MoE.
pub(super) const LFM2_MOE: Family = Family {
    name: "lfm2_moe",
    model_types: &["lfm2_moe"],
    architecture: "Lfm2MoeForCausalLM",
    block: &["feed_forward"],
    layers: LayerRule::FirstDense { count: Some("num_dense_layers"), flags: None, default: 2 },
    routing: Routing {
        scores: ScoreRule::Sigmoid,
        normalise: norm_topk_prob(true, Normalise::Sum { epsilon: 1e-6 }),
        scale: Some(("routed_scaling_factor", 1.0)),
        ..PLAIN.routing
    },
    gate: GateNames { correction: &["expert_bias"], ..PLAIN.gate },
    stored: StoredLayout::Numbered,
    only: &[("use_expert_bias", &["true"])],
    ..PLAIN
};

/// The text part of MiniMax-M3.
pub(super) const MINIMAX_M3: Family = Family {
    name: "minimax_m3_vl_text",
    model_types: &["minimax_m3_vl_text", "minimax_m3_vl"],
    architecture: "MiniMaxM3VLForConditionalGeneration",
    layers: LayerRule::FirstDense { count: None, flags: Some("moe_layer_freq"), default: 0 },
    routing: Routing { scale: Some(("routed_scaling_factor", 2.0)), ..MINIMAX_M2.routing },
    activation: ActivationRule::Oai { alpha: 1.702, limit: 7.0 },
    shared: Some(SharedRule { width: SharedWidth::Field("shared_intermediate_size"), ..DEEPSEEK_SHARED }),
    only: &[("n_shared_experts", &["1"]), ("scoring_func", &["sigmoid"]), ("use_routing_bias", &["true"])],
    ignored: &["router_jitter_noise"],
    ..MINIMAX_M2
};
