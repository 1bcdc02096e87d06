//! Families whose gates take a softmax, over all logits or over the chosen experts' logits.

use super::{LOCAL, PLAIN, SUM, SUM_EPSILON, first_dense, norm_topk_prob};
use crate::family::{
    ActivationRule, Family, GateNames, GroupRule, LayerRule, NormaliseRule, Routing, ScoreRule, SharedRule,
    SharedWidth, StoredLayout,
};
use crate::gate_spec::GroupScore;

pub(super) const MIXTRAL: Family = Family {
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

/// OLMoE and FlexOlmo.
pub(super) const OLMOE: Family = Family {
    name: "olmoe",
    model_types: &["olmoe", "flex_olmo"],
    architecture: "OlmoeForCausalLM",
    width: &["intermediate_size"],
    routing: Routing { normalise: norm_topk_prob(false, SUM), ..PLAIN.routing },
    ..PLAIN
};

pub(super) const QWEN_SHARED: SharedRule = SharedRule {
    module: "shared_expert",
    width: SharedWidth::Field("shared_expert_intermediate_size"),
    gate: Some("shared_expert_gate.weight"),
    bias_field: None,
    numbered: false,
};

pub(super) const QWEN2_MOE: Family = Family {
    name: "qwen2_moe",
    model_types: &["qwen2_moe"],
    architecture: "Qwen2MoeForCausalLM",
    layers: LayerRule::SparseStep,
    routing: Routing { normalise: norm_topk_prob(false, SUM), ..PLAIN.routing },
    shared: Some(QWEN_SHARED),
    ..PLAIN
};

pub(super) const QWEN3_MOE: Family = Family {
    name: "qwen3_moe",
    model_types: &["qwen3_moe"],
    architecture: "Qwen3MoeForCausalLM",
    shared: None,
    ignored: &["router_jitter_noise", "shared_expert_intermediate_size"],
    ..QWEN2_MOE
};

/// The text part of Qwen3-VL-MoE.
pub(super) const QWEN3_VL_MOE: Family = Family {
    name: "qwen3_vl_moe",
    model_types: &["qwen3_vl_moe_text", "qwen3_vl_moe"],
    architecture: "Qwen3VLMoeForConditionalGeneration",
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    stored: StoredLayout::FusedTransposed,
    ignored: &["router_jitter_noise", "shared_expert_intermediate_size", "norm_topk_prob"],
    ..QWEN3_MOE
};

/// The text part of Qwen3-Omni's thinker. The talker's blocks are not served.
pub(super) const QWEN3_OMNI_MOE: Family = Family {
    name: "qwen3_omni_moe_text",
    model_types: &["qwen3_omni_moe_text"],
    architecture: "Qwen3OmniMoeThinkerForConditionalGeneration",
    routing: Routing { normalise: norm_topk_prob(true, SUM), ..PLAIN.routing },
    ..QWEN3_MOE
};

pub(super) const QWEN3_NEXT: Family = Family {
    name: "qwen3_next",
    model_types: &["qwen3_next"],
    architecture: "Qwen3NextForCausalLM",
    routing: Routing { normalise: norm_topk_prob(true, SUM), ..PLAIN.routing },
    ..QWEN2_MOE
};

pub(super) const QWEN3_5_MOE: Family = Family {
    name: "qwen3_5_moe_text",
    model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    architecture: "Qwen3_5MoeForCausalLM",
    layers: LayerRule::All,
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    only: &[("mlp_only_layers", &["[]"]), ("decoder_sparse_step", &["1"])],
    ignored: &["router_jitter_noise", "norm_topk_prob"],
    ..QWEN2_MOE
};

pub(super) const DEEPSEEK_SHARED: SharedRule = SharedRule {
    module: "shared_experts",
    width: SharedWidth::Count { field: "n_shared_experts", default: 1 },
    gate: None,
    bias_field: None,
    numbered: false,
};

pub(super) const DEEPSEEK_V2: Family = Family {
    name: "deepseek_v2",
    model_types: &["deepseek_v2"],
    architecture: "DeepseekV2ForCausalLM",
    experts: &["n_routed_experts", "num_local_experts", "num_experts"],
    layers: first_dense(0),
    routing: Routing {
        scores: ScoreRule::Softmax,
        groups: Some(GroupRule { by: GroupScore::Max, count: &["n_group"] }),
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

pub(super) const ERNIE4_5_MOE: Family = Family {
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
        numbered: false,
    }),
    only: &[
        ("moe_gate", &["topk", "top2_fused"]),
        ("moe_use_aux_free", &["true"]),
        ("moe_gate_act", &["softmax"]),
    ],
    ignored: &["router_jitter_noise", "moe_capacity", "moe_layer_use_dense_layer"],
    ..PLAIN
};

pub(super) const GPT_OSS: Family = Family {
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

/// Granite 3 and 4. The shared MLP of the types `granitemoeshared` and `granitemoehybrid` lies beside the block, in the decoder
/// layer, and is not part of it.
pub(super) const GRANITEMOE: Family = Family {
    name: "granitemoe",
    model_types: &["granitemoe", "granitemoeshared", "granitemoehybrid"],
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

pub(super) const PHIMOE: Family = Family {
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

/// MiniMax-Text-01 and MiniMax-M1.
pub(super) const MINIMAX: Family = Family {
    name: "minimax",
    model_types: &["minimax", "minimax_text_01", "minimax_m1"],
    architecture: "MiniMaxForCausalLM",
    only: &[("shared_intermediate_size", &["0"])],
    ignored: &["router_jitter_noise", "shared_moe_mode"],
    ..MIXTRAL
};

/// Mellum 2.
pub(super) const MELLUM: Family = Family {
    name: "mellum",
    model_types: &["mellum"],
    architecture: "MellumForCausalLM",
    layers: LayerRule::FirstDense { count: None, flags: None, default: 0 },
    routing: Routing { normalise: norm_topk_prob(true, SUM), ..PLAIN.routing },
    ..QWEN3_MOE
};

/// Hunyuan-A13B. Its config has lists with the same value for every layer.
pub(super) const HUNYUAN_V1_MOE: Family = Family {
    name: "hunyuan_v1_moe",
    model_types: &["hunyuan_v1_moe"],
    architecture: "HunYuanMoEV1ForCausalLM",
    top_k: &["moe_topk", "num_experts_per_tok"],
    width: &["intermediate_size", "moe_intermediate_size"],
    routing: Routing { normalise: NormaliseRule::Always(SUM), ..PLAIN.routing },
    gate: GateNames { weight: &["gate.wg.weight"], ..PLAIN.gate },
    shared: Some(SharedRule {
        module: "shared_mlp",
        width: SharedWidth::SameAsExperts,
        gate: None,
        bias_field: None,
        numbered: false,
    }),
    only: &[
        ("group_limited_greedy", &["false"]),
        ("moe_layer_num_skipped", &["0"]),
        ("norm_topk_prob", &["true"]),
        ("num_shared_expert", &["1"]),
        ("routed_scaling_factor", &["1", "1.0"]),
        ("use_mixed_mlp_moe", &["true"]),
    ],
    // No token is dropped at inference, and without `group_limited_greedy` there are no groups.
    ignored: &["router_jitter_noise", "moe_drop_tokens", "moe_random_routing_dropped_token", "topk_group"],
    ..PLAIN
};

/// Jamba 1.5 to 1.7.
pub(super) const JAMBA: Family = Family {
    name: "jamba",
    model_types: &["jamba"],
    architecture: "JambaForCausalLM",
    block: &["feed_forward"],
    width: &["intermediate_size"],
    layers: LayerRule::Period { period: 2, offset: 1 },
    gate: GateNames { weight: &["router.weight"], ..PLAIN.gate },
    ..PLAIN
};

/// Mistral Small 4: the block of DeepSeek-V3 with a softmax and no correction bias.
pub(super) const MISTRAL4: Family = Family {
    name: "mistral4",
    model_types: &["mistral4"],
    architecture: "Mistral4ForCausalLM",
    routing: Routing {
        groups: Some(GroupRule { by: GroupScore::TopTwoSum, count: &["n_group"] }),
        normalise: norm_topk_prob(true, SUM_EPSILON),
        ..DEEPSEEK_V2.routing
    },
    shared: Some(DEEPSEEK_SHARED),
    stored: StoredLayout::Fused,
    ignored: &["router_jitter_noise"],
    ..DEEPSEEK_V2
};
