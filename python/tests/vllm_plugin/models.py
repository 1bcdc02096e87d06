"""Tiny random models of several families, with sizes that vLLM's own kernels for CPUs accept."""

import json
import subprocess

import torch
import transformers
from safetensors.torch import load_file, save_file

import expertd

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
# Families of vLLM's AFD plugin. Their first layer is dense.
LATENT = dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, kv_lora_rank=32, q_lora_rank=None, num_key_value_heads=4, head_dim=16)
AFD_FAMILIES = {
    "deepseek_v2": dict(**DEEP, **LATENT, topk_method="greedy", norm_topk_prob=False),
    "deepseek_v3": dict(
        **DEEP | dict(n_group=2, routed_scaling_factor=1.5), **LATENT | dict(q_lora_rank=32), norm_topk_prob=True, topk_method="noaux_tc",
        scoring_func="sigmoid",
    ),
}


def make_checkpoint(family, folder):
    """Writes a random model in float32. Weights are large enough that its layers differ from the identity."""
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **{**FAMILIES, **AFD_FAMILIES}[family]})
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


def packed(weight):
    """A matrix in INT4 as compressed-tensors packs it, symmetric in groups of 32 columns, and its dequantised values, exact in bf16."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, -1, 32)
    scales = torch.exp2((groups.abs().amax(-1, keepdim=True) / 7).log2().ceil())
    codes = (groups / scales).round().clamp(-8, 7)
    nibbles = (codes.reshape(rows, -1, 8) + 8).to(torch.int64) << (4 * torch.arange(8))
    words = nibbles.sum(-1)
    tensors = {
        "weight_packed": torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32),
        "weight_scale": scales.squeeze(-1).bfloat16(),
        "weight_shape": torch.tensor([rows, columns]),
    }
    return tensors, (codes * scales).reshape(rows, columns).bfloat16()


def make_quantised(family, dtype, folder, plain):
    """Writes a random checkpoint whose experts are quantised, into `folder`, and its other tensors dequantised into `plain`.

    Attention is quantised in the format int4, and left as it is in others, for which vLLM has no kernels on every processor.
    """
    sizes = ["--hidden", "128", "--width", "128", "--layers", "2"]
    command = [expertd.command(), "synth", "--family", family, "--dtype", dtype, "--out", str(folder), *sizes]
    subprocess.run(command, check=True, capture_output=True)
    config = json.loads((folder / "config.json").read_text())
    config["head_dim"] = 32
    dequantised = {name: value for name, value in config.items() if name != "quantization_config"}
    quantised = config["quantization_config"]
    if dtype == "int4":
        quantised["ignore"].remove("re:.*self_attn.*")
    elif dtype == "int4-gptq":
        quantised["dynamic"]["-:.*self_attn.*"] = {}
        # vLLM knows no other ones. The service reads the zero points.
        quantised["sym"] = True
    else:
        # AWQ's rule is part of a name, FP8's the whole name.
        parts = ["mlp.gate", *(f"self_attn.{part}_proj" for part in "qkvo")]
        names = [f"model.layers.{n}.{part}" for n in range(2) for part in parts]
        quantised.setdefault("modules_to_not_convert", []).extend(["self_attn", *names])
    (folder / "config.json").write_text(json.dumps(config))
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(dequantised))

    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(plain), dtype=torch.bfloat16)
    found = load_file(folder / "model.safetensors")
    rest, stored = {}, dict(found)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            continue
        spread = 1.5 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        tensor = torch.ones_like(parameter) if name.endswith("norm.weight") else torch.randn_like(parameter) * spread
        if name in found:
            rest[name] = found[name]
        elif dtype == "int4" and name.endswith("_proj.weight"):
            tensors, rest[name] = packed(tensor)
            stored.update({name.replace("weight", kind): part for kind, part in tensors.items()})
        else:
            rest[name] = stored[name] = tensor
    for path, tensors in ((plain, rest), (folder, stored)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors", {"format": "pt"})
