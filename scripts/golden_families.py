"""The families and sizes of golden.py: options that make models tiny and exercise every config field that a family uses."""

import torch
import transformers

TINY = dict(
    vocab_size=97, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
           num_key_value_heads=4, head_dim=16)
LINEAR = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
LOCAL = dict(experts="num_local_experts", k="num_experts_per_tok", width="intermediate_size")
PLAIN = dict(experts="num_experts", k="num_experts_per_tok", width="moe_intermediate_size")
DEEP = dict(experts="n_routed_experts", k="num_experts_per_tok", width="moe_intermediate_size")
ERNIE = dict(experts="moe_num_experts", k="moe_k", width="moe_intermediate_size")
KIMI = dict(experts="num_local_experts", k="num_experts_per_tok", width="moe_intermediate_size")
ROPE = dict(rope_type="default", rope_theta=1e4)

# For each family: the names of its sizes, further options of the model, and its variants: (name, sizes, overrides).
# Sizes are (hidden, experts, k, width).
FAMILIES = {
    "mixtral": (LOCAL, {}, []),
    "olmoe": ({**PLAIN, "width": "intermediate_size"}, {}, [("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True))]),
    "qwen2_moe": (PLAIN, dict(shared_expert_intermediate_size=56, intermediate_size=96), [
        ("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True)),
        ("steps", (64, 12, 4, 40), dict(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])),
    ]),
    "qwen3_moe": (PLAIN, dict(intermediate_size=96), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
        ("renorm", (64, 12, 4, 40), dict(norm_topk_prob=True)),
        ("steps", (64, 12, 4, 40), dict(num_hidden_layers=6, decoder_sparse_step=3, mlp_only_layers=[0])),
    ]),
    "qwen3_next": (PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, mlp_only_layers=[1])),
    ]),
    "qwen3_5_moe_text": (PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR), []),
    "deepseek_v2": (DEEP, dict(topk_method="greedy", first_k_dense_replace=1, **MLA), [
        ("groups", (64, 24, 5, 40), dict(topk_method="group_limited_greedy", n_group=6, topk_group=2,
                                         routed_scaling_factor=16.0, n_shared_experts=1)),
        ("norm", (64, 24, 5, 40), dict(topk_method="group_limited_greedy", n_group=3, topk_group=1,
                                       norm_topk_prob=True, mlp_bias=True)),
    ]),
    "deepseek_v3": (DEEP, dict(n_group=1, topk_group=1, first_k_dense_replace=1, **MLA), [
        ("groups", (64, 24, 6, 40), dict(n_group=6, topk_group=3, routed_scaling_factor=2.827, n_shared_experts=2,
                                         num_hidden_layers=3)),
        ("norenorm", (64, 24, 3, 40), dict(n_group=4, topk_group=2, norm_topk_prob=False, first_k_dense_replace=0)),
    ]),
    "deepseek_v4": (DEEP, dict(num_hidden_layers=4, q_lora_rank=32, o_lora_rank=32, o_groups=2, index_head_dim=32,
                               index_n_heads=4, layer_types=["heavily_compressed_attention"] * 3 +
                               ["compressed_sparse_attention"]), [
        ("sigmoid", (64, 12, 4, 40), dict(scoring_func="sigmoid", swiglu_limit=0.7, routed_scaling_factor=2.5)),
        ("hash1", (64, 12, 4, 40), dict(mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"], n_shared_experts=2,
                                        norm_topk_prob=False)),
        ("bias", (64, 12, 4, 40), dict(mlp_bias=True)),
    ]),
    "dots1": (DEEP, dict(n_shared_experts=2, first_k_dense_replace=1), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, routed_scaling_factor=3.0)),
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, norm_topk_prob=True)),
    ]),
    "ernie4_5_moe": (ERNIE, {}, [
        ("window", (64, 12, 4, 40), dict(num_hidden_layers=7, moe_layer_start_index=2, moe_layer_end_index=5,
                                         moe_layer_interval=2, moe_num_shared_experts=0)),
        ("bias", (64, 12, 4, 40), dict(use_bias=True, moe_layer_end_index=-1, moe_norm_min=0.75)),
    ]),
    "glm4_moe": (DEEP, dict(first_k_dense_replace=1), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=3, routed_scaling_factor=2.5)),
    ]),
    "gpt_oss": (LOCAL, {}, [
        ("clamp", (64, 12, 4, 64), dict(swiglu_limit=0.5, swiglu_alpha=1.3)),
        ("square", (64, 12, 4, 32), {}),
        ("even", (64, 12, 4, 64), {}),
    ]),
    "granitemoe": (LOCAL, {}, [("square", (64, 12, 4, 32), {}), ("even", (64, 12, 4, 64), {})]),
    "llama4_text": (LOCAL, dict(intermediate_size_mlp=96), [
        ("square", (64, 12, 2, 32), {}),
        ("even", (64, 12, 4, 64), {}),
        ("step", (64, 12, 1, 40), dict(num_hidden_layers=4, interleave_moe_layer_step=2)),
        ("listed", (64, 12, 1, 40), dict(num_hidden_layers=4, moe_layers=[0, 3])),
    ]),
    "minimax_m2": (LOCAL, {}, []),
    "afmoe": (PLAIN, dict(num_dense_layers=1, num_shared_experts=2), [
        ("scale", (64, 12, 4, 40), dict(route_scale=2.826, num_dense_layers=0, num_shared_experts=1)),
    ]),
    "bailing_hybrid": (KIMI, dict(n_group=1, topk_group=1, num_hidden_layers=3, first_k_dense_replace=1,
                                  layer_types=["linear_attention", "linear_attention", "full_attention"], **MLA), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=2, first_k_dense_replace=0)),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, routed_scaling_factor=1.5)),
    ]),
    "exaone_moe": (PLAIN, dict(num_key_value_heads=2), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, num_shared_experts=2, routed_scaling_factor=1.5,
                                         mlp_layer_types=["sparse", "dense"])),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, first_k_dense_replace=0)),
    ]),
    "hunyuan_v1_moe": ({**LOCAL, "experts": "num_experts", "k": "moe_topk"}, {}, [
        ("listed", (64, 12, 4, 40), dict(moe_topk=[4, 4])),
    ]),
    "hy_v3": (PLAIN, {}, [
        ("layers", (64, 12, 4, 40), dict(mlp_layer_types=["sparse", "dense"], num_shared_experts=2,
                                         router_scaling_factor=1.5, enable_moe_fp32_combine=False)),
        ("bias", (64, 12, 4, 40), dict(mlp_bias=True)),
    ]),
    "jamba": ({**PLAIN, "width": "intermediate_size"}, dict(use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1,
                                                           mamba_d_state=4), [
        ("period", (64, 12, 4, 40), dict(num_hidden_layers=5, expert_layer_period=3, expert_layer_offset=1)),
    ]),
    "kimi_linear": (KIMI, dict(linear_head_dim=16, linear_num_heads=4, layer_types=["linear_attention", "full_attention"],
                               **MLA), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=2,
                                         mlp_layer_types=["sparse", "dense"])),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, routed_scaling_factor=1.5)),
    ]),
    "laguna": (PLAIN, dict(shared_expert_intermediate_size=56), [
        ("scale", (64, 12, 4, 40), dict(moe_routed_scaling_factor=2.5, mlp_layer_types=["sparse", "sparse"])),
    ]),
    "lfm2_moe": (PLAIN, dict(num_dense_layers=1, layer_types=["conv", "full_attention"]), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, routed_scaling_factor=2.5, num_dense_layers=0)),
    ]),
    "mellum": (PLAIN, dict(layer_types=["full_attention", "sliding_attention"]), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, mlp_layer_types=["dense", "sparse"])),
    ]),
    "mimo_v2_flash": (DEEP, dict(layer_types=["full_attention", "sliding_attention"], v_head_dim=16), [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, routed_scaling_factor=1.5,
                                         mlp_layer_types=["sparse", "dense"])),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
    ]),
    "minimax": (LOCAL, {}, []),
    "mistral4": (DEEP, {**MLA, "head_dim": 32}, [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5,
                                         first_k_dense_replace=1)),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
    ]),
    "solar_open": (DEEP, {}, [
        ("groups", (64, 24, 4, 40), dict(n_group=4, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.5)),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
    ]),
    "phimoe": (LOCAL, {}, [
        ("jitter", (64, 12, 2, 40), dict(router_jitter_noise=0.4)),
        ("nojitter", (64, 12, 2, 40), dict(router_jitter_noise=0.0)),
    ]),
}
# Variants of every family: (name, sizes, stored dtype, shard size).
COMMON = [
    ("odd", (72, 7, 3, 40), torch.float32, "50GB"),
    ("one", (64, 6, 1, 24), torch.float16, "50GB"),
    ("all", (32, 8, 8, 24), torch.float32, "50GB"),
    ("many", (128, 66, 8, 56), torch.bfloat16, "100KB"),
]
# Checkpoints whose text model is nested in a multimodal one: text family, names of its sizes, further options, variants.
NESTED = {
    "qwen3_vl_moe": ("qwen3_vl_moe_text", PLAIN, dict(intermediate_size=96), []),
    "qwen3_5_moe": ("qwen3_5_moe_text", PLAIN, dict(shared_expert_intermediate_size=24, num_hidden_layers=4, **LINEAR), []),
    "llama4": ("llama4_text", LOCAL, dict(intermediate_size_mlp=96), []),
    "glm4v_moe": ("glm4v_moe_text", DEEP, dict(first_k_dense_replace=1, head_dim=64, rope_parameters=dict(
        ROPE, mrope_section=[8, 12, 12], partial_rotary_factor=1.0)), []),
    "qwen3_omni_moe_thinker": ("qwen3_omni_moe_text", PLAIN, dict(
        intermediate_size=96, rope_parameters=dict(ROPE, mrope_section=[2, 3, 3])), [
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False, num_hidden_layers=3, mlp_only_layers=[1])),
        ("many", (64, 66, 8, 56), {}),
    ]),
    "glm5_next": ("glm5_next_text", DEEP, dict(
        mlp_layer_types=["dense", "sparse"], layer_types=["linear_attention", "indexed_attention"], index_n_heads=4,
        index_head_dim=32, index_topk=8, index_kpool=2, linear_head_dim=16, linear_num_heads=4,
        **{**MLA, "qk_rope_head_dim": 0, "head_dim": 0}), [
        ("clamp", (64, 24, 4, 40), dict(swiglu_limit=0.5, n_group=4, topk_group=2, n_shared_experts=2,
                                        mlp_layer_types=["sparse", "sparse"], routed_scaling_factor=1.5)),
        ("norenorm", (64, 12, 4, 40), dict(norm_topk_prob=False)),
        ("many", (64, 66, 8, 56), dict(routed_scaling_factor=16.0)),
    ]),
    "minimax_m3_vl": ("minimax_m3_vl_text", LOCAL, dict(
        shared_intermediate_size=56, dense_intermediate_size=96, rotary_dim=8, mlp_layer_types=["dense", "sparse"]), [
        ("clamp", (64, 12, 4, 40), dict(swiglu_limit=0.5, swiglu_alpha=1.3, routed_scaling_factor=1.5,
                                        mlp_layer_types=["sparse", "dense"])),
        ("many", (64, 66, 8, 56), dict(shared_intermediate_size=24)),
        ("all", (64, 8, 8, 24), dict(mlp_layer_types=["sparse", "sparse"])),
    ]),
}
ALIASES = {
    "flex_olmo": ({**PLAIN, "width": "intermediate_size"}, dict(norm_topk_prob=True, num_hidden_layers=3)),
    "granitemoeshared": (LOCAL, dict(shared_intermediate_size=24)),
    "granitemoehybrid": (LOCAL, dict(shared_intermediate_size=24, layer_types=["mamba", "attention"], mamba_n_heads=8,
                                     mamba_d_state=16, mamba_d_head=16)),
    "deepseek_v32": (DEEP, dict(n_group=2, topk_group=1, first_k_dense_replace=1, index_n_heads=4, index_head_dim=32,
                                index_topk=8, **MLA)),
    "glm4_moe_lite": (DEEP, dict(mlp_layer_types=["dense", "sparse"], **MLA)),
    "glm_moe_dsa": (DEEP, dict(first_k_dense_replace=1, index_n_heads=4, index_head_dim=32, index_topk=8, **MLA)),
}
# Families whose checkpoints call the projections of separate experts w1, w3 and w2.
NUMBERED = ("mixtral", "minimax", "minimax_m2", "phimoe", "deepseek_v4", "kimi_linear", "lfm2_moe")


