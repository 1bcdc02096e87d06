//! `config.json` of synthesised checkpoints: the requested sizes, and otherwise values small enough to load anywhere.

use serde_json::{Map, Value, json};

use super::{SynthConfig, SynthFormat};
use crate::Family;
use crate::family::{LayerRule, SharedWidth, StoredLayout};

/// Size of the vocabulary, and so the number of rows of token tables.
pub(super) const VOCAB: usize = 128;

/// Config fields that a family's model needs besides sizes.
const EXTRAS: &[(&str, &str)] = &[
    ("mixtral", r#"{"head_dim": 16, "router_jitter_noise": 0.0}"#),
    ("olmoe", r#"{"norm_topk_prob": false}"#),
    (
        "qwen2_moe",
        r#"{"norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16}"#,
    ),
    (
        "qwen3_moe",
        r#"{"norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16}"#,
    ),
    (
        "qwen3_next",
        concat!(
            r#"{"norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 16, "#,
            r#""linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "#,
            r#""linear_num_key_heads": 2, "linear_num_value_heads": 4}"#
        ),
    ),
    (
        "qwen3_5_moe_text",
        concat!(
            r#"{"head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "#,
            r#""linear_num_key_heads": 2, "linear_num_value_heads": 4}"#
        ),
    ),
    (
        "deepseek_v2",
        concat!(
            r#"{"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": false, "#,
            r#""scoring_func": "softmax", "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "#,
            r#""qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}"#
        ),
    ),
    (
        "deepseek_v3",
        concat!(
            r#"{"routed_scaling_factor": 2.5, "norm_topk_prob": true, "q_lora_rank": 32, "kv_lora_rank": 32, "#,
            r#""qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}"#
        ),
    ),
    (
        "deepseek_v4",
        concat!(
            r#"{"routed_scaling_factor": 1.5, "norm_topk_prob": true, "scoring_func": "sqrtsoftplus", "#,
            r#""swiglu_limit": 10.0, "head_dim": 16, "q_lora_rank": 32, "o_lora_rank": 32, "o_groups": 2, "#,
            r#""index_head_dim": 32, "index_n_heads": 4, "mlp_bias": false}"#
        ),
    ),
    ("dots1", r#"{"routed_scaling_factor": 2.0, "norm_topk_prob": true, "head_dim": 16}"#),
    (
        "ernie4_5_moe",
        r#"{"moe_norm_min": 1e-12, "moe_layer_interval": 1, "use_bias": false, "head_dim": 16}"#,
    ),
    ("glm4_moe", r#"{"routed_scaling_factor": 1.7, "norm_topk_prob": true, "head_dim": 16}"#),
    ("gpt_oss", r#"{"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "head_dim": 16}"#),
    ("granitemoe", r#"{"attention_multiplier": 1.0}"#),
    ("llama4_text", r#"{"head_dim": 16, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1}"#),
    ("minimax_m2", r#"{"head_dim": 16}"#),
    ("phimoe", r#"{"router_jitter_noise": 0.01, "input_jitter_noise": 0.0}"#),
    ("afmoe", r#"{"route_scale": 2.826, "head_dim": 16}"#),
    (
        "bailing_hybrid",
        concat!(
            r#"{"routed_scaling_factor": 2.5, "norm_topk_prob": true, "q_lora_rank": 32, "kv_lora_rank": 32, "#,
            r#""qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 16}"#
        ),
    ),
    ("exaone_moe", r#"{"routed_scaling_factor": 2.5, "norm_topk_prob": true}"#),
    ("hunyuan_v1_moe", r#"{"head_dim": 16}"#),
    ("hy_v3", r#"{"router_scaling_factor": 2.826, "head_dim": 16}"#),
    (
        "jamba",
        concat!(
            r#"{"expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2, "attn_layer_offset": 1, "#,
            r#""use_mamba_kernels": false, "mamba_d_state": 4}"#
        ),
    ),
    (
        "kimi_linear",
        concat!(
            r#"{"routed_scaling_factor": 2.446, "moe_renormalize": true, "q_lora_rank": 32, "kv_lora_rank": 32, "#,
            r#""qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "#,
            r#""linear_head_dim": 16, "linear_num_heads": 4}"#
        ),
    ),
    ("laguna", r#"{"moe_routed_scaling_factor": 2.5, "head_dim": 16}"#),
    ("lfm2_moe", r#"{"norm_topk_prob": true, "routed_scaling_factor": 1.5, "use_expert_bias": true}"#),
    ("mellum", r#"{"norm_topk_prob": true, "head_dim": 16}"#),
    (
        "mimo_v2_flash",
        r#"{"norm_topk_prob": true, "routed_scaling_factor": null, "head_dim": 16, "v_head_dim": 16}"#,
    ),
    ("minimax", r#"{"head_dim": 16}"#),
    (
        "mistral4",
        concat!(
            r#"{"routed_scaling_factor": 1.5, "norm_topk_prob": true, "q_lora_rank": 32, "kv_lora_rank": 32, "#,
            r#""qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4, "head_dim": 32}"#
        ),
    ),
    ("solar_open", r#"{"routed_scaling_factor": 1.5, "norm_topk_prob": true, "head_dim": 16}"#),
];

pub(super) fn names() -> Vec<&'static str> {
    EXTRAS.iter().map(|(name, _)| *name).collect()
}

/// Number of dense layers at the start, in families that have them.
pub(super) fn dense_layers(config: &SynthConfig, family: &Family) -> usize {
    match family.layers {
        LayerRule::FirstDense { .. } | LayerRule::Window if config.layers > 1 => 1,
        _ => 0,
    }
}

/// Number of layers at the start that route by token id.
pub(super) fn hashed_layers(config: &SynthConfig, family: &Family) -> usize {
    if matches!(family.layers, LayerRule::Hashed { .. }) { (config.layers - 1).min(3) } else { 0 }
}

/// The number of groups of experts, and the number of groups from which a token chooses its experts.
fn groups(config: &SynthConfig) -> (usize, usize) {
    let (groups, kept) = (4, 2);
    let size = config.experts / groups;
    let fits = config.experts.is_multiple_of(groups) && size >= 2 && kept * size >= config.top_k;
    if fits { (groups, kept) } else { (1, 1) }
}

pub(super) fn config_json(config: &SynthConfig, family: &Family) -> Value {
    let dtype = match config.format {
        SynthFormat::F16 => "float16",
        SynthFormat::F32 => "float32",
        _ => "bfloat16",
    };
    let mut map = object(json!({
        "architectures": [family.architecture],
        "model_type": family.model_types[0],
        "dtype": dtype,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "intermediate_size": 2 * config.width,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }));
    let extras =
        EXTRAS.iter().find(|(name, _)| *name == family.name).expect("the family was checked before").1;
    map.append(&mut object(serde_json::from_str(extras).expect("constant JSON")));
    map.insert(family.experts[0].into(), config.experts.into());
    let top_k = family.top_k.first().unwrap_or(&"num_experts_per_tok");
    map.insert((*top_k).into(), config.top_k.into());
    map.insert(family.width[0].into(), config.width.into());
    match family.layers {
        LayerRule::FirstDense { count: Some(count), .. } => {
            map.insert(count.into(), dense_layers(config, family).into());
        }
        LayerRule::FirstDense { count: None, .. } => {
            let dense = dense_layers(config, family);
            let kind = |layer| if layer < dense { "dense" } else { "sparse" };
            map.insert("mlp_layer_types".into(), (0..config.layers).map(kind).collect::<Vec<_>>().into());
        }
        LayerRule::Window => {
            map.insert("moe_layer_start_index".into(), dense_layers(config, family).into());
            map.insert("moe_layer_end_index".into(), (config.layers - 1).into());
        }
        LayerRule::Hashed { .. } => {
            let hashed = hashed_layers(config, family);
            let kinds: Vec<_> =
                (0..config.layers).map(|i| if i < hashed { "hash_moe" } else { "moe" }).collect();
            map.insert("mlp_layer_types".into(), kinds.into());
            // The reference implementation treats this field as another name of the experts' width.
            map.remove("intermediate_size");
        }
        _ => {}
    }
    if let Some(rule) = family.routing.groups {
        let (groups, kept) = groups(config);
        map.insert(rule.count[0].into(), groups.into());
        map.insert("topk_group".into(), kept.into());
    }
    let other_attention = match family.name {
        "bailing_hybrid" | "kimi_linear" | "qwen3_next" | "qwen3_5_moe_text" => Some("linear_attention"),
        "lfm2_moe" => Some("conv"),
        _ => None,
    };
    if let Some(other) = other_attention {
        let kind = |layer| if layer + 1 == config.layers { "full_attention" } else { other };
        map.insert("layer_types".into(), (0..config.layers).map(kind).collect::<Vec<_>>().into());
    }
    match family.shared.map(|shared| shared.width) {
        Some(SharedWidth::Field(field)) => {
            map.insert(field.into(), config.width.into());
        }
        Some(SharedWidth::Count { field, .. }) => {
            map.insert(field.into(), 1.into());
        }
        Some(SharedWidth::SameAsExperts) | None => {}
    }
    if let Some(quantization) = quantization(config, family) {
        map.insert("quantization_config".into(), quantization);
    }
    Value::Object(map)
}

/// Whether FP8 weights get one scale per output channel, as in this family's releases.
pub(super) fn fp8_by_channel(family: &Family) -> bool {
    family.stored == StoredLayout::FusedTransposed && family.weight_on_input
}

fn quantization(config: &SynthConfig, family: &Family) -> Option<Value> {
    match config.format {
        SynthFormat::Fp8 if fp8_by_channel(family) => Some(json!({
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true, "dynamic": false},
            }},
            "ignore": ["re:.*router", "lm_head"],
        })),
        SynthFormat::Fp8 => Some(json!({
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "activation_scheme": "dynamic",
        })),
        SynthFormat::Mxfp4 => Some(json!({"quant_method": "mxfp4"})),
        SynthFormat::Mxfp8 => {
            let weights = json!({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                "symmetric": true, "dynamic": false, "scale_dtype": "torch.uint8"});
            Some(compressed_tensors("mxfp8-quantized", &weights, &["lm_head", "re:.*gate$"]))
        }
        SynthFormat::Int4 => {
            let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": config.int4_group(),
                "symmetric": true, "dynamic": false, "actorder": null});
            let ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_expert.*", "re:.*gate$"];
            Some(compressed_tensors("pack-quantized", &weights, &ignore))
        }
        SynthFormat::Nvfp4 => Some(json!({
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "kv_cache_quant_algo": "FP8",
            "ignore": ["lm_head", "model.layers.*.mlp.gate", "model.layers.*.self_attn*"],
            "producer": {"name": "modelopt"},
        })),
        SynthFormat::Int4Gptq => Some(json!({
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": 4,
            "group_size": config.int4_group(),
            "desc_act": false,
            "sym": false,
            "pack_dtype": "int32",
            "lm_head": false,
            "dynamic": {"-:.*gate$": {}},
        })),
        SynthFormat::Int4Awq => Some(json!({
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": config.int4_group(),
            "zero_point": true,
            "modules_to_not_convert": ["gate"],
        })),
        SynthFormat::Bf16 | SynthFormat::F16 | SynthFormat::F32 => None,
    }
}

fn compressed_tensors(format: &str, weights: &Value, ignore: &[&str]) -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}},
        "ignore": ignore,
        "quantization_status": "compressed",
    })
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}
