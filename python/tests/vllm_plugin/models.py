"""Tiny random models of several families, with sizes that vLLM's own kernels for CPUs accept."""

import torch
import transformers

COMMON = dict(
    vocab_size=128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
PLAIN = dict(num_experts=8, num_experts_per_tok=4, moe_intermediate_size=64, intermediate_size=96)
DEEP = dict(n_routed_experts=8, num_experts_per_tok=4, moe_intermediate_size=64, intermediate_size=96,
            first_k_dense_replace=1, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5)
FAMILIES = {
    "qwen3_moe": dict(**PLAIN, norm_topk_prob=True),
    "olmoe": dict(num_experts=8, num_experts_per_tok=4, intermediate_size=64, num_key_value_heads=4),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=64),
    "qwen2_moe": dict(**PLAIN, shared_expert_intermediate_size=64),
    "glm4_moe": dict(**DEEP, norm_topk_prob=True),
    "granitemoe": dict(num_local_experts=8, num_experts_per_tok=4, intermediate_size=64),
    "gpt_oss": dict(num_local_experts=8, num_experts_per_tok=4, intermediate_size=64, sliding_window=64),
}


def make_checkpoint(family, folder):
    """Writes a random model in float32. Weights are large enough that its layers differ from the identity."""
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
            elif not name.endswith("norm.weight"):
                parameter.normal_(0.0, 0.1)
    model.float().save_pretrained(folder)


def prompts(count=4, seed=None):
    """Prompts of different lengths."""
    generator = torch.Generator()
    if seed is not None:
        generator.manual_seed(seed)
    else:
        generator.seed()
    return [torch.randint(3, 128, (5 + 7 * i,), generator=generator).tolist() for i in range(count)]