def sized(names, sizes):
    hidden, experts, k, width = sizes
    return {"hidden_size": hidden, names["experts"]: experts, names["k"]: k, names["width"]: width}


def nested_config(outer, text_type, text):
    inner = transformers.AutoConfig.for_model(text_type, **text)
    vision = {
        "qwen3_vl_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                             deepstack_visual_indexes=[0]),
        "qwen3_5_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64),
        "llama4": dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
                       vision_output_dim=32, projector_input_dim=32, projector_output_dim=32, image_size=28,
                       patch_size=14),
        "glm4v_moe": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64),
        "glm5_next": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                          projection_intermediate_size=32),
        "minimax_m3_vl": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2),
        "qwen3_omni_moe_thinker": dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64,
                                       deepstack_visual_indexes=[0]),
    }[outer]
    further = {
        "qwen3_omni_moe_thinker": dict(
            vision_start_token_id=151652,
            audio_config=dict(d_model=32, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=32, output_dim=64,
                              downsample_hidden_size=8)),
    }.get(outer, {})
    return transformers.AutoConfig.for_model(outer, text_config=inner.to_dict(), vision_config=vision, **further)


# Values of options for random checkpoints.
CHOICES = {
    "norm_topk_prob": [False, True],
    "routed_scaling_factor": [0.5, 1.0, 2.5, 16.0],
    "router_jitter_noise": [0.0, 0.01, 0.1, 1.0],
    "swiglu_limit": [0.3, 1.0, 7.0],
    "first_k_dense_replace": [0, 1],
    "mlp_only_layers": [[], [0], [1]],
    "moe_num_shared_experts": [0, 1, 3],
    "n_shared_experts": [1, 2],
    "num_shared_experts": [1, 2],
    "num_dense_layers": [0, 1],
    "moe_renormalize": [False, True],
    "route_scale": [0.5, 2.826],
    "router_scaling_factor": [0.5, 2.826],
    "moe_routed_scaling_factor": [0.5, 2.5],
    "shared_intermediate_size": [8, 40],
    "shared_expert_intermediate_size": [8, 40],
    "moe_norm_min": [1e-12, 0.5],
    "use_bias": [False, True],
    "mlp_bias": [False, True],
    "scoring_func": ["sqrtsoftplus", "sigmoid"],
    "swiglu_alpha": [0.7, 1.702],
}
